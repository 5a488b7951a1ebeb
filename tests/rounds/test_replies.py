"""What a server makes of replies that it cannot use: it looks at each, and names whose it is."""

from itertools import product

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest
from apart import Apart
from cases import mark_slow, slow_but
from laid_open import laid_open
from sent_otherwise import sent_otherwise

import numpyro_fed as nf
from numpyro_fed.basics.errors import DataError, NonFiniteError, ReplyError
from numpyro_fed.methods.method import RUNTIMES
from numpyro_fed.rounds.messages import ACCEPT, DESCRIBE, read, write
from numpyro_fed.rounds.runtime import run_rounds

KEY = jax.random.key(0)
ROWS = [{"y": np.arange(n, dtype=np.float32)} for n in (3, 5, 4)]
BAD = 1
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


normal = models.level()


def averaging(**settings):
    return nf.SFVIAvg(normal, local_steps=3, optim=optax.sgd(1e-3), start=None, **settings)


METHODS = {
    "sfvi": lambda: nf.SFVI(normal, optim=optax.sgd(1e-3), start=None),
    "sfvi_of_some": lambda: nf.SFVI(normal, start=None, schedule=nf.schedules.Random(2)),
    "averages_of_sums": lambda: averaging(aggregate="reverse_kl"),
    "barycenters_of_all": lambda: averaging(weights="even"),
    "pvi_sequential": lambda: nf.PVI(normal, start=None),
    "pvi_synchronous": lambda: nf.PVI(normal, start=None, schedule="synchronous"),
    "pvi_asynchronous": lambda: nf.PVI(normal, start=None, schedule="asynchronous"),
    "pvi_random": lambda: nf.PVI(normal, start=None, schedule=nf.schedules.Random(2)),
}


class Federation(Apart):
    """Silos to whose replies something happens on the way."""

    def __init__(self, method, rows=ROWS):
        super().__init__(method, rows, self.passing)
        self.spoilt = None

    def passing(self, silo, message, answer):
        reply, name = answer(message), read(message).head["exchange"]
        spoils = self.spoilt and name not in (DESCRIBE, ACCEPT)
        return self.spoilt(silo, name, reply) if spoils else reply

    def run(self, rounds=3, *arguments):
        return super().run(KEY, rounds, *arguments)


BUILT = {}


def federation(name):
    """One for each method, whose nodes begin anew with each run, and nothing spoilt yet."""
    found = BUILT.get(name) or Federation(METHODS[name]())
    BUILT[name], found.spoilt = found, None
    return found


def edited(change, *, silo=BAD, exchange=None, after=0):
    """Arrays of one silo's replies are what ``change(name, array)`` makes of them, from its
    ``after``-th reply on: to one exchange, or to all in which it says something.
    """
    seen = []

    def spoil(j, name, reply):
        arrays = dict(read(reply).arrays)
        asked = name == exchange if exchange else any(".up" in k for k in arrays)
        if j != silo or not asked:
            return reply
        seen.append(name)
        if len(seen) <= after:
            return reply
        return write({k: np.asarray(change(k, a), a.dtype) for k, a in arrays.items()})

    return spoil


def spoilt_numbers(value):
    """All real numbers of what a silo says are this one; it says that they are good."""

    def change(name, a):
        return np.full_like(a, value) if ".up" in name and a.dtype.kind == "f" else a

    return change


# --- not finite ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            pytest.param(name, np.nan, marks=[pytest.mark.slow] * (not name.startswith("sfvi")))
            for name in METHODS
        ),
        ("sfvi", np.inf),
    ],
)
def test_the_silo_whose_reply_is_not_finite_is_named_and_no_other(name, value):
    there = federation(name)
    there.spoilt = edited(spoilt_numbers(value), after=3)
    with pytest.raises(NonFiniteError, match=f"at silo {BAD}\\.") as caught:
        there.run(8)
    assert caught.value.silos == (BAD,)
    assert jax.tree.all(jax.tree.map(lambda a: np.isfinite(a).all(), caught.value.result.params))
    assert len(caught.value.result.losses) == caught.value.round > 0


@pytest.mark.slow
def test_a_first_reply_that_is_not_finite_leaves_the_first_state():
    there = federation("pvi_synchronous")
    there.spoilt = edited(spoilt_numbers(np.nan))
    with pytest.raises(NonFiniteError) as caught:
        there.run()
    assert caught.value.silos == (BAD,)
    assert (caught.value.round, len(caught.value.result.losses)) == (0, 0)


