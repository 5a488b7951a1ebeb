"""Members of the family: their equivalences, generalised losses and divergences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laid_open import inside, laid_open
from problems import cut
from pvi_problems import (
    KEY,
    QUICK,
    QUIET,
    assert_close,
    assert_exact,
    eta_of,
    fixed_noise,
    logistic,
    logistic_rows,
    mean,
)

import numpyro_fed as nf
from numpyro_fed import expfam

pytestmark = pytest.mark.usefixtures("double")


def global_free_energy(pvi, rows):
    """The global free energy as a function of natural parameters, over the fixed nodes."""
    opened = laid_open(pvi, [rows])
    chosen, data = opened.factors.globals, opened.data[0]
    family = chosen.family
    nodes = family.noise(KEY, 1)["gaussian"]

    def value(eta):
        psi = family.ordinary(eta)
        z = jax.vmap(lambda e: family.draw(psi, {"gaussian": e}))(nodes)
        n = len(rows["y"])
        each = jax.vmap(
            lambda z: opened.model.log_silo({}, z, {"row": jnp.zeros((n, 0))}, data)["row"]
        )
        return each(z).sum(1).mean() - family.kl(eta, chosen.prior({}))

    return value, family


@pytest.mark.slow
@pytest.mark.parametrize("gradient", ["plain", "natural"])
def test_one_local_step_of_every_silo_is_a_step_of_global_inference(gradient, monkeypatch):
    """Properties 3.1 and 3.3 for plain gradients, 3.2 and equation 4 for natural ones."""
    fixed_noise(monkeypatch)
    rows, rate = logistic_rows(), 0.01
    chosen = dict(rate=rate, gradient=gradient, family="diagonal")
    pvi = nf.GlobalVI(logistic, **chosen, start=None)
    silos, before = cut(rows, (8, 8, 8)), None
    for _ in range(2):
        result = pvi.run(KEY, 1, silos, init_state=before and before.state, **QUIET)
        start = before.natural_parameters() if before else None
        if before is None:
            start = inside(result).factors.globals.prior({})
        value, family = global_free_energy(nf.GlobalVI(logistic, **chosen, start=None), rows)
        step = jax.grad(value)(start)
        if gradient == "natural":
            fisher = jax.hessian(family.log_partition)(start)["gaussian"]
            flat = jnp.concatenate([step["gaussian"][k] for k in ("first", "second")])
            F = jnp.block([[fisher[a]["gaussian"][b] for b in fisher] for a in fisher])
            first, second = jnp.split(jnp.linalg.solve(F, flat), 2)
            step = {"gaussian": {"first": first, "second": second}}
        expected = jax.tree.map(lambda a, g: a + rate * g, start, step)
        assert_close(result.natural_parameters(), expected, rtol=1e-7, atol=1e-9)
        before = result


@pytest.mark.slow
def test_stochastic_power_ep_has_mini_batch_global_inference_as_its_limit(monkeypatch):
    """Proposition 4.1 and B.6: an average factor, one natural-gradient step, silo by silo."""
    fixed_noise(monkeypatch)
    rows, rate = logistic_rows(), 0.2
    step = nf.local.NaturalGradient(rate=rate, steps=1)
    silos, M = cut(rows, (8, 8, 8)), 3
    pvi = nf.StochasticPowerEP(logistic, local=step, family="diagonal", damping=1.0)
    result = pvi.run(KEY, 1, silos, **QUIET)
    opened = inside(result)
    chosen = opened.factors.globals
    family, eta, prior = chosen.family, chosen.prior({}), chosen.prior({})
    for j in range(M):
        data, n = opened.data[j], len(silos[j]["y"])

        def expected(psi, data=data, n=n):
            nodes = family.noise(KEY, 1)["gaussian"]
            z = jax.vmap(lambda e: family.draw(psi, {"gaussian": e}))(nodes)
            log_silo = opened.model.log_silo
            rows = jax.vmap(lambda z: log_silo({}, z, {"row": jnp.zeros((n, 0))}, data)["row"])(z)
            return rows.sum(1).mean()

        dual = family.dual_gradient(expected, eta)
        eta = jax.tree.map(lambda e, p, g: e + rate / M * (p + M * g - e), eta, prior, dual)
    assert_close(result.natural_parameters(), eta, rtol=1e-7, atol=1e-9)


@pytest.mark.slow
def test_members_of_the_family_are_settings_of_pvi():
    silos = cut(logistic_rows(), (8, 8, 8))
    fixed = dict(local=QUICK)
    passes = nf.PVI(logistic, **fixed, start=None).run(KEY, 1, silos, **QUIET)
    vcl = nf.VCL(logistic, **fixed).run(KEY, 1, silos, **QUIET)
    assert_close(eta_of(vcl), eta_of(passes), rtol=1e-12)
    together = nf.PVI(logistic, schedule="synchronous", damping=1.0, **fixed, start=None)
    bcm = nf.BCM(logistic, **fixed).run(KEY, 1, silos, **QUIET)
    assert_close(eta_of(bcm), eta_of(together.run(KEY, 1, silos, **QUIET)), rtol=1e-12)
    with pytest.raises(ValueError, match="1 round"):
        nf.VCL(logistic, **fixed).run(KEY, 2, silos, **QUIET)


@pytest.mark.slow
def test_committee_machines_are_exact_on_conjugate_models_and_streaming_counts_twice():
    model, rows, exact = mean()
    silos = cut(rows, (5, 3, 4))
    for split in (False, True):
        assert_exact(nf.BCM(model, split=split).run(KEY, 1, silos, **QUIET), exact)
    assert_exact(nf.StreamingVB(model).run(KEY, 1, silos, **QUIET), exact)
    twice = nf.StreamingVB(model).run(KEY, 2, silos, **QUIET).posterior()["m"]
    np.testing.assert_allclose(1 / twice.variance, 1 / 4 + 2 * 12 * 4, rtol=1e-9)


@pytest.mark.slow
def test_fedgvi_with_kl_and_the_log_loss_is_pvi():
    silos = cut(logistic_rows(), (8, 8, 8))
    local = nf.local.LBFGS(steps=30, num_particles=8)
    a = nf.PVI(logistic, local=local, start=None).run(KEY, 1, silos, **QUIET)
    fed = nf.FedGVI(logistic, loss=nf.losses.log_loss, local=local, divergence=plain_kl, start=None)
    b = fed.run(KEY, 1, silos, **QUIET)
    assert_close(eta_of(a), eta_of(b), rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match="no evidence"):
        _ = b.log_evidence


def plain_kl(family, q, p):
    """KL as a user would write it, without the short cuts that the built-in one takes."""
    return family.kl(q, p)


@pytest.mark.slow
def test_a_weight_on_both_divergences_is_a_power_of_the_likelihood():
    """``w KL`` to the prior and to the cavity: the posterior of the likelihood to the ``1 / w``."""
    model, rows, _ = mean()
    w = nf.divergences.WeightedKL(2.0)
    local = nf.local.LBFGS(tolerance=1e-9)
    pvi = nf.FedGVI(model, divergence=w, prior_divergence=w, local=local, start=None)
    q = pvi.run(KEY, 1, cut(rows, (5, 7)), **QUIET).posterior()["m"]
    precision = 1 / 4 + 12 * 4 / 2
    np.testing.assert_allclose(q.variance, 1 / precision, rtol=1e-5)
    np.testing.assert_allclose(q.mean, (1 / 4 + 2 * rows["y"].sum()) / precision, rtol=1e-5)


@pytest.mark.slow
def test_the_cavity_is_found_from_the_coefficients_alone():
    """With one silo, any divergence to the prior gives what optimising it directly does."""
    model, rows, _ = mean()
    renyi = nf.divergences.AlphaRenyi(0.5)
    local = nf.local.LBFGS(tolerance=1e-9)
    pvi = nf.FedGVI(model, divergence=renyi, prior_divergence=renyi, local=local, start=None)
    result = pvi.run(KEY, 1, [rows], **QUIET)
    family = inside(result).factors.globals.family
    prior = inside(result).factors.globals.prior({})
    y = rows["y"]
    likelihood = {
        "gaussian": {"first": jnp.array([4 * y.sum()]), "second": jnp.full((1, 1), -24.0)}
    }

    def objective(eta):
        moments = family.moments(family.ordinary(eta))
        return renyi(family, eta, prior) - expfam.inner(likelihood, moments)

    slope = jax.grad(objective)(result.natural_parameters())
    assert max(float(jnp.abs(g).max()) for g in jax.tree.leaves(slope)) < 1e-4
    assert_close(result.factor(0), likelihood, rtol=1e-4)
