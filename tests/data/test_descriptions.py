"""What silos tell of their columns before a fit: how roughly, of how many rows, and what is odd."""

import datetime
import json

import numpy as np
import pandas as pd
import polars as pl
import pytest
from apart import told_by_bytes

import numpyro_fed as nf
from numpyro_fed.basics.errors import DataError, RefusedError, ReplyError
from numpyro_fed.data.descriptions import ColumnAtSilo, describe_columns
from numpyro_fed.network import InMemory
from numpyro_fed.rounds.messages import Question, read, write

SIZES = dict(Basel=200, Bern=40, Chur=12)


def of(values, min_count=10):
    """The description of one column."""
    return describe_columns(dict(x=values), None, min_count)["x"]


def hospital(n, seed=0):
    """Clean data of one of three hospitals that are not alike."""
    r = np.random.default_rng(seed)
    chol = np.where(r.uniform(size=n) < 0.15, np.nan, r.normal(5.2, 1, n).round(1))
    return dict(
        age=r.normal(60 + 5 * seed, 14, n).round(),
        weight=r.normal(78 + 3 * seed, 14, n).round(1),
        sex=r.choice(["female", "male"], n, p=[0.4 + 0.1 * seed, 0.6 - 0.1 * seed]),
        stage=r.choice(["I", "II", "III", "IV"], n, p=[0.4, 0.3, 0.25, 0.05]),
        crp=np.exp(r.normal(1.5, 1, n)).round(1),
        change=r.normal(0, 3, n).round(2),
        visits=r.poisson(2.5, n),
        event=r.uniform(size=n) < 0.1,
        temp=r.normal(36.9, 0.6, n).round(1),
        chol=chol,
    )


def clean():
    return {name: hospital(n, j) for j, (name, n) in enumerate(SIZES.items())}


def with_column(column, by_silo):
    """Clean data with another column at some silos, as ``by_silo`` makes it of the old one."""
    data = clean()
    for name, change in by_silo.items():
        data[name][column] = change(data[name][column])
    return data


def federation_of(silos, heard=None, policy=None, **options):
    options["silo_names"] = list(silos)
    return told_by_bytes(silos.values(), heard, policy=policy, **options)


# --- what a silo tells -----------------------------------------------------------------------


def test_numbers_are_rough():
    found = of(np.arange(1000.0) * 1.234567 + 100)
    assert found == ColumnAtSilo(
        "number", 10, 1000, 0, quantiles=(160.0, 410.0, 720.0, 1000.0, 1300.0)
    )
    assert of(-np.arange(40.0)).quantiles == (None, -29.0, -20.0, -9.8, None)
    assert [of(np.ones(n)).rows for n in (10, 12, 13, 38, 97, 104, 105, 1_249)] == [
        *(10, 10, 15, 40, 95, 100, 110, 1_200)
    ]


@pytest.mark.parametrize("level", range(5))
def test_a_quantile_has_as_many_rows_on_either_side_as_the_threshold(level):
    share = (0.05, 0.25, 0.5, 0.75, 0.95)[level]
    for n in range(10, 300):
        x = np.arange(float(n))
        beside = min(np.sum(x < (n - 1) * share), np.sum(x > (n - 1) * share))
        told = of(x).quantiles[level] is not None
        assert told == (beside >= 10)


@pytest.mark.parametrize(
    ("seen", "number", "told"),
    [
        (200, 200, 0),
        (199, 200, None),
        (191, 200, None),
        (190, 200, 4),
        (130, 200, 36),
        (10, 200, 96),
        (9, 200, None),
        (0, 200, 100),
        (10, 12, None),
        (1_990, 2_000, 1),
    ],
)
def test_a_share_of_missing_values_is_of_enough_rows(seen, number, told):
    x = np.where(np.arange(number) < seen, np.arange(number) + 0.5, np.nan)
    found = of(x)
    assert found.missing == told
    assert found.kind == ("all missing" if not seen else "number")
    if seen < 10:
        assert found.quantiles == (None,) * 5
        assert not found.constant


