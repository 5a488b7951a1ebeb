"""Rows of the fit at silos of many sizes: one program for all, and the numbers of each alone."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_fed as nf
from numpyro_fed.after import own_rows
from numpyro_fed.after.own_rows import outcomes_of_silos, programs_of

KEY = jax.random.key(0)
QUIET = {"progress_bar": False}
SIZES = (5, 9, 6, 8)


def model(x, hospital, n_hospitals, y=None):
    mu = numpyro.sample("mu", dist.Normal(0, 3))
    with nf.silo_plate("hospital", n_hospitals):
        u = numpyro.sample("u", dist.Normal(mu, 1))
    with nf.silo_plate("patient", len(x), dim=-2):
        b = numpyro.sample("b", dist.Normal(0, 1))
        mean = numpyro.deterministic("mean", u[hospital][:, None] + b + x)
        with numpyro.plate("visit", 2, dim=-1):
            numpyro.sample("y", dist.Normal(mean, 0.5), obs=y)


def averaged(x, hospital, n_hospitals, y=None):
    """The same with a number that is kept of all rows of a silo."""
    model(x, hospital, n_hospitals, y)
    numpyro.deterministic("average", x.mean())


@pytest.fixture(scope="module")
def silos():
    r = np.random.default_rng(0)
    return [
        dict(
            x=r.normal(size=(n, 2)),
            hospital=np.zeros(n, int),
            n_hospitals=1,
            y=r.normal(size=(n, 2)),
        )
        for n in SIZES
    ]


@pytest.fixture(scope="module")
def run(silos):
    return nf.SFVI(model, start=None).run(KEY, 0, silos, **QUIET)


def same(parts, others):
    for part, other in zip(parts, others, strict=True):
        assert part.keys() == other.keys()
        for name, value in part.items():
            assert value.shape == other[name].shape
            np.testing.assert_allclose(value, other[name], rtol=1e-5, atol=1e-5)


def asked_of(run, n=20):
    silos = range(run.num_silos)
    draws = run.sample_posterior(KEY, n, silo=list(silos))
    return own_rows.silos_at_draws(run, jax.random.fold_in(KEY, 2), draws, silos)


@pytest.mark.slow
def test_silos_of_many_sizes_share_a_program_and_keep_their_numbers(
    run, silos, monkeypatch, compiled
):
    together = run.predict(KEY, silo="own rows", n=20)
    for n in (7, 50):  # no other program
        run.predict(KEY, silo="own rows", n=n)
    assert compiled.count("jit(at_draws)") == compiled.count("jit(draw_locals)") == 1
    assert [part["y"].shape for part in together] == [(20, n, 2) for n in SIZES]
    same([run.predict(KEY, silo=j, n=20) for j in range(len(SIZES))], together)
    from_prior, seen = run.prior_predict(KEY, n=20), outcomes_of_silos(run, range(len(SIZES)))
    same(seen, [{"y": silo["y"]} for silo in silos])
    monkeypatch.setattr(own_rows, "FEW_SIZES", len(SIZES))
    same(run.predict(KEY, silo="own rows", n=20), together)
    same(run.prior_predict(KEY, n=20), from_prior)


@pytest.mark.slow
def test_a_text_that_sums_up_rows_is_run_at_each_size(silos):
    run = nf.SFVI(averaged, start=None).run(KEY, 0, silos, **QUIET)
    assert not own_rows.paddings_of(run, programs_of(run), asked_of(run))
    for part, silo in zip(run.predict(KEY, silo="own rows", n=3), silos, strict=True):
        np.testing.assert_allclose(part["average"], silo["x"].mean(), rtol=1e-5)


def test_padded_rows_are_real_rows(run, silos):
    """Not zeros, where a likelihood may be infinite; latents come with their rows."""
    asked = asked_of(run)
    paddings = own_rows.paddings_of(run, programs_of(run), asked)
    assert sorted(paddings) == [0, 1, 2, 3]
    latents, data = paddings[0].pad(asked[0].latents, run._silos.data_of(0))
    b = np.asarray(asked[0].latents["b"])
    first = silos[0]["x"][:1].astype(np.float32)
    np.testing.assert_array_equal(data.arrays["x"][5:], np.repeat(first, 4, 0))
    np.testing.assert_array_equal(latents["b"][:, 5:], np.repeat(b[:, :1], 4, 1))
    np.testing.assert_array_equal(latents["u"], asked[0].latents["u"])
