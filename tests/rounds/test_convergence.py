"""Rest: told from slow travel, whatever the step."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest

import numpyro_fed as nf
from numpyro_fed.rounds import convergence

KEY = jax.random.key(0)
QUIET = {"progress_bar": False}


def settled_after(path, losses, *, standard=True):
    """The round in which a path of parameters (rounds, dim) counts as settled."""

    def one(course, seen):
        course = convergence.update(course, seen[1], seen[0], whitened=standard)
        return course, convergence.settled(course)

    _, found = jax.lax.scan(one, convergence.init(path[0]), (path, losses))
    return int(found.argmax()) if found.any() else None


def noise(rounds, dim, scale=1.0, seed=0):
    return scale * jax.random.normal(jax.random.key(seed), (rounds, dim))


def test_windows_have_the_means_and_errors_of_their_own_rounds():
    window, stride = convergence.WINDOW, convergence.STRIDE
    rounds = 3 * window + 7
    losses, path = 1e4 + noise(rounds, 1)[:, 0], noise(rounds, 2).at[:, 1].set(5.0)

    def one(course, seen):
        course = convergence.update(course, *seen, whitened=False)
        return course, course

    _, found = jax.lax.scan(one, convergence.init(path[0]), (losses, path))
    losses, path = np.asarray(losses, float), np.asarray(path, float)
    for n in (window // 2, window, 2 * window, rounds):
        course = jax.tree.map(lambda a, n=n: np.asarray(a[n - 1], float), found)
        ended = (n - 1) // window * window
        inside = losses[ended:n]
        np.testing.assert_allclose(course.loss, inside.mean(), rtol=1e-6)
        np.testing.assert_allclose(course.squares, ((inside - inside.mean()) ** 2).sum(), rtol=0.05)
        if n % window:
            continue
        np.testing.assert_allclose(course.mean_before, inside.mean(), rtol=1e-6)
        expected = inside.std(ddof=1) / np.sqrt(window)
        np.testing.assert_allclose(course.error_before, expected, rtol=0.05)
        read = path[ended + stride - 1 : n : stride]
        np.testing.assert_allclose(course.params, read.mean(0), rtol=1e-5)
        assert course.path[1] == course.travel[1] == 0  # it has not moved
        # From the second window on there is one before to have travelled from.
        assert (course.travel[0] != 0) == (n > window)


def test_shaking_is_rest():
    rounds = 1_000
    path = noise(rounds, 5, 0.01)
    found = settled_after(path, 10 + noise(rounds, 1)[:, 0])
    assert found is not None
    assert found < 500


@pytest.mark.parametrize("step", [1e-3, 1e-5])
def test_travel_is_no_rest_however_slow(step):
    """The bound's rise is far below its noise, and a window's move far below the tolerance."""
    rounds = 4_000
    path = step * jnp.arange(rounds)[:, None] + noise(rounds, 5, 0.1 * step)
    path = jnp.concatenate([path[:, :1], noise(rounds, 20, 0.01)], 1)  # one of many
    assert settled_after(path, 10 + noise(rounds, 1)[:, 0]) is None


def test_a_rising_bound_is_no_rest():
    rounds = 2_000
    losses = 100 - 0.05 * jnp.arange(rounds) + noise(rounds, 1)[:, 0]
    assert settled_after(noise(rounds, 5, 0.01), losses) is None


def test_a_run_with_small_steps_does_not_end_on_its_way():
    model = models.level(100)
    silos = [{"y": np.full(30, 10.0)}, {"y": np.full(40, 10.0)}]
    slow = nf.SFVI(model, optim=optax.adam(1e-3), start=None)
    result = slow.run(KEY, 20_000, silos, stop="converged", **QUIET)
    sd = 70**-0.5
    assert abs(float(result.params["guide"]["loc"][0]) - 10) < 0.1 * sd
    with pytest.warns(UserWarning, match="still rising"):
        short = slow.run(KEY, 2_000, silos, stop="converged", **QUIET)
    assert short.ended == "rounds"
