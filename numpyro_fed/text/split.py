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
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.basics.errors import DataError, GuideError, ModelError, ModelWarning
from numpyro_fed.data.batches import Bucket, CutPlates, Minibatches, bucket, padded_keys
from numpyro_fed.data.silo_data import ReadSilos, SiloData, Sizes, signature
from numpyro_fed.text.handlers import leaving_out_missing, localised, rounded
from numpyro_fed.text.indices import IndexCheck
from numpyro_fed.text.jaxprs import (
    NONE,
    Labels,
    labels_by_name,
    propagate_labels,
    same_but_for_sizes,
    trace_program,
)
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.row_checks import RowChecks
from numpyro_fed.text.sites import Structure, check_same_sites, described
from numpyro_fed.text.traces import ARRAY, DENSITY, INITIAL, LATENT, THE_KEY, VALUE, Trace, Traces
from numpyro_fed.text.values import Supports

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn

WHOLE = "Use batch_size=None."
KEY = "numpyro.prng_key()"


def split(model: Callable[..., Any], silos: Sequence[SiloData]) -> FederatedModel:
    """Split a model at its silo plates into log densities of globals and of silos.

    Refused are global sites, observed ones included, that depend on a local latent, on data or on
    what differs between silos, such as their numbers of rows; randomness outside of sample sites;
    sites that differ between silos; and NaN in what is read for something else than an outcome.
    """
    missing = tuple(sorted({name for silo in silos for name in silo.missing}))
    text, model = model, leaving_out_missing(model, missing)
    traces = Traces(model)
    found = [traces.at(silo, f"silo {j}").structure for j, silo in enumerate(silos)]
    for j, other in enumerate(found):
        check_same_sites(found[0], other, j)
    if any(s.kind == "deterministic" and s.plate is None for s in found[0].sites):
        local = localised(model, silos[0].kwargs)
        if local is not model:
            traces = Traces(local)
            found = [traces.at(silo, f"silo {j}").structure for j, silo in enumerate(silos)]
    _warn(found[0])
    # The global functions run the text at one silo's shapes; the smallest one is the cheapest.
    smallest = min(range(len(silos)), key=lambda j: sum(a.size for a in silos[j].arrays.values()))
    first, silo = found[smallest], silos[smallest]
    # A plate is outer if sites of other plates read its latents. Deterministic sites do not count:
    # they add nothing to the density.
    dependence = _dependence(traces.at(silo))
    outer = frozenset(
        str(plate)
        for s in first.sites
        if s.plate is not None and s.kind != "deterministic"
        for plate in dependence[s.name] - {None, KEY, s.plate}
    )
    smooth = None
    if first.kinked:
        smooth = FederatedModel(Traces(rounded(traces.model)), silo, outer)
    fm = FederatedModel(traces, silo, outer, smooth)
    _check_dependence(fm, dependence)
    if missing:
        _check_missing(fm, text, missing, silos)
    if not any(s.kind in ("observed", "factor") and s.plate for s in first.sites):
        # The posterior of a text that observes nothing would be its prior.
        latents = [s for s in first.sites if s.kind == "latent" and s.plate]
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
    _check_globals(fm, silos, [s.sizes for s in found])
    return fm


def _warn(found: Structure) -> None:
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
            stacklevel=3,
        )
    for name in found.fields:
        warnings.warn(
            f"the prior of '{name}' ties all of its entries together, so that it is fitted as one "
            "large global latent, which all silos share. nf.handlers.substitute_prior puts a prior "
            "in its place in which silos are independent given what they share: "
            "nf.SeparatorPrior, nf.LowRankPrior, nf.BlockPrior, nf.SigmaPrior.",
            category=ModelWarning,
            stacklevel=3,
        )


