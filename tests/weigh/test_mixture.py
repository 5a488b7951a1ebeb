"""Proposals of nf.fit: mixtures around modes, matched to weighted draws, and their wider parts."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import models
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from problems import cut
from scipy import stats

import numpyro_fed as nf
from numpyro_fed.data.silo_data import read
from numpyro_fed.posterior.importance import Weighing, correct_from
from numpyro_fed.search.expand import prior_draws
from numpyro_fed.text.split import split
from numpyro_fed.weigh.mixture import FOLDS, OWN_FREEDOM, around_modes, matched, standard_points
from numpyro_fed.weigh.proposals import (
    FREEDOM,
    SCALES,
    STRETCHES,
    Pool,
    WideParts,
    spread_of,
    wider_parts,
)

KEY = jax.random.key(0)
ROOT = np.array([[2.0, 0.0], [-1.5, 0.7]])
MEAN = np.array([3.0, -1.0])


def draws(n, seed=0):
    return MEAN + np.random.default_rng(seed).normal(size=(n, 2)) @ ROOT.T


def student(freedom, mean, root):
    return stats.multivariate_t(np.asarray(mean), np.asarray(root) @ np.asarray(root).T, freedom)


def pair(y):
    z = numpyro.sample("z", dist.Normal(0, 3).expand([2]).to_event(1))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(z.sum(), 1), obs=y)


@pytest.fixture(scope="module")
def fm():
    return split(pair, read([{"y": np.zeros(3)}]))


def test_the_density_of_a_proposal_is_that_of_its_parts(fm, double):
    """Each part, one coordinate stretched at a time among them, by scipy's distributions."""
    own = around_modes(draws(4_000), [(np.array([9.0, 9.0]), 4 * np.eye(2))], np.log([0.7, 0.3]))
    wide = WideParts.of(wider_parts(fm, prior_draws(fm)), 1_000, 0.3)
    z = np.array(wide.draw_with(np.random.default_rng(0), {}, own))
    assert z.shape == (1_000, 2)
    centre, root = map(np.asarray, own.moments)
    np.testing.assert_allclose(
        root @ root.T, _covariance(own), rtol=1e-10, err_msg="the mixture's own covariance"
    )
    parts = [[(student(FREEDOM, centre, s * root), 1.0)] for s in SCALES]
    axes = root / np.linalg.norm(root, axis=1, keepdims=True)
    for s in STRETCHES:
        stretched = [np.eye(2) + (s - 1) * np.outer(a, a) for a in axes]
        parts.append([(student(OWN_FREEDOM, centre, root @ S), 0.5) for S in stretched])
    parts.append([(student(FREEDOM, *spread_of(prior_draws(fm))), 1.0)])
    of_own = [
        (student(OWN_FREEDOM, own.centres[k], own.roots[k]), float(jnp.exp(own.log_shares[k])))
        for k in range(2)
    ]
    total = np.zeros(len(z))
    for number, part in zip([wide.num_own, *wide.numbers], [of_own, *parts], strict=True):
        total += number / 1_000 * sum(share * p.pdf(z) for p, share in part)
    np.testing.assert_allclose(wide.log_density_with({}, own, z), np.log(total), rtol=1e-9)
    # Where particles move along its gradient, JAX computes the same.
    as_jax, at = jax.tree.map(jnp.asarray, own), jnp.asarray(z)
    in_jax = jax.jit(lambda own, z: wide.log_density_with({}, own, z))(as_jax, at)
    np.testing.assert_allclose(in_jax, np.log(total), rtol=1e-9)


def _covariance(mixture):
    shares = np.exp(np.asarray(mixture.log_shares))
    away = mixture.centres - shares @ mixture.centres
    inside = np.einsum("k,kij,klj->il", shares, mixture.roots, mixture.roots)
    return inside + np.einsum("k,ki,kj->ij", shares, away, away)


