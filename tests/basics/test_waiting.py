"""Ctrl-C is heard while a program runs, and a call that takes long shows itself."""

import inspect
import re
import time
from functools import partial

import jax
import jax.numpy as jnp
import models
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from test_interrupt import ctrl_c, ctrl_c_raises  # noqa: F401  (the fixture acts by itself)

import numpyro_fed as nf
from numpyro_fed.after.questions import Questions
from numpyro_fed.basics.programs import in_precision_of_object
from numpyro_fed.posterior.corrected import Corrected
from numpyro_fed.rounds import progress
from numpyro_fed.rounds.progress import in_sight, shows
from numpyro_fed.weigh.mixture import Mixture
from numpyro_fed.weigh.proposals import Pool

KEY = jax.random.key(0)


class Answers:
    double = True

    @in_precision_of_object
    def ask(self, program):
        self.out = program()
        return self.out


def test_answers_in_double_precision_are_waited_for_as_ctrl_c_can_end_it(monkeypatch):
    """They become arrays of NumPy in a process of single precision, whose wait hears nothing."""
    waited, answers = [], Answers()

    def interrupted(out):
        waited.append(out)
        ctrl_c()

    monkeypatch.setattr(jax, "block_until_ready", interrupted)
    with pytest.raises(KeyboardInterrupt):
        answers.ask(lambda: {"out": jnp.ones(2)})
    assert waited[0] is answers.out
    monkeypatch.undo()
    assert isinstance(answers.ask(lambda: jnp.ones(2)), np.ndarray)


def shown(text):
    return [re.sub(r"\[.*", "[", x) for x in re.split(r"[\r\n]", text) if x.strip()]


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(progress, "SOON", 0.02)
    monkeypatch.setattr(progress, "TICK", 0.01)


