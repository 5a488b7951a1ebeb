"""Growth that levels off: orange trees, each with a logistic curve of its own.

How large does a tree become, and when does it have half of that? The girth of each tree follows a
logistic curve, whose asymptote, midpoint and scale differ from tree to tree, so that effects are
inside of a nonlinear function. Days and curve are those of the orange trees in Draper and Smith
(1981, Applied Regression Analysis); Lindstrom and Bates (1990, Biometrics 46) gave each tree
effects of its own. Logarithms of asymptote and scale, and three independent effects, are as in
"Orange trees" of BUGS. Girths are simulated. In nlme it is ``nlme`` with ``SSlogis``.

    python examples/models/run.py nonlinear_growth --plot nonlinear_growth.png
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_fed as nf


def model(days, girth=None):
    """The ``girth`` (tree, visit) of trunks in mm, at ``days`` (tree, visit) since planting.

    The three elements of ``phi`` and ``b`` are the logarithm of the asymptote in mm, the midpoint
    in units of the scale, and the logarithm of the scale in days.
    """
    phi = numpyro.sample("phi", dist.Normal(jnp.array([5.0, 1.0, 6.0]), 1).to_event(1))
    sds = numpyro.sample("sds", dist.HalfNormal(0.5).expand([3]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(20))  # mm, of a measurement
    with nf.silo_plate("tree", days.shape[0]):
        b = numpyro.sample("b", dist.Normal(phi, sds).to_event(1))  # local: the curve of a tree
        asymptote, midpoint, scale = jnp.exp(b[:, :1]), b[:, 1:2], jnp.exp(b[:, 2:])
        mean = asymptote * jax.nn.sigmoid(days / scale - midpoint)
        numpyro.sample("girth", dist.Normal(mean, sigma).to_event(1), obs=girth)


TREES = {"Basel": 5, "Bern": 20, "Chur": 12}
DAYS = np.array([118.0, 484, 664, 1004, 1231, 1372, 1582])
PHI, SDS, SIGMA = np.array([5.25, 1.9, 5.85]), np.array([0.15, 0.12, 0.1]), 5.0


def curve(days, b):
    """The girth of trees with effects ``b`` (tree, 3), each at all of ``days``."""
    return np.exp(b[:, :1]) / (1 + np.exp(b[:, 1:2] - days / np.exp(b[:, 2:])))


def simulate(seed=0):
    """Three orchards that measured all of their trees on the same seven days."""
    rng = np.random.default_rng(seed)
    silos = {}
    for name, n in TREES.items():
        mean = curve(DAYS, rng.normal(PHI, SDS, (n, 3)))
        girth = rng.normal(mean, SIGMA).round()
        silos[name] = dict(days=np.tile(DAYS, (n, 1)), girth=girth)
    return silos


def plot(fitted, silos, path):
    """Draw the curve of a tree in the middle, over the trees of each orchard."""
    import matplotlib.pyplot as plt

    days = np.linspace(0, 1_700, 100)
    draws = fitted.sample_posterior(jax.random.key(1), 4_000)
    low, middle, high = np.quantile(curve(days, np.asarray(draws["phi"])), [0.05, 0.5, 0.95], 0)
    figure, axes = plt.subplots(1, 3, figsize=(6.4, 3.2), sharey=True, layout="constrained")
    for axis, (name, silo) in zip(axes, silos.items(), strict=True):
        axis.plot(silo["days"].T, silo["girth"].T, color="0.75", linewidth=0.8)
        axis.plot([], color="0.75", label="trees")
        axis.fill_between(days, low, high, color="C0", alpha=0.3, linewidth=0)
        axis.plot(days, middle, color="C0", label="a tree in the middle, 90 %")
        axis.plot(days, curve(days, PHI[None])[0], ":", color="0.2", label="truth")
        axis.set(title=f"{name}, {len(silo['girth'])} trees", xlabel="days since planting")
    axes[0].set(ylabel="girth of the trunk (mm)", ylim=(0, None))
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=100)
