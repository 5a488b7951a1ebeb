"""A model's layout at silos: what depends on the shapes of their data, and their padded buckets.

Values are checked when silos are put in buckets, which are padded where that changes nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from numpyro_fed.basics.errors import ModelWarning
from numpyro_fed.data.padding import Bucket, bucket
from numpyro_fed.data.silo_data import ReadSilos, SiloData, Sizes
from numpyro_fed.text.indices import IndexCheck
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.row_arrays import separable_rows
from numpyro_fed.text.row_checks import RowChecks
from numpyro_fed.text.split import split_with_rows
from numpyro_fed.text.values import SupportCheck


class Layout(NamedTuple):
    """A split model and its checks: all that depends on the shapes of data, not on their values."""

    model: FederatedModel
    sizes: tuple[Sizes, ...]  # the true size of each silo plate at each silo
    plate_of_array: dict[str, str]  # the silo plate of each array that holds rows
    checks: RowChecks
    # (silo, data) -> None: the index check of one silo's values
    check_indices: Callable[[int, SiloData], None]
    supports: SupportCheck  # the check of observed values
    # the arrays of each silo plate whose rows can be separated, and must not read each other's data
    separable_rows: dict[str, tuple[str, ...]]

    @property
    def possible_plates(self) -> dict[str, tuple[str, ...]]:
        """Return for each array of rows the silo plates that are as long at every silo."""
        return {
            key: tuple(p for p in self.sizes[0] if all(n[p] == n[plate] for n in self.sizes))
            for key, plate in self.plate_of_array.items()
        }

    def checked_buckets(self, silos: Sequence[SiloData], *, summaries: bool = True) -> list[Bucket]:
        """Check the values of silos of these shapes, and return them in buckets.

        Padded and unpadded densities are compared at a random point. A model in which rows read
        each other's latents fails that comparison; the silos then stay unpadded, bucketed by
        their sizes, and a warning says so.
        """
        # A site in two silo plates has no row of its own that could be padded.
        buckets = bucket(silos, self.sizes, may_pad=not self.model.structure.nested)
        # Supports first: outside of them densities are NaN or infinite, and row checks compare
        # nothing there.
        for b in buckets:
            self.supports.check(b)
        for j, silo in enumerate(silos):
            self.check_indices(j, silo)
        apart = self.separable_rows if summaries else {}
        harmless = [
            self.checks.harmless_padding(b, silos, self.plate_of_array, apart) for b in buckets
        ]
        if all(harmless):
            return buckets
        warnings.warn(
            "the model's log density changes when a silo's rows are padded by copies of its first "
            "row and masked (does it summarise its rows, as x.mean(0) does, or does a row "
            "read another row's latents? check_decomposition tells). The silos stay "
            "unpadded: one program is compiled for each distinct size. To avoid this, compute such "
            "summaries before the run and pass them as data.",
            category=ModelWarning,
            stacklevel=4,
        )
        return bucket(silos, self.sizes, may_pad=False)


def layout_of(model: Callable[..., Any], silos: Sequence[SiloData]) -> Layout:
    """Return the layout of a model at silos of these shapes, cached with silos that were read."""
    if isinstance(silos, ReadSilos):
        return silos.once(model, partial(layout_of, model, tuple(silos)))
    fm, sizes, plate_of_array = split_with_rows(model, silos)
    return Layout(
        fm,
        sizes,
        plate_of_array,
        RowChecks(fm),
        IndexCheck(fm.terms_at_zero),
        SupportCheck(fm.traces, "silo {}"),
        separable_rows(fm, silos, sizes, plate_of_array),
    )


def layout_and_buckets(
    model: Callable[..., Any], silos: Sequence[SiloData], *, summaries: bool = True
) -> tuple[Layout, list[Bucket]]:
    """Split the model and bucket the silos; see :meth:`Layout.checked_buckets`."""
    layout = layout_of(model, silos)
    return layout, layout.checked_buckets(silos, summaries=summaries)
