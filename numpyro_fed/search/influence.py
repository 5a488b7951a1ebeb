r"""How far each silo moves the posterior, and whether it contradicts the others.

At the posterior's mean :math:`\hat z` the log likelihood :math:`\ell_j` of silo ``j`` has the
gradient :math:`g_j` and the negative Hessian :math:`A_j`; all factors together, with the prior,
have :math:`g` and :math:`\Lambda`. Measured from the highest point of their sum, :math:`g = 0`.
Without silo ``j`` the precision is :math:`\Lambda_{-j} = \Lambda - A_j`, and the mean moves by

.. math::
    \Delta_j = -\Lambda_{-j}^{-1} g_j .

Whether the silo contradicts the others is the likelihood ratio of one set of globals for all
against a set of its own, where the others' log density is a parabola,

.. math::
    D_j = 2 \big(\max_z \ell_j(z) - \ell_j(\hat z)\big) + g_j' \Lambda_{-j}^{-1} g_j .

It is :math:`\chi^2` if all rows are of one model, with as many degrees of freedom as there are
directions of which the silo knows something. Between normal factors it is the node-splitting of
Marshall and Spiegelhalter (2007). The silo's own likelihood is taken as it is, since that of few
rows is far from a parabola: with parabolas for both, honest silos of 20 rows were flagged in six of
25 linear regressions (docs/results/processes_and_messages.md).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from scipy.stats import chi2, f

from numpyro_fed.basics import display
from numpyro_fed.basics.errors import optional
from numpyro_fed.data.silo_data import SiloData, label, names_or_numbers
from numpyro_fed.guides.laplace import START, Laplace
from numpyro_fed.rounds.exchange import AskSilos, Combine, Exchange, FederatedAlgorithm, Reply
from numpyro_fed.rounds.names import INFLUENCE
from numpyro_fed.rounds.stacks import StackedExchange
from numpyro_fed.rounds.states import Shared
from numpyro_fed.search.expand import Expand, Prior, SearchState, SiloExpansion, flat_size, shape
from numpyro_fed.search.mode_search import SEARCHED_UP_TO
from numpyro_fed.search.own_modes import climb_to_own_modes
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.site_table import Theta

MOST_GLOBALS = SEARCHED_UP_TO  # silos send Hessians, as in the search for the mode
# Precision of a silo along a direction, of that of all others, below which it knows nothing there:
# rounding in single precision is 1e-7 of the whole.
NOTHING = 1e-5
# Least eigenvalue of a precision of many factors, where the total has one: a direction that nothing
# but one silo knows.
UNKNOWN = 1e-9
# Sds of the posterior that a proposal without a silo may be wide, along a direction that hardly
# anything but the silo knows: the prior's own width may be a million of them.
WIDEST = 30.0
NO_PEAK = 0.02  # the same where a silo is accused: beyond it the peak is another one
LARGEST = 50.0  # likelihood ratio of a row, in nats, above which nothing changes
LEVEL = 0.01  # of all silos together: honest ones are flagged in one fit of a hundred


State = TypeVar("State")  # of a silo, as the fitted algorithm has it


class PlaceToTell(NamedTuple):
    """The server's message: shared parameters, and a place of the globals (n,)."""

    theta: Theta
    z_G: np.ndarray

    def flat(self) -> np.ndarray:
        """Return all numbers as one vector."""
        return np.concatenate([*(np.ravel(a) for a in jax.tree.leaves(self.theta)), self.z_G])


class SiloPull(NamedTuple):
    """A silo's message about its log likelihood.

    ``gradient`` (n,).
    ``curvature`` (n, n): Minus the Hessian.
    ``gain`` (): How much higher the log likelihood is at the silo's own mode; -1 where it came to
        none.
    """

    gradient: np.ndarray
    curvature: np.ndarray
    gain: np.ndarray


class Factors(NamedTuple):
    """The messages of all silos, with a leading axis, and the prior's gradient and curvature."""

    silos: SiloPull
    prior_gradient: np.ndarray
    prior_curvature: np.ndarray


