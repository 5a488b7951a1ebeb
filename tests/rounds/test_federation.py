"""Silos in the place of their data: the same numbers, whatever happens to the messages."""

import json
import re
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from cases import slow_but
from problems import counts_of, cut

import numpyro_fed as nf
from numpyro_fed.basics.errors import (
    ConvergenceWarning,
    ModelError,
    ReplyError,
    SavedStateError,
    SiloAwayError,
)
from numpyro_fed.network import InMemory
from numpyro_fed.network import silo as silo_module
from numpyro_fed.network.ledger import evaluations
from numpyro_fed.network.study_files import load_file, names_of
from numpyro_fed.rounds.messages import Question, read, write

KEY = jax.random.key(0)
QUIET = {"progress_bar": False}
SIZES = (16, 16, 12)  # two alike: their programs are compiled once for a cache on the disk
FREE = nf.Policy(min_rows=1, parameters_per_row=10.0)


def model(x, y=None):
    beta = numpyro.sample("beta", dist.Normal(0, 2).expand([2]).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    with nf.silo_plate("row", len(x)):
        b = numpyro.sample("b", dist.Normal(0, tau))
        numpyro.sample("y", dist.Poisson(jnp.exp(x @ beta + b)), obs=y)


def plain(y):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    sigma = numpyro.sample("sigma", dist.HalfNormal(5))
    with nf.silo_plate("row", len(y)):
        numpyro.sample("y", dist.Normal(mu, sigma), obs=y)


def numbers():
    return cut({"y": np.random.default_rng(1).normal(3, 2, sum(SIZES))}, SIZES)


named = nf.SFVI(plain, start=None, num_particles=3)
NAMES = {"model": model, "plain": plain, "named": named}


def silos_of(data, folder=None, **options):
    options = {"policy": FREE, "names": NAMES} | options
    states = [None if folder is None else folder / f"silo-{j}" for j in range(len(data))]
    return [nf.Silo(d, state=s, **options) for d, s in zip(data, states, strict=True)]


def federation_of(silos, **options):
    return nf.Federation(InMemory([silo.answer for silo in silos]), names=NAMES, **options)


METHODS = {
    "sfvi": (nf.SFVI(plain), 12),
    "averaged": (nf.SFVIAvg(plain, local_steps=5), 3),
    "sequential": (nf.PVI(plain, schedule="sequential"), 2),
    "synchronous": (nf.PVI(plain), 3),
    "named": (named, 5),
}


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in METHODS if name != "named"]


@pytest.mark.parametrize("name", ["named", *SLOW])
def test_a_federation_gives_the_numbers_of_a_list(name, double):
    (method, rounds), data = METHODS[name], numbers()
    there = federation_of(silos_of(data))
    found = method.run(KEY, rounds, there, **QUIET)
    expected = method.run(KEY, rounds, data, **QUIET)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-10)
    # A run goes on from its state, and a second time from the same one.
    ends = [method.run(KEY, 2, there, init_state=found.state, **QUIET) for _ in range(2)]
    after = method.run(KEY, 2, data, init_state=expected.state, **QUIET)
    for end in ends:
        np.testing.assert_allclose(end.losses, after.losses, rtol=1e-10)
    evidence = [nf.importance_correct(KEY, r, 500).log_evidence for r in (found, expected)]
    np.testing.assert_allclose(*evidence, rtol=1e-10)


@pytest.mark.slow
def test_fit_gives_the_numbers_of_a_list():
    counts = counts_of(SIZES)
    fitted = [nf.fit(KEY, model, s, **QUIET) for s in (federation_of(silos_of(counts)), counts)]
    a, b = (f.sample_posterior(KEY, 200) for f in fitted)
    for site in a:
        np.testing.assert_allclose(a[site], b[site], rtol=1e-10)
    assert [s.words for s in fitted[0].stages] == [s.words for s in fitted[1].stages]
    assert fitted[0].trusted


@pytest.mark.slow
def test_the_mode_over_a_federation_is_that_of_a_list(double):
    found, expected = (
        nf.find_mode(KEY, plain, silos) for silos in (federation_of(silos_of(numbers())), numbers())
    )
    np.testing.assert_allclose(found.z_G, expected.z_G, rtol=1e-10)
    np.testing.assert_allclose(found.curvature, expected.curvature, rtol=1e-8)
    assert found.num_exchanges == expected.num_exchanges


