"""Local optimisers by gradients: any of Optax's optimisers, and L-BFGS on fixed noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from numpyro_fed.basics.errors import one_of, positive_int
from numpyro_fed.basics.programs import while_loop
from numpyro_fed.basics.trees import drop_weak_types, where
from numpyro_fed.local.problem import (
    AT_REST,
    PARTICLES,
    Local,
    LocalNoise,
    Problem,
    SiloPart,
    Solution,
    StationarityTest,
    free_energy,
    maximised,
    minimise,
)
from numpyro_fed.numerics import linalg
from numpyro_fed.numerics.expfam.family import Natural, Ordinary

# Adam's step size: ``STEP (1 + count / SETTLE_STEPS)^-DECAY`` near the optimum. An exponent in
# (1/2, 1] makes the noise of the steps average out (Robbins and Monro 1951). A start near the
# optimum needs no long steps, so the decay begins with the first ones.
STEP, SETTLE_STEPS, DECAY = 0.05, 20, 0.7
CHECK_EVERY = 100  # steps of a visit near its optimum, after which it may end
# Noise is drawn for up to 64 steps at once, and up to a million numbers, 4 MB in single precision.
# Drawing it step by step takes twice the time of a small step (docs/results/speed.md, "by hand").
BLOCK = 64
NOISE_AT_ONCE = 2**20


# Parameters of q in the optimiser's space, and the silo's part.
At = tuple[Natural | Ordinary, SiloPart]


class VisitState(NamedTuple):
    """The state of a visit: gradients computed, parameters, optimiser state and the last value.

    After ``steps`` gradients the parameters stay. Further gradients are averaged in ``estimate``, a
    few at a time, and estimates in ``test``, for the check of convergence. For early stopping,
    ``total`` is the sum of the expected log likelihood in this window, ``best`` the best mean of a
    window, ``waited`` the number of windows since, and ``best_params`` the parameters after it.
    """

    i: Array
    params: At[Any]
    opt_state: optax.OptState
    value: Array
    estimate: Ordinary
    test: StationarityTest
    total: Array
    best: Array
    waited: Array
    best_params: Any


@dataclass(frozen=True, kw_only=True)
class Optax(Local):
    r"""Stochastic gradient steps by any Optax optimiser.

    Without minibatches the gradient sticks the landing. It is
    :math:`\nabla \mathbb{E}_q[\log p(y_m \mid z) + \langle \eta_{\setminus m} - \bar\eta, T(z)
    \rangle]` with :math:`\bar\eta` stopped, which has no variance where ``q`` is exact; with
    minibatches the divergence is in closed form.

    Parameters
    ----------
    optim : optax.GradientTransformation, optional
        By default Adam from ``0.05``, with cosine decay to a hundredth over the steps, or, in a run
        from the mode, decay from the first steps on. Its state is new at each visit; the parameters
        continue from where they are.
    steps : int
        The largest number of steps at each visit. A run from the mode checks after each hundred of
        them whether it has converged (``tolerance``), and then ends the visit.
    num_particles : int
        Draws of the globals in each step.
    batch_size : int, optional
        Rows in each step, drawn with replacement; all rows by default.
    space : {"ordinary", "natural"}
        The parameters that the optimiser changes: means and log-scales, or natural parameters, in
        which one plain gradient step of every silo is one of global inference (Property 3.1).
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
        The visit counts as converged if a full natural-gradient step from its end, on all rows and
        averaged over fresh noise, would move no mean by more standard deviations, and no log
        standard deviation by more. There is no check with infinity, or after a single step.

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
    def standardises(self) -> bool:
        """Return False for natural parameters, which are those of ``z``."""
        return self.space == "ordinary"

    @property
    def any_divergence(self) -> bool:
        """Return whether ``alpha`` is 0: any other value chooses a divergence itself."""
        return self.alpha == 0

    @property
    def share(self) -> float:
        """Return 1, or 0 for a single step, whose length depends on the optimiser."""
        return 0.0 if self.steps == 1 else 1.0

    def __post_init__(self) -> None:
        for name in ("steps", "num_particles", "batch_size", "patience"):
            value = getattr(self, name)
            if value is not None or name in ("steps", "num_particles"):
                positive_int(name, value)
        one_of("space", self.space, "ordinary", "natural")
        if not 0 <= self.alpha < 1:
            raise ValueError(f"alpha must be in [0, 1), got {self.alpha}.")

    @property
    def checks_convergence(self) -> bool:
        """Return whether convergence is checked at the end of the steps."""
        return self.steps > 1 and not math.isinf(self.tolerance)

    @property
    def checks_by_own_gradients(self) -> bool:
        """Return whether the steps' own gradients serve for the check, as those of all rows do."""
        return self.checks_convergence and self.batch_size is None

    def solve(self, problem: Problem[SiloPart], key: Array) -> Solution[SiloPart]:
        """Run the steps; see the class."""
        # One loop takes the steps and then checks convergence with gradients of the same kind, so
        # that the program holds one gradient and not two.
        natural, near = self.space == "natural", problem.near
        first = problem.family.natural(problem.start) if natural else problem.start
        params = (first, problem.silo_part)
        optim = self.optim or optax.adam(
            (lambda count: STEP * (1 + count / SETTLE_STEPS) ** -DECAY)
            if near
            else optax.cosine_decay_schedule(STEP, self.steps, 0.01)
        )
        zero, none = jnp.zeros(()), jnp.zeros((), jnp.int32)
        estimate = jax.tree.map(jnp.zeros_like, problem.start)
        test = StationarityTest.empty(problem.family)
        first_best = zero, jnp.array(-jnp.inf), none, params if self.patience is not None else ()
        start = VisitState(none, params, optim.init(params), zero, estimate, test, *first_best)

        def noise_of(i: Array | int) -> LocalNoise:
            return problem.noise(jax.random.fold_in(key, i), self.num_particles, self.batch_size)

        # The number of gradients for which noise is drawn at once.
        size = sum(x.size for x in jax.tree.leaves(jax.eval_shape(noise_of, 0)))
        block = max(1, min(BLOCK, self.steps, NOISE_AT_ONCE // max(size, 1)))

        def unfinished(state: VisitState) -> Array:
            moving = state.i < self.steps
            checks = self.checks_by_own_gradients
            return moving | state.test.wants_more(self.tolerance) if checks else moving

        def run_block(state: VisitState) -> VisitState:
            first = state.i
            noise = jax.vmap(noise_of)(first + jnp.arange(block))

            def step(state: VisitState) -> VisitState:
                here = jax.tree.map(lambda a: a[state.i - first], noise)
                return self._step(problem, optim, state, here)

            return while_loop(
                lambda state: unfinished(state) & (state.i - first < block), step, state
            )

        state = jax.lax.while_loop(unfinished, run_block, drop_weak_types(start))
        eta, psi, silo_part = self._both(problem, state.params)
        # The last value is enough: parameters that are NaN once stay NaN.
        finite = jnp.isfinite(state.value)
        if self.patience is not None:
            finite &= jnp.isfinite(state.best)
        if not self.checks_convergence:
            converged = jnp.array(True)
        elif self.batch_size is None:
            converged = state.test.holds(self.tolerance)
        else:
            # By all rows. It costs at most half as much as the steps did.
            converged = maximised(
                problem,
                psi,
                silo_part,
                jax.random.fold_in(key, self.steps),
                self.tolerance,
                alpha=self.alpha,
                particles=2 if self.alpha == 0 else self.num_particles,
                work=0.5 * self.steps * self.num_particles * self.batch_size,
            )
        return Solution(eta, silo_part, converged, finite)

    def _both(
        self, problem: Problem[SiloPart], params: At[SiloPart]
    ) -> tuple[Natural, Ordinary, SiloPart]:
        """Return natural and ordinary parameters, and the silo's part."""
        (first, silo_part), family = params, problem.family
        if self.space == "natural":
            return first, family.ordinary(first), silo_part
        return family.natural(first), first, silo_part

    def _step(
        self,
        problem: Problem[SiloPart],
        optim: optax.GradientTransformation,
        state: VisitState,
        noise: LocalNoise,
    ) -> VisitState:
        def loss(params: At[SiloPart]) -> tuple[Array, Array]:
            _, psi, silo_part = self._both(problem, params)
            # With minibatches the likelihood's noise remains, and cancels nothing.
            stick = self.batch_size is None and self.space == "ordinary"
            value, log_lik = free_energy(
                problem, psi, silo_part, noise, alpha=self.alpha, stick=stick
            )
            return -value, log_lik

        (value, log_lik), gradient = jax.value_and_grad(loss, has_aux=True)(state.params)
        # Near its optimum a visit may end before its last step.
        may_end_early = self.checks_by_own_gradients and problem.near and self.patience is None

        def move(state: VisitState) -> VisitState:
            after = self._add_gradient(problem, state, gradient[0]) if may_end_early else state
            updates, opt_state = optim.update(gradient, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            state = after._replace(i=state.i + 1, params=params, opt_state=opt_state, value=value)
            if may_end_early:
                # It ends if the last ``CHECK_EVERY`` gradients show convergence. The test starts
                # anew after each check, and at the end, where the final decision begins.
                full = (state.i % CHECK_EVERY == 0) & (state.i < self.steps)
                arrived = full & state.test.arrived(self.tolerance)
                begun = StationarityTest.empty(problem.family)
                test = where(full & ~arrived, begun, state.test)
                test = where(state.i == self.steps, begun, test)
                i = jnp.where(arrived, self.steps, state.i)
                state = state._replace(i=i, test=test)
            if self.patience is None:
                return state
            # Early stopping: it ends if it has not improved for long, or at the last step, and
            # goes back to its best parameters.
            window = -(-self.steps // 20)  # steps in a window
            total, full = state.total + log_lik, state.i % window == 0
            better = full & (total / window > state.best)
            waited = jnp.where(full, jnp.where(better, 0, state.waited + 1), state.waited)
            best_params = where(better, state.params, state.best_params)
            i = jnp.where(waited < self.patience, state.i, self.steps)
            return state._replace(
                i=i,
                params=where(i == self.steps, best_params, state.params),
                total=jnp.where(full, 0.0, total),
                best=jnp.where(better, total / window, state.best),
                waited=waited,
                best_params=best_params,
            )

        if not self.checks_by_own_gradients:
            return move(state)
        return jax.lax.cond(
            state.i < self.steps,
            move,
            lambda state: self._add_gradient(problem, state, gradient[0])._replace(i=state.i + 1),
            state,
        )

    def _add_gradient(
        self, problem: Problem[SiloPart], state: VisitState, gradient: Natural | Ordinary
    ) -> VisitState:
        """Add one more gradient of the loss to the check of convergence."""
        # So many gradients in an estimate that it has ``PARTICLES`` draws.
        family, count = problem.family, -(-PARTICLES // self.num_particles)
        psi = self._both(problem, state.params)[1]
        if self.space == "natural":
            (gradient,) = jax.vjp(family.natural, psi)[1](gradient)
        estimate = jax.tree.map(lambda a, b: a - b / count, state.estimate, gradient)

        def full(state: VisitState) -> VisitState:
            none = jax.tree.map(jnp.zeros_like, estimate)
            test = state.test.add(family.move(psi, estimate))
            return state._replace(estimate=none, test=test)

        state = state._replace(estimate=estimate)
        done = (state.i + 1 - self.steps) % count == 0
        return jax.lax.cond(done, full, lambda state: state, state)


@dataclass(frozen=True, kw_only=True)
class LBFGS(Local):
    """Optax's L-BFGS on fixed noise: deterministic, and quick for few parameters.

    Parameters
    ----------
    steps : int
        The largest number of steps.
    num_particles : int
        Draws of the globals, the same in every step. Their number sets the error of the optimum.
        With more draws than dimensions, standard normal noise is standardised, so that the optimum
        is exact for a Gaussian. With twice as many, draws come in pairs of opposite sign. With
        fewer draws than dimensions, a full covariance is fitted to the draws.
    tolerance : float
        The search ends when no component of the gradient is larger. Convergence of the visit is
        then checked as for :class:`Optax`, by fresh draws, with a tolerance of a tenth of a
        standard deviation.

    Examples
    --------
    >>> import numpyro_fed as nf
    >>> nf.local.LBFGS(num_particles=256).steps
    200
    """

    steps: int = 200
    num_particles: int = 64
    tolerance: float = 1e-3
    any_divergence = True

    def __post_init__(self) -> None:
        positive_int("steps", self.steps)
        positive_int("num_particles", self.num_particles)

    def solve(self, problem: Problem[SiloPart], key: Array) -> Solution[SiloPart]:
        """Run L-BFGS; see the class."""
        # Fresh draws for the check: at those of the fit the gradient vanishes whatever they are.
        key_fit, key_judge = jax.random.split(key)
        noise = fixed_noise(problem, key_fit, self.num_particles)
        (psi, silo_part), value, _ = minimise(
            lambda params: -free_energy(problem, *params, noise, plain=True)[0],
            (problem.start, problem.silo_part),
            self.steps,
            self.tolerance,
        )
        converged = maximised(problem, psi, silo_part, key_judge, AT_REST)
        return Solution(problem.family.natural(psi), silo_part, converged, jnp.isfinite(value))


def standardised(noise: Array) -> Array:
    """Return normal noise (n, dim) with sample mean zero and, for enough draws, covariance one."""
    # The noise of Gamma and other families is keys, which are no floats.
    if not jnp.issubdtype(noise.dtype, jnp.floating):
        return noise
    n, dim = noise.shape
    if n % 2 == 0 and n > 2 * dim:
        noise = jnp.concatenate([noise[: n // 2], -noise[: n // 2]])
    centred = noise - noise.mean(0)
    if n <= dim + 1:
        return centred / jnp.maximum(centred.std(0), 1e-3) if n > 2 else noise
    L = linalg.cholesky(centred.T @ centred / len(noise))
    return linalg.solve(L, centred.T).T


def fixed_noise(problem: Problem[SiloPart], key: Array, draws: int) -> LocalNoise:
    """Return the noise of a fit at fixed draws, standardised for the globals."""
    noise = problem.noise(key, draws, None)
    return noise._replace(globals=jax.tree.map(standardised, noise.globals))
