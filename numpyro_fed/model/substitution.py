"""A site whose prior ties all silos together, replaced by one that does not."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from numpyro import handlers
from numpyro.distributions import Distribution, constraints
from numpyro.distributions.distribution import validation_enabled
from numpyro.infer.util import compute_log_probs
from numpyro.primitives import Messenger

from numpyro_fed.errors import DataError, ModelError
from numpyro_fed.model.feasible import feasible
from numpyro_fed.model.primitives import silo_plate
from numpyro_fed.tracing import TRACING
from numpyro_fed.trees import fresh

Shared = TypeVar("Shared")  # what all silos share of a site

REAL = constraints.real, constraints.real_vector
NEARER = 1.0, 0.1, 1e-3, 0.0  # of a draw
HOW = "Each silo holds the rows of one block, and reads no other entry of the site."


class Blocks(NamedTuple):
    """The entries of a site that belong to each silo.

    Attributes
    ----------
    table : int array (blocks, largest)
        Places of each block's entries in the site, ``size`` where a block has no more.
    of : int array (size,)
        The block of each entry, those included that all silos share and the table leaves out.
    """

    table: np.ndarray
    of: np.ndarray

    @classmethod
    def read(cls, blocks: Sequence[Any], size: int, site: str) -> Blocks:
        """Read the entries of each block; each of ``size`` entries must be in one of them."""
        places = [np.atleast_1d(np.asarray(b)) for b in blocks]
        of = np.full(size, -1)
        for j, own in enumerate(places):
            if own.ndim != 1 or not len(own) or own.dtype.kind not in "iu":
                raise DataError(
                    f"block {j} of '{site}' is {own.dtype}{own.shape}: expected the places of its "
                    "entries in the site, one or more integers."
                )
            if own.min() < 0 or own.max() >= size:
                raise DataError(
                    f"block {j} of '{site}' holds the places {own.min()} to {own.max()}, but the "
                    f"site has {size} entries, from 0 to {size - 1}."
                )
            taken = [i for i in own.tolist() if of[i] >= 0]
            if taken or len(np.unique(own)) < len(own):
                values, counts = np.unique(own, return_counts=True)
                twice = taken[0] if taken else values[counts > 1][0]
                raise DataError(
                    f"entry {twice} of '{site}' is in two blocks, or twice in block {j}. Blocks "
                    "must hold each entry once."
                )
            of[own] = j
        if (of < 0).any():
            raise DataError(
                f"{(of < 0).sum()} of {size} entries of '{site}' are in no block, the first of "
                f"them {np.flatnonzero(of < 0)[0]}. Blocks must hold each entry once."
            )
        return cls.tabled(places, of)

    @classmethod
    def tabled(cls, places: Sequence[np.ndarray], of: np.ndarray) -> Blocks:
        """Make a table of some of the entries of blocks, which may be none."""
        table = np.full((len(places), max(max(map(len, places)), 1)), len(of))
        for j, own in enumerate(places):
            table[j, : len(own)] = own
        return cls(table, of)

    @property
    def size(self) -> int:
        """The number of entries of the site."""
        return len(self.of)

    @property
    def number(self) -> int:
        """How many blocks there are."""
        return len(self.table)

    @property
    def largest(self) -> int:
        """The size of the largest block."""
        return self.table.shape[1]

    @property
    def places(self) -> list[np.ndarray]:
        """The entries of each block."""
        return [row[row < self.size] for row in self.table]

    def rows(self, block: Array) -> tuple[Array, Array]:
        """The places of a block's entries (largest,), and which of them there are."""
        places = fresh(self.table)[block]
        return jnp.minimum(places, self.size - 1), places < self.size

    def together(self, parts: Array, which: Array) -> Array:
        """The site (size,) from the entries of some blocks (blocks, largest), zero elsewhere."""
        places = fresh(self.table)[which]
        return jnp.zeros(self.size + 1, parts.dtype).at[places].set(parts)[:-1]


class SitePrior(Protocol[Shared]):
    """A prior that can stand in the place of a site's own."""

    @property
    def site(self) -> str:
        """The site whose prior it is."""
        ...

    @property
    def blocks(self) -> Blocks:
        """How its entries are split."""
        ...

    def shared(self, fn: Distribution, phi: Mapping[str, Array]) -> Shared:
        """Sample what all silos share, given the true prior and the latents before it."""
        ...

    def local(
        self, shared: Shared, fn: Distribution, phi: Mapping[str, Array], which: Array
    ) -> Array:
        """Sample some blocks, independently given what is shared, inside a plate over them: their
        entries (blocks, largest).
        """
        ...

    def whole(self, shared: Shared, parts: Array, which: Array) -> Array:
        """The site (size,), of these blocks."""
        ...

    def suits(self, model: Callable[..., Any], silos: Sequence[Mapping[str, Any]]) -> None:
        """Refuse a text, run on what silos hold, in which the site has another prior."""
        ...