def test_draws_come_from_the_density(fm, double):
    """The mean weight of a normal target with known mass is that mass."""
    own = around_modes(draws(4_000), [], np.zeros(1))
    propose = WideParts.of(wider_parts(fm, prior_draws(fm)), 4_000, 0.5)
    z = propose.draw_with(np.random.default_rng(0), {}, own)
    log_q = np.asarray(propose.log_density_with({}, own, z))
    for scale in (1.0, 3.0):
        target = stats.multivariate_normal(MEAN, scale**2 * ROOT @ ROOT.T)
        w = np.exp(target.logpdf(z) - log_q)
        assert abs(w.mean() - 1) < 4 * w.std() / np.sqrt(len(w))


def points_of(seed, n=3_000):
    return standard_points(np.random.default_rng(seed), n, 2)[0]


def test_points_are_even(double):
    points = points_of(0)
    quantiles = stats.t.cdf(points, OWN_FREEDOM)
    assert (np.abs(quantiles.mean(0) - 0.5) < 0.2 * 12**-0.5 / np.sqrt(3_000)).all()
    again, other = points_of(0), points_of(1)
    np.testing.assert_array_equal(points, again)
    assert not (points == other).any()


@pytest.mark.parametrize("number", [300, 4_000])
def test_a_match_has_the_moments_of_the_weighted_draws(number):
    """Whatever the units, and on a ridge that no covariance matrix in double precision holds."""
    z, w = draws(number), np.random.default_rng(1).exponential(size=number)
    w /= w.sum()
    found = matched(z, w)
    mean = w @ z
    cov = (z - mean).T @ ((z - mean) * w[:, None])
    np.testing.assert_allclose(np.exp(found.log_shares).sum(), 1, rtol=1e-5)
    np.testing.assert_allclose(found.moments.loc, mean, rtol=0.02)
    np.testing.assert_allclose(_covariance(found), cov, rtol=0.12, atol=0.05)
    units = np.array([[1e6, 0.0], [1e6, 1e-3]])
    with jax.enable_x64(True):
        same, moved = matched(z, w), matched(z @ units.T, w)
    np.testing.assert_allclose(moved.centres, same.centres @ units.T, rtol=1e-6)
    np.testing.assert_allclose(moved.roots, units @ same.roots, rtol=1e-5, atol=1e-5)


def test_two_clusters_get_their_own_parts():
    z = np.concatenate([draws(1_500) - 40, draws(500, seed=1) + 40])
    found = matched(z, np.full(2_000, 1 / 2_000))
    shares, left = np.exp(np.asarray(found.log_shares)), np.asarray(found.centres)[:, 0] < 0
    assert shares[left].sum() == pytest.approx(0.75, abs=2e-3)
    away = np.linalg.norm(found.centres - MEAN, axis=1)[shares > 0.01]
    assert np.abs(away - 40 * 2**0.5).max() < 5


def test_draws_without_spread_are_not_matched():
    assert matched(np.ones((50, 2)), np.full(50, 1 / 50)) is None


def test_a_draw_is_judged_by_a_mixture_that_it_had_no_part_in():
    """Moved far away, it changes densities at draws of other folds, and at none of its own."""
    z, w = draws(600), np.random.default_rng(1).exponential(size=600)
    moved = z.copy()
    moved[7] += 30
    before, after = matched(z, w).log_left_out, matched(moved, w).log_left_out
    changed = before != after
    assert changed.sum() == 600 - 600 // FOLDS + 1
    alone = np.ones(600, bool)
    alone[~changed] = alone[7] = False
    others = matched(z[alone], w[alone])
    np.testing.assert_allclose(before[~alone], others.log_prob(z[~alone]), rtol=1e-10)
    assert after[7] < before[7] - 5


