"""What cannot work is refused before the run, by name and with the remedy; NaN stops a run."""

import re
import warnings
from functools import cache

import jax
import jax.numpy as jnp
import models
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from cases import slow_but
from laid_open import kept_fits, laid_open, put_in_place
from numpyro.distributions import constraints

import numpyro_fed as nf

KEY = jax.random.key(0)
ADAM = optax.adam(1e-2)
quiet = {"progress_bar": False}


def rows(n=3, **other):
    return {"y": np.linspace(-1.0, 1.0, n, dtype=np.float32), **other}


good = models.levels()
GOOD = nf.SFVI(good, optim=ADAM, start=None)


def good_pair(y, x=None):
    good(y)


# --- models that cannot be split -------------------------------------------------------------


def flat(y):
    mu = numpyro.sample("mu", dist.HalfNormal(1).mask(False))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


class NoBijection(dist.Normal):
    """A normal with a support that nothing is registered for."""

    class Support(constraints.Constraint):
        def __call__(self, x):
            return x == x

        def tree_flatten(self):
            return (), ((), {})

    support = Support()


def no_bijection(y):
    numpyro.sample("odd", NoBijection(0.0, 1.0))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(0, 1), obs=y)


def raises(y):
    if y.shape[0] == 2:
        raise KeyError("no such column")
    good(y)


def other_sites(y):
    good(y)
    if y.shape[0] == 2:
        numpyro.sample("extra", dist.Normal(0, 1))


def subsampled(y):
    with nf.silo_plate("row", y.shape[0], subsample_size=1):
        numpyro.sample("y", dist.Normal(0, 1), obs=y)


