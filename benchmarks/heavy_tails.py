"""Is a mean, sd or quantile of a heavy-tailed posterior said to be known, and wrong?

Sixty random models of six kinds, whose posteriors fall as powers on the scale on which their user
sees them: scales under half-Cauchy priors with few groups or trials, ratios, variances with few
rows, locations under Cauchy distributions, dispersions of counts. Each global's marginal is known
on a grid, and the index of its tail by hand: a moment of an order at or above it does not exist.

For each global ``nf.fit`` says which of mean and sd exist, whether they are known, and whether the
quantiles are. An outcome is

- ``wrong``: a mean or sd that is said to be known and does not exist, or is off by more than 0.1 sd
  (10 % for sds); a quantile (5, 25, 50, 75, 95 %) that is said to be known and is off by more than
  0.1 sd and by more than 1 % of probability;
- ``denied``: a moment that exists and is said not to;
- ``unknown``: a moment that exists and is not known; the verdict says so;
- ``right``: all others.

Without an sd the unit of quantiles is that of normal scores. All is given two standard errors of
the draws besides, as in the oracle.

    python benchmarks/heavy_tails.py --models 0:60 --json heavy_tails.json
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from record import table_row, write
from scipy.special import ndtri
from scipy.stats import norm

import numpyro_fed as nf

LOGS = np.linspace(-40, 120, 160_001)  # of a positive global: far tails have next to no mass
PROBABILITIES = (0.05, 0.25, 0.5, 0.75, 0.95)
TOLERANCE, OF_PROBABILITY = 0.1, 0.01


class Marginal(NamedTuple):
    """A global's values on a grid with their probabilities, and the index of its tail."""

    values: np.ndarray
    mass: np.ndarray
    index: float

    def moments(self) -> tuple[float, float]:
        """Return mean and sd; NaN where they do not exist."""
        mean = self.mass @ self.values if self.index > 1 else np.nan
        sd = np.sqrt(self.mass @ (self.values - mean) ** 2) if self.index > 2 else np.nan
        return float(mean), float(sd)

    def below(self, x: float) -> float:
        """Return the probability of values below ``x``."""
        return float(np.interp(x, self.values, np.cumsum(self.mass) - self.mass / 2))


class Case(NamedTuple):
    """A model's text, the data of its silos, and the exact marginals of its globals."""

    model: Callable[..., None]
    silos: list[dict[str, np.ndarray]]
    exact: dict[str, Marginal]


def positive(log_density: Callable[[np.ndarray], np.ndarray], index: float) -> Marginal:
    """Return the marginal of a positive global from its log density up to a constant."""
    with np.errstate(all="ignore"):
        log_p = log_density(np.exp(LOGS)) + LOGS
    log_p = np.where(np.isfinite(log_p), log_p, -np.inf)
    mass = np.exp(log_p - log_p.max())
    return Marginal(np.exp(LOGS), mass / mass.sum(), index)


def half_cauchy(x: np.ndarray, scale: float) -> np.ndarray:
    return -np.log1p((x / scale) ** 2)


