"""Tests spend their time compiling small programs: fast, and once for all workers and runs."""

import contextlib
import gc
import os
import sys
from pathlib import Path

import jax
import jax.monitoring
import numpy as np
import pytest
from xla_flags import remembered_flags

CACHE = Path(__file__).parent.parent / ".pytest_cache" / "jax"
if "XLA_FLAGS" not in os.environ:  # workers of xdist have them from the process that starts them
    os.environ["XLA_FLAGS"] = " ".join(remembered_flags(CACHE.parent))
# One thread a worker. In a pool of two, two of jaxlib's batched LAPACK kernels (0.10) can wait for
# each other for ever: each takes a thread, and waits there for work that it has put into the queue.
os.environ.setdefault("NPROC", "1")
gc.set_threshold(200_000, 20, 50)  # traces are many small objects that live on

os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# ArviZ writes a file when it is imported the first time of a day, and fails in one of two processes
# that do so at once. So the process that starts the workers imports it before them.
if "PYTEST_XDIST_WORKER" not in os.environ:
    with contextlib.suppress(ImportError):
        import arviz  # noqa: F401


ENOUGH = 3 << 29  # bytes of a worker: more than any one file takes
SLOW_EXAMPLES = (  # in docstrings, where no mark can stand
    "after.summary.FunctionsOfDraws.ranks",
    "after.questions.Questions.leave_out",
    "bayes_admm.method.BayesADMM",
    "fedlap.method.FedLap",
    "fitting.fit.fit",
    "posterior.particles.Tempered",
    "posterior.posterior.Posterior.add",
    "posterior.result.Result.silos",
    "pvi.method.PVI",
    "reference.nuts_result.NutsResult.loo",
    "rounds.federation.Federation",
    "fitting.load.load",
    "network.silo.Silo.predict",
    "sfvi.method.SFVI",
    "vertical.soul.SOUL",
    "vertical.vfl.VFL",
    "text.substitution.substitute_prior",
    "reference.compare.compare",
    "reference.compare.compare_models",
    "reference.nuts.run_nuts",
    "posterior.importance.importance_correct",
    "sigma.prior.SigmaPrior.fit",
)


def pytest_addoption(parser):
    parser.addoption("--part", metavar="K/N", help="of the slow tests every N-th, from the K-th")


def pytest_collection_modifyitems(config, items):
    """Mark the slow examples of docstrings. With ``--part`` leave out the other parts."""
    for item in items:
        if item.name.removeprefix("numpyro_fed.") in SLOW_EXAMPLES:
            item.add_marker("slow")
    if part := config.getoption("part", None):
        k, n = map(int, part.split("/"))
        slow = [item for item in items if item.get_closest_marker("slow")]
        others = set(slow) - set(slow[k % n :: n])
        items[:] = [item for item in items if item not in others]
        config.hook.pytest_deselected(items=list(others))


def resident():
    """Bytes of memory that this process holds; where the system does not tell, no end of them."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return sys.maxsize
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """Compiled programs of one file are of little use to the next, and take memory."""
    yield
    if resident() > ENOUGH:
        jax.clear_caches()


@pytest.fixture
def double():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def compiled():
    """The names of the programs that JAX has compiled so far."""
    names = []

    def listen(event, duration, **kwargs):
        if event.endswith("backend_compile_duration"):
            names.append(kwargs.get("fun_name", event))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture
def noise_of_a_seed(monkeypatch):
    """Draw the noise of privacy from a seed. Silos side by side may take it in another order."""
    from numpyro_fed.privacy import budget

    monkeypatch.setattr(budget, "normals", np.random.default_rng(0).standard_normal)
