"""Malformed input is refused by name before a method compiles; models of many kinds are not."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from apart import Apart
from cases import slow_but
from numpyro.contrib.control_flow import scan
from numpyro.infer import Predictive
from scipy import stats

import numpyro_fed as nf
from numpyro_fed.basics.programs import quick_options

KEY = jax.random.key(0)
QUIET = {"progress_bar": False}
RNG = np.random.default_rng(0)
# The programs of the checks themselves, and single operations of JAX on a key or on zeros.
CHECKS = {"errors", "observed_values", "densities_at_edges", "summaries", "padding", "coupled"}
OPERATIONS = {
    *("convert_element_type", "broadcast_in_dim", "stage", "unstack"),
    *("_threefry_seed", "_threefry_split", "_threefry_fold_in"),
}


def pair(rows, **other):
    x = RNG.normal(size=rows).astype(np.float32)
    return {"x": x, "y": (0.5 * x + RNG.normal(size=rows)).astype(np.float32), **other}


def outcomes(values, n=6):
    return {"x": RNG.normal(size=n), "y": np.resize(values, n)}


def linear(x, y):
    a = numpyro.sample("a", dist.Normal(0, 5))
    b = numpyro.sample("b", dist.Normal(0, 5))
    with nf.silo_plate("row", x.shape[0]):
        numpyro.sample("y", dist.Normal(a + b * x, 1), obs=y)


def under(fn):
    """Outcomes with a distribution of one global and the row's ``x``."""

    def model(x, y):
        b = numpyro.sample("b", dist.Normal(0, 1))
        with nf.silo_plate("row", x.shape[0]):
            numpyro.sample("y", fn(b, x), obs=y)

    return model


def of_x(summary):
    return lambda x, y: linear(summary(x), y)


def hospitals(hospital, n_hospitals, x, y=None):
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    with nf.silo_plate("hospital", n_hospitals):
        u = numpyro.sample("u", dist.Normal(mu, 1))
    with nf.silo_plate("patient", hospital.shape[0]):
        numpyro.sample("y", dist.Normal(u[hospital] + x, 1), obs=y)


def with_hospitals(*h, n=2):
    return {"hospital": np.array(h), "n_hospitals": n, **pair(len(h))}


def local(x, y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with nf.silo_plate("row", x.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=None)


def forgotten(x, y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with nf.silo_plate("row", x.shape[0]):
        numpyro.sample("z", dist.Normal(mu, 1))


def no_plate(x, y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(mu * x, 1), obs=y)


def prior_of_data(x, y):
    mu = numpyro.sample("mu", dist.Normal(x.mean(), 1))
    with nf.silo_plate("row", x.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def discrete(x, y):
    with nf.silo_plate("row", x.shape[0]):
        k = numpyro.sample("k", dist.Poisson(0.5))  # of no bound: no sum over its values
        numpyro.sample("y", dist.Normal(k, 1), obs=y)


def long_y(x, y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu * x, 1), obs=y)


def visits(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with nf.silo_plate("child", y.shape[0], dim=-1):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y.T)


def one_hospital(x, y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with nf.silo_plate("hospital", 1):
        numpyro.sample("y", dist.Normal(mu * x, 1), obs=y)


def column_of_betas(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2, 1]).to_event(2))
    with nf.silo_plate("row", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ beta, 1), obs=y)


def column(n):
    silo = pair(n)
    return {**silo, "y": silo["y"][:, None]}


def changed(n, name, value):
    return {**pair(n), name: value}


def masked(n):
    return np.ma.masked_array(np.zeros(n, np.float32), np.arange(n) == 1)


