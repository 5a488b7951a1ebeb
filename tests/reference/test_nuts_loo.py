"""Rows left out of the draws of NUTS: ArviZ's numbers of the same draws, and those of a fit."""

from dataclasses import replace

import arviz
import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats

import numpyro_fed as nf
from numpyro_fed.basics.errors import ModelError
from numpyro_fed.data.silo_data import read
from numpyro_fed.text.split import split

KEY = jax.random.key(0)
QUIET = {"progress_bar": False}
SIZES = (7, 9)


def model(hospital, n_hospitals, y):
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    with nf.silo_plate("hospital", n_hospitals):
        u = numpyro.sample("u", dist.Normal(mu, 1))
    with nf.silo_plate("row", len(y), dim=-2), numpyro.plate("visit", 2, dim=-1):
        numpyro.sample("y", dist.Normal(u[hospital][:, None], 1.5), obs=y)


@pytest.fixture(scope="module")
def silos():
    r = np.random.default_rng(0)
    found = [
        dict(hospital=np.zeros(n, int), n_hospitals=1, y=2 + r.normal() + r.normal(0, 1.5, (n, 2)))
        for n in SIZES
    ]
    found[0]["y"][2] = np.nan
    found[1]["y"][0, 1] = np.nan
    return found


@pytest.fixture(scope="module")
def nuts(silos):
    return nf.run_nuts(KEY, model, silos, num_warmup=300, num_samples=1_000, num_chains=2, **QUIET)


@pytest.fixture(scope="module")
def fitted(silos):
    return nf.fit(KEY, model, silos, **QUIET)


def by_hand(nuts, silos):
    """The log likelihood of each row that has an outcome, (chains, draws, rows), by SciPy."""
    parts = []
    for j, silo in enumerate(silos):
        kept = silo["y"][~np.isnan(silo["y"]).all(1)]
        u = np.asarray(nuts.samples[f"silo_{j}/u"], float)
        parts.append(np.nansum(scipy.stats.norm.logpdf(kept, u[:, :, None], 1.5), -1))
    values = np.concatenate(parts, 1)
    return values.reshape(2, 1_000, -1)


@pytest.mark.slow
def test_rows_have_arvizs_numbers_of_the_same_draws(nuts, silos):
    values = by_hand(nuts, silos)
    table = nuts.loo()
    early = arviz.__version__.startswith("0.")
    groups = {"posterior": nuts.globals, "log_likelihood": {"y": values}}
    found = arviz.loo(
        arviz.from_dict(**groups) if early else arviz.from_dict(groups), pointwise=True
    )
    assert table.elpd == pytest.approx(float(found["elpd_loo" if early else "elpd"]), abs=1e-3)
    # ArviZ divides by one less since version 1.
    n = 15 if early else 14
    assert table.se == pytest.approx(float(found["se"]) * np.sqrt(n / 15), rel=1e-4)
    assert table.p_loo == pytest.approx(float(found["p_loo" if early else "p"]), abs=1e-3)
    rows = np.concatenate([silo.log_density for silo in table.silos])
    np.testing.assert_allclose(rows, found["loo_i" if early else "elpd_i"], atol=1e-4)
    assert [len(silo.pareto_k) for silo in table.silos] == [6, 9]
    assert table.num_rows == 15
    assert 0 < table.num_draws <= 2_000


@pytest.mark.slow
def test_a_fit_leaves_rows_out_as_nuts_does(nuts, fitted):
    one, other = nuts.loo(), fitted.loo()
    assert one.num_rows == other.num_rows
    rows = (np.concatenate([s.log_density for s in table.silos]) for table in (one, other))
    np.testing.assert_allclose(*rows, atol=0.15)
    found = nf.compare_models({"nuts": nuts, "fit": fitted})
    assert abs(found.difference).max() < 0.5
    assert found.log_evidence[found.names.index("fit")] == fitted.log_evidence


@pytest.mark.slow
def test_parameters_of_rows_are_refused(nuts):
    """By the text of the run: the draws do not matter."""

    def free(y):
        s = numpyro.sample("s", dist.HalfNormal(2))
        with nf.silo_plate("row", len(y)):
            a = numpyro.param("a", np.zeros(len(y)))
            numpyro.sample("y", dist.Normal(a, s), obs=y)

    text = split(free, read([dict(y=np.arange(4.0))]))
    run = replace(nuts, _run=replace(nuts.run_behind, model=text))
    with pytest.raises(ModelError, match="'a' is a parameter"):
        run.loo()
