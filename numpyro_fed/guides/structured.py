"""The settings of a guide: the user's, complete ones for a model, and the guide made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from jax import Array
from numpyro.distributions import constraints
from numpyro.infer.autoguide import AutoGuide

from numpyro_fed.basics.errors import GuideError
from numpyro_fed.guides.global_guides import (
    Diagonal,
    Full,
    GlobalGuide,
    LowRank,
    Skewed,
    from_autoguide,
)
from numpyro_fed.guides.guide import Guide
from numpyro_fed.guides.local_guides import (
    AMORTISED,
    Amortised,
    Encoder,
    LocalGuide,
    RowShapes,
    encoder_of,
)
from numpyro_fed.numerics.gaussian import FULL_COVARIANCE_UP_TO
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.site_table import Site

# Sizes up to which "auto" takes the richer guide.
# Globals: a skewed guide has three times the parameters of a full one, and a loop over coordinates
# where its density is evaluated at a given point; a low-rank one has 20 columns at most.
SKEWED_UP_TO = 128
LOW_RANK_UP_TO = 20_000
# Latents of one row: at 8, an earlier bound, a state-space model of patients had k-hat 1.05, and
# with full covariances 0.35 (docs/results/raw_data.md).
FULL_ROW_UP_TO = 30
JOINT_UP_TO = 32  # latents of an outer plate at one silo, which then share one covariance
# Coefficients of all rows together: 40 MB in single precision, each way.
COUPLINGS_UP_TO = 10_000_000


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


class GuideConfig(NamedTuple):
    """The complete settings of a guide, for a model and the sizes of its silo plates.

    ``locals`` has for each plate its name, and the kind of covariance, ``couple_mean`` and
    ``couple_scale`` of a :class:`LocalGuide`.
    """

    globals: str
    rank: int | None
    locals: tuple[tuple[str, str, bool, bool], ...]


Spec: TypeAlias = Structured | Amortised | AutoGuide


def resolve_guide(
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
    spec = as_structured(spec)
    with_latents = [p for p in fm.plates if p.dim]
    # By the largest silo, padded: guides of all silos have one shape, and one program.
    above = fm.outer_plates
    width_outer = sum(p.dim * largest[p.name] for p in with_latents if p.name in above)
    plates = []
    for p in with_latents:
        kind = _setting_of_plate(spec, fm, p.name)
        mean, scale = spec.couple_mean, spec.couple_scale
        if isinstance(kind, Amortised):
            if p.outer:
                raise GuideError(
                    f"guides.Amortised for silo_plate '{p.name}': rows of another plate depend on "
                    "its latents, and a network reads one row at a time. Say "
                    f"locals={{'{p.name}': 'full', ...}}, and Amortised() for the plate below."
                )
            kind, mean, scale = AMORTISED, False, False
        elif kind == "auto" and p.name in above and largest[p.name] * p.dim <= JOINT_UP_TO:
            kind = "joint"
        elif kind == "auto":
            kind = "full" if p.dim <= FULL_ROW_UP_TO else "diagonal"
        elif kind not in ("diagonal", "full", "joint"):
            raise GuideError(
                f"locals={kind!r} for silo_plate '{p.name}': expected 'auto', 'diagonal', 'full', "
                "'joint' or guides.Amortised(...)."
            )
        width = fm.dim + (0 if p.name in above else width_outer)
        couple = 0 < total[p.name] * p.dim * width <= COUPLINGS_UP_TO
        mean, scale = (couple if own is None else own for own in (mean, scale))
        plates.append((p.name, kind, mean, scale))
    # About the square root, as NumPyro's AutoLowRankMultivariateNormal has it, and at most 20.
    rank = spec.rank or min(int(fm.dim**0.5) + 1, 20)
    chosen = spec.globals
    if isinstance(chosen, AutoGuide):
        return GuideConfig(type(chosen).__name__, None, tuple(plates))
    if chosen == "auto":
        latents = fm.named("latent")
        # A bounded site beside another one is most often a scale and its effects.
        scales = len(latents) > 1 and not all(_unbounded(fm, site) for site in latents)
        if at_mode and scales and fm.dim <= SKEWED_UP_TO:
            chosen = "skewed"
        elif fm.dim <= FULL_COVARIANCE_UP_TO:
            chosen = "full"
        else:
            chosen = "low_rank" if fm.dim <= LOW_RANK_UP_TO else "diagonal"
    if chosen not in ("diagonal", "full", "skewed", "low_rank"):
        raise GuideError(
            f"globals={chosen!r}: expected 'auto', 'diagonal', 'full', 'skewed', 'low_rank' or a "
            "NumPyro autoguide."
        )
    return GuideConfig(chosen, rank if chosen == "low_rank" else None, tuple(plates))


def build_guide(
    spec: Spec | None,
    resolved: GuideConfig | Sequence[Any],
    fm: FederatedModel,
    row_of: Callable[[str], RowShapes] | None = None,
) -> Guide:
    """Return the guide of complete settings; ``row_of`` gives the arrays of a plate's row.

    Settings may be the lists that JSON makes of them.
    """
    spec, (chosen, rank, plates) = as_structured(spec), resolved
    dims, init_scale = {p.name: p.dim for p in fm.plates}, spec.init_scale
    locals_: dict[str, LocalGuide] = {}
    encoders: dict[str, Encoder] = {}
    for plate, kind, mean, scale in plates:
        width = dims[plate]
        locals_[plate] = LocalGuide(width, kind, mean, scale, init_scale)
        # The server and the plan need the guide's shapes only, and know no rows.
        if kind == AMORTISED and row_of is not None:
            setting = _setting_of_plate(spec, fm, plate)
            encoders[plate] = encoder_of(setting, fm, plate, width, row_of(plate), init_scale)
    globals_: GlobalGuide[Array]
    if isinstance(spec.globals, AutoGuide):
        globals_ = from_autoguide(spec.globals, fm.dim)
    elif chosen == "skewed":
        # Bounded sites first: scales before their effects.
        sites = sorted(fm.named("latent"), key=lambda site: _unbounded(fm, site))
        order = tuple(i for s in sites for i in range(s.start, s.stop))
        globals_ = Skewed(fm.dim, init_scale, order)
    elif chosen == "low_rank":
        globals_ = LowRank(fm.dim, init_scale, rank or 1)
    else:
        globals_ = (Full if chosen == "full" else Diagonal)(fm.dim, init_scale)
    return Guide(fm, globals_, locals_, spec.init_loc_fn, encoders)


def uses_amortised(spec: Spec | None) -> bool:
    """Return whether any plate has an amortised guide."""
    settings = as_structured(spec).locals
    each = settings.values() if isinstance(settings, Mapping) else [settings]
    return any(isinstance(setting, Amortised) for setting in each)


def as_structured(spec: Spec | None) -> Structured:
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
    """Return whether a site's support is all numbers."""
    support = fm.structure.supports[site.name]
    base = getattr(support, "base_constraint", support)
    return base in (constraints.real, constraints.real_vector)


def _setting_of_plate(spec: Structured, fm: FederatedModel, plate: str) -> Any:
    """Return the user's setting for a plate."""
    setting = spec.locals
    if isinstance(setting, Mapping):
        if plate not in setting:
            sites = ", ".join(f"'{s.name}'" for s in fm.named("latent", plate))
            raise GuideError(
                f"the guide does not cover the site {sites} in silo_plate '{plate}': add '{plate}' "
                f"to locals={dict(setting)}."
            )
        setting = setting[plate]
    return setting
