"""Effects of twelve hospitals in one registry: those with few patients borrow from the others.

Each hospital keeps its patients' rows: whether a patient came back within 30 days, age, and whether
the admission was an emergency. The model has an effect for each hospital. ``nf.fit`` finds the
posterior without pooling rows. What a hospital's rows alone would say is drawn beside it.

    python examples/hospitals.py --plot hospitals.png --json hospitals.json

Data are simulated: 15 to 600 patients a hospital; the figure shows the true values.
``--quick`` takes three small hospitals.
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
REFERENCE = np.array([65, 0])  # the patient for whom hospitals are compared: 65, no emergency


def simulate(sizes=SIZES, seed=0):
    """What each hospital holds, and the true logits of the reference patient (hospital,)."""
    rng = np.random.default_rng(seed)
    effects, beta = rng.normal(0, 0.6, len(sizes)), np.array([0.02, 0.7])
    silos = []
    for n, effect in zip(sizes, effects, strict=True):
        x = np.stack([rng.normal(65, 12, n), rng.integers(0, 2, n)], -1)
        back = rng.uniform(size=n) < 1 / (1 + np.exp(2.8 - effect - x @ beta))
        silos.append(dict(x=x, back=back.astype(float)))
    return silos, effects - 2.8 + REFERENCE @ beta


def alone(silo, beta):
    """A hospital's own estimate of the reference patient's logit, and its standard error.

    Maximum likelihood by Newton's method, with the effects of covariates held at ``beta``: fifteen
    patients would tell nothing of them. Half a return and half a success are added over the rows,
    so that the estimate exists where all patients came back or none did.
    """
    offset, n, logit = (silo["x"] - REFERENCE) @ beta, len(silo["x"]), 0.0
    y = (silo["back"] * n + 0.5) / (n + 1)
    for _ in range(30):
        p = 1 / (1 + np.exp(-offset - logit))
        logit += (y - p).sum() / (p * (1 - p)).sum()
    return logit, (p * (1 - p)).sum() ** -0.5


def plot(rows, middle, sizes):
    """Probabilities of the reference patient: alone, in the federation, and true."""
    import matplotlib.pyplot as plt

    def percent(logit):
        return 100 / (1 + np.exp(-np.asarray(logit)))

    figure, axis = plt.subplots(figsize=(8, 4.4), layout="constrained")
    at = np.arange(len(sizes))
    for shift, name, style in (
        (-0.15, "alone", dict(color="0.55", marker="s", label="a hospital's rows alone")),
        (0.15, "federated", dict(color="C0", marker="o", label="nf.fit over all hospitals")),
    ):
        mean, sd = rows[name]
        axis.vlines(
            at + shift, percent(mean - 1.96 * sd), percent(mean + 1.96 * sd), style["color"]
        )
        axis.plot(at + shift, percent(mean), linestyle="", **style)
    axis.plot(at, percent(rows["true"]), "k_", markersize=16, label="true value")
    axis.axhline(percent(middle), color="C0", linestyle=":", label="a hospital in the middle")
    axis.set(xticks=at, xticklabels=sizes, xlabel="patients of the hospital")
    axis.set_ylabel("a patient of 65 comes back (%), 95 %")
    axis.set_title("Hospitals with few patients are pulled to the middle; large ones stay put")
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", frameon=False, ncols=4)
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the numbers")
    parser.add_argument("--plot", metavar="FILE", help="draw the hospitals")
    parser.add_argument("--quick", action="store_true", help="three hospitals")
    args = parser.parse_args()
    sizes = SIZES[:5:2] if args.quick else SIZES
    silos, true = simulate(sizes)

    fitted = nf.fit(jax.random.key(0), model, silos)
    print(fitted.verdict)
    logits = []
    for j in range(len(silos)):  # a hospital draws its own effect, together with the globals
        draws = fitted.sample_posterior(jax.random.key(1), 4_000, silo=j)
        logits.append(draws["mu"] + draws["u"][:, 0] + draws["beta"] @ REFERENCE)
    for name in ("mu", "beta", "tau"):
        print(f"{name:5}", np.round(draws[name].mean(0), 3), "+-", np.round(draws[name].std(0), 3))

    beta = np.asarray(draws["beta"].mean(0))
    middle = float((draws["mu"] + draws["beta"] @ REFERENCE).mean())
    rows = {
        "alone": np.transpose([alone(silo, beta) for silo in silos]),
        "federated": np.transpose([(float(v.mean()), float(v.std())) for v in logits]),
        "true": true,
    }
    error = {n: float(np.sqrt(np.mean((rows[n][0] - true) ** 2))) for n in ("alone", "federated")}
    print("root mean squared error of logits:", {n: round(e, 3) for n, e in error.items()})
    if args.json:
        report = {"verdict": fitted.verdict, "trusted": fitted.trusted, "error": error}
        report |= {name: np.asarray(values).tolist() for name, values in rows.items()}
        Path(args.json).write_text(json.dumps(report, indent=1))
    if args.plot:
        plot(rows, middle, sizes).savefig(args.plot, dpi=110)


if __name__ == "__main__":
    main()
