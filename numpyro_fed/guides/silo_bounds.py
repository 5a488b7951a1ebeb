"""A silo's term of an objective at a draw of the globals: by draws of the locals, or quadrature."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.lax import stop_gradient

from numpyro_fed.data.silo_data import SiloData, Sizes
from numpyro_fed.guides.guide import Guide
from numpyro_fed.guides.laplace import SearchEnd
from numpyro_fed.guides.objectives import Objective, Quadrature, draws_by_plate
from numpyro_fed.guides.quadrature import NEARBY, RowIntegrals
from numpyro_fed.numerics.gaussian import Coordinates
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.site_table import Rows, Theta


def normals(key: Array, number: int, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Array, Rows]:
    """Return standard normals: ``number`` of them, and an array for each plate, rows first.

    Each draw is a program to compile, so the first plate shares one with the ``number``. Its padded
    rows come last in it, and change no other number. Other plates have draws of their own.
    """
    keys = jax.random.split(key, len(shapes)) if len(shapes) > 1 else [key]
    sizes = [math.prod(shape) for shape in shapes.values()]
    first_draw = jax.random.normal(keys[0], (number + sum(sizes[:1]),))
    rows = {}
    for i, (plate, shape) in enumerate(shapes.items()):
        own = jax.random.normal(keys[i], shape) if i else first_draw[number:]
        rows[plate] = own.reshape(shape)
    return first_draw[:number], rows


class AtDraw(NamedTuple):
    """A draw of the globals and all else that a silo's term is evaluated at.

    ``theta`` has shared and private parameters, ``eta`` those of the silo's guides. ``coordinates``
    are ``z_G`` (dim,) in its frame. ``z_outer`` {plate: (rows, dim)} are latents of outer plates,
    where they are known.
    """

    theta: Theta
    eta: dict[str, Any]
    z_G: Array
    coordinates: Coordinates
    data: SiloData
    z_outer: Mapping[str, Array] = {}


# The axes of many draws of the globals in one ``AtDraw``.
_COORDINATES: Any = (0, None)
_EACH: Any = (None, None, 0, Coordinates(*_COORDINATES), None, None)
EACH_DRAW = AtDraw(*_EACH)


@dataclass(frozen=True, eq=False)
class QuadratureBound:
    """A silo's log likelihood by quadrature; the guide's means are where it looks for modes.

    Its methods are those of :class:`SiloBound`. No parameter of the guide's local parts changes the
    value. ``nodes`` are those in each dimension.
    """

    model: FederatedModel
    guide: Guide
    nodes: int

    def shapes(self, sizes: Sizes, particles: int) -> dict[str, tuple[int, ...]]:
        return {}

    def noise(self, key: Array, sizes: Sizes, particles: int) -> Rows:
        return {}

    def value(self, at: AtDraw, noise: Rows) -> Array:
        return self.integrals.at(at.theta, at.z_G, self.near(at), at.data)

    @property
    def integrals(self) -> RowIntegrals:
        """Return the integrals over rows' latents, whose modes are near the guide's means."""
        return RowIntegrals(self.model, self.nodes, NEARBY)

    def near(self, at: AtDraw) -> SearchEnd:
        """Return where nodes stand: close to the conditional modes, held constant."""
        return self.integrals.near(at.theta, at.z_G, at.data, self.start(at))

    def start(self, at: AtDraw) -> Rows:
        """Return where the search for the modes begins, {plate: (rows, dim)}, held constant."""
        theta, eta, z_G, coordinates = stop_gradient(at[:4])
        guides = self.guide.at_globals(eta, theta, z_G, coordinates.offset, at.data)
        return {p: guides[p]["loc"] for p in self.guide.locals}

    def sample(self, key: Array, at: AtDraw) -> Rows:
        return self.integrals.sample(key, at.theta, at.z_G, self.near(at), at.data)

    def log_estimate(self, key: Array, at: AtDraw) -> Array:
        return self.value(at, {})

    def log_rows(self, key: Array, at: AtDraw) -> Rows:
        """Return each row's log likelihood, at a draw of the outer plate's latents."""
        return self.integrals.log_rows(key, at.theta, at.z_G, self.near(at), at.data)


@dataclass(frozen=True, eq=False)
class SiloBound:
    """A silo's term of the bound, for a model, a guide and numbers of draws.

    ``draws`` is ``K`` of each silo plate that has latents, by :func:`draws_by_plate`. With
    ``plain`` the gradient is the derivative of the value, as line searches need it, and not the
    objective's estimator of lower variance.
    """

    model: FederatedModel
    guide: Guide
    draws: Mapping[str, int]
    plain: bool = False

    def shapes(self, sizes: Sizes, particles: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the noise: {plate: (rows, particles, K_outer, K, dim)}."""
        dims, rows = {p.name: p.dim for p in self.model.plates}, self.guide.row_plates
        return {
            p: (sizes[p], particles, self._k_outer, self.draws[p] if p in rows else 1, dims[p])
            for p in self.guide.locals
        }

    def noise(self, key: Array, sizes: Sizes, particles: int) -> Rows:
        """Return the noise of one evaluation, by plate; it does not depend on padded rows."""
        return normals(key, 0, self.shapes(sizes, particles))[1]

    def value(self, at: AtDraw, noise: Rows) -> Array:
        """Return the bound (), from the noise of one particle {plate: (rows, K_outer, K, dim)}."""
        guide, k_outer = self.guide, self._k_outer
        eps = {p: noise[p] for p in guide.row_plates}
        # A single draw above the rows needs no weights: the common case, and a smaller program.
        if k_outer == 1:
            z_outer = {p: self._draw(p, at, noise[p][:, 0, 0]) for p in guide.outer_plates}
            return self._silo_term(at, z_outer, {p: e[:, 0] for p, e in eps.items()})
        outer = {p: noise[p][:, :, 0] for p in guide.outer_plates}
        if self.plain:
            log_weights = self._each_outer(at, self._draws(guide.outer_plates, at, outer), eps)
            return jax.nn.logsumexp(log_weights) - math.log(k_outer)
        moved_by_globals, moved_by_guide = self._two_paths(guide.outer_plates, at, outer)

        def weights(own: Rows, rest: tuple[Rows, AtDraw, Rows]) -> Rows:
            others, at, eps = rest
            return {_OUTER: self._each_outer(at, jax.tree.map(jnp.add, others, own), eps)}

        rest = moved_by_globals, at, eps
        return _doubly_reparametrised(weights, ((_OUTER, k_outer),), moved_by_guide, rest)[_OUTER]

    def sample(self, key: Array, at: AtDraw) -> Rows:
        """Return a draw of the locals, {plate: (rows, dim)}, resampled by weight if ``K > 1``."""
        guide = self.guide
        if not guide.locals:
            return {}
        key_noise, key_rows, key_outer = jax.random.split(key, 3)
        sizes = {p: len(at.eta[p]["loc"]) for p in guide.locals}
        eps = {p: e[:, 0] for p, e in self.noise(key_noise, sizes, 1).items()}

        # The log weight of one outer draw, and its rows, resampled by theirs.
        def one_outer_draw(eps: Rows) -> tuple[Array, Rows]:
            z_outer = {p: self._draw(p, at, eps[p][:, 0]) for p in guide.outer_plates}
            at_outer = at._replace(z_outer=z_outer)
            z = self._draws(guide.row_plates, at_outer, self._tiled(eps))
            weights = jax.vmap(partial(self._log_ratio, at=at_outer), axis_size=self._k_rows)(z)
            q = _total({p: self._log_q(p, at, z_outer[p]) for p in guide.outer_plates})
            chosen = dict(z_outer)
            for i, p in enumerate(guide.row_plates):
                # Rows first: padded rows, which come last, then change no other number.
                log_weights = weights[p][: self.draws[p]].T
                k = jax.random.categorical(jax.random.fold_in(key_rows, i), log_weights, axis=1)
                chosen[p] = z[p][k, jnp.arange(z[p].shape[1])]
            return _total(_log_mean_exp(weights, self._counts)) - q, chosen

        totals, z = jax.vmap(one_outer_draw, 1)(eps)
        k = jax.random.categorical(key_outer, totals)
        return jax.tree.map(lambda a: a[k], z)

    @property
    def _k_outer(self) -> int:
        return max((self.draws[p] for p in self.guide.outer_plates), default=1)

    @property
    def _k_rows(self) -> int:
        return max((self.draws[p] for p in self.guide.row_plates), default=1)

    @property
    def _counts(self) -> tuple[tuple[str, int], ...]:
        """Return ``K`` of each plate, and 1 for outer plates."""
        rows = self.guide.row_plates
        return tuple(
            (p.name, self.draws[p.name] if p.name in rows else 1) for p in self.model.plates
        )

    def _stopped(self, at: AtDraw) -> AtDraw:
        """Return the same arguments with the guide's parameters stopped; draws are not stopped."""
        # Parameters of amortised guides are among theta, with those of the model, which stay live.
        networks = {encoder.name for encoder in self.guide.encoders.values()}
        theta = {k: stop_gradient(v) if k in networks else v for k, v in at.theta.items()}
        coordinates = at.coordinates._replace(centre=stop_gradient(at.coordinates.centre))
        return at._replace(theta=theta, eta=stop_gradient(at.eta), coordinates=coordinates)

    def _params_and_above(self, plate: str, at: AtDraw) -> tuple[Any, Array]:
        """Return the parameters of a plate's guide, and the values its rows are coupled to."""
        eta = self.guide.row_params(plate, at.theta, at.eta[plate], at.z_G, at.data)
        offset = at.coordinates.offset
        return eta, self.guide.offset_of_plate(plate, at.eta, offset, at.z_outer, at.data)

    def _draw(self, plate: str, at: AtDraw, eps: Array) -> Array:
        return self.guide.locals[plate].draw(*self._params_and_above(plate, at), eps)

    def _draws(self, plates: tuple[str, ...], at: AtDraw, eps: Rows) -> Rows:
        """Return all draws of ``plates``, {plate: (K, rows, dim)}."""
        return {p: jax.vmap(partial(self._draw, p, at), 1)(eps[p]) for p in plates}

    def _two_paths(self, plates: tuple[str, ...], at: AtDraw, eps: Rows) -> tuple[Rows, Rows]:
        """Return draws as two summands: one depends on ``z_G``, one on the guide's parameters.

        The second has the value zero and the derivatives of the draw. So the two paths may have
        different gradients.
        """
        coordinates = at.coordinates._replace(u=stop_gradient(at.coordinates.u))
        z_G, z_outer = stop_gradient((at.z_G, at.z_outer))
        stopped = at._replace(z_G=z_G, coordinates=coordinates, z_outer=z_outer)
        moved_by_guide = jax.tree.map(
            lambda z: z - stop_gradient(z), self._draws(plates, stopped, eps)
        )
        return self._draws(plates, self._stopped(at), eps), moved_by_guide

    def _log_q(self, plate: str, at: AtDraw, z: Array) -> Array:
        eta, above = self._params_and_above(plate, at)
        return at.data.masked(plate, self.guide.locals[plate].log_q(eta, above, z))

    def _log_ratio(self, z: Rows, at: AtDraw) -> Rows:
        """Return log p less log q of each row's own latents, {plate: (rows,)}."""
        rows = self.model.log_grouped(at.theta, at.z_G, {**at.z_outer, **z}, at.data)
        return {p: v - self._log_q(p, at, z[p]) if p in z else v for p, v in rows.items()}

    def _tiled(self, eps: Rows) -> Rows:
        """Return rows' noise with equally many draws for all plates, repeated where needed."""
        plates = self.guide.row_plates
        return {p: eps[p][:, jnp.arange(self._k_rows) % self.draws[p]] for p in plates}

    def _silo_term(self, at: AtDraw, z_outer: Rows, eps: Rows) -> Array:
        """Return the silo's whole term () at one draw of the outer latents."""
        below, rows = at._replace(z_outer=z_outer), self.guide.row_plates
        # Whether the gradients of rows' terms are doubly reparametrised. With several draws at an
        # outer plate its weights multiply all terms below, and the identity holds for the outermost
        # gradient only. It does not hold for rows that share a covariance either: a row's noise
        # then moves other rows, which have other weights.
        joint = any(self.guide.locals[p].joint for p in rows)
        sticks = self._k_outer == 1 and not self.plain and not (self._k_rows > 1 and joint)
        if self._k_rows == 1:
            z = {p: self._draw(p, below, eps[p][:, 0]) for p in rows}
            terms = self._log_ratio(z, self._stopped(below) if sticks else below)
        elif not sticks:
            z = self._draws(rows, below, self._tiled(eps))
            weights = jax.vmap(partial(self._log_ratio, at=below))(z)
            terms = _log_mean_exp(weights, self._counts)
        else:
            moved_by_globals, moved_by_guide = self._two_paths(rows, below, self._tiled(eps))
            terms = _doubly_reparametrised(
                lambda own, rest: jax.vmap(partial(self._log_ratio, at=rest[1]))(
                    jax.tree.map(jnp.add, rest[0], own)
                ),
                self._counts,
                moved_by_guide,
                (moved_by_globals, self._stopped(below)),
            )
        stopped = at if self.plain else self._stopped(at)
        outer = {p: self._log_q(p, stopped, z_outer[p]) for p in self.guide.outer_plates}
        return at.data.total(terms) - _total(outer)

    def _each_outer(self, at: AtDraw, z_outer: Rows, eps: Rows) -> Array:
        """Return the silo's whole term at all draws of the outer latents (K_outer,)."""
        return jax.vmap(lambda z, e: self._silo_term(at, z, e), (0, 1))(z_outer, eps)


