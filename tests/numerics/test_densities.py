"""Log densities are exact where NumPyro's are made of rounding, and never NaN or infinite above."""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.distributions import biject_to, transforms
from scipy import special, stats

import numpyro_fed as nf
from numpyro_fed.data.silo_data import read
from numpyro_fed.numerics.accurate_densities import (
    accurate,
    log_prob,
    log_rising,
    no_more_than_finite,
    softplus,
)
from numpyro_fed.numerics.losses import beta_loss, gamma_loss, generalised_cross_entropy, log_loss
from numpyro_fed.search.expand import prior_draws
from numpyro_fed.text.split import split
from numpyro_fed.text.values import NotFinite, first_not_finite, first_without_density
from numpyro_fed.weigh.proposals import spread_of

SIZES = np.array([5.0, 20.0, 40.0, 300.0, 700.0, 745.0, 1000.0])
MODERATE = np.random.default_rng(0).normal(size=(40, 6)) * np.repeat([1.0, 3.0], 20)[:, None]


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def plain_priors():
    """Priors of one number, or of few without matrices."""
    normal = dist.Normal(0.0, 5.0).expand([3]).to_event(1)
    return {
        "gamma": dist.Gamma(1e-3, 1e-3),
        "gamma 2": dist.Gamma(2.0, 1.0),
        "inverse gamma": dist.InverseGamma(1e-3, 1e-3),
        "inverse gamma 3": dist.InverseGamma(3.0, 1.0),
        "Weibull": dist.Weibull(1.0, 0.5),
        "Weibull 2": dist.Weibull(1.0, 2.0),
        "Gompertz": dist.Gompertz(1.0, 1.0),
        "chi squared": dist.Chi2(1.0),
        "exponential": dist.Exponential(1.0),
        "Dirichlet": dist.Dirichlet(0.5 * jnp.ones(3)),
        "Dirichlet 2": dist.Dirichlet(2.0 * jnp.ones(3)),
        "beta": dist.Beta(0.5, 0.5),
        "beta 2": dist.Beta(2.0, 3.0),
        "beta by mean": dist.BetaProportion(0.3, 4.0),
        "Kumaraswamy": dist.Kumaraswamy(0.5, 0.5),
        "half Cauchy": dist.HalfCauchy(1.0),
        "half normal": dist.HalfNormal(1.0),
        "Student": dist.StudentT(3.0, 0.0, 1.0),
        "half Student": dist.FoldedDistribution(dist.StudentT(3.0, 0.0, 1.0)),
        "Gumbel": dist.Gumbel(0.0, 1.0),
        "Laplace": dist.Laplace(0.0, 1.0),
        "logistic": dist.Logistic(0.0, 1.0),
        "Cauchy": dist.Cauchy(0.0, 1.0),
        "normal": dist.Normal(0.0, 1.0),
        "Pareto": dist.Pareto(1.0, 2.0),
        "log normal": dist.LogNormal(0.0, 2.0),
        "log uniform": dist.LogUniform(1e-3, 1e3),
        "uniform": dist.Uniform(-1.0, 2.0),
        "truncated": dist.TruncatedNormal(0.0, 1.0, low=-1.0, high=2.0),
        "truncated below": dist.TruncatedNormal(-50.0, 1.0, low=0.0),
        "truncated above": dist.TruncatedNormal(50.0, 1.0, high=0.0),
        "truncated Cauchy": dist.TruncatedCauchy(0.0, 1.0, low=0.5),
        "ordered": dist.TransformedDistribution(normal, transforms.OrderedTransform()),
        "von Mises": dist.VonMises(0.0, 2.0),
        "Levy": dist.Levy(0.0, 1.0),
        "asymmetric Laplace": dist.AsymmetricLaplace(0.0, 1.0, 2.0),
        "power law": dist.LowerTruncatedPowerLaw(-2.5, 1.0),
    }


def matrix_priors():
    return {
        "LKJ": dist.LKJ(3, 2.0),
        "LKJ half": dist.LKJ(3, 0.5),
        "LKJ root": dist.LKJCholesky(3, 2.0),
        "Wishart": dist.Wishart(3.0, rate_matrix=jnp.eye(2)),
        "Wishart root": dist.WishartCholesky(3.0, rate_matrix=jnp.eye(2)),
        "inverse Wishart": dist.InverseWishart(3.0, scale_matrix=jnp.eye(2)),
        "Student of two": dist.MultivariateStudentT(3.0, jnp.zeros(2), jnp.eye(2)),
        "normal of two": dist.MultivariateNormal(jnp.zeros(2), jnp.eye(2)),
    }


