"""What a run shows while it goes on: the stage, what goes on there, and no share of an unknown."""

import re
import threading
import time

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from tqdm import TMonitor

import numpyro_fed as nf
from numpyro_fed.rounds import progress
from numpyro_fed.rounds.progress import StageBar, progress_of

KEY = jax.random.key(0)
SILOS = [{"y": np.array([0, 1, 1])}, {"y": np.array([1, 0, 1, 1, 1])}]


def coin(y):
    b = numpyro.sample("b", dist.Normal(0, 2))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=b), obs=y)


def lines(text):
    """What stood on the line, one state after the other."""
    return [line.strip() for line in re.split(r"[\r\n]|\x1b\[A", text) if line.strip()]


@pytest.mark.slow
def test_a_fit_says_what_goes_on_and_no_share_of_it(capsys):
    fitted = nf.fit(KEY, coin, SILOS)
    shown = lines(capsys.readouterr().err)
    assert shown[0].startswith("reading the model [")
    assert shown[-1].startswith("done [")
    for words in ("mode: search for the mode, exchange ", "correction "):
        assert any(line.startswith(words) for line in shown), words
    assert not any("%" in line or re.search(r"\d/\d", line) for line in shown)
    counts = [int(re.search(r", (\d+) exchanges\]", line)[1]) for line in shown]
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] == fitted.num_exchanges > 2


@pytest.mark.slow
def test_a_fit_that_shows_nothing_has_the_same_numbers(capsys):
    shown, silent = (nf.fit(KEY, coin, SILOS, progress_bar=shows) for shows in (True, False))
    capsys.readouterr()
    assert shown.num_exchanges == silent.num_exchanges
    np.testing.assert_array_equal(shown.corrected.weights, silent.corrected.weights)
    nf.fit(KEY, coin, SILOS, progress_bar=False)
    assert not capsys.readouterr().err


def test_a_fit_that_stops_says_so(capsys):
    with pytest.raises(nf.ModelError):
        nf.fit(KEY, lambda y: numpyro.sample("y", dist.Normal(0, 1), obs=y), SILOS)
    assert lines(capsys.readouterr().err)[-1].startswith("stopped [")


def test_the_clock_goes_on_while_nothing_else_does(monkeypatch):
    """As while a program is compiled; and it stops with the bar."""
    monkeypatch.setattr(progress, "TICK", 1e-3)
    before = set(threading.enumerate())
    with StageBar(True):
        ticked = threading.Event()
        monkeypatch.setattr(progress.tqdm, "refresh", lambda *args, **kwargs: ticked.set())
        assert ticked.wait(60)
    after = {t for t in threading.enumerate() if not isinstance(t, TMonitor)}
    assert after <= before


def test_a_line_says_that_a_program_is_compiled(capsys, monkeypatch):
    """Nothing is heard of a program before it is compiled, and no more once it is."""
    monkeypatch.setattr(progress, "TICK", 1e-3)

    @jax.jit
    def slow(x):
        time.sleep(0.05)  # as if it took so long to trace
        return 2 * x

    with StageBar(True) as bar:
        bar.stage("mode")
        slow(1.0)
        with bar.under_way(True, 9):
            jax.jit(lambda x: slow(x.astype(float)))(np.arange(3))
            bar.step(1, 0.0)
            slow(1.0)
            time.sleep(0.05)
    shown = [line.split(" [")[0] for line in lines(capsys.readouterr().err)]
    of_search = "mode: search for the mode, exchange"
    wanted = ["mode: compiling (first time)", f"{of_search} 1, compiling (first time)"]
    assert list(dict.fromkeys(line for line in shown if "compiling" in line)) == wanted
    assert [line for line in shown if line != "done"][-1] == f"{of_search} 2"
    assert not bar._num_compiling


def test_messages_of_all_stages_add_up(capsys):
    """Those of a search and of rounds as they come; an account of all so far replaces them."""
    with StageBar(True) as bar:
        bar.stage("one")
        for search, steps in ((True, (1, 2)), (False, (4,))):
            with bar.under_way(search, 1_000):
                for n in steps:
                    bar.step(n, 0.0)
        bar.account(9)
        bar.stage("two")
        with bar.under_way(False, 5):
            bar.step(1, 0.0)
    shown = [re.sub(r"\[.*?, ", "[", line) for line in lines(capsys.readouterr().err)]
    wanted = [
        "one: search for the mode, exchange 2 [1 exchanges]",
        "one: search for the mode, exchange 4 [3 exchanges]",
        "one: round 5 of 1,000 [7 exchanges]",
        "one: round 5 of 1,000 [9 exchanges]",
        "two: round 2 of 5 [10 exchanges]",
    ]
    assert [line for line in shown if line in wanted] == wanted


def test_a_run_shows_its_search_and_then_its_rounds(capsys):
    nf.SFVI(coin).run(KEY, 20, SILOS)
    shown = lines(capsys.readouterr().err)
    assert any(line.startswith("search for the mode: 1 exchanges") for line in shown)
    assert shown[-1].startswith("100%")
    assert "20/20" in shown[-1]


def test_a_bar_is_what_is_asked_for():
    one = StageBar(False)
    assert progress_of(one) is one
    assert not one.shows
    assert progress_of(True).shows
    assert not progress_of(False).shows
