"""Between hospitals: silos in processes of their own, and the engines that carry their bytes.

May import everything; imported by nothing.
"""

from numpyro_fed.network.flare import Flare
from numpyro_fed.network.memory import InMemory
from numpyro_fed.network.silo import Silo
from numpyro_fed.network.sockets import Sockets

__all__ = ["Flare", "InMemory", "Silo", "Sockets"]


def __dir__() -> list[str]:
    return __all__
