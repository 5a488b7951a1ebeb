"""The layout of silos for compiled programs: split, checked, padded if harmless, bucketed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from numpyro_fed.errors import ModelWarning
from numpyro_fed.model.audit import separable
from numpyro_fed.model.data import ReadSilos, SiloData, Sizes
from numpyro_fed.model.indices import IndexCheck
from numpyro_fed.model.log_density import FederatedModel
from numpyro_fed.model.observed import Supports
from numpyro_fed.model.padding import Bucket, bucket, padded_keys
from numpyro_fed.model.row_checks import RowChecks, refuse_summaries
from numpyro_fed.model.split import split


class Layout(NamedTuple):
    """A split model and its checks: all that depends on the shapes of data, not on their values."""

    model: FederatedModel
    sizes: tuple[Sizes, ...]  # the true size of each silo plate at each silo
    rows: dict[str, str]  # the silo plate of each array that holds rows
    checks: RowChecks
    # (silo, data) -> None: the index check of one silo's values
    check_indices: Callable[[int, SiloData], None]
    supports: Supports  # the check of observed values
    # the arrays of each silo plate whose rows must not read each other's data
    separable: dict[str, tuple[str, ...]]

    @property
    def lengths(self) -> dict[str, tuple[str, ...]]:
        """Return for each array of rows the silo plates that are as long at every silo."""
        return {
            key: tuple(p for p in self.sizes[0] if all(n[p] == n[plate] for n in self.sizes))
            for key, plate in self.rows.items()
        }

    def arrange(self, silos: Sequence[SiloData], *, summaries: bool = True) -> list[Bucket]:
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
        apart = self.separable if summaries else {}
        harmless = True
        for b in buckets:
            found = None
            # The silo with the fewest rows has the most padding.
            most = min(range(len(b.silos)), key=lambda i: sum(b.sizes[i].values()))
            original = silos[b.silos[most]]
            try:
                pairs = tuple(
                    (p, names)
                    for p, names in apart.items()
                    if not self.checks.trace(b).rows_apart(p, names)
                )
                if b.data.masks and not self.checks.padding_is_apart(b, self.rows, original):
                    rows = tuple(sorted(self.rows.items()))
                    same, found = self.checks.padding(b.data, rows, pairs, original, most)
                    harmless &= bool(same)
            except ValueError:  # the text does not run at padded shapes
                harmless, pairs = False, tuple(apart.items())
            if pairs:
                found = self.checks.summaries(pairs, b.data) if found is None else found
                refuse_summaries(self.checks, b, dict(pairs), found)
        if harmless:
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
    fm = split(model, silos)
    sizes = tuple(fm.sizes(s) for s in silos)
    rows = padded_keys(silos, sizes)
    apart, supports = separable(fm, silos, sizes, rows), Supports(fm.traces, "silo {}")
    return Layout(fm, sizes, rows, RowChecks(fm), IndexCheck(fm.terms_at_zero), supports, apart)


def lay_out(
    model: Callable[..., Any], silos: Sequence[SiloData], *, summaries: bool = True
) -> tuple[Layout, list[Bucket]]:
    """Split the model and bucket the silos; see :meth:`Layout.arrange`."""
    layout = layout_of(model, silos)
    return layout, layout.arrange(silos, summaries=summaries)
