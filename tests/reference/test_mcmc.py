"""NUTS on the joint density of all silos: the exact density, exact posteriors, names and shapes."""

from functools import cache

import jax
import jax.numpy as jnp
import models
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from laid_open import joint_density, laid_open, parameters
from numpyro.contrib.control_flow import scan
from numpyro.diagnostics import effective_sample_size
from numpyro.infer.util import potential_energy
from problems import cut, jitter

import numpyro_fed as nf
from numpyro_fed.basics.errors import ModelError
from numpyro_fed.data import padding
from numpyro_fed.data.silo_data import read
from numpyro_fed.reference.nuts import good_starts, some_from_prior, uniform
from numpyro_fed.reference.nuts_result import NutsResult
from numpyro_fed.text.handlers import joint, local_name
from numpyro_fed.text.layout import layout_and_buckets

KEY = jax.random.key(0)
positive = dist.constraints.positive


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


# --- the density -----------------------------------------------------------------------------


def wards(ward, level, x, y):
    """Patients in wards: shared, private and ragged private parameters, supports of many kinds."""
    slope = numpyro.param("slope", 0.3)
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    mix = numpyro.sample("mix", dist.Dirichlet(jnp.ones(3)))
    numpyro.factor("pull", -(slope**2) * tau)
    with nf.silo_plate("ward", level.shape[0]):
        offset = numpyro.param("offset", 0.1)
        u = numpyro.sample("u", dist.Normal(offset + level, tau))
    with nf.silo_plate("patient", y.shape[0]):
        spread = numpyro.param("spread", jnp.ones(y.shape[0]), constraint=positive)
        b = numpyro.sample("b", dist.LogNormal(u[ward], tau))
        c = numpyro.sample("c", dist.Dirichlet(mix))
        numpyro.sample("y", dist.Normal(b + slope * x + c @ jnp.arange(3.0), spread), obs=y)


def ward_silos(patients, levels):
    r = np.random.default_rng(0)
    return [
        {
            "ward": r.integers(0, w, n),
            "level": r.normal(size=w),
            "x": r.normal(size=n),
            "y": r.normal(size=n),
        }
        for n, w in zip(patients, levels, strict=True)
    ]


no_locals = models.level(2, 0.5)


no_globals = models.rows_alone(2)


hierarchy = models.levels(2, 1, 0.5)


def scanned(y):
    """Positive globals drawn in a scan, and a series of latents for each row."""

    def walk(before, _):
        z = numpyro.sample("z", dist.LogNormal(before, 1))
        return jnp.tanh(z), None

    def step(before, _):
        with nf.silo_plate("row", y.shape[0]):
            x = numpyro.sample("x", dist.Normal(before, 1))
        return x, x

    tau, _ = scan(walk, 0.0, None, length=3)
    _, x = scan(step, jnp.zeros(y.shape[0]), None, length=1)
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(x.sum(0), 1 + tau), obs=y)


Y = np.array([0.3, -1.2, 0.8, 2.0, -0.4, 1.1, 3.0, 0.2, 1.6])
SIZES = (3, 1, 5)

