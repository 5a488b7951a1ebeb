"""Vertical models: the text, its halves, and Algorithms 1 and 2 against pooled inference."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax.scipy.linalg import block_diag
from numpyro.infer import Predictive
from numpyro.infer.autoguide import AutoLowRankMultivariateNormal
from numpyro.infer.util import log_density

import numpyro_fed as nf
from numpyro_fed.algorithms.transforms import round_to_grid, transformed
from numpyro_fed.algorithms.vertical.weigh import Weighing
from numpyro_fed.gaussian import unit_lower
from numpyro_fed.methods.host import SEARCHES
from numpyro_fed.methods.vertical import begin
from numpyro_fed.model.roles import split_vertical
from numpyro_fed.model.row_ids import digest, read_ids
from numpyro_fed.results.vertical import VerticalResult
from numpyro_fed.runtime.combine import combine
from numpyro_fed.runtime.host import host
from numpyro_fed.runtime.noise import exchange_key, server_key
from numpyro_fed.runtime.simulation import simulation
from numpyro_fed.runtime.step import part

KEY = jax.random.key(0)


def linear(x):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[-1]]).to_event(1))
    return x @ beta


def scaled(x):
    """With a bounded latent and a factor of its own."""
    scale = numpyro.sample("scale", dist.HalfNormal(2.0))
    numpyro.factor("shrink", -scale)
    return scale * linear(x)


def gaussian(xs, y=None, offset=0.0):
    b = numpyro.sample("b", dist.Normal(0, 1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    eta = nf.client_sum("client", linear, xs)
    with numpyro.plate("obs", eta.shape[0]):
        numpyro.sample("y", dist.Normal(b + eta + offset, sigma), obs=y)


def logistic(xs, y=None):
    b = numpyro.sample("b", dist.Normal(0, 1))
    eta = nf.client_sum("client", [scaled, *([linear] * (len(xs) - 1))], xs)
    with numpyro.plate("obs", eta.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=b + eta), obs=y)


def data(n=12, widths=(2, 3, 3), seed=0):
    r = np.random.default_rng(seed)
    return [r.normal(size=(n, p)).astype(np.float32) for p in widths], r.integers(0, 2, n)


def drawn(model, *args, **kwargs):
    """Values of all latents, by NumPyro itself."""
    trace = numpyro.handlers.trace(numpyro.handlers.seed(model, 3)).get_trace(*args, **kwargs)
    return {
        name: site["value"]
        for name, site in trace.items()
        if site["type"] == "sample" and not site["is_observed"]
    }


def unconstrained(half, values):
    at = {s.name: half.supports[s.name] for s in half.named("latent")}
    parts = [
        jnp.ravel(numpyro.distributions.biject_to(support).inv(values[name]))
        for name, support in at.items()
    ]
    return jnp.concatenate([jnp.zeros(0), *parts])


def log_det(half, z):
    """Of the bijections, which the joint density of NumPyro's model does not have."""
    total = 0.0
    for s in half.named("latent"):
        bijection = numpyro.distributions.biject_to(half.supports[s.name])
        u = z[s.start : s.stop].reshape(s.shape)
        total += bijection.log_abs_det_jacobian(u, bijection(u)).sum()
    return total


def overdispersed(xs, y=None):
    """The sum is in the distribution of a latent for each row."""
    eta = nf.client_sum("client", linear, xs)
    with numpyro.plate("obs", eta.shape[0]):
        u = numpyro.sample("u", dist.Normal(eta, 0.5))
        numpyro.sample("y", dist.Poisson(jnp.exp(u)), obs=y)


@pytest.mark.slow
def test_latents_of_the_sum_are_fitted():
    result = nf.VFL(overdispersed).run(KEY, 3, *data(), progress_bar=False)
    assert result.start is not None
    assert result.sample_posterior(KEY, 2)["u"].shape == (2, 12)


@pytest.mark.parametrize("model", [gaussian, logistic, overdispersed])
def test_halves_add_up_to_the_joint_density(model):
    xs, y = data()
    model_, server, clients, _ = split_vertical(model, (xs, y), {})
    values = drawn(model, xs, y)
    own, total = 0.0, 0.0
    for j, (half, held) in enumerate(zip(model_.clients, clients, strict=True)):
        mine = {n: values[f"client_{j}/{n}"] for n in (s.name for s in half.named("latent"))}
        z = unconstrained(half, mine)
        g, prior = model_.predict(half, {}, z, held)
        total, own = total + g, own + prior - log_det(half, z)
    z = unconstrained(model_.server, values)
    prior, likelihood = model_.log_server({}, z, total, server)
    found = own + prior + likelihood - log_det(model_.server, z)
    expected = log_density(model, (xs, y), {}, values)[0]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_what_parties_hold():
    xs, y = data()
    model, server, clients, _ = split_vertical(gaussian, (xs, y), dict(offset=np.ones(12)))
    assert set(server.arrays) == {"y", "offset"}
    assert [set(c.arrays) for c in clients] == [{"columns"}] * 3
    assert (model.response, model.by_row, model.rows) == (("y",), {"y"}, 12)
    _, _, clients, _ = split_vertical(gaussian, (xs, y), {}, share_response=True)
    assert set(clients[0].kwargs["shared"]) == {"y"}


@pytest.mark.slow
def test_predictive_for_new_rows():
    xs, y = data()
    draws = nf.VFL(gaussian).run(KEY, 5, xs, y, progress_bar=False).sample_posterior(KEY, 7)
    new, _ = data(n=4, seed=1)
    assert Predictive(gaussian, draws)(KEY, new)["y"].shape == (7, 4)


# --- Algorithms 1 and 2 against one gradient of the pooled bound -------------------------------


def root_of_guide(eta):
    """Of the covariance of a full Gaussian guide."""
    return unit_lower(eta["below"], len(eta["loc"])) * jnp.exp(eta["log_scale"])


def bound_of(model, v, held, xs, y, server_noise, client_noises):
    """The pooled bound as a function of all parties' parameters, from NumPyro's density."""

    root = root_of_guide

    def normal(shared, parties):
        """Mean and covariance of all parties' latents, in a row."""
        loc = jnp.concatenate([own["guide"]["loc"] for own in parties])
        T = block_diag(*(root(own["guide"]) for own in parties))
        V = jnp.concatenate([own.get("coupling", jnp.zeros((len(T), 0))[:0]) for own in parties])
        if not shared:
            return loc, T @ T.T
        W = T @ V
        return loc + W @ shared["loc"], T @ T.T + W @ root(shared) @ root(shared).T @ W.T

    def drawn(shared, parties, noises):
        """One draw of each party, and their density with parameters stopped."""
        xi = shared["loc"] + root(shared) @ server_noise.xi[0] if shared else jnp.zeros(0)
        zs = []
        for own, eps in zip(parties, noises, strict=True):
            eta, V = own["guide"], own.get("coupling", jnp.zeros((len(eps), 0)))
            zs.append(eta["loc"] + root(eta) @ (eps + V @ xi))
        q = dist.MultivariateNormal(*normal(*jax.lax.stop_gradient((shared, parties))))
        return zs, q.log_prob(jnp.concatenate(zs))

    def sites(half, z):
        """Constrained values, and the log-determinant."""
        values = {}
        for s in half.named("latent"):
            bijection = numpyro.distributions.biject_to(half.supports[s.name])
            values[s.name] = bijection(z[s.start : s.stop].reshape(s.shape))
        return values, log_det(half, z)

    def bound(server, clients):
        parties = [server["own"], *(params["own"] for params in clients)]
        noises = [server_noise.eps[0], *(eps[0] for eps, _ in client_noises)]
        (z, *zs), log_q = drawn(server["shared"], parties, noises)
        values, extra = sites(v.model.server, z)
        for j, (params, (_, tau)) in enumerate(zip(clients, client_noises, strict=True)):
            own, extra_j = sites(v.model.clients[j], zs[j])
            extra = extra + extra_j
            values |= {f"client_{j}/{n}": value for n, value in own.items()}
            if v.rho is not None:
                psi = params["auxiliary"]
                z_j = v.rho * (psi["loc"] + jnp.exp(psi["log_scale"]) * tau[0])
                fixed = jax.lax.stop_gradient(psi)
                q = dist.Normal(v.rho * fixed["loc"], v.rho * jnp.exp(fixed["log_scale"]))
                log_q = log_q + q.log_prob(z_j).sum()
                values[f"client_{j}/z"] = z_j
        return log_density(model, (xs, y), {}, values)[0] + extra - log_q

    return bound


