"""From the result of one method into another: what is taken over, and what is refused."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from apart import Apart
from problems import glmm, glmm_silos

import numpyro_fed as nf
from numpyro_fed.basics.errors import DataError, GuideError

KEY = jax.random.key(0)
FULL = nf.guides.Structured(globals="full")
STILL = optax.sgd(0.0)


def averaged(silos, **settings):
    return nf.SFVIAvg(glmm, local_steps=20, **settings).run(KEY, 3, silos, progress_bar=False)


def intercepts(x, y=None):
    """All of whose globals have Gaussian priors: there is nothing for the server to fit anew."""
    beta = numpyro.sample("beta", dist.Normal(0, 3).expand([x.shape[-1]]).to_event(1))
    with nf.silo_plate("child", x.shape[0], dim=-2):
        b = numpyro.sample("b", dist.Normal(0, 1.5))
        with numpyro.plate("visit", x.shape[1], dim=-1):
            numpyro.sample("y", dist.Bernoulli(logits=x @ beta + b), obs=y)


def moments(result, n=200_000):
    z = np.asarray(result.draw_globals(KEY, n)[0], float)
    return z.mean(0), np.cov(z.T)


@pytest.mark.slow
@pytest.mark.parametrize("start", [None, "mode"])
@pytest.mark.parametrize("globals", ["full", "diagonal"])
def test_sfvi_goes_on_where_an_average_has_come_to(start, globals):
    """A round of no step leaves all of it as it was, but for the family of the globals."""
    silos = glmm_silos((5, 3, 4))
    guide = nf.guides.Structured(globals=globals)
    first = averaged(silos, start=start, guide=guide)
    same = nf.ELBO() if start is None else None  # by default both are quadrature from the mode on
    sfvi = nf.SFVI(glmm, optim=STILL, start=first, guide=guide, objective=same)
    after = sfvi.run(KEY, 1, silos, progress_bar=False)
    for a, b in zip(moments(after), moments(first), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
    for j in range(3):
        draws = [r.sample_posterior(KEY, 4_000, silo=j)["b"] for r in (after, first)]
        np.testing.assert_allclose(draws[0].mean(0), draws[1].mean(0), atol=1e-3)
    said = after.start.report()
    assert said.startswith("From a result of SFVIAvg: the mean and ")
    assert "child" in said


@pytest.mark.slow
@pytest.mark.parametrize("method", [nf.SFVI, nf.SFVIAvg])
def test_pvi_goes_on_with_equal_shares(method):
    silos = glmm_silos((5, 3, 4))
    settings = dict(local_steps=20) if method is nf.SFVIAvg else {}
    first = method(intercepts, guide=FULL, **settings).run(KEY, 3, silos, progress_bar=False)
    local = nf.local.Optax(optim=STILL, steps=1)
    after = nf.PVI(intercepts, start=first, local=local, schedule="synchronous").run(
        KEY, 1, silos, progress_bar=False
    )
    mean, cov = moments(first)
    found = moments(after)
    sd = np.sqrt(np.diagonal(cov))
    np.testing.assert_allclose((found[0] - mean) / sd, 0, atol=0.02)
    np.testing.assert_allclose(found[1] / np.outer(sd, sd), cov / np.outer(sd, sd), atol=0.02)
    # The silos' factors are the server's sum, less its own.
    (silo,) = after.state.silos
    server = after.state.server
    each = jax.vmap(lambda s, taken: s.effective_factor(taken))(silo, server.taken)
    total = jax.tree.map(lambda a, b: a.sum(0) + b, each, server.server_factor)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), total, server.total
    )


@pytest.mark.slow
def test_parameters_are_taken_over():
    def model(y):
        shift = numpyro.param("shift", 0.0)
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        with nf.silo_plate("row", y.shape[0]):
            own = numpyro.param("own", 0.1)
            numpyro.sample("y", dist.Normal(mu + shift + own, 1), obs=y)

    silos = [dict(y=np.ones(3)), dict(y=np.zeros(2))]
    first = nf.SFVI(model, guide=FULL, start=None).run(KEY, 20, silos, progress_bar=False)
    after = nf.SFVI(model, optim=STILL, start=first).run(KEY, 1, silos, progress_bar=False)
    np.testing.assert_allclose(after.params["shift"], first.params["shift"], rtol=1e-6)
    for j in range(2):
        own = after.silo_params(j)["own"]
        np.testing.assert_allclose(own, first.silo_params(j)["own"], rtol=1e-6)
    assert "the parameters own, shift" in after.start.report()


@pytest.mark.slow
def test_many_globals_are_taken_over_by_their_standard_deviations():
    model = models.linear(1, 1)
    r = np.random.default_rng(0)
    silos = [dict(x=r.normal(size=(5, 400)), y=r.normal(size=5)) for _ in range(2)]
    guide = nf.guides.Structured(globals="diagonal")
    first = nf.SFVIAvg(model, local_steps=5, start=None).run(KEY, 2, silos, progress_bar=False)
    assert set(first.params["guide"]) == {"loc", "log_scale"}
    after = nf.SFVI(model, optim=STILL, start=first, guide=guide).run(
        KEY, 1, silos, progress_bar=False
    )
    for name in ("loc", "log_scale"):
        found = after.params["guide"][name]
        np.testing.assert_allclose(found, first.params["guide"][name], rtol=1e-5)
    with pytest.raises(GuideError, match=r"PVI .* 300"):
        nf.PVI(model, start=first).run(KEY, 1, silos, progress_bar=False)


@pytest.mark.slow
def test_results_that_do_not_fit_are_refused():
    first = averaged(glmm_silos((5, 3, 4)))
    with pytest.raises(DataError, match="silos: 3 there, 2 here"):
        nf.SFVI(glmm, start=first).run(KEY, 1, glmm_silos((5, 3)), progress_bar=False)
    with pytest.raises(DataError, match="other numbers of rows"):
        nf.SFVI(glmm, start=first).run(KEY, 1, glmm_silos((5, 4, 3)), progress_bar=False)
    with pytest.raises(GuideError, match="the same guide="):
        nf.SFVI(glmm, start=first, guide=nf.guides.MeanField()).run(
            KEY, 1, glmm_silos((5, 3, 4)), progress_bar=False
        )
    method = nf.SFVI(glmm, start=first)
    with pytest.raises(DataError, match="begin at the mode"):
        Apart(method, glmm_silos((5, 3, 4))).run(jax.random.key(0), 1)
    with pytest.raises(ValueError, match="'mode', None"):
        nf.SFVI(glmm, start="here")
    with pytest.raises(ValueError, match="deletion='own'"):
        nf.PVI(glmm, start=first, deletion="none").run(
            KEY, 1, glmm_silos((5, 3, 4)), progress_bar=False
        )


@pytest.mark.slow
def test_a_run_that_began_at_a_result_goes_on_from_its_own_state():
    silos = glmm_silos((5, 3))
    method = nf.SFVI(glmm, start=averaged(silos), guide=FULL)
    whole = method.run(KEY, 4, silos, progress_bar=False)
    half = method.run(KEY, 2, silos, progress_bar=False)
    rest = method.run(KEY, 2, silos, init_state=half.state, progress_bar=False)
    jax.tree.map(np.testing.assert_array_equal, rest.state, whole.state)
    assert jnp.isfinite(whole.losses).all()
