"""Guides of the globals, as functions of their parameters and explicit noise."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Generic, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from jax.lax import stop_gradient
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

from numpyro_fed.basics.errors import GuideError
from numpyro_fed.basics.programs import TRACING
from numpyro_fed.numerics import linalg
from numpyro_fed.numerics.expfam.family import Eps, Family, Natural
from numpyro_fed.numerics.gaussian import (
    Coordinates,
    Gaussian,
    as_matrix,
    standard_normal,
    unit_lower,
)

GuideParams = dict[str, Any]  # eta: arrays by name


@dataclass(frozen=True, eq=False)
class GlobalGuide(ABC, Generic[Eps]):
    """A guide of the flat vector ``z_G``, as functions of parameters ``eta`` and explicit noise.

    It is a distribution of coordinates ``u``; a frame maps these to ``z_G``
    (:mod:`numpyro_fed.numerics.gaussian`). ``density_everywhere`` says whether the log density is
    known at any point: most flows know it at their own draws only. ``has_standard_noise`` says
    whether the noise is one standard normal for each latent, and can be computed from a draw.
    """

    dim: int
    density_everywhere: ClassVar[bool] = False
    has_standard_noise: ClassVar[bool] = False

    def noise(self, key: Array, n: int) -> Eps:
        """Return the noise of ``n`` draws, along a leading axis of every leaf."""
        return cast(Eps, jax.random.normal(key, (n, self.dim)))

    def init(self, key: Array, loc: Array, scale: float | None = None) -> GuideParams:
        """Return parameters for a start at ``loc`` (dim,), with sds of ``scale`` or its own."""
        raise NotImplementedError(f"no optimiser starts a {type(self).__name__}.")

    @abstractmethod
    def draw(self, eta: GuideParams, noise: Eps) -> tuple[Array, Array]:
        """Return one draw (dim,) from its noise, and the log density () there."""

    @abstractmethod
    def centre(self, eta: GuideParams) -> Array:
        """Return the guide's centre (dim,), from which local guides measure the globals."""

    def log_density(self, eta: GuideParams, u: Array) -> Array:
        """Return the log density at any point, where :attr:`density_everywhere`."""
        raise NotImplementedError(f"{type(self).__name__} knows its density at its draws alone.")

    def standard_noise(self, eta: GuideParams, u: Array) -> Array:
        """Return the noise (dim,) of which ``u`` is the draw, where :attr:`has_standard_noise`."""
        raise NotImplementedError(f"{type(self).__name__} cannot tell noise from a draw.")

    def frame(self, loc: Array, root: Array) -> Gaussian:
        """Return the frame in which a normal is standard; ``root`` is Cholesky factor or sds."""
        return Gaussian.of_root(loc, as_matrix(root))

    def place(self, frame: Gaussian, u: Array) -> Array:
        """Return ``z_G`` (dim,) at coordinates ``u`` of a frame."""
        return frame.draw(u)

    def coordinates(self, frame: Gaussian, z_G: Array) -> Array:
        """Return the coordinates of ``z_G`` (dim,) in a frame."""
        return frame.standardise(z_G)

    def in_z(self, frame: Gaussian, eta: GuideParams) -> GuideParams:
        """Return the guide's parameters in units of ``z_G``, for users to read."""
        return eta

    def draws(
        self, frame: Gaussian, eta: GuideParams, noise: Eps
    ) -> tuple[Coordinates, Array, Array]:
        """Return n draws: coordinates (n, dim), ``z_G`` (n, dim), and its log density (n,)."""
        u, log_q = jax.vmap(self.draw, (None, 0))(eta, noise)
        z_G = jax.vmap(self.place, (None, 0))(frame, u)
        return Coordinates(u, self.centre(eta)), z_G, log_q - frame.log_det

    def centred_coordinates(self, frame: Gaussian, eta: GuideParams, z_G: Array) -> Coordinates:
        """Return the coordinates of any ``z_G`` (n, dim), with the guide's centre."""
        u = jax.vmap(self.coordinates, (None, 0))(frame, z_G)
        return Coordinates(u, self.centre(eta))

    def density(self, frame: Gaussian, eta: GuideParams, z_G: Array) -> Array:
        """Return the log density () at any ``z_G`` (dim,), where :attr:`density_everywhere`."""
        return self.log_density(eta, self.coordinates(frame, z_G)) - frame.log_det


