"""Rows left out in turn, and models compared by them, against closed forms."""

import warnings
from functools import cache

import arviz
import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_fed as nf
from numpyro_fed.basics.errors import DataError, ModelError
from numpyro_fed.basics.programs import precision
from numpyro_fed.network import InMemory

KEY = jax.random.key(0)
QUIET = {"progress_bar": False}
SIZES = (6, 11)


def nested(y, hospital):
    """An effect for each hospital, and one for each row, both normal; all variances known."""
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with nf.silo_plate("hospital", 1):
        u = numpyro.sample("u", dist.Normal(0, 1))
    with nf.silo_plate("row", len(y)):
        b = numpyro.sample("b", dist.Normal(mu + u[hospital], 1.5))
        numpyro.sample("y", dist.Normal(b, 1), obs=y)


def flat(y, hospital=None):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with nf.silo_plate("row", len(y)):
        numpyro.sample("y", dist.Normal(mu, 1.5), obs=y)


@pytest.fixture(scope="module")
def silos():
    r = np.random.default_rng(1)
    effects = zip(SIZES, (0.5, -1.0), strict=True)
    return [dict(y=r.normal(2 + u, 1.8, n), hospital=np.zeros(n, int)) for n, u in effects]


def exact(silos, between, within):
    """The log density of each row given all others, for outcomes that are normal together."""
    y = np.concatenate([s["y"] for s in silos])
    hospital = np.repeat(np.arange(len(silos)), [len(s["y"]) for s in silos])
    covariance = 100.0 + between * (hospital[:, None] == hospital) + within * np.eye(len(y))
    precision = np.linalg.inv(covariance)
    variance = 1 / np.diag(precision)
    return -0.5 * (np.log(2 * np.pi * variance) + (precision @ y) ** 2 * variance)


@cache
def method_of(model):
    """One for each model, so that its programs are there for the next test."""
    return nf.SFVI(model)


def weighed(model, silos):
    """Draws of a conjugate model's posterior, weighed, in the precision of a fit."""
    with precision(double=True):
        return nf.importance_correct(KEY, method_of(model).run(KEY, 0, silos, **QUIET))


@pytest.fixture(scope="module")
def fitted(silos):
    return nf.fit(KEY, nested, silos, **QUIET)


@pytest.fixture(scope="module")
def without_effects(silos):
    return weighed(flat, silos)


def rows_of(table):
    return np.concatenate([silo.log_density for silo in table.silos])


@pytest.mark.slow
def test_rows_have_their_density_given_all_others(fitted, silos):
    """The hospital's effect is drawn, and that of the row is integrated out by quadrature."""
    table, expected = fitted.loo(), exact(silos, 1.0, 1.5**2 + 1)
    assert fitted.corrected.integration.nodes
    np.testing.assert_allclose(rows_of(table), expected, atol=0.1)
    assert [len(silo.log_density) for silo in table.silos] == list(SIZES)
    assert table.elpd == pytest.approx(rows_of(table).sum())
    assert table.se == pytest.approx(np.sqrt(len(expected)) * rows_of(table).std())
    assert (table.num_rows, table.num_bad, table.num_exchanges) == (17, 0, 0)
    assert "0 of 17 rows" in str(table)


@pytest.mark.slow
def test_rows_whose_latents_are_drawn_have_the_same_density(fitted, silos):
    drawn = nf.importance_correct(KEY, fitted.run_behind, 1_000, 40)
    assert not drawn.integration.nodes
    np.testing.assert_allclose(rows_of(drawn.loo()), exact(silos, 1.0, 1.5**2 + 1), atol=0.1)


