"""Methods as JSON and back: in files of fits, and in messages to silos elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from numpyro_fed import guides, local
from numpyro_fed.basics.errors import DataError, SavedStateError
from numpyro_fed.guides import objectives
from numpyro_fed.methods.method import FederatedMethod
from numpyro_fed.numerics import divergences, losses
from numpyro_fed.posterior.saving import MethodSpec
from numpyro_fed.privacy import budget
from numpyro_fed.rounds import schedules
from numpyro_fed.text.fingerprint import source_hash

AnyMethod = TypeVar("AnyMethod", bound=FederatedMethod[Any])

# The classes of settings that are objects. A file may name one of these; nothing else in a file is
# ever called, so that a file from a stranger runs no code.
PARTS = {
    f"{module.__name__.rpartition('.')[2]}.{kind.__name__}": kind
    for module in (divergences, guides, local, losses, objectives, schedules, budget)
    for kind in vars(module).values()
    if isinstance(kind, type)
    and is_dataclass(kind)
    and kind.__module__.startswith(module.__name__)
    and not kind.__name__.startswith("_")
}
NAMES = {kind: name for name, kind in PARTS.items()}
PLAIN = bool, int, float, str, type(None)


class LostError(TypeError):
    """The error for a setting that JSON cannot hold."""


def recipe(method: FederatedMethod[Any], runtime: str) -> MethodSpec:
    """Return the record from which a method can be rebuilt, given its model."""
    settings, lost = {}, []
    for f in fields(method):
        value = getattr(method, f.name)
        is_default = type(value) is type(f.default) and bool(value == f.default)
        if not f.init or f.name == "model" or is_default:
            continue
        try:
            settings[f.name] = encoded(value)
        except LostError:
            lost.append(f.name)
    source = source_hash(method.model)
    return MethodSpec(type(method).__name__, settings, tuple(lost), runtime, source)


def rebuilt(
    kind: Callable[..., AnyMethod], model: Callable[..., Any], settings: Mapping[str, Any]
) -> AnyMethod:
    """Return the method of a recipe's settings."""
    return kind(model, **{name: decoded(value) for name, value in settings.items()})


def name_of(thing: object, names: Mapping[str, Any]) -> str:
    """Return the name by which silos know an object; empty if they know none."""
    return next((name for name, known in names.items() if known is thing), "")


def for_silos(method: FederatedMethod[Any], names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of a method from which silos build the same."""
    model = method_model(method.model, names)
    if name := name_of(method, names):
        return {**model, "named": name}
    spec = recipe(method, "")
    if spec.lost:
        raise DataError(
            f"{spec.method}'s {spec.lost[0]}= cannot be sent to silos in other processes. Give the "
            "method a name that silos know: a variable of the study's file beside the model, or "
            "Federation(names={...}) and Silo(names={...})."
        )
    return {**model, "method": spec.method, "settings": spec.settings}


def method_model(model: Callable[..., Any], names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of a model: the name that silos know, and a hash of its source."""
    name = name_of(model, names) or getattr(model, "__name__", "")
    return {"model": name, "source": source_hash(model)}


def encoded(value: object) -> Any:
    """Return a setting as JSON."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return {"of": "dict", "items": {name: encoded(v) for name, v in value.items()}}
    # Exact types: a subclass, such as a NamedTuple, would come back as another type.
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return {"of": type(value).__name__, "items": [encoded(v) for v in value]}
    if is_dataclass(value) and not isinstance(value, type) and type(value) in NAMES:
        parts = {f.name: encoded(getattr(value, f.name)) for f in fields(value) if f.init}
        return {"of": NAMES[type(value)], "items": parts}
    raise LostError(f"{type(value).__name__} cannot be written down.")


def decoded(stored: object) -> Any:
    """Return a setting from the JSON of :func:`encoded`."""
    if not isinstance(stored, dict):
        return stored
    kind, items = stored["of"], stored["items"]
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(map(decoded, items))
    parts = {name: decoded(value) for name, value in items.items()}
    if kind == "dict":
        return parts
    try:
        return PARTS[kind](**parts)
    except TypeError as error:
        raise SavedStateError(
            f"a setting is {kind}({', '.join(parts)}), which this version of numpyro_fed has not: "
            "use the version that wrote it."
        ) from error
