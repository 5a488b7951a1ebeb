"""The two classes that NVFLARE runs: a relay at each site, and a hub at the server.

The analyst's process gives a message and a ticket to the hub, which gives them to a site's relay,
which gives the message to the silo's own process. No call lasts longer than ``HOLD`` and the way:
whose answer is not there yet says so, and is asked again by the ticket. So a process that has gone
is noticed soon, however long a silo computes.
"""

from __future__ import annotations

import hmac
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nvflare.collab import CollabCallError, collab
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.cellnet.utils import new_cell_message

from numpyro_fed_relay import HOLD, Found, Pending, relay

CHANNEL, TOPIC = "numpyro_fed", "ask"  # of the analyst's messages in NVFLARE's network
# The file in a site's folder local/ that says where its silo's process listens. In resources.json
# it would not do: NVFLARE tells the server what it does not know there.
SETTINGS = "numpyro_fed.json"
# Replies that a relay keeps, or a hub for each site, until they are asked for.
KEPT = 4
# Seconds for the way of a call beside HOLD; what is sent is waited for as long as it moves.
WAY = 15.0


class Relay:
    """What a site runs: it passes bytes to the silo's own process, and its reply back.

    Where that process listens is read from ``local/numpyro_fed.json`` of the site. A job says
    nothing to a relay but bytes.
    """

    def __init__(self) -> None:
        self._pending = Pending(KEPT)
        self._socket: str | None = None

    @collab.init
    def begin(self, context: Any) -> None:
        """Read where the silo's process listens."""
        file = Path(context.workspace.get_site_config_dir()) / SETTINGS
        if file.exists():
            self._socket = json.loads(file.read_text())["socket"]

    @collab.publish
    def exchange(self, ticket: str, message: bytes, timeout: float, context: Any) -> Found:
        """Return the silo's reply to a message, or that it computes, or is away.

        An empty message asks again for the reply to an earlier one.
        """
        if context.caller != "server":  # as NVFLARE knows it: other sites take part in the job
            return {"lost": "a relay answers nobody but the server"}
        make = (lambda: self._reply(message, timeout)) if message else None
        return self._pending.answer(ticket, make)

    def _reply(self, message: bytes, timeout: float) -> Found:
        if self._socket is None:
            return {"away": f"the site has no file local/{SETTINGS}"}
        try:
            return {"reply": relay(self._socket, message, timeout)}
        except OSError as error:
            return {"away": f"no process answers at the site's socket ({type(error).__name__})"}


class Hub:
    """What the server runs: it passes bytes between the analyst's process and the sites' relays.

    Parameters
    ----------
    sites : list of str
        The sites in the order of the silos' numbers.
    key : str
        A secret of the job: only who has submitted it knows the key, and is answered.
    idle : float
        Seconds without a message after which the job ends.
    """

    def __init__(self, sites: list[str], key: str, idle: float):
        self.sites, self.key, self.idle = sites, key, idle
        self._pending = Pending(KEPT * len(sites))
        self._waiting = ThreadPoolExecutor(4 * KEPT * len(sites), "numpyro-fed")
        self._ended, self._heard = threading.Event(), time.monotonic()
        self._clients: dict[str, Any] = {}

    @collab.main
    def run(self, context: Any) -> None:
        """Pass messages on until the analyst ends the job, or is silent for long."""
        self._clients = {client.name: client for client in context.clients}
        cell = collab.fl_ctx.get_engine().get_cell()
        self._heard = time.monotonic()
        cell.register_request_cb(channel=CHANNEL, topic=TOPIC, cb=self._received)
        while not self._ended.wait(0.5) and not context.is_aborted():
            if time.monotonic() - self._heard > self.idle:
                return

    def _received(self, request: Any) -> Any:
        """Return the message of NVFLARE's network that answers one of the analyst's process."""
        asked = request.payload
        key = asked.get("key") if isinstance(asked, dict) else None
        if not isinstance(key, str) or not hmac.compare_digest(key, self.key):
            return _message({"lost": "the key is not that of the job"})
        self._heard = time.monotonic()
        if asked.get("end"):
            self._ended.set()
        if "ticket" not in asked:
            return _message({})
        make = (lambda: self._pass_on(**asked)) if asked["message"] else None
        # Not in this thread: NVFLARE has few, which replies of the sites need too.
        return self._waiting.submit(lambda: _message(self._pending.answer(asked["ticket"], make)))

    def _pass_on(self, silo: int, ticket: str, message: bytes, timeout: float, key: str) -> Found:
        """Return what a site's relay says once its silo has replied, or that the site is lost."""
        client, until = self._clients.get(self.sites[silo]), time.monotonic() + timeout
        if client is None:
            return {"lost": "the site has no part in the job"}
        while (left := until - time.monotonic()) > 0:
            asked = time.monotonic()
            try:
                found = client(timeout=HOLD + WAY).exchange(ticket, message, left)
            except CollabCallError as error:
                silent = time.monotonic() - asked
                return {"lost": f"the site's relay does not answer: {error}", "silent": silent}
            if "computes" not in found:
                return found
            message = b""  # the relay has it
        return {"away": "the silo computes still"}


def _message(payload: Found) -> Any:
    return new_cell_message({MessageHeaderKey.RETURN_CODE: ReturnCode.OK}, payload)
