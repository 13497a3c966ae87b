"""The sampler: a cache on the devices, and what the host must know to fill it.

Rows of the cache are spread over the data shards of a mesh, and each process drives those of its
own shards. All processes run the same programs in the same order; what one of them has nothing to
do in, it runs with nothing. The programs themselves are in `rollout/programs.py`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Int, UInt32

from demyrl import processes
from demyrl.arrays import Chunk, KVCache
from demyrl.model.config import ModelConfig
from demyrl.model.kvcache import abstract_cache
from demyrl.model.mesh import HEADS_SPREAD, MeshConfig, make_mesh, spec
from demyrl.model.sharding import abstract_params, replicated, rows_sharding
from demyrl.model.transformer import Parameter, Params, map_table
from demyrl.rollout.programs import (
    copy_cache_rows,
    decode,
    extend,
    for_sampling,
    layer_for_sampling,
    new_cache,
    rest_for_sampling,
)


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    """Shapes of the sampler's two programs; each combination compiles once."""

    slots: int  # cache rows, each one trajectory in progress
    context: int  # tokens a row can hold
    decode_steps: int  # most tokens a row gets in one visit to the device
    extend_rows: int  # rows that one extend feeds
    extend_lengths: tuple[int, ...]  # ladder of chunk lengths, ascending
    temperature: float  # 0 is greedy: for evaluation only

    def __post_init__(self) -> None:
        if list(self.extend_lengths) != sorted(set(self.extend_lengths)) or not self.extend_lengths:
            raise ValueError(
                f"rollout.extend_lengths is {self.extend_lengths}: give at least one length, in "
                "ascending order."
            )
        if self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature}: it can't be negative.")


@dataclasses.dataclass(frozen=True)
class Feed:
    """Tokens to append to one row of the cache, from slot `start` on."""

    row: int
    start: int
    tokens: Sequence[int]


class Round(NamedTuple):
    """One run of `extend`: tokens for up to so many rows of each data shard."""

    length: int  # of the ladder
    feeds: tuple[Sequence[Feed], ...]  # by shard


