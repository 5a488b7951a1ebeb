"""What follows from the settings of PVI: its optimisers, its divergence, and how they are saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array

from numpyro_fed.algorithms.pvi.families import Globals
from numpyro_fed.divergences import KL
from numpyro_fed.errors import GuideError, ModelError
from numpyro_fed.expfam import Family
from numpyro_fed.local.base import Local
from numpyro_fed.local.natural import FixedPoint
from numpyro_fed.model.log_density import FederatedModel

Divergence = Callable[[Any, Any, Any], Array]


def flat_prior_error(fm: FederatedModel) -> ModelError:
    """Return the error for a flat prior without a start at the mode."""
    return ModelError(
        f"the prior of the global site '{fm.improper[0]}' is flat (ImproperUniform, or masked), "
        "and so improper: without a start at the mode there is no posterior before the first "
        "visit. Use start='mode', which takes up to 300 globals and deletion='own'; or give it "
        "a proper prior, however wide, such as dist.Normal(0, 100)."
    )


def prior_optimiser(family: Family[Any]) -> FixedPoint:
    """Return the server's optimiser of the prior's factor, with enough draws for the family."""
    z = jax.ShapeDtypeStruct((family.dim,), np.float32)
    statistics = jax.eval_shape(family.statistics, z)
    numbers = sum(a.size for a in jax.tree.leaves(statistics)) // family.dim
    # Four draws for each statistic of a coordinate: with a full covariance of d globals that is
    # about 4 d, and with fewer than d draws a covariance is singular.
    return FixedPoint(num_particles=max(64, 4 * numbers))


def in_words(value: object) -> str:
    """Return a setting as text that is the same in every process, without addresses."""
    if is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: getattr(value, f.name) for f in fields(value)}
        words = [f"{name}={in_words(part)}" for name, part in parts.items() if name != "optim"]
        return f"{type(value).__name__}({', '.join(words)})"
    return getattr(value, "__qualname__", None) or repr(value)


def checked_local(local: Local, closed: bool, divergence: Divergence) -> Local:
    """Return the local optimiser; refuse one that does not suit the model or the divergence."""
    kind = type(local).__name__
    if local.closed_form and not closed:
        raise GuideError(
            f"local.{kind} needs a conjugate model, but the likelihood is not affine in the "
            "statistics of the globals' family (or rows have latents). Use local.Optax()."
        )
    if not isinstance(divergence, KL) and not local.any_divergence:
        raise GuideError(
            f"local.{local} has a divergence of its own, but divergence={divergence!r}. Use "
            "local.Optax() or local.LBFGS()."
        )
    return local


def cavity_divergence(
    divergence: Divergence, chosen: Globals
) -> Callable[[Any, Any], Array] | None:
    """Return the divergence to the cavity; None for KL, which has closed forms of its own."""
    if isinstance(divergence, KL):
        return None
    if hasattr(divergence, "check"):
        divergence.check(chosen.family)
    return partial(divergence, chosen.family)
