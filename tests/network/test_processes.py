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
from apart import Apart
from problems import counts_of, cut
from silo_process import METHODS, NAMES, VERTICAL, model, serve

import numpyro_fed as nf
from numpyro_fed.basics.errors import DataError, ModelError, ReplyError
from numpyro_fed.network.silo_runs import MAX_RUNS
from numpyro_fed.rounds.messages import ACCEPT, read, write

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
    for held in zip(silos(), columns()[0], strict=True):
        here, there = spawn.Pipe()
        processes.append(spawn.Process(target=serve, args=(*held, there), daemon=True))
        processes[-1].start()
        found.append(here)
    yield found
    for pipe, process in zip(found, processes, strict=True):
        pipe.send_bytes(b"")
        process.join(20)


class Pipes:
    """An engine to silos in processes of their own: to those with rows or to those with columns."""

    num_silos = 3
    in_process = True  # single replies, whose digits are those of one process

    def __init__(self, pipes, kind):
        self.pipes, self.kind, self.sent = pipes, kind, []

    def send(self, silo, message, timeout):
        self.sent.append(message)
        self.pipes[silo].send_bytes(self.kind + message)
        return self.pipes[silo].recv_bytes()


@pytest.mark.parametrize("name", VERTICAL)
def test_clients_in_processes_of_their_own_give_the_numbers_of_one_process(name, pipes, double):
    (xs, y), close = columns(), {"rtol": 1e-6, "atol": 1e-9}
    engine = Pipes(pipes, b"c")
    result = NAMES[name].run(KEY, 5, nf.Federation(engine, names=NAMES), y, **QUIET)
    corrected = nf.importance_correct(KEY, result, 50)
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
    accepted = next(m for m in engine.sent if read(m).head["exchange"] == ACCEPT)
    told = json.loads(json.loads(read(accepted).head["settings"])["plan"])["shared"]
    assert (name == "power") == bool(told)  # the response leaves the server where it must


@pytest.mark.parametrize("name", METHODS)
def test_silos_in_processes_of_their_own_give_the_numbers_of_one_process(name, pipes, double):
    close = {"rtol": 1e-6, "atol": 1e-9}
    there = nf.Federation(Pipes(pipes, b"r"), names=NAMES)
    result = NAMES[name].run(KEY, ROUNDS[name], there, **QUIET)
    corrected = nf.importance_correct(KEY, result, 200, 10) if name == "sfvi" else None
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


def facts_of(rows, method=None):
    return (method or from_zero()).describe(rows).to_json()


def plan_of(method):
    return method.agree([method.describe(rows) for rows in silos()])


def test_facts_reveal_no_count_and_no_value():
    """Other values of the same sizes, and other sizes of the same class, say the same."""
    r = np.random.default_rng(1)

    def facts(n):
        return facts_of({"x": r.normal(size=(n, 2)), "y": r.poisson(1.0, n)})

    assert facts(5) == facts(5) == facts(8)
    assert facts(5) != facts(9)
    assert json.loads(facts(5))["sizes"] == [["row", 8]]
    assert nf.Facts.from_json(facts(5)).to_json() == facts(5)


def test_a_plan_is_one_hashable_value_that_reads_back():
    one, again = (plan_of(METHODS["sequential"]()) for _ in range(2))
    plan = nf.Plan.from_json(one.to_json())
    assert plan == one == again
    assert hash(plan) == hash(again)
    assert plan.fingerprint == again.fingerprint
    assert plan.num_silos == 3
    assert json.loads(plan.settings)["conjugate"] is False
    assert plan_of(from_zero()).fingerprint != plan.fingerprint


def test_a_silo_with_another_text_or_other_arrays_is_refused_by_name():
    def wider(x, y):
        beta = numpyro.sample("beta", dist.Normal(0, 20).expand([2]).to_event(1))
        numpyro.sample("log_tau", dist.Normal(0, 1))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("b", dist.Normal(0, 1))
            numpyro.sample("y", dist.Poisson(np.e ** (x @ beta)), obs=y)

    third = silos()[2]
    other = nf.SFVI(wider, optim=optax.adam(1e-2)).describe(third)
    good = [from_zero().describe(rows) for rows in silos()[:2]]
    with pytest.raises(ModelError, match=r"silo 2 .*'beta'"):
        from_zero().agree([*good, other])
    whole = {**third, "y": third["y"].astype(float)}
    with pytest.raises(ModelError, match=r"silo 2 does not fit.*arrays \(name, dtype"):
        Apart(from_zero(), [*silos()[:2], whole]).run(KEY, 1)


