"""Stochastic gradient steps by any of Optax's optimisers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from numpyro_fed.errors import positive_int
from numpyro_fed.expfam.base import Natural, Ordinary
from numpyro_fed.local.at_rest import PARTICLES, AtRest, Tally, maximised
from numpyro_fed.local.base import AT_REST, Noise, Own, Problem, Solution, free_energy
from numpyro_fed.trees import drop_weak_types

STEP, SETTLES, DECAY = 0.05, 20, 0.7  # of Adam: its first step, and how that becomes smaller
CHECK = 100  # steps, after which one near its optimum is looked at
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
        By default Adam from ``0.05``, with cosine decay to a hundredth over the steps, or, where a
        run started at the mode, decay from the first steps on. It starts anew at each visit; the
        parameters start where they are.
    steps : int
        Steps at each visit, at most: a run that started at the mode looks after each hundred of
        them whether it has arrived (``tolerance``), and then ends the visit.
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
    closed_form = False

    @property
    def standardises(self) -> bool:
        """Return False for natural parameters, which are those of ``z``."""
        return self.space == "ordinary"

    @property
    def any_divergence(self) -> bool:
        """Return whether ``alpha`` is 0: under others there is a divergence of its own."""
        return self.alpha == 0

    @property
    def share(self) -> float:
        """Return 1, or 0 for a single step, whose length depends on the optimiser."""
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

    def solve(self, problem: Problem[Own], key: Array) -> Solution[Own]:
        """Run the steps; see the class."""
        return _Ascent(self, problem, key).solution()

    @property
    def judged(self) -> bool:
        """Return whether it is looked at where the steps have led."""
        return self.steps > 1 and not math.isinf(self.tolerance)


At = tuple[Natural | Ordinary, Own]  # where the steps are, and the silo's own part


class Watch(NamedTuple):
    """The record of early stopping: a running sum of the expected log likelihood, its best mean,
    windows since then, and the parameters there.
    """

    total: Array
    best: Array
    waited: Array
    params: Any


class Walk(NamedTuple):
    """The state of a visit: gradients taken, parameters and the silo's own part, the last value.

    From ``steps`` gradients on nothing moves any more: further ones go into ``estimate``, a mean
    of a few of them, and estimates into ``tally``.
    """

    i: Array
    params: At[Any]
    opt_state: optax.OptState
    value: Array
    watch: Watch
    estimate: Ordinary
    tally: Tally


@dataclass(frozen=True)
class _Ascent(Generic[Own]):
    """A visit by :class:`Optax`: one loop that steps, and then judges by the same gradients."""

    settings: Optax
    problem: Problem[Own]
    key: Array

    @property
    def natural(self) -> bool:
        return self.settings.space == "natural"

    @cached_property
    def optim(self) -> optax.GradientTransformation:
        if self.settings.optim is not None:
            return self.settings.optim
        if self.problem.near:
            return optax.adam(lambda count: STEP * (1 + count / SETTLES) ** -DECAY)
        return optax.adam(optax.cosine_decay_schedule(STEP, self.settings.steps, 0.01))

    @property
    def judges_itself(self) -> bool:
        """Return whether its own gradients are judged by, which look at all rows."""
        return self.settings.judged and self.settings.batch_size is None

    @property
    def each(self) -> int:
        """Return how many gradients are in an estimate."""
        return -(-PARTICLES // self.settings.num_particles)

    @cached_property
    def rest(self) -> AtRest:
        return AtRest(self.problem.family, self.settings.tolerance)

    def solution(self) -> Solution[Own]:
        start = self.start()
        block = self.block()

        def one_block(walk: Walk) -> Walk:
            first = walk.i
            noise = jax.vmap(self.noise)(first + jnp.arange(block))

            def step(walk: Walk) -> Walk:
                return self.step(walk, jax.tree.map(lambda a: a[walk.i - first], noise))

            return jax.lax.while_loop(
                lambda walk: self.goes_on(walk) & (walk.i - first < block), step, walk
            )

        walk = jax.lax.while_loop(self.goes_on, one_block, start)
        eta, psi, own = self.where(walk.params)
        finite = jnp.isfinite(walk.value)
        if self.settings.patience is not None:
            finite &= jnp.isfinite(walk.watch.best)
        return Solution(eta, own, self.converged(walk, psi, own), finite)

    def start(self) -> Walk:
        problem = self.problem
        at = problem.family.natural(problem.start) if self.natural else problem.start
        params = (at, problem.own)
        best = params if self.settings.patience is not None else ()
        zero, none = jnp.zeros(()), jnp.zeros((), jnp.int32)
        watch = Watch(zero, jnp.array(-jnp.inf), none, best)
        estimate = jax.tree.map(jnp.zeros_like, problem.start)
        opt_state = self.optim.init(params)
        walk = Walk(none, params, opt_state, zero, watch, estimate, self.rest.begin())
        return drop_weak_types(walk)

    def where(self, params: At[Own]) -> tuple[Natural, Ordinary, Own]:
        """Return natural and ordinary parameters, and the silo's own part."""
        (at, own), family = params, self.problem.family
        return (at, family.ordinary(at), own) if self.natural else (family.natural(at), at, own)

    def noise(self, i: Array) -> Noise:
        settings, key = self.settings, jax.random.fold_in(self.key, i)
        return self.problem.noise(key, settings.num_particles, settings.batch_size)

    def block(self) -> int:
        """Return the gradients for which noise is drawn at once."""
        size = sum(x.size for x in jax.tree.leaves(jax.eval_shape(self.noise, 0)))
        return max(1, min(BLOCK, self.settings.steps, NOISE // max(size, 1)))

    def goes_on(self, walk: Walk) -> Array:
        walks = walk.i < self.settings.steps
        return walks | self.rest.wants_more(walk.tally) if self.judges_itself else walks

    def step(self, walk: Walk, noise: Noise) -> Walk:
        settings = self.settings

        def loss(params: At[Own]) -> tuple[Array, Array]:
            _, psi, own = self.where(params)
            stick = settings.batch_size is None and not self.natural
            value, log_lik = free_energy(
                self.problem, psi, own, noise, alpha=settings.alpha, stick=stick
            )
            return -value, log_lik

        (value, log_lik), gradient = jax.value_and_grad(loss, has_aux=True)(walk.params)

        def move(walk: Walk) -> Walk:
            seen = self.judge(walk, gradient[0]) if self.looks else walk
            updates, opt_state = self.optim.update(gradient, walk.opt_state, walk.params)
            params = optax.apply_updates(walk.params, updates)
            walk = seen._replace(i=walk.i + 1, params=params, opt_state=opt_state, value=value)
            if self.looks:
                walk = self.look(walk)
            return walk if settings.patience is None else self.stop_early(walk, log_lik)

        def judge(walk: Walk) -> Walk:
            return self.judge(walk, gradient[0])._replace(i=walk.i + 1)

        if not self.judges_itself:
            return move(walk)
        return jax.lax.cond(walk.i < settings.steps, move, judge, walk)

    @property
    def looks(self) -> bool:
        """Return whether it may end before its time."""
        return self.judges_itself and self.problem.near and self.settings.patience is None

    def look(self, walk: Walk) -> Walk:
        """After each ``CHECK`` steps, end if their gradients say that it has arrived."""
        full = (walk.i % CHECK == 0) & (walk.i < self.settings.steps)
        arrived = full & self.rest.arrived(walk.tally)
        begun = jax.tree.map(
            lambda a, b: jnp.where(full & ~arrived, a, b), self.rest.begin(), walk.tally
        )
        last = walk.i == self.settings.steps
        begun = jax.tree.map(lambda a, b: jnp.where(last, a, b), self.rest.begin(), begun)
        return walk._replace(i=jnp.where(arrived, self.settings.steps, walk.i), tally=begun)

    @property
    def window(self) -> int:
        """Return the steps over which early stopping takes a mean."""
        return -(-self.settings.steps // 20)

    def stop_early(self, walk: Walk, log_lik: Array) -> Walk:
        """Go back to where it was best if it has not been better for long, or at the end."""
        before, window = walk.watch, self.window
        total, full = before.total + log_lik, walk.i % window == 0
        better = full & (total / window > before.best)
        watch = Watch(
            jnp.where(full, 0.0, total),
            jnp.where(better, total / window, before.best),
            jnp.where(full, jnp.where(better, 0, before.waited + 1), before.waited),
            jax.tree.map(lambda a, b: jnp.where(better, a, b), walk.params, before.params),
        )
        patient = watch.waited < (self.settings.patience or 0)
        i = jnp.where(patient, walk.i, self.settings.steps)
        ends = i == self.settings.steps
        params = jax.tree.map(lambda a, b: jnp.where(ends, a, b), watch.params, walk.params)
        return walk._replace(i=i, watch=watch, params=params)

    def judge(self, walk: Walk, gradient: Natural | Ordinary) -> Walk:
        """Take in one more gradient of the loss where the steps have led."""
        family, each = self.problem.family, self.each
        estimate = jax.tree.map(
            lambda a, b: a - b / each, walk.estimate, self.of_psi(walk, gradient)
        )
        psi = self.where(walk.params)[1]

        def full(walk: Walk) -> Walk:
            none = jax.tree.map(jnp.zeros_like, estimate)
            tally = self.rest.add(walk.tally, family.move(psi, estimate))
            return walk._replace(estimate=none, tally=tally)

        walk = walk._replace(estimate=estimate)
        done = (walk.i + 1 - self.settings.steps) % each == 0
        return jax.lax.cond(done, full, lambda walk: walk, walk)

    def of_psi(self, walk: Walk, gradient: Natural | Ordinary) -> Ordinary:
        """Return a gradient in the space of the steps as one for ordinary parameters."""
        if not self.natural:
            return gradient
        _, psi, _ = self.where(walk.params)
        _, pull = jax.vjp(self.problem.family.natural, psi)
        return pull(gradient)[0]

    def converged(self, walk: Walk, psi: Ordinary, own: Own) -> Array:
        """Return whether the steps have led to an optimum.

        With minibatches it is judged by all rows, and at most half of the steps' own work.
        """
        settings = self.settings
        if not settings.judged:
            return jnp.array(True)
        if settings.batch_size is None:
            return self.rest.holds(walk.tally)
        fresh = jax.random.fold_in(self.key, settings.steps)
        return maximised(
            self.problem,
            psi,
            own,
            fresh,
            settings.tolerance,
            alpha=settings.alpha,
            particles=2 if settings.alpha == 0 else settings.num_particles,
            work=0.5 * settings.steps * settings.num_particles * settings.batch_size,
        )
