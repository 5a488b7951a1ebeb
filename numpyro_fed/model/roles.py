"""The parties of a vertical model: its text split at the ``client_sum``, and its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array
from numpyro import handlers
from numpyro.infer.util import compute_log_probs

from numpyro_fed.errors import DataError, ModelError
from numpyro_fed.model.binding import Theta, bind, trace_at
from numpyro_fed.model.clients import Clients, at_client_sum, check_predictions
from numpyro_fed.model.data import SiloData, read_one, signature
from numpyro_fed.model.feasible import feasible
from numpyro_fed.model.jaxprs import provenance
from numpyro_fed.model.sites import NEEDS_VALUES, structure
from numpyro_fed.model.vertical import PREDICTOR, TOTAL, PartyModel, VerticalModel
from numpyro_fed.tracing import TRACING

LATENTS = "the server's latents"  # a label
ROWS_READ_ROWS = (
    "{} says something else of a row when other rows are left out (a mean over rows, say), so that "
    "minibatches are not possible. Compute such numbers before the run and pass them as data, or "
    "leave batch_size out."
)


class VerticalSplit(NamedTuple):
    """A split text, and what each party holds."""

    model: VerticalModel
    server: SiloData  # arrays by name; nothing that belongs to a client
    clients: tuple[SiloData, ...]  # columns, and what is shared of the server's
    arguments: tuple[Hashable, ...]  # of the model: shapes, dtypes and static values


class _Reached(Exception):
    """The text has come to its client_sum; there is nothing more to see."""


class Text(NamedTuple):
    """A model with its arguments: arrays by name, and all else as it is."""

    model: Callable[..., Any]
    signature: inspect.Signature
    data: SiloData

    @classmethod
    def of(cls, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Text:
        """Read the arguments of a call of the model."""
        signature = inspect.signature(model)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise DataError(f"the model does not take these arguments: {error}.") from error
        return cls(model, signature, read_one("the model", dict(bound.arguments)))

    def without_data(self) -> Text:
        """The text as it may be known everywhere: shapes in the place of arrays."""
        shapes = {n: jax.ShapeDtypeStruct(a.shape, a.dtype) for n, a in self.data.arrays.items()}
        return self._replace(data=replace(self.data, arrays=shapes))

    def run(self, arrays: Mapping[str, Any]) -> Any:
        """The text, with zeros for arrays that are not given."""
        held = self.data.arrays
        full = {
            n: arrays[n] if n in arrays else jnp.zeros(a.shape, a.dtype) for n, a in held.items()
        }
        bound = inspect.BoundArguments(self.signature, replace(self.data, arrays=full).kwargs)
        return self.model(*bound.args, **bound.kwargs)

    def columns(self, arrays: Mapping[str, Any], key: Array) -> Clients:
        """Return what the ``client_sum`` is given."""
        found: list[Clients] = []

        def reached(clients: Clients) -> Any:
            found.append(clients)
            raise _Reached

        at = at_client_sum(reached)
        try:
            with TRACING, handlers.block(), handlers.seed(rng_seed=key), feasible(), at:
                self.run(arrays)
        except _Reached:
            pass
        at.one()
        return found[0]

    def at_client(self, j: int, arrays: Mapping[str, Any] | None = None) -> Callable[..., Any]:
        """The text of client ``j``: its columns are its own, the server's arrays are zero if they
        are not given.
        """

        def text(columns: object, predictor: int, shared: object = None) -> None:
            shown: list[Array] = []

            def reached(clients: Clients) -> Any:
                shown.append(jnp.asarray(clients.predictors[j](columns)))
                raise _Reached

            at = at_client_sum(reached)
            try:
                with handlers.block(hide_fn=lambda msg: not at.inside), feasible(), at:
                    self.run(arrays or {})
            except _Reached:
                pass
            numpyro.deterministic(PREDICTOR, shown[0])

        return text

    def at_server(self, rows: int) -> Callable[..., Any]:
        """The text of the server, of its arrays by name and the sum."""

        def text(**leaves: Array) -> None:
            total = leaves.pop(TOTAL)
            held = {n: a for n, a in leaves.items() if n in self.data.arrays}
            hidden = {
                n: jnp.zeros((len(total), *a.shape[1:]), a.dtype)
                for n, a in self.data.arrays.items()
                if n not in held and a.shape[:1] == (rows,)
            }
            with at_client_sum(lambda clients: total) as at:
                self.run({**hidden, **held})
            at.one()

        return text


def split_vertical(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    share_response: bool = False,
) -> VerticalSplit:
    """Split a text at its ``client_sum``, and its arguments over the parties; see :func:`split`."""
    return split(Text.of(model, args, kwargs), share_response=share_response)


def split(whole: Text, *, share_response: bool = False) -> VerticalSplit:
    """Split a text at its ``client_sum``, and what it is given over the parties.

    Raises
    ------
    ModelError
        Without a ``client_sum``, with two, or with a silo plate; where the predictor of a client
        reads what is the server's, or the server what is one client's; where columns depend on a
        latent; and when the model itself raises.
    DataError
        For arguments that the model does not take, values that are not numbers, NaN; for a
        response among the columns that is not to be shared.
    """
    arrays, text = whole.data.arrays, whole.without_data()
    found, columns, readers = _columns(text, arrays)
    predictors = [found.predictors.index(p) for p in found.predictors]
    clients = [
        read_one(f"client {j}", {"columns": own, "predictor": predictors[j]})
        for j, own in enumerate(columns)
    ]
    halves = [
        _half(text.at_client(predictors[j]), data, f"client {j}") for j, data in enumerate(clients)
    ]
    known: dict[Any, PartyModel] = {}
    alike = zip(predictors, halves, strict=True)
    halves = [known.setdefault((predictor, half.sites), half) for predictor, half in alike]
    predicted = [_predicted(half, data) for half, data in zip(halves, clients, strict=True)]
    check_predictions(replace(found, columns=tuple(columns)), predicted)
    for j, (half, data) in enumerate(zip(halves, clients, strict=True)):
        _check_client(text, arrays, half, data, j)
    shape, dtype = predicted[0].shape, str(predicted[0].dtype)
    everything = {**arrays, TOTAL: np.zeros(shape, dtype)}
    server = _half(text.at_server(shape[0]), SiloData(everything), "the server")
    _check_observed(server, halves)
    reach = _server_reach(server, everything)
    parted = _parted(columns, readers, arrays)
    _check_readers(reach, readers, parted, len(clients), share_response)
    own = {n: a for n, a in arrays.items() if n not in readers or n in reach.density}
    if share_response:
        clients = [with_server_data(data, own) for data in clients]
    else:
        _check_not_given(arrays, reach.response, clients)
    model = VerticalModel(
        found.name, shape, dtype, server, tuple(halves), reach.by_row, reach.response, reach.below
    )
    return VerticalSplit(model, SiloData(own), tuple(clients), signature(whole.data))


def _check_observed(server: PartyModel, clients: Sequence[PartyModel]) -> None:
    """Refuse a text that says nothing about data: its posterior would be its prior."""
    if not any(s.kind in ("observed", "factor") for half in (server, *clients) for s in half.sites):
        latents = ", ".join(f"'{s.name}'" for s in server.named("latent"))
        raise ModelError(
            "no site is observed, so that the posterior would be the prior"
            + (f": was obs= forgotten at one of {latents}? " if latents else ". ")
            + "Pass the response as numpyro.sample(..., obs=y)."
        )


def with_server_data(client: SiloData, server: Mapping[str, Any]) -> SiloData:
    """The data of a client once it knows the server's arrays."""
    shared = {name: server[name] for name in sorted(server)}
    return read_one("a client", {**client.kwargs, "shared": shared})


