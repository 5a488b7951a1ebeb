"""The objectives that users choose, and a silo's term of them: by draws, or by quadrature."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.lax import stop_gradient

from numpyro_fed.basics.errors import ModelWarning, positive_int
from numpyro_fed.data.silo_data import SiloData, Sizes
from numpyro_fed.guides.laplace import SearchEnd
from numpyro_fed.guides.quadrature import (
    NEARBY,
    NODES,
    RowIntegrals,
    default_nodes,
    quadrature_misfit,
)
from numpyro_fed.guides.structured import Guide, Spec, Structured, structured
from numpyro_fed.numerics.gaussian import Coordinates
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.sites import Rows, Theta


@dataclass(frozen=True)
class ELBO:
    r"""The evidence lower bound.

    .. math::
        \mathcal{L} = \mathbb{E}_q\Big[\log p(z_G) - \log q(z_G)
        + \sum_j \big(\log p(z_{L_j}, y_j \mid z_G) - \log q(z_{L_j} \mid z_G)\big)\Big]

    Its gradient sticks the landing: the parameters inside ``log q`` are stopped. The gradient stays
    unbiased, and has no variance where the guide is exact (Roeder, Wu and Duvenaud 2017). NumPyro's
    autoguides, as guides of the globals, are differentiated in full.

    Examples
    --------
    >>> import numpyro_fed as nf
    >>> nf.ELBO()
    ELBO()
    """


@dataclass(frozen=True)
class LocallyEnhanced:
    r"""A locally enhanced bound: importance-weighted for each row's own latents.

    .. math::
        \mathcal{L} = \mathbb{E}\Big[\log\frac{p(z_G)}{q(z_G)} + \sum_j \sum_{i \in j}
        \log \frac1K \sum_{k=1}^{K}
        \frac{p(z_i^k, y_i \mid z_G)}{q(z_i^k \mid z_G)}\Big]

    It sums over silos as the ELBO does, and tends to the bound with the rows' latents integrated
    out as K grows (Geffner and Domke 2022, arXiv 2203.04432, section 3).

    Parameters
    ----------
    draws : int or dict of str to int
        ``K``. An int is for the plates of rows; an outer plate, on which rows of another plate
        depend, then has one draw. A dict gives ``K`` by silo plate, and 1 for plates that it does
        not name. With ``K > 1`` at an outer plate the weight is that of all the silo's data, since
        its rows depend on each other through these latents, and all outer plates use the largest
        ``K`` among them.

    Notes
    -----
    Gradients are doubly reparametrised (Tucker et al. 2019): only to stop ``log q`` inside the
    log-mean-exp would bias them. The identity is applied to the parameters of the local guide. The
    path through ``z_G`` is differentiated as it is, so that a row whose guide is exact adds no
    noise to the globals. With ``K > 1`` at an outer plate the identity is applied at that plate,
    and rows below are differentiated in full; so are rows under ``locals="joint"``.

    Examples
    --------
    >>> import numpyro_fed as nf
    >>> nf.LocallyEnhanced(draws=20)
    LocallyEnhanced(draws=20)
    >>> nf.LocallyEnhanced(draws={"hospital": 20}).draws["hospital"]
    20
    """

    draws: int | Mapping[str, int] = 20


@dataclass(frozen=True)
class Quadrature:
    r"""The log likelihood of silos with rows' latents integrated by Gauss-Hermite quadrature.

    .. math::
        \mathcal{L} = \mathbb{E}_{q(z_G)}\Big[\log\frac{p(z_G)}{q(z_G)} + \sum_j \sum_{i \in j}
        \log \int p(z_i, y_i \mid z_G)\, dz_i\Big]

    The integral of a row has its nodes at the conditional mode of the row's latents, in units of
    their curvature (Pinheiro and Bates 1995). It is for rows with one or two latents, and for an
    outer plate with one or two. It has no noise, and no guide of the locals has a part in it.

    Parameters
    ----------
    nodes : int
        Nodes in each dimension. Of a binary outcome with four visits and an effect of sd 2.2,
        eleven have an error of 2e-4 nats for each row.

    Examples
    --------
    >>> import numpyro_fed as nf
    >>> nf.Quadrature()
    Quadrature(nodes=11)
    """

    nodes: int = 11

    def __post_init__(self) -> None:
        positive_int("nodes", self.nodes)


# Nodes by which a correction integrates rows with one latent. The errors of rows add up in a
# weight: over the 300 children of a silo of the six cities they change by 0.023 nats from draw to
# draw with eleven nodes, by 0.004 with fifteen, and by 0.0003 with twenty-three.
NODES_OF_WEIGHTS = 17


def default_quadrature(fm: FederatedModel) -> Quadrature | None:
    """Return the quadrature by which a correction integrates rows' latents; None for draws."""
    nodes = default_nodes(fm)
    if not nodes:
        return None
    adds_up = any(p.dim and not p.outer for p in fm.plates)
    return Quadrature(NODES_OF_WEIGHTS if nodes == NODES and adds_up else nodes)


