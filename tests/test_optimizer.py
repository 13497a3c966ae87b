"""AdamW against its formulas, its rate over the updates, and moments in bfloat16."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from demyrl.learn.optimizer import (
    OptimizerConfig,
    learning_rate,
    make_optimizer,
    round_at_random,
)
from demyrl.model.transformer import map_table
from tests.tiny import MODEL

SMALL = dataclasses.replace(MODEL, vocab=32, width=16, layers=2, feed_forward=16)
OPTIMIZER = OptimizerConfig(
    learning_rate=2e-4,
    warmup_updates=0,
    decay_updates=0,
    final_share=0.1,
    beta1=0.9,
    beta2=0.95,
    weight_decay=0.1,
    clip_norm=1.0,
    skips=3,
)


def first_changes(fill_params, fill_grads, **settings):
    """What the optimizer makes of constant gradients at constant parameters, and its state."""
    model = dataclasses.replace(SMALL, attention_bias=True)
    optimizer = make_optimizer(dataclasses.replace(OPTIMIZER, **settings), model)

    @jax.jit
    def changes():
        params, grads = (
            map_table(lambda row, fill=fill: jnp.full(row.shape, fill), model)
            for fill in (fill_params, fill_grads)
        )
        return optimizer.update(grads, optimizer.init(params), params)

    return changes()


def test_the_first_step_of_adam_is_the_sign_of_the_gradient_plus_the_decay():
    changes, _ = first_changes(2.0, -3.0, clip_norm=1e9)
    np.testing.assert_allclose(changes["embedding"], -1 + 0.1 * 2, atol=1e-5)
    np.testing.assert_allclose(changes["final_norm"], -1, atol=1e-5)


def test_norms_and_biases_do_not_decay():
    changes, _ = first_changes(1.0, 0.0)
    flat = {**changes, **changes["layers"]}
    decays = {name for name, change in flat.items() if name != "layers" and change.any()}
    assert decays == {"embedding", "query", "key", "value", "out", "gate", "up", "down"}


def test_the_gradient_is_clipped_by_its_whole_norm():
    _, state = first_changes(1.0, 5.0)
    moment = optax.tree_utils.tree_get(state, "mu")  # the first is (1 - beta1) x the gradient
    assert float(optax.global_norm(moment)) == pytest.approx(0.1 * OPTIMIZER.clip_norm, rel=1e-4)


SCHEDULE = dataclasses.replace(OPTIMIZER, learning_rate=1.0, warmup_updates=4, decay_updates=14)


@pytest.mark.parametrize(
    "update, rate",
    [
        (0, 0.25),  # the first update is not lost to a rate of 0
        (1, 0.5),
        (3, 1.0),
        (4, 1.0),
        (9, 0.1 + 0.9 / 2),  # half of the cosine
        (14, 0.1),
        (15, 0.1),
        (1000, 0.1),
    ],
)
def test_the_rate_warms_up_and_decays_by_a_cosine_to_its_final_share(update, rate):
    assert learning_rate(SCHEDULE, update) == pytest.approx(rate)


def test_the_rate_without_a_decay_is_constant():
    config = dataclasses.replace(SCHEDULE, decay_updates=0)
    assert [learning_rate(config, update) for update in (4, 50, 5000)] == [1.0] * 3


def test_the_rate_never_rises_after_the_warm_up():
    rates = [learning_rate(SCHEDULE, update) for update in range(4, 20)]
    assert rates == sorted(rates, reverse=True) and all(map(math.isfinite, rates))


def moments_after(updates, moments):
    """Adam's moments of a parameter whose gradient is 1 for ever, and its last change."""
    config = dataclasses.replace(OPTIMIZER, beta2=0.999, clip_norm=1e9, weight_decay=0.0)
    optimizer = make_optimizer(config, SMALL, moments)
    params = map_table(lambda row: jnp.zeros(row.shape), SMALL)
    grads = map_table(lambda row: jnp.ones(row.shape), SMALL)
    step = jax.jit(lambda state: optimizer.update(grads, state, params))
    state = optimizer.init(params)
    for _ in range(updates):
        changes, state = step(state)
    mu, nu = (optax.tree_utils.tree_get(state, name)["embedding"] for name in ("mu", "nu"))
    return mu, nu, changes["embedding"]


def test_second_moments_in_bfloat16_grow_as_they_should_on_average():
    """A change of a thousandth is less than half a unit in the last place: rounded to the nearest,
    the moment would stop growing."""
    _, nu, _ = moments_after(600, "bfloat16")
    want = 1 - 0.999**600
    assert nu.dtype == jnp.bfloat16
    assert float(nu.astype(jnp.float32).mean()) == pytest.approx(want, rel=0.01)


def test_moments_in_bfloat16_change_parameters_as_those_in_float32_do():
    mu, nu, changes = moments_after(50, "bfloat16")
    _, _, exact = moments_after(50, "float32")
    assert mu.dtype == nu.dtype == jnp.bfloat16
    np.testing.assert_allclose(changes.mean(), exact.mean(), rtol=2e-3)
    np.testing.assert_allclose(changes, exact, rtol=0.1)


def test_rounding_at_random_is_unbiased_and_goes_to_a_neighbor():
    x = jnp.full(20_000, 1 + 1 / 1024, jnp.float32)  # an eighth of the way from 1 to 1 + 1/128
    got = np.asarray(round_at_random(x, jax.random.key(0)))
    assert set(got.tolist()) == {1.0, 1 + 1 / 128}
    assert got.mean() == pytest.approx(1 + 1 / 1024, abs=5 / 128 * (0.33 / 20_000**0.5))


def test_what_bfloat16_can_hold_is_not_rounded():
    exact = jnp.array([0.0, -1.5, 2.0**-60, 1e30], jnp.float32).astype(jnp.bfloat16)
    wide = exact.astype(jnp.float32)
    np.testing.assert_array_equal(round_at_random(wide, jax.random.key(1)), wide)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"learning_rate": 0.0}, "learning_rate is 0.0"),
        ({"clip_norm": 0.0}, "clip_norm is 0.0"),
        ({"warmup_updates": -1}, "warmup_updates is -1"),
        ({"skips": 0}, "skips is 0: at least 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(OPTIMIZER, **change)
