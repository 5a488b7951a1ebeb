"""Closed-form substitutes for Gaussian priors: independent blocks, low rank, separators.

Given what the silos share, each writes a block's entries as a function of standard normals (by a
Cholesky factor of the block's covariance or precision). Hyperparameters and local latents are then
independent a priori.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions import Distribution

from numpyro_fed.basics.errors import ModelError, positive_int
from numpyro_fed.basics.trees import fresh
from numpyro_fed.numerics import linalg
from numpyro_fed.sigma.fields import (
    DenseField,
    Field,
    Leroux,
    Spectrum,
    add_jitter,
    adjacency_of,
    field_of,
)
from numpyro_fed.text.silo_plate import unwrapped
from numpyro_fed.text.substitution import Blocks, block_name, site_of, trace_text

Shared = TypeVar("Shared")
LowRankPart = tuple[Field, Array, Array]  # a field, its loadings, and its mean given z_G
BorderPart = tuple[Array, Array, Array]  # precision and mean of all areas, values at borders
# The share of the variance that the shared part explains by default: blocks keep their own exact
# covariance, and 5 % of the variance is what is cut between them.
VARIANCE_SHARE = 0.95
# The largest default rank. Each shared coefficient is a global latent. With 150 of them the
# posterior of 3,109 counties is within 0.08 to 0.12 sd of the true one (docs/results/sigma.md).
MAX_RANK = 150
# Draws of the hyperparameters, over which covariances are averaged before directions are chosen.
# Each needs one covariance of all entries, once before a run.
PRIOR_DRAWS = 32


@dataclass(frozen=True)
class FieldPrior(Generic[Shared]):
    """A Gaussian field divided into blocks. The base class of the closed forms."""

    site: str
    blocks: Blocks
    spectrum: Spectrum | None = field(repr=False)
    adjacency: np.ndarray | None = field(repr=False)  # of a map of areas

    def whole(self, shared: Shared, parts: Array, which: Array) -> Array:
        """Return the site (size,) from its blocks."""
        return self.blocks.assemble(parts, which)

    def suits(self, model: Callable[..., object], silos: Sequence[Mapping[str, Any]]) -> None:
        """Refuse a text in which, on the silos' data, areas have other neighbours."""
        if self.adjacency is None:
            return
        for silo in silos:
            given = {k: v for k, v in silo.items() if k != block_name(self.site)}
            areas = adjacency_of(site_of(model, self.site, given), self.site)
            if not np.array_equal(np.asarray(areas), self.adjacency):
                raise ModelError(
                    f"the areas of '{self.site}' have other neighbours here than where its prior "
                    "was fitted: fit one anew."
                )

    def _noise(self, which: Array) -> Array:
        """Sample standard normals for the entries of blocks (blocks, largest)."""
        normal = dist.Normal(0, 1).expand([self.blocks.largest]).to_event(1)
        return numpyro.sample(f"{self.site}/noise", normal.expand([which.shape[0]]))


def _read_site(
    model: Callable[..., object],
    site: str,
    blocks: Sequence[Any],
    model_kwargs: Mapping[str, Any] | None,
) -> tuple[Blocks, Spectrum | None, np.ndarray | None]:
    """Return a site's blocks, and its spectrum and adjacency if it is a map; all checked."""
    fn = site_of(model, site, dict(model_kwargs or {}))
    spectrum = Spectrum.of(fn, site)
    field_of(fn, site, spectrum)  # refuses distributions without a closed form
    return Blocks.read(blocks, fn.event_shape[0], site), spectrum, adjacency_of(fn, site)


