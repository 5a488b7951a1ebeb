"""Is anything wrong in silence? Random models against exact answers, method by method.

Each model of the grammar (:mod:`oracle_models`) comes with ten sets of data of the same shapes:
drawn from the prior, far from it, noisier than the model says, nearly flat. One object for each
method runs all ten, so that what was compiled for one is used again for the next. The exact mean
and standard deviation of each coordinate of the globals, in unconstrained space, come from
:mod:`oracle_exact`. A set whose cubature does not settle is drawn anew. Corrections and ``fit`` are
judged on the scale of the text's own sites, which is what they promise, but where moments there do
not settle; heavy tails are the matter of ``heavy_tails.py``.

An outcome is one of

- ``right``: every mean within 0.1 sd, every ratio of sds in [0.9, 1.1];
- ``right, said``: that too, although the method said not to trust it (a false alarm);
- ``said``: not right, and a warning, a rejection, ``trusted`` or the report said so;
- ``refused``: an exception of the package that names a site, a plate or a silo;
- ``crashed``: any other exception;
- ``wrong``: not right, and nobody said so.

All methods have their defaults, the start at the mode among them, and end by themselves. Fits are
read by 20,000 draws. What is itself an estimate from draws, the corrections, NUTS and ``fit``
(:func:`numpyro_fed.fit`), is given two Monte Carlo standard errors of its effective draws besides.
NUTS compiles at each call, and runs on three of the ten. Corrections are those of SFVI and of PVI
with ``prior="factor"``. Where two settings of PVI come to the same program it runs once, and counts
for both. Seconds are of one core.

    python benchmarks/oracle.py --seed 0 --models 0:200 --methods all --jobs 2 --out oracle.jsonl
    python benchmarks/oracle.py --out oracle.jsonl --table

A run goes on where the file ends. ``oracle.csv`` beside this file keeps what came of each model
(:mod:`oracle_ledger`). To enter those models that a run has finished, and to count them all::

    python benchmarks/oracle.py --models 0:50 --out oracle.jsonl \\
        --ledger benchmarks/oracle.csv --commit NAME
    python benchmarks/oracle.py --ledger benchmarks/oracle.csv

One case alone::

    python benchmarks/oracle.py --seed 0 --models 7 --datasets 4 --methods PVI --verbose
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from xla_flags import known_flags

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS") or " ".join(  # before jax is imported
    known_flags(
        [
            *("--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"),
            *("--xla_cpu_use_fusion_emitters=false", "--xla_cpu_multi_thread_eigen=false"),
        ]
    )
)

import jax
import numpy as np
import oracle_ledger
from numpyro.diagnostics import effective_sample_size
from oracle_exact import Moments, NotConverged, as_seen, exact, unconstrain
from oracle_models import DATA_SETS, Global, Spec, random_silos, random_spec, text
from record import table_row, write

import numpyro_fed as nf

OPTIMISED = "--xla_cpu_multi_thread_eigen=false", "--xla_cpu_use_fusion_emitters=false"
EVERYTHING = {  # small programs, many of them the same for all models, are worth a cache
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
QUIET = dict(progress_bar=False)
DRAWS = 20_000
MEAN, RATIO = 0.1, 0.1  # what is right
ROUNDS = {"SFVI": 2_000, "SFVI enhanced": 2_000, "SFVI-Avg": 5}  # at most
ROUNDS |= {f"PVI {setting}": 5 for setting in ("exact", "factor", "Optax", "LBFGS", "natural")}
ATTEMPTS = 5  # at a set of data that the cubature can do
NUTS_ON = (0, 4, 8)  # sets of data
OURS = (nf.ModelError, nf.DataError, nf.GuideError, nf.NonFiniteError)
OUTCOME = {  # whether it is right, whether something was said
    (True, False): "right",
    (True, True): "right, said",
    (False, True): "said",
    (False, False): "wrong",
}
OUTCOMES = ("right", "right, said", "said", "refused", "crashed", "wrong")


class Reading(NamedTuple):
    """Moments of an answer, each with its Monte Carlo error, in standard deviations."""

    mean: np.ndarray
    sd: np.ndarray
    mean_error: np.ndarray | float = 0.0
    sd_error: np.ndarray | float = 0.0


class Case(NamedTuple):
    """A set of data, its exact answer, and the fits that were made of it so far."""

    spec: Spec
    silos: list[dict]
    key: jax.Array
    exact: Moments
    seen: Moments | None
    fits: dict[str, Run]


class Run(NamedTuple):
    """A fit, and what its run warned of."""

    fit: Any
    warned: list[warnings.WarningMessage]


# ------------------------------------------------------------------ what answers say


def coordinates(spec: Spec, sites: Any, *, seen: bool = False) -> np.ndarray:
    """Draws (n, dim) of the globals in unconstrained space, or as the text's user sees them."""

    def of(g: Global) -> np.ndarray:
        return unconstrain(g, sites[f"{g.name}_latent" if g.how in ("exp", "tanh") else g.name])

    u = np.concatenate([of(g) for g in spec.globals], 1)
    with np.errstate(over="ignore"):
        return as_seen(spec, u) if seen else u


