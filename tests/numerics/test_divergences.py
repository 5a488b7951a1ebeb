"""Divergences against quadrature and known values, in their limits, and at q = p."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laid_open import squared_arsinh_of_root as f
from scipy import integrate, stats

from numpyro_fed import expfam
from numpyro_fed.basics.errors import GuideError
from numpyro_fed.numerics.divergences import KL, AlphaRenyi, FisherRao, ReverseKL, WeightedKL

DIAGONAL = expfam.gaussian(2)
FULL = expfam.gaussian(2, "full")
PRODUCT = expfam.product({"a": (slice(0, 2), DIAGONAL), "b": (slice(2, 3), expfam.gaussian(1))})
EVERY = KL(), ReverseKL(), WeightedKL(0.5), AlphaRenyi(0.5), AlphaRenyi(1.5)
FISHER = FisherRao(), FisherRao(squared=True)


@partial(jax.jit, static_argnums=0)
def natural(family, psi):
    return family.natural(psi)


@partial(jax.jit, static_argnums=(0, 1))
def values(divergences, family, q, p):
    return [d(family, q, p) for d in divergences]


@partial(jax.jit, static_argnums=(0, 1))
def value(d, family, q, p):
    return d(family, q, p)


def diagonal(loc, log_scale):
    return natural(DIAGONAL, {"loc": np.array(loc, float), "log_scale": np.array(log_scale, float)})


def full(loc, log_scale, below):
    psi = {"loc": loc, "log_scale": log_scale, "below": [below]}
    return natural(FULL, {name: np.array(a, float) for name, a in psi.items()})


Q, P = diagonal([0.5, -1.0], [0.2, -0.3]), diagonal([0.0, 0.3], [0.0, 0.4])


def test_divergences_are_their_integrals():
    family = expfam.gaussian(1)

    def member(loc, scale):
        return natural(family, {"loc": np.array([loc]), "log_scale": np.log([scale])})

    q, p = member(0.3, 0.8), member(-0.5, 1.2)
    f, g = stats.norm(0.3, 0.8).pdf, stats.norm(-0.5, 1.2).pdf

    def integral(h):
        return integrate.quad(h, -12, 12)[0]

    def renyi(a):
        return np.log(integral(lambda z: f(z) ** a * g(z) ** (1 - a))) / (a * (a - 1))

    forward = integral(lambda z: f(z) * np.log(f(z) / g(z)))
    reverse = integral(lambda z: g(z) * np.log(g(z) / f(z)))
    expected = [forward, reverse, 0.5 * forward, renyi(0.5), renyi(1.5)]
    found = values(EVERY, family, q, p)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "q", "p"),
    [(DIAGONAL, Q, P), (FULL, full([1.0, 0.0], [0.1, 0.2], 0.5), full([0.0, 1.0], [0, 0.0], -0.3))],
)
def test_renyi_is_the_difference_of_log_partitions(family, q, p):
    a = 0.3

    @jax.jit
    def found(q, p):
        mixed = jax.tree.map(lambda x, y: a * x + (1 - a) * y, q, p)
        return AlphaRenyi(a)(family, q, p), *map(family.log_partition, (mixed, q, p))

    renyi, of_mixed, of_q, of_p = map(np.asarray, found(q, p))
    expected = (of_mixed - a * of_q - (1 - a) * of_p) / (a * (a - 1))
    np.testing.assert_allclose(renyi, expected, rtol=1e-5)


def test_renyi_does_not_cancel_far_from_zero():
    q, p = (diagonal([1000.0 + x, -1000.0], [-4.0, -4.0]) for x in (0.0, 0.02))
    near_zero = (diagonal([x, 0.0], [-4.0, -4.0]) for x in (0.0, 0.02))
    expected = value(AlphaRenyi(0.5), DIAGONAL, *near_zero)
    np.testing.assert_allclose(value(AlphaRenyi(0.5), DIAGONAL, q, p), expected, rtol=2e-2)


def test_renyi_has_both_kl_as_limits():
    with jax.enable_x64(True):
        q, p = (jax.tree.map(lambda a: np.asarray(a, float), eta) for eta in (Q, P))
        near = AlphaRenyi(1 - 1e-6), AlphaRenyi(1 + 1e-6), AlphaRenyi(1e-6)
        *found, kl, reverse = values((*near, KL(), ReverseKL()), DIAGONAL, q, p)
        np.testing.assert_allclose(found, [kl, kl, reverse], rtol=1e-5)


def test_renyi_is_infinite_where_its_integral_is():
    wide, narrow = diagonal([0.0, 0.0], [1.0, 1.0]), diagonal([0.0, 0.0], [0.0, 0.0])
    both = jax.jit(jax.value_and_grad(lambda q, p: AlphaRenyi(1.5)(DIAGONAL, q, p)))
    found, gradient = both(wide, narrow)
    assert found == np.inf
    assert all(np.isfinite(g).all() for g in gradient.values())
    assert np.isfinite(both(narrow, wide)[0])


def textbook(m1, s1, m2, s2):
    far, near = (m1 - m2) ** 2 + 2 * (s1 + s2) ** 2, (m1 - m2) ** 2 + 2 * (s1 - s2) ** 2
    root = np.sqrt(near / far)
    return np.sqrt(2) * np.log((1 + root) / (1 - root))


def test_fisher_rao_is_the_textbook_form():
    q, p = (jax.tree.map(np.float64, DIAGONAL.ordinary(eta)) for eta in (Q, P))
    by_axis = textbook(q["loc"], np.exp(q["log_scale"]), p["loc"], np.exp(p["log_scale"]))
    distance, square = values(FISHER, DIAGONAL, Q, P)
    np.testing.assert_allclose(distance, np.linalg.norm(by_axis), rtol=1e-5)
    np.testing.assert_allclose(square, np.sum(by_axis**2), rtol=1e-5)
    np.testing.assert_allclose(values(FISHER, DIAGONAL, P, Q)[0], distance, rtol=1e-6)


def test_squared_fisher_rao_is_twice_kl_nearby():
    q = diagonal([0.02, 0.3], [0.0, 0.41])
    square, kl = values((FisherRao(squared=True), KL()), DIAGONAL, q, P)
    np.testing.assert_allclose(square, 2 * kl, rtol=3e-2)


def test_fisher_rao_passes_smoothly_from_its_series_to_its_form():
    with jax.enable_x64(True):
        t = jnp.array([0.99999e-4, 1.00001e-4])
        np.testing.assert_allclose(f(t), np.arcsinh(np.sqrt(t)) ** 2, rtol=1e-12)
        slopes = jax.vmap(jax.grad(f))(t)
        np.testing.assert_allclose(slopes[0], slopes[1], rtol=1e-8)


def test_a_product_adds_up():
    one = expfam.gaussian(1)
    a, b = (natural(one, {"loc": np.array([x]), "log_scale": np.zeros(1)}) for x in (0.0, 1.5))
    several = (*EVERY, FisherRao(squared=True))
    joint = values(several, PRODUCT, {"a": Q, "b": a}, {"a": P, "b": b})
    parts = np.array(values(several, DIAGONAL, Q, P)) + values(several, one, a, b)
    np.testing.assert_allclose(joint, parts, rtol=1e-5)


NUMBERS = st.lists(st.floats(-2, 2, width=32), min_size=8, max_size=8)


@settings(max_examples=10, deadline=None, derandomize=True, database=None)
@given(NUMBERS)
def test_divergences_are_positive_and_zero_at_equality(x):
    q, p = diagonal(x[0:2], x[2:4]), diagonal(x[4:6], x[6:8])
    apart = np.abs(np.array(x[:4]) - np.array(x[4:])).max()
    between, at_equality = (values((*EVERY, *FISHER), DIAGONAL, q, other) for other in (p, q))
    for found, zero in zip(between, at_equality, strict=True):
        assert found >= -1e-5 * (1 + np.exp(8))
        assert found > 0 or apart < 0.1
        assert abs(zero) < 1e-4


@pytest.mark.parametrize("d", [*EVERY, *FISHER], ids=repr)
def test_gradients_at_equality_are_zero_and_finite(d):
    gradient = jax.jit(jax.grad(lambda q: d(DIAGONAL, q, P)))(P)
    for g in gradient.values():
        np.testing.assert_allclose(g, 0, atol=1e-5)


@pytest.mark.parametrize("family", [DIAGONAL, FULL, PRODUCT], ids=["diagonal", "full", "product"])
def test_all_but_fisher_rao_know_every_family(family):
    eta = jax.jit(lambda: family.fit(lambda z: -0.5 * z @ z))()
    np.testing.assert_allclose(values(EVERY, family, eta, eta), 0, atol=1e-5)


def test_fisher_rao_refuses_other_families_by_name():
    for family in (DIAGONAL, PRODUCT):
        FisherRao().check(family)
    with pytest.raises(GuideError, match=r"'gaussian' .*full.*diagonal"):
        FisherRao().check(FULL)
    with pytest.raises(GuideError, match=r"'b' .*full"):
        FisherRao().check(expfam.product({"b": (slice(0, 2), FULL)}))


@pytest.mark.parametrize("value", [0, -1.0, np.inf, np.nan, True, "2"])
def test_weights_and_orders_must_be_positive(value):
    for build in (WeightedKL, AlphaRenyi):
        with pytest.raises(ValueError, match=r"positive number"):
            build(value)


def test_order_one_is_kl():
    with pytest.raises(ValueError, match=r"alpha .* 1.*KL"):
        AlphaRenyi(1)


def test_divergences_compare_hash_and_print():
    assert len({KL(), KL(), WeightedKL(1), WeightedKL(1.0), AlphaRenyi(0.5)}) == 3
    assert repr(WeightedKL(np.float32(0.5))) == "WeightedKL(weight=0.5)"
