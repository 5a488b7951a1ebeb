"""What one would use instead, on made-up registries of ten hospitals: errors, coverage, messages.

Each registry has ten hospitals of 40 to 900 patients, a rare outcome, a treatment that some
hospitals give more often, age in years, and an effect of each hospital. Asked is the treatment's
log odds ratio, with an interval of 90 %, and how far hospitals differ. Compared are

- *alone*: each hospital's own logistic regression, by maximum likelihood;
- *average*: these estimates, weighted by patients;
- *meta-analysis*: these estimates by their inverse variances, with random effects (DerSimonian and
  Laird 1986), which is what most networks do;
- *PQL*: penalised quasi-likelihood, as dPQL (Luo et al. 2022) computes it from sums;
- *BFI*: the R package of Pazira et al. (2024), with an intercept for each hospital;
- *glmer*: lme4's Laplace approximation on pooled rows; both where R has the package;
- *nf.fit*;
- *NUTS* on pooled rows, for the first few registries.

    python benchmarks/instead.py --fits 100 --nuts 10 --json instead.json
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from record import table_row, write
from scipy import optimize, stats
from scipy.special import expit

import numpyro_fed as nf

SIZES = (40, 60, 80, 120, 150, 200, 300, 400, 600, 900)
LEVEL, LOG_OR, SD_OF_HOSPITALS = -3.9, 0.5, 0.6
Z = stats.norm.ppf(0.95)
# A hospital's own estimate counts if its likelihood has a maximum: where no treated patient has the
# outcome, say, it runs away and its standard error with it.
MAX_SE = 10.0
Hospital = dict[str, np.ndarray]


class Estimate(NamedTuple):
    """An estimate of the log odds ratio, its interval of 90 %, and the sd of hospitals."""

    value: float
    low: float
    high: float
    sd: float = np.nan
    messages: int = 0
    fine: bool = True  # whether the method itself trusts it


def registry(seed: int) -> list[Hospital]:
    """Return the hospitals of a made-up registry."""
    r = np.random.default_rng(seed)
    hospitals = []
    for n in SIZES:
        treated = r.binomial(1, r.uniform(0.2, 0.8), n).astype(float)
        age = r.normal(64, 11, n).round()
        logit = LEVEL + LOG_OR * treated + 0.03 * (age - 64) + r.normal(0, SD_OF_HOSPITALS)
        died = r.binomial(1, expit(logit)).astype(float)
        hospitals.append({"treated": treated, "age": age, "died": died})
    return hospitals


def design(hospital: Hospital) -> np.ndarray:
    """Return the columns: one, treated, age."""
    return np.column_stack([np.ones(len(hospital["age"])), hospital["treated"], hospital["age"]])


def of_normal(value: float, se: float, **more: float) -> Estimate:
    return Estimate(value, value - Z * se, value + Z * se, **more)


def alone(hospital: Hospital) -> tuple[float, float] | None:
    """Return a hospital's own estimate and its standard error; None if there is none."""
    x, y = design(hospital), hospital["died"]
    scale = np.maximum(np.abs(x).max(0), 1)
    x, b = x / scale, np.zeros(3)
    for _ in range(50):
        p = expit(x @ b)
        A = x.T @ (x * (p * (1 - p))[:, None])
        if np.linalg.cond(A) > 1e12:
            return None
        move = np.linalg.solve(A, x.T @ (y - p))
        b = b + move
        if np.abs(move).max() < 1e-8:
            break
    else:
        return None
    se = np.sqrt(np.linalg.inv(A)[1, 1])
    return (b[1], se) if se < MAX_SE else None


def average(hospitals: list[Hospital]) -> Estimate:
    known = [(len(h["age"]), found) for h in hospitals if (found := alone(h))]
    w = np.array([n for n, _ in known], float)
    b, se = np.array([found for _, found in known]).T
    w /= w.sum()
    return of_normal(float(w @ b), float(np.sqrt(w**2 @ se**2)), messages=1)


def meta_analysis(hospitals: list[Hospital]) -> Estimate:
    b, se = np.array([found for h in hospitals if (found := alone(h))]).T
    w = se**-2
    q = float(w @ (b - w @ b / w.sum()) ** 2)
    between = max(0.0, (q - len(b) + 1) / (w.sum() - (w**2).sum() / w.sum()))
    w = 1 / (se**2 + between)
    return of_normal(float(w @ b / w.sum()), float(w.sum() ** -0.5), messages=1)


