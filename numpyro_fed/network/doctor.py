"""The command ``numpyro-fed doctor``: what is wrong before a study, and what to do about it.

Nothing leaves the machine but a greeting to the NVFLARE server. Lines about data have types and
counts, never values, and are for the site alone.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Generator
from contextlib import suppress
from hashlib import sha256
from importlib import metadata
from pathlib import Path

import numpyro_fed_relay
from numpyro_fed.basics.errors import DataError, ModelError, SavedStateError
from numpyro_fed.basics.files import KEPT, LOCK, Store, private_folder
from numpyro_fed.network.audit import SOCKETS, SYSLOG, Last, check_audit, last_kept
from numpyro_fed.network.check import OK, WARNING, WRONG, Check, Checks, guarded
from numpyro_fed.network.check_study import check_data, check_models, check_study
from numpyro_fed.network.engines import MAX_NAME
from numpyro_fed.network.kit import check_kit
from numpyro_fed.network.policy import Policy
from numpyro_fed.rounds.envelopes import PrivateKey
from numpyro_fed.rounds.messages import read
from numpyro_fed_relay import relay

if sys.platform != "win32":
    import fcntl

# Bytes that a silo and its log may need. A full disk makes it refuse, since it keeps what it says.
ROOM = 1_000_000_000
ANSWERS = 10.0  # seconds in which a silo refuses a message without sense, unless it computes
NONSENSE = b"numpyro-fed doctor: a message without sense"
PACKAGES = "numpyro_fed", "jax", "jaxlib", "numpyro", "numpy", "nvflare"


def add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command of the doctor, all of whose arguments are optional."""
    doctor = commands.add_parser("doctor", help="say what is wrong before a study, and what to do")
    doctor.set_defaults(command=examine)
    for name, words in (
        ("study", "its file"),
        ("policy", "the owner's rules"),
        ("state", "the folder of a silo or of the analyst"),
        ("socket", "where a silo listens"),
        ("kit", "a startup kit of NVFLARE, of a site, the server or a user"),
        ("key", "of who asks"),
        ("folder", "of rounds by files"),
        ("versions", "what --write-versions has printed at another party"),
    ):
        doctor.add_argument(f"--{name}", type=Path, help=words)
    doctor.add_argument("--data", help="file.py:function that returns the data")
    words = "print the versions here, for others' --versions, and nothing else"
    doctor.add_argument("--write-versions", action="store_true", help=words)


def examine(args: argparse.Namespace) -> int:
    """Print a line for each check, and return 1 if anything is wrong."""
    if args.write_versions:
        print("\n".join(f"{name} {version}" for name, version in versions().items()))
        return 0
    counts = {OK: 0, WARNING: 0, WRONG: 0}
    for check in findings(args):
        print(check, flush=True)
        counts[check.state] += 1
    print(f"{counts[WRONG]} wrong, {counts[WARNING]} warnings, {counts[OK]} ok")
    return 1 if counts[WRONG] else 0


def findings(args: argparse.Namespace) -> Checks:
    """Yield what was found at all that the arguments name."""
    policy = study = data = None
    yield from guarded("versions", check_versions(args.versions))
    yield from guarded("machine", check_machine())
    if args.kit is not None:
        yield from guarded("kit", check_kit(args.kit, args.socket))
    if args.key is not None:
        yield from guarded("key", check_key(args.key))
    if args.policy is not None:
        policy = yield from guarded("policy", check_policy(args.policy, args.state, args.key))
    if args.state is not None:
        yield from guarded("state", check_folder("state", args.state))
    if policy is not None and policy.audit is not None:
        yield from guarded("audit", check_audit_log(policy.audit, args.state))
    if args.folder is not None:
        yield from guarded("folder", check_folder("folder", args.folder))
    if args.study is not None:
        study = yield from guarded("study", check_study(args.study))
    if args.data is not None:
        data = yield from guarded("data", check_data(args.data, policy or Policy()))
    if study is not None and data is not None:
        yield from guarded("model", check_models(study, data, policy or Policy()))
    if args.socket is not None:
        yield from guarded("socket", check_socket(args.socket))


