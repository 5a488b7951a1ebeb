"""Exact posteriors of the oracle's models: densities by hand in float64, and their moments.

Locals are integrated in closed form where rows and locals are Gaussian, and row by row elsewhere,
in panels around each integrand's own mode and around zero. Moments of the globals, in unconstrained
space, come from adaptive cubature over all of it: modes from many starts; a frame that is white at
the best of them, bent so that a cube covers the space; cells split where modes are, and where two
rules on a cell disagree. A finer rule on the same cells (and twice the nodes for each local) has
the last word: what changes by more than a thousandth of a standard deviation has not converged.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from oracle_models import SHIFT, SUPPORTS, Global, Prior, Spec, unconstrained_size
from scipy.special import betaln, expit, gammaln, log_expit, log_ndtr

Array = np.ndarray
LOG_2PI = np.log(2 * np.pi)
AGREES = 1e-3  # of a standard deviation
CHUNK = 2_000_000  # numbers in one array, about


class NotConverged(ArithmeticError):
    """The cubature did not settle."""


class Moments(NamedTuple):
    """Mean and standard deviation of each coordinate, and the log of the integral."""

    mean: Array
    sd: Array
    log_evidence: float


# ------------------------------------------------------------------ supports


def constrain(prior: Prior, u: Array) -> tuple[Array, Array]:
    """Values on the support from coordinates (m, k), and the log determinant (m,)."""
    support, a = SUPPORTS[prior.kind], prior.args
    if support == "real":
        return u, np.zeros(len(u))
    if support in ("positive", "lower"):
        return (a[0] if support == "lower" else 0.0) + np.exp(u), u.sum(1)
    if support == "interval":
        low, high = a if prior.kind == "uniform" else (0.0, 1.0)
        log_det = np.log(high - low) + log_expit(u) + log_expit(-u)
        return low + (high - low) * expit(u), log_det.sum(1)
    if support == "simplex":
        z = u - np.log([2.0, 1.0])
        first = expit(z[:, 0])
        second = (1 - first) * expit(z[:, 1])
        rest = expit(-z[:, 0]) * expit(-z[:, 1])
        log_det = log_expit(z) + log_expit(-z)
        return np.stack([first, second, rest], 1), log_det.sum(1) + log_expit(-z[:, 0])
    if support == "ordered":
        return np.stack([u[:, 0], u[:, 0] + np.exp(u[:, 1])], 1), u[:, 1]
    return np.tanh(u), (np.log(4.0) + 2 * log_expit(2 * u) - 2 * u).sum(1)  # log(1 - tanh^2)


def unconstrain(g: Global, value: Array) -> Array:
    """Coordinates (n, k) of a site's draws, in float64."""
    kind, a = g.prior.kind, g.prior.args
    v = np.asarray(value, np.float64)
    if kind == "lkj_cholesky":
        v = v[..., 1, 0]
    elif kind == "lkj":
        v = v[..., 0, 1]
    v = v.reshape(len(v), -1)
    support = SUPPORTS[kind]
    if support in ("positive", "lower"):
        return np.log(_gap(v, a[0] if support == "lower" else 0.0))
    if support == "interval":
        low, high = a if kind == "uniform" else (0.0, 1.0)
        return np.log(_gap(v, low) / _gap(v, high))
    if support == "simplex":
        return np.log(_gap(v[:, :2], 0.0) / _gap(v[:, :2].cumsum(1), 1.0)) + np.log([2.0, 1.0])
    if support == "ordered":
        return np.stack([v[:, 0], np.log(_gap(v[:, 1], v[:, 0]))], 1)
    if support == "correlation":
        return 0.5 * np.log(_gap(v, -1.0) / _gap(v, 1.0))
    return v


def _gap(value: Array, bound: Array | float) -> Array:
    """The distance from a bound; what single precision rounded onto it or infinity was near it."""
    least = np.spacing(np.abs(bound).astype(np.float32)).astype(np.float64) / 4
    return np.clip(np.abs(value - bound), least, float(np.finfo(np.float32).max))


# ------------------------------------------------------------------ densities by hand


def normal(x: Array, m: Any, s: Any) -> Array:
    return -0.5 * ((x - m) / s) ** 2 - np.log(s) - 0.5 * LOG_2PI


