"""ArviZ objects with all their groups, and the questions that NUTS's draws answer."""

import arviz
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_fed as nf
from numpyro_fed.after.arviz import Labels, Named, chains_to_arviz
from numpyro_fed.basics.errors import DataError, ModelError

KEY = jax.random.key(0)
QUIET = {"progress_bar": False}
SIZES = (8, 12)


def model(x, y=None):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    s = numpyro.sample("s", dist.HalfNormal(2))
    with nf.silo_plate("row", len(x)):
        numpyro.sample("y", dist.Normal(mu + x, s), obs=y)


@pytest.fixture(scope="module")
def silos():
    r = np.random.default_rng(0)
    return [dict(x=x, y=3 + x + r.normal(0, 1.5, n)) for n in SIZES for x in [r.normal(size=n)]]


@pytest.fixture(scope="module")
def fitted(silos):
    return nf.fit(KEY, model, silos, **QUIET)


GROUPS = (
    "prior",
    "posterior_predictive",
    "prior_predictive",
    "log_likelihood",
    "log_prior",
    "observed_data",
    "constant_data",
)


@pytest.mark.slow
def test_all_groups_are_of_the_same_draws(fitted, silos, tmp_path):
    data = fitted.to_arviz(KEY, 400, groups=GROUPS)
    mu, s = (np.asarray(data["posterior"][name])[0] for name in ("mu", "s"))
    x, y = (np.concatenate([silo[k] for silo in silos]) for k in "xy")
    np.testing.assert_allclose(data["observed_data"]["y"], y)
    np.testing.assert_array_equal(data["constant_data"]["silo"], np.repeat([0, 1], SIZES))
    np.testing.assert_allclose(data["constant_data"]["x"], x)
    rows = -0.5 * ((y - x - mu[:, None]) / s[:, None]) ** 2 - np.log(s)[:, None]
    rows -= 0.5 * np.log(2 * np.pi)
    np.testing.assert_allclose(np.asarray(data["log_likelihood"]["y"])[0], rows, atol=1e-8)
    prior = -0.5 * (mu / 10) ** 2 - 0.5 * (s / 2) ** 2
    difference = np.asarray(data["log_prior"]["globals"])[0] - prior
    np.testing.assert_allclose(difference, difference[0], atol=1e-8)
    drawn = np.asarray(data["posterior_predictive"]["y"])[0]
    standard = (drawn - x - mu[:, None]) / s[:, None]
    assert abs(standard.mean()) < 5 / np.sqrt(standard.size)
    assert standard.std() == pytest.approx(1, abs=0.05)
    assert np.asarray(data["prior_predictive"]["y"]).std() > 5
    assert np.asarray(data["prior"]["mu"]).std() == pytest.approx(10, rel=0.15)
    assert data["log_likelihood"]["y"].dims[-1] == "row"
    path = tmp_path / "fit.nc"
    data.to_netcdf(path)
    again = arviz.from_netcdf(path)
    np.testing.assert_allclose(again["posterior"]["mu"], data["posterior"]["mu"])


@pytest.mark.slow
def test_arviz_leaves_rows_out_as_loo_does(fitted):
    found = arviz.loo(fitted.to_arviz(KEY, 2_000, groups=["log_likelihood"]))
    name = "elpd_loo" if arviz.__version__.startswith("0.") else "elpd"
    assert float(found[name]) == pytest.approx(fitted.loo().elpd, abs=0.1)


def test_groups_that_are_not_known_are_refused(fitted):
    with pytest.raises(ValueError, match="'predictions' is none of"):
        fitted.to_arviz(groups=["predictions"])
    with pytest.raises(ValueError, match=r"got a word. Pass groups=\['prior'\]"):
        fitted.to_arviz(groups="prior")


def groups_of(data):
    names = data.groups() if arviz.__version__.startswith("0.") else data.children
    return set(names)


def assert_same(one, other):
    assert groups_of(one) == groups_of(other)
    for group in groups_of(one):
        assert set(one[group].data_vars) == set(other[group].data_vars)
        for name in one[group].data_vars:
            np.testing.assert_array_equal(one[group][name], other[group][name])
            assert one[group][name].dims == other[group][name].dims


