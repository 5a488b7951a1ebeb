"""log_prior plus all rows is the log density of the joint model, for models of many kinds."""

from contextlib import nullcontext

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from hypothesis import HealthCheck, given, seed, settings
from numpyro import handlers
from numpyro.contrib.module import eqx_module
from numpyro.infer.reparam import LocScaleReparam
from numpyro.infer.util import potential_energy
from problems import cut
from random_models import Problem, models, partitions

from numpyro_fed.basics.errors import DataError, ModelError
from numpyro_fed.data.silo_data import read
from numpyro_fed.testing import check_decomposition
from numpyro_fed.text.handlers import joint, local_name
from numpyro_fed.text.silo_plate import silo_plate
from numpyro_fed.text.split import split
from numpyro_fed.text.traces import Traces

RNG = np.random.default_rng(0)


def both_sides(model, held):
    """NumPyro's joint log density, the prior and the rows, at one random point."""
    data = read(held)
    fm, traces = split(model, data), Traces(model)
    sizes = [traces.at(silo).structure.sizes for silo in data]
    rng = np.random.default_rng(0)
    z_G = rng.normal(size=fm.dim)
    z_L = [{p.name: rng.normal(size=(n[p.name], p.dim)) for p in fm.plates} for n in sizes]
    local = [(s, p.name) for p in fm.plates for s in fm.named("latent", p.name)]

    @jax.jit
    def evaluate(z_G, z_L, data):
        theta, values = fm.init_theta(jax.random.key(0)), {}
        values |= fm.constrain_theta(theta)
        values |= {s.name: z_G[s.start : s.stop].reshape(s.shape) for s in fm.named("latent")}
        terms = []
        for j, silo in enumerate(data):
            private = fm.init_private(jax.random.key(j), silo)
            own = fm.constrain_theta(private)
            for s, plate in local:
                rows = z_L[j][plate][:, s.start : s.stop]
                own[s.name] = jnp.moveaxis(rows.reshape(-1, *s.shape), 0, s.axis)
            values |= {local_name(j, name): value for name, value in own.items()}
            terms.append(fm.log_silo({**theta, **private}, z_G, z_L[j], silo))
        seeded = handlers.seed(joint(model, [d.kwargs for d in data]), 0)
        return -potential_energy(seeded, (), {}, values), fm.log_prior(theta, z_G), terms

    return evaluate(*jax.tree.map(jnp.asarray, (z_G, z_L, data)))


def agree(problem, rtol):
    expected, prior, terms = both_sides(problem.model, problem.silos)
    terms = [np.asarray(r, np.float64) for r in [prior, *jax.tree.leaves(terms)]]
    scale = sum(np.abs(r).sum() for r in terms)
    return abs(float(expected) - sum(r.sum() for r in terms)) <= rtol * scale


