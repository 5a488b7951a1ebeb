"""How good three tests of a disease are, where nobody knows who has it.

What are sensitivity and specificity of each test if none of them is a gold standard? Three tests
that err independently of each other, in populations where the disease is rare here and common
there, are enough to tell. The text has the disease as a discrete latent of each patient, which is
summed out, and a prevalence of each hospital. Hui and Walter (1980), Biometrics 36.

    python examples/models/run.py test_accuracy --plot test_accuracy.png
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_fed as nf


def model(results):
    """Results (patient, 3) of three tests: 1 is positive."""
    # The priors say that a test is better than a coin: else "ill" and "well" could change places.
    sensitivity = numpyro.sample("sensitivity", dist.Beta(6, 2).expand([3]).to_event(1))
    specificity = numpyro.sample("specificity", dist.Beta(6, 2).expand([3]).to_event(1))
    middle = numpyro.sample("middle", dist.Normal(-1, 1.5))  # logit of a prevalence
    tau = numpyro.sample("tau", dist.HalfNormal(1.5))
    with nf.silo_plate("hospital", 1):
        logit = numpyro.sample("logit", dist.Normal(middle, tau))
    with nf.silo_plate("patient", results.shape[0]):
        ill = numpyro.sample("ill", dist.Bernoulli(logits=logit[0]))
        positive = jnp.where(ill[:, None] == 1, sensitivity, 1 - specificity)
        numpyro.sample("results", dist.Bernoulli(positive).to_event(1), obs=results)


SIZES = {"Basel": 200, "Bern": 150, "Chur": 100}
PREVALENCE = {"Basel": 0.08, "Bern": 0.25, "Chur": 0.6}
SENSITIVITY, SPECIFICITY = np.array([0.95, 0.85, 0.7]), np.array([0.8, 0.9, 0.97])


def simulate(seed=0):
    """What each hospital holds: three results of each of 100 to 200 patients."""
    rng = np.random.default_rng(seed)
    silos = {}
    for name, n in SIZES.items():
        ill = rng.uniform(size=(n, 1)) < PREVALENCE[name]
        positive = np.where(ill, SENSITIVITY, 1 - SPECIFICITY)
        silos[name] = dict(results=(rng.uniform(size=(n, 3)) < positive).astype(float))
    return silos


def plot(fitted, silos, path):
    """Draw what is found of each test, and the prevalence of each hospital."""
    import matplotlib.pyplot as plt

    figure, (tests, hospitals) = plt.subplots(
        1, 2, figsize=(6, 3.6), dpi=100, layout="constrained", sharey=True, width_ratios=[3, 2]
    )

    def draw(axis, at, values, true, marker):
        low, high = np.quantile(values, [0.05, 0.95], axis=0)
        axis.vlines(at, low, high, color="C0")
        axis.plot(at, values.mean(0), marker, color="C0")
        axis.plot(at, true, "_", color="0.4", markersize=16)

    draws = fitted.sample_posterior(jax.random.key(1), 2_000, silo="all")
    at = np.arange(3)
    draw(tests, at - 0.12, 100 * draws["sensitivity"], 100 * SENSITIVITY, "o")
    draw(tests, at + 0.12, 100 * draws["specificity"], 100 * SPECIFICITY, "s")
    for marker, label in (("o", "sensitivity"), ("s", "specificity")):
        tests.plot([], [], marker, color="C0", label=label)
    tests.plot([], [], "_", color="0.4", markersize=16, label="truth")
    tests.legend(frameon=False, loc="lower left")
    tests.set_xticks(at, ["test A", "test B", "test C"])
    tests.set(ylabel="%, with 90 % intervals", ylim=(0, 102), xlim=(-0.5, 2.5))
    prevalence = np.array([PREVALENCE[name] for name in silos])
    draw(hospitals, at, 100 / (1 + np.exp(-draws["logit"])), 100 * prevalence, "o")
    hospitals.set_xticks(at, silos)
    hospitals.set(title="prevalence", xlim=(-0.5, 2.5))
    tests.set_title("tests")
    for axis in (tests, hospitals):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
