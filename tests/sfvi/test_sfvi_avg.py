"""SFVI-Avg: where it is SFVI, where it is exact, and what it refuses."""

from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import models
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from cases import mark_slow
from problems import cut, glmm, glmm_silos

import numpyro_fed as nf
from numpyro_fed.basics.errors import GuideError, ModelError
from numpyro_fed.rounds.exchange import Replies, combine
from numpyro_fed.rounds.step import replayed_part
from numpyro_fed.sfvi.averaging import Aggregation

KEY = jax.random.key(0)


regression = models.linear(2, 0.5)


def rows(sizes, seed=0, dim=2):
    r = np.random.default_rng(seed)
    x = r.normal(size=(sum(sizes), dim)) @ r.normal(size=(dim, dim))
    return cut({"x": x, "y": x @ np.arange(1.0, dim + 1) + 0.5 * r.normal(size=len(x))}, sizes)


def posterior(silos):
    """Of the regression, exactly."""
    x, y = (np.concatenate([s[name] for s in silos]) for name in ("x", "y"))
    precision = x.T @ x / 0.25 + np.eye(x.shape[1]) / 4
    return np.linalg.solve(precision, x.T @ y / 0.25), np.linalg.inv(precision)


def opened(method, silos):
    """What a method builds, its round, and what silos hold."""
    plan = method.agree([method.describe(silo) for silo in silos])
    built = method.build(plan)
    return (
        built,
        built.algorithm.round,
        [method.read_silo(silo, plan, j) for j, silo in enumerate(silos)],
    )


def moments_of(built, eta):
    """Mean and covariance of the globals' guide, which is affine in its noise."""
    dim = len(eta["loc"])
    place = jax.vmap(lambda e: built.guide.globals.draw(eta, e)[0])
    loc = place(jnp.zeros((1, dim)))[0]
    root = place(jnp.eye(dim)).T - loc[:, None]
    return loc, root @ root.T


# --- one local step at one silo ------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("start", [None, "mode"])
def test_one_step_at_one_silo_is_sfvi(start):
    """Iterate by iterate, given the same noise."""
    silos = glmm_silos((7,))
    settings = dict(optim=optax.adam(0.05), start=start, guide=nf.guides.Structured(globals="full"))
    sfvi = nf.SFVI(glmm, **settings)
    avg = nf.SFVIAvg(glmm, local_steps=1, **settings)
    one, other = (m.run(KEY, 1, silos, progress_bar=False) for m in (sfvi, avg))
    _, x, (data,) = opened(sfvi, silos)
    _, y, _ = opened(avg, silos)
    parts, one_silo = y.run.__self__, jnp.arange(1)
    server, silo = one.state.server, jax.tree.map(lambda a: a[0], one.state.silos[0])
    averaged = other.state.server._replace(params=server.params, frame=server.frame)
    mine = jax.tree.map(lambda a: a[0], other.state.silos[0])
    mine = mine._replace(
        params=silo.params,
        opt_state=silo.opt_state,
        shared_opt_state=server.opt_state,
        frames=silo.frames,
        shared_frame=server.frame,
        centre=parts.guide.globals.centre(server.params.guide),
    )
    for i in range(5):
        key = jax.random.key(100 + i)
        key_globals, key_rows = jax.random.split(jax.random.fold_in(key, 0))
        eps = parts.guide.globals.noise(key_globals, parts.num_particles)
        noise = eps, parts.step_noise(key_rows, mine.params)
        down = replayed_part(x, server, noise[0], one_silo)
        reply, silo = x.exchanges[0].silo(noise[1], down, silo, data)
        server, info = replayed_part(x, server, noise[0], one_silo, None, [Replies(*reply)])
        down = replayed_part(y, averaged, (), one_silo)
        reply, mine = y.exchanges[0].silo(key, down, mine, data)
        gathered = jax.tree.map(lambda a: a[None], reply)
        averaged, seen = replayed_part(y, averaged, (), one_silo, None, [Replies(*gathered)])
        np.testing.assert_allclose(seen.loss, info.loss, rtol=2e-5)
        for a, b in zip(
            jax.tree.leaves((server.params, silo.params)),
            jax.tree.leaves((averaged.params, mine.params)),
            strict=True,
        ):
            np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-5)


