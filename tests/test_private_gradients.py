"""Gradient algorithms under privacy: clipped gradients, noise, plans, and what is refused."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpyro.infer.autoguide import AutoNormal
from problems import cut

import numpyro_fed as nf
from numpyro_fed.algorithms import private_gradients
from numpyro_fed.algorithms.private_gradients import OfRounds, OfVisits, PrivateBound, of_steps
from numpyro_fed.algorithms.private_units import PrivateUnits, best_clip
from numpyro_fed.frame import Coordinates
from numpyro_fed.guides.structured import Structured, build_resolved, resolve
from numpyro_fed.methods import private
from numpyro_fed.model.data import read
from numpyro_fed.model.split import split
from numpyro_fed.network.engines import InMemory
from numpyro_fed.precision import precision
from numpyro_fed.privacy.budget import Part

KEY = jax.random.key(0)
BUDGET = nf.Privacy(epsilon=1.0, delta=1e-6)
QUIET = dict(progress_bar=False)
pytestmark = pytest.mark.usefixtures("noise_of_a_seed")


def logistic(x, y=None):
    beta = numpyro.sample("beta", dist.Normal(0, 10).expand([x.shape[-1]]).to_event(1))
    with nf.silo_plate("row", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


def normal(y):
    mu = numpyro.sample("mu", dist.Normal(3, 50))
    with nf.silo_plate("row", len(y)):
        numpyro.sample("y", dist.Normal(mu, 5), obs=y)


def visits(y):
    mu, sd = numpyro.sample("mu", dist.Normal(0, 3)), numpyro.sample("sd", dist.HalfNormal(2))
    with nf.silo_plate("patient", len(y), dim=-2):
        b = numpyro.sample("b", dist.Normal(mu, sd))
        with numpyro.plate("visit", y.shape[1]):
            numpyro.sample("y", dist.Bernoulli(logits=b), obs=y)


def patients(n=6_000, seed=0):
    r = np.random.default_rng(seed)
    x = np.stack([np.ones(n), r.uniform(2, 8, n), r.normal(size=n)], 1)
    p = 1 / (1 + np.exp(-x @ [-2.0, 0.4, 1.0]))
    return {"x": x, "y": (r.uniform(size=n) < p).astype(int)}


def means(n, seed=0):
    r = np.random.default_rng(seed)
    return cut({"y": r.normal(40, 5, n)}, (n // 2, n // 3, n - n // 2 - n // 3))


def units(model, silo, noise=lambda total, sd: total):
    """The units of a model at one silo, and the silo's data."""
    (data,) = read([silo], model)
    fm = split(model, [data])
    return PrivateUnits(fm, 1, False, noise, nodes=11 if any(p.dim for p in fm.plates) else 0), data


def bound_of(parts, root, clip, multiplier=1.0):
    guide = build_resolved(None, resolve(None, parts.model, {"row": 9}, {"row": 9}), parts.model)
    return PrivateBound(parts, guide, multiplier, root, jnp.asarray(clip))


def gradient(bound, z, data):
    """The value of the bound and its gradient."""
    none = Coordinates(z, jnp.zeros_like(z))
    return jax.value_and_grad(lambda z: bound.value({}, {}, z, none, {}, data))(z)


# The bound.


