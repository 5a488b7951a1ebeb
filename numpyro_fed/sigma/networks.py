"""The networks of a SIGMA prior (arXiv 2405.16055, Appendix A)."""

from __future__ import annotations

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed import linalg
from numpyro_fed.trees import Tree

WIDTH_MIXING = 32
LARGEST = 10.0  # log variance: draws far out must not overflow
MIXED = 300  # shared latents, more of which are not mixed
BESIDE = 0.1  # of the usual weights, where a network begins beside a linear path


class Sizes(NamedTuple):
    """The sizes of the networks.

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
    components : bool
        Whether there are linear paths beside the networks.
    encodes : bool
        Whether there is a global encoder.
    """

    entries: int
    hyper: int
    blocks: int
    largest: int
    z_global: int
    z_local: int
    width: int
    width_local: int
    components: bool
    encodes: bool


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
        """Return mean and log variance, given one input."""
        hidden = self.trunk(x)
        return self.mean(hidden), jnp.minimum(self.log_variance(hidden), LARGEST)


class Mixing(eqx.Module):
    """A linear map that depends on hyperparameters: the identity and what a small network adds."""

    net: eqx.nn.MLP | None

    def __init__(self, size: int, hyper: int, key: Array):
        self.net = None
        if hyper and size <= MIXED:
            net = eqx.nn.MLP(hyper, size * size, WIDTH_MIXING, 1, jnp.tanh, key=key)
            self.net = eqx.tree_at(
                lambda n: (n.layers[-1].weight, n.layers[-1].bias), net, replace_fn=_smaller
            )

    def __call__(self, z: Array, phi: Array) -> Array:
        """Return what the map makes of one vector."""
        return z if self.net is None else z + self.net(phi).reshape(len(z), len(z)) @ z


class Components(eqx.Module):
    """Linear paths beside the networks, which begin at the principal components of draws.

    A Gaussian prior is linear in standard normals; only the map depends on hyperparameters, which
    a network whose inputs are both at once is slow to learn.
    """

    inward: Array
    log_variance: Array
    outward: Array
    mix_in: Mixing
    mix_out: Mixing

    def __init__(self, n: Sizes, key: Array):
        self.inward = jnp.zeros((n.z_global, n.entries))
        self.log_variance = jnp.zeros(n.z_global)
        self.outward = jnp.zeros((n.blocks, n.largest, n.z_global))
        for_in, for_out = jax.random.split(key)
        self.mix_in = Mixing(n.z_global, n.hyper, for_in)
        self.mix_out = Mixing(n.z_global, n.hyper, for_out)

    def of_draws(self, theta: Array, table: Array, noise: float) -> Components:
        """Return probabilistic principal components (Tipping and Bishop 1999) of draws (draws,
        entries), of which those of less variance than the decoder's noise begin near zero.
        """
        size = len(self.inward)
        _, singular, axes = linalg.svd(theta)
        short = max(size - len(singular), 0)
        variances = jnp.pad(singular**2 / len(theta), (0, short))[:size]
        axes = jnp.pad(axes, ((0, short), (0, 0)))[:size]
        beyond = jnp.maximum(variances - noise**2, 0.01 * noise**2)
        inward = (jnp.sqrt(beyond) / (beyond + noise**2))[:, None] * axes
        log_variance = jnp.log(noise**2 / (beyond + noise**2))
        return self._at(inward, log_variance, jnp.sqrt(beyond) * axes.T, table)

    def of_normals(self, theta: Array, made_of: Array, table: Array) -> Components:
        """Return the linear map nearest to draws of the normals that they are made of, both (draws,
        entries).
        """
        loadings = linalg.least_squares(made_of, theta).T
        return self._at(self.inward, self.log_variance, loadings, table)

    def _at(self, inward: Array, log_variance: Array, loadings: Array, table: Array) -> Components:
        outward = jnp.append(loadings, jnp.zeros((1, len(inward))), 0)[table]
        return eqx.tree_at(
            lambda c: (c.inward, c.log_variance, c.outward), self, (inward, log_variance, outward)
        )


class Networks(eqx.Module):
    """Global encoder (or none) and decoder, and stacks of local ones, one for each block."""

    sizes: Sizes = eqx.field(static=True)
    encoder: Encoder | None
    local_encoders: Encoder
    decoder: eqx.nn.MLP
    local_decoders: eqx.nn.Linear
    components: Components | None

    def __init__(self, n: Sizes, key: Array):
        keys = jax.random.split(key, 5)
        inner = n.z_global + n.hyper

        def local_encoder(key: Array) -> Encoder:
            return Encoder(inner, n.z_local, n.width_local, key)

        def local_decoder(key: Array) -> eqx.nn.Linear:
            return eqx.nn.Linear(n.width + n.z_local + n.hyper, n.largest, key=key)

        self.sizes, self.encoder = n, None
        if n.encodes:
            self.encoder = Encoder(n.entries + n.hyper, n.z_global, n.width, keys[0])
        self.decoder = eqx.nn.MLP(inner, n.width, n.width, 1, key=keys[1])
        self.local_encoders = eqx.filter_vmap(local_encoder)(jax.random.split(keys[2], n.blocks))
        self.local_decoders = eqx.filter_vmap(local_decoder)(jax.random.split(keys[3], n.blocks))
        self.components = Components(n, keys[4]) if n.components else None

    def begun(self, theta: Array, made_of: Array | None, table: Array, noise: float) -> Networks:
        """Begin at the principal components of draws (draws, entries), or at the best linear map of
        the normals that they are made of, and networks at little beside them.
        """
        if self.components is None:
            return self
        if made_of is not None and self.encoder is None:
            components = self.components.of_normals(theta, made_of, table)
        else:
            components = self.components.of_draws(theta, table, noise)
        new = (_smaller(self.local_decoders), components)
        begun = eqx.tree_at(lambda n: (n.local_decoders, n.components), self, new)
        if self.encoder is None:
            return begun
        return eqx.tree_at(
            lambda n: (n.encoder.mean, n.encoder.log_variance), begun, replace_fn=_smaller
        )

    def encode(self, theta: Array, phi: Array) -> tuple[Array, Array]:
        """Return mean and log variance of what all silos share, given a draw (entries,)."""
        if self.encoder is None:
            raise TypeError("these networks have no global encoder: what is shared is drawn.")
        mean, log_variance = self.encoder(jnp.concatenate([theta, phi]))
        if (c := self.components) is None:
            return mean, log_variance
        return mean + c.mix_in(c.inward @ theta, phi), log_variance + c.log_variance

    def encode_local(self, block: Array, z_G: Array, phi: Array) -> tuple[Array, Array]:
        """Return the same of a block's own latents: they see what is shared, and no draw."""
        return _at(self.local_encoders, block)(jnp.concatenate([z_G, phi]))

    def decode(self, block: Array, z_G: Array, z_L: Array, phi: Array) -> Array:
        """Return a block's entries (largest,)."""
        hidden = self.decoder(jnp.concatenate([z_G, phi]))
        theta = _at(self.local_decoders, block)(jnp.concatenate([hidden, z_L, phi]))
        if (c := self.components) is None:
            return theta
        return theta + c.outward[block] @ c.mix_out(z_G, phi)


def _smaller(part: Tree) -> Tree:
    """Return a part of a network whose output begins near zero."""
    return jax.tree.map(lambda a: BESIDE * a, part)


def _at(stack: Tree, block: Array) -> Tree:
    """Return one of a stack of networks."""
    arrays, rest = eqx.partition(stack, eqx.is_array)
    return eqx.combine(jax.tree.map(lambda a: a[block], arrays), rest)
