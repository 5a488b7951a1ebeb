"""Between hospitals: silos in processes of their own, and the engines that carry their bytes.

May import everything; imported by nothing.
"""

from numpyro_fed.network.engines import Folder, InMemory, Sockets
from numpyro_fed.network.flare import Flare
from numpyro_fed.network.silo import Silo
from numpyro_fed.rounds.envelopes import PrivateKey

__all__ = ["Flare", "Folder", "InMemory", "PrivateKey", "Silo", "Sockets"]


def __dir__() -> list[str]:
    return __all__
