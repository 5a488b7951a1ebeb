"""Silos by their names, and tables with names of silos and levels."""

import warnings
from dataclasses import replace

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_fed as nf
from numpyro_fed.basics.errors import DataError, DataWarning, ModelError
from numpyro_fed.data.silo_data import read

KEY = jax.random.key(0)
WARDS = dict(coords={"ward": ["surgery", "medicine"]}, dims={"of_ward": ["ward"]})


def model(ward, y=None):
    of_ward = numpyro.sample("of_ward", dist.Normal(0, 10).expand([2]).to_event(1))
    with nf.silo_plate("hospital", 1):
        u = numpyro.sample("u", dist.Normal(0, 1))
    with nf.silo_plate("row", len(ward)):
        numpyro.sample("y", dist.Normal(of_ward[ward] + u[0], 1), obs=y)


def hospitals(*effects):
    r = np.random.default_rng(0)
    for effect, name in zip(effects, ("Basel", "Bern", "St. Gallen", "Chur"), strict=False):
        ward = np.arange(20) % 2
        yield name, dict(ward=ward, y=3.0 * ward + effect + r.normal(size=20))


@pytest.fixture(scope="module")
def fitted():
    return nf.fit(KEY, model, dict(hospitals(0.0, -1.0, 1.0)), progress_bar=False)


def test_silos_are_asked_for_by_name_or_number(fitted):
    assert fitted.silo_names == ("Basel", "Bern", "St. Gallen")
    for ask in (
        lambda silo: fitted.sample_posterior(KEY, 20, silo=silo)["u"],
        lambda silo: fitted.sample_posterior(KEY, 20, silo=[silo, 0])["u"],
        lambda silo: fitted.predict(KEY, silo=silo, n=5)["y"],
        lambda silo: fitted.predict(KEY, dict(ward=np.array([0])), silo=silo, n=5)["y"],
    ):
        np.testing.assert_array_equal(ask("St. Gallen"), ask(2))
    with pytest.raises(ValueError, match=r"'Chur': expected a name of \['Basel', 'Bern'"):
        fitted.sample_posterior(KEY, 5, silo="Chur")
    with pytest.raises(ValueError, match=r"'Chur': expected a name .* or 'new'"):
        fitted.predict(KEY, silo="Chur")


def test_tables_and_figures_have_the_names(fitted):
    for table in (fitted.disagreement(), fitted.leave_out()):
        assert table.to_frame().index.tolist() == ["Basel", "Bern", "St. Gallen"]
        lines = str(table).splitlines()
        assert lines[2].startswith("      Bern ")
        assert lines[3].startswith("St. Gallen ")
    (ax,) = fitted.plot_silos("u").axes
    names = {text.get_text() for text in ax.get_yticklabels()}
    assert names == {"Basel", "Bern", "St. Gallen"}
    assert fitted.plot_check("Bern", n=2).axes[0].get_title() == "Bern"
    labels = fitted.disagreement().plot(names=np.array(["x", "y", "z"])).axes[0].get_yticklabels()
    assert {text.get_text() for text in labels} == {"x", "y", "z"}
    accused = replace(fitted.disagreement(), flagged=(2,))
    assert accused.words.startswith("Silo 'St. Gallen' contradicts the others (p = ")


def test_a_summary_is_that_of_the_draws_by_name(fitted):
    table = fitted.summary(KEY, 500, silo=["Bern", 0], prob=0.5, **WARDS)
    names = ["of_ward[surgery]", "of_ward[medicine]", "u[Bern]", "u[Basel]"]
    assert table.index.tolist() == names
    assert table.columns.tolist() == ["mean", "sd", "25%", "50%", "75%", "P(> 0)", "tail index"]
    draws = fitted.sample_posterior(KEY, 500, silo=[1, 0])
    values = np.column_stack([draws["of_ward"], draws["u"]])
    np.testing.assert_allclose(table["mean"], values.mean(0))
    np.testing.assert_allclose(table["sd"], values.std(0))
    np.testing.assert_allclose(table[["25%", "75%"]], np.quantile(values, [0.25, 0.75], axis=0).T)
    np.testing.assert_allclose(table["P(> 0)"], (values > 0).mean(0))
    frame = fitted.to_frame(KEY, 500, silo=[1, 0], **WARDS)
    assert frame.columns.tolist() == names
    np.testing.assert_allclose(frame, values)
    assert fitted.summary().index.tolist() == ["of_ward[0]", "of_ward[1]"]
    own = dict(coords={"town": ["A", "B", "C"]}, dims={"u": ["town"]})
    assert fitted.summary(silo="all", **own).index.tolist()[2:] == ["u[A]", "u[B]", "u[C]"]
    assert table["tail index"].isna().tolist() == [False, False, True, True]
    with pytest.raises(ValueError, match=r"has 1 names, and 'of_ward' has 2"):
        fitted.summary(coords={"ward": ["one"]}, dims={"of_ward": ["ward"]})
    with pytest.raises(ValueError, match=r"prob=1\.5"):
        fitted.summary(prob=1.5)


