r"""Means and sds of columns over all silos, of numbers that can be added up silo by silo.

Of a column with :math:`n` numbers a silo has the mean :math:`m` and the sum of squared deviations
:math:`M = \sum_i (x_i - m)^2`. Those of two silos together are, with :math:`d = m_2 - m_1`,

.. math::
    m = m_1 + d\, \frac{n_2}{n}, \qquad M = M_1 + M_2 + d^2\, \frac{n_1 n_2}{n}.

References
----------
Chan, Golub and LeVeque (1983), The American Statistician 37(3), "Algorithms for computing the
sample variance". Sums of squares would lose the sd of numbers far from zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np

from numpyro_fed.basics.errors import DataError, DataWarning, warn_user
from numpyro_fed.data.silo_data import is_leaf
from numpyro_fed.data.tables import (
    SiloInput,
    as_dict,
    as_series,
    check_columns,
    column_names,
    columns_of,
    is_frame,
    with_columns,
)

Numbers = dict[str, np.ndarray]
# A silo's mean is far from those of others by so many sds: of its rows and the others' (the
# geometric mean, so that it does not matter which of both are in the larger units), of all rows,
# and of the others' means. One hospital that weighs in pounds is 4, 5 and more of them away.
FAR, FAR_OF_ALL, FAR_OF_MEANS = 2.5, 2.0, 3.0
FEWEST = 10  # rows, less one for each silo, from which the sd of rows is known


@dataclass(frozen=True)
class Scaling:
    """The means and sds of columns over all silos, and the way to standard units and back.

    A column is an argument of one axis, or a place on the last axis of one with more; its moments
    are those of all other axes. Missing numbers (NaN) do not count.

    Attributes
    ----------
    mean, sd : dict of str to array
        By argument, each () or (columns,). The sd is that of the numbers themselves, divided by
        their number.
    count : dict of str to int array
        Of the same shapes.
    columns : dict of str to tuple of str
        The names of the columns of arguments that are DataFrames.

    Examples
    --------
    >>> import numpy as np, numpyro_fed as nf
    >>> silos = [dict(age=np.array([20.0, 40.0])), dict(age=np.array([60.0, 80.0, 50.0]))]
    >>> scaling = nf.moments(silos)
    >>> float(scaling.mean["age"]), float(scaling.sd["age"]), int(scaling.count["age"])
    (50.0, 20.0, 5)
    >>> scaling.standardise(silos[0])["age"].tolist()
    [-1.5, -0.5]
    """

    mean: Numbers
    sd: Numbers
    count: Numbers
    columns: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def union(cls, *parts: Scaling) -> Scaling:
        """Return the moments of all silos together, from those of each.

        A hospital computes its own by ``nf.moments([silo])`` and sends them: a mean, an sd and a
        count for each column, and no row. All parties unite the parts of all.

        Parameters
        ----------
        *parts : Scaling

        Returns
        -------
        Scaling

        Raises
        ------
        DataError
            For parts of other arguments or columns than the first.
        """
        if not parts:
            raise DataError(
                "there are no parts: pass what nf.moments([silo]) returned at each silo."
            )
        return united([f"part {j}" for j in range(len(parts))], parts)

    def standardise(self, silo: SiloInput) -> Any:
        """Return a silo's data with the columns in standard units, over all silos.

        Parameters
        ----------
        silo : dict or DataFrame
            It is not changed. Arguments that have no moments stay as they are, and so do columns
            that are constant over all silos, such as an intercept.

        Returns
        -------
        dict or DataFrame

        Raises
        ------
        DataError
            For an argument or a column that the silo lacks.
        """
        return self._mapped(silo, lambda x, mean, sd: (x - mean) / sd)

    def unstandardise(self, silo: SiloInput) -> Any:
        """Return data in standard units in the units of before; the inverse of ``standardise``.

        Parameters
        ----------
        silo : dict or DataFrame

        Returns
        -------
        dict or DataFrame

        Raises
        ------
        DataError
            For an argument or a column that the data lack.
        """
        return self._mapped(silo, lambda x, mean, sd: x * sd + mean)

    def _mapped(
        self, silo: SiloInput, change: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
    ) -> Any:
        columns, values = column_names(silo), _arguments("the data", silo)
        changed: Numbers = {}
        for name, mean in self.mean.items():
            if name not in values:
                raise DataError(
                    f"the data lack '{name}', of which there are moments: they have {list(values)}."
                )
            known, found = self.columns.get(name, ()), columns.get(name, ())
            if known and found:
                check_columns("the data", name, found, known, "the moments")
            array = _as_array("the data", name, values[name]).astype(np.float64)
            if array.shape[1:][-1:] != mean.shape:
                raise DataError(
                    f"'{name}' has the shape {array.shape}, and there are moments of "
                    f"{mean.size} columns: pass the columns of which they were taken."
                )
            constant = self.sd[name] == 0
            shift = np.where(constant, 0.0, mean)
            changed[name] = change(array, shift, np.where(constant, 1.0, self.sd[name]))
        if not isinstance(silo, Mapping):
            return with_columns(silo, changed)
        for name, value in silo.items():
            if name in changed and is_frame(value):
                by_column = {str(c): changed[name][:, i] for i, c in enumerate(value.columns)}
                changed[name] = with_columns(value, by_column)
        return {name: changed.get(name, value) for name, value in silo.items()}


def united(owners: Sequence[str], parts: Sequence[Scaling]) -> Scaling:
    """Return the moments of all silos together; ``owners`` are what messages call them.

    There is a warning for each column whose mean at some silo is far from those at all others.
    """
    first = parts[0]
    for j, part in enumerate(parts):
        if set(part.mean) != set(first.mean):
            raise DataError(
                f"{owners[j]} has moments of {sorted(part.mean)}, and {owners[0]} of "
                f"{sorted(first.mean)}. All silos must have the same arguments of the same kind; "
                "name those that are meant."
            )
        for name, mean in first.mean.items():
            known, here = first.columns.get(name, ()), part.columns.get(name, ())
            check_columns(owners[j], name, here or known, known or here, owners[0])
            if (found := part.mean[name]).shape != mean.shape:
                raise DataError(
                    f"{owners[j]}, '{name}': {found.size} columns, where {owners[0]} has "
                    f"{mean.size}."
                )
    for name in first.mean:
        columns = next((p.columns[name] for p in parts if name in p.columns), ())
        each = zip(*((p.mean[name], p.sd[name], p.count[name]) for p in parts), strict=True)
        stacks = (np.stack([np.atleast_1d(a) for a in numbers], 1) for numbers in each)
        for i, (mean, sd, count) in enumerate(zip(*stacks, strict=True)):
            if not (far := _far_apart(mean, sd, count)):
                continue
            where = f"'{name}'"
            if len(np.atleast_1d(first.mean[name])) > 1:
                where = f"'{columns[i]}' of {where}" if columns else f"column {i} of {where}"
            others = [j for j in range(len(parts)) if j not in far and count[j]]
            own = ", ".join(f"{owners[j]} has the mean {mean[j]:.4g}" for j in far)
            low, high = (f"{f(mean[others]):.4g}" for f in (np.min, np.max)) if others else ("", "")
            rest = f", where others have {low if low == high else f'{low} to {high}'}"
            warn_user(
                f"{where}: {own}{rest if others else ''} (sds within silos: "
                f"{sd[count > 0].min():.3g} to {sd.max():.3g}). Is it in other units there, or "
                "coded otherwise? Then mend it there; if it is meant so, leave it.",
                DataWarning,
            )
    return reduce(_together, parts)


def _far_apart(mean: np.ndarray, sd: np.ndarray, count: np.ndarray) -> list[int]:
    """Return the silos whose mean of a column is far from those of the others, (silos,) each."""
    seen = count > 0
    # A column of yes or no has no units.
    if np.allclose(np.square(sd), mean * (1 - mean), rtol=1e-6, atol=1e-12):
        return []
    squares, of_all, found = count * np.square(sd), (count[seen] - 1).sum(), []
    for j in np.flatnonzero(seen):
        others = seen & (np.arange(len(mean)) != j)
        freedom = (count[others] - 1).sum()
        if freedom < FEWEST or not squares[others].any():
            continue
        within = np.sqrt(squares[others].sum() / freedom)
        # The sd of a few rows is not known.
        both = np.sqrt(within * sd[j]) if count[j] >= FEWEST and sd[j] else within
        # Medians, which other silos in the wrong units do not move.
        middle = np.median(mean[others])
        between = 1.48 * np.median(np.abs(mean[others] - middle))
        least = (
            FAR * both * (1 + 1 / np.sqrt(count[j])),  # a mean of few rows is itself uncertain
            FAR_OF_ALL * np.sqrt(squares.sum() / of_all),
            FAR_OF_MEANS * between,
        )
        if abs(mean[j] - middle) > max(least):
            found.append(int(j))
    return found


def moments_of(owner: str, silo: SiloInput, arguments: Sequence[str] | None) -> Scaling:
    """Return the moments of one silo's columns; ``owner`` stands for the silo in errors."""
    columns = column_names(silo)
    mean, sd, count = Numbers(), Numbers(), Numbers()
    for name, rows in numbers_of(owner, silo, arguments).items():
        seen = ~np.isnan(rows)
        count[name] = seen.sum(0)
        number = np.maximum(count[name], 1)
        # About a number of each column: a sum of numbers far from zero would round away their
        # spread.
        first = np.take_along_axis(rows, seen.argmax(0, keepdims=True), 0)[0] if len(rows) else 0.0
        centre = np.where(count[name] > 0, first, 0.0)
        from_centre = np.where(seen, rows - centre, 0.0)
        shift = from_centre.sum(0) / number
        deviations = np.where(seen, from_centre - shift, 0.0)
        mean[name], sd[name] = centre + shift, np.sqrt((deviations**2).sum(0) / number)
    return Scaling(mean, sd, count, {name: c for name, c in columns.items() if name in mean})


