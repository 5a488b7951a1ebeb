"""Levels and moments over silos in processes of their own: the same as of a list, and no more."""

import json
import re
import warnings

import hypothesis.strategies as st
import numpy as np
import pandas as pd
import pytest
from apart import told_by_bytes
from hypothesis import example, given

import numpyro_fed as nf
from numpyro_fed.basics.errors import DataError, ModelError, RefusedError, ReplyError
from numpyro_fed.network import InMemory
from numpyro_fed.rounds.messages import Question, read, write

FREE = nf.Policy(min_rows=1, min_count=1)
CITIES = ("Bern", "Basel", "Chur", "other")


@given(
    cities=st.lists(st.lists(st.sampled_from(CITIES), min_size=1, max_size=20), min_size=1),
    min_count=st.integers(1, 4),
)
def test_levels_over_a_federation_are_those_of_a_list(cities, min_count):
    data, heard = [dict(city=c, k=list(range(len(c)))) for c in cities], []
    there = told_by_bytes(data, heard, policy=FREE)
    for other in ("other", None):
        found = nf.levels(there, ["city", "k"], min_count=min_count, other=other)
        assert found == nf.levels(data, ["city", "k"], min_count=min_count, other=other)
    hidden = any(0 < c.count(name) < min_count for c in cities for name in CITIES)
    assert ("other" in found["city"]) == (hidden or any("other" in c for c in cities))
    assert len(heard) == len(data)  # the same question is asked once
    assert [set(read(reply).head) for reply in heard] == [{"names", "other"}] * len(data)
    assert not any(read(reply).arrays for reply in heard)


def test_names_do_not_depend_on_how_often_there_are_any():
    """Counts do not cross: two silos with other counts of the same names send the same bytes."""
    replies = []
    for n in (5, 17):
        federation = told_by_bytes([dict(city=["Bern"] * n + ["Chur"] * (22 - n))], replies)
        nf.levels(federation, ["city"])
    assert replies[0] == replies[1]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 99))
@example([3, 8, 9, 8], 54)
def test_moments_over_a_federation_are_those_of_a_list_to_the_bit(sizes, seed):
    r, heard = np.random.default_rng(seed), []
    data = [dict(x=1e6 + r.normal(size=(n, 2)), y=r.normal(size=n), k=np.arange(n)) for n in sizes]
    there = told_by_bytes(data, heard, policy=FREE)
    for arguments in (None, ["y", "k"], ["x"]):
        found, expected = (nf.moments(silos, arguments) for silos in (there, data))
        for kind in ("mean", "sd", "count"):
            a, b = getattr(found, kind), getattr(expected, kind)
            assert set(a) == set(b)
            for name in a:
                np.testing.assert_array_equal(a[name], b[name])
    assert max(map(len, heard)) < 1_000
    assert {a.size for reply in heard for a in read(reply).arrays.values()} <= {1, 2}


def weights(factors, sizes=(40, 25, 60, 30, 45, 33)):
    r = np.random.default_rng(0)
    return [k * r.normal(80, 15, n) for k, n in zip(factors, sizes, strict=False)]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (
            weights((1, 1, 2.2, 1, 1, 1)),
            r"silo 2 has the mean 17\d\.\d, where others have 78.* to 8",
        ),
        (weights((2.2, 2.2, 2.2, 1, 2.2, 2.2)), "silo 3 has the mean 7.* where others have 1"),
        (
            weights((1, 2.2, 1, 1, 1, 2.2)),
            "silo 1 has the mean 1.*, silo 5 has the mean 1.* others",
        ),
        (weights((1, 2.2)), r"silo 0 has the mean \d*.\d*, silo 1 has the mean \d*.\d* \(sds"),
        ([x + 25 * (j == 1) for j, x in enumerate(weights([1] * 6))], None),  # 1.7 sds
        (
            [x + 200 * j for j, x in enumerate(weights([1] * 6))],
            None,
        ),  # none is far from all others
        ([np.full(9, float(j == 1)) for j in range(6)], None),  # an indicator of a silo
        ([(np.arange(40) < (30 if j else 1)) * 1.0 for j in range(6)], None),  # yes or no
        ([np.ones(9)] * 6, None),  # an intercept
        ([np.array([80.0]), *weights([1] * 5), np.array([130.0])], None),  # of a single row
        ([np.array([80.0, 81.0]), np.array([172.0, 160.0])], None),  # too few rows to tell
        ([np.full(5, np.nan), *weights((1, 1, 1, 2.2))], "silo 4 has the mean 17"),
    ],
)
def test_a_column_in_other_units_at_a_silo_is_named(columns, words):
    """Over a federation as in one process: a silo's mean crosses anyhow."""
    data = [dict(weight=column) for column in columns]
    for silos in (data, told_by_bytes(data, policy=FREE)):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            nf.moments(silos)
        assert [w.category for w in found] == [nf.DataWarning] * (words is not None)
        if words:
            assert re.search(f"'weight': {words}.*other units there", str(found[0].message))
            assert found[0].filename == __file__


