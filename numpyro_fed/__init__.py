"""Federated Bayesian inference for ordinary NumPyro models."""

from numpyro_fed import guides, handlers
from numpyro_fed.diagnostics import Comparison, compare
from numpyro_fed.errors import (
    DataError,
    GuideError,
    MissingExtraError,
    ModelError,
    NonFiniteError,
    SavedStateError,
)
from numpyro_fed.importance import Corrected, importance_correct
from numpyro_fed.inference import SFVI
from numpyro_fed.mcmc import NutsResult, run_nuts
from numpyro_fed.objectives import ELBO, LocallyEnhanced
from numpyro_fed.primitives import silo_plate
from numpyro_fed.result import Result
from numpyro_fed.testing import check_decomposition

__version__ = "0.1.0"

__all__ = [
    "ELBO",
    "SFVI",
    "Comparison",
    "Corrected",
    "DataError",
    "GuideError",
    "LocallyEnhanced",
    "MissingExtraError",
    "ModelError",
    "NonFiniteError",
    "NutsResult",
    "Result",
    "SavedStateError",
    "check_decomposition",
    "compare",
    "guides",
    "handlers",
    "importance_correct",
    "run_nuts",
    "silo_plate",
]
