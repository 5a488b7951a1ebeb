"""Vertical models: rounds of Algorithms 1 and 2 against pooled inference, on both runtimes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax.scipy.linalg import block_diag
from laid_open import laid_open_columns
from numpyro.infer.util import log_density
from sent_otherwise import on_grid, sent_otherwise
from vertical_problems import (
    CASES,
    KEY,
    data,
    gaussian,
    gaussian_data,
    known_noise,
    log_det,
    logistic,
    one_by_one,
    root_of_guide,
)

import numpyro_fed as nf
from numpyro_fed.methods.method import RUNTIMES
from numpyro_fed.rounds.exchange import combine
from numpyro_fed.rounds.keys import exchange_key, server_key
from numpyro_fed.rounds.step import replayed_part


def bound_of(model, v, xs, y, server_noise, client_noises):
    """The pooled bound as a function of all parties' parameters, from NumPyro's density."""

    root = root_of_guide

    def normal(shared, parties):
        """Mean and covariance of all parties' latents, in a row."""
        loc = jnp.concatenate([own.guide["loc"] for own in parties])
        T = block_diag(*(root(own.guide) for own in parties))
        if not shared:
            return loc, T @ T.T
        W = T @ jnp.concatenate([own.coupling for own in parties])
        return loc + W @ shared["loc"], T @ T.T + W @ root(shared) @ root(shared).T @ W.T

    def drawn(shared, parties, noises):
        """One draw of each party, and their density with parameters stopped."""
        xi = shared["loc"] + root(shared) @ server_noise.xi[0] if shared else jnp.zeros(0)
        zs = []
        for own, eps in zip(parties, noises, strict=True):
            eta, V = own.guide, jnp.zeros((len(eps), 0)) if own.coupling is None else own.coupling
            zs.append(eta["loc"] + root(eta) @ (eps + V @ xi))
        q = dist.MultivariateNormal(*normal(*jax.lax.stop_gradient((shared, parties))))
        return zs, q.log_prob(jnp.concatenate(zs))

    def sites(half, z):
        """Constrained values, and the log-determinant."""
        values = {}
        for s in half.named("latent"):
            bijection = numpyro.distributions.biject_to(half.structure.supports[s.name])
            values[s.name] = bijection(z[s.start : s.stop].reshape(s.shape))
        return values, log_det(half, z)

    def bound(server, clients):
        parties = [server.own, *(params.own for params in clients)]
        noises = [server_noise.eps[0], *(eps[0] for eps, _ in client_noises)]
        (z, *zs), log_q = drawn(server.shared, parties, noises)
        values, extra = sites(v.model.server, z)
        for j, (params, (_, tau)) in enumerate(zip(clients, client_noises, strict=True)):
            own, extra_j = sites(v.model.clients[j], zs[j])
            extra = extra + extra_j
            values |= {f"client_{j}/{n}": value for n, value in own.items()}
            if v.rho is not None:
                psi = params.auxiliary
                z_j = v.rho * (psi["loc"] + jnp.exp(psi["log_scale"]) * tau[0])
                fixed = jax.lax.stop_gradient(psi)
                q = dist.Normal(v.rho * fixed["loc"], v.rho * jnp.exp(fixed["log_scale"]))
                log_q = log_q + q.log_prob(z_j).sum()
                values[f"client_{j}/z"] = z_j
        return log_density(model, (xs, y), {}, values)[0] + extra - log_q

    return bound


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
    opened = laid_open_columns(vfl, xs, y)
    state = opened.first_state(KEY)
    params = (state.server.params, [s.params for s in one_by_one(run[0], state.silos)])
    opt_state = optim.init(params)  # Adam takes each number by itself
    round_ = opened.round
    for number, result in enumerate(run):
        noises = [s.noise for s in one_by_one(result, result.state.silos)]
        first = exchange_key(KEY, number, 0, len(round_.exchanges))
        noise = round_.noise(server_key(first))
        bound = bound_of(handler(model), opened.vertical, xs, y, noise, noises)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "batch_size", "start"),
    [("exact", None, "mode"), ("augmented", 5, None), ("power", 5, None)],
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
    opened = [laid_open_columns(vfl, xs, y, runtime="host") for vfl in (alone, every)]
    states = [each.first_state(KEY) for each in opened]

    @partial(jax.jit, static_argnums=0)
    def stepped(i, rows, picked):
        """Parameters of all parties after a step with the given noise and rows."""
        this, full = opened[i], opened[1]
        v, server = this.vertical, states[i].server
        silos = jax.tree.map(jnp.asarray, this.one_by_one(states[i].silos))
        clients = jax.tree.map(jnp.asarray, this.data)
        served = jax.tree.map(jnp.asarray, this.server_data)
        noise = full.vertical.round_noise(KEY)._replace(rows=rows)
        noises = jax.tree.map(jnp.asarray, [s.noise for s in full.one_by_one(states[1].silos)])
        asked, given = (this.round, server, noise, jnp.arange(3), served), []
        for exchange in this.round.exchanges:
            down, replies = replayed_part(*asked, given), []
            for j, client in enumerate(clients):
                eps, tau = noises[j]
                if picked is not None and v.rho is not None:
                    tau = tau[:, picked]
                mine = (eps, tau) if exchange.name == "draw" else None
                reply, silos[j] = exchange.visit(mine, down, silos[j], client)
                replies.append(jax.tree.map(lambda a: jnp.asarray(a)[None], reply))
            given.append(combine(exchange.combine, replies))
        server, _ = replayed_part(*asked, given)
        return server.params, [s.params for s in silos]

    whole = stepped(1, None, None)
    each = [stepped(0, jnp.array([i]), jnp.array([i])) for i in range(4)]
    mean = jax.tree.map(lambda *a: sum(a) / 4, *each)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), mean, whole)


@pytest.mark.slow
def test_a_second_run_of_the_same_shapes_builds_nothing():
    xs, y = data()
    vfl = nf.VFL(logistic, start=None)
    opened = []
    for seed in (0, 1):
        xs, y = data(seed=seed)
        vfl.run(KEY, 2, xs, y, progress_bar=False)
        opened.append(laid_open_columns(vfl, xs, y))
    assert opened[0].built is opened[1].built


@pytest.mark.slow
def test_amortised_guides_do_not_grow_with_rows():
    def size(n):
        xs, y = data(n=n)
        vfl = nf.VFL(logistic, rho=1.0, batch_size=4)
        opened = laid_open_columns(vfl, xs, y)
        state = jax.eval_shape(lambda: opened.first_state(KEY))
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
@pytest.mark.parametrize(
    "method", [nf.VFL(gaussian, start=None), nf.SOUL(gaussian, rho=1.0, num_steps=3, num_kept=4)]
)
def test_what_clients_send_may_be_changed_on_its_way(method):
    """Replies on a grid: both runtimes alike, and other than with replies as they are."""
    xs, y = data()
    found = []
    for name, transform in (("simulation", True), ("host", True), ("host", False)):
        opened = laid_open_columns(method, xs, y, runtime=name)
        to_grid = sent_otherwise(opened.algorithm, on_grid(0.5))
        runtime = RUNTIMES[name](to_grid if transform else opened.algorithm, None)
        state = runtime.init(KEY, opened.batches)
        after, *_ = runtime.advance(KEY, state, opened.batches, 12, opened.server_data)
        reached = jax.tree.leaves(after.server.params)
        found.append(jnp.concatenate([jnp.ravel(a) for a in reached]))
    np.testing.assert_allclose(found[0], found[1], atol=1e-4)
    assert abs(found[1] - found[2]).max() > 1e-3
