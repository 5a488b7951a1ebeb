"""A silo's own latents over a federation: told where it is allowed, and used where they are."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from apart import FREE, Apart

import numpyro_fed as nf
from numpyro_fed.basics.errors import DataError, ModelError, RefusedError
from numpyro_fed.network import InMemory
from numpyro_fed.rounds.messages import read

KEY, OTHER = jax.random.key(0), jax.random.key(7)
QUIET = {"progress_bar": False}
SIZES = (6, 9, 9)  # two alike: their programs are compiled once for a cache on the disk
ALIKE = (9, 9)
TELLS = nf.Policy(min_rows=1, parameters_per_row=10.0, tell_latents=True)
pytestmark = pytest.mark.usefixtures("double")  # all, so that tests can share runs


def nested(x, hospital, n_hospitals, y=None):
    """Effects of hospitals (one of two axes), and one of each patient."""
    beta = numpyro.sample("beta", dist.Normal(0, 2).expand([2]).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    with nf.silo_plate("hospital", n_hospitals):
        u = numpyro.sample("u", dist.Normal(0, tau))
        v = numpyro.sample("v", dist.Normal(0, 1).expand([1]).to_event(1))
    with nf.silo_plate("patient", len(x)):
        b = numpyro.sample("b", dist.Normal(0, 0.5))
        at = numpyro.deterministic("at", x @ beta + u[hospital] + v[hospital, 0] + b)
        numpyro.sample("y", dist.Normal(at, 1), obs=y)


def flat(y):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with nf.silo_plate("row", len(y)):
        a = numpyro.param("a", np.zeros(len(y)))
        numpyro.sample("y", dist.Normal(mu + a, 1), obs=y)


def small(y):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with nf.silo_plate("place", 1):
        u = numpyro.sample("u", dist.Normal(0, 1))
    with nf.silo_plate("row", len(y)):
        numpyro.sample("y", dist.Normal(mu + u[0], 1), obs=y)


NAMES = {"nested": nested, "flat": flat, "small": small}


def data_of(hospitals=(1, 1, 1), sizes=SIZES):
    r, found = np.random.default_rng(1), []
    for n, k in zip(sizes, hospitals, strict=True):
        x = r.normal(size=(n, 2))
        y = x @ [1.0, -0.5] + r.normal(0, 1.2) + r.normal(size=n)
        found.append(dict(x=x, hospital=np.arange(n) % k, n_hospitals=k, y=y))
    return found


def silos_of(data, policy=TELLS, folder=None):
    states = [None if folder is None else folder / f"{j}" for j in range(len(data))]
    return [
        nf.Silo(d, names=NAMES, policy=policy, state=state)
        for d, state in zip(data, states, strict=True)
    ]


def federation_of(silos, heard=None):
    def listening(answer):
        def wrapped(message):
            reply = answer(message)
            if heard is not None:
                heard.append((message, reply))
            return reply

        return wrapped

    return nf.Federation(InMemory([listening(silo.answer) for silo in silos]), names=NAMES)


METHODS = {
    "sfvi": (nf.SFVI(nested, start=None), 5),
    "pvi": (nf.PVI(nested, start=None), 2),
    "quadrature": (nf.SFVI(nested, start=None, objective=nf.Quadrature(nodes=3)), 3),
}


def both(name, hospitals, sizes=SIZES, corrected=False):
    """The silos, what crosses, the result over them, and that of a list."""
    (method, rounds), data = METHODS[name], data_of(hospitals, sizes)
    heard, silos = [], silos_of(data)
    there = method.run(KEY, rounds, federation_of(silos, heard), **QUIET)
    here = method.run(KEY, rounds, data, **QUIET)
    if corrected:
        there, here = (nf.importance_correct(KEY, run, 60) for run in (there, here))
    heard.clear()
    return silos, heard, there, here


@cache
def quick():
    """Silos that are alike, and a short run over them."""
    return both("sfvi", (1, 1), ALIKE)


CASES = [
    ("sfvi", (1, 1, 1), False),
    ("sfvi", (1, 1, 1), True),
    ("pvi", (1, 1, 1), True),
    ("quadrature", (1, 1, 1), False),
    ("sfvi", (3, 2, 1), False),
]
NEW = dict(x=np.array([[1.0, 0.5], [-1.0, 2.0], [0.0, 0.0]]), hospital=np.zeros(3, int))


def agree(runs, hospitals, silos_asked):
    """Draws and predictions at silos are those of one process."""
    silos, _, there, here = runs
    told, expected = (fit.sample_posterior(OTHER, 40, silo="all") for fit in (there, here))
    assert set(told) == {"beta", "tau", "u", "v"}
    assert told["v"].shape == (40, sum(hospitals), 1)
    for site, values in told.items():
        np.testing.assert_allclose(values, expected[site], rtol=1e-10, atol=1e-10)
    for j in silos_asked:
        message = there.draws_for_silo(OTHER, 40, silo=j)
        own = silos[j].sample_posterior(OTHER, message)
        expected = here.sample_posterior(OTHER, 40, silo=j)
        assert set(own) == set(expected) == {"beta", "tau", "u", "v", "b", "at"}
        new = NEW | dict(n_hospitals=hospitals[j])
        for data in (new, None):
            found = silos[j].predict(OTHER, message, data)
            other = here.predict(OTHER, data, silo=j, n=40)
            own |= {f"predicted {site}": values for site, values in found.items()}
            expected |= {f"predicted {site}": values for site, values in other.items()}
            assert set(found) == {"at", "y"}
        for site, values in own.items():
            np.testing.assert_allclose(values, expected[site], rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_numbers_at_a_silo_are_those_of_one_process():
    agree(quick(), (1, 1), [1])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "hospitals", "corrected"), CASES)
def test_numbers_at_silos_of_other_sizes_are_those_of_one_process(name, hospitals, corrected):
    agree(both(name, hospitals, corrected=corrected), hospitals, range(3))


@pytest.mark.slow
def test_only_latents_that_rows_share_are_told():
    """One exchange; the message has no number of a row, and its shape not the number of rows."""
    _, heard, run, _ = quick()
    heard.clear()
    run.sample_posterior(KEY, 40, silo="all")
    assert len(heard) == len(ALIKE)
    for _, reply in heard:
        shapes = {name: a.shape for name, a in read(reply).arrays.items()}
        assert sorted(shapes.values()) == [(), (), (40, 1), (40, 1, 1)]
    heard.clear()
    run.draws_for_silo(KEY, 40, silo=1)
    assert not heard  # nothing crosses but the message itself


def test_nothing_of_a_silo_is_in_the_message_that_goes_there():
    run = quick()[2]
    one, other = (run.draws_for_silo(KEY, 40, silo=j) for j in (0, 1))
    for name, array in read(one).arrays.items():
        np.testing.assert_array_equal(array, read(other).arrays[name])
    assert {a.shape[0] for a in read(one).arrays.values() if a.ndim > 1} == {40}


def short(*policies):
    """A run of no rounds over silos with these policies."""
    silos = [silo for policy in policies for silo in silos_of([dict(y=np.arange(4.0))], policy)]
    return nf.SFVI(small, start=None).run(KEY, 0, federation_of(silos), **QUIET)


def test_a_silo_that_does_not_tell_is_named():
    run = short(TELLS, FREE)
    with pytest.raises(RefusedError, match=r"silo 1 refuses 'outer latents': .*tell_latents"):
        run.sample_posterior(KEY, 60, silo="all")


def test_a_silo_that_tells_the_latents_of_a_place_tells_no_average_over_its_few_rows():
    run = short(replace(TELLS, min_silos=1))
    with pytest.raises(
        RefusedError, match=r"an average over fewer rows .* tells of \(5, min_count\)"
    ):
        run.average(KEY, "y", num_draws=2)


@pytest.mark.slow
def test_a_silo_tells_only_what_its_own_policy_allows():
    method, data = METHODS["sfvi"][0], data_of()
    there = Apart(method, data, policies=[replace(FREE, tell_latents=j < 2) for j in range(3)])
    run = there.run(KEY, 1)
    with pytest.raises(ModelError, match=r"silo 2 refuses .*does not tell"):
        run.sample_posterior(KEY, 5, silo="all")
    assert there.silos[2].predict(KEY, run.draws_for_silo(KEY, 5, silo=2))["y"].shape == (5, 9)


@pytest.mark.parametrize(
    ("rules", "words"),
    [({"max_draws": 50}, "allows 50 more draws"), ({"exchanges": ("sfvi",)}, "'outer latents'")],
)
def test_the_other_rules_of_a_policy_hold(rules, words):
    run = short(replace(TELLS, min_silos=1, **rules))
    with pytest.raises(RefusedError, match=words):
        run.sample_posterior(KEY, 60, silo="all")


def test_a_policy_says_true_or_false(tmp_path):
    (tmp_path / "policy.toml").write_text("tell_latents = true\n")
    assert nf.Policy.from_toml(tmp_path / "policy.toml").tell_latents
    with pytest.raises(ValueError, match="true or false"):
        nf.Policy(tell_latents="no")


@pytest.mark.slow
def test_a_silo_of_another_process_predicts(tmp_path):
    """The process that has answered the server is over; its folder has what is needed."""
    data = data_of()
    run = METHODS["sfvi"][0].run(KEY, 2, federation_of(silos_of(data, folder=tmp_path)), **QUIET)
    message = run.draws_for_silo(OTHER, 8, silo=1)
    again = silos_of(data, folder=tmp_path)[1]
    expected = METHODS["sfvi"][0].run(KEY, 2, data, **QUIET).predict(OTHER, silo=1, n=8)
    np.testing.assert_allclose(again.predict(OTHER, message)["y"], expected["y"], rtol=1e-4)
    with pytest.raises(ModelError, match="has not described"):
        silos_of(data, folder=tmp_path)[0].predict(OTHER, message)


@pytest.mark.slow
def test_later_exchanges_leave_the_state_that_a_message_means():
    silos, _, run, _ = quick()
    message = run.draws_for_silo(OTHER, 8, silo=0)
    before = silos[0].predict(OTHER, message)["y"]
    nf.importance_correct(KEY, run, 20)
    np.testing.assert_array_equal(silos[0].predict(OTHER, message)["y"], before)


def test_wrong_use_is_refused():
    silos, heard, run, here = quick()
    message = run.draws_for_silo(KEY, 40, silo=0)
    with pytest.raises(DataError, match="silo 1 holds its own latents"):
        run.sample_posterior(KEY, 5, silo=1)
    with pytest.raises(DataError, match="draws_for_silo of this result"):
        run.sample_posterior(KEY, 5, silo=[0, 1])
    with pytest.raises(DataError, match="no silo 2: they are 0 to 1"):
        run.draws_for_silo(KEY, 40, silo=2)
    with pytest.raises(ValueError, match="n must be a positive"):
        run.draws_for_silo(KEY, 0, silo=0)
    with pytest.raises(DataError, match="2 of 'hospital', and silo 0 has 1"):
        silos[0].predict(KEY, message, NEW | dict(hospital=np.arange(3) % 2, n_hospitals=2))
    with pytest.raises(DataError, match="do not fit the model"):
        silos[0].predict(KEY, message, dict(x=NEW["x"]))
    run.sample_posterior(KEY, 40, silo="all")
    method = read(message).head["method"]
    asked = [down for down, _ in heard if read(down).head["method"] == method][-1]
    with pytest.raises(DataError, match="a message of 'outer latents' came"):
        silos[0].predict(KEY, asked)
    assert "error" in read(silos[0].answer(message)).head
    with pytest.raises(DataError, match="silos are in this process"):
        here.draws_for_silo(KEY, 8, silo=0)
    with pytest.raises(TypeError, match="key must be"):
        silos[0].predict(3, message)


@pytest.mark.slow
def test_a_model_without_latents_that_rows_share_has_nothing_to_tell():
    data = [dict(y=np.arange(4.0)), dict(y=np.arange(4.0) + 1)]
    silos = silos_of(data)
    there, here = (
        nf.SFVI(flat, start=None).run(KEY, 1, these, **QUIET)
        for these in (federation_of(silos), data)
    )
    with pytest.raises(DataError, match="this model has none"):
        there.sample_posterior(KEY, 5, silo="all")
    message = there.draws_for_silo(KEY, 8, silo=1)
    with pytest.raises(ModelError, match="'a' is a parameter"):
        silos[1].predict(KEY, message, dict(y=np.zeros(2)))
    for mean in (False, True):
        found = silos[1].predict(KEY, message, mean=mean)["y"]
        expected = here.predict(KEY, silo=1, n=8, mean=mean)["y"]
        np.testing.assert_allclose(found, expected, rtol=1e-10)


def test_columns_are_drawn_by_all_parties_together():
    def predictor(x):
        return x @ numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[-1]]).to_event(1))

    def joint(xs, y=None):
        eta = nf.client_sum("client", predictor, xs)
        with numpyro.plate("row", eta.shape[0]):
            numpyro.sample("y", dist.Normal(eta, 1), obs=y)

    with pytest.raises(ModelError, match="sample_together"):
        nf.VFL(joint).posterior_at(None, None, {})
