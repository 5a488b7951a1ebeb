"""PVI: exact on conjugate models, the sum rule, its fixed point, what is sent, what goes on."""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laid_open import inside, laid_open, times_compiled
from problems import cut, glmm_silos
from pvi_problems import (
    CONJUGATE,
    KEY,
    QUICK,
    QUIET,
    assert_close,
    assert_exact,
    assert_sum_rule,
    eta_of,
    fixed_noise,
    gamma_poisson,
    glmm_inside,
    linear_regression,
    logistic,
    logistic_rows,
    mean,
    total_of_factors,
)

import numpyro_fed as nf
from numpyro_fed import expfam
from numpyro_fed.pvi.silo import Status
from numpyro_fed.rounds.step import replayed_part

pytestmark = pytest.mark.usefixtures("double")


@pytest.mark.parametrize(
    ("problem", "sizes"),
    [
        (mean, (5, 3, 4)),
        *(pytest.param(p, (5, 3, 4), marks=pytest.mark.slow) for p in CONJUGATE[1:]),
        pytest.param(linear_regression, (1,) * 12, marks=pytest.mark.slow),
        pytest.param(mean, (12,), marks=pytest.mark.slow),
    ],
)
def test_one_pass_is_exact_on_conjugate_models(problem, sizes):
    model, rows, exact = problem()
    result = nf.PVI(model, start=None).run(KEY, 1, cut(rows, sizes), **QUIET)
    assert_exact(result, exact)
    assert result.communications == len(sizes)


@pytest.mark.slow
@pytest.mark.parametrize("problem", [mean, gamma_poisson])
def test_one_undamped_synchronous_round_is_exact_on_conjugate_models(problem):
    model, rows, exact = problem()
    pvi = nf.PVI(model, schedule="synchronous", damping=1.0, start=None)
    assert_exact(pvi.run(KEY, 1, cut(rows, (5, 3, 4)), **QUIET), exact)


@pytest.mark.slow
def test_the_evidence_of_a_conjugate_model_is_exact():
    model, rows, _ = mean()
    result = nf.PVI(model, start=None).run(KEY, 2, cut(rows, (5, 7)), **QUIET)
    y = rows["y"]
    covariance = 4.0 * np.ones((12, 12)) + 0.25 * np.eye(12)
    exact = dist.MultivariateNormal(np.ones(12), covariance).log_prob(y)
    np.testing.assert_allclose(result.log_evidence, [exact, exact], rtol=1e-6)


