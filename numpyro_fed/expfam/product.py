"""The product of several families: independent members as one family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial, partialmethod
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.distributions import Distribution

from numpyro_fed.expfam.base import Family, Index, Natural, Ordinary, Tree, inner


def product(members: Mapping[str, tuple[Index, Family[Any]]]) -> Family[Any]:
    r"""Return the family of independent members, each over its own coordinates of one flat vector.

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
    return Product(sum(family.dim for _, family in members.values()), members)


@dataclass(frozen=True, eq=False)
class Product(Family[Tree]):
    """A family for each part of ``z``: see :func:`product`."""

    members: Mapping[str, tuple[Index, Family[Any]]]
    name: ClassVar[str] = "product"

    def __post_init__(self) -> None:
        wrong = [n for n, (_, f) in self.members.items() if len(self._places[n]) != f.dim]
        if wrong or not np.array_equal(np.sort(self._order), np.arange(self.dim)):
            raise ValueError(
                f"the indices of the members {wrong or list(self.members)} do not name each of "
                f"their {self.dim} coordinates once."
            )

    @cached_property
    def _places(self) -> dict[str, np.ndarray]:
        """Return the coordinates of each member."""
        return {name: np.arange(self.dim)[index] for name, (index, _) in self.members.items()}

    @cached_property
    def _order(self) -> np.ndarray:
        """Return all coordinates, member by member."""
        return np.concatenate([*self._places.values(), np.zeros(0, int)]).astype(int)

    def _cut(self, z: Array) -> Tree:
        """Return each member's coordinates, by name."""
        return {name: z[index] for name, (index, _) in self.members.items()}

    def _join(self, parts: Tree) -> Array:
        """Return all coordinates (dim,) from those of each member."""
        z = jnp.concatenate([parts[name] for name in self.members])
        if np.array_equal(self._order, np.arange(self.dim)):
            return z
        # JAX reads int32 the same way in both precisions; it would cast int64 in one of them.
        return z[np.argsort(self._order).astype(np.int32)]

    def _each(self, method: str, *args: Tree) -> Tree:
        """Return the results of a method at every member, with that member's arguments."""
        return {
            name: getattr(family, method)(*(a[name] for a in args))
            for name, (_, family) in self.members.items()
        }

    def _total(self, method: str, *args: Tree) -> Array:
        """Return the sum of a method's results over all members."""
        return sum(self._each(method, *args).values(), jnp.zeros(()))

    ordinary = partialmethod(_each, "ordinary")
    natural = partialmethod(_each, "natural")
    moments = partialmethod(_each, "moments")
    from_mean = partialmethod(_each, "from_mean")
    standard = partialmethod(_each, "standard")
    moved = partialmethod(_each, "moved")
    into = partialmethod(_each, "into")
    out_of = partialmethod(_each, "out_of")
    log_partition = partialmethod(_total, "log_partition")
    entropy = partialmethod(_total, "entropy")
    kl = partialmethod(_total, "kl")

    @property
    def of_normals(self) -> bool:
        return all(family.of_normals for _, family in self.members.values())

    def statistics(self, z: Array) -> Tree:
        return self._each("statistics", self._cut(z))

    def increment(self, z: Array, u: Array) -> Tree:
        return self._each("increment", self._cut(z), self._cut(u))

    def log_base(self, z: Array) -> Array:
        return self._total("log_base", self._cut(z))

    def noise(self, key: Array, n: int) -> Tree:
        if self.of_normals:
            # One draw for all members: each draw is a program to compile.
            return self.from_normals(jax.random.normal(key, (n, self.dim)))
        keys = jax.random.split(key, len(self.members))
        each = zip(self.members.items(), keys, strict=True)
        return {name: family.noise(key, n) for (name, (_, family)), key in each}

    def from_normals(self, normals: Array) -> Tree:
        stops = np.cumsum([family.dim for _, family in self.members.values()])
        return {
            name: family.from_normals(normals[:, stop - family.dim : stop])
            for (name, (_, family)), stop in zip(self.members.items(), stops, strict=True)
        }

    def draw(self, psi: Ordinary, noise: Tree) -> Array:
        return self._join(self._each("draw", psi, noise))

    def centre(self, psi: Ordinary) -> Array:
        return self._join(self._each("centre", psi))

    def spread(self, psi: Ordinary) -> tuple[Array, Array]:
        parts = self._each("spread", psi)
        means, sds = ({name: part[i] for name, part in parts.items()} for i in (0, 1))
        return self._join(means), self._join(sds)

    def proper(self, eta: Natural) -> Array:
        return jnp.stack(list(self._each("proper", eta).values())).all()

    def fit(self, f: Callable[[Array], Array]) -> Natural:
        zero, found = jnp.zeros(self.dim), {}
        for name, (index, family) in self.members.items():

            def on_coordinates(z: Array, index: Index = index) -> Array:
                return f(zero.at[index].set(z))

            found[name] = family.fit(on_coordinates)
        return found

    def dual_gradient(self, f: Callable[[Ordinary], Array], eta: Natural) -> Tree:
        # One gradient for all members. The dual gradient is linear in it, so each member computes
        # its own from a linear function with that gradient.
        gradient = jax.grad(f)(self.ordinary(eta))
        return {
            name: family.dual_gradient(partial(inner, gradient[name]), eta[name])
            for name, (_, family) in self.members.items()
        }

    def move(self, psi: Ordinary, gradient: Tree) -> Array:
        parts = self._each("move", psi, gradient)
        halves = {name: jnp.split(part, 2) for name, part in parts.items()}
        means, scales = ({name: half[i] for name, half in halves.items()} for i in (0, 1))
        return jnp.concatenate([self._join(means), self._join(scales)])

    def log_density(self, eta: Natural, z: Array) -> Array:
        return self._total("log_density", eta, self._cut(z))

    def around(self, z: Array, gradient: Array, curvature: Array) -> Natural:
        blocks = {name: curvature[np.ix_(at, at)] for name, at in self._places.items()}
        return self._each("around", self._cut(z), self._cut(gradient), blocks)

    def marginal(
        self, eta: Natural, index: Index, shape: tuple[int, ...], event_dim: int
    ) -> Distribution:
        wanted = np.arange(self.dim)[index]
        for name, places in self._places.items():
            if np.isin(wanted, places).all():
                sorter = np.argsort(places)
                positions = sorter[np.searchsorted(places, wanted, sorter=sorter)]
                return self.members[name][1].marginal(eta[name], positions, shape, event_dim)
        raise ValueError(f"no single member of {list(self.members)} has the coordinates {index}.")
