"""A model's text at the rows of the fit: silos of many sizes share one program.

A silo is padded to the shape of its bucket by copies of its first row, as the run has padded it.
What is predicted for its own rows must not change by that: it is compared at one draw, with other
rows in the place of the copies, and with the silo as it is. Where it changes (an average over rows
that the text keeps by ``numpyro.deterministic``, say) silos stay as they are, and one program is
compiled for each size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import ArrayLike

from numpyro_fed.after.predict import SEEN, Draws, Programs, compiled, predictor
from numpyro_fed.basics.errors import DataError
from numpyro_fed.data.padding import Filling, arrays_with_rows, padded_arrays, source_rows
from numpyro_fed.data.silo_data import ALL, SiloData, Sizes
from numpyro_fed.rounds.silos import Silos
from numpyro_fed.text.log_density import outcomes_at
from numpyro_fed.text.row_checks import default_rtol

WhichSilo = int | str | Sequence[int | str]  # a silo by number or name, some of them, or "all"
# Sizes up to which each has its own program: the comparison compiles two small ones.
FEW_SIZES = 2


class Run(Protocol):
    """The run that a posterior rests on: its model, its silos and their states."""

    @property
    def _fit(self) -> Any: ...

    @property
    def _silos(self) -> Silos: ...

    @property
    def num_silos(self) -> int: ...

    @property
    def shared(self) -> Any: ...

    def _hosted(self, silo: int) -> Silos:
        """Return the silos; raise an error if they are elsewhere."""

    def silo_params(self, silo: int) -> dict[str, Any]:
        """Return a silo's private parameters on their supports, and its guide as ``"guide"``."""


def chosen_silos(silo: WhichSilo, run: Run) -> list[int]:
    """Return the numbers of the silos that are asked for."""
    if isinstance(silo, str) and silo == ALL:
        return list(range(run.num_silos))
    if isinstance(silo, str) or not isinstance(silo, Sequence):
        silo = [silo]
    silos = [silo_number(j, run, ALL) for j in silo]
    if not silos:
        raise ValueError("silo=[]: expected at least one silo.")
    return silos


def silo_number(silo: object, run: Run, *words: str) -> int:
    """Return the number of a silo that is asked for by number or name; ``words`` were allowed."""
    names = run._silos.names
    if isinstance(silo, str) and silo in names:
        return names.index(silo)
    if isinstance(silo, bool | np.bool_ | str) or not isinstance(silo, int | np.integer):
        known = f"a name of {list(names)}, " if names else ""
        also = "".join(f", or '{word}'" for word in words)
        raise ValueError(f"silo={silo!r}: expected {known}a whole number from 0 on{also}.")
    return int(silo)


def names_of_rows(names: Sequence[str], rows: Sequence[int]) -> list[str]:
    """Return a name for each row of silos: the silo's, and a number where silos have several."""
    if all(number == 1 for number in rows):
        return list(names)
    pairs = zip(names, rows, strict=True)
    return [f"{name}, {i}" for name, number in pairs for i in range(number)]


class SiloAtDraws(NamedTuple):
    """A silo at whose rows the text is run: its noise, parameters and draws of latents.

    ``theta`` has shared and private parameters on their supports, and ``latents`` draws (n, ...).
    """

    silo: int
    key: Array
    theta: Draws
    latents: Draws


@dataclass(frozen=True, eq=False)
class Padding:
    """The rows that a silo's data and latents are padded with.

    ``sizes, target`` are the rows of each padded plate, before and after, ``rows`` the plate of
    each array that holds rows, and ``axes`` that of latents, with the axis of rows in a draw.
    """

    sizes: Sizes
    target: Sizes
    rows: dict[str, str]
    axes: dict[str, tuple[str, int]]

    def pad(
        self, latents: Draws, data: SiloData, filling: Filling = Filling.FIRST
    ) -> tuple[Draws, SiloData]:
        """Return latents and data, padded by copies of some rows."""
        sources = {
            plate: source_rows(self.sizes[plate], padded, filling)
            for plate, padded in self.target.items()
        }
        found: dict[str, Any] = {k: np.asarray(value) for k, value in latents.items()}
        for name, (plate, axis) in self.axes.items():
            if name in found:
                found[name] = found[name].take(sources[plate], 1 + axis)
        return found, replace(data, arrays=padded_arrays(data.arrays, self.rows, sources))


