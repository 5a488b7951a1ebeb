"""The server of PVI: it adds proposals to the posterior, and may have a factor for the prior."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import optax
from jax import Array

from numpyro_fed import expfam
from numpyro_fed.algorithms.base import (
    Ask,
    AskSilos,
    Exchange,
    FederatedAlgorithm,
    Info,
    Round,
    Shared,
    SharedParams,
    key_as_noise,
    stacked_reply,
)
from numpyro_fed.algorithms.expand import shape
from numpyro_fed.algorithms.pvi.silo import Silo
from numpyro_fed.algorithms.pvi.states import (
    SCATTERED,
    VISIT,
    Down,
    Movement,
    Report,
    Role,
    ServerState,
    SiloState,
    Status,
    Up,
)
from numpyro_fed.divergences import KL, WeightedKL
from numpyro_fed.expfam import Family
from numpyro_fed.expfam.base import Natural, Ordinary, Tree, location_and_log_scale
from numpyro_fed.local.base import LocalNoise, Problem, minimise, proper_step
from numpyro_fed.model.binding import Theta
from numpyro_fed.model.data import SiloData
from numpyro_fed.programs import jit_once
from numpyro_fed.trees import all_finite, where

KL_DRAWS = 256  # for the KL to a prior outside of the family: more make the loss less noisy
# The distance to the limit of further rounds, in sds, at which a run has converged: the error that
# a fit is allowed.
ARRIVED = 0.1


@dataclass(frozen=True)
class Server(Role):
    """The server's part of the algorithm."""

    def init(self, key: Array) -> ServerState:
        """Return the first state: the prior, with the server's own factor if it needs one."""
        theta = self.model.init_theta(key)
        prior = self.prior(theta)
        server_factor, converged = jax.tree.map(jnp.zeros_like, prior), jnp.array(True)
        outside = self.parts.globals.prior_outside
        # A run from the mode has the parabola of the prior's outside part as this factor instead:
        # ``begin``.
        if outside is not None and not self.settings.from_mode:
            start = jax.tree.map(
                lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(self.family.ordinary, prior)
            )
            server_factor, converged = self._server_factor(
                outside, key, theta, prior, start, server_factor
            )
        guide = self.parts.aggregate(prior, server_factor)
        none = jnp.zeros(self.model.dim)
        progress = Movement(
            none, none, jnp.zeros((), jnp.int32), jnp.zeros(()), converged, jnp.zeros(())
        )
        return ServerState(
            SharedParams(guide, theta),
            server_factor,
            server_factor,
            self.parts.optim.init(theta),
            jnp.asarray(self.settings.damping, jnp.result_type(float)),
            jnp.zeros(self.settings.num_silos),
            progress,
            self.first_frame(),
        )

    def round(self, state: ServerState, noise: Array, ask: Ask) -> tuple[ServerState, Info]:
        """Ask for changes, take as much as leaves the posterior proper, and step on theta."""
        settings, theta, before = self.settings, state.params.theta, state.params.guide
        up: Up = ask(VISIT, Down(theta, state.total, state.taken[ask.who])).up
        kl_to_prior, prior = self.kl_to_prior(noise, theta, before), self.prior(theta)

        def proper(total: Natural) -> Array:
            return self.family.proper(self.parts.aggregate(prior, total))

        if settings.adaptive:
            target = jax.tree.map(jnp.add, state.total, up.change)
            total, damping = proper_step(proper, state.total, target, state.damping)
            # Down as far as a step had to be damped, and up again by two in each step.
            lowered = jnp.where(damping > 0, damping, state.damping / 2)
            next_damping = jnp.minimum(2 * lowered, settings.damping)
        else:
            moved = jax.tree.map(lambda a, b: a + state.damping * b, state.total, up.change)
            fine, next_damping = proper(moved), state.damping
            total = where(fine, moved, state.total)
            damping = jnp.where(fine, state.damping, 0.0)
        total, server_factor, converged = self._renew_server_factor(state, noise, theta, total)
        theta, opt_state, guide = self._update_theta(state, noise, total, up.theta)
        after = ServerState(
            SharedParams(guide, theta),
            total,
            server_factor,
            opt_state,
            next_damping,
            state.taken.at[ask.who].set(damping),
            self._progress(state.progress, before, guide, converged, up.statuses),
            state.frame,
        )
        # Each silo's term counts once in a round, however many visits a round has.
        weight = settings.num_silos / settings.visits
        loss = kl_to_prior / settings.steps - weight * up.log_lik
        moved_by = expfam.kl(self.family, guide, before)
        report = Report(damping, up.statuses, converged)
        return after, Info(loss, all_finite(after), moved_by, report)

    def view(self, state: ServerState) -> Shared:
        """Return shared parameters and the posterior."""
        return Shared(state.params.theta, state.params.guide, state.frame)

    def done(self, state: ServerState) -> Array:
        """Return whether the last round moved the posterior little, and used every proposal."""
        progress, settings = state.progress, self.settings
        ends = (progress.steps > 0) & (progress.steps % settings.steps == 0)
        used = jnp.where(state.taken > 0, state.taken, 1.0).min()
        # A damped round goes only part of the way to the optimum. How far it went is divided by
        # that part; else a run with a damping of 1/100 would look converged from its first round.
        pace = used * settings.share * settings.visits / settings.num_silos
        accepted = (state.taken > 0).all() & (progress.refused == 0) & progress.own
        return ends & accepted & (progress.moved <= ARRIVED * pace)

    def kl_to_prior(self, key: Array, theta: Theta, eta: Natural) -> Array:
        """Return the KL from posterior to prior, estimated where the prior is not in the family."""
        family = self.family
        if self.parts.globals.prior_outside is None and not self.model.improper:
            return expfam.kl(family, eta, self.prior(theta))
        psi, noise = family.ordinary(eta), family.noise(key, KL_DRAWS)

        def log_ratio_at(noise: Tree) -> Array:
            z = family.draw(psi, noise)
            return expfam.log_density(family, eta, z) - self.model.log_prior(theta, z)

        return jax.vmap(log_ratio_at)(noise).mean()

    def _renew_server_factor(
        self, state: ServerState, key: Array, theta: Theta, total: Natural
    ) -> tuple[Natural, Natural, Array]:
        """Return the total with a new factor of the server, that factor, and if it converged."""
        # The server treats the prior's part outside of the family as a silo treats its likelihood,
        # and visits it in each round.
        before = state.server_factor
        if (outside := self.parts.globals.prior_outside) is None:
            return total, before, state.progress.own
        prior, aggregate = self.prior(theta), self.parts.aggregate
        # The factor is replaced, not damped: the server's problem has no data, and is solved anew.
        others = jax.tree.map(jnp.subtract, total, before)
        start = self.family.ordinary(aggregate(prior, total))
        cavity = aggregate(prior, others)
        factor, converged = self._server_factor(outside, key, theta, cavity, start, before)
        return jax.tree.map(jnp.add, others, factor), factor, converged

    def _update_theta(
        self, state: ServerState, key: Array, total: Natural, gradient: Theta
    ) -> tuple[Theta, optax.OptState, Natural]:
        """Return theta after a step on the free energy, optimiser state and the new posterior."""
        theta, before, settings = state.params.theta, state.params.guide, self.settings
        guide = self.parts.aggregate(self.prior(theta), total)
        if not theta:
            return theta, state.opt_state, guide
        pull = jax.grad(lambda t: self.kl_to_prior(key, t, before))(theta)
        scale = settings.num_silos / settings.visits * settings.steps
        descent = jax.tree.map(lambda p, g: p - scale * g, pull, gradient)
        updates, opt_state = self.parts.optim.update(descent, state.opt_state, theta)
        moved = optax.apply_updates(theta, updates)
        shifted = self.parts.aggregate(self.prior(moved), total)
        # The prior's natural parameters depend on theta, so a step may make the posterior
        # improper. It is then not taken.
        fine = self.family.proper(shifted) & all_finite(moved)
        return where(fine, (moved, opt_state, shifted), (theta, state.opt_state, guide))

    def _progress(
        self, before: Movement, old: Natural, new: Natural, converged: Array, statuses: Array
    ) -> Movement:
        """Return how far the posterior has moved since the round began."""
        means, log_scales = zip(
            location_and_log_scale(self.family, old),
            location_and_log_scale(self.family, new),
            strict=True,
        )
        round_begins = before.steps % self.settings.steps == 0
        # A flat prior has no mean and no sd: the first round then counts as a move from zero.
        mean = jnp.where(round_begins, jnp.nan_to_num(means[0]), before.mean)
        log_scale = jnp.where(round_begins, jnp.nan_to_num(log_scales[0]), before.log_scale)
        moves = (
            jnp.abs(means[1] - mean) / jnp.exp(log_scales[1]),
            jnp.abs(log_scales[1] - log_scale),
        )
        moved = jnp.nan_to_num(jnp.concatenate(moves).max(initial=0.0))
        visits = statuses[Status.NON_FINITE :].sum().astype(moved.dtype)
        refused = jnp.where(round_begins, 0.0, before.refused) + visits
        return Movement(mean, log_scale, before.steps + 1, moved, converged, refused)

    def _server_factor(
        self,
        log_outside: Callable[[Theta, Array], Array],
        key: Array,
        theta: Theta,
        cavity: Natural,
        start: Ordinary,
        before: Natural,
    ) -> tuple[Natural, Array]:
        """Return the server's own factor, and whether it converged."""
        family = self.family

        def noise(key: Array, particles: int, batch: int | None) -> LocalNoise:
            return LocalNoise(family.noise(key, particles), {}, None)

        def log_lik(
            psi: Ordinary, silo_part: object, noise: LocalNoise, plain: bool
        ) -> tuple[Array, Array]:
            def log_outside_at(noise: Tree) -> tuple[Array, Array]:
                z = family.draw(psi, noise)
                return z, log_outside(theta, z)

            return jax.vmap(log_outside_at)(noise.globals)

        def likelihood() -> NoReturn:
            raise TypeError("a prior outside of the family has no closed form")

        problem = Problem(family, cavity, start, (), noise, log_lik, likelihood, 0, None)
        solution = self.solve(self.parts.prior_local, problem, key)
        factor = jax.tree.map(jnp.subtract, solution.eta, cavity)
        fine = family.proper(solution.eta) & all_finite(factor)
        return where(fine, factor, before), fine & solution.converged


