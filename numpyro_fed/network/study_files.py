"""The files of a study: its module, its hash, the names in it, a silo's data, and a key."""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from numpyro.primitives import Messenger

from numpyro_fed.basics.errors import ModelError
from numpyro_fed.methods.method import FederatedMethod
from numpyro_fed.rounds.envelopes import KEY_FILE, PrivateKey


def load_study(path: str | Path) -> tuple[ModuleType, str]:
    """Return the module of a study's file, and the hash of it and of the files it imports."""
    loaded = set(sys.modules)
    study = load_file(path)
    return study, study_hash(study, [m for name, m in sys.modules.items() if name not in loaded])


def load_file(path: str | Path) -> ModuleType:
    """Return the module of a file; imports in it find the files beside it."""
    file = Path(path).resolve()
    if not file.is_file():
        raise ModelError(f"there is no file {path}.")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ModelError(f"{path} is no file of Python: its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    spec.loader.exec_module(module)
    return module


def names_of(study: ModuleType) -> dict[str, Any]:
    """Return the objects of a study that parties may name: its own functions, and its methods.

    Whatever it imports is no part of that: a server could otherwise have it called.
    """
    found = {}
    for name, value in vars(study).items():
        own = isinstance(value, FunctionType) and value.__module__ == study.__name__
        may_be_named = own or isinstance(value, FederatedMethod | Messenger | partial)
        if may_be_named and name != "main" and not name.startswith("_"):
            found[name] = value
    return found


def data_of(where: str) -> Any:
    """Return a silo's data, from a function that is given as ``file.py:function``."""
    path, _, name = where.rpartition(":")
    if not path:
        raise ModelError(f"{where!r}: expected file.py:function, such as hospital.py:silo.")
    function = getattr(load_file(path), name, None)
    if not callable(function):
        raise ModelError(f"{path} has no function {name}(). It returns the silo's data.")
    return function()


def study_hash(study: ModuleType, modules: list[ModuleType]) -> str:
    """Return the hash of a study's file and of the modules beside it that it imports."""
    root = Path(str(study.__file__)).parent
    files = {Path(str(study.__file__))}
    for module in modules:
        file = getattr(module, "__file__", None)
        if file and Path(file).suffix == ".py" and Path(file).resolve().is_relative_to(root):
            files.add(Path(file).resolve())
    digest = sha256()
    for file in sorted(files - {f for f in files if "site-packages" in f.parts}):
        # Lines may end as the machine has them.
        text = file.read_bytes().replace(b"\r\n", b"\n")
        digest.update(f"{file.relative_to(root).as_posix()} {len(text)}\n".encode() + text)
    return digest.hexdigest()


def key_of(file: Path | None) -> PrivateKey | None:
    """Return the key in a file; without one, that of ``numpyro-fed key`` if there is one."""
    if file is not None:
        return PrivateKey.load(file.expanduser())
    usual = KEY_FILE.expanduser()
    return PrivateKey.load(usual) if usual.exists() else None
