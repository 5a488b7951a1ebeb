"""A silo's part in sums that nobody sees: its keys, and which masks it has used."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Any, NamedTuple

import jax
import numpy as np

from numpyro_fed.basics.errors import DataError, ModelError
from numpyro_fed.basics.files import Store, canonical, read_record
from numpyro_fed.network.policy import Policy
from numpyro_fed.privacy.masks import (
    MAX_PARTIES,
    Greeting,
    KeyPair,
    encode,
    fingerprint,
    masked,
    pair_keys,
)
from numpyro_fed.rounds.exchange import Exchange
from numpyro_fed.rounds.messages import Question, pack, read, write
from numpyro_fed.rounds.secure_sums import MASKED, MIN_SUMMED, Terms, least_summed

# The names under which a silo keeps its key and what is used, and the room of sessions' keys.
IDENTITY, USED, SESSIONS = "identity", "sums", "sessions"
# Sessions whose keys a silo keeps; each federation of the server's script makes one.
MAX_SESSIONS = 16
# Runs of which a silo knows how often it has sent the last reply: as many as it has states of.
MAX_RUNS = 512


@dataclass(frozen=True)
class Session:
    """The keys of a session at a silo."""

    private: str  # the private key of this silo's pair for this session alone, hexadecimal
    name: str = ""  # the id of the session, without the number of the silo
    me: int = 0  # the number of this silo
    told: tuple[Greeting, ...] = ()  # all silos' public keys; empty before they are known

    @property
    def fresh(self) -> KeyPair:
        """Return the pair of this session."""
        return KeyPair(bytes.fromhex(self.private))


# The last sum of a session: its number, and a digest of what was sent in it.
LastSum = tuple[int, str]


class LastReply(NamedTuple):
    """The last reply of a run that was sent under masks."""

    session: str = ""
    question: str = ""  # a digest of the question without the terms of the sum
    group: Sequence[int] = ()
    times: int = 0  # how often it was sent under other masks before


@dataclass
class SecureSums:
    """The keys of a silo, and the sums that it has taken part in."""

    policy: Policy
    store: Store
    _pairs: dict[str, dict[int, bytes]] = field(default_factory=dict)

    @cached_property
    def identity(self) -> KeyPair:
        """Return the pair of keys by which other silos know this one."""
        kept = self.store.get(IDENTITY)
        if kept is None:
            kept = KeyPair.generate().private
            self.store.put({IDENTITY: kept})
        return KeyPair(kept)

    @cached_property
    def _used(self) -> tuple[dict[str, LastSum], dict[str, LastReply]]:
        """Return the last sum of each session, and the last reply of each run under masks."""
        sums, replies = json.loads(self.store.get(USED) or b"[{}, {}]")
        return sums, {run: LastReply(*one) for run, one in replies.items()}

    def greet(self, settings: Mapping[str, Any]) -> str:
        """Return this silo's public keys in a session, as JSON."""
        name = _text(settings, "session")
        session = self._known(name)
        if session is None:
            session = Session(KeyPair.generate().private.hex())
            self._keep(name, session)
        return canonical(Greeting(self.identity.public, session.fresh.public))

    def meet(self, settings: Mapping[str, Any]) -> None:
        """Take the public keys of all silos of a session."""
        name, me = _text(settings, "session"), settings.get("number")
        keys = settings.get("keys")
        if not isinstance(keys, list):
            raise DataError("a message holds something else than a list of silos' keys.")
        told = tuple(read_record(Greeting, text) for text in keys)
        session = self._session(name)
        own = self.identity.public, session.fresh.public
        if type(me) is not int or not 0 <= me < len(told) or told[me] != own:
            raise ModelError(
                "the list of silos' keys does not have this silo's own at its place: it is of "
                "another session, or was changed on its way. Begin again."
            )
        met = Session(session.private, name.rpartition(".")[0], me, told)
        if session.told and session != met:
            raise ModelError("other keys were told in this session before. Begin again.")
        least = max(MIN_SUMMED, int(self.policy.min_silos))
        different = {key for greeting in told for key in greeting}
        if not least <= len(told) <= MAX_PARTIES or len(different) < 2 * len(told):
            raise ModelError(
                f"{len(told)} silos with {len(different)} different keys are told, where each of "
                f"{least} to {MAX_PARTIES} silos must have two of its own (min_silos)."
            )
        others = [greeting.fingerprint for j, greeting in enumerate(told) if j != me]
        known = self.policy.peers or others
        if strange := [one for one in others if one not in known]:
            raise ModelError(
                f"the key {strange[0]} is not among the peers of this silo's policy. Its owner "
                "adds it, once the other silo's owner has told the same, not through the server."
            )
        self._keys_of(name, met)  # what is no key is refused now, not at the first sum
        self._keep(name, met)

    def check(self, terms: Terms, num_silos: int) -> None:
        """Raise an error for a sum, in a plan of so many silos, that this silo takes no part in."""
        session, group = self._session(terms.session), terms.group
        peers = set(self.policy.peers) - {fingerprint(self.identity.public)}
        least = least_summed(max(num_silos, len(session.told), 1 + len(peers)))
        least = max(least, int(self.policy.min_silos))
        whole = list(group) == sorted(set(group)) and set(group) <= set(range(len(session.told)))
        if not whole or session.me not in group:
            raise ModelError(
                f"a sum over silos {list(group)} is asked for: expected are numbers of the "
                f"{len(session.told)} silos of the session, in order, this one ({session.me}) "
                "among them."
            )
        if len(group) < least:
            raise ModelError(
                f"a sum over {len(group)} silos is asked for, where this silo takes part in those "
                f"over at least {least}: over three, where there are three or more, and over as "
                "many as its policy says (min_silos)."
            )
        last, _ = self._used[0].get(terms.session, (0, ""))
        if terms.number < last or terms.number == 0:
            raise ModelError(
                f"sum {terms.number} comes after sum {last} of the same session: masks are used "
                "once. It was sent twice or came late: drop it."
            )

    def masked(
        self,
        terms: Terms,
        question: Question,
        message: bytes,
        reply: bytes,
        exchange: Exchange[Any, Any, Any],
        asked: str,
    ) -> bytes:
        """Return a reply with its numbers under the masks of a sum, once these are noted as used.

        ``message`` is the question without the terms of the sum, ``reply`` the one to it, and
        ``asked`` :func:`asked_of_all`. Where replies are weighted, real numbers are multiplied by
        the weight, which is added up as well.
        """
        session = self._session(terms.session)
        self._note(terms, question, message, reply)
        keys = self._keys_of(terms.session, session)
        others = {j: keys[j] for j in terms.group if j != session.me}
        purpose = terms.purpose(session.name, question.exchange, asked)
        _, arrays = read(reply)
        given = [arrays[name] for name in sorted(arrays) if name.startswith("reply.up")]
        # In double precision, in which a product is not rounded.
        parts = [a.astype(np.float64) if a.dtype.kind == "f" else a for a in given]
        if exchange.weighted:
            weight = arrays["reply.weight"].astype(np.float64)
            parts = [a * weight if a.dtype.kind == "f" else a for a in parts]
            parts.append(weight)
        numbers = np.concatenate([np.zeros(0), *map(np.ravel, parts)])
        words = masked(encode(numbers, len(terms.group)), others, session.me, purpose)
        return write({MASKED: words, "ok": arrays["reply.ok"]})

    def _note(self, terms: Terms, question: Question, message: bytes, reply: bytes) -> None:
        """Note that the masks of a sum are used, on the disk before this returns."""
        sums, replies = self._used
        asked = _digest(message)
        all_of_it = _digest(canonical(terms).encode() + message + reply)
        number, digest = sums.get(terms.session, (0, ""))
        if terms.number == number:
            # Other words under the same masks would tell by how much they differ.
            if digest != all_of_it:
                raise ModelError(
                    f"another reply was sent under the masks of sum {terms.number}. Begin again."
                )
            return
        run, times = _digest(f"{question.method}/{question.run}".encode()), 0
        last = replies.get(run, LastReply())
        if last.question == asked:
            times = last.times + 1
            if last.session != terms.session or not set(terms.group) < set(last.group):
                raise ModelError(
                    f"a reply that was sent for a sum over silos {list(last.group)} is asked for "
                    f"in one over {list(terms.group)}: it is sent again for some of the same silos "
                    "alone, in the same session. Begin again."
                )
            if last.times >= self.policy.sums_again:
                raise ModelError(
                    f"a reply was sent under {times} masks already, as often as this silo's "
                    "policy allows (sums_again). Begin again, without the silos that drop out."
                )
        sums = {session: one for session, one in sums.items() if self._known(session)}
        sums[terms.session] = terms.number, all_of_it
        replies = OrderedDict(replies)
        replies.pop(run, None)
        replies[run] = LastReply(terms.session, asked, terms.group, times)
        while len(replies) > MAX_RUNS:
            replies.popitem(last=False)
        # First the disk: a silo that cannot write sends nothing.
        self.store.put({USED: json.dumps([sums, replies]).encode()})
        self._used = sums, replies

    def _keys_of(self, name: str, session: Session) -> dict[int, bytes]:
        """Return the keys in common with the other silos of a session."""
        if name not in self._pairs:
            ours = self.identity, session.fresh
            self._pairs = {name: pair_keys(*ours, session.name, session.told, session.me)}
        return self._pairs[name]

    def _known(self, name: str) -> Session | None:
        content = self.store.room(SESSIONS).get(name)
        return None if content is None else read_record(Session, content)

    def _session(self, name: str) -> Session:
        """Return the keys of a session."""
        session = self._known(name)
        if session is None:
            raise ModelError(
                "this silo has no keys of this session, or has forgotten them. Begin again."
            )
        return session

    def _keep(self, name: str, session: Session) -> None:
        sessions = self.store.room(SESSIONS)
        sessions.put({name: canonical(session).encode()})
        sessions.trim(MAX_SESSIONS)


def asked_of_all(
    plan: str, question: Question, arrays: Mapping[str, np.ndarray], scatter: object, down: object
) -> str:
    """Return a digest of all that the silos of a sum are asked alike.

    It is of the accepted plan, the question, and the ``arrays`` of the message that do not differ
    between silos (``scatter``); ``down`` are the shapes of all arrays.
    """
    differs = jax.tree.map(lambda own, part: jax.tree.map(lambda _: own, part), scatter, down)
    own = {name for name, is_own in pack("down", differs).items() if is_own}
    digest = sha256(json.dumps([plan, question.exchange, question.settings]).encode())
    for name, array in sorted(arrays.items()):
        if name not in own:
            digest.update(json.dumps([name, str(array.dtype), array.shape]).encode())
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _digest(content: bytes) -> str:
    return sha256(content).hexdigest()[:32]


def _text(settings: Mapping[str, Any], name: str) -> str:
    found = settings.get(name)
    if not isinstance(found, str) or len(found) > 100:
        raise DataError(f"a message holds {found!r:.100} as its {name}, where a text is expected.")
    return found
