"""The tables of silos as a formula takes them: what columns hold, and what is refused.

A column of a wrong type at one silo would be made one of levels at all, in silence. Here it is
refused, by the silo's name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from numpyro_fed.basics.errors import DataError, DataWarning, optional, warn_user
from numpyro_fed.data.descriptions import (
    DATE,
    EMPTY,
    MIXED,
    NUMBER,
    TEXT,
    WHOLE,
    YES_NO,
    kind_and_values,
)
from numpyro_fed.data.tables import Levels, is_frame
from numpyro_fed.formulas.design import EXTRA, Agreed
from numpyro_fed.formulas.grammar import SILO, GroupEffect

# Text of which so many different values are numbers, those of half of the rows or more, is one of
# numbers by mistake.
MANY_NUMBERS = 10
PLURALS = {NUMBER: "numbers", YES_NO: "yes or no", TEXT: "text", DATE: "dates"}
PLURALS |= {MIXED: "text among other values"}


def named(tables: Any) -> list[tuple[Any, Any]]:
    """Return pairs of a silo's name, or number, and its table; refuse one table of all silos."""
    if is_frame(tables):
        raise DataError(
            "expected a table for each silo, and got one DataFrame with the columns "
            f"{list(tables.columns)}. Of a pooled one make a dict of tables by the column that has "
            'the silo, such as dict(tuple(df.groupby("hospital"))).'
        )
    return list(tables.items() if isinstance(tables, Mapping) else enumerate(tables))


def as_frame(name: str, table: Any, columns: Sequence[str], factors: Sequence[str]) -> Any:
    """Return a table as a DataFrame, with a column of strings, ``C_x``, for each factor x.

    Of ``columns``, those of Python's numbers, Decimals and what is missing have numbers.
    """
    pandas = optional("pandas", EXTRA)
    try:
        frame = pandas.DataFrame(table.to_pandas() if hasattr(table, "to_pandas") else table)
    except ValueError as error:
        raise DataError(f"{name}: expected a DataFrame or a dict of columns: {error}") from error
    texts = {f"C_{c}": strings(frame[[c]])[c] for c in factors if c in frame}
    # A column of categories keeps their order.
    texts |= {f"C_{c}": frame[c] for c in factors if c in frame and _categories(frame[c])}
    objects = [c for c in columns if c in frame and frame[c].dtype == object]
    for column, kind in [(c, kind_of(frame[c])) for c in objects]:
        if kind in (NUMBER, EMPTY):
            there = frame[column].where(frame[column].notna(), np.nan)
            texts[column] = there.map(float).astype(float)
        elif kind == YES_NO:
            texts[column] = frame[column].astype("boolean")
    return frame.assign(**texts)


def kind_of(column: Any) -> str:
    """Return what a column holds: NUMBER, YES_NO, TEXT (and categories), DATE, MIXED or EMPTY."""
    pandas = optional("pandas", EXTRA)
    if column.isna().all():
        return EMPTY
    if isinstance(column.dtype, pandas.CategoricalDtype):
        return TEXT
    if is_numeric(column, also_bool=True):
        return NUMBER if is_numeric(column) else YES_NO
    kind, _ = kind_and_values(column.to_numpy(object))
    return NUMBER if kind == WHOLE else kind


def check_kinds(frames: Mapping[str, Any], columns: Sequence[str]) -> None:
    """Raise an error for a column that is a number at some silos alone, or a number in text."""
    pandas = optional("pandas", EXTRA)
    for column in columns:
        kinds = {name: kind_of(frame[column]) for name, frame in frames.items()}
        at = {k: ", ".join(n for n in kinds if kinds[n] == k) for k in {*kinds.values()} - {EMPTY}}
        if DATE in at:
            raise DataError(
                f"'{column}' is a date at {at[DATE]}, and a date is no number until its unit and "
                "its first day are told. Make it one, alike at all silos: "
                f"(df['{column}'] - pandas.Timestamp('2020-01-01')).dt.days."
            )
        of_text = [frames[n][column].dropna() for n in kinds if kinds[n] in (TEXT, MIXED)]
        words = [w for one in of_text for w in one.astype(object) if isinstance(w, str)]
        texts = pandas.Series([w.replace(",", ".") for w in words], dtype=object)
        numbers = pandas.to_numeric(texts, errors="coerce")
        odd = [w for w, missing in zip(words, numbers.isna(), strict=True) if missing]
        mixed = MIXED in at or (len(at) > 1 and TEXT in at)
        if mixed or (numbers.nunique() > MANY_NUMBERS and 2 * len(odd) <= len(words)):
            found = " and ".join(f"{PLURALS[k]} at {at[k]}" for k in PLURALS if k in at)
            example = f" ({(odd or words)[0]!r:.40}, say)" if words else ""
            raise DataError(
                f"'{column}' is {found}{example}{'' if mixed else ', of many different numbers'}. "
                f"Make it a number at all silos, pandas.to_numeric(df['{column}'], "
                'errors="coerce"), where what is no number becomes a missing value; or write '
                f"C({column}) in the formula if its values are names."
            )


