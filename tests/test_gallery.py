"""The models of the gallery: each has a page and a picture, and is that of NUTS."""

import ast
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


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_that_of_nuts(name):
    module = gallery.load(name)
    silos = module.simulate()
    fitted = nf.fit(jax.random.key(0), module.model, silos, progress_bar=False)
    assert fitted.trusted
    nuts = nf.run_nuts(
        *(jax.random.key(1), module.model, silos),
        **dict(start=fitted.mode, num_samples=1_500, num_chains=2, progress_bar=False),
    )
    for error, ratio, effective in gallery.elements(fitted, nuts):
        assert error < 0.1 + 3 / np.sqrt(effective)
        assert abs(np.log(ratio)) < 0.1 + 3 / np.sqrt(effective)
