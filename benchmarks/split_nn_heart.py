"""Split neural networks for heart disease: two clients with some measurements of each patient.

Section 5.3 and Table 3 of Hassan, Sutton, Mira and Mengersen (2024), arXiv 2405.04043: 918 patients
of whom one client knows age, sex, kind of chest pain, blood pressure and cholesterol, the other the
remaining six covariates; the server knows who is ill. In a split network each client sends the
output of its network for each patient. In the hierarchical Bayesian one the weights of the last
layer have a posterior, and what is sent is that output with noise of standard deviation ``rho``.
Besides, one that the paper does not have: all layers' weights have a posterior.

    python benchmarks/split_nn_heart.py --csv heart.csv --json heart.json --plot heart.png

Ten-fold cross-validation of the accuracy and of the mean log-likelihood of patients that were not
trained on, paired over folds, beside a logistic regression on all columns in one place. Predictions
of the Bayesian network are those of its augmented model, noise included, averaged over draws; the
JSON has those without noise besides.

``heart.csv`` is the Heart Failure Prediction data set (Kaggle, fedesoriano, 2021). Without it
``heart_failure.npz`` is looked for in the folder that ``NUMPYRO_FED_DATA`` names
(``federated_data.py`` says how such files are laid out). ``--quick`` takes one fold, few rounds.
"""

import argparse
import csv
import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import Predictive, init_to_sample
from record import table_row, write
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import KFold

import numpyro_fed as nf

FOLDER = "NUMPYRO_FED_DATA"
COLUMNS = (
    ("Age", "Sex", "ChestPainType", "RestingBP", "Cholesterol"),
    ("FastingBS", "RestingECG", "MaxHR", "ExerciseAngina", "Oldpeak", "ST_Slope"),
)
NUMERIC = {"Age", "RestingBP", "Cholesterol", "MaxHR", "Oldpeak"}
LOWEST = -3.0  # nats that are drawn
WIDTHS = (8, 8, 2)  # of the layers


def hidden(x):
    """The layers of a client's network, parameters of its own."""
    for i, width in enumerate(WIDTHS):
        shape = (x.shape[-1], width)
        w = numpyro.param(f"w{i}", lambda key, s=shape: jax.nn.initializers.he_normal()(key, s))
        b = numpyro.param(f"b{i}", jnp.zeros(width))
        x = jax.nn.relu(x @ w + b) if i < len(WIDTHS) - 1 else x @ w + b
    return x


def bayesian(x):
    """A client's network whose last weights are latent."""
    return hidden(x) @ numpyro.sample("w", dist.Normal(0, 1).expand([WIDTHS[-1]]).to_event(1))


def everywhere(x):
    """A client's network all of whose weights are latent."""
    for i, width in enumerate(WIDTHS):
        normal = dist.Normal(0, 1).expand([x.shape[-1], width]).to_event(2)
        x = x @ numpyro.sample(f"w{i}", normal)
        x += numpyro.sample(f"b{i}", dist.Normal(0, 1).expand([width]).to_event(1))
        x = jax.nn.relu(x) if i < len(WIDTHS) - 1 else x
    return x @ numpyro.sample("w", dist.Normal(0, 1).expand([WIDTHS[-1]]).to_event(1))


def plain(x):
    """A client's network that is all parameters."""
    return hidden(x) @ numpyro.param("w", jnp.ones(WIDTHS[-1]))


def disease(predictor):
    """The text of both."""

    def model(xs, y=None):
        eta = nf.client_sum("client", predictor, xs)
        numpyro.deterministic("p", jax.nn.sigmoid(eta))
        with numpyro.plate("patient", eta.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=eta), obs=y)

    return model


def read(path):
    """Each column by its name, and the response: from a CSV file, or from the folder."""
    if path is not None:
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file))
        table = {name: np.array([row[name] for row in rows]) for name in rows[0]}
        return table, table.pop("HeartDisease").astype(int)
    if not os.environ.get(FOLDER):
        raise SystemExit(f"say where heart.csv is by --csv, or set {FOLDER}: see --help")
    with np.load(Path(os.environ[FOLDER]) / "heart_failure.npz") as arrays:
        table = dict(zip(arrays["num_names"], arrays["x_num"].T, strict=True))
        table |= dict(zip(arrays["cat_names"], arrays["x_cat"].T, strict=True))
        return {str(name): column for name, column in table.items()}, arrays["y"].astype(int)


def columns_of(table, names):
    """A client's columns: numbers to mean 0 and standard deviation 1, an indicator a level."""
    parts = []
    for name in names:
        column = table[name]
        if name in NUMERIC:
            column = column.astype(float)
            parts.append(((column - column.mean()) / column.std())[:, None])
        else:
            parts.append(np.equal.outer(column, np.unique(column)))
    return np.hstack(parts).astype(np.float32)


def measured(probabilities, y):
    """Accuracy in per cent, and the mean log-likelihood of all and of wrong predictions."""
    p = np.clip(np.asarray(probabilities, np.float64), 1e-300, 1 - 1e-16)
    right, log_lik = (p > 0.5) == (y == 1), np.where(y == 1, np.log(p), np.log1p(-p))
    wrong = float(log_lik[~right].mean()) if not right.all() else None
    return {"accuracy": 100 * float(right.mean()), "log_lik": float(log_lik.mean()), "wrong": wrong}


