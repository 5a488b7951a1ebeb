"""Parties whose texts have the same words, and read other constants from outside of them."""

import types
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from apart import Apart
from numpyro.contrib.control_flow import scan

import numpyro_fed as nf
from numpyro_fed.data.silo_data import read
from numpyro_fed.network.engines import InMemory
from numpyro_fed.network.silo_runs import SiloRuns
from numpyro_fed.text.fingerprint import _term, check_terms, terms_of
from numpyro_fed.text.split import split

KEY = jax.random.key(0)
NOISE, WIDE, WEIGHTS, NAMES, FACTOR = 3.0, True, np.array([0.5, 1.0, 2.0]), ("a", "b"), 2
SCALES = {"walk": 1.5}


def study(x, y=None):
    """A text that reads numbers, a switch, an array, a text and a whole number from outside."""
    mu = numpyro.sample("mu", dist.Normal(0, 10) if WIDE else dist.Normal(0, 9.99))
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([3]).to_event(1))

    def step(before, _):
        now = numpyro.sample("walk", dist.StudentT(4, before, SCALES["walk"]))
        return now, now

    _, walk = scan(step, 0.0, None, length=4)
    with nf.silo_plate("row", x.shape[0]):
        eta = numpyro.deterministic("eta", mu + x @ (jnp.asarray(WEIGHTS) * beta) ** FACTOR)
        late = jnp.where(x[:, 0] > 1e3, NOISE, 2.0)  # on no row of made-up data
        sd = late if NAMES[0] == "a" else 2.0
        numpyro.sample("y", dist.Normal(eta + walk.sum(), sd), obs=y)


def elsewhere(model=study, **outside):
    """The same text in a module with other constants."""
    constants = {**model.__globals__, **outside}
    return types.FunctionType(model.__code__, constants, model.__name__, model.__defaults__)


def rows(n, seed=0):
    r = np.random.default_rng(seed)
    return dict(x=r.normal(size=(n, 3)), y=r.normal(size=n))


def terms(model, by_value=False):
    (template,) = read([rows(8)])
    return terms_of(split(model, [template]).traces, template, by_value=by_value)


@pytest.fixture(scope="module")
def ours():
    return {by_value: terms(study, by_value) for by_value in (False, True)}


CONSTANT = r"silo 2 does not fit.* another constant in '{}' than the server's\..*pass it as"


@pytest.mark.parametrize(
    ("outside", "words"),
    [
        (dict(NOISE=2.5), CONSTANT.format("y")),
        (dict(NOISE=3.001), CONSTANT.format("y")),
        (dict(WIDE=False), CONSTANT.format("mu")),
        (dict(SCALES={"walk": 1.6}), CONSTANT.format("walk")),
        (dict(WEIGHTS=np.array([0.5, 1.01, 2.0])), "reads another array of constants in 'y'"),
        (dict(NAMES=("b", "a")), "computes 'y' in another way"),
        (dict(FACTOR=3), "computes 'y' in another way"),
    ],
)
def test_a_text_that_reads_another_constant_is_refused(ours, outside, words):
    with pytest.raises(nf.ModelError, match=words):
        check_terms(ours[False], terms(elsewhere(**outside)), "silo 2", by_value=False)


@pytest.mark.parametrize("outside", [dict(SCALES={"walk": 1.6}), dict(FACTOR=3)])
def test_values_tell_texts_apart_where_the_versions_of_jax_differ(ours, outside):
    with pytest.raises(nf.ModelError, match=r"other values of '(walk|y)' at made-up data"):
        check_terms(ours[True], terms(elsewhere(**outside), True), "silo 2", by_value=True)


def test_the_same_text_is_the_same(ours):
    """In another module, at other rows of the same size, and by values as well."""
    for by_value, known in ours.items():
        assert terms(elsewhere(), by_value) == known
        check_terms(known, known, "silo 2", by_value=by_value)


def test_constants_that_another_machine_has_rounded_otherwise_are_the_same(ours):
    rounded = dict(NOISE=3.0 * (1 + 1e-7), WEIGHTS=WEIGHTS * (1 - 1e-7))
    check_terms(ours[False], terms(elsewhere(**rounded)), "silo 2", by_value=False)


