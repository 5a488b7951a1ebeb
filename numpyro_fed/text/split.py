"""A text split over silos: log densities of globals and of silos.

The text is traced once at each distinct set of shapes. Sites inside of a silo plate become local,
all others global. Texts that cannot be split are refused (``text/refusals.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from numpyro_fed.data.padding import arrays_with_rows
from numpyro_fed.data.silo_data import SiloData, Sizes
from numpyro_fed.text.handlers import leaving_out_missing, localised, rounded
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.refusals import (
    check_globals,
    check_missing,
    check_observed,
    check_same_sites,
    check_sources,
    warn_of_priors,
)
from numpyro_fed.text.traces import Traces


def split(model: Callable[..., Any], silos: Sequence[SiloData]) -> FederatedModel:
    """Split a model at its silo plates into log densities of globals and of silos.

    Refused are global sites, observed ones included, that depend on a local latent, on data or on
    what differs between silos, such as their numbers of rows; randomness outside of sample sites;
    sites that differ between silos; and NaN in what is read for something else than an outcome.
    """
    return split_with_rows(model, silos).model


class SplitResult(NamedTuple):
    """A split model, and the plates of its silos and arrays."""

    model: FederatedModel
    sizes: tuple[Sizes, ...]  # the true size of each silo plate at each silo
    plate_of_array: dict[str, str]  # the silo plate of each array that holds rows


def split_with_rows(model: Callable[..., Any], silos: Sequence[SiloData]) -> SplitResult:
    """Split a model as :func:`split` does, and return the plates of silos and arrays, too."""
    missing = tuple(sorted({name for silo in silos for name in silo.missing}))
    text, model = model, leaving_out_missing(model, missing)
    traces = Traces(model)
    traces_of_silos = [traces.at(silo, f"silo {j}") for j, silo in enumerate(silos)]
    for j, other in enumerate(traces_of_silos):
        check_same_sites(traces_of_silos[0].structure, other.structure, j)
    sites = traces_of_silos[0].structure.sites
    if any(s.kind == "deterministic" and s.plate is None for s in sites):
        local = localised(model, silos[0].kwargs)
        if local is not model:
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
        if s.plate is not None and s.kind != "deterministic"
        for plate in trace.sources[s.name].plates - {s.plate}
    )
    smooth = None
    if trace.structure.kinked:
        smooth = FederatedModel(Traces(rounded(traces.model)), silo, outer)
    fm = FederatedModel(traces, silo, outer, smooth)
    check_sources(trace)
    if missing:
        check_missing(text, missing, silos, traces_of_silos)
    check_observed(trace.structure, silo)
    sizes = tuple(one.structure.sizes for one in traces_of_silos)
    plate_of_array = arrays_with_rows(silos, sizes)
    check_globals(fm, silos, traces_of_silos, plate_of_array)
    return SplitResult(fm, sizes, plate_of_array)