def test_a_pool_keeps_densities_of_the_draws_that_chose_a_mixture():
    """With the same mixture again too; draws that are added later have its own."""
    first = around_modes(draws(400), [], np.zeros(1))
    pool = Pool.empty(2, np.dtype(float), None).with_mixture(first, 0.5)
    z = first.sample(np.random.default_rng(0), 300)
    pool = pool.with_draws(z, z[:, 0], np.ones(300, bool), [300])
    own = matched(z, np.full(300, 1 / 300))
    pool = pool.with_mixture(own, 0.5)
    new = own.sample(np.random.default_rng(1), 200)
    pool = pool.with_draws(new, new[:, 0], np.ones(200, bool), [200]).with_mixture(own, 0.2)
    of_own = np.append(own.log_prob(new), own.log_left_out)
    np.testing.assert_array_equal(pool.log_own[:2], [of_own, of_own])
    np.testing.assert_array_equal(pool.log_own[2], first.log_prob(pool.z_G))
    assert np.abs(own.log_prob(z) - own.log_left_out).max() > 0.01


@pytest.mark.slow
def test_draws_that_choose_mixtures_are_as_wide_as_the_target():
    """Sixty times three batches of 300 for a log scale beside four normal numbers.

    Weighed by the mixtures that were fitted to them, their sd is 3 % too small, seven of its
    standard errors.
    """
    exact, sds = np.pi / 8**0.5, []
    narrow = around_modes(np.random.default_rng(0).normal(size=(4_000, 5)), [], np.zeros(1))
    for random in map(np.random.default_rng, range(60)):
        pool, own = Pool.empty(5, np.dtype(float), None), narrow
        for _ in range(3):
            pool = pool.with_mixture(own, 0.0)
            z = own.sample(random, 300)
            log_joint = stats.norm.logpdf(np.exp(z[:, 0])) + z[:, 0]
            log_joint += stats.norm.logpdf(z[:, 1:]).sum(1)
            pool = pool.with_draws(z, log_joint, np.ones(300, bool), [300])
            # As many draws of each: the log of their mixture, but for a constant.
            log_w = pool.log_joint - np.logaddexp.reduce(pool.log_own, 0)
            w = np.exp(log_w - log_w.max())
            w /= w.sum()
            own = matched(pool.z_G, w)
        x = pool.z_G[:, 0]
        sds.append(np.sqrt(w @ (x - w @ x) ** 2))
    error = np.std(sds) / np.sqrt(len(sds))
    assert error < 0.0075 * exact
    assert abs(np.mean(sds) - exact) < 3 * error


def log_of_half_normal(n):
    """Draws (n, 2): the log of a half-normal scale, and a normal coordinate that goes with it."""
    r = np.random.default_rng(0)
    z = np.log(np.abs(r.normal(size=n)))
    return np.stack([z, 5.0 + 0.5 * z + r.normal(size=n)], 1)


def test_bends_lead_back_and_their_density_is_that_of_draws(double):
    """Whatever is bent: coordinates come back, and the density sums to one."""
    own = matched(log_of_half_normal(4_000), np.full(4_000, 1 / 4_000))
    power = np.asarray(own.bends.power)
    assert power[0, 0] < 0.8
    assert (power[1, 0], power[0, 1], power[1, 1]) == (1, 1, 1)
    u = np.random.default_rng(1).normal(0, 4, (50, 2))
    v, log_det = own.bends.straight(u)
    np.testing.assert_allclose(own.bends.back(v), u, rtol=1e-12)
    slopes = jax.vmap(jax.jacfwd(lambda u: own.bends.straight(u)[0]))(jnp.asarray(u))
    np.testing.assert_allclose(log_det, np.linalg.slogdet(slopes)[1], rtol=1e-10, atol=1e-12)
    z = own.sample(np.random.default_rng(0), 4_000)
    target = stats.multivariate_normal(np.asarray(z).mean(0), 0.3 * np.cov(np.asarray(z).T))
    w = target.pdf(z) / np.exp(own.log_prob(z))
    assert abs(w.mean() - 1) < 4 * w.std() / np.sqrt(len(w))