FLOATS, NAN = np.arange(5, dtype=np.float32), np.array([0, np.nan, 1, 2, 3], np.float32)
BERNOULLI = under(lambda b, x: dist.Bernoulli(logits=b * x))
POISSON = under(lambda b, x: dist.Poisson(jnp.exp(b * x)))
BETA = under(lambda b, x: dist.Beta(3 * jnp.exp(b), 3))
GAMMA = under(lambda b, x: dist.Gamma(2, jnp.exp(b * x)))
CATEGORICAL = under(lambda b, x: dist.Categorical(logits=x[:, None] * b * jnp.arange(3)))
BINOMIAL = under(lambda b, x: dist.Binomial(total_count=4, logits=b * x))
DIRICHLET = under(lambda b, x: dist.Dirichlet(jnp.exp(b) * jnp.ones(3)))
UNIFORM = under(lambda b, x: dist.Uniform(0, 2))
EXPONENTIAL = under(lambda b, x: dist.Exponential(jnp.exp(b)))
LOG = under(lambda b, x: dist.LogNormal(b * x, 1))
NB = under(lambda b, x: dist.NegativeBinomial2(jnp.exp(b * x), 2))
EVENT = under(lambda b, x: dist.Normal(b, jnp.ones((len(x), 2))).to_event(1))


def logged(x, y):
    b = numpyro.sample("b", dist.Normal(0, 1))
    with nf.silo_plate("row", x.shape[0]):
        numpyro.sample("y", dist.Normal(b, 1), obs=jnp.log(y))


def parts(*rows):
    return {"x": np.zeros(len(rows)), "y": np.array(rows, float)}


