"""Whatever stands between a silo and the server, both count what was really sent."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laid_open import laid_open
from problems import cut
from pvi_problems import KEY, logistic, logistic_rows

import numpyro_fed as nf
from numpyro_fed.algorithms.reply_transforms import (
    ReplyTransform,
    chain,
    clip_by_global_norm,
    round_to_grid,
    transformed,
)
from numpyro_fed.runtime.host import host
from numpyro_fed.runtime.simulation import simulation

NOISY = ReplyTransform(lambda noise, up: up._replace(log_lik=up.log_lik + noise), jax.random.normal)
TRANSFORMS = {
    "clip": clip_by_global_norm(0.5),
    "round": round_to_grid(0.25),
    "clip, round, noise": chain(clip_by_global_norm(2.0), round_to_grid(0.125), NOISY),
}


def run(transform, schedule, make, rounds=2):
    """States after a few rounds, and the fit; with and without the transform."""
    pvi = nf.PVI(
        logistic, schedule=schedule, local=nf.local.LBFGS(steps=20, num_particles=16), start=None
    )
    opened = laid_open(pvi, cut(logistic_rows(), (8, 10, 6)), make.__name__)
    algorithm = opened.algorithm
    if transform is not None:
        algorithm = transformed(algorithm, transform)
    runtime = make(algorithm, opened.built.schedule)
    state = runtime.init(KEY, opened.batches)
    after, _, ended = runtime.advance(KEY, state, opened.batches, rounds)
    assert bool(ended.ok)
    return after, opened


def factors_sum(state, held):
    """What the silos count as theirs."""
    total = None
    for b, batch in enumerate(held.batches):
        for i, j in enumerate(np.asarray(batch.silos).tolist()):
            silo = jax.tree.map(lambda a, i=i: a[i], state.silos[b])
            own = silo.effective_factor(state.server.taken[j])
            total = own if total is None else jax.tree.map(jnp.add, total, own)
    return total


@functools.cache
def plainly(schedule, make):
    """Without a transform."""
    return run(None, schedule, make)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedule", "make"),
    [
        *((name, "sequential", simulation) for name in TRANSFORMS),
        ("clip", "synchronous", simulation),
        ("clip", "sequential", host),
    ],
)
def test_the_silos_factors_sum_to_the_servers_whatever_is_sent(name, schedule, make):
    state, held = run(TRANSFORMS[name], schedule, make)
    plain, _ = plainly(schedule, make)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
        factors_sum(state, held),
        state.server.total,
    )
    changed = jax.tree.map(
        lambda a, b: float(abs(a - b).max()), state.server.total, plain.server.total
    )
    assert max(jax.tree.leaves(changed)) > 0.01  # the transform did something


def test_clipping_keeps_what_is_short_and_counts():
    up = {"change": jnp.array([0.3, 0.4]), "statuses": jnp.array([1, 0])}
    short = clip_by_global_norm(1.0).apply((), up)
    np.testing.assert_array_equal(short["change"], up["change"])
    long = clip_by_global_norm(0.1).apply((), up)
    np.testing.assert_allclose(np.linalg.norm(long["change"]), 0.1, rtol=1e-6)
    np.testing.assert_array_equal(long["statuses"], [1, 0])


@pytest.mark.parametrize("make", [clip_by_global_norm, round_to_grid])
def test_settings_that_make_no_sense_are_refused(make):
    with pytest.raises(ValueError, match="must be positive"):
        make(0.0)