def silos_at_draws(
    run: Run, key: Array, draws: Mapping[str, Array], silos: Sequence[int]
) -> list[SiloAtDraws]:
    """Return silos at draws of all latents, whose rows stand side by side in ``draws``."""
    fm = run._fit.model
    shared = {s.name: draws[s.name] for s in fm.named("latent")}
    local = [s for s in fm.sites if s.is_local_latent]
    # On the host: a slice on the device is a program for each size.
    values = {s.name: np.asarray(draws[s.name]) for s in local}
    first_rows = dict.fromkeys(values, 0)
    found = []
    for j in silos:
        latents: dict[str, Any] = dict(shared)
        for s in local:
            first = first_rows[s.name]
            first_rows[s.name] = end = first + run._hosted(j).sizes_of(j)[s.plate or ""]
            latents[s.name] = values[s.name].take(range(first, end), 1 + (s.axis or 0))
        key_silo = jax.random.fold_in(key, 1 + j)
        found.append(SiloAtDraws(j, key_silo, parameters_of(run, j), latents))
    return found


def values_at(run: Run, programs: Programs, silos: Sequence[SiloAtDraws]) -> list[dict[str, Array]]:
    """Return the values of sites (n, ...) that a text has at the rows of some silos of a run."""
    paddings, found = paddings_of(run, programs, silos), []
    for at in silos:
        data, padding = run._hosted(at.silo).data_of(at.silo), paddings.get(at.silo)
        latents, padded = (at.latents, data) if padding is None else padding.pad(at.latents, data)
        values = jax.block_until_ready(programs.many(at.key, at.theta, latents, padded))
        if padding is not None:
            shapes = _shapes(programs, at, data)
            # On the host: a slice on the device is a program for each size.
            values = {
                name: jnp.asarray(_cut(np.asarray(value), (len(value), *shapes[name])))
                for name, value in values.items()
            }
        found.append(values)
    return found


def paddings_of(run: Run, programs: Programs, silos: Sequence[SiloAtDraws]) -> dict[int, Padding]:
    """Return how silos are padded, by number; silos that must not be are left out."""
    fm, hosted = run._fit.model, run._silos
    private = any(s.kind == "param" and s.plate is not None for s in fm.sites)
    if private or len(silos) <= FEW_SIZES:
        return {}
    sizes = [run._hosted(j).sizes_of(j) for j in range(run.num_silos)]
    rows = arrays_with_rows(hosted.data, sizes)
    by_bucket: dict[int, list[SiloAtDraws]] = {}
    for at in silos:
        by_bucket.setdefault(hosted.place(at.silo)[0], []).append(at)
    found: dict[int, Padding] = {}
    for bucket, members in by_bucket.items():
        masks = hosted.buckets[bucket].data.masks
        target = {plate: mask.shape[1] for plate, mask in masks.items()}
        if len({tuple(sizes[at.silo].items()) for at in members}) <= FEW_SIZES or not target:
            continue
        axes = {
            s.name: (s.plate, s.axis or 0)
            for s in fm.sites
            if s.is_local_latent and s.plate in target
        }
        paddings = {at.silo: Padding(sizes[at.silo], target, rows, axes) for at in members}
        # The silo with the fewest rows has the most padding.
        most = min(members, key=lambda at: sum(sizes[at.silo].values()))
        if all(
            _harmless(programs, at, hosted.data[at.silo], paddings[at.silo], whole=at is most)
            for at in members
        ):
            found |= paddings
    return found


