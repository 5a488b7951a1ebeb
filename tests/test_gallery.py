"""The models of the gallery: each has a page and a picture, and is that of NUTS."""

import ast
import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import numpyro_fed as nf

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))

import gallery  # noqa: E402

MODELS = [pytest.param(name, id=name) for name in gallery.NAMES]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_a_page_and_a_picture(name):
    text = (gallery.MODELS / f"{name}.py").read_text()
    functions = [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    assert functions[0] == "model" or "model" in functions[:3]
    assert len(text.splitlines()) <= 120
    page = (ROOT / "docs" / "models" / f"{name}.md").read_text()
    assert f"{{literalinclude}} ../../examples/models/{name}.py" in page
    assert f"{{figure}} {name}.png" in page
    assert (ROOT / "docs" / "models" / f"{name}.png").stat().st_size < 80_000
    assert f"\n{name}\n" in (ROOT / "docs" / "models" / "index.md").read_text()


@pytest.mark.parametrize("name", MODELS)
def test_the_reference_of_a_model_is_of_its_script(name):
    kept = json.loads(gallery.REFERENCES.read_text())[name]
    remedy = f"run benchmarks/gallery.py --references --only {name}"
    assert kept["script"] == gallery.digest(name), remedy
    assert min(effective for _, _, effective in kept["elements"].values()) > 300


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_that_of_nuts(name):
    """Its moments were kept by ``benchmarks/gallery.py --references``."""
    module = gallery.load(name)
    fitted = nf.fit(jax.random.key(0), module.model, module.simulate(), progress_bar=False)
    assert fitted.trusted
    moments = json.loads(gallery.REFERENCES.read_text())[name]
    for error, ratio, effective in gallery.distances(fitted, moments):
        assert error < 0.1 + 2 / np.sqrt(effective)
        assert abs(np.log(ratio)) < 0.1 + 2 / np.sqrt(effective)
