"""Messages between processes: a head of texts and named arrays, in the format of safetensors.

The format has no compression and runs no code, and its header tells the size of each array before
anything is allocated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from jax import Array
from jax.typing import ArrayLike
from safetensors.numpy import save

from numpyro_fed.basics import display
from numpyro_fed.basics.errors import (
    CoupledRowsError,
    DataError,
    GuideError,
    RefusedError,
    ReplyError,
)
from numpyro_fed.basics.trees import Tree, drop_weak_types
from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.rounds.exchange import (
    Combine,
    Down,
    Exchange,
    ExchangeId,
    FederatedAlgorithm,
    Reply,
    Round,
    Silo,
    Up,
    combine,
    for_participants,
)
from numpyro_fed.rounds.silos import ServerData
from numpyro_fed.rounds.stacks import StackedExchange
from numpyro_fed.rounds.step import Answers, step

DTYPES = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "U32": np.uint32,
    "I32": np.int32,
    "U64": np.uint64,
    "I64": np.int64,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
}
# The errors of silos that cross, by name. All others are of the silo's process alone.
CROSSING: dict[str, type[ValueError]] = {
    kind.__name__: kind for kind in (CoupledRowsError, DataError, GuideError)
}
HEAD = "head"  # the name under which the file has the head, as JSON
# Bytes of the header at most. It names arrays and texts; the longest text is a plan, or the facts
# of a silo with some hundred sites, of 100 kB.
MAX_HEADER = 16 << 20


# The messages by which a run begins. They stand on the wire: all parties must be of one version.
BEGIN = "begin"  # at the first state of the algorithm that is run
SEARCH = "begin the search"  # at the first state of the search for the mode
WITHOUT_START = "begin without a start"  # of the algorithm for runs that have found no mode
DESCRIBE = "describe"  # the question for a silo's facts; no run belongs to it
ACCEPT = "accept"  # the plan that all have agreed on
LEVELS = "levels"  # the question for the names of levels, before there is a model
MOMENTS = "moments"  # the question for means and sds of columns, before there is a model
DESCRIBE_COLUMNS = "describe columns"  # the question for kinds, shares and rough quantiles
OF_DATA = LEVELS, MOMENTS, DESCRIBE_COLUMNS
DESCRIBED = "described"  # the part of an ACCEPT with a method that was not described before
VERSIONS = "versions"  # the part of a head with those of a silo's libraries, as JSON
DRAWS = "draws for a silo"  # draws of the globals, by which a silo predicts; there is no reply
GO_ON = "go on"  # at a state of an earlier run, whose id is in the settings
BEGINNINGS = BEGIN, SEARCH, WITHOUT_START


class Message(NamedTuple):
    """A message that was read."""

    head: dict[str, str]
    arrays: dict[str, np.ndarray]


class Question(NamedTuple):
    """The head of a message to a silo."""

    # The ExchangeId, or a message by which a run begins.
    exchange: str
    settings: str
    run: str = ""  # the id of the run
    # The number of this message. Within a run numbers grow; a message that is sent again has the
    # same number.
    number: int = 0
    # The number of the silo's last message whose reply was used: the silo answers from the state
    # that it had after that one.
    used: int = 0
    # The id of the method whose exchange it is, at a silo that has agreed on several.
    method: str = ""

    @property
    def id(self) -> ExchangeId:
        """Return the record by which the silo's method knows the exchange."""
        return ExchangeId(self.exchange, self.settings)

    def head(self) -> dict[str, str]:
        """Return the question as the head of a message."""
        return {name: str(value) for name, value in self._asdict().items()}

    @classmethod
    def of(cls, head: Mapping[str, str]) -> Question:
        """Return the question in the head of a message."""
        texts: list[Any] = [head.get(name) for name in cls._fields]
        exchange, settings, run, number, used, method = texts
        # Ten digits: enough for any run, and no text of a megabyte is made an int.
        if None in texts or not all(
            text.isascii() and text.isdigit() and len(text) <= 10 for text in (number, used)
        ):
            raise DataError(
                f"a message to a silo names {', '.join(cls._fields)}, but this one has "
                f"{sorted(head)}, or something else as a number. A Federation makes them."
            )
        return cls(exchange, settings, run, int(number), int(used), method)


def write(arrays: Mapping[str, ArrayLike], head: Mapping[str, str] | None = None) -> bytes:
    """Return named arrays and a head of texts as bytes."""
    # NumPy's scalars and arrays in another order than C's have other bytes than safetensors writes.
    named = {name: np.asarray(a, order="C") for name, a in arrays.items()}
    # One text for the whole head: safetensors writes several in any order, and equal messages must
    # have equal bytes.
    return save(named, {HEAD: json.dumps(dict(head or {}), sort_keys=True)})


