"""Text and tables of results as HTML, for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def words(text: str) -> str:
    """Return text as a paragraph of HTML; text of several lines keeps its lines.

    Examples
    --------
    >>> from numpyro_fed.html import words
    >>> words("k-hat < 0.7")
    '<p>k-hat &lt; 0.7</p>'
    """
    tag = "pre" if "\n" in text else "p"
    return f"<{tag}>{escape(text)}</{tag}>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of HTML from the names of its columns and the cells of its rows.

    Examples
    --------
    >>> from numpyro_fed.html import table
    >>> table(["site", "sd ratio"], [["mu", "0.98"]])
    '<table><tr><th>site</th><th>sd ratio</th></tr><tr><td>mu</td><td>0.98</td></tr></table>'
    """
    lines = [("th", head), *(("td", row) for row in rows)]
    cells = ("".join(f"<{tag}>{escape(c)}</{tag}>" for c in line) for tag, line in lines)
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in cells)}</table>"