D, M = nf.DataError, nf.ModelError
GOOD = pair(6)
MALFORMED = {
    # shapes
    "a column of outcomes": (linear, [column(5), column(6)], M, "silo 0: site 'y' has 5 entries"),
    "one silo alone": (linear, [column(5)], M, r"silo 0: site 'y'.*\(5, 1\).*y.ravel"),
    "a column of means": (
        column_of_betas,
        [{"x": np.ones((n, 2)), "y": np.ones(n)} for n in (4, 5)],
        M,
        "silo 0: site 'y' .*4 .*dim -2.* no plate",
    ),
    "an axis without plate": (visits, [{"y": np.ones((4, 3))}], M, "site 'y' has 3.*numpyro.plate"),
    "a plate of one": (one_hospital, [pair(5), pair(4)], M, "silo 0: site 'y' has 5.*'hospital'"),
    "one outcome for all": (
        linear,
        [GOOD, changed(5, "y", FLOATS[:1])],
        M,
        "silo 1: site 'y': .* all 5 rows",
    ),
    "y too short": (linear, [GOOD, changed(5, "y", FLOATS[:4])], D, "silo 1.*'x' has 5, 'y' has 4"),
    "x too short": (long_y, [GOOD, changed(5, "x", FLOATS[:4])], M, "silo 1.*'x' has 4, 'y' has 5"),
    "y too long": (linear, [changed(4, "y", FLOATS), GOOD], D, "silo 0.*'x' has 4, 'y' has 5"),
    "axes differ": (linear, [GOOD, column(5)], D, "silo 1, 'y' has shape"),
    "an empty silo": (linear, [GOOD, pair(0)], D, "silo 1: silo_plate 'row' .* 0"),
    # what sums up rows
    **{
        name: (of_x(f), [pair(20), pair(15)], M, "silo 0, silo_plate 'row'")
        for name, f in {
            "centred": lambda x: x - x.mean(),
            "standardised": lambda x: (x - x.mean()) / x.std(),
            "by the largest": lambda x: x / x.max(),
            "from the smallest": lambda x: x - x.min(),
            "running sums": jnp.cumsum,
            "ranks": lambda x: jnp.argsort(jnp.argsort(x)) / 10.0,
            "lagged": lambda x: jnp.concatenate([x[:1], x[:-1]]),
        }.items()
    },
    "centred, silos of one size": (
        of_x(lambda x: x - x.mean()),
        [pair(20), pair(20)],
        M,
        "silo 0, silo_plate 'row'",
    ),
    "centred, at the second silo": (
        of_x(lambda x: x - x.mean()),
        [{"x": np.ones(9), "y": np.ones(9)}, {k: v.astype(float) for k, v in pair(9).items()}],
        M,
        "silo 1, silo_plate 'row'",
    ),
    "standardised, sizes that are numbers": (
        lambda x, y, n: static_size((x - x.mean()) / x.std(), y, n),
        [pair(20, n=20), pair(15, n=15)],
        M,
        "silo 0, silo_plate 'row'",
    ),
    "centred outcomes": (
        lambda x, y: linear(x, y - y.mean()),
        [pair(8), pair(9)],
        M,
        "silo 0, silo_plate 'row'",
    ),
    # masks and what is missing
    "masked outcomes": (
        linear,
        [GOOD, changed(5, "y", masked(5))],
        D,
        "silo 1, 'y'.*handlers.mask",
    ),
    "masked covariates": (linear, [changed(5, "x", masked(5)), GOOD], D, "silo 0, 'x': a masked"),
    "NaN": (linear, [GOOD, changed(5, "x", NAN)], D, "silo 1, 'x': 1 of 5"),
    "infinity": (linear, [GOOD, changed(5, "x", np.inf + FLOATS)], D, "silo 1, 'x'"),
    "log of a negative": (
        logged,
        [outcomes([1.0]), outcomes([1.0, -1.0])],
        D,
        "silo 1, site 'y'.*1",
    ),
    # nothing observed
    "obs is None": (local, [GOOD, pair(5)], M, "observed.*'y'"),
    "obs forgotten": (forgotten, [GOOD, pair(5)], M, "observed.*'z'"),
    "None at all silos": (
        hospitals,
        [{**with_hospitals(0, 1, 1), "y": None} for _ in range(2)],
        M,
        r"forgotten at 'y'.*None for \['y'\]",
    ),
    # supports
    **{
        name: (model, [outcomes(first), outcomes(second)], D, words)
        for name, (model, first, second, words) in {
            "Bernoulli 1 and 2": (
                BERNOULLI,
                [0, 1],
                [1, 2],
                "silo 1, site 'y': .* 2 of row 1.*3 such.*0 and 1.*y - 1",
            ),
            "Bernoulli -1 and 1": (BERNOULLI, [-1, 1], [1], "silo 0, site 'y'.* -1 of row 0"),
            "soft labels": (BERNOULLI, [0.0, 1.0], [0.3], "silo 1.* 0.3 of row 0.*numpyro.factor"),
            "negative counts": (POISSON, [3], [3, 2, -1], "silo 1, site 'y'.* -1 of row 2"),
            "counts with halves": (POISSON, [3.0], [2.5], "silo 1, site 'y'.* 2.5 of row 0"),
            "negative binomial": (NB, [3], [-3], "silo 1, site 'y'.* -3 of row 0"),
            "Beta at 0": (BETA, [0.5], [0.5, 0.0], "silo 1, site 'y'.* 0. of row 1.*at the edge"),
            "Beta at 1": (BETA, [1.0], [0.5], "silo 0, site 'y'.* 1. of row 0.*at the edge"),
            "Beta of whole numbers": (BETA, [0], [1], "silo 0, site 'y'.* 0 of row 0.*at the edge"),
            "Beta in percent": (BETA, [0.5], [35.0], "silo 1, site 'y'.* 35. of row 0"),
            "Gamma at 0": (GAMMA, [1.0], [0.0], "silo 1, site 'y'.*above 0 .* the edge. Leave"),
            "Gamma below 0": (GAMMA, [1.0], [2.0, -0.5], "silo 1, site 'y'.* -0.5 of row 1"),
            "a fourth category": (CATEGORICAL, [0, 2], [3], "silo 1, site 'y'.* 3 .*from 0 to 2"),
            "more than were asked": (BINOMIAL, [4], [5], "silo 1, site 'y'.* 5 of row 0"),
            "outside of an interval": (UNIFORM, [1.0], [2.5], "silo 1, site 'y'.* 2.5 of row 0"),
            "an exponential at 0": (EXPONENTIAL, [1.0], [0.0], "silo 1, site 'y'.* 0. of row 0"),
            "lognormal below 0": (LOG, [1.0], [-1.0], "silo 1, site 'y'.* -1. of row 0"),
            "log of a negative": (logged, [1.0], [1.0, -1.0], "silo 1, site 'y'.* nan of row 1"),
        }.items()
    },
    "parts of no whole": (
        DIRICHLET,
        [parts([0.2, 0.3, 0.5]), parts([0.2, 0.3, 0.1])],
        D,
        "silo 1, site 'y'.*sum to 1",
    ),
    "a part of 0": (
        DIRICHLET,
        [parts([0.2, 0.3, 0.5], [0, 0.5, 0.5])],
        D,
        "silo 0, site 'y'.*row 1",
    ),
    "one of two outcomes": (
        under(lambda b, x: dist.Poisson(jnp.exp(b) * jnp.ones((len(x), 2))).to_event(1)),
        [{"x": np.ones(2), "y": np.array([[1, 2], [3, -4]])}],
        D,
        r"silo 0, site 'y'.*\[ 3 -4\] of row 1",
    ),
    # kinds of values
    "bool and float": (
        linear,
        [changed(5, "x", FLOATS > 2), pair(5)],
        D,
        r"silo 1, 'x' .*float(32|64).*'x' of silo 0 .*astype\('float(32|64)'\)",
    ),
    "float and bool": (
        linear,
        [pair(5), changed(5, "x", FLOATS > 2)],
        D,
        "'x' of silo 1 with",
    ),
    "int and float": (
        linear,
        [changed(5, "x", np.arange(5)), pair(5)],
        D,
        "'x' of silo 0 with",
    ),
    "bool and int": (
        BERNOULLI,
        [outcomes([True]), outcomes([1])],
        D,
        r"'y' of silo 0 with .astype\('int(32|64)'\)",
    ),
    "other keys": (linear, [GOOD, pair(5, z=1.0)], D, "silo 1 has the keys"),
    "an array and a number": (linear, [pair(5), changed(5, "x", 1)], D, "silo 1, 'x'"),
    "text": (linear, [GOOD, changed(5, "x", np.array(list("abcde")))], D, "silo 1, 'x'.*numbers"),
    # indices
    "ids of all hospitals": (
        hospitals,
        [with_hospitals(0, 1, 1), with_hospitals(1, 2, 1)],
        D,
        "silo 1: index 2 .*'hospital' holds 1 to 2",
    ),
    "minus one": (
        hospitals,
        [with_hospitals(0, -1, 1), with_hospitals(1, 0)],
        D,
        "silo 0: index -1",
    ),
    # the text
    "no silo_plate": (no_plate, [GOOD], M, "no silo_plate"),
    "a prior of data": (prior_of_data, [GOOD, pair(5)], M, "'mu' depends on data"),
    "a discrete latent": (discrete, [GOOD], M, "silo 0: site 'k' .*discrete"),
}


