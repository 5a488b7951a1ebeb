"""Draws, parameters and guides of a fit have the shapes, supports and rows of the plain model."""

import sys
from dataclasses import replace
from functools import cache

import arviz
import jax
import jax.numpy as jnp
import models
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from cases import slow_but
from laid_open import inside, laid_open
from numpyro.infer import MCMC, NUTS, Predictive

import numpyro_fed as nf

KEY = jax.random.key(0)
quiet = {"progress_bar": False}
SIZES = (4, 2, 3)
VISITS = 2


def model(x, y=None):
    """Row ``i`` of silo ``j`` has a latent near ``20 j + 4 i``, so that a wrong row is seen."""
    tau = numpyro.param("tau", 0.7, constraint=dist.constraints.positive)
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(3)))
    numpyro.deterministic("mu_squared", mu**2)
    numpyro.deterministic("tau_and_weights", tau * weights)
    with nf.silo_plate("row", x.shape[0], dim=-2):
        spread = numpyro.param("spread", jnp.ones(x.shape[0]), constraint=dist.constraints.positive)
        b = numpyro.sample("b", dist.Normal(mu, 20 + scale))
        share = numpyro.sample("share", dist.Beta(2, 2))
        numpyro.deterministic("total", b + x)
        with numpyro.plate("visit", VISITS):
            numpyro.sample("y", dist.Normal(b + share * spread[:, None], 0.5), obs=y)


def near(silo, n):
    return 20.0 * silo + 4 * np.arange(n)


def make_silos():
    r = np.random.default_rng(0)
    found = []
    for j, n in enumerate(SIZES):
        centre = near(j, n)[:, None]
        found.append({"x": r.normal(size=(n, 1)), "y": centre + 0.1 * r.normal(size=(n, VISITS))})
    return found


SILOS = make_silos()


@pytest.fixture(scope="module")
def result():
    optim = optax.adam(optax.exponential_decay(0.3, 600, 0.03))
    return nf.SFVI(model, optim=optim, start=None).run(KEY, 600, SILOS, **quiet)


def numbers(draws):
    """Arrays of NumPy, whose arithmetic needs no program."""
    return {name: np.asarray(value) for name, value in draws.items()}


@cache
def unfitted(**settings):
    """A result before its first round."""
    return laid_open(nf.SFVI(model, optim=optax.sgd(0.1), **settings, start=None), SILOS).result()


@pytest.mark.slow
def test_silos_of_these_sizes_are_padded(result):
    (bucket,) = inside(result).buckets
    assert bucket.silos == (0, 1, 2)
    assert list(bucket.data.masks) == ["row"]
    assert result.num_silos == 3


# --- draws -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_globals_have_their_shapes_and_supports(result):
    draws = result.sample_posterior(KEY, 50)
    assert {name: v.shape for name, v in draws.items()} == {
        "mu": (50,),
        "scale": (50,),
        "weights": (50, 3),
        "mu_squared": (50,),
        "tau_and_weights": (50, 3),
    }
    assert (draws["scale"] > 0).all()
    np.testing.assert_allclose(draws["weights"].sum(-1), 1, rtol=1e-5)
    assert len(np.unique(draws["mu"])) == 50


@pytest.mark.slow
@pytest.mark.parametrize("silo", slow_but([0, 1, 2], 1))
def test_a_silos_locals_have_their_shapes_and_supports(result, silo):
    draws = numbers(result.sample_posterior(KEY, 50, silo=silo))
    n = SIZES[silo]
    assert {name: draws[name].shape for name in ("b", "share", "total")} == dict.fromkeys(
        ("b", "share", "total"), (50, n, 1)
    )
    assert ((draws["share"] > 0) & (draws["share"] < 1)).all()
    assert len(np.unique(draws["b"])) == 50 * n


@pytest.mark.parametrize("silo", [pytest.param(0, marks=pytest.mark.slow), 1, 2])
def test_every_row_of_every_silo_is_its_own(result, silo):
    draws = numbers(result.sample_posterior(KEY, 400, silo=silo))
    spread = np.asarray(result.silo_params(silo)["spread"])[:, None]
    found = (draws["b"] + draws["share"] * spread).mean(0)
    np.testing.assert_allclose(found, near(silo, SIZES[silo])[:, None], atol=1.5)


def test_deterministic_sites_are_functions_of_the_same_draws(result):
    draws = numbers(result.sample_posterior(KEY, 20, silo=2))
    np.testing.assert_allclose(draws["mu_squared"], draws["mu"] ** 2, rtol=1e-6)
    tau = np.asarray(result.params["tau"])
    np.testing.assert_allclose(draws["tau_and_weights"], tau * draws["weights"], rtol=1e-6)
    np.testing.assert_allclose(draws["total"], draws["b"] + SILOS[2]["x"], rtol=1e-5, atol=1e-5)