def numbers_of(owner: str, silo: SiloInput, arguments: Sequence[str] | None) -> Numbers:
    """Return the numbers of a silo of which moments are taken, (rows,) or (rows, columns)."""
    found = _arguments(owner, silo)
    if arguments is not None and (lacking := [name for name in arguments if name not in found]):
        raise DataError(f"{owner} lacks {lacking}: it has {list(found)}.")
    names = [n for n, v in found.items() if _is_float(v)] if arguments is None else arguments
    arrays = {name: _as_array(owner, name, found[name]).astype(np.float64) for name in names}
    return {name: a.reshape(-1, a.shape[-1]) if a.ndim > 1 else a for name, a in arrays.items()}


def _arguments(owner: str, silo: SiloInput) -> Mapping[str, Any]:
    """Return the arguments that a silo holds, by name; of a DataFrame its columns."""
    if is_frame(silo):
        return columns_of(owner, silo)
    if not isinstance(silo, Mapping):
        raise DataError(f"{owner} must be a dict or a DataFrame, got {type(silo).__name__}.")
    return silo


def _is_float(value: object) -> bool:
    """Return whether an argument is an array, a column or a DataFrame of floats."""
    if (series := as_series(value)) is not None:
        return series.dtype.is_float()
    if is_frame(value):
        return True
    array = np.asarray(value) if hasattr(value, "dtype") or is_leaf(value) else np.zeros(())
    return array.dtype.kind == "f" and array.ndim > 0


def _as_array(owner: str, name: str, value: object) -> np.ndarray:
    array = np.asarray(as_dict(owner, {name: value})[name])
    if array.dtype.kind not in "fiub" or not array.ndim:
        raise DataError(
            f"{owner}, '{name}': expected an array of numbers, got {type(value).__name__} with "
            f"dtype {array.dtype} and {array.ndim} axes."
        )
    return array


def _together(a: Scaling, b: Scaling) -> Scaling:
    """Return the moments of two groups of rows together."""
    mean, sd, count = Numbers(), Numbers(), Numbers()
    for name in a.mean:
        n_a, n_b = a.count[name], b.count[name]
        n, apart = np.maximum(n_a + n_b, 1), b.mean[name] - a.mean[name]
        # By square, since a number and an array without axes have other last digits of ** 2.
        v_a, v_b, between = np.square(a.sd[name]), np.square(b.sd[name]), np.square(apart)
        squares = n_a * v_a + n_b * v_b + between * (n_a * n_b / n)
        mean[name] = np.where(n_a > 0, a.mean[name] + apart * (n_b / n), b.mean[name])
        sd[name], count[name] = np.sqrt(squares / n), n_a + n_b
    return Scaling(mean, sd, count, {**a.columns, **b.columns})
