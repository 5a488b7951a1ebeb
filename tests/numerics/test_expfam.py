"""Exponential families against NumPyro's distributions, autodiff and quadrature."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from cases import slow_but
from hypothesis import given, settings
from hypothesis import strategies as st
from numpyro.distributions import biject_to
from scipy.special import polygamma

from numpyro_fed import expfam
from numpyro_fed.guides import global_guides as guides

KEY = jax.random.key(0)
FAMILIES = {
    "diagonal": expfam.gaussian(3),
    "full": expfam.gaussian(3, "full"),
    "gamma": expfam.gamma((2,)),
    "beta": expfam.beta((2,)),
    "dirichlet": expfam.dirichlet((2,), 3),
    "product": expfam.product(
        {
            "location": (np.array([2, 0]), expfam.gaussian(2, "full")),
            "rate": (slice(1, 2), expfam.gamma()),
        }
    ),
}
OF_THREE = expfam.product(
    {
        "location": (np.array([4, 1]), expfam.gaussian(2, "full")),
        "rate": (slice(0, 1), expfam.gamma()),
        "weights": (slice(2, 4), expfam.dirichlet((), 3)),
    }
)
SINGLE = [name for name in FAMILIES if name != "product"]


@pytest.fixture(autouse=True, scope="module")
def x64():
    with jax.enable_x64(True):
        yield


@cache
def shapes(name):
    family = {**FAMILIES, "of three": OF_THREE}[name]
    return jax.eval_shape(lambda: family.ordinary(family.fit(jnp.sum)))


def parameters(name, seed=0, spread=1.0):
    """Random ordinary parameters of a family."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda s: jnp.asarray(rng.normal(0.5, spread, s.shape)), shapes(name))


@cache
def compiled(name, method):
    """A method of a family, as one program."""
    return jax.jit(getattr(FAMILIES[name], method))


def natural(name, seed=0):
    """Random natural parameters of a family."""
    return compiled(name, "natural")(parameters(name, seed))


def scalar(psi):
    """Some function of ordinary parameters."""
    return sum(jnp.sum(jnp.sin(leaf + i)) for i, leaf in enumerate(jax.tree.leaves(psi)))


def exact(name, psi):
    """The distribution over x, built without the family, and its support."""
    if name == "diagonal":
        return dist.Normal(psi["loc"], jnp.exp(psi["log_scale"])).to_event(1)
    if name == "full":
        L = jnp.eye(3).at[np.tril_indices(3, -1)].set(psi["below"] / np.sqrt(2))
        L = L * jnp.exp(psi["log_scale"])
        return dist.MultivariateNormal(psi["loc"], covariance_matrix=L @ L.T)
    alpha = jnp.exp(psi["log_concentration"])
    if name == "gamma":
        return dist.Gamma(alpha, jnp.exp(psi["log_rate"])).to_event(1)
    if name == "beta":
        return dist.Beta(alpha[:, 0], alpha[:, 1]).to_event(1)
    return dist.Dirichlet(alpha).to_event(1)


def rows(name):
    return (2, 2) if name == "dirichlet" else (-1,)


def log_prob(name, q, z):
    """The density with respect to ``dz``."""
    z = z.reshape(rows(name))
    bijection = biject_to(q.support)
    x = bijection(z)
    return q.log_prob(x) + jnp.sum(bijection.log_abs_det_jacobian(z, x))


@cache
def facts(name):
    """What the round trips and identities compare, compiled once a family."""
    family = FAMILIES[name]

    @jax.jit
    def at(psi, other):
        eta, eta_p, mu = family.natural(psi), family.natural(other), family.moments(psi)
        apart = jax.tree.map(jnp.subtract, eta_p, eta)
        A = family.log_partition
        return {
            "eta": eta,
            "ordinary": family.ordinary(eta),
            "from_mean": family.from_mean(mu),
            "mu": mu,
            "slope": jax.grad(A)(eta),
            "entropy": (family.entropy(psi), A(eta) - expfam.inner(eta, mu)),
            "kl": (family.kl(eta, eta_p), A(eta_p) - A(eta) - expfam.inner(apart, mu)),
            "zero": family.kl(eta, eta),
            "proper": family.proper(eta),
        }

    return at


