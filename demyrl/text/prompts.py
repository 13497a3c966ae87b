"""What the user says about a problem, chosen for each problem by its domain and its grader.

"bare" adds nothing, "agentic" asks to plan and to use the tool (the construction of the paper's
prompts), and "no_tool" asks to reason without one. There is no system message: what the tool is,
and how it is called, is for the chat template to say.
"""

from demyrl.types import Problem

STYLES = ("bare", "agentic", "no_tool")
BOXED = ("number", "text", "expression", "choice", "reasoning_gym")  # graders that read \boxed{}
PROGRAM = "program"  # a problem of the domain code whose answer is a program

TASK = {
    "math": "Solve this math problem step by step.",
    "science": "Solve this science problem step by step.",
    "code": "Solve this programming problem step by step.",
    PROGRAM: "Solve this programming problem step by step: write a Python program.",
}
EXACT = "You have a tool that runs Python: use it to calculate precisely and to check your work."
TOOL = {
    "math": EXACT,
    "science": EXACT,
    "code": "You have a tool that runs Python: use it to try code and to check your answer.",
    PROGRAM: "You have a tool that runs Python: use it to test your program on examples.",
}
WITH_TOOL = (
    "First plan how to solve the problem, then use the tool deliberately. When you are sure, stop "
    "calling it and"
)
ALONE = (
    "First plan how to solve the problem, then work it out in full yourself and check it. When you "
    "are sure,"
)
BOX = "give the final answer in \\boxed{}, without units or quote marks inside the box."
CHOICE = "give the capital letter of the right option in \\boxed{}."
SUBMISSION = (
    "submit the whole program in one ```python fence. It must read its input from stdin and write "
    "its output to stdout."
)


def question(problem: Problem, style: str) -> str:
    """The first user turn of a conversation about a problem; `style` is one of STYLES."""
    if style not in STYLES:
        raise ValueError(f"the prompt style is {style!r}: use one of {', '.join(STYLES)}.")
    if style == "bare":
        return problem.prompt
    kind = _kind(problem)
    method = f"{TOOL[kind]} {WITH_TOOL}" if style == "agentic" else ALONE
    return f"{TASK[kind]}\n\n{problem.prompt}\n\n{method} {_answer(problem)}"


def _kind(problem: Problem) -> str:
    """The domain, but PROGRAM where the answer is one: code can also be asked about."""
    is_program = problem.domain == "code" and problem.grader not in BOXED
    return PROGRAM if is_program else problem.domain


def _answer(problem: Problem) -> str:
    """How to hand in the answer, so that the problem's grader finds it."""
    if _kind(problem) == PROGRAM:
        return SUBMISSION
    return CHOICE if problem.grader == "choice" else BOX
