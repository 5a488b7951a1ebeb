"""The first state of a run at the posterior of an earlier result, of any method, on the same silos.

The globals are taken over as a normal distribution, and silos' own guides as they are, rewritten
for globals in their own units.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.basics.errors import DataError, GuideError
from numpyro_fed.basics.programs import to_current_precision
from numpyro_fed.basics.trees import drop_weak_types
from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.guides.guide import Guide
from numpyro_fed.numerics import linalg
from numpyro_fed.numerics.gaussian import FULL_COVARIANCE_UP_TO, Gaussian
from numpyro_fed.posterior.built import CompiledMethod
from numpyro_fed.posterior.result import Result
from numpyro_fed.rounds.runtime import State
from numpyro_fed.rounds.schedules import init_schedule
from numpyro_fed.rounds.silos import Silos
from numpyro_fed.rounds.states import CarriedSilo, Private, Shared
from numpyro_fed.search.start_point import StartPoint

# Draws for the covariance of a guide that has no closed form: sds to half a percent. More cost
# memory, draws x dimension.
MOMENT_DRAWS = 20_000


@dataclass(frozen=True)
class Carried:
    """The parts that a run took over from an earlier result of a ``method``.

    They are ``parameters``, the moments of the ``globals`` in words, and silos' own ``guides``, by
    the names of parameters and plates.
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


def state_at_result(
    compiled: CompiledMethod, key: Array, hosted: Silos, result: Result
) -> tuple[State, Carried]:
    """Return the first state at the posterior of a result, and what was taken over from it."""
    warm_start = compiled.algorithm.warm_start
    if warm_start is None:
        raise GuideError("this method cannot begin at another one's result. Use start='mode'.")
    _check_same_problem(compiled, result)
    start_point, what_is_known = _globals_as_normal(result)
    start_point = to_current_precision(start_point)
    key_server, key_silos = jax.random.split(key)
    carried = _guides_in_own_units(result)
    silos = []
    for bucket, batch in zip(hosted.buckets, hosted.batches, strict=True):
        stacked = jax.tree.map(lambda *a: jnp.stack(a), *(carried[j] for j in bucket.silos))
        _check_guides_agree(compiled.guide, stacked, batch.data)
        # By bucket, as a run keeps the states; ``carried`` are by number.
        silos.append(
            jax.jit(jax.vmap(warm_start.silo, (None, 0, None, 0)))(
                key_silos, stacked, start_point, batch.real(batch.data)
            )
        )
    server, round_ = warm_start.server(key_server, start_point), jnp.zeros((), jnp.int32)
    schedule = init_schedule(compiled.built.schedule, key, compiled.plan.num_silos)
    state = State(round_, server, tuple(silos), schedule)
    taken = Carried(
        result.plan.chosen["method"],
        tuple(sorted({*start_point.theta, *carried[0].theta})),
        what_is_known,
        tuple(carried[0].guide),
    )
    return drop_weak_types(state), taken


def _check_same_problem(compiled: CompiledMethod, result: Result) -> None:
    """Raise an error for a result of another model, or of other silos."""
    facts, their_facts = compiled.plan.facts, result.plan.facts
    for name, ours, theirs in (
        ("numbers of silos", compiled.plan.num_silos, result.num_silos),
        ("sites", facts.sites, their_facts.sites),
        ("silo plates", facts.plates, their_facts.plates),
        ("numbers of rows", list(compiled.sizes), result.sizes),
    ):
        if ours != theirs:
            raise DataError(
                f"start= is the result of a run with other {name}: {theirs!s:.300} there, "
                f"{ours!s:.300} here. Begin at a result of the same model on the same silos."
            )


def _guides_in_own_units(result: Result) -> list[CarriedSilo]:
    """Return the parts of each silo in a result, with guides as functions of the globals."""
    shared, their_guide = to_current_precision(result.shared), result._fit.guide

    # The guides of a run measure the globals in its frame, and another run has another frame: here
    # they are rewritten for globals in their own units.
    @jax.jit
    def without_frame(shared: Shared, private: Private) -> CarriedSilo:
        frame = shared.frame
        coordinates = partial(their_guide.globals.coordinates, frame)
        zero = jnp.zeros_like(frame.loc)
        silo_guides = their_guide.in_coordinates(coordinates, private.guide, zero)
        coords = their_guide.globals.centred_coordinates(frame, shared.guide, frame.loc[None])
        centre = their_guide.globals.place(frame, private.recentred(coords).centre)
        return CarriedSilo(private.theta, silo_guides, centre)

    privates_there = (to_current_precision(result.private(j)) for j in range(result.num_silos))
    return [without_frame(shared, private) for private in privates_there]


def _check_guides_agree(guide: Guide, carried: CarriedSilo, data: SiloData) -> None:
    """Raise an error unless silos' guides have the parts and shapes that the method's have."""
    silo = jax.tree.map(lambda a: a[0], data)
    like = jax.eval_shape(guide.init_local, jax.random.key(0), silo)
    here, there = (
        {p: {k: np.shape(a)[cut:] for k, a in eta.items()} for p, eta in guides.items()}
        for guides, cut in ((like, 0), (carried.guide, 1))
    )
    if here != there:
        raise GuideError(
            f"the silos' guides of the result that is begun at are {there!s:.300}, and here "
            f"they are {here!s:.300}. Give both methods the same guide=."
        )


def _globals_as_normal(result: Result) -> tuple[StartPoint, str]:
    """Return the globals of a result as a normal distribution, and its moments in words."""
    theta, eta, frame = result.shared
    guide, dim = result._fit.guide.globals, result.num_globals
    is_wide = dim > FULL_COVARIANCE_UP_TO
    params = guide.in_z(frame, eta)
    names = set(params) if isinstance(params, dict) else set()
    # A diagonal or a full Gaussian has its moments in closed form; others are estimated by draws.
    diagonal = names == {"loc", "log_scale"}
    if diagonal or (names == {"loc", "log_scale", "below"} and not is_wide):
        centre, root = params["loc"], Gaussian.from_params(params).root
    else:
        num_draws = MOMENT_DRAWS if not is_wide else MOMENT_DRAWS // 10
        z, _ = result.draw_globals(jax.random.key(0), num_draws)
        centre, root = z.mean(0), z.std(0)
        if not is_wide:
            root = linalg.cholesky(jnp.cov(z.T).reshape(dim, dim))
    spread = "covariance" if root.ndim == 2 else "standard deviations"
    if root.ndim == 1 and not is_wide:
        root = jnp.diag(root)
    unit = jax.tree.map(jnp.ones_like, theta)
    return StartPoint(theta, unit, centre, root), f"the mean and {spread} of the globals"
