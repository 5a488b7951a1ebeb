"""Guides: densities, gradients that stick the landing, NumPyro's autoguides, the default rule."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from cases import slow_but
from numpyro.infer import autoguide
from numpyro.infer.initialization import init_to_value
from problems import cut, gauss_hermite, glmm, glmm_silos, jitter, parts
from scipy import stats

import numpyro_fed as nf
from numpyro_fed.basics.errors import GuideError
from numpyro_fed.data.padding import bucket
from numpyro_fed.guides import global_guides
from numpyro_fed.guides.global_guides import from_autoguide
from numpyro_fed.guides.local_guides import LocalGuide
from numpyro_fed.numerics.gaussian import Coordinates, unit_lower

KEY = jax.random.key(0)
GLOBALS = {
    "diagonal": lambda dim: global_guides.Diagonal(dim, 0.5),
    "full": lambda dim: global_guides.Full(dim, 0.5),
    "low_rank": lambda dim: global_guides.LowRank(dim, 0.5, 1),
}


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def exact_global(kind, eta):
    """The mean and covariance that a guide's parameters stand for."""
    eta = jax.tree.map(np.asarray, eta)
    dim = len(eta["loc"])
    L = np.diag(np.exp(eta["log_scale"]))
    if kind == "full":
        T = np.eye(dim)
        T[np.tril_indices(dim, -1)] = eta["below"] / np.sqrt(dim - 1)
        L = T @ L
    covariance = L @ L.T
    if kind == "low_rank":
        covariance += eta["factor"] @ eta["factor"].T
    return eta["loc"], covariance


@jax.jit
def log_density(mean, covariance, z):
    """The multivariate normal density by NumPyro."""
    return dist.MultivariateNormal(mean, covariance_matrix=covariance).log_prob(z)


@pytest.mark.parametrize("kind", GLOBALS)
@pytest.mark.parametrize("dim", [1, 3])
def test_log_q_of_a_global_guide_is_the_gaussian_density(x64, kind, dim):
    guide = GLOBALS[kind](dim)
    eta = jitter(guide.init(KEY, jnp.ones(dim)))
    noise = guide.noise(KEY, 3)
    z, log_q = jax.jit(jax.vmap(guide.draw, (None, 0)))(eta, noise)
    expected = jax.vmap(log_density, (None, None, 0))(*exact_global(kind, eta), z)
    np.testing.assert_allclose(log_q, expected, rtol=1e-12)


@pytest.mark.parametrize("kind", GLOBALS)
def test_draws_of_a_global_guide_have_its_mean_and_covariance(x64, kind):
    guide = GLOBALS[kind](2)
    eta = jitter(guide.init(KEY, jnp.ones(2)))
    # Draws are affine in the noise, so that two Gauss-Hermite points give both moments exactly.
    noise, weights = gauss_hermite(2, guide.noise(KEY, 1).shape[1])
    z, _ = jax.jit(jax.vmap(guide.draw, (None, 0)))(eta, noise)
    mean, covariance = exact_global(kind, eta)
    np.testing.assert_allclose(weights @ z, mean, atol=1e-12)
    spread = np.einsum("n,ni,nj->ij", weights, z - mean, z - mean)
    np.testing.assert_allclose(spread, covariance, atol=1e-12)
    np.testing.assert_array_equal(guide.centre(eta), eta["loc"])


