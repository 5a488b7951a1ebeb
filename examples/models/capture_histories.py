"""Survival of marked birds that are not always seen: capture histories (Cormack-Jolly-Seber).

How many birds survive a year, if one that is not seen may be dead or only hidden? Three stations
ring birds and look for them once a year. What is not seen after the last sighting is summed out in
closed form, so that no state is left to be drawn. See Lebreton et al. (1992, Ecological Monographs
62), whose dippers survive less well in years of a flood. Patients who miss visits are alike.

    python examples/models/run.py capture_histories --plot capture_histories.png
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_fed as nf

FLOOD = np.array([0, 1, 1, 0, 0, 0])  # in the years after occasions 0 to 5


def model(seen):
    """Histories ``seen`` (bird, occasion), 0 or 1; the first 1 is when the bird was ringed.

    The histories enter a factor, and so they cannot be None.
    """
    with numpyro.plate("kind_of_year", 2):  # an ordinary year, a year of a flood
        survival = numpyro.sample("survival", dist.Beta(1, 1))
    with nf.silo_plate("station", 1):
        p = numpyro.sample("p", dist.Beta(1, 1))  # local: that a living bird is seen here
    phi, occasion = survival[FLOOD], jnp.arange(len(FLOOD) + 1)
    # Of a bird that lives at an occasion, chi is the probability never to be seen after it.
    chi = [jnp.ones(())]
    for survives in phi[::-1]:
        chi.insert(0, 1 - survives + survives * (1 - p[0]) * chi[0])
    with nf.silo_plate("bird", seen.shape[0]):
        first = jnp.argmax(seen, -1)[:, None]
        last = occasion[-1] - jnp.argmax(seen[:, ::-1], -1)[:, None]
        known_alive = (first < occasion[1:]) & (occasion[1:] <= last)
        sighting = jnp.where(seen[:, 1:] == 1, jnp.log(p[0]), jnp.log1p(-p[0]))
        until_last = jnp.where(known_alive, jnp.log(phi) + sighting, 0).sum(-1)
        numpyro.factor("history", until_last + jnp.log(jnp.stack(chi))[last[:, 0]])


BIRDS = {"Basel": 120, "Bern": 70, "Chur": 40}
SURVIVAL = np.array([0.75, 0.5])
P = {"Basel": 0.85, "Bern": 0.6, "Chur": 0.4}


def simulate(seed=0):
    """What each station holds: histories of its birds, ringed at one of the first occasions."""
    rng, silos = np.random.default_rng(seed), {}
    for name, n in BIRDS.items():
        first = rng.choice([0, 1, 2, 3, 4], n, p=[0.6, 0.1, 0.1, 0.1, 0.1])
        seen, alive = np.zeros((n, len(FLOOD) + 1), int), np.zeros(n, bool)
        for t in range(len(FLOOD) + 1):
            alive = (alive & (rng.uniform(size=n) < SURVIVAL[FLOOD[t - 1]])) | (first == t)
            seen[:, t] = alive & ((first == t) | (rng.uniform(size=n) < P[name]))
        silos[name] = dict(seen=seen)
    return silos


def plot(fitted, silos, path):
    """Draw how many birds of the first year are alive, and how many were seen again."""
    import matplotlib.pyplot as plt

    def alive(survival):
        return 100 * np.cumprod(np.insert(survival[..., FLOOD], 0, 1, axis=-1), -1)

    years = np.arange(len(FLOOD) + 1)
    draws = fitted.sample_posterior(jax.random.key(1), 4_000)["survival"]
    low, middle, high = np.quantile(alive(np.asarray(draws)), [0.05, 0.5, 0.95], axis=0)
    figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    axis.fill_between(years, low, high, color="C0", alpha=0.3, linewidth=0)
    axis.plot(years, middle, color="C0", label="alive: posterior, 90 %")
    axis.plot(years, alive(SURVIVAL), ":", color="0.3", label="alive: truth")
    for (name, silo), marker in zip(silos.items(), "os^", strict=True):
        ringed = silo["seen"][silo["seen"][:, 0] == 1]
        axis.plot(years, 100 * ringed.mean(0), marker, color="0.6", label=f"seen at {name}")
    axis.set(xlabel="years after ringing (floods in the second and third)", ylim=(0, 103))
    axis.set_ylabel("birds ringed at the first occasion (%)")
    axis.legend(frameon=False)
    figure.savefig(path, dpi=100)
