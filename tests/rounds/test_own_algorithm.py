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
PAGE = Path(__file__).parents[2] / "docs" / "own_algorithm.md"


@pytest.fixture(scope="module")
def page():
    """What the page's program defines, run in order; it computes in double precision."""
    before, scope = jax.config.jax_enable_x64, {}
    blocks = re.findall(r"```{code-cell}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 5
    try:
        for block in blocks:
            exec(compile(block, PAGE.name, "exec"), scope)
    finally:
        jax.config.update("jax_enable_x64", before)
    return scope


def test_one_round_is_exact_on_a_conjugate_model(page):
    assert page["error"] < 1e-10


def logistic(x, y):
    b = numpyro.sample("b", dist.Normal(0, 3))
    beta = numpyro.sample("beta", dist.Normal(0, 3).expand([x.shape[-1]]).to_event(1))
    with nf.silo_plate("row", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=b + x @ beta), obs=y)


def test_rounds_of_logistic_regression_come_to_rest(page):
    """Where all multipliers are natural gradients: the posterior is stationary for pooled data."""
    r, patients = np.random.default_rng(0), []
    for j, n in enumerate((80, 40, 60, 120, 30)):
        age, bmi = r.normal(45 + 5 * j, 12, n), r.normal(26 + j / 2, 4, n)
        x = np.stack([(age - 50) / 10, bmi - 27, r.binomial(1, 0.5, n)], 1)
        p = 1 / (1 + np.exp(1 - x @ [0.5, 0.1, -0.7]))
        patients.append(dict(x=x, y=r.binomial(1, p).astype(float)))
    with jax.enable_x64(True):
        admm = page["BayesADMM"](logistic)
        key = jax.random.key(0)
        result = admm.run(key, 50, patients, progress_bar=False, stop="converged")
        multipliers = [
            np.asarray(s.multiplier["gaussian"]["second"])
            for s in inside(result).one_by_one(result.state.silos)
        ]
        eta = np.asarray(result.params["guide"]["gaussian"]["second"])
    assert result.ended == "converged"
    assert len(result.losses) < 10
    prior = np.diag(np.full(4, -0.5 / 9))
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
