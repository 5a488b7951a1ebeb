"""Files of NVFLARE: those of a job that brings no code, and those by which a kit allows it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numpyro_fed.errors import ModelError

CONTROLLER = "nvflare.collab.runtime.controller.CollabController"
EXECUTOR = "nvflare.collab.runtime.executor.CollabExecutor"
HUB, RELAY = "numpyro_fed_relay.flare.Hub", "numpyro_fed_relay.flare.Relay"
# Seconds of silence after which a job ends by itself. A later message starts another.
IDLE = 900.0
# Rights that no user has at a hospital: jobs with code of their own, and reading files there.
DENIED = ("byoc", "server-predeployed-flwr", "shell_commands")
# Where a server's kit keeps its jobs unless told otherwise: a folder that all servers of a machine
# share, and that everybody may read.
SHARED = "/tmp/nvflare"


def user_of(kit: Path) -> str:
    """Return the name of the user to whom a startup kit belongs."""
    file = kit / "startup" / "fed_admin.json"
    if not file.exists():
        raise ModelError(f"{kit} is no startup kit of a user of NVFLARE: it lacks {file}.")
    return json.loads(file.read_text())["admin"]["username"]


def write_job(folder: Path, sites: Sequence[str], key: str, idle: float = IDLE) -> None:
    """Write the files of a job in which sites relay bytes, with no code among them."""
    hub = {"id": "_server", "path": HUB, "args": {"sites": list(sites), "key": key, "idle": idle}}
    controller = {"id": "controller", "path": CONTROLLER, "args": {"server_obj_id": "_server"}}
    executor = {"path": EXECUTOR, "args": {"client_obj_id": "_client"}}
    _write(
        folder / "meta.json",
        {
            "name": "numpyro_fed",
            "deploy_map": {"hub": ["server"], "relay": list(sites)},
            "min_clients": len(sites),
            "mandatory_clients": list(sites),
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

    Parameters
    ----------
    kit : Path
        The startup kit of a site or of the server.
    socket : Path, optional
        Where the silo's process listens: for a site.
    """
    local = kit / "local"
    server = (kit / "startup" / "fed_server.json").exists()
    if not server and not (kit / "startup" / "fed_client.json").exists():
        raise ModelError(f"{kit} is no startup kit of a server or a site of NVFLARE.")
    if server == (socket is not None):
        raise ModelError("--socket belongs to a site, which must have it; a server has none.")
    resources = _read(local, "resources.json")
    resources["class_allow_list"] = [CONTROLLER, HUB] if server else [EXECUTOR, RELAY]
    resources["class_list_enforcement_mode"] = "enforce"
    if server:
        resources = _moved(resources, SHARED, str(kit.resolve()))
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
    """Return the permissions of roles without those that nobody is to have.

    A role with one word for all its rights is written out.
    """
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
            return json.loads(file.read_text())
    raise ModelError(f"the kit lacks {files[1]}.")


def _moved(content: Any, old: str, new: str) -> Any:
    """Return a content of JSON in which texts begin with another folder."""
    if isinstance(content, dict):
        return {name: _moved(value, old, new) for name, value in content.items()}
    if isinstance(content, list):
        return [_moved(value, old, new) for value in content]
    if isinstance(content, str) and content.startswith(old):
        return new + content[len(old) :]
    return content


def _write(file: Path, content: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=2) + "\n")
