"""Settings for schedules: who takes part in a round, and in which order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_fed.basics.errors import positive_int
from numpyro_fed.basics.trees import drop_weak_types
from numpyro_fed.rounds.keys import schedule_key

__all__ = ["Adaptive", "Asynchronous", "Given", "Random", "Sequential", "Synchronous"]
ORDERS = ("fixed", "random")
# The compiled loop writes its log into an array of fixed length, the most rounds of one call. A
# longer one takes memory in every run, however short; a shorter one returns to Python more often.
CHUNK = 1024
# Visits that one call can log, about: 4 MB an array of one number a visit.
VISITS = 2**20


def __dir__() -> list[str]:
    return __all__


class Schedule(NamedTuple):
    """The rule by which silos take part in steps, as pure functions.

    A run in which all silos take part in every round has no schedule. Under a schedule every silo
    must take part some time, or its data count for nothing.
    """

    steps: int  # updates of the server in a round
    size: int  # participants of each update
    # The first carry, by a key: arrays that are handed on from round to round in a run's state.
    init: Callable[[Array], Any]
    # (key, round, carry) -> (who, carry): the silos that take part in each step of a round,
    # (steps, size) int, distinct within a step. The key is the same in all rounds.
    visits: Callable[[Array, Array, Any], tuple[Array, Any]]
    num_silos: int
    # Whether ``visits`` does not read the carry, so that the participants of many rounds can be
    # drawn ahead.
    ahead: bool = False
    # Whether replies are used one by one in the order in which they come, by the real clock. Then
    # nobody calls ``visits``, and silos must be in processes of their own.
    by_arrival: bool = False


@dataclass(frozen=True)
class Sequential:
    """One silo after the other; a round is one pass.

    Parameters
    ----------
    order : {"fixed", "random"} or sequence of int
        ``"fixed"``: by number. ``"random"``: a new random order in each round. Or an order that
        names every silo.

    Examples
    --------
    >>> import numpyro_fed as nf
    >>> nf.schedules.Sequential(order="random")
    Sequential(order='random')
    """

    order: str | Sequence[int] = "fixed"

    def build(self, num_silos: int) -> Schedule:
        """Return the schedule for ``num_silos`` silos; each must come in an order of your own."""
        positive_int("num_silos", num_silos)
        order = self.order
        if isinstance(order, str) and order not in ORDERS:
            raise ValueError(
                f"order={order!r}: expected one of {', '.join(map(repr, ORDERS))}, or a sequence "
                "of silo numbers."
            )

        if order == "random":
            in_random_order = partial(jax.random.permutation, x=num_silos)
            return _stateless(num_silos, num_silos, 1, in_random_order)
        numbers = range(num_silos) if isinstance(order, str) else order
        fixed = _checked_order(num_silos, numbers, "order")
        return _stateless(num_silos, len(fixed), 1, lambda key: jnp.asarray(fixed))

    def damping(self, num_silos: int) -> float:
        """Return a safe damping: 1, which is none."""
        return 1.0


@dataclass(frozen=True)
class Synchronous:
    """All silos at once; a round is one update.

    Examples
    --------
    >>> import numpyro_fed as nf
    >>> nf.schedules.Synchronous().damping(10)
    0.1
    """

    def build(self, num_silos: int) -> None:
        """Return None: all silos take part in every round."""

    def damping(self, num_silos: int) -> float:
        """Return a safe damping: one over the number of silos (Ashman et al. 2022, section 3.3)."""
        return 1 / num_silos


@dataclass(frozen=True)
class Random:
    """``size`` silos at random in each round, all at once.

    Examples
    --------
    >>> import numpyro_fed as nf
    >>> nf.schedules.Random(10).damping(1_000)
    0.1
    """

    size: int

    def __post_init__(self) -> None:
        positive_int("size", self.size)

    def build(self, num_silos: int) -> Schedule:
        """Return the schedule for ``num_silos`` silos; all sets of ``size`` are equally likely."""
        size = self.size
        if size > num_silos:
            raise ValueError(
                f"size={size} silos cannot take part at a time: there are {num_silos}. Take "
                f"between 1 and {num_silos}."
            )

        def subset(key: Array) -> Array:
            # Distinct silos in ascending order, by Floyd's algorithm: its work depends on ``size``
            # alone, where a permutation would cost as much as all silos.
            last = num_silos - size + jnp.arange(size)
            drawn = jax.random.randint(key, (size,), 0, last + 1)

            def add(i: Array, chosen: Array) -> Array:
                return chosen.at[i].set(jnp.where((chosen == drawn[i]).any(), last[i], drawn[i]))

            return jnp.sort(jax.lax.fori_loop(0, size, add, jnp.full(size, -1)))

        return _stateless(num_silos, 1, size, subset)

    def damping(self, num_silos: int) -> float:
        """Return a safe damping: one over the number of participants."""
        # As for all silos at once: k factors change together, none of them knowing of the others.
        return 1 / self.size


@dataclass(frozen=True)
class Given:
    """A table with the participants of each round, which begins again after its last row.

    Parameters
    ----------
    who : (rounds, k) array of int
        Numbers of silos, distinct within a round. All silos come equally often, so that none
        counts for more than others.

    Examples
    --------
    >>> import numpyro_fed as nf
    >>> nf.schedules.Given([[0, 1], [2, 3]]).damping(4)
    0.5
    """

    who: Sequence[Sequence[int]]

    def build(self, num_silos: int) -> Schedule:
        """Return the schedule for ``num_silos`` silos."""
        table = np.asarray(self.who)
        if table.ndim != 2 or not table.size or table.dtype.kind not in "iu":
            raise ValueError(
                f"who must hold as many silo numbers for each round, got {self.who!r:.60}. Pass a "
                f"list of lists of whole numbers from 0 to {num_silos - 1}."
            )
        _checked_order(num_silos, table.ravel(), "who")
        rows = table.tolist()
        if repeated := [i for i, row in enumerate(rows) if len(set(row)) < len(row)]:
            raise ValueError(f"who has a silo twice in round {repeated[0]}: {rows[repeated[0]]}.")
        # In SFVI each visit counts J / k times, whoever is visited: only equal counts are unbiased.
        counts = np.bincount(table.ravel(), minlength=num_silos)
        if counts.min() < counts.max():
            most, least = int(counts.argmax()), int(counts.argmin())
            raise ValueError(
                f"who has silo {most} {counts[most]} times and silo {least} {counts[least]} times: "
                "the data of one would count for more than those of the other. Let all come "
                "equally often."
            )

        return Schedule(
            steps=1,
            size=table.shape[1],
            init=lambda key: (),
            visits=lambda key, round, carry: (jnp.asarray(table)[round % len(table)][None], carry),
            num_silos=num_silos,
            ahead=True,
        )

    def damping(self, num_silos: int) -> float:
        """Return a safe damping: one over the number of participants."""
        return 1 / len(self.who[0])


@dataclass(frozen=True)
class Asynchronous:
    """Each silo works at its own speed, from the posterior that it received after its last reply.

    A round has as many replies as there are silos. In one process their order is a function of the
    run's key and not of the data. Over a :class:`numpyro_fed.Federation` the clock is the real one:
    each reply is used as it arrives, and the silo is asked again at once, so that nobody waits for
    the slowest, and numbers depend on the order. The result has the order.

    A silo that replies more often counts for more in ``losses``, and in the gradients of shared
    parameters (``numpyro.param``), as if it had more rows. The posterior does not depend on how
    often a silo replies: its factor is the same.

    Parameters
    ----------
    seconds : sequence of float or callable, optional
        The mean duration of each silo's work, exponentially distributed; all alike by default. Or
        ``(key, silo) -> seconds``, which draws the duration of one piece of work. Not used over a
        federation.

    Examples
    --------
    >>> import numpyro_fed as nf
    >>> nf.schedules.Asynchronous(seconds=[1.0, 1.0, 5.0]).seconds[2]
    5.0
    """

    seconds: Sequence[float] | Callable[[Array, Array], Array] | None = None

    def build(self, num_silos: int) -> Schedule:
        """Return the schedule for ``num_silos`` silos."""
        seconds = [1.0] * num_silos if self.seconds is None else self.seconds
        silos = jnp.arange(num_silos)
        # A function of the user is tried on one key.
        tried = (
            jax.vmap(seconds, (None, 0))(jax.random.key(0), silos) if callable(seconds) else seconds
        )
        durations = np.asarray(tried)
        if durations.shape != (num_silos,) or durations.dtype.kind not in "fiu":
            raise ValueError(
                f"seconds must hold one positive number for each of {num_silos} silos, got shape "
                f"{durations.shape} and dtype {durations.dtype}. Pass a list of mean durations, or "
                "a function (key, silo) -> seconds that returns a scalar."
            )
        bad = np.flatnonzero(~((durations > 0) & (durations < np.inf)))
        if bad.size:
            raise ValueError(
                f"seconds must be positive and finite, got {durations[bad[0]]} at silo {bad[0]}. A "
                "silo that is never done should be left out of the list of silos."
            )

        def duration(key: Array, silo: Array, job: Array) -> Array:
            key = jax.random.fold_in(jax.random.fold_in(key, silo), job)
            if callable(seconds):
                return seconds(key, silo)
            return jnp.asarray(durations, float)[silo] * jax.random.exponential(key)

        # Carried on: when each silo finishes its present job, from the end of the last round, and
        # how many it has finished.
        def init(key: Array) -> tuple[Array, Array]:
            jobs = jnp.zeros(num_silos, jnp.int32)
            return jax.vmap(duration, (None, 0, 0))(key, silos, jobs) * 1.0, jobs

        def visits(key: Array, round: Array, carry: tuple[Array, Array]) -> tuple[Array, Any]:
            def event(carry: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], Array]:
                finish, jobs = carry
                silo = jnp.argmin(finish)
                jobs = jobs.at[silo].add(1)
                return (finish.at[silo].add(duration(key, silo, jobs[silo])), jobs), silo

            # Times are counted from here: a clock that only grew would lose its digits in float32.
            finish, jobs = carry
            carry, who = jax.lax.scan(event, (finish - finish.min(), jobs), None, num_silos)
            return who[:, None], carry

        return Schedule(num_silos, 1, init, visits, num_silos)

    def damping(self, num_silos: int) -> float:
        """Return a safe damping: one over the number of silos, since all work at once."""
        return 1 / num_silos


@dataclass(frozen=True)
class ByArrival:
    """The schedule that stands for :class:`Asynchronous` where silos are in other processes."""

    def build(self, num_silos: int) -> Schedule:
        """Return the schedule for ``num_silos`` silos, whose replies are used as they arrive."""
        return Sequential().build(num_silos)._replace(by_arrival=True)

    def damping(self, num_silos: int) -> float:
        """Return a safe damping: one over the number of silos, since all work at once."""
        return 1 / num_silos


@dataclass(frozen=True)
class Adaptive:
    """A damping that is halved for an improper update, and doubled again afterwards.

    Parameters
    ----------
    damping : float
        The first damping, which is also the largest, in (0, 1].

    Examples
    --------
    >>> import numpyro_fed as nf
    >>> nf.PVI(lambda y: None, schedule="synchronous", damping=nf.schedules.Adaptive(0.5)).damping
    Adaptive(damping=0.5)
    """

    damping: float

    def __post_init__(self) -> None:
        if not 0 < self.damping <= 1:
            raise ValueError(f"damping must be in (0, 1], got {self.damping}.")


Spec = Sequential | Synchronous | Random | Given | Asynchronous | ByArrival
NAMES: dict[str, Spec] = {
    "sequential": Sequential(),
    "synchronous": Synchronous(),
    "asynchronous": Asynchronous(),
}


def named(spec: str | Spec) -> Spec:
    """Return the settings of a schedule, from its name or as they are."""
    if isinstance(spec, str) and spec in NAMES:
        return NAMES[spec]
    if isinstance(spec, Spec):
        return spec
    raise ValueError(
        f"schedule={spec!r}: expected one of {sorted(NAMES)}, or one of numpyro_fed.schedules."
        "Sequential(order), Synchronous(), Random(size), Given(who), Asynchronous(seconds)."
    )


def in_step(spec: str | Spec) -> Sequential | Synchronous | Random | Given:
    """Return the same for methods by gradients; they refuse asynchronous schedules."""
    chosen = named(spec)
    if isinstance(chosen, Asynchronous | ByArrival):
        raise ValueError(
            "schedule='asynchronous': gradients must be of where the step is taken. Use "
            "schedules.Random(size), or PVI, whose silos may answer late."
        )
    if isinstance(chosen, Sequential) and not isinstance(chosen.order, str):
        # Each step is scaled up to all silos: a silo that comes twice would count twice.
        visits = Counter(np.ravel(chosen.order).tolist())
        if len(set(visits.values())) > 1:
            often, seldom = max(visits, key=visits.__getitem__), min(visits, key=visits.__getitem__)
            raise ValueError(
                f"order holds silo {often} {visits[often]} times and silo {seldom} "
                f"{visits[seldom]} times, so that the rows of silo {often} would count more. Let "
                "every silo come equally often, or use PVI, where it makes no difference."
            )
    return chosen


def chunk_of(schedule: Schedule | None) -> int:
    """Return how many rounds one call of ``advance`` can log."""
    if schedule is None:
        return CHUNK
    return max(1, min(CHUNK, VISITS // (schedule.steps * schedule.size)))


def init_schedule(schedule: Schedule | None, key: Array, num_silos: int) -> Any:
    """Return the first ``State.schedule`` of a run."""
    if schedule is None:
        return ()
    if schedule.num_silos != num_silos:
        raise ValueError(
            f"the schedule is for {schedule.num_silos} silos, but there are {num_silos}. Build it "
            "for as many silos as are passed to run."
        )
    return schedule.init(schedule_key(key))


def visits(schedule: Schedule, key: Array, round: Array, carry: object) -> tuple[Array, Any]:
    """Return who takes part in each step (steps, size), and the schedule's next carry."""
    who, carry = schedule.visits(schedule_key(key), round, carry)
    return jnp.asarray(who, jnp.int32), drop_weak_types(carry)


