"""The substitution of priors that tie all silos together, such as a Gaussian process over areas.

The entries of such a site are divided into blocks, one for each silo. The prior in its place makes
the blocks independent given what all silos share (section 3.2 of arXiv 2405.16055). A silo's block
is found from its data: the block whose entries move the silo's log density.
"""

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

from numpyro_fed.basics.errors import DataError, ModelError
from numpyro_fed.basics.programs import TRACING
from numpyro_fed.basics.trees import fresh
from numpyro_fed.text.silo_plate import feasible, silo_plate

Shared = TypeVar("Shared")  # the part of a site that all silos share

REAL = constraints.real, constraints.real_vector
# Multiples of a draw of the site at which gradients are taken. A likelihood may be flat at the draw
# itself (a probability that rounds to 1), and then is not nearer to zero.
DRAW_SCALES = 1.0, 0.1, 1e-3, 0.0
ONE_BLOCK = "Each silo holds the rows of one block, and reads no other entry of the site."


class Blocks(NamedTuple):
    """The division of a site's entries into blocks, one block for each silo."""

    # int array (blocks, largest): the indices of each block's entries, padded by size
    table: np.ndarray
    # int array (size,): the block of each entry. It includes entries that all silos share,
    # which the table leaves out
    block_of: np.ndarray

    @classmethod
    def read(cls, blocks: Sequence[Any], size: int, site: str) -> Blocks:
        """Read the user's blocks, and refuse them unless each of ``size`` entries is in one."""
        places = [np.atleast_1d(np.asarray(b)) for b in blocks]
        block_of = np.full(size, -1)
        for j, entries in enumerate(places):
            if entries.ndim != 1 or not len(entries) or entries.dtype.kind not in "iu":
                raise DataError(
                    f"block {j} of '{site}' is {entries.dtype}{entries.shape}: expected the places "
                    "of its entries in the site, one or more integers."
                )
            if entries.min() < 0 or entries.max() >= size:
                raise DataError(
                    f"block {j} of '{site}' holds the places {entries.min()} to {entries.max()}, "
                    f"but the site has {size} entries, from 0 to {size - 1}."
                )
            taken = [i for i in entries.tolist() if block_of[i] >= 0]
            if taken or len(np.unique(entries)) < len(entries):
                values, counts = np.unique(entries, return_counts=True)
                twice = taken[0] if taken else values[counts > 1][0]
                raise DataError(
                    f"entry {twice} of '{site}' is in two blocks, or twice in block {j}. Blocks "
                    "must hold each entry once."
                )
            block_of[entries] = j
        if (block_of < 0).any():
            raise DataError(
                f"{(block_of < 0).sum()} of {size} entries of '{site}' are in no block, the first "
                f"of them {np.flatnonzero(block_of < 0)[0]}. Blocks must hold each entry once."
            )
        return cls.from_places(places, block_of)

    @classmethod
    def from_places(cls, places: Sequence[np.ndarray], block_of: np.ndarray) -> Blocks:
        """Return blocks with these entries each; a block may have none."""
        table = np.full((len(places), max(max(map(len, places)), 1)), len(block_of))
        for j, entries in enumerate(places):
            table[j, : len(entries)] = entries
        return cls(table, block_of)

    @property
    def size(self) -> int:
        """Return the number of entries of the site."""
        return len(self.block_of)

    @property
    def number(self) -> int:
        """Return the number of blocks."""
        return len(self.table)

    @property
    def largest(self) -> int:
        """Return the size of the largest block."""
        return self.table.shape[1]

    @property
    def places(self) -> list[np.ndarray]:
        """Return the indices of each block's entries, without padding."""
        return [row[row < self.size] for row in self.table]

    def rows(self, block: Array) -> tuple[Array, Array]:
        """Return the indices of a block's entries (largest,), and whether each is an entry."""
        places = fresh(self.table)[block]
        # Padding reads the last entry, so that it has finite numbers, and is masked afterwards.
        return jnp.minimum(places, self.size - 1), places < self.size

    def assemble(self, parts: Array, which: Array) -> Array:
        """Return the site (size,) from some blocks' entries (blocks, largest), zero elsewhere."""
        places = fresh(self.table)[which]
        # Padding is written to one entry more, which is cut off.
        return jnp.zeros(self.size + 1, parts.dtype).at[places].set(parts)[:-1]