def objective_for(
    given: Objective | None, fm: FederatedModel, guide: Spec | None, start: str | None
) -> Objective:
    """Return a run's objective: the given one; else quadrature where it can be, and the ELBO.

    By quadrature no parameter of the locals' guide changes the bound, so that it takes the place of
    the ELBO only where the user chose no such guide. It searches for rows' modes from the guide's
    means, which are near where the run begins at the mode (``start``), or at the posterior of
    another run, whose guide of the locals is not fitted if that was by quadrature.
    """
    if given is not None:
        return given
    chosen, default = structured(guide), Structured()
    names = "locals", "couple_mean", "couple_scale"
    is_open = all(getattr(chosen, name) == getattr(default, name) for name in names)
    nodes = default_nodes(fm) if start in ("mode", "result") and is_open else 0
    return Quadrature(nodes) if nodes else ELBO()


def draws_of(given: Objective | None, objective: Objective, guide: Guide) -> dict[str, int]:
    """Return :func:`draws_by_plate` of a run's objective; 1 each where quadrature is the default.

    Rows that read each other's latents are then not refused: their search for the mode is, after
    which the run goes on by the ELBO.
    """
    draws = draws_by_plate(objective, guide)
    chosen = given is not None or not isinstance(objective, Quadrature)
    return draws if chosen else dict.fromkeys(draws, 1)


def check_quadrature(fm: FederatedModel) -> None:
    """Raise an error if quadrature is not for the model."""
    if (misfit := quadrature_misfit(fm)) is not None:
        raise ValueError(f"Quadrature is not for this model: {misfit}.")


Objective = ELBO | LocallyEnhanced | Quadrature


