"""Small models with known answers, and the pieces of a fit laid open, for several test files."""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import models
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax

import numpyro_fed as nf
from numpyro_fed.data.silo_data import SiloData, read
from numpyro_fed.guides.guide import Guide
from numpyro_fed.guides.objectives import draws_by_plate
from numpyro_fed.guides.silo_bounds import AtDraw, SiloBound
from numpyro_fed.guides.structured import build_guide, resolve_guide
from numpyro_fed.rounds.exchange import FederatedAlgorithm
from numpyro_fed.sfvi.algorithm import SFVIAlgorithm
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.split import split
from numpyro_fed.text.traces import Traces


def build(spec, fm, sizes):
    """The guide for a model and the rows of each silo plate at each silo."""
    largest = {p.name: max(size[p.name] for size in sizes) for p in fm.plates}
    total = {p.name: sum(size[p.name] for size in sizes) for p in fm.plates}
    return build_guide(spec, resolve_guide(spec, fm, largest, total), fm)


def glmm(x, y=None):
    """Logistic regression with one random intercept for each child, as in the six cities study."""
    beta = numpyro.sample("beta", dist.Normal(0, 10).expand([x.shape[-1]]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(2.0))
    with nf.silo_plate("child", x.shape[0], dim=-2):
        b = numpyro.sample("b", dist.Normal(0, scale))
        with numpyro.plate("visit", x.shape[1], dim=-1):
            numpyro.sample("y", dist.Bernoulli(logits=x @ beta + b), obs=y)


def glmm_silos(sizes, seed=0):
    """The same 4 visits of each child, cut up by ``sizes``."""
    r = np.random.default_rng(seed)
    n = sum(sizes)
    x, y = r.normal(size=(n, 4, 2)), r.binomial(1, 0.4, (n, 4)).astype(float)
    return cut({"x": x, "y": y}, sizes)


def grouped(number):
    """Effects of groups and their scale, all of them globals: of both there is no joint mode."""

    def model(g, y):
        mu = numpyro.sample("mu", dist.Normal(0, 10.0))
        tau = numpyro.sample("tau", dist.HalfNormal(5.0))
        b = numpyro.sample("b", dist.Normal(mu, tau).expand([number]).to_event(1))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(b[g], 2.0), obs=y)

    return model


def cut(rows, sizes):
    """Cut every array of a pytree along its first axis into consecutive pieces."""
    ends = list(itertools.accumulate(sizes))
    return [
        jax.tree.map(lambda a, lo=lo, hi=hi: a[lo:hi], rows)
        for lo, hi in zip([0, *ends], ends, strict=False)
    ]


def counts_of(sizes):
    """Counts of silos of these sizes that an intercept, a covariate and noise explain."""
    r, n = np.random.default_rng(0), sum(sizes)
    x = np.stack([np.ones(n), r.normal(size=n)], 1)
    y = r.poisson(np.exp(x @ [0.5, 0.3] + 0.5 * r.normal(size=n)))
    return cut({"x": x, "y": y}, sizes)


class Parts(NamedTuple):
    """What a fit is made of."""

    model: FederatedModel
    guide: Guide
    bound: SiloBound
    algorithm: FederatedAlgorithm
    silos: list[SiloData]
    sizes: list[dict[str, int]]

    def value(self, theta, eta, z_G, coordinates, noise, data):
        """The bound of one silo, as a function of arrays."""
        return self.bound.value(AtDraw(theta, eta, z_G, coordinates, data), noise)


def parts(model, silos, *, guide=None, objective=None, optim=None, num_particles=1) -> Parts:
    """Everything between a model and a runtime, for tests that call it directly."""
    data = read(silos)
    fm = split(model, data)
    traces = Traces(model)
    sizes = [traces.at(silo).structure.sizes for silo in data]
    built = build(guide, fm, sizes)
    bound = SiloBound(fm, built, draws_by_plate(objective or nf.ELBO(), built))
    method = SFVIAlgorithm(fm, built, bound, optim or optax.sgd(1.0), num_particles, len(data))
    algorithm = method.algorithm()
    return Parts(fm, built, bound, algorithm, data, sizes)


def jitter(tree: Any, scale: float = 0.3, seed: int = 0) -> Any:
    """A pytree of numbers moved by random ones, so that no parameter is special."""
    r = np.random.default_rng(seed)
    return jax.tree.map(
        lambda a: a + jnp.asarray(scale * r.normal(size=np.shape(a)), a.dtype), tree
    )


def gauss_hermite(points: int, dim: int):
    """Nodes (points**dim, dim) and weights for expectations under standard normal noise.

    Exact for polynomials of degree below ``2 * points`` in each coordinate.
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(points)
    weights = weights / weights.sum()
    grid = np.stack([a.ravel() for a in np.meshgrid(*[nodes] * dim, indexing="ij")], -1)
    grids = np.meshgrid(*[weights] * dim, indexing="ij")
    return jnp.asarray(grid), jnp.asarray(np.prod([a.ravel() for a in grids], axis=0))


regression = models.linear(100, 2.0)


def raw_rows(n=60):
    """An IQ near 100, an income, and an intercept."""
    r = np.random.default_rng(1)
    x = np.stack([np.ones(n), r.normal(100, 15, n), np.exp(r.normal(10, 1, n))], 1)
    return {"x": x, "y": x @ [20.0, 0.5, 1e-3] + 2 * r.normal(size=n)}