@pytest.mark.slow
def test_particles_move_over_a_federation(double):
    data = numbers()
    found = []
    for silos in (federation_of(silos_of(data)), data):
        fit = nf.PVI(plain).run(KEY, 0, silos, **QUIET)
        found.append(nf.Tempered(num_particles=100).run(KEY, 30, fit, **QUIET))
    np.testing.assert_allclose(found[0].z_G, found[1].z_G, rtol=1e-9)


def columns_of(xs):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([xs.shape[-1]]).to_event(1))
    return xs @ beta


def vertical(xs, y=None):
    eta = nf.client_sum("client", columns_of, xs)
    with numpyro.plate("row", eta.shape[0]):
        # Not normal: where a run begins at the exact posterior, gradients are rounding alone, and
        # Adam makes steps of it that differ from one runtime to the next.
        numpyro.sample("y", dist.Poisson(jnp.exp(eta)), obs=y)


@pytest.mark.slow
def test_columns_of_a_federation_are_those_of_a_list(double):
    r = np.random.default_rng(2)
    xs, y = [r.normal(size=(12, p)) for p in (2, 1)], r.poisson(1.0, 12)
    there = federation_of(silos_of(xs, names={"vertical": vertical}))
    method = nf.VFL(vertical)
    found, expected = (method.run(KEY, 4, x, y, **QUIET) for x in (there, xs))
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-10)


# --- messages that are lost, doubled, late, of another run -----------------------------------