DENSITIES = {
    "several buckets": (wards, ward_silos((3, 5, 4, 40), (2, 3, 1, 5)), 2),
    "no locals": (no_locals, cut({"y": Y}, SIZES), 1),
    "no globals": (no_globals, cut({"y": Y}, SIZES), 1),
    "scans": (scanned, cut({"y": Y}, SIZES), 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", DENSITIES)
def test_the_density_and_its_gradient_are_those_of_the_joint_model(x64, case, monkeypatch):
    monkeypatch.setattr(padding, "FEW_ROWS", 0)  # else silos of so few rows have one shape
    model, silos, num_buckets = DENSITIES[case]
    data = read(silos)
    layout, buckets = layout_and_buckets(model, data)
    fm, sizes = layout.model, layout.sizes
    assert len(buckets) == num_buckets
    assert any(b.data.masks for b in buckets)
    shared = jitter(fm.init_theta(KEY))
    private = jitter(parameters(fm, data, None)[1])
    first = {p.name: np.cumsum([0, *(n[p.name] for n in sizes)]) for p in fm.plates}

    def rows_of(position, j):
        """Silo ``j``'s rows: the silos stand one after the other, in the user's order."""
        return {p: z[first[p][j] : first[p][j + 1]] for p, z in position["z_L"].items()}

    def expected(position):
        z_G = position["z_G"]
        values = fm.constrain_theta(shared)
        values |= {s.name: z_G[s.start : s.stop].reshape(s.shape) for s in fm.named("latent")}
        for j in range(len(silos)):
            own = fm.constrain_theta(private[j])
            for plate, rows in rows_of(position, j).items():
                for s in fm.named("latent", plate):
                    value = rows[:, s.start : s.stop].reshape(-1, *s.shape)
                    own[s.name] = jnp.moveaxis(value, 0, s.axis)
            values |= {local_name(j, name): value for name, value in own.items()}
        seeded = numpyro.handlers.seed(joint(model, [d.kwargs for d in data]), 0)
        return -potential_energy(seeded, (), {}, values)

    @jax.jit
    def absolute(position):
        """The prior and all rows, each as it is without its sign."""
        total = abs(fm.log_prior(shared, position["z_G"]))
        for j, silo in enumerate(data):
            theta, own = {**shared, **private[j]}, rows_of(position, j)
            rows = fm.log_silo(theta, position["z_G"], own, silo)
            total += sum(abs(r).sum() for r in rows.values())
        return total

    found = jax.jit(jax.value_and_grad(joint_density(fm, sizes, buckets, shared, private)))
    expected = jax.jit(jax.value_and_grad(expected))
    r = np.random.default_rng(1)
    for _ in range(3):
        position = {
            "z_G": jnp.asarray(r.normal(size=fm.dim)),
            "z_L": {
                p.name: jnp.asarray(r.normal(size=(first[p.name][-1], p.dim))) for p in fm.plates
            },
        }
        scale = float(absolute(position))
        (value, slope), (other_value, other_slope) = found(position), expected(position)
        assert abs(value - other_value) <= 1e-10 * scale
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-8), slope, other_slope
        )


# --- exact posteriors ------------------------------------------------------------------------


def within_its_error(draws, mean, sd):
    """Mean and sd of (chains, n) draws of a normal distribution, within 4.5 standard errors.

    The variance is a mean of squares, which have an ESS of their own; theirs is ``2 sd^4``, where
    that of the draws' squares is too small just where the draws spread too little.
    """
    squares = (draws - mean) ** 2
    error = sd / np.sqrt(effective_sample_size(draws))
    assert abs(draws.mean() - mean) < 4.5 * error
    error = sd / np.sqrt(2 * effective_sample_size(squares))
    assert abs(np.sqrt(squares.mean()) - sd) < 4.5 * error
    assert error < 0.06 * sd  # or the test could not fail


@pytest.mark.slow
def test_nuts_reaches_the_exact_posterior_of_globals_and_of_every_row():
    silos = cut({"y": Y}, SIZES)
    settings = {"num_warmup": 300, "num_samples": 700, "num_chains": 2}
    nuts = nf.run_nuts(KEY, hierarchy, silos, progress_bar=False, **settings)
    assert {k: v.shape for k, v in nuts.globals.items()} == {"mu": (2, 700)}
    rows = [f"silo_{j}/b" for j in range(len(SIZES))]
    assert {k: v.shape for k, v in nuts.samples.items()} == {"mu": (1_400,)} | {
        name: (1_400, n) for name, n in zip(rows, SIZES, strict=True)
    }
    np.testing.assert_array_equal(nuts.samples["mu"], nuts.globals["mu"].ravel())
    # Chains of their own: a number may occur in both by chance, in single precision.
    assert np.isin(nuts.globals["mu"][0], nuts.globals["mu"][1]).mean() < 0.01
    assert nuts.divergences == 0
    ess = effective_sample_size(nuts.globals["mu"])
    np.testing.assert_allclose(nuts.ess()["mu"], ess, rtol=1e-6)

    # (mu, b) jointly: precisions 1/4 of mu, 1 of b - mu, 4 of y - b
    n = len(Y)
    precision = np.diag([1 / 4 + n, *[1 + 4] * n]).astype(float)
    precision[0, 1:] = precision[1:, 0] = -1
    covariance = np.linalg.inv(precision)
    mean, sd = covariance @ np.r_[0, 4 * Y], np.sqrt(np.diag(covariance))
    within_its_error(nuts.globals["mu"], mean[0], sd[0])
    b = np.concatenate([nuts.samples[name] for name in rows], axis=1)
    for i in range(n):
        within_its_error(b[:, i].reshape(2, 700), mean[1 + i], sd[1 + i])
    # mu and b of one draw belong together
    together = np.mean((nuts.samples["mu"] - mean[0]) * (b.mean(1) - mean[1:].mean()))
    # The sd of such a product is at most sqrt(2) times those of its factors; ESS above 300.
    error = np.sqrt(2 * covariance[0, 0] * covariance[1:, 1:].mean() / 300)
    assert abs(together - covariance[0, 1:].mean()) < 4.5 * error
    assert 5 * error < covariance[0, 1:].mean()