quick_options()  # tries them out once in a process, by a program


def programs_of_methods(names):
    return [n for n in names if n.removeprefix("jit(").rstrip(")") not in CHECKS | OPERATIONS]


@pytest.mark.parametrize(
    ("model", "silos", "kind", "words"),
    slow_but(MALFORMED.values(), *range(0, len(MALFORMED), 3)),
    ids=MALFORMED,
)
def test_malformed_input_is_refused_before_a_method_compiles(model, silos, kind, words, compiled):
    with pytest.raises(kind, match=words):
        nf.fit(KEY, model, silos, **QUIET)
    assert programs_of_methods(compiled) == []


def test_rows_that_fill_up_a_silo_are_not_counted():
    """Three values are wrong at silo 0, which is filled up to the length of silo 1."""
    silos = [outcomes([2, 1, 2, 2], 4), outcomes([0, 1], 6)]
    with pytest.raises(D, match=r"silo 0.* 2 of row 0.* 3 such"):
        nf.PVI(BERNOULLI).run(KEY, 1, silos, **QUIET)


def test_there_are_forty_of_them():
    assert len(MALFORMED) >= 40


@pytest.mark.parametrize(
    "name", slow_but(["a column of outcomes", "centred", "Bernoulli 1 and 2"], 1)
)
@pytest.mark.parametrize(
    "ask",
    [
        lambda model, silos: nf.SFVI(model).run(KEY, 3, silos, **QUIET),
        lambda model, silos: nf.PVI(model).run(KEY, 3, silos, **QUIET),
        lambda model, silos: nf.SFVIAvg(model).run(KEY, 3, silos, **QUIET),
        lambda model, silos: nf.run_nuts(KEY, model, silos, num_samples=5, **QUIET),
        lambda model, silos: nf.find_mode(KEY, model, silos),
        nf.check_decomposition,
    ],
    ids=["SFVI", "PVI", "SFVIAvg", "NUTS", "mode", "decomposition"],
)
def test_other_methods_refuse_it_as_well(name, ask):
    model, silos, kind, words = MALFORMED[name]
    with pytest.raises(kind, match=words):
        ask(model, silos)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a column of outcomes", "this silo: site 'y' has n entries at dim -2.*to_event.1."),
        ("centred", "this silo, silo_plate 'row'.*a row changed"),
        ("Bernoulli 1 and 2", "this silo, site 'y': the outcome is impossible.*0 and 1.*y - 1"),
    ],
)
def test_a_silo_elsewhere_tells_no_values_and_counts(name, words):
    model, silos, kind, _ = MALFORMED[name]
    with pytest.raises(kind, match=f"silo [01] refuses '[a-z]+': {words}"):
        Apart(nf.SFVI(model), silos).run(KEY, 3)


