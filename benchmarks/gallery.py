"""The models of ``examples/models``, each by ``nf.fit`` and by NUTS on all rows.

A model is right if every global mean is within 0.1 sd of NUTS's and every ratio of sds lies in
[0.9, 1.1], give or take two standard errors of NUTS, which must have a hundred effective draws.

    python benchmarks/gallery.py --json gallery.json
    python benchmarks/gallery.py --only ordinal,shares --samples 2000

``--references`` keeps means, sds and effective draws of NUTS in ``gallery_nuts.json``, by which a
test judges a fit without a run of NUTS.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import time
import warnings
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
from record import distance, table_row, write

import numpyro_fed as nf

MODELS = Path(__file__).resolve().parents[1] / "examples" / "models"
NAMES = sorted({script.stem for script in MODELS.glob("*.py")} - {"run"})
REFERENCES = Path(__file__).resolve().parent / "gallery_nuts.json"


def load(name: str) -> ModuleType:
    """Return the module of a model."""
    spec = spec_from_file_location(f"models.{name}", MODELS / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def digest(name: str) -> str:
    """Return the hash of a model's script, whose references hold for no other."""
    return hashlib.sha256((MODELS / f"{name}.py").read_bytes()).hexdigest()


def nuts_moments(name: str, fitted: nf.Posterior, samples: int) -> dict[str, Any]:
    """Return by NUTS, for each element of the globals, its mean, sd and effective draws."""
    module = load(name)
    nuts = nf.run_nuts(
        *(jax.random.key(1), module.model, module.simulate()),
        **dict(start=fitted.mode, num_samples=samples, num_chains=2),
        **dict(target_accept_prob=0.95, progress_bar=False),
    )
    table = nuts.summary(num_samples=nuts.num_draws)
    effective = np.concatenate([np.ravel(of) for of in nuts.ess().values()])
    moments = zip(table["mean"], table["sd"], effective, strict=True)
    numbers = {
        element: [float(f"{x:.6g}") for x in row]
        for element, row in zip(table.index, moments, strict=True)
        if row[1] > 0
    }
    return dict(script=digest(name), elements=numbers)


def distances(fitted: nf.Posterior, moments: dict[str, Any]) -> list[tuple[float, float, float]]:
    """Return error, ratio of sds and effective draws of NUTS of each element, where known."""
    table = fitted.summary(num_samples=20_000)
    found = []
    for element, (mean, sd, effective) in moments["elements"].items():
        row = table.loc[element]
        each = abs(row["mean"] - mean) / sd, row["sd"] / sd, effective
        found += [tuple(map(float, each))] if np.isfinite(each).all() else []
    return found


def measured(name: str, samples: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a fit and NUTS say of a model, and the moments of NUTS."""
    module, began = load(name), time.process_time()
    fitted = nf.fit(jax.random.key(0), module.model, module.simulate(), progress_bar=False)
    seconds, began = time.process_time() - began, time.process_time()
    moments = nuts_moments(name, fitted, samples)
    nuts_seconds = time.process_time() - began
    table = distances(fitted, moments)
    right = all(n > 100 and max(e, abs(np.log(r))) < 0.1 + 2 / n**0.5 for e, r, n in table)
    return dict(
        trusted=fitted.trusted,
        right=right,
        exchanges=fitted.num_exchanges,
        seconds=round(seconds, 1),
        nuts_seconds=round(nuts_seconds, 1),
        error=max(e for e, _, _ in table),
        ratios=[min(r for _, r, _ in table), max(r for _, r, _ in table)],
        fewest=round(min(n for _, _, n in table)),
        verdict=fitted.verdict,
    ), moments


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="names of models, with commas between")
    parser.add_argument("--samples", type=int, default=4_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--references", action="store_true", help="keep the moments of NUTS")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    details, rows = {}, []
    for name in [name for name in args.only.split(",") if name] or NAMES:
        one, moments = measured(name, args.samples)
        details[name] = one
        if args.references:
            kept = json.loads(REFERENCES.read_text()) if REFERENCES.exists() else {}
            kept = dict(sorted((kept | {name: moments}).items()))
            REFERENCES.write_text(json.dumps(kept, indent=1) + "\n")
        words = ("trusted" if one["trusted"] else "**not trusted**") + ", "
        words += f"{one['exchanges']} exchanges, {one['seconds']:.0f} CPU s"
        beside = f"{distance(one['error'], one['ratios'])}; NUTS {one['nuts_seconds']:.0f} CPU s"
        rows.append(table_row(name, words, beside + ("" if one["right"] else ", **not right**")))
        print(name, "|", words, "|", rows[-1]["reference"], "|", one["fewest"], flush=True)
    good = sum(d["trusted"] and d["right"] for d in details.values())
    wrong = sum(d["trusted"] and not d["right"] for d in details.values())
    median = statistics.median(d["exchanges"] for d in details.values())
    ours = f"{good} of {len(details)}; {wrong} trusted and not right; median {median:g} exchanges"
    rows.append(table_row("right and trusted", ours, "", "all but one in twenty; none; 8"))
    print(ours)
    if args.json:
        write(args.json, rows, details=details)


if __name__ == "__main__":
    main()
