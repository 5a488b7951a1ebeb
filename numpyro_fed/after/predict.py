r"""Posterior predictive draws: the model's text, run on new data at draws of its latents.

.. math::
    p(\tilde y \mid y) = \int p(\tilde y \mid z_G, z_L)\, p(z_L \mid z_G)\, p(z_G \mid y)\,
    dz_L\, dz_G

Latents that the new rows do not share with the fit, such as those of a new hospital or of a new
patient, are drawn from their prior given the globals.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.dtypes import canonicalize_dtype
from numpyro import handlers
from numpyro.distributions import MaskedDistribution

from numpyro_fed.basics.errors import DataError, ModelError
from numpyro_fed.basics.programs import (
    TRACING,
    filled,
    first_draws,
    is_traced,
    jit_once,
    map_in_batches,
    shared_number,
)
from numpyro_fed.data.silo_data import SiloData, Sizes, read_one
from numpyro_fed.data.tables import (
    as_dict,
    check_columns,
    column_names,
    is_frame,
    model_arguments,
)
from numpyro_fed.text.handlers import without_outcomes
from numpyro_fed.text.indices import new_data_check
from numpyro_fed.text.jaxprs import provenance
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.missing import nan_in
from numpyro_fed.text.plan import Argument, Facts
from numpyro_fed.text.silo_plate import feasible, unwrapped
from numpyro_fed.text.site_table import Site
from numpyro_fed.text.substitution import block_name, substituted_in

# Draws that are computed side by side, as for locals of a posterior. Numbers of so many draws stand
# in memory at once, beside those that are returned.
SIDE_BY_SIDE = 64
# Draws x rows up to which one program, compiled quickly, predicts for many numbers of draws.
FEW_PREDICTED = 1e6

OUTCOMES = "observed", "deterministic", "discrete"
NO_MEAN = (
    "Predict without mean=True; or write what is meant (a probability, a median) as a "
    "numpyro.deterministic in the plate, which predict returns."
)
SEEN = "rows with "  # before the name of an outcome
Draws = Mapping[str, Array]
Predict = Callable[[Array, Draws, Draws, SiloData], dict[str, Array]]
At = Callable[[Array, Draws, SiloData], dict[str, Array]]


class Programs(NamedTuple):
    """The compiled functions to values of a text's sites, at draws of its latents.

    Both take a key, the parameters on their supports, draws of latents (n, ...) and the data.
    Latents without draws come from their prior given the others. ``many`` returns {site: (n, ...)},
    and ``one`` the values at the first draw, compiled quickly.
    """

    many: Predict
    one: Predict


def predictor(
    fm: FederatedModel, kinds: Collection[str] = OUTCOMES, *, mean: bool = False
) -> Programs:
    """Return the compiled functions to predictive draws of sites, by default of outcomes."""
    named = [s.name for s in fm.sites if s.kind in kinds and s.name not in fm.covariates]
    means = {s.name for s in fm.sites if s.kind == "observed"} if mean else set()

    def at(key: Array, values: Draws, data: SiloData) -> dict[str, Array]:
        text = handlers.substitute(without_outcomes(fm.text, fm.covariates), data=dict(values))
        with TRACING, handlers.block():
            trace = handlers.trace(handlers.seed(text, key)).get_trace(**data.kwargs)
        return {
            name: mean_of(trace[name]) if name in means else jnp.asarray(trace[name]["value"])
            for name in named
            if name in trace
        }

    return compiled(at)


def mean_of(site: dict[str, Any]) -> Array:
    """Return the mean of an outcome's distribution, in the shape of the outcome."""
    fn = unwrapped(site["fn"])
    while isinstance(fn, MaskedDistribution):
        fn = unwrapped(fn.base_dist)
    # The value itself may have other axes: NumPyro draws an outcome of a scan anew, outside of it.
    shape = (*site["kwargs"].get("sample_shape", ()), *site["fn"].shape())
    try:
        return jnp.broadcast_to(site["fn"].mean, shape)
    except NotImplementedError as error:
        raise ModelError(
            f"NumPyro has no mean of the outcome '{site['name']}' ({type(fn).__name__}). {NO_MEAN}"
        ) from error


