"""PVI: exact on conjugate models, the sum rule, its properties, and what happens to bad replies."""

import warnings
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import cut, glmm_silos, jitter

import numpyro_fed as nf
from numpyro_fed import expfam
from numpyro_fed.algorithms.pvi import Status

KEY = jax.random.key(0)
QUIET = dict(progress_bar=False)


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


class Conjugate(NamedTuple):
    """A model, its rows, and the exact posterior: ``{site: {moment: value}}``."""

    model: Any
    rows: dict[str, np.ndarray]
    exact: dict[str, dict[str, Any]]


def mean():
    def model(y):
        m = numpyro.sample("m", dist.Normal(1.0, 2.0))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(m, 0.5), obs=y)

    y = np.random.default_rng(0).normal(size=12)
    precision = 1 / 4 + len(y) * 4
    exact = dict(mean=(1 / 4 + 4 * y.sum()) / precision, variance=1 / precision)
    return Conjugate(model, dict(y=y), {"m": exact})


def linear_regression():
    def model(x, y):
        a = numpyro.sample("a", dist.Normal(0.5, 2.0))
        b = numpyro.sample("b", dist.Normal(a, 1.0).expand([2]).to_event(1))
        with nf.silo_plate("row", x.shape[0]):
            numpyro.sample("y", dist.Normal(a + x @ b, 0.7), obs=y)

    r = np.random.default_rng(1)
    x, y = r.normal(size=(12, 2)), r.normal(size=12)
    design = np.column_stack([np.ones(12), x])
    to_a = np.array([[-1.0, 1, 0], [-1, 0, 1]])
    precision = np.diag([1 / 4, 0, 0]) + to_a.T @ to_a + design.T @ design / 0.49
    covariance = np.linalg.inv(precision)
    m = covariance @ (np.array([0.5 / 4, 0, 0]) + design.T @ y / 0.49)
    return Conjugate(
        model,
        dict(x=x, y=y),
        {
            "a": dict(mean=m[0], variance=covariance[0, 0]),
            "b": dict(mean=m[1:], covariance_matrix=covariance[1:, 1:]),
        },
    )


def beta_bernoulli():
    def model(y):
        p = numpyro.sample("p", dist.Beta(2.0, 0.7).expand([2]))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Bernoulli(p).to_event(1), obs=y)

    y = np.random.default_rng(2).binomial(1, [0.3, 0.9], (12, 2)).astype(float)
    exact = dist.Beta(2 + y.sum(0), 0.7 + (1 - y).sum(0))
    return Conjugate(model, dict(y=y), {"p": dict(mean=exact.mean, variance=exact.variance)})


def gamma_poisson():
    def model(y):
        rate = numpyro.sample("rate", dist.Gamma(3.0, 0.5))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Poisson(rate), obs=y)

    y = np.random.default_rng(3).poisson(4.0, 12)
    exact = dist.Gamma(3.0 + y.sum(), 0.5 + len(y))
    return Conjugate(model, dict(y=y), {"rate": dict(mean=exact.mean, variance=exact.variance)})


def dirichlet_categorical():
    def model(y):
        p = numpyro.sample("p", dist.Dirichlet(jnp.array([1.5, 0.6, 2.0])))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Categorical(p), obs=y)

    y = np.random.default_rng(4).integers(0, 3, 12)
    exact = dist.Dirichlet(np.array([1.5, 0.6, 2.0]) + np.bincount(y, minlength=3))
    return Conjugate(model, dict(y=y), {"p": dict(mean=exact.mean, variance=exact.variance)})


CONJUGATE = [mean, linear_regression, beta_bernoulli, gamma_poisson, dirichlet_categorical]


def assert_exact(result, exact, rtol=1e-6):
    posterior = result.posterior()
    for site, moments in exact.items():
        for name, value in moments.items():
            np.testing.assert_allclose(getattr(posterior[site], name), value, rtol=rtol)


@pytest.mark.parametrize(
    ("problem", "sizes"),
    [*((p, (5, 3, 4)) for p in CONJUGATE), (linear_regression, (1,) * 12), (mean, (12,))],
)
def test_one_pass_is_exact_on_conjugate_models(problem, sizes):
    model, rows, exact = problem()
    result = nf.PVI(model).run(KEY, 1, cut(rows, sizes), **QUIET)
    assert_exact(result, exact)
    assert result.communications == len(sizes)


