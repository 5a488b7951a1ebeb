"""The hazard of a relapse that is constant within intervals of time, fitted as a Poisson model.

When is a relapse likely, and does the effect of a treatment fade? A patient has a row for each
interval in which she was at risk, with the months spent in it, and a relapse counts as Poisson: the
likelihood is that of the hazard.
Source: Friedman (1982), Annals of Statistics 10; Holford (1980), Biometrics 36.

    python examples/models/run.py survival_piecewise --plot survival_piecewise.png
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_fed as nf

EDGES = np.array([0, 3, 6, 9, 12, 18, 24, 36])  # of intervals, in months: all hospitals agree
LATE = EDGES[:-1] >= 12  # intervals in which the treatment may have another effect


def model(interval, treated, months, relapse=None):
    """Whether there was a ``relapse``, 0 or 1, of a patient in an interval; all are (row,).

    ``interval`` is its number from 0 on, ``treated`` 0 or 1, ``months`` the time at risk in it.
    """
    wide = dist.Normal(-3, 1.5).expand([len(EDGES) - 1]).to_event(1)
    log_hazard = numpyro.sample("log_hazard", wide)  # a month
    effect = numpyro.sample("effect", dist.Normal(0, 1).expand([2]).to_event(1))  # early, late
    tau = numpyro.sample("tau", dist.HalfNormal(0.5))
    with nf.silo_plate("hospital", 1):
        u = numpyro.sample("u", dist.Normal(0, tau))
    with nf.silo_plate("row", interval.shape[0]):
        of_treatment = jnp.where(LATE, effect[1], effect[0])[interval]
        rate = jnp.exp(log_hazard[interval] + of_treatment * treated + u[0])
        numpyro.sample("relapse", dist.Poisson(rate * months), obs=relapse)


EFFECT = -1.2  # true log hazard ratio in the first year, later 0
HOSPITALS = {"Basel": (130, 0.5), "Bern": (90, -0.7), "Chur": (30, 0.3)}  # patients, effect


def true_hazard(month, treated):
    """The hazard a month that was simulated: it rises, and falls again."""
    ratio = np.where(month < 12, np.exp(EFFECT * treated), 1)
    return ratio * 0.05 * month / 6 * np.exp(1 - month / 6) + 0.008


def simulate(seed=0):
    """Three hospitals, whose patients leave after half a year to three years."""
    rng = np.random.default_rng(seed)
    month = np.arange(0, EDGES[-1], 0.1) + 0.05
    silos = {}
    for name, (n, u) in HOSPITALS.items():
        treated = rng.integers(0, 2, n)
        passed = 0.1 * np.cumsum(true_hazard(month, treated[:, None]) * np.exp(u), -1)
        event = np.append(month, np.inf)[(passed < rng.exponential(size=(n, 1))).sum(-1)]
        end = np.minimum(rng.uniform(6, 48, n), EDGES[-1])
        months = np.clip(np.minimum(event, end)[:, None] - EDGES[:-1], 0, np.diff(EDGES))
        patient, interval = np.nonzero(months)
        last = interval == (months > 0).sum(-1)[patient] - 1
        rows = dict(interval=interval, treated=treated[patient], months=months[patient, interval])
        silos[name] = rows | dict(relapse=(last & (event <= end)[patient]).astype(int))
    return silos


def plot(fitted, silos, path):
    """Draw the hazard of both groups at a hospital in the middle, with 90 % bands."""
    import matplotlib.pyplot as plt

    draws = fitted.sample_posterior(jax.random.key(1), 4_000)
    figure, axes = plt.subplots(1, 2, figsize=(6, 3.6), sharey=True, layout="constrained")
    month = np.linspace(0.05, EDGES[-1], 300)
    for treated, axis in enumerate(axes):
        log_hazard = draws["log_hazard"] + draws["effect"][:, LATE.astype(int)] * treated
        bounds = np.quantile(100 * np.exp(log_hazard), [0.05, 0.5, 0.95], axis=0)
        low, middle, high = np.concatenate([bounds, bounds[:, -1:]], 1)
        axis.fill_between(EDGES, low, high, step="post", color="C0", alpha=0.2, linewidth=0)
        axis.step(EDGES, middle, where="post", color="C0", label="posterior, 90 % band")
        axis.plot(month, 100 * true_hazard(month, treated), ":", color="0.3", label="truth")
        axis.set(xlabel="months since discharge", xticks=[0, 6, 12, 18, 24, 36])
        axis.set_title(("not treated", "treated")[treated], fontsize="medium")
    axes[0].set(ylim=(0, None), ylabel="relapses per 100 patients and month")
    axes[1].legend(frameon=False)
    figure.savefig(path, dpi=100)
