"""What a command line becomes, and how a stage ends."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from demyrl import command

CONFIG = """
from ml_collections import ConfigDict

def get_config(size="tiny"):
    if size != "tiny":
        raise ValueError(f"size is {size!r}: use tiny.")
    return ConfigDict(
        {
            "seed": 0,
            "end": "well",
            "shuffle": True,
            "rollout": {"slots": 8, "temperature": 1.0, "ladder": (16, 64), "after": None},
        }
    )
"""


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "made.py"
    path.write_text(CONFIG)
    return str(path)


@pytest.fixture
def parsed(config_file):
    """The config that a command line with these words gives."""

    def parse(*words):
        argv = ["stage", f"--config={config_file}:tiny", "--workdir=runs/x", *words]
        return command.parse(argv)[0]

    return parse


@pytest.fixture
def echo(config_file):
    """Runs the test stage in its own process."""

    def run(*words, **environment):
        stage = Path(__file__).parent / "echo_stage.py"
        return subprocess.run(
            [sys.executable, str(stage), f"--config={config_file}", *words],
            env={**os.environ, "PYTHONPATH": str(stage.parents[1]), **environment},
            capture_output=True,
            text=True,
        )

    return run


# What is accepted


def test_an_override_sets_the_value(parsed):
    assert parsed("--config.rollout.slots=64").rollout.slots == 64


def test_an_override_may_come_before_the_config(config_file):
    argv = ["stage", "--config.seed=3", "--workdir=x", "--config", config_file]
    assert command.parse(argv)[0].seed == 3


def test_a_whole_number_is_accepted_for_a_float(parsed):
    temperature = parsed("--config.rollout.temperature=1").rollout.temperature
    assert isinstance(temperature, float)


def test_a_tuple_is_read_from_the_command_line(parsed):
    assert parsed("--config.rollout.ladder=(8,16,32)").rollout.ladder == (8, 16, 32)


def test_the_workdir_is_the_one_named(config_file):
    assert command.parse(["s", f"--config={config_file}", "--workdir=runs/y"])[1] == Path("runs/y")


def test_the_default_config_is_used_when_none_is_named(config_file):
    config, _ = command.parse(["stage", "--workdir=x"], f"{config_file}:tiny")
    assert config.rollout.slots == 8


def test_a_parsed_config_is_locked(parsed):
    with pytest.raises(AttributeError):
        parsed().slotz = 3


# What is refused


@pytest.mark.parametrize(
    "word, message",
    [
        ("--config.rollout.slotz=4", "no key 'rollout.slotz'. Did you mean rollout.slots"),
        ("--config.rollot.slots=4", "no key 'rollot.slots'. Did you mean rollout.slots"),
        ("--config.slots=4", "no key 'slots'. Did you mean rollout.slots"),
        ("--config.rollout.slots=4.5", "rollout.slots=4.5 is not what rollout.slots takes, int"),
        ("--config.rollout.temperature=hot", "takes, float: write it like the config's 1.0"),
        ("--config.rollout.ladder=abc", "takes, tuple: write it like the config's (16, 64)"),
        ("--config.shuffle=perhaps", "takes, bool"),
        ("--config.rollout=4", "rollout is a section: set one of rollout."),
        ("--config.rollout.after=4", "rollout.after is None in"),
        ("--wrkdir=x", "Did you mean: workdir"),
        ("slots=4", "'slots=4' is not a flag"),
    ],
)
def test_a_wrong_word_is_refused_with_what_to_do(parsed, word, message):
    with pytest.raises(ValueError) as error:
        parsed(word)
    assert message in str(error.value)


def test_a_missing_workdir_is_refused(config_file):
    with pytest.raises(ValueError, match="no --workdir"):
        command.parse(["stage", f"--config={config_file}"])


def test_a_missing_config_is_refused():
    with pytest.raises(ValueError, match="no --config"):
        command.parse(["stage", "--workdir=x"])


def test_a_config_file_that_is_not_there_is_refused_by_name():
    with pytest.raises(ValueError, match="no config file 'configs/none.py'"):
        command.load_config("configs/none.py:tiny")


def test_a_config_that_refuses_its_size_says_so_in_its_own_words(config_file):
    with pytest.raises(ValueError, match="size is 'huge': use tiny"):
        command.load_config(f"{config_file}:huge")


# How a stage ends


def test_a_stage_that_returns_ends_with_0_and_loads_no_jax(echo):
    done = echo("--workdir=runs/x", "--config.rollout.slots=64")
    assert (done.returncode, done.stdout.split()[-2:]) == (0, ["runs/x", "False"])


def test_help_lists_the_keys_of_the_config(echo):
    done = echo("--help")
    assert done.returncode == 0 and "--config.rollout.slots=8" in done.stdout


def test_an_unknown_key_ends_with_2_and_no_traceback(echo):
    done = echo("--workdir=x", "--config.rollout.slotz=4")
    assert done.returncode == 2
    assert "Did you mean rollout.slots?" in done.stderr and "Traceback" not in done.stderr


def test_an_error_that_a_stage_raises_for_the_user_ends_with_2_and_no_traceback(echo):
    done = echo("--workdir=x", "--config.end=refused")
    assert done.returncode == 2
    assert done.stderr.startswith("slots is 3") and "Traceback" not in done.stderr


def test_the_traceback_of_a_refusal_is_shown_on_request(echo):
    done = echo("--workdir=x", "--config.end=refused", DEMYRL_TRACEBACK="1")
    assert "Traceback" in done.stderr


def test_an_error_that_nobody_raised_for_the_user_keeps_its_traceback(echo):
    done = echo("--workdir=x", "--config.end=broken")
    assert done.returncode == 1 and "Traceback" in done.stderr


def test_an_error_inside_jax_keeps_its_traceback(echo):
    done = echo("--workdir=x", "--config.end=broken in jax")
    assert done.returncode == 1 and "Traceback" in done.stderr


@pytest.mark.parametrize("end", ["interrupted", "terminated"])
def test_a_stopped_stage_ends_with_130_and_says_how_to_go_on(echo, end):
    done = echo("--workdir=x", f"--config.end={end}")
    assert done.returncode == 130
    assert "Run the same command again to go on." in done.stderr


# Sections of a config


@dataclasses.dataclass(frozen=True)
class Inner:
    sizes: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Outer:
    slots: int
    inner: Inner
    vocab: int = 0


def section(**changes):
    return ConfigDict({"slots": 8, "inner": {"sizes": [1, 2]}, **changes})


def test_a_section_becomes_a_frozen_hashable_dataclass():
    made = command.frozen(Outer, section(), vocab=7)
    assert hash(made) == hash(Outer(8, Inner((1, 2)), 7)) and made == Outer(8, Inner((1, 2)), 7)


def test_an_unknown_key_of_a_section_is_refused_with_a_suggestion():
    with pytest.raises(ValueError, match="Outer has no key 'slotz'. Did you mean slots"):
        command.frozen(Outer, section(slotz=3))


def test_a_missing_key_of_a_section_is_refused_by_name():
    with pytest.raises(ValueError, match="Outer needs slots"):
        command.frozen(Outer, {"inner": {"sizes": [1]}})


def test_equal_configs_have_equal_json():
    one = ConfigDict({"a": 1, "b": {"c": (1, 2), "d": 3}})
    other = ConfigDict({"b": {"d": 3, "c": (1, 2)}, "a": 1})
    assert command.config_json(one) == command.config_json(other)


def test_a_cache_folder_that_cannot_be_made_is_a_warning(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DEMYRL_CACHE", str(tmp_path / "file"))
    command.enable_compilation_cache()
    assert "compiled programs are not kept" in capsys.readouterr().err
