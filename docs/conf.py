"""Settings of the documentation: ``python -m sphinx -W -b html docs docs/_build/html``."""

import os
import re
import sys
from importlib.metadata import version as installed
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent / "tests")]

from xla_flags import remembered_flags

# Most of the cells' time goes into compiling, so programs are kept for the next build, and compiled
# with few optimisations. LLVM optimises as always: without that NUTS takes twice as long.
BUILD = HERE / "_build"
if "XLA_FLAGS" not in os.environ:
    flags = remembered_flags(BUILD)
    os.environ["XLA_FLAGS"] = " ".join(f for f in flags if "optimization_level" not in f)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(BUILD / "programs"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")

project = "numpyro_fed"
author = "The numpyro_fed developers"
project_copyright = "The numpyro_fed developers, Apache-2.0"
release = version = installed("numpyro-fed")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "measured",  # tables of benchmarks/results
]
exclude_patterns = ["_build"]
needs_sphinx = "8.2"

# Pages are MyST Markdown. Code cells run in the build, and an error in one of them fails it.
myst_enable_extensions = ["dollarmath", "amsmath", "deflist", "colon_fence", "attrs_block"]
myst_heading_anchors = 3
nb_execution_mode = "cache"
nb_execution_timeout = 900  # seconds, of a cell: machines are shared
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_output_stderr = "remove"  # progress bars

# The reference is read from docstrings in NumPy's style. Types stand in these, and not in
# signatures, which annotations would make long.
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_google_docstring = False
napoleon_use_param = False
napoleon_use_rtype = False
napoleon_custom_sections = [("Attributes", "params_style")]

# A reference to a name of the package that is not in the API reference fails the build. Names of
# other packages are left as text, so that the build needs no network.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(jax|numpy|numpyro|optax|arviz|equinox|typing|collections)(\..*)?"),
]

html_theme = "furo"
html_title = f"numpyro_fed {release}"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_extra_path = ["_build/notebooks"]  # beside the pages from which they are made
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def setup(app):
    """Write the first fit as a Jupyter notebook, before Sphinx copies it beside its page."""
    import nbformat
    from myst_nb.core.read import read_myst_markdown_notebook
    from myst_parser.config.main import MdParserConfig

    text = (HERE / "first_fit.md").read_text()
    text = re.sub(r"\[\]\((\w+)\.md(#[\w-]+)?\)", r"[the page `\1`](\1.html\2)", text)
    folder = BUILD / "notebooks"
    folder.mkdir(parents=True, exist_ok=True)
    notebook = read_myst_markdown_notebook(text, MdParserConfig(), add_source_map=False)
    nbformat.write(notebook, folder / "first_fit.ipynb")