def versions() -> dict[str, str]:
    """Return the versions of what computes; that of numpyro_fed has a digest of its files."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "none"
    digest = sha256()
    for root in (Path(__file__).parent.parent, Path(numpyro_fed_relay.__file__).parent):
        for file in sorted(root.rglob("*.py")):
            digest.update(file.relative_to(root.parent).as_posix().encode())
            digest.update(file.read_bytes().replace(b"\r\n", b"\n"))
    found["numpyro_fed"] += f"+{digest.hexdigest()[:12]}"
    return found


def check_versions(file: Path | None) -> Generator[Check, None, None]:
    """Yield the versions here, and which of another party's are unlike."""
    own = versions()
    yield Check("versions", OK, ", ".join(f"{name} {version}" for name, version in own.items()))
    if file is None:
        return
    pairs = (line.split() for line in file.read_text(encoding="utf-8").splitlines())
    theirs = {pair[0]: pair[1] for pair in pairs if len(pair) == 2}
    unlike = {name: theirs.get(name, "none") for name in own if theirs.get(name) != own[name]}
    for name, version in unlike.items():
        words = f"{name} is {own[name]} here and {version} in {file}"
        if name == "numpyro_fed":
            yield Check("versions", WRONG, f"{words}. All parties install the same one.")
        else:
            yield Check("versions", WARNING, f"{words}: last digits of results may differ.")
    if not unlike:
        yield Check("versions", OK, f"those of {file} are the same")


def check_machine() -> Generator[Check, None, None]:
    """Yield how many cores there are, and how much memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    words = f"{cores} cores"
    if hasattr(os, "sysconf"):
        words += f", {os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 1e9:.0f} GB memory"
    yield Check("machine", OK, words)


def check_key(file: Path) -> Generator[Check, None, None]:
    """Yield the fingerprint of a key that only its owner can read."""
    try:
        yield Check("key", OK, PrivateKey.load(file.expanduser()).fingerprint)
    except ModelError as error:
        yield Check("key", WRONG, str(error))


def check_policy(
    file: Path, state: Path | None, key: Path | None
) -> Generator[Check, None, Policy | None]:
    """Yield what is wrong with a policy, or strange; return it."""
    name = "policy"
    try:
        policy = Policy.from_toml(file)
    except OSError as error:
        yield Check(name, WRONG, f"{file} cannot be read ({error.strerror}).")
        return None
    except ValueError as error:  # its own words, and those of TOML
        yield Check(name, WRONG, f"{error} Correct {file}; without it the silo does not start.")
        return None
    found = []
    if not policy.requesters:
        words = "nobody may ask (requesters): add the line that numpyro-fed key prints"
        found.append(Check(name, WARNING, f"{words} at the analyst, or the silo does not start."))
    elif key is not None:
        try:
            asks = PrivateKey.load(key.expanduser()).fingerprint
        except ModelError:  # of which the check of the key has said why
            asks = ""
        if asks and asks not in policy.requesters:
            words = f"the key {asks} is not among its requesters"
            found.append(Check(name, WRONG, f"{words}: the silo would refuse it. Add it."))
    if policy.limits and state is None:
        words = f"limits what is answered in all its life ({', '.join(policy.limits)})"
        found.append(Check(name, WARNING, f"{words}, which --state counts: name that folder."))
    if policy.secure_sum is not False and not policy.peers:
        words = "sums without peers: a server that lies could read every reply"
        found.append(Check(name, WARNING, f"{words}. Add the fingerprints of other silos' keys."))
    yield from found or [Check(name, OK, f"{len(policy.requesters)} may ask")]
    return policy


def check_folder(name: str, folder: Path) -> Generator[Check, None, None]:
    """Yield whether a folder is its owner's alone, can be written and locked, and has room."""
    if not folder.exists():
        yield Check(name, OK, f"{folder} is not there yet: it is made when it is needed")
        return
    try:
        private_folder(folder)
    except SavedStateError as error:
        yield Check(name, WRONG, str(error))
    free = shutil.disk_usage(folder).free
    if free < ROOM:
        words = f"the disk of {folder} is full: {free / 1e6:,.0f} MB are free, {ROOM / 1e6:,.0f}"
        yield Check(name, WRONG, f"{words} should be. Make room, or the silo will refuse.")
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4_096))
            file.flush()
            os.fsync(file.fileno())
            if sys.platform != "win32":
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        words = f"{folder} cannot be written, or has no locks ({error.strerror}). The user who runs"
        yield Check(name, WRONG, f"{words} the silo must own it, on a disk of this machine.")
    else:
        held = "in use by a process" if is_held(folder / LOCK) else "in use by no process"
        yield Check(name, OK, f"{folder} can be written and locked; {held}")