@pytest.mark.slow
def test_all_groups_are_those_that_can_be_had(fitted, silos):
    data = fitted.to_arviz(KEY, 50, groups="all")
    assert groups_of(data) == {"posterior", *GROUPS}
    assert_same(data, fitted.to_arviz(KEY, 50, groups=GROUPS))

    def flat(x, y=None):
        mu = numpyro.sample("mu", dist.ImproperUniform(dist.constraints.real, (), ()))
        with nf.silo_plate("row", len(x)):
            numpyro.sample("y", dist.Normal(mu, 1), obs=y)

    found = nf.SFVI(flat).run(KEY, 0, silos, **QUIET).to_arviz(KEY, 50, groups="all")
    assert groups_of(found) == {"posterior", *GROUPS} - {"prior", "prior_predictive"}
    with pytest.raises(ModelError, match="cannot be drawn from"):
        nf.SFVI(flat).run(KEY, 0, silos, **QUIET).prior_predict(KEY)


def test_the_server_of_a_federation_has_the_groups_of_globals(silos):
    silos = [{k: v[:8] for k, v in silo.items()} for silo in silos]
    nodes = [nf.Silo(silo, names={"model": model}) for silo in silos]
    federation = nf.Federation(nf.network.InMemory([node.answer for node in nodes]))
    result = nf.SFVI(model, start=None).run(KEY, 0, federation, **QUIET)
    data = result.to_arviz(KEY, 50, groups="all")
    assert groups_of(data) == {"posterior", "prior", "log_prior"}
    here = nf.SFVI(model, start=None).run(KEY, 0, silos, **QUIET)
    here = here.to_arviz(KEY, 50, groups=["log_prior"])
    np.testing.assert_allclose(data["log_prior"]["globals"], here["log_prior"]["globals"], 1e-5)
    with pytest.raises(DataError):
        result.to_arviz(KEY, 50, groups=["observed_data"])


def test_the_run_and_its_correction_have_the_same_groups(fitted):
    for of in (fitted.corrected, fitted.run_behind):
        data = of.to_arviz(KEY, 50, groups=["log_likelihood", "observed_data"])
        assert data["log_likelihood"]["y"].shape == (1, 50, 20)


@pytest.mark.slow
def test_the_prior_predicts_rows_and_new_ones(fitted):
    parts = fitted.prior_predict(KEY, n=2_000)
    assert [p["y"].shape for p in parts] == [(2_000, n) for n in SIZES]
    y = np.asarray(fitted.prior_predict(KEY, dict(x=np.array([5.0])), n=4_000)["y"])
    assert y.mean() == pytest.approx(5, abs=0.7)
    assert y.std() == pytest.approx(np.sqrt(104), rel=0.07)


@pytest.fixture(scope="module")
def nuts(silos):
    return nf.run_nuts(KEY, model, silos, num_warmup=300, num_samples=1_000, **QUIET)


@pytest.mark.slow
def test_draws_of_nuts_predict_and_are_drawn_alike(nuts, fitted):
    mine, its = (f.sample_posterior(KEY, 900)["mu"] for f in (fitted, nuts))
    assert float(its.mean()) == pytest.approx(
        float(mine.mean()), abs=0.1 * float(mine.std()) + 0.02
    )
    assert len(np.unique(np.asarray(its))) > 600
    assert nuts.sample_posterior(KEY, 3_000)["mu"].shape == (3_000,)
    new = dict(x=np.array([2.0]))
    a, b = (np.asarray(f.predict(KEY, new, n=1_000)["y"]) for f in (fitted, nuts))
    assert a.mean() == pytest.approx(b.mean(), abs=0.3)
    assert [p["y"].shape for p in nuts.predict(KEY, silo="own rows", n=5)] == [(5, 8), (5, 12)]
    assert len([ax for ax in nuts.plot().axes if ax.axison]) == 2
    assert nuts.to_arviz()["posterior"]["mu"].shape == (1, 1_000)
    assert nuts.loo().elpd == pytest.approx(fitted.loo().elpd, abs=0.3)
    with pytest.raises(ModelError, match="silos cannot be left out: NUTS keeps no"):
        nuts.leave_out()
    with pytest.raises(ModelError, match="influence of silos is not known"):
        nuts.disagreement()
    with pytest.raises(IndexError, match="no silo 2"):
        nuts.predict(KEY, silo=2)


def wards(city, ward, n_wards, y=None):
    """Effects of cities, globals, and of wards, of which a hospital has one or two."""
    of_city = numpyro.sample("city", dist.Normal(0, 3).expand([3]).to_event(1))
    with nf.silo_plate("hospital", n_wards):
        u = numpyro.sample("u", dist.Normal(0, 1).expand([2]).to_event(1))
    with nf.silo_plate("patient", len(city)):
        numpyro.sample("y", dist.Normal(of_city[city] + u[ward, 0], 1), obs=y)