def student(x: Array, df: float, m: Any, s: Any) -> Array:
    z = (x - m) / s
    norm = gammaln((df + 1) / 2) - gammaln(df / 2) - 0.5 * np.log(df * np.pi)
    return norm - np.log(s) - (df + 1) / 2 * np.log1p(z * z / df)


def laplace(x: Array, m: Any, s: Any) -> Array:
    return -abs(x - m) / s - np.log(2 * s)


def gamma(x: Array, a: Any, b: Any) -> Array:
    return a * np.log(b) + (a - 1) * np.log(x) - b * x - gammaln(a)


def _prior_density(kind: str, x: Array, a: Sequence[Any]) -> Array:
    """Log density of a prior at its values (m, width), element by element or as a vector (m, 1)."""
    if kind == "normal":
        return normal(x, *a)
    if kind == "student":
        return student(x, *a)
    if kind == "laplace":
        return laplace(x, *a)
    if kind == "logistic":
        z = (x - a[0]) / a[1]
        return log_expit(z) + log_expit(-z) - np.log(a[1])
    if kind == "mixture":
        return np.logaddexp(normal(x, 0.0, 1.0), normal(x, a[0], 1.0)) - np.log(2)
    if kind == "half_normal":
        return normal(x, 0.0, a[0]) + np.log(2)
    if kind == "log_normal":
        return normal(np.log(x), *a) - np.log(x)
    if kind == "gamma":
        return gamma(x, *a)
    if kind == "exponential":
        return np.log(a[0]) - a[0] * x
    if kind == "half_cauchy":
        return np.log(2 / (np.pi * a[0])) - np.log1p((x / a[0]) ** 2)
    if kind == "inverse_gamma":
        return a[0] * np.log(a[1]) - (a[0] + 1) * np.log(x) - a[1] / x - gammaln(a[0])
    if kind == "truncated":
        return normal(x, 0.0, a[1]) - log_ndtr(-a[0] / a[1])
    if kind == "pareto":
        return np.log(a[1]) + a[1] * np.log(a[0]) - (a[1] + 1) * np.log(x)
    if kind == "uniform":
        return np.full(x.shape, -np.log(a[1] - a[0]))
    raise ValueError(kind)


def log_prior(g: Global, u: Array, value: Array, log_det: Array, named: dict[str, Array]) -> Array:
    """Log prior (m,) of one site in unconstrained space."""
    kind = g.prior.kind
    a = [named[x] if isinstance(x, str) else x for x in g.prior.args]
    if kind == "beta":
        terms = a[0] * log_expit(u) + a[1] * log_expit(-u) - betaln(*a)  # log_det in it
        return terms.sum(1)
    if kind == "dirichlet":
        norm = gammaln(sum(a)) - sum(map(gammaln, a))
        z = u - np.log([2.0, 1.0])
        logs = [log_expit(z[:, 0]), log_expit(-z[:, 0]) + log_expit(z[:, 1])]
        logs.append(log_expit(-z).sum(1))
        return norm + sum((c - 1) * v for c, v in zip(a, logs, strict=True)) + log_det
    if kind == "ordered":
        return normal(u, 0.0, a[0]).sum(1)
    if kind in ("lkj_cholesky", "lkj"):
        norm = (2 * a[0] - 1) * np.log(2) + betaln(a[0], a[0])
        return a[0] * log_det - norm
    return _prior_density(kind, value, a).sum(1) + log_det


