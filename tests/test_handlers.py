"""The joint model's names and sites, and the plain model under NumPyro's own tools."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, Predictive
from numpyro.infer.inspect import get_model_relations
from numpyro.infer.reparam import LocScaleReparam
from numpyro.infer.util import log_density

from numpyro_fed.errors import DataError, ModelError
from numpyro_fed.handlers import at_silo, joint
from numpyro_fed.primitives import silo_plate

SILOS = [{"y": np.zeros((2, 3), np.float32)}, {"y": np.ones((4, 3), np.float32)}]


def model(y, n=None):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    numpyro.param("theta", 1.0)
    with numpyro.plate("feature", 3):
        beta = numpyro.sample("beta", dist.Normal(mu, 1))
    numpyro.deterministic("total", beta.sum())
    numpyro.factor("pull", -(mu**2))
    with silo_plate("row", len(y) if n is None else n, dim=-2):
        phi = numpyro.param("phi", 0.5)
        b = numpyro.sample("b", dist.Normal(mu, 1))
        numpyro.deterministic("half", b / 2)
        with numpyro.plate("visit", 3):
            numpyro.sample("y", dist.Normal(phi + b + beta, 1), obs=None if n else y)


def trace_of(fn, *args, **kwargs):
    return handlers.trace(handlers.seed(fn, 0)).get_trace(*args, **kwargs)


def test_globals_keep_their_names_and_come_once():
    names = list(trace_of(joint(model, SILOS)))
    shared = ["mu", "theta", "feature", "beta", "total", "pull"]
    local = ["row", "phi", "b", "half", "visit", "y"]
    assert names == shared + [f"silo_{j}/{name}" for j in range(2) for name in local]


def test_each_silo_has_its_own_sizes_and_plates():
    trace = trace_of(joint(model, SILOS))
    assert trace["silo_0/b"]["value"].shape == (2, 1)
    assert trace["silo_1/b"]["value"].shape == (4, 1)
    frames = {f.name: f.size for f in trace["silo_1/y"]["cond_indep_stack"]}
    assert frames == {"silo_1/row": 4, "silo_1/visit": 3}
    assert [f.name for f in trace["beta"]["cond_indep_stack"]] == ["feature"]


def test_a_parameter_inside_is_one_for_each_silo():
    params = [n for n, s in trace_of(joint(model, SILOS)).items() if s["type"] == "param"]
    assert params == ["theta", "silo_0/phi", "silo_1/phi"]


def test_all_silos_read_the_same_globals():
    def echo(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with silo_plate("row", len(y)):
            numpyro.deterministic("seen", mu)

    trace = trace_of(joint(echo, SILOS))
    assert trace["silo_0/seen"]["value"] == trace["silo_1/seen"]["value"] == trace["mu"]["value"]


def test_a_reparametrised_site_inside_stays_the_silos_own():
    text = handlers.reparam(model, config={"b": LocScaleReparam(0.0)})
    trace = trace_of(joint(text, SILOS))
    assert trace["silo_1/b"]["type"] == "deterministic"
    assert trace["silo_0/b"]["value"].shape == (2, 1)
    assert trace["silo_1/b"]["value"].shape == (4, 1)
    assert "silo_1/b_decentered" in trace
    assert "b" not in trace


def test_the_joint_density_counts_the_prior_once():
    def simple(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with silo_plate("row", len(y)):
            numpyro.sample("y", dist.Normal(mu, 1), obs=y)

    held = [{"y": np.zeros(2)}, {"y": np.ones(3)}]
    found, _ = log_density(joint(simple, held), (), {}, {"mu": 0.4})
    pooled = np.concatenate([s["y"] for s in held])
    by_hand = dist.Normal(0, 1).log_prob(0.4) + dist.Normal(0.4, 1).log_prob(pooled).sum()
    np.testing.assert_allclose(found, by_hand, rtol=1e-6)


def test_the_joint_model_can_be_called_again():
    both = joint(model, SILOS)
    first, second = trace_of(both), trace_of(both)
    assert first.keys() == second.keys()
    assert first["silo_1/b"]["value"].shape == second["silo_1/b"]["value"].shape


def test_at_silo_renames_what_is_local_alone():
    trace = trace_of(at_silo(model, silo=7), **SILOS[0])
    assert {n for n in trace if not n.startswith("silo_7/")} == {
        "mu",
        "theta",
        "feature",
        "beta",
        "total",
        "pull",
    }


def test_the_joint_model_runs_under_nuts():
    mcmc = MCMC(NUTS(joint(model, SILOS)), num_warmup=5, num_samples=4, progress_bar=False)
    mcmc.run(jax.random.key(0))
    samples = mcmc.get_samples()
    assert samples["beta"].shape == (4, 3)
    assert samples["silo_1/b"].shape == (4, 4, 1)


def test_the_plain_model_runs_under_nuts():
    mcmc = MCMC(NUTS(model), num_warmup=5, num_samples=4, progress_bar=False)
    mcmc.run(jax.random.key(0), **SILOS[1])
    assert mcmc.get_samples()["b"].shape == (4, 4, 1)


def test_the_plain_model_predicts():
    draws = Predictive(model, num_samples=6)(jax.random.key(0), None, n=5)
    assert draws["y"].shape == (6, 5, 3)


def test_the_plain_model_shows_its_plates_to_render_model():
    relations = get_model_relations(model, model_kwargs=SILOS[0])
    assert relations["plate_sample"]["row"] == ["b", "half", "y"]
    assert relations["observed"] == ["pull", "y"]


@pytest.mark.parametrize(("dim", "shape"), [(None, (4,)), (-1, (4,)), (-3, (4, 1, 1))])
def test_a_silo_plate_is_a_plate(dim, shape):
    with handlers.seed(rng_seed=0), silo_plate("row", 4, dim=dim) as index:
        assert numpyro.sample("b", dist.Normal(0, 1)).shape == shape
        np.testing.assert_array_equal(index, np.arange(4))


def test_a_site_belongs_to_its_innermost_silo_plate():
    def nested():
        with silo_plate("a", 2, dim=-2), silo_plate("b", 3, dim=-1):
            numpyro.sample("x", dist.Normal(0, 1))

    assert trace_of(nested)["x"]["silo_plate"] == "b"


def test_an_empty_or_subsampled_silo_plate_is_refused():
    with pytest.raises(DataError, match=r"'row' has size 0.*at least one row"):
        silo_plate("row", 0)
    with pytest.raises(ModelError, match=r"'row' was given subsample_size=2.*leave"):
        silo_plate("row", 4, subsample_size=2)


def test_gradients_pass_through_the_joint_model():
    def density(mu):
        def simple(y):
            m = numpyro.sample("mu", dist.Normal(0, 1))
            with silo_plate("row", len(y)):
                numpyro.sample("y", dist.Normal(m, 1), obs=y)

        held = [{"y": jnp.zeros(2)}, {"y": jnp.ones(3)}]
        return log_density(joint(simple, held), (), {}, {"mu": mu})[0]

    np.testing.assert_allclose(jax.grad(density)(0.5), -0.5 - 2 * 0.5 + 3 * 0.5, rtol=1e-5)
