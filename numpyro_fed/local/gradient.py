"""Local optimisers by gradients: any of Optax's, and L-BFGS on a fixed noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.scipy.linalg import solve_triangular

from numpyro_fed.errors import positive_int
from numpyro_fed.local.base import AT_REST, Noise, Problem, Psi, Solution, free_energy, minimise
from numpyro_fed.local.verdict import PARTICLES, maximised

BLOCK = 64  # steps, at most, for which noise is drawn at once
NOISE = 2**20  # numbers, about, that are drawn at once


@dataclass(frozen=True, kw_only=True)
class Optax:
    r"""Stochastic gradient steps by any Optax optimiser.

    Without minibatches the gradient sticks the landing,
    :math:`\nabla \mathbb{E}_q[\log p(y_m \mid z) + \langle \eta_{\setminus m} - \bar\eta, T(z)
    \rangle]` with :math:`\bar\eta` stopped, which has no variance where ``q`` is exact; with
    minibatches the divergence is in closed form.

    Parameters
    ----------
    optim : optax.GradientTransformation, optional
        By default Adam from ``0.05`` with cosine decay to a hundredth over the steps. It starts
        anew at each visit; the parameters start where they are.
    steps : int
        Steps at each visit.
    num_particles : int
        Draws of the globals in each step.
    batch_size : int, optional
        Rows in each step, drawn with replacement; all rows by default.
    space : {"ordinary", "natural"}
        What the optimiser steps in: means and log-scales, or natural parameters, in which one
        plain gradient step of every silo is one of global inference (Property 3.1).
    alpha : float
        0 maximises the free energy above. In (0, 1) it maximises
        :math:`\frac1\alpha \log \mathbb{E}_q[(p(y_m \mid z)\, q_{\setminus m} / q)^\alpha]`, the
        alpha-divergence of ``q`` from the tilted distribution (alpha-EP, the paper's Algorithm 3),
        estimated with ``num_particles`` draws.
    patience : int, optional
        Early stopping: stop when the expected log likelihood, averaged over a twentieth of the
        steps, has not improved for so many twentieths, and go back to where it was best. With a
        tight start (``start_scale`` of PVI) this is the paper's remedy against over-pruning.
    tolerance : float
        The visit counts as converged if a full natural-gradient step from where it ends, on all
        rows and averaged over fresh noise, would move no mean by more standard deviations, and no
        log standard deviation by more. Infinity, or a single step, is not looked at.

    Examples
    --------
    >>> import optax, numpyro_fed as nf
    >>> nf.local.Optax(optim=optax.adam(1e-2), steps=200, batch_size=128).steps
    200
    """

    optim: optax.GradientTransformation | None = None
    steps: int = 1_000
    num_particles: int = 4
    batch_size: int | None = None
    space: str = "ordinary"
    alpha: float = 0.0
    patience: int | None = None
    tolerance: float = AT_REST

    @property
    def share(self) -> float:
        """How far a single step goes depends on the optimiser."""
        return 0.0 if self.steps == 1 else 1.0

    def __post_init__(self) -> None:
        positive_int("steps", self.steps)
        positive_int("num_particles", self.num_particles)
        if self.batch_size is not None:
            positive_int("batch_size", self.batch_size)
        if self.patience is not None:
            positive_int("patience", self.patience)
        if self.space not in ("ordinary", "natural"):
            raise ValueError(f"space={self.space!r}: expected 'ordinary' or 'natural'.")
        if not 0 <= self.alpha < 1:
            raise ValueError(f"alpha must be in [0, 1), got {self.alpha}.")

    def solve(self, problem: Problem, key: Array) -> Solution:
        """Run the steps; see the class."""
        family, natural = problem.family, self.space == "natural"
        optim = self.optim or optax.adam(optax.cosine_decay_schedule(0.05, self.steps, 0.01))
        start = family.natural(problem.start) if natural else problem.start
        params = (start, problem.own)

        def loss(params: tuple[Any, Any], noise: Noise) -> tuple[Array, Array]:
            at, own = params
            psi = family.ordinary(at) if natural else at
            stick = self.batch_size is None and not natural
            value, log_lik = free_energy(problem, psi, own, noise, alpha=self.alpha, stick=stick)
            return -value, log_lik

        def draw(i: Array) -> Noise:
            key_step = jax.random.fold_in(key, i)
            return problem.noise(key_step, self.num_particles, self.batch_size)

        size = sum(x.size for x in jax.tree.leaves(jax.eval_shape(draw, 0)))
        block = max(1, min(BLOCK, self.steps, NOISE // max(size, 1)))
        window = -(-self.steps // 20)

        def step(first: Array, noise: Noise, carry: tuple) -> tuple:
            i, params, opt_state, history, watch = carry
            here = jax.tree.map(lambda a: a[i - first], noise)
            (value, log_lik), gradient = jax.value_and_grad(loss, has_aux=True)(params, here)
            updates, opt_state = optim.update(gradient, opt_state, params)
            params = optax.apply_updates(params, updates)
            if self.patience is not None:
                watch = _watch(watch, log_lik, params, (i + 1) % window == 0, window)
            return i + 1, params, opt_state, history.at[i].set(-value), watch

        def go_on(carry: tuple) -> Array:
            patient = True if self.patience is None else carry[4].waited < self.patience
            return (carry[0] < self.steps) & patient

        def one_block(carry: tuple) -> tuple:
            first = carry[0]
            noise = jax.vmap(draw)(first + jnp.arange(block))
            return jax.lax.while_loop(
                lambda c: go_on(c) & (c[0] - first < block),
                lambda c: step(first, noise, c),
                carry,
            )

        best = params if self.patience is not None else ()
        watch = Watch(jnp.zeros(()), jnp.array(-jnp.inf), jnp.zeros((), jnp.int32), best)
        carry = (jnp.zeros((), jnp.int32), params, optim.init(params), jnp.zeros(self.steps), watch)
        taken, last, _, history, watch = jax.lax.while_loop(go_on, one_block, carry)
        at, own = last if self.patience is None else watch.params
        eta = at if natural else family.natural(at)
        finite = jnp.isfinite(history[taken - 1])
        if self.patience is not None:
            finite &= jnp.isfinite(watch.best) | (taken < window)
        psi = family.ordinary(at) if natural else at
        return Solution(eta, own, self._converged(problem, psi, own, key), finite)

    def _converged(self, problem: Problem, psi: Psi, own: Any, key: Array) -> Array:
        """Whether the steps have led to an optimum, by at most half of their own work."""
        if self.steps == 1 or math.isinf(self.tolerance):
            return jnp.array(True)
        fresh = jax.random.fold_in(key, self.steps)
        if self.batch_size is None:
            particles = max(PARTICLES, self.num_particles)
            return maximised(
                problem, psi, own, fresh, self.tolerance, alpha=self.alpha, particles=particles
            )
        work = 0.5 * self.steps * self.num_particles * self.batch_size
        particles = 2 if self.alpha == 0 else self.num_particles
        return maximised(
            problem,
            psi,
            own,
            fresh,
            self.tolerance,
            alpha=self.alpha,
            particles=particles,
            work=work,
        )


class Watch(NamedTuple):
    """What early stopping looks at: a running sum of the expected log likelihood, its best mean so
    far, windows since then, and the parameters there.
    """

    total: Array
    best: Array
    waited: Array
    params: Any


def _watch(watch: Watch, log_lik: Array, params: Any, full: Array, window: int) -> Watch:
    total = watch.total + log_lik
    better = full & (total / window > watch.best)
    return Watch(
        jnp.where(full, 0.0, total),
        jnp.where(better, total / window, watch.best),
        jnp.where(full, jnp.where(better, 0, watch.waited + 1), watch.waited),
        jax.tree.map(lambda a, b: jnp.where(better, a, b), params, watch.params),
    )


@dataclass(frozen=True, kw_only=True)
class LBFGS:
    """Optax's L-BFGS on a fixed noise: deterministic, and quick where there are few parameters.

    Parameters
    ----------
    steps : int
        At most so many.
    num_particles : int
        Draws of the globals, the same in every step. Their number sets the error of the optimum;
        where there are more than dimensions, standard normal noise is standardised, so that the
        optimum is exact for a Gaussian, and comes in pairs of opposite sign where there are twice
        as many. With fewer the optimum of a full covariance fits the draws.
    tolerance : float
        Stop when no component of the gradient is larger. Whether the visit has converged is judged
        as for :class:`Optax`, by fresh draws: a tenth of a standard deviation is allowed.

    Examples
    --------
    >>> import numpyro_fed as nf
    >>> nf.local.LBFGS(num_particles=256).steps
    200
    """

    steps: int = 200
    num_particles: int = 64
    tolerance: float = 1e-3
    batch_size: None = None
    share = 1.0

    def __post_init__(self) -> None:
        positive_int("steps", self.steps)
        positive_int("num_particles", self.num_particles)

    def solve(self, problem: Problem, key: Array) -> Solution:
        """Search until the gradient vanishes; see the class."""
        noise = standardised(problem.noise(key, self.num_particles, None))

        def loss(params: tuple[Psi, Any]) -> Array:
            return -free_energy(problem, *params, noise, plain=True)[0]

        (psi, own), _ = minimise(loss, (problem.start, problem.own), self.steps, self.tolerance)
        finite = jnp.isfinite(loss((psi, own)))
        converged = maximised(problem, psi, own, jax.random.fold_in(key, 1), AT_REST)
        return Solution(problem.family.natural(psi), own, converged, finite)


def standardised(noise: Noise) -> Noise:
    """The same noise with that of the globals standardised, where it is normal."""
    return noise._replace(globals=jax.tree.map(_standardised, noise.globals))


def _standardised(noise: Array) -> Array:
    """Standard normal noise (n, dim) with sample mean zero and, if it can be, covariance one.

    Where there are enough draws they come in pairs of opposite sign, and no odd moment is left.
    """
    if not jnp.issubdtype(noise.dtype, jnp.floating):
        return noise
    n, dim = noise.shape
    if n % 2 == 0 and n > 2 * dim:
        noise = jnp.concatenate([noise[: n // 2], -noise[: n // 2]])
    centred = noise - noise.mean(0)
    if n <= dim + 1:
        return centred / jnp.maximum(centred.std(0), 1e-3) if n > 2 else noise
    L = jnp.linalg.cholesky(centred.T @ centred / len(noise))
    return solve_triangular(L, centred.T, lower=True).T