def check(actual, desired, rtol=1e-7, atol=1e-9):
    def same(a, b):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)

    jax.tree.map(same, actual, desired)


@pytest.mark.parametrize("name", slow_but(FAMILIES, 1, 2))
@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**31), spread=st.floats(0.1, 2.0))
def test_parameters_go_round_and_identities_hold(name, seed, spread):
    psi, other = parameters(name, seed, spread), parameters(name, seed + 1, spread)
    fact = facts(name)(psi, other)
    check(fact["ordinary"], psi)
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(fact["eta"]))
    check(fact["from_mean"], fact["eta"], rtol=1e-6, atol=1e-9 * scale)
    check(fact["slope"], fact["mu"], rtol=1e-6, atol=1e-6)
    check(*fact["entropy"], rtol=1e-6, atol=1e-6)
    check(*fact["kl"], rtol=1e-6, atol=1e-6)
    assert fact["kl"][0] >= 0
    assert abs(fact["zero"]) < 1e-9
    assert fact["proper"]


@pytest.mark.parametrize("name", slow_but(SINGLE, 1, 2))
def test_log_density_is_numpyros_with_the_log_determinant(name):
    family = FAMILIES[name]

    @jax.jit
    def found(psi, other):
        eta, q = family.natural(psi), exact(name, psi)

        def at(z):
            terms = family.log_base(z) + expfam.inner(eta, family.statistics(z))
            known = log_prob(name, q, z)
            return family.log_density(eta, z), terms - family.log_partition(eta), known

        of_draws = jax.vmap(at)(jax.random.normal(KEY, (5, family.dim)))
        if "log" in eta:
            return of_draws, ()
        kl = family.kl(eta, family.natural(other)), dist.kl_divergence(q, exact(name, other))
        return of_draws, ((family.entropy(psi), q.entropy()), kl)

    (ours, terms, known), of_gaussians = found(parameters(name), parameters(name, 1))
    check(ours, known)
    check(ours, terms)
    for pair in of_gaussians:
        check(*pair)


@pytest.mark.parametrize(
    ("family", "half"), [(expfam.gamma(), 40.0), (expfam.beta(), 40.0), (expfam.gaussian(1), 15.0)]
)
def test_density_integrates_to_one(family, half):
    z = np.linspace(-half, half, 4001)

    @jax.jit
    def densities(z):
        shapes = jax.eval_shape(lambda: family.ordinary(family.fit(lambda z: -0.3 * z.sum() ** 2)))
        eta = family.natural(jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.3), shapes))
        return jnp.exp(jax.vmap(lambda z: family.log_density(eta, z[None]))(z))

    density = densities(z)
    assert abs(np.trapezoid(density, z) - 1) < 1e-8


@pytest.mark.parametrize("name", slow_but(SINGLE, 1, 2))
def test_draws_have_the_moments_and_their_gradients(name):
    family, psi = FAMILIES[name], parameters(name, spread=0.5)
    n = 4_000

    def flat(tree):
        return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(tree)])

    def weighted(psi, noise):
        T = flat(family.statistics(family.draw(psi, noise)))
        return jnp.cos(jnp.arange(T.size)) @ T, T

    def one(noise):
        gradient, T = jax.grad(weighted, has_aux=True)(psi, noise)
        return flat(gradient), T

    def weighted_moments(psi):
        mu = flat(family.moments(psi))
        return jnp.cos(jnp.arange(mu.size)) @ mu, mu

    @jax.jit
    def found():
        slope, mu = jax.grad(weighted_moments, has_aux=True)(psi)
        return *jax.vmap(one)(family.noise(KEY, n)), flat(slope), mu

    gradients, T, slope, mu = map(np.asarray, found())
    for values, expected in ((T, mu), (gradients, slope)):
        error = values.std(0) / np.sqrt(n) + 1e-12
        assert (np.abs(values.mean(0) - expected) < 4 * error).all()


