r"""Gradient algorithms under differential privacy: each gradient is clipped by unit, with noise.

SFVI, SFVI-Avg and PVI know a silo's data through gradients of its log likelihood alone. Here that
log likelihood stands as a function whose value is zero, and whose gradient at ``z`` is

.. math::
    L'^{-1} \Big( \sum_i \mathrm{clip}_C(L' \nabla \ell_i(z)) + N(0, s^2) \Big),

with units ``i`` as in ``private_units.py``, in the frame of a posterior :math:`m + L u` that a
private search found first (``private_newton.py``). All else that an algorithm computes from it, at
a silo or at the server, costs no privacy: the algorithms are as they were.

Before the first round silos send a histogram with noise of the lengths of their units' gradients at
``m``, whose quantile is ``C``. A silo counts what it has answered, and answers no more exchanges
than the budget is planned for.

Noise moves the optimum. After ``T`` steps :math:`a_t = c / (t + t_0)` (:func:`steps`) the mean has,
in the frame, in a direction in which the posterior's curvature is ``h``, about the variance

.. math::
    v = w^{2 c h} v_0 + \frac{c^2 s^2}{(2 c h - 1)(T + t_0)} (1 - w^{2 c h - 1}),
    \qquad w = \frac{t_0}{T + t_0},

whose first part is what is left of the start's. Posteriors that are shown have it added to their
spread.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from jax import Array

from numpyro_fed import linalg
from numpyro_fed.algorithms.base import (
    Ask,
    CarriedSilo,
    Exchange,
    FederatedAlgorithm,
    Info,
    Reply,
    Round,
    Shared,
    WarmStart,
)
from numpyro_fed.algorithms.begin import StartPoint, placeholder_start
from numpyro_fed.algorithms.private_newton import Server as SearchEnd
from numpyro_fed.algorithms.private_units import PrivateUnits, best_clip, histogram, is_coarse
from numpyro_fed.algorithms.pvi.families import GAUSSIAN
from numpyro_fed.algorithms.sfvi_avg import COUNT
from numpyro_fed.bounds import Bound
from numpyro_fed.errors import ModelError
from numpyro_fed.frame import Coordinates
from numpyro_fed.gaussian import Gaussian, dot
from numpyro_fed.guides.base import GuideParams
from numpyro_fed.guides.of_family import FamilyGuide
from numpyro_fed.guides.structured import Guide
from numpyro_fed.model.binding import Rows, Theta
from numpyro_fed.model.data import SiloData, Sizes

LENGTHS, CLIP = "private lengths", "private clip"  # the names of the exchanges
# Steps of c / (t + t0), in a frame in which the curvature is about one: c = 2 also settles where it
# is a half. The first steps are shorter where gradients are noisy: t0 is OFFSET + CAUTION s^2, with
# which the variance of the steps themselves is at most a quarter of the posterior's. Spreads move
# more slowly, since their gradients are as noisy, and the search knows them already.
RATE, OFFSET, CAUTION, CAUTION_SPREAD = 2.0, 20, 4.0, 40.0
LEAST_CURVATURE = 0.35  # of a direction, for the variance that is added: 2 c h - 1 is 0.4 there


# Exchanges before the first round that tell nothing of rows but their number.
WITHOUT_GRADIENTS = {COUNT}


class StepState(NamedTuple):
    """The state of the optimiser: steps so far, and the mean square of gradients."""

    number: Array
    square: Array


def steps() -> optax.GradientTransformation:
    """Return the optimiser whose iterates average the noise of all steps."""

    def init(params: Any) -> StepState:
        return StepState(jnp.zeros((), jnp.int32), jnp.zeros(()))

    def update(gradient: Any, state: StepState, params: Any = None) -> tuple[Any, StepState]:
        # Of the noisiest part: guides of rows, whose latents are integrated out, have no gradient.
        squares = [(g**2).mean() for g in jax.tree.leaves(gradient) if g.size]
        now, number = jnp.stack([jnp.zeros(()), *squares]).max(), state.number + 1
        square = state.square + (now - state.square) / number

        def step(path: tuple[Any, ...], g: Array) -> Array:
            caution = CAUTION if getattr(path[-1], "key", "") == "loc" else CAUTION_SPREAD
            return -RATE / (number + OFFSET + caution * square) * g

        return jax.tree_util.tree_map_with_path(step, gradient), StepState(number, square)

    return optax.GradientTransformation(init, update)


class Variance(Protocol):
    """The variance of the noise in a posterior's mean, by the curvature of each direction."""

    def __call__(self, h: Array, start: Array, noise: Array, rounds: Array) -> Array:
        """Return the variances (d,) of directions with curvatures ``h`` (d,), in the frame.

        ``start`` is that of the start, and ``noise`` that in one gradient of one silo.
        """
        ...


