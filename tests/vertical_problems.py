"""Vertical models with known answers, for several test files."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import numpyro
import numpyro.distributions as dist
from apart import Apart
from jax.scipy.linalg import block_diag
from laid_open import inside

import numpyro_fed as nf
from numpyro_fed.numerics.gaussian import unit_lower

KEY = jax.random.key(0)


linear = models.slopes()


def scaled(x):
    """With a bounded latent and a factor of its own."""
    scale = numpyro.sample("scale", dist.HalfNormal(2.0))
    numpyro.factor("shrink", -scale)
    return scale * linear(x)


def gaussian(xs, y=None, offset=0.0):
    b = numpyro.sample("b", dist.Normal(0, 1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    eta = nf.client_sum("client", linear, xs)
    with numpyro.plate("obs", eta.shape[0]):
        numpyro.sample("y", dist.Normal(b + eta + offset, sigma), obs=y)


def logistic(xs, y=None):
    b = numpyro.sample("b", dist.Normal(0, 1))
    eta = nf.client_sum("client", [scaled, *([linear] * (len(xs) - 1))], xs)
    with numpyro.plate("obs", eta.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=b + eta), obs=y)


def data(n=12, widths=(2, 3, 3), seed=0):
    r = np.random.default_rng(seed)
    return [r.normal(size=(n, p)).astype(np.float32) for p in widths], r.integers(0, 2, n)


def drawn(model, *args, **kwargs):
    """Values of all latents, by NumPyro itself."""
    trace = numpyro.handlers.trace(numpyro.handlers.seed(model, 3)).get_trace(*args, **kwargs)
    return {
        name: site["value"]
        for name, site in trace.items()
        if site["type"] == "sample" and not site["is_observed"]
    }


def log_det(half, z):
    """Of the bijections, which the joint density of NumPyro's model does not have."""
    total = 0.0
    for s in half.named("latent"):
        bijection = numpyro.distributions.biject_to(half.structure.supports[s.name])
        u = z[s.start : s.stop].reshape(s.shape)
        total += bijection.log_abs_det_jacobian(u, bijection(u)).sum()
    return total


def overdispersed(xs, y=None):
    """The sum is in the distribution of a latent for each row."""
    eta = nf.client_sum("client", linear, xs)
    with numpyro.plate("obs", eta.shape[0]):
        u = numpyro.sample("u", dist.Normal(eta, 0.5))
        numpyro.sample("y", dist.Poisson(jnp.exp(u)), obs=y)


def root_of_guide(eta):
    """Of the covariance of a full Gaussian guide."""
    return unit_lower(eta["below"], len(eta["loc"])) * jnp.exp(eta["log_scale"])


def one_by_one(result, stacks):
    """Silo states by client."""
    return inside(result).one_by_one(stacks)


CASES = {
    "exact": (dict(), lambda model: model),
    "sharing": (dict(rank=3), lambda model: model),
    "augmented": (dict(rho=0.7, rank=2), lambda model: nf.handlers.augment(model, 0.7)),
    "power": (
        dict(rho=0.7, likelihood="power", share_response=True),
        lambda model: nf.handlers.power_likelihood(model, 0.7),
    ),
}


def known_noise(xs, y=None, sigma=0.7):
    b = numpyro.sample("b", dist.Normal(0, 1))
    eta = nf.client_sum("client", linear, xs)
    with numpyro.plate("obs", eta.shape[0]):
        numpyro.sample("y", dist.Normal(b + eta, sigma), obs=y)


def gaussian_data():
    r = np.random.default_rng(1)
    return [r.normal(size=(15, p)) for p in (2, 1, 2)], r.normal(size=15)


def joint_normal(result):
    """Mean and covariance of all parties' latents under the guide."""
    server = result.params["guide"]
    parties = [server, *(result.client_params(j)["guide"] for j in range(result.num_clients))]
    T = block_diag(*(root_of_guide(p["latents"]) for p in parties))
    loc = jnp.concatenate([p["latents"]["loc"] for p in parties])
    if "shared" not in server:
        return loc, T @ T.T
    W = T @ jnp.concatenate([p["coupling"] for p in parties])
    L = root_of_guide(server["shared"])
    covariance = T @ T.T + W @ L @ L.T @ W.T
    return loc + W @ server["shared"]["loc"], 0.5 * (covariance + covariance.T)


centred = models.sum_of_clients(0.7)


def over_nodes(method, **options):
    """Clients of this process with bytes between them and the server, and a run."""
    xs, y = data()
    there = Apart(method, xs, **options)
    return there.silos, lambda n: there.run(KEY, n, y)


one_silo = models.level(1)


def exact_of_known_noise(xs, y):
    """Posterior of (b, beta), and the log evidence."""
    x = np.concatenate([np.ones((len(y), 1)), *xs], 1)
    precision = np.eye(x.shape[1]) + x.T @ x / 0.49
    covariance = np.linalg.inv(precision)
    marginal = 0.49 * np.eye(len(y)) + x @ x.T
    evidence = -0.5 * (
        y @ np.linalg.solve(marginal, y)
        + np.linalg.slogdet(marginal)[1]
        + len(y) * np.log(2 * np.pi)
    )
    return covariance @ (x.T @ y) / 0.49, np.sqrt(np.diag(covariance)), evidence
