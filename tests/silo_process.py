"""A silo as an operating-system process of its own, for tests: bytes in, bytes out."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax

import numpyro_fed as nf


def model(x, y):
    """Correlated globals, a scale among them, and a latent for each row."""
    beta = numpyro.sample("beta", dist.Normal(0, 2).expand([2]).to_event(1))
    log_tau = numpyro.sample("log_tau", dist.Normal(0, 1))
    with nf.silo_plate("row", y.shape[0]):
        b = numpyro.sample("b", dist.Normal(0, jnp.exp(log_tau)))
        numpyro.sample("y", dist.Poisson(jnp.exp(x @ beta + b)), obs=y)


METHODS = {
    "sfvi": lambda: nf.SFVI(model, optim=optax.adam(1e-2), num_particles=2),
    "averaged": lambda: nf.SFVIAvg(model, local_steps=5),
    "barycenter": lambda: nf.SFVIAvg(model, local_steps=5, aggregate="reverse_kl", start=None),
    "amortised": lambda: nf.SFVI(
        model, guide=nf.guides.Amortised(hidden=4), schedule=nf.schedules.Random(2), batch_size=3
    ),
    "sequential": lambda: nf.PVI(model, local=nf.local.Optax(steps=50)),
    "synchronous": lambda: nf.PVI(model, schedule="synchronous", local=nf.local.Optax(steps=50)),
}


def predictor(x):
    """Of a client that holds columns."""
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    return scale * (x @ numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1)))


def columns_model(xs, y):
    """Columns of every row at three clients."""
    b = numpyro.sample("b", dist.Normal(0, 1))
    eta = nf.client_sum("client", predictor, xs)
    with numpyro.plate("row", eta.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(b + eta)), obs=y)


VERTICAL = {
    "exact": lambda: nf.VFL(columns_model, num_particles=2),
    "augmented": lambda: nf.VFL(columns_model, rho=0.5, batch_size=6),
    "power": lambda: nf.VFL(columns_model, rho=0.5, likelihood="power", share_response=True),
}


NAMES = {"model": model, "columns_model": columns_model}
NAMES |= {name: method() for name, method in {**METHODS, **VERTICAL}.items()}


def serve(rows, columns, pipe):
    """Answer messages as they come until an empty one.

    A first byte says of each whether the silo of rows is asked, or the client with columns.
    """
    jax.config.update("jax_enable_x64", True)
    policy = nf.Policy(min_rows=1, parameters_per_row=20.0)
    options = dict(names=NAMES, policy=policy, secret=None, allow_unhidden=True)
    held = {b"r": nf.Silo(rows, **options), b"c": nf.Silo(columns, **options)}
    while message := pipe.recv_bytes():
        pipe.send_bytes(held[message[:1]].answer(message[1:]))
