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
from numpyro.infer.util import compute_log_probs, log_density

from numpyro_fed.basics.errors import DataError, ModelError
from numpyro_fed.data.silo_data import read
from numpyro_fed.numerics.losses import beta_loss, gamma_loss, generalised_cross_entropy, log_loss
from numpyro_fed.testing import check_decomposition
from numpyro_fed.text.handlers import at_silo, generalised, joint
from numpyro_fed.text.silo_plate import silo_plate
from numpyro_fed.text.split import split

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


@pytest.mark.slow
def test_the_joint_model_runs_under_nuts():
    mcmc = MCMC(NUTS(joint(model, SILOS)), num_warmup=5, num_samples=4, progress_bar=False)
    mcmc.run(jax.random.key(0))
    samples = mcmc.get_samples()
    assert samples["beta"].shape == (4, 3)
    assert samples["silo_1/b"].shape == (4, 4, 1)


@pytest.mark.slow
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
    with pytest.raises(DataError, match=r"'row' .* 0.*at least one"):
        silo_plate("row", 0)
    with pytest.raises(ModelError, match=r"'row' .*subsample_size=2.*leave"):
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


RNG = np.random.default_rng(0)
MIXED = [
    {
        "y": RNG.normal(size=(n, 3)).astype(np.float32),
        "v": RNG.normal(size=(n, 2)).astype(np.float32),
        "c": RNG.integers(0, 2, n),
        "seen": RNG.random(n) < 0.7,
    }
    for n in (2, 4)
]


def mixed(y, v, c, seen):
    """Global and local latents; a row in two plates, a vector, a count, a mask and a factor."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    numpyro.factor("pull", -(mu**2))
    with silo_plate("row", len(y), dim=-2):
        s = numpyro.sample("s", dist.LogNormal(mu, 1))
        with numpyro.plate("visit", 3):
            numpyro.sample("y", dist.Normal(mu, s), obs=y)
    with silo_plate("other", len(y)):
        b = numpyro.sample("b", dist.Normal(mu, 1))
        numpyro.sample("v", dist.Normal(b[:, None], jnp.ones(2)).to_event(1), obs=v)
        with handlers.mask(mask=seen), handlers.scale(scale=2.0):
            numpyro.sample("c", dist.Bernoulli(logits=b), obs=c)
        numpyro.factor("push", -(b**2))


def terms(model, silo, x64=False):
    """The split model's prior and rows at one point of one silo, and its sites."""
    with jax.enable_x64(x64):
        data = read([silo])
        fm, size = split(model, data), len(silo["y"])
        rng = np.random.default_rng(1)
        z_L = {p.name: jnp.asarray(rng.normal(size=(size, p.dim))) for p in fm.plates}
        z_G = jnp.full(fm.dim, 0.3)
        return fm.log_prior({}, z_G), jax.jit(fm.log_silo)({}, z_G, z_L, data[0]), fm.sites


@pytest.mark.parametrize("x64", [False, True])
def test_the_log_loss_changes_nothing(x64):
    plain, general = (terms(m, MIXED[1], x64) for m in (mixed, generalised(mixed, log_loss)))
    jax.tree.map(np.testing.assert_array_equal, general[:2], plain[:2])
    assert general[2] == plain[2]


@pytest.mark.slow
def test_a_generalised_model_splits():
    check_decomposition(generalised(mixed, gamma_loss(1.2)), MIXED, num_points=1)


def test_only_observed_sites_take_the_loss_and_masks_and_scales_hold():
    silo, beta = MIXED[1], beta_loss(1.4)
    point = {"mu": 0.3, "s": np.full((4, 1), 0.8), "b": np.linspace(-1, 1, 4)}
    found = compute_log_probs(generalised(mixed, beta), (), silo, point, sum_log_prob=False)[0]
    plain = compute_log_probs(mixed, (), silo, point, sum_log_prob=False)[0]
    for name in ("mu", "pull", "s", "b", "push"):
        np.testing.assert_array_equal(found[name], plain[name])
    b = point["b"]
    normal, vector = dist.Normal(0.3, point["s"]), dist.Normal(b[:, None], np.ones(2)).to_event(1)
    np.testing.assert_allclose(found["y"], -beta(normal, silo["y"]), rtol=1e-6)
    np.testing.assert_allclose(found["v"], -beta(vector, silo["v"]), rtol=1e-6)
    labels = np.where(silo["seen"], -2 * beta(dist.Bernoulli(logits=b), silo["c"]), 0)
    np.testing.assert_allclose(found["c"], labels, rtol=1e-5)
    assert {n: np.shape(v) for n, v in found.items()} == {n: np.shape(v) for n, v in plain.items()}


