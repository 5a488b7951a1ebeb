"""The size of XLA's pool of threads on machines of few cores.

jaxlib 0.10.0 to 0.11.0 hands the parts of a stack of matrices (a batched Cholesky factor,
triangular solve, QR, ...) to XLA's pool, and waits for them on a thread of that pool. As many such
calls side by side as the pool has threads wait for ever: four have stopped a pool of four, eight
one of two, forty one of eight; none has stopped one of 16. The package sends no stacks there
(:mod:`numpyro_fed.linalg`), but a model's own text may, as by ``dist.MultivariateNormal`` in a
plate. XLA makes as many threads as there are cores, or as ``PJRT_NPROC`` or ``NPROC`` says when
JAX's backend is made, which is when the first array is.
"""

from __future__ import annotations

import os
import warnings

import jaxlib.version

AFFECTED = (0, 10, 0), (0, 11, 1)  # versions of jaxlib: from the first on, before the second
POOL = 32  # threads, which no program is known to have stopped: most of them wait
VARIABLES = ("PJRT_NPROC", "NPROC")


def make_pool_large_enough() -> None:
    """Have XLA make a pool of :data:`POOL` threads where it would make too few.

    Nothing is done where a user has set ``PJRT_NPROC`` or ``NPROC``, where there are enough cores
    or one only (a pool of one thread does such work itself), and with other versions of jaxlib.
    Where JAX has its pool already there is a warning.
    """
    first, past = AFFECTED
    alone_or_enough = cores() == 1 or cores() >= POOL
    if not first <= jaxlib_version() < past or alone_or_enough or set(VARIABLES) & set(os.environ):
        return
    if backend_is_there():
        warnings.warn(
            f"JAX has made its pool of {cores()} threads before numpyro_fed was imported, and "
            f"jaxlib {jaxlib.version.__version__} can stop such a pool for ever where a model has "
            "several stacks of matrices, as by MultivariateNormal in a plate. Import numpyro_fed "
            f"before any array is made, or set {VARIABLES[0]}={POOL} before Python starts.",
            RuntimeWarning,
            stacklevel=3,
        )
        return
    os.environ[VARIABLES[0]] = str(POOL)


def jaxlib_version() -> tuple[int, ...]:
    """The version of jaxlib that is installed, as numbers."""
    return tuple(jaxlib.version.__version_info__)


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def backend_is_there() -> bool:
    """Whether JAX has made a backend, after which the size of its pool is fixed.

    JAX says so in a private module only; where that has moved the answer is no.
    """
    try:
        from jax._src.xla_bridge import backends_are_initialized
    except ImportError:
        return False
    return backends_are_initialized()
