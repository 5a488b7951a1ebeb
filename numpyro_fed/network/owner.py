"""The commands of a silo's owner and of those who ask: keys, studies, the audit log, and files."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from datetime import date, datetime
from pathlib import Path

from numpyro_fed.basics.errors import DataError, ModelError
from numpyro_fed.basics.files import KEPT, Store, write_atomically
from numpyro_fed.network.audit import check_audit
from numpyro_fed.network.requesters import (
    APPROVED,
    PENDING,
    REFUSED,
    Study,
    keep_study,
    studies,
    study_of,
)
from numpyro_fed.network.silo import Silo
from numpyro_fed.rounds.envelopes import (
    ENVELOPE,
    KEY_FILE,
    SEALED,
    PrivateKey,
    fingerprint_of,
    signed_message,
)
from numpyro_fed.rounds.messages import Question, is_refusal, read

# Letters of a text of a stranger that are shown.
SHOWN = 500


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
    show.set_defaults(command=show_file)
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
    if args.verb == "refuse":
        decided = replace(study, state=REFUSED, until=0.0)
    else:
        decided = replace(study, state=APPROVED, until=end_of(args.until))
    keep_study(store, decided)
    print(described(decided))


def described(study: Study) -> str:
    """Return a study in words: who asks for what, and what would leave."""
    until = time.strftime(" until %Y-%m-%d", time.localtime(study.until)) if study.until else ""
    asked = time.strftime("%Y-%m-%d %H:%M", time.localtime(study.asked))
    lines = [f"{study.id}  {study.state}{until}, asked for first on {asked}"]
    lines.append(f"  by {study.requester or 'somebody who does not sign'}")
    lines.append(f"  files {study.study or 'of the process alone'}")
    lines += [f"  {shown(what)}: {shown(cost)}" for what, cost in study.costs.items()]
    return "\n".join(lines)


def look_at_audit(args: argparse.Namespace) -> None:
    """Print an audit log, once its lines follow each other."""
    if not args.file.exists():
        raise DataError(f"there is no file {args.file}.")
    found = check_audit(args.file)
    if not args.check:
        with open(args.file, encoding="utf-8", errors="backslashreplace") as lines:
            for line in lines:
                print(printable(line.rstrip("\n")))
    print(f"{found.number} lines, and each follows from the one before.", file=sys.stderr)
    for words in found.remarks:
        print(f"But {words}.", file=sys.stderr)


def show_file(args: argparse.Namespace) -> None:
    """Print what is in a file of rounds by files."""
    try:
        print(words_of(args.file.name, args.file.read_bytes()))
    except DataError as error:
        raise DataError(f"{args.file}: {error}") from error


def words_of(name: str, content: bytes) -> str:
    """Return in words what a file of rounds by files has in it.

    Raises
    ------
    DataError
        If it cannot be read, or its signature is not that of its key.
    """
    head, arrays = read(content)
    size = f"{printable(name)}: {len(content):,} bytes"
    if SEALED in arrays:
        try:
            by = f"says that it is signed by the silo with the key {fingerprint_of(head['silo'])}"
        except (KeyError, ValueError):
            by = "does not say which silo has signed it"
        return f"{size}, a sealed reply: nobody but who asked can read and check it.\n  It {by}."
    lines = [size]
    if ENVELOPE in head:
        found = signed_message(content)
        if found is not None:
            envelope, message = found
            lines.append(f"  signed by {envelope.fingerprint}, number {envelope.count}")
            lines.append(f"  of the study with the files {shown(envelope.study) or '(none)'}")
            head, arrays = read(message)
    else:
        lines.append("  not signed")
    if "error" in head:
        return "\n".join([*lines, f"  a refusal: {shown(head.get('words', ''))}"])
    if "exchange" in head:
        question = Question.of(head)
        lines.append(f"  asks for '{shown(question.exchange)}'")
        if question.settings:
            lines.append(f"  with the settings {shown(question.settings)}")
    for array_name, array in arrays.items():
        shape = " x ".join(map(str, array.shape)) or "one number"
        lines.append(f"  {shown(array_name)}: {shape} ({array.dtype})")
    return "\n".join(lines)


def printable(text: str) -> str:
    """Return a text in which nothing moves the cursor of a terminal, or begins a line."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def shown(text: str) -> str:
    """Return the beginning of a stranger's text, printable."""
    return printable(text[:SHOWN]) + (" ..." if len(text) > SHOWN else "")


def answer_files(silo: Silo, where: Path) -> list[Path]:
    """Write the reply to a file of rounds by files, or to all in a folder; return what is new.

    Raises
    ------
    DataError
        At the end, if some got no reply; what is wrong with each was printed.
    """
    if not where.exists():
        raise DataError(f"there is no file {where}.")
    requests = sorted(where.glob("*.request")) if where.is_dir() else [where]
    written, unanswered = [], 0
    for request in requests:
        reply = request.with_suffix(".reply")
        if reply.exists():
            words = "is there already: nothing was computed. Remove it to answer again"
            print(f"{printable(reply.name)} {words}.", file=sys.stderr)
            continue
        try:
            answer_file(silo, request, reply)
            written.append(reply)
        except (DataError, OSError) as error:
            unanswered += 1
            name, words = printable(request.name), printable(str(error))
            print(f"{name}: no reply was written. {words}", file=sys.stderr)
    if unanswered:
        raise DataError(f"{unanswered} of {len(requests)} files got no reply; see above why.")
    return written


def answer_file(silo: Silo, request: Path, reply: Path) -> None:
    """Write the reply to one file, and print what is in both.

    Raises
    ------
    DataError
        If the request cannot be read, is not signed by its key, or is of a study that its owner has
        yet to approve: none of them gets a reply, so that it can be answered later.
    """
    question = request.read_bytes()
    content = silo.answer(question, again=True)  # before it is read: the audit log has all
    print(words_of(request.name, question))
    if (study := waiting(silo, question, content)) is not None:
        print(described(study))
        raise DataError(
            f"The study waits for you: 'numpyro-fed approve {study.id} --until DATE --state "
            f"{silo._state or 'FOLDER'}', then answer again."
        )
    write_atomically(reply, lambda stream: stream.write(content))
    print(words_of(reply.name, content))


def waiting(silo: Silo, question: bytes, reply: bytes) -> Study | None:
    """Return the study of a question that was refused since its owner has yet to approve it."""
    requesters, found = silo._requesters, signed_message(question)
    if requesters.policy.approve != "ask":
        return None
    # A stranger's refusal is not sealed, and what is sealed is no more to be read here.
    if is_refusal(reply) == (found is not None):
        return None
    asks = Study(found[0].fingerprint if found is not None else "", requesters.study)
    study = study_of(requesters.store, asks.id)
    if study is None or study.state == REFUSED:
        return None
    return study if study.state == PENDING or time.time() > study.until else None


def end_of(day: str) -> float:
    """Return the seconds since 1970 at the end of a day to come, such as ``"2030-12-31"``."""
    try:
        last = date.fromisoformat(day)
    except ValueError as error:
        raise ModelError(f"--until {day}: a date such as 2030-12-31 was expected.") from error
    if last < date.today():
        raise ModelError(f"--until {day}: that day is over. 'numpyro-fed refuse' ends a study.")
    return datetime(last.year, last.month, last.day, 23, 59, 59).timestamp()
