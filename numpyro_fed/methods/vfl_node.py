"""The server of a vertical model whose clients are in processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeGuard

import jax
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_fed.errors import ModelError
from numpyro_fed.methods.base import RunOptions
from numpyro_fed.methods.node import MakeRuntime, PartyServer
from numpyro_fed.methods.vertical import VerticalMethod, begin
from numpyro_fed.model.data import read_one
from numpyro_fed.model.observed import Supports, as_bucket
from numpyro_fed.model.roles import Text, split
from numpyro_fed.model.row_ids import check_same_digests, digest, read_ids
from numpyro_fed.model.vertical_facts import Shapes, VerticalPlan, shared_text
from numpyro_fed.results.vertical import VerticalBuilt, VerticalFit, VerticalRun, VerticalStart
from numpyro_fed.runtime.node import SEARCH, Send
from numpyro_fed.runtime.stack import Runtime, State


class VerticalServerNode(PartyServer[VerticalFit, VerticalRun]):
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
        arguments: Callable[[list[Any]], Mapping[str, Any]],
        *,
        row_ids: ArrayLike | None = None,
    ):
        clients = tuple(Shapes.from_json(text) for text in facts)
        digests = {f"client {j}": client.ids for j, client in enumerate(clients)}
        # The plan goes to all clients, whom the digests of others do not concern.
        clients = tuple(replace(client, ids="") for client in clients)
        zeros = [client.zeros()["columns"] for client in clients]
        _check_columns_unchanged(method.model, arguments, zeros)
        server_data = dict(arguments(zeros))
        text = Text.of(method.model, (), server_data)
        roles = split(text, share_response=method.share_response)
        self._supports = Supports.of_server(roles.model)
        self._supports.check(as_bucket(roles.server))
        shared = shared_text(roles.server.arrays) if method.share_response else ""
        if row_ids is not None:
            digests["the server"] = digest(read_ids(row_ids, roles.model.rows, "the server"))
        check_same_digests(digests)
        self._plan = VerticalPlan(Shapes.of(read_one("the server", server_data)), clients, shared)
        self._method: VerticalMethod[Any] = method
        self._server_data, self._template = roles.server, roles.clients[0]
        self._built: VerticalBuilt = method.assemble(roles)
        self._description = method._description(self._built)
        self.plan = self._plan.to_json()

    @property
    def num_silos(self) -> int:
        """Return the number of clients."""
        return self._plan.num_silos

    def template(self) -> Any:
        """Return zeros of the shapes of the first client."""
        return jax.tree.map(np.zeros_like, self._template)

    @property
    def _parties(self) -> VerticalServerNode:
        return self

    def _fit(self, runtime: Runtime) -> VerticalFit:
        return VerticalFit(
            built=self._built,
            runtime=runtime,
            saved_description=self._description,
            server_data=self._server_data,
            supports=self._supports,
        )

    def _begin(
        self,
        fit: VerticalFit,
        key: Array,
        make_runtime: MakeRuntime,
        progress_bar: bool,
    ) -> tuple[VerticalFit, State, VerticalStart | None]:
        # No batches: the clients' data are in their processes.
        return fit, *begin(fit, key, (), partial(make_runtime, schedule=None, begin=SEARCH))

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
        options: RunOptions[VerticalRun] = RunOptions(
            num_rounds, self._server_data, progress_bar, stop
        )
        return self._method._run_rounds(*self._start_run(key, send, progress_bar), options)


def _check_columns_unchanged(
    model: Callable[..., Any],
    arguments: Callable[[list[Any]], Mapping[str, Any]],
    columns: list[Any],
) -> None:
    """Raise an error for a model that changes columns before it hands them to a predictor.

    Only the predictor is run at a client, on the columns as the client holds them.
    """

    def with_numbers(a: object) -> object:
        return np.arange(1, a.size + 1).reshape(a.shape).astype(a.dtype) if _is_array(a) else a

    # Numbers that are all different: a permutation or a product would show.
    numbered = jax.tree.map(with_numbers, columns)
    text = Text.of(model, (), dict(arguments(numbered)))
    received = text.columns(text.data.arrays, jax.random.key(0)).columns
    for j, (sent, arrived) in enumerate(zip(numbered, received, strict=True)):
        pairs = (list(filter(_is_array, jax.tree.leaves(tree))) for tree in (sent, arrived))
        forms: list[Any] = [jax.tree.structure(tree) for tree in (sent, arrived)]
        if forms[0] != forms[1] or not all(map(np.array_equal, *pairs)):
            raise ModelError(
                f"the model gives the predictor of client {j} something else than the columns that "
                "the client holds, and nothing of the model but the predictor is run there. "
                "Compute it in the predictor, or before the client describes its columns."
            )


def _is_array(leaf: object) -> TypeGuard[np.ndarray]:
    return hasattr(leaf, "dtype")
