"""A scripted teacher: what an episode that solves a task with the code interpreter looks like.

An episode is a Python generator that yields tool calls, is sent their results and returns the
conversation. Whoever drives many of them can so run the calls of all in one batch. The teacher is
noisy on purpose, at shares given by `Habits`, so that reinforcement learning has something to do.

`demonstrate` reads the real result and answers from it. `stitch` is the control: the result stands
in the text first, and the call is pasted behind it.
"""

import dataclasses
import json
import random
from collections.abc import Generator

from demyrl.data.generators import Task
from demyrl.types import Message, Problem, ToolCall, ToolResult

Episode = Generator[ToolCall, ToolResult, list[Message]]

TOOL = "code_interpreter"
INVENTED = 0.5  # share of tool outputs in a stitched episode that no tool ever wrote
STITCHED_SLIPS = 2.0  # a stitched episode shows a wrong program so many times as often

PLANS = {
    "arithmetic": ("Let Python do the arithmetic.", "I will compute this with code."),
    "power_mod": ("Compute the power and its remainder.", "Python can take this power."),
    "digit_sum": ("Sum the digits with code.", "Turn the power into digits and add them."),
    "lcm": ("Use the lcm from math.", "The math module has lcm."),
    "linear_equation": ("Isolate x and compute it.", "Move the terms, then multiply."),
    "seconds": ("Turn all parts into seconds.", "Add up the seconds with code."),
    "kinetic_energy": ("Use half mass times speed squared.", "Put the values in the formula."),
    "electric_power": ("Use current squared times resistance.", "Square the current first."),
    "momentum": ("Use mass times change of speed.", "Subtract the speeds, then multiply."),
    "loop_output": ("Run the loop to see.", "Let me run this program."),
    "list_output": ("Run the line to see.", "Let me run this code."),
    "linear_expression": ("Find the slope, then the offset.", "Two points give the line."),
}
ANSWERS = ("The tool printed the answer.", "I have the result.")
GUESSES = ("I can do this in my head.",)
REPAIRS = ("That failed, so fix it.", "No result yet, so correct the code.")
SURRENDERS = ("That failed, so I guess.",)
CHECKS = ("Check it once more.",)
CLAIMS = ("The result is {}.", "I get {} here.")


@dataclasses.dataclass(frozen=True)
class Habits:
    """How often the teacher does what; each a share between 0 and 1."""

    head_guess: float  # of all episodes: answer at once, without the tool, and wrong
    slip: float  # of all episodes: run a wrong program
    recover: float  # of runs that failed or printed nothing: retry with the right program
    double_check: float  # of runs that printed something: run the right program as well

    def __post_init__(self):
        for name, share in dataclasses.asdict(self).items():
            if not 0 <= share <= 1:
                raise ValueError(f"{name} is {share}: it is a share, so give 0 to 1.")
        if self.head_guess + self.slip > 1:
            raise ValueError(
                f"head_guess {self.head_guess} and slip {self.slip} are shares of all episodes: "
                "together they must not exceed 1."
            )


def demonstrate(task: Task, rng: random.Random, habits: Habits) -> Episode:
    """An episode whose answer is copied from what the tool really said, right or wrong."""
    conversation = [Message("user", task.problem.prompt)]
    kind = rng.random()
    if kind < habits.head_guess:
        return [*conversation, said(rng.choice(GUESSES), boxed(guess(task.problem, rng)))]
    slips = kind < habits.head_guess + habits.slip
    program = rng.choice(task.slips) if slips else task.program
    output = yield from called(conversation, rng.choice(PLANS[task.problem.source]), program)
    if output is None and rng.random() < habits.recover:
        output = yield from called(conversation, rng.choice(REPAIRS), task.program)
    elif output is not None and rng.random() < habits.double_check:
        second = yield from called(conversation, rng.choice(CHECKS), task.program)
        output = output if second is None else second
    if output is None:
        conversation.append(said(rng.choice(SURRENDERS), boxed(guess(task.problem, rng))))
    else:
        conversation.append(said(rng.choice(ANSWERS), boxed(output)))
    return conversation


def stitch(task: Task, rng: random.Random, habits: Habits) -> Episode:
    """An episode that states the right result first and decorates it with a call.

    The program is wrong more often than in `demonstrate`, half of the outputs are the stated
    result instead of what the tool says, and the answer never depends on them.
    """
    stated = truth(task)
    wrong = rng.random() < min(1.0, STITCHED_SLIPS * habits.slip)
    program = rng.choice(task.slips) if wrong else task.program
    conversation = [Message("user", task.problem.prompt)]
    claim = rng.choice(CLAIMS).format(stated)
    if rng.random() < INVENTED:
        conversation += [calling(claim, program), Message("tool", f"{stated}\n")]
    else:
        yield from called(conversation, claim, program)
    conversation.append(said(rng.choice(ANSWERS), boxed(stated)))
    return conversation


def called(
    conversation: list[Message], thought: str, program: str
) -> Generator[ToolCall, ToolResult, str | None]:
    """Appends one call and its result; the last line printed, None when it failed or is empty."""
    message = calling(thought, program)
    result = yield message.calls[0]
    conversation += [message, Message("tool", result.output)]
    lines = result.output.strip().splitlines()
    return lines[-1].strip() if lines and result.status == "ok" else None


def calling(thought: str, program: str) -> Message:
    return Message(
        "assistant", f"<think>\n{thought}\n</think>", (ToolCall(TOOL, {"code": program}),)
    )


def said(thought: str, answer: str) -> Message:
    return Message("assistant", f"<think>\n{thought}\n</think>\n{answer}")


def boxed(answer: str) -> str:
    return f"\\boxed{{{answer}}}"


def truth(task: Task) -> str:
    """The right answer as a person would write it."""
    if task.problem.grader != "expression":
        return task.problem.answer
    (u, y), (v, z) = line_points(task.problem)[:2]
    slope = (z - y) // (v - u)
    return f"{slope} *x+ {y - slope * u}"


def guess(problem: Problem, rng: random.Random) -> str:
    """A wrong answer of the right kind and magnitude."""
    if problem.grader == "expression":
        (u, y), (v, z) = line_points(problem)[:2]
        slope = (z - y) // (v - u)
        wrong_slope = slope + rng.choice((-3, -2, -1, 1, 2, 3))
        return f"{wrong_slope} *x+ {y - slope * u + rng.randrange(-9, 10)}"
    digits = len(problem.answer.lstrip("-").split(".")[0])
    low = 10 ** (digits - 1)
    sign = "-" if problem.answer.startswith("-") else ""
    while True:
        number = f"{sign}{rng.randrange(low, 10 * low)}"
        if number != problem.answer:
            return number


def line_points(problem: Problem) -> list[list[int]]:
    return json.loads(problem.answer)