def of_steps(h: Array, start: Array, noise: Array, felt: Array, count: Array) -> Array:
    """Return the module docstring's ``v`` (d,) after ``count`` steps.

    ``noise`` is the variance in the mean of all parties' steps, ``felt`` that in the steps of one.
    """
    t0 = OFFSET + CAUTION * felt
    w, power = t0 / (count + t0), 2 * RATE * jnp.maximum(h, LEAST_CURVATURE) - 1
    return start * w ** (power + 1) + RATE**2 * noise / (power * (count + t0)) * (1 - w**power)


@dataclass(frozen=True)
class OfRounds:
    """The variance after rounds of steps that all silos take together, or each by itself.

    Parameters
    ----------
    num_silos : int
    steps : int
        Steps in each round.
    averages : bool
        Whether each silo steps by itself, as if all rows were like its own, before an average.
    """

    num_silos: int
    steps: int
    averages: bool

    def __call__(self, h: Array, start: Array, noise: Array, rounds: Array) -> Array:
        """Return the variances (d,) after so many rounds."""
        total = self.num_silos * noise
        felt = self.num_silos * total if self.averages else total
        return of_steps(h, start, total, felt, self.steps * rounds)


@dataclass(frozen=True)
class OfVisits:
    """The variance after rounds of visits, each of which replaces a silo's factor.

    Parameters
    ----------
    num_silos : int
    steps : int
        Steps in each visit.
    damping : float
    """

    num_silos: int
    steps: int
    damping: float

    def __call__(self, h: Array, start: Array, noise: Array, rounds: Array) -> Array:
        """Return the variances (d,) after so many rounds."""
        t0 = OFFSET + CAUTION * noise
        kept = (t0 / (self.steps + t0)) ** (RATE * jnp.maximum(h, LEAST_CURVATURE))
        own = of_steps(h, jnp.zeros(()), noise, noise, jnp.asarray(self.steps))
        # Of earlier factors, and of the start, this share is left by each round.
        left = (1 - self.damping * (1 - kept)) ** 2
        visits = (1 - left**rounds) / jnp.maximum(1 - left, 1e-6)
        return start * left**rounds + self.num_silos * self.damping**2 * own * visits


class PrivateStart(NamedTuple):
    """The posterior of a private search, at which a run begins.

    Attributes
    ----------
    point : StartPoint
    variance : ()
        The most that noise adds to the posterior's variance in a direction, in the frame.
    undetermined : () int
        Directions in which it rests on the prior.
    """

    point: StartPoint
    variance: Array
    undetermined: Array

    @classmethod
    def of(cls, search: SearchEnd) -> PrivateStart:
        """Return the start at the end of a search, in the frame of its posterior without noise."""
        wider = linalg.solve(search.narrow, search.root)
        variance = jnp.linalg.norm(wider, 2) ** 2 - 1
        point = StartPoint({}, {}, search.loc, search.narrow)
        return cls(point, jnp.maximum(variance, 0.0), search.undetermined)


class Server(NamedTuple):
    """The state of the server: that of the algorithm, and what it knows of the noise.

    Attributes
    ----------
    inner : state
    start : PrivateStart
    clip : ()
    coarse : () bool
        Whether the noise of the histogram hides many units' lengths.
    rounds, planned : () int
        The rounds that were made, and those that the budget is planned for.
    multiplier : ()
        The noise multiplier of a gradient.
    """

    inner: Any
    start: PrivateStart
    clip: Array
    coarse: Array
    rounds: Array
    planned: Array
    multiplier: Array