def likelihoods(a, b):
    """Distributions of an outcome, with two latents of unconstrained space."""
    p, s = jax.nn.sigmoid(a), jnp.exp(b)
    three = jnp.stack([a, b, 0.0 * a])
    return {
        "Poisson": (dist.Poisson(jnp.exp(a)), 3),
        "Poisson at 0": (dist.Poisson(jnp.exp(a)), 0),
        "negative binomial": (dist.NegativeBinomial2(jnp.exp(a), s), 3),
        "negative binomial of logits": (dist.NegativeBinomialLogits(s, a), 3),
        "negative binomial of probs": (dist.NegativeBinomialProbs(s, p), 3),
        "beta binomial": (dist.BetaBinomial(s * p, s * (1 - p), 10), 3),
        "binomial": (dist.Binomial(10, logits=a), 3),
        "binomial of probs": (dist.Binomial(10, probs=p), 3),
        "Bernoulli": (dist.Bernoulli(probs=p), 1),
        "zero inflated": (dist.ZeroInflatedPoisson(p, s), 0),
        "zero inflated at 3": (dist.ZeroInflatedPoisson(p, s), 3),
        "normal": (dist.Normal(a, s), 0.5),
        "log normal": (dist.LogNormal(a, s), 0.5),
        "Student": (dist.StudentT(s, a, 1.0), 0.5),
        "Student's scale": (dist.StudentT(4.0, a, s), 0.5),
        "gamma": (dist.Gamma(s, s / jnp.exp(a)), 0.5),
        "Weibull": (dist.Weibull(jnp.exp(a), s), 0.5),
        "Gumbel": (dist.Gumbel(a, s), 0.5),
        "beta": (dist.Beta(s * p, s * (1 - p)), 0.5),
        "truncated": (dist.TruncatedNormal(a, s, low=0.0, high=1.5), 0.5),
        "truncated below": (dist.TruncatedNormal(a, s, low=0.0), 0.5),
        "categorical": (dist.Categorical(logits=three), 1),
        "multinomial": (dist.Multinomial(5, jax.nn.softmax(three)), jnp.array([2, 0, 3])),
        "ordered": (dist.OrderedLogistic(a, jnp.stack([0.0 * b, s])), 1),
        "exponential": (dist.Exponential(s), 0.5),
        "von Mises": (dist.VonMises(a, s), 0.5),
        "mixture": (
            dist.MixtureSameFamily(
                dist.Categorical(logits=jnp.stack([a, 0 * a])),
                dist.Normal(jnp.stack([a, b]), jnp.stack([s, 1 + 0 * s])),
            ),
            0.5,
        ),
    }


HALF = 0.5 * np.log(2 * np.pi)


def at(fn, value):
    return log_prob({"fn": fn, "value": value, "intermediates": None, "scale": None})


def prior_at(fn, signs, size):
    """The log density, in unconstrained space, at ``size`` times a vector of numbers."""
    bijection = biject_to(fn.support)
    shape = bijection.inverse_shape(fn.shape())
    z = size * jnp.resize(signs, shape)
    value = bijection(z)
    log_det = 0.0 if value is z else jnp.sum(bijection.log_abs_det_jacobian(z, value))
    return no_more_than_finite(at(fn, value) + no_more_than_finite(log_det))


def check_far_out(priors):
    signs = np.stack([np.ones(6), -np.ones(6), np.tile([1.0, -1.0], 3), np.tile([-1.0, 1.0], 3)])

    @jax.jit
    def everywhere():
        def of(fn):
            far = jax.vmap(lambda s: jax.vmap(lambda r: prior_at(fn, s, r))(SIZES))(signs)
            return far, jax.vmap(lambda s: prior_at(fn, s, 1.0))(MODERATE)

        return {name: of(fn) for name, fn in priors.items()}

    for name, (far, near) in everywhere().items():
        assert not np.isnan(far).any(), name
        assert (far < np.inf).all(), name
        assert far.max() < near.max() + 1.0, name  # no mode where there is none


@pytest.mark.slow
@pytest.mark.parametrize("priors", [plain_priors, matrix_priors])
def test_no_prior_is_infinite_or_higher_far_out(priors):
    check_far_out(priors())


