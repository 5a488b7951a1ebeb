"""Network meta-analysis: trials of two arms each compare five treatments in many pairs.

Which treatment is best, if no trial has them all, and the trials of three networks stay where they
are? All effects are log odds ratios against treatment 0, so that a trial of 2 against 3 tells of
``effect[3] - effect[2]``. A trial has a level of its own and a random effect on its contrast. It is
the model of Lu and Ades (2004, Statistics in Medicine 23), as in the NICE technical document 2.

    python examples/models/run.py network_meta_analysis --plot network_meta_analysis.png
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_fed as nf

TREATMENTS = 5


def model(treatment, patients, events=None):
    """Number of patients with an event, ``events`` (trial, arm), of ``patients`` (trial, arm).

    ``treatment`` (trial, arm) has the number of each arm's treatment, from 0 to 4.
    """
    with numpyro.plate("against_0", TREATMENTS - 1):
        effect = numpyro.sample("effect", dist.Normal(0, 2))
    tau = numpyro.sample("tau", dist.HalfNormal(0.5))  # how much trials of one pair differ
    effect = jnp.concatenate([jnp.zeros(1), effect])
    with nf.silo_plate("trial", treatment.shape[0]):
        # The level of a trial has a wide prior of its own: arms are compared within trials only.
        level = numpyro.sample("level", dist.Normal(0, 3))  # local
        contrast = effect[treatment[:, 1]] - effect[treatment[:, 0]]
        delta = numpyro.sample("delta", dist.Normal(contrast, tau))  # local
        logits = jnp.stack([level, level + delta], -1)
        numpyro.sample("events", dist.Binomial(patients, logits=logits).to_event(1), obs=events)


TRIALS = {"Basel": 24, "Bern": 18, "Chur": 15}
EFFECT, TAU = np.array([0, -0.3, -0.6, -0.7, 0.2]), 0.2
PAIRS = {  # each network has compared other pairs
    "Basel": [(0, 1), (0, 2), (1, 2)],
    "Bern": [(0, 2), (2, 3), (1, 4)],
    "Chur": [(0, 4), (2, 3), (3, 4)],
}


def simulate(seed=0):
    """What each network holds: treatments, patients and events of both arms of its trials."""
    rng = np.random.default_rng(seed)
    silos = {}
    for name, n in TRIALS.items():
        treatment = np.array(PAIRS[name])[rng.integers(0, 3, n)]
        patients = np.repeat(rng.integers(40, 200, (n, 1)), 2, axis=1)
        level, delta = rng.normal(-1, 0.6, n), rng.normal(0, TAU, n)
        delta += EFFECT[treatment[:, 1]] - EFFECT[treatment[:, 0]]
        p = 1 / (1 + np.exp(-np.stack([level, level + delta], -1)))
        silos[name] = dict(treatment=treatment, patients=patients, events=rng.binomial(patients, p))
    return silos


def plot(fitted, silos, path):
    """Draw the risk under each treatment, where it is 30 % under treatment 0."""
    import matplotlib.pyplot as plt

    def percent(effect):
        return 100 / (1 + np.exp(-np.log(0.3 / 0.7) - effect))

    effect = fitted.sample_posterior(jax.random.key(1), 4_000)["effect"]
    effect = np.concatenate([np.zeros((len(effect), 1)), effect], 1)
    best = np.bincount(effect.argmin(1), minlength=TREATMENTS) / len(effect)
    low, middle, high = np.quantile(percent(effect), [0.05, 0.5, 0.95], axis=0)
    figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    at = np.arange(TREATMENTS)
    axis.vlines(at, low, high, color="C0", linewidth=3, alpha=0.5)
    axis.plot(at, middle, "o", color="C0", label="posterior, 90 %")
    axis.plot(at, percent(EFFECT), "_", color="0.3", markersize=22, label="truth")
    labels = [f"{k}\nbest: {100 * share:.0f} %" for k, share in enumerate(best)]
    axis.set(xticks=at, xticklabels=labels, xlabel="treatment, and the probability that it is best")
    axis.set_ylabel("risk of an event (%)")
    axis.legend(frameon=False)
    figure.savefig(path, dpi=100)