@pytest.mark.parametrize("kind", GLOBALS)
def test_a_global_guide_starts_where_it_is_told(kind):
    guide = GLOBALS[kind](3)
    eta = guide.init(KEY, jnp.array([1.0, -2.0, 0.5]))
    np.testing.assert_array_equal(guide.centre(eta), [1.0, -2.0, 0.5])
    np.testing.assert_allclose(jnp.exp(eta["log_scale"]), 0.5, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sfvi", "pvi"])
def test_a_hundred_correlated_globals_take_the_steps_that_one_does(method):
    """Each step moves 5,150 parameters, 4,950 of them below the diagonal."""

    model = models.logistic(1)
    r = np.random.default_rng(0)
    x = r.normal(size=(400, 100)).astype(np.float32)
    y = (x.sum(1) > 10 * r.normal(size=400)).astype(np.float32)
    silos = cut(dict(x=x, y=y), (200, 200))
    if method == "sfvi":
        result = nf.SFVI(model, optim=optax.adam(0.05), start=None).run(
            KEY, 300, silos, progress_bar=False
        )
        assert result.losses[-50:].mean() < result.losses[:10].mean()
    else:
        pvi = nf.PVI(model, local=nf.local.Optax(steps=300, tolerance=np.inf), start=None)
        result = pvi.run(KEY, 1, silos, progress_bar=False)
        assert set(result.rejections) == {"rejected_updates", "never_visited"}
        assert sum(result.rejections.values()) == 0


@pytest.mark.parametrize("kind", GLOBALS)
def test_no_gradient_is_left_where_a_global_guide_is_its_target(x64, kind):
    guide = GLOBALS[kind](3)
    eta = jitter(guide.init(KEY, jnp.ones(3)))
    target = exact_global(kind, eta)

    def term(eta, noise):
        z, log_q = guide.draw(eta, noise)
        return log_density(*target, z) - log_q

    noise = guide.noise(KEY, 5)
    each = jax.jit(jax.vmap(jax.grad(term), (None, 0)))(eta, noise)
    for leaf in jax.tree.leaves(each):
        np.testing.assert_allclose(leaf, 0.0, atol=1e-11)


@pytest.mark.parametrize("kind", GLOBALS)
def test_the_mean_gradient_of_a_global_guide_is_that_of_the_divergence(x64, kind):
    guide = GLOBALS[kind](2)
    eta = jitter(guide.init(KEY, jnp.ones(2)))
    where, precision = np.array([0.3, -0.4]), np.array([[2.0, 0.6], [0.6, 1.0]])
    # The gradient is a polynomial of degree two in the noise: three points are exact.
    noise, weights = gauss_hermite(3, guide.noise(KEY, 1).shape[1])

    def term(eta, noise):
        z, log_q = guide.draw(eta, noise)
        return -0.5 * (z - where) @ precision @ (z - where) - log_q

    each = jax.jit(jax.vmap(jax.grad(term), (None, 0)))(eta, noise)
    mean = jax.tree.map(lambda g: jnp.tensordot(weights, g, 1), each)

    def minus_divergence(eta):
        T = jnp.eye(2)
        if kind == "full":
            T = T.at[1, 0].set(eta["below"][0])
        L = T @ jnp.diag(jnp.exp(eta["log_scale"]))
        covariance = L @ L.T
        if kind == "low_rank":
            covariance += eta["factor"] @ eta["factor"].T
        gap = eta["loc"] - where
        expected = -0.5 * (jnp.trace(precision @ covariance) + gap @ precision @ gap)
        return expected + 0.5 * jnp.linalg.slogdet(covariance)[1]

    expected = jax.jit(jax.grad(minus_divergence))(eta)
    for name in eta:
        np.testing.assert_allclose(mean[name], expected[name], atol=1e-11, err_msg=name)


# --- the locals ----------------------------------------------------------------------------------

ROWS, DIM, WIDTH = 3, 2, 4
LOCALS = [(c, m, s) for c in ("diagonal", "full", "joint") for m in (0, 1) for s in (0, 1)]


def local_case(covariance, couple_mean, couple_scale):
    guide = LocalGuide(DIM, covariance, bool(couple_mean), bool(couple_scale), 0.5)
    eta = jitter(guide.init(jnp.zeros((ROWS, DIM)), WIDTH))
    above = 0.5 * jax.random.normal(jax.random.key(9), (WIDTH,))
    return guide, eta, above


def exact_local(covariance, eta, above):
    """Mean and covariance of all rows' latents together, written out row by row."""
    eta, above = jax.tree.map(np.asarray, (eta, above))
    mean, scale = eta["loc"].copy(), eta["log_scale"].copy()
    for i in range(ROWS):
        for d in range(DIM):
            if "mean_coupling" in eta:
                mean[i, d] += eta["mean_coupling"][i, d] @ above
            if "scale_coupling" in eta:
                scale[i, d] += eta["scale_coupling"][i, d] @ above
    T = np.eye(ROWS * DIM)
    if covariance == "full":
        for i in range(ROWS):
            T[i * DIM + 1, i * DIM] = eta["below"][i, 0]
    if covariance == "joint":
        below = eta["below"].reshape(ROWS * DIM, ROWS * DIM)
        for a in range(ROWS * DIM):
            T[a, :a] = below[a, :a]
    L = T @ np.diag(np.exp(scale.ravel()))
    return mean.ravel(), L @ L.T


@pytest.mark.parametrize(("covariance", "couple_mean", "couple_scale"), LOCALS)
def test_log_q_of_a_local_guide_is_the_gaussian_density(x64, covariance, couple_mean, couple_scale):
    guide, eta, above = local_case(covariance, couple_mean, couple_scale)
    assert ("mean_coupling" in eta, "scale_coupling" in eta) == (couple_mean, couple_scale)
    z = jax.random.normal(KEY, (ROWS, DIM))
    log_q = jax.jit(guide.log_q)(eta, above, z)
    assert log_q.shape == (ROWS,)
    mean, S = exact_local(covariance, eta, above)
    for r in range(1, ROWS + 1):  # rows of a joint guide are conditional on those before
        n = r * DIM
        expected = log_density(mean[:n], S[:n, :n], z.ravel()[:n])
        np.testing.assert_allclose(np.sum(log_q[:r]), expected, rtol=1e-11)


@pytest.mark.parametrize(("covariance", "couple_mean", "couple_scale"), LOCALS)
def test_draws_of_a_local_guide_have_its_mean_and_covariance(
    x64, covariance, couple_mean, couple_scale
):
    guide, eta, above = local_case(covariance, couple_mean, couple_scale)
    noise, weights = gauss_hermite(2, ROWS * DIM)
    z = jax.jit(jax.vmap(lambda e: guide.draw(eta, above, e.reshape(ROWS, DIM)).ravel()))(noise)
    mean, S = exact_local(covariance, eta, above)
    np.testing.assert_allclose(weights @ z, mean, atol=1e-11)
    spread = np.einsum("n,ni,nj->ij", weights, z - mean, z - mean)
    np.testing.assert_allclose(spread, S, atol=1e-11)


@pytest.mark.parametrize("covariance", ["diagonal", "full", "joint"])
def test_a_local_guide_of_one_latent_a_row(x64, covariance):
    guide = LocalGuide(1, covariance, True, True, 0.5)

    @jax.jit
    def found(above):
        eta = jitter(guide.init(jnp.zeros((1, 1)), 2))
        z = guide.draw(eta, above, jnp.array([[0.7]]))
        return eta, z, guide.log_q(eta, above, z)

    above = np.array([0.3, -0.2])
    eta, z, log_q = jax.tree.map(np.asarray, found(above))
    mean = eta["loc"][0, 0] + eta["mean_coupling"][0, 0] @ above
    scale = np.exp(eta["log_scale"][0, 0] + eta["scale_coupling"][0, 0] @ above)
    np.testing.assert_allclose(z[0, 0], mean + 0.7 * scale, rtol=1e-13)
    np.testing.assert_allclose(log_q, stats.norm(mean, scale).logpdf(z[0]), rtol=1e-12)


@pytest.mark.parametrize("covariance", ["diagonal", "full", "joint"])
def test_real_rows_of_a_local_guide_do_not_depend_on_padded_ones(x64, covariance):
    real, extra = 3, 2
    guide = LocalGuide(DIM, covariance, True, True, 0.5)

    @jax.jit
    def found(above):
        eta = jitter(guide.init(jnp.zeros((real + extra, DIM)), WIDTH))
        mine = {k: v[:real] for k, v in eta.items()}
        if covariance == "joint":
            mine["below"] = eta["below"][:real, :, :real]
        noise = jax.random.normal(KEY, (real + extra, DIM))
        z = guide.draw(eta, above, noise)
        draws = z[:real], guide.draw(mine, above, noise[:real])
        return draws, (guide.log_q(eta, above, z)[:real], guide.log_q(mine, above, z[:real]))

    draws, log_q = found(np.array([0.3, -0.2, 0.1, 0.5]))
    np.testing.assert_allclose(*draws, rtol=1e-13)
    np.testing.assert_allclose(*log_q, rtol=1e-12)


def hospitals(hospital, size, y=None):
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    with nf.silo_plate("hospital", size.shape[0]):
        u = numpyro.sample("u", dist.Normal(mu, 1))
    with nf.silo_plate("patient", hospital.shape[0]):
        b = numpyro.sample("b", dist.Normal(0, 1))
        numpyro.sample("y", dist.Poisson(jnp.exp(0.3 * (u[hospital] + b))), obs=y)


def hospital_silo(*groups, seed=0):
    """One silo: for each of its hospitals a number of patients."""
    r = np.random.default_rng(seed)
    index = np.repeat(np.arange(len(groups)), groups)
    return {"hospital": index, "size": np.array(groups, float), "y": r.poisson(1.5, len(index))}


def test_what_stands_above_a_row_is_measured_from_the_centres(x64):
    p = parts(hospitals, [hospital_silo(2, 3)])
    eta = jitter(p.guide.init_local(KEY, p.silos[0]))
    z_G = jnp.array([0.5])
    seen = Coordinates(z_G, jnp.array([0.2]))
    z_outer = {"hospital": jnp.array([[1.0], [-1.0]])}
    assert (p.guide.outer_plates, p.guide.row_plates) == (("hospital",), ("patient",))
    above = p.guide.offset_of_plate("hospital", eta, seen.offset, {}, p.silos[0])
    np.testing.assert_allclose(above, z_G - seen.centre)
    above = p.guide.offset_of_plate("patient", eta, seen.offset, z_outer, p.silos[0])
    offsets = (z_outer["hospital"] - eta["hospital"]["loc"]).ravel()
    np.testing.assert_allclose(above, jnp.concatenate([z_G - seen.centre, offsets]))
    assert eta["patient"]["mean_coupling"].shape == (5, 1, 3)


@pytest.mark.parametrize("locals_", ["auto", "joint"])
def test_padding_an_outer_plate_leaves_real_rows_alone(x64, locals_):
    silo = hospital_silo(2, 3)
    p = parts(
        hospitals,
        [silo, hospital_silo(1, 1, 4)],
        guide=nf.guides.Structured(locals=locals_),
    )
    data = p.silos[0]
    (both,) = bucket(p.silos, p.sizes)
    padded = jax.tree.map(lambda a: a[0], both.data)
    wide = jitter(p.guide.init_local(KEY, padded))
    here = {"hospital": 2, "patient": 5}
    mine = {plate: {k: v[: here[plate]] for k, v in wide[plate].items()} for plate in wide}
    for plate, n in here.items():
        if "below" in mine[plate]:
            mine[plate]["below"] = mine[plate]["below"][:, :, :n]
    for k in ("mean_coupling", "scale_coupling"):  # the third hospital is a padded one
        mine["patient"][k] = mine["patient"][k][..., :3]
    noise = {k: v[:, 0] for k, v in p.bound.noise(KEY, {"hospital": 3, "patient": 6}, 1).items()}
    less = {k: v[: here[k]] for k, v in noise.items()}
    z_G = jnp.array([0.5])
    seen = Coordinates(z_G, jnp.array([0.2]))
    # Arguments: theta, eta, z_G, seen, noise, data.
    grad = jax.jit(jax.value_and_grad(p.value, (1, 2, 3)))
    value, (g_eta, *g_above) = grad({}, wide, z_G, seen, noise, padded)
    expected, (e_eta, *e_above) = grad({}, mine, z_G, seen, less, data)
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    for a, b in zip(jax.tree.leaves(g_above), jax.tree.leaves(e_above), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10)
    for plate, n in here.items():
        for name, g in g_eta[plate].items():
            real = g[:n, :, :n] if name == "below" and g.ndim == 4 else g[:n]
            if plate == "patient" and name.endswith("coupling"):
                np.testing.assert_array_equal(g[..., 3:], 0.0)
                real = real[..., :3]
            np.testing.assert_allclose(real, e_eta[plate][name], atol=1e-12)
            np.testing.assert_array_equal(g[n:], 0.0)


# --- NumPyro's autoguides ------------------------------------------------------------------------


def three_globals(y):
    m = numpyro.sample("m", dist.Normal(0, 3).expand([3]).to_event(1))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(m, 1).to_event(1), obs=y)