def test_levels_are_named_that_enough_rows_have():
    sex = ["male"] * 100 + ["female"] * 90 + ["Ann"] * 9 + ["unknown"] * 10
    found = of(sex)
    assert (found.kind, found.rows, found.missing) == ("text", 210, 0)
    assert found.levels == {"female": 44, "male": 48, "unknown": 4}
    assert found.others is None  # nine rows are too few
    assert of([*sex, "Bob"]).others == 4
    assert of(["male"] * 191 + ["Ann"] * 9).levels == {"male": None}  # nearly all
    assert of(["male"] * 50 + [None] * 20).levels == {"male": 100}
    assert of(["male"] * 9) == ColumnAtSilo("text", 10)
    ids = of([f"patient {i}" for i in range(200)])
    assert (ids.levels, ids.others) == ({}, 100)


def test_no_share_tells_a_count():
    """Neighbouring counts have the same share, and neighbouring numbers of rows are the same."""
    for n in (20, 40, 57, 100):
        levels = [of(["a"] * k + ["b"] * (n - k)).levels["a"] for k in range(10, n - 9)]
        assert max(levels.count(share) for share in levels) >= min(3, len(levels))
        assert len(set(levels)) <= max(n / 3, 1)
    assert len({of(np.ones(n)).rows for n in range(10, 100)}) < 20


def test_codes_of_few_values_have_shares():
    found = of([1, 2] * 20 + [9])
    assert (found.kind, found.levels, found.others) == ("whole number", {"1": 50, "2": 50}, None)
    yes = of(np.arange(100) < 30)
    assert yes == of((np.arange(100) < 30) * 1.0)
    assert (yes.kind, yes.levels, yes.quantiles) == ("yes or no", {"0": 70, "1": 30}, (None,) * 5)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1.5, 2] * 6, "number"),
        ([3, 4, None] * 6, "whole number"),
        ([True, None] * 12, "yes or no"),
        ([1, "a"] * 6, "mixed"),
        ([b"a"] * 12, "mixed"),
        ([datetime.date(2020, 1, 1)] * 12, "date"),
        (np.array(["2020-01-01", "NaT"] * 12, "datetime64[D]"), "date"),
        (pd.Series(["a", None] * 12), "text"),
        (pd.Series(["a", "b"] * 12, dtype="category"), "text"),
        (pd.Series([1, None] * 12, dtype="Int64"), "yes or no"),
        (pd.Series([True, None] * 12), "yes or no"),
        (pd.to_datetime(pd.Series(["2020-01-01", None] * 12)), "date"),
        (pl.Series([1, None, 7] * 12), "whole number"),
        (pl.Series([datetime.date(2020, 1, 1), None] * 12), "date"),
        (pl.Series([None] * 12), "all missing"),
        (np.ma.masked_greater(np.arange(30.0), 12), "whole number"),
    ],
)
def test_kinds(values, kind):
    found = of(values)
    assert (found.kind, found.fewest) == (kind, 10)
    assert json.loads(json.dumps(found.levels)) == found.levels


def test_of_too_few_rows_the_type_alone_is_told():
    assert of(np.array([0.0, 1.0] * 4)) == ColumnAtSilo("number", 10)  # not that they are 0 or 1
    few = np.where(np.arange(50) < 9, 1.0, np.nan)
    assert of(few) == ColumnAtSilo("number", 10, 50)


def test_thresholds_are_of_a_ladder():
    """Questions for two that differ by one are the same, so that no count is had from them."""
    x = dict(x=["a"] * 13)
    found = [describe_columns(x, None, n)["x"].fewest for n in (1, 2, 3, 5, 5.5, 10, 11, 20, 21)]
    assert found == [1, 2, 5, 5, 10, 10, 20, 20, 50]
    assert describe_columns(x, None, 11) == describe_columns(x, None, 19)


def test_columns_have_names_wherever_they_are():
    frame = pd.DataFrame(dict(a=range(12), b=["x"] * 12))
    silo = dict(x=np.ones((12, 2)), df=frame, c=list("ab") * 6, n=3, z=[np.ones(12), np.ones(11)])
    silo["visits"], silo["tree"] = np.ones((4, 3, 2)), dict(inner=np.ones(12))
    found = nf.describe_silos([silo]).columns
    names = ["x[0]", "x[1]", "df.a", "df.b", "c", "z.0", "z.1"]
    names += ["visits[0]", "visits[1]", "tree.inner"]
    assert list(found) == names
    assert list(nf.describe_silos([silo], ["x", "df.a"]).columns) == ["x[0]", "x[1]", "df.a"]
    assert [found[name][0].rows for name in ("visits[0]", "z.1")] == [10, 10]
    for frames in ([frame], [pl.DataFrame(frame.to_dict("list"))], [frame.to_dict("list")]):
        assert list(nf.describe_silos(frames).columns) == ["a", "b"]
        assert nf.describe_silos(frames).columns["b"] == found["df.b"]


