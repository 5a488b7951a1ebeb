"""The silo of PVI: it takes its factor out of the posterior, solves, and sends the change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed import expfam
from numpyro_fed.algorithms.base import Private, Reply, SiloParams
from numpyro_fed.algorithms.pvi.conjugacy import misfit, row_terms
from numpyro_fed.algorithms.pvi.families import GAUSSIAN
from numpyro_fed.algorithms.pvi.states import Down, Role, SiloState, Status, Up
from numpyro_fed.bounds import AtDraw, normals
from numpyro_fed.expfam.base import Natural, Ordinary, Tree
from numpyro_fed.local.base import LocalNoise, Problem, Solution
from numpyro_fed.model.binding import Rows, Theta
from numpyro_fed.model.data import SiloData, Sizes
from numpyro_fed.model.minibatch import draw_minibatch, rows_at
from numpyro_fed.trees import all_finite, where

BATCH = 8  # draws of the expected log likelihood side by side; more of them use more memory


@dataclass(frozen=True)
class Silo(Role):
    """A silo's part of the algorithm."""

    def init(self, key: Array, data: SiloData) -> SiloState:
        """Return the first state, without a factor."""
        key_private, key_guide = jax.random.split(key)
        params = SiloParams(
            self.parts.guide.init_local(key_guide, data),
            self.model.init_private(key_private, data),
        )
        shapes = jax.eval_shape(lambda: self.prior(self.model.init_theta(jax.random.key(0))))
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
        none = jnp.zeros((), jnp.int32)
        stale = (zeros, zeros) if self.settings.delayed else ()
        centre, frame = jnp.zeros(self.model.dim), self.first_frame()
        return SiloState(params, centre, zeros, zeros, none, none, stale, frame)

    def visit(
        self, noise: Array, down: Down, state: SiloState, data: SiloData
    ) -> tuple[Reply[Up], SiloState]:
        """Solve the silo's own problem, and reply with the change of its factor.

        A visit whose numbers cannot be used proposes no change.
        """
        # The report's draws are apart from the fit's.
        key_local, key_evidence = jax.random.split(noise)
        parts, settings, prior = self.parts, self.settings, self.prior(down.theta)
        factor = state.effective_factor(down.taken)
        posterior = parts.aggregate(prior, down.total)
        # What is taken out of the posterior to make the cavity.
        removed = {
            "own": factor,
            "none": jax.tree.map(jnp.zeros_like, factor),
            "average": jax.tree.map(lambda a: a / settings.num_silos, down.total),
            "prior": down.total,
        }[settings.deletion]
        share = jax.tree.map(lambda a: settings.prior_share * a, prior)
        own_cavity = parts.aggregate(share, jax.tree.map(jnp.subtract, down.total, removed))
        current = cavity, at = own_cavity, posterior
        if state.stale:
            # An asynchronous silo works from those of its visit before: its computation takes so
            # long.
            from_prior = parts.globals.prior_outside is None and not settings.from_mode
            at_first = (prior, prior) if from_prior else current
            cavity, at = where(state.visits > 0, state.stale, at_first)
        # At the posterior that the server sent, and not at the solution: the loss is then that of
        # one posterior, the same for all silos of a step.
        log_lik, g_theta = self.expected_log_lik(key_evidence, down.theta, posterior, state, data)
        problem = self._problem(down.theta, cavity, self._start(at, state.visits), state, data)
        solution = self.solve(parts.local, problem, key_local)
        proposal = self._factor(solution.eta, cavity)
        change = jax.tree.map(
            jnp.subtract, proposal, factor if settings.deletion == "prior" else removed
        )
        status = self._status(solution, change)
        usable = status < Status.NON_FINITE
        change = where(usable, change, jax.tree.map(jnp.zeros_like, change))
        g_theta = where(usable, g_theta, jax.tree.map(jnp.zeros_like, g_theta))
        statuses = jax.nn.one_hot(status, len(Status), dtype=jnp.int32)
        centre = state.frame.standardise(self.family.centre(self.family.ordinary(solution.eta)))
        draft = SiloState(
            *where(usable, (solution.silo_part, centre), (state.params, state.centre)),
            factor,
            change,
            state.visits + 1,
            status,
            current if settings.delayed else (),
            state.frame,
        )
        return Reply(Up(change, log_lik, g_theta, statuses), jnp.array(True)), draft

    def view(self, state: SiloState) -> Private:
        """Return private parameters, the local guide and its centre."""
        return Private(state.params.private, state.params.guide, state.centre)

    def _start(self, posterior: Natural, visits: Array) -> Ordinary:
        """Return the start of a visit: the posterior, at first no wider than asked for."""
        # A tight start is the paper's remedy against pruning units of a network.
        psi = self.family.ordinary(posterior)
        scale = None if self.settings.from_mode else self.settings.start_scale
        if scale is None or GAUSSIAN not in psi:
            return psi
        widest = jnp.where(visits == 0, np.log(scale), jnp.inf)
        log_scale = jnp.minimum(psi[GAUSSIAN]["log_scale"], widest)
        return {**psi, GAUSSIAN: {**psi[GAUSSIAN], "log_scale": log_scale}}

    def _factor(self, eta: Natural, cavity: Natural) -> Natural:
        """Return the factor that leads from the cavity to ``eta``: the divergence's gradient."""
        if self.parts.divergence is None:
            return jax.tree.map(jnp.subtract, eta, cavity)
        family, divergence = self.family, self.parts.divergence
        return family.dual_gradient(lambda psi: divergence(family.natural(psi), cavity), eta)

    def _status(self, solution: Solution[SiloParams], change: Natural) -> Array:
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
        parts, family, private = self.parts, self.family, state.params.private

        def exact(theta: Theta) -> Array:
            rows = row_terms(parts.model, {**theta, **private}, data)
            # E[f] = f(centre) + <eta, E[T] - T(centre)> for an affine f, the sum of the rows: it is
            # exact, and without f's constant, which ``fit`` does not return.
            eta, psi = family.fit(lambda z: rows(z).sum()), family.ordinary(posterior)
            z = family.centre(psi)
            moment_gap = jax.tree.map(jnp.subtract, family.moments(psi), family.statistics(z))
            return rows(z).sum() + expfam.inner(eta, moment_gap)

        def sampled(theta: Theta) -> Array:
            psi = family.ordinary(posterior)
            centre = family.centre(psi)
            eta = parts.guide.recentre(state.params.guide, state.offset(centre), data)
            sizes = {p: len(part["loc"]) for p, part in eta.items()}

            def at_draw(noise: Tree, rows: Rows) -> Array:
                z = family.draw(psi, noise)
                coordinates = state.coordinates(z, centre)
                given = AtDraw({**theta, **private}, eta, z, coordinates, data)
                return parts.bound.value(given, rows)

            draws = self.settings.evidence_draws
            num_batches = -(-draws // BATCH)
            batch_size = -(-draws // num_batches)

            def batch_values(i: Array) -> Array:
                noise, rows = self._noise(jax.random.fold_in(key, i), sizes, batch_size)
                return jax.vmap(at_draw, (0, 1))(noise, rows)

            return jax.lax.map(batch_values, jnp.arange(num_batches)).ravel()[:draws].mean()

        expected = exact if parts.conjugate else sampled
        log_lik, gradient = jax.value_and_grad(expected)(theta) if theta else (expected(theta), {})
        # At a vague prior it may not be finite, and nothing is wrong.
        fine = all_finite((log_lik, gradient))
        gradient = jax.tree.map(lambda g: jnp.where(fine, g, 0.0), gradient)
        return jnp.where(jnp.isfinite(log_lik), log_lik, -jnp.inf), gradient

    def _problem(
        self, theta: Theta, cavity: Natural, start: Ordinary, state: SiloState, data: SiloData
    ) -> Problem[SiloParams]:
        parts, fm, family, guide = self.parts, self.model, self.family, self.parts.guide
        centre = family.centre(start)
        eta = guide.recentre(state.params.guide, state.offset(centre), data)
        silo_part = SiloParams(eta, state.params.private)

        def noise(key: Array, particles: int, batch: int | None) -> LocalNoise:
            which, sizes = None, {p: len(part["loc"]) for p, part in eta.items()}
            if batch and parts.minibatches:
                key, key_which = jax.random.split(key)
                which, sizes = parts.minibatches.noise(key_which), parts.minibatches.sizes(sizes)
            return LocalNoise(*self._noise(key, sizes, particles), which)

        def log_lik(
            psi: Ordinary, silo_part: SiloParams, noise: LocalNoise, plain: bool
        ) -> tuple[Array, Array]:
            batch, indices = draw_minibatch(parts.minibatches, noise.which, data)
            local = rows_at(silo_part.guide, indices)
            shared = {**theta, **silo_part.private}
            centre = family.centre(psi)
            bound = parts.plain_bound if plain else parts.bound

            def at_draw(noise_globals: Tree, noise_rows: Rows) -> tuple[Array, Array]:
                z = family.draw(psi, noise_globals)
                given = AtDraw(shared, local, z, state.coordinates(z, centre), batch)
                return z, bound.value(given, noise_rows)

            return jax.vmap(at_draw, (0, 1))(noise.globals, noise.rows)

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

        return Problem(
            family,
            cavity,
            start,
            silo_part,
            noise,
            log_lik,
            likelihood,
            num_rows,
            parts.divergence,
            to_frame,
        )

    def _noise(self, key: Array, sizes: Sizes, draws: int) -> tuple[Tree, Rows]:
        """Return the noise of ``draws`` draws of the globals, and of the rows for each of them."""
        # One normal draw for globals and rows together: each draw is a program to compile.
        family, shapes = self.family, self.parts.bound.shapes(sizes, draws)
        if not family.of_normals:
            key, key_globals = jax.random.split(key)
            return family.noise(key_globals, draws), normals(key, 0, shapes)[1]
        for_globals, rows = normals(key, draws * family.dim, shapes)
        return family.from_normals(for_globals.reshape(draws, family.dim)), rows