@dataclass(frozen=True)
class BlockPrior(FieldPrior[Field]):
    r"""Independent blocks, each with its exact marginal distribution.

    .. math::
        \theta_j = \mu_j + L_j \epsilon_j, \qquad L_j L_j' = K_{jj}(\phi)

    Covariances between blocks are lost, and nothing else. Build it by :meth:`fit`.

    Examples
    --------
    >>> import jax.numpy as jnp, numpy as np, numpyro, numpyro.distributions as dist
    >>> import numpyro_fed as nf
    >>> def model(area):
    ...     cov = 0.5 * jnp.eye(4) + 0.5
    ...     theta = numpyro.sample("theta", dist.MultivariateNormal(0.0, cov))
    ...     with nf.silo_plate("row", area.shape[0]):
    ...         numpyro.sample("y", dist.Normal(theta[area], 1), obs=jnp.zeros(area.shape[0]))
    >>> prior = nf.BlockPrior.fit(
    ...     model, "theta", [[0, 1], [2, 3]], model_kwargs=dict(area=np.array([0])))
    >>> prior.blocks.number
    2
    """

    @classmethod
    def fit(
        cls,
        model: Callable[..., object],
        site: str,
        blocks: Sequence[Any],
        *,
        model_kwargs: Mapping[str, Any] | None = None,
    ) -> BlockPrior:
        """Return the prior of a site with independent blocks.

        Parameters
        ----------
        model : callable
            A NumPyro model.
        site : str
            A latent site of the model: ``MultivariateNormal``, ``CAR`` or ``nf.fields.Leroux``.
        blocks : sequence of arrays of int
            The entries of each silo; each entry in one of them.
        model_kwargs : dict, optional
            Arguments with which the model can be run: the data of some silo.

        Raises
        ------
        ModelError, DataError
            For a site or blocks that cannot be split so.
        """
        return cls(site, *_read_site(model, site, blocks, model_kwargs))

    def shared(self, fn: Distribution, phi: Mapping[str, Array]) -> Field:
        """Return the field at its hyperparameters. Nothing is shared besides."""
        return field_of(fn, self.site, self.spectrum)

    def local(
        self, shared: Field, fn: Distribution, phi: Mapping[str, Array], which: Array
    ) -> Array:
        """Sample some blocks (blocks, largest)."""
        noise = self._noise(which)

        def entries(block: Array, eps: Array) -> Array:
            rows, present = self.blocks.rows(block)
            L = linalg.cholesky(add_jitter(shared.covariance_of(rows, present)))
            return shared.loc[rows] + L @ eps

        return jax.vmap(entries)(which, noise)


