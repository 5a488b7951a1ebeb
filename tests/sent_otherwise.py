"""Algorithms whose silos send something else than what they computed, and bytes like noise."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.rounds.exchange import FederatedAlgorithm


def sent_otherwise(
    algorithm: FederatedAlgorithm, change: Callable[[Any], Any]
) -> FederatedAlgorithm:
    """Return the algorithm whose replies in a round are ``change(up)``."""

    def changed(exchange):
        def silo(noise, down, state, data):
            reply, draft = exchange.silo(noise, down, state, data)
            return reply._replace(up=change(reply.up)), draft

        return replace(exchange, silo=silo)

    exchanges = tuple(map(changed, algorithm.round.exchanges))
    return algorithm._replace(round=replace(algorithm.round, exchanges=exchanges))


def on_grid(step: float) -> Callable[[Any], Any]:
    """Return a function that rounds all real numbers of a reply to multiples of ``step``."""

    def rounded(a):
        return jnp.round(a / step) * step if jnp.issubdtype(a.dtype, jnp.floating) else a

    return lambda up: jax.tree.map(rounded, up)


def chi_squared(data):
    """The statistic of 256 equally likely bytes, standardised."""
    counts = np.bincount(np.frombuffer(data, np.uint8), minlength=256)
    expected = len(data) / 256
    return (((counts - expected) ** 2).sum() / expected - 255) / np.sqrt(2 * 255)
