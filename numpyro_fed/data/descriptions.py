"""What columns look like at each silo, told roughly, and what of it does not go together.

A silo tells no count, nothing of fewer rows than a threshold, and no value beside rounded
quantiles, names of levels and codes for what is missing. Alarms are found from that alone.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from math import ceil, floor, log, log10, prod
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import bdtr

from numpyro_fed.basics import display
from numpyro_fed.basics.errors import optional
from numpyro_fed.data.tables import SiloInput, as_series, columns_of, is_frame, narwhals

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
NUMBER, WHOLE, YES_NO, TEXT, DATE = "number", "whole number", "yes or no", "text", "date"
MIXED, EMPTY = "mixed", "all missing"
# Kinds that go together: a small silo may have whole numbers where others have fractions.
CLASS = {NUMBER: "numbers", WHOLE: "numbers", YES_NO: "numbers", TEXT: TEXT, DATE: "dates"}
CLASS |= {MIXED: "values of several types", EMPTY: ""}
TYPES: tuple[tuple[str, Any], ...] = (
    (YES_NO, bool | np.bool_),
    (WHOLE, int | np.integer),
    (NUMBER, float | np.floating | Decimal),
    (TEXT, str),
    (DATE, datetime.date | datetime.time | datetime.timedelta),
)
# Percents to which shares are rounded: the first that is so many rows, so that none is a count.
STEPS, ROWS_OF_STEP = (1, 2, 5, 10, 20, 25, 50), 3
ROWS_STEP = 5  # numbers of rows below 100 are multiples of it
MOST_CODES, MOST_LEVELS = 6, 50  # whole numbers of so few values are levels; names that are told
CODES = (-9999, -999, -99, -9, 99, 999, 9999)  # what people write for a value that is missing
# Ratios of one quantity in two units. A median may be off such a ratio by the factor NEAR, which
# leaves room for other patients; one beyond UNLIKE is an alarm without a known ratio.
UNITS = {
    2.205: "pounds and kilograms",
    10.0: "a factor of ten, such as cm and mm",
    12.0: "months and years",
    18.02: "mg/dl and mmol/l of glucose",
    38.67: "mg/dl and mmol/l of cholesterol",
    88.42: "mg/dl and \u00b5mol/l of creatinine",
    100.0: "a factor of 100, such as shares and percents, or m and cm",
    1000.0: "a factor of 1,000, such as kg and g",
}
NEAR, UNLIKE = 1.15, 5.0
FAR_MISSING = 30  # percents of missing values from those of the others
CHANCE = 1e-3  # that others have so few rows of a level by chance, below which it is an alarm


@dataclass(frozen=True)
class ColumnAtSilo:
    """The description of a column at a silo; None stands for what would tell of few rows.

    ``kind`` is ``"number"``, ``"whole number"``, ``"yes or no"`` (zeros and ones, too), ``"text"``,
    ``"date"``, ``"mixed"`` or ``"all missing"``; ``rows`` their number, rounded to two significant
    digits and a multiple of five; ``missing`` the percents of rows without a value, and ``levels``
    those of the others that have a level (None: nearly all), rounded to a step of three rows or
    more; ``others`` the percents of all rarer levels together; ``quantiles`` those of 5, 25, 50, 75
    and 95 %, rounded to two significant digits; ``constant``, whether all values are the same;
    ``codes``, which of -9, 99, 999 and the like stand far from all other values.
    """

    kind: str
    fewest: int
    rows: int | None = None
    missing: int | None = None
    levels: dict[str, int | None] = field(default_factory=dict)
    others: int | None = 0
    quantiles: tuple[float | None, ...] = (None,) * len(QUANTILES)
    constant: bool = False
    codes: tuple[int, ...] = ()

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> ColumnAtSilo:
        """Return the description in a silo's reply; raise a ValueError for what is none."""
        cell = cls(**{**found, "quantiles": (*found["quantiles"],), "codes": (*found["codes"],)})
        percents = [cell.missing, cell.others, *cell.levels.values()]
        wholes = [n for n in (cell.fewest, cell.rows, *percents) if n is not None]
        numbers = [q for q in cell.quantiles if q is not None]
        well = all(type(n) is int and n >= 0 for n in wholes) and set(cell.codes) <= set(CODES)
        well &= all(type(q) is float and np.isfinite(q) for q in numbers)
        well &= cell.kind in CLASS and type(cell.constant) is bool
        if not well or len(cell.quantiles) != len(QUANTILES) or max(p or 0 for p in percents) > 100:
            raise ValueError("no description of a column")
        return cell

    def words(self, *, by_level: bool) -> str:
        """Return what is told in words; of codes their shares, or their quantiles."""
        low, mid, high = self.quantiles[1:4]
        if self.levels and (by_level or mid is None):
            shares: list[tuple[str, int | None]] = [*self.levels.items()]
            shares.sort(key=lambda share: -100 if share[1] is None else -share[1])
            shares += [("others", self.others)] * (self.others != 0)
            named = [name if p is None else f"{name} {p} %" for name, p in shares]
            words = ", ".join(named[:3] + ["..."] * (len(named) > 3))
        elif mid is not None:
            words = f"{mid:g}" + (f" ({low:g} to {high:g})" if None not in (low, high) else "")
        else:
            few = self.kind not in (DATE, MIXED, EMPTY)
            return f"{self.kind}, too few" if few else self.kind
        few_missing = ", few missing" if self.missing is None else ""
        return words + (f", {self.missing} % missing" if self.missing else few_missing)


