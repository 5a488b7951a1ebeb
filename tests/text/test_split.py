"""The site table, the pure log densities, and every structural error."""

import sys

import jax
import jax.numpy as jnp
import models
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.contrib.module import eqx_module
from numpyro.distributions import constraints
from numpyro.infer import init_to_value

from numpyro_fed.basics.errors import DataError, MissingExtraError, ModelError
from numpyro_fed.data.silo_data import read
from numpyro_fed.text.silo_plate import silo_plate
from numpyro_fed.text.split import split

Y = np.array([0.5, -1.0, 2.0], np.float32)


def make(model, *held):
    data = read(held or [{"y": Y}])
    return split(model, data), jax.tree.map(jnp.asarray, data)


def scaled(y):
    mu = numpyro.sample("mu", dist.Normal(1, 2))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    w = numpyro.sample("w", dist.Dirichlet(jnp.ones(3)))
    numpyro.deterministic("double", 2 * mu)
    theta = numpyro.param("theta", 2.0, constraint=constraints.positive)
    with silo_plate("row", y.shape[0], dim=-2):
        phi = numpyro.param("phi", 0.25, constraint=constraints.unit_interval)
        b = numpyro.sample("b", dist.LogNormal(mu, sigma))
        with numpyro.plate("visit", 2):
            c = numpyro.sample("c", dist.Dirichlet(w))
        numpyro.deterministic("half", b / 2)
        numpyro.sample("y", dist.Normal(b + theta * phi + c[..., :1, 0], 1), obs=y[:, None])


def test_the_site_table_has_names_kinds_plates_shapes_and_places():
    fm, _ = make(scaled)
    table = {s.name: s for s in fm.sites}
    assert {n: (s.kind, s.plate) for n, s in table.items()} == {
        "mu": ("latent", None),
        "sigma": ("latent", None),
        "w": ("latent", None),
        "double": ("deterministic", None),
        "theta": ("param", None),
        "phi": ("param", "row"),
        "b": ("latent", "row"),
        "c": ("latent", "row"),
        "half": ("deterministic", "row"),
        "y": ("observed", "row"),
    }
    assert [table[n].shape for n in ("mu", "w", "b", "c")] == [(), (2,), (1,), (2, 2)]
    assert [(table[n].start, table[n].stop) for n in ("mu", "sigma", "w")] == [
        (0, 1),
        (1, 2),
        (2, 4),
    ]
    assert (table["c"].start, table["c"].stop, table["c"].axis) == (1, 5, 0)
    assert fm.dim == 4
    assert fm.plates[0].dim == 5
    assert not fm.plates[0].outer


def test_log_silo_is_the_hand_computed_density_of_each_row():
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(1, 2))
        with silo_plate("row", y.shape[0]):
            b = numpyro.sample("b", dist.LogNormal(mu, 1))
            numpyro.sample("y", dist.Normal(b, 3), obs=y)

    fm, (silo,) = make(model)
    z = jnp.array([0.1, -0.4, 0.7])
    rows = fm.log_silo({}, jnp.array([0.3]), {"row": z[:, None]}, silo)["row"]
    by_hand = dist.Normal(0.3, 1).log_prob(z) + dist.Normal(jnp.exp(z), 3).log_prob(Y)
    np.testing.assert_allclose(rows, by_hand, rtol=1e-6)
    at_zero = dist.Normal(0, 1).log_prob(0.0) + dist.Normal(1, 3).log_prob(Y)
    np.testing.assert_allclose(fm.terms_at_zero(silo)["row"], at_zero, rtol=1e-6)
    prior = fm.log_prior({}, jnp.array([0.3]))
    np.testing.assert_allclose(prior, dist.Normal(1, 2).log_prob(0.3), rtol=1e-6)


