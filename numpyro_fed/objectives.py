"""Bounds on a silo's log likelihood at a draw of the globals."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.lax import stop_gradient

from numpyro_fed.guides.structured import Guide, Origin
from numpyro_fed.model.data import SiloData, Sizes
from numpyro_fed.model.split import FederatedModel, Rows, Theta


@dataclass(frozen=True)
class ELBO:
    r"""The evidence lower bound.

    .. math::
        \mathcal{L} = \mathbb{E}_q\Big[\log p(z_G) - \log q(z_G)
        + \sum_j \big(\log p(z_{L_j}, y_j \mid z_G) - \log q(z_{L_j} \mid z_G)\big)\Big]

    Its gradient sticks the landing: the parameters inside ``log q`` are stopped, which is unbiased
    and has no variance where the guide is exact (Roeder, Wu and Duvenaud 2017). NumPyro's
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
        ``K``. An int is meant for the plates of rows; an outer plate, which rows of another plate
        depend on, then has one draw. A dict gives ``K`` by silo plate, 1 where it is silent. With
        ``K > 1`` at an outer plate the weight is that of the silo's whole content, since its rows
        hang together there, and all outer plates use the largest ``K`` among them.

    Notes
    -----
    Gradients are doubly reparametrised (Tucker et al. 2019): stopping ``log q`` inside the
    log-mean-exp alone would bias them. The identity is applied to the parameters of the local
    guide; the path through ``z_G`` is differentiated as it stands, so that a row whose guide is
    exact adds no noise to the globals. With ``K > 1`` at an outer plate it is applied at that
    plate, and rows below are differentiated in full; so are rows under ``locals="joint"``.

    Examples
    --------
    >>> import numpyro_fed as nf
    >>> nf.LocallyEnhanced(draws=20)
    LocallyEnhanced(draws=20)
    >>> nf.LocallyEnhanced(draws={"hospital": 20}).draws["hospital"]
    20
    """

    draws: int | Mapping[str, int] = 20


class SiloBound(NamedTuple):
    """A silo's term of the bound as pure functions.

    Attributes
    ----------
    shapes : (sizes, particles) -> {plate: (rows, particles, K_outer, K, dim)}
        Of the noise of one evaluation, standard normals.
    value : (theta, eta, z_G, origin, noise, data) -> ()
        The bound at one ``z_G``; ``noise`` is that of one particle, (rows, K_outer, K, dim).
        ``jax.grad`` of it is the estimator that the objective stands for.
    sample : (key, theta, eta, z_G, origin, data) -> z_L
        One draw of the locals, {plate: (rows, dim)}, resampled by its weight where ``K > 1``.
    """

    shapes: Callable[[Sizes, int], dict[str, tuple[int, ...]]]
    value: Callable[..., Array]
    sample: Callable[..., Rows]

    def noise(self, key: Array, sizes: Sizes, particles: int) -> Rows:
        """All noise of one evaluation; padded rows shift nobody's draws."""
        return normals(key, 0, self.shapes(sizes, particles))[1]


def normals(key: Array, number: int, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Array, Rows]:
    """Standard normals: ``number`` of them, and for each plate an array, rows first.

    Each draw is a program to compile, and so the first plate shares one with the ``number``: what
    it has of padded rows comes last there, and shifts nothing. Other plates have their own.
    """
    keys = jax.random.split(key, len(shapes)) if len(shapes) > 1 else [key]
    sizes = [math.prod(shape) for shape in shapes.values()]
    together = jax.random.normal(keys[0], (number + sum(sizes[:1]),))
    rows = {}
    for i, (plate, shape) in enumerate(shapes.items()):
        own = jax.random.normal(keys[i], shape) if i else together[number:]
        rows[plate] = own.reshape(shape)
    return together[:number], rows