def pql(hospitals: list[Hospital]) -> Estimate:
    """Penalised quasi-likelihood: each round a linear mixed model of working outcomes, by sums."""
    x, y = [design(h) for h in hospitals], [h["died"] for h in hospitals]
    b, u, variance, rounds = np.zeros(3), np.zeros(len(x)), 0.1, 0
    b[0] = np.log(np.mean(np.concatenate(y)) + 1e-9)

    def fitted(variance: float) -> tuple[float, np.ndarray, np.ndarray]:
        """Return minus the restricted log likelihood, the effects and their precision."""
        A, c, q, log_det = np.zeros((3, 3)), np.zeros(3), 0.0, 0.0
        for XWX, XWz, zWz, s, XW1, zW1 in sums:
            k = variance / (1 + variance * s)  # Woodbury
            A += XWX - k * np.outer(XW1, XW1)
            c += XWz - k * XW1 * zW1
            q += zWz - k * zW1**2
            log_det += np.log1p(variance * s)
        b = np.linalg.solve(A, c)
        return 0.5 * (log_det + np.linalg.slogdet(A)[1] + q - c @ b), b, A

    for _ in range(30):
        rounds, sums = rounds + 1, []
        for X, outcome, effect in zip(x, y, u, strict=True):
            p = expit(X @ b + effect)
            w = p * (1 - p)
            z = X @ b + effect + (outcome - p) / w
            wz, wX = w * z, X * w[:, None]
            sums.append((X.T @ wX, X.T @ wz, z @ wz, w.sum(), wX.sum(0), wz.sum()))
        bounds = dict(bounds=(np.log(1e-4), np.log(25)), method="bounded")
        found = optimize.minimize_scalar(lambda v: fitted(np.exp(v))[0], **bounds)
        variance, before = float(np.exp(found.x)), b
        _, b, A = fitted(variance)
        u = np.array([variance * (zW1 - XW1 @ b) / (1 + variance * s) for *_, s, XW1, zW1 in sums])
        if np.abs(b - before).max() < 1e-5:
            break
    se = float(np.sqrt(np.linalg.inv(A)[1, 1]))
    return of_normal(float(b[1]), se, sd=variance**0.5, messages=rounds)


def study(treated, age, died=None):
    """The model that is fitted: numbers as they are, priors that say little."""
    level = numpyro.sample("level", dist.Normal(0, 10))
    log_or = numpyro.sample("log_or", dist.Normal(0, 2.5))
    of_age = numpyro.sample("of_age", dist.Normal(0, 1))
    sd = numpyro.sample("sd", dist.HalfNormal(1))
    with nf.silo_plate("hospital", 1):
        effect = numpyro.sample("effect", dist.Normal(0, 1))
    with nf.silo_plate("patient", len(age)):
        logit = level + log_or * treated + of_age * age + sd * effect[0]
        numpyro.sample("died", dist.Bernoulli(logits=logit), obs=died)


def of_draws(log_or: np.ndarray, sd: np.ndarray, **more: float) -> Estimate:
    low, high = np.quantile(log_or, [0.05, 0.95])
    return Estimate(float(log_or.mean()), float(low), float(high), float(sd.mean()), **more)


def by_fit(hospitals: list[Hospital]) -> Estimate:
    fitted = nf.fit(jax.random.key(0), study, hospitals, progress_bar=False)
    draws = fitted.sample_posterior(jax.random.key(1), 4_000)
    parts = (np.asarray(draws[name]) for name in ("log_or", "sd"))
    return of_draws(*parts, messages=fitted.num_exchanges, fine=fitted.trusted)


def by_nuts(hospitals: list[Hospital]) -> Estimate:
    nuts = nf.run_nuts(
        jax.random.key(0), study, hospitals, num_warmup=500, num_samples=2_000, progress_bar=False
    )
    return of_draws(*(np.ravel(nuts.globals[name]) for name in ("log_or", "sd")))


