"""The site table: what a model's trace says about globals, locals and silo plates."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import numpyro.distributions as dist
from jax import Array
from numpyro import handlers
from numpyro.distributions import biject_to, constraints

from numpyro_fed.data import SiloData, Sizes, signature
from numpyro_fed.errors import DataError, MissingExtraError, ModelError
from numpyro_fed.primitives import silo_plate_of


class Site(NamedTuple):
    """One row of the site table.

    Attributes
    ----------
    name, kind : str
        ``kind`` is ``"latent"``, ``"observed"``, ``"param"`` or ``"deterministic"``.
    plate : str or None
        The innermost silo plate around the site; None for a global.
    shape : tuple of int
        Unconstrained shape; for a local latent the shape of one row.
    axis : int or None
        Which axis of the site's value (and of its unconstrained value) runs over rows.
    start, stop : int
        The latent's place in ``z_G``, or in a row of ``z_L[plate]``.
    support : str
        The support, for people and for fingerprints.
    event_dim : int
        How many axes of a latent's value make one event of its distribution.
    """

    name: str
    kind: str
    plate: str | None
    shape: tuple[int, ...] = ()
    axis: int | None = None
    start: int = 0
    stop: int = 0
    support: str = ""
    event_dim: int = 0


class Plate(NamedTuple):
    """A silo plate: its name, the latent dimension of one row, and its level.

    An *outer* plate holds latents that rows of another silo plate depend on, as a hospital's
    effect stands above its patients.
    """

    name: str
    dim: int
    outer: bool


class Structure(NamedTuple):
    """What one abstract trace at one silo's shapes shows.

    Attributes
    ----------
    sites : tuple of Site
        In the order of the trace.
    sizes : dict
        The size of each silo plate.
    nested : bool
        Whether a site stands in two silo plates at once.
    supports : dict
        The support of each global latent and the constraint of each ``numpyro.param``.
    """

    sites: tuple[Site, ...]
    sizes: Sizes
    nested: bool
    supports: dict[str, Any]


def structures(model: Callable, silos: Sequence[SiloData]) -> list[Structure]:
    """The structure at each silo; one abstract trace for each distinct set of shapes."""
    known: dict[tuple, Structure] = {}
    for j, data in enumerate(silos):
        if signature(data) not in known:
            known[signature(data)] = structure(model, data, j)
    return [known[signature(data)] for data in silos]


def structure(model: Callable, data: SiloData, j: int) -> Structure:
    """Trace the model abstractly at silo ``j``'s shapes and read its sites."""
    found: list[Structure] = []

    def run(key: Array, data: SiloData) -> None:
        trace = handlers.trace(handlers.seed(model, key)).get_trace(**data.kwargs)
        found.append(_read_trace(trace))

    try:
        jax.eval_shape(run, jax.random.key(0), data)
    except (ModelError, DataError) as error:
        raise type(error)(f"silo {j}: {error}") from error
    except ImportError as error:
        if "equinox" in str(error):
            raise MissingExtraError("equinox", "nn") from error
        raise
    except Exception as error:
        shapes = {k: getattr(v, "shape", v) for k, v in data.kwargs.items()}
        raise ModelError(
            f"the model raised {type(error).__name__} at silo {j}, which holds {shapes}: {error}"
        ) from error
    return found[0]


def _read_trace(trace: dict[str, Any]) -> Structure:
    sizes = {
        s["name"]: s["args"][0]
        for s in trace.values()
        if s["type"] == "plate" and silo_plate_of(s) == s["name"]
    }
    if not sizes:
        if any("silo_plate" in s for s in trace.values()):
            raise ModelError(
                "a handler such as numpyro.handlers.scope renames what is inside the silo_plate, "
                "whose rows can then not be told apart. Put the silo_plate outside of that handler."
            )
        raise ModelError(
            "the model has no silo_plate, so nothing says which rows belong to a silo. Replace "
            "the numpyro.plate over rows by numpyro_fed.silo_plate."
        )
    sites: list[Site] = []
    places: dict[str | None, int] = {}
    supports: dict[str, Any] = {}
    nested = False
    for site in trace.values():
        plate = silo_plate_of(site)
        nested |= sum(f.name in sizes for f in site.get("cond_indep_stack", ())) > 1
        if site["type"] == "sample":
            entry = _read_sample(site, plate, sizes)
            width = math.prod(entry.shape)
            if entry.kind == "latent":
                start = places.get(plate, 0)
                places[plate] = start + width
                entry = entry._replace(start=start, stop=start + width)
                if plate is None:
                    supports[entry.name] = site["fn"].support
            sites.append(entry)
        elif site["type"] == "param":
            support = site["kwargs"].get("constraint", constraints.real)
            supports[site["name"]] = support
            sites.append(Site(site["name"], "param", plate, support=_support_name(support)))
        elif site["type"] == "deterministic":
            sites.append(Site(site["name"], "deterministic", plate))
        elif site["type"] == "plate" and site["args"][1] not in (None, site["args"][0]):
            raise ModelError(
                f"plate '{site['name']}' draws {site['args'][1]} of {site['args'][0]} rows: a "
                "subsample would be the same in every round. Leave subsample_size out."
            )
        elif site["type"] == "mutable":
            raise ModelError(
                f"site '{site['name']}' is mutable state (numpyro_mutable, batch norm), which has "
                "no meaning in a log density. Use numpyro.param for what is learned."
            )
    return Structure(tuple(sites), sizes, nested, supports)


