"""DataFrames and their columns (pandas, polars, and whatever else narwhals reads) as NumPy arrays.

Levels of categorical columns are agreed across silos: names cross, and counts do not. Each
conversion loses nothing, or is refused with the way out. narwhals is asked for where a
DataFrame comes, and nowhere else: arrays, lists and numbers need no extra.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeGuard

import jax
import numpy as np
from jax.typing import ArrayLike

from numpyro_fed.basics.errors import DataError, MissingExtraError, optional, positive_int

# Whole numbers beyond it are not all numbers of double precision.
LARGEST_WHOLE = 2**53


class Table(Protocol):
    """A DataFrame of any library that narwhals reads."""

    columns: Any
    dtypes: Any


SiloInput: TypeAlias = Mapping[str, Any] | Table  # what a user passes as a silo's data


def is_frame(value: object) -> TypeGuard[Table]:
    """Return whether a value is a DataFrame; a lazy one, which has to be collected, is none."""
    named = hasattr(value, "columns") and hasattr(value, "dtypes")
    return named and not isinstance(value, Mapping) and not hasattr(value, "collect")


def is_column(value: object) -> bool:
    """Return whether a value is a column of a DataFrame, and no array."""
    named = hasattr(value, "name") and hasattr(value, "to_numpy") and hasattr(value, "dtype")
    # An array of xarray has a name as well; its dims tell it apart, and NumPy reads it.
    return named and not hasattr(value, "dims")


def model_arguments(model: Callable[..., Any] | None) -> dict[str, bool] | None:
    """Return which arguments of a model lack a default; None if it takes any, or does not tell."""
    if model is None:
        return None
    try:
        parameters = inspect.signature(model).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return {p.name: p.default is p.empty for p in parameters}


def as_dict(owner: str, silo: object, arguments: Mapping[str, bool] | None = None) -> Any:
    """Return a silo with arrays in the place of DataFrames and columns.

    A silo that is a DataFrame itself becomes the dict of its columns. ``arguments`` are those of
    the model: then columns must be arguments, and hold all that have no default. What is neither a
    DataFrame nor a mapping is returned as it is, for the caller to refuse.
    """
    if not is_frame(silo):
        if not isinstance(silo, Mapping) or not _holds_table(silo):
            return silo
        return {name: _converted(owner, str(name), value) for name, value in silo.items()}
    columns = columns_of(owner, silo)
    known = dict.fromkeys(columns, False) if arguments is None else arguments
    if extra := [name for name in columns if name not in known]:
        chosen = [name for name in columns if name in known]
        words = " and ".join(f"'{name}'" for name in extra)
        raise DataError(
            f"{owner} is a DataFrame with the columns {list(columns)}, whose columns are the "
            f"model's arguments by name, but the model has no argument {words}: its arguments are "
            f"{list(known)}. Choose columns first (df[{chosen}]), or pass a dict of arguments, any "
            "of which may be a DataFrame: dict(x=df[[...]])."
        )
    if lacking := [name for name, needed in known.items() if needed and name not in columns]:
        raise DataError(
            f"{owner} is a DataFrame with the columns {sorted(columns)}, which lacks {lacking} of "
            f"the model's arguments {list(known)}. What is no number of a row, such as a number of "
            "hospitals, is passed beside the columns: "
            f"dict({{c: df[c] for c in df.columns}}, {lacking[0]}=...)."
        )
    return {name: column_array(owner, name, column) for name, column in columns.items()}


def column_names(silo: object) -> dict[str, tuple[str, ...]]:
    """Return the names of the columns of each argument that is a DataFrame."""
    if not isinstance(silo, Mapping):
        return {}
    frames = {str(name): value for name, value in silo.items() if is_frame(value)}
    return {name: tuple(map(str, frame.columns)) for name, frame in frames.items()}


def check_columns(
    owner: str, name: str, found: Sequence[str], expected: Sequence[str], other: str
) -> None:
    """Raise an error if a DataFrame has other columns than another one, or in another order."""
    if tuple(found) == tuple(expected):
        return
    lacking = [c for c in expected if c not in found]
    extra = [c for c in found if c not in expected]
    what = " and ".join(
        [f"lacks the columns {lacking}"] * bool(lacking)
        + [f"has the columns {extra} besides"] * bool(extra)
    )
    raise DataError(
        f"{owner}, '{name}': a DataFrame that {what or 'has its columns in another order'}: "
        f"{list(found)}, where {other} has {list(expected)}. A model reads columns by their place: "
        f"pass df[{list(expected)}]."
    )


def columns_of(owner: str, frame: Table) -> dict[str, Any]:
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
    """Return a column as one of narwhals; None for what is none, and where it is not installed."""
    if not is_column(column):
        return None
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
    if missing == len(series) > 0:  # nothing is known of it, not even its dtype
        return np.full(len(series), np.nan)
    if dtype.is_integer() or dtype.is_float():
        whole = missing and dtype.is_integer()
        if whole and _largest(series.drop_nulls().to_numpy()) > LARGEST_WHOLE:
            raise DataError(
                f"{owner}, '{name}': {missing} of {len(series)} values are missing in a column of "
                f"dtype {dtype}, whose numbers are beyond 2**53: no float holds them beside NaN. "
                "Make them smaller (an index from 0, say)."
            )
        return series.to_numpy()
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
            f"numpyro_fed.levels(silos, ['{name}']), then levels.encode(silo) for each silo. For "
            "the model of a formula f, f.silo(table, new=True) makes the data of new rows."
        )
    else:
        way = (
            f"Convert it to numbers first (df['{column}'].astype(float); 'boolean' for True, False "
            "and None), or, if it has names, agree on levels: "
            f"numpyro_fed.levels(silos, ['{name}'])."
        )
    # The name alone: an Enum prints its categories, which are values of rows.
    kind = type(dtype).__name__
    raise DataError(f"{owner}, '{name}': expected a column of numbers, got dtype {kind}. {way}")


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
    if (series := as_series(value)) is not None:
        return column_array(owner, name, series)
    if isinstance(value, Mapping):
        return {key: _converted(owner, f"{name}.{key}", part) for key, part in value.items()}
    if type(value) in (list, tuple) and isinstance(value, list | tuple):
        parts = [_converted(owner, f"{name}.{i}", part) for i, part in enumerate(value)]
        return parts if isinstance(value, list) else tuple(parts)
    return value


def with_columns(frame: Table, arrays: Mapping[str, np.ndarray]) -> Any:
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


Names = Mapping[str, tuple[str, ...]]
# The least number of rows of a level whose name leaves a silo. That of a Policy's min_rows, and of
# the disclosure rules of most statistical offices.
MIN_COUNT = 5
OTHER = "other"


@dataclass(frozen=True)
class Levels(Mapping[str, tuple[str, ...]]):
    """The levels of categorical columns that all silos agree on.

    It is a mapping: ``levels["city"]`` are the names of the levels of a column, and
    ``len(levels["city"])`` is their number, for the size of an effect's plate.

    Attributes
    ----------
    names : dict of str to tuple of str
        The levels of each column in the order of their codes: sorted, and ``other`` last, where
        there is one.
    min_count : int
        The least number of rows of a level at some silo; rarer ones are counted as ``other``.
    other : str
        The name of the level of all rare ones.

    Examples
    --------
    >>> import numpyro_fed as nf
    >>> sent = {"city": ("Bern", "Rome", "other")}, {"city": ("Oslo",)}
    >>> levels = nf.Levels.union(*sent, min_count=2)
    >>> levels["city"]
    ('Bern', 'Oslo', 'Rome', 'other')
    >>> levels.encode({"city": ["Rome", "Rome", "Oslo", "Nice"]})["city"].tolist()
    [2, 2, 1, 3]
    >>> levels.decode("city", [2, 3]).tolist()
    ['Rome', 'other']
    """

    names: Names
    min_count: int = MIN_COUNT
    other: str = OTHER

    def __getitem__(self, column: str) -> tuple[str, ...]:
        return self.names[column]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    @classmethod
    def union(cls, *parts: Names, min_count: int = MIN_COUNT, other: str | None = None) -> Levels:
        """Return the levels of several silos, each of which has sent the names of its own.

        All parties get the same levels, in whatever order the parts come.

        Parameters
        ----------
        *parts : dict of str to tuple of str
            What :func:`numpyro_fed.level_names` has returned at each silo.
        min_count : int
            The one that was used there.
        other : str, optional
            The name of the level of all rare ones, if each column is to have it. By default it is
            ``"other"``, in the columns of which some part has it.

        Returns
        -------
        Levels

        Raises
        ------
        DataError
            For parts with other columns than the first.
        """
        positive_int("min_count", min_count)
        if not parts:
            raise DataError("there are no parts: pass what nf.level_names returned at each silo.")
        for j, part in enumerate(parts):
            if set(part) != set(parts[0]):
                raise DataError(
                    f"part {j} has levels of the columns {sorted(part)}, and part 0 of "
                    f"{sorted(parts[0])}. All silos must name the same columns."
                )
        united = {c: {str(name) for part in parts for name in part[c]} for c in parts[0]}
        asked, last = other is not None, OTHER if other is None else other
        names = {
            c: (*sorted(found - {last}), *([last] if asked or last in found else []))
            for c, found in united.items()
        }
        return cls(names, min_count, last)

    def encode(self, silo: SiloInput, *, new: bool = False) -> Any:
        """Return a silo's data with the codes of levels in the place of their names.

        Parameters
        ----------
        silo : dict or DataFrame
            It is not changed.
        new : bool
            Whether the rows took no part in the agreement, as rows to predict for. Rare levels of
            them cannot be told from unknown ones: each level that is not known is refused.

        Returns
        -------
        dict or DataFrame
            As the silo, where each column is replaced by whole numbers from 0.

        Raises
        ------
        DataError
            For a column that the silo lacks, or that misses values; for a level that is not known,
            unless this silo has fewer than ``min_count`` rows of it, which are ``other`` where
            there is such a level.
        """
        for column, known in self.names.items():
            found, codes = _strings(silo, column), {name: i for i, name in enumerate(known)}
            for level, count in sorted(Counter(found).items()):
                if level in codes:
                    continue
                if new or count >= self.min_count or self.other not in codes:
                    way = (
                        f"Write '{self.other}' for a rare one, and mend one that is misspelt."
                        if new and self.other in codes
                        else "Mend it if it is misspelt; else agree on the levels again, with "
                        + (f"other='{self.other}'." if new else "this silo among the silos.")
                    )
                    raise DataError(
                        f"column '{column}': {count} rows have the level '{level}', which is none "
                        f"of those that were agreed on, {list(known)}. {way}"
                    )
                codes[level] = codes[self.other]
            silo = _replaced(silo, column, np.array([codes[name] for name in found], np.int32))
        return silo

    def decode(self, column: str, codes: ArrayLike) -> np.ndarray:
        """Return the names of the levels of a column by their codes, in an array of strings.

        Raises
        ------
        DataError
            For another column, or a code that no level has.
        """
        if column not in self.names:
            raise DataError(f"there are no levels of '{column}': known are {list(self.names)}.")
        index, known = np.asarray(codes), self.names[column]
        if index.dtype.kind not in "iu":
            raise DataError(f"codes of '{column}' are whole numbers, got dtype {index.dtype}.")
        if index.size and not 0 <= index.min() <= index.max() < len(known):
            raise DataError(
                f"codes of '{column}' go from 0 to {len(known) - 1}, got {index.min()} to "
                f"{index.max()}."
            )
        return np.array(known)[index]


def level_names(
    silo: SiloInput, columns: Sequence[str], min_count: int = MIN_COUNT, other: str = OTHER
) -> dict[str, tuple[str, ...]]:
    """Return the names of a silo's levels, for other parties to see.

    A hospital runs this on its own rows and sends what it returns, which is no more than names;
    :meth:`Levels.union` unites those of all.

    Parameters
    ----------
    silo : dict or DataFrame
    columns : sequence of str
        Arguments, columns of the DataFrame, or ``"x.city"`` for a column of the argument ``x``.
    min_count : int
        The least number of rows of a level. The name of a rarer one is left out: a level that few
        patients have, a rare disease or a village, says who is here.
    other : str
        The name that stands for all rarer ones, where there are any.

    Returns
    -------
    dict of str to tuple of str
        The names of each column, sorted, and ``other`` last, where there is one.

    Raises
    ------
    DataError
        For a column that the silo lacks, that holds anything but strings, categories, booleans or
        whole numbers, or that misses values.

    Examples
    --------
    >>> import numpyro_fed as nf
    >>> nf.level_names({"city": ["Bern"] * 7 + ["Rome"] * 6 + ["Nice"] * 2}, ["city"])
    {'city': ('Bern', 'Rome', 'other')}
    """
    positive_int("min_count", min_count)
    names = {}
    for column, found in level_counts(silo, columns).items():
        shown = {name for name, count in found.items() if count >= min_count}
        rare = bool(found.keys() - shown) or other in shown
        names[column] = (*sorted(shown - {other}), *([other] if rare else []))
    return names


def level_counts(silo: SiloInput, columns: Sequence[str]) -> dict[str, Counter[str]]:
    """Return how many rows of a silo have each level of each column; this is for the silo alone."""
    return {column: Counter(_strings(silo, column)) for column in listed_names("columns", columns)}


def listed_names(what: str, names: Sequence[str]) -> Sequence[str]:
    """Return names of columns, once they are a list."""
    if isinstance(names, str):
        raise DataError(f"{what} must be a list of names, got the string '{names}'.")
    return names


def _strings(silo: SiloInput, column: str) -> list[str]:
    """Return a categorical column as strings."""
    value = _found(silo, column)
    if value is None:
        known = list(silo) if isinstance(silo, Mapping) else [type(silo).__name__]
        known = list(map(str, silo.columns)) if is_frame(silo) else known
        raise DataError(
            f"there is no column '{column}': the data have {known}. A column of an argument that "
            "is a DataFrame is named 'x.city'."
        )
    if is_frame(value):
        raise DataError(
            f"'{column}' is a DataFrame with the columns {list(map(str, value.columns))}: name one "
            f"of them, such as '{column}.{next(iter(value.columns))}'."
        )
    series = as_series(value)
    # Categories are read as objects, so that codes of a library are not taken for names.
    array = np.asarray(value if series is None else series.to_list(), object).ravel()
    # The NA of pandas cannot be compared.
    missing = sum(v is None or type(v).__name__ == "NAType" or v != v for v in array.tolist())
    if missing:
        raise DataError(
            f"column '{column}': {missing} of {array.size} values are missing. Make that a level "
            "of its own ('unknown', in the place of what is missing), or leave these rows out."
        )
    odd = [v for v in array.tolist() if not isinstance(v, str | bool | int | np.bool_ | np.integer)]
    if odd:
        raise DataError(
            f"column '{column}': levels have names (strings, categories, booleans or whole "
            f"numbers), got {odd[0]!r:.40} of type {type(odd[0]).__name__}. Numbers need no "
            "levels: pass them as they are."
        )
    return [str(v) for v in array.tolist()]


def _found(silo: object, column: str) -> Any:
    """Return the column of this name, in a DataFrame or a dict of arguments; None if none is so."""
    if is_frame(silo):
        return columns_of("the data", silo).get(column)
    if not isinstance(silo, Mapping):
        return None
    if column in silo:
        return silo[column]
    argument, _, inner = column.partition(".")
    return _found(silo.get(argument), inner)


def _replaced(silo: SiloInput, column: str, codes: np.ndarray) -> Any:
    """Return the data with codes in the place of a column, which they have."""
    if not isinstance(silo, Mapping):
        return with_columns(silo, {column: codes})
    if column in silo:
        return {**silo, column: codes}
    argument, _, inner = column.partition(".")
    return {**silo, argument: _replaced(silo[argument], inner, codes)}
