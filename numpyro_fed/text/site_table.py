"""The site table of a model: its sites with shapes, supports and silo plates, read off a trace.

The model is traced abstractly at the shapes of a silo's data (:mod:`numpyro_fed.text.traces`), so
that nothing is computed and no value of the data is read. Errors of a text name the silo.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from numpyro import handlers
from numpyro.distributions import Distribution, biject_to, constraints

from numpyro_fed.basics.errors import DataError, MissingExtraError, ModelError
from numpyro_fed.data.silo_data import SiloData, Sizes
from numpyro_fed.text.handlers import without_kink
from numpyro_fed.text.silo_plate import is_flat, is_foreign, silo_frames, silo_plate_of, unwrapped

Theta = dict[str, Any]  # parameters by name, unconstrained
Rows = dict[str, Array]  # numbers of the rows of each silo plate, (rows, ...)


class Site(NamedTuple):
    """One row of the site table."""

    name: str
    kind: str  # "latent", "discrete", "observed", "factor", "param" or "deterministic"
    plate: str | None  # the innermost silo plate around the site; None for a global
    shape: tuple[int, ...] = ()  # unconstrained shape; for a local latent the shape of one row
    # which axis of the site's value (and of its unconstrained value) runs over rows
    axis: int | None = None
    start: int = 0  # the latent's place in z_G, or in a row of z_L[plate]
    stop: int = 0
    support: str = ""  # the support, for people and for fingerprints
    event_dim: int = 0  # how many axes of a latent's value make one event of its distribution
    labels: tuple[str, ...] = ()  # names of the entries along its last axis, infer={"labels": ...}

    @property
    def is_local_latent(self) -> bool:
        """Return whether it is a latent of rows, a discrete one that is summed out included."""
        return self.kind in ("latent", "discrete") and self.plate is not None

    def whole(self, sizes: Sizes) -> tuple[int, ...]:
        """Return the unconstrained shape of all of a latent, at these sizes of silo plates."""
        rows = () if self.plate is None else (sizes[self.plate],)
        return (*self.shape[: self.axis or 0], *rows, *self.shape[self.axis or 0 :])


class Plate(NamedTuple):
    """A silo plate: its name, the latent dimension of one row, and its level.

    An *outer* plate holds latents that rows of another silo plate depend on, as a hospital's
    effect stands above its patients.
    """

    name: str
    dim: int
    outer: bool


class Structure(NamedTuple):
    """The structure of a model at the shapes of one silo's data."""

    sites: tuple[Site, ...]  # in the order of the trace
    sizes: Sizes  # the size of each silo plate
    nested: bool  # whether a site is in two silo plates at once
    # the support of each global latent, and the constraint of each numpyro.param
    supports: dict[str, Any]
    masked: dict[str, bool]  # the latents that are masked; True if the mask is False everywhere
    improper: tuple[str, ...] = ()  # the latents whose prior is ImproperUniform
    # the global latents whose prior ties many entries together: maps and processes
    fields: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()  # the latents whose distribution is a class of the user's own
    kinked: bool = False  # whether the density of a sample site has a kink


# A Gaussian process at so many points or more is warned of, since it is fitted as one global
# latent of that dimension. Smaller ones are no burden, and a multivariate normal prior of a few
# coefficients must not cause a warning.
MANY_POINTS = 50


def read_trace(trace: dict[str, Any], split: bool, summed_out: Collection[str] = ()) -> Structure:
    """Return the structure of a trace; one without a silo plate is refused if ``split``.

    Discrete latents are refused but for those that are ``summed_out``.
    """
    sizes: Sizes = {}
    # A plate in the body of a scan has no message of its own in the trace, only frames.
    for site in trace.values():
        if site["type"] == "plate" and silo_plate_of(site) == site["name"]:
            sizes.setdefault(site["name"], site["args"][0])
        sizes |= {f.name: f.size for f in silo_frames(site) if f.name not in sizes}
    # A scope renames plates and frames, but not the plate's name that messages carry.
    lost = [s["name"] for s in trace.values() if silo_plate_of(s) not in (None, *sizes)]
    if lost:
        raise ModelError(
            f"a handler such as numpyro.handlers.scope renames the silo_plate around '{lost[0]}', "
            "whose rows can then not be told apart. Put the silo_plate outside of that handler."
        )
    if split and not sizes:
        raise ModelError(
            "the model has no silo_plate, so nothing says which rows belong to a silo. Replace "
            "the numpyro.plate over rows by numpyro_fed.silo_plate."
        )
    sites: list[Site] = []
    ends: dict[str | None, int] = {}  # so far, of z_G and of a row of each plate's z_L
    supports: dict[str, Any] = {}
    latents: dict[str, Distribution] = {}
    for site in trace.values():
        plate = silo_plate_of(site)
        if site["type"] == "sample":
            entry = _read_sample(site, plate, site["name"] in summed_out)
            if entry.kind == "latent":
                start = ends.get(plate, 0)
                ends[plate] = start + math.prod(entry.shape)
                entry = entry._replace(start=start, stop=ends[plate])
                latents[entry.name] = site["fn"]
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
    stacks = (site.get("cond_indep_stack", ()) for site in trace.values())
    sampled = [site["fn"] for site in trace.values() if site["type"] == "sample"]
    return Structure(
        tuple(sites),
        sizes,
        nested=any(sum(f.name in sizes for f in frames) > 1 for frames in stacks),
        supports=supports,
        masked={name: off for name, fn in latents.items() if (off := _masked(fn)) is not None},
        improper=tuple(name for name, fn in latents.items() if is_flat(fn)),
        fields=tuple(n for n, fn in latents.items() if n in supports and _is_field(n, fn)),
        foreign=tuple(name for name, fn in latents.items() if is_foreign(fn)),
        kinked=any(without_kink(fn) is not fn for fn in sampled),
    )


