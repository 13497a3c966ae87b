"""Checkpoints in Hugging Face format: there and back bit for bit, and the logits they stand for."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from configs.grpo_tcr import get_config
from demyrl import recipe
from demyrl.model.hf import builtin_folder, load_params, save_checkpoint
from demyrl.model.sharding import MeshConfig, make_mesh, params_sharding
from demyrl.model.transformer import hidden_states, map_table, output_embedding
from demyrl.weights import starting_params
from tests.tiny import MODEL, drawn_params

QWEN2 = dataclasses.replace(MODEL, qk_norm=False, attention_bias=True)
UNTIED = dataclasses.replace(MODEL, tied_embeddings=False, kv_heads=4)
TOKENS = np.array([5, 9, 300, 7, 7, 650, 1])


def sharding(model=MODEL):
    return params_sharding(model, make_mesh(MeshConfig(1, 1)))


def weights_of(model):
    """Random weights in which norms and biases are not at their neutral start."""
    rng = np.random.default_rng(1)
    noise = map_table(lambda row: jnp.asarray(rng.normal(size=row.shape) / 4, jnp.float32), model)
    return jax.tree.map(jnp.add, drawn_params(model), noise)


@pytest.mark.parametrize("model", [MODEL, QWEN2, UNTIED], ids=["qwen3", "qwen2", "untied"])
def test_saved_weights_come_back_bit_for_bit(model, tmp_path):
    weights = weights_of(model)
    save_checkpoint(tmp_path, weights, model)
    back = load_params(tmp_path, model, sharding(model))
    jax.tree.map(np.testing.assert_array_equal, back, weights)


def test_tensors_have_the_names_and_shapes_of_torch_linear_layers(tmp_path):
    save_checkpoint(tmp_path, weights_of(MODEL), MODEL)
    tensors = load_file(tmp_path / "model.safetensors")
    shapes = {name: array.shape for name, array in tensors.items()}
    layer = "model.layers.1"
    assert shapes[f"{layer}.self_attn.q_proj.weight"] == (32, 32)  # output, then input
    assert shapes[f"{layer}.self_attn.k_proj.weight"] == (16, 32)
    assert shapes[f"{layer}.self_attn.o_proj.weight"] == (32, 32)
    assert shapes[f"{layer}.self_attn.q_norm.weight"] == (8,)
    assert shapes[f"{layer}.mlp.down_proj.weight"] == (32, 48)
    assert shapes["model.embed_tokens.weight"] == (768, 32)
    assert len(shapes) == 2 + 2 * 11 and "lm_head.weight" not in shapes


def norm(x, scale):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) * scale


def turned(x):
    """Rotary positions of [token, head, channel]."""
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None] / 10_000.0 ** (np.arange(half) / half)
    cos, sin = (np.concatenate([f(angle)] * 2, -1)[:, None] for f in (np.cos, np.sin))
    return x * cos + np.concatenate([-x[..., half:], x[..., :half]], -1) * sin


def qwen3_logits(tensors, tokens):
    """The published Qwen3 forward pass over a checkpoint's tensors, in float64, head by head."""
    weight = {name: array.astype(np.float64) for name, array in tensors.items()}
    x, length = weight["model.embed_tokens.weight"][tokens], len(tokens)
    for i in range(2):
        part = {
            name.removeprefix(f"model.layers.{i}.").removesuffix(".weight"): array
            for name, array in weight.items()
        }
        h = norm(x, part["input_layernorm"])
        q, k, v = (
            (h @ part[f"self_attn.{n}_proj"].T).reshape(length, -1, 8) for n in ("q", "k", "v")
        )
        q, k = turned(norm(q, part["self_attn.q_norm"])), turned(norm(k, part["self_attn.k_norm"]))
        heads = []
        for n in range(4):
            scores = q[:, n] @ k[:, n // 2].T / np.sqrt(8)
            scores[np.triu_indices(length, 1)] = -np.inf
            probs = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(probs / probs.sum(-1, keepdims=True) @ v[:, n // 2])
        x = x + np.concatenate(heads, -1) @ part["self_attn.o_proj"].T
        h = norm(x, part["post_attention_layernorm"])
        gate = h @ part["mlp.gate_proj"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ part["mlp.up_proj"].T)) @ part["mlp.down_proj"].T
    return norm(x, weight["model.norm.weight"]) @ weight["model.embed_tokens.weight"].T


@jax.jit
def our_logits(params, tokens):
    blank = jnp.zeros_like(tokens)
    hidden = hidden_states(params, tokens, blank + jnp.arange(tokens.shape[1]), blank + 1, MODEL)
    return hidden[0] @ output_embedding(params).T


def test_the_tensors_of_a_checkpoint_give_our_logits_by_the_published_architecture(tmp_path):
    weights = weights_of(MODEL)
    save_checkpoint(tmp_path, weights, MODEL)
    want = qwen3_logits(load_file(tmp_path / "model.safetensors"), TOKENS)
    np.testing.assert_allclose(our_logits(weights, jnp.asarray(TOKENS)[None]), want, atol=1e-4)


def test_torch_gives_our_logits(tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not a dependency; nothing to compare")
    from transformers import AutoModelForCausalLM

    weights = weights_of(MODEL)
    save_checkpoint(tmp_path, weights, MODEL)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        want = theirs(torch.tensor(TOKENS)[None]).logits[0].numpy()
    np.testing.assert_allclose(our_logits(weights, jnp.asarray(TOKENS)[None]), want, atol=1e-4)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"width": 64}, "has hidden_size = 32, this config has model.width = 64"),
        ({"layers": 3}, "has num_hidden_layers = 2, this config has model.layers = 3"),
        ({"vocab": 1024}, "has vocab_size = 768, this config has model.vocab = 1024"),
        ({"rope_theta": 1e6}, "has rope_theta = 10000.0, this config has model.rope_theta"),
        ({"tied_embeddings": False}, "has tie_word_embeddings = True"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_the_key(changes, message, tmp_path):
    save_checkpoint(tmp_path, drawn_params(MODEL), MODEL)
    other = dataclasses.replace(MODEL, **changes)
    with pytest.raises(ValueError, match=message):
        load_params(tmp_path, other, sharding(other))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"qk_norm": True}, "has no tensor model.layers.0.self_attn.k_norm.weight"),
        ({"attention_bias": False}, "has a tensor model.layers.0.self_attn.k_proj.bias"),
    ],
)
def test_a_tensor_that_is_missing_or_left_over_is_refused_by_name(changes, message, tmp_path):
    save_checkpoint(tmp_path, drawn_params(QWEN2), QWEN2)
    other = dataclasses.replace(QWEN2, **changes)
    with pytest.raises(ValueError, match=message):
        load_params(tmp_path, other, sharding(other))


