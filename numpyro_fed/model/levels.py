"""Levels of categorical columns, agreed across silos: names cross, and counts do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.typing import ArrayLike

from numpyro_fed.errors import DataError, positive_int
from numpyro_fed.model.frames import as_series, columns_of, is_column, is_frame, with_columns

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

    def encode(self, silo: Any, *, new: bool = False) -> Any:
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
    silo: Any, columns: Sequence[str], min_count: int = MIN_COUNT, other: str = OTHER
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


def level_counts(silo: Any, columns: Sequence[str]) -> dict[str, Counter[str]]:
    """Return how many rows of a silo have each level of each column; this is for the silo alone."""
    return {column: Counter(_strings(silo, column)) for column in listed_names("columns", columns)}


def listed_names(what: str, names: Sequence[str]) -> Sequence[str]:
    """Return names of columns, once they are a list."""
    if isinstance(names, str):
        raise DataError(f"{what} must be a list of names, got the string '{names}'.")
    return names


def _strings(silo: Any, column: str) -> list[str]:
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
    series = as_series(value) if is_column(value) else None
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


def _found(silo: Any, column: str) -> Any:
    """Return the column of this name, in a DataFrame or a dict of arguments; None if none is so."""
    if is_frame(silo):
        return columns_of("the data", silo).get(column)
    if not isinstance(silo, Mapping):
        return None
    if column in silo:
        return silo[column]
    argument, _, inner = column.partition(".")
    return _found(silo.get(argument), inner)


def _replaced(silo: Any, column: str, codes: np.ndarray) -> Any:
    """Return the data with codes in the place of a column, which they have."""
    if is_frame(silo):
        return with_columns(silo, {column: codes})
    if column in silo:
        return {**silo, column: codes}
    argument, _, inner = column.partition(".")
    return {**silo, argument: _replaced(silo[argument], inner, codes)}
