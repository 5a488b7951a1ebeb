"""Days in hospital: whether a patient stays at all, and how long those stay who do.

Does age act on both alike? Whether a patient stays the night is one question, and for how many days
is another; a count with a hurdle has a regression for each. NumPyro has no distribution for it, so
the text has one of its own: zero days, or else a Poisson count without zero. Mullahy (1986),
Journal of Econometrics 33.

    python examples/models/run.py hurdle --plot hurdle.png
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints

import numpyro_fed as nf


class Hurdle(dist.Distribution):
    """Zero unless a hurdle is passed, with this logit; a Poisson count without zero beyond it."""

    arg_constraints: ClassVar = {"logit": constraints.real, "rate": constraints.positive}
    support = constraints.nonnegative_integer

    def __init__(self, logit, rate, *, validate_args=None):
        self.logit, self.rate = jnp.broadcast_arrays(logit, rate)
        super().__init__(batch_shape=self.rate.shape, validate_args=validate_args)

    def log_prob(self, value):
        # 1 - exp(-rate) is the probability that a Poisson count is not zero.
        beyond = dist.Poisson(self.rate).log_prob(value) - jnp.log(-jnp.expm1(-self.rate))
        passed = jax.nn.log_sigmoid(self.logit) + beyond
        return jnp.where(value == 0, jax.nn.log_sigmoid(-self.logit), passed)

    def sample(self, key, sample_shape=()):
        keys, shape = jax.random.split(key, 3), sample_shape + self.batch_shape
        # In a process of events the first one comes before time 1, and the others after it.
        uniform = jax.random.uniform(keys[0], shape)
        first = -jnp.log1p(uniform * jnp.expm1(-self.rate)) / self.rate
        count = 1 + jax.random.poisson(keys[1], self.rate * (1 - first), shape)
        return jnp.where(jax.random.bernoulli(keys[2], jax.nn.sigmoid(self.logit), shape), count, 0)


def model(age, days=None):
    """``days`` in hospital (patient,), given ``age`` (patient,) in years."""
    stay = numpyro.sample("stay", dist.Normal(0, 2).expand([2]).to_event(1))  # logit
    length = numpyro.sample("length", dist.Normal(0, 2).expand([2]).to_event(1))  # log of days
    decades = (age - 60) / 10
    with nf.silo_plate("patient", age.shape[0]):
        logit, rate = stay[0] + stay[1] * decades, jnp.exp(length[0] + length[1] * decades)
        numpyro.sample("days", Hurdle(logit, rate), obs=days)


SIZES = {"Basel": 180, "Bern": 100, "Chur": 50}
STAY, LENGTH = np.array([0.2, 0.6]), np.array([1.0, -0.15])


def days_at(age, stay, length):
    """The distribution of days at an age, given the coefficients (..., 2)."""
    logit, log_rate = (c[..., 0] + c[..., 1] * (age - 60) / 10 for c in (stay, length))
    return Hurdle(logit, np.exp(log_rate))


def simulate(seed=0):
    """What each hospital holds: 50 to 180 patients; those of Chur are older."""
    rng = np.random.default_rng(seed)
    silos = {}
    for name, n in SIZES.items():
        age = rng.normal(70 if name == "Chur" else 55, 14, n).round()
        days = days_at(age, STAY, LENGTH).sample(jax.random.key(seed + n))
        silos[name] = dict(age=age, days=np.asarray(days))
    return silos


def plot(fitted, silos, path):
    """Draw the probabilities of days for a patient of 40 and for one of 80."""
    import matplotlib.pyplot as plt

    draws = fitted.sample_posterior(jax.random.key(1), 2_000)
    days, tick = np.arange(8), dict(marker="_", color="0.3", markersize=12, linestyle="")
    figure, axis = plt.subplots(figsize=(6, 3.6), dpi=100, layout="constrained")
    for age, at, color in ((40, days - 0.15, "C1"), (80, days + 0.15, "C0")):
        found = days_at(age, draws["stay"], draws["length"]).log_prob(days[:, None])
        chance = 100 * np.exp(found)
        axis.vlines(at, *np.quantile(chance, [0.05, 0.95], axis=1), color=color)
        axis.plot(at, chance.mean(1), "o", color=color, markersize=4, label=f"{age} years, 90 %")
        axis.plot(at, 100 * np.exp(days_at(age, STAY, LENGTH).log_prob(days)), **tick)
    axis.plot([], [], label="truth", **tick)
    axis.axvline(0.5, color="0.8", linewidth=1)  # the hurdle
    axis.set(xlabel="days in hospital", ylabel="probability (%)", ylim=(0, None))
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.savefig(path)