def _read_sample(site: dict[str, Any], plate: str | None, sizes: Sizes) -> Site:
    name, fn = site["name"], site["fn"]
    if site["is_observed"]:
        if plate is None and not site["infer"].get("is_auxiliary"):
            raise ModelError(
                f"site '{name}' is observed outside of every silo_plate: the server has no data. "
                f"Put '{name}' inside the silo_plate of the rows that it belongs to."
            )
        return Site(name, "observed", plate)
    if fn.support is None or fn.support.is_discrete:
        base = type(getattr(fn, "base_dist", fn)).__name__
        raise ModelError(
            f"site '{name}' is a discrete latent ({base}). Sum it out, for example with a "
            "numpyro.distributions.Mixture likelihood, or observe it."
        )
    if _is_masked(fn):
        warnings.warn(
            f"the latent site '{name}' is masked: where the mask is False it has no prior, so that "
            "its posterior is improper and a bound can grow for ever. Mask only the observed site "
            "(obs_mask adds such a latent; give a mask to numpyro.handlers.mask instead).",
            stacklevel=2,
        )
    try:
        bijection = biject_to(fn.support)
        value_shape = tuple(bijection.inverse_shape(fn.shape()))
    except NotImplementedError as error:
        raise ModelError(
            f"site '{name}' has the support {fn.support}, to which NumPyro has no bijection from "
            "unconstrained space. Reparametrise it (numpyro.handlers.reparam)."
        ) from error
    if plate is None:
        support = _support_name(fn.support)
        return Site(name, "latent", None, value_shape, support=support, event_dim=fn.event_dim)
    dim = next(f.dim for f in site["cond_indep_stack"] if f.name == plate)
    axis = len(fn.batch_shape) + dim
    row_shape = value_shape[:axis] + value_shape[axis + 1 :]
    return Site(name, "latent", plate, row_shape, axis, support=_support_name(fn.support))


def check_same_sites(first: Structure, other: Structure, j: int) -> None:
    """Refuse a silo whose site table differs from that of the first one."""
    if other.sites == first.sites and other.sizes.keys() == first.sizes.keys():
        return
    mine, theirs = ({s.name: s for s in x.sites} for x in (other, first))
    for name in [*theirs, *mine]:
        if (name in mine) != (name in theirs):
            here, there = ("silo 0", f"silo {j}") if name in theirs else (f"silo {j}", "silo 0")
            raise ModelError(
                f"site '{name}' exists at {here} but not at {there}. All silos share one model: "
                "mark what is missing at a silo by a mask instead of leaving a site out."
            )
    for name in theirs:
        if mine[name] == theirs[name]:
            continue
        level = "global" if theirs[name].plate is None else "local"
        raise ModelError(
            f"the {level} site '{name}' has shape {mine[name].shape} and support "
            f"{mine[name].support or '-'} at silo {j}, but shape {theirs[name].shape} and support "
            f"{theirs[name].support or '-'} at silo 0. It must be the same at every silo."
        )
    raise ModelError(
        f"silo {j} has the silo plates {sorted(other.sizes)}, silo 0 has {sorted(first.sizes)}."
    )


def _is_masked(fn: Any) -> bool:
    while isinstance(fn, dist.ExpandedDistribution | dist.Independent):
        fn = fn.base_dist
    return isinstance(fn, dist.MaskedDistribution) and fn._mask is not True


def _is_unit(interval: Any) -> bool:
    bounds = interval.lower_bound, interval.upper_bound
    known = not any(isinstance(b, jax.core.Tracer) for b in bounds)
    return known and all(np.all(np.equal(b, n)) for b, n in zip(bounds, (0, 1), strict=True))


def _support_name(support: Any) -> str:
    """Type of a support without its bounds, which may depend on other sites."""
    if isinstance(support, constraints.independent):
        return f"{_support_name(support.base_constraint)}^{support.reinterpreted_batch_ndims}"
    if type(support) is type(constraints.interval(0, 1)) and _is_unit(support):
        return "UnitInterval"
    return type(support).__name__.lstrip("_")