@dataclass(frozen=True)
class LowRankPrior(FieldPrior[LowRankPart]):
    r"""A shared part of low rank, and the exact residual covariance within each block.

    .. math::
        \theta_j = \mu_j + A_j(\phi) z_G + L_j \epsilon_j, \qquad
        A = K V (V' K V)^{-1/2}, \quad L_j L_j' = K_{jj} - A_j A_j'

    The columns of ``V`` are the directions of most variance, averaged over the prior of
    :math:`\phi`; for areas they are the smoothest eigenvectors. The covariance within each block is
    exact, and that between blocks is :math:`A_i A_j'`. Build it by :meth:`fit`.

    Attributes
    ----------
    rank : int
        The number of shared coefficients.

    References
    ----------
    The probabilistic principal components of Hassan et al. (2024), arXiv 2405.16055, section 4.2.3,
    with full blocks in the place of a diagonal.
    """

    basis: np.ndarray = field(repr=False)

    @property
    def rank(self) -> int:
        """Return the number of shared coefficients."""
        return self.basis.shape[1]

    @classmethod
    def fit(
        cls,
        model: Callable[..., object],
        site: str,
        blocks: Sequence[Any],
        *,
        rank: int | None = None,
        model_kwargs: Mapping[str, Any] | None = None,
    ) -> LowRankPrior:
        """Return the prior of a site with a shared part along its main directions.

        Other arguments are those of :meth:`BlockPrior.fit`.

        Parameters
        ----------
        rank : int, optional
            The rank of the shared part. By default it explains 95 % of the variance, and is 150 at
            most.
        """
        divided, spectrum, areas = _read_site(model, site, blocks, model_kwargs)
        if rank is not None:
            positive_int("rank", rank)
        kwargs, size = dict(model_kwargs or {}), divided.size

        # The average of covariances or of variances along a map's eigenvectors. Summed by a scan:
        # all covariances at once would take 32 times the memory.
        def add(total: Array, key: Array) -> tuple[Array, None]:
            gaussian = field_of(trace_text(model, key, kwargs)[site]["fn"], site, spectrum)
            one = gaussian.cov if isinstance(gaussian, DenseField) else gaussian.variances
            return total + one, None

        keys = jax.random.split(jax.random.key(0), PRIOR_DRAWS)
        zero = jnp.zeros((size, size) if spectrum is None else size)
        total = np.asarray(jax.jit(lambda: jax.lax.scan(add, zero, keys)[0])(), float)
        # Directions as columns, and the variance that each explains, the most first.
        if spectrum is None:
            values, vectors = np.linalg.eigh(total)
            variances = np.maximum(values, 0)
        else:
            # Columns of D^{-1/2} U do not have length one.
            vectors, variances = spectrum.vectors, total * (spectrum.vectors**2).sum(0)
        vectors, variances = vectors[:, ::-1], variances[::-1]
        explained = np.cumsum(variances) / variances.sum()
        enough = int(np.searchsorted(explained, VARIANCE_SHARE)) + 1
        columns = min(rank or min(enough, MAX_RANK), size)
        return cls(site, divided, spectrum, areas, vectors[:, :columns])

    def shared(self, fn: Distribution, phi: Mapping[str, Array]) -> LowRankPart:
        """Return the field with its loadings, and sample the coefficients that silos share."""
        gaussian = field_of(fn, self.site, self.spectrum)
        normal = dist.Normal(0, 1).expand([self.rank]).to_event(1)
        A = gaussian.loadings(self.basis)
        mean = gaussian.loc + A @ numpyro.sample(f"{self.site}/z_G", normal)
        return gaussian, A, mean

    def local(
        self, shared: LowRankPart, fn: Distribution, phi: Mapping[str, Array], which: Array
    ) -> Array:
        """Sample some blocks (blocks, largest), given the shared part."""
        gaussian, A, mean = shared
        noise = self._noise(which)

        def entries(block: Array, eps: Array) -> Array:
            rows, present = self.blocks.rows(block)
            A_j = jnp.where(present[:, None], A[rows], 0.0)
            cov = gaussian.covariance_of(rows, present)
            # What the shared part leaves may be nearly singular: its rounding is that of cov.
            return mean[rows] + linalg.cholesky(add_jitter(cov - A_j @ A_j.T, cov)) @ eps

        return jax.vmap(entries)(which, noise)


