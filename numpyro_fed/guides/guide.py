"""The guide of a federation as functions of its parameters, and the message with its draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.guides.global_guides import GlobalGuide, GuideParams
from numpyro_fed.guides.local_guides import Encoder, LocalGuide
from numpyro_fed.numerics.gaussian import Coordinates, Gaussian, identity
from numpyro_fed.text.log_density import FederatedModel


@dataclass(frozen=True, eq=False)
class Guide:
    """A guide for a model with given sizes, as functions of its parameters.

    ``locals`` has the guide of each silo plate that has latents, ``encoders`` the networks of those
    with an amortised guide. ``init_loc_fn`` is the function for the start of the guide, or None.
    """

    model: FederatedModel
    globals: GlobalGuide[Array]
    locals: Mapping[str, LocalGuide]
    init_loc_fn: Callable[..., Any] | None = None
    encoders: Mapping[str, Encoder] = field(default_factory=dict)

    @property
    def outer_plates(self) -> tuple[str, ...]:
        """Return the plates with latents that stand above rows of another plate."""
        return self.model.outer_plates

    @property
    def row_plates(self) -> tuple[str, ...]:
        """Return the other plates with latents."""
        return self.model.row_plates

    @cached_property
    def locals_depend_on_globals(self) -> bool:
        """Whether any local guide depends on where the globals are."""
        return any(g.couple_mean or g.couple_scale for g in self.locals.values())

    def init_global(self, key: Array) -> GuideParams:
        """Return the first parameters of the globals' guide."""
        key_loc, key_rest = jax.random.split(key)
        z_G = self.model.init_global(key_loc, self.init_loc_fn)
        return self.globals.init(key_rest, self.globals.coordinates(identity(z_G.shape), z_G))

    def init_local(self, key: Array, data: SiloData) -> dict[str, GuideParams]:
        """Return the first parameters of a silo's local guides, by plate."""
        loc = self.model.init_local(key, data, self.init_loc_fn)
        dim = self.model.dim
        width = dim + sum(loc[p].size for p in self.outer_plates)
        return {
            p: guide.init(loc[p], dim if p in self.outer_plates else width)
            for p, guide in self.locals.items()
        }

    def offset_of_plate(
        self,
        plate: str,
        eta: dict[str, GuideParams],
        offset: Array,
        z_outer: Mapping[str, Array],
        data: SiloData,
    ) -> Array:
        """Return the offsets (width,) of globals and outer latents that rows are coupled to."""
        if plate in self.outer_plates or not self.outer_plates:
            return offset
        # Padded latents count as at their centre, so that they are coupled to nothing.
        offsets = [data.masked(p, z_outer[p] - eta[p]["loc"]).ravel() for p in self.outer_plates]
        return jnp.concatenate([offset, *offsets])

    def recentre(
        self, eta: dict[str, GuideParams], offset: Array, data: SiloData
    ) -> dict[str, GuideParams]:
        """Return the same local guides, measured from a centre moved by ``offset`` (dim,)."""
        offsets = self.offsets_by_plate(eta, offset, data)
        return {p: self.locals[p].recentre(eta[p], offsets[p]) for p in eta}

    def at_globals(
        self,
        eta: dict[str, GuideParams],
        theta: dict[str, Any],
        z_G: Array,
        offset: Array,
        data: SiloData,
    ) -> dict[str, GuideParams]:
        """Return the local guides at one ``z_G`` (dim,), with the couplings to it in the means."""
        moved = self.recentre(eta, offset, data)
        return {p: self.row_params(p, theta, params, z_G, data) for p, params in moved.items()}

    def offsets_by_plate(
        self, eta: dict[str, GuideParams], offset: Array, data: SiloData
    ) -> dict[str, Array]:
        """Return the values (width,) that rows are coupled to at an ``offset`` (dim,)."""
        offsets: dict[str, Array] = {}
        z_outer: dict[str, Array] = {}
        for p in (*self.outer_plates, *self.row_plates):
            offsets[p] = self.offset_of_plate(p, eta, offset, z_outer, data)
            if p in self.outer_plates:
                z_outer[p] = self.locals[p].recentre(eta[p], offsets[p])["loc"]
        return offsets

    def in_coordinates(
        self, f: Callable[[Array], Array], eta: dict[str, GuideParams], at: Array
    ) -> dict[str, GuideParams]:
        """Return local guides as functions of ``u``, from the same guides as functions of ``f(u)``.

        ``f`` is affine, and ``at`` (dim,) is any point. Couplings are multiplied by the Jacobian of
        ``f``, by reverse mode, which never forms it.
        """
        if not eta:
            return eta
        width, (_, vjp) = len(at), jax.vjp(f, at)
        rewritten = {p: dict(params) for p, params in eta.items()}
        for params in rewritten.values():
            for name in ("mean_coupling", "scale_coupling"):
                if name not in params:
                    continue
                C = params[name]
                rows = jax.vmap(lambda row: vjp(row)[0])(C[..., :width].reshape(-1, width))
                own = rows.reshape(*C.shape[:-1], width)
                params[name] = jnp.concatenate([own, C[..., width:]], -1)
        return rewritten

    def to_frame(
        self, eta: dict[str, GuideParams]
    ) -> tuple[dict[str, Gaussian], dict[str, GuideParams]]:
        """Return frames of the rows made of local guides, and the guides in these frames."""
        pairs = {p: self.locals[p].to_frame(params) for p, params in eta.items()}
        return {p: f for p, (f, _) in pairs.items()}, {
            p: params for p, (_, params) in pairs.items()
        }

    def from_frame(
        self, frames: Mapping[str, Gaussian], eta: dict[str, GuideParams]
    ) -> dict[str, GuideParams]:
        """Return local guides in ``z`` from those in frames of the rows, where plates have one."""
        return {
            p: self.locals[p].from_frame(frames[p], params) if p in frames else params
            for p, params in eta.items()
        }

    def row_params(
        self, plate: str, theta: dict[str, Any], eta: GuideParams, z_G: Array, data: SiloData
    ) -> GuideParams:
        """Return the parameters of a plate's guide: those of the silo, or a network's output."""
        if plate not in self.encoders:
            return eta
        encoder = self.encoders[plate]
        return encoder.eta(theta[encoder.name], theta, z_G, data)


class GlobalDraws(NamedTuple):
    """A message: shared parameters, draws (n, dim), and these in their frame if needed."""

    theta: dict[str, Any]
    z_G: Array
    coordinates: Coordinates | tuple[()]

    @classmethod
    def of(
        cls, guide: Guide, shared: tuple[dict[str, Any], GuideParams, Gaussian], z_G: Array
    ) -> GlobalDraws:
        """Return the message with draws (n, dim), by a state's parameters, guide and its frame."""
        theta, eta, frame = shared
        uses = guide.locals_depend_on_globals
        return cls(theta, z_G, guide.globals.centred_coordinates(frame, eta, z_G) if uses else ())

    @property
    def in_frame(self) -> Coordinates:
        """Return the draws in their frame; placeholders, where no local guide depends on them."""
        if isinstance(self.coordinates, Coordinates):
            return self.coordinates
        return Coordinates(self.z_G, self.z_G[0])
