"""Cox regression, stratified by hospital: each one has a baseline hazard of its own, by months.

What is the hazard ratio of a treatment, if the baseline hazard may have any shape? All hospitals
agree on a grid of months, in each of which a patient's death counts as Poisson. The baseline is a
random walk, which stays at the hospital. If it were free in a fine grid, its maximum would leave
Cox's partial likelihood.
Source: Whitehead (1980), Applied Statistics 29; Fahrmeir and Lang (2001), Applied Statistics 50.

    python examples/models/run.py cox --plot cox.png
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_fed as nf

MONTHS = 18  # of follow-up, which all hospitals agree on


def model(age, treated, at_risk, died=None):
    """Deaths ``died`` (patient, month) 0 or 1, given the share of each month at risk.

    ``age`` (patient,) in years, ``treated`` (patient,) 0 or 1, ``at_risk`` (patient, month) from 0
    to 1, the part of the month in which the patient was alive and seen.
    """
    of_age = numpyro.sample("of_age", dist.Normal(0, 1))  # log hazard ratio of ten years
    of_treatment = numpyro.sample("of_treatment", dist.Normal(0, 1))
    step = numpyro.sample("step", dist.HalfNormal(0.5))  # of log hazards, from month to month
    with nf.silo_plate("hospital", 1):
        first = numpyro.sample("first", dist.Normal(-4, 2))  # log hazard of the first month
        steps = numpyro.sample("steps", dist.Normal(0, step).expand([MONTHS - 1]).to_event(1))
    baseline = first[0] + jnp.concatenate([jnp.zeros(1), jnp.cumsum(steps[0])])
    with nf.silo_plate("patient", age.shape[0], dim=-2), numpyro.plate("month", MONTHS, dim=-1):
        log_ratio = of_age * (age - 60) / 10 + of_treatment * treated
        rate = at_risk * jnp.exp(baseline + log_ratio[:, None])
        with numpyro.handlers.mask(mask=at_risk > 0):
            numpyro.sample("died", dist.Poisson(rate), obs=died)


OF_AGE, OF_TREATMENT = 0.4, -0.7
# Patients, the true hazard of the first month, and its relative growth a month.
HOSPITALS = {"Basel": (120, 0.05, 0), "Bern": (80, 0.02, 0.12), "Chur": (25, 0.07, -0.05)}


def simulate(seed=0):
    """Three hospitals whose baseline hazards have other shapes."""
    rng = np.random.default_rng(seed)
    silos, month = {}, np.arange(MONTHS)
    for name, (n, start, growth) in HOSPITALS.items():
        age, treated = rng.normal(62, 9, n).round(), rng.integers(0, 2, n)
        ratio = np.exp(OF_AGE * (age - 60) / 10 + OF_TREATMENT * treated)
        hazard = start * np.exp(growth * (month + 0.5)) * ratio[:, None]
        # The part of a month that a patient lives through, and whether she has come to it.
        part = np.minimum(rng.exponential(size=hazard.shape) / hazard, 1)
        comes = np.cumprod(np.column_stack([np.ones(n), part[:, :-1] == 1]), 1)
        death, end = (part * comes).sum(1), np.minimum(rng.uniform(6, 27, n), MONTHS)
        time = np.minimum(death, end)
        at_risk = np.clip(time[:, None] - month, 0, 1)
        died = (death < end)[:, None] & (month == np.floor(time)[:, None])
        silos[name] = dict(age=age, treated=treated, at_risk=at_risk, died=died.astype(int))
    return silos


def plot(fitted, silos, path):
    """Draw the baseline hazard of each hospital, with its 90 % band."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(6, 3.6), sharey=True, layout="constrained")
    edges = np.arange(MONTHS + 1)
    for axis, (name, silo) in zip(axes, silos.items(), strict=True):
        draws = fitted.sample_posterior(jax.random.key(1), 2_000, silo=name)
        log_hazard = np.concatenate([draws["first"], draws["steps"][:, 0]], 1).cumsum(1)
        bounds = np.quantile(100 * np.exp(log_hazard), [0.05, 0.5, 0.95], axis=0)
        axis.stairs(bounds[2], edges, baseline=bounds[0], fill=True, color="C0", alpha=0.2)
        axis.stairs(bounds[1], edges, baseline=None, color="C0", label="posterior, 90 %")
        _, start, growth = HOSPITALS[name]
        axis.plot(edges, 100 * start * np.exp(growth * edges), ":", color="0.3", label="truth")
        axis.set_title(f"{name}, {silo['died'].sum()} deaths", fontsize="medium")
        axis.set(xticks=[0, 6, 12, 18], ylim=(0, 30))
    axes[2].legend(frameon=False, fontsize="small")
    axes[0].set(ylabel="deaths per 100 patients and month")
    figure.supxlabel("months since discharge", fontsize="medium")
    figure.savefig(path, dpi=100)