class Influence:
    """The exchange in which each silo tells the shape of its own log likelihood at one place.

    Silos integrate their own latents as in the search for the mode, whose programs they use.
    """

    def __init__(
        self, fm: FederatedModel, fitted: FederatedAlgorithm[Any, Any], num_silos: int
    ) -> None:
        self.model, self.fitted, self.num_silos, n = fm, fitted, num_silos, fm.dim
        self.expand, self.prior = Expand(fm), Prior(fm, np.zeros(0, int))
        self.exchange: Exchange[Any, Any, Any] = StackedExchange(
            INFLUENCE,
            self.reply,
            combine=Combine.GATHER,
            settings=json.dumps({"num_silos": num_silos}),
            messages=lambda: (
                PlaceToTell(jax.eval_shape(lambda: fm.init_theta(jax.random.key(0))), shape(n)),
                SiloPull(shape(n), shape(n, n), shape()),
            ),
        )

    @np.errstate(all="ignore")
    def reply(
        self, noise: object, down: PlaceToTell, state: State, data: SiloData
    ) -> tuple[Reply[SiloPull], State]:
        """Return the replies of a stack of silos, and their states as they are."""
        x, f = down.flat(), flat_size(self.model) - self.model.dim
        private = jax.vmap(lambda one: self.fitted.private(one).theta)(state)
        of_one = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), data)
        size = len(jax.tree.leaves(data)[0])
        sizes = jax.eval_shape(Laplace(self.model).start, of_one)
        z_L = {p: np.full((size, 1, *a.shape), START, a.dtype) for p, a in sizes.items()}
        at = SearchState(z_L, SiloExpansion(x, x, x), private, np.zeros((size, 1)))
        places = np.broadcast_to(x, (size, 1, len(x)))
        never = np.full((size, 1), -np.inf, x.dtype)
        here, modes = self.expand(places, never, at, data)
        # With its share of the prior, as in the first exchange of a search, so that there is a mode
        # in directions of which the silo knows nothing.
        at, share = at._replace(z_L=modes), 1 / self.num_silos
        own, log_likelihood, _ = climb_to_own_modes(
            self.expand, self.prior, share, places, at, data, fixed=f
        )
        gain = log_likelihood - here.value
        known = (own.arrived > 0) & np.isfinite(gain)
        told = SiloPull(
            here.gradient[:, 0, f:],
            here.curvature[:, 0, f:, f:],
            np.where(known, np.maximum(gain, 0.0), -1.0)[:, 0],
        )
        return Reply(told, np.ones(size, bool)), state

    def ask(self, ask: AskSilos, shared: Shared, z_G: np.ndarray) -> Factors:
        """Return the factors at a place (n,) of the globals, in one exchange."""
        theta, f = jax.tree.map(np.asarray, shared.theta), flat_size(self.model) - self.model.dim
        place = PlaceToTell(theta, np.asarray(z_G, jnp.result_type(float)))
        told = ask(self.exchange, place)
        x = place.flat()
        prior = self.prior(np.zeros((1, 0, 0), x.dtype), x[None])
        return Factors(told, prior.gradient[0, f:], prior.curvature[0, f:, f:])


