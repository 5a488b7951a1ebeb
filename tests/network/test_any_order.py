"""Silos and ledgers under messages, crashes and new starts in any order.

Hypothesis draws the order. What is held against it: every message has the reply of a silo to which
nothing happened, and what was answered never costs more than the policy allows.
"""

import shutil
import tempfile
from functools import cache
from hashlib import sha256
from pathlib import Path

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from cases import slow_but
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from scipy.stats import norm

import numpyro_fed as nf
from numpyro_fed.basics.errors import ModelError
from numpyro_fed.basics.files import Store
from numpyro_fed.network import InMemory
from numpyro_fed.network.ledger import Ledger
from numpyro_fed.rounds.messages import read, write

ORDER = ("own modes", "mode", "importance")
PLACES, DRAWS, ROUNDS = 9, 1_000, 6
ENDS = st.sampled_from(["answer", "refuse", "kill"])


class Killed(BaseException):
    """The end of a process: nothing that it would still do is done."""


def run_as_test(machine, examples):
    """Run a machine on so many random orders of its rules, always the same ones."""
    many = settings(
        max_examples=examples,
        stateful_step_count=25,
        deadline=None,
        derandomize=True,
        database=None,
    )
    run_state_machine_as_test(machine, settings=many)


def delta_of(epsilon, mu):
    """Return the least delta of a Gaussian release of sensitivity ``mu`` (Balle and Wang 2018)."""
    first, second = norm.cdf(mu / 2 - epsilon / mu), norm.cdf(-mu / 2 - epsilon / mu)
    return first - np.exp(epsilon) * second


class LedgerInAnyOrder(RuleBasedStateMachine):
    """A ledger beside a plain count of what was answered."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.mkdtemp()
        self.policy = nf.Policy(
            max_places=PLACES, max_draws=DRAWS, exchanges=ORDER, in_order=True, max_epsilon=1.0
        )
        self.spent, self.stage, self.noise = {"places": 0, "draws": 0}, 0, {}

    @initialize()
    def begin(self):
        self.start()

    def teardown(self):
        shutil.rmtree(self.folder)

    @rule()
    def start(self):
        self.ledger = Ledger(self.policy, Store(self.folder))

    def is_counted(self, spending, allowed, end):
        """Answer a message, which may be refused or end the process; return whether it counts."""
        try:
            with spending:
                assert allowed
                counted = Ledger(self.policy, Store(self.folder)).kept
                if end == "refuse":
                    raise ModelError("what the message asks for cannot be had")
        except ModelError:
            assert not allowed or end == "refuse"
            return False
        if end == "kill":  # it has counted before it computed
            self.start()
            assert self.ledger.kept == counted
        return True

    @rule(
        stage=st.integers(0, len(ORDER) - 1),
        asked=st.one_of(
            st.tuples(st.just("places"), st.integers(0, PLACES)),
            st.tuples(st.just("draws"), st.integers(0, DRAWS)),
        ),
        end=ENDS,
    )
    def ask(self, stage, asked, end):
        (what, number), limit = asked, {"places": PLACES, "draws": DRAWS}[asked[0]]
        allowed = stage >= self.stage and 0 < number <= limit - self.spent[what]
        spending = self.ledger.spending_evaluations(ORDER[stage], {what: number})
        if self.is_counted(spending, allowed, end):
            self.spent[what], self.stage = self.spent[what] + number, stage

    @rule(
        multiplier=st.sampled_from([6.0, 10.0, 40.0]),
        protects=st.sampled_from(["row add", "person add"]),
        delta=st.sampled_from([1e-7, 1e-3]),
        end=ENDS,
    )
    def spend(self, multiplier, protects, delta, end):
        after = self.noise | {protects: self.noise.get(protects, 0.0) + multiplier**-2}
        # Of what protects different things each counts as one with half of its noise.
        total = sum(after.values()) * (4 if len(after) > 1 else 1)
        rules = self.policy.delta(0)
        allowed = delta <= rules and delta_of(self.policy.max_epsilon, total**0.5) <= rules
        spending = self.ledger.spending_privacy(multiplier, delta, protects)
        if self.is_counted(spending, allowed, end):
            self.noise = after

    @invariant()
    def nothing_is_forgotten(self):
        kept = self.ledger.kept
        assert {name: kept[name] for name in self.spent} == self.spent
        assert kept["noise"] == self.noise
        assert min(self.ledger.left.values()) >= -1e-9
        if not self.noise:
            assert self.ledger.left["epsilon"] == self.policy.max_epsilon


@pytest.mark.parametrize("examples", slow_but([10, 300], 0))
def test_a_ledger_never_allows_more_than_its_policy(examples):
    run_as_test(LedgerInAnyOrder, examples)


def hierarchy(y):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with nf.silo_plate("row", len(y)):
        b = numpyro.sample("b", dist.Normal(mu, 1))
        numpyro.sample("y", dist.Normal(b, 1), obs=y)


DATA = {"y": np.array([1.0, 2.0, 4.0, 3.0])}
NAMES = {"hierarchy": hierarchy}


def silo_of(folder=None, **rules):
    policy = nf.Policy(min_rows=1, min_silos=1, parameters_per_row=9, **rules)
    return nf.Silo(DATA, names=NAMES, policy=policy, state=folder)


@cache
def messages():
    """Return what is agreed before a run, how a run begins, and its further messages."""
    sent = []

    class Listening(InMemory):
        def send(self, j, message, timeout):
            sent.append(message)
            return super().send(j, message, timeout)

    there = nf.Federation(Listening([silo_of().answer]), names=NAMES)
    method = nf.SFVI(hierarchy, start=None)
    method.run(jax.random.key(0), ROUNDS, there, progress_bar=False)
    before = [m for m in sent if not read(m).head["run"]]
    return before, [m for m in sent if read(m).head["run"]]


def message(run, k, number=0, used=0):
    """Return the ``k``-th message of a run, as one of another run, number and state."""
    head, arrays = read(messages()[1][k])
    return write(arrays, head | {"run": run, "number": str(number), "used": str(used)})


def answer(silo, sent):
    """Return a silo's reply; None for a refusal."""
    reply = silo.answer(sent)
    return None if "error" in read(reply).head else reply


