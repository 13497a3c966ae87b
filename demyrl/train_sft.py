"""The cold start: fine-tuning on whole tool-use conversations, loss on assistant tokens only.

    python -m demyrl.train_sft --config=configs/grpo_tcr.py:tiny \\
        --config.sft.demonstrations=runs/x/collect/real.jsonl --workdir=runs/x/sft

The rate is constant until a measured probe passes `sft.probe_enough`, or the steps run out; then it
cools down linearly. The probe is the share of held-out episodes that would copy every operand and
every result right: when a small model learns to copy varies with the seed, so a fixed number of
steps would not be robust.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from demyrl import checkpoint, command, logs, processes, recipe, storage
from demyrl.arrays import TrainState
from demyrl.data.demonstrations import ANSWERS, PLANS, boxed, calling, said, truth
from demyrl.data.generators import tasks
from demyrl.data.stream import RowStream
from demyrl.evaluate import MESH, begin, make_chat, own_mesh
from demyrl.learn.batch import Example, pack, token_weights
from demyrl.learn.learner import HeadConfig, Learner
from demyrl.learn.loss import sft_loss
from demyrl.storage import Place
from demyrl.text.chat import Chat, messages_from_row
from demyrl.text.prompts import question
from demyrl.tools.toolbox import ToolBox
from demyrl.types import Message
from demyrl.weights import first_state, is_workdir, keep_source

MAY_CHANGE = ("sft.save_every", *MESH)


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A demonstration as tokens, with what the assistant wrote."""

    tokens: Int[np.ndarray, " n"]
    sampled: Bool[np.ndarray, " n"]


def read_conversations(settings: recipe.Recipe, chat: Chat) -> list[Conversation]:
    """Every demonstration that fits in a row.

    Raises ValueError when the file is missing or nothing in it fits.
    """
    path = settings.sft.demonstrations
    if not path or not storage.path(path).is_file():
        raise ValueError(
            f"sft.demonstrations is {path!r}: give a file of conversations, one JSON object with "
            "'messages' a line, such as collect's real.jsonl."
        )
    most = settings.rollout.episode.output_tokens
    all_rows = []
    for number, row in enumerate(logs.read_rows(path), start=1):
        try:
            all_rows.append(as_conversation(chat, messages_from_row(row), most))
        except ValueError as error:
            raise ValueError(f"{path}, row {number}: {error}") from error
    longest = settings.sft_pack.row_tokens
    longest = min(longest, settings.model.max_positions or longest)
    fitting = [c for c in all_rows if len(c.tokens) <= longest]
    if not fitting:
        raise ValueError(
            f"none of the {len(all_rows)} conversations in {path} fits in {longest} tokens, the "
            "smaller of sft.pack.row_tokens and what the model was made for."
        )
    if len(fitting) < len(all_rows) and processes.is_first():
        left_out = len(all_rows) - len(fitting)
        print(f"{left_out} conversations of {len(all_rows)} pass {longest} tokens: left out")
    return fitting


def as_conversation(chat: Chat, messages: Sequence[Message], most: int) -> Conversation:
    tokens, sampled = chat.conversation(messages, most)
    return Conversation(np.array(tokens, np.int32), np.array(sampled, bool))


def probe_set(settings: recipe.Recipe, chat: Chat) -> list[Conversation]:
    """Episodes of a teacher that makes no mistake, on held-out problems.

    `sampled` is True only at what is copied: the digits of the call, and those of the answer.
    """
    size = chat.tokenizer.vocab_size
    is_operand = np.array([chat.tokenizer.decode([i]).isdigit() for i in range(size)])
    conversations = []
    for task in tasks(settings.problems, "eval", settings.sft.probe_count, 1):
        result = truth(task)
        messages = [
            Message("user", question(task.problem, settings.chat.prompts)),
            calling(PLANS[task.problem.source][0], task.program),
            Message("tool", f"{result}\n"),
            said(ANSWERS[0], boxed(result)),
        ]
        whole = as_conversation(chat, messages, settings.rollout.episode.output_tokens)
        marks = whole.sampled & is_operand[whole.tokens]
        conversations.append(Conversation(whole.tokens, marks))
    return conversations


