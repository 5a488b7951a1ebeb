"""The importance correction: closed-form evidence and posteriors, k-hat, and what leaves a silo."""

import warnings
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import arviz
import jax
import jax.numpy as jnp
import models
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from laid_open import globals_drawn, inner_draws, inside, laid_open, put_in_place, root, with_errors
from problems import cut, parts
from scipy.special import logsumexp

import numpyro_fed as nf
from numpyro_fed.guides.silo_bounds import AtDraw
from numpyro_fed.numerics.gaussian import Coordinates
from numpyro_fed.posterior.verdict import Verdict
from numpyro_fed.weigh import weights as weighing
from numpyro_fed.weigh.element_errors import moments
from numpyro_fed.weigh.integration import SiloLikelihood
from numpyro_fed.weigh.log_likelihoods import LogLikelihoodExchange
from numpyro_fed.weigh.weights import systematic_resample

KEY = jax.random.key(0)
Y = np.array([0.3, -1.2, 0.8, 2.0, -0.4, 1.1, 3.0, 0.2, 1.6, 0.9])


conjugate = models.levels(2, 1, 0.5)


def exact(y=Y):
    """Mean and sd of mu given y, and log p(y)."""
    precision = 1 / 4 + len(y) / 1.25
    covariance = 4 + 1.25 * np.eye(len(y))
    evidence = dist.MultivariateNormal(np.zeros(len(y)), covariance).log_prob(y)
    return y.sum() / 1.25 / precision, precision**-0.5, float(evidence)


GAIN, ROW_SD = 0.2, 0.2**0.5  # given mu and y, b is normal around mu / 5 + 4 y / 5


@cache
def method_of(model):
    """One for each model, so that what it builds and compiles is there for the next test."""
    return nf.SFVI(model, optim=optax.sgd(0.1), start=None)


def result_at(model, silos, loc, scale, local, runtime="simulation"):
    """A result whose guide is put where a test wants it, without any fit.

    ``local`` gives the guide's parameters of a stack of silos from their data.
    """
    opened = laid_open(method_of(model), silos, runtime)
    state = opened.result().state

    def put(old, new):
        full = {name: jnp.zeros_like(a) for name, a in old.items()}
        return full | {k: jnp.broadcast_to(v, full[k].shape) * 1.0 for k, v in new.items()}

    server = state.server.params
    guide = put(server.guide, {"loc": loc, "log_scale": np.log(scale)})
    moved = []
    for s, b in zip(state.silos, opened.batches, strict=True):
        eta, wanted = s.params.guide, local(b.data.arrays)
        eta = {plate: put(old, wanted[plate]) for plate, old in eta.items()}
        moved.append(s._replace(params=s.params._replace(guide=eta)))
    state = state._replace(
        server=state.server._replace(params=server._replace(guide=guide)), silos=tuple(moved)
    )
    return opened.result(state)


@cache
def conjugate_at(
    sizes=(3, 7), *, shift=0.0, width=1.0, slip=0.0, spread=1.0, runtime="simulation", twice=False
):
    """The exact guide, but for a mean and an sd of mu, and of each b, that are off.

    ``shift`` and ``slip`` are in exact sds, ``width`` and ``spread`` are ratios to them.
    """
    y = Y[: sum(sizes)]
    silos = cut({"y": y}, sizes)
    if twice:
        y, silos = np.r_[y, y], silos * 2
    mean, sd, _ = exact(y)
    loc = mean + shift * sd

    def local(arrays):
        row = GAIN * loc + (1 - GAIN) * arrays["y"] + slip * ROW_SD
        return {
            "row": {
                "loc": row[..., None],
                "log_scale": np.log(ROW_SD * spread),
                "mean_coupling": GAIN,
            }
        }

    return result_at(conjugate, silos, loc, sd * width, local, runtime)


OFF = {"shift": 0.7, "width": 0.8, "slip": 0.5, "spread": 1.2}


@cache
def corrected(sizes=(3, 7), num_draws=4_000, inner_draws=20, wider=0.0, **settings):
    """By the guide's own draws, unless ``wider`` ones are asked for."""
    result = conjugate_at(sizes, **settings)
    return nf.importance_correct(jax.random.key(3), result, num_draws, inner_draws, wider=wider)


def mark_slow_tuples(*slow, quick):
    """Cases that are tuples, each for one argument."""
    return [*(pytest.param(sizes, marks=pytest.mark.slow) for sizes in slow), *quick]


# --- exact weights ---------------------------------------------------------------------------


@pytest.mark.slow
def test_an_exact_guide_gives_the_evidence_at_every_draw():
    """In float32 the weights are equal up to rounding, which has no tail to speak of."""
    fixed = corrected(num_draws=2_000, inner_draws=3)
    np.testing.assert_allclose(fixed.log_evidence, exact()[2], rtol=1e-5)
    np.testing.assert_allclose(fixed.weights, np.full(2_000, 5e-4), rtol=1e-4)
    np.testing.assert_allclose(fixed.ess, 2_000, rtol=1e-5)
    assert fixed.pareto_k < 0.5
    assert fixed.fit_trusted
    assert "The globals of the fit can be trusted" in fixed.report()


