"""A family for each part of ``z``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.distributions import Distribution

from numpyro_fed.expfam.base import Family, Index, Tree, inner


def product(members: Mapping[str, tuple[Index, Family]]) -> Family:
    r"""Independent members, each over its own coordinates of one flat vector.

    .. math::
        q(z) = \prod_k q_k(z_{I_k}), \quad A(\eta) = \sum_k A_k(\eta_k)

    Parameters
    ----------
    members : dict
        ``{name: (indices, family)}``, with a slice or an array of ints for the coordinates of each
        member. Together they are ``0, ..., dim - 1``.

    Returns
    -------
    Family
        All parameters are ``{name: those of the member}``.

    Raises
    ------
    ValueError
        For indices that do not name each coordinate once.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from numpyro_fed import expfam
    >>> family = expfam.product({"location": (slice(0, 2), expfam.gaussian(2)),
    ...                          "scale": (slice(2, 3), expfam.gaussian(1))})
    >>> family.fit(lambda z: -0.5 * z @ z)["scale"]["second"]
    Array([-0.5], dtype=float32)
    """
    dim = sum(family.dim for _, family in members.values())
    places = {name: np.arange(dim)[index] for name, (index, _) in members.items()}
    families = {name: family for name, (_, family) in members.items()}
    order = np.concatenate([*places.values(), np.zeros(0, int)]).astype(int)
    wrong = [name for name, family in families.items() if len(places[name]) != family.dim]
    if wrong or not np.array_equal(np.sort(order), np.arange(dim)):
        raise ValueError(
            f"the indices of the members {wrong or list(members)} do not name each of their "
            f"{dim} coordinates once."
        )
    of_normals = all(family.from_normals for family in families.values())
    inverse = np.argsort(order).astype(np.int32)  # which JAX reads alike in either precision

    def part(z: Array, name: str) -> Array:
        return z[members[name][0]]

    def join(parts: Tree) -> Array:
        z = jnp.concatenate([parts[name] for name in families])
        return z if np.array_equal(order, np.arange(dim)) else z[inverse]

    def each(field: str) -> Callable[..., Tree]:
        """One of the functions at every member, on that member's arguments."""
        return lambda *args: {
            name: getattr(family, field)(*(a[name] for a in args))
            for name, family in families.items()
        }

    def total(field: str) -> Callable[..., Array]:
        return lambda *args: sum(each(field)(*args).values(), jnp.zeros(()))

    def cut(z: Array) -> Tree:
        return {name: part(z, name) for name in families}

    def increment(z: Array, u: Array) -> Tree:
        return each("increment")(cut(z), cut(u))

    def spread(psi: Tree) -> tuple[Array, Array]:
        parts = each("spread")(psi)
        mean, sd = (join({name: part[i] for name, part in parts.items()}) for i in (0, 1))
        return mean, sd

    def by_coordinate(parts: Tree) -> Array:
        """What each member says of each number twice, in the order of ``z``, twice."""
        halves = {name: jnp.split(part, 2) for name, part in parts.items()}
        both = (join({name: half[i] for name, half in halves.items()}) for i in (0, 1))
        return jnp.concatenate(list(both))

    def from_normals(normals: Array) -> Tree:
        stops = np.cumsum([family.dim for family in families.values()])
        return {
            name: family.from_normals(normals[:, stop - family.dim : stop])
            for (name, family), stop in zip(families.items(), stops, strict=True)
            if family.from_normals
        }

    def noise(key: Array, n: int) -> Tree:
        if of_normals:
            return from_normals(jax.random.normal(key, (n, dim)))
        keys = jax.random.split(key, len(families))
        return {name: f.noise(k, n) for (name, f), k in zip(families.items(), keys, strict=True)}

    def fit(f: Callable[[Array], Array]) -> Tree:
        def along(name: str) -> Callable[[Array], Array]:
            return lambda z: f(jnp.zeros(dim).at[members[name][0]].set(z))

        return {name: family.fit(along(name)) for name, family in families.items()}

    def dual_gradient(f: Callable[[Tree], Array], eta: Tree) -> Tree:
        gradient = jax.grad(f)(each("ordinary")(eta))
        return {
            name: family.dual_gradient(partial(inner, gradient[name]), eta[name])
            for name, family in families.items()
        }

    def around(z: Array, gradient: Array, curvature: Array) -> Tree:
        return {
            name: family.around(
                part(z, name),
                part(gradient, name),
                curvature[np.ix_(places[name], places[name])],
            )
            for name, family in families.items()
        }

    def marginal(eta: Tree, index: Index, shape: tuple[int, ...], event_dim: int) -> Distribution:
        wanted = np.arange(dim)[index]
        for name, family in families.items():
            if np.isin(wanted, places[name]).all():
                sorter = np.argsort(places[name])
                own = sorter[np.searchsorted(places[name], wanted, sorter=sorter)]
                return family.marginal(eta[name], own, shape, event_dim)
        raise ValueError(f"no single member of {list(families)} has the coordinates {index}.")

    return Family(
        name="product",
        dim=dim,
        statistics=lambda z: each("statistics")(cut(z)),
        increment=increment,
        log_base=lambda z: total("log_base")(cut(z)),
        log_partition=total("log_partition"),
        ordinary=each("ordinary"),
        natural=each("natural"),
        moments=each("moments"),
        from_mean=each("from_mean"),
        entropy=total("entropy"),
        noise=noise,
        from_normals=from_normals if of_normals else None,
        draw=lambda psi, noise: join(each("draw")(psi, noise)),
        centre=lambda psi: join(each("centre")(psi)),
        spread=spread,
        proper=lambda eta: jnp.stack(list(each("proper")(eta).values())).all(),
        fit=fit,
        dual_gradient=dual_gradient,
        move=lambda psi, gradient: by_coordinate(each("move")(psi, gradient)),
        log_density=lambda eta, z: total("log_density")(eta, cut(z)),
        kl=total("kl"),
        marginal=marginal,
        around=around,
        standard=each("standard"),
        moved=each("moved"),
        into=each("into"),
        out_of=each("out_of"),
    )
