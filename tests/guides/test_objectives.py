"""Bounds: their values, their gradients by quadrature, and what they promise over partitions."""

from functools import partial

import jax
import jax.numpy as jnp
import models
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from cases import slow_but
from problems import cut, gauss_hermite, glmm, glmm_silos, jitter, parts

import numpyro_fed as nf
from numpyro_fed.data.minibatches import MinibatchNoise
from numpyro_fed.data.padding import bucket
from numpyro_fed.guides.silo_bounds import AtDraw, SiloBound, normals
from numpyro_fed.numerics.gaussian import Coordinates
from numpyro_fed.rounds import convergence
from numpyro_fed.rounds.exchange import Combine, combine
from numpyro_fed.rounds.step import replayed_part

KEY = jax.random.key(0)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def normal(z, mean, scale):
    """Log density of a normal; written on its own for the tests."""
    return -0.5 * ((z - mean) / scale) ** 2 - jnp.log(scale) - 0.5 * np.log(2 * np.pi)


def log_mean_exp(a, axis=0):
    top = a.max(axis, keepdims=True)
    return jnp.log(jnp.exp(a - top).mean(axis)) + top.squeeze(axis)


# --- one plate of rows: y ~ Poisson(exp(b)), b ~ N(mu, exp(tau)) ---------------------------------


def counts(y):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    tau = numpyro.param("tau", 0.1)
    with nf.silo_plate("row", y.shape[0]):
        b = numpyro.sample("b", dist.Normal(mu, jnp.exp(tau)))
        numpyro.sample("y", dist.Poisson(jnp.exp(b)), obs=y)


def counts_bound(theta, eta, z_G, seen, noise, data):
    """The bound written out; ``noise`` is (rows, K). Differentiated in full, nothing stopped."""
    eta = eta["row"]
    mean = eta["loc"] + eta["mean_coupling"] @ seen.offset
    scale = jnp.exp(eta["log_scale"] + eta["scale_coupling"] @ seen.offset)
    b, y = mean + scale * noise, data.arrays["y"][:, None]
    log_p = normal(b, z_G[0], jnp.exp(theta["tau"])) + dist.Poisson(jnp.exp(b)).log_prob(y)
    return log_mean_exp(log_p - normal(b, mean, scale), 1).sum()


def start_of(p):
    """Parameters, globals and coordinates at which bounds are compared."""

    @jax.jit
    def found():
        eta = jitter(p.guide.init_local(KEY, p.silos[0]))
        where = jnp.array([0.5])
        return p.model.init_theta(KEY), eta, where, Coordinates(where, jnp.array([0.2]))

    return found()


def noise_of(p):
    """A function of a key: the noise of one particle at the first silo."""

    @jax.jit
    def draw(key):
        return {plate: e[:, 0] for plate, e in p.bound.noise(key, p.sizes[0], 1).items()}

    return draw


def counts_case(objective, y=(0, 3)):
    p = parts(counts, [{"y": np.array(y)}], objective=objective)
    return p, start_of(p)


@pytest.mark.parametrize("K", [1, 2, 5])
def test_the_bound_of_a_row_is_a_log_mean_exp(x64, K):
    p, at = counts_case(nf.LocallyEnhanced(draws=K))
    noise = p.bound.noise(KEY, p.sizes[0], 2)
    assert noise["row"].shape == (2, 2, 1, K, 1)
    noise = noise["row"][:, 0]
    value = jax.jit(p.value)(*at, {"row": noise}, p.silos[0])
    expected = jax.jit(counts_bound)(*at, noise[:, 0, :, 0], p.silos[0])
    np.testing.assert_allclose(value, expected, rtol=1e-12)


