"""Where the units of a private sum are clipped."""

import jax.numpy as jnp
import pytest

from numpyro_fed.algorithms.private_units import best_clip


def counts_of(sizes):
    return (
        jnp.zeros(201)
        .at[jnp.array([p + 100 for p in sizes])]
        .set(jnp.array(list(sizes.values()), float))
    )


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
    assert float(best_clip(counts_of(sizes), jnp.array(1.0), jnp.array(noise), 1)) == clip


def test_in_many_directions_noise_counts_more_and_what_is_clipped_less():
    counts, sd = counts_of({-6: 16_700, -5: 3_000, -4: 330}), jnp.array(1.0)
    assert float(best_clip(counts, sd, jnp.array(9.0), 1)) == 2.0**-4
    assert float(best_clip(counts, sd, jnp.array(9.0), 16)) == 2.0**-5


def test_without_a_length_that_noise_does_not_hide_there_is_no_clip():
    assert float(best_clip(jnp.full(201, 3.0), jnp.array(1.0), jnp.array(1.0), 2)) == 0.0


def test_the_best_clip_is_in_proportion_to_the_lengths():
    near, far = counts_of({-3: 900, -2: 80}), counts_of({57: 900, 58: 80})
    sd, noise = jnp.array(2.0), jnp.array(5.0)
    assert float(best_clip(far, sd, noise, 2)) == 2.0**60 * float(best_clip(near, sd, noise, 2))