def check_means(fm: FederatedModel, found: Draws | Sequence[Draws]) -> None:
    """Raise an error for an outcome that has no mean at any row and draw, as of a Cauchy."""
    for name in (s.name for s in fm.sites if s.kind == "observed"):
        parts = [found] if isinstance(found, Mapping) else found
        values = [np.asarray(part[name]) for part in parts if name in part]
        if values and all(np.isnan(value).all() for value in values):
            raise ModelError(
                f"the distribution of the outcome '{name}' has no mean, as a Cauchy or categories "
                f"have none. {NO_MEAN}"
            )


def compiled(at: At) -> Programs:
    """Return the programs of a function of a key, parameters with latents, and data."""

    def at_draws(key: Array, theta: Draws, latents: Draws, data: SiloData) -> dict[str, Array]:
        def one(draw: tuple[Array, Draws]) -> dict[str, Array]:
            i, values = draw
            return at(jax.random.fold_in(key, i), {**theta, **values}, data)

        n = len(jax.tree.leaves(latents)[0]) if latents else 1
        return map_in_batches(one, (jnp.arange(n), dict(latents)), SIDE_BY_SIDE)

    quickly, well = jit_once(at_draws), jax.jit(at_draws)

    def many(key: Array, theta: Draws, latents: Draws, data: SiloData) -> dict[str, Array]:
        n = len(jax.tree.leaves(latents)[0]) if latents else 1
        rows = max([1, *(len(a) for a in data.arrays.values() if np.ndim(a))])
        if is_traced((key, latents)) or shared_number(n) * rows > FEW_PREDICTED:
            return well(key, theta, latents, data)
        return first_draws(quickly(key, theta, filled(dict(latents)), data), n)

    @jit_once
    def first(key: Array, theta: Draws, latents: Draws, data: SiloData) -> dict[str, Array]:
        values = {name: value[0] for name, value in latents.items()}
        return at(jax.random.fold_in(key, 0), {**theta, **values}, data)

    return Programs(many, first)


def with_blocks(
    fm: FederatedModel, new: Mapping[str, Any], silo: int | None, own: SiloData | None
) -> Mapping[str, Any]:
    """Return new data with the numbers of the silo's blocks, where a prior was substituted."""
    text = substituted_in(fm.text)
    if text is None or not isinstance(new, Mapping):
        return new
    if silo is None or own is None:
        sites = ", ".join(f"'{site}'" for site in text.priors)
        raise ModelError(
            f"the substituted prior of {sites} has a block for each silo of the fit and none for a "
            "new silo. Predict for the silo whose entries the rows read (silo=j), or for the rows "
            "of the fit."
        )
    names = [block_name(site) for site in text.priors]
    return text.of_new_rows(new, silo, {name: own.arrays[name] for name in names})


def new_rows(
    fm: FederatedModel,
    new: Mapping[str, Any],
    facts: Facts,
    silos: Sequence[SiloData] = (),
    silo: int | None = None,
    sizes: Sizes | None = None,
) -> SiloData:
    """Return new data, of silo ``silo`` with rows ``sizes`` or of a new one, read and checked.

    Outcomes may be missing. ``facts`` are those of the silos of the fit, and ``silos`` their data
    if they are here. An error names what does not suit the fit: an argument that is not there or
    one too many, columns, dtypes, numbers of axes, missing values, and outer plates.
    """
    data = _read_new(fm, new, facts, silos)
    private = [s.name for s in fm.sites if s.kind == "param" and s.plate is not None]
    if private:
        raise ModelError(
            f"'{private[0]}' is a parameter of a silo or a row, without a prior from which it "
            "could be drawn for new rows. Make it a latent, or predict for the rows of the fit."
        )
    found: dict[str, int] = {}

    def run(key: Array, data: SiloData) -> None:
        # Outcomes are not there, so that their sites are drawn like latents.
        with TRACING, handlers.block():
            trace = handlers.trace(handlers.seed(fm.text, key)).get_trace(**data.kwargs)
        plates = {name: site for name, site in trace.items() if site["type"] == "plate"}
        found.update({name: site["args"][0] for name, site in plates.items()})

    if sizes is not None:
        try:
            jax.eval_shape(run, jax.random.key(0), data)
        except Exception as error:
            raise DataError(f"new data: the model does not run on them: {error}") from error
        for plate in fm.plates:
            if plate.outer and plate.dim and found.get(plate.name) != sizes[plate.name]:
                raise DataError(
                    f"new data have {found[plate.name]} of '{plate.name}', and silo {silo} has "
                    f"{sizes[plate.name]}: pass them with the same number, in the same order; or "
                    "use silo='new' for others."
                )
    new_data_check(fm.text, silo)(**data.kwargs)
    return data