@dataclass(frozen=True)
class SiloDescriptions:
    """The descriptions of all silos' columns, with alarms where they differ; prints as a table.

    Attributes
    ----------
    silos : tuple of str
        Their names, or numbers where they have none.
    columns : dict of str to tuple
        What each silo tells of a column, a :class:`.ColumnAtSilo`; None where it lacks it.
    """

    silos: tuple[str, ...]
    columns: dict[str, tuple[ColumnAtSilo | None, ...]]

    @property
    def alarms(self) -> tuple[str, ...]:
        """Sentences on what does not go together; empty where all does."""
        found = []
        for name, cells in self.columns.items():
            told = {s: c for s, c in zip(self.silos, cells, strict=True) if c is not None}
            if lack := [s for s in self.silos if s not in told]:
                alone = len(told) < len(lack)
                words = f"{_listed(told)} alone has it" if alone else f"{_listed(lack)} lacks it"
                found.append(f"'{name}': {words}.")
            checks = (_odd_kinds, _odd_values, _odd_units, _odd_levels)
            found += [f"'{name}': {words}" for check in checks for words in check(told)]
        return tuple(found)

    def to_frame(self) -> Any:
        """Return a pandas DataFrame with a row for each column and silo."""
        lines = []
        for column, cells in self.columns.items():
            for silo, cell in zip(self.silos, cells, strict=True):
                line = {"column": column, "silo": silo, **(vars(cell) if cell else {"kind": ""})}
                told = line.pop("quantiles", ())
                lines.append(line | {f"{q:.0%}": v for q, v in zip(QUANTILES, told, strict=False)})
        return optional("pandas").DataFrame(lines).set_index(["column", "silo"])

    def plot(self) -> Figure:
        """Return a figure with a panel for each column: quantiles or shares of levels, by silo."""
        shown = list(self.columns.items())[: display.MOST_PANELS]
        figure, axes = display.panels(len(shown), (2.8, 0.3 * len(self.silos) + 0.9))
        figure.set_figwidth(figure.get_figwidth() + 0.07 * max(map(len, self.silos)))
        for i, (ax, (name, cells)) in enumerate(zip(axes, shown, strict=True)):
            levels = sorted({level for cell in cells if cell for level in cell.levels})
            by_level = _by_level(cells)
            for at, cell in enumerate(cells):
                _draw(ax, at, cell, levels if by_level else ())
            numbers = [q for cell in cells if cell for q in cell.quantiles if q is not None]
            if not by_level and numbers and min(numbers) > 0 and max(numbers) > 50 * min(numbers):
                ax.set_xscale("log")
            labels = self.silos if i % display.COLUMNS == 0 else [""] * len(cells)
            ax.set_yticks(range(len(cells)), labels)
            ax.set(title=name, ylim=(len(cells) - 0.4, -0.6))
            if by_level:
                ax.set(xlim=(0, 100), xlabel="% of rows")
            elif not numbers:
                ax.set_xticks([])
        return figure

    def _table(self) -> tuple[list[str], list[list[str]]]:
        """Return the names of silos with their rows, and a line of cells for each column."""
        head = ["column"]
        for silo, cells in zip(self.silos, zip(*self.columns.values(), strict=True), strict=True):
            most = max((cell.rows or 0 for cell in cells if cell), default=0)
            few = f"fewer than {max((cell.fewest for cell in cells if cell), default=0)}"
            head.append(f"{silo} ({f'about {most:,}' if most else few} rows)")
        lines = []
        for name, cells in self.columns.items():
            by_level = _by_level(cells)
            told = [c.words(by_level=by_level) if c else "not there" for c in cells]
            lines.append([name, *told])
        return head, lines

    def __str__(self) -> str:
        head, lines = self._table()
        widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
        rows = [
            "  ".join(word.ljust(w) for word, w in zip(line, widths, strict=True)).rstrip()
            for line in (head, *lines)
        ]
        return "\n".join(rows + ["", *self.alarms] * bool(self.alarms))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return display.html_table(*self._table()) + "".join(map(display.html_words, self.alarms))