def _stateless(num_silos: int, steps: int, size: int, who: Callable[[Array], Array]) -> Schedule:
    """Return a schedule without a carry; ``who`` reads the round's key."""
    return Schedule(
        steps,
        size,
        lambda key: (),
        # The key is the same in all rounds; the round's own comes from its number.
        lambda key, round, carry: (who(jax.random.fold_in(key, round)).reshape(steps, size), carry),
        num_silos,
        ahead=True,
    )


def _checked_order(num_silos: int, order: ArrayLike | Sequence[int], name: str) -> np.ndarray:
    """Return a fixed order as an array; refuse one with unknown numbers or without some silo."""
    numbers = np.asarray(order)
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
        raise ValueError(
            f"{name} must be a sequence of silo numbers, got {order!r:.60}. Pass a list of whole "
            f"numbers from 0 to {num_silos - 1}."
        )
    silos, there = set(range(num_silos)), set(numbers.tolist())
    if unknown := sorted(there - silos):
        raise ValueError(
            f"{name} holds {_listed(unknown)}, but silos are numbered 0 to {num_silos - 1}. Leave "
            "out what is not a silo."
        )
    if missing := sorted(silos - there):
        raise ValueError(
            f"{name} never visits silo {_listed(missing)}, whose data would count for nothing. Let "
            "every silo come at least once, or leave it out of the list of silos."
        )
    return numbers


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:10]))
    return shown if len(numbers) <= 10 else f"{shown}, ... ({len(numbers)} of them)"
