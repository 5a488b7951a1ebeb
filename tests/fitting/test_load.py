"""What was saved can be read without model and data, and goes on with them."""

import warnings
from dataclasses import replace

import jax
import jax.numpy as jnp
import models
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

import numpyro_fed as nf
from numpyro_fed.basics.files import read_npz, write_npz
from numpyro_fed.methods.method import PARTS, LostError, decoded, encoded, rebuilt, recipe
from numpyro_fed.posterior.posterior import Stage
from numpyro_fed.search.mode import LocalMode

KEY = jax.random.key(0)
QUIET = {"progress_bar": False}


def model(y):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    numpyro.deterministic("twice", 2 * mu)
    with nf.silo_plate("row", y.shape[0]):
        b = numpyro.sample("b", dist.Normal(mu, 1))
        numpyro.sample("y", dist.Normal(b, 1), obs=y)


def silos(shift=0.0):
    return [{"y": np.array([1.0, 2.0]) + shift}, {"y": np.array([3.0, 4.0]) + shift}]


PLAIN = nf.SFVI(model, start=None)


@pytest.fixture(scope="module")
def result():
    return PLAIN.run(KEY, 300, silos(), **QUIET)


@pytest.fixture(scope="module")
def corrected(result):
    return nf.importance_correct(jax.random.key(1), result, 1_000, 20)


def equal(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[k], other[k]) for k in one)


@pytest.fixture(scope="module")
def fitted(result, corrected):
    """As ``nf.fit`` returns one, without its searches."""
    stages = (Stage("SFVI", "300 rounds", result), Stage("correction", "k-hat", corrected))
    return replace(corrected, stages=stages, _sent=301)


def judged_by(correction, run, stages=None):
    """A run that ``nf.fit`` returns in the place of a correction that is not reliable."""
    stages = correction.stages if stages is None else stages
    return replace(run, _checked=correction, stages=stages, _sent=301)


# --- without model and data ------------------------------------------------------------------


@pytest.mark.slow
def test_a_correction_is_read_without_its_model(corrected, tmp_path):
    corrected.save(tmp_path / "fit")
    saved = nf.load(tmp_path / "fit")
    assert isinstance(saved, nf.Saved)
    assert (saved.kind, saved.verdict) == ("Corrected", corrected.report())
    with pytest.raises(AttributeError, match=r"'summary'. Load it with its model and data"):
        saved.summary()
    assert not hasattr(saved, "colour")
    for name in ("trusted", "log_evidence", "ess", "pareto_k"):
        assert getattr(saved, name) == getattr(corrected, name)
    np.testing.assert_array_equal(saved.weights, corrected.weights)
    assert equal(saved.draws, corrected.draws)
    assert equal(saved.sample_posterior(KEY, 50), corrected.sample_posterior(KEY, 50))


@pytest.mark.slow
def test_what_fit_returns_is_read_without_its_model(fitted, tmp_path):
    fitted.save(tmp_path / "fit")
    saved = nf.load(tmp_path / "fit")
    assert (saved.kind, str(saved)) == ("Corrected", fitted.verdict)
    assert saved.report == fitted.corrected.report()
    assert saved.trusted == fitted.trusted
    assert saved.log_evidence == fitted.log_evidence
    assert [(s.name, s.words) for s in saved.stages] == [(s.name, s.words) for s in fitted.stages]
    assert equal(saved.sample_posterior(KEY, 50), fitted.sample_posterior(KEY, 50))


@pytest.mark.slow
def test_reading_takes_no_backend_and_keeps_dtypes(corrected, tmp_path):
    """Double precision, in a process of single precision."""
    corrected.save(tmp_path / "fit")
    arrays, description = read_npz(tmp_path / "fit")
    arrays["draws/mu"] = exact = arrays["draws/mu"].astype(np.float64) + 1e-12
    write_npz(tmp_path / "fit", arrays, description)
    saved = nf.load(tmp_path / "fit")
    assert type(saved.draws["mu"]) is np.ndarray
    assert saved.draws["mu"].dtype == np.float64
    np.testing.assert_array_equal(saved.draws["mu"], exact)
    drawn = saved.sample_posterior(KEY, 20)["mu"]
    assert drawn.dtype == np.float64
    assert np.isin(drawn, exact).all()