def test_a_log_scale_has_most_effective_draws_of_a_bent_mixture(double):
    """Without bends a tail that falls as an exponential has weights of e^3 and more."""
    z = log_of_half_normal(4_000)
    own = matched(z, np.full(4_000, 1 / 4_000))
    points = own.sample(np.random.default_rng(0), 4_000)
    x, y = points.T
    log_p = np.log(2) + stats.norm.logpdf(np.exp(x)) + x + stats.norm.logpdf(y, 5 + 0.5 * x)
    log_w = log_p - own.log_prob(points)
    w = np.exp(log_w - log_w.max())
    assert log_w.max() < 1.5
    assert w.sum() ** 2 / (w**2).sum() > 0.85 * len(w)


@pytest.mark.slow
def test_draws_of_several_proposals_are_weighed_as_one():
    """The evidence of a normal model, from a proposal that is off and one that is right."""
    y = np.random.default_rng(0).normal(1, 1, 12)
    model = models.level(2)
    result = nf.PVI(model).run(KEY, 1, cut({"y": y}, (5, 7)), progress_bar=False)
    exact = stats.multivariate_normal(np.zeros(12), np.eye(12) + 4).logpdf(y)
    off = around_modes(np.random.default_rng(1).normal(4, 0.2, (4_000, 1)), [], np.zeros(1))
    first = correct_from(KEY, result, 2_000, None, off, wider=0.16)
    assert not first.trusted
    own = matched(np.asarray(first.z_G), first.weights)
    both = correct_from(jax.random.key(1), result, 2_000, None, own, wider=0.16, earlier=first)
    assert both.trusted
    assert len(both.weights) == 4_000
    mu = np.asarray(both.pool.z_G, np.float64)
    log_joint = stats.norm.logpdf(mu[:, 0], 0, 2) + stats.norm.logpdf(y, mu, 1).sum(1)
    near = np.abs(mu[:, 0]) < 10
    np.testing.assert_allclose(np.asarray(both.pool.log_joint)[near], log_joint[near], rtol=1e-4)
    assert both.num_exchanges == first.num_exchanges + 1
    # New draws that judge come from all mixtures, in the shares that they have.
    judged = correct_from(KEY, result, 2_000, None, None, earlier=both)
    assert judged.trusted
    assert judged.pool.numbers == (3_000, 3_000)
    assert judged.pool.mixtures == both.pool.mixtures
    chosen = replace(first, pareto_k=0.1)
    assert not correct_from(KEY, result, 2_000, None, None, earlier=chosen).reliable
    assert correct_from(KEY, result, 2_000, None, off, wider=0.16, earlier=both).reliable
    assert abs(both.log_evidence - exact) < 0.1
    mean = y.sum() / (12 + 1 / 4)
    assert abs(both.weights @ np.asarray(both.z_G)[:, 0] - mean) < 4 * 0.03 * 12**-0.5


@pytest.mark.slow
def test_a_draw_whose_weight_was_rounding_has_none_among_further_draws(monkeypatch):
    y = np.random.default_rng(0).normal(1, 1, 12)
    result = nf.PVI(models.level(2)).run(KEY, 1, cut({"y": y}, (5, 7)), progress_bar=False)
    off = around_modes(np.random.default_rng(1).normal(4, 0.2, (4_000, 1)), [], np.zeros(1))
    rough, answers = np.array([3, 8]), [np.array([3, 8]), np.zeros(0, int)]
    monkeypatch.setattr(Weighing, "_rough_draws", lambda *args: answers.pop(0))
    monkeypatch.setattr("numpyro_fed.weigh.weights.max_k_hat", lambda n: -np.inf)
    first = correct_from(KEY, result, 400, None, off, wider=0.5)
    assert (first.pool.log_joint[rough] == -np.inf).all()
    answers.append(np.zeros(0, int))
    both = correct_from(jax.random.key(1), result, 400, None, off, wider=0.5, earlier=first)
    assert (both.weights[400 + rough] == 0).all()