def test_a_column_of_a_matrix_in_other_units_has_its_name():
    x = [np.stack([np.ones(len(w)), w], 1) for w in weights((1, 1, 2.2))]
    with pytest.warns(nf.DataWarning, match="column 1 of 'x': silo 2 has"):
        nf.moments([dict(x=part) for part in x])
    frames = [dict(x=pd.DataFrame(part, columns=["one", "kg"])) for part in x]
    parts = [nf.moments([frame]) for frame in frames]
    with pytest.warns(nf.DataWarning, match="'kg' of 'x': part 2 has the mean"):
        nf.Scaling.union(*parts)


def test_dataframes_are_asked_of_by_columns():
    r = np.random.default_rng(0)
    data = [pd.DataFrame(dict(city=["a"] * n, age=r.normal(size=n))) for n in (6, 9)]
    there = told_by_bytes(data)
    found, expected = (nf.moments(silos, ["age"]) for silos in (there, data))
    assert (found.mean, found.sd) == (expected.mean, expected.sd)
    matrices = [dict(x=d[["age"]]) for d in data]
    assert nf.moments(told_by_bytes(matrices)).columns == {"x": ("age",)}
    assert nf.levels(there, ["city"]) == nf.levels(data, ["city"])
    assert nf.levels(told_by_bytes([dict(x=d) for d in data]), ["x.city"])["x.city"] == ("a",)
    wrong = [matrices[0], dict(x=data[1].assign(b=1.0)[["b"]])]
    with pytest.raises(DataError, match="silo 1, 'x'"):
        nf.moments(told_by_bytes(wrong))


# --- what a silo refuses ---------------------------------------------------------------------

CITY = dict(city=["Bern"] * 8 + ["Nice"] * 2, x=np.arange(10.0))


@pytest.mark.parametrize(
    ("policy", "ask", "words"),
    [
        ({"exchanges": ("pvi", "moments")}, "levels", "'levels' is not among the exchanges"),
        ({"exchanges": ("pvi", "levels")}, "moments", "'moments' is not among the exchanges"),
        ({"min_rows": 11}, "levels", "fewer rows"),
        ({"min_rows": 11}, "moments", "in fewer rows .*11, min_rows"),
        ({"min_count": 9}, "levels", "of 9 rows .*min_count=9"),
    ],
)
def test_a_policy_is_kept(policy, ask, words):
    silos = [nf.Silo(CITY, names={}), nf.Silo(CITY, names={}, policy=nf.Policy(**policy))]
    there = nf.Federation(InMemory([silo.answer for silo in silos]))
    with pytest.raises(RefusedError, match=f"silo 1 refuses '{ask}': .*{words}"):
        nf.levels(there, ["city"]) if ask == "levels" else nf.moments(there)


def test_a_server_cannot_ask_for_rare_levels():
    there = told_by_bytes([CITY])
    assert nf.levels(there, ["city"])["city"] == ("Bern", "other")
    with pytest.raises(RefusedError, match="names of levels that 2 rows have"):
        nf.levels(there, ["city"], min_count=2)


@pytest.mark.parametrize("few", [1, 4])
def test_moments_that_would_tell_of_a_few_rows_are_refused(few):
    seen = np.where(np.arange(20) < few, 37.0, np.nan)
    with pytest.raises(RefusedError, match="numbers in fewer rows"):
        nf.moments(told_by_bytes([dict(x=seen)]))
    for others in (0.0, 1.0):
        x = np.stack([np.arange(20.0), np.where(np.arange(20) < few, 37.0, others)], 1)
        with pytest.raises(RefusedError, match="nearly all rows have the same number"):
            nf.moments(told_by_bytes([dict(x=x)]))
    enough = dict(x=np.where(np.arange(20) < 5, 37.0, 0.0), one=np.ones(20), z=np.arange(20.0))
    assert set(nf.moments(told_by_bytes([enough])).mean) == {"x", "one", "z"}


def test_a_refusal_tells_no_value():
    """A server that names a column of numbers gets none of them in an error."""
    secret = 71.25
    for value in (secret, None, [1, 2]):
        data = dict(age=[secret, 2.5, value] * 5)
        with pytest.raises(DataError, match=r"silo 0 refuses 'levels': a column of \['age'\]") as e:
            nf.levels(told_by_bytes([data]), ["age"])
        assert "71" not in str(e.value)
    with pytest.raises(DataError, match="silo 0 refuses 'moments'") as e:
        nf.moments(told_by_bytes([dict(name=["Ann", "Bob"] * 5)]), ["name"])
    assert "Ann" not in str(e.value)
    with pytest.raises(DataError, match="not there"):
        nf.levels(told_by_bytes([CITY]), ["town"])


