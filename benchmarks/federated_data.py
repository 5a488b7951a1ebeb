"""Data sets of the federated benchmarks, and ways to cut them up into silos.

    x_train, y_train, x_test, y_test = load_tabular("adult")
    silos = split_clients(x_train, y_train, num_clients=10, beta=0.7, kappa=-3.0)

Where the data come from: the folder that the environment variable ``NUMPYRO_FED_DATA`` names, when
it is set; otherwise OpenML, through scikit-learn, which needs to be online. ``python
benchmarks/federated_data.py`` prints the silos of the three tabular data sets.

The folder holds ``adult.npz`` (48,842 rows), ``bank_full.npz`` (45,211) and
``credit_approval.npz`` (the 653 rows with nothing missing), each with the arrays

- ``x_num`` (n, p): the numeric columns;
- ``x_cat`` (n, q): the categorical columns, as integer codes from 0;
- ``cat_names`` (q,): their names, with an array ``levels_<name>`` of the levels of each;
- ``y`` (n,): 0 or 1; 1 is an income over 50K, a deposit made, an application granted ('+');

``newsgroups20.npz`` with the words of each message (``train_indptr``, ``train_indices`` and
``train_counts`` as of a CSR matrix, the same for ``test``) and the words' ``vocab``, in whose place
scikit-learn fetches the messages; and ``mnist.npz`` with ``x_train`` (60000, 28, 28) from 0 to 255,
``y_train`` (60000,), and ``x_test`` and ``y_test`` likewise. A file is needed only by who asks for
its data set.
"""

import math
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

FOLDER = "NUMPYRO_FED_DATA"

# A data set: its file in the folder; its name, version and label of y = 1 at OpenML, if there.
SOURCES = {
    "adult": ("adult.npz", "adult", 2, ">50K"),
    "bank": ("bank_full.npz", "bank-marketing", 1, "2"),
    "credit": ("credit_approval.npz", "credit-approval", 1, "+"),
    "mnist": ("mnist.npz", "mnist_784", 1, None),
    "newsgroups": ("newsgroups20.npz", None, None, None),
}

HEADERS = (
    "article", "distribution", "host", "keywords", "lines", "newsreader", "nntp", "organization",
    "posting", "reply", "subject", "summary", "writes", "wrote",
)  # fmt: skip

# (beta, kappa) of an inhomogeneous split; of a homogeneous one both are 0. The pair of adult is one
# that the authors of PVI ran on it. No client of credit can be filled with a kappa below -0.83: its
# pair is ours.
SPLIT_B = {"adult": (0.7, -3.0), "bank": (0.7, -3.0), "credit": (0.7, -0.5)}


class Dataset(NamedTuple):
    """Training and test part."""

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


def load_tabular(name, seed=0, train_fraction=0.8):
    """'adult', 'bank' or 'credit', its rows in an order drawn by the seed and cut in two.

    Numeric columns have mean 0 and standard deviation 1 in the training part; categorical ones are
    one-hot, every level kept (108, 51 and 46 columns in all, and no column of ones). 1 is the label
    of an application refused in 'credit', as in the experiments of PVI.
    """
    if name not in ("adult", "bank", "credit"):
        raise ValueError(f"no tabular data set {name!r}; there are 'adult', 'bank' and 'credit'")
    parts = _read(name, _table_from_file, lambda: _table_from_openml(*_openml(name)))
    numeric, codes, sizes, y = parts
    y = 1 - y if name == "credit" else y
    order = np.random.default_rng(seed).permutation(len(y))
    train, test = np.split(order, [int(train_fraction * len(y))])
    x = np.hstack([standardised(numeric, train), one_hot(codes, sizes)]).astype(np.float32)
    y = y.astype(np.float32)
    return Dataset(x[train], y[train], x[test], y[test])


def load_mnist():
    """Digits: images (n, 784) from 0 to 1, labels (n,); the usual 60,000 and 10,000."""
    parts = _read("mnist", _digits_from_file, lambda: _digits_from_openml(*_openml("mnist")))
    x_train, y_train, x_test, y_test = parts
    x_train, x_test = (x.reshape(len(x), -1) / np.float32(255) for x in (x_train, x_test))
    return Dataset(x_train, y_train.astype(np.int32), x_test, y_test.astype(np.int32))


def load_newsgroups(words=2_000):
    """Counts (messages, words) of the most common words in 20 Newsgroups, and the words.

    Words of the messages' headers are left out, and so are messages without a word that is left.
    """
    counts, vocabulary = _read("newsgroups", _words_from_file, lambda: _words_fetched(words))
    kept = ~np.isin(vocabulary, HEADERS)
    counts, vocabulary = counts[:, kept], vocabulary[kept]
    common = np.sort(np.argsort(-(counts > 0).sum(0), kind="stable")[:words])
    counts = counts[:, common].astype(np.float32)
    return counts[counts.any(1)], vocabulary[common]


