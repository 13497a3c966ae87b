"""Planning for TPUs: counts worked out by hand, what fits, and what is said when it does not."""

import argparse
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console

from demyrl import plan
from demyrl.model.attention import attend
from demyrl.model.sizes import size
from demyrl.model.transformer import close_block, parameter_count, qkv
from demyrl.planning import compiled, flops, show
from demyrl.planning.chips import CHIPS, GIB, Chip, Slice, slice_of
from demyrl.planning.compiled import Compiled
from demyrl.planning.outcome import Outcome
from demyrl.planning.programs import chip_bytes, planned
from demyrl.planning.work import Work, least_seconds
from tests.tiny import MODEL, drawn_params, shrunk_config

ROOT = Path(__file__).parents[1]
SMALL = MODEL.__class__(
    vocab=10, width=4, layers=3, heads=2, kv_heads=1, head_dim=2, feed_forward=8, rope_theta=1e4,
    norm_eps=1e-6, qk_norm=False, attention_bias=False, tied_embeddings=True, max_positions=0,
    dtype="float32",
)  # fmt: skip
ROOMY = Chip(GIB, GIB, 1e12, 1e11, 1e10, ("1x1",))


def setting(chip=ROOMY, devices=1, **changes):
    """The tiny config on so many virtual devices, which stand for chips."""
    config = shrunk_config(mesh__data=devices, **changes)
    return plan.Setting(config, Slice("made", chip, devices), jax.devices()[:devices], 100, 0.5)


def planned_json(setting, make=None, **asked):
    """The plan, without a compiler unless one is given."""
    options = {"programs": "", "advice": "off", "most": 6} | asked
    return plan.plan(setting, argparse.Namespace(**options), make, lambda line: None)


def per_token(size):
    """A compiler by which a micro-batch takes `size` bytes a token, whatever else is set."""

    def make(program, number=""):
        tokens = program.arguments[2].tokens.size
        return Compiled(program.argument_bytes, size * tokens, 0, 0, {}, 0.0, "")

    return make


def with_room(size):
    return Chip(size, size, 1e12, 1e11, 1e10, ("1x1",))


# Chips and topologies


def test_a_slice_has_the_chips_that_its_shape_says():
    assert [slice_of(name).devices for name in ("v5e:4x4", "v6e:2x4", "v5p:2x2x2")] == [16, 8, 8]


@pytest.mark.parametrize("name", ["v5e", "v7:2x2", "v5e:4x4x4", "v5p:2x2", "v5e:4xfour", "v5e:0x4"])
def test_an_unknown_slice_is_refused_with_those_that_there_are(name):
    with pytest.raises(ValueError, match=f"--topology={name}.*v5e: 1x1.*v5p: 1x1x1, 2x2x1"):
        slice_of(name)


def test_programs_may_use_a_little_less_than_a_chip_has():
    assert all(0.95 * chip.memory < chip.usable < chip.memory for chip in CHIPS.values())


# Operations


def test_block_weights_are_the_parameters_that_are_no_norms_or_embedding():
    model = size("qwen3_4b", "bfloat16")
    norms = model.layers * 2 * (model.width + model.head_dim) + model.width
    blocks = parameter_count(model) - model.vocab * model.width - norms
    assert model.layers * flops.block_weights(model) == blocks


def test_a_forward_pass_is_what_comes_out_by_hand():
    # A layer: 4x4 query, 4x2 key, 4x2 value, 4x4 out, three of 4x8. Two tokens see 1 + 2 keys.
    matrices = 2 * 3 * (16 + 8 + 8 + 16 + 96) * 2
    attention = 2 * 2 * 3 * (2 * 2) * 3
    assert flops.forward(SMALL, [2], 1) == matrices + attention + 2 * 10 * 4


@pytest.mark.parametrize("remat, again", [("none", 0), ("dots", 0), ("full", 1728 + 144)])
def test_training_is_three_passes_and_what_is_made_again(remat, again):
    assert flops.training(SMALL, [2], 1, remat) == 3 * (1728 + 144 + 80) + again + 80


def test_two_sequences_in_a_row_attend_less_than_one():
    saved = flops.forward(SMALL, [8], 0) - flops.forward(SMALL, [4, 4], 0)
    assert saved == flops.attention(SMALL, 4 * 4)


def xla_flops(function, *arguments):
    return jax.jit(function).lower(*arguments).compile().cost_analysis()["flops"]


def test_xla_counts_the_same_operations_in_a_block():
    model = MODEL.__class__(**{**MODEL.__dict__, "width": 256, "feed_forward": 512, "layers": 1})
    layer = jax.tree.map(lambda x: x[0], drawn_params(model)["layers"])
    x, positions = jnp.zeros((1, 64, 256)), jnp.zeros((1, 64), jnp.int32)

    def block(x):
        q, _, v = qkv(layer, x, positions, model)
        return close_block(layer, x, q, model), v

    assert xla_flops(block, x) == pytest.approx(flops.matrices(model, 64), rel=0.1)