def test_rows_may_run_over_a_later_axis():
    def model(y):
        with silo_plate("row", y.shape[0]), numpyro.plate("visit", 2):
            b = numpyro.sample("b", dist.Normal(0, 1).expand([4]).to_event(1))
            numpyro.sample("y", dist.Normal(b.sum(-1), 1), obs=jnp.stack([y, y]))

    fm, (silo,) = make(model)
    site = fm.named("latent", "row")[0]
    assert (site.shape, site.axis) == ((2, 4), 1)
    z = jax.random.normal(jax.random.key(0), (2, 3, 4))
    z_L = {"row": jnp.moveaxis(z, 1, 0).reshape(3, 8)}
    by_hand = dist.Normal(0, 1).log_prob(z).sum((0, 2))
    by_hand += dist.Normal(z.sum(-1), 1).log_prob(Y).sum(0)
    rows = fm.log_silo({}, jnp.zeros(0), z_L, silo)["row"]
    np.testing.assert_allclose(rows, by_hand, rtol=1e-5)
    np.testing.assert_array_equal(fm.constrain_local({}, jnp.zeros(0), z_L, silo)["b"], z)


def test_a_plate_with_nothing_but_a_factor_has_rows():
    def model(y):
        with silo_plate("row", y.shape[0]):
            numpyro.factor("f", -y)

    fm, (silo,) = make(model)
    np.testing.assert_allclose(fm.log_silo({}, jnp.zeros(0), {}, silo)["row"], -Y)
    assert fm.log_prior({}, jnp.zeros(0)) == 0


def test_log_prior_counts_global_factors_scales_and_log_determinants():
    def model(y):
        with handlers.scale(scale=0.5):
            s = numpyro.sample("s", dist.Exponential(2.0))
        numpyro.factor("pull", -s)
        with silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(0, s), obs=y)

    fm, _ = make(model)
    s, z = jnp.exp(0.3), jnp.array([0.3])
    by_hand = 0.5 * (dist.Exponential(2.0).log_prob(s) + 0.3) - s
    np.testing.assert_allclose(fm.log_prior({}, z), by_hand, rtol=1e-6)


@pytest.mark.slow
def test_values_survive_the_round_trip_to_unconstrained_space():
    fm, (silo,) = make(scaled)
    b = jnp.array([[0.5], [1.0], [4.0]])
    c = jax.random.dirichlet(jax.random.key(0), jnp.ones(3), (3, 2))
    w = jnp.array([0.2, 0.3, 0.5])
    init = init_to_value(values={"mu": -1.5, "sigma": 0.7, "w": w, "b": b, "c": c})
    z_G = fm.init_global(jax.random.key(0), init)
    z_L = fm.init_local(jax.random.key(0), silo, init)
    theta = {**fm.init_theta(jax.random.key(0)), **fm.init_private(jax.random.key(0), silo)}
    there = fm.constrain_global(theta, z_G)
    here = fm.constrain_local(theta, z_G, z_L, silo)
    assert there.keys() == {"mu", "sigma", "w", "double"}
    assert here.keys() == {"b", "c", "half"}
    for name, value in {"mu": -1.5, "sigma": 0.7, "w": w, "double": -3.0}.items():
        np.testing.assert_allclose(there[name], value, rtol=1e-5)
    for name, value in {"b": b, "c": c, "half": b / 2}.items():
        np.testing.assert_allclose(here[name], value, rtol=1e-4)


def test_starting_points_are_zeros_unless_asked_for():
    fm, (silo,) = make(scaled)
    assert (fm.init_global(jax.random.key(0)) == jnp.zeros(4)).all()
    assert (fm.init_local(jax.random.key(0), silo)["row"] == jnp.zeros((3, 5))).all()


def test_parameters_start_at_their_values_shared_and_private_apart():
    fm, (silo,) = make(scaled)
    shared = fm.init_theta(jax.random.key(0))
    private = fm.init_private(jax.random.key(0), silo)
    assert shared.keys() == {"theta"}
    assert private.keys() == {"phi"}
    np.testing.assert_allclose(fm.constrain_theta(shared)["theta"], 2.0, rtol=1e-6)
    np.testing.assert_allclose(fm.constrain_theta(private)["phi"], 0.25, rtol=1e-6)


