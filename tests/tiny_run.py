"""A run in miniature, SFT and RL with the tool, for the tests of meshes and of processes.

Nothing is learned in so few steps, so the model is drawn such that it ends its turns, and every
first reply begins with a call.
"""

import dataclasses
import json
from unittest import mock

from demyrl import train
from demyrl.evaluate import evaluate
from demyrl.model.hf_save import whole_folder, write_checkpoint
from demyrl.text.toolcalls import CALL_CLOSE, CALL_OPEN
from demyrl.train_sft import train_sft
from tests.tiny import MODEL, chat, drawn_params, shrunk_config

SHAPE = dataclasses.replace(MODEL, layers=1, heads=8, kv_heads=8, tied_embeddings=False)
ARGUMENTS = '{"name": "code_interpreter", "arguments": {"code": "print(6*7)"}}'
CALL = f"{CALL_OPEN}\n{ARGUMENTS}\n{CALL_CLOSE}"
STEPS = 4
SMALL = {
    "tokenizer": "builtin:tiny",
    "rollout__turn_tokens": 16,
    "rollout__turns": 3,
    "rollout__calls": 2,
    "rollout__extend_rows": 8,
    "sft__max_steps": 4,
    "sft__cooldown_steps": 2,
    "sft__learning_rate": 1e-4,
    "optimizer__learning_rate": 1e-4,
    "train__steps": STEPS,
    "train__keep": STEPS,
    "train__pack__rows": 8,
}
ITS_SHAPE = {f"model__{key}": value for key, value in dataclasses.asdict(SHAPE).items()}


def config(folder, mesh, **changes):
    """The config of both stages on a mesh, whose source and demonstrations are in the folder."""
    data, tensor, sequence = mesh
    places = {
        "model__source": str(folder / "source"),
        "sft__demonstrations": str(folder / "demonstrations.jsonl"),
        "mesh__data": data,
        "mesh__tensor": tensor,
        "mesh__sequence": sequence,
    }
    return shrunk_config(**SMALL | ITS_SHAPE | places | changes)


def talkative_params():
    """Random weights after which a turn ends with every tenth token or so.

    All tokens have the first number of their embedding in common, and the head reads it.
    """
    params = drawn_params(SHAPE)
    params["embedding"] = params["embedding"].at[:, 0].set(2.0)
    params["head"] = params["head"].at[chat().end_tokens[0], 0].set(1.9)
    return params


def prepare(folder):
    """Writes what a run starts from: a checkpoint and demonstrations."""
    with whole_folder(folder / "source") as writing:
        writing.mkdir(exist_ok=True)
        write_checkpoint(writing, talkative_params(), SHAPE)
    with open(folder / "demonstrations.jsonl", "w", encoding="utf-8") as file:
        for n in range(16):
            said = (("user", f"What is {n} + 1?"), ("assistant", f"It is \\boxed{{{n + 1}}}."))
            messages = [{"role": role, "content": content} for role, content in said]
            file.write(json.dumps({"messages": messages}) + "\n")


class Rl(train.Rl):
    """A run whose every first reply begins with a call."""

    def __init__(self, settings, tools):
        super().__init__(settings, tools)
        self.agent.config = dataclasses.replace(self.agent.config, reply_start=CALL)


def sft(folder, workdir, mesh):
    train_sft(config(folder, mesh), workdir)


def rl(folder, workdir, mesh, kind=Rl, **changes):
    with mock.patch.object(train, "Rl", kind):
        train.train(config(folder, mesh, **changes), workdir)


def evaluation(folder, workdir, mesh, source):
    """Samples of held-out problems by a run's weights, with the calls of training."""
    changes = {"model__source": str(source), "evaluate__reply_start": CALL}
    counts = {"problems__eval_count": 3, "evaluate__samples": 4}
    evaluate(config(folder, mesh, **changes, **counts), workdir)
