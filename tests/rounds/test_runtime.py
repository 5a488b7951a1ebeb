"""Runtimes give the same numbers, go on where they stopped, and compile once."""

import re
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import models
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from cases import mark_slow, slow_but
from laid_open import inside, laid_open, times_compiled

import numpyro_fed as nf
from numpyro_fed.data.padding import Bucket
from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.posterior.built import Built
from numpyro_fed.rounds.compiled_loop import BLOCK, compiled_runtime
from numpyro_fed.rounds.exchange import Combine, Exchange, FederatedAlgorithm, Info, Reply, Round
from numpyro_fed.rounds.keys import (
    exchange_key,
    init_keys,
    participant_keys,
    schedule_key,
    server_key,
    silo_key,
)
from numpyro_fed.rounds.plain_loop import plain_runtime
from numpyro_fed.rounds.runtime import run_rounds
from numpyro_fed.rounds.schedules import CHUNK
from numpyro_fed.rounds.silos import on_device
from numpyro_fed.text.jaxprs import inner_programs, trace_program

KEY = jax.random.key(0)
quiet = {"progress_bar": False}


def mixed(x, device, y=None):
    """Shared and private parameters, one of them a number a row; two kinds of silos."""
    tau = numpyro.param("tau", 0.5, constraint=dist.constraints.positive)
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    slope = numpyro.sample("slope", dist.LogNormal(0, 1))
    with nf.silo_plate("row", x.shape[0]):
        offset = numpyro.param("offset", jnp.linspace(0.0, 1.0, 8)[: x.shape[0]])
        gain = numpyro.param("gain", 1.0)
        b = numpyro.sample("b", dist.Normal(mu, tau))
        mean = gain * b + offset + slope * x * (device + 1)
        numpyro.sample("y", dist.Normal(mean, 1), obs=y)


def mixed_silos():
    """Silos 0 and 2 make one bucket, in which 2 is padded; silo 1 makes another."""
    r = np.random.default_rng(1)
    sizes, devices = (4, 4, 2), (0, 1, 0)
    return [
        {"x": r.normal(size=n), "y": r.normal(size=n), "device": d}
        for n, d in zip(sizes, devices, strict=True)
    ]


def robust(y):
    """Not conjugate, so that no two rounds have the same bound."""
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.StudentT(2.0, mu, 1.0), obs=y)


def robust_silos(sizes=(2, 3)):
    r = np.random.default_rng(2)
    return [{"y": r.normal(size=n)} for n in sizes]


MIXED = nf.SFVI(mixed, optim=optax.sgd(5e-3), num_particles=2, start=None)
ROBUST = nf.SFVI(robust, optim=optax.adam(1e-2), start=None)


def identical(a, b):
    """Whether two pytrees have the same structure and the same bits."""
    same = jax.tree.map(lambda x, y: np.array_equal(x, y) and x.dtype == y.dtype, a, b)
    return jax.tree.all(same)


def rows(tree, n):
    return jax.tree.map(lambda a: a[:n], tree)


# --- the same numbers ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "fit",
    [
        MIXED,
        nf.SFVI(mixed, optim=optax.sgd(5e-3), objective=nf.LocallyEnhanced(draws=3), start=None),
    ],
    ids=["elbo", "locally enhanced"],
)
def test_host_and_compiled_runtime_agree_on_padded_silos_in_several_buckets(fit):
    silos = mixed_silos()
    one, other = (fit.run(KEY, 8, silos, runtime=r, **quiet) for r in ("simulation", "host"))
    buckets = inside(one).buckets
    assert [b.silos for b in buckets] == [(0, 2), (1,)]
    assert [list(b.data.masks) for b in buckets] == [["row"], []]
    assert not any(b.data.masks for b in inside(other).buckets)
    np.testing.assert_allclose(one.losses, other.losses, rtol=2e-5)
    close = partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6)
    jax.tree.map(close, one.params, other.params)
    for j, silo in enumerate(silos):
        n = len(silo["y"])
        a, b = one.silo_params(j), other.silo_params(j)
        assert a["offset"].shape == b["offset"].shape == (n,)
        jax.tree.map(close, rows(a.pop("guide"), n), b.pop("guide"))
        jax.tree.map(close, a, b)


