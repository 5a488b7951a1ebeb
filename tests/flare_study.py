"""A study for tests of NVFLARE: the same file at every party, and the data of three silos."""

import json
import os

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_fed as nf

SIZES = (16, 16, 12)


def plain(y):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    sigma = numpyro.sample("sigma", dist.HalfNormal(5))
    with nf.silo_plate("row", len(y)):
        numpyro.sample("y", dist.Normal(mu, sigma), obs=y)


steps = nf.SFVI(plain, start=None, num_particles=3)


def numbers():
    """Of all silos, in a list."""
    y = np.random.default_rng(1).normal(3, 2, sum(SIZES))
    return [{"y": part} for part in np.split(y, np.cumsum(SIZES)[:-1])]


def silo():
    """Of the silo whose number is in the environment."""
    return numbers()[int(os.environ["NUMPYRO_FED_SILO"])]


def figures(silos, num_steps=5):
    """Run two methods, and return what they found as plain numbers."""
    key, quiet = jax.random.key(0), {"progress_bar": False}
    found = {}
    for name, method, rounds in (("sfvi", steps, num_steps), ("pvi", nf.PVI(plain), 2)):
        result = method.run(key, rounds, silos, **quiet)
        draws = result.sample_posterior(key, 50)
        found[name] = {
            "losses": np.asarray(result.losses).tolist(),
            "posterior": {site: np.asarray(v).tolist() for site, v in draws.items()},
        }
    return found


def main(silos):
    print(json.dumps(figures(silos)))
