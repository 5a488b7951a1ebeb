"""The start of a run: a saved state, an earlier result, the mode, or zero.

:func:`begin_run` chooses. All of them return one type, :class:`Begun`. Of an earlier result, of any
method on the same silos, the globals are taken over as a normal distribution, and silos' own guides
as they are, rewritten for globals in their own units.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.basics.errors import (
    DataError,
    GuideError,
    ModelError,
    NonFiniteError,
    SavedStateError,
    StartWarning,
)
from numpyro_fed.basics.programs import to_current_precision
from numpyro_fed.basics.trees import drop_weak_types
from numpyro_fed.numerics import linalg
from numpyro_fed.numerics.gaussian import FULL_COVARIANCE_UP_TO, Gaussian
from numpyro_fed.posterior.built import CompiledMethod, StartRounds
from numpyro_fed.posterior.result import Result
from numpyro_fed.rounds.exchange import Round
from numpyro_fed.rounds.messages import SEARCH
from numpyro_fed.rounds.progress import Progress
from numpyro_fed.rounds.runtime import State, failed_silos
from numpyro_fed.rounds.schedules import init_schedule
from numpyro_fed.rounds.silos import Batches, Silos
from numpyro_fed.rounds.states import CarriedSilo, Private, Shared
from numpyro_fed.rounds.step import Conversation
from numpyro_fed.search.expand import effects_of, flat_size
from numpyro_fed.search.lbfgs import LBFGSSearch
from numpyro_fed.search.mode import CurvatureCheck, Mode, mode_of_search
from numpyro_fed.search.mode_search import MANY_EFFECTS, SEARCHED_UP_TO, BestPoints
from numpyro_fed.search.newton import NewtonSearch
from numpyro_fed.search.run_search import (
    at_silos,
    coupling_reason,
    curvature_usable,
    factors_at_mode,
    not_found_error,
    reason_or_raise,
    run_search,
)
from numpyro_fed.search.start_point import StartPoint
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.vertical.result import VerticalStart

# Globals and shared parameters, up to which a mode is searched for by L-BFGS. It trades hundreds of
# exchanges of so many numbers against a start far from the posterior.
WIDE_UP_TO = 10_000
SEARCH_KINDS = "mode", "wide"  # the kinds of start that search for a mode
# Places that a start tries before a run begins without a mode. Newton's method took 9 to 17 on
# fourteen posteriors (docs/results/raw_data.md), L-BFGS takes hundreds.
MAX_PLACES = {"mode": 100, "wide": 300}
# Draws for the covariance of a guide that has no closed form: sds to half a percent. More cost
# memory, draws x dimension.
MOMENT_DRAWS = 20_000
# They take the place of a round's number in keys, where no run comes to.
OPENING_ROUND, SEARCH_ROUND = 2**31 - 2, 2**31 - 1

Used = TypeVar("Used")


class NoStartError(Exception):
    """The reason why a run cannot start at the mode."""


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


@dataclass(frozen=True, eq=False)
class Begun:
    """A run before its first round: the fit that runs, its first state, and where it starts.

    ``start`` is a mode, or what was carried over from a result; None at zero and at a saved state.
    """

    compiled: CompiledMethod
    state: State
    start: Mode | Carried | VerticalStart | None = None


def begin_run(
    compiled: CompiledMethod,
    key: Array,
    hosted: Silos,
    init_state: State | np.ndarray | None,
    start: object,
    progress_bar: bool | Progress,
) -> Begun:
    """Return a run that begins at a saved state, at a result, at the mode, or at zero.

    ``init_state`` is the saved state, or places (k, dim) at which the search for the mode begins.
    ``start`` is the method's setting, where it has one.
    """
    if not (init_state is None or isinstance(init_state, np.ndarray)):
        compiled, state = with_or_without_start(
            compiled, lambda compiled: (compiled, compiled.check_state(init_state, hosted))
        )
        return Begun(compiled, compiled.runtime.go_on(state))
    if isinstance(start, Result):
        if init_state is not None:
            raise ModelError(
                "init_state= has places for the search for the mode, and start= is a result, at "
                "which the run begins without a search. Give one of them."
            )
        return begin_at_result(compiled, key, hosted, start)
    if compiled.built.start is not None:
        try:
            return begin_at_mode(
                compiled, compiled.built.start, key, hosted, progress_bar, init_state
            )
        # No mode is no error: the run starts as with start=None, and says so.
        except NoStartError as error:
            warnings.warn(
                f"{error}: the run starts at zero in unconstrained space, as start=None does.",
                category=StartWarning,
                stacklevel=3,
            )
            compiled = compiled.without_start or compiled
    state = compiled.runtime.init(key, hosted.batches)
    return Begun(compiled, _after_opening(compiled, key, state, hosted.batches))


def begin_at_mode(
    compiled: CompiledMethod,
    start: StartRounds,
    key: Array,
    hosted: Silos,
    progress_bar: bool | Progress,
    places: np.ndarray | None,
) -> Begun:
    """Return a run that begins at the mode: it is searched for, checked, and told to the silos.

    Half of the searches begin at ``places`` (k, dim), if they are given.
    """
    fm, batches = compiled.model, hosted.batches
    # A model may have no mode that can be searched for.
    if (coupled := coupling_reason(compiled.checks, hosted.buckets)) is not None:
        raise NoStartError(coupled)
    if start.check is None and len(effects_of(fm)):
        raise NoStartError(MANY_EFFECTS)

    runtime = compiled.cached(SEARCH, lambda: compiled.reach(start.algorithm, begin=SEARCH))
    key_search = jax.random.fold_in(key, SEARCH_ROUND)
    # Above the places that a search tries, so that it ends by itself.
    max_exchanges = max(MAX_PLACES.values()) + 2
    search, ask = run_search(
        key_search, start.search, runtime, batches, max_exchanges, progress_bar, places
    )
    exchanges = ask.number + 1  # the last one begins the run
    if not search.known.any():
        raise _no_place_error(fm, batches, exchanges, len(search.known), ask.unusable)

    found = _checked_mode(fm, start, search, ask, exchanges)
    if found.converged and not len(effects_of(fm)):
        found = replace(found, factors=factors_at_mode(fm, search, ask.silos, batches))

    begin = compiled.quick_round(start.begin, runtime)
    key_begin = jax.random.fold_in(key_search, 0)
    server, silos, info, good, _ = begin(key_begin, search, ask.silos, batches)
    if not info.ok:
        raise _no_place_error(fm, batches, exchanges, len(search.known), failed_silos(good, (), ()))
    carry = init_schedule(compiled.built.schedule, key, compiled.plan.num_silos)
    zero = jax.device_put(np.zeros((), np.int32))
    state = drop_weak_types(State(zero, server, silos, carry))
    return Begun(compiled, _after_opening(compiled, key, state, batches), found)


def _no_place_error(
    fm: FederatedModel, batches: Batches, exchanges: int, starts: int, unusable: tuple[int, ...]
) -> NoStartError | NonFiniteError:
    """Return the error for a search that has found no place; a flat prior needs one."""
    if fm.improper:
        return not_found_error(fm, batches, exchanges, starts, unusable)
    return NoStartError(
        "no mode to start from was found where log density, gradient and Hessian are finite"
        f"{at_silos(unusable)}. {reason_or_raise(fm, batches)}"
    )


def _checked_mode(
    fm: FederatedModel,
    start: StartRounds,
    search: BestPoints[np.ndarray],
    ask: Conversation,
    exchanges: int,
) -> Mode:
    """Return the mode of a search, once its curvature and flat priors have been checked."""
    if not curvature_usable(fm, search):
        raise NoStartError(
            "no mode to start from was found at which curvature tells how far the posterior "
            "reaches, as where a likelihood has a kink (Laplace)"
        )
    found = mode_of_search(fm, search, None, exchanges)
    if not (fm.improper and start.check is not None and found.converged):
        return found
    profile = start.check.ask(ask, search)
    found = mode_of_search(fm, search, profile, exchanges + 1)
    if found.flat:
        raise ModelError(
            "the posterior is improper: it does not fall along "
            f"{' and '.join(found.flat)} (unconstrained, each in units of its own "
            f"curvature), where the prior of '{fm.improper[0]}' is flat. Give it a proper "
            "prior, or leave out a column that others add up to. Where columns are merely "
            "alike, double precision (jax.config.update('jax_enable_x64', True)) tells "
            "them apart."
        )
    return found


def begin_at_result(compiled: CompiledMethod, key: Array, hosted: Silos, result: Result) -> Begun:
    """Return a run that begins at the posterior of a result on the same silos."""
    warm_start = compiled.algorithm.warm_start
    if warm_start is None:
        raise GuideError("this method cannot begin at another one's result. Use start='mode'.")
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
    start_point, what_is_known = _globals_as_normal(result)
    start_point = to_current_precision(start_point)
    key_server, key_silos = jax.random.split(key)
    carried = _guides_in_own_units(result)
    silos = []
    for bucket, batch in zip(hosted.buckets, hosted.batches, strict=True):
        stacked = jax.tree.map(lambda *a: jnp.stack(a), *(carried[j] for j in bucket.silos))
        first_silo = jax.tree.map(lambda a: a[0], batch.data)
        like = jax.eval_shape(compiled.guide.init_local, jax.random.key(0), first_silo)
        here, there = (
            {p: {k: np.shape(a)[cut:] for k, a in eta.items()} for p, eta in guides.items()}
            for guides, cut in ((like, 0), (stacked.guide, 1))
        )
        if here != there:
            raise GuideError(
                f"the silos' guides of the result that is begun at are {there!s:.300}, and here "
                f"they are {here!s:.300}. Give both methods the same guide=."
            )
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
    return Begun(compiled, drop_weak_types(state), taken)


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


def _after_opening(compiled: CompiledMethod, key: Array, state: State, batches: Batches) -> State:
    """Return the state after the opening rounds of an algorithm."""
    key = jax.random.fold_in(key, OPENING_ROUND)
    for i, round_ in enumerate(compiled.built.algorithm.opening):
        if not round_.is_run:  # by the method itself
            continue
        key_round, once = jax.random.fold_in(key, i), compiled.quick_round(round_)
        server, silos, info, good, _ = once(key_round, state.server, state.silos, batches)
        if not bool(info.ok):
            bad = failed_silos(good, (), ())
            raise NonFiniteError(
                f"what silos say before the first round (exchange '{round_.name}') is not finite"
                f"{at_silos(bad)}. Look at the data there.",
                result=None,
                round=0,
                silos=bad,
            )
        state = drop_weak_types(state._replace(server=server, silos=silos))
    return state


def with_or_without_start(compiled: CompiledMethod, use: Callable[[CompiledMethod], Used]) -> Used:
    """Return ``use(compiled)``, or if its state does not fit, ``use`` of the fit without a start.

    A state or a file may come from a run whose search had found no mode.
    """
    try:
        return use(compiled)
    except SavedStateError as error:
        if compiled.without_start is None:
            raise
        try:
            return use(compiled.without_start)
        # The first error is about the method with its settings, which the user knows.
        except SavedStateError:
            raise error from None


def check_start(start: object) -> None:
    """Raise an error unless ``start`` is ``"mode"``, None or a result."""
    if start not in ("mode", None) and not isinstance(start, Result):
        raise ValueError(f"start={start!r:.200}: expected 'mode', None or a result.")


def start_kind(start: str | Result | None, fm: FederatedModel, *, wide: bool = False) -> str | None:
    """Return the kind of a run's start: ``"mode"``, ``"wide"``, ``"result"`` or None.

    ``"mode"`` is a search by Newton's method, ``"wide"`` one by L-BFGS for methods that allow it,
    and ``"result"`` begins at another result. It is None with too many coordinates to search over.
    """
    if isinstance(start, Result):
        return "result"
    num_coordinates = flat_size(fm)
    if start is None or not num_coordinates:
        return None
    if num_coordinates <= SEARCHED_UP_TO:
        return start
    return "wide" if wide and num_coordinates <= WIDE_UP_TO else None


def start_rounds(
    kind: str,
    fm: FederatedModel,
    num_silos: int,
    starts: int,
    init_loc_fn: Callable[..., Any] | None,
    begin: Round,
) -> StartRounds:
    """Return the rounds of a start at the mode, with ``begin`` as the last one."""
    args = fm, num_silos, starts, init_loc_fn, MAX_PLACES[kind]
    if kind == "wide":
        wide = LBFGSSearch(*args)
        return StartRounds(wide, wide.algorithm, None, begin)
    search = NewtonSearch(*args)
    return StartRounds(search, search.algorithm, CurvatureCheck(fm, starts), begin)
