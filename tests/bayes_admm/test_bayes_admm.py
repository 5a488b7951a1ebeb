"""BayesADMM is exact where it can be, and rests where pooled variational inference does."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pvi_problems as p
import pytest
from apart import Apart
from cases import slow_but
from laid_open import inside
from problems import cut, glmm

import numpyro_fed as nf
from numpyro_fed.local.problem import Local, Solution
from numpyro_fed.rounds.messages import read
from numpyro_fed.rounds.names import PVI_ROUND

pytestmark = [
    pytest.mark.usefixtures("double"),
    pytest.mark.filterwarnings("ignore::numpyro_fed.ConvergenceWarning"),
]


def nothing_shared(y):
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(0, 1), obs=y)


KEY, QUIET = p.KEY, dict(progress_bar=False, runtime="quick")
EXACT = nf.local.LBFGS(num_particles=32, tolerance=1e-9)


@pytest.mark.parametrize("problem", slow_but(p.CONJUGATE, 1))
def test_one_round_is_exact_on_conjugate_models(problem):
    model, rows, exact = problem()
    result = nf.BayesADMM(model).run(KEY, 1, cut(rows, (5, 4, 3)), **QUIET)
    p.assert_exact(result, exact, rtol=1e-10)
    assert result.settled


def test_a_first_round_without_a_silo_is_not_taken_for_exact():
    """Nor is the round in which it is back: what is left to go is about the error or more."""
    model, _, _ = p.mean()
    silos = [dict(y=np.full(4, y)) for y in (-5.0, 5.0, 0.0)]
    away = {0}

    def on_the_way(silo, message, answer):
        if silo in away and read(message).head["exchange"] == PVI_ROUND:
            raise OSError("no route to host")
        return answer(message)

    apart, state = Apart(nf.BayesADMM(model), silos, on_the_way), None
    precision = 1 / 4 + 4 * 12
    for now in ({0}, {1}, set()):
        away.clear()
        away.update(now)
        result = apart.run(KEY, 1, init_state=state)
        state, mean = result.state, result.posterior()["m"].mean
        error = abs(mean - 1 / 4 / precision) * precision**0.5
        assert error > 1
        assert not result.settled
        assert result.remaining > 0.9 * error


@pytest.mark.parametrize("num_silos", slow_but([49, 98], 0))
@pytest.mark.filterwarnings("error::numpyro_fed.ConvergenceWarning")
def test_the_first_round_is_exact_whatever_the_number_of_silos(num_silos):
    """Of 49 the number times one over it is not one."""
    model, _, _ = p.mean()
    silos = [dict(y=np.array([0.1 * j, 1.0])) for j in range(num_silos)]
    result = nf.BayesADMM(model).run(KEY, 1, silos, **QUIET)
    assert result.settled
    assert result.remaining == 0


@dataclass(frozen=True)
class Improper(Local):
    """Visits that lead out of the family."""

    def solve(self, problem, key):
        eta = jax.tree.map(jnp.negative, problem.family.natural(problem.start))
        return Solution(eta, problem.silo_part, jnp.array(True), jnp.array(True))


def test_a_first_visit_that_cannot_be_used_keeps_the_multiplier_of_the_start():
    """And what may help is named."""
    admm = nf.BayesADMM(p.logistic, local=Improper(), start="mode", evidence_draws=1)
    with pytest.raises(nf.NonFiniteError, match=r"(?s)no update.*so may a larger rho\.$") as error:
        admm.run(KEY, 1, cut(p.logistic_rows(), (12, 12)), **QUIET)
    result = error.value.result
    assert "improper and counted for nothing at silos 0, 1: a larger rho" in result.doubts[0]
    for j, state in enumerate(inside(result).one_by_one(result.state.silos)):
        assert state.multiplier["gaussian"]["second"].any()
        p.assert_close(state.multiplier, result.factor(j))


@pytest.mark.slow
def test_another_weight_is_exact_in_the_limit_and_slower():
    """After the first round the error goes down by J rho / (1 + J rho) in each."""
    model, rows, exact = p.mean()
    admm, silos = nf.BayesADMM(model, rho=1.0), cut(rows, (5, 4, 3))
    etas = [p.eta_of(admm.run(KEY, n, silos, **QUIET))["second"][0, 0] for n in (1, 2, 3)]
    whole = admm.run(KEY, 80, silos, **QUIET)
    p.assert_exact(whole, exact, rtol=1e-8)
    errors = np.array(etas) - p.eta_of(whole)["second"][0, 0]
    np.testing.assert_allclose(errors[1:] / errors[:-1], 3 / 4, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["full", "diagonal"])
@pytest.mark.parametrize("sizes", [(10, 8, 6), (4, 20), (12, 12)])
def test_it_rests_at_the_optimum_of_the_pooled_bound(sizes, family, monkeypatch):
    """Whatever the partition, where one silo of PVI is after one visit; and not at once."""
    p.fixed_noise(monkeypatch)
    rows = p.logistic_rows()
    pooled = nf.PVI(p.logistic, local=EXACT, family=family, start=None).run(KEY, 1, [rows], **QUIET)
    admm = nf.BayesADMM(p.logistic, local=EXACT, family=family, rho=1.0)
    result = admm.run(KEY, 60, cut(rows, sizes), **QUIET)
    p.assert_close(p.eta_of(result), p.eta_of(pooled), rtol=1e-5, atol=1e-5)
    early = admm.run(KEY, 1, cut(rows, sizes), **QUIET)
    assert not np.allclose(p.eta_of(early)["first"], p.eta_of(pooled)["first"], rtol=1e-3)


@pytest.mark.slow
def test_one_silo_alone_is_pooled_inference_after_one_round(monkeypatch):
    p.fixed_noise(monkeypatch)
    rows = [p.logistic_rows()]
    pooled = nf.PVI(p.logistic, local=EXACT, start=None).run(KEY, 1, rows, **QUIET)
    result = nf.BayesADMM(p.logistic, local=EXACT).run(KEY, 1, rows, **QUIET)
    p.assert_close(p.eta_of(result), p.eta_of(pooled), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_multipliers_are_what_silos_know(tmp_path, monkeypatch):
    """Some silos take part in each round, and a run that is saved goes on."""
    p.fixed_noise(monkeypatch)
    silos = cut(p.logistic_rows(), (8, 8, 8))
    admm = nf.BayesADMM(p.logistic, rho=1.0, schedule=nf.schedules.Random(2), evidence_draws=4)
    whole = admm.run(KEY, 40, silos, **QUIET)
    multipliers = [s.multiplier for s in inside(whole).one_by_one(whole.state.silos)]
    prior = inside(whole).factors.globals.prior({})["gaussian"]["second"]
    known = prior + sum(m["gaussian"]["second"] for m in multipliers)
    np.testing.assert_allclose(known, p.eta_of(whole)["second"], rtol=1e-2)
    p.assert_sum_rule(whole)

    part = admm.run(KEY, 30, silos, **QUIET)
    part.save(tmp_path / "part")
    loaded = nf.load(tmp_path / "part", p.logistic, silos)
    rest = admm.run(KEY, 10, silos, init_state=loaded.state, **QUIET)
    p.assert_close(p.eta_of(rest), p.eta_of(whole), rtol=0)
    assert loaded.plan.chosen["method"] == "BayesADMM"
    assert loaded.plan.chosen["rho"] == 1.0


@pytest.mark.slow
def test_silos_elsewhere_have_the_same_numbers():
    model, rows, exact = p.linear_regression()
    apart = Apart(nf.BayesADMM(model), cut(rows, (5, 4, 3))).run(KEY, 1)
    p.assert_exact(apart, exact, rtol=1e-10)
    assert nf.importance_correct(KEY, apart, num_draws=500, progress_bar=False).pareto_k < 0.1


@pytest.mark.slow
def test_latents_of_rows_are_integrated_and_the_run_goes_on_from_the_mode():
    r = np.random.default_rng(0)
    rows = dict(x=r.normal(size=(60, 4, 2)), y=r.binomial(1, 0.4, (60, 4)).astype(float))
    pvi = nf.PVI(p.glmm_inside).run(KEY, 6, cut(rows, (20, 40)), **QUIET)
    admm = nf.BayesADMM(p.glmm_inside, start="mode").run(KEY, 12, cut(rows, (20, 40)), **QUIET)
    for site in ("beta", "scale"):
        one, other = pvi.posterior()[site], admm.posterior()[site]
        sd = np.sqrt(one.variance)
        assert (np.abs(one.mean - other.mean) < 0.1 * sd).all()
        np.testing.assert_allclose(np.sqrt(other.variance), sd, rtol=0.1)


@pytest.mark.slow
def test_a_silo_with_most_of_the_rows_comes_to_rest_with_a_larger_weight():
    """With the default the posterior is right, and the doubt of it names the weight."""
    r = np.random.default_rng(0)
    x = np.stack([np.ones(325), r.normal(size=325)], 1)
    y = r.binomial(1, 1 / (1 + np.exp(-x @ [1.5, -1.5]))).astype(float)
    silos = cut(dict(x=x, y=y), (5, 300, 5, 5, 5, 5))
    default, larger = (
        nf.BayesADMM(p.logistic, rho=rho).run(KEY, 20, silos, **QUIET) for rho in (None, 1.0)
    )
    assert default.doubts == ["the last visit had not converged at silo 1: a larger rho may help"]
    assert larger.settled
    one, other = default.posterior()["w"], larger.posterior()["w"]
    sd = np.sqrt(other.variance)
    np.testing.assert_allclose((one.mean - other.mean) / sd, 0, atol=0.2)
    np.testing.assert_allclose(np.sqrt(one.variance) / sd, 1, atol=0.2)


def test_what_it_does_not_take_is_refused_by_name():
    for rho in (0, 1e-320, np.inf, np.nan, True):
        with pytest.raises(ValueError, match="rho must be None or a number from 1e-6 to 1e6, got"):
            nf.BayesADMM(p.logistic, rho=rho)
    with pytest.raises(ValueError, match=r"'asynchronous'.*nf\.PVI"):
        nf.BayesADMM(p.logistic, schedule="asynchronous")
    with pytest.raises(ValueError, match=r"PowerEP.*divergence of its own"):
        nf.BayesADMM(p.logistic, local=nf.local.PowerEP())
    rows = {"x": np.zeros((3, 4, 2)), "y": np.zeros((3, 4))}
    with pytest.raises(nf.ModelError, match=r"'scale'.*setting of nf\.PVI alone"):
        nf.BayesADMM(glmm).run(KEY, 1, [rows], **QUIET)
    with pytest.raises(nf.ModelError, match=r"no global latents[^(]*\Z"):
        nf.BayesADMM(nothing_shared).run(KEY, 1, [dict(y=np.zeros(3))], **QUIET)
