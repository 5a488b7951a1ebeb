"""Tables whose columns are not what a formula takes them for are refused, by the silo's name."""

import decimal
import warnings

import numpy as np
import pandas as pd
import pytest

import numpyro_fed as nf
from numpyro_fed.basics.errors import DataError, DataWarning, ModelError
from numpyro_fed.network import InMemory

pytest.importorskip("formulae")
pytestmark = pytest.mark.usefixtures("double")
NAMES = "Basel", "Bern", "Chur"


def hospital(n=40, seed=0, **columns):
    r = np.random.default_rng(seed)
    bmi, ward = r.normal(27, 4, n).round(1), np.resize(["heart", "skin"], n)
    return pd.DataFrame(dict(y=r.normal(size=n), bmi=bmi, ward=ward) | columns)


def hospitals(**changed):
    """Three of them, of which some have a column changed by a function."""
    found = {name: hospital(seed=seed) for seed, name in enumerate(NAMES)}
    for name, (column, change) in changed.items():
        found[name][column] = change(found[name][column])
    return found


def silent(f, tables):
    with warnings.catch_warnings():
        warnings.simplefilter("error", DataWarning)
        return f.silos(tables)


def one_is_text(bmi):
    return pd.Series(["n/a", *bmi[1:]], dtype=object)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda bmi: bmi.astype(str), "numbers at silo Basel, silo Chur and text at silo Bern"),
        (one_is_text, "numbers at silo Basel, silo Chur and text among other values at silo Bern"),
        (lambda bmi: pd.Categorical(bmi), "numbers at silo Basel, silo Chur and text at silo Bern"),
        (lambda bmi: pd.Timestamp("2024-01-01"), "'bmi' is a date at silo Bern.*dt.days"),
        (lambda bmi: np.nan, "silo Bern: no row has a value of 'bmi'.*Leave the silo out"),
        (lambda bmi: None, "silo Bern: no row has a value of 'bmi'.*Leave the silo out"),
    ],
)
def test_a_column_of_another_kind_at_one_silo_is_refused(change, says):
    tables, f = hospitals(Bern=("bmi", change)), nf.formula("y ~ bmi + (1 | silo)")
    with pytest.raises(DataError, match=says) as raised:
        f.silos(tables)
    if "text" in says:
        assert "pandas.to_numeric(df['bmi'], errors=\"coerce\")" in str(raised.value)


def test_a_yes_or_no_in_words_at_one_silo_is_refused():
    tables = hospitals(Bern=("ward", lambda ward: ward == "heart"))
    with pytest.raises(DataError, match="yes or no at silo Bern and text at silo Basel, silo Chur"):
        nf.formula("y ~ ward").silos(tables)
    f = nf.formula("y ~ C(ward)")
    silent(f, tables)
    assert f.agreed.names == {"C_ward": ("False", "True", "heart", "skin")}


def test_a_column_in_other_units_is_told_by_the_name():
    tables = hospitals(Bern=("bmi", lambda bmi: 100 * bmi))
    with pytest.warns(DataWarning, match="silo 'Bern' has the mean") as caught:
        nf.formula("y ~ bmi").silos(tables)
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    "change",
    [
        lambda bmi: bmi.astype(object),
        lambda bmi: bmi.map(lambda x: decimal.Decimal(str(x))),
        lambda bmi: bmi.map(np.float32).astype(object),
    ],
)
def test_objects_of_numbers_are_numbers(change):
    expected = silent(nf.formula("y ~ bmi"), hospitals())
    found = silent(nf.formula("y ~ bmi"), hospitals(Bern=("bmi", change)))
    for name in NAMES:
        np.testing.assert_allclose(found[name]["bmi"], expected[name]["bmi"], rtol=1e-6)


