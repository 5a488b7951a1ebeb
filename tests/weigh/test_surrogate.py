"""Steps of particles by a parabola: its fit, and that no parabola changes the posterior."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_fed as nf
from numpyro_fed.basics.programs import precision
from numpyro_fed.text.predictors import Predictors
from numpyro_fed.weigh import surrogate
from numpyro_fed.weigh.smc import TemperedSMC
from numpyro_fed.weigh.surrogate import Surrogate, trajectories_of

KEY = jax.random.key(0)
QUIET = dict(progress_bar=False)
R = np.random.default_rng(0)
X = np.stack([np.ones(30), R.normal(3, 2, 30)], 1)
SILOS = [dict(x=X[:10], y=R.normal(size=10)), dict(x=X[10:], y=R.normal(size=20))]


def product(x, y):
    """Coefficients that are products of a scale and a normal, as in a horseshoe."""
    scale = numpyro.sample("scale", dist.LogNormal(0, 1))
    e = numpyro.sample("e", dist.Normal(0, 1).expand([2]).to_event(1))
    with nf.silo_plate("row", len(y)):
        numpyro.sample("y", dist.Normal(x @ (e * scale), 1), obs=y)


@pytest.fixture(scope="module")
def fit():
    with precision(double=True):
        return nf.PVI(product).run(KEY, 0, SILOS, **QUIET)


@dataclass(frozen=True)
class Pairs:
    """Two predictors of three globals: the products of one with the two others."""

    number: int = 2
    program: str = "not the globals themselves"
    factors_matrices: bool = False

    def __call__(self, z):
        return jnp.exp(z[0]) * z[1:]


def test_a_parabola_in_the_predictors_is_found_as_it_is():
    """By gradients in the globals, at particles of any spread."""
    A, g = np.array([[4.0, 1.0], [1.0, 2.0]]), np.array([0.3, -2.0])

    def log_likelihood(z):
        h = Pairs()(z)
        return g @ h - 0.5 * h @ A @ h

    with precision(double=True):
        z = R.normal(size=(200, 3))
        slopes = np.array(jax.vmap(jax.grad(log_likelihood))(z))
        slopes[7] = np.nan  # of a particle that is lost
        found = Surrogate(Pairs(), None, None).parabola(z, slopes)
        np.testing.assert_allclose(found.curvature, A, rtol=1e-5)
        at = found.slope + found.curvature @ found.place  # the slope where the predictors are zero
        np.testing.assert_allclose(at, g, rtol=1e-5)
        few = Surrogate(Pairs(), None, None).parabola(z[:5], 0 * z[:5])
    assert few is None


def test_trajectories_leave_a_density_as_it_is():
    with precision(double=True):
        sd = jnp.array([1.0, 0.2])
        z = sd * R.normal(size=(20_000, 2))
        found, rate = trajectories_of(
            lambda z: (-0.5 * ((z / sd) ** 2).sum(1), -z / sd**2), KEY, z, jnp.diag(sd), 0.7, 3
        )
        error = 4 / len(z) ** 0.5
        np.testing.assert_allclose(found.mean(0) / sd, 0, atol=error)
        np.testing.assert_allclose(found.std(0) / sd, 1, atol=error)
        assert abs(np.corrcoef(found[:, 0], z[:, 0])[0, 1]) < 0.1
        assert 0.8 < rate < 1


def exact():
    """Means and sds of log scale, and of the slope, by a sum over a grid of the log scale.

    Given the scale the coefficients are normal.
    """
    y, x = (np.concatenate([s[k] for s in SILOS]) for k in "yx")
    grid, found = np.linspace(-6, 5, 4_001), []
    for u in grid:
        C = np.eye(len(y)) + np.exp(2 * u) * x @ x.T
        log_p = -0.5 * u**2 - 0.5 * np.linalg.slogdet(C)[1] - 0.5 * y @ np.linalg.solve(C, y)
        covariance = np.linalg.inv(x.T @ x + np.exp(-2 * u) * np.eye(2))
        found.append((log_p, (covariance @ x.T @ y)[1], covariance[1, 1]))
    log_p, slope, variance = map(np.array, zip(*found, strict=True))
    p = np.exp(log_p - np.logaddexp.reduce(log_p))
    means = p @ grid, p @ slope
    squares = p @ grid**2, p @ (slope**2 + variance)
    return [(m, (s - m**2) ** 0.5) for m, s in zip(means, squares, strict=True)]


@pytest.mark.parametrize("stretch", [1.0, 0.3])
def test_particles_by_a_parabola_are_at_the_posterior(stretch, fit, monkeypatch):
    """Also where its curvature is wrong: then fewer are accepted."""
    fit_parabola = Surrogate.parabola

    def stretched(self, z, slopes):
        found = fit_parabola(self, z, slopes)
        return found and found._replace(curvature=stretch * found.curvature)

    monkeypatch.setattr(Surrogate, "parabola", stretched)
    assert Predictors.of(fit._fit.model).number == 2
    found = nf.Tempered(num_particles=2_000, start="prior").run(KEY, 120, fit, **QUIET)
    drawn = found.z_G[:, 0], found.z_G[:, 2] * np.exp(found.z_G[:, 0])
    for z, (mean, sd) in zip(drawn, exact(), strict=True):
        assert z.mean() == pytest.approx(mean, abs=0.1 * sd)
        assert z.std() == pytest.approx(sd, rel=0.1)
    assert found.reached == 1
    assert found.num_kept >= 6
    if stretch == 1.0:
        assert found.trusted
        assert found.num_exchanges < 40


@pytest.mark.parametrize(("place", "curvature"), [(40.0, 10.0), (0.0, 1e12)])
def test_steps_ask_silos_where_hardly_a_particle_moves(place, curvature, fit, monkeypatch):
    """As a parabola that rises far away leads them there, or a stiff one nowhere."""
    tried = []
    by_parabola = TemperedSMC._by_parabola

    def counted(self, evaluate, state, random):
        tried.append(state.b)
        return by_parabola(self, evaluate, state, random)

    def wrong(self, z, slopes):
        return surrogate.Parabola(np.full(2, place), np.zeros(2), curvature * np.eye(2))

    monkeypatch.setattr(Surrogate, "parabola", wrong)
    monkeypatch.setattr(TemperedSMC, "_by_parabola", counted)
    found = nf.Tempered(num_particles=2_000, start="prior").run(KEY, 100, fit, **QUIET)
    assert found.reached == 1
    assert tried.count(1.0) == 1 < found.num_kept
    mean, sd = exact()[0]
    assert found.z_G[:, 0].mean() == pytest.approx(mean, abs=0.3 * sd)
