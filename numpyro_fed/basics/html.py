"""Text and tables of results as HTML, for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def words(text: str) -> str:
    """Return text as a paragraph of HTML; text of several lines keeps its lines."""
    tag = "pre" if "\n" in text else "p"
    return f"<{tag}>{escape(text)}</{tag}>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of HTML from the names of its columns and the cells of its rows."""
    lines = [("th", head), *(("td", row) for row in rows)]
    cells = ("".join(f"<{tag}>{escape(c)}</{tag}>" for c in line) for tag, line in lines)
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in cells)}</table>"