def describe_columns(
    silo: SiloInput, columns: Sequence[str] | None, min_count: float
) -> dict[str, ColumnAtSilo]:
    """Return what a silo tells of its columns, of nothing that fewer than ``min_count`` rows have.

    The threshold is rounded up to 1, 2, 5, 10, 20, 50 and so on: answers for two that differ by one
    would tell the number of rows.
    """
    tens = 10 ** floor(log10(max(min_count, 1)))
    fewest = next(k * tens for k in (1, 2, 5, 10) if k * tens >= min_count)
    return {
        name: _described(column, fewest)
        for name, column in _columns("", silo)
        if columns is None or name in columns or argument_of(name) in columns
    }


def argument_of(name: str) -> str:
    """Return the argument in which a column is, from the column's name."""
    return name.replace("[", ".").partition(".")[0]


def _columns(name: str, value: object) -> Iterator[tuple[str, Any]]:
    """Yield the columns of a silo's data: arrays of one axis, or columns of narwhals."""
    inner: Mapping[Any, Any] = {}
    if is_frame(value):
        inner = columns_of(name or "the data", value)
    elif isinstance(value, Mapping):
        inner = value
    elif (series := as_series(value)) is not None:
        yield name, series
    elif isinstance(value, list | tuple) and any(
        is_frame(part) or isinstance(part, Mapping) or getattr(part, "ndim", 0) for part in value
    ):
        inner = dict(enumerate(value))
    else:
        # What is masked is missing. A list keeps the types of what is in it.
        plain = isinstance(value, list | tuple)
        array: np.ndarray = np.ma.asarray(value, object if plain else None)
        if array.ndim == 1:
            yield name, array
        elif array.ndim:
            inner = dict(enumerate(array.reshape(-1, array.shape[-1]).T))
            yield from ((f"{name}[{i}]", column) for i, column in inner.items())
            return
    for key, part in inner.items():
        yield from _columns(f"{name}.{key}" if name else str(key), part)