def cut(r: np.random.Generator, **columns: np.ndarray) -> list[dict[str, np.ndarray]]:
    """Return the rows at two or three unlike silos."""
    n = len(next(iter(columns.values())))
    cuts = sorted({1, max(1, n // 2)} - {n})
    parts = [np.split(a, cuts) for a in columns.values()]
    return [dict(zip(columns, part, strict=True)) for part in zip(*parts, strict=True)]


def odds(r: np.random.Generator) -> Case:
    scale, n = float(r.choice([0.3, 1.0, 5.0])), int(r.integers(2, 8))
    y = (r.uniform(size=n) < r.uniform(0.3, 1.0)).astype(float)
    k = y.sum()

    def model(y):
        t = numpyro.sample("t", dist.HalfCauchy(scale))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Bernoulli(probs=t / (1 + t)), obs=y)

    def log_p(t: np.ndarray) -> np.ndarray:
        return half_cauchy(t, scale) + k * np.log(t) - n * np.log1p(t)

    return Case(model, cut(r, y=y), {"t": positive(log_p, 1 + n - k)})


def ratio(r: np.random.Generator) -> Case:
    scale, noise, n = float(r.choice([0.5, 1.0, 4.0])), float(r.uniform(0.02, 0.1)), 3
    y = r.uniform(0.8, 3.0) + noise * r.normal(size=n)

    def model(y):
        t, s = (numpyro.sample(name, dist.HalfCauchy(scale)) for name in "ts")
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(s / t, noise), obs=y)

    nodes, weights = np.polynomial.hermite_e.hermegauss(30)
    q = (y.mean() + noise / n**0.5 * nodes)[:, None]  # the ratio, known by itself but for the prior

    def mix(terms: np.ndarray) -> np.ndarray:
        return np.log(weights @ np.exp(terms))

    def log_t(t: np.ndarray) -> np.ndarray:
        return half_cauchy(t, scale) + np.log(t) + mix(half_cauchy(t * q, scale))

    def log_s(s: np.ndarray) -> np.ndarray:
        return half_cauchy(s, scale) + np.log(s) + mix(half_cauchy(s / q, scale) - 2 * np.log(q))

    return Case(model, cut(r, y=y), {"t": positive(log_t, 2), "s": positive(log_s, 2)})


def groups(r: np.random.Generator) -> Case:
    scale, J = float(r.choice([0.5, 2.0, 10.0])), int(r.integers(3, 7))
    se = r.uniform(0.2, 1.0, J)
    y = r.normal(0, r.choice([0.3, 2.0]), J) + se * r.normal(size=J)

    def model(se, y):
        mu = numpyro.sample("mu", dist.Normal(0, 10))
        tau = numpyro.sample("tau", dist.HalfCauchy(scale))
        with nf.silo_plate("group", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu, jnp.sqrt(tau**2 + se**2)), obs=y)

    def given(tau: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        precision = 1 / (tau[:, None] ** 2 + se**2)
        total = precision.sum(1) + 0.01
        centre = precision @ y / total
        log_p = 0.5 * np.log(precision).sum(1) - 0.5 * np.log(total)
        return log_p - 0.5 * (precision @ y**2 - total * centre**2), centre, total**-0.5

    # Beyond mu's own prior sd of 10 tau's density has lost the power that mu has given back.
    tau = positive(lambda tau: half_cauchy(tau, scale) + given(tau)[0], J + 1)
    some = slice(None, None, 200)
    _, centre, sd = given(tau.values[some])
    values = np.linspace(-60, 60, 12_001)
    shares = tau.mass[some] / tau.mass[some].sum()
    keep = shares > 1e-14
    mass = sum(
        p * norm.pdf(values, m, s)
        for p, m, s in zip(shares[keep], centre[keep], sd[keep], strict=True)
    )
    mu = Marginal(values, mass / mass.sum(), np.inf)
    return Case(model, cut(r, se=se, y=y), {"mu": mu, "tau": tau})


def variance(r: np.random.Generator) -> Case:
    a, b, n = float(r.choice([0.25, 0.5, 1.0])), float(r.choice([0.1, 1.0])), int(r.integers(2, 7))
    y = r.uniform(0.5, 50) * r.normal(size=n)

    def model(y):
        v = numpyro.sample("v", dist.InverseGamma(a, b))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(0, jnp.sqrt(v)), obs=y)

    def log_p(v: np.ndarray) -> np.ndarray:
        return -(a + n / 2 + 1) * np.log(v) - (b + (y**2).sum() / 2) / v

    return Case(model, cut(r, y=y), {"v": positive(log_p, a + n / 2)})


def location(r: np.random.Generator) -> Case:
    scale, n = float(r.choice([1.0, 5.0])), 2
    y = r.normal(0, 5, size=n)

    def model(y):
        mu = numpyro.sample("mu", dist.Cauchy(0, scale))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Cauchy(mu, 3.0), obs=y)

    values = np.sinh(np.linspace(-25, 25, 200_001))
    with np.errstate(all="ignore"):
        log_p = half_cauchy(values, scale) + sum(half_cauchy(values - x, 3.0) for x in y)
    mass = np.exp(log_p - log_p.max()) * np.gradient(values)
    return Case(model, cut(r, y=y), {"mu": Marginal(values, mass / mass.sum(), 1 + 2 * n)})


