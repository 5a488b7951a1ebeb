"""DataFrames and their columns (pandas, polars, and whatever else narwhals reads) as NumPy arrays.

Each conversion loses nothing, or is refused with the way out. narwhals is asked for where a
DataFrame comes, and nowhere else: arrays, lists and numbers need no extra.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeGuard

import jax
import numpy as np

from numpyro_fed.errors import DataError, MissingExtraError, optional

# Whole numbers beyond it are not all numbers of double precision.
LARGEST_WHOLE = 2**53


class Frame(Protocol):
    """A DataFrame of any library that narwhals reads."""

    columns: Any
    dtypes: Any


def is_frame(value: object) -> TypeGuard[Frame]:
    """Return whether a value is a DataFrame; a lazy one, which has to be collected, is none."""
    named = hasattr(value, "columns") and hasattr(value, "dtypes")
    return named and not isinstance(value, Mapping) and not hasattr(value, "collect")


def is_column(value: object) -> bool:
    """Return whether a value is a column of a DataFrame, and no array."""
    named = hasattr(value, "name") and hasattr(value, "to_numpy") and hasattr(value, "dtype")
    # An array of xarray has a name as well; its dims tell it apart, and NumPy reads it.
    return named and not hasattr(value, "dims")


def as_dict(owner: str, silo: object, arguments: Sequence[str] | None = None) -> Any:
    """Return a silo with arrays in the place of DataFrames and columns.

    A silo that is a DataFrame itself becomes the dict of its columns. ``arguments`` are those of
    the model: then a column without an argument is refused. What is neither a DataFrame nor a
    mapping is returned as it is, for the caller to refuse.
    """
    if is_frame(silo):
        columns = columns_of(owner, silo)
        if arguments is not None and (extra := [name for name in columns if name not in arguments]):
            chosen = [name for name in columns if name in arguments]
            names = " and ".join(f"'{name}'" for name in extra)
            raise DataError(
                f"{owner} is a DataFrame with the columns {list(columns)}, whose columns are the "
                f"model's arguments by name, but the model has no argument {names}: its "
                f"arguments are {list(arguments)}. Choose columns first (df[{chosen}]), "
                "or pass a dict of arguments, any of which may be a DataFrame: dict(x=df[[...]])."
            )
        return {name: column_array(owner, name, column) for name, column in columns.items()}
    if not isinstance(silo, Mapping) or not _holds_table(silo):
        return silo
    return {name: _converted(owner, str(name), value) for name, value in silo.items()}


def column_names(silo: object) -> dict[str, tuple[str, ...]]:
    """Return the names of the columns of each argument that is a DataFrame."""
    if not isinstance(silo, Mapping):
        return {}
    frames = {str(name): value for name, value in silo.items() if is_frame(value)}
    return {name: tuple(map(str, frame.columns)) for name, frame in frames.items()}


def columns_of(owner: str, frame: Frame) -> dict[str, Any]:
    """Return the columns of a DataFrame by name, each as a column of narwhals."""
    names = list(frame.columns)
    odd = [name for name in names if not isinstance(name, str)]
    twice = sorted({str(name) for name in names if names.count(name) > 1})
    if odd or twice:
        what = f"{odd} are no strings" if odd else f"{twice} name two columns each"
        raise DataError(f"{owner}: columns of a DataFrame are called by name, but {what}.")
    if not names:
        raise DataError(f"{owner}: a DataFrame without columns holds nothing. Choose some.")
    whole = narwhals().from_native(frame, eager_only=True)
    return {name: whole.get_column(name) for name in names}


def narwhals() -> Any:
    """Return narwhals, which reads DataFrames of any library."""
    return optional("narwhals", "frames")


def as_series(column: object) -> Any:
    """Return a column as one of narwhals; None if that is not installed, or knows no such type."""
    try:
        nw = narwhals()
    except MissingExtraError:
        return None  # NumPy reads columns of plain numbers without it
    return (
        nw.from_native(column, series_only=True) if nw.dependencies.is_into_series(column) else None
    )


def column_array(owner: str, name: str, series: Any) -> np.ndarray:
    """Return a column of narwhals as a NumPy array; missing numbers are NaN."""
    dtype, missing = series.dtype, series.null_count()
    if dtype.is_integer():
        present = series.drop_nulls().to_numpy() if missing else series.to_numpy()
        if missing and present.size and _largest(present) > LARGEST_WHOLE:
            raise DataError(
                f"{owner}, '{name}': {missing} of {len(series)} values are missing in a column of "
                f"dtype {dtype}, whose numbers are beyond 2**53: no float holds them beside NaN. "
                "Make them smaller (an index from 0, say)."
            )
        return series.to_numpy()
    if dtype.is_float() or missing == len(series) > 0:
        # A column of which nothing is known has no dtype to speak of.
        return np.full(len(series), np.nan) if missing == len(series) > 0 else series.to_numpy()
    if dtype == narwhals().Boolean:
        if not missing:
            return np.asarray(series.to_numpy(), bool)
        seen = ~series.is_null().to_numpy()
        values = np.full(len(series), np.nan)
        values[seen] = np.asarray(series.drop_nulls().to_numpy(), bool)
        return values
    column, nw = name.rpartition(".")[2], narwhals()
    if dtype.is_temporal():
        way = (
            "A model reads numbers, and a date is none until somebody says in which unit and from "
            "which day on: make it one, such as the days since a day that all silos agree on "
            f"(pandas: (df['{column}'] - pandas.Timestamp('2020-01-01')).dt.days)."
        )
    elif dtype.is_decimal():
        way = f"Cast it to floats first (df['{column}'].astype(float))."
    elif dtype in (nw.String, nw.Categorical, nw.Enum):
        way = (
            f"Agree on its levels over all silos and pass their numbers: levels = "
            f"numpyro_fed.levels(silos, ['{name}']), then levels.encode(silo) for each silo."
        )
    else:
        way = (
            f"Convert it to numbers first (df['{column}'].astype(float); 'boolean' for True, False "
            "and None), or, if it has names, agree on levels: "
            f"numpyro_fed.levels(silos, ['{name}'])."
        )
    raise DataError(f"{owner}, '{name}': expected a column of numbers, got dtype {dtype}. {way}")


def _converted(owner: str, name: str, value: object) -> Any:
    """Return an argument with arrays in the place of DataFrames and columns, at any depth."""
    if is_frame(value):
        columns = columns_of(f"{owner}, '{name}'", value)
        arrays = {c: column_array(owner, f"{name}.{c}", series) for c, series in columns.items()}
        for column, array in arrays.items():
            if array.dtype.kind in "iu" and array.size and _largest(array) > LARGEST_WHOLE:
                raise DataError(
                    f"{owner}, '{name}.{column}': whole numbers beyond 2**53, which the floats of "
                    "a matrix do not hold. Pass this column as an argument of its own."
                )
        floats = all(array.dtype.kind == "f" for array in arrays.values())
        dtype = np.result_type(*arrays.values()) if floats else np.dtype(np.float64)
        return np.stack([array.astype(dtype) for array in arrays.values()], axis=1)
    if is_column(value):
        series = as_series(value)
        return value if series is None else column_array(owner, name, series)
    if isinstance(value, Mapping):
        return {key: _converted(owner, f"{name}.{key}", part) for key, part in value.items()}
    if type(value) in (list, tuple) and isinstance(value, list | tuple):
        parts = [_converted(owner, f"{name}.{i}", part) for i, part in enumerate(value)]
        return parts if isinstance(value, list) else tuple(parts)
    return value


def with_columns(frame: Frame, arrays: Mapping[str, np.ndarray]) -> Any:
    """Return a DataFrame of the same library with other numbers in some columns."""
    nw = narwhals()
    whole = nw.from_native(frame, eager_only=True)
    # Each is put beside a column of the frame, whose index it takes over where there is one.
    new = [
        nw.new_series(name, array, backend=whole.implementation).alias(name)
        for name, array in arrays.items()
    ]
    if hasattr(frame, "index"):
        new = [nw.maybe_set_index(series, index=frame.index) for series in new]
    return whole.with_columns(*new).to_native()


def _holds_table(value: object) -> bool:
    """Return whether a value is a DataFrame or a column, or holds one at any depth."""
    if isinstance(value, np.ndarray | jax.Array | int | float | str):
        return False
    if isinstance(value, Mapping):
        return any(map(_holds_table, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_table, value))
    return is_frame(value) or is_column(value)


def _largest(array: np.ndarray) -> int:
    """Return the largest absolute value of whole numbers, without overflow."""
    return max(abs(int(array.min())), abs(int(array.max())))