@pytest.mark.slow
def test_a_row_far_from_all_others_is_not_known(silos):
    """One row tells all that is known of its coefficient, and the others' say nothing of it."""

    def regression(x, y):
        a, b = (numpyro.sample(name, dist.Normal(0, 100)) for name in "ab")
        with nf.silo_plate("row", len(y)):
            numpyro.sample("y", dist.Normal(a + b * x, 1), obs=y)

    y = silos[0]["y"]
    data = [dict(x=np.eye(len(y))[0], y=y), dict(x=np.zeros(5), y=silos[1]["y"][:5])]
    table = weighed(regression, data).loo()
    assert table.num_bad == 1
    assert table.silos[0].pareto_k.argmax() == 0
    assert "1 of 11 rows" in str(table)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_no_row_is_unknown_of_few_that_say_little(seed):
    """Draws are counted by their own weights: as whole numbers, 8 and 12 of 30 were unknown."""

    def logistic(x, y):
        a, b = (numpyro.sample(name, dist.Normal(0, 3)) for name in "ab")
        with nf.silo_plate("row", len(y)):
            numpyro.sample("y", dist.Bernoulli(logits=a + b * x), obs=y)

    r = np.random.default_rng(seed)
    data = []
    for n in (10, 20):
        x = r.normal(size=n)
        data.append(dict(x=x, y=r.binomial(1, 1 / (1 + np.exp(-0.5 - 2 * x)))))
    assert nf.fit(KEY, logistic, data, **QUIET).loo().num_bad == 0


@pytest.mark.slow
def test_arviz_reads_rows_and_compares_models(fitted, without_effects, silos):
    one, other = fitted.loo(), without_effects.loo()
    np.testing.assert_allclose(rows_of(other), exact(silos, 0.0, 1.5**2), atol=0.1)
    read = one.to_arviz()
    name = "elpd_loo" if arviz.__version__.startswith("0.") else "elpd"
    assert float(read[name]) == pytest.approx(one.elpd)
    found = nf.compare_models({"flat": without_effects, "nested": fitted})
    best = "nested" if one.elpd > other.elpd else "flat"
    assert found.names[0] == best
    assert found.difference[1] == pytest.approx(abs(one.elpd - other.elpd))
    below = rows_of(one) - rows_of(other)
    assert found.se_of_difference[1] == pytest.approx(np.sqrt(17) * below.std())
    assert found.weight.sum() == pytest.approx(1)
    assert found.log_evidence[found.names.index("flat")] == without_effects.log_evidence
    assert str(found).count("\n") == 2
    assert "<table>" in found._repr_html_()
    assert found.to_frame().loc["nested", "elpd"] == pytest.approx(one.elpd)
    silos_out = nf.compare_models({"flat": without_effects, "nested": fitted}, by="silos")
    totals = {"flat": without_effects.leave_out().total, "nested": fitted.leave_out().total}
    assert dict(zip(silos_out.names, silos_out.elpd, strict=True)) == pytest.approx(totals)


@pytest.mark.slow
def test_models_of_other_data_are_not_compared(without_effects, silos):
    fewer = weighed(flat, [silos[0]] * 2)
    with pytest.raises(DataError, match="'all' has 17, 'fewer' has 12 rows"):
        nf.compare_models({"all": without_effects, "fewer": fewer})
    with pytest.raises(ValueError, match="two models"):
        nf.compare_models({"all": without_effects})
    with pytest.raises(ValueError, match="by='patients'"):
        nf.compare_models({"all": without_effects, "fewer": fewer}, by="patients")
    with pytest.raises(TypeError, match=r"takes a dict.*got list.*\{\"one\": a"):
        nf.compare_models([without_effects, fewer])


@pytest.mark.slow
def test_rows_that_read_others_latents_are_refused():
    def walk(y):
        s = numpyro.sample("s", dist.Normal(0, 1))
        with nf.silo_plate("row", len(y)):
            b = numpyro.sample("b", dist.Normal(s, 1))
            numpyro.sample("y", dist.Normal(b + b[::-1], 1), obs=y)

    data = [dict(y=np.arange(4.0))] * 2
    run = nf.SFVI(walk, start=None).run(KEY, 0, data, **QUIET)
    fixed = nf.importance_correct(KEY, run, 200, 1)
    with pytest.raises(ModelError, match="leaving rows out"):
        fixed.loo()


@pytest.mark.slow
def test_silos_elsewhere_send_sums_alone(without_effects, silos):
    """Five numbers a silo, which add up to what one process knows."""
    policy = nf.Policy(min_rows=1, parameters_per_row=1.0)
    nodes = [nf.Silo(dict(y=s["y"]), names={"flat": flat}, policy=policy) for s in silos]
    replies = []

    def heard(answer):
        def wrapped(message):
            reply = answer(message)
            replies.append(reply)
            return reply

        return wrapped

    federation = nf.Federation(InMemory([heard(node.answer) for node in nodes]))
    fitted = weighed(flat, federation)
    replies.clear()
    table = fitted.loo()
    assert len(replies) == 2
    assert (
        max(map(len, replies)) < 1_000
    )  # a row's numbers of 11 rows and 2,000 draws would be more
    assert table.silos is None
    assert table.num_exchanges == 1
    here = without_effects.loo()
    assert table.elpd == pytest.approx(here.elpd, abs=0.05)
    assert (table.num_rows, table.num_bad) == (here.num_rows, here.num_bad)
    with pytest.raises(DataError, match="keep what is known of each row"):
        table.to_arviz()
    with pytest.raises(DataError, match="by='silos'"):
        nf.compare_models({"a": fitted, "b": fitted})