def test_the_gradient_is_that_of_the_log_likelihood_and_the_value_says_nothing():
    with precision(double=True):
        parts, data = units(logistic, patients(50))
        z, root = jnp.array([-1.0, 0.2, 0.5]), jnp.array([[2.0, 0, 0], [1, 0.5, 0], [0.3, 0.1, 1]])
        value, g = gradient(bound_of(parts, root, 1e6), z, data)
        exact = jax.grad(lambda z: parts.log_likelihoods(z, data).sum())(z)
        np.testing.assert_allclose(g, exact, rtol=1e-10)
    assert float(value) == 0.0


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 10**6), st.floats(1e-3, 1e3))
def test_a_row_moves_the_gradient_by_the_clip_and_no_more(seed, clip):
    """In the frame, where noise is added; whatever the other rows are."""
    r, rows = np.random.default_rng(seed), patients(20, seed)
    rows["x"] *= 10 ** r.uniform(-3, 3)
    other = {name: np.array(a) for name, a in rows.items()}
    other["x"][7], other["y"][7] = 100 * r.normal(size=3), 1 - rows["y"][7]
    z, root = (
        jnp.asarray(r.normal(size=3)),
        jnp.asarray(np.tril(r.normal(size=(3, 3))) + 2 * np.eye(3)),
    )
    with precision(double=True):
        found = []
        for silo in (rows, other):
            parts, data = units(logistic, silo)
            found.append(root.T @ gradient(bound_of(parts, root, clip), z, data)[1])
    # One row was replaced by another: a clip for each of the two.
    assert float(jnp.linalg.norm(found[0] - found[1])) <= 2 * clip * (1 + 1e-9)


def test_noise_is_as_wide_as_the_clip_times_the_multiplier():
    def ones(total, sd):
        return total + sd

    with precision(double=True):
        parts, data = units(logistic, patients(30), ones)
        z, root = jnp.zeros(3), jnp.diag(jnp.array([2.0, 4.0, 8.0]))
        with_noise = gradient(bound_of(parts, root, 0.25, multiplier=3.0), z, data)[1]
        quiet = dataclasses.replace(parts, noise=lambda total, sd: total)
        without = gradient(bound_of(quiet, root, 0.25, multiplier=3.0), z, data)[1]
        np.testing.assert_allclose(root.T @ (with_noise - without), 0.75, rtol=1e-10)


def test_each_particle_and_silo_has_noise_of_its_own():
    parts, data = units(normal, dict(y=np.arange(9.0)), private.noisy)
    bound = bound_of(parts, jnp.eye(1), 1.0)
    stack = jax.tree.map(lambda a: jnp.stack([a, a]), data)

    def at(z, data):
        return gradient(bound, z, data)[1]

    of_silos = jax.jit(jax.vmap(jax.vmap(at, (0, None)), (None, 0)))
    found = of_silos(jnp.zeros((3, 1)), stack)
    assert len(np.unique(np.asarray(found))) == 6


# Where to clip.


def counts_of(sizes):
    return (
        jnp.zeros(201)
        .at[jnp.array([p + 100 for p in sizes])]
        .set(jnp.array(list(sizes.values()), float))
    )


@pytest.mark.parametrize(
    ("sizes", "noise", "clip"),
    [
        # 330 rows of 20,000 are longer: cut off by a quarter each, they move the sum by 82 lengths.
        ({-6: 16_700, -5: 3_000, -4: 330}, 9.0, 2.0**-4),
        # With noise of 80 lengths that is less than twice the noise.
        ({-6: 16_700, -5: 3_000, -4: 330}, 80.0, 2.0**-5),
        ({3: 500}, 1.0, 2.0**3),
    ],
)
def test_clipping_moves_the_sum_no_more_than_noise_does(sizes, noise, clip):
    assert float(best_clip(counts_of(sizes), jnp.array(1.0), jnp.array(noise), 1)) == clip


def test_in_many_directions_noise_counts_more_and_what_is_clipped_less():
    counts, sd = counts_of({-6: 16_700, -5: 3_000, -4: 330}), jnp.array(1.0)
    assert float(best_clip(counts, sd, jnp.array(9.0), 1)) == 2.0**-4
    assert float(best_clip(counts, sd, jnp.array(9.0), 16)) == 2.0**-5


def test_without_a_length_that_noise_does_not_hide_there_is_no_clip():
    assert float(best_clip(jnp.full(201, 3.0), jnp.array(1.0), jnp.array(1.0), 2)) == 0.0


def test_the_best_clip_is_in_proportion_to_the_lengths():
    near, far = counts_of({-3: 900, -2: 80}), counts_of({57: 900, 58: 80})
    sd, noise = jnp.array(2.0), jnp.array(5.0)
    assert float(best_clip(far, sd, noise, 2)) == 2.0**60 * float(best_clip(near, sd, noise, 2))


