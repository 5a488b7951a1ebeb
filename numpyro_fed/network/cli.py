"""The command ``numpyro-fed``: a study between parties, or a rehearsal of it on one machine."""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from numpyro_fed.basics.errors import DataError, MissingExtraError, ModelError, SavedStateError
from numpyro_fed.basics.files import OWNER_ALONE, private_folder, write_atomically
from numpyro_fed.basics.programs import cache_programs
from numpyro_fed.network.doctor import add_doctor
from numpyro_fed.network.engines import Folder, Sockets, listen, short_folder
from numpyro_fed.network.flare import Flare, allow
from numpyro_fed.network.owner import add_commands, answer_files
from numpyro_fed.network.policy import Policy
from numpyro_fed.network.silo import Silo
from numpyro_fed.network.study_files import data_of, key_of, load_study, names_of
from numpyro_fed.rounds.envelopes import PrivateKey
from numpyro_fed.rounds.federation import MISSING, Engine, Federation

NUMBER = "NUMPYRO_FED_SILO"  # of the silos of a rehearsal, in their environment
# Seconds until the processes of a rehearsal listen: each imports JAX and reads its data.
STARTING = 300.0
EVERY, WIDTH = 5.0, 500  # seconds between two signs of life of a silo, and the letters of one
PATIENCE = 600.0  # seconds to wait for a silo, unless told otherwise
# The file in the analyst's folder that names the sites of NVFLARE, whose order is that of silos.
SITES = "sites.json"
# The folder in that of a silo or of the analyst with compiled programs, where a new process finds
# them.
PROGRAMS = "programs"
KEY = "key"  # the file in a rehearsal's folder with the key of who asks
LOG = logging.getLogger("numpyro_fed.silo")
SECURE_SUM = "sums that nobody sees (by default with three silos or more)"
# Errors whose words are for whoever runs the command.
TOLD = ModelError, DataError, SavedStateError, ConnectionError, TimeoutError, MissingExtraError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status."""
    parser = argparse.ArgumentParser(prog="numpyro-fed", description=__doc__)
    commands = parser.add_subparsers(required=True)

    one = commands.add_parser("try", help="run a study with silos in processes of this machine")
    one.set_defaults(command=analyse, engine_of=listening_here, patience=PATIENCE, missing="wait")
    one.add_argument("study", type=Path, help="the file with the models and main(silos)")
    one.add_argument("--silos", type=int, required=True, help="their number")
    one.add_argument("--data", required=True, help=f"file.py:function; it can read {NUMBER}")
    one.add_argument("--state", type=Path, help="a folder, to go on with the same command")
    one.add_argument("--secure-sum", action=argparse.BooleanOptionalAction, help=SECURE_SUM)

    silo = commands.add_parser("silo", help="answer a server, with the data of this silo")
    silo.set_defaults(command=serve)
    silo.add_argument("study", type=Path, help="the same file as at the server")
    silo.add_argument("--data", required=True, help="file.py:function that returns the data")
    silo.add_argument("--socket", type=Path, required=True, help="where an engine finds the silo")
    silo.add_argument("--socket-group", help="users of a group who may open the socket, too")
    kept = silo.add_mutually_exclusive_group()
    words = "a folder, by which a new process goes on and limits last (by default SOCKET.state)"
    kept.add_argument("--state", type=Path, help=words)
    words = "keep nothing: the policy's limits end with the process, as in a rehearsal"
    kept.add_argument("--in-memory", action="store_true", help=words)
    words = "a file that says every few seconds that the silo lives, and how many it has answered"
    silo.add_argument("--health", type=Path, help=words)
    add_rules(silo)

    answer = commands.add_parser("answer", help="answer the files of an analyst, and end")
    answer.set_defaults(command=answer_once)
    answer.add_argument("study", type=Path, help="the same file as at the analyst")
    answer.add_argument("request", type=Path, help="a file NAME.request, or a folder with some")
    answer.add_argument("--data", required=True, help="file.py:function that returns the data")
    answer.add_argument("--state", type=Path, required=True, help="the silo's folder, which stays")
    add_rules(answer)

    run = commands.add_parser("run", help="run a study over silos that are reached by an engine")
    run.set_defaults(command=analyse, engine_of=listening_already)
    run.add_argument("study", type=Path, help="the file with the models and main(silos)")
    run.add_argument("--engine", choices=["sockets", "nvflare", "folder"], default="sockets")
    run.add_argument("--folder", type=Path, help="with a folder of files for each silo")
    run.add_argument("--key", type=Path, help="of numpyro-fed key, with which questions are signed")
    run.add_argument("--sockets", type=Path, nargs="+", help="of silos on this machine")
    run.add_argument("--kit", type=Path, help="the startup kit of a user of NVFLARE")
    run.add_argument("--sites", nargs="+", help="of NVFLARE, in the order of the silos")
    run.add_argument("--state", type=Path, help="a folder, to go on with the same command")
    run.add_argument("--secure-sum", action=argparse.BooleanOptionalAction, help=SECURE_SUM)
    words = "seconds after which a job of NVFLARE begins without sites that have not come"
    run.add_argument("--wait-for-sites", type=float, help=words)
    run.add_argument("--missing", choices=MISSING, default="wait", help="what to do without a silo")
    run.add_argument("--patience", type=float, default=PATIENCE, help="seconds to wait for a silo")

    kit = commands.add_parser("allow", help="let the NVFLARE of a startup kit run the relay only")
    kit.set_defaults(command=allow_kit)
    kit.add_argument("kit", type=Path, help="the startup kit of a site or of the server")
    kit.add_argument("--socket", type=Path, help="where the silo listens: for a site")

    add_commands(commands)
    add_doctor(commands)

    args = parser.parse_args(arguments)
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.INFO)
    logging.getLogger("jax").setLevel(logging.WARNING)  # of backends that are not there
    before = os.umask(0o077)  # whatever is written, compiled programs too, is for its owner alone
    try:
        return args.command(args) or 0  # the doctor's status is 1 where something is wrong
    except TOLD as error:
        print(f"numpyro-fed: {error}", *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"numpyro-fed: {error.filename or 'a file'}: {error.strerror}", file=sys.stderr)
        return 1
    finally:
        os.umask(before)


def add_rules(parser: argparse.ArgumentParser) -> None:
    """Add the arguments by which a silo's owner says who may ask for what."""
    parser.add_argument("--policy", type=Path, help="a file of TOML with the owner's rules")
    words = "a fingerprint of numpyro-fed key, beside those of the policy"
    parser.add_argument("--requester", action="append", default=[], help=words)
    parser.add_argument("--anyone", action="store_true", help="answer questions of no signature")