# R programs: for each registry, a file, an estimate, its error, the sd of hospitals and seconds.
EACH_FILE = """
folder <- commandArgs(TRUE)[1]
files <- sort(list.files(folder, pattern = "csv$", full.names = TRUE))
out <- lapply(files, function(f) {
  d <- read.csv(f)
  d$age <- (d$age - 64) / 10
  seconds <- system.time(found <- of_registry(d))[["elapsed"]]
  c(found, seconds)
})
write.table(do.call(rbind, out), row.names = FALSE, col.names = FALSE)
"""
GLMER = """
suppressMessages(library(lme4))
of_registry <- function(d) {
  m <- suppressWarnings(suppressMessages(
    glmer(died ~ treated + age + (1 | hospital), d, binomial)))
  c(summary(m)$coefficients["treated", 1:2], attr(VarCorr(m)$hospital, "stddev"))
}
"""
# The priors are those of nf.fit's model; of an intercept, all that hospitals may differ by as well.
BFI = """
suppressMessages(library(BFI))
precision <- 1 / c(10, 2.5, 10)^2
of_registry <- function(d) {
  names <- c("treated", "age")
  local <- inv.prior.cov(d[names], lambda = precision, family = "binomial")
  parts <- lapply(split(d, d$hospital), function(h)
    MAP.estimation(h$died, h[names], family = "binomial", Lambda = local))
  L <- length(parts)
  all <- inv.prior.cov(d[names], lambda = precision[c(rep(1, L), 2, 3)], L = L,
    family = "binomial", stratified = TRUE, strat_par = 1)
  b <- bfi(lapply(parts, `[[`, "theta_hat"), lapply(parts, `[[`, "A_hat"),
    c(rep(list(local), L), list(all)), family = "binomial", stratified = TRUE, strat_par = 1)
  c(b$theta_hat[L + 1], b$sd[L + 1], NA)
}
"""


def in_r(
    program: str, registries: list[list[Hospital]], messages: int = 0
) -> tuple[list[Estimate], float] | None:
    """Return an R package's estimates, and seconds for each; None where R does not have it."""
    if shutil.which("Rscript") is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        for i, hospitals in enumerate(registries):
            rows = np.concatenate(
                [
                    np.column_stack([np.full(len(h["age"]), j), h["treated"], h["age"], h["died"]])
                    for j, h in enumerate(hospitals)
                ]
            )
            path, names = Path(folder) / f"{i:04}.csv", "hospital,treated,age,died"
            np.savetxt(path, rows, fmt="%g", delimiter=",", header=names, comments="")
        command = ["Rscript", "-e", program + EACH_FILE, folder]
        told = subprocess.run(command, capture_output=True, text=True)
    if "there is no package called" in told.stderr:
        return None
    told.check_returncode()
    table = np.array(
        [line.replace("NA", "nan").split() for line in told.stdout.splitlines()], float
    )
    found = [of_normal(b, se, sd=sd, messages=messages) for b, se, sd, _ in table]
    return found, float(table[:, 3].mean())


def summary(found: list[Estimate], seconds: float) -> dict[str, float]:
    """Return what the table has of a method."""
    value, low, high, sd, messages, fine = np.array(found, float).T
    return {
        "registries": len(found),
        "bias": float(value.mean() - LOG_OR),
        "error": float(np.sqrt(((value - LOG_OR) ** 2).mean())),
        "coverage": float(((low <= LOG_OR) & (high >= LOG_OR)).mean()),
        "width": float((high - low).mean()),
        "sd_of_hospitals": float(sd.mean()),
        "error_of_sd": float(np.sqrt(((sd - SD_OF_HOSPITALS) ** 2).mean())),
        "messages": float(np.median(messages)),
        "seconds": seconds,
        "trusted": float(fine.mean()),
    }


def timed(
    method: Callable[[list[Hospital]], Estimate], registries: list[list[Hospital]]
) -> dict[str, float]:
    """Return the summary of a method, with the median of its seconds."""
    found, seconds = [], []
    for hospitals in registries:
        start = time.perf_counter()
        found.append(method(hospitals))
        seconds.append(time.perf_counter() - start)
    return summary(found, float(np.median(seconds))) | {"first_seconds": seconds[0]}