def wait_until(condition):
    for _ in range(3_000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError


class Answer:
    shows_progress = True

    @shows("look")
    def inner(self, seen):
        wait_until(seen)

    @shows("think")
    def outer(self, seen):
        with in_sight("more"):
            self.inner(seen)


def test_a_long_call_shows_itself_and_those_within_it_do_not(soon, capsys):
    text = []

    def seen():
        text.append(capsys.readouterr().err)
        return "think [" in "".join(text)

    Answer().outer(seen)
    assert set(shown("".join(text))) == {"think ["}


def test_nothing_is_shown_where_the_fit_showed_nothing_or_of_a_short_call(soon, capsys):
    silent = Answer()
    silent.shows_progress = False
    ends = time.monotonic() + 0.2
    silent.outer(lambda: time.monotonic() > ends)
    progress.SOON = 60.0
    Answer().outer(lambda: True)
    assert not capsys.readouterr().err


def test_a_call_that_ends_by_ctrl_c_shows_nothing_more(soon):
    with pytest.raises(KeyboardInterrupt):
        Answer().outer(ctrl_c)
    assert not progress._SHOWN.get()


QUESTIONS = [
    name
    for name, f in inspect.getmembers(Questions, inspect.isfunction)
    if name[0] != "_" and not getattr(f, "__isabstractmethod__", False)  # of draws, not a question
]


@pytest.mark.parametrize("name", QUESTIONS)
def test_all_questions_to_a_fit_show_themselves(name):
    source = inspect.getsource(getattr(Questions, name))
    assert source.lstrip().startswith("@shows("), name


def correction(numbers, log_weights):
    """A correction by draws 0, 1, ... of several proposals."""
    n = len(log_weights)
    none = Mixture.of(np.zeros(1), np.zeros((1, 1)), np.ones((1, 1, 1)))
    z = np.arange(n)[:, None].astype(float)
    own = np.arange(n) % 5 > 0
    K = len(numbers)
    log_own = np.tile(z[:, 0], (K, 1))
    pool = Pool(z, -z[:, 0], own, log_own, (none,) * K, (0.1,) * K, numbers)
    w = np.exp(log_weights - log_weights.max())
    w /= w.sum()
    nothing = dict.fromkeys(
        ("log_evidence", "result", "errors", "_moments", "_rounding", "_sampler")
    )
    return Corrected(
        **nothing,
        ess=1 / (w**2).sum(),
        pareto_k=0.4,
        weights=w,
        _key=KEY,
        z_G=z,
        _sent=16,
        integration=None,
        log_weights=log_weights,
        log_joint=-z[:, 0],
        pool=pool,
    )


def test_silos_are_left_out_of_as_many_draws_as_are_needed():
    """A thousand that count; with their own weights, and as many of each proposal as before."""
    numbers = (48_000, 4_000, 12_000)
    log_weights = np.random.default_rng(0).normal(size=64_000) * 1.5
    whole = correction(numbers, log_weights)
    number = whole._number_left_out
    assert number % 4_000 == 0
    assert 1_000 <= number * whole.effective_share < 1_000 + 4_000 * whole.effective_share
    some = whole._some(number)
    assert len(some.weights) == number
    assert some.pool.numbers == tuple(number * n // 64_000 for n in numbers)
    which = np.asarray(some.pool.z_G[:, 0]).astype(int)
    assert len(set(which)) == number
    kind = np.searchsorted(np.cumsum(numbers), which, side="right")
    assert tuple(np.bincount(kind)) == some.pool.numbers
    np.testing.assert_array_equal(some.log_weights, log_weights[which])
    np.testing.assert_array_equal(some.pool.log_joint, -which)
    np.testing.assert_array_equal(some.pool.from_own, which % 5 > 0)
    np.testing.assert_array_equal(some.pool.log_own, np.tile(which, (3, 1)))
    np.testing.assert_allclose(some.weights.sum(), 1.0)
    even = correction((4_000,), np.zeros(4_000))
    assert even._some(even._number_left_out) is even


def patients(H, h, y=None):
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    with nf.silo_plate("hospital", H):
        u = numpyro.sample("u", dist.Normal(0, tau))
    with nf.silo_plate("patient", len(h)):
        numpyro.sample("y", dist.Normal(u[h], 1), obs=y)


@pytest.mark.slow
def test_questions_to_a_fit_end_at_ctrl_c_and_can_be_asked_again(monkeypatch):
    r = np.random.default_rng(0)
    silos = [
        {"H": 1, "h": np.zeros(n, int), "y": r.normal(size=n) + r.normal()} for n in (9, 12, 7, 30)
    ]
    fitted = nf.fit(KEY, patients, silos, progress_bar=False)
    questions = {
        "leave_out": fitted.leave_out,
        "loo": fitted.loo,
        "disagreement": fitted.disagreement,
        "predict": partial(fitted.predict, KEY, silo="own rows", n=20),
        "predict new": partial(fitted.predict, KEY, {"H": 1, "h": np.zeros(3, int)}),
        "all": partial(fitted.sample_posterior, KEY, 20, silo="all"),
        "one": partial(fitted.sample_posterior, KEY, 20, silo=1),
        "arviz": partial(fitted.to_arviz, KEY, 20, groups=["log_likelihood"]),
        "correction": partial(nf.importance_correct, KEY, fitted.run_behind),
        "add": partial(fitted.add, KEY, silos[0]),
    }
    for name, ask in questions.items():
        with monkeypatch.context() as patch:
            patch.setattr(jax, "block_until_ready", ctrl_c)
            with pytest.raises(KeyboardInterrupt):
                ask()
        assert ask() is not None, name


@pytest.mark.slow
def test_a_search_shows_itself_unless_it_is_told_not_to(capsys):
    silos = [{"y": np.array([1.0, 2.0])}, {"y": np.array([3.0, 4.0, 5.0])}]
    nf.find_mode(KEY, models.level(), silos, progress_bar=False)
    assert not capsys.readouterr().err
    nf.find_mode(KEY, models.level(), silos)
    assert "search for the mode" in capsys.readouterr().err
