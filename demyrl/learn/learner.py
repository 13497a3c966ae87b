"""An update, or a score, of examples: packed, placed on the mesh, and run through the programs."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float

from demyrl.arrays import Batch, TrainState
from demyrl.learn.batch import Example, PackConfig, Packed, blank_batch, pack, shapes, unpack
from demyrl.learn.optimizer import OptimizerConfig, learning_rate, make_optimizer
from demyrl.learn.update import Loss, MemoryConfig, make_programs, update, zero_total
from demyrl.model.config import ModelConfig
from demyrl.model.sharding import batch_sharding, spread
from demyrl.model.transformer import Layout, Params


class NotLearning(RuntimeError):
    """One update after the other had a gradient that is not finite."""


class Scored(NamedTuple):
    """What the training graph says about each example's tokens; 0 where their weight is 0."""

    logprobs: list[Float[np.ndarray, " _"]]
    entropy: list[Float[np.ndarray, " _"]]


@dataclasses.dataclass(frozen=True)
class HeadConfig:
    """How log-probs are computed."""

    temperature: float  # of the policy that they describe
    chunk: int  # tokens whose logits exist at a time


class Learner:
    """The programs of one training run and the shapes they are compiled for.

    The first call of `score`, and that of `update`, compiles every shape of the ladder, so that
    none does later.
    """

    def __init__(
        self,
        model: ModelConfig,
        mesh: Mesh,
        optimizer: OptimizerConfig,
        memory: MemoryConfig,
        shape: PackConfig,
        loss: Loss,
        head: HeadConfig,
    ):
        self.mesh, self.config, self.memory, self.shape = mesh, optimizer, memory, shape
        self.loss = loss
        self.optimizer = make_optimizer(optimizer, model, memory.moments)
        layout = Layout(mesh, memory.remat)
        self.programs = make_programs(
            model, self.optimizer, loss, head.temperature, head.chunk, layout, memory.offload
        )
        self.working = self.programs.working
        self.to_warm = {"score", "update"}
        self.skipped = 0  # updates in a row

    def place(self, packed: Packed) -> list[Batch]:
        return [spread(batch, batch_sharding(self.mesh)) for batch in packed.batches]

    def blank(self) -> list[Batch]:
        """A micro-batch of padding of every shape; none when any other compiles the only one."""
        ladder = shapes(self.shape)
        blank = [blank_batch(shape) for shape in ladder if len(ladder) > 1]
        return [spread(batch, batch_sharding(self.mesh)) for batch in blank]

    def score(self, working: Params, examples: Sequence[Example]) -> Scored:
        """Log-probs and entropy of the examples' weighted tokens, by a working copy."""
        if "score" in self.to_warm:
            self.to_warm.remove("score")
            for batch in self.blank():
                self.programs.score(working, batch)
        packed = pack(examples, self.shape)
        scores = [self.programs.score(working, batch) for batch in self.place(packed)]
        scores = jax.device_get(scores)
        lengths = [len(example.tokens) for example in examples]
        return Scored(
            unpack(packed, [s.logprobs for s in scores], lengths),
            unpack(packed, [s.entropy for s in scores], lengths),
        )

    def update(
        self, state: TrainState, packed: Packed, rate: float
    ) -> tuple[TrainState, dict[str, float]]:
        """One optimizer application; the state that went in is donated.

        Raises NotLearning after `skips` updates in a row whose gradient was not finite.
        """
        if "update" in self.to_warm:
            self.to_warm.remove("update")
            self.warm(state.params)
        batches = self.place(packed)
        state, numbers = update(
            self.programs, self.loss, state, batches, rate, self.memory.gradients
        )
        numbers = {name: float(x) for name, x in jax.device_get(numbers).items()}
        self.skipped = self.skipped + 1 if numbers["optim/skipped"] else 0
        if self.skipped >= self.config.skips:
            raise NotLearning(
                f"the gradients of {self.skipped} updates in a row were not finite (the limit is "
                "the key skips of the optimizer's section). The parameters are those before them. "
                "Lower the learning rate, or look for what is not finite in the last rows of "
                "metrics.jsonl."
            )
        return state, numbers

    def warm(self, params: Params) -> None:
        """Compiles `accumulate` for every shape, on padding."""
        blank = self.blank()
        if not blank:
            return
        working = self.working(params)
        total = zero_total(working, blank[0], self.loss, self.memory.gradients)
        for batch in blank:
            total = self.programs.accumulate(working, total, batch)

    def notice(self, step: int) -> str:
        """What to tell when the last update was skipped."""
        return (
            f"step {step}: an update was skipped, because its gradient is not finite "
            f"({self.skipped} in a row; {self.config.skips} stop the run)"
        )

    def rate(self, number: int) -> float:
        """The learning rate of update `number`."""
        return learning_rate(self.config, number)
