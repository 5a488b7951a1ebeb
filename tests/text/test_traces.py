"""The user's text is run once for each signature of data and each precision."""

import gc
import weakref
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.contrib.control_flow import scan

import numpyro_fed as nf
from numpyro_fed.basics.programs import double_precision
from numpyro_fed.data.silo_data import read
from numpyro_fed.text.fingerprint import fingerprint
from numpyro_fed.text.layout import layout_and_buckets
from numpyro_fed.text.split import split
from numpyro_fed.text.trace import DENSITY, EDGE, INITIAL, INSIDE, LATENT
from numpyro_fed.text.traces import Traces
from numpyro_fed.text.values import SupportCheck, as_bucket

RNG = np.random.default_rng(0)


class Counted:
    """A model that counts its runs."""

    def __init__(self, model):
        self.model, self.runs = model, 0

    def __call__(self, **data):
        self.runs += 1
        return self.model(**data)


def regression(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 10).expand([x.shape[-1]]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfCauchy(10))
    with nf.silo_plate("patient", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)


def walk(y):
    scale = numpyro.sample("scale", dist.HalfNormal(1))

    def step(before, y):
        now = numpyro.sample("b", dist.Normal(before, scale))
        numpyro.sample("y", dist.Normal(now, 1), obs=y)
        return now, now

    with nf.silo_plate("row", y.shape[1]):
        scan(step, jnp.zeros(y.shape[1]), y)


def learned(y):
    loc = numpyro.param("loc", lambda key: jax.random.normal(key))
    with nf.silo_plate("row", len(y)):
        scale = numpyro.param("scale", jnp.array([0.5, 2.0]), constraint=dist.constraints.positive)
        numpyro.sample("y", dist.Normal(loc, scale[0]), obs=y)


def silos_of(*sizes):
    return [dict(x=RNG.normal(size=(n, 3)), y=RNG.normal(size=n)) for n in sizes]


def test_a_regression_is_run_once_for_each_silo_and_once_with_a_row_less():
    model = Counted(regression)
    silos = read(silos_of(9, 6, 12), model)
    layout, (bucket,) = layout_and_buckets(model, silos)
    fm = layout.model
    fingerprint(fm, silos)
    assert bucket.data.arrays["y"].shape == (3, 12)  # as long as silo 2
    assert fm.global_prior.funnels == ()
    key, z = jax.random.key(0), jnp.zeros(fm.dim)
    data = jax.tree.map(lambda a: a[0], bucket.data)
    jax.grad(
        lambda z: (
            fm.log_prior({}, z) + fm.log_silo({}, z, {"patient": z[:0]}, data)["patient"].sum()
        )
    )(z)
    fm.constrain_global({}, z)
    fm.init_theta(key)
    fm.sizes(data)
    assert model.runs == 4
    with double_precision():
        fm.log_prior({}, jnp.zeros(fm.dim))
    assert model.runs == 5


def test_a_scan_is_run_twice():
    model = Counted(walk)
    split(model, read([dict(y=RNG.normal(size=(4, 3)))], model))
    assert model.runs == 2


@pytest.mark.parametrize("double", [False, True])
def test_initial_values_are_outputs_of_the_same_program(double):
    model = Counted(learned)
    with double_precision() if double else partial(jax.enable_x64, False)():
        (silo,) = read([dict(y=RNG.normal(size=5))], model)
        trace = Traces(model).at(silo)
        real = jnp.result_type(float)
        found = trace.at([(INITIAL, "scale"), (INITIAL, "loc")], {}, {}, {}, jax.random.key(3))
        np.testing.assert_allclose(found[INITIAL, "scale"], np.log([0.5, 2.0]), rtol=1e-6)
        assert found[INITIAL, "loc"].dtype == real
        # Parameters that are not given have these values.
        (density,) = trace.at([(DENSITY, "y")], {"loc": 0.0}, {}, silo.arrays).values()
        expected = dist.Normal(0.0, 0.5).log_prob(silo.arrays["y"])
        np.testing.assert_allclose(density, expected, rtol=1e-5)
    assert model.runs == 1


