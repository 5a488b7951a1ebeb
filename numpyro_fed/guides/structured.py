"""The guide of a federation: one for the globals, one for the rows of each silo plate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from numpyro.distributions import constraints
from numpyro.infer.autoguide import AutoGuide

from numpyro_fed.basics.errors import GuideError
from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.guides.global_guides import (
    Diagonal,
    Full,
    GlobalGuide,
    GuideParams,
    LowRank,
    Skewed,
    from_autoguide,
)
from numpyro_fed.guides.local_guides import (
    AMORTISED,
    Amortised,
    Encoder,
    LocalGuide,
    RowShapes,
    encoder_of,
)
from numpyro_fed.numerics.gaussian import FULL_COVARIANCE_UP_TO, Gaussian, identity
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.sites import Plate, Site

# Sizes up to which "auto" takes the richer guide.
# Globals: a skewed guide has three times the parameters of a full one, and a loop over coordinates
# where its density is evaluated at a given point; a low-rank one has 20 columns at most.
SKEWED_UP_TO = 128
LOW_RANK_UP_TO = 20_000
# Latents of one row: at 8, an earlier bound, a state-space model of patients had k-hat 1.05, and
# with full covariances 0.35 (docs/results/raw_data.md).
FULL_ROW_UP_TO = 30
JOINT_UP_TO = 32  # latents of an outer plate at one silo, which then share one covariance
COUPLINGS_UP_TO = (
    10_000_000  # coefficients of all rows together: 40 MB in single precision, each way
)


@dataclass(frozen=True, kw_only=True)
class Structured:
    r"""A Gaussian guide with the structure of the model.

    .. math::
        q(z_G, z_L) = q(z_G) \prod_j \prod_{i \in j} q(z_{L,i} \mid z_G)

    in unconstrained space. Where a silo plate stands above another one (a hospital above its
    patients), the rows of the lower plate are also coupled to its latents.

    Parameters
    ----------
    globals : {"auto", "diagonal", "full", "skewed", "low_rank"} or AutoGuide
        Covariance of the globals, or a NumPyro autoguide (``AutoNormal``, ``AutoIAFNormal``, ...).
        ``"skewed"`` is a full one in which each scale depends on the coordinates before it, bounded
        sites first. It fits coefficients whose spread grows with the noise, and effects under a
        scale.
        ``"auto"`` is skewed up to 128 dimensions where a run starts at the mode and there is a
        bounded site and another one, else full up to 300, low rank up to 20,000, diagonal above.
    rank : int, optional
        Rank for ``"low_rank"``; by default the square root of the dimension, 20 at most.
    locals : {"auto", "diagonal", "full", "joint"}, Amortised or dict
        Covariance of a row's latents, ``"full"`` within each row, ``"joint"`` over all rows of the
        plate at a silo; a network that reads a row (:class:`Amortised`); or a dict by plate.
        ``"auto"`` is full up to 30 latents a row and diagonal above; an outer plate is joint while
        a silo has at most 32 latents there.
    couple_mean, couple_scale : bool, optional
        Whether the mean (``C_i``) and the log-scale (``D_i``) of a row's guide are affine in the
        globals and the latents above it. By default both are, if all rows together need at most
        ten million coefficients.
    init_loc_fn : callable, optional
        One of NumPyro's ``init_to_...`` functions, for the start of the guide. By default it is
        zero in unconstrained space, which is ``init_to_feasible`` and depends on no key.
    init_scale : float
        Standard deviation at the start of a run that does not start at the mode.

    Notes
    -----
    The mean coupling is the SFVI paper's (Hassan et al. 2023, section 3.2); the affine log-scale
    is that of Tan, Bhaskaran and Nott (2020).

    Examples
    --------
    >>> import numpyro_fed as nf
    >>> nf.guides.Structured(globals="diagonal", couple_scale=False).locals
    'auto'
    """

    globals: str | AutoGuide = "auto"
    rank: int | None = None
    locals: str | Amortised | Mapping[str, str | Amortised] = "auto"
    couple_mean: bool | None = None
    couple_scale: bool | None = None
    init_loc_fn: Callable[..., Any] | None = None
    init_scale: float = 0.1


def MeanField(
    *, init_loc_fn: Callable[..., Any] | None = None, init_scale: float = 0.1
) -> Structured:
    """Return the guide of independent normals for all latents: NumPyro's ``AutoNormal``, federated.

    Parameters
    ----------
    init_loc_fn, init_scale
        As for :class:`Structured`.

    Examples
    --------
    >>> import numpyro_fed as nf
    >>> nf.guides.MeanField().globals
    'diagonal'
    """
    return Structured(
        globals="diagonal",
        locals="diagonal",
        couple_mean=False,
        couple_scale=False,
        init_loc_fn=init_loc_fn,
        init_scale=init_scale,
    )


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

    @cached_property
    def outer(self) -> tuple[str, ...]:
        """Return the plates with latents that stand above rows of another plate."""
        return tuple(p.name for p in self.model.plates if p.dim and p.outer)

    @cached_property
    def rows(self) -> tuple[str, ...]:
        """Return the other plates with latents."""
        return tuple(p.name for p in self.model.plates if p.dim and not p.outer)

    @cached_property
    def uses_globals(self) -> bool:
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
        width = dim + sum(loc[p].size for p in self.outer)
        return {
            p: guide.init(loc[p], dim if p in self.outer else width)
            for p, guide in self.locals.items()
        }

    def above(
        self,
        plate: str,
        eta: dict[str, GuideParams],
        offset: Array,
        z_outer: Mapping[str, Array],
        data: SiloData,
    ) -> Array:
        """Return the offsets (width,) of globals and outer latents that rows are coupled to."""
        if plate in self.outer or not self.outer:
            return offset
        # Padded latents count as at their centre, so that they are coupled to nothing.
        offsets = [data.masked(p, z_outer[p] - eta[p]["loc"]).ravel() for p in self.outer]
        return jnp.concatenate([offset, *offsets])

    def recentre(
        self, eta: dict[str, GuideParams], offset: Array, data: SiloData
    ) -> dict[str, GuideParams]:
        """Return the same local guides, measured from a centre moved by ``offset`` (dim,)."""
        above = self.centres(eta, offset, data)
        return {p: self.locals[p].recentre(eta[p], above[p]) for p in eta}

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
        return {p: self.of_rows(p, theta, params, z_G, data) for p, params in moved.items()}

    def centres(
        self, eta: dict[str, GuideParams], offset: Array, data: SiloData
    ) -> dict[str, Array]:
        """Return the values (width,) that rows are coupled to at an ``offset`` (dim,)."""
        above: dict[str, Array] = {}
        z_outer: dict[str, Array] = {}
        for p in (*self.outer, *self.rows):
            above[p] = self.above(p, eta, offset, z_outer, data)
            if p in self.outer:
                z_outer[p] = self.locals[p].recentre(eta[p], above[p])["loc"]
        return above

    def composed_with(
        self, f: Callable[[Array], Array], eta: dict[str, GuideParams], at: Array
    ) -> dict[str, GuideParams]:
        """Return local guides as functions of ``u``, from the same guides as functions of ``f(u)``.

        ``f`` is affine, and ``at`` (dim,) is any point. Couplings are multiplied by the Jacobian of
        ``f``, by reverse mode, which never forms it.
        """
        if not eta:
            return eta
        width, (_, vjp) = len(at), jax.vjp(f, at)
        composed = {p: dict(params) for p, params in eta.items()}
        for params in composed.values():
            for name in ("mean_coupling", "scale_coupling"):
                if name not in params:
                    continue
                C = params[name]
                rows = jax.vmap(lambda row: vjp(row)[0])(C[..., :width].reshape(-1, width))
                own = rows.reshape(*C.shape[:-1], width)
                params[name] = jnp.concatenate([own, C[..., width:]], -1)
        return composed

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

    def of_rows(
        self, plate: str, theta: dict[str, Any], eta: GuideParams, z_G: Array, data: SiloData
    ) -> GuideParams:
        """Return the parameters of a plate's guide: those of the silo, or a network's output."""
        if plate not in self.encoders:
            return eta
        encoder = self.encoders[plate]
        return encoder.eta(theta[encoder.name], theta, z_G, data)


class LocalConfig(NamedTuple):
    """The complete settings of the guide of a silo plate's rows: see :class:`LocalGuide`."""

    plate: str
    covariance: str
    couple_mean: bool
    couple_scale: bool