@pytest.mark.parametrize(
    ("model", "where", "remedy"),
    [
        (models.no_silo_plate, "no silo_plate", "numpyro_fed.silo_plate"),
        (models.observed_outside, "'y' is observed outside", "inside the silo_plate"),
        (models.global_on_local, "'mu' depends on latents of silo_plate 'row'", "Put 'mu' inside"),
        (models.global_on_data, "'mu' depends on data", "Put 'mu' inside a silo_plate"),
        (models.discrete, "'k' is a discrete latent", "sum it out"),
        (no_bijection, "'odd' has the support", "Reparametrise it"),
        (raises, "raised KeyError at silo 1, which holds {'y': (2,)}", "no such column"),
        (other_sites, "'extra' exists at silo 1 but not at silo 0", "by a mask"),
        (subsampled, "'row' was given subsample_size=1", "leave subsample_size out"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused(model, where, remedy):
    with pytest.raises(nf.ModelError) as caught:
        nf.SFVI(model, optim=ADAM, start=None).run(KEY, 5, [rows(3), rows(2)])
    assert where in str(caught.value)
    assert remedy in str(caught.value)


@pytest.mark.parametrize("prior", ["exact", "factor"])
@pytest.mark.filterwarnings("ignore:the prior of the latent site 'mu' is flat")
def test_a_flat_prior_is_refused_where_the_posterior_starts_from_it(prior):
    with pytest.raises(nf.ModelError, match=r"'mu' .*start='mode'.*proper prior"):
        nf.PVI(flat, prior=prior, start=None).run(KEY, 1, [rows(), rows()], **quiet)


# --- silos that do not fit -------------------------------------------------------------------

INF = np.array([0, 1, -np.inf], np.float32)


@pytest.mark.parametrize(
    ("silos", "where", "remedy"),
    [
        ([], "list of silos is empty", "one dict of arrays for each silo"),
        (rows(), "silos must be a list", "pass a list with one dict"),
        ([rows(), [1.0]], "silo 1 must be a dict", "got list"),
        ([rows(), rows(0)], "silo 1", "Leave a silo with no rows out"),
        ([rows(), rows(x=np.ones(3))], "silo 1", "same keyword arguments"),
        ([rows(), rows(x=INF)], "silo 1, 'x': 1 of 3", "numpyro.handlers.mask"),
        ([rows(), {"y": INF}], "silo 1, 'y': 1 of 3", "numpyro.handlers.mask"),
        ([rows(), {"y": np.arange(3)}], "silo 1, 'y' has dtype int32", "astype('float32')"),
        (
            [rows(), {"y": np.zeros((3, 2), np.float32)}],
            "silo 1, 'y' has shape (3, 2)",
            "not the number of axes",
        ),
        ([rows(x=1), rows(x=np.ones(3))], "silo 1, 'x'", "same kind of value everywhere"),
        ([rows(x=["a"]), rows()], "silo 0, 'x'", "numeric array"),
    ],
)
def test_silos_that_do_not_fit_are_refused_before_the_model_is_called(silos, where, remedy):
    calls = []

    def model(y, x=None):
        calls.append(y.shape)
        good(y)

    with pytest.raises(nf.DataError) as caught:
        nf.SFVI(model, optim=ADAM, start=None).run(KEY, 5, silos)
    assert where in str(caught.value)
    assert remedy in str(caught.value)
    # Only the model itself can say that a silo has no rows.
    assert not calls or (0,) in calls


# --- guides ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("guide", "where", "remedy"),
    [
        (nf.guides.Structured(locals={"other": "full"}), "the site 'b'", "add 'row' to locals"),
        (nf.guides.Structured(locals="banded"), "locals='banded'", "'joint'"),
        (nf.guides.Structured(globals="banded"), "globals='banded'", "'low_rank'"),
        (nf.guides.Structured(init_scale=0.0), "init_scale", "positive"),
        (lambda y: None, "got function", "leave guide out"),
    ],
)
def test_a_guide_that_does_not_fit_is_refused(guide, where, remedy):
    with pytest.raises(nf.GuideError) as caught:
        nf.SFVI(good, optim=ADAM, guide=guide, start=None).run(KEY, 5, [rows()])
    assert where in str(caught.value)
    assert remedy in str(caught.value)


def two_levels(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1).expand([400]).to_event(1))
    with nf.silo_plate("row", y.shape[0]):
        b = numpyro.sample("b", dist.Normal(mu.sum(), 1))
        numpyro.sample("y", dist.Normal(b, 1), obs=y)


@pytest.mark.parametrize(
    ("guide", "n"),
    [
        (nf.guides.Structured(globals="full", couple_mean=False, couple_scale=False), 3),
        (nf.guides.Structured(globals="diagonal", couple_mean=True, couple_scale=False), 200),
        (nf.guides.MeanField(), 20_000),
    ],
    ids=["globals", "couplings", "rows"],
)
def test_a_guide_that_is_too_large_for_the_memory_is_refused(monkeypatch, guide, n):
    fit = nf.SFVI(two_levels, optim=ADAM, guide=guide, start=None)
    put_in_place(monkeypatch, "memory", lambda: 6e5)
    with pytest.raises(nf.GuideError, match=re.escape("this machine has 0.0 GiB")) as caught:
        fit.run(KEY, 5, [rows(n)])
    assert "guides.MeanField()" in str(caught.value)
    assert not kept_fits(fit)


def test_a_guide_that_fits_into_the_memory_is_not_refused(monkeypatch):
    put_in_place(monkeypatch, "memory", lambda: 6e5)
    nf.SFVI(two_levels, optim=ADAM, guide=nf.guides.MeanField(), start=None).run(
        KEY, 1, [rows(3)], **quiet
    )


# --- arguments -------------------------------------------------------------------------------


def never(y):
    raise RuntimeError("the model was called")


@pytest.mark.parametrize("value", [-1, 1.5, True, False, "3", None])
def test_numbers_of_rounds_must_be_integers_and_not_negative(value):
    with pytest.raises(
        ValueError, match=re.escape(f"num_rounds must be a positive integer, got {value!r}")
    ):
        nf.SFVI(never, optim=ADAM, start=None).run(KEY, value, [rows()])


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3", None])
def test_numbers_of_particles_must_be_positive_integers(value):
    with pytest.raises(
        ValueError, match=re.escape(f"num_particles must be a positive integer, got {value!r}")
    ):
        nf.SFVI(never, optim=ADAM, num_particles=value, start=None)


@pytest.mark.parametrize("optim", [numpyro.optim.Adam(1e-2), "adam", optax.adam])
def test_an_optimiser_that_is_not_of_optax_is_refused(optim):
    with pytest.raises(
        TypeError, match=re.escape("Optax optimiser such as optax.adam(1e-2)")
    ) as caught:
        nf.SFVI(never, optim=optim, start=None)
    assert type(optim).__name__ in str(caught.value)


@pytest.mark.parametrize(
    "key", [0, None, "0", np.zeros(2, np.uint32), jnp.zeros(2), jax.random.split(KEY)]
)
def test_a_key_must_be_one_jax_key(key):
    with pytest.raises(TypeError, match=re.escape("such as jax.random.key(0)")):
        nf.SFVI(never, optim=ADAM, start=None).run(key, 5, [rows()])


def test_an_older_key_is_the_same_key():
    fit = GOOD
    a = fit.run(jax.random.PRNGKey(3), 2, [rows()], **quiet)
    b = fit.run(jax.random.key(3), 2, [rows()], **quiet)
    np.testing.assert_array_equal(a.losses, b.losses)


def test_an_unknown_runtime_is_refused():
    with pytest.raises(
        ValueError, match="runtime='cloud': expected 'simulation', 'quick' or 'host'"
    ):
        nf.SFVI(never, optim=ADAM, start=None).run(KEY, 5, [rows()], runtime="cloud")


def test_an_objective_that_is_none_of_ours_is_refused():
    with pytest.raises(TypeError, match=r"objective.*LocallyEnhanced.*'elbo'"):
        nf.SFVI(good, optim=ADAM, objective="elbo", start=None).run(KEY, 5, [rows()])


@pytest.mark.parametrize(
    ("draws", "message"),
    [(0, "'row' must be a positive int"), ({"column": 3}, r"draws names 'column'.*\['row'\]")],
)
def test_numbers_of_draws_must_fit_the_silo_plates(draws, message):
    fit = nf.SFVI(good, optim=ADAM, objective=nf.LocallyEnhanced(draws=draws), start=None)
    with pytest.raises(ValueError, match=message):
        fit.run(KEY, 5, [rows()])


def wider(y):
    numpyro.sample("more", dist.Normal(0, 1))
    good(y)


@pytest.mark.parametrize(
    ("other", "silos", "runtime"),
    [
        (nf.SFVI(wider, optim=ADAM, start=None), [rows(3), rows(3)], "simulation"),
        (
            nf.SFVI(good, optim=ADAM, guide=nf.guides.MeanField(), start=None),
            [rows(3), rows(3)],
            "simulation",
        ),
        (nf.SFVI(good, optim=optax.sgd(1e-2), start=None), [rows(3), rows(3)], "simulation"),
        (GOOD, [rows(3)], "simulation"),
        (GOOD, [rows(3), rows(4)], "simulation"),
        (GOOD, [rows(3), rows(3)], "host"),
    ],
    ids=["model", "guide", "optimiser", "number of silos", "sizes of silos", "runtime"],
)
def test_a_state_of_another_fit_is_refused(other, silos, runtime):
    state = laid_open(other, silos, runtime).result().state
    with pytest.raises(nf.SavedStateError, match=r"another model.*\.state"):
        GOOD.run(KEY, 1, [rows(3), rows(3)], init_state=state, **quiet)


def test_a_result_is_not_a_state():
    fit = GOOD
    result = fit.run(KEY, 1, [rows()], **quiet)
    with pytest.raises(TypeError, match=r"\.state, got Result"):
        fit.run(KEY, 1, [rows()], init_state=result, **quiet)


# --- a bound that turns NaN or infinite ------------------------------------------------------


def walled(y, wall):
    """A row of a silo has no density once ``mu`` passes its wall."""
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.factor("wall", jnp.log(wall - mu))
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def walls(*walls_, sizes=None, kinds=None):
    """Data at 10, where ``mu`` goes; the silo with the lowest wall fails first."""
    sizes = sizes or [2] * len(walls_)
    silos = [
        {"y": np.full(n, 10.0, np.float32), "wall": np.full(n, w, np.float32)}
        for n, w in zip(sizes, walls_, strict=True)
    ]
    return [{**s, "kind": k} for s, k in zip(silos, kinds, strict=True)] if kinds else silos


def walled_kind(y, wall, kind):
    walled(y, wall)


@cache
def towards(model):
    """One method for each model: its steps lead to the wall."""
    return nf.SFVI(model, optim=optax.adam(0.1), guide=nf.guides.MeanField(), start=None)


def stopped(fit, silos, num_rounds=300, **kwargs):
    with pytest.raises(nf.NonFiniteError) as caught:
        fit.run(KEY, num_rounds, silos, **quiet, **kwargs)
    return caught.value


def holds_the_last_good_state(error, fit, silos, **kwargs):
    assert len(error.result.losses) == error.round == int(error.result.state.round)
    assert np.isfinite(error.result.losses).all()
    again = fit.run(KEY, error.round, silos, **quiet, **kwargs)
    np.testing.assert_array_equal(again.losses, error.result.losses)
    same = jax.tree.map(np.array_equal, again.state, error.result.state)
    assert jax.tree.all(same)
    assert all(np.isfinite(v).all() for v in error.result.sample_posterior(KEY, 5).values())


@pytest.mark.parametrize("runtime", ["simulation", "host"])
@pytest.mark.parametrize(
    ("silos", "model", "expected"),
    slow_but(
        [
            (walls(50.0, 3.0, 40.0), walled, (1,)),
            (walls(50.0, 40.0, 3.0, 41.0, sizes=(3, 4, 2, 3)), walled, (2,)),
            (walls(3.0, 50.0, 3.0, sizes=(1, 5, 2), kinds="aba"), walled_kind, (0, 2)),
            (walls(50.0, 3.0, 50.0, sizes=(1, 5, 2), kinds="aba"), walled_kind, (1,)),
        ],
        1,
        2,
    ),
    ids=["one shape", "padded", "two buckets", "another bucket"],
)
def test_the_silo_that_fails_is_named_and_nothing_is_lost(runtime, silos, model, expected):
    fit = towards(model)
    error = stopped(fit, silos, runtime=runtime)
    assert error.silos == expected
    assert 5 < error.round < 100
    assert f"in round {error.round}, at silo {', '.join(map(str, expected))}" in str(error)
    assert "smaller step" in str(error)
    holds_the_last_good_state(error, fit, silos, runtime=runtime)


def local_wall(y, wall):
    """The same, with the wall in the way of a silo's own latents."""
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    with nf.silo_plate("row", y.shape[0]):
        b = numpyro.sample("b", dist.Normal(0, 10))
        numpyro.factor("wall", jnp.log(wall - b))
        numpyro.sample("y", dist.Normal(b, 1 + scale), obs=y)


def test_a_silo_whose_own_latents_fail_is_named():
    silos = walls(50.0, 3.0, sizes=(2, 3))
    fit = nf.SFVI(local_wall, optim=optax.adam(0.1), start=None)
    error = stopped(fit, silos)
    assert error.silos == (1,)
    holds_the_last_good_state(error, fit, silos)


def server_wall(y):
    """The prior of ``w`` has no density once ``z`` passes 3; no silo ever sees ``w``."""
    z = numpyro.sample("z", dist.Normal(0, 10))
    numpyro.sample("w", dist.Normal(jnp.sqrt(3 - z), 10))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(z, 1), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["simulation", "host"])