def test_globals_are_the_same_with_and_without_a_silo(result):
    alone = result.sample_posterior(KEY, 20)
    for silo in range(3):
        both = result.sample_posterior(KEY, 20, silo=silo)
        for name, value in alone.items():
            np.testing.assert_array_equal(both[name], value)


def test_draws_are_a_function_of_the_key(result):
    a, b = (result.sample_posterior(KEY, 5, silo=1) for _ in range(2))
    c = result.sample_posterior(jax.random.key(1), 5, silo=1)
    np.testing.assert_array_equal(a["b"], b["b"])
    assert not np.isin(a["b"], c["b"]).any()


def test_locals_of_two_silos_do_not_share_their_noise(result):
    """Silo 1 in the place of silo 0 must not be the same draws once more."""

    def standard(silo):
        rows = np.asarray(result.sample_posterior(KEY, 400, silo=silo)["b"])[:, :2, 0]
        return (rows - rows.mean(0)) / rows.std(0)

    assert abs(np.mean(standard(0) * standard(1))) < 0.5


@pytest.mark.parametrize("silo", [3, -1, 100])
def test_a_silo_that_does_not_exist_is_named(result, silo):
    for ask in (
        lambda: result.sample_posterior(KEY, 2, silo=silo),
        lambda: result.silo_params(silo),
    ):
        with pytest.raises(IndexError, match=rf"no silo {silo}: .* 0 to 2"):
            ask()


@pytest.mark.slow
def test_locally_enhanced_draws_have_the_same_shapes():
    start = unfitted(objective=nf.LocallyEnhanced(draws=3))
    draws = start.sample_posterior(KEY, 6, silo=1)
    assert draws["b"].shape == (6, 2, 1)
    np.testing.assert_array_equal(draws["mu"], start.sample_posterior(KEY, 6)["mu"])


# --- parameters ------------------------------------------------------------------------------


def test_parameters_are_on_their_own_supports_by_name(result):
    assert set(result.params) == {"tau", "guide"}
    assert result.params["tau"].shape == ()
    start = unfitted()
    np.testing.assert_allclose(start.params["tau"], 0.7, rtol=1e-6)
    np.testing.assert_allclose(start.silo_params(1)["spread"], np.ones(2), rtol=1e-6)


@pytest.mark.parametrize("silo", [0, 1, 2])
def test_private_parameters_have_no_padded_rows(result, silo):
    found = result.silo_params(silo)
    assert set(found) == {"spread", "guide"}
    assert found["spread"].shape == (SIZES[silo],)
    assert (found["spread"] > 0).all()


def test_private_parameters_differ_between_silos(result):
    a, b = (result.silo_params(j)["spread"] for j in (1, 2))
    assert not np.isin(a, b).any()


# --- in NumPyro ------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_guide_gives_predictive_the_posterior_of_the_globals(result):
    params = {name: v for name, v in result.params.items() if name != "guide"}
    new = {"x": np.zeros((5, 1), np.float32)}
    sites = ["mu", "scale", "b", "y"]
    kwargs = {"guide": result.guide, "num_samples": 300, "return_sites": sites}
    draws = Predictive(model, params=result.params, **kwargs)(KEY, **new)
    again = Predictive(model, params=params, **kwargs)(KEY, **new)
    assert draws["b"].shape == (300, 5, 1)
    assert draws["y"].shape == (300, 5, VISITS)
    np.testing.assert_array_equal(draws["y"], again["y"])
    exact = result.sample_posterior(KEY, 3_000)
    for name in ("mu", "scale"):
        gap = np.abs(draws[name].mean() - exact[name].mean()) / exact[name].std()
        assert gap < 0.3
        assert 0.8 < draws[name].std() / exact[name].std() < 1.25


