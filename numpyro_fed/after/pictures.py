"""Pictures of a posterior by matplotlib: globals, effects of silos, and predictive checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from numpyro_fed.errors import MissingExtraError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_PANELS = 24
COLUMNS = 4
POSTERIOR, PRIOR, OBSERVED = "C0", "0.6", "black"
# Share of the draws of a prior that its curve shows: heavy tails would make it a spike.
SHOWN = 0.98
GRID = 200
NUM_PREDICTED = 50  # predictive data sets in a check


def panels(number: int, **shared: Any) -> tuple[Figure, list[Axes]]:
    """Return a figure with so many panels, in rows of four."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingExtraError("matplotlib", "examples") from error
    columns = min(number, COLUMNS)
    rows = -(-number // columns)
    figure, axes = pyplot.subplots(
        rows,
        columns,
        figsize=(3 * columns, 2.2 * rows),
        squeeze=False,
        layout="constrained",
        **shared,
    )
    for spare in axes.flat[number:]:
        spare.set_axis_off()
    return figure, list(axes.flat[:number])


def marginals(names: Sequence[str], posterior: np.ndarray, prior: np.ndarray | None) -> Figure:
    """Return densities of the columns of draws (n, k), over those of the prior if there are any."""
    figure, axes = panels(len(names))
    for i, (name, ax) in enumerate(zip(names, axes, strict=True)):
        x, density = curve(posterior[:, i])
        ax.fill_between(x, density, color=POSTERIOR, alpha=0.4, lw=0)
        ax.plot(x, density, color=POSTERIOR, label="posterior")
        if prior is not None:
            wide = x[-1] - x[0]
            inside = np.abs(prior[:, i] - x.mean()) < 2 * wide
            if inside.sum() > 2:
                at, height = curve(prior[inside, i])
                # A prior is much wider as a rule, and its curve is cut.
                ax.plot(at, height * inside.mean(), color=PRIOR, ls="--", label="prior")
                ax.set_xlim(x[0] - wide / 2, x[-1] + wide / 2)
        ax.set_title(name)
        ax.set_yticks([])
        ax.spines[["left", "right", "top"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize="small")
    return figure


def curve(draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a grid and the density of draws (n,) there, by kernels; a peak where all are equal."""
    from scipy.stats import gaussian_kde

    draws = np.asarray(draws, float)
    low, high = np.quantile(draws, [(1 - SHOWN) / 2, (1 + SHOWN) / 2])
    if not high > low:
        return np.array([low - 0.5, low, low + 0.5]), np.array([0.0, 1.0, 0.0])
    margin = 0.15 * (high - low)
    x = np.linspace(max(low - margin, draws.min()), min(high + margin, draws.max()), GRID)
    inside = draws[(draws >= low - margin) & (draws <= high + margin)]
    return x, gaussian_kde(inside)(x)


def caterpillar(
    site: str,
    draws: np.ndarray,
    labels: Sequence[str],
    alone: np.ndarray | None = None,
    centre: float | None = None,
) -> Figure:
    """Return means with 50 and 90 % intervals of draws (n, k), a line for each of ``labels``.

    ``alone`` (k,) are estimates of each silo alone, from which the posterior is shrunk to the
    ``centre``.
    """
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingExtraError("matplotlib", "examples") from error
    k = draws.shape[1]
    order = np.argsort(draws.mean(0))
    figure, ax = pyplot.subplots(figsize=(6, max(2.0, 0.3 * k + 1)), layout="constrained")
    quantiles = np.quantile(draws[:, order], [0.05, 0.25, 0.75, 0.95], axis=0)
    at = np.arange(k)
    ax.hlines(at, quantiles[0], quantiles[3], color=POSTERIOR, lw=1)
    ax.hlines(at, quantiles[1], quantiles[2], color=POSTERIOR, lw=4)
    ax.plot(draws[:, order].mean(0), at, "o", color=POSTERIOR, mec="white", label="all silos")
    if alone is not None and np.isfinite(alone).any():
        ax.plot(alone[order], at, "o", mfc="none", color="black", label="this silo alone")
        figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize="small")
    if centre is not None:
        ax.axvline(centre, color=PRIOR, ls="--", zorder=0)
    ax.set_yticks(at, [labels[i] for i in order])
    ax.set_xlabel(f"{site}: mean, 50 and 90 % intervals")
    ax.spines[["right", "top"]].set_visible(False)
    return figure


def checks(
    observed: Sequence[Mapping[str, np.ndarray]],
    predicted: Sequence[Mapping[str, np.ndarray]],
    labels: Sequence[str],
) -> Figure:
    """Return distribution functions of outcomes, over those of predictive data sets, by silo."""
    pairs = [
        (f"{label}: {name}" if len(seen) > 1 else label, *_there(seen[name], drawn[name]))
        for label, seen, drawn in zip(labels, observed, predicted, strict=True)
        for name in seen
    ][:MOST_PANELS]
    figure, axes = panels(len(pairs))
    for ax, (title, seen, drawn) in zip(axes, pairs, strict=True):
        for data in drawn[:NUM_PREDICTED]:
            ax.ecdf(np.ravel(data), color=POSTERIOR, alpha=0.15, lw=1)
        ax.ecdf(seen, color=OBSERVED, lw=1.5)
        ax.set_title(title)
        ax.spines[["right", "top"]].set_visible(False)
    axes[0].plot([], [], color=POSTERIOR, label="predicted")
    axes[0].plot([], [], color=OBSERVED, label="observed")
    axes[0].legend(frameon=False, fontsize="small")
    return figure


def _there(seen: np.ndarray, drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return outcomes (k,) and predictive data sets (n, k) where the outcome is not missing."""
    flat = np.ravel(seen)
    there = ~np.isnan(flat) if flat.dtype.kind == "f" else np.ones(len(flat), bool)
    return (flat, drawn) if there.all() else (flat[there], drawn.reshape(len(drawn), -1)[:, there])


def conflicts(shift: np.ndarray, conflict: np.ndarray, flagged: Sequence[int]) -> Figure:
    """Return a plot of how far each silo moves the posterior, and of its tail area."""
    figure, (left, right) = panels(2, sharey=True)
    at = np.arange(len(shift))
    colours = ["C3" if j in flagged else POSTERIOR for j in at]
    left.barh(at, shift, color=colours)
    left.set_xlabel("moves a mean by (sds)")
    left.set_yticks(at, [f"silo {j}" for j in at])
    left.invert_yaxis()
    right.barh(at, -np.log10(np.maximum(conflict, 1e-300)), color=colours)
    right.axvline(-np.log10(0.01 / len(shift)), color="black", ls="--", lw=1)
    right.set_xlabel("-log10 of the tail area")
    figure.set_size_inches(7, max(2.0, 0.3 * len(shift) + 1))
    return figure
