"""Records of benchmarks are whole, and pages of results draw all of them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))

import record

RESULTS = ROOT / "docs" / "results"
PAGES = [*sorted(RESULTS.glob("*.md")), ROOT / "docs" / "instead.md"]
DRAWN = re.compile(r"^```\{measured\} (.*)$", re.MULTILINE)


@pytest.mark.parametrize("page", [p for p in PAGES if p.stem != "index"], ids=lambda p: p.stem)
def test_a_page_draws_each_of_its_records_once(page):
    drawn = [words.split() for words in DRAWN.findall(page.read_text())]
    assert {words[0] for words in drawn} == {page.stem}
    names = [found["name"] for found in record.read(page.stem)]
    assert sorted(name for words in drawn for name in words[1:]) == sorted(names)


def test_each_file_has_a_page_and_is_small():
    files = sorted(record.RESULTS.glob("*.json"))
    assert {f.stem for f in files} == {p.stem for p in PAGES} - {"index"}
    assert max(f.stat().st_size for f in files) < 100_000


def test_the_first_table_has_some_ten_lines():
    pages = next(iter(DRAWN.findall((RESULTS / "index.md").read_text()))).split()[1:]
    rows = [row for page in pages for found in record.read(page) for row in found["rows"]]
    assert 8 <= sum("also" in row for row in rows) <= 12


def test_a_record_says_how_it_was_measured(tmp_path, monkeypatch):
    argv = ["benchmarks/scale.py", "--silos", "20", "--json", "out.json", "--quick"]
    monkeypatch.setattr(sys, "argv", argv)
    rows = [record.table_row("memory", 1.5, target=2, unit="GiB")]
    record.write(tmp_path / "out.json", rows, details={"peak": 1.5})
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["command"] == "python benchmarks/scale.py --silos 20 --quick"
    assert set(record.FIELDS) == set(found)
    assert {"python", "jax", "numpyro", "numpyro_fed"} == set(found["versions"])
    assert " cores of " in found["machine"]


def test_what_lacks_a_field_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="no target"):
        record.write(tmp_path / "out.json", [{"what": 1, "ours": 2, "reference": 3}], details=0)
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    with pytest.raises(ValueError, match="there is no file"):
        record.read("nothing")
    (tmp_path / "page.json").write_text(json.dumps([{"name": "a", "title": "b", "rows": []}]))
    with pytest.raises(ValueError, match=r"has no command.*has no rows"):
        record.read("page")