@dataclass(frozen=True)
class FamilyGuide(GlobalGuide[Eps]):
    """A guide with natural parameters, which PVI computes; no optimiser changes them.

    They are those of ``z_G`` itself: only the silos' local guides use the frame.
    """

    family: Family[Eps]
    density_everywhere = True

    def noise(self, key: Array, n: int) -> Eps:
        return self.family.noise(key, n)

    def draw(self, eta: Natural, noise: Eps) -> tuple[Array, Array]:
        z = self.family.draw(self.family.ordinary(eta), noise)
        return z, self.family.log_density(eta, z)

    def centre(self, eta: Natural) -> Array:
        return self.family.centre(self.family.ordinary(eta))

    def log_density(self, eta: Natural, z: Array) -> Array:
        return self.family.log_density(eta, z)

    def draws(self, frame: Gaussian, eta: Natural, noise: Eps) -> tuple[Coordinates, Array, Array]:
        z_G, log_q = jax.vmap(self.draw, (None, 0))(eta, noise)
        return self.centred_coordinates(frame, eta, z_G), z_G, log_q

    def centred_coordinates(self, frame: Gaussian, eta: Natural, z_G: Array) -> Coordinates:
        return Coordinates(frame.standardise(z_G), frame.standardise(self.centre(eta)))

    def density(self, frame: Gaussian, eta: Natural, z_G: Array) -> Array:
        return self.log_density(eta, z_G)


@dataclass(frozen=True)
class _GaussianGuide(GlobalGuide[Array]):
    """The base class of Gaussian guides, with standard normals as noise.

    In the ``log_q`` of a draw the parameters are stopped, which leaves its value as it is. The
    gradient then sticks the landing: it has no variance where the guide is exact (Roeder, Wu and
    Duvenaud 2017).
    """

    init_scale: float
    density_everywhere = True
    has_standard_noise = True

    def at(self, eta: GuideParams, noise: Array) -> Array:
        """Return the draw (dim,) from its noise."""
        return Gaussian.from_params(eta).draw(noise)

    def init(self, key: Array, loc: Array, scale: float | None = None) -> GuideParams:
        scale = self.init_scale if scale is None else scale
        return {"loc": loc, "log_scale": jnp.full(self.dim, jnp.log(scale))}

    def draw(self, eta: GuideParams, noise: Array) -> tuple[Array, Array]:
        u = self.at(eta, noise)
        return u, self.log_density(stop_gradient(eta), u)

    def centre(self, eta: GuideParams) -> Array:
        return eta["loc"]

    def log_density(self, eta: GuideParams, u: Array) -> Array:
        return Gaussian.from_params(eta).log_density(u)

    def standard_noise(self, eta: GuideParams, u: Array) -> Array:
        return Gaussian.from_params(eta).standardise(u)

    def in_z(self, frame: Gaussian, eta: GuideParams) -> GuideParams:
        return frame.compose(Gaussian.from_params(eta)).params()


@dataclass(frozen=True)
class Diagonal(_GaussianGuide):
    """A guide of independent normals."""

    def frame(self, loc: Array, root: Array) -> Gaussian:
        # The best independent normals under KL have the standard deviations of each coordinate
        # given all others, not the marginal ones. A root of one axis has these already.
        if root.ndim == 1:
            return Gaussian(loc, jnp.log(root))
        inverse = linalg.solve(root, jnp.eye(len(root)))
        return Gaussian(loc, -0.5 * jnp.log((inverse**2).sum(0)))