def _check_readers(
    reach: _Reach,
    readers: Mapping[str, set[int]],
    parted: set[str],
    num_clients: int,
    share_response: bool,
) -> None:
    """Refuse a response that clients are given, and a server that reads one client's columns."""
    for name in reach.response:
        if name in readers and not share_response:
            raise DataError(
                f"'{name}' is observed, and is among the columns of client "
                f"{min(readers[name])}. Leave it out there, or say share_response=True if clients "
                "may know the response."
            )
    for name, clients in readers.items():
        own = name in reach.density and name not in reach.response
        if own and (len(clients) == 1 < num_clients or name in parted):
            raise ModelError(
                f"the model reads '{name}' outside of the client_sum, but it holds columns of "
                f"client {min(clients)}, which the server does not know. Move what reads it into "
                "the predictor, or pass it as an argument of its own if everybody may know it."
            )


def _parted(
    columns: list[Any], readers: Mapping[str, set[int]], arrays: dict[str, Any]
) -> set[str]:
    """The arrays of which some client is given a part, or what is made of it."""

    def whole(name: str, j: int) -> bool:
        held = (a for a in jax.tree.leaves(columns[j]) if _is_array(a))
        return any(np.array_equal(a, arrays[name], equal_nan=a.dtype.kind == "f") for a in held)

    return {name for name, who in readers.items() if not all(whole(name, j) for j in who)}


