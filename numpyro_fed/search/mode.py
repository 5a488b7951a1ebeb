"""The mode of a posterior, and other modes, from the end of a search."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np

from numpyro_fed.basics.trees import element_name
from numpyro_fed.search.curvature_check import Profile
from numpyro_fed.search.expand import ROUNDING_UNITS, effects_of, unraveller
from numpyro_fed.search.influence import Factors
from numpyro_fed.search.mode_search import BestPoints, best_start
from numpyro_fed.text.log_density import FederatedModel

# Standard deviations from which on two modes count
# as two: their normal approximations hardly overlap.
MODES_APART = 3.0
# Share of the mass below which a missed mode is not reported. A larger value hides small
# modes; a smaller one warns of modes that are none, since shares by Laplace's evidence are rough.
MIN_MASS = 0.02


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
        """Return in words which coordinates have copies of the density."""
        if self.copy is None:
            return ()
        names = self.names[len(self.names) - len(self.z_G) :]
        return tuple(
            f"of '{name}' one copy, since its density repeats every {period:.4g}"
            for name, period in zip(names, self.copy.periods, strict=True)
            if np.isfinite(period)
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
    i, names, copy = int(best_start(search)), coordinate_names(fm), None
    curvature = np.asarray(search.best.curvature[i], float)
    value, flat = float(search.best.value[i]), tuple[str, ...]()
    x, _, gradient, metric = (np.asarray(a[i]) for a in search.best)
    if metric.ndim == 2 and search.at_mode[i]:
        # A last step of Newton's method, at most a hundredth of an sd long, needs no exchange:
        # gradient and curvature at the point are known.
        unit = np.sqrt(np.maximum(np.diagonal(metric), np.finfo(float).tiny))
        values, axes = np.linalg.eigh(metric / unit / unit[:, None])
        if values.min() > ROUNDING_UNITS * len(x) * np.finfo(x.dtype).eps:
            x = x + (axes @ (axes.T @ (gradient / unit) / values) / unit).astype(x.dtype)
    theta, z_G = unraveller(fm)(x)
    if profile is not None:
        flat = profile.open_directions(value, names)
        periods = np.asarray(profile.periods, float)[len(x) - fm.dim :]
        copy = OneCopy(z_G, periods) if np.isfinite(periods).any() else None
    evidence = None if flat else _log_evidence(fm, value, curvature)
    sites = jax.tree.map(np.asarray, fm.constrain_global(theta, jax.device_put(z_G)))
    return Mode(
        sites=sites,
        theta=jax.tree.map(np.asarray, fm.constrain_theta(theta)),
        z_G=z_G,
        curvature=curvature,
        log_evidence=evidence,
        num_exchanges=num_exchanges,
        converged=bool(search.at_mode[i]) and not flat,
        values=np.where(search.known, search.best.value, -np.inf),
        names=names,
        flat=flat,
        others=_other_modes(fm, search, i, copy),
        copy=copy,
    )


def _other_modes(
    fm: FederatedModel, search: BestPoints[Any], best: int, copy: OneCopy | None
) -> tuple[LocalMode, ...]:
    """Return the modes of other starts than the best one, each once, in order of their evidence."""
    num_theta = search.best.x.shape[1] - fm.dim
    modes: list[LocalMode] = []
    for i in (best, *np.flatnonzero(search.known & search.at_mode).tolist()):
        curvature = np.asarray(search.best.curvature[i], float)
        evidence = _log_evidence(fm, float(search.best.value[i]), curvature)
        if evidence is not None:
            place = np.asarray(search.best.x[i][num_theta:])
            place = place if copy is None else copy.copy_of(place)
            modes.append(LocalMode(place, curvature[num_theta:, num_theta:], evidence))
    distinct = modes[:1]
    for p in sorted(modes[1:], key=lambda p: -p.log_evidence):
        if all(distance(q, p.z_G[None])[0] > MODES_APART for q in distinct):
            distinct.append(p)
    return tuple(distinct[1:])


def _log_evidence(fm: FederatedModel, value: float, curvature: np.ndarray) -> float | None:
    """Return Laplace's evidence at a mode with log density ``value``; None for a diagonal.

    Effects are integrated out of ``value`` already: their share of the determinant is taken out.
    """
    if curvature.ndim == 1:
        return None
    num_theta, effects = len(curvature) - fm.dim, effects_of(fm)
    number = fm.dim - len(effects)
    log_det = np.linalg.slogdet(curvature[num_theta:, num_theta:])[1]
    log_det -= np.linalg.slogdet(curvature[np.ix_(effects, effects)])[1]
    return float(value + 0.5 * (number * np.log(2 * np.pi) - log_det))


def coordinate_names(fm: FederatedModel) -> tuple[str, ...]:
    """Return the names of the search's coordinates: shared parameters, then globals."""
    theta = jax.eval_shape(lambda: fm.init_theta(jax.random.key(0)))
    sites = [(name, theta[name].shape) for name in sorted(theta)]
    sites += [(site.name, site.shape) for site in fm.named("latent")]
    return tuple(element_name(name, i) for name, shape in sites for i in np.ndindex(shape))