def _read_sample(site: dict[str, Any], plate: str | None, is_summed_out: bool) -> Site:
    name, fn = site["name"], site["fn"]
    if site["is_observed"]:
        # numpyro.factor marks its site so.
        kind = "factor" if site["infer"].get("is_auxiliary") else "observed"
        return Site(name, kind, plate)
    if is_summed_out:
        shape = tuple(jnp.shape(site["value"]))
        row_shape, axis = _without_rows(site, shape, plate)
        return Site(name, "discrete", plate, row_shape, axis, support=_support_name(fn.support))
    if fn.support is None or fn.support.is_discrete:
        base = type(getattr(fn, "base_dist", fn)).__name__
        raise ModelError(f"site '{name}' is a discrete latent ({base}), {_remedy(site, plate)}")
    try:
        shape = unconstrained_shape(site)
    except NotImplementedError as error:
        raise ModelError(
            f"site '{name}' has the support {fn.support}, to which NumPyro has no bijection from "
            "unconstrained space. Reparametrise it (numpyro.handlers.reparam)."
        ) from error
    support, value_shape = _support_name(fn.support), jnp.shape(site["value"])
    labels = tuple(map(str, site["infer"].get("labels", ())))
    if plate is None:
        if labels and (not value_shape or len(labels) != value_shape[-1]):
            raise ModelError(
                f"site '{name}' has {len(labels)} labels, and its value the shape {value_shape}: "
                "one for each entry along the last axis is expected."
            )
        return Site(
            name, "latent", None, shape, support=support, event_dim=fn.event_dim, labels=labels
        )
    row_shape, axis = _without_rows(site, shape, plate)
    # Of a latent of rows, the last axis is another than that of rows.
    labels = labels if fn.event_dim and len(labels) == value_shape[-1] else ()
    return Site(name, "latent", plate, row_shape, axis, support=support, labels=labels)


def _without_rows(
    site: dict[str, Any], shape: tuple[int, ...], plate: str | None
) -> tuple[tuple[int, ...], int]:
    """Return the shape of one row of a latent of this shape, and the axis along which rows are."""
    dim = next(f.dim for f in site["cond_indep_stack"] if f.name == plate)
    # A plate's dim counts batch axes from the right; the axes of an event come after them.
    axis = jnp.ndim(site["value"]) - site["fn"].event_dim + dim
    return shape[:axis] + shape[axis + 1 :], axis


def _remedy(site: dict[str, Any], plate: str | None) -> str:
    """Return what to do with a discrete latent that is not summed out."""
    if plate is None:
        return (
            "which all rows share: its values cannot be summed out row by row. Fit one model for "
            "each of its values and weigh them by their evidence, or observe it (where obs is "
            "None at one silo alone, mask its rows by numpyro.handlers.mask, or leave that silo "
            "out)."
        )
    if site["infer"].get("_scan_current_index") is not None or site.get("_control_flow_done"):
        return (
            "in the body of a scan. Sum it out there: carry the log probability log_p (states, "
            "rows) of each state, log_p = logsumexp(log_p[:, None] + log_transition[..., None], 0) "
            "+ log_likelihood, and add numpyro.factor('chain', logsumexp(log_p, 0)) in the "
            "silo_plate."
        )
    return (
        "whose values are not finitely many plain numbers that the text knows. Bernoulli, "
        "Categorical, DiscreteUniform and Binomial latents in a silo_plate are summed out, if "
        "their bounds are Python numbers and no data. Bound it so, sum it out by a "
        "numpyro.distributions.Mixture likelihood, or observe it (where obs is None at one silo "
        "alone, mask its rows by numpyro.handlers.mask, or leave that silo out)."
    )