def _columns(text: Text, arrays: dict[str, Any]) -> tuple[Clients, list[Any], dict[str, set[int]]]:
    """The columns of each client, and the clients that are given something of each array."""
    found: list[Clients] = []

    def arrays_of(arrays: dict[str, Any], key: Array) -> list[list[Any]]:
        found.append(text.columns(arrays, key))
        return [[a for a in jax.tree.leaves(x) if _is_array(a)] for x in found[-1].columns]

    def labelled(**inputs: Array) -> Any:
        key = inputs.pop(LATENTS)
        return arrays_of(inputs, key)

    key = jax.random.key(0)
    try:
        labels = provenance(labelled, **arrays, **{LATENTS: key})
    except NEEDS_VALUES as error:
        raise ModelError(
            "the model asks for values of its arguments before the client_sum, where it is "
            "compiled once for all values and sees shapes alone. Compute what clients hold before "
            f"the run, or by jax.numpy in the place of numpy. {type(error).__name__}: {error}"
        ) from error
    computed = jax.jit(lambda arrays: arrays_of(arrays, key))(arrays)
    columns, readers = [], dict[str, set[int]]()
    for j, (own, reached) in enumerate(zip(found[-1].columns, labels, strict=True)):
        for label in frozenset[str]().union(*reached):
            if label == LATENTS:
                raise ModelError(
                    f"the columns of client {j} depend on a latent. A client's columns are data: "
                    "latents that belong to it are sampled in its predictor, others stay outside "
                    "of the client_sum."
                )
            readers.setdefault(label, set()).add(j)
        numbers = iter(map(np.asarray, computed[j]))
        columns.append(jax.tree.map(lambda a, it=numbers: next(it) if _is_array(a) else a, own))
    return found[-1], columns, readers


def _is_array(leaf: object) -> bool:
    return hasattr(leaf, "dtype")


def _half(text: Callable[..., Any], data: SiloData, owner: str) -> PartyModel:
    found = structure(text, data, owner, split=False)
    dim = max([s.stop for s in found.sites if s.kind == "latent"], default=0)
    return PartyModel(text, found, dim)


def _predicted(half: PartyModel, data: SiloData) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a client's predictor."""

    def g(data: SiloData) -> Array:
        theta = half.init_theta(jax.random.key(0), data)
        return half.log_probs(theta, jnp.zeros(half.dim), data)[1][PREDICTOR]["value"]

    return jax.eval_shape(g, data)