def test_a_message_of_another_kind_is_refused():
    def double_precision(j, message, answer):
        head, arrays = read(message)
        doubled = {k: a.astype(float) if a.dtype.kind == "f" else a for k, a in arrays.items()}
        return answer(write(doubled, head))

    there = Apart(from_zero(), silos(), double_precision)
    with pytest.raises(ModelError, match=r"float64.* 'down.*float32"):
        there.run(KEY, 1)
    asked = {"exchange": "sfvi", "settings": "{}", "run": "", "number": "1", "used": "0"}
    refused = read(there.silos[0].answer(write({}, asked | {"method": "another"}))).head
    assert "has not described its data" in refused["words"]


def test_a_message_that_cannot_be_read_is_refused_on_both_sides():
    messages = []

    def noted(silo, message, answer):
        messages.append(message)
        return answer(message)

    there = Apart(from_zero(), silos()[:2], noted)
    there.run(KEY, 1)

    def refused(message):
        return read(there.silos[0].answer(message)).head["words"]

    damaged = [b"", b"no arrays", write({"a": np.zeros(50)})[:80]]
    for message in damaged:
        assert "format of safetensors" in refused(message)
    assert "names exchange" in refused(write({"a": np.zeros(50)}))
    head, arrays = read(next(m for m in messages if read(m).head["method"].endswith(".0")))
    last = next(m for m in reversed(messages) if read(m).head["method"] == head["method"])
    head, arrays = read(last)
    later = {"number": str(int(head["number"]) + 1), "settings": "{}"}
    assert "no exchange 'sfvi'" in refused(write(arrays, head | later))

    for bad in (*damaged[:2], None):

        def reply_damaged(silo, message, answer, bad=bad):
            reply = answer(message)
            if not read(reply).arrays:  # a run has begun
                return reply
            return reply[:80] if bad is None else bad

        there.on_the_way = reply_damaged
        with pytest.raises(ReplyError, match=r"silo 0.*format of safetensors"):
            there.run(KEY, 1)


def test_silos_keep_the_states_of_the_last_runs():
    """Another run does not go on from them, and a correction of the first one still uses them."""
    there = Apart(from_zero(), silos()[:2])
    first = there.run(KEY, 4)
    once = nf.importance_correct(jax.random.key(1), first, 50, 4)
    again = nf.importance_correct(jax.random.key(2), first, 50, 4)
    assert once.log_evidence != again.log_evidence
    second = there.run(KEY, 4)
    np.testing.assert_array_equal(second.losses, first.losses)
    late = nf.importance_correct(jax.random.key(1), first, 50, 4)
    assert late.log_evidence == once.log_evidence
    for _ in range(MAX_RUNS):
        there.run(KEY, 1)
    with pytest.raises(ModelError, match=r"silo 0 has no state of this run"):
        nf.importance_correct(KEY, first, 50, 4)


def test_a_silo_with_a_secret_draws_what_the_server_cannot_know():
    plain = Apart(from_zero(), silos()[:2])
    hidden = Apart(from_zero(), silos()[:2], secret=jax.random.key(7))
    losses = [there.run(KEY, 4).losses for there in (plain, hidden, hidden)]
    assert not np.allclose(losses[0], losses[1], rtol=1e-6)
    np.testing.assert_array_equal(losses[1], losses[2])


coupled = models.coupled()


def test_rows_that_read_each_other_are_refused_at_their_silo():
    rows = cut({"y": np.arange(8.0)}, (4, 4))
    enhanced = nf.SFVI(coupled, optim=optax.sgd(1e-2), objective=nf.LocallyEnhanced(draws=3))
    there = Apart(enhanced, rows)
    with pytest.raises(ModelError, match=r"this silo, silo_plate 'row'"):
        there.run(KEY, 1)
    there = Apart(nf.SFVI(coupled), rows)
    with pytest.raises(ModelError, match=r"silo 0.* Use start=None"):
        there.run(KEY, 1)
    there = Apart(nf.SFVI(coupled, optim=optax.sgd(1e-2), start=None), rows)
    result = there.run(KEY, 1)
    with pytest.raises(ModelError, match=r"this silo, silo_plate 'row'"):
        nf.importance_correct(KEY, result, 10, 2)
    assert np.isfinite(nf.importance_correct(KEY, result, 10, 1).log_evidence)
