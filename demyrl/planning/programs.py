"""The programs of a recipe, with shapes and places instead of arrays, and what each must do.

They are made by the code that training and sampling run, so what is compiled is what will run. An
abstract mesh, without devices, is enough to count; compiling needs one of the topology's devices.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from demyrl.learn.batch import PackConfig, Shape, blank_batch, shapes
from demyrl.learn.learner import HeadConfig, Learner
from demyrl.learn.loss import grpo_loss, sft_loss
from demyrl.learn.optimizer import OptimizerConfig
from demyrl.learn.state import HOST, abstract_state
from demyrl.learn.update import Loss
from demyrl.model.sharding import abstract_params, batch_sharding, replicated
from demyrl.planning import flops
from demyrl.planning.work import Work
from demyrl.rollout.sampler import sampler_programs
from demyrl.settings import Recipe

END_TOKENS = (0,)  # which they are changes nothing


@dataclasses.dataclass(frozen=True)
class Load:
    """What trajectories are like, for the counts that depend on it."""

    tokens: int  # of a trajectory, on average
    sampled: float  # share of them that the policy chose: those enter the head


@dataclasses.dataclass(frozen=True)
class Planned:
    """A program to compile."""

    name: str
    phase: str  # of a step: "sft", "rollout", "score" or "update"
    function: Callable  # jitted
    arguments: tuple
    options: dict[str, Any]
    work: Work
    beside: int  # bytes that lie in HBM meanwhile without being an argument
    turns: int = 1  # of loops whose turns are known at run time only, at most

    @property
    def argument_bytes(self) -> int:
        return chip_bytes(self.arguments)


@dataclasses.dataclass(frozen=True)
class Scene:
    """A recipe on a mesh: what of it takes memory, and its programs."""

    recipe: Recipe
    mesh: Mesh | AbstractMesh
    load: Load

    @functools.cached_property
    def learner(self) -> Learner:
        r = self.recipe
        loss = functools.partial(grpo_loss, config=r.loss)
        head = HeadConfig(r.rollout.sampler.temperature, r.head_chunk)
        return self.learner_of(r.optimizer, r.pack, loss, head)

    @functools.cached_property
    def sft_learner(self) -> Learner:
        r = self.recipe
        return self.learner_of(r.sft_optimizer, r.sft_pack, sft_loss, HeadConfig(1.0, r.head_chunk))

    def learner_of(
        self, optimizer: OptimizerConfig, shape: PackConfig, loss: Loss, head: HeadConfig
    ) -> Learner:
        r = self.recipe
        return Learner(r.model, self.mesh, optimizer, r.memory, shape, loss, head)

    @functools.cached_property
    def trees(self) -> dict[str, Any]:
        """What lies in HBM at some time in a step, by name."""
        r, learner = self.recipe, self.learner
        masters = abstract_params(r.model, self.mesh)
        state = abstract_state(masters, learner.optimizer, r.memory.offload)
        apart = r.model.dtype != "float32" or r.memory.offload
        working = with_dtype(masters, r.model.dtype)
        sampler = self.sampler["decode"].args
        return {
            "parameters": state.params,
            "moments": state.opt_state,
            "working copy": working if apart else (),
            "reference": working if r.loss.kl else (),
            "gradients": with_dtype(masters, r.memory.gradients),
            "sampling copy": sampler[0],
            "cache": sampler[1],
        }

    @functools.cached_property
    def sampler(self) -> dict[str, Any]:
        r = self.recipe
        return sampler_programs(r.model, r.rollout.sampler, self.mesh, END_TOKENS)

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of each tree on one chip."""
        return {name: chip_bytes(tree) for name, tree in self.trees.items()}


def with_dtype(tree: Any, dtype: str) -> Any:
    """The same shapes and places in another data type."""

    def leaf(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)

    return jax.tree.map(leaf, tree)


def chip_bytes(tree: Any) -> int:
    """Bytes of the arrays of a tree in the HBM of one chip; what lies in host memory is not."""
    leaves = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.ShapeDtypeStruct)]
    near = [x for x in leaves if x.sharding.memory_kind != HOST]
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in near)


def planned(scene: Scene) -> list[Planned]:
    """All programs, in the order in which a run meets them."""
    learner, sft = scene.learner, scene.sft_learner
    longest, *_ = shapes(scene.recipe.sft_pack)
    ladder = shapes(scene.recipe.pack)
    return [
        accumulate(scene, sft, longest, "sft"),
        apply(scene, sft, "sft"),
        *sampling(scene),
        *(score(scene, learner, shape) for shape in ladder[:1]),
        *(accumulate(scene, learner, shape, "update") for shape in ladder),
        apply(scene, learner, "update"),
    ]


def spelled(shape: Shape) -> str:
    return f"{shape[0]}x{shape[1]}"


def abstract_batch(shape: Shape, mesh: Mesh) -> Any:
    place = batch_sharding(mesh)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), blank_batch(shape)
    )


def abstract_total(scene: Scene, learner: Learner, batch: Any) -> Any:
    """What `accumulate` adds to."""
    _, numbers = jax.eval_shape(learner.loss, batch.old_logprobs, batch)
    everywhere = replicated(scene.mesh)
    return scene.trees["gradients"], jax.tree.map(
        lambda n: jax.ShapeDtypeStruct(n.shape, n.dtype, sharding=everywhere), numbers
    )


