"""The server of a vertical model whose clients are in processes of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import Array
from jax.typing import ArrayLike

from numpyro_fed.methods.base import RunOptions
from numpyro_fed.methods.elsewhere import agreed_already
from numpyro_fed.methods.recipe import for_silos
from numpyro_fed.methods.vertical import VerticalMethod
from numpyro_fed.methods.vertical_elsewhere import Arguments, VerticalAgreement
from numpyro_fed.results.vertical import VerticalRun
from numpyro_fed.runtime.channel import Send


class VerticalServerNode:
    """A server of a vertical model whose clients are in processes of their own.

    Each client is a :class:`numpyro_fed.SiloNode` with the client's columns. The server knows the
    shapes of the columns and the clients' messages, and nothing else.

    Parameters
    ----------
    method : VFL, SOUL
    facts : sequence of str
        The facts of each client, JSON.
    arguments : callable
        ``arguments(columns)`` returns the model's arguments by name, ``columns`` (a list, one for
        each client) among the server's data. It is called with zeros.
    row_ids : array of int or str, optional
        The ids of the server's rows, compared with those of clients that have ids.

    Attributes
    ----------
    plan : str
        JSON, for every client to accept. Under ``share_response`` the server's arrays are in it.

    Raises
    ------
    ModelError, DataError
        For parties that do not fit together.

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
    >>> vfl = nf.VFL(model, rho=1.0)
    >>> nodes = [nf.SiloNode(vfl, np.ones((5, p))) for p in (1, 2)]
    >>> server = nf.VerticalServerNode(
    ...     vfl, [n.facts() for n in nodes], lambda xs: dict(xs=xs, y=np.zeros(5)))
    >>> for j, node in enumerate(nodes):
    ...     node.accept(server.plan, j)
    >>> result = server.run(jax.random.key(0), 2, lambda j, message: nodes[j].handle(message))
    >>> result.losses.shape
    (2,)
    """

    def __init__(
        self,
        method: VerticalMethod[Any],
        facts: Sequence[str],
        arguments: Arguments,
        *,
        row_ids: ArrayLike | None = None,
    ):
        self._method, self._facts = method, list(facts)
        self._agreed = VerticalAgreement.of(method, facts, arguments, row_ids)
        self.plan = self._agreed.plan.to_json()

    @property
    def num_silos(self) -> int:
        """Return the number of clients."""
        return self._agreed.num_silos

    def run(
        self,
        key: Array,
        num_rounds: int,
        send: Send,
        *,
        progress_bar: bool = False,
        stop: str | None = None,
    ) -> VerticalRun:
        """Run rounds; ``send(client, message) -> reply`` carries bytes.

        The result has what the server knows: the posterior of its own latents, losses, and
        :func:`numpyro_fed.importance_correct`, which asks the clients once more.
        """
        clients = agreed_already(self._method, self._facts, send)
        name, _ = clients.describe(for_silos(self._method, clients.names))
        options: RunOptions[VerticalRun] = RunOptions(num_rounds, None, progress_bar, stop)
        return self._method.run_fit(*self._agreed.fit_over(clients, name), key, options)
