"""How the silos are laid out for one compiled program: split, padded where safe, bucketed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.data import Bucket, SiloData, Sizes, bucket, padded_keys
from numpyro_fed.sites import structures
from numpyro_fed.split import FederatedModel, Rows, split


class Layout(NamedTuple):
    """A split model and its silos in buckets of one shape each."""

    model: FederatedModel
    sizes: tuple[Sizes, ...]  # true size of each silo plate at each silo
    padded: bool
    rows: dict[str, str]  # which arrays are rows of which silo plate


def lay_out(model: Callable, silos: Sequence[SiloData]) -> tuple[Layout, list[Bucket]]:
    """Split the model, bucket the silos, and make sure that padding changes nothing.

    Padded and unpadded densities are compared at a random point. A model that summarises its
    rows (``x.mean(0)``, say) fails that comparison; the silos then stay unpadded, bucketed by
    their sizes, and a warning says so.
    """
    fm = split(model, silos)
    sizes = [s.sizes for s in structures(model, silos)]
    buckets = bucket(silos, sizes, may_pad=not fm.nested)
    if any(b.data.masks and not _padding_is_harmless(fm, silos, b) for b in buckets):
        warnings.warn(
            "the model's log density changes when a silo's rows are padded by copies of its first "
            "row and masked (does it summarise its rows, as x.mean(0) does, or does a row "
            "read another row's latents? check_decomposition tells). The silos stay "
            "unpadded: one program is compiled for each distinct size. To avoid this, compute such "
            "summaries before the run and pass them as data.",
            stacklevel=4,
        )
        buckets = bucket(silos, sizes, may_pad=False)
    padded = any(b.data.masks for b in buckets)
    return Layout(fm, tuple(sizes), padded, padded_keys(silos, sizes)), buckets


def _padding_is_harmless(fm: FederatedModel, silos: Sequence[SiloData], b: Bucket) -> bool:
    most = min(range(len(b.silos)), key=lambda i: sum(b.sizes[i].values()))
    padded = jax.tree.map(lambda a: a[most], b.data)
    original, size = silos[b.silos[most]], b.sizes[most]
    try:
        target = fm.sizes(padded)
    except ValueError:
        return False
    if any(len(mask) != target[plate] for plate, mask in padded.masks.items()):
        return False
    key = jax.random.key(0)
    theta = fm.init_theta(key)
    z_G = 0.3 * jax.random.normal(jax.random.fold_in(key, 1), (fm.dim,))
    z_L = {
        p.name: 0.3 * jax.random.normal(jax.random.fold_in(key, i), (target[p.name], p.dim))
        for i, p in enumerate(fm.plates, start=2)
    }
    real_rows = {plate: rows[: size[plate]] for plate, rows in z_L.items()}

    @jax.jit
    def rows_at(z_L: Rows, data: SiloData) -> Rows:
        return fm.log_silo({**theta, **fm.init_private(key, data)}, z_G, z_L, data)

    there, here = rows_at(z_L, padded), rows_at(real_rows, original)
    return all(
        bool(jnp.all(there[p][size[p] :] == 0))
        and np.allclose(there[p][: size[p]], here[p], rtol=1e-4, atol=1e-4)
        for p in here
    )