def one_by_one(result, stacks):
    """Silo states by client."""
    return [
        jax.tree.map(lambda a, i=i: a[i], stacks[b])
        for b, i in (result._silos.place(j) for j in range(result.num_clients))
    ]


CASES = {
    "exact": (dict(), lambda model: model),
    "sharing": (dict(rank=3), lambda model: model),
    "augmented": (dict(rho=0.7, rank=2), lambda model: nf.handlers.augment(model, 0.7)),
    "power": (
        dict(rho=0.7, likelihood="power", share_response=True),
        lambda model: nf.handlers.power_likelihood(model, 0.7),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("model", [gaussian, logistic])
@pytest.mark.parametrize("case", CASES)
def test_rounds_are_those_of_the_pooled_model(case, model):
    """After two rounds, with the same noise: the exact split, Algorithm 1 and Algorithm 2."""
    xs, y = data()
    settings, handler = CASES[case]
    optim = optax.adam(0.05)
    vfl = nf.VFL(model, optim=optim, start=None, **settings)
    run = [vfl.run(KEY, n, xs, y, progress_bar=False) for n in (1, 2)]
    fit, held = vfl._prepare((xs, y), {}, "simulation")
    state = fit.runtime.init(KEY, held.batches)
    params = (state.server.params, [s.params for s in one_by_one(run[0], state.silos)])
    opt_state = optim.init(params)  # Adam takes each number by itself
    round_ = fit.algorithm.round
    for number, result in enumerate(run):
        noises = [s.noise for s in one_by_one(result, result.state.silos)]
        first = exchange_key(KEY, number, 0, len(round_.exchanges))
        noise = round_.noise(server_key(first))
        bound = bound_of(handler(model), fit.vertical, held, xs, y, noise, noises)
        value, gradient = jax.value_and_grad(lambda p, bound=bound: bound(*p))(params)
        np.testing.assert_allclose(-result.losses[-1], value, rtol=1e-5)
        descent = jax.tree.map(jnp.negative, gradient)
        updates, opt_state = optim.update(descent, opt_state, params)
        params = optax.apply_updates(params, updates)
        found = (
            result.state.server.params,
            [s.params for s in one_by_one(result, result.state.silos)],
        )
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, params)


# --- closed forms ------------------------------------------------------------------------------


def posterior_of(model, xs, y):
    """Mean and covariance of (b, beta) under a Gaussian model, its auxiliary variables integrated
    out, from the Hessian of its log density.
    """
    names = ["b", *(f"client_{j}/beta" for j in range(len(xs)))]
    sizes = [(), *((x.shape[1],) for x in xs)]
    rest = [f"client_{j}/z" for j in range(len(xs))]
    auxiliary = "client_0/z" in drawn(model, xs, y)
    names, sizes = names + rest * auxiliary, sizes + [y.shape] * (len(xs) * auxiliary)
    ends = np.cumsum([int(np.prod(s)) for s in sizes])

    def log_joint(flat):
        parts = jnp.split(flat, ends[:-1])
        values = {n: p.reshape(s) for n, p, s in zip(names, parts, sizes, strict=True)}
        return log_density(model, (xs, y), {}, values)[0]

    zero = jnp.zeros(ends[-1])
    slope, curvature = jax.grad(log_joint)(zero), jax.hessian(log_joint)(zero)
    covariance = jnp.linalg.inv(-curvature)
    own = sum(x.shape[1] for x in xs) + 1
    return (covariance @ slope)[:own], covariance[:own, :own]


def known_noise(xs, y=None, sigma=0.7):
    b = numpyro.sample("b", dist.Normal(0, 1))
    eta = nf.client_sum("client", linear, xs)
    with numpyro.plate("obs", eta.shape[0]):
        numpyro.sample("y", dist.Normal(b + eta, sigma), obs=y)


def gaussian_data():
    r = np.random.default_rng(1)
    return [r.normal(size=(15, p)) for p in (2, 1, 2)], r.normal(size=15)


@pytest.mark.slow
def test_augmented_gaussian_has_the_noise_of_the_sum(double):
    """``z_j`` add ``J rho^2`` to the variance of the response."""
    (xs, y), rho = gaussian_data(), 0.6
    mean, covariance = posterior_of(nf.handlers.augment(known_noise, rho), xs, y)

    def wide(xs, y):
        known_noise(xs, y, (0.7**2 + len(xs) * rho**2) ** 0.5)

    expected = posterior_of(wide, xs, y)
    np.testing.assert_allclose(mean, expected[0], atol=1e-8)
    np.testing.assert_allclose(covariance, expected[1], atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("handler", [nf.handlers.augment, nf.handlers.power_likelihood])
def test_models_approach_the_true_one_as_rho_squared(handler, double):
    xs, y = gaussian_data()
    mean, covariance = posterior_of(known_noise, xs, y)
    errors = []
    for rho in (0.08, 0.04, 0.02, 0.01):
        m, c = posterior_of(handler(known_noise, rho), xs, y)
        sd = jnp.sqrt(jnp.diagonal(covariance))
        errors.append(
            [jnp.abs((m - mean) / sd).max(), jnp.abs(jnp.diagonal(c) ** 0.5 / sd - 1).max()]
        )
    errors = np.array(errors)
    orders = np.log2(errors[:-1] / errors[1:])
    assert (abs(orders[-1] - 2) < 0.1).all(), orders
    assert (errors[-1] < 2e-3).all(), errors


# --- runs --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "batch_size", "start"),
    [("exact", None, "mode"), ("augmented", 5, None), ("power", 5, "mode")],
)
def test_host_and_compiled_rounds_agree_and_runs_go_on(case, batch_size, start, tmp_path):
    xs, y = data()
    vfl = nf.VFL(logistic, batch_size=batch_size, start=start, **CASES[case][0])
    whole = vfl.run(KEY, 6, xs, y, progress_bar=False)
    plain = vfl.run(KEY, 6, xs, y, progress_bar=False, runtime="host")
    np.testing.assert_allclose(whole.losses, plain.losses, rtol=2e-4)
    first = vfl.run(KEY, 2, xs, y, progress_bar=False)
    rest = vfl.run(KEY, 4, xs, y, progress_bar=False, init_state=first.state)
    jax.tree.map(np.testing.assert_array_equal, rest.state, whole.state)
    np.testing.assert_array_equal(np.concatenate([first.losses, rest.losses]), whole.losses)
    whole.save(tmp_path / "fit")
    again = vfl.load(tmp_path / "fit", xs, y)
    jax.tree.map(np.testing.assert_array_equal, again.state, whole.state)
    key = jax.random.key(5)
    jax.tree.map(
        np.testing.assert_array_equal,
        again.sample_posterior(key, 3),
        whole.sample_posterior(key, 3),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "auxiliary"),
    [("exact", "auto"), ("augmented", "mean_field"), ("power", "amortised")],
)
def test_minibatches_are_unbiased(case, auxiliary):
    """One row at a time, over all rows: the mean of the gradients is that of all rows."""
    xs, y = data(n=4)
    settings = dict(auxiliary=auxiliary, optim=optax.sgd(1.0), start=None, **CASES[case][0])
    alone = nf.VFL(logistic, batch_size=1, **settings)
    every = nf.VFL(logistic, **settings)
    fits = [vfl._prepare((xs, y), {}, "host") for vfl in (alone, every)]
    held = fits[0][1]
    states = [fit.runtime.init(KEY, held.batches) for fit, _ in fits]

    @partial(jax.jit, static_argnums=0)
    def stepped(i, rows, picked):
        """Parameters of all parties after a step with the given noise and rows."""
        fit, state = fits[i][0], states[i]
        v, algorithm = fit.vertical, fit.algorithm
        server, silos = state.server, one_by_one(_Held(held), state.silos)
        full, clients = states[1], jax.tree.map(jnp.asarray, held.data)
        served = jax.tree.map(jnp.asarray, fit.server_data)
        noise = fits[1][0].vertical.server_noise(KEY)._replace(rows=rows)
        noises = [s.noise for s in one_by_one(_Held(held), full.silos)]
        asked, given = (algorithm.round, server, noise, jnp.arange(3), served), []
        for exchange in algorithm.round.exchanges:
            down, replies = part(*asked, given), []
            for j, client in enumerate(clients):
                eps, tau = noises[j]
                if picked is not None and v.rho is not None:
                    tau = tau[:, picked]
                mine = (eps, tau) if exchange.name == "draw" else ()
                reply, silos[j] = exchange.visit(mine, down, silos[j], client)
                replies.append(jax.tree.map(lambda a: jnp.asarray(a)[None], reply))
            given.append(combine(exchange.combine, replies))
        server, _ = part(*asked, given)
        return server.params, [s.params for s in silos]

    whole = stepped(1, (), None)
    each = [stepped(0, jnp.array([i]), jnp.array([i])) for i in range(4)]
    mean = jax.tree.map(lambda *a: sum(a) / 4, *each)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), mean, whole)


