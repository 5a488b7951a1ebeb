"""Tools to test your own models: the decomposition check and Hypothesis strategies."""

# This folder may import ``model`` only (tests/test_architecture.py).

from numpyro_fed.testing.decomposition import check_decomposition
from numpyro_fed.testing.strategies import Latent, ModelSpec, Problem, models, partitions, silos

__all__ = [
    "Latent",
    "ModelSpec",
    "Problem",
    "check_decomposition",
    "models",
    "partitions",
    "silos",
]


def __dir__() -> list[str]:
    return __all__
