import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from demyrl.model.kvcache import write
from demyrl.model.transformer import hidden_states, output_embedding
from demyrl.rollout import draw
from demyrl.rollout.draw import draw_tokens, episode_keys, sample_tokens
from demyrl.rollout.sampler import Feed, Sampler, SamplerConfig
from tests.tiny import MODEL, params

END = (700,)


def whole_pass(tokens, length=128):
    """Hidden states of one uncached pass, padded so that it compiles once."""
    row = jnp.zeros((1, length), jnp.int32).at[0, : len(tokens)].set(jnp.asarray(tokens))
    positions = jnp.arange(length)[None]
    segments = (positions < len(tokens)).astype(jnp.int32)
    return UNCACHED(params(), row, positions, segments, MODEL)[0]


UNCACHED = jax.jit(hidden_states, static_argnums=4)


def sampler(slots=3, steps=4, temperature=1.0, context=64):
    config = SamplerConfig(slots, context, steps, 2, (8, 16), temperature)
    made = Sampler(MODEL, config, END)
    made.load(params())
    return made


def whole_pass_logprobs(tokens, temperature=1.0):
    """Log-probs of every token from one uncached pass, in float64 from the logits on."""
    hidden = whole_pass(tokens)[: len(tokens)]
    logits = np.asarray(hidden @ output_embedding(params()).T, np.float64) / temperature
    logits -= logits.max(-1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return np.array([logprobs[t - 1, tokens[t]] for t in range(1, len(tokens))])


def decoded(made, prompts, budget, visits=1):
    """Tokens and log-probs sampled after each prompt, over several visits to the device."""
    made.extend([Feed(row, 0, prompt[:-1]) for row, prompt in enumerate(prompts)])
    rows = [list(prompt) for prompt in prompts]
    logprobs = [[] for _ in prompts]
    keys = np.arange(2 * made.config.slots, dtype=np.uint32).reshape(-1, 2)
    for _ in range(visits):
        last, lengths, budgets = np.zeros((3, made.config.slots), np.int32)
        for i, row in enumerate(rows):
            last[i], lengths[i], budgets[i] = row[-1], len(row) - 1, budget
        chunk = made.decode(last, lengths, budgets, keys, 1)
        for i, row in enumerate(rows):
            row += chunk.tokens[i, : chunk.counts[i]].tolist()
            logprobs[i] += chunk.logprobs[i, : chunk.counts[i]].tolist()
    return rows, logprobs


@given(st.lists(st.integers(1, 30), min_size=1, max_size=3), st.integers(0, 5))
@settings(max_examples=8, deadline=None)
def test_decode_after_ragged_extends_equals_one_forward_pass(lengths, seed):
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 600, n + 1).tolist() for n in lengths]
    rows, logprobs = decoded(sampler(), prompts, budget=4)
    for prompt, row, got in zip(prompts, rows, logprobs, strict=True):
        want = whole_pass_logprobs(row)[len(prompt) - 1 :]
        np.testing.assert_allclose(got, want, atol=1e-4)