class _Held:
    """As a result, for ``one_by_one``."""

    def __init__(self, held):
        self._silos, self.num_clients = held, len(held.data)


def test_one_method_runs_in_either_precision():
    """Of yes and no alone the precision is not in the data."""
    xs = [np.random.default_rng(j).integers(0, 2, (12, 2)).astype(bool) for j in range(2)]
    y = np.random.default_rng(2).integers(0, 2, 12).astype(bool)

    def counted(x):
        return linear(jnp.asarray(x, float))

    def model(xs, y):
        eta = nf.client_sum("client", counted, xs)
        with numpyro.plate("obs", eta.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=eta), obs=y)

    vfl = nf.VFL(model, start=None)
    single = vfl.run(jax.random.key(0), 2, xs, y, progress_bar=False)
    with jax.enable_x64(True):
        double = vfl.run(jax.random.key(0), 2, xs, y, progress_bar=False)
    assert [r._fit.built.model.dtype for r in (single, double)] == ["float32", "float64"]


@pytest.mark.slow
def test_a_second_run_of_the_same_shapes_builds_nothing():
    xs, y = data()
    vfl = nf.VFL(logistic)
    fits = []
    for seed in (0, 1):
        xs, y = data(seed=seed)
        vfl.run(KEY, 2, xs, y, progress_bar=False)
        fits.append(vfl._prepare((xs, y), {}, "simulation")[0])
    assert fits[0].built is fits[1].built


@pytest.mark.slow
def test_amortised_guides_do_not_grow_with_rows():
    def size(n):
        xs, y = data(n=n)
        vfl = nf.VFL(logistic, rho=1.0, batch_size=4)
        fit, held = vfl._prepare((xs, y), {}, "simulation")
        state = jax.eval_shape(lambda: fit.runtime.init(KEY, held.batches))
        return sum(a.size for a in jax.tree.leaves(state) if hasattr(a, "size"))

    assert size(10) == size(1_000)


@pytest.mark.slow
def test_local_steps_lead_to_the_same_optimum():
    """Mean field: with exact steps at fixed auxiliary variables the optimum is the same, sooner."""
    (xs, y), rho = gaussian_data(), 0.5
    xs, y = [x.astype(np.float32) for x in xs], y.astype(np.float32)
    found = []
    for local_steps in (1, 5):
        vfl = nf.VFL(known_noise, rho=rho, local_steps=local_steps, optim=optax.adam(0.02))
        result = vfl.run(KEY, 3_000, xs, y, progress_bar=False)
        found.append(result.losses[-500:].mean())
    error = np.std(result.losses[-500:]) / 500**0.5
    assert abs(found[0] - found[1]) < 0.2 + 4 * error


# --- the start ---------------------------------------------------------------------------------


def joint_normal(result):
    """Mean and covariance of all parties' latents under the guide."""
    server = result.params["guide"]
    parties = [server, *(result.client_params(j)["guide"] for j in range(result.num_clients))]
    T = block_diag(*(root_of_guide(p["latents"]) for p in parties))
    loc = jnp.concatenate([p["latents"]["loc"] for p in parties])
    if "shared" not in server:
        return loc, T @ T.T
    W = T @ jnp.concatenate([p["coupling"] for p in parties])
    L = root_of_guide(server["shared"])
    covariance = T @ T.T + W @ L @ L.T @ W.T
    return loc + W @ server["shared"]["loc"], 0.5 * (covariance + covariance.T)


def begun(vfl, *data):
    """A result of no rounds."""
    fit, held = vfl._prepare(data, {}, "simulation")
    state, start = begin(fit, KEY, held.batches, SEARCHES["simulation"])
    return VerticalResult(np.zeros(0), state, fit, held, start=start)


@pytest.mark.slow
def test_a_run_begins_at_the_mode_with_each_partys_curvature(double):
    """Of a Gaussian: the exact mode, and the inverse of each diagonal block of the precision."""
    xs, y = gaussian_data()
    mean, _, _ = exact_of_known_noise(xs, y)
    result = begun(nf.VFL(known_noise, rank=0), xs, y)
    assert result.start.num_exchanges < 40
    found, covariance = joint_normal(result)
    np.testing.assert_allclose(found, mean, atol=0.02)
    x = np.concatenate([np.ones((len(y), 1)), *xs], 1)
    precision = np.eye(x.shape[1]) + x.T @ x / 0.49
    stop = 0
    for d in (1, *(x.shape[1] for x in xs)):
        block = slice(stop, stop + d)
        inverse = np.linalg.inv(precision[block, block])
        np.testing.assert_allclose(covariance[block, block], inverse, rtol=1e-6)
        stop += d


@pytest.mark.slow
def test_a_run_begins_with_the_covariance_of_all_parties(double):
    xs, y = gaussian_data()
    result = begun(nf.VFL(known_noise), xs, y)
    x = np.concatenate([np.ones((len(y), 1)), *xs], 1)
    expected = np.linalg.inv(np.eye(x.shape[1]) + x.T @ x / 0.49)
    np.testing.assert_allclose(joint_normal(result)[1], expected, atol=1e-9)


@pytest.mark.slow
def test_directions_are_found_where_the_basis_does_not_hold_all(double):
    """Two clients, each with a copy of the other's columns but for noise: a few directions in which
    they make up for each other.
    """
    r = np.random.default_rng(2)
    x = r.normal(size=(60, 6))
    xs = [x, x + np.array([0.01, 0.1, 1, 10, 10, 10]) * r.normal(size=x.shape)]
    y = r.normal(size=60)
    result = begun(nf.VFL(known_noise, rank=2), xs, y)
    x = np.concatenate([np.ones((len(y), 1)), *xs], 1)
    expected = np.linalg.inv(np.eye(x.shape[1]) + x.T @ x / 0.49)
    found = joint_normal(result)[1]
    np.testing.assert_allclose(found[1, 1], expected[1, 1], rtol=0.05)
    np.testing.assert_allclose(found[1, 7], expected[1, 7], rtol=0.05)


