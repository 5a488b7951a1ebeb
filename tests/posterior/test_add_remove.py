"""Silos that come and go: fits of other silos that begin where one of these has ended."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_fed as nf
from numpyro_fed.basics.errors import DataError
from numpyro_fed.network import InMemory

KEY = jax.random.key(0)
QUIET = {"progress_bar": False}


def poisson(x, y):
    b = numpyro.sample("b", dist.Normal(0, 10).expand([2]).to_event(1))
    with nf.silo_plate("row", len(y)):
        numpyro.sample("y", dist.Poisson(jax.numpy.exp(x @ b)), obs=y)


@pytest.fixture(scope="module")
def silos():
    r, found = np.random.default_rng(0), []
    for n in (40, 60, 30, 25):
        x = np.stack([np.ones(n), r.uniform(30, 80, n)], 1)
        found.append(dict(x=x, y=r.poisson(np.exp(x @ [0.2, 0.02]))))
    return found


@pytest.fixture(scope="module")
def fitted(silos):
    return nf.fit(KEY, poisson, silos, **QUIET)


@pytest.fixture(scope="module")
def of_three(silos):
    return nf.fit(KEY, poisson, silos[:3], **QUIET)


def compare(one, other):
    """Compare means, sds and evidences of two fits of the same silos."""
    draws = [np.asarray(f.sample_posterior(KEY, 8_000)["b"]) for f in (one, other)]
    sd = draws[1].std(0)
    assert (np.abs(draws[0].mean(0) - draws[1].mean(0)) / sd).max() < 0.1
    np.testing.assert_allclose(draws[0].std(0), sd, rtol=0.05)
    assert one.log_evidence == pytest.approx(other.log_evidence, abs=0.03)


@pytest.mark.slow
def test_a_silo_is_added_in_fewer_exchanges(fitted, of_three, silos):
    more = of_three.add(jax.random.key(1), silos[3])
    assert more.trusted
    assert more.num_exchanges <= 5
    assert more.run_behind.num_silos == 4
    assert more.call.silos[3] is silos[3]
    compare(more, fitted)
    counted = more.run_behind.saved_run()[0]["before"]
    assert counted["mode"] == more.mode.num_exchanges - 2
    assert counted["own modes"] == 1


@pytest.mark.slow
def test_nothing_of_a_removed_silo_is_left(fitted, of_three, silos):
    fewer = fitted.remove(jax.random.key(2), 3)
    assert fewer.trusted
    assert fewer.num_exchanges < 6
    compare(fewer, of_three)
    assert fewer.run_behind.num_silos == 3
    assert all(one is other for one, other in zip(fewer.call.silos, silos[:3], strict=True))
    # The factors at the new mode are those that the others alone have.
    place, expected = (np.asarray(f.mode.z_G) for f in (fewer, of_three))
    sd = np.sqrt(np.diag(of_three.mode.covariance))
    assert (np.abs(place - expected) / sd).max() < 0.35


@pytest.mark.slow
def test_conjugate_models_are_exact_again():
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 10))
        with nf.silo_plate("row", len(y)):
            numpyro.sample("y", dist.Normal(mu, 2), obs=y)

    silos = [dict(y=np.random.default_rng(j).normal(j, 2, 5 + j)) for j in range(4)]
    fitted = nf.fit(KEY, model, silos[:3], **QUIET)
    for other, kept in (
        (fitted.add(KEY, silos[3]), silos),
        (fitted.remove(KEY, 1), [silos[0], silos[2]]),
    ):
        y = np.concatenate([s["y"] for s in kept])
        precision = 0.01 + len(y) / 4
        found = other.run_behind.start
        assert found.z_G.item() == pytest.approx(y.sum() / 4 / precision, abs=1e-6)
        assert found.curvature.item() == pytest.approx(precision, rel=1e-6)


def test_silos_that_are_not_there_are_refused(fitted):
    with pytest.raises(DataError, match="no silo 4: the fit has 4"):
        fitted.remove(KEY, 4)
    with pytest.raises(DataError, match="no silo -1"):
        fitted.remove(KEY, -1)
    with pytest.raises(DataError, match=r"'x'|'y'|arguments"):
        fitted.add(KEY, dict(z=np.ones(3)))


def test_the_only_silo_stays(silos):
    with pytest.raises(DataError, match="nothing but the prior"):
        nf.fit(KEY, poisson, silos[:1], **QUIET).remove(KEY, 0)


def test_a_loaded_fit_goes_on_with_its_data(fitted, of_three, silos, tmp_path):
    fitted.save(tmp_path / "fit")
    again = nf.load(tmp_path / "fit", poisson, silos)
    compare(again.remove(KEY, 3), of_three)


@pytest.mark.slow
def test_silos_in_other_processes_come_and_go(fitted, of_three, silos):
    policy = nf.Policy(min_rows=1, parameters_per_row=1.0)
    nodes = [nf.Silo(s, names={"poisson": poisson}, policy=policy) for s in silos]
    counts = [0] * 4

    def counting(j):
        def answer(message):
            counts[j] += 1
            return nodes[j].answer(message)

        return answer

    answers = [counting(j) for j in range(4)]
    three = nf.fit(KEY, poisson, nf.Federation(InMemory(answers[:3])), **QUIET)
    more = three.add(KEY, nf.Federation(InMemory(answers)))
    compare(more, fitted)
    before = counts[3]
    compare(more.remove(KEY, 3), of_three)
    assert counts[3] == before  # it is not asked
    with pytest.raises(DataError, match="Federation of these"):
        three.add(KEY, silos[3])
    with pytest.raises(DataError, match="new silo's dict"):
        of_three.add(KEY, nf.Federation(InMemory(answers)))


@pytest.mark.slow
def test_modes_that_a_removed_silo_has_ruled_out_come_back():
    """Two silos know the square alone; the third one knows the sign, and goes."""

    def signs(squared, y):
        a = numpyro.sample("a", dist.Normal(0, 5))
        with nf.silo_plate("row", len(y)):
            numpyro.sample("y", dist.Normal(jax.numpy.where(squared == 1, a**2, a), 0.1), obs=y)

    r = np.random.default_rng(0)
    silos = [dict(squared=np.ones(10), y=4 + 0.1 * r.normal(size=10)) for _ in range(2)]
    silos.append(dict(squared=np.zeros(800), y=2 + 0.1 * r.normal(size=800)))
    fitted = nf.fit(KEY, signs, silos, **QUIET)
    fewer = fitted.remove(KEY, 2)
    share = (np.asarray(fewer.sample_posterior(KEY, 4_000)["a"]) < 0).mean()
    assert not fewer.trusted or share == pytest.approx(0.5, abs=0.1)
    assert fewer.log_evidence == pytest.approx(
        nf.fit(KEY, signs, silos[:2], **QUIET).log_evidence, abs=0.1
    )