def test_xla_counts_the_same_operations_in_attention():
    model = MODEL.__class__(**{**MODEL.__dict__, "layers": 1, "head_dim": 64})
    q, k = jnp.zeros((1, 64, 4, 64)), jnp.zeros((1, 2, 64, 64))
    seen = jnp.ones((1, 64, 64), bool)
    counted = xla_flops(lambda q, k: attend(q, k, k, seen), q, k)
    assert counted == pytest.approx(flops.attention(model, 64 * 64), rel=0.1)


def test_the_slower_of_computing_and_moving_bounds_the_time():
    assert least_seconds(Work(2e12, 1e11), ROOMY) == 2.0
    assert least_seconds(Work(1e12, 3e11), ROOMY) == 3.0


# Memory


def test_bytes_of_a_chip_are_those_of_its_shards():
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))

    def struct(shape, *axes):
        place = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(shape, "float32", sharding=place)

    assert chip_bytes({"a": struct((8, 16), "x"), "b": struct((8,))}) == 8 * 16 * 4 // 4 + 8 * 4


def test_what_lies_on_the_host_takes_no_memory_of_a_chip():
    sizes = setting(memory__offload=True).scene({}).sizes
    assert sizes["parameters"] == 0 and sizes["working copy"] > 0


def test_each_chip_holds_its_fraction_of_the_parameters():
    one, four = (setting(devices=n).scene({}) for n in (1, 4))
    assert one.sizes["parameters"] == 4 * parameter_count(one.recipe.model)
    whole = four.recipe.model.layers * 2 * four.recipe.model.head_dim * 4  # norms of heads
    assert four.sizes["parameters"] - whole == (one.sizes["parameters"] - whole) // 4


def test_the_cache_takes_keys_and_values_of_every_slot_and_layer():
    scene = setting().scene({})
    m, sampler = scene.recipe.model, scene.recipe.rollout.sampler
    numbers = 2 * m.layers * m.kv_heads * m.head_dim * sampler.slots * sampler.context
    assert scene.sizes["cache"] == numbers * 2  # bfloat16


def test_every_program_of_a_step_is_planned_in_its_order():
    scene = setting(train__pack__rungs=2).scene({})
    names = [program.name for program in planned(scene)]
    assert names == [
        "sft_8x160", "sft_apply",
        "layer_for_sampling", "rest_for_sampling", "extend_32", "decode",
        "score_4x160", "update_4x160", "update_8x80", "update_apply",
    ]  # fmt: skip


# Without and with a compiler


def test_without_a_compiler_what_can_be_worked_out_is_there():
    found = planned_json(setting())
    row = next(row for row in found["programs"] if row["name"] == "update_4x160")
    assert row["arguments_bytes"] > 0 and row["flops"] > 0 and row["lower_bound_s"] > 0
    assert row["fits"] is row["total_bytes"] is row["temporaries_bytes"] is None
    assert found["lower_bound_s"]["step"] > 0 and found["advice"] is None


@pytest.fixture(scope="module")
def scored():
    """What compiling one program gives, with this machine's compiler for CPUs."""
    make = plan.noting(lambda line: None)
    return planned_json(setting(devices=2), make, programs="score")["programs"][0]


def test_a_compiled_program_has_every_figure(scored):
    wanted = "arguments_bytes temporaries_bytes total_bytes hbm_bytes flops lower_bound_s compile_s"
    assert all(scored[key] > 0 for key in wanted.split())
    assert scored["fits"] is True and scored["collectives"]["all-gather"]["bytes"] > 0


def test_the_compiler_and_the_shapes_agree_on_the_arguments(scored):
    found = planned_json(setting(devices=2), programs="score")
    counted = found["programs"][0]["arguments_bytes"]
    unused = 2 * 160 * 4 * 3  # weights are read, log-probs and advantages are not
    assert counted - unused <= scored["arguments_bytes"] <= counted


def test_a_program_that_fits_alone_may_not_fit_beside_the_rest():
    program = next(each for each in planned(setting().scene({})) if each.name == "update_4x160")
    alone = per_token(10)(program)
    assert Outcome(program, alone, with_room(alone.total + program.beside)).fits
    assert not Outcome(program, alone, with_room(alone.total + program.beside - 1)).fits


def test_the_first_change_that_makes_it_fit_is_told_as_flags():
    held = planned_json(setting(), programs="update_4")["programs"][0]
    room = held["arguments_bytes"] + held["beside_bytes"] + 400 * 1000
    tight = setting(with_room(room))
    found = planned_json(tight, per_token(1000), programs="update_4", advice="on")
    assert found["programs"][0]["fits"] is False
    assert found["advice"]["flags"] == "--config.train.pack.rows=2"


def test_a_change_that_does_not_help_is_taken_back():
    tight = setting(
        with_room(planned_json(setting(), programs="update_4")["programs"][0]["arguments_bytes"])
    )
    advice = planned_json(tight, per_token(1), programs="update_4", advice="on", most=3)["advice"]
    assert "with --config.memory.remat=dots" in advice["tried"][0]
    assert "memory.remat" not in (advice["changes"] or {})


