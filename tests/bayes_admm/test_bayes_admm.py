"""BayesADMM is exact where it can be, and rests where pooled variational inference does."""

import numpy as np
import pvi_problems as p
import pytest
from cases import slow_but
from problems import cut

import numpyro_fed as nf

pytestmark = pytest.mark.usefixtures("double")
QUIET = p.QUIET


@pytest.mark.parametrize("problem", slow_but(p.CONJUGATE, 1))
def test_one_round_is_exact_on_conjugate_models(problem):
    model, rows, exact = problem()
    result = nf.BayesADMM(model).run(p.KEY, 1, cut(rows, (5, 4, 3)), **QUIET)
    p.assert_exact(result, exact, rtol=1e-10)
    assert result.settled


@pytest.mark.filterwarnings("ignore::numpyro_fed.ConvergenceWarning")
def test_another_weight_is_exact_in_the_limit_and_slower():
    """After the first round the error goes down by J rho / (1 + J rho) in each."""
    model, rows, exact = p.mean()
    admm = nf.BayesADMM(model, rho=1.0)
    etas = [
        p.eta_of(admm.run(p.KEY, n, cut(rows, (5, 4, 3)), **QUIET))["second"][0, 0]
        for n in (1, 2, 3, 60)
    ]
    np.testing.assert_allclose(-0.5 / etas[-1], exact["m"]["variance"], rtol=1e-6)
    errors = np.array(etas[:3]) - etas[-1]
    np.testing.assert_allclose(errors[1:] / errors[:-1], 3 / 4, rtol=1e-4)
