"""A directive that draws what was measured: tables from the files of ``benchmarks/results``.

``{measured} few_messages`` draws a table for each record of ``few_messages.json``, and below it
where its numbers are from. Names of records after the page's draw these alone. ``{measured} index``
and the names of pages draw one table of their rows that have a line for it. A missing file, record,
or field of a row ends the build.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from record import CELLS, RESULTS, read


def text_of(value: object) -> str:
    """Return a cell as Markdown."""
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return text.replace("|", r"\|")


def table(heads: tuple[str, ...], lines: list[list[object]]) -> str:
    """Return a table as Markdown."""
    rows = [
        list(heads),
        ["---"] * len(heads),
        *([text_of(cell) for cell in line] for line in lines),
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def cells(row: dict[str, Any]) -> list[object]:
    """Return the cells of a row, numbers with their unit."""
    unit = f" {row['unit']}" if "unit" in row else ""
    return [text_of(row[name]) + unit * (name != "what" and row[name] != "") for name in CELLS]


def source(record: dict[str, Any], link: str) -> str:
    """Return in a line where the numbers of a record are from."""
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    where = f"{record['date']}; {record['machine']}; {versions or 'versions not noted'}"
    return f"{{.measured}}\n`{record['command']}`. {where}. {link}"


class Measured(SphinxDirective):
    """The tables of a page's records, or of all results."""

    required_arguments = 1
    optional_arguments = 40
    option_spec: ClassVar[dict[str, Any]] = {}

    def run(self) -> list[nodes.Node]:
        page, *names = self.arguments
        try:
            found = self.index(names) if page == "index" else self.page(page, names)
        except (ValueError, KeyError, json.JSONDecodeError) as error:
            raise ExtensionError(f"{self.env.docname}: {error}") from error
        return self.parse_text_to_nodes(found)

    def page(self, page: str, names: list[str]) -> str:
        """Return the tables of some records of a page as Markdown."""
        self.env.note_dependency(str(RESULTS / f"{page}.json"))
        records = {record["name"]: record for record in read(page)}
        if unknown := set(names) - set(records):
            raise ValueError(f"{page}.json has no {sorted(unknown)}: it has {sorted(records)}.")
        link = f"{{download}}`All numbers </../benchmarks/results/{page}.json>`."
        parts = []
        for record in (records[name] for name in names or records):
            lines = [cells(row) for row in record["rows"]]
            heads = tuple(record.get("heads", CELLS))
            parts += [f"**{record['title']}**", table(heads, lines), source(record, link)]
        return "\n\n".join(parts)

    def index(self, pages: list[str]) -> str:
        """Return the table of what a reader asks for first, with where each number is from."""
        lines = []
        for page in pages:
            self.env.note_dependency(str(RESULTS / f"{page}.json"))
            for record in read(page):
                jax = record["versions"].get("jax", "not noted")
                where = f"{record['date']}; {record['machine']}; jax {jax}"
                for row in (row for row in record["rows"] if "also" in row):
                    what = f"[{row['also']}]({page}.md)"
                    lines.append([what, *cells(row)[1:], where])
        return table((*CELLS, "measured"), lines)


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the directive."""
    app.add_directive("measured", Measured)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
