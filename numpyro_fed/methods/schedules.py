"""Settings for schedules: who takes part in a round, and in which order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jax import Array

from numpyro_fed.errors import positive_int
from numpyro_fed.runtime import schedule
from numpyro_fed.runtime.schedule import Schedule

__all__ = ["Adaptive", "Asynchronous", "Given", "Random", "Sequential", "Synchronous"]


def __dir__() -> list[str]:
    return __all__


@dataclass(frozen=True)
class Sequential:
    """One silo after the other; a round is one pass.

    Parameters
    ----------
    order : {"fixed", "random", "largest_change"} or sequence of int
        ``"fixed"``: by number. ``"random"``: a new random order in each round.
        ``"largest_change"``: those first whose last visit changed the posterior most. Or an order
        that names every silo.

    Examples
    --------
    >>> import numpyro_fed as nf
    >>> nf.schedules.Sequential(order="random")
    Sequential(order='random')
    """

    order: str | Sequence[int] = "fixed"

    def build(self, num_silos: int) -> Schedule[tuple[()]]:
        """Return the schedule for ``num_silos`` silos."""
        return schedule.in_turn(num_silos, self.order)

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

    def build(self, num_silos: int) -> Schedule[tuple[()]]:
        """Return the schedule for ``num_silos`` silos."""
        return schedule.at_random(num_silos, self.size)

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

    def build(self, num_silos: int) -> Schedule[tuple[()]]:
        """Return the schedule for ``num_silos`` silos."""
        return schedule.given(num_silos, self.who)

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

    def build(self, num_silos: int) -> Schedule[schedule.Clock]:
        """Return the schedule for ``num_silos`` silos."""
        seconds = [1.0] * num_silos if self.seconds is None else self.seconds
        return schedule.asynchronous(num_silos, seconds)

    def damping(self, num_silos: int) -> float:
        """Return a safe damping: one over the number of silos, since all work at once."""
        return 1 / num_silos


@dataclass(frozen=True)
class ByArrival:
    """The schedule that stands for :class:`Asynchronous` where silos are in other processes."""

    def build(self, num_silos: int) -> Schedule[tuple[()]]:
        """Return the schedule for ``num_silos`` silos."""
        return schedule.by_arrival(num_silos)

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
