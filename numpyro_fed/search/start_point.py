r"""The start of an algorithm at a mode: the frame of the globals, and the silos' local guides.

The frame is the normal distribution at the mode :math:`m` of the globals, with the root :math:`L`
of the inverse curvature at the mode. In its coordinates, :math:`z_G = m + L u`, the posterior is
about standard, whatever the units of the data. A silo's local guides start at the modes of its
latents given :math:`z_G = m`. Their precision is the curvature at these modes. Their couplings are
the derivatives of modes and scales with respect to :math:`u`, and to the latents of outer plates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.basics.programs import map_in_batches
from numpyro_fed.basics.trees import Numbers
from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.guides.global_guides import GlobalGuide, GuideParams
from numpyro_fed.guides.guide import Guide
from numpyro_fed.guides.laplace import Laplace
from numpyro_fed.numerics import linalg
from numpyro_fed.numerics.gaussian import Curvature, Frame, Gaussian
from numpyro_fed.rounds.states import CarriedSilo
from numpyro_fed.search.expand import ROUNDING_UNITS, SearchState, unravelled
from numpyro_fed.search.lbfgs import nonzero
from numpyro_fed.search.mode_search import BestPoints, best_start
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.site_table import Theta

# The least curvature of a direction, as a share of the largest scaled one, in single and in double
# precision. A smaller share lets rounding decide how wide a start is; a larger one starts too
# narrow along a real ridge, as of a line over a covariate whose values differ by 10^-7 of their
# size: draws of such a start hardly met the ridge, and its width was said to be a hundredth.
MIN_CURVATURE, MIN_CURVATURE_IN_DOUBLE = 1e-6, 1e-13
# The same where the search ended away from a mode. The parabola there need not be like the
# posterior, so a start may be at most 1 / sqrt(0.05), some 4.5, times as wide as a scaled unit.
MIN_CURVATURE_OFF_MODE = 0.05
# The standard deviation of a row whose mode was not found: that of a guide that starts without a
# mode (``Structured.init_scale``).
FALLBACK_SD = 0.1

Guides = dict[str, GuideParams]  # by plate


class StartPoint(NamedTuple):
    """The point where a run starts, and the spread of the posterior that is expected there.

    ``theta, unit``: Shared parameters, unconstrained, and their standard deviations.
    ``centre`` (dim,): The globals.
    ``root`` (dim, dim) or (dim,): A Cholesky factor of the globals' covariance given ``theta``.
        Where they are many, standard deviations of each coordinate given all others.
    """

    theta: Theta
    unit: Theta
    centre: Array
    root: Array

    def frame(self, guide: GlobalGuide[Any]) -> Frame:
        """Return the frame in which a guide of the globals works from this point."""
        theta = jax.tree.map(Gaussian.of_root, self.theta, self.unit)
        return Frame(theta, guide.frame(self.centre, self.root))


class StartMessage(NamedTuple):
    """A message to silos: the point where a run starts, and the index of the search that found it.

    A silo keeps the modes of its locals for every search, and continues from those of this one.
    """

    point: StartPoint
    start: Array


def start_at_mode(fm: FederatedModel, search: BestPoints[Any]) -> StartMessage:
    """Return the start at the highest point that the searches found."""
    i = best_start(search)
    x, curvature = search.best.x[i], search.best.curvature[i]
    theta, centre = unravelled(fm, x)
    num_theta = len(x) - fm.dim  # ``x`` is theta first, then the globals
    if curvature.ndim == 1:
        sd = 1 / jnp.sqrt(nonzero(curvature))
        return StartMessage(StartPoint(theta, unravelled(fm, sd)[0], centre, sd[num_theta:]), i)
    least = jnp.where(search.at_mode[i], min_curvature(x), MIN_CURVATURE_OFF_MODE)
    # The units of theta are marginal sds, from the inverse of the whole matrix. The root of the
    # globals is from their own block, which is their covariance given theta.
    unit, _ = unravelled(fm, jnp.linalg.norm(covariance_root(curvature, least), axis=1))
    return StartMessage(
        StartPoint(theta, unit, centre, covariance_root(curvature[num_theta:, num_theta:], least)),
        i,
    )


def min_curvature(x: Numbers) -> float:
    """Return the share of the largest curvature below which others are not known, at ``x`` (n,)."""
    rounding = ROUNDING_UNITS * len(x) * float(np.finfo(x.dtype).eps)
    return max(MIN_CURVATURE_IN_DOUBLE, rounding) if x.dtype == np.float64 else MIN_CURVATURE


def covariance_root(precision: Array, least: Array | float) -> Array:
    """Return a Cholesky factor (dim, dim) of the inverse of a precision, made positive definite."""
    if not len(precision):
        return precision
    return Curvature.of(precision).positive(least).root_of_inverse()


def local_guides_at_mode(
    fm: FederatedModel, guide: Guide, message: StartMessage, state: SearchState, data: SiloData
) -> Guides:
    """Return a silo's local guides at the start of a run, by plate.

    They are at the modes of its latents, which are searched from those of its own search. They
    measure the globals in the frame of the start. Where that is wide, the guides have no couplings:
    there are too many globals to differentiate by.
    """
    if not guide.locals:
        return {}
    point, laplace, origin = message.point, Laplace(fm), jnp.zeros(fm.dim)
    theta = {**point.theta, **state.private}
    frame = point.frame(guide.globals).globals
    before = jax.tree.map(lambda a: a[message.start], state.z_L)
    z = laplace.search(theta, guide.globals.place(frame, origin), data, before).modes
    outer = jnp.concatenate([jnp.zeros(0), *(z[p].ravel() for p in guide.outer_plates)])

    # Latents of outer plates depend on the globals alone, rows also on the latents above them. So
    # the two kinds of guides are functions of different vectors, and differentiated apart.
    def outer_guides(u: Array) -> Guides:
        z_G = guide.globals.place(frame, u)
        found = laplace.outer_given(theta, z_G, z, data)
        return {
            p: guide.locals[p].from_mode(*outer_precision(guide, p, *found[p]))
            for p in guide.outer_plates
        }

    def row_guides(above: Array) -> Guides:
        z_G = guide.globals.place(frame, above[: fm.dim])
        found = laplace.rows_given(theta, z_G, outer + above[fm.dim :], z, data)
        guides = {}
        for p in guide.row_plates:
            mode, precision = found[p]
            if guide.locals[p].joint:  # (n, d, d) to block diagonal (n d, n d)
                n, d = mode.shape
                whole = jnp.einsum("nij,nm->nimj", precision, jnp.eye(n))
                precision = whole.reshape(n * d, n * d)
            guides[p] = guide.locals[p].from_mode(mode, precision)
        return guides

    zeros = jnp.zeros(fm.dim + len(outer))
    # Centred at zero, with couplings of zero.
    templates = {
        p: local.init(jnp.zeros_like(z[p]), fm.dim if p in guide.outer_plates else len(zeros))
        for p, local in guide.locals.items()
    }
    outer_templates = {p: templates[p] for p in guide.outer_plates}
    row_templates = {p: templates[p] for p in guide.row_plates}
    wide = point.root.ndim == 1
    guides = {
        **_with_couplings(outer_guides, origin, outer_templates, wide),
        **_with_couplings(row_guides, zeros, row_templates, wide),
    }
    for p, template in templates.items():
        # At zero and without couplings for rows whose mode was not found.
        log_scale = jnp.full_like(template["log_scale"], jnp.log(FALLBACK_SD))
        guides[p] = where_finite(guides[p], {**template, "log_scale": log_scale})
    return {p: guides[p] for p in guide.locals}


def local_guides_of_result(
    guide: Guide, carried: CarriedSilo, point: StartPoint, data: SiloData
) -> dict[str, GuideParams]:
    """Return the local guides of an earlier result, in the frame in which the next run starts."""
    frame, centre = point.frame(guide.globals).globals, jnp.zeros_like(point.centre)
    eta = guide.recentre(carried.guide, point.centre - carried.centre, data)
    return guide.in_coordinates(lambda u: guide.globals.place(frame, u), eta, centre)


def outer_precision(
    guide: Guide, plate: str, mode: Array, covariance: Array
) -> tuple[Array, Array]:
    """Return the mode (n, d) and the precision of an outer plate's guide, (n d, n d) if joint."""
    n, d = mode.shape
    if guide.locals[plate].joint:
        return mode, linalg.inverse(covariance)
    # Each latent's marginal: the block of the covariance is inverted, not that of the precision,
    # which would be the spread given all other latents and too narrow.
    rows = jnp.arange(n)
    return mode, linalg.inverse(covariance.reshape(n, d, n, d)[rows, :, rows])