def unconstrained_shape(site: dict[str, Any]) -> tuple[int, ...]:
    """Return the unconstrained shape of a latent, ``sample_shape`` and steps of a scan included."""
    return tuple(biject_to(site["fn"].support).inverse_shape(jnp.shape(site["value"])))


def _is_field(name: str, fn: Distribution) -> bool:
    """Return whether a prior is an autoregression of areas, or a process at many points."""
    fn = unwrapped(fn)
    # The shared part of a SeparatorPrior: it has been substituted already.
    if name.endswith("/border"):
        return False
    many = isinstance(fn, dist.MultivariateNormal) and fn.event_shape[0] >= MANY_POINTS
    if many and not isinstance(fn.scale_tril, jax.core.Tracer):
        # A diagonal covariance ties nothing together, though it is written as a matrix.
        many = bool(np.tril(fn.scale_tril, -1).any())
    return many or hasattr(fn, "adj_matrix")


def _masked(fn: Distribution) -> bool | None:
    """Return whether a latent is masked everywhere; None if it is not masked."""
    fn = unwrapped(fn)
    if not isinstance(fn, dist.MaskedDistribution) or fn._mask is True:
        return None
    # A mask that is data is a tracer here; it counts as one that leaves some elements.
    return not isinstance(fn._mask, jax.core.Tracer) and not np.any(fn._mask)


def _support_name(support: constraints.Constraint) -> str:
    """Return the type of a support in words, without bounds: these may depend on other sites."""
    if isinstance(support, constraints.independent):
        return f"{_support_name(support.base_constraint)}^{support.reinterpreted_batch_ndims}"
    # NumPyro's unit_interval has a class of its own; interval(0, 1) is the same support.
    if type(support) is type(constraints.interval(0, 1)):
        bounds = support.lower_bound, support.upper_bound
        known = not any(isinstance(b, jax.core.Tracer) for b in bounds)
        if known and all(np.all(np.equal(b, n)) for b, n in zip(bounds, (0, 1), strict=True)):
            return "UnitInterval"
    return type(support).__name__.lstrip("_")


def unpack(sites: Sequence[Site], z_G: Array, z_L: Rows) -> dict[str, Array]:
    """Return each latent's value from ``z_G`` (dim,) and ``z_L`` {plate: (rows, dim)}."""
    values = {}
    for s in sites:
        if s.kind == "latent" and s.plate is None:
            values[s.name] = z_G[s.start : s.stop].reshape(s.shape)
        elif s.kind == "latent":
            rows = z_L[str(s.plate)][:, s.start : s.stop]
            values[s.name] = jnp.moveaxis(rows.reshape(len(rows), *s.shape), 0, s.axis or 0)
    return values


def sum_rows(value: Array) -> Array:
    """Return the sum over all axes but the first, (rows,)."""
    flat = value.reshape(len(value), math.prod(value.shape[1:]))
    if flat.shape[1] == 1:
        return flat[:, 0]
    # A product with ones instead of a sum: XLA's CPU compiler would fuse the densities of rows of
    # a few numbers into the loop of the sum, where it computes them one by one instead of a vector
    # at a time. The precision is for accelerators, whose products round their operands otherwise.
    return jnp.dot(flat, jnp.ones(flat.shape[1], flat.dtype), precision="highest")