def test_the_priors_that_were_infinite_far_out_are_not():
    names = "inverse gamma", "Gompertz", "Dirichlet", "truncated below"
    check_far_out({n: plain_priors()[n] for n in names})


@pytest.mark.slow
def test_no_likelihood_is_infinite_far_out():
    signs = np.array([[1, 1], [1, -1], [-1, 1], [-1, -1], [1, 0], [-1, 0], [0, 1], [0, -1]])
    places = (SIZES[:, None, None] * signs).reshape(-1, 2)

    @jax.jit
    @jax.vmap
    def everywhere(z):
        return {name: at(*pair) for name, pair in likelihoods(*z).items()}

    counts = {"Poisson", "binomial", "Bernoulli", "categorical", "multinomial", "ordered"}
    for name, found in everywhere(places).items():
        assert not np.isnan(found).any(), name
        assert (found < np.inf).all(), name
        if any(name.startswith(n) for n in (*counts, "negative", "beta bin", "zero")):
            assert (found <= 1e-9).all(), name  # the probability of a count is at most one


def test_a_ratio_of_gamma_functions_is_exact_at_any_size():
    a = np.exp(np.linspace(-20, 300, 641))
    for k in (0, 1, 5, 60):
        factors = a[:, None] + np.arange(k)
        expected = np.log(factors).sum(1)
        np.testing.assert_allclose(log_rising(jnp.asarray(a), k), expected, rtol=1e-13, atol=1e-11)


Y = np.array([0.0, 1.0, 3.0, 5.0, 7.0])
TWO = np.stack([Y, 10.0 - Y], 1)


@jax.jit
def large_and_limits(log_size):
    """Log densities at a large dispersion, each with its limit."""
    size = jnp.exp(log_size)
    binomial = dist.Binomial(10, probs=0.3).log_prob(Y)
    poisson = dist.Poisson(3.0).log_prob(Y)
    normal = dist.Normal(1.0, 2.0).log_prob(Y)
    negative_binomial = dist.NegativeBinomialProbs(4.0, 0.3).log_prob(Y)
    zeros, eye = jnp.zeros(2), jnp.eye(2)
    shares = jnp.array([0.3, 0.7])
    limits = [
        (dist.NegativeBinomial2(3.0, size), Y, poisson),
        (dist.NegativeBinomialLogits(size, jnp.log(3.0) - log_size), Y, poisson),
        (dist.GammaPoisson(size, size / 3.0), Y, poisson),
        (dist.BetaBinomial(0.3 * size, 0.7 * size, 10), Y, binomial),
        (dist.DirichletMultinomial(shares * size, 10), TWO, binomial),
        (dist.BetaNegativeBinomial(0.3 * size, 0.7 * size, 4.0), Y, negative_binomial),
        (dist.StudentT(size, 1.0, 2.0), Y, normal),
        (dist.MultivariateStudentT(size, zeros, eye), TWO, dist.MultivariateNormal(zeros, eye)),
        (dist.TruncatedNormal(1.0, size, low=0.0, high=8.0), Y, jnp.full(5, -jnp.log(8.0))),
    ]
    return [
        (at(fn, y), limit.log_prob(y) if isinstance(limit, dist.Distribution) else limit)
        for fn, y, limit in limits
    ]


@pytest.mark.parametrize("log_size", [20.0, 30.0, 35.0, 40.0, 300.0])
def test_a_large_dispersion_has_its_limit(log_size):
    """Rounding put these up to three nats a row too high, for ever: a plateau without mass."""
    for found, limit in large_and_limits(log_size):
        np.testing.assert_allclose(found, limit, rtol=1e-6, atol=1e-6)


