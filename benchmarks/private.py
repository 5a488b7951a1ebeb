"""What privacy costs: Adult over ten and 200 clients, and whether private intervals cover.

``adult``: logistic regression with 109 columns, 80 % of the rows split over clients, the rest for
testing, as in Heikkila et al. (2023), whose published plots give for delta 1e-5 and a trusted sum:
ten clients, epsilon 1: accuracy 0.847, test log likelihood -0.343 (virtual parties, 15 rounds), and
0.849, -0.327 (global VI, 4,000 rounds); 200 clients, epsilon 0.5: 0.844, -0.340 and 0.849, -0.329.

``coverage``: 90 % intervals of private fits of linear and logistic regressions with raw covariates,
the noise included, over simulated data sets.

``shards``: what PVI by perturbed natural parameters would cost: the updates of several rows are
clipped together, as those of virtual clients are, in the logistic regression of ``coverage``.

``search``: how many private fits are trusted, and how far they are off, by when the search ends and
how long its steps may be, on four data sets with raw columns.

``few``: how far private fits of few rows are off, in the sds that they say, trusted or not.

``units``: linear regressions in units of their own, whose priors know the order of an sd or do not.

``studies``: the six cities, 537 children in two silos, and a registry of six hospitals with 8,070
patients (effects of hospitals as global sites), at epsilon 2, against NUTS on all rows.

    python benchmarks/private.py --parts adult coverage shards search few studies --sets 500
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from federated_data import load_tabular
from few_messages import hospitals, six_cities
from jax import Array
from record import table_row, write

import numpyro_fed as nf
from numpyro_fed.basics.programs import precision
from numpyro_fed.data.silo_data import SiloData, read
from numpyro_fed.dp_newton import algorithm as private_newton
from numpyro_fed.dp_newton.algorithm import NEAR, NewtonServer, PrivateNewton
from numpyro_fed.dp_newton.units import PrivateUnits, Releases
from numpyro_fed.privacy.budget import noisy
from numpyro_fed.rounds.exchange import AskSilos
from numpyro_fed.rounds.silos import Batch
from numpyro_fed.rounds.step import Conversation, transport_of_stacks
from numpyro_fed.text.split import split

Lines = Iterator[list[str]]  # of a table, as cells

# Clients, epsilon, whether clients differ in size by a factor of up to 20, delta.
ADULT = (
    (10, 1.0, False),
    (10, 1.0, True),
    (10, 4.0, False),
    (200, 0.5, False),
)
COVERAGE = (("linear", 20_000, 3.0), ("linear", 50_000, 1.0), ("logistic", 10_000, 1.0))
FEW = (
    ("two columns", 500, 0.5),
    ("two columns", 2_000, 0.5),
    ("two columns", 2_000, 1.0),
    ("logistic", 2_000, 0.5),
    ("logistic", 2_000, 2.0),
    ("Poisson", 500, 0.5),
    ("Poisson", 2_000, 2.0),
    ("linear", 3_000, 1.0),
    ("linear", 20_000, 1.0),
)
DELTA = 1e-5
WIDTH = 1.6448536269514722  # of a 90 % interval, in sds, on both sides


def logistic(x: Array, y: Array | None = None) -> None:
    """Declare a logistic regression with standard normal coefficients."""
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[-1]]).to_event(1))
    with nf.silo_plate("row", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


def wide_logistic(x: Array, y: Array | None = None) -> None:
    """Declare a logistic regression with wide priors, for raw covariates."""
    beta = numpyro.sample("beta", dist.Normal(0, 100).expand([x.shape[-1]]).to_event(1))
    with nf.silo_plate("row", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


def wide_linear(x: Array, y: Array | None = None) -> None:
    """Declare a linear regression with wide priors, for raw covariates."""
    beta = numpyro.sample("beta", dist.Normal(0, 1000).expand([x.shape[-1]]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfCauchy(20))
    with nf.silo_plate("row", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)


def quality(draws: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Return accuracy and mean log likelihood of test rows, averaged over draws."""
    eta = x @ draws.T
    p = np.clip((1 / (1 + np.exp(-eta))).mean(1), 1e-12, 1 - 1e-12)
    return float(((p > 0.5) == y).mean()), float(np.log(np.where(y == 1, p, 1 - p)).mean())


