"""Server and silos as processes of their own, with nothing but bytes between them."""

import json
import multiprocessing

import jax
import models
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from problems import counts_of, cut
from silo_process import METHODS, VERTICAL, columns_model, model, serve

import numpyro_fed as nf
from numpyro_fed.errors import DataError, ModelError, ReplyError
from numpyro_fed.runtime.kept import MAX_RUNS
from numpyro_fed.runtime.messages import ACCEPT, read, write

KEY = jax.random.key(0)
SIZES = (7, 5, 12)
QUIET = {"progress_bar": False}
ROUNDS = {
    "sfvi": 30,
    "amortised": 20,
    "averaged": 3,
    "barycenter": 3,
    "sequential": 2,
    "synchronous": 2,
}
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning")]


def silos():
    return counts_of(SIZES)


def columns():
    """Of ten rows at three clients, and the response."""
    r = np.random.default_rng(1)
    return [r.normal(size=(10, p)) for p in (2, 1, 2)], r.poisson(1.5, 10)


@pytest.fixture(scope="module")
def pipes():
    """To three silos in spawned processes, each given its own rows and nothing else."""
    spawn = multiprocessing.get_context("spawn")
    found, processes = [], []
    for number, held in enumerate(zip(silos(), columns()[0], strict=True)):
        here, there = spawn.Pipe()
        processes.append(spawn.Process(target=serve, args=(*held, number, there), daemon=True))
        processes[-1].start()
        found.append(here)
    yield found
    for pipe, process in zip(found, processes, strict=True):
        pipe.send_bytes(b"")
        process.join(20)


class Federation:
    """A server, and silos in processes of their own."""

    def __init__(self, name, pipes):
        self.pipes = pipes
        for pipe in pipes:
            pipe.send_bytes(name.encode())
        self.facts = [pipe.recv_bytes().decode() for pipe in pipes]
        self.server = nf.ServerNode(METHODS[name](), self.facts)
        for pipe in self.pipes:
            pipe.send_bytes(self.server.plan.encode())

    def send(self, silo, message):
        self.pipes[silo].send_bytes(message)
        return self.pipes[silo].recv_bytes()

    def close(self):
        for pipe in self.pipes:
            pipe.send_bytes(b"")


class Pipes:
    """An engine to silos at the other ends of pipes."""

    def __init__(self, name, pipes):
        self.pipes, self.num_silos, self.sent = pipes, len(pipes), []
        for pipe in pipes:
            pipe.send_bytes(name.encode())

    def send(self, silo, message, timeout):
        self.sent.append(message)
        self.pipes[silo].send_bytes(message)
        return self.pipes[silo].recv_bytes()

    def plan(self):
        (settings, *_) = (h["settings"] for h, _ in map(read, self.sent) if h["exchange"] == ACCEPT)
        return json.loads(json.loads(settings)["plan"])


@pytest.mark.parametrize("name", VERTICAL)
def test_clients_in_processes_of_their_own_give_the_numbers_of_one_process(name, pipes, double):
    (xs, y), close = columns(), {"rtol": 1e-6, "atol": 1e-9}
    engine, names = Pipes(name, pipes), {"columns_model": columns_model}
    try:
        result = VERTICAL[name]().run(KEY, 5, nf.Federation(engine, names=names), y, **QUIET)
        corrected = nf.importance_correct(KEY, result, 50)
    finally:
        for pipe in pipes:
            pipe.send_bytes(b"")
    together = VERTICAL[name]().run(KEY, 5, xs, y, **QUIET)
    np.testing.assert_allclose(result.losses, together.losses, **close)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, **close), result.params, together.params
    )
    expected = nf.importance_correct(KEY, together, 50)
    np.testing.assert_allclose(corrected.weights, expected.weights, rtol=1e-6, atol=1e-12)
    assert set(result.sample_posterior(KEY, 5)) == {"b"}
    assert set(corrected.sample_posterior(KEY, 5)) == {"b"}
    with pytest.raises(DataError, match=r"clients .*own"):
        result.client_params(0)
    assert (name == "power") == bool(
        engine.plan()["shared"]
    )  # the response leaves the server where it must


