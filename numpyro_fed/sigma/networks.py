"""The networks of a SIGMA prior (arXiv 2405.16055, Appendix A), and linear paths beside them.

A hierarchical variational autoencoder: a global encoder maps a draw of the site to what all silos
share, local encoders map that to each block's latents, and decoders map both to its entries. The
linear paths are ours. They begin at principal components of draws, and a small network of the
hyperparameters mixes them. The paper's networks alone learn the middle of a range of
hyperparameters and not its ends (docs/results/sigma.md).
"""

from __future__ import annotations

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.basics.trees import Tree
from numpyro_fed.numerics import linalg

# The width of the network that makes a matrix of the hyperparameters. There are few of these, and
# its last layer already has size**2 outputs.
WIDTH_MIXING = 32
# The largest log variance of an encoder. A prior with heavy tails has draws far out, for which its
# exponential would overflow. An encoder that fits has variances below 1, far from the bound.
LARGEST = 10.0
# More shared latents than this are not mixed: at 300 the matrix has 90,000 entries, and the network
# of width 32 three million weights.
MIXED = 300
# The factor of the usual initial weights of a network beside a linear path: small, so that training
# begins at the linear path, and not zero, so that its gradients are not all zero.
BESIDE = 0.1


class Sizes(NamedTuple):
    """The sizes of the networks."""

    entries: int  # of the site
    hyper: int  # hyperparameters
    blocks: int
    largest: int  # entries of a block
    z_global: int  # latents that all silos share
    z_local: int  # and of each block's own
    width: int  # of hidden layers of the global encoder and decoder
    width_local: int  # and of the local encoders
    components: bool  # whether there are linear paths beside the networks
    encodes: bool  # whether there is a global encoder


class NormalEncoder(eqx.Module):
    """A network for the mean and log variance of a normal: two layers, and a head for each."""

    trunk: eqx.nn.MLP
    mean: eqx.nn.Linear
    log_variance: eqx.nn.Linear

    def __init__(self, inputs: int, outputs: int, width: int, key: Array):
        trunk, mean, variance = jax.random.split(key, 3)
        self.trunk = eqx.nn.MLP(inputs, width, width, 1, key=trunk)
        self.mean = eqx.nn.Linear(width, outputs, key=mean)
        self.log_variance = eqx.nn.Linear(width, outputs, key=variance)

    def __call__(self, x: Array) -> tuple[Array, Array]:
        """Return mean and log variance, (outputs,) each, for one input."""
        hidden = self.trunk(x)
        return self.mean(hidden), jnp.minimum(self.log_variance(hidden), LARGEST)


class Mixing(eqx.Module):
    """A square matrix that depends on hyperparameters: the identity plus a small network."""

    net: eqx.nn.MLP | None

    def __init__(self, size: int, hyper: int, key: Array):
        self.net = None
        if hyper and size <= MIXED:
            net = eqx.nn.MLP(hyper, size * size, WIDTH_MIXING, 1, jnp.tanh, key=key)
            self.net = eqx.tree_at(
                lambda n: (n.layers[-1].weight, n.layers[-1].bias), net, replace_fn=_smaller
            )

    def __call__(self, z: Array, phi: Array) -> Array:
        """Return the product of the matrix at ``phi`` with a vector ``z``."""
        return z if self.net is None else z + self.net(phi).reshape(len(z), len(z)) @ z