EVALUATION = "evaluation"  # the name of the exchange


class PosteriorToEvaluate(NamedTuple):
    """The server's message: shared parameters, and the sum of all factors."""

    theta: Theta
    total: Natural


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The question to silos for their expected log likelihoods, and the free energy by it."""

    server: Server
    silo: Silo

    @cached_property
    def exchange(self) -> Exchange[Any, Any, Any]:
        """Return the exchange in which silos tell expected log likelihoods."""

        def expect(
            noise: Array, down: PosteriorToEvaluate, state: SiloState, data: SiloData
        ) -> Array:
            # As in a visit; the silo's own state may be older.
            silo = self.silo
            posterior = silo.parts.aggregate(silo.prior(down.theta), down.total)
            return silo.expected_log_lik(noise, down.theta, posterior, state, data)[0]

        def messages() -> tuple[PosteriorToEvaluate, Any]:
            first = jax.eval_shape(self.server.init, jax.random.key(0))
            return PosteriorToEvaluate(first.params.theta, first.total), shape()

        return Exchange(
            EVALUATION,
            stacked_reply(expect, little=True),
            silo_noise=key_as_noise,
            stacked=True,
            like=messages,
        )

    def free_energy(self, ask: AskSilos, key: Array, state: ServerState) -> float:
        """Return the free energy of the posterior, in one exchange."""
        log_lik = ask(self.exchange, PosteriorToEvaluate(state.params.theta, state.total))
        kl = jit_once(self.server.kl_to_prior)(key, state.params.theta, state.params.guide)
        return float(log_lik) - float(kl)


STEPS = 200  # of L-BFGS, at most
TOLERANCE = 1e-5  # the largest slope at which it ends
# The largest slope, relative to the largest coefficient, that counts as a minimum. Where these are
# large the absolute tolerance is out of reach in single precision; without a minimum the slope
# stays of their size.
ENOUGH = 1e-3


def aggregate(
    family: Family[Any], divergence: Callable[..., Array]
) -> Callable[[Natural, Natural], Natural]:
    """Return the function ``(prior, total) -> eta`` for a divergence ``(family, eta_q, eta_p)``.

    Where no minimum is found, ``eta`` is NaN, which counts as improper.
    """
    if isinstance(divergence, KL | WeightedKL):
        weight = divergence.weight if isinstance(divergence, WeightedKL) else 1.0
        return lambda prior, total: jax.tree.map(lambda a, b: a + b / weight, prior, total)

    def solve(prior: Natural, total: Natural) -> Natural:
        def objective(psi: Ordinary) -> Array:
            gain = expfam.inner(total, family.moments(psi))
            return divergence(family, family.natural(psi), prior) - gain

        summed = jax.tree.map(jnp.add, prior, total)
        proper = family.proper(summed)
        start = jax.tree.map(lambda a, b: jnp.where(proper, a, b), summed, prior)
        psi, _, slope = minimise(objective, family.ordinary(start), STEPS, TOLERANCE)
        scale = 1 + jnp.stack([jnp.abs(x).max() for x in jax.tree.leaves(total)]).max()
        converged = slope <= ENOUGH * scale
        return jax.tree.map(lambda a: jnp.where(converged, a, jnp.nan), family.natural(psi))

    return solve


def pvi(server: Server, silo: Silo) -> FederatedAlgorithm[ServerState, SiloState]:
    """Return PVI, or one of its relatives, as pure functions."""
    exchange = Exchange(
        VISIT,
        silo.visit,
        commit=lambda draft, sent: draft._replace(pending=sent.change),
        silo_noise=key_as_noise,
        scatter=Down(*SCATTERED),
        # Not the default, all_finite: an expected log likelihood of minus infinity is allowed.
        usable=usable,
    )
    return FederatedAlgorithm(
        server.init,
        silo.init,
        Round((exchange,), server.round, key_as_noise),
        server.view,
        silo.view,
        watch=lambda state: state.status,
        watch_reply=lambda up: worst(up.statuses),
        done=server.done,
        # A factor that is not renewed stays in the posterior as it is.
        without="exact",
        away=jnp.int32(Status.AWAY),
    )


def worst(statuses: Array) -> Array:
    """Return the last status that a visit ended by; of one visit, the one that it ended by.

    ``statuses`` counts how visits ended. Where silos' replies are told as a sum alone, nobody knows
    whose visit ended badly, and all of them are doubted.
    """
    return jnp.max(jnp.where(statuses > 0, jnp.arange(len(statuses)), 0))


def usable(up: Up) -> Array:
    """Return whether the server can use a proposal.

    The expected log likelihood may be minus infinity: at a vague prior it is, and nothing is wrong.
    Exactly one status must be set.
    """
    counted = (up.statuses >= 0).all() & (up.statuses.sum() == 1)
    return all_finite((up.change, up.theta)) & (up.log_lik < jnp.inf) & counted