def _dependence(trace: Trace) -> dict[str, set[str | None]]:
    """Return what each site's density, or a deterministic site's value, depends on."""
    # Names of the silo plates whose latents it reads, None if it reads data, and KEY if it reads
    # randomness other than of sample sites.
    plates = {s.name: s.plate for s in trace.structure.sites if s.kind == "latent" and s.plate}
    fixed = {(VALUE, s.name) for s in trace.structure.sites if s.kind == "deterministic"}
    dependence: dict[str, set[str | None]] = {}
    for output in dict.fromkeys(trace.outputs):
        kind, name = output
        if kind not in (DENSITY, INITIAL) and output not in fixed:
            continue
        # The log-determinant of a latent is a factor of its own; it belongs to the latent.
        found = dependence.setdefault(trace.owners.get(name, name), set())
        found |= {None} if trace.reads(output, ARRAY) else set()
        # The initial value of a shared parameter must not come from data, but it may be random.
        if kind != INITIAL:
            found |= {plates[n] for n in trace.reads(output, LATENT) if n in plates}
            found |= {KEY} if trace.reads(output, THE_KEY) else set()
    return dependence


def _check_missing(
    fm: FederatedModel,
    text: Callable[..., Any],
    missing: tuple[str, ...],
    silos: Sequence[SiloData],
) -> None:
    """Refuse NaN in arguments that are read for something else than an outcome."""
    blind = Traces(leaving_out_missing(text, missing, blind=True))

    def readers(name: str, trace: Trace) -> set[str]:
        """Return the sites that read an argument."""
        outputs = [o for o in dict.fromkeys(trace.outputs) if o[0] in (DENSITY, VALUE)]
        return {
            trace.owners.get(site, site)
            for kind, site in outputs
            if name in trace.reads((kind, site), ARRAY)
        }

    for name in missing:
        having = [(j, s.arrays[name]) for j, s in enumerate(silos) if name in s.arrays]
        silo = silos[having[0][0]]
        if sites := sorted(readers(name, blind.at(silo))):
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
        trace = fm.traces.at(silo)
        whole = {site for site, support in trace.supports.items() if support.whole}
        if not whole & readers(name, trace):
            continue
        for j, array in having:
            if (odd := array[~np.isnan(array) & (array % 1 != 0)]).size:
                raise DataError(
                    f"silo {j}, '{name}': the outcome takes whole numbers, got {odd[0]:g}. Mend "
                    "it, or pass NaN where it is missing."
                )


def _check_dependence(fm: FederatedModel, dependence: dict[str, set[str | None]]) -> None:
    """Refuse global sites that depend on data or local latents, and stray randomness."""
    for site in fm.sites:
        name, sources = site.name, dependence[site.name]
        if KEY in sources:
            raise ModelError(
                f"the site '{name}' depends on randomness that is no latent: on "
                "numpyro.prng_key(), or on a site in the body of a scan inside a "
                "numpyro.handlers.scope. It would be the same in every round. Draw it by "
                "numpyro.sample, outside of that scope, or before the run and pass it as data."
            )
        if site.plate is not None or not sources:
            continue
        if None in sources and site.kind == "observed":
            raise ModelError(
                f"site '{name}' is observed outside of every silo_plate, and depends on data, "
                f"which the server does not have. Put '{name}' inside the silo_plate of the rows "
                "that it belongs to."
            )
        if None in sources:
            raise ModelError(
                f"the global site '{name}' depends on data, which the server does not have. "
                f"Put '{name}' inside a silo_plate, or make it depend on globals alone."
            )
        plate = sorted(str(s) for s in sources)[0]
        raise ModelError(
            f"the global site '{name}' depends on latents of silo_plate '{plate}', which "
            f"never leave their silo. Put '{name}' inside a silo_plate."
        )