@pytest.mark.slow
def test_a_start_at_the_mode_says_whose_numbers_stand_in_its_way():
    there = Federation(nf.SFVI(normal))
    there.spoilt = edited(spoilt_numbers(np.nan), exchange="mode")
    with pytest.warns(UserWarning, match=rf"no mode .*silo {BAD} "):
        there.run(1)


def test_a_search_for_the_mode_names_the_silo_whose_density_overflows():
    rows = [*ROWS[:2], {"y": np.full(3, 1e30, np.float32)}]
    with pytest.raises(NonFiniteError, match=r"silo 2") as caught:
        nf.find_mode(KEY, normal, rows)
    assert caught.value.silos == (2,)


@pytest.mark.slow
def test_an_importance_correction_names_the_silo_that_sends_what_is_no_number():
    there = federation("sfvi")
    result = there.run()
    there.spoilt = edited(spoilt_numbers(np.nan))
    with pytest.raises(NonFiniteError, match=f"at silo {BAD}\\.") as caught:
        nf.importance_correct(KEY, result, 100)
    assert caught.value.silos == (BAD,)


@pytest.mark.slow
def test_an_evaluation_names_the_silo_that_sends_what_is_no_number():
    there = federation("pvi_synchronous")
    result = there.run()
    there.spoilt = edited(spoilt_numbers(np.nan))
    with pytest.raises(NonFiniteError) as caught:
        _ = result.log_evidence
    assert caught.value.silos == (BAD,)


@pytest.mark.slow
def test_a_visit_that_could_not_be_used_is_counted_for_its_own_silo_over_nodes():
    """Its data overflow: it says so, and changes nothing."""
    rows = [ROWS[0], {"y": np.full(4, 1e30, np.float32)}, ROWS[2]]
    result = Federation(METHODS["pvi_synchronous"](), rows).run(2)
    together = METHODS["pvi_synchronous"]().run(KEY, 2, rows, progress_bar=False)
    np.testing.assert_array_equal(result.status, together.status)
    assert ((result.status > 1) == (np.arange(3) == 1)).all()


@pytest.mark.slow
def test_a_visit_ends_in_one_way():
    """A silo that says of its visits that there were five is not believed."""

    def change(name, a):
        return 5 * a if "statuses" in name else a

    there = federation("pvi_sequential")
    there.spoilt = edited(change)
    with pytest.raises(NonFiniteError) as caught:
        there.run()
    assert caught.value.silos == (BAD,)


@pytest.mark.slow
def test_a_client_of_a_vertical_model_is_named():
    model = models.sum_of_clients()
    method = nf.VFL(model, rho=1.0, start=None)
    there = Federation(method, [np.ones((5, p), np.float32) for p in (1, 2)])
    there.spoilt = edited(spoilt_numbers(np.nan))
    with pytest.raises(NonFiniteError) as caught:
        there.run(2, np.zeros(5, np.float32))
    assert caught.value.silos == (1,)


# --- weights ---------------------------------------------------------------------------------


def weighing(weight):
    """A silo would like its replies to count so much."""

    def change(name, a):
        return np.full_like(a, weight) if name.endswith(".weight") else a

    return change


@pytest.mark.parametrize(
    "name",
    mark_slow(
        ["sfvi", "barycenters_of_all", "pvi_sequential"], ["barycenters_of_all", "pvi_sequential"]
    ),
)
def test_a_weight_that_nobody_asked_for_is_refused(name):
    there = federation(name)

    def spoil(silo, exchange, reply):
        arrays = read(reply).arrays
        return write({**arrays, "reply.weight": np.array(-1.0, np.float32)}) if arrays else reply

    assert np.isfinite(there.run().losses).all()
    there.spoilt = spoil
    with pytest.raises(ReplyError, match=r"silo 0 .*'reply\.weight', which was not agreed"):
        there.run()