@pytest.mark.parametrize("name", slow_but(FAMILIES, 1, 2))
def test_the_spread_is_that_of_draws_and_increments_are_differences(name, double):
    """Five standard errors of a mean, and of a standard deviation at a kurtosis of six."""
    family, n = FAMILIES[name], 20_000
    psi = parameters(name)

    @jax.jit
    def at(key):
        z = jax.vmap(family.draw, (None, 0))(psi, family.noise(key, n))
        gone = jax.tree.map(jnp.subtract, family.statistics(z[1]), family.statistics(z[0]))
        return (
            z.mean(0),
            z.std(0),
            family.mean_and_sd(psi),
            gone,
            family.increment(z[0], z[1] - z[0]),
        )

    mean, sd, expected, gone, increment = at(jax.random.key(0))
    np.testing.assert_allclose((mean - expected[0]) / expected[1], 0.0, atol=5 / n**0.5)
    np.testing.assert_allclose(sd / expected[1], 1.0, atol=5 * (5 / 4 / n) ** 0.5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-10), gone, increment)


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_proper_refuses_a_mean_that_overflows(covariance):
    family = expfam.gaussian(1, covariance)
    eta = jax.jit(lambda: family.fit(lambda z: 1e300 * z[0] - 1e-10 * z[0] ** 2))()
    assert not jax.jit(family.proper)(eta)


@pytest.mark.parametrize("name", slow_but(FAMILIES, 1, 2))
@pytest.mark.parametrize("double", [True, False])
def test_fit_recovers_natural_parameters(name, double):
    with jax.enable_x64(double):
        family, eta = FAMILIES[name], natural(name)

        def f(z):
            return 1e4 + expfam.inner(eta, family.statistics(z))

        found = jax.jit(lambda: family.fit(f))()
        assert {leaf.weak_type for leaf in jax.tree.leaves(found)} == {False}
        check(found, eta, rtol=1e-10 if double else 2e-6, atol=0)


@pytest.mark.parametrize(
    ("name", "q", "eta"),
    [
        ("diagonal", dist.Normal(jnp.array([0.0, 300.0, -5.0]), jnp.array([1e3, 0.1, 1.0])), None),
        (
            "gamma",
            dist.Gamma(jnp.array([0.01, 1e3]), jnp.array([1e3, 0.01])),
            {"log": [-0.99, 999.0], "linear": [-1e3, -0.01]},
        ),
        (
            "beta",
            dist.Beta(jnp.array([1.5, 2e3]), jnp.array([2e3, 1.5])),
            {"log": [[0.5, 1999.0], [1999.0, 0.5]]},
        ),
        (
            "dirichlet",
            dist.Dirichlet(jnp.array([[2.0, 1e3, 4.0], [1e3, 2.0, 1.5]])),
            {"log": [[1.0, 999.0, 3.0], [999.0, 1.0, 0.5]]},
        ),
    ],
)
def test_fit_of_numpyros_densities_in_single_precision(name, q, eta):
    bijection = biject_to(q.support)
    if eta is None:
        eta = {"first": q.mean / q.variance, "second": -0.5 / q.variance}
    with jax.enable_x64(False):
        q = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), q)

        @jax.jit
        def fit():
            return FAMILIES[name].fit(lambda z: q.log_prob(bijection(z.reshape(rows(name)))).sum())

        found = fit()
    check(found, jax.tree.map(np.asarray, eta, is_leaf=lambda e: isinstance(e, list)), rtol=1e-3)


STEP = 1e-6