def silo_of(args: argparse.Namespace, state: Path | None) -> Silo:
    """Return the silo of the command's arguments, which has its folder to itself."""
    study, hashed = load_study(args.study)
    try:
        policy = Policy() if args.policy is None else Policy.from_toml(args.policy)
        policy = replace(policy, requesters=(*policy.requesters, *args.requester))
    except (ValueError, OSError) as error:
        raise ModelError(f"the policy {args.policy} cannot be used: {error}") from error
    if not (policy.requesters or args.anyone):
        raise ModelError(
            "nobody may ask this silo: its policy has no requesters. The analyst makes a key by "
            "'numpyro-fed key', and you add the line that it prints to the policy; or start with "
            "--anyone, if whoever can open the socket may ask."
        )
    silo = Silo(data_of(args.data), names=names_of(study), policy=policy, state=state, study=hashed)
    silo.hold()  # before the socket is taken from another process that answers
    LOG.info("the hash of the study's files: %s", hashed)
    if state is not None:
        cache_programs(private_folder(state / PROGRAMS))
    LOG.info("replies are signed by the key %s (silo_keys)", silo.fingerprint_of_replies)
    if policy.secure_sum is not False:
        LOG.info("the fingerprint of this silo's key, for others' peers: %s", silo.fingerprint)
    LOG.info("what is kept, what was asked among it, is in %s", state or "no folder")
    return silo


def answer_once(args: argparse.Namespace) -> None:
    """Answer files, and end."""
    answer_files(silo_of(args, args.state), args.request)


def serve(args: argparse.Namespace) -> None:
    """Answer the server until the process is ended."""
    state = args.state
    if state is None and not args.in_memory:
        state = Path(f"{args.socket}.state")
    silo = silo_of(args, state)
    server = listen(args.socket, silo.answer, args.socket_group)
    LOG.info("listening at %s", args.socket)
    if args.health is not None:
        threading.Thread(target=tell_health, args=(silo, args.health), daemon=True).start()
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
        args.socket.unlink(missing_ok=True)