def kind_and_values(column: Any) -> tuple[str, Sequence[Any] | np.ndarray]:
    """Return the kind of a column by its types alone, and the values that are there."""
    values = column
    if not isinstance(column, np.ndarray):
        dtype = column.dtype
        plain = dtype.is_numeric() or dtype == narwhals().Boolean
        values = column.drop_nulls().to_numpy() if plain else column.to_list()
        if dtype.is_temporal():
            return DATE, column.drop_nulls().to_list()
    if isinstance(values, np.ndarray):
        if (letter := values.dtype.kind) in "fiub":
            numbers = np.ma.filled(values.astype(float), np.nan)
            kind = {"b": YES_NO, "f": NUMBER}.get(letter, WHOLE)
            return kind, numbers[np.isfinite(numbers)]
        if letter in "Mm":
            return DATE, values[~np.isnat(values)].tolist()
        values = values.tolist()
    # The NA and NaT of pandas cannot be compared.
    empty = "NAType", "NaTType", "NoneType"
    seen = [v for v in values if type(v).__name__ not in empty and (v == v) is not False]
    kinds = {next((kind for kind, of in TYPES if isinstance(v, of)), MIXED) for v in seen}
    if kinds and kinds <= {YES_NO, WHOLE, NUMBER}:
        return next(k for k in (NUMBER, WHOLE, YES_NO) if k in kinds), np.array(seen, float)
    return EMPTY if not kinds else MIXED if len(kinds) > 1 else kinds.pop(), seen


def _described(column: Any, fewest: int) -> ColumnAtSilo:
    """Return what a silo tells of one of its columns."""
    number, (kind, seen) = len(column), kind_and_values(column)
    if number < fewest:
        return ColumnAtSilo(kind, fewest)
    step, there = max(ROWS_STEP, 10 ** (floor(log10(number)) - 1)), len(seen)
    rows = max(step, step * floor(number / step + 0.5))
    missing = _share(number - there, number, fewest)
    if there < fewest:
        return ColumnAtSilo(kind if there else EMPTY, fewest, rows, missing)
    names, codes = list(map(str, seen)) if kind == TEXT else [], list[int]()
    quantiles: list[float | None] = [None] * len(QUANTILES)
    if isinstance(seen, np.ndarray):
        whole, distinct = bool(np.all(seen == np.floor(seen))), np.unique(seen)
        kind = YES_NO if set(distinct.tolist()) <= {0, 1} else WHOLE if whole else NUMBER
        if whole and len(distinct) <= MOST_CODES:
            names = [f"{value:.0f}" for value in seen]
        if kind != YES_NO:
            quantiles = [_quantile(seen, level, fewest) for level in QUANTILES]
            codes = [code for code in CODES if _stands_apart(seen, code, fewest)]
    counts = Counter(names)
    named = [name for name, n in counts.most_common(MOST_LEVELS) if n >= fewest]
    rare = len(names) - sum(counts[name] for name in named)
    return ColumnAtSilo(
        kind,
        fewest,
        rows,
        missing,
        levels={name: _share(counts[name], there, fewest) for name in sorted(named)},
        others=_share(rare, there, fewest),
        quantiles=tuple(quantiles),
        constant=kind != MIXED and len(set(seen)) == 1,
        codes=tuple(codes),
    )


def _share(count: int, number: int, fewest: int) -> int | None:
    """Return a share in percent from which no count can be had; None where it tells of few rows."""
    if count in (0, number):
        return 100 if count else 0
    if min(count, number - count) < fewest:
        return None
    step = next((s for s in STEPS if s * number >= 100 * ROWS_OF_STEP), STEPS[-1])
    return min(max(step * round(100 * count / number / step), step), 100 - step)


def _quantile(seen: np.ndarray, level: float, fewest: int) -> float | None:
    """Return a rounded quantile; None where fewer rows than the threshold are beside it."""
    place = (len(seen) - 1) * level
    if min(ceil(place), len(seen) - 1 - floor(place)) < fewest:
        return None
    return float(f"{np.quantile(seen, level):.1e}") + 0.0  # a zero without a sign


def _stands_apart(seen: np.ndarray, code: int, fewest: int) -> bool:
    """Return whether enough rows have a code, far from all that is no code."""
    rest = seen[~np.isin(seen, CODES)]
    if np.sum(seen == code) < fewest or len(rest) < fewest:
        return False
    low, high = np.quantile(rest, [QUANTILES[0], QUANTILES[-1]])
    return not low - (high - low) / 2 <= code <= high + (high - low) / 2