def test_the_gradient_of_a_row_is_unbiased_by_quadrature(x64):
    # Both sides are means over the same Gauss-Hermite grid of the noise of K = 2 draws. They differ
    # by an integration by parts, which the grid does to about 1e-8 at 48 points a dimension.
    p, at = counts_case(nf.LocallyEnhanced(draws=2), y=(2,))
    grid, weights = gauss_hermite(48, 2)

    def each(noise):
        eps = {"row": noise.reshape(1, 1, 2, 1)}
        return jax.grad(p.value, (0, 1, 2, 3))(*at, eps, p.silos[0])

    def expected_bound(*at):
        bound = jax.vmap(lambda e: counts_bound(*at, e.reshape(1, 2), p.silos[0]))(grid)
        return weights @ bound

    per_noise = jax.tree.map(np.asarray, jax.jit(jax.vmap(each))(grid))
    got = jax.tree.map(lambda g: np.tensordot(weights, g, 1), per_noise)
    expected = jax.jit(jax.grad(expected_bound, (0, 1, 2, 3)))(*at)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-7, atol=1e-7), got, expected)
    # The estimator is another one than the plain gradient, or this test would say nothing.
    plain = jax.jit(jax.grad(counts_bound, 1))(*at, np.asarray(grid)[5].reshape(1, 2), p.silos[0])
    assert abs(plain["row"]["loc"] - per_noise[1]["row"]["loc"][5]).max() > 1e-4


@pytest.mark.slow
def test_the_gradient_of_rows_that_share_a_covariance_is_unbiased_by_quadrature(x64):
    """K = 2 draws of two rows: a row moves the other row, and its weight."""
    silos, guide = [{"y": np.array([2, 0])}], nf.guides.Structured(locals="joint")
    p = parts(counts, silos, guide=guide, objective=nf.LocallyEnhanced(draws=2))
    at = start_of(p)
    row = at[1]["row"]
    row["log_scale"] = np.asarray(row["log_scale"]) + 2.0
    row["below"] = 0.8 * np.eye(2)[::-1].reshape(2, 1, 2, 1)
    grid, weights = gauss_hermite(20, 4)

    def value(*at):
        return weights @ jax.vmap(lambda e: p.bound.value(AtDraw(*at, p.silos[0]), e))(noise)

    noise = {"row": grid.reshape(-1, 2, 1, 2, 1)}
    got = jax.jit(jax.grad(value, (0, 1, 2, 3)))(*at)
    p = p._replace(bound=SiloBound(p.model, p.guide, {"row": 2}, plain=True))
    expected = jax.jit(jax.grad(value, (0, 1, 2, 3)))(*at)
    assert abs(expected[1]["row"]["below"]).max() > 0.1
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), got, expected)


def test_the_elbo_of_a_row_is_unbiased_by_quadrature(x64):
    p, at = counts_case(nf.ELBO(), y=(2,))
    grid, weights = gauss_hermite(40, 1)

    def each(noise):
        eps = {"row": noise.reshape(1, 1, 1, 1)}
        return jax.grad(p.value, (0, 1, 2, 3))(*at, eps, p.silos[0])

    def expected_bound(*at):
        return weights @ jax.vmap(lambda e: counts_bound(*at, e.reshape(1, 1), p.silos[0]))(grid)

    got = jax.jit(jax.vmap(each))(grid)
    got = jax.tree.map(lambda g: jnp.tensordot(weights, g, 1), got)
    expected = jax.jit(jax.grad(expected_bound, (0, 1, 2, 3)))(*at)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-8, atol=1e-9), got, expected)


# --- an outer plate above a plate of rows --------------------------------------------------------


def wards(ward, size, y):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    tau = numpyro.param("tau", 0.1)
    with nf.silo_plate("ward", size.shape[0]):
        u = numpyro.sample("u", dist.Normal(mu, 1.0))
    with nf.silo_plate("row", ward.shape[0]):
        b = numpyro.sample("b", dist.Normal(0, jnp.exp(tau)))
        numpyro.sample("y", dist.Poisson(jnp.exp(0.5 * u[ward] + b)), obs=y)


def wards_bound(theta, eta, z_G, seen, noise, data):
    """``noise`` is {"ward": (wards, K_outer), "row": (rows, K_outer, K)}."""
    offset, index = seen.offset, data.arrays["ward"]
    outer, row = eta["ward"], eta["row"]

    def at_one(e_ward, e_row):
        mean = (outer["loc"] + outer["mean_coupling"] @ offset)[:, 0]
        s = (outer["log_scale"] + outer["scale_coupling"] @ offset)[:, 0]
        n = len(mean)
        T = jnp.eye(n)
        if "below" in outer:
            T += jnp.tril(outer["below"].reshape(n, n), -1)
        u = mean + T @ (jnp.exp(s) * e_ward)
        log_q_u = (normal(e_ward, 0.0, 1.0) - s).sum()
        above = jnp.concatenate([offset, u - outer["loc"][:, 0]])
        mean = row["loc"] + row["mean_coupling"] @ above
        scale = jnp.exp(row["log_scale"] + row["scale_coupling"] @ above)
        b = mean + scale * e_row
        log_p = normal(b, 0.0, jnp.exp(theta["tau"]))
        rate = jnp.exp(0.5 * u[index][:, None] + b)
        log_p += dist.Poisson(rate).log_prob(data.arrays["y"][:, None])
        rows = log_mean_exp(log_p - normal(b, mean, scale), 1).sum()
        return rows + normal(u, z_G[0], 1.0).sum() - log_q_u

    return log_mean_exp(jax.vmap(at_one, (1, 1))(noise["ward"], noise["row"]))


