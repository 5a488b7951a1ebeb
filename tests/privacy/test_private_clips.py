"""Where the units of a private sum are clipped, and whether a search has ended."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from numpyro_fed.dp_newton.algorithm import NewtonServer, PrivateNewton
from numpyro_fed.dp_newton.units import best_clip


def counts_of(sizes):
    counts = np.zeros(201)
    counts[[p + 100 for p in sizes]] = list(sizes.values())
    return counts


@pytest.mark.parametrize(
    ("sizes", "noise", "clip"),
    [
        # 330 rows of 20,000 are longer: cut off by a quarter each, they move the sum by 82 lengths.
        ({-6: 16_700, -5: 3_000, -4: 330}, 9.0, 2.0**-4),
        # With noise of 80 lengths that is less than twice the noise.
        ({-6: 16_700, -5: 3_000, -4: 330}, 80.0, 2.0**-5),
        ({3: 500}, 1.0, 2.0**3),
    ],
)
def test_clipping_moves_the_sum_no_more_than_noise_does(sizes, noise, clip):
    assert best_clip(counts_of(sizes), 1.0, noise, 1) == clip


def test_in_many_directions_noise_counts_more_and_what_is_clipped_less():
    counts = counts_of({-6: 16_700, -5: 3_000, -4: 330})
    assert best_clip(counts, 1.0, 9.0, 1) == 2.0**-4
    assert best_clip(counts, 1.0, 9.0, 16) == 2.0**-5


def test_without_a_length_that_noise_does_not_hide_there_is_no_clip():
    assert best_clip(np.full(201, 3.0), 1.0, 1.0, 2) == 0.0


def test_the_best_clip_is_in_proportion_to_the_lengths():
    near, far = counts_of({-3: 900, -2: 80}), counts_of({57: 900, 58: 80})
    assert best_clip(far, 2.0, 5.0, 2) == 2.0**60 * best_clip(near, 2.0, 5.0, 2)


class WithoutPrior(PrivateNewton):
    def _prior(self, z):
        return np.zeros(len(z)), np.zeros((len(z), len(z)))


def test_one_long_direction_of_many_is_seen():
    """A step of ten sds in one of a hundred has the mean square of noise, and is no noise."""
    d, curvature = 100, 400.0
    units: Any = SimpleNamespace(model=SimpleNamespace(dim=d, draw_prior=lambda key, n: None))
    newton = WithoutPrior(units, None, num_units=1_000)
    server = NewtonServer(*[None] * 2, np.eye(d), *[None] * 9)
    for sds, moved in ((0.1, 0.05), (10.0, 5.0)):
        g = np.zeros(d)
        g[7] = sds * curvature**0.5
        found, _ = newton._estimate(
            g, curvature * np.eye(d), 1.0, 1e-9, np.zeros(d), np.zeros(d), server
        )
        np.testing.assert_allclose(found.moved, moved, rtol=1e-4)
