"""The interface of an exponential family, what is the same for all, and products of several."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial, partialmethod
from typing import Any, Generic, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from numpyro.distributions import Distribution

from numpyro_fed.basics.trees import all_finite
from numpyro_fed.numerics import linalg

Natural = dict[str, Any]  # eta: natural parameters, whose inner product with statistics counts
Ordinary = dict[str, Any]  # psi: unconstrained ordinary parameters, for optimisers
Statistics = dict[str, Any]  # T(z), or mean parameters mu; also gradients in parameters
Parts = dict[str, Any]  # what belongs to each member of a product, by its name
Index = slice | np.ndarray
Eps = TypeVar("Eps")  # the noise of a draw: an array; of a product one for each member


@dataclass(frozen=True, eq=False)
class Family(ABC, Generic[Eps]):
    r"""An exponential family of a flat vector ``z`` of unconstrained numbers.

    .. math::
        q(z) = h(z) \exp(\langle \eta, T(z) \rangle - A(\eta)),

    a density with respect to ``dz``. For a site ``x`` on a constrained support, ``z`` is ``x``
    mapped by the inverse of NumPyro's ``biject_to``, and ``h`` holds the log-determinant of that
    bijection. ``eta``, ``mu`` and ``T(z)`` are trees of one structure with ``<a, b>`` as in
    :func:`inner`; ``psi`` are unconstrained ordinary parameters, for optimisers.

    Attributes
    ----------
    dim : int
        Length of ``z``.
    """

    dim: int

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the family's name in error messages."""

    @property
    def of_normals(self) -> bool:
        """Return whether the noise of a draw is ``dim`` standard normals and nothing else."""
        return False

    @abstractmethod
    def statistics(self, z: Array) -> Statistics:
        """Return the statistics ``T(z)``."""

    @abstractmethod
    def log_base(self, z: Array) -> Array:
        """Return the log base measure ``log h(z)``."""

    @abstractmethod
    def log_partition(self, eta: Natural) -> Array:
        """Return the log partition function ``A(eta)``."""

    @abstractmethod
    def ordinary(self, eta: Natural) -> Ordinary:
        """Return ordinary parameters from natural ones."""

    @abstractmethod
    def natural(self, psi: Ordinary) -> Natural:
        """Return natural parameters from ordinary ones."""

    @abstractmethod
    def moments(self, psi: Ordinary) -> Statistics:
        """Return the mean parameters ``E_q[T]``, which are the gradient of ``A``."""

    @abstractmethod
    def from_mean(self, mu: Statistics) -> Natural:
        """Return natural parameters from mean parameters."""

    @abstractmethod
    def noise(self, key: Array, n: int) -> Eps:
        """Return the noise of ``n`` draws, along a leading axis: standard normals, or keys."""

    @abstractmethod
    def draw(self, psi: Ordinary, noise: Eps) -> Array:
        """Return one draw (dim,) from its noise, differentiable in ``psi``."""

    @abstractmethod
    def centre(self, psi: Ordinary) -> Array:
        """Return a central ``z`` (dim,): a Gaussian's mean, else the mean of ``x``, mapped to z."""

    @abstractmethod
    def mean_and_sd(self, psi: Ordinary) -> tuple[Array, Array]:
        """Return the means (dim,) and the standard deviations (dim,) of ``z``."""

    @abstractmethod
    def fit(self, f: Callable[[Array], Array]) -> Natural:
        """Return the natural parameters of ``f(z) = c + <eta, T(z)>``, from its derivatives."""

    @abstractmethod
    def dual_gradient(self, f: Callable[[Ordinary], Array], eta: Natural) -> Statistics:
        """Return the gradient of ``f(psi)`` in ``mu``: the natural gradient in ``eta``."""

    @abstractmethod
    def kl(self, eta_q: Natural, eta_p: Natural) -> Array:
        r"""Return the Kullback-Leibler divergence between two proper members of the family.

        .. math::
            KL(q \| p) = A(\eta_p) - A(\eta_q) - \langle \eta_p - \eta_q, \mu(\eta_q) \rangle

        Gaussians compute it from their roots, other families by NumPyro's formula.

        Examples
        --------
        >>> import jax.numpy as jnp
        >>> from numpyro_fed import expfam
        >>> q = {"first": jnp.zeros(1), "second": -0.5 * jnp.ones(1)}
        >>> p = {"first": jnp.ones(1), "second": -0.5 * jnp.ones(1)}
        >>> float(expfam.gaussian(1).kl(q, p))
        0.5
        """

    @abstractmethod
    def marginal(
        self, eta: Natural, index: Index, shape: tuple[int, ...], event_dim: int = 0
    ) -> Distribution:
        """Return the marginal distribution of one site, whose coordinates are ``z[index]``.

        Parameters
        ----------
        eta : tree
            Natural parameters.
        index : slice or int array
            The site's coordinates: all those of a Gamma, Beta or Dirichlet member, or any part of a
            Gaussian.
        shape : tuple of int
            The site's shape in unconstrained space.
        event_dim : int
            The number of the site's axes that belong to one event.

        Returns
        -------
        Distribution
            A Gaussian's marginal is in unconstrained space: a ``MultivariateNormal`` over the last
            axis if the family is full and that axis is the event, else independent ``Normal``.
            Marginals of other families are over ``x`` itself.

        Raises
        ------
        ValueError
            For coordinates of several members, and for a part of a member that is not Gaussian.

        Examples
        --------
        >>> import jax.numpy as jnp
        >>> from numpyro_fed import expfam
        >>> family = expfam.gaussian(3, "full")
        >>> eta = family.natural({"loc": jnp.zeros(3), "log_scale": jnp.zeros(3),
        ...                       "below": jnp.array([1.0, 0.0, 0.0])})
        >>> q = family.marginal(eta, slice(1, 3), (2,), event_dim=1)
        >>> [round(float(v), 3) for v in q.variance]
        [1.5, 1.0]
        """

    def from_normals(self, normals: Array) -> Eps:
        """Return standard normals (n, dim) as the noise of ``n`` draws, if :attr:`of_normals`."""
        return cast(Eps, normals)

    def increment(self, z: Array, u: Array) -> Statistics:
        """Return ``T(z + u) - T(z)``, computed without cancellation where ``T`` is a polynomial."""
        return jax.tree.map(jnp.subtract, self.statistics(z + u), self.statistics(z))

    def entropy(self, psi: Ordinary) -> Array:
        """Return ``-E_q[log q(z) - log h(z)] = A(eta) - <eta, mu>``."""
        eta = self.natural(psi)
        return self.log_partition(eta) - inner(eta, self.moments(psi))

    def proper(self, eta: Natural) -> Array:
        """Return whether ``eta`` is normalisable, and its parameters finite in this precision."""
        return all_finite((eta, self.ordinary(eta)))

    def log_density(self, eta: Natural, z: Array) -> Array:
        r"""Return the log density () with respect to ``dz``, at ``z`` (dim,).

        .. math::
            \log q(z) = \log h(z) + \langle \eta, T(z) \rangle - A(\eta)

        Gaussians compute it from their standardised residuals: the three terms cancel far from
        zero.

        Examples
        --------
        >>> import jax.numpy as jnp
        >>> from numpyro_fed import expfam
        >>> standard = {"first": jnp.zeros(1), "second": -0.5 * jnp.ones(1)}
        >>> round(float(expfam.gaussian(1).log_density(standard, jnp.zeros(1))), 4)
        -0.9189
        """
        return self.log_base(z) + inner(eta, self.statistics(z)) - self.log_partition(eta)

    def move(self, psi: Ordinary, gradient: Statistics) -> Array:
        """Return how far a full natural-gradient step would move ``q``, to first order (2 dim,).

        The first half has the moves of the means, in standard deviations, the second those of log
        standard deviations. ``gradient`` is the one in ``psi``.
        """
        eta = self.natural(psi)
        step = self.dual_gradient(lambda psi: inner(gradient, psi), eta)
        return move_along(self, eta, step)

    def from_derivatives(self, z: Array, gradient: Array, curvature: Array) -> Natural:
        """Return natural parameters of a function with this gradient (dim,) at ``z`` (dim,).

        ``curvature`` (dim, dim) is its negative Hessian. If no member has both, the result is the
        least-squares fit to the gradient and the diagonal of the curvature.
        """
        # As many equations as unknowns for Gamma and Beta: slope and second derivative of each
        # coordinate. For others the fit is a compromise.
        T, unravel = ravel_pytree(self.statistics(z))
        slope = jax.jacfwd(lambda z: ravel_pytree(self.statistics(z))[0])
        slopes = slope(z)  # (statistics, dim)
        bends = jnp.diagonal(jax.jacfwd(slope)(z), axis1=1, axis2=2)
        wanted = jnp.concatenate([gradient, -jnp.diagonal(curvature)])
        found = linalg.least_squares(jnp.concatenate([slopes, bends], 1).T, wanted)
        return unravel(found.astype(T.dtype))

    def standard(self, psi: Ordinary) -> Ordinary:
        """Return the member in its own coordinates: a standard normal for Gaussians.

        Other families have no coordinates but ``z``. This function and the three below return their
        parameters unchanged.
        """
        return psi

    def composed(self, psi: Ordinary, step: Ordinary) -> Ordinary:
        """Return the member, in ``z``, that is ``step`` in the coordinates of ``psi``."""
        return step

    def to_coordinates_of(self, psi: Ordinary, eta: Natural) -> Natural:
        """Return natural parameters in the coordinates of ``psi`` from those in ``z``."""
        return eta

    def from_coordinates_of(self, psi: Ordinary, eta: Natural) -> Natural:
        """Return natural parameters in ``z`` from those in the coordinates of ``psi``."""
        return eta