def ordinary(log_size, log_mean):
    """Distributions and values where the numbers of NumPyro are good."""
    size = jnp.exp(jnp.linspace(-3.0, 3.0, 5) + log_size)
    mean = jnp.array([0.2, 0.9, 2.0, 4.0, 30.0]) * jnp.exp(log_mean)
    tril, p = jnp.array([[1.0, 0.0], [0.5, 2.0]]), jax.nn.sigmoid(log_mean - 1.0)
    shares, share = jnp.stack([p, 1 - p]), jnp.array([0.1, 0.3, 0.5, 0.7, 0.99])
    of_three = jnp.array([[0.1, 0.2, 0.7], [0.3, 0.3, 0.4], [0.8, 0.1, 0.1]])
    negative = dist.NegativeBinomial2(mean, size)
    return [
        (negative, Y),
        (negative.to_event(1), Y),
        (negative.mask(jnp.arange(5) < 3), Y),
        (dist.NegativeBinomial2(mean[0], size[3]).expand([5]), Y),
        (dist.ZeroInflatedNegativeBinomial2(mean, size, gate=0.3), Y),
        (dist.MixtureSameFamily(dist.Categorical(probs=shares), dist.Poisson(TWO + mean[1])), Y),
        (dist.NegativeBinomialProbs(size, p), Y),
        (dist.NegativeBinomialLogits(size, log_mean), Y),
        (dist.BetaBinomial(size, mean, 10), Y),
        (dist.BetaNegativeBinomial(size, mean, 3.0), Y),
        (dist.DirichletMultinomial(size[:, None] * shares, 10), TWO),
        (dist.Beta(size, mean), share),
        (dist.Beta(40 * size, 30 * mean), share),
        (dist.BetaProportion(p, 20 * size), share),
        (dist.Gamma(size, mean), mean[::-1]),
        (dist.Gamma(20 * size, 20 * size / mean), Y + 0.5),
        (dist.Chi2(size), mean),
        (dist.InverseGamma(size, mean), mean[::-1]),
        (dist.InverseGamma(20 * size, 20 * size * mean), Y + 0.5),
        (dist.Dirichlet(size[:3]), of_three),
        (dist.Dirichlet(10 * size[:, None, None] * of_three), of_three[::-1]),
        (dist.Dirichlet(5 * size[::2]), jax.nn.softmax(jnp.stack([log_mean, log_size, 0.3]))),
        (dist.StudentT(size, mean, 2.0), Y),
        (dist.MultivariateStudentT(size, mean[:2], scale_tril=size[3] * tril), TWO),
        (dist.Poisson(mean), Y),
        (dist.Multinomial(10, probs=shares), TWO),
        (dist.Bernoulli(probs=p), np.array([0, 1, 0, 1, 1])),
        (dist.Binomial(10, probs=p), Y),
        (dist.Bernoulli(logits=log_mean - 1.0), np.array([0, 1, 0, 1, 1])),
        (dist.Binomial(10, logits=log_mean - 1.0), Y),
        (dist.Geometric(probs=p), Y),
        (dist.OrderedLogistic(mean, jnp.array([0.3, 0.5, 2.0])), np.array([0, 3, 1, 2, 3])),
        (dist.OrderedLogistic(mean, jnp.array([0.3])), np.array([0, 1, 1, 0, 1])),
        (dist.TruncatedNormal(mean - 2, size, low=0.0), Y),
        (dist.TruncatedNormal(mean, size, high=8.0), Y),
        (dist.TruncatedNormal(mean, size, low=0.0, high=8.0), Y),
    ]


@pytest.mark.slow
def test_elsewhere_the_numbers_are_numpyros():
    names = []

    @jax.jit
    def both(log_size, log_mean):
        pairs = ordinary(log_size, log_mean)
        assert all(accurate(fn) is not fn for fn, _ in pairs)
        names.extend(f"{i}: {type(fn).__name__}" for i, (fn, _) in enumerate(pairs))
        return [(accurate(fn).log_prob(y), fn.log_prob(y)) for fn, y in pairs]

    found = both(0.0, 0.0)
    for name, (mine, theirs) in zip(names, found, strict=True):
        assert mine.shape == theirs.shape
        # NumPyro's betaln has five digits.
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-12, err_msg=name)
    assert accurate(normal := dist.Normal(Y, 1.0).to_event(1)) is normal


def test_components_of_a_mixture_are_accurate_each_by_itself():
    def mixture(*components):
        return dist.MixtureGeneral(dist.Categorical(probs=np.array([0.3, 0.7])), list(components))

    far = dist.Gamma(1e7, 1e7), dist.HalfNormal(1.0)
    better = accurate(mixture(*far))
    assert better.component_distributions[0] is not far[0]
    assert better.component_distributions[1] is accurate(far[1]) is far[1]
    normal = np.log(2.0) - 0.5 - HALF
    expected = np.logaddexp(np.log(0.3) + accurate(far[0]).log_prob(1.0), np.log(0.7) + normal)
    np.testing.assert_allclose(better.log_prob(1.0), expected, rtol=1e-5)