def dispersion(r: np.random.Generator) -> Case:
    scale, mean, n = float(r.choice([1.0, 5.0])), float(r.uniform(1, 6)), int(r.integers(3, 9))
    y = r.poisson(mean, n).astype(float)

    def model(y):
        phi = numpyro.sample("phi", dist.HalfCauchy(scale))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.NegativeBinomial2(mean, phi), obs=y)

    def log_p(phi: np.ndarray) -> np.ndarray:
        total = half_cauchy(phi, scale)
        for k in y:  # the rising factorial as a product: differences of gammaln round far out
            rising = sum(np.log1p(i / phi) for i in range(int(k)))
            total = total + rising - k * np.log1p(mean / phi) - phi * np.log1p(mean / phi)
        return total

    return Case(model, cut(r, y=y), {"phi": positive(log_p, 1)})


KINDS = (odds, ratio, groups, variance, location, dispersion)


def outcomes(fitted: nf.Posterior, exact: dict[str, Marginal]) -> dict[str, list[str]]:
    """Return what came of each global's mean, sd and quantiles."""
    corrected = fitted.corrected
    errors, bound = corrected.errors, corrected.max_error
    known, infinite = errors.known(bound), errors.infinite
    trusted, found = fitted.trusted, {}
    for i, name in enumerate(errors.names):
        marginal = exact[name]
        x, w = np.asarray(corrected.draws[name], np.float64), corrected.weights
        mean, sd = marginal.moments()
        words = []
        estimates = w @ x, np.sqrt(w @ (x - w @ x) ** 2)
        for m, (estimate, right) in enumerate(zip(estimates, (mean, sd), strict=True)):
            exists = np.isfinite(right)
            said = trusted and known[m, i] and not infinite[: m + 1, i].any()
            unit = sd if np.isfinite(sd) else np.quantile(x, 0.75) - np.quantile(x, 0.25)
            off = abs(estimate - right) > (TOLERANCE + 2 * errors.error[m, i]) * unit
            if said:
                words.append("wrong" if not exists or off else "right")
            elif infinite[: m + 1, i].any():
                words.append("denied" if exists else "right")
            else:
                words.append("unknown" if exists else "right")
        order = np.argsort(x)
        at = np.interp(PROBABILITIES, np.cumsum(w[order]) - w[order] / 2, x[order])
        below = np.clip([marginal.below(q) for q in at], 1e-9, 1 - 1e-9)
        allowed = TOLERANCE + 2 * errors.error[2, i]
        by_scores = np.abs(ndtri(below) - ndtri(PROBABILITIES)) <= allowed
        close = by_scores | (np.abs(below - PROBABILITIES) <= OF_PROBABILITY)
        words.append("right" if close.all() else "wrong" if trusted else "unknown")
        found[name] = words
    return found


def lines(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the record."""
    words = Counter(word for r in records for found in r["found"].values() for word in found)
    of = f"of {words.total()} statements"
    rows = [
        table_row("statements wrong and trusted", words["wrong"], of, 0),
        table_row("moments that exist and are said not to", words["denied"], of, 0),
        table_row("moments that exist and are not known", words["unknown"], of),
    ]
    trusted = sum(r["trusted"] for r in records)
    return [*rows, table_row("fits trusted", trusted, f"of {len(records)}")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--models", default="0:60", help="first and last model, of each kind in turn"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    first, last = map(int, args.models.split(":"))
    jax.config.update("jax_enable_x64", True)
    records: list[dict[str, Any]] = []
    for number in range(first, last):
        kind = KINDS[number % len(KINDS)]
        case = kind(np.random.default_rng([7, number]))
        began = time.process_time()
        fitted = nf.fit(jax.random.key(number), case.model, case.silos, progress_bar=False)
        record = dict(
            model=number,
            kind=kind.__name__,
            trusted=fitted.trusted,
            exchanges=fitted.num_exchanges,
            seconds=round(time.process_time() - began, 1),
            indices={name: float(m.index) for name, m in case.exact.items()},
            found={} if fitted.corrected is None else outcomes(fitted, case.exact),
            verdict=fitted.verdict,
        )
        records.append(record)
        print({k: v for k, v in record.items() if k != "verdict"}, flush=True)
        if args.json:
            write(args.json, lines(records), details=records)
        jax.clear_caches()
    print(Counter(word for r in records for words in r["found"].values() for word in words))
    print("trusted", sum(r["trusted"] for r in records), "of", len(records))


if __name__ == "__main__":
    main()
