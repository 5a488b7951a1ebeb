"""Ctrl-C ends a run, and nothing that was computed is lost."""

import signal
import threading
import time
from types import SimpleNamespace

import jax
import models
import numpy as np
import pytest
from apart import Apart
from laid_open import at_checks, put_in_place

import numpyro_fed as nf
from numpyro_fed.fitting import steps as fit_steps
from numpyro_fed.posterior import importance
from numpyro_fed.rounds import runtime as runtime_module
from numpyro_fed.rounds.step import Conversation

KEY = jax.random.key(0)
QUIET = {"progress_bar": False}


model = models.level()


SILOS = [{"y": np.array([1.0, 2.0])}, {"y": np.array([3.0, 4.0, 5.0])}]
SFVI = nf.SFVI(model, start=None)
PVI = nf.PVI(model, schedule="synchronous", start=None, damping=0.5)


@pytest.fixture(autouse=True)
def ctrl_c_raises():
    """As in a terminal, whatever the process of the tests inherited."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def ctrl_c(*args, **kwargs):
    signal.raise_signal(signal.SIGINT)


def same(one, other):
    return jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), one, other))


def test_rounds_before_it_are_kept_and_go_on(tmp_path):
    with pytest.raises(KeyboardInterrupt) as caught:
        SFVI.run(KEY, 40, SILOS, callback=ctrl_c, every=15, **QUIET)
    error = caught.value
    assert isinstance(error, nf.Interrupted)
    assert "error.result.save(path)" in str(error)
    assert error.result.ended == "interrupted"
    assert len(error.result.losses) == int(error.result.state.round) == 15
    error.result.save(tmp_path / "fit")
    again = SFVI.load(tmp_path / "fit", SILOS)
    rest = SFVI.run(KEY, 25, SILOS, init_state=again.state, **QUIET)
    whole = SFVI.run(KEY, 40, SILOS, **QUIET)
    assert same(rest.state, whole.state)
    np.testing.assert_array_equal(np.r_[error.result.losses, rest.losses], whole.losses)


def test_it_may_come_at_any_time():
    """From another thread, in the middle of rounds: what is kept is a beginning of the run."""
    SFVI.run(KEY, 1, SILOS, runtime="host", **QUIET)
    began = threading.Event()

    def later():
        began.wait()
        time.sleep(0.3)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=later)
    thread.start()
    with pytest.raises(nf.Interrupted) as caught:
        SFVI.run(
            KEY,
            10**6,
            SILOS,
            runtime="host",
            callback=lambda _: began.set(),
            every=1,
            **QUIET,
        )
    thread.join()
    found = caught.value.result
    rounds = len(found.losses)
    assert rounds == int(found.state.round) > 0
    whole = SFVI.run(KEY, rounds, SILOS, runtime="host", **QUIET)
    assert same(found.state, whole.state)


def test_between_a_rounds_report_and_its_state(monkeypatch):
    """The report of rounds whose state was not taken over yet is left out."""
    calls = []

    def first(n, a):
        calls.append(n)
        if len(calls) > 1:
            ctrl_c()
        return np.asarray(a)[:n]

    put_in_place(monkeypatch, "rounds_of_a_log", first)
    with pytest.raises(nf.Interrupted) as caught:
        SFVI.run(KEY, 20, SILOS, callback=lambda _: False, every=5, **QUIET)
    found = caught.value.result
    assert len(found.losses) == int(found.state.round) == 5


@pytest.mark.slow
@pytest.mark.parametrize("method", [SFVI, PVI], ids=["SFVI", "PVI"])
def test_before_the_first_round_is_done(monkeypatch, method):
    put_in_place(monkeypatch, "all_finite", ctrl_c)
    with pytest.raises(nf.Interrupted) as caught:
        method.run(KEY, 3, SILOS, runtime="quick", **QUIET)
    found = caught.value.result
    assert len(found.losses) == 0
    assert found.sample_posterior(KEY, 3)["mu"].shape == (3,)


@pytest.mark.slow
def test_in_the_search_there_is_nothing_to_keep(monkeypatch):
    """It is not swallowed there either."""
    monkeypatch.setattr(Conversation, "__call__", ctrl_c)
    for call in (
        lambda: nf.SFVI(model).run(KEY, 3, SILOS, **QUIET),
        lambda: nf.find_mode(KEY, model, SILOS, progress_bar=False),
        lambda: nf.fit(KEY, by_param, SILOS, **QUIET),
    ):
        with pytest.raises(KeyboardInterrupt) as caught:
            call()
        assert not isinstance(caught.value, nf.Interrupted)


def test_a_second_one_gets_through(monkeypatch):
    def concatenate(*args):
        ctrl_c()

    def look(result):
        monkeypatch.setattr(runtime_module.np, "concatenate", concatenate)
        ctrl_c()

    with pytest.raises(KeyboardInterrupt) as caught:
        SFVI.run(KEY, 4, SILOS, callback=look, every=2, **QUIET)
    monkeypatch.undo()
    assert not isinstance(caught.value, nf.Interrupted)


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["simulation", "host"])
def test_factors_before_it_are_kept(runtime):
    with pytest.raises(nf.Interrupted) as caught:
        PVI.run(KEY, 9, SILOS, callback=ctrl_c, every=2, runtime=runtime, **QUIET)
    found = caught.value.result
    assert (found.ended, len(found.losses), found.damping.shape) == ("interrupted", 2, (2, 1))
    assert np.isfinite(float(found.posterior()["mu"].mean))


@pytest.mark.slow
def test_vertical_rounds_before_it_are_kept():
    text = models.sum_of_clients()
    vfl = nf.VFL(text, start=None)
    xs = [np.ones((4, 1)), np.ones((4, 2))]
    with pytest.raises(nf.Interrupted) as caught:
        vfl.run(KEY, 9, xs, np.zeros(4), callback=ctrl_c, every=3, **QUIET)
    assert len(caught.value.result.losses) == 3
    assert caught.value.result.ended == "interrupted"


def test_rounds_over_nodes_before_it_are_kept():
    sent = []

    def send(j, message, answer):
        sent.append(j)
        if len(sent) > 13:
            ctrl_c()
        return answer(message)

    with pytest.raises(nf.Interrupted) as caught:
        Apart(SFVI, SILOS, send).run(KEY, 50)
    found = caught.value.result
    assert 0 < len(found.losses) == int(found.state.round) < 9
    assert found.sample_posterior(KEY, 3)["mu"].shape == (3,)


def test_draws_of_a_correction_before_it_are_kept(monkeypatch):
    result = SFVI.run(KEY, 200, SILOS, **QUIET)
    monkeypatch.setattr(importance, "AT_ONCE", 500)
    whole = nf.importance_correct(KEY, result, 1_000)
    fold_in = jax.random.fold_in

    def third(key, i):
        if i == 2:
            ctrl_c()
        return fold_in(key, i)

    monkeypatch.setattr(jax.random, "fold_in", third)
    with pytest.raises(nf.Interrupted, match="after 1,000 of 2,000 draws") as caught:
        nf.importance_correct(KEY, result, 2_000)
    np.testing.assert_array_equal(caught.value.result.weights, whole.weights)
    assert caught.value.result.log_evidence == whole.log_evidence


def test_a_correction_without_any_draws_is_a_plain_one(monkeypatch):
    result = SFVI.run(KEY, 20, SILOS, **QUIET)
    question = SimpleNamespace(of_server=ctrl_c)
    put_in_place(monkeypatch, "question_of_a_correction", lambda *args, **more: question)
    with pytest.raises(KeyboardInterrupt) as caught:
        nf.importance_correct(KEY, result)
    assert not isinstance(caught.value, nf.Interrupted)


# --- nf.fit ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_stages_of_a_fit_before_it_are_kept(monkeypatch, tmp_path):
    """In the middle of the correction: the fit is there, and says that nobody has checked it."""
    monkeypatch.setattr(fit_steps, "correct_from", ctrl_c)
    with pytest.raises(nf.Interrupted) as caught:
        nf.fit(KEY, model, SILOS, **QUIET)
    monkeypatch.undo()
    fitted = caught.value.result
    assert [stage.name for stage in fitted.stages] == ["mode"]
    assert fitted.interrupted
    assert not fitted.trusted
    assert fitted.verdict.startswith("Do not trust this posterior: the fit was interrupted")
    assert fitted.num_exchanges > 0
    assert fitted.sample_posterior(KEY, 3)["mu"].shape == (3,)
    corrected = nf.importance_correct(KEY, fitted.run_behind)
    assert corrected.trusted
    fitted.save(tmp_path / "fit")
    assert nf.load(tmp_path / "fit").verdict == fitted.verdict
    assert nf.load(tmp_path / "fit", model, SILOS).interrupted


@pytest.mark.slow
def test_a_stage_of_a_fit_is_kept_as_far_as_it_came(monkeypatch):
    def look(state):
        if int(state.round) > runtime_module.FIRST_CHUNK:  # the search has fewer rounds
            ctrl_c()

    at_checks(monkeypatch, look)
    with pytest.raises(nf.Interrupted) as caught:
        nf.fit(KEY, by_param, SILOS, **QUIET)
    (stage,) = caught.value.result.stages
    assert (stage.name, stage.words) == ("SFVI", "interrupted")
    assert stage.result.ended == "interrupted"
    assert len(stage.result.losses) == runtime_module.FIRST_CHUNK


by_param = models.level_and_scale(10)


@pytest.mark.slow
def test_a_checked_fit_that_goes_on_is_not_trusted(monkeypatch):
    """Its correction is kept, with words that say why it does not count."""
    fitted = nf.fit(KEY, model, SILOS, **QUIET)
    assert fitted.trusted
    monkeypatch.setattr("numpyro_fed.fitting.order_of_steps.confirm_by_new_draws", ctrl_c)
    with pytest.raises(nf.Interrupted) as caught:
        nf.fit(KEY, model, SILOS, **QUIET)
    found = caught.value.result
    assert isinstance(found, nf.Corrected)
    assert not found.trusted
    assert "interrupted before its check was done" in found.verdict


def test_a_fit_without_any_stage_is_a_plain_one(monkeypatch):
    monkeypatch.setattr(fit_steps.FitSteps, "run_method", ctrl_c)
    with pytest.raises(KeyboardInterrupt) as caught:
        nf.fit(KEY, model, SILOS, **QUIET)
    assert not isinstance(caught.value, nf.Interrupted)