def test_small_constants_are_compared_in_their_own_size():
    """A number and an array, as in a unit in which all numbers are small; zeros are the same."""

    def term(scale):
        return _term("y", "", [np.float64(scale), scale * np.array([1.0, 2.0, 3.0])])

    for size in (0.0, 2e-12):
        check_terms([term(size)], [term(size * (1 + 1e-7))], "silo 2", by_value=False)
    for there, here in ((2e-12, 8e-12), (0.0, 8e-12), (8e-12, 0.0)):
        for part in (slice(0, 1), slice(1, 2)):  # the number, the array
            own = [one._replace(numbers=one.numbers[part]) for one in (term(there), term(here))]
            words = r"another (constant|array of constants) in 'y'"
            with pytest.raises(nf.ModelError, match=words):
                check_terms(own[:1], own[1:], "silo 2", by_value=False)


# --- between processes -----------------------------------------------------------------------


def small(y):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with nf.silo_plate("row", len(y)):
        numpyro.sample("y", dist.Normal(mu, NOISE), obs=y)


def predictor(x):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[-1]]).to_event(1))
    return FACTOR * (x @ beta)


def columns(xs, y=None):
    eta = nf.client_sum("client", predictor, xs)
    with numpyro.plate("row", eta.shape[0]):
        numpyro.sample("y", dist.Normal(eta, 1), obs=y)


def federation(*texts):
    """Silos of other sizes, each with a text of its own under the same name."""
    free = nf.Policy(min_rows=1, parameters_per_row=1.0)
    silos = [
        nf.Silo(dict(y=np.arange(3.0 + 9 * j)), names={"small": text}, policy=free)
        for j, text in enumerate(texts)
    ]
    return nf.Federation(InMemory([silo.answer for silo in silos]), names={"small": small})


def run(there, model=small):
    method = nf.PVI(model, start=None)
    return method.run(KEY, 1, there, progress_bar=False).posterior()["mu"].variance


@pytest.mark.slow
def test_a_silo_of_a_federation_with_another_constant_is_refused():
    method = nf.PVI(small, start=None)
    method._fit_over_federation(federation(small, elsewhere(small)))
    words = r"silo 1 refuses .* another constant in 'y' than the server's\."
    with pytest.raises(nf.RefusedError, match=words):
        method._fit_over_federation(federation(small, elsewhere(small, NOISE=2.0)))


@pytest.mark.slow
def test_parties_with_other_versions_of_jax_compare_values():
    def agreed(text):
        methods = [nf.PVI(one, start=None) for one in (small, text)]
        nodes = [SiloRuns(one, dict(y=np.arange(5.0))) for one in methods]
        own = [replace(nf.Facts.from_json(n.facts), software="jax 0.1") for n in nodes]
        plan = nf.PVI(small, start=None).agree(own)
        assert plan.software == ""
        for j, node in enumerate(nodes):
            node.accept(plan.to_json(), j)

    agreed(elsewhere(small))
    with pytest.raises(nf.ModelError, match=r"silo 1 .* other values of 'y' at made-up data"):
        agreed(elsewhere(small, NOISE=2.0))


@pytest.mark.slow
def test_a_constant_that_has_changed_since_is_read_anew():
    """At a server and a silo whose processes go on, as in a notebook."""
    constants = dict(globals())
    text = types.FunctionType(small.__code__, constants, "small")
    free = nf.Policy(min_rows=1, parameters_per_row=1.0, min_silos=1)
    silo = nf.Silo(dict(y=np.arange(9.0)), names={"small": text}, policy=free)
    found = []
    for constants["NOISE"] in (3.0, 30.0):
        there = nf.Federation(InMemory([silo.answer]), names={"small": text})
        found.append(run(there, text))
    np.testing.assert_allclose(found, [1 / (0.01 + 9 / sd**2) for sd in (3, 30)], rtol=1e-4)


def test_a_client_with_another_constant_is_refused():
    def accept(predictor):
        there = Apart(nf.VFL(elsewhere(columns, predictor=predictor)), [np.ones((5, 1))] * 2)
        federation = nf.Federation(there, names={"model": columns})
        nf.VFL(columns, start=None).run(KEY, 0, federation, np.zeros(5), progress_bar=False)

    accept(elsewhere(predictor))
    words = r"client 0 .* another constant in '_predictor' than the server's\."
    with pytest.raises(nf.ModelError, match=words):
        accept(elsewhere(predictor, FACTOR=3))


def test_a_text_is_split_once_for_a_plan():
    """For its terms, and for the algorithm that is built: a split runs the text seven times."""
    runs = 0

    def counted(y):
        nonlocal runs
        runs += 1
        small(y)

    method = nf.PVI(counted, start=None)
    plan = method.agree([method.describe(dict(y=np.arange(5.0)))])
    before = runs
    method.build(plan)
    assert runs - before == 2
