"""What the generated problems promise: they can be repeated, kept apart, solved and not guessed."""

import collections
import contextlib
import io
import re

import pytest

from demyrl.data.demonstrations import truth
from demyrl.data.families import cycles_late
from demyrl.data.generators import (
    FAMILIES,
    ProblemConfig,
    family_counts,
    shares,
    split_of,
    tasks,
)
from demyrl.rewards.grade import GRADERS, judge

ALL = ProblemConfig(families=tuple(FAMILIES), digits=2, terms=3)


def printed(program: str) -> str | None:
    """What a program prints; None when it raises."""
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            exec(compile(program, "program", "exec"), {})
    except Exception:
        return None
    return output.getvalue().strip()


def alone(family: str, digits: int = 2, terms: int = 3) -> ProblemConfig:
    return ProblemConfig(families=(family,), digits=digits, terms=terms)


def test_the_same_seed_gives_the_same_problems():
    assert tasks(ALL, "train", 60, seed=3) == tasks(ALL, "train", 60, seed=3)


def test_another_seed_gives_other_problems():
    assert tasks(ALL, "train", 60, seed=3) != tasks(ALL, "train", 60, seed=4)


def test_problems_are_the_same_on_every_machine():
    first = tasks(alone("arithmetic"), "train", 1, seed=0)[0].problem
    assert (first.id, first.prompt) == ("arithmetic-840a8576e489", "Work out 22*54-90.")


def test_train_and_eval_share_no_problem_in_any_wording():
    train = {task.program for seed in (0, 1) for task in tasks(ALL, "train", 1500, seed)}
    held_out = {task.program for seed in (0, 2) for task in tasks(ALL, "eval", 400, seed)}
    assert not train & held_out


def test_one_problem_in_eight_is_held_out():
    held_out = sum(split_of("lcm", str(key)) == "eval" for key in range(4000))
    assert 400 < held_out < 600


def test_ids_are_unique():
    found = tasks(ALL, "train", 1500, seed=0)
    assert len({task.problem.id for task in found}) == 1500


def test_a_problem_does_not_come_twice_in_two_wordings():
    found = tasks(alone("kinetic_energy"), "train", 3000, seed=0)
    assert len({task.program for task in found}) == 3000


def test_domains_differ_by_at_most_one_problem():
    found = tasks(ALL, "train", 100, seed=0)
    counts = collections.Counter(task.problem.domain for task in found)
    assert sorted(counts.values()) == [33, 33, 34]


def test_families_of_a_domain_share_its_problems_evenly():
    assert family_counts(("lcm", "seconds", "power_mod"), 9) == {
        "lcm": 3,
        "power_mod": 2,
        "seconds": 4,
    }


def test_shares_add_up_to_the_count():
    assert shares(11, 4) == [3, 3, 3, 2]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("digits", [2, 3])
def test_the_right_program_prints_an_answer_that_is_graded_correct(family, digits):
    for task in tasks(alone(family, digits, terms=4), "train", 30, seed=1):
        assert judge(task.problem, f"\\boxed{{{printed(task.program)}}}") == "correct"


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_teacher_states_is_graded_correct(family):
    for task in tasks(alone(family), "train", 30, seed=1):
        assert judge(task.problem, f"\\boxed{{{truth(task)}}}") == "correct"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_two_slips_print_nothing_and_the_others_print_something(family):
    for task in tasks(alone(family), "train", 20, seed=2):
        assert [bool(printed(slip)) for slip in task.slips] == [False, False, True, True]


@pytest.mark.parametrize("family", FAMILIES)
def test_slips_seldom_print_the_right_answer(family):
    lucky = [
        judge(task.problem, f"\\boxed{{{printed(slip)}}}") == "correct"
        for task in tasks(alone(family), "train", 100, seed=2)
        for slip in task.slips
    ]
    assert sum(lucky) < 0.1 * len(lucky)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_constant_answer_is_right_for_three_problems_in_a_hundred(family):
    found = tasks(alone(family), "train", 1000, seed=0)
    most = collections.Counter(task.problem.answer for task in found).most_common(1)[0][1]
    assert most < 30


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_show_only_two_digit_numbers(family):
    for task in tasks(alone(family), "train", 100, seed=0):
        numbers = re.findall(r"\d+", task.problem.prompt)
        assert all(10 <= int(number) <= 99 for number in numbers)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_have_several_wordings(family):
    masked = {
        re.sub(r"\d+", "#", task.problem.prompt) for task in tasks(alone(family), "train", 40, 0)
    }
    assert len(masked) >= 2


def test_graders_named_by_problems_exist():
    assert {task.problem.grader for task in tasks(ALL, "train", 60, 0)} <= set(GRADERS)


def test_terms_set_the_number_of_operands():
    prompt = tasks(alone("arithmetic", terms=5), "train", 1, seed=0)[0].problem.prompt
    assert len(re.findall(r"\d+", prompt)) == 5


def test_digits_set_the_size_of_operands():
    prompt = tasks(alone("momentum", digits=4), "train", 1, seed=0)[0].problem.prompt
    assert {len(number) for number in re.findall(r"\d+", prompt)} == {4}


def test_three_has_a_long_cycle_modulo_53_and_ten_a_short_one():
    assert cycles_late(1, 3, 53) and not cycles_late(1, 10, 53)


def test_a_family_with_too_few_problems_says_how_many_it_has():
    with pytest.raises(ValueError, match=r"'lcm' gave only \d{4} different train problems of the"):
        tasks(alone("lcm"), "train", 5000, seed=0)


def test_an_unknown_family_is_named():
    with pytest.raises(ValueError, match="'tensors'"):
        tasks(alone("tensors"), "train", 1, seed=0)


def test_a_family_named_twice_is_refused():
    with pytest.raises(ValueError, match="once"):
        tasks(ProblemConfig(("lcm", "lcm"), 2, 3), "train", 1, seed=0)


@pytest.mark.parametrize(
    ("digits", "terms", "split", "count", "message"),
    [
        (1, 3, "train", 1, "digits is 1"),
        (2, 2, "train", 1, "terms is 2"),
        (2, 3, "test", 1, "split is 'test'"),
        (2, 3, "train", -1, "count is -1"),
    ],
)
def test_sizes_out_of_range_are_named(digits, terms, split, count, message):
    with pytest.raises(ValueError, match=message):
        tasks(alone("lcm", digits, terms), split, count, seed=0)
