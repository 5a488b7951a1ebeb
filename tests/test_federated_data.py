"""The data of the benchmarks on known data sets: what is read, and how it is cut up."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

PATH = Path(__file__).parent.parent / "benchmarks" / "federated_data.py"
SPEC = importlib.util.spec_from_file_location("federated_data", PATH)
fd = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(fd)


def labels(n, ones, seed=0):
    """`ones` ones among n labels, and rows that tell which they are."""
    y = np.zeros(n, int)
    y[:ones] = 1
    y = np.random.default_rng(seed).permutation(y)
    return np.arange(n)[:, None], y


def counts(silos):
    return [(len(s["y"]), int(s["y"].sum())) for s in silos]


def rows(silos):
    return np.concatenate([s["x"][:, 0] for s in silos])


@pytest.mark.parametrize(
    ("n", "ones", "num_clients", "beta", "kappa", "small", "large", "left"),
    [
        (1000, 250, 4, 0.0, 0.0, (250, 63), 250, 124),  # floor(250 * 0.75) = 187 zeros
        (1000, 250, 4, 0.6, -2.0, (100, 75), 400, 100),  # a share of 0.25 * 3 = 0.75
        (1000, 250, 4, 0.6, 1.0, (100, 0), 400, 250),
        (1003, 250, 10, 0.7, -3.0, (30, 30), 170, 100),  # 30.09 and 170.51; 1003 - 1000 unused
        (100, 50, 10, 0.9, 0.0, (1, 1), 19, 45),  # 0.1 * 100 / 10 is 1, not just under
    ],
)
def test_sizes_and_shares(n, ones, num_clients, beta, kappa, small, large, left):
    x, y = labels(n, ones)
    silos = fd.split_clients(x, y, num_clients, beta, kappa, seed=1)
    half = num_clients // 2
    assert counts(silos)[:half] == [small] * half
    assert [size for size, _ in counts(silos)[half:]] == [large] * half
    used = rows(silos)
    assert len(np.unique(used)) == len(used) == half * (small[0] + large)
    assert left - (n - len(used)) <= sum(c for _, c in counts(silos)[half:]) <= left
    for silo in silos:
        np.testing.assert_array_equal(silo["y"], y[silo["x"][:, 0]])


@pytest.mark.parametrize(
    ("n", "ones", "beta", "kappa", "sizes", "shares"),
    [  # as many rows and ones as in 80% of adult, bank and credit
        (39_073, 9_350, 0.0, 0.0, (3_907, 3_907), (0.239, 0.239)),
        (39_073, 9_350, 0.7, -3.0, (1_172, 6_642), (0.957, 0.113)),
        (36_168, 4_231, 0.0, 0.0, (3_616, 3_616), (0.117, 0.117)),
        (36_168, 4_231, 0.7, -3.0, (1_085, 6_148), (0.468, 0.055)),
        (522, 285, 0.0, 0.0, (52, 52), (0.558, 0.536)),
    ],
)
def test_silos_of_the_uci_data(n, ones, beta, kappa, sizes, shares):
    silos = fd.split_clients(*labels(n, ones), 10, beta, kappa)
    for part, size, share in zip((silos[:5], silos[5:]), sizes, shares, strict=True):
        assert {len(s["y"]) for s in part} == {size}
        assert np.mean([s["y"].mean() for s in part]) == pytest.approx(share, abs=2e-3)


def test_a_seed_fixes_the_split():
    x, y = labels(300, 100)
    first, again, other = (fd.split_clients(x, y, 4, 0.5, 0.5, seed=s) for s in (3, 3, 4))
    np.testing.assert_array_equal(rows(first), rows(again))
    assert (rows(first) != rows(other)).any()


@pytest.mark.parametrize(
    ("num_clients", "beta", "kappa", "ones", "says"),
    [
        (5, 0.0, 0.0, 50, "even"),
        (4, 1.0, 0.0, 50, "beta"),
        (4, 0.7, -3.0, 50, "kappa = -3.0 .* 2.000"),
        (4, 0.0, -2.0, 30, "need 46 rows of class 1, and there are 30"),
        (4, 0.0, 1.0, 70, "need 50 rows of class 0, and there are 30"),
    ],
)
def test_impossible_splits(num_clients, beta, kappa, ones, says):
    with pytest.raises(ValueError, match=says):
        fd.split_clients(*labels(100, ones), num_clients, beta, kappa)


def test_labels_other_than_0_and_1():
    x, y = labels(100, 50)
    with pytest.raises(ValueError, match="0 and 1"):
        fd.split_clients(x, 2 * y - 1, 4)


def test_homogeneous_silos():
    x, y = labels(103, 40)
    silos = fd.split_homogeneous(x, y, 10)
    assert sorted(len(s["y"]) for s in silos) == [10] * 7 + [11] * 3
    np.testing.assert_array_equal(np.sort(rows(silos)), np.arange(103))


def test_two_classes_in_each_silo():
    y = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 40 + np.arange(10)))
    silos = fd.split_two_classes(np.arange(len(y))[:, None], y, 100)
    assert len(silos) == 100
    assert {len(np.unique(s["y"])) for s in silos} == {2}
    np.testing.assert_array_equal(np.sort(rows(silos)), np.arange(len(y)))
    assert len({tuple(np.unique(s["y"])) for s in silos}) > 20
    with pytest.raises(ValueError, match="do not come out"):
        fd.split_two_classes(y, y, 7)


def test_silos_with_a_majority_and_tests_in_their_proportions():
    r = np.random.default_rng(0)
    y, y_test = (r.permutation(np.repeat(np.arange(10), n)) for n in (100, 40))
    x, x_test = (np.arange(len(a))[:, None] for a in (y, y_test))
    silos, tests = fd.split_majority(fd.Dataset(x, y, x_test, y_test), 20)
    np.testing.assert_array_equal(np.sort(rows(silos)), np.arange(1_000))
    np.testing.assert_array_equal(np.sort(rows(tests)), np.arange(400))
    for j, (silo, test) in enumerate(zip(silos, tests, strict=True)):
        assert len(silo["y"]) == 50
        assert 45 <= (silo["y"] == j % 10).sum() <= 50
        shares = [np.bincount(s["y"], minlength=10) / len(s["y"]) for s in (silo, test)]
        assert abs(shares[0] - shares[1]).max() < 0.12  # of some twenty test rows


@pytest.fixture
def folder(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    table = dict(
        x_num=rng.normal(3, 5, (20, 2)).astype(np.float32),
        x_cat=rng.integers(0, 3, (20, 2)).astype(np.uint8),
        cat_names=np.array(["job", "A1"]),
        levels_job=np.array(["a", "b", "c"]),
        levels_A1=np.array(["u", "v", "w", "never"]),
        y=rng.integers(0, 2, 20).astype(np.uint8),
    )
    for file in ("adult.npz", "credit_approval.npz"):
        np.savez(tmp_path / file, **table)
    digits = rng.integers(0, 256, (6, 28, 28)).astype(np.uint8)
    kinds = np.arange(6).astype(np.uint8)
    np.savez(tmp_path / "mnist.npz", x_train=digits[:4], y_train=kinds[:4], x_test=digits[4:],
             y_test=kinds[4:])  # fmt: skip
    monkeypatch.setenv("NUMPYRO_FED_DATA", str(tmp_path))
    return tmp_path


def test_a_table_from_the_folder(folder):
    with np.load(folder / "adult.npz") as arrays:
        table = dict(arrays)
    data = fd.load_tabular("adult", seed=7)
    assert data.x_train.shape == (16, 9)
    assert data.x_test.shape == (4, 9)
    assert data.x_train.dtype == data.y_train.dtype == np.float32
    train = np.random.default_rng(7).permutation(20)[:16]
    np.testing.assert_array_equal(data.y_train, table["y"][train])
    np.testing.assert_allclose(data.x_train[:, :2].mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(data.x_train[:, :2].std(0), 1, rtol=1e-5)
    np.testing.assert_array_equal(data.x_train[:, 2:5].argmax(1), table["x_cat"][train, 0])
    np.testing.assert_array_equal(data.x_train[:, 5:].argmax(1), table["x_cat"][train, 1])
    np.testing.assert_array_equal(data.x_train[:, 2:].sum(1), 2)
    # the test part is moved and scaled by the training part's numbers, not by its own
    test = np.random.default_rng(7).permutation(20)[16:]
    center, scale = table["x_num"][train].mean(0), table["x_num"][train].std(0)
    np.testing.assert_allclose(
        data.x_test[:, :2], (table["x_num"][test] - center) / scale, atol=1e-5
    )


def test_refused_is_1_in_credit(folder):
    adult, credit = fd.load_tabular("adult"), fd.load_tabular("credit")
    np.testing.assert_array_equal(credit.y_train, 1 - adult.y_train)


def test_digits_from_the_folder(folder):
    data = fd.load_mnist()
    assert data.x_train.shape == (4, 784)
    assert data.x_train.dtype == np.float32
    assert 0 <= data.x_test.min() < 0.1 < 0.9 < data.x_test.max() <= 1
    np.testing.assert_array_equal(data.y_test, [4, 5])


def test_a_constant_column_stays_finite():
    x = fd.standardised(np.ones((5, 1)), np.arange(4))
    np.testing.assert_array_equal(x, np.zeros((5, 1)))


def test_a_file_that_the_folder_lacks(folder):
    with pytest.raises(FileNotFoundError, match=r"NUMPYRO_FED_DATA .*bank_full\.npz"):
        fd.load_tabular("bank")


def test_a_data_set_that_there_is_not():
    with pytest.raises(ValueError, match="'adult', 'bank' and 'credit'"):
        fd.load_tabular("iris")


def openml(monkeypatch, answer):
    """In the place of scikit-learn's data sets, something that needs no network."""
    module = ModuleType("sklearn.datasets")
    module.fetch_openml = module.fetch_20newsgroups = answer
    monkeypatch.delenv("NUMPYRO_FED_DATA", raising=False)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", module)


