"""Experiments are data that fits its base, and the launcher runs all of it once."""

import json
from pathlib import Path

import pytest

from demyrl import command, recipe
from experiments import launch

NAMES = launch.names_there()
RUNS_OF_LADDER = 4 * 2  # variants x seeds in `launched`


def made(variants):
    return launch.Experiment("made", "A question?", "configs/grpo_tcr.py:tiny", variants)


def runs_of(experiment, common=()):
    return launch.runs_of(experiment, Path("runs/x"), [0], dict(common))


class FakeRunner:
    """Leaves what a stage leaves, without the work; fails in the workdir called `broken`."""

    def __init__(self, broken=None):
        self.workdirs, self.broken = [], broken

    def __call__(self, words):
        workdir = Path(words[-1].removeprefix("--workdir="))
        self.workdirs.append(workdir)
        if workdir.name == self.broken:
            return 7
        seed = next(int(word.rpartition("=")[2]) for word in words if "config.seed=" in word)
        leave = training if "demyrl.train" in words else evaluation
        leave(workdir, seed)
        return 0


def training(workdir, seed):
    """Ten steps whose every metric is the step, plus the seed."""
    workdir.mkdir(parents=True, exist_ok=True)
    rows = [{"step": step, **dict.fromkeys(launch.FIGURES, step + seed)} for step in range(10)]
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def evaluation(workdir, seed):
    """Every number is a half, plus a quarter for each seed."""
    workdir.mkdir(parents=True, exist_ok=True)
    names = ("avg_at_k", "pass_at_k", "maj_at_k", "call_share")
    overall = {name: {"value": 0.5 + seed / 4} for name in names}
    (workdir / "evaluation.json").write_text(json.dumps({"k": 8, "domains": {"all": overall}}))


@pytest.fixture
def base_run(tmp_path):
    """A finished quickstart, as far as the launcher looks into it."""
    for name in ("sft", "select"):
        (tmp_path / "base" / name).mkdir(parents=True)
    (tmp_path / "base" / "select" / "pool.jsonl").write_text("")
    evaluation(tmp_path / "base" / "eval_sft", -1)
    return tmp_path / "base"


@pytest.fixture
def launched(base_run, tmp_path):
    """Launches the recipe ladder with two seeds; the folder it is in."""

    def run(runner, *words):
        where = [f"--base-run={base_run}", f"--workdir={tmp_path / 'out'}"]
        options = launch.options_of(["recipe_ladder", "--run", "--seeds=2", *where, *words])
        launch.launch(options, runner)
        return tmp_path / "out"

    return run


# Every experiment


@pytest.mark.parametrize("name", NAMES)
def test_every_variant_fits_the_base(name):
    for run in runs_of(launch.load(name)):
        recipe.read(command.parse(["demyrl.train", *run.train[2:]])[0])


@pytest.mark.parametrize("name", NAMES)
def test_one_variant_is_the_base_itself(name):
    assert {} in launch.load(name).variants.values()


@pytest.mark.parametrize("name", NAMES)
def test_the_header_says_what_is_expected_and_what_came_out(name):
    about = launch.load(name).about
    assert [word for word in ("Expect ", "Cost ", "Result ") if word not in about] == []


@pytest.mark.parametrize("name", NAMES)
def test_the_readme_has_a_line_for_it(name):
    assert f"`{name}.py`" in (Path(launch.__file__).parent / "README.md").read_text()


def test_each_rung_of_the_ladder_drops_one_change():
    rungs = [set(changes.items()) for changes in launch.load("recipe_ladder").variants.values()]
    assert [len(above - below) for above, below in zip(rungs, rungs[1:], strict=False)] == [1, 1, 1]


# What the launcher refuses


def test_an_unknown_experiment_is_answered_with_those_there_are():
    with pytest.raises(ValueError, match="there are clip_high, .*recipe_ladder"):
        launch.load("recipe_lader")


def test_a_variant_with_an_unknown_key_is_refused():
    with pytest.raises(ValueError, match="no key 'loss.clip_hi'. Did you mean loss.clip_high"):
        runs_of(made({"wrong": {"loss.clip_hi": 0.3}}))


