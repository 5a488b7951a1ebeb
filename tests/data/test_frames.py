"""Data as people have it: DataFrames, categories, missing outcomes, units."""

import datetime
import json
import sys
from dataclasses import replace
from decimal import Decimal

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import polars as pl
import pytest
from cases import slow_but
from hypothesis import given, settings
from hypothesis import strategies as st
from numpyro.infer.util import log_density

import numpyro_fed as nf
from numpyro_fed.data.silo_data import read
from numpyro_fed.data.tables import as_series, column_array
from numpyro_fed.text.layout import layout_and_buckets
from numpyro_fed.text.plan import agree, check_plan, with_terms
from numpyro_fed.text.split import split

LIBRARIES = pytest.mark.parametrize("lib", [pd, pl], ids=["pandas", "polars"])
KEY = jax.random.key(0)
NAN = np.nan
quiet = {"progress_bar": False}


def linear(x, y=None):
    beta = numpyro.sample("beta", dist.Normal(0, 10).expand([x.shape[-1]]).to_event(1))
    with nf.silo_plate("row", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ beta, 1), obs=y)


def by_age(age, y=None):
    slope = numpyro.sample("slope", dist.Normal(0, 10))
    with nf.silo_plate("row", age.shape[0]):
        numpyro.sample("y", dist.Normal(slope * age, 1), obs=y)


