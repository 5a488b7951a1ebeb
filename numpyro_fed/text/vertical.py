"""A vertical model, split at its ``client_sum``: each party's part of the text, and its data.

A client's text is the model run up to the ``client_sum``, where the client's predictor is called on
its columns and the run ends. The server's text is the model with the sum as one more argument.
Labels (:mod:`numpyro_fed.text.jaxprs`) tell which arrays reach which columns and densities; from
them follow who holds which array, and which texts are refused.
"""

from __future__ import annotations

import contextlib
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
from numpyro.distributions import biject_to

from numpyro_fed.basics.errors import DataError, ModelError
from numpyro_fed.basics.programs import TRACING
from numpyro_fed.data.silo_data import SiloData, read_one, signature
from numpyro_fed.numerics.accurate_densities import log_prob
from numpyro_fed.text.clients import Clients, at_client_sum, check_predictions
from numpyro_fed.text.jaxprs import provenance
from numpyro_fed.text.log_density import FederatedModel, packed
from numpyro_fed.text.silo_plate import feasible
from numpyro_fed.text.site_table import NEEDS_VALUES, Site, Theta, unpack
from numpyro_fed.text.trace import ARRAY, DENSITY, LATENT, OBSERVED, VALUE
from numpyro_fed.text.traces import Traces, run_text

TOTAL = "the sum over clients"  # the argument of the server's text that holds the sum
PREDICTOR = "_predictor"  # the deterministic site of a client's text that holds its predictor
LATENTS = "the server's latents"  # a label, beside the names of arrays
ROWS_READ_ROWS = (
    "{} says something else of a row when other rows are left out (a mean over rows, say), so that "
    "minibatches are not possible. Compute such numbers before the run and pass them as data, or "
    "leave batch_size out."
)


def party_of(text: Callable[..., Any], data: SiloData, owner: str) -> FederatedModel:
    """Return the part of the party ``owner``: a text whose sites may all read the party's data."""
    shapes = {n: jax.ShapeDtypeStruct(a.shape, a.dtype) for n, a in data.arrays.items()}
    party = FederatedModel(Traces(text, split=False), replace(data, arrays=shapes))
    party.traces.at(data, owner)  # errors of the text name the owner
    return party