def test_a_plate_whose_latents_reach_other_rows_is_outer():
    def model(of, w):
        with silo_plate("group", w.shape[0]):
            u = numpyro.sample("u", dist.Normal(0, 1))
        with silo_plate("row", of.shape[0]):
            b = numpyro.sample("b", dist.Normal(u[of], 1))
            numpyro.sample("y", dist.Normal(b, 1), obs=jnp.zeros(of.shape[0]))

    fm, (silo,) = make(model, {"of": np.array([0, 1, 1]), "w": np.zeros(2)})
    assert {p.name: p.outer for p in fm.plates} == {"group": True, "row": False}
    assert fm.sizes(silo) == {"group": 2, "row": 3}
    assert [s.name for s in fm.named("latent", "group")] == ["u"]


def test_a_model_without_globals_has_an_empty_server():
    def model(y):
        with silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(0, 1), obs=y)

    fm, _ = make(model)
    assert fm.dim == 0
    assert fm.init_global(jax.random.key(0)).shape == (0,)


def test_a_sample_shape_is_part_of_the_site(double):
    """At the global level, and in a silo plate, which turns it into an expanded distribution."""

    def model(y, how):
        normal = dist.LogNormal(0, 1)
        if how == "sample_shape":
            w = numpyro.sample("w", normal, sample_shape=(3,))
        else:
            w = numpyro.sample("w", normal.expand([3]))
        with silo_plate("row", y.shape[0]):
            if how == "sample_shape":
                b = numpyro.sample("b", normal, sample_shape=(2, 1))
            else:
                b = numpyro.sample("b", normal.expand([2, y.shape[0]]))
            numpyro.sample("y", dist.Normal(w.sum() + b.sum(0), 1), obs=y)

    z_G, z = jnp.array([0.1, -0.5, 0.3]), jax.random.normal(jax.random.key(0), (3, 2))
    found = []
    for how in ("sample_shape", "expand"):
        fm, (silo,) = make(model, {"y": Y, "how": how})
        assert [(s.shape, s.axis) for s in fm.sites[:2]] == [((3,), None), ((2,), 1)]
        rows = fm.log_silo({}, z_G, {"row": z}, silo)["row"]
        found.append((fm.log_prior({}, z_G), rows, fm.constrain_global({}, z_G)["w"]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), *found)
    by_hand = dist.Normal(0, 1).log_prob(z_G).sum()
    np.testing.assert_allclose(found[0][0], by_hand, rtol=1e-12)


def test_what_is_observed_outside_and_is_no_data_belongs_to_the_prior(double):
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        s = numpyro.sample("s", dist.HalfNormal(1))
        numpyro.sample("earlier", dist.Normal(mu, s), obs=0.7)
        with silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu, s), obs=y)

    fm, _ = make(handlers.condition(model, {"s": 2.0}))
    assert fm.dim == 1
    terms = fm.prior_terms({}, jnp.array([0.3]))
    by_hand = {
        "mu": dist.Normal(0, 1).log_prob(0.3),
        "s": dist.HalfNormal(1).log_prob(2.0),
        "earlier": dist.Normal(0.3, 2.0).log_prob(0.7),
    }
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), terms, by_hand)