def three_globals_silos():
    y = np.random.default_rng(0).normal(1.0, 1.0, (12, 3))
    return [{"y": y[:5]}, {"y": y[5:]}]


AUTOGUIDES = {
    "AutoNormal": {},
    "AutoDiagonalNormal": {},
    "AutoMultivariateNormal": {},
    "AutoLowRankMultivariateNormal": {"rank": 1},
    "AutoIAFNormal": {"num_flows": 2, "hidden_dims": [4]},
    "AutoBNAFNormal": {"num_flows": 1, "hidden_factors": [2]},
}


@pytest.mark.parametrize("name", slow_but(AUTOGUIDES, 0, 2))
def test_an_autoguide_of_the_globals(x64, name):
    auto = getattr(autoguide, name)(three_globals, **AUTOGUIDES[name])
    guide = from_autoguide(auto, 3)
    eta = jax.jit(lambda loc: jitter(guide.init(KEY, loc), 0.1))(np.array([0.5, -0.5, 1.0]))

    @jax.jit
    def at(noise):
        base = dist.Normal().log_prob(noise).sum()
        jacobian, (z, log_q) = jax.jacfwd(lambda e: 2 * (guide.draw(eta, e),), has_aux=True)(noise)
        return z, log_q, base, jacobian[0], guide.centre(eta)

    for seed in range(3):
        (noise,) = guide.noise(jax.random.key(seed), 1)
        z, log_q, base, jacobian, centre = map(np.asarray, at(noise))
        assert z.shape == (3,)
        assert np.isfinite(z).all()
        if len(noise) == 3:
            expected = base - np.linalg.slogdet(jacobian)[1]
        else:  # a low-rank guide takes more noise than it has dimensions, and is affine in it
            expected = stats.multivariate_normal(centre, jacobian @ jacobian.T).logpdf(z)
        np.testing.assert_allclose(log_q, expected, rtol=1e-9)
    assert centre.shape == (3,)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["AutoNormal", "AutoMultivariateNormal", "AutoIAFNormal", "AutoBNAFNormal"]
)
def test_a_fit_with_an_autoguide_of_the_globals_lowers_the_loss(name):
    auto = getattr(autoguide, name)(three_globals, **AUTOGUIDES[name])
    fit = nf.SFVI(three_globals, optim=optax.adam(0.05), guide=auto, start=None)
    result = fit.run(KEY, 150, three_globals_silos(), progress_bar=False)
    assert np.isfinite(result.losses).all()
    assert result.losses[-20:].mean() < result.losses[:5].mean() - 5
    assert result.sample_posterior(KEY, 4)["m"].shape == (4, 3)