def test_a_run_is_read_with_as_many_draws_as_were_asked_for(result, tmp_path):
    result.save(tmp_path / "fit")
    saved = nf.load(tmp_path / "fit")
    np.testing.assert_array_equal(saved.losses, result.losses)
    assert saved.settings["method"] == "SFVI"
    assert saved.verdict == result.report(certificate=False)
    with pytest.raises(nf.SavedStateError, match="no draws"):
        saved.sample_posterior(KEY, 3)
    result.save(tmp_path / "fit", draws=400)
    drawn = nf.load(tmp_path / "fit").sample_posterior(KEY, 400)
    own = result.sample_posterior(KEY, 400)
    assert drawn.keys() == own.keys() == {"mu", "twice"}
    np.testing.assert_array_equal(np.sort(drawn["mu"]), np.sort(own["mu"]))


def test_draws_go_to_arviz(corrected, tmp_path):
    pytest.importorskip("arviz")
    corrected.save(tmp_path / "fit")
    found = nf.load(tmp_path / "fit").to_arviz(num_samples=30)
    assert found.posterior["mu"].shape == (1, 30)
    most = nf.load(tmp_path / "fit").to_arviz(num_samples=5_000).posterior
    assert most["mu"].shape == (1, int(corrected.ess))
    assert most.attrs["verdict"] == corrected.report()
    assert most.attrs["ess"] == pytest.approx(corrected.ess)


# --- with them -------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_correction_goes_on(corrected, tmp_path):
    corrected.save(tmp_path / "fit")
    again = nf.load(tmp_path / "fit", model, silos())
    assert again.report() == corrected.report()
    for silo in (None, 1):
        one, two = (c.sample_posterior(KEY, 20, silo=silo) for c in (again, corrected))
        assert equal(one, two)
    np.testing.assert_array_equal(again.samples["mu"], corrected.samples["mu"])
    more = nf.importance_correct(jax.random.key(1), again.result, 1_000, 20)
    np.testing.assert_array_equal(more.weights, corrected.weights)
    on, whole = (
        PLAIN.run(KEY, 5, silos(), init_state=r.state, **QUIET)
        for r in (again.result, corrected.result)
    )
    np.testing.assert_array_equal(on.losses, whole.losses)
    assert nf.SFVI(model, start=None).load(tmp_path / "fit", silos()).settled in (True, False)


@pytest.mark.slow
def test_what_fit_returns_goes_on(fitted, tmp_path):
    missed = (LocalMode(np.array([3.0]), np.array([[2.0]]), -4.5),)
    for one in (fitted, replace(fitted, missed=missed), judged_by(fitted, fitted.result)):
        one.save(tmp_path / "fit")
        again = nf.load(tmp_path / "fit", model, silos())
        assert type(again) is type(one)
        assert again.verdict == one.verdict
        assert again.trusted == one.trusted
        assert len(again.missed) == len(one.missed)
        one_two = (f.sample_posterior(KEY, 20, silo=0) for f in (again, one))
        assert equal(*one_two)


def test_another_mode_that_the_draws_miss_is_a_doubt(fitted):
    sure = replace(fitted, accuracy=0.9)
    assert sure.trusted
    assert not sure.known_doubt
    missed = replace(sure, missed=(LocalMode(np.array([3.0]), np.array([[2.0]]), -4.5),))
    assert not missed.trusted
    assert missed.known_doubt.startswith("Do not trust this posterior: it is that around one of 2")
    stopped = replace(sure, interrupted=True)
    assert not stopped.trusted
    assert "the fit was interrupted before its check was done" in stopped.verdict


