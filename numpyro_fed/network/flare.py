"""Bytes over NVFLARE: from the analyst's process through its server to the silos of its sites.

There are the files, too, of a job that brings no code, and those by which a kit allows it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import secrets
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numpyro_fed.basics.errors import ModelError, optional

# Seconds between two looks at NVFLARE, which does nothing faster than that.
LOOK = 0.5
# Seconds without a sign of life of a silo's site, or of the job, after which a new job is started;
# a shorter silence is one of the network.
PATIENT = 10.0
# Seconds between two failures after which they are not of one silence: the hub does not say whether
# a silo that computes has been heard of. Between two of one silence are the calls of two hops.
APART = 60.0
# Seconds that a call to the hub may take beside the time for which what is sent moves: its HOLD and
# the way (numpyro_fed_relay).
CALL = 20.0
FIRST_SITE = 60.0  # seconds to wait for a first site, where none is named
# Seconds for NVFLARE to start a job whose sites are all connected. It looks at a job that it could
# not start after 10 s, 20 s and so on: a new one is seen sooner.
STARTING = 60.0
# Seconds after which a site that has said nothing counts as away. A site speaks every few seconds;
# the server itself lists it for ten minutes.
SILENT = 30.0
# Seconds of failures after which a site that still counts as connected has come back: one that has
# gone is known to be away by then, also where the others were last heard of ten seconds ago.
RETURNED = SILENT + 10.0
# Seconds after which the server is given a sign of life: it ends a session that is idle for 1800 s.
TOUCH = 600.0
LOG = logging.getLogger("numpyro_fed.flare")
CONTROLLER = "nvflare.collab.runtime.controller.CollabController"
EXECUTOR = "nvflare.collab.runtime.executor.CollabExecutor"
HUB, RELAY = "numpyro_fed_relay.flare.Hub", "numpyro_fed_relay.flare.Relay"
# Seconds of silence after which a job ends by itself, as when the analyst's process was killed; a
# later message starts another. A process that lives gives a sign of life every SIGN seconds, of
# which several may be lost, and waits ANSWER seconds for its answer.
IDLE, SIGN, ANSWER = 120.0, 20.0, 5.0
# Rights that no user has at a hospital: jobs with code of their own, and reading files there.
DENIED = ("byoc", "server-predeployed-flwr", "shell_commands")
# Where a server's kit keeps its jobs unless told otherwise: a folder that all servers of a machine
# share, and that everybody may read.
SHARED = "/tmp/nvflare"


@dataclass
class _Job:
    """A job of NVFLARE."""

    id: str
    key: str
    # Of each silo that is not reached: since when, and when that was last found.
    failing: dict[int, tuple[float, float]] = field(default_factory=dict)
    without: Collection[str] = ()  # the sites that were away when it began


class Flare:
    """An engine that reaches the silos by the NVFLARE to which their sites belong.

    It submits a job that brings no code: each site's NVFLARE runs ``numpyro_fed_relay``, which
    gives bytes to the silo's own process. Everything else runs in this process, with the kit of a
    user of NVFLARE. A job that has ended, with the server too, is replaced by a new one while
    :class:`numpyro_fed.Federation` asks again.

    Parameters
    ----------
    kit : str or Path
        The folder of the user's startup kit.
    sites : sequence of str, optional
        The names of the sites; silos have their order. By default all sites that are connected now,
        in the order of their names.
    patience : float
        Seconds to wait for the sites at the beginning.
    wait_for_sites : float, optional
        Seconds to wait for sites that are not connected, after which a job begins without them if
        more than half are there; but never for more than half of the time that a message has. Their
        silos are away (``Federation(missing="leave_out")`` does without them), and a site that
        comes back is taken in by a new job. By default every job waits for all sites, and ends when
        one is lost.

    Raises
    ------
    ConnectionError
        If the server does not answer, has no sites, or does not start the job.

    Examples
    --------
    >>> with Flare("analyst@university.org") as engine:  # doctest: +SKIP
    ...     federation = nf.Federation(engine, names={"model": model}, state="study")
    ...     result = nf.fit(key, model, federation)
    """

    def __init__(
        self,
        kit: str | Path,
        sites: Sequence[str] | None = None,
        *,
        patience: float = 600.0,
        wait_for_sites: float | None = None,
    ):
        # Those that were waited for in vain, and have not come back.
        self._wait_for_sites, self._given_up = wait_for_sites, set[str]()
        self._kit, admin = Path(kit), Path(kit) / "startup" / "fed_admin.json"
        if not admin.exists():
            raise ModelError(f"{kit} is no startup kit of a user of NVFLARE: it lacks {admin}.")
        self._user = json.loads(admin.read_text(encoding="utf-8"))["admin"]["username"]
        self._session: Any = None
        self._touched = 0.0
        self._job: _Job | None = None
        # Of the session and the job; a message is sent without it.
        self._lock = threading.RLock()
        self._closed = threading.Event()
        # An engine that is forgotten is not closed: its job ends, too.
        living = weakref.ref(self), self._closed
        self._signs = threading.Thread(target=_give_signs, args=living, daemon=True)
        try:
            self.sites, wait = list(sites or sorted(self._connected())), min(patience, FIRST_SITE)
            until = time.monotonic() + wait
            while not self.sites:
                if time.monotonic() > until:
                    raise ConnectionError(
                        f"no site is connected to the NVFLARE server after {wait:g} s. Name those "
                        "that are to come (sites=, --sites): the run waits for them."
                    )
                time.sleep(1.0)  # a server may have just begun
                self.sites = sorted(self._connected())
            self.num_silos = len(self.sites)
            LOG.info("the silos are at %s", ", ".join(self.sites))
            # Here, so that what is wrong with NVFLARE is said at once, and not after a patience.
            self._running(time.monotonic() + patience)
            self._signs.start()
        except BaseException:
            self.close()
            raise

    def send(self, silo: int, message: bytes, timeout: float) -> bytes:
        """Return a silo's reply to a message."""
        deadline = time.monotonic() + timeout
        job = self._running(deadline, self.sites[silo])
        if self.sites[silo] in job.without:
            raise ConnectionError(f"{self.sites[silo]} is not connected to NVFLARE")
        # That of the message: one that is sent again waits for the same answer.
        ticket = f"{silo}-{hashlib.sha256(message).hexdigest()}"
        asked = {"silo": silo, "ticket": ticket, "message": message}
        while (left := deadline - time.monotonic()) > 0:
            began = time.monotonic()
            try:
                found = self._ask(job, {**asked, "timeout": left})
            except OSError:
                self._failed(job, silo, began)
                raise
            if "lost" in found:
                self._failed(job, silo, began - found.get("silent", 0.0), by_hub=True)
                raise ConnectionError(f"{self.sites[silo]}: {found['lost']}")
            if not found.get("computes"):
                job.failing.pop(silo, None)
            if "reply" in found:
                return found["reply"]
            if "away" in found:
                raise ConnectionError(f"{self.sites[silo]}: {found['away']}")
            asked["message"] = b""  # the hub has it
        raise TimeoutError(f"{self.sites[silo]} has not answered yet")

    def close(self) -> None:
        """End the job, and leave NVFLARE."""
        self._closed.set()
        if self._signs.is_alive():
            self._signs.join(2 * ANSWER)
        with self._lock:
            job, self._job = self._job, None
            if job is not None:
                try:
                    self._ask(job, {"end": True})
                except OSError as error:
                    LOG.info("job %s does not know that it has ended: %s", job.id, error)
            self._leave()

    def __enter__(self) -> Flare:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _ask(self, job: _Job, asked: dict[str, Any], timeout: float = CALL) -> dict[str, Any]:
        """Return the reply of a job's hub."""
        from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, ReturnCode
        from nvflare.fuel.f3.cellnet.utils import new_cell_message

        session = self._session
        if session is None:
            raise ConnectionError("there is no session with the NVFLARE server")
        try:
            reply = session.api.get_cell().send_request(
                channel="numpyro_fed",
                topic="ask",
                target=f"server.{job.id}",
                request=new_cell_message({}, {**asked, "key": job.key}),
                timeout=timeout,
                optional=True,
            )
        # Its kinds are those of NVFLARE's drivers; whatever it is, the message is sent again.
        except Exception as error:
            raise ConnectionError(f"NVFLARE does not carry the message: {error}") from error
        code = reply.get_header(MessageHeaderKey.RETURN_CODE, ReturnCode.OK)
        if code != ReturnCode.OK or not isinstance(reply.payload, dict):
            raise ConnectionError(f"the job at the NVFLARE server does not answer ({code})")
        return reply.payload

    def _give_sign(self) -> None:
        """Tell the job and the server that this process lives."""
        job = self._job
        if job is None:
            return
        try:
            self._ask(job, {}, ANSWER)
            if time.monotonic() - self._touched > TOUCH:
                self._command("get_job_meta", job.id)
        except OSError as error:
            LOG.info("no sign of life has reached job %s: %s", job.id, error)

    def _failed(self, job: _Job, silo: int, began: float, *, by_hub: bool = False) -> None:
        """Note that a silo is not reached by a job; give the job up if it has ended, or goes on.

        ``by_hub``: Whether the job's hub says so, which others may reach.
        """
        now = time.monotonic()
        first, last = job.failing.get(silo, (began, began))
        first = began if began - last > APART else first
        job.failing[silo] = (first, now)
        with self._lock:
            if self._job is not job:
                return
            over = now - first > PATIENT
            try:
                ended = self._status(job).startswith(("FINISHED", "FAILED"))
                if by_hub and self._wait_for_sites is not None:
                    # The others go on, unless a new job would reach it.
                    over = now - first > RETURNED and self.sites[silo] in self._connected()
            except ConnectionError:
                ended = False  # after a crash of the server a job is RUNNING for ever
            if ended or over:
                LOG.info("job %s does not reach %s: a new one follows", job.id, self.sites[silo])
                self._job = None
                if not ended:
                    self._abort(job)

    def _running(self, deadline: float, site: str = "") -> _Job:
        """Return a job that runs; start one if there is none, or without a site that is back."""
        if not self._lock.acquire(timeout=max(deadline - time.monotonic(), 0.001)):
            raise TimeoutError("the job at the NVFLARE server has not started")
        try:
            job = self._job
            if job is not None and site in job.without and site in self._connected():
                LOG.info("%s is back: a new job takes it in", site)
                self._job = None
                self._abort(job)
            if self._job is None:
                self._job = self._start(deadline)
            elif self._session is None:
                self._command("get_job_meta", self._job.id)
            return self._job
        finally:
            self._lock.release()

    def _start(self, deadline: float) -> _Job:
        """Submit a job once its sites are connected, and return it when its hub answers."""
        without, key = self._missing(deadline), secrets.token_hex(16)
        with tempfile.TemporaryDirectory() as folder:
            all_needed = self._wait_for_sites is None
            write_job(Path(folder), self.sites, key, without=without, all_needed=all_needed)
            job = _Job(self._command("submit_job", folder), key, without=without)
        LOG.info("job %s is submitted", job.id)
        until = min(deadline, time.monotonic() + STARTING)
        while time.monotonic() < until:
            time.sleep(LOOK)
            status = self._status(job)
            if status.startswith(("FINISHED", "FAILED")):
                raise ConnectionError(
                    f"NVFLARE has ended job {job.id} at its beginning ({status}). The logs of the "
                    "sites say why: each must allow the relay (numpyro-fed allow)."
                )
            if status.startswith("RUNNING"):
                try:
                    self._ask(job, {}, timeout=2.0)
                    return job
                except ConnectionError:
                    continue
        self._abort(job)
        raise TimeoutError(f"NVFLARE has not started job {job.id}")

    def _missing(self, deadline: float) -> set[str]:
        """Return the sites without which a job is to begin, after having waited for them."""
        now, wait = time.monotonic(), self._wait_for_sites
        # Half of the time is left for the others, whose messages wait, too.
        until = deadline if wait is None else min(now + wait, (now + deadline) / 2)
        while missing := set(self.sites) - self._connected():
            self._given_up &= missing
            over = missing <= self._given_up or time.monotonic() + LOOK > until
            if wait is not None and over and 2 * len(missing) < len(self.sites):
                LOG.info("the job begins without %s", ", ".join(sorted(missing)))
                break
            if time.monotonic() + LOOK > deadline:
                raise TimeoutError(f"not connected to NVFLARE: {', '.join(sorted(missing))}")
            time.sleep(LOOK)
        self._given_up = missing
        return missing

    def _status(self, job: _Job) -> str:
        return str(self._command("get_job_meta", job.id).get("status"))

    def _abort(self, job: _Job) -> None:
        try:
            self._command("abort_job", job.id)
        except ConnectionError as error:
            LOG.info("job %s could not be ended: %s", job.id, error)

    def _connected(self) -> set[str]:
        """Return the names of the sites that have spoken to the server lately."""
        sites = self._command("get_system_info").client_info
        # By the server's clock.
        latest = max((site.last_connect_time for site in sites), default=0.0)
        return {site.name for site in sites if site.last_connect_time > latest - SILENT}

    def _command(self, name: str, *args: str) -> Any:
        """Return what NVFLARE says to a command of its user, in a new session if there is none."""
        api = optional("nvflare.fuel.flare_api.flare_api", "nvflare")
        with self._lock:
            try:
                if self._session is None:
                    # It prints that it connects; what is printed is the study's.
                    with contextlib.redirect_stdout(sys.stderr):
                        self._session = api.new_secure_session(self._user, str(self._kit))
                found = getattr(self._session, name)(*args)
            # NVFLARE has many kinds, and a session is of no use after most of them.
            except Exception as error:
                self._leave()
                # At first it may be the kit; one that has worked is in order.
                why = "" if self._touched else wrong_with(self._kit)
                words = f"the NVFLARE server does not answer: {error}{why}"
                raise ConnectionError(words) from error
            self._touched = time.monotonic()
            return found

    def _leave(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            try:
                session.close()
            except Exception as error:
                LOG.info("the session was not closed: %s", error)


def _give_signs(engine: weakref.ref[Flare], closed: threading.Event) -> None:
    """Give signs of life until an engine is closed, or nobody has it any more."""
    while not closed.wait(SIGN):
        living = engine()
        if living is None:
            return
        living._give_sign()
        del living


def wrong_with(kit: Path) -> str:
    """Return what is wrong with a kit and the way to its server; nothing where nothing is found."""
    # Here: it loads certificates' libraries, which only a failure needs.
    from numpyro_fed.network.check import WRONG, guarded
    from numpyro_fed.network.kit import check_kit

    found = [check for check in guarded("kit", check_kit(kit)) if check.state == WRONG]
    return "".join(f"\n{check.name}: {check.words}" for check in found)


def write_job(
    folder: Path,
    sites: Sequence[str],
    key: str,
    *,
    without: Collection[str] = (),
    all_needed: bool = True,
) -> None:
    """Write the files of a job in which sites relay bytes, with no code among them.

    It runs ``without`` some of them. Unless all others are needed, it goes on while more than half
    of all are there.
    """
    there = [site for site in sites if site not in without]
    hub = {"id": "_server", "path": HUB, "args": {"sites": list(sites), "key": key, "idle": IDLE}}
    controller = {"id": "controller", "path": CONTROLLER, "args": {"server_obj_id": "_server"}}
    executor = {"path": EXECUTOR, "args": {"client_obj_id": "_client"}}
    _write(
        folder / "meta.json",
        {
            "name": "numpyro_fed",
            "deploy_map": {"hub": ["server"], "relay": there},
            "min_clients": len(there) if all_needed else len(sites) // 2 + 1,
            "mandatory_clients": there if all_needed else [],
            "resource_spec": {},
        },
    )
    _write(
        folder / "hub" / "config" / "config_fed_server.json",
        {"format_version": 2, "workflows": [controller], "components": [hub]},
    )
    _write(
        folder / "relay" / "config" / "config_fed_client.json",
        {
            "format_version": 2,
            "executors": [{"tasks": ["*"], "executor": executor}],
            "components": [{"id": "_client", "path": RELAY, "args": {}}],
        },
    )


def allow(kit: Path, socket: Path | None) -> list[Path]:
    """Let the NVFLARE of a kit run the relay of this package and nothing else; return the files.

    The kit is that of the server or of a site, whose silo listens at ``socket``.
    """
    local, server = kit / "local", (kit / "startup" / "fed_server.json").exists()
    if not server and not (kit / "startup" / "fed_client.json").exists():
        raise ModelError(f"{kit} is no startup kit of a server or a site of NVFLARE.")
    if server == (socket is not None):
        raise ModelError("--socket belongs to a site, which must have it; a server has none.")
    resources = _read(local, "resources.json")
    resources["class_allow_list"] = [CONTROLLER, HUB] if server else [EXECUTOR, RELAY]
    resources["class_list_enforcement_mode"] = "enforce"
    if server:
        # In texts that begin with the folder: its quote is that of JSON.
        old, new = (json.dumps(folder)[:-1] for folder in (SHARED, str(kit.resolve())))
        resources = json.loads(json.dumps(resources).replace(old, new))
    else:
        # Else NVFLARE adds a class to each job that sends the site's errors to the server.
        resources["allow_log_streaming"] = False
    rights = _read(local, "authorization.json")
    rights["permissions"] = denied(rights["permissions"])
    files = {local / "resources.json": resources, local / "authorization.json": rights}
    if socket is not None:
        files[local / "numpyro_fed.json"] = {"socket": str(socket.resolve())}
    for file, content in files.items():
        _write(file, content)
    return list(files)


def denied(permissions: Mapping[str, Any]) -> dict[str, Any]:
    """Return the permissions of roles, written out, without those that nobody is to have."""
    known = {
        right for rights in permissions.values() if isinstance(rights, dict) for right in rights
    }
    found: dict[str, Any] = {}
    for role, rights in permissions.items():
        all_rights = rights if isinstance(rights, dict) else dict.fromkeys(sorted(known), rights)
        found[role] = {**all_rights, **dict.fromkeys(DENIED, "none")}
    return found


def _read(local: Path, name: str) -> dict[str, Any]:
    """Return a file of a kit, or what the kit has as its default."""
    files = (local / name, local / f"{name}.default")
    for file in files:
        if file.exists():
            return json.loads(file.read_text(encoding="utf-8"))
    raise ModelError(f"the kit lacks {files[1]}.")


def _write(file: Path, content: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