@pytest.mark.slow
def test_a_low_rank_autoguide_learns_its_factor():
    def model(y):  # only the sum of the two is seen: their posterior correlation is near -1
        m = numpyro.sample("m", dist.Normal(0, 1).expand([2]).to_event(1))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(m.sum(), 0.5), obs=y)

    auto = autoguide.AutoLowRankMultivariateNormal(model, rank=1)
    fit = nf.SFVI(model, optim=optax.adam(0.02), guide=auto, num_particles=4, start=None)
    result = fit.run(KEY, 800, [{"y": np.ones(5)}], progress_bar=False)
    m = result.sample_posterior(KEY, 2_000)["m"]
    # The exact correlation is -0.95; the standard error of the estimate is about 0.002.
    assert np.corrcoef(m.T)[0, 1] < -0.85


def test_an_autoguide_keeps_its_own_settings():
    where = init_to_value(values={"m": jnp.array([1.0, 2.0, 3.0])})
    for kind in (autoguide.AutoNormal, autoguide.AutoMultivariateNormal):
        auto = kind(three_globals, init_loc_fn=where, init_scale=0.01)
        p = parts(three_globals, three_globals_silos(), guide=auto)
        z, _ = jax.jit(lambda e, p=p: p.guide.globals.draw(p.guide.init_global(KEY), e))(np.ones(3))
        np.testing.assert_allclose(z, [1.01, 2.01, 3.01], rtol=1e-5)