def tell_health(silo: Silo, file: Path) -> None:
    """Write every few seconds that a silo lives, with :attr:`Silo.health`, as long as it does."""
    while True:
        told = json.dumps({"alive": time.time(), **silo.health})
        try:
            # In place and of one length: whoever watches never reads a half, and the rights stay
            # that its owner gives the file.
            with open(os.open(file, os.O_WRONLY | os.O_CREAT, OWNER_ALONE), "w") as stream:
                stream.write(told.ljust(WIDTH) + "\n")
        except OSError as error:
            LOG.warning("%s cannot be written (%s)", file, error.strerror)
        time.sleep(EVERY)


def analyse(args: argparse.Namespace) -> None:
    """Run the study's ``main`` over silos."""
    study, hashed = load_study(args.study)
    run = getattr(study, "main", None)
    if not callable(run):
        raise ModelError(
            f"{study.__file__} has no function main(silos). It is what the analyst runs: "
            "def main(silos): return nf.fit(jax.random.key(0), model, silos)."
        )
    if args.state is not None:
        cache_programs(private_folder(args.state / PROGRAMS))
    options = dict(patience=args.patience, state=args.state, secure_sum=args.secure_sum)
    options |= dict(missing=args.missing)
    with ExitStack() as stack:
        engine = args.engine_of(args, stack)
        options |= dict(key=args.signing, study=hashed)
        run(Federation(engine, names=names_of(study), **options))


def listening_already(args: argparse.Namespace, stack: ExitStack) -> Engine:
    """Return the engine to silos that listen already, which the stack closes."""
    needed = {"sockets": "sockets", "nvflare": "kit", "folder": "folder"}[args.engine]
    if getattr(args, needed) is None:
        raise ModelError(f"--engine {args.engine} needs --{needed}.")
    args.signing = key_of(args.key)
    if args.engine == "folder":
        return Folder(args.folder, args.sites or ())
    if args.engine == "sockets":
        return Sockets(args.sockets)
    # What NVFLARE says of its network is not for the analyst, who hears of it by the engine.
    logging.getLogger("nvflare").setLevel(logging.CRITICAL)
    kept = None if args.state is None else args.state / SITES
    if args.sites is None and kept is not None and kept.exists():
        args.sites = json.loads(kept.read_text(encoding="utf-8"))
        words = "the sites are those of %s, with which the study began; --sites names others"
        logging.getLogger("numpyro_fed.run").info(words, kept)
    waits = dict(patience=args.patience, wait_for_sites=args.wait_for_sites)
    engine = stack.enter_context(Flare(args.kit, args.sites, **waits))
    if kept is not None:
        private_folder(kept.parent)
        sites = json.dumps(engine.sites).encode()
        write_atomically(kept, lambda stream: stream.write(sites))
    return engine


def listening_here(args: argparse.Namespace, stack: ExitStack) -> Engine:
    """Return the engine to silos in processes of this machine, which the stack ends."""
    folder = Path(stack.enter_context(short_folder()))
    sockets = [folder / f"{j}.sock" for j in range(args.silos)]
    processes = []
    args.signing = PrivateKey.generate()
    if args.state is not None:
        # The same one again, who goes on: silos answer whoever has begun.
        if not (args.state / KEY).exists():
            args.signing.save(args.state / KEY)
        args.signing = PrivateKey.load(args.state / KEY)
    for j, path in enumerate(sockets):
        command = [sys.executable, "-m", "numpyro_fed.network.cli", "silo", str(args.study)]
        command += ["--data", args.data, "--socket", str(path)]
        command += ["--requester", args.signing.fingerprint]
        kept = ["--in-memory"] if args.state is None else ["--state", args.state / f"silo-{j}"]
        processes.append(
            subprocess.Popen([*command, *map(str, kept)], env={**os.environ, NUMBER: str(j)})
        )
        # The last one first: a process is ended, and then waited for.
        stack.callback(processes[j].wait)
        stack.callback(processes[j].terminate)
    deadline = time.monotonic() + STARTING
    while not all(path.exists() for path in sockets):
        for j, process in enumerate(processes):
            if process.poll() is not None:
                raise ModelError(f"the process of silo {j} has ended; its words are above.")
        if time.monotonic() > deadline:
            raise ModelError(f"the silos did not listen within {STARTING:g} s.")
        time.sleep(0.05)
    return Sockets(sockets)


def allow_kit(args: argparse.Namespace) -> None:
    """Let the NVFLARE of a startup kit run the relay of this package and nothing else."""
    for file in allow(args.kit, args.socket):
        print(f"written: {file}")


if __name__ == "__main__":
    sys.exit(main())