def test_extending_in_the_middle_of_an_episode_equals_one_forward_pass():
    made = sampler()
    (row,), _ = decoded(made, [[1, 2, 3]], budget=3)
    tool = [40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50]
    made.extend([Feed(0, len(row) - 1, [row[-1], *tool[:-1]])])
    row += tool
    last, lengths, budgets = np.zeros((3, 3), np.int32)
    last[0], lengths[0], budgets[0] = row[-1], len(row) - 1, 4
    chunk = made.decode(last, lengths, budgets, np.ones((3, 2), np.uint32), 1)
    row += chunk.tokens[0, : chunk.counts[0]].tolist()
    want = whole_pass_logprobs(row)[-int(chunk.counts[0]) :]
    np.testing.assert_allclose(chunk.logprobs[0, : chunk.counts[0]], want, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_recorded_logprob_is_that_of_logits_over_temperature(temperature):
    (row,), (got,) = decoded(sampler(temperature=temperature), [[1, 2, 3]], budget=4)
    np.testing.assert_allclose(got, whole_pass_logprobs(row, temperature)[2:], atol=1e-4)


def test_logprobs_of_two_logits_are_those_worked_out_by_hand():
    keys = jnp.zeros((1, 2), jnp.uint32)
    for temperature, want in [(1.0, -0.1269), (0.5, -0.0181), (2.0, -0.3133)]:
        for position in range(20):
            token, logprob = sample_tokens(
                jnp.array([[2.0, 0.0]]), keys, jnp.array([position]), temperature
            )
            if token[0] == 0:
                assert abs(float(logprob[0]) - want) < 1e-4
                break
        else:
            raise AssertionError("token 0 never came")


def test_draws_follow_the_distribution():
    count = 20_000
    logits = jnp.log(jnp.tile(jnp.array([0.6, 0.3, 0.1]), (count, 1)))
    keys = jax.random.bits(jax.random.key(0), (count, 2))
    tokens, _ = sample_tokens(logits, keys, jnp.zeros(count, jnp.int32), 1.0)
    shares = np.bincount(np.asarray(tokens), minlength=3) / count
    np.testing.assert_allclose(shares, [0.6, 0.3, 0.1], atol=0.015)


@pytest.mark.parametrize("vocab", [100, 128, 700])
def test_draws_follow_the_distribution_over_several_blocks(vocab):
    rng = np.random.default_rng(vocab)
    probs = rng.dirichlet(np.full(vocab, 0.05))
    probs[rng.permutation(vocab)[: vocab // 2]] = 0
    probs /= probs.sum()
    count = 20_000
    keys = jax.random.bits(jax.random.key(1), (count, 2))
    drawn = jax.jit(draw_tokens)
    tokens = drawn(jnp.tile(jnp.float32(probs), (count, 1)), keys, jnp.zeros(count, jnp.int32))
    counts = np.bincount(np.asarray(tokens), minlength=vocab)
    assert counts[probs == 0].sum() == 0
    spread = np.sqrt(count * probs * (1 - probs))
    assert (np.abs(counts - count * probs) <= 5 * spread + 2).all()


def test_no_uniform_number_draws_a_token_of_probability_zero(monkeypatch):
    vocab, count = 20_000, 2**14
    probs = np.random.default_rng(0).random(vocab)
    probs[:: draw.DRAW_BLOCK] = 0  # the first of each block, next to an edge of the sums
    probs = jnp.asarray(probs / probs.sum(), jnp.float32)
    sums = np.cumsum(np.pad(probs, (0, -vocab % 128)).reshape(-1, 128).sum(1, dtype=np.float32))
    near = (sums[:, None] * (1 + np.arange(-50, 51) * 2.0**-24)).reshape(-1)
    numbers = jnp.asarray(np.clip(near, 0, 1 - 2.0**-23)[:count], jnp.float32)
    monkeypatch.setattr(draw, "shares_of", lambda keys, positions: numbers)
    keys = jnp.zeros((len(numbers), 2), jnp.uint32)
    rows = jnp.broadcast_to(probs, (len(numbers), vocab))
    tokens = draw_tokens(rows, keys, jnp.zeros(len(numbers), jnp.int32))
    assert (probs[tokens] > 0).all()


def test_chunks_of_one_token_go_to_their_own_rows():
    """Also where as many rows are fed as there are, which decoding does for all of them."""
    feeds = [Feed(3, 0, [5, 9]), Feed(1, 0, [7, 8])]

    def after(lengths):
        made = Sampler(MODEL, SamplerConfig(4, 16, 4, 4, lengths, 1.0), END)
        made.load(params())
        made.extend(feeds)
        for feed in ([Feed(3, 2, [11])], [Feed(1, 2, [12]), Feed(3, 3, [13])]):
            made.extend(feed)
        return jax.device_get((made.cache.keys[1][1, :, :3], made.cache.keys[1][3, :, :4]))

    for got, want in zip(after((1, 8)), after((8,)), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize(
    "row,start,count,chunk,want",
    [
        (1, 2, 3, 4, [1, 1, 10, 11, 12, 1, 1, 1]),
        (1, 6, 2, 4, [1, 1, 1, 1, 1, 1, 10, 11]),  # its padding would reach past the end
        (1, 5, 3, 12, [1, 1, 1, 1, 1, 10, 11, 12]),  # longer than the row
        (1, 8, 0, 4, [1] * 8),
        (2, 0, 0, 4, [1] * 8),  # no row
    ],
)
def test_a_chunk_writes_its_real_tokens_and_nothing_else(row, start, count, chunk, want):
    ones = jnp.ones((2, 1, 8, 1))
    fresh = 10.0 + jnp.arange(chunk).reshape(1, chunk, 1, 1)
    at = [jnp.array([n]) for n in (row, start, count)]
    keys, values = write((ones, ones), (fresh, -fresh), *at)
    assert keys[1, 0, :, 0].tolist() == want
    assert values[1, 0, :, 0].tolist() == [-x if x > 1 else 1 for x in want]
    assert (keys[0] == 1).all() and (values[0] == 1).all()


def test_greedy_takes_the_likeliest_token():
    keys = jnp.ones((2, 2), jnp.uint32)
    logits = jnp.array([[0.0, 3.0, 1.0], [5.0, 1.0, 1.0]])
    tokens, _ = sample_tokens(logits, keys, jnp.array([0, 0]), 0.0)
    assert tokens.tolist() == [1, 0]


@pytest.mark.parametrize("steps,visits", [(1, 8), (2, 4), (8, 1)])
def test_the_tokens_do_not_depend_on_how_often_the_host_is_visited(steps, visits):
    prompts = [[1, 2, 3], [9] * 12]
    want, _ = decoded(sampler(steps=4), prompts, budget=4, visits=2)
    got, _ = decoded(sampler(steps=steps), prompts, budget=steps, visits=visits)
    assert got == want


def test_a_row_stops_at_an_end_token_and_counts_it():
    made = sampler(steps=8)
    made.end_tokens = tuple(range(768))
    (row,), _ = decoded(made, [[1, 2, 3]], budget=8)
    assert len(row) == 4


def test_the_loop_returns_when_too_few_rows_go_on():
    made = sampler(slots=3, steps=8)
    made.extend([Feed(row, 0, [1, 2]) for row in range(3)])
    lengths = np.full(3, 2, np.int32)
    budgets = np.array([2, 2, 8], np.int32)
    keys = np.ones((3, 2), np.uint32)
    chunk = made.decode(np.full(3, 5, np.int32), lengths, budgets, keys, 2)
    assert int(chunk.steps) == 2


def test_a_row_without_budget_keeps_its_cache():
    made = sampler()
    made.extend([Feed(0, 0, [1, 2, 3]), Feed(1, 0, [4, 5, 6])])
    before = jax.device_get(made.cache.keys[0][1])
    budgets = np.array([4, 0, 0], np.int32)
    lengths = np.array([3, 3, 0], np.int32)
    made.decode(np.full(3, 7, np.int32), lengths, budgets, np.ones((3, 2), np.uint32), 1)
    np.testing.assert_array_equal(made.cache.keys[0][1], before)


def test_copies_happen_in_order():
    made = sampler()
    made.extend([Feed(0, 0, [1, 2, 3])])
    made.copy([(0, 1), (1, 2)])
    np.testing.assert_array_equal(made.cache.keys[0][2], made.cache.keys[0][0])


def test_a_feed_past_the_end_of_the_row_is_refused():
    with pytest.raises(ValueError, match="holds 60 tokens and is fed 5 more, but has 64"):
        sampler().extend([Feed(0, 60, [1] * 5)])


def test_an_episode_key_depends_on_step_problem_and_sample_only():
    root = jax.random.key(3)
    names, samples = np.array([7, 7, 8], np.uint32), np.array([0, 1, 0], np.int32)
    keys = np.asarray(episode_keys(root, np.int32(2), names, samples))
    alone = np.asarray(episode_keys(root, np.int32(2), names[2:], samples[2:]))
    np.testing.assert_array_equal(keys[2], alone[0])
    other = np.asarray(episode_keys(root, np.int32(3), names, samples))
    assert len({tuple(k) for k in [*keys, *other]}) == 6
