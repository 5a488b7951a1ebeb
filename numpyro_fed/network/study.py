"""A study: one file of Python that is the same at every party, with models and ``main(silos)``."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from numpyro.primitives import Messenger

from numpyro_fed.errors import ModelError
from numpyro_fed.methods.base import FederatedMethod
from numpyro_fed.methods.load import METHODS
from numpyro_fed.methods.recipe import rebuilt
from numpyro_fed.methods.vfl import SOUL, VFL
from numpyro_fed.model.fingerprint import source_hash

KINDS: dict[str, type[Any]] = {**METHODS, "VFL": VFL, "SOUL": SOUL}


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

    def may_be_named(value: object) -> bool:
        if isinstance(value, FunctionType):
            return value.__module__ == study.__name__
        return isinstance(value, FederatedMethod | Messenger | partial)

    return {
        name: value
        for name, value in vars(study).items()
        if not name.startswith("_") and name != "main" and may_be_named(value)
    }


def main_of(study: ModuleType) -> Callable[[Any], Any]:
    """Return the function ``main(silos)`` of a study."""
    main = getattr(study, "main", None)
    if not callable(main):
        raise ModelError(
            f"{study.__file__} has no function main(silos). It is what the analyst runs: "
            "def main(silos): return nf.fit(jax.random.key(0), model, silos)."
        )
    return main


def data_of(where: str) -> Any:
    """Return a silo's data, from a function that is given as ``file.py:function``."""
    path, _, name = where.rpartition(":")
    if not path:
        raise ModelError(f"{where!r}: expected file.py:function, such as hospital.py:silo.")
    function = getattr(load_file(path), name, None)
    if not callable(function):
        raise ModelError(f"{path} has no function {name}(). It returns the silo's data.")
    return function()


def method_of(described: Mapping[str, Any], names: Mapping[str, Any]) -> Any:
    """Return the method of a server's description, or the model where only facts are asked for."""
    model = _known(described.get("model"), names, "model")
    source = source_hash(model)
    if source and described.get("source") and described["source"] != source:
        raise ModelError(
            f"the text of '{described['model']}' differs between server and silo: all parties must "
            "have the same file."
        )
    if "named" in described:
        named = _known(described["named"], names, "method")
        if not isinstance(named, FederatedMethod):
            raise ModelError(f"'{described['named']}' is no method at this silo.")
        return named
    if "method" not in described:
        return model
    kind = KINDS.get(str(described["method"]))
    if kind is None:
        raise ModelError(f"there is no method '{described['method']}': known are {sorted(KINDS)}.")
    try:
        return rebuilt(kind, model, dict(described["settings"]))
    except Exception as error:
        raise ModelError(
            f"the settings of {described['method']} cannot be used: {error}"
        ) from error


def _known(name: object, names: Mapping[str, Any], what: str) -> Any:
    if not isinstance(name, str) or name not in names:
        raise ModelError(
            f"this silo knows no {what} {name!r:.100}: it knows {sorted(names)}. The study's file "
            "must have it as a variable, or Silo(names={...})."
        )
    return names[name]
