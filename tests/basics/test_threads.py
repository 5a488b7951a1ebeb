"""XLA's pool is made one or large at import, and not where a user has set its size."""

import glob
import os
import subprocess
import sys

import pytest

from numpyro_fed.basics import threads

CHILD = """
import glob, os, warnings
import jaxlib.version
jaxlib.version.__version_info__ = (0, 10, 2)  # whatever is installed
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
{before}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import numpyro_fed
    from numpyro_fed.basics import threads
    from numpyro_fed.numerics import linalg
import jax.numpy as jnp
jnp.ones(3).block_until_ready()
names = [open(f).read().strip() for f in glob.glob("/proc/self/task/*/comm")]
said = [w for w in caught if "pool" in str(w.message)]
print(os.environ.get("PJRT_NPROC"), names.count("tf_XLAEigen"), len(said))
"""
FEW = not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) > 1
LINUX = bool(glob.glob("/proc/self/task/*/comm"))


def child(before="", **variables):
    """What a process says of its pool: the variable, its threads, and how many warnings."""
    kept = {k: v for k, v in os.environ.items() if k not in (*threads.VARIABLES, "XLA_FLAGS")}
    done = subprocess.run(
        [sys.executable, "-c", CHILD.format(before=before)],
        env={**kept, "JAX_PLATFORMS": "cpu", **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


@pytest.mark.slow
@pytest.mark.skipif(not LINUX, reason="threads are counted by /proc")
@pytest.mark.skipif(not FEW, reason="a machine of one core has a pool that cannot stop")
def test_two_cores_have_a_pool_that_cannot_stop():
    size, _, warned = child()
    assert (size, warned) == (str(threads.POOL_OF_TWO_CORES), "0")


@pytest.mark.slow
@pytest.mark.skipif(not LINUX, reason="threads are counted by /proc")
@pytest.mark.parametrize(("name", "said"), [("PJRT_NPROC", "3"), ("NPROC", "None")])
def test_a_users_own_size_stays(name, said):
    assert child(**{name: "3"}) == [said, "3", "0"]


@pytest.mark.slow
@pytest.mark.skipif(not FEW, reason="a machine of one core has a pool that cannot stop")
def test_one_warning_where_it_is_too_late():
    set_to, _, warned = child("import jax.numpy; jax.numpy.ones(3)")
    assert (set_to, warned) == ("None", "1")


@pytest.fixture
def untouched(monkeypatch):
    """A process in which nothing is set and no backend is there, with an affected jaxlib."""
    for name in threads.VARIABLES:
        monkeypatch.setenv(name, "")  # so that what the test sets is taken back
        monkeypatch.delenv(name)
    monkeypatch.setattr(threads, "backend_is_there", lambda: False)
    monkeypatch.setattr(threads, "jaxlib_version", lambda: (0, 10, 2))
    return monkeypatch


@pytest.mark.parametrize("cores", [1, 2, 4, 8, 16, 31, 32, 64])
def test_by_number_of_cores(untouched, cores):
    untouched.setattr(threads, "cores", lambda: cores)
    threads.make_pool_large_enough()
    expected = {1: None, 2: "1"}.get(cores, "32" if cores < threads.POOL else None)
    assert os.environ.get("PJRT_NPROC") == expected


@pytest.mark.parametrize(
    ("version", "affected"),
    [((0, 9, 2), False), ((0, 10, 0), True), ((0, 11, 0), True), ((0, 11, 1), False)],
)
def test_by_version_of_jaxlib(untouched, version, affected):
    untouched.setattr(threads, "cores", lambda: 4)
    untouched.setattr(threads, "jaxlib_version", lambda: version)
    threads.make_pool_large_enough()
    assert ("PJRT_NPROC" in os.environ) == affected


def test_the_import_starts_no_backend():
    """After that devices cannot be chosen, nor processes joined by ``jax.distributed``."""
    code = "from numpyro_fed.basics import threads; print(threads.backend_is_there())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_jax_still_says_whether_a_backend_is_there():
    """Where this fails JAX has moved a private function: find what says it now, name it in
    ``threads.backend_is_there``, and keep the old place for older versions.
    """
    from jax._src import xla_bridge

    assert callable(xla_bridge.backends_are_initialized)
    import jax

    jax.devices()
    assert threads.backend_is_there()
