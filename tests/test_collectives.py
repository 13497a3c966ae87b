"""What compiled programs send between devices, read from their text."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from demyrl.planning.collectives import collectives


@functools.cache
def mesh():
    return Mesh(np.array(jax.devices()[:4]), ("x",))


def struct(shape, *axes):
    place = NamedSharding(mesh(), PartitionSpec(*axes))
    return jax.ShapeDtypeStruct(shape, "float32", sharding=place)


def compiled_text(function, *arguments):
    return jax.jit(function).lower(*arguments).compile().as_text()


def test_a_gather_in_a_scan_counts_as_often_as_the_scan_turns():
    def layers(x, weights):
        def layer(x, w):
            whole = jax.lax.with_sharding_constraint(w, NamedSharding(mesh(), PartitionSpec()))
            return jnp.sin(x @ whole), None

        return jax.lax.scan(layer, x, weights)[0]

    text = compiled_text(layers, struct((8, 16)), struct((6, 16, 16), None, "x"))
    gathers = collectives(text)["all-gather"]
    assert gathers == (6, 6 * 16 * 16 * 4)


def test_a_sum_over_devices_is_one_reduction_of_the_whole_result():
    text = compiled_text(lambda a, b: a @ b, struct((8, 32), None, "x"), struct((32, 8), "x"))
    assert collectives(text) == {"all-reduce": (1, 8 * 8 * 4)}


def test_an_exchange_counts_what_a_device_gives_away_or_gets():
    def turned(x):
        return jax.lax.all_to_all(x, "x", split_axis=1, concat_axis=0, tiled=True)

    here, there = PartitionSpec("x"), PartitionSpec(None, "x")
    moved = jax.shard_map(turned, mesh=mesh(), in_specs=here, out_specs=there)
    assert collectives(compiled_text(moved, struct((8, 8), "x"))) == {"all-to-all": (1, 2 * 8 * 4)}


def test_a_program_of_one_device_sends_nothing():
    assert collectives(compiled_text(lambda a: a @ a, jnp.zeros((8, 8)))) == {}


TPU_TEXT = """
HloModule jit_f, is_scheduled=true

%begin (p: bf16[512,512]) -> (bf16[512,512], bf16[2048,512]) {
  %p = bf16[512,512]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %all-gather.17 = bf16[2048,512]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=6, dimensions={0}
  ROOT %custom-call.2 = (bf16[512,512]{1,0}, bf16[2048,512]{1,0}) custom-call(%all-gather.17), custom_call_target="AsyncCollectiveStart"
}

%end (p.1: bf16[512,512]) -> bf16[2048,512] {
  %p.1 = bf16[512,512]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  ROOT %all-gather.21 = bf16[2048,512]{1,0:T(8,128)(2,1)} all-gather(%p.1), channel_id=6, dimensions={0}
}

%all-reduce-scatter.3 (p.2: f32[1024]) -> f32[256] {
  %p.2 = f32[1024]{0:T(1024)} parameter(0)
  %all-reduce.9 = f32[1024]{0:T(1024)} all-reduce(%p.2), channel_id=7, to_apply=%add
  ROOT %dynamic-slice.1 = f32[256]{0:T(256)} dynamic-slice(%all-reduce.9, %c), dynamic_slice_sizes={256}
}

%body (t: (s32[], bf16[512,512])) -> (s32[], bf16[512,512]) {
  %t = (s32[]{:T(128)}, bf16[512,512]{1,0:T(8,128)(2,1)S(1)}) parameter(0)
  %w = bf16[512,512]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%t), index=1
  %start = (bf16[512,512]{1,0}, bf16[2048,512]{1,0}) fusion(%w), kind=kCustom, calls=%begin
  %done = bf16[2048,512]{1,0:T(8,128)(2,1)S(1)} fusion(%start), kind=kCustom, calls=%end
  %scattered = f32[256]{0:T(256)} fusion(%done), kind=kCustom, calls=%all-reduce-scatter.3
  ROOT %tuple.1 = (s32[]{:T(128)}, bf16[512,512]{1,0:T(8,128)(2,1)S(1)}) tuple(%i, %w)
}

%until_six (t.1: (s32[], bf16[512,512])) -> pred[] {
  %constant.50 = s32[]{:T(128)} constant(6)
  %t.1 = (s32[]{:T(128)}, bf16[512,512]{1,0:T(8,128)(2,1)S(1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%t.1), index=0
  ROOT %lt.10 = pred[]{:T(512)} compare(%i, %constant.50), direction=LT
}

%chunks (u: (s32[], s32[])) -> (s32[], s32[]) {
  %u = (s32[]{:T(128)}, s32[]{:T(128)}) parameter(0)
  %x = bf16[4,128]{1,0:T(8,128)(2,1)} broadcast(%u), dimensions={}
  %collective-permute-start = (bf16[4,128]{1,0:T(8,128)(2,1)}, bf16[4,128]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%x), channel_id=1, source_target_pairs={{0,1}}
  %collective-permute-done = bf16[4,128]{1,0:T(8,128)(2,1)} collective-permute-done(%collective-permute-start)
  ROOT %u.1 = (s32[]{:T(128)}, s32[]{:T(128)}) tuple(%i, %i)
}

%until_enough (u.2: (s32[], s32[])) -> pred[] {
  %u.2 = (s32[]{:T(128)}, s32[]{:T(128)}) parameter(0)
  %a = s32[]{:T(128)} get-tuple-element(%u.2), index=0
  %b = s32[]{:T(128)} get-tuple-element(%u.2), index=1
  ROOT %lt.3 = pred[]{:T(512)} compare(%a, %b), direction=LT
}

ENTRY %main.6_spmd (param.5: bf16[512,512]) -> bf16[512,512] {
  %param.5 = bf16[512,512]{1,0:T(8,128)(2,1)} parameter(0)
  %while.27 = (s32[]{:T(128)}, bf16[512,512]{1,0:T(8,128)(2,1)S(1)}) while(%tuple.51), condition=%until_six, body=%body
  ROOT %while.28 = (s32[]{:T(128)}, s32[]{:T(128)}) while(%tuple.61), condition=%until_enough, body=%chunks
}
"""  # noqa: E501


def test_an_operation_that_a_tpu_starts_and_ends_apart_counts_once_a_turn():
    assert collectives(TPU_TEXT)["all-gather"] == (6, 6 * 2048 * 512 * 2)


def test_a_reduction_of_which_each_keeps_its_part_is_a_reduce_scatter():
    found = collectives(TPU_TEXT)
    assert found["reduce-scatter"] == (6, 6 * 1024 * 4) and "all-reduce" not in found


def test_a_loop_without_a_known_end_turns_as_often_as_the_caller_says():
    once, often = (collectives(TPU_TEXT, turns)["collective-permute"] for turns in (1, 10))
    assert once.count == 1 and often == (10, 10 * once.bytes)
    assert once.bytes == pytest.approx(4 * 128 * 2, abs=8)