class Components(eqx.Module):
    """Linear paths beside the networks. They begin at the principal components of draws.

    A Gaussian prior is a linear function of standard normals, with a matrix that depends on the
    hyperparameters. A network that takes both as inputs is slow to learn such a product.
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

    def fitted(self, theta: Array, normals: Array | None, table: Array, noise: float) -> Components:
        """Return the paths at the probabilistic principal components of draws (draws, entries).

        They are those of Tipping and Bishop (1999), with the decoder's noise as the residual sd.
        Components with less variance than the noise begin near zero. With ``normals`` (draws,
        entries) they are at the best linear map from these to the draws.
        """
        if normals is not None:
            loadings = linalg.least_squares(normals, theta).T
            padded = jnp.append(loadings, jnp.zeros((1, len(self.inward))), 0)
            return eqx.tree_at(lambda c: c.outward, self, padded[table])
        size = len(self.inward)
        _, singular, axes = linalg.svd(theta)
        missing = max(size - len(singular), 0)
        variances = jnp.pad(singular**2 / len(theta), (0, missing))[:size]
        axes = jnp.pad(axes, ((0, missing), (0, 0)))[:size]
        # A hundredth of the noise's variance, not zero: a path that begins at zero in both
        # directions has a gradient of zero, and would stay there.
        beyond = jnp.maximum(variances - noise**2, 0.01 * noise**2)
        inward = (jnp.sqrt(beyond) / (beyond + noise**2))[:, None] * axes
        log_variance = jnp.log(noise**2 / (beyond + noise**2))
        # One row of zeros more, for the padding of blocks.
        outward = jnp.append(jnp.sqrt(beyond) * axes.T, jnp.zeros((1, size)), 0)[table]
        return eqx.tree_at(
            lambda c: (c.inward, c.log_variance, c.outward), self, (inward, log_variance, outward)
        )


class Networks(eqx.Module):
    """All networks of a prior: global encoder (or none) and decoder, stacks of local ones."""

    sizes: Sizes = eqx.field(static=True)
    encoder: NormalEncoder | None
    local_encoders: NormalEncoder
    decoder: eqx.nn.MLP
    local_decoders: eqx.nn.Linear
    components: Components | None

    def __init__(self, n: Sizes, key: Array):
        keys = jax.random.split(key, 5)
        inner = n.z_global + n.hyper

        self.sizes, self.encoder = n, None
        if n.encodes:
            self.encoder = NormalEncoder(n.entries + n.hyper, n.z_global, n.width, keys[0])
        self.decoder = eqx.nn.MLP(inner, n.width, n.width, 1, key=keys[1])
        encoders = eqx.filter_vmap(lambda key: NormalEncoder(inner, n.z_local, n.width_local, key))
        decoders = eqx.filter_vmap(
            lambda key: eqx.nn.Linear(n.width + n.z_local + n.hyper, n.largest, key=key)
        )
        self.local_encoders = encoders(jax.random.split(keys[2], n.blocks))
        self.local_decoders = decoders(jax.random.split(keys[3], n.blocks))
        self.components = Components(n, keys[4]) if n.components else None

    def initialised(
        self, theta: Array, normals: Array | None, table: Array, noise: float
    ) -> Networks:
        """Return small networks, with linear paths fitted to draws (draws, entries)."""
        if self.components is None:
            return self
        by_normals = normals if self.encoder is None else None
        components = self.components.fitted(theta, by_normals, table, noise)
        parts = (_smaller(self.local_decoders), components)
        initialised = eqx.tree_at(lambda n: (n.local_decoders, n.components), self, parts)
        if self.encoder is None:
            return initialised
        return eqx.tree_at(
            lambda n: (n.encoder.mean, n.encoder.log_variance), initialised, replace_fn=_smaller
        )

    def encode(self, theta: Array, phi: Array) -> tuple[Array, Array]:
        """Return mean and log variance of the shared latents (z_global,), given one draw."""
        if self.encoder is None:
            raise TypeError("these networks have no global encoder: what is shared is drawn.")
        mean, log_variance = self.encoder(jnp.concatenate([theta, phi]))
        if (c := self.components) is None:
            return mean, log_variance
        return mean + c.mix_in(c.inward @ theta, phi), log_variance + c.log_variance

    def encode_local(self, block: Array, z_G: Array, phi: Array) -> tuple[Array, Array]:
        """Return mean and log variance of a block's latents (z_local,), given the shared ones."""
        return _at(self.local_encoders, block)(jnp.concatenate([z_G, phi]))

    def decode(self, block: Array, z_G: Array, z_L: Array, phi: Array) -> Array:
        """Return a block's entries (largest,)."""
        hidden = self.decoder(jnp.concatenate([z_G, phi]))
        theta = _at(self.local_decoders, block)(jnp.concatenate([hidden, z_L, phi]))
        if (c := self.components) is None:
            return theta
        return theta + c.outward[block] @ c.mix_out(z_G, phi)


def _smaller(part: Tree) -> Tree:
    """Return a part of a network with all weights scaled by ``BESIDE``."""
    return jax.tree.map(lambda a: BESIDE * a, part)


def _at(stack: Tree, block: Array) -> Tree:
    """Return the network of one block from a stack of networks."""
    arrays, rest = eqx.partition(stack, eqx.is_array)
    return eqx.combine(jax.tree.map(lambda a: a[block], arrays), rest)
