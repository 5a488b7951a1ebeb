r"""Local optimisers: what a silo does between two messages.

Each of them maximises a silo's local free energy (Ashman et al. 2022, equation 2 and Algorithm 1)

.. math::
    \mathcal{F}_m(q) = \mathbb{E}_q\big[\log p(y_m \mid z)\big]
    - \mathrm{KL}\big(q \,\|\, q_{\setminus m}\big),

where the cavity :math:`q_{\setminus m}` is the posterior without the silo's own factor and the
likelihood is bounded by the silo's local guide where it has local latents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.lax import stop_gradient
from jax.scipy.linalg import solve_triangular

from numpyro_fed import expfam
from numpyro_fed.errors import positive_int
from numpyro_fed.expfam import Family

BLOCK = 64  # steps, at most, for which noise is drawn at once
NOISE = 2**20  # numbers, about, that are drawn at once

Eta = Any
Psi = Any


class Noise(NamedTuple):
    """The noise of one evaluation: of the globals, of the rows, and a minibatch's rows or None."""

    globals: Any
    rows: dict[str, Array]
    which: Array | None


class Problem(NamedTuple):
    """A silo's local free energy, ready to be maximised.

    Attributes
    ----------
    family : Family
    cavity : eta
        Natural parameters of the posterior without the silo's factor; it may be improper.
    start : psi
        Where ``q`` starts, in ordinary parameters.
    own : pytree
        What the silo keeps to itself: private parameters and its local guide.
    noise : (key, particles, batch_size or None) -> Noise
    log_lik : (psi, own, noise, plain) -> (z, values)
        Draws (particles, dim) and the bound on the silo's log likelihood at each. The gradient of
        a ``plain`` one is the derivative of its value.
    likelihood : () -> eta
        Natural parameters of the silo's likelihood where it is conjugate.
    divergence : (eta_q, eta_cavity) -> () or None
        In place of KL.
    """

    family: Family
    cavity: Eta
    start: Psi
    own: Any
    noise: Callable[[Array, int, int | None], Noise]
    log_lik: Callable[[Psi, Any, Noise, bool], tuple[Array, Array]]
    likelihood: Callable[[], Eta]
    divergence: Callable[[Eta, Eta], Array] | None


class Solution(NamedTuple):
    """The natural parameters that were found, the silo's own part, and whether it converged."""

    eta: Eta
    own: Any
    converged: Array


