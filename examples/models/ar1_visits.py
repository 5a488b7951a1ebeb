"""Blood pressure at weekly visits whose errors are correlated in time: autoregression, AR(1).

Does a treatment lower the pressure, if a patient who is high in one week is also high in the next?
A row is a patient. The errors of the visits are one multivariate normal, stationary from the first
visit on, and a patient's own level stays beside them: it is why visits far apart are correlated,
too. The model is that of Diggle (1988, Biometrics 44); in nlme it is ``lme`` with ``corAR1``.

    python examples/models/run.py ar1_visits --plot ar1_visits.png
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_fed as nf

VISITS = 8


def model(treated, pressure=None):
    """Systolic ``pressure`` (patient, visit) in mmHg; ``treated`` (patient,) is 0 or 1."""
    mu = numpyro.sample("mu", dist.Normal(140, 20))
    effect = numpyro.sample("effect", dist.Normal(0, 20))
    sd_patient = numpyro.sample("sd_patient", dist.HalfNormal(20))
    sd_error = numpyro.sample("sd_error", dist.HalfNormal(20))
    rho = numpyro.sample("rho", dist.Uniform(-1, 1))  # from one week to the next
    # Error k is a sum of innovations: rho^(k - j) of the j-th, all but the first of which are
    # smaller by sqrt(1 - rho^2), so that every visit has the same sd.
    visit = jnp.arange(VISITS)
    lag = visit[:, None] - visit
    shrunk = jnp.where(visit == 0, 1, jnp.sqrt(1 - rho**2))
    root = sd_error * shrunk * jnp.where(lag >= 0, rho ** jnp.abs(lag), 0)
    with nf.silo_plate("patient", treated.shape[0]):
        level = numpyro.sample("level", dist.Normal(mu + effect * treated, sd_patient))  # local
        visits = dist.MultivariateNormal(level[:, None] + jnp.zeros(VISITS), scale_tril=root)
        numpyro.sample("pressure", visits, obs=pressure)


PATIENTS = {"Basel": 60, "Bern": 35, "Chur": 20}
MU, EFFECT, SD_PATIENT, SD_ERROR, RHO = 145.0, -8.0, 9.0, 8.0, 0.6


def simulate(seed=0):
    """What each hospital holds: treatment, and eight weekly measurements of each patient."""
    rng = np.random.default_rng(seed)
    silos = {}
    for name, n in PATIENTS.items():
        treated = rng.integers(0, 2, n).astype(float)
        error = rng.normal(0, SD_ERROR, (n, VISITS))
        for k in range(1, VISITS):
            error[:, k] = RHO * error[:, k - 1] + np.sqrt(1 - RHO**2) * error[:, k]
        level = MU + EFFECT * treated + rng.normal(0, SD_PATIENT, n)
        silos[name] = dict(treated=treated, pressure=(level[:, None] + error).round())
    return silos


def plot(fitted, silos, path):
    """Draw the correlation of two visits of a patient by the weeks between them."""
    import matplotlib.pyplot as plt

    lags = np.arange(1, VISITS)
    draws = fitted.sample_posterior(jax.random.key(1), 4_000)

    def correlation(sd_patient, sd_error, rho):
        between, within = sd_patient**2, sd_error**2
        return (between + within * rho**lags) / (between + within)

    curves = correlation(*(draws[k][:, None] for k in ("sd_patient", "sd_error", "rho")))
    low, middle, high = np.quantile(curves, [0.05, 0.5, 0.95], axis=0)
    figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    axis.fill_between(lags, low, high, color="C0", alpha=0.3, linewidth=0)
    axis.plot(lags, middle, color="C0", label="posterior, 90 %")
    axis.plot(lags, correlation(SD_PATIENT, SD_ERROR, RHO), ":", color="0.3", label="truth")
    for (name, silo), marker in zip(silos.items(), "os^", strict=True):
        means = [silo["pressure"][silo["treated"] == k].mean() for k in (0, 1)]
        rest = silo["pressure"] - np.take(means, silo["treated"].astype(int))[:, None]
        seen = [np.mean(rest[:, k:] * rest[:, :-k]) / np.mean(rest**2) for k in lags]
        axis.plot(lags, seen, marker, color="0.6", markersize=4, label=f"visits at {name}")
    axis.set(xlabel="weeks between two visits", ylabel="correlation", ylim=(0, 1))
    axis.legend(frameon=False, loc="lower left", ncols=2)
    figure.savefig(path, dpi=100)
