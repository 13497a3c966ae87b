"""Each benchmark prints one line of JSON with what its header says. Nothing is timed here."""

import contextlib
import importlib
import io
import json
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from demyrl.learn.batch import PackConfig
from demyrl.weights import builtin_folder
from experiments.bench import decode, head, load, measure, start, train_step

SMALL = (
    "--seconds=0",
    "--config.model.source=",
    "--config.tokenizer=builtin:tiny",
    "--config.model.width=16",
    "--config.model.layers=1",
    "--config.model.feed_forward=16",
    "--config.rollout.slots=4",
    "--config.rollout.context=128",
    "--config.rollout.turn_tokens=8",
    "--config.rollout.output_tokens=8",
    "--config.rollout.extend_rows=2",
    "--config.rollout.extend_lengths=(96,)",
    "--config.reward.max_len=64",
    "--config.train.problems=1",
    "--config.train.samples=2",
    "--config.train.updates=1",
    "--config.train.pack.rows=2",
    "--config.train.pack.row_tokens=128",
    "--config.sft.rows_per_step=2",
    "--config.sft.pack.rows=2",
    "--config.sft.pack.row_tokens=32",
)
MACHINE = {"bench", "config", "cpus", "device", "jax", "platform"}
KEYS = {
    "decode": {
        "batches", "load_s", "load_peak_host_bytes", "peak_rss_bytes", "peak_device_bytes",
        "source", "parameters", "dtype", "context", "decode_steps", "turn_tokens",
    },
    "train_step": {
        "ragged", "head", "sft", "rl", "score", "peak_rss_bytes", "peak_device_bytes",
    },
    "rollout": {
        "trajectories_per_s", "calls_per_s", "sampled_tokens_per_s", "device_share",
        "tools_wait_share", "host_share", "slot_use", "call_share", "tool_ms", "first_rollout_s",
        "source", "isolation", "workers", "slots", "problems", "samples", "rollouts", "rollouts_s",
    },
    "start": {"import_s", "help_s", "first_step_s", "one_step_run_s", "problems", "samples",
              "source"},
}  # fmt: skip

BATCH = {
    "tokens_per_s", "slot_use", "step_ms", "extend_tokens_per_s", "compile_s", "extend_rows",
}  # fmt: skip
REAL = (
    f"--source={builtin_folder('builtin:tiny')}", "--dtype=float32", "--seconds=0",
    "--batches=2", "--prompt=8", "--tokens=4", "--config.rollout.extend_rows=8",
)  # fmt: skip

UPDATE = {
    "tokens_per_s", "all_tokens_per_s", "fill", "flops_per_s", "matmul_flops_per_s",
    "matmul_share", "sequences", "micro_batches", "rows", "row_tokens", "rounds",
}  # fmt: skip
COSTS = {"compile_s", "temporary_bytes"}
RAGGED = UPDATE | COSTS | {"padded", "over_padded", "peak_host_bytes"}
HEAD = {
    "seconds", "plain_seconds", "over_plain", "timed_rows", "temporary_bytes",
    "plain_temporary_bytes", "share_of_plain_memory",
}  # fmt: skip
INNER = {"decode": BATCH, "train_step": RAGGED | HEAD}
EVERY_PART = (
    "--measure=ragged,head,config", "--width=128", "--layers=1", "--vocab=64", "--sequences=5",
    "--row-tokens=128", "--head-rows=2", "--head-tokens=16",
)  # fmt: skip

FAKE_STAGE = """
import pathlib, sys
workdir = sys.argv[-1].partition("--workdir=")[2]
if workdir:
    pathlib.Path(workdir).mkdir()
    pathlib.Path(workdir, "metrics.jsonl").write_text("one line")
    print("no sandbox")
    sys.exit({exit_code})
"""


class CountingSampler:
    """Decodes as the real one does, but only the counts; remembers the budgets of each visit."""

    def __init__(self, slots):
        self.config, self.visits = SimpleNamespace(slots=slots), []

    def decode(self, last, lengths, budgets, keys, enough):
        self.visits.append(budgets.tolist())
        steps = 0
        while np.count_nonzero(budgets > steps) >= enough:
            steps += 1
        return SimpleNamespace(counts=np.minimum(budgets, steps), steps=steps)