@pytest.mark.slow
def test_elsewhere_the_derivatives_are_numpyros():
    def sums(t, change):
        rows = [change(fn).log_prob(y) for fn, y in ordinary(t, 0.7 * t)]
        return jnp.stack([r.ravel() @ jnp.linspace(1.0, 2.0, r.size) for r in rows])

    @partial(jax.jit, static_argnums=0)
    def derivatives(change):
        first = jax.jacfwd(partial(sums, change=change))
        return first(0.0), jax.jacfwd(first)(0.0)

    for mine, theirs in zip(derivatives(accurate), derivatives(lambda fn: fn), strict=True):
        assert np.isfinite(mine).all()
        # NumPyro has no second derivative of a normal truncated below.
        theirs = np.where(np.isnan(theirs), mine, theirs)
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-8)


def test_a_finite_number_of_numpyros_at_an_edge_stays_finite():
    """A negative binomial whose mean is zero by design was impossible, and so was the model."""
    some, edge = jnp.array([0.0, 1.0, 2.0]), jnp.array([0.0, 1.0, 0.5])
    y = np.array([0, 1, 3])
    found = [
        (dist.NegativeBinomial2(some, 2.0), y),
        (dist.ZeroInflatedNegativeBinomial2(some, 2.0, gate=0.3), y),
        (dist.NegativeBinomialProbs(2.0, 0.25 * some), y),
        (dist.NegativeBinomialProbs(2.0, 0.0), 0),
        (dist.NegativeBinomialLogits(2.0, jnp.log(some), validate_args=False), y),
        (dist.GammaPoisson(2.0, jnp.inf), 0),
        (dist.Poisson(some), y),
        (dist.Binomial(3, probs=edge), np.array([0, 3, 1])),
        (dist.Binomial(3, probs=edge), np.array([1, 1, 1])),
        (dist.Bernoulli(probs=edge), np.array([0, 1, 1])),
        (dist.Bernoulli(probs=edge), np.array([1, 0, 1])),
        (dist.Geometric(probs=jnp.array([0.0, 0.5])), np.array([1, 2])),
        (dist.Multinomial(3, probs=jnp.array([0.0, 0.5, 0.5])), np.array([0, 1, 2])),
        (dist.Beta(1.0, 2.0), edge),
        (dist.Beta(2.0, 1.0), edge),
    ]
    both = jax.jit(lambda: [(accurate(fn).log_prob(v), fn.log_prob(v)) for fn, v in found])
    for (fn, _), (mine, theirs) in zip(found, both(), strict=True):
        is_finite = np.isfinite(theirs)
        assert is_finite.any(), fn
        mine, theirs = (np.where(is_finite, v, 0.0) for v in (mine, theirs))
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-12)
    assert jax.jit(accurate(dist.Geometric(probs=1.0)).log_prob)(0) == 0


def test_a_multivariate_student_density_has_its_derivatives_at_its_centre():
    """They were half, since the squared distance was bounded below by the zero that it had."""
    root = np.array([[2.0, 0.0], [0.5, 1.0]])
    fn = dist.MultivariateStudentT(4.0, np.ones(2), scale_tril=root)
    many = dist.MultivariateStudentT(4.0, np.ones((3, 1, 2)), scale_tril=np.stack([root] * 2))

    @jax.jit
    def both(y, of_many):
        def of(log_prob):
            return jax.vmap(jax.grad(log_prob))(y), jax.vmap(jax.hessian(log_prob))(y)

        values = accurate(many).log_prob(of_many), many.log_prob(of_many)
        return of(accurate(fn).log_prob), of(fn.log_prob), values

    centre_and_near = np.ones((2, 2)) + np.array([[0.0, 0.0], [1e-9, -2e-9]])
    mine, theirs, values = both(centre_and_near, np.arange(48.0).reshape(4, 3, 2, 2))
    for a, b in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(*values)


def test_a_dirichlet_density_has_the_derivatives_of_powers():
    """Each share on its own: that they sum to one is known to the transform alone."""
    a, x = np.array([0.5, 2.0, 7.0]), np.array([0.2, 0.3, 0.5])
    found = jax.jit(jax.grad(accurate(dist.Dirichlet(a)).log_prob))(x)
    np.testing.assert_allclose(found, (a - 1) / x)


