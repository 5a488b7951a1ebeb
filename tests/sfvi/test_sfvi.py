"""SFVI where the answer is known in closed form, and what its messages promise."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from cases import slow_but
from numpyro.distributions import constraints
from problems import cut, glmm, glmm_silos, jitter, parts
from scipy import stats

import numpyro_fed as nf
from numpyro_fed.basics.errors import NonFiniteError
from numpyro_fed.rounds import convergence
from numpyro_fed.rounds.exchange import Combine, Replies, combine
from numpyro_fed.rounds.states import CarriedSilo
from numpyro_fed.rounds.step import replayed_part
from numpyro_fed.search.start_point import StartPoint

KEY = jax.random.key(0)


def fit(model, silos, rounds=1_500, rate=0.1, **settings):
    """A run whose step size falls to a ten-thousandth of where it begins.

    Where guide and target agree the gradient has no noise, so that the end is exact.
    """
    schedule = optax.exponential_decay(rate, rounds, 1e-4)
    method = nf.SFVI(model, optim=optax.adam(schedule), **settings, start=None)
    return method.run(KEY, rounds, silos, progress_bar=False)


def silos_of(y, sizes):
    return cut({"y": np.asarray(y)}, sizes)


Y = np.random.default_rng(3).normal(1.0, 1.5, 9)


# --- conjugate models: the exact posterior -------------------------------------------------------


mean_of_normals = models.level(2.0, 1.5, 0.5)


@pytest.mark.parametrize(("sizes", "num_particles"), slow_but([((9,), 1), ((2, 4, 3), 3)], 1))
def test_a_mean_with_known_variance_reaches_its_posterior(sizes, num_particles):
    result = fit(mean_of_normals, silos_of(Y, sizes), num_particles=num_particles)
    precision = 1 / 2.0**2 + len(Y) / 1.5**2
    guide = result.params["guide"]
    mean = (0.5 / 2.0**2 + Y.sum() / 1.5**2) / precision
    np.testing.assert_allclose(guide["loc"], [mean], atol=1e-3)
    np.testing.assert_allclose(jnp.exp(guide["log_scale"]), [precision**-0.5], rtol=1e-3)
    # The bound is then the log evidence, whatever the noise.
    covariance = 1.5**2 * np.eye(len(Y)) + 2.0**2
    evidence = stats.multivariate_normal(np.full(len(Y), 0.5), covariance).logpdf(Y)
    np.testing.assert_allclose(-result.losses[-10:], evidence, atol=1e-3)
    # By the losses of the last window a run is judged.
    np.testing.assert_allclose(
        result.state.server.course.loss, result.losses[-convergence.WINDOW :].mean(), rtol=1e-5
    )


two_coefficients = models.linear(1, 0.8)


@pytest.mark.slow
def test_correlated_globals_reach_their_posterior():
    r = np.random.default_rng(0)
    x = r.normal(size=(8, 2)) @ np.array([[1.0, 0.7], [0.0, 0.5]])
    y = x @ [1.0, -0.5] + 0.8 * r.normal(size=8)
    guide = fit(two_coefficients, cut({"x": x, "y": y}, [3, 5]), 2_500).params["guide"]
    covariance = np.linalg.inv(np.eye(2) + x.T @ x / 0.8**2)
    T = np.array([[1.0, 0.0], [guide["below"][0], 1.0]])
    L = T @ np.diag(np.exp(guide["log_scale"]))
    np.testing.assert_allclose(guide["loc"], covariance @ x.T @ y / 0.8**2, atol=1e-3)
    np.testing.assert_allclose(L @ L.T, covariance, atol=1e-3)


TAU, SIGMA, VISITS = 0.8, 1.2, 2


def hierarchy(y):
    mu = numpyro.sample("mu", dist.Normal(0, 2.0))
    with nf.silo_plate("row", y.shape[0], dim=-2):
        b = numpyro.sample("b", dist.Normal(mu, TAU))
        with numpyro.plate("visit", y.shape[1], dim=-1):
            numpyro.sample("y", dist.Normal(b, SIGMA), obs=y)


@pytest.mark.parametrize(
    "objective", slow_but([nf.ELBO(), nf.LocallyEnhanced(draws=3)], 0), ids=["1", "3"]
)
def test_a_hierarchy_of_normals_reaches_its_joint_posterior(objective):
    y = np.random.default_rng(1).normal(1.0, 1.5, (6, VISITS))
    result = fit(hierarchy, silos_of(y, [1, 3, 2]), 2_500, objective=objective)
    means, variance = y.mean(1), SIGMA**2 / VISITS
    precision = 1 / 2.0**2 + len(y) / (TAU**2 + variance)
    mu, sd = means.sum() / (TAU**2 + variance) / precision, precision**-0.5
    guide = result.params["guide"]
    np.testing.assert_allclose(guide["loc"], [mu], atol=1e-3)
    np.testing.assert_allclose(jnp.exp(guide["log_scale"]), [sd], rtol=1e-3)
    gain = TAU**2 / (TAU**2 + variance)
    for j, own in enumerate(cut(means, [1, 3, 2])):
        eta = result.silo_params(j)["guide"]["row"]
        eta = {name: rows[: len(own)] for name, rows in eta.items()}
        np.testing.assert_allclose(eta["loc"][:, 0], mu + gain * (own - mu), atol=1e-3)
        np.testing.assert_allclose(eta["mean_coupling"].ravel(), 1 - gain, atol=1e-3)
        np.testing.assert_allclose(eta["scale_coupling"].ravel(), 0.0, atol=1e-3)
        width = np.sqrt(gain * variance)
        np.testing.assert_allclose(jnp.exp(eta["log_scale"]).ravel(), width, rtol=1e-3)


@pytest.mark.slow
def test_an_outer_plate_above_rows_reaches_its_joint_posterior():
    model = models.wards(TAU, 0.5, SIGMA)
    groups = [(2, 1), (3,)]
    r = np.random.default_rng(2)
    silos = [
        {
            "ward": np.repeat(np.arange(len(g)), g),
            "size": np.zeros(len(g)),
            "y": r.normal(1.0, 1.5, sum(g)),
        }
        for g in groups
    ]
    result = fit(model, silos, 3_000)
    y = np.concatenate([s["y"] for s in silos])
    ward = np.array([0, 0, 1, 2, 2, 2])
    same = (ward[:, None] == ward).astype(float)
    covariance = TAU**2 * same + (0.25 + SIGMA**2) * np.eye(len(y))
    solved = np.linalg.solve(covariance, np.stack([np.ones(len(y)), y], -1)).sum(0)
    precision = 1 / 4 + solved[0]
    guide = result.params["guide"]
    np.testing.assert_allclose(guide["loc"], [solved[1] / precision], atol=2e-3)
    np.testing.assert_allclose(jnp.exp(guide["log_scale"]), [precision**-0.5], rtol=2e-3)
    evidence = dist.MultivariateNormal(np.zeros(len(y)), covariance + 4.0).log_prob(y)
    np.testing.assert_allclose(-result.losses[-100:].mean(), evidence, atol=2e-3)


# --- parameters without a prior ------------------------------------------------------------------


def empirical_bayes(y):
    m = numpyro.param("m", 0.0)
    tau = numpyro.param("tau", 1.0, constraint=constraints.positive)
    with nf.silo_plate("row", y.shape[0]):
        b = numpyro.sample("b", dist.Normal(m, tau))
        numpyro.sample("y", dist.Normal(b, 0.7), obs=y)


@pytest.mark.slow
def test_shared_parameters_reach_the_maximum_of_the_marginal_likelihood():
    # No global latents: rows y ~ N(m, tau^2 + 0.7^2) once their own latents are integrated out.
    result = fit(empirical_bayes, silos_of(Y, (4, 5)), 3_000, num_particles=32)
    assert Y.var() > 0.7**2
    # The gradient for theta keeps the noise of the draws: over six seeds the standard deviation of
    # the end is 0.0012 for m and 0.0008 of tau. Four of each.
    np.testing.assert_allclose(result.params["m"], Y.mean(), atol=5e-3)
    np.testing.assert_allclose(result.params["tau"], np.sqrt(Y.var() - 0.7**2), rtol=4e-3)
    draws = result.sample_posterior(KEY, 5, silo=1)
    assert draws.keys() == {"b"}
    assert draws["b"].shape == (5, 5)


def test_a_scale_beside_a_global_latent_reaches_its_optimum():
    def model(y):
        sigma = numpyro.param("sigma", 1.0, constraint=constraints.positive)
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu, sigma), obs=y)

    result = fit(model, silos_of(Y, (4, 5)), 2_500, num_particles=8)
    # The evidence N(y; 0, sigma^2 I + 1 1') as a function of sigma, on a fine grid.
    grid = np.linspace(0.5, 3.0, 25_001)
    n, v = len(Y), grid**2
    quadratic = (Y**2).sum() / v - Y.sum() ** 2 / v / (v + n)
    evidence = -0.5 * ((n - 1) * np.log(v) + np.log(v + n) + quadratic)
    # Over six seeds the standard deviation of the end is 0.0005 of sigma: four of these.
    np.testing.assert_allclose(result.params["sigma"], grid[evidence.argmax()], rtol=2e-3)


@pytest.mark.slow
def test_private_parameters_are_one_for_each_silo():
    def model(y):
        tau = numpyro.param("tau", 1.0, constraint=constraints.positive)
        with nf.silo_plate("row", y.shape[0]):
            shift = numpyro.param("shift", 0.0)
            numpyro.sample("y", dist.Normal(shift, tau), obs=y)

    silos = silos_of(Y, (4, 2, 3))
    result = fit(model, silos, 2_500)
    left = 0.0
    for j, silo in enumerate(silos):
        params = result.silo_params(j)
        np.testing.assert_allclose(params["shift"], silo["y"].mean(), atol=1e-3)
        left += ((silo["y"] - silo["y"].mean()) ** 2).sum()
    assert "shift" not in result.params
    np.testing.assert_allclose(result.params["tau"], np.sqrt(left / len(Y)), rtol=1e-3)


def test_private_parameters_of_rows_keep_their_own_shapes_in_padded_silos():
    def model(y):
        with nf.silo_plate("row", y.shape[0]):
            shift = numpyro.param("shift", jnp.zeros(y.shape[0]))
            numpyro.sample("y", dist.Normal(shift, 1.0), obs=y)

    silos = silos_of(Y, (4, 2, 3))
    result = fit(model, silos)
    for j, silo in enumerate(silos):
        np.testing.assert_allclose(result.silo_params(j)["shift"], silo["y"], atol=1e-3)


def test_a_model_without_local_latents_samples_at_a_silo():
    method = nf.SFVI(mean_of_normals, start=None)
    result = method.run(KEY, 0, silos_of(Y, (4, 5)), progress_bar=False)
    draws = result.sample_posterior(KEY, 3, silo=1)
    assert draws.keys() == {"mu"}
    np.testing.assert_array_equal(draws["mu"], result.sample_posterior(KEY, 3)["mu"])


# --- messages ------------------------------------------------------------------------------------


@pytest.mark.parametrize("guide", [None, nf.guides.MeanField()])
def test_a_reply_has_one_shape_whatever_the_silo_holds(guide):
    p = parts(glmm, glmm_silos([1, 9, 4]), guide=guide, num_particles=2)
    (exchange,) = p.algorithm.round.exchanges

    def reply(data):
        server = p.algorithm.init_server(KEY)
        who = jnp.arange(len(p.silos))
        down = replayed_part(p.algorithm.round, server, p.algorithm.round.noise(KEY), who)
        state = p.algorithm.init_silo(KEY, data)
        reply, _ = exchange.silo(exchange.silo_noise(KEY, state), down, state, data)
        return down, reply.up

    shapes = [jax.eval_shape(reply, data) for data in p.silos]
    assert shapes[0] == shapes[1] == shapes[2]
    down, up = shapes[0]
    assert jax.tree.map(lambda a: a.shape, down) == jax.tree.map(lambda a: a.shape, up.gradient)
    assert (up.bound.shape, up.gradient.z_G.shape) == ((), (2, 3))


def test_what_is_sent_are_draws_of_the_guide_and_its_centre():
    p = parts(glmm, glmm_silos([2, 3]), num_particles=4)

    @jax.jit
    def found():
        state = p.algorithm.init_server(KEY)
        state = state._replace(params=jitter(state.params))
        eps = p.algorithm.round.noise(KEY)
        down = replayed_part(p.algorithm.round, state, eps, jnp.arange(2))
        eta = state.params.guide
        return down, eta["loc"], jnp.stack([p.guide.globals.draw(eta, e)[0] for e in eps])

    down, loc, expected = found()
    assert len(down.z_G) == 4
    np.testing.assert_allclose(down.z_G, expected, rtol=1e-6)
    np.testing.assert_array_equal(down.coordinates.centre, loc)
    np.testing.assert_array_equal(down.coordinates.u, down.z_G)
    assert down.theta == {}


def test_a_silo_that_goes_on_from_a_result_keeps_its_guides_in_other_coordinates():
    """A row's mean 0.3 + 0.5 (mu - 1) is 1.3 + 1.0 u where mu is 3 + 2 u."""
    p = parts(models.levels(), [dict(y=np.array([0.5, -1.0]))])
    state = p.algorithm.init_silo(KEY, p.silos[0])
    eta = {k: jnp.full_like(a, 0.5) for k, a in state.params.guide["row"].items()}
    eta["loc"] = jnp.full_like(eta["loc"], 0.3)
    carried = CarriedSilo({}, {"row": eta}, jnp.array([1.0]))
    point = StartPoint({}, {}, jnp.array([3.0]), jnp.array([[2.0]]))
    after = p.algorithm.warm_start.silo(KEY, carried, point, p.silos[0]).params.guide["row"]
    np.testing.assert_allclose(after["loc"].ravel(), 1.3, rtol=1e-6)
    np.testing.assert_allclose(after["mean_coupling"].ravel(), 1.0, rtol=1e-6)