class SitePrior(Protocol[Shared]):
    """A prior that can be substituted for a site's own. ``phi`` has the latents before the site."""

    @property
    def site(self) -> str:
        """Return the site whose prior it is."""

    @property
    def blocks(self) -> Blocks:
        """Return the division of the site's entries into blocks."""

    def shared(self, fn: Distribution, phi: Mapping[str, Array]) -> Shared:
        """Sample the part that all silos share, given the true prior ``fn`` and ``phi``."""

    def local(
        self, shared: Shared, fn: Distribution, phi: Mapping[str, Array], which: Array
    ) -> Array:
        """Sample the entries of some blocks (blocks, largest), inside of a plate over blocks.

        They are independent given the shared part.
        """

    def whole(self, shared: Shared, parts: Array, which: Array) -> Array:
        """Return the site (size,) from the shared part and these blocks."""

    def suits(self, model: Callable[..., Any], silos: Sequence[Mapping[str, Any]]) -> None:
        """Refuse a text in which, on the silos' data, the site has another prior."""


class _Substitution(Messenger):
    """Replace the priors of sites, for the blocks ``which`` of each (all blocks if None)."""

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
        # The message becomes a deterministic site. All other keys of a sample message (is_observed,
        # infer, the rng key) must go, or outer handlers would take it for one.
        for key in [k for k in msg if k not in ("name", "value")]:
            del msg[key]
        msg |= {"type": "deterministic", "value": value}

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample" and msg.get("name"):
            self.phi[msg["name"]] = msg["value"]


