"""The fall of blood pressure by the dose of a drug: an Emax model over trials of several hospitals.

Which dose has half of the largest effect? No hospital has given all doses: the small ones come from
one and the large ones from another, with different falls under placebo. The text has one curve, and
a baseline of each hospital.
Source: Macdougall (2006), in Ting (ed.), Dose Finding in Drug Development.

    python examples/models/run.py dose_response --plot dose_response.png
"""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_fed as nf


def model(dose, fall=None):
    """The ``fall`` of systolic blood pressure (patient,) in mmHg after a ``dose`` (patient,) in mg.

    A dose of 0 is placebo.
    """
    placebo = numpyro.sample("placebo", dist.Normal(0, 10))  # mmHg, at a hospital in the middle
    largest = numpyro.sample("largest", dist.HalfNormal(30))  # mmHg more, by the largest effect
    half_dose = numpyro.sample("half_dose", dist.LogNormal(np.log(50), 1))  # mg, of half of that
    sigma = numpyro.sample("sigma", dist.HalfNormal(15))
    tau = numpyro.sample("tau", dist.HalfNormal(5))
    with nf.silo_plate("hospital", 1):
        u = numpyro.sample("u", dist.Normal(0, tau))
    with nf.silo_plate("patient", dose.shape[0]):
        effect = largest * dose / (half_dose + dose)
        numpyro.sample("fall", dist.Normal(placebo + u[0] + effect, sigma), obs=fall)


PLACEBO, LARGEST, HALF_DOSE, SIGMA = 4.0, 22.0, 30.0, 8.0
HOSPITALS = {  # doses in mg, patients of each, effect in mmHg
    "Basel": ((0, 10, 20, 40), 22, 4.0),
    "Bern": ((0, 20, 80), 18, -4.5),
    "Chur": ((0, 80, 160), 9, 0.5),
}


def curve(dose, placebo, largest, half_dose):
    return placebo + largest * dose / (half_dose + dose)


def simulate(seed=0):
    """Three hospitals that gave other doses."""
    rng = np.random.default_rng(seed)
    silos = {}
    for name, (doses, n, u) in HOSPITALS.items():
        dose = np.repeat(np.array(doses, float), n)
        mean = u + curve(dose, PLACEBO, LARGEST, HALF_DOSE)
        silos[name] = dict(dose=dose, fall=rng.normal(mean, SIGMA))
    return silos


def plot(fitted, silos, path):
    """Draw the curve at a hospital in the middle, and each hospital's means by dose."""
    import matplotlib.pyplot as plt

    draws = fitted.sample_posterior(jax.random.key(1), 4_000)
    names = ("placebo", "largest", "half_dose")
    dose = np.linspace(0, 170, 200)
    falls = curve(dose, *(np.asarray(draws[name])[:, None] for name in names))
    low, middle, high = np.quantile(falls, [0.05, 0.5, 0.95], axis=0)
    figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    axis.fill_between(dose, low, high, color="C0", alpha=0.2, linewidth=0)
    axis.plot(dose, middle, color="C0", label="a hospital in the middle, 90 %")
    axis.plot(dose, curve(dose, PLACEBO, LARGEST, HALF_DOSE), ":", color="0.3", label="truth")
    for (name, silo), marker in zip(silos.items(), "os^", strict=True):
        at = np.unique(silo["dose"])
        means = [silo["fall"][silo["dose"] == d].mean() for d in at]
        axis.plot(at, means, marker, color="k", markerfacecolor="white", label=f"means of {name}")
    axis.set(xlabel="dose (mg)", ylabel="fall of systolic pressure (mmHg)")
    axis.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=100)
