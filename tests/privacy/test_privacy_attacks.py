"""What attackers find under a budget, and that they find much once the noise is taken out."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import privacy_attacks

pytestmark = pytest.mark.usefixtures("noise_of_a_seed")


def test_the_bound_of_epsilon_is_one():
    """Two Gaussians a distance apart: the exact epsilon at delta 1e-5 is about 4.4 for 1."""
    r = np.random.default_rng(0)
    ins, outs = r.normal(1, 1, 20_000), r.normal(0, 1, 20_000)
    assert 0.8 < privacy_attacks.epsilon_of(ins, outs, 1e-5) < 4.4
    assert privacy_attacks.epsilon_of(outs, r.normal(0, 1, 20_000), 1e-5) < 0.1
    assert privacy_attacks.epsilon_of(10 + ins, outs, 1e-5) > 7


@pytest.mark.slow
def test_a_canary_is_hidden_by_the_noise_and_not_without_it():
    assert privacy_attacks.members(60, 1.0) < 1.0
    assert privacy_attacks.members(60, 1.0, lambda total, sd: total) > 1.9


@pytest.mark.slow
def test_rows_are_found_by_chosen_places_only_where_there_is_no_noise():
    assert [privacy_attacks.rows(seed, 1.0, quiet=False) for seed in range(10)] == [0] * 10
    assert min(privacy_attacks.rows(seed, 1.0, quiet=True) for seed in range(3)) >= 2
