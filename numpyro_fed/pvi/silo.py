"""PVI at a silo, its parts and settings, and what all parties keep and send.

A silo takes its factor out of the posterior, solves its own problem, and sends the change. Names of
fields in states and messages are those in saved files and on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from numpyro_fed.basics.trees import all_finite, where
from numpyro_fed.data.minibatches import Minibatches, draw_minibatch, rows_at
from numpyro_fed.data.silo_data import SiloData, Sizes
from numpyro_fed.guides.global_guides import GuideParams
from numpyro_fed.guides.guide import Guide
from numpyro_fed.guides.silo_bounds import AtDraw, Bound, SiloBound, normals
from numpyro_fed.local.problem import Local, LocalNoise, Problem, SiloPart, Solution
from numpyro_fed.numerics import expfam
from numpyro_fed.numerics.expfam import Family
from numpyro_fed.numerics.expfam.family import Natural, Ordinary, Parts
from numpyro_fed.numerics.gaussian import Coordinates, Gaussian, identity
from numpyro_fed.pvi.families import GAUSSIAN, Globals, misfit, row_terms
from numpyro_fed.rounds.exchange import Reply
from numpyro_fed.rounds.states import SharedParams, SiloParams
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.site_table import Rows, Theta

# Draws of the expected log likelihood side by side; more of them use more memory.
EVIDENCE_BATCH = 8


# The order counts: code compares with ``NON_FINITE``, and messages hold one number for each.
class Status(IntEnum):
    """How a visit ended. From ``NON_FINITE`` on, the change that it sends is zero."""

    CONVERGED = 0
    NOT_CONVERGED = 1
    NON_FINITE = 2
    IMPROPER = 3
    NOT_CONJUGATE = 4
    AWAY = 5  # the silo did not answer: its factor stays


class Movement(NamedTuple):
    """How far the posterior has moved since the round began.

    ``mean`` and ``log_scale`` (dim,) are those of the posterior when the round began. ``steps``
    counts all steps of the run. ``moved`` is the largest move of a mean, in standard deviations, or
    of a log standard deviation. ``own`` says whether the server's own factor has converged.
    ``refused`` counts visits of this round whose change could not be used and was zero.
    """

    mean: Array
    log_scale: Array
    steps: Array
    moved: Array
    own: Array
    refused: Array


class ServerState(NamedTuple):
    """The state that the server keeps from round to round.

    ``params`` has the shared parameters and, as ``guide``, the posterior's natural parameters.
    ``total`` is the sum of all factors. ``server_factor`` is the server's own among them, for the
    part of the prior outside of the family. ``taken`` (silos,) is the share of each silo's last
    proposal that was added. Silos' local guides measure the globals in the ``frame``.
    """

    params: SharedParams
    total: Natural
    server_factor: Natural
    opt_state: optax.OptState
    damping: Array
    taken: Array
    progress: Movement
    frame: Gaussian


class SiloState(NamedTuple):
    """The state that a silo keeps from round to round.

    ``centre`` (dim,) is the point of the ``frame`` from which the local guides measure the globals.
    ``factor`` is the part that the server has added; ``pending`` is the last change that was sent,
    of which the silo does not know yet how much was added. ``status`` says how the last visit
    ended. ``stale`` has the cavity and the posterior from which an asynchronous silo works, and
    ``multiplier`` what else a relative of PVI keeps.
    """

    params: SiloParams
    centre: Array
    factor: Natural
    pending: Natural
    visits: Array
    status: Array
    stale: tuple[Natural, Natural] | tuple[()]
    frame: Gaussian
    multiplier: Natural | tuple[()] = ()

    def effective_factor(self, taken: Array) -> Natural:
        """Return the factor with the share of its pending change that was added."""
        return jax.tree.map(lambda a, b: a + taken * b, self.factor, self.pending)


class Down(NamedTuple):
    """A message: shared parameters, sum of factors, share of the last proposal that was added."""

    theta: dict[str, Any]
    total: Natural
    taken: Any = ()


class Up(NamedTuple):
    """A silo's message: the change of its factor, and a report of the visit.

    ``log_lik`` is the expected log likelihood at the posterior that the silo received, ``theta``
    its gradient in the shared parameters. ``statuses`` is a one-hot vector: a sum over silos then
    counts how visits ended.
    """

    change: Natural
    log_lik: Array
    theta: dict[str, Any]
    statuses: Array


@dataclass(frozen=True, eq=False, kw_only=True)
class PVIAtSilo:
    """The algorithm at a silo, its parts, and the settings that distinguish PVI and its relatives.

    ``bound``: The silo's term of the bound.
    ``conjugate``: Whether the likelihood is conjugate to the family of the globals.
    ``divergence``: The one to the cavity; None for KL.
    ``aggregate``: The function that makes a posterior of a prior and a sum of factors.
    ``steps``: Server updates in a round.
    ``visits``: Visits in a round, over all silos.
    ``adaptive``: Whether to lower the damping where an update would be improper, instead of
        rejecting it.
    ``deletion`` {"own", "none", "average", "prior"}: The factor that is taken out of the posterior
        to make the cavity: the silo's own; none; an average one, which is the sum over the number
        of silos; or all factors.
    ``prior_share``: The share of the prior that a silo's cavity holds.
    ``asynchronous``: Whether silos' proposals are from earlier posteriors than the one that they
        change.
    ``delayed``: Whether a silo works from the message of its visit before, as asynchronous silos of
        one process do: its computation takes so long.
    ``start_scale``: The largest standard deviation, of Gaussian globals, at which a silo's first
        visit starts.
    ``evidence_draws``: Draws for the expected log likelihood.
    ``exact``: Whether a silo's proposal depends on nothing but its own data.
    ``from_mode``: Whether a run begins at the mode, and a visit near its optimum.
    ``has_loss, has_divergence``: Whether a loss stands in the place of the log density, and whether
        any divergence is not KL.
    """

    model: FederatedModel
    globals: Globals
    guide: Guide
    bound: Bound
    local: Local
    prior_local: Local
    conjugate: bool
    optim: optax.GradientTransformation
    minibatches: Minibatches | None
    divergence: Callable[[Natural, Natural], Array] | None
    aggregate: Callable[[Natural, Natural], Natural]
    num_silos: int
    steps: int
    visits: int
    damping: float
    adaptive: bool
    deletion: str
    prior_share: float
    asynchronous: bool
    delayed: bool
    start_scale: float | None
    evidence_draws: int
    exact: bool
    from_mode: bool
    has_loss: bool
    has_divergence: bool

    @property
    def family(self) -> Family[Any]:
        """Return the family of the globals."""
        return self.globals.family

    def solve(self, local: Local, problem: Problem[SiloPart], key: Array) -> Solution[SiloPart]:
        """Return a solution; from the mode, in coordinates in which the start is standard."""
        if not (self.from_mode and local.standardises):
            return local.solve(problem, key)
        inside, back_solution = problem.standardised()
        return back_solution(local.solve(inside, key))

    def first_frame(self) -> Gaussian:
        """Return the frame before the start: the identity, or a placeholder of a full one."""
        if not self.from_mode:
            return identity((self.model.dim,))
        return Gaussian.of_root(jnp.zeros(self.model.dim), jnp.eye(self.model.dim))

    def init_silo(self, key: Array, data: SiloData) -> SiloState:
        """Return the first state, without a factor."""
        key_private, key_guide = jax.random.split(key)
        params = SiloParams(
            self.guide.init_local(key_guide, data), self.model.init_private(key_private, data)
        )
        shapes = jax.eval_shape(lambda: self.globals.prior(self.model.init_theta(key)))
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
        none = jnp.zeros((), jnp.int32)
        stale = (zeros, zeros) if self.delayed else ()
        centre, frame = jnp.zeros(self.model.dim), self.first_frame()
        return SiloState(params, centre, zeros, zeros, none, none, stale, frame)

    def visit(
        self, noise: Array, down: Down, state: SiloState, data: SiloData
    ) -> tuple[Reply[Up], SiloState]:
        """Solve the silo's problem, and reply with the change of its factor; zero if unusable."""
        # The report's draws are apart from the fit's.
        key_local, key_evidence = jax.random.split(noise)
        family, prior = self.family, self.globals.prior(down.theta)
        factor = state.effective_factor(down.taken)
        posterior = self.aggregate(prior, down.total)
        removed = self.removed(factor, down.total, state)
        share = jax.tree.map(lambda a: self.prior_share * a, prior)
        own_cavity = self.aggregate(share, jax.tree.map(jnp.subtract, down.total, removed))
        current = cavity, start_from = own_cavity, posterior
        if state.stale:
            # An asynchronous silo works from those of its visit before: its computation takes so
            # long.
            from_prior = self.globals.prior_outside is None and not self.from_mode
            at_first = (prior, prior) if from_prior else current
            cavity, start_from = where(state.visits > 0, state.stale, at_first)
        # At the posterior that the server sent, and not at the solution: the loss is then that of
        # one posterior, the same for all silos of a step.
        log_lik, g_theta = self.expected_log_lik(key_evidence, down.theta, posterior, state, data)
        start, scale = family.ordinary(start_from), None if self.from_mode else self.start_scale
        if scale is not None and GAUSSIAN in start:
            # At first no wider than asked for: the paper's remedy against pruning units of a
            # network.
            widest = jnp.where(state.visits == 0, np.log(scale), jnp.inf)
            log_scale = jnp.minimum(start[GAUSSIAN]["log_scale"], widest)
            start = {**start, GAUSSIAN: {**start[GAUSSIAN], "log_scale": log_scale}}
        problem = self._problem(down.theta, cavity, start, state, data)
        solution = self.solve(self.local, problem, key_local)
        proposal, multiplier = self.proposal(problem.factor(solution.eta), solution.eta, prior)
        change = jax.tree.map(
            jnp.subtract, proposal, removed if self.deletion in ("none", "average") else factor
        )
        status = self._status(solution, change)
        usable = status < Status.NON_FINITE
        change = where(usable, change, jax.tree.map(jnp.zeros_like, change))
        g_theta = where(usable, g_theta, jax.tree.map(jnp.zeros_like, g_theta))
        statuses = jax.nn.one_hot(status, len(Status), dtype=jnp.int32)
        centre = state.frame.standardise(family.centre(family.ordinary(solution.eta)))
        params, centre, multiplier = where(
            usable,
            (solution.silo_part, centre, multiplier),
            (state.params, state.centre, state.multiplier),
        )
        stale = current if self.delayed else ()
        draft = state._replace(
            params=params,
            centre=centre,
            factor=factor,
            pending=change,
            visits=state.visits + 1,
            status=status,
            stale=stale,
            multiplier=multiplier,
        )
        return Reply(Up(change, log_lik, g_theta, statuses), jnp.array(True)), draft

    def removed(self, factor: Natural, total: Natural, state: SiloState) -> Natural:
        """Return what is taken out of the posterior to make the cavity."""
        return {
            "own": factor,
            "none": jax.tree.map(jnp.zeros_like, factor),
            "average": jax.tree.map(lambda a: a / self.num_silos, total),
            "prior": total,
        }[self.deletion]

    def proposal(
        self, found: Natural, eta: Natural, prior: Natural
    ) -> tuple[Natural, Natural | tuple[()]]:
        """Return the next factor and multiplier; ``found`` leads from the cavity to ``eta``."""
        return found, ()

    def _status(self, solution: Solution[SiloParams], change: Natural) -> Array:
        """Return how a visit has ended."""
        finite = solution.finite & all_finite((change, solution.silo_part))
        proper = self.family.proper(solution.eta)
        # Later lines have the last word: a visit with NaN is NON_FINITE whatever else it is.
        status = jnp.where(solution.converged, Status.CONVERGED, Status.NOT_CONVERGED)
        status = jnp.where(solution.suited, status, Status.NOT_CONJUGATE)
        status = jnp.where(finite & ~proper, Status.IMPROPER, status)
        return jnp.where(finite, status, Status.NON_FINITE).astype(jnp.int32)

    def expected_log_lik(
        self, key: Array, theta: Theta, posterior: Natural, state: SiloState, data: SiloData
    ) -> tuple[Array, Theta]:
        """Return the expected log likelihood at the posterior, and its gradient in ``theta``."""
        family, private = self.family, state.params.private

        def exact(theta: Theta) -> Array:
            rows = row_terms(self.model, {**theta, **private}, data)
            # E[f] = f(centre) + <eta, E[T] - T(centre)> for an affine f, the sum of the rows: it is
            # exact, and without f's constant, which ``fit`` does not return.
            eta, psi = family.fit(lambda z: rows(z).sum()), family.ordinary(posterior)
            z = family.centre(psi)
            moment_gap = jax.tree.map(jnp.subtract, family.moments(psi), family.statistics(z))
            return rows(z).sum() + expfam.inner(eta, moment_gap)

        def sampled(theta: Theta) -> Array:
            psi = family.ordinary(posterior)
            eta = self._guides_at(family.centre(psi), state, data)
            params, sizes = SiloParams(eta, private), {p: len(eta[p]["loc"]) for p in eta}
            num_batches = -(-self.evidence_draws // EVIDENCE_BATCH)
            batch_size = -(-self.evidence_draws // num_batches)

            def batch_values(i: Array) -> Array:
                noise = self._noise(jax.random.fold_in(key, i), sizes, batch_size)
                return self._at_draws(self.bound, psi, params, theta, noise, state, data)[1]

            values = jax.lax.map(batch_values, jnp.arange(num_batches)).ravel()
            return values[: self.evidence_draws].mean()

        expected = exact if self.conjugate else sampled
        log_lik, gradient = jax.value_and_grad(expected)(theta) if theta else (expected(theta), {})
        # At a vague prior it may not be finite, and nothing is wrong.
        is_finite = all_finite((log_lik, gradient))
        gradient = jax.tree.map(lambda g: jnp.where(is_finite, g, 0.0), gradient)
        return jnp.where(jnp.isfinite(log_lik), log_lik, -jnp.inf), gradient

    def _problem(
        self, theta: Theta, cavity: Natural, start: Ordinary, state: SiloState, data: SiloData
    ) -> Problem[SiloParams]:
        """Return the silo's problem between two messages, for its local optimiser."""
        fm, family, guide = self.model, self.family, self.guide
        eta = self._guides_at(family.centre(start), state, data)
        silo_part = SiloParams(eta, state.params.private)

        def noise(key: Array, particles: int, batch: int | None) -> LocalNoise:
            which, sizes = None, {p: len(part["loc"]) for p, part in eta.items()}
            if batch and self.minibatches:
                key, key_which = jax.random.split(key)
                which, sizes = self.minibatches.noise(key_which), self.minibatches.sizes(sizes)
            return self._noise(key, sizes, particles)._replace(which=which)

        def log_lik(
            psi: Ordinary, silo_part: SiloParams, noise: LocalNoise, plain: bool
        ) -> tuple[Array, Array]:
            batch, indices = draw_minibatch(self.minibatches, noise.which, data)
            params = silo_part._replace(guide=rows_at(silo_part.guide, indices))
            bound = self.bound
            if plain and isinstance(bound, SiloBound):
                bound = replace(bound, plain=True)
            return self._at_draws(bound, psi, params, theta, noise, state, batch)

        def to_frame(params: SiloParams) -> tuple[SiloParams, Callable[[SiloParams], SiloParams]]:
            """Return the silo's parameters in the frames of its rows, and the way back."""
            frames, inside = guide.to_frame(params.guide)
            return params._replace(guide=inside), lambda params: params._replace(
                guide=guide.from_frame(frames, params.guide)
            )

        num_rows = sum(fm.sizes(data).values())

        def likelihood() -> tuple[Natural, Callable[[Ordinary], Array]]:
            rows = row_terms(fm, {**theta, **silo_part.private}, data)
            eta = family.fit(lambda z: rows(z).sum())
            return eta, partial(misfit, rows, family, eta, start, num_rows)

        problem = Problem(family, cavity, start, silo_part, noise, log_lik, likelihood, num_rows)
        return problem._replace(divergence=self.divergence, to_frame=to_frame)

    def _guides_at(self, centre: Array, state: SiloState, data: SiloData) -> dict[str, GuideParams]:
        """Return the silo's local guides, measured from a centre (dim,) of the globals."""
        offset = state.frame.standardise(centre) - state.centre
        return self.guide.recentre(state.params.guide, offset, data)

    def _at_draws(
        self,
        bound: Bound,
        psi: Ordinary,
        params: SiloParams,
        theta: Theta,
        noise: LocalNoise,
        state: SiloState,
        data: SiloData,
    ) -> tuple[Array, Array]:
        """Return draws (n, dim) of the globals, and the bound (n,) at each."""
        centre = state.frame.standardise(self.family.centre(psi))

        def at_draw(noise_globals: Parts, noise_rows: Rows) -> tuple[Array, Array]:
            z = self.family.draw(psi, noise_globals)
            coordinates = Coordinates(state.frame.standardise(z), centre)
            given = AtDraw({**theta, **params.private}, params.guide, z, coordinates, data)
            return z, bound.value(given, noise_rows)

        return jax.vmap(at_draw, (0, 1))(noise.globals, noise.rows)

    def _noise(self, key: Array, sizes: Sizes, draws: int) -> LocalNoise:
        """Return the noise of ``draws`` draws of the globals, and of the rows for each of them."""
        # One normal draw for globals and rows together: each draw is a program to compile.
        family, shapes = self.family, self.bound.shapes(sizes, draws)
        if not family.of_normals:
            key, key_globals = jax.random.split(key)
            return LocalNoise(family.noise(key_globals, draws), normals(key, 0, shapes)[1])
        for_globals, rows = normals(key, draws * family.dim, shapes)
        noise = family.from_normals(for_globals.reshape(draws, family.dim))
        return LocalNoise(noise, rows)