def test_obs_mask_leaves_the_imputed_part_a_log_density():
    def partly(y, seen):
        with silo_plate("row", len(y)):
            numpyro.sample("y", dist.Normal(0, 1), obs=y, obs_mask=seen)

    y, seen = np.array([0.5, 9.0]), np.array([True, False])
    text, beta = handlers.seed(generalised(partly, beta_loss(1.5)), 0), beta_loss(1.5)
    found, trace = compute_log_probs(text, (y, seen), {}, {}, sum_log_prob=False)
    np.testing.assert_allclose(found["y_observed"], [-beta(dist.Normal(0, 1), 0.5), 0], rtol=1e-6)
    drawn = trace["y_unobserved"]["value"]
    expected = [0, dist.Normal(0, 1).log_prob(drawn[1])]
    np.testing.assert_allclose(found["y_unobserved"], expected, rtol=1e-6)


def test_the_loss_is_given_the_distribution_as_written():
    def text(y):
        with silo_plate("row", len(y)), handlers.mask(mask=np.array([True, False])):
            numpyro.sample("y", dist.Normal(1.0, 2.0), obs=y)

    def absolute(distribution, value):
        return abs(value - distribution.loc)

    found, _ = log_density(generalised(text, absolute), (np.array([4.0, np.nan]),), {}, {})
    assert found == -3


def test_a_generalised_model_predicts_from_its_own_distributions():
    def text(y=None):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with silo_plate("row", 5):
            numpyro.sample("y", dist.Normal(mu, 1), obs=y)

    draws = (
        Predictive(m, num_samples=3)(jax.random.key(0)) for m in (text, generalised(text, log_loss))
    )
    jax.tree.map(np.testing.assert_array_equal, *draws)
    site = trace_of(generalised(text, log_loss), np.zeros(5))["y"]
    key = jax.random.key(1)
    np.testing.assert_array_equal(
        site["fn"].sample(key), dist.Normal(site["fn"].mean, 1).sample(key)
    )
    assert site["fn"].support is dist.Normal.support
    assert site["fn"].shape() == (5,)


def test_a_generalised_distribution_passes_through_jit_and_vmap():
    def text(y):
        with silo_plate("row", len(y)):
            numpyro.sample("y", dist.Normal(jnp.zeros(2), 1), obs=y)

    y = np.array([[0.0, 1.0], [2.0, 9.0]])
    fn = trace_of(generalised(text, beta_loss(1.5)), y[0])["y"]["fn"]
    expected = np.stack([fn.log_prob(row) for row in y])
    found = jax.jit(jax.vmap(lambda d, row: d.log_prob(row), (None, 0)))(fn, y)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_the_handler_is_a_context_too_and_refuses_what_is_no_loss():
    with generalised(loss=beta_loss(1.5)), handlers.trace() as trace:
        numpyro.sample("y", dist.Normal(0, 1), obs=1e6)
    assert trace["y"]["fn"].log_prob(1e6) > -3
    with pytest.raises(TypeError, match=r"loss .*function.*None"):
        generalised(model)


def test_a_loss_that_does_not_fit_is_refused_at_its_site():
    def text(y):
        with silo_plate("row", len(y)):
            numpyro.sample("y", dist.StudentT(3, 0, 1), obs=y)

    held = read([{"y": np.zeros(3)}])
    with pytest.raises(ModelError, match=r"site 'y': .*StudentT"):
        split(generalised(text, beta_loss(1.5)), held)
    with pytest.raises(ModelError, match=r"site 'y': generalised_cross_entropy .*discrete"):
        split(generalised(text, generalised_cross_entropy(0.5)), held)
    with pytest.raises(ModelError, match=r"site 'y': .* \(\),.* \(3,\)"):
        split(generalised(text, lambda d, y: (y**2).sum()), held)
