"""Schedules: who takes part in a round, and in which order.

A schedule is a record of pure functions (:class:`Schedule`). The functions here build them: in
turn, at random, as a table says, and asynchronously.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_fed.errors import positive_int

Carry = TypeVar("Carry")

ORDERS = ("fixed", "random", "largest_change")


class Schedule(NamedTuple, Generic[Carry]):
    """The rule by which silos take part in steps, as pure functions.

    A run in which all silos take part in every round has no schedule. Under a schedule every silo
    must take part some time, or its data count for nothing; the builders below refuse a fixed
    order that leaves one out.

    Attributes
    ----------
    steps : int
        Updates of the server in a round.
    size : int
        Participants of each update.
    init : key -> carry
        The first carry: arrays that are handed on from round to round in the run's state.
    visits : (key, round, carry, change) -> (who, carry)
        The silos that take part in each step of a round, (steps, size) int, distinct within a
        step. ``change`` (num_silos,) is the last ``Info.change`` of a step in which a silo took
        part alone, infinite before the first. The key is the same in all rounds.
    num_silos : int
        The number of silos.
    ahead : bool
        Whether ``visits`` reads neither the carry nor ``change``, so that the participants of
        many rounds can be drawn ahead.
    by_arrival : bool
        Whether replies are used one by one in the order in which they come, by the real clock. Then
        nobody calls ``visits``, and silos must be in processes of their own.
    """

    steps: int
    size: int
    init: Callable[[Array], Carry]
    visits: Callable[[Array, Array, Carry, Array], tuple[Array, Carry]]
    num_silos: int
    ahead: bool = False
    by_arrival: bool = False


def in_turn(num_silos: int, order: str | Sequence[int] = "fixed") -> Schedule[tuple[()]]:
    """Return the schedule in which a round visits one silo after the other.

    Parameters
    ----------
    num_silos : int
    order : {"fixed", "random", "largest_change"} or sequence of int
        ``"fixed"``: by number. ``"random"``: a new random order in each round.
        ``"largest_change"``: those first that changed the server's state most when they last took
        part. Or an order of your own, in which a silo may come twice.

    Raises
    ------
    ValueError
        For an order that is not known, or that leaves out a silo.
    """
    positive_int("num_silos", num_silos)
    if isinstance(order, str) and order not in ORDERS:
        raise ValueError(
            f"order={order!r}: expected one of {', '.join(map(repr, ORDERS))}, or a sequence of "
            "silo numbers."
        )
    if order == "random":
        return _stateless(
            num_silos, num_silos, 1, lambda key, _: jax.random.permutation(key, num_silos)
        )
    if order == "largest_change":
        return _stateless(
            num_silos,
            num_silos,
            1,
            lambda _, change: jnp.argsort(change, descending=True),
            ahead=False,
        )
    numbers = range(num_silos) if isinstance(order, str) else order
    fixed = _checked_order(num_silos, numbers)
    return _stateless(num_silos, len(fixed), 1, lambda key, change: jnp.asarray(fixed))


def at_random(num_silos: int, size: int) -> Schedule[tuple[()]]:
    """Return the schedule that draws ``size`` silos for each round, all sets equally likely.

    Raises
    ------
    ValueError
        If ``size`` is not among 1 to ``num_silos``.
    """
    positive_int("num_silos", num_silos)
    positive_int("size", size)
    if size > num_silos:
        raise ValueError(
            f"size={size} silos cannot take part at a time: there are {num_silos}. Take between 1 "
            f"and {num_silos}."
        )

    def subset(key: Array, change: Array) -> Array:
        """Return distinct silos in ascending order, by Floyd's algorithm.

        Its work depends on ``size`` alone, where a permutation would cost as much as all silos.
        """
        last = num_silos - size + jnp.arange(size)
        drawn = jax.random.randint(key, (size,), 0, last + 1)

        def add(i: Array, chosen: Array) -> Array:
            return chosen.at[i].set(jnp.where((chosen == drawn[i]).any(), last[i], drawn[i]))

        return jnp.sort(jax.lax.fori_loop(0, size, add, jnp.full(size, -1)))

    return _stateless(num_silos, 1, size, subset)


def given(num_silos: int, who: ArrayLike | Sequence[Sequence[int]]) -> Schedule[tuple[()]]:
    """Return the schedule in which row ``i`` of ``who`` (rounds, k) lists the silos of round ``i``.

    After the last row it begins again.

    Raises
    ------
    ValueError
        For an array that is not of silos' numbers, a silo twice in a round, or silos of which some
        come more often than others.
    """
    positive_int("num_silos", num_silos)
    table = np.asarray(who)
    if table.ndim != 2 or not table.size or table.dtype.kind not in "iu":
        raise ValueError(
            f"who must hold as many silo numbers for each round, got {who!r:.60}. Pass a list of "
            f"lists of whole numbers from 0 to {num_silos - 1}."
        )
    _checked_order(num_silos, table.ravel().tolist(), "who")
    if repeated := [i for i, row in enumerate(table.tolist()) if len(set(row)) < len(row)]:
        raise ValueError(
            f"who has a silo twice in round {repeated[0]}: {table[repeated[0]].tolist()}."
        )
    # In SFVI each visit counts J / k times, whoever is visited: only equal counts are unbiased.
    counts = np.bincount(table.ravel(), minlength=num_silos)
    if counts.min() < counts.max():
        most, least = int(counts.argmax()), int(counts.argmin())
        raise ValueError(
            f"who has silo {most} {counts[most]} times and silo {least} {counts[least]} times: the "
            "data of one would count for more than those of the other. Let all come equally often."
        )

    def visits(
        key: Array, round: Array, carry: tuple[()], change: Array
    ) -> tuple[Array, tuple[()]]:
        return jnp.asarray(table)[round % len(table)][None], carry

    return Schedule(1, table.shape[1], lambda key: (), visits, num_silos, ahead=True)


class Clock(NamedTuple):
    """The carry of the asynchronous schedule.

    Attributes
    ----------
    finish : (num_silos,)
        The time at which each silo finishes its present job, from the end of the last round.
    jobs : (num_silos,) int
        How many jobs each silo has finished.
    """

    finish: Array
    jobs: Array


def asynchronous(
    num_silos: int, seconds: Sequence[float] | Callable[[Array, Array], Array]
) -> Schedule[Clock]:
    """Return the schedule of silos that work all the time and reply one by one.

    Each silo works at its own pace and takes part, alone, when it finishes a job; then it begins
    the next one. A round has as many such events as there are silos. Their order is a function of
    the run's key alone.

    Parameters
    ----------
    num_silos : int
    seconds : sequence of float (num_silos,), or (key, silo) -> seconds
        The mean duration of each silo's jobs, which are exponentially distributed; or a function
        that draws the duration of one job.

    Raises
    ------
    ValueError
        For durations that are not positive and finite, or not one for each silo.

    Examples
    --------
    A silo whose jobs take log-normal times, twice as long at odd numbers:

    >>> import jax, jax.numpy as jnp
    >>> from numpyro_fed.runtime.schedule import asynchronous
    >>> def seconds(key, silo):
    ...     return (1 + silo % 2) * jnp.exp(0.5 * jax.random.normal(key))
    >>> asynchronous(4, seconds).steps
    4
    """
    positive_int("num_silos", num_silos)
    silos = jnp.arange(num_silos)
    # A function of the user is tried on one key.
    drawn = jax.vmap(seconds, (None, 0))(jax.random.key(0), silos) if callable(seconds) else seconds
    means = _checked_durations(drawn, num_silos)

    def draw(key: Array, silo: Array) -> Array:
        if callable(seconds):
            return seconds(key, silo)
        return jnp.asarray(means, float)[silo] * jax.random.exponential(key)

    def duration(key: Array, silo: Array, job: Array) -> Array:
        return draw(jax.random.fold_in(jax.random.fold_in(key, silo), job), silo)

    def init(key: Array) -> Clock:
        jobs = jnp.zeros(num_silos, jnp.int32)
        return Clock(jax.vmap(duration, (None, 0, 0))(key, silos, jobs) * 1.0, jobs)

    def visits(key: Array, round: Array, clock: Clock, change: Array) -> tuple[Array, Clock]:
        def event(clock: Clock, _: None) -> tuple[Clock, Array]:
            silo = jnp.argmin(clock.finish)
            jobs = clock.jobs.at[silo].add(1)
            finish = clock.finish.at[silo].add(duration(key, silo, jobs[silo]))
            return Clock(finish, jobs), silo

        # Times are counted from here: a clock that only grew would lose its digits in float32.
        now = clock.finish.min()
        clock, who = jax.lax.scan(event, clock._replace(finish=clock.finish - now), None, num_silos)
        return who[:, None], clock

    return Schedule(num_silos, 1, init, visits, num_silos)


def by_arrival(num_silos: int) -> Schedule[tuple[()]]:
    """Return the schedule of silos in other processes, whose replies are used as they arrive."""

    def visits(
        key: Array, round: Array, carry: tuple[()], change: Array
    ) -> tuple[Array, tuple[()]]:
        raise TypeError("who takes part is known when replies arrive, and not before.")

    return Schedule(num_silos, 1, lambda key: (), visits, num_silos, by_arrival=True)


def _stateless(
    num_silos: int,
    steps: int,
    size: int,
    who: Callable[[Array, Array], Array],
    ahead: bool = True,
) -> Schedule[tuple[()]]:
    """Return a schedule without a carry; ``who`` reads the round's key and ``change``."""

    def visits(
        key: Array, round: Array, carry: tuple[()], change: Array
    ) -> tuple[Array, tuple[()]]:
        # The key is the same in all rounds; the round's own comes from its number.
        return who(jax.random.fold_in(key, round), change).reshape(steps, size), carry

    return Schedule(steps, size, lambda key: (), visits, num_silos, ahead)


