"""The commands of a silo's owner and of those who ask: keys, studies, the audit log, and files."""

from __future__ import annotations

import argparse
import sys
import time
from datetime import datetime
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import IO

from numpyro_fed.basics.errors import DataError, ModelError
from numpyro_fed.basics.files import KEPT, Store, write_atomically
from numpyro_fed.network.audit import check_audit
from numpyro_fed.network.requesters import APPROVED, REFUSED, Study, keep_study, studies
from numpyro_fed.network.silo import Silo
from numpyro_fed.rounds.envelopes import (
    ENVELOPE,
    KEY_FILE,
    SEALED,
    PrivateKey,
    fingerprint_of,
    signed_message,
)
from numpyro_fed.rounds.messages import Question, read


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands that need no study's file."""
    key = commands.add_parser("key", help="make the key of who asks, and print its fingerprint")
    key.set_defaults(command=make_key)
    key.add_argument("--file", type=Path, default=KEY_FILE, help=f"by default {KEY_FILE}")

    for name, words in (
        ("requests", "list the studies that this silo was asked for"),
        ("approve", "let a study be answered"),
        ("refuse", "let a study not be answered"),
    ):
        one = commands.add_parser(name, help=words)
        one.set_defaults(command=decide, verb=name)
        one.add_argument("--state", type=Path, required=True, help="the silo's folder")
        if name != "requests":
            one.add_argument("study", metavar="ID", help="as requests prints it")
        if name == "approve":
            one.add_argument("--until", required=True, help="a date, such as 2030-12-31")

    audit = commands.add_parser("audit", help="check and print the audit log of a silo")
    audit.set_defaults(command=look_at_audit)
    audit.add_argument("file", type=Path)
    audit.add_argument("--check", action="store_true", help="whether a line was changed; no more")

    show = commands.add_parser("show", help="say in words what is in a file of rounds by files")
    show.set_defaults(command=lambda args: print(words_of(args.file.name, args.file.read_bytes())))
    show.add_argument("file", type=Path)


def make_key(args: argparse.Namespace) -> None:
    """Make a key if there is none, and print its fingerprint."""
    file = args.file.expanduser()
    if not file.exists():
        PrivateKey.generate().save(file)
        print(f"written: {file}. Who has it can ask in your name.", file=sys.stderr)
    print(f'requesters = ["{PrivateKey.load(file).fingerprint}"]')


def decide(args: argparse.Namespace) -> None:
    """List the studies of a silo's folder, or note what its owner says of one."""
    if not (args.state / KEPT).exists():
        raise DataError(f"{args.state} is no folder of a silo: it has no {KEPT}.")
    store = Store(args.state)
    known = studies(store)
    if args.verb == "requests":
        print("\n".join(map(described, known)) if known else "No study was asked for.")
        return
    study = next((one for one in known if one.id == args.study), None)
    if study is None:
        raise DataError(f"nobody has asked for a study {args.study}: see numpyro-fed requests.")
    state, until = (REFUSED, 0.0) if args.verb == "refuse" else (APPROVED, _seconds(args.until))
    decided = Study(study.requester, study.study, state, until, study.asked, study.costs)
    keep_study(store, decided)
    print(described(decided))


def described(study: Study) -> str:
    """Return a study in words: who asks for what, and what would leave."""
    until = time.strftime(" until %Y-%m-%d", time.localtime(study.until)) if study.until else ""
    asked = time.strftime("%Y-%m-%d %H:%M", time.localtime(study.asked))
    lines = [f"{study.id}  {study.state}{until}, asked for first on {asked}"]
    lines.append(f"  by {study.requester or 'somebody who does not sign'}")
    lines.append(f"  files {study.study or 'of the process alone'}")
    return "\n".join([*lines, *(f"  {what}: {cost}" for what, cost in study.costs.items())])


def look_at_audit(args: argparse.Namespace) -> None:
    """Print an audit log, once its lines follow each other."""
    number = check_audit(args.file)
    if not args.check:
        print(args.file.read_text(), end="")
    print(f"{number} lines, and each follows from the one before.", file=sys.stderr)


def words_of(name: str, content: bytes) -> str:
    """Return in words what a file of rounds by files has in it."""
    head, arrays = read(content)
    if SEALED in arrays:
        return (
            f"{name}: a reply of {len(content):,} bytes, sealed: nobody but who asked can "
            f"read it. Signed by the silo with the key {fingerprint_of(head['silo'])}."
        )
    lines = [f"{name}: {len(content):,} bytes"]
    if ENVELOPE in head:
        found = signed_message(content)
        if found is not None:
            envelope, message = found
            lines.append(f"  signed by {envelope.fingerprint}, number {envelope.count}")
            lines.append(f"  of the study with the files {envelope.study or '(none)'}")
            head, arrays = read(message)
    else:
        lines.append("  not signed")
    if "error" in head:
        return "\n".join([*lines, f"  a refusal: {head.get('words')}"])
    if "exchange" in head:
        question = Question.of(head)
        lines.append(f"  asks for '{question.exchange}'")
        if question.settings:
            text = question.settings
            lines.append(f"  with the settings {text[:500]}{' ...' if len(text) > 500 else ''}")
    for array_name, array in arrays.items():
        shape = " x ".join(map(str, array.shape)) or "one number"
        lines.append(f"  {array_name}: {shape} ({array.dtype})")
    return "\n".join(lines)


def answer_files(silo: Silo, where: Path) -> list[Path]:
    """Write the reply to a file of rounds by files, or to all in a folder; return what is new."""
    if not where.exists():
        raise DataError(f"there is no file {where}.")
    requests = sorted(where.glob("*.request")) if where.is_dir() else [where]
    written = []
    for request in requests:
        reply = request.with_suffix(".reply")
        if reply.exists():
            print(f"{reply.name} is there already: nothing was computed.", file=sys.stderr)
            continue
        question = request.read_bytes()
        print(words_of(request.name, question))
        content = silo.answer(question)
        write_atomically(reply, partial(_write, content))
        print(words_of(reply.name, content))
        written.append(reply)
    return written


def study_hash(study: ModuleType, modules: list[ModuleType]) -> str:
    """Return the hash of a study's file and of the modules beside it that it imports."""
    root = Path(str(study.__file__)).parent
    files = {Path(str(study.__file__))}
    for module in modules:
        file = getattr(module, "__file__", None)
        if file and Path(file).suffix == ".py" and Path(file).resolve().is_relative_to(root):
            files.add(Path(file).resolve())
    digest = sha256()
    for file in sorted(files - {f for f in files if "site-packages" in f.parts}):
        # Lines may end as the machine has them.
        text = file.read_bytes().replace(b"\r\n", b"\n")
        digest.update(f"{file.relative_to(root).as_posix()} {len(text)}\n".encode() + text)
    return digest.hexdigest()


def key_of(file: Path | None) -> PrivateKey | None:
    """Return the key in a file; without one, that of ``numpyro-fed key`` if there is one."""
    if file is not None:
        return PrivateKey.load(file.expanduser())
    usual = KEY_FILE.expanduser()
    return PrivateKey.load(usual) if usual.exists() else None


def _write(content: bytes, stream: IO[bytes]) -> None:
    stream.write(content)


def _seconds(date: str) -> float:
    """Return the seconds since 1970 at the end of a day, ``"2030-12-31"``."""
    try:
        day = datetime.fromisoformat(date)
    except ValueError as error:
        raise ModelError(f"--until {date}: a date such as 2030-12-31 was expected.") from error
    return day.timestamp() + 86_400
