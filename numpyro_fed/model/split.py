"""From model text to pure log densities in unconstrained space, and which texts are refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro import handlers

from numpyro_fed.errors import ModelError
from numpyro_fed.model.binding import Rows, Theta, globals_at, log_det_owners, trace_at
from numpyro_fed.model.data import SiloData, Sizes, signature
from numpyro_fed.model.feasible import feasible
from numpyro_fed.model.federated import FederatedModel, ModelText
from numpyro_fed.model.handlers import localised
from numpyro_fed.model.jaxprs import Identity, needed, provenance, traced
from numpyro_fed.model.kinks import rounded
from numpyro_fed.model.padding import padded_keys
from numpyro_fed.model.sites import (
    Structure,
    check_same_sites,
    described,
    structures,
)
from numpyro_fed.tracing import TRACING


def split(model: Callable[..., Any], silos: Sequence[SiloData]) -> FederatedModel:
    """Split a model's trace at its silo plates.

    Parameters
    ----------
    model : callable
        A NumPyro model with ``silo_plate``.
    silos : sequence of SiloData
        What the silos hold (:func:`numpyro_fed.model.data.read`).

    Returns
    -------
    FederatedModel

    Raises
    ------
    ModelError
        Without a silo plate; for a global site, observed ones included, that depends on a local
        latent, on data or on what differs between silos, such as their numbers of rows; for
        randomness outside of sample sites; for discrete latents, supports without a bijection,
        mutable sites; for sites that differ between silos; and when the model itself raises.
    """
    found = structures(model, silos)
    for j, other in enumerate(found):
        check_same_sites(found[0], other, j)
    if any(s.kind == "deterministic" and s.plate is None for s in found[0].sites):
        text = localised(model, silos[0].kwargs)
        if text is not model:
            model, found = text, structures(text, silos)
    _warn_masked(found[0])
    _warn_fields(found[0])
    smallest = min(range(len(silos)), key=lambda j: sum(a.size for a in silos[j].arrays.values()))
    at, silo = found[smallest], silos[smallest]
    fm = ModelText(model, at, silo).federated()
    if at.kinked:
        fm = fm._replace(without_kinks=ModelText(rounded(model), at, silo).federated())
    reaches = _dependence(fm, model, silos[smallest])
    _check_reaches(fm, reaches)
    _check_observed(at, silo)
    _check_globals(model, fm, silos, [s.sizes for s in found])
    plates = [
        p._replace(
            outer=p.dim > 0
            and any(
                p.name in reaches[s.name]
                for s in fm.sites
                if s.plate not in (None, p.name) and s.kind != "deterministic"
            )
        )
        for p in fm.plates
    ]
    smooth = fm.without_kinks and fm.without_kinks._replace(plates=tuple(plates))
    return fm._replace(plates=tuple(plates), without_kinks=smooth)


def _warn_masked(found: Structure) -> None:
    for name, everywhere in found.masked.items():
        warnings.warn(
            f"the prior of the latent site '{name}' is flat (its mask is False everywhere), and so "
            "improper: unless the data determine it, its posterior is improper, too, and a bound "
            "can grow for ever. Give it a proper prior, however wide, such as dist.Normal(0, 100)."
            if everywhere
            else f"the latent site '{name}' is masked: where the mask is False it has no prior, so "
            "that its posterior is improper and a bound can grow for ever. Mask only the observed "
            "site (obs_mask adds such a latent; give a mask to numpyro.handlers.mask instead).",
            stacklevel=3,
        )


def _warn_fields(found: Structure) -> None:
    for name in found.fields:
        warnings.warn(
            f"the prior of '{name}' ties all of its entries together, so that it is fitted as one "
            "large global latent, which all silos share. nf.handlers.substitute_prior puts a prior "
            "in its place in which silos are independent given what they share: "
            "nf.SeparatorPrior, nf.LowRankPrior, nf.BlockPrior, nf.SigmaPrior.",
            stacklevel=3,
        )


def _check_observed(found: Structure, silo: SiloData) -> None:
    """Refuse a text that says nothing about data: its posterior would be its prior."""
    if any(s.kind in ("observed", "factor") and s.plate for s in found.sites):
        return
    latents = [s for s in found.sites if s.kind == "latent" and s.plate]
    alike = [s for s in latents if s.name in silo.leaves] or latents
    named = " or ".join(f"'{s.name}' (silo_plate '{s.plate}')" for s in alike)
    missing = [name for name, value in silo.static if value is None]
    raise ModelError(
        "no site in a silo_plate is observed, so that the posterior would be the prior: "
        + (f"was obs= forgotten at {named}? " if named else "there is no site in a silo_plate. ")
        + (f"A silo holds None for {missing}. " if missing else "")
        + "Pass the data as numpyro.sample(..., obs=y), or add a numpyro.factor. "
        "Draws from the prior are numpyro.infer.Predictive's."
    )


def _dependence(
    fm: FederatedModel, model: Callable[..., Any], silo: SiloData
) -> dict[str, set[str | None]]:
    """The silo plates, by name, whose latents reach each site's density or value; None for data.

    Randomness that is no sample site goes by the name ``KEY``.
    """
    sizes = fm.sizes(silo)
    z_L = {p.name: np.zeros((sizes[p.name], p.dim)) for p in fm.plates}
    labels = {f"rows of {p.name}": p.name for p in fm.plates}

    def run(data: dict[str, Array], theta: Theta, key: Array, **rows: Array) -> dict[str, Any]:
        at = replace(silo, arrays=data)
        named = {labels[label]: value for label, value in rows.items()}
        values, trace = trace_at(model, fm.sites, theta, jnp.zeros(fm.dim), named, at, key)
        fixed = {s.name: trace[s.name]["value"] for s in fm.sites if s.kind == "deterministic"}
        return {**values, **fixed}

    def initial(data: dict[str, Array]) -> Theta:
        at = replace(silo, arrays=data)
        with TRACING, feasible():
            trace = handlers.trace(handlers.seed(model, jax.random.key(0))).get_trace(**at.kwargs)
        return {s.name: trace[s.name]["value"] for s in fm.sites if s.kind == "param"}

    key = jax.random.key(0)
    theta = jax.eval_shape(lambda key: {**fm.init_theta(key), **fm.init_private(key, silo)}, key)
    rows = {label: z_L[plate] for label, plate in labels.items()}
    found = provenance(run, data=silo.arrays, theta=theta, key=key, **rows)
    found |= provenance(initial, data=silo.arrays)
    names, owner = {**labels, "data": None, "key": KEY}, log_det_owners(fm.sites)
    reaches: dict[str, set[str | None]] = {}
    for site, value in found.items():
        sources = {names[label] for leaf in jax.tree.leaves(value) for label in leaf & set(names)}
        reaches.setdefault(owner.get(site, site), set()).update(sources)
    return reaches


KEY = "numpyro.prng_key()"


def _check_reaches(fm: FederatedModel, reaches: dict[str, set[str | None]]) -> None:
    for site in fm.sites:
        name, sources = site.name, reaches[site.name]
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


def _check_globals(
    model: Callable[..., Any], fm: FederatedModel, silos: Sequence[SiloData], sizes: Sequence[Sizes]
) -> None:
    """Refuse global sites that change with what differs between silos, numbers of rows included.

    Where all silos are alike, one with a row more stands for others.
    """
    distinct: dict[tuple[Hashable, ...], int] = {}
    for j, silo in enumerate(silos):
        distinct.setdefault(signature(silo), j)
    z_G, theta = np.random.default_rng(0).normal(size=fm.dim), fm.init_theta(jax.random.key(0))

    def seen(theta: Theta, z_G: Array, z_L: Rows, data: SiloData) -> dict[str, Array]:
        terms, values = globals_at(model, fm.sites, theta, z_G, z_L, data)
        density = {f"log density:{name}": value for name, value in terms.items()}
        return density | {f"value:{name}": value for name, value in values.items()}

    def arguments(
        silo: SiloData, size: Sizes
    ) -> tuple[Theta, np.ndarray, dict[str, np.ndarray], SiloData]:
        return theta, z_G, {p.name: np.zeros((size[p.name], p.dim)) for p in fm.plates}, silo

    def program(at: tuple[Any, ...]) -> Identity:
        return Identity.of(needed(traced(seen, *at)))

    def compare(silo: SiloData, size: Sizes, who: str) -> None:
        here = arguments(silo, size)
        if program(here).same(expected):
            return
        mine, theirs = (jax.jit(seen)(*at) for at in (here, first))
        for name, value in mine.items():
            if np.shape(value) != np.shape(theirs[name]) or not np.allclose(
                value, theirs[name], rtol=1e-5, atol=1e-5, equal_nan=True
            ):
                raise ModelError(_differs(name, value, theirs[name], who, silo, silos[0]))

    first = arguments(silos[0], sizes[0])
    expected = program(first)
    for j in list(distinct.values())[1:]:
        compare(silos[j], sizes[j], f"silo {j}")
    if len(distinct) == 1:
        for longer in _with_a_row_more(silos[0], sizes[0], padded_keys(silos, sizes)):
            try:
                size = fm.sizes(longer)
                jax.eval_shape(seen, *arguments(longer, size))
            except Exception:  # the text has it that this array goes with something else
                continue
            compare(longer, size, "a silo with a row more")


def _with_a_row_more(silo: SiloData, size: Sizes, rows: dict[str, str]) -> list[SiloData]:
    """The silo with one more row, plate by plate."""
    longer = []
    for plate in size:
        keys = [k for k, p in rows.items() if p == plate]
        more = {k: np.concatenate([silo.arrays[k], silo.arrays[k][:1]]) for k in keys}
        if more and size[plate]:
            longer.append(replace(silo, arrays={**silo.arrays, **more}))
    return longer


def _differs(
    name: str, here: Array, there: Array, who: str, silo: SiloData, other: SiloData
) -> str:
    what, _, site = name.partition(":")
    mine, theirs = _differences(silo, other)

    def shown(value: Array) -> str:
        return np.array2string(np.ravel(value)[:4], precision=6, separator=", ").strip("[]")

    subject = f"the prior of the global site '{site}'"
    if what == "value":
        subject = f"the value of the global site '{site}' at one point of unconstrained space"
    return (
        f"{subject} differs between silos: its {what} at one point is {shown(here)} at {who}, "
        f"which holds {mine}, but {shown(there)} at silo 0, which holds {theirs}. It must not "
        "depend on numbers of rows or Python values that differ. Pass one number to all silos "
        "(that of all rows together, say), or let only local sites depend on it."
    )


def _differences(a: SiloData, b: SiloData) -> tuple[dict[str, Any], dict[str, Any]]:
    """The data of two silos in words, where they differ."""
    here, there = described(a), described(b)
    keys = [k for k in here if here[k] != there[k]]
    return {k: here[k] for k in keys}, {k: there[k] for k in keys}