@pytest.mark.parametrize("problem", [mean, gamma_poisson])
def test_one_undamped_synchronous_round_is_exact_on_conjugate_models(problem):
    model, rows, exact = problem()
    pvi = nf.PVI(model, schedule="synchronous", damping=1.0)
    assert_exact(pvi.run(KEY, 1, cut(rows, (5, 3, 4)), **QUIET), exact)


def test_the_evidence_of_a_conjugate_model_is_exact():
    model, rows, _ = mean()
    result = nf.PVI(model).run(KEY, 2, cut(rows, (5, 7)), **QUIET)
    y = rows["y"]
    covariance = 4.0 * np.ones((12, 12)) + 0.25 * np.eye(12)
    exact = dist.MultivariateNormal(np.ones(12), covariance).log_prob(y)
    np.testing.assert_allclose(result.log_evidence, [exact, exact], rtol=1e-6)


def logistic(x, y):
    w = numpyro.sample("w", dist.Normal(0, 2).expand([x.shape[1]]).to_event(1))
    with nf.silo_plate("row", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def logistic_rows(n=24, d=2, seed=5):
    r = np.random.default_rng(seed)
    x = r.normal(size=(n, d))
    return dict(x=x, y=r.binomial(1, 1 / (1 + np.exp(-x @ np.arange(1.0, d + 1)))).astype(float))


QUICK = nf.local.Optax(steps=10, tolerance=1e6)
SCHEDULES = {
    "sequential": nf.schedules.Sequential("random"),
    "synchronous": nf.schedules.Synchronous(),
    "random": nf.schedules.Random(2),
    "asynchronous": nf.schedules.Asynchronous([1.0, 1.0, 3.0]),
}


def total_of_factors(result):
    return jax.tree.map(
        lambda *leaves: sum(leaves), *[result.factor(j) for j in range(result.num_silos)]
    )


def assert_sum_rule(result):
    server = result.state.server
    prior = result._fit.factors.globals.prior(server.params["theta"])
    factors = total_of_factors(result)

    def equal(a, b):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)

    jax.tree.map(equal, factors, server.total)
    jax.tree.map(lambda p, f, q: equal(p + f, q), prior, factors, server.params["guide"])


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_posterior_is_the_prior_plus_all_factors_at_every_round(name):
    pvi = nf.PVI(logistic, schedule=SCHEDULES[name], local=QUICK)

    @settings(max_examples=4, deadline=None)
    @given(seed=st.integers(0, 2**31 - 1))
    def holds(seed):
        silos, state = cut(logistic_rows(seed=seed), (8, 8, 8)), None
        for _ in range(3):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # two of three silos at random may leave one out
                result = pvi.run(jax.random.key(seed), 1, silos, init_state=state, **QUIET)
            state = result.state
            assert_sum_rule(result)
            assert float(expfam.inner(*[total_of_factors(result)] * 2)) > 0

    holds()


def test_what_a_silo_sends_depends_neither_on_its_rows_nor_on_its_data():
    fits = [
        nf.PVI(glmm_inside, local=nf.local.Optax(steps=2))._prepare(glmm_silos((n, n)), "host")
        for n in (3, 7)
    ]
    sent = []
    for fit, held in fits:
        state = fit.runtime.init(KEY, held.batches)
        up = jax.eval_shape(partial(reply, fit), held.batches, state)
        sent.append(jax.tree.map(lambda a: a.shape, up))
    assert sent[0] == sent[1]
    assert sum(np.prod(s) for s in jax.tree.leaves(sent[0], is_leaf=is_shape)) == (
        3 + 9 + 1 + len(Status)
    )


def is_shape(x):
    return isinstance(x, tuple) and all(isinstance(n, int) for n in x)


def reply(fit, batches, state):
    """What silo 0 answers to the server's first message."""
    exchange = fit.factors.algorithm.exchanges[0]
    down, _ = exchange.broadcast(KEY, state.server, jnp.array([0]))
    one = jax.tree.map(lambda a: a[0], (state.silos[0], batches[0].data))
    return exchange.silo(KEY, down._replace(taken=down.taken[0]), *one)[0]


def fixed_noise(monkeypatch, points=32):
    """Expectations over ``points`` fixed nodes, whatever the key: PVI without Monte Carlo noise."""
    import numpyro_fed.pvi as module

    find = module.globals_of

    def globals_of(*args):
        chosen = find(*args)
        dim = chosen.family.dim
        nodes = jitter(jnp.zeros((points, dim)), 1.0)
        nodes = (nodes - nodes.mean(0)) @ jnp.linalg.inv(jnp.linalg.cholesky(jnp.cov(nodes.T)).T)
        names = list(chosen.family.fit(lambda z: z.sum()))
        assert names == ["gaussian"]
        family = chosen.family._replace(noise=lambda key, n: {"gaussian": nodes})
        return chosen._replace(family=family)

    monkeypatch.setattr(module, "globals_of", globals_of)