def test_a_probability_of_zero_by_design_has_its_gradient():
    """It was NaN: a person who is not at risk is expected no events, and has none."""
    at_risk, events = np.array([1.0, 0.0]), np.array([2, 0])

    def poisson(b):
        return at(dist.Poisson(at_risk * jnp.exp(b)), events).sum()

    def multinomial(b):
        p = jnp.stack([jax.nn.sigmoid(b), 0.0 * b, jax.nn.sigmoid(-b)])
        return at(dist.Multinomial(3, probs=p), np.array([3, 0, 0]))

    def binomial(b):
        return at(dist.Binomial(3, probs=at_risk * jax.nn.sigmoid(b)), events).sum()

    def bernoulli(b):
        return at(dist.Bernoulli(probs=at_risk * jax.nn.sigmoid(b)), np.array([1, 0])).sum()

    def negative_binomial(b):
        fn = dist.NegativeBinomialProbs(2.0, at_risk * jax.nn.sigmoid(b))
        return at(fn, events).sum()

    p = 1 / (1 + np.exp(-0.3))
    expected = [
        (poisson, 2 - np.exp(0.3), -np.exp(0.3)),
        (multinomial, 3 * (1 - p), -3 * p * (1 - p)),
        (binomial, 2 - 3 * p, -3 * p * (1 - p)),
        (bernoulli, 1 - p, -p * (1 - p)),
        (negative_binomial, 2 - 4 * p, -4 * p * (1 - p)),
    ]

    @jax.jit
    def derivatives(b):
        return [(jax.grad(f)(b), jax.hessian(f)(b)) for f, *_ in expected]

    for found, (_, *slope_and_curvature) in zip(derivatives(0.3), expected, strict=True):
        np.testing.assert_allclose(found, slope_and_curvature)


def test_the_log_of_one_plus_an_exponential_is_exact_with_its_derivatives(double):
    x = np.concatenate([np.linspace(-40, 40, 4_001), [-800, 800, -1e-300, -np.inf, np.inf]])
    exact, sigmoid = np.logaddexp(0, x), special.expit(x)

    @jax.jit
    def found(x, single):
        slope = jax.grad(softplus)
        first, second = jax.vmap(slope)(x), jax.vmap(jax.grad(slope))(x[:-2])
        return softplus(x), first, second, softplus(single)

    value, first, second, single = map(np.asarray, found(x, x.astype(np.float32)))
    np.testing.assert_allclose(value, exact, rtol=1e-15)
    np.testing.assert_allclose(first, sigmoid, rtol=1e-14)
    np.testing.assert_allclose(second, (sigmoid * special.expit(-x))[:-2], rtol=1e-13, atol=1e-15)
    single = single.astype(float)
    np.testing.assert_allclose(single, np.logaddexp(0, np.float32(x).astype(float)), rtol=4e-7)


def test_outcomes_by_logits_have_their_probabilities(double):
    logits, n = np.linspace(-30, 30, 61), 5
    of_counts = log_prob_of(dist.Binomial(n, logits=logits), np.arange(n + 1)[:, None])
    for y, found in enumerate(of_counts):
        p, q = special.log_expit(logits), special.log_expit(-logits)
        exact = np.log(special.comb(n, y)) + y * p + (n - y) * q
        np.testing.assert_allclose(found, exact, rtol=1e-13, atol=1e-13)
    one = log_prob_of(dist.Bernoulli(logits=logits), 1)
    np.testing.assert_allclose(one, special.log_expit(logits), rtol=1e-12, atol=1e-14)


def log_prob_of(fn, value):
    return np.asarray(jax.jit(accurate(fn).log_prob)(value))


def test_a_truncated_normal_far_beyond_its_bound_is_an_exponential():
    def density(mean, low=0.0):
        return at(dist.TruncatedNormal(mean, 1.0, low=low, high=3.0), jnp.array(0.5))

    mirrored = dist.TruncatedNormal(-200.0, 1.0, low=0.0, high=3.0)

    @jax.jit
    def found():
        of_both = density(203.0, 0.0), at(mirrored, jnp.array(2.5))
        return *jax.value_and_grad(density)(-200.0), of_both

    value, slope, of_both = found()
    np.testing.assert_allclose(value, np.log(200.0) - 0.5 * 200 - 0.125, atol=1e-4)
    np.testing.assert_allclose(slope, 0.5 - 1 / 200, atol=1e-5)
    np.testing.assert_allclose(*of_both)