@dataclass(frozen=True, eq=False)
class SiloTable:
    """The influence of each silo on a posterior; prints as a table.

    Attributes
    ----------
    shift : array (num_silos,)
        How far the mean of a global moves when the silo is left out, the farthest one, in its
        posterior standard deviations. A silo with much data, or the only one with some data, may
        move it far and be right. Parabolas tell it, which go too far along the log of a scale of
        few silos' effects: ``leave_out()`` weighs draws. NaN, "not known" in the table, where the
        log density of the others has no peak near the posterior's mean, so that no mean of theirs
        can be told: another silo may be the one that is wrong.
    conflict : array (num_silos,)
        The probability that a silo with rows of the same model disagrees with all others as much.
    flagged : tuple of int
        Numbers of silos that contradict the others: the one with the lowest ``conflict`` first,
        then of those that are left, until none is below one in a hundred, divided by the number of
        silos. Two that contradict each other are both flagged.
    names : tuple of str
        The names of silos; empty where they have none.
    """

    shift: np.ndarray
    conflict: np.ndarray
    flagged: tuple[int, ...] = field(default=())
    names: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def words(self) -> str:
        """Return in a sentence which silo contradicts the others most; empty if none does."""
        if not self.flagged:
            return ""
        first = self.flagged[0]
        who = f"S{label(first, self.names)[1:]} contradicts the others"
        if len(self.shift) == 2:
            who = "The two silos contradict each other"
        # Beside a silo that is wrong, honest ones may be flagged as well.
        return f"{who} (p = {self.conflict[first]:.1g}): look at units and columns there."

    def plot(self, *, names: Sequence[str] | None = None) -> Any:
        """Return a figure of both numbers, with the silos that contradict the others in red.

        Parameters
        ----------
        names : list of str, optional
            A name for each silo, in their order; by default their own, or their numbers.

        Returns
        -------
        matplotlib.figure.Figure
        """
        labels = display.labels_of(len(self.shift), names, self.names)
        return display.conflicts(self.shift, self.conflict, self.flagged, LEVEL, labels)

    def to_frame(self) -> Any:
        """Return the table as a pandas DataFrame, a row for each silo."""
        marks = [j in self.flagged for j in range(len(self.shift))]
        columns = {"shift": self.shift, "conflict": self.conflict, "flagged": marks}
        index = self.names or None
        return optional("pandas").DataFrame(columns, index=index).rename_axis("silo")

    def __str__(self) -> str:
        who = names_or_numbers(self.names, len(self.shift))
        width = max(6, *map(len, who))
        lines = [f"{'silo':>{width}} {'shift':>9} {'conflict':>9}"]
        for j, (shift, p) in enumerate(zip(self.shift, self.conflict, strict=True)):
            mark = "  contradicts the others" if j in self.flagged else ""
            told = "not known" if np.isnan(shift) else f"{shift:#.3g}".rstrip(".")
            lines.append(f"{who[j]:>{width}} {told:>9} {p:#9.2g}{mark}")
        return "\n".join(lines)

    __repr__ = __str__