def eta_of(result):
    return result.natural_parameters()["gaussian"]


def assert_close(a, b, **tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


EXACT = nf.local.LBFGS(steps=100, num_particles=32, tolerance=1e-9)


def test_the_fixed_point_depends_on_no_partition_and_no_order(monkeypatch):
    """Property 2.2(b): it is the optimum of the global free energy, that is of one silo alone."""
    fixed_noise(monkeypatch)
    rows = logistic_rows()
    pooled = nf.PVI(logistic, local=EXACT).run(KEY, 1, [rows], **QUIET)
    for schedule, sizes in (("fixed", (10, 8, 6)), ([1, 0], (4, 20))):
        pvi = nf.PVI(logistic, local=EXACT, schedule=nf.schedules.Sequential(schedule))
        result = pvi.run(KEY, 12, cut(rows, sizes), **QUIET)
        assert_close(eta_of(result), eta_of(pooled), rtol=1e-5, atol=1e-5)
        early = pvi.run(KEY, 1, cut(rows, sizes), **QUIET)
        assert not np.allclose(eta_of(early)["first"], eta_of(pooled)["first"], rtol=1e-3)


def test_local_free_energies_sum_to_the_global_one():
    """Property 2.2(a), with normalised factors: at any posterior that the sum rule holds for."""
    pvi = nf.PVI(logistic, local=QUICK, evidence_draws=200_000)
    result = pvi.run(KEY, 1, cut(logistic_rows(), (8, 8, 8)), **QUIET)
    chosen = result._fit.factors.globals
    family, q = chosen.family, result.natural_parameters()
    prior, psi = chosen.prior({}), chosen.family.ordinary(q)
    z = jax.vmap(family.draw, (None, 0))(psi, family.noise(KEY, 200_000))
    moments, total = family.moments(psi), 0.0
    for j, data in enumerate(result._silos.data):
        none = {"row": jnp.zeros((len(data.arrays["y"]), 0))}
        rows = jax.vmap(lambda z, d=data, n=none: result._fit.model.log_silo({}, z, n, d)["row"])(z)
        cavity = jax.tree.map(jnp.subtract, q, result.factor(j))
        to_cavity = expfam.inner(jax.tree.map(jnp.subtract, q, cavity), moments)
        total += rows.sum(1).mean() - to_cavity
    log_z = family.log_partition(q) - family.log_partition(prior)
    np.testing.assert_allclose(total + log_z, result.log_evidence[-1], atol=0.02)


def global_free_energy(pvi, rows):
    """The global free energy as a function of natural parameters, over the fixed nodes."""
    fit, held = pvi._prepare([rows], "simulation")
    chosen, data = fit.factors.globals, held.data[0]
    family = chosen.family
    nodes = family.noise(KEY, 1)["gaussian"]

    def value(eta):
        psi = family.ordinary(eta)
        z = jax.vmap(lambda e: family.draw(psi, {"gaussian": e}))(nodes)
        n = len(rows["y"])
        each = jax.vmap(
            lambda z: fit.model.log_silo({}, z, {"row": jnp.zeros((n, 0))}, data)["row"]
        )
        return each(z).sum(1).mean() - expfam.kl(family, eta, chosen.prior({}))

    return value, family


@pytest.mark.parametrize("gradient", ["plain", "natural"])
def test_one_local_step_of_every_silo_is_a_step_of_global_inference(gradient, monkeypatch):
    """Properties 3.1 and 3.3 for plain gradients, 3.2 and equation 4 for natural ones."""
    fixed_noise(monkeypatch)
    rows, rate = logistic_rows(), 0.01
    chosen = dict(rate=rate, gradient=gradient, family="diagonal")
    pvi = nf.GlobalVI(logistic, **chosen)
    silos, before = cut(rows, (8, 8, 8)), None
    for _ in range(2):
        result = pvi.run(KEY, 1, silos, init_state=before and before.state, **QUIET)
        start = before.natural_parameters() if before else None
        if before is None:
            start = result._fit.factors.globals.prior({})
        value, family = global_free_energy(nf.GlobalVI(logistic, **chosen), rows)
        step = jax.grad(value)(start)
        if gradient == "natural":
            fisher = jax.hessian(family.log_partition)(start)["gaussian"]
            flat = jnp.concatenate([step["gaussian"][k] for k in ("first", "second")])
            F = jnp.block([[fisher[a]["gaussian"][b] for b in fisher] for a in fisher])
            first, second = jnp.split(jnp.linalg.solve(F, flat), 2)
            step = {"gaussian": {"first": first, "second": second}}
        expected = jax.tree.map(lambda a, g: a + rate * g, start, step)
        assert_close(result.natural_parameters(), expected, rtol=1e-7, atol=1e-9)
        before = result


def test_stochastic_power_ep_has_mini_batch_global_inference_as_its_limit(monkeypatch):
    """Proposition 4.1 and B.6: an average factor, one natural-gradient step, silo by silo."""
    fixed_noise(monkeypatch)
    rows, rate = logistic_rows(), 0.2
    step = nf.local.NaturalGradient(rate=rate, steps=1)
    silos, M = cut(rows, (8, 8, 8)), 3
    pvi = nf.StochasticPowerEP(logistic, local=step, family="diagonal", damping=1.0)
    result = pvi.run(KEY, 1, silos, **QUIET)
    chosen = result._fit.factors.globals
    family, eta, prior = chosen.family, chosen.prior({}), chosen.prior({})
    for j in range(M):
        data, n = result._silos.data[j], len(silos[j]["y"])

        def expected(psi, data=data, n=n):
            nodes = family.noise(KEY, 1)["gaussian"]
            z = jax.vmap(lambda e: family.draw(psi, {"gaussian": e}))(nodes)
            log_silo = result._fit.model.log_silo
            rows = jax.vmap(lambda z: log_silo({}, z, {"row": jnp.zeros((n, 0))}, data)["row"])(z)
            return rows.sum(1).mean()

        dual = family.dual_gradient(expected, eta)
        eta = jax.tree.map(lambda e, p, g: e + rate / M * (p + M * g - e), eta, prior, dual)
    assert_close(result.natural_parameters(), eta, rtol=1e-7, atol=1e-9)


def test_members_of_the_family_are_settings_of_pvi():
    silos = cut(logistic_rows(), (8, 8, 8))
    fixed = dict(local=QUICK)
    passes = nf.PVI(logistic, **fixed).run(KEY, 1, silos, **QUIET)
    vcl = nf.VCL(logistic, **fixed).run(KEY, 1, silos, **QUIET)
    assert_close(eta_of(vcl), eta_of(passes), rtol=1e-12)
    together = nf.PVI(logistic, schedule="synchronous", damping=1.0, **fixed)
    bcm = nf.BCM(logistic, **fixed).run(KEY, 1, silos, **QUIET)
    assert_close(eta_of(bcm), eta_of(together.run(KEY, 1, silos, **QUIET)), rtol=1e-12)
    with pytest.raises(ValueError, match="1 round"):
        nf.VCL(logistic, **fixed).run(KEY, 2, silos, **QUIET)


def test_committee_machines_are_exact_on_conjugate_models_and_streaming_counts_twice():
    model, rows, exact = mean()
    silos = cut(rows, (5, 3, 4))
    for split in (False, True):
        assert_exact(nf.BCM(model, split=split).run(KEY, 1, silos, **QUIET), exact)
    assert_exact(nf.StreamingVB(model).run(KEY, 1, silos, **QUIET), exact)
    twice = nf.StreamingVB(model).run(KEY, 2, silos, **QUIET).posterior()["m"]
    np.testing.assert_allclose(1 / twice.variance, 1 / 4 + 2 * 12 * 4, rtol=1e-9)


SOLVERS = {
    "optax": (nf.local.Optax(steps=600), 1e-2),
    "alpha": (nf.local.Optax(steps=600, alpha=0.5, num_particles=64), 3e-2),
    "lbfgs": (nf.local.LBFGS(tolerance=1e-8), 1e-6),
    "natural gradient": (nf.local.NaturalGradient(rate=0.1, num_particles=64), 3e-2),
    "closed expectation": (
        nf.local.NaturalGradient(rate=1.0, steps=1, expectation="closed_form"),
        1e-9,
    ),
    "power ep": (nf.local.PowerEP(alpha=0.5, steps=300, num_particles=512), 3e-2),
}


@pytest.mark.parametrize("name", SOLVERS)
def test_every_local_optimiser_finds_the_tilted_distribution_if_it_is_in_the_family(name):
    """Property 2.1: the local free energy is largest where ``q`` is closest to it."""

    def model(y):
        m = numpyro.sample("m", dist.Normal(0.5, 1.0))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(m, 1.0), obs=y)

    local, rtol = SOLVERS[name]
    silos = [dict(y=np.array([2.0, 3.0, 2.5, 2.2]))]
    pvi = nf.PVI(model, local=local, start_scale=None)
    q = pvi.run(KEY, 1, silos, **QUIET).posterior()["m"]
    precision = 1.0 + 4
    np.testing.assert_allclose(q.mean, (0.5 + 9.7) / precision, rtol=rtol)
    np.testing.assert_allclose(q.variance, 1 / precision, rtol=2 * rtol)