# --- what is not malformed -------------------------------------------------------------------


def ragged(y, seen):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with nf.silo_plate("child", y.shape[0], dim=-2):
        b = numpyro.sample("b", dist.Normal(mu, 1))
        with numpyro.plate("visit", y.shape[1], dim=-1), numpyro.handlers.mask(mask=seen):
            numpyro.sample("y", dist.Poisson(jnp.exp(b)), obs=y)


def over_time(y):
    phi = numpyro.sample("phi", dist.Uniform(-1, 1))

    def step(before, now):
        with nf.silo_plate("patient", y.shape[1]):
            numpyro.sample("y", dist.Normal(phi * before, 1), obs=now)
        return now, None

    scan(step, jnp.zeros(y.shape[1]), y)


def correlated(y):
    L = numpyro.sample("L", dist.LKJCholesky(2, 1.0))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.MultivariateNormal(0.0, scale_tril=L), obs=y)


def factored(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.factor("likelihood", -0.5 * (y - mu) ** 2)


def deterministic(x, y):
    b = numpyro.sample("b", dist.Normal(0, 1))
    with nf.silo_plate("row", x.shape[0]):
        mean = numpyro.deterministic("mean", b * x)
        numpyro.sample("y", dist.Normal(mean, 1), obs=y)


def two_plates(x, y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with nf.silo_plate("one", x.shape[0]):
        numpyro.sample("x", dist.Normal(mu, 1), obs=x)
    with nf.silo_plate("two", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def time_effects(time, y):
    with numpyro.plate("time", 3):
        t = numpyro.sample("t", dist.Normal(0, 1))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(t[time], 1), obs=y)


def weighted(x, y):
    b = numpyro.sample("b", dist.Normal(0, 1))
    with nf.silo_plate("row", x.shape[0]), numpyro.handlers.scale(scale=jnp.abs(x)):
        numpyro.sample("y", dist.Normal(b, 1), obs=y)


def offset(x, y):
    b = numpyro.sample("b", dist.Normal(0, 1))
    with nf.silo_plate("row", x.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(b + x)), obs=y)


def one_hot(x, y):
    u = numpyro.sample("u", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with nf.silo_plate("row", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ u, 1), obs=y)


def sized(n, total):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with nf.silo_plate("row", n):
        numpyro.sample("y", dist.Normal(mu, 1), obs=jnp.full(n, total / n))


def number(x, y, degree):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([degree]).to_event(1))
    with nf.silo_plate("row", x.shape[0]):
        numpyro.sample("y", dist.Normal(jnp.vander(x, degree) @ b, 1), obs=y)


