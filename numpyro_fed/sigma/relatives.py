"""Gaussian priors that do not tie silos together beyond what they share, in closed form."""

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

from numpyro_fed import linalg
from numpyro_fed.errors import ModelError, positive_int
from numpyro_fed.model.feasible import unwrapped
from numpyro_fed.model.substitution import Blocks, block_name, site_of, trace_text
from numpyro_fed.sigma.fields import Leroux
from numpyro_fed.sigma.gaussian import (
    Dense,
    Field,
    Spectrum,
    adjacency_of,
    field_of,
    lifted,
    precision_of,
    same_areas,
)
from numpyro_fed.trees import fresh

Shared = TypeVar("Shared")
LowRank = tuple[Field, Array, Array]  # what the shared coefficients say of all entries
Areas = tuple[Array, Array, Array]  # precision and mean of all, and the areas at borders
KEPT = 0.95  # of the variance, by the shared part
MOST = 150  # shared coefficients, by default
PRIOR_DRAWS = 32  # of hyperparameters, over which a basis is good on average


@dataclass(frozen=True)
class ClosedForm(Generic[Shared]):
    """A Gaussian field, cut into blocks."""

    site: str
    blocks: Blocks
    spectrum: Spectrum | None = field(repr=False)

    def whole(self, shared: Shared, parts: Array, which: Array) -> Array:
        """Return the site from its blocks."""
        return self.blocks.assemble(parts, which)

    def suits(self, model: Callable[..., object], silos: Sequence[Mapping[str, Any]]) -> None:
        """Refuse a text, run on what silos hold, in which areas have other neighbours."""
        if self._areas is None:
            return
        for silo in silos:
            given = {k: v for k, v in silo.items() if k != block_name(self.site)}
            same_areas(site_of(model, self.site, given), self.site, self._areas)

    @property
    def _areas(self) -> np.ndarray | None:
        return None if self.spectrum is None else self.spectrum.adjacency

    def _field(self, fn: Distribution) -> Field:
        return field_of(fn, self.site, self.spectrum)

    def _noise(self, name: str, which: Array) -> Array:
        """Sample standard normals for the entries of blocks (blocks, largest)."""
        normal = dist.Normal(0, 1).expand([self.blocks.largest]).to_event(1)
        return numpyro.sample(f"{self.site}/{name}", normal.expand([which.shape[0]]))


def _started(
    model: Callable[..., object],
    site: str,
    blocks: Sequence[Any],
    model_kwargs: Mapping[str, Any] | None,
) -> tuple[Distribution, Blocks, Spectrum | None]:
    fn = site_of(model, site, dict(model_kwargs or {}))
    spectrum = Spectrum.of(fn, site)
    field_of(fn, site, spectrum)
    return fn, Blocks.read(blocks, fn.event_shape[0], site), spectrum