@pytest.mark.slow
def test_predictive_takes_theta_from_the_parameters(result):
    doubled = {**result.params, "tau": 2 * result.params["tau"]}
    sites = ["weights", "tau_and_weights"]
    at = Predictive(model, guide=result.guide, params=doubled, num_samples=4, return_sites=sites)
    run = at(KEY, **SILOS[0])
    expected = 2 * result.params["tau"] * run["weights"]
    np.testing.assert_allclose(run["tau_and_weights"], expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("silo", [0, 1])
def test_the_guide_at_a_silo_gives_predictive_its_locals_too(result, silo):
    params = {**result.params, **result.silo_params(silo)}
    at_silo = Predictive(model, guide=result.guide_at(silo), params=params, num_samples=200)
    draws = at_silo(KEY, x=SILOS[silo]["x"])
    n = SIZES[silo]
    assert draws["y"].shape == (200, n, VISITS)
    rows = draws["y"].mean((0, 2))
    np.testing.assert_allclose(rows, near(silo, n), atol=1.5)


@pytest.mark.slow
def test_a_guide_draws_anew_each_time(result):
    trace = numpyro.handlers.trace(numpyro.handlers.seed(result.guide_at(0), 0)).get_trace()
    other = numpyro.handlers.trace(numpyro.handlers.seed(result.guide_at(0), 1)).get_trace()
    assert set(trace) == {"mu", "scale", "weights", "b", "share"}
    assert trace["mu"]["value"] != other["mu"]["value"]
    only = numpyro.handlers.trace(numpyro.handlers.seed(result.guide, 0)).get_trace()
    assert set(only) == {"mu", "scale", "weights"}


@pytest.mark.slow
def test_the_same_text_runs_under_predictive_and_nuts():
    def small(x, y=None):
        mu = numpyro.sample("mu", dist.Normal(0, 10))
        with nf.silo_plate("row", x.shape[0], dim=-2):
            b = numpyro.sample("b", dist.Normal(mu, 1))
            with numpyro.plate("visit", VISITS):
                numpyro.sample("y", dist.Normal(b + x, 1), obs=y)

    prior = Predictive(small, num_samples=6)(KEY, x=SILOS[1]["x"])
    assert prior["y"].shape == (6, 2, VISITS)
    mcmc = MCMC(NUTS(small, max_tree_depth=3), num_warmup=3, num_samples=4, progress_bar=False)
    mcmc.run(KEY, **SILOS[1])
    assert mcmc.get_samples()["b"].shape == (4, 2, 1)


# --- ArviZ -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_arviz_gets_the_same_draws(result):
    """With ArviZ 1, whose data are nested groups, and with those before."""
    found = result.to_arviz(KEY, 30, silo=1)["posterior"]
    draws = result.sample_posterior(KEY, 30, silo=1)
    assert set(found.data_vars) == set(draws)
    for name, value in draws.items():
        assert found[name].shape == (1, *value.shape)
        np.testing.assert_array_equal(found[name][0], value)
    assert len(arviz.summary(result.to_arviz(KEY, 30))) == sum(
        v[0].size for v in result.sample_posterior(KEY, 1).values()
    )


def test_without_arviz_the_extra_is_named(result, monkeypatch):
    monkeypatch.setitem(sys.modules, "arviz", None)
    with pytest.raises(nf.MissingExtraError, match=r"'arviz'.*numpyro-fed\[examples\]") as caught:
        result.to_arviz()
    assert isinstance(caught.value, ImportError)


# --- can it be trusted? ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "settled"),
    [
        pytest.param(np.zeros(400), True, marks=pytest.mark.slow),
        (np.linspace(5, 0, 400), False),  # 1.25 nats from one quarter to the next
        (np.linspace(0, 5, 400), True),
        (np.exp(-np.arange(400) / 20), True),
        (np.linspace(0.2, 0, 400), True),  # a twentieth of a nat
        (np.zeros(39), False),  # too few to tell
    ],
)
def test_a_bound_has_settled_when_it_gains_no_more(losses, settled):
    r = np.random.default_rng(0)
    result = replace(unfitted(), losses=losses)
    assert result.settled == settled
    assert ("had settled" in result.report(certificate=False)) == settled
    noisy = replace(result, losses=losses + 0.02 * r.normal(size=len(losses)))
    assert noisy.settled == settled


@pytest.mark.slow
def test_noise_is_not_taken_for_a_gain():
    """A bound with an sd of 30 nats: the mean of a quarter of 400 rounds is known to 3."""
    losses = 30 * np.random.default_rng(0).normal(size=400)
    assert replace(unfitted(), losses=losses).settled
    assert not replace(unfitted(), losses=losses + np.linspace(200, 0, 400)).settled


@pytest.mark.slow
def test_a_run_whose_bound_still_rises_warns():
    sfvi = nf.SFVI(alone, optim=optax.adam(1e-2), start=None)
    with pytest.warns(UserWarning, match=r"still rising .* 200"):
        far = sfvi.run(KEY, 200, [{"y": np.full(9, 50.0)}], **quiet)
    assert not far.trusted
    assert "still rising" in far.report()


@pytest.mark.slow
def test_a_good_fit_is_trusted():
    sfvi = nf.SFVI(alone, optim=optax.adam(optax.cosine_decay_schedule(0.1, 400)), start=None)
    fit = sfvi.run(KEY, 400, [{"y": np.array([0.3, 1.2, -0.4])}], **quiet)
    assert fit.trusted
    assert "The globals of the fit can be trusted as well" in fit.report()
    assert fit.certificate is fit.certificate


alone = models.level(3)