@cache
def slopes(name):
    """The dual gradient of ``scalar`` and what it is compared with, in one program a family."""
    family = FAMILIES[name]

    @jax.jit
    def at(psi):
        eta, mu = family.natural(psi), family.moments(psi)
        dual = family.dual_gradient(scalar, eta)

        def spread(h):
            return family.mean_and_sd(
                family.ordinary(jax.tree.map(lambda a, b: a + h * b, eta, dual))
            )

        return {
            "dual": dual,
            "through the moments": jax.grad(
                lambda mu: scalar(family.ordinary(family.from_mean(mu)))
            )(mu),
            "spreads": (spread(STEP), spread(-STEP)),
            "move": family.move(psi, jax.grad(scalar)(psi)),
        }

    return at(parameters(name))


@pytest.mark.parametrize("name", slow_but(FAMILIES, 1, 2))
def test_dual_gradient_is_the_gradient_in_the_mean_parameters(name):
    found = slopes(name)
    check(found["dual"], found["through the moments"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", slow_but(FAMILIES, 1, 2))
def test_a_move_is_that_of_the_natural_gradient_step(name):
    (mean, sd), (before, sd_before) = slopes(name)["spreads"]
    expected = [(mean - before) / (sd + sd_before), jnp.log(sd / sd_before) / 2]
    check(slopes(name)["move"], jnp.concatenate(expected) / STEP, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "eta"),
    [
        (expfam.gamma(), {"log": 3e5, "linear": -1e5}),
        (expfam.dirichlet((), 3), {"log": np.array([1e5, 2e5, 3e5])}),
    ],
    ids=["gamma", "dirichlet"],
)
def test_dual_gradient_at_large_counts_in_single_precision(family, eta):
    """There the determinant of the Fisher matrix is a difference of nearly equal numbers."""
    found = {}
    for double in (True, False):
        with jax.enable_x64(double):
            at = jax.tree.map(lambda a: jnp.asarray(a, float), eta)
            found[double] = jax.jit(
                lambda eta: family.dual_gradient(lambda p: jnp.sum(p["log_concentration"]), eta)
            )(at)
    check(found[False], found[True], rtol=1e-4)


@jax.jit
def dual_gradient_of_gamma(eta):
    return expfam.gamma().dual_gradient(lambda p: p["log_concentration"], eta)


@pytest.mark.parametrize("alpha", [15.9, 16.1, 40.0])
def test_dual_gradient_on_both_sides_of_its_series(alpha):
    found = dual_gradient_of_gamma({"log": jnp.array(alpha - 1), "linear": jnp.array(-1.0)})
    check(found["log"], 1 / (alpha * polygamma(1, alpha) - 1), rtol=1e-8)


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_a_density_is_centred_where_it_draws_in_single_precision(covariance):
    """A million sds from zero: the mean of ``R^{-1} Lambda m`` would be a third of an sd off."""
    family = expfam.gaussian(2, covariance)
    first, precision = [-1.5e8, 1.5e8], [[16_000.0, 4_000.0], [4_000.0, 20_000.0]]
    with jax.enable_x64(False):
        second = -0.5 * np.array(np.diag(precision) if covariance == "diagonal" else precision)

        @jax.jit
        def at(eta):
            psi = family.ordinary(eta)
            z = family.draw(psi, jax.random.normal(KEY, (2,)))
            return psi, z, family.log_density(eta, z), family.kl(eta, eta)

        psi, z, found, distance = at({"first": jnp.array(first), "second": jnp.array(second)})
        assert abs(distance) < 1e-5
    Lambda = -2 * (second if second.ndim == 2 else np.diag(second))
    away = np.asarray(z, float) - np.asarray(psi["loc"], float)
    exact = 0.5 * np.linalg.slogdet(Lambda / (2 * np.pi))[1] - 0.5 * away @ Lambda @ away
    np.testing.assert_allclose(found, exact, atol=1e-3)


def test_natural_parameters_with_a_large_condition_number_in_single_precision():
    rng = np.random.default_rng(0)
    Q = np.linalg.qr(rng.normal(size=(6, 6)))[0]
    precision, loc = (Q * np.logspace(0, 5, 6)) @ Q.T, rng.normal(size=6)
    eta = {"first": precision @ loc, "second": -0.5 * precision}
    family, z = expfam.gaussian(6, "full"), loc + Q @ (np.logspace(0, -2.5, 6) * rng.normal(size=6))
    away = z - loc
    expected = 0.5 * np.linalg.slogdet(precision / (2 * np.pi))[1] - 0.5 * away @ precision @ away
    with jax.enable_x64(False):
        eta = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), eta)

        @jax.jit
        def at(z):
            psi = family.ordinary(eta)
            again = family.natural(psi)
            return family.proper(eta), again, psi, family.log_density(eta, z), family.kl(eta, again)

        proper, again, psi, found, distance = at(jnp.asarray(z, jnp.float32))
    assert proper
    assert np.abs(again["second"] - eta["second"]).max() < 2e-3 * np.abs(eta["second"]).max()
    check(psi["loc"], loc, rtol=0.02, atol=0.02)
    assert abs(found - expected) < 0.05
    assert abs(distance) < 0.05


