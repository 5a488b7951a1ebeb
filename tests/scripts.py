"""Runs scripts of benchmarks and examples in this process, which has imported JAX already."""

import contextlib
import io
import json
import os
import runpy
import sys
from pathlib import Path
from unittest import mock

import jax
import matplotlib
import matplotlib.pyplot as plt

FOLDER = "NUMPYRO_FED_DATA"  # the variable that says where data are


def run_script(script: Path, folder: Path, *options: str, data: Path | None = None) -> str:
    """What a script prints in a folder, as from the command line; without ``data`` it has none.

    What it sets for its whole process is as before afterwards. Modules beside it are imported anew
    by the next script: a benchmark and an example may have the same name.
    """
    variables = {name: value for name, value in os.environ.items() if name != FOLDER}
    variables |= {FOLDER: str(data)} if data else {}
    known, double, printed = set(sys.modules), jax.config.jax_enable_x64, io.StringIO()
    matplotlib.use("agg")
    try:
        with (
            mock.patch.object(sys, "argv", [str(script), *options]),
            mock.patch.object(sys, "path", [str(script.parent), *sys.path]),
            mock.patch.dict(os.environ, variables, clear=True),
            contextlib.chdir(folder),
            contextlib.redirect_stdout(printed),
        ):
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    finally:
        plt.close("all")
        jax.clear_caches()  # a script's programs are of no use to another, and take memory
        jax.config.update("jax_enable_x64", double)
        for name in set(sys.modules) - known:
            file = getattr(sys.modules[name], "__file__", None) or ""
            if Path(file).parent == script.parent:
                del sys.modules[name]
    return printed.getvalue()


def details(record: Path):
    """The report of a benchmark, in a record that has all that a page draws."""
    found = json.loads(record.read_text())
    assert {"command", "date", "machine", "versions"} <= set(found)
    assert found["rows"]
    assert all({"what", "ours", "reference", "target"} <= set(row) for row in found["rows"])
    assert all(row["what"] and row["ours"] != "" for row in found["rows"])
    return found["details"]