@pytest.mark.slow
def test_raw_columns_that_parties_share_in_single_precision():
    """An intercept at the server, years at two clients: the exact posterior."""
    r = np.random.default_rng(0)
    year = 2000 + r.uniform(0, 10, 40)
    xs = [year[:, None], np.stack([3 * year + 8 * r.normal(size=40), r.normal(size=40)], 1)]
    y = 0.3 * year + 0.7 * r.normal(size=40)

    def vague(xs, y):
        def slopes(x):
            beta = numpyro.sample("beta", dist.Normal(0, 10).expand([x.shape[-1]]).to_event(1))
            return x @ beta

        b = numpyro.sample("b", dist.Normal(0, 10))
        eta = nf.client_sum("client", slopes, xs)
        with numpyro.plate("obs", eta.shape[0]):
            numpyro.sample("y", dist.Normal(b + eta, 0.7), obs=y)

    # Steps of 0.03 shake means by up to 0.085 sd, with four keys; after 1,000 they have decayed.
    result = nf.VFL(vague).run(KEY, 1_000, xs, y, progress_bar=False)
    x = np.concatenate([np.ones((40, 1)), *xs], 1)
    covariance = np.linalg.inv(np.eye(4) / 100 + x.T @ x / 0.49)
    sd = np.sqrt(np.diag(covariance))
    mean, found = joint_normal(result)
    assert (abs(mean - covariance @ x.T @ y / 0.49) < 0.05 * sd).all()
    np.testing.assert_allclose(np.sqrt(np.diag(found)), sd, rtol=0.07)


@pytest.mark.slow
def test_units_of_columns_do_not_matter():
    """Columns in other units: draws of what they add are the same."""
    (xs, y), units = (
        gaussian_data(),
        [np.array([1e-3, 1.0]), np.array([1e4]), np.array([5.0, 1e-2])],
    )

    def model(xs, units, y):
        def scaled_prior(x):
            x, unit = x
            beta = numpyro.sample("beta", dist.Normal(0, 1 / unit).to_event(1))
            return x @ beta

        b = numpyro.sample("b", dist.Normal(0, 1))
        eta = nf.client_sum("client", scaled_prior, list(zip(xs, units, strict=True)))
        with numpyro.plate("obs", eta.shape[0]):
            numpyro.sample("y", dist.Normal(b + eta, 0.7), obs=y)

    found = []
    for unit in ([np.ones_like(u) for u in units], units):
        scaled_xs = [x * u for x, u in zip(xs, unit, strict=True)]
        fit = nf.VFL(model).run(KEY, 200, scaled_xs, unit, y, progress_bar=False)
        draws = fit.sample_posterior(KEY, 500)
        found.append([draws[f"client_{j}/beta"] * unit[j] for j in range(3)])
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, atol=0.05 * np.std(a, 0).max())


def test_with_rho_nothing_is_sent_without_noise_unasked():
    xs, y = data()
    for settings, begins in (
        (dict(), ["spread", "begin at the mode"]),
        (dict(rho=1.0), ["begin at zero"]),
        (dict(rho=1.0, start="mode"), ["spread", "begin at the mode"]),
        (dict(rho=1.0, start=None), []),
        (dict(start=None), []),
    ):
        fit, _ = nf.VFL(logistic, **settings)._prepare((xs, y), {}, "simulation")
        assert [exchange.name for exchange in fit.built.begins] == begins


@pytest.mark.slow
@pytest.mark.parametrize("likelihood", ["augmented", "power"])
def test_with_rho_clients_know_their_units_by_themselves(likelihood, double):
    """The curvature of a linear predictor under its auxiliary variable and prior, whatever units
    its columns have; no party is sent anything of another.
    """
    xs, y = gaussian_data()
    xs = [x * scale for x, scale in zip(xs, (1e-4, 1.0, 1e4), strict=True)]
    vfl = nf.VFL(known_noise, rho=0.5, likelihood=likelihood, share_response=True)
    result = begun(vfl, xs, y)
    assert result.start is None
    for j, x in enumerate(xs):
        root = root_of_guide(result.client_params(j)["guide"]["latents"])
        expected = np.linalg.inv(np.eye(x.shape[1]) + x.T @ x / 0.25)
        np.testing.assert_allclose(root @ root.T, expected, rtol=1e-6)
    at_server = result.params["guide"]["latents"]["loc"]  # the server's mode where the sum is zero
    np.testing.assert_allclose(at_server, y.sum() / (len(y) + 0.49), rtol=1e-6)
    search = result._fit.built.search
    before = search.init_server(KEY)
    down = part(result._fit.built.begins[0], before, KEY, jnp.arange(1))
    assert not down.told.slope.any()
    assert (down.told.curvature == 4.0).all()


@pytest.mark.slow
def test_scales_of_priors_are_held_where_a_run_begins(double):
    """Coefficients begin at the mode that they have where their scale is at the median of its
    prior, with the curvature that they have there; the log scale, of which a joint mode would be at
    minus infinity, at that median, as wide as its prior.
    """

    def hierarchical(x):
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        beta = numpyro.sample("beta", dist.Normal(0, tau).expand([x.shape[-1]]).to_event(1))
        return x @ beta

    def model(xs, y):
        b = numpyro.sample("b", dist.Normal(0, 1))
        eta = nf.client_sum("client", hierarchical, xs)
        with numpyro.plate("obs", eta.shape[0]):
            numpyro.sample("y", dist.Normal(b + eta, 0.7), obs=y)

    xs, y = gaussian_data()
    result = begun(nf.VFL(model), xs, y)
    found, spread = map(np.asarray, joint_normal(result))
    places = {s.name: s.start for s in result.sites}
    scales = [places[f"client_{j}/tau"] for j in range(3)]
    rest = np.setdiff1d(np.arange(len(found)), scales)
    low, median, high = np.log([0.2019, 0.6745, 1.4051])  # quantiles of a half-normal variable
    np.testing.assert_allclose(found[scales], median, atol=4.5 * 1.25 / 500**0.5)
    sd = np.sqrt(np.diag(spread)[scales])
    np.testing.assert_allclose(sd, (high - low) / 2, atol=4.5 * 1.5 / 500**0.5)
    assert (sd <= 1 + 1e-6).all()
    x = np.concatenate([np.ones((len(y), 1)), *xs], 1)
    taus = np.repeat(np.exp(found[scales]), [a.shape[1] for a in xs])
    precision = np.diag(np.concatenate([[1.0], taus**-2.0]))
    covariance = np.linalg.inv(precision + x.T @ x / 0.49)
    mean = covariance @ x.T @ y / 0.49
    np.testing.assert_allclose(found[rest], mean, atol=0.02)
    np.testing.assert_allclose(spread[np.ix_(rest, rest)], covariance, atol=1e-7)


@pytest.mark.slow
def test_where_there_is_no_mode_to_begin_at_runs_begin_at_zero():
    def weights(x):
        return x @ numpyro.param("w", jnp.zeros(x.shape[-1]))

    def model(xs, y):
        eta = nf.client_sum("client", weights, xs)
        with numpyro.plate("obs", eta.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=eta), obs=y)

    xs, y = data()
    result = nf.VFL(model).run(KEY, 2, xs, y, progress_bar=False)
    assert result.start is None
    assert np.isfinite(result.losses).all()


# --- bad input ---------------------------------------------------------------------------------


def without(xs, y):
    b = numpyro.sample("b", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(b, 1), obs=y)


def unread(xs, y):
    nf.client_sum("client", linear, xs)
    without(xs, y)


def two(xs, y):
    eta = nf.client_sum("client", linear, xs) + nf.client_sum("other", linear, xs)
    numpyro.sample("y", dist.Normal(eta, 1), obs=y)


