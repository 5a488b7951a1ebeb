"""The opening rounds in which silos standardise the inputs of a guide's networks."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from numpyro_fed.basics.trees import all_finite
from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.guides.guide import Guide
from numpyro_fed.rounds.exchange import Ask, Exchange, Info, Reply, Round
from numpyro_fed.rounds.names import DEVIATIONS, MEANS
from numpyro_fed.sfvi.base import SiloParts


def standardising_rounds(guide: Guide) -> tuple[Round, ...]:
    """Return the two opening rounds of a guide with networks, or none.

    In the first, silos send sums of the inputs; in the second, sums of squared deviations from the
    mean of all silos. One round with sums of squares would do, but would lose the variance of
    numbers far from zero to rounding.
    """
    encoders = [e for e in guide.encoders.values() if e.standardises]

    def round_of(name: str, power: int) -> Round:
        """Return the round for means of a power of the inputs, measured from the shift so far."""

        def silo(
            noise: object, down: dict[str, Array], state: SiloParts, data: SiloData
        ) -> tuple[Reply[dict[str, tuple[Array, Array]]], SiloParts]:
            sums: dict[str, tuple[Array, Array]] = {}
            for encoder in encoders:
                x = encoder.features(data) - down[encoder.name]
                number = data.masked(encoder.plate, jnp.ones(len(x))).sum()
                sums[encoder.name] = number, data.masked(encoder.plate, x**power).sum(0)
            return Reply(sums, all_finite(sums)), state

        def run(state: Any, noise: object, ask: Ask) -> tuple[Any, Info]:
            theta = dict(state.params.theta)
            replies = ask(name, {e.name: theta[e.name]["shift"] for e in encoders})
            for encoder, (number, total) in replies.up.items():
                mean = total / number
                # A constant input has no deviation: it is left in its own units.
                sd = jnp.where(mean > 0, jnp.sqrt(jnp.abs(mean)), 1.0)
                theta[encoder] = theta[encoder] | ({"shift": mean} if power == 1 else {"scale": sd})
            after = state._replace(params=state.params._replace(theta=theta))
            return after, Info(jnp.zeros(()), jnp.array(True))

        return Round((Exchange(name, silo),), run)

    return (round_of(MEANS, 1), round_of(DEVIATIONS, 2)) if encoders else ()
