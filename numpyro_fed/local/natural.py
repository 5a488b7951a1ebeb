"""Local optimisers in natural parameters: fixed points, moments, and the closed form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax import Array

from numpyro_fed import expfam
from numpyro_fed.errors import positive_int
from numpyro_fed.expfam.base import Natural, Ordinary, move_along
from numpyro_fed.local.at_rest import AtRest, Tally, maximised
from numpyro_fed.local.base import AT_REST, Own, Problem, Solution, free_energy, proper_step
from numpyro_fed.local.lbfgs import standardised
from numpyro_fed.trees import all_finite, drop_weak_types

STAYS = 1e-4  # nats that a step moves, where a fixed point has been reached
Damped = tuple[Array, Natural, Own, optax.OptState, Array, Tally]
Fixed = tuple[Array, Natural, Array, Array, Array]
MISFIT = 0.1  # nats by which a conjugate likelihood may seem not to be one


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
        The visit counts as converged if a full step from where it ends, averaged over fresh noise,
        would move no mean by more standard deviations, and no log standard deviation by more.
        A single step is not looked at.

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
    tolerance: float = AT_REST
    any_divergence = False

    @property
    def closed_form(self) -> bool:
        """Return whether the expectations are to be in closed form."""
        return self.expectation == "closed_form"

    @property
    def standardises(self) -> bool:
        """Return False for the closed form, which is that of ``z``."""
        return not self.closed_form

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
        if self.expectation not in ("monte_carlo", "closed_form"):
            raise ValueError(
                f"expectation={self.expectation!r}: expected 'monte_carlo' or 'closed_form'."
            )

    def solve(self, problem: Problem[Own], key: Array) -> Solution[Own]:
        """Run the steps; see the class."""
        family = problem.family

        def aim(eta: Natural, own: Own, key: Array) -> tuple[Natural, Own]:
            if self.expectation == "closed_form":
                factor, g_own = problem.likelihood()[0], jax.tree.map(jnp.zeros_like, own)
            else:
                noise = problem.noise(key, self.num_particles, self.batch_size)

                def expected(psi: Ordinary, own: Own) -> Array:
                    return problem.log_lik(psi, own, noise, False)[1].mean()

                g_psi, g_own = jax.grad(expected, (0, 1))(family.ordinary(eta), own)
                factor = family.dual_gradient(partial(expfam.inner, g_psi), eta)
            return jax.tree.map(jnp.add, problem.cavity, factor), g_own

        found = _damped(problem, aim, key, self)
        if self.expectation == "closed_form":
            return found._replace(suited=_suited(problem, found.eta))
        return found


@dataclass(frozen=True, kw_only=True)
class FixedPoint:
    """Natural-gradient fixed points on a fixed, standardised noise, until they stay where they are.

    Deterministic, and exact for what is quadratic; for the server's factor, whose problem has no
    rows and nothing of its own. A step that makes the free energy smaller is halved, and so is one
    after steps that do not become shorter, which go to and fro.
    """

    steps: int = 50
    num_particles: int = 64
    batch_size: None = None
    share = 1.0
    closed_form = False
    any_divergence = False
    standardises = True

    def solve(self, problem: Problem[Own], key: Array) -> Solution[Own]:
        """Run the steps; see the class."""
        family = problem.family
        key_fit, key_judge = jax.random.split(key)
        noise = standardised(problem.noise(key_fit, self.num_particles, None))

        def value(eta: Natural) -> Array:
            return free_energy(problem, family.ordinary(eta), problem.own, noise, plain=True)[0]

        def target(eta: Natural) -> Natural:
            def expected(psi: Ordinary) -> Array:
                return problem.log_lik(psi, problem.own, noise, True)[1].mean()

            return jax.tree.map(jnp.add, problem.cavity, family.dual_gradient(expected, eta))

        def move(carry: Fixed) -> Fixed:
            i, eta, before, last, rate = carry
            enough = before - jnp.finfo(before.dtype).eps * jnp.abs(before)

            def better(eta: Natural) -> Array:
                return family.proper(eta) & (value(eta) >= enough)

            after, used = proper_step(better, eta, target(eta), rate)
            moved = jnp.where(used > 0, expfam.kl(family, after, eta), 0.0)
            return i + 1, after, value(after), moved, jnp.where(moved > 0.5 * last, 0.5, 1.0)

        def go_on(carry: Fixed) -> Array:
            return (carry[0] < self.steps) & (carry[3] > STAYS)

        start = family.natural(problem.start)
        first = value(start)
        first = jnp.where(jnp.isfinite(first), first, -jnp.finfo(first.dtype).max)
        far = jnp.asarray(jnp.inf, first.dtype)
        none = jnp.zeros((), jnp.int32)
        carry = jax.lax.while_loop(go_on, move, (none, start, first, far, jnp.ones_like(far)))
        psi = family.ordinary(carry[1])
        converged = maximised(problem, psi, problem.own, key_judge, AT_REST)
        return Solution(carry[1], problem.own, converged, jnp.isfinite(carry[2]))


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
    share = 1.0
    closed_form = True
    any_divergence = False
    standardises = False

    def solve(self, problem: Problem[Own], key: Array) -> Solution[Own]:
        """Add the likelihood's natural parameters to the cavity's."""
        eta = jax.tree.map(jnp.add, problem.cavity, problem.likelihood()[0])
        suited = _suited(problem, eta)
        return Solution(eta, problem.own, jnp.array(True), all_finite(eta), suited)

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
    tolerance: float = AT_REST
    batch_size: None = None
    closed_form = False
    any_divergence = False
    standardises = True

    @property
    def share(self) -> float:
        """Return 1, or the rate of a single step."""
        return self.rate if self.steps == 1 else 1.0

    def __post_init__(self) -> None:
        positive_int("steps", self.steps)
        positive_int("num_particles", self.num_particles)
        for name in ("alpha", "rate"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in (0, 1], got {getattr(self, name)}.")

    def solve(self, problem: Problem[Own], key: Array) -> Solution[Own]:
        """Run the steps; see the class."""
        family = problem.family

        def aim(eta: Natural, own: Own, key: Array) -> tuple[Natural, Own]:
            psi = family.ordinary(eta)
            noise = problem.noise(key, self.num_particles, None)
            factor = jax.tree.map(jnp.subtract, eta, problem.cavity)

            def expected(own: Own) -> tuple[Array, tuple[Array, Array]]:
                z, log_lik = problem.log_lik(psi, own, noise, False)
                return log_lik.mean(), (z, log_lik)

            (_, (z, log_lik)), g_own = jax.value_and_grad(expected, has_aux=True)(own)
            T = jax.vmap(family.statistics)(z)
            log_weights = self.alpha * (log_lik - jax.vmap(lambda t: expfam.inner(factor, t))(T))
            w = jax.nn.softmax(log_weights)
            matched = family.from_mean(jax.tree.map(lambda t: jnp.tensordot(w, t, 1), T))
            return jax.tree.map(lambda a, b: a + (b - a) / self.alpha, eta, matched), g_own

        return _damped(problem, aim, key, self)


def _suited(problem: Problem[Own], eta: Natural) -> Array:
    """Return whether the likelihood is conjugate around ``eta``, and from the start to there."""
    misfit = problem.likelihood()[1]
    return misfit(problem.family.ordinary(eta)) <= MISFIT


def _damped(
    problem: Problem[Own],
    aim: Callable[[Natural, Own, Array], tuple[Natural, Own]],
    key: Array,
    how: NaturalGradient | PowerEP,
) -> Solution[Own]:
    """Take damped steps of ``q`` to where ``aim`` says, and of the silo's part up its gradient."""
    family, optim = problem.family, how.optim or optax.adam(0.02)
    rest, judged = AtRest(family, how.tolerance), how.steps > 1

    def step(carry: Damped[Own]) -> Damped[Own]:
        i, eta, own, *_ = carry
        target, g_own = aim(eta, own, jax.random.fold_in(key, i))

        def walk(carry: Damped[Own]) -> Damped[Own]:
            i, eta, own, opt_state, _, tally = carry
            moved, _ = proper_step(family.proper, eta, target, how.rate)
            updates, opt_state = optim.update(jax.tree.map(jnp.negative, g_own), opt_state, own)
            own = optax.apply_updates(own, updates)
            return i + 1, moved, own, opt_state, all_finite(target), tally

        def judge(carry: Damped[Own]) -> Damped[Own]:
            i, eta, own, opt_state, fine, tally = carry
            full = jax.tree.map(jnp.subtract, target, eta)
            tally = rest.add(tally, move_along(family, eta, full))
            return i + 1, eta, own, opt_state, fine, tally

        if not judged:
            return walk(carry)
        return jax.lax.cond(i < how.steps, walk, judge, carry)

    def go_on(carry: Damped[Own]) -> Array:
        walking = carry[0] < how.steps
        return walking | rest.wants_more(carry[5]) if judged else walking

    start, none = family.natural(problem.start), jnp.zeros((), jnp.int32)
    carry = (none, start, problem.own, optim.init(problem.own), jnp.array(True), rest.begin())
    _, eta, own, _, finite, tally = jax.lax.while_loop(go_on, step, drop_weak_types(carry))
    rests = rest.holds(tally) if judged else jnp.array(True)
    return Solution(eta, own, rests, finite)