def reading(y, of):
    """Deterministic sites outside of the plates, of every kind."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    numpyro.deterministic("double", 2 * mu)
    mean = numpyro.deterministic("mean", y.mean())
    with silo_plate("group", 2):
        u = numpyro.sample("u", dist.Normal(mu, 1))
    with silo_plate("row", y.shape[0]):
        b = numpyro.sample("b", dist.Normal(u[of], 1))
        numpyro.sample("y", dist.Normal(b + mean, 1), obs=y)
    numpyro.deterministic("residual", y - b)
    numpyro.deterministic("total", mu * u.sum())


def test_a_deterministic_site_that_reads_rows_is_local():
    held = [{"y": Y, "of": np.array([0, 1, 1])}, {"y": Y[:2], "of": np.array([0, 1])}]
    fm, (_, silo) = make(reading, *held)
    home = {s.name: s.plate for s in fm.sites if s.kind == "deterministic"}
    assert home == {"double": None, "mean": "row", "residual": "row", "total": "group"}
    assert {p.name: p.outer for p in fm.plates} == {"group": True, "row": False}
    z_L = {"group": jnp.ones((2, 1)), "row": jnp.array([[0.1], [0.2]])}
    here = fm.constrain_local({}, jnp.array([0.5]), z_L, silo)
    np.testing.assert_allclose(here["residual"], Y[:2] - jnp.array([0.1, 0.2]), rtol=1e-6)
    np.testing.assert_allclose((here["mean"], here["total"]), (-0.25, 1.0), rtol=1e-6)
    assert fm.constrain_global({}, jnp.array([0.5])).keys() == {"mu", "double"}


@pytest.mark.parametrize("sizes", [(3, 27), (27, 3)])
@pytest.mark.parametrize("part", ["scale", "factor"])
def test_a_prior_that_depends_on_the_number_of_rows_is_refused(sizes, part):
    def model(y):
        n = y.shape[0]
        mu = numpyro.sample("mu", dist.Normal(0, n**-0.5 if part == "scale" else 1))
        numpyro.factor("pull", -(mu**2) * (n if part == "factor" else 1))
        with silo_plate("row", n):
            numpyro.sample("y", dist.Normal(mu, 1), obs=y)

    name, (here, there) = {"scale": "mu", "factor": "pull"}[part], sizes
    message = rf"site '{name}' differs .* silo 2, .*\({there},.* silo 0, .*\({here},.*all rows"
    with pytest.raises(ModelError, match=message):
        make(model, *({"y": np.zeros(n)} for n in (here, here, there)))


def support_on_data(y):
    mu = numpyro.sample("mu", dist.Uniform(0, 1 + y.max() ** 2))
    with silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def factor_on_data(y):
    numpyro.factor("mu", y.sum())
    with silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(0, 1), obs=y)


def param_on_data(y):
    mu = numpyro.param("mu", jnp.asarray(y).mean())
    with silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def mutable(y):
    numpyro.primitives.mutable("state", jnp.zeros(()))
    with silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(0, 1), obs=y)


def raising(y):
    with silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(jnp.zeros(7), 1), obs=y)


def noisy(y):
    noise = jax.random.normal(numpyro.prng_key(), y.shape)
    with silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(noise, 1), obs=y)


def improper(y):
    def step(carry, _):
        return carry, numpyro.sample("mu", dist.ImproperUniform(constraints.real, (), ()))

    scan(step, 0.0, None, length=2)
    raising(y)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (models.no_silo_plate, "no silo_plate.*Replace the numpyro.plate"),
        (models.observed_outside, "'y' .*outside .*Put 'y' inside"),
        (models.global_on_local, "'mu' .*silo_plate 'row'.*Put 'mu' inside"),
        (models.global_on_data, "'mu' .*data.*Put 'mu' inside"),
        (support_on_data, "'mu' depends on data"),
        (factor_on_data, "'mu' depends on data"),
        (param_on_data, "'mu' depends on data"),
        (models.discrete, r"'k' .*Poisson.*sum it out"),
        (mutable, "'state' .*Use numpyro.param"),
        (raising, r"raised .* silo 0, .*\{'y': \(3,\)\}"),
        (noisy, r"'y' .*prng_key\(\).*numpyro.sample"),
        (
            improper,
            r"silo 0: .*'mu' is flat .*scan",
        ),
    ],
)
def test_a_model_that_cannot_be_split_is_refused(model, message):
    with pytest.raises(ModelError, match=message):
        make(model)


def sampled(name):
    return lambda: numpyro.sample(name, dist.Normal(0, 1))


def in_rows(inside, name="row", size=3):
    """Return a function that runs another one in a silo plate of this name."""

    def run():
        with silo_plate(name, size):
            inside()

    return run


def in_scan():
    scan(lambda carry, _: (carry, sampled("row")()), 0.0, None, length=2)


def param(constraint):
    return lambda: numpyro.param("mu", 1.0, constraint=constraint)


POSITIVE = param(constraints.positive)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([in_rows(sampled("row"))], "a silo_plate of 3 rows and a sample site share .* 'row'"),
        ([sampled("row"), in_rows(sampled("b"))], "a sample site and a silo_plate of 3 rows share"),
        ([in_rows(in_scan)], "a silo_plate of 3 rows and a sample site share the name 'row'"),
        ([sampled("mu"), in_rows(sampled("mu"))], "a sample site and another sample site share"),
        (
            [lambda: numpyro.deterministic("row", 1.0), in_rows(sampled("b"))],
            "a numpyro.deterministic and a silo_plate of 3 rows share the name 'row'",
        ),
        (
            [in_rows(sampled("b")), in_rows(sampled("c"), size=1)],
            "a silo_plate of 3 rows and a silo_plate of 1 rows share",
        ),
        (
            [in_rows(sampled("b")), lambda: numpyro.plate("row", 3)],
            "a silo_plate of 3 rows and a plate share the name 'row'",
        ),
        ([in_rows(in_rows(sampled("b")))], "a silo_plate of 3 rows and another silo_plate of 3"),
        ([sampled("mu"), POSITIVE], r"a sample site and a parameter \(Positive\) .*name 'mu'"),
        ([POSITIVE, in_rows(sampled("b"), "mu")], r"a parameter \(Positive\) .* a silo_plate of 3"),
        ([POSITIVE, param(constraints.real)], r"\(Positive\) of all silos and .* \(Real\) of all"),
        (
            [POSITIVE, in_rows(POSITIVE)],
            "of all silos and a parameter .* of silo_plate 'row' share",
        ),
    ],
)
def test_two_things_of_one_name_are_refused(parts, words):
    def model(y):
        for part in parts:
            part()
        with silo_plate("patient", y.shape[0]):
            numpyro.sample("y", dist.Normal(0, 1), obs=y)

    with pytest.raises(ModelError, match=words + ".*Rename one of them"):
        make(model)


def test_a_plate_may_be_entered_again_and_a_parameter_read_again():
    def model(y):
        POSITIVE()
        for name in "bc":
            in_rows(sampled(name))()
        sigma = POSITIVE()
        with silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(0, sigma), obs=y)

    assert [s.name for s in make(model)[0].sites] == ["mu", "b", "c", "y"]


@pytest.mark.parametrize(
    "ask",
    [
        lambda y: np.unique(y),
        lambda y: y[y == 0],
        lambda y: jnp.zeros(int(y.max())),
        lambda y: 1.0 if y.sum() > 0 else 2.0,
    ],
    ids=["numpy", "rows", "int", "if"],
)
def test_a_text_that_asks_for_values_is_told_to_take_them_as_data(ask):
    def model(y):
        ask(y)
        with silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(0, 1), obs=y)

    message = r"values .* silo 0, .*\{'y': \(3,\)\}.*Make it data"
    with pytest.raises(ModelError, match=message):
        make(model)


def test_a_support_without_a_bijection_is_refused():
    class Sphere(dist.ProjectedNormal):
        pass

    def model(y):
        numpyro.sample("s", Sphere(jnp.ones(3)))
        with silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(0, 1), obs=y)

    with pytest.raises(ModelError, match=r"'s' .* no bijection.*reparam"):
        make(model)


def test_a_subsampled_silo_plate_is_refused():
    def model(y):
        with silo_plate("row", y.shape[0], 2):
            numpyro.sample("y", dist.Normal(0, 1), obs=y[:2])

    with pytest.raises(ModelError, match=r"silo 0: silo_plate 'row' .*subsample_size=2.*leave"):
        make(model)


def test_a_silo_without_rows_is_refused():
    def model(y):
        with silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(0, 1), obs=y)

    with pytest.raises(DataError, match=r"silo 1: silo_plate 'row' .* 0.*[Ll]eave"):
        make(model, {"y": Y}, {"y": Y[:0]})


def test_a_global_whose_shape_differs_between_silos_is_refused():
    def model(y):
        numpyro.sample("beta", dist.Normal(0, 1).expand([y.shape[0]]).to_event(1))
        with silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(0, 1), obs=y)

    with pytest.raises(ModelError, match=r"'beta' .*\(2,\).*silo 1.*\(3,\)"):
        make(model, {"y": Y}, {"y": Y[:2]})


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_a_site_that_only_some_silos_have_is_refused(names):
    def model(y, kind):
        with silo_plate("row", y.shape[0]):
            if kind == "a":
                numpyro.sample("extra", dist.Normal(0, 1))
            numpyro.sample("y", dist.Normal(0, 1), obs=y)

    here, there = ("silo 0", "silo 1") if names[0] == "a" else ("silo 1", "silo 0")
    message = f"'extra' exists at {here} but not at {there}.*mask"
    with pytest.raises(ModelError, match=message):
        make(model, *({"y": Y, "kind": kind} for kind in names))


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_a_site_before_others_is_missed_by_its_own_name(names):
    """It moves the places of the sites behind it, which are not to blame."""

    def model(y, kind):
        with silo_plate("row", y.shape[0]):
            if kind == "a":
                numpyro.sample("extra", dist.Normal(0, 1))
            b = numpyro.sample("b", dist.Normal(0, 1))
            numpyro.sample("y", dist.Normal(b, 1), obs=y)

    with pytest.raises(ModelError, match=r"^site 'extra' exists at silo \d but not at silo \d"):
        make(model, *({"y": Y, "kind": kind} for kind in names))


def test_silo_plates_that_differ_between_silos_are_refused():
    def model(y, kind):
        with silo_plate(kind, y.shape[0]):
            numpyro.factor("f", y)

    with pytest.raises(ModelError, match=r"'f'|silo plates"):
        make(model, {"y": Y, "kind": "a"}, {"y": Y, "kind": "b"})


def test_a_prior_that_depends_on_a_python_value_is_refused():
    def model(y, n):
        mu = numpyro.sample("mu", dist.Normal(0, n))
        with silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu, 1), obs=y)

    make(model, {"y": Y, "n": 2}, {"y": Y[:2], "n": 2})
    message = r"prior of the global site 'mu' .* at silo 1, .*'n': 5\}, but .* silo 0, .*'n': 2\}"
    with pytest.raises(ModelError, match=message):
        make(model, {"y": Y, "n": 2}, {"y": Y[:2], "n": 5})


def test_locals_may_depend_on_a_python_value_that_differs():
    def model(y, n):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu, n), obs=y)

    fm, (first, second) = make(model, {"y": Y, "n": 1}, {"y": Y, "n": 5})
    rows = [fm.log_silo({}, jnp.zeros(1), {}, silo)["row"] for silo in (first, second)]
    np.testing.assert_allclose(rows[1], dist.Normal(0, 5).log_prob(Y), rtol=1e-6)


def test_globals_may_depend_on_the_shape_of_data():
    def model(x):
        beta = numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
        with silo_plate("row", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ beta, 1), obs=x[:, 0])

    assert make(model, {"x": np.ones((2, 3))}, {"x": np.ones((5, 3))})[0].dim == 3


def test_a_network_without_equinox_names_the_extra(monkeypatch):
    def model(y):
        eqx_module("net", None)
        with silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(0, 1), obs=y)

    monkeypatch.setitem(sys.modules, "equinox", None)
    with pytest.raises(MissingExtraError, match=r"equinox.*numpyro-fed\[nn\]"):
        make(model)


def test_a_subsampled_plate_is_refused():
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with silo_plate("row", y.shape[0], dim=-2), numpyro.plate("t", 5, subsample_size=2):
            numpyro.sample("y", dist.Normal(mu, 1), obs=y[:, None])

    with pytest.raises(ModelError, match=r"'t' .*2 of 5 .*subsample_size"):
        make(model)


def test_a_masked_latent_is_warned_about():
    def model(y):
        with silo_plate("row", y.shape[0]):
            with handlers.mask(mask=y > 0):
                b = numpyro.sample("y_unobserved", dist.HalfNormal(1))
            numpyro.sample("y", dist.Normal(b, 1), obs=y)

    with pytest.warns(UserWarning, match=r"'y_unobserved' .*only the observed site"):
        make(model)


@pytest.mark.parametrize("inside", [False, True])
def test_a_flat_prior_is_warned_about_once_and_by_its_name(inside, recwarn):
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1).mask(inside))
        with silo_plate("row", y.shape[0]):
            b = numpyro.sample("b", dist.Normal(0, 1).mask(not inside))
            numpyro.sample("y", dist.Normal(mu + b, 1), obs=y)

    fm, _ = make(model, {"y": Y}, {"y": Y[:2]})
    name = "b" if inside else "mu"
    assert fm.improper == (name,)
    (warning,) = [str(w.message) for w in recwarn]
    assert f"prior of the latent site '{name}' is flat" in warning
    assert "Give it a proper prior" in warning


def test_a_mask_of_the_observed_site_alone_is_fine(recwarn):
    def model(y):
        with silo_plate("row", y.shape[0]):
            b = numpyro.sample("b", dist.HalfNormal(1))
            with handlers.mask(mask=y > 0):
                numpyro.sample("y", dist.Normal(b, 1), obs=y)

    make(model)
    assert not [w for w in recwarn if "masked" in str(w.message)]


def test_a_scope_around_a_silo_plate_is_named():
    def model(y):
        with handlers.scope(prefix="a"), silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(0, 1), obs=y)

    with pytest.raises(ModelError, match=r"handlers.scope .*'a/"):
        make(model)

    def beside_another(y):
        with silo_plate("other", y.shape[0]):
            numpyro.sample("b", dist.Normal(0, 1))
        model(y)

    with pytest.raises(ModelError, match=r"handlers.scope .*'a/"):
        make(beside_another)


# --- what must be the same at every silo ---------------------------------------------------------


def counted(y):
    """The support, and not the density in unconstrained space, depends on the number of rows."""
    t = numpyro.sample("t", dist.Uniform(0, y.shape[0]))
    with silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(t, 1), obs=y)


def counted_by_the_way(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    numpyro.deterministic("se", mu / y.shape[0] ** 0.5)
    with silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def counted_in_the_prior(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1 / y.shape[0] ** 0.5))
    with silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


@pytest.mark.parametrize("sizes", [(4, 400), (400, 4), (4, 4)])
@pytest.mark.parametrize(
    ("model", "what"),
    [
        (counted, "the value of the global site 't'"),
        (counted_by_the_way, "the value of the global site 'se'"),
        (counted_in_the_prior, "the prior of the global site 'mu'"),
    ],
)
def test_no_global_site_may_depend_on_a_number_of_rows(model, what, sizes):
    """Not even where all silos have the same: other partitions of the rows would differ."""
    other = "a silo with a row more" if sizes == (4, 4) else "silo 1"
    with pytest.raises(ModelError, match=f"{what}.*differs between silos.* at {other}"):
        split(model, read([{"y": np.zeros(n)} for n in sizes]))


@pytest.mark.parametrize("inside", [lambda f: f, jax.jit], ids=["outside", "in a jit"])
def test_no_global_site_may_depend_on_a_constant_that_differs(inside):
    """Wherever in the program the constant is."""

    def model(n, y):
        mu = numpyro.sample("mu", dist.Normal(0, 1).expand([2]).to_event(1))
        numpyro.deterministic("scaled", inside(lambda mu: mu * np.array([1.0, n]))(mu))
        with silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu.sum(), 1), obs=y)

    silos = read([{"n": n, "y": np.zeros(3)} for n in (1, 2)])
    each = r"is +0\.12573, -0\.26421 at silo 1, .* but +0\.12573 , -0\.132105 at silo 0"
    with pytest.raises(ModelError, match=rf"'scaled'.*{each}"):
        split(model, silos)


def test_a_global_site_may_be_nan_at_every_silo():
    def model(n, y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        numpyro.deterministic("unknown", jnp.where(mu > n, jnp.nan, jnp.nan))
        with silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu, 1), obs=y)

    split(model, read([{"n": n, "y": np.zeros(3)} for n in (1, 2)]))


def test_a_forgotten_outcome_is_named_by_the_data():
    def model(y):
        with silo_plate("row", y.shape[0]):
            b = numpyro.sample("b", dist.Normal(0, 1))
            numpyro.sample("y", dist.Normal(b, 1))

    with pytest.raises(ModelError, match=r"was obs= forgotten at 'y' \(silo_plate 'row'\)\?"):
        split(model, read([{"y": np.zeros(3)}]))


def test_a_global_of_as_many_numbers_as_an_array_is_long_is_left_alone():
    def model(x, y):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([x.shape[0]]).to_event(1))
        with silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(b @ x, 1), obs=y)

    assert split(model, read([{"x": np.ones((3, 3)), "y": np.zeros(3)}] * 2)).dim == 3


@pytest.mark.parametrize("of_rows", [True, False])
def test_whether_latents_of_rows_can_be_drawn_depends_on_their_own_prior(of_rows):
    flat = dist.ImproperUniform(constraints.real, (), ())

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1) if of_rows else flat)
        with silo_plate("row", len(y)):
            b = numpyro.sample("b", flat if of_rows else dist.Normal(mu, 1))
            numpyro.sample("y", dist.Normal(mu + b, 1), obs=y)

    found = split(model, read([{"y": np.zeros(3)}]))
    assert found.draws_local != of_rows
    assert found.not_drawable == {"b" if of_rows else "mu"}


def test_latents_of_rows_are_drawn_around_what_is_given():
    """Wards lie next to their mean, and rows next to their ward; wards that are given stay."""
    held = {"ward": np.array([0, 1, 1]), "size": np.ones(2), "y": np.zeros(3)}
    fm, (silo,) = make(models.wards(1e-6, 1e-6), held)
    key, mu, wards = jax.random.key(0), jnp.array([7.0]), jnp.array([[100.0], [-50.0]])
    both = fm.draw_local(key, {}, mu, {}, silo)
    np.testing.assert_allclose(both["ward"], np.full((2, 1), 7.0), rtol=1e-5)
    np.testing.assert_allclose(both["row"], np.full((3, 1), 7.0), rtol=1e-5)
    rows = fm.draw_local(key, {}, mu, {"ward": wards}, silo)
    np.testing.assert_array_equal(rows["ward"], wards)
    np.testing.assert_allclose(rows["row"], [[100.0], [-50.0], [-50.0]], rtol=1e-5)


def test_a_silos_parameter_may_begin_at_a_number_of_its_data():
    def text(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with silo_plate("row", y.shape[0]):
            level = numpyro.param("level", lambda key: y.mean())
            numpyro.sample("y", dist.Normal(mu + level, 1), obs=y)

    silos = read([dict(y=np.array([1.0, 3.0]))])
    fm = split(text, silos)
    np.testing.assert_allclose(fm.init_private(jax.random.key(0), silos[0])["level"], 2.0)