class _Substitution(Messenger):
    """Put other priors in the place of sites, for the blocks that are held here."""

    def __init__(self, priors: Mapping[str, SitePrior[Any]], which: Mapping[str, Any]):
        self.priors, self.which = priors, which
        self.phi: dict[str, Array] = {}
        super().__init__(None)

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] != "sample" or msg.get("name") not in self.priors:
            return
        name, fn = msg["name"], msg["fn"]
        prior, which = self.priors[name], self.which[name]
        shared = prior.shared(fn, self.phi)
        which = jnp.arange(prior.blocks.number) if which is None else jnp.asarray(which)
        with silo_plate(f"{name}/block", which.shape[0]):
            parts = prior.local(shared, fn, self.phi, which)
        value = prior.whole(shared, parts, which)
        for key in [k for k in msg if k not in ("name", "value")]:
            del msg[key]
        msg |= {"type": "deterministic", "value": value}

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample" and msg.get("name"):
            self.phi[msg["name"]] = msg["value"]


@dataclass(frozen=True, eq=False)
class Substituted:
    """A model some of whose sites have other priors: an ordinary NumPyro model.

    Called with a silo's data, and the number of its block as ``{site}_block`` (1,), it is that
    silo's part of the model; without these it is the model of all blocks.
    """

    model: Callable[..., Any]
    priors: Mapping[str, SitePrior[Any]]
    _slopes: dict[Any, Callable[..., Any]] = field(default_factory=dict, init=False, repr=False)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Run the model's text with the other priors."""
        which = {site: kwargs.pop(block_name(site), None) for site in self.priors}
        with _Substitution(self.priors, which):
            return self.model(*args, **kwargs)

    def of_silos(self, silos: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Return what silos hold, and of which block they read entries.

        Raises
        ------
        DataError
            For a silo that reads entries of several blocks, or of none, and for two that read
            entries of one block.
        """
        for prior in self.priors.values():
            prior.suits(self.model, silos)
        names = {block_name(site): site for site in self.priors}
        held = [{k: v for k, v in silo.items() if k not in names} for silo in silos]
        found = [dict(silo) for silo in held]
        for name, site in names.items():
            prior, owner = self.priors[site], dict[int, int]()
            for j, silo in enumerate(held):
                block = self._block(site, prior.blocks, silo, j, silos[j].get(name))
                if block in owner:
                    raise DataError(
                        f"silos {owner[block]} and {j} both read entries of block {block} of "
                        f"'{site}'. {HOW}"
                    )
                owner[block] = j
                found[j][name] = np.array([block], np.int32)
        return found

    def _block(
        self, site: str, blocks: Blocks, silo: dict[str, Any], j: int, given: ArrayLike | None
    ) -> int:
        read = np.flatnonzero(self._entries_read(site, silo))
        own = np.unique([*blocks.of[read], *([] if given is None else np.ravel(given))])
        if len(own) > 1:
            first = [int(read[blocks.of[read] == b][0]) for b in own if b in blocks.of[read]]
            raise DataError(
                f"silo {j} reads the entries {', '.join(map(str, first))} of '{site}', which "
                f"belong to the blocks {', '.join(map(str, own))}. {HOW}"
            )
        if not len(own):
            raise DataError(
                f"silo {j} reads no entry of '{site}', so that nothing says which block it holds. "
                f"Say so by {block_name(site)}=[number] in its data, or leave the silo out."
            )
        return int(own[0])

    def _entries_read(self, site: str, silo: Mapping[str, Any]) -> np.ndarray:
        """Find the entries of a site (size,) on which the densities of other sites depend."""
        leaves, tree = jax.tree.flatten(dict(silo), is_leaf=lambda a: a is None)
        arrays = {i: a for i, a in enumerate(leaves) if hasattr(a, "dtype")}
        static = {i: a for i, a in enumerate(leaves) if i not in arrays}

        def kwargs_of(arrays: dict[int, Any]) -> dict[str, Any]:
            values = {**arrays, **static}
            return jax.tree.unflatten(tree, [values[i] for i in range(len(values))])

        known = (site, tree, tuple(map(repr, static.items())))
        if known not in self._slopes:
            others = [name for name in self.priors if name != site]
            self._slopes[known] = entries_read(self.model, site, others, kwargs_of)
        return np.asarray(self._slopes[known](arrays))


def entries_read(
    model: Callable[..., Any],
    site: str,
    others: Sequence[str],
    kwargs_of: Callable[[Any], dict[str, Any]],
) -> Callable[[Any], Array]:
    """A function of a silo's arrays: the entries of a site (size,) that move the other sites' log
    densities.

    By gradients at a draw of the model and nearer to zero, since a density may be flat far out.
    """

    @jax.jit
    def moves(arrays: Mapping[int, Array]) -> Array:
        kwargs = kwargs_of(arrays)
        first = traced(model, 0, kwargs)
        latents = {n: s["value"] for n, s in first.items() if s["type"] == "sample"}

        def density(value: Array) -> Array:
            at = handlers.substitute(handlers.seed(model, 0), {**latents, site: value})
            with TRACING:
                terms, _ = compute_log_probs(at, (), kwargs, {})
            return sum(p.sum() for n, p in terms.items() if n != site and n not in others)

        near = [jax.grad(density)(share * latents[site]) for share in NEARER]
        return jnp.stack([(slope != 0) | jnp.isnan(slope) for slope in near]).any(0)

    return moves


def block_name(site: str) -> str:
    """The argument that says which block of a site a silo holds."""
    return f"{site}_block"


def traced(
    model: Callable[..., Any],
    key: Array | int,
    kwargs: Mapping[str, Any],
    known: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The trace of a text, of which some sites may be known. What is flat is not drawn, and what
    is wrong is left to be said by those who know what for.
    """
    at = handlers.substitute(handlers.seed(model, key), known or {})
    with TRACING, handlers.block(), validation_enabled(False), feasible():
        return handlers.trace(at).get_trace(**kwargs)


def site_of(model: Callable[..., Any], site: str, kwargs: Mapping[str, Any]) -> Distribution:
    """The distribution of a site that can be split: a vector of real numbers.

    Raises
    ------
    ModelError
        If there is no such site, or one of another kind.
    """
    try:
        trace = traced(model, 0, kwargs)
    except TypeError as error:
        raise ModelError(
            f"the model could not be run with {sorted(kwargs) or 'no arguments'}: {error}. Give "
            f"what it takes, {inspect.signature(model)}, as model_kwargs=: the data of a silo, say."
        ) from error
    latent = [n for n, s in trace.items() if s["type"] == "sample" and not s["is_observed"]]
    if site not in latent:
        raise ModelError(f"there is no latent site '{site}': the model has {', '.join(latent)}.")
    fn = trace[site]["fn"]
    if fn.support is None or fn.support.is_discrete:
        raise ModelError(f"'{site}' is discrete: a prior that is learnt must be continuous.")
    if fn.batch_shape or len(fn.event_shape) != 1:
        raise ModelError(
            f"'{site}' has the batch shape {fn.batch_shape} and the event shape {fn.event_shape}: "
            "expected one vector, outside of plates, such as dist.MultivariateNormal or dist.CAR."
        )
    if getattr(fn.support, "base_constraint", fn.support) not in REAL:
        raise ModelError(
            f"'{site}' has the support {fn.support}: expected real numbers. Sample a real vector, "
            "and transform it in the model (jnp.exp of it, say)."
        )
    return fn


def substitute_prior(
    model: Callable[..., Any], priors: Mapping[str, SitePrior[Any]]
) -> Substituted:
    r"""Replace sites that tie all silos together by priors that do not.

    .. math::
        p(\theta \mid \phi) \quad\to\quad
        p(z_G \mid \phi) \prod_j p(\theta_j \mid z_G, \phi)

    Parameters
    ----------
    model : callable
        A NumPyro model with ``silo_plate`` whose rows read entries of a site, ``theta[area]``.
    priors : dict
        By site, what stands in its place: :class:`~numpyro_fed.BlockPrior`,
        :class:`~numpyro_fed.LowRankPrior`, :class:`~numpyro_fed.SeparatorPrior`,
        :class:`~numpyro_fed.SigmaPrior`.

    Returns
    -------
    callable
        A NumPyro model with a ``silo_plate`` over blocks, ``{site}/block``. The site is
        deterministic there, and as long as it was, with zeros for the blocks of other silos. Run on
        the data of one silo it finds the block by the entries that the silo's rows read.

    Raises
    ------
    ModelError
        If a prior was fitted to another site.

    References
    ----------
    Hassan, Bon, Semenova, Mira, Mengersen (2024), arXiv 2405.16055, section 3.2.

    Examples
    --------
    >>> import numpy as np, numpyro, numpyro.distributions as dist
    >>> import numpyro_fed as nf
    >>> edges = np.eye(4, k=1) + np.eye(4, k=-1)
    >>> def model(area, y=None):
    ...     theta = numpyro.sample("theta", dist.CAR(0.0, 0.9, 1.0, edges))
    ...     with nf.silo_plate("row", area.shape[0]):
    ...         numpyro.sample("y", dist.Normal(theta[area], 1), obs=y)
    >>> silos = [dict(area=np.array(a), y=np.ones(2)) for a in ([0, 1], [2, 3])]
    >>> blocks = [[0, 1], [2, 3]]
    >>> prior = nf.SeparatorPrior.fit(model, "theta", blocks, model_kwargs=silos[0])
    >>> federated = nf.handlers.substitute_prior(model, {"theta": prior})
    >>> result = nf.SFVI(federated).run(jax.random.key(0), 10, silos, progress_bar=False)
    >>> result.sample_posterior(jax.random.key(1), 5, silo=1)["theta"].shape
    (5, 4)
    """
    for site, prior in priors.items():
        if prior.site != site:
            raise ModelError(
                f"the prior for '{site}' was fitted to '{prior.site}'. Fit one to '{site}'."
            )
    return Substituted(model, dict(priors))
