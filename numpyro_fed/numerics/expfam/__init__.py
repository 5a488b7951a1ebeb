"""Exponential families of unconstrained vectors, by their natural parameters."""

from numpyro_fed.numerics.expfam.conjugate import beta, categorical, dirichlet, gamma
from numpyro_fed.numerics.expfam.family import Family, inner, kl, log_density, marginal, product
from numpyro_fed.numerics.expfam.gaussian_family import gaussian

__all__ = [
    "Family",
    "beta",
    "categorical",
    "dirichlet",
    "gamma",
    "gaussian",
    "inner",
    "kl",
    "log_density",
    "marginal",
    "product",
]


def __dir__() -> list[str]:
    return __all__
