"""The mode of a posterior, and other modes, from the end of a search.

One exchange more checks that the density falls around the mode as its curvature says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.basics.programs import jit_once, map_in_batches
from numpyro_fed.basics.trees import Numbers, element_name
from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.numerics.gaussian import Curvature
from numpyro_fed.rounds.exchange import AskSilos, Exchange
from numpyro_fed.rounds.names import AROUND_MODE
from numpyro_fed.rounds.stacks import StackedExchange, stacked_reply
from numpyro_fed.search.expand import (
    FEW_COORDINATES,
    ROUNDING_UNITS,
    SIDE_BY_SIDE,
    SearchState,
    columns_at_once,
    effects_of,
    flat_size,
    log_prior_of,
    shape,
    silo_log_likelihood,
    unravelled,
)
from numpyro_fed.search.influence import Factors
from numpyro_fed.search.mode_search import BestPoints, best_start
from numpyro_fed.text.log_density import FederatedModel

# Standard deviations from which on two modes count
# as two: their normal approximations hardly overlap.
MODES_APART = 3.0
SAME_EVIDENCE = 1e-3  # nats within which two modes have the same mass
# Share of the mass below which a missed mode is not reported. A larger value hides small
# modes; a smaller one warns of modes that are none, since shares by Laplace's evidence are rough.
MIN_MASS = 0.02
# Distances from the mode, in sds by the curvature, at which the density is evaluated when a search
# has ended. At 1 and 3 it must fall as the parabola says. 30 is for directions whose curvature is
# no more than rounding, and which may be flat or only very wide.
CHECK_DISTANCES = (30.0, 3.0, 1.0)
# Nats by which a density must have fallen three sds from the mode, where a normal density has
# fallen by 4.5. A heavy tail falls by less than normal; an open direction does not fall at all.
MIN_FALL = 0.1
# A density that repeats is the same after one period and two, up to this share of it in units of
# eps, and differs after a PART of one by TELLS times as much. It is tried ASIDE sds off the mode,
# where it has a slope. A PART of a half or a third would miss a density that repeats
# two or three times in a period: it is the same there, too.
SAME, TELLS, ASIDE, PART = 1e4, 10.0, 0.5, 0.382


class LocalMode(NamedTuple):
    """One of several modes: its place, the negative Hessian there, and Laplace's evidence."""

    z_G: np.ndarray
    curvature: np.ndarray
    log_evidence: float


class OneCopy(NamedTuple):
    """The part of the space in which a density that repeats stands once, around a mode.

    Under a flat prior on an angle the posterior has no total mass, since it is the same after each
    turn; what is known of the angle does not depend on how many turns there are. ``periods`` (dim,)
    are infinite for coordinates that do not repeat.
    """

    centre: np.ndarray
    periods: np.ndarray

    def holds(self, z_G: np.ndarray) -> np.ndarray:
        """Return which draws (n, dim) lie in it (n,)."""
        return (2 * np.abs(z_G - self.centre) <= self.periods).all(-1)

    def copy_of(self, z_G: np.ndarray) -> np.ndarray:
        """Return places (..., dim) after the shifts by whole periods that bring them into it."""
        period = np.where(np.isfinite(self.periods), self.periods, 0.0)
        turns = np.round((z_G - self.centre) / self.periods)
        return z_G - turns * period