@pytest.mark.parametrize(
    ("base", "frozen"),
    [
        (dist.Exponential(2.0), stats.expon(scale=0.5)),
        (dist.Weibull(3.0, 1.7), stats.weibull_min(1.7, scale=3.0)),
        (dist.Normal(1.0, 2.0), stats.norm(1.0, 2.0)),
        (dist.LogNormal(0.3, 0.8), stats.lognorm(0.8, scale=np.exp(0.3))),
        (dist.Gamma(2.0, 3.0), stats.gamma(2.0, scale=1 / 3)),
    ],
)
def test_a_time_that_is_a_lower_bound_has_its_log_survival_far_out(base, frozen):
    far = not isinstance(base, dist.Gamma)  # which has no formula here, and is NumPyro's
    times = np.array([0.3, 1.0, 2.5, *([20.0, 60.0] if far else [])])
    for censored in (0, 1):
        d = accurate(dist.RightCensoredDistribution(base, jnp.full(len(times), censored)))
        expected = frozen.logsf(times) if censored else frozen.logpdf(times)
        np.testing.assert_allclose(d.log_prob(times), expected, rtol=1e-8)


def test_a_class_of_the_users_own_keeps_its_density():
    class Mine(dist.StudentT):
        def log_prob(self, value):
            return -jnp.abs(value)

    assert float(accurate(Mine(3.0)).log_prob(jnp.array(2.5))) == -2.5


def test_no_function_of_a_model_is_nan_or_infinite_above():
    """The search, the weights and the nodes all see these."""

    def model(y):
        v = numpyro.sample("v", dist.InverseGamma(1e-3, 1e-3))
        with nf.silo_plate("row", y.shape[0]):
            b = numpyro.sample("b", dist.InverseGamma(1.0, 1.0))
            numpyro.sample("y", dist.Normal(0.0, jnp.sqrt(v) + b), obs=y)

    y = np.ones(3)
    silo = read([{"y": y}])[0]
    fm = split(model, [silo])
    assert fm.log_prior({}, jnp.array([-700.0])) == -jnp.inf
    z_L = {"row": jnp.array([[0.0], [-700.0], [0.5]])}
    rows = fm.log_silo({}, jnp.zeros(1), z_L, silo)["row"]
    assert (rows > -jnp.inf).tolist() == [True, False, True]


def silos_with(x):
    y = np.arange(6.0)
    return [dict(x=np.ones(4), y=y[:4]), dict(x=np.asarray(x), y=y)]


def of_text(x_to_mean, silos):
    def model(x, y):
        b = numpyro.sample("b", dist.Normal(0, 1))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(x_to_mean(b, x), 1.0), obs=y)

    found = read(silos)
    return split(model, found), list(enumerate(found))


@pytest.mark.slow
def test_a_derivative_that_is_not_finite_is_found_with_its_row():
    """The power is 0 where it is computed and not taken, and its derivative is NaN."""

    def mean(b, x):
        return jnp.where(x > 0, jnp.exp(b * jnp.log(x)), 0.0)

    found = first_not_finite(*of_text(mean, silos_with([1.0, 2.0, 1.0, 0.0, 3.0, 0.0])))
    assert found == NotFinite("y", 1, 3, True)
    for part in ("'y', silo 1, row 3", "derivatives are not", "jnp.where", "mask"):
        assert part in str(found)

    def mended(b, x):
        return jnp.where(x > 0, jnp.exp(b * jnp.log(jnp.where(x > 0, x, 1.0))), 0.0)

    assert first_not_finite(*of_text(mended, silos_with(np.zeros(6)))) is None


def test_a_second_derivative_that_is_not_finite_is_found_with_its_row():
    """The search needs it; the density and its gradient are finite."""

    def mean(b, x):
        return jnp.abs(b * x) ** 1.5

    found = first_not_finite(*of_text(mean, silos_with([1.0, 2.0, 1.0, 0.0, 3.0, 0.0])))
    assert found == NotFinite("y", 1, 3, True)


