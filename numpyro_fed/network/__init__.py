"""Between hospitals: silos in processes of their own, and the engines that carry their bytes.

May import everything; imported by nothing.
"""

from numpyro_fed.network.engines import InMemory, Sockets
from numpyro_fed.network.flare import Flare
from numpyro_fed.network.silo import Silo

__all__ = ["Flare", "InMemory", "Silo", "Sockets"]


def __dir__() -> list[str]:
    return __all__
