"""A tool to test your own models: the check that a density decomposes over silos and rows."""

from numpyro_fed.testing.decomposition import check_decomposition

__all__ = ["check_decomposition"]


def __dir__() -> list[str]:
    return __all__
