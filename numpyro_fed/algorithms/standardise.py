"""What a network reads of rows, in units that fit: means and deviations over all silos' rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from numpyro_fed.algorithms.base import Exchange, Info, Replies, Reply
from numpyro_fed.guides.structured import Guide
from numpyro_fed.model.data import SiloData
from numpyro_fed.trees import all_finite


class Sums(NamedTuple):
    """Over a silo's rows: how many, and of each number that a network reads."""

    number: Array
    total: Array


def standardising(guide: Guide) -> tuple[Exchange, ...]:
    """The exchanges before the first round, where a network is to be fed: silos add up what it
    reads, and then squares of how far that is from the mean, which keeps the digits of numbers
    that are far from zero.
    """
    if not any(encoder.standardises for encoder in guide.encoders.values()):
        return ()
    return _exchange(guide, "means", 1), _exchange(guide, "deviations", 2)


def _exchange(guide: Guide, name: str, power: int) -> Exchange:
    """Means of a power of what is read, measured from the shift so far."""

    def ask(noise: Any, state: Any, who: Array, server_data: Any) -> tuple[dict, tuple]:
        theta = state.params["theta"]
        fed = [e.name for e in guide.encoders.values() if e.standardises]
        return {name: theta[name]["shift"] for name in fed}, ()

    def silo(
        noise: Any, down: dict[str, Array], state: Any, data: SiloData
    ) -> tuple[Reply[dict[str, Sums]], Any]:
        sums: dict[str, Sums] = {}
        for plate, encoder in guide.encoders.items():
            if encoder.standardises:
                x = encoder.features(data) - down[encoder.name]
                number = data.keep(plate, jnp.ones(len(x))).sum()
                sums[encoder.name] = Sums(number, data.keep(plate, x**power).sum(0))
        return Reply(sums, all_finite(sums)), state

    def server(
        state: Any, memo: tuple, replies: Replies[dict[str, Sums]], server_data: Any
    ) -> tuple[Any, Info]:
        theta = dict(state.params["theta"])
        for name, sums in replies.up.items():
            mean = sums.total / sums.number
            spread = jnp.where(mean > 0, jnp.sqrt(jnp.abs(mean)), 1.0)
            theta[name] = theta[name] | ({"shift": mean} if power == 1 else {"scale": spread})
        after = state._replace(params={**state.params, "theta": theta})
        return after, Info(jnp.zeros(()), replies.ok)

    return Exchange(ask, silo, server, name=name)
