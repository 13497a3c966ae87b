"""Counts of floating-point operations, worked out from the shapes: a product and a sum are two.

XLA's own count leaves out Pallas kernels and counts the body of a loop once, so it cannot be used.
Norms, rotations, softmax and the optimizer are left out: they are bound by memory.
"""

from collections.abc import Iterable

from demyrl.model.config import ModelConfig


def block_weights(model: ModelConfig) -> int:
    """Numbers in the matrices of one layer, each used once for a token."""
    attention = 2 * model.width * (model.heads + model.kv_heads) * model.head_dim
    return attention + 3 * model.width * model.feed_forward


def matrices(model: ModelConfig, tokens: float) -> float:
    """Of the layers' matrices, for so many tokens."""
    return 2.0 * model.layers * block_weights(model) * tokens


def attention(model: ModelConfig, pairs: float) -> float:
    """Of all layers' attention, for so many pairs of a query and a key that it sees."""
    return 4.0 * model.layers * model.heads * model.head_dim * pairs


def causal_pairs(lengths: Iterable[float]) -> float:
    """Pairs in sequences of these lengths, whose tokens see those before them and themselves."""
    return sum(n * (n + 1) / 2 for n in lengths)


def head(model: ModelConfig, needed: float) -> float:
    """Of the logits at so many positions."""
    return 2.0 * model.vocab * model.width * needed


def forward(model: ModelConfig, lengths: Iterable[float], needed: float) -> float:
    """Of log-probs at `needed` positions of sequences of these lengths."""
    lengths = list(lengths)
    pairs = causal_pairs(lengths)
    return matrices(model, sum(lengths)) + attention(model, pairs) + head(model, needed)


def training(model: ModelConfig, lengths: Iterable[float], needed: float, remat: str) -> float:
    """Of the loss and its gradient: the way back is twice the way there, and some is done again.

    The head always makes its logits again; "dots" keeps all products, those of attention too.
    """
    lengths = list(lengths)
    again = {
        "none": 0.0,
        "dots": 0.0,
        "full": forward(model, lengths, 0),
    }
    return 3 * forward(model, lengths, needed) + again[remat] + head(model, needed)


def cached(model: ModelConfig, tokens: float, seen: float, needed: float) -> float:
    """Of a pass of the sampler: `tokens` in all rows, each attending to `seen` slots."""
    pairs = tokens * seen
    return matrices(model, tokens) + attention(model, pairs) + head(model, needed)