@pytest.mark.parametrize(
    "name",
    ["AutoDelta", "AutoLaplaceApproximation", "AutoDAIS", "AutoSemiDAIS", "AutoGuideList"],
)
def test_other_autoguides_are_refused_by_name(name):
    if name == "AutoSemiDAIS":
        base = autoguide.AutoNormal(three_globals)
        auto = autoguide.AutoSemiDAIS(three_globals, three_globals, base)
    else:
        auto = getattr(autoguide, name)(three_globals)
    with pytest.raises(GuideError, match=name):
        parts(three_globals, three_globals_silos(), guide=auto)


# --- the default rule, and what is refused --------------------------------------------------------


def many_globals(dim):
    def model(y):
        m = numpyro.sample("m", dist.Normal(0, 1).expand([dim]).to_event(1))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("b", dist.Normal(0, 1))
            numpyro.sample("y", dist.Normal(m[0], 1), obs=y)

    return model


@pytest.mark.parametrize(
    ("dim", "names"),
    [
        (300, {"loc", "log_scale", "below"}),
        (301, {"loc", "log_scale", "factor"}),
        (20_000, {"loc", "log_scale", "factor"}),
        (20_001, {"loc", "log_scale"}),
    ],
)
def test_the_default_guide_of_the_globals_follows_their_number(dim, names):
    p = parts(many_globals(dim), [{"y": np.zeros(2)}])
    eta = jax.eval_shape(p.guide.init_global, KEY)
    assert eta.keys() == names
    if "factor" in names:
        assert eta["factor"].shape == (dim, min(int(dim**0.5) + 1, 20))


