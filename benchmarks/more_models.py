"""Seven more models that people bring, for ``user_models.py``, which runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_fed as nf

Silos = list[dict[str, Any]]
TIMES, POINTS, HOSPITALS = 40, 11, 5


def cut(rows: dict[str, np.ndarray], *cuts: int) -> Silos:
    """Rows, cut up into silos."""
    parts = {k: np.split(v, cuts) for k, v in rows.items()}
    return [{k: p[j] for k, p in parts.items()} for j in range(len(cuts) + 1)]


def squared_exponential(places: np.ndarray, length: Any, amplitude: Any) -> Any:
    """A covariance (n, n) over places (n,), with a little on its diagonal."""
    distance = (places[:, None] - places) / length
    return amplitude**2 * jnp.exp(-0.5 * distance**2) + 1e-6 * jnp.eye(len(places))


def curve(time, y=None):
    """A Gaussian process over forty times, shared by all silos."""
    length = numpyro.sample("length", dist.InverseGamma(5.0, 5.0))
    amplitude = numpyro.sample("amplitude", dist.HalfNormal(1.0))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    e = numpyro.sample("e", dist.Normal(0, 1).expand([TIMES]).to_event(1))
    root = jnp.linalg.cholesky(squared_exponential(np.linspace(-1, 1, TIMES), length, amplitude))
    f = numpyro.deterministic("f", root @ e)
    with nf.silo_plate("row", time.shape[0]):
        numpyro.sample("y", dist.Normal(f[time], noise), obs=y)


def curve_data(r: np.random.Generator) -> Silos:
    time = r.integers(0, TIMES, 120)
    y = np.sin(4 * np.linspace(-1, 1, TIMES))[time] + 0.3 * r.normal(size=120)
    return cut(dict(time=time, y=y), 40, 90)


def rates(place, y=None):
    """A Gaussian process over eleven places, seen through Poisson counts."""
    length = numpyro.sample("length", dist.InverseGamma(5.0, 5.0))
    amplitude = numpyro.sample("amplitude", dist.HalfNormal(1.0))
    e = numpyro.sample("e", dist.Normal(0, 1).expand([POINTS]).to_event(1))
    root = jnp.linalg.cholesky(squared_exponential(np.linspace(-1, 1, POINTS), length, amplitude))
    f = numpyro.deterministic("f", root @ e)
    with nf.silo_plate("row", place.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f[place])), obs=y)


def rates_data(r: np.random.Generator) -> Silos:
    place = r.integers(0, POINTS, 33)
    y = r.poisson(np.exp(np.sin(3 * np.linspace(-1, 1, POINTS)))[place])
    return cut(dict(place=place, y=y), 12, 20)


def mixture(y):
    """Two groups, told apart by the order of their means."""
    ordered = dist.transforms.OrderedTransform()
    base = dist.Normal(0, 5).expand([2]).to_event(1)
    mean = numpyro.sample("mean", dist.TransformedDistribution(base, ordered))
    sd = numpyro.sample("sd", dist.HalfNormal(2.0).expand([2]).to_event(1))
    share = numpyro.sample("share", dist.Beta(5.0, 5.0))
    groups = dist.Categorical(probs=jnp.stack([share, 1 - share]))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.MixtureSameFamily(groups, dist.Normal(mean, sd)), obs=y)


def mixture_data(r: np.random.Generator) -> Silos:
    first = r.uniform(size=250) < 0.4
    y = np.where(first, -1.5 + 0.7 * r.normal(size=250), 1.5 + r.normal(size=250))
    return cut(dict(y=y), 60, 190)


def frailty(x, t, event, y=None):
    """Weibull survival in days with a frailty of each of five hospitals, one a silo."""
    beta = numpyro.sample("beta", dist.Normal(0, 10).expand([2]).to_event(1))
    shape = numpyro.sample("shape", dist.HalfNormal(3.0))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    with nf.silo_plate("hospital", 1):
        b = numpyro.sample("b", dist.Normal(0, tau))
    with nf.silo_plate("patient", x.shape[0]):
        scale = jnp.exp(x @ beta + b[0])
        log_hazard = jnp.log(shape / scale) + (shape - 1) * jnp.log(t / scale)
        numpyro.factor("y", jnp.where(event, log_hazard, 0.0) - (t / scale) ** shape)


def frailty_data(r: np.random.Generator) -> Silos:
    silos = []
    for n, b in zip((20, 150, 60, 35, 80), 0.5 * r.normal(size=HOSPITALS), strict=True):
        x = np.stack([np.ones(n), r.normal(60, 10, n)], 1)
        t = np.exp(x @ [8.0, -0.03] + b) * r.weibull(1.3, n)
        end = r.uniform(100, 1500, n)
        silos.append(dict(x=x, t=np.minimum(t, end), event=t < end))
    return silos


def zeros(x, y=None):
    """Zero-inflated counts."""
    beta = numpyro.sample("beta", dist.Normal(0, 10).expand([2]).to_event(1))
    gate = numpyro.sample("gate", dist.Beta(1.0, 1.0))
    with nf.silo_plate("row", x.shape[0]):
        numpyro.sample("y", dist.ZeroInflatedPoisson(gate, jnp.exp(x @ beta)), obs=y)


def zeros_data(r: np.random.Generator) -> Silos:
    x = np.stack([np.ones(300), r.normal(40, 12, 300)], 1)
    y = r.poisson(np.exp(x @ [-0.5, 0.03])) * (r.uniform(size=300) > 0.3)
    return cut(dict(x=x, y=y), 120, 260)


def grades(x, y=None):
    """Ordinal regression with five grades."""
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
    ordered = dist.transforms.OrderedTransform()
    base = dist.Normal(0, 5).expand([4]).to_event(1)
    cuts = numpyro.sample("cuts", dist.TransformedDistribution(base, ordered))
    with nf.silo_plate("row", x.shape[0]):
        numpyro.sample("y", dist.OrderedLogistic(x @ beta, cuts), obs=y)


def grades_data(r: np.random.Generator) -> Silos:
    x = np.stack([r.normal(55, 12, 400), r.integers(0, 2, 400)], 1)
    latent = x @ [0.05, 0.8] + r.logistic(size=400)
    y = np.digitize(latent, [1.0, 2.5, 3.5, 5.0])
    return cut(dict(x=x, y=y), 90, 330)


def residuals(x, y=None):
    """Three outcomes whose residuals are correlated."""
    beta = numpyro.sample("beta", dist.Normal(0, 100).expand([2, 3]).to_event(2))
    sd = numpyro.sample("sd", dist.HalfCauchy(10.0).expand([3]).to_event(1))
    root = numpyro.sample("root", dist.LKJCholesky(3, 2.0))
    with nf.silo_plate("row", x.shape[0]):
        law = dist.MultivariateNormal(x @ beta, scale_tril=sd[:, None] * root)
        numpyro.sample("y", law, obs=y)


def residuals_data(r: np.random.Generator) -> Silos:
    x = np.stack([np.ones(250), r.normal(75, 14, 250)], 1)
    covariance = np.array([[100.0, 40, 3], [40, 64, 1], [3, 1, 0.25]])
    beta = np.array([[90, 60, 1.0], [0.5, 0.2, 0.05]])
    y = x @ beta + r.multivariate_normal(np.zeros(3), covariance, 250)
    return cut(dict(x=x, y=y), 30, 170)


MODELS: dict[str, tuple[Callable, Callable[[np.random.Generator], Silos]]] = {
    "curve": (curve, curve_data),
    "rates": (rates, rates_data),
    "mixture": (mixture, mixture_data),
    "frailty": (frailty, frailty_data),
    "zeros": (zeros, zeros_data),
    "grades": (grades, grades_data),
    "residuals": (residuals, residuals_data),
}