def _with_couplings(
    f: Callable[[Array], Guides], point: Array, templates: Guides, wide: bool
) -> Guides:
    """Return the guides ``f(at)`` with their couplings: the derivatives of ``f``."""
    # ``templates`` say which guides have couplings. These stay zero where the globals are ``wide``.
    if not templates:
        return {}
    has_couplings = any(
        "mean_coupling" in eta or "scale_coupling" in eta for eta in templates.values()
    )
    if wide or not has_couplings:
        return {p: {**templates[p], **eta} for p, eta in f(point).items()}
    # linearize: ``f`` itself is computed, and compiled, once for all columns.
    found, along = jax.linearize(f, point)
    guides = {p: {**templates[p], **eta} for p, eta in found.items()}

    # Forward mode, sixteen directions at a time: the outputs (all rows) are more than the inputs,
    # and all directions at once would hold as many copies of a silo's derivatives in memory.
    columns = map_in_batches(
        lambda e: {p: (change["loc"], change["log_scale"]) for p, change in along(e).items()},
        jnp.eye(len(point)),
        16,
    )
    for p, parts in columns.items():
        for name, part in zip(("mean_coupling", "scale_coupling"), parts, strict=True):
            if name in templates[p]:
                guides[p] = {**guides[p], name: jnp.moveaxis(part, 0, -1)}
    return guides


def where_finite(eta: GuideParams, fallback: GuideParams) -> GuideParams:
    """Return ``eta``, and ``fallback`` for rows where ``eta`` is not finite.

    Rows of a joint guide share one covariance: if one of them is not finite, all fall back.
    """
    joint = eta.get("below", jnp.zeros(0)).ndim == 4
    finite = jnp.stack([jnp.isfinite(a).reshape(len(a), -1).all(1) for a in eta.values()]).all(0)
    finite = jnp.broadcast_to(finite.all(), finite.shape) if joint else finite
    return {
        name: jnp.where(finite.reshape(-1, *[1] * (a.ndim - 1)), a, fallback[name])
        for name, a in eta.items()
    }