@pytest.mark.slow
@pytest.mark.parametrize(("x64", "rtol", "number"), [(False, 1e-5, 0), (True, 1e-10, 2)])
def test_prior_plus_rows_is_the_joint_density_of_random_models(x64, rtol, number):
    @seed(number)
    @settings(
        max_examples=25,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(models(max_latents=2, max_silos=2, max_rows=3))
    def holds(problem):
        assert agree(problem, rtol)

    with jax.enable_x64(x64):
        holds()


@pytest.mark.slow
@settings(max_examples=5, deadline=None, derandomize=True, database=None)
@given(models(max_latents=2, max_silos=3))
def test_random_models_pass_the_whole_check(problem):
    check_decomposition(problem.model, problem.silos, num_points=1)


def glmm(x, y=None):
    beta = numpyro.sample("beta", dist.Normal(0, 10).expand([x.shape[-1]]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(2.0))
    with silo_plate("child", x.shape[0], dim=-2):
        b = numpyro.sample("b", dist.Normal(0, scale))
        with numpyro.plate("visit", x.shape[1], dim=-1):
            numpyro.sample("y", dist.Bernoulli(logits=x @ beta + b), obs=y)


def hospitals(hospital, n_hospitals, x, y=None):
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with silo_plate("hospital", n_hospitals):
        u = numpyro.sample("u", dist.Normal(0, 1))
    with silo_plate("patient", x.shape[0]):
        numpyro.sample("y", dist.Normal(mu + u[hospital] + x, sigma), obs=y)


def glmm_silos(sizes=(4, 3)):
    return [
        {"x": RNG.normal(size=(n, 4, 2)), "y": RNG.integers(0, 2, (n, 4)).astype(float)}
        for n in sizes
    ]


def rows(*sizes):
    return [{"y": RNG.normal(size=n)} for n in sizes]


def test_rows_nested_in_an_ordinary_plate():
    check_decomposition(glmm, glmm_silos())


def test_an_outer_plate_that_rows_index():
    held = [
        {"hospital": np.array([0, 1, 1]), "n_hospitals": 2, "x": np.zeros(3), "y": np.ones(3)},
        {"hospital": np.zeros(4, int), "n_hospitals": 1, "x": np.zeros(4), "y": np.ones(4)},
    ]
    check_decomposition(hospitals, held)


def test_parameters_outside_and_inside():
    def model(y):
        theta = numpyro.param("theta", 1.0, constraint=dist.constraints.positive)
        with silo_plate("row", y.shape[0]):
            phi = numpyro.param("phi", 0.5, constraint=dist.constraints.unit_interval)
            numpyro.sample("y", dist.Normal(phi, theta), obs=y)

    check_decomposition(model, rows(3, 2))


@pytest.mark.slow
@pytest.mark.parametrize("inside", [False, True])
def test_a_network_as_theta(inside):
    def model(y):
        make = eqx.nn.MLP(1, 1, 4, 1, key=jax.random.key(0))
        net = None if inside else eqx_module("net", make)
        with silo_plate("row", y.shape[0]):
            net = eqx_module("net", make) if inside else net
            numpyro.sample("y", dist.Normal(jax.vmap(net)(y[:, None])[:, 0], 1), obs=y)

    check_decomposition(model, rows(3, 2))


@pytest.mark.parametrize("centered", [0.0, 0.3, None])
def test_reparametrised_sites(centered):
    @handlers.reparam(config={k: LocScaleReparam(centered) for k in ("mu", "b")})
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(1, 2))
        with silo_plate("row", y.shape[0]):
            b = numpyro.sample("b", dist.Normal(mu, 3))
            numpyro.sample("y", dist.Normal(b, 1), obs=y)

    check_decomposition(model, rows(3, 2))


def test_scaled_and_masked_sites():
    def model(y, seen):
        with handlers.scale(scale=0.5):
            mu = numpyro.sample("mu", dist.HalfNormal(1))
        with silo_plate("row", y.shape[0]), handlers.mask(mask=seen), handlers.scale(scale=3.0):
            b = numpyro.sample("b", dist.Gamma(mu, 1))
            numpyro.sample("y", dist.Normal(b, 1), obs=y)

    check_decomposition(model, [dict(s, seen=s["y"] > 0) for s in rows(3, 4)])


def with_sample_shape(y):
    w = numpyro.sample("w", dist.HalfNormal(1), sample_shape=(3,))
    with silo_plate("row", y.shape[0]):
        b = numpyro.sample("b", dist.Normal(0, 1), sample_shape=(2, 1))
        numpyro.sample("y", dist.Normal(w.sum() + b.sum(0), 1), obs=y)


def test_the_check_knows_shapes_from_numpyro_alone(monkeypatch):
    check_decomposition(with_sample_shape, rows(3, 2), num_points=1)
    monkeypatch.setattr(
        "numpyro_fed.text.site_table.unconstrained_shape", lambda site: tuple(site["fn"].shape())
    )
    with pytest.raises(ModelError, match=r"'w' .*\(3,\) .* \(\) "):
        check_decomposition(with_sample_shape, rows(3), num_points=1)


def test_deterministic_sites_that_read_rows_are_each_silos_own():
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        mean = numpyro.deterministic("mean", mu + y.mean())
        with silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(mean, 1), obs=y)

    held = rows(3, 2)
    assert agree(Problem(model, held, None), 1e-5)
    trace = handlers.trace(handlers.seed(joint(model, held), 0)).get_trace()
    assert {n for n in trace if "mean" in n} == {"silo_0/mean", "silo_1/mean"}


def test_supports_whose_bounds_depend_on_other_sites():
    def model(y):
        low = numpyro.sample("low", dist.Normal(0, 1))
        high = numpyro.sample("high", dist.Uniform(low, low + 2))
        with silo_plate("row", y.shape[0]):
            b = numpyro.sample("b", dist.Uniform(low, high))
            c = numpyro.sample("c", dist.Uniform(low, b))
            numpyro.sample("y", dist.Normal(c, 1), obs=y)

    check_decomposition(model, rows(3, 2))


def test_nested_silo_plates():
    def model(y):
        with silo_plate("a", y.shape[0], dim=-2):
            u = numpyro.sample("u", dist.Normal(0, 1))
            with silo_plate("b", y.shape[1], dim=-1):
                numpyro.sample("y", dist.Normal(u, 1), obs=y)

    check_decomposition(model, [{"y": np.ones((2, 3))}, {"y": np.ones((4, 3))}])


