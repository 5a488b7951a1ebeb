"""Formulas: their columns are the library's, and their texts what one writes by hand."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
import scipy.stats
from numpyro import handlers

import numpyro_fed as nf
from numpyro_fed.after.predict import new_rows
from numpyro_fed.basics.errors import DataError, DataWarning, ModelError
from numpyro_fed.data.silo_data import read
from numpyro_fed.formulas.grammar import GroupEffect, parse
from numpyro_fed.formulas.outcomes import FAMILIES
from numpyro_fed.network import InMemory
from numpyro_fed.search.mode import coordinate_names
from numpyro_fed.text.plan import describe
from numpyro_fed.text.split import split

formulae = pytest.importorskip("formulae")
pytestmark = pytest.mark.usefixtures("double")
KEY = jax.random.key(0)


WARDS = "heart", "Skin", "zoo"  # in no order that is kept by all


def tables(sizes=(30, 24, 40), wards=("AB", "BC", "ABC")):
    r, found = np.random.default_rng(0), {}
    names = dict(zip("ABC", WARDS, strict=True))
    for name, n, own in zip(("Basel", "Bern", "Chur"), sizes, wards, strict=True):
        age, sex = r.uniform(20, 80, n), r.integers(0, 2, n)
        ward, site = r.choice([names[w] for w in own], n), r.choice(["in", "out"], n)
        y = 0.05 * age + (ward == WARDS[2]) + r.normal(size=n)
        whole = dict(n=r.integers(3, 9, n), child=r.integers(0, 8, n), dose=r.integers(0, 3, n))
        found[name] = pd.DataFrame(
            dict(age=age, sex=sex, ward=ward, site=site, y=y, w=r.uniform(1, 2, n), **whole)
        )
    return found


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("y ~ x", ("y", "x", {}, ())),
        ("y ~ 1", ("y", "1", {}, ())),
        ("y ~ x + (1 | silo)", ("y", "x", {}, (GroupEffect("1", ("silo",)),))),
        (
            "y | trials(n) + weights(w) ~ 0 + x:z + (x || a/b)",
            (
                "y",
                "0 + x:z",
                {"trials": "n", "weights": "w"},
                (GroupEffect("x", ("a",), False), GroupEffect("x", ("a", "b"), False)),
            ),
        ),
        ("y~C(x)*z+I(z**2)", ("y", "C_x*z + I(z**2)", {}, ())),
    ],
)
def test_the_grammar(text, says):
    found = parse(text)
    assert (found.response, found.common, found.additions, found.groups) == says


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("y", "is no formula"),
        ("log(y) ~ x", "the response 'log.y.'.*is no column"),
        ("y | se(s) ~ x", "'se.s.' beside the response"),
        ("y ~ gp(x)", "the term 'gp.x.' is not known"),
        ("y ~ (1 | a | b)", "more than one bar"),
        (
            "y ~ z * ns(age, 3) + (1 | silo)",
            r"'ns\(age, 3\)' is not known: of splines bs.x, df=5. and s.x. are",
        ),
        ("y ~ C(x, Sum('a', 2))", r"C\(x, Sum.*is not known: C\(x\) and C\(x, Treatment"),
    ],
)
def test_what_is_no_formula_is_refused(text, says):
    with pytest.raises(ModelError, match=says):
        nf.formula(text)


def test_what_a_family_or_table_lacks_is_said():
    with pytest.raises(ModelError, match="family='normal': known are"):
        nf.formula("y ~ x", family="normal")
    with pytest.raises(ModelError, match=r"Did you mean 'bernoulli'\?"):
        nf.formula("y ~ x", family="bernouli")
    with pytest.raises(ModelError, match="needs 'trials' beside the response"):
        nf.formula("y ~ x", family="binomial")
    with pytest.raises(ModelError, match="'poisson' has no 'cens'"):
        nf.formula("y | cens(c) ~ x", family="poisson")
    with pytest.raises(ModelError, match="shared: 'ward' is no group"):
        nf.formula("y ~ x + (1 | silo)", shared=["ward"])
    with pytest.raises(ModelError, match=r"call formula.silos"):
        _ = nf.formula("y ~ x").text
    some = tables()
    some["Basel"]["x"] = 1.0
    with pytest.raises(DataError, match="silo Bern: the table lacks 'x'"):
        nf.formula("y ~ x").silos(some)
    with pytest.raises(ModelError, match="agreed on nothing about the column 'x'"):
        nf.formula("y ~ x", agreed=nf.formula("y ~ age").agree(some)).silos(some)
    with pytest.raises(DataError, match="silo Basel, 'ward': an outcome is a number"):
        nf.formula("ward ~ age").silos(tables())
    f = nf.formula("y ~ b")
    f.agree([dict(y=np.arange(9.0), b=np.arange(9.0))])
    with pytest.raises(ModelError, match="a name 'b' of its own"):
        _ = f.text


COMMON = [
    "age",
    "0 + age + ward",
    "ward",
    "0 + ward",
    "age * ward + site",
    "ward:site",
    "ward * site",
    "0 + ward:site",
    "age:ward:sex",
    "C(dose) * age",
    "C(dose):ward:age",
    "log(age) + I(age**2) + exp(sex) + sqrt(n):ward",
    "bs(age, df=5) + ward",
    "center(age) * sex",
    "poly(age, 2) + offset(log(n))",
]


@pytest.mark.parametrize("common", COMMON)
def test_columns_are_those_of_the_library_on_pooled_rows(common):
    some = tables()
    f = nf.formula(f"y ~ {common}")
    silos = f.silos(some)
    design = f.written.design
    pooled = pd.concat(some.values())
    pooled["C_dose"] = pooled["dose"].astype(str)
    functions = {"log": np.log, "exp": np.exp, "sqrt": np.sqrt}
    whole = formulae.design_matrices(f.grammar.common, pooled, extra_namespace=functions).common
    expected = np.asarray(whole).astype(float)
    arrays = {k: np.concatenate([s[k] for s in silos.values()]) for k in silos["Basel"]}
    names = {**arrays, "jnp": jnp, "jax": jax}
    slices = [
        whole.slices[k] for k, t in whole.terms.items() if t.kind not in ("intercept", "offset")
    ]
    labels = [
        label
        for t in whole.terms.values()
        if t.kind not in ("intercept", "offset")
        for label in t.labels
    ]
    assert design.common.labels == labels
    assert design.common.intercept == ("Intercept" in whole.terms)
    for columns, place in zip(design.common.columns, slices, strict=True):
        found = np.asarray(eval(columns.expression, names)).reshape(len(pooled), -1)
        if columns.computed.startswith(("bs", "poly")):
            # Knots and powers are those of the agreed moments: as many columns, of one space.
            assert found.shape == expected[:, place].shape
        elif columns.computed:
            np.testing.assert_allclose(
                found, expected[:, place], atol=0.05 * expected[:, place].std()
            )
        else:
            np.testing.assert_allclose(found, expected[:, place], rtol=1e-6)


def test_a_level_that_a_silo_lacks_and_a_rare_one():
    some = tables()
    some["Chur"].loc[0, "ward"] = "Z"
    f = nf.formula("y ~ ward")
    silos = f.silos(some)
    assert f.agreed.names == {"ward": ("Skin", "heart", "zoo", "other")}
    assert silos["Chur"]["ward"][0] == 3
    assert set(silos["Basel"]["ward"].tolist()) == {0, 1}
    pooled = pd.concat([t.assign(silo=name) for name, t in some.items()])
    found = np.concatenate([s["ward"] for s in silos.values()])
    for name, code in (("Skin", 0), ("heart", 1), ("zoo", 2)):
        assert ((found == code) == (pooled["ward"] == name)).all()
    assert nf.formula("y ~ ward").agree(tables()).names == {"ward": ("Skin", "heart", "zoo")}
    assert '"ward[heart]", "ward[zoo]", "ward[other]"' in f.text


def test_rows_that_miss_a_covariate_are_left_out_and_said_to_be():
    some = tables()
    some["Bern"].loc[[1, 4], "age"] = np.nan
    some["Bern"].loc[5, "y"] = np.nan
    f = nf.formula("y ~ age + (1 | child)")
    with pytest.warns(DataWarning, match="silo Bern: 2 of 24 rows miss a covariate"):
        silos = f.silos(some)
    assert len(silos["Bern"]["age"]) == 22
    assert np.isnan(silos["Bern"]["y"]).sum() == 1
    assert silos["Bern"]["n_child"] == silos["Bern"]["child"].max() + 1


def by_hand(age, sex, ward, w, child, n_child, y):
    """The text of the formula in the test below, as one would write it."""
    at = numpyro.sample("Intercept_centred", dist.Normal(MEAN, 2.5 * SD))
    sds = jnp.array([2.5 / AGE_SD, 2.5, 2.5]) * SD
    b = numpyro.sample("b", dist.Normal(0, sds).to_event(1))
    tau = numpyro.sample("sd_silo", dist.HalfNormal(jnp.array([1.0, 2.0])).to_event(1))
    L = numpyro.sample("L_silo", dist.LKJCholesky(2, 1.0))
    with nf.silo_plate("silo", 1):
        r = numpyro.sample("r_silo", dist.MultivariateNormal(scale_tril=tau[:, None] * L))
    of_child = numpyro.sample("sd_child", dist.HalfNormal(0.7))
    with nf.silo_plate("child", n_child):
        c = numpyro.sample("r_child", dist.Normal(0, of_child))
    sigma = numpyro.sample("sigma", dist.HalfNormal(2.5 * SD))
    with nf.silo_plate("row", len(age)):
        eta = at + b[0] * (age - AGE) + jnp.where(ward == 0, 0, b[ward]) + c[child]
        with handlers.scale(scale=w):
            numpyro.sample("y", dist.Normal(eta + r[0, 0] + r[0, 1] * sex, sigma), obs=y)


SD, MEAN, AGE, AGE_SD = 1.0, 0.0, 0.0, 1.0


def test_the_text_is_what_one_writes_by_hand(monkeypatch):
    f = nf.formula(
        "y | weights(w) ~ age + ward + (1 + sex | silo) + (1 | child)",
        priors={
            "sd_child": "dist.HalfNormal(0.7)",
            "sd_silo": "dist.HalfNormal(jnp.array([1.0, 2.0])).to_event(1)",
        },
    )
    silos = f.silos(tables())
    agreed = f.agreed
    monkeypatch.setitem(globals(), "SD", agreed.sd["y"])
    monkeypatch.setitem(globals(), "MEAN", agreed.mean["y"])
    monkeypatch.setitem(globals(), "AGE", agreed.mean["age"])
    monkeypatch.setitem(globals(), "AGE_SD", agreed.sd["age"])
    assert inspect.getsource(f.model).startswith("def model(")
    data = read(list(silos.values()))
    ours, hand = (split(text, data) for text in (f.model, by_hand))
    z = jnp.asarray(np.random.default_rng(0).normal(size=ours.dim))
    assert [s.name for s in ours.named("latent")] == [s.name for s in hand.named("latent")]
    for silo in data:
        z_L = {k: 0.3 + v for k, v in ours.zero_latents(silo).items()}
        found, expected = (fm.log_silo({}, z, z_L, silo) for fm in (ours, hand))
        for plate in expected:
            np.testing.assert_allclose(found[plate], expected[plate], rtol=2e-3)


X = np.array([-1.0, 0.0, 0.5, 2.0])
MU = np.exp(0.2 + 0.5 * X)
P = 1 / (1 + np.exp(-0.2 - 0.5 * X))
# The outcomes of a family and their log densities where the linear predictor is 0.2 + 0.5 x.
EXPECTED = {
    "gaussian": (
        [0.3, 1, -2, 0.1],
        dict(sigma=2.0),
        lambda y: scipy.stats.norm(0.2 + 0.5 * X, 2).logpdf(y),
    ),
    "student": (
        [0.3, 1, -2, 0.1],
        dict(sigma=2.0, nu=4.0),
        lambda y: scipy.stats.t(4, 0.2 + 0.5 * X, 2).logpdf(y),
    ),
    "bernoulli": ([0, 1, 1, 0], {}, lambda y: scipy.stats.bernoulli(P).logpmf(y)),
    "binomial": ([0, 2, 3, 1], {}, lambda y: scipy.stats.binom(4, P).logpmf(y)),
    "poisson": ([0, 2, 3, 1], {}, lambda y: scipy.stats.poisson(MU).logpmf(y)),
    "negbinomial": (
        [0, 2, 3, 1],
        dict(shape=1.5),
        lambda y: scipy.stats.nbinom(1.5, 1.5 / (1.5 + MU)).logpmf(y),
    ),
    "zero_inflated_poisson": (
        [0, 2, 0, 1],
        dict(zi=0.3),
        lambda y: np.log(0.3 * (y == 0) + 0.7 * scipy.stats.poisson(MU).pmf(y)),
    ),
    "zero_inflated_negbinomial": (
        [0, 2, 0, 1],
        dict(zi=0.3, shape=1.5),
        lambda y: np.log(0.3 * (y == 0) + 0.7 * scipy.stats.nbinom(1.5, 1.5 / (1.5 + MU)).pmf(y)),
    ),
    "gamma": (
        [0.5, 2, 1, 3],
        dict(shape=2.0),
        lambda y: scipy.stats.gamma(2, scale=MU / 2).logpdf(y),
    ),
    "lognormal": (
        [0.5, 2, 1, 3],
        dict(sigma=0.7),
        lambda y: scipy.stats.norm(np.log(MU), 0.7).logpdf(np.log(y)) - np.log(y),
    ),
    "beta": (
        [0.5, 0.2, 0.1, 0.9],
        dict(phi=3.0),
        lambda y: scipy.stats.beta(P * 3, (1 - P) * 3).logpdf(y),
    ),
    "exponential": ([0.5, 2, 1, 3], {}, lambda y: scipy.stats.expon(scale=MU).logpdf(y)),
    "weibull": (
        [0.5, 2, 1, 3],
        dict(shape=1.5),
        lambda y: scipy.stats.weibull_min(1.5, scale=MU / scipy.special.gamma(1 + 1 / 1.5)).logpdf(
            y
        ),
    ),
    "cumulative": (
        [0, 2, 1, 1],
        dict(cutpoints=np.array([-0.5, 1.0])),
        lambda y: np.log(
            np.diff(
                1 / (1 + np.exp(-(np.array([[-np.inf, -0.5, 1, np.inf]]) - 0.5 * X[:, None]))),
                axis=1,
            )[np.arange(4), y]
        ),
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore::numpyro_fed.DataWarning")
def test_a_family_has_its_density(family):
    y, parameters, log_density = EXPECTED[family]
    response = "y | trials(m)" if family == "binomial" else "y"
    f = nf.formula(f"{response} ~ x", family=family)
    silo = pd.DataFrame(dict(x=X, y=y, m=4))
    (data,) = f.silos([silo])
    centre = f.written.design.common.columns[0].centre[0]
    values = {"b": np.array([0.5]), "Intercept_centred": 0.2 + 0.5 * centre, **parameters}
    if family == "cumulative":
        values["cutpoints_centred"] = values.pop("cutpoints") - 0.5 * centre
    trace = handlers.trace(handlers.substitute(f.model, values)).get_trace(**data)
    site = trace["y"]
    np.testing.assert_allclose(
        site["fn"].log_prob(site["value"]), log_density(np.array(y)), rtol=1e-3
    )
    if family not in ("beta", "cumulative"):
        fn = site["fn"]
        mean = fn.mean / (4 if family == "binomial" else 1)
        np.testing.assert_allclose(trace["mean"]["value"], mean, rtol=1e-5)


def test_a_time_that_is_a_lower_bound():
    f = nf.formula("y | cens(c) ~ x", family="weibull")
    (data,) = f.silos([pd.DataFrame(dict(x=X, y=[0.5, 2, 1, 3], c=[0, 1, 0, 1]))])
    centre = f.written.design.common.columns[0].centre[0]
    values = {"b": np.array([0.5]), "Intercept_centred": 0.2 + 0.5 * centre, "shape": 1.5}
    trace = handlers.trace(handlers.substitute(f.model, values)).get_trace(**data)
    found = trace["y"]["fn"].log_prob(trace["y"]["value"])
    law = scipy.stats.weibull_min(1.5, scale=MU / scipy.special.gamma(1 + 1 / 1.5))
    expected = np.where([0, 1, 0, 1], law.logsf([0.5, 2, 1, 3]), law.logpdf([0.5, 2, 1, 3]))
    np.testing.assert_allclose(found, expected, rtol=1e-3)


@pytest.mark.slow
def test_a_fit_by_a_formula_predicts_and_averages_under_changed_columns():
    some = tables((60, 40, 50))
    f = nf.formula("y ~ age * ward + s(age) + (1 | silo)")
    silos = f.silos(some)
    fitted = nf.fit(KEY, f.model, silos, progress_bar=False)
    assert fitted.trusted
    names = fitted.summary().index.tolist()
    assert {"b[age]", "b[ward[zoo]]", "b[age:ward[zoo]]", "sd_silo", "sd_s_age", "s_age[9]"} <= set(
        names
    )
    effect = [np.asarray(fitted.average(KEY, "mean", {"ward": k})) for k in (2, 0)]
    assert abs(np.subtract(*effect).mean() - 1.0) < 4 * np.subtract(*effect).std()
    new = f.silo(pd.DataFrame(dict(age=[30.0, 60.0], ward=["heart", "zoo"])), new=True)
    assert fitted.predict(KEY, new)["y"].shape == (1_000, 2)


@pytest.mark.slow
def test_groups_that_several_silos_share():
    some = tables((60, 40, 50))
    f = nf.formula("y ~ age + (1 | ward) + (1 | silo)", shared=["ward"])
    silos = f.silos(some)
    assert 'with numpyro.plate("wards", 3):' in f.text
    fitted = nf.fit(KEY, f.model, silos, progress_bar=False)
    names = fitted.summary().index.tolist()
    assert {"r_ward[Skin]", "r_ward[heart]", "r_ward[zoo]"} <= set(names)


def table(n=40, seed=1, **columns):
    r = np.random.default_rng(seed)
    return pd.DataFrame(dict(y=r.normal(size=n), age=r.uniform(20, 80, n)) | columns)


def lines(f, word):
    return [line.strip() for line in f.text.splitlines() if word in line]


def test_levels_are_words_of_others_and_stay_words():
    kinds = np.resize(["!Men", "Children's", '"+str(1/0)+"', 'a "b", c\\'], 40)
    f = nf.formula("y ~ kind")
    f.silos([table(kind=kinds)] * 2)
    assert f.model is not None
    names = f.agreed.names["kind"]
    (labels,) = [
        s.labels for s in split(f.model, read(f.silos([table(kind=kinds)] * 2))).sites if s.labels
    ]
    assert labels == tuple(f"kind[{name}]" for name in names[1:])


def test_what_the_library_prints_otherwise_is_computed_by_the_library():
    f = nf.formula("y ~ I((age - 50)**2) + offset(log(age / (1 + age)))")
    silos = f.silos([table(), table(seed=2)])
    square, offset = f.written.computed
    age = table()["age"].to_numpy()
    np.testing.assert_allclose(silos[0][square.expression], (age - 50) ** 2)
    np.testing.assert_allclose(silos[0][offset.expression], np.log(age / (1 + age)))


def test_without_an_intercept_nothing_is_centred():
    f = nf.formula("y ~ 0 + age")
    f.silos([table(), table(seed=2)])
    assert lines(f, "eta = ") == ["eta = X @ b"]
    assert not lines(f, "centre")


def test_whether_a_time_is_a_bound_is_a_number():
    bound = np.arange(40) > 2
    f = nf.formula("t | cens(c) ~ age", family="weibull")
    silos = f.silos([table(t=1.0, c=bound), table(t=1.0, c=~bound)])
    assert silos[0]["c"].tolist() == bound.tolist()
    assert silos[1]["c"].tolist() == (~bound).tolist()
    with pytest.raises(DataError, match="'c': 1 where a time is a lower bound"):
        nf.formula("t | cens(c) ~ age", family="weibull").silos([table(t=1.0, c=2)])


def test_levels_are_the_same_in_any_type_and_in_their_order():
    dose, t = np.resize([10, 2], 40), np.arange(40) % 3 == 0
    grade = pd.Categorical(
        np.resize(["low", "high", "mid"], 40), ["low", "mid", "high"], ordered=True
    )
    f = nf.formula("y ~ C(dose) + t + grade")
    silos = f.silos(
        [table(dose=dose, t=t, grade=grade), table(dose=dose * 1.0, t=t.astype(int), grade=grade)]
    )
    assert f.agreed.names == {"C_dose": ("2", "10"), "grade": ("low", "mid", "high")}
    for name in ("C_dose", "t", "grade"):
        np.testing.assert_array_equal(silos[0][name], silos[1][name])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("y | weights(sigma) ~ age", "a name 'sigma' of its own"),
        ("y ~ class", "'class', a word of Python"),
        ("y ~ age + (1 + offset(age) | silo)", "have an offset"),
        ("y ~ age + (0 | silo)", "has no effect"),
        ("y ~ I(age / 1e3)", "formulae does not read"),
    ],
)
def test_what_no_text_can_be_written_of_is_refused(text, says):
    f = nf.formula(text)
    f.agree([table(sigma=1.5, **{"class": 1.0})] * 2)
    with pytest.raises(ModelError, match=says):
        _ = f.text


def test_names_that_others_have_too_are_told_apart():
    ward = np.resize(["a", "b", "c"], 40)
    f = nf.formula("y ~ degree + ward + one + (1 | ward) + (1 | silo) + (0 + age | silo)")
    silos = f.silos([table(degree=np.arange(40.0), ward=ward, one="x")] * 2)
    assert {"ward", "ward_group", "n_ward_group", "degree"} <= set(silos[0])
    assert "r_ward[ward_group] + r_silo[0] + age * r_silo_2[0]" in " ".join(f.text.split())
    f = nf.formula("y ~ age", priors={"intercept": "dist.Normal(0.0, 1.0)"})
    f.silos([table()] * 2)
    with pytest.raises(
        ModelError, match=r"priors: there is no 'intercept'; known are .'Intercept'"
    ):
        _ = f.text
    f = nf.formula("y ~ age", priors={"Intercept": "dist.Normal(7.0, 1.0)"})
    f.silos([table()] * 2)
    assert lines(f, "Intercept_centred") == [
        'intercept = numpyro.sample("Intercept_centred", dist.Normal(7.0, 1.0))'
    ]


def test_priors_stand_where_the_data_are():
    r = np.random.default_rng(0)
    f = nf.formula("y ~ offset(log(py))", family="poisson")
    f.silos([table(y=r.poisson(4.5, 40), py=1e5 * r.uniform(0.8, 1.2, 40))] * 2)
    trace = handlers.trace(handlers.seed(f.model, 0)).get_trace(py=np.full(3, 1e5), y=np.ones(3))
    assert abs(trace["Intercept"]["fn"].loc - np.log(4.5e-5)) < 0.2
    f = nf.formula("y ~ s(day)")
    f.silos(
        [table(y=101325 + 0.5 * r.normal(size=40), day=1654321987 + 1e5 * r.normal(size=40))] * 2
    )
    day = 1654321987 + np.array([-2e5, -1e5, 0, 1e5])
    trace = handlers.trace(handlers.seed(f.model, 0)).get_trace(day=day, y=day)
    assert abs(trace["Intercept_centred"]["fn"].loc - 101325) < 1
    assert len(np.unique(np.asarray(trace["mean"]["value"]))) == 4


def test_new_rows_of_a_known_silo_have_its_groups():
    f = nf.formula("y ~ age + (1 | ward)")
    wards = {"A": np.resize(["a", "b"], 40), "B": np.resize(["b", "c"], 40)}
    f.silos({name: table(ward=ward) for name, ward in wards.items()})
    new = dict(age=[30.0], ward=["b"])
    assert [f.silo(new, new=True, of=name)["ward"].tolist() for name in "AB"] == [[1], [0]]
    with pytest.raises(DataError, match="'c' is no member of 'ward' at A"):
        f.silo(dict(age=[30.0], ward=["c"]), new=True, of="A")
    with pytest.raises(DataError, match="of='C': known are the silos"):
        f.silo(new, new=True, of="C")


@pytest.mark.parametrize("effects", ["(1 | block/plot)", "(1 | plot) + (1 | block)"])
def test_the_effect_of_a_group_is_the_mean_of_those_within_it(effects):
    """Nested groups are found where names say so, too; rows then look one group up alone."""
    block = np.repeat(["a", "b", "c", "d"], 10)
    plot = [f"{b}{i}" for b, i in zip(block, np.resize([1, 2, 3], 40), strict=True)]
    f = nf.formula(f"y ~ age + {effects}")
    silos = f.silos({name: table(block=block, plot=plot) for name in "AB"})
    inner = "block_plot" if "/" in effects else "plot"
    above, own = silos["A"][f"block_of_{inner}"], silos["A"][inner]
    np.testing.assert_array_equal(above[own], np.repeat([0, 1, 2, 3], 10))
    words = " ".join(f.text.split())
    assert f"dist.Normal(r_block[block_of_{inner}], sd_{inner})" in words
    assert f"+ r_{inner}[{inner}]" in words
    assert "+ r_block[" not in words
    fm = split(f.model, read(silos))
    assert (fm.below, fm.outer_plates) == ({"row": inner}, ("block",))
    new = dict(age=[30.0], block=["c"], plot=["c2"])
    found = f.silo(new, new=True, of="A")
    np.testing.assert_array_equal(found[f"block_of_{inner}"], above)
    alone = f.silo(new, new=True)
    assert (alone[f"block_of_{inner}"], alone[inner]) == ([0], [0])


@pytest.mark.parametrize(
    ("effects", "number"),
    [
        ("(1 | ward) + (1 | bed) + (1 | nurse)", 3),
        ("(1 | ward) + (1 | ward:bed) + (1 | ward:nurse)", 3),
        ("(1 | ward/bed) + (1 | ward:nurse)", 3),
        ("(1 | ward/bed) + (0 + x | ward/bed)", 4),
        ("(1 | silo) + (1 | ward/bed)", 3),
    ],
)
def test_no_effect_counts_twice(effects, number):
    """With sds of one, the variance of a row is the number of its effects."""
    ward, bed, nurse = np.repeat([0, 1, 2, 3], 10), np.arange(40) // 2, np.arange(40) // 10 * 10
    nurse = nurse + np.resize([0, 1, 2], 40)
    f = nf.formula(f"y ~ 1 + {effects}")
    names = dict(ward=ward, bed=bed, nurse=nurse, x=np.ones(40))
    silo = f.silos([table(**names)] * 2)[0]
    sds = {f"sd_{g.name}": 1.0 for g in f.grammar.groups} | {"Intercept": 0.0}
    text = handlers.substitute(f.model, data=sds)
    drawn = numpyro.infer.Predictive(text, num_samples=4_000, parallel=True)(KEY, **silo)["mean"]
    np.testing.assert_allclose(np.asarray(drawn).var(), number, rtol=0.1)


def test_nesting_is_that_of_all_tables_and_checked_at_new_ones():
    ward, bed = np.repeat([0, 1], 20), np.arange(40) // 5
    f = nf.formula("y ~ 1 + (1 | ward) + (1 | bed)")
    lacking = np.where(np.arange(40) == 3, None, ward)
    f.agree([table(ward=ward, bed=bed), table(ward=lacking, bed=np.repeat([0, 1], 20))])
    assert f.agreed.nested == {(("bed",), ("ward",))}
    crossing = table(ward=ward, bed=np.arange(40) % 5)
    with pytest.raises(DataError, match="in another 'ward' than others of its group"):
        f.silo(crossing)
    f = nf.formula("y ~ 1 + (1 | ward) + (1 | bed)")
    f.silos({"A": table(ward=ward, bed=bed)})
    with pytest.raises(DataError, match="row 0 of 'bed' is in another 'ward'"):
        f.silo(dict(ward=[1], bed=[0]), new=True, of="A")
    f = nf.formula("y ~ ward_of_bed + (1 | ward) + (1 | bed)")
    f.agree([table(ward=ward, bed=bed, ward_of_bed=1.0 * bed)])
    with pytest.raises(ModelError, match="name of an argument, 'ward_of_bed'"):
        _ = f.text


def test_groups_that_cross_are_not_nested():
    f = nf.formula("y ~ 1 + (1 | ward) + (1 | team)")
    f.silos([table(ward=np.resize([0, 1], 40), team=np.resize([0, 1, 2], 40))] * 2)
    assert f.agreed.nested == frozenset()
    assert "r_ward[ward] + r_team[team]" in f.text


def test_silos_in_other_processes_agree_on_the_same():
    some = tables()
    nodes = [nf.Silo(one, names={}) for one in some.values()]
    apart = nf.Federation(InMemory([node.answer for node in nodes]), names={})
    f, other = (nf.formula("y ~ age * ward + (1 | silo)") for _ in range(2))
    with pytest.raises(ModelError, match="over a federation name the categorical columns"):
        f.agree(apart)
    f.agree(apart, categorical=["ward"])
    own, there = other.silos(some), [f.silo(one) for one in some.values()]
    assert f.text == other.text
    for here, one in zip(own.values(), there, strict=True):
        for name, array in here.items():
            np.testing.assert_array_equal(one[name], array)


def test_what_the_library_computes_knows_rare_levels_and_types():
    ward = np.resize([1, 2], 40)
    rare = np.where(np.arange(40) == 0, 7, ward)
    f = nf.formula("y ~ C(ward) + center(age):C(ward)")
    silos = f.silos([table(ward=ward * 1.0), table(ward=rare)])
    (product,) = f.written.computed
    columns = silos[1][product.expression]
    assert f.agreed.names == {"C_ward": ("1", "2", "other")}
    assert np.isfinite(columns).all()
    other = [label.endswith("[other]") for label in product.labels]
    assert (columns[0, np.logical_not(other)] == 0).all()


def hand_lognormal(age, y):
    """The text of the formula in the test below, as one would write it."""
    at = numpyro.sample("Intercept_centred", dist.Normal(np.log(MEAN), 2.5))
    b = numpyro.sample("b", dist.Normal(0, jnp.array([2.5 / AGE_SD])).to_event(1))
    tau = numpyro.sample("sd_silo", dist.HalfNormal(1.0))
    with nf.silo_plate("silo", 1):
        r = numpyro.sample("r_silo", dist.Normal(0, tau))
    sigma = numpyro.sample("sigma", dist.HalfNormal(2.5))
    with nf.silo_plate("row", len(age)):
        eta = at + b[0] * (age - AGE) + r[0]
        numpyro.deterministic("median", jnp.exp(eta))
        numpyro.factor("of_y", dist.Normal(eta, sigma).log_prob(jnp.log(y)) - jnp.log(y))


def test_log_normal_outcomes_have_the_density_that_one_writes_by_hand(monkeypatch):
    f = nf.formula("y ~ age + (1 | silo)", family="lognormal")
    silos = f.silos([table(y=np.exp(table(seed=s)["y"]), seed=s) for s in (1, 2)])
    monkeypatch.setitem(globals(), "MEAN", f.agreed.mean["y"])
    monkeypatch.setitem(globals(), "AGE", f.agreed.mean["age"])
    monkeypatch.setitem(globals(), "AGE_SD", f.agreed.sd["age"])
    z = {"Intercept_centred": 0.3, "b": np.array([0.02]), "sd_silo": 0.4, "sigma": 0.7}
    z["r_silo"] = np.array([0.1])
    for silo in silos:
        found, expected = (
            numpyro.infer.util.log_density(text, (), silo, z)[0]
            for text in (f.model, hand_lognormal)
        )
        np.testing.assert_allclose(found, expected, rtol=1e-3)


@pytest.mark.parametrize(
    "term",
    ["Treatment('III')", 'Treatment("III")', "Treatment(reference='III')", "reference='III'"],
)
def test_the_level_of_a_reference_comes_first(term):
    stage = np.resize(["I", "II", "III"], 40)
    f = nf.formula(f"y ~ age * C(stage, {term}) + (1 + C(stage, {term}) | silo)")
    silos = f.silos([table(stage=stage), table(stage=stage[:2].repeat(20), seed=2)])
    assert f.agreed.names == {"C_stage": ("III", "I", "II")}
    labels = ["age", "C_stage[I]", "C_stage[II]", "age:C_stage[I]", "age:C_stage[II]"]
    assert f.written.design.common.labels == labels
    np.testing.assert_array_equal(silos[0]["C_stage"], np.resize([1, 2, 0], 40))
    np.testing.assert_array_equal(silos[1]["C_stage"], np.repeat([1, 2], 20))
    with pytest.raises(DataError, match=r"C\(stage, \.\.\.\): 'IV' is none of the levels"):
        nf.formula(f"y ~ C(stage, {term})".replace("III", "IV")).silos([table(stage=stage)] * 2)


def test_categories_that_all_silos_have_alike_keep_their_order():
    stage, order = np.resize(["low", "high", "mid"], 40), ["low", "mid", "high"]
    f = nf.formula("y ~ stage + C(stage)")
    f.silos([table(stage=pd.Categorical(stage, order))] * 2)
    assert f.agreed.names == {"stage": ("low", "mid", "high"), "C_stage": ("low", "mid", "high")}
    f.agree([table(stage=pd.Categorical(stage, order)), table(stage=pd.Categorical(stage))])
    assert f.agreed.names["stage"] == ("high", "low", "mid")


@pytest.mark.slow
def test_correlations_are_told_and_effects_have_names():
    t = np.resize([True, False], 40)
    f = nf.formula("y ~ t + (1 + t | silo) + (1 + t + age | ward)")
    silos = f.silos([table(t=t, ward=np.arange(40) // 4)] * 2)
    trace = handlers.trace(handlers.seed(f.model, 0)).get_trace(**silos[0])
    for name, k in (("silo", 2), ("ward", 3)):
        L = np.asarray(trace[f"L_{name}"]["value"])
        expected = (L @ L.T)[np.tril_indices(k, -1)]
        np.testing.assert_allclose(np.ravel(trace[f"cor_{name}"]["value"]), expected)
    fm = split(f.model, read(silos))
    assert fm.labels["r_silo"] == ("Intercept", "t[True]")
    assert fm.labels["r_ward"] == ("Intercept", "t[True]", "age")
    assert "sd_ward[age]" in coordinate_names(fm)


def test_a_column_that_is_misspelled_is_guessed():
    with pytest.raises(DataError, match=r"silo 0: the table lacks 'aeg'.*Did you mean 'age'.$"):
        nf.formula("y ~ aeg").silos([table()] * 2)
    with pytest.raises(DataError, match=r"Did you mean 'age'.$"):
        nf.formula("y ~ Age").silos([table()] * 2)
    with pytest.raises(DataError, match=r"lacks 'hospital'.*named silo: \(1 \| silo\)"):
        nf.formula("y ~ age + (1 | hospital)").silos([table()] * 2)


def test_a_group_that_is_the_silo_is_told():
    tables = [table(hospital="Bern", ward=3), table(hospital="Chur", ward=3)]
    with pytest.warns(DataWarning, match="the group 'hospital' is the silo") as caught:
        nf.formula("y ~ age + (1 | hospital) + (1 | ward)").silos(tables)
    assert len(caught) == 1


def test_warnings_point_at_the_line_of_the_user():
    f = nf.formula("y ~ age + c + (1 | hospital)")
    tables = [table(hospital=h, c=1.0) for h in "ab"]
    tables[0].loc[0, "age"] = np.nan
    with pytest.warns(DataWarning) as caught:
        f.silos(tables)
    with pytest.warns(DataWarning) as alone:
        f.silo(tables[0])
    assert {w.filename for w in [*caught, *alone]} == {__file__}
    assert len(caught) == 3


def test_a_table_as_new_data_is_sent_to_the_formula():
    f = nf.formula("y ~ age + ward")
    silos = list(f.silos(tables()).values())
    data, facts = read(silos), describe(f.model, silos[0])
    fm = split(f.model, data)
    with pytest.raises(DataError, match=r"made by f.silo\(table, new=True\)"):
        new_rows(fm, tables()["Basel"], facts, data)
