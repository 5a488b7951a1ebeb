"""Effects of twelve hospitals in one registry: those with few patients borrow from the others.

Each hospital keeps its patients' rows: whether a patient came back within 30 days, age, and whether
the admission was an emergency. The model has an effect for each hospital. ``nf.fit`` finds the
posterior without pooling rows. What a hospital would say of itself alone is drawn beside it.

    python examples/hospitals.py --plot hospitals.png --json hospitals.json

Data are simulated: 15 to 600 patients a hospital, from true effects that the figure shows.
``--quick`` takes six hospitals.
"""

import argparse
import json
from pathlib import Path

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_fed as nf


def model(x, back=None):
    """Readmission ``back`` (patient,), given covariates ``x`` (patient, 2) in their own units."""
    mu = numpyro.sample("mu", dist.Normal(0, 5))  # global: the logit of a hospital in the middle
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))  # global
    tau = numpyro.sample("tau", dist.HalfNormal(1))  # global: how much hospitals differ
    with nf.silo_plate("hospital", 1):
        u = numpyro.sample("u", dist.Normal(0, tau))  # local: one for each hospital
    with nf.silo_plate("patient", x.shape[0]):
        numpyro.sample("back", dist.Bernoulli(logits=mu + u[0] + x @ beta), obs=back)


SIZES = (15, 20, 25, 30, 40, 60, 80, 120, 180, 250, 400, 600)


def simulate(sizes=SIZES, seed=0):
    """What each hospital holds, and the true effects (hospital,)."""
    rng = np.random.default_rng(seed)
    effects = rng.normal(0, 0.6, len(sizes))
    silos = []
    for n, effect in zip(sizes, effects, strict=True):
        age, emergency = rng.normal(65, 12, n), rng.integers(0, 2, n)
        logits = -2.8 + effect + 0.02 * age + 0.7 * emergency
        back = rng.uniform(size=n) < 1 / (1 + np.exp(-logits))
        silos.append(dict(x=np.stack([age, emergency], -1), back=back.astype(float)))
    return silos, effects


def alone(silo, mean):
    """A hospital's own estimate of its effect and the standard error, by maximum likelihood.

    The effect of covariates and the middle are held at the federation's posterior means: otherwise
    fifteen patients would tell nothing. Newton's method; one success and one failure are split over
    the rows, so that the estimate exists where all patients came back or none did.
    """
    offset = mean["mu"] + silo["x"] @ mean["beta"]
    n, y, u = len(offset), silo["back"], 0.0
    y = (y * n + 0.5) / (n + 1)
    for _ in range(30):
        p = 1 / (1 + np.exp(-offset - u))
        u += (y - p).sum() / (p * (1 - p)).sum()
    return u, (p * (1 - p)).sum() ** -0.5


def plot(rows, sizes):
    """Effects of hospitals: alone, in the federation, and true."""
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4.4), layout="constrained")
    at = np.arange(len(sizes))
    for shift, name, style in (
        (-0.15, "alone", dict(color="0.55", marker="s", label="alone")),
        (0.15, "federated", dict(color="C0", marker="o", label="nf.fit over all hospitals")),
    ):
        mean, sd = rows[name]
        axis.errorbar(at + shift, mean, 1.96 * sd, linestyle="", capsize=2, **style)
    axis.plot(at, rows["true"], "k_", markersize=16, label="true effect")
    axis.axhline(0, color="0.8", zorder=0)
    axis.set(xticks=at, xticklabels=sizes, xlabel="patients of the hospital")
    axis.set_ylabel("effect of the hospital (logit), 95 %")
    axis.set_title("Hospitals with few patients are pulled to the middle; large ones stay put")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the numbers")
    parser.add_argument("--plot", metavar="FILE", help="draw the effects of hospitals")
    parser.add_argument("--quick", action="store_true", help="six hospitals")
    args = parser.parse_args()
    sizes = SIZES[::2] if args.quick else SIZES
    silos, effects = simulate(sizes)

    fitted = nf.fit(jax.random.key(0), model, silos)
    print(fitted.verdict)
    draws = fitted.sample_posterior(jax.random.key(1), 4_000)
    for name in ("mu", "beta", "tau"):
        print(f"{name:5}", np.round(draws[name].mean(0), 3), "+-", np.round(draws[name].std(0), 3))

    mean = {name: np.asarray(draws[name].mean(0)) for name in ("mu", "beta")}
    own = [
        fitted.sample_posterior(jax.random.key(1), 4_000, silo=j)["u"] for j in range(len(silos))
    ]
    rows = {
        "alone": np.transpose([alone(silo, mean) for silo in silos]),
        "federated": np.transpose([(float(u.mean()), float(u.std())) for u in own]),
        "true": effects,
    }
    error = {name: np.sqrt(np.mean((rows[name][0] - effects) ** 2)) for name in list(rows)[:2]}
    print("root mean squared error of effects:", {k: round(float(v), 3) for k, v in error.items()})
    if args.json:
        report = {"verdict": fitted.verdict, "trusted": fitted.trusted, "sizes": sizes}
        report |= {name: np.asarray(values).tolist() for name, values in rows.items()}
        report["error"] = {name: float(value) for name, value in error.items()}
        Path(args.json).write_text(json.dumps(report, indent=1))
    if args.plot:
        plot(rows, sizes).savefig(args.plot, dpi=110)


if __name__ == "__main__":
    main()