Told = Mapping[str, ColumnAtSilo]  # the silos that have a column, and what they tell of it
Middle = tuple[float, float, float]  # quartiles, or the median in the place of those not told


def _odd_kinds(told: Told) -> Iterator[str]:
    """Yield what is wrong with the kinds of a column."""
    kinds: dict[str, list[str]] = {}
    for silo, cell in told.items():
        kinds.setdefault(CLASS[cell.kind], []).append(silo)
    if empty := kinds.pop(CLASS[EMPTY], []):
        yield f"no row has a value at {_listed(empty)}."
    if len(kinds) > 1 or CLASS[MIXED] in kinds:
        yield ", ".join(f"{kind} at {_listed(at)}" for kind, at in kinds.items()) + "."


def _odd_values(told: Told) -> Iterator[str]:
    """Yield where a column is constant, has codes for what is missing, or misses far more."""
    constant = [silo for silo, cell in told.items() if cell.constant]
    for silo in constant if len(constant) < len(told) else []:
        # A small silo may have no case of what is rare at others.
        level = next(iter(told[silo].levels), "")
        shares = [c.levels[level] for s, c in told.items() if s != silo and level in c.levels]
        if any(_share_of(share) ** (told[silo].rows or 0) > CHANCE for share in shares):
            constant = [other for other in constant if other != silo]
    if constant:
        yield f"all rows have the same value at {_listed(constant)}."
    for silo, cell in told.items():
        if cell.codes:
            codes = _listed([str(code) for code in cell.codes])
            yield f"{codes} at {silo}, far from all other values: is that a missing value?"
    missing = {s: c.missing for s, c in told.items() if c.missing is not None and c.kind != EMPTY}
    for silo, share in missing.items():
        others = [of_other for s, of_other in missing.items() if s != silo]
        far = all(abs(share - of_other) >= FAR_MISSING for of_other in others)
        # Of two silos the one that misses more is named.
        if far and others and (len(others) > 1 or share > others[0]):
            yield f"{share} % are missing at {silo}, and {np.median(others):.0f} % at others."


def _odd_units(told: Told) -> Iterator[str]:
    """Yield which silos seem to have a column in another unit than most others."""
    known: dict[str, Middle] = {}
    for silo, cell in told.items():
        low, mid, high = cell.quantiles[1:4]
        if mid is not None and not cell.levels:
            known[silo] = mid if low is None else low, mid, mid if high is None else high
    against = {s: [o for o in known if o != s and _unit(q, known[o])] for s, q in known.items()}
    odd = [s for s, others in against.items() if 2 * len(others) > len(known) - 1]
    # Where half of the silos are, as one of two, those with the larger numbers are named.
    if 2 * len(odd) >= len(known) > 0:
        odd = [s for s in odd if known[s][1] >= np.median([mid for _, mid, _ in known.values()])]
    for silo in odd:
        others = [s for s in against[silo] if s not in odd] or against[silo]
        low, mid, high = np.median([known[s] for s in others], axis=0).tolist()
        if unit := _unit(known[silo], (low, mid, high)):
            what, own, other, guess = unit
            yield f"the {what} is {own:g} at {silo} and {other:g} at others: {guess}?"


def _unit(here: Middle, there: Middle) -> tuple[str, float, float, str] | None:
    """Return by what two silos differ as by a unit, at both, and a guess; None if they do not."""
    (low, own, high), (low_, other, high_) = here, there
    apart, (small, large) = low > high_ or high < low_, sorted((own, other))
    what = "median" if apart and own * other > 0 else "width of the middle half"
    if apart and 30 <= small <= 45 and abs(large - 1.8 * small - 32) <= 3:
        return what, own, other, "\u00b0F and \u00b0C"
    if what != "median":
        own, other = high - low, high_ - low_
        # What rounding to two digits leaves of it must be known.
        for width, most in ((own, max(-low, high)), (other, max(-low_, high_))):
            if width <= 0 or width < 4 * 10 ** (floor(log10(most)) - 1):
                return None
    ratio = max(own / other, other / own)
    near = min(UNITS, key=lambda unit: abs(log(ratio / unit)))
    known = abs(log(ratio / near)) < log(NEAR) and (what == "median" or ratio > UNLIKE)
    guess = f"{UNITS[near] if known else 'another unit'} (ratio {ratio:.3g})"
    return (what, own, other, guess) if known or ratio > UNLIKE else None