def _check_globals(fm: FederatedModel, silos: Sequence[SiloData], sizes: Sequence[Sizes]) -> None:
    """Refuse global sites that depend on what differs between silos, such as numbers of rows."""
    distinct: dict[tuple[Hashable, ...], int] = {}
    for j, silo in enumerate(silos):
        distinct.setdefault(signature(silo), j)
    others = [(f"silo {j}", silos[j]) for j in list(distinct.values())[1:]]
    # If all silos have the same shapes, silo 0 with one more row is compared with itself.
    rows = {} if others else padded_keys(silos, sizes)
    for plate in sizes[0] if rows else ():
        keys = [k for k, p in rows.items() if p == plate]
        if not (keys and sizes[0][plate]):
            continue
        arrays = silos[0].arrays
        more = {k: np.concatenate([arrays[k], arrays[k][:1]]) for k in keys}
        longer = replace(silos[0], arrays={**arrays, **more})
        try:
            fm.traces.at(longer)
        except Exception:
            # The array must be as long as something else too, so that no other silo can have
            # another number of rows: there is nothing to compare.
            continue
        others.append(("a silo with a row more", longer))
    first, z_G = fm.traces.at(silos[0]), np.random.default_rng(0).normal(size=fm.dim)
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

    for who, silo in others:
        trace = fm.traces.at(silo)
        # Equal programs are equal at every point, and nothing has to be compiled. Programs that
        # differ may still compute the same, so that values decide.
        mine, theirs = (one.part(wanted)[0] for one in (trace, first))
        if trace is first or same_but_for_sizes(mine, theirs, {}):
            continue
        here, there = (jax.jit(partial(at_one_point, t))() for t in (trace, first))
        for (subject, what), value in here.items():
            other = there[subject, what]
            if np.shape(value) == np.shape(other) and np.allclose(
                value, other, rtol=1e-5, atol=1e-5, equal_nan=True
            ):
                continue
            held = described(silo), described(silos[0])
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
    rows: dict[str, str]  # the silo plate of each array that holds rows
    checks: RowChecks
    # (silo, data) -> None: the index check of one silo's values
    check_indices: Callable[[int, SiloData], None]
    supports: Supports  # the check of observed values
    # the arrays of each silo plate whose rows must not read each other's data
    separable: dict[str, tuple[str, ...]]

    @property
    def plates_of_arrays(self) -> dict[str, tuple[str, ...]]:
        """Return for each array of rows the silo plates that are as long at every silo."""
        return {
            key: tuple(p for p in self.sizes[0] if all(n[p] == n[plate] for n in self.sizes))
            for key, plate in self.rows.items()
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
        apart = self.separable if summaries else {}
        harmless = [self.checks.harmless_padding(b, silos, self.rows, apart) for b in buckets]
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
    fm = split(model, silos)
    sizes = tuple(fm.sizes(s) for s in silos)
    rows = padded_keys(silos, sizes)
    apart, supports = separable(fm, silos, sizes, rows), Supports(fm.traces, "silo {}")
    return Layout(fm, sizes, rows, RowChecks(fm), IndexCheck(fm.terms_at_zero), supports, apart)


def lay_out(
    model: Callable[..., Any], silos: Sequence[SiloData], *, summaries: bool = True
) -> tuple[Layout, list[Bucket]]:
    """Split the model and bucket the silos; see :meth:`Layout.arrange`."""
    layout = layout_of(model, silos)
    return layout, layout.arrange(silos, summaries=summaries)


def separable(
    fm: FederatedModel,
    silos: Sequence[SiloData],
    sizes: Sequence[Sizes],
    rows: Mapping[str, str],
) -> dict[str, tuple[str, ...]]:
    """Return the arrays of each silo plate that hold its rows, ``{plate: names}``.

    ``rows`` has the plate of each array that is as long as a silo plate at every silo. A plate is
    left out if its rows cannot be separated: if a site stands in two silo plates at once, if the
    text does not run with one row less (an adjacency matrix), or if it joins rows by an index among
    the data (the sum over the members of a group).
    """
    by_plate: dict[str, tuple[str, ...]] = {}
    for plate in sizes[0] if not fm.structure.nested else ():
        j = max(range(len(silos)), key=lambda j: sizes[j][plate])
        keys = [key for key, p in rows.items() if p == plate]
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
        if keys and not _joined_by_index(fm, silos[j], keys):
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
            sizes = fm.sizes(shorter)
            jax.eval_shape(fm.terms_at_zero, shorter)
        except (TypeError, ValueError, IndexError):
            continue
        if sizes[plate] == size - 1:
            return True
    return False


def _joined_by_index(fm: FederatedModel, silo: SiloData, keys: Sequence[str]) -> bool:
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

    program = trace_program(
        lambda arrays: fm.terms_at_zero(replace(silo, arrays=arrays)), silo.arrays
    )
    propagate_labels(program.jaxpr, labels_by_name(silo.arrays), visit)
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
