"""Saved fits: one ``npz`` of arrays, with a description in JSON, without pickle.

The arrays are the leaves of the run's state by their paths, the losses, and whatever can be used
without the model: draws and weights. The description holds what a loaded state must agree with
(settings, sites, sizes), verdicts in words, and fingerprints of model and data.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.basics.errors import DataWarning, SavedStateError
from numpyro_fed.basics.files import npz, read_npz, write_npz
from numpyro_fed.basics.trees import Tree
from numpyro_fed.data.silo_data import SiloData, array_bytes

PACKAGES = "jax", "numpyro"  # their versions decide what a model's programs look like


@dataclass(frozen=True)
class Provenance:
    """The text and the data that a fit is made from.

    ``text`` returns a fingerprint of the model's programs, which takes half a second. ``source`` is
    a hash of the model's source; empty where that is not known. ``parties`` has the data of each
    party as read, by ``"silo 0"``, ``"silo 1"``, ...
    """

    text: Callable[[], str]
    source: str
    parties: Mapping[str, SiloData]

    def record(self) -> dict[str, Any]:
        """Return the entries of a file: fingerprints, and a digest of each array.

        Digests are keyed by random bytes of each file, so that those of two files cannot be
        compared. Who has the file and guesses a whole array can check the guess.
        """
        salt = secrets.token_bytes(32).hex()
        return {
            "text": self.text(),
            "source": self.source,
            "versions": {name: version(name) for name in PACKAGES},
            "salt": salt,
            "digests": self._digests(salt),
        }

    def check_order(self, record: Mapping[str, Any]) -> None:
        """Raise an error if the parties are those of the fit in another order."""
        saved, present = (
            {name: tuple(sorted(arrays.items())) for name, arrays in parties.items()}
            for parties in (record["digests"], self._digests(record["salt"]))
        )
        if saved.keys() != present.keys() or sorted(saved.values()) != sorted(present.values()):
            return
        owner = {digests: name for name, digests in saved.items()}
        moved = {name: owner[here] for name, here in present.items() if saved[name] != here}
        if not moved:
            return
        if len(moved) == 2:
            kind, first = next(iter(moved)).rsplit(" ", 1)
            second = list(moved)[1].rsplit(" ", 1)[-1]
            message = f"{kind}s {first} and {second} are swapped"
        else:
            pairs = (f"{name} holds what {was} held" for name, was in moved.items())
            message = f"they are in another order: {', '.join(pairs)}"
        raise SavedStateError(f"{message}. Pass them in the order in which the fit was made.")

    def check(self, record: Mapping[str, Any]) -> None:
        """Raise an error for other data, by party and array, and for another model.

        With other versions of JAX or NumPyro a model is recognised by its source alone; if that
        differs, too, there is a warning.
        """
        present = self._digests(record["salt"])
        for name, saved in record["digests"].items():
            digests = present.get(name, {})
            if differ := [k for k in sorted({*saved, *digests}) if saved.get(k) != digests.get(k)]:
                raise SavedStateError(
                    f"{name}, {', '.join(map(repr, differ))}: not the data that the fit was made "
                    "with. Pass these (the same rows in the same order), or run the fit again on "
                    "the new ones, from init_state=result.state if that is to go on."
                )
        if record["text"] == self.text():
            return
        now = {name: version(name) for name in PACKAGES}
        if record["versions"] == now:
            raise SavedStateError(
                "the model's text is another than that of the fit, or a variable that it reads "
                "from outside has changed: priors, likelihood or deterministic sites are not the "
                "same programs. Pass the model that the fit was made with."
            )
        if not self.source or record["source"] != self.source:
            there, here = (
                " and ".join(f"{name} {number}" for name, number in versions.items())
                for versions in (record["versions"], now)
            )
            warnings.warn(
                f"the fit was made under {there}, and here are {here}: "
                "whether the model's text is the same cannot be told from its programs, and its "
                "source is another one or not known. Make sure that it says the same.",
                category=DataWarning,
                stacklevel=5,
            )

    def _digests(self, salt: str) -> dict[str, dict[str, str]]:
        """Return a digest of each array and plain value of each party."""
        found: dict[str, dict[str, str]] = {}
        for owner, data in self.parties.items():
            found[owner] = {}
            for name, value in data.leaves.items():
                is_array = isinstance(value, np.ndarray | np.generic)
                raw = array_bytes(np.asarray(value)) if is_array else repr(value).encode()
                # Eight bytes: two arrays of one fit collide by chance once in 10^19, and a file
                # stays small.
                digest = hashlib.blake2b(raw, key=bytes.fromhex(salt), digest_size=8)
                found[owner][name] = digest.hexdigest()
        return found


# The version of the form of a state: higher where a state's leaves change.
VERSION = 7
# Versions whose draws, weights and verdict can be read; these stand in the same places in all. A
# file of version 1 has its description beside it and no fingerprints. A run goes on from states of
# this version alone.
READABLE = 1, 2, 3, 4, 5, 6, 7
DRAWS, WEIGHTS = "draws/", "weights"  # names of arrays that can be used without the model


class MethodSpec(NamedTuple):
    """A record from which the method of a fit can be rebuilt, given the model.

    ``method`` is the name of its class, ``settings`` what is not the default, as JSON, ``lost``
    settings that JSON cannot hold (an optimiser, a function), ``source`` a hash of the model's
    source.
    """

    method: str
    settings: dict[str, Any]
    lost: tuple[str, ...]
    runtime: str
    source: str


# One run in the form in which a file keeps it: what a fit must agree with in order to load it, its
# losses and its state.
SavedRun = tuple[Mapping[str, Any], Any, Any]


@dataclass(frozen=True)
class SavedWords:
    """The part of a file that can be read without the model and the data.

    ``kind`` is the class that was saved, ``words`` are verdicts and numbers, ``draws`` those of
    latents that all parties may know {site: (n, ...)}, even where there are no ``weights`` (n,),
    and ``arrays`` what the class is rebuilt from.
    """

    kind: str
    words: Mapping[str, Any]
    draws: Mapping[str, Any] = field(default_factory=dict)
    weights: np.ndarray | None = None
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)


def save(
    path: str | Path,
    summary: SavedWords,
    run: SavedRun,
    provenance: Provenance | None,
    others: Mapping[str, SavedRun] | None = None,
) -> None:
    """Write a fit to ``path.npz``; a save that is cut short leaves the file before as it is.

    ``provenance`` is None where the data are in other processes; ``others`` are further runs by a
    name of their own.
    """
    arrays, others = dict(summary.arrays), others or {}
    for part, (_, losses, state) in {"": run, **others}.items():
        arrays |= {f"{part}state{k}": _plain_numbers(leaf) for k, leaf in _named_leaves(state)}
        arrays[f"{part}losses"] = np.asarray(losses)
    arrays |= {f"{DRAWS}{site}": np.asarray(values) for site, values in summary.draws.items()}
    if summary.draws:
        number = len(next(iter(summary.draws.values())))
        even = np.full(number, 1 / number)
        arrays[WEIGHTS] = even if summary.weights is None else np.asarray(summary.weights)
    description = {
        "version": VERSION,
        "kind": summary.kind,
        "words": dict(summary.words),
        "made": None if provenance is None else provenance.record(),
        "others": {name: dict(other[0]) for name, other in others.items()},
        **run[0],
    }
    write_npz(path, arrays, description)


def read(path: str | Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read the arrays and the description of a file of a version that is known."""
    arrays, saved = read_npz(path)
    version = saved.get("version")
    if version not in READABLE or "losses" not in arrays:
        raise SavedStateError(
            f"{npz(path)} has format version {version}, this package reads version {VERSION}. Run "
            "the fit again, or load it with the release that wrote it."
        )
    return arrays, saved