def wards_case(draws, ward=(0,), y=(2,)):
    ward = np.array(ward)
    silo = {"ward": ward, "size": np.zeros(ward.max() + 1), "y": np.array(y)}
    p = parts(wards, [silo], objective=nf.LocallyEnhanced(draws=draws))
    return p, start_of(p)


@pytest.mark.parametrize("draws", slow_but([{}, {"row": 3}, {"ward": 4}, {"ward": 3, "row": 2}], 3))
def test_the_bound_of_an_outer_plate_is_a_log_mean_exp_of_the_whole_silo(x64, draws):
    p, at = wards_case(draws, (0, 1, 1), (0, 2, 1))
    noise = {k: e[:, 1] for k, e in p.bound.noise(KEY, p.sizes[0], 2).items()}
    assert noise["row"].shape == (3, draws.get("ward", 1), draws.get("row", 1), 1)
    assert noise["ward"].shape == (2, draws.get("ward", 1), 1, 1)
    value = jax.jit(p.value)(*at, noise, p.silos[0])
    mine = {"ward": noise["ward"][:, :, 0, 0], "row": noise["row"][..., 0]}
    expected = jax.jit(wards_bound)(*at, mine, p.silos[0])
    np.testing.assert_allclose(value, expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("k_outer", "k", "points", "tolerance"),
    # The gaps are the grids' own: 1e-15, 2e-5, 9e-6 and 4e-3, and fall fourfold or more with every
    # two points that are added.
    [
        pytest.param(1, 1, 12, 1e-12, marks=pytest.mark.slow),  # the ELBO, to which it is compared
        pytest.param(1, 2, 20, 1e-4, marks=pytest.mark.slow),
        pytest.param(2, 1, 20, 1e-4, marks=pytest.mark.slow),
        (2, 2, 7, 1e-2),
    ],
)
def test_gradients_under_an_outer_plate_are_unbiased_by_quadrature(
    x64, k_outer, k, points, tolerance
):
    p, at = wards_case({"ward": k_outer, "row": k})
    grid, weights = gauss_hermite(points, k_outer + k_outer * k)

    def unpack(e):
        return {"ward": e[:k_outer].reshape(1, -1), "row": e[k_outer:].reshape(1, k_outer, k)}

    def each(e):
        e = unpack(e)
        eps = {"ward": e["ward"][:, :, None, None], "row": e["row"][..., None]}
        return jax.grad(p.value, (0, 1, 2, 3))(*at, eps, p.silos[0])

    def full(e):
        return jax.grad(wards_bound, (0, 1, 2, 3))(*at, unpack(e), p.silos[0])

    @jax.jit
    def mean(grid, weights):
        """By batches, so that memory stays small."""

        def add(total, batch):
            e, w = batch
            both = jax.vmap(each)(e), jax.vmap(full)(e)
            return jax.tree.map(lambda t, g: t + jnp.tensordot(w, g, 1), total, both), None

        zero = jax.tree.map(jnp.zeros_like, (at, at))
        return jax.lax.scan(add, zero, (grid, weights))[0]

    batch = points ** (k_outer + k_outer * k - 2)
    got, expected = mean(grid.reshape(-1, batch, grid.shape[1]), weights.reshape(-1, batch))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance), got, expected)


# --- two plates of rows --------------------------------------------------------------------------


def two_plates(x, y):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    with nf.silo_plate("a", x.shape[0]):
        u = numpyro.sample("u", dist.Normal(mu, 1.0))
        numpyro.sample("x", dist.Poisson(jnp.exp(u)), obs=x)
    with nf.silo_plate("b", y.shape[0]):
        v = numpyro.sample("v", dist.Normal(-mu, 2.0))
        numpyro.sample("y", dist.Poisson(jnp.exp(v)), obs=y)


