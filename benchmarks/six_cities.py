"""Wheezing in six cities: every method over two silos, checked against NUTS.

Data and model are those of ``examples/six_cities.py``: 537 children (Fitzmaurice and Laird 1993),
two silos of 300 and 237, a logistic regression with one random intercept for each child, as in
Hassan, Salomone and Mengersen (2023), Supplement S3.1.

    python benchmarks/six_cities.py --plot six_cities.png --json six_cities.json

fits it by SFVI and by PVI without pooling, corrects both fits in one more exchange, runs NUTS on
all data and at each silo alone, and compares the posteriors of the five globals. With defaults,
SFVI takes 1,000 rounds; PVI, whose silos do their work between messages, takes 2; ``nf.fit`` is one
call. ``--averages`` adds SFVI-Avg, of which the paper reports that it fails here, by five ways of
averaging. ``--quick`` shows the same but for ``nf.fit``, on 54 of the children, with too few
rounds and draws to judge by.
"""

import argparse
import time
import warnings

import jax
import numpy as np
from from_examples import load_example
from record import distance, table_row, write

import numpyro_fed as nf

AVERAGES = ("wasserstein", "reverse_kl", "forward_kl", "product", "average")
EXAMPLE = load_example("six_cities")
LABELS, marginals, model, silos = (
    getattr(EXAMPLE, name) for name in ("LABELS", "marginals", "model", "silos")
)


def fit(sizes, rounds, objective, progress_bar=True, **settings):
    """SFVI over silos."""
    sfvi = nf.SFVI(model, objective=objective, **settings)
    return sfvi.run(jax.random.key(0), rounds, silos(sizes), progress_bar=progress_bar)


def partitioned(sizes, rounds, progress_bar=True, **settings):
    """Structured PVI: each silo optimises its children's intercepts inside its own free energy."""
    pvi = nf.PVI(model, objective=nf.LocallyEnhanced(draws=20), **settings)
    return pvi.run(jax.random.key(0), rounds, silos(sizes), progress_bar=progress_bar)