def test_no_silo_is_blamed_for_the_server(runtime):
    silos = [{"y": np.full(4, 10.0, np.float32)}] * 2
    fit = towards(server_wall)
    error = stopped(fit, silos, runtime=runtime)
    assert error.silos == ()
    assert 5 < error.round < 100
    assert f"in round {error.round}, at the server" in str(error)
    holds_the_last_good_state(error, fit, silos, runtime=runtime)


HUGE = nf.SFVI(good, optim=optax.sgd(1e38), start=None)


@pytest.mark.parametrize("num_rounds", [1, 2, 300])
def test_a_step_that_is_far_too_large_stops_at_the_last_finite_state(num_rounds):
    """Parameters overflow in a step whose own bound is still finite."""
    silos = [{"y": np.full(4, 10.0, np.float32)}] * 2
    error = stopped(HUGE, silos, num_rounds)
    holds = jax.tree.map(lambda a: np.isfinite(a).all(), error.result.state)
    assert jax.tree.all(holds)
    assert len(error.result.losses) == error.round < 2


def test_a_run_can_fail_after_more_rounds_than_one_program_reports():
    silos = walls(50.0, 3.0)
    fit = nf.SFVI(walled, optim=optax.sgd(5e-5), guide=nf.guides.MeanField(), start=None)
    error = stopped(fit, silos, 5_000)
    assert error.round > 1024
    assert error.silos == (1,)
    holds_the_last_good_state(error, fit, silos)


