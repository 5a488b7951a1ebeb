"""What a run costs, before it and after it."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from apart import Apart

import numpyro_fed as nf
from numpyro_fed.rounds.messages import read

KEY, QUIET = jax.random.key(0), dict(progress_bar=False)


def counts(x, y):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([3]).to_event(1))
    s = numpyro.sample("s", dist.HalfNormal(1))
    shift = numpyro.param("shift", 0.1)
    with nf.silo_plate("row", y.shape[0]):
        u = numpyro.sample("u", dist.Normal(shift, s))
        numpyro.sample("y", dist.Poisson(jnp.exp(x @ b + u)), obs=y)


def flat(x, y):
    b = numpyro.sample("b", dist.ImproperUniform(dist.constraints.real, (), ()))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(b + x[:, 0], 1.0), obs=y)


def silos_of(*sizes):
    r = np.random.default_rng(0)
    return [dict(x=r.normal(size=(n, 3)), y=r.poisson(2.0, n).astype(float)) for n in sizes]


METHODS = {
    "sfvi": (nf.SFVI(counts), 3),
    "some": (nf.SFVI(counts, start=None, schedule=nf.schedules.Random(2)), 3),
    "flat": (nf.SFVI(flat), 3),
    "pvi": (nf.PVI(flat, schedule="synchronous"), 2),
    "turns": (nf.PVI(flat), 2),
    "sums": (nf.SFVIAvg(counts, local_steps=5, aggregate="reverse_kl"), 2),
    "gathers": (nf.SFVIAvg(counts, local_steps=5, start=None), 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.filterwarnings("ignore:.*(not at rest|not converged)")
def test_bytes_are_those_of_the_arrays_in_messages(name):
    """Of a run over nodes, by the names under which arrays travel."""
    method, rounds = METHODS[name]
    crossed = np.zeros(2, int)

    def line(j, message, answer):
        reply = answer(message)
        for way, held, kind in ((0, message, "down"), (1, reply, "reply")):
            arrays = read(held).arrays.items()
            crossed[way] += sum(a.nbytes for key, a in arrays if key.startswith(kind))
        return reply

    result = Apart(method, silos_of(5, 7, 6), line).run(KEY, rounds)
    assert result.communication.total == tuple(crossed.tolist())


def test_numbers_by_hand():
    """Four globals and a parameter in single precision, three silos."""
    result = nf.SFVI(counts, start=None).run(KEY, 10, silos_of(5, 7, 6), **QUIET)
    found = result.communication
    assert found.visit == (4 * (3 * 4 + 1), 4 * (1 + 3 * 4 + 1) + 1)
    assert found.start == (0, 0)
    assert found.total == (30 * 52, 30 * 57)
    assert str(found).splitlines()[-1].split()[-4:] == ["1.56", "kB", "1.71", "kB"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sfvi", "sums"])
def test_a_run_that_goes_on_has_cost_its_rounds_and_a_loaded_one_what_it_had(name, tmp_path):
    method, silos = METHODS[name][0], silos_of(5, 7, 6)
    result = method.run(KEY, 2, silos, **QUIET)
    assert min(result.communication.start) > 0
    on = method.run(KEY, 3, silos, init_state=result.state, **QUIET).communication
    assert (on.start, on.start_exchanges) == ((0, 0), 0)
    assert on.total == tuple(3 * 3 * n for n in result.communication.visit)
    result.save(tmp_path / "fit")
    assert method.load(tmp_path / "fit", silos).communication == result.communication


@pytest.mark.slow
def test_what_a_run_will_cost_is_known_before_it():
    silos = silos_of(5, 7, 6)
    method = nf.SFVI(counts)
    cost = method.cost(silos)
    assert (cost.num_globals, cost.num_shared, cost.num_local) == (4, 1, (5, 7, 6))
    result = method.run(KEY, 1, silos, **QUIET)
    state = sum(a.nbytes for a in jax.tree.leaves(result.state))
    assert abs(cost.server + cost.silos - state) < 16  # the number of the round
    assert cost.communication.visit == result.communication.visit
    text = str(cost)
    assert text.startswith(
        "3 silos with 5 to 7 rows of 'row'\n4 global latents, 1 shared parameters"
    )
    assert "gradient.z_G" in text


@pytest.mark.slow
def test_arrays_of_a_silos_rows_never_cross():
    """However many rows a silo has, what crosses is the same."""
    few, many = (nf.SFVI(counts).cost(silos_of(n, n)).communication for n in (4, 400))
    assert few.messages == many.messages
