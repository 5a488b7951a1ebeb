"""Loops of an accelerator, which look at their condition only now and then, on a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

import numpyro_fed as nf
from numpyro_fed.basics import programs

KEY = jax.random.key(0)
QUIET = {"progress_bar": False}


@pytest.fixture
def accelerated(monkeypatch):
    """A function that makes programs from then on be those of an accelerator."""

    def begin():
        monkeypatch.setattr("numpyro_fed.basics.programs.on_accelerator", lambda: True)

    return begin


@pytest.mark.parametrize("steps", [0, 1, 7, 8, 21])
def test_a_loop_ends_where_its_condition_says(steps, accelerated):
    accelerated()
    ended = programs.while_loop(
        lambda carry: carry[0] < steps, lambda c: (c[0] + 1, 2.0 * c[1]), (jnp.array(0), 1.0)
    )
    assert (int(ended[0]), float(ended[1])) == (steps, 2.0**steps)


def model(y):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with nf.silo_plate("row", len(y)):
        numpyro.sample("y", dist.Normal(mu, 2), obs=y)


@pytest.mark.slow
def test_a_visit_has_the_same_numbers(accelerated, double):
    silos = [dict(y=np.arange(5.0)), dict(y=np.arange(7.0))]

    def losses():
        local = nf.local.Optax(optim=optax.adam(0.1), steps=21)
        method = nf.PVI(model, start=None, local=local)
        return method.run(KEY, 2, silos, **QUIET).losses

    plain = losses()
    accelerated()
    np.testing.assert_allclose(losses(), plain, rtol=1e-12)