@pytest.mark.parametrize("name", FAMILIES)
def test_proper_refuses_what_cannot_be_normalised_and_what_is_not_finite(name):
    eta, proper = natural(name), compiled(name, "proper")
    leaves, tree = jax.tree.flatten(eta)
    assert proper(eta)
    for i, leaf in enumerate(leaves):
        for wrong in (np.nan, np.inf):
            bad = leaf.at[(-1,) * leaf.ndim].set(wrong)
            assert not proper(jax.tree.unflatten(tree, [*leaves[:i], bad, *leaves[i + 1 :]]))


@pytest.mark.parametrize("name", SINGLE)
def test_proper_refuses_the_edge_of_the_parameters(name):
    eta, proper = natural(name), compiled(name, "proper")
    for leaf in eta.keys() - {"first"}:
        edge = {"second": 0.0, "log": -1.0, "linear": 0.0}[leaf]
        assert not proper({**eta, leaf: eta[leaf].at[(0,) * eta[leaf].ndim].set(edge)})


def test_full_refuses_an_indefinite_precision():
    indefinite = {"first": jnp.zeros(2), "second": -0.5 * jnp.array([[1.0, 2.0], [2.0, 1.0]])}
    assert not jax.jit(expfam.gaussian(2, "full").proper)(indefinite)


def test_full_with_a_diagonal_covariance_is_diagonal():
    diagonal, full = FAMILIES["diagonal"], FAMILIES["full"]

    @jax.jit
    def pairs(psi, noise):
        wide = {**psi, "below": jnp.zeros(3)}
        eta, eta_full = diagonal.natural(psi), full.natural(wide)
        z = diagonal.draw(psi, noise)
        twice, twice_full = (jax.tree.map(lambda a: 2 * a, e) for e in (eta, eta_full))
        return [
            (eta_full, {"first": eta["first"], "second": jnp.diag(eta["second"])}),
            (full.draw(wide, noise), z),
            (full.log_partition(eta_full), diagonal.log_partition(eta)),
            (full.entropy(wide), diagonal.entropy(psi)),
            (full.log_density(eta_full, z), diagonal.log_density(eta, z)),
            (full.kl(eta_full, twice_full), diagonal.kl(eta, twice)),
        ]

    for pair in pairs(parameters("diagonal"), jax.random.normal(KEY, (3,))):
        check(*pair)


def test_full_has_the_convention_of_the_guides():
    psi, noise = parameters("full"), jax.random.normal(KEY, (3,))
    z, log_q = guides.Full(3, 1.0).draw(psi, noise)
    family = FAMILIES["full"]
    check(family.draw(psi, noise), z)
    check(family.log_density(family.natural(psi), z), log_q)


@pytest.mark.parametrize("name", ["gamma", "beta", "dirichlet"])
def test_centre_is_the_mean_of_x_mapped(name):

    @jax.jit
    def both(psi):
        q = exact(name, psi)
        return biject_to(q.support)(FAMILIES[name].centre(psi).reshape(rows(name))), q.mean

    check(*both(parameters(name)))