def clients(x: np.ndarray, y: np.ndarray, number: int, uneven: bool, seed: int) -> list[dict]:
    """Return the rows of each client."""
    r = np.random.default_rng(seed)
    share = r.uniform(1, 20, number) if uneven else np.ones(number)
    cuts = np.round(np.cumsum(share / share.sum())[:-1] * len(y)).astype(int)
    return [
        dict(x=a, y=b) for a, b in zip(np.split(x, cuts), np.split(y, cuts), strict=True) if len(b)
    ]


def pooled(x: np.ndarray, y: np.ndarray, seed: int) -> np.ndarray:
    """Return draws (1000, d) of the normal approximation at the mode of all rows, without noise."""
    x, mode = x.astype(float), np.zeros(x.shape[1])
    for _ in range(12):  # of Newton's method; the last steps are below 1e-8
        p = 1 / (1 + np.exp(-x @ mode))
        curvature = (x * (p * (1 - p))[:, None]).T @ x + np.eye(len(mode))
        mode = mode + np.linalg.solve(curvature, x.T @ (y - p) - mode)
    root = np.linalg.cholesky(np.linalg.inv(curvature))
    return mode + np.random.default_rng(seed).normal(size=(1_000, len(mode))) @ root.T


def adult(seeds: int) -> Lines:
    """Yield accuracy and log likelihood of private fits of Adult, and of fits without noise."""
    for number, epsilon, uneven in (*ADULT, (1, None, False)):
        found = []
        for seed in range(seeds):
            x, y, x_test, y_test = load_tabular("adult", seed)
            x, x_test = (np.concatenate([np.ones((len(a), 1)), a], 1) for a in (x, x_test))
            began = time.time()
            if epsilon is None:
                found.append((*quality(pooled(x, y, seed), x_test, y_test), 0, time.time() - began))
                continue
            silos = clients(x, y.astype(int), number, uneven, seed)
            budget = nf.Privacy(epsilon=epsilon, delta=DELTA, trusted="sum")
            fitted = nf.fit(
                jax.random.key(seed), logistic, silos, privacy=budget, progress_bar=False
            )
            draws = np.asarray(fitted.sample_posterior(jax.random.key(1), 1_000)["beta"])
            exchanges, seconds = fitted.num_exchanges, time.time() - began
            found.append((*quality(draws, x_test, y_test), exchanges, seconds))
        mean, sd = np.mean(found, 0), np.std(found, 0)
        kind = "uneven" if uneven else "even"
        yield [
            f"{number}, {kind}",
            f"{epsilon}",
            f"{mean[0]:.4f} ({sd[0]:.4f})",
            f"{mean[1]:.4f} ({sd[1]:.4f})",
            f"{mean[2]:.0f}",
            f"{mean[3]:.0f} s",
        ]


def with_effects(hospitals: int) -> Callable[..., None]:
    """Return a logistic regression with an effect for each of so many hospitals."""

    def model(x: Array, hospital: Array, y: Array | None = None) -> None:
        beta = numpyro.sample("beta", dist.Normal(0, 10).expand([x.shape[-1]]).to_event(1))
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        u = numpyro.sample("u", dist.Normal(0, tau).expand([hospitals]).to_event(1))
        with nf.silo_plate("patient", x.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=x @ beta + u[hospital]), obs=y)

    return model


def registry() -> list[dict[str, np.ndarray]]:
    """Return the hospitals of ``few_messages.py``, numbered."""
    return [
        dict(x=silo["x"], hospital=silo["hospital"] + j, y=silo["y"])
        for j, silo in enumerate(hospitals())
    ]


