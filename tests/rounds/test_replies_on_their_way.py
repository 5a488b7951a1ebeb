"""Whatever changes a reply on its way, silo and server both count what was really sent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laid_open import laid_open
from problems import cut
from pvi_problems import KEY, logistic, logistic_rows
from sent_otherwise import on_grid, sent_otherwise

import numpyro_fed as nf
from numpyro_fed.methods.method import RUNTIMES


def run(change, schedule, runtime, rounds=2):
    """States after a few rounds, and the fit; with with replies that are changed or not."""
    pvi = nf.PVI(
        logistic, schedule=schedule, local=nf.local.LBFGS(steps=20, num_particles=16), start=None
    )
    opened = laid_open(pvi, cut(logistic_rows(), (8, 10, 6)), runtime)
    algorithm = opened.algorithm
    if change is not None:
        algorithm = sent_otherwise(algorithm, change)
    run_by = RUNTIMES[runtime](algorithm, opened.built.schedule)
    state = run_by.init(KEY, opened.batches)
    after, _, ended = run_by.advance(KEY, state, opened.batches, rounds)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "runtime"),
    [("sequential", "simulation"), ("synchronous", "simulation"), ("sequential", "host")],
)
def test_the_silos_factors_sum_to_the_servers_whatever_is_sent(schedule, runtime):
    state, held = run(on_grid(0.25), schedule, runtime)
    plain, _ = run(None, schedule, runtime)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
        factors_sum(state, held),
        state.server.total,
    )
    changed = jax.tree.map(
        lambda a, b: float(abs(a - b).max()), state.server.total, plain.server.total
    )
    assert max(jax.tree.leaves(changed)) > 0.01