def _harmless(
    programs: Programs, at: SiloAtDraws, data: SiloData, padding: Padding, *, whole: bool
) -> bool:
    """Return whether nothing that is predicted for a silo's own rows depends on padded ones."""
    first = {name: value[:1] for name, value in at.latents.items()}
    shapes, rtol = _shapes(programs, at, data), default_rtol()

    def value(latents: Draws, data: SiloData) -> dict[str, np.ndarray]:
        found = programs.one(at.key, at.theta, latents, data)
        return {name: _cut(np.asarray(a), shapes[name]) for name, a in found.items()}

    padded = [value(*padding.pad(first, data, filling)) for filling in Filling]
    # The silo as it is, too, which compiles a program of its size.
    others = [*padded[1:], *([value(first, data)] if whole else [])]
    return all(
        padded[0].keys() == other.keys()
        and a.shape == other[name].shape
        and np.allclose(a, other[name], rtol=rtol, atol=rtol, equal_nan=True)
        for other in others
        for name, a in padded[0].items()
    )


def _shapes(programs: Programs, at: SiloAtDraws, data: SiloData) -> dict[str, tuple[int, ...]]:
    """Return the shape of each site's value at a silo as it is."""
    first = {name: value[:1] for name, value in at.latents.items()}
    found = jax.eval_shape(programs.one, at.key, at.theta, first, data)
    return {name: value.shape for name, value in found.items()}


def _cut(value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return value[tuple(map(slice, shape))] if value.ndim == len(shape) else value


def programs_of(run: Run, *, mean: bool = False) -> Programs:
    """Return the programs that predict outcomes, or the means of their distributions."""
    fit = run._fit
    found: Programs = fit.cached(("predict", mean), lambda: predictor(fit.model, mean=mean))
    return found


def parameters_of(run: Run, silo: int | None) -> dict[str, Any]:
    """Return the shared parameters on their supports, and a silo's private ones."""
    shared = run._fit.model.constrain_theta(run.shared.theta)
    private = {} if silo is None else run.silo_params(silo)
    return {**shared, **{k: v for k, v in private.items() if k != "guide"}}


def drawn_from_prior(run: Run, key: Array, n: int) -> dict[str, Array] | None:
    """Return draws of the globals from their prior; None if they cannot be drawn."""
    fm, theta = run._fit.model, run.shared.theta
    z_G = None if fm.improper else fm.draw_prior(key, n)
    if z_G is None:
        return None
    return jax.jit(jax.vmap(fm.constrain_global, (None, 0)))(theta, z_G)


def outcomes_and_rows(run: Run, silos: Sequence[int]) -> list[dict[str, np.ndarray]]:
    """Return outcomes of silos, NaN where missing, and which rows have them, by ``SEEN``."""
    fm = run._fit.model

    def at(key: Array, values: Draws, data: SiloData) -> dict[str, Array]:
        all_found = outcomes_at(fm, data).items()
        found = {name: outcome for name, outcome in all_found if name not in fm.covariates}
        seen = {SEEN + name: outcome.seen for name, outcome in found.items()}
        return {name: outcome.value for name, outcome in found.items()} | seen

    programs = run._fit.cached("outcomes", lambda: compiled(at))
    found = values_at(run, programs, [SiloAtDraws(j, jax.random.key(0), {}, {}) for j in silos])
    return [{name: np.asarray(value)[0] for name, value in part.items()} for part in found]


def outcomes_of_silos(run: Run, silos: Sequence[int]) -> list[dict[str, np.ndarray]]:
    """Return the outcomes of the rows of some silos in this process, by site."""
    return [
        {name: value for name, value in part.items() if not name.startswith(SEEN)}
        for part in outcomes_and_rows(run, silos)
    ]


def groups_of_rows(
    by: Sequence[ArrayLike], outcomes: Sequence[Mapping[str, np.ndarray]]
) -> list[np.ndarray]:
    """Return the group of each row of each silo, or of each outcome; an error if some lack one."""
    groups = [np.asarray(group) for group in by]
    if len(groups) != len(outcomes):
        raise DataError(
            f"by has {len(groups)} entries, and {len(outcomes)} silos are drawn: give an array for "
            "each of them, in their order."
        )
    for j, (group, of_silo) in enumerate(zip(groups, outcomes, strict=True)):
        for name, values in of_silo.items():
            if not group.shape or values.shape[: group.ndim] != group.shape:
                raise DataError(
                    f"entry {j} of by has the shape {group.shape}, and the outcomes '{name}' of "
                    f"its silo {values.shape}: give a group for each row, or for each outcome."
                )
    return groups
