"""Silos climb to modes of their own, and the sum of their parabolas is where the search begins."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from problems import cut

import numpyro_fed as nf
from numpyro_fed.data.silo_data import read
from numpyro_fed.rounds.compiled_loop import compiled_runtime
from numpyro_fed.rounds.silos import on_device
from numpyro_fed.rounds.step import Conversation, transport_of_stacks
from numpyro_fed.search.expand import Expansion
from numpyro_fed.search.mode_search import AscentPhase
from numpyro_fed.search.newton import LATE, NewtonAscent, NewtonSearch, stop_followers
from numpyro_fed.text.layout import layout_and_buckets

KEY = jax.random.key(0)


def first_places(model, silos, starts=2, places=None):
    """Where a search with several starts begins, after silos' own modes, and their tops."""
    layout, buckets = layout_and_buckets(model, read(silos, model))
    fm, batches = layout.model, on_device(buckets)
    search = NewtonSearch(fm, len(silos), starts, None, None)
    state = compiled_runtime(search.algorithm, quick=True).init(KEY, batches)
    ask = Conversation(transport_of_stacks(batches), KEY, len(silos), state.silos)
    first = search.first_ascents(KEY, np.random.default_rng(0))
    before = np.stack([start.trial for start in first])
    search.begin_at_own_modes(ask, first, places)
    assert not ask.unusable
    tops = np.concatenate([np.asarray(stack.top) for stack in ask.silos])
    return before, np.stack([start.trial for start in first]), tops


def linear(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 3).expand([2]).to_event(1))
    with nf.silo_plate("row", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ beta, 2), obs=y)


def test_normal_posteriors_add_up_to_the_mode(double):
    """Whatever the units, from each start, and where a silo alone is of too few rows."""
    r = np.random.default_rng(0)
    x = np.stack([np.ones(41), 1e3 + 1e2 * r.normal(size=41)], 1)
    y = x @ [1.0, -0.02] + 2 * r.normal(size=41)
    silos = cut({"x": x, "y": y}, (1, 10, 30))
    _, places, _ = first_places(linear, silos)
    exact = np.linalg.solve(x.T @ x / 4 + np.eye(2) / 9, x.T @ y / 4)
    np.testing.assert_allclose(places, np.stack([exact, exact]), rtol=1e-8)
    # Half of the starts begin at modes of nearly the same data.
    given = np.array([[7.0, 8.0], [9.0, 10.0]])
    _, places, _ = first_places(linear, silos, 3, given)
    np.testing.assert_allclose(places, [*given, exact], rtol=1e-8)


def answers(x, y):
    a = numpyro.sample("a", dist.Normal(0, 5))
    with nf.silo_plate("row", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=a + 0 * x), obs=y)


def test_a_silo_where_the_outcome_never_happens_is_held_by_its_share_of_the_prior(double):
    y = np.repeat([0, 1, 0, 1], [12, 5, 20, 23])
    _, places, _ = first_places(answers, cut({"x": np.zeros(60), "y": y}, (12, 48)))
    assert (np.abs(places - np.log(28 / 32)) < 1.0).all()


def nowhere(x, y):
    a = numpyro.sample("a", dist.Normal(0, 5))
    with nf.silo_plate("row", x.shape[0]):
        numpyro.factor("y", jnp.where(x > 0, jnp.nan, -0.5 * (a - y) ** 2))


@pytest.mark.parametrize(("x", "expected"), [((0, 1), 3.0), ((1, 1), None)])
def test_silos_where_nothing_is_finite_leave_the_others_to_decide(x, expected, double):
    silos = [{"x": np.full(4, v), "y": np.full(4, 3.0)} for v in x]
    before, places, _ = first_places(nowhere, silos)
    if expected is None:
        np.testing.assert_array_equal(places, before)
    else:  # with half of the prior
        np.testing.assert_allclose(places, expected * 4 / (4 + 0.5 / 25), rtol=1e-9)


def without_a_top(x, y):
    a = numpyro.sample("a", dist.Normal(0, 5))
    with nf.silo_plate("row", x.shape[0]):
        numpyro.factor("y", jnp.where(x > 0, (a - y) ** 4, -0.5 * (a - y) ** 2))


def test_a_silo_that_comes_to_no_mode_keeps_no_likelihood(double):
    silos = [{"x": np.full(4, v), "y": np.full(4, 3.0)} for v in (0, 1)]
    _, _, tops = first_places(without_a_top, silos)
    np.testing.assert_allclose(tops[0], -0.5 * 4 * (3 - 12 / 4.02) ** 2, rtol=0.05)
    assert (tops[1] == np.finfo(float).min).all()


def rates(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 100).expand([2]).to_event(1))
    with nf.silo_plate("row", len(y)):
        numpyro.sample("y", dist.Poisson(jnp.exp(90.0 + x @ beta)), obs=y)


def test_a_silo_comes_down_from_a_rate_of_e_to_the_hundred(double):
    """Each step lowers a rate that is far too high by a factor of e, at no exchange."""
    r = np.random.default_rng(0)
    x = np.stack([np.ones(90), r.lognormal(0, 0.5, 90)], 1)
    rows = dict(x=x, y=r.poisson(np.exp(x @ [0.5, 0.2])))
    found = nf.find_mode(jax.random.key(0), rates, cut(rows, (40, 30, 20)), starts=1)
    assert found.converged
    assert found.num_exchanges < 12


@pytest.mark.parametrize(("after", "value", "left"), [(LATE, -9, 0), (LATE + 1, -9, 1), (99, 1, 0)])
def test_a_start_that_lags_behind_a_mode_is_given_up(after, value, left):
    """The first one rests after six exchanges at a density of zero; the other is far from it."""
    at = [
        Expansion(np.array([x]), np.float64(v), np.zeros(1), np.eye(1))
        for x, v in ((0.0, 0.0), (50.0, value))
    ]
    first = NewtonAscent(at[0].x, at[0], tried=6, at_mode=True, phase=AscentPhase.ENDED)
    second = NewtonAscent(at[1].x, at[1], tried=6 + after)
    stop_followers([first, second])
    assert (second.phase is AscentPhase.ENDED) == bool(left)
    near = NewtonAscent(at[0].x, at[0]._replace(x=np.array([1.0]), value=np.float64(-0.5)), tried=1)
    stop_followers([first, near])
    assert near.phase is AscentPhase.ENDED