class Storm:
    """An engine that loses, doubles, delays and cuts messages, and restarts silos, by a seed."""

    in_process = True  # single replies, whose digits are those of a list

    def __init__(self, seed, make_silos):
        self.random, self.make = np.random.default_rng(seed), make_silos
        self.silos, self.seen = make_silos(), []
        self.num_silos, self.faults = len(self.silos), 0

    def send(self, silo, message, timeout):
        fault = self.random.choice(
            ["", "lost", "reply lost", "doubled", "late", "cut", "restart"],
            p=[0.73, 0.05, 0.05, 0.05, 0.05, 0.05, 0.02],  # a silo that restarts builds all anew
        )
        self.faults += fault != ""
        if fault == "lost":
            raise TimeoutError
        if fault == "cut":
            assert "error" in read(self.silos[silo].answer(message[: len(message) // 2])).head
            raise ConnectionResetError
        if fault == "restart":
            self.silos[silo] = self.make()[silo]
        if fault == "late" and self.seen:
            j, earlier = self.seen[self.random.integers(len(self.seen))]
            self.silos[j].answer(earlier)
        reply = self.silos[silo].answer(message)
        self.seen.append((silo, message))
        if fault == "doubled":
            assert self.silos[silo].answer(message) == reply
        if fault == "reply lost":
            raise ConnectionResetError
        return reply


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_a_storm_changes_no_bit(name, tmp_path, monkeypatch):
    monkeypatch.setattr("numpyro_fed.rounds.federation.FIRST_WAIT", 1e-4)
    (method, rounds), data = METHODS[name], numbers()
    calm = method.run(KEY, rounds, federation_of(silos_of(data)), **QUIET)
    faults = 0
    for seed in range(2):
        engine = Storm(seed, lambda seed=seed: silos_of(data, tmp_path / str(seed)))
        there = nf.Federation(engine, names=NAMES, at_once=1)
        found = method.run(KEY, rounds, there, **QUIET)
        np.testing.assert_array_equal(found.losses, calm.losses)
        jax.tree.map(np.testing.assert_array_equal, found.params, calm.params)
        faults += engine.faults
    assert faults > 3


@pytest.mark.slow
def test_a_server_goes_on_in_a_new_process(tmp_path):
    """Killed at any message: the same script with the same folder gives the same bits."""
    data = numbers()
    names = {"normal": normal}
    method = nf.PVI(normal, start=None)
    silos = silos_of(data, tmp_path / "silos", names=names)

    class Dies(InMemory):
        left = 0

        def send(self, silo, message, timeout):
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("killed")
            return super().send(silo, message, timeout)

    def script(left):
        """Run until so many messages were sent; return how many more might have been."""
        engine = Dies([silo.answer for silo in silos])
        engine.left = left
        there = nf.Federation(engine, names=names, state=tmp_path / "server", at_once=1)
        run = method.run(KEY, 4, there, **QUIET)
        return engine.left, nf.importance_correct(KEY, run, 100).weights

    killed, left = 0, -1
    while left < 0:
        try:
            left, weights = script(7)
        except RuntimeError:
            killed += 1
            assert killed < 20
    fresh = InMemory([silo.answer for silo in silos_of(data, names=names)])
    calm = method.run(KEY, 4, nf.Federation(fresh, names=names), **QUIET)
    np.testing.assert_array_equal(weights, nf.importance_correct(KEY, calm, 100).weights)
    assert killed > 1
    other = nf.Federation(
        InMemory([silo.answer for silo in silos]), names=names, state=tmp_path / "server"
    )
    with pytest.raises(SavedStateError, match="asks silo 0 something else"):
        nf.SFVI(normal).run(KEY, 1, other, **QUIET)


def test_who_is_away_is_named():
    silos = silos_of(numbers())

    class Away(InMemory):
        def send(self, silo, message, timeout):
            if silo == 1:
                raise ConnectionRefusedError("nobody listens")
            return super().send(silo, message, timeout)

    there = nf.Federation(Away([s.answer for s in silos]), names=NAMES, patience=0.2)
    with pytest.raises(SiloAwayError, match=r"'describe' within 0.2 s from silo 1 \(nobody") as e:
        named.run(KEY, 1, there, **QUIET)
    assert e.value.silos == (1,)


class Leaves(InMemory):
    """An engine whose silo 1 is away for some of its messages of a kind."""

    def __init__(self, silos, kind, away):
        super().__init__([silo.answer for silo in silos])
        self.kind, self.away, self.asked = kind, away, {}

    def send(self, silo, message, timeout):
        question = Question.of(read(message).head)
        if silo == 1 and question.exchange == self.kind:
            number = self.asked.setdefault(message, len(self.asked))
            if number in self.away:
                raise ConnectionRefusedError
        return super().send(silo, message, timeout)


def normal(y):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with nf.silo_plate("row", len(y)):
        numpyro.sample("y", dist.Normal(mu, 2), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "ended"),
    [
        ("sequential", [[0], [5], [0]]),
        pytest.param("synchronous", [[0, 5, 0]], marks=pytest.mark.slow),
    ],
)
def test_the_factor_of_a_silo_that_is_away_stays(schedule, ended, double, tmp_path):
    data = numbers()
    method = nf.PVI(normal, start=None, schedule=schedule, damping=1.0)
    silos = silos_of(data, names={"normal": normal})

    def run(away, rounds):
        there = nf.Federation(
            Leaves(silos, "pvi", away),
            names={"normal": normal},
            patience=0.05,
            state=tmp_path / f"{away}{rounds}",
        )
        return method.run(KEY, rounds, there, **QUIET)

    everyone = method.run(KEY, 3, data, **QUIET).natural_parameters()
    late = run({0}, 3)
    jax.tree.map(np.testing.assert_allclose, late.natural_parameters(), everyone)
    assert "no reply in the last round at silo 1" in " ".join(run({1}, 2).doubts)
    # It is one of the replies that the same script is given again.
    again = run({1}, 2)
    assert again.status[1].tolist() == ended


@pytest.mark.slow
def test_steps_without_a_silo_are_scaled_up(double, tmp_path):
    """Three silos that hold the same rows: two of them, scaled up, are as good as all."""
    data = [numbers()[0]] * 3
    method = nf.SFVI(plain, start=None, optim=optax.sgd(1e-3))
    names = {"plain": plain, "method": method}
    there = nf.Federation(
        Leaves(silos_of(data, names=names), "sfvi", {1, 2}),
        names=names,
        patience=0.05,
        missing="reweight",
    )
    with pytest.warns(ConvergenceWarning, match=r"silo 1 \(2 times\)"):
        found = method.run(KEY, 4, there, **QUIET)
    expected = method.run(KEY, 4, data, **QUIET)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-12)
    assert found.verdict.count("in 4 rounds: silo 1 (2 times)") == 1
    result = nf.SFVI(plain, start=None).run(KEY, 1, data, **QUIET)
    replace(result, remarks=found.remarks).save(tmp_path / "run")
    assert nf.load(tmp_path / "run", plain, data).remarks == found.remarks
    assert "scaled up" in found.report(certificate=False)
    assert expected.remarks == ""
    waits = nf.Federation(
        Leaves(silos_of(data, names=names), "sfvi", {1}), names=names, patience=0.05
    )
    with pytest.raises(SiloAwayError, match="silo 1") as caught:
        method.run(KEY, 4, waits, **QUIET)
    before = caught.value.result
    assert len(before.losses) == 1
    rest = method.run(KEY, 3, waits, init_state=before.state, **QUIET)
    np.testing.assert_allclose(rest.losses, expected.losses[1:], rtol=1e-12)


class Dead(InMemory):
    """An engine one of whose silos answers no more once some exchange has come."""

    def __init__(self, silos, dead, kind):
        super().__init__([silo.answer for silo in silos])
        self.dead, self.kind, self.gone = dead, kind, False

    def send(self, silo, message, timeout):
        self.gone |= silo == self.dead and read(message).head["exchange"] == self.kind
        if silo == self.dead and self.gone:
            raise TimeoutError("the line is dead")
        return super().send(silo, message, timeout)


@pytest.mark.parametrize("kind", slow_but(["describe", "mode"], 1))
def test_a_fit_begins_again_without_a_silo_that_is_away(kind, tmp_path):
    data, call = numbers(), (KEY, plain)
    options = dict(names=NAMES, patience=0.2, silo_names=["A", "B", "C"], at_once=1)
    others = federation_of(silos_of([data[0], data[2]]), at_once=1)
    expected = nf.fit(*call, others, **QUIET)
    assert expected.remarks == ""

    def fitted(engine):
        there = nf.Federation(engine, state=tmp_path, missing="leave_out", **options)
        with pytest.warns(ConvergenceWarning, match="no answer from silo 'B'"):
            return nf.fit(*call, there, **QUIET)

    found = fitted(Dead(silos_of(data), 1, kind))
    assert found.silo_names == ("A", "C")
    assert found.trusted
    assert found.remarks.startswith("Without an answer from silo 'B'")
    assert found.remarks in found.verdict
    np.testing.assert_array_equal(found.summary().to_numpy(), expected.summary().to_numpy())
    # The same script goes on from its replies: nobody is asked again, though B is there now.
    asked = []
    engine = Dead(silos_of(data), None, kind)
    engine.send = lambda *message: asked.append(message)
    again = fitted(engine)
    assert asked == []
    np.testing.assert_array_equal(again.summary().to_numpy(), found.summary().to_numpy())


def test_under_sums_a_fit_goes_on_without_a_silo_before_the_first_sum_alone():
    """The sum over four less that over three would be the reply of the one that went away."""
    data = [*numbers(), numbers()[0]]
    options = dict(names=NAMES, patience=0.2, secure_sum=True, at_once=1, missing="leave_out")
    for many, kind in ((4, "mode"), (3, "describe")):  # of two each would see the other's reply
        late = nf.Federation(Dead(silos_of(data[:many]), 1, kind), **options)
        with pytest.raises(SiloAwayError) as caught:
            nf.fit(KEY, plain, late, **QUIET)
        assert "would be its reply" in caught.value.__notes__[0]


@pytest.mark.slow
def test_under_sums_a_fit_leaves_a_silo_out_that_was_never_there():
    data = [*numbers(), numbers()[0]]
    options = dict(names=NAMES, patience=0.2, secure_sum=True, at_once=1, missing="leave_out")
    early = nf.Federation(Dead(silos_of(data), 1, "describe"), **options)
    with pytest.warns(ConvergenceWarning, match="no answer from silo 1"):
        fitted = nf.fit(KEY, plain, early, **QUIET)
    assert fitted.silo_names == ("0", "2", "3")


def test_a_silo_with_another_jax_is_named_in_the_verdict(monkeypatch):
    there = federation_of(silos_of(numbers()), at_once=1)
    theirs = {**silo_module.libraries(), "jax": "0.9.9"}
    monkeypatch.setattr(silo_module, "libraries", lambda: theirs)
    fitted = nf.fit(KEY, plain, there, **QUIET)
    said = f"silo 2 has jax 0.9.9 (here {jax.__version__}): last digits of results may differ."
    assert said in fitted.verdict


def test_a_fit_without_half_of_its_silos_ends():
    there = nf.Federation(
        Leaves(silos_of(numbers()[:2]), "describe", {0}),
        names=NAMES,
        patience=0.05,
        missing="leave_out",
    )
    with pytest.raises(SiloAwayError, match="silo 1"):
        nf.fit(KEY, plain, there, **QUIET)


# --- asynchronous rounds, by the real clock ----------------------------------------------------


class Slow(InMemory):
    """An engine whose silos take their time for some exchange."""

    def __init__(self, silos, kind, seconds):
        super().__init__([silo.answer for silo in silos])
        self.kind, self.seconds = kind, seconds

    def send(self, silo, message, timeout):
        if read(message).head["exchange"] == self.kind:
            time.sleep(self.seconds[silo])
        return super().send(silo, message, timeout)


ASYNC = nf.PVI(normal, start=None, schedule="asynchronous")


@pytest.fixture(scope="module")
def normal_silos():
    """Silos for runs that are nothing to each other; these keep their programs."""
    return silos_of(numbers(), names={"normal": normal})


def run_async(engine, rounds, **options):
    there = nf.Federation(engine, names={"normal": normal}, **options)
    return ASYNC.run(KEY, rounds, there, **QUIET)


@pytest.mark.slow
def test_replies_are_used_as_they_arrive(normal_silos, double):
    result = run_async(Slow(normal_silos, "pvi", [0.0, 0.0, 0.15]), 12)
    # The model is conjugate: whatever the order, a visit takes the same share of the way.
    visits = np.bincount(result.visits.ravel(), minlength=3)
    assert visits[:2].min() > visits[2]
    share = 1 - (2 / 3) ** visits  # of each silo's factor that damped visits have put in
    rows, sums = np.array([(len(d["y"]), d["y"].sum()) for d in numbers()]).T
    precision = 1 / 10**2 + share @ rows / 2**2
    found = result.posterior()["mu"]
    np.testing.assert_allclose(found.variance, 1 / precision, rtol=1e-9)
    np.testing.assert_allclose(found.mean, share @ sums / 2**2 / precision, rtol=1e-9)


@pytest.mark.slow
def test_asynchronous_rounds_go_on_in_a_new_process(double, tmp_path):
    """Replies that came before come again in their order; a silo that is away is not waited for."""
    silos = silos_of(numbers(), tmp_path, names={"normal": normal})
    first = run_async(Slow(silos, "pvi", [0.0, 0.01, 0.03]), 3, state=tmp_path / "server")
    again = run_async(Slow(silos, "pvi", [0.03, 0.01, 0.0]), 5, state=tmp_path / "server")
    np.testing.assert_array_equal(again.losses[:3], first.losses)
    np.testing.assert_array_equal(again.visits[:3], first.visits)
    engine = Leaves(silos, "pvi", range(1_000))
    with pytest.warns(ConvergenceWarning, match=r"within 0\.05 s from silo 1 .* others go on"):
        without = run_async(engine, 3, patience=0.05, at_once=2)
    assert set(without.visits.ravel().tolist()) == {0, 2}
    assert without.never_visited == [1]
    # One that needs longer than the patience takes part: the message that it works on is repeated.
    late = run_async(Slow(silos, "pvi", [0.02, 0.02, 0.2]), 20, patience=0.1)
    assert 2 in late.visits


@pytest.mark.slow
def test_a_callback_may_ask_silos_between_asynchronous_rounds(normal_silos, double):
    evidence = []
    there = federation_of(normal_silos, at_once=2)
    there.names = {"normal": normal}
    result = ASYNC.run(
        KEY, 4, there, **QUIET, every=2, callback=lambda r: evidence.append(r.log_evidence)
    )
    assert len(result.losses) == 4
    assert np.isfinite(evidence).all()
    assert nf.importance_correct(KEY, result, 100).ess > 0


@pytest.mark.slow
def test_a_reply_that_is_spoilt_ends_asynchronous_rounds_with_their_result(normal_silos):
    class Spoils(InMemory):
        def send(self, silo, message, timeout):
            reply = super().send(silo, message, timeout)
            number = Question.of(read(message).head).number
            return reply[:-4] if silo == 1 and number > 6 else reply

    engine = Spoils([silo.answer for silo in normal_silos])
    there = nf.Federation(engine, names={"normal": normal})
    with pytest.raises(ReplyError, match="silo 1") as caught:
        ASYNC.run(KEY, 9, there, **QUIET)
    before = caught.value.result
    assert len(before.losses) > 0
    engine.send = lambda silo, message, timeout: normal_silos[silo].answer(message)
    after = ASYNC.run(KEY, 2, there, init_state=before.state, **QUIET)
    assert len(after.losses) == 2


@pytest.mark.slow
def test_no_more_silos_are_asked_than_at_once(normal_silos):
    at_work, most = set(), []

    class Counts(InMemory):
        def send(self, silo, message, timeout):
            at_work.add(silo)
            most.append(len(at_work))
            time.sleep(0.01)
            at_work.discard(silo)
            return super().send(silo, message, timeout)

    run_async(Counts([silo.answer for silo in normal_silos]), 3, at_once=2)
    assert max(most) == 2


@pytest.mark.slow
def test_an_engine_that_fails_in_a_thread_is_heard(normal_silos):
    class Breaks(InMemory):
        def send(self, silo, message, timeout):
            if Question.of(read(message).head).exchange == "pvi":
                raise RuntimeError("no way")
            return super().send(silo, message, timeout)

    with pytest.raises(RuntimeError, match="no way"):
        run_async(Breaks([silo.answer for silo in normal_silos]), 2)


def test_the_server_has_a_log_of_what_crossed(tmp_path):
    silos = silos_of(
        numbers(), policy=nf.Policy(min_rows=1, parameters_per_row=1.0, audit=str(tmp_path / "a"))
    )
    named.run(KEY, 1, federation_of(silos, log=tmp_path / "log"), **QUIET)
    here, there = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("log", "a")
    )
    assert {(x["message"], x["reply"]) for x in here} == {(x["message"], x["reply"]) for x in there}
    assert {"time", "silo", "exchange", "seconds", "sent", "received"} <= set(here[0])