def with_scale(y, s):
    m = numpyro.sample("m", dist.Normal(1.0, 2.0))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.factor("y", -0.5 * ((y - m) / s) ** 2)


IMPATIENT = nf.local.Optax(steps=40, patience=3)


@pytest.mark.parametrize(
    "local",
    [IMPATIENT, nf.local.NaturalGradient(steps=5), nf.local.PowerEP(steps=5)],
    ids=["patience", "natural gradient", "power ep"],
)
def test_no_local_optimiser_takes_a_likelihood_that_is_nan(local):
    def model(y, bad):
        m = numpyro.sample("m", dist.Normal(0.0, 1.0))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.factor("y", -0.5 * (y - m * jnp.sqrt(bad)) ** 2)

    good, bad = (dict(y=np.ones(1), bad=np.array([sign])) for sign in (1.0, -1.0))
    with pytest.warns(UserWarning, match="1 non finite"):
        result = nf.PVI(model, local=local).run(KEY, 1, [good, bad], **QUIET)
    assert result.status[0, 1, 0] == Status.NON_FINITE
    assert float(expfam.inner(*[result.factor(1)] * 2)) == 0


def test_a_model_that_is_conjugate_at_some_silos_alone_is_not_taken_for_conjugate():
    def model(x, y):
        b = numpyro.sample("b", dist.Normal(0.0, 3.0))
        rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
        with nf.silo_plate("row", x.shape[0]):
            numpyro.sample("y", dist.Poisson(rate * jnp.exp(b * x)), obs=y)

    zero, one = (dict(x=np.full(2, x), y=np.array([2.0, 3.0])) for x in (0.0, 1.0))
    pvi = nf.PVI(model)
    assert not pvi._prepare([zero, one], "simulation")[0].factors.conjugate
    other = nf.PVI(model)
    other.run(KEY, 1, [zero, zero], **QUIET)
    with pytest.warns(UserWarning, match="not conjugate"):
        result = other.run(KEY, 1, [zero, one], **QUIET)
    assert "pass local=numpyro_fed.local.Optax()" in result.report()