# --- alarms ----------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [1, 5, 10])
@pytest.mark.parametrize("shift", range(3))
def test_there_is_no_alarm_on_clean_data(shift, threshold):
    data = {n: hospital(size, (j + shift) % 3) for j, (n, size) in enumerate(SIZES.items())}
    assert nf.describe_silos(data, min_count=threshold).alarms == ()


@pytest.mark.parametrize(
    ("column", "by_silo", "words"),
    [
        ("age", {"Bern": lambda x: x.astype(str)}, "numbers at Basel and Chur, text at Bern."),
        ("age", {"Chur": lambda x: [1, "a"] * 6}, "numbers at Basel and Bern, values of several"),
        ("weight", {"Bern": lambda x: 2.2 * x}, "the median is 170 at Bern and 77 at others: poun"),
        ("weight", {"Basel": lambda x: x / 2.2}, "pounds and kilograms (ratio 2.17)?"),
        ("age", {"Bern": lambda x: 12 * x}, "months and years (ratio 13)?"),
        ("weight", {"Bern": lambda x: x / 10}, "a factor of ten"),
        ("weight", {"Bern": lambda x: x * 100}, "a factor of 100"),
        ("weight", {"Bern": lambda x: x * 1000}, "a factor of 1,000"),
        ("chol", {"Basel": lambda x: 38.67 * x}, "mmol/l of cholesterol"),
        ("weight", {"Bern": lambda x: 88.42 * x}, "of creatinine"),
        ("chol", {"Basel": lambda x: x / 18.02}, "of glucose"),
        ("weight", {"Bern": lambda x: x * 6}, "another unit (ratio 5.97)?"),
        ("temp", {"Bern": lambda x: 1.8 * x + 32}, "at Bern and 37 at others: °F and °C?"),
        ("change", {"Bern": lambda x: 100 * x}, "the width of the middle half is"),
        ("sex", {"Bern": lambda x: np.char.capitalize(x)}, "'Female' (Bern) differ by case or sp"),
        (
            "sex",
            {"Bern": lambda x: np.char.add(x, " ")},
            "'male' (Basel) and 'male ' (Bern) differ",
        ),
        ("sex", {"Basel": lambda x: np.where(x == "male", "m", x)}, "Bern alone has the level 'm"),
        (
            "event",
            {"Basel": lambda x: 1 + (np.arange(len(x)) < 90)},
            "Basel alone has the level '1'",
        ),
        ("age", {"Bern": lambda x: x * np.nan}, "no row has a value at Bern."),
        ("age", {"Bern": lambda x: 0 * x + 50}, "all rows have the same value at Bern."),
        ("sex", {"Bern": lambda x: ["male"] * 40}, "all rows have the same value at Bern."),
        ("age", {"Basel": lambda x: np.where(np.arange(200) < 12, 999, x)}, "999 at Basel, far"),
        ("age", {"Basel": lambda x: np.where(np.arange(200) < 12, -9, x)}, "-9 at Basel, far"),
        (
            "chol",
            {"Bern": lambda x: np.where(np.arange(40) < 20, np.nan, x)},
            "60 % are missing at Bern, and 16 % at others.",
        ),
    ],
)
def test_an_alarm_says_what_is_odd_and_where(column, by_silo, words):
    alarms = nf.describe_silos(with_column(column, by_silo)).alarms
    assert any(words in alarm for alarm in alarms), alarms
    assert all(alarm.startswith(f"'{column}': ") for alarm in alarms)


def test_a_column_that_a_silo_lacks_is_named():
    data = clean()
    del data["Bern"]["age"], data["Bern"]["sex"], data["Chur"]["sex"]
    assert nf.describe_silos(data).alarms == ("'age': Bern lacks it.", "'sex': Basel alone has it.")
    assert nf.describe_silos(list(data.values())).alarms[0] == "'age': silo 1 lacks it."


def test_of_two_silos_the_larger_numbers_are_named():
    x = np.linspace(50, 90, 60)
    for factors in ((1, 2.2), (2.2, 1)):
        data = {"A": dict(x=factors[0] * x), "B": dict(x=factors[1] * x)}
        (alarm,) = nf.describe_silos(data).alarms
        assert f"the median is 150 at {'BA'[factors[0] > 1]} and 70 at others" in alarm


