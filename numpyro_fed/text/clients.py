"""The primitive ``client_sum`` of vertical models, the two federated models made from it, and ids.

``client_sum`` emits one message, which handlers can answer in another way than by the plain sum.
``augment`` and ``power_likelihood`` do so; they are equations 6 and 7 of Hassan, Sutton, Mira,
Mengersen (2024), arXiv 2405.04043. Clients hold columns of the same rows: ids of rows say so.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpy.typing import ArrayLike
from numpyro import handlers
from numpyro.primitives import Messenger, apply_stack

from numpyro_fed.basics.errors import DataError, DataWarning, ModelError
from numpyro_fed.numerics.accurate_densities import log_prob
from numpyro_fed.text.jaxprs import provenance
from numpyro_fed.text.silo_plate import silo_plate_of

LATENT_OF_SUM = (
    "the distribution of the latent site '{}' depends on the client_sum. The power likelihood has "
    "a sum for each client and so no one distribution for it: use the augmented model, or let "
    "observed sites alone depend on the sum."
)
AUXILIARY = "z"  # the name of a client's auxiliary variable, within the client's scope


@dataclass(frozen=True)
class Clients:
    """The arguments of a ``client_sum``: a predictor and columns for each client."""

    name: str
    predictors: tuple[Callable[..., Any], ...]
    columns: tuple[Any, ...]

    def scope(self, j: int) -> str:
        """Return the prefix of a client's sites."""
        return f"{self.name}_{j}"

    def predictions(self) -> list[Array]:
        """Return each client's predictor, (rows, ...), its sites in the client's scope."""
        found = []
        for j, g in enumerate(self.predictors):
            with handlers.scope(prefix=self.scope(j)):
                found.append(jnp.asarray(g(self.columns[j])))
        check_predictions(self, found)
        return found

    def auxiliary(self, j: int, g: Array, rho: float) -> Array:
        """Sample a client's auxiliary variable: normal about its predictor, with sd ``rho``."""
        with handlers.scope(prefix=self.scope(j)):
            return numpyro.sample(AUXILIARY, dist.Normal(g, rho).to_event(jnp.ndim(g)))


def client_sum(
    name: str, predictor: Callable[..., Any] | Sequence[Callable[..., Any]], clients: Sequence[Any]
) -> Any:
    r"""Return the sum over clients of a predictor that runs at each client, on its own columns.

    .. math::
        \eta = \sum_{j=0}^{J-1} g_j(x_j, \theta_j)

    Client ``j`` holds the columns :math:`x_j` of every row and its own :math:`\theta_j`: all sites
    of the predictor, whose names become ``{name}_{j}/...``. What is outside belongs to the server.
    Plain NumPyro runs the text as it stands, ``Predictive`` for new rows included.

    Parameters
    ----------
    name : str
        Prefix of the clients' sites.
    predictor : callable or sequence of callable
        ``predictor(columns)`` returns an array whose first axis runs over rows, of the same shape
        at every client; one for all clients, or one for each.
    clients : sequence
        The columns of each client: an array, or a tree of arrays.

    Returns
    -------
    array
        The sum, with the shape of one predictor's result.

    Raises
    ------
    DataError
        For an empty list, or clients with different numbers of rows.
    ModelError
        For predictors that are not functions or not as many as clients, or whose results differ in
        shape or in their number of rows from the columns.

    References
    ----------
    Hassan, Sutton, Mira, Mengersen (2024), arXiv 2405.04043, equation 5.

    Examples
    --------
    >>> import jax, numpy as np, numpyro, numpyro.distributions as dist
    >>> import numpyro_fed as nf
    >>> def predictor(x):
    ...     beta = numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[-1]]).to_event(1))
    ...     return x @ beta
    >>> def model(xs, y=None):
    ...     eta = nf.client_sum("client", predictor, xs)
    ...     with numpyro.plate("row", eta.shape[0]):
    ...         numpyro.sample("y", dist.Normal(eta, 1), obs=y)
    >>> xs = [np.ones((5, 2)), np.ones((5, 3))]
    >>> trace = numpyro.handlers.trace(numpyro.handlers.seed(model, 0)).get_trace(xs)
    >>> [name for name, site in trace.items() if site["type"] == "sample"]
    ['client_0/beta', 'client_1/beta', 'y']
    """
    if isinstance(clients, np.ndarray | Array) or not isinstance(clients, Sequence):
        raise DataError(
            f"client_sum '{name}': expected a list with the columns of each client, got "
            f"{type(clients).__name__}. For a single client pass a list with one entry."
        )
    if not clients:
        raise DataError(f"client_sum '{name}': there are no clients. Pass the columns of each.")
    single = not isinstance(predictor, list | tuple)
    predictors = cast(
        "Sequence[Callable[..., Any]]", [predictor] * len(clients) if single else predictor
    )
    for g in predictors:
        if not callable(g):
            raise ModelError(
                f"client_sum '{name}': a predictor must be a function of a client's columns, got "
                f"{type(g).__name__}."
            )
    if len(predictors) != len(clients):
        raise ModelError(
            f"client_sum '{name}': {len(predictors)} predictors for {len(clients)} clients. Pass "
            "one for all of them, or one for each."
        )
    rows = [rows_of(x) for x in clients]
    for j, n in enumerate(rows):
        if None not in (n, rows[0]) and n != rows[0]:
            raise DataError(
                f"client_sum '{name}': client {j} holds {n} rows, client 0 holds {rows[0]}. Every "
                "client must hold the same rows, in the same order."
            )
    # A message of a type of its own: NumPyro's handlers let it pass, and apply_stack calls "fn"
    # unless a handler has replaced it.
    msg = {
        "type": "client_sum",
        "fn": total,
        "args": (Clients(name, tuple(predictors), tuple(clients)),),
        "kwargs": {},
        "value": None,
        "cond_indep_stack": [],
    }
    return apply_stack(msg)["value"]


