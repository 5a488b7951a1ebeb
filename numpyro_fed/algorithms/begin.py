r"""From a mode to where an algorithm begins: the frame of the globals, the silos' local guides.

The frame is the normal distribution at the mode :math:`m` of the globals, with the root :math:`L`
of the inverse curvature there. In its coordinates, :math:`z_G = m + L u`, the posterior is about
standard, whatever the units of the data. A silo's local guides begin at the modes of its latents
given :math:`z_G = m`, with the curvature there as precision, and with the derivatives of both with
respect to :math:`u` (and to the latents of outer plates) as couplings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed import linalg
from numpyro_fed.algorithms.base import CarriedSilo
from numpyro_fed.algorithms.laplace import Laplace
from numpyro_fed.algorithms.mode import SearchState, best_start, unraveller
from numpyro_fed.algorithms.mode import SiloState as ModeSiloState
from numpyro_fed.algorithms.mode_wide import nonzero
from numpyro_fed.frame import Frame
from numpyro_fed.gaussian import Curvature, Gaussian
from numpyro_fed.guides.base import GlobalGuide, GuideParams
from numpyro_fed.guides.structured import Guide
from numpyro_fed.model.binding import Rows, Theta
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.federated import FederatedModel

FLAT = 1e-6  # of the largest scaled curvature: no direction counts as flatter than that
FLAT_OFF_MODE = 0.05  # the same away from a mode, where the posterior is not like the parabola
FROM_MODE = "from the mode"  # the name of the exchange
FALLBACK_SD = 0.1  # standard deviation of a row whose mode was not found

Guides = dict[str, GuideParams]  # by plate


class StartPoint(NamedTuple):
    """The place where a run begins.

    Attributes
    ----------
    theta, unit : dict
        Shared parameters, unconstrained, and their standard deviations.
    centre, root : (dim,), (dim, dim) or (dim,)
        The globals, and a Cholesky factor of their covariance given ``theta``; where they are many,
        standard deviations, each given all others.
    """

    theta: Theta
    unit: Theta
    centre: Array
    root: Array

    @property
    def wide(self) -> bool:
        """Return whether the globals are too many for a covariance."""
        return self.root.ndim == 1

    def frame(self, guide: GlobalGuide[Any]) -> Frame:
        """Return the frame in which a guide of the globals works from here."""
        return Frame.centred_at(self.theta, self.unit, guide.frame(self.centre, self.root))


class StartMessage(NamedTuple):
    """A message to silos: where a run begins, and which of the searches has come there."""

    point: StartPoint
    start: Array


def placeholder_start(fm: FederatedModel, theta: Theta, *, wide: bool) -> StartPoint:
    """Return a place around zero, for the shapes of what begins there."""
    unit = jax.tree.map(jnp.ones_like, theta)
    root = jnp.ones(fm.dim) if wide else jnp.eye(fm.dim)
    return StartPoint(theta, unit, jnp.zeros(fm.dim), root)


def start_at_mode(fm: FederatedModel, search: SearchState) -> StartMessage:
    """Return the highest place that was found."""
    i, unravel = best_start(search), unraveller(fm)
    x, curvature = search.best.x[i], search.best.curvature[i]
    theta, centre = unravel(x)
    num_theta = len(x) - fm.dim
    if curvature.ndim == 1:
        sd = 1 / jnp.sqrt(nonzero(curvature))
        return StartMessage(StartPoint(theta, unravel(sd)[0], centre, sd[num_theta:]), i)
    least = jnp.where(search.rests[i], FLAT, FLAT_OFF_MODE)
    unit, _ = unravel(jnp.linalg.norm(covariance_root(curvature, least), axis=1))
    return StartMessage(
        StartPoint(theta, unit, centre, covariance_root(curvature[num_theta:, num_theta:], least)),
        i,
    )


def covariance_root(precision: Array, least: Array | float = FLAT) -> Array:
    """Return a Cholesky factor of the inverse of a precision, made positive."""
    if not len(precision):
        return precision
    return Curvature.of(precision).positive(least).root_of_inverse()


def local_guides(
    fm: FederatedModel,
    guide: Guide,
    theta: Theta,
    frame: Gaussian,
    z_L: Rows,
    data: SiloData,
    *,
    wide: bool = False,
) -> dict[str, GuideParams]:
    """Return a silo's local guides at the modes of its latents, which are near ``z_L``.

    They measure the globals in the ``frame`` of these; where that is ``wide``, of too many to
    derive by, without couplings.
    """
    if not guide.locals:
        return {}
    laplace = Laplace(fm)
    origin = jnp.zeros(fm.dim)
    z = laplace.modes(theta, guide.globals.place(frame, origin), data, z_L)
    outer = jnp.concatenate([jnp.zeros(0), *(z[p].ravel() for p in guide.outer)])

    def outer_guides(u: Array) -> dict[str, GuideParams]:
        z_G = guide.globals.place(frame, u)
        found = laplace.outer_given(theta, z_G, z, data)
        return {
            p: guide.locals[p].from_mode(*outer_precision(guide, p, *found[p])) for p in guide.outer
        }

    def row_guides(above: Array) -> dict[str, GuideParams]:
        z_G = guide.globals.place(frame, above[: fm.dim])
        found = laplace.rows_given(theta, z_G, outer + above[fm.dim :], z, data)
        return {
            p: guide.locals[p].from_mode(*row_precision(guide, p, *found[p])) for p in guide.rows
        }

    zeros = jnp.zeros(fm.dim + len(outer))
    templates = _zero_guides(guide, z, fm.dim, len(outer))
    guides = {
        **_with_couplings(outer_guides, origin, {p: templates[p] for p in guide.outer}, wide),
        **_with_couplings(row_guides, zeros, {p: templates[p] for p in guide.rows}, wide),
    }
    return {p: _with_fallback(guides[p], templates[p]) for p in guide.locals}


def local_guides_at_mode(
    fm: FederatedModel, guide: Guide, message: StartMessage, state: ModeSiloState, data: SiloData
) -> dict[str, GuideParams]:
    """Return a silo's local guides where a run begins, from where its own search has come."""
    z_L = jax.tree.map(lambda a: a[message.start], state.z_L)
    theta, frame = (
        {**message.point.theta, **state.private},
        message.point.frame(guide.globals).globals,
    )
    return local_guides(fm, guide, theta, frame, z_L, data, wide=message.point.wide)