def test_advice_that_finds_nothing_says_so(capsys):
    found = planned_json(setting(with_room(1000)), per_token(1), programs="update_4", advice="on")
    assert found["advice"]["changes"] is None
    show.print_plan(Console(width=80), found)
    assert "Nothing that was tried makes it fit" in capsys.readouterr().out


OOM = (
    "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory "
    "required for HLO temporaries (25.24G) exceeds available HBM (15.75G). HLO module: jit_f.\n"
)
OLDER_OOM = (
    "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 25.24G of 15.75G hbm. "
    "Exceeded hbm capacity by 9.49G.\n"
)


@pytest.mark.parametrize("message", [OOM, OLDER_OOM])
def test_a_refusal_says_how_much_the_program_would_need(message):
    program = planned(setting().scene({}))[0]
    result = compiled.refused(program, message, "", 1.0)
    assert result.total == int(25.24 * GIB) and result.arguments == program.argument_bytes


REPORT = """Memory Space: default (color=0)
Total bytes: 34359738368 (32.00GiB)
  cumulative_size;       size;       offset; used_by_n_values; shapes_list
  ------------------------------------------------------------
   512.0KiB(100%);   512.0KiB;            0;                1; bf16[256,1024]

  cumulative_size;       size;       offset; used_by_n_values; shapes_list
  ------------------------------------------------------------
    8.00GiB(100%);    8.00GiB;            0;                1; bf16[65536,65536]

Memory Space: vmem (color=1)
Total bytes: 9663676416 (9.0GiB)
    9.00GiB(100%);    9.00GiB;            0;                1; f32[1]
"""


def test_the_largest_arrays_in_hbm_come_first():
    first, second = compiled.largest_arrays(REPORT).splitlines()
    assert first.split() == ["8.00", "GiB", "bf16[65536,65536]"]
    assert second.split() == ["0.00", "GiB", "bf16[256,1024]"]


def test_what_a_library_writes_to_stderr_is_kept_until_something_fails(capfd):
    with compiled.quiet():
        os.write(2, b"only noise\n")
    with pytest.raises(KeyError), compiled.quiet():
        os.write(2, b"the reason\n")
        raise KeyError
    assert capfd.readouterr().err == "the reason\n"


# The command line


def test_a_mesh_of_another_size_is_refused_with_one_that_works():
    here = dataclasses.replace(setting(devices=4), place=slice_of("v5e:2x4"))
    with pytest.raises(ValueError, match="takes 4 chips, but v5e:2x4 has 8. A mesh that would"):
        here.scene({"train.pack.rows": 8, "rollout.extend_rows": 8, "mesh.sequence": 1})


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "--topology"),
        (["--topology=v5e:1x1", "--tokens=-1"], "--tokens=-1"),
        (["--topology=v5e:1x1", "--sampled=1.5"], "--sampled=1.5"),
        (["--topology=v5e:1x1", "--advice=maybe"], "invalid choice: 'maybe'"),
        (["--topology=v5e:1x1", "--topologie=x"], "topologie"),
        (["--topology=v5e:1x1", "--config.mesh.dat=2"], "Did you mean mesh.data"),
    ],
)
def test_a_wrong_word_is_refused(words, message, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(ValueError, match=message):
        plan.parse([f"--config={ROOT}/configs/grpo_tcr.py:tiny", *words])


def test_a_program_that_there_is_not_is_refused_with_those_that_there_are():
    with pytest.raises(ValueError, match="--programs=encode.*sft_8x160, .*decode"):
        planned_json(setting(), programs="encode")


def run_plan(*words, **environment):
    words = [sys.executable, "-m", "demyrl.plan", "--config=configs/grpo_tcr.py:tiny", *words]
    return subprocess.run(
        words, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )


HIDE_LIBTPU = """
import sys, importlib.util
sys.modules["libtpu"] = None
importlib.util.find_spec = lambda name, find=importlib.util.find_spec: (
    None if name == "libtpu" else find(name)
)
"""


@pytest.fixture
def without_libtpu(tmp_path):
    """The environment of a Python that does not find libtpu."""
    (tmp_path / "sitecustomize.py").write_text(HIDE_LIBTPU)
    return {"PYTHONPATH": f"{tmp_path}:{ROOT}"}


def test_without_libtpu_the_way_to_get_it_is_told_and_json_stays_json(without_libtpu):
    done = run_plan("--topology=v5e:1x1", "--json", **without_libtpu)
    assert "pip install 'demyrl[plan]'" in done.stderr
    assert json.loads(done.stdout)["chips"] == 1


def test_tables_show_every_program_and_phase(capsys):
    found = planned_json(setting())
    show.print_plan(Console(width=80), found)
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("sft_apply", "decode", "rollout", "score_4x160"))
    assert "An RL step takes at least" in shown


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install 'demyrl[plan]'"
)
def test_a_tiny_model_compiles_for_four_chips():
    programs = "--programs=decode,update_16"
    done = run_plan("--topology=v5e:2x2", "--config.mesh.data=4", programs, "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["programs"]
    assert all(row["fits"] and row["total_bytes"] > 0 for row in rows)
    assert all(row["collectives"] for row in rows if row["name"].startswith("update"))
