"""The columns that a formula's terms have, as expressions of the text or as matrices.

The library formulae reads terms and decides how categorical columns are coded. It does so on a
made-up table with the agreed levels, means and sds, so that all silos have the same columns, in the
same units and of the same splines, whatever levels a silo lacks. Where a term is a product of
columns, levels, ``log``, ``exp``, ``sqrt`` and ``I()``, the text computes it: arguments can then be
changed. Others (``bs``, ``poly``, ``center``) the library computes at each silo.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtri

from numpyro_fed.basics.errors import ModelError, optional
from numpyro_fed.data.tables import Levels
from numpyro_fed.formulas.grammar import Grammar, at_top, names_in

PROTOTYPES = 400  # rows of the made-up table
EXTRA = "formula"
# Functions in a formula that the text computes.
FUNCTIONS = {"log": "jnp.log", "exp": "jnp.exp", "sqrt": "jnp.sqrt", "I": ""}


@dataclass(frozen=True)
class Agreed:
    """The levels of categorical columns that silos agree on, and mean and sd of the others.

    ``categories`` is the number of those of an ordinal outcome, which count from ``first`` on.
    ``nested`` has pairs of groups within a silo, by their columns: each member of the first belongs
    to one of the second, though the formula does not say so.
    """

    levels: Levels | None
    mean: Mapping[str, float]
    sd: Mapping[str, float]
    categories: int = 0
    first: int = 0
    nested: frozenset[tuple[tuple[str, ...], tuple[str, ...]]] = frozenset()

    @property
    def names(self) -> Mapping[str, tuple[str, ...]]:
        """Return the names of levels by column."""
        return {} if self.levels is None else self.levels.names


@dataclass(frozen=True)
class ColumnBlock:
    """ColumnBlock of a design matrix: an expression of the text, and for each a label.

    ``width`` are their sds, one for a level's column, and ``centre`` their means, zero for that of
    levels. ``computed`` is the term that the library computes at each silo, if the text does not.
    """

    expression: str
    labels: tuple[str, ...]
    centre: np.ndarray
    width: np.ndarray
    computed: str = ""

    @property
    def is_vector(self) -> bool:
        """Return whether the expression is one number for each row, and no matrix."""
        return len(self.labels) == 1


@dataclass(frozen=True)
class ReadTerms:
    """The columns of an expression, whether it has an intercept, and its offsets."""

    columns: tuple[ColumnBlock, ...]
    intercept: bool
    offsets: tuple[ColumnBlock, ...]

    @property
    def labels(self) -> list[str]:
        """Return the names of all columns."""
        return [label for c in self.columns for label in c.labels]


@dataclass(frozen=True)
class Design:
    """The design of a formula, given what silos have agreed on."""

    grammar: Grammar
    agreed: Agreed

    @cached_property
    def common(self) -> ReadTerms:
        """Return the terms that all rows share."""
        return self.terms_of(self.grammar.common)

    @property
    def all_columns(self) -> Iterator[ColumnBlock]:
        """Return the columns of all parts of the formula."""
        for expression in expressions(self.grammar):
            terms = self.terms_of(expression)
            yield from (*terms.columns, *terms.offsets)

    def terms_of(self, expression: str) -> ReadTerms:
        """Return the terms of an expression."""
        common = self._matrix(expression)
        columns, offsets, intercept = list[ColumnBlock](), list[ColumnBlock](), False
        for name, term in (common.terms if common is not None else {}).items():
            if term.kind == "intercept":
                intercept = True
            elif term.kind == "offset":
                values = np.asarray(common)[:, common.slices[name]].astype(float)
                inner, centre = in_text(name[len("offset(") : -1]), np.array([np.nanmean(values)])
                found = ColumnBlock(inner or _identifier(name), (name,), centre, np.ones(1))
                same = bool(inner) and self._computes(found, values)
                offsets.append(found if same else replace(found, computed=name))
            elif term.labels:  # a column of one level has none
                values = np.asarray(common)[:, common.slices[name]].astype(float)
                found = _columns(name, term, values)
                if not found.computed and not self._computes(found, values):
                    found = replace(found, expression=_identifier(name), computed=name)
                columns.append(found)
        return ReadTerms(tuple(columns), intercept, tuple(offsets))

    def _computes(self, columns: ColumnBlock, values: np.ndarray) -> bool:
        """Return whether the text's expression has the library's values on the made-up table."""
        table = self.prototype
        names: dict[str, Any] = {"jax": jax, "jnp": jnp}
        for column in table:
            is_coded = column in self.agreed.names
            own = table[column].cat.codes if is_coded else table[column]
            names[column] = jnp.asarray(np.asarray(own))
        with np.errstate(all="ignore"):
            found = np.asarray(eval(columns.expression, names), float)
        spread = np.nanstd(values, 0) + 1e-3 * np.abs(np.nanmean(values, 0)) + 1e-12
        wrong = np.abs(found.reshape(len(values), -1) - values.reshape(len(values), -1)) / spread
        known = np.isfinite(values).reshape(wrong.shape)
        return bool((wrong < 1e-3)[known].all())

    def evaluated(self, frame: Any, codes: Any, columns: ColumnBlock) -> np.ndarray:
        """Return columns (rows, k), or one (rows,), that the library computes for a table.

        ``codes`` has the codes of its categories.
        """
        known, of_codes = self.agreed.names, optional("pandas", EXTRA).Categorical.from_codes
        coded = {c: of_codes(np.asarray(codes[c]), list(known[c]), ordered=True) for c in known}
        for expression in expressions(self.grammar):
            common = self._matrix(expression)
            if common is not None and columns.computed in common.terms:
                matrix = np.asarray(common.evaluate_new_data(frame.assign(**coded)))
                part = matrix[:, common.slices[columns.computed]].astype(float)
                return part.reshape(len(part)) if columns.is_vector else part
        raise ModelError(f"the term '{columns.computed}' is none of the formula.")

    def _matrix(self, expression: str) -> Any:
        """Return the library's matrix of an expression on the made-up table."""
        functions = {"log": np.log, "exp": np.exp, "sqrt": np.sqrt}
        library = optional("formulae", EXTRA)
        table = self.prototype
        try:
            with np.errstate(all="ignore"):
                return library.design_matrices(expression, table, extra_namespace=functions).common
        except Exception as error:
            of_levels = sorted(names_in([expression]) & {*self.agreed.names})
            hint = f" Numbers are none of {of_levels}, which have levels." if of_levels else ""
            raise ModelError(
                f"formulae does not read {expression!r}: {type(error).__name__}: {error}.{hint}"
            ) from error

    @cached_property
    def prototype(self) -> Any:
        """Return a made-up table with the agreed levels, means and sds."""
        pandas, random = optional("pandas", EXTRA), np.random.default_rng(0)
        known, table = self.agreed.names, dict[str, Any]()
        n = max([PROTOTYPES, *(4 * len(names) for names in known.values())])
        normal = np.asarray(ndtri((np.arange(n) + 0.5) / n), float)
        for column in columns_read(self.grammar):
            if column in known:
                names = list(known[column])
                shuffled = random.permutation(np.resize(np.array(names, object), n))
                table[column] = pandas.Categorical(shuffled, names, ordered=True)
            elif column in self.agreed.mean:
                mean, sd = self.agreed.mean[column], self.agreed.sd[column] or 1.0
                values = random.permutation(normal)
                table[column] = mean + sd * values
                if mean > 0 and self.is_positive(column):
                    spread = np.sqrt(np.log1p((sd / mean) ** 2))
                    table[column] = mean * np.exp(spread * values - spread**2 / 2)
        return pandas.DataFrame(table, index=range(n))

    def is_positive(self, column: str) -> bool:
        """Return whether the formula has the logarithm or the root of a column."""
        pattern = rf"\b(log|sqrt)\([^)]*\b{column}\b"
        return any(re.search(pattern, text) for text in expressions(self.grammar))