def test_many_in_one_unit_outvote_a_few():
    x = np.linspace(50, 90, 60)
    data = {f"h{j}": dict(x=x * (2.2 if j in (1, 4) else 1) + j) for j in range(7)}
    alarms = nf.describe_silos(data).alarms
    assert [alarm.split(" at ")[1][:2] for alarm in alarms] == ["h1", "h4"]


def test_values_that_may_be_codes_are_none_among_others_like_them():
    x = np.r_[np.arange(60.0, 110), [99.0] * 10]
    assert of(x).codes == ()
    assert of(np.r_[x, [999.0] * 10]).codes == (999,)
    assert of(np.r_[x, [999.0] * 9]).codes == ()


# --- over a federation -----------------------------------------------------------------------


def test_the_answer_is_the_same_in_one_process_and_over_a_federation():
    heard, data = [], clean()
    data["Bern"]["when"] = [datetime.date(2020, 1, 1 + i % 9) for i in range(40)]
    frames = {name: pd.DataFrame(silo) for name, silo in data.items()}
    here = nf.describe_silos(data)
    for silos in (data, frames):
        there = nf.describe_silos(federation_of(silos, heard))
        assert there == nf.describe_silos(silos) == here
        assert str(there) == str(here)
        assert there.alarms == here.alarms == ("'when': Bern alone has it.",)
    assert len(heard) == 6  # one exchange each
    assert nf.describe_silos(federation_of(data), ["age"]) == nf.describe_silos(data, ["age"])


def test_nothing_that_leaves_is_a_value_of_a_row():
    """But rounded quantiles, and levels of enough rows."""
    r, heard = np.random.default_rng(0), []
    x, names = r.normal(size=500) * 1e3, [f"name-{i}" for i in range(500)]
    rare = ["common"] * 491 + [f"rare-{i}" for i in range(9)]
    nf.describe_silos(federation_of(dict(A=dict(x=x, name=names, rare=rare)), heard))
    (reply,) = map(read, heard)
    assert not reply.arrays
    assert set(reply.head) == {"columns"}
    assert "name-" not in reply.head["columns"]
    assert "rare-" not in reply.head["columns"]
    told = json.loads(reply.head["columns"])
    numbers = list(told["x"].pop("quantiles"))
    assert numbers == [float(f"{q:.1e}") for q in numbers]
    assert not set(numbers) & set(x)
    rest = [v for cell in told.values() for v in cell.values() if isinstance(v, float)]
    assert rest == []
    assert told["rare"]["levels"] == {"common": None}


@pytest.mark.parametrize("policy", [dict(min_count=30), dict(min_rows=30)])
def test_the_thresholds_of_a_silo_hold_there(policy):
    found = nf.describe_silos(federation_of(clean(), policy=nf.Policy(**policy)), min_count=1)
    assert {c.fewest for cells in found.columns.values() for c in cells} == {50}
    assert [c.rows for c in found.columns["age"]] == [200, None, None]
    assert str(found).splitlines()[0].endswith("Chur (fewer than 50 rows)")
    assert "whole number, too few" in str(found)


def test_columns_that_a_policy_does_not_name_are_not_described():
    there = federation_of(clean(), policy=nf.Policy(columns=("age", "sex")))
    assert list(nf.describe_silos(there).columns) == ["age", "sex"]
    with pytest.raises(RefusedError, match="'crp' is not among the columns"):
        nf.describe_silos(there, ["age", "crp"])
    silos = {"A": dict(x=pd.DataFrame(hospital(40)), y=np.ones((40, 2)))}
    for allowed, told in ((("x.age",), ["x.age"]), (("age", "y"), ["x.age", "y[0]", "y[1]"])):
        there = federation_of(silos, policy=nf.Policy(columns=allowed))
        assert list(nf.describe_silos(there).columns) == told
    there = federation_of(silos, policy=nf.Policy(columns=("x.age",)))
    assert list(nf.describe_silos(there, ["x"]).columns) == ["x.age"]


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (dict(max_epsilon=1.0), "'describe columns' would be told without noise"),
        (dict(secure_sum=True), "under masks alone"),
        (dict(exchanges=("levels",)), "'describe columns' is not among the exchanges"),
    ],
)
@pytest.mark.filterwarnings("ignore:the policy limits")
def test_a_policy_refuses_it_as_it_refuses_moments(policy, words):
    silos = {"A": dict(x=np.arange(30.0))}
    for ask in (nf.describe_silos, nf.moments):
        refusal = (
            words if ask is nf.describe_silos else words.replace("describe columns", "moments")
        )
        with pytest.raises(RefusedError, match=refusal):
            ask(federation_of(silos, policy=nf.Policy(**policy)))
    with pytest.raises(nf.ModelError, match="told silo by silo"):
        nf.describe_silos(federation_of(silos, secure_sum=True))