def test_a_quantity_and_ranks_are_those_of_the_draws(fitted):
    table = fitted.quantity("gap", lambda of_ward: of_ward[1] - of_ward[0], KEY, 400, prob=0.5)
    draws = np.asarray(fitted.sample_posterior(KEY, 400)["of_ward"])
    np.testing.assert_allclose(
        table.loc["gap", "mean"], (draws[:, 1] - draws[:, 0]).mean(), rtol=1e-5
    )
    both = fitted.quantity("twice", lambda of_ward: 2 * of_ward, KEY, 400)
    assert both.index.tolist() == ["twice[0]", "twice[1]"]
    with pytest.raises(ModelError, match=r"'u' is no global of the model.*of_ward"):
        fitted.quantity("u", lambda u: u)

    ranks = fitted.ranks("u", KEY, 400)
    assert ranks.index.tolist() == ["St. Gallen", "Basel", "Bern"]
    u = np.asarray(fitted.sample_posterior(KEY, 400, silo="all")["u"])
    first = (u.argmax(1)[:, None] == [2, 0, 1]).mean(0)
    np.testing.assert_allclose(ranks["P(first)"], first)
    np.testing.assert_allclose(ranks["mean"].sum(), 6)
    with pytest.raises(ModelError, match=r"'of_ward' is no latent of silos"):
        fitted.ranks("of_ward")


def line_of_silo(x, y):
    with nf.silo_plate("hospital", 1):
        law = dist.Normal(0, 2).expand([2]).to_event(1)
        u = numpyro.sample("u", law, infer={"labels": ["level", "slope"]})
    with nf.silo_plate("row", len(y)):
        e = numpyro.sample("e", dist.Normal(0, 0.1))
        numpyro.sample("y", dist.Normal(u[0, 0] + u[0, 1] * x + e, 1), obs=y)


@pytest.mark.slow
def test_ranks_of_an_effect_of_several_numbers_take_one_of_them(monkeypatch):
    x = np.linspace(-1, 1, 6)
    silos = {name: dict(x=x, y=a + b * x) for name, a, b in (("A", 2, -1), ("B", 0, 3))}
    nuts = nf.run_nuts(KEY, line_of_silo, silos, num_warmup=50, num_samples=60, progress_bar=False)
    assert not nuts.shows_progress
    u = np.asarray(nuts.sample_posterior(KEY, 50, silo="all")["u"])
    for element, i in (("level", 0), ("slope", 1), (0, 0), (1, 1)):
        table = nuts.ranks("u", KEY, 50, element=element)
        first = (u[..., i].argmax(1)[:, None] == [0, 1]).mean(0)
        np.testing.assert_allclose(table.loc[["A", "B"], "P(first)"], first)
    # What cannot be ranked is refused before anything is drawn.
    monkeypatch.setattr(type(nuts), "sample_posterior", None)
    for ask, words in (
        (dict(site="u"), r"'u' has 2 numbers.*ranks\('u', element='level'\).*'slope'"),
        (dict(site="u", element="age"), r"no element 'age'.*'level', 'slope'"),
        (dict(site="u", element=2), r"no element 2"),
        (dict(site="e"), "'e' has several rows at a silo"),
        (dict(site="mu"), "'mu' is no latent of silos"),
    ):
        with pytest.raises(ModelError, match=words):
            nuts.ranks(**ask)


