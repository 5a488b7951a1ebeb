"""Runs of a vertical model over clients in processes of their own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeGuard

import jax
import numpy as np
from jax.typing import ArrayLike

from numpyro_fed.errors import ModelError
from numpyro_fed.methods.recipe import HasSettings, for_silos
from numpyro_fed.model.data import SiloData, read_one
from numpyro_fed.model.fingerprint import client_terms
from numpyro_fed.model.observed import Supports, as_bucket
from numpyro_fed.model.roles import Text, VerticalSplit, split
from numpyro_fed.model.row_ids import check_same_digests, digest, read_ids
from numpyro_fed.model.vertical_facts import Shapes, VerticalPlan, shared_text
from numpyro_fed.results.base import Silos
from numpyro_fed.results.vertical import VerticalBuilt, VerticalFit
from numpyro_fed.runtime.channel import Channel
from numpyro_fed.runtime.federation import Federation
from numpyro_fed.runtime.remote import remote

Arguments = Callable[[list[Any]], Mapping[str, Any]]  # columns of clients -> arguments of the model


class Assembles(HasSettings, Protocol):
    """A method for vertical models."""

    @property
    def share_response(self) -> bool: ...

    def assemble(self, roles: VerticalSplit) -> VerticalBuilt: ...

    def _description(self, built: VerticalBuilt) -> dict[str, Any]: ...


@dataclass(frozen=True, eq=False)
class VerticalAgreement:
    """The plan of a vertical model that server and clients have agreed on, and the server's part.

    Attributes
    ----------
    plan : VerticalPlan
    built : VerticalBuilt
    server_data : SiloData
    first_client : SiloData
        Zeros of the shapes of the first client.
    supports : Supports
        Of the server's response.
    description : dict
        What a saved state must agree with.
    """

    plan: VerticalPlan
    built: VerticalBuilt
    server_data: SiloData
    first_client: SiloData
    supports: Supports
    description: dict[str, Any]

    @classmethod
    def of(
        cls,
        method: Assembles,
        facts: Sequence[str],
        arguments: Arguments,
        row_ids: ArrayLike | None = None,
    ) -> VerticalAgreement:
        """Return the agreement of clients with these facts.

        ``arguments(columns)`` returns the model's arguments by name; it is called with zeros.

        Raises
        ------
        ModelError, DataError
            For parties that do not fit together.
        """
        clients = tuple(Shapes.from_json(text) for text in facts)
        digests = {f"client {j}": client.ids for j, client in enumerate(clients)}
        # The plan goes to all clients, whom the digests of others do not concern.
        clients = tuple(replace(client, ids="") for client in clients)
        zeros = [client.zeros()["columns"] for client in clients]
        _check_columns_unchanged(method.model, arguments, zeros)
        server_data = dict(arguments(zeros))
        text = Text.of(method.model, (), server_data)
        roles = split(text, share_response=method.share_response)
        supports = Supports.of_server(roles.model)
        supports.check(as_bucket(roles.server))
        shared = shared_text(roles.server.arrays) if method.share_response else ""
        if row_ids is not None:
            digests["the server"] = digest(read_ids(row_ids, roles.model.rows, "the server"))
        check_same_digests(digests)
        plan = VerticalPlan(Shapes.of(read_one("the server", server_data)), clients, shared, ())
        pairs = zip(roles.model.clients, roles.clients, strict=True)
        terms = (client_terms(*pair, by_value=plan.by_value) for pair in pairs)
        plan = replace(plan, terms=tuple(terms))
        built = method.assemble(roles)
        first = jax.tree.map(np.zeros_like, roles.clients[0])
        return cls(plan, built, roles.server, first, supports, method._description(built))

    @property
    def num_silos(self) -> int:
        """Return the number of clients."""
        return self.plan.num_silos

    def template(self) -> SiloData:
        """Return zeros of the shapes of the first client."""
        return self.first_client

    def fit_over(self, federation: Federation, name: str) -> tuple[VerticalFit, Silos]:
        """Return the fit for the clients of a federation, who know the method by an id."""
        channel = Channel(federation, self.num_silos, method=name)
        reach = partial(remote, plan=self, channel=channel)
        fit = VerticalFit(
            built=self.built,
            runtime=reach(self.built.algorithm),
            saved_description=self.description,
            server_data=self.server_data,
            supports=self.supports,
            first_client=self.first_client,
            reach=reach,
        )
        # Once all is built: where that is refused, silos have built nothing.
        federation.accept(name, self.plan.to_json())
        return fit, Silos((), (), channel.batches)


def clients_over(
    method: Assembles,
    federation: Federation,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    row_ids: ArrayLike | None,
) -> tuple[VerticalFit, Silos]:
    """Return the fit for clients that a federation stands for among the model's arguments."""
    bound = inspect.signature(method.model).bind(*args, **kwargs).arguments

    def arguments(columns: list[Any]) -> dict[str, Any]:
        return {k: columns if a is federation else a for k, a in bound.items()}

    name, facts = federation.describe(for_silos(method, federation.names))
    agreed = VerticalAgreement.of(method, facts, arguments, row_ids)
    # The server's data may be others than at an earlier run, so that only what clients need of
    # the plan is kept.
    key = ("clients", name, agreed.plan.to_json())
    fit, hosted = federation.cached(key, lambda: agreed.fit_over(federation, name))
    return replace(fit, server_data=agreed.server_data), hosted


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
