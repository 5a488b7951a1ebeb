"""The server of a vertical model whose clients are processes of their own."""

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
from numpyro_fed.methods.federated import RunOptions
from numpyro_fed.methods.node import PartyServer, Reach
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
    """A server of a vertical model whose clients live in processes of their own
    (:class:`numpyro_fed.SiloNode`, given a client's columns).

    It knows the shapes of the clients' columns and what they send, and nothing else.

    Parameters
    ----------
    method : VFL, SOUL
    facts : sequence of str
        What each client says of itself, JSON.
    arguments : callable
        ``arguments(columns)`` returns the model's arguments by name, ``columns`` (a list, one for
        each client) among what the server holds. It is given zeros.
    row_ids : array of int or str, optional
        Of the server's rows, compared with those of clients that have ids.

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
        clients = tuple(replace(client, ids="") for client in clients)  # no business of the others
        zeros = [client.zeros()["columns"] for client in clients]
        _check_handed_on(method.model, arguments, zeros)
        held = dict(arguments(zeros))
        text = Text.of(method.model, (), held)
        roles = split(text, share_response=method.share_response)
        self._supports = Supports.of_server(roles.model)
        self._supports.check(as_bucket(roles.server))
        told = shared_text(roles.server.arrays) if method.share_response else ""
        if row_ids is not None:
            digests["the server"] = digest(read_ids(row_ids, roles.model.rows, "the server"))
        check_same_digests(digests)
        self._plan = VerticalPlan(Shapes.of(read_one("the server", held)), clients, told)
        self._method: VerticalMethod[Any] = method
        self._held, self._template = roles.server, roles.clients[0]
        self._built: VerticalBuilt = method.assemble(roles)
        self._description = method._description(self._built)
        self.plan = self._plan.to_json()

    @property
    def num_silos(self) -> int:
        """Return how many clients there are."""
        return self._plan.num_silos

    def template(self) -> Any:
        """Return zeros of the shapes of the first client."""
        return jax.tree.map(np.zeros_like, self._template)

    @property
    def _agreed(self) -> VerticalServerNode:
        return self

    def _fit(self, runtime: Runtime) -> VerticalFit:
        return VerticalFit(
            built=self._built,
            runtime=runtime,
            said=self._description,
            server_data=self._held,
            supports=self._supports,
        )

    def _begin(
        self,
        fit: VerticalFit,
        key: Array,
        reach: Reach,
        progress_bar: bool,
    ) -> tuple[VerticalFit, State, VerticalStart | None]:
        return fit, *begin(fit, key, (), partial(reach, schedule=None, begin=SEARCH))

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

        The result is what the server knows: the posterior of its own latents, losses, and
        :func:`numpyro_fed.importance_correct` (which asks the clients once more).
        """
        course: RunOptions[VerticalRun] = RunOptions(num_rounds, self._held, progress_bar, stop)
        return self._method._driven(*self._begun(key, send, progress_bar), course)


def _check_handed_on(
    model: Callable[..., Any],
    arguments: Callable[[list[Any]], Mapping[str, Any]],
    columns: list[Any],
) -> None:
    """Refuse a text that computes what a predictor is given: a client hands over what it holds."""

    def numbered(a: object) -> object:
        return np.arange(1, a.size + 1).reshape(a.shape).astype(a.dtype) if _is_array(a) else a

    given = jax.tree.map(numbered, columns)
    text = Text.of(model, (), dict(arguments(given)))
    reached = text.columns(text.data.arrays, jax.random.key(0)).columns
    for j, (own, found) in enumerate(zip(given, reached, strict=True)):
        pairs = (list(filter(_is_array, jax.tree.leaves(tree))) for tree in (own, found))
        forms: list[Any] = [jax.tree.structure(tree) for tree in (own, found)]
        if forms[0] != forms[1] or not all(map(np.array_equal, *pairs)):
            raise ModelError(
                f"the model gives the predictor of client {j} something else than the columns that "
                "the client holds, and nothing of the model but the predictor is run there. "
                "Compute it in the predictor, or before the client describes its columns."
            )


def _is_array(leaf: object) -> TypeGuard[np.ndarray]:
    return hasattr(leaf, "dtype")
