"""The states that a silo keeps of its runs, in memory and on its disk."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax.typing import ArrayLike

from numpyro_fed.errors import DataError, ModelError
from numpyro_fed.files import Store
from numpyro_fed.runtime.messages import BEGINNINGS, Question, pack, read, unpack, write

# Runs whose states a silo keeps. A call of ``nf.fit`` makes some six, of which it may correct any.
# More take more of the silo's disk, two states each.
MAX_RUNS = 16
# Ids of runs that were forgotten, so that a message that comes late does not begin one again.
MAX_FORGOTTEN = 10_000


@dataclass(frozen=True)
class RunStates:
    """A silo's states of one run: those between which the server may still choose.

    Attributes
    ----------
    beginning : str
        The message by which the run began; it says which algorithm is run.
    states : dict of int to pytree
        The state after the message of each number: the one from which the last message was
        answered, and the one after it. If the server never uses the last reply, it goes on from
        the former.
    number, digest, reply
        The number of the last message, its SHA-256, and the reply to it, which a message that
        comes again gets once more.
    """

    beginning: str
    states: dict[int, Any]
    number: int = 0
    digest: str = ""
    reply: bytes = b""

    def answered(self, question: Question, digest: str) -> bytes | None:
        """Return the reply to a message that has been answered before; None for a new one.

        Raises
        ------
        ModelError
            For a message that comes late, after a newer one was answered.
        """
        if question.number == self.number and digest == self.digest:
            return self.reply
        if question.number < self.number:
            raise ModelError(
                f"message {question.number} ('{question.exchange}') comes after message "
                f"{self.number} of the same run was answered. It was sent twice or came late: "
                "drop it."
            )
        return None

    def state_at(self, question: Question) -> Any:
        """Return the state from which the server asks.

        Raises
        ------
        ModelError
            If the silo does not have it any more.
        """
        if question.used not in self.states:
            raise ModelError(
                f"the server asks from the state after message {question.used}, but this silo has "
                f"those after {sorted(self.states)} of this run. Go on from the last result of a "
                "run, or begin again."
            )
        return self.states[question.used]

    def step(self, question: Question, digest: str, reply: bytes, after: object) -> RunStates:
        """Return the run with the state after a message, the one before it, and the reply."""
        states = {question.used: self.states[question.used], question.number: after}
        return RunStates(self.beginning, states, question.number, digest, reply)

    def to_bytes(self) -> bytes:
        """Return the run as bytes."""
        head = {
            "beginning": self.beginning,
            "labels": ",".join(map(str, self.states)),
            "number": str(self.number),
            "digest": self.digest,
        }
        arrays: dict[str, ArrayLike] = {"reply": np.frombuffer(self.reply, np.uint8)}
        # An exchange such as a correction leaves the state as it is.
        distinct = {id(state): i for i, state in enumerate(self.states.values())}
        head["places"] = ",".join(str(distinct[id(state)]) for state in self.states.values())
        for i, state in enumerate(self.states.values()):
            if distinct[id(state)] == i:
                arrays |= pack(f"{i}", state)
        return write(arrays, head)

    @classmethod
    def from_bytes(cls, content: bytes, shapes_of: Callable[[str], Sequence[Any]]) -> RunStates:
        """Return the run that :meth:`to_bytes` wrote.

        ``shapes_of(beginning)`` returns the structures that the states may have.
        """
        head, arrays = read(content)
        beginning = head["beginning"]
        if beginning not in BEGINNINGS:
            raise DataError(f"a file of a silo's states begins by '{beginning}'.")
        labels = list(map(int, head["labels"].split(",")))
        places = list(map(int, head["places"].split(",")))
        found = {i: _read_state(f"{i}", arrays, shapes_of(beginning)) for i in set(places)}
        states = {label: found[i] for label, i in zip(labels, places, strict=True)}
        reply = arrays["reply"].tobytes()
        return cls(beginning, states, int(head["number"]), head["digest"], reply)


def _read_state(prefix: str, arrays: dict[str, np.ndarray], shapes: Sequence[Any]) -> Any:
    """Return a state, in the first of the structures that fits."""
    for like in shapes[:-1]:
        try:
            return unpack(prefix, like, arrays)
        except DataError:
            continue
    return unpack(prefix, shapes[-1], arrays)


@dataclass
class KeptRuns:
    """All runs of a silo; the one that was used least recently is forgotten first.

    With a store that outlives the process a silo goes on where an earlier process has ended.
    """

    store: Store | None
    shapes_of: Callable[[str], Sequence[Any]]
    runs: OrderedDict[str, RunStates] = field(default_factory=OrderedDict)
    forgotten: OrderedDict[str, None] = field(default_factory=OrderedDict)

    def get(self, run: str) -> RunStates | None:
        """Return the states of a run; None if the silo has none."""
        if run not in self.runs and self.store is not None:
            content = self.store.get(run)
            if content is not None:
                self.runs[run] = RunStates.from_bytes(content, self.shapes_of)
        if run in self.runs:
            self.runs.move_to_end(run)
        return self.runs.get(run)

    def put(self, run: str, states: RunStates) -> None:
        """Keep the states of a run, on the disk before this returns."""
        if run in self.forgotten:
            raise ModelError(
                "a message is of a run that this silo has forgotten: it keeps the states of the "
                f"last {MAX_RUNS} runs. Begin again."
            )
        self.runs[run] = states
        self.runs.move_to_end(run)
        if self.store is not None:
            self.store.put({run: states.to_bytes()})
        for old in list(self.runs)[:-MAX_RUNS]:
            del self.runs[old]
            self.forgotten[old] = None
        if self.store is not None:
            # Those of an earlier process, too, which this one may never have read.
            self.store.trim(MAX_RUNS)
        while len(self.forgotten) > MAX_FORGOTTEN:
            self.forgotten.popitem(last=False)
