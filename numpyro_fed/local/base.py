"""The base of local optimisers: the problem, its solution, the free energy, and safe steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.lax import stop_gradient

from numpyro_fed import expfam
from numpyro_fed.expfam import Family
from numpyro_fed.expfam.base import Natural, Ordinary
from numpyro_fed.trees import Tree, drop_weak_types, where

SiloPart = TypeVar("SiloPart")
# The state of the loop over L-BFGS steps.
Search = tuple[Array, Tree, optax.OptState, Array, Array, Array]


class LocalNoise(NamedTuple):
    """The noise of one evaluation: of globals and rows, and the minibatch's indices or None."""

    globals: Any
    rows: dict[str, Array]
    which: Array | None


class Problem(NamedTuple, Generic[SiloPart]):
    """A silo's local free energy, ready to be maximised.

    Attributes
    ----------
    family : Family
    cavity : eta
        Natural parameters of the posterior without the silo's factor; it may be improper.
    start : psi
        The start of ``q``, in ordinary parameters.
    silo_part : pytree
        The silo's private parameters and its local guides, which are optimised as well.
    noise : (key, particles, batch_size or None) -> LocalNoise
    log_lik : (psi, silo_part, noise, plain) -> (z, values)
        Draws (particles, dim) and the bound on the silo's log likelihood at each. The gradient of
        a ``plain`` one is the derivative of its value.
    likelihood : () -> (eta, misfit)
        Natural parameters of the silo's likelihood if it is conjugate; and ``misfit(psi)``, its
        departure from conjugacy in nats, beyond rounding, at draws from ``psi`` and ``start``.
    rows : int
        The number of the silo's rows.
    divergence : (eta_q, eta_cavity) -> () or None
        The divergence to the cavity, if it is not KL.
    to_frame : silo_part -> (inside, from_frame)
        The silo's part in coordinates in which it is about standard, and the way back.
    near : bool
        Whether ``start`` is near the optimum, and steps are in coordinates in which it is standard.
    """

    family: Family[Any]
    cavity: Natural
    start: Ordinary
    silo_part: SiloPart
    noise: Callable[[Array, int, int | None], LocalNoise]
    log_lik: Callable[[Ordinary, SiloPart, LocalNoise, bool], tuple[Array, Array]]
    likelihood: Callable[[], tuple[Natural, Callable[[Ordinary], Array]]]
    rows: int
    divergence: Callable[[Natural, Natural], Array] | None
    to_frame: Callable[[SiloPart], tuple[SiloPart, Callable[[SiloPart], SiloPart]]] = (
        lambda silo_part: (silo_part, lambda silo_part: silo_part)
    )
    near: bool = False

    def standardised(
        self,
    ) -> tuple[Problem[SiloPart], Callable[[Solution[SiloPart]], Solution[SiloPart]]]:
        """Return the problem in coordinates in which its start is standard, and the way back."""
        family, frame = self.family, self.start
        inside_part, from_frame = self.to_frame(self.silo_part)

        def log_lik(
            psi: Ordinary, silo_part: SiloPart, noise: LocalNoise, plain: bool
        ) -> tuple[Array, Array]:
            _, values = self.log_lik(family.moved(frame, psi), from_frame(silo_part), noise, plain)
            return jax.vmap(family.draw, (None, 0))(psi, noise.globals), values

        def divergence(eta: Natural, cavity: Natural) -> Array:
            both = (family.out_of(frame, eta), family.out_of(frame, cavity))
            return self.divergence(*both) if self.divergence else jnp.zeros(())

        def back_solution(found: Solution[SiloPart]) -> Solution[SiloPart]:
            eta = family.out_of(frame, found.eta)
            return found._replace(eta=eta, silo_part=from_frame(found.silo_part))

        inside = self._replace(
            cavity=family.into(frame, self.cavity),
            start=family.standard(frame),
            silo_part=inside_part,
            log_lik=log_lik,
            divergence=self.divergence and divergence,
            near=True,
        )
        return inside, back_solution


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


