"""Growth curves: repeated measurements of patients, each with a level and a slope of their own.

Does a treatment slow the decline of the kidney? Patients come at times of their own, and as often
as they can. The rows are visits in long form, and each looks its patient up by an index. Level and
slope of a patient are correlated. The model is the random effects model of Laird and Ware (1982,
Biometrics 38), in lme4 ``egfr ~ years * treated + (years | patient)``.

    python examples/models/run.py growth_curves --plot growth_curves.png
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_fed as nf


def model(treated, patient, years, egfr=None):
    """Filtration rate ``egfr`` (visit,) in ml/min, at ``years`` (visit,) since the first visit.

    ``treated`` (patient,) is 0 or 1; ``patient`` (visit,) is the number of the visit's patient,
    from 0 at each hospital.
    """
    level = numpyro.sample("level", dist.Normal(60, 30))  # ml/min at the start
    slope = numpyro.sample("slope", dist.Normal(0, 5))  # ml/min a year without treatment
    effect = numpyro.sample("effect", dist.Normal(0, 5))  # of treatment on the slope
    sds = numpyro.sample("sds", dist.HalfNormal(jnp.array([20.0, 5.0])).to_event(1))
    root = numpyro.sample("root", dist.LKJCholesky(2, 2.0))  # root[1, 0] is the correlation
    sigma = numpyro.sample("sigma", dist.HalfNormal(10))  # ml/min, of a visit
    with nf.silo_plate("patient", treated.shape[0]):
        mean = jnp.stack([level + 0 * treated, slope + effect * treated], -1)
        curve = dist.MultivariateNormal(mean, scale_tril=sds[:, None] * root)
        b = numpyro.sample("b", curve)  # local: the level and the slope of each patient
    with nf.silo_plate("visit", years.shape[0]):
        numpyro.sample("egfr", dist.Normal(b[patient, 0] + b[patient, 1] * years, sigma), obs=egfr)


PATIENTS = {"Basel": 22, "Bern": 34, "Chur": 10}
LEVEL, SLOPE, EFFECT = 65.0, -4.0, 2.0
COVARIANCE, SIGMA = np.array([[144, 5.4], [5.4, 2.25]]), 4.0  # sds 12 and 1.5, correlation 0.3


def simulate(seed=0):
    """What each hospital holds: its patients' treatment, and all their visits in long form."""
    rng = np.random.default_rng(seed)
    silos = {}
    for name, n in PATIENTS.items():
        treated = rng.integers(0, 2, n).astype(float)
        b = rng.multivariate_normal([LEVEL, SLOPE], COVARIANCE, n)
        b[:, 1] += EFFECT * treated
        patient = np.repeat(np.arange(n), rng.integers(2, 7, n))  # two to six visits
        years = rng.uniform(0, 5, len(patient)).round(2)
        egfr = b[patient, 0] + b[patient, 1] * years + rng.normal(0, SIGMA, len(patient))
        silos[name] = dict(treated=treated, patient=patient, years=years, egfr=egfr.round(1))
    return silos


def plot(fitted, silos, path):
    """Draw the mean curve with and without treatment, over the curves of Bern's patients."""
    import matplotlib.pyplot as plt

    years, bern = np.linspace(0, 5, 30), silos["Bern"]
    draws = fitted.sample_posterior(jax.random.key(1), 2_000)
    figure, axes = plt.subplots(1, 2, figsize=(6, 3.6), sharey=True, layout="constrained")
    for treated, axis in enumerate(axes):
        axis.plot([], color="0.8", label="patients of Bern")
        for i in np.flatnonzero(bern["treated"] == treated):
            own = np.flatnonzero(bern["patient"] == i)
            own = own[np.argsort(bern["years"][own])]
            axis.plot(bern["years"][own], bern["egfr"][own], color="0.8", linewidth=0.8)
        slope = draws["slope"] + draws["effect"] * treated
        curves = draws["level"][:, None] + slope[:, None] * years
        low, middle, high = np.quantile(curves, [0.05, 0.5, 0.95], axis=0)
        axis.fill_between(years, low, high, color="C0", alpha=0.3, linewidth=0)
        axis.plot(years, middle, color="C0", label="mean curve, 90 %")
        true = LEVEL + (SLOPE + EFFECT * treated) * years
        axis.plot(years, true, ":", color="0.3", label="true mean curve")
        axis.set(title=("not treated", "treated")[treated], xlabel="years since the first visit")
    axes[0].set_ylabel("eGFR (ml/min)")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=100)
