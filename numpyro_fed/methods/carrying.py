"""The start of a run at the result of another method (``start=result``)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed import linalg
from numpyro_fed.algorithms.base import CarriedSilo, Private, Shared
from numpyro_fed.algorithms.begin import StartPoint
from numpyro_fed.errors import DataError, GuideError
from numpyro_fed.gaussian import Gaussian
from numpyro_fed.guides.structured import FULL_UP_TO
from numpyro_fed.precision import to_current_precision
from numpyro_fed.results.base import Fit, Silos
from numpyro_fed.results.rows import Result
from numpyro_fed.runtime.stack import State, init_schedule
from numpyro_fed.trees import drop_weak_types

# Draws for the covariance of a guide that has no closed form: sds to half a percent. More cost
# memory, draws x dimension.
DRAWS = 20_000


@dataclass(frozen=True)
class Carried:
    """The parts that a run took over from an earlier result.

    Attributes
    ----------
    method : str
        The method of the earlier result.
    parameters : tuple of str
        The names of shared and private parameters.
    globals : str
        The moments of the globals: their mean, with a covariance or standard deviations.
    guides : tuple of str
        The silo plates whose guides each silo takes over.
    """

    method: str
    parameters: tuple[str, ...]
    globals: str
    guides: tuple[str, ...]

    def report(self) -> str:
        """Return the record as a sentence."""
        parts = [self.globals]
        if self.parameters:
            parts.append(f"the parameters {', '.join(self.parameters)}")
        if self.guides:
            parts.append(f"the silos' own guides of {', '.join(self.guides)}")
        return f"From a result of {self.method}: {'; '.join(parts)}."


def carry_over(fit: Fit, key: Array, hosted: Silos, result: Result) -> tuple[State, Carried]:
    """Return the first state of a run that begins at a result, and what it took over."""
    carry = fit.algorithm.carry
    if carry is None:
        raise GuideError("this method cannot begin at another one's result. Use start='mode'.")
    facts, their_facts = fit.plan.facts, result.plan.facts
    for name, ours, theirs in (
        ("numbers of silos", fit.plan.num_silos, result.num_silos),
        ("sites", facts.sites, their_facts.sites),
        ("silo plates", facts.plates, their_facts.plates),
        ("numbers of rows", list(fit.sizes), result.sizes),
    ):
        if ours != theirs:
            raise DataError(
                f"start= is the result of a run with other {name}: {theirs!s:.300} there, "
                f"{ours!s:.300} here. Begin at a result of the same model on the same silos."
            )
    start_point, what_is_known = _globals_as_normal(result)
    start_point = to_current_precision(start_point)
    key_server, key_silos = jax.random.split(key)
    shared, their_guide = to_current_precision(result.shared), result._fit.guide

    # The guides of a run measure the globals in its frame, and another run has another frame: here
    # they are rewritten for globals in their own units.
    @jax.jit
    def without(shared: Shared, private: Private) -> CarriedSilo:
        frame = shared.frame
        coordinates = partial(their_guide.globals.coordinates, frame)
        zero = jnp.zeros_like(frame.loc)
        silo_guides = their_guide.composed_with(coordinates, private.guide, zero)
        coords = their_guide.globals.centred_coordinates(frame, shared.guide, frame.loc[None])
        centre = their_guide.globals.place(frame, private.recentred(coords).centre)
        return CarriedSilo(private.theta, silo_guides, centre)

    silo_guides = (to_current_precision(result.private(j)) for j in range(result.num_silos))
    privates = [without(shared, private) for private in silo_guides]
    silos = []
    for bucket, batch in zip(hosted.buckets, hosted.batches, strict=True):
        silo_guides = jax.tree.map(lambda *a: jnp.stack(a), *(privates[j] for j in bucket.silos))
        # Silos' guides must have the parts and shapes of the method's.
        silo = jax.tree.map(lambda a: a[0], batch.data)
        like = jax.eval_shape(fit.guide.init_local, jax.random.key(0), silo)
        here, there = (
            {p: {k: np.shape(a)[cut:] for k, a in eta.items()} for p, eta in guides.items()}
            for guides, cut in ((like, 0), (silo_guides.guide, 1))
        )
        if here != there:
            raise GuideError(
                f"the silos' guides of the result that is begun at are {there!s:.300}, and here "
                f"they are {here!s:.300}. Give both methods the same guide=."
            )
        # By bucket, as a run keeps the states; ``privates`` are by number.
        silos.append(
            jax.jit(jax.vmap(carry.silo, (None, 0, None, 0)))(
                key_silos, silo_guides, start_point, batch.real(batch.data)
            )
        )
    server = carry.server(key_server, start_point)
    round_, schedule = jnp.zeros((), jnp.int32), fit.built.schedule
    state = State(round_, server, tuple(silos), init_schedule(schedule, key, fit.plan.num_silos))
    taken = Carried(
        result.plan.chosen["method"],
        tuple(sorted({*start_point.theta, *privates[0].theta})),
        what_is_known,
        tuple(privates[0].guide),
    )
    return drop_weak_types(state), taken


def _globals_as_normal(result: Result) -> tuple[StartPoint, str]:
    """Return the globals of a result as a normal distribution, and its moments in words."""
    theta, eta, frame = result.shared
    guide, dim = result._fit.guide.globals, result.num_globals
    is_wide = dim > FULL_UP_TO
    params = guide.in_z(frame, eta)
    names = set(params) if isinstance(params, dict) else set()
    # A diagonal or a full Gaussian has its moments in closed form; others are estimated by draws.
    diagonal = names == {"loc", "log_scale"}
    if diagonal or (names == {"loc", "log_scale", "below"} and not is_wide):
        centre, root = params["loc"], Gaussian.from_params(params).root
    else:
        z, _ = result.draw_globals(jax.random.key(0), DRAWS if not is_wide else DRAWS // 10)
        centre, root = z.mean(0), z.std(0)
        if not is_wide:
            root = linalg.cholesky(jnp.cov(z.T).reshape(dim, dim))
    spread = "covariance" if root.ndim == 2 else "standard deviations"
    if root.ndim == 1 and not is_wide:
        root = jnp.diag(root)
    unit = jax.tree.map(jnp.ones_like, theta)
    return StartPoint(theta, unit, centre, root), f"the mean and {spread} of the globals"
