"""The models of ``examples/models``, each by ``nf.fit`` and by NUTS on all rows.

A model is right if every global mean is within 0.1 sd of NUTS's and every ratio of sds lies in
[0.9, 1.1], give or take two standard errors of NUTS, which must have a hundred effective draws.

    python benchmarks/gallery.py --json gallery.json
    python benchmarks/gallery.py --only ordinal,shares --samples 4000
"""

from __future__ import annotations

import argparse
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


def load(name: str) -> ModuleType:
    """Return the module of a model."""
    spec = spec_from_file_location(f"models.{name}", MODELS / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def elements(fitted: Any, nuts: Any) -> list[tuple[float, float, float]]:
    """Return error, ratio of sds and effective draws of NUTS of each element, where known."""
    found, effective = [], nuts.ess()
    for name, measures in nf.compare(fitted, nuts).sites.items():
        columns = measures["mean_error_sd"], measures["sd_ratio"], effective[name]
        each = zip(*map(np.ravel, columns), strict=True)
        found += [tuple(map(float, e)) for e in each if np.isfinite(e).all() and e[1] > 0]
    return found


def measured(name: str, samples: int) -> dict[str, Any]:
    """Return what a fit and NUTS say of a model."""
    module, began = load(name), time.process_time()
    silos = module.simulate()
    fitted = nf.fit(jax.random.key(0), module.model, silos, progress_bar=False)
    seconds, began = time.process_time() - began, time.process_time()
    nuts = nf.run_nuts(
        jax.random.key(1),
        module.model,
        silos,
        start=fitted.mode,
        num_samples=samples,
        num_chains=2,
        target_accept_prob=0.95,
        progress_bar=False,
    )
    table = elements(fitted, nuts)
    right = all(n > 100 and max(e, abs(np.log(r))) < 0.1 + 2 / n**0.5 for e, r, n in table)
    return dict(
        trusted=fitted.trusted,
        right=right,
        exchanges=fitted.num_exchanges,
        seconds=round(seconds, 1),
        nuts_seconds=round(time.process_time() - began, 1),
        error=max(e for e, _, _ in table),
        ratios=[min(r for _, r, _ in table), max(r for _, r, _ in table)],
        fewest=round(min(n for _, _, n in table)),
        verdict=fitted.verdict,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="names of models, with commas between")
    parser.add_argument("--samples", type=int, default=4_000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    details, rows = {}, []
    for name in [name for name in args.only.split(",") if name] or NAMES:
        one = details[name] = measured(name, args.samples)
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
