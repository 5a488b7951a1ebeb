"""The base of local optimisers: the problem, its solution, the free energy, and safe steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.lax import stop_gradient

from numpyro_fed.basics.trees import Tree, drop_weak_types, where
from numpyro_fed.numerics import expfam
from numpyro_fed.numerics.expfam import Family
from numpyro_fed.numerics.expfam.family import Natural, Ordinary

SiloPart = TypeVar("SiloPart")


class LocalNoise(NamedTuple):
    """The noise of one evaluation: of globals and rows, and the minibatch's indices or None."""

    globals: Any
    rows: dict[str, Array]
    which: Array | None = None


class Problem(NamedTuple, Generic[SiloPart]):
    """A silo's local free energy, ready to be maximised.

    ``cavity``: The posterior without the silo's factor; it may be improper.
    ``silo_part``: Private parameters and local guides, which are optimised as well.
    ``noise``, ``(key, particles, batch_size or None) -> LocalNoise``.
    ``log_lik``, ``(psi, silo_part, noise, plain) -> (z, values)``: Draws (particles, dim) and the
        bound on the silo's log likelihood at each. The gradient of a ``plain`` one is the
        derivative of its value.
    ``likelihood``, ``() -> (eta, misfit)``: The silo's likelihood if it is conjugate; and
        ``misfit(psi)``, its departure from conjugacy in nats, beyond rounding, at draws from
        ``psi`` and ``start``.
    ``rows``: The number of the silo's rows.
    ``divergence``: The one to the cavity, ``(eta_q, eta_cavity) -> ()``, if it is not KL.
    ``to_frame``, ``silo_part -> (inside, from_frame)``: The silo's part in coordinates in which it
        is about standard, and the way back.
    ``near``: Whether ``start`` is near the optimum, and steps are in coordinates in which it is
        standard.
    """

    family: Family[Any]
    cavity: Natural
    start: Ordinary
    silo_part: SiloPart
    noise: Callable[[Array, int, int | None], LocalNoise]
    log_lik: Callable[[Ordinary, SiloPart, LocalNoise, bool], tuple[Array, Array]]
    likelihood: Callable[[], tuple[Natural, Callable[[Ordinary], Array]]]
    rows: int
    divergence: Callable[[Natural, Natural], Array] | None = None
    to_frame: Callable[[SiloPart], tuple[SiloPart, Callable[[SiloPart], SiloPart]]] = (
        lambda silo_part: (silo_part, lambda silo_part: silo_part)
    )
    near: bool = False

    def factor(self, eta: Natural) -> Natural:
        """Return the factor that leads from the cavity to ``eta``: the divergence's gradient."""
        if (divergence := self.divergence) is None:
            return jax.tree.map(jnp.subtract, eta, self.cavity)
        return self.family.dual_gradient(
            lambda psi: divergence(self.family.natural(psi), self.cavity), eta
        )

    def standardised(
        self,
    ) -> tuple[Problem[SiloPart], Callable[[Solution[SiloPart]], Solution[SiloPart]]]:
        """Return the problem in coordinates in which its start is standard, and the way back."""
        family, frame, divergence = self.family, self.start, self.divergence
        inside_part, from_frame = self.to_frame(self.silo_part)
        in_z = partial(family.from_coordinates_of, frame)

        def log_lik(
            psi: Ordinary, silo_part: SiloPart, noise: LocalNoise, plain: bool
        ) -> tuple[Array, Array]:
            placed = family.composed(frame, psi)
            _, values = self.log_lik(placed, from_frame(silo_part), noise, plain)
            return jax.vmap(family.draw, (None, 0))(psi, noise.globals), values

        inside = self._replace(
            cavity=family.to_coordinates_of(frame, self.cavity),
            start=family.standard(frame),
            silo_part=inside_part,
            log_lik=log_lik,
            divergence=None
            if divergence is None
            else lambda eta, cavity: divergence(in_z(eta), in_z(cavity)),
            near=True,
        )
        return inside, lambda found: found._replace(
            eta=in_z(found.eta), silo_part=from_frame(found.silo_part)
        )


class Solution(NamedTuple, Generic[SiloPart]):
    """The solution of a local problem.

    ``eta`` are its natural parameters, and ``silo_part`` the silo's own. ``finite`` says whether
    the last numbers of the search were finite, and ``suited`` whether the likelihood is conjugate,
    if the optimiser relies on that.
    """

    eta: Natural
    silo_part: SiloPart
    converged: Array
    finite: Array
    suited: Array | bool = True


# Steps of L-BFGS in a row without a lower loss, after which it ends: at the end of its precision it
# would go to and fro until the last step.
MAX_STALLED = 3
MAX_HALVINGS = 11  # of a step; the last one tried is a thousandth of the first
AT_REST = 0.1  # sds: a visit this close to its optimum has converged, as a fit with this error has


