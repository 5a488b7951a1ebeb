"""Local optimisers in natural parameters: fixed points, power EP, and the closed form."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from numpyro_fed.basics.errors import positive_int
from numpyro_fed.basics.trees import all_finite, drop_weak_types
from numpyro_fed.local.gradient import fixed_noise
from numpyro_fed.local.problem import (
    AT_REST,
    Local,
    Problem,
    SiloPart,
    Solution,
    StationarityTest,
    free_energy,
    maximised,
    proper_step,
)
from numpyro_fed.numerics import expfam
from numpyro_fed.numerics.expfam.family import Natural, move_along

# A KL grows as the square of a move: 1e-4 nats are 0.014 sds, well below ``AT_REST``.
MIN_MOVE = 1e-4  # KL of a step, in nats, below which a fixed point has been reached
MAX_MISFIT = 0.1  # nats: a larger departure from a conjugate likelihood changes the posterior


class DampedSteps(NamedTuple, Generic[SiloPart]):
    """The state of a visit by damped steps; ``test`` has the estimates after the last one."""

    number: Array
    eta: Natural
    silo_part: SiloPart
    opt_state: optax.OptState
    finite: Array
    test: StationarityTest


@dataclass(frozen=True, kw_only=True)
class Damped(Local):
    """The base class of damped steps of ``q`` to a target, with gradient steps of the silo's part.

    A single step is a choice of the method, as in global VI, and has no optimum to reach.
    """

    rate: float
    steps: int
    num_particles: int
    optim: optax.GradientTransformation | None = None
    tolerance: float = AT_REST

    @property
    def share(self) -> float:
        """Return 1, or the rate of a single step."""
        return self.rate if self.steps == 1 else 1.0

    def __post_init__(self) -> None:
        positive_int("steps", self.steps)
        positive_int("num_particles", self.num_particles)
        if self.batch_size is not None:
            positive_int("batch_size", self.batch_size)
        if not 0 < self.rate <= 1:
            raise ValueError(f"rate must be in (0, 1], got {self.rate}.")

    @abstractmethod
    def target(
        self, problem: Problem[SiloPart], eta: Natural, silo_part: SiloPart, key: Array
    ) -> tuple[Natural, SiloPart]:
        """Return where a full step from ``eta`` leads, and the gradient in the silo's part."""

    def solve(self, problem: Problem[SiloPart], key: Array) -> Solution[SiloPart]:
        """Run the steps; see the class."""
        family, optim = problem.family, self.optim or optax.adam(0.02)
        checks = self.steps > 1

        def step(state: DampedSteps[SiloPart]) -> DampedSteps[SiloPart]:
            number, eta, silo_part = state.number, state.eta, state.silo_part
            key_step = jax.random.fold_in(key, number)
            target, gradient = self.target(problem, eta, silo_part, key_step)

            def move(state: DampedSteps[SiloPart]) -> DampedSteps[SiloPart]:
                moved, _ = proper_step(family.proper, state.eta, target, self.rate)
                descent = jax.tree.map(jnp.negative, gradient)
                updates, opt_state = optim.update(descent, state.opt_state, state.silo_part)
                params = optax.apply_updates(state.silo_part, updates)
                finite = all_finite(target)
                return DampedSteps(state.number + 1, moved, params, opt_state, finite, state.test)

            def add_estimate(state: DampedSteps[SiloPart]) -> DampedSteps[SiloPart]:
                full = jax.tree.map(jnp.subtract, target, state.eta)
                test = state.test.add(move_along(family, state.eta, full))
                return state._replace(number=state.number + 1, test=test)

            if not checks:
                return move(state)
            return jax.lax.cond(number < self.steps, move, add_estimate, state)

        def unfinished(state: DampedSteps[SiloPart]) -> Array:
            moving = state.number < self.steps
            return moving | state.test.wants_more(self.tolerance) if checks else moving

        first = DampedSteps(
            number=jnp.zeros((), jnp.int32),
            eta=family.natural(problem.start),
            silo_part=problem.silo_part,
            opt_state=optim.init(problem.silo_part),
            finite=jnp.array(True),
            test=StationarityTest.empty(family),
        )
        end = jax.lax.while_loop(unfinished, step, drop_weak_types(first))
        rests = end.test.holds(self.tolerance) if checks else jnp.array(True)
        return Solution(end.eta, end.silo_part, rests, end.finite)


