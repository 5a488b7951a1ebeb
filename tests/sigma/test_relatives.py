"""Priors that do not tie silos together: closed forms against the field that they stand for."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from cases import slow_but
from hypothesis import given, settings
from hypothesis import strategies as st
from numpyro import handlers
from numpyro.infer import Predictive
from numpyro.infer.util import log_density
from scipy import stats

import numpyro_fed as nf
from numpyro_fed.data.silo_data import read
from numpyro_fed.sigma.fields import SpectralField, Spectrum, field_of
from numpyro_fed.text.split import split

KEY = jax.random.key(0)
PLACES = np.linspace(0, 1, 9)
BLOCKS = [[0, 1, 2, 3], [5, 4], [6, 7, 8]]
KINDS = [nf.BlockPrior, nf.LowRankPrior, nf.SeparatorPrior]


def chain(n):
    return np.eye(n, k=1) + np.eye(n, k=-1)


def gp(area=None, y=None):
    """The scale is a latent before the site."""
    scale = numpyro.sample("scale", dist.LogNormal(-1, 0.3))
    gap = (PLACES[:, None] - PLACES) ** 2
    cov = jnp.exp(-gap / (2 * scale**2)) + 1e-3 * jnp.eye(9)
    theta = numpyro.sample("theta", dist.MultivariateNormal(jnp.arange(9.0), cov))
    if area is not None:
        with nf.silo_plate("row", area.shape[0]):
            numpyro.sample("y", dist.Normal(theta[area], 0.3), obs=y)


def car(W, blocks=BLOCKS):
    def model(area=None, y=None):
        alpha = numpyro.sample("alpha", dist.Uniform(0, 1))
        theta = numpyro.sample("theta", dist.CAR(0.5, alpha, 2.0, W))
        if area is not None:
            with nf.silo_plate("row", area.shape[0]):
                numpyro.sample("y", dist.Normal(theta[area], 0.3), obs=y)

    return model


def silos(blocks=BLOCKS, twice=2):
    r = np.random.default_rng(0)
    return [dict(area=np.repeat(b, twice), y=r.normal(size=twice * len(b))) for b in blocks]


def true_field(model, phi):
    """Mean and covariance of the site."""

    @jax.jit
    def found(phi):
        at = handlers.substitute(handlers.seed(model, 0), phi)
        fn = handlers.trace(at).get_trace()["theta"]["fn"]
        if isinstance(fn, dist.CAR):
            return fn.mean, jnp.linalg.inv(fn.precision_matrix)
        return fn.mean, fn.covariance_matrix

    return found(phi)


def affine(prior, model, phi):
    """The site as ``mean + M e`` of the latents, standard normal but for those at borders."""
    federated = nf.handlers.substitute_prior(model, {"theta": prior})

    @jax.jit
    def found(phi):
        trace = handlers.trace(handlers.seed(federated, 0)).get_trace()
        latents = {
            n: jnp.zeros_like(s["value"])
            for n, s in trace.items()
            if n.startswith("theta/") and s["type"] == "sample"
        }

        def theta(latents):
            at = handlers.substitute(handlers.seed(federated, 0), {**phi, **latents})
            value = handlers.trace(at).get_trace()["theta"]["value"]
            return value, value

        M, centre = jax.jacfwd(theta, has_aux=True)(latents)
        return centre, {n: jnp.reshape(J, (J.shape[0], -1)) for n, J in M.items()}

    return jax.tree.map(np.asarray, found(phi))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [nf.BlockPrior, nf.LowRankPrior])
@pytest.mark.parametrize("name", [pytest.param("gp", marks=pytest.mark.slow), "car"])
def test_blocks_have_their_own_covariance(double, kind, name):
    model, phi = (gp, {"scale": 0.4}) if name == "gp" else (car(chain(9)), {"alpha": 0.9})
    mean, K = true_field(model, phi)
    options = {} if kind is nf.BlockPrior else {"rank": 3}
    centre, M = affine(kind.fit(model, "theta", BLOCKS, **options), model, phi)
    np.testing.assert_allclose(centre, mean, rtol=1e-10)
    found = sum(J @ J.T for J in M.values())
    for own in BLOCKS:
        np.testing.assert_allclose(found[np.ix_(own, own)], K[np.ix_(own, own)], atol=1e-10)
    between = sum(J @ J.T for n, J in M.items() if n == "theta/z_G")
    a, b, _ = BLOCKS
    np.testing.assert_allclose(found[np.ix_(a, b)], (0 * K + between)[np.ix_(a, b)], atol=1e-12)
    error = abs(found - K).max()
    assert (error > 0.1) if kind is nf.BlockPrior else (error < 0.1)


@pytest.mark.parametrize("name", ["gp", "car"])
def test_a_shared_part_of_full_rank_is_the_field(double, name):
    model, phi = (gp, {"scale": 0.2}) if name == "gp" else (car(chain(9)), {"alpha": 0.99})
    prior = nf.LowRankPrior.fit(model, "theta", BLOCKS, rank=9)
    _, M = affine(prior, model, phi)
    np.testing.assert_allclose(
        sum(J @ J.T for J in M.values()), true_field(model, phi)[1], atol=1e-8
    )


def test_by_default_the_shared_part_holds_most_of_the_variance():
    assert nf.LowRankPrior.fit(gp, "theta", BLOCKS).rank in (2, 3, 4)  # a smooth curve
    assert nf.LowRankPrior.fit(car(chain(9)), "theta", BLOCKS).rank > 4


@st.composite
def maps(draw):
    """A connected map, and a partition of it."""
    n = draw(st.sampled_from([2, 5, 8]))
    r = np.random.default_rng(draw(st.integers(0, 2**16)))
    W = np.triu(r.random((n, n)) < draw(st.floats(0, 0.6)), 1)
    for i in range(1, n):
        W[r.integers(i), i] = True
    of = r.integers(draw(st.integers(1, 4)), size=n)
    return (W | W.T).astype(float), [np.flatnonzero(of == b) for b in np.unique(of)]


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    at=maps(),
    kind=st.sampled_from([dist.CAR, nf.fields.Leroux]),
    alpha=st.floats(0, 0.99),
    tau=st.floats(0.1, 10),
    seed=st.integers(0, 99),
)
def test_the_separator_is_the_true_density(at, kind, alpha, tau, seed):
    with jax.enable_x64(True):
        W, blocks = at

        def model():
            numpyro.sample("theta", kind(0.3, alpha, tau, W))

        prior = nf.SeparatorPrior.fit(model, "theta", blocks)
        federated = nf.handlers.substitute_prior(model, {"theta": prior})
        trace = handlers.trace(handlers.seed(federated, seed)).get_trace()
        latents = {n: s["value"] for n, s in trace.items() if s["type"] == "sample"}
        density = float(log_density(federated, (), {}, latents)[0])
        Q = np.asarray(kind(0.3, alpha, tau, W).precision_matrix)
        for own in prior.blocks.places:  # noise instead of entries
            density += 0.5 * np.linalg.slogdet(Q[np.ix_(own, own)])[1] if len(own) else 0.0
        dummies = latents["theta/noise"].size - sum(map(len, prior.blocks.places))
        there = np.concatenate([row < len(W) for row in prior.blocks.table])
        noise = np.ravel(latents["theta/noise"])[~there]
        assert len(noise) == dummies
        density -= float(dist.Normal(0, 1).log_prob(noise).sum())
        theta = np.asarray(trace["theta"]["value"])
        true = dist.MultivariateNormal(0.3, precision_matrix=Q).log_prob(theta)
        np.testing.assert_allclose(density, float(true), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", [dist.CAR, nf.fields.Leroux])
def test_one_eigendecomposition_draws_every_field_of_areas(double, kind):
    W = chain(6)
    W[0, 3] = W[3, 0] = 1
    for alpha, tau in ((0.5, 1.0), (0.99, 3.0), (0.0, 0.2)):
        fn = kind(0.0, alpha, tau, W)
        field = field_of(fn, "theta", Spectrum.of(fn, "theta"))
        assert isinstance(field, SpectralField)
        U = field.vectors * np.sqrt(field.variances)
        np.testing.assert_allclose(U @ U.T, np.linalg.inv(fn.precision_matrix), atol=1e-9)
        there = jnp.ones(6, bool)
        np.testing.assert_allclose(field.covariance_of(jnp.arange(6), there), U @ U.T, atol=1e-10)
    draws, n = field.from_normals(jax.random.normal(KEY, (4_000, len(field.loc)))), 4_000
    cov, found = U @ U.T, np.cov(draws.T)
    se = np.sqrt((cov**2 + np.outer(np.diag(cov), np.diag(cov))) / n)
    assert (abs(found - cov) < 4.5 * se).all()


def test_leroux_is_the_normal_of_its_precision(double):
    W = chain(5)
    W[4, 3] = W[3, 4] = 0  # an island
    fn = nf.fields.Leroux(0.7, 0.8, 2.0, W)
    Q = 2 * (0.2 * np.eye(5) + 0.8 * (np.diag(W.sum(0)) - W))
    values, cov, n = np.random.default_rng(0).normal(size=(3, 5)), np.linalg.inv(Q), 4_000

    @jax.jit
    def found(values):
        return fn.precision_matrix, fn.log_prob(values), fn.sample(KEY, (n,))

    precision, density, draws = map(np.asarray, found(values))
    np.testing.assert_allclose(precision, Q)
    true = stats.multivariate_normal(np.full(5, 0.7), cov).logpdf(values)
    np.testing.assert_allclose(density, true, rtol=1e-10)
    se = np.sqrt((cov**2 + np.outer(np.diag(cov), np.diag(cov))) / n)
    assert (abs(np.cov(draws.T) - cov) < 4.5 * se).all()
    with pytest.raises(nf.DataError, match=r"\(2, 3\): .*square"):
        nf.fields.Leroux(0.0, 0.5, 1.0, np.ones((2, 3)))


def test_covariances_of_points(double):
    x = np.array([[0.0, 0.0], [3.0, 4.0]])
    np.testing.assert_allclose(nf.fields.rbf(x, 5.0, 2.0)[0], [2 + 2e-4, 2 * np.exp(-0.5)])
    r = {0.5: 1, 1.5: 3**0.5, 2.5: 5**0.5}
    shapes = {0.5: 1, 1.5: 1 + r[1.5], 2.5: 1 + r[2.5] + 5 / 3}
    for nu, shape in shapes.items():
        found = nf.fields.matern(x, 5.0, nu=nu, jitter=0.0)[0, 1]
        np.testing.assert_allclose(found, shape * np.exp(-r[nu]))
        slope = jax.grad(lambda s, nu=nu: nf.fields.matern(x, s, nu=nu).sum())(5.0)
        assert np.isfinite(slope)
    with pytest.raises(ValueError, match="nu=2"):
        nf.fields.matern(x, 1.0, nu=2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_silos_are_independent_given_what_they_share(kind):
    """A silo's terms do not move with another's latents, and its own block is all it has."""
    model = car(chain(9))
    prior = kind.fit(model, "theta", BLOCKS, model_kwargs=silos()[0])
    federated = nf.handlers.substitute_prior(model, {"theta": prior})
    held = read(silos(), federated)
    assert [int(s.arrays["theta_block"][0]) for s in held] == [0, 1, 2]
    fm = split(federated, held)
    assert {p.name for p in fm.plates} == {"theta/block", "row"}
    values = fm.constrain_local(
        {},
        jnp.ones(fm.dim),
        {p.name: jnp.ones((fm.sizes(held[1])[p.name], p.dim)) for p in fm.plates},
        held[1],
    )
    elsewhere = [i for i in range(9) if i not in BLOCKS[1]]
    if kind is nf.SeparatorPrior:
        elsewhere = [i for i in elsewhere if i not in prior.border]
    assert (values["theta"][np.array(elsewhere, int)] == 0).all()
    assert (values["theta"][np.array(BLOCKS[1])] != 0).all()

    def terms(noise):
        pooled = {k: np.concatenate([s[k] for s in silos()]) for k in ("area", "y")}
        at = handlers.substitute(handlers.seed(federated, 0), {"theta/noise": noise})
        trace = handlers.trace(at).get_trace(**pooled)
        return trace["y"]["fn"].log_prob(trace["y"]["value"])

    slopes = jax.jacobian(terms)(jnp.ones((3, prior.blocks.largest)))
    of = np.repeat([0, 1, 2], [2 * len(b) for b in BLOCKS])
    for j in range(3):
        assert (slopes[of != j, j] == 0).all()
    assert (abs(slopes[of == 0, 0]).sum() > 0).all()


@pytest.mark.parametrize("kind", slow_but(KINDS, 0))
def test_the_text_of_all_blocks_runs_under_plain_numpyro(kind):
    model = car(chain(9))
    prior = kind.fit(model, "theta", BLOCKS)
    federated = nf.handlers.substitute_prior(model, {"theta": prior})
    drawn = Predictive(federated, num_samples=3_000)(KEY)
    mean, _ = true_field(model, {"alpha": 0.5})
    assert abs(drawn["theta"].mean(0) - mean).max() < 4.5 * drawn["theta"].std() / 3_000**0.5
    pooled = {k: np.concatenate([s[k] for s in silos()]) for k in ("area", "y")}
    drawn = jax.eval_shape(Predictive(federated, num_samples=2), KEY, area=pooled["area"])
    assert drawn["y"].shape == (2, 18)


@pytest.mark.slow
def test_a_run_reaches_the_posterior_of_the_true_model():
    """The separator on a chain, whose posterior is known."""

    def model(area, y=None):
        theta = numpyro.sample("theta", dist.CAR(0.0, 0.8, 1.0, chain(9)))
        with nf.silo_plate("row", area.shape[0]):
            numpyro.sample("y", dist.Normal(theta[area], 0.3), obs=y)

    prior = nf.SeparatorPrior.fit(model, "theta", BLOCKS, model_kwargs=silos()[0])
    federated = nf.handlers.substitute_prior(model, {"theta": prior})
    result = nf.SFVI(federated).run(KEY, 300, silos(), progress_bar=False)
    Q = np.diag(chain(9).sum(0)) - 0.8 * chain(9)
    area, y = (np.concatenate([s[k] for s in silos()]) for k in ("area", "y"))
    seen = np.eye(9)[area]
    cov = np.linalg.inv(Q + seen.T @ seen / 0.09)
    mean, sd = cov @ seen.T @ y / 0.09, np.sqrt(np.diag(cov))
    for j, own in enumerate(BLOCKS):
        draws = np.asarray(result.sample_posterior(KEY, 4_000, silo=j)["theta"])[:, own]
        assert (abs(draws.mean(0) - mean[own]) < 0.1 * sd[own]).all()
        assert (abs(draws.std(0) / sd[own] - 1) < 0.1).all()


@pytest.mark.slow
def test_a_silo_holds_one_block_and_no_other_does():
    model = car(chain(9))
    prior = nf.BlockPrior.fit(model, "theta", BLOCKS)
    federated = nf.handlers.substitute_prior(model, {"theta": prior})
    r, (one, two, three) = np.random.default_rng(0), silos()

    def rows(*area):
        return dict(area=np.array(area), y=r.normal(size=len(area)))

    with pytest.raises(nf.DataError, match=r"silo 1 .* 3, 4 .* 0, 1"):
        read([one, rows(3, 4)], federated)
    with pytest.raises(nf.DataError, match=r"silos 0 and 2 .*block 0"):
        read([one, two, rows(0)], federated)
    unread = dict(area=np.array([7]), y=np.array([0.0]), theta_block=np.array([1]))
    with pytest.raises(nf.DataError, match=r"silo 0 .* 7 .* 1, 2"):
        read([unread], federated)
    assert len(read([two, three, one], federated)) == 3  # in any order

    def nested(rows, scale=None):
        alpha = numpyro.sample("alpha", dist.Uniform(0, 1))
        theta = numpyro.sample("theta", dist.CAR(0.5, alpha, 2.0, chain(9)))
        with nf.silo_plate("row", rows["at"][0].shape[0]):
            numpyro.sample("y", dist.Normal(theta[rows["at"][0]], 0.3), obs=rows["y"])

    trees = [dict(rows=dict(at=[s["area"]], y=s["y"]), scale=None) for s in (three, one)]
    held = read(trees, nf.handlers.substitute_prior(nested, {"theta": prior}))
    assert [int(s.arrays["theta_block"][0]) for s in held] == [2, 0]
    with pytest.raises(nf.DataError, match=r"silo 0 .*'theta'"):
        read([one], _silent(prior))
    within = numpyro.handlers.scale(federated, scale=0.5)  # a handler around it
    assert "theta_block" in read([one], within)[0].arrays


def test_a_read_that_a_flat_likelihood_hides_is_found():
    """A Bernoulli far out does not move with its logit; nearer to zero it does."""

    def model(area, y):
        theta = numpyro.sample("theta", dist.CAR(0.0, 0.9, 1e-6, chain(9)))
        with nf.silo_plate("row", area.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=theta[area]), obs=y)

    kwargs = dict(area=np.array([0, 1, 2, 6]), y=np.array([0, 1, 1, 0]))
    prior = nf.BlockPrior.fit(model, "theta", BLOCKS, model_kwargs=kwargs)
    with pytest.raises(nf.DataError, match="blocks 0, 2"):
        read([kwargs], nf.handlers.substitute_prior(model, {"theta": prior}))


@pytest.mark.slow
def test_two_sites_of_one_text_are_replaced():
    def model(area, y):
        one = numpyro.sample("one", dist.CAR(0.0, 0.5, 1.0, chain(9)))
        two = numpyro.sample("two", dist.CAR(0.0, 0.9, 1.0, chain(9)))
        with nf.silo_plate("row", area.shape[0]):
            numpyro.sample("y", dist.Normal(one[area] + 2 * two[area], 0.3), obs=y)

    held = silos()
    priors = {
        "one": nf.SeparatorPrior.fit(model, "one", BLOCKS, model_kwargs=held[0]),
        "two": nf.BlockPrior.fit(model, "two", BLOCKS, model_kwargs=held[0]),
    }
    federated = nf.handlers.substitute_prior(model, priors)
    result = nf.SFVI(federated, start=None).run(KEY, 5, held, progress_bar=False)
    draws = result.sample_posterior(KEY, 3, silo=1)
    for site in priors:
        own = np.asarray(draws[site])
        assert (own[:, np.array(BLOCKS[1])] != 0).all()


@pytest.mark.parametrize("name", ["BlockPrior", "LowRankPrior", "SeparatorPrior"])
def test_a_prior_of_other_neighbours_is_refused(name):
    prior = getattr(nf, name).fit(car(chain(9)), "theta", BLOCKS)
    ring = chain(9)
    ring[0, -1] = ring[-1, 0] = 1
    with pytest.raises(nf.ModelError, match="other neighbours"):
        read(silos(), nf.handlers.substitute_prior(car(ring), {"theta": prior}))


def test_a_direction_of_areas_holds_the_variance_that_it_is_said_to():
    """Of a star, whose eigenvectors, scaled by degrees, are far from orthonormal."""
    star = np.zeros((30, 30))
    star[0, 1:] = star[1:, 0] = 1

    def model():
        numpyro.sample("theta", dist.CAR(0.0, 0.9, 1.0, star))

    cov = np.linalg.inv(np.diag(star.sum(0)) - 0.9 * star)
    blocks = [np.arange(15), np.arange(15, 30)]
    prior = nf.LowRankPrior.fit(model, "theta", blocks)

    def held(rank):
        fitted = nf.LowRankPrior.fit(model, "theta", blocks, rank=rank)
        with numpyro.handlers.seed(rng_seed=0):
            A = np.asarray(fitted.shared(dist.CAR(0.0, 0.9, 1.0, star), {})[1])
        return (A**2).sum() / np.trace(cov)

    assert held(prior.rank - 1) < 0.95 <= held(prior.rank) + 1e-6


def _silent(prior):
    """A text whose rows do not read the site."""

    def model(area, y):
        alpha = numpyro.sample("alpha", dist.Uniform(0, 1))
        numpyro.sample("theta", dist.CAR(0.5, alpha, 2.0, chain(9)))
        with nf.silo_plate("row", area.shape[0]):
            numpyro.sample("y", dist.Normal(0.0, 1), obs=y)

    return nf.handlers.substitute_prior(model, {"theta": prior})


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        ([[0, 1], [2, 3]], "5 of 9 .*'theta' .* 4"),
        ([[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]], "entry 4 of 'theta' is in two blocks"),
        ([[5, 0, 0], [2]], "entry 0 .* twice in block 0"),
        ([list(range(10))], "places 0 to 9, but the site has 9 entries"),
        ([[0.5]], "block 0 of 'theta' is float64"),
        ([list(range(9)), []], "block 1 of 'theta' is float64"),
    ],
)
def test_blocks_hold_each_entry_once(blocks, words):
    with pytest.raises(nf.DataError, match=words):
        nf.BlockPrior.fit(gp, "theta", blocks)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda W: W.__setitem__((0, 5), 1), "not symmetric: 1.0 from 0 to 5, 0.0 back"),
        (lambda W: W.__setitem__((2, 2), 1), "area 2 of 'theta' is its own neighbour"),
        (lambda W: W.__setitem__((slice(0, 2), slice(0, 2)), 0), r"area 0 .* \(an island\)"),
    ],
)
def test_a_map_that_is_no_map_is_said(change, words):
    W = chain(9)
    change(W)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(nf.ModelError, match=words):
            nf.SeparatorPrior.fit(car(W), "theta", BLOCKS)


def test_sites_that_cannot_be_split_are_named():
    def others():
        numpyro.sample("count", dist.Poisson(1.0))
        numpyro.sample("matrix", dist.Normal(0, 1).expand([3, 3]).to_event(2))
        numpyro.sample("simplex", dist.Dirichlet(jnp.ones(3)))

    fit = nf.BlockPrior.fit
    three = [[0], [1], [2]]
    with pytest.raises(nf.ModelError, match=r"'theta'.* count, matrix"):
        fit(others, "theta", three)
    with pytest.raises(nf.ModelError, match="'count' is discrete"):
        fit(others, "count", three)
    with pytest.raises(nf.ModelError, match=r"'matrix' .* \(3, 3\)"):
        fit(others, "matrix", three)
    with pytest.raises(nf.ModelError, match=r"'simplex' .* Simplex"):
        fit(others, "simplex", three)
    with pytest.raises(nf.ModelError, match=r"'theta' .*MultivariateNormal"):
        nf.SeparatorPrior.fit(gp, "theta", BLOCKS)
    with pytest.raises(nf.ModelError, match=r"model_kwargs="):
        fit(lambda x: gp(), "theta", BLOCKS)
    with pytest.raises(nf.ModelError, match=r"'other' .*'theta'"):
        nf.handlers.substitute_prior(gp, {"other": fit(gp, "theta", BLOCKS)})
    with pytest.raises(ValueError, match="rank"):
        nf.LowRankPrior.fit(gp, "theta", BLOCKS, rank=0)


def test_a_field_that_is_not_substituted_is_warned_about():
    text, data = car(chain(9)), read(silos())
    with pytest.warns(UserWarning, match=r"'theta' .*substitute_prior"):
        split(text, data)


def with_intercept(area, y):
    """An intercept under a flat prior, of which nothing can be drawn."""
    b = numpyro.sample("b", dist.ImproperUniform(dist.constraints.real, (), ()))
    theta = numpyro.sample("theta", dist.CAR(0.0, 0.5, 1.0, chain(9)))
    with nf.silo_plate("row", area.shape[0]):
        numpyro.sample("y", dist.Normal(b + theta[area], 0.3), obs=y)


@pytest.mark.parametrize("kind", slow_but(KINDS, 0))
def test_a_flat_prior_beside_a_site_that_is_replaced(kind):
    prior = kind.fit(with_intercept, "theta", BLOCKS, model_kwargs=silos()[0])
    federated = nf.handlers.substitute_prior(with_intercept, {"theta": prior})
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a field that is substituted is not warned about
        fm = split(federated, read(silos(), federated))
    assert "b" in [site.name for site in fm.named("latent")]


@pytest.mark.slow
def test_a_run_under_a_flat_prior_beside_a_site_that_is_replaced():
    held = silos()
    prior = nf.LowRankPrior.fit(with_intercept, "theta", BLOCKS, model_kwargs=held[0])
    federated = nf.handlers.substitute_prior(with_intercept, {"theta": prior})
    result = nf.SFVI(federated).run(KEY, 5, held, progress_bar=False)
    pooled = np.concatenate([s["y"] for s in held])
    b = result.sample_posterior(KEY, 2_000)["b"]
    assert abs(b.mean() - pooled.mean()) < 1