@pytest.mark.slow
def test_several_particles_are_the_mean_of_single_ones():
    with jax.enable_x64(True):
        silos = glmm_silos([3])
        one, three = (parts(glmm, silos, num_particles=n) for n in (1, 3))
        data = one.silos[0]

        @jax.jit
        def found():
            server = jitter(one.algorithm.init_server(KEY).params)
            state = one.algorithm.init_silo(KEY, data)
            state = state._replace(params=jitter(state.params))
            round = three.algorithm.round
            return server, state, round.noise(KEY), round.exchanges[0].silo_noise(KEY, state)

        server, state, eps, rows = found()
        assert (eps.shape, rows.rows["child"].shape) == ((3, 3), (3, 3, 1, 1, 1))

        def round_of(p):
            round = p.algorithm.round

            @jax.jit
            def run(eps, rows):
                start = p.algorithm.init_server(KEY)._replace(params=server)
                down = replayed_part(round, start, eps, jnp.arange(1))
                reply, after = round.exchanges[0].visit(rows, down, state, data)
                end, info = replayed_part(round, start, eps, jnp.arange(1), None, [Replies(*reply)])
                return info.loss, end.params, after.params, reply.up.bound

            return run

        # Under sgd(1.0) new parameters are old ones plus the gradient.
        ask = round_of(one)
        each = [
            ask(eps[i : i + 1], rows._replace(rows={"child": rows.rows["child"][:, i : i + 1]}))
            for i in range(3)
        ]
        mean = jax.tree.map(lambda *a: sum(map(np.asarray, a)) / 3, *each)
        got = round_of(three)(eps, rows)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11), got, mean)


