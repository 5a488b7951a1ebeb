"""Federated Bayesian inference for ordinary NumPyro models."""

from numpyro_fed import guides, local, network, testing
from numpyro_fed.basics.errors import (
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
from numpyro_fed.basics.programs import cache_programs
from numpyro_fed.basics.threads import make_pool_large_enough
from numpyro_fed.basics.version import VERSION
from numpyro_fed.bayes_admm.method import BayesADMM
from numpyro_fed.data.descriptions import SiloDescriptions
from numpyro_fed.data.scaling import Scaling
from numpyro_fed.data.tables import Levels, level_names
from numpyro_fed.dp_newton.method import DPNewton, PrivateResult
from numpyro_fed.fedlap.method import FedLap
from numpyro_fed.fitting.fit import find_mode, fit
from numpyro_fed.fitting.load import Saved, load
from numpyro_fed.formulas.formula import formula
from numpyro_fed.guides.objectives import ELBO, LocallyEnhanced, Quadrature
from numpyro_fed.methods.columns import describe_silos, levels, moments
from numpyro_fed.network.policy import Policy
from numpyro_fed.network.silo import Silo
from numpyro_fed.numerics import barycenters, divergences, expfam, losses
from numpyro_fed.posterior.corrected import Corrected
from numpyro_fed.posterior.importance import importance_correct
from numpyro_fed.posterior.particles import Particles, Tempered
from numpyro_fed.posterior.posterior import Posterior
from numpyro_fed.posterior.result import Result
from numpyro_fed.posterior.run import Communication, Cost
from numpyro_fed.privacy.budget import Privacy, PrivacyWarning, Spent
from numpyro_fed.pvi.method import PVI
from numpyro_fed.pvi.recipes import (
    BCM,
    VCL,
    AlphaEP,
    FedGVI,
    GlobalVI,
    PowerEP,
    StochasticPowerEP,
    StreamingVB,
)
from numpyro_fed.pvi.result import PVIResult
from numpyro_fed.reference.compare import Comparison, ModelComparison, compare, compare_models
from numpyro_fed.reference.nuts import run_nuts
from numpyro_fed.reference.nuts_result import NutsResult
from numpyro_fed.rounds import schedules
from numpyro_fed.rounds.federation import Federation
from numpyro_fed.search.mode import Mode
from numpyro_fed.sfvi.method import SFVI, SFVIAvg
from numpyro_fed.sigma import fields
from numpyro_fed.sigma.closed_forms import BlockPrior, LowRankPrior, SeparatorPrior
from numpyro_fed.sigma.prior import SigmaPrior
from numpyro_fed.testing.decomposition import check_decomposition
from numpyro_fed.text import handlers
from numpyro_fed.text.clients import client_sum
from numpyro_fed.text.plan import Facts, Plan, describe
from numpyro_fed.text.silo_plate import silo_plate
from numpyro_fed.vertical.result import VerticalResult
from numpyro_fed.vertical.soul import SOUL
from numpyro_fed.vertical.vfl import VFL

# Before the imports below: the first array that JAX makes fixes the size of its pool.
make_pool_large_enough()


__version__ = VERSION

__all__ = [
    "BCM",
    "ELBO",
    "PVI",
    "SFVI",
    "SOUL",
    "VCL",
    "VFL",
    "AlphaEP",
    "BayesADMM",
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
    "FedLap",
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
    "SiloDescriptions",
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
    "describe_silos",
    "divergences",
    "expfam",
    "fields",
    "find_mode",
    "fit",
    "formula",
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
