"""Densities that repeat under a flat prior: an angle after a turn, a phase after a day."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.reparam import CircularReparam
from scipy.special import i0e

import numpyro_fed as nf
from numpyro_fed.posterior.particles import particles_of
from numpyro_fed.search.expand import Expansion
from numpyro_fed.search.mode import OneCopy, periods_of, shifted_places
from numpyro_fed.search.mode_search import BestPoints
from numpyro_fed.weigh.smc import SMCState

KEY = jax.random.key(0)
TURN = 2 * np.pi


def periods(f, places, flat):
    """The periods that are found where searches came to rest at ``places``, the first the best."""

    x = np.asarray(places, float)
    first, unit = np.arange(len(x)) == 0, np.stack([np.eye(x.shape[1])] * len(x))
    best = Expansion(x, np.where(first, 0.0, -1e-9), np.zeros_like(x), unit)
    rest = dict.fromkeys(BestPoints._fields[1:])
    search = BestPoints(best, **{**rest, "known": np.ones(len(x), bool)})
    shifts, at = shifted_places(search, np.asarray(flat))
    return periods_of(shifts, np.asarray(jax.jit(jax.vmap(f))(at)))


def bell(x, sd):
    return -0.5 * (x / sd) ** 2


def test_an_angle_repeats_after_a_turn_and_its_scale_never(double):
    def f(x):
        return 40 * jnp.cos(x[0]) * jnp.exp(-(x[1] ** 2)) + bell(x[1] - 0.2, 0.3) - 1e3

    found = periods(f, [[0.0, 0.0]], [0, 1])
    np.testing.assert_allclose(found, [TURN, np.inf])


def test_another_period_is_that_between_two_starts(double):
    def f(x):
        return 9 * jnp.cos(TURN * x[0] / 24) + bell(x[1], 2.0)

    np.testing.assert_allclose(periods(f, [[0.0, 0.0], [-24.0, 0.0]], [0, 1]), [24, np.inf])
    assert np.isinf(periods(f, [[0.0, 0.0]], [0, 1])).all()


def test_a_turn_counts_before_a_shorter_period(double):
    """What is seen of an axis is an angle, with two modes in a turn."""
    found = periods(lambda x: 9 * jnp.cos(2 * x[0]), [[0.0], [np.pi]], [0])
    np.testing.assert_allclose(found, [TURN])


@pytest.mark.parametrize(
    "f",
    [
        lambda x: bell(x[0], 1e4) - 1e6,
        lambda x: 40 * jnp.cos(x[0]) + bell(x[0], 1e4),
        lambda x: -5e5 + 0.0 * x[0],
        lambda x: 40 * jnp.cos(x[0]) + jnp.where(x[0] > 8, 2.0, 0.0),
    ],
    ids=["wide", "nearly", "none at all", "once"],
)
def test_what_only_seems_to_repeat_does_not(double, f):
    assert np.isinf(periods(f, [[0.0], [TURN], [1e-9]], [0])).all()


def test_places_have_one_copy():
    one = OneCopy(np.array([3.0, 0.5]), np.array([TURN, np.inf]))
    z = np.array([[3.0 + 2 * TURN, 9.0], [1.0, -9.0], [3.0 - 0.7 * TURN, 0.0]])
    np.testing.assert_array_equal(one.holds(z), [False, True, False])
    copies = one.copy_of(z)
    np.testing.assert_allclose(copies, [[3.0, 9.0], [1.0, -9.0], [3.0 + 0.3 * TURN, 0.0]])
    assert one.holds(copies).all()


@numpyro.handlers.reparam(config={"phi": CircularReparam()})
def direction(y):
    phi = numpyro.sample("phi", dist.VonMises(0.0, 1e-3))
    k = numpyro.sample("kappa", dist.HalfNormal(5))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.VonMises(phi, k), obs=y)


def exact_direction(y):
    """Means and sds of cosine, sine and concentration, on a grid."""
    angle, k = np.linspace(-np.pi, np.pi, 401)[:-1, None], np.linspace(1e-3, 12, 1_500)
    sums = np.cos(angle) * np.cos(y).sum() + np.sin(angle) * np.sin(y).sum()
    log_p = k * sums - len(y) * (np.log(i0e(k)) + k) - 0.5 * (k / 5) ** 2 + 1e-3 * np.cos(angle)
    w = np.exp(log_p - log_p.max())
    w /= w.sum()
    values = np.array([v * np.ones(w.shape) for v in (np.cos(angle), np.sin(angle), k)])
    means = (w * values).sum((1, 2))
    return means, np.sqrt((w * (values - means[:, None, None]) ** 2).sum((1, 2)))


@pytest.mark.slow
def test_particles_remember_where_they_were_in_one_copy():
    """Angles that stand still but for a turn have all their memory, whatever moves beside them."""
    y = np.random.default_rng(2).vonmises(3.0, 2.0, 60)
    fit = nf.SFVI(direction).run(KEY, 0, [dict(y=y[:20]), dict(y=y[20:])], progress_bar=False)
    copy = fit.start.copy
    angle, here = np.argmin(copy.periods), fit.draw_globals(KEY, 400)[0]
    r, turned = np.random.default_rng(0), np.asarray(here).copy()
    turned[:, 1 - angle] = r.permutation(turned[:, 1 - angle])
    turned[:, angle] += TURN * r.integers(-9, 9, 400)
    here = np.asarray(here)
    state = SMCState.at("fit", {}, None, here)
    state.kept, state.arrived = [state.particles], turned
    state.b, state.exchanges = 1.0, 1
    found = particles_of(KEY, fit, state, near=True, accuracy=0.2)
    np.testing.assert_allclose(found.memory, 1.0, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "strength"), [(60, 0.9), (12, 0.1)])
def test_copies_of_a_mode_are_one_place(rows, strength):
    r = np.random.default_rng(2)
    y = (r.vonmises(np.pi - 0.05, strength, rows) + np.pi) % TURN - np.pi
    silos = [dict(y=y[:1]), dict(y=y[1:9]), dict(y=y[9:])]
    fitted = nf.fit(KEY, direction, silos, progress_bar=False)
    assert fitted.trusted
    assert fitted.num_exchanges <= 20  # 1,700 where copies are places of their own
    assert not fitted.mode.others
    assert "'phi_unwrapped' one copy, since its density repeats every 6.283" in fitted.verdict
    draws = fitted.sample_posterior(KEY, 20_000)
    values = np.stack([np.cos(draws["phi"]), np.sin(draws["phi"]), draws["kappa"]])
    means, sds = exact_direction(y)
    assert (np.abs(values.mean(1) - means) < 0.1 * sds).all()
    np.testing.assert_allclose(values.std(1), sds, rtol=0.1)