# --- going on --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second"),
    [(1, 4), (BLOCK - 1, 2), (BLOCK, BLOCK), (CHUNK - 1, 3), (CHUNK, 5), (CHUNK + 7, CHUNK)],
)
@pytest.mark.parametrize("progress_bar", [False, True])
def test_two_runs_are_one_run_bit_for_bit(first, second, progress_bar, capfd):
    silos = robust_silos()
    whole = ROBUST.run(KEY, first + second, silos, **quiet)
    a = ROBUST.run(KEY, first, silos, progress_bar=progress_bar)
    b = ROBUST.run(KEY, second, silos, progress_bar=progress_bar, init_state=a.state)
    assert (len(a.losses), len(b.losses)) == (first, second)
    np.testing.assert_array_equal(np.concatenate([a.losses, b.losses]), whole.losses)
    assert len(np.unique(whole.losses)) > 0.99 * (first + second)
    assert identical(b.state, whole.state)
    assert int(whole.state.round) == first + second


@pytest.mark.slow
@pytest.mark.parametrize(
    "runtime", mark_slow(["simulation", "quick", "host"], ["simulation", "quick"])
)
def test_two_runs_are_one_run_with_private_parameters_and_padding(runtime):
    silos = mixed_silos()
    whole = MIXED.run(KEY, 9, silos, runtime=runtime, **quiet)
    a = MIXED.run(KEY, 4, silos, runtime=runtime, **quiet)
    b = MIXED.run(KEY, 5, silos, runtime=runtime, init_state=a.state, **quiet)
    np.testing.assert_array_equal(np.concatenate([a.losses, b.losses]), whole.losses)
    assert identical(b.state, whole.state)


def test_rounds_that_draw_much_noise_are_the_same_numbers(monkeypatch):
    """Noise is drawn for fewer rounds at once where it is large, to the same values."""
    silos = robust_silos()
    usual = ROBUST.run(KEY, 20, silos, **quiet)
    monkeypatch.setattr("numpyro_fed.rounds.compiled_loop.NOISE", 7)
    small = nf.SFVI(robust, optim=optax.adam(1e-2), start=None).run(KEY, 20, silos, **quiet)
    np.testing.assert_allclose(small.losses, usual.losses, rtol=1e-6)


# --- what values decide ----------------------------------------------------------------------


def summarising(x, y):
    """Rows read each other's latents, unless ``x`` is one."""
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    with nf.silo_plate("row", y.shape[0]):
        b = numpyro.sample("b", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(mu * x + b - (x - 1) * b.mean(0), 1), obs=y)


def silos_of(values, *sizes):
    r = np.random.default_rng(3)
    return [{"x": values(r, j, n), "y": r.normal(size=n)} for j, n in enumerate(sizes)]


def constant(r, j, n):
    return np.ones(n)


def varying(r, j, n):
    return 2 + r.normal(size=n)


def varying_at_the_second(r, j, n):
    return (varying if j == 1 else constant)(r, j, n)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the model's log density changes")
def test_whether_padding_is_harmless_is_asked_of_each_runs_data(tmp_path):
    def run(method, values, **kwargs):
        return method.run(KEY, 3, silos_of(values, 3, 5, 7), **quiet, **kwargs)

    method = nf.SFVI(summarising, optim=optax.adam(1e-2), start=None)
    padded = run(method, constant)
    for values in (varying, varying_at_the_second):
        again = run(method, values)
        fresh = run(nf.SFVI(summarising, optim=optax.adam(1e-2), start=None), values)
        np.testing.assert_array_equal(again.losses, fresh.losses)
    np.testing.assert_array_equal(run(method, constant).losses, padded.losses)
    assert len(padded.state.silos) == 1
    padded.save(tmp_path / "fit")
    with pytest.raises(nf.SavedStateError, match="another model"):
        run(method, varying, init_state=padded.state)
    with pytest.raises(nf.SavedStateError, match="does not fit"):
        method.load(tmp_path / "fit", silos_of(varying, 3, 5, 7))


def test_whether_minibatches_are_harmless_is_asked_of_each_runs_data():
    method = nf.PVI(summarising, local=nf.local.NaturalGradient(steps=1, batch_size=2), start=None)
    laid_open(method, silos_of(constant, 4, 4))
    for values in (varying, varying_at_the_second):
        with pytest.raises(nf.GuideError, match="a minibatch is another model"):
            laid_open(method, silos_of(values, 4, 4))


def test_whether_a_model_is_conjugate_is_asked_of_each_runs_data():
    def model(x, y):
        mu = numpyro.sample("mu", dist.Normal(0, 5))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu + x * mu**2, 1), obs=y)

    method = nf.PVI(model, start=None)
    found = [
        laid_open(method, [{"x": np.full(3, x), "y": np.ones(3)}] * 2) for x in (0.0, 1.0, 0.0)
    ]
    assert [opened.factors.conjugate for opened in found] == [True, False, True]
    assert found[0].fit is found[2].fit


