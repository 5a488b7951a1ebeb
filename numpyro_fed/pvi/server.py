"""PVI at the server, which adds proposals to the posterior, and may have a factor for the prior.

Ashman et al. 2022, arXiv 2202.12275, Algorithm 1. At each update

1. the server sends the sum of all factors to the silos that take part;
2. each of them solves its own problem, and replies with the change of its factor (``silo.py``);
3. the server adds the changes, times a damping, as far as the posterior stays proper.

A start at a mode or at a result is in ``start.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from numpyro_fed.basics.trees import all_finite, where
from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.local.problem import LocalNoise, Problem, minimise, proper_step
from numpyro_fed.numerics import expfam
from numpyro_fed.numerics.divergences import KL, WeightedKL
from numpyro_fed.numerics.expfam import Family
from numpyro_fed.numerics.expfam.family import Natural, Ordinary, location_and_log_scale
from numpyro_fed.pvi.silo import Down, Movement, PVIAtSilo, ServerState, SiloState, Status, Up
from numpyro_fed.rounds.exchange import (
    Ask,
    Exchange,
    FederatedAlgorithm,
    Info,
    Round,
    WhenAway,
    key_as_noise,
)
from numpyro_fed.rounds.names import EVALUATION, PVI_ROUND
from numpyro_fed.rounds.stacks import StackedExchange, stacked_reply
from numpyro_fed.rounds.states import Private, Shared, SharedParams
from numpyro_fed.search.expand import shape
from numpyro_fed.text.site_table import Theta

KL_DRAWS = 256  # for the KL to a prior outside of the family: more make the loss less noisy
# The distance to the limit of further rounds, in sds, at which a run has converged: the error that
# a fit is allowed.
ARRIVED = 0.1
SCATTERED: Any = (False, False, True)  # each silo receives its own entry of ``taken`` only
MAX_LBFGS_STEPS = 200
MAX_SLOPE = 1e-5  # at which L-BFGS ends
# The largest slope, relative to the largest coefficient, that counts as a minimum. Where these are
# large the absolute tolerance is out of reach in single precision; without a minimum the slope
# stays of their size.
MAX_RELATIVE_SLOPE = 1e-3


def is_usable(up: Up) -> Array:
    """Return whether a proposal can be used: at a vague prior ``log_lik`` is minus infinity."""
    counted = (up.statuses >= 0).all() & (up.statuses.sum() == 1)
    return all_finite((up.change, up.theta)) & (up.log_lik < jnp.inf) & counted


def aggregation(
    family: Family[Any], divergence: Callable[..., Array]
) -> Callable[[Natural, Natural], Natural]:
    r"""Return ``(prior, total) -> eta``, the posterior that a prior and a sum of factors make.

    It is the minimum over the family of

    .. math::
        D(q, p) - \langle \lambda, \mathbb{E}_q[T] \rangle

    for the prior ``p``, the sum :math:`\lambda` of the factors' natural parameters, the statistics
    ``T`` and any divergence; NaN where no minimum is found. With the KL divergence it is the sum of
    natural parameters itself.
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
        psi, _, slope = minimise(objective, family.ordinary(start), MAX_LBFGS_STEPS, MAX_SLOPE)
        scale = 1 + jnp.stack([jnp.abs(x).max() for x in jax.tree.leaves(total)]).max()
        converged = slope <= MAX_RELATIVE_SLOPE * scale
        return jax.tree.map(lambda a: jnp.where(converged, a, jnp.nan), family.natural(psi))

    return solve


