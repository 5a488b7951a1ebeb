"""Models of the same data compared: evidence, rows and silos left out, and stacking."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from numpyro_fed import html
from numpyro_fed.after.predictions import outcomes_of_silos
from numpyro_fed.errors import DataError, optional
from numpyro_fed.results.arviz import elpd_data
from numpyro_fed.results.posterior import Posterior

ROWS, SILOS = "rows", "silos"
MOST_COMPARED = 10  # silos whose outcomes are compared, which takes a run of the text for each


@dataclass(frozen=True, eq=False)
class ModelComparison:
    """Models of the same data, the best first; prints as a table.

    Attributes
    ----------
    names : tuple of str
    by : {"rows", "silos"}
        What is left out for ``elpd``, and so for the order.
    elpd, se : array (models,)
        The expected log predictive density, and the standard error of each.
    difference, se_of_difference : array (models,)
        By how much a model is below the best one, and the standard error of that, from the same
        rows (or silos) under both.
    weight : array (models,)
        Stacking weights: the mixture of the models that predicts what is left out best.
    log_evidence : array (models,)
        NaN where there is none.
    num_unknown : array (models,)
        Rows (or silos) whose Pareto k-hat is above 0.7; then ``elpd`` is not known.
    trusted : tuple of bool
        Whether each fit can be trusted.
    """

    names: tuple[str, ...]
    by: str
    elpd: np.ndarray
    se: np.ndarray
    difference: np.ndarray
    se_of_difference: np.ndarray
    weight: np.ndarray
    log_evidence: np.ndarray
    num_unknown: np.ndarray
    trusted: tuple[bool, ...] = field(default=())

    HEAD = ("model", "elpd", "difference", "its error", "weight", "log evidence", "")

    @property
    def _rows(self) -> list[tuple[str, ...]]:
        rows = []
        for i, name in enumerate(self.names):
            doubt = [] if self.trusted[i] else ["not trusted"]
            if self.num_unknown[i]:
                doubt.append(f"{self.num_unknown[i]:.0f} {self.by} not known")
            numbers = self.elpd[i], self.difference[i], self.se_of_difference[i]
            rows.append(
                (
                    name,
                    *(f"{x:.1f}" for x in numbers),
                    f"{self.weight[i]:.2f}",
                    f"{self.log_evidence[i]:.1f}",
                    ", ".join(doubt),
                )
            )
        return rows

    def to_frame(self) -> Any:
        """Return the table as a pandas DataFrame, a row for each model."""
        columns = "elpd", "se", "difference", "se_of_difference", "weight", "log_evidence"
        found = {name: getattr(self, name) for name in (*columns, "num_unknown", "trusted")}
        return optional("pandas").DataFrame(found, index=list(self.names))

    def __str__(self) -> str:
        rows = [self.HEAD, *self._rows]
        widths = [max(len(row[i]) for row in rows) for i in range(len(self.HEAD))]
        lines = []
        for row in rows:
            cells = [row[0].ljust(widths[0])]
            cells += [cell.rjust(w) for cell, w in zip(row[1:-1], widths[1:-1], strict=True)]
            lines.append("  ".join([*cells, row[-1]]).rstrip())
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html.table(self.HEAD, self._rows)


def compare_models(fits: Mapping[str, Posterior], by: str = ROWS) -> ModelComparison:
    """Return models of the same silos, in the order of how well they predict what is left out.

    Parameters
    ----------
    fits : dict of str to a fit
        Fits of :func:`fit`, corrections, results, or draws of :func:`run_nuts`, of different models
        and the same silos.
    by : {"rows", "silos"}
        What is left out in turn: each row (:meth:`Posterior.loo`), or each silo
        (:meth:`Posterior.leave_out`). Rows ask how well a model predicts another patient of the
        same hospitals; silos, another hospital.

    Returns
    -------
    ModelComparison
        Stacking weights and standard errors are those of ``arviz.compare``.

    Raises
    ------
    DataError
        If the fits have other numbers of silos or rows, or other outcomes; or for ``by="rows"`` if
        silos are in other processes, where rows' numbers stay: then ``by="silos"``.
    TypeError
        For fits without names, as in a list.
    MissingExtraError
        If ArviZ is not installed.

    Notes
    -----
    Nothing crosses but what :meth:`Posterior.loo` and :meth:`Posterior.leave_out` say. A small
    evidence may be that of a wide prior; predictive densities hardly depend on it.

    Examples
    --------
    >>> import jax, numpy as np, numpyro, numpyro.distributions as dist
    >>> import numpyro_fed as nf
    >>> def with_slope(x, y):
    ...     a, b = (numpyro.sample(name, dist.Normal(0, 10)) for name in "ab")
    ...     with nf.silo_plate("row", len(y)):
    ...         numpyro.sample("y", dist.Normal(a + b * x, 1), obs=y)
    >>> def without(x, y):
    ...     a = numpyro.sample("a", dist.Normal(0, 10))
    ...     with nf.silo_plate("row", len(y)):
    ...         numpyro.sample("y", dist.Normal(a, 1), obs=y)
    >>> rng = np.random.default_rng(0)
    >>> silos = [dict(x=x, y=x + rng.normal(size=20)) for x in rng.normal(size=(2, 20))]
    >>> fits = {m.__name__: nf.fit(jax.random.key(0), m, silos, progress_bar=False)
    ...         for m in (without, with_slope)}
    >>> nf.compare_models(fits).names
    ('with_slope', 'without')

    References
    ----------
    Yao, Vehtari, Simpson and Gelman (2018), stacking.
    """
    arviz = optional("arviz")
    if not isinstance(fits, Mapping):
        raise TypeError(
            "compare_models takes a dict, whose keys name the models in the table, got "
            f'{type(fits).__name__}: compare_models({{"one": a, "other": b}}).'
        )
    if len(fits) < 2:
        raise ValueError(f"expected two models or more, got {list(fits)}.")
    if by not in (ROWS, SILOS):
        raise ValueError(f"by={by!r}: expected '{ROWS}' or '{SILOS}'.")
    parts: dict[str, dict[str, Any]] = {}
    for name, fit in fits.items():
        if by == SILOS:
            table = fit.leave_out()
            values, k, more = table.log_density, table.pareto_k, dict(p=np.nan, num_draws=0)
        else:
            loo = fit.loo()
            if loo.silos is None:
                raise DataError(
                    f"'{name}' is a fit of silos in other processes, where rows' numbers stay: "
                    "compare by='silos'."
                )
            values, k = (np.concatenate(a) for a in zip(*loo.silos, strict=True))
            more = dict(p=loo.p_loo, num_draws=loo.num_draws)
        parts[name] = dict(values=values, k=k, **more)
    sizes = {name: len(part["values"]) for name, part in parts.items()}
    if len(set(sizes.values())) > 1:
        counted = ", ".join(f"'{name}' has {size}" for name, size in sizes.items())
        raise DataError(f"the fits are of other data: {counted} {by}. Fit them to the same silos.")
    seen = {}
    for name, fit in fits.items():
        if (run := fit.run_behind)._silos.data:
            outcomes = outcomes_of_silos(run, range(min(run.num_silos, MOST_COMPARED)))
            seen[name] = [np.concatenate([np.ravel(v) for v in one.values()]) for one in outcomes]
    first = next(iter(seen), "")
    for name, values in seen.items():
        same = len(values) == len(seen[first]) and all(
            a.shape == b.shape and np.allclose(a, b, equal_nan=True)
            for a, b in zip(values, seen[first], strict=True)
        )
        if not same:
            raise DataError(
                f"the fits are of other data: the outcomes of '{name}' are not those of '{first}'. "
                "Fit both to the same silos, with outcomes on the same scale."
            )
    elpds = {name: elpd_data(**part) for name, part in parts.items()}
    weights = arviz.compare(elpds, method="stacking")["weight"]
    order = sorted(fits, key=lambda name: -parts[name]["values"].sum())
    best = parts[order[0]]["values"]
    below = [best - parts[name]["values"] for name in order]
    evidence = [getattr(fits[name].correction, "log_evidence", None) for name in order]

    return ModelComparison(
        names=tuple(order),
        by=by,
        elpd=np.array([parts[name]["values"].sum() for name in order]),
        se=np.array([np.sqrt(len(best)) * np.std(parts[name]["values"]) for name in order]),
        difference=np.array([d.sum() for d in below]),
        se_of_difference=np.array([np.sqrt(len(best)) * np.std(d) for d in below]),
        weight=np.array([float(weights[name]) for name in order]),
        log_evidence=np.array([np.nan if e is None else e for e in evidence]),
        num_unknown=np.array([(~(parts[name]["k"] <= 0.7)).sum() for name in order]),
        trusted=tuple(bool(getattr(fits[name], "trusted", False)) for name in order),
    )