neighbours = models.coupled()


@pytest.mark.slow
def test_rows_that_read_each_other_are_refused_where_each_is_weighed():
    """Silos of equal size are never padded, so that padding cannot tell."""
    silos = silos_of(constant, 4, 4)
    silos = [{"y": s["y"]} for s in silos]
    refused = pytest.raises(
        nf.ModelError, match=r"silo 0, silo_plate 'row'.*ELBO.*outer silo_plate"
    )
    several = {"objective": nf.LocallyEnhanced(draws=3)}
    with refused:
        nf.SFVI(neighbours, optim=optax.sgd(1e-2), **several, start=None).run(
            KEY, 1, silos, **quiet
        )
    with refused:
        nf.PVI(neighbours, **several, start=None).run(KEY, 1, silos, **quiet)
    fit = nf.SFVI(neighbours, optim=optax.sgd(1e-2), start=None).run(KEY, 1, silos, **quiet)
    with refused:
        nf.importance_correct(KEY, fit, 10, 2)
    assert np.isfinite(nf.importance_correct(KEY, fit, 10, 1).log_evidence)


def test_whether_rows_read_each_other_is_asked_of_each_runs_data(compiled):
    def model(y, of):
        mu = numpyro.sample("mu", dist.Normal(0, 5))
        with nf.silo_plate("row", y.shape[0]):
            b = numpyro.sample("b", dist.Normal(mu, 1))
            numpyro.sample("y", dist.Normal(b[of], 1), obs=y)

    def silos(last):
        return [{"y": np.ones(4), "of": np.array([0, 1, 2, k])} for k in (3, last)]

    method = nf.SFVI(
        model, optim=optax.sgd(1e-2), objective=nf.LocallyEnhanced(draws=2), start=None
    )
    first = method.run(KEY, 1, silos(3), **quiet)
    compiled.clear()
    with pytest.raises(nf.ModelError, match="silo 1, silo_plate 'row'"):
        method.run(KEY, 1, silos(2), **quiet)
    other = [{**s, "y": 2 * s["y"]} for s in silos(3)]
    assert method.run(KEY, 1, other, **quiet).losses != first.losses
    assert compiled == []


# --- compiling once --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["simulation", "host"])
def test_a_second_run_traces_and_compiles_nothing(runtime, compiled, capfd):
    calls = []

    def model(x, device, y=None):
        calls.append(1)
        mixed(x, device, y)

    other_key = jax.random.key(1)  # to make one is a program of JAX's own
    fit = nf.SFVI(model, optim=optax.adam(1e-2), start=None)
    first = fit.run(KEY, 3, mixed_silos(), runtime=runtime, **quiet)
    assert calls
    assert compiled
    calls.clear()
    compiled.clear()
    other_numbers = [{**s, "x": 2 * s["x"]} for s in mixed_silos()]
    second = fit.run(other_key, 3, other_numbers, runtime=runtime, **quiet)
    assert (len(calls), compiled) == (0, [])
    assert not np.array_equal(first.losses, second.losses)
    fit.run(KEY, BLOCK + 1, mixed_silos(), runtime=runtime)
    fit.run(KEY, 2, mixed_silos(), runtime=runtime, init_state=first.state, **quiet)
    assert (len(calls), compiled) == (0, [])
    if runtime == "simulation":
        assert times_compiled(inside(first).runtime.advance) == 1


def test_other_shapes_are_another_program():
    a = ROBUST.run(KEY, 2, robust_silos((2, 3)), **quiet)
    b = ROBUST.run(KEY, 2, robust_silos((4, 3)), **quiet)
    c = ROBUST.run(KEY, 2, robust_silos((2, 3)), **quiet)
    assert inside(a).fit is inside(c).fit
    assert inside(a).fit is not inside(b).fit
    np.testing.assert_array_equal(a.losses, c.losses)


def equations(program):
    """The number of operations of a program, inner ones included."""
    return sum(1 + sum(map(equations, inner_programs(eqn))) for eqn in program.jaxpr.eqns)


@pytest.mark.slow
def test_the_program_does_not_grow_with_the_number_of_silos():
    def size(silos):
        opened = laid_open(nf.SFVI(mixed, optim=optax.adam(1e-2), start=None), silos)
        state = opened.first_state(KEY)
        return equations(trace_program(opened.runtime.advance, KEY, state, opened.batches, 5))

    two, many = size(mixed_silos()[:1] * 2), size(mixed_silos()[:1] * 20)
    assert two == many
    assert two > 100


