"""The interface of an exponential family, and the computations that are the same for all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from numpyro.distributions import Distribution

from numpyro_fed import linalg
from numpyro_fed.trees import all_finite

Natural = dict[str, Any]  # eta: natural parameters, or statistics, whose inner product counts
Ordinary = dict[str, Any]  # psi: unconstrained ordinary parameters, for optimisers
Tree = dict[str, Any]
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
    name : str
        The family's name in error messages.
    """

    dim: int
    name: ClassVar[str]

    @property
    def of_normals(self) -> bool:
        """Return whether the noise of a draw is ``dim`` standard normals and nothing else."""
        return False

    @abstractmethod
    def statistics(self, z: Array) -> Tree:
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
    def moments(self, psi: Ordinary) -> Tree:
        """Return the mean parameters ``E_q[T]``, which are the gradient of ``A``."""

    @abstractmethod
    def from_mean(self, mu: Tree) -> Natural:
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
    def spread(self, psi: Ordinary) -> tuple[Array, Array]:
        """Return the means (dim,) and the standard deviations (dim,) of ``z``."""

    @abstractmethod
    def fit(self, f: Callable[[Array], Array]) -> Natural:
        """Return the natural parameters of ``f(z) = c + <eta, T(z)>``, from its derivatives."""

    @abstractmethod
    def dual_gradient(self, f: Callable[[Ordinary], Array], eta: Natural) -> Tree:
        """Return the gradient of ``f(psi)`` in ``mu``: the natural gradient in ``eta``."""

    @abstractmethod
    def kl(self, eta_q: Natural, eta_p: Natural) -> Array:
        """Return the Kullback-Leibler divergence: see :func:`kl`."""

    @abstractmethod
    def marginal(
        self, eta: Natural, index: Index, shape: tuple[int, ...], event_dim: int
    ) -> Distribution:
        """Return the distribution of ``z[index]``, which is one site: see :func:`marginal`."""

    def from_normals(self, normals: Array) -> Eps:
        """Return standard normals (n, dim) as the noise of ``n`` draws, if :attr:`of_normals`."""
        raise TypeError(f"a draw of the {self.name} family takes more than {self.dim} normals.")

    def increment(self, z: Array, u: Array) -> Tree:
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
        """Return the log density: see :func:`log_density`."""
        return self.log_base(z) + inner(eta, self.statistics(z)) - self.log_partition(eta)

    def move(self, psi: Ordinary, gradient: Tree) -> Array:
        """Return how far a full natural-gradient step would move ``q``, to first order (2 dim,).

        The first half has the moves of the means, in standard deviations, the second those of log
        standard deviations. ``gradient`` is the one in ``psi``.
        """
        eta = self.natural(psi)
        step = self.dual_gradient(lambda psi: inner(gradient, psi), eta)
        return move_along(self, eta, step)

    def around(self, z: Array, gradient: Array, curvature: Array) -> Natural:
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

    def moved(self, psi: Ordinary, step: Ordinary) -> Ordinary:
        """Return the member, in ``z``, that is ``step`` in the coordinates of ``psi``."""
        return step

    def into(self, psi: Ordinary, eta: Natural) -> Natural:
        """Return natural parameters in the coordinates of ``psi`` from those in ``z``."""
        return eta

    def out_of(self, psi: Ordinary, eta: Natural) -> Natural:
        """Return natural parameters in ``z`` from those in the coordinates of ``psi``."""
        return eta


def location_and_log_scale(family: Family[Any], eta: Tree) -> tuple[Array, Array]:
    """Return the means (dim,) and log standard deviations (dim,) of ``z``."""
    mean, sd = family.spread(family.ordinary(eta))
    return mean, jnp.log(sd)


def move_along(family: Family[Any], eta: Tree, step: Tree) -> Array:
    """Return the move (2 dim,) of ``q`` along ``step`` from ``eta``, as in :meth:`Family.move`."""
    # Forward mode: one step is a single direction, whatever the dimension.
    (_, log_sd), (mean, log_scale) = jax.jvp(
        lambda eta: location_and_log_scale(family, eta), (eta,), (step,)
    )
    return jnp.concatenate([mean / jnp.exp(log_sd), log_scale])


def inner(a: Tree, b: Tree) -> Array:
    r"""Return the inner product of two trees of one structure, summed over all leaves.

    Examples
    --------
    >>> from numpyro_fed import expfam
    >>> float(expfam.inner({"first": 1.0, "second": 2.0}, {"first": 3.0, "second": 4.0}))
    11.0
    """
    return sum(jax.tree.leaves(jax.tree.map(lambda x, y: jnp.sum(x * y), a, b)), jnp.zeros(()))


def log_density(family: Family[Any], eta: Tree, z: Array) -> Array:
    r"""Return the log density of the family with respect to ``dz``.

    .. math::
        \log q(z) = \log h(z) + \langle \eta, T(z) \rangle - A(\eta)

    Gaussians compute it from their standardised residuals: the three terms cancel far from zero.

    Parameters
    ----------
    family : Family
    eta : tree
        Natural parameters.
    z : (dim,) array

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from numpyro_fed import expfam
    >>> standard = {"first": jnp.zeros(1), "second": -0.5 * jnp.ones(1)}
    >>> round(float(expfam.log_density(expfam.gaussian(1), standard, jnp.zeros(1))), 4)
    -0.9189
    """
    return family.log_density(eta, z)


def kl(family: Family[Any], eta_q: Tree, eta_p: Tree) -> Array:
    r"""Return the Kullback-Leibler divergence between two members of a family.

    .. math::
        KL(q \| p) = A(\eta_p) - A(\eta_q) - \langle \eta_p - \eta_q, \mu(\eta_q) \rangle

    Gaussians compute it from their roots, other families by NumPyro's formula.

    Parameters
    ----------
    family : Family
    eta_q, eta_p : tree
        Natural parameters, both proper.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from numpyro_fed import expfam
    >>> q = {"first": jnp.zeros(1), "second": -0.5 * jnp.ones(1)}
    >>> p = {"first": jnp.ones(1), "second": -0.5 * jnp.ones(1)}
    >>> float(expfam.kl(expfam.gaussian(1), q, p))
    0.5
    """
    return family.kl(eta_q, eta_p)


def marginal(
    family: Family[Any], eta: Tree, index: Index, shape: tuple[int, ...], event_dim: int = 0
) -> Distribution:
    """Return the marginal distribution of one site, whose coordinates are ``z[index]``.

    Parameters
    ----------
    family : Family
    eta : tree
        Natural parameters.
    index : slice or int array
        The site's coordinates: all those of a Gamma, Beta, Dirichlet or categorical member, or any
        part of a Gaussian.
    shape : tuple of int
        The site's shape in unconstrained space.
    event_dim : int
        The number of the site's axes that belong to one event.

    Returns
    -------
    Distribution
        A Gaussian's marginal is in unconstrained space: a ``MultivariateNormal`` over the last axis
        if the family is full and that axis is the event, else independent ``Normal``. Marginals of
        other families are over ``x`` itself.

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
    >>> q = expfam.marginal(family, eta, slice(1, 3), (2,), event_dim=1)
    >>> [round(float(v), 3) for v in q.variance]
    [1.5, 1.0]
    """
    return family.marginal(eta, index, shape, event_dim)