class Local(Protocol):
    """A local optimiser: a frozen dataclass with ``solve`` and the size of its minibatches."""

    @property
    def batch_size(self) -> int | None:
        """Rows in each step; None for all."""
        ...

    def solve(self, problem: Problem, key: Array) -> Solution:
        """Maximise the free energy; pure and jittable."""
        ...


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
        In nats: the visit counts as converged if the last quarter of its steps is better than
        the one before by no more than this, or than three standard errors.

    Examples
    --------
    >>> import optax, numpyro_fed as nf
    >>> nf.local.Optax(optim=optax.adam(1e-2), steps=200, batch_size=128).steps
    200
    """

    optim: optax.GradientTransformation | None = None
    steps: int = 1_000
    num_particles: int = 2
    batch_size: int | None = None
    space: str = "ordinary"
    alpha: float = 0.0
    patience: int | None = None
    tolerance: float = 0.1

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
        converged = jnp.array(True) if self.steps == 1 else self._settled(history, taken)
        return Solution(eta, own, converged)

    def _settled(self, history: Array, taken: Array) -> Array:
        """Whether the last quarter of the steps gained next to nothing on the one before."""
        place = jnp.arange(self.steps)
        quarter = jnp.maximum(taken // 4, 1)

        def over(first: Array) -> tuple[Array, Array]:
            inside = (place >= first) & (place < first + quarter)
            mean = jnp.where(inside, history, 0.0).sum() / quarter
            return mean, jnp.where(inside, (history - mean) ** 2, 0.0).sum() / quarter**2

        (before, v0), (after, v1) = over(taken - 2 * quarter), over(taken - quarter)
        gain = after - before
        settled = gain <= self.tolerance + 3 * jnp.sqrt(v0 + v1)
        return jnp.isfinite(gain) & (settled | (taken < self.steps))


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
        optimum is exact for a Gaussian.
    tolerance : float
        Stop when no component of the gradient is larger.

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

    def __post_init__(self) -> None:
        positive_int("steps", self.steps)
        positive_int("num_particles", self.num_particles)

    def solve(self, problem: Problem, key: Array) -> Solution:
        """Search until the gradient vanishes; see the class."""
        noise = problem.noise(key, self.num_particles, None)
        noise = noise._replace(globals=jax.tree.map(_standardised, noise.globals))

        def loss(params: tuple[Psi, Any]) -> Array:
            return -free_energy(problem, *params, noise, plain=True)[0]

        (psi, own), converged = minimise(
            loss, (problem.start, problem.own), self.steps, self.tolerance
        )
        return Solution(problem.family.natural(psi), own, converged)


def _standardised(noise: Array) -> Array:
    """Standard normal noise (n, dim) with sample mean zero and sample covariance one."""
    if not jnp.issubdtype(noise.dtype, jnp.floating) or len(noise) <= noise.shape[1] + 1:
        return noise
    centred = noise - noise.mean(0)
    L = jnp.linalg.cholesky(centred.T @ centred / len(noise))
    return solve_triangular(L, centred.T, lower=True).T


@dataclass(frozen=True, kw_only=True)
class NaturalGradient:
    r"""Damped natural-gradient fixed points (Ashman et al. 2022, Property 3.2 and equation 4).

    .. math::
        \eta \leftarrow (1 - \rho)\, \eta + \rho\, \big(\eta_{\setminus m}
        + \nabla_\mu \mathbb{E}_q[\log p(y_m \mid z)]\big)

    Parameters
    ----------
    rate : float
        The step ``rho``, in (0, 1]. It is halved, in a step that would leave the family.
    steps : int
        Steps at each visit.
    num_particles : int
        Draws for the expectation in each step.
    batch_size : int, optional
        Rows in each step; all by default.
    expectation : {"monte_carlo", "closed_form"}
        ``"closed_form"`` for models whose likelihood is conjugate.
    optim : optax.GradientTransformation, optional
        For the silo's own parameters and local guide, which take one step for each of these; by
        default Adam at 0.02.
    tolerance : float
        The visit counts as converged if the last step moved ``q`` by no more, in nats (KL).

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
    expectation: str = "monte_carlo"
    optim: optax.GradientTransformation | None = None
    tolerance: float = 0.1

    def __post_init__(self) -> None:
        positive_int("steps", self.steps)
        positive_int("num_particles", self.num_particles)
        if self.batch_size is not None:
            positive_int("batch_size", self.batch_size)
        if not 0 < self.rate <= 1:
            raise ValueError(f"rate must be in (0, 1], got {self.rate}.")
        if self.expectation not in ("monte_carlo", "closed_form"):
            raise ValueError(
                f"expectation={self.expectation!r}: expected 'monte_carlo' or 'closed_form'."
            )

    def solve(self, problem: Problem, key: Array) -> Solution:
        """Run the steps; see the class."""
        family, optim = problem.family, self.optim or optax.adam(0.02)

        def gradients(eta: Eta, own: Any, key: Array) -> tuple[Eta, Any]:
            if self.expectation == "closed_form":
                return problem.likelihood(), jax.tree.map(jnp.zeros_like, own)
            noise = problem.noise(key, self.num_particles, self.batch_size)

            def expected(psi: Psi, own: Any) -> Array:
                return problem.log_lik(psi, own, noise, False)[1].mean()

            dual = family.dual_gradient(lambda psi: expected(psi, own), eta)
            return dual, jax.grad(expected, 1)(family.ordinary(eta), own)

        def step(carry: tuple, i: Array) -> tuple[tuple, Array]:
            eta, own, opt_state = carry
            factor, g_own = gradients(eta, own, jax.random.fold_in(key, i))
            target = jax.tree.map(jnp.add, problem.cavity, factor)
            moved, _ = proper_step(family, eta, target, self.rate)
            updates, opt_state = optim.update(jax.tree.map(jnp.negative, g_own), opt_state, own)
            return (moved, optax.apply_updates(own, updates), opt_state), expfam.kl(
                family, moved, eta
            )

        start = family.natural(problem.start)
        carry = (start, problem.own, optim.init(problem.own))
        (eta, own, _), moved = jax.lax.scan(step, carry, jnp.arange(self.steps))
        return Solution(eta, own, (self.steps == 1) | (moved[-1] <= self.tolerance))


@dataclass(frozen=True)
class ClosedForm:
    r"""The exact update of a conjugate model: :math:`\eta_{\setminus m}` plus the likelihood's own
    natural parameters. Chosen by itself where the model allows it.

    Examples
    --------
    >>> import numpyro_fed as nf
    >>> nf.local.ClosedForm()
    ClosedForm()
    """

    batch_size: None = None

    def solve(self, problem: Problem, key: Array) -> Solution:
        """Add the likelihood's natural parameters to the cavity's."""
        eta = jax.tree.map(jnp.add, problem.cavity, problem.likelihood())
        return Solution(eta, problem.own, jnp.array(True))

    def __repr__(self) -> str:
        return "ClosedForm()"


