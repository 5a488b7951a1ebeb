"""The size of XLA's pool of threads on machines of few cores, which must be one or large.

jaxlib 0.10.0 to 0.11.0 gives the parts of a stack of matrices (a batched Cholesky factor,
triangular solve, QR, ...) to XLA's pool, and waits for them on a thread of that pool. If as many
such calls run side by side as the pool has threads, all wait for ever. Four calls have stopped a
pool of four threads, eight one of two, forty one of eight; none has stopped one of 16. The package
sends no stacks there (:mod:`numpyro_fed.numerics.linalg`), but a user's model may, as by
``dist.MultivariateNormal`` in a plate. XLA makes as many threads as there are cores, or as the
variable ``PJRT_NPROC`` or ``NPROC`` says. It reads them when JAX makes its backend, which is when
the first array is made.
"""

from __future__ import annotations

import os
import warnings

import jaxlib.version

AFFECTED = (0, 10, 0), (0, 11, 1)  # versions of jaxlib: from the first on, before the second
# Threads in the pool: twice the size that no program has stopped. Most of them wait. But XLA cuts
# small operations into as many parts: on two cores a step of PVI took 0.037 ms with 32 threads,
# 0.019 with two and 0.018 with one, which cannot stop either; 5,000 rounds of SFVI 0.68, 0.42 and
# 0.47 s; nf.fit of 8,000 rows 45 s with 32 and 55 s with one.
POOL = 32
POOL_OF_TWO_CORES = 1
VARIABLES = ("PJRT_NPROC", "NPROC")


def make_pool_large_enough() -> None:
    """Set the variable by which XLA makes its pool, if it would make one that can stop.

    It then has :data:`POOL` threads, and on two cores :data:`POOL_OF_TWO_CORES`.

    Nothing is done if the user has set ``PJRT_NPROC`` or ``NPROC``, with enough cores, with one
    core (a pool of one thread does such work itself), or with other versions of jaxlib. If JAX has
    made its pool already, there is a warning.
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
    os.environ[VARIABLES[0]] = str(POOL_OF_TWO_CORES if cores() == 2 else POOL)


def jaxlib_version() -> tuple[int, ...]:
    """Return the version of the installed jaxlib, as numbers."""
    return tuple(jaxlib.version.__version_info__)


def cores() -> int:
    """Return the number of cores that this process may use."""
    # os.cpu_count counts the machine's cores; a container or taskset may leave fewer to the
    # process.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def backend_is_there() -> bool:
    """Return whether JAX has made a backend, after which the size of its pool is fixed.

    Only a private module of JAX knows; if it has moved, the answer is no.
    """
    try:
        from jax._src.xla_bridge import backends_are_initialized
    except ImportError:
        return False
    return backends_are_initialized()