def with_silos(xs, y):
    eta = nf.client_sum("client", linear, xs)
    with nf.silo_plate("row", eta.shape[0]):
        numpyro.sample("y", dist.Normal(eta, 1), obs=y)


def reads_columns(xs, y):
    eta = nf.client_sum("client", linear, xs)
    numpyro.sample("y", dist.Normal(eta + xs[1][:, 0], 1), obs=y)


def reads_latent(xs, y):
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    eta = nf.client_sum("client", lambda x: tau * linear(x), xs)
    numpyro.sample("y", dist.Normal(eta, 1), obs=y)


def reads_response(xs, y):
    eta = nf.client_sum("client", lambda x: linear(x) * y, xs)
    numpyro.sample("y", dist.Normal(eta, 1), obs=y)


def columns_of_latents(xs, y):
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    eta = nf.client_sum("client", linear, [tau * x for x in xs])
    numpyro.sample("y", dist.Normal(eta, 1), obs=y)


def summarised(xs, y):
    eta = nf.client_sum("client", lambda x: linear(x)[:3], xs)
    numpyro.sample("y", dist.Normal(eta.mean(), 1), obs=y)


def response_as_column(xs, y):
    eta = nf.client_sum("client", lambda c: linear(c[0]) + c[1], [(x, y) for x in xs])
    numpyro.sample("y", dist.Normal(eta, 1), obs=y)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (without, "no client_sum"),
        (unread, "no site depends on the client_sum"),
        (two, "2 client_sums"),
        (with_silos, "silo_plate 'row'"),
        (reads_columns, "reads 'xs.1' outside of the client_sum"),
        (reads_latent, "reads a latent of the server directly"),
        (reads_response, "reads the argument 'y' directly"),
        (columns_of_latents, "columns of client 0 depend on a latent"),
        (summarised, "given 12 rows"),
        (response_as_column, "is among the columns of client 0"),
    ],
)
def test_texts_that_cannot_be_split(model, words):
    xs, y = data()
    with pytest.raises((nf.ModelError, nf.DataError), match=words):
        nf.VFL(model).run(KEY, 1, xs, y.astype(np.float32), progress_bar=False)


def test_arguments_that_do_not_fit():
    xs, y = data()
    run = nf.VFL(logistic).run
    with pytest.raises(nf.DataError, match="client 1 holds 5 rows, client 0 holds 12"):
        run(KEY, 1, [xs[0], xs[1][:5]], y)
    with pytest.raises(nf.DataError, match=r"holds the numbers of the response 'y'"):
        run(KEY, 1, [xs[0], np.column_stack([xs[1], y]).astype(np.float32)], y)
    with pytest.raises(nf.DataError, match="does not take these arguments"):
        run(KEY, 1, xs, y, z=3)
    with pytest.raises(nf.DataError, match="NaN"):
        run(KEY, 1, [xs[0] * np.nan], y)
    with pytest.raises(nf.DataError, match="there are no clients"):
        nf.client_sum("client", linear, [])
    with pytest.raises(nf.DataError, match="a list with the columns of each client"):
        nf.client_sum("client", linear, xs[0])
    with pytest.raises(nf.ModelError, match="2 predictors for 3 clients"):
        nf.client_sum("client", [linear, linear], xs)
    with pytest.raises(nf.ModelError, match="must be a function"):
        nf.client_sum("client", [linear, 3, linear], xs)


@pytest.mark.parametrize("rho", [0, -1.0, "small", True])
def test_rho_must_be_positive(rho):
    for make in (nf.handlers.augment, nf.handlers.power_likelihood):
        with pytest.raises(ValueError, match="rho=None"):
            make(logistic, rho)
    with pytest.raises(ValueError, match="rho=None"):
        nf.VFL(logistic, rho=rho)


def test_settings_that_do_not_fit():
    for settings, words in (
        (dict(likelihood="power"), "give rho"),
        (dict(local_steps=2), "give rho"),
        (dict(likelihood="power", rho=1.0), "share_response=True"),
        (dict(likelihood="tempered", rho=1.0), "expected 'augmented' or 'power'"),
        (dict(batch_size=0), "batch_size must be a positive integer"),
        (dict(rank=1.5), "rank must be a positive integer"),
        (dict(rho=np.inf), "expected a positive number"),
        (dict(local_steps=2, rho=1.0, auxiliary="amortised"), "auxiliary='mean_field' alone"),
        (dict(local_steps=2, rho=1.0, likelihood="power"), "auxiliary='mean_field' alone"),
        (dict(rank=2, local_steps=2, rho=1.0), "one step of a client in a round: say rank=0"),
        (dict(start="prior"), "expected 'auto', 'mode', 'own' or None"),
        (dict(start="own"), "say start='mode', or give rho"),
    ):
        with pytest.raises(ValueError, match=words):
            nf.VFL(logistic, **settings)
    xs, y = data()
    with pytest.raises(nf.GuideError, match="auxiliary='full'"):
        nf.VFL(logistic, rho=1.0, auxiliary="full").run(KEY, 1, xs, y)
    guide = AutoLowRankMultivariateNormal(logistic)
    with pytest.raises(nf.GuideError, match="rank=2: noise can be shared by guides that"):
        nf.VFL(logistic, guide=guide, rank=2).run(KEY, 1, xs, y)
    with pytest.raises(ValueError, match="more than the 12 rows"):
        nf.VFL(logistic, batch_size=13).run(KEY, 1, xs, y)


def test_power_likelihood_refuses_latents_of_the_sum():
    def model(xs, y):
        eta = nf.client_sum("client", linear, xs)
        with numpyro.plate("obs", len(y)):
            u = numpyro.sample("u", dist.Normal(eta, 1))
            numpyro.sample("y", dist.Normal(u, 1), obs=y)

    xs, y = data()
    with pytest.raises(nf.ModelError, match="latent site 'u' depends on the client_sum"):
        drawn(nf.handlers.power_likelihood(model, 1.0), xs, y)


def test_methods_refuse_latents_of_the_sum_under_the_power_likelihood():
    def model(xs, y):
        eta = nf.client_sum("client", linear, xs)
        level = numpyro.sample("level", dist.Normal(eta.mean(), 0.1))
        with numpyro.plate("obs", len(y)):
            numpyro.sample("y", dist.Normal(eta + level, 1), obs=y)

    settings = dict(rho=1.0, likelihood="power", share_response=True)
    for method in (nf.VFL(model, **settings), nf.SOUL(model, **settings)):
        with pytest.raises(nf.ModelError, match="latent site 'level' depends on the client_sum"):
            method.run(KEY, 1, *data())


@pytest.mark.slow
def test_plain_arguments_of_the_model_count():
    """A flag changes the text, and so the program."""

    def model(xs, y, precise):
        eta = nf.client_sum("client", linear, xs)
        with numpyro.plate("obs", len(y)):
            numpyro.sample("y", dist.Normal(eta, 0.1 if precise else 5.0), obs=y)

    vfl = nf.VFL(model, start=None)
    losses = [vfl.run(KEY, 1, *data(), flag, progress_bar=False).losses[0] for flag in (0, 1)]
    fresh = nf.VFL(model, start=None).run(KEY, 1, *data(), 1, progress_bar=False).losses[0]
    assert losses[1] == fresh != losses[0]


def centred_at_server(xs, y):
    eta = nf.client_sum("client", linear, xs)
    with numpyro.plate("obs", eta.shape[0]):
        numpyro.sample("y", dist.Normal(eta - eta.mean(), 1), obs=y)


def centred_at_client(xs, y):
    eta = nf.client_sum("client", lambda x: linear(x - x.mean(0)), xs)
    with numpyro.plate("obs", eta.shape[0]):
        numpyro.sample("y", dist.Normal(eta, 1), obs=y)