def refusal(call, *args, **kwargs):
    with pytest.raises(nf.DataError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


# --- reading ---------------------------------------------------------------------------------


@LIBRARIES
def test_a_silo_may_be_a_dataframe_whose_columns_are_arguments(lib):
    columns = {"age": [30.0, 41.5], "y": [1.0, -2.0]}
    (silo,) = read([lib.DataFrame(columns)], by_age)
    (expected,) = read([{k: np.array(v) for k, v in columns.items()}], by_age)
    assert silo.arrays.keys() == expected.arrays.keys()
    for name, array in expected.arrays.items():
        np.testing.assert_array_equal(silo.arrays[name], array)
        assert silo.arrays[name].dtype == array.dtype


NUMBERS = st.one_of(
    st.lists(st.one_of(st.none(), st.integers(-(2**31), 2**31 - 1)), min_size=1, max_size=6),
    st.lists(st.one_of(st.none(), st.floats(width=32)), min_size=1, max_size=6),
    st.lists(st.one_of(st.none(), st.booleans()), min_size=1, max_size=6),
)


@LIBRARIES
@settings(max_examples=40, deadline=None, derandomize=True)
@given(NUMBERS)
def test_a_column_has_the_numbers_of_its_list(lib, numbers):
    """What is missing is NaN; whole numbers and booleans stay such where nothing is missing."""
    kinds = {float: "Float64", bool: "boolean", int: "Int64"}
    kind = next((kinds[type(v)] for v in numbers if v is not None), "Float64")
    column = pd.Series(numbers, dtype=kind) if lib is pd else pl.Series(numbers)
    found = column_array("silo 0", "x", as_series(column))
    missing = [v is None for v in numbers]
    np.testing.assert_array_equal(
        found, np.array([NAN if v is None else v for v in numbers], float)
    )
    assert (found.dtype.kind == "f") == (kind == "Float64" or any(missing))


@LIBRARIES
def test_an_argument_may_be_a_dataframe_or_a_column(lib):
    df = lib.DataFrame({"age": [30.5, 41.0], "sex": [0, 1], "ill": [True, False]})
    (silo,) = read([dict(x=df, y=df["age"], more={"in": [df["sex"], {"deep": df["ill"]}]})])
    np.testing.assert_array_equal(silo.arrays["x"], np.float32([[30.5, 0, 1], [41, 1, 0]]))
    assert silo.columns == (("x", ("age", "sex", "ill")),)
    assert silo.arrays["y"].shape == (2,)
    assert silo.arrays["more.in.0"].tolist() == [0, 1]
    assert silo.arrays["more.in.1.deep"].dtype == bool


SMALL = ["Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64"]


@pytest.mark.parametrize("name", SMALL)
def test_whole_numbers_of_any_width_are_those_that_jax_uses(name):
    values, dtype = [3, 0, 100], np.dtype(name.lower())
    kind = np.int32 if dtype.kind == "i" else np.uint32
    for column in (
        pd.Series(values, dtype=name),  # nullable, of which nothing is missing
        pd.Series(values, dtype=name.lower()),
        pl.Series(values, dtype=getattr(pl, name)),
        np.array(values, dtype),
    ):
        (silo,) = read([dict(k=column)])
        assert silo.arrays["k"].tolist() == values
        assert silo.arrays["k"].dtype.kind == dtype.kind
        assert silo.arrays["k"].dtype.itemsize <= np.dtype(kind).itemsize


@pytest.mark.parametrize("dtype", ["float16", "float32", "Float32", "Float64"])
def test_floats_of_any_width_are_those_of_the_precision_in_use(dtype):
    (silo,) = read([dict(x=pd.Series([0.5, -2.0], dtype=dtype))])
    assert silo.arrays["x"].dtype == np.float32
    assert silo.arrays["x"].tolist() == [0.5, -2.0]


@LIBRARIES
def test_whole_numbers_that_do_not_fit_are_refused(lib):
    wide = lib.DataFrame({"k": [2**40, 1]})
    assert "beyond the range of int32" in refusal(read, [wide])
    with jax.enable_x64(True):
        assert read([wide])[0].arrays["k"].tolist() == [2**40, 1]
        huge = lib.DataFrame({"id": [2**53 + 1, 1], "x": [0.5, 1.0]})
        assert "silo 0, 'x.id': whole numbers beyond 2**53" in refusal(read, [dict(x=huge)])
        dtype = "Int64" if lib is pd else pl.Int64
        missing = lib.Series([2**53 + 1, None], dtype=dtype)
        assert "no float holds them beside NaN" in refusal(read, [dict(k=missing)])
        assert read([dict(k=lib.Series([2**53, 1]))])[0].arrays["k"].tolist() == [2**53, 1]


DAY = datetime.datetime(2020, 1, 1)
NO_NUMBERS = {
    "strings": (["a", "b"], "numpyro_fed.levels(silos, ['x'])"),
    "dates": ([DAY, DAY], "(df['x'] - pandas.Timestamp('2020-01-01')).dt.days"),
    "durations": ([datetime.timedelta(1)] * 2, "in which unit and from which day"),
    "decimals": ([Decimal("1.5"), Decimal("2")], "astype(float)"),
}


@LIBRARIES
@pytest.mark.parametrize("name", NO_NUMBERS)
def test_columns_that_are_no_numbers_are_refused_with_the_way_out(lib, name):
    values, remedy = NO_NUMBERS[name]
    series = lib.Series("x", values) if lib is pl else lib.Series(values, name="x")
    for silo in (dict(x=series), lib.DataFrame({"x": series})):
        words = refusal(read, [silo])
        assert "silo 0, 'x': expected a column of numbers, got dtype" in words
        assert remedy in words


@LIBRARIES
def test_categories_are_never_read_as_their_codes(lib):
    kind = "category" if lib is pd else pl.Categorical
    words = refusal(read, [dict(x=lib.DataFrame({"sex": lib.Series(["f", "m"], dtype=kind)}))])
    assert "silo 0, 'x.sex': expected a column of numbers, got dtype Categorical" in words
    assert "numpyro_fed.levels(silos, ['x.sex'])" in words


@LIBRARIES
def test_a_refusal_of_categories_names_none_of_them(lib):
    enum = pl.Enum(["rare", "no"]) if lib is pl else pd.CategoricalDtype(["rare", "no"], True)
    words = refusal(read, [dict(x=lib.DataFrame({"d": lib.Series(["no", "rare"], dtype=enum)}))])
    assert "got dtype Enum. Agree" in words
    assert "rare" not in words
    # Nor how long the longest of texts is.
    assert "with dtype str_. Convert" in refusal(read, [dict(x=np.array(["no", "rare"]))])


def test_dates_in_an_array_are_refused():
    words = refusal(read, [dict(d=np.array(["2020-01-01"], "datetime64[D]"))])
    assert "silo 0, 'd'" in words
    assert "numpy.timedelta64(1, 'D')" in words


@LIBRARIES
def test_a_column_without_an_argument_is_refused(lib):
    df = lib.DataFrame({"age": [1.0], "y": [1.0], "id": [7]})
    words = refusal(read, [df], by_age)
    assert "silo 0 is a DataFrame with the columns ['age', 'y', 'id']" in words
    assert "no argument 'id': its arguments are ['age', 'y']" in words
    assert "df[['age', 'y']]" in words
    read([df[["age", "y"]]], by_age)
    read([df], lambda **columns: None)


def test_columns_need_names_of_their_own():
    assert "['a'] name two columns" in refusal(read, [pd.DataFrame([[1, 2]], columns=["a", "a"])])
    assert "[0, 1] are no strings" in refusal(read, [dict(x=pd.DataFrame([[1, 2]]))])
    assert "without columns" in refusal(read, [dict(x=pd.DataFrame(index=[0, 1]))])


def test_a_dataframe_needs_narwhals_and_a_column_of_plain_numbers_does_not(monkeypatch):
    monkeypatch.setitem(sys.modules, "narwhals", None)
    for silo in (pd.DataFrame({"y": [1.0]}), dict(y=pd.DataFrame({"y": [1.0]}))):
        with pytest.raises(nf.MissingExtraError, match=r"numpyro-fed\[frames\]"):
            read([silo])
    assert read([dict(y=pd.Series([1.0, 2.0]))])[0].arrays["y"].tolist() == [1.0, 2.0]
    assert read([dict(y=[1.0, 2.0])])[0].arrays["y"].tolist() == [1.0, 2.0]


def frames_of(*columns):
    return [dict(x=pd.DataFrame({c: [1.0, 2.0] for c in names})) for names in columns]


def test_silos_whose_columns_differ_are_refused():
    words = refusal(read, frames_of("ab", "ba"))
    assert "silo 1, 'x': a DataFrame that has its columns in another order: ['b', 'a']" in words
    assert "silo 0 has ['a', 'b']" in words
    assert "pass df[['a', 'b']]" in words
    assert "lacks the columns ['b'] and has the columns ['c']" in refusal(
        read, frames_of("ab", "ac")
    )
    read([*frames_of("ab", "ab"), dict(x=np.ones((2, 2)))])


def test_silos_in_other_processes_compare_their_columns():
    y = np.ones(2)
    facts = [nf.describe(linear, {**silo, "y": y}) for silo in frames_of("ab", "ba", "ab")]
    assert nf.Facts.from_json(facts[0].to_json()) == facts[0]
    assert agree([facts[0], facts[2]]).facts.columns == (("x", ("a", "b")),)
    with pytest.raises(nf.DataError, match=r"silo 1, 'x': .* another order"):
        agree(facts[:2])


# --- missing outcomes ------------------------------------------------------------------------


def normal(y):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def under(likelihood):
    def model(x, y):
        b = numpyro.sample("b", dist.Normal(0, 1))
        with nf.silo_plate("row", x.shape[0]):
            numpyro.sample("y", likelihood(b, x), obs=y)

    return model


def visits(x, y):
    b = numpyro.sample("b", dist.Normal(0, 1))
    with nf.silo_plate("row", x.shape[0], dim=-2):
        u = numpyro.sample("u", dist.Normal(b, 1))
        with numpyro.plate("visit", y.shape[1], dim=-1):
            numpyro.sample("y", dist.Normal(u + x[:, None], 1), obs=y)


COUNTS = [0.0, 2.0, NAN, 1.0, NAN, 2.0]
OUTCOMES = {
    "normal": (under(lambda b, x: dist.Normal(b * x, 1)), [0.3, NAN, -2.0, NAN, 1.0, 4.0]),
    "poisson": (under(lambda b, x: dist.Poisson(jnp.exp(b * x))), COUNTS),
    "bernoulli": (under(lambda b, x: dist.Bernoulli(logits=b * x)), [0, 1, NAN, 1, NAN, 0]),
    "binomial": (under(lambda b, x: dist.Binomial(4, logits=b * x)), COUNTS),
    "categorical": (
        under(lambda b, x: dist.Categorical(logits=x[:, None] * b * jnp.arange(3))),
        COUNTS,
    ),
    "beta": (under(lambda b, x: dist.Beta(jnp.exp(b), 2)), [0.1, NAN, 0.7, 0.5, 0.6, NAN]),
    "gamma": (under(lambda b, x: dist.Gamma(2, jnp.exp(b * x))), [0.1, NAN, 7.0, 5.0, 6.0, NAN]),
    "pareto": (under(lambda b, x: dist.Pareto(0.1, jnp.exp(b * x))), [1, NAN, 7.0, 5.0, 6.0, NAN]),
    "uniform": (under(lambda b, x: dist.Uniform(-jnp.exp(b) - 9, 9)), [0, NAN, 7.0, 5, 6, NAN]),
}


def total(model, silo, at):
    """The log density of a silo's rows, and its gradient, at one value of the latents."""
    layout, (b,) = layout_and_buckets(model, read([silo], model))
    fm = layout.model
    data = jax.tree.map(lambda a: jnp.asarray(a[0]), b.data)
    size = layout.sizes[0]["row"]
    z_L = {p.name: jnp.full((size, p.dim), 0.3) for p in fm.plates}
    rows = lambda z: fm.log_silo({}, z, z_L, data)["row"]  # noqa: E731
    z = jnp.full(fm.dim, at)
    return np.asarray(rows(z)), np.asarray(jax.jacobian(rows)(z))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", slow_but(OUTCOMES, 0, 2))
def test_a_row_whose_outcome_is_missing_adds_exactly_nothing(name):
    model, outcomes = OUTCOMES[name]
    x, y = np.linspace(0.2, 1.5, 6), np.array(outcomes)
    seen = ~np.isnan(y)
    kept = y[seen].astype(int) if name == "categorical" else y[seen]
    for at in (0.4, -1.0):
        found = total(model, dict(x=x, y=y), at)
        expected = total(model, dict(x=x[seen], y=kept), at)
        for mine, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine[seen], theirs, rtol=1e-12)
            assert (mine[~seen] == 0).all()