@pytest.mark.parametrize(("rows", "coupled"), [(5_000, True), (5_001, False)])
def test_couplings_are_left_out_above_their_budget(rows, coupled):
    # 2,000 globals and one latent a row, in two silos: ten million coefficients at 5,000 rows.
    silos = [{"y": np.zeros(2_000)}, {"y": np.zeros(rows - 2_000)}]
    p = parts(many_globals(2_000), silos)
    eta = jax.eval_shape(p.guide.init_local, KEY, p.silos[0])["row"]
    assert ("mean_coupling" in eta, "scale_coupling" in eta) == (coupled, coupled)
    asked = nf.guides.Structured(couple_mean=True, couple_scale=False)
    p = parts(many_globals(2_000), silos, guide=asked)
    eta = jax.eval_shape(p.guide.init_local, KEY, p.silos[0])["row"]
    assert ("mean_coupling" in eta, "scale_coupling" in eta) == (True, False)


@pytest.mark.parametrize(("dim", "names"), [(1, set()), (30, {"below"}), (31, set())])
def test_the_default_guide_of_a_row_is_full_up_to_thirty_latents(dim, names):
    def model(y):
        with nf.silo_plate("row", y.shape[0]):
            b = numpyro.sample("b", dist.Normal(0, 1).expand([dim]).to_event(1))
            numpyro.sample("y", dist.Normal(b.sum(-1), 1), obs=y)

    p = parts(model, [{"y": np.zeros(2)}])
    eta = jax.eval_shape(p.guide.init_local, KEY, p.silos[0])["row"]
    assert eta.keys() - {"mean_coupling", "scale_coupling"} == {"loc", "log_scale"} | names


@pytest.mark.parametrize(("groups", "joint"), [(32, True), (33, False)])
def test_a_small_outer_plate_is_joint(groups, joint):
    p = parts(hospitals, [hospital_silo(*[1] * groups), hospital_silo(2, 1)])
    eta = jax.eval_shape(p.guide.init_local, KEY, p.silos[1])
    assert ("below" in eta["hospital"]) == joint
    assert "below" not in eta["patient"]
    if joint:
        assert eta["hospital"]["below"].shape == (2, 1, 2, 1)


def test_mean_field_has_no_couplings_and_no_covariances():
    p = parts(glmm, glmm_silos([3, 2]), guide=nf.guides.MeanField(init_scale=0.2))
    eta = {"globals": p.guide.init_global(KEY), **p.guide.init_local(KEY, p.silos[0])}
    for part in eta.values():
        assert part.keys() == {"loc", "log_scale"}
        np.testing.assert_allclose(part["log_scale"], np.log(0.2), rtol=1e-6)


def test_a_dict_of_local_guides_is_by_plate():
    spec = nf.guides.Structured(locals={"hospital": "diagonal", "patient": "joint"})
    p = parts(hospitals, [hospital_silo(2, 1)], guide=spec)
    eta = p.guide.init_local(KEY, p.silos[0])
    assert "below" not in eta["hospital"]
    assert eta["patient"]["below"].shape == (3, 1, 3, 1)


@pytest.mark.parametrize(
    ("guide", "message"),
    [
        (nf.guides.Structured(locals={"hospital": "full"}), "'b'.*'patient'"),
        (nf.guides.Structured(locals="block"), "'block'.*'joint'"),
        (nf.guides.Structured(globals="flow"), "'flow'.*'low_rank'"),
        (nf.guides.Structured(init_scale=0.0), "init_scale.*positive"),
        (lambda *args, **kwargs: None, "Structured.*function"),
    ],
)
def test_a_guide_that_cannot_work_is_refused(guide, message):
    with pytest.raises(GuideError, match=message):
        parts(hospitals, [hospital_silo(2, 1)], guide=guide)


def test_a_start_by_numpyros_init_functions_reaches_globals_and_rows():
    def model(y):
        m = numpyro.sample("m", dist.LogNormal(0, 1))
        with nf.silo_plate("row", y.shape[0]):
            b = numpyro.sample("b", dist.Normal(0, 1))
            numpyro.sample("y", dist.Normal(m + b, 1), obs=y)

    where = init_to_value(values={"m": jnp.array(2.0), "b": jnp.array([1.0, -1.0])})
    spec = nf.guides.Structured(init_loc_fn=where)
    p = parts(model, [{"y": np.zeros(2)}], guide=spec)
    np.testing.assert_allclose(p.guide.init_global(KEY)["loc"], [np.log(2.0)], rtol=1e-6)
    eta = p.guide.init_local(KEY, p.silos[0])
    np.testing.assert_allclose(eta["row"]["loc"], [[1.0], [-1.0]])


