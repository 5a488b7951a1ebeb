"""A Gaussian process whose points are at three silos: the prior that is learnt, and closed forms.

Section 4.1 of Hassan, Bon, Semenova, Mira and Mengersen (2024), arXiv 2405.16055: 100 points in
[0, 1], cut at 0.34 and 0.67, a squared exponential kernel with variance 1 whose length scale is
uniform between 0.2 and 1. A SIGMA prior is trained on draws of it (Figures 3 and 4), and stands in
its place for 15 noisy observations of a sine (Figure 5), by NUTS as in the paper and by SFVI over
the three silos. Beside it the closed-form relatives, and the exact posterior, integrated over a
grid of length scales, and a decoder without an encoder (DeepRV, arXiv 2503.21473).

    python benchmarks/sigma_gp.py --plot sigma_gp --json sigma_gp.json

``--plot`` is the start of the figures' names. ``--quick`` trains and draws little.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS
from record import table_row, write

import numpyro_fed as nf

X = np.linspace(0, 1, 100)
CUTS = (0.34, 0.67)
BLOCKS = [np.flatnonzero(np.digitize(X, CUTS) == j) for j in range(3)]
RANGE = (0.2, 1.0)
SHOWN = (0.2, 0.5, 0.8)  # length scales
NOISE = 0.2
JITTER = 1e-4  # of the variance, which single precision needs


def kernel(phi):
    """Squared exponential, on the points."""
    return jnp.exp(-((X[:, None] - X) ** 2) / (2 * phi**2)) + JITTER * jnp.eye(len(X))


def model(place, y=None):
    """The true model, as for data in one place."""
    phi = numpyro.sample("phi", dist.Uniform(*RANGE))
    theta = numpyro.sample("theta", dist.MultivariateNormal(0.0, kernel(phi)))
    with nf.silo_plate("row", place.shape[0]):
        numpyro.sample("y", dist.Normal(theta[place], NOISE), obs=y)


def simulate(seed=0):
    """Fifteen noisy values of a sine, by silo."""
    r = np.random.default_rng(seed)
    place = np.sort(r.choice(len(X), 15, replace=False))
    y = np.sin(2 * np.pi * X[place]) + NOISE * r.normal(size=15)
    of = np.digitize(X[place], CUTS)
    return [dict(place=place[of == j], y=y[of == j]) for j in range(3)]


def pooled(silos):
    """All silos' rows."""
    return {name: np.concatenate([s[name] for s in silos]) for name in silos[0]}


def exact(silos):
    """Mean and standard deviation of the curve, over a grid of length scales."""
    held, parts = pooled(silos), []
    for phi in np.linspace(*RANGE, 161):
        K = np.asarray(kernel(phi), float)
        at = held["place"]
        C = K[np.ix_(at, at)] + NOISE**2 * np.eye(len(at))
        gain = np.linalg.solve(C, K[at]).T
        log_p = -0.5 * (held["y"] @ np.linalg.solve(C, held["y"]) + np.linalg.slogdet(C)[1])
        parts.append((log_p, gain @ held["y"], np.diag(K - gain @ K[at])))
    log_p, means, variances = (np.array(p) for p in zip(*parts, strict=True))
    weights = np.exp(log_p - log_p.max())
    weights /= weights.sum()
    mean = weights @ means
    return mean, np.sqrt(weights @ (variances + (means - mean) ** 2))


def by_nuts(text, silos, draws):
    """Draws of the curve."""
    mcmc = MCMC(
        NUTS(text, target_accept_prob=0.95), num_warmup=draws, num_samples=draws, progress_bar=False
    )
    mcmc.run(jax.random.key(0), **pooled(silos))
    return np.asarray(mcmc.get_samples()["theta"])


def by_sfvi(text, silos, rounds, draws):
    """Draws of the curve: each silo's part of it, at the same draws of what they share."""
    # A few rounds, to see that it runs, are not worth a search for the mode.
    method = nf.SFVI(text, start=None if rounds < 100 else "mode")
    result = method.run(jax.random.key(1), rounds, silos, progress_bar=False)
    theta = np.zeros((draws, len(X)))
    for j, own in enumerate(BLOCKS):
        found = result.sample_posterior(jax.random.key(2), draws, silo=j)
        theta[:, own] = np.asarray(found["theta"])[:, own]
    return theta