def read_fit(case: Case, fit: Any) -> Reading:
    z = coordinates(case.spec, fit.sample_posterior(jax.random.fold_in(case.key, 1), DRAWS))
    return Reading(z.mean(0), z.std(0))


def read_corrected(case: Case, corrected: Any) -> Reading:
    z = coordinates(case.spec, corrected.draws, seen=case.seen is not None)
    w = np.asarray(corrected.weights, np.float64)[:, None]
    return _with_errors(z, w / w.sum(), corrected.ess)


def read_nuts(case: Case, nuts: Any) -> Reading:
    chains = {k: v.reshape(-1, *v.shape[2:]) for k, v in nuts.globals.items()}
    z = coordinates(case.spec, chains)
    number = len(next(iter(nuts.globals.values())))
    with np.errstate(all="ignore"):
        ess = effective_sample_size(z.reshape(number, -1, z.shape[1]))
    return _with_errors(z, np.full((len(z), 1), 1 / len(z)), np.maximum(ess, 1.0))


def _with_errors(z: np.ndarray, w: np.ndarray, ess: Any) -> Reading:
    mean = (w * z).sum(0)
    square = (z - mean) ** 2
    variance = (w * square).sum(0)
    with np.errstate(all="ignore"):
        kurtosis = (w * square**2).sum(0) / variance**2
    return Reading(
        mean, np.sqrt(variance), 1 / np.sqrt(ess), np.sqrt(np.maximum(kurtosis - 1, 0) / (4 * ess))
    )


# ------------------------------------------------------------------ methods


def enhanced(spec: Spec) -> Any:
    return nf.LocallyEnhanced(draws={"hospital": 10} if spec.plate == "hospital" else 10)


def _federated(name: str) -> Callable[[Any, Case], tuple[Any, Reading]]:
    def run(methods: dict[str, Any], case: Case) -> tuple[Any, Reading]:
        fit, warned = _fit_of(name, methods, case)
        for w in warned:
            warnings.warn(w.message, w.category, stacklevel=2)
        return fit, read_fit(case, fit)

    return run


def _fit_of(name: str, methods: dict[str, Any], case: Case) -> Run:
    """Made once for each set of data."""
    if name not in case.fits:
        case.fits[name] = _same_program(name, case.fits) or _run(name, methods, case)
    return case.fits[name]


def _run(name: str, methods: dict[str, Any], case: Case) -> Run:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit = methods[name].run(case.key, ROUNDS[name], case.silos, stop="converged", **QUIET)
    return Run(fit, caught)