@pytest.mark.parametrize("name", METHODS)
def test_silos_in_processes_of_their_own_give_the_numbers_of_one_process(name, pipes, double):
    apart, close = Federation(name, pipes), {"rtol": 1e-6, "atol": 1e-9}
    try:
        result = apart.server.run(KEY, ROUNDS[name], apart.send)
        corrected = nf.importance_correct(KEY, result, 200, 10) if name == "sfvi" else None
    finally:
        apart.close()
    together = METHODS[name]().run(KEY, ROUNDS[name], silos(), **QUIET)
    np.testing.assert_allclose(result.losses, together.losses, **close)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, **close), result.params, together.params
    )
    if corrected is not None:
        expected = nf.importance_correct(KEY, together, 200, 10)
        np.testing.assert_allclose(corrected.log_evidence, expected.log_evidence, rtol=1e-6)
        np.testing.assert_allclose(corrected.weights, expected.weights, rtol=1e-6, atol=1e-12)
    assert result.sample_posterior(KEY, 5)["beta"].shape == (5, 2)
    with pytest.raises(DataError, match=r"silo 1 .*own"):
        result.sample_posterior(KEY, 5, silo=1)


def from_zero():
    """A method without a search for the mode."""
    return nf.SFVI(model, optim=optax.adam(1e-2), num_particles=2, start=None)


def node(rows, method=None):
    return nf.SiloNode(method or from_zero(), rows)


def test_facts_reveal_no_count_and_no_value():
    """Other values of the same sizes, and other sizes of the same class, say the same."""
    r = np.random.default_rng(1)

    def facts(n):
        return node({"x": r.normal(size=(n, 2)), "y": r.poisson(1.0, n)}).facts()

    assert facts(5) == facts(5) == facts(8)
    assert facts(5) != facts(9)
    assert json.loads(facts(5))["sizes"] == [["row", 8]]
    assert nf.Facts.from_json(facts(5)).to_json() == facts(5)


def test_a_plan_is_one_hashable_value_that_reads_back():
    facts = [node(rows).facts() for rows in silos()]
    one, again = (nf.ServerNode(METHODS["sequential"](), _of("sequential")) for _ in range(2))
    plan = nf.Plan.from_json(one.plan)
    assert plan == nf.Plan.from_json(again.plan)
    assert hash(plan) == hash(nf.Plan.from_json(again.plan))
    assert plan.fingerprint == nf.Plan.from_json(again.plan).fingerprint
    assert plan.num_silos == len(facts) == 3
    assert json.loads(plan.settings)["conjugate"] is False
    other = nf.Plan.from_json(nf.ServerNode(from_zero(), facts).plan)
    assert other.fingerprint != plan.fingerprint


def _of(name):
    return [node(rows, METHODS[name]()).facts() for rows in silos()]


def test_a_silo_with_another_text_or_other_arrays_is_refused_by_name():
    def wider(x, y):
        beta = numpyro.sample("beta", dist.Normal(0, 20).expand([2]).to_event(1))
        numpyro.sample("log_tau", dist.Normal(0, 1))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("b", dist.Normal(0, 1))
            numpyro.sample("y", dist.Poisson(np.e ** (x @ beta)), obs=y)

    first, second, third = silos()
    good = [node(first).facts(), node(second).facts()]
    other = nf.SFVI(wider, optim=optax.adam(1e-2))
    with pytest.raises(ModelError, match=r"silo 2 .*'beta'"):
        nf.ServerNode(from_zero(), [*good, node(third, other).facts()])
    whole = {**third, "y": third["y"].astype(float)}
    with pytest.raises(ModelError, match=r"silo 2 does not fit.*arrays \(name, dtype"):
        nf.ServerNode(from_zero(), [*good, node(whole).facts()])


def test_a_message_of_another_kind_is_refused():
    nodes = [node(rows) for rows in silos()]
    server = nf.ServerNode(from_zero(), [n.facts() for n in nodes])
    with pytest.raises(ModelError, match="has not accepted a plan"):
        nodes[0].handle(b"")
    for j, n in enumerate(nodes):
        n.accept(server.plan, j)

    def double_precision(j, message):
        head, arrays = read(message)
        doubled = {k: a.astype(float) if a.dtype.kind == "f" else a for k, a in arrays.items()}
        return nodes[j].handle(write(doubled, head))

    with pytest.raises(DataError, match=r"float64.* 'down.*float32"):
        server.run(KEY, 1, double_precision)