def location_and_log_scale(family: Family[Any], eta: Natural) -> tuple[Array, Array]:
    """Return the means (dim,) and log standard deviations (dim,) of ``z``."""
    mean, sd = family.mean_and_sd(family.ordinary(eta))
    return mean, jnp.log(sd)


def move_along(family: Family[Any], eta: Natural, step: Natural) -> Array:
    """Return the move (2 dim,) of ``q`` along ``step`` from ``eta``, as in :meth:`Family.move`."""
    # Forward mode: one step is a single direction, whatever the dimension.
    (_, log_sd), (mean, log_scale) = jax.jvp(
        lambda eta: location_and_log_scale(family, eta), (eta,), (step,)
    )
    return jnp.concatenate([mean / jnp.exp(log_sd), log_scale])


def inner(a: Statistics, b: Statistics) -> Array:
    r"""Return the inner product of two trees of one structure, summed over all leaves.

    Examples
    --------
    >>> from numpyro_fed import expfam
    >>> float(expfam.inner({"first": 1.0, "second": 2.0}, {"first": 3.0, "second": 4.0}))
    11.0
    """
    return sum(jax.tree.leaves(jax.tree.map(lambda x, y: jnp.sum(x * y), a, b)), jnp.zeros(()))


def product(members: Mapping[str, tuple[Index, Family[Any]]]) -> Product:
    r"""Return the family of independent members, each over its own coordinates of one flat vector.

    .. math::
        q(z) = \prod_k q_k(z_{I_k}), \quad A(\eta) = \sum_k A_k(\eta_k)

    Parameters
    ----------
    members : dict
        ``{name: (indices, family)}``, with a slice or an array of ints for the coordinates of each
        member. Together they are ``0, ..., dim - 1``. Parameters are by these names, too.

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
class Product(Family[Any]):
    """A family for each part of ``z``: see :func:`product`."""

    members: Mapping[str, tuple[Index, Family[Any]]]
    name = "product"

    def __post_init__(self) -> None:
        wrong = [n for n, (_, f) in self.members.items() if len(self.places[n]) != f.dim]
        if wrong or not np.array_equal(np.sort(self.order), np.arange(self.dim)):
            raise ValueError(
                f"the indices of the members {wrong or list(self.members)} do not name each of "
                f"their {self.dim} coordinates once."
            )

    @cached_property
    def places(self) -> dict[str, np.ndarray]:
        """Return the coordinates of each member."""
        return {name: np.arange(self.dim)[index] for name, (index, _) in self.members.items()}

    @cached_property
    def order(self) -> np.ndarray:
        """Return all coordinates, member by member."""
        return np.concatenate([*self.places.values(), np.zeros(0, int)]).astype(int)

    def _cut(self, z: Array) -> Parts:
        """Return each member's coordinates, by name."""
        return {name: z[index] for name, (index, _) in self.members.items()}

    def join(self, parts: Parts) -> Array:
        """Return all coordinates (dim,) from those of each member."""
        z = jnp.concatenate([parts[name] for name in self.members])
        if np.array_equal(self.order, np.arange(self.dim)):
            return z
        # JAX reads int32 the same way in both precisions; it would cast int64 in one of them.
        return z[np.argsort(self.order).astype(np.int32)]

    def _each(self, method: str, *args: Parts) -> Parts:
        """Return the results of a method at every member, with that member's arguments."""
        return {
            name: getattr(family, method)(*(a[name] for a in args))
            for name, (_, family) in self.members.items()
        }

    def _total(self, method: str, *args: Parts) -> Array:
        """Return the sum of a method's results over all members."""
        return sum(self._each(method, *args).values(), jnp.zeros(()))

    ordinary = partialmethod(_each, "ordinary")
    natural = partialmethod(_each, "natural")
    moments = partialmethod(_each, "moments")
    from_mean = partialmethod(_each, "from_mean")
    standard = partialmethod(_each, "standard")
    composed = partialmethod(_each, "composed")
    to_coordinates_of = partialmethod(_each, "to_coordinates_of")
    from_coordinates_of = partialmethod(_each, "from_coordinates_of")
    log_partition = partialmethod(_total, "log_partition")
    entropy = partialmethod(_total, "entropy")
    kl = partialmethod(_total, "kl")

    @property
    def of_normals(self) -> bool:
        return all(family.of_normals for _, family in self.members.values())

    def statistics(self, z: Array) -> Statistics:
        return self._each("statistics", self._cut(z))

    def increment(self, z: Array, u: Array) -> Statistics:
        return self._each("increment", self._cut(z), self._cut(u))

    def log_base(self, z: Array) -> Array:
        return self._total("log_base", self._cut(z))

    def noise(self, key: Array, n: int) -> Parts:
        if self.of_normals:
            # One draw for all members: each draw is a program to compile.
            return self.from_normals(jax.random.normal(key, (n, self.dim)))
        keys = jax.random.split(key, len(self.members))
        each = zip(self.members.items(), keys, strict=True)
        return {name: family.noise(key, n) for (name, (_, family)), key in each}

    def from_normals(self, normals: Array) -> Parts:
        stops = np.cumsum([family.dim for _, family in self.members.values()])
        return {
            name: family.from_normals(normals[:, stop - family.dim : stop])
            for (name, (_, family)), stop in zip(self.members.items(), stops, strict=True)
        }

    def draw(self, psi: Ordinary, noise: Parts) -> Array:
        return self.join(self._each("draw", psi, noise))

    def centre(self, psi: Ordinary) -> Array:
        return self.join(self._each("centre", psi))

    def mean_and_sd(self, psi: Ordinary) -> tuple[Array, Array]:
        parts = self._each("mean_and_sd", psi)
        means, sds = ({name: part[i] for name, part in parts.items()} for i in (0, 1))
        return self.join(means), self.join(sds)

    def proper(self, eta: Natural) -> Array:
        return jnp.stack(list(self._each("proper", eta).values())).all()

    def fit(self, f: Callable[[Array], Array]) -> Natural:
        zero = jnp.zeros(self.dim)
        return {
            name: family.fit(partial(lambda index, z: f(zero.at[index].set(z)), index))
            for name, (index, family) in self.members.items()
        }

    def dual_gradient(self, f: Callable[[Ordinary], Array], eta: Natural) -> Statistics:
        # One gradient for all members. The dual gradient is linear in it, so each member computes
        # its own from a linear function with that gradient.
        gradient = jax.grad(f)(self.ordinary(eta))
        return {
            name: family.dual_gradient(partial(inner, gradient[name]), eta[name])
            for name, (_, family) in self.members.items()
        }

    def move(self, psi: Ordinary, gradient: Statistics) -> Array:
        parts = self._each("move", psi, gradient)
        halves = {name: jnp.split(part, 2) for name, part in parts.items()}
        means, scales = ({name: half[i] for name, half in halves.items()} for i in (0, 1))
        return jnp.concatenate([self.join(means), self.join(scales)])

    def log_density(self, eta: Natural, z: Array) -> Array:
        return self._total("log_density", eta, self._cut(z))

    def from_derivatives(self, z: Array, gradient: Array, curvature: Array) -> Natural:
        blocks = {name: curvature[np.ix_(at, at)] for name, at in self.places.items()}
        return self._each("from_derivatives", self._cut(z), self._cut(gradient), blocks)

    def marginal(
        self, eta: Natural, index: Index, shape: tuple[int, ...], event_dim: int = 0
    ) -> Distribution:
        wanted = np.arange(self.dim)[index]
        for name, places in self.places.items():
            if np.isin(wanted, places).all():
                sorter = np.argsort(places)
                positions = sorter[np.searchsorted(places, wanted, sorter=sorter)]
                return self.members[name][1].marginal(eta[name], positions, shape, event_dim)
        raise ValueError(f"no single member of {list(self.members)} has the coordinates {index}.")