class Sampler:
    """A cache, the weights that fill it, and the programs that run over both.

    The only state is the cache: what its rows hold is the caller's bookkeeping. Rows are counted
    within the process; those of a data shard stand next to each other.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: SamplerConfig,
        end_tokens: tuple[int, ...],
        mesh: Mesh | None = None,
    ):
        self.model, self.config, self.end_tokens = model, config, end_tokens
        self.mesh = mesh or make_mesh(MeshConfig(1, 1, 1), jax.local_devices()[:1])
        processes.check(self.mesh)
        owners = [shard.flat[0].process_index for shard in self.mesh.devices]
        self.shards, data = owners.count(processes.index()), len(owners)
        assert config.slots % data == config.extend_rows % data == 0, "checked by recipe.read"
        self.shard_rows, self.shard_feeds = config.slots // data, config.extend_rows // data
        self.rows = self.shards * self.shard_rows  # that this process drives
        self.cache: KVCache | None = None
        self.weights: Params | None = None
        self.warm = False

    def load(self, params: Params) -> None:
        """Samples with these weights from now on; what the cache held is void."""
        if self.cache is None:
            rows, slots = self.config.slots, self.config.context
            self.cache = new_cache(config=self.model, rows=rows, slots=slots, mesh=self.mesh)
        self.weights = None  # or there would be two copies for a while
        self.weights = for_sampling(params, self.model, self.mesh)
        if not self.warm:
            self.warm_up()

    def warm_up(self) -> None:
        """Compiles what a first rollout may do without and a later one may need, on nothing."""
        self.warm = True
        for length in self.config.extend_lengths:
            self._extend(length, ((),) * self.shards)
        self.copy(())

    def unload(self) -> None:
        """Leaves the memory of the devices to others, until the next `load`."""
        self.cache = self.weights = None

    def shard(self, row: int) -> int:
        """The data shard of this process that holds a row."""
        return row // self.shard_rows

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies row `source` over row `target` for each pair, in order; both are of one shard."""
        sources, targets = np.zeros((2, self.shards, self.shard_rows), np.int32)
        counts = np.zeros(self.shards, np.int32)
        for source, target in pairs:
            shard = self.shard(source)
            assert shard == self.shard(target), "no row leaves its shard"
            at = shard, counts[shard]
            sources[at], targets[at] = source % self.shard_rows, target % self.shard_rows
            counts[shard] += 1
        where = self.place((sources.reshape(-1), targets.reshape(-1), counts))
        self.cache = copy_cache_rows(self.cache, *where, mesh=self.mesh)

    def rounds(self, feeds: Sequence[Feed]) -> list[Round]:
        """The runs of `extend` that feed all this, the longest first.

        Raises ValueError when a feed does not fit: a write past the end would be lost silently.
        """
        for feed in feeds:
            if feed.start + len(feed.tokens) > self.config.context:
                raise ValueError(
                    f"row {feed.row} holds {feed.start} tokens and is fed {len(feed.tokens)} more, "
                    f"but has {self.config.context} slots."
                )
        by_shard: list[list[Feed]] = [[] for _ in range(self.shards)]
        for feed in feeds:
            by_shard[self.shard(feed.row)].append(feed)
        ladder = self.config.extend_lengths
        batches = [feed_batches(own, ladder, self.shard_feeds) for own in by_shard]
        lengths = merged([[rung(batch, ladder) for batch in own] for own in batches])
        parts = zip_longest(*batches, fillvalue=())
        return [Round(*each) for each in zip(lengths, parts, strict=True)]

    def extend(self, feeds: Sequence[Feed], lengths: Sequence[int] = ()) -> None:
        """Appends each feed's tokens to its row.

        With several processes, `lengths` are those of the rounds that all run: as many and as long
        as any of them needs.
        """
        nothing = ((),) * self.shards
        for run, length in zip_longest(self.rounds(feeds), lengths):
            self._extend(length or run.length, run.feeds if run else nothing)

    def _extend(self, length: int, feeds: Sequence[Sequence[Feed]]) -> None:
        tokens = np.zeros((self.shards, self.shard_feeds, length), np.int32)
        starts, counts = np.zeros((2, self.shards, self.shard_feeds), np.int32)
        rows = np.full((self.shards, self.shard_feeds), self.shard_rows, np.int32)  # none of them
        for shard, some in enumerate(feeds):
            for i, feed in enumerate(some):
                at, count = (shard, i), len(feed.tokens)
                rows[at], starts[at], counts[at] = feed.row % self.shard_rows, feed.start, count
                tokens[shard, i, :count] = feed.tokens
        arrays = (
            rows.reshape(-1),
            tokens.reshape(-1, length),
            starts.reshape(-1),
            counts.reshape(-1),
        )
        self.cache = extend(
            self.weights, self.cache, *self.place(arrays), config=self.model, mesh=self.mesh
        )

    def decode(
        self,
        last: Int[np.ndarray, " B"],
        lengths: Int[np.ndarray, " B"],
        budgets: Int[np.ndarray, " B"],
        keys: UInt32[np.ndarray, "B 2"],
        enough: int,
    ) -> Chunk:
        """The next tokens of every row with a budget, on the host.

        `enough` counts the rows of all processes, and each gives the same.
        """
        assert np.all(lengths + budgets <= self.config.context), "a budget leads past the cache"
        self.cache, chunk = decode(
            self.weights, self.cache, *self.place((last, lengths, budgets, keys)), np.int32(enough),
            **decode_options(self.model, self.config, self.end_tokens, self.mesh),
        )  # fmt: skip
        steps = jax.device_get(chunk.steps)
        return processes.own_rows(chunk.replace(steps=None)).replace(steps=steps)

    def place(self, arrays: Any) -> Any:
        """This process's rows of some arrays, as the programs take them."""
        one = self.mesh.size == 1  # a program's own placing is faster then
        return arrays if one else processes.spread_rows(arrays, rows_sharding(self.mesh))


