"""Results as people see them: HTML for notebooks, and plots of a posterior by matplotlib."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np

from numpyro_fed.basics.errors import optional
from numpyro_fed.basics.trees import element_name

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import ArrayLike

UNBOUNDED = (-np.inf, np.inf)  # where values lie that have no bounds
MOST_PANELS = 24
COLUMNS = 4
# A colour means the same in all figures.
POSTERIOR, PRIOR, OBSERVED = "tab:blue", "0.6", "black"
ALONE, CONTRADICTS, REFERENCE = "tab:orange", "tab:red", "0.8"
LINE, MOST_LINES = 0.22, 80  # inches for a silo; with more lines they have no labels
# Share of the draws of a prior that its curve shows: heavy tails would make it a spike.
SHOWN = 0.98
GRID = 200
NUM_PREDICTED = 50  # predictive data sets in a check
# Share of the prior's precision that a silo must add to an effect's, for an estimate of it alone.
MIN_TOLD = 0.05


def html_words(text: str) -> str:
    """Return text as a paragraph of HTML; text of several lines keeps its lines."""
    tag = "pre" if "\n" in text else "p"
    return f"<{tag}>{escape(text)}</{tag}>"


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of HTML from the names of its columns and the cells of its rows."""
    lines = [("th", head), *(("td", row) for row in rows)]
    cells = ("".join(f"<{tag}>{escape(c)}</{tag}>" for c in line) for tag, line in lines)
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in cells)}</table>"


