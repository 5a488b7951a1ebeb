"""Closed-form priors in the place of a proper CAR over the contiguous US counties.

3,109 areas in 49 states, each state a silo; one noisy value (standard deviation 0.5) of each area,
drawn from the true model. At fixed hyperparameters all posteriors are normal: means under each
prior against those under the true one, root mean square in posterior standard deviations, and the
ratio of standard deviations, on average over areas. No sampling, no optimisation.

    NUMPYRO_FED_DATA=... python benchmarks/sigma_relatives.py --json sigma_relatives.json
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from record import machine, table_row, write

import numpyro_fed as nf
from numpyro_fed.sigma.fields import field_of

NOISE = 0.5
TARGETS = {  # figures of a sketch
    **{("independent blocks", a): f"{t} sd" for a, t in ((0.5, 0.04), (0.9, 0.11), (0.99, 0.16))},
    **{
        ("150 shared, and blocks", a): f"{t} sd" for a, t in ((0.5, 0.08), (0.9, 0.08), (0.99, 0.1))
    },
}


def counties() -> tuple[np.ndarray, np.ndarray]:
    """Adjacency and the state of each contiguous county."""
    file = Path(os.environ.get("NUMPYRO_FED_DATA", "")) / "us_counties.npz"
    if not file.is_file():
        raise SystemExit("say by NUMPYRO_FED_DATA in which folder us_counties.npz lies")
    with np.load(file) as d:
        kept = d["contiguous"]
        edges = (np.cumsum(kept) - 1)[d["edges"][kept[d["edges"]].all(1)]]
        state = d["state"][kept]
    W = np.zeros((len(state), len(state)))
    W[edges[:, 0], edges[:, 1]] = W[edges[:, 1], edges[:, 0]] = 1
    return W, np.unique(state, return_inverse=True)[1]


def lattice(side: int) -> tuple[np.ndarray, np.ndarray]:
    """A square map in four parts."""
    i, j = np.divmod(np.arange(side**2), side)
    W = (abs(i[:, None] - i) + abs(j[:, None] - j) == 1).astype(float)
    return W, 2 * (i >= side // 2) + (j >= side // 2)


def covariance(prior: Any, fn: dist.Distribution) -> np.ndarray:
    """That of all areas under a prior, from its blocks."""
    field, blocks = field_of(fn, prior.site, prior.spectrum), prior.blocks
    cov = np.zeros((blocks.size, blocks.size))
    if isinstance(prior, nf.LowRankPrior):
        A = np.asarray(field.loadings(prior.basis))
        cov = A @ A.T
    for own in blocks.places:
        there = jnp.ones(len(own), bool)
        cov[np.ix_(own, own)] = field.covariance_of(jnp.asarray(own), there)
    return cov


def posterior(cov: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means and standard deviations of all areas."""
    gain = np.linalg.solve(cov + NOISE**2 * np.eye(len(y)), cov).T
    return gain @ y, np.sqrt(np.diag(cov) - np.einsum("ij,ij->i", gain, cov))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--rank", type=int, default=150, help="shared coefficients")
    parser.add_argument("--quick", action="store_true", help="a small square map")
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    W, of = lattice(6) if args.quick else counties()
    rank = min(args.rank, len(W) // 2)
    areas = [np.flatnonzero(of == b) for b in range(of.max() + 1)]

    def model() -> None:
        numpyro.sample("theta", dist.CAR(0.0, 0.9, 1.0, W))

    fits = {
        "independent blocks": nf.BlockPrior.fit(model, "theta", areas),
        f"{rank} shared, and blocks": nf.LowRankPrior.fit(model, "theta", areas, rank=rank),
    }
    separator = nf.SeparatorPrior.fit(model, "theta", areas)
    print(f"{len(W)} areas, {len(areas)} silos; at borders {len(separator.border)} areas")
    print(f"{'alpha':>6} {'prior':28} {'rmse (sd)':>10} {'sd ratio':>9}")
    found = []
    for alpha in (0.5, 0.9, 0.99):
        fn = dist.CAR(0.0, alpha, 1.0, W)
        K = np.linalg.inv(np.diag(W.sum(1)) - alpha * W)
        r = np.random.default_rng(0)
        y = np.linalg.cholesky(K) @ r.normal(size=len(W)) + NOISE * r.normal(size=len(W))
        mean, sd = posterior(K, y)
        for name, prior in fits.items():
            other = posterior(covariance(prior, fn), y)
            rmse = float(np.sqrt(np.mean(((other[0] - mean) / sd) ** 2)))
            ratio = float(np.mean(other[1] / sd))
            found.append({"alpha": alpha, "prior": name, "rmse": rmse, "sd_ratio": ratio})
            print(f"{alpha:6} {name:28} {rmse:10.3f} {ratio:9.3f}", flush=True)
    if args.json:
        report = {"machine": machine(), "border": len(separator.border), "relatives": found}
        rows = [
            table_row(
                f"{r['prior']}, alpha {r['alpha']}: rmse, ratio of sds",
                f"{r['rmse']:.3f} sd, {r['sd_ratio']:.3f}",
                "exact",
                TARGETS.get((r["prior"], r["alpha"]), ""),
            )
            for r in found
        ]
        write(args.json, rows, details=report)


if __name__ == "__main__":
    main()