def studies() -> Lines:
    """Yield errors and widths of private fits of two studies against NUTS."""
    for name, model, silos in (
        ("six cities", six_cities.model, six_cities.silos()),
        ("registry", with_effects(6), registry()),
    ):
        nuts = nf.run_nuts(jax.random.key(2), model, silos, num_chains=2, progress_bar=False)
        exact = {k: np.reshape(v, (-1, *np.shape(v)[2:])) for k, v in nuts.globals.items()}
        method = nf.DPNewton(model, privacy=nf.Privacy(epsilon=2.0, delta=1e-5))
        result = method.run(jax.random.key(0), silos=silos, progress_bar=False)
        draws = result.sample_posterior(jax.random.key(1), 10_000)
        pairs = [(np.asarray(draws[k]), exact[k]) for k in exact if k in draws]
        error = [np.abs(a.mean(0) - b.mean(0)) / b.std(0) for a, b in pairs]
        width = [a.std(0) / b.std(0) for a, b in pairs]
        of_noise = [np.abs(a.mean(0) - b.mean(0)) / a.std(0) for a, b in pairs]
        error, width, of_noise = (
            np.concatenate([np.ravel(part) for part in found]) for found in (error, width, of_noise)
        )
        yield [
            f"{name}",
            f"{result.num_globals}",
            f"{np.median(error):.1f}",
            f"{np.median(width):.1f}",
            f"{of_noise.max():.1f}",
            f"{'yes' if result.settled else result.doubt}",
        ]


def one_silo(silo: object) -> Conversation:
    """Return the questions to a single silo, which adds nothing up."""
    stack: Any = jax.tree.map(lambda a: np.asarray(a)[None], silo)
    transport = transport_of_stacks((Batch(np.zeros(1, np.int32), stack),))
    first = private_newton.Answered(*np.zeros((3, 1), np.int32))
    return Conversation(transport, jax.random.key(0), 1, (first,))


def searched(parts: PrivateNewton, ask: AskSilos) -> NewtonServer:
    """Return the end of a private search."""
    server = parts.algorithm.init_server(jax.random.key(0))
    while server.phase < len(parts.schedule.phases):
        server = parts.phase(ask, server)
    return server


def simulated(kind: str, key: Array, n: int) -> tuple[dict[str, Array], Array]:
    """Return a data set with raw covariates, and the globals that it was drawn from."""
    k = jax.random.split(key, 4)
    age = jax.random.uniform(k[0], (n,), minval=20, maxval=80)
    dose = jnp.exp(4 + 0.5 * jax.random.normal(k[1], (n,)))
    sex = jax.random.bernoulli(k[2], 0.4, (n,)) * 1.0
    x = jnp.stack([jnp.ones(n), age, dose, sex], 1)
    if kind == "linear":
        beta = jnp.array([90, 0.6, -0.05, 3.0])
        y = x @ beta + 12 * jax.random.normal(k[3], (n,))
        return dict(x=x, y=y), jnp.append(beta, jnp.log(12.0))
    beta = jnp.array([-3, 0.05, -0.004, 0.7])
    return dict(x=x, y=jax.random.bernoulli(k[3], jax.nn.sigmoid(x @ beta)).astype(int)), beta


@dataclass(frozen=True, eq=False)
class Shards(PrivateUnits):
    """Units of several rows each, whose update of natural parameters is clipped as a whole.

    Of a normal factor that update is gradient and curvature, which the rows of a shard add up.
    Without one of its rows a shard has another update, and not none: a sum may change by twice the
    clip.
    """

    rows: int = 1

    def log_likelihoods(self, z: Array, data: SiloData) -> Array:
        """Return the log likelihood of each shard (rows / shard,)."""
        return super().log_likelihoods(z, data).reshape(-1, self.rows).sum(1)