def _check_client(
    text: Text, arrays: dict[str, Any], half: PartyModel, data: SiloData, j: int
) -> None:
    """Refuse predictors that read what is the server's."""
    theta = half.init_theta(jax.random.key(0), data)

    def at(**inputs: Array) -> Any:
        key, z = inputs.pop(LATENTS), inputs.pop("own")
        own = text.at_client(j, inputs)
        log_probs, trace = trace_at(own, half.sites, theta, z, {}, data, key)
        return log_probs, trace[PREDICTOR]["value"]

    key = jax.random.key(0)
    labels = provenance(at, **arrays, **{LATENTS: key, "own": jnp.zeros(half.dim)})
    for name in frozenset[str]().union(*jax.tree.leaves(labels)) - {"own"}:
        what = "a latent of the server" if name == LATENTS else f"the argument '{name}'"
        raise ModelError(
            f"the predictor of client {j} reads {what} directly, which the client does not know. "
            "Give the client what it may know as a part of its columns, and sample in the "
            "predictor what belongs to it."
        )


class _Reach(NamedTuple):
    """The reach of what the server holds: arrays that its densities read, arrays that are observed,
    the observed sites that have a term for each row, and latents whose distribution depends on the
    sum.
    """

    density: frozenset[str]
    response: tuple[str, ...]
    by_row: frozenset[str]
    below: tuple[str, ...]


def _server_reach(half: PartyModel, arrays: dict[str, Any]) -> _Reach:
    data = SiloData(arrays)
    theta = half.init_theta(jax.random.key(0), data)
    rows = np.shape(arrays[TOTAL])[0]
    observed = [s.name for s in half.sites if s.kind in ("observed", "factor")]

    def at(**arrays: Array) -> Any:
        log_probs, trace = half.log_probs(theta, jnp.zeros(half.dim), SiloData(arrays))
        values = {n: trace[n]["value"] for n in observed if trace[n]["value"] is not None}
        return log_probs, values

    densities, values = provenance(at, **arrays)
    long = {n for n, a in arrays.items() if np.shape(a)[:1] == (rows,)}
    by_row = frozenset(n for n in observed if densities[n] & long)
    if not any(TOTAL in labels for labels in densities.values()):
        raise ModelError(
            "no site depends on the client_sum, so that the data say nothing about the clients' "
            "parameters. Use the sum in the distribution of an observed site (obs=), or of a "
            "latent one above it."
        )
    response = frozenset[str]().union(*jax.tree.leaves(values))
    read = frozenset[str]().union(*densities.values())
    below = tuple(s.name for s in half.named("latent") if TOTAL in densities.get(s.name, ()))
    return _Reach(read, tuple(sorted(response - {TOTAL})), by_row, below)


def hyperparameter_mask(half: PartyModel, data: SiloData) -> tuple[bool, ...]:
    """Say of each coordinate whether it is of a latent on which the priors of others depend."""
    theta = half.init_theta(jax.random.key(0), data)
    latents = {s.name: jnp.zeros(s.shape) for s in half.named("latent")}

    def densities(**latents: Array) -> dict[str, Array]:
        text = handlers.seed(bind(half.text, latents, theta), 0)
        with TRACING:
            return compute_log_probs(text, (), data.kwargs, {}, sum_log_prob=False)[0]

    labels = provenance(densities, **latents)
    read = frozenset[str]().union(*(labels[name] - {name} for name in latents))
    found = np.zeros(half.dim, bool)
    for s in half.named("latent"):
        found[s.start : s.stop] = s.name in read
    return tuple(found.tolist())


def _densities(half: PartyModel, theta: Theta, data: SiloData, **arrays: Array) -> dict[str, Array]:
    return half.log_probs(theta, jnp.zeros(half.dim), replace(data, arrays=arrays))[0]