@dataclass(frozen=True, eq=False)
class Mode:
    r"""The highest point of the posterior density that was found, unconstrained.

    The density is that of the globals whose prior depends on no other global. Effects, whose prior
    does (``b ~ Normal(mu, tau)`` outside of silo plates), are integrated out by Laplace's method
    and stand at their own mode given the others: an effect and its scale together may have no mode.

    Attributes
    ----------
    sites : dict
        Global latents and deterministic sites at the mode, on their supports.
    theta : dict
        Shared parameters at the mode.
    z_G : (dim,) array
        The globals, unconstrained; the mode is that of their density in this space.
    curvature : (n, n) or (n,) array
        The negative Hessian of the log density, for shared parameters and then ``z_G``; its
        diagonal alone above 300 of them.
    log_evidence : float or None
        Laplace's approximation, :math:`\ell(\hat z) + \tfrac d2 \log 2\pi - \tfrac12 \log\det A`,
        of ``d`` globals with the negative Hessian ``A`` of their log density :math:`\ell`, shared
        parameters as they are; None where a direction is open, or only a diagonal is known.
    num_exchanges : int
        Messages that each silo sent.
    converged : bool
        Whether another step of Newton's method would gain next to nothing, from a place from which
        the density falls in every direction, as one more exchange has seen.
    values : (starts,) array
        The log density at the best place of each start.
    names : tuple of str
        The names of the ``n`` coordinates, such as ``"beta[1]"``.
    flat : tuple of str
        Directions in which the density does not fall: where there is no curvature, or where the
        density has hardly fallen three standard deviations away. Combinations of coordinates, such
        as ``"+0.71 beta[0] -0.71 beta[1]"``, each in units of its own curvature.
    others : tuple of LocalMode
        Other modes at which some of the starts came to rest, three standard deviations and more
        from here, by Laplace's evidence.
    copy : OneCopy, optional
        Where the density stands once, if under a flat prior it is the same after each shift of a
        coordinate (an angle by a turn). Other copies are no other modes, and draws there count for
        nothing.
    factors : Factors, optional
        What each silo has said of its likelihood there: not of silos in other processes.
    """

    sites: dict[str, np.ndarray]
    theta: dict[str, Any]
    z_G: np.ndarray = field(repr=False)
    curvature: np.ndarray = field(repr=False)
    log_evidence: float | None
    num_exchanges: int
    converged: bool
    values: np.ndarray = field(repr=False)
    names: tuple[str, ...] = field(repr=False)
    flat: tuple[str, ...] = field(repr=False)
    others: tuple[LocalMode, ...] = field(default=(), repr=False)
    copy: OneCopy | None = field(default=None, repr=False)
    factors: Factors | None = field(default=None, repr=False)

    @property
    def repeats(self) -> tuple[str, ...]:
        """Return in words which coordinates have copies of the density, and modes of equal mass."""
        words, own = list[str](), self.log_evidence
        equal = [p for p in self.others if own and abs(p.log_evidence - own) < SAME_EVIDENCE]
        if equal:
            words.append(
                f"{1 + len(equal)} modes of the same mass, as where the numbers of states can be "
                "switched: then the moments of each state's own latents mix states (give the "
                "states an order, or look at what no number names)"
            )
        if self.copy is None:
            return tuple(words)
        names = self.names[len(self.names) - len(self.z_G) :]
        return (
            *words,
            *(
                f"of '{name}' one copy, since its density repeats every {period:.4g}"
                for name, period in zip(names, self.copy.periods, strict=True)
                if np.isfinite(period)
            ),
        )

    def missed(self, z_G: np.ndarray, weights: np.ndarray) -> tuple[LocalMode, ...]:
        """Return other modes with a share of the mass that weighted draws (n, dim) do not reach."""
        own = -np.inf if self.log_evidence is None else self.log_evidence
        evidence = np.array([own, *(p.log_evidence for p in self.others)])
        if self.log_evidence is None or not np.isfinite(evidence.max()):
            return ()
        share = np.exp(evidence - np.logaddexp.reduce(evidence))[1:]
        # A draw belongs to a mode within three sds and the length of a normal vector of it.
        reach = MODES_APART + np.sqrt(z_G.shape[1])
        reached = [weights @ (distance(p, z_G) <= reach) for p in self.others]
        return tuple(
            p
            for p, expected, there in zip(self.others, share, reached, strict=True)
            if expected > MIN_MASS and there < expected / 3
        )

    @property
    def places(self) -> np.ndarray:
        """Return this mode and the others (k, dim), where a search with other data can begin."""
        return np.stack([self.z_G, *(peak.z_G for peak in self.others)])

    @cached_property
    def covariance(self) -> np.ndarray:
        """Return the inverse of ``curvature``, (n, n), or (n,) for a diagonal."""
        return 1 / self.curvature if self.curvature.ndim == 1 else np.linalg.inv(self.curvature)


