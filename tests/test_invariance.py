"""How trajectories are packed, ordered, split and spread changes no gradient: float64, to 1e-10."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from demyrl.learn.batch import Example, PackConfig, pack, token_weights
from demyrl.learn.loss import LossConfig, grpo_loss
from demyrl.learn.update import make_programs, zero_total
from demyrl.model.mesh import MeshConfig, make_mesh
from demyrl.model.sharding import batch_sharding, params_sharding, spread
from demyrl.model.transformer import Layout
from tests.tiny import MODEL, drawn_params

EXACT = dataclasses.replace(
    MODEL, vocab=64, width=32, layers=1, heads=4, kv_heads=4, feed_forward=32, dtype="float64"
)


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def loss(logprobs, batch):
    return grpo_loss(logprobs, batch, LossConfig(0.2, 0.28, 10.0, "token", 0.1, "k3"))


def trajectories():
    rng = np.random.default_rng(0)
    lengths = [30, 17, 9, 14, 3, 22, 6, 11]
    weights = token_weights([rng.random(n) < 0.7 for n in lengths], "token")
    return [
        Example(
            rng.integers(0, EXACT.vocab, n).astype(np.int32),
            w,
            float(rng.normal()),
            *rng.normal(-4.1, 0.3, (2, n)),
        )
        for n, w in zip(lengths, weights, strict=True)
    ]


def summed(examples, shape, sizes=(1, 1, 1), remat="none"):
    """Gradients and numbers of all micro-batches of an update."""
    mesh = make_mesh(MeshConfig(*sizes))
    params = jax.tree.map(lambda p: p.astype(jnp.float64), drawn_params(EXACT))
    params = jax.device_put(params, params_sharding(EXACT, mesh))
    programs = make_programs(EXACT, optax.identity(), loss, 0.7, 8, Layout(mesh, remat))
    batches = [spread(batch, batch_sharding(mesh)) for batch in pack(examples, shape).batches]
    total = zero_total(params, batches[0], loss, "float64")
    for batch in batches:
        total = programs.accumulate(params, total, batch)
    return jax.device_get(total)


@functools.cache
def reference():
    return summed(trajectories(), PackConfig(4, 32, 1))


VARIANTS = {
    "one row of all": ((1, 112, 1), {}, 1),
    "each row alone": ((1, 32, 1), {}, 1),
    "rows of two lengths": ((2, 32, 2), {}, 1),
    "the other order": ((4, 32, 1), {}, -1),
    "layers computed again": ((4, 32, 1), {"remat": "full"}, 1),
    "eight devices": ((4, 32, 1), {"sizes": (2, 2, 2)}, 1),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_and_numbers_do_not_change_with(name):
    shape, how, order = VARIANTS[name]
    got = summed(trajectories()[::order], PackConfig(*shape), **how)

    def close(one, other):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-10)

    jax.tree.map(close, got, reference())


def test_the_gradients_compared_are_not_zero():
    sizes = [np.abs(g).max() for g in jax.tree.leaves(reference()[0])]
    assert min(sizes) > 1e-4