def total(clients: Clients) -> Array:
    """Return the sum of the clients' predictors, (rows, ...)."""
    g = clients.predictions()
    return sum(g[1:], g[0])


def check_predictions(clients: Clients, predictions: Sequence[Any]) -> None:
    """Refuse predictions whose shapes or dtypes differ, or that do not run over the rows."""
    first = predictions[0]
    for j, g in enumerate(predictions):
        if g.shape != first.shape or g.dtype != first.dtype:
            raise ModelError(
                f"the predictor of client {j} in client_sum '{clients.name}' returned the shape "
                f"{g.shape} and dtype {g.dtype}, that of client 0 {first.shape} and {first.dtype}. "
                "All must return the same: one row for each row of the columns."
            )
        if not g.shape or rows_of(clients.columns[j]) not in (None, g.shape[0]):
            raise ModelError(
                f"the predictor of client {j} in client_sum '{clients.name}' was given "
                f"{rows_of(clients.columns[j])} rows and returned the shape {g.shape}. Its first "
                "axis must run over the rows."
            )


def rows_of(columns: object) -> int | None:
    """Return the number of rows of a client's columns; None if its arrays do not agree."""
    lengths = {np.shape(a)[0] for a in jax.tree.leaves(columns) if np.ndim(a)}
    return lengths.pop() if len(lengths) == 1 else None


class at_client_sum(Messenger):
    """A handler that computes the value of a ``client_sum`` by ``compute(clients)``."""

    def __init__(self, compute: Callable[[Clients], Any]):
        self.compute, self.met = compute, list[Clients]()
        self.inside = False  # whether ``compute`` runs: messages are then a client's
        super().__init__()

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "client_sum":
            self.met.append(msg["args"][0])
            msg["fn"] = self._compute
        elif silo_plate_of(msg) is not None:
            raise ModelError(
                f"silo_plate '{silo_plate_of(msg)}' stands in a model with a client_sum. Rows that "
                "are split over silos and columns that are split over clients cannot be combined: "
                "use numpyro.plate for the rows here."
            )

    def _compute(self, clients: Clients) -> Any:
        self.inside = True
        try:
            return self.compute(clients)
        finally:
            self.inside = False

    def only(self) -> Clients:
        """Return the arguments of the only ``client_sum``; refuse models with none or several."""
        if len(self.met) != 1:
            names = ", ".join(f"'{c.name}'" for c in self.met)
            raise ModelError(
                "the model has no client_sum, so nothing says which columns belong to which "
                "client. Write the part that reads them as nf.client_sum(name, predictor, clients)."
                if not names
                else f"the model has {len(self.met)} client_sums ({names}): one is supported. "
                "Let one predictor return several columns, as jnp.stack([a, b], -1)."
            )
        return self.met[0]


def positive_rho(rho: object) -> float:
    """Return ``rho`` as a float; refuse all but positive finite numbers."""
    if (
        isinstance(rho, bool)
        or not isinstance(rho, int | float | np.number)
        or not 0 < rho < np.inf
    ):
        raise ValueError(
            f"rho={rho!r}: expected a positive number, the standard deviation of each client's "
            "auxiliary variable. Without auxiliary variables the model as it is written is "
            "fitted by numpyro_fed.VFL(model, rho=None), for clients that may share their "
            "predictors."
        )
    return float(rho)


