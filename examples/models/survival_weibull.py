"""Weibull survival, where some patients are still alive and some came into the registry late.

How much does a treatment lower the hazard of death, where hospitals have a frailty of their own?
A patient is at risk from the entry into the registry (left truncation) to death or the last visit.
Source: Klein and Moeschberger (2003), Survival Analysis, chapters 3, 12 and 13.

    python examples/models/run.py survival_weibull --plot survival_weibull.png
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_fed as nf


def model(age, treated, entry, died, time):
    """Patients at risk from ``entry`` to ``time``, in years since diagnosis; all are (patient,).

    ``died`` is 1 for those who died at ``time``; ``age`` is in years, ``treated`` is 0 or 1.
    """
    log_scale = numpyro.sample("log_scale", dist.Normal(2, 1.5))  # of years: age 60, not treated
    shape = numpyro.sample("shape", dist.LogNormal(0, 0.5))
    of_age = numpyro.sample("of_age", dist.Normal(0, 1))  # log hazard ratio of ten years
    of_treatment = numpyro.sample("of_treatment", dist.Normal(0, 1))
    tau = numpyro.sample("tau", dist.HalfNormal(0.5))
    with nf.silo_plate("hospital", 1):
        frailty = numpyro.sample("frailty", dist.Normal(0, tau))
    with nf.silo_plate("patient", age.shape[0]):
        log_ratio = of_age * (age - 60) / 10 + of_treatment * treated + frailty[0]
        scale = jnp.exp(log_scale - log_ratio / shape)
        late = entry > 0  # a power of 0 has no second derivative
        before = jnp.where(late, (jnp.where(late, entry, 1) / scale) ** shape, 0)
        log_hazard = jnp.log(shape / time) + shape * jnp.log(time / scale)
        numpyro.factor("death", died * log_hazard - (time / scale) ** shape + before)


LOG_SCALE, SHAPE, OF_AGE, OF_TREATMENT = 2.0, 1.5, 0.4, -0.7
HOSPITALS = {"Basel": (140, 0.5), "Bern": (80, -0.6), "Chur": (25, 0.1)}  # patients, frailty


def simulate(seed=0):
    """Three hospitals; who dies before the entry is in no registry."""
    rng = np.random.default_rng(seed)
    silos = {}
    for name, (n, frailty) in HOSPITALS.items():
        size = 6 * n  # of whom many die early
        age, treated = rng.normal(62, 9, size).round(), rng.integers(0, 2, size)
        log_ratio = OF_AGE * (age - 60) / 10 + OF_TREATMENT * treated + frailty
        death = np.exp(LOG_SCALE - log_ratio / SHAPE) * rng.weibull(SHAPE, size)
        entry = rng.integers(0, 2, size) * rng.uniform(0, 5, size)
        end = entry + rng.uniform(1, 6, size)
        died, time = (death <= end).astype(int), np.minimum(death, end)
        columns = dict(age=age, treated=treated, entry=entry, died=died, time=time)
        silos[name] = {key: values[death > entry][:n] for key, values in columns.items()}
    return silos


def plot(fitted, silos, path):
    """Draw the survival of a patient of 60 at each hospital, without and with the treatment."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(6, 3.6), sharey=True, layout="constrained")
    years = np.linspace(0, 10, 60)
    for axis, name in zip(axes, silos, strict=True):
        draws = fitted.sample_posterior(jax.random.key(1), 2_000, silo=name)
        of_years = (years / np.exp(draws["log_scale"])[:, None]) ** draws["shape"][:, None]
        for treated, line, label in ((0, "-", "not treated, 90 %"), (1, "--", "treated")):
            ratio = np.exp(draws["of_treatment"][:, None] * treated + draws["frailty"])
            low, middle, high = np.quantile(np.exp(-ratio * of_years), [0.05, 0.5, 0.95], axis=0)
            axis.plot(years, middle, line, color="C0", label=label)
            if not treated:
                axis.fill_between(years, low, high, color="C0", alpha=0.2, linewidth=0)
            true = np.exp(OF_TREATMENT * treated + HOSPITALS[name][1] - LOG_SCALE * SHAPE)
            true = np.exp(-true * years**SHAPE)
            axis.plot(years, true, ":", color="0.3", label="truth" * treated)
        axis.set_title(f"{name}, {len(silos[name]['age'])} patients", fontsize="medium")
    figure.supxlabel("years since diagnosis", fontsize="medium")
    axes[0].set(ylim=(0, 1), ylabel="probability to be alive")
    axes[2].legend(frameon=False, loc="lower left", fontsize="small")
    figure.savefig(path, dpi=100)