ORDER = np.array([2, 0, 3, 1])


def skewed_guide():
    guide = global_guides.Skewed(4, 0.3, tuple(ORDER))
    start = guide.init(KEY, jnp.arange(4.0))
    return guide, jax.tree.map(lambda a: a + 0.3 * jax.random.normal(KEY, a.shape), start)


@pytest.mark.slow
def test_a_skewed_guides_density_is_that_of_its_draws(double):
    """By the change of variables, and in its gradient: where it sticks the landing, by the draw."""
    guide, eta = skewed_guide()
    noise = guide.noise(KEY, 1)[0]
    z, log_q = guide.draw(eta, noise)
    slope = jax.jacfwd(lambda noise: guide.draw(eta, noise)[0])(noise)
    exact = -0.5 * (noise**2 + np.log(2 * np.pi)).sum() - jnp.linalg.slogdet(slope)[1]
    np.testing.assert_allclose([log_q, guide.log_density(eta, z)], exact, rtol=1e-10)
    fixed = jax.lax.stop_gradient(eta)
    by_density = jax.grad(lambda eta: guide.log_density(fixed, guide.draw(eta, noise)[0]))(eta)
    found = jax.grad(lambda eta: guide.draw(eta, noise)[1])(eta)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-10), found, by_density)


def test_a_skewed_guide_begins_at_a_gaussian_and_moves_in_its_coordinates(double):
    root = np.linalg.cholesky(np.eye(4) + 0.5)
    guide = KINDS["skewed"]

    @jax.jit
    def found(z, loc):
        frame, eta = guide.frame(jnp.ones(4), root), guide.init(KEY, jnp.zeros(4), 1.0)
        back = guide.place(frame, guide.coordinates(frame, z))
        moved = guide.in_z(frame, eta | {"loc": loc})["loc"] - guide.in_z(frame, eta)["loc"]
        return guide.density(frame, eta, z), back, moved

    z, loc = np.array([0.5, -1.0, 2.0, 1.5]), np.array([0.3, 1.4, 1.9, 3.2])
    density, back, moved = map(np.asarray, found(z, loc))
    exact = stats.multivariate_normal(np.ones(4), np.eye(4) + 0.5).logpdf(z)
    np.testing.assert_allclose(density, exact, rtol=1e-10)
    np.testing.assert_allclose(back, z, rtol=1e-12)
    P = np.eye(4)[ORDER]
    L = np.linalg.cholesky(P @ (np.eye(4) + 0.5) @ P.T)
    np.testing.assert_allclose(P @ moved, L @ loc, rtol=1e-10)


KINDS = {
    "diagonal": global_guides.Diagonal(4, 0.3),
    "full": global_guides.Full(4, 0.3),
    "skewed": global_guides.Skewed(4, 0.3, tuple(ORDER)),
    "low_rank": global_guides.LowRank(4, 0.3, 2),
}
LOC, ROOT = jnp.array([3.0, -2.0, 500.0, 0.0]), np.diag([1e-3, 1.0, 30.0, 2.0])