# --- where it is exact ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["rows", "even"])
@pytest.mark.parametrize("aggregate", ["reverse_kl", "product"])
def test_products_are_exact_for_conjugate_models(aggregate, weights):
    """Each silo's Gaussian is exact for what it sees, and they multiply to the posterior."""
    sizes = (20, 6, 11) if weights == "rows" or aggregate == "product" else (12, 12, 12)
    silos = rows(sizes)
    optim = optax.adam(optax.exponential_decay(0.05, 2_000, 1e-3))
    method = nf.SFVIAvg(
        regression, local_steps=2_000, aggregate=aggregate, weights=weights, optim=optim
    )
    result = method.run(KEY, 1, silos, progress_bar=False)
    found = moments_of(opened(method, silos)[0], result.params["guide"])
    mean, cov = posterior(silos)
    sd = np.sqrt(np.diagonal(cov))
    np.testing.assert_allclose((found[0] - mean) / sd, 0, atol=0.02)
    np.testing.assert_allclose(found[1] / np.outer(sd, sd), cov / np.outer(sd, sd), atol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    "aggregate", [pytest.param("wasserstein", marks=pytest.mark.slow), "reverse_kl"]
)
def test_silos_that_are_unlike_come_to_the_posterior_of_all_by_default(aggregate):
    """Means 3 apart, where that of all rows has a standard deviation of 0.14: what a silo comes to
    is further away than small steps lead, and the average of ways cut short is no average. That of
    precisions also needs widths that are right after a long way.
    """

    model = models.level(1_000)
    y = np.random.default_rng(0).normal(size=50) + np.repeat([0, 3], [20, 30])
    method = nf.SFVIAvg(model, aggregate=aggregate)
    result = method.run(KEY, 10, cut({"y": y}, (20, 30)), progress_bar=False)
    mu = result.sample_posterior(jax.random.key(1), 40_000)["mu"]
    sd = 50**-0.5
    assert abs(float(mu.mean()) - y.mean()) < 0.05 * sd
    assert abs(float(mu.std()) / sd - 1) < 0.05


@pytest.mark.parametrize(
    ("aggregate", "globals"),
    mark_slow(
        product(["wasserstein", "forward_kl", "reverse_kl", "average"], ["full", "diagonal"]),
        [
            ("wasserstein", "full"),
            ("forward_kl", "full"),
            ("forward_kl", "diagonal"),
            ("average", "diagonal"),
            ("average", "full"),
            ("reverse_kl", "diagonal"),
        ],
    ),
)
def test_all_averages_agree_where_silos_are_alike(aggregate, globals):
    silos = rows((15,)) * 3
    optim = optax.adam(optax.exponential_decay(0.05, 2_000, 1e-3))
    guide = nf.guides.Structured(globals=globals)
    method = nf.SFVIAvg(
        regression, local_steps=2_000, aggregate=aggregate, optim=optim, guide=guide, start=None
    )
    result = method.run(KEY, 1, silos, progress_bar=False)
    built = result._fit.built
    found = jax.jit(lambda eta: moments_of(built, eta))(result.params["guide"])
    mean, cov = posterior(silos)
    expected = cov if globals == "full" else np.diag(1 / np.diagonal(np.linalg.inv(cov)))
    scale = np.sqrt(np.outer(np.diagonal(cov), np.diagonal(cov)))
    spread = 0.02 if globals == "full" else 0.1  # the gradient of a diagonal one has noise
    np.testing.assert_allclose((found[0] - mean) / np.sqrt(np.diagonal(cov)), 0, atol=spread)
    np.testing.assert_allclose(found[1] / scale, expected / scale, atol=spread)