def _read_new(
    fm: FederatedModel, new: Mapping[str, Any], facts: Facts, silos: Sequence[SiloData]
) -> SiloData:
    signature = inspect.signature(fm.text)
    fitted_columns, new_columns = dict(facts.columns), column_names(new)
    arguments = model_arguments(fm.text)
    of_formula = getattr(inspect.unwrap(fm.text), "__code__", None)
    if is_frame(new) and of_formula and of_formula.co_filename.startswith("<formula "):
        raise DataError(
            "new data are a table, and the model is that of a formula f: its data are made by "
            "f.silo(table, new=True)."
        )
    new = as_dict("new data", new, arguments and dict.fromkeys(arguments, False))
    if not isinstance(new, Mapping):
        raise DataError(f"new data must be a dict of keyword arguments, got {type(new).__name__}.")
    fitted = {a.name: a for a in facts.arguments}
    # Where all arguments of a plate are one row, they get an axis of length one.
    as_given = dict(new)
    for plates in {fitted[name].plates for name in new if name in fitted if fitted[name].plates}:
        own = {n: v for n, v in as_given.items() if n in fitted and fitted[n].plates == plates}
        rows = {n: a for n, v in own.items() if (a := np.asarray(v)).dtype.kind in "fiub"}
        if rows and all(a.ndim == len(fitted[n].shape) for n, a in rows.items()):
            new = {**new, **{n: a[None] for n, a in rows.items()}}
    for name, columns in new_columns.items():
        check_columns("new data", name, columns, fitted_columns.get(name, columns), "the fit")
    try:
        signature.bind(**new)
    except TypeError as error:
        names = list(signature.parameters)
        raise DataError(
            f"new data do not fit the model, whose arguments are {names}: {error}."
        ) from error
    data = read_one("new data", new, may_miss=True)
    for name in data.missing:
        array = data.arrays[name]
        if readers := _readers(fm, data, name, nan=True):
            raise DataError(
                f"new data, '{name}': {int(np.isnan(array).sum())} of {array.size} values are "
                f"missing (NaN), and '{readers[0]}' cannot be predicted without them. Leave out "
                "these rows or fill in a number that you can defend; only outcomes may be missing."
            )
    for name in silos[0].arrays if silos else ():
        lacking = name not in data.arrays
        if lacking and new.get(name) is not None and fitted[name].plates:
            raise DataError(
                f"new data, '{name}' is a single value ({new[name]!r:.40}), where the fit had one "
                "for each row: pass an array, or all arguments of one row without an axis."
            )
        if lacking and (readers := _readers(fm, silos[0], name)):
            raise DataError(
                f"new data lack '{name}', which all silos of the fit have, and '{readers[0]}' "
                "cannot be predicted without it."
            )
        shapes = {silo.arrays[name].shape[1:] for silo in silos if np.ndim(silo.arrays[name])}
        if len(shapes) == 1 and name in data.arrays and data.arrays[name].ndim:
            (shape,) = shapes
            if len(shape) == data.arrays[name].ndim - 1 and data.arrays[name].shape[1:] != shape:
                raise DataError(
                    f"new data, '{name}' has rows of the shape {data.arrays[name].shape[1:]}, "
                    f"where the fit had {shape}: a column is missing, or one too many is there."
                )
    arrays = {k: _like(k, a, fitted[k]) if k in fitted else a for k, a in data.arrays.items()}
    read = replace(data, arrays=arrays, missing=())
    whole = [k for k, argument in fitted.items() if np.dtype(argument.dtype).kind in "iu"]
    if fractions := [k for k, a in arrays.items() if k in whole and a.dtype.kind == "f"]:
        _check_fractions(fm, read, fractions)
    return read