def test_a_variant_with_a_value_of_another_type_is_refused():
    with pytest.raises(ValueError, match="clip_high=wide is not what loss.clip_high takes"):
        runs_of(made({"wrong": {"loss.clip_high": "wide"}}))


def test_what_the_experiment_varies_cannot_be_set_for_all():
    with pytest.raises(ValueError, match="loss.clip_high can't be the same in all runs"):
        runs_of(made({"a": {"loss.clip_high": 0.3}}), {"loss.clip_high": "0.2"})


def test_without_a_quickstart_the_message_says_to_run_it(launched, base_run):
    (base_run / "select" / "pool.jsonl").unlink()
    with pytest.raises(ValueError, match="pool.jsonl, which is not there: run `make quickstart`"):
        launched(FakeRunner())


# What it runs


def test_the_dry_run_prints_every_command_and_runs_none(capsys, tmp_path):
    runner, out = FakeRunner(), tmp_path / "out"
    options = launch.options_of(["recipe_ladder", "--seeds=2", f"--workdir={out}"])
    launch.launch(options, runner)
    lines = capsys.readouterr().out.splitlines()
    printed = {line.rpartition("=")[2] for line in lines if line.startswith("python -m demyrl.")}
    folders = ("seed0", "seed0_eval", "seed1", "seed1_eval")
    variants = launch.load("recipe_ladder").variants
    assert printed == {f"{out}/{variant}/{folder}" for variant in variants for folder in folders}
    assert runner.workdirs == []


def test_each_run_is_evaluated_right_after_its_training(launched):
    runner = FakeRunner()
    out = launched(runner)
    assert runner.workdirs[:3] == [
        out / "grpo" / "seed0",
        out / "grpo" / "seed0_eval",
        out / "+T" / "seed0",
    ]


def test_the_trained_model_is_what_is_evaluated():
    (run,) = runs_of(made({"a": {}}))
    assert f"--config.model.source={run.workdir}" in run.evaluate


def test_settings_for_all_runs_reach_training_and_evaluation():
    (run,) = runs_of(made({"a": {}}), {"train.steps": 3})
    assert all("--config.train.steps=3" in words for words in (run.train, run.evaluate))


def test_what_has_finished_is_not_run_again(launched):
    launched(FakeRunner())
    again = FakeRunner()
    launched(again)
    assert again.workdirs == []


def test_a_finished_run_is_run_again_when_its_command_is_another(launched):
    launched(FakeRunner())
    again = FakeRunner()
    launched(again, "--steps=3")
    assert len(again.workdirs) == 2 * RUNS_OF_LADDER


def test_a_run_that_fails_stops_the_launch_and_goes_on_there(launched):
    with pytest.raises(RuntimeError, match="seed1 ended with exit code 7"):
        launched(FakeRunner(broken="seed1"))
    again = FakeRunner()
    launched(again)
    assert again.workdirs[0].parts[-2:] == ("grpo", "seed1")


# What comes out


def test_the_summary_has_mean_least_and_most_over_the_seeds(launched):
    summary = json.loads((launched(FakeRunner()) / "summary.json").read_text())
    expected = {"mean": 0.625, "min": 0.5, "max": 0.75, "seeds": [0.5, 0.75]}
    assert summary["variants"]["+T"]["avg@8"] == expected


def test_the_end_of_training_is_the_mean_of_the_last_five_steps(tmp_path):
    training(tmp_path, seed=1)
    assert launch.end_of_training(tmp_path)["policy/entropy"] == 8.0  # (6 + ... + 10) / 5


def test_the_summary_says_what_the_runs_started_from(launched):
    summary = json.loads((launched(FakeRunner()) / "summary.json").read_text())
    assert summary["start"] == {"avg@8": 0.25, "pass@8": 0.25, "call_share": 0.25}


def test_a_figure_of_each_metric_is_drawn(launched):
    out = launched(FakeRunner())
    names = {path.name for path in out.glob("*.png")}
    assert names == {"avg_at_g.png", "entropy.png", "response_tokens.png"}