def _rows_apart(
    fn: Callable[[SiloData], Any],
    data: SiloData,
    rows: int,
    take: Callable[[SiloData, Array], SiloData],
) -> bool:
    """Whether some rows of what ``fn`` returns are what it returns for these rows alone."""
    r = np.random.default_rng(0)
    arrays = {
        n: r.lognormal(0, 0.5, a.shape).astype(a.dtype) if a.dtype.kind == "f" else a
        for n, a in data.arrays.items()
    }
    held, some = replace(data, arrays=arrays), jnp.arange(0, rows, 2)
    whole, alone = fn(held), fn(take(held, some))
    pairs = zip(jax.tree.leaves(whole), jax.tree.leaves(alone), strict=True)
    return all(
        np.shape(a)[:1] != (rows,) or np.allclose(a[some], b, 1e-4, 1e-4, equal_nan=True)
        for a, b in pairs
    )


def check_batches(roles: VerticalSplit, batch_size: int) -> None:
    """Refuse minibatches that are too large, or where rows do not stand alone."""
    model = roles.model
    if batch_size > model.rows:
        raise ValueError(f"batch_size={batch_size} is more than the {model.rows} rows.")
    for j, (half, data) in enumerate(zip(model.clients, roles.clients, strict=True)):
        densities = partial(_densities, half, half.init_theta(jax.random.key(0), data), data)
        long = {n for n, a in data.arrays.items() if np.shape(a)[:1] == (model.rows,)}
        for name, labels in provenance(densities, **data.arrays).items():
            if labels & long:
                raise ModelError(
                    f"the density of '{name}' in the predictor of client {j} depends on its rows, "
                    "and nothing says how it grows with them. Leave batch_size out."
                )

        def predicted(data: SiloData, half: PartyModel = half) -> Array:
            theta = half.init_theta(jax.random.key(0), data)
            return model.predict(half, theta, jnp.full(half.dim, 0.3), data)[0]

        if not _rows_apart(predicted, data, model.rows, model.take):
            raise ModelError(ROWS_READ_ROWS.format(f"the predictor of client {j}"))

    def of_rows(data: SiloData) -> Any:
        theta = model.server.init_theta(jax.random.key(0), data)
        found = model.server.log_probs(theta, jnp.full(model.server.dim, 0.3), data)[0]
        return {n: p for n, p in found.items() if n in model.by_row}

    with_total = model.with_total(roles.server, jnp.zeros(model.shape, model.dtype))
    if not _rows_apart(of_rows, with_total, model.rows, model.take):
        raise ModelError(ROWS_READ_ROWS.format("the server's part of the model"))
    some = model.take(roles.server, jnp.arange(batch_size))
    total = jnp.zeros((batch_size, *model.shape[1:]), model.dtype)

    def at_some(data: SiloData) -> Any:
        theta = model.server.init_theta(jax.random.key(0), model.with_total(data, total))
        return model.log_server(theta, jnp.zeros(model.server.dim), total, data)

    try:
        jax.eval_shape(at_some, some)
    except Exception as error:
        raise ModelError(
            f"the server's part of the model cannot be run with {batch_size} of {model.rows} rows "
            f"({type(error).__name__}: {error}). Its latents must not be tied to the number of "
            "rows, nor plates to anything but the sum; or leave batch_size out."
        ) from error


def _check_not_given(
    arrays: dict[str, Any], response: Sequence[str], clients: Sequence[SiloData]
) -> None:
    """Refuse a response that is among a client's columns under another name."""
    for name in response:
        y = np.asarray(arrays[name], float)
        if y.ndim == 0 or y.size < 3 or (y == y.flat[0]).all():
            continue
        for j, client in enumerate(clients):
            for held, a in client.arrays.items():
                columns = [a, *(np.moveaxis(a, -1, 0) if a.ndim > 1 else [])]
                if any(c.shape == y.shape and np.array_equal(c, y) for c in columns):
                    raise DataError(
                        f"client {j}, '{held}' holds the numbers of the response '{name}', which "
                        "clients are not to know. Leave that column out, or say "
                        "share_response=True."
                    )