def test_a_fit_whose_best_is_another_run_than_the_corrected_one(fitted, tmp_path):
    other = PLAIN.run(jax.random.key(5), 20, silos(), **QUIET)
    one = judged_by(fitted, other)
    one.save(tmp_path / "fit")
    again = nf.load(tmp_path / "fit", model, silos())
    np.testing.assert_array_equal(again.losses, other.losses)
    np.testing.assert_array_equal(again.corrected.result.losses, fitted.result.losses)
    even = nf.load(tmp_path / "fit")
    assert len(even.weights) == 4_000
    assert set(even.weights) == {1 / 4_000}


def test_what_was_not_checked_has_neither_weights_nor_evidence(fitted, tmp_path):
    one = judged_by("the fit could not be checked", fitted.result, fitted.stages)
    one.save(tmp_path / "fit")
    saved = nf.load(tmp_path / "fit")
    assert (saved.trusted, saved.ess, saved.log_evidence) == (False, None, None)
    assert saved.verdict.startswith("Do not trust this posterior: it could not be checked")
    assert nf.load(tmp_path / "fit", model, silos()).verdict == one.verdict


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_whole_of_fit_goes_on(tmp_path):
    fitted = nf.fit(KEY, model, silos(), **QUIET)
    fitted.save(tmp_path / "fit")
    again = nf.load(tmp_path / "fit", model, silos())
    assert again.verdict == fitted.verdict
    without = nf.load(tmp_path / "fit")
    assert without.double
    assert equal(without.sample_posterior(KEY, 99), fitted.sample_posterior(KEY, 99))
    assert equal(again.sample_posterior(KEY, 9, silo=1), fitted.sample_posterior(KEY, 9, silo=1))
    assert type(again.corrected.result) is type(fitted.corrected.result)


def test_other_data_and_another_text_are_refused(corrected, tmp_path):
    corrected.save(tmp_path / "fit")
    with pytest.raises(nf.SavedStateError, match=r"^silo 0, 'y'"):
        nf.load(tmp_path / "fit", model, silos(0.1))

    def wider(y):
        mu = numpyro.sample("mu", dist.Normal(0, 11))
        numpyro.deterministic("twice", 2 * mu)
        with nf.silo_plate("row", y.shape[0]):
            b = numpyro.sample("b", dist.Normal(mu, 1))
            numpyro.sample("y", dist.Normal(b, 1), obs=y)

    with pytest.raises(nf.SavedStateError, match="text is another"):
        nf.load(tmp_path / "fit", wider, silos())
    with pytest.raises(TypeError, match="silos= is missing"):
        nf.load(tmp_path / "fit", model)


def test_settings_that_no_file_can_hold_are_named(tmp_path):
    method = nf.SFVI(model, optim=optax.sgd(0.01), start=None)
    method.run(KEY, 2, silos(), **QUIET).save(tmp_path / "fit")
    with pytest.raises(nf.SavedStateError, match=r"optim= .*SFVI\(model, \.\.\."):
        nf.load(tmp_path / "fit", model, silos())
    assert len(method.load(tmp_path / "fit", silos()).losses) == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "method",
    [
        nf.SFVI(
            model,
            objective=nf.LocallyEnhanced({"row": 2}),
            guide=nf.guides.MeanField(),
            schedule=nf.schedules.Given([[0, 1]]),
            start=None,
        ),
        nf.SFVIAvg(model, local_steps=5, start=None),
        nf.PowerEP(model, alpha=0.9, start=None, damping=nf.schedules.Adaptive(0.5)),
    ],
    ids=lambda m: type(m).__name__,
)
def test_runs_of_all_methods_are_rebuilt(method, tmp_path):
    result = method.run(KEY, 2, silos(), runtime="quick", **QUIET)
    result.save(tmp_path / "fit")
    again = nf.load(tmp_path / "fit", model, silos())
    assert type(again) is type(result)
    np.testing.assert_array_equal(again.losses, result.losses)
    assert equal(again.sample_posterior(KEY, 5, silo=1), result.sample_posterior(KEY, 5, silo=1))