class Local(Protocol):
    """The protocol of a local optimiser: a frozen dataclass with ``solve`` and its properties."""

    @property
    def share(self) -> float:
        """Return the share of the way to its optimum that a visit goes; 0 if that is not known."""

    @property
    def batch_size(self) -> int | None:
        """Return the rows in each step; None for all."""

    @property
    def closed_form(self) -> bool:
        """Return whether the optimiser needs a conjugate likelihood."""

    @property
    def any_divergence(self) -> bool:
        """Return whether the optimiser takes a divergence to the cavity other than KL."""

    @property
    def standardises(self) -> bool:
        """Return whether the optimiser works in coordinates in which a good start is standard."""

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
    proper: Callable[[Natural], Array], eta: Natural, target: Natural, rate: Array | float
) -> tuple[Natural, Array]:
    """Return ``eta + r (target - eta)`` with the first proper ``r`` of ``rate``, ``rate / 2``, ...

    The second value is ``r``. It is 0, and ``eta`` unchanged, if a thousandth of ``rate`` is still
    improper.
    """

    def candidate(r: Array) -> Natural:
        return jax.tree.map(lambda a, b: a + r * (b - a), eta, target)

    def body_fn(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        tries, r, _ = carry
        r = jnp.where(tries == 0, r, r / 2)
        return tries + 1, r, proper(candidate(r))

    def cond_fn(carry: tuple[Array, Array, Array]) -> Array:
        tries, _, is_proper = carry
        return (tries < MAX_HALVINGS) & ~is_proper

    # A loop and not a vmap over all step sizes: the first one is usually proper.
    first = jnp.asarray(rate, jnp.result_type(float))
    carry = (jnp.zeros((), jnp.int32), first, jnp.array(False))
    _, r, is_proper = jax.lax.while_loop(cond_fn, body_fn, carry)
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

    def step(carry: Search[Tree]) -> Search[Tree]:
        i, params, opt_state, _, best, stalled = carry
        value, gradient = value_and_grad(params, state=opt_state)
        updates, opt_state = optim.update(
            gradient, opt_state, params, value=value, grad=gradient, value_fn=loss
        )
        params = optax.apply_updates(params, updates)
        # The line search has evaluated the gradient at the new parameters; it is not done again.
        after = jax.tree.leaves(optax.tree_utils.tree_get(opt_state, "grad"))
        size = jnp.stack([jnp.abs(g).max(initial=0.0) for g in after]).max()
        # By more than rounding: L-BFGS at the end of its precision goes up and down by that.
        lower = value < best - jnp.finfo(value.dtype).eps * jnp.abs(value)
        best, stalled = jnp.minimum(best, value), jnp.where(lower, 0, stalled + 1)
        return i + 1, params, opt_state, size, best, stalled

    def cond_fn(carry: Search[Tree]) -> Array:
        i, _, _, size, _, stalled = carry
        return (i < steps) & (size > tolerance) & (stalled < MAX_STALLED)

    zero, infinity = jnp.zeros((), jnp.int32), jnp.array(jnp.inf)
    carry = (zero, start, optim.init(start), infinity, infinity, zero)
    _, params, opt_state, size, _, _ = jax.lax.while_loop(cond_fn, step, drop_weak_types(carry))
    return params, optax.tree_utils.tree_get(opt_state, "value"), size


# Estimates of the step that are averaged. With fewer than eight the standard error is itself too
# uncertain; where 64 do not settle it, the answer is no.
MIN_ESTIMATES, MAX_ESTIMATES = 8, 64
PARTICLES = 16  # draws in each estimate; two, on all rows, where the visit used minibatches


class Tally(NamedTuple):
    """Running statistics of estimates of a move: number, mean and squared deviations (2 dim,)."""

    number: Array
    mean: Array
    squares: Array

    @property
    def error(self) -> Array:
        """Return the standard error of the mean."""
        return jnp.sqrt(self.squares / (self.number * (self.number - 1)))


@dataclass(frozen=True)
class AtRest:
    """A sequential test whether a full natural-gradient step from a point is zero.

    ``tolerance`` bounds the move of each mean, in standard deviations, and of each log standard
    deviation. Estimates, ``most`` of them, are averaged until their error is a quarter of it; at
    the end it must be below a half.
    """

    family: Family[Any]
    tolerance: float
    most: int = MAX_ESTIMATES

    def begin(self) -> Tally:
        """Return the statistics of no estimates."""
        none = jnp.zeros(2 * self.family.dim)
        return Tally(jnp.zeros((), jnp.int32), none, none)

    def add(self, tally: Tally, move: Array) -> Tally:
        """Return the statistics with one more estimate (2 dim,), by :attr:`expfam.Family.move`."""
        number = tally.number + 1
        mean = tally.mean + (move - tally.mean) / number
        return Tally(number, mean, tally.squares + (move - tally.mean) * (move - mean))

    def wants_more(self, tally: Tally) -> Array:
        """Return whether another estimate is needed for a decision."""
        # Four errors to stop with a no: the test is repeated at each estimate, and for all numbers.
        is_moving = (jnp.abs(tally.mean) > self.tolerance + 4 * tally.error).any()
        is_precise = (tally.error <= self.tolerance / 4).all()
        return (tally.number < MIN_ESTIMATES) | (
            (tally.number < self.most) & ~is_moving & ~is_precise
        )

    def arrived(self, tally: Tally) -> Array:
        """Return whether a visit may end before its last step.

        It is stricter than :meth:`holds`, which decides once, since it is asked again and again.
        """
        close = jnp.abs(tally.mean) + tally.error <= self.tolerance / 2
        return (tally.number >= MIN_ESTIMATES) & close.all()

    def holds(self, tally: Tally) -> Array:
        """Return the decision of the test: whether the step is zero up to the tolerance."""
        within = jnp.abs(tally.mean) <= self.tolerance + 2 * tally.error
        return (within & (tally.error <= self.tolerance / 2)).all()


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

    See :class:`AtRest`. ``work`` bounds the number of evaluations of rows. If it is too small for
    ``MIN_ESTIMATES`` estimates the answer is no.
    """
    family, eta = problem.family, problem.family.natural(psi)
    most = int(min(MAX_ESTIMATES, work // (particles * max(problem.rows, 1))))
    if most < MIN_ESTIMATES:
        return jnp.array(False)

    if problem.divergence is None:
        factor = jax.tree.map(jnp.subtract, eta, problem.cavity)
    else:
        divergence, cavity = problem.divergence, problem.cavity
        factor = family.dual_gradient(lambda psi: divergence(family.natural(psi), cavity), eta)

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

    judge = AtRest(family, tolerance, most)
    tally = jax.lax.while_loop(
        judge.wants_more, lambda t: judge.add(t, move(t.number)), judge.begin()
    )
    return judge.holds(tally)
