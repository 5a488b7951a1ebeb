"""A formula's parts: response, common terms, effects of groups, smooth terms.

Common terms are read by the library formulae. What it does not know is taken apart here: brms'
words beside the response (``y | trials(n)``), the bars of group effects with ``||``, and ``s(x)``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from numpyro_fed.basics.errors import ModelError

SILO = "silo"  # the group of a formula that is the silo itself
ADDITIONS = "trials", "cens", "weights"
# C(x), or with a level: C(x, Treatment('a')), C(x, Treatment(reference='a')), C(x, reference='a').
CATEGORY = re.compile(
    r"""\bC\(\s*(\w+)\s*(?:,\s*(?:Treatment\(\s*)?(?:ref(?:erence)?\s*=\s*)?"""
    r"""['"]?([^'"()]+?)['"]?\s*\)?\s*)?\)"""
)


@dataclass(frozen=True)
class GroupEffect:
    """The effects of a group, ``(expression | factors)``; ``correlated`` but for ``||``."""

    expression: str
    factors: tuple[str, ...]
    correlated: bool = True
    number: int = 1  # of those of this group, from 1 on

    @property
    def group(self) -> str:
        """Return the name of the group in the text, whose members these effects are of."""
        return "_".join(self.factors)

    @property
    def name(self) -> str:
        """Return the name of the effects in the text."""
        return "_".join([*self.factors, *[str(self.number)] * (self.number > 1)])


@dataclass(frozen=True)
class Smooth:
    """A smooth function of a column, ``s(x, k=10)``: by so many functions beside its line."""

    column: str
    size: int = 10


@dataclass(frozen=True)
class Grammar:
    """The parts of a formula."""

    response: str
    common: str
    additions: dict[str, str] = field(default_factory=dict)
    groups: tuple[GroupEffect, ...] = ()
    smooths: tuple[Smooth, ...] = ()
    factors: tuple[str, ...] = ()  # columns of C(...), whatever their type
    references: dict[str, str] = field(default_factory=dict)  # their first levels, of C_x


def parse(formula: str) -> Grammar:
    """Return the parts of a formula; raise an error for one that has none or other ones."""
    left, *rest = formula.split("~")
    if len(rest) != 1 or not left.strip() or not rest[0].strip():
        raise ModelError(f"{formula!r} is no formula such as 'y ~ x + (1 | silo)'.")
    response, *words = at_top(left, "|")
    additions = dict(_addition(word, formula) for word in at_top("+".join(words), "+") if word)
    if not response.isidentifier():
        raise ModelError(
            f"the response {response!r} of {formula!r} is no column. Compute it in the table "
            "before (log_y, say)."
        )
    common, groups, smooths = list[str](), list[GroupEffect](), list[Smooth]()
    categories = CATEGORY.findall(rest[0])
    right = CATEGORY.sub(r"C_\1", rest[0])
    references = {f"C_{column}": level for column, level in categories if level}
    if found := re.search(r"\b(C|ns)\([^+]*[^+ ]", right):
        known = {
            "C": "C(x) and C(x, Treatment('a')) are",
            "ns": "of splines bs(x, df=5) and s(x) are",
        }
        raise ModelError(f"{found[0]!r} is not known: {known[found[1]]}.")
    for term in at_top(right, "+"):
        inner = term[1:-1] if _is_enclosed(term) else ""
        if "|" in inner:
            for effect in _group_effects(inner):
                before = sum(g.factors == effect.factors for g in groups)
                groups.append(replace(effect, number=1 + before))
        elif found := re.fullmatch(r"s\(\s*(\w+)\s*(?:,\s*k\s*=\s*(\d+)\s*)?\)", term):
            smooths.append(Smooth(found[1], int(found[2] or 10)))
            common.append(found[1])
        elif re.match(r"(s|t2|te|gp|mo|mi|me)\(", term):
            raise ModelError(
                f"the term {term!r} is not known: of smooth terms s(x) and s(x, k=10) are, of one "
                "column. Others are written in the text: print(formula.text) and change it."
            )
        else:
            common.append(term)
    words_of_common = " + ".join(common) or "1"
    factors = tuple(dict.fromkeys(column for column, _ in categories))
    parts = response, words_of_common, additions, tuple(groups), tuple(smooths)
    return Grammar(*parts, factors, references)


def _addition(word: str, formula: str) -> tuple[str, str]:
    found = re.fullmatch(r"(\w+)\(\s*(\w+)\s*\)", word)
    if found is None or found[1] not in ADDITIONS:
        raise ModelError(
            f"{word!r} beside the response of {formula!r} is not known: {list(ADDITIONS)} are, as "
            "in 'y | trials(n) ~ x'."
        )
    return found[1], found[2]


def _group_effects(inner: str) -> list[GroupEffect]:
    """Return the effects of ``expression | group``; of nested groups ``a/b`` those of a and a:b."""
    bars = "||" if "||" in inner else "|"
    expression, *groups = at_top(inner, bars)
    if len(groups) != 1:
        raise ModelError(f"the group effect ({inner}) has more than one bar.")
    nested = [part.strip() for part in groups[0].split("/")]
    found = []
    for depth in range(1, len(nested) + 1):
        factors = tuple(f.strip() for part in nested[:depth] for f in part.split(":"))
        if bad := [f for f in factors if not f.isidentifier()]:
            raise ModelError(f"the group {bad[0]!r} of ({inner}) is no column.")
        found.append(GroupEffect(expression.strip(), factors, bars == "|"))
    return found


def _is_enclosed(term: str) -> bool:
    """Return whether a term is one pair of parentheses with all in it."""
    return term.startswith("(") and len(at_top(term, ")", opening=False)) == 2


def at_top(text: str, mark: str, *, opening: bool = True) -> list[str]:
    """Return the parts of a text between marks that stand in no parentheses."""
    parts, depth, start, i = list[str](), 0, 0, 0
    while i < len(text):
        depth += (text[i] in "([") - (text[i] in ")]")
        if text.startswith(mark, i) and depth == 0:
            parts.append(text[start:i].strip())
            start = i + len(mark)
            i = start
            continue
        i += 1
    return [*parts, text[start:].strip()]


def names_in(expressions: Sequence[str]) -> set[str]:
    """Return the names that expressions read: not those of functions and their arguments."""
    pattern = r"(?<![\w.])([A-Za-z_]\w*)(?!\w)(?!\s*[(.])(?!\s*=[^=])"
    return {word for one in expressions for word in re.findall(pattern, one)}
