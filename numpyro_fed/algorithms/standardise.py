"""Rounds that find the means and standard deviations of encoders' inputs, over all silos' rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from numpyro_fed.algorithms.base import Ask, Exchange, Info, Reply, Round, Silo
from numpyro_fed.guides.structured import Guide
from numpyro_fed.model.data import SiloData
from numpyro_fed.trees import all_finite


class InputSums(NamedTuple):
    """Sums over a silo's rows: their number (), and a sum (width,) for each input of a network."""

    number: Array
    total: Array


def standardising(guide: Guide) -> tuple[Round, ...]:
    """Return the two opening rounds of a guide with networks, or none.

    In the first, silos send sums of the inputs; in the second, sums of squared deviations from the
    mean of all silos. One round with sums of squares would do, but would lose the variance of
    numbers far from zero to rounding.
    """
    if not any(encoder.standardises for encoder in guide.encoders.values()):
        return ()
    return _round(guide, "means", 1), _round(guide, "deviations", 2)


def _round(guide: Guide, name: str, power: int) -> Round:
    """Return the round for means of a power of the inputs, measured from the shift so far."""

    def silo(
        noise: object, down: dict[str, Array], state: Silo, data: SiloData
    ) -> tuple[Reply[dict[str, InputSums]], Silo]:
        sums: dict[str, InputSums] = {}
        for plate, encoder in guide.encoders.items():
            if encoder.standardises:
                x = encoder.features(data) - down[encoder.name]
                number = data.masked(plate, jnp.ones(len(x))).sum()
                sums[encoder.name] = InputSums(number, data.masked(plate, x**power).sum(0))
        return Reply(sums, all_finite(sums)), state

    def run(state: Any, noise: object, ask: Ask) -> tuple[Any, Info]:
        theta = dict(state.params.theta)
        names = [e.name for e in guide.encoders.values() if e.standardises]
        replies = ask(name, {encoder: theta[encoder]["shift"] for encoder in names})
        for encoder, sums in replies.up.items():
            mean = sums.total / sums.number
            # A constant input has no deviation: it is left in its own units.
            sd = jnp.where(mean > 0, jnp.sqrt(jnp.abs(mean)), 1.0)
            units = {"shift": mean} if power == 1 else {"scale": sd}
            theta[encoder] = theta[encoder] | units
        after = state._replace(params=state.params._replace(theta=theta))
        return after, Info(jnp.zeros(()), jnp.array(True))

    return Round((Exchange(name, silo),), run)
