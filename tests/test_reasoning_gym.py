"""Problems of reasoning-gym keep their verifier, and nothing a policy writes runs or stops it."""

import importlib.metadata
import importlib.util
import inspect
import json
import sys
import time
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from demyrl.data import reasoning_gym as gym
from demyrl.data.problems import read_problems, write_problems
from demyrl.rewards.boxed import last_boxed
from demyrl.rewards.grade import judge, vote_of
from demyrl.rewards.reasoning_gym_answer import grade_reasoning_gym
from demyrl.types import Problem

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed"
)

SMALL = {"basic_arithmetic": {"min_terms": 2, "max_terms": 2}, "gcd": {}}
RUNS_CODE = {"eval", "exec", "compile", "__import__", "parse_expr", "sympify", "literal_eval"}


def answer_json(answer, dataset="basic_arithmetic", metadata=None, **chosen) -> str:
    kept = {"answer": answer, "dataset": dataset, "settings": chosen, "metadata": metadata or {}}
    return json.dumps(kept)


def problem(answer: str) -> Problem:
    return Problem("p-1", "reasoning_gym/x", "math", "What is it?", answer, "reasoning_gym")


def box(text: str) -> str:
    return f"So it is \\boxed{{{text}}}."


# Without the package


def test_without_the_package_the_message_has_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match=r"pip install reasoning-gym==\d"):
        gym.require_reasoning_gym()


def test_without_the_package_a_file_with_its_problems_is_refused_when_read(monkeypatch, tmp_path):
    write_problems(tmp_path / "p.jsonl", [problem(answer_json("36"))])
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match="pip install reasoning-gym"):
        read_problems(tmp_path / "p.jsonl")


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", types.ModuleType("reasoning_gym"))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.9.9")
    with pytest.raises(ValueError, match="reasoning-gym is 0.9.9"):
        gym.require_reasoning_gym()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("countdown", "runs the reply as Python code"),
        ("bitwise_arithmetic", "runs text of the problem file"),
        ("complex_arithmetic", "nan for every number"),
        ("chess", "there is no dataset 'chess': choose from ab, "),
    ],
)
def test_a_dataset_that_is_not_used_says_why(name, reason):
    with pytest.raises(ValueError, match=reason):
        gym.check_dataset(name)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("36", "is not an object with answer, dataset, metadata, settings"),
        ("x = 1", "is not JSON"),
        (answer_json("1", "n_queens"), "'n_queens' is refused"),
        (answer_json("1", ["gcd"]), "there is no dataset"),
    ],
)
def test_an_answer_that_cannot_be_judged_says_what_is_wrong(answer, message):
    with pytest.raises(ValueError, match=message):
        gym.read_answer(answer)


@pytest.mark.parametrize("text", ["", "{", "}{", "\\\\{", "a\\"])
def test_an_answer_that_no_box_can_hold_is_found(text):
    assert not gym.boxable(text)


@settings(max_examples=200)
@given(st.text(alphabet="{}\\a 7"))
def test_what_is_boxable_comes_back_whole_out_of_its_box(text):
    text = text.strip()
    assert not gym.boxable(text) or last_boxed(box(text)) == text


def test_settings_are_json_or_text():
    chosen = gym.settings_of("a, b", ["a.n=2", "a.ops=[1]", "b.style=simple"])
    assert chosen == {"a": {"n": 2, "ops": [1]}, "b": {"style": "simple"}}


@pytest.mark.parametrize("assignment", ["a=2", "a.n", "c.n=2"])
def test_an_assignment_of_another_form_is_refused(assignment):
    with pytest.raises(ValueError, match="expected DATASET.SETTING=VALUE"):
        gym.settings_of("a,b", [assignment])


def test_a_dataset_named_twice_is_refused():
    with pytest.raises(ValueError, match="name each dataset once"):
        gym.settings_of("gcd,gcd", [])


@needs_package
def test_a_file_with_a_problem_that_cannot_be_judged_is_refused_when_read(tmp_path):
    write_problems(tmp_path / "p.jsonl", [problem(answer_json("36", terms=2))])
    with pytest.raises(ValueError, match=r"p\.jsonl, problem 'p-1': .* no setting 'terms'"):
        read_problems(tmp_path / "p.jsonl")


# What is drawn