def predicted(result, text, xs, draws):
    """The probability of disease of new patients under a text, given the fitted parameters."""
    params = {
        f"client_{j}/{name}": value
        for j in range(result.num_clients)
        for name, value in result.client_params(j).items()
        if name != "guide"
    }
    if not result.sites:
        return Predictive(text, params=params, num_samples=1)(jax.random.key(0), xs)["p"][0]
    posterior = result.sample_posterior(jax.random.key(2), draws)
    return Predictive(text, posterior, params=params)(jax.random.key(3), xs)["p"].mean(0)


def methods_of(rhos):
    """The plain network, and those with noise of these standard deviations, by name: with a prior
    for the weights of the last layer, and of all layers. These begin at a draw from the prior, each
    closely around its own: from zero all units of a layer would be alike.
    """
    shared = dict(optim=optax.adam(1e-3), start=None)
    guide = nf.guides.MeanField(init_loc_fn=init_to_sample, init_scale=0.05)
    found = {"split network": nf.VFL(disease(plain), **shared)}
    for rho in rhos:
        noise = dict(rho=rho, auxiliary="amortised", **shared)
        found[f"Bayesian, rho {rho:g}"] = nf.VFL(disease(bayesian), **noise)
        noise |= dict(guide=guide, optim=optax.adam(3e-3))
        found[f"in all layers, rho {rho:g}"] = nf.VFL(disease(everywhere), **noise)
    return found


def fold_of(vfl, train, test, rounds, draws, seed):
    """One fit, and what it says of the patients left out."""
    (xs, y), (new_xs, new_y), began = train, test, time.perf_counter()
    result = vfl.run(jax.random.key(seed), rounds, xs, y, progress_bar=False)
    text = vfl.model if vfl.rho is None else nf.handlers.augment(vfl.model, vfl.rho)
    found = measured(predicted(result, text, new_xs, draws), new_y)
    without = measured(predicted(result, vfl.model, new_xs, draws), new_y)
    return found | {"seconds": time.perf_counter() - began, "without_noise": without}


def pooled(train, test):
    """Logistic regression on all columns in one place."""
    fit = LogisticRegression(max_iter=1_000).fit(np.hstack(train[0]), train[1])
    return measured(fit.predict_proba(np.hstack(test[0]))[:, 1], test[1])


def plot(path, folds):
    """Accuracy and log-likelihood of each fold, a line a fold."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6))
    names = list(folds)
    for axis, what, label in zip(
        axes,
        ("accuracy", "log_lik"),
        ("accuracy (%)", "mean log-likelihood (nats)"),
        strict=True,
    ):
        values = np.array([[fold[what] for fold in folds[name]] for name in names])
        axis.plot(values, color="0.8", lw=0.8)
        axis.errorbar(range(len(names)), values.mean(1), values.std(1), fmt="o", capsize=3)
        axis.set_xticks(range(len(names)), names, rotation=25, ha="right")
        axis.set_ylabel(label)
    axes[1].set_ylim(bottom=max(axes[1].get_ylim()[0], LOWEST))
    figure.suptitle("Patients left out, ten folds: mean and standard deviation; a line a fold")
    figure.tight_layout()
    figure.savefig(path, dpi=150)


PAPER = {
    "split network": "80.73 ± 3.65 %, -2.21",
    "Bayesian, rho 1": "86.39 ± 4.20 %, -0.36",
    "Bayesian, rho 5": "84.98 ± 4.92 %, -0.59",
    "Bayesian, rho 10": "84.10 ± 5.23 %, -0.67",
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", metavar="FILE", help="the data")
    parser.add_argument("--rounds", type=int, default=20_000, help="of each fit")
    parser.add_argument("--only", default="", help="networks whose names have this in them")
    parser.add_argument("--json", metavar="FILE", help="write the numbers")
    parser.add_argument("--plot", metavar="FILE", help="draw them")
    parser.add_argument("--quick", action="store_true", help="one fold, few rounds")
    args = parser.parse_args()
    rounds, draws = (50, 20) if args.quick else (args.rounds, 1_000)
    table, y = read(args.csv)
    xs = [columns_of(table, names) for names in COLUMNS]
    cuts = list(KFold(10, shuffle=True, random_state=0).split(y))[: 1 if args.quick else 10]
    rhos = (1.0,) if args.quick else (1.0, 5.0, 10.0)
    methods = {name: vfl for name, vfl in methods_of(rhos).items() if args.only in name}
    folds = {"logistic regression": []} | {name: [] for name in methods}
    for k, (train, test) in enumerate(cuts):
        parts = [([x[rows] for x in xs], y[rows]) for rows in (train, test)]
        folds["logistic regression"].append(pooled(*parts))
        for name, vfl in methods.items():
            folds[name].append(fold_of(vfl, *parts, rounds, draws, seed=k))
    print(f"{'':22s} accuracy (%)    log-likelihood   of wrong predictions (nats)")
    for name, found in folds.items():
        accuracy, log_lik = (np.array([f[what] for f in found]) for what in ("accuracy", "log_lik"))
        wrong = np.mean([f["wrong"] for f in found if f["wrong"] is not None])
        print(
            f"{name:22s} {accuracy.mean():6.2f} +- {accuracy.std():4.2f}  "
            f"{log_lik.mean():7.3f} +- {log_lik.std():.3f}  {wrong:7.2f}"
        )
    if args.json:
        rows = []
        for name, found in folds.items():
            right, nats = (np.array([f[what] for f in found]) for what in ("accuracy", "log_lik"))
            words = f"{right.mean():.2f} ± {right.std():.2f} %, {nats.mean():.3f}"
            rows.append(table_row(f"{name}, {rounds:,} rounds", words, PAPER.get(name, "")))
        write(args.json, rows, details=folds)
    if args.plot:
        plot(args.plot, folds)


if __name__ == "__main__":
    main()
