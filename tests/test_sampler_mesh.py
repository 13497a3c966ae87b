"""The sampler on eight virtual devices: the numbers of one device, each with its part."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest

from demyrl.model.mesh import MeshConfig, make_mesh
from demyrl.model.sharding import params_sharding
from demyrl.rollout.sampler import Feed, Sampler, SamplerConfig, sampler_programs
from tests.tiny import MODEL, compilations, drawn_params

MESHES = [(8, 1, 1), (4, 2, 1), (2, 2, 2), (1, 8, 1), (1, 1, 8)]
WIDE = dataclasses.replace(MODEL, layers=1, width=64, heads=8, kv_heads=8)
SHAPES = SamplerConfig(8, 32, 4, 8, (8,), 1.0)
END = (700,)
LENGTHS = (3, 20, 9, 17, 2, 11, 5, 13)  # of prompts, up to three chunks
KEYS = np.arange(16, dtype=np.uint32).reshape(8, 2)


def mesh_of(shape):
    return make_mesh(MeshConfig(*shape))


def loaded(shape, model=WIDE):
    made = Sampler(model, SHAPES, END, mesh_of(shape) if shape else None)
    weights = drawn_params(model)
    if shape:
        weights = jax.device_put(weights, params_sharding(model, made.mesh))
    made.load(weights)
    return made


def play(made):
    """What eight prompts go on with, most of which enter in more than one chunk."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 700, n).tolist() for n in LENGTHS]
    made.extend([Feed(row, 0, prompt[:-1]) for row, prompt in enumerate(prompts)])
    last = np.array([prompt[-1] for prompt in prompts], np.int32)
    lengths = np.array(LENGTHS, np.int32) - 1
    budgets = np.array([4, 4, 0, 3, 4, 4, 1, 4], np.int32)
    return made.decode(last, lengths, budgets, KEYS, 1)


@functools.cache
def played(shape):
    made = loaded(shape)
    return made, play(made)


@pytest.mark.parametrize("shape", MESHES)
def test_a_mesh_gives_the_tokens_and_logprobs_of_one_device(shape):
    want, got = played(None)[1], played(shape)[1]
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_array_equal(got.counts, want.counts)
    np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-5)
    assert int(got.steps) == int(want.steps)


@pytest.mark.parametrize("shape", MESHES)
def test_each_device_holds_its_part_of_the_cache_and_of_the_weights(shape):
    made, _ = played(shape)
    data, inner = shape[0], shape[1] * shape[2]
    layer = made.weights["layers"][0]
    parts = [
        (made.cache.keys[0], (data, inner, 1, 1)),
        (made.cache.values[0], (data, inner, 1, 1)),
        (made.weights["embedding"], (inner, 1)),
        (layer["query"], (1, inner, 1)),
        (layer["key"], (1, inner, 1)),
        (layer["out"], (inner, 1, 1)),
        (layer["down"], (inner, 1)),
    ]
    for array, cuts in parts:
        want = tuple(size // cut for size, cut in zip(array.shape, cuts, strict=True))
        assert [shard.data.shape for shard in array.addressable_shards] == [want] * 8


@pytest.mark.parametrize("shape", [(4, 2, 1), (1, 1, 8)])
def test_a_row_is_copied_within_its_shard(shape):
    made, _ = played(shape)
    last = SHAPES.slots // shape[0] - 1
    made.copy([(0, last)])
    keys = np.asarray(made.cache.keys[0])
    np.testing.assert_array_equal(keys[last], keys[0])
    assert np.abs(keys[0]).sum() > 0


def test_a_row_is_not_copied_to_another_shard():
    made, _ = played((4, 2, 1))
    with pytest.raises(AssertionError, match="no row leaves its shard"):
        made.copy([(0, 2)])


def test_a_second_load_and_rollout_compile_nothing():
    made, first = played((2, 2, 2))
    with compilations() as found:
        made.unload()
        made.load(jax.device_put(drawn_params(WIDE), params_sharding(WIDE, made.mesh)))
        again = play(made)
    assert [name for name in found if name in ("extend", "decode", "new_cache")] == []
    np.testing.assert_array_equal(again.tokens, first.tokens)


def test_what_is_planned_has_the_shapes_and_places_of_what_runs():
    made, _ = played((2, 2, 2))
    weights, cache, *_ = sampler_programs(WIDE, SHAPES, made.mesh, END)["decode"].args
    planned, real = jax.tree.leaves((weights, cache)), jax.tree.leaves((made.weights, made.cache))
    for one, other in zip(planned, real, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert one.sharding.is_equivalent_to(other.sharding, other.ndim)


@pytest.mark.parametrize("name", ["extend_8", "decode", "copy_cache_rows"])
def test_no_program_copies_or_gathers_the_cache(name):
    mesh, shapes = mesh_of((2, 2, 2)), dataclasses.replace(SHAPES, context=4096)
    function, args, kwargs = sampler_programs(WIDE, shapes, mesh, END)[name]
    memory = function.lower(*args, **kwargs).compile().memory_analysis()
    cache = 2 * 8 * 8 * 4096 * 8 * 4 // 8  # bytes of keys and values on a device
    assert memory.alias_size_in_bytes == cache
    assert memory.temp_size_in_bytes < cache / 4


def test_weights_are_cast_before_they_travel():
    narrow = dataclasses.replace(WIDE, dtype="bfloat16")
    function, args, kwargs = sampler_programs(narrow, SHAPES, mesh_of((2, 2, 2)), END)[
        "layer_for_sampling"
    ]
    wide = jax.tree.map(lambda x: x.update(dtype="float32") if x.dtype == "bfloat16" else x, args)
    text = function.lower(*wide, **kwargs).as_text()
    moves = re.findall(r"sharding_constraint .*: tensor<(?:\d+x)*(\w+)>", text)
    assert len(moves) >= 3 * len(args[0]) and set(moves) == {"bf16"}