def _checked_order(num_silos: int, order: Sequence[int], name: str = "order") -> np.ndarray:
    """Return a fixed order as an array; refuse one with unknown numbers or without some silo."""
    numbers = np.asarray(order)
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
        raise ValueError(
            f"{name} must be a sequence of silo numbers, got {order!r:.60}. Pass a list of whole "
            f"numbers from 0 to {num_silos - 1}."
        )
    unknown = sorted(set(numbers.tolist()) - set(range(num_silos)))
    if unknown:
        raise ValueError(
            f"{name} holds {_listed(unknown)}, but silos are numbered 0 to {num_silos - 1}. Leave "
            "out what is not a silo."
        )
    missing = sorted(set(range(num_silos)) - set(numbers.tolist()))
    if missing:
        raise ValueError(
            f"{name} never visits silo {_listed(missing)}, whose data would count for nothing. Let "
            "every silo come at least once, or leave it out of the list of silos."
        )
    return numbers


def _checked_durations(drawn: ArrayLike | Sequence[float], num_silos: int) -> np.ndarray:
    durations = np.asarray(drawn)
    if durations.shape != (num_silos,) or durations.dtype.kind not in "fiu":
        raise ValueError(
            f"seconds must hold one positive number for each of {num_silos} silos, got shape "
            f"{durations.shape} and dtype {durations.dtype}. Pass a list of mean durations, or a "
            "function (key, silo) -> seconds that returns a scalar."
        )
    bad = np.flatnonzero(~((durations > 0) & (durations < np.inf)))
    if bad.size:
        raise ValueError(
            f"seconds must be positive and finite, got {durations[bad[0]]} at silo {bad[0]}. A "
            "silo that is never done should be left out of the list of silos."
        )
    return durations


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:10]))
    return shown if len(numbers) <= 10 else f"{shown}, ... ({len(numbers)} of them)"