@pytest.mark.parametrize("version", [1, 2, 3])
def test_of_a_file_of_before_the_draws_can_be_read_and_the_state_cannot(tmp_path, version):
    PLAIN.run(KEY, 3, silos(), **QUIET).save(tmp_path / "fit", draws=10)
    arrays, description = read_npz(tmp_path / "fit")
    write_npz(tmp_path / "fit", arrays, {**description, "version": version})
    assert len(nf.load(tmp_path / "fit").weights) == 10
    with pytest.raises(nf.SavedStateError, match=f"format version {version}.*goes on from"):
        PLAIN.load(tmp_path / "fit", silos())


@pytest.mark.slow
def test_a_vertical_fit_is_read_and_recognised(tmp_path):
    vertical = models.sum_of_clients
    r = np.random.default_rng(0)
    xs, y = [r.normal(size=(6, 2)), r.normal(size=(6, 2))], r.normal(size=6)
    vfl = nf.VFL(vertical(1.0), start=None)
    result = vfl.run(KEY, 3, xs, y, **QUIET)
    result.save(tmp_path / "fit", draws=10)
    assert set(nf.load(tmp_path / "fit").draws) == {"client_0/beta", "client_1/beta"}
    again = vfl.load(tmp_path / "fit", xs, y)
    assert equal(again.sample_posterior(KEY, 5), result.sample_posterior(KEY, 5))
    with pytest.raises(nf.SavedStateError, match=r"^clients 0 and 1 .*swapped"):
        vfl.load(tmp_path / "fit", xs[::-1], y)
    with pytest.raises(nf.SavedStateError, match=r"the server, 'y'"):
        vfl.load(tmp_path / "fit", xs, y + 1)
    with pytest.raises(nf.SavedStateError, match="text is another"):
        nf.VFL(vertical(2.0), start=None).load(tmp_path / "fit", xs, y)
    with pytest.raises(nf.SavedStateError, match=r"VFL\(model, \.\.\.\)\.load"):
        nf.load(tmp_path / "fit", vertical(1.0), [{}])


# --- settings as JSON ------------------------------------------------------------------------


def test_settings_go_there_and_back():
    for value in (1, 0.5, None, "a", (1, [2.0, None]), {"a": (1,)}, nf.ELBO()):
        assert decoded(encoded(value)) == value
        assert type(decoded(encoded(value))) is type(value)
    for value in (optax.sgd(1.0), jnp.sin, {1: 2}, np.zeros(3), 1j):
        with pytest.raises(LostError):
            encoded(value)
    assert all(name.partition(".")[0] != "methods" for name in PARTS)


def test_a_method_is_rebuilt_from_its_recipe():
    for method in (nf.GlobalVI(model, rate=0.2), nf.BCM(model), nf.VCL(model), nf.SFVIAvg(model)):
        kind = type(method)
        found = recipe(method, "quick")
        assert (found.method, found.lost) == (kind.__name__, ())
        assert rebuilt(kind, model, found.settings) == method
    assert recipe(nf.GlobalVI(model, gradient="plain"), "quick").lost == ("local",)


def test_nothing_is_pickled(fitted, tmp_path):
    fitted.save(tmp_path / "fit")
    with np.load(tmp_path / "fit.npz", allow_pickle=False) as arrays, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(not getattr(arrays[name], "dtype", np.dtype(int)).hasobject for name in arrays)


def test_a_setting_of_another_version_is_refused_in_words():
    stored = {"of": "local.ClosedForm", "items": {"batch_size": None}}
    with pytest.raises(nf.SavedStateError, match=r"local.ClosedForm\(batch_size\)"):
        decoded(stored)


def test_a_file_names_settings_and_nothing_that_is_made_of_a_model():
    assert {"objectives.ELBO", "objectives.LocallyEnhanced", "objectives.Quadrature"} <= set(PARTS)
    assert not [name for name in PARTS if name.endswith("Bound")]
