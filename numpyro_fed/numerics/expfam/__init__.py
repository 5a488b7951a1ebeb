"""Exponential families of unconstrained vectors, by their natural parameters."""

from numpyro_fed.numerics.expfam.conjugate import beta, dirichlet, gamma
from numpyro_fed.numerics.expfam.family import Family, inner, product
from numpyro_fed.numerics.expfam.gaussian_family import gaussian

__all__ = [
    "Family",
    "beta",
    "dirichlet",
    "gamma",
    "gaussian",
    "inner",
    "product",
]


def __dir__() -> list[str]:
    return __all__