class Sft:
    """One fine-tuning run: its data, programs and state."""

    def __init__(
        self,
        settings: recipe.Recipe,
        conversations: Sequence[Conversation],
        probes: Sequence[Conversation],
    ):
        part = settings.sft
        settings = self.settings = recipe.on_device(settings)
        self.conversations, self.probes = conversations, probes
        everything = (x.tobytes() for c in (*conversations, *probes) for x in (c.tokens, c.sampled))
        processes.agree("conversations or tokens", everything)
        self.stream = RowStream(len(self.conversations), part.rows_per_step, settings.seed)
        self.mesh = own_mesh(settings)
        self.learner = Learner(
            settings.model, self.mesh, settings.sft_optimizer, settings.memory, settings.sft_pack,
            sft_loss, HeadConfig(1.0, settings.head_chunk),
        )  # fmt: skip
        self.state: TrainState | None = None
        self.cooling_from: int | None = None

    def start(self, workdir: Place) -> int:
        """Loads the newest checkpoint or the first weights; returns the step to go on from."""
        s = self.settings
        self.state, restored = first_state(
            workdir, s.source, s.model, self.mesh, s.seed, self.learner.optimizer, s.memory.offload
        )
        if restored is None:
            return 0
        self.stream.restore(restored.extra["stream"])
        self.cooling_from = restored.extra["cooling_from"]
        return restored.step

    def save(self, workdir: Place, step: int, keep: int) -> None:
        extra = {
            "stream": self.stream.state(),
            "cooling_from": self.cooling_from,
            "config": self.settings.config_json,
        }
        checkpoint.save(workdir, step, self.state, extra, keep)

    def finished(self, step: int) -> bool:
        """True when the cool-down is over."""
        start = self.cooling_from
        return start is not None and step >= start + self.settings.sft.cooldown_steps

    def rate(self, step: int) -> float:
        """Warm-up, constant, and after `cooling_from` down to the final share."""
        peak = self.learner.rate(step)
        if self.cooling_from is None:
            return peak
        done = (step - self.cooling_from) / self.settings.sft.cooldown_steps
        return peak * (1 - (1 - self.settings.sft_optimizer.final_share) * done)

    def step(self, step: int) -> dict[str, float]:
        """One update on the next rows."""
        chosen = [self.conversations[i] for i in self.stream.next()]
        weights = token_weights([c.sampled for c in chosen], "token")
        examples = [Example(c.tokens, w) for c, w in zip(chosen, weights, strict=True)]
        rate = self.rate(step)
        packed = pack(examples, self.settings.sft_pack)
        self.state, numbers = self.learner.update(self.state, packed, rate)
        return {**numbers, "optim/learning_rate": rate}

    def probe(self) -> float:
        """Share of held-out episodes whose every copied digit has more than half of the
        probability, given the teacher's text before it."""
        examples = [Example(c.tokens, c.sampled.astype(np.float32)) for c in self.probes]
        working = self.learner.working(self.state.params)
        logprobs = self.learner.score(working, examples).logprobs
        copied = [
            np.all(row[c.sampled] > np.log(0.5))
            for row, c in zip(logprobs, self.probes, strict=True)
        ]
        return float(np.mean(copied))

    def cool_down(self, step: int, copied: float) -> None:
        """Begins the cool-down when the probe is good enough or the steps run out."""
        part = self.settings.sft
        late = step >= part.max_steps - part.cooldown_steps
        if self.cooling_from is None and (copied >= part.probe_enough or late):
            self.cooling_from = step

    def run(self, workdir: Place) -> None:
        """All steps from the newest checkpoint on; leaves metrics.jsonl and checkpoints."""
        part = self.settings.sft
        step, copied = self.start(workdir), 0.0
        with logs.Logs(workdir, part.max_steps, step, processes.is_first()) as log:
            while not self.finished(step):
                numbers = self.step(step)
                if numbers["optim/skipped"]:
                    log.note(self.learner.notice(step))
                step += 1
                if step % part.probe_every == 0:
                    copied = numbers["sft/probe_copy"] = self.probe()
                self.cool_down(step, copied)
                log.numbers(step - 1, numbers)
                if step % part.save_every == 0 or self.finished(step):
                    self.save(workdir, step, keep=2)
            log.note(f"SFT: {step} steps; held-out episodes copied right: {self.probe():.2f}")


def train_sft(config: Any, workdir: Place) -> None:
    """The stage: leaves a checkpoint in workdir/checkpoints and metrics.jsonl."""
    settings = recipe.read(config, workdir)
    command.enable_compilation_cache()
    settings = begin(settings, workdir, MAY_CHANGE)
    chat = make_chat(settings, ToolBox(settings.tools))
    conversations, probes = read_conversations(settings, chat), probe_set(settings, chat)
    if processes.is_first() and not is_workdir(workdir):
        keep_source(workdir, settings.source, settings.tokenizer, chat.tokenizer.template)
    Sft(settings, conversations, probes).run(workdir)


if __name__ == "__main__":
    command.run(train_sft, "configs/grpo_tcr.py:tiny")
