"""NumPyro's autoguides as guides of the globals."""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro import handlers
from numpyro.distributions import biject_to, constraints
from numpyro.distributions.transforms import Transform
from numpyro.infer.autoguide import (
    AutoContinuous,
    AutoGuide,
    AutoLaplaceApproximation,
    AutoLowRankMultivariateNormal,
    AutoNormal,
)
from numpyro.infer.initialization import init_to_value

from numpyro_fed.errors import GuideError
from numpyro_fed.gaussian import Gaussian
from numpyro_fed.guides.base import GlobalGuide, GuideParams
from numpyro_fed.guides.gaussian import Diagonal, LowRank
from numpyro_fed.programs import TRACING


def from_autoguide(guide: AutoGuide, dim: int) -> GlobalGuide[Array]:
    """Return a NumPyro autoguide as a guide of the flat vector ``z_G`` (dim,), with its settings.

    It is ``AutoNormal``, or any ``AutoContinuous`` with a base distribution and a transform: the
    diagonal, multivariate and low-rank normals, IAF and BNAF. The model that it was built with is
    not used: it is set up for the globals alone.
    """
    if isinstance(guide, AutoNormal):
        return Diagonal(dim, guide._init_scale)
    if isinstance(guide, AutoLowRankMultivariateNormal):
        # Its own transform starts at a zero factor, whose gradient is zero there for ever.
        return LowRank(dim, guide._init_scale, guide.rank or round(dim**0.5))
    if isinstance(guide, AutoContinuous) and not isinstance(guide, AutoLaplaceApproximation):
        flow = AutoFlow(dim, guide)
        with suppress(NotImplementedError):
            if flow.base.event_shape == (dim,) and not flow.base.batch_shape:
                return flow
    raise GuideError(
        f"{type(guide).__name__} cannot serve as the guide of the globals: it has no base "
        "distribution and transform that work without data. Use AutoNormal, AutoDiagonalNormal, "
        "AutoMultivariateNormal, AutoLowRankMultivariateNormal, AutoIAFNormal or AutoBNAFNormal, "
        "or leave the guide out."
    )


@dataclass(frozen=True, eq=False)
class AutoFlow(GlobalGuide[Array]):
    """An ``AutoContinuous``: standard normals, mapped by the autoguide's own transform."""

    guide: AutoContinuous

    def _at(self, loc: Array) -> AutoContinuous:
        """Return a copy of the autoguide, set up for ``z_G`` and to start at ``loc`` (dim,)."""

        def globals_alone() -> None:
            numpyro.sample("z_G", dist.Normal(0, 1).expand([self.dim]).to_event(1))

        # A copy: the user's object may serve for another model.
        auto = copy.copy(self.guide)
        auto.model, auto.prototype_trace = globals_alone, None
        auto.init_loc_fn = init_to_value(values={"z_G": loc})
        with TRACING, handlers.block(), handlers.seed(rng_seed=0):
            auto._setup_prototype()
        return auto

    @cached_property
    def _auto(self) -> AutoContinuous:
        return self._at(jnp.zeros(self.dim))

    @cached_property
    def base(self) -> dist.Distribution:
        """Return the distribution of the noise."""
        return self._auto.get_base_dist()

    @cached_property
    def _bijections(self) -> dict[str, Transform]:
        """Return the bijection from unconstrained space to the support of each parameter."""
        sites = _params_of(self._auto, 0)
        real = constraints.real
        return {n: biject_to(s["kwargs"].get("constraint", real)) for n, s in sites.items()}

    def noise(self, key: Array, n: int) -> Array:
        return jax.random.normal(key, (n, self.dim))

    def init(self, key: Array, loc: Array, scale: float | None = None) -> GuideParams:
        sites = _params_of(self._at(loc), key)
        return {name: self._bijections[name].inv(site["value"]) for name, site in sites.items()}

    def in_z(self, frame: Gaussian, eta: GuideParams) -> GuideParams:
        return {**eta, "frame": frame.params()}

    def draw(self, eta: GuideParams, noise: Array) -> tuple[Array, Array]:
        transform = self._auto.get_transform({k: f(eta[k]) for k, f in self._bijections.items()})
        u = transform(noise)
        return u, self.base.log_prob(noise) - transform.log_abs_det_jacobian(noise, u)

    def centre(self, eta: GuideParams) -> Array:
        return self.draw(eta, jnp.zeros(self.dim))[0]


def _params_of(auto: AutoContinuous, key: Array | int) -> dict[str, Any]:
    """Return the ``param`` sites of an autoguide."""
    with TRACING:
        trace = handlers.trace(handlers.seed(auto, key)).get_trace()
    return {name: site for name, site in trace.items() if site["type"] == "param"}
