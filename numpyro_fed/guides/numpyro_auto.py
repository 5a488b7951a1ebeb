"""NumPyro's own autoguides, for the globals."""

from __future__ import annotations

import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro import handlers
from numpyro.distributions import biject_to, constraints
from numpyro.infer.autoguide import (
    AutoContinuous,
    AutoGuide,
    AutoLaplaceApproximation,
    AutoLowRankMultivariateNormal,
    AutoNormal,
)
from numpyro.infer.initialization import init_to_value

from numpyro_fed.errors import GuideError
from numpyro_fed.expfam.gaussian import cholesky_factor, cholesky_parts
from numpyro_fed.guides.gaussian import (
    GlobalGuide,
    GuideParams,
    as_matrix,
    diagonal,
    low_rank,
    standard_normals,
)
from numpyro_fed.tracing import TRACING

FRAME = "frame"  # of a flow that begins around a mode: the mean and the root that it acts within


def from_autoguide(guide: AutoGuide, dim: int) -> GlobalGuide:
    """Use a NumPyro autoguide as the guide of the flat vector ``z_G``.

    Parameters
    ----------
    guide : AutoGuide
        ``AutoNormal``, or any ``AutoContinuous`` with a base distribution and a transform: the
        diagonal, multivariate and low-rank normals, IAF and BNAF. Its settings are kept; the
        model that it was built with is not used, since it sees the globals alone.
    dim : int
        Number of unconstrained global latents.

    Raises
    ------
    GuideError
        For every other kind, by name.
    """
    kind = type(guide).__name__
    if isinstance(guide, AutoNormal):
        return diagonal(dim, guide._init_scale)
    if isinstance(guide, AutoLowRankMultivariateNormal):
        # Its own transform starts at a zero factor, whose gradient is zero there for ever.
        return low_rank(dim, guide.rank or round(dim**0.5), guide._init_scale)
    if not isinstance(guide, AutoContinuous) or isinstance(guide, AutoLaplaceApproximation):
        raise _refused(kind)

    def prototype(loc: Array) -> AutoContinuous:
        def globals_alone() -> None:
            numpyro.sample("z_G", dist.Normal(0, 1).expand([dim]).to_event(1))

        auto = copy.copy(guide)
        auto.model, auto.prototype_trace = globals_alone, None
        auto.init_loc_fn = init_to_value(values={"z_G": loc})
        with TRACING, handlers.block(), handlers.seed(rng_seed=0):
            auto._setup_prototype()
        return auto

    auto = prototype(jnp.zeros(dim))
    try:
        base = auto.get_base_dist()
    except NotImplementedError as error:
        raise _refused(kind) from error
    if base.event_shape != (dim,) or base.batch_shape:
        raise _refused(kind)

    def parameters(auto: AutoContinuous, key: Any) -> dict[str, Any]:
        with TRACING:
            trace = handlers.trace(handlers.seed(auto, key)).get_trace()
        return {name: site for name, site in trace.items() if site["type"] == "param"}

    bijections = {
        name: biject_to(site["kwargs"].get("constraint", constraints.real))
        for name, site in parameters(auto, 0).items()
    }

    def init(key: Array, loc: Array) -> GuideParams:
        sites = parameters(prototype(loc), key)
        return {name: bijections[name].inv(site["value"]) for name, site in sites.items()}

    def around(key: Array, loc: Array, root: Array) -> GuideParams:
        return {**init(key, jnp.zeros(dim)), FRAME: {"loc": loc, **cholesky_parts(as_matrix(root))}}

    def moved(eta: GuideParams, step: GuideParams) -> GuideParams:
        after = jax.tree.map(jnp.add, eta, step)
        return {**after, FRAME: eta[FRAME]} if FRAME in eta else after

    def draw(eta: GuideParams, noise: Array) -> tuple[Array, Array]:
        transform = auto.get_transform({k: f(eta[k]) for k, f in bijections.items()})
        z = transform(noise)
        log_q = base.log_prob(noise) - transform.log_abs_det_jacobian(noise, z)
        if FRAME not in eta:
            return z, log_q
        frame = eta[FRAME]
        placed = frame["loc"] + cholesky_factor(frame, dim) @ z
        return placed, log_q - frame["log_scale"].sum()

    def centre(eta: GuideParams) -> Array:
        return draw(eta, jnp.zeros(dim))[0]

    return GlobalGuide(standard_normals(dim), init, draw, centre, around, moved)


def _refused(kind: str) -> GuideError:
    return GuideError(
        f"{kind} cannot serve as the guide of the globals: it has no base distribution and "
        "transform that work without data. Use AutoNormal, AutoDiagonalNormal, "
        "AutoMultivariateNormal, AutoLowRankMultivariateNormal, AutoIAFNormal or AutoBNAFNormal, "
        "or leave the guide out."
    )
