"""Our logits are those of transformers, in training, in prefill and in decoding.

Each case runs on golden answers, which the repository holds, and, where torch is installed, on
those of a checkpoint with other weights that transformers makes and answers for on the spot.
"""

import dataclasses
import functools
from pathlib import Path

import jax
import numpy as np
import pytest

from demyrl.model.hf_config import read_config
from demyrl.model.hf_load import load_params
from demyrl.model.kvcache import empty_cache
from demyrl.model.mesh import MeshConfig, make_mesh
from demyrl.model.sharding import params_sharding
from demyrl.model.transformer import hidden_states, output_embedding
from demyrl.rollout.programs import decode, for_sampling, forward_cached
from demyrl.rollout.sampler import Feed, Sampler, SamplerConfig
from experiments import make_golden
from experiments.make_golden import CASES, GAPS, GREEDY, ROUNDS, SEED

NAMES = [name for name in CASES if name != "long"]
SOURCES = ("golden", "live")
PROMPTS = [prompt for prompt, _ in ROUNDS]  # their lengths
ROW = 48  # tokens of a packed row, and of a cache row: any two episodes and some padding
SLOTS = 5  # rows of the cache
ROWS = (4, 0, 2, SLOTS)  # of the three episodes; the last, which is none, takes no writes
CHUNK = 24  # tokens of an extend
NOBODY = (1 << 15,)  # an end token that no vocabulary here has
TORCH_IS_MISSING = "torch is not a dependency; the golden answers stand in for it"