@dataclass(frozen=True)
class SeparatorPrior(FieldPrior[BorderPart]):
    r"""The exact prior of a Markov field: areas at borders are shared, interiors are independent.

    ``B`` are the areas that have a neighbour in another block, and ``I_j`` the other areas of block
    ``j``:

    .. math::
        p(\theta) = p(\theta_B) \prod_j p(\theta_{I_j} \mid \theta_B), \qquad
        P_B = Q_{BB} - \sum_j Q_{B I_j} Q_{I_j I_j}^{-1} Q_{I_j B}.

    The areas at borders are global latents, which all silos know. Build it by :meth:`fit`.

    Attributes
    ----------
    border : int array
        The areas that are shared.

    References
    ----------
    Rue, Held (2005), Gaussian Markov Random Fields, sections 2.2 and 2.4.
    """

    border: np.ndarray = field(repr=False)
    # (blocks, most) positions in ``border`` of each interior's neighbours, padded by its length
    near: np.ndarray = field(repr=False)

    @classmethod
    def fit(
        cls,
        model: Callable[..., object],
        site: str,
        blocks: Sequence[Any],
        *,
        model_kwargs: Mapping[str, Any] | None = None,
    ) -> SeparatorPrior:
        """Return the prior of a map with its areas at borders shared.

        Arguments are those of :meth:`BlockPrior.fit`.

        Raises
        ------
        ModelError
            If the site is neither ``CAR`` nor :class:`~numpyro_fed.fields.Leroux`.
        """
        fn = site_of(model, site, dict(model_kwargs or {}))
        divided, W = Blocks.read(blocks, fn.event_shape[0], site), adjacency_of(fn, site)
        if W is None:
            raise ModelError(
                f"'{site}' is a {type(unwrapped(fn)).__name__}, in which all entries may be "
                "neighbours: of CAR and Leroux alone it is known which are not. Use "
                "nf.LowRankPrior or nf.SigmaPrior."
            )
        apart = divided.block_of[:, None] != divided.block_of
        at_border = (W * apart).any(1)
        border = np.flatnonzero(at_border)
        interiors = [entries[~at_border[entries]] for entries in divided.places]
        neighbours = [np.flatnonzero(W[entries][:, border].any(0)) for entries in interiors]
        near = np.full((len(neighbours), max(max(map(len, neighbours)), 1)), len(border))
        for row, places in zip(near, neighbours, strict=True):
            row[: len(places)] = places
        return cls(site, Blocks.from_places(interiors, divided.block_of), None, W, border, near)

    def shared(self, fn: Distribution, phi: Mapping[str, Array]) -> BorderPart:
        """Return precision and mean of all areas, and sample the areas at borders."""
        areas = unwrapped(fn)
        if not isinstance(areas, dist.CAR | Leroux):
            raise ModelError(
                f"'{self.site}' is a {type(areas).__name__} here, and was a CAR or Leroux where "
                "this was fitted."
            )
        W = fresh(np.asarray(self.adjacency))
        alpha, degrees = areas.correlation, W.sum(1)
        diagonal = 1 - alpha + alpha * degrees if isinstance(areas, Leroux) else degrees
        Q = areas.conditional_precision * (jnp.diag(diagonal) - alpha * W)
        loc = jnp.broadcast_to(areas.loc, areas.event_shape)
        if not len(self.border):
            return Q, loc, jnp.zeros(0)

        def schur_term(block: Array) -> tuple[Array, Array]:
            near = fresh(self.near)[block]
            L, across = self._parts(Q, block)
            half = linalg.solve(L, across)
            return near, half.T @ half

        # The marginal precision P_B. Each interior reaches the few areas next to it alone: small
        # terms are computed side by side and added in place. Padding lies beyond the matrix and is
        # dropped.
        near, terms = jax.vmap(schur_term)(jnp.arange(self.blocks.number))
        border = fresh(self.border)
        P = Q[border[:, None], border]
        P = P.at[near[:, :, None], near[:, None, :]].add(-terms, mode="drop")
        normal = dist.MultivariateNormal(loc[border], precision_matrix=P)
        return Q, loc, numpyro.sample(f"{self.site}/border", normal)

    def _parts(self, Q: Array, block: Array) -> tuple[Array, Array]:
        """Return the Cholesky factor of Q_II of a block's interior, and Q_IB to its neighbours."""
        rows, present = self.blocks.rows(block)
        near = fresh(self.near)[block]
        is_neighbour = near < len(self.border)
        areas = jnp.append(fresh(self.border), 0)[near]
        within = jnp.where(present & present[:, None], Q[rows[:, None], rows], jnp.eye(len(rows)))
        across = jnp.where(present[:, None] & is_neighbour, Q[rows[:, None], areas], 0.0)
        return linalg.cholesky(within), across

    def local(
        self, shared: BorderPart, fn: Distribution, phi: Mapping[str, Array], which: Array
    ) -> Array:
        """Sample interiors (blocks, largest), given the areas at borders."""
        Q, loc, at_border = shared
        noise = self._noise(which)

        # theta_I = mu_I - Q_II^-1 Q_IB (theta_B - mu_B) + L^-T eps, with Q_II = L L': both terms
        # after the mean are one solve with L'.
        def entries(block: Array, eps: Array) -> Array:
            rows, _ = self.blocks.rows(block)
            L, across = self._parts(Q, block)
            deviation = jnp.append(at_border - loc[fresh(self.border)], 0.0)
            shift = linalg.solve(L, across @ deviation[fresh(self.near)[block]])
            return loc[rows] + linalg.solve(L, eps - shift, transposed=True)

        return jax.vmap(entries)(which, noise)

    def whole(self, shared: BorderPart, parts: Array, which: Array) -> Array:
        """Return the site (size,), areas at borders included."""
        whole, (_, _, at_border) = self.blocks.assemble(parts, which), shared
        return whole.at[fresh(self.border)].set(at_border) if len(self.border) else whole
