"""Fits as one npz with a description in JSON: numbers and names, no pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.errors import SavedStateError
from numpyro_fed.files import npz, read_npz, write_npz
from numpyro_fed.results.recognise import Provenance
from numpyro_fed.trees import Tree

VERSION = 4
# Of version 1 a description in a file of its own, without fingerprints. States of a version before
# this one are of another form; what can be used without the model is the same in all.
READ = 1, 2, 3, 4
DRAWS, WEIGHTS = "draws/", "weights"  # names of arrays that can be used without the model


@dataclass(frozen=True)
class SavedRun:
    """One run as it goes into a file: what it must agree with, its losses and its state."""

    description: Mapping[str, Any]
    losses: Any
    state: Any

    def arrays(self, part: str = "") -> dict[str, np.ndarray]:
        """Return its arrays by name, those of a second run of a file under its name."""
        named = {f"{part}state{name}": _numbers(leaf) for name, leaf in _leaves(self.state)}
        return {**named, f"{part}losses": np.asarray(self.losses)}


@dataclass(frozen=True)
class SavedWords:
    """All that a file tells without the model and the data.

    Attributes
    ----------
    kind : str
        The class that was saved.
    words : dict
        Verdicts and numbers, JSON.
    draws : dict of str to (n, ...) array
        Of latents that are the same for all, by site.
    weights : (n,) array, optional
        Of the draws; by default even.
    arrays : dict of str to array
        What else the class is put together from.
    """

    kind: str
    words: Mapping[str, Any]
    draws: Mapping[str, Any] = field(default_factory=dict)
    weights: np.ndarray | None = None
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)


def save(
    path: str | Path,
    told: SavedWords,
    run: SavedRun,
    made: Provenance | None,
    others: Mapping[str, SavedRun] | None = None,
) -> None:
    """Write ``path.npz``, so that a save that is cut short leaves the one before as it is.

    Parameters
    ----------
    path : str or Path
    told : Told
    run : SavedRun
    made : Made or None
        By which model and data are recognised; None where the data are elsewhere.
    others : dict of str to SavedRun, optional
        Further runs by a name of their own.
    """
    arrays = {**told.arrays, **run.arrays()}
    arrays |= {f"{DRAWS}{site}": np.asarray(values) for site, values in told.draws.items()}
    if told.draws:
        number = len(next(iter(told.draws.values())))
        even = np.full(number, 1 / number)
        arrays[WEIGHTS] = even if told.weights is None else np.asarray(told.weights)
    for name, other in (others or {}).items():
        arrays |= other.arrays(name)
    description = {
        "version": VERSION,
        "kind": told.kind,
        "words": dict(told.words),
        "made": None if made is None else made.record(),
        "others": {name: dict(other.description) for name, other in (others or {}).items()},
        **run.description,
    }
    write_npz(path, arrays, description)


def read(path: str | Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read the arrays and the description of a file of a version that is known.

    Raises
    ------
    SavedStateError
        If the file is missing, damaged, or of another version.
    """
    arrays, saved = read_npz(path)
    version = saved.get("version")
    if version not in READ or "losses" not in arrays:
        raise SavedStateError(
            f"{npz(path)} has format version {version}, this package reads version {VERSION}. Run "
            "the fit again, or load it with the release that wrote it."
        )
    return arrays, saved


def load_state(
    path: str | Path,
    description: dict[str, Any],
    like: Tree,
    made: Provenance | None,
    part: str = "",
) -> tuple[np.ndarray, Tree, dict[str, Any]]:
    """Read losses, a state of the same structure as ``like``, and what else is said of the fit.

    Raises
    ------
    SavedStateError
        If the file is missing, or belongs to another version, model, guide or layout of silos, to
        other data, or holds numbers that are not finite.
    """
    arrays, saved = read(path)
    file, record = npz(path), saved.get("made")
    if saved["version"] < VERSION:
        raise SavedStateError(
            f"{file} has a state of format version {saved['version']}, this package goes on from "
            f"those of version {VERSION}. Run the fit again, or load it with the release that "
            "wrote it. What was drawn from it can be read: nf.load(path), without a model."
        )
    said = saved["others"][part] if part else saved
    if made is not None and record is not None:
        made.check_order(record)
    expected = json.loads(json.dumps(description))
    for name, wanted in expected.items():
        if said.get(name) != wanted:
            raise SavedStateError(f"{file} belongs to another fit: {_differ(name, said, wanted)}")
    leaves_of = {f"{part}state{name}": leaf for name, leaf in _leaves(like)}
    known = {name for name in arrays if name.startswith(f"{part}state")}
    leaves = []
    for name in [*leaves_of, *sorted(known - leaves_of.keys())]:
        leaf = leaves_of.get(name)
        here, there = _kind(None if leaf is None else _numbers(leaf)), _kind(arrays.get(name))
        if here != there:
            raise SavedStateError(
                f"{file} does not fit: expected {here} for {name}, found {there}. Use the guide, "
                "optimiser, runtime and precision that the fit was made with."
            )
        leaves.append(_like(leaves_of[name], arrays[name], f"{file}: {name}"))
    if made is not None and record is not None:
        made.check(record)
    state = jax.tree.unflatten(jax.tree.structure(like), leaves)
    return arrays[f"{part}losses"], state, said


def _numbers(leaf: Array) -> np.ndarray:
    """Return a leaf as numbers that npz knows: the data of a key, the bits of a bfloat16."""
    numbers = np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
    return numbers.view(f"u{numbers.dtype.itemsize}") if numbers.dtype.kind == "V" else numbers


def _like(leaf: Array, numbers: np.ndarray, name: str) -> Array:
    if _is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(numbers), impl=jax.random.key_impl(leaf))
    numbers = numbers.view(leaf.dtype)
    _check_finite(numbers, name)
    return jnp.asarray(numbers)


def _check_finite(array: np.ndarray, name: str) -> None:
    """Refuse NaN; infinity stands in schedules alone, for a silo that has not been visited yet."""
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return
    allowed = (array == np.inf) & ("state.schedule" in name)
    bad = int((~(np.isfinite(array) | allowed)).sum())
    if bad:
        raise SavedStateError(
            f"{name}: {bad} of {array.size} numbers are NaN or infinite, which no run leaves "
            "behind. The file was changed, or is damaged: copy it again from where it was saved, "
            "or run the fit again."
        )


def _is_key(leaf: Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _kind(array: np.ndarray | None) -> str:
    return "nothing" if array is None else f"{array.dtype}{array.shape}"


def _differ(part: str, saved: dict[str, Any], wanted: object) -> str:
    found = saved.get(part)
    if isinstance(wanted, dict) and isinstance(found, dict):
        for name in [*wanted, *found]:
            if wanted.get(name) != found.get(name):
                return (
                    f"its {part} have {name!r} as {found.get(name)}, but here it is "
                    f"{wanted.get(name)}. Use the model and settings that it was made with."
                )
    return f"its {part} are {found}, but here they are {wanted}. Pass the silos it was made with."


def _leaves(tree: object) -> list[tuple[str, Array]]:
    return [(jax.tree_util.keystr(p), leaf) for p, leaf in jax.tree.leaves_with_path(tree)]
