"""The size and shape of a Qwen-style decoder, and nothing about how it is trained."""

import dataclasses

AUTO = "auto"  # to be replaced by what the platform is fast at, before anything is computed
DTYPES = ("float32", "bfloat16", "float64", AUTO)  # float64: for tests, with jax_enable_x64


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder: Qwen3 with `qk_norm`, Qwen2 with `attention_bias`, Llama with neither."""

    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    rope_theta: float
    norm_eps: float
    qk_norm: bool
    attention_bias: bool  # of query, key and value, as in Qwen2
    tied_embeddings: bool
    max_positions: int  # the longest sequence the weights were made for; 0: not known
    dtype: str  # of activations and of the sampling copy: one of DTYPES

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model.heads is {self.heads} and model.kv_heads is {self.kv_heads}: every "
                "key/value head serves the same number of query heads, so the second must divide "
                "the first."
            )
        if self.head_dim % 2:
            raise ValueError(
                f"model.head_dim is {self.head_dim}: rotary positions turn pairs of channels, so "
                "it must be even."
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"model.dtype is {self.dtype!r}: use one of {', '.join(DTYPES)}.")