@cache
def undisturbed():
    silo = silo_of()
    for sent in messages()[0]:
        assert answer(silo, sent) is not None
    return silo


@cache
def expected(path):
    """Return the last reply of a silo that is sent these messages, and nothing else."""
    run = sha256(repr(path).encode()).hexdigest()[:32]
    for number, k in enumerate(path):
        reply = answer(undisturbed(), message(run, k, number, max(number - 1, 0)))
    return reply


class SiloInAnyOrder(RuleBasedStateMachine):
    """A silo with a folder beside one to which nothing happens."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp()) / "state"
        # Of each run what was sent, and by the numbers of messages the paths to the silo's states.
        self.sent, self.paths, self.answered, self.puts_left = {}, {}, 0, None
        undisturbed()  # whose store is none of this machine's

    @initialize()
    def begin(self):
        machine, put = self, Store.put

        class Mortal(Store):
            def put(self, contents):
                if machine.puts_left == 0:
                    raise Killed
                if machine.puts_left is not None:
                    machine.puts_left -= 1
                put(self, contents)

        self.patch = pytest.MonkeyPatch()
        self.patch.setattr("numpyro_fed.network.silo.Store", Mortal)
        self.start()

    def teardown(self):
        self.patch.undo()
        shutil.rmtree(self.folder.parent)

    @rule()
    def start(self):
        self.puts_left = None
        self.silo = silo_of(self.folder, max_places=PLACES)
        for sent in messages()[0]:
            assert answer(self.silo, sent) is not None

    @property
    def places(self):
        return Ledger(nf.Policy(), Store(self.folder)).kept["places"]

    @rule(
        run=st.sampled_from(["aa" * 16, "bb" * 16]),
        last_is_used=st.sampled_from([True, True, False]),
        puts=st.sampled_from([None, None, 0, 1, "all"]),
    )
    def go_on(self, run, last_is_used, puts):
        """Send another message of a run; the process may be killed before or after its writes."""
        before, number = self.places, len(self.sent.setdefault(run, []))
        states = self.paths.get(run, {0: ()})
        used = max(states) if last_is_used else min(states)
        k = 1 + number % ROUNDS if number else 0
        sent = message(run, k, number, used)
        self.puts_left = None if puts == "all" else puts
        try:
            reply = answer(self.silo, sent)
            if puts == "all":
                raise Killed
        except Killed:  # the reply is lost: the server sends the message again
            self.start()
            reply = answer(self.silo, sent)
        self.puts_left = None
        if reply is None:
            # The budget is spent, of which a first message needs nothing.
            assert k > 0
            assert before <= self.places == PLACES
            return
        # What was computed and not kept is computed, and counted, once more.
        costs = [k > 0, 2 * (k > 0)] if puts == 1 else [k > 0]
        assert self.places - before in costs
        path = (*states[used], k)
        assert reply == expected(path)
        self.sent[run].append(sent)
        self.paths[run] = {number: path} if not number else {used: states[used], number: path}
        self.answered += k > 0

    @precondition(lambda self: self.paths)
    @rule(data=st.data())
    def double(self, data):
        """Send the last message of a run again, which has the same reply and costs nothing."""
        run, before = data.draw(st.sampled_from(sorted(self.paths))), self.places
        assert answer(self.silo, self.sent[run][-1]) == expected(
            self.paths[run][max(self.paths[run])]
        )
        assert self.places == before

    @precondition(lambda self: any(len(sent) > 1 for sent in self.sent.values()))
    @rule(data=st.data())
    def replay(self, data):
        """Send an earlier message again, or one that goes on from a state that is not kept."""
        run = data.draw(
            st.sampled_from(sorted(r for r, sent in self.sent.items() if len(sent) > 1))
        )
        number, before = len(self.sent[run]), self.places
        others = sorted({*range(number + 2)} - set(self.paths[run]))
        unknown = message(run, 1, number, data.draw(st.sampled_from(others)))
        earlier = data.draw(st.sampled_from(self.sent[run][:-1]))
        assert answer(self.silo, earlier) is None
        assert answer(self.silo, unknown) is None
        assert self.places == before

    @invariant()
    def the_budget_is_kept(self):
        assert self.answered <= self.places <= PLACES


@pytest.mark.parametrize("examples", slow_but([2, 25], 0))
def test_a_silo_answers_once_and_the_same_whatever_happens(examples):
    run_as_test(SiloInAnyOrder, examples)


def test_an_exchange_is_checked_before_it_is_answered(monkeypatch):
    def refuse(method, built, asked, number, data):
        raise ModelError("rows of this silo read each other")

    silo, run = silo_of(), "dd" * 16
    for sent in (*messages()[0], message(run, 0)):
        assert answer(silo, sent) is not None
    monkeypatch.setattr(nf.SFVI, "check_exchange", refuse)
    assert answer(silo, message(run, 1, 1)) is None
    monkeypatch.undo()
    assert answer(silo, message(run, 1, 1)) is not None