@pytest.mark.slow
def test_a_silo_of_few_rows_with_an_outcome_leaves_none_of_them_out(silos):
    """The second silo has eleven rows, and four outcomes."""
    policy = nf.Policy(min_rows=6, parameters_per_row=1.0)
    few = np.where(np.arange(SIZES[1]) < 4, silos[1]["y"], np.nan)
    held = [silos[0]["y"], few]
    nodes = [nf.Silo(dict(y=y), names={"flat": flat}, policy=policy) for y in held]
    federation = nf.Federation(InMemory([node.answer for node in nodes]))
    fitted = weighed(flat, federation)
    fitted.leave_out()
    with pytest.raises(nf.SilosError, match=r"(?s)1.*fewer rows with an outcome.*6, min_rows"):
        fitted.loo()


@pytest.mark.slow
def test_rows_without_an_outcome_do_not_count(without_effects, silos):
    more = [dict(y=np.append(s["y"], np.nan)) for s in silos]
    table = weighed(flat, more).loo()
    here = without_effects.loo()
    assert table.num_rows == 17
    assert table.elpd == pytest.approx(here.elpd, abs=0.1)
    assert table.se == pytest.approx(here.se, rel=0.02)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::numpyro_fed.ConvergenceWarning")
def test_rows_count_by_their_outcomes_and_not_by_their_likelihood():
    """Without an outcome a row's integral may not be one; with one its likelihood may be."""

    def heavy(x, y):
        s = numpyro.sample("s", dist.HalfNormal(2))
        with nf.silo_plate("row", len(y)):
            z = numpyro.sample("z", dist.Exponential(1))
            numpyro.sample("y", dist.Poisson(x * z * s), obs=y)

    r = np.random.default_rng(0)
    silos = []
    for _ in range(2):
        x = np.where(np.arange(12) < 8, 1.0, 1e-9)
        y = np.where(x == 1, r.poisson(3, 12), 0).astype(float)
        y[:3] = np.nan
        silos.append(dict(x=x, y=y))
    run = nf.SFVI(heavy, start=None).run(KEY, 0, silos, **QUIET)
    assert nf.importance_correct(KEY, run, 500).loo().num_rows == 18


def test_parameters_that_were_fitted_to_a_row_are_refused():
    def free(y):
        s = numpyro.sample("s", dist.HalfNormal(2))
        with nf.silo_plate("row", len(y)):
            a = numpyro.param("a", np.zeros(len(y)))
            numpyro.sample("y", dist.Normal(a, s), obs=y)

    run = nf.SFVI(free, start=None).run(KEY, 0, [dict(y=np.arange(4.0))] * 2, **QUIET)
    fixed = nf.importance_correct(KEY, run, 200, 1)
    with pytest.raises(ModelError, match="'a' is a parameter"):
        fixed.loo()


@pytest.mark.filterwarnings("ignore::numpyro_fed.ConvergenceWarning")
def test_few_draws_are_counted_as_few(silos):
    run = nf.SFVI(flat, start=None).run(KEY, 0, silos, **QUIET)
    fixed = nf.importance_correct(KEY, run, 4_000, 1)
    assert not fixed.trusted
    with pytest.warns(nf.ConvergenceWarning, match="no better than the fit"):
        table = fixed.loo()
    assert table.num_draws <= 1.5 * fixed.ess + 1
    with warnings.catch_warnings():  # said once for each fit
        warnings.simplefilter("error")
        fixed.summary(KEY, 50)


def test_fits_of_other_outcomes_are_not_compared(without_effects, silos):
    shifted = weighed(flat, [dict(y=s["y"] + 1) for s in silos])
    with pytest.raises(DataError, match="outcomes of 'b' are not those of 'a'"):
        nf.compare_models({"a": without_effects, "b": shifted})
