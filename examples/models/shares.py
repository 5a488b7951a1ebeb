"""Shares between 0 and 1, by a beta regression whose precision depends on a covariate.

Do patients who were trained take a larger share of their prescribed doses? Shares of patients who
were watched for few days scatter more: the text has a regression for the mean and one for the
precision.
Source: Smithson and Verkuilen (2006), Psychological Methods 11.

    python examples/models/run.py shares --plot shares.png
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_fed as nf


def model(trained, days, taken=None):
    """The share of doses ``taken`` (patient,), which is neither 0 nor 1.

    ``trained`` (patient,) is 0 or 1, ``days`` (patient,) for how long the patient was watched.
    """
    intercept = numpyro.sample("intercept", dist.Normal(0, 2))  # logit of the mean share
    of_training = numpyro.sample("of_training", dist.Normal(0, 1))
    log_precision = numpyro.sample("log_precision", dist.Normal(2, 1.5))  # at 60 days
    of_days = numpyro.sample("of_days", dist.Normal(0, 1))  # 1: as many times more as days
    tau = numpyro.sample("tau", dist.HalfNormal(0.5))
    with nf.silo_plate("hospital", 1):
        u = numpyro.sample("u", dist.Normal(0, tau))
    with nf.silo_plate("patient", days.shape[0]):
        mean = jax.nn.sigmoid(intercept + of_training * trained + u[0])
        precision = jnp.exp(log_precision + of_days * jnp.log(days / 60))
        numpyro.sample("taken", dist.BetaProportion(mean, precision), obs=taken)


INTERCEPT, OF_TRAINING, LOG_PRECISION, OF_DAYS = 0.8, 0.7, 2.2, 0.8
HOSPITALS = {"Basel": (110, 0.5), "Bern": (70, -0.5), "Chur": (20, 0.0)}  # patients, effect


def draw(rng, trained, days, u):
    """Return true shares of such patients at a hospital of effect ``u``."""
    mean = 1 / (1 + np.exp(-INTERCEPT - OF_TRAINING * trained - u))
    precision = np.exp(LOG_PRECISION) * (days / 60) ** OF_DAYS
    return rng.beta(mean * precision, (1 - mean) * precision).clip(0.001, 0.999)


def simulate(seed=0):
    """Three hospitals, whose patients were watched for a week to half a year."""
    rng = np.random.default_rng(seed)
    silos = {}
    for name, (n, u) in HOSPITALS.items():
        trained, days = rng.integers(0, 2, n), (7 * np.exp(rng.uniform(0, 3.2, n))).round()
        silos[name] = dict(trained=trained, days=days, taken=draw(rng, trained, days, u))
    return silos


def plot(fitted, silos, path):
    """Draw the shares of one hospital, with where 90 % of its new patients would be."""
    import matplotlib.pyplot as plt

    rng, (name, silo) = np.random.default_rng(1), next(iter(silos.items()))
    figure, axes = plt.subplots(1, 2, figsize=(6, 3.6), sharey=True, layout="constrained")
    days = np.linspace(7, 180, 60)
    for trained, axis in enumerate(axes):
        new = dict(trained=np.full(60, trained), days=days)
        taken = fitted.predict(jax.random.key(1), new, silo=name, n=4_000)["taken"]
        low, middle, high = np.quantile(100 * np.asarray(taken), [0.05, 0.5, 0.95], axis=0)
        axis.fill_between(days, low, high, color="C0", alpha=0.2, linewidth=0)
        axis.plot(days, middle, color="C0", label="new patients, 90 %")
        true = draw(rng, trained, days, np.full((100_000, 1), HOSPITALS[name][1]))
        bounds = 100 * np.quantile(true, [0.05, 0.5, 0.95], axis=0).T
        axis.plot(days, bounds, ":", color="0.3", label=["truth", None, None])
        own = silo["trained"] == trained
        axis.plot(silo["days"][own], 100 * silo["taken"][own], ".k", label=f"patients of {name}")
        axis.set(title=("not trained", "trained")[trained], xlabel="days watched")
    axes[0].set(ylim=(0, 100), ylabel="doses taken (%)")
    axes[1].legend(loc="lower right")
    figure.savefig(path, dpi=100)
