"""The risk of a stroke given the true blood pressure, of which only a noisy measurement is known.

How steeply does the risk rise with a patient's usual pressure? A single measurement is off by some
10 mmHg, and a regression on it finds a slope that is too flat (regression dilution). The text has
the usual pressure as a latent of each patient, and the sd of the error is known: it is less for a
device that is worn for a day than for a cuff. Carroll et al. (2006), Measurement Error in
Nonlinear Models.

    python examples/models/run.py measurement_error --plot measurement_error.png
"""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_fed as nf


def model(measured, error, stroke=None):
    """A stroke within ten years (patient,), given the pressure ``measured`` (patient,) in mmHg.

    ``error`` (patient,) is the sd of the measurement's error in mmHg.
    """
    mean = numpyro.sample("mean", dist.Normal(130, 30))
    spread = numpyro.sample("spread", dist.HalfNormal(30))
    intercept = numpyro.sample("intercept", dist.Normal(-2, 2))  # at 140 mmHg
    slope = numpyro.sample("slope", dist.Normal(0, 1))  # of 10 mmHg
    with nf.silo_plate("patient", measured.shape[0]):
        pressure = numpyro.sample("pressure", dist.Normal(mean, spread))  # the usual one
        numpyro.sample("measured", dist.Normal(pressure, error), obs=measured)
        logit = intercept + slope * (pressure - 140) / 10
        numpyro.sample("stroke", dist.Bernoulli(logits=logit), obs=stroke)


SIZES = {"Basel": 200, "Bern": 120, "Chur": 60}
ERRORS = {"Basel": 14.0, "Bern": 10.0, "Chur": 5.0}  # of the device of each hospital
MEAN, SPREAD, INTERCEPT, SLOPE = 138.0, 14.0, -1.2, 0.9


def simulate(seed=0):
    """What each hospital holds: 60 to 200 patients, each measured once."""
    rng = np.random.default_rng(seed)
    silos = {}
    for name, n in SIZES.items():
        pressure = rng.normal(MEAN, SPREAD, n)
        measured = pressure + ERRORS[name] * rng.normal(size=n)
        logit = INTERCEPT + SLOPE * (pressure - 140) / 10
        stroke = (rng.uniform(size=n) < 1 / (1 + np.exp(-logit))).astype(float)
        silos[name] = dict(measured=measured, error=np.full(n, ERRORS[name]), stroke=stroke)
    return silos


def plot(fitted, silos, path):
    """Draw the risk by the usual pressure, and by what is measured if its error is ignored."""
    import matplotlib.pyplot as plt

    at = np.linspace(105, 175, 60)

    def curves(fit):
        draws = fit.sample_posterior(jax.random.key(1), 2_000)
        logit = draws["intercept"][:, None] + draws["slope"][:, None] * (at - 140) / 10
        return 100 / (1 + np.exp(-logit))

    precise = {name: silo | {"error": 0 * silo["error"] + 0.1} for name, silo in silos.items()}
    ignored = nf.fit(jax.random.key(0), model, precise, progress_bar=False)
    figure, axis = plt.subplots(figsize=(6, 3.6), dpi=100, layout="constrained")
    risk = curves(fitted)
    low, high = np.quantile(risk, [0.05, 0.95], axis=0)
    axis.fill_between(at, low, high, color="C0", alpha=0.25, linewidth=0)
    axis.plot(at, risk.mean(0), color="C0", label="error in the text, 90 % band")
    axis.plot(at, curves(ignored).mean(0), color="C1", linestyle="--", label="error ignored")
    true = 100 / (1 + np.exp(-INTERCEPT - SLOPE * (at - 140) / 10))
    axis.plot(at, true, color="0.4", linestyle=":", label="truth")
    axis.set(xlabel="usual systolic pressure (mmHg)", ylabel="stroke within ten years (%)")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.savefig(path)
