r"""The exchange that weighs draws from a fitted guide by the joint density of all silos.

The server sends draws :math:`z_G^s \sim q`. Silo ``j`` replies with an importance-weighted estimate
:math:`\hat p(y_j \mid z_G^s)` of its own likelihood at each. The log weights are

.. math::
    \log w_s = \log p(z_G^s) - \log q(z_G^s) + \sum_j \log \hat p(y_j \mid z_G^s).

Each estimate is unbiased, and those of different silos are independent. So averages with these
weights are those of exact likelihoods but for more variance: it is importance sampling on an
extended space (Andrieu and Roberts 2009; Tran et al. 2013). The server makes the draws from
a mixture of the guide, or of what stands in its place, and wider distributions
(:mod:`numpyro_fed.weigh.proposals`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Generic, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.random import fold_in

from numpyro_fed.basics.programs import jit_once, map_in_batches
from numpyro_fed.basics.trees import Numbers
from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.guides.guide import GlobalDraws, Guide
from numpyro_fed.guides.quadrature import RowIntegrals
from numpyro_fed.guides.silo_bounds import EACH_DRAW, AtDraw, QuadratureBound
from numpyro_fed.rounds.exchange import (
    Exchange,
    FederatedAlgorithm,
    Reply,
    Server,
    Silo,
    key_as_noise,
    no_noise,
)
from numpyro_fed.rounds.names import IMPORTANCE
from numpyro_fed.rounds.stacks import StackedExchange, of_stack
from numpyro_fed.rounds.states import Shared
from numpyro_fed.search.expand import ROUNDING_UNITS, shape
from numpyro_fed.text.log_density import FederatedModel, outcomes_at
from numpyro_fed.text.site_table import Rows
from numpyro_fed.weigh.integration import LikelihoodEstimate

MAX_LOST = 0.01  # share of draws near the fit at which a quadrature may fail; as much mass is lost
# Nats by which a silo's log likelihood may change with twice the nodes, more at some draws than at
# others, by root mean square: weights that are off by this share move a mean by so many sds at
# most, far below the errors of a few thousand draws. What it changes at all of them alike is in the
# evidence alone, which may be off by more.
MAX_CHANGE, MAX_COMMON_CHANGE = 0.01, 0.02
CHECKED = 8  # draws of the fit's guide at which twice the nodes are tried


class Estimates(NamedTuple):
    """A silo's reply: its log likelihood at each draw (n,), and whether integrals are too coarse.

    The second is 0 or 1, so that a sum over silos counts them.
    """

    log_likelihood: Numbers
    is_coarse: Numbers


@dataclass(frozen=True, eq=False)
class LogLikelihoodExchange(Generic[Server, Silo]):
    """The question to silos how likely their rows are at draws of the globals.

    ``fitted``: The algorithm whose states server and silos have.
    ``num_own``: How many of them, the first ones, are from the fit's guide.
    ``batch_size``: The number of draws that are computed at a time.
    ``settings``: JSON, from which a silo in another process builds the same.
    ``little``: Whether evaluating them takes less time than optimising their program would.
    """

    model: FederatedModel
    guide: Guide
    likelihood: LikelihoodEstimate
    fitted: FederatedAlgorithm[Server, Silo]
    num_draws: int
    num_own: int
    batch_size: int
    settings: str = ""
    little: bool = False

    @property
    def exchange(self) -> Exchange[Any, Any, Any]:
        """Return the exchange, in which a silo sends :class:`Estimates` and keeps its state."""
        return StackedExchange(
            IMPORTANCE,
            self.reply,
            silo_noise=key_as_noise if self.guide.locals else no_noise,
            # No log likelihood is NaN or infinite, and some draw has a weight.
            usable=lambda up: (
                (up.log_likelihood < jnp.inf).all() & (up.log_likelihood > -jnp.inf).any()
            ),
            settings=self.settings,
            messages=lambda: (
                shape_of_draws(self.guide, self.fitted, (self.num_draws, self.model.dim)),
                Estimates(shape(self.num_draws), shape()),
            ),
        )

    @cached_property
    def of_server(self) -> Callable[[Shared, Any], tuple[Array, GlobalDraws]]:
        """Return the function to the log prior (n,) at draws (n, dim), and to the message."""
        log_prior = jax.vmap(self.model.log_prior, (None, 0))
        return jit_once(
            lambda shared, z_G: (
                log_prior(shared.theta, z_G),
                GlobalDraws.of(self.guide, shared, z_G),
            )
        )

    @cached_property
    def _values(self) -> Callable[[Array, GlobalDraws, Silo, SiloData], Array]:
        """Return the function to log likelihoods (silos, n) of a stack of silos."""
        how = self.likelihood, self.fitted, self.num_draws, self.batch_size
        return of_stack(partial(log_likelihoods, *how), little=self.little)

    @cached_property
    def _too_coarse(self) -> Callable[[Any, GlobalDraws, Silo, SiloData], Array] | None:
        """Return the function to whether quadratures of silos (silos,) are too coarse."""
        if not isinstance(self.likelihood, QuadratureBound):
            return None
        # By itself it is compiled with few optimisations: it looks at a few draws.
        return of_stack(partial(too_coarse, self.likelihood, self.fitted), little=True)

    def reply(
        self, noise: Array, down: GlobalDraws, state: Silo, data: SiloData
    ) -> tuple[Reply[Estimates], Silo]:
        """Return the replies of a stack of silos with a key each, and their states as they are."""
        # Waited for in a way that Ctrl-C can end.
        values = np.asarray(jax.block_until_ready(self._values(noise, down, state, data)))
        coarse = np.zeros(len(values), bool)
        if self._too_coarse is not None:
            few = min(CHECKED, self.num_draws)
            # Far out a quadrature may be no number, which costs a weight; among the first draws,
            # all close to the fit, that would be mass.
            lost = np.isnan(values[:, : -(-self.num_draws // 4)]).mean(1) > MAX_LOST
            first = values[:, :few]
            by_nodes = self._too_coarse((noise, first), down, state, data)
            coarse = lost | np.asarray(jax.block_until_ready(by_nodes))
        # Values that are too coarse are not used, and may not be numbers.
        values = np.where(coarse[:, None], 0.0, self.without_overflow(values))
        up = Estimates(values, coarse.astype(values.dtype))
        return Reply(up, np.ones(len(values), bool)), state

    def without_overflow(self, values: np.ndarray) -> np.ndarray:
        """Return log values (..., n), minus infinity where one of a wide draw overflowed or is NaN.

        An integral over a silo's latents may fail 25 sds from the guide: that draw has no weight.
        At the guide's own draws it is an error, and is kept. The text's own densities are never
        NaN.
        """
        is_wide = np.arange(self.num_draws) >= self.num_own
        return np.where(is_wide & ~(values < np.inf), -np.inf, values)


def shape_of_draws(
    guide: Guide, fitted: FederatedAlgorithm[Any, Any], size: tuple[int, int]
) -> GlobalDraws:
    """Return the shapes of a message with so many draws of the globals (n, dim)."""
    found: GlobalDraws = jax.eval_shape(
        lambda key: GlobalDraws.of(guide, fitted.shared(fitted.init_server(key)), jnp.zeros(size)),
        jax.random.key(0),
    )
    return found


def at_draws(
    fitted: FederatedAlgorithm[Any, Silo], down: GlobalDraws, state: Silo, data: SiloData
) -> AtDraw:
    """Return all that a silo's likelihood depends on, at all draws of the server's message."""
    private = fitted.private(state)
    coordinates = private.recentred(down.in_frame)
    return AtDraw({**down.theta, **private.theta}, private.guide, down.z_G, coordinates, data)


def with_globals(given: AtDraw, z_G: Array, u: Array) -> AtDraw:
    """Return the same at other draws of the globals, with coordinates ``u``."""
    return given._replace(z_G=z_G, coordinates=given.coordinates._replace(u=u))


def too_coarse(
    quadrature: QuadratureBound,
    fitted: FederatedAlgorithm[Any, Silo],
    noise: tuple[Array, Array],
    down: GlobalDraws,
    state: Silo,
    data: SiloData,
) -> Array:
    """Return whether a silo's log likelihoods at the first draws are others with twice the nodes.

    ``noise`` is its key, and these values (b,).
    """
    key, values = noise
    keys, few = jax.vmap(fold_in, (None, 0))(key, jnp.arange(len(values))), slice(len(values))
    given = at_draws(fitted, down, state, data)
    given, theta = with_globals(given, given.z_G[few], given.coordinates.u[few]), given.theta
    finer = RowIntegrals(quadrature.model, 2 * quadrature.nodes, few_places=True)

    def starts_at(key: Array, given: AtDraw) -> Rows:
        starts = [quadrature.start(given)]
        if quadrature.model.draws_local and not quadrature.guide.outer_plates:
            # From draws of the latents' prior the search leads to other modes, if there are any.
            starts.append(quadrature.model.draw_local(key, theta, given.z_G, {}, data))
        return jax.tree.map(lambda *a: jnp.stack(a), *starts)

    starts = jax.vmap(starts_at, (0, EACH_DRAW))(keys, given)
    found = jax.vmap(
        lambda z_G, starts: jax.lax.map(
            lambda at: finer.log_likelihood(theta, z_G, data, at)[0], starts
        ),
        out_axes=1,
    )(given.z_G, starts)
    rounding = ROUNDING_UNITS * jnp.finfo(values.dtype).eps * jnp.abs(values)

    def differ(others: Array) -> Array:
        change = others - values
        common = jnp.nanmean(change)
        apart = jnp.sqrt(jnp.nanmean(jnp.square(change - common)))
        allowed = rounding.max()
        few = (apart <= MAX_CHANGE + allowed) & (jnp.abs(common) <= MAX_COMMON_CHANGE + allowed)
        return ~few

    coarse = differ(found[0]) | jnp.isnan(found[0]).any()
    for others in found[1:]:  # a draw at which this search finds no mode says nothing
        coarse |= differ(others) & ~jnp.isnan(others).all()
    return coarse


def log_likelihoods(
    likelihood: LikelihoodEstimate,
    fitted: FederatedAlgorithm[Server, Silo],
    num_draws: int,
    batch_size: int,
    noise: Array | tuple[()],
    down: GlobalDraws,
    state: Silo,
    data: SiloData,
) -> Array:
    """Return a silo's log likelihood at each draw (n,)."""
    given, offset = at_draws(fitted, down, state, data), down.in_frame.offset

    def estimate(batch: tuple[Array, Array, Array]) -> Array:
        s, z_G, u = batch
        # Without latents nothing is drawn: any key will do.
        key = jax.random.key(0) if isinstance(noise, tuple) else noise
        keys = jax.vmap(fold_in, (None, 0))(key, s)
        at = with_globals(given, z_G, u)
        return jax.vmap(likelihood.log_estimate, (0, EACH_DRAW))(keys, at)

    # In batches: all draws at once would hold a silo's rows, times inner draws, thousands of times
    # in memory. The last batch is filled up by the first draws: a batch of another size would be
    # compiled once more.
    num_batches = -(-num_draws // batch_size)
    index = jnp.arange(num_batches * -(-num_draws // num_batches)) % num_draws
    # In order of their distance: a batch of draws close by needs no search for the modes of rows,
    # or a short one.
    index = index[jnp.argsort(jnp.square(offset).sum(-1)[index])]
    batches = index.reshape(num_batches, -1)
    u = given.coordinates.u
    values = jax.lax.map(estimate, (batches, down.z_G[batches], u[batches]))
    return jnp.zeros(num_draws, values.dtype).at[index].set(values.ravel())


def plates_of_rows(fm: FederatedModel) -> list[str]:
    """Return the plates whose rows have a likelihood of their own, in the order of the scores.

    Rows of a plate whose latents other rows share (of a hospital) are none.
    """
    with_terms = {s.plate for s in fm.sites if s.kind in ("observed", "factor")}
    return [p.name for p in fm.plates if p.name in with_terms and not (p.outer and p.dim)]


def rows_that_count(fm: FederatedModel, data: SiloData) -> Array:
    """Return which rows have an outcome (rows,) bool, all plates of rows after another."""
    sizes, found = fm.sizes(data), outcomes_at(fm, data).values()
    counts = [jnp.zeros(0)]
    for p in plates_of_rows(fm):
        # Rows whose outcomes are all missing are no rows to predict.
        seen = [outcome.seen for outcome in found if outcome.plate == p]
        counts.append(data.masked(p, jnp.ones(sizes[p]) * (sum(seen) > 0 if seen else 1.0)))
    return jnp.concatenate(counts) > 0


def log_likelihoods_of_rows(
    fm: FederatedModel,
    likelihood: LikelihoodEstimate,
    fitted: FederatedAlgorithm[Any, Silo],
    batch_size: int,
    key: Array,
    down: GlobalDraws,
    state: Silo,
    data: SiloData,
) -> tuple[Array, Array]:
    """Return log likelihoods (draws, rows) of a silo, and whether rows count (rows,)."""
    given, plates = at_draws(fitted, down, state, data), plates_of_rows(fm)

    def rows_at(draw: tuple[Array, Array, Array]) -> Array:
        s, z_G, u = draw
        rows = likelihood.log_rows(fold_in(key, s), with_globals(given, z_G, u))
        return jnp.concatenate([jnp.zeros(0), *(rows[p] for p in plates)])

    draws = jnp.arange(len(down.z_G)), down.z_G, given.coordinates.u
    values = map_in_batches(rows_at, draws, batch_size)
    return values, rows_that_count(fm, data)