@pytest.mark.parametrize("family", slow_but([expfam.gamma((7,)), expfam.dirichlet((2,), 4)], 0))
def test_extreme_shapes(family):
    """Shapes from 1e-3 to 1e4 come back from their means, and draws stay finite."""
    eta = jax.tree.map(
        lambda leaf: np.logspace(-3, 4, leaf.size).reshape(leaf.shape) - 1.0,
        jax.eval_shape(lambda: family.fit(jnp.sum)),
    )
    if "linear" in eta:
        eta["linear"] = -np.logspace(3, -3, 7)

    @jax.jit
    def there_and_back(eta):
        psi = family.ordinary(eta)
        return psi, family.ordinary(family.from_mean(family.moments(psi)))

    psi, back = there_and_back(eta)
    check(back, psi, rtol=1e-6, atol=1e-6)
    with jax.enable_x64(False):
        psi = jax.tree.map(lambda a: np.asarray(a, np.float32), psi)
        one = jax.value_and_grad(lambda psi, noise: family.draw(psi, noise).sum())
        draws, gradients = jax.jit(jax.vmap(one, (None, 0)))(psi, family.noise(KEY, 20))
    assert np.isfinite(draws).all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


@pytest.mark.slow
def test_product_is_the_sum_of_its_members():
    family, psi = OF_THREE, parameters("of three")

    @jax.jit
    def pairs(psi):
        found, eta = [], family.natural(psi)
        noise = jax.tree.map(lambda a: a[0], family.noise(KEY, 2))
        z = family.draw(psi, noise)
        members = {
            "location": (expfam.gaussian(2, "full"), z[np.array([4, 1])]),
            "rate": (expfam.gamma(), z[:1]),
            "weights": (expfam.dirichlet((), 3), z[2:4]),
        }
        for function in ("log_partition", "entropy"):
            given = psi if function == "entropy" else eta
            parts = [
                getattr(member, function)(given[name]) for name, (member, _) in members.items()
            ]
            found.append((getattr(family, function)(given), sum(parts)))
        parts = [member.log_density(eta[name], own) for name, (member, own) in members.items()]
        found.append((family.log_density(eta, z), sum(parts)))
        for name, (member, own) in members.items():
            found.append((family.statistics(z)[name], member.statistics(own)))
            found.append((own, member.draw(psi[name], noise[name])))
        centre = family.centre(psi)
        found.append((centre[np.array([4, 1])], psi["location"]["loc"]))
        found.append((centre[0], psi["rate"]["log_concentration"] - psi["rate"]["log_rate"]))
        return found

    for pair in pairs(psi):
        check(*pair)


@pytest.mark.parametrize(
    "places",
    [(slice(0, 2), slice(1, 2)), (slice(0, 1), slice(1, 2)), (slice(0, 1), slice(1, 3))],
)
def test_product_refuses_indices_that_are_no_partition(places):
    members = {"a": (places[0], expfam.gaussian(2)), "b": (places[1], expfam.gaussian(1))}
    with pytest.raises(ValueError, match="3 coordinates"):
        expfam.product(members)


@pytest.mark.parametrize("name", ["diagonal", "full"])
def test_gaussian_marginals(name):
    family, last, places = FAMILIES[name], slice(1, 3), np.array([2, 0])

    @jax.jit
    def pairs(psi):
        eta, q = family.natural(psi), exact(name, psi)
        covariance = getattr(q, "covariance_matrix", jnp.diag(q.variance))
        alone = family.marginal(eta, last, (2,))
        assert (alone.batch_shape, alone.event_shape) == ((2,), ())
        event = family.marginal(eta, places, (2,), event_dim=1)
        assert (event.batch_shape, event.event_shape) == ((), (2,))
        point = jnp.array([0.3, -1.0])
        block = dist.MultivariateNormal(q.mean[places], covariance[np.ix_(places, places)])
        batch = family.marginal(eta, slice(0, 3), (3, 1), event_dim=1)
        assert (batch.batch_shape, batch.event_shape) == ((3,), (1,))
        assert family.marginal(eta, slice(0, 3), (3, 1), event_dim=2).event_shape == (3, 1)
        assert family.marginal(eta, slice(2, 3), ()).event_shape == ()
        return (
            ((alone.mean, alone.variance), (q.mean[last], q.variance[last])),
            (event.log_prob(point), block.log_prob(point)),
            (batch.variance[:, 0], q.variance),
        )

    for pair in pairs(parameters(name)):
        check(*pair)