@pytest.mark.parametrize("draws", [{"a": 3, "b": 1}, {"a": 2, "b": 3}, {"b": 4}, 3])
def test_each_plate_of_rows_has_its_own_number_of_draws(x64, draws):
    silo = {"x": np.array([1, 3]), "y": np.array([0, 2, 5])}
    p = parts(two_plates, [silo], objective=nf.LocallyEnhanced(draws=draws))
    K = {"a": 3, "b": 3} if draws == 3 else {"a": 1, "b": 1, **draws}
    at = start_of(p)
    eta, z_G, centre = at[1], np.array([0.5]), np.array([0.2])
    noise = noise_of(p)(KEY)
    assert {k: e.shape for k, e in noise.items()} == {
        "a": (2, 1, K["a"], 1),
        "b": (3, 1, K["b"], 1),
    }
    assert not np.isin(*(np.ravel(noise[k]) for k in "ab")).any()

    def expected_bound(eta):
        total = 0.0
        for plate, sign, width, key in [("a", 1, 1.0, "x"), ("b", -1, 2.0, "y")]:
            here = eta[plate]
            mean = here["loc"] + here["mean_coupling"] @ (z_G - centre)
            scale = jnp.exp(here["log_scale"] + here["scale_coupling"] @ (z_G - centre))
            z, seen = mean + scale * noise[plate][:, 0, :, 0], silo[key][:, None]
            log_p = normal(z, sign * z_G[0], width) + dist.Poisson(jnp.exp(z)).log_prob(seen)
            total += log_mean_exp(log_p - normal(z, mean, scale), 1).sum()
        return total

    value = jax.jit(p.value)(*at, noise, p.silos[0])
    np.testing.assert_allclose(value, jax.jit(expected_bound)(eta), rtol=1e-12)


# --- what an objective may be --------------------------------------------------------------------


@pytest.mark.parametrize("guide", [None, nf.guides.MeanField()])
def test_one_draw_is_the_elbo_in_value_and_gradient(x64, guide):
    silos = [{"ward": np.array([0, 1, 1]), "size": np.zeros(2), "y": np.array([0, 2, 1])}]
    elbo = parts(wards, silos, guide=guide, objective=nf.ELBO())
    one = parts(wards, silos, guide=guide, objective=nf.LocallyEnhanced(draws=1))
    at = start_of(elbo)
    noise, same = (noise_of(p)(KEY) for p in (elbo, one))
    jax.tree.map(np.testing.assert_array_equal, noise, same)
    a, b = (
        jax.jit(jax.value_and_grad(p.value, (0, 1, 2, 3)))(*at, noise, p.silos[0])
        for p in (elbo, one)
    )
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-13, atol=1e-13), a, b)


def test_a_number_of_draws_is_meant_for_plates_of_rows():
    silo = {"ward": np.array([0, 1, 1]), "size": np.zeros(2), "y": np.array([0, 2, 1])}
    p = parts(wards, [silo], objective=nf.LocallyEnhanced(draws=7))
    shapes = {k: e.shape for k, e in p.bound.noise(KEY, p.sizes[0], 2).items()}
    assert shapes == {"ward": (2, 2, 1, 1, 1), "row": (3, 2, 1, 7, 1)}


@pytest.mark.parametrize(
    ("objective", "error", "message"),
    [
        (nf.LocallyEnhanced(draws={"rows": 2}), ValueError, "'rows'.*'row'"),
        (nf.LocallyEnhanced(draws={"row": 0}), ValueError, "'row'.*positive"),
        (nf.LocallyEnhanced(draws=-1), ValueError, "'row'.*positive"),
        (nf.LocallyEnhanced(draws=2.5), ValueError, "'row'.*2.5"),
        ("elbo", TypeError, "objective.*ELBO.*'elbo'"),
    ],
)
def test_an_objective_that_cannot_work_is_refused(objective, error, message):
    with pytest.raises(error, match=message):
        parts(counts, [{"y": np.array([1, 2])}], objective=objective)


# --- Gaussian rows: y ~ N(b, 0.5), b ~ N(mu, 0.8) ------------------------------------------------

SIGMA, TAU = 0.5, 0.8


gaussian = models.levels(2, TAU, SIGMA)