def test_minibatches_of_a_model_that_sums_up_its_rows_are_refused():
    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 2))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=w * (x - x.mean())), obs=y)

    rows = logistic_rows()
    silos = cut(dict(x=rows["x"][:, 0], y=rows["y"]), (12, 12))
    pvi = nf.PVI(model, local=nf.local.Optax(batch_size=4))
    with pytest.raises(nf.GuideError, match="a minibatch is another model"):
        pvi.run(KEY, 1, silos, **QUIET)


def test_minibatches_with_local_latents_come_near_the_posterior_of_all_rows():
    silos = glmm_silos((20, 12))
    fits = [
        nf.PVI(
            glmm_inside,
            local=nf.local.Optax(steps=600, batch_size=batch, num_particles=2),
            evidence_draws=1,
        ).run(KEY, 2, silos, **QUIET)
        for batch in (None, 10)
    ]
    whole, part = (fit.posterior()["beta"] for fit in fits)
    sd = np.sqrt(whole.variance)
    np.testing.assert_allclose(part.mean, whole.mean, atol=0.5 * sd.max())
    np.testing.assert_allclose(np.sqrt(part.variance), sd, rtol=0.2)


def test_silos_that_have_not_been_visited_are_named():
    model, rows, _ = mean()
    pvi = nf.PVI(model, schedule=nf.schedules.Random(1))
    with pytest.warns(UserWarning, match="2 never visited"):
        result = pvi.run(KEY, 1, cut(rows, (4, 4, 4)), **QUIET)
    assert len(result.never_visited) == 2
    assert "never visited yet: silos" in result.report()