def compared(theta, reference):
    """Errors of means in posterior standard deviations, and ratios of these, over the points."""
    mean, sd = reference
    off, ratio = np.abs(theta.mean(0) - mean) / sd, theta.std(0) / sd
    return {"error": float(off.mean()), "worst": float(off.max()), "sd_ratio": float(ratio.mean())}


def axes_of(rows, columns, size):
    """Axes of a figure without a screen."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(
        rows, columns, figsize=size, squeeze=False, sharex=True, sharey="row", layout="constrained"
    )


def plot(path, sigma, report, curves, silos, draws):
    """Figures 3, 4 and 5, with so many draws of the learnt prior."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    figure, axes = axes_of(2, 3, (8.5, 5.4))
    for j, (phi, true, found) in enumerate(zip(SHOWN, report.true, report.found, strict=True)):
        for i, cov in enumerate((true, found)):
            image = axes[i, j].imshow(cov, vmin=0, vmax=1, extent=(0, 1, 1, 0))
            for cut in CUTS:
                axes[i, j].axvline(cut, color="w", lw=0.6)
                axes[i, j].axhline(cut, color="w", lw=0.6)
        axes[0, j].set_title(f"length scale {phi:g}")
    axes[0, 0].set_ylabel("kernel")
    axes[1, 0].set_ylabel("draws of the learnt prior")
    for axis in axes[1]:
        axis.set_xlabel("x")
        axis.set_xticks([0, 0.5, 1])
    figure.colorbar(image, ax=axes, label="covariance")
    figure.savefig(f"{path}_covariance.png", dpi=130)

    figure, axes = axes_of(1, 2, (9, 3.4))
    colours = colormaps["viridis"]
    scales = np.linspace(*RANGE, draws)
    for axis, prior, name in zip(
        axes[0], (sigma.deterministic, sigma), ("deterministic", "auxiliary"), strict=True
    ):
        for i, phi in enumerate(scales):
            draw = prior.sample(jax.random.key(10 + i), 1, dict(phi=phi))[0]
            axis.plot(X, draw, color=colours((phi - RANGE[0]) / (RANGE[1] - RANGE[0])), lw=0.9)
        for cut in CUTS:
            axis.axvline(cut, color="r", ls="--", lw=0.8)
        axis.set_title(f"{name} prior, {draws} draws")
        axis.set_xlabel("x")
    axes[0, 0].set_ylabel("curve")
    shown = ScalarMappable(Normalize(*RANGE), "viridis")
    figure.colorbar(shown, ax=axes, label="length scale")
    figure.savefig(f"{path}_draws.png", dpi=130)

    figure, axes = axes_of(1, len(curves), (2.6 * len(curves), 2.8))
    held = pooled(silos)
    for axis, (name, (mean, low, high)) in zip(axes[0], curves.items(), strict=True):
        axis.fill_between(X, low, high, color="C0", alpha=0.3, label="90 %")
        axis.plot(X, mean, color="C0", label="mean")
        axis.plot(X, np.sin(2 * np.pi * X), color="0.4", ls=":", label="sine")
        axis.plot(X[held["place"]], held["y"], "k.", ms=4, label="observed")
        for cut in CUTS:
            axis.axvline(cut, color="r", ls="--", lw=0.8)
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("x")
        axis.set_ylim(-2, 2)
    axes[0, 0].legend(fontsize=7)
    figure.savefig(f"{path}_posterior.png", dpi=130)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the numbers")
    parser.add_argument("--plot", metavar="NAME", help="draw NAME_covariance.png and two others")
    parser.add_argument("--steps", type=int, default=20_000, help="of the training")
    parser.add_argument("--quick", action="store_true", help="little of everything")
    args = parser.parse_args()
    steps, rounds, draws = (10, 20, 50) if args.quick else (args.steps, 2_000, 2_000)
    silos = simulate()
    reference = exact(silos)
    began = time.perf_counter()
    sigma = nf.SigmaPrior.fit(
        jax.random.key(0), model, "theta", BLOCKS, model_kwargs=silos[0], num_steps=steps,
        z_global=10, progress_bar=False,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    at = [dict(phi=np.float32(phi)) for phi in SHOWN]
    report = sigma.deterministic.check(jax.random.key(3), at, draws)
    print(
        f"training: {seconds:.0f} s, of which {100 * sigma.times['drawing']:.0f} % draw the prior"
    )
    print(report)
    held = dict(model_kwargs=silos[0])
    decoder = nf.SigmaPrior.fit(
        jax.random.key(0), model, "theta", BLOCKS, num_steps=steps, decoder_only=True,
        progress_bar=False, **held,
    )  # fmt: skip
    by_decoder = decoder.deterministic.check(jax.random.key(3), at, draws)
    print(f"a decoder alone: {decoder.times['seconds']:.0f} s in steps\n{by_decoder}")
    priors = {
        "SIGMA, deterministic": sigma.deterministic,
        "SIGMA, auxiliary": sigma,
        "decoder alone": decoder.deterministic,
        "independent blocks": nf.BlockPrior.fit(model, "theta", BLOCKS, **held),
        "low rank and blocks": nf.LowRankPrior.fit(model, "theta", BLOCKS, rank=10, **held),
    }
    if args.quick:
        priors = {name: priors[name] for name in ("SIGMA, auxiliary", "low rank and blocks")}
    texts = {n: nf.handlers.substitute_prior(model, {"theta": p}) for n, p in priors.items()}
    found, curves = {}, {}
    mean, sd = reference
    curves["exact"] = (mean, mean - 1.645 * sd, mean + 1.645 * sd)
    for name, text in texts.items():
        for method, run in (
            ("NUTS", lambda text=text: by_nuts(text, silos, draws)),
            ("SFVI", lambda text=text: by_sfvi(text, silos, rounds, draws)),
        ):
            if args.quick and (name, method) == ("SIGMA, auxiliary", "SFVI"):
                continue  # the other three show every way through this program
            began = time.perf_counter()
            theta = run()
            numbers = compared(theta, reference) | {"seconds": time.perf_counter() - began}
            found[f"{name}, {method}"] = numbers
            print(
                f"{name + ', ' + method:28} mean error {numbers['error']:.3f} sd, "
                f"worst {numbers['worst']:.3f}, sd ratio {numbers['sd_ratio']:.3f}",
                flush=True,
            )
            if (name.startswith("SIGMA") and method == "NUTS") or (
                name.startswith("low") and method == "SFVI"
            ):
                low, high = np.quantile(theta, (0.05, 0.95), axis=0)
                curves[f"{name}, {method}"] = (theta.mean(0), low, high)
    if args.json:
        rows, alone = (
            [row._asdict() | {"phi": float(row.phi["phi"])} for row in found.rows]
            for found in (report, by_decoder)
        )
        numbers = {"training_seconds": seconds, "times": sigma.times, "check": rows}
        numbers["check_of_decoder_alone"] = alone
        lines = [
            table_row(
                f"covariances at length scale {r['phi']:g}",
                ", ".join(f"{name} {value:.3f}" for name, value in r.items() if name != "phi"),
                target="0.1",
            )
            for r in rows
        ]
        for name, r in found.items():
            words = f"{r['error']:.3f}, {r['worst']:.3f} sd, {r['sd_ratio']:.3f}"
            lines.append(
                table_row(f"a curve, {name}: mean error, worst, ratio of sds", words, "exact")
            )
        lines.append(table_row("training", f"{seconds:.0f} s", target="180 s"))
        write(args.json, lines, details=numbers | {"posterior": found})
    if args.plot:
        plot(args.plot, sigma, report, curves, silos, 3 if args.quick else 25)


if __name__ == "__main__":
    main()