def exact_rows(y, centre):
    """Parameters at which the guide of the rows is their posterior given ``mu``."""
    gain = TAU**2 / (TAU**2 + SIGMA**2)
    n = len(y)
    return {
        "row": {
            "loc": (centre + gain * (y - centre))[:, None],
            "log_scale": np.full((n, 1), 0.5 * np.log(gain * SIGMA**2)),
            "mean_coupling": np.full((n, 1, 1), 1 - gain),
            "scale_coupling": np.zeros((n, 1, 1)),
        }
    }


@pytest.mark.parametrize("draws", [1, 2, 5])
def test_exact_rows_give_the_marginal_likelihood_and_no_noise(x64, draws):
    y = np.array([0.3, -1.2, 2.0])
    p = parts(gaussian, [{"y": y}], objective=nf.LocallyEnhanced(draws=draws))
    z_G, centre = jnp.array([0.7]), jnp.array([0.2])
    eta = exact_rows(y, 0.2)
    width = np.hypot(SIGMA, TAU)
    grad, draw = jax.jit(jax.value_and_grad(p.value, (1, 2, 3))), noise_of(p)
    for seed in range(4):
        noise = draw(jax.random.key(seed))
        seen = Coordinates(z_G, centre)
        value, (g_eta, g_z, g_seen) = grad({}, eta, z_G, seen, noise, p.silos[0])
        np.testing.assert_allclose(value, normal(y, 0.7, width).sum(), rtol=1e-12)
        np.testing.assert_allclose(g_z + g_seen.u, [((y - 0.7) / width**2).sum()], rtol=1e-11)
        for leaf in jax.tree.leaves((g_eta, g_seen.centre)):
            np.testing.assert_allclose(leaf, 0.0, atol=1e-11)


def inexact_row(draws):
    """One row whose guide is off its posterior given ``mu`` in place and in scale."""
    y = np.array([1.5])
    spec = nf.guides.MeanField()
    p = parts(gaussian, [{"y": y}], guide=spec, objective=nf.LocallyEnhanced(draws=draws))
    precision = SIGMA**-2 + TAU**-2
    mean, sd = (1.5 / SIGMA**2 + 0.7 / TAU**2) / precision, precision**-0.5
    eta = {
        "row": {
            "loc": np.array([[mean - 0.6 * sd]]),
            "log_scale": np.log([[1.6 * sd]]),
        }
    }
    return p, eta, mean, sd


@pytest.mark.slow
def test_the_bound_tends_to_the_marginal_likelihood(x64):
    z_G = jnp.array([0.7])
    exact = normal(1.5, 0.7, np.hypot(SIGMA, TAU))
    # The variance of a normalised weight is E[(q_exact / q)^2] - 1, here by quadrature.
    grid, weights = gauss_hermite(80, 1)
    e = np.asarray(grid)[:, 0]
    b = -0.6 + 1.6 * e  # in units of the exact posterior
    variance = np.asarray(weights) @ np.exp(e**2 - b**2 + 2 * np.log(1.6)) - 1
    gaps = []
    for draws, repeats in [(1, 2_000), (4, 2_000), (16, 2_000), (20_000, 20)]:
        p, eta, _, _ = inexact_row(draws)
        noise = p.bound.noise(KEY, {"row": 1}, repeats)["row"]

        @jax.jit
        @partial(jax.vmap, in_axes=1)
        def at(noise, p=p, eta=eta):
            given = AtDraw({}, eta, z_G, Coordinates(z_G, z_G), p.silos[0])
            return p.bound.value(given, {"row": noise})

        values = np.asarray(at(noise))
        gaps.append(float(exact - values.mean()))
        error = float(values.std() / repeats**0.5)
        assert gaps[-1] > -4 * error  # a bound from below
    assert gaps == sorted(gaps, reverse=True)
    # By the delta method the bias is variance / 2K: 7e-6 at K = 20,000, far below four standard
    # errors of a mean of 20 values, each with variance / K.
    assert abs(gaps[-1]) < 4 * (variance / 20_000 / 20) ** 0.5
    assert gaps[0] > 0.1