def process(x, y):
    """A Gaussian process of the silo: its rows are one row."""
    scale = numpyro.sample("scale", dist.LogNormal(0, 1))
    K = jnp.exp(-0.5 * ((x[:, None] - x) / scale) ** 2) + jnp.eye(x.shape[0])
    with nf.silo_plate("silo", 1):
        numpyro.sample("y", dist.MultivariateNormal(0.0, K), obs=y[None])


def white_process(x, y):
    """The same, of latents of the rows."""
    scale = numpyro.sample("scale", dist.LogNormal(0, 1))
    K = jnp.exp(-0.5 * ((x[:, None] - x) / scale) ** 2) + jnp.eye(x.shape[0])
    with nf.silo_plate("row", x.shape[0]):
        b = numpyro.sample("b", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(jnp.linalg.cholesky(K) @ b, 1), obs=y)


def neighbours(W, x, y):
    """What is seen nearby, by the silo's own map."""
    rho = numpyro.sample("rho", dist.Normal(0, 1))
    with nf.silo_plate("area", x.shape[0]):
        numpyro.sample("y", dist.Normal(rho * (W @ x), 1), obs=y)


def matched(sets, x, y):
    """A conditional logistic regression within sets of the rows."""
    b = numpyro.sample("b", dist.Normal(0, 1))
    total = jax.ops.segment_sum(jnp.exp(b * x), sets, num_segments=3)
    with nf.silo_plate("row", x.shape[0]):
        numpyro.factor("choice", y * (b * x - jnp.log(total[sets])))


def bounded_by_a_latent(x, y):
    theta = numpyro.sample("theta", dist.LogNormal(0, 1))
    with nf.silo_plate("row", x.shape[0]):
        numpyro.sample("y", dist.Uniform(0, theta), obs=y)


def counted(total, y):
    p = numpyro.sample("p", dist.Beta(1, 1))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Binomial(total, p), obs=y)


def held_out(x, y, seen):
    b = numpyro.sample("b", dist.Normal(0, 1))
    with nf.silo_plate("row", x.shape[0]), numpyro.handlers.mask(mask=seen):
        numpyro.sample("y", dist.Bernoulli(logits=b * x), obs=y)


def static_size(x, y, n):
    with nf.silo_plate("row", n):
        b = numpyro.sample("b", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(b * x, 1), obs=y)


def seen_counts(n):
    seen = RNG.random((n, 3)) < 0.6
    return {"y": np.where(seen, RNG.poisson(2, (n, 3)), -99), "seen": seen}


def map_of(n):
    return {"W": RNG.random((n, n)), **pair(n)}


def bounded_by_a_parameter(x, y):
    top = numpyro.param("top", 1.0)
    with nf.silo_plate("row", x.shape[0]):
        numpyro.sample("y", dist.Uniform(0, top), obs=y)


