r"""Differential privacy as a budget: what may be spent, what noise follows, what was spent.

A mechanism is :math:`(\epsilon, \delta)`-differentially private if for all data that differ in one
unit, a row or a silo, and all sets ``S`` of outcomes

.. math::
    P(M(D) \in S) \le e^\epsilon P(M(D') \in S) + \delta .

Every release here is a sum of clipped numbers with Gaussian noise. A *noise multiplier* is the
noise's standard deviation, divided by the most that one unit can change the sum.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.special import ndtri

from numpyro_fed.basics import display
from numpyro_fed.basics.errors import FederatedWarning, optional

UNITS = "row", "silo"
NEIGHBOURS = "add", "replace"
TRUSTED = "silo", "sum"
# Above it the bound says nothing: e^50 is more than all probabilities can differ.
MEANINGLESS = 50.0
# Noise multipliers are rounded up by this factor: they are found by a search, in floating point.
MARGIN = 1 + 1e-6
# Sums with noise are rounded to multiples of the noise's sd times this. The last digits of a
# floating-point number tell which numbers were added to it (Mironov 2012); a grid hides them.
GRID = 2.0**-12


class PrivacyWarning(FederatedWarning):
    """A warning that a claim of privacy means little."""


@dataclass(frozen=True)
class Privacy:
    r"""A budget of differential privacy, :math:`(\epsilon, \delta)`, and what it protects.

    Noise follows from the budget and from the exchanges that are planned. The accounting is that of
    the library dp-accounting (extra ``privacy``).

    Parameters
    ----------
    epsilon : float
        The bound on what can be learnt of a unit; below 1 is strong, above 10 weak.
    delta : float
        The probability with which the bound may fail; less than one over the number of units.
    clip : float, optional
        The most that a unit's gradient may be long in the frame of the search. By default a
        quantile of the units' lengths, found privately.
    unit : {"row", "silo"}
        What is protected: each row, with its own latents; or each silo as a whole, for which there
        must be many silos.
    neighbours : {"add", "replace"}
        Whether neighbouring data have one unit more or less, whose numbers are zero there; or
        another unit in its place, which takes twice the noise. The number of units is told in both
        cases.
    trusted : {"silo", "sum"}
        Who sees a reply without its noise: nobody but the silo, which adds all noise itself; or
        whoever adds up the silos' replies, for which each silo adds its share of the noise. The
        second is right in one process, and between processes under secure sums only.

    Raises
    ------
    ValueError
        For numbers and words that make no sense.

    Examples
    --------
    >>> import numpyro_fed as nf
    >>> nf.Privacy(epsilon=1.0, delta=1e-5).unit
    'row'
    """

    epsilon: float
    delta: float
    clip: float | None = None
    unit: str = "row"
    neighbours: str = "add"
    trusted: str = "silo"

    def __post_init__(self) -> None:
        if not self.epsilon > 0:
            raise ValueError(f"epsilon={self.epsilon}: expected a positive number.")
        if not 0 < self.delta < 1:
            raise ValueError(f"delta={self.delta}: expected a number between 0 and 1.")
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise ValueError(f"clip={self.clip}: expected a positive number or None.")
        words = {"unit": UNITS, "neighbours": NEIGHBOURS, "trusted": TRUSTED}
        for name, known in words.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected one of {list(known)}.")
        if self.epsilon > MEANINGLESS:
            warnings.warn(
                f"epsilon={self.epsilon} protects nothing that could be measured: a bound of "
                f"e^{MEANINGLESS:.0f} and more is no bound.",
                category=PrivacyWarning,
                stacklevel=3,
            )

    @property
    def changes(self) -> float:
        """How many units' clipped lengths a sum may change by between neighbouring data."""
        return 2.0 if self.neighbours == "replace" else 1.0

    def noise_share(self, num_silos: int) -> float:
        """Return the part of the noise's sd that each of so many silos adds."""
        return 1.0 if self.trusted == "silo" else 1 / math.sqrt(num_silos)

    def multiplier(self) -> float:
        """Return the noise multiplier of one release that spends the whole budget."""
        accounting = optional("dp_accounting", "privacy")
        return float(accounting.get_sigma_gaussian(self.epsilon, self.delta))

    def multipliers(self, shares: Sequence[float]) -> tuple[float, ...]:
        r"""Return the noise multipliers of releases that spend these shares of the budget.

        Releases with multipliers :math:`\sigma_k` are together as one with
        :math:`\sigma^{-2} = \sum_k \sigma_k^{-2}`. Shares add up to 1.
        """
        whole = self.multiplier() * MARGIN
        return tuple(whole / math.sqrt(share) for share in shares)


