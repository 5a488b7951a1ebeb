"""Concentrations of a drug after a tablet, some of them too low to be measured.

How fast does a patient get rid of a drug? One compartment takes it up and loses it at rates in
proportion to what is there. Clearance and volume differ by patient and grow with weight, by the
usual powers of allometry, so that children and adults share one model. Concentrations below the
limit of quantification count by the probability to be there. Source: Beal (2001, Journal of
Pharmacokinetics and Pharmacodynamics 28), method M3.

    python examples/models/run.py pharmacokinetics --plot pharmacokinetics.png
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_fed as nf


def log_curve(hours, dose, clearance, volume, faster):
    """The log concentration in mg/l, ``hours`` after a ``dose`` in mg was swallowed.

    ``faster`` is the rate of absorption minus that of elimination, in 1/h. As it is positive, the
    two cannot change places, and the difference of two exponentials is one factor of a product.
    """
    elimination = clearance / volume
    height = dose * (elimination + faster) / (volume * faster)
    return jnp.log(height) - elimination * hours + jnp.log(-jnp.expm1(-faster * hours))


def model(dose, weight, patient, hours, below, conc=None):
    """The concentration ``conc`` (sample,) in mg/l, or its limit where ``below`` (sample,) is 1.

    ``dose`` (patient,) is in mg, ``weight`` (patient,) in kg; ``patient`` (sample,) is the number
    of the sample's patient, from 0 at each hospital.
    """
    log_clearance = numpyro.sample("log_clearance", dist.Normal(1, 1))  # l/h, at 70 kg
    log_volume = numpyro.sample("log_volume", dist.Normal(3, 1))  # l, at 70 kg
    log_faster = numpyro.sample("log_faster", dist.Normal(0, 1))  # 1/h, see log_curve
    sds = numpyro.sample("sds", dist.HalfNormal(0.5).expand([2]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(0.5))  # of the log concentration
    with nf.silo_plate("patient", dose.shape[0]):
        larger = jnp.log(weight / 70)
        mean = jnp.stack([log_clearance + 0.75 * larger, log_volume + larger], -1)
        b = numpyro.sample("b", dist.Normal(mean, sds).to_event(1))  # local: logs of each patient
    with nf.silo_plate("sample", hours.shape[0]):
        own = jnp.exp(b[patient])
        mean = log_curve(hours, dose[patient], own[:, 0], own[:, 1], jnp.exp(log_faster))
        measured = dist.LogNormal(mean, sigma)
        numpyro.sample("conc", dist.LeftCensoredDistribution(measured, below), obs=conc)


LIMIT, HOURS = 0.5, np.array([0.5, 1, 2, 4, 8, 12, 24, 36])
CLEARANCE, VOLUME, FASTER, SDS, SIGMA = 2.8, 32.0, 1.4, [0.3, 0.15], 0.2
HOSPITALS = {  # patients, mean and sd of their weight in kg, dose in mg
    "Basel": (12, 72, 14, 320.0),
    "Bern": (30, 72, 14, 320.0),
    "Chur": (20, 28, 5, 160.0),
}


def simulate(seed=0):
    """Two hospitals with adults, and one with children."""
    rng = np.random.default_rng(seed)
    silos = {}
    for name, (n, mean, sd, mg) in HOSPITALS.items():
        weight, dose = rng.normal(mean, sd, n).round(), np.full(n, mg)
        larger = weight / 70
        b = np.stack([CLEARANCE * larger**0.75, VOLUME * larger], -1)
        b *= np.exp(rng.normal(0, SDS, (n, 2)))
        patient, hours = np.repeat(np.arange(n), len(HOURS)), np.tile(HOURS, n)
        mean = log_curve(hours, dose[patient], *b[patient].T, FASTER)
        conc = np.exp(rng.normal(mean, SIGMA))
        below = (conc < LIMIT).astype(int)
        silos[name] = dict(dose=dose, weight=weight, patient=patient, hours=hours, below=below)
        silos[name]["conc"] = np.where(below, LIMIT, conc.round(2))
    return silos


def plot(fitted, silos, path):
    """Draw the curve of a typical patient of 70 kg and of one of 28 kg, and what was measured."""
    import matplotlib.pyplot as plt

    hours = np.linspace(0.2, 40, 200)
    draws = fitted.sample_posterior(jax.random.key(1), 4_000)
    names = ("log_clearance", "log_volume", "log_faster")
    logs = [np.asarray(draws[name])[:, None] for name in names]
    figure, axes = plt.subplots(1, 2, figsize=(7, 3.6), sharey=True, layout="constrained")
    for axis, at, kg, mg in zip(axes, ("Bern", "Chur"), (70, 28), (320, 160), strict=True):
        powers = np.array([kg / 70]) ** [0.75, 1, 0]
        numbers = (np.exp(x) * p for x, p in zip(logs, powers, strict=True))
        curves = np.exp(log_curve(hours, mg, *numbers))
        low, middle, high = np.quantile(curves, [0.05, 0.5, 0.95], axis=0)
        axis.fill_between(hours, low, high, color="C0", alpha=0.3, linewidth=0)
        axis.plot(hours, middle, color="C0", label="a typical patient, 90 %")
        truth = log_curve(hours, mg, *(np.array([CLEARANCE, VOLUME, FASTER]) * powers))
        axis.plot(hours, np.exp(truth), ":", color="0.2", label="truth")
        seen = silos[at]["below"] == 0
        axis.plot(
            silos[at]["hours"][seen], silos[at]["conc"][seen], ".", color="0.6", label="measured"
        )
        for h in np.unique(silos[at]["hours"][~seen]):
            number = np.sum(~seen & (silos[at]["hours"] == h))
            axis.text(h, 0.09, f"{number} below", ha="center", fontsize="small")
        axis.axhline(LIMIT, color="C3", linestyle="--", linewidth=1, label="limit")
        axis.set(title=f"{at}, {mg} mg; curve: {kg} kg", xlabel="hours after the dose")
        axis.set(yscale="log", xlim=(0, 42), ylim=(0.07, 50))
    axes[0].set_yticks([0.5, 1, 5, 10, 50], labels=["0.5", "1", "5", "10", "50"])
    axes[0].set_ylabel("concentration (mg/l)")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=100)
