"""Records as JSON texts and back: the one codec of what parties tell each other and keep."""

from __future__ import annotations

import json
from dataclasses import asdict, is_dataclass
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from numpyro_fed.errors import DataError

Record = TypeVar("Record")


def canonical(value: object) -> str:
    """Return the JSON of a value or a dataclass, the same text for equal values."""
    plain = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    return json.dumps(plain, sort_keys=True, separators=(",", ":"))


def read_record(kind: type[Record], text: str | bytes) -> Record:
    """Return the record in a text that :func:`canonical` has made; refuse all other texts.

    ``kind`` is a dataclass or a NamedTuple, whose fields are numbers, texts, other records, tuples
    and dicts of these, or one of these and None.
    """
    try:
        return _typed(kind, json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(
            f"a text names {', '.join(get_type_hints(kind))} of {kind.__name__}, but this one says "
            f"{text!r:.100}. All parties must run the same version."
        ) from error


def _typed(kind: Any, value: Any) -> Any:
    """Return a value of JSON as a type says."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return None if value is None else _typed(parts[0], value)
    if origin is tuple:
        every = parts[1:] == (Ellipsis,)
        if not isinstance(value, list) or (not every and len(value) != len(parts)):
            raise TypeError("something else than a list")
        return tuple(_typed(parts[0 if every else i], v) for i, v in enumerate(value))
    if origin is dict:
        return {name: _typed(parts[1], v) for name, v in value.items()}
    if kind is Any:
        return value
    if is_dataclass(kind) or issubclass(kind, tuple):
        types = get_type_hints(kind)
        named = dict(zip(types, value, strict=True)) if isinstance(value, list) else value
        if named.keys() != types.keys():
            raise TypeError("other fields")
        return kind(**{name: _typed(types[name], v) for name, v in named.items()})
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise TypeError(f"{value!r:.100} in the place of {kind}")
    return value