def log_likelihood(spec: Spec, eta: Array, noise: Any, named: dict, d: dict[str, Array]) -> Array:
    """Log density of each outcome, ``eta`` (..., N)."""
    y, kind = d["y"], spec.likelihood
    if kind == "gaussian":
        return normal(y, eta, noise)
    if kind == "laplace":
        return laplace(y, eta, noise)
    if kind == "student":
        return student(y, 4.0, eta, noise)
    if kind == "bernoulli":
        return log_expit((2 * y - 1) * eta)
    if kind == "poisson":
        return y * eta - np.exp(eta) - gammaln(y + 1)
    if kind == "negative_binomial":
        total = np.logaddexp(np.log(noise), eta)
        choose = gammaln(y + noise) - gammaln(noise) - gammaln(y + 1)
        return choose + noise * (np.log(noise) - total) + y * (eta - total)
    if kind == "gamma":
        norm = noise * np.log(noise) - gammaln(noise) + (noise - 1) * np.log(y)
        return norm - noise * eta - noise * y * np.exp(-eta)
    if kind == "weibull":
        z = noise * (np.log(y) - eta)
        return np.where(d["cut"], 0.0, np.log(noise) + z - np.log(y)) - np.exp(z)
    if kind == "censored":
        return np.where(d["cut"], log_ndtr((eta - y) / noise), normal(y, eta, noise))
    if kind == "mixture":
        first, second = normal(y, eta, noise), normal(y, eta + SHIFT, noise)
        return np.logaddexp(np.log(0.7) + first, np.log(0.3) + second)
    if kind == "two_means":
        w = named["weight"] if spec.of("weight") else np.full((1, 1), 0.5)
        first = np.log(w) + normal(y, named["means"][:, :1], noise)
        return np.logaddexp(first, np.log1p(-w) + normal(y, named["means"][:, 1:], noise))
    if kind == "pair":
        rho = named["rho"]
        a, b = (y[:, 0] - eta) / noise, (y[:, 1] - eta) / noise
        left = 1 - rho**2
        square = (a * a - 2 * rho * a * b + b * b) / left
        return -0.5 * square - 0.5 * np.log(left) - 2 * np.log(noise) - LOG_2PI
    p = named["chance"]
    if kind == "proportion":
        return y * np.log(p) + (1 - y) * np.log1p(-p)
    if kind == "rate":
        rate = p * d["x"][:, 0]
        return y * np.log(rate) - rate - gammaln(y + 1)
    return np.log(p)[:, y]