class GuideConfig(NamedTuple):
    """The complete settings of a guide, for a model and the sizes of its silo plates."""

    globals: str
    rank: int | None
    locals: tuple[LocalConfig, ...]


Spec: TypeAlias = Structured | Amortised | AutoGuide


def resolve(
    spec: Spec | None,
    fm: FederatedModel,
    largest: Mapping[str, int],
    total: Mapping[str, int],
    *,
    at_mode: bool = False,
) -> GuideConfig:
    """Return complete settings of a guide, with a choice for each ``"auto"``.

    ``largest`` and ``total`` are rows of each silo plate at the largest silo, and at all silos
    together, up to powers of two. ``at_mode`` says whether a run starts at the mode, with steps in
    coordinates of the posterior.
    """
    spec = structured(spec)
    with_latents = [p for p in fm.plates if p.dim]
    # By the largest silo, padded: guides of all silos have one shape, and one program.
    width_outer = sum(p.dim * largest[p.name] for p in with_latents if p.outer)
    plates = []
    for p in with_latents:
        width = fm.dim + (0 if p.outer else width_outer)
        kind = _local_covariance(spec, fm, p, largest[p.name] * p.dim)
        couple = 0 < total[p.name] * p.dim * width <= COUPLINGS_UP_TO
        mean, scale = spec.couple_mean, spec.couple_scale
        if kind == AMORTISED:
            mean = scale = False
        mean, scale = (couple if own is None else own for own in (mean, scale))
        plates.append(LocalConfig(p.name, kind, mean, scale))
    kind, dim = spec.globals, fm.dim
    if isinstance(kind, AutoGuide):
        return GuideConfig(type(kind).__name__, None, tuple(plates))
    if kind == "auto":
        latents = fm.named("latent")
        # A bounded site beside another one is most often a scale and its effects.
        scales = len(latents) > 1 and not all(_unbounded(fm, site) for site in latents)
        small, medium = dim <= FULL_COVARIANCE_UP_TO, dim <= LOW_RANK_UP_TO
        kind = "full" if small else "low_rank" if medium else "diagonal"
        kind = "skewed" if at_mode and scales and dim <= SKEWED_UP_TO else kind
    if kind not in ("diagonal", "full", "skewed", "low_rank"):
        raise GuideError(
            f"globals={kind!r}: expected 'auto', 'diagonal', 'full', 'skewed', 'low_rank' or a "
            "NumPyro autoguide."
        )
    # About the square root, as NumPyro's AutoLowRankMultivariateNormal has it, and at most 20.
    rank = spec.rank or min(int(dim**0.5) + 1, 20)
    return GuideConfig(kind, rank if kind == "low_rank" else None, tuple(plates))