@pytest.mark.parametrize("schedule", ["sequential", "synchronous"])
def test_a_silo_whose_reply_is_not_finite_counts_for_nothing_and_is_reported(schedule):
    good = [dict(y=np.array([y]), s=np.ones(1)) for y in (1.0, 2.5)]
    bad = dict(y=np.array([3.0]), s=np.zeros(1))
    pvi = nf.PVI(with_scale, schedule=schedule, damping=1.0)
    with pytest.warns(UserWarning, match="2 non finite"):
        result = pvi.run(KEY, 2, [good[0], bad, good[1]], **QUIET)
    precision = 1 / 4 + 2
    np.testing.assert_allclose(result.posterior()["m"].mean, (1 / 4 + 3.5) / precision, rtol=1e-9)
    assert result.rejections["non_finite"] == 2
    assert "silo 1: its reply was not finite" in result.report()
    assert_sum_rule(result)
    with pytest.raises(nf.NonFiniteError, match="silo"):
        _ = result.log_evidence


def test_a_prior_at_which_the_data_are_impossible_is_no_obstacle():
    """The expected log likelihood at the first posterior may be minus infinity."""

    def model(y):
        m = numpyro.sample("m", dist.Normal(0.0, 400.0))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(m)), obs=y)

    silos = [dict(y=np.array([3.0, 5.0])), dict(y=np.array([4.0, 4.0]))]
    pvi = nf.PVI(model, local=nf.local.LBFGS(tolerance=1e-6))
    result = pvi.run(KEY, 2, silos, **QUIET)
    assert result.losses[0] == np.inf
    np.testing.assert_allclose(result.posterior()["m"].mean, np.log(4.0), atol=0.1)
    assert np.isfinite(result.log_evidence[-1])


def two_sided(x, y):
    """A likelihood that some silos bend the wrong way: ``x`` is the curvature they report."""
    m = numpyro.sample("m", dist.Normal(0.0, 1.0))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.factor("y", -0.5 * x * (m - y) ** 2)


def test_an_improper_update_is_rejected_or_damped_and_the_damping_recovers():
    silos = [dict(x=np.array([c]), y=np.array([0.3])) for c in (0.5, -0.9, -0.9, 0.2)]
    everyone = nf.schedules.Synchronous()
    fixed = nf.PVI(two_sided, schedule=everyone, damping=1.0)
    with pytest.warns(UserWarning, match="rejected updates"):
        result = fixed.run(KEY, 2, silos, **QUIET)
    assert (result.damping == 0).all()
    assert_sum_rule(result)
    np.testing.assert_allclose(result.posterior()["m"].variance, 1.0)
    assert "rejected" in result.report()
    damped = nf.PVI(two_sided, schedule=everyone, damping=nf.schedules.Adaptive(1.0))
    result = damped.run(KEY, 1, silos, **QUIET)
    assert result.damping[0, 0] == 0.5
    assert result.state.server.damping == 1
    assert_sum_rule(result)
    np.testing.assert_allclose(result.posterior()["m"].variance, 1 / (1 - 0.5 * 1.1))


def test_an_improper_proposal_counts_for_nothing_and_is_reported():
    silos = [dict(x=np.array([c]), y=np.array([0.3])) for c in (0.5, -2.0)]
    with pytest.warns(UserWarning, match="1 improper"):
        result = nf.PVI(two_sided).run(KEY, 1, silos, **QUIET)
    np.testing.assert_allclose(result.posterior()["m"].variance, 1 / 1.5)
    assert "silo 1: its proposal was improper" in result.report()


def test_one_class_at_each_silo_runs_to_the_end():
    rows = logistic_rows(40)
    order = np.argsort(rows["y"], kind="stable")
    silos = cut({k: v[order] for k, v in rows.items()}, (2,) * 20)
    pvi = nf.PVI(logistic, schedule="synchronous", local=nf.local.LBFGS(steps=10, num_particles=8))
    result = pvi.run(KEY, 5, silos, **QUIET)
    assert np.isfinite(result.losses).all()
    assert all(np.isfinite(q.variance).all() for q in result.posterior().values())
    assert_sum_rule(result)


def test_stale_posteriors_lead_to_the_exact_one():
    model, rows, exact = mean()
    schedule = nf.schedules.Asynchronous([1.0, 1.0, 4.0])
    pvi = nf.PVI(model, schedule=schedule, damping=0.8)
    result = pvi.run(KEY, 60, cut(rows, (5, 3, 4)), **QUIET)
    assert_exact(result, exact)
    assert result.visits.shape == (60, 3, 1)
    counts = np.bincount(result.visits.ravel())
    assert counts[2] < counts[:2].min()