def _flat(spec: Spec, silos: Sequence[dict]) -> dict[str, Array]:
    """All silos' outcomes in one row, in float64, each with the number of its local."""
    parts: dict[str, list[Array]] = {}
    groups, first = [], 0
    for silo in silos:
        shape = np.shape(silo["y"])[: 2 if spec.plate == "visit" else 1]
        n = int(np.prod(shape))
        for k, v in silo.items():
            if k in ("h", "n_hospitals"):
                continue
            v = np.asarray(v, np.float64) if np.asarray(v).dtype.kind == "f" else np.asarray(v)
            parts.setdefault(k, []).append(v.reshape(n, *v.shape[len(shape) :]))
        rows = np.repeat(np.arange(shape[0]), n // shape[0])
        groups.append(first + np.asarray(silo["h"] if spec.plate == "hospital" else rows))
        first = groups[-1].max() + 1
    return {**{k: np.concatenate(v) for k, v in parts.items()}, "group": np.concatenate(groups)}


def log_density(spec: Spec, silos: Sequence[dict], fine: bool = False) -> Callable[[Array], Array]:
    """The log posterior density, up to the evidence, at points (m, dim) in unconstrained space."""
    d = _flat(spec, silos)
    n = len(d["y"])
    weight = spec.power * d.get("here", np.ones(n)).astype(float)
    if spec.likelihood == "two_means" or "x" not in d or spec.likelihood == "rate":
        design = np.zeros((n, 0))
    else:
        design = d["x"]

    def at(u: Array) -> Array:
        named, total, start = {}, np.zeros(len(u)), 0
        for g in spec.globals:
            part = u[:, start : start + unconstrained_size(g)]
            start += part.shape[1]
            value, log_det = constrain(g.prior, part)
            total = total + log_prior(g, part, value, log_det, named)
            if spec.factor and spec.factor[0] == g.name:
                total = total + normal(value[:, 0], *spec.factor[1:])
            named[g.name] = {"exp": np.exp, "tanh": np.tanh}.get(g.how, lambda v: v)(value)
        eta = np.zeros((len(u), n))
        if design.shape[1]:
            eta = np.concatenate([named[g.name] for g in spec.of("coef")], 1) @ design.T
        noise: Any = spec.noise
        if noise == "global":
            noise = named[spec.of("noise")[0].name]
        elif noise == "data":
            noise = d["s"]
        if spec.local is None:
            return total + log_likelihood(spec, eta, noise, named, d) @ weight
        tau = named[spec.of("spread")[0].name] if spec.spread == "global" else spec.spread
        tau = np.broadcast_to(np.asarray(tau, float).reshape(-1, 1), (len(u), 1))
        if _by_quadrature(spec):
            return total + _integrated(spec, d, eta, noise, named, tau, weight, fine)
        return total + _gaussian_locals(d, eta, noise, tau, weight)

    def chunked(u: Array) -> Array:
        each = n * (1 if spec.local is None else 8)
        size = max(1, CHUNK // each)
        with np.errstate(all="ignore"):
            found = [at(u[i : i + size]) for i in range(0, len(u), size)]
        out = np.concatenate(found) if found else np.zeros(0)
        return np.where(np.isnan(out), -np.inf, out)

    return chunked


def _by_quadrature(spec: Spec) -> bool:
    """Whether the locals have no closed form."""
    return spec.local is not None and (spec.likelihood, spec.local) != ("gaussian", "normal")


def _gaussian_locals(d: dict, eta: Array, noise: Any, tau: Array, weight: Array) -> Array:
    """A likelihood to a power is Gaussian too, up to its norm, and so is its product.

    Squares are taken about each group's mean, so that nothing cancels where the noise is small.
    """
    starts = np.flatnonzero(np.diff(d["group"], prepend=-1))
    counts = np.diff([*starts, len(d["y"])])
    noise = np.broadcast_to(noise, eta.shape)
    precision, residual = weight / noise**2, d["y"] - eta
    P = np.add.reduceat(precision, starts, 1)
    centre = np.add.reduceat(precision * residual, starts, 1) / np.where(P > 0, P, 1.0)
    around = precision * (residual - np.repeat(centre, counts, 1)) ** 2
    norm = -(np.log(noise) + 0.5 * LOG_2PI) @ weight
    shrunk = 1 + P * tau**2
    return norm - 0.5 * around.sum(1) - 0.5 * (np.log(shrunk) + P * centre**2 / shrunk).sum(1)


STANDARD: dict[str, Callable[[Array], Array]] = {
    "normal": lambda e: normal(e, 0.0, 1.0),
    "student": lambda e: student(e, 5.0, 0.0, 1.0),
    "laplace": lambda e: laplace(e, 0.0, 1.0),
}


def _integrated(
    spec: Spec, d: dict, eta: Array, noise: Any, named: dict, tau: Array, weight: Array, fine: bool
) -> Array:
    """The locals integrated one by one, in panels that widen away from their modes."""
    starts = np.flatnonzero(np.diff(d["group"], prepend=-1))
    counts = np.diff([*starts, len(d["y"])])

    def f(e: Array) -> Array:
        """Log integrand (m, groups) at standardised locals."""
        b = np.repeat(tau * e, counts, axis=1)
        terms = log_likelihood(spec, eta + b, noise, named, d) * weight
        return np.add.reduceat(terms, starts, 1) + STANDARD[str(spec.local)](e)

    shape = (len(eta), len(starts))
    best, top = np.zeros(shape), f(np.zeros(shape))
    for e in np.sinh(np.linspace(-3.5, 3.5, 14)):
        value = f(np.full(shape, e))
        best, top = np.where(value > top, e, best), np.maximum(value, top)
    h = np.full(shape, 0.5)
    for _ in range(14):
        up, down = f(best + h), f(best - h)
        slope, bend = (up - down) / (2 * h), -(up + down - 2 * top) / h**2
        curved = bend > 0
        step = np.where(curved, slope / np.where(curved, bend, 1), np.sign(slope) * 3 * h)
        step = np.clip(step, -6 * h, 6 * h)
        tried = np.stack([np.zeros(shape), step, h, -h])
        heights = np.stack([top, f(best + step), up, down])
        chosen = np.argmax(heights, 0)[None]
        best = best + np.take_along_axis(tried, chosen, 0)[0]
        top = np.take_along_axis(heights, chosen, 0)[0]
        h = np.clip(np.where(curved, 1 / np.sqrt(np.where(curved, bend, 1)), 4 * h), h / 4, 4 * h)
        if (abs(step) < 0.05 * h).all() and (abs(bend * h * h - 1) < 0.5).all():
            break
    bend = np.maximum(2 * top - f(best + h) - f(best - h), 1.0) / h**2
    h = np.minimum(h, 1 / np.sqrt(bend))  # a spike that is narrower yet
    return _in_panels(f, best, top, h, 8 if fine else 5).sum(1)


def _in_panels(f: Callable, best: Array, top: Array, h: Array, order: int) -> Array:
    """The log integrals (m, groups) by Gauss-Legendre between points.

    These lie around each integrand's mode and, as wide as the locals are by themselves, around
    zero, where the density of some has a kink.
    """
    reach = np.sinh(np.linspace(-5, 5, 15))
    ends = np.sort(
        [*(best + h * t for t in reach), *(np.full_like(best, t) for t in reach)], axis=0
    )
    nodes, weights = np.polynomial.legendre.leggauss(order)
    total = np.zeros_like(best)
    for low, high in itertools.pairwise(ends):
        half = (high - low) / 2
        for node, weight in zip(nodes, weights, strict=True):
            total += weight * half * np.exp(np.minimum(f(low + half * (1 + node)) - top, 600))
    return np.log(total) + top


# ------------------------------------------------------------------ modes


def find_modes(f: Callable[[Array], Array], starts: Array, scale: Array, rounds: int = 60) -> Any:
    """Climb from many starts at once; modes (k, dim), heights, and covariances by secants.

    Each start has a step in every direction, which becomes the distance at which the density has
    fallen by half a nat: derivatives at that scale do not mind kinks.
    """
    z, dim = starts.copy(), starts.shape[1]
    h = np.broadcast_to(scale, z.shape).copy()
    stencil = _stencil(dim)
    top = f(z)
    z, h, top = z[np.isfinite(top)], h[np.isfinite(top)], top[np.isfinite(top)]
    if not len(z):
        raise NotConverged("no start has a finite density")
    precision = np.zeros((len(z), dim, dim))
    for i in range(rounds):
        points = z[:, None] + stencil * h[:, None]
        values = f(points.reshape(-1, dim)).reshape(len(z), -1)
        values = np.where(np.isfinite(values), values, top[:, None] - 1e4)
        slope, precision = _model(values, top, dim)
        lam, vectors = np.linalg.eigh(precision)
        along = np.einsum("mji,mj->mi", vectors, slope)
        step = np.einsum("mij,mj->mi", vectors, along / np.maximum(abs(lam), 1e-2))
        step *= np.minimum(1, 8 / np.maximum(np.linalg.norm(step, axis=1, keepdims=True), 1e-300))
        ahead = z[:, None] + np.array([[1.0], [0.3]]) * (step * h)[:, None]
        options = np.concatenate([points, ahead], 1)
        extra = f(ahead.reshape(-1, dim)).reshape(len(z), 2)
        values = np.concatenate([values, np.where(np.isfinite(extra), extra, -np.inf)], 1)
        best = values.argmax(1)
        gain = values[np.arange(len(z)), best] - top
        moved = gain > 0
        z = np.where(moved[:, None], options[np.arange(len(z)), best], z)
        top = np.where(moved, values[np.arange(len(z)), best], top)
        curve = np.diagonal(precision, axis1=1, axis2=2)
        factor = np.where(curve > 0, 1 / np.sqrt(np.maximum(curve, 1e-300)), 4.0)
        settled = (gain < 1e-3).all() and ((factor > 0.5) & (factor < 2)).all()
        if settled and i > 3:
            break
        h = h * np.clip(factor, 0.25, 4.0)
    lam, vectors = np.linalg.eigh(precision)
    root = vectors / np.sqrt(np.maximum(lam, 0.02))[:, None]
    return z, top, h[:, :, None] * root


def _stencil(dim: int) -> Array:
    eye = np.eye(dim)
    pairs = itertools.combinations(range(dim), 2)
    corners = [a * eye[i] + b * eye[j] for i, j in pairs for a in (1, -1) for b in (1, -1)]
    return np.array([*eye, *-eye, *corners])


def _model(values: Array, top: Array, dim: int) -> tuple[Array, Array]:
    """Slope and curvature of a quadratic through a stencil, in units of its steps."""
    up, down = values[:, :dim], values[:, dim : 2 * dim]
    slope = (up - down) / 2
    precision = np.zeros((len(values), dim, dim))
    precision[:, range(dim), range(dim)] = -(up + down - 2 * top[:, None])
    for k, (i, j) in enumerate(itertools.combinations(range(dim), 2)):
        pp, pm, mp, mm = values[:, 2 * dim + 4 * k : 2 * dim + 4 * k + 4].T
        precision[:, i, j] = precision[:, j, i] = -(pp - pm - mp + mm) / 4
    return slope, precision


def _distinct(z: Array, top: Array, root: Array) -> list[int]:
    """The highest of each cluster, best first; hopeless ones are left out."""
    kept: list[int] = []
    for i in np.argsort(-top):
        if top[i] < top.max() - 30:
            break
        near = (np.linalg.norm(np.linalg.solve(root[k], z[i] - z[k])) < 0.7 for k in kept)
        if not any(near):
            kept.append(i)
        if len(kept) == 12:
            break
    return kept


# ------------------------------------------------------------------ cubature


def moments(
    f: Callable[[Array], Array],
    starts: Array,
    scale: Array,
    check: Callable[[Array], Array] | None = None,
    budget: int = 1_000_000,
    view: Callable[[Array], Array] = lambda u: u,
) -> Moments:
    """Moments of ``exp(f)`` over the whole space.

    Parameters
    ----------
    f, check : (m, dim) -> (m,)
        The log density, and the same to a higher accuracy.
    starts : array (m, dim)
        Where to look for modes.
    scale : array (dim,)
        A first idea of the scale of each coordinate.
    budget : int
        Evaluations, at most, before the last pass.
    view : (m, dim) -> (m, dim)
        The coordinates whose moments are wanted.

    Raises
    ------
    NotConverged
    """
    z, top, root = find_modes(f, starts, scale)
    chosen = _distinct(z, top, root)
    at = _Frame(z[chosen[0]], root[chosen[0]], float(top[chosen[0]]), view)
    dim, order = len(at.centre), {1: 9, 2: 7, 3: 5}[len(at.centre)]
    modes = [(_to_cube(np.linalg.solve(at.root, z[k] - at.centre)), root[k]) for k in chosen]
    coarse, usual, finer = (_rule(n, dim) for n in (order - 2, order, order + 2))
    corners = np.array(list(itertools.product([0.0, 1.0], repeat=dim)))
    cells = _Cells(corners - 1, np.ones_like(corners))
    a, b = (_evaluate(f, at, cells, rule) for rule in (coarse, usual))
    spent, tolerance = 0, 2e-3
    while True:
        wrong = _relative(b - a, b.sum(0), dim)
        too_wide = _too_wide(cells, modes, at)
        split = too_wide | (wrong > tolerance / max(len(wrong), 20) ** 0.5)
        if not split.any() or (not too_wide.any() and wrong.sum() < tolerance):
            last = _summary(_evaluate(check or f, at, cells, finer), at)
            if _close(_summary(b, at), last):
                return last
            tolerance /= 10
            split = wrong > min(tolerance / max(len(wrong), 20) ** 0.5, np.median(wrong))
        spent += split.sum() * len(corners) * (len(coarse[0]) + len(usual[0]))
        if tolerance < 1e-6 or spent > budget:
            raise NotConverged(f"{spent} evaluations are not enough")
        halves = cells.side[split] / 2
        low = cells.low[split][:, None] + halves[:, None] * corners
        new = _Cells(low.reshape(-1, dim), np.repeat(halves, len(corners), 0))
        a, b = (
            np.concatenate([old[~split], _evaluate(f, at, new, rule)])
            for old, rule in ((a, coarse), (b, usual))
        )
        cells = _Cells(*(np.concatenate([c[~split], n]) for c, n in zip(cells, new, strict=True)))


class _Frame(NamedTuple):
    """Where coordinates start, their units, the density there, and how they are read."""

    centre: Array
    root: Array
    height: float
    view: Callable[[Array], Array]


class _Cells(NamedTuple):
    """Boxes in the cube: their lowest corners and their sides (cells, dim)."""

    low: Array
    side: Array


def _rule(n: int, dim: int) -> tuple[Array, Array]:
    """Gauss-Legendre in each dimension: nodes (n ** dim, dim) and weights."""
    nodes, weights = np.polynomial.legendre.leggauss(n)
    every = list(itertools.product(range(n), repeat=dim))
    return nodes[every], weights[every].prod(1)


def _evaluate(f: Callable, at: _Frame, cells: _Cells, rule: tuple[Array, Array]) -> Array:
    """Mass and first and second moments (cells, 1 + 2 dim) of the view, about the centre's."""
    nodes, weights = rule
    t = cells.low[:, None] + cells.side[:, None] * (nodes + 1) / 2
    s, log_det = _from_cube(t)
    z = (at.centre + s @ at.root.T).reshape(-1, t.shape[-1])
    values = f(z).reshape(t.shape[:2]) - at.height
    mass = np.exp(np.minimum(values + log_det, 600.0)) * weights
    mass = np.nan_to_num(mass) * np.prod(cells.side / 2, -1)[:, None]
    d = (at.view(z) - at.view(at.centre[None])).reshape(t.shape)
    d = np.where(mass[..., None] > 0, d, 0.0)
    first, second = np.einsum("cn,cnd->cd", mass, d), np.einsum("cn,cnd->cd", mass, d * d)
    return np.concatenate([mass.sum(1, keepdims=True), first, second], 1)


BEND = 3.0  # standard deviations at the cube's quarter points


def _from_cube(t: Array) -> tuple[Array, Array]:
    """From (-1, 1) to the reals, and the log determinant."""
    left = 1 - t * t
    return BEND * t / left, (np.log(BEND) + np.log1p(t * t) - 2 * np.log(left)).sum(-1)


def _to_cube(s: Array) -> Array:
    r = s / BEND
    return 2 * r / (1 + np.sqrt(1 + 4 * r * r))


def _relative(error: Array, total: Array, dim: int) -> Array:
    """A cell's share of the error of mass, means and squares, in standard deviations."""
    if not total[0] > 0:
        return np.full(len(error), np.inf)
    mean, square = total[1 : 1 + dim] / total[0], total[1 + dim :] / total[0]
    sd = np.sqrt(np.maximum(square - mean**2, 1e-12 * square + 1e-300))
    e0, e1, e2 = error[:, :1], error[:, 1 : 1 + dim], error[:, 1 + dim :]
    first = (e1 - mean * e0) / sd
    second = (e2 - 2 * mean * e1 + mean**2 * e0) / sd**2
    return np.max(abs(np.concatenate([e0, first, second], 1)), 1) / total[0]


def _too_wide(cells: _Cells, modes: list[tuple[Array, Array]], at: _Frame) -> Array:
    """Cells that hold a mode and are wide for it."""
    found = np.zeros(len(cells.low), bool)
    for t, root in modes:
        scale = np.linalg.norm(np.linalg.solve(at.root, root), axis=1)
        s, _ = _from_cube(t)
        reach = np.minimum(abs(_to_cube(s + 2 * scale) - t), abs(_to_cube(s - 2 * scale) - t))
        inside = ((t >= cells.low) & (t <= cells.low + cells.side)).all(1)
        found |= inside & (cells.side > np.maximum(2 * reach, 1e-7)).any(1)
    return found


def _summary(parts: Array, at: _Frame) -> Moments:
    total, dim = parts.sum(0), len(at.centre)
    if not total[0] > 0:
        raise NotConverged("no mass")
    shift, square = total[1 : 1 + dim] / total[0], total[1 + dim :] / total[0]
    variance = square - shift**2
    if not (variance > 0).all():
        raise NotConverged("a variance that is not positive")
    log_evidence = np.log(total[0]) + at.height + np.linalg.slogdet(at.root)[1]
    mean = at.view(at.centre[None])[0] + shift
    return Moments(mean, np.sqrt(variance), float(log_evidence))


def _close(a: Moments, b: Moments) -> bool:
    means = (abs(a.mean - b.mean) < AGREES * b.sd).all()
    return bool(means and (abs(a.sd / b.sd - 1) < AGREES).all())


# ------------------------------------------------------------------ a model's posterior


def as_seen(spec: Spec, u: Array) -> Array:
    """Coordinates (m, dim) on the scale of the text's own sites: scales, not their logs.

    Of the three shares of a simplex these are two.
    """
    parts, start = [], 0
    for g in spec.globals:
        part = u[:, start : (start := start + unconstrained_size(g))]
        parts.append(part if g.how in ("exp", "tanh") else constrain(g.prior, part)[0])
        parts[-1] = parts[-1][:, : part.shape[1]]
    return np.concatenate(parts, 1)


def exact(
    spec: Spec,
    silos: Sequence[dict],
    truth: Array,
    r: np.random.Generator,
    *,
    seen: bool = False,
) -> Moments:
    """The posterior of a model's globals, by the cubature above; ``seen`` by :func:`as_seen`.

    Where a prior's scale is another global the cubature goes over its standardised values: in the
    model's own the density has a ridge without end, which it may take for all there is.
    """
    scaled = _Scaled(spec)
    f, fine = (scaled.density(log_density(spec, silos, fine)) for fine in (False, True))
    starts, scale = _starts(spec, truth, r)
    starts, scale = scaled.standardised(starts), np.where(scaled.by >= 0, 1.0, scale)
    values = f(starts)
    best = starts[np.argsort(-values)[:12]]
    spread = starts[:12]
    budget = 1_000_000 if _by_quadrature(spec) else 5_000_000

    def view(u: Array) -> Array:
        with np.errstate(all="ignore"):
            return as_seen(spec, scaled.view(u)) if seen else scaled.view(u)

    return moments(f, np.concatenate([spread, best]), scale, fine, budget, view)


class _Scaled:
    """Coordinates in units of the global that is the scale of their prior."""

    def __init__(self, spec: Spec) -> None:
        sizes = [unconstrained_size(g) for g in spec.globals]
        starts = dict(zip([g.name for g in spec.globals], np.cumsum([0, *sizes]), strict=False))
        by = [starts.get(g.prior.args[-1], -1) for g in spec.globals]
        self.by = np.repeat(by, sizes)
        self.priors = {starts[g.name]: g.prior for g in spec.globals}

    def log_scale(self, u: Array) -> Array:
        """Of each coordinate (m, dim), zero for those that have none."""
        scale = np.zeros(u.shape)
        for i in np.flatnonzero(self.by >= 0):
            of = self.by[i]
            with np.errstate(all="ignore"):
                scale[:, i] = np.log(constrain(self.priors[of], u[:, of : of + 1])[0][:, 0])
        return scale

    def view(self, u: Array) -> Array:
        with np.errstate(all="ignore"):
            return u * np.exp(self.log_scale(u))

    def standardised(self, u: Array) -> Array:
        return u * np.exp(-self.log_scale(u))

    def density(self, f: Callable[[Array], Array]) -> Callable[[Array], Array]:
        return lambda u: f(self.view(u)) + self.log_scale(u).sum(1)


def _starts(spec: Spec, truth: Array, r: np.random.Generator) -> tuple[Array, Array]:
    """The place that made the data, and places wherever the prior has some mass."""
    centres, scales, near = [], [], []
    used = 0
    for g in spec.globals:
        k = unconstrained_size(g)
        w = 3 if SUPPORTS[g.prior.kind] == "simplex" else 2 if g.prior.kind == "ordered" else 1
        n = max(g.size, 1) * w
        near.append(_inverse(g, truth[used : used + n]))
        used += n
        args = [x for x in g.prior.args if not isinstance(x, str)]
        if SUPPORTS[g.prior.kind] == "real":
            centre, scale = {"mixture": (args[0] / 2, args[0])}.get(
                g.prior.kind, (args[-2] if len(args) > 1 else 0.0, args[-1])
            )
        else:
            centre, scale = 0.0, 2.0
        centres += [centre] * k
        scales += [scale or 1.0] * k
    scale_ = np.array(scales)
    draws = np.array(centres) + scale_ * r.standard_t(5, size=(200, len(scale_)))
    point = np.concatenate(near)
    jitter = point + 0.3 * np.minimum(scale_, 3.0) * r.normal(size=(20, len(scale_)))
    shifted = point + SHIFT * np.array([*np.eye(len(point)), *-np.eye(len(point))])
    return np.concatenate([point[None], shifted, draws[:7], jitter, draws[7:]]), scale_


def _inverse(g: Global, value: Array) -> Array:
    value = np.asarray(value, float)
    if g.how in ("exp", "tanh"):
        return {"exp": np.log, "tanh": np.arctanh}[g.how](value)
    if SUPPORTS[g.prior.kind] == "correlation":
        return np.arctanh(value)
    return unconstrain(g, value[None])[0]
