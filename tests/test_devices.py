"""Silos over several devices have the numbers of one device."""

import json
import os
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


random, found = np.random.default_rng(0), {}
silos = [dict(y=random.normal(3, 2, 5 + j % 3)) for j in range(8)]
quiet = {"progress_bar": False}
for number in (8, 6):  # six silos cannot be divided among four devices
    for method in (nf.SFVI(model, start=None), nf.PVI(model, start=None, schedule="synchronous")):
        fit = method.run(jax.random.key(0), 4, silos[:number], **quiet)
        found[f"{type(method).__name__}, {number}"] = fit.losses.tolist()
    (batch,) = fit._silos.batches
    rows = jax.tree.leaves(batch.data)[0]
    found[f"rows, {number}"] = len(rows)
    found[f"shards, {number}"] = len({str(s.index) for s in rows.addressable_shards})
    program = fit._fit.runtime.advance.lower(
        jax.random.key(0), fit.state, fit._silos.batches, 1
    ).compile()
    kinds = "all-reduce", "all-gather", "collective-permute", "all-to-all"
    found[f"exchanges, {number}"] = {k: program.as_text().count(f" {k}(") for k in kinds}
carried = nf.SFVI(model, start=fit).run(jax.random.key(0), 2, silos[:6], **quiet)
found["carried"] = carried.losses.tolist()
print(json.dumps(found))
"""


def on(devices):
    """The numbers of a process with so many devices."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        env={**os.environ, "XLA_FLAGS": flags},
        cwd=Path(__file__).parents[1],
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
    # Silos that come once more add no exchange between devices.
    assert 0 < four["exchanges, 6"]["all-reduce"] <= four["exchanges, 8"]["all-reduce"]
