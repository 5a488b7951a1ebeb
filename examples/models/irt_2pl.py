"""Answers of pupils to the items of a test, right or wrong: a two-parameter item response model.

Which items are hard, and which tell able pupils from others, if each school keeps the answers?
All schools give the same items, so that difficulty and discrimination are global. A pupil's ability
is a latent of the pupil's row, whose mean grows with age. The model is that of Birnbaum (1968); see
Bürkner (2021, Journal of Statistical Software 100).

    python examples/models/run.py irt_2pl --plot irt_2pl.png
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_fed as nf

ITEMS = 8


def model(age, right=None):
    """Answers ``right`` (pupil, item), 0 or 1, of pupils of ``age`` (pupil,) in years.

    An ability of 0 is that of a pupil of 12 in the middle; its unit is the sd of pupils of one age.
    """
    growth = numpyro.sample("growth", dist.Normal(0, 0.5))  # of ability, a year
    with numpyro.plate("of_item", ITEMS, dim=-1):
        difficulty = numpyro.sample("difficulty", dist.Normal(0, 2))
        log_slope = numpyro.sample("log_slope", dist.Normal(0, 0.5))
    with nf.silo_plate("pupil", age.shape[0], dim=-2):
        ability = numpyro.sample("ability", dist.Normal(growth * (age[:, None] - 12), 1))  # local
        with numpyro.plate("item", ITEMS, dim=-1):
            logits = jnp.exp(log_slope) * (ability - difficulty)
            numpyro.sample("right", dist.Bernoulli(logits=logits), obs=right)


PUPILS = {"Basel": 150, "Bern": 90, "Chur": 40}
YOUNGEST = {"Basel": 10, "Bern": 11, "Chur": 13}
GROWTH = 0.3
DIFFICULTY = np.array([-1.5, -1.0, -0.6, -0.2, 0.2, 0.6, 1.0, 1.5])
SLOPE = np.array([1.0, 1.6, 0.7, 2.2, 1.2, 0.8, 1.8, 1.3])


def simulate(seed=0):
    """What each school holds: ages of pupils, and their answers."""
    rng = np.random.default_rng(seed)
    silos = {}
    for name, n in PUPILS.items():
        age = rng.uniform(YOUNGEST[name], YOUNGEST[name] + 2, n).round(1)
        ability = GROWTH * (age - 12) + rng.normal(size=n)
        p = 1 / (1 + np.exp(-SLOPE * (ability[:, None] - DIFFICULTY)))
        silos[name] = dict(age=age, right=rng.binomial(1, p))
    return silos


def plot(fitted, silos, path):
    """Draw how likely a right answer is, by ability, for three of the items."""
    import matplotlib.pyplot as plt

    ability = np.linspace(-3, 3, 60)
    draws = fitted.sample_posterior(jax.random.key(1), 2_000)
    figure, axes = plt.subplots(1, 3, figsize=(6, 3.6), sharey=True, layout="constrained")
    for item, axis in zip((1, 3, 5), axes, strict=True):
        slope, difficulty = np.exp(draws["log_slope"][:, item]), draws["difficulty"][:, item]
        curves = 100 / (1 + np.exp(-slope[:, None] * (ability - difficulty[:, None])))
        low, middle, high = np.quantile(curves, [0.05, 0.5, 0.95], axis=0)
        axis.fill_between(ability, low, high, color="C0", alpha=0.3, linewidth=0)
        axis.plot(ability, middle, color="C0", label="posterior, 90 %")
        true = 100 / (1 + np.exp(-SLOPE[item] * (ability - DIFFICULTY[item])))
        axis.plot(ability, true, ":", color="0.3", label="truth")
        axis.set(title=f"item {item}", ylim=(0, 100), xticks=[-2, 0, 2])
    axes[0].set_ylabel("right answer (%)")
    axes[1].set_xlabel("ability (sd of pupils of one age)")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=100)