def check_terms(agreed: Agreed, columns: Sequence[str], formula: str) -> None:
    """Warn of columns that are the same at all rows, and raise an error for all rare levels."""
    same = {c: f"{agreed.mean[c]:g}" for c in agreed.mean if agreed.sd[c] == 0}
    for column, names in agreed.names.items():
        same |= {column: f"'{names[0]}'"} if len(names) == 1 else {}
        if agreed.levels is not None and names == (agreed.levels.other,):
            raise DataError(
                f"'{column}': each level has fewer than {agreed.levels.min_count} rows at each "
                f"silo, and all are '{names[0]}', so that nothing is left of the column. Join "
                "levels, or lower formula(min_count=). Is it a number, written as text?"
            )
    for column in (c for c in columns if c in same):
        warn_user(
            f"'{column}' is {same[column]} at all rows of all silos, which tells nothing of its "
            f"effect: leave it out of {formula!r}.",
            DataWarning,
        )


def warn_of_silos(frames: Sequence[Any], columns: Sequence[str]) -> None:
    """Warn of groups that are the silo by another name."""
    for column in columns:
        own = [[*frame[column].dropna().unique()] if column in frame else [] for frame in frames]
        if len(own) > 1 and all(len(o) == 1 for o in own) and len({o[0] for o in own}) == len(own):
            warn_user(
                f"the group '{column}' is the silo: it has one value in each table, and another in "
                f"each. Write (1 | silo), whose sd has a prior for few groups, or leave '{column}' "
                "if its wider one is meant.",
                DataWarning,
            )


def complete_rows(name: str, frame: Any, columns: Sequence[str]) -> Any:
    """Return which rows have all of these columns (rows,); raise an error if none has."""
    there = frame[[*dict.fromkeys(columns)]].notna()
    whole = there.all(axis=1)
    if whole.any() or not columns:
        return whole
    lacking = [c for c in there if not there[c].any()] or [c for c in there if not there[c].all()]
    raise DataError(
        f"{name}: no row has a value of {' and of '.join(map(repr, lacking))}. Leave the silo out "
        "of the tables, or the term out of the formula, or give a column of numbers a "
        "distribution: formula(missing={...})."
    )


def check_missing(name: str, frame: Any, missing: Mapping[str, str]) -> None:
    """Raise an error for columns with missing values that their distributions cannot have."""
    for column, family in missing.items():
        if (kind := kind_of(frame[column])) not in (NUMBER, YES_NO, EMPTY):
            raise DataError(
                f"{name}, '{column}': missing= is for numbers and yes or no, and this is "
                f"{PLURALS[kind]}. Of categories make one more: fillna('unknown')."
            )
        values = floats(frame[column].dropna())
        if family == "bernoulli":
            check_zero_or_one(name, frame[column], "'bernoulli'")
        if family == "lognormal" and (values <= 0).any():
            raise DataError(
                f"{name}, '{column}': 'lognormal' has values above zero, and the least one is "
                f"{values.min():g}. Use 'gaussian', or add a number to the column."
            )


def check_zero_or_one(name: str, column: Any, what: str) -> None:
    """Raise an error for values of a column other than 0 and 1."""
    values = np.unique(floats(column.dropna()))
    if not np.isin(values, [0, 1]).all():
        example = " Subtract 1." if np.array_equal(values, [1, 2]) else ""
        raise DataError(
            f"{name}, '{column.name}': {what} has the values 0 and 1 alone, and here are "
            f"{values[:5].tolist()}.{example}"
        )


def check_new_rows(name: str, frame: Any, columns: Sequence[str]) -> None:
    """Raise an error for rows to predict for that miss a covariate."""
    there = frame[[*dict.fromkeys(columns)]].notna()
    if len(rows := np.flatnonzero(~there.all(axis=1))):
        lacking = [c for c in there if not there[c].all()]
        more = "" if len(rows) <= 8 else f" and {len(rows) - 8} more"
        raise DataError(
            f"{name}: rows {rows[:8].tolist()}{more} (from 0) of the new table miss {lacking}, and "
            f"have no prediction. Leave them out before: table.dropna(subset={lacking})."
        )