# --- what a silo refuses ---------------------------------------------------------------------


def asked(silos, method):
    """The refusal of a run over these silos."""
    with pytest.raises(ModelError) as caught:
        method.run(KEY, 1, federation_of(silos), **QUIET)
    return str(caught.value)


@pytest.mark.parametrize(
    ("policy", "method", "words"),
    slow_but(
        [
            ({"methods": ("SFVI",)}, nf.PVI(plain), "silo 0 .*'PVI' is not among the methods"),
            ({"exchanges": ("visit",)}, named, "is not among the exchanges"),
            ({"min_silos": 4}, named, "3 silos, where .* at least 4"),
            ({"min_rows": 15}, named, "silo 2 .*fewer rows"),
            ({"parameters_per_row": 0.15}, named, "silo 2 .*2 globals and shared parameters"),
            ({"max_places": 1}, nf.SFVI(plain), "allows . more places"),
        ],
        2,
        3,
    ),
)
def test_a_policy_is_kept(policy, method, words):
    assert re.search(words, asked(silos_of(numbers(), policy=nf.Policy(**policy)), method))


@pytest.mark.parametrize(
    ("exchange", "cost"),
    [
        ("mode", {"places": 12}),
        ("own modes", {"places": 12}),
        ("tempered", {"places": 12}),
        ("around the mode", {"draws": 12}),
        ("importance", {"draws": 12}),
        ("leave out", {"draws": 12}),
        ("sfvi", {"places": 1}),
        ("private sums 7", {"places": 1}),
        ("one of a later version", {"places": 12}),
    ],
)
def test_each_point_at_which_a_likelihood_is_told_is_counted(exchange, cost):
    arrays = {"down/places": np.zeros((12, 3)), "down/start": np.zeros(()), "key": np.zeros(99)}
    assert evaluations(Question(exchange, ""), arrays) == cost