@pytest.mark.parametrize("model", [centred_at_server, centred_at_client])
def test_minibatches_of_rows_that_read_others_are_refused(model):
    with pytest.raises(nf.ModelError, match="when other rows are left out"):
        nf.VFL(model, batch_size=4).run(KEY, 1, *data())


def test_a_server_is_not_given_what_clients_have_parts_of():
    def model(x, y):
        eta = nf.client_sum("client", linear, [x[:, :2], x[:, 2:]])
        with numpyro.plate("obs", len(y)):
            numpyro.sample("y", dist.Normal(eta + x[:, 0], 1), obs=y)

    r = np.random.default_rng(0)
    with pytest.raises(nf.ModelError, match="reads 'x' outside of the client_sum"):
        nf.VFL(model).run(KEY, 1, r.normal(size=(12, 5)), r.normal(size=12))


def test_a_start_that_is_asked_for_and_not_possible_is_said():
    def weights(x):
        return x @ numpyro.param("w", jnp.zeros(x.shape[-1]))

    def model(xs, y):
        eta = nf.client_sum("client", weights, xs)
        with numpyro.plate("obs", len(y)):
            numpyro.sample("y", dist.Normal(eta, 1), obs=y)

    with pytest.warns(UserWarning, match="start='mode' is not possible"):
        nf.VFL(model, start="mode")._prepare(data(), {}, "host")


def test_handlers_need_a_client_sum():
    for handler in (nf.handlers.augment, nf.handlers.power_likelihood):
        with pytest.raises(nf.ModelError, match="no client_sum"):
            drawn(handler(without, 1.0), *data())


# --- SOUL --------------------------------------------------------------------------------------


def centred(xs, y):
    """Without latents at the server, whose mode is another thing."""
    eta = nf.client_sum("client", linear, xs)
    with numpyro.plate("obs", eta.shape[0]):
        numpyro.sample("y", dist.Normal(eta, 0.7), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("likelihood", ["augmented", "power"])
def test_soul_finds_the_mode_of_z_and_draws_given_it(likelihood, double):
    """Of a Gaussian, where both are known: from the joint density's derivatives."""
    (xs, y), rho = gaussian_data(), 0.8
    handlers = dict(augmented=nf.handlers.augment, power=nf.handlers.power_likelihood)
    text = handlers[likelihood](centred, rho)
    widths = [x.shape[1] for x in xs]
    ends = np.cumsum([*widths, *([len(y)] * 3)])

    def log_joint(flat):
        parts = jnp.split(flat, ends[:-1])
        values = {f"client_{j}/beta": parts[j] for j in range(3)}
        values |= {f"client_{j}/z": parts[3 + j] for j in range(3)}
        return log_density(text, (xs, y), {}, values)[0]

    zero, k = jnp.zeros(ends[-1]), sum(widths)
    slope, curvature = jax.grad(log_joint)(zero), -jax.hessian(log_joint)(zero)
    mode = jnp.linalg.solve(curvature, slope)[k:]  # of both, and so of z with theta integrated out
    own, across = curvature[:k, :k], curvature[:k, k:]
    sd_z = np.sqrt(np.diag(np.linalg.inv(curvature)[k:, k:]))
    soul = nf.SOUL(
        centred,
        rho=rho,
        likelihood=likelihood,
        share_response=True,
        optim=optax.adam(optax.cosine_decay_schedule(0.03, 6_000)),
        num_steps=40,
        num_kept=2_000,
    )
    result = soul.run(KEY, 8_500, xs, y, progress_bar=False)  # z is fixed for the last 2,500
    found = [result._fit.vertical.auxiliary(s) for s in one_by_one(result, result.state.silos)]
    found = jnp.concatenate(found)
    assert (abs(found - mode) < 0.07 * sd_z).all()  # 0.10 if a client counts its own slope
    draws = result.sample_posterior(KEY, 20_000)
    flat = np.concatenate([draws[f"client_{j}/beta"] for j in range(3)], 1)
    mean, sd = jnp.linalg.solve(own, slope[:k] - across @ found), jnp.linalg.inv(own)
    sd = np.sqrt(np.diag(sd))
    effective = 2_000 * np.tanh(
        0.5 * 0.05 * 40
    )  # draws of rounds are correlated by exp(-0.05 * 40)
    assert (abs(flat.mean(0) - mean) < 4.5 * sd / effective**0.5).all()
    wide = (1 - 0.05 / 2) ** -0.5  # what unadjusted steps of 0.05 make of a unit variance
    assert (abs(flat.std(0) / sd - wide) < 4.5 / (2 * effective) ** 0.5).all()


@pytest.mark.slow
@pytest.mark.parametrize("likelihood", ["augmented", "power"])
def test_soul_runs_alike_on_both_runtimes_and_goes_on(likelihood, tmp_path):
    xs, y = data()
    soul = nf.SOUL(logistic, rho=1.0, likelihood=likelihood, share_response=True, num_kept=4)
    whole = soul.run(KEY, 6, xs, y, progress_bar=False)
    plain = soul.run(KEY, 6, xs, y, progress_bar=False, runtime="host")
    np.testing.assert_allclose(whole.losses, plain.losses, rtol=2e-4)
    first = soul.run(KEY, 2, xs, y, progress_bar=False)
    rest = soul.run(KEY, 4, xs, y, progress_bar=False, init_state=first.state)
    jax.tree.map(np.testing.assert_array_equal, rest.state, whole.state)
    whole.save(tmp_path / "fit")
    again = soul.load(tmp_path / "fit", xs, y)
    jax.tree.map(np.testing.assert_array_equal, again.state, whole.state)
    names = {"b", "client_0/scale", "client_0/beta", "client_1/beta", "client_2/beta"}
    assert set(whole.sample_posterior(KEY, 5)) == names
    with pytest.raises(TypeError, match="no density by which it could be weighed"):
        nf.importance_correct(KEY, whole)


def over_nodes(method, **options):
    """Server and clients in this process, with bytes between them: nodes, and a run."""
    xs, y = data()
    nodes = [nf.SiloNode(method, x, **options) for x in xs]
    facts = [node.facts() for node in nodes]
    server = nf.VerticalServerNode(method, facts, lambda xs: dict(xs=xs, y=y))
    for j, node in enumerate(nodes):
        node.accept(server.plan, j)
    return nodes, lambda n: server.run(KEY, n, lambda j, message: nodes[j].handle(message))


@pytest.mark.slow
def test_soul_over_nodes_gives_the_numbers_of_one_process():
    xs, y = data()
    soul = nf.SOUL(gaussian, rho=1.0, num_steps=3, num_kept=4)
    nodes, run = over_nodes(soul, secret=None)
    apart = run(3)
    together = soul.run(KEY, 3, xs, y, progress_bar=False)
    np.testing.assert_allclose(apart.losses, together.losses, rtol=1e-5)
    assert set(apart.sample_posterior(KEY, 2)) == {"b", "sigma"}
    apart.sample_together(KEY, 50)
    in_one = together.sample_together(KEY, 5)
    assert in_one.keys() == together.sample_posterior(KEY, 5).keys()
    assert in_one["client_1/beta"].shape[0] == 5
    kept = together.private(1).guide["draws"][1:3]  # of rounds 2 and 3, the last half
    drawn = np.unique(nodes[1].draws()["beta"], axis=0)
    np.testing.assert_allclose(drawn, np.unique(kept, axis=0), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [dict(rank=3), dict(rho=0.5)])
def test_parties_draw_together_and_each_keeps_its_own(settings):
    """The covariance of all parties' draws is that of a fit in one process."""
    xs, y = data()
    vfl = nf.VFL(gaussian, start=None, optim=optax.adam(0.1), **settings)
    nodes, run = over_nodes(vfl, secret=None)
    apart, n = run(30), 4_000
    with pytest.raises(nf.DataError, match="there are no draws here"):
        nodes[0].draws()
    if settings.get("rank"):
        nf.importance_correct(KEY, apart, 20)  # leaves clients as they are
    together = vfl.run(KEY, 30, xs, y, progress_bar=False)
    at_server = apart.sample_together(jax.random.key(5), n)
    assert set(at_server) == {"b", "sigma"}
    sites = {**at_server}
    for j, node in enumerate(nodes):
        sites |= {f"client_{j}/{name}": value for name, value in node.draws().items()}
    expected = together.sample_posterior(jax.random.key(6), n)
    assert set(sites) == set(expected)
    for draws in (sites, expected):
        draws["sigma"] = np.log(draws["sigma"])  # whose tails are light
    a, b = (
        np.concatenate([np.asarray(d[s]).reshape(n, -1) for s in sorted(expected)], 1)
        for d in (sites, expected)
    )
    sd = b.std(0)
    assert (abs(a.mean(0) - b.mean(0)) < 4.5 * sd * (2 / n) ** 0.5).all()
    assert (abs(np.corrcoef(a.T) - np.corrcoef(b.T)) < 4.5 * (2 / n) ** 0.5).all()
    assert "rho" in settings or abs(np.corrcoef(b.T) - np.eye(len(sd))).max() > 0.1
    np.testing.assert_allclose(a.std(0), sd, rtol=0.12)


@pytest.mark.slow
def test_noise_that_hides_is_of_a_key_that_nobody_else_knows():
    vfl = nf.VFL(gaussian, rho=0.5, start=None)
    xs, y = data()
    run = over_nodes(vfl)[1]
    hidden = run(3)
    assert not np.allclose(hidden.losses, run(3).losses, rtol=1e-6)  # the same key, other noise
    together = vfl.run(KEY, 3, xs, y, progress_bar=False)
    assert not np.allclose(hidden.losses, together.losses, rtol=1e-6)
    keys = [jax.random.key_data(nf.SiloNode(vfl, xs[0])._secret) for _ in range(2)]
    assert not np.array_equal(*keys)
    for method in (nf.VFL(gaussian), nf.SFVI(one_silo)):
        assert nf.SiloNode(method, dict(y=y))._secret is None
    with pytest.raises(ValueError, match=r"expected a jax\.random\.key"):
        nf.SiloNode(vfl, data()[0][0], secret="none")
    with pytest.raises(TypeError, match="one JAX key"):
        nf.SiloNode(vfl, data()[0][0], secret=5)


@pytest.mark.slow
def test_predictors_without_noise_are_given_to_those_who_may_have_them():
    vfl = nf.VFL(gaussian, rho=0.5, start=None)
    result = over_nodes(vfl)[1](2)
    with pytest.raises(nf.ModelError, match="silo 0 is asked for predictors without the noise"):
        nf.importance_correct(KEY, result, 20)
    result.sample_together(KEY, 3)  # sends nothing up
    allowed = over_nodes(vfl, allow_unhidden=True)[1](2)
    assert np.isfinite(nf.importance_correct(KEY, allowed, 20).log_evidence)


@pytest.mark.parametrize("name", ["dra", "7", '{"sample_no": 3}'])
def test_an_exchange_that_nobody_knows_is_said(name):
    vfl = nf.VFL(gaussian, start=None)
    fit, _ = vfl._prepare(data(), {}, "simulation")
    with pytest.raises(nf.ModelError, match=f"there is no exchange '{name}' here"):
        vfl.round_of(fit.built, name)


@pytest.mark.slow
def test_latents_above_others_begin_at_the_median_of_their_prior():
    """A mean near 1,000 under a prior that says so, at the server and at clients."""

    def predictor(x):
        mu = numpyro.sample("mu", dist.Normal(1_000, 50))
        tau = numpyro.sample("tau", dist.LogNormal(-3, 0.1))
        beta = numpyro.sample("beta", dist.Normal(mu, tau).expand([x.shape[1]]).to_event(1))
        return x @ beta

    def model(xs, y=None):
        top = numpyro.sample("top", dist.Normal(-200, 0.5))
        b = numpyro.sample("b", dist.Normal(top, 1))
        eta = nf.client_sum("client", predictor, xs)
        with numpyro.plate("row", eta.shape[0]):
            numpyro.sample("y", dist.Normal(b + eta, 1), obs=y)

    r = np.random.default_rng(0)
    xs = [r.normal(size=(40, p)) for p in (2, 3)]
    y = -200 + 1_000 * sum(x.sum(1) for x in xs) + r.normal(size=40)
    result = nf.VFL(model).run(KEY, 1, xs, y, progress_bar=False)
    draws = result.sample_posterior(KEY, 500)
    for name, place, of_prior, sd in (
        ("client_0/mu", 1_000, 50, 1.0),  # one at most
        ("client_1/tau", np.exp(-3), 0.1 * np.exp(-3), 0.1 * np.exp(-3)),
        ("top", -200, 0.5, 0.5),
    ):
        error = 1.25 * np.hypot(of_prior, sd) / np.sqrt(500)  # of two medians of 500 draws
        assert abs(np.median(draws[name]) - place) < 4.5 * error, name
        assert 0.7 * sd < np.std(draws[name]) < 1.4 * sd, name
    off = draws["client_1/beta"].mean(0) - np.median(draws["client_1/mu"])
    assert (abs(off) < 1).all()


@pytest.mark.slow
def test_soul_is_not_at_its_end_before_all_clients_are():
    xs, y = data()
    tiny = [xs[0], 1e-3 * xs[1], xs[2]]
    soul = nf.SOUL(logistic, rho=0.5, optim=optax.adam(1e-2))
    result = soul.run(KEY, 4_000, tiny, y, progress_bar=False, stop="converged")
    assert result.ended == "converged"
    assert int(result.state.server.resting) == 3


@pytest.mark.slow
def test_noisy_rounds_run_in_double_precision(double):
    xs, y = data()
    vfl = nf.VFL(gaussian, rho=0.5, start=None)
    assert np.isfinite(vfl.run(KEY, 2, xs, y, progress_bar=False).losses).all()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 3])