def test_marginals_of_other_members_are_over_x():
    family, psi = OF_THREE, parameters("of three")
    eta = family.natural(psi)
    rate = family.marginal(eta, slice(0, 1), ())
    check((rate.concentration, rate.rate), tuple(jnp.exp(leaf) for leaf in psi["rate"].values()))
    weights = family.marginal(eta, slice(2, 4), (2,), event_dim=1)
    check(weights.concentration, jnp.exp(psi["weights"]["log_concentration"]))
    swapped = family.marginal(eta, np.array([1]), (1,))
    check(swapped.mean[0], psi["location"]["loc"][1])
    two = FAMILIES["gamma"].natural(parameters("gamma"))
    q = FAMILIES["gamma"].marginal(two, slice(0, 2), (2,), event_dim=1)
    assert q.event_shape == (2,)
    with pytest.raises(ValueError, match="no single member"):
        family.marginal(eta, slice(0, 2), (2,))
    with pytest.raises(ValueError, match=r"dirichlet .*part"):
        family.marginal(eta, slice(2, 3), ())


def test_families_run_under_vmap():
    family = FAMILIES["full"]
    alike = [parameters("full", seed) for seed in range(3)]
    several = jax.tree.map(lambda *leaves: np.stack(leaves), *alike)

    @jax.jit
    def found(psi):
        eta = jax.vmap(family.natural)(psi)
        return jax.vmap(family.ordinary)(eta), jax.vmap(family.proper)(eta)

    back, proper = found(several)
    check(back, several)
    assert proper.all()
    assert proper.shape == (3,)


def test_a_covariance_by_another_name():
    with pytest.raises(ValueError, match="'diagonal' or 'full', got 'low_rank'"):
        expfam.gaussian(2, "low_rank")


def test_families_are_equal_only_if_they_are_the_same():
    normals = expfam.product({"a": (slice(0, 1), expfam.gaussian(1))})
    rates = expfam.product({"a": (slice(0, 1), expfam.gamma(()))})
    assert normals != rates
    assert expfam.gaussian(2) == expfam.gaussian(2) != expfam.gaussian(2, "full")
    assert expfam.beta((2,)) != expfam.beta((1, 2))

    @partial(jax.jit, static_argnums=0)
    def log_base(family):
        return family.log_base(jnp.ones(1))

    assert (float(log_base(normals)), float(log_base(rates))) == (0.0, 1.0)


def test_a_proper_member_of_a_nearly_singular_precision_has_finite_numbers():
    """In single precision two factorisations may disagree about what is positive definite."""
    family, r = expfam.gaussian(6, "full"), np.random.default_rng(0)

    def one(second):
        eta = {"first": jnp.ones(6), "second": second}
        psi = family.ordinary(eta)
        numbers = (family.log_partition(eta), family.entropy(psi), family.kl(eta, eta))
        return family.proper(eta), jnp.isfinite(jnp.stack(numbers)).all()

    Q, _ = np.linalg.qr(r.normal(size=(200, 6, 6)))
    second = -0.5 * (Q * 10.0 ** np.linspace(0, -8.0, 6)) @ Q.transpose(0, 2, 1)
    with jax.enable_x64(False):
        # One at a time: a batch might be factorised by another routine.
        proper, finite = jax.jit(lambda a: jax.lax.map(one, a))(second.astype(np.float32))
    assert (finite | ~proper).all()
    assert 0 < proper.sum() < 200