def test_the_audit_log_has_the_question(tmp_path):
    policy = nf.Policy(audit=str(tmp_path / "audit"))
    nf.describe_silos(federation_of({"A": dict(x=np.arange(30.0))}, policy=policy))
    (line,) = (tmp_path / "audit").read_text().splitlines()
    assert json.loads(line)["exchange"] == "describe columns"


@pytest.mark.parametrize("settings", ['{"columns": "x"}', '{"columns": [1]}', '{"min_count": "a"}'])
def test_malformed_questions_are_refused(settings):
    silo = nf.Silo(dict(x=np.arange(30.0)), names={})
    reply = silo.answer(write({}, Question("describe columns", settings).head()))
    assert "names columns" in read(reply).head["words"]


@pytest.mark.parametrize(
    "change",
    [
        dict(kind="secret"),
        dict(rows=1.5),
        dict(missing=101),
        dict(missing=-1),
        dict(quantiles=[1.0]),
        dict(quantiles=["a"] * 5),
        dict(quantiles=[float("nan")] * 5),
        dict(levels=[1]),
        dict(codes=[17]),
        dict(constant=1),
        dict(value=3.0),
    ],
)
def test_malformed_replies_are_refused(change):
    good = dict(kind="number", fewest=10, quantiles=[1.0] * 5, codes=[])
    for cell, well in ((good, True), ({**good, **change}, False), ([], False)):
        reply = write({}, {"columns": json.dumps(dict(x=cell))})
        there = nf.Federation(InMemory([lambda message, reply=reply: reply]))
        if well:
            assert nf.describe_silos(there).columns["x"][0].quantiles == (1.0,) * 5
        else:
            with pytest.raises(ReplyError, match="no descriptions of columns"):
                nf.describe_silos(there)


def test_wrong_use_is_refused():
    with pytest.raises(DataError, match=r"no silo has the column \['town'\]"):
        nf.describe_silos(clean(), ["age", "town"])
    with pytest.raises(DataError, match="got the string 'age'"):
        nf.describe_silos(clean(), "age")
    with pytest.raises(ValueError, match="min_count must be a positive integer"):
        nf.describe_silos(clean(), min_count=0)


# --- as people see it ------------------------------------------------------------------------


def test_tables():
    found = nf.describe_silos(with_column("age", {"Bern": lambda x: x * np.nan}))
    lines = str(found).splitlines()
    assert lines[0].split("  ")[0] == "column"
    for silo, n in SIZES.items():
        assert f"{silo} (about {n if n > 12 else 10} rows)" in lines[0]
    assert lines[1].startswith("age     ")
    assert "all missing" in lines[1]
    assert lines[-1] == "'age': no row has a value at Bern."
    page = found._repr_html_()
    assert page.count("<tr>") == 11
    assert "<p>&#x27;age&#x27;: no row has a value at Bern.</p>" in page
    table = found.to_frame()
    assert table.index.names == ["column", "silo"]
    assert len(table) == 30
    assert table.loc[("weight", "Bern"), "50%"] == found.columns["weight"][1].quantiles[2]
    data = clean()
    del data["Bern"]["age"]
    assert nf.describe_silos(data).to_frame().loc[("age", "Bern"), "kind"] == ""


def test_a_figure_has_a_panel_for_each_column():
    pytest.importorskip("matplotlib").use("agg")
    data = with_column("crp", {"Bern": lambda x: 1000 * x})
    data["Chur"]["visits"] = data["Chur"]["visits"].astype(str)
    figure = nf.describe_silos(data, ["crp", "sex", "visits"]).plot()
    sex, first, visits = figure.axes[:3]
    assert [ax.get_title() for ax in (first, sex, visits)] == ["crp", "sex", "visits"]
    assert [text.get_text() for text in sex.get_yticklabels()] == list(SIZES)
    assert first.get_xscale() == "log"
    assert {text.get_text() for text in sex.texts} == {"female", "male", "text, too few"}
    assert sex.get_xlabel() == "% of rows"
    assert "text, too few" in {text.get_text() for text in visits.texts}
