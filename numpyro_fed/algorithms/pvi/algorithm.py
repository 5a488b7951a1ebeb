r"""PVI: partitioned variational inference and its family.

Ashman, Bui, Nguyen, Markou, Weller, Swaroop and Turner 2022, arXiv 2202.12275, Algorithm 1. The
posterior is the prior times one factor for each silo, all in natural parameters of one exponential
family,

.. math::
    q(z_G) \propto p(z_G) \prod_m t_m(z_G), \qquad
    \eta = \eta_0 + \sum_m \lambda_m .

A visit: the silo takes its factor out of the posterior, works on its own data until it is content,
and answers with the change of its factor. Only that change leaves it. Where rows have latents, the
silo's own local guide is part of what it optimises and never leaves.

Where this departs from the paper: the server sends the sum of the factors, from which (and from
the prior, which everybody knows) a silo forms the posterior; and a silo's proposal stays pending
until the server's next message names the factor with which it was taken, so that the sum of the
silos' factors is always the server's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from numpyro_fed import expfam
from numpyro_fed.algorithms.base import Exchange, FederatedAlgorithm, Info
from numpyro_fed.algorithms.pvi.families import (
    GAUSSIAN,
    Globals,
    departure,
    log_likelihood,
    row_terms,
)
from numpyro_fed.expfam import Family
from numpyro_fed.guides.structured import Guide
from numpyro_fed.local.base import Local, Noise, Problem, proper_step
from numpyro_fed.local.verdict import location_and_log_scale
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.split import FederatedModel, Rows
from numpyro_fed.objectives import SiloBound
from numpyro_fed.trees import all_finite

Eta = Any
PRIOR_DRAWS = 256
ROUNDINGS = 8  # of the size of all terms, that add up in a likelihood


class Status(IntEnum):
    """How a visit ended. From ``NON_FINITE`` on, the change that it sends is zero."""

    CONVERGED = 0
    NOT_CONVERGED = 1
    NON_FINITE = 2
    IMPROPER = 3
    NOT_CONJUGATE = 4


class Progress(NamedTuple):
    """How far the posterior has moved since the round began, and whether the server's own factor
    has converged.

    ``mean`` and ``log_scale`` (dim,) are those of the posterior when the round began, ``steps``
    the steps since then. ``moved`` is the largest move of a mean, in standard deviations, or of a
    log standard deviation.
    """

    mean: Array
    log_scale: Array
    steps: Array
    moved: Array
    own: Array


class ServerState(NamedTuple):
    """``params`` is ``{"theta", "guide"}``: shared parameters, the posterior's natural parameters.

    ``total`` is the sum of all factors, ``own`` the server's among them, for what of the prior is
    outside of the family; ``taken`` (silos,) is the factor with which each
    silo's last proposal was taken.
    """

    params: dict[str, Any]
    total: Eta
    own: Eta
    opt_state: Any
    damping: Array
    taken: Array
    progress: Progress


class SiloState(NamedTuple):
    """``params`` is ``{"private", "guide", "centre"}``: private parameters, the local guide, and
    from where it measures the globals.

    ``factor`` has been taken by the server, ``pending`` waits to hear. ``ok`` says whether the
    last reply was good, ``status`` how it ended. ``stale`` is the cavity and the posterior that
    an asynchronous silo is at work from.
    """

    params: dict[str, Any]
    factor: Eta
    pending: Eta
    visits: Array
    status: Array
    ok: Array
    stale: Any


class Down(NamedTuple):
    """What the server sends: shared parameters, the sum of all factors, and with which factor it
    took the silo's last proposal.
    """

    theta: dict[str, Any]
    total: Eta
    taken: Array


SCATTERED: Any = (False, False, True)  # of Down, what each participant gets a slice of


class Up(NamedTuple):
    """What a silo sends: the change of its factor, the expected log likelihood at the posterior
    that it received with its gradient for the shared parameters, and how the visit ended.
    """

    change: Eta
    log_lik: Array
    theta: dict[str, Any]
    statuses: Array


class Report(NamedTuple):
    """What a step reports: the damping used (0 for a rejected update), how visits ended, and
    whether the server's own factor converged.
    """

    damping: Array
    statuses: Array
    own: Array


class Settings(NamedTuple):
    """What makes PVI, and the members of its family, what they are.

    Attributes
    ----------
    num_silos, visits : int
        Silos, and visits in a round.
    steps : int
        Server updates in a round.
    damping : float
    adaptive : bool
        Whether to lower the damping where an update would be improper, instead of rejecting it.
    deletion : {"own", "none", "average", "prior"}
        What is taken out of the posterior to make the cavity: the silo's own factor; nothing; an
        average factor, the sum over the number of silos; all factors.
    prior_share : float
        The share of the prior that a silo's cavity holds.
    asynchronous : bool
        Whether a silo works from what it was sent at the visit before.
    start_scale : float or None
        The largest standard deviation, of Gaussian globals, at which a silo's first visit starts.
    evidence_draws : int
        Draws for the expected log likelihood.
    share : float
        How much of the way to its optimum a visit goes; 0 where that is not known.
    exact : bool
        Whether a silo's proposal depends on nothing but its own data.
    """

    num_silos: int
    visits: int
    steps: int
    damping: float
    adaptive: bool
    deletion: str = "own"
    prior_share: float = 1.0
    asynchronous: bool = False
    start_scale: float | None = 0.1
    evidence_draws: int = 32
    share: float = 1.0
    exact: bool = False


class Parts(NamedTuple):
    """What the algorithm is made of.

    ``bounds`` holds the silo's term of the bound, and the same with a plain gradient. ``rows``
    names the arrays of the silo plate ``plate`` that minibatches cut. ``divergence`` is that to
    the cavity; ``aggregate`` makes a posterior of a prior and a sum of factors.
    """

    model: FederatedModel
    globals: Globals
    guide: Guide
    bounds: tuple[SiloBound, SiloBound]
    local: Local
    prior_local: Local
    conjugate: bool
    optim: optax.GradientTransformation
    plate: str | None
    rows: tuple[str, ...]
    divergence: Callable[[Eta, Eta], Array] | None
    aggregate: Callable[[Eta, Eta], Eta]


def pvi(parts: Parts, settings: Settings) -> FederatedAlgorithm:
    """Build the algorithm."""
    fm, family, local = parts.model, parts.globals.family, parts.local
    prior, rest = parts.globals.prior, parts.globals.rest

    def init_server(key: Array) -> ServerState:
        theta = fm.init_theta(key)
        first = prior(theta)
        own, own_converged = jax.tree.map(jnp.zeros_like, first), jnp.array(True)
        if rest is not None:
            start = jax.tree.map(
                lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(family.ordinary, first)
            )
            own, own_converged = _own_factor(parts, key, theta, first, start, own)
        guide = parts.aggregate(first, own)
        none = jnp.zeros(fm.dim)
        progress = Progress(none, none, jnp.zeros((), jnp.int32), jnp.zeros(()), own_converged)
        return ServerState(
            {"theta": theta, "guide": guide},
            own,
            own,
            parts.optim.init(theta),
            jnp.asarray(settings.damping, jnp.result_type(float)),
            jnp.zeros(settings.num_silos),
            progress,
        )

    def init_silo(key: Array, data: SiloData) -> SiloState:
        key_private, key_guide = jax.random.split(key)
        params = {
            "private": fm.init_private(key_private, data),
            "guide": parts.guide.init_local(key_guide, data),
            "centre": jnp.zeros(fm.dim),
        }
        like = jax.eval_shape(lambda: prior(fm.init_theta(jax.random.key(0))))
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)
        none = jnp.zeros((), jnp.int32)
        stale = (zeros, zeros) if settings.asynchronous else ()
        return SiloState(params, zeros, zeros, none, none, jnp.array(True), stale)

    def server_noise(key: Array) -> Array:
        return key

    def silo_noise(key: Array, state: SiloState) -> Array:
        return key

    def broadcast(noise: Any, state: ServerState, who: Array) -> tuple[Down, Any]:
        return Down(state.params["theta"], state.total, state.taken[who]), (noise, who)

    def silo(key: Array, down: Down, state: SiloState, data: SiloData) -> tuple[Up, SiloState]:
        key_local, key_evidence = jax.random.split(key)
        factor = jax.tree.map(lambda a, b: a + down.taken * b, state.factor, state.pending)
        first = prior(down.theta)
        posterior = parts.aggregate(first, down.total)
        removed = _removed(settings, factor, down.total)
        share = jax.tree.map(lambda a: settings.prior_share * a, first)
        cavity = parts.aggregate(share, jax.tree.map(jnp.subtract, down.total, removed))
        now = (cavity, posterior)
        if settings.asynchronous:
            begun = state.visits > 0
            at_first = (first, first) if rest is None else now
            used = jax.tree.map(lambda a, b: jnp.where(begun, a, b), state.stale, at_first)
        else:
            used = now
        start = _start(parts, settings, used[1], state.visits)
        log_lik, g_theta = _expected(
            parts, settings, key_evidence, down.theta, posterior, state, data
        )
        problem = _problem(parts, down.theta, used[0], start, state, data)
        found = local.solve(problem, key_local)
        proposal = _factor(parts, found.eta, used[0])
        change = jax.tree.map(
            jnp.subtract, proposal, factor if settings.deletion == "prior" else removed
        )
        finite = found.finite & all_finite((change, found.own))
        proper = family.proper(found.eta)
        status = jnp.where(found.converged, Status.CONVERGED, Status.NOT_CONVERGED)
        status = jnp.where(found.suited, status, Status.NOT_CONJUGATE)
        status = jnp.where(finite & ~proper, Status.IMPROPER, status)
        status = jnp.where(finite, status, Status.NON_FINITE).astype(jnp.int32)
        ok = finite & proper & found.suited

        def keep(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, old)

        zeros = jax.tree.map(jnp.zeros_like, change)
        change = keep(change, zeros)
        g_theta = keep(g_theta, jax.tree.map(jnp.zeros_like, g_theta))
        up = Up(change, log_lik, g_theta, jax.nn.one_hot(status, len(Status), dtype=jnp.int32))
        after = {**found.own, "centre": family.centre(family.ordinary(found.eta))}
        return up, SiloState(
            keep(after, state.params),
            factor,
            change,
            state.visits + 1,
            status,
            ok,
            now if settings.asynchronous else (),
        )

    def server(state: ServerState, memo: Any, up: Up) -> tuple[ServerState, Info]:
        key, who = memo
        theta, old = state.params["theta"], state.params["guide"]
        first, own, own_converged = prior(theta), state.own, state.progress.own
        parted = _parted(parts, settings, key, theta, old)
        total, used = _take(parts, settings, state, first, up.change)
        if rest is not None:
            others = jax.tree.map(jnp.subtract, total, own)
            cavity = parts.aggregate(first, others)
            start = family.ordinary(parts.aggregate(first, total))
            own, own_converged = _own_factor(parts, key, theta, cavity, start, own)
            total = jax.tree.map(jnp.add, others, own)
        guide = parts.aggregate(first, total)
        weight = settings.num_silos / settings.visits
        if theta:
            pull = jax.grad(lambda t: _parted(parts, settings, key, t, old))(theta)
            each = weight * settings.steps
            gradient = jax.tree.map(lambda p, g: p - each * g, pull, up.theta)
            updates, opt_state = parts.optim.update(gradient, state.opt_state, theta)
            moved = optax.apply_updates(theta, updates)
            shifted = parts.aggregate(prior(moved), total)
            fine = family.proper(shifted) & all_finite(moved)
            theta, opt_state, guide = jax.tree.map(
                lambda a, b: jnp.where(fine, a, b),
                (moved, opt_state, shifted),
                (theta, state.opt_state, guide),
            )
        else:
            opt_state = state.opt_state
        damping = state.damping
        if settings.adaptive:
            lowered = jnp.where(used > 0, used, damping / 2)
            damping = jnp.minimum(2 * lowered, settings.damping)
        params, taken = {"theta": theta, "guide": guide}, state.taken.at[who].set(used)
        progress = _progress(family, settings, state.progress, old, guide, own_converged)
        after = ServerState(params, total, own, opt_state, damping, taken, progress)
        loss = parted / settings.steps - weight * up.log_lik
        moved_by = expfam.kl(family, guide, old)
        report = Report(used, up.statuses, own_converged)
        return after, Info(loss, all_finite(after), moved_by, report)

    exchange = Exchange(server_noise, silo_noise, broadcast, silo, server, scatter=Down(*SCATTERED))
    return FederatedAlgorithm(init_server, init_silo, (exchange,), watch=lambda s: s.status)


def evaluation(parts: Parts, settings: Settings) -> FederatedAlgorithm:
    """One exchange with every silo that changes nothing: the free energy of the posterior."""
    algorithm = pvi(parts, settings)

    def silo(key: Array, down: Down, state: SiloState, data: SiloData) -> tuple[Up, SiloState]:
        posterior = parts.aggregate(parts.globals.prior(down.theta), down.total)
        log_lik, _ = _expected(parts, settings, key, down.theta, posterior, state, data)
        ok = jnp.isfinite(log_lik)
        none = jax.tree.map(jnp.zeros_like, state.factor)
        status = jnp.where(ok, Status.CONVERGED, Status.NON_FINITE)
        statuses = jax.nn.one_hot(status, len(Status), dtype=jnp.int32)
        theta = jax.tree.map(jnp.zeros_like, down.theta)
        return Up(none, jnp.where(ok, log_lik, 0.0), theta, statuses), state._replace(ok=ok)

    def server(state: ServerState, memo: Any, up: Up) -> tuple[ServerState, Info]:
        params = state.params
        parted = _parted(parts, settings, memo[0], params["theta"], params["guide"])
        loss = parted - up.log_lik
        zero, good = jnp.zeros(()), up.statuses[Status.NON_FINITE] == 0
        return state, Info(loss, good, zero, Report(zero, up.statuses, state.progress.own))

    exchange = algorithm.exchanges[0]._replace(silo=silo, server=server)
    return algorithm._replace(exchanges=(exchange,), watch=None)


def effective_factor(state: SiloState, taken: Array) -> Eta:
    """A silo's factor, what is pending included: these sum to the server's ``total``."""
    return jax.tree.map(lambda a, b: a + taken * b, state.factor, state.pending)


def _progress(
    family: Family, settings: Settings, before: Progress, old: Eta, new: Eta, own: Array
) -> Progress:
    """How far the posterior has come since the round began."""

    both = jax.tree.map(lambda *pair: jnp.stack(pair), old, new)
    means, log_scales = jax.vmap(partial(location_and_log_scale, family))(both)
    begins = before.steps % settings.steps == 0
    mean = jnp.where(begins, jnp.nan_to_num(means[0]), before.mean)
    log_scale = jnp.where(begins, jnp.nan_to_num(log_scales[0]), before.log_scale)
    moves = jnp.abs(means[1] - mean) / jnp.exp(log_scales[1]), jnp.abs(log_scales[1] - log_scale)
    moved = jnp.nan_to_num(jnp.concatenate(moves).max(initial=0.0))
    return Progress(mean, log_scale, before.steps + 1, moved, own)


def _own_factor(
    parts: Parts, key: Array, theta: dict, cavity: Eta, start: Any, before: Eta
) -> tuple[Eta, Array]:
    """The server's own factor, for what of the prior is outside of the family; whether it
    converged.
    """
    family, rest = parts.globals.family, parts.globals.rest or (lambda theta, z: jnp.zeros(()))

    def noise(key: Array, particles: int, batch: int | None) -> Noise:
        return Noise(family.noise(key, particles), {}, None)

    def log_lik(psi: Any, own: Any, noise: Noise, plain: bool) -> tuple[Array, Array]:
        def at(noise: Any) -> tuple[Array, Array]:
            z = family.draw(psi, noise)
            return z, rest(theta, z)

        return jax.vmap(at)(noise.globals)

    def likelihood() -> Any:
        raise TypeError("a prior outside of the family has no closed form")

    problem = Problem(family, cavity, start, (), noise, log_lik, likelihood, 0, None)
    found = parts.prior_local.solve(problem, key)
    factor = jax.tree.map(jnp.subtract, found.eta, cavity)
    fine = family.proper(found.eta) & all_finite(factor)
    factor = jax.tree.map(lambda a, b: jnp.where(fine, a, b), factor, before)
    return factor, fine & found.converged


def _parted(parts: Parts, settings: Settings, key: Array, theta: dict, eta: Eta) -> Array:
    """KL between the posterior and the prior, by draws where the prior is outside the family."""
    family, rest = parts.globals.family, parts.globals.rest
    if rest is None:
        return expfam.kl(family, eta, parts.globals.prior(theta))
    psi = family.ordinary(eta)
    noise = family.noise(key, PRIOR_DRAWS)

    def at(noise: Any) -> Array:
        z = family.draw(psi, noise)
        return expfam.log_density(family, eta, z) - parts.model.log_prior(theta, z)

    return jax.vmap(at)(noise).mean()


def _removed(settings: Settings, factor: Eta, total: Eta) -> Eta:
    """What a silo takes out of the posterior to make its cavity."""
    if settings.deletion == "own":
        return factor
    if settings.deletion == "none":
        return jax.tree.map(jnp.zeros_like, factor)
    if settings.deletion == "average":
        return jax.tree.map(lambda a: a / settings.num_silos, total)
    return total


def _start(parts: Parts, settings: Settings, posterior: Eta, visits: Array) -> Any:
    """Where a visit starts: at the posterior, and at the first visit no wider than asked."""
    psi = parts.globals.family.ordinary(posterior)
    if settings.start_scale is None or GAUSSIAN not in psi:
        return psi
    widest = jnp.where(visits == 0, np.log(settings.start_scale), jnp.inf)
    narrow = {"log_scale": jnp.minimum(psi[GAUSSIAN]["log_scale"], widest)}
    return {**psi, GAUSSIAN: {**psi[GAUSSIAN], **narrow}}


def _factor(parts: Parts, eta: Eta, cavity: Eta) -> Eta:
    """The factor that makes ``eta`` of the cavity: the gradient of their divergence."""
    if parts.divergence is None:
        return jax.tree.map(jnp.subtract, eta, cavity)
    family, divergence = parts.globals.family, parts.divergence
    return family.dual_gradient(lambda psi: divergence(family.natural(psi), cavity), eta)


def _take(
    parts: Parts, settings: Settings, state: ServerState, first: Eta, change: Eta
) -> tuple[Eta, Array]:
    """The sum of factors after as much of the change as leaves the posterior proper."""
    target = jax.tree.map(jnp.add, state.total, change)
    family = parts.globals.family

    def proper(total: Eta) -> Array:
        return family.proper(parts.aggregate(first, total))

    within = family._replace(proper=proper)
    if settings.adaptive:
        return proper_step(within, state.total, target, state.damping)
    moved = jax.tree.map(lambda a, b: a + state.damping * b, state.total, change)
    fine = proper(moved)
    total = jax.tree.map(lambda a, b: jnp.where(fine, a, b), moved, state.total)
    return total, jnp.where(fine, state.damping, 0.0)


def _problem(
    parts: Parts, theta: dict, cavity: Eta, start: Any, state: SiloState, data: SiloData
) -> Problem:
    fm, family, guide = parts.model, parts.globals.family, parts.guide
    centre = family.centre(start)
    eta = guide.recentre(state.params["guide"], state.params["centre"], centre, data)
    own = {"private": state.params["private"], "guide": eta}

    def noise(key: Array, particles: int, batch: int | None) -> Noise:
        key_globals, key_rows, key_index = jax.random.split(key, 3)
        sizes = {p: batch or len(part["loc"]) for p, part in eta.items()}
        index = None
        if batch:
            index = jax.random.randint(key_index, (batch,), 0, _real(parts, data))
        return Noise(
            family.noise(key_globals, particles),
            parts.bounds[0].noise(key_rows, sizes, particles),
            index,
        )

    def log_lik(psi: Any, own: Any, noise: Noise, plain: bool) -> tuple[Array, Array]:
        here, local, scale = data, own["guide"], jnp.ones(())
        if noise.which is not None:
            here, local = _cut(parts, data, own["guide"], noise.which)
            scale = jnp.asarray(_real(parts, data) / len(noise.which))
        shared, centre = {**theta, **own["private"]}, family.centre(psi)
        bound = parts.bounds[1 if plain else 0]

        def at(noise_globals: Any, noise_rows: Rows) -> tuple[Array, Array]:
            z = family.draw(psi, noise_globals)
            return z, scale * bound.value(shared, local, z, centre, noise_rows, here)

        return jax.vmap(at, (0, 1))(noise.globals, noise.rows)

    def likelihood() -> tuple[Eta, Callable[[Any], Array]]:
        rows = row_terms(fm, {**theta, **own["private"]}, data)
        eta = family.fit(lambda z: rows(z).sum())

        def misfit(psi: Any) -> Array:
            here = family.centre(psi)
            draws = jax.vmap(family.draw, (None, 0))
            z = draws(psi, family.noise(jax.random.key(0), 8))
            begun = draws(start, family.noise(jax.random.key(1), 4))
            begun = jnp.where(jnp.isfinite(begun), begun, here)  # a prior may be flat
            at = partial(departure, rows, family, eta, here)
            nats, size = jax.vmap(at)(jnp.concatenate([z, begun]))
            # Rounding within a row is what rounding the globals would make of it.
            within = jnp.linalg.norm(jax.jvp(rows, (here,), (here,))[1])
            rounding = ROUNDINGS * jnp.finfo(here.dtype).eps * (size + within)
            return (jnp.abs(nats) - rounding).max()

        return eta, misfit

    size = sum(fm.sizes(data).values())
    return Problem(family, cavity, start, own, noise, log_lik, likelihood, size, parts.divergence)


def _expected(
    parts: Parts,
    settings: Settings,
    key: Array,
    theta: dict,
    posterior: Eta,
    state: SiloState,
    data: SiloData,
) -> tuple[Array, dict]:
    """The expected log likelihood at the posterior, and its gradient for shared parameters."""
    family, private = parts.globals.family, state.params["private"]

    def exact(theta: dict) -> Array:
        f = log_likelihood(parts.model, {**theta, **private}, data)
        eta, psi = family.fit(f), family.ordinary(posterior)
        z = family.centre(psi)
        away = jax.tree.map(jnp.subtract, family.moments(psi), family.statistics(z))
        return f(z) + expfam.inner(eta, away)

    def sampled(theta: dict) -> Array:
        psi = family.ordinary(posterior)
        centre = family.centre(psi)
        eta = parts.guide.recentre(state.params["guide"], state.params["centre"], centre, data)
        sizes = {p: len(part["loc"]) for p, part in eta.items()}

        def at(s: Array) -> Array:
            key_globals, key_rows = jax.random.split(jax.random.fold_in(key, s))
            noise = jax.tree.map(lambda a: a[0], family.noise(key_globals, 1))
            rows = {p: e[:, 0] for p, e in parts.bounds[0].noise(key_rows, sizes, 1).items()}
            z = family.draw(psi, noise)
            return parts.bounds[0].value({**theta, **private}, eta, z, centre, rows, data)

        draws = settings.evidence_draws
        return jax.lax.map(at, jnp.arange(draws), batch_size=min(draws, 8)).mean()

    expected = exact if parts.conjugate else sampled
    log_lik, gradient = jax.value_and_grad(expected)(theta) if theta else (expected(theta), {})
    fine = all_finite((log_lik, gradient))  # at a vague prior it may not be, and nothing is wrong
    gradient = jax.tree.map(lambda g: jnp.where(fine, g, 0.0), gradient)
    return jnp.where(jnp.isfinite(log_lik), log_lik, -jnp.inf), gradient


def _real(parts: Parts, data: SiloData) -> Array | int:
    """How many rows a silo has, padded ones left out."""
    if parts.plate in data.masks:
        return data.masks[parts.plate].sum()
    return len(next(data.arrays[key] for key in parts.rows))


def _cut(parts: Parts, data: SiloData, eta: dict, index: Array) -> tuple[SiloData, dict]:
    """A minibatch of a silo's rows, and the local guide of these rows."""
    arrays = {k: a[index] if k in parts.rows else a for k, a in data.arrays.items()}
    return replace(data, arrays=arrays, masks={}), jax.tree.map(lambda a: a[index], eta)