@dataclass(frozen=True)
class Full(_GaussianGuide):
    """A Gaussian with any covariance."""

    def init(self, key: Array, loc: Array, scale: float | None = None) -> GuideParams:
        below = jnp.zeros(self.dim * (self.dim - 1) // 2)
        return {**super().init(key, loc, scale), "below": below}


@dataclass(frozen=True)
class Skewed(Full):
    r"""A full covariance whose scales depend on the coordinates before them.

    With :math:`\varepsilon` standard normal,

    .. math::
        u = m + T \big(e^{s + D \varepsilon / \sqrt{d - 1}} \odot \varepsilon\big),

    ``T`` unit lower triangular and ``D`` strictly lower triangular. It fits coefficients whose
    spread grows with a scale, and effects under a scale. With ``D = 0`` it is :class:`Full`. Its
    frame has the globals in an ``order`` of its own, with scales before their effects.
    """

    order: tuple[int, ...]

    @property
    def _order(self) -> np.ndarray:
        return np.array(self.order, np.int32)  # JAX reads it the same way in both precisions

    def frame(self, loc: Array, root: Array) -> Gaussian:
        # A permuted triangular root is no longer triangular; QR makes it so.
        ordered = linalg.root_of(as_matrix(root)[self._order])
        return Gaussian.of_root(loc[self._order], ordered)

    def place(self, frame: Gaussian, u: Array) -> Array:
        return frame.draw(u)[np.argsort(self._order).astype(np.int32)]

    def coordinates(self, frame: Gaussian, z_G: Array) -> Array:
        return frame.standardise(z_G[self._order])

    def in_z(self, frame: Gaussian, eta: GuideParams) -> GuideParams:
        found = {**super().in_z(frame, eta), "scale_coupling": eta["scale_coupling"]}
        return {**found, "loc": self.place(frame, eta["loc"])}

    def _coupling(self, eta: GuideParams) -> Array:
        # Adam moves each entry by as much. Without this factor the log scale of the last coordinate
        # would move by the sum of all its entries' steps.
        share = max(self.dim - 1, 1) ** -0.5
        return share * jnp.tril(eta["scale_coupling"], -1)

    def init(self, key: Array, loc: Array, scale: float | None = None) -> GuideParams:
        D = jnp.zeros((self.dim, self.dim))
        return {**super().init(key, loc, scale), "scale_coupling": D}

    def at(self, eta: GuideParams, noise: Array) -> Array:
        q = Gaussian.from_params(eta)
        return q._replace(log_scale=q.log_scale + self._coupling(eta) @ noise).draw(noise)

    def _inverted(self, eta: GuideParams, u: Array) -> tuple[Array, Array]:
        """Return the noise (dim,) whose draw is ``u``, and the log-scales (dim,) given it."""
        # A log-scale depends on the noise before it alone: the noise is found from first to last.
        q, D = Gaussian.from_params(eta), self._coupling(eta)
        residual = q._replace(log_scale=jnp.zeros(self.dim)).standardise(u)

        def invert_coordinate(noise: Array, row: tuple[Array, ...]) -> tuple[Array, Array]:
            i, x, s, D_i = row
            log_scale = s + D_i @ noise
            return noise.at[i].set(x * jnp.exp(-log_scale)), log_scale

        rows = (jnp.arange(self.dim), residual, q.log_scale, D)
        return jax.lax.scan(invert_coordinate, jnp.zeros_like(u), rows)

    def standard_noise(self, eta: GuideParams, u: Array) -> Array:
        return self._inverted(eta, u)[0]

    def log_density(self, eta: GuideParams, u: Array) -> Array:
        noise, log_scales = self._inverted(eta, u)
        return standard_normal(noise).sum() - log_scales.sum()

    def draw(self, eta: GuideParams, noise: Array) -> tuple[Array, Array]:
        """Return a draw (dim,), and its log density, whose gradient sticks the landing.

        The density needs the noise as a function of ``u`` with parameters stopped. Its value is
        known, and its derivative is the inverse of the draw's: no loop over coordinates is needed.
        """
        u, fixed = self.at(eta, noise), stop_gradient(eta)
        D, T = self._coupling(fixed), unit_lower(fixed["below"], self.dim)
        scale = jnp.exp(fixed["log_scale"] + D @ noise)
        slope = T @ (scale[:, None] * (jnp.eye(self.dim) + noise[:, None] * D))
        noise_of_u = noise + linalg.solve(slope, u - stop_gradient(u))
        return u, standard_normal(noise_of_u).sum() - (fixed["log_scale"] + D @ noise_of_u).sum()


@dataclass(frozen=True)
class LowRank(Diagonal):
    """A Gaussian with covariance ``W W' + diag(exp(2 s))``, with ``W`` of ``rank`` columns."""

    rank: int
    has_standard_noise = False
    # More noise than latents: the noise of a draw cannot be computed from it. This one raises.
    standard_noise = GlobalGuide.standard_noise

    def noise(self, key: Array, n: int) -> Array:
        return jax.random.normal(key, (n, self.dim + self.rank))

    def init(self, key: Array, loc: Array, scale: float | None = None) -> GuideParams:
        first = super().init(key, loc, scale)
        # At a factor of zero its gradient is zero as well.
        factor = 0.1 * jax.random.normal(key, (self.dim, self.rank))
        return {**first, "factor": jnp.exp(first["log_scale"])[:, None] * factor}

    def at(self, eta: GuideParams, noise: Array) -> Array:
        independent, shared = noise[: self.dim], noise[self.dim :]
        return eta["loc"] + jnp.exp(eta["log_scale"]) * independent + eta["factor"] @ shared

    def log_density(self, eta: GuideParams, u: Array) -> Array:
        """Return the log density by Woodbury's formula, with :math:`L L' = I + W' e^{-2 s} W`."""
        scale = jnp.exp(eta["log_scale"])
        residual, W = (u - eta["loc"]) / scale, eta["factor"] / scale[:, None]
        L = linalg.cholesky(jnp.eye(self.rank) + W.T @ W)
        shared = linalg.solve(L, W.T @ residual)
        log_det = eta["log_scale"].sum() + jnp.log(jnp.diagonal(L)).sum()
        return standard_normal(residual).sum() + 0.5 * (shared**2).sum() - log_det

    def in_z(self, frame: Gaussian, eta: GuideParams) -> GuideParams:
        return {**super().in_z(frame, eta), "factor": frame.scale[:, None] * eta["factor"]}


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
        # A copy: the user's object may serve for another model.
        auto, standard = copy.copy(self.guide), dist.Normal(0, 1).expand([self.dim]).to_event(1)
        auto.model, auto.prototype_trace = lambda: numpyro.sample("z_G", standard), None
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