def test_a_head_that_is_saved_though_it_is_tied_is_left_out(tmp_path):
    save_checkpoint(tmp_path, drawn_params(MODEL), MODEL)
    tensors = load_file(tmp_path / "model.safetensors")
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}
    save_file(tensors | head, tmp_path / "model.safetensors")
    assert "head" not in load_params(tmp_path, MODEL, sharding())


def test_a_tensor_of_another_shape_than_config_json_says_is_refused_by_name(tmp_path):
    save_checkpoint(tmp_path, drawn_params(MODEL), MODEL)
    wide = dataclasses.replace(MODEL, feed_forward=64)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    with pytest.raises(ValueError, match=r"down_proj.weight has shape \(32, 48\)"):
        load_params(tmp_path, wide, sharding(wide))


def test_weights_are_placed_where_the_sharding_says(tmp_path):
    save_checkpoint(tmp_path, drawn_params(MODEL), MODEL)
    places = params_sharding(MODEL, make_mesh(MeshConfig(2, 2)))
    params = load_params(tmp_path, MODEL, places)
    assert jax.tree.map(lambda p: p.sharding, params) == places


def test_the_builtin_model_is_the_one_of_the_tiny_config_and_all_finite():
    settings = recipe.read(get_config("tiny"))
    assert settings.source == "builtin:tiny"
    params = starting_params(settings.source, settings.model, make_mesh(settings.mesh), seed=0)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
    assert (builtin_folder("builtin:tiny") / "tokenizer.json").is_file()


def test_a_source_that_is_nothing_is_refused_with_what_to_give(tmp_path):
    with pytest.raises(ValueError, match="neither the workdir of a run nor a folder with"):
        starting_params(str(tmp_path / "missing"), MODEL, make_mesh(MeshConfig(1, 1)), 0)


def test_a_run_without_a_checkpoint_is_refused(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ValueError, match="no intact checkpoint is in it"):
        starting_params(str(tmp_path), MODEL, make_mesh(MeshConfig(1, 1)), 0)