def panels(number: int, size: tuple[float, float] | None = None) -> tuple[Figure, list[Axes]]:
    """Return a figure with so many panels of a size in inches, in rows of four."""
    pyplot = optional("matplotlib.pyplot")
    columns = min(max(number, 1), COLUMNS)
    rows = max(-(-number // columns), 1)
    width, height = size or ((4.5, 3.0) if number == 1 else (2.5, 2.1))
    figure, axes = pyplot.subplots(
        rows,
        columns,
        figsize=(width * columns, height * rows + 0.3),  # with a line for the legend
        squeeze=False,
        layout="constrained",
    )
    for spare in axes.flat[number:]:
        spare.set_axis_off()
        spare.set_visible(False)
    for ax in axes.flat[:number]:
        ax.spines[["right", "top"]].set_visible(False)
    return figure, list(axes.flat[:number])


def legend(figure: Figure, handles: Sequence[Artist], shown: int = 0, there: int = 0) -> None:
    """Put a legend above all panels, and say so if not all of them are drawn."""
    if not handles:
        return
    # Less wide than the figure; the width of an entry is that of its words.
    widths = [0.5 + 0.075 * len(str(handle.get_label())) for handle in handles]
    columns = int(max(1, min(len(handles), figure.get_figwidth() // max(widths))))
    figure.legend(
        handles=handles,
        loc="outside upper center",
        ncols=-(-len(handles) // -(-len(handles) // columns)),
        frameon=False,
        fontsize="small",
        title=f"the first {shown} of {there}" if shown < there else None,
        title_fontsize="small",
    )


def labels_of(number: int, names: Sequence[str] | None, own: Sequence[str]) -> list[str]:
    """Return a label for each silo: that of ``names``, its own name, or its number."""
    if names is None:
        names = own if len(own) else None
    if names is None:
        return [f"silo {j}" for j in range(number)]
    given = [names] if isinstance(names, str) else [str(name) for name in names]
    if len(given) != number:
        words = f"names has {len(given)} entries, and there are {number} silos"
        raise ValueError(f"{words}: give a name for each silo, in their order.")
    return given


def marginals(
    names: Sequence[str],
    posterior: np.ndarray,
    prior: np.ndarray | None,
    bounds: Sequence[tuple[float, float]] | None = None,
) -> Figure:
    """Return densities of the columns of draws (n, k), over those of the prior if there are any.

    Values of each column lie between its ``bounds``.
    """
    from matplotlib.lines import Line2D

    shown = list(names[:MOST_PANELS])
    figure, axes = panels(len(shown))
    for i, (name, ax) in enumerate(zip(shown, axes, strict=True)):
        within = UNBOUNDED if bounds is None else bounds[i]
        x, density = curve(posterior[:, i], within)
        ax.fill_between(x, density, color=POSTERIOR, alpha=0.4, lw=0)
        ax.plot(x, density, color=POSTERIOR, label="posterior")
        if prior is not None:  # around the grid of the posterior
            before, wide = prior[:, i], x[-1] - x[0]
            left = min(x[0], max(x[0] - wide / 2, before.min()))  # a scale's axis ends at zero
            right = max(x[-1], min(x[-1] + wide / 2, before.max()))
            ax.set_xlim(left, right)
            inside = np.abs(before - x.mean()) < 2 * wide
            if inside.sum() > 2:
                at, height = curve(before[inside], within)
                # A prior is much wider as a rule, and its curve is cut.
                ax.plot(at, height * inside.mean(), color=PRIOR, ls="--", label="prior")
            if not ((before > left) & (before < right)).any():
                below = bool(np.median(before) < left)
                words = "\u2190 prior" if below else "prior \u2192"
                note = ax.text(not below, 0.98, words, color=PRIOR)
                note.set(ha="left" if below else "right", va="top", fontsize="small")
                note.set_transform(ax.transAxes)
        ax.set(xlabel=name, yticks=[], ylim=(0, None))
        ax.spines["left"].set_visible(False)
    for ax in axes[::COLUMNS]:
        ax.set_ylabel("density")
    handles = [Line2D([], [], color=POSTERIOR, label="posterior")]
    if prior is not None:
        handles.append(Line2D([], [], color=PRIOR, ls="--", label="prior"))
    legend(figure, handles, len(shown), len(names))
    return figure


def density_at(
    x: np.ndarray,
    draws: np.ndarray,
    weights: np.ndarray | None = None,
    bounds: tuple[float, float] = UNBOUNDED,
) -> np.ndarray:
    """Return the density of draws (n,) at a grid, by kernels that are reflected at bounds."""
    from scipy.stats import gaussian_kde

    kernels = gaussian_kde(draws, weights=weights)
    total = kernels(x) + sum(kernels(2 * bound - x) for bound in bounds if np.isfinite(bound))
    return np.where((x >= bounds[0]) & (x <= bounds[1]), total, 0.0)


def curve(
    draws: np.ndarray, bounds: tuple[float, float] = UNBOUNDED
) -> tuple[np.ndarray, np.ndarray]:
    """Return a grid and the density of draws (n,) there, by kernels; a peak where all are equal."""
    draws = np.asarray(draws, float)
    low, high = np.quantile(draws, [(1 - SHOWN) / 2, (1 + SHOWN) / 2])
    if not high > low:
        return np.array([low - 0.5, low, low + 0.5]), np.array([0.0, 1.0, 0.0])
    margin = 0.15 * (high - low)
    # To a bound that is as near as the margin, else no farther than draws are.
    ends = [
        bound if abs(bound - end) <= 2 * margin else farthest
        for bound, end, farthest in zip(
            bounds, (low, high), (draws.min(), draws.max()), strict=True
        )
    ]
    x = np.linspace(max(low - margin, ends[0]), min(high + margin, ends[1]), GRID)
    # Draws of a weighted posterior repeat. The kernels are as wide as the distinct ones ask for.
    inside = (draws >= low - margin) & (draws <= high + margin)
    at, times = np.unique(draws[inside], return_counts=True)
    return x, density_at(x, at, times, bounds)


def caterpillar(site: str, draws: np.ndarray, prior: np.ndarray, labels: Sequence[str]) -> Figure:
    """Return means and intervals of draws (n, k, ...), a line for each label, by element.

    ``prior`` are draws given the globals, of the same shape. The order of the lines is that of the
    means of the first element, in all panels.
    """
    k = draws.shape[1]
    indices = list(np.ndindex(draws.shape[2:]))
    order = np.argsort(draws[:, :, *indices[0]].mean(0))
    shown, shared = indices[:MOST_PANELS], len(indices) > 1
    height = LINE * min(k, MOST_LINES) + 1.2
    figure, axes = panels(len(shown), (2.5 if shared else 5.5, height))
    extra = 0.07 * max(map(len, labels)) if k <= MOST_LINES else 0.2
    figure.set_figwidth(figure.get_figwidth() + extra)
    for i, (index, ax) in enumerate(zip(shown, axes, strict=True)):
        values, before = draws[:, order, *index], prior[:, order, *index]
        low, quarter, upper, high = np.quantile(values, [0.05, 0.25, 0.75, 0.95], axis=0)
        at = np.arange(k)
        wide = ax.hlines(at, low, high, color=POSTERIOR, lw=1, label="90 % interval")
        thick = ax.hlines(at, quarter, upper, color=POSTERIOR, lw=4, label="50 % interval")
        mean, label = values.mean(0), "mean, by all silos"
        (dots,) = ax.plot(mean, at, "o", color=POSTERIOR, ms=6.5, label=label)
        # What silos say alone; nothing is shown where that is next to nothing.
        with np.errstate(divide="ignore", invalid="ignore"):
            told = 1 / values.var(0) - 1 / before.var(0)
            alone = (mean / values.var(0) - before.mean(0) / before.var(0)) / told
        alone = np.where(told > MIN_TOLD / before.var(0), alone, np.nan)
        (circles,) = ax.plot(alone, at, "o", mec=ALONE, label="by this silo alone")
        circles.set(mfc="none", mew=1.5, ms=6.5)
        label, centre = "mean of the prior", float(before.mean())
        dashes = ax.axvline(centre, color=PRIOR, ls="--", lw=1, zorder=0, label=label)
        handles = [dots, thick, wide, circles, dashes]
        ax.set_xlabel(element_name(site, index))
        ax.set_ylim(-0.7, k - 0.3)
        if k > MOST_LINES:
            ax.set_yticks([])
        else:
            ax.set_yticks(range(k), [labels[j] for j in order] if i % COLUMNS == 0 else [""] * k)
    if k > MOST_LINES:
        axes[0].set_ylabel(f"{k} rows of silos, in order of their mean")
    legend(figure, handles, len(shown), len(indices))
    return figure


def yes_or_no(outcomes: Iterable[np.ndarray]) -> bool:
    """Return whether all outcomes that are there are 0 or 1."""
    return all(np.isin(y[~np.isnan(y)], (0, 1)).all() for y in outcomes)


def by_group(
    observed: Sequence[Mapping[str, np.ndarray]],
    predicted: Sequence[Mapping[str, ArrayLike]],
    groups: Sequence[np.ndarray],
) -> tuple[list[dict[str, np.ndarray]], list[dict[str, np.ndarray]], list[str]]:
    """Return outcomes and their predictions by group in the place of silo, and groups' names.

    ``groups`` has an array for each silo: the group of each row, or of each outcome.
    """
    seen: dict[object, dict[str, list[np.ndarray]]] = {}
    drawn: dict[object, dict[str, list[np.ndarray]]] = {}
    for outcomes, data_sets, group in zip(observed, predicted, groups, strict=True):
        for name, values in outcomes.items():
            of_rows = group.reshape(group.shape + (1,) * (values.ndim - group.ndim))
            of_each = np.broadcast_to(of_rows, values.shape)
            for g in np.unique(of_each):
                chosen = of_each == g
                seen.setdefault(g, {}).setdefault(name, []).append(values[chosen])
                there = np.asarray(data_sets[name])[:, chosen]
                drawn.setdefault(g, {}).setdefault(name, []).append(there)
    names = sorted(seen, key=lambda g: (isinstance(g, str), g))
    return (
        [{k: np.concatenate(v) for k, v in seen[g].items()} for g in names],
        [{k: np.concatenate(v, 1) for k, v in drawn[g].items()} for g in names],
        [str(g) for g in names],
    )


def checks(
    observed: Sequence[Mapping[str, np.ndarray]],
    predicted: Sequence[Mapping[str, ArrayLike]],
    labels: Sequence[str],
) -> Figure:
    """Return distribution functions of outcomes, over those of predictive data sets, by silo.

    If all outcomes are yes or no, a site has one panel, with the share of yes at each silo.
    ``labels`` may have more silos than the others, which are then drawn alone.
    """
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    pairs: list[tuple[str, str, np.ndarray, np.ndarray]] = []
    for label, outcomes, data_sets in zip(labels, observed, predicted, strict=False):
        for name in outcomes:
            seen, drawn = np.ravel(outcomes[name]).astype(float), np.asarray(data_sets[name])
            there = ~np.isnan(seen)
            pairs.append((label, name, seen[there], drawn.reshape(len(drawn), -1)[:, there]))
    sites = dict.fromkeys(name for _, name, _, _ in pairs)
    if yes_or_no(seen for _, _, seen, _ in pairs):
        return _shares(pairs, list(sites), len(labels))
    number = max(len(pairs), len(labels) * len(sites))
    pairs = pairs[:MOST_PANELS]
    figure, axes = panels(len(pairs))
    for ax, (label, name, seen, drawn) in zip(axes, pairs, strict=True):
        for data in drawn[:NUM_PREDICTED]:
            ax.ecdf(data, color=POSTERIOR, alpha=0.15, lw=1)
        ax.ecdf(seen, color=OBSERVED, lw=1.5)
        ax.set_title(fill(label, 28), fontsize="medium")
        ax.set(ylim=(0, 1.02), yticks=[0, 0.5, 1])
        if len(sites) > 1 or ax in axes[-COLUMNS:]:  # the lowest of each column
            ax.set_xlabel(name)
        ax.xaxis.set_major_locator(MaxNLocator(4, integer=bool(np.all(seen == np.round(seen)))))
    for ax in axes[::COLUMNS]:
        ax.set_ylabel("share at or below")
    handles = [
        Line2D([], [], color=OBSERVED, label="observed"),
        Line2D([], [], color=POSTERIOR, label="predicted, a line for each data set"),
    ]
    legend(figure, handles, len(pairs), number)
    return figure


def _shares(
    pairs: Sequence[tuple[str, str, np.ndarray, np.ndarray]], sites: Sequence[str], number: int
) -> Figure:
    """Return observed shares of yes over intervals of predicted ones: a panel for each site."""
    lines = max(sum(name == site for _, name, _, _ in pairs) for site in sites)
    figure, axes = panels(len(sites), (4.5, LINE * lines + 1.2))
    for ax, site in zip(axes, sites, strict=True):
        of_site = [(label, seen, drawn) for label, name, seen, drawn in pairs if name == site]
        predicted = np.stack([drawn.mean(1) for _, _, drawn in of_site], 1)
        low, quarter, upper, high = np.quantile(predicted, [0.05, 0.25, 0.75, 0.95], axis=0)
        at = np.arange(len(of_site))
        wide = ax.hlines(at, low, high, color=POSTERIOR, lw=1, label="predicted, 90 %")
        thick = ax.hlines(at, quarter, upper, color=POSTERIOR, lw=4, label="predicted, 50 %")
        observed = [seen.mean() if len(seen) else np.nan for _, seen, _ in of_site]
        (dots,) = ax.plot(observed, at, "o", color=OBSERVED, ms=5, label="observed")
        ax.set_yticks(at, [label for label, _, _ in of_site])
        ax.set(xlabel=f"share of {site} = 1", ylim=(len(of_site) - 0.4, -0.6))
    legend(figure, [dots, thick, wide], lines, number)
    return figure


def conflicts(
    shift: np.ndarray,
    conflict: np.ndarray,
    flagged: Sequence[int],
    level: float,
    labels: Sequence[str],
) -> Figure:
    """Return a plot of how far each silo moves the posterior, and of its tail area."""
    from matplotlib.patches import Patch
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    k = len(shift)
    figure, (left, right) = panels(2, (3.0, LINE * min(k, MOST_LINES) + 1.2))
    if k <= MOST_LINES:
        figure.set_figwidth(6 + 0.07 * max(map(len, labels)))
    colours = [CONTRADICTS if j in flagged else POSTERIOR for j in range(k)]
    for ax, lengths in ((left, shift), (right, -np.log10(np.maximum(conflict, 1e-300)))):
        ax.barh(range(k), lengths, height=0.7, color=colours)
        ax.set_yticks(range(k), labels if ax is left else [""] * k)
        ax.set_ylim(k - 0.4, -0.6)
    for j in np.flatnonzero(np.isnan(shift)).tolist():
        left.text(0, j, " not known", va="center")
    if k > MOST_LINES:
        left.set_yticks([])
        right.set_yticks([])
        left.set_ylabel(f"{k} silos, in their order")
    left.set_xlabel("shift of a mean without it (sds)")
    right.set_xlabel("probability of such a conflict")
    right.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    # A tick is at minus the decimal logarithm of a probability.
    right.xaxis.set_major_formatter(
        FuncFormatter(lambda x, _: f"{10.0**-n:g}" if (n := round(x)) < 3 else f"$10^{{-{n}}}$")
    )
    limit = right.axvline(-np.log10(level / k), color=CONTRADICTS, ls="--", lw=1)
    limit.set_label("limit for the longest bar")
    handles = [
        Patch(color=POSTERIOR, label="does not contradict the others"),
        Patch(color=CONTRADICTS, label="contradicts the others"),
        limit,
    ]
    legend(figure, handles if len(flagged) else [handles[0], limit])
    return figure