def _check_fractions(fm: FederatedModel, data: SiloData, names: Sequence[str]) -> None:
    """Raise an error if the text does not run on fractions where it had whole numbers."""

    def at(own: dict[str, Array]) -> Array:
        kwargs = replace(data, arrays={**data.arrays, **own}).kwargs
        with TRACING, handlers.block(), feasible():
            text = handlers.seed(without_outcomes(fm.text, fm.covariates), 0)
            trace = handlers.trace(text).get_trace(**kwargs)
        sampled = [s for s in trace.values() if s["type"] == "sample" and not s["is_observed"]]
        # As those of numbers that a fraction changes a little: an index by it would not change.
        terms = [jnp.sum(s["fn"].log_prob(jax.lax.stop_gradient(s["value"]))) for s in sampled]
        return jnp.sum(jnp.array(terms))

    words = (
        f"new data have fractions in {list(names)}, where the fit had whole numbers, and the "
        "model's text does not run on them{}. An index must be a whole number."
    )
    try:
        slopes = jax.grad(at)({name: jnp.asarray(data.arrays[name]) for name in names})
    except Exception as error:
        raise DataError(words.format(f" ({str(error).splitlines()[0].rstrip('.')})")) from error
    if whole := [name for name, slope in slopes.items() if not np.any(slope)]:
        raise DataError(words.format(f": it takes {whole} for whole numbers, rounded or compared"))


def _like(name: str, array: np.ndarray, fitted: Argument) -> np.ndarray:
    """Return an array in the dtype that the argument had in the fit; fractions stay fractions."""
    axes = len(fitted.shape) + bool(fitted.plates)
    if array.ndim != axes:
        raise DataError(
            f"new data, '{name}' has the shape {array.shape}, with {array.ndim} axes, where the "
            f"fit had {axes}."
        )
    # The dtype of a kind is that of the precision in use: 32 bits may have become 64.
    dtype = (
        canonicalize_dtype(fitted.dtype)
        if array.dtype.kind != np.dtype(fitted.dtype).kind
        else array.dtype
    )
    with np.errstate(invalid="ignore"):
        cast = array.astype(dtype)
    fractions = array.dtype.kind == "f" and np.dtype(fitted.dtype).kind in "iu"
    if fractions and not np.array_equal(cast, array):
        return array
    if not np.array_equal(cast, array, equal_nan=array.dtype.kind == "f"):
        raise DataError(
            f"new data, '{name}' has dtype {array.dtype}, where the fit had {fitted.dtype}, which "
            f"does not hold all of its values. Pass it as in the fit."
        )
    return cast


def _readers(fm: FederatedModel, data: SiloData, name: str, *, nan: bool = False) -> list[str]:
    """Return the sites whose predicted values depend on an argument, or on its NaN alone."""

    def values(own: Array, rest: dict[str, Array], name: str) -> dict[str, Any]:
        kwargs = replace(data, arrays={**rest, name: own}).kwargs
        with TRACING, handlers.block(), feasible():
            text = handlers.seed(without_outcomes(fm.text, fm.covariates), 0)
            trace = handlers.trace(text).get_trace(**kwargs)
        return {s.name: trace[s.name]["value"] for s in fm.sites if s.name in trace}

    rest = {k: a for k, a in data.arrays.items() if k != name}
    if nan:
        reached = nan_in(partial(values, rest=rest, name=name), data.arrays[name])
        return [s for s, found in reached.items() if any(jax.tree.leaves(found))]
    labels = provenance(partial(values, name=name), own=data.arrays[name], rest=rest)
    return [s for s, ls in labels.items() if any("own" in x for x in jax.tree.leaves(ls))]


def outer_sites(fm: FederatedModel) -> list[Site]:
    """Return the latents that rows of several plates share: of hospitals, not patients."""
    return [s for p in fm.plates if p.outer for s in fm.named("latent", p.name)]


def global_latents(fm: FederatedModel) -> list[str]:
    """Return the names of the global latents."""
    return [s.name for s in fm.named("latent")]
