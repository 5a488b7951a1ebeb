"""States as npz and JSON: numbers and names, no pickle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.errors import SavedStateError

VERSION = 1


def save_state(path: str | Path, description: dict[str, Any], losses: Any, state: Any) -> None:
    """Write ``path.npz`` and ``path.json``."""
    arrays = {f"state{name}": np.asarray(leaf) for name, leaf in _leaves(state)}
    np.savez(_with(path, ".npz"), allow_pickle=False, losses=np.asarray(losses), **arrays)
    text = json.dumps({"version": VERSION, **description}, indent=1, sort_keys=True)
    _with(path, ".json").write_text(text + "\n")


def load_state(path: str | Path, description: dict[str, Any], like: Any) -> tuple[np.ndarray, Any]:
    """Read losses and a state of the same structure as ``like``.

    Raises
    ------
    SavedStateError
        If files are missing, or belong to another version, model, guide or layout of silos.
    """
    npz, text = _with(path, ".npz"), _with(path, ".json")
    for file in (npz, text):
        if not file.exists():
            raise SavedStateError(f"there is no file {file}: give the path that save was given.")
    saved = json.loads(text.read_text())
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
    with np.load(npz) as arrays:
        leaves = []
        for name, leaf in _leaves(like):
            there = arrays.get(f"state{name}")
            if there is None or (there.shape, there.dtype) != (leaf.shape, leaf.dtype):
                found = "nothing" if there is None else f"{there.dtype}{there.shape}"
                raise SavedStateError(
                    f"{npz} does not fit: expected {leaf.dtype}{leaf.shape} for {name}, found "
                    f"{found}. Use the guide, optimiser and precision that the fit was made with."
                )
            leaves.append(jnp.asarray(there))
        return arrays["losses"], jax.tree.unflatten(jax.tree.structure(like), leaves)


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