def _same_program(name: str, fits: dict[str, Run]) -> Run | None:
    """The fit of another setting that comes to the same program, if there is one."""
    if name == "PVI factor" and "PVI exact" in fits:
        exact = fits["PVI exact"]
        return exact if exact.fit._fit.built.factors.globals.prior_outside is None else None
    if name == "PVI Optax" and "PVI factor" in fits:
        factor = fits["PVI factor"]
        return factor if factor.fit.plan.chosen["local"].startswith("Optax") else None
    return None


def _corrected(name: str) -> Callable[[Any, Case], tuple[Any, Reading]]:
    def run(methods: dict[str, Any], case: Case) -> tuple[Any, Reading]:
        fit, _ = _fit_of(name, methods, case)
        corrected = nf.importance_correct(jax.random.fold_in(case.key, 2), fit)
        return corrected, read_corrected(case, corrected)

    return run


def _nuts(methods: dict[str, Any], case: Case) -> tuple[Any, Reading]:
    settings = dict(num_warmup=500, num_samples=1_000, num_chains=2)
    nuts = nf.run_nuts(case.key, methods["model"], case.silos, **settings, **QUIET)
    return nuts, read_nuts(case, nuts)


def _fit(methods: dict[str, Any], case: Case) -> tuple[Any, Reading]:
    fitted = nf.fit(case.key, methods["model"], case.silos, **QUIET)
    read = read_corrected if isinstance(fitted, nf.Corrected) else read_fit
    return fitted, read(case, fitted)


METHODS: dict[str, Callable[[Any, Case], tuple[Any, Reading]]] = {
    "SFVI": _federated("SFVI"),
    "SFVI enhanced": _federated("SFVI enhanced"),
    "SFVI-Avg": _federated("SFVI-Avg"),
    "SFVI corrected": _corrected("SFVI"),
    "PVI exact": _federated("PVI exact"),
    "PVI factor": _federated("PVI factor"),
    "PVI corrected": _corrected("PVI factor"),
    "PVI Optax": _federated("PVI Optax"),
    "PVI LBFGS": _federated("PVI LBFGS"),
    "PVI natural": _federated("PVI natural"),
    "fit": _fit,
    "NUTS": _nuts,
}


def applies(method: str, spec: Spec, dataset: int) -> bool:
    """Whether a method is tried on a set of data of a model."""
    if method == "NUTS":
        return dataset in NUTS_ON
    return method != "SFVI enhanced" or spec.local is not None


def objects(spec: Spec) -> dict[str, Any]:
    """One object for each method, for all of a model's data."""
    model = text(spec)
    return {
        "model": model,
        "SFVI": nf.SFVI(model),
        "SFVI enhanced": nf.SFVI(model, objective=enhanced(spec)),
        "SFVI-Avg": nf.SFVIAvg(model),
        "PVI exact": nf.PVI(model, prior="exact"),
        "PVI factor": nf.PVI(model, prior="factor"),
        "PVI Optax": nf.PVI(model, prior="factor", local=nf.local.Optax()),
        "PVI LBFGS": nf.PVI(model, prior="factor", local=nf.local.LBFGS()),
        "PVI natural": nf.PVI(model, prior="factor", local=nf.local.NaturalGradient()),
    }


# ------------------------------------------------------------------ outcomes


def misses(reading: Reading, truth: Moments) -> tuple[float, float, bool]:
    """The worst error of a mean, the worst ratio of sds, and whether all are right."""
    error = abs(reading.mean - truth.mean) / truth.sd
    ratio = reading.sd / truth.sd
    near = error <= MEAN + 2 * np.asarray(reading.mean_error)
    like = abs(ratio - 1) <= RATIO + 2 * np.asarray(reading.sd_error)
    worst = ratio[np.argmax(abs(np.log(np.maximum(ratio, 1e-300))))]
    return float(error.max()), float(worst), bool((near & like).all())


def said(answer: Any, warned: Iterable[str]) -> list[str]:
    """What an answer, or its run, says against itself."""
    found = [f"warning: {w}" for w in warned]
    wrong = {k: n for k, n in getattr(answer, "rejections", {}).items() if n}
    found += [f"rejections: {wrong}"] if wrong else []
    trusted = getattr(answer, "trusted", getattr(answer, "reliable", None))
    if trusted is not None and not trusted:
        words = answer.verdict if getattr(answer, "stages", ()) else answer.report()
        found.append(f"not trusted: {_line(words)}")
    return found