@pytest.mark.parametrize("installed", [True, False])
def test_neither_a_folder_nor_a_network(monkeypatch, installed):
    def offline(*args, **kwargs):
        raise OSError("no route to host")

    openml(monkeypatch, offline)
    if not installed:
        monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(RuntimeError, match=r"set NUMPYRO_FED_DATA.*adult\.npz.*scikit-learn"):
        fd.load_tabular("adult")
    with pytest.raises(RuntimeError, match=r"mnist\.npz"):
        fd.load_mnist()
    with pytest.raises(RuntimeError, match=r"newsgroups20\.npz"):
        fd.load_newsgroups()


def test_a_table_from_openml(monkeypatch):
    nan = np.nan
    rows = [[1.0, 0, 1], [2.0, 1, 0], [3.0, nan, 1], [4.0, 0, 0], [5.0, 1, 1]]
    held = {
        ("adult", 2): (rows, [">50K", "<=50K", ">50K", "<=50K", ">50K"]),
        ("credit-approval", 1): ([*rows, [nan, 0, 0]], ["+", "-", "+", "-", "-", "+"]),
    }

    def fetch_openml(name, version, as_frame, parser):
        assert (as_frame, parser) == (False, "liac-arff")
        data, target = held[name, version]
        return SimpleNamespace(
            data=np.array(data),
            target=np.array(target, dtype=object),
            feature_names=["age", "job", "sex"],
            categories={"job": ["a", "b"], "sex": ["f", "m", "never"], "class": ["n", "y"]},
        )

    openml(monkeypatch, fetch_openml)
    adult = fd.load_tabular("adult", train_fraction=1.0)
    assert adult.x_train.shape == (5, 1 + 3 + 2)  # a level of its own for the missing job
    assert adult.x_train[:, 1:4].sum(0).tolist() == [2, 2, 1]
    assert adult.y_train.sum() == 3
    # a number is missing: rows with anything missing are left out
    credit = fd.load_tabular("credit", train_fraction=1.0)
    assert credit.x_train.shape == (4, 1 + 2 + 2)
    assert credit.y_train.sum() == 3