@needs_package
def test_every_dataset_of_the_package_is_either_used_or_refused():
    from reasoning_gym.factory import DATASETS

    assert sorted([*gym.DOMAINS, *gym.REFUSED]) == sorted(DATASETS)


@needs_package
def test_the_same_seed_gives_the_same_problems_and_another_seed_others():
    first, second = gym.gym_problems(SMALL, "train", 20, 0), gym.gym_problems(SMALL, "train", 20, 0)
    assert first == second
    assert not set(first) & set(gym.gym_problems(SMALL, "train", 20, 1))


@needs_package
def test_train_and_eval_share_no_question_whatever_the_seed():
    train = {p.prompt for seed in range(3) for p in gym.gym_problems(SMALL, "train", 200, seed)}
    held_out = {p.prompt for p in gym.gym_problems(SMALL, "eval", 60, 0)}
    assert len(held_out) == 60 and not train & held_out


@needs_package
def test_problems_are_shared_out_evenly_and_differ():
    found = gym.gym_problems(SMALL, "train", 41, 0)
    sources = [p.source for p in found]
    assert sources.count("reasoning_gym/basic_arithmetic") == 21
    assert len({p.prompt for p in found}) == len({p.id for p in found}) == 41


@needs_package
def test_settings_reach_the_questions():
    chosen = {"gcd": {"min_numbers": 3, "max_numbers": 3}}
    assert all(p.prompt.count(",") == 2 for p in gym.gym_problems(chosen, "train", 10, 0))


@needs_package
@pytest.mark.parametrize(
    ("chosen", "count", "message"),
    [
        ({"gcd": {"terms": 2}}, 5, "has no setting 'terms': it has min_numbers"),
        ({"gcd": {"seed": 2}}, 5, "has no setting 'seed'"),
        ({"gcd": {"min_numbers": 9}}, 5, "cannot be had with {'min_numbers': 9}"),
        ({"gcd": {"min_numbers": "x"}}, 5, "cannot be had with {'min_numbers': 'x'}"),
        ({"gcd": {"max_numbers": 2, "max_value": 2}}, 50, "'gcd' gave only . different train"),
        ({"gcd": {}}, 0, "count is 0"),
        ({}, 5, r"datasets are \[\]"),
    ],
)
def test_what_cannot_be_drawn_is_refused(chosen, count, message):
    with pytest.raises(ValueError, match=message):
        gym.gym_problems(chosen, "train", count, 0)


@needs_package
def test_a_dataset_whose_scorer_accepts_nonsense_is_refused_when_drawn(monkeypatch):
    monkeypatch.delitem(gym.REFUSED, "complex_arithmetic")
    monkeypatch.setitem(gym.DOMAINS, "complex_arithmetic", "math")
    with pytest.raises(ValueError, match="its scorer accepts 'nan'"):
        gym.gym_problems({"complex_arithmetic": {}}, "train", 3, 0)


@needs_package
@pytest.mark.parametrize(
    ("name", "own", "metadata"),
    [
        ("gcd", "", {}),
        ("gcd", None, {}),
        ("gcd", "}", {}),
        ("products", "6", {"operands": {2, 3}}),
        ("products", "6", {"ratio": float("nan")}),
        ("number_format", "7", {"solution": 8.0}),
    ],
)
def test_an_entry_that_cannot_be_kept_or_answered_is_passed_over(name, own, metadata):
    assert gym.answer_of(name, {}, {"answer": own, "metadata": metadata}) is None


@needs_package
def test_a_written_file_is_read_back(tmp_path, monkeypatch, capsys):
    out = tmp_path / "p.jsonl"
    words = ["--datasets", "gcd,spell_backward,bf", "--count", "6", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["reasoning_gym", *words, "--set", "gcd.max_value=90"])
    gym.main()
    assert {p.domain for p in read_problems(out)} == {"math", "science", "code"}
    assert "6 train problems" in capsys.readouterr().out


@needs_package
def test_misuse_of_the_command_line_ends_in_a_message_and_code_2(tmp_path, monkeypatch, capsys):
    words = ["--datasets", "puzzle24", "--count", "6", "--out", str(tmp_path / "p.jsonl")]
    monkeypatch.setattr(sys, "argv", ["reasoning_gym", *words])
    with pytest.raises(SystemExit, match="2"):
        gym.main()
    assert "'puzzle24' is refused: its scorer runs the reply" in capsys.readouterr().err