# --- one bad silo --------------------------------------------------------------------------------


def roots(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with nf.silo_plate("row", y.shape[0]):
        b = numpyro.sample("b", dist.Normal(mu, 1))
        numpyro.sample("y", dist.Normal(b, jnp.sqrt(y)), obs=y)


@pytest.mark.parametrize("objective", [nf.ELBO(), nf.LocallyEnhanced(draws=3)], ids=["1", "3"])
def test_a_silo_whose_bound_is_not_finite_sends_zeros_and_says_so(objective):
    p = parts(
        roots, [{"y": np.array([1.0, 2.0])}, {"y": np.array([1.0, -1.0])}], objective=objective
    )
    round, who = p.algorithm.round, jnp.arange(len(p.silos))
    (exchange,) = round.exchanges

    def part(*replies):
        server = p.algorithm.init_server(KEY)
        return replayed_part(round, server, round.noise(KEY), who, None, *replies)

    @jax.jit
    def visit(data):
        state = p.algorithm.init_silo(KEY, data)
        return exchange.visit(exchange.silo_noise(KEY, state), part(), state, data)[0]

    @jax.jit
    def ended(replies):
        return part([combine(Combine.SUM, replies)])

    replies = []
    for j, data in enumerate(p.silos):
        reply = visit(data)
        assert bool(reply.ok) == (j == 0)
        replies.append(jax.tree.map(lambda a: np.asarray(a)[None], reply))
    for leaf in jax.tree.leaves(replies[1].up):
        np.testing.assert_array_equal(leaf, 0.0)
    assert any(np.any(leaf != 0) for leaf in jax.tree.leaves(replies[0].up.gradient))
    after, info = ended(replies)
    assert not info.ok
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after))
    _, info = ended(replies[:1])
    assert info.ok


def test_a_run_with_a_bad_silo_stops_and_names_it():
    silos = [{"y": np.array([1.0, 2.0])}, {"y": np.array([1.0, -1.0])}]
    with pytest.raises(NonFiniteError, match="silo 1") as caught:
        nf.SFVI(roots, optim=optax.adam(0.1), start=None).run(KEY, 5, silos, progress_bar=False)
    assert caught.value.silos == (1,)
    assert caught.value.result.losses.shape == (0,)
