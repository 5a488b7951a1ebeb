"""The oracle: exact answers against closed forms, texts against densities, and a few cases."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laid_open import private
from numpyro.infer.util import potential_energy
from scipy import stats
from scipy.special import digamma, log_ndtr, polygamma

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import oracle
import oracle_exact
import oracle_ledger
import oracle_models
from oracle_models import DATA_SETS, Prior, Spec, random_silos, random_spec, text

flat = private(oracle_exact, "flat")
gaussian_locals = private(oracle_exact, "gaussian_locals")
integrated = private(oracle_exact, "integrated")
exception = private(oracle, "exception")
SCALARS = ("real", "positive", "lower", "interval")
STARTS = np.random.default_rng(0).normal(size=(20, 3))


def moments(f, dim, scale=1.0, starts=None):
    starts = scale * STARTS[:, :dim] if starts is None else starts
    return oracle_exact.moments(f, starts, np.full(dim, scale))


def assert_moments(found, mean, sd, log_evidence=0.0):
    np.testing.assert_allclose(found.mean, mean, atol=1e-3 * np.max(sd), rtol=0)
    np.testing.assert_allclose(found.sd, sd, rtol=1e-3)
    np.testing.assert_allclose(found.log_evidence, log_evidence, atol=2e-3)


def test_a_narrow_correlated_gaussian_far_away():
    mean, sd = np.array([5_000.0, -20.0, 0.3]), np.array([0.1, 2.0, 1.0])
    correlation = np.array([[1, 0.95, 0.2], [0.95, 1, 0.1], [0.2, 0.1, 1]])
    covariance = correlation * np.outer(sd, sd)
    precision, norm = np.linalg.inv(covariance), np.linalg.slogdet(2 * np.pi * covariance)[1]

    def f(z):
        d = z - mean
        return -0.5 * np.einsum("mi,ij,mj->m", d, precision, d) - 0.5 * norm

    assert_moments(moments(f, 3, scale=1e4), mean, sd)


@pytest.mark.parametrize(("a", "b"), [(1.0, 1.0), (40.5, 1.5)])
def test_beta_binomial_in_logits(a, b):
    prior = Prior("beta", (1.0, 1.0))
    g = oracle_exact.Global("p", prior, 0, "plain", "chance")

    def f(u):
        value, log_det = oracle_exact.constrain(prior, u)
        log_lik = (a - 1) * np.log(value[:, 0]) + (b - 1) * np.log1p(-value[:, 0])
        return oracle_exact.log_prior(g, u, value, log_det, {}) + log_lik

    with np.errstate(all="ignore"):
        found = moments(lambda u: np.nan_to_num(f(u), nan=-np.inf), 1)
    mean, sd = digamma(a) - digamma(b), (polygamma(1, a) + polygamma(1, b)) ** 0.5
    assert_moments(found, mean, sd, oracle_exact.betaln(a, b))


def test_two_modes_far_apart():
    def f(z):
        first = oracle_exact.normal(z, 0.0, 1.0).sum(1) + np.log(0.3)
        return np.logaddexp(first, oracle_exact.normal(z, 1e3, 0.1).sum(1) + np.log(0.7))

    starts = np.concatenate([STARTS[:, :2], STARTS[:3, :2] + 995])
    mean = 0.3 * 0 + 0.7 * 1e3
    sd = (0.3 * (1 + mean**2) + 0.7 * (0.01 + (1e3 - mean) ** 2)) ** 0.5
    assert_moments(moments(f, 2, 1.0, starts), mean, sd)


@pytest.mark.parametrize(
    ("f", "sd"),
    [
        (lambda z: oracle_exact.laplace(z, 1.0, 3.0)[:, 0], 18**0.5),
        (lambda z: oracle_exact.student(z, 5.0, 1.0, 2.0)[:, 0], 2 * (5 / 3) ** 0.5),
    ],
    ids=["kink", "heavy tails"],
)
def test_kinks_and_tails(f, sd):
    assert_moments(moments(f, 1), 1.0, sd)


def spec(**changes):
    plain = Spec(
        globals=(), likelihood="gaussian", noise=1.0, plate="row", local=None, spread=0.0,
        sizes=(4, 7), hospitals=(), visits=1, missing=False, power=1.0, factor=None, noted=False,
    )  # fmt: skip
    return plain._replace(**changes)


def test_locals_row_by_row_as_in_closed_form():
    """The same rows through the quadrature, which takes any likelihood, and through algebra."""
    mu = oracle_exact.Global("mu", Prior("normal", (0.0, 3.0)), 0, "plain", "coef")
    tau = oracle_exact.Global("tau", Prior("half_normal", (5.0,)), 0, "plain", "spread")
    s = spec(globals=(mu, tau), local="normal", spread="global", plate="hospital",
             hospitals=(1, 2), noise="data", missing=True)  # fmt: skip
    silos, _ = random_silos(s, np.random.default_rng(0), "far")
    d = flat(s, silos)
    eta = np.linspace(-3, 3, 6)[:, None] * d["x"][:, 0]
    scale, weight = np.geomspace(0.05, 50, 6)[:, None], d["here"].astype(float)
    expected = gaussian_locals(d, eta, d["s"], scale, weight)
    found = integrated(s, d, eta, d["s"], {}, scale, weight, fine=False)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_locals_with_a_kink_as_in_closed_form():
    """Normal noise and Laplace locals, narrow, alike and wide: the convolution of the two."""
    y = np.array([-3.0, 0.0, 0.5, 2.0])
    d = dict(y=y, group=np.arange(4))
    scales = np.array([(t, s) for t in (0.01, 0.3, 5.0) for s in (0.1, 1.0, 20.0) if s < 100 * t])
    tau, noise = scales[:, :1], scales[:, 1:]
    left = -y / tau + log_ndtr(y / noise - noise / tau)
    right = y / tau + log_ndtr(-y / noise - noise / tau)
    expected = np.logaddexp(left, right) + noise**2 / (2 * tau**2) - np.log(2 * tau)
    for fine, atol in ((False, 1e-4), (True, 1e-6)):
        found = integrated(
            spec(local="laplace"), d, np.zeros((len(tau), 4)), noise, {}, tau, np.ones(4), fine
        )
        np.testing.assert_allclose(found, expected.sum(1), atol=atol)


@pytest.mark.parametrize("local", ["laplace", "normal", "student"])
def test_locals_that_are_wide_are_integrated_as_far_as_they_reach(local):
    """As many ones as zeros at an even chance: by symmetry ``tau`` has its prior."""
    tau = oracle_exact.Global("tau", Prior("half_cauchy", (1.0,)), 0, "plain", "spread")
    s = spec(globals=(tau,), local=local, likelihood="bernoulli", spread="global", sizes=(2,))
    silos = [dict(y=np.array([0, 1]), x=np.zeros((2, 0), np.float32))]
    found = oracle_exact.exact(s, silos, np.array([1.0]), np.random.default_rng(0))
    assert found.mean[0] == pytest.approx(0, abs=1e-3)  # of a log half-Cauchy
    assert found.sd[0] == pytest.approx(np.pi / 2, rel=1e-3)


def test_gaussian_locals_keep_their_digits_where_the_noise_is_small():
    d = dict(y=np.array([1.0, 1.0 + 1e-6, -2.0]), group=np.array([0, 0, 1]))
    noise, tau = np.full((1, 1), 1e-6), np.full((1, 1), 3.0)
    found = gaussian_locals(d, np.zeros((1, 3)), noise, tau, np.ones(3))
    pair = stats.norm.logpdf(1e-6, 0, 2**0.5 * 1e-6) + stats.norm.logpdf(1 + 5e-7, 0, 3.0)
    assert found[0] == pytest.approx(pair + stats.norm.logpdf(-2, 0, 3.0), abs=1e-8)


def test_a_ridge_without_end_is_no_posterior():
    """``beta ~ Normal(0, tau)``, nothing to tell: in ``(log tau, beta)`` there is no peak."""
    tau = oracle_exact.Global("tau", Prior("exponential", (1.0,)), 0, "plain", "spread")
    beta = oracle_exact.Global("beta0", Prior("normal", (0.0, "tau")), 0, "plain", "coef")
    s = spec(globals=(tau, beta), local="normal", spread="global", sizes=(2,), noise=1e3)
    silos = [dict(y=np.zeros(2, np.float32), x=np.zeros((2, 1), np.float32))]
    found = oracle_exact.exact(s, silos, np.array([1.0, 0.0]), np.random.default_rng(0))
    assert found.mean[0] == pytest.approx(-np.euler_gamma, abs=2e-3)  # of a log exponential
    np.testing.assert_allclose(found.sd, [np.pi / 6**0.5, 2**0.5], rtol=2e-3)


@pytest.mark.parametrize("number", [0, 2, 7, 19, 29])
def test_text_and_density_agree(number, double):
    s = random_spec(0, number)
    s = s._replace(sizes=s.sizes[:1])
    r = np.random.default_rng(number)
    silos, _ = random_silos(s, r, "prior")
    f = oracle_exact.log_density(s, silos)
    u = 0.5 * r.normal(size=(3, s.dim))

    def joint(z):
        latents, start = {}, 0
        for g in s.globals:
            k = oracle_exact.unconstrained_size(g)
            name = f"{g.name}_latent" if g.how in ("exp", "tanh") else g.name
            scalar = not g.size and oracle_exact.SUPPORTS[g.prior.kind] in SCALARS
            latents[name] = z[start] if scalar else z[start : start + k]
            start += k
        return -potential_energy(text(s), (), silos[0], latents)

    found = jax.jit(lambda: jax.lax.map(joint, jnp.asarray(u)))()
    np.testing.assert_allclose(found, f(u), rtol=1e-6, atol=1e-5)


def test_coordinates_invert_the_supports():
    r = np.random.default_rng(0)
    for number in range(60):
        for g in random_spec(0, number).globals:
            u = r.normal(size=(5, oracle_exact.unconstrained_size(g)))
            value, _ = oracle_exact.constrain(g.prior, u)
            if g.prior.kind in ("lkj", "lkj_cholesky"):
                value = value[..., None] * np.ones((2, 2))
            np.testing.assert_allclose(oracle_exact.unconstrain(g, value), u, rtol=1e-6, atol=1e-8)


def test_draws_rounded_onto_a_bound_have_coordinates():
    found = next(
        g for i in range(200) for g in random_spec(0, i).globals if g.prior.kind == "uniform"
    )
    low, high = found.prior.args
    z = oracle_exact.unconstrain(found, np.array([[low], [high]], np.float32))
    assert (z[0] < -15).all()
    assert (z[1] > 15).all()
    assert np.isfinite(z).all()


def test_the_grammar_has_it_all():
    specs = [random_spec(0, i) for i in range(200)]
    assert all(1 <= s.dim <= 3 and 2 <= len(s.sizes) <= 4 for s in specs)
    assert {s.plate for s in specs} == {"row", "hospital", "visit"}
    assert len({s.likelihood for s in specs}) == len(set(oracle_models.LIKELIHOODS))
    hows = Counter(g.how for s in specs for g in s.globals)
    assert set(hows) == {"plain", "expand", "to_event", "sample_shape", "plate", "scan",
                         "loc_scale", "transform", "exp", "tanh"}  # fmt: skip
    supports = {oracle_exact.SUPPORTS[g.prior.kind] for s in specs for g in s.globals}
    assert supports == set(oracle_exact.SUPPORTS.values())
    assert any(s.factor for s in specs)
    assert any(s.missing for s in specs)
    assert any(s.power != 1 for s in specs)


def test_sets_of_one_model_have_the_same_shapes():
    for number in range(30):
        s = random_spec(0, number)
        every = [random_silos(s, np.random.default_rng(i), k)[0] for i, k in enumerate(DATA_SETS)]
        shapes = [jax.tree.map(lambda a: (np.shape(a), np.asarray(a).dtype), e) for e in every]
        assert all(shape == shapes[0] for shape in shapes)


def test_what_came_of_models_is_kept_in_a_line_each(tmp_path):
    file = tmp_path / "oracle.csv"
    records = {(3, i, "fit"): {"outcome": o} for i, o in enumerate(oracle.OUTCOMES)}
    records |= {(3, 0, "exact"): {"attempt": 0}, (7, 1, "NUTS"): {"outcome": "right"}}
    oracle.ledger(file, records, "first")
    table = oracle.ledger(file, {(7, 0, "fit"): {"outcome": "right"}}, "second")
    assert oracle_ledger.read(file)[0]["fit"] == "rasfcw----"
    assert oracle_ledger.commits(oracle_ledger.read(file)) == {"first": [3], "second": [7]}
    assert "| fit | 7 | 2 | 1 | 1 | 1 | 1 | 1 |" in table
    assert "NUTS" not in table


def test_outcomes():
    truth = oracle_exact.Moments(np.zeros(2), np.ones(2), 0.0)
    reading = oracle.Reading(np.array([0.05, -0.2]), np.array([1.0, 0.7]))
    error, ratio, right = oracle.misses(reading, truth)
    assert (error, ratio, right) == (0.2, 0.7, False)
    assert oracle.misses(reading._replace(mean_error=0.1, sd_error=0.15), truth)[2]
    assert exception(oracle.nf.ModelError("the site 'y' is bad"), spec()) == "refused"
    assert exception(TypeError("no such 'y'"), spec()) == "crashed"


FIXED = [(5, 0, ("SFVI", "SFVI corrected")), (2, 4, ("PVI factor", "PVI corrected"))]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "dataset", "names"), FIXED)
def test_nothing_is_wrong_in_silence(number, dataset, names):
    records = []
    oracle.run_model(0, number, [dataset, dataset + 1], list(names), {}, records.append)
    outcomes = [r["outcome"] for r in records if r["method"] != "exact"]
    assert len(outcomes) == 2 * len(names)
    assert set(outcomes) <= {"right", "right, said", "said"}, records