@pytest.mark.parametrize("root", [ROOT + np.tril(np.outer(np.diag(ROOT), [1, 1, 1, 1]), -1), ROOT])
@pytest.mark.parametrize("kind", slow_but(KINDS, 1))
def test_densities_in_a_frame_are_those_of_draws(kind, root, double):
    """By the change of variables where noise is standard, and by what is said of the guide."""
    guide = KINDS[kind]
    eta = guide.init(KEY, jnp.array([0.2, -0.4, 0.1, 0.3]), 0.7)
    eta = jax.tree.map(lambda a: a + 0.2 * jax.random.normal(KEY, a.shape), eta)

    @jax.jit
    def at(eta, noise):
        frame = guide.frame(LOC, jnp.asarray(root))
        seen, z, log_q = guide.draws(frame, eta, noise)
        densities = {"z": jax.vmap(lambda z: guide.density(frame, eta, z))(z)}
        if guide.has_standard_noise:
            slope = jax.jacfwd(lambda e: guide.draws(frame, eta, e[None])[1][0])(noise[0])
            of_noise = -0.5 * (noise[0] ** 2 + np.log(2 * np.pi)).sum()
            densities["noise"] = of_noise - jnp.linalg.slogdet(slope)[1]
        if kind != "skewed":
            said = guide.in_z(frame, eta)
            scale = jnp.exp(said["log_scale"])
            L = unit_lower(said["below"], 4) * scale if kind == "full" else jnp.diag(scale)
            W = said.get("factor", jnp.zeros((4, 0)))
            q = dist.MultivariateNormal(said["loc"], L @ L.T + W @ W.T)
            densities["said"] = q.log_prob(z)
        return seen, guide.centred_coordinates(frame, eta, z), log_q, densities

    seen, back, log_q, densities = at(eta, guide.noise(KEY, 3))
    np.testing.assert_allclose(back.u, seen.u, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(back.centre, seen.centre)
    np.testing.assert_allclose(densities["z"], log_q, rtol=1e-8)
    if guide.has_standard_noise:
        np.testing.assert_allclose(log_q[0], densities["noise"], rtol=1e-8)
    if kind != "skewed":
        np.testing.assert_allclose(densities["said"], log_q, rtol=1e-6)


@pytest.mark.parametrize("kind", slow_but(KINDS, 1))
def test_a_run_without_a_start_begins_where_it_was_told(kind):
    """Whatever the order in which a guide holds the globals."""

    def model(y):
        a = numpyro.sample("a", dist.Normal(0, 10))
        s = numpyro.sample("s", dist.LogNormal(0, 1))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(a, s), obs=y)

    told = init_to_value(values={"a": 7.0, "s": 0.5})
    guide = nf.guides.Structured(globals=kind, init_loc_fn=told, init_scale=0.01)
    sfvi = nf.SFVI(model, guide=guide, start=None)
    silos = [dict(y=np.array([1.0, 2.0])), dict(y=np.array([3.0, 4.0]))]
    result = sfvi.run(KEY, 0, silos, progress_bar=False)
    loc = result.params["guide"]["loc"]
    np.testing.assert_allclose(loc, [7.0, np.log(0.5)], rtol=1e-5)
    draws = result.sample_posterior(KEY, 20)
    assert abs(draws["a"] - 7).max() < 0.2
    assert abs(draws["s"] - 0.5).max() < 0.1


@pytest.mark.slow
def test_shared_parameters_keep_their_precision():
    def model(y):
        w = numpyro.param("w", jnp.zeros(2, jnp.float16))
        a = numpyro.sample("a", dist.Normal(0, 1))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(a + w.sum().astype(float), 1), obs=y)

    silos = [dict(y=np.array([1.0, 2.0])), dict(y=np.array([3.0, 4.0]))]
    result = nf.SFVI(model, start=None).run(KEY, 2, silos, progress_bar=False)
    assert result.params["w"].dtype == jnp.float16


@pytest.mark.slow
def test_coefficients_that_spread_as_the_noise_does_are_fitted():
    """The t posterior of a small regression, whose spread no Gaussian has: its sds to 5 %."""
    r = np.random.default_rng(0)
    x = np.stack([np.ones(20), r.normal(50, 10, 20)], 1)
    y = x @ [3.0, 2.0] + 5 * r.normal(size=20)

    def model(x, y):
        flat = dist.ImproperUniform(dist.constraints.real_vector, (), (2,))
        beta = numpyro.sample("beta", flat)
        sigma = numpyro.sample("sigma", dist.ImproperUniform(dist.constraints.positive, (), ()))
        numpyro.factor("jeffreys", -jnp.log(sigma))
        with nf.silo_plate("row", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)

    silos = [{"x": x[:8], "y": y[:8]}, {"x": x[8:], "y": y[8:]}]
    _, (squares,) = np.linalg.lstsq(x, y)[:2]
    sd = np.sqrt(np.diag(np.linalg.inv(x.T @ x)) * squares / 16)  # t with 18 degrees of freedom
    ratio = {}
    for kind in ("full", "skewed"):
        fit = nf.SFVI(model, guide=nf.guides.Structured(globals=kind))
        draws = fit.run(KEY, 1_000, silos, progress_bar=False).sample_posterior(KEY, 40_000)
        ratio[kind] = np.asarray(draws["beta"]).std(0) / sd
    assert (np.abs(ratio["skewed"] - 1) < 0.05).all()
    assert (ratio["full"] < ratio["skewed"]).all()