def test_a_message_that_cannot_be_read_is_refused_on_both_sides():
    server, send = together(from_zero(), silos()[:2])
    messages = []

    def noted(silo, message):
        messages.append(message)
        return send(silo, message)

    server.run(KEY, 1, noted)
    damaged = [b"", b"no arrays", write({"a": np.zeros(50)})[:80]]
    for message in damaged:
        with pytest.raises(DataError, match="format of safetensors"):
            send(0, message)
    with pytest.raises(DataError, match="names exchange"):
        send(0, write({"a": np.zeros(50)}))
    head, arrays = read(messages[-1])
    later = {"number": str(int(head["number"]) + 1), "settings": "{}"}
    with pytest.raises(ModelError, match="no exchange 'sfvi'"):
        send(0, write(arrays, head | later))

    for bad in (*damaged[:2], None):

        def reply_damaged(silo, message, bad=bad):
            reply = send(silo, message)
            if not read(reply).arrays:  # a run has begun
                return reply
            return reply[:80] if bad is None else bad

        with pytest.raises(ReplyError, match=r"silo 0.*format of safetensors"):
            server.run(KEY, 1, reply_damaged)


def together(method, rows, **options):
    """Server and silos in this process, with bytes between them."""
    nodes = [nf.SiloNode(method, r, **options) for r in rows]
    server = nf.ServerNode(method, [n.facts() for n in nodes])
    for j, n in enumerate(nodes):
        n.accept(server.plan, j)
    return server, lambda j, message: nodes[j].handle(message)


def test_silos_keep_the_states_of_the_last_runs():
    """Another run does not go on from them, and a correction of the first one still uses them."""
    server, send = together(from_zero(), silos()[:2])
    first = server.run(KEY, 4, send)
    once = nf.importance_correct(jax.random.key(1), first, 50, 4)
    again = nf.importance_correct(jax.random.key(2), first, 50, 4)
    assert once.log_evidence != again.log_evidence
    second = server.run(KEY, 4, send)
    np.testing.assert_array_equal(second.losses, first.losses)
    late = nf.importance_correct(jax.random.key(1), first, 50, 4)
    assert late.log_evidence == once.log_evidence
    for _ in range(MAX_RUNS):
        server.run(KEY, 1, send)
    with pytest.raises(ModelError, match=r"silo 0 has no state of this run"):
        nf.importance_correct(KEY, first, 50, 4)


def test_a_silo_with_a_secret_draws_what_the_server_cannot_know():
    plain, send = together(from_zero(), silos()[:2])
    hidden, ask = together(from_zero(), silos()[:2], secret=jax.random.key(7))
    losses = [s.run(KEY, 4, f).losses for s, f in ((plain, send), (hidden, ask), (hidden, ask))]
    assert not np.allclose(losses[0], losses[1], rtol=1e-6)
    np.testing.assert_array_equal(losses[1], losses[2])


coupled = models.coupled()


def test_rows_that_read_each_other_are_refused_at_their_silo():
    rows = cut({"y": np.arange(8.0)}, (4, 4))
    enhanced = nf.SFVI(coupled, optim=optax.sgd(1e-2), objective=nf.LocallyEnhanced(draws=3))
    server, send = together(enhanced, rows)
    with pytest.raises(ModelError, match=r"silo 0, silo_plate 'row'"):
        server.run(KEY, 1, send)
    server, send = together(nf.SFVI(coupled), rows)
    with pytest.raises(ModelError, match=r"silo 0.* Use start=None"):
        server.run(KEY, 1, send)
    server, send = together(nf.SFVI(coupled, optim=optax.sgd(1e-2), start=None), rows)
    result = server.run(KEY, 1, send)
    with pytest.raises(ModelError, match=r"silo 0, silo_plate 'row'"):
        nf.importance_correct(KEY, result, 10, 2)
    assert np.isfinite(nf.importance_correct(KEY, result, 10, 1).log_evidence)
