"""Flexible parametric survival: the log cumulative hazard is a natural cubic spline of log time.

What is the survival over years, if the hazard is smooth, but of no simple shape? Hospitals agree on
the knots of the spline. Its parameters are the slopes between knots, which are positive, as a
cumulative hazard rises; if all are the same it is a Weibull model.
Source: Royston and Parmar (2002), Statistics in Medicine 21.

    python examples/models/run.py survival_splines --plot survival_splines.png
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_fed as nf

KNOTS = np.log([0.1, 0.5, 1.5, 4, 10])  # of log time in years, agreed beforehand


def columns(x):
    """What multiplies a natural cubic spline's values at the knots, at log times ``x`` (row,)."""

    def powers(x):
        cubes = jnp.maximum(x[:, None] - KNOTS, 0) ** 3
        share = (KNOTS[-1] - KNOTS[1:-1]) / (KNOTS[-1] - KNOTS[0])
        bent = cubes[:, 1:-1] - share * cubes[:, :1] - (1 - share) * cubes[:, -1:]
        return jnp.column_stack([jnp.ones_like(x), x, bent])

    return powers(x) @ jnp.linalg.inv(powers(jnp.asarray(KNOTS)))


def model(age, treated, died, years):
    """Patients followed for ``years``, who then ``died`` (1) or not (0); all are (patient,).

    ``age`` is in years, ``treated`` is 0 or 1.
    """
    level = numpyro.sample("level", dist.Normal(-3, 2))  # log cumulative hazard at the first knot
    slopes = numpyro.sample("slopes", dist.LogNormal(0, 0.7).expand([4]).to_event(1))
    rises = jnp.concatenate([jnp.zeros(1), jnp.cumsum(slopes * np.diff(KNOTS))])
    at_knots = numpyro.deterministic("at_knots", level + rises)
    of_age = numpyro.sample("of_age", dist.Normal(0, 1))  # log hazard ratio of ten years
    of_treatment = numpyro.sample("of_treatment", dist.Normal(0, 1))
    tau = numpyro.sample("tau", dist.HalfNormal(0.5))
    with nf.silo_plate("hospital", 1):
        u = numpyro.sample("u", dist.Normal(0, tau))
    with nf.silo_plate("patient", age.shape[0]):
        log_years = jnp.log(years)
        at, slope_at = jax.jvp(columns, [log_years], [jnp.ones_like(years)])
        log_cumulative = at @ at_knots + u[0] + of_age * (age - 60) / 10 + of_treatment * treated
        slope = jnp.maximum(slope_at @ at_knots, 1e-3)  # a spline may fall between rising knots
        log_hazard = log_cumulative + jnp.log(slope) - log_years
        numpyro.factor("death", died * log_hazard - jnp.exp(log_cumulative))


# The true cumulative hazard: many die in the first weeks, few later, and more again with the years.
YEARS = np.linspace(0, 30, 3_001)
CUMULATIVE = 0.35 * (1 - np.exp(-YEARS / 0.3)) + 0.012 * YEARS**2
OF_AGE, OF_TREATMENT = 0.3, -0.8
HOSPITALS = {"Basel": (150, 0.5), "Bern": (90, -0.6), "Chur": (25, 0.1)}  # patients, effect


def simulate(seed=0):
    """Three hospitals; patients are followed for one to ten years."""
    rng = np.random.default_rng(seed)
    silos = {}
    for name, (n, u) in HOSPITALS.items():
        age, treated = rng.normal(62, 9, n).round(), rng.integers(0, 2, n)
        ratio = np.exp(OF_AGE * (age - 60) / 10 + OF_TREATMENT * treated + u)
        death = np.interp(rng.exponential(size=n) / ratio, CUMULATIVE, YEARS)
        end = rng.uniform(1, 10, n)
        died = (death < end).astype(int)
        silos[name] = dict(age=age, treated=treated, died=died, years=np.minimum(death, end))
    return silos


def plot(fitted, silos, path):
    """Draw the survival of a patient of 60 at a hospital in the middle."""
    import matplotlib.pyplot as plt

    draws = fitted.sample_posterior(jax.random.key(1), 4_000)
    years = np.linspace(0.02, 10, 200)
    curves = draws["at_knots"] @ np.asarray(columns(jnp.log(years))).T
    figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for treated, line, label in ((0, "-", "not treated"), (1, "--", "treated")):
        survival = np.exp(-np.exp(curves + draws["of_treatment"][:, None] * treated))
        low, middle, high = np.quantile(survival, [0.05, 0.5, 0.95], axis=0)
        axis.fill_between(years, low, high, color="C0", alpha=0.2, linewidth=0)
        axis.plot(years, middle, line, color="C0", label=f"{label}, 90 % band")
        true = np.exp(-CUMULATIVE * np.exp(OF_TREATMENT * treated))
        axis.plot(YEARS, true, ":", color="0.3", label="truth" * treated)
    axis.set(xlabel="years since operation", xlim=(0, 10), ylim=(0, 1))
    axis.set_ylabel("probability to be alive, age 60")
    axis.legend(frameon=False)
    figure.savefig(path, dpi=100)
