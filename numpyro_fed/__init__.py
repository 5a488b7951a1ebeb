"""Federated Bayesian inference for ordinary NumPyro models."""

from numpyro_fed import guides, handlers
from numpyro_fed.errors import (
    DataError,
    GuideError,
    MissingExtraError,
    ModelError,
    NonFiniteError,
    SavedStateError,
)
from numpyro_fed.inference import SFVI
from numpyro_fed.objectives import ELBO, LocallyEnhanced
from numpyro_fed.primitives import silo_plate
from numpyro_fed.result import Result
from numpyro_fed.testing import check_decomposition

__version__ = "0.1.0"

__all__ = [
    "ELBO",
    "SFVI",
    "DataError",
    "GuideError",
    "LocallyEnhanced",
    "MissingExtraError",
    "ModelError",
    "NonFiniteError",
    "Result",
    "SavedStateError",
    "check_decomposition",
    "guides",
    "handlers",
    "silo_plate",
]