def check_shapes(trace: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    """Refuse observed sites whose shapes count a row more than once.

    NumPyro broadcasts observed values against their distribution: ``y`` of shape (n, 1) with a
    mean of shape (n,) makes n x n terms of n observations.
    """
    data_shapes = {name: a.shape for name, a in arrays.items()}
    for site in trace.values():
        frames = {f.dim: f for f in site.get("cond_indep_stack", ())}
        observed = site["type"] == "sample" and site["is_observed"]
        if not observed or not frames or site["value"] is None:
            continue
        name, fn = site["name"], site["fn"]
        value, expected = jnp.shape(site["value"]), tuple(fn.batch_shape + fn.event_shape)
        sizes = ", ".join(f"'{f.name}' of {f.size} at dim {d}" for d, f in sorted(frames.items()))
        shapes = (
            f"its observed values have the shape {value}, its distribution has {expected}, and the "
            f"plates around it are {sizes}"
        )
        try:
            whole = jnp.broadcast_shapes(value, expected)
        except ValueError as error:
            raise DataError(
                f"site '{name}': what is observed does not fit its distribution: {shapes}. "
                f"{lengths(arrays)}Pass as many values as there are rows."
            ) from error
        batch = whole[: len(whole) - fn.event_dim]
        # After a scan its steps are the leftmost axis, for which there is no plate.
        scanned = -len(batch) if site.get("_control_flow_done") else 0
        for dim, size in zip(range(-len(batch), 0), batch, strict=True):
            if size == 1 or dim == scanned or (dim in frames and size == frames[dim].size):
                continue
            here = frames.get(dim)
            which = f"plate '{here.name}' has {here.size}" if here else "no plate"
            raise ModelError(
                f"site '{name}' has {size} entries at dim {dim}, where there is {which}: {shapes}. "
                "Each row would count several times. If values and distribution have the same "
                "numbers in other shapes, make them alike (y.ravel(), or x @ beta with a vector "
                "beta); if one row has several values, put a numpyro.plate around them, or make "
                f"them one event (.to_event(1)). The data are {data_shapes}."
            )
        for frame in silo_frames(site):
            axis = len(value) - fn.event_dim + frame.dim
            if axis >= 0 and value[axis] == 1 < frame.size:
                raise ModelError(
                    f"site '{name}': one observed value stands for all {frame.size} rows of "
                    f"silo_plate '{frame.name}': {shapes}. Pass one value for each row. The data "
                    f"are {data_shapes}."
                )


def lengths(arrays: Mapping[str, Any]) -> str:
    """Return a sentence for messages about arrays of different lengths; empty if all agree."""
    long = {name: a.shape[0] for name, a in arrays.items() if a.shape}
    if len(set(long.values())) < 2:
        return ""
    words = ", ".join(f"'{name}' has {n}" for name, n in long.items())
    return f"The arrays differ in their numbers of rows: {words}. "


# The errors by which JAX says that a program needs values while it is traced.
NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerBoolConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


@contextmanager
def model_errors(owner: str, data: SiloData) -> Iterator[None]:
    """Turn all errors of a model into a ModelError with the owner and the shapes of its data."""
    try:
        yield
    except (ModelError, DataError) as error:
        raise type(error)(f"{owner}: {error}") from error
    except ImportError as error:
        if "equinox" in str(error):
            raise MissingExtraError("equinox", "nn") from error
        raise
    except NEEDS_VALUES as error:
        raise ModelError(
            f"the model asks for the values of its data or latents at {owner}, which holds "
            f"{data.described}, but it is compiled once for all values and sees shapes alone "
            "(np.unique(h), y[h == 0], int(h.max()) and `if y.sum() > 0` ask for values). Make it "
            "data: compute it before the run and pass it as an array, a plain int or a mask "
            f"(numpyro.handlers.mask for rows, jnp.where for branches). {type(error).__name__}: "
            f"{error}"
        ) from error
    except Exception as error:
        unequal = lengths(data.arrays) if "shape" in str(error) else ""
        raise ModelError(
            f"the model raised {type(error).__name__} at {owner}, which holds {data.described}: "
            f"{unequal}{error}"
        ) from error


class NamesApart(handlers.trace):
    """A trace that refuses a name of two things, of which NumPyro's trace holds the last alone."""

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        if first := self.trace.get(msg.get("name", "")):
            name, one, other = first["name"], _kind_in_words(first), _kind_in_words(msg)
            # A plate may be entered again, but not inside of itself; a parameter always.
            inside = any(frame.name == name for frame in msg.get("cond_indep_stack", ()))
            again = first["type"] == "param" or (first["type"] == "plate" and not inside)
            if one != other or not again:
                other = other.replace("a ", "another ", 1) if one == other else other
                raise ModelError(
                    f"{one} and {other} share the name '{name}', and NumPyro's trace holds one "
                    "thing by a name. Rename one of them."
                )
        super().postprocess_message(msg)


def _kind_in_words(msg: dict[str, Any]) -> str:
    """Return what a message is of, in words that are those of a second message of the same."""
    local, kind = silo_plate_of(msg), msg["type"]
    if kind == "plate":
        # The sizes of other plates are read by no name.
        return f"a silo_plate of {msg['args'][0]} rows" if local == msg["name"] else "a plate"
    if kind == "param":
        support = _support_name(msg["kwargs"].get("constraint", constraints.real))
        return f"a parameter ({support}) of " + (f"silo_plate '{local}'" if local else "all silos")
    return "a sample site" if kind == "sample" else f"a numpyro.{kind}"