def test_in_order_they_come_before_a_search():
    policy = nf.Policy(exchanges=("levels", "moments"), in_order=True)
    there = told_by_bytes([CITY], policy=policy)
    nf.levels(there, ["city"])
    nf.moments(there)
    with pytest.raises(ModelError, match="'levels' comes before 'moments'"):
        nf.levels(there, ["x"])


def test_the_audit_log_has_the_questions(tmp_path):
    policy = nf.Policy(audit=str(tmp_path / "audit"))
    there = told_by_bytes([CITY], policy=policy)
    nf.levels(there, ["city"])
    nf.moments(there, ["x"])
    lines = [json.loads(line) for line in (tmp_path / "audit").read_text().splitlines()]
    assert [line["exchange"] for line in lines] == ["levels", "moments"]
    assert lines[1]["sent"] == {"mean/x": [], "sd/x": [], "count/x": []}


@pytest.mark.parametrize("settings", ["{}", "[1]", '{"columns": "city"}', '{"columns": [1]}', "{"])
def test_malformed_questions_are_refused(settings):
    silo = nf.Silo(CITY, names={})
    for exchange in ("levels", "moments"):
        reply = read(silo.answer(write({}, Question(exchange, settings).head()))).head
        assert "error" in reply or (exchange == "moments" and "columns" in reply)
        assert "log has the rest" not in reply.get("words", "")


def test_malformed_replies_are_refused():
    x = {f"{kind}/x": np.float64(1.0) for kind in ("mean", "sd")} | {"count/x": np.int64(9)}
    columns = {"columns": "{}"}
    bad = [
        write({}),
        write(x | {"mean/x": np.float64(np.nan)}, columns),
        write(x | {"sd/x": -np.ones(())}, columns),
        write(x | {"count/x": np.int64(-1)}, columns),
        write(x | {"mean/x": np.ones(2)}, columns),
        write(x | {"other/x": np.ones(())}, columns),
        write(x | {"mean/z": np.ones(())}, columns),
        write(x, {"columns": "[]"}),
        b"nothing",
    ]
    for reply in bad:
        with pytest.raises(ReplyError, match="silo 0"):
            nf.moments(nf.Federation(InMemory([lambda message, reply=reply: reply])), ["x"])
    good = nf.Federation(InMemory([lambda message: write(x, columns)]))
    assert nf.moments(good, ["x"]).mean == {"x": 1}
    bad_names = "{", "[]", '{"city": [1]}', '{"city": 1}', '{"city": "ab"}', '{"town": []}'
    heads = [{"names": names, "other": "other"} for names in bad_names]
    # As of an earlier version, and as of one that calls rarer levels otherwise.
    heads += [{"names": '{"city": ["a"]}'}, {"names": '{"city": ["a"]}', "other": "rare"}]
    for head in heads:
        reply = write({}, head)
        with pytest.raises(ReplyError, match="no names of levels"):
            nf.levels(nf.Federation(InMemory([lambda message, reply=reply: reply])), ["city"])


def test_wrong_use_is_refused():
    there = told_by_bytes([CITY])
    with pytest.raises(DataError, match="got the string 'city'"):
        nf.levels(there, "city")
    with pytest.raises(DataError, match="got the string 'x'"):
        nf.moments(there, "x")
    with pytest.raises(ValueError, match="min_count must be a positive integer"):
        nf.levels(there, ["city"], min_count=0)
    with pytest.raises(DataError, match="or a Federation, got dict"):
        nf.moments(CITY)


def test_a_script_that_goes_on_is_given_the_replies_so_far(tmp_path):
    def there(data):
        silos = [nf.Silo(data, names={})]
        return nf.Federation(InMemory([silo.answer for silo in silos]), state=tmp_path / "server")

    first = nf.levels(there(CITY), ["city"])
    assert nf.levels(there(dict(city=["Rome"] * 9)), ["city"]) == first


def test_levels_of_as_many_rows_as_the_policy_says_are_told():
    policy = nf.Policy(min_rows=10, min_count=3)
    policy.check_levels(10, 3)
    for rows, count in ((9, 3), (10, 2)):
        with pytest.raises(ModelError):
            policy.check_levels(rows, count)


def test_an_average_is_over_enough_rows_or_of_latents_that_may_be_told():
    few, told = nf.Policy(min_count=3), nf.Policy(min_count=3, tell_latents=True)
    for policy, rows, is_told in ((few, 3, True), (told, 3, True), (told, 1, False)):
        policy.check_average(rows, is_told=is_told)
    for policy, rows, is_told in ((few, 2, True), (told, 2, True), (few, 100, False)):
        with pytest.raises(ModelError, match="an average over fewer rows"):
            policy.check_average(rows, is_told=is_told)


def test_limits_of_a_policy_have_their_names():
    with pytest.raises(TypeError, match="positional"):
        nf.Policy(5)
    with pytest.raises(AttributeError, match="max_draws"):
        nf.Policy().max_draws = 10**6