@dataclass(frozen=True)
class BlockPrior(ClosedForm[Field]):
    r"""Blocks that are independent, each with its own exact distribution.

    .. math::
        \theta_j = \mu_j + L_j \epsilon_j, \qquad L_j L_j' = K_{jj}(\phi)

    What ties blocks together is lost, and nothing else. Build it by :meth:`fit`.

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
        """Cut a site's prior into blocks.

        Parameters
        ----------
        model : callable
            A NumPyro model.
        site : str
            A latent site of it: ``MultivariateNormal``, ``CAR`` or ``nf.fields.Leroux``.
        blocks : sequence of arrays of int
            The entries of each silo; each entry in one of them.
        model_kwargs : dict, optional
            With which the text can be run: the data of some silo.

        Raises
        ------
        ModelError, DataError
            For a site or blocks that cannot be split so.
        """
        _, found, spectrum = _started(model, site, blocks, model_kwargs)
        return cls(site, found, spectrum)

    def shared(self, fn: Distribution, phi: Mapping[str, Array]) -> Field:
        """Return nothing but the field, with its hyperparameters."""
        return self._field(fn)

    def local(
        self, shared: Field, fn: Distribution, phi: Mapping[str, Array], which: Array
    ) -> Array:
        """Sample some blocks (blocks, largest)."""
        noise = self._noise("noise", which)

        def one(block: Array, eps: Array) -> Array:
            rows, there = self.blocks.rows(block)
            return shared.loc[rows] + linalg.cholesky(lifted(shared.among(rows, there))) @ eps

        return jax.vmap(one)(which, noise)


@dataclass(frozen=True)
class LowRankPrior(ClosedForm[LowRank]):
    r"""A shared part of low rank, and the exact residual covariance inside each block.

    .. math::
        \theta_j = \mu_j + A_j(\phi) z_G + L_j \epsilon_j, \qquad
        A = K V (V' K V)^{-1/2}, \quad L_j L_j' = K_{jj} - A_j A_j'

    ``V`` are the directions of most variance, averaged over the prior of :math:`\\phi`; for a CAR
    its smoothest eigenvectors. Each block's own covariance is exact, that between blocks is
    :math:`A_i A_j'`. Build it by :meth:`fit`.

    Attributes
    ----------
    rank : int
        How many shared coefficients there are.

    References
    ----------
    The probabilistic principal components of Hassan et al. (2024), arXiv 2405.16055, section 4.2.3,
    with full blocks in the place of a diagonal.
    """

    basis: np.ndarray = field(repr=False)

    @property
    def rank(self) -> int:
        """Return how many shared coefficients there are."""
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
        """Find the directions that silos share; other arguments as for :meth:`BlockPrior.fit`.

        Parameters
        ----------
        rank : int, optional
            Of the shared part. By default as many as hold 95 % of the variance, 150 at most.
        """
        _, found, spectrum = _started(model, site, blocks, model_kwargs)
        if rank is not None:
            positive_int("rank", rank)
        vectors, share = _directions(model, site, dict(model_kwargs or {}), spectrum)
        enough = int(np.searchsorted(np.cumsum(share) / share.sum(), KEPT)) + 1
        wanted = min(rank or min(enough, MOST), found.size)
        return cls(site, found, spectrum, vectors[:, :wanted])

    def shared(self, fn: Distribution, phi: Mapping[str, Array]) -> LowRank:
        """Return the field, what shared coefficients say of all entries, and their mean there."""
        known = self._field(fn)
        normal = dist.Normal(0, 1).expand([self.rank]).to_event(1)
        A = known.roots(self.basis)
        return known, A, known.loc + A @ numpyro.sample(f"{self.site}/z_G", normal)

    def local(
        self, shared: LowRank, fn: Distribution, phi: Mapping[str, Array], which: Array
    ) -> Array:
        """Sample some blocks (blocks, largest), given the shared part."""
        known, A, mean = shared
        noise = self._noise("noise", which)

        def one(block: Array, eps: Array) -> Array:
            rows, there = self.blocks.rows(block)
            own = jnp.where(there[:, None], A[rows], 0.0)
            cov = known.among(rows, there)
            return mean[rows] + linalg.cholesky(lifted(cov - own @ own.T, cov)) @ eps

        return jax.vmap(one)(which, noise)


def _directions(
    model: Callable[..., object], site: str, kwargs: dict[str, Any], spectrum: Spectrum | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return directions (n, n) of a site, and the variance of all entries that each holds.

    They are the principal components, or of areas the eigenvectors, the smoothest first.
    """

    def drawn(total: Array, key: Array) -> tuple[Array, None]:
        fn = trace_text(model, key, kwargs)[site]["fn"]
        known = field_of(fn, site, spectrum)
        return total + (known.cov if isinstance(known, Dense) else known.variances), None

    keys = jax.random.split(jax.random.key(0), PRIOR_DRAWS)
    size = site_of(model, site, kwargs).event_shape[0]
    none = jnp.zeros((size, size) if spectrum is None else size)
    found = np.asarray(jax.jit(lambda: jax.lax.scan(drawn, none, keys)[0])(), float)
    if spectrum is not None:
        held = found * (spectrum.vectors**2).sum(0)
        return spectrum.vectors[:, ::-1], held[::-1]
    values, vectors = np.linalg.eigh(found)
    return vectors[:, ::-1], np.maximum(values[::-1], 0)


@dataclass(frozen=True)
class SeparatorPrior(ClosedForm[Areas]):
    r"""The exact prior of a Markov field: areas at borders are shared, interiors independent.

    With ``B`` the areas that have a neighbour in another block and ``I_j`` the others of block
    ``j``,

    .. math::
        p(\theta) = p(\theta_B) \prod_j p(\theta_{I_j} \mid \theta_B), \qquad
        P_B = Q_{BB} - \sum_j Q_{B I_j} Q_{I_j I_j}^{-1} Q_{I_j B}.

    Build it by :meth:`fit`. Silos see the areas at all borders.

    Attributes
    ----------
    border : int array
        The areas that are shared.

    References
    ----------
    Rue, Held (2005), Gaussian Markov Random Fields, sections 2.2 and 2.4.
    """

    border: np.ndarray = field(repr=False)
    adjacency: np.ndarray = field(repr=False)
    near: np.ndarray = field(repr=False)  # of each block the places in the border next to it

    @classmethod
    def fit(
        cls,
        model: Callable[..., object],
        site: str,
        blocks: Sequence[Any],
        *,
        model_kwargs: Mapping[str, Any] | None = None,
    ) -> SeparatorPrior:
        """Find the areas at borders; arguments as for :meth:`BlockPrior.fit`.

        Raises
        ------
        ModelError
            If the site is neither ``CAR`` nor :class:`~numpyro_fed.fields.Leroux`.
        """
        fn = site_of(model, site, dict(model_kwargs or {}))
        found, W = Blocks.read(blocks, fn.event_shape[0], site), adjacency_of(fn, site)
        if W is None:
            raise ModelError(
                f"'{site}' is a {type(unwrapped(fn)).__name__}, in which all entries may be "
                "neighbours: of CAR and Leroux alone it is known which are not. Use "
                "nf.LowRankPrior or nf.SigmaPrior."
            )
        apart = found.block_of[:, None] != found.block_of
        at_border = (W * apart).any(1)
        border = np.flatnonzero(at_border)
        interiors = [own[~at_border[own]] for own in found.places]
        next_to = [np.flatnonzero(W[own][:, border].any(0)) for own in interiors]
        near = np.full((len(next_to), max(max(map(len, next_to)), 1)), len(border))
        for row, places in zip(near, next_to, strict=True):
            row[: len(places)] = places
        return cls(site, Blocks.from_places(interiors, found.block_of), None, border, W, near)

    @property
    def _areas(self) -> np.ndarray:
        return self.adjacency

    def shared(self, fn: Distribution, phi: Mapping[str, Array]) -> Areas:
        """Return precision and mean of the field, and the areas at borders."""
        areas = unwrapped(fn)
        if not isinstance(areas, dist.CAR | Leroux):
            raise ModelError(
                f"'{self.site}' is a {type(areas).__name__} here, and was a CAR or Leroux where "
                "this was fitted."
            )
        Q = precision_of(areas, fresh(self.adjacency))
        loc = jnp.broadcast_to(areas.loc, areas.event_shape)
        if not len(self.border):
            return Q, loc, jnp.zeros(0)
        normal = dist.MultivariateNormal(
            loc[fresh(self.border)], precision_matrix=self._marginal(Q)
        )
        return Q, loc, numpyro.sample(f"{self.site}/border", normal)

    def _marginal(self, Q: Array) -> Array:
        """Return the precision of the areas at borders."""

        def lost(block: Array) -> tuple[Array, Array]:
            near = fresh(self.near)[block]
            L, across = self._parts(Q, block)
            half = linalg.solve(L, across)
            return near, half.T @ half

        near, off = jax.vmap(lost)(jnp.arange(self.blocks.number))
        border = fresh(self.border)
        P = Q[border[:, None], border]
        return P.at[near[:, :, None], near[:, None, :]].add(-off, mode="drop")

    def _parts(self, Q: Array, block: Array) -> tuple[Array, Array]:
        """Return a root of a block's own precision, and its precision across its border."""
        rows, there = self.blocks.rows(block)
        near = fresh(self.near)[block]
        beside = near < len(self.border)
        areas = jnp.append(fresh(self.border), 0)[near]
        own = jnp.where(there & there[:, None], Q[rows[:, None], rows], jnp.eye(len(rows)))
        across = jnp.where(there[:, None] & beside, Q[rows[:, None], areas], 0.0)
        return linalg.cholesky(own), across

    def local(
        self, shared: Areas, fn: Distribution, phi: Mapping[str, Array], which: Array
    ) -> Array:
        """Sample interiors (blocks, largest), given the areas at borders."""
        Q, loc, at_border = shared
        noise = self._noise("noise", which)

        def one(block: Array, eps: Array) -> Array:
            rows, _ = self.blocks.rows(block)
            L, across = self._parts(Q, block)
            off = jnp.append(at_border - loc[fresh(self.border)], 0.0)[fresh(self.near)[block]]
            pull = linalg.solve(L, across @ off)
            return loc[rows] + linalg.solve(L, eps - pull, transposed=True)

        return jax.vmap(one)(which, noise)

    def whole(self, shared: Areas, parts: Array, which: Array) -> Array:
        """Return the site, areas at borders included."""
        _, _, at_border = shared
        whole = self.blocks.assemble(parts, which)
        return whole.at[fresh(self.border)].set(at_border) if len(self.border) else whole