class Silo(NamedTuple):
    """The state of a silo: that of the algorithm, the frame, and what the silo has answered.

    Attributes
    ----------
    inner : state
    root : (d, d)
        The frame ``L``.
    clip : ()
    begun, visits : () int
        How often it was asked for lengths, and for a round's exchange.
    """

    inner: Any
    root: Array
    clip: Array
    begun: Array
    visits: Array


@dataclass(frozen=True, eq=False)
class PrivateBound:
    """A silo's log likelihood as a bound, whose value is zero and whose gradient has noise.

    Attributes
    ----------
    units : PrivateUnits
    guide : Guide
    multiplier : float
        The noise multiplier of one gradient.
    root : (d, d)
    clip : ()
    """

    units: PrivateUnits
    guide: Guide
    multiplier: float
    root: Array
    clip: Array

    def shapes(self, sizes: Sizes, particles: int) -> dict[str, tuple[int, ...]]:
        """Return no shapes: rows' latents are integrated out."""
        return {}

    def noise(self, key: Array, sizes: Sizes, particles: int) -> Rows:
        """Return no noise: that which protects comes from the operating system."""
        return {}

    def value(
        self,
        theta: Theta,
        eta: GuideParams,
        z_G: Array,
        coordinates: Coordinates,
        noise: Rows,
        data: SiloData,
    ) -> Array:
        """Return zero, with a private gradient with respect to ``z_G``."""
        return _zero(self.units, self.multiplier, z_G, self.root, self.clip, data)

    def sample(
        self,
        key: Array,
        theta: Theta,
        eta: GuideParams,
        z_G: Array,
        coordinates: Coordinates,
        data: SiloData,
    ) -> Rows:
        """Raise an error: latents of rows are integrated out."""
        raise ModelError("rows' latents are integrated out under privacy: there are no draws.")

    def with_plain_gradient(self) -> PrivateBound:
        """Return the bound itself."""
        return self


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _zero(
    units: PrivateUnits, multiplier: float, z: Array, root: Array, clip: Array, data: SiloData
) -> Array:
    return jnp.zeros((), z.dtype)


def _forward(
    units: PrivateUnits, multiplier: float, z: Array, root: Array, clip: Array, data: SiloData
) -> tuple[Array, tuple[Array, Array, Array, SiloData]]:
    return jnp.zeros((), z.dtype), (z, root, clip, data)


def _backward(
    units: PrivateUnits,
    multiplier: float,
    kept: tuple[Array, Array, Array, SiloData],
    cotangent: Array,
) -> tuple[Array, None, None, None]:
    z, root, clip, data = kept
    g = units.sum_of(units.gradients(z, root, data), clip, jnp.asarray(multiplier))
    # Back from the frame: a function of what has noise already.
    return cotangent * linalg.solve(root, g, transposed=True), None, None, None


_zero.defvjp(_forward, _backward)