def test_a_mean_that_does_not_exist_is_no_number():
    def ratio(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        width = numpyro.sample("width", dist.HalfCauchy(1.0))
        numpyro.deterministic("moved", mu + width)
        with nf.silo_plate("row", len(y)):
            numpyro.sample("y", dist.Normal(mu, 1), obs=y)

    silos = [dict(y=np.random.default_rng(0).normal(size=30))]
    fit = nf.fit(KEY, ratio, silos, progress_bar=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table = fit.summary()
    known = fit.corrected.errors.infinite[0]
    assert known.any()
    none = [
        name for name, no_mean in zip(fit.corrected.errors.names, known, strict=True) if no_mean
    ]
    assert set(table.index[table["mean"].isna()]) == set(none)
    assert np.isfinite(table.loc["mu", ["mean", "sd", "50%"]].to_numpy(float)).all()


@pytest.mark.slow
def test_silos_come_and_go_by_name(fitted):
    fewer = fitted.remove(KEY, "Bern")
    assert fewer.silo_names == ("Basel", "St. Gallen")
    new = dict(hospitals(0.0, 0.0, 0.0, 2.0))["Chur"]
    with pytest.raises(DataError, match=r"\{name: data\}, other than \['Basel', 'St. Gallen'\]"):
        fewer.add(KEY, new)
    with pytest.raises(DataError, match="other than"):
        fewer.add(KEY, {"Basel": new})
    assert fewer.add(KEY, {"Chur": new}).silo_names == ("Basel", "St. Gallen", "Chur")


@pytest.mark.slow
def test_a_federation_has_names_as_well(fitted):
    data = dict(hospitals(0.0, -1.0, 1.0))
    silos = [nf.Silo(one, names={"model": model}) for one in data.values()]
    engine = nf.network.InMemory([silo.answer for silo in silos])
    with pytest.raises(DataError, match="2 entries, and there are 3 silos"):
        nf.Federation(engine, silo_names=["one", "two"])
    with pytest.raises(DataError, match="two silos have the name 'a'"):
        nf.Federation(engine, silo_names=["a", "a", "b"])
    with pytest.raises(DataError, match="1 entries, and there are 3"):
        nf.Federation(engine, silo_names="abc")
    there = nf.Federation(engine, silo_names=list(data))
    found = nf.fit(KEY, model, there, progress_bar=False)
    assert found.silo_names == fitted.silo_names
    assert str(found.disagreement()) == str(fitted.disagreement())
    message = found.draws_for_silo(KEY, 20, silo="Bern")
    drawn = silos[1].sample_posterior(KEY, message)["u"]
    np.testing.assert_allclose(drawn, fitted.sample_posterior(KEY, 20, silo="Bern")["u"], rtol=1e-6)
    assert there.of([2, 0]).silo_names == ("St. Gallen", "Basel")


@pytest.mark.slow
@pytest.mark.parametrize("run", ["nuts", "pvi"])
def test_other_runs_have_names(run):
    data = dict(hospitals(0.0, 1.0))
    if run == "nuts":
        options = dict(num_warmup=20, num_samples=20, progress_bar=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = nf.run_nuts(KEY, model, data, **options)
            assert found.summary(silo="all").index.tolist()[-2:] == ["u[Basel]", "u[Bern]"]
    else:
        found = nf.PVI(model, start=None).run(KEY, 1, data, progress_bar=False)
        np.testing.assert_array_equal(
            found.silo_params("Bern")["guide"]["hospital"]["loc"],
            found.silo_params(1)["guide"]["hospital"]["loc"],
        )
    assert found.silo_names == ("Basel", "Bern")


@pytest.mark.parametrize(
    ("silos", "words"),
    [
        (dict(y=np.ones(3)), "silos must be a list"),
        ({"all": dict(y=np.ones(3))}, "'all' cannot be the name"),
        ({3: dict(y=np.ones(3))}, "3 cannot be the name"),
        ({"Bern": dict(y=np.ones(3)), "Chur": [1.0]}, "silo 'Chur' must be a dict .* got list"),
        ({"Bern": dict(y=np.ones(3)), "Chur": dict(z=np.ones(3))}, "silo 'Chur' has the keys"),
        ({"Bern": dict(y=np.ones(3)), "Chur": dict(y=np.ones((3, 1)))}, "silo 'Chur', 'y' has sha"),
    ],
)
def test_what_is_no_silo_by_name_is_refused(silos, words):
    with pytest.raises(DataError, match=words):
        read(silos)


def test_levels_moments_and_the_joint_model_take_names():
    data = dict(hospitals(0.0, 1.0))
    tables = {name: dict(town=[name] * 20, x=silo["y"]) for name, silo in data.items()}
    assert nf.levels(tables, ["town"])["town"] == ("Basel", "Bern")
    assert nf.moments(tables, ["x"]) == nf.moments(list(tables.values()), ["x"])
    with pytest.raises(DataError, match="silo 'Bern'"):
        nf.levels(tables | {"Bern": dict(x=np.ones(3))}, ["town"])
    trace = numpyro.handlers.trace(
        numpyro.handlers.seed(nf.handlers.joint(model, data), 0)
    ).get_trace()
    assert {"silo_0/y", "silo_1/y"} <= set(trace)


def counts(y):
    rate = numpyro.sample("rate", dist.Gamma(1.0, 1.0))
    with nf.silo_plate("row", len(y)):
        numpyro.sample("y", dist.Poisson(rate), obs=y)


ASKS = {
    "fit": lambda silos: nf.fit(KEY, counts, silos, progress_bar=False),
    "run": lambda silos: nf.SFVI(counts).run(KEY, 1, silos, progress_bar=False),
}


@pytest.mark.parametrize("name", ASKS)
def test_errors_call_silos_by_their_names(name):
    silos = dict(Basel=dict(y=np.arange(3)), Chur=dict(y=np.array([1, -1])))
    with pytest.raises(DataError, match="silo 'Chur', site 'y': the observed value -1 of row 1"):
        ASKS[name](silos)
    with pytest.raises(DataError, match="silo 1, site 'y': the observed value -1 of row 1"):
        ASKS[name](list(silos.values()))


def test_a_warning_of_units_names_the_silo():
    means = dict(Basel=50.0, Bern=55.0, Chur=640.0)
    silos = {name: dict(age=mean + np.arange(30)) for name, mean in means.items()}
    with pytest.warns(DataWarning, match="'age': silo 'Chur' has the mean"):
        nf.moments(silos)
