"""Who may ask a silo: signatures, numbers that grow, and studies that its owner has approved."""

from __future__ import annotations

import json
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

# The rooms of a silo's store: the last number of each session of a requester, studies by their id,
# and what was asked for in them.
ASKERS, STUDIES, COSTS = "asked by ", "studies", "costs"
MAX_SESSIONS, LONGEST_NAME = 1_000, 64  # of a requester, and letters of the name of one
FLOOR = "floor"  # the name of the largest number among sessions that were forgotten
# Nanoseconds by which the first request of a session may be old, which files take, and by which a
# request may be ahead of this machine's clock.
OLDEST, AHEAD = 60 * 86_400 * 10**9, 86_400 * 10**9
# What a message may ask that is signed for any silo: nothing that counts against a limit.
FREE = DESCRIBE, KEYS, *OF_DATA
PENDING, APPROVED, REFUSED = "pending", "approved", "refused"


class StrangerError(ModelError):
    """A request that this silo does not believe; what it says is for anybody's eyes."""


class StaleError(ModelError):
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
    """The rules of a silo for those who ask, with the numbers and studies that it has seen."""

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
        entry |= {"requester": envelope.fingerprint}
        if self.policy.requesters and envelope.fingerprint not in self.policy.requesters:
            raise StrangerError(
                f"the requester {envelope.fingerprint} is not among those of this silo's policy "
                "(requesters). Its owner may add it."
            )
        if len(envelope.session) > LONGEST_NAME or not self.key.can_seal(envelope):
            raise StrangerError("the request's envelope is not one of this package.")
        return message, envelope

    def check_envelope(self, envelope: Envelope, message: bytes, *, again: bool) -> None:
        """Raise an error unless a signed request is for this silo, its study and this moment.

        ``again``: Whether the last request may come once more, as where its owner answers a file
        again whose reply was lost.
        """
        now, exchange = time.time_ns(), Question.of(read(message).head).exchange
        if envelope.to not in ("", self.key.public):
            raise ModelError("the request was signed for another silo.")
        if not envelope.to and (exchange not in FREE or envelope.count < now - OLDEST):
            raise ModelError("the request was signed for no silo. Begin the script again.")
        if envelope.count > now + AHEAD:
            raise ModelError(
                "the request is of a later day than this silo's clock has. One of the two clocks "
                "is wrong."
            )
        self._count(envelope, sha256(message).hexdigest(), again=again)
        if self.study and envelope.study and envelope.study != self.study:
            raise ModelError(
                f"the study's files differ: their hash is {envelope.study[:12]!a} where it is "
                f"asked for, and {self.study[:12]} at this silo. All parties must have the same "
                "files."
            )

    def _count(self, envelope: Envelope, digest: str, *, again: bool) -> None:
        """Keep the number of a request; refuse one that is not above those before."""
        # One room for each requester: nobody's numbers stand in another one's way.
        room = self.store.room(ASKERS + envelope.fingerprint)
        floor = int(room.get(FLOOR) or b"0")
        kept = room.get(envelope.session)
        count, silo, before = json.loads(kept) if kept else (floor, envelope.silo, "")
        if silo != envelope.silo:
            raise ModelError(
                f"the request was signed for silo {envelope.silo}, and this is {silo}."
            )
        if envelope.count == count and again and before == digest:
            return
        if envelope.count <= count:
            raise StaleError(
                f"the request is old, or was sent before: its number is not above {count}"
            )
        room.put({envelope.session: json.dumps([envelope.count, silo, digest]).encode()})
        if kept is None and (oldest := [n for n in room.names() if n != FLOOR][:-MAX_SESSIONS]):
            # What sessions that are forgotten have sent stays old.
            numbers = (json.loads(room.get(name) or b"[0]")[0] for name in oldest)
            room.put({FLOOR: str(max(floor, *numbers)).encode()})
            room.trim(MAX_SESSIONS + 1)

    def check_study(self, envelope: Envelope | None, what: str, cost: str) -> None:
        """Note what a study asks for; raise an error unless its owner has approved the study."""
        if self.policy.approve != "ask":
            return
        known, room = self._known(envelope), self.store.room(COSTS)
        # Apart from what the owner says, which another process writes.
        costs = json.loads(room.get(known.id) or b"{}")
        if costs.get(what) != cost:
            room.put({known.id: json.dumps({**costs, what: cost}).encode()})
        if study_of(self.store, known.id) is None:
            keep_study(self.store, known)
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
                f"this study waits for the silo's owner, who may approve it at the site by "
                f"'numpyro-fed approve {known.id} --until DATE --state FOLDER'. Then run the same "
                "script again."
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
    if content is None:
        return None
    costs = json.loads(store.room(COSTS).get(id_) or b"{}")
    return replace(read_record(Study, content), costs=costs)


def keep_study(store: Store, study: Study) -> None:
    """Keep what the owner says of a study."""
    store.room(STUDIES).put({study.id: canonical(replace(study, costs={})).encode()})