def silos_with_wards(*numbers):
    r = np.random.default_rng(0)
    return [
        dict(city=r.integers(0, 3, 6), ward=np.arange(6) % k, n_wards=k, y=r.normal(size=6))
        for k in numbers
    ]


@pytest.fixture(scope="module")
def nuts_of_wards():
    silos, small = silos_with_wards(1, 2, 1), dict(num_warmup=100, num_samples=40)
    return nf.run_nuts(KEY, wards, silos, num_chains=2, **small, **QUIET)


@pytest.mark.slow
def test_draws_of_nuts_have_all_groups_with_their_chains(nuts_of_wards):
    nuts = nuts_of_wards
    data = nuts.to_arviz(groups="all")
    assert groups_of(data) == {"posterior", *GROUPS}
    np.testing.assert_array_equal(data["posterior"]["city"], nuts.globals["city"])
    silos = silos_with_wards(1, 2, 1)
    y, city = (np.concatenate([s[k] for s in silos]) for k in ("y", "city"))
    ward = np.concatenate([s["ward"] + first for s, first in zip(silos, (0, 1, 3), strict=True)])
    u = np.concatenate([nuts.samples[f"silo_{j}/u"] for j in range(3)], 1)[:, ward, 0]
    mean = nuts.globals["city"][..., city] + u.reshape(2, 40, 18)
    rows = -0.5 * (y - mean) ** 2 - 0.5 * np.log(2 * np.pi)
    np.testing.assert_allclose(data["log_likelihood"]["y"], rows, atol=1e-5)
    prior = -0.5 * (nuts.globals["city"] / 3) ** 2 - np.log(3) - 0.5 * np.log(2 * np.pi)
    np.testing.assert_allclose(data["log_prior"]["globals"], prior.sum(-1), atol=1e-4)
    noise = np.asarray(data["posterior_predictive"]["y"]) - mean
    assert abs(noise.mean()) < 5 / np.sqrt(noise.size)
    assert noise.std() == pytest.approx(1, abs=0.07)
    np.testing.assert_array_equal(data["observed_data"]["y"], np.float32(y))
    np.testing.assert_array_equal(data["constant_data"]["silo"], np.repeat([0, 1, 2], 6))
    name = "elpd_loo" if arviz.__version__.startswith("0.") else "elpd"
    assert float(arviz.loo(data)[name]) == pytest.approx(nuts.loo().elpd, rel=1e-5)


@pytest.mark.slow
def test_draws_of_nuts_at_random_belong_to_their_groups(nuts_of_wards):
    data = nuts_of_wards.to_arviz(KEY, 30, silo="all", groups=["log_prior"])
    city = np.asarray(data["posterior"]["city"])
    assert city.shape == (1, 30, 3)
    prior = -0.5 * (city / 3) ** 2 - np.log(3) - 0.5 * np.log(2 * np.pi)
    np.testing.assert_allclose(data["log_prior"]["globals"], prior.sum(-1), atol=1e-4)


@pytest.mark.slow
def test_axes_and_elements_have_names(nuts_of_wards, tmp_path):
    """Latents of a plate that of the plate, and others those that the user gives."""
    silos = silos_with_wards(1, 2, 1)
    result = nf.SFVI(wards, start=None).run(KEY, 0, silos, **QUIET)
    result.save(tmp_path / "fit", draws=50)
    names = nf.levels([dict(c=np.repeat(["Bern", "Chur"], 5))], ["c"], other="other")["c"]
    labels = dict(dims={"city": ["city"], "y": ["patient"]}, coords={"city": names})
    for of in (result, nuts_of_wards):
        data = of.to_arviz(KEY, 20, silo="all", groups="all", **labels)
        for group in ("posterior", "prior"):  # a variable there has the name of the axis
            city = data[group]["city"]
            assert city.dims == ("chain", "draw", "city_dim")
            assert tuple(city.coords["city_dim"].values) == names
            np.testing.assert_array_equal(city.sel(city_dim="Chur"), city[..., 1])
        for group in ("posterior_predictive", "prior_predictive", "log_likelihood"):
            assert data[group]["y"].dims == ("chain", "draw", "patient")
        assert data["observed_data"]["y"].dims == ("patient",)
        assert data["posterior"]["u"].dims[2:] == ("hospital", "u_dim_1")
        assert data["posterior"]["u"].shape[2:] == (4, 2)
        for silo, numbers in (("all", [0, 1, 2, 3]), ([0, 2], [0, 3]), (1, [1, 2])):
            u = of.to_arviz(KEY, 20, silo=silo, dims={"u": ["hospital", "what"]})["posterior"]["u"]
            assert u.dims[2:] == ("hospital", "what")
            np.testing.assert_array_equal(u.coords["hospital"], numbers)
        wards_of = of.to_arviz(KEY, 20, silo=1, coords={"hospital": ["a", "b"]})["posterior"]["u"]
        assert list(wards_of.coords["hospital"].values) == ["a", "b"]
    saved = nf.load(tmp_path / "fit").to_arviz(**labels)["posterior"]["city"]
    assert tuple(saved.coords["city_dim"].values) == names
    path = tmp_path / "fit.nc"
    data.to_netcdf(path)
    assert tuple(arviz.from_netcdf(path)["posterior"].coords["city_dim"].values) == names


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (
            dict(dims={"mu": ["a"]}),
            r"'mu' has no axes but those of draws .* 1 came. Leave out 'mu'",
        ),
        (dict(dims={"mu": "a"}), r"dims=\{'mu': 'a'\}: expected a list, got a word"),
        (dict(coords={"a": "bc"}), r"coords=\{'a': 'bc'\}: expected a list, got a word"),
        (
            dict(groups=["observed_data"], coords={"row": range(3)}),
            r"'row': .*expected 20 values, since 'y' has 1 axes, 'row' \(20\), .* got 3",
        ),
    ],
)
def test_names_that_do_not_fit_are_refused(fitted, labels, words):
    with pytest.raises(ValueError, match=words):
        fitted.to_arviz(KEY, 20, **labels)