def read(message: bytes) -> Message:
    """Return the head and the named arrays of a message of :func:`write`, as read-only views."""
    try:
        size = int.from_bytes(message[:8], "little")
        if size > min(MAX_HEADER, len(message) - 8):
            raise ValueError(f"a header of {size} bytes")
        head = json.loads(json.loads(message[8 : 8 + size])["__metadata__"][HEAD])
        if not all(isinstance(text, str) for text in head.values()):
            raise TypeError("a head of other things than texts")
        arrays = {
            name: np.frombuffer(found["data"], DTYPES[found["dtype"]]).reshape(found["shape"])
            for name, found in safetensors.deserialize(message)
        }
    # Damaged bytes make json, safetensors and NumPy raise errors of many types.
    except Exception as error:
        raise DataError(
            f"a message cannot be read: {len(message)} bytes that are no arrays in the format of "
            "safetensors. Silo and Federation make them, and nothing on the way may change them."
        ) from error
    return Message(head, arrays)


def refusal(error: Exception) -> bytes:
    """Return the reply of a silo that refuses a message, with the kind and words of its error."""
    return write({}, {"error": type(error).__name__, "words": str(error)})


def is_refusal(reply: bytes) -> bool:
    """Return whether a reply is one of :func:`refusal`."""
    try:
        return "error" in read(reply).head
    except DataError:
        return False


def at_silo(method: str, silo: int) -> str:
    """Return the name of a method at one silo, so that a message that goes astray moves nothing."""
    return f"{method}.{silo}" if method else ""


def raise_refusal(reply: bytes, silo: int, exchange: str) -> None:
    """Raise the error with which a silo has answered, if it has."""
    try:
        head, _ = read(reply)
    except DataError as error:
        raise ReplyError(f"is refused: {error}", silo=silo, exchange=exchange) from error
    if (name := head.get("error")) is not None:
        words = head.get("words", "no reason was given")[:2_000]
        begun = exchange not in (DESCRIBE, ACCEPT, *OF_DATA)
        if name not in CROSSING or (begun and CROSSING[name] is DataError):
            raise RefusedError(words, silo=silo, exchange=exchange)
        raise CROSSING[name](f"silo {silo} refuses '{exchange}': {words}")


def pack(prefix: str, tree: object) -> dict[str, Array]:
    """Return the leaves of a tree by name: ``prefix`` and the path in the tree."""
    return {
        prefix + jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)
    }


def unpack(prefix: str, like: Tree, arrays: Mapping[str, np.ndarray]) -> Tree:
    """Return the tree that was packed, of the structure, shapes and dtypes of ``like``."""
    leaves, names = [], set()
    for path, expected in jax.tree.leaves_with_path(like):
        name = prefix + jax.tree_util.keystr(path)
        names.add(name)
        array = arrays.get(name)
        # Checked before JAX sees it: another shape would be broadcast or compiled without a word.
        if array is None or (array.shape, array.dtype) != (expected.shape, expected.dtype):
            came = "nothing" if array is None else f"{array.dtype}{array.shape}"
            raise DataError(
                f"a message holds {came} as '{name}', where {expected.dtype}{expected.shape} was "
                "agreed. Both sides must have built from the same plan, in the same precision."
            )
        leaves.append(jnp.asarray(array))
    if unknown := sorted(name for name in arrays if name.startswith(prefix) and name not in names):
        raise DataError(f"a message holds '{unknown[0]}', which was not agreed.")
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


# An exchange with the shapes of what it sends down to a silo, and of the silo's reply.
MessageShapes = tuple[Exchange[Any, Any, Any], Any, Reply[Any]]