# --- keys ------------------------------------------------------------------------------------


def test_no_two_silos_rounds_or_exchanges_share_a_key():
    keys = [
        k
        for round_ in range(20)
        for e in range(2)
        for mine in [exchange_key(KEY, round_, e, 2)]
        for k in [server_key(mine), *(silo_key(mine, j) for j in range(10))]
    ]
    server, silos = init_keys(KEY)
    keys += [schedule_key(KEY), server, silos, *(jax.random.fold_in(silos, j) for j in range(10))]
    bits = {tuple(np.asarray(jax.random.key_data(k)).tolist()) for k in keys}
    assert len(bits) == len(keys)


def test_keys_made_together_are_those_of_each_participant():
    server, silos = participant_keys(KEY, jnp.array([4, 0, 7]))
    each = jnp.stack([server_key(KEY), *(silo_key(KEY, j) for j in (4, 0, 7))])
    together = jnp.concatenate([server[None], silos])
    assert identical(jax.random.key_data(together), jax.random.key_data(each))


def test_the_key_of_a_round_with_one_exchange_is_fold_in_of_its_number():
    assert identical(
        jax.random.key_data(exchange_key(KEY, 7, 0, 1)),
        jax.random.key_data(jax.random.fold_in(KEY, 7)),
    )


# --- what an algorithm may ask for -----------------------------------------------------------


class Held(NamedTuple):
    total: Any
    seen: Any


def toy(combine, scatter):
    """Silos add what they are sent, what they drew and their data; the server keeps replies."""

    def init_server(key):
        return {"kept": jnp.zeros(5), "drawn": jnp.zeros(())}

    def init_silo(key, data):
        return Held(jnp.zeros(()), jnp.zeros(()))

    def silo(noise, down, state, data):
        up = data.arrays["y"].sum() + noise
        return Reply(up, jnp.array(True)), Held(state.total + up, down.sum())

    def run(state, noise, ask):
        kept, loss = state["kept"], 0.0
        for exchange in exchanges:
            up = ask(exchange.name, 10.0 * jnp.arange(5) + kept if scatter else kept).up
            kept = up if combine is Combine.GATHER else kept + up
            loss = loss + up.sum()
        return {"kept": kept, "drawn": noise}, Info(loss, jnp.array(True))

    def silo_noise(key, state):
        return jax.random.normal(key)

    settings = {"silo_noise": silo_noise, "combine": combine, "scatter": scatter}
    exchanges = tuple(Exchange(name, silo, **settings) for name in ("first", "second"))
    round = Round(exchanges, run, lambda key: jax.random.normal(key))
    return FederatedAlgorithm(init_server, init_silo, round, None, None)


TOY_DATA = np.array([[100.0, 0], [200, 0], [300, 0], [400, 0], [500, 0]])


def toy_batches(*groups):
    stacks = [SiloData({"y": TOY_DATA[list(g)].astype(np.float32)}) for g in groups]
    return on_device([Bucket(g, ({},) * len(g), s) for g, s in zip(groups, stacks, strict=True)])


def toy_run(runtime, combine, scatter, n=3):
    groups = [(j,) for j in range(5)] if runtime is plain_runtime else [(0, 3, 4), (2, 1)]
    batches = toy_batches(*groups)
    driver = runtime(toy(combine, scatter))
    run = run_rounds(driver, KEY, driver.init(KEY, batches), batches, n, False)
    order = np.argsort(np.concatenate(groups))
    silos = jax.tree.map(lambda *a: jnp.concatenate(a)[order], *run.state.silos)
    return run, silos


def toy_noise(n):
    """What each silo draws in each exchange, (2 n, 5), by the rule that is written down."""
    exchanges = [jax.random.fold_in(KEY, i) for i in range(2 * n)]
    draw = [[jax.random.normal(jax.random.fold_in(k, 1 + j)) for j in range(5)] for k in exchanges]
    return np.asarray(draw), [jax.random.normal(jax.random.fold_in(k, 0)) for k in exchanges]