@dataclass(frozen=True, kw_only=True)
class NaturalGradient(Damped):
    r"""Damped natural-gradient fixed points (Ashman et al. 2022, Property 3.2 and equation 4).

    .. math::
        \eta \leftarrow (1 - \rho)\, \eta + \rho\, \big(\eta_{\setminus m}
        + \nabla_\mu \mathbb{E}_q[\log p(y_m \mid z)]\big)

    Parameters
    ----------
    rate : float
        The step ``rho``, in (0, 1]. A step that would leave the family is halved.
    steps : int
        Steps at each visit.
    num_particles : int
        Draws for the expectation in each step.
    batch_size : int, optional
        Rows in each step; all by default.
    optim : optax.GradientTransformation, optional
        The optimiser of the silo's own parameters and local guide, which take one step for each of
        these; by default Adam at 0.02.
    tolerance : float
        The visit counts as converged if a full step from its end, averaged over fresh noise, would
        move no mean by more standard deviations, and no log standard deviation by more. There is no
        check after a single step.

    Examples
    --------
    >>> import numpyro_fed as nf
    >>> nf.local.NaturalGradient(rate=0.5, steps=50).rate
    0.5
    """

    rate: float = 0.5
    steps: int = 100
    num_particles: int = 16
    batch_size: int | None = None

    def target(
        self, problem: Problem[SiloPart], eta: Natural, silo_part: SiloPart, key: Array
    ) -> tuple[Natural, SiloPart]:
        """Return the cavity times the factor of a natural-gradient step, and the gradient."""
        noise = problem.noise(key, self.num_particles, self.batch_size)
        slopes = jax.grad(
            lambda psi, part: problem.log_lik(psi, part, noise, False)[1].mean(), (0, 1)
        )
        g_psi, gradient = slopes(problem.family.ordinary(eta), silo_part)
        factor = problem.family.dual_gradient(partial(expfam.inner, g_psi), eta)
        return jax.tree.map(jnp.add, problem.cavity, factor), gradient


@dataclass(frozen=True, kw_only=True)
class FixedPoint(Local):
    """Natural-gradient fixed points on fixed, standardised noise, until they no longer move.

    It is deterministic, and exact for a quadratic log density. PVI's server uses it for its own
    factor, and BayesADMM at silos; private parameters and local guides stay as they are. A step
    that lowers the free energy is halved. So is a step after one that was not shorter than the step
    before: such steps oscillate. ``num_particles`` None is four draws for each statistic of a
    coordinate, and at least 64.
    """

    steps: int = 50
    num_particles: int | None = None

    def solve(self, problem: Problem[SiloPart], key: Array) -> Solution[SiloPart]:
        """Run the steps; see the class."""
        family = problem.family
        key_fit, key_judge = jax.random.split(key)
        # With a full covariance of d globals these are about 4 d draws: fewer than d of them have a
        # singular covariance.
        start = family.natural(problem.start)
        statistics = sum(a.size for a in jax.tree.leaves(start)) // family.dim
        draws = self.num_particles or max(64, 4 * statistics)
        noise = fixed_noise(problem, key_fit, draws)
        silo_part = problem.silo_part

        def value(eta: Natural) -> Array:
            return free_energy(problem, family.ordinary(eta), silo_part, noise, plain=True)[0]

        def move(state: tuple[Any, ...]) -> tuple[Any, ...]:
            number, eta, before, last, rate = state
            min_value = before - jnp.finfo(before.dtype).eps * jnp.abs(before)

            def better(eta: Natural) -> Array:
                return family.proper(eta) & (value(eta) >= min_value)

            factor = family.dual_gradient(
                lambda psi: problem.log_lik(psi, silo_part, noise, True)[1].mean(), eta
            )
            target = jax.tree.map(jnp.add, problem.cavity, factor)
            after, used = proper_step(better, eta, target, rate)
            moved = jnp.where(used > 0, family.kl(after, eta), 0.0)
            next_rate = jnp.where(moved > 0.5 * last, 0.5, 1.0)
            return number + 1, after, value(after), moved, next_rate

        first = value(start)
        # From a start that is not finite every proper step counts as better.
        first = jnp.where(jnp.isfinite(first), first, -jnp.finfo(first.dtype).max)
        infinity, zero = jnp.asarray(jnp.inf, first.dtype), jnp.zeros((), jnp.int32)
        # Steps so far, parameters, their free energy, the last step's KL, and the next rate.
        _, eta, best, _, _ = jax.lax.while_loop(
            lambda state: (state[0] < self.steps) & (state[3] > MIN_MOVE),
            move,
            (zero, start, first, infinity, jnp.ones_like(infinity)),
        )
        converged = maximised(problem, family.ordinary(eta), silo_part, key_judge, AT_REST)
        return Solution(eta, silo_part, converged, jnp.isfinite(best))