U = Named(np.zeros((9, 6, 2)), ("hospital",), {"hospital": np.arange(6)})
BETA = Named(np.zeros((9, 3)))


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (dict(dims={"u": ["re"]}), r"'hospital' \(6\) and 'u_dim_1' \(2\), .* 1 came"),
        (
            dict(dims={"u": ["re"]}, coords={"re": ["a", "b"]}),
            r"Pass dims={'u': \['hospital', 're'",
        ),
        (dict(dims={"u": ["re", "who"]}, coords={"re": ["a", "b"]}), r"\['hospital', 're'\]"),
        (dict(dims={"u": ["chain", "draw", "who", "re"]}), r"4 came. Pass .*: \['who', 're'\]"),
        (dict(dims={"u": ["a", "b", "c"]}), r"3 came. Pass dims={'u': \['a', 'b'\]}"),
        (dict(coords={"hospital": ["a", "b"]}), r"expected 6 .* 'hospital' \(6\).* Pass as many"),
        (dict(dims={"beta": ["k"]}, coords={"k": [1, 2]}), r"expected 3 values.* Pass as many"),
        (dict(dims={"beta": 3}), r"expected a list, got int"),
    ],
)
def test_names_that_do_not_fit_are_told_which_would(labels, words):
    with pytest.raises(ValueError, match=words):
        chains_to_arviz(
            {"posterior": {"u": U, "beta": BETA}},
            Labels.of(labels.get("coords"), labels.get("dims")),
        )


def test_names_that_fit_are_taken():
    for dims in ({}, {"u": ["hospital"]}, {"u": ["who", "re"]}):
        found = chains_to_arviz({"posterior": {"u": U}}, Labels.of({"re": ["a", "b"]}, dims))
        named = ("hospital", "u_dim_1") if len(dims.get("u", ())) < 2 else ("who", "re")
        assert found["posterior"]["u"].dims[2:] == named


def test_draws_without_their_data_say_so():
    bare = nf.NutsResult({"mu": np.zeros((1, 10))}, 0, dict)
    assert bare.to_arviz()["posterior"]["mu"].shape == (1, 10)
    with pytest.raises(DataError, match="no data"):
        bare.predict(KEY, dict(x=np.ones(1)))


@pytest.mark.slow
def test_latents_of_silos_by_nuts_stand_side_by_side():
    def nested(y):
        mu = numpyro.sample("mu", dist.Normal(0, 10))
        with nf.silo_plate("row", len(y)):
            b = numpyro.sample("b", dist.Normal(mu, 1))
            numpyro.sample("y", dist.Normal(b, 1), obs=y)

    silos = [dict(y=np.arange(3.0)), dict(y=np.arange(5.0))]
    nuts = nf.run_nuts(KEY, nested, silos, num_warmup=200, num_samples=400, **QUIET)
    together = nuts.sample_posterior(KEY, 400, silo="all")["b"]
    assert together.shape == (400, 8)
    np.testing.assert_array_equal(together[:, 3:], nuts.sample_posterior(KEY, 400, silo=1)["b"])
    fitted = nf.fit(KEY, nested, silos, **QUIET)
    mine = np.asarray(fitted.sample_posterior(KEY, 4_000, silo="all")["b"])
    assert np.abs(mine.mean(0) - np.asarray(together).mean(0)).max() < 0.2


