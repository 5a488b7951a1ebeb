"""The README and the pages of the documentation do what they say.

Code cells of pages run when the site is built; blocks of plain ``python`` run here, page by page.
"""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^ *```python\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
SAYS = {"README.md": ["can be trusted"], "docs/choosing.md": ["Pareto k-hat", "Wasserstein"]}


def pages():
    """The README and all pages, by their names from the root."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")]
    return {
        str(page.relative_to(ROOT)): page.read_text()
        for page in sorted(found)
        if "_build" not in page.parts
    }


PAGES = pages()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, text in PAGES.items() if BLOCK.search(text)])
def test_code_of_a_page_runs(name, tmp_path):
    code = "\n".join(BLOCK.findall(PAGES[name]))
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"MPLBACKEND": "agg"},
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    for words in SAYS.get(name, []):
        assert words in done.stdout


@pytest.mark.parametrize("name", PAGES)
def test_no_code_of_a_page_escapes(name):
    """Python that is run neither by the build nor here would have another name."""
    languages = set(re.findall(r"^ *(?:```+|~~~+|:::+)\s*(\w+)", PAGES[name], re.MULTILINE))
    assert not languages & {"py", "python3", "pycon", "ipython", "ipython3"}


@pytest.mark.parametrize("name", PAGES)
def test_links_between_files_lead_somewhere(name):
    folder = (ROOT / name).parent
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", PAGES[name])
    images = re.findall(r"^```+\{(?:figure|image)\} (\S+)", PAGES[name], re.MULTILINE)
    files = [link for link in (*links, *images) if "://" not in link]
    assert [link for link in files if not (folder / link).exists()] == []


def test_the_map_has_every_folder_and_module():
    text, package = PAGES["docs/how_it_works.md"], ROOT / "numpyro_fed"
    modules = {p.name for p in package.glob("*.py")} - {"__init__.py"}
    folders = {f"{p.parent.name}/" for p in package.glob("*/__init__.py")}
    assert {name for name in modules | folders if f"`{name}`" not in text} == set()


def test_the_readme_is_short():
    prose = re.sub(r"```.*?```", "", PAGES["README.md"], flags=re.DOTALL)
    assert len(re.findall(r"\w+", prose)) <= 1_000


def test_the_glossary_is_short():
    body = PAGES["docs/glossary.md"].split("```{glossary}\n")[1].split("```")[0]
    assert len(re.findall(r"^\S", body, re.MULTILINE)) <= 40


def test_locked_versions_are_within_the_bounds():
    """And each package that the project names is locked."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locked = dict(re.findall(r"^([\w-]+)==([^ ;\\]+)", (ROOT / "locked.txt").read_text(), re.M))
    extras = project["optional-dependencies"]
    for line in [*project["dependencies"], *extras["frames"], *extras["privacy"]]:
        needed = Requirement(line)
        assert needed.specifier.contains(locked[needed.name]), needed
