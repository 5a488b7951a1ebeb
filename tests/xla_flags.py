"""XLA's options for the tests, as far as the installed XLA knows them."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

FAST = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_cpu_enable_concurrency_optimized_scheduler=false",
    "--xla_disable_hlo_passes=while-loop-invariant-code-motion,while-loop-simplifier,"
    "conditional_simplification",
)


def known_flags(flags: Sequence[str]) -> list[str]:
    """Those of the flags that the installed XLA knows.

    XLA ends a process whose ``XLA_FLAGS`` hold another, and its message names that flag. So a
    process of its own tries them, again without each that is named.
    """
    kept = list(flags)
    while kept:
        tried = subprocess.run(
            [sys.executable, "-c", "import jax; jax.devices()"],
            env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(kept)},
            capture_output=True,
            text=True,
        )
        if tried.returncode == 0:
            return kept
        unknown = re.search(r"Unknown flags? in XLA_FLAGS:(.*)", tried.stderr)
        named = unknown[1].split() if unknown else kept  # it ended for another reason: none at all
        kept = [flag for flag in kept if flag not in named]
    return kept


def remembered_flags(folder: Path) -> list[str]:
    """The known ones of ``FAST``, kept in a file of the folder for each version of jaxlib."""
    file = folder / f"xla_flags_{version('jaxlib')}.json"
    if file.exists():
        tried, kept = json.loads(file.read_text())
        if tried == list(FAST):
            return kept
    kept = known_flags(FAST)
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps([FAST, kept]))
    return kept