@pytest.mark.parametrize("missing", [None, np.nan, pd.NA])
def test_what_is_missing_among_objects_is_a_missing_number(missing):
    tables = hospitals(Bern=("bmi", lambda bmi: pd.Series([missing, *bmi[1:]], dtype=object)))
    f = nf.formula("y ~ bmi")
    with pytest.warns(DataWarning, match="silo Bern: 1 of 40 rows miss a covariate .'bmi'."):
        silos = f.silos(tables)
    np.testing.assert_array_equal(silos["Bern"]["bmi"], tables["Bern"]["bmi"][1:].astype(float))
    yes = pd.Series([missing] + [True, False] * 19 + [True], dtype=object)
    f = nf.formula("y ~ t")
    with pytest.warns(DataWarning, match="1 of 40 rows"):
        f.silos([hospital(t=yes), hospital(t=np.resize([True, False], 40))])
    assert f.agreed.names == {"t": ("False", "True")}


def test_numbers_in_text_are_refused_and_names_in_text_are_not():
    text = {name: t.assign(bmi=t["bmi"].astype(str)) for name, t in hospitals().items()}
    with pytest.raises(DataError, match=r"'bmi' is text at silo Basel, silo Bern, silo Chur .'2"):
        nf.formula("y ~ bmi").silos(text)
    text["Bern"].loc[:5, "bmi"] = "n/a"
    with pytest.raises(DataError, match=r"'n/a', say.*many different numbers"):
        nf.formula("y ~ bmi").silos(text)
    comma = {n: t.assign(bmi=t["bmi"].str.replace(".", ",")) for n, t in text.items()}
    with pytest.raises(DataError, match="many different numbers"):
        nf.formula("y ~ log(bmi)").silos(comma)
    # A code of few numbers, or one that is said to be one.
    dose, code = np.resize(["1", "2", "10"], 40), np.resize([str(i) for i in range(20)], 40)
    f = nf.formula("y ~ dose + C(code)", min_count=2)
    f.silos([hospital(dose=dose, code=code)] * 2)
    assert f.agreed.names["dose"] == ("1", "2", "10")
    assert len(f.agreed.names["C_code"]) == 20


def test_a_term_that_drops_out_is_said_to():
    with pytest.warns(DataWarning, match="'c' is 'a' at all rows of all silos, which tells"):
        nf.formula("y ~ bmi + c").silos([hospital(c="a"), hospital(c="a", seed=1)])
    with pytest.warns(DataWarning, match="'c' is 3 at all rows of all silos, which tells"):
        nf.formula("y ~ bmi * c").silos([hospital(c=3.0), hospital(c=3.0, seed=1)])
    silent(nf.formula("y ~ bmi + offset(log(c))"), [hospital(c=3.0), hospital(c=3.0, seed=1)])
    village = [f"village {i}" for i in range(40)]
    with pytest.raises(DataError, match="'c': each level has fewer than 5 rows"):
        nf.formula("y ~ bmi + c").silos([hospital(c=village)] * 2)
    mostly = ["town"] * 10 + village[10:]
    with pytest.warns(DataWarning, match="silo 0, 'c': 30 of 40 rows have levels of which no silo"):
        nf.formula("y ~ bmi + c").silos([hospital(c=mostly), hospital(c="town")])


def over_federation(tables):
    nodes = [nf.Silo(one, names={}) for one in tables.values()]
    return nf.Federation(InMemory([node.answer for node in nodes]), names={})


def test_silos_in_other_processes_refuse_it_as_well():
    text = hospitals(Bern=("bmi", lambda bmi: bmi.astype(str)))
    f = nf.formula("y ~ bmi + ward")
    with pytest.raises(DataError, match=r"silo 1 refuses 'moments'.*else than numbers"):
        f.agree(over_federation(text), categorical=["ward"])
    f.agree(over_federation(hospitals()), categorical=["ward"])
    with pytest.raises(DataError, match="Bern, 'bmi': silos have agreed on numbers"):
        f.silo(text["Bern"], "Bern")
    village = {n: t.assign(ward=[f"village {i}" for i in range(40)]) for n, t in text.items()}
    with pytest.raises(DataError, match="'ward': each level has fewer than 5 rows"):
        nf.formula("y ~ ward").agree(over_federation(village), categorical=["ward"])
    rare = hospitals()["Bern"].assign(ward=["heart"] * 2 + [f"village {i}" for i in range(38)])
    f.agree(over_federation({**hospitals(), "Bern": rare}), categorical=["ward"])
    with pytest.warns(DataWarning, match="Bern, 'ward': 38 of 40 rows have levels"):
        f.silo(rare, "Bern")