class Whitened(NamedTuple):
    """Parabolas of prior and silos, from the highest point of their sum, in its standard units.

    The columns of ``root`` (n, n) are uncorrelated directions of one sd, and ``step`` (n,) leads
    from the place at which silos were asked to the highest point. The rest are gradients and
    negative Hessians of the silos (num_silos, n), (num_silos, n, n), and of the prior.
    """

    root: np.ndarray
    step: np.ndarray
    g: np.ndarray
    A: np.ndarray
    prior_g: np.ndarray
    prior_A: np.ndarray

    @classmethod
    def of(cls, factors: Factors) -> Whitened:
        """Return the parabolas that silos have told."""
        g, A, _ = (np.asarray(a, np.float64) for a in factors.silos)
        prior_g = np.asarray(factors.prior_gradient, np.float64)
        prior_A = np.asarray(factors.prior_curvature, np.float64)
        # ``root' P root`` is the identity, for the precision P of globals in any units.
        total = A.sum(0) + prior_A
        unit = np.sqrt(np.maximum(np.abs(np.diag(total)), np.finfo(np.float64).tiny))
        values, axes = np.linalg.eigh(total / np.outer(unit, unit))
        root = axes / np.sqrt(np.maximum(values, UNKNOWN)) / unit[:, None]
        step = root @ (root.T @ (g.sum(0) + prior_g))
        g, prior_g = (g - A @ step) @ root, (prior_g - prior_A @ step) @ root
        return cls(root, step, g, root.T @ A @ root, prior_g, root.T @ prior_A @ root)

    def cavity(self, others: list[int]) -> np.ndarray:
        """Return the precision of the prior and some silos, made positive."""
        values, axes = np.linalg.eigh(self.prior_A + self.A[others].sum(0))
        return (axes * np.maximum(values, UNKNOWN)) @ axes.T

    def without(self, silo: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the highest point without a silo, from where silos were asked, and a covariance.

        It is no wider along a direction than WIDEST sds of the posterior.
        """
        others = [i for i in range(len(self.g)) if i != silo]
        values, axes = np.linalg.eigh(self.cavity(others))
        values = np.maximum(values, WIDEST**-2.0)
        top = axes @ (axes.T @ (self.prior_g + self.g[others].sum(0)) / values)
        half = self.root @ (axes / np.sqrt(values))
        return self.step + self.root @ top, half @ half.T


def table_of(
    factors: Factors, effects_of_silos: bool = False, rows: Sequence[int] | None = None
) -> SiloTable:
    """Return the table from the parabolas of prior and silos at one place.

    With ``effects_of_silos`` there are latents of each silo under a global scale. With the number
    of ``rows`` of each silo a likelihood ratio of few is judged as that of a normal regression.
    """
    whitened = Whitened.of(factors)
    root, step, g, A, prior_g, prior_A = whitened
    told_g, told_A, gains = (np.asarray(a, np.float64) for a in factors.silos)
    moved = gains - told_g @ step + np.einsum("i,jik,k->j", step, told_A, step) / 2
    gains = np.where(gains < 0, gains, np.maximum(moved, 0.0))
    sds = np.linalg.norm(root, axis=1)
    # Precisions of the others that rounding of the silos' numbers cannot tell from none.
    told = np.asarray(factors.silos.curvature).dtype
    rounding = max(UNKNOWN, 10 * float(np.finfo(told).eps)) if told.kind == "f" else UNKNOWN

    def compared(j: int, kept: list[int]) -> tuple[np.ndarray, float]:
        """Return how far the others' mean is from that with silo ``j``, and the log tail area.

        The first is NaN where it cannot be told.
        """
        others = [i for i in kept if i != j]
        cavity = whitened.cavity(others)
        # At the highest point of the kept factors; with all of them it is the origin.
        top = np.linalg.solve(cavity + A[j], prior_g + g[kept].sum(0))
        gradient = g[j] - A[j] @ top
        # Along a direction in which the others' log density is no peak, theirs is no parabola.
        values, axes = np.linalg.eigh(prior_A + A[others].sum(0))
        lost = axes[:, values <= rounding]
        is_known = (np.einsum("ik,ij,jk->k", lost, A[j], lost) <= NOTHING).all()
        axes = axes[:, values > (UNKNOWN if rows is None else NO_PEAK)]
        of_others = axes.T @ cavity @ axes
        known, directions = scipy.linalg.eigh(axes.T @ A[j] @ axes, of_others)
        along = (directions.T @ axes.T @ gradient) ** 2
        if gains[j] < 0:  # it came to no mode: the parabola says how high one is
            gain = np.sum(along / np.maximum(known, NOTHING)) / 2
        else:
            gain = max(gains[j] - g[j] @ top + top @ A[j] @ top / 2, 0.0)
        distance = 2 * gain + along.sum()
        # Along a direction of which only one side knows something nobody can contradict.
        degrees = max(int(((known > NOTHING) & (known < 1 / NOTHING)).sum()), 1)
        tail = chi2.logsf(distance, degrees)
        if rows is not None:
            free = rows[j] - 2 * degrees
            ratio = np.expm1(min(distance / rows[j], LARGEST)) * free / degrees
            tail = f.logsf(ratio, degrees, free) if free > 0 else 0.0
        if effects_of_silos and others:
            # Their scale is an estimate from the others' effects: along it the distance is one of
            # Student's t. With all directions together the tail is nearly that of F.
            below = len(others) * max(1.0, degrees / 2)
            tail = max(tail, f.logsf(distance / degrees, degrees, below))
        move = np.linalg.solve(cavity, gradient)
        return move if is_known else np.full_like(move, np.nan), float(tail)

    kept = list(range(len(g)))
    all_others = [compared(j, kept) for j in kept]
    shift = [float(np.max(np.abs(root @ move) / sds)) for move, _ in all_others]
    tails, flagged = dict(enumerate(tail for _, tail in all_others)), list[int]()
    limit = np.log(LEVEL / len(g))
    while len(kept) > 1 and min(tails.values()) < limit:
        if len(kept) == 2:
            flagged += kept
            break
        flagged.append(min(tails, key=tails.__getitem__))
        kept.remove(flagged[-1])
        tails = {j: compared(j, kept)[1] for j in kept}
    conflict = np.exp([tail for _, tail in all_others])
    return SiloTable(np.array(shift), conflict, tuple(flagged))
