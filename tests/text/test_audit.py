"""Changes of a silo, the terms that they move, and which programs are the same."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from laid_open import questions

import numpyro_fed as nf
from numpyro_fed.basics.errors import ModelError
from numpyro_fed.data.padding import bucket
from numpyro_fed.data.silo_data import SiloData, read
from numpyro_fed.text.fingerprint import fingerprint
from numpyro_fed.text.jaxprs import (
    propagate_labels,
    same_but_for_sizes,
    trace_program,
)
from numpyro_fed.text.row_checks import (
    Perturbation,
    RowChecks,
    changed,
    first_changed_rows,
    row_groups,
)
from numpyro_fed.text.split import split

LATENTS = {"row": jnp.array([[1.0], [2.0], [4.0]])}
ARRAYS = {"y": jnp.array([10.0, 20.0, 40.0]), "x": jnp.array([1.0, 2.0])}
DATA = SiloData(ARRAYS, {"row": jnp.ones(3, bool)})
SILO, KEYS = (LATENTS, DATA), {"y": "row"}


def apart(z_L, data):
    return {"row": z_L["row"][:, 0] + data.arrays["y"]}


def test_a_change_steps_latents_and_puts_the_data_of_rows_in_other_places():
    z_L, data = changed(SILO, KEYS, {"row": jnp.ones((3, 1))}, {"row": jnp.array([2, 1, 0])})
    assert z_L["row"][:, 0].tolist() == [2.0, 3.0, 5.0]
    assert data.arrays["y"].tolist() == [40.0, 20.0, 10.0]
    assert data.arrays["x"].tolist() == [1.0, 2.0]


def test_a_change_that_cuts_leaves_out_latents_and_masks_too():
    for rows, terms in (([0, 2], [11.0, 44.0]), ([1, 2], [22.0, 44.0])):
        z_L, data = changed(SILO, KEYS, {}, {"row": jnp.array(rows)}, cut=True)
        assert apart(z_L, data)["row"].tolist() == terms
        assert data.masks["row"].shape == (2,)


def moves():
    some = row_groups(3)
    steps = Perturbation("row", some, steps=jnp.ones((3, 1)))
    return [steps, Perturbation("row", some, source=jnp.array([1, 2, 0]))]


@pytest.mark.parametrize("at_once", [None, 1, 3, 100])
def test_rows_that_stand_apart_move_alone(at_once):
    terms, found = first_changed_rows(apart, SILO, KEYS, moves(), 1e-5, at_once)
    assert terms["row"].tolist() == [11.0, 22.0, 44.0]
    assert not any(moved["row"].changed for moved in found)


@pytest.mark.parametrize("reader", [0, 1, 2])
@pytest.mark.parametrize("read", [0, 1, 2])
def test_every_row_that_reads_another_one_is_found(reader, read):
    if reader == read:
        return

    def by_latents(z_L, data):
        return {"row": apart(z_L, data)["row"].at[reader].add(z_L["row"][read, 0])}

    def by_data(z_L, data):
        return {"row": apart(z_L, data)["row"].at[reader].add(data.arrays["y"][read])}

    for terms, expected in ((by_latents, [True, False]), (by_data, [False, True])):
        _, found = first_changed_rows(terms, SILO, KEYS, moves(), 1e-5)
        assert [bool(moved["row"].changed) for moved in found] == expected
        assert int(found[expected.index(True)]["row"].row) == reader


def test_a_row_that_becomes_possible_has_moved():
    """From minus infinity to a number, by the data of another row."""

    def terms(z_L, data):
        first = jnp.where(data.arrays["y"][2] == 40.0, -jnp.inf, 0.0)
        return {"row": jnp.stack([first, *data.arrays["y"][1:]])}

    _, (_, found) = first_changed_rows(terms, SILO, KEYS, moves(), 1e-5)
    assert bool(found["row"].changed)
    assert (int(found["row"].row), float(found["row"].before)) == (0, -np.inf)


def test_without_moves_there_are_the_terms_alone():
    terms, found = first_changed_rows(apart, SILO, KEYS, [], 1e-5)
    assert (terms["row"].tolist(), found) == ([11.0, 22.0, 44.0], [])


def centred(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with nf.silo_plate("row", y.shape[0]):
        b = numpyro.sample("b", dist.Normal(mu, 1))
        numpyro.sample("y", dist.Normal(b - b.mean(), 1), obs=y)


def test_a_question_is_put_once_to_the_same_silos_and_forgotten_with_them():
    silos = read([{"y": np.zeros(3)}, {"y": np.ones(3)}])
    asked = []

    class Counted(RowChecks):
        def coupled(self, plate, stack):
            asked.append(plate)
            return RowChecks.coupled.__get__(self)(plate, stack)

    fm = split(centred, silos)
    asks = Counted(fm)
    (b,) = bucket(silos, [fm.sizes(silo) for silo in silos])
    first = asks.reads_others(b, "row")
    assert first == asks.reads_others(b, "row")
    assert (first.silo, first.plate) == (0, "row")
    assert asked == ["row"]
    assert first.words() == "silo 0, silo_plate 'row': the term of a row"
    del b
    gc.collect()
    assert not questions(asks)


def test_programs_are_the_same_by_their_operations_and_numbers():
    def program(table, scale):
        return trace_program(lambda x: scale * x + table, 1.0)

    table = np.array([1.0, np.nan], np.float32)
    first = program(table, 2.0)
    assert same_but_for_sizes(first, program(table.copy(), 2.0), {})
    for other in (program(table, 3.0), program(table + 1, 2.0), program(table[:1], 2.0)):
        assert not same_but_for_sizes(first, other, {})


KEY = jax.random.key(3)


def test_a_text_that_reads_a_random_key_has_a_fingerprint():
    """A fixed one, as of random features: of the text, and not drawn anew."""

    def text(key):
        features = jax.random.normal(key, (2,))

        def model(x, y):
            w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
            with nf.silo_plate("row", y.shape[0]):
                turned = jnp.cos(x[:, None] * jax.random.normal(key, (2,)) + features)
                numpyro.sample("y", dist.Normal(turned @ w, 1), obs=y)

        return model

    silos = read([{"x": np.arange(3.0), "y": np.zeros(3)}])
    said = [fingerprint(split(text(key), silos), silos) for key in (KEY, KEY, jax.random.key(4))]
    assert said[0] == said[1] != said[2]


def test_labels_are_seen_at_each_operation_those_of_inner_programs_included():
    def fn(inputs):
        step = jax.jit(lambda c, x: (c + jnp.sin(x), None))
        return jax.lax.scan(step, inputs["c"], inputs["xs"])[0]

    inputs, seen = {"c": 0.0, "xs": jnp.ones(3)}, {}
    program = trace_program(fn, inputs).jaxpr
    labels = [frozenset({name}) for name in inputs]
    propagate_labels(program, labels, lambda eqn, into: seen.update({eqn.primitive.name: into}))
    assert seen["sin"] == [{"xs"}]
    assert seen["add"] == [{"c", "xs"}, {"xs"}]


def test_rows_that_read_a_mean_are_refused_by_silo_plate_and_arrays():
    def model(x, y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu + x - x.mean(), 1), obs=y)

    silos = [{"x": np.arange(n) * 1.0, "y": np.zeros(n)} for n in (3, 5)]
    message = r"silo 0, silo_plate 'row': the term of row 1 went from .* in \['x', 'y'\], were"
    with pytest.raises(ModelError, match=message):
        nf.SFVI(model).run(jax.random.key(0), 1, silos, progress_bar=False)