def test_observations_wider_than_the_plate():
    def model(y, inner):
        visits = numpyro.plate("visit", y.shape[0], dim=-2) if inner else nullcontext()
        with silo_plate("row", y.shape[-1], dim=-1), visits:
            numpyro.sample("y", dist.Normal(0, 1), obs=y)

    silo = {"y": RNG.normal(size=(2, 3))}
    check_decomposition(model, [{**silo, "inner": True}])
    with pytest.raises(ModelError, match=r"silo 0: site 'y' .*dim -2.*no plate"):
        check_decomposition(model, [{**silo, "inner": False}])


def test_a_silo_plate_that_is_entered_twice():
    def model(y):
        row = silo_plate("row", y.shape[0])
        with row:
            b = numpyro.sample("b", dist.Exponential(1))
        with row:
            numpyro.sample("y", dist.Normal(b, 1), obs=y)

    check_decomposition(model, rows(3, 2))


def centred(y):
    with silo_plate("row", y.shape[0]):
        b = numpyro.sample("b", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(b - b[::-1].cumsum(), 1), obs=y)


@pytest.mark.filterwarnings("ignore:the model's log density changes")
def test_a_row_that_sees_the_latents_of_others_is_refused():
    with pytest.raises(ModelError, match=r"silo 0, silo_plate 'row': .*globals"):
        check_decomposition(centred, rows(4, 2))


@pytest.mark.filterwarnings("ignore:the model's log density changes")
@pytest.mark.parametrize("sizes", [(4, 4), (4, 3)])
def test_a_row_that_sees_the_data_of_others_is_refused(sizes):
    def model(y):
        with silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(y.mean(), 1), obs=y)

    with pytest.raises(ModelError, match=r"silo_plate 'row': .*\['y"):
        check_decomposition(model, rows(*sizes), num_points=1)


def test_what_is_as_long_as_the_rows_by_chance_is_none_of_them():
    def model(y, time):
        with silo_plate("row", y.shape[0], dim=-2), numpyro.plate("visit", time.shape[0]):
            numpyro.sample("y", dist.Normal(time, 1), obs=y)

    held = [{"y": RNG.normal(size=(3, 3)), "time": np.arange(3.0)}] * 2
    check_decomposition(model, held, num_points=1)


@pytest.mark.slow
def test_every_pair_of_rows_is_told_apart():
    def model(y, of):
        with silo_plate("row", y.shape[0]):
            b = numpyro.sample("b", dist.Normal(0, 1))
            numpyro.sample("y", dist.Normal(b[of], 1), obs=y)

    own = np.arange(7)
    check_decomposition(model, [{"y": np.zeros(7), "of": own}])
    for row, other in [(6, 5), (0, 4), (3, 2)]:
        of = np.where(own == row, other, own)
        with pytest.raises(ModelError, match=f"row {row} went"):
            check_decomposition(model, [{"y": np.zeros(7), "of": of}], num_points=1)


@pytest.mark.filterwarnings("ignore:the model's log density changes")
def test_a_model_that_changes_between_calls_is_refused():
    calls = []

    def model(y):
        calls.append(0)
        with silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(float(len(calls)), 1), obs=y)

    with pytest.raises(ModelError, match=r"joint log density .* no state"):
        check_decomposition(model, rows(3, 2))


def test_values_outside_of_the_support_are_reported():
    def model(y, known):
        high = 1 if known else numpyro.sample("high", dist.Beta(1, 1))
        with silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Uniform(0, high), obs=y)

    silo = {"y": np.full(3, 2.0)}
    with pytest.raises(DataError, match=r"site 'y': .* 2\. .* 0 and 1"):
        check_decomposition(model, [{**silo, "known": True}])
    with pytest.raises(ModelError, match=r"-inf.*supports"):
        check_decomposition(model, [{**silo, "known": False}])


def test_rtol_and_key_are_used():
    with pytest.raises(ModelError, match="moved"):
        check_decomposition(glmm, glmm_silos(), rtol=-1.0)
    check_decomposition(glmm, glmm_silos((2,)), key=jax.random.key(7), num_points=1)


@settings(max_examples=8, deadline=None, derandomize=True, database=None)
@given(partitions(6, max_silos=2))
def test_the_rows_do_not_depend_on_the_partition(sizes):
    pooled_rows = glmm_silos((6,))
    held = cut(pooled_rows[0], sizes)
    fm = split(glmm, read(held))
    whole = read(pooled_rows)
    rng = np.random.default_rng(1)
    z_G, z = jnp.asarray(rng.normal(size=fm.dim)), jnp.asarray(rng.normal(size=(6, 1)))
    pooled = jax.jit(fm.log_silo)({}, z_G, {"child": z}, whole[0])["child"]
    at, parts = 0, []
    for silo in read(held):
        n = len(silo.arrays["y"])
        parts.append(jax.jit(fm.log_silo)({}, z_G, {"child": z[at : at + n]}, silo)["child"])
        at += n
    np.testing.assert_allclose(np.concatenate(parts), pooled, rtol=1e-5)
