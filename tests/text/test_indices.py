"""What a silo's data index must exist, at every run."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_fed as nf
from numpyro_fed.basics.errors import DataError
from numpyro_fed.data.silo_data import read
from numpyro_fed.text.indices import IndexCheck
from numpyro_fed.text.split import split

Y = np.array([0.5, -1.0, 2.0], np.float32)


def hospitals(h, n, y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with nf.silo_plate("hospital", n):
        u = numpyro.sample("u", dist.Normal(mu, 1))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(u[h], 1), obs=y)


def silo(*h, n=2, **other):
    return {"h": np.array(h), "n": n, "y": Y, **other}


def test_global_ids_of_local_hospitals_are_refused():
    message = r"silo 1: index 2 is out .* length 2\..*'h' holds 2 to 3.*count from 0 within"
    with pytest.raises(DataError, match=message):
        nf.check_decomposition(hospitals, [silo(0, 1, 1), silo(2, 3, 3)])


def test_values_decide_and_shapes_compile(compiled):
    silos = read([silo(0, 1, 1), silo(1, 0, 1), silo(-3, 0, 1), silo(2, 0, 1), silo(2, 0, 1, n=3)])
    check = IndexCheck(split(hospitals, silos[:1]).terms_at_zero)
    check(0, silos[0])
    before = len(compiled)
    check(1, silos[1])
    assert len(compiled) == before
    for j in (2, 3):
        with pytest.raises(DataError, match=rf"silo {j}: .*'h' holds"):
            check(j, silos[j])
    check(4, silos[4])


def looking_up(how):
    def model(h, n, y):
        table = jnp.arange(2.0)
        read = {
            "plain": lambda: table[h],
            "take": lambda: jnp.take(table, h),
            "first": lambda: table[h[0]],
            "window": lambda: jax.lax.dynamic_update_slice(table, y[:1], (h[0],))[0],
            "matrix": lambda: jnp.zeros((3, 2)).at[1, h].set(y).sum(),
            "segments": lambda: jax.ops.segment_sum(y, h, n)[0],
            "clip": lambda: jnp.take(table, h, mode="clip"),
            "fill": lambda: table.at[h].get(mode="fill", fill_value=0),
            "scan": lambda: jax.lax.scan(lambda c, i: (c + table[i], None), 0.0, h)[0],
            "beside clip": lambda: jnp.take(table, h, mode="clip") + table[h],
            "nothing": lambda: 0.0,
        }[how]
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(read(), 1), obs=y)

    return model


@pytest.mark.parametrize(
    ("how", "refused"),
    [
        *(
            (how, True)
            for how in (
                "plain",
                "take",
                "first",
                "window",
                "matrix",
                "segments",
                "scan",
                "beside clip",
            )
        ),
        *((how, False) for how in ("clip", "fill", "nothing")),
    ],
)
def test_what_the_text_says_about_an_index_out_of_range_holds(how, refused, compiled):
    data = read([silo(2, 0, 1)])
    check = IndexCheck(split(looking_up(how), data).terms_at_zero)
    before = len(compiled)
    if refused:
        with pytest.raises(DataError, match=r"silo 0: .*'h' holds 0 to 2"):
            check(0, data[0])
    else:
        check(0, data[0])
        from_the_end = how == "fill"  # what is filled is said, but -1 would still be the last
        assert len(compiled) == before + from_the_end


def test_what_libraries_index_out_of_range_is_no_matter_and_hides_nothing():
    def model(h, n, y):
        with nf.silo_plate("hospital", n):
            u = numpyro.sample("u", dist.LKJCholesky(3))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(u[h, 1, 0], 1), obs=y)

    data = read([silo(0, 1, 1), silo(0, 1, 2)])
    check = IndexCheck(split(model, data).terms_at_zero)
    check(0, data[0])
    with pytest.raises(DataError, match=r"silo 1: index 2 .*'h' holds 0 to 2"):
        check(1, data[1])


def test_what_counts_from_the_end_is_refused():
    """pandas writes -1 for a missing category, and Python would read the last one."""
    with pytest.raises(DataError, match=r"silo 1: index -1 .*'h' holds -1 to 1"):
        nf.check_decomposition(hospitals, [silo(0, 1, 1), silo(0, 1, -1)])


def branching(h, y):
    u = numpyro.sample("u", dist.Normal(0, 1).expand([3]).to_event(1))
    with nf.silo_plate("row", y.shape[0]):
        mean = jax.lax.cond(y.sum() > 0, lambda: u[h], lambda: jnp.zeros(3))
        numpyro.sample("y", dist.Normal(mean, 1), obs=y)


def test_indices_within_a_branch_are_looked_at():
    rows = {"y": np.ones(3, np.float32)}
    nf.check_decomposition(branching, [{"h": np.array([0, 1, 2]), **rows}])
    with pytest.raises(DataError, match=r"silo 0: index 7 .* length 3"):
        nf.check_decomposition(branching, [{"h": np.array([7, 8, 9]), **rows}])
