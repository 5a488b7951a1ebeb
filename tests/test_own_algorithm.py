"""The page on writing an algorithm does what it says."""

import re
from pathlib import Path

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from laid_open import inside

import numpyro_fed as nf

pytestmark = pytest.mark.slow
PAGE = Path(__file__).parent.parent / "docs" / "own_algorithm.md"


@pytest.fixture(scope="module")
def page():
    """What the page's program defines, run in order; it computes in double precision."""
    before, scope = jax.config.jax_enable_x64, {}
    blocks = re.findall(r"```{code-cell}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 6
    try:
        for block in blocks:
            exec(compile(block, PAGE.name, "exec"), scope)
    finally:
        jax.config.update("jax_enable_x64", before)
    return scope


def test_one_round_is_exact_on_a_conjugate_model(page):
    assert page["error"] < 1e-10


def test_rounds_of_logistic_regression_come_to_rest(page):
    """Where all multipliers are natural gradients: the posterior is stationary for pooled data."""
    result = page["result"]
    assert result.ended == "converged"
    assert len(result.losses) < 10
    with jax.enable_x64(True):
        multipliers = [
            np.asarray(s.multiplier["gaussian"]["second"])
            for s in inside(result).one_by_one(result.state.silos)
        ]
        prior = np.diag(np.full(4, -0.5 / 9))
        eta = np.asarray(result.params["guide"]["gaussian"]["second"])
    np.testing.assert_allclose(prior + sum(multipliers), eta, rtol=1e-3)


def test_latents_of_rows_are_refused(page):
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with nf.silo_plate("row", y.shape[0]):
            z = numpyro.sample("z", dist.Normal(mu, 1))
            numpyro.sample("y", dist.Normal(z, 1), obs=y)

    admm = page["BayesADMM"](model)
    with pytest.raises(nf.ModelError, match="global latents alone"):
        admm.run(jax.random.key(0), 1, [{"y": np.zeros(3)}], progress_bar=False)
