"""Makes the weights that ship as `builtin:tiny`: the stand-in for an instruct model.

    python -m experiments.make_tiny_base --workdir=runs/tiny_base --config.model.source= \\
        --config.tokenizer=builtin:tiny --config.sft.probe_enough=1.1 \\
        --config.collect.count=24000 --config.sft.max_steps=3000 \\
        --config.sft.cooldown_steps=900

It has seen short chats without any tool: it can repeat a line, box a number, and write the Python
for a question of the built-in families. It has never seen a tool's schema, a tool call, a tool
result or an answer that came from one; what the quickstart learns about tools it learns there.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from demyrl import command, logs, recipe
from demyrl.data.generators import Task, tasks
from demyrl.model.hf_save import write_checkpoint
from demyrl.text.chat import Chat
from demyrl.text.tokenizer import load_tokenizer
from demyrl.train_sft import Conversation, Sft, as_conversation
from demyrl.types import Message
from demyrl.weights import builtin_folder

ASKS = ("Write Python for this.", "Give me the Python code.", "Which Python code solves this?")
SHARES = {"program": 0.3, "repeat": 0.3, "box": 0.4}
BOXES = ("The result is {}. Box it.", "Box this:\n{}\n", "{}\nPut that in a box.")
MARKS = (" ", ",", "*", "+", "-", ", ", "/")
MOST_TURNS = 5


def exchange(task: Task, kind: str, rng: random.Random) -> tuple[str, str]:
    """What the user says and what the assistant answers."""
    if kind == "program":
        return f"{task.problem.prompt}\n{rng.choice(ASKS)}", f"```python\n{task.program}\n```"
    if kind == "repeat":
        numbers = [str(rng.randint(10, 99)) for _ in range(rng.randint(3, 12))]
        line = rng.choice([task.program, task.problem.prompt, rng.choice(MARKS).join(numbers)])
        return f"Repeat: {line}", line
    result = some_result(rng)
    return rng.choice(BOXES).format(result), f"\\boxed{{{result}}}"


def some_result(rng: random.Random) -> str:
    """A number of two to seven digits, or a line in x."""
    number = str(rng.randrange(10 ** rng.randint(2, 7)) * rng.choice([1, 1, 1, -1]))
    if rng.random() < 0.3:
        return f"{rng.randint(-99, 99)} *x+ {rng.randint(-9999, 9999)}"
    return number + rng.choice(["", "", "", ".5", ".0"])


def chats(settings: recipe.Recipe, chat: Chat, count: int, seed: int) -> Iterator[Conversation]:
    """Chats of one to MOST_TURNS exchanges that fit in a row."""
    rng = random.Random(seed)
    waiting = tasks(settings.problems, "train", count * 2, seed)
    for _ in range(count):
        messages: list[Message] = []
        fitting = None
        for kind in rng.choices(list(SHARES), SHARES.values(), k=rng.randint(1, MOST_TURNS)):
            asked, said = exchange(rng.choice(waiting), kind, rng)
            longer = [*messages, Message("user", asked), Message("assistant", said)]
            made = as_conversation(chat, longer, 0)
            if len(made.tokens) <= settings.sft_pack.row_tokens:
                messages, fitting = longer, made
        if fitting is not None:
            yield fitting


def probes(settings: recipe.Recipe, chat: Chat, count: int, seed: int) -> Iterator[Conversation]:
    """Held-out questions for programs, then a result to box, with only the digits marked."""
    size, rng = chat.tokenizer.vocab_size, random.Random(seed)
    is_operand = np.array([chat.tokenizer.decode([i]).isdigit() for i in range(size)])
    for task in tasks(settings.problems, "eval", count, seed):
        asked, said = exchange(task, "program", rng)
        boxed = exchange(task, "box", rng)
        messages = [
            Message("user", asked),
            Message("assistant", said),
            Message("user", boxed[0]),
            Message("assistant", boxed[1]),
        ]
        made = as_conversation(chat, messages, 0)
        yield Conversation(made.tokens, made.sampled & is_operand[made.tokens])


def make_tiny_base(config: Any, workdir: Path) -> None:
    """Trains until the probe passes, cools down, and writes demyrl/assets/tiny."""
    settings = recipe.read(config)
    logs.record_run(workdir, settings.config_json, logs.environment())
    chat = Chat(load_tokenizer(settings.tokenizer), [])
    sft = Sft(
        settings,
        list(chats(settings, chat, settings.collect.count, settings.seed)),
        list(probes(settings, chat, settings.sft.probe_count, settings.seed)),
    )
    sft.run(workdir)
    # Beside the tokenizer that is there, so not as a folder of its own.
    write_checkpoint(builtin_folder("builtin:tiny"), sft.state.params, settings.model)


if __name__ == "__main__":
    command.run(make_tiny_base, "configs/grpo_tcr.py:tiny")
