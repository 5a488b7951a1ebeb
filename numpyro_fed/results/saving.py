"""States as npz and JSON: numbers and names, no pickle."""

from __future__ import annotations

import json
import zipfile
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.errors import SavedStateError

VERSION = 1


def save_state(path: str | Path, description: dict[str, Any], losses: Any, state: Any) -> None:
    """Write ``path.npz`` and ``path.json``."""
    arrays: dict[str, Any] = {f"state{name}": _numbers(leaf) for name, leaf in _leaves(state)}
    arrays["losses"] = np.asarray(losses)
    np.savez(_with(path, ".npz"), **arrays)
    text = json.dumps({"version": VERSION, **description}, indent=1, sort_keys=True)
    _with(path, ".json").write_text(text + "\n")


def load_state(
    path: str | Path, description: dict[str, Any], like: Any
) -> tuple[np.ndarray, Any, dict[str, Any]]:
    """Read losses, a state of the same structure as ``like``, and what else is said of the fit.

    Raises
    ------
    SavedStateError
        If files are missing, or belong to another version, model, guide or layout of silos.
    """
    npz, text = _with(path, ".npz"), _with(path, ".json")
    for file in (npz, text):
        if not file.exists():
            raise SavedStateError(f"there is no file {file}: give the path that save was given.")
    saved, arrays = _read(text, npz)
    version = saved.pop("version", None)
    if version != VERSION:
        raise SavedStateError(
            f"{text} has format version {version}, this package reads version {VERSION}. Run the "
            "fit again, or load it with the release that wrote it."
        )
    expected = json.loads(json.dumps(description))
    for part, wanted in expected.items():
        if saved.get(part) != wanted:
            raise SavedStateError(f"{text} belongs to another fit: {_differ(part, saved, wanted)}")
    wanted = {f"state{name}": leaf for name, leaf in _leaves(like)}
    leaves = []
    for name in [*wanted, *sorted(arrays.keys() - wanted.keys() - {"losses"})]:
        here, there = _kind(_numbers(wanted.get(name))), _kind(arrays.get(name))
        if here != there:
            raise SavedStateError(
                f"{npz} does not fit: expected {here} for {name}, found {there}. Use the guide, "
                "optimiser, runtime and precision that the fit was made with."
            )
        leaves.append(_like(wanted[name], arrays[name]))
    return arrays["losses"], jax.tree.unflatten(jax.tree.structure(like), leaves), saved


def _read(text: Path, npz: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    try:
        saved = dict(json.loads(text.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise _damaged(text, error) from error
    try:
        with np.load(npz, allow_pickle=False) as arrays:
            return saved, {"losses": arrays["losses"], **arrays}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise _damaged(npz, error) from error


def _damaged(file: Path, error: Exception) -> SavedStateError:
    return SavedStateError(
        f"{file} cannot be read, it is damaged or not complete ({error}). Copy it again from "
        "where it was saved, or run the fit again."
    )


def _numbers(leaf: Any) -> Any:
    """A leaf as numbers that npz knows: the data of a key, the bits of a bfloat16."""
    if leaf is None:
        return None
    numbers = np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
    return numbers.view(f"u{numbers.dtype.itemsize}") if numbers.dtype.kind == "V" else numbers


def _like(leaf: Any, numbers: np.ndarray) -> Any:
    if _is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(numbers), impl=jax.random.key_impl(leaf))
    return jnp.asarray(numbers.view(leaf.dtype))


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _kind(array: Any) -> str:
    return "nothing" if array is None else f"{array.dtype}{array.shape}"


def _differ(part: str, saved: dict[str, Any], wanted: Any) -> str:
    found = saved.get(part)
    if isinstance(wanted, dict) and isinstance(found, dict):
        for name in [*wanted, *found]:
            if wanted.get(name) != found.get(name):
                return (
                    f"its {part} have {name!r} as {found.get(name)}, but here it is "
                    f"{wanted.get(name)}. Use the model and settings that it was made with."
                )
    return f"its {part} are {found}, but here they are {wanted}. Pass the silos it was made with."


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    return [(jax.tree_util.keystr(p), leaf) for p, leaf in jax.tree.leaves_with_path(tree)]


def _with(path: str | Path, suffix: str) -> Path:
    path = Path(path)
    return path.with_name(path.name + suffix)