def load_state(
    path: str | Path,
    description: dict[str, Any],
    like: Tree,
    provenance: Provenance | None,
    part: str = "",
) -> tuple[np.ndarray, Tree, dict[str, Any]]:
    """Return the losses of a saved run, its state, and its description."""
    arrays, saved = read(path)
    file, record = npz(path), saved.get("made")
    if saved["version"] < VERSION:
        raise SavedStateError(
            f"{file} has a state of format version {saved['version']}, this package goes on from "
            f"those of version {VERSION}. Run the fit again, or load it with the release that "
            "wrote it. What was drawn from it can be read: nf.load(path), without a model."
        )
    stored = saved["others"][part] if part else saved
    # The order of the silos first: otherwise swapped
    # silos would be reported as other data or shapes.
    if provenance is not None and record is not None:
        provenance.check_order(record)
    # Through JSON, which turns tuples into lists, as in the file.
    expected = json.loads(json.dumps(description))
    for name, value in expected.items():
        if (found := stored.get(name)) == value:
            continue
        words = (
            f"its {name} are {found}, but here they are {value}. Pass the silos it was made with."
        )
        if isinstance(value, dict) and isinstance(found, dict):
            differ = [k for k in [*value, *found] if value.get(k) != found.get(k)]
            for one in differ[:1]:
                words = (
                    f"its {name} have {one!r} as {found.get(one)}, but here it is "
                    f"{value.get(one)}. Use the model and settings that it was made with."
                )
        raise SavedStateError(f"{file} belongs to another fit: {words}")
    leaves_of = {f"{part}state{name}": leaf for name, leaf in _named_leaves(like)}
    names = {name for name in arrays if name.startswith(f"{part}state")}
    leaves = []
    for name in [*leaves_of, *sorted(names - leaves_of.keys())]:
        leaf = leaves_of.get(name)
        expected_form, stored_form = (
            "nothing" if array is None else f"{array.dtype}{array.shape}"
            for array in (None if leaf is None else _plain_numbers(leaf), arrays.get(name))
        )
        if expected_form != stored_form:
            raise SavedStateError(
                f"{file} does not fit: expected {expected_form} for {name}, found {stored_form}. "
                "Use the guide, optimiser, runtime and precision that the fit was made with."
            )
        leaves.append(_restored(leaves_of[name], arrays[name], f"{file}: {name}"))
    # Last, because the fingerprint of the model's programs takes half a second.
    if provenance is not None and record is not None:
        provenance.check(record)
    state = jax.tree.unflatten(jax.tree.structure(like), leaves)
    return arrays[f"{part}losses"], state, stored


def _plain_numbers(leaf: Array) -> np.ndarray:
    """Return a leaf as an array that npz can hold: the data of a key, the bits of a bfloat16."""
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    numbers = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
    return numbers.view(f"u{numbers.dtype.itemsize}") if numbers.dtype.kind == "V" else numbers


def _restored(leaf: Array, numbers: np.ndarray, name: str) -> Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.asarray(numbers), impl=jax.random.key_impl(leaf))
    numbers = numbers.view(leaf.dtype)
    real = jnp.issubdtype(numbers.dtype, jnp.inexact)
    if real and (bad := int((~np.isfinite(numbers)).sum())):
        raise SavedStateError(
            f"{name}: {bad} of {numbers.size} numbers are NaN or infinite, which no run leaves "
            "behind. The file was changed, or is damaged: copy it again from where it was "
            "saved, or run the fit again."
        )
    return jnp.asarray(numbers)


def _named_leaves(tree: object) -> list[tuple[str, Array]]:
    return [(jax.tree_util.keystr(p), leaf) for p, leaf in jax.tree.leaves_with_path(tree)]