def rows_lost(name: str, frame: Any, whole: Any, columns: Sequence[str], response: str) -> str:
    """Return in words how many rows a covariate leaves out, and how many have no outcome."""
    number, words = int(whole.sum()), list[str]()
    if number < len(frame):
        lacking = ", ".join(repr(c) for c in dict.fromkeys(columns) if frame[c].isna().any())
        words.append(f"{len(frame) - number} of {len(frame)} rows {MISS_ONE} ({lacking})")
    if (no_outcome := int(frame[response][whole].isna().sum())) == number:
        words.append(f"no row has an outcome '{response}', and the silo tells nothing")
    elif no_outcome:
        words.append(f"{no_outcome} of {number} rows miss the outcome '{response}'")
    return f"{name}: {', and '.join(words)}." if words else ""


MISS_ONE = "miss a covariate"


def warn_of_missing(lost: Sequence[str]) -> None:
    """Warn of rows that are left out at silos, and of those without an outcome, once for all."""
    words = [one for one in lost if one]
    if any(MISS_ONE in one for one in words):
        words.append(
            "Rows that miss a covariate are left out. To keep them give the columns a "
            "distribution: formula(missing={...})."
        )
    if words:
        warn_user(" ".join(words), DataWarning)


def warn_of_rare(name: str, texts: Any, levels: Levels) -> None:
    """Warn of columns of which most rows are in the level of rare ones."""
    for column, known in levels.names.items():
        rare = int((~texts[column].isin([*known])).sum())
        if 2 * rare > len(texts):
            warn_user(
                f"{name}, '{column}': {rare} of {len(texts)} rows have levels of which no silo has "
                f"{levels.min_count} rows, and are '{levels.other}'. Join levels, or lower "
                "formula(min_count=).",
                DataWarning,
            )


def is_numeric(column: Any, *, also_bool: bool = False) -> bool:
    """Return whether a column's type is one of numbers, or of yes and no."""
    types = optional("pandas", EXTRA).api.types
    is_bool = types.is_bool_dtype(column.dtype)
    return bool(types.is_numeric_dtype(column.dtype) and (also_bool or not is_bool))


def floats(column: Any) -> np.ndarray:
    """Return a column of numbers as an array (rows,), NaN where they are missing."""
    values: np.ndarray = column.to_numpy(dtype=float, na_value=np.nan)
    return values


def without_empty(known: Levels, frames: Sequence[Any]) -> Levels:
    """Return levels without the one of rare ones, where no row is in it."""
    names = dict(known.names)
    for column, own in names.items():
        found = {name for frame in frames for name in frame[column]}
        if known.other in own and found <= {*own}:
            names[column] = tuple(name for name in own if name != known.other or name in found)
    return replace(known, names=names)


def strings(frame: Any) -> Any:
    """Return a table's categories as strings; whole numbers are the same in any type."""

    return frame.apply(lambda column: column.astype(object).map(_word, na_action="ignore"))


def _word(value: object) -> str:
    is_whole = isinstance(value, float | np.floating) and float(value).is_integer()
    return str(int(value)) if is_whole else str(value)  # type: ignore[call-overload]


def _categories(column: Any) -> tuple[str, ...]:
    """Return the categories of a column of pandas' in their order; empty for another column."""
    return tuple(map(_word, getattr(column.dtype, "categories", ())))


def in_order(known: Levels, frames: Sequence[Any], references: Mapping[str, str]) -> Levels:
    """Return levels in their order: that of categories all silos have alike, or of numbers."""
    names = dict(known.names)
    for column, own in names.items():
        orders = {_categories(frame[column]) for frame in frames}
        last = own[-1:] if own[-1] == known.other else ()
        rest = own[: len(own) - len(last)]
        if len(orders) == 1 and (order := orders.pop()):
            rest = tuple(sorted(rest, key=order.index))
        elif all(re.fullmatch(r"-?\d+(\.\d+)?", name) for name in rest):
            rest = tuple(sorted(rest, key=float))
        if (first := references.get(column, own[0])) not in own:
            raise DataError(f"C({column[2:]}, ...): '{first}' is none of the levels {[*own]}.")
        # The level of a reference comes first.
        chosen = (first,) if column in references else ()
        names[column] = (*chosen, *(name for name in (*rest, *last) if name not in chosen))
    return replace(known, names=names)


def ordinal_range(columns: Sequence[Any]) -> tuple[int, int]:
    """Return the lowest category of an ordinal outcome, 0 or 1, and how many there are."""
    values = np.concatenate([floats(column.dropna()) for column in columns])
    if (values % 1).any() or values.min() < 0:
        raise DataError("an ordinal outcome has whole numbers, from 0 or from 1 on.")
    first = int(values.min() > 0)
    return first, int(values.max()) + 1 - first


def member_words(frame: Any, group: GroupEffect) -> np.ndarray:
    """Return the member of a group of each row (rows,), as one string."""
    own = strings(frame[[f for f in group.factors if f != SILO]]).agg(":".join, axis=1)
    words: np.ndarray = own.to_numpy().astype(str)
    return words