Bound = QuadratureBound | SiloBound


def bound_of(fm: FederatedModel, guide: Guide, objective: Objective) -> Bound:
    """Return a silo's term of an objective."""
    if isinstance(objective, Quadrature):
        return QuadratureBound(fm, guide, objective.nodes)
    return SiloBound(fm, guide, draws_by_plate(objective, guide))


_OUTER = "outer plates"
Rest = TypeVar("Rest")
_Saved = tuple[Rows, Callable[[Rows], tuple[Rows, Rest]]]


def _total(rows: Rows) -> Array:
    return sum((v.sum() for v in rows.values()), jnp.zeros(()))


def _log_mean_exp(log_weights: Rows, counts: tuple[tuple[str, int], ...]) -> Rows:
    """Return the log-mean-exp over the first ``K`` draws, leading axis, for each plate."""
    return {
        p: jax.nn.logsumexp(log_weights[p][:k], axis=0) - math.log(k)
        for p, k in counts
        if p in log_weights
    }


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _doubly_reparametrised(
    f: Callable[[Rows, Rest], Rows], counts: tuple[tuple[str, int], ...], own: Rows, rest: Rest
) -> Rows:
    """Return the log-mean-exp of ``f(own, rest)`` with the doubly reparametrised gradient."""
    # With normalised weights w_k the gradient in ``rest`` is the ordinary one, the sum of w_k times
    # that of f_k, and in own[k] it is w_k^2 times that of f_k (Tucker et al. 2019, equation 8).
    return _log_mean_exp(f(own, rest), counts)


