"""Whether two texts say the same: what they read from outside of themselves included."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from numpyro_fed.model.data import SiloData, signature
from numpyro_fed.model.split import FederatedModel
from numpyro_fed.model.vertical import VerticalModel

ADDRESS = re.compile(r"0x[0-9a-f]+")


def fingerprint(fm: FederatedModel, silos: Sequence[SiloData]) -> str:
    """A hash of a model's densities and sites as programs for silos of these shapes.

    Two calls of one function differ here when a variable that it reads has changed in between. It
    is the same in every process, but not under other versions of JAX or NumPyro, which write the
    same densities as other programs.
    """
    key, z_G = jax.random.key(0), jax.ShapeDtypeStruct((fm.dim,), jnp.result_type(float))
    theta = jax.eval_shape(fm.init_theta, key)
    programs = [
        jax.make_jaxpr(fm.init_theta)(key),
        jax.make_jaxpr(fm.log_prior)(theta, z_G),
        jax.make_jaxpr(fm.constrain_global)(theta, z_G),
    ]
    for silo in {signature(silo): silo for silo in silos}.values():
        sizes = fm.sizes(silo)
        z_L = {p.name: jnp.zeros((sizes[p.name], p.dim)) for p in fm.plates}
        private = jax.eval_shape(fm.init_private, key, silo)
        programs.append(jax.make_jaxpr(fm.log_silo)({**theta, **private}, z_G, z_L, silo))
    return _hashed(repr((fm.sites, fm.plates, sorted(fm.supports))), programs)


def vertical_fingerprint(
    model: VerticalModel, server: SiloData, clients: Sequence[SiloData]
) -> str:
    """The same of a vertical model, from what its parties hold."""
    key, real = jax.random.key(0), jnp.result_type(float)
    total = jax.ShapeDtypeStruct(model.shape, model.dtype)
    told = model.with_total(server, jnp.zeros(model.shape, model.dtype))
    theta = jax.eval_shape(model.server.init_theta, key, told)
    z = jax.ShapeDtypeStruct((model.server.dim,), real)
    programs = [jax.make_jaxpr(model.log_server)(theta, z, total, server)]
    parties = {
        signature(data): (half, data) for half, data in zip(model.clients, clients, strict=True)
    }
    for half, data in parties.values():
        theta = jax.eval_shape(half.init_theta, key, data)
        z = jax.ShapeDtypeStruct((half.dim,), real)
        programs.append(jax.make_jaxpr(partial(model.predict, half))(theta, z, data))
    halves = (model.server, *(half for half, _ in parties.values()))
    return _hashed(repr([(half.sites, sorted(half.supports)) for half in halves]), programs)


def source_hash(model: Callable) -> str:
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


def _hashed(words: str, programs: Iterable[ClosedJaxpr]) -> str:
    found = hashlib.sha256(words.encode())
    for program in programs:
        found.update(ADDRESS.sub("", str(program.jaxpr)).encode())
        for constant in _constants(program):
            a = np.asarray(constant)
            found.update(f"{a.dtype}{a.shape}".encode())
            found.update(a.tobytes())
    return found.hexdigest()


def _constants(program: ClosedJaxpr) -> Iterator[Any]:
    """Arrays that a program holds, those of programs within it included."""
    yield from program.consts
    yield from _within(program.jaxpr)


def _within(jaxpr: Jaxpr) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield from (v.val for v in equation.invars if isinstance(v, Literal))
        for part in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda a: isinstance(a, ClosedJaxpr | Jaxpr)
        ):
            if isinstance(part, ClosedJaxpr):
                yield from _constants(part)
            elif isinstance(part, Jaxpr):
                yield from _within(part)