def is_held(lock: Path) -> bool:
    """Return whether another process holds the lock of a folder."""
    if sys.platform == "win32" or not lock.exists():
        return False
    with open(lock, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def check_audit_log(where: str, state: Path | None) -> Generator[Check, None, None]:
    """Yield whether an audit log can be written, and is whole."""
    name, file = "audit", Path(where)
    if where == SYSLOG:
        if any(map(os.path.exists, SOCKETS)):
            yield Check(name, OK, "goes to the system's log, which others keep")
        else:
            words = f"there is no log of the system ({' or '.join(SOCKETS)})"
            yield Check(name, WRONG, f"{words}, and the silo does not start. Name a file.")
        return
    if not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
        words = f"{file.absolute()} cannot be written, so that the silo would refuse everything"
        yield Check(name, WRONG, f"{words}. Give its folder to the user who runs the silo.")
    # First what the silo knows, since a silo that runs adds to the file, and then counts.
    known = Last()
    if state is not None and (state / KEPT).exists():
        with suppress(SavedStateError):  # of which the check of the folder says why
            known = last_kept(Store(state))
    try:
        found = check_audit(file)
    except DataError as error:
        yield Check(name, WRONG, f"{error} Keep it, and ask who could write to it.")
        return
    if found.number < known.number:
        words = f"{file} has {found.number} lines and the silo has written {known.number}: the last"
        words += " ones are cut off, or this is another file"
    elif found.number == known.number and found.last != known:
        words = f"the last line of {file} is not the one that the silo has written"
    else:
        for remark in found.remarks:
            yield Check(name, WARNING, f"{remark}.")
        yield Check(name, OK, f"{found.number} lines, each follows from the one before")
        return
    yield Check(name, WRONG, f"{words}. Ask who could write to it.")


def check_socket(path: Path) -> Generator[Check, None, None]:
    """Yield whether a silo answers at a socket, which refuses a message without sense."""
    name, again = "socket", "Start 'numpyro-fed silo' with this --socket, and read its words."
    if (length := len(os.fsencode(path))) > MAX_NAME:
        words = f"{path} has {length} bytes, and the system takes {MAX_NAME}. Give a shorter name."
        yield Check(name, WRONG, words)
        return
    try:
        head = read(relay(path, NONSENSE, ANSWERS)).head
    except FileNotFoundError:
        yield Check(name, WRONG, f"there is no {path}: no silo has been started. {again}")
    except ConnectionRefusedError:
        yield Check(name, WRONG, f"nobody listens at {path}: the silo has ended. {again}")
    except PermissionError:
        words = f"this user may not open {path}. Be the silo's user, or of its --socket-group."
        yield Check(name, WRONG, words)
    except TimeoutError:
        words = f"a process listens at {path}, and has not answered within {ANSWERS:g} s: it may"
        yield Check(name, WARNING, f"{words} compute. Try again when no study runs.")
    except (OSError, DataError) as error:
        words = f"what listens at {path} is no silo ({type(error).__name__}). Give another --socket"
        yield Check(name, WRONG, f"{words}, or end that process.")
    else:
        if "error" in head:
            words = f"a silo listens at {path}, and has refused a message without sense"
            yield Check(name, OK, f"{words}; its audit log has a line of that")
        else:
            words = f"what listens at {path} answers a message without sense. It is no silo."
            yield Check(name, WRONG, words)