def test_a_run_is_not_at_its_end_before_all_clients_are(rank):
    """Clients of small columns have far to go, at a bound that hardly rises."""
    xs, y = data()
    tiny = [xs[0], 1e-3 * xs[1], xs[2]]
    vfl = nf.VFL(logistic, start=None, optim=optax.adam(1e-2), num_particles=4, rank=rank)
    result = vfl.run(KEY, 6_000, tiny, y, progress_bar=False, stop="converged")
    assert result.ended == "converged"
    assert int(result.state.server.resting) == 3
    course = result.state.server.course
    assert int(course.calm) > 2  # the server alone would have ended before


@pytest.mark.slow
def test_rows_of_all_parties_must_be_the_same_in_the_same_order():
    xs, y = data()
    vfl = nf.VFL(gaussian, start=None)
    ids = np.array([f"area {i}" for i in range(12)])
    swapped = ids[[1, 0, *range(2, 12)]]
    quiet = dict(progress_bar=False)
    result = vfl.run(KEY, 1, xs, y, row_ids=[ids] * 4, **quiet)
    assert np.isfinite(result.losses).all()
    for row_ids, words in (
        ([ids, swapped, ids], "row 0 is 'area 1' at client 1 and 'area 0' at client 0, .* 2 of 12"),
        ([ids, ids, ids, swapped], "at the server and 'area 0' at client 0"),
        ([ids, ids], "2 entries, expected 3"),
        ([ids, ids[:5], ids], r"client 1 have the shape \(5,\), expected \(12,\)"),
        ([ids, ids[[0, 0, *range(2, 12)]], ids], "'area 0' stands 2 times among those of client 1"),
    ):
        with pytest.raises(nf.DataError, match=words):
            vfl.run(KEY, 1, xs, y, row_ids=row_ids, **quiet)

    def serving(*orders, **at_server):
        pairs = zip(xs, orders, strict=True)
        facts = [nf.SiloNode(vfl, x, row_ids=order).facts() for x, order in pairs]
        assert not any("area" in text for text in facts)
        return nf.VerticalServerNode(vfl, facts, lambda xs: dict(xs=xs, y=y), **at_server)

    with pytest.warns(
        UserWarning, match="the rows of client 1 are those of client 0, client 2, the"
    ):
        server = serving(ids, None, ids, row_ids=ids)
    assert server.num_silos == 3
    assert digest(read_ids(ids, 12, "")) not in server.plan
    with pytest.raises(nf.DataError, match="the rows of client 2 have other ids"):
        serving(ids, ids, swapped)
    with pytest.raises(nf.DataError, match=r"the server have the shape \(7,\), expected \(12,\)"):
        serving(ids, ids, ids, row_ids=ids[:7])
    numbers, words = np.arange(12), np.arange(12).astype(str)
    vfl.run(KEY, 1, xs, y, row_ids=[numbers, words, numbers], **quiet)
    assert serving(numbers, words, numbers, row_ids=words).num_silos == 3
    with pytest.raises(nf.DataError, match="of this client are fractions"):
        serving(ids, numbers + 0.5, ids)
    with pytest.raises(nf.DataError, match="the rows of the server have other ids"):
        serving(ids, ids, ids, row_ids=swapped)
    with pytest.raises(nf.DataError, match="silos have rows of their own"):
        nf.SiloNode(nf.SFVI(one_silo), dict(y=y * 1.0), row_ids=ids)