def distance(mode: LocalMode, z_G: np.ndarray) -> np.ndarray:
    """Return the distances (n,) of draws (n, dim) from a mode, in its standard deviations."""
    away = np.asarray(z_G, float) - mode.z_G
    return np.sqrt(np.maximum(np.einsum("ni,ij,nj->n", away, mode.curvature, away), 0.0))


def mode_of_search(
    fm: FederatedModel,
    search: BestPoints[Any],
    profile: Profile | None,
    num_exchanges: int,
) -> Mode:
    """Return the mode at the end of a search."""
    i, num_theta, copy = int(best_start(search)), search.best.x.shape[1] - fm.dim, None
    curvature = np.asarray(search.best.curvature[i], float)
    x, _, gradient, metric = (np.asarray(a[i]) for a in search.best)
    if metric.ndim == 2 and search.at_mode[i]:
        # A last step of Newton's method, at most a hundredth of an sd long, needs no exchange:
        # gradient and curvature at the point are known.
        unit = np.sqrt(np.maximum(np.diagonal(metric), np.finfo(float).tiny))
        values, axes = np.linalg.eigh(metric / unit / unit[:, None])
        if values.min() > ROUNDING_UNITS * len(x) * np.finfo(x.dtype).eps:
            x = x + (axes @ (axes.T @ (gradient / unit) / values) / unit).astype(x.dtype)
    theta, z_G = unravelled(fm, x)
    if profile is not None:
        periods = np.asarray(profile.periods, float)[num_theta:]
        copy = OneCopy(z_G, periods) if np.isfinite(periods).any() else None
    flat = () if profile is None else profile.flat
    # Modes of all starts; others than the best one each once, in order of their evidence.
    modes, effects = list[LocalMode](), effects_of(fm)
    number = fm.dim - len(effects)
    for j in (i, *np.flatnonzero(search.known & search.at_mode).tolist()):
        A = np.asarray(search.best.curvature[j], float)
        if A.ndim == 1:  # of a diagonal alone there is no evidence
            continue
        # Effects are integrated out of the value: their share of the determinant is taken out.
        log_det = np.linalg.slogdet(A[num_theta:, num_theta:])[1]
        log_det -= np.linalg.slogdet(A[np.ix_(effects, effects)])[1]
        value = float(search.best.value[j])
        evidence = float(value + 0.5 * (number * np.log(2 * np.pi) - log_det))
        place = np.asarray(search.best.x[j][num_theta:])
        place = place if copy is None else copy.copy_of(place)
        modes.append(LocalMode(place, A[num_theta:, num_theta:], evidence))
    distinct = modes[:1]
    for p in sorted(modes[1:], key=lambda p: -p.log_evidence):
        if all(distance(q, p.z_G[None])[0] > MODES_APART for q in distinct):
            distinct.append(p)
    return Mode(
        sites=jax.tree.map(np.asarray, fm.constrain_global(theta, jax.device_put(z_G))),
        theta=jax.tree.map(np.asarray, fm.constrain_theta(theta)),
        z_G=z_G,
        curvature=curvature,
        log_evidence=modes[0].log_evidence if modes and not flat else None,
        num_exchanges=num_exchanges,
        converged=bool(search.at_mode[i]) and not flat,
        values=np.where(search.known, search.best.value, -np.inf),
        names=coordinate_names(fm),
        flat=flat,
        others=tuple(distinct[1:]),
        copy=copy,
    )


def coordinate_names(fm: FederatedModel) -> tuple[str, ...]:
    """Return the names of the search's coordinates: shared parameters, then globals."""
    theta = jax.eval_shape(lambda: fm.init_theta(jax.random.key(0)))
    sites = [(name, theta[name].shape) for name in sorted(theta)]
    sites += [(site.name, site.shape) for site in fm.named("latent")]
    # Unconstrained, as a simplex is, a latent may have other entries than its value.
    shapes = dict(sites)
    labels = {n: own for n, own in fm.labels.items() if shapes.get(n, ())[-1:] == (len(own),)}
    return tuple(element_name(name, i, labels) for name, shape in sites for i in np.ndindex(shape))