@pytest.mark.slow
def test_a_model_without_global_latents_is_sampled():
    settings = {"num_warmup": 300, "num_samples": 1_000, "progress_bar": False}
    nuts = nf.run_nuts(KEY, no_globals, cut({"y": Y}, SIZES), **settings)
    assert nuts.globals == {}
    assert nuts.ess() == {}
    assert {name: v.shape for name, v in nuts.samples.items()} == {
        f"silo_{j}/b": (1_000, n) for j, n in enumerate(SIZES)
    }
    rows = np.concatenate(list(nuts.samples.values()), axis=1)
    for i, y in enumerate(Y):
        within_its_error(rows[None, :, i], 4 * y / 4.25, 4.25**-0.5)


# --- supports and parameters -----------------------------------------------------------------


def centred(x, y):
    """Latents within a hair of shared and private parameters, whatever the data."""
    theta = numpyro.param("theta", 1.0, constraint=positive)
    mu = numpyro.sample("mu", dist.LogNormal(jnp.log(theta), 0.01))
    mix = numpyro.sample("mix", dist.Dirichlet(jnp.ones(3)))
    numpyro.deterministic("twice", 2 * mix)
    with nf.silo_plate("row", x.shape[0], dim=-2):
        at = numpyro.param("at", jnp.zeros((y.shape[0], 1)))
        level = numpyro.param("level", 5.0)
        b = numpyro.sample("b", dist.Normal(at + level, 0.01))
        numpyro.deterministic("shifted", b + x)
        with numpyro.plate("visit", 2):
            share = numpyro.sample("share", dist.Beta(2, 2))
            numpyro.sample("y", dist.Normal(mu + b + share + mix[0], 100), obs=y)


def centred_silos():
    r = np.random.default_rng(0)
    return cut({"x": r.normal(size=(9, 1)), "y": r.normal(size=(9, 2))}, SIZES)


@cache
def centred_fit():
    """A result whose parameters are no initial values, theta and each row's own among them."""
    opened = laid_open(nf.SFVI(centred, optim=optax.sgd(0.1), start=None), centred_silos())
    start = opened.result().state
    server, silos = jitter((start.server.params, [s.params for s in start.silos]), scale=2.0)
    moved = start._replace(
        server=start.server._replace(params=server),
        silos=tuple(s._replace(params=p) for s, p in zip(start.silos, silos, strict=True)),
    )
    return opened.result(moved)