def draws_by_plate(objective: ELBO | LocallyEnhanced, guide: Guide) -> dict[str, int]:
    """``K`` for each silo plate that has latents.

    Raises
    ------
    TypeError
        For an objective that is none of ours.
    ValueError
        For a plate that does not exist or has no latents, or a ``K`` that is not positive.
    """
    if isinstance(objective, ELBO):
        return dict.fromkeys(guide.locals, 1)
    if not isinstance(objective, LocallyEnhanced):
        raise TypeError(
            f"objective must be numpyro_fed.ELBO() or LocallyEnhanced(draws=...), got {objective!r}"
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


class _At(NamedTuple):
    """Where a silo's term is evaluated."""

    theta: Theta
    eta: dict[str, Any]  # of the silo's guide
    origin: Origin
    z_G: Array
    z_outer: Rows
    data: SiloData


def silo_bound(
    fm: FederatedModel, guide: Guide, draws: Mapping[str, int], *, plain: bool = False
) -> SiloBound:
    """Build a silo's term of the bound for given numbers of draws.

    The gradient of a ``plain`` one is the derivative of its value, as line searches need it.
    """
    k_outer = max((draws[p] for p in guide.outer), default=1)
    k_rows = max((draws[p] for p in guide.rows), default=1)
    dims = {p.name: p.dim for p in fm.plates if p.dim}
    counts = tuple((p.name, draws[p.name] if p.name in guide.rows else 1) for p in fm.plates)
    no_latents = [p.name for p in fm.plates if not p.dim]
    # More than one draw at an outer plate: its weights multiply whatever stands below, so that
    # only the outermost gradient may be reparametrised twice. Nor may that of rows which share a
    # covariance: a row's own noise then moves other rows, whose weights are others.
    together = k_rows > 1 and any(guide.locals[p].joint for p in guide.rows)
    stick_rows = k_outer == 1 and not plain and not together
    networks = {encoder.name for encoder in guide.encoders.values()}

    def stopped(at: _At) -> _At:
        """The same place with the guide's parameters stopped; ``z_G`` and the draws stay live."""
        theta = {k: stop_gradient(v) if k in networks else v for k, v in at.theta.items()}
        eta, origin = stop_gradient(at.eta), stop_gradient(at.origin)
        return at._replace(theta=theta, eta=eta, origin=origin)

    stop = (lambda at: at) if plain else stopped

    def shapes(sizes: Sizes, particles: int) -> dict[str, tuple[int, ...]]:
        return {
            p: (sizes[p], particles, k_outer, draws[p] if p in guide.rows else 1, dims[p])
            for p in guide.locals
        }

    def above(plate: str, at: _At) -> Array:
        return guide.above(plate, at.eta, at.z_G, at.origin, at.z_outer, at.data)

    def eta_of(plate: str, at: _At) -> Any:
        return guide.of_rows(plate, at.theta, at.eta[plate], at.z_G, at.data)

    def draw(plate: str, at: _At, eps: Array) -> Array:
        return guide.locals[plate].draw(eta_of(plate, at), above(plate, at), eps)

    def draws_of(plates: tuple[str, ...], at: _At, eps: Rows) -> Rows:
        """All draws of some plates, {plate: (K, rows, dim)}."""
        return {p: jax.vmap(partial(draw, p, at), 1)(eps[p]) for p in plates}

    def two_paths(plates: tuple[str, ...], at: _At, eps: Rows) -> tuple[Rows, Rows]:
        """Draws as what moves with ``z_G`` plus what moves with the guide's parameters (zero)."""
        held = at._replace(z_G=stop_gradient(at.z_G), z_outer=stop_gradient(at.z_outer))
        own = draws_of(plates, held, eps)
        return draws_of(plates, stopped(at), eps), jax.tree.map(lambda z: z - stop_gradient(z), own)

    def log_q(plate: str, at: _At, z: Array) -> Array:
        rows = guide.locals[plate].log_q(eta_of(plate, at), above(plate, at), z)
        return at.data.keep(plate, rows)

    def log_ratio(z: Rows, at: _At) -> Rows:
        """log p of every row, less log q of the rows' own latents."""
        sizes = fm.sizes(at.data) if no_latents else {}
        empty = {p: jnp.zeros((sizes[p], 0)) for p in no_latents}
        rows = fm.log_silo(at.theta, at.z_G, {**empty, **at.z_outer, **z}, at.data)
        return {p: v - log_q(p, at, z[p]) if p in z else v for p, v in rows.items()}

    def tiled(eps: Rows) -> Rows:
        """Noise of the row plates with as many draws for each as the plate with the most has."""
        return {p: eps[p][:, jnp.arange(k_rows) % draws[p]] for p in guide.rows}

    def row_terms(at: _At, eps: Rows) -> Rows:
        """The bound's term for each row of each plate, {plate: (rows,)}, at given outer latents."""
        if k_rows == 1:
            z = {p: draw(p, at, eps[p][:, 0]) for p in guide.rows}
            return log_ratio(z, stopped(at) if stick_rows else at)
        eps = tiled(eps)
        if not stick_rows:
            z = draws_of(guide.rows, at, eps)
            return _log_mean_exp(jax.vmap(lambda z: log_ratio(z, at))(z), counts)
        moved, own = two_paths(guide.rows, at, eps)
        return _doubly_reparametrised(row_weights, counts, own, (moved, stopped(at)))

    def row_weights(own: Rows, rest: tuple[Rows, _At]) -> Rows:
        moved, at = rest
        return jax.vmap(lambda z: log_ratio(z, at))(jax.tree.map(jnp.add, moved, own))

    def outer_term(at: _At, z_outer: Rows, eps: Rows) -> Array:
        """The silo's whole term at one draw of the outer latents."""
        terms = row_terms(at._replace(z_outer=z_outer), eps)
        outer = {p: log_q(p, stop(at), z_outer[p]) for p in guide.outer}
        return at.data.total(terms) - _total(outer)

    def outer_weights(own: Rows, rest: tuple[Rows, _At, Rows]) -> dict[str, Array]:
        moved, at, eps = rest
        z_outer = jax.tree.map(jnp.add, moved, own)
        each = jax.vmap(lambda z, e: outer_term(at, z, e), (0, 1))(z_outer, eps)
        return {_OUTER: each}

    def value(
        theta: Theta, eta: dict, z_G: Array, origin: Origin, noise: Rows, data: SiloData
    ) -> Array:
        at = _At(theta, eta, origin, z_G, {}, data)
        eps = {p: noise[p] for p in guide.rows}
        if k_outer == 1:
            z_outer = {p: draw(p, at, noise[p][:, 0, 0]) for p in guide.outer}
            return outer_term(at, z_outer, {p: e[:, 0] for p, e in eps.items()})
        if plain:
            z_outer = draws_of(guide.outer, at, {p: noise[p][:, :, 0] for p in guide.outer})
            each = jax.vmap(lambda z, e: outer_term(at, z, e), (0, 1))(z_outer, eps)
            return jax.nn.logsumexp(each) - math.log(k_outer)
        moved, own = two_paths(guide.outer, at, {p: noise[p][:, :, 0] for p in guide.outer})
        outer_count = ((_OUTER, k_outer),)
        return _doubly_reparametrised(outer_weights, outer_count, own, (moved, at, eps))[_OUTER]

    def sample(
        key: Array, theta: Theta, eta: dict, z_G: Array, origin: Origin, data: SiloData
    ) -> Rows:
        if not guide.locals:
            return {}
        key_noise, key_rows, key_outer = jax.random.split(key, 3)
        sizes = {p: len(eta[p]["loc"]) for p in guide.locals}
        eps = {p: e[:, 0] for p, e in normals(key_noise, 0, shapes(sizes, 1))[1].items()}
        at = _At(theta, eta, origin, z_G, {}, data)

        def one(eps: Rows) -> tuple[Array, Rows]:
            """The silo's log weight, and rows resampled by theirs, at one outer draw."""
            z_outer = {p: draw(p, at, eps[p][:, 0]) for p in guide.outer}
            here = at._replace(z_outer=z_outer)
            z = draws_of(guide.rows, here, tiled(eps))
            weights = jax.vmap(lambda z: log_ratio(z, here), axis_size=k_rows)(z)
            q = _total({p: log_q(p, at, z_outer[p]) for p in guide.outer})
            total = _total(_log_mean_exp(weights, counts)) - q
            chosen = {
                p: _choose(jax.random.fold_in(key_rows, i), weights[p][: draws[p]], z[p])
                for i, p in enumerate(guide.rows)
            }
            return total, {**z_outer, **chosen}

        totals, z = jax.vmap(one, 1)(eps)
        k = jax.random.categorical(key_outer, totals)
        return jax.tree.map(lambda a: a[k], z)

    return SiloBound(shapes, value, sample)


_OUTER = "outer plates"


def _total(rows: Rows) -> Array:
    return sum((v.sum() for v in rows.values()), jnp.zeros(()))


def _choose(key: Array, log_weights: Array, z: Array) -> Array:
    """For each row one of its draws: ``log_weights`` (K, rows), ``z`` (K or more, rows, dim)."""
    k = jax.random.categorical(key, log_weights, axis=0)
    return z[k, jnp.arange(z.shape[1])]


def _log_mean_exp(log_weights: Rows, counts: tuple[tuple[str, int], ...]) -> Rows:
    """Log-mean-exp over the first ``K`` draws, leading axis, for each plate."""
    return {
        p: jax.nn.logsumexp(log_weights[p][:k], axis=0) - math.log(k)
        for p, k in counts
        if p in log_weights
    }


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _doubly_reparametrised(
    f: Callable[[Rows, Any], Rows], counts: tuple[tuple[str, int], ...], own: Rows, rest: Any
) -> Rows:
    r"""Log-mean-exp of ``f(own, rest)`` with the doubly reparametrised gradient for ``own``.

    With normalised weights ``w_k`` the gradient reaching ``rest`` is the ordinary one,
    :math:`\sum_k w_k \nabla f_k`, while what reaches ``own[k]`` is
    :math:`w_k^2 \nabla f_k` (Tucker et al. 2019, equation 8).
    """
    return _log_mean_exp(f(own, rest), counts)


def _forward(f: Callable, counts: tuple, own: Rows, rest: Any) -> tuple[Rows, Any]:
    log_weights, pull = jax.vjp(f, own, rest)
    return _log_mean_exp(log_weights, counts), (log_weights, pull)


def _backward(f: Callable, counts: tuple, saved: Any, cotangent: Rows) -> tuple[Rows, Any]:
    log_weights, pull = saved
    weights = {}
    for p, k in counts:
        if p in log_weights:
            w = jax.nn.softmax(log_weights[p][:k], axis=0)
            unused = jnp.zeros((len(log_weights[p]) - k, *w.shape[1:]))
            weights[p] = jnp.concatenate([w, unused])
    own, rest = pull({p: w * cotangent[p] for p, w in weights.items()})

    def again(plate: str, g: Array) -> Array:
        w = weights[plate if plate in weights else _OUTER]
        return w.reshape(w.shape + (1,) * (g.ndim - w.ndim)) * g

    return {p: again(p, g) for p, g in own.items()}, rest


_doubly_reparametrised.defvjp(_forward, _backward)