@pytest.mark.slow
def test_a_budget_outlives_the_process(tmp_path):
    policy = nf.Policy(max_draws=6_000, audit=str(tmp_path / "log"))
    data = numbers()
    run = nf.PVI(plain).run(KEY, 0, federation_of(silos_of(data, tmp_path, policy=policy)), **QUIET)
    nf.importance_correct(KEY, run, 4_000)
    again = federation_of(silos_of(data, tmp_path, policy=policy))
    run = nf.PVI(plain).run(KEY, 0, again, **QUIET)
    with pytest.raises(ModelError, match="allows 2000 more draws"):
        nf.importance_correct(KEY, run, 4_000)
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert lines[-1]["refused"]
    assert lines[-1]["left"]["draws"] == 2_000
    assert {"time", "exchange", "run", "sent", "message", "reply"} <= set(lines[0])


def test_messages_that_come_to_another_silo_move_nothing():
    class Swaps(InMemory):
        def send(self, silo, message, timeout):
            # First all that is for its neighbour, the plan included.
            super().send((silo + 1) % 3, message, timeout)
            return super().send(silo, message, timeout)

    data = numbers()
    engine = Swaps([silo.answer for silo in silos_of(data)])
    found = named.run(KEY, 4, nf.Federation(engine, names=NAMES), **QUIET)
    expected = named.run(KEY, 4, federation_of(silos_of(data)), **QUIET)
    np.testing.assert_array_equal(found.losses, expected.losses)


