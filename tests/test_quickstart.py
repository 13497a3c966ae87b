import json

import pytest

from experiments import quickstart


@pytest.fixture
def ran(monkeypatch):
    """The commands that were run; each ends with the next of `ran.codes`, 0 when there is none."""

    class Ran(list):
        codes: list = []

    ran = Ran()

    def run_child(words):
        ran.append(words)
        return ran.codes.pop(0) if ran.codes else 0

    monkeypatch.setattr(quickstart, "run_child", run_child)
    return ran


def test_a_stage_that_finished_with_the_same_command_is_not_run_again(ran, tmp_path):
    quickstart.run_stage("sft", ["-m", "x"], tmp_path)
    quickstart.run_stage("sft", ["-m", "x"], tmp_path)
    assert ran == [["-m", "x"]]


def test_a_stage_with_another_command_is_run(ran, tmp_path):
    quickstart.run_stage("sft", ["-m", "x"], tmp_path)
    quickstart.run_stage("sft", ["-m", "x", "--more"], tmp_path)
    assert len(ran) == 2


def test_the_seconds_of_a_stage_count_all_its_starts(ran, tmp_path):
    (tmp_path / "sft").mkdir()
    mark = {"command": ["-m", "x"], "seconds": 100.0, "finished": False}
    (tmp_path / "sft" / "stage.json").write_text(json.dumps(mark))
    assert 100.0 <= quickstart.run_stage("sft", ["-m", "x"], tmp_path) < 110.0


def test_a_stage_that_fails_ends_the_quickstart_with_its_code(ran, tmp_path, capsys):
    ran.codes = [3]
    with pytest.raises(SystemExit) as stopped:
        quickstart.run_stage("sft", ["-m", "x"], tmp_path)
    assert stopped.value.code == 3
    assert "The same command again goes on there" in capsys.readouterr().out


def test_the_run_of_another_seed_is_moved_aside_not_deleted(tmp_path):
    root = tmp_path / "quickstart"
    quickstart.make_room(root, 0)
    (root / "summary.json").write_text("{}")
    quickstart.make_room(root, 1)
    (aside,) = tmp_path.glob("quickstart_seed0_*")
    assert (aside / "summary.json").exists() and not (root / "summary.json").exists()


def test_every_stage_gets_the_seed_and_the_changes(tmp_path):
    commands = quickstart.stages(tmp_path, 3, ["train.steps=4"])
    for words in commands.values():
        assert "--config.seed=3" in words and "--config.train.steps=4" in words


def test_every_command_of_the_quickstart_is_understood(tmp_path):
    from demyrl import command, recipe

    for words in quickstart.stages(tmp_path, 3, []).values():
        config, _ = command.parse(words[1:])
        if str(tmp_path) in config.model.source:  # an earlier stage's, which has not run here
            config.model.source = "builtin:tiny"
        assert recipe.read(config).seed == 3