@pytest.mark.slow
def test_a_correction_is_corrected_anew_from_its_fit():
    fit = conjugate_at((3, 7))
    first = nf.importance_correct(KEY, fit, 300, 20)
    again = nf.importance_correct(KEY, first, 300, 20)
    np.testing.assert_array_equal(again.weights, first.weights)
    assert again.result is fit
    assert first.state is fit.state


@pytest.mark.parametrize("sizes", mark_slow_tuples((10,), (1,) * 10, quick=((3, 7),)))
def test_weights_are_posterior_over_guide_where_the_locals_are_exact(sizes):
    """The guide is wider than the posterior, so that no weight is smoothed."""
    fixed = corrected(sizes, 1_000, 3, shift=0.5, width=1.25)
    mean, sd, _ = exact()
    mu = np.asarray(fixed.draws["mu"], np.float64)
    posterior = dist.Normal(mean, sd).log_prob(mu)
    log_w = posterior - dist.Normal(mean + 0.5 * sd, 1.25 * sd).log_prob(mu)
    assert fixed.pareto_k < 1 / 3
    w = np.exp(np.asarray(log_w, np.float64))
    np.testing.assert_allclose(fixed.weights, w / w.sum(), rtol=1e-3)
    np.testing.assert_allclose(fixed.log_evidence, exact()[2] + np.log(w.mean()), rtol=1e-5)
    np.testing.assert_allclose(fixed.ess, w.sum() ** 2 / (w**2).sum(), rtol=1e-3)


@pytest.mark.slow
def test_a_host_runs_fit_is_corrected_by_the_same_numbers():
    simulated, host = (corrected(num_draws=300, **OFF, runtime=r) for r in ("simulation", "host"))
    assert len(host.result.state.silos) == 2
    assert len(simulated.result.state.silos) == 1
    np.testing.assert_allclose(host.log_evidence, simulated.log_evidence, rtol=1e-5)
    np.testing.assert_allclose(host.weights, simulated.weights, rtol=1e-3)


@pytest.mark.slow
def test_weights_do_not_depend_on_how_many_draws_run_at_a_time(monkeypatch):
    whole = corrected(num_draws=300, **OFF)
    put_in_place(monkeypatch, "batch_size", lambda *args: 7)
    pieces = nf.importance_correct(jax.random.key(3), conjugate_at(**OFF), 300, 20, wider=0.0)
    np.testing.assert_allclose(pieces.weights, whole.weights, rtol=1e-3)


# --- a wrong guide is repaired ---------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("sizes", mark_slow_tuples((10,), quick=((3, 7), (1,) * 10)))
def test_the_evidence_is_within_its_standard_error(sizes):
    """The mean of S weights with ESS effective draws is off by sqrt(1 / ESS - 1 / S) of itself."""
    fixed = corrected(sizes, **OFF)
    error = np.sqrt(1 / fixed.ess - 1 / 4_000)
    assert error < 0.05
    assert abs(fixed.log_evidence - exact()[2]) < 4 * error


def test_mean_and_sd_of_a_wrong_guide_are_repaired():
    """Standard errors of weighted means are sqrt(sum w^2 d^2)."""
    fixed = corrected(**OFF)
    mean, sd, _ = exact()
    mu, w = np.asarray(fixed.draws["mu"], np.float64), fixed.weights
    off = mu - mean
    error = np.sqrt((w**2 * off**2).sum())
    assert abs((w * off).sum()) < 4 * error
    assert abs(mu.mean() - mean) > 10 * error
    error = np.sqrt((w**2 * (off**2 - sd**2) ** 2).sum()) / (2 * sd)
    assert abs(np.sqrt((w * off**2).sum()) - sd) < 4 * error
    assert abs(mu.std() - sd) > 3 * error
    # Resampled draws say the same; systematic resampling adds next to nothing.
    assert abs(np.mean(fixed.samples["mu"]) - (w * mu).sum()) < 0.02 * sd
    assert abs(np.std(fixed.samples["mu"]) / sd - 1) < 0.1


def test_locals_of_a_wrong_guide_are_repaired():
    """Row means off by half an sd of b given mu; 4,000 draws know a mean to 0.02 of an sd."""
    fixed = corrected(**OFF)
    mean, sd, _ = exact()
    for silo, y in enumerate(cut(Y, (3, 7))):
        centre = GAIN * mean + (1 - GAIN) * y
        row_sd = np.hypot(ROW_SD, GAIN * sd)
        raw = np.asarray(fixed.result.sample_posterior(KEY, 4_000, silo=silo)["b"], np.float64)
        good = np.asarray(fixed.sample_posterior(KEY, 4_000, silo=silo)["b"], np.float64)
        errors = [abs(b.mean(0) - centre).mean() / row_sd for b in (raw, good)]
        assert errors[0] > 0.4
        assert errors[1] < 0.1
        errors = [abs(b.std(0) / row_sd - 1).mean() for b in (raw, good)]
        assert errors[0] > 0.12
        assert errors[1] < 0.06