@pytest.mark.slow
def test_rows_run_along_one_axis_in_all_groups():
    """Items are the first axis of an outcome, and rows the second; one row has none."""

    def items(x, y=None):
        a = numpyro.sample("a", dist.Normal(0, 2).expand([3]).to_event(1))
        with (
            numpyro.plate("item", 3, dim=-2),
            nf.silo_plate("row", x.shape[0], dim=-1),
        ):
            numpyro.sample("y", dist.Normal(a[:, None] + x, 1), obs=y)

    r = np.random.default_rng(0)
    silos = [dict(x=r.normal(size=n), y=r.normal(size=(3, n))) for n in (5, 6)]
    silos[0]["y"][:, 2] = np.nan
    silos[1]["y"][1, 0] = np.nan
    data = nf.SFVI(items, start=None).run(KEY, 0, silos, **QUIET).to_arviz(KEY, 50, groups=GROUPS)
    seen = np.concatenate([np.delete(silos[0]["y"], 2, 1), silos[1]["y"]], 1).T
    np.testing.assert_allclose(data["observed_data"]["y"], seen)
    assert data["posterior_predictive"]["y"].shape == (1, 50, 10, 3)
    assert data["log_likelihood"]["y"].shape == (1, 50, 10)
    np.testing.assert_array_equal(data["constant_data"]["silo"], [0] * 4 + [1] * 6)


def test_prior_draws_and_their_predictions_belong_together(fitted):
    data = fitted.to_arviz(KEY, 300, groups=["prior", "prior_predictive"])
    mean = np.asarray(data["prior_predictive"]["y"])[0].mean(1)
    assert np.corrcoef(np.asarray(data["prior"]["mu"])[0], mean)[0, 1] > 0.9


@pytest.mark.slow
def test_outcomes_of_several_plates_have_axes_of_their_own():
    """Visits of patients, costs of wards without latents, and a name that an argument has."""

    def study(visit, y=None, cost=None):
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        with nf.silo_plate("ward", len(cost)):
            numpyro.sample("cost", dist.MultivariateNormal(mu * jnp.ones(2), jnp.eye(2)), obs=cost)
        with nf.silo_plate("patient", len(visit), dim=-2), numpyro.plate("visit", 3, dim=-1):
            numpyro.sample("y", dist.Normal(mu + visit, 1), obs=y)

    r = np.random.default_rng(0)
    silos = [
        dict(visit=r.normal(size=(n, 3)), y=r.normal(size=(n, 3)), cost=r.normal(size=(m, 2)))
        for n, m in ((4, 2), (6, 3))
    ]
    silos[1]["y"][0] = np.nan
    data = nf.fit(KEY, study, silos, **QUIET).to_arviz(KEY, 50, groups=GROUPS)
    mu = np.asarray(data["posterior"]["mu"])[0]
    y, cost = (np.concatenate([s[k] for s in silos]) for k in ("y", "cost"))
    kept = ~np.isnan(y).all(1)
    assert data["observed_data"]["y"].dims == ("patient", "visit_dim")
    assert data["observed_data"]["cost"].dims == ("ward", "cost_dim_1")
    np.testing.assert_allclose(data["observed_data"]["y"], y[kept])
    np.testing.assert_allclose(data["observed_data"]["cost"], cost)
    assert data["posterior_predictive"]["y"].dims[2:] == ("patient", "visit_dim")
    assert data["posterior_predictive"]["y"].shape == (1, 50, 9, 3)
    assert data["prior_predictive"]["cost"].shape == (1, 50, 5, 2)
    assert data["log_likelihood"]["y"].dims[2:] == ("patient",)
    visit = np.concatenate([s["visit"] for s in silos])[kept]
    rows = -0.5 * (y[kept] - visit - mu[:, None, None]) ** 2 - 0.5 * np.log(2 * np.pi)
    np.testing.assert_allclose(data["log_likelihood"]["y"][0], rows.sum(-1), atol=1e-8)
    rows = -0.5 * (cost - mu[:, None, None]) ** 2 - 0.5 * np.log(2 * np.pi)
    np.testing.assert_allclose(data["log_likelihood"]["cost"][0], rows.sum(-1), atol=1e-8)
    constant = data["constant_data"]
    np.testing.assert_array_equal(constant["silo of patient"], [0] * 4 + [1] * 5)
    np.testing.assert_array_equal(constant["silo of ward"], [0] * 2 + [1] * 3)
    np.testing.assert_allclose(constant["visit"], visit)