# How it is judged


def names_reached(function, owner, seen) -> set[str]:
    """Every name in a function and in what it calls of its class and module."""
    if function in seen:
        return set()
    seen.add(function)
    names = set(function.__code__.co_names)
    module = sys.modules[function.__module__]
    for name in names.copy():
        called = inspect.unwrap(getattr(owner, name, getattr(module, name, None)) or len)
        if inspect.isfunction(called) and called.__module__.startswith("reasoning_gym."):
            names |= names_reached(called, owner, seen)
    return names


def runs_code(name) -> bool:
    from reasoning_gym.factory import DATASETS

    owner = DATASETS[name][0]
    return bool(RUNS_CODE & names_reached(owner.score_answer, owner, set()))


@needs_package
def test_no_scorer_in_use_runs_text_as_code():
    assert [name for name in gym.DOMAINS if runs_code(name)] == []


@needs_package
def test_a_scorer_that_runs_text_as_code_would_be_found():
    ours = [name for name, why in gym.REFUSED.items() if why in (gym.RUNS_REPLY, gym.RUNS_FILE)]
    assert len(ours) == 11 and all(map(runs_code, ours))


@needs_package
def test_the_packages_own_answer_is_correct_and_another_is_wrong():
    for p in gym.gym_problems({name: {} for name in ("gcd", "sudoku", "bf")}, "train", 3, 0):
        own = json.loads(p.answer)["answer"]
        assert judge(p, box(own)) == "correct"
        assert judge(p, box(own + "7")) == "wrong"
        assert judge(p, own) == "no_answer"


@needs_package
def test_a_part_of_the_score_is_wrong():
    answer = answer_json("abcd", "spell_backward")
    scorer = gym.scorer("spell_backward", "{}")
    assert scorer.score_answer("abcx", json.loads(answer)) == 0.75
    assert grade_reasoning_gym(answer, box("abcx")) == "wrong"


@needs_package
def test_the_scorer_has_the_settings_of_the_problem():
    coarse = answer_json("1.0", "decimal_arithmetic", max_num_decimal_places=3)
    fine = answer_json("1.0", "decimal_arithmetic", max_num_decimal_places=6)
    assert grade_reasoning_gym(coarse, box("1.0005")) == "correct"
    assert grade_reasoning_gym(fine, box("1.0005")) == "wrong"


@needs_package
def test_a_reply_that_the_scorer_stumbles_over_is_wrong():
    answer = answer_json("2 × 3", "prime_factorization")
    with pytest.raises(ValueError):
        gym.scorer("prime_factorization", "{}").score_answer("two", json.loads(answer))
    assert grade_reasoning_gym(answer, box("two")) == "wrong"


@needs_package
def test_a_scorer_that_fails_on_its_own_answer_is_not_the_replys_fault():
    with pytest.raises(KeyError):
        grade_reasoning_gym(answer_json("[[1]]", "palindrome_generation"), box("aa"))


@needs_package
@pytest.mark.parametrize("name", ["gcd", "power_function", "game_of_life", "tower_of_hanoi"])
@pytest.mark.parametrize("text", ["9" * 10**6, "1e999999999", "[" * 7000, "9:" * 3500])
def test_no_reply_stops_the_grader(name, text):
    (p,) = gym.gym_problems({name: {}}, "train", 1, 0)
    start = time.process_time()
    assert judge(p, box(text)) == "wrong"
    assert time.process_time() - start < 0.5


@needs_package
def test_a_reply_longer_than_any_answer_is_wrong():
    answer = answer_json("8", "gsm_symbolic")
    assert grade_reasoning_gym(answer, box("8 apples")) == "correct"
    assert grade_reasoning_gym(answer, box("8" + " apples" * 2000)) == "wrong"


@needs_package
@settings(max_examples=50, deadline=None)
@given(st.text())
def test_no_text_raises(text):
    verdict = grade_reasoning_gym(answer_json("8", "lcm"), box(text))
    assert verdict in ("correct", "wrong", "no_answer")


def test_a_reply_votes_with_what_its_box_holds():
    assert vote_of(problem(answer_json("36")), box(" 3 6 ")) == "36"