@pytest.mark.slow
def test_two_silos_do_not_share_their_noise():
    """Twins double the variance of the log weights; with the same noise they would quadruple it.

    4,000 draws know a variance to 3 %, a ratio to 5 %, and a quarter more for the smoothed tail.
    """
    one, two = (
        corrected((5,), inner_draws=4, slip=0.3, spread=1.5, twice=twice) for twice in (False, True)
    )
    ratio = np.log(two.weights).var() / np.log(one.weights).var()
    assert 1.5 < ratio < 2.6


# --- k-hat and words -------------------------------------------------------------------------


def test_too_few_draws_to_tell_are_not_trusted():
    few = Verdict((), enough_draws=False)
    assert "Too few draws to tell" in str(few)
    assert not few.trusted
    assert few.reason == "too few draws to tell"
    assert Verdict(()).trusted


def test_the_report_trusts_a_wrong_guide_that_was_repaired():
    fixed = corrected(**OFF)
    assert fixed.pareto_k < fixed.threshold == 0.7
    assert fixed.reliable
    known = with_errors(fixed, error=np.full((3, 1), 0.029), shape=np.full((2, 1), 0.5))
    assert known.trusted
    assert "The posterior of the globals can be trusted" in known.report()
    assert f"{fixed.ess:,.0f} effective draws" in fixed.report()
    assert str(fixed) == fixed.report()


def test_the_report_does_not_trust_an_absurd_guide():
    """Six sds away and half as wide: the variance of the weights is infinite."""
    fixed = corrected(shift=6.0, width=0.5)
    assert fixed.pareto_k > fixed.threshold
    assert not fixed.reliable
    assert "Do not trust this posterior: a few draws carry the weight" in fixed.report()
    assert fixed.ess < 100


def test_one_draw_that_carries_all_the_weight_is_not_trusted():
    """Forty sds away: in float32 all weights but a few are zero."""
    fixed = corrected(shift=40.0)
    assert not np.isnan(fixed.pareto_k)
    assert not fixed.reliable
    assert fixed.ess < 10


@pytest.mark.parametrize(
    ("num_draws", "threshold"), [(1, 0.04), (10, 0.04), (100, 0.5), (1_000, 2 / 3), (10**4, 0.7)]
)
def test_the_threshold_is_that_of_vehtari_and_others(num_draws, threshold):
    fixed = replace(corrected(**OFF), weights=np.full(num_draws, 1 / num_draws))
    np.testing.assert_allclose(fixed.threshold, threshold, atol=5e-3)
    assert replace(fixed, pareto_k=fixed.threshold).reliable
    assert not replace(fixed, pareto_k=fixed.threshold + 0.01).reliable


def test_the_report_says_how_far_the_fit_is():
    """The guide's mean is 0.7 exact sds off, its sd 0.8 of the exact one."""
    fixed = corrected(**OFF)
    assert fixed.reliable
    assert not fixed.fit_trusted
    assert "The globals of the fit itself cannot: the mean of 'mu' is 0." in fixed.report()
    error = 4 * fixed.monte_carlo_error
    assert abs(fixed.fit_error["mu"]["mean_error_sd"] - 0.7) < error
    assert abs(fixed.fit_error["mu"]["sd_ratio"] - 0.8) < error


@pytest.mark.slow
def test_few_effective_draws_are_not_trusted():
    """300 draws know a mean to 0.06 sd at best."""
    fixed = corrected(num_draws=300, shift=0.2)
    assert fixed.reliable
    assert fixed.monte_carlo_error > 300**-0.5
    assert not fixed.trusted
    assert "Try more num_draws" in fixed.report()


def two_modes(y, sd):
    both = dist.Normal(jnp.array([0.0, 20.0]), 1.0)
    mu = numpyro.sample("mu", dist.MixtureSameFamily(dist.Categorical(jnp.ones(2) / 2), both))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, sd), obs=y)


@pytest.mark.slow
def test_a_mode_that_the_guide_never_visits_is_seen():
    """Nearly flat data leave both modes of the prior; the guide is exact in one of them."""
    silos = [{"y": np.array([9.0, 11.0]), "sd": 1e3}, {"y": np.ones(1), "sd": 1e3}]
    result = result_at(two_modes, silos, 0.0, 1.0, lambda arrays: {})
    blind = nf.importance_correct(KEY, result, 2_000, wider=0.0)
    fixed = nf.importance_correct(KEY, result, 2_000)
    assert blind.fit_trusted  # as every importance sampler is blind to what it never draws
    assert not fixed.fit_trusted
    assert not fixed.trusted
    assert not result.trusted
    assert "Do not trust this posterior: a few draws carry the weight" in result.report()


def funnel(y):
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    with nf.silo_plate("row", y.shape[0]):
        b = numpyro.sample("b", dist.Normal(0, tau))
        numpyro.sample("y", dist.Normal(b, 1), obs=y)


