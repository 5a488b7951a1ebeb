"""Texts that read NumPy arrays from outside, in both precisions in one process."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_fed as nf
from numpyro_fed.basics.programs import copies_by_precision, double_precision, jit_double

HELD = np.eye(3) + 0.1


def product(x):
    return jax.lax.mul(jnp.asarray(HELD), x)


def test_a_text_is_traced_in_double_precision_while_a_trace_in_single_lives():
    copies_by_precision()
    trace = jax.make_jaxpr(product)(jnp.ones((3, 3)))
    found = jit_double(product)(np.ones((3, 3)))
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, HELD)
    assert trace.jaxpr.outvars[0].aval.dtype == jnp.float32


def test_and_in_single_precision_while_a_trace_in_double_lives():
    with double_precision():
        trace = jax.make_jaxpr(product)(jnp.ones((3, 3)))
    assert trace.jaxpr.outvars[0].aval.dtype == jnp.float64
    assert jax.jit(product)(jnp.ones((3, 3))).dtype == jnp.float32


@pytest.mark.slow
def test_an_array_that_takes_the_place_of_a_dead_one_is_another():
    """Copies are told apart by where their arrays lie, which a later array may take."""
    copies_by_precision()
    traces = []
    gc.freeze()  # so that a collection looks at the loop's objects only
    for value in range(50):
        a = np.full(3, float(value))
        traces.append(jax.make_jaxpr(lambda x, a=a: x * a)(jnp.ones(3)))
        del a
        gc.collect()
    gc.unfreeze()
    for value, trace in enumerate(traces):
        np.testing.assert_array_equal(trace.consts[0], value)


def test_an_array_is_one_constant_of_a_trace():
    copies_by_precision()
    assert len(jax.make_jaxpr(lambda x: x * HELD + HELD)(jnp.ones((3, 3))).consts) == 1


@pytest.mark.slow
@pytest.mark.parametrize("method", [nf.PVI, nf.SFVI])
def test_runs_of_a_text_with_an_index_and_a_basis(method):
    """PVI looks at priors in double precision; the index was int64 then, and int32 before."""
    r = np.random.default_rng(0)
    group, basis, scale = r.integers(0, 3, 4), r.normal(size=(4, 4)), r.uniform(0.5, 1, 4)

    def model(x, y=None):
        m = numpyro.sample("m", dist.Normal(0, 1).expand([3]).to_event(1))
        at = jax.lax.mul(m[group] + 1.0, jnp.asarray(scale))
        beta = numpyro.sample("beta", dist.Normal(at, scale).to_event(1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(1))
        with nf.silo_plate("row", x.shape[0]):
            numpyro.sample("y", dist.Normal((x @ basis) @ beta, sigma), obs=y)

    silos = [dict(x=r.normal(size=(9, 4)), y=r.normal(size=9)) for _ in range(2)]
    before = jax.make_jaxpr(lambda m: jax.lax.add(m[group], jnp.asarray(scale)))(jnp.ones(3))
    result = method(model).run(jax.random.key(0), 2, silos, progress_bar=False)
    found = result.sample_posterior(jax.random.key(1), 3)
    assert {a.dtype for a in jax.tree.leaves(found)} == {np.dtype(np.float32)}
    assert before.jaxpr.outvars[0].aval.dtype == jnp.float32
