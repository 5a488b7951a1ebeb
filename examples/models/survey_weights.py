"""A survey with weights: how many people smoke, if the sample is not like the population.

Three towns have asked young people more often than old ones. The weight of a person is how many
people of the population the person stands for, divided by the mean of that over all towns. Weights
multiply log densities, which makes a pseudo-likelihood: see Savitsky and Toth (2016, Electronic
Journal of Statistics 10).

    python examples/models/run.py survey_weights --plot survey_weights.png
"""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_fed as nf


def model(male, weight, smokes=None):
    """Whether a person ``smokes`` (person,), 0 or 1; ``male`` (person,) is 0 or 1.

    ``weight`` (person,) has mean 1 over the persons of all towns.
    """
    women = numpyro.sample("women", dist.Normal(-1, 1.5))  # the logit of the share that smokes
    difference = numpyro.sample("difference", dist.Normal(0, 1))  # of men's logit from women's
    with nf.silo_plate("person", male.shape[0]), numpyro.handlers.scale(scale=weight):
        numpyro.sample("smokes", dist.Bernoulli(logits=women + difference * male), obs=smokes)


# Of each town: people below and above 40 in the population, and those who were asked.
PEOPLE = {"Basel": [90_000, 110_000], "Bern": [60_000, 80_000], "Chur": [14_000, 24_000]}
ASKED = {"Basel": [110, 60], "Bern": [75, 40], "Chur": [65, 20]}
SMOKERS = np.array([[0.36, 0.46], [0.12, 0.20]])  # below and above 40; women and men


def simulate(seed=0):
    """What each town holds: sex, weight and answer of those who were asked."""
    rng = np.random.default_rng(seed)
    mean = sum(map(sum, PEOPLE.values())) / sum(map(sum, ASKED.values()))
    silos = {}
    for name in PEOPLE:
        age = np.repeat([0, 1], ASKED[name])
        weight = (np.array(PEOPLE[name]) / ASKED[name] / mean)[age]
        male = rng.integers(0, 2, len(age))
        smokes = rng.binomial(1, SMOKERS[age, male])
        silos[name] = dict(male=male.astype(float), weight=weight, smokes=smokes)
    return silos


def shares(fitted):
    """Draws (draw, sex) of the share of women and of men that smokes, in per cent."""
    draws = fitted.sample_posterior(jax.random.key(1), 4_000)
    logits = np.stack([draws["women"], draws["women"] + draws["difference"]], -1)
    return 100 / (1 + np.exp(-logits))


def plot(fitted, silos, path):
    """Draw the shares that smoke, with weights and without."""
    import matplotlib.pyplot as plt

    even = {name: silo | dict(weight=np.ones(len(silo["male"]))) for name, silo in silos.items()}
    unweighted = nf.fit(jax.random.key(0), model, even, progress_bar=False)
    people = np.sum(list(PEOPLE.values()), 0)
    true = 100 * people @ SMOKERS / people.sum()
    figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for shift, color, fit, label in (
        (0.12, "0.6", unweighted, "without weights"),
        (-0.12, "C0", fitted, "with weights, 90 %"),
    ):
        low, middle, high = np.quantile(shares(fit), [0.05, 0.5, 0.95], axis=0)
        axis.hlines(np.arange(2) + shift, low, high, color=color, linewidth=4, alpha=0.5)
        axis.plot(middle, np.arange(2) + shift, "o", color=color, label=label)
    for sex in range(2):
        label = "truth" if sex == 0 else None
        axis.vlines(true[sex], sex - 0.3, sex + 0.3, color="0.3", linestyle=":", label=label)
    axis.set_yticks([0, 1], ["women", "men"])
    axis.set(ylim=(-0.5, 1.5), xlabel="people who smoke (%)")
    axis.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=100)
