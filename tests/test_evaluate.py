"""Evaluating and selecting through the stages, with the weights that ship."""

import json

import pytest

from demyrl.data.generators import tasks
from demyrl.data.problems import read_problems, write_problems
from demyrl.evaluate import eval_problems, evaluate
from demyrl.logs import read_rows
from demyrl.recipe import read
from demyrl.select_problems import candidates, difficulty, pass_rates, select_problems
from demyrl.train import Rl, totals, train
from demyrl.types import Reward
from tests.tiny import shrunk_config

SMALL = {"problems__eval_count": 3, "evaluate__samples": 2}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with three evaluations: with the tool, without it, and with a thought put first."""
    root = tmp_path_factory.mktemp("evaluations")
    kinds = {
        "plain": {},
        "no_tool": {"tools__enabled": False},
        "direct": {"evaluate__reply_start": "<think>\nEasy.\n</think>\n"},
    }
    for name, changes in kinds.items():
        evaluate(shrunk_config(**SMALL, **changes), root / name)
    return root


def rollouts(folder):
    return [row for path in (folder / "rollouts").glob("*.jsonl") for row in read_rows(path)]


def test_an_evaluation_counts_every_sample_of_every_problem(root):
    content = json.loads((root / "plain" / "evaluation.json").read_text())
    assert content["domains"]["all"]["samples"] == 6
    assert {row["sample"] for row in content["rows"]} == {0, 1}


def test_with_the_tool_off_no_call_runs(root):
    results = [result for row in rollouts(root / "no_tool") for result in row["results"]]
    assert all(result["status"] in ("not_executed", "malformed") for result in results)


def test_with_and_without_the_tool_the_prompts_are_the_same(root):
    plain, off = rollouts(root / "plain"), rollouts(root / "no_tool")
    prompts = [[row["tokens"][: row["prompt_len"]] for row in rows] for rows in (plain, off)]
    assert prompts[0] == prompts[1]


def test_a_reply_start_ends_the_prompt_and_is_not_sampled(root):
    for row in rollouts(root / "direct"):
        assert row["pieces"][0]["kind"] == "prompt"
        assert row["pieces"][0]["text"].endswith("<think>\nEasy.\n</think>\n")


def test_the_held_out_problems_do_not_depend_on_the_seed():
    a, b = (eval_problems(read(shrunk_config(seed=seed))) for seed in (0, 1))
    assert a == b


def test_candidates_are_training_problems_other_than_those_demonstrated():
    settings = read(shrunk_config(select__problems=60))
    chosen = {problem.id for problem in candidates(settings)}
    shown = {t.problem.id for t in tasks(settings.problems, "train", 60, settings.seed)}
    held_out = {problem.id for problem in eval_problems(settings)}
    assert len(chosen - shown) > 50
    assert not chosen & held_out


def test_the_pass_rate_is_the_share_of_right_samples():
    rows = [("a", True), ("a", False), ("b", False), ("b", False), ("a", True), ("a", True)]
    verdicts = [{"problem_id": name, "graded": True, "correct": right} for name, right in rows]
    verdicts.append({"problem_id": "a", "graded": False, "correct": False})
    assert pass_rates(verdicts) == {"a": 0.75, "b": 0.0}


@pytest.mark.parametrize(
    "rate, name",
    [(0, "never"), (0.25, "hard"), (0.5, "medium"), (0.75, "easy"), (1, "always")],
)
def test_difficulty_is_the_papers(rate, name):
    assert difficulty(rate) == name


def test_a_pool_smaller_than_a_step_is_refused(tmp_path):
    config = shrunk_config(select__problems=4, select__samples=1)
    with pytest.raises(ValueError, match="0 of 4 problems have a pass rate between 0 and 1"):
        select_problems(config, tmp_path / "select")


def test_training_takes_the_problems_of_the_pool(tmp_path):
    from demyrl.train import training_problems

    pool = [t.problem for t in tasks(read(shrunk_config()).problems, "train", 5, 3)]
    write_problems(tmp_path / "pool.jsonl", pool)
    settings = read(shrunk_config(train__pool=str(tmp_path / "pool.jsonl")))
    assert training_problems(settings) == pool == read_problems(tmp_path / "pool.jsonl")


def test_a_run_whose_sampler_and_trainer_disagree_does_not_start(tmp_path, monkeypatch):
    score = Rl.score
    monkeypatch.setattr(Rl, "score", lambda self, ts: score(self, [shifted(t) for t in ts]))
    with pytest.raises(RuntimeError, match=r"disagree .* 5.0\de-01 nats .* allows 1.00e-04"):
        train(shrunk_config(train__steps=1), tmp_path / "rl")


def test_in_bfloat16_the_gap_is_told_and_stops_nothing(tmp_path):
    train(shrunk_config(train__steps=1, model__dtype="bfloat16"), tmp_path / "rl")
    (numbers,) = read_rows(tmp_path / "rl" / "metrics.jsonl")
    assert 1e-4 < numbers["policy/sampler_gap"] < 0.1


def shifted(trajectory):
    import dataclasses

    return dataclasses.replace(trajectory, logprobs=trajectory.logprobs + 0.5)


def test_a_reward_that_is_not_a_number_counts_as_ungraded():
    rewards = [Reward(1.0), Reward(None), Reward(1.0, overlong=float("nan")), Reward(-1.0)]
    assert str(totals(rewards, 2).tolist()) == "[[1.0, nan], [nan, -1.0]]"


def test_a_workdir_of_another_config_is_refused(root):
    with pytest.raises(ValueError, match="evaluate.samples is 2 there, 4 here"):
        evaluate(shrunk_config(problems__eval_count=3, evaluate__samples=4), root / "plain")