def chunks(scene: Scene, shape: Shape) -> int:
    """Turns of the head's loop on a chip, when every token is needed."""
    rows = shape[0] // scene.mesh.shape["data"]
    return -(-rows * shape[1] // scene.recipe.head_chunk)


def held(scene: Scene, *names: str) -> int:
    """Bytes of some of the trees on one chip."""
    return sum(scene.sizes[name] for name in names)


def forward_arguments(scene: Scene) -> tuple[Any, int]:
    """The parameters that forward passes use, and the bytes of what then lies beside them."""
    working = scene.trees["working copy"]
    if working == ():
        return scene.trees["parameters"], held(scene, "moments", "reference")
    return working, held(scene, "parameters", "moments", "reference")


def accumulate(scene: Scene, learner: Learner, shape: Shape, phase: str) -> Planned:
    """One micro-batch of an update, a sequence in each of its rows."""
    working, beside = forward_arguments(scene)
    batch = abstract_batch(shape, scene.mesh)
    total = abstract_total(scene, learner, batch)
    r, size = scene.recipe, shape[0] * shape[1]
    needed = size * scene.load.sampled
    each = [shape[1]] * shape[0]
    counted = flops.training(r.model, each, needed, r.memory.remat) / scene.mesh.size
    moved = chip_bytes((working, batch)) + 2 * chip_bytes(total)
    return Planned(
        f"{phase}_{spelled(shape)}", phase, learner.programs.accumulate, (working, total, batch),
        {}, Work(counted, moved), beside, chunks(scene, shape),
    )  # fmt: skip


def score(scene: Scene, learner: Learner, shape: Shape) -> Planned:
    """Log-probs of one micro-batch before the updates, a sequence in each of its rows."""
    working, beside = forward_arguments(scene)
    batch = abstract_batch(shape, scene.mesh)
    needed = shape[0] * shape[1] * scene.load.sampled
    counted = flops.forward(scene.recipe.model, [shape[1]] * shape[0], needed) / scene.mesh.size
    return Planned(
        f"score_{spelled(shape)}", "score", learner.programs.score, (working, batch), {},
        Work(counted, chip_bytes((working, batch))), beside, chunks(scene, shape),
    )  # fmt: skip


def apply(scene: Scene, learner: Learner, phase: str) -> Planned:
    """The optimizer's part of an update."""
    masters = abstract_params(scene.recipe.model, scene.mesh)
    state = abstract_state(masters, learner.optimizer, scene.recipe.memory.offload)
    batch = abstract_batch(shapes(learner.shape)[0], scene.mesh)
    total = abstract_total(scene, learner, batch)
    rate = jax.ShapeDtypeStruct((), jnp.float32, sharding=replicated(scene.mesh))
    moved = 2 * chip_bytes(state) + chip_bytes(total)
    return Planned(
        f"{phase}_apply", phase, learner.programs.apply, (state, total, rate), {},
        Work(0.0, moved), held(scene, "reference"),
    )  # fmt: skip


def sampling(scene: Scene) -> list[Planned]:
    """The sampler's copy of the weights, its longest extend, and decode."""
    config = scene.recipe.rollout.sampler
    longest = config.extend_lengths[-1]
    sampled = decode_step(scene, config.slots, scene.load.tokens / 2).times(config.decode_steps)
    beside = held(scene, "parameters", "moments", "reference")

    def on_cache(name: str, work: Work, turns: int) -> Planned:
        return Planned(name, "rollout", *scene.sampler[name], work, beside, turns)

    return [
        *loading(scene),
        on_cache(f"extend_{longest}", extend_work(scene, longest), 1),
        on_cache("decode", sampled, config.decode_steps),
    ]


def loading(scene: Scene) -> list[Planned]:
    """The programs that make the sampler's weights of the working copy: a layer, and the rest."""
    layers = scene.trees["sampling copy"]["layers"]
    rest = {n: w for n, w in scene.trees["sampling copy"].items() if n != "layers"}
    there = held(
        scene, "parameters", "moments", "reference", "working copy", "sampling copy", "cache"
    )
    made = []
    for name, result in (("layer_for_sampling", layers[0]), ("rest_for_sampling", rest)):
        function, arguments, options = scene.sampler[name]
        work, beside = Work(0.0, chip_bytes(result)), there - chip_bytes((arguments, result))
        made.append(Planned(name, "rollout", function, arguments, options, work, beside))
    return made


def extend_work(scene: Scene, length: int) -> Work:
    """Feeding `length` tokens to each of the rows that an extend takes, half-way through them."""
    r, config = scene.recipe, scene.recipe.rollout.sampler
    seen = scene.load.tokens / 2
    counted = flops.cached(r.model, config.extend_rows * length, seen, 0) / scene.mesh.size
    return Work(
        counted, scene.sizes["sampling copy"] + cache_bytes(scene, config.extend_rows, seen)
    )


def decode_step(scene: Scene, rows: float, seen: float) -> Work:
    """One token for each of so many rows, each with `seen` tokens in its cache."""
    counted = flops.cached(scene.recipe.model, rows, seen, rows) / scene.mesh.size
    return Work(counted, scene.sizes["sampling copy"] + cache_bytes(scene, rows, seen))


def cache_bytes(scene: Scene, rows: float, tokens: float) -> float:
    """Bytes on one chip of so many tokens in so many rows of the cache."""
    config = scene.recipe.rollout.sampler
    return scene.sizes["cache"] * (rows / config.slots) * (tokens / config.context)