def message_shapes(
    algorithm: FederatedAlgorithm[Any, Any],
    rounds: Sequence[Round],
    data: SiloData,
    server_data: ServerData = None,
) -> list[MessageShapes]:
    """Return the shapes of all messages of rounds with one silo that holds ``data``.

    The rounds follow each other from the algorithm's first states; nothing is computed. Without
    ``server_data`` the algorithm's ``server_like`` gives the shapes of what the server holds.
    """
    if server_data is None:
        server_data = algorithm.server_like
    exchanges: list[Exchange[Any, Any, Any]] = []

    def trace(key: Array, data: SiloData, server_data: ServerData) -> list[tuple[Any, Reply[Any]]]:
        server, silo = algorithm.init_server(key), algorithm.init_silo(key, data)
        crossed: list[tuple[Any, Reply[Any]]] = []

        def transport(
            exchange: Exchange[Silo, Down, Up], noise: Array, down: Down, who: Array, silos: Silo
        ) -> Answers[Silo]:
            sent = for_participants(exchange.scatter, down, 0)
            reply, after = exchange.visit(exchange.silo_noise(noise, silos), sent, silos, data)
            exchanges.append(exchange)
            crossed.append((drop_weak_types(sent), reply))
            # A single silo is a stack of one, so that the server sees replies as in a real round.
            stack = jax.tree.map(lambda a: jnp.asarray(a)[None], reply)
            return Answers(combine(exchange.combine, [stack]), stack.ok, after)

        for round_ in rounds:
            if not round_.is_run:
                continue  # its exchanges leave states of the same shapes
            noise = round_.noise(key), [key] * len(round_.exchanges)
            who = jnp.arange(1)
            server, silo, *_ = step(round_, transport, noise, server, silo, who, server_data)
        return crossed

    shapes = jax.eval_shape(trace, jax.random.key(0), data, server_data)
    traced = {x.name: (x, *both) for x, both in zip(exchanges, shapes, strict=True)}
    asked = [x for round_ in rounds for x in round_.exchanges]
    return [
        shapes_of_stacked(x) if isinstance(x, StackedExchange) else traced[x.name] for x in asked
    ]


def shapes_of_stacked(exchange: StackedExchange[Any, Any, Any]) -> MessageShapes:
    """Return the shapes of the messages of a stacked exchange, which says them itself."""
    down, up = exchange.messages()
    ok: Any = jax.ShapeDtypeStruct((), bool)
    return exchange, down, Reply(up, ok)


class Crossing(NamedTuple):
    """One array of a message between server and silo."""

    when: str  # "start": before the first round, as often as it takes; "round": in each round
    exchange: str
    array: str
    up: bool  # from a silo to the server, or down to all silos
    shape: tuple[int, ...]
    dtype: str
    # Whether the server needs the sum over silos alone, which secure aggregation may form.
    summed: bool
    nbytes: int


class Crossings(NamedTuple):
    """All arrays that cross between the server and one silo; prints as a table."""

    rows: tuple[Crossing, ...]
    parties: tuple[str, str] = ("server", "silo")

    def nbytes(self, when: str, *, up: bool) -> int:
        """Return how many bytes cross, up or down, if each exchange takes place once."""
        return sum(row.nbytes for row in self.rows if row.when == when and row.up is up)

    def _cells(self) -> tuple[tuple[str, ...], ...]:
        """Return the names of the columns, then a row for each array."""
        head = ("when", "exchange", "from", "to", "array", "shape", "dtype", "")
        lines = []
        for row in self.rows:
            way = reversed(self.parties) if row.up else self.parties
            summed = "summed" if row.up and row.summed else ""
            what = row.array, str(row.shape), row.dtype, summed
            lines.append((row.when, row.exchange, *way, *what))
        return head, *lines

    def __str__(self) -> str:
        lines = self._cells()
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(word.ljust(w) for word, w in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )

    def _repr_html_(self) -> str:
        head, *lines = self._cells()
        return display.html_table(head, lines)


def crossings(
    when: str,
    algorithm: FederatedAlgorithm[Any, Any],
    rounds: Sequence[Round],
    data: SiloData,
    server_data: ServerData,
    *,
    silo: str = "silo",
) -> Crossings:
    """Return all arrays that cross in ``rounds``, from an algorithm's first states on.

    The silo holds ``data``. Shapes are found by tracing; nothing is computed.
    """
    rows: list[Crossing] = []
    for exchange, down, reply in message_shapes(algorithm, rounds, data, server_data):
        # Shown by their names in ``Reply``: they leave the silo, too, beside ``up``.
        sent = {"ok": reply.ok, "weight": reply.weight}
        for up, tree in ((False, down), (True, reply.up), (True, sent)):
            rows += [
                Crossing(
                    when,
                    exchange.name,
                    jax.tree_util.keystr(path, simple=True, separator=".") or "message",
                    up,
                    tuple(leaf.shape),
                    str(leaf.dtype),
                    exchange.combine is Combine.SUM,
                    leaf.size * leaf.dtype.itemsize,
                )
                for path, leaf in jax.tree.leaves_with_path(tree)
            ]
    return Crossings(tuple(rows), ("server", silo))