SCHEDULES = {
    "sequential": nf.schedules.Sequential("random"),
    "synchronous": nf.schedules.Synchronous(),
    "random": nf.schedules.Random(2),
    "asynchronous": nf.schedules.Asynchronous([1.0, 1.0, 3.0]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_posterior_is_the_prior_plus_all_factors_at_every_round(name):
    pvi = nf.PVI(logistic, schedule=SCHEDULES[name], local=QUICK, start=None)

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


@pytest.mark.slow
def test_what_a_silo_sends_depends_neither_on_its_rows_nor_on_its_data():
    pvi = nf.PVI(glmm_inside, local=nf.local.Optax(steps=2), start=None)
    sent = []
    for n in (3, 7):
        opened = laid_open(pvi, glmm_silos((n, n)), "host")
        state = opened.first_state(KEY)
        up = jax.eval_shape(partial(reply, opened.round), opened.batches, state)
        sent.append(jax.tree.map(lambda a: a.shape, up))
    assert sent[0] == sent[1]
    assert sum(np.prod(s) for s in jax.tree.leaves(sent[0], is_leaf=is_shape)) == (
        3 + 9 + 1 + len(Status)
    )


def is_shape(x):
    return isinstance(x, tuple) and all(isinstance(n, int) for n in x)


def reply(round_, batches, state):
    """What silo 0 answers to the server's first message."""
    (exchange,) = round_.exchanges
    down = replayed_part(round_, state.server, KEY, jnp.array([0]))
    one = jax.tree.map(lambda a: a[0], (state.silos[0], batches[0].data))
    return exchange.silo(KEY, down._replace(taken=down.taken[0]), *one)[0].up


EXACT = nf.local.LBFGS(steps=100, num_particles=32, tolerance=1e-9)


@pytest.mark.slow
def test_the_fixed_point_depends_on_no_partition_and_no_order(monkeypatch):
    """Property 2.2(b): it is the optimum of the global free energy, that is of one silo alone."""
    fixed_noise(monkeypatch)
    rows = logistic_rows()
    pooled = nf.PVI(logistic, local=EXACT, start=None).run(KEY, 1, [rows], **QUIET)
    for schedule, sizes in (("fixed", (10, 8, 6)), ([1, 0], (4, 20))):
        pvi = nf.PVI(logistic, local=EXACT, schedule=nf.schedules.Sequential(schedule), start=None)
        result = pvi.run(KEY, 12, cut(rows, sizes), **QUIET)
        assert_close(eta_of(result), eta_of(pooled), rtol=1e-5, atol=1e-5)
        early = pvi.run(KEY, 1, cut(rows, sizes), **QUIET)
        assert not np.allclose(eta_of(early)["first"], eta_of(pooled)["first"], rtol=1e-3)


@pytest.mark.slow
def test_local_free_energies_sum_to_the_global_one():
    """Property 2.2(a), with normalised factors: at any posterior that the sum rule holds for."""
    pvi = nf.PVI(logistic, local=QUICK, evidence_draws=200_000, start=None)
    result = pvi.run(KEY, 1, cut(logistic_rows(), (8, 8, 8)), **QUIET)
    opened = inside(result)
    chosen = opened.factors.globals
    family, q = chosen.family, result.natural_parameters()
    prior, psi = chosen.prior({}), chosen.family.ordinary(q)
    z = jax.vmap(family.draw, (None, 0))(psi, family.noise(KEY, 200_000))
    moments, total = family.moments(psi), 0.0
    for j, data in enumerate(opened.data):
        none = {"row": jnp.zeros((len(data.arrays["y"]), 0))}
        rows = jax.vmap(lambda z, d=data, n=none: opened.model.log_silo({}, z, n, d)["row"])(z)
        cavity = jax.tree.map(jnp.subtract, q, result.factor(j))
        to_cavity = expfam.inner(jax.tree.map(jnp.subtract, q, cavity), moments)
        total += rows.sum(1).mean() - to_cavity
    log_z = family.log_partition(q) - family.log_partition(prior)
    np.testing.assert_allclose(total + log_z, result.log_evidence[-1], atol=0.02)


@pytest.mark.slow
def test_stale_posteriors_lead_to_the_exact_one():
    model, rows, exact = mean()
    schedule = nf.schedules.Asynchronous([1.0, 1.0, 4.0])
    pvi = nf.PVI(model, schedule=schedule, damping=0.8, start=None)
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


@pytest.mark.slow
@pytest.mark.parametrize("model", [learned_scale, learned_prior])
def test_parameters_are_learned_to_the_maximum_of_the_evidence(model):
    y = 2 + 0.7 * np.random.default_rng(6).normal(size=12)
    silos = cut(dict(y=y), (5, 7))
    pvi = nf.PVI(model, theta_optim=optax.adam(0.05), start=None)
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


@pytest.mark.slow
def test_a_prior_outside_of_the_family_gets_a_factor_of_the_servers():
    def model(y):
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        m = numpyro.sample("m", dist.StudentT(200.0, a, 1.0))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(m, 1.0), obs=y)

    silos = cut(dict(y=np.array([1.0, 2.0, 3.0, 2.5])), (1, 3))
    with pytest.raises(nf.ModelError, match=r"'m'.*prior='factor'"):
        nf.PVI(model, prior="exact", start=None).run(KEY, 1, silos, **QUIET)
    q = nf.PVI(model, start=None).run(KEY, 3, silos, **QUIET).posterior()
    covariance = np.linalg.inv(np.array([[2.0, -1], [-1, 1 + 4]]))
    expected = covariance @ np.array([0, 8.5])
    np.testing.assert_allclose([q["a"].mean, q["m"].mean], expected, rtol=0.03)
    np.testing.assert_allclose([q["a"].variance, q["m"].variance], np.diag(covariance), rtol=0.05)


@pytest.mark.slow
def test_local_latents_stay_at_their_silos_and_both_runtimes_agree():
    """Silos of different sizes, padded in the simulation and as they are on the host."""
    silos = glmm_silos((5, 3, 5))
    pvi = nf.PVI(
        glmm_inside,
        objective=nf.LocallyEnhanced(draws=3),
        local=nf.local.Optax(steps=5, num_particles=2, tolerance=np.inf),
        evidence_draws=2,
        start=None,
    )
    together = pvi.run(KEY, 2, silos, **QUIET)
    apart = pvi.run(KEY, 2, silos, runtime="host", **QUIET)
    assert_close(eta_of(together), eta_of(apart), rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(together.losses, apart.losses, rtol=1e-8)
    assert_sum_rule(together)
    drawn = together.sample_posterior(KEY, 4, silo=1)
    assert drawn["b"].shape == (4, 3, 1)


@pytest.mark.slow
def test_a_run_goes_on_bit_for_bit_and_compiles_once(tmp_path):
    silos = cut(logistic_rows(), (8, 8, 8))
    pvi = nf.PVI(logistic, schedule=nf.schedules.Sequential("random"), local=QUICK, start=None)
    whole = pvi.run(KEY, 3, silos, **QUIET)
    part = pvi.run(KEY, 1, silos, **QUIET)
    part.save(tmp_path / "part")
    loaded = pvi.load(tmp_path / "part", silos)
    rest = pvi.run(KEY, 2, silos, init_state=loaded.state, **QUIET)
    assert_close(eta_of(rest), eta_of(whole), rtol=0)
    assert times_compiled(inside(whole).runtime.advance) == 1
    np.testing.assert_array_equal(np.sort(whole.visits[1, :, 0]), np.arange(3))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["random", "asynchronous"])
def test_some_silos_of_several_buckets_with_latents_and_parameters_of_their_own(schedule):
    """Both runtimes agree, and a run goes on bit for bit."""

    def wards(ward, n_wards, y):
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        with nf.silo_plate("ward", n_wards):
            u = numpyro.sample("u", dist.Normal(mu, 1))
        with nf.silo_plate("patient", ward.shape[0]):
            b = numpyro.sample("b", dist.Normal(u[ward], 0.5))
            own = numpyro.param("own", 0.5, constraint=dist.constraints.positive)
            numpyro.sample("y", dist.Normal(b, own), obs=y)

    r = np.random.default_rng(0)
    silos = [
        dict(ward=np.arange(n) % w, n_wards=w, y=r.normal(1.0, 1.0, n))
        for n, w in ((4, 1), (12, 3), (11, 3))
    ]
    local = nf.local.Optax(steps=3, num_particles=2, tolerance=np.inf)
    pvi = nf.PVI(wards, schedule=SCHEDULES[schedule], local=local, evidence_draws=2, start=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # three steps do not converge
        whole = pvi.run(KEY, 3, silos, **QUIET)
        apart = pvi.run(KEY, 3, silos, runtime="host", **QUIET)
        part = pvi.run(KEY, 1, silos, **QUIET)
        rest = pvi.run(KEY, 2, silos, init_state=part.state, **QUIET)
    assert len(inside(whole).batches) == 2
    np.testing.assert_array_equal(whole.visits, apart.visits)
    assert_close(eta_of(whole), eta_of(apart), rtol=1e-8, atol=1e-10)
    assert_close(eta_of(rest), eta_of(whole), rtol=0)
    assert_sum_rule(whole)