class Local(ABC):
    """The base class of local optimisers, which are frozen dataclasses."""

    @property
    def share(self) -> float:
        """Return the share of the way to its optimum that a visit goes; 0 if that is not known."""
        return 1.0

    @property
    def batch_size(self) -> int | None:
        """Return the rows in each step; None for all."""
        return None

    @property
    def any_divergence(self) -> bool:
        """Return whether the optimiser takes a divergence to the cavity other than KL."""
        return False

    @property
    def standardises(self) -> bool:
        """Return whether the optimiser works in coordinates in which a good start is standard."""
        return True

    @abstractmethod
    def solve(self, problem: Problem[SiloPart], key: Array) -> Solution[SiloPart]:
        """Maximise the free energy. It must be pure and traceable by JAX."""


def free_energy(
    problem: Problem[SiloPart],
    psi: Ordinary,
    silo_part: SiloPart,
    noise: LocalNoise,
    *,
    alpha: float = 0.0,
    stick: bool = False,
    plain: bool = False,
) -> tuple[Array, Array]:
    """Return estimates of the local free energy (), up to a constant, and expected log likelihood.

    With ``stick`` the gradient sticks the landing: it has no variance where ``q`` is exact. With
    ``plain`` it is the derivative of the value.
    """
    family, cavity = problem.family, problem.cavity
    z, log_lik = problem.log_lik(psi, silo_part, noise, plain)
    expected = log_lik.mean()
    if problem.divergence is not None:
        return expected - problem.divergence(family.natural(psi), cavity), expected
    if alpha == 0 and not stick:
        return expected + expfam.inner(cavity, family.moments(psi)) + family.entropy(psi), expected
    # Estimated from the same draws as the likelihood: where q is exact, the terms cancel draw by
    # draw, and the gradient has no noise.
    eta = family.natural(psi)
    factor = jax.tree.map(jnp.subtract, cavity, stop_gradient(eta) if alpha == 0 else eta)
    log_ratio = log_lik + jax.vmap(lambda z: expfam.inner(factor, family.statistics(z)))(z)
    if alpha == 0:
        return log_ratio.mean() + stop_gradient(family.log_partition(eta)), expected
    log_ratio += family.log_partition(eta)
    return (jax.nn.logsumexp(alpha * log_ratio) - jnp.log(len(log_ratio))) / alpha, expected


