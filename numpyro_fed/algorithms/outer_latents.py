"""The exchange in which silos tell draws of the latents that their rows share (outer plates).

A hospital's effect says how the hospital is. So a silo tells it only if its owner allows that.
Latents of rows are drawn with it, and stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.algorithms.base import (
    OUTER_LATENTS,
    Ask,
    Combine,
    Exchange,
    FederatedAlgorithm,
    Info,
    Reply,
    Round,
)
from numpyro_fed.algorithms.sfvi import Down, down_of
from numpyro_fed.errors import ModelError
from numpyro_fed.guides.structured import Guide
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.log_density import FederatedModel
from numpyro_fed.model.sites import Site

# The arrays of the server's data: draws of the globals (n, dim), and the words of a key a silo.
DRAWS, KEYS = "draws", "keys"


class LatentsQuestion(NamedTuple):
    """A message of the server: draws of the globals, and the words of the silo's key.

    It is the key with which a run in one process draws the silo's latents.
    """

    draws: Down
    keys: Array


class SharedLatents(NamedTuple):
    """The reply of a silo to the question for its shared latents.

    ``values`` dict of str to array: The draws of each latent of an outer plate, (n, ...), on its
        support. Zeros follow those of the silo, up to a number of rows that is the same for all
        silos.
    ``rows`` dict of str to int array (): The number of rows of each outer plate at the silo.
    """

    values: dict[str, Array]
    rows: dict[str, Array]


def outer_sites(fm: FederatedModel) -> list[Site]:
    """Return the latents that rows of several plates share: of hospitals, not patients."""
    return [s for p in fm.plates if p.outer for s in fm.named("latent", p.name)]


def outer_latents(
    fm: FederatedModel,
    guide: Guide,
    draw: Callable[[Array, Down, Any, SiloData], dict[str, Array]],
    fitted: FederatedAlgorithm[Any, Any],
    num_draws: int,
    num_silos: int,
    rows: Mapping[str, int],
    settings: str,
) -> Round:
    """Return the round that leads from a run's state to what all silos have :class:`SharedLatents`.

    The server's data have the arrays :data:`DRAWS` and :data:`KEYS`.

    ``draw``, ``(key, down, silo_state, data) -> {site: (n, ...)}``: Draws of a silo's latents on
        their supports.
    ``rows``: The length to which replies are filled up, for each outer plate.
    """
    sites = outer_sites(fm)

    def silo(
        noise: object, down: LatentsQuestion, state: Any, data: SiloData
    ) -> tuple[Reply[SharedLatents], Any]:
        found = draw(jax.random.wrap_key_data(down.keys), down.draws, state, data)
        sizes = fm.sizes(data)
        values: dict[str, Array] = {}
        for s in sites:
            draws, axis = found[s.name], 1 + (s.axis or 0)
            more = rows[str(s.plate)] - draws.shape[axis]
            if more < 0:
                raise ModelError(
                    f"'{s.name}' has {draws.shape[axis]} rows here, and the server expects at most "
                    f"{rows[str(s.plate)]}. Server and silos must have agreed on the same plan."
                )
            pads = [(0, more if i == axis else 0) for i in range(draws.ndim)]
            values[s.name] = jnp.pad(draws, pads)
        plates = {str(s.plate): jnp.asarray(sizes[str(s.plate)]) for s in sites}
        return Reply(SharedLatents(values, plates), jnp.array(True)), state

    def run(state: Any, noise: object, ask: Ask) -> tuple[SharedLatents, Info]:
        words = jax.random.key_data(jax.random.key(0)).shape
        z_G, keys = jnp.zeros((num_draws, fm.dim)), jnp.zeros((num_silos, *words), jnp.uint32)
        if ask.server_data is not None:
            z_G, keys = (ask.server_data.arrays[name] for name in (DRAWS, KEYS))
        down = LatentsQuestion(down_of(guide, fitted.shared(state), z_G), keys)
        told: SharedLatents = ask(OUTER_LATENTS, down).up
        return told, Info(jnp.zeros(()), jnp.array(True))

    prefix: Any = (False, True)  # each silo gets its own key
    exchange = Exchange(
        OUTER_LATENTS,
        silo,
        combine=Combine.GATHER,
        scatter=LatentsQuestion(*prefix),
        settings=settings,
    )
    return Round((exchange,), run)