def standardised(numeric, train):
    """Columns less their mean, divided by their standard deviation, over the rows ``train``."""
    numeric = np.asarray(numeric, np.float64)
    scale = numeric[train].std(0)
    return (numeric - numeric[train].mean(0)) / np.where(scale > 0, scale, 1.0)


def one_hot(codes, sizes):
    """An indicator for each level of each column; ``sizes`` are the numbers of levels."""
    columns = [np.eye(size)[codes[:, j]] for j, size in enumerate(sizes)]
    return np.hstack([np.empty((len(codes), 0)), *columns])


def split_homogeneous(x, y, num_clients=10, seed=0):
    """Silos that are equal parts of the rows in an order drawn by the seed."""
    order = np.random.default_rng(seed).permutation(len(y))
    return _silos(x, y, [order[i::num_clients] for i in range(num_clients)])


def split_clients(x, y, num_clients=10, beta=0.0, kappa=0.0, seed=0):
    """Small and large silos, half of each, with different shares of the class 1.

    Of n rows, a small silo gets (1 - beta) n / num_clients and a large one (1 + beta) n /
    num_clients. If eta is the share of class 1, it is eta (1 - kappa) in a small silo; what is left
    goes to the large ones at random. All counts are rounded down (that of class 0 in a small silo,
    too); up to ``num_clients`` - 1 rows are thus in no silo, so a pooled fit to compare with should
    use the silos' rows. The small silos come first.
    """
    y = np.asarray(y)
    if num_clients < 2 or num_clients % 2:
        raise ValueError(f"num_clients is even, half small and half large; it is {num_clients}")
    if not 0 <= beta < 1:
        raise ValueError(f"beta is in [0, 1); it is {beta}")
    if not np.isin(y, (0, 1)).all():
        raise ValueError("y holds 0 and 1 only")
    half, share = num_clients // 2, float(np.mean(y)) * (1 - kappa)
    if not 0 <= share <= 1:
        raise ValueError(f"kappa = {kappa} makes the share of class 1 in a small silo {share:.3f}")
    small, large = (_floor(f * len(y) / num_clients) for f in (1 - beta, 1 + beta))
    zeros = _floor(small * (1 - share))
    counts = (zeros, small - zeros)
    rng = np.random.default_rng(seed)
    rows = [rng.permutation(np.flatnonzero(y == label)) for label in (0, 1)]
    for label in (0, 1):
        if half * counts[label] > len(rows[label]):
            raise ValueError(
                f"{half} small silos need {half * counts[label]} rows of class {label}, and there"
                f" are {len(rows[label])}; take a larger beta or a kappa nearer to 0"
            )
    parts = [
        np.concatenate([r[i * c : (i + 1) * c] for r, c in zip(rows, counts, strict=True)])
        for i in range(half)
    ]
    left = np.concatenate([r[half * c :] for r, c in zip(rows, counts, strict=True)])
    left = rng.permutation(left)
    parts += [left[i * large : (i + 1) * large] for i in range(half)]
    return _silos(x, y, [rng.permutation(part) for part in parts])


def split_two_classes(x, y, num_clients=100, seed=0):
    """Silos with two classes each, such as two digits.

    The rows of each class are cut in equal pieces, and each silo gets pieces of two classes, drawn
    by the seed among the classes with most pieces left. Twice ``num_clients`` is a multiple of the
    number of classes. (Equal pieces of all the rows in the order of their classes, which some use
    instead, leave silos with one class and with three.)
    """
    y = np.asarray(y)
    classes = np.unique(y)
    each, rest = divmod(2 * num_clients, len(classes))
    if len(classes) < 2 or rest:
        raise ValueError(f"{num_clients} silos with two of {len(classes)} classes do not come out")
    rng = np.random.default_rng(seed)
    pieces = [np.array_split(rng.permutation(np.flatnonzero(y == c)), each) for c in classes]
    parts = []
    for _ in range(num_clients):
        order = rng.permutation(len(classes))
        most_left = sorted(order, key=lambda c: -len(pieces[c]))[:2]
        parts.append(rng.permutation(np.concatenate([pieces[c].pop() for c in most_left])))
    return _silos(x, y, parts)


def split_majority(data, num_clients=10, share=0.9, seed=0):
    """Silos of equal size, most of whose rows show one digit, and test rows for each of them.

    Silo ``j`` has a ``share`` of rows of the digit ``j % 10``, as far as the digit lasts; the
    others are dealt out. Test rows of a digit are dealt out to silos as its training rows are.
    Returns two lists of dicts.
    """
    r = np.random.default_rng(seed)
    size = len(data.y_train) // num_clients
    of_digit = [list(r.permutation(np.flatnonzero(data.y_train == d))) for d in range(10)]
    wanted = round(share * size)
    parts = []
    for j in range(num_clients):
        own = of_digit[j % 10]
        parts.append(own[:wanted])
        del own[:wanted]
    rest = list(r.permutation(np.concatenate(of_digit).astype(int)))
    for part in parts:
        missing = size - len(part)
        part += rest[:missing]
        del rest[:missing]
    counts = np.array([np.bincount(data.y_train[part], minlength=10) for part in parts])
    tests = [[] for _ in parts]
    for d in range(10):
        rows = r.permutation(np.flatnonzero(data.y_test == d))
        ends = np.round(len(rows) * np.cumsum(counts[:, d]) / counts[:, d].sum()).astype(int)
        for test, own in zip(tests, np.split(rows, ends[:-1]), strict=True):
            test.extend(own)
    train = _silos(data.x_train, data.y_train, [np.array(part) for part in parts])
    return train, _silos(data.x_test, data.y_test, [np.array(test, int) for test in tests])