@pytest.mark.slow
def test_a_refusal_keeps_the_rounds_before_it():
    silos = silos_of(numbers(), policy=nf.Policy(max_places=3))
    with pytest.raises(nf.RefusedError, match=r"silo 0 refuses 'sfvi': .* 0 more") as caught:
        named.run(KEY, 20, federation_of(silos), **QUIET)
    result = caught.value.result
    np.testing.assert_allclose(result.losses, named.run(KEY, 3, numbers(), **QUIET).losses)
    assert np.isfinite(result.sample_posterior(KEY, 10)["mu"]).all()


def heavy(y):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with nf.silo_plate("row", len(y)):
        numpyro.sample("y", dist.StudentT(4, mu, 2), obs=y)


@pytest.mark.slow
def test_a_fit_keeps_its_stages_where_a_silo_is_away():
    names = {"heavy": heavy}
    away = Leaves(silos_of(numbers(), names=names), "importance", range(1_000))
    with pytest.raises(SiloAwayError, match="silo 1") as caught:
        nf.fit(KEY, heavy, nf.Federation(away, names=names, patience=0.05), **QUIET)
    fitted = caught.value.result
    assert [stage.name for stage in fitted.stages] == ["mode"]
    assert not fitted.trusted
    assert np.isfinite(fitted.sample_posterior(KEY, 10)["mu"]).all()


