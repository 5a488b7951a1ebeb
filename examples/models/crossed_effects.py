"""Ratings of patients by doctors who work at several hospitals: crossed effects.

Do doctors rate pain alike, when their patients lie in wards that differ as well? A doctor has
patients in several wards and hospitals, and a ward has several doctors. Wards belong to one
hospital and are its own; doctors are shared, and so global. In lme4 it would be
``rating ~ surgical + (1 | doctor) + (1 | ward)``; see Baayen, Davidson and Bates (2008, Journal of
Memory and Language 59).

    python examples/models/run.py crossed_effects --plot crossed_effects.png
"""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_fed as nf

DOCTORS = 10


def model(surgical, ward, doctor, rating=None):
    """The ``rating`` (patient,) of pain, from 0 to 100.

    ``surgical`` (ward,) is 0 or 1. ``ward`` (patient,) counts from 0 at each hospital; ``doctor``
    (patient,) has the same number, 0 to 9, wherever the doctor works.
    """
    mu = numpyro.sample("mu", dist.Normal(50, 20))
    surgery = numpyro.sample("surgery", dist.Normal(0, 20))
    sd_doctor = numpyro.sample("sd_doctor", dist.HalfNormal(10))
    sd_ward = numpyro.sample("sd_ward", dist.HalfNormal(10))
    sigma = numpyro.sample("sigma", dist.HalfNormal(20))
    with numpyro.plate("doctors", DOCTORS):
        of_doctor = numpyro.sample("of_doctor", dist.Normal(0, sd_doctor))  # global
    with nf.silo_plate("wards", surgical.shape[0]):
        level = numpyro.sample("level", dist.Normal(mu + surgery * surgical, sd_ward))  # local
    with nf.silo_plate("patient", ward.shape[0]):
        numpyro.sample("rating", dist.Normal(level[ward] + of_doctor[doctor], sigma), obs=rating)


PATIENTS = {"Basel": 150, "Bern": 100, "Chur": 50}
WARDS = {"Basel": 9, "Bern": 7, "Chur": 4}
WORK_AT = {"Basel": [0, 1, 2, 3, 4, 5], "Bern": [3, 4, 5, 6, 7], "Chur": [5, 7, 8, 9]}
MU, SURGERY, SD_WARD, SIGMA = 45.0, 10.0, 6.0, 12.0
OF_DOCTOR = np.array([-6, 3, 8, -2, 0, 5, -9, 2, 6, -3.0])


def simulate(seed=0):
    """What each hospital holds: its wards, and the ward, doctor and rating of each patient."""
    rng = np.random.default_rng(seed)
    silos = {}
    for name, n in PATIENTS.items():
        surgical = (np.arange(WARDS[name]) % 2).astype(float)
        level = MU + SURGERY * surgical + rng.normal(0, SD_WARD, len(surgical))
        ward = rng.integers(0, len(surgical), n)
        # A doctor is mostly at three wards, so that doctors and wards are mixed up.
        doctor = rng.choice(WORK_AT[name], n)
        doctor = np.where(rng.uniform(size=n) < 0.6, np.take(WORK_AT[name], ward // 3), doctor)
        rating = level[ward] + OF_DOCTOR[doctor] + rng.normal(0, SIGMA, n)
        silos[name] = dict(surgical=surgical, ward=ward, doctor=doctor, rating=rating.round())
    return silos


def plot(fitted, silos, path):
    """Draw by how much each doctor rates above or below others."""
    import matplotlib.pyplot as plt

    draws = fitted.sample_posterior(jax.random.key(1), 4_000)
    low, middle, high = np.quantile(draws["of_doctor"], [0.05, 0.5, 0.95], axis=0)
    doctor, rating = (np.concatenate([s[k] for s in silos.values()]) for k in ("doctor", "rating"))
    figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    at = np.arange(DOCTORS)
    raw = [rating[doctor == k].mean() - rating.mean() for k in at]
    axis.plot(at, raw, "s", color="0.7", markersize=5, label="doctor's mean less that of all")
    axis.vlines(at, low, high, color="C0", linewidth=3, alpha=0.5)
    axis.plot(at, middle, "o", color="C0", label="posterior, 90 %")
    axis.plot(at, OF_DOCTOR, "_", color="0.3", markersize=18, label="truth")
    labels = ["\n".join(name for name in WORK_AT if k in WORK_AT[name]) for k in at]
    axis.set_xticks(at, labels, fontsize=8)
    axis.set(xlabel="doctors, by where they work", ylabel="effect of the doctor on a rating")
    figure.legend(loc="outside upper center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=100)