LEGIT = {
    "hospitals": (hospitals, [with_hospitals(0, 1, 1), with_hospitals(0, 0, n=1)]),
    "ragged visits": (ragged, [seen_counts(4), seen_counts(5)]),
    "a scan for each patient": (over_time, [{"y": RNG.normal(size=(4, n))} for n in (3, 5)]),
    "masked rows": (
        held_out,
        [{**outcomes([0, 1, 9]), "seen": np.resize([True, True, False], 6)} for _ in range(2)],
    ),
    "LKJ, several outcomes": (correlated, [{"y": RNG.normal(size=(n, 2))} for n in (4, 5)]),
    "a factor alone": (factored, [{"y": RNG.normal(size=n)} for n in (4, 5)]),
    "deterministic": (deterministic, [pair(4), pair(5)]),
    "two plates": (two_plates, [{"x": FLOATS[:3], "y": FLOATS}, {"x": FLOATS, "y": FLOATS[:4]}]),
    "time effects": (time_effects, [{"time": np.arange(n) % 3, "y": FLOATS[:n]} for n in (4, 5)]),
    "weights": (weighted, [pair(4), pair(5)]),
    "an offset": (offset, [outcomes([3, 0]), outcomes([2])]),
    "one-hot groups": (one_hot, [{"x": np.eye(4)[:n], "y": FLOATS[:n]} for n in (4, 3)]),
    "sizes without data": (sized, [dict(n=4, total=2.0), dict(n=6, total=3.0)]),
    "numbers as arguments": (number, [pair(5, degree=3), pair(6, degree=3)]),
    "categories": (CATEGORICAL, [outcomes([0, 1, 2]), outcomes([2])]),
    "events": (EVENT, [{"x": np.ones(n), "y": np.ones((n, 2))} for n in (3, 4)]),
    "a process of the silo": (process, [pair(5), pair(6)]),
    "a process of rows": (white_process, [pair(5), pair(6)]),
    "neighbours": (neighbours, [map_of(4), map_of(5)]),
    "neighbours, one silo": (neighbours, [map_of(4)]),
    "matched sets": (matched, [{"sets": np.arange(n) % 3, **outcomes([1, 0], n)} for n in (6, 9)]),
    "bounds that are latents": (bounded_by_a_latent, [outcomes([9.0]), outcomes([0.5])]),
    "bounds that are parameters": (bounded_by_a_parameter, [outcomes([3.0]), outcomes([0.5])]),
    "angles from 0 to a full circle": (
        under(lambda b, x: dist.VonMises(b, 2.0)),
        [outcomes([0.5, 6.0]), outcomes([-3.0])],
    ),
    "total counts": (counted, [{"total": np.array([3, 9]), "y": np.array([3, 4])}] * 2),
    "a mask without entries": (linear, [changed(5, "y", np.ma.masked_array(FLOATS)), GOOD]),
    "sizes that are numbers": (static_size, [pair(4, n=4), pair(5, n=5)]),
    "Beta inside": (BETA, [outcomes([0.01, 0.99]), outcomes([0.5])]),
    "parts of a whole": (DIRICHLET, [parts([1 / 3, 1 / 3, 1 / 3], [0.2, 0.3, 0.5])]),
    "the ends of an interval": (UNIFORM, [outcomes([0.0, 2.0]), outcomes([1.0])]),
    "as long as the rows by chance": (
        lambda x, y, knots: linear(jnp.abs(x[:, None] - knots).sum(-1), y),
        [pair(5, knots=FLOATS), pair(5, knots=FLOATS)],
    ),
}


@pytest.mark.filterwarnings("ignore:the model's log density changes")
@pytest.mark.parametrize(
    ("model", "silos"), slow_but(LEGIT.values(), *range(0, len(LEGIT), 3)), ids=LEGIT
)
def test_models_of_many_kinds_are_not_refused(model, silos):
    nf.SFVI(model, start=None).cost(silos)


def test_a_bound_in_single_precision_may_lie_beyond_itself():
    """0.6 of single precision is above that of double, and has no density there."""
    y = np.array([0.1, 0.6], np.float32)
    tenths = under(lambda b, x: dist.Uniform(0.1, 0.6))
    with jax.enable_x64(True), pytest.raises(D, match=r"0.60000002.*Single precision.*clip"):
        nf.SFVI(tenths, start=None).cost([{"x": np.zeros(2, np.float32), "y": y}] * 2)


def test_each_runs_own_values_are_judged_by_programs_of_the_first(compiled):
    method = nf.SFVI(BERNOULLI, start=None)
    method.cost([outcomes([0, 1]), outcomes([1])])
    before = len(compiled)
    with pytest.raises(nf.DataError, match=r"silo 1, site 'y': .* 7"):
        method.cost([outcomes([0, 1]), outcomes([1, 1, 7])])
    assert len(compiled) == before


# --- columns split over clients --------------------------------------------------------------


