"""From the result of one method to the first state of another."""

from __future__ import annotations

from collections.abc import Callable
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
from numpyro_fed.guides.structured import FULL_UP_TO, Guide
from numpyro_fed.model.data import SiloData
from numpyro_fed.precision import to_current_precision
from numpyro_fed.results.base import Fit, Result
from numpyro_fed.results.run import Silos
from numpyro_fed.runtime.stack import State, init_schedule
from numpyro_fed.trees import drop_weak_types

DRAWS = 20_000  # of a guide whose covariance is not written down


@dataclass(frozen=True)
class Carried:
    """A record of what a run took over from an earlier result.

    Attributes
    ----------
    method : str
        Whose result it was.
    parameters : tuple of str
        Shared and private parameters, by name.
    globals : str
        What of the posterior of the globals: its mean, with its covariance or standard deviations.
    guides : tuple of str
        The silo plates whose guides each silo goes on with.
    """

    method: str
    parameters: tuple[str, ...]
    globals: str
    guides: tuple[str, ...]

    def report(self) -> str:
        """Return it in words."""
        parts = [self.globals]
        if self.parameters:
            parts.append(f"the parameters {', '.join(self.parameters)}")
        if self.guides:
            parts.append(f"the silos' own guides of {', '.join(self.guides)}")
        return f"From a result of {self.method}: {'; '.join(parts)}."


def carried(fit: Fit, key: Array, hosted: Silos, result: Result) -> tuple[State, Carried]:
    """Return the first state of a run that goes on from another's result, and what that took.

    Raises
    ------
    DataError
        For a result of other silos, or of silos in other processes.
    GuideError
        For silos' guides that are not built as those here.
    """
    carry = fit.algorithm.carry
    if carry is None:
        raise GuideError("this method cannot begin at another one's result. Use start='mode'.")
    _check_same(fit, result)
    begun, how = _begun(result)
    begun = to_current_precision(begun)
    key_server, key_silos = jax.random.split(key)
    shared, without = to_current_precision(result.shared), _without_frame(result._fit.guide)
    own = (to_current_precision(result.private(j)) for j in range(result.num_silos))
    privates = [without(shared, private) for private in own]
    silos = []
    for bucket, batch in zip(hosted.buckets, hosted.batches, strict=True):
        own = jax.tree.map(lambda *a: jnp.stack(a), *(privates[j] for j in bucket.silos))
        _check_guides(fit, own, jax.tree.map(lambda a: a[0], batch.data))
        silos.append(
            jax.jit(jax.vmap(carry.silo, (None, 0, None, 0)))(key_silos, own, begun, batch.data)
        )
    server = carry.server(key_server, begun)
    round_, schedule = jnp.zeros((), jnp.int32), fit.built.schedule
    state = State(round_, server, tuple(silos), init_schedule(schedule, key, fit.plan.num_silos))
    said = Carried(
        result.plan.chosen["method"],
        tuple(sorted({*begun.theta, *privates[0].theta})),
        how,
        tuple(privates[0].guide),
    )
    return drop_weak_types(state), said


def _begun(result: Result) -> tuple[StartPoint, str]:
    """Return the normal distribution of a result's globals, and what of it is known."""
    theta, eta, frame = result.shared
    guide, dim = result._fit.guide.globals, result.num_globals
    wide = dim > FULL_UP_TO
    known = guide.in_z(frame, eta)
    names = set(known) if isinstance(known, dict) else set()
    diagonal = names == {"loc", "log_scale"}
    if diagonal or (names == {"loc", "log_scale", "below"} and not wide):
        centre, root = known["loc"], Gaussian.from_params(known).root
    else:
        z, _ = result.draw_globals(jax.random.key(0), DRAWS if not wide else DRAWS // 10)
        centre, root = z.mean(0), z.std(0)
        if not wide:
            root = linalg.cholesky(jnp.cov(z.T).reshape(dim, dim))
    spread = "covariance" if root.ndim == 2 else "standard deviations"
    if root.ndim == 1 and not wide:
        root = jnp.diag(root)
    unit = jax.tree.map(jnp.ones_like, theta)
    return StartPoint(theta, unit, centre, root), f"the mean and {spread} of the globals"


def _without_frame(guide: Guide) -> Callable[[Shared, Private], CarriedSilo]:
    """Return what turns a silo's own guides into such that measure the globals as they are."""

    @jax.jit
    def without(shared: Shared, private: Private) -> CarriedSilo:
        frame = shared.frame
        coordinates = partial(guide.globals.coordinates, frame)
        own = guide.composed_with(coordinates, private.guide, jnp.zeros_like(frame.loc))
        seen = guide.globals.seen(frame, shared.guide, frame.loc[None])
        centre = guide.globals.place(frame, private.measured(seen).centre)
        return CarriedSilo(private.theta, own, centre)

    return without


def _check_same(fit: Fit, result: Result) -> None:
    here, there = fit.plan.facts, result.plan.facts
    for what, mine, theirs in (
        ("numbers of silos", fit.plan.num_silos, result.num_silos),
        ("sites", here.sites, there.sites),
        ("silo plates", here.plates, there.plates),
        ("numbers of rows", list(fit.sizes), result.sizes),
    ):
        if mine != theirs:
            raise DataError(
                f"start= is the result of a run with other {what}: {_shown(theirs)} there, "
                f"{_shown(mine)} here. Begin at a result of the same model on the same silos."
            )


def _check_guides(fit: Fit, own: CarriedSilo, data: SiloData) -> None:
    """Refuse silos' guides that have other parts, or other shapes, than here."""
    like = jax.eval_shape(fit.guide.init_local, jax.random.key(0), data)
    mine, theirs = (
        {p: {k: np.shape(a)[cut:] for k, a in eta.items()} for p, eta in guides.items()}
        for guides, cut in ((like, 0), (own.guide, 1))
    )
    if mine != theirs:
        raise GuideError(
            f"the silos' guides of the result that is begun at are {_shown(theirs)}, and here they "
            f"are {_shown(mine)}. Give both methods the same guide=."
        )


def _shown(value: object) -> str:
    words = str(value)
    return words if len(words) <= 300 else f"{words[:300]}..."