@pytest.mark.parametrize(
    ("aggregate", "globals"),
    mark_slow(
        product(["wasserstein", "reverse_kl", "forward_kl", "average"], ["full", "diagonal"]),
        [
            ("wasserstein", "full"),
            ("wasserstein", "diagonal"),
            ("reverse_kl", "full"),
            ("average", "diagonal"),
            ("forward_kl", "full"),
            ("reverse_kl", "diagonal"),
        ],
    ),
)
def test_what_the_server_takes_is_the_average_by_its_name(aggregate, globals):
    """The algorithm's messages come to what ``barycenters`` says."""
    sizes, silos = np.array([20.0, 6.0]), rows((20, 6), dim=3)
    guide = nf.guides.Structured(globals=globals)
    method = nf.SFVIAvg(regression, local_steps=5, aggregate=aggregate, start=None, guide=guide)
    built, x, held = opened(method, silos)
    parts, who = x.run.__self__, jnp.arange(2)

    @jax.jit
    def found(held):
        state = built.algorithm.init_server(KEY)._replace(rows=sizes.sum())
        down = replayed_part(x, state, (), who)

        def replies_of(parts):
            each = [
                parts.answer(jax.random.key(j), down, parts.init_silo(KEY, data), data)[0]
                for j, data in enumerate(held)
            ]
            return jax.tree.map(lambda *a: jnp.stack(a), *each)

        sent = replies_of(parts)
        each = [jax.tree.map(lambda a, j=j: a[j : j + 1], sent) for j in range(2)]
        replies = combine(x.exchanges[0].combine, each)
        after, _ = replayed_part(x, state, (), who, None, [replies])
        eta = after.params.guide
        etas = replies_of(replace(parts, aggregation=Aggregation("average", True, 3))).up.guide
        each = jax.vmap(lambda eta: moments_of(built, eta))(etas)
        return sent.weight, eta, etas, moments_of(built, eta), each

    weight, eta, etas, (loc, cov), (locs, covs) = jax.tree.map(np.asarray, found(held))
    np.testing.assert_array_equal(weight, sizes)
    w = sizes / sizes.sum()
    if aggregate == "average":
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, np.tensordot(w, b, 1), rtol=1e-4, atol=1e-5),
            eta,
            etas,
        )
        return
    if globals == "diagonal":
        covs, cov = np.diagonal(covs, axis1=1, axis2=2), np.diagonal(cov)
    expected = getattr(nf.barycenters, aggregate)(locs, covs, sizes)
    np.testing.assert_allclose(loc, expected[0], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(cov, expected[1], rtol=2e-3, atol=1e-4 * abs(cov).max())


# --- runs ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("start", [None, "mode"])
def test_runtimes_agree_and_runs_go_on(start):
    silos = glmm_silos((5, 3, 4))
    method = nf.SFVIAvg(glmm, local_steps=7, start=start)
    whole = method.run(KEY, 4, silos, progress_bar=False)
    begun = method.run(KEY, 2, silos, progress_bar=False)
    after = method.run(KEY, 2, silos, progress_bar=False, init_state=begun.state)
    jax.tree.map(np.testing.assert_array_equal, after.state, whole.state)
    host = method.run(KEY, 4, silos, progress_bar=False, runtime="host")
    np.testing.assert_allclose(host.losses, whole.losses, rtol=1e-4)


@pytest.mark.slow
def test_locals_alone_come_to_the_average_and_the_globals_stay():
    """A silo's effect, given the average, is that of a normal model with its globals known."""

    def effects(y):
        mu = numpyro.sample("mu", dist.Normal(0, 10))
        with nf.silo_plate("silo", 1):
            b = numpyro.sample("b", dist.Normal(mu, 1))
        with nf.silo_plate("row", len(y)):
            numpyro.sample("y", dist.Normal(b[0], 1), obs=y)

    silos = [dict(y=np.full(4, mean)) for mean in (-3.0, 1.0, 5.0)]
    common = dict(local_steps=100, weights="even", start=None)
    first = nf.SFVIAvg(effects, **common).run(KEY, 2, silos, progress_bar=False)
    alone = nf.SFVIAvg(effects, locals_only=True, **common)
    found = alone.run(KEY, 20, silos, init_state=first.state, progress_bar=False)
    before, after = (jax.tree.leaves(r.state.server.params) for r in (first, found))
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(np.asarray(new), np.asarray(old))
    mu = found.sample_posterior(KEY, 4_000)["mu"]
    for j, mean in enumerate((-3.0, 1.0, 5.0)):
        draws = found.sample_posterior(KEY, 4_000, silo=j)
        # Of four rows and the prior: (4 mean + mu) / 5, with a precision of 5.
        expected = (4 * mean + mu.mean()) / 5
        assert float(draws["b"].mean()) == pytest.approx(float(expected), abs=0.1)
        before = first.sample_posterior(KEY, 4_000, silo=j)["b"].mean()
        assert abs(draws["b"].mean() - expected) < abs(before - expected)


def test_locals_alone_need_locals():
    with pytest.raises(ModelError, match="locals_only=True: the model has no latents"):
        nf.SFVIAvg(regression, locals_only=True).run(KEY, 1, rows([5, 5]), progress_bar=False)


@pytest.mark.slow
def test_the_weight_of_all_silos_is_their_rows():
    settings = dict(local_steps=1, start=None)
    of_rows = nf.SFVIAvg(glmm, **settings)
    result = of_rows.run(KEY, 1, glmm_silos((5, 3, 4)), progress_bar=False)
    assert float(result.state.server.rows) == 12
    even = nf.SFVIAvg(glmm, weights="even", **settings)
    assert float(even.run(KEY, 1, glmm_silos((5, 3)), progress_bar=False).state.server.rows) == 2


@pytest.mark.slow
def test_padding_changes_nothing():
    """Silos of one size and of several: the padded rows have no weight."""
    silos = glmm_silos((5, 4))
    twice = nf.SFVIAvg(glmm, local_steps=6, start=None)
    a = twice.run(KEY, 2, silos, progress_bar=False)
    b = twice.run(KEY, 2, silos, progress_bar=False, runtime="host")
    np.testing.assert_allclose(a.losses, b.losses, rtol=1e-5)


# --- refusals ------------------------------------------------------------------------------------


def run(model, silos, **settings):
    return nf.SFVIAvg(model, local_steps=1, **settings).run(KEY, 1, silos, progress_bar=False)


def test_private_parameters_are_refused():
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with nf.silo_plate("row", y.shape[0]):
            shift = numpyro.param("shift", 0.0)
            numpyro.sample("y", dist.Normal(mu + shift, 1), obs=y)

    with pytest.raises(ModelError, match="'shift' "):
        run(model, [dict(y=np.ones(3)), dict(y=np.ones(2))])


def test_silos_with_other_likelihoods_are_refused():
    def model(y, robust):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with nf.silo_plate("row", y.shape[0]):
            noise = dist.Cauchy(mu, 1) if robust else dist.Normal(mu, 1)
            numpyro.sample("y", noise, obs=y)

    silos = [dict(y=np.ones(3), robust=False), dict(y=np.ones(2), robust=True)]
    with pytest.raises(ModelError, match=r"'robust' .*silo 1"):
        run(model, silos)


@pytest.mark.slow
def test_numbers_that_are_no_numbers_of_rows_are_refused():
    def model(y, n, family=0):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with nf.silo_plate("row", n):
            noise = dist.Cauchy(mu, 1) if family else dist.Normal(mu, 1)
            numpyro.sample("y", noise, obs=y)

    run(model, [dict(y=np.ones(n), n=n) for n in (30, 9)])
    with pytest.raises(ModelError, match=r"'family' .* 1 at silo 1 .* 0 at silo 0"):
        run(model, [dict(y=np.ones(30), n=30, family=j) for j in (0, 1)])


@pytest.mark.parametrize(
    "schedule", ["sequential", nf.schedules.Random(1), nf.schedules.Given([[0], [1]])]
)
def test_an_average_of_one_silo_is_refused(schedule):
    with pytest.raises(ValueError, match="one silo"):
        nf.SFVIAvg(glmm, schedule=schedule)


@pytest.mark.parametrize("kind", ["skewed", numpyro.infer.autoguide.AutoIAFNormal(regression)])
def test_families_without_a_barycenter_are_refused(kind):
    with pytest.raises(GuideError, match="no barycenter"):
        run(regression, rows((4, 5)), guide=nf.guides.Structured(globals=kind))


@pytest.mark.slow
def test_a_low_rank_becomes_a_full_one_up_to_a_size():
    result = run(regression, rows((4, 5)), guide=nf.guides.Structured(globals="low_rank"))
    assert "below" in result.params["guide"]
    with pytest.raises(GuideError, match=r"'low_rank' .* 301"):
        run(
            regression,
            rows((4, 5), dim=301),
            guide=nf.guides.Structured(globals="low_rank"),
            start=None,
        )


def test_words_that_are_not_known_are_refused():
    for bad in (dict(aggregate="mean"), dict(weights="size"), dict(start="here")):
        with pytest.raises(ValueError, match="expected"):
            nf.SFVIAvg(regression, **bad)
    with pytest.raises(ValueError, match="local_steps"):
        nf.SFVIAvg(regression, local_steps=0)
