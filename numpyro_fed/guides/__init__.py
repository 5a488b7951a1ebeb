"""Guides (variational distributions) as functions of their parameters and explicit noise."""

from numpyro_fed.guides.local_guides import Amortised
from numpyro_fed.guides.structured import MeanField, Structured

__all__ = ["Amortised", "MeanField", "Structured"]


def __dir__() -> list[str]:
    return __all__