def test_digits_from_openml(monkeypatch):
    n = 60_002
    bunch = SimpleNamespace(
        data=np.full((n, 1), 255.0), target=np.array([str(i % 10) for i in range(n)], dtype=object)
    )
    openml(monkeypatch, lambda name, **options: bunch)
    data = fd.load_mnist()
    assert data.x_train.shape == (60_000, 1)
    assert data.x_test.max() == 1
    assert data.y_test.tolist() == [0, 1]


def test_words_of_messages_from_the_folder(folder):
    np.savez(
        folder / "newsgroups20.npz",
        vocab=np.array(["subject", "god", "rare", "space"]),
        train_indptr=[0, 3, 4], train_indices=[0, 1, 3, 0], train_counts=[9, 2, 1, 5],
        test_indptr=[0, 3], test_indices=[1, 2, 3], test_counts=[1, 1, 4],
    )  # fmt: skip
    counts, words = fd.load_newsgroups(2)
    assert words.tolist() == ["god", "space"]
    np.testing.assert_array_equal(counts, [[2, 1], [1, 4]])


def test_words_of_messages_from_scikit_learn(monkeypatch):
    texts = ["God god space", "writes: the article", "god 12 rare rare space!"]
    openml(monkeypatch, lambda subset, remove: SimpleNamespace(data=texts))
    counts, words = fd.load_newsgroups(2)
    assert words.tolist() == ["god", "space"]
    np.testing.assert_array_equal(counts, [[2, 1], [1, 1]])
