"""What a silo does when PVI visits it: take its factor out, solve, answer with the change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed import expfam
from numpyro_fed.algorithms.base import OwnParams, Private, Reply
from numpyro_fed.algorithms.pvi.conjugacy import log_likelihood, misfit, row_terms
from numpyro_fed.algorithms.pvi.families import GAUSSIAN
from numpyro_fed.algorithms.pvi.states import Down, Role, SiloState, Status, Up
from numpyro_fed.expfam.base import Natural, Ordinary, Tree
from numpyro_fed.gaussian import Gaussian
from numpyro_fed.local.base import Noise, Problem, Solution
from numpyro_fed.model.binding import Rows, Theta
from numpyro_fed.model.data import SiloData, Sizes
from numpyro_fed.model.minibatch import draw_minibatch, rows_at
from numpyro_fed.objectives import normals
from numpyro_fed.trees import all_finite, where

TOGETHER = 8  # draws of the expected log likelihood, at most, side by side


@dataclass(frozen=True)
class Silo(Role):
    """A silo's part of the algorithm."""

    def init(self, key: Array, data: SiloData) -> SiloState:
        """Return the first state, without a factor."""
        key_private, key_guide = jax.random.split(key)
        params = OwnParams(
            self.parts.guide.init_local(key_guide, data),
            self.model.init_private(key_private, data),
        )
        like = jax.eval_shape(lambda: self.prior(self.model.init_theta(jax.random.key(0))))
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)
        none = jnp.zeros((), jnp.int32)
        stale = (zeros, zeros) if self.settings.asynchronous else ()
        centre, frame = jnp.zeros(self.model.dim), self.first_frame()
        return SiloState(params, centre, zeros, zeros, none, none, stale, frame)

    def visit(
        self, noise: Array, down: Down, state: SiloState, data: SiloData
    ) -> tuple[Reply[Up], SiloState]:
        """Solve the silo's own problem; a visit that cannot be used proposes no change."""
        key_local, key_evidence = jax.random.split(noise)
        factor = state.effective_factor(down.taken)
        posterior = self.parts.aggregate(self.prior(down.theta), down.total)
        removed = self._removed(factor, down.total)
        now = (self._cavity(down, removed), posterior)
        cavity, begin = self._working_from(now, down, state)
        log_lik, g_theta = self.expected_log_lik(key_evidence, down.theta, posterior, state, data)
        problem = self._problem(down.theta, cavity, self._start(begin, state.visits), state, data)
        found = self.solved(self.parts.local, problem, key_local)
        proposal = self._factor(found.eta, cavity)
        change = jax.tree.map(
            jnp.subtract, proposal, factor if self.settings.deletion == "prior" else removed
        )
        status = self._status(found, change)
        usable = status < Status.NON_FINITE
        change = where(usable, change, jax.tree.map(jnp.zeros_like, change))
        g_theta = where(usable, g_theta, jax.tree.map(jnp.zeros_like, g_theta))
        statuses = jax.nn.one_hot(status, len(Status), dtype=jnp.int32)
        centre = state.frame.standardise(self.family.centre(self.family.ordinary(found.eta)))
        draft = SiloState(
            *where(usable, (found.own, centre), (state.params, state.centre)),
            factor,
            change,
            state.visits + 1,
            status,
            now if self.settings.asynchronous else (),
            state.frame,
        )
        return Reply(Up(change, log_lik, g_theta, statuses), jnp.array(True)), draft

    def commit(self, draft: SiloState, sent: Up) -> SiloState:
        """Return the state with what was sent as pending, whatever stood between."""
        return draft._replace(pending=sent.change)

    def view(self, state: SiloState) -> Private:
        """Return private parameters, the local guide and its centre."""
        return Private(state.params.private, state.params.guide, state.centre)

    def _removed(self, factor: Natural, total: Natural) -> Natural:
        """Return what is taken out of the posterior to make the cavity."""
        if self.settings.deletion == "own":
            return factor
        if self.settings.deletion == "none":
            return jax.tree.map(jnp.zeros_like, factor)
        if self.settings.deletion == "average":
            return jax.tree.map(lambda a: a / self.settings.num_silos, total)
        return total

    def _cavity(self, down: Down, removed: Natural) -> Natural:
        share = jax.tree.map(lambda a: self.settings.prior_share * a, self.prior(down.theta))
        return self.parts.aggregate(share, jax.tree.map(jnp.subtract, down.total, removed))

    def _working_from(
        self, now: tuple[Natural, Natural], down: Down, state: SiloState
    ) -> tuple[Natural, Natural]:
        """Return cavity and posterior of this visit, or of the one before if it takes so long."""
        if not state.stale:
            return now
        prior = self.prior(down.theta)
        from_prior = self.parts.globals.prior_outside is None and not self.settings.from_mode
        at_first = (prior, prior) if from_prior else now
        return where(state.visits > 0, state.stale, at_first)

    def _start(self, posterior: Natural, visits: Array) -> Ordinary:
        """Return where a visit starts: at the posterior, at first no wider than asked."""
        psi = self.family.ordinary(posterior)
        scale = None if self.settings.from_mode else self.settings.start_scale
        if scale is None or GAUSSIAN not in psi:
            return psi
        widest = jnp.where(visits == 0, np.log(scale), jnp.inf)
        log_scale = jnp.minimum(psi[GAUSSIAN]["log_scale"], widest)
        return {**psi, GAUSSIAN: {**psi[GAUSSIAN], "log_scale": log_scale}}

    def _factor(self, eta: Natural, cavity: Natural) -> Natural:
        """Return the factor that makes ``eta`` of the cavity: the gradient of their divergence."""
        if self.parts.divergence is None:
            return jax.tree.map(jnp.subtract, eta, cavity)
        family, divergence = self.family, self.parts.divergence
        return family.dual_gradient(lambda psi: divergence(family.natural(psi), cavity), eta)

    def _status(self, found: Solution[OwnParams], change: Natural) -> Array:
        finite = found.finite & all_finite((change, found.own))
        proper = self.family.proper(found.eta)
        status = jnp.where(found.converged, Status.CONVERGED, Status.NOT_CONVERGED)
        status = jnp.where(found.suited, status, Status.NOT_CONJUGATE)
        status = jnp.where(finite & ~proper, Status.IMPROPER, status)
        return jnp.where(finite, status, Status.NON_FINITE).astype(jnp.int32)

    def expected_log_lik(
        self, key: Array, theta: Theta, posterior: Natural, state: SiloState, data: SiloData
    ) -> tuple[Array, Theta]:
        """Return the expected log likelihood at the posterior, with its gradient for ``theta``."""
        parts, family, private = self.parts, self.family, state.params.private

        def exact(theta: Theta) -> Array:
            f = log_likelihood(parts.model, {**theta, **private}, data)
            eta, psi = family.fit(f), family.ordinary(posterior)
            z = family.centre(psi)
            away = jax.tree.map(jnp.subtract, family.moments(psi), family.statistics(z))
            return f(z) + expfam.inner(eta, away)

        def sampled(theta: Theta) -> Array:
            psi = family.ordinary(posterior)
            centre = family.centre(psi)
            eta = parts.guide.recentre(state.params.guide, state.away(centre), data)
            sizes = {p: len(part["loc"]) for p, part in eta.items()}

            def at(noise: Tree, rows: Rows) -> Array:
                z = family.draw(psi, noise)
                seen = state.seen(z, centre)
                return parts.bound.value({**theta, **private}, eta, z, seen, rows, data)

            draws = self.settings.evidence_draws
            times = -(-draws // TOGETHER)
            together = -(-draws // times)

            def some(i: Array) -> Array:
                noise, rows = self._noise(jax.random.fold_in(key, i), sizes, together)
                return jax.vmap(at, (0, 1))(noise, rows)

            return jax.lax.map(some, jnp.arange(times)).ravel()[:draws].mean()

        expected = exact if parts.conjugate else sampled
        log_lik, gradient = jax.value_and_grad(expected)(theta) if theta else (expected(theta), {})
        # At a vague prior it may not be finite, and nothing is wrong.
        fine = all_finite((log_lik, gradient))
        gradient = jax.tree.map(lambda g: jnp.where(fine, g, 0.0), gradient)
        return jnp.where(jnp.isfinite(log_lik), log_lik, -jnp.inf), gradient

    def _problem(
        self, theta: Theta, cavity: Natural, start: Ordinary, state: SiloState, data: SiloData
    ) -> Problem[OwnParams]:
        parts, fm, family, guide = self.parts, self.model, self.family, self.parts.guide
        centre = family.centre(start)
        eta = guide.recentre(state.params.guide, state.away(centre), data)
        own = OwnParams(eta, state.params.private)

        def noise(key: Array, particles: int, batch: int | None) -> Noise:
            which, sizes = None, {p: len(part["loc"]) for p, part in eta.items()}
            if batch and parts.minibatches:
                key, key_which = jax.random.split(key)
                which, sizes = parts.minibatches.noise(key_which), parts.minibatches.sizes(sizes)
            return Noise(*self._noise(key, sizes, particles), which)

        def log_lik(
            psi: Ordinary, own: OwnParams, noise: Noise, plain: bool
        ) -> tuple[Array, Array]:
            here, places = draw_minibatch(parts.minibatches, noise.which, data)
            local = rows_at(own.guide, places)
            shared = {**theta, **own.private}
            centre = family.centre(psi)
            bound = parts.plain_bound if plain else parts.bound

            def at(noise_globals: Tree, noise_rows: Rows) -> tuple[Array, Array]:
                z = family.draw(psi, noise_globals)
                seen = state.seen(z, centre)
                return z, bound.value(shared, local, z, seen, noise_rows, here)

            return jax.vmap(at, (0, 1))(noise.globals, noise.rows)

        num_rows = sum(fm.sizes(data).values())

        def likelihood() -> tuple[Natural, Callable[[Ordinary], Array]]:
            rows = row_terms(fm, {**theta, **own.private}, data)
            eta = family.fit(lambda z: rows(z).sum())
            return eta, partial(misfit, rows, family, eta, start, num_rows)

        return Problem(
            family,
            cavity,
            start,
            own,
            noise,
            log_lik,
            likelihood,
            num_rows,
            parts.divergence,
            self._framed,
        )

    def _framed(self, own: OwnParams) -> tuple[OwnParams, Callable[[OwnParams], OwnParams]]:
        """Return the silo's own part in frames of its rows, and the way back."""
        frames, inside = self.parts.guide.framed(own.guide)
        return own._replace(guide=inside), partial(self._placed, frames)

    def _placed(self, frames: dict[str, Gaussian], own: OwnParams) -> OwnParams:
        """Return the silo's own part, from one in frames of its rows."""
        return own._replace(guide=self.parts.guide.placed(frames, own.guide))

    def _noise(self, key: Array, sizes: Sizes, draws: int) -> tuple[Tree, Rows]:
        """Return the noise of so many draws of the globals, and of the rows for each."""
        family, shapes = self.family, self.parts.bound.shapes(sizes, draws)
        if not family.of_normals:
            key, key_globals = jax.random.split(key)
            return family.noise(key_globals, draws), normals(key, 0, shapes)[1]
        ahead, rows = normals(key, draws * family.dim, shapes)
        return family.from_normals(ahead.reshape(draws, family.dim)), rows
