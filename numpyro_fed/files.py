"""Files that are whole or absent: arrays and a description in one npz, written atomically."""

from __future__ import annotations

import glob
import json
import os
import secrets
import struct
import time
import zipfile
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from numpyro_fed.errors import SavedStateError

DESCRIPTION = "description.json"  # the member of an npz that describes its arrays
# Seconds after which a temporary file counts as left behind by a process that was killed. A save
# takes seconds; with less than its time a slow save of another process would lose its file.
OLD = 3_600.0
# The errors that zipfile and NumPy raise for files that are cut off, changed, or something else.
DAMAGE = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    EOFError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
)


def write_atomically(file: str | Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file so that at any time its name stands for a whole file, the new or the old one.

    ``write`` gets a temporary file in the same folder, which takes the name once it is on the disk.
    A process that is killed in between leaves the temporary file ``.name.*.part`` behind; a save an
    hour later removes it.

    Parameters
    ----------
    file : str or Path
    write : callable
        A function that is called with a binary stream to write to.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "numbers"
    >>> write_atomically(file, lambda stream: stream.write(b"1 2 3"))
    >>> file.read_bytes()
    b'1 2 3'
    """
    file = Path(os.path.realpath(file))  # os.replace would put a file in the place of a link
    part = file.with_name(f".{file.name}.{secrets.token_hex(4)}.part")
    try:
        with open(part, "x+b") as stream:
            write(stream)
            # On the disk before it takes the name: otherwise
            # a loss of power may leave an empty file.
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, file)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    _sweep(file)
    if os.name == "posix":  # elsewhere a folder cannot be opened
        folder = os.open(file.parent, os.O_RDONLY)
        try:
            # The new name must outlive a loss of power,
            # too. Some network file systems cannot do it.
            with suppress(OSError):
                os.fsync(folder)
        finally:
            os.close(folder)


def _sweep(file: Path) -> None:
    """Remove temporary files that killed processes have left behind, if they are old enough."""
    for part in file.parent.glob(f".{glob.escape(file.name)}.*.part"):
        with suppress(OSError):
            if time.time() - part.stat().st_mtime > OLD:
                part.unlink()


def write_npz(
    path: str | Path, arrays: Mapping[str, np.ndarray], description: Mapping[str, Any]
) -> None:
    """Write ``path.npz`` atomically: arrays by name, and a description as JSON, without pickle."""
    text = json.dumps(description, indent=1, sort_keys=True) + "\n"

    def write(stream: IO[bytes]) -> None:
        # NumPy's stubs take keywords for allow_pickle.
        np.savez(stream, **arrays)  # type: ignore[arg-type]
        with zipfile.ZipFile(stream, "a") as archive:
            archive.writestr(DESCRIPTION, text)

    write_atomically(npz(path), write)


def read_npz(path: str | Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the arrays and the description of a file of :func:`write_npz`, with their dtypes.

    A file of an early release has its description in a second file, ``path.json``.

    Raises
    ------
    SavedStateError
        If the file is missing, damaged, or not one of this package.
    """
    file, beside = npz(path), _with(path, ".json")
    if not file.exists():
        raise _missing(file)
    try:
        with np.load(file, allow_pickle=False) as members:
            arrays = dict(members)
        text = arrays.pop(DESCRIPTION, None)
    except DAMAGE as error:
        raise _damaged(file, error) from error
    if text is None and not beside.exists():
        raise _missing(beside)
    try:
        description = json.loads(beside.read_text() if text is None else bytes(text))
        return arrays, dict(description)
    except (OSError, ValueError, TypeError) as error:
        raise _damaged(beside if text is None else file, error) from error


def npz(path: str | Path) -> Path:
    """Return the file name of a path that was given to a ``save``."""
    return _with(path, ".npz")


def _with(path: str | Path, suffix: str) -> Path:
    # with_suffix would cut a part of a name such as "fit.2026" off.
    path = Path(path)
    return path.with_name(path.name + suffix)


def _missing(file: Path) -> SavedStateError:
    return SavedStateError(f"there is no file {file}: give the path that save was given.")


def _damaged(file: Path, error: Exception) -> SavedStateError:
    return SavedStateError(
        f"{file} cannot be read, it is damaged or not complete ({error}). Copy it again from "
        "where it was saved, or run the fit again."
    )