@pytest.mark.slow
def test_locals_are_integrated_where_the_guide_does_not_reach():
    """As tau goes to zero rows no longer differ, and a guide fitted elsewhere never meets them."""
    silos = [{"y": Y[:6]}]
    result = result_at(funnel, silos, 0.0, 0.5, lambda arrays: {"row": {}})
    opened, state = inside(result), jax.tree.map(lambda a: a[0], result.state.silos[0])
    likelihood = SiloLikelihood(opened.model, opened.guide, {"row": 100})
    data = jax.tree.map(lambda a: a[0], opened.batches[0].data)

    @jax.jit
    def estimate(key, z_G):
        eta = state.params.guide
        return likelihood.log_estimate(
            key, AtDraw({}, eta, z_G, Coordinates(z_G, jnp.zeros(1)), data)
        )

    # Next to nothing depends on the guide's draws at the first; four standard errors elsewhere.
    for z, error in ((-8.0, 0.02), (-3.0, 0.65), (0.5, 0.65)):
        found = estimate(KEY, jnp.array([z]))
        expected = dist.Normal(0, np.sqrt(1 + np.exp(2 * z))).log_prob(Y[:6]).sum()
        np.testing.assert_allclose(found, expected, atol=error)


def neck(y):
    """A funnel among the globals."""
    tau = numpyro.sample("tau", dist.Exponential(1.0))
    beta = numpyro.sample("beta", dist.Normal(0, tau))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(beta, 1), obs=y)