def learned_scale(y):
    s = numpyro.param("s", 1.0, constraint=dist.constraints.positive)
    m = numpyro.sample("m", dist.Normal(0.0, 1.0))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(m, s), obs=y)


def learned_prior(y):
    s = numpyro.param("s", 1.0, constraint=dist.constraints.positive)
    m = numpyro.sample("m", dist.Normal(0.0, s))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(m, 0.5), obs=y)


@pytest.mark.parametrize("model", [learned_scale, learned_prior])
def test_parameters_are_learned_to_the_maximum_of_the_evidence(model):
    y = 2 + 0.7 * np.random.default_rng(6).normal(size=12)
    silos = cut(dict(y=y), (5, 7))
    pvi = nf.PVI(model, theta_optim=optax.adam(0.05))
    result = pvi.run(KEY, 300, silos, **QUIET)
    s = float(result.params["s"])

    def log_evidence(s):
        prior, noise = (s, 0.5) if model is learned_prior else (1.0, s)
        covariance = prior**2 * jnp.ones((12, 12)) + noise**2 * jnp.eye(12)
        return dist.MultivariateNormal(jnp.zeros(12), covariance).log_prob(y)

    slope, curvature = jax.grad(log_evidence)(s), jax.grad(jax.grad(log_evidence))(s)
    assert abs(slope / curvature) < 0.02
    np.testing.assert_allclose(result.log_evidence[-1], log_evidence(s), rtol=1e-6)
    assert_sum_rule(result)


def test_a_prior_outside_of_the_family_gets_a_factor_of_the_servers():
    def model(y):
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        m = numpyro.sample("m", dist.StudentT(200.0, a, 1.0))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(m, 1.0), obs=y)

    silos = cut(dict(y=np.array([1.0, 2.0, 3.0, 2.5])), (1, 3))
    with pytest.raises(nf.ModelError, match=r"'m'.*prior='factor'"):
        nf.PVI(model).run(KEY, 1, silos, **QUIET)
    q = nf.PVI(model, prior="factor").run(KEY, 3, silos, **QUIET).posterior()
    covariance = np.linalg.inv(np.array([[2.0, -1], [-1, 1 + 4]]))
    expected = covariance @ np.array([0, 8.5])
    np.testing.assert_allclose([q["a"].mean, q["m"].mean], expected, rtol=0.03)
    np.testing.assert_allclose([q["a"].variance, q["m"].variance], np.diag(covariance), rtol=0.05)


def glmm_inside(x, y=None):
    """As ``glmm``, with a prior inside of the family."""
    beta = numpyro.sample("beta", dist.Normal(0, 10).expand([x.shape[-1]]).to_event(1))
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
    with nf.silo_plate("child", x.shape[0], dim=-2):
        b = numpyro.sample("b", dist.Normal(0, scale))
        with numpyro.plate("visit", x.shape[1], dim=-1):
            numpyro.sample("y", dist.Bernoulli(logits=x @ beta + b), obs=y)