@dataclass(frozen=True)
class ClosedForm(Local):
    r"""The exact update of a conjugate model.

    It adds the natural parameters of the likelihood to the cavity :math:`\eta_{\setminus m}`. PVI
    chooses it by itself where the model is conjugate.

    Examples
    --------
    >>> import numpyro_fed as nf
    >>> nf.local.ClosedForm()
    ClosedForm()
    """

    standardises = False

    def solve(self, problem: Problem[SiloPart], key: Array) -> Solution[SiloPart]:
        """Add the likelihood's natural parameters to the cavity's."""
        likelihood, misfit = problem.likelihood()
        eta = jax.tree.map(jnp.add, problem.cavity, likelihood)
        # The text was checked before the run; this is a guard where the closed form has led.
        suited = misfit(problem.family.ordinary(eta)) <= MAX_MISFIT
        return Solution(eta, problem.silo_part, jnp.array(True), all_finite(eta), suited)


@dataclass(frozen=True, kw_only=True)
class PowerEP(Damped):
    r"""Power expectation propagation (Ashman et al. 2022, Algorithm 2), by weighted draws.

    With the silo's factor :math:`t`, each step matches the moments of the tilted distribution
    :math:`q\, (p(y_m \mid z) / t)^\alpha`, estimated by self-normalised weights on draws from
    ``q``, and moves the factor by :math:`\rho / \alpha` times the change of ``q``.
    As ``alpha`` goes to 0 this is :class:`NaturalGradient`; ``alpha`` 1 is EP.

    Parameters
    ----------
    alpha : float
        In (0, 1].
    steps : int
        Steps at each visit.
    rate : float
        The step ``rho``, in (0, 1]. A step that would leave the family is halved.
    num_particles : int
        Draws in each step. They must cover the tilted distribution: many are needed if a silo's
        likelihood is much narrower than the cavity.
    optim, tolerance
        As for :class:`NaturalGradient`.

    Examples
    --------
    >>> import numpyro_fed as nf
    >>> nf.local.PowerEP(alpha=0.5).alpha
    0.5
    """

    alpha: float = 0.5
    steps: int = 200
    rate: float = 0.1
    num_particles: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.alpha <= 1:
            raise ValueError(f"alpha must be in (0, 1], got {self.alpha}.")

    def target(
        self, problem: Problem[SiloPart], eta: Natural, silo_part: SiloPart, key: Array
    ) -> tuple[Natural, SiloPart]:
        """Return the member with the moments of the tilted distribution, and the gradient."""
        family, psi = problem.family, problem.family.ordinary(eta)
        noise = problem.noise(key, self.num_particles, None)
        factor = jax.tree.map(jnp.subtract, eta, problem.cavity)

        def expected(silo_part: SiloPart) -> tuple[Array, tuple[Array, Array]]:
            z, log_lik = problem.log_lik(psi, silo_part, noise, False)
            return log_lik.mean(), (z, log_lik)

        (_, (z, log_lik)), gradient = jax.value_and_grad(expected, has_aux=True)(silo_part)
        T = jax.vmap(family.statistics)(z)
        # Tilted over q, to the power alpha: q's own density cancels, as draws are from q.
        log_weights = self.alpha * (log_lik - jax.vmap(lambda t: expfam.inner(factor, t))(T))
        w = jax.nn.softmax(log_weights)
        matched = family.from_mean(jax.tree.map(lambda t: jnp.tensordot(w, t, 1), T))
        # The silo's likelihood counted for alpha of itself, so its change is scaled up.
        return jax.tree.map(lambda a, b: a + (b - a) / self.alpha, eta, matched), gradient
