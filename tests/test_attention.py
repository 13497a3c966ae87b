"""Attention over packed rows, by every kernel, against plain attention; and over a cache."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding

from demyrl.model import attention, attention_splash
from demyrl.model.attention import (
    attend,
    attend_at_once,
    attend_segments,
    frequencies,
    suited_kernel,
)
from demyrl.model.attention_blocks import tile_ranges
from demyrl.model.attention_splash import causal_kernel, without_strangers
from demyrl.model.mesh import MeshConfig, make_mesh, spec


@pytest.fixture(autouse=True)
def narrow_blocks(monkeypatch):
    """Rows of a few hundred tokens are several blocks of every kernel."""
    monkeypatch.setattr(attention_splash, "BLOCK", 128)
    monkeypatch.setattr(attention, "CUDNN_BLOCK", 128)


def packed_rows(length, heads=4, kv_heads=2, size=16, rows=3, dtype=np.float32):
    """Queries, keys, values and segments: random ones, of which a row has up to 7, then padding.

    The last row is padding from its start.
    """
    rng = np.random.default_rng(0)
    shapes = [(rows, length, n, size) for n in (heads, kv_heads, kv_heads)]
    draws = [rng.normal(size=shape).astype(dtype) for shape in shapes]
    segments = np.zeros((rows, length), np.int32)
    for row in segments[:-1]:
        ends = np.sort(rng.choice(np.arange(1, length), rng.integers(1, 8), replace=False))
        for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False), 1):
            row[start:end] = number
    return (*draws, segments)


def plain(q, k, v, segments):
    """Attention by its formula, in float64 if it can be."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.astype(jnp.promote_types(x.dtype, float)) for x in (q, k, v))
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    order = jnp.arange(q.shape[1])
    visible = (segments[:, :, None] == segments[:, None, :]) & (order[:, None] >= order)
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / q.shape[-1] ** 0.5
    probs = jax.nn.softmax(jnp.where(visible[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", probs, v)


@functools.partial(jax.jit, static_argnums=0)
def results(function, q, k, v, segments):
    """The values, and the gradients of a weighted sum of those at real tokens."""
    weights = np.random.default_rng(1).normal(size=q.shape).astype(q.dtype)

    def total(q, k, v):
        out = function(q, k, v, segments)
        return jnp.sum(out * weights * (segments > 0)[..., None, None]), out

    grads, out = jax.grad(total, argnums=(0, 1, 2), has_aux=True)(q, k, v)
    return out, *grads


def by(kernel, mesh=None):
    return lambda *row: attend_segments(*row, mesh, kernel)


def assert_equal(got, want, segments, atol):
    """The same gradients, and the same values at real tokens."""
    np.testing.assert_allclose(got[0][segments > 0], want[0][segments > 0], atol=atol)
    for one, other in zip(got[1:], want[1:], strict=True):
        np.testing.assert_allclose(one, other, atol=atol)


@pytest.mark.parametrize(
    ("kernel", "length", "heads", "kv_heads", "size"),
    [
        ("blocks", 333, 4, 2, 16),
        ("blocks", 150, 4, 1, 128),
        ("cudnn", 201, 8, 2, 64),
        ("splash", 300, 4, 1, 64),
    ],
)
def test_a_kernel_gives_plain_attention_and_its_gradients_and_stays_finite_in_padding(
    kernel, length, heads, kv_heads, size
):
    row = packed_rows(length, heads, kv_heads, size)
    with jax.enable_x64(True):
        want = results(plain, *row)
    got = results(by(kernel), *row)
    assert_equal(got, want, row[3], atol=1e-5)
    assert np.all(np.isfinite(got[0]))


def test_nothing_of_one_segment_reaches_another():
    q, k, v, _ = packed_rows(200, rows=1)
    segments = np.array([[1] * 70 + [2] * 90 + [0] * 40])
    function = jax.jit(by("blocks"))
    out = function(q, k, v, segments)
    past = (np.arange(200) < 70)[:, None, None]
    changed = function(q, np.where(past, 3 * k, k), np.where(past, 1 + v, v), segments)
    joined = function(q, k, v, np.minimum(segments, 1))
    np.testing.assert_array_equal(out[:, 70:160], changed[:, 70:160])
    assert np.all(np.any(np.asarray(out != joined), axis=(2, 3))[:, 70:160])


@pytest.mark.parametrize("length", [40, 100])
def test_float64_stays_float64_in_rows_of_one_tile_and_of_two(length):
    with jax.enable_x64(True):
        row = packed_rows(length, heads=2, size=8, dtype=np.float64)
        got = results(by("blocks"), *row)
        assert {x.dtype for x in got} == {np.dtype("float64")}
        assert_equal(got, results(plain, *row), row[3], atol=1e-13)


def test_the_softmax_of_bfloat16_is_summed_in_more_digits():
    q, k, v, _ = packed_rows(600, rows=1, dtype=jnp.bfloat16)  # adding ones in it ends at 256
    segments = np.ones((1, 600), np.int32)
    out = jax.jit(by("blocks"))(q * 0, k, np.ones_like(v), segments)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(np.float32), 1, atol=2**-7)


def test_tiles_visit_exactly_the_tiles_they_share_a_segment_with():
    *_, segments = packed_rows(160, rows=8)
    looks, seen = jax.jit(tile_ranges)(segments.reshape(8, 20, 8))
    tiles = np.arange(20)
    for row in range(8):
        members = [set(tile.tolist()) - {0} for tile in segments[row].reshape(20, 8)]
        want = np.array([[i >= j and bool(members[i] & members[j]) for j in tiles] for i in tiles])
        (first, past), (low, high) = looks[row].T, seen[row].T
        np.testing.assert_array_equal((first[:, None] <= tiles) & (tiles < past[:, None]), want)
        np.testing.assert_array_equal((low <= tiles[:, None]) & (tiles[:, None] < high), want)


def test_splash_attention_skips_what_shares_no_segment_but_the_diagonal():
    segments = jnp.repeat(jnp.asarray([1, 1, 2, 2, 0, 0]), 128)
    plan = jax.jit(
        lambda segments: without_strangers(causal_kernel(768, 2, 128, True), segments, 128)
    )
    kernel = plan(segments)
    want = np.diag(np.ones(6, bool))
    want[1, 0] = want[3, 2] = True
    for plan in (kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info):
        np.testing.assert_array_equal(plan.block_mask[0] > 0, want)
    np.testing.assert_array_equal(kernel.fwd_mask_info.data_next[0, 3], [2, 2, 2, 3, 3, 3])
    np.testing.assert_array_equal(kernel.dkv_mask_info.data_next[0, :, 2], [2, 2, 2, 3, 3, 3])


def test_a_long_row_never_holds_its_scores_forward_or_backward():
    length, heads = 4096, 4
    shapes = [jax.ShapeDtypeStruct((1, length, n, 16), jnp.float32) for n in (heads, 2, 2)]
    segments = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def total(q, k, v, segments):
        return jnp.sum(by("blocks")(q, k, v, segments) ** 2)

    program = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(*shapes, segments).compile()
    scores = length * length * heads * 4
    assert program.memory_analysis().temp_size_in_bytes < scores / 25


def test_a_mesh_gives_the_values_and_gradients_of_one_device():
    row = packed_rows(200, heads=8, kv_heads=4, rows=4)
    mesh = make_mesh(MeshConfig(data=2, tensor=2, sequence=2))
    want = results(by("blocks"), *row)
    got = results(by("blocks", mesh), *row)
    assert_equal(got, want, row[3], atol=2e-6)
    wanted = NamedSharding(mesh, spec(("rows", "tokens", "heads", None)))
    assert got[0].sharding.is_equivalent_to(wanted, 4)


def test_tokens_and_heads_change_places_without_gathering_the_row():
    mesh = make_mesh(MeshConfig(data=1, tensor=1, sequence=8))
    sharding = NamedSharding(mesh, spec(("rows", "tokens", "heads", None)))
    q = jax.ShapeDtypeStruct((1, 512, 8, 16), jnp.float32, sharding=sharding)
    segments = jax.ShapeDtypeStruct((1, 512), jnp.int32)
    text = jax.jit(by("blocks", mesh)).lower(q, q, q, segments).compile().as_text()
    assert "all-to-all" in text
    assert "f32[1,512,8,16]" not in text


@pytest.mark.parametrize(
    ("platform", "dtype", "size", "kernel"),
    [
        ("tpu", "bfloat16", 64, "splash"),
        ("tpu", "float32", 128, "splash"),
        ("gpu", "bfloat16", 128, "cudnn"),
        ("gpu", "float32", 128, "blocks"),
        ("gpu", "bfloat16", 36, "blocks"),
        ("cpu", "bfloat16", 128, "blocks"),
    ],
)
def test_a_platform_gets_a_kernel_that_takes_its_inputs(platform, dtype, size, kernel):
    assert suited_kernel(platform, jnp.zeros((1, 1, 1, size), dtype)) == kernel


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install 'demyrl[plan]'"
)
def test_splash_attention_compiles_for_a_tpu_that_is_not_here(monkeypatch):
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    chips = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
    mesh = make_mesh(MeshConfig(data=2, tensor=2, sequence=2), chips)
    rows = NamedSharding(mesh, spec(("rows", "tokens")))
    heads = NamedSharding(mesh, spec(("rows", "tokens", "heads", None)))
    q, k = (jax.ShapeDtypeStruct((2, 1024, n, 64), jnp.bfloat16, sharding=heads) for n in (8, 4))
    segments = jax.ShapeDtypeStruct((2, 1024), jnp.int32, sharding=rows)

    def total(q, k, v, segments):
        return jnp.sum(attend_segments(q, k, v, segments, mesh).astype(jnp.float32))

    program = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(q, k, k, segments).compile()
    assert program.as_text().count('custom_call_target="tpu_custom_call"') == 3


def test_many_new_tokens_see_the_cache_as_if_all_at_once(monkeypatch):
    monkeypatch.setattr(attention, "MOST_SCORES", 0)
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(2, 300, 4, 8)), jnp.float32)
    k, v = jnp.asarray(rng.normal(size=(2, 2, 2, 500, 8)), jnp.float32)
    starts = jnp.asarray([[0], [150]])
    visible = jnp.arange(500) <= (starts + jnp.arange(300))[..., None]
    want = jax.jit(attend_at_once)(q, k, v, visible)
    np.testing.assert_allclose(jax.jit(attend)(q, k, v, visible), want, atol=1e-6)


def test_many_new_tokens_over_a_long_cache_never_hold_all_their_scores():
    q = jax.ShapeDtypeStruct((1, 2048, 16, 8), jnp.float32)
    k = jax.ShapeDtypeStruct((1, 2, 4096, 8), jnp.float32)
    visible = jax.ShapeDtypeStruct((1, 2048, 4096), bool)
    program = jax.jit(attend).lower(q, k, k, visible).compile()
    scores = 2048 * 4096 * 16 * 4
    assert program.memory_analysis().temp_size_in_bytes < scores / 4


def test_one_position_turns_the_first_pair_of_channels_by_one_radian():
    turns = frequencies(8, 10_000.0)
    np.testing.assert_allclose(turns, [1, 0.1, 0.01, 0.001], rtol=1e-6)