def of_hospitals_alone(registries: list[list[Hospital]]) -> dict[str, float]:
    """Return the summary of hospitals' own estimates, and for how many there is none."""
    found = [alone(h) for hospitals in registries for h in hospitals]
    known = [of_normal(*one) for one in found if one]
    return summary(known, 0.0) | {"none": 1 - len(known) / len(found)}


# What leaves a hospital.
LEAVES = {
    "each hospital alone": "nothing",
    "average of these": "an estimate and its error",
    "meta-analysis": "an estimate and its error",
    "PQL": "sums",
    "BFI": "an estimate and its curvature",
    "glmer, pooled rows": "every row",
    "nf.fit": "sums",
    "NUTS, pooled rows": "every row",
}


def as_rows(report: dict[str, dict[str, float]]) -> list[dict]:
    """Return the lines of the table: error, intervals, messages with what leaves a hospital."""
    lines = []
    for name, leaves in LEAVES.items():
        if (m := report.get(name)) is None:
            continue
        error = f"{m['error']:.3f}"
        if (same := report.get(f"{name}, of the same")) is not None:
            error += f" ({same['error']:.3f} where NUTS ran)"
        if not np.isnan(m["error_of_sd"]):
            error += f"; of the sd of hospitals {m['error_of_sd']:.2f}"
        share = f"{100 * m['coverage']:.0f} of 100"
        if m["registries"] <= 50:
            share = f"{m['coverage'] * m['registries']:.0f} of {m['registries']}"
        interval = f"{share} have the truth, {m['width']:.2f} wide"
        if "none" in m:
            interval += f"; none at {100 * m['none']:.0f} % of hospitals"
        cost = f"{m['seconds']:.2g} s: " if m["seconds"] else ""
        if number := round(m["messages"]):
            cost = f"{number} message{'s' if number > 1 else ''}, {cost}"
        lines.append(table_row(name, error, interval, cost + leaves))
    return lines


def draw(report: dict[str, dict[str, float]], path: Path) -> None:
    """Draw the mean interval of each method, and how often its intervals have the truth."""
    from matplotlib import pyplot

    # Of a few registries a coverage says little.
    names = [n for n in LEAVES if n in report and report[n]["registries"] > 50]
    figure, ax = pyplot.subplots(figsize=(7, 0.45 * len(names) + 1.1), layout="constrained")
    for i, name in enumerate(names):
        m = report[name]
        centre = LOG_OR + m["bias"]
        ax.plot([centre - m["width"] / 2, centre + m["width"] / 2], [i, i], color="C0", lw=2)
        ax.plot(centre, i, "o", color="C0")
        words = f"{100 * m['coverage']:.0f} of 100 have the truth"
        if "none" in m:
            words += f",\nno estimate at {100 * m['none']:.0f} of 100"
        ax.annotate(words, (1.02, i), xycoords=("axes fraction", "data"), va="center")
    ax.axvline(LOG_OR, color="0.5", lw=1, zorder=0)
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.set_xlabel("log odds ratio: mean estimate and 90 % interval")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--registries", type=int, default=200)
    parser.add_argument("--fits", type=int, default=200, help="registries on which nf.fit runs")
    parser.add_argument("--nuts", type=int, default=10, help="registries on which NUTS runs")
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    registries = [registry(seed) for seed in range(args.registries)]
    report = {"each hospital alone": of_hospitals_alone(registries)}
    methods = {"average of these": average, "meta-analysis": meta_analysis, "PQL": pql}
    report |= {name: timed(method, registries) for name, method in methods.items()}
    for name, program, messages in (("BFI", BFI, 1), ("glmer, pooled rows", GLMER, 0)):
        if (of_r := in_r(program, registries, messages)) is not None:
            report[name] = summary(*of_r)
    report["nf.fit"] = timed(by_fit, registries[: args.fits])
    if args.nuts:
        report["NUTS, pooled rows"] = timed(by_nuts, registries[: args.nuts])
        report["nf.fit, of the same"] = timed(by_fit, registries[: args.nuts])
    for name, found in report.items():
        print(name, {k: round(v, 3) for k, v in found.items()})
    if args.figure:
        draw(report, args.figure)
    if args.json:
        write(args.json, as_rows(report), details=report)


if __name__ == "__main__":
    main()