def test_a_run_that_goes_on_counts_rounds_from_the_first_one():
    silos = walls(50.0, 3.0)
    fit = towards(walled)
    whole = stopped(fit, silos)
    first = fit.run(KEY, 4, silos, **quiet)
    rest = stopped(fit, silos, init_state=first.state)
    assert rest.round == whole.round
    assert len(rest.result.losses) == whole.round - 4
    assert jax.tree.all(jax.tree.map(np.array_equal, rest.result.state, whole.result.state))


@pytest.mark.parametrize("optim", [optax.lbfgs(), optax.contrib.reduce_on_plateau()])
def test_an_optimiser_that_needs_more_than_a_gradient_is_refused(optim):
    with pytest.raises(TypeError, match="gradient alone"):
        nf.SFVI(never, optim=optim, start=None)


def test_an_accumulating_optimiser_says_how_to_pass_it():
    with pytest.raises(TypeError, match=r"gradient_transformation"):
        nf.SFVI(never, optim=optax.MultiSteps(ADAM, 2), start=None)


def test_draws_that_change_nothing_are_warned_about():
    def visits(child, y, differences):
        with nf.silo_plate("child", 3):
            b = numpyro.sample("b", dist.Normal(0, 1))
        with nf.silo_plate("visit", y.shape[0]):
            effect = b[child] - b.mean() if differences else b[child]
            numpyro.sample("y", dist.Normal(effect, 1), obs=y)

    silo = {"child": np.array([0, 1, 2, 2]), "y": np.zeros(4), "differences": True}
    fit = nf.SFVI(visits, optim=ADAM, objective=nf.LocallyEnhanced(5), start=None)
    with pytest.warns(UserWarning, match=r"draws=\{'child': 5\}"):
        fit.run(KEY, 1, [silo], **quiet)
    with warnings.catch_warnings():  # visits are their child's data, of which there are five draws
        warnings.simplefilter("error")
        fit.run(KEY, 1, [silo | {"differences": False}], **quiet)