@dataclass(frozen=True, eq=False, kw_only=True)
class PartitionedVI(PVIAtSilo):
    """PVI, or one of its relatives, as pure functions.

    ``remedy`` names settings of the method that may help where no update could be taken, and
    ``if_unsettled`` ends the sentence about visits that did not converge, or were improper.
    """

    remedy: ClassVar[str] = "a smaller start_scale, or damping below 1"
    if_unsettled: ClassVar[str] = ""

    def algorithm(self) -> FederatedAlgorithm[ServerState, SiloState]:
        """Return the algorithm, without a start."""
        exchange = Exchange(
            PVI_ROUND,
            self.visit,
            commit=lambda draft, sent: draft._replace(pending=sent.change),
            silo_noise=key_as_noise,
            scatter=Down(*SCATTERED),
            # Not the default, all_finite: an expected log likelihood of minus infinity is allowed.
            usable=is_usable,
        )
        return FederatedAlgorithm(
            self.init_server,
            self.init_silo,
            Round((exchange,), self.round, key_as_noise),
            lambda state: Shared(state.params.theta, state.params.guide, state.frame),
            lambda state: Private(state.params.private, state.params.guide, state.centre),
            watch=lambda state: state.status,
            # The last status that a visit ended by. Where silos' replies are told as a sum alone,
            # nobody knows whose visit ended badly, and all of them are doubted.
            watch_reply=lambda up: jnp.max(
                jnp.where(up.statuses > 0, jnp.arange(len(up.statuses)), 0)
            ),
            done=self.done,
            # A factor that is not renewed stays in the posterior as it is.
            when_away=WhenAway.GO_ON,
            watched_away=np.int32(Status.AWAY),
        )

    def init_server(self, key: Array) -> ServerState:
        """Return the first state: the prior, with the server's own factor if it needs one."""
        theta = self.model.init_theta(key)
        prior = self.globals.prior(theta)
        server_factor = jax.tree.map(jnp.zeros_like, prior)
        server_converged = jnp.array(True)
        # A run from the mode has the parabola of the prior's outside part as this factor instead.
        if (outside := self.globals.prior_outside) is not None and not self.from_mode:
            start = jax.tree.map(
                lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(self.family.ordinary, prior)
            )
            server_factor, server_converged = self._visit_prior(
                outside, key, theta, prior, start, server_factor
            )
        none, zero = jnp.zeros(self.model.dim), jnp.zeros(())
        return ServerState(
            params=SharedParams(self.aggregate(prior, server_factor), theta),
            total=server_factor,
            server_factor=server_factor,
            opt_state=self.optim.init(theta),
            damping=jnp.asarray(self.damping, jnp.result_type(float)),
            taken=jnp.zeros(self.num_silos),
            progress=Movement(none, none, jnp.zeros((), jnp.int32), zero, server_converged, zero),
            frame=self.first_frame(),
        )

    def round(self, state: ServerState, noise: Array, ask: Ask) -> tuple[ServerState, Info]:
        """Ask for changes, take as much as leaves the posterior proper, and step on theta."""
        # One key serves the loss, the server's own factor and theta: estimates of expectations that
        # nothing combines.
        theta, posterior_before = state.params.theta, state.params.guide
        up: Up = ask(PVI_ROUND, Down(theta, state.total, state.taken[ask.who])).up
        kl_to_prior = self.kl_to_prior(noise, theta, posterior_before)
        prior = self.globals.prior(theta)
        is_proper = partial(self.is_proper, prior)
        if self.adaptive:
            target = jax.tree.map(jnp.add, state.total, up.change)
            total, damping = proper_step(is_proper, state.total, target, state.damping)
            # Down as far as a step had to be damped, and up again by two in each step. A step of
            # which not even a thousandth was proper says nothing of the next one.
            used = jnp.where(damping > 0, 2 * damping, state.damping)
            next_damping = jnp.minimum(used, self.damping)
        else:
            moved = jax.tree.map(lambda a, b: a + state.damping * b, state.total, up.change)
            accepted, next_damping = is_proper(moved), state.damping
            damping = jnp.where(accepted, state.damping, 0.0)
            total = where(accepted, moved, state.total)
        server_factor, server_converged = state.server_factor, state.progress.own
        if (outside := self.globals.prior_outside) is not None:
            # The server treats the prior's part outside of the family as a silo treats its
            # likelihood, and visits it in each round. The factor is replaced, not damped: the
            # server's problem has no data, and is solved anew.
            others = jax.tree.map(jnp.subtract, total, server_factor)
            start = self.family.ordinary(self.aggregate(prior, total))
            cavity = self.aggregate(prior, others)
            server_factor, server_converged = self._visit_prior(
                outside, noise, theta, cavity, start, server_factor
            )
            total = jax.tree.map(jnp.add, others, server_factor)
        theta, opt_state, posterior = self._update_theta(state, noise, total, up.theta)
        after = state._replace(
            params=SharedParams(posterior, theta),
            total=total,
            server_factor=server_factor,
            opt_state=opt_state,
            damping=next_damping,
            taken=state.taken.at[ask.who].set(damping),
            progress=self._progress(
                state.progress, posterior_before, posterior, server_converged, up.statuses
            ),
        )
        # Each silo's term counts once in a round, however many visits a round has.
        weight = self.num_silos / self.visits
        loss = kl_to_prior / self.steps - weight * up.log_lik
        # The damping used is 0 for a rejected update; ``own`` is the server's own factor's state.
        report = {"damping": damping, "statuses": up.statuses, "own": server_converged}
        return after, Info(loss, all_finite(after), report)

    def is_proper(self, prior: Natural, total: Natural) -> Array:
        """Return whether a prior and a sum of factors make a proper posterior."""
        return self.family.proper(self.aggregate(prior, total))

    def done(self, state: ServerState) -> Array:
        """Return whether the last round moved the posterior little, and used every proposal."""
        progress = state.progress
        ends = (progress.steps > 0) & (progress.steps % self.steps == 0)
        used = jnp.where(state.taken > 0, state.taken, 1.0).min()
        # A damped round goes only part of the way to the optimum. How far it went is divided by
        # that part; else a run with a damping of 1/100 would look converged from its first round.
        pace = used * self.pace
        accepted = (state.taken > 0).all() & (progress.refused == 0) & progress.own
        return ends & accepted & (progress.moved <= ARRIVED * pace)

    def exact_after(self, steps: int, away: bool) -> bool:
        """Return whether what silos have sent depends on nothing but their own data.

        The run has made so many ``steps``; ``away`` says whether a silo was away in one of them.
        """
        return self.exact

    @property
    def pace(self) -> float:
        """Return the share of the way to the fixed point that an undamped round goes."""
        # The share that a visit of few steps goes, times the share of silos that are visited.
        return self.local.share * self.visits / self.num_silos

    def kl_to_prior(self, key: Array, theta: Theta, eta: Natural) -> Array:
        """Return the KL from posterior to prior, estimated where the prior is not in the family."""
        family = self.family
        if self.globals.prior_outside is None and not self.model.improper:
            return family.kl(eta, self.globals.prior(theta))
        psi, noise = family.ordinary(eta), family.noise(key, KL_DRAWS)
        z = jax.vmap(family.draw, (None, 0))(psi, noise)
        log_ratio = jax.vmap(lambda z: family.log_density(eta, z) - self.model.log_prior(theta, z))
        return log_ratio(z).mean()

    def _update_theta(
        self, state: ServerState, key: Array, total: Natural, gradient: Theta
    ) -> tuple[Theta, optax.OptState, Natural]:
        """Return theta after a step on the free energy, optimiser state and the new posterior."""
        theta, posterior_before = state.params.theta, state.params.guide
        posterior = self.aggregate(self.globals.prior(theta), total)
        if not theta:
            return theta, state.opt_state, posterior
        pull = jax.grad(lambda t: self.kl_to_prior(key, t, posterior_before))(theta)
        scale = self.num_silos / self.visits * self.steps
        descent = jax.tree.map(lambda p, g: p - scale * g, pull, gradient)
        updates, opt_state = self.optim.update(descent, state.opt_state, theta)
        moved = optax.apply_updates(theta, updates)
        shifted = self.aggregate(self.globals.prior(moved), total)
        # The prior's natural parameters depend on theta, so a step may make the posterior
        # improper. It is then not taken.
        is_proper = self.family.proper(shifted) & all_finite(moved)
        return where(is_proper, (moved, opt_state, shifted), (theta, state.opt_state, posterior))

    def _progress(
        self,
        movement: Movement,
        posterior_before: Natural,
        posterior: Natural,
        server_converged: Array,
        statuses: Array,
    ) -> Movement:
        """Return how far the posterior has moved since the round began."""
        mean_before, log_scale_before = location_and_log_scale(self.family, posterior_before)
        mean_now, log_scale_now = location_and_log_scale(self.family, posterior)
        round_begins = movement.steps % self.steps == 0
        # A flat prior has no mean and no sd: the first round then counts as a move from zero.
        mean = jnp.where(round_begins, jnp.nan_to_num(mean_before), movement.mean)
        log_scale = jnp.where(round_begins, jnp.nan_to_num(log_scale_before), movement.log_scale)
        moves = (
            jnp.abs(mean_now - mean) / jnp.exp(log_scale_now),
            jnp.abs(log_scale_now - log_scale),
        )
        moved = jnp.nan_to_num(jnp.concatenate(moves).max(initial=0.0))
        num_refused = statuses[Status.NON_FINITE :].sum().astype(moved.dtype)
        refused_before = jnp.where(round_begins, 0.0, movement.refused)
        refused = refused_before + num_refused
        return Movement(mean, log_scale, movement.steps + 1, moved, server_converged, refused)

    def _visit_prior(
        self,
        log_outside: Callable[[Theta, Array], Array],
        key: Array,
        theta: Theta,
        cavity: Natural,
        start: Ordinary,
        factor_before: Natural,
    ) -> tuple[Natural, Array]:
        """Return the server's own factor, and whether it converged."""
        family = self.family

        def log_lik(
            psi: Ordinary, silo_part: object, noise: LocalNoise, plain: bool
        ) -> tuple[Array, Array]:
            z = jax.vmap(family.draw, (None, 0))(psi, noise.globals)
            return z, jax.vmap(log_outside, (None, 0))(theta, z)

        def likelihood() -> NoReturn:
            raise TypeError("a prior outside of the family has no closed form")

        problem = Problem(
            family,
            cavity,
            start,
            (),
            lambda key, particles, batch: LocalNoise(family.noise(key, particles), {}),
            log_lik,
            likelihood,
            rows=0,
        )
        solution = self.solve(self.prior_local, problem, key)
        factor = jax.tree.map(jnp.subtract, solution.eta, cavity)
        is_proper = family.proper(solution.eta) & all_finite(factor)
        return where(is_proper, factor, factor_before), is_proper & solution.converged

    @cached_property
    def evaluation(self) -> Exchange[Any, Any, Any]:
        """Return the exchange in which silos tell their expected log likelihoods."""

        def expect(noise: Array, down: Down, state: SiloState, data: SiloData) -> Array:
            # As in a visit; the silo's own state may be older.
            posterior = self.aggregate(self.globals.prior(down.theta), down.total)
            return self.expected_log_lik(noise, down.theta, posterior, state, data)[0]

        def messages() -> tuple[Down, Any]:
            first = jax.eval_shape(self.init_server, jax.random.key(0))
            return Down(first.params.theta, first.total), shape()

        visit = stacked_reply(expect, little=True)
        return StackedExchange(EVALUATION, visit, silo_noise=key_as_noise, messages=messages)
