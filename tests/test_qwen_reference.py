"""The published decoders once more, in NumPy and float64, without our code, torch or a library.

They read a checkpoint's tensors and config.json by the names found there. That the golden answers
agree with them says that what `test_parity` holds us to is the architecture itself.
"""

import numpy as np
import pytest

from experiments.make_golden import CASES, GAPS, drawn, read

NAMES = [name for name in CASES if name != "long"]


def norm(x, scale, eps):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + eps) * scale


def turned(x, positions, theta):
    """Rotary positions of [token, head, channel].

    The exponents, the powers, their inverses and the angles are float32, as in all published code:
    of a position in the thousands that decides the fourth digit of a logit.
    """
    size = x.shape[-1]
    exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    powers = np.power(theta, exponents.astype(np.float64)).astype(np.float32)
    angle = np.asarray(positions, np.float32)[:, None] * (np.float32(1) / powers)
    cos, sin = (np.tile(f(angle.astype(np.float64)), 2)[:, None] for f in (np.cos, np.sin))
    half = np.concatenate([-x[..., size // 2 :], x[..., : size // 2]], -1)
    return x * cos + half * sin


def attended(h, part, positions, config):
    """Self-attention of one layer over one sequence, head by head."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]

    def projected(name, count):
        x = h @ part[f"self_attn.{name}_proj.weight"].T + part.get(f"self_attn.{name}_proj.bias", 0)
        x = x.reshape(len(h), count, -1)
        scale = part.get(f"self_attn.{name}_norm.weight")
        return x if scale is None else norm(x, scale, config["rms_norm_eps"])

    theta = config["rope_parameters"]["rope_theta"]
    q = turned(projected("q", heads), positions, theta)
    k = turned(projected("k", kv_heads), positions, theta)
    v = projected("v", kv_heads)
    out = []
    for n in range(heads):
        scores = q[:, n] @ k[:, n * kv_heads // heads].T / np.sqrt(q.shape[-1])
        scores[np.triu_indices(len(h), 1)] = -np.inf
        probs = np.exp(scores - scores.max(-1, keepdims=True))
        out.append(probs / probs.sum(-1, keepdims=True) @ v[:, n * kv_heads // heads])
    return np.concatenate(out, -1) @ part["self_attn.o_proj.weight"].T


def reference_logits(tensors, config, tokens, positions):
    """Of one sequence, by Qwen2, Qwen3 or Llama: whichever the tensors are of."""
    weight = {name: array.astype(np.float64) for name, array in tensors.items()}
    embedding, eps = weight["model.embed_tokens.weight"], config["rms_norm_eps"]
    x = embedding[tokens]
    for i in range(config["num_hidden_layers"]):
        part = {name.removeprefix(f"model.layers.{i}."): array for name, array in weight.items()}
        h = norm(x, part["input_layernorm.weight"], eps)
        x = x + attended(h, part, positions, config)
        h = norm(x, part["post_attention_layernorm.weight"], eps)
        gate = h @ part["mlp.gate_proj.weight"].T
        up = h @ part["mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ part["mlp.down_proj.weight"].T
    head = embedding if config["tie_word_embeddings"] else weight["lm_head.weight"]
    return norm(x, weight["model.norm.weight"], eps) @ head.T


def golden_and_reference(name, tokens, logits, positions=None):
    """Two answers about a sequence of a golden file."""
    answers = read(name)
    tensors = {key: drawn(key, shape, answers.seed) for key, shape in answers.shapes.items()}
    tokens = answers.arrays[tokens]
    positions = range(len(tokens)) if positions is None else positions
    return answers.arrays[logits], reference_logits(tensors, answers.config, tokens, positions)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("row", range(3))
def test_the_golden_logits_are_those_of_the_published_architecture(name, row):
    golden, reference = golden_and_reference(name, f"tokens{row}", f"logits{row}")
    np.testing.assert_allclose(golden, reference, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_so_are_those_of_positions_up_to_32767(name):
    golden, reference = golden_and_reference(name, "gap_tokens", "gap_logits", GAPS)
    np.testing.assert_allclose(golden, reference, rtol=0, atol=2e-5)