def local_guides_of_result(
    guide: Guide, carried: CarriedSilo, point: StartPoint, data: SiloData
) -> dict[str, GuideParams]:
    """Return the local guides of an earlier result in the frame where a run begins."""
    frame, centre = point.frame(guide.globals).globals, jnp.zeros_like(point.centre)
    eta = guide.recentre(carried.guide, point.centre - carried.centre, data)
    return guide.composed_with(lambda u: guide.globals.place(frame, u), eta, centre)


def _zero_guides(guide: Guide, z: Rows, dim: int, outer: int) -> dict[str, GuideParams]:
    """Return guides at zero, with all their couplings."""
    return {
        p: local.init(jnp.zeros_like(z[p]), dim if p in guide.outer else dim + outer)
        for p, local in guide.locals.items()
    }


def outer_precision(
    guide: Guide, plate: str, mode: Array, covariance: Array
) -> tuple[Array, Array]:
    """Return a mode, and the precision that the guide of an outer plate takes."""
    n, d = mode.shape
    if guide.locals[plate].joint:
        return mode, linalg.inverse(covariance)
    rows = jnp.arange(n)
    return mode, linalg.inverse(covariance.reshape(n, d, n, d)[rows, :, rows])


def row_precision(guide: Guide, plate: str, mode: Array, precision: Array) -> tuple[Array, Array]:
    """Return modes, and precisions (n, d, d) as the guide of a plate of rows takes them."""
    if not guide.locals[plate].joint:
        return mode, precision
    n, d = mode.shape
    whole = jnp.einsum("nij,nm->nimj", precision, jnp.eye(n))
    return mode, whole.reshape(n * d, n * d)


def _with_couplings(
    f: Callable[[Array], Guides], at: Array, templates: Guides, wide: bool
) -> Guides:
    """Return guides ``f(at)``, with the derivatives of ``f`` as couplings where ``like`` has them;
    zeros where there is too much to derive by.
    """
    if not templates:
        return {}
    guides = {p: {**templates[p], **eta} for p, eta in f(at).items()}
    if wide or not any(
        "mean_coupling" in eta or "scale_coupling" in eta for eta in templates.values()
    ):
        return guides

    def mean_and_scale(at: Array) -> dict[str, tuple[Array, Array]]:
        return {p: (eta["loc"], eta["log_scale"]) for p, eta in f(at).items()}

    def column(e: Array) -> dict[str, tuple[Array, Array]]:
        return jax.jvp(mean_and_scale, (at,), (e,))[1]

    columns = jax.lax.map(column, jnp.eye(len(at)), batch_size=min(16, len(at)))
    for p, parts in columns.items():
        for name, part in zip(("mean_coupling", "scale_coupling"), parts, strict=True):
            if name in templates[p]:
                guides[p] = {**guides[p], name: jnp.moveaxis(part, 0, -1)}
    return guides


def _with_fallback(eta: GuideParams, template: GuideParams) -> GuideParams:
    """Return a guide whose rows without a mode begin at zero, without couplings."""
    log_scale = jnp.full_like(template["log_scale"], jnp.log(FALLBACK_SD))
    return where_finite(eta, {**template, "log_scale": log_scale})


def where_finite(eta: GuideParams, fallback: GuideParams) -> GuideParams:
    """Return ``eta``, and ``other`` for rows where it is not finite; for all, if they are one."""
    joint = eta.get("below", jnp.zeros(0)).ndim == 4
    finite = jnp.stack([jnp.isfinite(a).reshape(len(a), -1).all(1) for a in eta.values()]).all(0)
    finite = jnp.broadcast_to(finite.all(), finite.shape) if joint else finite
    return {
        name: jnp.where(finite.reshape(-1, *[1] * (a.ndim - 1)), a, fallback[name])
        for name, a in eta.items()
    }