@pytest.mark.usefixtures("double")
def test_of_several_numbers_in_a_row_those_that_are_missing_add_nothing():
    event = under(lambda b, x: dist.Normal(b * x[:, None], jnp.ones((len(x), 2))).to_event(1))
    x, y = np.array([0.5, 2.0]), np.array([[1.0, NAN], [NAN, NAN]])
    rows, _ = total(event, dict(x=x, y=y), 0.4)
    np.testing.assert_allclose(rows, [dist.Normal(0.2, 1).log_prob(1.0), 0.0], rtol=1e-12)
    rows, _ = total(visits, dict(x=x, y=y), 0.4)
    latent = dist.Normal(0.4, 1).log_prob(0.3)
    expected = [latent + dist.Normal(0.8, 1).log_prob(1.0), latent]
    np.testing.assert_allclose(rows, expected, rtol=1e-12)


def with_and_without():
    """Silos in which some outcomes are missing, and the same without these rows."""
    r = np.random.default_rng(0)
    ys, gone = [r.normal(3, 1, n) for n in (5, 9, 4)], [[0, 3], [1], []]
    holed = [np.where(np.isin(np.arange(len(y)), g), NAN, y) for y, g in zip(ys, gone, strict=True)]
    return (
        [dict(y=y) for y in holed],
        [dict(y=np.delete(y, g)) for y, g in zip(ys, gone, strict=True)],
    )


