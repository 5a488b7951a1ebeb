"""Comparisons: of a posterior with NUTS, element by element, and of models with each other."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import jax
import numpy as np
from jax import Array
from scipy.spatial.distance import cdist
from scipy.stats import wasserstein_distance

from numpyro_fed.after.arviz import elpd_data
from numpyro_fed.after.own_rows import outcomes_of_silos
from numpyro_fed.basics import display
from numpyro_fed.basics.errors import ConvergenceWarning, DataError, NonFiniteError, optional
from numpyro_fed.basics.programs import double_precision
from numpyro_fed.basics.trees import EntryNames, element_name
from numpyro_fed.posterior.corrected import Corrected
from numpyro_fed.posterior.importance import importance_correct
from numpyro_fed.posterior.posterior import Posterior
from numpyro_fed.posterior.result import Result
from numpyro_fed.reference.nuts_result import ROUNDING, NutsResult

# Effective draws below which NUTS is no reference: its own error of a mean is 0.05 sd at 400.
MIN_EFFECTIVE = 400
ABSENT = "-"  # in a table, where there is nothing to compare
MEASURES = "mean_error_sd", "sd_ratio", "wasserstein_sd"
# Draws of each side that the joint distance takes: its time grows with their square, and its noise
# falls as they grow. With 1,000 it took 0.5 s on two cores.
JOINT_DRAWS = 1_000
# What is left out where models are compared, and silos whose outcomes are compared first, which
# takes a run of the text for each.
ROWS, SILOS = "rows", "silos"
MOST_COMPARED = 10


def compare(
    result: Result | Corrected | NutsResult,
    reference: NutsResult,
    *,
    key: Array | None = None,
    num_draws: int = 20_000,
) -> Comparison:
    r"""Compare the globals' posterior with NUTS, element by element.

    .. math::
        \text{mean\_error\_sd} = \frac{|\bar z - \bar z_{\text{NUTS}}|}{s_{\text{NUTS}}},
        \qquad \text{sd\_ratio} = \frac{s}{s_{\text{NUTS}}}, \qquad
        \text{wasserstein\_sd} = \frac{W_1}{s_{\text{NUTS}}}

    Then all ``k`` elements together, by the Sinkhorn divergence ``S`` of :math:`u = \Sigma^{-1/2}
    (z - m)`, with mean ``m`` and covariance :math:`\Sigma` of NUTS, and ``z`` the logs of elements
    that are positive in all draws:

    .. math::
        S(P, Q) = T(P, Q) - \tfrac12 T(P, P) - \tfrac12 T(Q, Q), \qquad
        T(P, Q) = \min_\pi \mathbb{E}_\pi \|u - v\|^2 + 2k\, KL(\pi \| P \otimes Q)

    over the joint distributions :math:`\pi` with marginals ``P`` and ``Q``.

    Parameters
    ----------
    result : Posterior, or VerticalResult
        A fit, its importance correction, the result of :func:`numpyro_fed.fit`, or another run of
        NUTS (at one silo alone, for example).
    reference : NutsResult
        The result of :func:`numpyro_fed.run_nuts`.
    key : jax.Array, optional
        The key of draws from the fit.
    num_draws : int
        The number of draws from the fit. A correction is compared by its own weighted draws.

    Returns
    -------
    Comparison
        Print it, or use ``.to_dict()`` and ``.plot()``. Measures are NaN, and "-" in the table,
        where an element of a correction has no mean or no sd in which they could be counted
        (:attr:`numpyro_fed.Corrected.reservation`): compare its quantiles.

    Warns
    -----
    ConvergenceWarning
        If NUTS has fewer than 400 effective draws for an element, too few to judge by.

    Examples
    --------
    >>> import jax, numpy as np, numpyro, numpyro.distributions as dist, optax
    >>> import numpyro_fed as nf
    >>> def model(y):
    ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
    ...     with nf.silo_plate("row", y.shape[0]):
    ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y)
    >>> silos = [dict(y=np.array([1.0, 2.0])), dict(y=np.array([3.0, 4.0, 5.0]))]
    >>> quiet = dict(progress_bar=False)
    >>> fit = nf.SFVI(model, optim=optax.adam(0.05)).run(jax.random.key(0), 500, silos, **quiet)
    >>> nuts = nf.run_nuts(jax.random.key(1), model, silos, num_samples=3_000, **quiet)
    >>> table = nf.compare(fit, nuts)
    >>> bool(table.to_dict()["sites"]["mu"]["mean_error_sd"] < 0.15)
    True

    References
    ----------
    Feydy et al. (2019), AISTATS, for the Sinkhorn divergence; it is computed by OTT-JAX.
    """
    key = jax.random.key(0) if key is None else key
    result = getattr(result, "best", result)
    key_draws, key_weights = jax.random.split(key)
    drawn: Mapping[str, Array | np.ndarray]
    weights: np.ndarray | None = None
    if isinstance(result, Corrected):
        drawn, weights = result.draws, result.weights
    elif isinstance(result, NutsResult):
        drawn = result.sites_of(None)
    else:
        drawn = result.sample_posterior(key_draws, num_draws)
    draws = {k: np.asarray(v) for k, v in drawn.items()}
    nuts = reference.sites_of(None)
    if draws.keys() != nuts.keys():
        raise ValueError(
            f"the fit has the global sites {sorted(draws)}, NUTS has {sorted(nuts)}. Compare runs "
            "of one model."
        )
    effective = {name: e[~_constant(nuts[name])] for name, e in reference.ess().items()}
    fewest = {name: float(np.nanmin(e)) for name, e in effective.items() if e.size}
    name = min(fewest, key=lambda name: fewest[name], default="")
    if fewest and (number := fewest[name]) < MIN_EFFECTIVE:
        warnings.warn(
            f"NUTS has only {number:.0f} effective draws for '{name}', so its own error of "
            f"the mean there is about {number**-0.5:.2f} sd. Run it with more num_samples or "
            "num_chains before judging by it.",
            category=ConvergenceWarning,
            stacklevel=2,
        )
    pareto_k = _pareto_k(result, key_weights)
    without_sd: set[str] = set()
    labels = getattr(result, "entry_names", {})
    if isinstance(result, Corrected):
        errors = result.errors
        without_sd = {n for n, no in zip(errors.names, errors.infinite[1], strict=True) if no}
    sites = {}
    for name, expected in nuts.items():
        mean = np.average(draws[name], axis=0, weights=weights)
        sd = np.sqrt(np.average((draws[name] - mean) ** 2, axis=0, weights=weights))
        center, scale = expected.mean(0), expected.std(0)
        distance, no_sd = np.zeros(scale.shape), np.zeros(scale.shape, bool)
        for i in np.ndindex(scale.shape):
            at = draws[name][:, *i], expected[:, *i]
            distance[i] = wasserstein_distance(*at, u_weights=weights)
            no_sd[i] = element_name(name, i, labels) in without_sd
        # A constant has an sd of zero: errors are then absolute, and the ratio is one.
        constant = _constant(expected) & (sd <= ROUNDING * abs(mean))
        scale = np.where(constant, 1.0, scale)
        measures = (abs(mean - center) / scale, np.where(constant, 1.0, sd / scale))
        sites[name] = {
            m: np.where(no_sd, np.nan, value)
            for m, value in zip(MEASURES, (*measures, distance / scale), strict=True)
        }
    bounds = {} if reference._run is None else reference._run.model.bounds
    return Comparison(sites, pareto_k, draws, weights, nuts, labels, bounds)


@dataclass(frozen=True, eq=False)
class Comparison:
    """A table of the differences between a fit and NUTS, as :func:`compare` returns it.

    Attributes
    ----------
    sites : dict
        ``{site: {"mean_error_sd", "sd_ratio", "wasserstein_sd"}}``, arrays of the site's shape.
    pareto_k : float
        Shape of the importance weights of the fit (:func:`numpyro_fed.importance_correct`); NaN
        for NUTS, and under a divergence other than KL, which have none, and infinite if a silo's
        weights are not finite.
    """

    sites: dict[str, dict[str, np.ndarray]]
    pareto_k: float
    _draws: Mapping[str, np.ndarray] = field(repr=False)
    _weights: np.ndarray | None = field(repr=False)
    _nuts: Mapping[str, np.ndarray] = field(repr=False)
    _labels: EntryNames = field(default_factory=dict, repr=False)
    _bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict, repr=False)

    @cached_property
    def joint(self) -> dict[str, float]:
        r"""The Sinkhorn divergence of all elements together, and that between halves of NUTS.

        ``{"sinkhorn_divergence", "noise_floor"}``, in squared sds, by 1,000 draws of each side and
        the means of all. A mean that is off by :math:`\delta` sds makes it :math:`\delta^2` or
        more. What is not above the floor is no difference that these draws can show; among fifty
        elements it hides one that is half as wide, which the table shows. Elements without an sd
        and those that do not vary are left out. It is computed when it is first asked for.
        """
        kept = {name: ~np.isnan(found["sd_ratio"]) for name, found in self.sites.items()}
        if not any(k.any() for k in kept.values()):
            return {"sinkhorn_divergence": np.nan, "noise_floor": np.nan}
        fit, nuts = (
            np.concatenate([of[name][:, k] for name, k in kept.items()], 1, dtype=float)
            for of in (self._draws, self._nuts)
        )
        # A few draws far out in the tail of a spread would decide the mean of squared distances.
        positive = (fit > 0).all(0) & (nuts > 0).all(0)
        fit, nuts = (np.where(positive, np.log(np.where(positive, z, 1)), z) for z in (fit, nuts))
        half = len(nuts) // 2
        return {
            "sinkhorn_divergence": joint_divergence(fit, self._weights, nuts),
            "noise_floor": joint_divergence(nuts[half:], None, nuts[:half]),
        }

    def to_dict(self) -> dict[str, Any]:
        """Return ``{"sites": {site: {...}}, "pareto_k": ..., "joint": {...}}``."""
        return {"sites": self.sites, "pareto_k": self.pareto_k, "joint": self.joint}

    def _cells(self) -> list[tuple[str, ...]]:
        """Return the cells of the table: the names of columns, and a row for each element."""
        rows: list[tuple[str, ...]] = [("site", "mean error (sd)", "sd ratio", "Wasserstein (sd)")]
        for name, measures in self.sites.items():
            constant = _constant(self._nuts[name]) & _constant(self._draws[name])
            for i in np.ndindex(constant.shape):
                if not constant[i]:
                    values = (measures[m][i] for m in MEASURES)
                    cells = (ABSENT if np.isnan(v) else f"{v:.3f}" for v in values)
                    rows.append((element_name(name, i, self._labels), *cells))
        return rows

    def _note(self) -> list[str]:
        notes = []
        if not np.isnan(divergence := self.joint["sinkhorn_divergence"]):
            floor = f"{self.joint['noise_floor']:.3f} between halves of NUTS"
            notes.append(f"joint Sinkhorn divergence (sd²): {divergence:.3f}; {floor}")
        if any(np.isnan(measures["sd_ratio"]).any() for measures in self.sites.values()):
            notes.append(f"{ABSENT}: no mean or no sd; compare quantiles")
        if not np.isnan(self.pareto_k):
            notes.append(f"Pareto k-hat of the fit's importance weights: {self.pareto_k:.2f}")
        return notes

    def __str__(self) -> str:
        rows = self._cells()
        width = max(len(row[0]) for row in rows)
        line = f"{{:<{width}}}  {{:>15}}  {{:>8}}  {{:>16}}"
        return "\n".join([*(line.format(*row) for row in rows), *self._note()])

    def _repr_html_(self) -> str:
        head, *rows = self._cells()
        return "".join([display.html_table(head, rows), *map(display.html_words, self._note())])

    def plot(self, *, label: str = "federated") -> Any:
        """Return a matplotlib figure of the globals' marginal densities, over those of NUTS.

        Needs the extra ``examples``. At most 24 elements are drawn, in order.
        """
        elements = [
            (name, i)
            for name, draws in self._nuts.items()
            for i in np.ndindex(draws.shape[1:])
            if not _constant(draws)[i]
        ]
        shown = elements[: display.MOST_PANELS]
        figure, axes = display.panels(len(shown))
        handles: list[Any] = []
        for axis, (name, i) in zip(axes, shown, strict=True):
            nuts, fit = self._nuts[name][:, *i], self._draws[name][:, *i]
            low, high = np.quantile(nuts, [0.001, 0.999])
            within, margin = self._bounds.get(name, display.UNBOUNDED), 0.1 * (high - low)
            grid = np.linspace(max(low - margin, within[0]), min(high + margin, within[1]), 200)
            below = display.density_at(grid, nuts, None, within)
            filled = axis.fill_between(grid, below, color=display.REFERENCE, lw=0, label="NUTS")
            density = display.density_at(grid, fit, self._weights, within)
            (line,) = axis.plot(grid, density, color=display.POSTERIOR, label=label)
            axis.set(xlabel=element_name(name, i, self._labels), yticks=[], ylim=(0, None))
            axis.spines["left"].set_visible(False)
            handles = [filled, line]
        for axis in axes[:: display.COLUMNS]:
            axis.set_ylabel("density")
        display.legend(figure, handles, len(shown), len(elements))
        return figure


def joint_divergence(draws: np.ndarray, weights: np.ndarray | None, reference: np.ndarray) -> float:
    """Return the Sinkhorn divergence of draws (n, k) from a reference (m, k), in the latter's sds.

    NaN if there is none: draws that are not finite, or a reference that does not vary.
    """
    varies = ~_constant(reference)
    if not (varies.any() and np.isfinite(draws).all() and np.isfinite(reference).all()):
        return float("nan")
    draws, reference = draws[:, varies], reference[:, varies]
    center, scale = reference.mean(0), reference.std(0)
    standard = (reference - center) / scale
    # Elements that others determine (a deterministic site) leave directions without spread.
    variances, axes = np.linalg.eigh(standard.T @ standard / len(standard))
    spread = variances > ROUNDING**2 * variances[-1]
    whiten = axes[:, spread] / np.sqrt(variances[spread])
    # As many draws of both, at even steps of their weights: one program for all models. Steps do
    # not end where a draw does, where rounding would choose.
    at = (np.arange(JOINT_DRAWS) + 0.618) / JOINT_DRAWS

    def thinned(draws: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
        edges = np.cumsum(np.ones(len(draws)) if weights is None else weights)
        few = draws[np.searchsorted(edges / edges[-1], at)]
        return (few - few.mean(0) + np.average(draws, 0, weights)) @ whiten

    u, v = thinned((draws - center) / scale, weights), thinned(standard, None)
    costs = [cdist(a, b, "sqeuclidean") for a, b in ((u, v), (u, u), (v, v))]
    with double_precision():
        return max(0.0, float(_sinkhorn()(*costs, epsilon=2.0 * spread.sum())))


@cache
def _sinkhorn() -> Callable[..., Array]:
    """Return the compiled divergence by costs from draws to reference, and within each of them."""
    # Here, since the import takes seconds. JAXopt, which it imports, warns that it is old.
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        from ott.geometry.geometry import Geometry
        from ott.tools.sinkhorn_divergence import sinkhorn_divergence

    return jax.jit(
        lambda *costs, epsilon: sinkhorn_divergence(Geometry, *costs, epsilon=epsilon)[0]
    )


def _constant(draws: np.ndarray) -> np.ndarray:
    """Return which elements do not vary, such as the first row of a Cholesky factor."""
    return draws.std(0) <= ROUNDING * abs(draws.mean(0))


def _pareto_k(result: Result | Corrected | NutsResult, key: Array) -> float:
    if isinstance(result, NutsResult):
        return float("nan")
    if isinstance(result, Corrected):
        return result.pareto_k
    # Fewer draws than a correction takes: k-hat alone is wanted.
    if isinstance(result, Result):  # its guide, and not the mixtures by which nf.fit has judged it
        result = replace(result, _checked=None)
    try:
        return importance_correct(key, result, num_draws=1_000, inner_draws=50).pareto_k
    except NonFiniteError:
        return float("inf")
    except ValueError:
        # Under a divergence other than KL there are no weights.
        return float("nan")


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
        return display.html_table(self.HEAD, self._rows)


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
