"""Silos of several processes of one JAX program (``jax.distributed``), each of which reads its own.

All processes run the same script, and each passes the silos that it has. Those of process 0 come
first. Rows are sent to all processes once, before anything is compiled; on devices each process has
its own part of them.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from numpyro_fed.errors import DataError
from numpyro_fed.model.data import ReadSilos, SiloInput, SilosInput, common_columns, read, read_one
from numpyro_fed.model.facts import skeleton, unflatten_skeleton
from numpyro_fed.model.frames import as_dict, column_names

HEAD = "head"  # the name of the array with all that is no array, as JSON


def read_all(silos: SilosInput, model: Callable[..., Any] | None = None) -> ReadSilos:
    """Return the data of the silos of all processes, read and checked.

    In a program of one process these are the silos that are passed.
    """
    if isinstance(silos, ReadSilos) or jax.process_count() == 1:
        return read(silos, model)
    own = _packed(silos)
    longest = int(process_allgather(np.array(len(own))).max())
    room = np.zeros(longest, np.uint8)
    room[: len(own)] = np.frombuffer(own, np.uint8)
    everyones, columns = [], []
    for part in process_allgather(room):
        with np.load(io.BytesIO(part.tobytes()), allow_pickle=False) as file:
            head = json.loads(file[HEAD].tobytes())
            if "error" in head:
                raise DataError(head["error"])
            for j, (silo, names) in enumerate(zip(head["silos"], head["names"], strict=True)):
                arrays = {name: file[f"{j}/{i}"] for i, name in enumerate(names)}
                everyones.append(unflatten_skeleton(silo["tree"], {**arrays, **silo["static"]}))
                columns.append({name: tuple(of) for name, of in silo["columns"].items()})
    common = common_columns(columns)
    return ReadSilos(replace(silo, columns=common) for silo in read(everyones, model))


def _packed(silos: Sequence[SiloInput]) -> bytes:
    """Return the silos of this process, or the error about them, as bytes."""
    head: dict[str, Any]
    try:
        owners = [f"silo {j} of process {jax.process_index()}" for j in range(len(silos))]
        columns = [column_names(s) for s in silos]
        plain = [as_dict(owner, s) for owner, s in zip(owners, silos, strict=True)]
        found = [read_one(owner, s, may_miss=True) for owner, s in zip(owners, plain, strict=True)]
        if odd := next((s for s in plain if not _is_plain(s)), None):
            raise DataError(
                f"over several processes arguments are dicts with names, lists and tuples, got "
                f"{jax.tree.structure(odd)} in process {jax.process_index()}."
            )
    except Exception as error:  # of whatever kind: the other processes wait for an answer
        head, arrays = {"error": f"{type(error).__name__}: {error}"}, dict[str, Any]()
    else:
        names = [list(s.arrays) for s in found]
        of_silos = [
            {"tree": skeleton(s.named_tree()), "static": dict(s.static), "columns": of_silo}
            for s, of_silo in zip(found, columns, strict=True)
        ]
        head = {"silos": of_silos, "names": names}
        arrays = {
            f"{j}/{i}": s.arrays[n] for j, s in enumerate(found) for i, n in enumerate(names[j])
        }
    file = io.BytesIO()
    np.savez(file, **{HEAD: np.frombuffer(json.dumps(head).encode(), np.uint8), **arrays})
    return file.getvalue()


def _is_plain(tree: object) -> bool:
    """Return whether a tree has the same nodes after it was written as JSON."""
    if type(tree) is dict:
        return all(isinstance(k, str) and _is_plain(v) for k, v in tree.items())
    if type(tree) is list or type(tree) is tuple:
        return all(_is_plain(part) for part in tree)
    return not isinstance(tree, dict | list | tuple)