def proper_step(
    proper: Callable[[Tree], Array], eta: Tree, target: Tree, rate: Array | float
) -> tuple[Tree, Array]:
    """Return ``eta + r (target - eta)`` with the first proper ``r`` of ``rate``, ``rate / 2``, ...

    The second value is ``r``. It is 0, and ``eta`` unchanged, if a thousandth of ``rate`` is still
    improper.
    """

    def candidate(r: Array) -> Tree:
        return jax.tree.map(lambda a, b: a + r * (b - a), eta, target)

    def attempt(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        tries, r, _ = carry
        r = jnp.where(tries == 0, r, r / 2)
        return tries + 1, r, proper(candidate(r))

    # A loop and not a vmap over all step sizes: the first one is usually proper.
    first = jnp.asarray(rate, jnp.result_type(float))
    _, r, is_proper = jax.lax.while_loop(
        lambda carry: (carry[0] < MAX_HALVINGS) & ~carry[2],
        attempt,
        (jnp.zeros((), jnp.int32), first, jnp.array(False)),
    )
    return where(is_proper, candidate(r), eta), jnp.where(is_proper, r, 0.0)


def minimise(
    loss: Callable[[Tree], Array], start: Tree, steps: int, tolerance: float
) -> tuple[Tree, Array, Array]:
    """Run Optax's L-BFGS until no component of the gradient exceeds ``tolerance``.

    It also ends where ``MAX_STALLED`` steps in a row have not lowered the loss by more than
    rounding does. It returns the parameters, the loss and the largest component of the gradient.
    """
    optim = optax.lbfgs()
    value_and_grad = optax.value_and_grad_from_state(loss)

    def step(state: tuple[Any, ...]) -> tuple[Any, ...]:
        number, params, opt_state, _, best, stalled = state
        value, gradient = value_and_grad(params, state=opt_state)
        updates, opt_state = optim.update(
            gradient, opt_state, params, value=value, grad=gradient, value_fn=loss
        )
        params = optax.apply_updates(params, updates)
        # The line search has evaluated the gradient at the new parameters; it is not done again.
        after = jax.tree.leaves(optax.tree_utils.tree_get(opt_state, "grad"))
        slope = jnp.stack([jnp.abs(g).max(initial=0.0) for g in after]).max()
        # By more than rounding: L-BFGS at the end of its precision goes up and down by that.
        lower = value < best - jnp.finfo(value.dtype).eps * jnp.abs(value)
        best, stalled = jnp.minimum(best, value), jnp.where(lower, 0, stalled + 1)
        return number + 1, params, opt_state, slope, best, stalled

    def unfinished(state: tuple[Any, ...]) -> Array:
        number, _, _, slope, _, stalled = state
        return (number < steps) & (slope > tolerance) & (stalled < MAX_STALLED)

    # Steps so far, parameters, state of L-BFGS, its largest slope and best value, steps since then.
    zero, infinity = jnp.zeros((), jnp.int32), jnp.array(jnp.inf)
    first = zero, start, optim.init(start), infinity, infinity, zero
    _, params, opt_state, slope, _, _ = jax.lax.while_loop(unfinished, step, drop_weak_types(first))
    return params, optax.tree_utils.tree_get(opt_state, "value"), slope


# Estimates of the step that are averaged. With fewer than eight the standard error is itself too
# uncertain; where 64 do not settle it, the answer is no.
MIN_ESTIMATES, MAX_ESTIMATES = 8, 64
PARTICLES = 16  # draws in each estimate; two, on all rows, where the visit used minibatches


class StationarityTest(NamedTuple):
    """A sequential test whether a full natural-gradient step from a point is zero.

    It has the number of estimates of the step, by :attr:`expfam.Family.move`, their mean and the
    sum of their squared deviations (2 dim,). A ``tolerance`` bounds the move of each mean, in
    standard deviations, and of each log standard deviation. Estimates are averaged until their
    error is a quarter of it; at the end it must be below a half.
    """

    number: Array
    mean: Array
    squares: Array

    @classmethod
    def empty(cls, family: Family[Any]) -> StationarityTest:
        """Return the statistics of no estimates."""
        zeros = jnp.zeros(2 * family.dim)
        return cls(jnp.zeros((), jnp.int32), zeros, zeros)

    def add(self, move: Array) -> StationarityTest:
        """Return the statistics with one more estimate (2 dim,)."""
        number = self.number + 1
        mean = self.mean + (move - self.mean) / number
        return StationarityTest(number, mean, self.squares + (move - self.mean) * (move - mean))

    @property
    def error(self) -> Array:
        """Return the standard error of the mean."""
        return jnp.sqrt(self.squares / (self.number * (self.number - 1)))

    def wants_more(self, tolerance: float, most: int = MAX_ESTIMATES) -> Array:
        """Return whether another estimate is needed for a decision."""
        # Four errors to stop with a no: the test is repeated at each estimate, and for all numbers.
        is_moving = (jnp.abs(self.mean) > tolerance + 4 * self.error).any()
        is_precise = (self.error <= tolerance / 4).all()
        undecided = (self.number < most) & ~is_moving & ~is_precise
        return (self.number < MIN_ESTIMATES) | undecided

    def arrived(self, tolerance: float) -> Array:
        """Return whether a visit may end early: stricter than ``holds``, as it is asked often."""
        close = jnp.abs(self.mean) + self.error <= tolerance / 2
        return (self.number >= MIN_ESTIMATES) & close.all()

    def holds(self, tolerance: float) -> Array:
        """Return the decision of the test: whether the step is zero up to the tolerance."""
        within = jnp.abs(self.mean) <= tolerance + 2 * self.error
        return (within & (self.error <= tolerance / 2)).all()


def maximised(
    problem: Problem[SiloPart],
    psi: Ordinary,
    silo_part: SiloPart,
    key: Array,
    tolerance: float,
    *,
    alpha: float = 0.0,
    particles: int = PARTICLES,
    work: float = jnp.inf,
) -> Array:
    """Return whether the local free energy has its maximum at ``psi``, up to ``tolerance``.

    See :class:`StationarityTest`. ``work`` bounds the number of evaluations of rows. If it is too
    small for ``MIN_ESTIMATES`` estimates the answer is no.
    """
    family, eta = problem.family, problem.family.natural(psi)
    most = int(min(MAX_ESTIMATES, work // (particles * max(problem.rows, 1))))
    if most < MIN_ESTIMATES:
        return jnp.array(False)
    factor = problem.factor(eta)

    def excess(psi: Ordinary, noise: LocalNoise) -> Array:
        """Return the expected log likelihood less the log factor; its gradient is the step."""
        if alpha > 0:
            return free_energy(problem, psi, silo_part, noise, alpha=alpha)[0]
        z, log_lik = problem.log_lik(psi, silo_part, noise, False)
        factor_terms = jax.vmap(lambda z: expfam.inner(factor, family.statistics(z)))(z)
        return (log_lik - factor_terms).mean()

    def move(i: Array) -> Array:
        noise = problem.noise(jax.random.fold_in(key, i), particles, None)
        return family.move(psi, jax.grad(excess)(psi, noise))

    test = jax.lax.while_loop(
        lambda test: test.wants_more(tolerance, most),
        lambda test: test.add(move(test.number)),
        StationarityTest.empty(family),
    )
    return test.holds(tolerance)
