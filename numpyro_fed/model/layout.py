"""How the silos are laid out for one compiled program: split, padded where safe, bucketed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from numpyro_fed.model.audit import separable
from numpyro_fed.model.data import ReadSilos, SiloData, Sizes
from numpyro_fed.model.federated import FederatedModel
from numpyro_fed.model.indices import index_check
from numpyro_fed.model.observed import Supports
from numpyro_fed.model.padding import Bucket, bucket, padded, padded_keys
from numpyro_fed.model.row_checks import RowChecks, check_summaries
from numpyro_fed.model.sites import structures
from numpyro_fed.model.split import split


class Layout(NamedTuple):
    """A split model: all that depends on the shapes of what silos hold, and not on the values."""

    model: FederatedModel
    sizes: tuple[Sizes, ...]  # true size of each silo plate at each silo
    rows: dict[str, str]  # which arrays are rows of which silo plate
    checks: RowChecks
    check_indices: Callable[[int, SiloData], None]  # at a silo, for the values of its data
    supports: Supports
    separable: dict[str, tuple[str, ...]]  # arrays of each silo plate, where rows must stand alone

    @property
    def lengths(self) -> dict[str, tuple[str, ...]]:
        """The silo plates of the length of each array that holds rows, the same at every silo."""
        return {key: self._alike(plate) for key, plate in self.rows.items()}

    def _alike(self, plate: str) -> tuple[str, ...]:
        return tuple(p for p in self.sizes[0] if all(n[p] == n[plate] for n in self.sizes))

    def arrange(self, silos: Sequence[SiloData], *, summaries: bool = True) -> list[Bucket]:
        """Bucket silos of these shapes, and make sure that their values can be used.

        Padded and unpadded densities are compared at a random point. A model in which rows read
        each other's latents fails that comparison; the silos then stay unpadded, bucketed by
        their sizes, and a warning says so.

        Raises
        ------
        DataError
            For an index out of range, or an observed value that is impossible.
        ModelError
            With ``summaries``, for a row that reads the data of other rows (``x.mean(0)``).
        """
        buckets = bucket(silos, self.sizes, may_pad=not self.model.nested)
        for b in buckets:
            self.supports.check(b)
        for j, silo in enumerate(silos):
            self.check_indices(j, silo)
        if summaries:
            check_summaries(self.checks, self.separable, buckets)
        if all(self._padding_is_harmless(silos, b) for b in buckets if padded([b])):
            return buckets
        warnings.warn(
            "the model's log density changes when a silo's rows are padded by copies of its first "
            "row and masked (does it summarise its rows, as x.mean(0) does, or does a row "
            "read another row's latents? check_decomposition tells). The silos stay "
            "unpadded: one program is compiled for each distinct size. To avoid this, compute such "
            "summaries before the run and pass them as data.",
            stacklevel=4,
        )
        return bucket(silos, self.sizes, may_pad=False)

    def _padding_is_harmless(self, silos: Sequence[SiloData], b: Bucket) -> bool:
        most = min(range(len(b.silos)), key=lambda i: sum(b.sizes[i].values()))
        rows = tuple(sorted(self.rows.items()))
        original = silos[b.silos[most]]
        try:
            return bool(self.checks.padding(b.data, rows, original, most))
        except ValueError:
            return False


def layout_of(model: Callable[..., Any], silos: Sequence[SiloData]) -> Layout:
    """Split the model at silos of these shapes; for silos that were read, once for each text."""
    if isinstance(silos, ReadSilos):
        return silos.once(model, partial(_layout_of, model, silos))
    return _layout_of(model, silos)


def _layout_of(model: Callable[..., Any], silos: Sequence[SiloData]) -> Layout:
    fm = split(model, silos)
    sizes = tuple(s.sizes for s in structures(model, silos))
    rows = padded_keys(silos, sizes)
    alone = separable(fm, silos, sizes, rows)
    return Layout(fm, sizes, rows, RowChecks(fm), index_check(fm), Supports.of_silos(fm), alone)


def lay_out(
    model: Callable[..., Any], silos: Sequence[SiloData], *, summaries: bool = True
) -> tuple[Layout, list[Bucket]]:
    """Split the model and bucket the silos; see :meth:`Layout.arrange`."""
    layout = layout_of(model, silos)
    return layout, layout.arrange(silos, summaries=summaries)
