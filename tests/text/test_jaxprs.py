"""What ``text/jaxprs.py`` expects of the JAX that is installed.

Where one of these tests fails with a new JAX, ``numpyro_fed/text/jaxprs.py`` is the place to mend:
print ``jax.make_jaxpr`` of the function in the test, and look for what has another name there.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from numpyro_fed.text.fingerprint import Written
from numpyro_fed.text.jaxprs import (
    branches,
    called_program,
    inner_programs,
    pruned,
    scan,
    trace_program,
)

TABLE = np.arange(3.0, dtype=np.float32) + 0.25


def operation(name, fn, *args):
    """The one operation of that name in a function's program."""
    (found,) = [e for e in trace_program(fn, *args).jaxpr.eqns if e.primitive.name == name]
    return found


def test_a_scan_has_constants_then_what_it_carries_then_sequences():
    def loop(constant, carry, xs):
        def step(carry, x):
            count, total = carry
            return (count + 1, total * constant + x.sum()), (total, x[0])

        return lax.scan(step, carry, xs, reverse=True)

    found = scan(operation("scan", loop, 2.0, (0, 1.0), jnp.ones((5, 3))))
    assert (found.num_consts, found.num_carry) == (1, 2)
    assert (found.length, found.reverse) == (5, True)
    assert found.carry == slice(1, 3)
    assert [v.aval.shape for v in found.body.jaxpr.invars] == [(), (), (), (3,)]
    assert [v.aval.dtype.kind for v in found.body.jaxpr.outvars] == ["i", "f", "f", "f"]


@pytest.mark.parametrize(
    ("loop", "counts"),
    [
        (lambda c, xs: lax.scan(lambda c, x: (2 * c, None), c, None, length=3)[0], (0, 1)),
        (lambda c, xs: lax.scan(lambda _, x: (None, x * c), None, xs)[1], (1, 0)),
        (lambda c, xs: lax.scan(lambda c, x: (c + x, c), c, xs)[1], (0, 1)),
        (lambda c, xs: lax.scan(lambda c, x: (c + x * xs.sum(), None), c, xs)[0], (1, 1)),
    ],
    ids=["no sequence", "nothing carried", "no constant", "a sum beside"],
)
@pytest.mark.parametrize("shape", [(), (3,), (3, 3)])
def test_scans_of_all_kinds_and_shapes_are_told(loop, counts, shape):
    carry, xs = jnp.ones(shape), jnp.ones((3, *shape))
    found = scan(operation("scan", loop, carry, xs))
    assert (found.num_consts, found.num_carry) == counts


def test_a_scan_of_random_keys_is_told():
    def loop(key):
        return lax.scan(lambda k, k2: (k2, k), key, jax.random.split(key, 3))

    (found,) = [s for e in trace_program(loop, jax.random.key(0)).jaxpr.eqns if (s := scan(e))]
    assert (found.num_consts, found.num_carry) == (0, 1)


def test_a_cond_has_its_branches():
    eqn = operation("cond", lambda i, x: lax.switch(i, [jnp.sin, jnp.cos, jnp.tan], x), 1, 2.0)
    assert [p.jaxpr.eqns[-1].primitive.name for p in branches(eqn)] == ["sin", "cos", "tan"]
    assert called_program(eqn) is None
    assert scan(eqn) is None


def test_a_while_has_two_programs_and_is_no_call():
    eqn = operation("while", lambda x: lax.while_loop(lambda x: x < 9, lambda x: 2 * x, x), 1.0)
    assert len(inner_programs(eqn)) == 2
    assert called_program(eqn) is None
    assert branches(eqn) is None


@jax.custom_vjp
def own_gradient(x):
    return jnp.sin(x)


own_gradient.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))


@pytest.mark.parametrize(
    "call",
    [jax.jit(jnp.sin), jax.checkpoint(jnp.sin), own_gradient, jax.nn.relu],
    ids=["jit", "checkpoint", "custom_vjp", "custom_jvp"],
)
def test_a_call_has_the_program_that_it_calls(call):
    (eqn,) = trace_program(call, 1.0).jaxpr.eqns
    inner = called_program(eqn)
    assert len(inner.jaxpr.invars) == len(inner.jaxpr.outvars) == 1
    assert branches(eqn) is scan(eqn) is None


def test_plain_operations_hold_no_program():
    (eqn,) = trace_program(lambda x, y: x + y, 1.0, 2.0).jaxpr.eqns
    assert inner_programs(eqn) == []
    assert called_program(eqn) is scan(eqn) is branches(eqn) is None


@pytest.mark.parametrize("inside", [lambda f: f, jax.jit], ids=["outside", "in a jit"])
def test_constants_are_found_wherever_they_are(inside):
    fn = inside(lambda x: lax.cond(x.sum() > 0.5, lambda x: x * TABLE, lambda x: x * 7.0, x))
    found = [np.asarray(c) for c in Written(trace_program(fn, jnp.ones(3))).numbers]
    assert any(np.array_equal(c, TABLE) for c in found)
    assert {0.5, 7.0} <= {float(c) for c in found if c.size == 1}


@pytest.mark.parametrize("inside", [lambda f: f, jax.jit], ids=["outside", "in a jit"])
def test_a_program_keeps_what_its_outputs_need(inside):
    other = np.arange(4.0, dtype=np.float32)
    both = inside(lambda x: (x * TABLE, jnp.cos(x.sum() * other)))
    whole = trace_program(lambda x: both(x)[0], jnp.ones(3))
    kept = pruned(whole, [True])[0]
    assert [np.shape(c) for c in Written(kept).numbers if np.shape(c)] == [(3,)]
    assert sum(np.shape(c) == (4,) for c in Written(whole).numbers) == 1
    assert len(kept.jaxpr.eqns) == 1
    assert "cos" not in str(kept.jaxpr)


@pytest.mark.parametrize("inside", [lambda f: f, jax.jit], ids=["outside", "in a jit"])
def test_programs_that_say_the_same_have_the_same_words(inside):
    def words(factor, other):
        def fn(x):
            return inside(lambda x: (factor * x, other + x))(x)[0]

        return re.sub(
            "0x[0-9a-f]+", "", str(pruned(trace_program(fn, jnp.ones(3)), [True])[0].jaxpr)
        )

    assert words(2.0, 3.0) == words(2.0, 4.0)
    assert words(2.0, 3.0) != words(2.5, 3.0)
    assert words(TABLE, 3 * TABLE) == words(TABLE, 2 * TABLE)