class CheckPoints(NamedTuple):
    """Points (k, n) at which the density is evaluated, and the index of the search they belong to.

    A silo starts from the modes of its locals in that search.
    """

    places: Numbers
    start: Numbers


class Profile(NamedTuple):
    """The density around the highest point.

    ``flat``: The directions in which it does not fall, as combinations of coordinates' names.
    ``periods`` (n,): The shift of a coordinate after which the density is what it was, as of an
        angle; infinite where it does not repeat. It is looked for where a prior is flat: elsewhere
        copies differ.
    """

    flat: tuple[str, ...]
    periods: np.ndarray


def _flat_coordinates(fm: FederatedModel) -> np.ndarray:
    """Return the coordinates whose prior is flat."""
    sites = [s for s in fm.named("latent") if s.name in fm.improper]
    ranges = [np.arange(s.start, s.stop) for s in sites]
    return flat_size(fm) - fm.dim + np.concatenate([np.zeros(0, int), *ranges])


def shifted_places(
    search: BestPoints[np.ndarray], flat: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return shifts (f, s) of ``flat`` coordinates (f,) after which the density may be the same.

    They are a turn, in radians, and the distances from the mode to where other starts came to rest.
    With them come places (1 + 3 f s, n): one near the mode, and the same after a shift, two shifts,
    and a part of one.
    """
    i = best_start(search)
    x, unit = search.best.x[i], Curvature.of(search.best.curvature[i]).unit
    base = x + ASIDE / unit
    turn = np.full((1, len(flat)), 2 * np.pi, x.dtype)
    shifts = np.concatenate([turn, np.abs(search.best.x[:, flat] - x[flat])]).T
    steps = shifts[:, :, None] * np.array([1.0, 2.0, PART], x.dtype)
    shifted = base + steps[..., None] * np.eye(len(x), dtype=x.dtype)[flat][:, None, None]
    return shifts, np.concatenate([base[None], shifted.reshape(-1, len(x))])


def periods_of(shifts: np.ndarray, densities: np.ndarray) -> np.ndarray:
    """Return the period (f,) of each flat coordinate, from the densities at all places.

    A turn counts before shorter periods: what users see of an angle repeats with it.
    """
    base, after = densities[0], densities[1:].reshape(*shifts.shape, 3)
    allowed = SAME * np.finfo(base.dtype).eps * max(1.0, abs(base))
    once, twice, part = np.moveaxis(np.abs(after - base), -1, 0)
    found = (once <= allowed) & (twice <= allowed) & (part > TELLS * allowed)
    shortest = np.where(found, shifts, np.inf).min(1, initial=np.inf)
    return np.where(found[:, 0], shifts[:, 0], shortest)


@dataclass(frozen=True, eq=False)
class CurvatureCheck:
    """The question to silos how the density falls around the mode that a search has found.

    A search knows the curvature alone. Where a likelihood levels off, as for separable logistic
    regression, each step predicts a small gain, and the search ends as it does at a mode. Where
    priors are flat, the density may repeat: periods are looked for as well.

    ``num_starts``: Searches side by side.
    """

    model: FederatedModel
    num_starts: int

    @cached_property
    def exchange(self) -> Exchange[Any, Any, Any]:
        """Return the exchange in which silos tell their log likelihoods around the mode."""
        fm = self.model
        n, f = flat_size(fm), len(_flat_coordinates(fm))
        size = 4 * n * len(CHECK_DISTANCES) + (1 + 3 * f * (1 + self.num_starts) if f else 0)
        start: Any = jax.ShapeDtypeStruct((), np.int32)

        def values(noise: object, down: CheckPoints, state: SearchState, data: SiloData) -> Array:
            z_L = jax.tree.map(lambda a: a[down.start], state.z_L)
            of_silo = partial(silo_log_likelihood, fm, state.private, data, z_L)
            return map_in_batches(lambda x: of_silo(x)[0], down.places, columns_at_once(fm))

        return StackedExchange(
            AROUND_MODE,
            stacked_reply(values, little=n <= FEW_COORDINATES),
            lenient=True,
            messages=lambda: (CheckPoints(shape(size, n), start), shape(size)),
        )

    @cached_property
    def _log_prior(self) -> Callable[[Numbers, Numbers], Array]:
        """Return the server's program: ``(A_b, places)`` to log priors at the places."""
        effects = effects_of(self.model)
        return jit_once(
            lambda of_effects, places: map_in_batches(
                lambda x: log_prior_of(self.model, effects, jnp.asarray(of_effects), x)[0],
                jnp.asarray(places),
                SIDE_BY_SIDE,
            )
        )

    @np.errstate(all="ignore")
    def ask(self, ask: AskSilos, search: BestPoints[np.ndarray]) -> Profile:
        """Return the profile of the density at the best place of a search, in one exchange."""
        i = best_start(search)
        x, curvature = search.best.x[i], Curvature.of(search.best.curvature[i])
        threshold = ROUNDING_UNITS * len(x) * np.finfo(x.dtype).eps
        axes = np.concatenate([curvature.vectors, np.eye(len(x), dtype=x.dtype)], 1)
        values = np.concatenate([curvature.values, np.ones(len(x), x.dtype)])
        # A direction whose curvature is no more than rounding is looked at farther out.
        sds = (axes / np.sqrt(np.maximum(values, threshold)) / curvature.unit[:, None]).T
        unsure = np.where((values <= threshold)[:, None], sds, 0.0)
        offsets = [
            side * distance * (unsure if distance == CHECK_DISTANCES[0] else sds)
            for distance in CHECK_DISTANCES
            for side in (1, -1)
        ]
        places, around = x + np.concatenate(offsets), len(offsets) * len(sds)
        if len(improper := _flat_coordinates(self.model)):
            shifts, shifted = shifted_places(search, improper)
            places = np.concatenate([places, shifted])
        places = places.astype(x.dtype)
        of_silos = ask(self.exchange, CheckPoints(places, np.asarray(i, np.int32)))
        of_prior = jax.block_until_ready(self._log_prior(search.effects_curvature[i], places))
        densities = np.asarray(of_silos) + np.asarray(of_prior)
        periods = np.full(len(x), np.inf)
        if len(improper):
            periods = periods.astype(densities.dtype)
            periods[improper] = periods_of(shifts, densities[around:])
        # A fall within rounding of the density itself is no fall.
        value = float(search.best.value[i])
        least = max(MIN_FALL, ROUNDING_UNITS * np.finfo(axes.dtype).eps * abs(value))
        drops = value - densities[:around]
        farther, far, near = drops.reshape(len(CHECK_DISTANCES), 2, -1)
        # Where the density is not finite at three sds, the
        # fall at one sd decides: of a parabola, a ninth.
        flat = np.where(
            np.isnan(far),
            ~(near >= least * (CHECK_DISTANCES[2] / CHECK_DISTANCES[1]) ** 2),
            far < least,
        )
        # Where the curvature is below what this precision can tell, three of its sds are not far
        # enough, and a direction that falls at 30 is not open.
        flat &= ~((farther >= least) & (values <= threshold))
        # Along an angle three of its sds may be most of a turn, where the density has risen again.
        angles = np.isfinite(periods)
        flat &= ~((np.abs(axes[angles]).max(0, initial=0.0) > 0.2) & (near >= least / 9))
        directions, names = [], coordinate_names(self.model)
        for k in np.flatnonzero(flat.any(0)):
            signed = -axes[:, k] if flat[1, k] and not flat[0, k] else axes[:, k]
            parts = zip(signed, names, strict=True)
            directions.append(" ".join(f"{w:+.2f} {name}" for w, name in parts if abs(w) > 0.2))
        return Profile(tuple(directions), periods)