@dataclass(frozen=True, eq=False)
class PrivateGradients:
    """An algorithm by gradients, under differential privacy.

    Parameters
    ----------
    build : Bound -> FederatedAlgorithm
        The algorithm for a silo's bound, with a start that it can be given (``carry``).
    units : PrivateUnits
    guide : Guide
    lengths, multiplier : float
        Noise multipliers of the histogram, and of each gradient.
    num_units : int
        Rows or silos, about.
    planned : int
        Rounds that the budget is planned for, in each of which a silo answers once.
    particles : int
        Gradients in each step of a silo, whose mean is taken.
    steps : int
        Steps of a silo in each round.
    variance : Variance
        What the noise does to the posterior's mean.
    updates : int
        Updates of the server in each round.
    clip : float, optional
        The clipping length, in the place of a quantile.
    """

    build: Callable[[Bound], FederatedAlgorithm[Any, Any]]
    units: PrivateUnits
    guide: Guide
    lengths: float
    multiplier: float
    num_units: int
    planned: int
    particles: int
    steps: int
    variance: Variance
    updates: int = 1
    clip: float | None = None

    def algorithm(self) -> FederatedAlgorithm[Server, Silo]:
        """Return the algorithm; its rounds are those of the algorithm without noise."""
        inner = self.inner
        watch = inner.watch
        names = {x.name for r in inner.opening for x in r.exchanges}
        if not names <= WITHOUT_GRADIENTS:
            raise ModelError(
                f"the exchanges {sorted(names - WITHOUT_GRADIENTS)} before the first round would "
                "tell of rows without noise. Use a guide without networks."
            )
        lengths, clip = Exchange(LENGTHS, self._lengths_of_silo), Exchange(CLIP, self._take_clip)
        return inner._replace(
            init_server=self._init_server,
            init_silo=self._init_silo,
            round=self._wrapped(inner.round, counts=True),
            shared=self.shared,
            private=lambda state: inner.private(state.inner),
            opening=(
                Round((lengths, clip), self._begin),
                *(self._wrapped(r, counts=False) for r in inner.opening),
            ),
            carry=WarmStart(self.server_from, self.starts.silo),
            watch=None if watch is None else (lambda state: watch(state.inner)),
            done=None,
        )

    def bound(self, root: Array, clip: Array) -> PrivateBound:
        """Return a silo's bound in a frame."""
        return PrivateBound(self.units, self.guide, self.multiplier, root, clip)

    @cached_property
    def inner(self) -> FederatedAlgorithm[Any, Any]:
        """Return the algorithm, in a frame that is not known yet."""
        return self.build(self.bound(jnp.eye(self.units.model.dim), jnp.ones(())))

    @cached_property
    def starts(self) -> WarmStart:
        """Return the functions by which the algorithm begins at a posterior."""
        if (carry := self.inner.carry) is None:
            raise ModelError("an algorithm under privacy begins at the posterior of a search.")
        return carry

    # The server.

    def _init_server(self, key: Array) -> Server:
        point = placeholder_start(self.units.model, {}, wide=False)
        none = jnp.zeros((), jnp.int32)
        return self.server_from(key, PrivateStart(point, jnp.zeros(()), none))

    def server_from(self, key: Array, start: PrivateStart) -> Server:
        """Return the server's state at the start of a run, before silos were asked."""
        none = jnp.zeros((), jnp.int32)
        inner = self.starts.server(key, start.point)
        planned = jnp.array(self.planned, jnp.int32)
        multiplier = jnp.asarray(self.multiplier, jnp.result_type(float))
        return Server(inner, start, jnp.ones(()), jnp.array(True), none, planned, multiplier)

    def _begin(self, state: Server, noise: object, ask: Ask) -> tuple[Server, Info]:
        """Ask for the lengths of gradients at the start, and tell where they are clipped."""
        d, units = self.units.model.dim, self.units
        counts = ask(LENGTHS, state.start.point).up
        sd = jnp.asarray(self.lengths * units.spread)
        # The noise of the mean of all steps.
        steps = self.particles * self.steps * self.planned
        noise = jnp.asarray(self.multiplier * units.spread / math.sqrt(steps))
        found = best_clip(counts, sd, noise, d)
        # If no count stands out there are too few units: one whitened unit is so long.
        guess = jnp.sqrt(1.0 * d / self.num_units)
        clip = jnp.where(found > 0, found, guess) if self.clip is None else jnp.array(self.clip)
        ask(CLIP, clip)
        coarse = is_coarse(sd, self.num_units) & (self.clip is None)
        return state._replace(clip=clip, coarse=coarse), Info(jnp.zeros(()), jnp.isfinite(clip))

    def shared(self, state: Server) -> Shared:
        """Return the posterior, with the variance of the noise added to its spread."""
        shared = self.inner.shared(state.inner)
        one = self.units.changes * self.units.noise_share * self.multiplier * state.clip
        noise, root = one**2 / self.particles, state.start.point.root

        def wider(root: Array) -> Array:
            # Eigenvalues of the covariance in the frame are inverse curvatures.
            e, V = linalg.eigh(dot(root, root.T))
            rounds = state.rounds / self.updates
            added = V * jnp.sqrt(self.variance(1 / e, state.start.variance, noise, rounds))
            return linalg.root_of(jnp.concatenate([root, added], axis=1))

        return shared._replace(guide=_with_root(self.guide, shared.guide, root, wider))

    # A silo.

    def _init_silo(self, key: Array, data: SiloData) -> Silo:
        point = placeholder_start(self.units.model, {}, wide=False)
        none = jnp.zeros((), jnp.int32)
        return Silo(self._begun(key, point, data), point.root, jnp.ones(()), none, none)

    def _begun(self, key: Array, point: StartPoint, data: SiloData) -> Any:
        """Return the algorithm's state of a silo at a start."""
        private, eta = self.units.model.init_private(key, data), self.guide.init_local(key, data)
        carried = CarriedSilo(private, eta, jnp.zeros_like(point.centre))
        return self.starts.silo(key, carried, point, data)

    def _lengths_of_silo(
        self, noise: object, down: StartPoint, state: Silo, data: SiloData
    ) -> tuple[Reply[Array], Silo]:
        """Begin at the posterior, and count units by the power of two of gradients' lengths."""
        lengths = jnp.linalg.norm(self.units.gradients(down.centre, down.root, data), axis=1)
        counts = self.units.added(histogram(lengths), jnp.ones(()), jnp.asarray(self.lengths))
        planned = state.begun < 1
        inner = self._begun(jax.random.key(0), down, data)
        after = state._replace(inner=inner, root=down.root, begun=state.begun + 1)
        return Reply(jnp.where(planned, counts, 0.0), planned), after

    def _take_clip(
        self, noise: object, down: Array, state: Silo, data: SiloData
    ) -> tuple[Reply[tuple[()]], Silo]:
        return Reply((), jnp.isfinite(down)), state._replace(clip=down)

    # The rounds of the algorithm.

    def _wrapped(self, round_: Round, *, counts: bool) -> Round:
        """Return a round of the algorithm for these states; ``counts`` if it is one of the plan."""

        def run(state: Server, noise: Any, ask: Ask) -> tuple[Server, Info]:
            inner, info = round_.run(state.inner, noise, ask)
            rounds = state.rounds + 1 if counts else state.rounds
            return state._replace(inner=inner, rounds=rounds), info

        exchanges = tuple(self._wrapped_exchange(x, counts) for x in round_.exchanges)
        return Round(exchanges, run, round_.noise)

    def _wrapped_exchange(
        self, exchange: Exchange[Any, Any, Any], counts: bool
    ) -> Exchange[Silo, Any, Any]:
        def silo(noise: Any, down: Any, state: Silo, data: SiloData) -> tuple[Reply[Any], Silo]:
            # The algorithm for the bound in this silo's frame: the same functions, other numbers.
            algorithm = self.build(self.bound(state.root, state.clip))
            rounds = (*algorithm.opening, algorithm.round)
            own = next(x for r in rounds for x in r.exchanges if x.name == exchange.name)
            reply, draft = own.silo(noise, down, state.inner, data)
            visits = state.visits + 1 if counts else state.visits
            planned = visits <= self.planned
            # Beyond the plan zeros leave the silo, which cannot be used.
            up = jax.tree.map(lambda a: jnp.where(planned, a, jnp.zeros_like(a)), reply.up)
            after = state._replace(inner=draft, visits=visits)
            return reply._replace(up=up, ok=reply.ok & planned), after

        def commit(draft: Silo, sent: Any) -> Silo:
            return draft._replace(inner=exchange.commit(draft.inner, sent))

        def silo_noise(key: Array, state: Silo) -> Any:
            return exchange.silo_noise(key, state.inner)

        return exchange._replace(silo=silo, commit=commit, silo_noise=silo_noise)


def _with_root(
    guide: Guide, params: GuideParams, frame: Array, change: Callable[[Array], Array]
) -> GuideParams:
    """Return the globals' guide with another root of its covariance, changed in a ``frame``."""
    if not isinstance(guide.globals, FamilyGuide):
        q = Gaussian.from_params(params)
        return Gaussian.of_root(q.loc, change(q.root)).params()
    # The factors' family, in natural parameters of z itself.
    family = guide.globals.family
    q = Gaussian.from_params(family.ordinary(params)[GAUSSIAN])
    inside = change(linalg.solve(frame, q.root))
    wider = Gaussian.of_root(q.loc, linalg.root_of(dot(frame, inside)))
    return family.natural({GAUSSIAN: wider.params()})
