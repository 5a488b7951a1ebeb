"""The keys of a run: one for each round, exchange and participant.

The key of exchange ``e`` of step ``i`` is ``fold_in(key, i * exchanges + e)``. From it come the
server's key, ``fold_in(., 0)``, and that of silo ``j``, ``fold_in(., 1 + j)``. The last two numbers
of 32 bits give the keys of first states and of schedules, so that no key is used twice. Every
runtime takes its keys from here, which is why all give the same numbers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


def typed_key(key: object) -> Array:
    """Return a typed key, made from the older form of ``jax.random.PRNGKey`` if need be."""
    if isinstance(key, Array):
        if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.ndim == 0:
            return key
        if key.dtype == jnp.uint32 and key.ndim == 1:
            return jax.random.wrap_key_data(key)
    given = f"{key.dtype}{key.shape}" if isinstance(key, Array) else repr(key)
    raise TypeError(f"key must be one JAX key such as jax.random.key(0), got {given}.")


def exchange_key(key: Array, number: Array | int, exchange: int, exchanges: int) -> Array:
    """Return the key of exchange ``exchange`` of step ``number``, of ``exchanges`` in each step."""
    return jax.random.fold_in(key, number * exchanges + exchange)


def server_key(key_exchange: Array) -> Array:
    """Return the server's key for a round, from that of the round's first exchange."""
    return jax.random.fold_in(key_exchange, 0)


def silo_key(key_exchange: Array, silo: Array | int) -> Array:
    """Return a silo's key for an exchange: never another silo's, never the server's."""
    return jax.random.fold_in(key_exchange, 1 + silo)


def participant_keys(key_exchange: Array, silos: Array) -> tuple[Array, Array]:
    """Return the server's key and those of silos (n,), by one vectorised ``fold_in``."""
    server_and_silos = jnp.concatenate([jnp.zeros(1, silos.dtype), 1 + silos])
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key_exchange, server_and_silos)
    return keys[0], keys[1:]


def init_keys(key: Array) -> tuple[Array, Array]:
    """Return the keys of the first states of server and silos, which no round uses."""
    # A run would need 2**32 - 2 exchanges until one of them had this number.
    first, second = jax.random.split(jax.random.fold_in(key, np.uint32(2**32 - 1)))
    return first, second


def schedule_key(key: Array) -> Array:
    """Return the key of a run's schedule, which neither rounds nor first states use."""
    return jax.random.fold_in(key, np.uint32(2**32 - 2))


def generator(key: Array, *numbers: int) -> np.random.Generator:
    """Return NumPy's generator of what a server draws by itself, seeded by a key and numbers."""
    seed = np.asarray(jax.random.key_data(key)).ravel().tolist()
    return np.random.default_rng([*seed, *numbers])
