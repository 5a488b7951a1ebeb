"""The noise of privacy: standard normals of the operating system, rounded to a grid."""

import numpy as np
from scipy.stats import kstest

from numpyro_fed.privacy.budget import GRID, noisy, normals


def test_noise_is_standard_normal():
    z = (noisy(np.full(50_000, 7.0), np.array(2.0)) - 7) / 2
    assert kstest(z, "norm").pvalue > 1e-6
    # On the grid, and not on a coarser one: no stretch of the tails is left out.
    steps = z / GRID + 7 / 2 / GRID
    np.testing.assert_allclose(steps, np.round(steps), atol=1e-2)
    assert len(np.unique(normals((10**6,)))) == 10**6
    assert np.abs(normals((10**6,))).max() > 4.3
    assert (noisy(np.zeros(50), 2.0) != noisy(np.zeros(50), 2.0)).mean() > 0.9  # no key decides it
