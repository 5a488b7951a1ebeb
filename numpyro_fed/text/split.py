"""A text split over silos, into log densities of globals and of silos; texts that cannot be.

The text is traced once at each distinct set of shapes. Sites inside of a silo plate become local,
all others global (:func:`.site_table.read_trace` gives each site its plate). Labels that were
propagated through the traced program tell which global sites depend on data or local latents. And
the programs of the global sites at different silos are compared, since the server evaluates them
without any silo's data.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.basics.errors import ModelError, ModelWarning
from numpyro_fed.data.padding import arrays_with_rows
from numpyro_fed.data.silo_data import SiloData, Sizes
from numpyro_fed.text.handlers import localised, rounded, with_missing
from numpyro_fed.text.jaxprs import same_but_for_sizes
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.membership import plates_below
from numpyro_fed.text.missing import check_missing
from numpyro_fed.text.site_table import Structure
from numpyro_fed.text.trace import ARRAY, DENSITY, THE_KEY, VALUE, Trace
from numpyro_fed.text.traces import Traces

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
    return split_with_rows(model, silos)[0]


def split_with_rows(
    model: Callable[..., Any], silos: Sequence[SiloData]
) -> tuple[FederatedModel, tuple[Sizes, ...], dict[str, str]]:
    """Return a split model, the sizes of each silo's plates, and the plate of each array of rows.

    It is the model that :func:`split` returns.
    """
    missing = tuple(sorted({name for silo in silos for name in silo.missing}))
    traces = Traces(with_missing(model, missing))
    traces_of_silos = [traces.at(silo, f"silo {j}") for j, silo in enumerate(silos)]
    for j, other in enumerate(traces_of_silos):
        check_same_sites(traces_of_silos[0].structure, other.structure, j)
    sites = traces_of_silos[0].structure.sites
    if any(s.kind == "deterministic" and s.plate is None for s in sites):
        local = localised(traces.model, silos[0].kwargs)
        if local is not traces.model:
            traces = Traces(local)
            traces_of_silos = [traces.at(silo, f"silo {j}") for j, silo in enumerate(silos)]
    warn_of_priors(traces_of_silos[0].structure)
    # The global functions run the text at one silo's shapes; the smallest one is the cheapest.
    smallest = min(range(len(silos)), key=lambda j: sum(a.size for a in silos[j].arrays.values()))
    trace, silo = traces_of_silos[smallest], silos[smallest]
    # A plate is outer if sites of other plates read its latents. Deterministic sites do not count:
    # they add nothing to the density.
    outer = frozenset(
        plate
        for s in trace.structure.sites
        if s.plate is not None and s.kind not in ("deterministic", "param")
        for plate in trace.plates_read(s) - {s.plate}
    )
    below = plates_below(traces_of_silos, outer) if outer else {}
    smooth = None
    if trace.structure.kinked:
        smooth = FederatedModel(Traces(rounded(traces.model)), silo, outer, below)
    fm = FederatedModel(traces, silo, outer, below, smooth)
    check_sources(trace)
    if missing:
        check_missing(missing, silos, traces_of_silos)
    check_observed(trace.structure, silo)
    sizes = tuple(one.structure.sizes for one in traces_of_silos)
    plate_of_array = arrays_with_rows(silos, sizes)
    check_globals(fm, silos, traces_of_silos, plate_of_array)
    return fm, sizes, plate_of_array


def check_same_sites(first: Structure, other: Structure, j: int) -> None:
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


def warn_of_priors(structure: Structure) -> None:
    """Warn of flat priors, and of priors that tie the entries of a large latent together."""
    for name, everywhere in structure.masked.items():
        warnings.warn(
            f"the prior of the latent site '{name}' is flat (its mask is False everywhere), and so "
            "improper: unless the data determine it, its posterior is improper, too, and a bound "
            "can grow for ever. Give it a proper prior, however wide, such as dist.Normal(0, 100)."
            if everywhere
            else f"the latent site '{name}' is masked: where the mask is False it has no prior, so "
            "that its posterior is improper and a bound can grow for ever. Mask only the observed "
            "site.",
            category=ModelWarning,
            stacklevel=4,
        )
    for name in structure.fields:
        warnings.warn(
            f"the prior of '{name}' ties all of its entries together, so that it is fitted as one "
            "large global latent, which all silos share. nf.handlers.substitute_prior puts a prior "
            "in its place in which silos are independent given what they share: "
            "nf.SeparatorPrior, nf.LowRankPrior, nf.BlockPrior, nf.SigmaPrior.",
            category=ModelWarning,
            stacklevel=4,
        )


def check_sources(trace: Trace) -> None:
    """Refuse global sites that depend on data or local latents, and stray randomness."""
    for site in trace.structure.sites:
        name, param = site.name, site.kind == "param"
        # The initial value of a parameter must not come from data, but it may be random.
        if not param and trace.site_reads(site, THE_KEY):
            raise ModelError(
                f"the site '{name}' depends on randomness that is no latent: on "
                "numpyro.prng_key(), or on a site in the body of a scan inside a "
                "numpyro.handlers.scope. It would be the same in every round. Draw it by "
                "numpyro.sample, outside of that scope, or before the run and pass it as data."
            )
        if site.plate is not None:
            continue
        data = trace.site_reads(site, ARRAY)
        if data and site.kind == "observed":
            raise ModelError(
                f"site '{name}' is observed outside of every silo_plate, and depends on data, "
                f"which the server does not have. Put '{name}' inside the silo_plate of the rows "
                "that it belongs to."
            )
        if data:
            raise ModelError(
                f"the global site '{name}' depends on data, which the server does not have. "
                f"Put '{name}' inside a silo_plate, or make it depend on globals alone."
            )
        if not param and (plates := trace.plates_read(site)):
            raise ModelError(
                f"the global site '{name}' depends on latents of silo_plate '{min(plates)}', which "
                f"never leave their silo. Put '{name}' inside a silo_plate."
            )


def check_observed(structure: Structure, silo: SiloData) -> None:
    """Refuse a text that observes nothing: its posterior would be its prior."""
    if any(s.kind in ("observed", "factor") and s.plate for s in structure.sites):
        return
    latents = [s for s in structure.sites if s.kind == "latent" and s.plate]
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


def check_globals(
    fm: FederatedModel,
    silos: Sequence[SiloData],
    traces_of_silos: Sequence[Trace],
    plate_of_array: Mapping[str, str],
) -> None:
    """Refuse global sites that depend on what differs between silos, such as numbers of rows."""
    first, sizes = traces_of_silos[0], traces_of_silos[0].structure.sizes
    # Silos of the same shapes share one trace.
    number = {trace: j for j, trace in reversed(list(enumerate(traces_of_silos)))}
    others = [(f"silo {j}", silos[j], traces_of_silos[j]) for j in sorted(number.values())[1:]]
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

    def at_one_point(trace: Trace) -> tuple[dict[str, Array], dict[str, Array]]:
        return trace.globals_at(fm.init_theta(jax.random.key(0)), jnp.asarray(z_G))

    subjects = (
        ("the prior of the global site '{}'", "log density"),
        ("the value of the global site '{}' at one point of unconstrained space", "value"),
    )
    for who, silo, trace in others:
        # Equal programs are equal at every point, and nothing has to be compiled. Programs that
        # differ may still compute the same, so that values decide.
        if same_but_for_sizes(trace.part(wanted)[0], first.part(wanted)[0], {}):
            continue
        found, expected = (jax.jit(partial(at_one_point, t))() for t in (trace, first))
        for (subject, what), here, there in zip(subjects, found, expected, strict=True):
            for name, value in here.items():
                if np.shape(value) == np.shape(there[name]) and np.allclose(
                    value, there[name], rtol=1e-5, atol=1e-5, equal_nan=True
                ):
                    continue
                held = silo.described, silos[0].described
                own, its = ({k: x[k] for k in x if held[0][k] != held[1][k]} for x in held)
                shown, at_first = (
                    np.array2string(np.ravel(v)[:4], precision=6, separator=", ").strip("[]")
                    for v in (value, there[name])
                )
                raise ModelError(
                    f"{subject.format(name)} differs between silos: its {what} at one point is "
                    f"{shown} at {who}, which holds {own}, but {at_first} at silo 0, which holds "
                    f"{its}. It must not depend on numbers of rows or Python values that differ. "
                    "Pass one number to all silos (that of all rows together, say), or let only "
                    "local sites depend on it."
                )