class Spent(NamedTuple):
    """The account of a private run: what was spent, and under which conditions; prints as text.

    Attributes
    ----------
    budget : Privacy
    exchanges : tuple of (name, epsilon)
        The epsilon of each kind of exchange by itself, at the budget's delta.
    epsilon : float
        That of all together: of the noise that was added. A bound on what was told is the budget's
        own, since the replies decide how many steps a search makes.
    """

    budget: Privacy
    exchanges: tuple[tuple[str, float], ...]
    epsilon: float

    @classmethod
    def of(cls, budget: Privacy, releases: Sequence[tuple[str, float]]) -> Spent:
        """Return what releases with these names and noise multipliers have spent."""
        names = dict.fromkeys(name for name, _ in releases)
        own = {name: tuple(s for n, s in releases if n == name) for name in names}
        each = tuple((name, epsilon_of(s, budget.delta)) for name, s in own.items())
        return cls(budget, each, epsilon_of(tuple(s for _, s in releases), budget.delta))

    def __str__(self) -> str:
        b = self.budget
        sees = (
            "Each silo adds the noise itself: nobody else has to be trusted."
            if b.trusted == "silo"
            else "Silos add shares of the noise: whoever adds up their replies must be trusted, or "
            "sums be secure."
        )
        other = "one more or less" if b.neighbours == "add" else "one replaced by another"
        parts = ", ".join(f"{name} {epsilon:.3g}" for name, epsilon in self.exchanges)
        return (
            f"The budget that was spent, and that counts: epsilon {b.epsilon:g} at delta "
            f"{b.delta:g}. Neighbouring data have a {b.unit} {other}. All that was sent has the "
            f"noise of epsilon {self.epsilon:.4g}, which is not above the budget ({parts}; alone). "
            f"{sees} Not covered: the number of {b.unit}s, the model and the silos' facts. Whether "
            "to rely on the posterior is said by its verdict."
        )

    def _repr_html_(self) -> str:
        return display.html_words(str(self))


def epsilon_of(multipliers: Sequence[float], delta: float) -> float:
    """Return the epsilon of Gaussian releases with these noise multipliers, at ``delta``.

    Together they are one release of one multiplier, whose bound has a closed form (Balle and Wang
    2018).
    """
    accounting = optional("dp_accounting", "privacy")
    if not multipliers:
        return 0.0
    together = sum(s**-2 for s in multipliers) ** -0.5
    return float(accounting.get_epsilon_gaussian(together, delta))


def normals(shape: tuple[int, ...]) -> np.ndarray:
    """Return standard normals in double precision, by the inverse of their CDF.

    A number takes 64 bits of the operating system, of which one is the sign: in single precision
    whole stretches of the tails would never occur, and a sum that falls into one tells itself.
    """
    bits = np.frombuffer(os.urandom(8 * int(np.prod(shape, dtype=np.int64))), np.uint64)
    tail = ((bits >> np.uint64(11)).astype(float) + 0.5) * 2.0**-54  # in (0, 1/2)
    sign = np.where(bits & np.uint64(1), 1.0, -1.0)
    return (sign * -ndtri(tail)).reshape(shape)


def noisy(total: np.ndarray, sd: np.ndarray) -> np.ndarray:
    """Return an array with Gaussian noise of this sd added, rounded to a grid."""
    grid = sd * GRID
    with np.errstate(all="ignore"):
        return np.asarray(np.round((total + sd * normals(total.shape)) / grid) * grid)
