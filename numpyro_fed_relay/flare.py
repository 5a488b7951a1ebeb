"""The two classes that NVFLARE runs: a relay at each site, and a hub at the server.

The analyst's process sends a message and a ticket to the hub, which passes them to a site's relay,
which passes the message to the silo's own process. No call lasts longer than ``HOLD``: a relay
whose silo still computes says so, and is asked again by the ticket. So a process that has gone is
noticed soon, however long a silo computes.
"""

from __future__ import annotations

import hmac
import json
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from pathlib import Path
from typing import Any

from nvflare.collab import CollabCallError, collab
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.cellnet.utils import new_cell_message

from numpyro_fed_relay.sockets import relay

CHANNEL = "numpyro_fed"
# The file in a site's folder local/ that says where its silo's process listens. In resources.json
# it would not do: NVFLARE tells the server what it does not know there.
SETTINGS = "numpyro_fed.json"
# Seconds that a relay waits for a silo before it says that the silo still computes, and those that
# each hop adds for the way. What is sent is waited for as long as it moves.
HOLD, WAY = 10.0, 20.0
# Messages that a relay remembers; what nobody has asked for again is forgotten first.
MAX_TICKETS = 64


class Relay:
    """What a site runs: it passes bytes to the silo's own process, whose socket the site names.

    The socket is read from ``local/numpyro_fed.json`` of the site; a job cannot say another.
    """

    def __init__(self) -> None:
        self._asked: OrderedDict[str, Future[bytes]] = OrderedDict()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(MAX_TICKETS, "numpyro-fed-relay")
        self._socket: str | None = None

    @collab.init
    def begin(self, context: Any) -> None:
        """Read where the silo's process listens."""
        file = Path(context.workspace.get_site_config_dir()) / SETTINGS
        if file.exists():
            self._socket = json.loads(file.read_text())["socket"]

    @collab.publish
    def exchange(self, ticket: str, message: bytes, timeout: float) -> dict[str, Any]:
        """Return the silo's reply, or that it computes, is away, or that a ticket is not known."""
        if self._socket is None:
            return {"away": f"the site has no file local/{SETTINGS}"}
        with self._lock:
            if message and ticket not in self._asked:
                future = self._pool.submit(relay, self._socket, message, timeout)
                self._asked[ticket] = future
                while len(self._asked) > MAX_TICKETS:
                    self._asked.popitem(last=False)
            if ticket not in self._asked:
                return {"away": "the site's relay is new"}
            future = self._asked[ticket]
        try:
            reply = future.result(min(HOLD, timeout))
        except NotYet:
            if not future.done():
                return {"computes": True}
            reply = None
        except OSError as error:
            reply = None
            words = type(error).__name__
        with self._lock:
            self._asked.pop(ticket, None)
        if reply is None:
            return {"away": f"{words}: no process answers at the site's socket"}
        return {"reply": reply}


class Hub:
    """What the server runs: it passes bytes between the analyst's process and the sites' relays.

    Parameters
    ----------
    sites : list of str
        The sites in the order of the silos' numbers.
    key : str
        A secret of the job: only who has submitted the job knows it, and is answered.
    idle : float
        Seconds without a message after which the job ends.
    """

    def __init__(self, sites: list[str], key: str, idle: float):
        self.sites, self.key, self.idle = sites, key, idle
        self._ended, self._heard = threading.Event(), time.monotonic()
        self._clients: dict[str, Any] = {}
        self._pool: ThreadPoolExecutor | None = None

    @collab.main
    def run(self, context: Any) -> None:
        """Pass messages on until the analyst ends the job, or is silent for long."""
        self._clients = {client.name: client for client in context.clients}
        self._pool = ThreadPoolExecutor(2 * len(self.sites), "numpyro-fed-hub")
        cell = collab.fl_ctx.get_engine().get_cell()
        cell.register_request_cb(channel=CHANNEL, topic="*", cb=self._received)
        self._heard = time.monotonic()
        while not self._ended.wait(0.5) and not context.is_aborted():
            if time.monotonic() - self._heard > self.idle:
                return

    def _received(self, request: Any) -> Any:
        """Return the reply to a message of the analyst's process, or a future of it."""
        asked = request.payload
        if not hmac.compare_digest(str(asked.get("key")), self.key):
            return _answer({"lost": "the key is not that of the job"})
        self._heard = time.monotonic()
        if asked.get("end"):
            self._ended.set()
            return _answer({})
        if "silo" not in asked:
            return _answer({"sites": self.sites})
        # Not in NVFLARE's thread, of which there are few.
        return self._pool.submit(self._pass_on, asked)

    def _pass_on(self, asked: dict[str, Any]) -> Any:
        """Return what a site's relay says."""
        client = self._clients[self.sites[asked["silo"]]]
        try:
            found = client(timeout=HOLD + WAY).exchange(
                asked["ticket"], asked["message"], asked["timeout"]
            )
        except CollabCallError as error:
            found = {"lost": f"the site cannot be reached: {error}"}
        self._heard = time.monotonic()
        return _answer(found)


def _answer(payload: dict[str, Any]) -> Any:
    """Return a message of NVFLARE's network with this payload."""
    return new_cell_message({MessageHeaderKey.RETURN_CODE: ReturnCode.OK}, payload)
