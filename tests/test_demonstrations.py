"""The scripted teacher: it believes its tool, errs as often as it should and repeats itself."""

import random

import pytest

from demyrl.data.demonstrations import PLANS, TOOL, Habits, demonstrate, guess, stitch
from demyrl.data.generators import FAMILIES, ProblemConfig, Task, tasks
from demyrl.rewards.grade import judge
from demyrl.types import Message, Problem, ToolResult

NEAT = Habits(head_guess=0, slip=0, recover=0, double_check=0)
TASK = Task(
    Problem("p", "arithmetic", "math", "What is 12*34?", "408", "number"),
    program="print(12*34)",
    slips=("x=12*34",),
)
FAILED = ToolResult("error", "NameError: x")


def play(episode, results) -> tuple[list[str], list[Message]]:
    """The programs an episode runs when the tool says `results`, and the conversation."""
    programs, answer, results = [], None, list(results)
    while True:
        try:
            call = episode.send(answer)
        except StopIteration as finished:
            assert not results
            return programs, finished.value
        programs.append(call.arguments["code"])
        answer = results.pop(0)


def boxed(text: str) -> str:
    return f"\\boxed{{{text}}}"


def test_an_episode_asks_calls_reads_and_answers():
    _, messages = play(demonstrate(TASK, random.Random(0), NEAT), [ToolResult("ok", "408\n")])
    assert [message.role for message in messages] == ["user", "assistant", "tool", "assistant"]


def test_the_call_names_the_tool_and_holds_the_program():
    _, messages = play(demonstrate(TASK, random.Random(0), NEAT), [ToolResult("ok", "408\n")])
    call = messages[1].calls[0]
    assert (call.name, call.arguments) == (TOOL, {"code": "print(12*34)"})


def test_the_tool_turn_holds_the_output_unchanged():
    _, messages = play(demonstrate(TASK, random.Random(0), NEAT), [ToolResult("ok", " 408\n")])
    assert messages[2].text == " 408\n"


def test_the_answer_is_what_the_tool_said_even_when_it_is_wrong():
    _, messages = play(demonstrate(TASK, random.Random(0), NEAT), [ToolResult("ok", "17\n")])
    assert messages[-1].text.endswith(f"</think>\n{boxed('17')}")


def test_a_head_guess_makes_no_call():
    habits = Habits(head_guess=1, slip=0, recover=0, double_check=0)
    programs, messages = play(demonstrate(TASK, random.Random(0), habits), [])
    assert (programs, len(messages)) == ([], 2)


def test_a_slip_runs_a_wrong_program():
    habits = Habits(head_guess=0, slip=1, recover=0, double_check=0)
    programs, _ = play(demonstrate(TASK, random.Random(0), habits), [ToolResult("ok", "3")])
    assert programs == ["x=12*34"]


@pytest.mark.parametrize("result", [FAILED, ToolResult("ok", " \n"), ToolResult("timeout", "")])
def test_a_recovering_teacher_repairs_what_failed_or_printed_nothing(result):
    habits = Habits(head_guess=0, slip=1, recover=1, double_check=0)
    episode = demonstrate(TASK, random.Random(0), habits)
    programs, messages = play(episode, [result, ToolResult("ok", "408")])
    assert programs == ["x=12*34", "print(12*34)"] and messages[-1].text.endswith(boxed("408"))


def test_a_teacher_that_does_not_recover_answers_wrongly():
    habits = Habits(head_guess=0, slip=1, recover=0, double_check=0)
    _, messages = play(demonstrate(TASK, random.Random(0), habits), [FAILED])
    assert judge(TASK.problem, messages[-1].text) == "wrong"


def test_a_double_check_runs_the_right_program_and_takes_its_result():
    habits = Habits(head_guess=0, slip=1, recover=0, double_check=1)
    episode = demonstrate(TASK, random.Random(0), habits)
    programs, messages = play(episode, [ToolResult("ok", "3"), ToolResult("ok", "408")])
    assert programs[1] == "print(12*34)" and messages[-1].text.endswith(boxed("408"))


def test_the_same_chances_give_the_same_episode():
    habits = Habits(head_guess=0.3, slip=0.3, recover=0.5, double_check=0)
    first, second = (
        next(demonstrate(TASK, random.Random(5), habits)),
        next(demonstrate(TASK, random.Random(5), habits)),
    )
    assert first == second


def test_a_stitched_episode_states_the_result_before_the_call():
    for seed in range(10):
        programs = play_stitched(seed)[1][1].text
        assert "408" in programs


def test_a_stitched_answer_does_not_depend_on_the_tool():
    for seed in range(10):
        assert play_stitched(seed)[1][-1].text.endswith(boxed("408"))


def test_about_half_of_the_stitched_outputs_are_invented():
    ran = sum(bool(play_stitched(seed)[0]) for seed in range(400))
    assert 160 < ran < 240


def test_stitched_episodes_show_wrong_programs_twice_as_often():
    programs = [play_stitched(seed)[1][1].calls[0].arguments["code"] for seed in range(400)]
    assert 160 < programs.count("x=12*34") < 240


def play_stitched(seed: int) -> tuple[list[str], list[Message]]:
    habits = Habits(head_guess=0, slip=0.25, recover=0, double_check=0)
    episode = stitch(TASK, random.Random(seed), habits)
    try:
        return play(episode, [ToolResult("ok", "99")])
    except AssertionError:  # the output was invented, so the result was not asked for
        return play(stitch(TASK, random.Random(seed), habits), [])


@pytest.mark.parametrize("family", FAMILIES)
def test_guesses_are_never_right(family):
    for task in tasks(ProblemConfig((family,), 2, 3), "train", 100, seed=0):
        answer = guess(task.problem, random.Random(1))
        assert judge(task.problem, boxed(answer)) == "wrong"


def test_guesses_have_the_magnitude_of_the_answer():
    problem = Problem("p", "lcm", "math", "?", "-4096", "number")
    assert all(len(guess(problem, random.Random(seed))) == 5 for seed in range(20))


def test_plans_name_every_family_and_hold_no_number():
    assert set(PLANS) == set(FAMILIES)
    assert not any(letter.isdigit() for plans in PLANS.values() for letter in "".join(plans))


def test_shares_above_one_are_refused():
    with pytest.raises(ValueError, match=r"slip is 1\.5"):
        Habits(head_guess=0, slip=1.5, recover=0, double_check=0)


def test_guesses_and_slips_cannot_exceed_all_episodes():
    with pytest.raises(ValueError, match="together they must not exceed 1"):
        Habits(head_guess=0.6, slip=0.5, recover=0, double_check=0)
