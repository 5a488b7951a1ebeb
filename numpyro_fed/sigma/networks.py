"""The networks of a SIGMA prior (arXiv 2405.16055, Appendix A)."""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array


class Sizes(NamedTuple):
    """Of the networks.

    Attributes
    ----------
    entries, hyper : int
        Of the site, and of its hyperparameters.
    blocks, largest : int
        How many blocks there are, and the size of the largest.
    z_global, z_local : int
        Latents that all silos share, and of each block.
    width, width_local : int
        Of hidden layers: of the global encoder and decoder, and of the local encoders.
    """

    entries: int
    hyper: int
    blocks: int
    largest: int
    z_global: int
    z_local: int
    width: int
    width_local: int


class Encoder(eqx.Module):
    """Mean and log variance of a normal: one hidden layer, a linear one, and a head for each."""

    trunk: eqx.nn.MLP
    mean: eqx.nn.Linear
    log_variance: eqx.nn.Linear

    def __init__(self, inputs: int, outputs: int, width: int, key: Array):
        trunk, mean, variance = jax.random.split(key, 3)
        self.trunk = eqx.nn.MLP(inputs, width, width, 1, key=trunk)
        self.mean = eqx.nn.Linear(width, outputs, key=mean)
        self.log_variance = eqx.nn.Linear(width, outputs, key=variance)

    def __call__(self, x: Array) -> tuple[Array, Array]:
        """Of one input."""
        hidden = self.trunk(x)
        return self.mean(hidden), self.log_variance(hidden)


class Networks(eqx.Module):
    """Global encoder and decoder, and stacks of local ones, one for each block."""

    encoder: Encoder
    local_encoders: Encoder
    decoder: eqx.nn.MLP
    local_decoders: eqx.nn.Linear

    def __init__(self, n: Sizes, key: Array):
        keys = jax.random.split(key, 4)
        inner = n.z_global + n.hyper

        def local_encoder(key: Array) -> Encoder:
            return Encoder(inner, n.z_local, n.width_local, key)

        def local_decoder(key: Array) -> eqx.nn.Linear:
            return eqx.nn.Linear(n.width + n.z_local + n.hyper, n.largest, key=key)

        self.encoder = Encoder(n.entries + n.hyper, n.z_global, n.width, keys[0])
        self.decoder = eqx.nn.MLP(inner, n.width, n.width, 1, key=keys[1])
        self.local_encoders = eqx.filter_vmap(local_encoder)(jax.random.split(keys[2], n.blocks))
        self.local_decoders = eqx.filter_vmap(local_decoder)(jax.random.split(keys[3], n.blocks))

    def encode(self, theta: Array, phi: Array) -> tuple[Array, Array]:
        """Mean and log variance of what all silos share, given a draw (entries,)."""
        return self.encoder(jnp.concatenate([theta, phi]))

    def encode_local(self, block: Array, z_G: Array, phi: Array) -> tuple[Array, Array]:
        """The same of a block's own latents: they see what is shared, and no draw."""
        return _at(self.local_encoders, block)(jnp.concatenate([z_G, phi]))

    def decode(self, block: Array, z_G: Array, z_L: Array, phi: Array) -> Array:
        """A block's entries (largest,)."""
        hidden = self.decoder(jnp.concatenate([z_G, phi]))
        return _at(self.local_decoders, block)(jnp.concatenate([hidden, z_L, phi]))


def _at(stack: Any, block: Array) -> Any:
    """One of a stack of networks."""
    arrays, rest = eqx.partition(stack, eqx.is_array)
    return eqx.combine(jax.tree.map(lambda a: a[block], arrays), rest)