@dataclass(frozen=True, eq=False)
class Substituted:
    """A model with other priors for some sites, itself an ordinary NumPyro model.

    Called with a silo's data and the number of its block as ``{site}_block`` (1,), it is that
    silo's part of the model. Called without block numbers it is the model of all blocks.
    """

    model: Callable[..., Any]
    priors: Mapping[str, SitePrior[Any]]
    _slopes: dict[Any, Callable[..., Any]] = field(default_factory=dict, init=False, repr=False)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Run the model's text with the other priors, and return its result."""
        which = {site: kwargs.pop(block_name(site), None) for site in self.priors}
        with _Substitution(self.priors, which):
            return self.model(*args, **kwargs)

    def of_silos(self, silos: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Return the silos' data with the number of the block that each silo reads."""
        for prior in self.priors.values():
            prior.suits(self.model, silos)
        names = {block_name(site): site for site in self.priors}
        given = [{k: v for k, v in silo.items() if k not in names} for silo in silos]
        with_blocks = [dict(silo) for silo in given]
        for name, site in names.items():
            owner = dict[int, int]()
            for j, silo in enumerate(given):
                block = self._block(site, silo, j, silos[j].get(name))
                if block in owner:
                    raise DataError(
                        f"silos {owner[block]} and {j} both read entries of block {block} of "
                        f"'{site}'. {ONE_BLOCK}"
                    )
                owner[block] = j
                with_blocks[j][name] = np.array([block], np.int32)
        return with_blocks

    def of_new_rows(
        self, new: Mapping[str, Any], j: int, numbers: Mapping[str, ArrayLike]
    ) -> dict[str, Any]:
        """Return new data of silo ``j`` with the numbers of its blocks, by argument."""
        names = {block_name(site): site for site in self.priors}
        given = {k: v for k, v in new.items() if k not in names}
        for name, site in names.items():
            own = numbers[name]
            try:
                self._block(site, given, j, new.get(name, own))
                self._block(site, given, j, own)
            except TypeError as error:
                raise DataError(f"new data do not fit the model: {error}.") from error
        return given | dict(numbers)

    def _block(self, site: str, silo: dict[str, Any], j: int, given: ArrayLike | None) -> int:
        blocks = self.priors[site].blocks
        read = np.flatnonzero(self._entries_read(site, silo))
        found = np.unique([*blocks.block_of[read], *([] if given is None else np.ravel(given))])
        if len(found) > 1:
            first = [
                int(read[blocks.block_of[read] == b][0])
                for b in found
                if b in blocks.block_of[read]
            ]
            raise DataError(
                f"silo {j} reads the entries {', '.join(map(str, first))} of '{site}', which "
                f"belong to the blocks {', '.join(map(str, found))}. {ONE_BLOCK}"
            )
        if not len(found):
            raise DataError(
                f"silo {j} reads no entry of '{site}', so that nothing says which block it holds. "
                f"Say so by {block_name(site)}=[number] in its data, or leave the silo out."
            )
        return int(found[0])

    def _entries_read(self, site: str, silo: Mapping[str, Any]) -> np.ndarray:
        """Return whether other sites' densities depend on each entry of a site, bool (size,)."""
        leaves, tree = jax.tree.flatten(dict(silo), is_leaf=lambda a: a is None)
        arrays = {i: a for i, a in enumerate(leaves) if hasattr(a, "dtype")}
        static = {i: a for i, a in enumerate(leaves) if i not in arrays}

        @jax.jit
        def moves(arrays: Mapping[int, Array]) -> Array:
            values = {**arrays, **static}
            kwargs = jax.tree.unflatten(tree, [values[i] for i in range(len(values))])
            first = trace_text(self.model, 0, kwargs)
            latents = {n: s["value"] for n, s in first.items() if s["type"] == "sample"}

            def density(value: Array) -> Array:
                text = handlers.seed(self.model, 0)
                text = handlers.substitute(text, {**latents, site: value})
                with TRACING:
                    terms, _ = compute_log_probs(text, (), kwargs, {})
                # Other sites with substituted priors do not count: they are no rows of the silo.
                return sum(p.sum() for n, p in terms.items() if n not in self.priors)

            slopes = [jax.grad(density)(scale * latents[site]) for scale in DRAW_SCALES]
            # NaN shows that the entry is read, too.
            return jnp.stack([(slope != 0) | jnp.isnan(slope) for slope in slopes]).any(0)

        program = (site, tree, tuple(map(repr, static.items())))
        return np.asarray(self._slopes.setdefault(program, moves)(arrays))


def substituted_in(text: object) -> Substituted | None:
    """Return the model with other priors that a text rests on; None if there is none."""
    while text is not None and not isinstance(text, Substituted):
        text = getattr(text, "fn", getattr(text, "model", getattr(text, "__wrapped__", None)))
    return text


def block_name(site: str) -> str:
    """Return the name of the argument that holds the number of a silo's block of a site."""
    return f"{site}_block"


def trace_text(
    model: Callable[..., Any],
    key: Array | int,
    kwargs: Mapping[str, Any],
    known: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the trace of a text, with the values of some sites given in ``known``."""
    text = handlers.substitute(handlers.seed(model, key), known or {})
    # Callers refuse what is wrong themselves, in words about the prior. NumPyro's validation would
    # raise before they can.
    with TRACING, handlers.block(), validation_enabled(False), feasible():
        return handlers.trace(text).get_trace(**kwargs)


def site_of(model: Callable[..., Any], site: str, kwargs: Mapping[str, Any]) -> Distribution:
    """Return the distribution of a site, which must be a vector of real numbers."""
    try:
        trace = trace_text(model, 0, kwargs)
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
    r"""Replace the priors of sites that tie all silos together.

    .. math::
        p(\theta \mid \phi) \quad\to\quad
        p(z_G \mid \phi) \prod_j p(\theta_j \mid z_G, \phi)

    Parameters
    ----------
    model : callable
        A NumPyro model with ``silo_plate`` whose rows read entries of a site, ``theta[area]``.
    priors : dict
        The prior to substitute for each site: :class:`~numpyro_fed.BlockPrior`,
        :class:`~numpyro_fed.LowRankPrior`, :class:`~numpyro_fed.SeparatorPrior`,
        :class:`~numpyro_fed.SigmaPrior`.

    Returns
    -------
    callable
        A NumPyro model with a ``silo_plate`` over blocks, ``{site}/block``. The site is
        deterministic in it and keeps its length, with zeros for the blocks of other silos. The
        block of a silo is found from the entries that its rows read.

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
