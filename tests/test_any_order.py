"""Silos and ledgers under messages, crashes and new starts in any order.

Hypothesis draws the order. What is held against it: every message has the reply of a silo to which
nothing happened, and what was answered never costs more than the policy allows.
"""

import shutil
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import numpyro_fed as nf
from numpyro_fed.basics.errors import ModelError
from numpyro_fed.basics.files import Store
from numpyro_fed.network import InMemory
from numpyro_fed.network.ledger import Ledger
from numpyro_fed.privacy.budget import epsilon_of
from numpyro_fed.rounds.messages import read, write

EXAMPLES = [4, pytest.param(150, marks=pytest.mark.slow)]
ORDER = ("own modes", "mode", "importance")
PLACES, DRAWS, ROUNDS = 9, 1_000, 6


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


class LedgerInAnyOrder(RuleBasedStateMachine):
    """A ledger beside a plain count of what was answered."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.mkdtemp()
        self.policy = nf.Policy(
            max_places=PLACES, max_draws=DRAWS, exchanges=ORDER, in_order=True, max_epsilon=1.0
        )
        self.spent, self.stage, self.noise = {"places": 0, "draws": 0}, 0, {}
        self.start()

    def teardown(self):
        shutil.rmtree(self.folder)

    @rule()
    def start(self):
        self.ledger = Ledger(self.policy, Store(self.folder))

    @rule(
        stage=st.integers(0, len(ORDER) - 1),
        what=st.sampled_from(["places", "draws"]),
        number=st.integers(0, 400),
        end=st.sampled_from(["answer", "refuse", "kill"]),
    )
    def ask(self, stage, what, number, end):
        limit = {"places": PLACES, "draws": DRAWS}[what]
        allowed = stage >= self.stage and 0 < number <= limit - self.spent[what]
        try:
            with self.ledger.spending_evaluations(ORDER[stage], {what: number}):
                assert allowed
                counted = Ledger(self.policy, Store(self.folder)).kept
                if end == "refuse":
                    raise ModelError("what the message asks for cannot be had")
        except ModelError:
            if allowed:
                assert end == "refuse"
            return
        # A process that was killed has counted before it computed.
        self.spent[what], self.stage = self.spent[what] + number, stage
        if end == "kill":
            self.start()
            assert self.ledger.kept == counted

    @rule(
        multiplier=st.sampled_from([6.0, 10.0, 40.0]),
        protects=st.sampled_from(["row add", "person add"]),
        delta=st.sampled_from([1e-7, 1e-3]),
    )
    def spend(self, multiplier, protects, delta):
        after = self.noise | {protects: self.noise.get(protects, 0.0) + multiplier**-2}
        # Of what protects different things each counts as one with half of its noise.
        total = sum(after.values()) * (4 if len(after) > 1 else 1)
        epsilon = epsilon_of((total**-0.5,), self.policy.max_delta)
        allowed = delta <= self.policy.max_delta and epsilon <= 1.0
        with suppress(ModelError), self.ledger.spending_privacy(multiplier, delta, protects):
            assert allowed
            self.noise = after
            return
        assert not allowed

    @invariant()
    def nothing_is_forgotten(self):
        kept = self.ledger.kept
        assert {name: kept[name] for name in self.spent} == self.spent
        assert kept["noise"] == self.noise
        assert min(self.ledger.left.values()) >= -1e-9


@pytest.mark.parametrize("examples", EXAMPLES)
def test_a_ledger_never_allows_more_than_its_policy(examples):
    run_as_test(LedgerInAnyOrder, examples)


def normal(y):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with nf.silo_plate("row", len(y)):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


DATA = {"y": np.array([1.0, 2.0, 4.0, 3.0])}
NAMES = {"normal": normal}


def silo_of(folder=None, **rules):
    policy = nf.Policy(min_rows=1, min_silos=1, parameters_per_row=9, **rules)
    return nf.Silo(DATA, names=NAMES, policy=policy, state=folder)


@cache
def one_run():
    """Return the messages of a run to its only silo, by number, and those before it."""
    messages = []

    class Listening(InMemory):
        def send(self, j, message, timeout):
            messages.append(message)
            return super().send(j, message, timeout)

    there = nf.Federation(Listening([silo_of().answer]), names=NAMES)
    nf.SFVI(normal, start=None).run(jax.random.key(0), ROUNDS, there, progress_bar=False)
    before = [m for m in messages if not read(m).head["run"]]
    return before, [m for m in messages if read(m).head["run"]]


@cache
def replies():
    """Return a silo's replies to the messages of the run, one after the other."""
    silo, (before, run) = silo_of(), one_run()
    return [silo.answer(message) for message in (*before, *run)][len(before) :]


class SiloInAnyOrder(RuleBasedStateMachine):
    """A silo with a folder beside one to which nothing happens."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp()) / "state"
        self.at, self.computed, self.puts_left = {}, set(), None
        machine, put = self, Store.put

        class Mortal(Store):
            def put(self, contents):
                if machine.puts_left is not None:
                    if machine.puts_left == 0:
                        raise Killed
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
        self.silo = silo_of(self.folder, max_places=PLACES)
        for message in one_run()[0]:
            assert "error" not in read(self.silo.answer(message)).head

    def answer(self, run, k):
        """Return the reply to the ``k``-th message of a run; None for a refusal."""
        head, arrays = read(one_run()[1][k])
        reply = self.silo.answer(write(arrays, head | {"run": run}))
        return None if "error" in read(reply).head else reply

    @property
    def places(self):
        return Ledger(nf.Policy(), Store(self.folder)).kept["places"]

    runs = st.sampled_from(["aa" * 16, "bb" * 16, "cc" * 16])

    @rule(run=runs, puts=st.sampled_from([None, None, 0, 1, 2]))
    def go_on(self, run, puts):
        """Send the next message of a run; the process may be killed before one of its writes."""
        k = self.at.get(run, -1) + 1
        if k == len(one_run()[1]):
            return
        before, self.puts_left = self.places, puts
        try:
            reply = self.answer(run, k)
        except Killed:
            self.puts_left = None
            self.start()
            reply = self.answer(run, k)
        self.puts_left = None
        if reply is None:
            # The budget is spent; nothing but that is refused, and a first message costs nothing.
            assert k > 0
            assert before <= self.places == PLACES
            return
        assert reply == replies()[k]
        self.at[run] = k
        if k:
            self.computed.add((run, k))

    @precondition(lambda self: self.at)
    @rule(data=st.data())
    def double(self, data):
        """Send the last message of a run again, which has the same reply and costs nothing."""
        run, before = data.draw(st.sampled_from(sorted(self.at))), self.places
        assert self.answer(run, self.at[run]) == replies()[self.at[run]]
        assert self.places == before

    @precondition(lambda self: any(self.at.values()))
    @rule(data=st.data())
    def replay(self, data):
        """Send an earlier message of a run again, or one far ahead: it is refused."""
        run = data.draw(st.sampled_from(sorted(r for r, k in self.at.items() if k)))
        others = set(range(len(one_run()[1]))) - {self.at[run], self.at[run] + 1}
        before = self.places
        assert self.answer(run, data.draw(st.sampled_from(sorted(others)))) is None
        assert self.places == before

    @invariant()
    def the_budget_is_kept(self):
        assert len(self.computed) <= self.places <= PLACES


@pytest.mark.parametrize("examples", EXAMPLES)
def test_a_silo_answers_once_and_the_same_whatever_happens(examples):
    run_as_test(SiloInAnyOrder, examples)
