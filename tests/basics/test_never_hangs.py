"""No program of a fit hands a stack of matrices to LAPACK.

With jaxlib 0.10 a call for a stack holds a thread of XLA's pool and waits there for others of that
pool; as many of them side by side as there are threads stand still for ever. A call for one matrix
waits for nobody. So the number of calls that can wait for each other is the number of those for
stacks: none, in whatever order XLA runs them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from kernels import lapack_shapes, stacks

import numpyro_fed as nf

pytestmark = pytest.mark.slow


def hospitals(hospital, n_hospitals, x, y=None):
    """Effects of hospitals, a few of which are at each silo, and of their patients' columns."""
    scale = numpyro.sample("tau", dist.HalfNormal(1).expand([x.shape[1]]).to_event(1))
    mu = numpyro.sample("mu", dist.Normal(0, 5).expand([x.shape[1]]).to_event(1))
    with nf.silo_plate("hospital", n_hospitals):
        u = numpyro.sample("u", dist.Normal(jnp.zeros(x.shape[1]), scale).to_event(1))
    with nf.silo_plate("patient", hospital.shape[0]):
        e = numpyro.sample("e", dist.Normal(0, 1))  # so that a hospital's rows are not one integral
        numpyro.sample("y", dist.Bernoulli(logits=(x * (mu + u[hospital])).sum(-1) + e), obs=y)


def silos(columns=2, sizes=((12, 2), (15, 2), (15, 3))):
    rng = np.random.default_rng(0)
    found = []
    for n, number in sizes:
        x = np.column_stack([np.ones(n), rng.normal(size=(n, columns - 1))]).astype(np.float32)
        hospital, y = rng.integers(number, size=n), rng.integers(2, size=n).astype(np.float32)
        found.append({"hospital": hospital, "n_hospitals": number, "x": x, "y": y})
    return found


@pytest.fixture
def lowered(tmp_path):
    """The texts of all programs that are lowered in a test."""
    jax.config.update("jax_dump_ir_to", str(tmp_path))
    yield lambda: [f.read_text() for f in tmp_path.glob("*.mlir")]
    jax.config.update("jax_dump_ir_to", "")


def test_programs_are_seen(lowered):
    """The test below would pass if it saw nothing, or did not know a call when it sees one."""

    @jax.jit
    def factors(A):
        return jnp.linalg.cholesky(A), jnp.linalg.cholesky(A[0])

    factors(jnp.broadcast_to(jnp.eye(2), (3, 2, 2)))
    (program,) = [text for text in lowered() if "lapack" in text]
    assert sorted(lapack_shapes(program)) == [(2, 2), (3, 2, 2)]
    assert stacks(program) == [(3, 2, 2)]


def test_no_stack_goes_to_lapack_in_a_search_for_the_mode(lowered):
    nf.find_mode(jax.random.key(0), hospitals, silos(), max_exchanges=3)
    texts = lowered()
    assert any(lapack_shapes(text) for text in texts)
    assert [found for text in texts if (found := stacks(text))] == []


def test_no_stack_goes_to_lapack_in_a_fit(lowered):
    """From the search for the mode by a round of PVI to the importance correction."""
    result = nf.PVI(hospitals).run(jax.random.key(0), 1, silos(), progress_bar=False)
    nf.importance_correct(jax.random.key(1), result, 64, 8)
    texts = lowered()
    assert any(lapack_shapes(text) for text in texts)
    assert [found for text in texts if (found := stacks(text))] == []