def test_samples_of_rows_are_resampled_by_their_weights(x64):
    p, eta, mean, sd = inexact_row(30)
    z_G, keys = jnp.array([0.7]), jax.random.split(KEY, 4_000)

    def draw(p, eta):
        def one(key):
            given = AtDraw({}, eta, z_G, Coordinates(z_G, z_G), p.silos[0])
            return p.bound.sample(key, given)["row"][0, 0]

        return (np.asarray(jax.jit(jax.vmap(one))(keys)) - mean) / sd

    b = draw(p, eta)
    # Raw draws are 0.6 off with a variance of 2.56. With 30 of them the bias of resampling is below
    # 0.04; the standard error of the mean is 0.016, that of the variance 0.022: four of each.
    assert abs(b.mean()) < 0.04 + 4 * 0.016
    assert abs(b.var() - 1) < 0.04 + 4 * 0.022
    b = draw(*inexact_row(1)[:2])
    # Standard errors 0.025 and 0.057, four of each.
    assert abs(b.mean() + 0.6) < 4 * 0.025
    assert abs(b.var() - 2.56) < 4 * 0.057


def test_samples_of_an_outer_plate_are_resampled_by_the_weight_of_the_silo(x64):
    def model(ward, size, y):
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        with nf.silo_plate("ward", size.shape[0]):
            u = numpyro.sample("u", dist.Normal(mu, TAU))
        with nf.silo_plate("row", ward.shape[0]):
            b = numpyro.sample("b", dist.Normal(0, SIGMA))
            numpyro.sample("y", dist.Normal(u[ward] + b, 1.0), obs=y)

    y = np.array([1.5, 0.5])
    silo = {"ward": np.zeros(2, int), "size": np.zeros(1), "y": y}
    spec = nf.guides.MeanField()
    draws = nf.LocallyEnhanced(draws={"ward": 30, "row": 4})
    p = parts(model, [silo], guide=spec, objective=draws)
    # Given mu = 0.7 and u, rows are independent with variance SIGMA^2 + 1.
    noise = SIGMA**2 + 1
    precision = TAU**-2 + 2 / noise
    mean, sd = (0.7 / TAU**2 + y.sum() / noise) / precision, precision**-0.5
    eta = {
        "ward": {
            "loc": np.array([[mean + 0.6 * sd]]),
            "log_scale": np.log([[1.6 * sd]]),
        },
        "row": {"loc": np.zeros((2, 1)), "log_scale": np.full((2, 1), np.log(SIGMA))},
    }
    z_G, n = jnp.array([0.7]), 4_000
    given = AtDraw({}, eta, z_G, Coordinates(z_G, z_G), p.silos[0])
    draw = jax.jit(jax.vmap(lambda k: p.bound.sample(k, given)))
    z = jax.tree.map(np.asarray, draw(jax.random.split(KEY, n)))
    u = (z["ward"][:, 0, 0] - mean) / sd
    # As for rows: raw draws have a mean of 0.6 and a variance of 2.56.
    assert abs(u.mean()) < 0.06 + 4 * 0.016
    assert abs(u.var() - 1) < 0.06 + 4 * 0.022
    # The sum of a row's parts, u + b, has the posterior mean E[u] + gain * (y - E[u]).
    gain = SIGMA**2 / noise
    b = z["row"][:, 0, 0].mean()
    # Its bias under 4 draws from the prior is within a tenth of its shift; standard error 0.008.
    expected = gain * (y[0] - mean)
    assert abs(b - expected) < 0.1 * abs(expected) + 4 * 0.008


# --- partitions of the same rows -----------------------------------------------------------------

ROWS = 537
PARTITIONS = {1: [ROWS], 2: [300, 237], 10: [54] * 7 + [53] * 3, ROWS: [1] * ROWS}
SETTINGS = [
    pytest.param(objective, guide, id=f"{type(objective).__name__}-{name}")
    for objective in (nf.ELBO(), nf.LocallyEnhanced(draws=5))
    for name, guide in [("mean_field", nf.guides.MeanField()), ("default", None)]
]


