"""Losses against sums and quadrature, in their limits, far out, and where they are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from cases import slow_but
from scipy import integrate, stats

from numpyro_fed.basics.errors import ModelError
from numpyro_fed.numerics.losses import (
    beta_loss,
    gamma_loss,
    generalised_cross_entropy,
    log_loss,
    log_power_integral,
)

LOSSES = [log_loss, beta_loss(1.5), gamma_loss(1.3), generalised_cross_entropy(0.7)]
PROBS = np.array([[0.2, 0.3, 0.5], [0.0, 0.9, 0.1]], np.float32)
SUPPORTED = [
    (dist.Bernoulli(0.3), 1),
    (dist.Bernoulli(logits=np.array([-2.0, 0.5])), np.array([1, 0])),
    (dist.Categorical(PROBS), np.array([2, 1])),
    (dist.Categorical(logits=np.log(PROBS + 0.1)), np.array([0, 2])),
    (dist.Binomial(np.array([3, 7]), 0.4), np.array([1, 7])),
    (dist.Binomial(5, logits=np.array([-1.0, 2.0])), np.array([0, 4])),
    (dist.Poisson(np.array([0.5, 30.0])), np.array([2, 25])),
    (dist.Poisson(np.array([64.0, 2000.0])), np.array([70, 1950])),
    (dist.Normal(np.array([0.0, 1.0]), np.array([0.3, 2.0])), np.array([0.1, -1.0])),
]


def masses(d):
    """All the probabilities that matter of each element of a batch, along the last axis."""
    if isinstance(d, dist.Poisson):
        return stats.poisson.pmf(np.arange(4000), np.asarray(d.rate)[..., None])
    if isinstance(d, dist.BinomialProbs | dist.BinomialLogits):
        n, p = np.broadcast_arrays(d.total_count, d.probs)
        return stats.binom.pmf(np.arange(20), n[..., None], p[..., None])
    if isinstance(d, dist.BernoulliProbs | dist.BernoulliLogits):
        return np.stack([1 - np.asarray(d.probs), np.asarray(d.probs)], -1)
    return np.asarray(d.probs, np.float64)


def power_integral(d, power):
    if not isinstance(d, dist.Normal):
        return (masses(d) ** power).sum(-1)
    x = np.linspace(-60, 60, 200_001)[:, None]
    return integrate.trapezoid(stats.norm.pdf(x, d.loc, d.scale) ** power, x, axis=0)


NEAR_ONE = beta_loss(1 + 1e-6), gamma_loss(1 + 1e-6)
POWERS = 1.001, 1.5, 4.0


@pytest.fixture(scope="module")
def of_supported():
    """Of each of the distributions what the tests below compare, all from one program."""

    @jax.jit
    def found():
        return [
            {
                "integrals": [log_power_integral(d, power) for power in POWERS],
                "losses": [loss(d, y) for loss in LOSSES[: 4 if d.support.is_discrete else 3]],
                "near one": [loss(d, y) for loss in NEAR_ONE],
                "log_prob": d.log_prob(y),
            }
            for d, y in SUPPORTED
        ]

    return jax.tree.map(np.asarray, found())


EACH = pytest.mark.parametrize(
    "i", range(len(SUPPORTED)), ids=lambda i: f"{i}-{type(SUPPORTED[i][0]).__name__}"
)


@EACH
@pytest.mark.parametrize("power", POWERS)
def test_power_integrals_are_sums_and_integrals(i, power, of_supported):
    d, found = SUPPORTED[i][0], of_supported[i]["integrals"][POWERS.index(power)]
    assert found.shape == d.batch_shape
    np.testing.assert_allclose(np.exp(found), power_integral(d, power), rtol=3e-5)


@EACH
def test_losses_are_their_formulas(i, of_supported):
    d, found = SUPPORTED[i][0], of_supported[i]
    p = np.exp(np.asarray(found["log_prob"], np.float64))
    b, g, delta = 1.5, 1.3, 0.7
    log_score, of_beta, of_gamma, *of_delta = found["losses"]
    beta = -(p ** (b - 1)) / (b - 1) + power_integral(d, b) / b + 1 / (b - 1) - 1 / b
    gamma = 1 - p ** (g - 1) / power_integral(d, g) ** ((g - 1) / g)
    np.testing.assert_allclose(of_beta, beta, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(of_gamma, g / (g - 1) * gamma, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(log_score, -found["log_prob"], rtol=2e-6)
    assert len(of_delta) == d.support.is_discrete
    for values in of_delta:
        np.testing.assert_allclose(values, (1 - p**delta) / delta, rtol=1e-5)


@EACH
def test_near_one_the_loss_is_the_log_loss(i, of_supported):
    for found in of_supported[i]["near one"]:
        np.testing.assert_allclose(found, of_supported[i]["losses"][0], rtol=1e-4, atol=2e-5)


def test_near_zero_the_generalised_cross_entropy_is_the_log_loss():
    d = dist.Bernoulli(logits=30.0)
    np.testing.assert_allclose(generalised_cross_entropy(1e-7)(d, 0), log_loss(d, 0), rtol=1e-5)


def test_in_double_precision_the_poisson_rule_has_the_accuracy_it_promises():
    rates = np.array([0.0, 1e-3, 63.99, 64.0, 65.0, 300.0, 3000.0])
    terms = stats.poisson.logpmf(np.arange(5000), rates[:, None])
    powers = 1.0001, 2.0, 30.0
    with jax.enable_x64(True):
        found = jax.jit(lambda r: [log_power_integral(dist.Poisson(r), p) for p in powers])(rates)
    for power, values in zip(powers, found, strict=True):
        expected = np.log(np.exp(power * terms).sum(-1))
        np.testing.assert_allclose(values, expected, atol=1e-8)


def test_a_poisson_of_a_huge_rate_is_a_normal():
    rates = np.array([1e6, 1e12, 1e30])
    normal = dist.Normal(0, np.sqrt(rates))
    both = jax.jit(lambda r: [log_power_integral(d, 1.5) for d in (dist.Poisson(r), normal)])
    np.testing.assert_allclose(*both(rates), rtol=1e-5)


@pytest.mark.parametrize(
    ("d", "near", "far"),
    [(dist.Normal(0, 1), 10.0, 1e4), (dist.Poisson(2.0), 50.0, 1e4)],
)
def test_an_outlier_has_bounded_influence(d, near, far):
    losses = log_loss, beta_loss(1.5), gamma_loss(1.5)

    @jax.jit
    def found(loc, places):
        pull = jax.grad(lambda loc: beta_loss(1.5)(dist.Normal(loc, 1), far))(loc)
        return pull, [(loss(d, places[0]), loss(d, places[1])) for loss in losses]

    pull, ((near_log, far_log), *others) = found(0.0, np.array([near, far]))
    assert far_log > 100 * near_log
    for (at_near, at_far), bound in zip(others, (2.0, 3.0), strict=True):
        assert abs(at_far - at_near) < 1e-5
        assert at_far <= bound
    assert abs(pull) < 1e-6


def test_a_label_that_is_wrong_costs_at_most_one_over_delta():
    d = dist.Bernoulli(logits=50.0)
    assert log_loss(d, 0) == 50
    assert generalised_cross_entropy(0.5)(d, 0) <= 2


@pytest.mark.parametrize(
    ("build", "at", "values"),
    slow_but(
        [
            (lambda x: dist.Bernoulli(logits=x), [-50.0, 0.0, 50.0], [1, 1, 0]),
            (lambda x: dist.Bernoulli(x), [0.0, 0.5, 1.0], [1, 1, 0]),
            (lambda x: dist.Categorical(logits=x), [50.0, -50.0, 0.0], 1),
            (lambda x: dist.Categorical(x), [0.0, 1.0, 0.0], 0),
            (lambda x: dist.Binomial(9, logits=x), [-50.0, 0.0, 50.0], [9, 4, 0]),
            (lambda x: dist.Binomial(9, x), [0.0, 0.5, 1.0], [1, 5, 8]),
            (lambda x: dist.Binomial(jnp.array(9000), logits=x), [-50.0, 0.0, 50.0], [9000, 4, 0]),
            (lambda x: dist.Poisson(x), [1e-20, 1.0, 64.0, 1e6], [3, 0, 64, 2]),
            (lambda x: dist.Normal(x, 1.0), [0.0, 0.0], [0.0, 1e6]),
        ],
        0,
        7,
    ),
)
def test_values_and_gradients_are_finite_at_extremes(build, at, values):
    suited = LOSSES[1:] if build(jnp.array(at)).support.is_discrete else LOSSES[1:3]

    def each(x):
        return jnp.stack([loss(build(x), jnp.array(values)).sum() for loss in suited])

    both = jax.jit(lambda x: (each(x), jax.jacrev(each)(x)))
    for found in both(jnp.array(at)):
        assert np.isfinite(found).all()


@pytest.mark.slow
def test_gradients_are_those_of_finite_differences():
    def check(build, x, y):
        @jax.jit
        def total(x):
            return (beta_loss(1.5)(build(x), y) + gamma_loss(1.3)(build(x), y)).sum()

        h = 1e-5
        expected = (total(x + h) - total(x - h)) / (2 * h)
        np.testing.assert_allclose(jax.jit(jax.grad(total))(x).sum(), expected, rtol=1e-6)

    with jax.enable_x64(True):
        check(dist.Poisson, jnp.array([30.0, 63.0, 90.0]), jnp.array([25, 64, 100]))
        check(lambda x: dist.Binomial(6, logits=x), 0.7, 2)
        check(lambda x: dist.Binomial(jnp.array([300, 250]), logits=x), 0.7, jnp.array([200, 170]))
        check(lambda x: dist.Normal(0.3, x), 0.7, 1.0)


def test_a_vector_is_a_product_and_a_masked_part_is_left_out():
    loc, y = np.array([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]), np.zeros((2, 3))
    mask = np.array([[True, True, False], [False, False, False]])
    vector = dist.Normal(loc, 1.0).to_event(1)
    part = dist.Normal(loc, 1.0).mask(mask).to_event(1)
    first = dist.Normal(loc[0, :2], 1.0).to_event(1)
    wide, none = dist.Normal(loc[:, :1], 1.0).expand([2, 3]), dist.Normal(0, 1).expand([4])

    @jax.jit
    def found():
        each = dist.Normal(loc, 1.0)
        integrals = log_power_integral(vector, 1.5), log_power_integral(each, 1.5).sum(-1)
        losses = [
            (
                (loss(part, y), jnp.stack([loss(first, y[0, :2]), 0.0])),
                (loss(none.mask(False), 9.0), np.zeros(4)),
                (loss(wide, y), loss(dist.Normal(wide.mean, 1), y)),
            )
            for loss in LOSSES[:3]
        ]
        return integrals, losses

    integrals, losses = found()
    np.testing.assert_allclose(*integrals, rtol=1e-6)
    for pairs in losses:
        for a, b in pairs:
            np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("loss", LOSSES[1:3], ids=repr)
@pytest.mark.parametrize(
    ("d", "name"),
    [
        (dist.StudentT(3.0), "StudentT"),
        (dist.NegativeBinomial2(1.0, 2.0).expand([2]).to_event(1), "NegativeBinomial2"),
        (dist.MultivariateNormal(np.zeros(2), np.eye(2)).mask(np.array(True)), "Multivariate"),
    ],
)
def test_other_distributions_are_refused_by_name(loss, d, name):
    with pytest.raises(ModelError, match=rf"{name}.*Bernoulli.*Poisson.*loss of your own"):
        loss(d, d.mean)


def test_a_subclass_is_refused_for_its_density_may_differ():
    class Tilted(dist.Normal):
        def log_prob(self, value):
            return super().log_prob(value) + value

    with pytest.raises(ModelError, match="Tilted"):
        beta_loss(1.5)(Tilted(0.0, 1.0), 0.0)


def test_what_has_no_such_loss_is_refused():
    for d in (dist.Poisson(3.0), dist.Binomial(9, 0.5).expand([2])):
        with pytest.raises(ModelError, match=r"64, got 65.0"):
            beta_loss(65)(d, 1)
    with pytest.raises(ModelError, match=r"discrete .*Normal.* beta_loss"):
        generalised_cross_entropy(0.5)(dist.Normal(0, 1).expand([2]), 0.0)


@pytest.mark.parametrize("power", [1.0001, 1.5, 30.0])
def test_a_binomial_has_totals_that_are_data(power):
    totals = np.array([1, 5, 159, 160, 161, 255, 258, 5000, 10**5])
    p = np.array([1e-9, 1e-3, 0.3, 0.5, 0.7, 1 - 1e-7])
    n, q = np.broadcast_arrays(totals[:, None], p)
    k = np.arange(totals.max() + 1)
    terms = [stats.binom.logpmf(k, total, p[:, None]) for total in totals]
    expected = np.logaddexp.reduce(power * np.stack(terms), axis=-1)
    with jax.enable_x64(True):
        found = jax.jit(lambda q, n: log_power_integral(dist.Binomial(n, q), power))(q, n)
        np.testing.assert_allclose(found, expected, atol=1e-8)
        logits = np.log(q) - np.log1p(-q)
        found = jax.jit(lambda x, n: log_power_integral(dist.Binomial(n, logits=x), power))(
            logits, n
        )
        np.testing.assert_allclose(found, expected, atol=1e-8)


@pytest.mark.parametrize("build", [beta_loss, gamma_loss])
@pytest.mark.parametrize("value", [1, 0.5, np.inf, np.nan, True, "1.5", None])
def test_a_power_must_be_above_one(build, value):
    with pytest.raises(ValueError, match=r"above 1.*log_loss"):
        build(value)


@pytest.mark.parametrize("value", [0, 1.1, -1, np.nan, True, "0.5"])
def test_delta_must_be_in_its_range(value):
    with pytest.raises(ValueError, match=r"delta must be a number in \(0, 1\]"):
        generalised_cross_entropy(value)


def test_losses_compare_hash_and_print():
    assert beta_loss(2) == beta_loss(np.float32(2.0))
    assert len({beta_loss(2), beta_loss(2.0), gamma_loss(2), log_loss}) == 3
    assert repr([log_loss, beta_loss(np.float64(1.5))]) == "[log_loss, beta_loss(beta=1.5)]"