def rung(feeds: Sequence[Feed], ladder: Sequence[int]) -> int:
    """The shortest length of the ladder that holds these feeds."""
    longest = max(len(feed.tokens) for feed in feeds)
    return next(length for length in ladder if length >= longest)


def feed_batches(feeds: Sequence[Feed], ladder: Sequence[int], size: int) -> list[Sequence[Feed]]:
    """The feeds in chunks of up to the longest length, so many at a time, the longest first.

    All chunks of a row but its last are of that length, so they come in their order.
    """
    longest, found = ladder[-1], []
    while feeds:
        heads = [Feed(f.row, f.start, f.tokens[:longest]) for f in feeds]
        heads.sort(key=lambda feed: len(feed.tokens), reverse=True)
        found += [heads[i : i + size] for i in range(0, len(heads), size)]
        rest = [Feed(f.row, f.start + longest, f.tokens[longest:]) for f in feeds]
        feeds = [feed for feed in rest if feed.tokens]
    return sorted(found, key=lambda batch: rung(batch, ladder), reverse=True)


def merged(lengths: Sequence[Sequence[int]]) -> list[int]:
    """The lengths of rounds that serve all, each of whom needs some, the longest first."""
    return [max(each) for each in zip_longest(*lengths, fillvalue=0)]


# The programs without a cache: for those who only compile them


class Program(NamedTuple):
    """A jitted function, and what it is called with: shapes and places in place of arrays."""

    function: Callable
    args: tuple
    kwargs: dict[str, Any]


def decode_options(
    model: ModelConfig, config: SamplerConfig, end_tokens: tuple[int, ...], mesh: Mesh
) -> dict[str, Any]:
    """What is fixed in a sampler's decode program."""
    return {
        "config": model,
        "steps": config.decode_steps,
        "end_tokens": end_tokens,
        "temperature": config.temperature,
        "mesh": mesh,
    }


def abstract_weights(model: ModelConfig, mesh: Mesh) -> Params:
    """The shapes and places of the sampler's copy of the weights."""

    def leaf(row: Parameter) -> jax.ShapeDtypeStruct:
        stacked = row.axes[0] == "layers"
        place = NamedSharding(mesh, spec(row.axes[stacked:], HEADS_SPREAD))
        return jax.ShapeDtypeStruct(row.shape[stacked:], model.dtype, sharding=place)

    table = map_table(leaf, model)
    return table | {"layers": [table["layers"]] * model.layers}


def sampler_programs(
    model: ModelConfig, config: SamplerConfig, mesh: Mesh, end_tokens: tuple[int, ...]
) -> dict[str, Program]:
    """All programs of a sampler on the mesh, by name: `extend_N` feeds chunks of N tokens."""
    by_row, everywhere = rows_sharding(mesh), replicated(mesh)

    def array(*shape: int, dtype: str = "int32", place: NamedSharding = by_row) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    working = jax.tree.map(
        lambda leaf: array(*leaf.shape, dtype=model.dtype, place=leaf.sharding),
        abstract_params(model, mesh),
    )
    stacks, number = working.pop("layers"), array(place=everywhere)
    cache = abstract_cache(model, config.slots, config.context, mesh)
    on_cache = abstract_weights(model, mesh), cache
    slots, feeds = config.slots, config.extend_rows
    of_slots, of_feeds, fixed = array(slots), array(feeds), {"config": model, "mesh": mesh}
    state = of_slots, of_slots, of_slots, array(slots, 2, dtype="uint32"), number
    options = decode_options(model, config, end_tokens, mesh)
    counts = array(mesh.shape["data"])
    extends = {
        f"extend_{length}": Program(
            extend, (*on_cache, of_feeds, array(feeds, length), of_feeds, of_feeds), fixed
        )
        for length in config.extend_lengths
    }
    return {
        "layer_for_sampling": Program(layer_for_sampling, (stacks, number), fixed),
        "rest_for_sampling": Program(rest_for_sampling, (working,), fixed),
        **extends,
        "decode": Program(decode, (*on_cache, *state), options),
        "copy_cache_rows": Program(
            copy_cache_rows, (cache, of_slots, of_slots, counts), {"mesh": mesh}
        ),
    }