def test_a_refusal_is_told_while_others_are_waited_for(caplog):
    policies = nf.Policy(exchanges=("sfvi",)), FREE
    silos = [nf.Silo({"y": np.ones(9)}, names=NAMES, policy=policy) for policy in policies]

    def later(message):
        time.sleep(1.0)
        return silos[1].answer(message)

    federation = nf.Federation(InMemory([silos[0].answer, later]))
    with pytest.raises(ModelError, match="silo 0 refuses"):
        nf.describe_silos(federation)
    assert "silo 0 refuses 'describe columns': an error says why once" in caplog.text


@pytest.mark.slow
def test_exchanges_come_in_the_order_of_the_policy(tmp_path):
    ordered = nf.Policy(exchanges=("sfvi", "importance"), in_order=True)

    def there():
        return federation_of(silos_of(numbers(), tmp_path, policy=ordered))

    run = named.run(KEY, 2, there(), **QUIET)
    nf.importance_correct(KEY, run, 100)
    with pytest.raises(ModelError, match="'sfvi' comes before 'importance'"):
        named.run(KEY, 1, there(), **QUIET)
    with pytest.raises(ValueError, match="in_order needs exchanges"):
        nf.Policy(in_order=True)


def test_a_study_offers_its_own_functions_and_methods_alone(tmp_path):
    file = tmp_path / "study_of_names.py"
    file.write_text(
        "from subprocess import run\nimport numpyro_fed as nf\nfrom functools import partial\n"
        "def model(y): ...\ndef _hidden(y): ...\ndef main(silos): ...\n"
        "pvi = nf.PVI(model)\nother = partial(model, y=0)\n"
    )
    assert set(names_of(load_file(file))) == {"model", "pvi", "other"}