def augment(model: Callable[..., Any], rho: float) -> Callable[..., Any]:
    r"""Return the augmented model, in which the likelihood reads noisy predictors.

    .. math::
        z_j \sim N\big(g_j(x_j, \theta_j), \rho^2\big), \qquad
        y \sim p\Big(y \,\Big|\, \sum_j z_j\Big)

    Parameters
    ----------
    model : callable
        A model with one :func:`numpyro_fed.client_sum`.
    rho : float
        Standard deviation of the auxiliary variables, in the units of the predictor.

    Returns
    -------
    callable
        An ordinary NumPyro model of the same arguments, with the sites ``{name}_{j}/z`` besides.

    References
    ----------
    Hassan, Sutton, Mira, Mengersen (2024), arXiv 2405.04043, section 3.2, equation 6.

    Examples
    --------
    >>> import numpy as np, numpyro, numpyro.distributions as dist
    >>> import numpyro_fed as nf
    >>> def predictor(x):
    ...     return x * numpyro.sample("slope", dist.Normal(0, 1))
    >>> def model(xs, y=None):
    ...     eta = nf.client_sum("client", predictor, xs)
    ...     with numpyro.plate("row", eta.shape[0]):
    ...         numpyro.sample("y", dist.Normal(eta, 1), obs=y)
    >>> noisy = nf.handlers.augment(model, rho=0.5)
    >>> seeded = numpyro.handlers.seed(noisy, 0)
    >>> trace = numpyro.handlers.trace(seeded).get_trace([np.ones(3), np.ones(3)], np.zeros(3))
    >>> [name for name, site in trace.items() if site["type"] == "sample"]
    ['client_0/slope', 'client_1/slope', 'client_0/z', 'client_1/z', 'y']
    """
    rho = positive_rho(rho)

    def noisy_sum(clients: Clients) -> Array:
        z = [clients.auxiliary(j, g, rho) for j, g in enumerate(clients.predictions())]
        return sum(z[1:], z[0])

    def augmented(*args: object, **kwargs: object) -> Any:
        at = at_client_sum(noisy_sum)
        with at:
            out = model(*args, **kwargs)
        at.only()
        return out

    return augmented


def power_likelihood(model: Callable[..., Any], rho: float) -> Callable[..., Any]:
    r"""Return the power-likelihood model: each client's factor reads its own predictor exactly.

    .. math::
        \prod_{j=0}^{J-1} p\Big(y \,\Big|\, g_j(x_j, \theta_j) + \sum_{k \ne j} z_k\Big)^{1/J},
        \qquad z_j \sim N\big(g_j(x_j, \theta_j), \rho^2\big)

    This is equation 7 of the paper. Every observed site becomes a ``numpyro.factor`` of the same
    name. The product is not a normalised density of ``y``: to predict or to check, run the model
    itself at draws of its parameters. If ``y`` is not given, it is drawn from that model.

    Parameters
    ----------
    model : callable
        A model with one :func:`numpyro_fed.client_sum`.
    rho : float
        Standard deviation of the auxiliary variables, in the units of the predictor.

    Returns
    -------
    callable
        An ordinary NumPyro model of the same arguments, with the sites ``{name}_{j}/z`` besides.

    Raises
    ------
    ModelError
        When the model is run: for a latent whose distribution depends on the sum.

    References
    ----------
    Hassan, Sutton, Mira, Mengersen (2024), arXiv 2405.04043, section 3.3, equation 7.

    Examples
    --------
    >>> import numpy as np, numpyro, numpyro.distributions as dist
    >>> from numpyro.infer.util import log_density
    >>> import numpyro_fed as nf
    >>> def predictor(x):
    ...     return x * numpyro.sample("slope", dist.Normal(0, 1))
    >>> def model(xs, y=None):
    ...     eta = nf.client_sum("client", predictor, xs)
    ...     with numpyro.plate("row", eta.shape[0]):
    ...         numpyro.sample("y", dist.Normal(eta, 1), obs=y)
    >>> power = nf.handlers.power_likelihood(model, rho=1.0)
    >>> zero = {f"client_{j}/z": np.zeros(3) for j in (0, 1)}
    >>> zero |= {f"client_{j}/slope": 0.0 for j in (0, 1)}
    >>> data = [np.ones(3), np.ones(3)], np.zeros(3)
    >>> round(float(log_density(power, data, {}, zero)[0]), 3)  # eleven standard normals at zero
    -10.108
    """
    rho = positive_rho(rho)

    def powered(*args: object, **kwargs: object) -> Any:
        g, z = list[Array](), list[Array]()

        def true_sum(clients: Clients) -> Array:
            g[:] = clients.predictions()
            z[:] = [clients.auxiliary(j, g_j, rho) for j, g_j in enumerate(g)]
            return sum(g[1:], g[0])

        at = at_client_sum(true_sum)
        # The model runs twice. Here latents get their messages, and observed sites are hidden from
        # outer handlers: factors replace them below.
        hidden = handlers.block(
            hide_fn=lambda msg: msg["type"] == "sample" and msg["is_observed"] and not at.inside
        )
        with hidden, handlers.trace() as trace, at:
            out = model(*args, **kwargs)
        clients = at.only()
        scopes = tuple(f"{clients.scope(j)}/" for j in range(len(clients.columns)))
        server_sites = {n: s for n, s in trace.items() if not n.startswith(scopes)}
        observed = [
            n for n, s in server_sites.items() if s["type"] == "sample" and s["is_observed"]
        ]
        if not observed:
            return out
        values = {
            n: s["value"]
            for n, s in server_sites.items()
            if s["type"] in ("sample", "param") and n not in observed
        }

        def log_probs(eta: Array) -> dict[str, Array]:
            with handlers.block(), at_client_sum(lambda clients: eta):
                text = handlers.substitute(model, data=values)
                trace = handlers.trace(text).get_trace(*args, **kwargs)
                return {n: log_prob(s) for n, s in trace.items() if s["type"] == "sample"}

        for name, labels in provenance(log_probs, eta=g[0]).items():
            if labels and name not in observed:  # a latent whose distribution depends on the sum
                raise ModelError(LATENT_OF_SUM.format(name))
        # Row j of the stack is g_j plus the sum of all other z_k.
        drawn = jnp.stack(z)
        powers = jax.vmap(log_probs)(jnp.stack(g) + drawn.sum(0) - drawn)
        for name in observed:
            # The power 1/J of a product over J clients: the mean of their log likelihoods.
            numpyro.factor(name, powers[name].mean(0))
        return out

    return powered