def predictor(x):
    return x @ numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))


def vertical(xs, y=None, observed=True):
    eta = nf.client_sum("client", predictor, xs)
    with numpyro.plate("row", eta.shape[0]):
        fn = dist.Bernoulli(logits=eta) if observed else dist.Normal(eta, 1)
        numpyro.sample("y", fn, obs=y if observed else None)


@pytest.mark.parametrize(
    ("y", "observed", "kind", "words"),
    [
        (np.array([0, 1, 2, 1, 2]), True, D, "the server, site 'y': .* 2 of row 2"),
        (np.ones(4, int), True, D, r"the server: site 'y'.*\(4,\).*\(5,\)"),
        (np.ones((5, 1), int), True, M, "the server: site 'y' .*dim -2"),
        (np.ones(5), False, M, "no site is observed.*'y'"),
    ],
)
def test_a_response_that_does_not_fit_is_refused(y, observed, kind, words):
    xs = [np.ones((5, 2)), np.ones((5, 1))]
    with pytest.raises(kind, match=words):
        nf.VFL(vertical).run(KEY, 3, xs, y=y, observed=observed, **QUIET)


# --- new data, and threads -------------------------------------------------------------------


@pytest.fixture(scope="module")
def fitted_hospitals():
    silos = [with_hospitals(0, 1, 1), with_hospitals(0, 0, 0, n=1)]
    return nf.SFVI(hospitals, start=None).run(KEY, 3, silos, **QUIET), silos


@pytest.mark.slow
def test_an_index_of_new_data_beyond_the_silos_plate_is_refused(fitted_hospitals):
    result, _ = fitted_hospitals
    predict = Predictive(hospitals, guide=result.guide_at(1), num_samples=3)
    new = {"n_hospitals": 1, "x": np.zeros(1), "y": None}
    assert predict(KEY, hospital=np.array([0]), **new)["y"].shape == (3, 1)
    with pytest.raises(nf.DataError, match=r"silo 1: index 1 .*'hospital' holds 1"):
        predict(KEY, hospital=np.array([1]), **new)


@pytest.mark.parametrize("silo", [2, -1])
def test_a_silo_that_there_is_not_is_refused(fitted_hospitals, silo):
    result, _ = fitted_hospitals
    with pytest.raises(IndexError, match=f"no silo {silo}: .* 0 to 1"):
        result.sample_posterior(KEY, 3, silo=silo)


def test_indices_are_checked_where_a_fit_is_loaded(fitted_hospitals, tmp_path):
    result, silos = fitted_hospitals
    result.save(tmp_path / "fit")
    bad = [silos[0], {**silos[1], "hospital": np.array([0, 1, 0])}]
    with pytest.raises(nf.DataError, match="silo 1: index 1 "):
        nf.SFVI(hospitals, start=None).load(tmp_path / "fit", bad)


@pytest.mark.slow
def test_threads_fit_side_by_side():
    """NumPyro keeps one stack of handlers for all threads."""

    def normal(sd):
        def model(y):
            mu = numpyro.sample("mu", dist.Normal(0, 10))
            with nf.silo_plate("row", y.shape[0]):
                numpyro.sample("y", dist.Normal(mu, sd), obs=y)

        return model

    def fitted(i):
        sd, silos = 1.0 + i, [{"y": np.arange(n) + 3.0 * i} for n in (3, 4)]
        result = nf.PVI(normal(sd), start=None).run(KEY, 2, silos, **QUIET)
        found = result.posterior()["mu"]
        y = np.concatenate([silo["y"] for silo in silos])
        precision = 1 / 100 + len(y) / sd**2
        exact = stats.norm(y.sum() / sd**2 / precision, precision**-0.5)
        return float(found.mean), float(found.variance) ** 0.5, exact.mean(), exact.std()

    with ThreadPoolExecutor(8) as pool:
        for mean, sd, exact, spread in pool.map(fitted, range(8)):
            np.testing.assert_allclose((mean, sd), (exact, spread), rtol=2e-3)
