"""Who may ask a silo: signatures, numbers that grow, and studies that its owner has approved."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from typing import Any

from numpyro_fed.basics.errors import DataError, ModelError
from numpyro_fed.basics.files import Store, canonical, read_record
from numpyro_fed.network.policy import Policy
from numpyro_fed.network.silo_sums import SecureSums
from numpyro_fed.rounds.envelopes import Envelope, PrivateKey, signed_message
from numpyro_fed.rounds.messages import DESCRIBE, OF_DATA, Question, read
from numpyro_fed.rounds.secure_sums import KEYS

# The rooms of a silo's store: the last number of each session, and studies by their id.
ASKERS, STUDIES = "askers", "studies"
MAX_SESSIONS = 1_000
FLOOR = "floor"  # the room and name of the largest number among sessions that were forgotten
# What a message may ask that is signed for any silo: nothing that counts against a limit.
FREE = DESCRIBE, KEYS, *OF_DATA
PENDING, APPROVED, REFUSED = "pending", "approved", "refused"


class StrangerError(ModelError):
    """A request that this silo does not believe; what it says is for anybody's eyes."""


class StaleError(StrangerError):
    """A request's number is not above the last one: it is old, or was sent twice."""


@dataclass(frozen=True)
class Study:
    """A study that somebody asks a silo for, and what its owner says of it."""

    requester: str  # the fingerprint of who asks; empty without a signature
    study: str  # the hash of the files; empty where the silo was given none
    state: str = PENDING
    until: float = 0.0  # seconds since 1970, until which it is approved
    asked: float = 0.0  # when it was asked for first
    # What was asked for, and what would leave: {"nf.fit ...": "at most ..."}.
    costs: dict[str, str] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """Return the twelve digits by which the owner names it."""
        return sha256(f"{self.requester} {self.study}".encode()).hexdigest()[:12]


@dataclass
class Requesters:
    """What a silo knows of those who ask it."""

    policy: Policy
    store: Store
    sums: SecureSums  # whose key stays as long as the silo's folder does
    study: str  # the hash of the study's files here; empty where there are none

    @cached_property
    def key(self) -> PrivateKey:
        """Return the key by which this silo signs its replies."""
        return PrivateKey(self.sums.identity.private)

    def message_of(self, request: bytes, entry: dict[str, Any]) -> tuple[bytes, Envelope | None]:
        """Return the message of a request, and its envelope if it is signed; refuse a stranger's.

        Nothing is answered, counted or kept for a request that is refused. ``entry`` gets what the
        audit log is to say of it.
        """
        try:
            found = signed_message(request)
        except DataError as error:
            raise StrangerError(f"{error}.") from error
        if found is None:
            if self.policy.requesters:
                raise StrangerError(
                    "this silo answers signed requests alone (requesters in its owner's policy). "
                    "Sign them: numpyro-fed key, and numpyro-fed run --key FILE."
                )
            return request, None
        envelope, message = found
        entry |= {"requester": envelope.fingerprint, "study": envelope.study[:64]}
        if self.policy.requesters and envelope.fingerprint not in self.policy.requesters:
            raise StrangerError(
                f"the requester {envelope.fingerprint} is not among those of this silo's policy "
                "(requesters). Its owner may add it."
            )
        if envelope.to not in ("", self.key.public):
            raise StrangerError("the request was signed for another silo.")
        if not envelope.to and Question.of(read(message).head).exchange not in FREE:
            raise StrangerError("the request was signed for no silo. Begin the script again.")
        self._count(envelope)
        if self.study and envelope.study and envelope.study != self.study:
            raise StrangerError(
                f"the study's files differ: their hash is {envelope.study[:12]} where it is asked "
                f"for, and {self.study[:12]} at this silo. All parties must have the same files."
            )
        return message, envelope

    def _count(self, envelope: Envelope) -> None:
        """Keep the number of a request; refuse one that is not above those before."""
        room, floor = self.store.room(ASKERS), self.store.room(FLOOR)
        name = f"{envelope.fingerprint} {envelope.session}"
        last = room.get(name) or floor.get(FLOOR) or b"0"
        if envelope.count <= int(last):
            raise StaleError("the request is old, or was sent before: sign it again.")
        room.put({name: str(envelope.count).encode()})
        # The ones that were used least recently stand first. What they have sent stays old.
        if oldest := room.names()[:-MAX_SESSIONS]:
            largest = max(int(room.get(one) or b"0") for one in oldest)
            floor.put({FLOOR: str(max(largest, int(floor.get(FLOOR) or b"0"))).encode()})
            room.trim(MAX_SESSIONS)

    def check_study(self, envelope: Envelope | None, what: str, cost: str) -> None:
        """Note what a study asks for; raise an error unless its owner has approved the study."""
        if self.policy.approve != "ask":
            return
        known = self._known(envelope)
        if (costs := {**known.costs, what: cost}) != known.costs:
            keep_study(self.store, replace(known, costs=costs))
        self.check_approved(envelope)

    def check_approved(self, envelope: Envelope | None) -> None:
        """Raise an error unless the owner has approved the study, and its time is not over."""
        if self.policy.approve != "ask":
            return
        known = self._known(envelope)
        if known.state == REFUSED:
            raise ModelError(f"the owner of this silo has refused this study ({known.id}).")
        if known.state != APPROVED or time.time() > known.until:
            raise ModelError(
                f"this study waits for the silo's owner, who may approve it: 'numpyro-fed approve "
                f"{known.id}' at the site. Then run the same script again."
            )

    def _known(self, envelope: Envelope | None) -> Study:
        """Return what is known of the study that asks."""
        asks = Study(envelope.fingerprint if envelope else "", self.study, asked=time.time())
        return study_of(self.store, asks.id) or asks


def studies(store: Store) -> list[Study]:
    """Return all studies that were asked for, the first one first."""
    room = store.room(STUDIES)
    found = [study_of(store, name) for name in room.names()]
    return sorted((one for one in found if one), key=lambda one: one.asked)


def study_of(store: Store, id_: str) -> Study | None:
    """Return the study of an id; None if nobody has asked for it."""
    content = store.room(STUDIES).get(id_)
    return None if content is None else read_record(Study, content)


def keep_study(store: Store, study: Study) -> None:
    """Keep what is known of a study, and what its owner says of it."""
    store.room(STUDIES).put({study.id: canonical(study).encode()})
