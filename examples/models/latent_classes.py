"""Two classes of patients: those who respond to a drug, and those who do not.

How many patients respond, how strongly, and who? Nobody has recorded a class, but in one class the
fall of blood pressure grows with the dose. The text is a mixture of two regressions: the class is a
discrete latent of each patient, which is summed out in the fit and drawn afterwards. De Veaux
(1989), Mixtures of linear regressions, Computational Statistics and Data Analysis 8.

    python examples/models/run.py latent_classes --plot latent_classes.png
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_fed as nf


def model(dose, fall=None):
    """The ``fall`` of blood pressure (patient,) in mmHg after a ``dose`` (patient,) in mg."""
    share = numpyro.sample("share", dist.Beta(2, 2))  # of patients who respond
    base = numpyro.sample("base", dist.Normal(0, 10))  # the fall without a dose
    low = numpyro.sample("low", dist.Normal(0, 5))  # slopes of 10 mg: of those who do not respond
    more = numpyro.sample("more", dist.HalfNormal(10))  # positive, so that the classes have names
    sigma = numpyro.sample("sigma", dist.HalfNormal(10))
    with nf.silo_plate("patient", dose.shape[0]):
        responds = numpyro.sample("responds", dist.Bernoulli(share))
        slope = jnp.where(responds == 1, low + more, low)
        numpyro.sample("fall", dist.Normal(base + slope * dose / 10, sigma), obs=fall)


SIZES = {"Basel": 60, "Bern": 40, "Chur": 25}
DOSES = {"Basel": (5, 20, 40), "Bern": (10, 20, 30), "Chur": (5, 10, 40)}
SHARE, BASE, LOW, MORE, SIGMA = 0.6, 3.0, 0.5, 6.0, 4.0


def simulate(seed=0):
    """What each hospital holds: 25 to 60 patients, one dose each."""
    rng = np.random.default_rng(seed)
    silos = {}
    for name, n in SIZES.items():
        dose = rng.choice(DOSES[name], n).astype(float)
        slope = LOW + MORE * (rng.uniform(size=n) < SHARE)
        fall = BASE + slope * dose / 10 + SIGMA * rng.normal(size=n)
        silos[name] = dict(dose=dose, fall=fall.round(1))
    return silos


def plot(fitted, silos, path):
    """Draw the patients of all hospitals by their probability to respond, and both lines."""
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 3.6), dpi=100, layout="constrained")
    draws = fitted.sample_posterior(jax.random.key(1), 2_000, silo="all")
    at = np.linspace(0, 45, 30)
    for slope, true, label in (
        (draws["low"] + draws["more"], LOW + MORE, "responds"),
        (draws["low"], LOW, "does not"),
    ):
        line = draws["base"][:, None] + slope[:, None] * at / 10
        low, high = np.quantile(line, [0.05, 0.95], axis=0)
        axis.fill_between(at, low, high, color="C0", alpha=0.25, linewidth=0)
        axis.plot(at, line.mean(0), color="C0")
        axis.plot(at, BASE + true * at / 10, color="0.4", linestyle=":")
        axis.text(45.5, line.mean(0)[-1], label, va="center")
    axis.plot([], [], color="C0", label="mean of a class, 90 % band")
    axis.plot([], [], color="0.4", linestyle=":", label="truth")
    dose = np.concatenate([silo["dose"] for silo in silos.values()])
    fall = np.concatenate([silo["fall"] for silo in silos.values()])
    beside = np.random.default_rng(0).uniform(-1.2, 1.2, len(dose))  # so that points do not overlap
    chance = np.asarray(draws["responds"]).mean(0)
    points = axis.scatter(dose + beside, fall, c=chance, cmap="viridis", vmin=0, vmax=1, s=16)
    figure.colorbar(points, label="probability to respond")
    axis.set(xlabel="dose (mg)", ylabel="fall of blood pressure (mmHg)", xlim=(0, 58))
    axis.set_xticks(range(0, 50, 10))
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="upper left")
    figure.savefig(path)
