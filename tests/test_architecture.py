"""Imports point down only, and the package is light to import."""

import ast
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

from conftest import SLOW_EXAMPLES
from laid_open import PLACES

import numpyro_fed

ROOT = Path(numpyro_fed.__file__).parent

# From the bottom up. A module may import what stands below it, and its neighbours of one row as
# long as these do not go round in a circle. What is not named here is the front door: it may
# import everything, and only the front door may import it.
LAYERS = [
    {"basics"},
    {"data", "numerics", "privacy"},
    {"text"},
    {"guides", "local"},
    {"rounds"},
    {"search", "testing", "sigma"},
    # The algorithms: what silos and server compute.
    {"weigh", "sfvi", "pvi", "vertical", "dp_newton", "bayes_admm", "fedlap"},
    {"after"},
    {"posterior", "pvi.result", "vertical.result", "vertical.correction"},
    {"reference"},
]
# What users call stands in its method's folder, above all rows.
METHODS = {
    *("sfvi.method", "pvi.method", "pvi.recipes", "vertical.method", "vertical.vfl"),
    *("vertical.soul", "dp_newton.method", "bayes_admm.method", "fedlap.method"),
}
FRONT_DOOR = len(LAYERS)


def modules():
    """``{name: file}`` with the package's own name left out; packages without ``__init__``."""
    files = {f: f.relative_to(ROOT).with_suffix("").parts for f in ROOT.rglob("*.py")}
    return {
        ".".join(p for p in parts if p != "__init__") or "__init__": file
        for file, parts in files.items()
    }


MODULES = modules()


def layer(module):
    """The row of a module: its own, or that of the package that it is in."""
    if module in METHODS:
        return FRONT_DOOR
    for i, row in enumerate(LAYERS):
        if module in row:
            return i
    package = module.rpartition(".")[0]
    return layer(package) if package else FRONT_DOOR


# A result's correction stands above the result, which asks for it only when it is asked.
ASKED_LATE = {"posterior.result", "posterior.corrected"}


def imports(module):
    """The package's modules that a module imports, wherever in its text."""
    found, tree = set(), ast.parse(MODULES[module].read_text())
    nodes = tree.body if module in ASKED_LATE else list(ast.walk(tree))
    if module in ASKED_LATE:
        late = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n not in tree.body]
        assert {n.module for n in late} == {"numpyro_fed.posterior.importance"}
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {inside(a.name) for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: imports are absolute here"
            for alias in node.names:
                name = inside(f"{node.module}.{alias.name}")
                found.add(name if name in MODULES else inside(str(node.module)))
    return {n for n in found if n in MODULES and n != module}


def inside(name):
    """A module's name within the package; nothing for what is elsewhere."""
    if name == "numpyro_fed":
        return "__init__"
    return name.removeprefix("numpyro_fed.") if name.startswith("numpyro_fed.") else ""


GRAPH = {module: imports(module) for module in MODULES}


def test_the_layers_are_there():
    rooms = {m.split(".")[0] for m in MODULES}
    assert {name.split(".")[0] for row in LAYERS for name in row} <= rooms
    assert {"rounds.exchange", "sfvi.algorithm", "rounds.silos", "sfvi.method"} <= set(MODULES)
    assert layer("basics.errors") < layer("guides.global_guides") < layer("sfvi.algorithm")
    assert layer("sfvi.algorithm") < layer("posterior.posterior") < layer("sfvi.method")
    assert layer("sfvi.method") == layer("__init__") == FRONT_DOOR
    assert "text.traces" in GRAPH["text.split"]
    assert "basics.errors" in GRAPH["data.silo_data"]


def test_imports_point_down():
    up = {(m, n) for m, needed in GRAPH.items() for n in needed if layer(n) > layer(m)}
    assert not up, "(module, what it imports from above it)"


def reached_from(module):
    """All modules that a module imports, and that these import, and so on."""
    reached, new = set(), GRAPH[module]
    while new:
        reached |= new
        new = {m for n in new for m in GRAPH[n]} - reached
    return reached


def test_no_module_imports_itself_in_a_circle():
    assert [m for m in MODULES if m in reached_from(m)] == []


def test_rounds_know_no_algorithm_and_no_model():
    # The shared parts of states have types of the text and of a guide.
    types = {"guides.global_guides", "numerics.gaussian", "text.site_table"}
    data = {"data.silo_data", "data.padding"}
    for module in (m for m in MODULES if m.startswith("rounds.")):
        others = {m for m in GRAPH[module] if not m.startswith(("rounds.", "basics.", "privacy."))}
        assert others <= data | (types if module == "rounds.states" else set()), module


def test_nothing_needs_an_engine():
    """What is between hospitals stands on all the rest, and nothing stands on it."""
    users = {m for m, needed in GRAPH.items() if any(n.startswith("network") for n in needed)}
    assert all(m.startswith("network") for m in users - {"__init__"})


def test_algorithms_know_no_loop():
    """What they know of rounds is what an exchange is, and when a run has come to rest."""
    known = {"exchange", "states", "stacks", "names", "convergence", "keys"}
    for module in (m for m in MODULES if layer("search") <= layer(m) <= layer("sfvi")):
        rounds = {m.removeprefix("rounds.") for m in GRAPH[module] if m.startswith("rounds.")}
        assert rounds <= known or module == "search.run_search", module


def test_importing_the_package_needs_no_extra():
    extras = ["arviz", "matplotlib", "sklearn", "hypothesis", "equinox", "narwhals", "pandas"]
    extras += ["cryptography", "dp_accounting", "ott"]  # OTT takes seconds to import
    script = f"import sys, numpyro_fed; print(sorted(set({extras}) & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


# Of single matrices at the server, and in no program that runs for many of them.
ALONE = {("numerics.barycenters", "qr"), ("sigma.true_prior", "pinv")}


def test_stacks_of_matrices_are_for_linalg():
    """jaxlib's own kernels for them can stop a program for ever: see ``numerics/linalg.py``."""
    found, others = set(), []
    for module in set(MODULES) - {"numerics.linalg"}:
        text = MODULES[module].read_text()
        found |= {(module, name) for name in re.findall(r"\bjnp\.linalg\.(\w+)", text)}
        others += re.findall(r"jax\.scipy\.linalg|jax\.lax\.linalg|util import .*cholesky_of", text)
    assert {(module, name) for module, name in found if name != "norm"} <= ALONE
    assert not others


def test_slow_examples_are_there():
    for name in SLOW_EXAMPLES:
        module = max((m for m in MODULES if name.startswith(f"{m}.")), key=len)
        for part in name.removeprefix(f"{module}.").split("."):
            assert re.search(rf"(def|class) {part}\b", MODULES[module].read_text()), name


def test_places_that_slow_tests_replace_are_there():
    for place in PLACES.values():
        owner, name = place.rsplit(".", 1)
        assert hasattr(pkgutil.resolve_name(owner), name), place
