"""Which rows a program reads, as its operations tell: proven where it is simple, never wrongly."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_fed as nf
from numpyro_fed.data.silo_data import read
from numpyro_fed.text.jaxprs import same_but_for_sizes, trace_program
from numpyro_fed.text.row_axes import MIXED, row_axes
from numpyro_fed.text.split import split

N = 5
INDEX = np.array([0, 2, 1, 1, 0])
SQUARE = np.random.default_rng(0).normal(size=(3, 3))

# Of an array (5, 3) with rows along its first axis: the axis along which the result has them.
APART = {
    "elementwise": (lambda x: jnp.exp(x) * 2 + jnp.where(x > 0, x, -1.0), 0),
    "moved": (lambda x: x.T[None], 2),
    "sum over others": (lambda x: x.sum(1), 0),
    "mean over others": (lambda x: x - x.mean(1, keepdims=True), 0),
    "product": (lambda x: x @ SQUARE, 0),
    "product from the left": (lambda x: SQUARE @ x.T, 1),
    "batched product": (lambda x: jnp.einsum("ni,nj->nij", x, x), 0),
    "quadratic form": (lambda x: jnp.einsum("ni,ij,nj->n", x, SQUARE, x), 0),
    "a column": (lambda x: x[:, 1], 0),
    "columns": (lambda x: x[:, INDEX[:2]], 0),
    "softmax": (lambda x: jax.nn.log_softmax(x), 0),
    "cumulative over others": (lambda x: jnp.cumsum(x, 1), 0),
    "stacked columns": (lambda x: jnp.stack([x[:, 0], x[:, 1] ** 2], 1), 0),
    "reshaped": (lambda x: x.reshape(N, 3, 1).repeat(2, 2), 0),
    "one row of a table": (lambda x: jnp.arange(3.0)[jnp.clip(x[:, 0], 0, 2).astype(int)], 0),
    "sorted columns": (lambda x: jnp.sort(x, 1), 0),
    "solve": (lambda x: jnp.linalg.cholesky(jnp.eye(3) + x[:, :, None] * x[:, None]), 0),
    "scan": (lambda x: jax.lax.scan(lambda c, y: (c + y, c * y), jnp.zeros(N), x.T)[1], 1),
    "branch": (lambda x: jax.lax.cond(True, jnp.sin, jnp.cos, x), 0),
    "none": (lambda x: jnp.ones(N), None),
}
TOGETHER = {
    "mean": lambda x: x - x.mean(0),
    "sum": lambda x: x.sum(),
    "shifted": lambda x: x[1:] - x[:-1],
    "rolled": lambda x: jnp.roll(x, 1, 0),
    "other rows": lambda x: x[INDEX],
    "reversed": lambda x: x[::-1],
    "cumulative": lambda x: jnp.cumsum(x, 0),
    "sorted": lambda x: jnp.sort(x, 0),
    "product": lambda x: x @ x.T,
    "solve": lambda x: jnp.linalg.solve(x[:3] + 5 * jnp.eye(3), x.T).T,
    "flat": lambda x: x.reshape(-1)[:N],
    "scan": lambda x: jax.lax.scan(lambda c, y: (c + y, c), jnp.zeros(3), x)[1],
    "while": lambda x: jax.lax.while_loop(lambda c: c.sum() < 3, lambda c: c + 1, x),
    "two axes": lambda x: x[:, :1] + x[:, 0],
    "normalised": lambda x: x / jnp.sqrt((x**2).sum(0)),
    "branch": lambda x: jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x),
    "a reduction of one's own": lambda x: jax.lax.reduce(x, 0.0, lambda a, b: b * 1.0, (0,)),
}


def axes_of(f):
    return row_axes(trace_program(f, jnp.zeros((N, 3))), [0])


@pytest.mark.parametrize("name", APART)
def test_rows_that_are_apart_are_known_to_be(name):
    f, axis = APART[name]
    assert axes_of(f) == [axis]
    if axis is None:
        return
    # Each row of the result moves with its own row of the input alone.
    x = jnp.asarray(np.random.default_rng(1).normal(size=(N, 3)))
    before = np.moveaxis(np.asarray(f(x)), axis, 0)
    for i in range(N):
        after = np.moveaxis(np.asarray(f(x.at[i].add(0.7))), axis, 0)
        others = np.arange(N) != i
        np.testing.assert_array_equal(after[others], before[others])


@pytest.mark.parametrize("name", TOGETHER)
def test_rows_that_read_others_are_not_taken_for_apart(name):
    assert axes_of(TOGETHER[name]) == [MIXED]


SAME = {
    "rows": lambda x: x**2 @ SQUARE[:, 0] + jnp.log1p(x[:, 0] ** 2),
    "numbers of rows": lambda x: x[:, 0] + jnp.arange(len(x)),
}
OTHER = {
    "a mean": lambda x: x - x.mean(0),
    "a count": lambda x: x / len(x),
    "a sum of ones": lambda x: x * jnp.ones(len(x)).sum(),
    "as many steps": lambda x: jax.lax.fori_loop(0, len(x), lambda i, z: z + 1.0, x),
    "a power": lambda x: x ** len(x),
    "the last": lambda x: x - x[-1],
    "from the end": lambda x: x[:, 0] + jnp.flip(jnp.arange(len(x))),
    "ones behind zeros": lambda x: x[:, 0] + joined(len(x))[: len(x)],
    "a table cut anew": lambda x: x[:, 0] + columns(len(x)).reshape(2, len(x))[1],
    "beyond a table": lambda x: x[:, 0] + jnp.take(jnp.arange(len(x)), NINES, mode="clip")[0],
    "a count of one's own": lambda x: (
        x / jax.lax.reduce(jnp.ones(len(x)), 0.0, lambda a, b: (a + b) * 1.0, (0,))
    ),
    "a constant of the size": lambda x: x[:, 0] + np.linspace(0, 1, len(x)),
}


NINES = np.full(2, 9, np.uint32)


def joined(n):
    return jnp.concatenate([jnp.zeros(n), jnp.ones(n)])


def columns(n):
    return jnp.broadcast_to(jnp.arange(n)[:, None], (n, 2))


@pytest.mark.parametrize("name", [*SAME, *OTHER])
def test_programs_of_other_sizes_are_compared(name):
    f = {**SAME, **OTHER}[name]
    few, many = (trace_program(f, jnp.zeros((n, 3))) for n in (4, 7))
    assert same_but_for_sizes(few, many, {4: 7}) == (name in SAME)


def test_sizes_that_are_double_another_do_not_count_as_theirs():
    few, many = (trace_program(lambda x: x + joined(len(x) // 2), jnp.zeros(n)) for n in (8, 16))
    assert not same_but_for_sizes(few, many, {4: 8, 8: 16})


class Whole(dist.Normal):
    """A density that sums over rows."""

    def log_prob(self, value, intermediates=None):
        return -((value - self.loc) ** 2).sum()


@pytest.mark.parametrize("make", [dist.Normal, Whole])
def test_a_density_without_an_axis_of_rows_is_not_apart(make):
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with nf.silo_plate("row", y.shape[0]):
            b = numpyro.sample("b", dist.Normal(mu, 1))
            numpyro.sample("y", make(b, jnp.ones(y.shape[0])), obs=y)

    silos = read([{"y": np.ones(4)}])
    fm = split(model, silos)
    assert fm.traces.at(silos[0]).rows_apart("row", ["y"]) == (make is dist.Normal)
    assert fm.traces.at(silos[0]).rows_apart("row", []) == (make is dist.Normal)


@pytest.mark.slow
def test_a_text_of_rows_needs_no_values(compiled):
    silos = [{"y": np.ones(3)}, {"y": np.zeros(5)}]
    nf.fit(jax.random.key(0), models.levels(), silos, max_exchanges=1, progress_bar=False)
    assert not {"jit(padding)", "jit(summaries)", "jit(coupled)"} & set(compiled)


def test_a_text_that_reads_other_rows_has_its_values_tried(compiled):
    def model(x, y=None):
        beta = numpyro.sample("beta", dist.Normal(0, 1))
        with nf.silo_plate("row", x.shape[0]):
            # A sum of differences to each other: nothing says so but its values.
            apart = (x[:, None] - x).T @ np.zeros(x.shape[0])
            numpyro.sample("y", dist.Normal(beta * x + apart, 1), obs=y)

    silos = [{"x": np.arange(4.0), "y": np.ones(4)}, {"x": np.arange(4.0), "y": np.zeros(4)}]
    nf.fit(jax.random.key(0), model, silos, max_exchanges=1, progress_bar=False)
    assert "jit(summaries)" in compiled