def evaluated(
    party: FederatedModel, theta: Theta, z: Array, data: SiloData
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return the log density of each site of a party, not summed, and the values of its sites.

    Log-determinants are sites of their own. Values are those of latents and the predictor.
    """
    trace = party.traces.at(data)
    densities, values = (trace.outputs_of(kind, local=False) for kind in (DENSITY, VALUE))
    found = trace.at([*densities, *values], theta, trace.unpacked(z), data.arrays)
    at, of = ({o[1]: found[o] for o in outputs} for outputs in (densities, values))
    return at, of


def latents_of(party: FederatedModel, theta: Theta, z: Array, data: SiloData) -> dict[str, Array]:
    """Return a party's latents on their own supports, by site."""
    values = evaluated(party, theta, z, data)[1]
    return {s.name: values[s.name] for s in party.named("latent")}


def init_theta(party: FederatedModel, key: Array, data: SiloData) -> Theta:
    """Return initial values of a party's parameters, unconstrained."""
    if not (names := [s.name for s in party.named("param")]):
        return {}
    with TRACING, feasible():
        trace = handlers.trace(handlers.seed(party.text, key)).get_trace(**data.kwargs)
    supports = party.structure.supports
    return {n: biject_to(supports[n]).inv(trace[n]["value"]) for n in names}


def prior_draw(party: FederatedModel, key: Array, data: SiloData) -> Array:
    """Return a draw (dim,) of a party's latents from their prior, unconstrained."""
    with TRACING:
        trace = handlers.trace(handlers.seed(party.text, key)).get_trace(**data.kwargs)
    return packed(party.named("latent"), trace).get(None, jnp.zeros(0))


class VerticalModel(NamedTuple):
    """A vertical model, split into the server's part and the clients' parts."""

    name: str  # the name of the client_sum
    shape: tuple[int, ...]  # the shape of the sum; its first axis runs over rows
    dtype: str  # the dtype of the sum
    server: FederatedModel  # takes the server's arrays by name, and the sum as TOTAL
    # Clients with the same predictor and sites share one object.
    clients: tuple[FederatedModel, ...]
    by_row: frozenset[str]  # the server's observed sites that have a term for each row
    response: tuple[str, ...]  # the server's arrays that are observed
    below: tuple[str, ...] = ()  # the server's latents whose distribution depends on the sum

    @property
    def parties(self) -> tuple[FederatedModel, ...]:
        """Return the parts of all parties, the server's first."""
        return self.server, *self.clients

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return self.shape[0]

    @property
    def sites(self) -> dict[str, Site]:
        """Return the sites of all parties by their names in the model.

        Their slices are those of the coordinates of all parties, the server's first.
        """
        found, start = dict[str, Site](), 0
        for j, party in enumerate(self.parties):
            for s in party.sites:
                name = f"{self.name}_{j - 1}/{s.name}" if j else s.name
                found[name] = s._replace(name=name, start=start + s.start, stop=start + s.stop)
            start += party.dim
        return found

    def scoped(self, j: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of client ``j`` under their names in the whole model."""
        return {f"{self.name}_{j}/{name}": value for name, value in values.items()}

    def predict(
        self, client: FederatedModel, theta: Theta, z: Array, data: SiloData
    ) -> tuple[Array, Array]:
        """Return a client's predictor (rows, ...) and its log density (), which has all priors."""
        log_probs, values = evaluated(client, theta, z, data)
        log_density = sum((p.sum() for p in log_probs.values()), jnp.zeros(()))
        return values[PREDICTOR], log_density

    def log_server(
        self, theta: Theta, z: Array, total: Array, data: SiloData
    ) -> tuple[Array, Array]:
        """Return the log density of the server's other sites (), and the rows' log likelihood ().

        The likelihood is that of the sites in ``by_row``. It alone is scaled up in minibatches.
        """
        log_probs, _ = evaluated(self.server, theta, z, self.with_total(data, total))
        terms: tuple[list[Array], list[Array]] = ([], [])
        for name, value in log_probs.items():
            terms[name in self.by_row].append(value.sum())
        own, rows = (sum(part, jnp.zeros(())) for part in terms)
        return own, rows

    def with_total(self, data: SiloData, total: Array | np.ndarray) -> SiloData:
        """Return the server's data with the sum added as ``TOTAL``."""
        return replace(data, arrays={**data.arrays, TOTAL: total})

    def take(self, data: SiloData, rows: Array) -> SiloData:
        """Return a party's data at some rows, of each array whose first axis runs over rows."""
        arrays = {
            name: a[rows] if jnp.shape(a)[:1] == (self.rows,) else a
            for name, a in data.arrays.items()
        }
        return replace(data, arrays=arrays)


class VerticalSplit(NamedTuple):
    """A split vertical model, and each party's data."""

    model: VerticalModel
    server: SiloData  # the server's arrays by name, without the clients' columns
    # each client's columns, and the server's arrays if these are shared
    clients: tuple[SiloData, ...]
    arguments: tuple[Hashable, ...]  # shapes, dtypes and static values of the model's arguments


class _Reached(Exception):
    """Ends a run of the text at its ``client_sum``: what comes after belongs to the server."""


class Text(NamedTuple):
    """A vertical model with the arguments of a call, read as data."""

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

    def run(self, arrays: Mapping[str, Any]) -> Any:
        """Run the text, with zeros for the arrays that are not given, and return its result."""
        full = {
            n: arrays[n] if n in arrays else jnp.zeros(a.shape, a.dtype)
            for n, a in self.data.arrays.items()
        }
        bound = inspect.BoundArguments(self.signature, replace(self.data, arrays=full).kwargs)
        return self.model(*bound.args, **bound.kwargs)

    def columns(self, arrays: Mapping[str, Any], key: Array) -> Clients:
        """Return the arguments of the ``client_sum``, computed from the model's arguments."""

        def reached(clients: Clients) -> Any:
            raise _Reached

        seed, at = handlers.seed(rng_seed=key), at_client_sum(reached)
        with contextlib.suppress(_Reached), TRACING, handlers.block(), seed, feasible(), at:
            self.run(arrays)
        return at.only()

    def at_client(self, j: int, arrays: Mapping[str, Any] | None = None) -> Callable[..., Any]:
        """Return the text of client ``j``, a model of its columns.

        The model's own arguments are ``arrays``, and zeros if these are not given: a client does
        not know them.
        """

        # ``predictor`` and ``shared`` are part of a client's data, but not of its text.
        def text(columns: object, predictor: int, shared: object = None) -> None:
            predicted: list[Array] = []

            def reached(clients: Clients) -> Any:
                predicted.append(jnp.asarray(clients.predictors[j](columns)))
                raise _Reached

            at = at_client_sum(reached)
            # Sites before the client_sum are the server's; outer handlers must not get them.
            outside = handlers.block(hide_fn=lambda msg: not at.inside)
            with contextlib.suppress(_Reached), outside, feasible(), at:
                self.run(arrays or {})
            numpyro.deterministic(PREDICTOR, predicted[0])

        return text

    def at_server(self, rows: int) -> Callable[..., Any]:
        """Return the text of the server, a model of its arrays by name and the sum ``TOTAL``."""

        def text(**leaves: Array) -> None:
            total = leaves.pop(TOTAL)
            server_arrays = {n: a for n, a in leaves.items() if n in self.data.arrays}
            # In a minibatch the sum has fewer rows; zeros for the clients' columns must have as
            # many, since the text may take its number of rows from any array.
            client_arrays = {
                n: jnp.zeros((len(total), *a.shape[1:]), a.dtype)
                for n, a in self.data.arrays.items()
                if n not in server_arrays and a.shape[:1] == (rows,)
            }
            at = at_client_sum(lambda clients: total)
            with at:
                self.run({**client_arrays, **server_arrays})
            at.only()

        return text


def split(whole: Text, *, share_response: bool = False) -> VerticalSplit:
    """Split a vertical model at its ``client_sum``, and its arguments over the parties."""
    arrays = whole.data.arrays
    # Every party may know the shapes of all arrays, and no number in them.
    shapes = {n: jax.ShapeDtypeStruct(a.shape, a.dtype) for n, a in arrays.items()}
    text = whole._replace(data=replace(whole.data, arrays=shapes))
    sum_call, columns, readers = _columns(text, arrays)
    # Each client's predictor by the number of the first client that has it: equal ones share one
    # part of the model, and one compiled program.
    predictors = [sum_call.predictors.index(p) for p in sum_call.predictors]
    clients, parties, predicted = list[SiloData](), list[FederatedModel](), []
    distinct: dict[Any, FederatedModel] = {}
    for j, (own, first) in enumerate(zip(columns, predictors, strict=True)):
        data = read_one(f"client {j}", {"columns": own, "predictor": first})
        party = party_of(text.at_client(first), data, f"client {j}")
        party = distinct.setdefault((first, party.sites), party)
        predicted.append(jax.eval_shape(partial(_predicted, party), data))
        clients.append(data)
        parties.append(party)
    check_predictions(replace(sum_call, columns=tuple(columns)), predicted)
    for j, (party, data) in enumerate(zip(parties, clients, strict=True)):
        _check_client(text, arrays, party, data, j)
    shape, dtype = predicted[0].shape, str(predicted[0].dtype)
    everything = SiloData({**arrays, TOTAL: np.zeros(shape, dtype)})
    server = party_of(text.at_server(shape[0]), everything, "the server")
    trace = server.traces.at(everything)
    # A text that observes nothing: its posterior would be its prior.
    if not any(s.kind in ("observed", "factor") for p in (server, *parties) for s in p.sites):
        latents = ", ".join(f"'{s.name}'" for s in server.named("latent"))
        raise ModelError(
            "no site is observed, so that the posterior would be the prior"
            + (f": was obs= forgotten at one of {latents}? " if latents else ". ")
            + "Pass the response as numpyro.sample(..., obs=y)."
        )
    reads = {name: trace.reads((DENSITY, name), ARRAY) for name in trace.terms}
    read = frozenset[str]().union(*reads.values())
    if TOTAL not in read:
        raise ModelError(
            "no site depends on the client_sum, so that the data say nothing about the clients' "
            "parameters. Use the sum in the distribution of an observed site (obs=), or of a "
            "latent one above it."
        )
    long = {n for n, a in everything.arrays.items() if np.shape(a)[:1] == shape[:1]}
    observed = [s.name for s in server.sites if s.kind in ("observed", "factor")]
    by_row = frozenset(n for n in observed if reads[n] & long)
    values = (trace.reads((OBSERVED, name), ARRAY) for name in trace.supports)
    response = tuple(sorted(frozenset[str]().union(*values) - {TOTAL}))
    below = tuple(s.name for s in server.named("latent") if TOTAL in reads.get(s.name, ()))
    _check_readers(read, response, readers, arrays, columns, share_response)
    server_arrays = {n: a for n, a in arrays.items() if n not in readers or n in read}
    if share_response:
        clients = [with_server_data(data, server_arrays) for data in clients]
    model = VerticalModel(
        sum_call.name, shape, dtype, server, tuple(parties), by_row, response, below
    )
    return VerticalSplit(model, SiloData(server_arrays), tuple(clients), signature(whole.data))


def _predicted(party: FederatedModel, data: SiloData, at: float = 0.0) -> Array:
    """Return a client's predictor with all of its latents at one number."""
    theta = init_theta(party, jax.random.key(0), data)
    return evaluated(party, theta, jnp.full(party.dim, at), data)[1][PREDICTOR]


def is_array(leaf: object) -> bool:
    """Return whether a leaf of a client's columns is an array, and not a plain value."""
    return hasattr(leaf, "dtype")


def with_server_data(client: SiloData, server: Mapping[str, Any]) -> SiloData:
    """Return a client's data with the server's arrays added as ``shared``."""
    shared = {name: server[name] for name in sorted(server)}
    return read_one("a client", {**client.kwargs, "shared": shared})


def _check_readers(
    read: frozenset[str],
    response: Sequence[str],
    readers: Mapping[str, set[int]],
    arrays: dict[str, Any],
    columns: list[Any],
    share_response: bool,
) -> None:
    """Refuse a response among clients' columns, and a server that reads a client's columns."""
    for name in response:
        if name in readers and not share_response:
            raise DataError(
                f"'{name}' is observed, and is among the columns of client "
                f"{min(readers[name])}. Leave it out there, or say share_response=True if clients "
                "may know the response."
            )
    for name, clients in readers.items():
        if name not in read or name in response:
            continue
        # The server may hold an array that several clients receive whole, such as an area index.
        whole = all(
            any(
                np.array_equal(a, arrays[name], equal_nan=a.dtype.kind == "f")
                for a in filter(is_array, jax.tree.leaves(columns[j]))
            )
            for j in clients
        )
        if len(clients) == 1 < len(columns) or not whole:
            raise ModelError(
                f"the model reads '{name}' outside of the client_sum, but it holds columns of "
                f"client {min(clients)}, which the server does not know. Move what reads it into "
                "the predictor, or pass it as an argument of its own if everybody may know it."
            )
    # The response may be among a client's columns under another name.
    for name in () if share_response else response:
        y = np.asarray(arrays[name], float)
        # Constants and very short responses equal some column by chance.
        if y.ndim == 0 or y.size < 3 or (y == y.flat[0]).all():
            continue
        for j, own in enumerate(columns):
            for held, a in read_one(f"client {j}", {"columns": own}).arrays.items():
                parts = [a, *(np.moveaxis(a, -1, 0) if a.ndim > 1 else [])]
                if any(c.shape == y.shape and np.array_equal(c, y) for c in parts):
                    raise DataError(
                        f"client {j}, '{held}' holds the numbers of the response '{name}', which "
                        "clients are not to know. Leave that column out, or say "
                        "share_response=True."
                    )


def _columns(text: Text, arrays: dict[str, Any]) -> tuple[Clients, list[Any], dict[str, set[int]]]:
    """Return the ``client_sum``, each client's columns, and the clients that read each array."""
    calls, key = list[Clients](), jax.random.key(0)

    def arrays_of(**inputs: Array) -> list[list[Any]]:
        latents = inputs.pop(LATENTS)
        calls.append(text.columns(inputs, latents))
        return [list(filter(is_array, jax.tree.leaves(x))) for x in calls[-1].columns]

    try:
        labels = provenance(arrays_of, **arrays, **{LATENTS: key})
    except NEEDS_VALUES as error:
        raise ModelError(
            "the model asks for values of its arguments before the client_sum, where it is "
            "compiled once for all values and sees shapes alone. Compute what clients hold before "
            f"the run, or by jax.numpy in the place of numpy. {type(error).__name__}: {error}"
        ) from error
    computed = jax.jit(lambda arrays: arrays_of(**arrays, **{LATENTS: key}))(arrays)
    columns, readers = [], dict[str, set[int]]()
    for j, (own, reached) in enumerate(zip(calls[-1].columns, labels, strict=True)):
        for label in frozenset[str]().union(*reached):
            if label == LATENTS:
                raise ModelError(
                    f"the columns of client {j} depend on a latent. A client's columns are data: "
                    "latents that belong to it are sampled in its predictor, others stay outside "
                    "of the client_sum."
                )
            readers.setdefault(label, set()).add(j)
        numbers = iter(map(np.asarray, computed[j]))
        columns.append(jax.tree.map(lambda a, it=numbers: next(it) if is_array(a) else a, own))
    return calls[-1], columns, readers


def _check_client(
    text: Text, arrays: dict[str, Any], party: FederatedModel, data: SiloData, j: int
) -> None:
    """Refuse a predictor that reads latents or arguments of the server directly."""
    theta = init_theta(party, jax.random.key(0), data)

    def at(**inputs: Array) -> Any:
        key, z = inputs.pop(LATENTS), inputs.pop("own")
        client_text = text.at_client(j, inputs)
        trace = run_text(client_text, unpack(party.sites, z, {}), theta, data, key)
        log_probs = [log_prob(s) for s in trace.values() if s["type"] == "sample"]
        return log_probs, trace[PREDICTOR]["value"]

    key = jax.random.key(0)
    labels = provenance(at, **arrays, **{LATENTS: key, "own": jnp.zeros(party.dim)})
    for name in frozenset[str]().union(*jax.tree.leaves(labels)) - {"own"}:
        what = "a latent of the server" if name == LATENTS else f"the argument '{name}'"
        raise ModelError(
            f"the predictor of client {j} reads {what} directly, which the client does not know. "
            "Give the client what it may know as a part of its columns, and sample in the "
            "predictor what belongs to it."
        )


def hyperparameter_mask(party: FederatedModel, data: SiloData) -> tuple[bool, ...]:
    """Return for each coordinate whether the prior of another latent depends on it, (dim,) bools.

    Such latents are means and scales of priors. A start at the mode holds them at the median of
    their prior.
    """
    trace, latents = party.traces.at(data), party.named("latent")
    read = (trace.reads((DENSITY, s.name), LATENT) - {s.name} for s in latents)
    above = frozenset[str]().union(*read)
    # A tuple, which can be hashed: it is a static part of programs.
    return tuple(s.name in above for s in latents for _ in range(s.start, s.stop))


def _rows_apart(fn: Callable[[SiloData], Any], data: SiloData, model: VerticalModel) -> bool:
    """Return whether ``fn`` gives the same for every second row alone as for all rows."""
    # Random positive values in the place of the data: these may be a template's zeros, with which a
    # mean over rows would go unnoticed. Negative values may lie outside of a support. Indices stay.
    r, rows = np.random.default_rng(0), model.rows
    arrays = {
        n: r.lognormal(0, 0.5, a.shape).astype(a.dtype) if a.dtype.kind == "f" else a
        for n, a in data.arrays.items()
    }
    random, half = replace(data, arrays=arrays), jnp.arange(0, rows, 2)
    whole, part = fn(random), fn(model.take(random, half))
    pairs = zip(jax.tree.leaves(whole), jax.tree.leaves(part), strict=True)
    return all(
        np.shape(a)[:1] != (rows,) or np.allclose(a[half], b, 1e-4, 1e-4, equal_nan=True)
        for a, b in pairs
    )


def check_batches(roles: VerticalSplit, batch_size: int) -> None:
    """Refuse a batch size beyond the number of rows, and texts whose rows are not independent."""
    model = roles.model
    if batch_size > model.rows:
        raise ValueError(f"batch_size={batch_size} is more than the {model.rows} rows.")
    for j, (party, data) in enumerate(zip(model.clients, roles.clients, strict=True)):
        trace = party.traces.at(data)
        long = {n for n, a in data.arrays.items() if np.shape(a)[:1] == (model.rows,)}
        for name in trace.terms:
            if trace.reads((DENSITY, name), ARRAY) & long:
                raise ModelError(
                    f"the density of '{name}' in the predictor of client {j} depends on its rows, "
                    "and nothing says how it grows with them. Leave batch_size out."
                )
        if not _rows_apart(partial(_predicted, party, at=0.3), data, model):
            raise ModelError(ROWS_READ_ROWS.format(f"the predictor of client {j}"))

    def row_terms(data: SiloData) -> Any:
        theta = init_theta(model.server, jax.random.key(0), data)
        terms = evaluated(model.server, theta, jnp.full(model.server.dim, 0.3), data)[0]
        return {n: p for n, p in terms.items() if n in model.by_row}

    with_total = model.with_total(roles.server, jnp.zeros(model.shape, model.dtype))
    if not _rows_apart(row_terms, with_total, model):
        raise ModelError(ROWS_READ_ROWS.format("the server's part of the model"))
    some = model.take(roles.server, jnp.arange(batch_size))
    total = jnp.zeros((batch_size, *model.shape[1:]), model.dtype)
    try:
        key, z = jax.random.key(0), jnp.zeros(model.server.dim)
        jax.eval_shape(
            lambda data: model.log_server(
                init_theta(model.server, key, model.with_total(data, total)), z, total, data
            ),
            some,
        )
    except Exception as error:
        raise ModelError(
            f"the server's part of the model cannot be run with {batch_size} of {model.rows} rows "
            f"({type(error).__name__}: {error}). Its latents must not be tied to the number of "
            "rows, nor plates to anything but the sum; or leave batch_size out."
        ) from error