def build_resolved(
    spec: Spec | None,
    resolved: GuideConfig | Sequence[Any],
    fm: FederatedModel,
    row_of: Callable[[str], RowShapes] | None = None,
) -> Guide:
    """Return the guide of complete settings; ``row_of`` gives the arrays of a plate's row.

    Settings may be the lists that JSON makes of them.
    """
    spec, (chosen, rank, plates) = structured(spec), resolved
    dims, dim, init_scale = {p.name: p.dim for p in fm.plates}, fm.dim, spec.init_scale
    locals_: dict[str, LocalGuide] = {}
    encoders: dict[str, Encoder] = {}
    for plate, covariance, mean, scale in plates:
        width = dims[plate]
        locals_[plate] = LocalGuide(width, covariance, mean, scale, init_scale)
        # The server and the plan need the guide's shapes only, and know no rows.
        if covariance == AMORTISED and row_of is not None:
            kind = _local_spec(spec, fm, plate)
            encoders[plate] = encoder_of(kind, fm, plate, width, row_of(plate), init_scale)
    globals_: GlobalGuide[Array]
    if isinstance(spec.globals, AutoGuide):
        globals_ = from_autoguide(spec.globals, dim)
    elif chosen == "diagonal":
        globals_ = Diagonal(dim, init_scale)
    elif chosen == "full":
        globals_ = Full(dim, init_scale)
    elif chosen == "skewed":
        # Bounded sites first: scales before their effects.
        sites = sorted(fm.named("latent"), key=lambda site: _unbounded(fm, site))
        order = tuple(i for s in sites for i in range(s.start, s.stop))
        globals_ = Skewed(dim, init_scale, order)
    else:
        globals_ = LowRank(dim, init_scale, rank or 1)
    return Guide(fm, globals_, locals_, spec.init_loc_fn, encoders)