def _odd_levels(told: Told) -> Iterator[str]:
    """Yield levels that one silo alone has, and those that are spelled in two ways."""
    known = {s: c for s, c in told.items() if c.levels or c.others != 0}
    alike = len({CLASS[c.kind] for c in told.values()} - {CLASS[EMPTY]}) == 1
    alike &= _by_level(list(told.values()))
    spelled: dict[str, dict[str, list[str]]] = {}
    for silo, cell in known.items():
        for name in cell.levels:
            key = " ".join(name.split()).casefold()
            spelled.setdefault(key, {}).setdefault(name, []).append(silo)
    for names in spelled.values():
        if len(names) > 1:
            found = _listed([f"'{name}' ({_listed(at)})" for name, at in names.items()])
            yield f"{found} differ by case or spaces alone."
        ((name, (first, *more)), *_), chances = names.items(), []
        if not alike or len(names) > 1 or more:
            continue
        share = _share_of(known[first].levels[name])
        for cell in (c for s, c in known.items() if s != first):
            number = (cell.rows or 0) * (1 - (cell.missing or 0) / 100)
            rare = cell.fewest - 1 if cell.others is None else cell.others / 100 * number
            at_most = bdtr(min(rare, number), int(number), share)
            chances.append(float(at_most))
        if chances and prod(chances) < CHANCE:
            yield f"{first} alone has the level '{name}'."


def _by_level(cells: Sequence[ColumnAtSilo | None]) -> bool:
    """Return whether a column is shown by its levels: where no silo has quantiles alone."""
    told = [cell for cell in cells if cell]
    alone = any(cell.quantiles[2] is not None and not cell.levels for cell in told)
    return any(cell.levels for cell in told) and not alone


def _share_of(percents: int | None) -> float:
    """Return the share of rows with a level; one that is not told is that of nearly all."""
    return 0.9 if percents is None else percents / 100


def _listed(names: Sequence[str] | Told) -> str:
    """Return names as they are listed in a sentence."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _draw(ax: Axes, at: int, cell: ColumnAtSilo | None, levels: Sequence[str]) -> None:
    """Draw what a silo tells of a column, in its row of a panel."""
    style: dict[str, Any] = dict(va="center", color="0.4", fontsize="small")
    style["transform"] = ax.get_yaxis_transform()
    if cell is None or not (cell.levels if levels else cell.quantiles[2] is not None):
        words = "not there" if cell is None else cell.words(by_level=False)
        ax.text(0.03, at, words if len(words) < 30 else f"{words[:28]}...", **style)
        return
    if cell.missing:
        ax.text(1, at, f" {cell.missing} % missing", **style)
    if not levels:
        for places, width in (((0, 4), 1), ((1, 3), 4), ((2,), 4)):
            ends = [q for place in places if (q := cell.quantiles[place]) is not None]
            marker = "o" if places == (2,) else ""
            ax.plot(ends, [at] * len(ends), marker=marker, color=display.POSTERIOR, lw=width)
        return
    ax.barh(at, 100, height=0.7, color=display.REFERENCE)  # what is not named
    start = 0
    for name, told in cell.levels.items():
        share = 100 - start if told is None else told
        shade = 0.15 + 0.4 * levels.index(name) / max(len(levels) - 1, 1)
        ax.barh(at, share, 0.7, start, color=optional("matplotlib").colormaps["Blues"](shade))
        if share > 4 * len(name):
            ax.text(start + share / 2, at, name, ha="center", va="center", fontsize="x-small")
        start += share
