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
    "sequential": lambda: nf.PVI(model, local=nf.local.Optax(steps=50)),
    "synchronous": lambda: nf.PVI(model, schedule="synchronous", local=nf.local.Optax(steps=50)),
}


def serve(rows, number, pipe):
    """Take part in one federation after the other, each named by its method.

    First with facts, then plan and messages as they come, until an empty one; an empty name ends.
    """
    jax.config.update("jax_enable_x64", True)
    while name := pipe.recv_bytes().decode():
        node = nf.SiloNode(METHODS[name](), rows)
        pipe.send_bytes(node.facts().encode())
        node.accept(pipe.recv_bytes().decode(), number)
        while message := pipe.recv_bytes():
            pipe.send_bytes(node.handle(message))