# What noise does to the mean.


@pytest.mark.parametrize("h", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("noise", [0.01, 4.0])
def test_the_variance_is_that_of_the_steps(h, noise):
    """The recursion of the variance, step by step, for a quadratic of this curvature."""
    optim, count, exact = private_gradients.steps(), 400, 0.7
    state = optim.init({"loc": jnp.zeros(1)})
    for _ in range(count):
        g = {"loc": jnp.full(1, math.sqrt(noise))}
        change, state = optim.update(g, state, None)
        step = -float(change["loc"][0]) / math.sqrt(noise)
        exact = (1 - step * h) ** 2 * exact + step**2 * noise
    n = jnp.asarray(noise)
    found = of_steps(jnp.array([h]), jnp.asarray(0.7), n, n, jnp.asarray(count))
    assert float(found[0]) == pytest.approx(exact, rel=0.15, abs=1e-4)


def test_spreads_move_more_slowly_than_means():
    optim = private_gradients.steps()
    g = {"loc": jnp.ones(1), "log_scale": jnp.ones(1), "below": jnp.ones(0)}
    change, _ = optim.update(g, optim.init(g), None)
    assert float(change["loc"][0]) == pytest.approx(-2 / (1 + 20 + 4))
    assert float(change["log_scale"][0]) == pytest.approx(-2 / (1 + 20 + 40))


def test_variances_add_up_over_silos_and_visits():
    h, start, noise = jnp.ones(1), jnp.asarray(0.3), jnp.asarray(0.02)
    one = float(OfRounds(4, 10, averages=False)(h, start, noise, jnp.asarray(30.0))[0])
    same = of_steps(h, start, 4 * noise, 4 * noise, jnp.asarray(300.0))
    assert one == pytest.approx(float(same[0]))
    # Of visits so long that they forget their start, only each silo's last one counts.
    visits = OfVisits(4, 10**6, 1.0)(h, start, noise, jnp.asarray(3.0))
    last = of_steps(h, jnp.zeros(()), noise, noise, jnp.asarray(10**6))
    assert float(visits[0]) == pytest.approx(4 * float(last[0]), rel=1e-2)


# Runs.

METHODS = {
    "sfvi": (nf.SFVI, {}, 150),
    "avg": (nf.SFVIAvg, dict(local_steps=30), 4),
    "sequential": (nf.PVI, dict(local=None), 2),
    "synchronous": (nf.PVI, dict(schedule="synchronous"), 2),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_run_spends_the_budget_and_is_near_the_posterior(name):
    kind, options, rounds = METHODS[name]
    silos = means(9_000)
    method = kind(normal, privacy=BUDGET, **options)
    result = method.run(KEY, rounds, silos, **QUIET)
    assert 0.999 < result.privacy.epsilon <= 1
    assert [name for name, _ in result.privacy.exchanges][-2:] == [
        "private lengths",
        "private gradients",
    ]
    assert result.settled, result.judgement
    mu = np.asarray(result.sample_posterior(KEY, 4_000)["mu"])
    exact = np.concatenate([s["y"] for s in silos]).mean()
    # Noise makes it wider than the posterior without it, and is counted. The spread is itself from
    # noisy gradients: of eighty fits one in ten is narrower, by a fifth at most.
    assert 0.6 < mu.std() / (5 / 9_000**0.5) < 4
    assert abs(mu.mean() - exact) < 4.5 * mu.std()


def test_silos_tell_no_term_of_the_bound():
    """All that a reply has besides gradients is zero, whatever the rows are."""
    silos = means(3_000)
    first = nf.SFVI(normal, privacy=BUDGET).run(KEY, 5, silos, **QUIET)
    # Minus the log prior and the entropy: about log(50) - log(0.1) here.
    assert (np.abs(first.losses) < 20).all()
    visits = nf.PVI(normal, privacy=BUDGET).run(KEY, 2, silos, **QUIET)
    assert (np.abs(visits.losses) < 20).all()
    with pytest.raises(nf.ModelError, match="without noise"):
        _ = visits.log_evidence


def test_latents_of_rows_are_integrated_out_within_their_row():
    r = np.random.default_rng(0)
    b = r.normal(1, 1, 2_000)
    y = (r.uniform(size=(2_000, 4)) < 1 / (1 + np.exp(-b[:, None]))).astype(int)
    silos = cut({"y": y}, (900, 1_100))
    budget = nf.Privacy(epsilon=20.0, delta=1e-6)
    result = nf.SFVI(visits, privacy=budget).run(KEY, 40, silos, **QUIET)
    draws = result.sample_posterior(KEY, 4_000)
    for name, truth in (("mu", 1.0), ("sd", 1.0)):
        found = np.asarray(draws[name])
        assert abs(found.mean() - truth) < 4.5 * found.std()
        assert found.std() < 0.3


def test_a_run_goes_on_within_its_plan_and_not_beyond(tmp_path):
    silos = means(6_000)
    method = nf.SFVI(normal, privacy=BUDGET)
    first = method.run(KEY, 40, silos, callback=lambda result: True, every=25, **QUIET)
    assert first.ended == "callback"
    assert first.privacy.epsilon < 0.95
    both = method.run(KEY, 15, silos, init_state=first.state, **QUIET)
    assert 0.999 < both.privacy.epsilon <= 1
    with pytest.raises(nf.SavedStateError, match="another budget"):
        nf.SFVI(normal, privacy=nf.Privacy(5.0, 1e-6)).run(
            KEY, 1, silos, init_state=first.state, **QUIET
        )
    with pytest.raises(nf.ModelError, match="planned for 40 rounds, of which 40 were made"):
        method.run(KEY, 1, silos, init_state=both.state, **QUIET)
    both.save(tmp_path / "private")
    loaded = nf.load(tmp_path / "private", normal, silos)
    assert loaded.privacy == both.privacy
    assert loaded.judgement == both.judgement


def test_a_silo_answers_no_more_rounds_than_are_planned():
    silos = means(6_000)
    method = nf.SFVI(normal, privacy=Part.of(BUDGET, share=0.5, rounds=2))
    fit, hosted = method._compiled_for(silos, "simulation")
    exchange = fit.algorithm.round.exchanges[0]
    data = hosted.data[0]
    state = fit.algorithm.init_silo(KEY, data)
    server = fit.algorithm.init_server(KEY)
    down = []

    def ask(name, message):
        down.append(message)
        raise StopIteration

    with pytest.raises(StopIteration):
        fit.algorithm.round.run(server, fit.algorithm.round.noise(KEY), ask)
    for planned in (True, True, False):
        noise = exchange.silo_noise(KEY, state)
        reply, state = exchange.visit(noise, down[0], state, data)
        assert bool(reply.ok) == planned
    assert all((np.asarray(a) == 0).all() for a in jax.tree.leaves(reply.up))


def test_silos_as_a_whole_are_protected_by_a_clip_of_their_sum():
    r = np.random.default_rng(0)
    silos = [dict(y=r.normal(40, 5, 30)) for _ in range(400)]
    budget = nf.Privacy(epsilon=4.0, delta=1e-4, unit="silo", trusted="sum")
    result = nf.SFVI(normal, privacy=budget).run(KEY, 100, silos, **QUIET)
    mu = np.asarray(result.sample_posterior(KEY, 4_000)["mu"])
    assert abs(mu.mean() - 40) < 5 * mu.std()
    # The spread itself is learnt from gradients with noise.
    assert 0.7 < mu.std() / (5 / 12_000**0.5) < 3


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (nf.SFVI, dict(batch_size=10), "are no secret, and protect nothing"),
        (nf.SFVI, dict(schedule="sequential"), "rounds in which all silos take part"),
        (nf.SFVI, dict(schedule=nf.schedules.Given([[0, 1]]), batch_size=4), "protect nothing"),
        (nf.SFVI, dict(guide=AutoNormal), "whose spread counts the noise"),
        (nf.SFVI, dict(guide=Structured(globals="diagonal")), "whose spread counts the noise"),
        (nf.PVI, dict(privacy=nf.Privacy(1.0, 1e-6, trusted="sum")), "trusted='silo'"),
        (nf.SFVIAvg, dict(privacy=nf.Privacy(1.0, 1e-6, trusted="sum")), "trusted='silo'"),
        (nf.PVI, dict(local=nf.local.LBFGS()), "local="),
        (nf.PVI, dict(local=nf.local.Optax(patience=3)), "local="),
        (nf.PVI, dict(deletion="none"), "deletion="),
        (nf.PVI, dict(loss=nf.losses.log_loss), "loss="),
        (nf.PVI, dict(schedule="asynchronous"), "schedule="),
        (nf.SFVI, dict(start=None), "start= under privacy="),
        (nf.SFVI, dict(objective=nf.Quadrature()), "objective= under privacy="),
        (nf.PVI, dict(starts=3), "starts= under privacy="),
        (
            nf.SFVIAvg,
            dict(privacy=nf.Privacy(1.0, 1e-6, unit="silo")),
            "number of rows is told",
        ),
    ],
)
def test_settings_under_which_nothing_is_accounted_are_refused(kind, options, words):
    with pytest.raises(nf.ModelError, match=words):
        kind(normal, **{"privacy": BUDGET, **options})