@dataclass(frozen=True, kw_only=True)
class PowerEP:
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
        ``rho``, in (0, 1]; halved in a step that would leave the family.
    num_particles : int
        Draws in each step. They must cover the tilted distribution: many are needed where a
        silo's likelihood is much tighter than the cavity.
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
    optim: optax.GradientTransformation | None = None
    tolerance: float = 0.1
    batch_size: None = None

    def __post_init__(self) -> None:
        positive_int("steps", self.steps)
        positive_int("num_particles", self.num_particles)
        for name in ("alpha", "rate"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in (0, 1], got {getattr(self, name)}.")

    def solve(self, problem: Problem, key: Array) -> Solution:
        """Run the steps; see the class."""
        family, optim = problem.family, self.optim or optax.adam(0.02)

        def step(carry: tuple, i: Array) -> tuple[tuple, Array]:
            eta, own, opt_state = carry
            psi = family.ordinary(eta)
            noise = problem.noise(jax.random.fold_in(key, i), self.num_particles, None)
            factor = jax.tree.map(jnp.subtract, eta, problem.cavity)

            def expected(own: Any) -> tuple[Array, tuple[Array, Array]]:
                z, log_lik = problem.log_lik(psi, own, noise, False)
                return log_lik.mean(), (z, log_lik)

            (_, (z, log_lik)), g_own = jax.value_and_grad(expected, has_aux=True)(own)
            T = jax.vmap(family.statistics)(z)
            log_weights = self.alpha * (log_lik - jax.vmap(lambda t: expfam.inner(factor, t))(T))
            w = jax.nn.softmax(log_weights)
            matched = family.from_mean(jax.tree.map(lambda t: jnp.tensordot(w, t, 1), T))
            target = jax.tree.map(lambda a, b: a + (b - a) / self.alpha, eta, matched)
            moved, _ = proper_step(family, eta, target, self.rate)
            updates, opt_state = optim.update(jax.tree.map(jnp.negative, g_own), opt_state, own)
            return (moved, optax.apply_updates(own, updates), opt_state), expfam.kl(
                family, moved, eta
            )

        start = family.natural(problem.start)
        carry = (start, problem.own, optim.init(problem.own))
        (eta, own, _), moved = jax.lax.scan(step, carry, jnp.arange(self.steps))
        return Solution(eta, own, moved[-1] <= self.tolerance)


def free_energy(
    problem: Problem,
    psi: Psi,
    own: Any,
    noise: Noise,
    *,
    alpha: float = 0.0,
    stick: bool = False,
    plain: bool = False,
) -> tuple[Array, Array]:
    """An estimate of the local free energy, up to a constant, and of the expected log likelihood.

    ``stick`` makes its gradient stick the landing; ``plain`` makes it the value's derivative.
    """
    family, cavity = problem.family, problem.cavity
    z, log_lik = problem.log_lik(psi, own, noise, plain)
    expected = log_lik.mean()
    if problem.divergence is not None:
        return expected - problem.divergence(family.natural(psi), cavity), expected
    if alpha == 0 and not stick:
        return expected + expfam.inner(cavity, family.moments(psi)) + family.entropy(psi), expected
    eta = family.natural(psi)
    factor = jax.tree.map(jnp.subtract, cavity, stop_gradient(eta) if alpha == 0 else eta)
    log_ratio = log_lik + jax.vmap(lambda z: expfam.inner(factor, family.statistics(z)))(z)
    if alpha == 0:
        return log_ratio.mean() + stop_gradient(family.log_partition(eta)), expected
    log_ratio += family.log_partition(eta)
    return (jax.nn.logsumexp(alpha * log_ratio) - jnp.log(len(log_ratio))) / alpha, expected


def proper_step(family: Family, eta: Eta, target: Eta, rate: Array | float) -> tuple[Eta, Array]:
    """``eta + r (target - eta)`` with the first proper one of ``rate``, ``rate / 2``, ... as ``r``.

    Returns ``r`` as well: 0, and ``eta`` itself, where a thousandth of ``rate`` is still too much.
    """

    def at(r: Array) -> Eta:
        return jax.tree.map(lambda a, b: a + r * (b - a), eta, target)

    def halve(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        return carry[0] / 2, carry[1] + 1

    def too_far(carry: tuple[Array, Array]) -> Array:
        return (carry[1] < 10) & ~family.proper(at(carry[0]))

    rate = jnp.asarray(rate, jnp.result_type(float))
    r, _ = jax.lax.while_loop(too_far, halve, (rate, jnp.zeros((), jnp.int32)))
    fine = family.proper(at(r))
    moved = jax.tree.map(lambda a, b: jnp.where(fine, a, b), at(r), eta)
    return moved, jnp.where(fine, r, 0.0)


def minimise(
    loss: Callable[[Any], Array], start: Any, steps: int, tolerance: float
) -> tuple[Any, Array]:
    """Optax's L-BFGS until no component of the gradient exceeds ``tolerance``."""
    optim = optax.lbfgs()
    value_and_grad = optax.value_and_grad_from_state(loss)

    def step(carry: tuple) -> tuple:
        i, params, opt_state, _ = carry
        value, gradient = value_and_grad(params, state=opt_state)
        updates, opt_state = optim.update(
            gradient, opt_state, params, value=value, grad=gradient, value_fn=loss
        )
        params = optax.apply_updates(params, updates)
        after = jax.tree.leaves(optax.tree_utils.tree_get(opt_state, "grad"))
        size = jnp.stack([jnp.abs(g).max(initial=0.0) for g in after]).max()
        return i + 1, params, opt_state, size

    def go_on(carry: tuple) -> Array:
        return (carry[0] < steps) & (carry[3] > tolerance)

    carry = (jnp.zeros((), jnp.int32), start, optim.init(start), jnp.array(jnp.inf))
    carry = jax.tree.map(lambda a: jnp.asarray(a, jnp.asarray(a).dtype), carry)
    _, params, _, size = jax.lax.while_loop(go_on, step, carry)
    return params, size <= tolerance