def judge(name: str, methods: dict[str, Any], case: Case) -> dict[str, Any]:
    """Run a method on a set of data; what came of it."""
    began = time.process_time()
    record: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            answer, reading = METHODS[name](methods, case)
            warned = [str(w.message) for w in caught if _counts(w)]
            weighed = name == "fit" or name.endswith("corrected")
            by_draws = name != "fit" or isinstance(answer, nf.Corrected)
            truth = case.seen if weighed and by_draws and case.seen is not None else case.exact
            error, ratio, right = misses(reading, truth)
            against = said(answer, warned)
            outcome = OUTCOME[right, bool(against)]
            record |= dict(outcome=outcome, error=error, ratio=ratio, message=_line(*against))
            if hasattr(answer, "pareto_k"):
                record |= dict(evidence_error=answer.log_evidence - case.exact.log_evidence)
        except Exception as error:
            record |= dict(outcome=_exception(error, case.spec), message=_line(repr(error)))
            if record["outcome"] == "crashed":
                record["where"] = _line(*traceback.format_tb(error.__traceback__)[-2:])
    return record | dict(seconds=round(time.process_time() - began, 2))


def _counts(w: warnings.WarningMessage) -> bool:
    return not issubclass(w.category, DeprecationWarning | FutureWarning | RuntimeWarning)


def _exception(error: Exception, spec: Spec) -> str:
    names = [g.name for g in spec.globals] + ["y", "b", "row", "hospital", "visit"]
    where = "|".join([*(f"'{n}" for n in names), r"silo \d", "at the server"])
    return "refused" if isinstance(error, OURS) and re.search(where, str(error)) else "crashed"


def _line(*parts: str) -> str:
    return " | ".join(" ".join(p.split()) for p in parts)[:600]


# ------------------------------------------------------------------ running


def a_case(
    spec: Spec, seed: int, model: int, dataset: int, known: dict | None
) -> tuple[Case, dict]:
    """A set of data with its exact answer, and the record of it."""
    began = time.process_time()
    for attempt in range(known["attempt"] if known else 0, ATTEMPTS):
        r = np.random.default_rng([seed, model, dataset, attempt])
        silos, truth = random_silos(spec, r, DATA_SETS[dataset])
        try:
            moments = (
                Moments(np.array(known["mean"]), np.array(known["sd"]), known["log_evidence"])
                if known
                else exact(spec, silos, truth, r)
            )
        except NotConverged:
            continue
        seen = seen_moments(spec, silos, truth, [seed, model, dataset, attempt], known)
        key = jax.random.fold_in(jax.random.key(model), dataset)
        record = dict(
            attempt=attempt,
            mean=moments.mean.tolist(),
            sd=moments.sd.tolist(),
            seen=None if seen is None else [seen.mean.tolist(), seen.sd.tolist()],
            log_evidence=moments.log_evidence,
            seconds=round(time.process_time() - began, 2),
        )
        return Case(spec, silos, key, moments, seen, {}), record
    raise NotConverged(f"no attempt at set {dataset} of model {model} settled")


def seen_moments(
    spec: Spec, silos: list[dict], truth: Any, seed: list[int], known: dict | None
) -> Moments | None:
    """The exact moments on the scale of the text's sites; None where they do not settle."""
    if known and "seen" in known:
        found = known["seen"]
        return found and Moments(np.array(found[0]), np.array(found[1]), known["log_evidence"])
    try:
        return exact(spec, silos, truth, np.random.default_rng([*seed, 1]), seen=True)
    except NotConverged:
        return None


