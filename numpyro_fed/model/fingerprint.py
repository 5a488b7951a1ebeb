"""Whether two texts say the same: what they read from outside of themselves included."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.model.data import SiloData, signature
from numpyro_fed.model.jaxprs import constants, traced
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
        traced(fm.init_theta, key),
        traced(fm.log_prior, theta, z_G),
        traced(fm.constrain_global, theta, z_G),
    ]
    for silo in {signature(silo): silo for silo in silos}.values():
        sizes = fm.sizes(silo)
        z_L = {p.name: jnp.zeros((sizes[p.name], p.dim)) for p in fm.plates}
        private = jax.eval_shape(fm.init_private, key, silo)
        programs.append(traced(fm.log_silo, {**theta, **private}, z_G, z_L, silo))
    for program in programs:
        found.update(ADDRESS.sub("", str(program.jaxpr)).encode())
        for constant in constants(program):
            a = np.asarray(constant)
            found.update(f"{a.dtype}{a.shape}".encode())
            found.update(a.tobytes())
    return found.hexdigest()