def test_a_policy_is_read_from_toml(tmp_path):
    file = tmp_path / "policy.toml"
    file.write_text('methods = ["PVI"]\nmin_rows = 50\n')
    assert nf.Policy.from_toml(file) == nf.Policy(methods=("PVI",), min_rows=50)
    file.write_text("min_row = 50\n")
    with pytest.raises(ValueError, match="unknown key 'min_row'"):
        nf.Policy.from_toml(file)


def test_a_silo_knows_its_own_texts_alone():
    def other(y):
        mu = numpyro.sample("mu", dist.Normal(0, 11))
        with nf.silo_plate("row", len(y)):
            numpyro.sample("y", dist.Normal(mu, 1), obs=y)

    assert "knows no model 'other'" in asked(silos_of(numbers()), nf.PVI(other))
    strangers = silos_of(numbers(), names={"plain": other})
    assert "text of 'plain' differs" in asked(strangers, nf.PVI(plain))


@pytest.mark.parametrize("secret", slow_but([None, "auto"], 0))
def test_silos_of_a_process_share_programs(compiled, secret, monkeypatch):
    """Silos of one shape with each other, and with those of a later script."""
    fresh = nf.SFVI(plain, start=None, num_particles=2 if secret is None else 4)
    monkeypatch.setitem(NAMES, "named", fresh)
    silos = silos_of(numbers(), secret=secret)
    first = fresh.run(KEY, 2, federation_of(silos), **QUIET)
    assert compiled.count("jit(visit)") == len(set(SIZES))
    again = fresh.run(KEY, 2, federation_of(silos), **QUIET)
    assert compiled.count("jit(visit)") == len(set(SIZES))
    np.testing.assert_array_equal(again.losses, first.losses)
    # Another plan is compiled for, and the runs of the first server go on.
    fresh.run(KEY, 2, federation_of(silos[:2]), **QUIET)
    assert len(fresh.run(KEY, 2, federation_of(silos), **QUIET).losses) == 2


@pytest.mark.slow
def test_silos_do_not_share_the_programs_of_a_variable_that_has_changed(monkeypatch):
    """A text reads a variable: the programs of its former value are of no use."""

    def of_scale(y):
        mu = numpyro.sample("mu", dist.Normal(0, 10))
        with nf.silo_plate("row", len(y)):
            # Read at the silos' shape alone, and not at that of the plan's made-up data.
            scale = read["scale"] if len(y) == 12 else 1.0
            numpyro.sample("y", dist.Normal(mu, scale), obs=y)

    monkeypatch.setitem(NAMES, "of_scale", of_scale)
    read, losses, silos = {}, [], []  # silos that live on keep their programs
    for read["scale"] in (1.0, 1.0, 1.1):
        silos.append(silos_of(numbers()[2:] * 2))
        there = federation_of(silos[-1])
        losses.append(nf.SFVI(of_scale, start=None).run(KEY, 2, there, **QUIET).losses[-1])
    assert losses[0] == losses[1] != losses[2]


def test_settings_that_no_message_holds_need_a_name():
    method = nf.SFVI(plain, optim=optax.adam(0.1))
    with pytest.raises(nf.DataError, match="optim= cannot be sent"):
        method.run(KEY, 1, federation_of(silos_of(numbers())), **QUIET)


@pytest.mark.slow
def test_what_is_no_message_is_refused_in_words():
    """Random bytes, cut and changed messages, and plans of strangers: a reply with a reason."""
    silo = silos_of(numbers())[0]
    messages = []

    class Listening(InMemory):
        def send(self, j, message, timeout):
            messages.append(message)
            return super().send(j, message, timeout)

    there = nf.Federation(Listening([s.answer for s in silos_of(numbers())]), names=NAMES)
    nf.SFVI(plain).run(KEY, 1, there, **QUIET)
    r = np.random.default_rng(0)
    for i in range(300):
        good = bytearray(messages[r.integers(len(messages))])
        kind = i % 3
        if kind == 0:
            bad = r.bytes(r.integers(0, 300))
        elif kind == 1:
            bad = bytes(good[: r.integers(len(good))])
        else:
            for _ in range(3):
                good[r.integers(len(good))] = r.integers(256)
            bad = bytes(good)
        assert isinstance(read(silo.answer(bad)).head, dict)
    begin = Question("begin", "", "00" * 16, 0, 0, "nobody")
    assert "has not described" in read(silo.answer(write({}, begin.head()))).head["words"]