def run_model(
    seed: int, model: int, datasets: Iterable[int], names: list[str], done: dict, out: Callable
) -> None:
    """All methods on all data of a model; ``out`` takes the records that were not ``done``."""
    spec = random_spec(seed, model)
    methods = objects(spec)
    for dataset in datasets:
        wanted = [n for n in names if applies(n, spec, dataset) and (model, dataset, n) not in done]
        if not wanted:
            continue
        known = done.get((model, dataset, "exact"))
        place = dict(seed=seed, model=model, dataset=dataset)
        if known and known.get("attempt") is None:
            continue
        try:
            case, record = a_case(spec, seed, model, dataset, known)
        except NotConverged as error:
            out(place | dict(method="exact", attempt=None, message=str(error)))
            continue
        if not known:
            out(place | dict(method="exact", **record))
        for name in wanted:
            out(place | dict(method=name, **judge(name, methods, case)))
    jax.clear_caches()
    gc.collect()


def read_records(path: Path | None, seed: int) -> dict[tuple[int, int, str], dict]:
    if path is None or not path.exists():
        return {}
    records = [json.loads(line) for line in path.read_text().splitlines() if line]
    return {(r["model"], r["dataset"], r["method"]): r for r in records if r["seed"] == seed}


def _spawn(args: argparse.Namespace, models: range) -> None:
    """Models in processes of their own, so that memory stays bounded.

    Programs of models with local latents run for longer than they take to compile well.
    """
    command = [sys.executable, __file__, "--seed", str(args.seed), "--out", str(args.out)]
    command += ["--methods", args.methods, "--datasets", args.datasets]

    def one(model: int) -> None:
        quick = random_spec(args.seed, model).local is None
        flags = {} if quick else {"XLA_FLAGS": " ".join(known_flags(OPTIMISED))}
        run = [*command, "--models", str(model)]
        done = subprocess.run(run, capture_output=True, text=True, env=environment | flags)
        if done.returncode:
            print(f"model {model}: {done.stderr[-2_000:]}", flush=True)

    with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor(args.jobs) as pool:
        environment = {**os.environ, **EVERYTHING, "JAX_COMPILATION_CACHE_DIR": cache}
        list(pool.map(one, models))


# ------------------------------------------------------------------ the table


def outcomes_of(records: dict[tuple[int, int, str], dict]) -> dict[str, Counter[str]]:
    """Outcomes by method."""
    found: dict[str, Counter[str]] = {}
    for (_, _, method), r in records.items():
        if method in METHODS:
            found.setdefault(method, Counter())[r["outcome"]] += 1
    return found


def table(records: dict[tuple[int, int, str], dict], seed: int) -> str:
    """Counts by method, and every case that is wrong in silence or crashed."""
    lines = [counted(outcomes_of(records))]
    exact_ = [r for (_, _, m), r in records.items() if m == "exact"]
    again = sum(r["attempt"] or 0 for r in exact_)
    given_up = sum(r["attempt"] is None for r in exact_)
    seconds = sum(r.get("seconds", 0) for r in records.values())
    lines.append(
        f"\n{len(exact_)} sets of data, {again} drawn anew, {given_up} given up; "
        f"{len({k[0] for k in records})} models, {seconds:.0f} s."
    )
    for outcome, title in (("wrong", "wrong in silence"), ("crashed", "crashed")):
        cases = [(k, r) for k, r in records.items() if r.get("outcome") == outcome]
        lines.append(f"\n### {len(cases)} {title}\n")
        for model in sorted({k[0] for k, _ in cases}):
            lines.append(f"Model {model}: {random_spec(seed, model)}")
            lines += [_told(seed, *k, r) for k, r in sorted(cases, key=_place) if k[0] == model]
    return "\n".join(lines)


def counted(found: dict[str, Counter[str]]) -> str:
    """A table of outcomes by method."""
    lines = ["| method | sets | " + " | ".join(OUTCOMES) + " |", "|---" * 8 + "|"]
    for name in METHODS:
        if number := found.get(name, Counter()).total():
            outcomes = " | ".join(str(found[name][o]) for o in OUTCOMES)
            lines.append(f"| {name} | {number} | {outcomes} |")
    return "\n".join(lines)