@pytest.mark.slow
@pytest.mark.usefixtures("double")
def test_a_posterior_is_that_of_the_rows_whose_outcome_is_there():
    holed, kept = with_and_without()
    posteriors = [
        nf.PVI(normal).run(KEY, 1, silos, **quiet).posterior()["mu"] for silos in (holed, kept)
    ]
    y = np.concatenate([silo["y"] for silo in kept])
    precision = len(y) + 0.01
    for posterior in posteriors:
        np.testing.assert_allclose(posterior.mean, y.sum() / precision, rtol=1e-10)
        np.testing.assert_allclose(posterior.variance, 1 / precision, rtol=1e-10)


@pytest.mark.slow
@pytest.mark.usefixtures("double")
def test_the_joint_model_and_the_check_leave_out_the_same():
    holed, kept = with_and_without()
    found, expected = (
        log_density(nf.handlers.joint(normal, silos), (), {}, {"mu": 2.0})[0]
        for silos in (holed, kept)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    nf.check_decomposition(normal, holed)


@pytest.mark.slow
@pytest.mark.usefixtures("double")
def test_silos_elsewhere_leave_out_what_they_miss_and_say_so():
    holed, kept = with_and_without()
    policy = nf.Policy(min_rows=1, parameters_per_row=2.0)
    silos = [nf.Silo(silo, names={"normal": normal}, policy=policy) for silo in holed]
    federation = nf.Federation(nf.network.InMemory([silo.answer for silo in silos]))
    found = nf.PVI(normal).run(KEY, 1, federation, **quiet)
    expected = nf.PVI(normal).run(KEY, 1, kept, **quiet)
    assert found.plan.facts.missing == ("y",)
    assert json.loads(found.plan.to_json())["facts"]["missing"] == ["y"]
    for name in ("mean", "variance"):
        a, b = (getattr(fit.posterior()["mu"], name) for fit in (found, expected))
        np.testing.assert_allclose(a, b, rtol=1e-10)


def test_a_plan_that_forgets_what_is_missing_is_refused():
    holed, _ = with_and_without()
    facts = [nf.describe(normal, silo) for silo in holed]
    assert [f.missing for f in facts] == [("y",), ("y",), ()]
    plan = agree(facts)
    fm = split(normal, [plan.template()])
    plan = with_terms(plan, fm, facts)
    check_plan(plan, facts[0], fm, 0)
    with pytest.raises(nf.ModelError, match=r"nothing is missing in \['y'\]"):
        check_plan(replace(plan, facts=replace(plan.facts, missing=())), facts[0], fm, 0)
    with pytest.raises(nf.ModelError, match="its text has other sites"):
        check_plan(replace(plan, terms=()), facts[0], fm, 0)


@LIBRARIES
def test_whole_numbers_may_miss_at_one_silo_alone(lib):
    """There they are floats beside NaN, and elsewhere whole numbers."""
    model, _ = OUTCOMES["categorical"]
    dtype = "Int64" if lib is pd else pl.Int64
    ys = [[0, 2, None, 1], [1, 2, 0]]
    silos = [
        dict(x=np.ones(len(y)), y=lib.Series(y, dtype=dtype if None in y else None)) for y in ys
    ]
    found = read(silos, model)
    assert [a.arrays["y"].dtype.kind for a in found] == ["f", "f"]
    layout_and_buckets(model, found)
    booleans = lib.Series([True, None, False], dtype="boolean" if lib is pd else pl.Boolean)
    np.testing.assert_array_equal(read([dict(y=booleans)])[0].arrays["y"], [1.0, NAN, 0.0])


def gaussian(x, y):
    b = numpyro.sample("b", dist.Normal(0, 1))
    with nf.silo_plate("row", x.shape[0]):
        numpyro.sample("y", dist.MultivariateNormal(b * jnp.ones(2), jnp.eye(2)), obs=y)


def logged(x, y):
    b = numpyro.sample("b", dist.Normal(0, 1))
    with nf.silo_plate("row", x.shape[0]):
        numpyro.sample("y", dist.Normal(b, 1), obs=jnp.log(y))


def lagged(x, y):
    b = numpyro.sample("b", dist.Normal(0, 1))
    with nf.silo_plate("row", x.shape[0]):
        numpyro.sample("x", dist.Normal(b, 1), obs=x)
        numpyro.sample("y", dist.Normal(b * x, 1), obs=y)


def shown(x, y):
    b = numpyro.sample("b", dist.Normal(0, 1))
    with nf.silo_plate("row", x.shape[0]):
        numpyro.deterministic("twice", 2 * x)
        numpyro.sample("y", dist.Normal(b, 1), obs=y)


def weighed(x, y):
    b = numpyro.sample("b", dist.Normal(0, 1))
    with nf.silo_plate("row", x.shape[0]), numpyro.handlers.scale(scale=x):
        numpyro.sample("y", dist.Normal(b, 1), obs=y)


GOOD, HOLED = np.array([1.0, 2.0, 0.5]), np.array([1.0, NAN, 0.5])
NOT_MISSING = {
    "covariate": (OUTCOMES["normal"][0], dict(x=HOLED, y=GOOD), "'x': 1 of 3 .* site 'y' reads"),
    "covariate elsewhere": (lagged, dict(x=HOLED, y=GOOD), "'x': 1 of 3 .* site 'y' reads 'x'"),
    "computed": (logged, dict(x=GOOD, y=HOLED), "'y': 1 of 3 .*compute it before the run"),
    "deterministic": (shown, dict(x=HOLED, y=GOOD), "'x': 1 of 3 .* site 'twice' reads 'x'"),
    "weight": (weighed, dict(x=HOLED, y=GOOD), "'x': 1 of 3 .* site 'y' reads 'x'"),
    "not whole": (OUTCOMES["poisson"][0], dict(x=GOOD, y=HOLED), "'y': .*whole numbers, got 0.5"),
    "infinite": (
        OUTCOMES["normal"][0],
        dict(x=GOOD, y=np.array([1, np.inf, 0])),
        "'y': 1 of 3 .*infinite",
    ),
    "masked": (
        OUTCOMES["normal"][0],
        dict(x=GOOD, y=np.ma.masked_invalid(HOLED)),
        "'y': a masked array",
    ),
}


@pytest.mark.parametrize("name", NOT_MISSING)
def test_what_may_not_miss_is_refused(name):
    model, silo, words = NOT_MISSING[name]
    good = dict(x=GOOD, y=np.array([1.0, 2.0, 0.0]))
    with pytest.raises(nf.DataError, match=f"silo 1, {words}"):
        layout_and_buckets(model, read([good, silo], model))


def test_a_row_that_counts_as_one_cannot_miss_a_part():
    with pytest.raises(nf.ModelError, match=r"site 'y': .*MultivariateNormal.* \(2,\) numbers"):
        layout_and_buckets(gaussian, read([dict(x=GOOD, y=np.stack([GOOD, HOLED], 1))]))


def test_numbers_that_the_text_computes_are_no_missing_outcomes():
    def root(x, y):
        b = numpyro.sample("b", dist.Normal(0, 1))
        with nf.silo_plate("row", x.shape[0]):
            numpyro.sample("x", dist.Normal(b, 1), obs=jnp.sqrt(x))
            numpyro.sample("y", dist.Normal(b, 1), obs=y)

    with pytest.raises(nf.DataError, match=r"site 'x': the observed value nan of row 0"):
        layout_and_buckets(root, read([dict(x=-GOOD, y=HOLED)]))


# --- new data --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fitted():
    r = np.random.default_rng(0)

    def silo(n):
        df = pd.DataFrame({"a": r.normal(size=n), "b": r.integers(0, 3, n)})
        return dict(x=df, y=np.where(np.arange(n) == 1, NAN, df["a"] + df["b"]))

    return nf.SFVI(linear, start=None).run(KEY, 0, [silo(6), silo(9)], **quiet)


def test_new_rows_are_predicted_from_a_dataframe_of_either_library(fitted):
    columns = {"a": [0.5, 1.0], "b": [2, 0]}
    expected = fitted.predict(KEY, dict(x=np.array([[0.5, 2.0], [1.0, 0.0]])), n=50)["y"]
    for lib in (pd, pl):
        new = dict(x=lib.DataFrame(columns), y=[NAN, NAN])  # outcomes in new data are not used
        np.testing.assert_array_equal(fitted.predict(KEY, new, n=50)["y"], expected)
        holed = dict(x=lib.DataFrame({"a": [0.5, None], "b": [2, 0]}))
        words = refusal(fitted.predict, KEY, holed)
        assert "new data, 'x': 1 of 4 values are missing (NaN), and 'y' cannot" in words
        lacking = dict(x=lib.DataFrame({"a": [0.5]}))
        assert "new data, 'x': a DataFrame that lacks the columns ['b']" in refusal(
            fitted.predict, KEY, lacking
        )
        other = dict(x=lib.DataFrame({"a": [0.5], "b": ["high"]}))
        assert "new data, 'x.b': expected a column of numbers" in refusal(
            fitted.predict, KEY, other
        )


def test_rows_of_the_fit_are_predicted_where_their_outcome_is_missing(fitted):
    y = fitted.predict(KEY, silo=0, n=50)["y"]
    assert y.shape == (50, 6)
    assert np.isfinite(y).all()


def test_a_predictive_check_shows_what_was_observed_alone(fitted):
    figure = fitted.plot_check(0, n=3)
    shown = figure.axes[0].lines[-1]
    y = fitted._silos.data_of(0).arrays["y"]
    assert np.isnan(y).sum() == 1
    np.testing.assert_allclose(shown.get_xdata()[1:], np.sort(y[~np.isnan(y)]), rtol=1e-6)
    assert [len(line.get_xdata()) for line in figure.axes[0].lines[:3]] == [6, 6, 6]


def test_new_data_have_the_kinds_of_the_fit():
    def effects(of, y=None):
        u = numpyro.sample("u", dist.Normal(0, 1).expand([3]).to_event(1))
        with nf.silo_plate("row", of.shape[0]):
            numpyro.sample("y", dist.Normal(u[of], 1), obs=y)

    silos = [dict(of=np.array([0, 1, 2]), y=np.zeros(3)), dict(of=np.array([2, 1]), y=np.ones(2))]
    fit = nf.SFVI(effects, start=None).run(KEY, 0, silos, **quiet)
    expected = fit.predict(KEY, dict(of=np.array([2, 0])), n=20)["y"]
    # As pandas has whole numbers after a merge.
    floats = fit.predict(KEY, dict(of=np.array([2.0, 0.0])), n=20)["y"]
    np.testing.assert_array_equal(floats, expected)
    words = refusal(fit.predict, KEY, dict(of=np.array([0.5])))
    assert "fractions in ['of'], where the fit had whole numbers" in words
    assert "An index must be a whole number" in words
    words = refusal(fit.predict, KEY, dict(of=np.zeros((2, 1), int)))
    assert "new data, 'of' has the shape (2, 1), with 2 axes, where the fit had 1" in words


@LIBRARIES
def test_a_new_dataframe_has_the_columns_of_the_fit(lib):
    silos = [lib.DataFrame({"age": [1.0, 2.0], "y": [1.0, 3.0]}) for _ in range(2)]
    fit = nf.SFVI(by_age, start=None).run(KEY, 0, silos, **quiet)
    assert fit.predict(KEY, lib.DataFrame({"age": [3.0]}), n=5)["y"].shape == (5, 1)
    words = refusal(fit.predict, KEY, lib.DataFrame({"y": [3.0]}))
    assert "arguments are ['age', 'y']" in words
    words = refusal(fit.predict, KEY, lib.DataFrame({"age": [3.0], "id": [1]}))
    assert "no argument 'id'" in words


# --- levels ----------------------------------------------------------------------------------


def rows_of(**counts):
    return [name for name, n in counts.items() for _ in range(n)]


HERE, THERE = rows_of(Rome=6, Bern=5, Nice=4), rows_of(Oslo=5, Rome=1, Nice=4, Kiel=1)


@LIBRARIES
@pytest.mark.parametrize("kind", ["string", "category", "array"])
def test_levels_are_agreed_and_the_rare_ones_are_one(lib, kind):
    def silo(names):
        if kind == "array":
            return dict(city=np.array(names))
        category = "category" if lib is pd else pl.Categorical
        dtype = {"string": None, "category": category}[kind]
        return lib.DataFrame({"city": lib.Series(names, dtype=dtype)})

    silos = [silo(HERE), silo(THERE)]
    levels = nf.levels(silos, ["city"])
    assert levels["city"] == ("Bern", "Oslo", "Rome", "other")
    assert dict(levels) == {"city": levels["city"]}
    assert nf.levels(silos[::-1], ["city"]) == levels
    codes = [np.asarray(levels.encode(s)["city"]) for s in silos]
    assert [c.dtype.kind for c in codes] == ["i", "i"]
    assert codes[0].tolist() == [2] * 6 + [0] * 5 + [3] * 4
    assert codes[1].tolist() == [1] * 5 + [2] + [3] * 5
    named = levels.decode("city", codes[1])
    assert named.tolist() == rows_of(Oslo=5, Rome=1, other=5)


def test_what_a_silo_sends_has_names_alone_and_none_of_a_rare_level():
    sent = nf.level_names(dict(city=HERE, sex=["f"] * 10 + ["m"] * 5), ["city", "sex"])
    assert sent == {"city": ("Bern", "Rome", "other"), "sex": ("f", "m")}
    assert nf.level_names(dict(city=HERE), ["city"], min_count=6) == {"city": ("Rome", "other")}
    there = nf.level_names(dict(city=THERE, sex=["f"] * 11), ["sex", "city"])
    levels = nf.Levels.union(json.loads(json.dumps(sent)), there)
    assert levels.names == {"city": ("Bern", "Oslo", "Rome", "other"), "sex": ("f", "m")}


def test_other_is_a_level_where_one_is_hidden_or_it_is_asked_for():
    """A level that no row of any silo has would have a coefficient of the prior alone."""
    silos = [dict(a=rows_of(x=6, y=5), b=rows_of(u=9, v=2)), dict(a=rows_of(y=11), b=["u"] * 11)]
    assert nf.levels(silos, ["a", "b"]).names == {"a": ("x", "y"), "b": ("u", "other")}
    assert nf.levels(silos, ["a", "b"], min_count=2).names == {"a": ("x", "y"), "b": ("u", "v")}
    asked = nf.levels(silos, ["a", "b"], other="rest")
    assert asked.names == {"a": ("x", "y", "rest"), "b": ("u", "rest")}
    assert asked.encode(silos[0])["b"].tolist() == [0] * 9 + [1] * 2
    rare, levels = dict(a=["z"], b=["w"]), nf.levels(silos, ["a", "b"])
    for new, words in ((True, "other='other'"), (False, "this silo among the silos")):
        assert f"agree on the levels again, with {words}." in refusal(levels.encode, rare, new=new)


def test_a_column_of_an_argument_is_named_with_it():
    df = pd.DataFrame({"sex": ["f", "m"] * 5, "age": range(10)}, index=range(10, 0, -1))
    silo = dict(x=df, deep={"er": df["sex"]})
    levels = nf.levels([silo], ["x.sex", "deep.er"])
    encoded = levels.encode(silo)
    assert encoded["x"]["sex"].tolist() == [0, 1] * 5
    assert encoded["deep"]["er"].tolist() == [0, 1] * 5
    assert encoded["x"].index.tolist() == df.index.tolist()
    assert df["sex"].tolist() == ["f", "m"] * 5
    np.testing.assert_array_equal(
        read([encoded])[0].arrays["x"], np.stack([[0, 1] * 5, range(10)], 1)
    )


def test_a_level_of_the_name_of_all_rare_ones_is_theirs():
    levels = nf.levels([dict(c=rows_of(other=6, a=6))], ["c"])
    assert levels["c"] == ("a", "other")
    assert nf.levels([dict(c=rows_of(other=6))], ["c"], other="rest")["c"] == ("other", "rest")


def test_whole_numbers_and_booleans_are_levels_by_their_names():
    levels = nf.levels([dict(k=np.repeat([2, 10], 5), b=[True] * 10)], ["k", "b"])
    assert levels.names == {"k": ("10", "2"), "b": ("True",)}


LEVELS = nf.Levels.union({"city": ("Bern", "Rome")}, other="other")


def test_unknown_levels_are_refused_and_rare_ones_are_not():
    many = dict(city=rows_of(Rom=5, Bern=1))
    words = refusal(LEVELS.encode, many)
    assert "column 'city': 5 rows have the level 'Rom'" in words
    assert "['Bern', 'Rome', 'other']" in words
    assert "agree on the levels again" in words
    few = dict(city=["Rom", "Bern"])
    assert LEVELS.encode(few)["city"].tolist() == [2, 0]
    words = refusal(LEVELS.encode, few, new=True)
    assert "1 rows have the level 'Rom'" in words
    assert "Write 'other' for a rare one" in words


NO_LEVELS = {
    "lacking": (dict(town=["a"]), "there is no column 'city': the data have ['town']"),
    "None": (dict(city=["a", None]), "column 'city': 1 of 2 values are missing"),
    "NaN": (pd.DataFrame({"city": ["a", NAN]}), "column 'city': 1 of 2 values are missing"),
    "NA": (pd.DataFrame({"city": pd.array([1, pd.NA], "Int64")}), "1 of 2 values are missing"),
    "null": (pl.DataFrame({"city": ["a", None]}), "column 'city': 1 of 2 values are missing"),
    "numbers": (dict(city=np.array([0.5])), "got 0.5 of type float"),
    "dataframe": (dict(city=pd.DataFrame({"a": ["b"]})), "name one of them, such as 'city.a'"),
}


@pytest.mark.parametrize("name", NO_LEVELS)
def test_columns_without_levels_are_refused(name):
    silo, words = NO_LEVELS[name]
    assert words in refusal(LEVELS.encode, silo)
    assert "silo 1: " in refusal(nf.levels, [dict(city=["a"]), silo], ["city"])


def test_other_wrong_use_of_levels_is_refused():
    silo = dict(city=["a"])
    assert "must be a list" in refusal(nf.levels, silo, ["city"])
    assert "is empty" in refusal(nf.levels, [], ["city"])
    assert "list of names, got the string 'city'" in refusal(nf.levels, [silo], "city")
    assert "part 1 has levels of the columns ['b']" in refusal(
        nf.Levels.union, {"a": ()}, {"b": ()}
    )
    assert "there are no parts" in refusal(nf.Levels.union)
    assert "from 0 to 2, got 0 to 3" in refusal(LEVELS.decode, "city", [0, 3])
    assert "got -1 to 0" in refusal(LEVELS.decode, "city", [0, -1])
    assert "whole numbers, got dtype float64" in refusal(LEVELS.decode, "city", [0.0])
    assert "no levels of 'town'" in refusal(LEVELS.decode, "town", [0])
    with pytest.raises(ValueError, match="min_count must be a positive integer"):
        nf.level_names(silo, ["city"], 0)


# --- moments ---------------------------------------------------------------------------------


def far():
    """Covariates whose means are 1e8 and whose sds are one, of three silos."""
    r = np.random.default_rng(1)
    return [1e8 + r.normal(m, 1, (n, 2)) for n, m in ((7, 0), (1, 3), (900, 1))]


def test_moments_are_those_of_the_pooled_rows():
    xs = far()
    pooled = np.concatenate(xs)
    scaling = nf.moments([dict(x=x) for x in xs])
    exact = pooled - 1e8  # without a loss
    np.testing.assert_allclose(scaling.mean["x"] - 1e8, exact.mean(0), rtol=1e-6)
    np.testing.assert_allclose(scaling.sd["x"], exact.std(0), rtol=1e-6)
    assert scaling.count["x"].tolist() == [908, 908]
    parts = [nf.moments([dict(x=x)]) for x in xs]
    for united in (nf.Scaling.union(*parts), nf.Scaling.union(*parts[::-1])):
        np.testing.assert_allclose(united.sd["x"], exact.std(0), rtol=1e-6)
        np.testing.assert_allclose(united.mean["x"] - 1e8, exact.mean(0), rtol=1e-6)


def test_standard_units_lead_there_and_back():
    silos = [dict(x=x, k=np.arange(len(x)), n=3) for x in far()]
    scaling = nf.moments(silos)
    assert set(scaling.mean) == {"x"}
    units = [scaling.standardise(silo) for silo in silos]
    pooled = np.concatenate([silo["x"] for silo in units])
    np.testing.assert_allclose(pooled.mean(0), 0, atol=1e-7)
    np.testing.assert_allclose(pooled.std(0), 1, rtol=1e-7)
    assert units[0]["n"] == 3
    assert units[0]["k"] is silos[0]["k"]
    for silo, unit in zip(silos, units, strict=True):
        np.testing.assert_allclose(scaling.unstandardise(unit)["x"], silo["x"], rtol=1e-15)


@LIBRARIES
def test_moments_of_dataframes(lib):
    def df(ages, index=None):
        table = {"age": ages, "one": [1.0] * len(ages), "city": ["a"] * len(ages), "k": ages}
        table["k"] = [int(a) for a in ages]
        return pd.DataFrame(table, index=index) if lib is pd else pl.DataFrame(table)

    silos = [df([20.0, 40.0], [7, 3]), df([60.0, 80.0, 50.0])]
    scaling = nf.moments(silos)
    assert scaling.mean == {"age": 50.0, "one": 1.0}
    assert scaling.sd == {"age": 20.0, "one": 0.0}
    unit = scaling.standardise(silos[0])
    assert list(unit.columns) == ["age", "one", "city", "k"]
    assert list(unit["age"]) == [-1.5, -0.5]
    assert list(unit["one"]) == [1.0, 1.0]  # an intercept stays one
    matrices = [dict(x=silo[["age", "k"]]) for silo in silos]
    scaling = nf.moments(matrices, ["x"])
    assert scaling.columns == {"x": ("age", "k")}
    assert scaling.mean["x"].tolist() == [50.0, 50.0]
    unit = scaling.standardise(matrices[0])["x"]
    assert list(unit["k"]) == [-1.5, -0.5]
    words = refusal(scaling.standardise, dict(x=silos[0][["k", "age"]]))
    assert "the data, 'x': a DataFrame that has its columns in another order" in words


def test_missing_numbers_do_not_count_and_further_axes_do():
    scaling = nf.moments([dict(y=HOLED), dict(y=np.array([NAN])), dict(y=np.array([3.0]))])
    np.testing.assert_allclose(scaling.mean["y"], 1.5)
    np.testing.assert_allclose(scaling.sd["y"], np.std([1, 0.5, 3]))
    assert scaling.count["y"] == 3
    np.testing.assert_array_equal(np.isnan(scaling.standardise(dict(y=HOLED))["y"]), [0, 1, 0])
    visits = np.random.default_rng(0).normal(size=(4, 3, 2))
    scaling = nf.moments([dict(x=visits[:3]), dict(x=visits[3:])])
    np.testing.assert_allclose(scaling.mean["x"], visits.mean((0, 1)))
    np.testing.assert_allclose(scaling.sd["x"], visits.std((0, 1)))
    assert "no silo has a number" in refusal(nf.moments, [dict(y=np.array([NAN]))])


def test_wrong_use_of_moments_is_refused():
    x = dict(x=np.ones((3, 2)))
    assert "must be a list" in refusal(nf.moments, x)
    assert "is empty" in refusal(nf.moments, [])
    assert "silo 0 lacks ['z']: it has ['x']" in refusal(nf.moments, [x], ["z"])
    assert "silo 1 has moments of ['z']" in refusal(nf.moments, [x, dict(z=np.ones(3))])
    assert "silo 1, 'x': 3 columns" in refusal(nf.moments, [x, dict(x=np.ones((2, 3)))])
    assert "silo 0, 'x': expected a column of numbers, got dtype String" in refusal(
        nf.moments, [dict(x=pd.Series(["a"]))], ["x"]
    )
    scaling = nf.moments([x])
    assert "the data lack 'x'" in refusal(scaling.standardise, dict(z=1))
    assert "'x' has the shape (3,)" in refusal(scaling.standardise, dict(x=np.ones(3)))
    assert "there are no parts" in refusal(nf.Scaling.union)
    assert "part 1 has moments of ['z']" in refusal(
        nf.Scaling.union, scaling, nf.moments([dict(z=np.ones(3))])
    )


def test_a_frame_without_a_column_for_an_argument_is_refused_with_the_way_out():
    def text(x, n_hospitals, y):
        pass

    frame = pd.DataFrame(dict(x=[1.0, 2.0], y=[0.0, 1.0]))
    words = refusal(nf.fit, KEY, text, [frame], **quiet)
    assert "silo 0 is a DataFrame" in words
    assert "lacks ['n_hospitals']" in words
    assert "dict({c: df[c] for c in df.columns}, n_hospitals=...)" in words