def draws_by_plate(objective: Objective, guide: Guide) -> dict[str, int]:
    """Return ``K`` for each silo plate that has latents, or its nodes in each dimension."""
    if isinstance(objective, ELBO):
        return dict.fromkeys(guide.locals, 1)
    if isinstance(objective, Quadrature):
        check_quadrature(guide.model)
        return dict.fromkeys(guide.locals, objective.nodes)
    if not isinstance(objective, LocallyEnhanced):
        raise TypeError(
            "objective must be numpyro_fed.ELBO(), LocallyEnhanced(draws=...) or "
            f"Quadrature(nodes=...), got {objective!r}"
        )
    if isinstance(objective.draws, Mapping):
        draws = {**dict.fromkeys(guide.locals, 1), **objective.draws}
    else:
        draws = {p: 1 if p in guide.outer else objective.draws for p in guide.locals}
        if objective.draws != 1 and guide.outer and not guide.rows:
            warnings.warn(
                f"{objective} changes nothing: rows of another plate depend on every silo plate "
                f"with latents ({', '.join(guide.outer)}). If each row has its own data, put these "
                "inside, in a nested plate with one row of a matrix for each; otherwise say "
                f"draws={{'{guide.outer[0]}': {objective.draws}}}, which weighs a silo as a whole.",
                category=ModelWarning,
                stacklevel=2,
            )
    for plate, k in draws.items():
        if plate not in guide.locals:
            raise ValueError(
                f"draws names '{plate}', but the silo plates with latents are "
                f"{sorted(guide.locals)}. Name one of those."
            )
        if not isinstance(k, int) or k < 1:
            raise ValueError(f"draws for silo_plate '{plate}' must be a positive int, got {k!r}.")
    return draws


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

    def value(self, given: AtDraw, noise: Rows) -> Array:
        return self.integrals.at(given.theta, given.z_G, self.near(given), given.data)

    @property
    def integrals(self) -> RowIntegrals:
        """Return the integrals over rows' latents, whose modes are near the guide's means."""
        return RowIntegrals(self.model, self.nodes, NEARBY)

    def near(self, given: AtDraw) -> SearchEnd:
        """Return where nodes stand: close to the conditional modes, held constant."""
        return self.integrals.near(given.theta, given.z_G, given.data, self.start(given))

    def start(self, given: AtDraw) -> Rows:
        """Return where the search for the modes begins, {plate: (rows, dim)}, held constant."""
        theta, eta, z_G, coordinates = stop_gradient(given[:4])
        guides = self.guide.at_globals(eta, theta, z_G, coordinates.offset, given.data)
        return {p: guides[p]["loc"] for p in self.guide.locals}

    def sample(self, key: Array, given: AtDraw) -> Rows:
        return self.integrals.sample(key, given.theta, given.z_G, self.near(given), given.data)

    def log_estimate(self, key: Array, given: AtDraw) -> Array:
        return self.value(given, {})

    def log_rows(self, key: Array, given: AtDraw) -> Rows:
        """Return each row's log likelihood, at a draw of the outer plate's latents."""
        return self.integrals.log_rows(key, given.theta, given.z_G, self.near(given), given.data)


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
        dims, rows = {p.name: p.dim for p in self.model.plates}, self.guide.rows
        return {
            p: (sizes[p], particles, self._k_outer, self.draws[p] if p in rows else 1, dims[p])
            for p in self.guide.locals
        }

    def noise(self, key: Array, sizes: Sizes, particles: int) -> Rows:
        """Return the noise of one evaluation, by plate; it does not depend on padded rows."""
        return normals(key, 0, self.shapes(sizes, particles))[1]

    def value(self, given: AtDraw, noise: Rows) -> Array:
        """Return the bound (), from the noise of one particle {plate: (rows, K_outer, K, dim)}."""
        guide, k_outer, args = self.guide, self._k_outer, given
        eps = {p: noise[p] for p in guide.rows}
        # A single draw above the rows needs no weights: the common case, and a smaller program.
        if k_outer == 1:
            z_outer = {p: self._draw(p, args, noise[p][:, 0, 0]) for p in guide.outer}
            return self._silo_term(args, z_outer, {p: e[:, 0] for p, e in eps.items()})
        outer = {p: noise[p][:, :, 0] for p in guide.outer}
        if self.plain:
            log_weights = self._each_outer(args, self._draws(guide.outer, args, outer), eps)
            return jax.nn.logsumexp(log_weights) - math.log(k_outer)
        moved_by_globals, moved_by_guide = self._two_paths(guide.outer, args, outer)
        counts = ((_OUTER, k_outer),)
        return _doubly_reparametrised(
            self._outer_weights, counts, moved_by_guide, (moved_by_globals, args, eps)
        )[_OUTER]

    def sample(self, key: Array, given: AtDraw) -> Rows:
        """Return a draw of the locals, {plate: (rows, dim)}, resampled by weight if ``K > 1``."""
        guide, args = self.guide, given
        if not guide.locals:
            return {}
        key_noise, key_rows, key_outer = jax.random.split(key, 3)
        sizes = {p: len(given.eta[p]["loc"]) for p in guide.locals}
        eps = {p: e[:, 0] for p, e in self.noise(key_noise, sizes, 1).items()}

        # The log weight of one outer draw, and its rows, resampled by theirs.
        def one_outer_draw(eps: Rows) -> tuple[Array, Rows]:
            z_outer = {p: self._draw(p, args, eps[p][:, 0]) for p in guide.outer}
            args_outer = args._replace(z_outer=z_outer)
            z = self._draws(guide.rows, args_outer, self._tiled(eps))
            weights = jax.vmap(partial(self._log_ratio, args=args_outer), axis_size=self._k_rows)(z)
            q = _total({p: self._log_q(p, args, z_outer[p]) for p in guide.outer})
            chosen = dict(z_outer)
            for i, p in enumerate(guide.rows):
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
        return max((self.draws[p] for p in self.guide.outer), default=1)

    @property
    def _k_rows(self) -> int:
        return max((self.draws[p] for p in self.guide.rows), default=1)

    @property
    def _counts(self) -> tuple[tuple[str, int], ...]:
        """Return ``K`` of each plate, and 1 for outer plates."""
        rows = self.guide.rows
        return tuple(
            (p.name, self.draws[p.name] if p.name in rows else 1) for p in self.model.plates
        )

    def _stopped(self, args: AtDraw) -> AtDraw:
        """Return the same arguments with the guide's parameters stopped; draws are not stopped."""
        # Parameters of amortised guides are among theta, with those of the model, which stay live.
        networks = {encoder.name for encoder in self.guide.encoders.values()}
        theta = {k: stop_gradient(v) if k in networks else v for k, v in args.theta.items()}
        coordinates = args.coordinates._replace(centre=stop_gradient(args.coordinates.centre))
        return args._replace(theta=theta, eta=stop_gradient(args.eta), coordinates=coordinates)

    def _given(self, plate: str, args: AtDraw) -> tuple[Any, Array]:
        """Return the parameters of a plate's guide, and the values its rows are coupled to."""
        eta = self.guide.of_rows(plate, args.theta, args.eta[plate], args.z_G, args.data)
        return eta, self.guide.above(
            plate, args.eta, args.coordinates.offset, args.z_outer, args.data
        )

    def _draw(self, plate: str, args: AtDraw, eps: Array) -> Array:
        return self.guide.locals[plate].draw(*self._given(plate, args), eps)

    def _draws(self, plates: tuple[str, ...], args: AtDraw, eps: Rows) -> Rows:
        """Return all draws of ``plates``, {plate: (K, rows, dim)}."""
        return {p: jax.vmap(partial(self._draw, p, args), 1)(eps[p]) for p in plates}

    def _two_paths(self, plates: tuple[str, ...], args: AtDraw, eps: Rows) -> tuple[Rows, Rows]:
        """Return draws as two summands: one depends on ``z_G``, one on the guide's parameters.

        The second has the value zero and the derivatives of the draw. So the two paths may have
        different gradients.
        """
        coordinates = args.coordinates._replace(u=stop_gradient(args.coordinates.u))
        z_G, z_outer = stop_gradient((args.z_G, args.z_outer))
        stopped = args._replace(z_G=z_G, coordinates=coordinates, z_outer=z_outer)
        moved_by_guide = jax.tree.map(
            lambda z: z - stop_gradient(z), self._draws(plates, stopped, eps)
        )
        return self._draws(plates, self._stopped(args), eps), moved_by_guide

    def _log_q(self, plate: str, args: AtDraw, z: Array) -> Array:
        return args.data.masked(plate, self.guide.locals[plate].log_q(*self._given(plate, args), z))

    def _log_ratio(self, z: Rows, args: AtDraw) -> Rows:
        """Return log p less log q of each row's own latents, {plate: (rows,)}."""
        rows = self.model.log_silo(args.theta, args.z_G, {**args.z_outer, **z}, args.data)
        return {p: v - self._log_q(p, args, z[p]) if p in z else v for p, v in rows.items()}

    def _tiled(self, eps: Rows) -> Rows:
        """Return rows' noise with equally many draws for all plates, repeated where needed."""
        return {p: eps[p][:, jnp.arange(self._k_rows) % self.draws[p]] for p in self.guide.rows}

    def _row_weights(self, moved_by_guide: Rows, other_args: tuple[Rows, AtDraw]) -> Rows:
        moved_by_globals, args = other_args
        return jax.vmap(partial(self._log_ratio, args=args))(
            jax.tree.map(jnp.add, moved_by_globals, moved_by_guide)
        )

    def _silo_term(self, args: AtDraw, z_outer: Rows, eps: Rows) -> Array:
        """Return the silo's whole term () at one draw of the outer latents."""
        given, rows = args._replace(z_outer=z_outer), self.guide.rows
        # Whether the gradients of rows' terms are doubly reparametrised. With several draws at an
        # outer plate its weights multiply all terms below, and the identity holds for the outermost
        # gradient only. It does not hold for rows that share a covariance either: a row's noise
        # then moves other rows, which have other weights.
        joint = any(self.guide.locals[p].joint for p in rows)
        sticks = self._k_outer == 1 and not self.plain and not (self._k_rows > 1 and joint)
        if self._k_rows == 1:
            z = {p: self._draw(p, given, eps[p][:, 0]) for p in rows}
            terms = self._log_ratio(z, self._stopped(given) if sticks else given)
        elif not sticks:
            z = self._draws(rows, given, self._tiled(eps))
            weights = jax.vmap(partial(self._log_ratio, args=given))(z)
            terms = _log_mean_exp(weights, self._counts)
        else:
            moved_by_globals, moved_by_guide = self._two_paths(rows, given, self._tiled(eps))
            rest = moved_by_globals, self._stopped(given)
            terms = _doubly_reparametrised(self._row_weights, self._counts, moved_by_guide, rest)
        stopped = args if self.plain else self._stopped(args)
        outer = {p: self._log_q(p, stopped, z_outer[p]) for p in self.guide.outer}
        return args.data.total(terms) - _total(outer)

    def _each_outer(self, args: AtDraw, z_outer: Rows, eps: Rows) -> Array:
        """Return the silo's whole term at all draws of the outer latents (K_outer,)."""
        return jax.vmap(lambda z, e: self._silo_term(args, z, e), (0, 1))(z_outer, eps)

    def _outer_weights(
        self, moved_by_guide: Rows, other_args: tuple[Rows, AtDraw, Rows]
    ) -> dict[str, Array]:
        moved_by_globals, args, eps = other_args
        return {
            _OUTER: self._each_outer(
                args, jax.tree.map(jnp.add, moved_by_globals, moved_by_guide), eps
            )
        }


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
