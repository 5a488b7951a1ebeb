"""The chance that a frog lives in a pond, where a visit to the pond may miss it.

Where does a rare frog live, by the altitude of ponds? It is heard at some visits only, so that a
pond where nobody has heard it need not be empty. Several visits to each pond tell both apart. The
text has presence as a discrete latent of the pond; visits that nobody made are NaN. Places of rare
animals are kept secret: each canton has its own ponds. MacKenzie et al. (2002), Ecology 83.

    python examples/models/run.py occupancy --plot occupancy.png
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_fed as nf

VISITS = 4  # to a pond, at most


def model(altitude, heard=None):
    """Whether frogs were ``heard`` (pond, visit): 1, 0 or NaN. ``altitude`` (pond,) in metres."""
    intercept = numpyro.sample("intercept", dist.Normal(0, 1.5))  # at 700 m
    slope = numpyro.sample("slope", dist.Normal(0, 1.5))  # of 300 m
    detection = numpyro.sample("detection", dist.Beta(1, 1))  # at one visit, where frogs live
    with nf.silo_plate("pond", altitude.shape[0], dim=-2):
        logit = intercept + slope * (altitude[:, None] - 700) / 300
        present = numpyro.sample("present", dist.Bernoulli(logits=logit))
        chance = jnp.where(present == 1, detection, 0.0)
        with numpyro.plate("visit", VISITS, dim=-1):
            numpyro.sample("heard", dist.Bernoulli(chance), obs=heard)


SIZES = {"Basel": 60, "Bern": 160, "Chur": 90}
ALTITUDES = {"Basel": (250, 700), "Bern": (400, 1300), "Chur": (600, 1800)}
INTERCEPT, SLOPE, DETECTION = 0.3, -1.0, 0.35


def simulate(seed=0):
    """What each canton holds: visits to 60 to 160 ponds, two at least."""
    rng = np.random.default_rng(seed)
    silos = {}
    for name, n in SIZES.items():
        altitude = rng.uniform(*ALTITUDES[name], n).round()
        logit = INTERCEPT + SLOPE * (altitude - 700) / 300
        present = rng.uniform(size=n) < 1 / (1 + np.exp(-logit))
        heard = (rng.uniform(size=(n, VISITS)) < DETECTION) * present[:, None]
        made = np.arange(VISITS) < rng.integers(2, VISITS + 1, n)[:, None]
        silos[name] = dict(altitude=altitude, heard=np.where(made, heard, np.nan))
    return silos


def plot(fitted, silos, path):
    """Draw the chance of presence by altitude, and the share of ponds where a frog was heard."""
    import matplotlib.pyplot as plt

    draws = fitted.sample_posterior(jax.random.key(1), 2_000)
    at = np.linspace(250, 1800, 60)
    logit = draws["intercept"][:, None] + draws["slope"][:, None] * (at - 700) / 300
    share = 100 / (1 + np.exp(-logit))
    figure, axis = plt.subplots(figsize=(6, 3.6), dpi=100, layout="constrained")
    low, high = np.quantile(share, [0.05, 0.95], axis=0)
    axis.fill_between(at, low, high, color="C0", alpha=0.25, linewidth=0)
    axis.plot(at, share.mean(0), color="C0", label="frogs live there (90 % band)")
    true = 100 / (1 + np.exp(-INTERCEPT - SLOPE * (at - 700) / 300))
    axis.plot(at, true, color="0.4", linestyle=":", label="truth")

    altitude = np.concatenate([silo["altitude"] for silo in silos.values()])
    ever = np.concatenate([np.nanmax(silo["heard"], axis=1) for silo in silos.values()])
    edges = np.array([250, 450, 650, 850, 1050, 1300, 1800])
    group = np.digitize(altitude, edges[1:-1])
    observed = [100 * ever[group == g].mean() for g in range(len(edges) - 1)]
    axis.plot((edges[1:] + edges[:-1]) / 2, observed, "o", color="C1", label="heard at any visit")
    axis.set(xlabel="altitude (m)", ylabel="ponds (%)", ylim=(0, 100))
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.savefig(path)