def test_what_would_end_a_run_by_its_bound_is_refused():
    with pytest.raises(ValueError, match="the bound that would tell is not sent"):
        nf.SFVI(normal, privacy=BUDGET).run(KEY, 9, means(90), stop="converged", **QUIET)


def test_another_optimiser_runs_and_the_verdict_says_what_is_not_known():
    method = nf.SFVI(normal, privacy=BUDGET, optim=optax.adam(0.03))
    result = method.run(KEY, 80, means(6_000), **QUIET)
    assert not result.settled
    assert "counts the noise as of the default optimiser" in result.judgement


def test_what_asks_silos_without_noise_is_refused():
    result = nf.PVI(normal, privacy=BUDGET).run(KEY, 1, means(900), **QUIET)
    for ask in (
        lambda: nf.importance_correct(KEY, result),
        lambda: result.leave_out(),
        lambda: result.silos,
    ):
        with pytest.raises((ValueError, nf.ModelError), match=r"noise"):
            ask()


def test_the_mode_of_a_private_search_counts_its_noise():
    silos = means(20_000)
    found = nf.find_mode(KEY, normal, silos, privacy=BUDGET)
    assert 0.85 < found.privacy.epsilon <= 1
    assert found.converged
    assert found.log_evidence is None
    sd = math.sqrt(found.covariance.item())
    assert sd > 5 / 20_000**0.5
    assert abs(found.sites["mu"] - np.concatenate([s["y"] for s in silos]).mean()) < 5 * sd
    with pytest.warns(nf.ConvergenceWarning, match="Do not rely"):
        nf.find_mode(KEY, normal, means(30), privacy=BUDGET)


@pytest.mark.parametrize("name", METHODS)
def test_silos_elsewhere_have_noise_of_their_own(name):
    kind, options, rounds = METHODS[name]
    silos, rounds = means(9_000), min(rounds, 60)
    policy = nf.Policy(max_epsilon=1.0, max_delta=BUDGET.delta)
    here = [nf.Silo(silo, names=dict(normal=normal), policy=policy) for silo in silos]
    engine = InMemory([silo.answer for silo in here])
    federation = nf.Federation(engine, names=dict(normal=normal))
    result = kind(normal, privacy=BUDGET, **options).run(KEY, rounds, federation, **QUIET)
    assert 0.99 < result.privacy.epsilon <= 1
    mu = np.asarray(result.sample_posterior(KEY, 4_000)["mu"])
    assert abs(mu.mean() - np.concatenate([s["y"] for s in silos]).mean()) < 6 * mu.std()
    # The search and the rounds have spent together all that the silo's owner allows.
    with pytest.raises(nf.ModelError, match="epsilon"):
        kind(normal, privacy=BUDGET, **options).run(KEY, rounds, federation, **QUIET)