ORDER = (
    "Bring the rows of all parties into one order (by numpy.argsort of the ids), and leave out "
    "those that somebody lacks."
)


def read_ids(ids: ArrayLike, rows: int, owner: str) -> np.ndarray:
    """Return the ids of ``rows`` rows as text (rows,), and refuse ids that occur twice.

    The number 7 and the text "7" are the same id.
    """
    given = np.asarray(ids)
    if given.dtype.kind == "f":
        raise DataError(f"the row ids of {owner} are fractions: give integers or text.")
    if given.shape != (rows,):
        raise DataError(
            f"the row ids of {owner} have the shape {given.shape}, expected ({rows},): one for "
            "each row."
        )
    text = np.array([str(value) for value in given.tolist()])
    values, counts = np.unique(text, return_counts=True)
    if len(values) < rows:
        raise DataError(
            f"the row id '{values[counts.argmax()]}' stands {counts.max()} times among those of "
            f"{owner}. Ids must name one row each."
        )
    return text


def check_same_ids(row_ids: Sequence[ArrayLike], rows: int, num_clients: int) -> None:
    """Refuse parties whose rows have other ids or another order than those of client 0.

    ``row_ids`` has the ids of each client, and of the server last if it has ids.
    """
    if len(row_ids) not in (num_clients, num_clients + 1):
        raise DataError(
            f"row_ids has {len(row_ids)} entries, expected {num_clients}, one for each client, and "
            "one more if the server's rows have ids, too."
        )
    owners = [f"client {j}" for j in range(num_clients)] + ["the server"]
    all_ids = [read_ids(ids, rows, owner) for ids, owner in zip(row_ids, owners, strict=False)]
    for ids, owner in zip(all_ids, owners, strict=False):
        if (different := np.flatnonzero(ids != all_ids[0])).size:
            i = different[0]
            raise DataError(
                f"row {i} is '{ids[i]}' at {owner} and '{all_ids[0][i]}' at client 0, and so for "
                f"{different.size} of {rows} rows. {ORDER}"
            )


def digest(ids: np.ndarray) -> str:
    """Return a hash of ids, by which parties compare them."""
    # It has no salt, since parties must arrive at the same hash without a common secret. Whoever
    # can guess the whole list of ids can confirm the guess.
    return hashlib.sha256("\n".join(ids.tolist()).encode()).hexdigest()


def check_same_digests(digests: Mapping[str, str]) -> None:
    """Refuse parties whose row ids have different digests.

    ``digests`` are by owner, and empty for parties without ids. A warning says so if only some of
    the parties have ids.
    """
    given = {owner: text for owner, text in digests.items() if text}
    without = [owner for owner in digests if owner not in given]
    if given and without:
        warnings.warn(
            f"nothing says whether the rows of {', '.join(without)} are those of "
            f"{', '.join(given)}: only the latter have row ids.",
            category=DataWarning,
            stacklevel=3,
        )
    for owner, text in given.items():
        first = next(iter(given))
        if text != given[first]:
            raise DataError(
                f"the rows of {owner} have other ids than those of {first}, or another order. "
                f"{ORDER}"
            )