def test_what_reaches_a_density():
    trace = Traces(regression).at(read(silos_of(4))[0])
    assert trace.reads((DENSITY, "y"), LATENT) == {"beta", "sigma"}
    assert trace.reads((DENSITY, "beta"), LATENT) == {"beta"}
    assert trace.reads((DENSITY, "_sigma_log_det"), LATENT) == {"sigma"}
    assert trace.reads((DENSITY, "y"), "array") == {"x", "y"}


def test_data_are_no_constants_and_an_array_from_outside_is_not_copied():
    table = RNG.normal(size=(4, 3))

    def model(y):
        beta = numpyro.sample("beta", dist.Normal(0, 1).expand([3]).to_event(1))
        with nf.silo_plate("row", len(y)):
            numpyro.sample("y", dist.Normal(table @ beta, 1), obs=y)

    (silo,) = read([dict(y=RNG.normal(size=4))])
    with double_precision():
        trace = Traces(model).at(silo)
        consts = trace.part([(DENSITY, "y")])[0].consts
    (held,) = (c for c in consts if c.shape == table.shape)
    assert np.shares_memory(held, table)


def test_traces_die_with_their_model():
    def made():
        fm = split(regression, read(silos_of(4, 5)))
        fm.log_prior({}, jnp.zeros(fm.dim))
        return weakref.ref(fm.traces.at(read(silos_of(4))[0]))

    trace = made()
    gc.collect()
    assert trace() is None


@pytest.mark.parametrize(
    ("likelihood", "values", "bad"),
    [
        (dist.Normal(0, 1), np.array([0.0, 1.0]), None),
        (dist.Bernoulli(0.5), np.array([0, 1]), np.array([1, 2])),
        (dist.Poisson(2.0), np.array([0, 3]), np.array([0, -3])),
        (dist.Binomial(3, 0.5), np.array([0, 3]), np.array([4, 3])),
        (dist.Gamma(2.0, 1.0), np.array([0.5, 3.0]), np.array([-0.5, 3.0])),
        (dist.Beta(2.0, 2.0), np.array([0.5, 0.1]), np.array([0.5, 1.1])),
        (dist.Categorical(np.ones(3) / 3), np.array([0, 2]), np.array([0, 3])),
    ],
)
def test_plain_supports_are_checked_without_a_program(likelihood, values, bad, compiled):
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with nf.silo_plate("row", len(y)):
            numpyro.factor("mean", jnp.full(len(y), mu))
            numpyro.sample("y", likelihood, obs=y)

    silos = read([dict(y=values)])
    supports = SupportCheck(split(model, silos).traces, "silo {}")
    kind = supports.traces.at(silos[0]).supports["y"]
    assert kind.argument == "y"
    before = len(compiled)
    supports.check(as_bucket(silos[0]))
    assert len(compiled) == before
    if bad is not None:
        with pytest.raises(nf.DataError, match="is impossible"):
            supports.check(as_bucket(read([dict(y=bad)])[0]))
    # A program would say the same.
    found = supports.traces.at(silos[0]).at([(INSIDE, "y"), (EDGE, "y")], {}, {}, silos[0].arrays)
    _, inside, edge = kind.observed(silos[0].arrays["y"])
    np.testing.assert_array_equal(inside, found[INSIDE, "y"])
    np.testing.assert_array_equal(edge, found[EDGE, "y"])


def test_what_sets_the_prior_of_a_global():
    def model(y):
        loc = numpyro.param("loc", 0.0)
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        effect = numpyro.sample("effect", dist.Normal(loc, tau).expand([2]).to_event(1))
        with nf.silo_plate("row", len(y)):
            numpyro.sample("y", dist.Normal(effect.sum(), 1), obs=y)

    fm = split(model, read([dict(y=RNG.normal(size=3))]))
    assert fm.global_prior.setters == {"tau": frozenset(), "effect": {"loc", "tau"}}


def test_a_regression_is_checked_by_its_operations_and_drawn_from_by_one_program(compiled):
    layout, _ = layout_and_buckets(regression, read(silos_of(7, 5, 11)))
    assert layout.model.draw_prior(1, 16).shape == (16, 4)
    some = layout.model.draw_prior(2, 5)
    np.testing.assert_array_equal(some, layout.model.draw_prior(2, 40)[:5])
    names = [name.removeprefix("jit(").rstrip(")") for name in compiled]
    # XLA is asked once in a process, by a program that does nothing, which options it knows.
    assert [name for name in names if name != "<lambda>"] == ["_draw_prior"]