def one_silo(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def test_nodes_hand_over_the_columns_that_they_hold():
    def model(xs, y):
        eta = nf.client_sum("client", linear, [jnp.exp(x) for x in xs])
        with numpyro.plate("obs", eta.shape[0]):
            numpyro.sample("y", dist.Normal(eta, 1), obs=y)

    xs, y = data()
    vfl = nf.VFL(model)
    facts = [nf.SiloNode(vfl, x).facts() for x in xs]
    with pytest.raises(nf.ModelError, match="something else than the columns"):
        nf.VerticalServerNode(vfl, facts, lambda xs: dict(xs=xs, y=y))


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [nf.VFL(gaussian, start=None), nf.SOUL(gaussian, rho=1.0, num_steps=3, num_kept=4)]
)
def test_what_clients_send_may_be_transformed(method):
    """Replies on a grid: both runtimes alike, and other than with replies as they are."""
    xs, y = data()
    found = []
    for make, transform in ((simulation, True), (host, True), (host, False)):
        fit, held = method._prepare((xs, y), {}, make.__name__)
        to_grid = transformed(fit.algorithm, round_to_grid(0.5))
        runtime = make(to_grid if transform else fit.algorithm, None)
        state = runtime.init(KEY, held.batches)
        after, *_ = runtime.advance(KEY, state, held.batches, 12, fit.server_data)
        reached = jax.tree.leaves(after.server.params)
        found.append(jnp.concatenate([jnp.ravel(a) for a in reached]))
    np.testing.assert_allclose(found[0], found[1], atol=1e-4)
    assert abs(found[1] - found[2]).max() > 1e-3


def test_settings_of_soul_that_do_not_fit():
    for settings, words in (
        (dict(rho=0.0), "expected a positive number"),
        (dict(rho=1.0, likelihood="exact"), "expected 'augmented' or 'power'"),
        (dict(rho=1.0, likelihood="power"), "share_response=True"),
        (dict(rho=1.0, step_size=3.0), "stable between 0 and 2"),
        (dict(rho=1.0, num_steps=0), "num_steps must be a positive integer"),
    ):
        with pytest.raises(ValueError, match=words):
            nf.SOUL(logistic, **settings)


# --- the correction ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("settings", [dict(rho=0.7), dict(), dict(rank=3, start=None)])
def test_weights_are_those_of_the_joint_density(settings):
    """Log weights by hand, from NumPyro's density of the text and that of the guide."""
    xs, y = data()
    vfl = nf.VFL(logistic, **settings)
    fit = vfl.run(KEY, 20, xs, y, progress_bar=False)
    v, held = fit._fit.vertical, fit._silos
    weighing = Weighing(v, 40, 7)
    run = fit._fit.runtime.single(weighing.as_round())
    weighed, states, info, _ = run(
        KEY, fit.state.server, fit.state.silos, held.batches, fit._fit.server_data
    )
    own = [states[b][i] for b, i in map(held.place, range(3))]
    scales, of = weighing.parts
    assert list(np.bincount(of)) == [32, 4, 4]
    mean, covariance = joint_normal(fit)
    for s in range(0, 40, 3):
        values = {n: a[s] for n, a in fit.sites_at(weighed.z, tuple(own)).items()}
        draws = [weighed.z[s], *(z[s] for z in own)]
        halves = [v.model.server, *v.model.clients]
        log_p = log_density(logistic, (xs, y), {}, values)[0]
        log_p += sum(log_det(half, z) for half, z in zip(halves, draws, strict=True))
        z = jnp.concatenate(draws)
        under = [dist.MultivariateNormal(mean, covariance * s**2).log_prob(z) for s in scales]
        log_q = jax.nn.logsumexp(jnp.array(under), b=jnp.array([0.8, 0.1, 0.1]))
        np.testing.assert_allclose(weighed.log_weights[s], log_p - log_q, rtol=1e-4, atol=1e-3)
    evidence = jax.nn.logsumexp(weighed.log_weights) - np.log(40)
    np.testing.assert_allclose(-info.loss, evidence, rtol=1e-5)


def exact_of_known_noise(xs, y):
    """Posterior of (b, beta), and the log evidence."""
    x = np.concatenate([np.ones((len(y), 1)), *xs], 1)
    precision = np.eye(x.shape[1]) + x.T @ x / 0.49
    covariance = np.linalg.inv(precision)
    marginal = 0.49 * np.eye(len(y)) + x @ x.T
    evidence = -0.5 * (
        y @ np.linalg.solve(marginal, y)
        + np.linalg.slogdet(marginal)[1]
        + len(y) * np.log(2 * np.pi)
    )
    return covariance @ (x.T @ y) / 0.49, np.sqrt(np.diag(covariance)), evidence


@pytest.mark.slow
@pytest.mark.parametrize("settings", [dict(rank=0), dict(rho=0.3, auxiliary="amortised")])
def test_a_corrected_fit_is_the_posterior_of_the_text(settings):
    """Of the exact split, which leaves out correlations, and of the augmented model."""
    xs, y = gaussian_data()
    xs, y = [x.astype(np.float32) for x in xs], y.astype(np.float32)
    mean, sd, evidence = exact_of_known_noise(xs, y)
    optim = optax.adam(optax.cosine_decay_schedule(0.05, 1_000))
    fit = nf.VFL(known_noise, optim=optim, **settings).run(KEY, 1_000, xs, y, progress_bar=False)
    fixed = nf.importance_correct(KEY, fit, 20_000)
    assert fixed.reliable
    assert fixed.to_arviz(KEY, 10**6)["posterior"]["b"].shape[1] == int(fixed.ess)
    draws = fixed.sample_posterior(KEY, 20_000)
    found = np.column_stack([draws["b"], *(draws[f"client_{j}/beta"] for j in range(3))])
    error = fixed.monte_carlo_error + 20_000**-0.5
    assert (abs(found.mean(0) - mean) / sd < 4 * error).all()
    assert (abs(found.std(0) / sd - 1) < 4 * error).all()
    assert abs(fixed.log_evidence - evidence) < 4 * error
    assert "client" in fixed.report() or "'b'" in fixed.report()
    if "rank" in settings:  # what is left out shows: the fit's sds are too small
        assert not fixed.fit_trusted