def test_outcomes_that_are_missing_are_counted_beside_covariates():
    tables = hospitals(Bern=("y", lambda y: np.nan))
    tables["Chur"].loc[:2, "y"] = np.nan
    tables["Chur"].loc[2:3, "bmi"] = np.nan
    with pytest.warns(DataWarning) as caught:
        nf.formula("y ~ bmi").silos(tables)
    (all_silos,) = caught
    assert str(all_silos.message) == (
        "silo Bern: no row has an outcome 'y', and the silo tells nothing. "
        "silo Chur: 2 of 40 rows miss a covariate ('bmi'), and 2 of 38 rows miss the outcome 'y'. "
        "Rows that miss a covariate are left out. To keep them give the columns a distribution: "
        "formula(missing={...})."
    )


@pytest.mark.parametrize(
    ("formula", "values", "says"),
    [
        ("c ~ bmi", ["yes", "no"], r"got \w+. Make it one: table\['c'\].map..'no': 0, 'yes': 1"),
        ("c ~ bmi", ["dead", "alive"], "map..'alive': 0, 'dead': 1"),
        ("c ~ bmi", [1, 2], r"silo Basel, 'c': 'bernoulli' has the values 0 and 1.*Subtract 1"),
        ("c ~ bmi", [0, 1, 9], r"here are \[0.0, 1.0, 9.0\].$"),
    ],
)
def test_codes_of_yes_and_no_are_asked_for(formula, values, says):
    tables = {name: hospital(c=np.resize(values, 40), seed=i) for i, name in enumerate(NAMES)}
    with pytest.raises(DataError, match=says):
        nf.formula(formula, family="bernoulli").silos(tables)


def test_a_function_of_levels_is_told_what_has_levels():
    f = nf.formula("y ~ log(ward)")
    with pytest.raises(ModelError, match=r"log\(ward\).*Numbers are none of \['ward'\]"):
        f.silos(hospitals())


def test_a_silo_without_a_complete_row_is_refused():
    tables = hospitals(Bern=("ward", lambda ward: ward.where(np.arange(40) < 20)))
    tables["Bern"].loc[:19, "bmi"] = np.nan
    with pytest.raises(DataError, match="silo Bern: no row has a value of 'bmi' and of 'ward'"):
        nf.formula("y ~ bmi + ward").silos(tables)
    f = nf.formula("y ~ bmi + (1 | ward)")
    f.agree(hospitals())
    with pytest.raises(DataError, match="the silo: no row has a value of 'ward'"):
        f.silo(hospital(ward=None))


def test_new_rows_that_miss_a_covariate_are_refused_by_their_place():
    f = nf.formula("y ~ bmi + ward")
    f.silos(hospitals())
    new = pd.DataFrame(dict(bmi=[20, np.nan, 30, 31], ward=["skin", "skin", "heart", None]))
    with pytest.raises(
        DataError, match=r"rows \[1, 3\] .from 0. of the new table miss \['bmi', 'w"
    ):
        f.silo(new, new=True)
    assert len(f.silo(new.dropna(), new=True)["bmi"]) == 2


def test_one_table_of_all_hospitals_is_refused_with_the_way_out():
    pooled = pd.concat([t.assign(hospital=n) for n, t in hospitals().items()])
    with pytest.raises(DataError, match=r'dict\(tuple\(df.groupby\("hospital"\)\)\)'):
        nf.formula("y ~ bmi").silos(pooled)
    assert [*nf.formula("y ~ bmi").silos(dict(tuple(pooled.groupby("hospital"))))] == [*NAMES]
