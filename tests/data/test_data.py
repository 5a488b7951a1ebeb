"""What a silo holds: reading and checking it, padding, bucketing, stacking."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import numpyro_fed as nf
from numpyro_fed.basics.errors import DataError, ModelError
from numpyro_fed.data.padding import FEW_ROWS, WASTE, arrays_with_rows, group_lengths
from numpyro_fed.data.silo_data import SiloData, read
from numpyro_fed.testing import check_decomposition
from numpyro_fed.text.layout import layout_and_buckets
from numpyro_fed.text.silo_plate import silo_plate


def normal(y, w=None):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with silo_plate("row", y.shape[0]):
        b = numpyro.sample("b", dist.LogNormal(mu, 1))
        numpyro.sample("y", dist.Normal(b, 1), obs=y)


def grouped(y, of, w):
    with silo_plate("group", w.shape[0]):
        u = numpyro.sample("u", dist.Normal(0, 1))
    with silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(u[of], 1), obs=y)


def rows(*sizes):
    return [{"y": np.arange(n, dtype=np.float32)} for n in sizes]


def test_arrays_and_python_values_are_told_apart():
    (silo,) = read([{"y": [1.0, 2.0], "n": np.int64(3), "flag": True, "tag": "a", "no": None}])
    assert list(silo.arrays) == ["y"]
    assert dict(silo.static) == {"n": 3, "flag": True, "tag": "a", "no": None}
    assert silo.kwargs.keys() == {"y", "n", "flag", "tag", "no"}


def test_dtypes_follow_the_precision_in_use():
    held = [{"y": np.zeros(2, np.float64), "k": np.zeros(2, np.int64)}]
    with jax.enable_x64(False):
        assert {a.dtype.name for a in read(held)[0].arrays.values()} == {"float32", "int32"}
    with jax.enable_x64(True):
        assert {a.dtype.name for a in read(held)[0].arrays.values()} == {"float64", "int64"}


GOOD = {"x": np.zeros((3, 2)), "y": np.zeros(3)}


@pytest.mark.parametrize(
    ("held", "message"),
    [
        (GOOD, "list .* got dict.*pass a list"),
        (iter([GOOD]), "a list"),
        ([], "pass one dict"),
        ([GOOD, np.zeros(3)], "silo 1 must be a dict .* got ndarray"),
        ([GOOD, {"x": GOOD["x"]}], r"silo 1 .*\['x'\].* silo 0 .*\['x', 'y'\]"),
        ([GOOD, {**GOOD, "y": np.zeros(3, int)}], "silo 1, 'y' has dtype int.*float.*astype"),
        ([GOOD, {**GOOD, "x": np.zeros(3)}], r"silo 1, 'x' .*\(3,\).* silo 0"),
        ([GOOD, {**GOOD, "y": 3}], "silo 1, 'y': an array .* plain Python"),
        ([GOOD, {**GOOD, "y": np.array([0, np.nan, np.inf])}], "silo 1, 'y': 2 of 3 .*mask"),
        ([{**GOOD, "y": np.array(["a", "b"])}], "silo 0, 'y': .*numbers"),
        ([{**GOOD, "y": np.array([1, "b"], object)}], "silo 0, 'y': .*dtype object.*Convert"),
        ([{**GOOD, "y": np.zeros(3, complex)}], "silo 0, 'y': .*complex"),
    ],
)
def test_bad_silos_are_refused(held, message):
    with pytest.raises(DataError, match=message):
        read(held)


def test_an_array_is_padded_iff_its_length_is_the_size_of_one_plate_everywhere():
    held = read(
        [
            {"y": np.zeros(3), "w": np.zeros(2), "mixed": np.zeros(3), "fixed": np.zeros(4)},
            {"y": np.zeros(5), "w": np.zeros(1), "mixed": np.zeros(1), "fixed": np.zeros(4)},
        ]
    )
    sizes = [{"row": 3, "group": 2}, {"row": 5, "group": 1}]
    assert arrays_with_rows(held, sizes) == {"w": "group", "y": "row"}


def test_padded_rows_are_copies_of_a_real_one_and_masked():
    _, (b,) = layout_and_buckets(normal, read(rows(2, 5, 3)))
    assert b.data.arrays["y"].shape == (3, 5)
    assert b.silos == (0, 1, 2)
    np.testing.assert_array_equal(b.data.masks["row"].sum(1), [2, 5, 3])
    np.testing.assert_array_equal(b.data.arrays["y"][2], [0, 1, 2, 0, 0])
    assert [size["row"] for size in b.sizes] == [2, 5, 3]


def test_padded_rows_are_exactly_zero_in_value_and_gradient():
    layout, (b,) = layout_and_buckets(normal, read(rows(2, 5)))
    silo = jax.tree.map(lambda a: a[0], b.data)
    z = jnp.array([0.1, 0.2, 3.0, -4.0, 0.0])[:, None]

    def total(z):
        return layout.model.log_silo({}, jnp.ones(1), {"row": z}, silo)["row"]

    assert (total(z)[2:] == 0).all()
    assert (total(z)[:2] != 0).all()
    gradient = jax.grad(lambda z: total(z).sum())(z)
    assert (gradient[2:] == 0).all()
    assert (gradient[:2] != 0).all()


def test_silos_of_one_size_need_no_mask():
    _, (b,) = layout_and_buckets(normal, read(rows(4, 4)))
    assert b.data.masks == {}
    assert not b.data.masks


def test_python_values_divide_silos_into_buckets():
    def model(y, kind):
        with silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(0, 1 if kind == "a" else 2), obs=y)

    held = read([{**s, "kind": k} for s, k in zip(rows(2, 3, 4), "aba", strict=True)])
    _, buckets = layout_and_buckets(model, held)
    assert [b.silos for b in buckets] == [(0, 2), (1,)]


def test_very_different_sizes_are_divided_so_that_memory_grows_with_rows():
    held = read(rows(*[2, 3] * 10, 500))
    _, buckets = layout_and_buckets(normal, held)
    assert [len(b.silos) for b in buckets] == [20, 1]
    assert sum(b.data.arrays["y"].size for b in buckets) <= 2 * sum(
        s.arrays["y"].size for s in held
    )


def test_few_rows_have_one_shape_whatever_their_share():
    few, many = [5] * 10 + [180], [5] * 10 + [190]  # 1,980 and 2,090 rows with padding
    assert len(set(group_lengths(few))) == 1
    assert len(set(group_lengths(many))) == 2


def test_two_plates_are_padded_each_to_its_own_size():
    held = [
        {"y": np.zeros(3), "of": np.array([0, 1, 1]), "w": np.zeros(2)},
        {"y": np.zeros(2), "of": np.zeros(2, int), "w": np.zeros(1)},
        {"y": np.zeros(5), "of": np.zeros(5, int), "w": np.zeros(1)},
    ]
    _, (b,) = layout_and_buckets(grouped, read(held))
    assert b.data.masks["group"].shape == (3, 2)
    assert b.data.masks["row"].shape == (3, 5)
    assert b.data.masks


def test_two_plates_over_the_same_rows_are_both_masked():
    def model(y):
        with silo_plate("first", y.shape[0]):
            b = numpyro.sample("b", dist.Normal(0, 1))
        with silo_plate("second", y.shape[0]):
            numpyro.sample("y", dist.Normal(b, 1), obs=y)

    _, (b,) = layout_and_buckets(model, read(rows(2, 4)))
    assert set(b.data.masks) == {"first", "second"}
    assert b.data.masks


def test_a_model_whose_rows_read_each_others_latents_stays_unpadded_with_a_warning():
    def model(y):
        with silo_plate("row", y.shape[0]):
            b = numpyro.sample("b", dist.Normal(0, 1))
            numpyro.sample("y", dist.Normal(b - b.mean(0), 1), obs=y)

    with pytest.warns(UserWarning, match="summaries"):
        _, buckets = layout_and_buckets(model, read(rows(2, 4, 4)))
    assert not any(b.data.masks for b in buckets)
    assert [b.silos for b in buckets] == [(0,), (1, 2)]
    assert all(b.data.masks == {} for b in buckets)


@pytest.mark.filterwarnings("error")
def test_nested_silo_plates_are_never_padded():
    def model(y):
        with silo_plate("a", y.shape[0], dim=-2):
            u = numpyro.sample("u", dist.Normal(0, 1))
            with silo_plate("b", y.shape[1], dim=-1):
                numpyro.sample("y", dist.Normal(u, 1), obs=y)

    held = read([{"y": np.zeros((2, 3))}, {"y": np.zeros((4, 3))}])
    layout, buckets = layout_and_buckets(model, held)
    assert layout.model.structure.nested
    assert not any(b.data.masks for b in buckets)
    assert len(buckets) == 2


def test_silo_data_is_a_pytree_with_static_values_outside():
    silo = SiloData({"y": np.zeros(2)}, {"row": np.ones(2, bool)}, (("n", 2),))
    assert len(jax.tree.leaves(silo)) == 2
    assert jax.tree.map(lambda a: a, silo).static == (("n", 2),)


def test_keep_leaves_unmasked_plates_alone():
    silo = SiloData({}, {"row": np.array([True, False])})
    np.testing.assert_array_equal(silo.masked("row", jnp.ones((2, 3))), [[1, 1, 1], [0, 0, 0]])
    np.testing.assert_array_equal(silo.masked("other", jnp.ones(2)), [1, 1])


def test_whole_numbers_beyond_their_type_are_refused():
    with pytest.raises(DataError, match=r"silo 0, 'child'.*int32.*jax_enable_x64"):
        read([{"child": np.array([0, 2**32])}])


def test_numbers_beyond_single_precision_are_refused():
    with pytest.raises(DataError, match=r"silo 0, 'y'.*1 of 2 values"), np.errstate(over="ignore"):
        read([{"y": np.array([0.0, 1e300])}])


def visits(patients, noise=None):
    """Visits differ in number between silos; arguments are trees; offsets may be missing."""
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    with silo_plate("row", patients["age"].shape[0], dim=-2):
        mean = mu + patients["age"][:, None]
        mean = mean if patients["offset"] is None else mean + patients["offset"][:, None]
        with numpyro.plate("visit", patients["y"][0].shape[1], dim=-1):
            numpyro.sample("y", dist.Normal(mean, noise[0] + noise[1]), obs=patients["y"][0])


@pytest.mark.slow
def test_trees_ragged_visits_and_what_one_silo_lacks_give_the_exact_posterior():
    r = np.random.default_rng(0)

    def silo(n, t, offset):
        age, y = r.normal(size=n), r.normal(size=(n, t))
        given = {"age": age, "offset": r.normal(size=n) if offset else None, "y": (y, [])}
        return {"patients": given, "noise": [np.float32(0.5), np.ones(())]}

    held = [silo(3, 2, True), silo(2, 4, True), silo(4, 2, True), silo(2, 2, False)]
    data = read(held)
    names = ["noise", *(f"patients.{name}" for name in ("age", "offset", "y.0", "y.1"))]
    assert [*data[0].arrays] == names
    assert data[3].kwargs["patients"]["offset"] is None
    _, buckets = layout_and_buckets(visits, data)
    assert [b.silos for b in buckets] == [(0, 2), (1,), (3,)]
    assert any(b.data.masks for b in buckets)
    check_decomposition(visits, held, num_points=1)
    fit = nf.PVI(visits, start=None).run(jax.random.key(0), 1, held, progress_bar=False)
    rest = [
        (p["y"][0] - p["age"][:, None] - (0 if p["offset"] is None else p["offset"][:, None]))
        for p in (s["patients"] for s in held)
    ]
    precision = 1 / 4 + sum(a.size for a in rest) / 1.5**2
    posterior = fit.posterior()["mu"]
    np.testing.assert_allclose(posterior.variance, 1 / precision, rtol=1e-5)
    mean = sum(a.sum() for a in rest) / 1.5**2 / precision
    np.testing.assert_allclose(posterior.mean, mean, rtol=1e-4)


def test_a_list_of_numbers_is_an_array_and_one_of_arrays_a_tree():
    (silo,) = read([{"x": [[1, 2], [3, 4]], "pair": [np.ones(2), np.ones(2)], "none": {}}])
    assert silo.arrays["x"].shape == (2, 2)
    assert isinstance(silo.kwargs["pair"], list)
    assert silo.kwargs["none"] == {}
    with pytest.raises(DataError, match=r"silo 0: \['a.b'\]"):
        read([{"a": {"b": np.ones(1)}, "a.b": np.ones(1)}])
    with pytest.raises(DataError, match=r"silo 1, 'a\.b' has dtype"):
        read([{"a": {"b": np.ones(1)}}, {"a": {"b": np.ones(1, int)}}])


def test_sites_of_different_sizes_are_refused_with_the_way_out():
    def wide(x, y):
        numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[1]]))
        normal(y)

    def a_latent_a_visit(x, y):
        with silo_plate("row", x.shape[0], dim=-2), numpyro.plate("visit", x.shape[1]):
            numpyro.sample("c", dist.Normal(0, 1))
        normal(y)

    held = read([{"x": np.zeros((2, t)), "y": np.zeros(2)} for t in (3, 2)])
    with pytest.raises(ModelError, match=r"'beta' .*\(2,\).*\(3,\).*silo 0"):
        layout_and_buckets(wide, held)
    with pytest.raises(ModelError, match=r"local site 'c'.*Pad the axis.*handlers.mask"):
        layout_and_buckets(a_latent_a_visit, held)


@pytest.mark.slow
@pytest.mark.filterwarnings("error:Explicitly requested dtype")
def test_arrays_from_outside_the_text_are_not_taken_for_double_ones():
    """The family is looked for in double precision, of a text that closes over NumPy arrays."""
    widths, r = np.diag(np.arange(1.0, 5.0)), np.random.default_rng(0)

    def model(x, y=None):
        scale = jnp.asarray(widths)
        beta = numpyro.sample("beta", dist.MultivariateNormal(0.0, scale))
        sigma = numpyro.sample("sigma", dist.HalfNormal(1))
        with nf.silo_plate("row", x.shape[0]):
            numpyro.sample("y", dist.Normal((x @ scale) @ beta, sigma), obs=y)

    silos = [dict(x=r.normal(size=(9, 4)), y=r.normal(size=9)) for _ in range(2)]
    result = nf.PVI(model).run(jax.random.key(0), 1, silos, progress_bar=False)
    assert result.state.server is not None
    assert jax.tree.leaves(result.sample_posterior(jax.random.key(1), 3))[0].dtype == jnp.float32


def partitions(lengths):
    """All ways to cut sorted lengths into runs of neighbours, alike lengths together."""
    distinct = sorted(set(lengths))
    for cuts in itertools.product([False, True], repeat=len(distinct) - 1):
        groups = [[distinct[0]]]
        for length, cut_here in zip(distinct[1:], cuts, strict=True):
            if cut_here:
                groups.append([])
            groups[-1].append(length)
        yield groups


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.one_of(st.integers(1, 12), st.integers(200, 512)), min_size=4, max_size=12))
def test_groups_are_as_few_as_the_waste_allows_and_then_pad_least(lengths):
    def padded(groups):
        return sum(max(g) * sum(n in g for n in lengths) for g in groups)

    found = group_lengths(lengths)
    mine = [sorted({n for n, i in zip(lengths, found, strict=True) if i == j}) for j in set(found)]
    limit = max(WASTE * sum(lengths), FEW_ROWS)
    allowed = [groups for groups in partitions(lengths) if padded(groups) <= limit]
    fewest = min(map(len, allowed))
    assert len(mine) == fewest
    assert padded(mine) == min(padded(groups) for groups in allowed if len(groups) == fewest)