def alone():
    """A mesh of one device."""
    return make_mesh(MeshConfig(1, 1, 1))


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What was read from a folder, and what transformers answers about that folder."""

    model: object
    params: dict
    arrays: dict

    def tokens(self, row):
        return self.arrays[f"tokens{row}"].tolist()

    def logits(self, row):
        return self.arrays[f"logits{row}"]

    def choices(self, row, start):
        """The greedy tokens from index `start` on, and their log-probs in float64."""
        first = start - 1 - (len(self.tokens(row)) - len(self.logits(row)))
        logits = self.logits(row)[first : first + GREEDY].astype(np.float64)
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        tokens = self.tokens(row)[start : start + GREEDY]
        return tokens, logprobs[range(GREEDY), tokens]


def checkpoint(name: str, source: str, folder: Path) -> Checkpoint:
    if source == "golden":
        answers = make_golden.read(name)
        make_golden.write_checkpoint(folder, answers)
    else:
        pytest.importorskip("torch", reason=TORCH_IS_MISSING)
        answers = make_golden.ask(name, SEED + 1, folder)
    model = read_config(folder, "float32")
    places = params_sharding(model, make_mesh(MeshConfig(1, 1, 1)))
    return Checkpoint(model, load_params(folder, model, places), answers.arrays)


@pytest.fixture(scope="module", params=[(n, s) for n in NAMES for s in SOURCES], ids="-".join)
def made(request, tmp_path_factory):
    return checkpoint(*request.param, tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module", params=SOURCES)
def long(request, tmp_path_factory):
    return checkpoint("long", request.param, tmp_path_factory.mktemp("checkpoint"))


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


@functools.partial(jax.jit, static_argnames="model")
def training_logits(params, tokens, positions, segments, model):
    hidden = hidden_states(params, tokens, positions, segments, model)
    return hidden @ output_embedding(params).T


def logits_of_packed(made, sequences, padding=0):
    """Logits of rows in which sequences, (tokens, positions), stand one after another."""
    tokens = np.full((len(sequences), ROW), padding, np.int32)
    positions, segments = np.zeros((2, *tokens.shape), np.int32)
    for i, row in enumerate(sequences):
        end = 0
        for number, (ids, places) in enumerate(row, start=1):
            start, end = end, end + len(ids)
            tokens[i, start:end], positions[i, start:end] = ids, places
            segments[i, start:end] = number
    return np.asarray(training_logits(made.params, tokens, positions, segments, made.model))


def packed_episodes(made, padding=0):
    """Logits of episodes 0 and 2 in one row and 1 in another."""
    episodes = [(made.tokens(row), range(len(made.tokens(row)))) for row in range(3)]
    return logits_of_packed(made, [[episodes[0], episodes[2]], [episodes[1]]], padding)


def test_packed_rows_give_the_logits_of_each_sequence_by_itself(made):
    got = packed_episodes(made)
    first, second, third = (len(made.tokens(row)) for row in range(3))
    close(got[0, :first], made.logits(0))
    close(got[0, first : first + third], made.logits(2))
    close(got[1, :second], made.logits(1))


def test_what_pads_a_row_changes_no_logit(made):
    real = len(made.tokens(1))
    blank, filled = packed_episodes(made), packed_episodes(made, padding=77)
    np.testing.assert_array_equal(blank[1, :real], filled[1, :real])
    assert not np.array_equal(blank[1, real:], filled[1, real:])


def test_tokens_up_to_position_32767_give_the_logits_of_transformers(made):
    gaps = made.arrays["gap_tokens"].tolist(), GAPS
    alone = made.tokens(1), range(len(made.tokens(1)))
    close(logits_of_packed(made, [[gaps], [alone]])[0, : len(GAPS)], made.arrays["gap_logits"])


@functools.partial(jax.jit, static_argnames="model")
def cached_logits(weights, cache, rows, tokens, starts, counts, model):
    """What `extend` does, with the logits that it has no use for."""
    cache, hidden = forward_cached(weights, cache, rows, tokens, starts, counts, model)
    return cache, hidden @ output_embedding(weights).T


def extended(made, cache, starts, ends):
    """The cache with each episode fed from its start to its end, and the logits of that."""
    counts = np.append(np.subtract(ends, starts), 0)
    tokens = np.full((len(ROWS), CHUNK), 7, np.int32)
    for i in range(3):
        tokens[i, : counts[i]] = made.tokens(i)[starts[i] : ends[i]]
    rows, starts = np.array(ROWS, np.int32), np.array([*starts, 0], np.int32)
    weights = for_sampling(made.params, made.model, alone())
    cache, logits = cached_logits(
        weights, cache, rows, tokens, starts, counts.astype(np.int32), made.model
    )
    return cache, np.asarray(logits)


def test_ragged_extends_give_the_logits_of_one_pass(made):
    cache = empty_cache(made.model, SLOTS, ROW)
    whole = [len(made.tokens(i)) for i in range(3)]
    for starts, ends in ([0, 0, 0], PROMPTS), (PROMPTS, whole):
        cache, got = extended(made, cache, starts, ends)
        for i in range(3):
            close(got[i, : ends[i] - starts[i]], made.logits(i)[starts[i] : ends[i]])


def greedy_choices(made, cache, fed, going):
    """The cache and what `decode` adds to the episodes that go on, fed up to `fed` before."""
    last, lengths, budgets = np.zeros((3, SLOTS), np.int32)
    for i in going:
        last[ROWS[i]], lengths[ROWS[i]] = made.tokens(i)[fed[i]], fed[i]
        budgets[ROWS[i]] = GREEDY
    cache, chunk = decode(
        for_sampling(made.params, made.model, alone()), cache, last, lengths, budgets,
        np.zeros((SLOTS, 2), np.uint32), np.int32(1),
        config=made.model, steps=GREEDY, end_tokens=NOBODY, temperature=0.0, mesh=alone(),
    )  # fmt: skip
    return cache, jax.device_get(chunk)


def same_choices(chunk, row, wanted):
    """Asserts that a row chose the wanted tokens and recorded the wanted log-probs."""
    tokens, logprobs = wanted
    assert chunk.tokens[row].tolist() == tokens
    close(chunk.logprobs[row], logprobs)


def test_decoding_after_ragged_extends_chooses_and_scores_as_transformers(made):
    """Each of the three episodes waits while others go on; two get a tool result and go on."""
    cache, fed = empty_cache(made.model, SLOTS, ROW), [n - 1 for n in PROMPTS]
    cache, _ = extended(made, cache, [0, 0, 0], fed)
    for going in (1,), (0, 2):
        cache, chunk = greedy_choices(made, cache, fed, going)
        for i in going:
            same_choices(chunk, ROWS[i], made.choices(i, PROMPTS[i]))
    held = [n + GREEDY - 1 for n in PROMPTS]
    fed = [n + tool for n, (_, tool) in zip(held, ROUNDS, strict=True)]
    cache, _ = extended(made, cache, held, fed)
    _, chunk = greedy_choices(made, cache, fed, going=(0, 2))
    for i in (0, 2):
        same_choices(chunk, ROWS[i], made.choices(i, fed[i] + 1))


def test_a_row_of_8400_tokens_fed_in_pieces_goes_on_as_in_transformers(long):
    shapes = SamplerConfig(1, 8_448, GREEDY, 1, (1_200,), temperature=0.0)
    sampler = Sampler(long.model, shapes, NOBODY)
    sampler.load(long.params)
    *fed, last = long.tokens(0)[:-GREEDY]
    sampler.extend([Feed(0, 0, fed)])
    last, lengths, budgets = np.array([[last], [len(fed)], [GREEDY]], np.int32)
    chunk = sampler.decode(last, lengths, budgets, np.zeros((1, 2), np.uint32), 1)
    same_choices(chunk, 0, long.choices(0, len(fed) + 1))