def fits(
    kind: str, n: int, epsilon: float, sets: int, shard: int = 1
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return errors and sds (sets, d) of private fits, and which of them (sets,) are trusted."""
    model = wide_linear if kind == "linear" else wide_logistic
    with precision(double=True):
        example, _ = simulated(kind, jax.random.key(0), n)
        (like,) = read([{k: np.asarray(v) for k, v in example.items()}], model)
        fm = split(model, [like])
        budget = nf.Privacy(epsilon=epsilon, delta=1e-6)
        schedule = Releases.of(budget, fm.dim, n // shard, 1)
        units = PrivateUnits(fm, 1, False, noisy)
        if shard > 1:
            units = Shards(fm, 1, False, noisy, changes=2.0, rows=shard)
        parts = PrivateNewton(units, schedule, n // shard, rows_in_unit=shard)
        found = []
        for key in jax.random.split(jax.random.key(7), sets):
            data, truth = simulated(kind, key, n)
            silo = jax.tree.unflatten(jax.tree.structure(like), [data["x"], data["y"]])
            end = searched(parts, one_silo(silo))
            sd = np.sqrt((end.root**2).sum(1))
            settled = 0 <= end.moved <= NEAR and end.undetermined == 0 and not end.coarse
            found.append((end.loc - np.asarray(truth), sd, settled))
        error, sds, all_settled = map(np.stack, zip(*found, strict=True))
    return error, sds, all_settled


def coverage(kind: str, n: int, epsilon: float, sets: int) -> Lines:
    """Yield how often 90 % intervals hold the truth, and how often a fit is trusted."""
    z, sd, settled = fits(kind, n, epsilon, sets)
    z = z / sd
    inside = np.abs(z) < WIDTH
    error = np.sqrt(0.09 / (settled.sum() * z.shape[1]))
    yield [
        f"{kind}",
        f"{n:,}",
        f"{epsilon}",
        f"{settled.mean():.1%}",
        f"{inside[settled].mean():.1%} ({error:.1%})",
        f"{np.round(inside[settled].mean(0), 3)}",
        f"{np.round(z[settled].mean(0), 2)}",
    ]


def shards(sets: int) -> Lines:
    """Yield what it costs to clip the updates of several rows together."""
    alone = None
    for shard in (1, 2, 5, 20):
        errors, sds, settled = fits("logistic", 10_000, 1.0, sets, shard)
        found = np.median(np.abs(errors), 0), np.median(sds, 0)
        alone = found if alone is None else alone
        error, sd = (np.median(now / then) for now, then in zip(found, alone, strict=True))
        yield [f"{shard}", f"{settled.mean():.1%}", f"{error:.2f}", f"{sd:.2f}"]


def poisson(x: Array, y: Array | None = None) -> None:
    """Declare a Poisson regression with wide priors, for raw covariates."""
    beta = numpyro.sample("beta", dist.Normal(0, 20).expand([x.shape[-1]]).to_event(1))
    with nf.silo_plate("row", x.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(x @ beta)), obs=y)


def raw_studies() -> dict[str, tuple[Any, list[dict[str, np.ndarray]]]]:
    """Return models and silos: a calendar year, few events, counts, and hospitals' effects."""
    r = np.random.default_rng(77)

    def cut(sizes: tuple[int, ...], **columns: np.ndarray) -> list[dict[str, np.ndarray]]:
        at = np.cumsum(sizes)[:-1]
        pieces = zip(*(np.split(column, at) for column in columns.values()), strict=True)
        return [dict(zip(columns, piece, strict=True)) for piece in pieces]

    def ones(eta: np.ndarray) -> np.ndarray:
        return r.binomial(1, 1 / (1 + np.exp(-eta)))

    year, weight = r.integers(1998, 2024, 9_000), r.normal(75, 15, 9_000)
    of_year = np.stack([np.ones(9_000), year, weight], 1)
    died = ones(-0.8 + 0.06 * (year - 2011) - 0.02 * (weight - 75))
    age, pressure = r.gamma(4, 12, 12_000), r.normal(130, 20, 12_000)
    sex = r.integers(0, 2, 12_000)
    of_events = np.stack([np.ones(12_000), age, pressure, sex], 1)
    few = ones(-4.2 + 0.02 * age + 0.006 * pressure + 0.3 * sex)
    years = r.uniform(0, 90, 6_000)
    visits = r.poisson(np.exp(-1 + 0.03 * years))
    sizes = (40, 300, 1_200, 2_460, 3_000)
    hospital = np.repeat(np.arange(5), sizes)
    patients = np.stack([np.ones(7_000), r.normal(62, 11, 7_000), r.lognormal(3, 0.5, 7_000)], 1)
    ill = ones(patients @ [-3, 0.04, -0.01] + r.normal(0, 0.6, 5)[hospital])
    return {
        "year": (wide_logistic, cut((4_000, 2_000, 3_000), x=of_year, y=died)),
        "few events": (wide_logistic, cut((7_000, 5_000), x=of_events, y=few)),
        "counts": (poisson, cut((2_000, 4_000), x=np.stack([np.ones(6_000), years], 1), y=visits)),
        "hospitals": (with_effects(5), cut(sizes, x=patients, hospital=hospital, y=ill)),
    }


@dataclass(frozen=True, eq=False)
class Repeats:
    """Private fits of the same data, and the posterior without noise.

    Attributes
    ----------
    own, error, width : (fits, globals)
        How far means are off, in the sds that a fit says and in those without noise, and those sds
        by those.
    trusted : (fits,)
    exchanges : float
        The median.
    """

    own: np.ndarray
    error: np.ndarray
    width: np.ndarray
    trusted: np.ndarray
    exchanges: float

    @classmethod
    def of(cls, model: Any, silos: list[dict], budget: nf.Privacy, repeats: int) -> Repeats:
        """Return how far so many private fits of the same rows are off."""
        exact = _flat(nf.fit(jax.random.key(0), model, silos, progress_bar=False))
        run, key = nf.DPNewton(model, privacy=budget).run, jax.random.key(0)
        found = [run(key, None, silos, progress_bar=False) for _ in range(repeats)]
        draws = np.stack([_flat(result) for result in found])
        away = np.abs(draws.mean(1) - exact.mean(0))
        return cls(
            away / draws.std(1),
            away / exact.std(0),
            draws.std(1) / exact.std(0),
            np.array([result.settled for result in found]),
            float(np.median([result.num_exchanges for result in found])),
        )


def _flat(fitted: Any) -> np.ndarray:
    draws = fitted.sample_posterior(jax.random.key(1), 4_000)
    return np.concatenate([np.reshape(draw, (4_000, -1)) for draw in draws.values()], 1)


def search(patience: int, longest: float) -> Lines:
    """Yield how private fits do by the constants of the search, once in a process."""
    private_newton.PATIENCE, private_newton.LONGEST = patience, longest
    for name, (model, silos) in raw_studies().items():
        for epsilon in (1.0, 3.0):
            budget = nf.Privacy(epsilon=epsilon, delta=1e-6, trusted="sum")
            fits = Repeats.of(model, silos, budget, 12)
            own = fits.own[fits.trusted].max(initial=0)
            yield [
                f"{name}",
                f"{epsilon}",
                f"{patience}",
                f"{longest}",
                f"{fits.trusted.mean():.0%}",
                f"{own:.1f}",
                f"{np.median(fits.error):.2f}",
                f"{fits.exchanges:.0f}",
            ]


def few_rows() -> Lines:
    """Yield how far off fits of few rows are in the sds that they say, in two silos each."""
    r = np.random.default_rng(5)
    for kind, n, epsilon in FEW:
        data: dict[str, Any]
        if kind in ("linear", "logistic"):
            model = wide_linear if kind == "linear" else wide_logistic
            data = simulated(kind, jax.random.key(5), n)[0]
        elif kind == "Poisson":
            model, age = poisson, r.uniform(0, 90, n)
            data = dict(x=np.stack([np.ones(n), age], 1), y=r.poisson(np.exp(-1 + 0.03 * age)))
        else:
            model, x = logistic, np.stack([np.ones(n), r.normal(size=n)], 1)
            data = dict(x=x, y=r.binomial(1, 1 / (1 + np.exp(-x @ [0.5, -1.0]))))
        silos = [
            {k: np.asarray(v)[part] for k, v in data.items()} for part in np.r_[0:n].reshape(2, -1)
        ]
        fits = Repeats.of(model, silos, nf.Privacy(epsilon=epsilon, delta=DELTA), 80)
        off = fits.own.max(1)
        furthest = off[fits.trusted].max(initial=0)
        yield [
            f"{kind}",
            f"{n}",
            f"{epsilon}",
            f"{fits.trusted.mean():.0%}",
            f"{(off > 3).mean():.0%}",
            f"{(off > 5).mean():.0%}",
            f"{furthest:.1f}",
            f"{np.median(fits.width):.1f}",
        ]


# A name; a residual's sd, its prior; coefficients of a constant, an age and a sex; their prior sd.
UNITS: dict[str, tuple[float, dist.Distribution, list[float], float]] = {
    "euros, sd 800, HalfNormal(2000)": (800.0, dist.HalfNormal(2000.0), [3000, 40, -500], 1e5),
    "grams, sd 0.02, Exponential(20)": (0.02, dist.Exponential(20.0), [0.3, 0.001, 0.01], 10),
    "mmHg, sd 15, InverseGamma(0.1, 0.1)": (15.0, dist.InverseGamma(0.1, 0.1), [90, 0.5, 4], 1e3),
}


def units() -> Lines:
    """Yield how private fits of linear regressions do in units of raw data, two silos each."""
    for name, (sd, prior, beta, wide) in UNITS.items():

        def model(x: Array, y: Array | None = None, prior: Any = prior, wide: float = wide) -> None:
            beta = numpyro.sample("beta", dist.Normal(0, wide).expand([3]).to_event(1))
            sigma = numpyro.sample("sigma", prior)
            with nf.silo_plate("row", x.shape[0]):
                numpyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)

        for n, epsilon in ((3_000, 1.0), (6_000, 1.0), (20_000, 1.0), (20_000, 3.0)):
            r = np.random.default_rng(11)
            x = np.stack([np.ones(n), r.gamma(9, 6, n), r.integers(0, 2, n)], 1)
            y = x @ beta + sd * r.normal(size=n)
            silos = [dict(x=x[part], y=y[part]) for part in np.split(np.arange(n), [n // 3])]
            fits = Repeats.of(model, silos, nf.Privacy(epsilon=epsilon, delta=DELTA), 20)
            off = fits.own.max(1)
            yield [
                name,
                f"{n:,}",
                f"{epsilon}",
                f"{fits.trusted.mean():.0%}",
                f"{(off > 3).mean():.0%}",
                f"{off[fits.trusted].max(initial=0):.1f}",
                f"{np.median(fits.width):.1f}",
                f"{fits.exchanges:.0f}",
            ]


# Of each part the heads of its columns; the first ones say what a line is about.
HEADS = {
    "adult": (2, ["clients", "epsilon", "accuracy", "log likelihood", "exchanges", "time"]),
    "coverage": (
        3,
        ["model", "rows", "epsilon", "trusted", "covered (error)", "by coordinate", "bias, sds"],
    ),
    "shards": (
        1,
        ["rows in a shard", "trusted", "error, to that of rows alone", "sd, to the same"],
    ),
    "search": (
        4,
        ["data", "epsilon", "patience", "longest", "trusted", "furthest", "error", "exchanges"],
    ),
    "few": (
        3,
        ["model", "rows", "epsilon", "trusted", "3 sds off", "5", "trusted, furthest", "width"],
    ),
    "units": (
        3,
        ["model", "rows", "epsilon", "trusted", "3 sds off", "furthest", "width", "exchanges"],
    ),
    "studies": (1, ["study", "globals", "error", "width", "furthest, in own sds", "trusted"]),
}


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--parts", nargs="+", choices=HEADS, default=["adult", "coverage", "studies"]
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--sets", type=int, default=500)
    parser.add_argument("--patience", type=int, default=private_newton.PATIENCE)
    parser.add_argument("--longest", type=float, default=private_newton.LONGEST)
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    args = parser.parse_args()
    parts: dict[str, Callable[[], Iterable[list[str]]]] = {
        "adult": lambda: adult(args.seeds),
        "coverage": lambda: (line for case in COVERAGE for line in coverage(*case, args.sets)),
        "shards": lambda: shards(args.sets),
        "search": lambda: search(args.patience, args.longest),
        "few": few_rows,
        "units": units,
        "studies": studies,
    }
    report: dict[str, list[dict[str, str]]] = {}
    rows = []
    for part in args.parts:
        (about, heads), report[part] = HEADS[part], []
        print("| " + " | ".join(heads) + " |")
        for cells in parts[part]():
            print("| " + " | ".join(cells) + " |", flush=True)
            report[part].append(dict(zip(heads, cells, strict=True)))
            words = [f"{head} {cell}" for head, cell in zip(heads, cells, strict=True)]
            what = f"{part}: {', '.join(words[:about])}"
            target = "88 to 92 %" if part == "coverage" else ""
            rows.append(table_row(what, ", ".join(words[about:]), target=target))
    if args.json:
        write(args.json, rows, details=report)


if __name__ == "__main__":
    main()
