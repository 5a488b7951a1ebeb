"""Latents in NumPyro's control flow: a scan has the density of the same model as a loop."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.contrib.control_flow import cond, scan

import numpyro_fed as nf
from numpyro_fed.basics.errors import ModelError
from numpyro_fed.data.silo_data import read
from numpyro_fed.text.jaxprs import provenance
from numpyro_fed.text.split import split

RNG = np.random.default_rng(0)
Y = np.array([0.5, -1.0, 2.0])
SERIES = [{"y": RNG.normal(size=(n, 4))} for n in (2, 3)]
KEY = jax.random.key(0)


def density(model, silos, z_G, z_L):
    """The prior, and the rows of the first silo."""
    data = read(silos)
    fm = split(model, data)
    rows = jax.jit(fm.log_silo)({}, jnp.asarray(z_G), jax.tree.map(jnp.asarray, z_L), data[0])
    return float(fm.log_prior({}, jnp.asarray(z_G))), rows["row"]


def sequence(how):
    """Three positive globals in a row: by a scan, with a scale around it, in it, or by a loop."""

    def step(before, _=None, name="z"):
        with handlers.scale(scale=0.5 if how in ("scaled inside", "loop, scaled") else 1.0):
            z = numpyro.sample(name, dist.LogNormal(before, 1))
        return jnp.tanh(z), z

    def model(y):
        if how.startswith("loop"):
            carry, steps = 0.0, []
            for i in range(3):
                carry, z = step(carry, name=f"z{i}")
                steps.append(z)
            z = jnp.stack(steps)
        else:
            with handlers.scale(scale=0.5 if how == "scaled around" else 1.0):
                _, z = scan(step, 0.0, None, length=3)
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(z.sum(), 1), obs=y)

    return model


@pytest.mark.parametrize(
    ("how", "loop"),
    [("plain", "loop"), ("scaled around", "loop, scaled"), ("scaled inside", "loop, scaled")],
)
def test_a_global_sequence_has_the_density_of_a_loop(double, how, loop):
    at = [0.3, -0.2, 0.5]
    found, expected = (density(sequence(h), [{"y": Y}], at, {}) for h in (how, loop))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-10)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-10)


@pytest.mark.slow
def test_supports_of_a_sequence_may_be_any_and_move_with_it(double):
    def step(c, _):
        w = numpyro.sample("w", dist.Dirichlet(jnp.ones(3) + c**2))
        u = numpyro.sample("u", dist.Uniform(c, c + 2))
        with numpyro.plate("k", 2):
            v = numpyro.sample("v", dist.Gamma(2.0, jnp.exp(c)))
        return jnp.tanh(u + w[0] + v.sum()), u

    def model(y):
        _, u = scan(step, 0.0, None, length=3)
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(u.sum(), 1), obs=y)

    nf.check_decomposition(model, [{"y": Y}], num_points=1)
    table = {s.name: (s.shape, s.event_dim) for s in split(model, read([{"y": Y}])).sites}
    assert (table["w"], table["u"], table["v"]) == (((3, 2), 1), ((3,), 0), ((3, 2), 0))


def state_space(how, dim=None):
    """A positive state for each row at four times: the plate in a scan or around it, or a loop."""

    def model(y):
        s = numpyro.sample("s", dist.LogNormal(0, 1))
        start = jnp.zeros((y.shape[0], *(1,) * (-(dim or -1) - 1)))

        def step(x, y, suffix=""):
            x = numpyro.sample(f"x{suffix}", dist.LogNormal(jnp.tanh(x), s))
            numpyro.sample(f"y{suffix}", dist.Normal(x, 1), obs=y)
            return x, None

        def plate():
            return nf.silo_plate("row", y.shape[0], dim=dim)

        def inside(x, y):
            with plate():
                return step(x, y)

        times = y.T.reshape(4, *start.shape)
        if how == "inside":
            scan(inside, start, times)
            return
        with plate():
            if how == "around":
                scan(step, start, times)
                return
            for t in range(4):
                start, _ = step(start, times[t], t)

    return model


@pytest.mark.parametrize("dim", [None, -2])
@pytest.mark.parametrize("how", ["inside", "around"])
def test_a_sequence_for_each_row_has_the_density_of_a_loop(double, how, dim):
    z = {"row": RNG.normal(size=(2, 4))}
    found, expected = (density(state_space(h, dim), SERIES, [0.3], z) for h in (how, "loop"))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-10)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-10)


@pytest.mark.slow
def test_the_joint_model_knows_sequences_of_rows():
    nf.check_decomposition(state_space("inside"), SERIES, num_points=1)


def test_a_sequence_of_data_alone_needs_no_latents():
    def model(y):
        s = numpyro.sample("s", dist.LogNormal(0, 1))

        def step(before, y):
            numpyro.sample("y", dist.Normal(0.5 * before, s), obs=y)
            return y, None

        with nf.silo_plate("row", y.shape[0]):
            scan(step, y[:, 0], y.T)

    found = density(model, SERIES, [0.3], {"row": np.zeros((2, 0))})[1]
    y = SERIES[0]["y"]
    before = np.concatenate([y[:, :1], y[:, :-1]], 1)
    by_hand = dist.Normal(0.5 * before, np.exp(0.3)).log_prob(y).sum(1)
    np.testing.assert_allclose(found, by_hand, rtol=1e-5)


def test_a_sequence_of_globals_may_be_observed_row_by_row_in_the_same_scan():
    def model(y):
        def step(before, y):
            g = numpyro.sample("g", dist.Normal(before, 1))
            with nf.silo_plate("row", len(y)):
                numpyro.sample("y", dist.Normal(g, 1), obs=y)
            return g, g

        _, g = scan(step, 0.0, y.T)
        numpyro.deterministic("total", g.sum())

    at = np.array([0.1, 0.2, 0.4, 0.8])
    prior, rows = density(model, SERIES, at, {"row": np.zeros((2, 0))})
    by_hand = dist.Normal(np.array([0, *at[:-1]]), 1).log_prob(at).sum()
    np.testing.assert_allclose(prior, by_hand, rtol=1e-5)
    np.testing.assert_allclose(rows, dist.Normal(at, 1).log_prob(SERIES[0]["y"]).sum(1), rtol=1e-5)
    fm = split(model, read(SERIES))
    np.testing.assert_allclose(fm.constrain_global({}, jnp.asarray(at))["total"], 1.5, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fit",
    [
        nf.SFVI(state_space("around"), optim=optax.adam(1e-2), start=None),
        nf.PVI(
            state_space("inside"),
            local=nf.local.Optax(steps=1),
            guide=nf.guides.MeanField(),
            start=None,
        ),
    ],
    ids=["SFVI", "PVI"],
)
@pytest.mark.filterwarnings("ignore:.*not converged")
def test_sequences_of_rows_can_be_fitted(fit):
    result = fit.run(KEY, 1, SERIES, progress_bar=False)
    assert np.isfinite(result.losses).all()
    assert result.sample_posterior(KEY, 2, silo=1)["x"].shape == (2, 4, 3)


@pytest.mark.parametrize("how", [pytest.param("inside", marks=pytest.mark.slow), "around"])
def test_latents_of_rows_may_stand_in_a_cond(how):
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))

        def draw(loc):
            return numpyro.sample("b", dist.LogNormal(loc, 1))

        def plate():
            return nf.silo_plate("row", y.shape[0])

        def inside(loc):
            with plate():
                return draw(loc)

        if how == "inside":
            b = cond(mu > 0, inside, lambda loc: inside(-loc), mu)
        else:
            with plate():
                b = cond(mu > 0, draw, lambda loc: draw(-loc), mu)
        with plate():
            numpyro.sample("y", dist.Normal(b, 1), obs=y)

    nf.check_decomposition(model, [{"y": Y}, {"y": Y[:2]}], num_points=1)


def nested(y):
    def step(carry, _):
        def inner(carry, _):
            z = numpyro.sample("z", dist.Normal(carry, 1))
            return z, None

        return scan(inner, carry, None, length=2)

    last, _ = scan(step, 0.0, None, length=3)
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(last, 1), obs=y)


def with_param(y):
    def step(carry, _):
        z = numpyro.sample("z", dist.Normal(carry, numpyro.param("theta", 1.0)))
        return z, None

    last, _ = scan(step, 0.0, None, length=3)
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(last, 1), obs=y)


def in_a_scope(y):
    def step(carry, _):
        z = numpyro.sample("z", dist.Normal(carry, 1))
        return z, None

    with handlers.scope(prefix="a"):
        last, _ = scan(step, 0.0, None, length=3)
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(last, 1), obs=y)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nested, r"'z' .*\(2,\) .*Python loop"),
        (with_param, "'theta' .*Put it before"),
        (in_a_scope, "'a/z' .*scan inside .*scope"),
    ],
)
def test_what_a_scan_cannot_hold_is_refused(model, message):
    with pytest.raises(ModelError, match=message):
        split(model, read([{"y": Y}]))


def test_the_outputs_of_a_scan_are_told_apart():
    def fn(a, b, c):
        def step(carry, x):
            first, second = carry
            return (first + a, second + first), (x, first)

        (first, second), (xs, firsts) = jax.lax.scan(step, (b, 0.0), c)
        return {"first": first, "second": second, "xs": xs, "firsts": firsts}

    found = provenance(fn, a=1.0, b=2.0, c=jnp.ones(3))
    assert found == {
        "first": {"a", "b"},
        "second": {"a", "b"},
        "xs": {"c"},
        "firsts": {"a", "b"},
    }


def test_the_outputs_of_a_cond_are_told_apart():
    def fn(a, b, c):
        branches = (lambda b, c: (b, 0.0), lambda b, c: (2 * b, c))
        return jax.lax.cond(a > 0, *branches, b, c)

    assert provenance(fn, a=1.0, b=2.0, c=3.0) == ({"a", "b"}, {"a", "c"})