def amortises(spec: Spec | None) -> bool:
    """Return whether any plate has an amortised guide."""
    kinds = structured(spec).locals
    each = kinds.values() if isinstance(kinds, Mapping) else [kinds]
    return any(isinstance(kind, Amortised) for kind in each)


def structured(spec: Spec | None) -> Structured:
    """Return the settings that a guide of the user stands for; refuse what is no guide of ours."""
    if isinstance(spec, Amortised):
        spec = Structured(locals=spec)
    if isinstance(spec, AutoGuide):
        spec = Structured(globals=spec, init_loc_fn=spec.init_loc_fn)
    spec = Structured() if spec is None else spec
    if not isinstance(spec, Structured):
        raise GuideError(
            f"expected numpyro_fed.guides.Structured(...) or a NumPyro autoguide, got "
            f"{type(spec).__name__}. A guide must be a function of explicit noise, so hand-written "
            "guides cannot be used; leave guide out for a good default."
        )
    if not spec.init_scale > 0:
        raise GuideError(f"init_scale must be positive, got {spec.init_scale}.")
    return spec


def _unbounded(fm: FederatedModel, site: Site) -> bool:
    support = fm.structure.supports[site.name]
    base = getattr(support, "base_constraint", support)
    return base in (constraints.real, constraints.real_vector)


def _local_spec(spec: Structured, fm: FederatedModel, plate: str) -> Any:
    """Return the user's setting for a plate."""
    kind = spec.locals
    if isinstance(kind, Mapping):
        if plate not in kind:
            sites = ", ".join(f"'{s.name}'" for s in fm.named("latent", plate))
            raise GuideError(
                f"the guide does not cover the site {sites} in silo_plate '{plate}': add '{plate}' "
                f"to locals={dict(kind)}."
            )
        kind = kind[plate]
    return kind


def _local_covariance(spec: Structured, fm: FederatedModel, p: Plate, size: int) -> str:
    kind = _local_spec(spec, fm, p.name)
    if isinstance(kind, Amortised):
        if p.outer:
            raise GuideError(
                f"guides.Amortised for silo_plate '{p.name}': rows of another plate depend on its "
                f"latents, and a network reads one row at a time. Say locals={{'{p.name}': 'full', "
                "...}, and Amortised() for the plate below."
            )
        return AMORTISED
    if kind == "auto":
        if p.outer and size <= JOINT_UP_TO:
            return "joint"
        return "full" if p.dim <= FULL_ROW_UP_TO else "diagonal"
    if kind not in ("diagonal", "full", "joint"):
        raise GuideError(
            f"locals={kind!r} for silo_plate '{p.name}': expected 'auto', 'diagonal', 'full', "
            "'joint' or guides.Amortised(...)."
        )
    return kind
