"""A handler that lets models with flat priors run, and predicates on distributions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro.contrib.control_flow.scan import scan_wrapper
from numpyro.distributions import Distribution, biject_to
from numpyro.primitives import Messenger

from numpyro_fed.errors import ModelError
from numpyro_fed.model.primitives import inside_control_flow


class feasible(Messenger):
    """Let a model run whose flat priors (``ImproperUniform``) cannot be sampled.

    Such latents get the value at zero of unconstrained space. Parameters and flat priors in the
    body of a scan are refused, since nobody can set their values.
    """

    def __init__(self, fn: Callable[..., Any] | None = None, *, scanned: bool = False):
        self.scanned = scanned
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        scanned = self.scanned or (msg["type"] == "control_flow" and msg["fn"] is scan_wrapper)
        if inside_control_flow(msg, lambda body: feasible(body, scanned=scanned)):
            return
        if msg["type"] == "param" and scanned:
            # NumPyro's substitute handlers reach the latents of a scan's body, but not parameters.
            raise ModelError(
                f"the numpyro.param '{msg['name']}' stands in the body of a scan, where NumPyro "
                "cannot set it, so that it would keep its first value. Put it before the scan."
            )
        if msg["type"] != "sample" or msg["is_observed"]:
            return
        if is_flat(msg["fn"]) and msg["value"] is None:
            if scanned:
                raise ModelError(
                    f"the prior of the latent site '{msg['name']}' is flat (ImproperUniform) and "
                    "stands in the body of a scan, where it has no value to begin with. Give it a "
                    "proper prior, however wide, such as dist.Normal(0, 100)."
                )
            fn = msg["fn"]
            bijection = biject_to(fn.support)
            shape = bijection.inverse_shape(fn.shape(msg["kwargs"]["sample_shape"]))
            msg["value"] = bijection(jnp.zeros(shape))


def is_flat(fn: Distribution) -> bool:
    """Return whether a prior is ``ImproperUniform``, which cannot be sampled."""
    return isinstance(unwrapped(fn), dist.ImproperUniform)


def is_foreign(fn: Distribution) -> bool:
    """Return whether a distribution, or a part of it, is the user's own class.

    Its ``sample`` may not agree with its ``log_prob``.
    """
    parts = jax.tree.leaves(list(vars(fn).values()), is_leaf=lambda x: isinstance(x, Distribution))
    ours = type(fn).__module__.partition(".")[0] in ("numpyro", "numpyro_fed")
    return not ours or any(is_foreign(x) for x in parts if isinstance(x, Distribution))


def unwrapped(fn: Distribution) -> Distribution:
    """Return a distribution without the wrappers of ``expand`` and ``to_event``."""
    while isinstance(fn, dist.Independent | dist.ExpandedDistribution):
        fn = fn.base_dist
    return fn