def test_a_loss_has_the_accurate_density():
    """It was off by hundreds of nats at a large dispersion."""
    large, limit, y = dist.GammaPoisson(1e17, 1e17 / 3.0), dist.Poisson(3.0), np.arange(6.0)
    near, at_zero = (log_loss, generalised_cross_entropy(0.5)), (beta_loss(1.5), gamma_loss(1.5))

    @jax.jit
    def found(rate):
        both = [(loss(large, y), loss(limit, y)) for loss in near]
        return both, [jax.grad(lambda r, f=f: f(dist.Poisson(r), 0))(rate) for f in at_zero]

    both, slopes = found(0.0)
    for a, b in both:
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert np.isfinite(slopes).all()


def test_a_density_that_is_not_finite_is_found_with_its_row():
    silos = silos_with([1.0, 2.0, -1.0, 1.0, 3.0, 1.0])
    found = first_not_finite(*of_text(lambda b, x: b + jnp.log(x), silos))
    assert found == NotFinite("y", 1, 2, False)
    assert "logarithm or a root of negative numbers" in str(found)


@pytest.mark.slow
def test_a_fit_refuses_a_text_whose_derivatives_are_nan():
    """It ran ten rounds from zero and gave advice on the size of steps."""

    def model(x, y):
        b = numpyro.sample("b", dist.Normal(0, 1))
        with nf.silo_plate("row", y.shape[0]):
            mean = jnp.where(x > 0, jnp.exp(b * jnp.log(x)), 0.0)
            numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    silos = silos_with([1.0, 2.0, 1.0, 0.0, 3.0, 0.0])
    with pytest.raises(nf.ModelError, match="site 'y', silo 1, row 3"):
        nf.fit(jax.random.key(0), model, silos, progress_bar=False)


def square_root(y):
    m = numpyro.sample("m", dist.Normal(0, 3))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(jnp.sqrt(m), 3.0), obs=y)


def test_a_density_that_is_nan_at_a_place_is_found_and_one_of_zero_is_none():
    found = read([{"y": np.ones(2)}, {"y": np.ones(3)}])
    fm, silos = split(square_root, found), list(enumerate(found))
    assert first_without_density(fm, {}, jnp.array([0.3]), silos) is None
    assert first_without_density(fm, {}, jnp.array([-0.3]), silos) == NotFinite("y", 0, 0, False)

    def bounded(y):
        m = numpyro.sample("m", dist.Normal(0, 3))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.factor("y", jnp.where(m > 0, 0.0, -jnp.inf) + 0.0 * y)

    assert first_without_density(split(bounded, found), {}, jnp.array([-0.3]), silos) is None


@pytest.mark.slow
def test_a_fit_whose_density_is_nan_at_ordinary_places_says_where():
    """Left out in silence, they would make the posterior another one than the text seems to say."""
    y = np.random.default_rng(0).normal(1.0, 1.0, 6)
    silos = [{"y": y[:2]}, {"y": y[2:]}]
    fitted = nf.fit(jax.random.key(0), square_root, silos, progress_bar=False)
    assert not fitted.trusted
    assert "the log density of 'y' (silo 0, row 0) is NaN or infinite at" in fitted.verdict
    assert "round number" not in fitted.verdict


def test_infinite_draws_of_a_vague_prior_cause_no_warning():
    """NumPy's "invalid value encountered in subtract" reached the user."""

    def model(y):
        v = numpyro.sample("v", dist.InverseGamma(1e-3, 1e-3))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(0.0, v), obs=y)

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert spread_of(prior_draws(split(model, read([{"y": np.ones(3)}])))) is None


def test_the_last_of_ordered_categories_is_exact_far_out():
    """A probability is a difference of logistic functions, which rounding made 0 at 37."""
    fn = dist.OrderedLogistic(np.array([-50.0, -50.0, 50.0]), np.array([0.0, 1.0]))
    expected = [-51.0, np.log(-np.expm1(-1.0)) - 50.0, np.log(-np.expm1(-1.0)) - 49.0]
    found = jax.jit(lambda y: at(fn, y))(np.array([2, 1, 1]))
    np.testing.assert_allclose(found, expected)


@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_ordered_categories_of_any_batch_have_differences_of_logistic_functions(shape):
    fn = dist.OrderedLogistic(np.full(shape, 0.7), np.array([0.0, 1.0]))
    category = np.arange(3).reshape(3, *(1 for _ in shape))
    shares = np.diff([0.0, *special.expit([-0.7, 0.3]), 1.0])
    found = jax.jit(accurate(fn).log_prob)(np.broadcast_to(category, (3, *shape)))
    np.testing.assert_allclose(found, np.broadcast_to(np.log(shares)[category], (3, *shape)))