def rows_of(found: dict[str, Counter[str]]) -> list[dict[str, object]]:
    """The rows of the record: what came of the sets of each method."""
    rows = []
    for name in METHODS:
        if number := found.get(name, Counter()).total():
            words = "; ".join(f"{found[name][o]} {o}" for o in OUTCOMES)
            rows.append(table_row(name, words, f"exact, {number} sets", "0 wrong, 0 crashed"))
    return rows


def ledger(path: Path, records: dict[tuple[int, int, str], dict], commit: str | None) -> str:
    """Enter what came of the models of ``records``; the table of all that the file has."""
    if commit:
        oracle_ledger.enter(path, records, list(METHODS), len(DATA_SETS), commit)
    lines = oracle_ledger.read(path)
    at = [f"{name}: {len(of)} models" for name, of in oracle_ledger.commits(lines).items()]
    return "\n".join([counted(oracle_ledger.counts(lines)), "", "; ".join(at)])


def _place(case: tuple[tuple[int, int, str], dict]) -> tuple[int, int, str]:
    return case[0]


def _told(seed: int, model: int, dataset: int, name: str, record: dict) -> str:
    """A case in words, and how to have it alone."""
    what = record.get("message") or f"off by {record['error']:.2f} sd, ratio {record['ratio']:.2f}"
    again = f"--seed {seed} --models {model} --datasets {dataset} --methods '{name}' --verbose"
    return f"- {name}, {DATA_SETS[dataset]}: {what}\n  `python benchmarks/oracle.py {again}`"


def _span(value: str) -> range:
    first, _, last = value.partition(":")
    return range(int(first), int(last) if last else int(first) + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", type=_span, default=range(200), help="such as 0:200")
    parser.add_argument("--datasets", default="0:10", help="such as 0:10, or 4")
    parser.add_argument("--methods", default="all", help="names, with commas between")
    parser.add_argument("--out", type=Path, help="JSON lines; a run goes on where it ends")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--ledger", type=Path, help="only print the table of this CSV file")
    parser.add_argument("--commit", help="before that, enter --models of --out as run on this")
    parser.add_argument("--table", action="store_true", help="only print the table of --out")
    parser.add_argument("--verbose", action="store_true", help="print each record")
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    args = parser.parse_args()

    def kept(found: dict[str, Counter[str]]) -> None:
        if args.json:
            write(args.json, rows_of(found), details=found)

    names = list(METHODS) if args.methods == "all" else args.methods.split(",")
    if unknown := set(names) - set(METHODS):
        parser.error(f"unknown methods {sorted(unknown)}: expected some of {list(METHODS)}")
    if args.ledger:
        records = read_records(args.out, args.seed)
        wanted = {k: r for k, r in records.items() if k[0] in args.models}
        print(ledger(args.ledger, wanted, args.commit))
        return kept(oracle_ledger.counts(oracle_ledger.read(args.ledger)))
    if args.table:
        print(table(read_records(args.out, args.seed), args.seed))
        return kept(outcomes_of(read_records(args.out, args.seed)))
    if args.jobs > 1:
        if args.out is None:
            parser.error("--jobs needs --out")
        _spawn(args, args.models)
        print(table(read_records(args.out, args.seed), args.seed))
        return kept(outcomes_of(read_records(args.out, args.seed)))
    done = read_records(args.out, args.seed)

    def out(record: dict) -> None:
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps(record) + "\n")
        done[record["model"], record["dataset"], record["method"]] = record
        if args.verbose:
            print(json.dumps(record), flush=True)

    for model in args.models:
        if args.verbose:
            print(f"model {model}: {random_spec(args.seed, model)}")
        run_model(args.seed, model, _span(args.datasets), names, done, out)
    if args.out is None:
        print(table(done, args.seed))
    return kept(outcomes_of(done))


if __name__ == "__main__":
    main()