def timed(name, seconds, run):
    """Run, and note how long it took, compilation included."""
    began = time.perf_counter()
    value = run()
    seconds[name] = time.perf_counter() - began
    return value


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the numbers")
    parser.add_argument("--plot", metavar="FILE", help="draw the marginal posteriors")
    parser.add_argument("--averages", action="store_true", help="SFVI-Avg too, by five rules")
    parser.add_argument("--quick", action="store_true", help="fewer children, rounds, draws")
    args = parser.parse_args()
    rounds, draws, warmup = (50, 100, 100) if args.quick else (1_000, 40_000, 1_000)
    two = (30, 24) if args.quick else (300, 237)
    start = None if args.quick else "mode"

    def nuts(key, data, num_samples):
        settings = dict(num_warmup=warmup, num_samples=num_samples)
        return nf.run_nuts(jax.random.key(key), model, data, **settings)

    seconds, fits, everyone = {}, {}, silos(two)
    print("SFVI with the ELBO, and with the locally enhanced bound of 20 draws a child")
    if not args.quick:
        fits["sfvi_elbo"] = timed("sfvi_elbo", seconds, lambda: fit(two, rounds, nf.ELBO()))
    enhanced = nf.LocallyEnhanced(draws=20)
    fits["sfvi"] = timed("sfvi", seconds, lambda: fit(two, rounds, enhanced, start=start))
    # With as many draws as nf.compare takes, whose program then serves here too.
    weighed = dict(num_draws=1_000, inner_draws=50) if args.quick else dict(num_draws=4_000)
    fits["sfvi_corrected"] = timed(
        "sfvi_corrected",
        seconds,
        lambda: nf.importance_correct(jax.random.key(1), fits["sfvi"], **weighed),
    )
    print(fits["sfvi_corrected"].report())
    print("PVI: 2 sequential rounds; then 10 synchronous ones, and 6 sequential ones of 10 silos")
    ten = (54,) * 9 + (51,)
    together = dict(schedule="synchronous", damping=0.5)
    fits["pvi"] = timed("pvi", seconds, lambda: partitioned(two, 2))
    fits["pvi_corrected"] = timed(
        "pvi_corrected",
        seconds,
        lambda: nf.importance_correct(jax.random.key(1), fits["pvi"], **weighed),
    )
    print(fits["pvi_corrected"].report())
    if not args.quick:
        fits["pvi_synchronous"] = timed(
            "pvi_synchronous", seconds, lambda: partitioned(two, 10, **together)
        )
        fits["pvi_10_silos"] = timed("pvi_10_silos", seconds, lambda: partitioned(ten, 6))
    if args.averages:
        print("SFVI-Avg: 10 rounds of 500 steps at each silo, for each way of averaging")
        for rule in AVERAGES[: 1 if args.quick else None]:
            name = f"sfvi_avg_{rule}"
            fits[name] = timed(name, seconds, lambda rule=rule: averaged(two, rule, args.quick))
    if not args.quick:
        fits["fit"] = timed("fit", seconds, lambda: nf.fit(jax.random.key(0), model, everyone))
        print(fits["fit"].verdict)
    print("NUTS on all data, which a federation could not run, and at each silo alone")
    reference = timed("nuts", seconds, lambda: nuts(2, everyone, draws))
    for j, data in enumerate(everyone):
        name = f"nuts_silo_{j}"
        fits[name] = timed(name, seconds, lambda d=data, j=j: nuts(3 + j, [d], draws // 4))

    report = {"nuts": {"seconds": seconds["nuts"], "effective_draws": by_label(reference.ess())}}
    with warnings.catch_warnings():
        warnings.simplefilter("once")
        for name, result in fits.items():
            comparison = nf.compare(result, reference)
            print(f"\n{name}: {seconds[name]:.1f} s\n{comparison}")
            sites = comparison.to_dict()["sites"]
            measures = ("mean_error_sd", "sd_ratio", "wasserstein_sd")
            report[name] = {m: by_label({k: v[m] for k, v in sites.items()}) for m in measures}
            report[name]["seconds"] = seconds[name]
    for name in ("sfvi_corrected", "pvi_corrected"):
        fixed = fits[name]
        report[name] |= dict(
            effective_draws=fixed.ess, pareto_k=fixed.pareto_k, log_evidence=fixed.log_evidence
        )
    for name in ("pvi", "pvi_synchronous", "pvi_10_silos")[: 1 if args.quick else 3]:
        report[name] |= dict(
            rounds=len(fits[name].losses),
            communications=fits[name].communications,
            log_evidence=fits[name].log_evidence.tolist(),
        )
    effective = ", ".join(f"{k} {v:.0f}" for k, v in report["nuts"]["effective_draws"].items())
    print(f"\nnuts on all data: {seconds['nuts']:.1f} s, effective draws: {effective}")
    if args.json:
        rows = [
            table_row(name, f"{_worst(r)}, {r['seconds']:.0f} s", "NUTS", "0.1 sd, 0.9 to 1.1")
            for name, r in report.items()
            if "sd_ratio" in r
        ]
        write(args.json, rows, details=report)
    if args.plot:
        plot(fits, reference).savefig(args.plot, dpi=150)


def _worst(found):
    """The worst error of a mean and the ratios of sds, as a cell."""
    return distance(max(found["mean_error_sd"].values()), found["sd_ratio"].values())


def averaged(sizes, rule, quick):
    """Fit by SFVI-Avg without pooling."""
    avg = nf.SFVIAvg(
        model,
        objective=nf.LocallyEnhanced(draws=20),
        aggregate=rule,
        local_steps=20 if quick else 500,
        start=None if quick else "mode",
    )
    return avg.run(jax.random.key(0), 2 if quick else 10, silos(sizes))


def by_label(sites):
    """Numbers of the sites beta and omega under the names of the five globals."""
    return dict(zip(LABELS, map(float, [*sites["beta"], sites["omega"]]), strict=True))


def plot(fits, reference):
    """Marginal posteriors of the five globals, as Figure S1 of the paper."""
    import matplotlib.pyplot as plt
    from scipy.stats import gaussian_kde

    lines = {
        "SFVI, 1,000 rounds": (fits["sfvi"].sample_posterior(jax.random.key(9), 20_000), "C0", "-"),
        "PVI, 2 rounds": (fits["pvi"].sample_posterior(jax.random.key(9), 20_000), "C1", "--"),
        "NUTS, silo 1 alone": (fits["nuts_silo_0"].samples, "0.45", ":"),
        "NUTS, silo 2 alone": (fits["nuts_silo_1"].samples, "0.45", "-."),
    }
    pooled = marginals(reference.samples)
    figure, axes = plt.subplots(1, 5, figsize=(13, 2.9), layout="constrained")
    for i, (axis, label) in enumerate(zip(axes, LABELS, strict=True)):
        spread = pooled[:, i].std()
        grid = pooled[:, i].mean() + spread * np.linspace(-5, 5, 300)
        axis.fill_between(grid, gaussian_kde(pooled[::4, i])(grid), color="0.85")
        for samples, color, style in lines.values():
            density = gaussian_kde(marginals(samples)[:, i])(grid)
            axis.plot(grid, density, color=color, linestyle=style, linewidth=1.5)
        axis.set(xlabel=label, yticks=[], ylim=(0, None))
        axis.spines[["left", "top", "right"]].set_visible(False)
    axes[0].set_ylabel("posterior density")
    filled = plt.Rectangle((0, 0), 1, 1, color="0.85")
    drawn = [plt.Line2D([], [], color=c, linestyle=s) for _, c, s in lines.values()]
    figure.legend(
        [filled, *drawn],
        ["NUTS, all data", *lines],
        loc="outside upper center",
        ncols=5,
        frameon=False,
    )
    return figure


if __name__ == "__main__":
    main()
