"""What an exponential family is here: a tuple of pure functions of its parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from numpyro.distributions import Distribution

from numpyro_fed import linalg

Natural = Any  # eta: a tree of natural parameters, or of statistics, whose inner product counts
Ordinary = Any  # psi: a tree of unconstrained ordinary parameters, for optimisers
Tree = Any
Index = slice | np.ndarray


class Family(NamedTuple):
    r"""An exponential family of a flat vector ``z`` of unconstrained numbers.

    .. math::
        q(z) = h(z) \exp(\langle \eta, T(z) \rangle - A(\eta)),

    a density with respect to ``dz``. For a site ``x`` on a constrained support, ``z`` is ``x``
    mapped by the inverse of NumPyro's ``biject_to``, and ``h`` holds the log-determinant of that
    bijection. ``eta``, ``mu`` and ``T(z)`` are trees of one structure with ``<a, b>`` as in
    :func:`inner`; ``psi`` are unconstrained ordinary parameters, for optimisers.

    Attributes
    ----------
    name : str
    dim : int
        Length of ``z``.
    statistics : z (dim,) -> T
    increment : (z, u) -> T
        ``T(z + u) - T(z)``, without the cancellation of the two where ``T`` is a polynomial.
    log_base : z -> ()
        ``log h(z)``.
    log_partition : eta -> ()
        ``A(eta)``.
    ordinary : eta -> psi
    natural : psi -> eta
    moments : psi -> mu
        The mean parameters ``E_q[T]``, which are the gradient of ``A``.
    from_mean : mu -> eta
    entropy : psi -> ()
        ``-E_q[log q(z) - log h(z)] = A(eta) - <eta, mu>``.
    noise : (key, n) -> noise
        What ``n`` draws take, with a leading axis ``n``: standard normals, or keys.
    from_normals : (n, dim) -> noise, or None
        Standard normals as noise, where a draw takes ``dim`` of them and nothing else.
    draw : (psi, noise) -> z
        One draw from the noise of one, with gradients to ``psi``.
    centre : psi -> (dim,)
        A central ``z``: the mean of a Gaussian, else the mean of ``x``, mapped.
    spread : psi -> ((dim,), (dim,))
        Mean and standard deviation of each number of ``z``.
    proper : eta -> () bool
        Whether ``eta`` is normalisable, and its mean and scales are finite in the precision in use.
    fit : f -> eta
        The natural parameters of a function ``f(z) = c + <eta, T(z)>``, from its derivatives.
    dual_gradient : (f, eta) -> tree like eta
        The gradient of a function ``f(psi)`` with respect to ``mu``, which is the natural gradient
        with respect to ``eta``.
    move : (psi, gradient) -> (2 dim,)
        How far a full natural-gradient step would move, to first order, the mean of each number of
        ``z``, in standard deviations, and each log standard deviation; ``gradient`` is in ``psi``.
    log_density : (eta, z) -> ()
    kl : (eta_q, eta_p) -> ()
    marginal : (eta, index, shape, event_dim) -> Distribution
        Of the coordinates ``z[index]``, which are one site: see :func:`marginal`.
    around : (z, gradient, curvature) -> eta
        Natural parameters of a function with this gradient (dim,) and negative Hessian (dim, dim)
        at ``z``; with its diagonal, or what comes near it, where the family has no more.
    standard : psi -> psi
        The member itself in its own coordinates: a standard normal distribution for Gaussians.
        Other families have no coordinates but ``z``, and these four functions leave them alone.
    moved : (psi, step) -> psi
        The member that is ``step`` in the coordinates of ``psi``.
    into, out_of : (psi, eta) -> eta
        Natural parameters in the coordinates of ``psi``, from those in ``z``, and back. Linear in
        ``eta``.
    """

    name: str
    dim: int
    statistics: Callable[[Array], Tree]
    increment: Callable[[Array, Array], Tree]
    log_base: Callable[[Array], Array]
    log_partition: Callable[[Tree], Array]
    ordinary: Callable[[Tree], Tree]
    natural: Callable[[Tree], Tree]
    moments: Callable[[Tree], Tree]
    from_mean: Callable[[Tree], Tree]
    entropy: Callable[[Tree], Array]
    noise: Callable[[Array, int], Tree]
    from_normals: Callable[[Array], Tree] | None
    draw: Callable[[Tree, Tree], Array]
    centre: Callable[[Tree], Array]
    spread: Callable[[Tree], tuple[Array, Array]]
    proper: Callable[[Tree], Array]
    fit: Callable[[Callable[[Array], Array]], Tree]
    dual_gradient: Callable[[Callable[[Tree], Array], Tree], Tree]
    move: Callable[[Tree, Tree], Array]
    log_density: Callable[[Tree, Array], Array]
    kl: Callable[[Tree, Tree], Array]
    marginal: Callable[[Tree, Index, tuple[int, ...], int], Distribution]
    around: Callable[[Array, Array, Array], Tree]
    standard: Callable[[Tree], Tree] = lambda psi: psi
    moved: Callable[[Tree, Tree], Tree] = lambda psi, step: step
    into: Callable[[Tree, Tree], Tree] = lambda psi, eta: eta
    out_of: Callable[[Tree, Tree], Tree] = lambda psi, eta: eta


def around(
    statistics: Callable[[Array], Tree], z: Array, gradient: Array, curvature: Array
) -> Tree:
    """Natural parameters by least squares, for gradient and diagonal of the negative Hessian."""
    T, unravel = ravel_pytree(statistics(z))

    def flat(z: Array) -> Array:
        return ravel_pytree(statistics(z))[0]

    slopes = jax.jacfwd(flat)(z)  # (statistics, dim)
    bends = jnp.diagonal(jax.jacfwd(jax.jacfwd(flat))(z), axis1=1, axis2=2)
    wanted = jnp.concatenate([gradient, -jnp.diagonal(curvature)])
    found = linalg.least_squares(jnp.concatenate([slopes, bends], 1).T, wanted)
    return unravel(found.astype(T.dtype))


def usable(mean: Array, sd: Array) -> Array:
    """Whether means are finite, and standard deviations finite and positive."""
    return (jnp.isfinite(mean) & jnp.isfinite(sd) & (sd > 0)).all()


def location_and_log_scale(family: Family, eta: Tree) -> tuple[Array, Array]:
    """Means and log standard deviations of each number of ``z``."""
    mean, sd = family.spread(family.ordinary(eta))
    return mean, jnp.log(sd)


def move_along(family: Family, eta: Tree, step: Tree) -> Array:
    """How far ``step`` from ``eta`` moves ``q``, as :attr:`Family.move` measures it."""
    (_, log_sd), (mean, log_scale) = jax.jvp(
        lambda eta: location_and_log_scale(family, eta), (eta,), (step,)
    )
    return jnp.concatenate([mean / jnp.exp(log_sd), log_scale])


def inner(a: Tree, b: Tree) -> Array:
    r"""The inner product of two trees of one structure, summed over all leaves.

    Examples
    --------
    >>> from numpyro_fed import expfam
    >>> float(expfam.inner({"first": 1.0, "second": 2.0}, {"first": 3.0, "second": 4.0}))
    11.0
    """
    return sum(jax.tree.leaves(jax.tree.map(lambda x, y: jnp.sum(x * y), a, b)), jnp.zeros(()))


def log_density(family: Family, eta: Tree, z: Array) -> Array:
    r"""The log density of the family with respect to ``dz``.

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


def kl(family: Family, eta_q: Tree, eta_p: Tree) -> Array:
    r"""The Kullback-Leibler divergence between two members of a family.

    .. math::
        KL(q \| p) = A(\eta_p) - A(\eta_q) - \langle \eta_p - \eta_q, \mu(\eta_q) \rangle

    Computed by NumPyro's formula for the distribution where there is one.

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
    family: Family, eta: Tree, index: Index, shape: tuple[int, ...], event_dim: int = 0
) -> Distribution:
    """The marginal of the coordinates ``z[index]`` that are one site, as a distribution.

    Parameters
    ----------
    family : Family
    eta : tree
        Natural parameters.
    index : slice or int array
        The site's coordinates. The whole of a Gamma, Beta, Dirichlet or categorical member; any
        part of a Gaussian.
    shape : tuple of int
        The site's shape in unconstrained space.
    event_dim : int
        How many of the site's axes belong to one event.

    Returns
    -------
    Distribution
        In unconstrained space for a Gaussian: a ``MultivariateNormal`` over the last axis where
        the family is full and that is the event, else independent ``Normal``. Over ``x`` itself
        for the other families.

    Raises
    ------
    ValueError
        For coordinates that no single member has, and for a part of a member that is not Gaussian.

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
