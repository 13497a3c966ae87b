"""The nouns of the device: what a batch, a cache, a chunk and a train state are.

Shape letters, the same everywhere: P problems in a step, G trajectories per problem, B rows of a
batch, T tokens of a row, C tokens of a chunk, S slots of a cache row, V vocabulary, D model width,
F feed forward, L layers, N query heads, K key/value heads, R = N/K, H head size.

In every `[B, T]` array, index t describes `tokens[:, t]`.
"""

from typing import Any

from flax import struct
from jaxtyping import Array, Float, Int


@struct.dataclass
class Batch:
    """Trajectories packed in rows; several may share a row, told apart by `segments`."""

    tokens: Int[Array, "B T"]
    positions: Int[Array, "B T"]  # position within the own trajectory
    segments: Int[Array, "B T"]  # 1, 2, ... within a row; 0 is padding
    weights: Float[Array, "B T"]  # what a token's loss counts for; sums to 1 over a whole update
    old_logprobs: Float[Array, "B T"]  # of the weights that began the step; 0 before `score`
    advantages: Float[Array, "B T"]
    ref_logprobs: Float[Array, "B T"]  # of the weights that began the run; 0 without a KL term


@struct.dataclass
class KVCache:
    """Keys and values of B slots, one array a layer so that decoding can update each in place."""

    keys: tuple[Float[Array, "B K S H"], ...]
    values: tuple[Float[Array, "B K S H"], ...]


@struct.dataclass
class Chunk:
    """What one visit to the device sampled: up to C tokens in each of B slots."""

    tokens: Int[Array, "B C"]
    logprobs: Float[Array, "B C"]
    counts: Int[Array, " B"]  # how many of the C are real
    ended: Any  # bool [B]: the last real token is an end token
    steps: Int[Array, ""]  # decode steps taken


@struct.dataclass
class TrainState:
    """Everything an update changes: arrays only, no functions."""

    step: Int[Array, ""]  # updates applied
    params: Any
    opt_state: Any
