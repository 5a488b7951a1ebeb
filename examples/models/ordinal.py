"""Pain on a scale from 0 to 4, by a proportional odds model with an effect of the hospital.

Does a nerve block lower the pain after an operation? Scores have an order and no distances: the
text has four cutpoints on the log odds scale, in order, and effects that move all of them.
Source: McCullagh (1980), Journal of the Royal Statistical Society B 42.

    python examples/models/run.py ordinal --plot ordinal.png
"""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_fed as nf


def model(age, block, pain=None):
    """Scores ``pain`` (patient,), whole numbers from 0 to 4.

    ``age`` (patient,) is in years; ``block`` (patient,) is 1 for a nerve block, else 0.
    """
    ordered = dist.transforms.OrderedTransform()
    prior = dist.TransformedDistribution(dist.Normal(0, 1.5).expand([4]).to_event(1), ordered)
    cutpoints = numpyro.sample("cutpoints", prior)
    of_age = numpyro.sample("of_age", dist.Normal(0, 1))  # log odds ratio of ten years
    of_block = numpyro.sample("of_block", dist.Normal(0, 2))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    with nf.silo_plate("hospital", 1):
        u = numpyro.sample("u", dist.Normal(0, tau))
    with nf.silo_plate("patient", age.shape[0]):
        log_odds = of_age * (age - 60) / 10 + of_block * block + u[0]
        numpyro.sample("pain", dist.OrderedLogistic(log_odds, cutpoints), obs=pain)


CUTPOINTS, OF_AGE, OF_BLOCK = np.array([-1.5, -0.3, 1.0, 2.2]), -0.2, -1.2
HOSPITALS = {"Basel": (120, 0.9), "Bern": (70, -0.8), "Chur": (20, 0.2)}  # patients, effect


def simulate(seed=0):
    """Three hospitals, whose patients tell more or less of their pain."""
    rng = np.random.default_rng(seed)
    silos = {}
    for name, (n, u) in HOSPITALS.items():
        age, block = rng.normal(60, 12, n).round(), rng.integers(0, 2, n)
        latent = OF_AGE * (age - 60) / 10 + OF_BLOCK * block + u + rng.logistic(size=n)
        silos[name] = dict(age=age, block=block, pain=(latent[:, None] > CUTPOINTS).sum(1))
    return silos


def shares(cutpoints, log_odds):
    """The probability of each score (..., 5), by cutpoints (..., 4) and log odds (...,)."""
    below = 1 / (1 + np.exp(log_odds[..., None] - cutpoints))
    return np.diff(below, axis=-1, prepend=0, append=1)


def plot(fitted, silos, path):
    """Draw the probability of each score at each hospital, without and with a block, at 60."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(6, 3.6), sharey=True, layout="constrained")
    for axis, (name, silo) in zip(axes, silos.items(), strict=True):
        draws = fitted.sample_posterior(jax.random.key(1), 2_000, silo=name)
        for block, marker, label in ((0, "o", "no block"), (1, "s", "nerve block")):
            log_odds = draws["of_block"] * block + draws["u"][:, 0]
            found = 100 * shares(np.asarray(draws["cutpoints"]), np.asarray(log_odds))
            low, middle, high = np.quantile(found, [0.05, 0.5, 0.95], axis=0)
            at = np.arange(5) + 0.3 * block - 0.15
            axis.vlines(at, low, high, "C0", linewidth=1)
            face = "C0" if block else "white"
            axis.plot(at, middle, marker, color="C0", markerfacecolor=face, label=f"{label}, 90 %")
            true = 100 * shares(CUTPOINTS, np.array(OF_BLOCK * block + HOSPITALS[name][1]))
            axis.plot(at, true, "_", color="0.3", markersize=9, label="truth" * block)
        axis.set_title(f"{name}, {len(silo['age'])} patients", fontsize="medium")
        axis.set(xticks=range(5), ylim=(0, 80))
    axes[0].set_ylabel("patients of 60 years with the score (%)")
    axes[2].legend(frameon=False, fontsize="small")
    figure.supxlabel("pain score", fontsize="medium")
    figure.savefig(path, dpi=100)
