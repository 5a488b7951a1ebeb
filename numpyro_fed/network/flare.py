"""Bytes over NVFLARE: from the analyst's process through its server to the silos of its sites."""

from __future__ import annotations

import json
import logging
import secrets
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numpyro_fed.errors import MissingExtraError

CONTROLLER = "nvflare.collab.runtime.controller.CollabController"
EXECUTOR = "nvflare.collab.runtime.executor.CollabExecutor"
HUB, RELAY = "numpyro_fed_relay.flare.Hub", "numpyro_fed_relay.flare.Relay"
# Seconds between two looks at NVFLARE, which does nothing faster than that.
LOOK = 1.0
# Seconds in which a site or the server may come back before a new job is submitted: a shorter
# silence is one of the network.
PATIENT = 10.0
# Seconds for NVFLARE to start a job whose sites are all connected: it looks at a job it could not
# start after 10 s, then after 20 s.
STARTING = 90.0
# Seconds of silence after which a job ends by itself. A later message starts another.
IDLE = 900.0
LOG = logging.getLogger("numpyro_fed.flare")


@dataclass
class _Job:
    """A running job of NVFLARE, and since when a silo cannot be reached by it."""

    id: str
    key: str
    failing: dict[int, float] = field(default_factory=dict)


class Flare:
    """An engine that reaches the silos by the NVFLARE to which their sites belong.

    It submits a job that carries no code: at each site NVFLARE runs ``numpyro_fed_relay.Relay``,
    which passes bytes to the silo's own process, and at the server a hub. The study's ``main`` runs
    in this process, with the kit of an NVFLARE user. A job that has ended, with the server too, is
    replaced by a new one.

    Parameters
    ----------
    kit : str or Path
        The folder of the user's startup kit.
    sites : sequence of str, optional
        The names of the sites; silos have their order. By default all sites that are connected now,
        in the order of their names.
    """

    def __init__(self, kit: str | Path, sites: Sequence[str] | None = None):
        self._kit = Path(kit)
        self._session: Any = None
        self._job: _Job | None = None
        self._lock = threading.Lock()
        if sites is None:
            with self._lock:
                sites = sorted(self._connected())
            LOG.info("the sites are %s", ", ".join(sites))
        self._sites = list(sites)
        if not self._sites:
            raise ConnectionError("no site is connected to the NVFLARE server.")

    @property
    def num_silos(self) -> int:
        """Return the number of silos."""
        return len(self._sites)

    @property
    def sites(self) -> list[str]:
        """Return the names of the sites, in the order of the silos."""
        return list(self._sites)

    def send(self, silo: int, message: bytes, timeout: float) -> bytes:
        """Return a silo's reply to a message."""
        deadline = time.monotonic() + timeout
        job = self._running(deadline)
        ticket = secrets.token_hex(8)
        asked = {"silo": silo, "ticket": ticket, "message": message}
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{self._sites[silo]} computes still")
            try:
                found = self._ask(job, {**asked, "timeout": left})
                if "lost" in found:
                    raise ConnectionError(found["lost"])
            except OSError:
                self._failed(job, silo)
                raise
            job.failing.pop(silo, None)
            if "reply" in found:
                return found["reply"]
            if "away" in found:
                raise ConnectionError(f"{self._sites[silo]}: {found['away']}")
            asked["message"] = b""  # the site has it

    def close(self) -> None:
        """End the job and leave NVFLARE."""
        with self._lock:
            if self._job is not None:
                try:
                    self._ask(self._job, {"end": True})
                except OSError as error:
                    LOG.info("the job did not hear that it has ended: %s", error)
            self._job = None
            self._leave()

    def __enter__(self) -> Flare:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _ask(self, job: _Job, asked: dict[str, Any], timeout: float = 40.0) -> dict[str, Any]:
        """Return the reply of a job's hub."""
        from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, ReturnCode
        from nvflare.fuel.f3.cellnet.utils import new_cell_message

        session = self._session
        cell = None if session is None else session.api.get_cell()
        if cell is None:
            raise ConnectionError("there is no session with the NVFLARE server")
        reply = cell.send_request(
            channel="numpyro_fed",
            topic="ask",
            target=f"server.{job.id}",
            request=new_cell_message({}, {**asked, "key": job.key}),
            timeout=timeout,
            optional=True,
        )
        code = reply.get_header(MessageHeaderKey.RETURN_CODE, ReturnCode.OK)
        if code != ReturnCode.OK or not isinstance(reply.payload, dict):
            raise ConnectionError(f"the job at the NVFLARE server does not answer ({code})")
        return reply.payload

    def _failed(self, job: _Job, silo: int) -> None:
        """Note that a silo was not reached; give a job up by which that goes on."""
        since = job.failing.setdefault(silo, time.monotonic())
        if time.monotonic() - since < PATIENT:
            return
        with self._lock:
            if self._job is job:
                LOG.info("job %s does not reach %s: a new one", job.id, self._sites[silo])
                self._abort(job)
                self._job = None

    def _running(self, deadline: float) -> _Job:
        """Return a job that runs; start one if there is none."""
        if not self._lock.acquire(timeout=max(deadline - time.monotonic(), 0.001)):
            raise TimeoutError("the job at the NVFLARE server has not started")
        try:
            if self._job is None:
                self._job = self._start(deadline)
            return self._job
        finally:
            self._lock.release()

    def _start(self, deadline: float) -> _Job:
        """Submit a job once all sites are connected, and return it when its hub answers."""
        while missing := set(self._sites) - self._connected():
            if time.monotonic() + LOOK > deadline:
                raise TimeoutError(f"not connected to NVFLARE: {', '.join(sorted(missing))}")
            time.sleep(LOOK)
        key = secrets.token_hex(16)
        with tempfile.TemporaryDirectory() as folder:
            write_job(Path(folder), self._sites, key)
            job = _Job(self._command("submit_job", folder), key)
        LOG.info("job %s is submitted", job.id)
        until = min(deadline, time.monotonic() + STARTING)
        while time.monotonic() < until:
            try:
                self._ask(job, {}, timeout=2 * LOOK)
                return job
            except OSError:
                status = str(self._command("get_job_meta", job.id).get("status"))
                if status.startswith("FINISHED") or status.startswith("FAILED"):
                    raise ConnectionError(self._why(job, status)) from None
                time.sleep(LOOK / 2)
        self._abort(job)
        raise TimeoutError(f"job {job.id} has not started")

    def _why(self, job: _Job, status: str) -> str:
        """Return words about a job that has ended before it began."""
        meta = self._command("get_job_meta", job.id)
        return f"job {job.id} has ended: {status} {meta.get('job_deploy_detail', '')}"

    def _abort(self, job: _Job) -> None:
        try:
            self._command("abort_job", job.id)
        except OSError as error:
            LOG.info("job %s could not be ended: %s", job.id, error)

    def _connected(self) -> set[str]:
        """Return the names of the sites that are connected."""
        return {client.name for client in self._command("get_system_info").client_info}

    def _command(self, name: str, *args: Any) -> Any:
        """Return what NVFLARE says to a command of its user, in a new session if needed."""
        session_of = _new_session()
        try:
            if self._session is None:
                self._session = session_of(user_of(self._kit), str(self._kit))
            return getattr(self._session, name)(*args)
        except Exception as error:
            self._leave()
            raise ConnectionError(f"the NVFLARE server does not answer: {error}") from error

    def _leave(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            try:
                session.close()
            except Exception as error:
                LOG.info("the session was not closed: %s", error)


def _new_session() -> Any:
    try:
        from nvflare.fuel.flare_api.flare_api import new_secure_session
    except ImportError as error:
        raise MissingExtraError("nvflare", "nvflare") from error
    return new_secure_session


def user_of(kit: Path) -> str:
    """Return the name of the user to whom a startup kit belongs."""
    return json.loads((kit / "startup" / "fed_admin.json").read_text())["admin"]["username"]


def write_job(folder: Path, sites: Sequence[str], key: str, idle: float = IDLE) -> None:
    """Write the files of a job in which sites relay bytes, with no code among them."""
    hub = {"id": "_server", "path": HUB, "args": {"sites": list(sites), "key": key, "idle": idle}}
    controller = {"id": "controller", "path": CONTROLLER, "args": {"server_obj_id": "_server"}}
    executor = {"path": EXECUTOR, "args": {"client_obj_id": "_client"}}
    files: dict[str, dict[str, Any]] = {
        "meta.json": {
            "name": "numpyro_fed",
            "deploy_map": {"hub": ["server"], "relay": list(sites)},
            "min_clients": len(sites),
            "mandatory_clients": list(sites),
            "resource_spec": {},
        },
        "hub/config/config_fed_server.json": {
            "format_version": 2,
            "workflows": [controller],
            "components": [hub],
        },
        "relay/config/config_fed_client.json": {
            "format_version": 2,
            "executors": [{"tasks": ["*"], "executor": executor}],
            "components": [{"id": "_client", "path": RELAY, "args": {}}],
        },
    }
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content, indent=2))