def expressions(grammar: Grammar) -> list[str]:
    """Return the expressions of a formula that the library reads."""
    return [grammar.common, *(group.expression for group in grammar.groups)]


def columns_read(grammar: Grammar) -> list[str]:
    """Return the columns that the terms of a formula read, without response and groups."""
    words = names_in(expressions(grammar)) | {s.column for s in grammar.smooths}
    return sorted(words | set(grammar.additions.values()))


def terms_read(grammar: Grammar) -> list[str]:
    """Return the columns of terms that have a coefficient: of no offset, no sum, no weight."""
    terms = [
        t for one in expressions(grammar) for t in at_top(one, "+") if not t.startswith("offset")
    ]
    return sorted(names_in(terms) | {s.column for s in grammar.smooths})


def in_text(expression: str) -> str:
    """Return an expression of a formula as one of the text; empty if the library computes it."""
    if expression.isidentifier():
        return expression
    found = re.fullmatch(r"(\w+)\(([\w\s.+\-*/]*)\)", expression)
    if found is None or found[1] not in FUNCTIONS:
        return ""
    return f"{FUNCTIONS[found[1]]}({found[2].strip()})"


def _columns(name: str, term: Any, values: np.ndarray) -> ColumnBlock:
    """Return the columns of a term of the library, which has these values on the made-up table."""
    of_levels = [part.kind == "categoric" for part in term.components]
    values = values.reshape(len(values), -1)
    # Beside levels the sd is that of the numbers where the level is; of levels alone it is one.
    own = np.where(values == 0, np.nan, values) if any(of_levels) else values
    with np.errstate(invalid="ignore"):
        width = np.ones(values.shape[1]) if all(of_levels) else np.nanstd(own, 0)
        centre = np.zeros(values.shape[1]) if any(of_levels) else np.nanmean(values, 0)
    width = np.where(width > 0, width, 1.0)
    centre = np.where(np.abs(centre) > 1e-9 * width, centre, 0.0)
    pieces = list[list[tuple[str, str]]]()
    for part in term.components:
        if part.kind == "categoric":
            levels = [str(level) for level in part.levels]
            told = levels if part.spans_intercept else levels[1:]
            codes = [f"({part.name} == {levels.index(level)})" for level in told]
            labels = [f"{part.name}[{level}]" for level in told]
            pieces.append(list(zip(labels, codes, strict=True)))
        elif text := in_text(part.name):
            pieces.append([(part.name, text)])
        else:
            return ColumnBlock(_identifier(name), tuple(term.labels), centre, width, name)
    each = list(product(*pieces))
    labels = [":".join(label for label, _ in one) for one in each]
    if labels != list(term.labels):
        raise ModelError(f"the columns of '{name}' are not known: {list(term.labels)}.")
    found = ColumnBlock("", tuple(labels), centre, width)
    wide = [i for i, piece in enumerate(pieces) if len(piece) > 1]
    if len(wide) == 1:  # as a block, which is short
        part = term.components[wide[0]]
        block = f"jax.nn.one_hot({part.name}, {len(part.levels)})"
        block += "" if part.spans_intercept else "[:, 1:]"
        factors = [piece[0][1] for i, piece in enumerate(pieces) if i != wide[0]]
        joined = factors[0] if len(factors) == 1 else f"({' * '.join(factors)})"
        times = f" * {joined}[:, None]" if factors else ""
        return replace(found, expression=block + times)
    texts = [" * ".join(text for _, text in one) for one in each]
    texts = [f"1.0 * {text}" if "==" in text else text for text in texts]
    joined = texts[0] if len(texts) == 1 else f"jnp.stack([{', '.join(texts)}], -1)"
    return replace(found, expression=joined)


def _identifier(name: str) -> str:
    return re.sub(r"\W+", "_", name).strip("_")