def _silos(x, y, parts):
    """One dict of a model's arguments for each set of rows."""
    return [dict(x=x[rows], y=y[rows]) for rows in parts]


def _floor(value):
    """Rounded down, except for the error of a product that should be an integer."""
    return math.floor(value + 1e-9)


def _read(name, from_file, fetch):
    """A data set from the folder, if one is named, or from the network."""
    file = SOURCES[name][0]
    if os.environ.get(FOLDER):
        path = Path(os.environ[FOLDER]) / file
        if not path.is_file():
            raise FileNotFoundError(
                f"{FOLDER} is set, but there is no {path}; {__file__} says what it should hold"
            )
        with np.load(path) as arrays:
            return from_file(arrays)
    try:
        return fetch()
    except (ImportError, OSError) as error:
        raise RuntimeError(
            f"no data set {name!r}: set {FOLDER} to a folder that holds {file} (its layout is at"
            f" the top of {Path(__file__).name}), or be online with scikit-learn installed, to"
            f" fetch it. What went wrong there: {error}"
        ) from error


def _openml(name):
    """The data set and the label that counts as 1."""
    from sklearn.datasets import fetch_openml

    _, dataset, version, positive = SOURCES[name]
    return fetch_openml(dataset, version=version, as_frame=False, parser="liac-arff"), positive


def _table_from_file(arrays):
    """Numeric columns, codes of the categorical ones, their numbers of levels, labels."""
    sizes = [len(arrays[f"levels_{name}"]) for name in arrays["cat_names"]]
    return arrays["x_num"], arrays["x_cat"].astype(int), sizes, arrays["y"].astype(int)


def _table_from_openml(bunch, positive):
    """The same from OpenML. A missing category is a level of its own, where no number is missing;
    otherwise rows with anything missing are left out.
    """
    categorical = np.array([name in bunch.categories for name in bunch.feature_names])
    data, target = bunch.data, bunch.target
    if np.isnan(data[:, ~categorical]).any():
        complete = ~np.isnan(data).any(1)
        data, target = data[complete], target[complete]
    levels = [np.unique(column, return_inverse=True) for column in data[:, categorical].T]
    codes = np.stack([code for _, code in levels], 1)
    sizes = [len(values) for values, _ in levels]
    return data[:, ~categorical], codes, sizes, (target == positive).astype(int)


def _digits_from_file(arrays):
    """Images and labels to train with, and to test."""
    return tuple(arrays[name] for name in ("x_train", "y_train", "x_test", "y_test"))


def _digits_from_openml(bunch, _):
    """The same from OpenML, where the first 60,000 rows are those to train with."""
    (x_train, x_test), (y_train, y_test) = (
        np.split(a.astype(np.float32), [60_000]) for a in (bunch.data, bunch.target)
    )
    return x_train, y_train, x_test, y_test


def main():
    print("data    split  rows of a silo  share of class 1   (small, large)")
    for name, uneven in SPLIT_B.items():
        data = load_tabular(name)
        for split, (beta, kappa) in {"A": (0.0, 0.0), "B": uneven}.items():
            silos = split_clients(data.x_train, data.y_train, 10, beta, kappa)
            sizes = [len(silos[i]["y"]) for i in (0, -1)]
            shares = [np.mean([s["y"].mean() for s in half]) for half in (silos[:5], silos[5:])]
            print(f"{name:8}{split:7}{sizes!s:16}{shares[0]:.3f}, {shares[1]:.3f}")


if __name__ == "__main__":
    main()


def _words_from_file(arrays):
    """Counts (messages, words) and the words."""
    return np.concatenate([_dense(arrays, part) for part in ("train", "test")]), arrays["vocab"]


def _dense(arrays, part):
    """A part of the messages as a matrix."""
    ends, words, counts = (arrays[f"{part}_{name}"] for name in ("indptr", "indices", "counts"))
    found = np.zeros((len(ends) - 1, len(arrays["vocab"])), np.uint16)
    found[np.repeat(np.arange(len(found)), np.diff(ends)), words] = counts
    return found


def _words_fetched(words):
    """The same from scikit-learn: the most common words of English letters."""
    from sklearn.datasets import fetch_20newsgroups
    from sklearn.feature_extraction.text import CountVectorizer

    texts = fetch_20newsgroups(subset="all", remove=("headers",)).data
    many = words + len(HEADERS)
    made = CountVectorizer(stop_words="english", token_pattern="[a-z]{3,}", max_features=many)
    return made.fit_transform(texts).toarray(), made.get_feature_names_out()
