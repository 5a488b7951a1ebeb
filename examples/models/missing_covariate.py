"""The risk to die by age and treatment, where the age of many patients is not known.

Does a treatment lower the risk, given age? Old patients are treated more often, so age has to be in
the model, but it is missing at some rows and in all of Chur. The text gives age a distribution and
reads what ``numpyro.sample`` returns: the age as seen, or a latent of the patient. Little and Rubin
(2019), Statistical Analysis with Missing Data.

    python examples/models/run.py missing_covariate --plot missing_covariate.png
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_fed as nf


def model(age, treated, died=None):
    """Deaths (patient,), given ``age`` (patient,) in years or NaN, and ``treated`` (patient,)."""
    mean = numpyro.sample("mean", dist.Normal(60, 20).expand([2]).to_event(1))
    sd = numpyro.sample("sd", dist.HalfNormal(20))
    intercept = numpyro.sample("intercept", dist.Normal(-1, 2))  # at 60 years, not treated
    slope = numpyro.sample("slope", dist.Normal(0, 1))  # of ten years
    effect = numpyro.sample("effect", dist.Normal(0, 1))  # of the treatment
    with nf.silo_plate("patient", treated.shape[0]):
        # Age has another mean where patients are treated: the treatment tells of a missing age.
        prior = dist.Normal(mean[treated], sd)
        age = numpyro.sample("age", prior, obs=age, obs_mask=~jnp.isnan(age))
        logit = intercept + slope * (age - 60) / 10 + effect * treated
        numpyro.sample("died", dist.Bernoulli(logits=logit), obs=died)


SIZES = {"Basel": 200, "Bern": 120, "Chur": 80}
MISSING = {"Basel": 0.1, "Bern": 0.25, "Chur": 1.0}  # shares of patients without an age
MEAN, SD, INTERCEPT, SLOPE, EFFECT = (55.0, 67.0), 11.0, -0.8, 0.8, -1.0


def simulate(seed=0):
    """What each hospital holds: 80 to 200 patients; Chur has no ages at all."""
    rng, silos = np.random.default_rng(seed), {}
    for name, n in SIZES.items():
        treated = rng.integers(0, 2, n)
        age = rng.normal(np.array(MEAN)[treated], SD)
        logit = INTERCEPT + SLOPE * (age - 60) / 10 + EFFECT * treated
        died = (rng.uniform(size=n) < 1 / (1 + np.exp(-logit))).astype(float)
        unknown = rng.uniform(size=n) < MISSING[name]
        silos[name] = dict(age=np.where(unknown, np.nan, age), treated=treated, died=died)
    return silos


def plot(fitted, silos, path):
    """Draw the risk by age and treatment, and what is inferred of the ages in Chur."""
    import matplotlib.pyplot as plt

    draws = fitted.sample_posterior(jax.random.key(1), 2_000, silo="Chur")
    at, chur, names = np.linspace(30, 95, 60), silos["Chur"], ("not treated", "treated")
    figure = plt.figure(figsize=(6, 3.6), dpi=100, layout="constrained")
    risks, ages = figure.subplots(1, 2, width_ratios=[3, 2])
    for treated, color in ((0, "C1"), (1, "C0")):
        shift = draws["intercept"] + draws["effect"] * treated
        logit = shift[:, None] + draws["slope"][:, None] * (at - 60) / 10
        risk = 100 / (1 + np.exp(-logit))
        low, high = np.quantile(risk, [0.05, 0.95], axis=0)
        risks.fill_between(at, low, high, color=color, alpha=0.25, linewidth=0)
        risks.plot(at, risk.mean(0), color=color, label=names[treated])
        true = INTERCEPT + EFFECT * treated + SLOPE * (at - 60) / 10
        risks.plot(at, 100 / (1 + np.exp(-true)), "0.4", linestyle=":")
        for died in (0, 1):
            chosen = (chur["treated"] == treated) & (chur["died"] == died)
            found, place = np.asarray(draws["age"])[:, chosen], 2 * treated + died
            ages.vlines(place, *np.quantile(found, [0.05, 0.95]), color=color)
            ages.plot(place, found.mean(), "o", color=color)
    risks.plot([], [], "0.4", linestyle=":", label="truth")
    risks.set(xlabel="age (years)", ylabel="died (%), 90 % bands")
    risks.legend(frameon=False)
    ages.set(xlabel="patients in Chur", ylabel="inferred age (years), 90 %", xlim=(-0.5, 3.5))
    ages.set_xticks(range(4), ["alive", "dead"] * 2)
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