class Pooled:
    """Noise and first states of all rows at once, and one round on any partition of them."""

    def __init__(self, objective, guide, optim):
        self.settings = {"objective": objective, "guide": guide, "optim": optim}
        p = parts(glmm, glmm_silos([ROWS]), **self.settings)
        server = p.algorithm.init_server(KEY)
        params = server.params._replace(guide=jitter(server.params.guide, 0.1))
        opt_state, course = optim.init(params), convergence.init(params)
        self.server = server._replace(params=params, opt_state=opt_state, course=course)
        silo = p.algorithm.init_silo(KEY, p.silos[0])
        self.locals = silo.params._replace(guide=jitter(silo.params.guide, 0.1, 1))
        self.noise_of = jax.jit(lambda k: p.algorithm.round.exchanges[0].silo_noise(k, silo).rows)

    def noise(self, key):
        """The server's and the rows' noise of one round."""
        return jax.random.normal(key, (1, 3)), self.noise_of(jax.random.fold_in(key, 1))

    def at(self, sizes):
        """The parts of a fit on this partition, its padded buckets, and its first silo states."""
        p = parts(glmm, glmm_silos(sizes), **self.settings)
        buckets = bucket(p.silos, p.sizes)
        init = [jax.vmap(p.algorithm.init_silo, (None, 0))(KEY, b.data) for b in buckets]
        locals_ = cut(self.locals, sizes)
        states = []
        for b, state in zip(buckets, init, strict=True):
            params = padded([locals_[j] for j in b.silos])
            states.append(state._replace(params=params))
        return p, buckets, states


def padded(trees):
    """Stack silos' rows, padded by copies of their first rows."""

    def stack(*leaves):
        most = max(map(len, leaves))
        full = [np.concatenate([a, np.repeat(a[:1], most - len(a), 0)]) for a in leaves]
        return jnp.asarray(np.stack(full))

    return jax.tree.map(stack, *jax.tree.map(np.asarray, trees))


def gradients(pooled, sizes):
    """The gradient for every global parameter, and that of every row's own parameters."""
    p, buckets, states = pooled.at(sizes)
    (exchange,), sfvi = p.algorithm.round.exchanges, p.algorithm.round.run.__self__
    eps, rows = pooled.noise(KEY)
    pieces = cut(rows, sizes)

    @jax.jit
    def run(server, states, noise, data):
        (down, value), pull = jax.vjp(
            lambda params: sfvi.draw(params, server.frame, eps), server.params
        )
        ask = jax.vmap(exchange.silo, (0, None, 0, 0))
        replies = [ask(e, down, s, d) for e, s, d in zip(noise, states, data, strict=True)]
        ups = [jax.tree.map(lambda a: a.sum(0), reply.up.gradient) for reply, _ in replies]
        (total,) = pull((jax.tree.map(lambda *a: sum(a), *ups), jnp.ones_like(value)))
        # Under sgd(1.0) a silo's step is its gradient.
        steps = [
            jax.tree.map(jnp.subtract, after.params.guide, before.params.guide)
            for before, (_, after) in zip(states, replies, strict=True)
        ]
        each = None
        if len(sizes) == ROWS:
            zero = jnp.zeros_like(value)
            each = jax.vmap(lambda g: pull((g, zero))[0])(replies[0][0].up.gradient)
            (own,) = pull((jax.tree.map(jnp.zeros_like, down), jnp.ones_like(value)))
            each = jax.tree.map(lambda a, b: jnp.abs(a).sum(0) + jnp.abs(b), each, own)
        return total, steps, each

    noise = [MinibatchNoise(padded([pieces[j] for j in b.silos])) for b in buckets]
    total, steps, each = run(pooled.server, states, noise, [b.data for b in buckets])
    rows = [None] * len(sizes)
    for b, step in zip(buckets, steps, strict=True):
        for i, j in enumerate(b.silos):
            rows[j] = jax.tree.map(lambda a, i=i, j=j: np.asarray(a)[i, : sizes[j]], step)
            for leaf in jax.tree.leaves(step):  # what is left of a padded row is exactly zero
                np.testing.assert_array_equal(np.asarray(leaf)[i, sizes[j] :], 0.0)
    return total, jax.tree.map(lambda *a: np.concatenate(a), *rows), each


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "guide"), SETTINGS)
def test_gradients_do_not_depend_on_the_partition(objective, guide):
    check_gradients(objective, guide, (1, 2, 10), x64=True, tolerance=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "guide"), SETTINGS[::3])
def test_gradients_do_not_depend_on_the_partition_in_float32(objective, guide):
    check_gradients(objective, guide, (1, 10), x64=False, tolerance=1e-5)