@pytest.mark.parametrize("runtime", slow_but([plain_runtime, compiled_runtime], 0))
@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize("combine", [Combine.SUM, Combine.GATHER])
def test_replies_and_slices_reach_who_they_are_meant_for(runtime, combine, scatter):
    run, silos = toy_run(runtime, combine, scatter)
    noise, servers = toy_noise(3)
    replies = TOY_DATA.sum(1) + noise
    np.testing.assert_allclose(silos.total, replies.sum(0), rtol=1e-5)
    np.testing.assert_allclose(run.losses, replies.sum(1).reshape(3, 2).sum(1), rtol=1e-6)
    np.testing.assert_allclose(run.state.server["drawn"], servers[-2], rtol=1e-5)
    gather = combine is Combine.GATHER
    sums = replies.sum(1, keepdims=True).repeat(5, 1)
    np.testing.assert_allclose(
        run.state.server["kept"], replies[-1] if gather else sums.sum(0), rtol=1e-5
    )
    before = replies[-2] if gather else sums[:-1].sum(0)
    sent = 10.0 * np.arange(5) + before if scatter else np.full(5, before.sum())
    np.testing.assert_allclose(silos.seen, sent, rtol=1e-5)
    assert int(run.state.round) == 3


def counting(how, bad=None):
    """Silos reply with their number of rows as weight; one of them may be bad."""

    def silo(noise, down, state, data):
        y = data.arrays["y"]
        ok = jnp.array(True) if bad is None else y[0] != TOY_DATA[bad, 0]
        return Reply({"mean": y[0] + down, "one": jnp.ones((), int)}, ok, y[0] / 100), state

    def run(state, noise, ask):
        offset = ask.server_data["offset"]
        replies = ask("count", offset)
        report = (replies.up, replies.ok, replies.weight, offset)
        return state, Info(jnp.zeros(()), jnp.array(True), report)

    return FederatedAlgorithm(
        lambda key: jnp.zeros(()),
        lambda key, data: jnp.zeros(()),
        Round((Exchange("count", silo, combine=how, weighted=True),), run),
        None,
        None,
    )


@pytest.mark.parametrize("runtime", [compiled_runtime, plain_runtime])
@pytest.mark.parametrize("how", Combine)
def test_weights_belong_to_replies_and_the_server_may_hold_data(runtime, how):
    batches = toy_batches(
        *([(j,) for j in range(5)] if runtime is plain_runtime else [(0, 3, 4), (2, 1)])
    )
    driver = runtime(counting(how))
    held = {"offset": jnp.array(7.0)}
    run = run_rounds(driver, KEY, driver.init(KEY, batches), batches, 1, False, held)
    up, ok, weight, offset = jax.tree.map(lambda a: a[0, 0], run.log.reports)
    means, weights = TOY_DATA[:, 0] + 7, np.arange(1, 6)
    assert offset == 7
    if how is Combine.SUM:
        np.testing.assert_allclose(up["mean"], (means * weights).sum(), rtol=1e-6)
        assert (int(up["one"]), float(weight), bool(ok)) == (5, 15.0, True)
    else:
        np.testing.assert_allclose(up["mean"], means, rtol=1e-6)
        np.testing.assert_allclose(weight, weights)
        assert ok.all()
    assert jax.tree.leaves(run.state.server) == [0.0]  # what the server holds is not in its state


@pytest.mark.parametrize("runtime", [compiled_runtime, plain_runtime])
@pytest.mark.parametrize("how", Combine)
def test_a_reply_that_is_not_good_is_named_by_its_silo(runtime, how):
    batches = toy_batches(
        *([(j,) for j in range(5)] if runtime is plain_runtime else [(0, 3, 4), (2, 1)])
    )
    driver = runtime(counting(how, bad=3))
    held = {"offset": jnp.zeros(())}
    run = run_rounds(driver, KEY, driver.init(KEY, batches), batches, 2, False, held)
    assert run.failure == (0, (3,))


# --- the progress bar ------------------------------------------------------------------------


def test_the_progress_bar_shows_rounds_and_the_bound(capfd):
    result = ROBUST.run(KEY, 7, robust_silos())
    shown = capfd.readouterr().err
    assert "7/7" in shown
    bound = float(re.findall(r"bound: (-?[\d.]+)", shown)[-1])
    assert -result.losses.max() - 1e-3 <= bound <= -result.losses.min() + 1e-3


def test_without_a_progress_bar_nothing_is_shown(capfd):
    ROBUST.run(KEY, 3, robust_silos(), **quiet)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("names", [("step", "step"), ("begin", "step")])
def test_exchanges_of_a_run_have_names_of_their_own(names):
    opening, main = (Round((Exchange(name, None),), None) for name in names)
    algorithm = SimpleNamespace(opening=(opening,), round=main)
    with pytest.raises(ValueError, match=f"'{names[0]}' shares its name"):
        Built(model=None, guide=None, algorithm=algorithm)
