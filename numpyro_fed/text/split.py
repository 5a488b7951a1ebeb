"""A text split over silos: log densities of globals and of silos, checks, and padded buckets.

The text is traced once at each distinct set of shapes. Sites inside of a silo plate become local,
all others global. Two kinds of checks refuse texts. Labels are propagated through the traced
program, to see which global sites depend on data or local latents. And the programs of the global
sites at different silos are compared, since the server evaluates them without any silo's data.

A :class:`Layout` has what depends on the shapes of data. Their values are checked when silos are
arranged in buckets, which are padded where that changes nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.basics.errors import DataError, GuideError, ModelError, ModelWarning
from numpyro_fed.data.minibatches import CutPlates, Minibatches
from numpyro_fed.data.padding import Bucket, arrays_with_rows, bucket
from numpyro_fed.data.silo_data import ReadSilos, SiloData, Sizes
from numpyro_fed.text.handlers import leaving_out_missing, localised, rounded
from numpyro_fed.text.indices import IndexCheck
from numpyro_fed.text.jaxprs import (
    NONE,
    Labels,
    propagate_labels,
    same_but_for_sizes,
)
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.row_checks import RowChecks
from numpyro_fed.text.sites import Structure
from numpyro_fed.text.traces import ARRAY, DENSITY, VALUE, Trace, Traces
from numpyro_fed.text.values import SupportCheck

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn

WHOLE = "Use batch_size=None."
PADDING_HINT = (
    " Pad the axis that differs (visits, say) to the largest size with any finite numbers, and "
    "leave these out by a mask array in the data and numpyro.handlers.mask around the observed "
    "site."
)


def split(model: Callable[..., Any], silos: Sequence[SiloData]) -> FederatedModel:
    """Split a model at its silo plates into log densities of globals and of silos.

    Refused are global sites, observed ones included, that depend on a local latent, on data or on
    what differs between silos, such as their numbers of rows; randomness outside of sample sites;
    sites that differ between silos; and NaN in what is read for something else than an outcome.
    """
    return _split(model, silos)[0]


def _split(
    model: Callable[..., Any], silos: Sequence[SiloData]
) -> tuple[FederatedModel, tuple[Sizes, ...], dict[str, str]]:
    """Return the split model, the sizes of plates at each silo, and the plate of each array."""
    missing = tuple(sorted({name for silo in silos for name in silo.missing}))
    text, model = model, leaving_out_missing(model, missing)
    traces = Traces(model)
    found = [traces.at(silo, f"silo {j}") for j, silo in enumerate(silos)]
    for j, other in enumerate(found):
        _check_same_sites(found[0].structure, other.structure, j)
    if any(s.kind == "deterministic" and s.plate is None for s in found[0].structure.sites):
        local = localised(model, silos[0].kwargs)
        if local is not model:
            traces = Traces(local)
            found = [traces.at(silo, f"silo {j}") for j, silo in enumerate(silos)]
    _warn_of_priors(found[0].structure)
    # The global functions run the text at one silo's shapes; the smallest one is the cheapest.
    smallest = min(range(len(silos)), key=lambda j: sum(a.size for a in silos[j].arrays.values()))
    trace, silo = found[smallest], silos[smallest]
    # A plate is outer if sites of other plates read its latents. Deterministic sites do not count:
    # they add nothing to the density.
    outer = frozenset(
        plate
        for s in trace.structure.sites
        if s.plate is not None and s.kind != "deterministic"
        for plate in trace.sources[s.name].plates - {s.plate}
    )
    smooth = None
    if trace.structure.kinked:
        smooth = FederatedModel(Traces(rounded(traces.model)), silo, outer)
    fm = FederatedModel(traces, silo, outer, smooth)
    _check_sources(trace)
    if missing:
        _check_missing(text, missing, silos, found)
    _check_observed(trace.structure, silo)
    sizes = tuple(one.structure.sizes for one in found)
    plate_of_array = arrays_with_rows(silos, sizes)
    _check_globals(fm, silos, found, plate_of_array)
    return fm, sizes, plate_of_array


def _check_same_sites(first: Structure, other: Structure, j: int) -> None:
    """Refuse silo ``j`` if its site table differs from that of silo 0."""
    if other.sites == first.sites and other.sizes.keys() == first.sizes.keys():
        return
    mine, theirs = ({s.name: s for s in x.sites} for x in (other, first))
    for name in [*theirs, *mine]:
        if (name in mine) != (name in theirs):
            has, lacks = ("silo 0", f"silo {j}") if name in theirs else (f"silo {j}", "silo 0")
            raise ModelError(
                f"site '{name}' exists at {has} but not at {lacks}. All silos share one model: "
                "mark what is missing at a silo by a mask instead of leaving a site out."
            )
    for name in theirs:
        if mine[name] == theirs[name]:
            continue
        level = "global" if theirs[name].plate is None else "local"
        raise ModelError(
            f"the {level} site '{name}' has shape {mine[name].shape} and support "
            f"{mine[name].support or '-'} at silo {j}, but shape {theirs[name].shape} and support "
            f"{theirs[name].support or '-'} at silo 0. It must be the same at every "
            f"silo.{'' if level == 'global' else PADDING_HINT}"
        )
    raise ModelError(
        f"silo {j} has the silo plates {sorted(other.sizes)}, silo 0 has {sorted(first.sizes)}."
    )


def _warn_of_priors(found: Structure) -> None:
    """Warn of flat priors, and of priors that tie the entries of a large latent together."""
    for name, everywhere in found.masked.items():
        warnings.warn(
            f"the prior of the latent site '{name}' is flat (its mask is False everywhere), and so "
            "improper: unless the data determine it, its posterior is improper, too, and a bound "
            "can grow for ever. Give it a proper prior, however wide, such as dist.Normal(0, 100)."
            if everywhere
            else f"the latent site '{name}' is masked: where the mask is False it has no prior, so "
            "that its posterior is improper and a bound can grow for ever. Mask only the observed "
            "site (obs_mask adds such a latent; give a mask to numpyro.handlers.mask instead).",
            category=ModelWarning,
            stacklevel=4,
        )
    for name in found.fields:
        warnings.warn(
            f"the prior of '{name}' ties all of its entries together, so that it is fitted as one "
            "large global latent, which all silos share. nf.handlers.substitute_prior puts a prior "
            "in its place in which silos are independent given what they share: "
            "nf.SeparatorPrior, nf.LowRankPrior, nf.BlockPrior, nf.SigmaPrior.",
            category=ModelWarning,
            stacklevel=4,
        )


def _check_sources(trace: Trace) -> None:
    """Refuse global sites that depend on data or local latents, and stray randomness."""
    for site in trace.structure.sites:
        name, sources = site.name, trace.sources[site.name]
        if sources.key:
            raise ModelError(
                f"the site '{name}' depends on randomness that is no latent: on "
                "numpyro.prng_key(), or on a site in the body of a scan inside a "
                "numpyro.handlers.scope. It would be the same in every round. Draw it by "
                "numpyro.sample, outside of that scope, or before the run and pass it as data."
            )
        if site.plate is not None or not (sources.data or sources.plates):
            continue
        if sources.data and site.kind == "observed":
            raise ModelError(
                f"site '{name}' is observed outside of every silo_plate, and depends on data, "
                f"which the server does not have. Put '{name}' inside the silo_plate of the rows "
                "that it belongs to."
            )
        if sources.data:
            raise ModelError(
                f"the global site '{name}' depends on data, which the server does not have. "
                f"Put '{name}' inside a silo_plate, or make it depend on globals alone."
            )
        plate = min(sources.plates)
        raise ModelError(
            f"the global site '{name}' depends on latents of silo_plate '{plate}', which "
            f"never leave their silo. Put '{name}' inside a silo_plate."
        )


def _check_missing(
    text: Callable[..., Any],
    missing: tuple[str, ...],
    silos: Sequence[SiloData],
    found: Sequence[Trace],
) -> None:
    """Refuse NaN in arguments that are read for something else than an outcome."""
    blind = Traces(leaving_out_missing(text, missing, blind=True))
    for name in missing:
        having = [(j, s.arrays[name]) for j, s in enumerate(silos) if name in s.arrays]
        first, _ = having[0]
        if sites := sorted(blind.at(silos[first]).readers(name)):
            j, array = next((p for p in having if np.isnan(p[1]).any()), having[0])
            raise DataError(
                f"silo {j}, '{name}': {int(np.isnan(array).sum())} of {array.size} values are "
                f"missing (NaN), and the site '{sites[0]}' reads '{name}'. Only outcomes may be "
                "missing: arguments that the text passes to obs= as they are, and reads nowhere "
                "else. Of a covariate leave out the rows, fill in a number that you can defend, or "
                "make what is missing a latent of its row. Of an outcome that the text computes "
                "(obs=jnp.log(y)) compute it before the run, or put any finite number in the place "
                "of NaN and `with numpyro.handlers.mask(mask=seen):` around the site, with a "
                "boolean array seen in the data."
            )
        supports = found[first].supports.items()
        if not {site for site, one in supports if one.whole} & found[first].readers(name):
            continue
        for j, array in having:
            if (odd := array[~np.isnan(array) & (array % 1 != 0)]).size:
                raise DataError(
                    f"silo {j}, '{name}': the outcome takes whole numbers, got {odd[0]:g}. Mend "
                    "it, or pass NaN where it is missing."
                )


def _check_observed(found: Structure, silo: SiloData) -> None:
    """Refuse a text that observes nothing: its posterior would be its prior."""
    if any(s.kind in ("observed", "factor") and s.plate for s in found.sites):
        return
    latents = [s for s in found.sites if s.kind == "latent" and s.plate]
    alike = [s for s in latents if s.name in silo.leaves] or latents
    named = " or ".join(f"'{s.name}' (silo_plate '{s.plate}')" for s in alike)
    nones = [name for name, value in silo.static if value is None]
    raise ModelError(
        "no site in a silo_plate is observed, so that the posterior would be the prior: "
        + (f"was obs= forgotten at {named}? " if named else "none is in a silo_plate. ")
        + (f"A silo holds None for {nones}. " if nones else "")
        + "Pass the data as numpyro.sample(..., obs=y), or add a numpyro.factor. "
        "Draws from the prior are numpyro.infer.Predictive's."
    )


def _check_globals(
    fm: FederatedModel,
    silos: Sequence[SiloData],
    found: Sequence[Trace],
    plate_of_array: Mapping[str, str],
) -> None:
    """Refuse global sites that depend on what differs between silos, such as numbers of rows."""
    first, sizes = found[0], found[0].structure.sizes
    # Silos of the same shapes share one trace.
    number = {trace: j for j, trace in reversed(list(enumerate(found)))}
    others = [(f"silo {j}", silos[j], found[j]) for j in sorted(number.values())[1:]]
    # If all silos have the same shapes, silo 0 with one more row is compared with itself.
    for plate in () if others else sizes:
        arrays = silos[0].arrays
        keys = [k for k, p in plate_of_array.items() if p == plate]
        if not (keys and sizes[plate]):
            continue
        more = {k: np.concatenate([arrays[k], arrays[k][:1]]) for k in keys}
        longer = replace(silos[0], arrays={**arrays, **more})
        try:
            others.append(("a silo with a row more", longer, fm.traces.at(longer)))
        except Exception:
            # The array must be as long as something else too, so that no other silo can have
            # another number of rows: there is nothing to compare.
            continue
    z_G = np.random.default_rng(0).normal(size=fm.dim)
    wanted = [o for kind in (DENSITY, VALUE) for o in first.outputs_of(kind, local=False)]

    def at_one_point(trace: Trace) -> dict[tuple[str, str], Array]:
        theta = fm.init_theta(jax.random.key(0))
        terms, values = trace.globals_at(theta, jnp.asarray(z_G))
        at = "at one point of unconstrained space"
        found = {
            (f"the value of the global site '{n}' {at}", "value"): v for n, v in values.items()
        }
        priors = {
            (f"the prior of the global site '{n}'", "log density"): v for n, v in terms.items()
        }
        return priors | found

    for who, silo, trace in others:
        # Equal programs are equal at every point, and nothing has to be compiled. Programs that
        # differ may still compute the same, so that values decide.
        mine, theirs = (one.part(wanted)[0] for one in (trace, first))
        if same_but_for_sizes(mine, theirs, {}):
            continue
        here, there = (jax.jit(partial(at_one_point, t))() for t in (trace, first))
        for (subject, what), value in here.items():
            other = there[subject, what]
            if np.shape(value) == np.shape(other) and np.allclose(
                value, other, rtol=1e-5, atol=1e-5, equal_nan=True
            ):
                continue
            held = silo.described, silos[0].described
            keys = [k for k in held[1] if held[0][k] != held[1][k]]
            own, its = ({k: one[k] for k in keys} for one in held)
            shown, expected = (
                np.array2string(np.ravel(v)[:4], precision=6, separator=", ").strip("[]")
                for v in (value, other)
            )
            raise ModelError(
                f"{subject} differs between silos: its {what} at one point is {shown} at {who}, "
                f"which holds {own}, but {expected} at silo 0, which holds {its}. It must not "
                "depend on numbers of rows or Python values that differ. Pass one number to all "
                "silos (that of all rows together, say), or let only local sites depend on it."
            )


class Layout(NamedTuple):
    """A split model and its checks: all that depends on the shapes of data, not on their values."""

    model: FederatedModel
    sizes: tuple[Sizes, ...]  # the true size of each silo plate at each silo
    plate_of_array: dict[str, str]  # the silo plate of each array that holds rows
    checks: RowChecks
    # (silo, data) -> None: the index check of one silo's values
    check_indices: Callable[[int, SiloData], None]
    supports: SupportCheck  # the check of observed values
    # the arrays of each silo plate whose rows can be separated, and must not read each other's data
    separable_rows: dict[str, tuple[str, ...]]

    @property
    def plates_of_arrays(self) -> dict[str, tuple[str, ...]]:
        """Return for each array of rows the silo plates that are as long at every silo."""
        return {
            key: tuple(p for p in self.sizes[0] if all(n[p] == n[plate] for n in self.sizes))
            for key, plate in self.plate_of_array.items()
        }

    def arrange(self, silos: Sequence[SiloData], *, summaries: bool = True) -> list[Bucket]:
        """Check the values of silos of these shapes, and return them in buckets.

        Padded and unpadded densities are compared at a random point. A model in which rows read
        each other's latents fails that comparison; the silos then stay unpadded, bucketed by
        their sizes, and a warning says so.
        """
        # A site in two silo plates has no row of its own that could be padded.
        buckets = bucket(silos, self.sizes, may_pad=not self.model.structure.nested)
        # Supports first: outside of them densities are NaN or infinite, and row checks compare
        # nothing there.
        for b in buckets:
            self.supports.check(b)
        for j, silo in enumerate(silos):
            self.check_indices(j, silo)
        apart = self.separable_rows if summaries else {}
        harmless = [
            self.checks.harmless_padding(b, silos, self.plate_of_array, apart) for b in buckets
        ]
        if all(harmless):
            return buckets
        warnings.warn(
            "the model's log density changes when a silo's rows are padded by copies of its first "
            "row and masked (does it summarise its rows, as x.mean(0) does, or does a row "
            "read another row's latents? check_decomposition tells). The silos stay "
            "unpadded: one program is compiled for each distinct size. To avoid this, compute such "
            "summaries before the run and pass them as data.",
            category=ModelWarning,
            stacklevel=4,
        )
        return bucket(silos, self.sizes, may_pad=False)


def layout_of(model: Callable[..., Any], silos: Sequence[SiloData]) -> Layout:
    """Return the layout of a model at silos of these shapes, cached with silos that were read."""
    if isinstance(silos, ReadSilos):
        return silos.once(model, partial(layout_of, model, tuple(silos)))
    fm, sizes, plate_of_array = _split(model, silos)
    return Layout(
        fm,
        sizes,
        plate_of_array,
        RowChecks(fm),
        IndexCheck(fm.terms_at_zero),
        SupportCheck(fm.traces, "silo {}"),
        separable_rows(fm, silos, sizes, plate_of_array),
    )


def lay_out(
    model: Callable[..., Any], silos: Sequence[SiloData], *, summaries: bool = True
) -> tuple[Layout, list[Bucket]]:
    """Split the model and bucket the silos; see :meth:`Layout.arrange`."""
    layout = layout_of(model, silos)
    return layout, layout.arrange(silos, summaries=summaries)


def separable_rows(
    fm: FederatedModel,
    silos: Sequence[SiloData],
    sizes: Sequence[Sizes],
    plate_of_array: Mapping[str, str],
) -> dict[str, tuple[str, ...]]:
    """Return the arrays of each silo plate that hold its rows, ``{plate: names}``.

    A plate is left out if its rows cannot be separated: if a site stands in two silo plates at
    once, if the text does not run with one row less (an adjacency matrix), or if it joins rows by
    an index among the data (the sum over the members of a group).
    """
    by_plate: dict[str, tuple[str, ...]] = {}
    for plate in sizes[0] if not fm.structure.nested else ():
        j = max(range(len(silos)), key=lambda j: sizes[j][plate])
        keys = [key for key, p in plate_of_array.items() if p == plate]
        alike = len({size[plate] for size in sizes}) == 1
        if sizes[j][plate] < 2 or not plate_follows_arrays(fm, silos[j], keys, plate):
            continue
        if alike:
            # With one size at all silos, an array may be as long as the plate by chance. It then
            # runs as well without being shortened, and is not an array of rows.
            keys = [
                k
                for k in keys
                if not plate_follows_arrays(fm, silos[j], [x for x in keys if x != k], plate)
            ]
        if keys and not _joined_by_index(fm.traces.at(silos[j]), silos[j], keys):
            by_plate[plate] = tuple(keys)
    return by_plate


def plate_follows_arrays(
    fm: FederatedModel, silo: SiloData, keys: Sequence[str], plate: str
) -> bool:
    """Return whether the plate is one row shorter when these arrays are, and the text runs."""
    size = fm.sizes(silo)[plate]
    cut = replace(silo, arrays={k: a[:-1] if k in keys else a for k, a in silo.arrays.items()})
    less = tuple((k, v - 1 if type(v) is int and v == size else v) for k, v in silo.static)
    # The plate's size may be an integer among the arguments, which is one less, too.
    for shorter in (cut, replace(cut, static=less)) if keys else ():
        try:
            if fm.sizes(shorter)[plate] == size - 1:
                return True
        except (TypeError, ValueError, IndexError):
            continue
    return False


def _joined_by_index(trace: Trace, silo: SiloData, keys: Sequence[str]) -> bool:
    """Return whether an integer array among the data indexes what is computed from these arrays."""
    integers = frozenset(k for k, a in silo.arrays.items() if a.dtype.kind in "iu")
    if not integers:
        return False
    rows, joined = frozenset(keys), list[bool]()

    def visit(eqn: JaxprEqn, operands: Sequence[Labels]) -> None:
        if (name := eqn.primitive.name) == "dynamic_slice":
            index, indexed = NONE.union(*operands[1:]), operands[0]
        elif name == "gather" or name.startswith("scatter"):
            # A segment sum is a scatter whose updates are the rows.
            index, indexed = operands[1], operands[0].union(*operands[2:])
        else:
            return
        joined.append(bool(index and index <= integers and indexed & rows))

    program, inputs = trace.part(trace.outputs_of(DENSITY, local=True))
    labels = [frozenset({one.name}) if one.kind == ARRAY else NONE for one in inputs]
    propagate_labels(program.jaxpr, labels, visit)
    return any(joined)


def cut_plates(
    fm: FederatedModel, plates_of_arrays: Mapping[str, tuple[str, ...]], size: int
) -> Minibatches:
    """Return minibatches of ``size`` rows of all plates that can be cut.

    ``plates_of_arrays`` has for each array the plates that are as long at every silo.
    """
    if fm.structure.nested:
        raise GuideError(
            f"batch_size={size}: a site stands in two silo plates at once, so that rows cannot be "
            f"drawn. Put its rows in long form, in one silo_plate. {WHOLE}"
        )
    cut: dict[tuple[str, ...], list[str]] = {}
    for plate in (p.name for p in fm.plates if not p.outer):
        arrays = tuple(sorted(key for key, plates in plates_of_arrays.items() if plate in plates))
        if arrays:
            cut.setdefault(arrays, []).append(plate)
    if not cut:
        names = ", ".join(f"'{p.name}'" for p in fm.plates)
        raise GuideError(
            f"batch_size={size}: no array has as many rows as a silo_plate with nothing below it "
            f"({names}), so that none can be drawn. Take the plate's size from an array's shape. "
            f"{WHOLE}"
        )
    return Minibatches(size, tuple(CutPlates(tuple(ps), arrays) for arrays, ps in cut.items()))