def check_gradients(objective, guide, partitions, x64, tolerance):
    with jax.enable_x64(x64):
        pooled = Pooled(objective, guide, optax.sgd(1.0))
        expected, rows, scale = gradients(pooled, PARTITIONS[ROWS])
        for n in partitions:
            got, mine, _ = gradients(pooled, PARTITIONS[n])
            for g, e, s in zip(*map(jax.tree.leaves, (got, expected, scale)), strict=True):
                assert (np.abs(g - e) <= tolerance * s).all(), n
            close = partial(np.testing.assert_allclose, rtol=tolerance, atol=10 * tolerance)
            jax.tree.map(close, mine, rows)


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "guide"), SETTINGS[3:])
def test_iterates_do_not_depend_on_the_partition(x64, objective, guide):
    pooled = Pooled(objective, guide, optax.adam(0.05))
    ends = {}
    for n in (1, 10, ROWS):
        sizes = PARTITIONS[n]
        p, buckets, states = pooled.at(sizes)
        round, server = p.algorithm.round, pooled.server
        data = [b.data for b in buckets]
        who = jnp.arange(len(sizes))

        @jax.jit
        def one_round(server, states, eps, noise, data, round=round, who=who):
            down = replayed_part(round, server, eps, who)
            ask = jax.vmap(round.exchanges[0].visit, (0, None, 0, 0))
            replies = [ask(e, down, s, d) for e, s, d in zip(noise, states, data, strict=True)]
            together = combine(Combine.SUM, [reply for reply, _ in replies])
            server, info = replayed_part(round, server, eps, who, None, [together])
            return server, [s for _, s in replies], info

        losses = []
        for r in range(5):
            eps, rows = pooled.noise(jax.random.fold_in(KEY, r))
            pieces = cut(rows, sizes)
            noise = [MinibatchNoise(padded([pieces[j] for j in b.silos])) for b in buckets]
            server, states, info = one_round(server, states, eps, noise, data)
            assert info.ok
            losses.append(float(info.loss))
        ends[n] = (losses, server.params)
    for n in (1, 10):
        # The first steps of Adam are signs of gradients, which rounding moves by 1e-10 at most.
        close = partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9)
        jax.tree.map(close, ends[n], ends[ROWS])
        assert abs(ends[n][1].guide["loc"] - pooled.server.params.guide["loc"]).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "guide"), SETTINGS[::3])
def test_a_bucket_of_ragged_silos_sums_as_its_silos_do_one_by_one(x64, objective, guide):
    p = parts(glmm, glmm_silos([5, 3, 5]), objective=objective, guide=guide)
    (b,) = bucket(p.silos, p.sizes)
    (exchange,), server = p.algorithm.round.exchanges, p.algorithm.init_server(KEY)
    down = replayed_part(p.algorithm.round, server, jax.random.normal(KEY, (1, 3)), jnp.arange(3))
    states = jax.vmap(p.algorithm.init_silo, (None, 0))(KEY, b.data)
    states = states._replace(params=jitter(states.params))
    noise = jax.vmap(exchange.silo_noise, (None, 0))(KEY, states)
    reply, after = jax.jit(jax.vmap(exchange.silo, (0, None, 0, 0)))(noise, down, states, b.data)
    close = partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-11)
    for j, size in enumerate(s["child"] for s in p.sizes):
        own = p.algorithm.init_silo(KEY, p.silos[j])
        params = jax.tree.map(lambda a, j=j, n=size: a[j, :n], states.params)
        eps = jax.tree.map(lambda a, j=j, n=size: a[j, :n], noise)
        one, mine = jax.jit(exchange.silo)(eps, down, own._replace(params=params), p.silos[j])
        real, rest, before = (
            jax.tree.map(lambda a, j=j, rows=rows: a[j, rows], params)
            for params, rows in [
                (after.params, slice(size)),
                (after.params, slice(size, None)),
                (states.params, slice(size, None)),
            ]
        )
        jax.tree.map(
            close, (jax.tree.map(lambda a, j=j: a[j], reply.up), real), (one.up, mine.params)
        )
        jax.tree.map(np.testing.assert_array_equal, rest, before)


def test_padded_rows_shift_nobodys_noise():
    """More rows, at the first plate or at the second, leave the numbers of all others alone."""

    def drawn(first, second):
        return normals(KEY, 3, {"a": (first, 2, 1), "b": (second, 2, 2)})

    ahead, rows = drawn(4, 5)
    for padded in (drawn(7, 5), drawn(4, 9)):
        np.testing.assert_array_equal(padded[0], ahead)
        for plate, noise in rows.items():
            np.testing.assert_array_equal(padded[1][plate][: len(noise)], noise)
    numbers = np.concatenate([ahead, *(noise.ravel() for noise in rows.values())])
    assert len(np.unique(numbers)) == len(numbers)
