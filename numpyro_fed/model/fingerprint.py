"""Hashes of models, by which two model texts are recognised as the same.

A fingerprint is a hash of the traced programs of a model's log densities. It covers what the text
reads from outside of itself (global variables, closures), which the source alone does not show.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_fed.model.data import SiloData, array_bytes, signature
from numpyro_fed.model.jaxprs import Identity, Program, trace_program
from numpyro_fed.model.log_density import FederatedModel
from numpyro_fed.model.vertical import VerticalModel


def fingerprint(fm: FederatedModel, silos: Sequence[SiloData]) -> str:
    """Return a hash of a model's log densities and sites, as programs for silos of these shapes.

    The hashes of one function differ when a variable that it reads has changed in between. The
    hash is the same in every process, but not under other versions of JAX or NumPyro, which trace
    the same densities to other programs.
    """
    key, z_G = jax.random.key(0), jax.ShapeDtypeStruct((fm.dim,), jnp.result_type(float))
    theta = jax.eval_shape(fm.init_theta, key)
    programs = [
        trace_program(fm.init_theta, key),
        trace_program(fm.log_prior, theta, z_G),
        # The density may stay as it is where a transform or a deterministic site has changed.
        trace_program(fm.constrain_global, theta, z_G),
    ]
    for silo in {signature(silo): silo for silo in silos}.values():
        sizes = fm.sizes(silo)
        z_L = {p.name: jnp.zeros((sizes[p.name], p.dim)) for p in fm.plates}
        private = jax.eval_shape(fm.init_private, key, silo)
        programs.append(trace_program(fm.log_silo, {**theta, **private}, z_G, z_L, silo))
    return _hashed(repr((fm.sites, fm.plates, sorted(fm.supports))), programs)


def vertical_fingerprint(
    model: VerticalModel, server: SiloData, clients: Sequence[SiloData]
) -> str:
    """Return a hash of a vertical model's log densities, for parties with data of these shapes."""
    key, real = jax.random.key(0), jnp.result_type(float)
    total = jax.ShapeDtypeStruct(model.shape, model.dtype)
    with_total = model.with_total(server, jnp.zeros(model.shape, model.dtype))
    theta = jax.eval_shape(model.server.init_theta, key, with_total)
    z = jax.ShapeDtypeStruct((model.server.dim,), real)
    programs = [trace_program(model.log_server, theta, z, total, server)]
    by_signature = {
        signature(data): (party, data) for party, data in zip(model.clients, clients, strict=True)
    }
    for party, data in by_signature.values():
        theta = jax.eval_shape(party.init_theta, key, data)
        z = jax.ShapeDtypeStruct((party.dim,), real)
        programs.append(trace_program(partial(model.predict, party), theta, z, data))
    parties = (model.server, *(party for party, _ in by_signature.values()))
    return _hashed(repr([(party.sites, sorted(party.supports)) for party in parties]), programs)


def source_hash(model: Callable[..., Any]) -> str:
    """Return a hash of the source of a model's function, comments included; empty if unavailable.

    It covers less than a :func:`fingerprint`: nothing of what the text reads from outside. But it
    is the same under all versions of JAX and NumPyro.
    """
    # Handlers keep the model that they wrap in .fn, functools.partial in .func.
    while (inner := getattr(model, "fn", None) or getattr(model, "func", None)) is not None:
        model = inner
    try:
        text = inspect.getsource(model if inspect.isroutine(model) else type(model))
    except (OSError, TypeError):
        return ""
    return hashlib.sha256(inspect.cleandoc(text).encode()).hexdigest()


def _hashed(words: str, programs: Iterable[Program]) -> str:
    digest = hashlib.sha256(words.encode())
    for identity in map(Identity.of, programs):
        digest.update(identity.words.encode())
        for number in identity.numbers:
            digest.update(array_bytes(number))
    return digest.hexdigest()
