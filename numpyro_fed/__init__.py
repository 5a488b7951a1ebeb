"""Federated Bayesian inference for ordinary NumPyro models."""

from numpyro_fed.threads import make_pool_large_enough

# Before the imports below: the first array that JAX makes fixes the size of its pool.
make_pool_large_enough()

from numpyro_fed import barycenters, divergences, expfam, guides, local, losses, network, testing
from numpyro_fed.errors import (
    CallbackError,
    ConvergenceWarning,
    DataError,
    DataWarning,
    FederatedWarning,
    GuideError,
    Interrupted,
    MissingExtraError,
    ModelError,
    ModelWarning,
    NonFiniteError,
    RefusedError,
    ReplyError,
    SavedStateError,
    SiloAwayError,
    SilosError,
    StartWarning,
    SumError,
)
from numpyro_fed.methods import schedules
from numpyro_fed.methods.cost import Cost
from numpyro_fed.methods.fit import find_mode, fit
from numpyro_fed.methods.load import Saved, load
from numpyro_fed.methods.of_data import levels, moments
from numpyro_fed.methods.private import DPNewton, PrivateResult
from numpyro_fed.methods.pvi import PVI
from numpyro_fed.methods.pvi_family import (
    BCM,
    VCL,
    AlphaEP,
    FedGVI,
    GlobalVI,
    PowerEP,
    StochasticPowerEP,
    StreamingVB,
)
from numpyro_fed.methods.sfvi import SFVI, SFVIAvg
from numpyro_fed.methods.vfl import SOUL, VFL
from numpyro_fed.model import handlers
from numpyro_fed.model.clients import client_sum
from numpyro_fed.model.facts import Facts, Plan, describe
from numpyro_fed.model.primitives import silo_plate
from numpyro_fed.model.scaling import Scaling
from numpyro_fed.model.tables import Levels, level_names
from numpyro_fed.network.policy import Policy
from numpyro_fed.network.silo import Silo
from numpyro_fed.objectives import ELBO, LocallyEnhanced, Quadrature
from numpyro_fed.privacy.budget import Privacy, PrivacyWarning, Spent
from numpyro_fed.programs import cache_programs
from numpyro_fed.reference.compare import Comparison, ModelComparison, compare, compare_models
from numpyro_fed.reference.nuts import run_nuts
from numpyro_fed.reference.nuts_result import NutsResult
from numpyro_fed.results.communication import Communication
from numpyro_fed.results.corrected import Corrected
from numpyro_fed.results.importance import importance_correct
from numpyro_fed.results.mode import Mode
from numpyro_fed.results.particles import Particles
from numpyro_fed.results.posterior import Posterior
from numpyro_fed.results.pvi import PVIResult
from numpyro_fed.results.rows import Result
from numpyro_fed.results.tempered import Tempered
from numpyro_fed.results.vertical import VerticalResult
from numpyro_fed.runtime.federation import Federation
from numpyro_fed.sigma import fields
from numpyro_fed.sigma.prior import SigmaPrior
from numpyro_fed.sigma.relatives import BlockPrior, LowRankPrior, SeparatorPrior
from numpyro_fed.testing.decomposition import check_decomposition

__version__ = "0.1.0"

__all__ = [
    "BCM",
    "ELBO",
    "PVI",
    "SFVI",
    "SOUL",
    "VCL",
    "VFL",
    "AlphaEP",
    "BlockPrior",
    "CallbackError",
    "Communication",
    "Comparison",
    "ConvergenceWarning",
    "Corrected",
    "Cost",
    "DPNewton",
    "DataError",
    "DataWarning",
    "Facts",
    "FedGVI",
    "FederatedWarning",
    "Federation",
    "GlobalVI",
    "GuideError",
    "Interrupted",
    "Levels",
    "LocallyEnhanced",
    "LowRankPrior",
    "MissingExtraError",
    "Mode",
    "ModelComparison",
    "ModelError",
    "ModelWarning",
    "NonFiniteError",
    "NutsResult",
    "PVIResult",
    "Particles",
    "Plan",
    "Policy",
    "Posterior",
    "PowerEP",
    "Privacy",
    "PrivacyWarning",
    "PrivateResult",
    "Quadrature",
    "RefusedError",
    "ReplyError",
    "Result",
    "SFVIAvg",
    "Saved",
    "SavedStateError",
    "Scaling",
    "SeparatorPrior",
    "SigmaPrior",
    "Silo",
    "SiloAwayError",
    "SilosError",
    "Spent",
    "StartWarning",
    "StochasticPowerEP",
    "StreamingVB",
    "SumError",
    "Tempered",
    "VerticalResult",
    "barycenters",
    "cache_programs",
    "check_decomposition",
    "client_sum",
    "compare",
    "compare_models",
    "describe",
    "divergences",
    "expfam",
    "fields",
    "find_mode",
    "fit",
    "guides",
    "handlers",
    "importance_correct",
    "level_names",
    "levels",
    "load",
    "local",
    "losses",
    "moments",
    "network",
    "run_nuts",
    "schedules",
    "silo_plate",
    "testing",
]


# Completion in a notebook shows the public names alone, without modules and helpers.
def __dir__() -> list[str]:
    return __all__
