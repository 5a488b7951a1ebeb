"""Silos over several devices and processes have the numbers of one device."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.slow
SCRIPT = """
import jax

jax.config.update("jax_enable_x64", True)
import json, sys
import numpy as np, numpyro, numpyro.distributions as dist, numpyro_fed as nf


def model(y):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    sigma = numpyro.sample("sigma", dist.HalfNormal(5))
    with nf.silo_plate("row", len(y)):
        b = numpyro.sample("b", dist.Normal(mu, sigma))
        numpyro.sample("y", dist.Normal(b, 1), obs=y)


def exchanges(fit):
    # Between devices in the loop over rounds, by kind.
    args = jax.random.key(0), fit.state, fit._silos.batches, 1
    text = fit._fit.runtime.advance.lower(*args).compile().as_text()
    loop = text[: text.index("ENTRY")]
    kinds = "all-reduce", "all-gather", "collective-permute", "all-to-all"
    return {k: loop.count(f" {k}(") for k in kinds}


random, found = np.random.default_rng(0), {}
silos = [dict(y=random.normal(3, 2, 5 + j % 3)) for j in range(8)]
quiet = {"progress_bar": False}
for number in (8, 6):  # six silos cannot be divided among four devices
    for method in (nf.SFVI(model, start=None), nf.PVI(model, start=None, schedule="synchronous")):
        fit = method.run(jax.random.key(0), 4, silos[:number], **quiet)
        found[f"{type(method).__name__}, {number}"] = fit.losses.tolist()
        if number == 8 or isinstance(method, nf.PVI):
            found[f"{type(method).__name__} exchanges, {number}"] = exchanges(fit)
    (batch,) = fit._silos.batches
    rows = jax.tree.leaves(batch.data)[0]
    found[f"rows, {number}"] = len(rows)
    found[f"shards, {number}"] = len({str(s.index) for s in rows.addressable_shards})
carried = nf.SFVI(model, start=fit).run(jax.random.key(0), 2, silos[:6], **quiet)
found["carried"] = carried.losses.tolist()
print(json.dumps(found))
"""


def on(devices):
    """The numbers of a process with so many devices."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        env={**os.environ, "XLA_FLAGS": flags},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_four_devices_have_the_numbers_of_one():
    one, four = on(1), on(4)
    for name in ("SFVI, 8", "SFVI, 6", "PVI, 8", "PVI, 6", "carried"):
        np.testing.assert_allclose(four[name], one[name], rtol=1e-12)
    assert (four["rows, 8"], four["rows, 6"], one["rows, 6"]) == (8, 8, 6)
    assert (four["shards, 8"], four["shards, 6"], one["shards, 8"]) == (4, 4, 1)
    assert sum(four["SFVI exchanges, 8"].values()) == four["SFVI exchanges, 8"]["all-reduce"] == 1
    # Silos that come once more add no exchange between devices.
    assert four["PVI exchanges, 6"]["all-reduce"] <= four["PVI exchanges, 8"]["all-reduce"]


PROCESSES = """
import sys
import numpyro_fed as nf
import jax

jax.config.update("jax_enable_x64", True)
number, address, bad = int(sys.argv[1]), sys.argv[2], len(sys.argv) > 3
if address:
    jax.distributed.initialize(address, 2, number)
import json
import numpy as np, numpyro, numpyro.distributions as dist


def model(y, kind):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    sigma = numpyro.sample("sigma", dist.HalfNormal(5))
    with nf.silo_plate("row", len(y["of"])):
        b = numpyro.sample("b", dist.Normal(mu, sigma))
        numpyro.sample("y", getattr(dist, kind)(b, 1), obs=y["of"])


random, found = np.random.default_rng(0), {}
silos = [dict(y={"of": random.normal(3, 2, n)}, kind="Normal") for n in (5, 5, 9, 8)]
if address:  # each process has its own: one silo, and three
    silos = [silos[:1], silos[1:]][number]
if bad and number:
    silos[1]["y"]["of"][3] = np.inf
quiet = {"progress_bar": False}
for method in (nf.SFVI(model, start=None), nf.PVI(model, start=None, schedule="sequential")):
    name, fit = type(method).__name__, method.run(jax.random.key(0), 3, silos, **quiet)
    found[name] = fit.losses.tolist()
    found[f"{name} locals"] = fit.sample_posterior(jax.random.key(1), 3, silo=3)["b"].tolist()
found["fit"] = nf.fit(jax.random.key(0), model, silos, **quiet).verdict
print(json.dumps(found))
"""


def together(*more):
    """What two processes of one program print, and how they end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-W", "ignore", "-c", PROCESSES]
    both = [
        subprocess.Popen(
            [*command, str(i), address, *more],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    return [(*process.communicate(timeout=300), process.returncode) for process in both]


def test_two_processes_have_the_numbers_of_one():
    alone = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROCESSES, "0", ""],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    one = json.loads(alone.stdout.splitlines()[-1])
    for out, err, code in together():
        assert code == 0, err[-2_000:]
        found = json.loads(out.splitlines()[-1])
        assert found.pop("fit") == one["fit"]
        for name, numbers in found.items():
            np.testing.assert_allclose(numbers, one[name], rtol=1e-10)


def test_bad_data_of_one_process_are_named_in_both():
    for _, err, code in together("bad"):
        assert code != 0
        assert "silo 1 of process 1" in err
