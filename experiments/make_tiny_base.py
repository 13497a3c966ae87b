"""Makes the weights that ship as `builtin:tiny`: the stand-in for an instruct model.

    python -m experiments.make_tiny_base --workdir=runs/tiny_base

It has seen short chats without any tool: it can repeat a line, box a number, and write the Python
for a question of the built-in families. It has never seen a tool's schema, a tool call, a tool
result or an answer that came from one; what the quickstart learns about tools it learns there.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from demyrl import checkpoint, command, logs, recipe
from demyrl.data.generators import tasks
from demyrl.evaluate import load_tokenizer
from demyrl.model.hf import builtin_folder, save_checkpoint
from demyrl.text.chat import Chat
from demyrl.train_sft import Conversation, Sft, as_conversation
from demyrl.types import Message

ASKS = ("Write Python for this.", "Give me the Python code.", "Which Python code solves this?")
SHARES = {"program": 0.6, "repeat": 0.2, "box": 0.2}


def chats(settings: recipe.Recipe, count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Pairs of what the user says and what the assistant answers."""
    rng = random.Random(seed)
    made = tasks(settings.problems, "train", count, seed)
    kinds = rng.choices(list(SHARES), SHARES.values(), k=count)
    for task, kind in zip(made, kinds, strict=True):
        if kind == "program":
            yield f"{task.problem.prompt}\n{rng.choice(ASKS)}", f"```python\n{task.program}\n```"
        elif kind == "repeat":
            line = rng.choice([task.program, task.problem.prompt])
            yield f"Repeat: {line}", line
        else:
            number = str(rng.randrange(10 ** rng.randint(2, 7)) * rng.choice([1, 1, 1, -1]))
            number += rng.choice(["", "", "", ".5", ".0"])
            yield f"The result is {number}. Box it.", f"\\boxed{{{number}}}"


def conversations(settings: recipe.Recipe, chat: Chat, count: int, seed: int) -> list[Conversation]:
    pairs = chats(settings, count, seed)
    both = [[Message("user", asked), Message("assistant", said)] for asked, said in pairs]
    return [as_conversation(chat, messages, 0) for messages in both]


def operands_only(conversation: Conversation, is_operand: np.ndarray) -> Conversation:
    marks = conversation.sampled & is_operand[conversation.tokens]
    return Conversation(conversation.tokens, marks)


def make_tiny_base(config: Any, workdir: Path) -> None:
    """Trains until the probe passes, cools down, and writes demyrl/assets/tiny."""
    settings = recipe.read(config)
    tokenizer = load_tokenizer(settings.tokenizer)
    chat = Chat(tokenizer, [])
    is_operand = np.array([tokenizer.decode([i]).isdigit() for i in range(tokenizer.vocab_size)])
    probes = conversations(settings, chat, settings.sft.probe_count, settings.seed + 1)
    sft = Sft(
        settings,
        conversations(settings, chat, settings.collect.count, settings.seed),
        [operands_only(each, is_operand) for each in probes],
    )
    with logs.Logs(workdir, settings.sft.max_steps, 0) as log:
        step = 0
        while not sft.finished(step):
            numbers = sft.step(step)
            step += 1
            if step % settings.sft.probe_every == 0:
                numbers["sft/probe_copy"] = sft.probe()
                sft.note_probe(step, numbers["sft/probe_copy"])
            log.numbers(step - 1, numbers)
        log.note(f"{step} steps; copied right: {sft.probe():.3f}")
    checkpoint.save(workdir, step, sft.state, {}, 1)
    params = jax.device_get(sft.state.params)
    save_checkpoint(builtin_folder("builtin:tiny"), params, settings.model)


if __name__ == "__main__":
    command.run(make_tiny_base, "configs/grpo_tcr.py:tiny")
