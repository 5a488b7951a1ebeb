"""Seizures of patients in a month, of whom some have none at all because the drug works.

How many patients are free of seizures for good, and how many seizures have the others? A Poisson
distribution has too few zeros for such counts. The text uses NumPyro's zero-inflated Poisson
distribution, with a chance of "free" by treatment and an effect of the hospital on the rate of the
others. Lambert (1992), Technometrics 34.

    python examples/models/run.py zero_inflated --plot zero_inflated.png
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_fed as nf


def model(treated, days, seizures=None):
    """Counts of ``seizures`` (patient,) in ``days`` (patient,) under observation.

    ``treated`` (patient,) is 1 for the new drug and 0 for the old one.
    """
    free = numpyro.sample("free", dist.Normal(-1, 1.5))  # logit of "free", under the old drug
    effect = numpyro.sample("effect", dist.Normal(0, 1.5))  # of the new drug on that logit
    rate = numpyro.sample("rate", dist.Normal(1, 1.5))  # log of seizures in 30 days
    tau = numpyro.sample("tau", dist.HalfNormal(0.5))
    with nf.silo_plate("hospital", 1):
        u = numpyro.sample("u", dist.Normal(0, tau))
    with nf.silo_plate("patient", treated.shape[0]):
        gate = jax.nn.sigmoid(free + effect * treated)
        mean = jnp.exp(rate + u[0]) * days / 30
        numpyro.sample("seizures", dist.ZeroInflatedPoisson(gate, mean), obs=seizures)


SIZES = {"Basel": 150, "Bern": 80, "Chur": 40}
EFFECTS = {"Basel": -0.4, "Bern": 0.1, "Chur": 0.5}
FREE, EFFECT, RATE = -1.4, 1.5, 1.0


def simulate(seed=0):
    """What each hospital holds: 40 to 150 patients, under observation for one to four weeks."""
    rng = np.random.default_rng(seed)
    silos = {}
    for name, n in SIZES.items():
        treated, days = rng.integers(0, 2, n), rng.integers(7, 31, n)
        free = rng.uniform(size=n) < 1 / (1 + np.exp(-FREE - EFFECT * treated))
        seizures = rng.poisson(np.exp(RATE + EFFECTS[name]) * days / 30)
        silos[name] = dict(treated=treated, days=days, seizures=np.where(free, 0, seizures))
    return silos


def plot(fitted, silos, path):
    """Draw the observed counts of each hospital over those that the fit predicts."""
    import matplotlib.pyplot as plt

    predicted = fitted.predict(jax.random.key(1), silo="own rows", n=1_000)
    figure, axes = plt.subplots(1, 3, figsize=(6, 3.6), dpi=100, layout="constrained", sharey=True)
    counts = np.arange(9)
    for axis, (name, silo), found in zip(axes, silos.items(), predicted, strict=True):
        observed = [100 * np.mean(silo["seizures"] == k) for k in counts]
        axis.bar(counts, observed, color="0.8", label="patients")
        share = np.stack([100 * (found["seizures"] == k).mean(1) for k in counts], -1)
        axis.vlines(counts, *np.quantile(share, [0.05, 0.95], axis=0), color="C0")
        axis.plot(counts, share.mean(0), "o", color="C0", markersize=4, label="the model, 90 %")
        gate = 1 / (1 + np.exp(-FREE - EFFECT * silo["treated"]))
        mean = np.exp(RATE + EFFECTS[name]) * silo["days"] / 30
        true = np.exp(dist.ZeroInflatedPoisson(gate, mean).log_prob(counts[:, None])).mean(1)
        axis.plot(counts, 100 * true, "_", color="0.3", markersize=9, label="truth")
        axis.set_title(f"{name}, {len(mean)} patients", fontsize=10)
        axis.set(xlabel="seizures", xticks=counts[::2])
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("share of patients (%)")
    names = axes[0].get_legend_handles_labels()
    figure.legend(*names, loc="outside lower center", frameon=False, ncols=3)
    figure.savefig(path)