@pytest.fixture(scope="module", autouse=True)
def compile_fast():
    """Nothing is timed, so most of the compiler's work is left out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "SIDE", 64)
        jax.config.update("jax_disable_most_optimizations", True)
        yield
        jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def line_of(capsys):
    """The object that a benchmark prints."""

    def run(name, *words):
        importlib.import_module(f"experiments.bench.{name}").main([*SMALL, *words])
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 1
        return json.loads(lines[0])

    return run


@pytest.fixture(scope="module")
def real_line():
    """What decode prints about the weights that ship."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        decode.main(REAL)
    return json.loads(printed.getvalue())


@pytest.fixture(scope="module")
def train_line():
    """What train_step prints when it measures all it can, of next to nothing."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        train_step.main([*SMALL, *EVERY_PART])
    return json.loads(printed.getvalue())


@pytest.fixture
def stage(tmp_path, monkeypatch):
    """Puts FAKE_STAGE in the place of training; it ends with the exit code that is given."""

    def put(exit_code):
        (tmp_path / "fake_stage.py").write_text(FAKE_STAGE.format(exit_code=exit_code))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr(start, "STAGE", "fake_stage")

    return put


@pytest.mark.parametrize("name", sorted(KEYS.keys() - {"train_step"}))
def test_a_benchmark_prints_one_line_with_its_keys(name, line_of, stage):
    stage(exit_code=0)
    assert line_of(name).keys() == KEYS[name] | MACHINE


def test_every_batch_size_has_a_sampler_of_its_own():
    options, settings = decode.read(["--batches=1,32", "--prompt=100", "--tokens=28"])
    assert [
        (s.slots, s.context, s.extend_rows, s.extend_lengths)
        for s in decode.shapes_of(options, settings)
    ] == [(1, 128, 1, (100,)), (32, 128, 16, (100,))]


def test_random_weights_are_measured_in_the_shapes_of_the_config():
    options, settings = decode.read([])
    assert decode.shapes_of(options, settings) == [settings.rollout.sampler]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_data_type_that_is_asked_for_is_measured(dtype):
    assert decode.read([f"--dtype={dtype}"])[1].model.dtype == dtype


def test_a_batch_has_its_numbers(real_line):
    assert {size: each.keys() for size, each in real_line["batches"].items()} == {"2": BATCH}


def test_rows_of_one_length_leave_no_slot_empty(real_line):
    assert real_line["batches"]["2"]["slot_use"]["uniform"] == 1.0


def test_a_source_brings_its_own_shape_and_its_loading_is_measured(real_line):
    assert (real_line["source"], real_line["parameters"]) == ("tiny", 148_032)
    assert real_line["load_s"] > 0 and real_line["load_peak_host_bytes"] is not None


def test_a_slot_that_is_free_takes_the_next_row():
    """Two slots and rows of 1, 3 and 2 tokens, taken from the end: 2 beside 3, then 1 beside 3."""
    sampler = CountingSampler(2)
    assert decode.play(sampler, [1, 3, 2], 5, early_return=1.0) == decode.Played(6, 3)
    assert sampler.visits == [[2, 3], [1, 1]]


@pytest.mark.parametrize("word", ["--batches=0", "--batches=8,", "--prompt=-1", "--tokens=x"])
def test_a_count_below_one_is_refused(word, capsys):
    with pytest.raises(SystemExit):
        decode.read([word])
    assert "is not a whole number of at least 1" in capsys.readouterr().err


def test_a_batch_that_a_mesh_cannot_share_is_refused(capsys):
    with pytest.raises(SystemExit):
        decode.read(["--batches=8,3", "--config.mesh.data=2"])
    assert "--batches is 3, which mesh.data = 2 does not divide" in capsys.readouterr().err


def test_a_name_on_a_hub_is_refused(capsys):
    with pytest.raises(SystemExit):
        decode.main(["--source=someone/some-model"])
    assert "Weights must be on disk" in capsys.readouterr().err


def test_a_run_that_fails_has_no_seconds_to_its_first_step(line_of, stage):
    stage(exit_code=3)
    with pytest.raises(RuntimeError, match="exit code 3:\nno sandbox"):
        line_of("start")


@pytest.mark.parametrize("name", KEYS)
def test_every_key_is_in_the_header(name):
    header = importlib.import_module(f"experiments.bench.{name}").__doc__
    keys = KEYS[name] | INNER.get(name, set())
    assert {key for key in keys if not re.search(rf"\b{key}\b", header)} == set()


def test_a_setting_that_does_not_exist_is_refused(line_of, capsys):
    with pytest.raises(SystemExit):
        line_of("decode", "--config.rollout.slot=4")
    assert "Did you mean rollout.slots?" in capsys.readouterr().err


def test_training_has_its_keys_at_every_level(train_line):
    assert train_line.keys() == KEYS["train_step"] | MACHINE
    assert train_line["ragged"]["64"].keys() == RAGGED
    assert train_line["ragged"]["64"]["padded"].keys() == UPDATE
    assert train_line["head"]["64"].keys() == HEAD
    assert {train_line[name].keys() == UPDATE | COSTS for name in ("sft", "rl", "score")} == {True}


def test_packed_and_padded_sequences_are_the_same_in_other_micro_batches(train_line):
    """Lengths 11, 21, 32, 48 and 128 of 240: one micro-batch of 2 x 128, or three."""
    packed = train_line["ragged"]["64"]
    assert (packed["micro_batches"], packed["padded"]["micro_batches"]) == (1, 3)
    assert (packed["fill"], packed["padded"]["fill"]) == (0.9375, 0.3125)


def test_operations_are_those_that_the_tokens_need(train_line):
    """By hand, for each of 240 tokens: 128 x 384 and 3 of 128 x 384 numbers in matrices; 10,257
    pairs of 2 x 64 channels, twice; 179 trained tokens over 64 x 128. All times 2, and 3."""
    numbers = train_line["ragged"]["64"]
    needed = 240 * (128 * 384 + 3 * 128 * 384) + 10_257 * 2 * 2 * 64 + 179 * 64 * 128
    for each in (numbers, numbers["padded"]):
        assert each["flops_per_s"] / each["tokens_per_s"] == pytest.approx(6 * needed / 240, 2e-3)


def test_the_share_of_the_machine_is_that_of_products_between_the_calls(train_line):
    numbers = train_line["ragged"]["64"]  # of one round: the median is the ratio of the medians
    share = numbers["flops_per_s"] / numbers["matmul_flops_per_s"]
    assert numbers["matmul_share"]["wall"] == pytest.approx(share, rel=2e-3)


def test_ragged_lengths_have_a_long_tail():
    lengths = train_step.ragged_lengths(24, 1024)
    assert max(lengths) == 1024 and lengths == sorted(lengths)
    assert lengths[12] == pytest.approx(256, rel=0.05) and sum(lengths) < 24 * 1024 / 3


def test_one_sequence_a_row_keeps_what_each_is_trained_on():
    shape = PackConfig(rows=2, row_tokens=9, rungs=1)
    examples = train_step.sequences([4, 9, 6], vocab=5)
    packed = train_step.one_a_row(examples, shape)
    assert [b.tokens.shape for b in packed.batches] == [(2, 9), (2, 9)]
    for field in ("tokens", "weights", "old_logprobs"):
        arrays = [getattr(batch, field) for batch in packed.batches]
        for (b, row, column), example in zip(packed.places, examples, strict=True):
            wanted = getattr(example, field)
            got = arrays[b][row, column : column + len(wanted)]
            np.testing.assert_array_equal(got, wanted)
    assert not packed.batches[1].segments[1].any() and packed.fill == 19 / 36


def test_the_plain_formula_gives_what_the_head_gives():
    model = SimpleNamespace(vocab=11, width=8, dtype="float32")
    given = head.inputs(model, 2, 7)
    plain, ours = head.plain_logprobs(*given), head.token_logprobs(*given, 1.0, 3)[0]
    np.testing.assert_allclose(plain, ours, atol=1e-5)


@pytest.mark.parametrize(("plain_bytes", "rows"), [(10, 16), (4_096, 8), (10**9, 1), (None, 16)])
def test_the_plain_formula_is_timed_in_half_of_the_free_memory(plain_bytes, rows, monkeypatch):
    pages = {"SC_AVPHYS_PAGES": 4, "SC_PAGE_SIZE": 1_024}
    monkeypatch.setattr(head.os, "sysconf", pages.get)
    assert head.most_rows(16, plain_bytes) == rows


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--measure=ragged,tail", "'tail' is not one of ragged, head, config"),
        ("--width=100", "use a multiple of 128"),
        ("--vocab=4096,0", "is not a whole number of at least 1"),
    ],
)
def test_a_measurement_that_cannot_be_made_is_refused(words, message, capsys):
    with pytest.raises(SystemExit):
        train_step.read([words])
    assert message in capsys.readouterr().err


def test_works_are_called_in_turn_and_their_first_calls_are_not_counted(monkeypatch):
    """Rounds of 3 and 1 seconds, until 3 for each of the two are over: two rounds."""
    clock, calls = [0.0], []

    def work(name, takes):
        def call():
            calls.append(name)
            clock[0] += takes

        return call

    ticking = SimpleNamespace(perf_counter=lambda: clock[0], process_time=lambda: 2 * clock[0])
    monkeypatch.setattr(measure, "time", ticking)
    taken = measure.in_turns({"a": work("a", 3.0), "b": work("b", 1.0)}, 3.0)
    assert calls == ["a", "b"] * 3
    assert taken["a"].seconds.tolist() == [3.0, 3.0] and taken["b"].cpu_seconds.tolist() == [2, 2]


def test_how_much_faster_is_the_median_of_the_rounds():
    one = measure.Taken(np.array([1.0, 1.0, 2.0]), np.array([2.0, 2.0, 2.0]))
    other = measure.Taken(np.array([3.0, 5.0, 8.0]), np.array([2.0, 4.0, 6.0]))
    assert measure.times_faster(one, other) == {"wall": 4.0, "cpu": 2.0}


@pytest.mark.parametrize(("clock", "seconds"), [([1.0, 6.0, 7.5], 3.5), ([1.0, 2.0, 4.0], 0.0)])
def test_what_only_the_first_call_takes_is_compilation(clock, seconds, monkeypatch):
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=iter(clock).__next__))
    assert measure.first_call_seconds(lambda: None) == seconds


def test_the_first_call_is_not_counted():
    calls = []
    results, _ = measure.repeat(lambda: calls.append(0) or len(calls), 0.0)
    assert results == [2]


LOAD_KEYS = (MACHINE - {"config"}) | {
    "source", "mesh", "parameters", "first_s", "seconds", "file_mb_per_s", "file_bytes",
    "device_bytes", "largest_tensor_bytes", "peak_host_bytes", "warm_peak_host_bytes", "ratio",
}  # fmt: skip


@pytest.fixture
def load_line(capsys):
    def run(*words):
        load.main(words)
        return json.loads(capsys.readouterr().out)

    return run


def test_loading_reports_what_was_loaded(load_line):
    line = load_line(f"--source={builtin_folder('builtin:tiny')}")
    assert line.keys() == LOAD_KEYS
    assert (line["parameters"], line["device_bytes"]) == (148_032, 4 * 148_032)
    assert line["largest_tensor_bytes"] == 4 * 768 * 64


def test_a_made_checkpoint_has_the_shape_of_its_size_cut_to_the_layers(load_line):
    line = load_line("--make=smollm2_135m:1", "--mesh=2,1")
    assert line["parameters"] == 49_152 * 576 + 576 + 3_540_096
    assert line["file_bytes"] > 2 * line["parameters"]
    assert line["mesh"] == {"data": 2, "tensor": 1, "sequence": 1}


def test_every_key_of_loading_is_in_the_header():
    names = LOAD_KEYS - MACHINE
    assert {key for key in names if not re.search(rf"^ .*\b{key}\b", load.__doc__, re.M)} == set()


@pytest.mark.parametrize(
    "word, message",
    [
        ("--make=qwen2.5_7b", "use SIZE:LAYERS"),
        ("--make=qwen2.5_7b:0", "use SIZE:LAYERS"),
        ("--make=qwen9:1", "There is no size 'qwen9'"),
        ("--source=/nowhere", "config.json does not exist"),
    ],
)
def test_a_checkpoint_that_cannot_be_had_is_refused(word, message, capsys):
    with pytest.raises(SystemExit):
        load.main([word])
    assert message in capsys.readouterr().err