def test_local_latents_stay_at_their_silos_and_both_runtimes_agree():
    """Silos of different sizes, padded in the simulation and as they are on the host."""
    silos = glmm_silos((5, 3, 5))
    pvi = nf.PVI(
        glmm_inside,
        objective=nf.LocallyEnhanced(draws=3),
        local=nf.local.Optax(steps=5, num_particles=2),
        evidence_draws=2,
    )
    together = pvi.run(KEY, 2, silos, **QUIET)
    apart = pvi.run(KEY, 2, silos, runtime="host", **QUIET)
    assert_close(eta_of(together), eta_of(apart), rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(together.losses, apart.losses, rtol=1e-8)
    assert_sum_rule(together)
    drawn = together.sample_posterior(KEY, 4, silo=1)
    assert drawn["b"].shape == (4, 3, 1)


def test_a_run_goes_on_bit_for_bit_and_compiles_once(tmp_path):
    silos = cut(logistic_rows(), (8, 8, 8))
    pvi = nf.PVI(logistic, schedule=nf.schedules.Sequential("largest_change"), local=QUICK)
    whole = pvi.run(KEY, 3, silos, **QUIET)
    part = pvi.run(KEY, 1, silos, **QUIET)
    part.save(tmp_path / "part")
    loaded = pvi.load(tmp_path / "part", silos)
    rest = pvi.run(KEY, 2, silos, init_state=loaded.state, **QUIET)
    assert_close(eta_of(rest), eta_of(whole), rtol=0)
    assert whole._fit.runtime.advance._cache_size() == 1
    np.testing.assert_array_equal(np.sort(whole.visits[1, :, 0]), np.arange(3))


def test_a_bad_setting_is_refused_by_name():
    model, rows, _ = mean()
    silos = cut(rows, (5, 7))
    for wrong in (0.0, 1.5, "half"):
        with pytest.raises(ValueError, match="damping"):
            nf.PVI(model, damping=wrong)
    with pytest.raises(ValueError, match="schedule"):
        nf.PVI(model, schedule="sometimes")
    with pytest.raises(ValueError, match="3"):
        nf.PVI(model, schedule=nf.schedules.Random(3)).run(KEY, 1, silos, **QUIET)
    with pytest.raises(ValueError, match="1"):
        nf.PVI(model, schedule=nf.schedules.Sequential([0])).run(KEY, 1, silos, **QUIET)
    pvi = nf.PVI(logistic, local=nf.local.ClosedForm())
    with pytest.raises(nf.GuideError, match="conjugate"):
        pvi.run(KEY, 1, cut(logistic_rows(), (24,)), **QUIET)
    with pytest.raises(ValueError, match="deletion"):
        nf.PVI(model, deletion="all")
    with pytest.raises(TypeError, match="local"):
        nf.PVI(model, local=optax.adam(0.1))


def test_a_visit_that_has_not_converged_is_reported():
    pvi = nf.PVI(logistic, local=nf.local.LBFGS(steps=1, tolerance=1e-9))
    with pytest.warns(UserWarning, match="2 not converged"):
        result = pvi.run(KEY, 1, cut(logistic_rows(), (10, 14)), **QUIET)
    assert (result.status == Status.NOT_CONVERGED).all()
    assert "silo 1: the local optimiser had not converged" in result.report()


def test_fedgvi_with_kl_and_the_log_loss_is_pvi():
    silos = cut(logistic_rows(), (8, 8, 8))
    local = nf.local.LBFGS(steps=30, num_particles=8)
    a = nf.PVI(logistic, local=local).run(KEY, 1, silos, **QUIET)
    fed = nf.FedGVI(logistic, loss=nf.losses.log_loss, local=local, divergence=plain_kl)
    b = fed.run(KEY, 1, silos, **QUIET)
    assert_close(eta_of(a), eta_of(b), rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match="no evidence"):
        _ = b.log_evidence


def plain_kl(family, q, p):
    """KL as a user would write it, without the short cuts that the built-in one takes."""
    return expfam.kl(family, q, p)


def test_a_weight_on_both_divergences_is_a_power_of_the_likelihood():
    """``w KL`` to the prior and to the cavity: the posterior of the likelihood to the ``1 / w``."""
    model, rows, _ = mean()
    w = nf.divergences.WeightedKL(2.0)
    local = nf.local.LBFGS(tolerance=1e-9)
    pvi = nf.FedGVI(model, divergence=w, prior_divergence=w, local=local)
    q = pvi.run(KEY, 1, cut(rows, (5, 7)), **QUIET).posterior()["m"]
    precision = 1 / 4 + 12 * 4 / 2
    np.testing.assert_allclose(q.variance, 1 / precision, rtol=1e-5)
    np.testing.assert_allclose(q.mean, (1 / 4 + 2 * rows["y"].sum()) / precision, rtol=1e-5)


def test_the_cavity_is_found_from_the_coefficients_alone():
    """With one silo, any divergence to the prior gives what optimising it directly does."""
    model, rows, _ = mean()
    renyi = nf.divergences.AlphaRenyi(0.5)
    local = nf.local.LBFGS(tolerance=1e-9)
    pvi = nf.FedGVI(model, divergence=renyi, prior_divergence=renyi, local=local)
    result = pvi.run(KEY, 1, [rows], **QUIET)
    family = result._fit.factors.globals.family
    prior = result._fit.factors.globals.prior({})
    y = rows["y"]
    likelihood = {
        "gaussian": {"first": jnp.array([4 * y.sum()]), "second": jnp.full((1, 1), -24.0)}
    }

    def objective(eta):
        moments = family.moments(family.ordinary(eta))
        return renyi(family, eta, prior) - expfam.inner(likelihood, moments)

    slope = jax.grad(objective)(result.natural_parameters())
    assert max(float(jnp.abs(g).max()) for g in jax.tree.leaves(slope)) < 1e-4
    assert_close(result.factor(0), likelihood, rtol=1e-4)
