"""Gaussian guides for the latents of rows, given the globals and the latents above the rows."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.gaussian import Gaussian, standard_normal, unit_lower
from numpyro_fed.guides.base import GuideParams

AMORTISED = "amortised"


@dataclass(frozen=True)
class LocalGuide:
    r"""A conditional Gaussian guide for the rows of one silo plate.

    For row ``i``, with ``a`` the globals and the latents of outer plates above the row, measured
    from the centres of their guides,

    .. math::
        q(z_i \mid a) = N\big(m_i + C_i a,\; T_i\, \mathrm{diag}(e^{2(s_i + D_i a)})\, T_i'\big).

    Attributes
    ----------
    dim : int
        Latents of one row.
    covariance : {"diagonal", "full", "joint", "amortised"}
        Independent latents; a full covariance within each row; or one full covariance over all
        rows of the plate at a silo, for plates of few rows. Amortised ones are independent, with
        parameters that a network returns; the silo itself keeps none, and ``loc`` is (rows, 0).
    couple_mean, couple_scale : bool
        Whether the guide has ``C_i`` and ``D_i``.
    init_scale : float
        Standard deviation at the start.
    """

    dim: int
    covariance: str
    couple_mean: bool
    couple_scale: bool
    init_scale: float

    @property
    def joint(self) -> bool:
        """Return whether rows share one covariance; a row's density is then given those before."""
        return self.covariance == "joint"

    @property
    def independent(self) -> bool:
        """Return whether all latents are independent given the latents above them."""
        if self.covariance == "full":
            return self.dim < 2
        return not self.joint

    def init(self, loc: Array, width: int) -> GuideParams:
        """Return parameters for a start at ``loc`` (rows, dim), with ``width`` numbers above."""
        rows, dim = len(loc), self.dim
        if self.covariance == AMORTISED:
            return {"loc": jnp.zeros((rows, 0))}
        eta: GuideParams = {
            "loc": loc,
            "log_scale": jnp.full((rows, dim), jnp.log(self.init_scale)),
        }
        if self.joint:
            # A square array, whose upper half is not used: rows stay the first axis, as in all
            # parameters of rows.
            eta["below"] = jnp.zeros((rows, dim, rows, dim))
        elif not self.independent:
            eta["below"] = jnp.zeros((rows, dim * (dim - 1) // 2))
        if self.couple_mean:
            eta["mean_coupling"] = jnp.zeros((rows, dim, width))
        if self.couple_scale:
            eta["scale_coupling"] = jnp.zeros((rows, dim, width))
        return eta

    def draw(self, eta: GuideParams, above: Array, noise: Array) -> Array:
        """Return one draw for every row; noise and draws are (rows, dim)."""
        q = self._gaussian(self.recentre(eta, above))
        return q.draw(noise.reshape(q.loc.shape)).reshape(noise.shape)

    def log_q(self, eta: GuideParams, above: Array, z: Array) -> Array:
        """Return the log density (rows,) at ``z`` (rows, dim)."""
        q = self._gaussian(self.recentre(eta, above))
        residual = q.standardise(z.reshape(q.loc.shape)).reshape(z.shape)
        log_scale = q.log_scale.reshape(z.shape)
        return (standard_normal(residual) - log_scale).sum(-1)

    def recentre(self, eta: GuideParams, above: Array) -> GuideParams:
        """Return the same guide, measured from other values ``above`` (width,)."""
        moved = dict(eta)
        if self.couple_mean:
            moved["loc"] = eta["loc"] + eta["mean_coupling"] @ above
        if self.couple_scale:
            moved["log_scale"] = eta["log_scale"] + eta["scale_coupling"] @ above
        return moved

    def from_mode(self, mode: Array, precision: Array) -> GuideParams:
        """Return the normal distribution with this mode (rows, dim), without couplings.

        ``precision`` is a matrix for each row (rows, dim, dim), or one for all where the guide is
        joint.
        """
        if self.covariance in ("diagonal", AMORTISED):
            return {"loc": mode, "log_scale": -0.5 * jnp.log(jnp.diagonal(precision, 0, -2, -1))}
        shape = (mode.size,) if self.joint else mode.shape
        return self._params(Gaussian.of_precision(mode.reshape(shape), precision), mode.shape)

    def to_frame(self, eta: GuideParams) -> tuple[Gaussian, GuideParams]:
        """Return the guide without couplings as a frame of the rows, and the guide in it."""
        # In the frame the guide is standard: zeros. Only its couplings remain, in the frame's
        # units.
        frame, inside = self._gaussian(eta), jax.tree.map(jnp.zeros_like, eta)
        if self.couple_mean:
            C = eta["mean_coupling"]
            inside["mean_coupling"] = frame.solve(C.reshape(*frame.loc.shape, -1)).reshape(C.shape)
        if self.couple_scale:
            inside["scale_coupling"] = eta["scale_coupling"]
        return frame, inside

    def from_frame(self, frame: Gaussian, eta: GuideParams) -> GuideParams:
        """Return the parameters in ``z``, from parameters ``eta`` in a frame of the rows."""
        shape, q = eta["loc"].shape, self._gaussian(eta)
        after = self._params(frame.compose(q), shape)
        if self.couple_mean:
            C = eta["mean_coupling"]
            after["mean_coupling"] = frame.times(C.reshape(*q.loc.shape, -1)).reshape(C.shape)
        if self.couple_scale:
            after["scale_coupling"] = eta["scale_coupling"]
        return after

    def _gaussian(self, eta: GuideParams) -> Gaussian:
        """Return a stack of Gaussians (rows, dim), or one of (rows * dim,) for a joint guide."""
        loc, log_scale = eta["loc"], eta["log_scale"]
        if self.independent:
            return Gaussian(loc, log_scale)
        if not self.joint:
            return Gaussian(loc, log_scale, unit_lower(eta["below"], self.dim))
        size = loc.size
        T = jnp.tril(eta["below"].reshape(size, size), -1) + jnp.eye(size)
        return Gaussian(loc.ravel(), log_scale.ravel(), T)

    def _params(self, q: Gaussian, shape: tuple[int, ...]) -> GuideParams:
        """Return the parameters of a Gaussian of :meth:`_gaussian`, for ``shape`` (rows, dim)."""
        eta: GuideParams = {"loc": q.loc.reshape(shape), "log_scale": q.log_scale.reshape(shape)}
        if self.joint and q.unit is not None:
            eta["below"] = jnp.tril(q.unit, -1).reshape(*shape, *shape)
        elif not self.independent:
            eta["below"] = q.params()["below"]
        return eta
