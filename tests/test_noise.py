"""The noise of privacy: standard normals of the operating system, rounded to a grid."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import kstest

from numpyro_fed.precision import precision
from numpyro_fed.privacy.noise import GRID, in_double, noisy, normals


@pytest.mark.parametrize("double", [False, True])
def test_noise_is_standard_normal_in_both_precisions(double):
    with precision(double=double):
        totals = jnp.full(50_000, 7.0)
        found = in_double(noisy, totals, totals, jnp.array(2.0))
        assert found.dtype == jnp.result_type(float)
        z = (np.asarray(found, float) - 7) / 2
    assert kstest(z, "norm").pvalue > 1e-6
    # On the grid, and not on a coarser one: no stretch of the tails is left out.
    steps = z / GRID + 7 / 2 / GRID
    np.testing.assert_allclose(steps, np.round(steps), atol=1e-2)
    assert len(np.unique(normals((10**6,)))) == 10**6
    assert np.abs(normals((10**6,))).max() > 4.3


def test_silos_side_by_side_have_noise_of_their_own():
    draw = jax.jit(jax.vmap(lambda total: in_double(noisy, total, total, jnp.array(2.0))))
    found = np.asarray(draw(jnp.zeros((4, 50))))
    assert len(np.unique(found)) > 150
    again = np.asarray(draw(jnp.zeros((4, 50))))
    assert (found != again).mean() > 0.9  # no key decides it
    np.testing.assert_array_equal(found, np.round(found / (2 * GRID)) * (2 * GRID))