def _forward(
    f: Callable[[Rows, Rest], Rows], counts: tuple[tuple[str, int], ...], own: Rows, rest: Rest
) -> tuple[Rows, _Saved[Rest]]:
    # The backward pass needs the weights, which are values, besides the derivative of ``f``.
    log_weights, pull = jax.vjp(f, own, rest)
    return _log_mean_exp(log_weights, counts), (log_weights, pull)


def _backward(
    f: object, counts: tuple[tuple[str, int], ...], saved: _Saved[Rest], cotangent: Rows
) -> tuple[Rows, Rest]:
    log_weights, pull = saved
    weights = {}
    for p, k in counts:
        if p in log_weights:
            w = jax.nn.softmax(log_weights[p][:k], axis=0)
            padding = jnp.zeros((len(log_weights[p]) - k, *w.shape[1:]))
            weights[p] = jnp.concatenate([w, padding])
    # One pull gives w_k times the gradient for both; ``own`` gets the second factor w_k after it.
    own, rest = pull({p: w * cotangent[p] for p, w in weights.items()})
    for plate, g in own.items():
        w = weights[plate if plate in weights else _OUTER]
        own[plate] = w.reshape(w.shape + (1,) * (g.ndim - w.ndim)) * g
    return own, rest


_doubly_reparametrised.defvjp(_forward, _backward)
