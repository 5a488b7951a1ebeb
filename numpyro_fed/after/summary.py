"""Draws and their summary as data frames, whose elements have names.

An element along an axis that the user has named (``coords``, as for ArviZ) has the name of its
entry, as ``ward[geriatrics]``, and an effect of a silo the silo's name, as ``u[Bern]``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from numpyro_fed.after.own_rows import Run, WhichSilo, chosen_silos, names_of_rows
from numpyro_fed.basics.errors import optional
from numpyro_fed.basics.trees import elements
from numpyro_fed.data.silo_data import names_or_numbers
from numpyro_fed.weigh.element_errors import ElementErrors

if TYPE_CHECKING:
    from numpyro_fed.after.arviz import Labels

Names = Sequence[object] | None  # of the entries along an axis; None where they have none


class Columns(NamedTuple):
    """The elements of draws: their names, those by number, such as ``"beta[1]"``, and draws (n, k).

    The table of errors of a correction has names by number.
    """

    names: tuple[str, ...]
    numbered: tuple[str, ...]
    values: np.ndarray

    @classmethod
    def of(
        cls, run: Run, draws: Mapping[str, Any], silo: WhichSilo | None, labels: Labels
    ) -> Columns:
        """Return the elements of draws {site: (n, ...)} of the globals, and of some silos."""
        of_silos = {} if silo is None else _silo_axes(run, silo)
        of_text = run._fit.model.labels
        names = list[str]()
        for site, value in draws.items():
            shape = np.shape(value)[1:]
            axes = _axes(site, shape, labels)
            own = of_text.get(site, ())
            if shape and axes[-1] is None and len(own) == shape[-1]:
                axes[-1] = list(own)
            if site in of_silos:
                axis, entries = of_silos[site]
                if axes[axis] is None and len(entries) == shape[axis]:
                    axes[axis] = entries
            for index in np.ndindex(shape):
                along = zip(index, axes, strict=True)
                entries = [str(i) if a is None else str(a[i]) for i, a in along]
                names.append(f"{site}[{', '.join(entries)}]" if entries else site)
        return cls(tuple(names), *elements(draws, of_text))

    def frame(self) -> Any:
        """Return the draws as a DataFrame."""
        return optional("pandas").DataFrame(self.values, columns=list(self.names))

    def summary(self, prob: float, errors: ElementErrors | None) -> Any:
        """Return mean, sd, quantiles and the probability to be positive, as a DataFrame.

        A mean or an sd that does not exist, as far as the tails tell, is NaN beside their index.
        The index itself is NaN where no tails were looked at.
        """
        levels = [(1 - prob) / 2, 0.5, (1 + prob) / 2]
        table = {"mean": self.values.mean(0), "sd": self.values.std(0)}
        for level, row in zip(levels, np.quantile(self.values, levels, axis=0), strict=True):
            table[f"{100 * level:g}%"] = row
        table["P(> 0)"] = (self.values > 0).mean(0)
        if errors is not None:
            index = dict(zip(errors.names, errors.tail_index, strict=True))
            infinite = dict(zip(errors.names, errors.infinite.T, strict=True))
            table["tail index"] = np.array([index.get(name, np.nan) for name in self.numbered])
            for i, name in enumerate(self.numbered):
                no_mean, no_sd = infinite.get(name, (False, False))
                table["mean"][i] = np.nan if no_mean else table["mean"][i]
                table["sd"][i] = np.nan if no_mean or no_sd else table["sd"][i]
        return optional("pandas").DataFrame(table, index=list(self.names))


def _axes(site: str, shape: Sequence[int], labels: Labels) -> list[Names]:
    """Return the names along each axis of a site, as far as the user has given them."""
    dims = list(labels.dims.get(site, ()))
    given = [labels.coords.get(dim) for dim in dims[: len(shape)]]
    axes: list[Names] = [None if names is None else list(names) for names in given]
    for dim, size, names in zip(dims, shape, axes, strict=False):
        if names is not None and len(names) != size:
            raise ValueError(
                f"coords={{'{dim}': ...}} has {len(names)} names, and '{site}' has {size} "
                "entries along that axis."
            )
    return axes + [None] * (len(shape) - len(axes))


def _silo_axes(run: Run, silo: WhichSilo) -> dict[str, tuple[int, list[str]]]:
    """Return the axis of each latent along which silos stand, and the names of its entries."""
    chosen, hosted = chosen_silos(silo, run), run._silos
    names = names_or_numbers(hosted.names, run.num_silos)
    found = {}
    for s in run._fit.model.sites:
        if s.kind != "latent" or s.plate is None:
            continue
        # Of silos elsewhere, whose rows are not told here, each is taken to have one.
        rows = [1 if hosted.elsewhere else hosted.sizes_of(j)[s.plate] for j in chosen]
        found[s.name] = (s.axis or 0, names_of_rows([names[j] for j in chosen], rows))
    return found