@pytest.mark.slow
def test_samples_are_on_their_supports_with_parameters_held_at_the_fit():
    result, silos = centred_fit(), centred_silos()
    nuts = nf.run_nuts(
        KEY,
        centred,
        silos,
        num_warmup=200,
        num_samples=20,
        params=result,
        progress_bar=False,
    )
    s = nuts.samples
    assert {k: v.shape for k, v in nuts.globals.items()} == {
        "mu": (1, 20),
        "mix": (1, 20, 3),
        "twice": (1, 20, 3),
    }
    np.testing.assert_allclose(s["mix"].sum(-1), 1, rtol=1e-5)
    np.testing.assert_allclose(s["twice"], 2 * s["mix"], rtol=1e-6)
    # Draws lie within 6 of their sds, 0.06, of where the parameters put them.
    theta = np.full(20, result.params["theta"])
    np.testing.assert_allclose(np.log(s["mu"]), np.log(theta), atol=0.06)
    for j, (n, silo) in enumerate(zip(SIZES, silos, strict=True)):
        b, shifted, share = (s[f"silo_{j}/{name}"] for name in ("b", "shifted", "share"))
        assert share.shape == (20, n, 2)
        assert ((share > 0) & (share < 1)).all()
        own = result.silo_params(j)
        centre = np.broadcast_to(own["at"] + own["level"], (20, n, 1))
        np.testing.assert_allclose(b, centre, atol=0.06)
        np.testing.assert_allclose(shifted, b + silo["x"], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_without_a_fit_parameters_are_at_their_initial_values():
    data = read(centred_silos())
    layout, buckets = layout_and_buckets(centred, data)
    shared, private = parameters(layout.model, data, None)
    np.testing.assert_allclose(layout.model.constrain_theta(shared)["theta"], 1.0, rtol=1e-6)
    for own, n in zip(private, SIZES, strict=True):
        assert own["level"] == 5.0
        np.testing.assert_array_equal(own["at"], np.zeros((n, 1)))
    density = jax.jit(joint_density(layout.model, layout.sizes, buckets, shared, private))
    at = {"z_G": jnp.zeros(layout.model.dim), "z_L": {"row": jnp.full((9, 3), 5.0)}}
    off = {**at, "z_L": {"row": at["z_L"]["row"].at[:, 0].set(5.1)}}
    # b at 5.1 instead of 5 is 10 of its sds away at each of 9 rows.
    assert abs(float(density(at) - density(off)) - 9 * 10**2 / 2) < 1


# --- what goes wrong -------------------------------------------------------------------------


needle = models.level(1e-4, 100)


@pytest.mark.slow
def test_divergences_of_all_chains_are_counted():
    """Without warm-up the step is thousands of times too long: every transition diverges.

    The model has no local latents.
    """
    nuts = nf.run_nuts(
        KEY,
        needle,
        cut({"y": Y}, SIZES),
        num_warmup=0,
        num_samples=7,
        num_chains=2,
        progress_bar=False,
    )
    assert nuts.divergences == 14
    assert set(nuts.samples) == {"mu"}


def test_a_density_that_is_not_finite_is_refused_before_sampling():
    def impossible(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.factor("f", jnp.where(mu > 1e6, y, -jnp.inf))

    with pytest.raises(ValueError, match="not finite"):
        nf.run_nuts(KEY, impossible, cut({"y": Y}, SIZES), num_chains=2)


FREQUENCY = jnp.arange(1, 13) * np.pi / 3  # of sines that vanish at -1.5 and 1.5


def smooth(x, y):
    """A Gaussian process by its spectral density, which underflows at long length scales: there
    the density is finite, and the derivatives of the root are not.
    """
    amplitude = numpyro.sample("amplitude", dist.InverseGamma(4.0, 1.0))
    length = numpyro.sample("length", dist.InverseGamma(2.0, 10.0))
    weight = numpyro.sample("weight", dist.Normal(0, 1).expand([12]).to_event(1))
    spectrum = amplitude**2 * length * jnp.exp(-0.5 * (length * FREQUENCY) ** 2)
    with nf.silo_plate("row", x.shape[0]):
        basis = jnp.sin(FREQUENCY * (x[:, None] + 1.5))
        numpyro.sample("y", dist.Normal(basis @ (jnp.sqrt(spectrum) * weight), 0.5), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("num_chains", [1, 4])
def test_chains_start_where_the_gradient_is_finite(num_chains):
    """Of the first draws in (-2, 2) some have a density, and no gradient."""
    x = np.linspace(-1, 1, 12)
    layout, buckets = layout_and_buckets(smooth, read(cut({"x": x, "y": np.sin(4 * x)}, (5, 7))))
    density = joint_density(layout.model, layout.sizes, buckets, {}, [{}, {}])
    look = jax.jit(jax.vmap(jax.value_and_grad(density)))
    shapes = {"z_G": (num_chains, layout.model.dim), "z_L": {"row": (num_chains, 12, 0)}}
    first, found = [], []
    for i in range(20):
        key = jax.random.key(i)
        first.append(look(uniform(key, shapes)))
        start = good_starts(key, lambda k: uniform(k, shapes), layout.model, density)
        found.append(look(some_from_prior(key, layout.model, density, start)))
    assert all(bool(jnp.isfinite(value).all()) for value, _ in first)
    assert not all(bool(jnp.isfinite(slope["z_G"]).all()) for _, slope in first)
    assert all(bool(jnp.isfinite(slope["z_G"]).all()) for _, slope in found)


@pytest.mark.slow
def test_nuts_moves_from_the_start_that_it_has_chosen():
    x = np.linspace(-1, 1, 12)
    silos, few = cut({"x": x, "y": np.sin(4 * x)}, (5, 7)), dict(num_warmup=20, num_samples=20)
    for i in range(3):
        nuts = nf.run_nuts(jax.random.key(i), smooth, silos, **few, progress_bar=False)
        assert nuts.globals["length"].std() > 1e-3
        assert not nuts.accurate


def test_a_gradient_that_is_nowhere_finite_is_refused_with_its_sites():
    def rooted(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        scale = numpyro.sample("scale", dist.LogNormal(0, 1).expand([2]).to_event(1))
        with nf.silo_plate("row", y.shape[0]):
            b = numpyro.sample("b", dist.Normal(0, 1))
            wall = jnp.sqrt(0 * scale[1]) + jnp.sqrt(0 * b)
            numpyro.sample("y", dist.Normal(mu + wall, 1), obs=y)

    with pytest.raises(ModelError, match=r"gradient .*'scale', 'b'.* 99"):
        nf.run_nuts(KEY, rooted, cut({"y": Y}, SIZES), progress_bar=False)


# --- can it be trusted? ----------------------------------------------------------------------


def nuts_result(draws, divergences=0):
    return NutsResult({"mu": np.asarray(draws)}, divergences, dict)


def test_the_error_of_independent_draws_is_known():
    """Of n normal draws sqrt(1 / n) sd for the mean, and less for the sd."""
    draws = np.random.default_rng(0).normal(7, 3, size=(4, 500))
    good = nuts_result(draws)
    np.testing.assert_allclose(good.monte_carlo_error, 2_000**-0.5, rtol=0.15)
    assert good.trusted
    assert "They can be trusted" in good.report()
    assert not nuts_result(draws[:1, :200]).trusted
    assert not nuts_result(draws, divergences=11).trusted


def test_chains_that_do_not_agree_are_not_trusted():
    draws = np.random.default_rng(0).normal(size=(2, 500)) + np.array([[0.0], [20.0]])
    assert nuts_result(draws).monte_carlo_error == np.inf
    assert "chains" in nuts_result(draws).report()


def test_an_element_that_does_not_vary_has_no_error():
    draws = np.random.default_rng(0).normal(size=(2, 1_000, 2)) * np.array([1.0, 0.0]) + 1.0
    assert nuts_result(draws).monte_carlo_error < 0.05


def test_draws_that_stand_still_know_nothing():
    """All the same, or all but rounding; all from transitions that diverged; some of them NaN."""
    r = np.random.default_rng(0)
    draws, still = r.normal(size=(2, 500)), np.full((2, 500), 3.0)
    broken = np.where(np.arange(500) == 7, np.nan, draws)
    rounded = still.astype(np.float32) * (1 + 1e-7 * draws)
    for result in map(nuts_result, (still, rounded, broken)):
        assert result.monte_carlo_error == np.inf
        assert not result.accurate
        assert "known to" not in result.report()
    diverged = nuts_result(draws, divergences=1_000)
    assert diverged.monte_carlo_error == np.inf
    assert "1000 divergent transitions; that is every transition" in diverged.report()


@pytest.mark.slow
def test_chains_start_far_apart_and_find_both_modes_of_a_prior():
    """Starts in (-2, 2) alone would all end in the mode at zero, and agree."""

    def model(y):
        both = dist.Normal(jnp.array([0.0, 30.0]), 1.0)
        mu = numpyro.sample("mu", dist.MixtureSameFamily(dist.Categorical(jnp.ones(2) / 2), both))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu, 1e3), obs=y)

    data = [{"y": np.zeros(2)}]
    with pytest.warns(UserWarning, match="chains"):
        nuts = nf.run_nuts(
            KEY, model, data, num_warmup=50, num_samples=500, num_chains=8, progress_bar=False
        )
    assert not nuts.trusted


def test_a_scale_is_known_only_if_its_log_is():
    log_tau = np.random.default_rng(0).normal(0, 0.5, (2, 4_000))
    assert NutsResult({"tau": np.exp(log_tau)}, 0, dict).trusted
    log_tau[:, 1_000:1_020] = -6  # the neck, where each chain has been once
    assert not NutsResult({"tau": np.exp(log_tau)}, 0, dict).accurate
