"""Admissions by week of the winter: a smooth function of time that all hospitals share.

When is the peak of the season, if each hospital has a level of its own and some have seen but a
part of the winter? The function is a Gaussian process, written as a sum of ten sines on a Hilbert
space: its coefficients are ten global latents, and no covariance matrix ties rows together. See
Riutort-Mayol et al. (2023, Statistics and Computing 33).

    python examples/models/run.py hsgp_time --plot hsgp_time.png
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_fed as nf

BASIS, EDGE = 10, 1.5  # how many sines, and where they are zero: at 1.5 times the range of time


def model(week, admitted=None):
    """Patients ``admitted`` (row,) in a ``week`` (row,), 1 to 30, from October on."""
    sd = numpyro.sample("sd", dist.HalfNormal(1))  # of the function, on the log scale
    length = numpyro.sample("length", dist.LogNormal(jnp.log(8), 0.5))  # of the kernel, in weeks
    with numpyro.plate("sine", BASIS):
        z = numpyro.sample("z", dist.Normal(0, 1))
    # The unit of time is 15 weeks, so that the winter is -1 to 1.
    time, scale = (week[:, None] - 15.5) / 15, length / 15
    frequency = jnp.arange(1, BASIS + 1) * jnp.pi / (2 * EDGE)
    density = scale * jnp.sqrt(2 * jnp.pi) * jnp.exp(-0.5 * (scale * frequency) ** 2)
    sines = jnp.sin(frequency * (time + EDGE)) / jnp.sqrt(EDGE)
    f = sines @ (sd * jnp.sqrt(density) * z)
    with nf.silo_plate("hospital", 1):
        level = numpyro.sample("level", dist.Normal(3, 2))  # local: log of admissions a week
    with nf.silo_plate("row", week.shape[0]):
        numpyro.sample("admitted", dist.Poisson(jnp.exp(level[0] + f)), obs=admitted)


WEEKS = {"Basel": (1, 30), "Bern": (1, 22), "Chur": (8, 30)}  # the first and the last one
LEVEL = {"Basel": 3.2, "Bern": 2.6, "Chur": 1.4}


def rate(name, week):
    """The true expected number of admissions."""
    wave = 1.4 * np.exp(-0.5 * ((week - 17) / 4) ** 2) + 0.4 * np.exp(-0.5 * ((week - 5) / 3) ** 2)
    return np.exp(LEVEL[name] + wave)


def simulate(seed=0):
    """What each hospital holds: weeks, and how many patients were admitted."""
    rng = np.random.default_rng(seed)
    silos = {}
    for name, (first, last) in WEEKS.items():
        week = np.arange(first, last + 1.0)
        silos[name] = dict(week=week, admitted=rng.poisson(rate(name, week)))
    return silos


def plot(fitted, silos, path):
    """Draw each hospital's expected admissions over the whole winter."""
    import matplotlib.pyplot as plt

    week = np.arange(1, 31.0)
    figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for name, silo in silos.items():
        means = fitted.predict(jax.random.key(1), dict(week=week), silo=name, mean=True)
        low, middle, high = np.quantile(means["admitted"], [0.05, 0.5, 0.95], axis=0)
        axis.fill_between(week, low, high, color="C0", alpha=0.3, linewidth=0)
        axis.plot(week, middle, color="C0", linewidth=1)
        axis.plot(week, rate(name, week), "--", color="0.3", linewidth=0.8)
        seen = silo["week"], np.where(silo["admitted"] > 0, silo["admitted"], np.nan)
        axis.plot(*seen, ".", color="0.5")
        axis.text(30.5, middle[-1], name, va="center")
    axis.plot([], ".", color="0.5", label="admissions")
    axis.plot([], color="C0", linewidth=1, label="posterior, 90 %")
    axis.plot([], "--", color="0.3", linewidth=0.8, label="truth")
    axis.set(yscale="log", xlabel="week from October on", ylabel="admissions a week", xlim=(0, 34))
    axis.minorticks_off()
    axis.set_yticks([2, 5, 10, 20, 50, 100], [2, 5, 10, 20, 50, 100])
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(path, dpi=100)