@pytest.mark.parametrize(
    ("exchange", "weight"),
    [("rows", w) for w in (-1.0, 4.0, 9.0, np.nan)]
    + [("sfvi_avg", w) for w in (-1.0, 3.0, np.inf)],
)
def test_a_weight_that_a_silos_rows_do_not_explain_is_refused_by_name(exchange, weight):
    """Of 5 rows, which the facts give as up to 8."""
    there = federation("averages_of_sums")
    there.spoilt = edited(weighing(weight), exchange=exchange)
    words = rf"silo 1 .*'{exchange}' .*weight {weight:g}, .*5 to 8"
    with pytest.raises(ReplyError, match=words) as caught:
        there.run()
    assert (caught.value.silo, caught.value.exchange) == (BAD, exchange)
    assert isinstance(caught.value, DataError)


def test_a_refused_reply_leaves_the_rounds_before_it():
    there = federation("averages_of_sums")
    honest = there.run(2)
    there.spoilt = edited(weighing(-1.0), exchange="sfvi_avg", after=2)
    with pytest.raises(ReplyError) as caught:
        there.run(5)
    np.testing.assert_array_equal(caught.value.result.losses, honest.losses)
    jax.tree.map(np.testing.assert_array_equal, caught.value.result.params, honest.params)
    assert caught.value.result.ended == "failure"


@pytest.mark.slow
def test_weights_that_rows_explain_are_taken():
    found = federation("averages_of_sums").run()
    expected = METHODS["averages_of_sums"]().run(KEY, 3, ROWS, progress_bar=False)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-5)
    assert float(found.state.server.rows) == 12.0


@pytest.mark.parametrize("name", slow_but(METHODS, 0, 1))
def test_no_exchange_but_an_average_by_rows_is_weighted(name):
    method = METHODS[name]()
    there = method.build(method.agree([method.describe(silo) for silo in ROWS]))
    rounds = (*there.opening, there.algorithm.round)
    weighted = {x.name for r in rounds for x in r.exchanges if x.weighted}
    assert weighted == ({"rows", "sfvi_avg"} if name == "averages_of_sums" else set())


# --- of another kind -------------------------------------------------------------------------


def test_a_reply_of_another_shape_is_refused_by_name():
    def wider(silo, exchange, reply):
        arrays = dict(read(reply).arrays)
        if silo == 2:
            arrays = {k: np.stack([a, a]) if "gradient" in k else a for k, a in arrays.items()}
        return write(arrays)

    there = federation("sfvi")
    there.spoilt = wider
    with pytest.raises(ReplyError, match=r"silo 2 .*'sfvi'.*float32\(2, "):
        there.run()


@pytest.mark.parametrize("answer", [b"", b"no arrays", b"PK\x03\x04 and no more"])
def test_a_reply_that_cannot_be_read_is_refused_by_name(answer):
    there = federation("sfvi")
    there.spoilt = lambda silo, exchange, reply: (
        answer if (silo, exchange) == (2, "sfvi") else reply
    )
    words = rf"silo 2 .*'sfvi' .* {len(answer)} bytes"
    with pytest.raises(ReplyError, match=words) as caught:
        there.run()
    assert caught.value.result is not None


def test_a_refused_reply_in_a_search_ends_it():
    there = Federation(nf.SFVI(normal))
    there.spoilt = lambda silo, exchange, reply: b"" if exchange == "mode" else reply
    with pytest.raises(ReplyError, match=r"silo 0 .*'mode' .*read"):
        there.run()


# --- in one process --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "runtime"),
    slow_but(product(["sequential", "synchronous", "asynchronous"], ["simulation", "host"]), 2),
)
def test_a_reply_that_is_spoilt_on_its_way_is_that_of_its_silo(schedule, runtime):
    """What happens to a reply before it leaves is looked at, too."""
    rows = [ROWS[0], {"y": ROWS[1]["y"] + 1e4}, ROWS[2]]
    method = nf.PVI(normal, start=None, schedule=schedule)
    opened = laid_open(method, rows, runtime)

    def broken(up):
        largest = jnp.stack([jnp.abs(a).max() for a in jax.tree.leaves(up.change)]).max()
        factor = jnp.where(largest > 1e3, jnp.nan, 1.0)
        return up._replace(change=jax.tree.map(lambda a: a * factor, up.change))

    algorithm = sent_otherwise(opened.algorithm, broken)
    spoilt = RUNTIMES[runtime](algorithm, opened.built.schedule)
    run = run_rounds(spoilt, KEY, spoilt.init(KEY, opened.batches), opened.batches, 5, False)
    assert run.failure[1] == (BAD,)