@pytest.mark.parametrize("size", [1.0, 1e6])
@pytest.mark.parametrize(
    "outcome",
    slow_but(
        [
            lambda eta: dist.Gamma(3, 3 * jnp.exp(-eta)),
            lambda eta: dist.Poisson(jnp.exp(eta)),
            lambda eta: dist.Bernoulli(logits=eta),
            lambda eta: dist.Normal(eta, 1),
        ],
        1,
    ),
    ids=["gamma", "poisson", "bernoulli", "normal"],
)
def test_rows_that_read_others_are_found_beside_a_column_of_large_numbers(outcome, size):
    """At a general point terms overflow there, or are so huge that all else is lost in them."""

    def centred(x, w, y):
        a, b, c = (numpyro.sample(name, dist.Normal(0, 1)) for name in "abc")
        with nf.silo_plate("row", len(y)):
            numpyro.sample("y", outcome(a + b * x + c * (w - w.mean())), obs=y)

    r = np.random.default_rng(0)
    positive = isinstance(outcome(jnp.zeros(1)), dist.Gamma)

    def rows(n):
        x, w = size * r.uniform(20, 80, n), r.normal(size=n)
        return dict(x=x, w=w, y=r.integers(0, 2, n) + positive)

    silos = [rows(30), rows(40)]
    with pytest.raises(nf.ModelError, match="only data of other rows"):
        nf.PVI(centred).run(jax.random.key(0), 1, silos, progress_bar=False)
    private = nf.DPNewton(centred, privacy=nf.Privacy(epsilon=1.0, delta=1e-5))
    with pytest.raises(nf.ModelError, match="only data of other rows"):
        private.run(jax.random.key(0), silos=silos)