@pytest.mark.slow
def test_the_neck_of_a_funnel_is_weighed():
    """A normal guide sits where ``tau`` is large; log tau has a long tail below."""
    y = np.array([0.3, -0.2, 0.9, 0.4])
    u = np.linspace(-30, 8, 20_001)
    spread = np.exp(2 * u) + 1 / len(y)  # of the rows' mean
    density = np.exp(u - np.exp(u) - y.mean() ** 2 / spread / 2 - np.log(spread) / 2)
    density /= density.sum()
    mean = density @ u
    sd, kurtosis = (density @ (u - mean) ** 2) ** 0.5, density @ (u - mean) ** 4
    kurtosis /= sd**4
    result = result_at(
        neck, cut({"y": y}, (1, 3)), np.array([-0.3, 0.2]), np.array([0.5, 0.4]), lambda arrays: {}
    )
    fixed = nf.importance_correct(KEY, result, 20_000)
    assert fixed.reliable
    found = np.log(np.asarray(fixed.draws["tau"], np.float64))
    near = fixed.weights @ found
    np.testing.assert_allclose(near, mean, atol=4 * sd / fixed.ess**0.5)
    width = (fixed.weights @ (found - near) ** 2) ** 0.5
    np.testing.assert_allclose(width / sd, 1, atol=4 * ((kurtosis - 1) / 4 / fixed.ess) ** 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("width", [0.5, 1.0])
def test_wider_draws_keep_weights_bounded(width):
    """At a share ``a`` of draws from a density ``g`` no weight exceeds ``p / (a g)``."""
    fixed = corrected(num_draws=2_000, inner_draws=2, width=width, wider=0.1)
    mean, _, _ = exact()
    assert len(fixed.weights) == 2_000
    assert fixed.weights.max() < 40 / 2_000
    mu, w = np.asarray(fixed.draws["mu"], np.float64), fixed.weights
    error = np.sqrt((w**2 * (mu - mean) ** 2).sum())
    assert abs((w * mu).sum() - mean) < 4 * error
    assert fixed.pareto_k < 0.5
    assert fixed.fit_trusted == (width == 1.0)
    np.testing.assert_allclose(fixed.log_evidence, exact()[2], atol=4 / np.sqrt(fixed.ess))


def test_wider_draws_stay_on_a_narrow_ridge():
    """Of a line over a covariate near 1e7, where intercept and slope are next to one number.

    Beside the ridge no wider draw had weight, and a guide that was 30 times too narrow looked fine.
    """
    with jax.enable_x64(True):
        z = np.random.default_rng(0).normal(size=(1_000, 2))
        z = jnp.asarray(z @ [[1.0, -1e-7], [0.0, 1e-14]])
        L = root(z)
        beside = np.linalg.cond(np.linalg.solve(L, (z - z.mean(0)).T))
    assert beside == pytest.approx(1, rel=1e-2)


def test_too_few_draws_for_a_tail_are_not_trusted():
    fixed = corrected(num_draws=1, inner_draws=2)
    assert fixed.pareto_k == np.inf
    assert (fixed.ess, fixed.weights.tolist()) == (1.0, [1.0])
    assert not fixed.reliable


@pytest.mark.parametrize("settings", [OFF, {"shift": 6.0, "width": 0.5}], ids=["off", "absurd"])
def test_weights_sum_to_one_and_give_the_effective_draws(settings):
    fixed = corrected(**settings)
    np.testing.assert_allclose(fixed.weights.sum(), 1, rtol=1e-12)
    assert (fixed.weights >= 0).all()
    assert 1 <= fixed.ess <= len(fixed.weights)
    np.testing.assert_allclose(fixed.ess, 1 / (fixed.weights**2).sum(), rtol=1e-10)


# --- what cannot be weighed -------------------------------------------------------------------


without_locals = models.level(2, 1.25**0.5)


def generalised(**settings):
    method = nf.FedGVI(
        without_locals, local=nf.local.LBFGS(steps=3), evidence_draws=1, **settings, start=None
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return method.run(KEY, 1, cut({"y": Y}, (3, 7)), progress_bar=False)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["divergence", "prior_divergence"])
def test_a_fit_under_another_divergence_is_refused(which):
    result = generalised(**{which: nf.divergences.AlphaRenyi(0.5)})
    with pytest.raises(ValueError, match=r"not KL"):
        nf.importance_correct(KEY, result, 100)
    assert not result.trusted
    assert "No certificate: this fit's divergence is not KL" in result.report()


@pytest.mark.slow
def test_under_a_loss_there_is_no_evidence():
    """The generalised posterior is weighed all the same: the text's density is minus the loss."""
    fixed = nf.importance_correct(KEY, generalised(loss=nf.losses.beta_loss(1.5)), 200)
    assert fixed.log_evidence is None
    assert "evidence" not in fixed.report()


# --- draws -----------------------------------------------------------------------------------


@pytest.mark.parametrize("silo", [0, 1])
def test_globals_are_the_same_with_and_without_a_silo(silo):
    fixed = corrected(**OFF)
    alone = fixed.sample_posterior(KEY, 50)
    both = fixed.sample_posterior(KEY, 50, silo=silo)
    assert alone.keys() == {"mu"}
    assert {k: v.shape for k, v in both.items()} == {"mu": (50,), "b": (50, (3, 7)[silo])}
    np.testing.assert_array_equal(both["mu"], alone["mu"])
    assert np.isin(alone["mu"], fixed.draws["mu"]).all()
    assert fixed.samples["mu"].shape == fixed.draws["mu"].shape == (4_000,)


def test_a_silo_that_does_not_exist_is_named():
    with pytest.raises(IndexError, match=r"no silo 2: .* 0 to 1"):
        corrected(**OFF).sample_posterior(KEY, 5, silo=2)


def test_draws_are_resampled_as_often_as_their_weights_say():
    """Systematically: n w times, rounded up or down, and in random order."""
    weights = np.random.default_rng(0).dirichlet(np.full(20, 0.3))
    for n in (1, 7, 1_000):
        chosen = systematic_resample(jax.random.key(n), weights, n)
        count = np.bincount(chosen, minlength=20)
        assert count.sum() == n
        assert (np.abs(count - n * weights) < 1 + 1e-3).all()
    assert (np.diff(chosen) < 0).any()


def test_a_point_at_the_end_of_the_weights_falls_on_the_last_draw(monkeypatch):
    """Rounding may leave the sum of all weights above the last of their partial sums."""
    random = SimpleNamespace(random=lambda: np.nextafter(1, 0), permutation=np.array)
    monkeypatch.setattr(weighing, "generator", lambda key: random)
    uneven = np.random.default_rng(13).random(50)
    assert np.cumsum(uneven)[-1] < uneven.sum()
    np.testing.assert_array_equal(systematic_resample(KEY, uneven, 1), [49])


@pytest.mark.parametrize(
    "settings",
    [
        OFF,
        pytest.param({"shift": 1.5, "width": 0.6}, marks=pytest.mark.slow),
        {"shift": 2, "width": 0.5},
    ],
)
def test_arviz_is_not_told_of_more_draws_than_count(settings):
    """ArviZ takes a draw that repeats for as many; the draws are about 770, 30 and 6 of 4,000."""
    fixed = corrected(**settings)
    posterior = fixed.to_arviz(KEY, 4_000, silo=1)["posterior"]
    n = int(fixed.ess)
    assert posterior["mu"].shape == (1, n)
    assert posterior["b"].shape == (1, n, 7)
    assert 0.3 * fixed.ess < arviz.ess(posterior["mu"].values) < 1.5 * fixed.ess
    assert posterior.attrs["ess"] == fixed.ess
    assert posterior.attrs["pareto_k"] == fixed.pareto_k
    assert posterior.attrs["verdict"] == fixed.report()


def test_arviz_gets_no_more_draws_than_are_asked_for():
    posterior = corrected(**OFF).to_arviz(KEY, 50)["posterior"]
    assert posterior["mu"].shape == (1, 50)
    np.testing.assert_array_equal(
        posterior["mu"][0], corrected(**OFF).sample_posterior(KEY, 50)["mu"]
    )


@pytest.mark.slow
def test_a_correction_is_a_function_of_its_key():
    again = nf.importance_correct(jax.random.key(3), conjugate_at(**OFF), 300, 20, wider=0.0)
    other = nf.importance_correct(jax.random.key(4), conjugate_at(**OFF), 300, 20, wider=0.0)
    first = corrected(num_draws=300, **OFF)
    np.testing.assert_array_equal(again.weights, first.weights)
    np.testing.assert_array_equal(again.samples["mu"], first.samples["mu"])
    assert not np.isin(other.draws["mu"], first.draws["mu"]).any()


# --- what leaves a silo ----------------------------------------------------------------------


@pytest.mark.slow
def test_a_reply_has_one_number_a_draw_and_one_more_whatever_the_silo_holds():
    shapes = []
    for sizes in [(2, 2), (9, 1)]:
        p = parts(conjugate, cut({"y": Y}, sizes))
        likelihood = SiloLikelihood(p.model, p.guide, {"row": 5})
        args = p.model, p.guide, likelihood, p.algorithm
        weigh = LogLikelihoodExchange(*args, num_draws=13, num_own=13, batch_size=4)
        shared = p.algorithm.shared(p.algorithm.init_server(KEY))
        _, down = weigh.of_server(shared, jnp.zeros((13, 1)))
        like, told = weigh.exchange.messages()
        assert jax.tree.map(jnp.shape, down) == jax.tree.map(jnp.shape, like)
        for data in p.silos:
            state = p.algorithm.init_silo(KEY, data)
            reply, after = weigh.exchange.compiled().silo(KEY, down, state, data)
            jax.tree.map(np.testing.assert_array_equal, after, state)
            shapes.append([(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(reply.up)])
            assert shapes[-1] == [(a.shape, str(a.dtype)) for a in jax.tree.leaves(told)]
    assert shapes == [[((13,), "float32"), ((), "float32")]] * 4


def walled(y, wall):
    """A silo whose wall is negative answers NaN, one whose wall is 0 that nothing is possible."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with nf.silo_plate("row", y.shape[0]):
        b = numpyro.sample("b", dist.Normal(mu, 1))
        numpyro.sample("y", dist.Normal(b, 1), obs=y)
        numpyro.factor("wall", jnp.log(wall))


def fit_behind(walls):
    silos = [{"y": np.zeros(2), "wall": np.array([1.0, w])} for w in walls]
    return result_at(walled, silos, 0.0, 1.0, lambda arrays: {"row": {}})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("walls", "bad"), [((1, -1, 1), (1,)), ((-1, 1, -1), (0, 2)), ((1, 1, 0), (2,))]
)
def test_silos_whose_answer_is_of_no_use_are_named(walls, bad):
    result = fit_behind(walls)
    names = ", ".join(map(str, bad))
    with pytest.raises(nf.NonFiniteError, match=f"all zero, at silo {names}\\.") as caught:
        nf.importance_correct(KEY, result, 30, 3)
    assert caught.value.silos == bad
    assert caught.value.result is result


def test_a_prior_that_rules_out_every_draw_is_the_servers():
    def impossible(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        numpyro.factor("f", jnp.where(mu > 1e6, 0.0, -jnp.inf))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu, 1), obs=y)

    result = result_at(impossible, cut({"y": Y}, (3, 7)), 0.0, 1.0, lambda arrays: {})
    with pytest.raises(nf.NonFiniteError, match="all zero, at the server") as caught:
        nf.importance_correct(KEY, result, 30)
    assert caught.value.silos == ()


# --- arguments and other models --------------------------------------------------------------


@pytest.mark.parametrize("num_draws", [0, -3, True, 2.5, "10"])
def test_a_number_of_draws_that_is_not_a_positive_integer_is_refused(num_draws):
    with pytest.raises(ValueError, match=r"num_draws .*positive"):
        nf.importance_correct(KEY, conjugate_at(**OFF), num_draws)


@pytest.mark.parametrize("inner_draws", [0, -1, {"row": 0}, {"rows": 5}])
def test_inner_draws_that_cannot_be_are_refused(inner_draws):
    with pytest.raises(ValueError, match=r"draws (for silo_plate 'row'|names 'rows')"):
        nf.importance_correct(KEY, conjugate_at(**OFF), 10, inner_draws)


def test_a_model_without_local_latents_is_weighed_exactly():
    mean, sd, evidence = exact()
    silos = cut({"y": Y}, (3, 7))
    result = result_at(without_locals, silos, mean, sd, lambda arrays: {})
    fixed = nf.importance_correct(KEY, result, 200, wider=0.0)
    np.testing.assert_allclose(fixed.log_evidence, evidence, rtol=1e-5)
    np.testing.assert_allclose(fixed.weights, np.full(200, 1 / 200), rtol=1e-4)
    assert fixed.sample_posterior(KEY, 5, silo=1).keys() == {"mu"}


def test_a_model_without_global_latents_has_its_evidence():
    model = models.rows_alone()

    def local(arrays):
        return {"row": {"loc": 0.7 * arrays["y"][..., None], "log_scale": np.log(0.6)}}

    result = result_at(model, cut({"y": Y}, (3, 7)), 0.0, 1.0, local)
    fixed = nf.importance_correct(KEY, result, 500, 10)
    evidence = dist.Normal(0, 1.25**0.5).log_prob(Y).sum()
    error = np.sqrt(1 / fixed.ess - 1 / 500)
    assert abs(fixed.log_evidence - evidence) < 4 * error
    assert error < 0.05


wards = models.wards(0.7)


WARD = np.array([0, 0, 1, 2, 2, 2])
WARD_Y = np.array([0.4, 1.0, -0.3, 1.2, 0.8, 1.9])
WARD_SILOS = [
    {"ward": np.array([0, 0, 1]), "size": np.zeros(2), "y": WARD_Y[:3]},
    {"ward": np.zeros(3, int), "size": np.zeros(1), "y": WARD_Y[3:]},
]


@cache
def wards_off():
    """The exact guide of mu, and guides of wards and rows that look at nothing above them."""
    same = (WARD[:, None] == WARD).astype(float)
    covariance = 0.7**2 * same + 0.5 * np.eye(6)
    ones, solved = np.linalg.solve(covariance, np.stack([np.ones(6), WARD_Y], -1)).sum(0)
    precision = 1 / 4 + ones
    evidence = dist.MultivariateNormal(np.zeros(6), covariance + 4).log_prob(WARD_Y)

    def local(arrays):
        row = {"loc": 0.8 * arrays["y"][..., None] + 0.1, "log_scale": np.log(0.5)}
        return {"ward": {"loc": 0.7, "log_scale": np.log(0.7)}, "row": row}

    result = result_at(wards, WARD_SILOS, solved / precision, precision**-0.5, local)
    return result, float(evidence)


def test_an_int_is_for_outer_plates_with_its_root_below():
    guide = parts(wards, WARD_SILOS).guide
    assert inner_draws(guide, 9) == {"ward": 9, "row": 3}
    assert inner_draws(guide, 10) == {"ward": 10, "row": 4}
    assert inner_draws(guide, 1) == {"ward": 1, "row": 1}
    assert inner_draws(guide, {"row": 5}) == {"ward": 1, "row": 5}
    assert inner_draws(parts(conjugate, cut({"y": Y}, (3, 7))).guide, 10) == {"row": 10}
    with pytest.raises(ValueError, match=r"'ward' .*positive int"):
        inner_draws(guide, 0)


@pytest.mark.slow
def test_the_evidence_under_an_outer_plate_is_within_its_standard_error():
    result, evidence = wards_off()
    fixed = nf.importance_correct(jax.random.key(5), result, 600, {"ward": 40, "row": 6})
    error = np.sqrt(1 / fixed.ess - 1 / 600)
    assert error < 0.06
    assert abs(fixed.log_evidence - evidence) < 4 * error
    draws = fixed.sample_posterior(KEY, 6, silo=0)
    assert {k: v.shape for k, v in draws.items()} == {"mu": (6,), "u": (6, 2), "b": (6, 3)}


@pytest.mark.slow
def test_a_second_correction_compiles_nothing(compiled):
    fit = conjugate_at((4, 6))
    nf.importance_correct(KEY, fit, num_draws=150, inner_draws=3)
    assert compiled
    compiled.clear()
    nf.importance_correct(jax.random.key(1), fit, num_draws=150, inner_draws=3)
    assert not compiled


@pytest.mark.slow
def test_a_heavy_tail_of_weights_of_which_most_count_is_not_called_concentrated():
    good = nf.importance_correct(KEY, conjugate_at((4, 6)), num_draws=150, inner_draws=3)
    heavy = replace(good, pareto_k=0.9, ess=149.0)
    assert "its tails reach beyond what was drawn" in heavy.report()
    assert "few draws carry" not in heavy.report()


def test_spreads_that_hang_on_few_draws_far_out_are_not_known():
    good = corrected()
    assert good.trusted
    heavy = np.full((2, 1), 2 / 3)  # as of the squares of a t with three degrees of freedom
    assert with_errors(good, shape=heavy, error=np.full((3, 1), 0.0199)).trusted
    unknown = with_errors(good, shape=heavy, error=np.full((3, 1), 0.021))
    assert not unknown.trusted
    assert not unknown.fit_trusted
    assert "the mean of 'mu' rests on a few draws far out" in unknown.report()
    assert "cannot: " not in unknown.report()  # its own error is no reason
    assert with_errors(unknown, error=good.errors.error, shape=good.errors.shape).trusted


def test_errors_a_little_above_the_limit_are_no_reason_not_to_rely_on_a_posterior():
    light, good = np.full((2, 1), 0.4), corrected()
    for error, what in (
        ([[0.02], [0.031], [0.01]], "the sd of 'mu' is known to 0.031 sd only"),
        ([[0.02], [0.02], [0.05]], "all is known to 0.05 sd only"),
    ):
        near = with_errors(good, shape=light, error=np.array(error))
        assert not near.trusted
        assert near.doubt == f"{what}, where 0.03 is asked"
        assert near.report().startswith(f"The posterior is not as sure as asked for: {what}")
        assert "More draws make it so" in near.report()
        assert "Do not" not in near.report()
    far = np.array([[0.02], [0.031], [0.01]])
    for spoilt, words in (
        (with_errors(good, shape=light, error=2 * far), "Do not rely on the posterior's spreads"),
        (
            with_errors(good, shape=light * [[1], [2]], error=far),
            "sd at best, and rests on a few draws",
        ),
        (with_errors(good, shape=1.5 * light, error=far), "Do not rely on the posterior's spreads"),
        (replace(with_errors(good, shape=light, error=far), pareto_k=0.9), "Do not"),
    ):
        assert not spoilt.trusted
        assert words in spoilt.report()
        assert "as sure as asked" not in spoilt.report()


def test_a_moment_that_does_not_exist_is_named_and_no_reason_to_distrust():
    good = corrected()
    heavy = with_errors(
        good, tail_index=np.ones(1), is_power=np.ones(1, bool), error=np.full((3, 1), 0.02)
    )
    assert heavy.trusted
    assert "but 'mu' has no mean (tails of index 1.0): use medians" in heavy.report()
    attributes = heavy.to_arviz(KEY, 10)["posterior"].attrs
    assert (attributes["no_mean"], attributes["no_sd"]) == ("mu", "mu")
    lost = with_errors(heavy, error=np.full((3, 1), 0.1))  # its quantiles are not known
    assert not lost.trusted


def test_accuracy_is_what_a_user_asks_for():
    rough = with_errors(corrected(), error=np.full((3, 1), 0.05))
    assert not rough.trusted
    assert replace(rough, accuracy=0.2).trusted
    assert not replace(with_errors(rough, error=np.full((3, 1), 0.02)), accuracy=0.05).trusted


@pytest.mark.slow
def test_half_of_the_draws_from_farther_tell_where_weights_end():
    """Weights that no draw exceeds look as if they had no end when few of them come from far."""

    def model(y):
        s = numpyro.sample("s", dist.TruncatedNormal(0.0, 1.0, low=0.2, high=2.0))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(0, s), obs=y)

    r = np.random.default_rng(0)
    silos = [dict(y=r.normal(1, 1, n)) for n in (3, 5)]
    fit = nf.PVI(model).run(KEY, 5, silos, stop="converged", progress_bar=False)
    keys = list(map(jax.random.key, range(5)))
    assert np.median([nf.importance_correct(k, fit, wider=0.2).pareto_k for k in keys]) > 0.7
    assert all(nf.importance_correct(k, fit).trusted for k in keys)


def test_moments_that_are_not_finite_have_an_infinite_error():
    z, weights = np.array([[0.0, 1.0], [1.0, np.inf], [2.0, 3.0]]), np.full(3, 1 / 3)
    with np.errstate(invalid="ignore"):
        found = moments(z, weights, np.ones(3, bool))
    assert np.isfinite(found.shift_error[:, 0]).all()
    assert np.isinf(found.shift_error[:, 1]).all()


COUNTS = (np.array([0.0, 5.0, 27.0]), np.array([20.0, 1.0, 413.0]))


def a_level_of_rows(y):
    level = numpyro.sample("level", dist.Uniform(-2.0, 3.0))
    with nf.silo_plate("row", y.shape[0]):
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Poisson(jnp.exp(level + b)), obs=y)


def a_level_of_hospitals(y, hospital):
    level = numpyro.sample("level", dist.Uniform(-2.0, 3.0))
    with nf.silo_plate("hospital", hospital.shape[0]):
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(level + b[hospital])), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("model", [a_level_of_rows, a_level_of_hospitals])
def test_latents_that_are_far_from_where_the_guide_expects_them_are_found(model):
    """At levels next to the upper bound the guide's straight lines lead far away from them."""
    rows = model is a_level_of_rows
    silos = [dict(y=y) if rows else dict(y=y, hospital=np.arange(len(y))) for y in COUNTS]
    z, b = np.linspace(-12, 25, 600), np.linspace(-8, 8, 2_001)
    level = -2 + 5 / (1 + np.exp(-z))
    log_p = -np.logaddexp(0, z) - np.logaddexp(0, -z)
    for y in np.concatenate(COUNTS):
        joint = [y * (v + b) - b**2 / 2 - np.exp(v + b) for v in level]
        log_p += [logsumexp(each) for each in joint]
    p = np.exp(log_p - log_p.max())
    mean = p @ z / p.sum()
    sd = (p @ (z - mean) ** 2 / p.sum()) ** 0.5

    fit = nf.SFVI(model).run(KEY, 1, silos, progress_bar=False)
    found = nf.importance_correct(KEY, fit, 16_000, 20)
    assert found.trusted
    drawn, w = globals_drawn(found)[:, 0], found.weights
    assert abs(w @ drawn - mean) < 4 * found.monte_carlo_error * sd
    assert abs((w @ (drawn - w @ drawn) ** 2) ** 0.5 / sd - 1) < 4 * found.monte_carlo_error
