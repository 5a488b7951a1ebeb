"""Whether two texts say the same: what they read from outside of themselves included."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_fed.model.data import SiloData, signature, written
from numpyro_fed.model.federated import FederatedModel
from numpyro_fed.model.jaxprs import Identity, Program, traced
from numpyro_fed.model.vertical import VerticalModel


def fingerprint(fm: FederatedModel, silos: Sequence[SiloData]) -> str:
    """A hash of a model's densities and sites as programs for silos of these shapes.

    Two calls of one function differ here when a variable that it reads has changed in between. It
    is the same in every process, but not under other versions of JAX or NumPyro, which write the
    same densities as other programs.
    """
    key, z_G = jax.random.key(0), jax.ShapeDtypeStruct((fm.dim,), jnp.result_type(float))
    theta = jax.eval_shape(fm.init_theta, key)
    programs = [
        traced(fm.init_theta, key),
        traced(fm.log_prior, theta, z_G),
        traced(fm.constrain_global, theta, z_G),
    ]
    for silo in {signature(silo): silo for silo in silos}.values():
        sizes = fm.sizes(silo)
        z_L = {p.name: jnp.zeros((sizes[p.name], p.dim)) for p in fm.plates}
        private = jax.eval_shape(fm.init_private, key, silo)
        programs.append(traced(fm.log_silo, {**theta, **private}, z_G, z_L, silo))
    return _hashed(repr((fm.sites, fm.plates, sorted(fm.supports))), programs)


def vertical_fingerprint(
    model: VerticalModel, server: SiloData, clients: Sequence[SiloData]
) -> str:
    """A hash of a vertical model in the same way, from what its parties hold."""
    key, real = jax.random.key(0), jnp.result_type(float)
    total = jax.ShapeDtypeStruct(model.shape, model.dtype)
    told = model.with_total(server, jnp.zeros(model.shape, model.dtype))
    theta = jax.eval_shape(model.server.init_theta, key, told)
    z = jax.ShapeDtypeStruct((model.server.dim,), real)
    programs = [traced(model.log_server, theta, z, total, server)]
    parties = {
        signature(data): (half, data) for half, data in zip(model.clients, clients, strict=True)
    }
    for half, data in parties.values():
        theta = jax.eval_shape(half.init_theta, key, data)
        z = jax.ShapeDtypeStruct((half.dim,), real)
        programs.append(traced(partial(model.predict, half), theta, z, data))
    halves = (model.server, *(half for half, _ in parties.values()))
    return _hashed(repr([(half.sites, sorted(half.supports)) for half in halves]), programs)


def source_hash(model: Callable[..., Any]) -> str:
    """A hash of the source of a model's function, comments included; empty where there is none.

    It says less than a :func:`fingerprint`, since it knows nothing of what the text reads from
    outside, but it is the same under all versions.
    """
    while (inner := getattr(model, "fn", None) or getattr(model, "func", None)) is not None:
        model = inner
    try:
        text = inspect.getsource(model if inspect.isroutine(model) else type(model))
    except (OSError, TypeError):
        return ""
    return hashlib.sha256(inspect.cleandoc(text).encode()).hexdigest()


def _hashed(words: str, programs: Iterable[Program]) -> str:
    found = hashlib.sha256(words.encode())
    for said in map(Identity.of, programs):
        found.update(said.words.encode())
        for number in said.numbers:
            found.update(written(number))
    return found.hexdigest()
