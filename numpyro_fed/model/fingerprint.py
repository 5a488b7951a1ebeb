"""Whether two texts say the same: what they read from outside of themselves included."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from numpyro_fed.model.data import SiloData, signature
from numpyro_fed.model.split import FederatedModel

ADDRESS = re.compile(r"0x[0-9a-f]+")


def fingerprint(fm: FederatedModel, silos: Sequence[SiloData]) -> str:
    """A hash of a model's densities and sites as programs for silos of these shapes.

    Two calls of one function differ here when a variable that it reads has changed in between.
    """
    found = hashlib.sha256(repr((fm.sites, fm.plates, sorted(fm.supports))).encode())
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
