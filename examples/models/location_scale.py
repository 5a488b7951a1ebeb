"""Moods that differ in level and in how much they swing: a mixed-effects location-scale model.

Does the mood of people with a depression swing more than that of others? A phone asks each person
several times (ecological momentary assessment), and they answer as often as they like. The rows
are answers in long form. A person has a mean and a logarithm of the standard deviation of their
own, which are correlated.
Source: Hedeker, Mermelstein and Demirtas (2008, Biometrics 64).

    python examples/models/run.py location_scale --plot location_scale.png
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_fed as nf


def model(depressed, person, alone, mood=None):
    """The ``mood`` (answer,) from 0 to 100 of a person, who was ``alone`` (answer,), 0 or 1.

    ``depressed`` (person,) is 0 or 1; ``person`` (answer,) is the number of the answer's person,
    from 0 at each hospital.
    """
    level = numpyro.sample("level", dist.Normal(50, 20))
    lower = numpyro.sample("lower", dist.Normal(0, 10))  # the level, by a depression
    of_alone = numpyro.sample("of_alone", dist.Normal(0, 10))
    log_sd = numpyro.sample("log_sd", dist.Normal(2, 1))  # of a person's moods
    wider = numpyro.sample("wider", dist.Normal(0, 1))  # the log sd, by a depression
    sds = numpyro.sample("sds", dist.HalfNormal(jnp.array([20.0, 1.0])).to_event(1))
    root = numpyro.sample("root", dist.LKJCholesky(2, 2.0))  # root[1, 0] is the correlation
    with nf.silo_plate("person", depressed.shape[0]):
        people = dist.MultivariateNormal(jnp.zeros(2), scale_tril=sds[:, None] * root)
        b = numpyro.sample("b", people)  # local: what a person's mean and log sd have beyond
    with nf.silo_plate("answer", alone.shape[0]):
        mean = level - lower * depressed[person] + of_alone * alone + b[person, 0]
        sd = jnp.exp(log_sd + wider * depressed[person] + b[person, 1])
        numpyro.sample("mood", dist.Normal(mean, sd), obs=mood)


PEOPLE = {"Basel": 15, "Bern": 40, "Chur": 25}
LEVEL, LOWER, OF_ALONE, LOG_SD, WIDER = 62.0, 8.0, -4.0, 1.9, 0.4
COVARIANCE = np.array([[100, 1.2], [1.2, 0.16]])  # sds 10 and 0.4, correlation 0.3


def simulate(seed=0):
    """What each hospital holds: who has a depression, and all answers in long form."""
    rng = np.random.default_rng(seed)
    silos = {}
    for name, n in PEOPLE.items():
        depressed = rng.integers(0, 2, n).astype(float)
        b = rng.multivariate_normal([0, 0], COVARIANCE, n)
        person = np.repeat(np.arange(n), rng.integers(3, 12, n))  # three to eleven answers
        alone = rng.integers(0, 2, len(person)).astype(float)
        mean = LEVEL - LOWER * depressed[person] + OF_ALONE * alone + b[person, 0]
        sd = np.exp(LOG_SD + WIDER * depressed[person] + b[person, 1])
        mood = rng.normal(mean, sd).clip(0, 100).round()
        silos[name] = dict(depressed=depressed, person=person, alone=alone, mood=mood)
    return silos


def plot(fitted, silos, path):
    """Draw mean and sd of the moods of Bern's people, and of typical ones."""
    import matplotlib.pyplot as plt

    draws = fitted.sample_posterior(jax.random.key(1), 2_000, silo="Bern")
    figure, axis = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    for depressed, words in enumerate(("no depression", "depression")):
        level = np.asarray(draws["level"] - draws["lower"] * depressed)
        sd = np.asarray(jnp.exp(draws["log_sd"] + draws["wider"] * depressed))
        b = np.asarray(draws["b"])[:, silos["Bern"]["depressed"] == depressed]
        means, sds = level[:, None] + b[..., 0], sd[:, None] * np.exp(b[..., 1])
        look = dict(color="0.6", markersize=4, markerfacecolor=("white", "0.6")[depressed])
        label = f"people of Bern, {words}"
        axis.plot(np.median(means, 0), np.median(sds, 0), "os"[depressed], label=label, **look)
        x, y = (np.quantile(values, [0.05, 0.5, 0.95]) for values in (level, sd))
        color, label = f"C{depressed}", f"typical, {words}, 90 %"
        axis.plot(x, y[[1, 1, 1]], color=color, linewidth=2.5, label=label)
        axis.plot(x[[1, 1]], y[[0, 2]], color=color, linewidth=2.5)
        true = LEVEL - LOWER * depressed, np.exp(LOG_SD + WIDER * depressed)
        axis.plot(*true, "x", color=color, markersize=8, label=f"truth, {words}")
    axis.set(xlabel="mean mood of a person (0 to 100)", ylabel="sd of a person's moods (points)")
    axis.set(yscale="log", ylim=(3, 25))
    axis.set_yticks([3, 5, 10, 20], labels=["3", "5", "10", "20"])
    axis.yaxis.set_minor_locator(plt.NullLocator())
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=100)
