"""How programs are compiled that run once for a set of data."""

from __future__ import annotations

from functools import partial

import jax

QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}
jit_once = partial(jax.jit, compiler_options=QUICK)  # compiles in a third of the time, runs slower
