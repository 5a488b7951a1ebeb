"""A whole NVFLARE on the loopback device: provisioned, with a server, its sites and their silos."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from numpyro_fed.network import PrivateKey

SITES = ("hospital-1", "hospital-2", "hospital-3")
USER = "analyst@university.org"
SERVER = "localhost"  # also the address on which it listens: no other machine reaches it
ANALYST = PrivateKey(bytes([1]) * 32)
STUDY = Path(__file__).with_name("flare_study.py")
# Rows are few, so that compiling is most of the time; PVI asks one silo after the other.
POLICY = "min_rows = 1\nparameters_per_row = 10.0\nsecure_sum = false\n"
PROJECT = """\
api_version: 3
name: study
description: hospitals
participants:
  - {{name: localhost, type: server, org: university, fed_learn_port: {port}}}
{sites}
  - {{name: analyst@university.org, type: admin, org: university, role: lead}}
builders:
  - path: nvflare.lighter.impl.workspace.WorkspaceBuilder
    args: {{template_file: [master_template.yml]}}
  - path: nvflare.lighter.impl.static_file.StaticFileBuilder
    args: {{config_folder: config}}
  - path: nvflare.lighter.impl.cert.CertBuilder
  - path: nvflare.lighter.impl.signature.SignatureBuilder
"""


class Place:
    """The processes of a federation, each with a log in one folder, which ``close`` ends."""

    def __init__(self, folder, study=STUDY, data=STUDY, sites=SITES, **environment):
        self.folder, self.study, self.data, self.sites = Path(folder), study, data, sites
        self.environment = {**os.environ, "HOME": str(folder), **environment}
        # Else the nvflare of another environment may come first.
        path = [str(Path(sys.executable).parent), os.environ["PATH"]]
        self.environment["PATH"] = os.pathsep.join(path)
        self.processes = {}
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        lines = (f"  - {{name: {s}, type: client, org: {s.replace('-', '_')}}}" for s in sites)
        project = PROJECT.format(port=port, sites="\n".join(lines))
        (self.folder / "project.yml").write_text(project)
        ANALYST.save(self.folder / "analyst.key")
        rules = f'requesters = ["{ANALYST.fingerprint}"]\n{POLICY}'
        (self.folder / "policy.toml").write_text(rules)
        self.call("nvflare.cli", "provision", "-p", "project.yml", "-w", "kits", "--force")
        self.allow(SERVER)
        for site in sites:
            self.allow(site, "--socket", f"{site}.sock")

    def kit(self, name):
        return self.folder / "kits" / "study" / "prod_00" / name

    def call(self, module, *arguments, **options):
        """Run a command of Python to its end; return its process."""
        command = [sys.executable, "-m", module, *map(str, arguments)]
        options = {"cwd": self.folder, "env": self.environment, "text": True} | options
        done = subprocess.run(command, capture_output=True, **options)
        assert done.returncode == 0, f"{command}\n{done.stdout[-3_000:]}\n{done.stderr[-3_000:]}"
        return done

    def allow(self, name, *options):
        self.call("numpyro_fed.network.cli", "allow", self.kit(name), *options)

    def analyse(self, state, **options):
        """Run the study as the analyst does; return what was printed."""
        arguments = ("--engine", "nvflare", "--kit", self.kit(USER), "--state", state)
        arguments += ("--key", self.folder / "analyst.key", "--no-secure-sum")
        return self.call("numpyro_fed.network.cli", "run", self.study, *arguments, **options).stdout

    def start(self, name, command, **environment):
        with open(self.folder / f"{name}.log", "a") as log:
            self.processes[name] = subprocess.Popen(
                command,
                cwd=self.folder,
                env={**self.environment, **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def start_nvflare(self, name):
        """Of the server or a site, as its start.sh does."""
        script = self.kit(name) / "startup" / "sub_start.sh"
        self.start(f"nvflare of {name}", ["bash", str(script), "--once"])

    def start_silo(self, number):
        site = self.sites[number]
        command = [sys.executable, "-m", "numpyro_fed.network.cli", "silo", str(self.study)]
        command += ["--data", f"{self.data}:silo", "--socket", f"{site}.sock"]
        command += ["--state", f"{site}.state", "--policy", "policy.toml"]
        self.start(f"silo of {site}", command, NUMPYRO_FED_SILO=str(number))

    def start_echo(self, number):
        """A process that listens where a silo does, and replies with what it is told."""
        site = self.sites[number]
        self.start(f"silo of {site}", [sys.executable, __file__, f"{site}.sock"])

    def start_all(self, start_silo=None):
        for number in range(len(self.sites)):
            (start_silo or self.start_silo)(number)
        for name in (SERVER, *self.sites):
            self.start_nvflare(name)
        self.wait_for_silos()

    def wait_for_silos(self, within=120.0):
        deadline = time.monotonic() + within
        while not all(self.listens(site) for site in self.sites):
            for name, process in self.processes.items():
                assert process.poll() is None, f"{name}: {self.log(name)[-3_000:]}"
            assert time.monotonic() < deadline, "the silos do not listen"
            time.sleep(0.1)

    def listens(self, site):
        with socket.socket(socket.AF_UNIX) as one:
            return one.connect_ex(str(self.folder / f"{site}.sock")) == 0

    def log(self, name):
        return (self.folder / f"{name}.log").read_text()

    def kill_silo(self, number):
        process = self.processes.pop(f"silo of {self.sites[number]}")
        process.kill()
        process.wait()

    def kill_nvflare(self, name):
        """Of the server or a site: its process and those of its jobs."""
        process = self.processes.pop(f"nvflare of {name}")
        for one in of_folder(self.kit(name)):
            one.kill()
        process.kill()
        process.wait()

    def close(self):
        for process in self.processes.values():
            process.send_signal(signal.SIGKILL)
            process.wait()
        # Jobs are in sessions of their own.
        left = of_folder(self.folder)
        for process in left:
            process.kill()
        for process in left:
            process.wait(10)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()


def of_folder(folder):
    """The processes that name a folder, which is nobody else's, in their command."""
    import psutil  # NVFLARE needs it, and nothing else here

    found = []
    for process in psutil.process_iter(["cmdline", "pid"]):
        words = process.info["cmdline"] or []
        if process.info["pid"] != os.getpid() and any(str(folder) in word for word in words):
            found.append(process)
    return found


def echo(path):
    """Reply with each message after the seconds that its first word may ask for."""
    from numpyro_fed.network.engines import listen

    def answer(message):
        words = message[:40].split()
        if words and words[0] == b"wait":
            time.sleep(float(words[1]))
        return message

    listen(path, answer).serve_forever()


if __name__ == "__main__":
    echo(sys.argv[1])
