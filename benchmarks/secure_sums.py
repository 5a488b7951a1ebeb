"""What sums that nobody sees cost: time and bytes of an exchange, with and without masks.

Ten silos of this process, whose replies have ten thousand numbers; one silo after the other, as
the cores of one machine have it. Then what signatures and masks cost a whole fit: the children of
six cities in three silos, by ``nf.fit`` with compiled programs, in turn.

    python benchmarks/secure_sums.py --json secure_sums.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from from_examples import load_example
from record import table_row, write

import numpyro_fed as nf
from numpyro_fed.rounds.messages import Question, read


class Counted(nf.network.InMemory):
    """An engine that counts the bytes of a reply and notes when each exchange begins."""

    def __init__(self, silos, exchange):
        super().__init__([silo.answer for silo in silos])
        self.exchange, self.size, self.times = exchange, 0, []

    def send(self, silo, message, timeout):
        asked = Question.of(read(message).head).exchange == self.exchange
        if asked and silo == 0:
            self.times.append(time.perf_counter())
        reply = super().send(silo, message, timeout)
        if asked:
            self.size = len(reply)
        return reply


def model_of(numbers):
    """Return a model whose rounds of SFVI have replies of about so many numbers."""

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1).expand([numbers]).to_event(1))
        with nf.silo_plate("row", len(y)):
            numpyro.sample("y", dist.Normal(mu.mean(), 1), obs=y)

    return model


def fit_seconds(fits):
    """Return the seconds of nf.fit over three silos: as it is, signed, and signed under masks."""
    cities = load_example("six_cities")
    asks = nf.network.PrivateKey.generate()
    names = {"model": cities.model}
    kinds = {
        "plain": ((), {}),
        "signed": ((asks.fingerprint,), dict(key=asks, secure_sum=False)),
        "signed, masked": ((asks.fingerprint,), dict(key=asks, secure_sum=True)),
    }
    federations = {}
    for kind, (requesters, options) in kinds.items():
        policy = nf.Policy(requesters=requesters, secure_sum=options.get("secure_sum", False))
        policy = replace(policy, max_draws=10**9, max_places=10**9)
        silos = [nf.Silo(d, names=names, policy=policy) for d in cities.silos((200, 200, 137))]
        answers = [silo.answer for silo in silos]
        federations[kind] = lambda answers=answers, options=options: nf.Federation(
            nf.network.InMemory(answers), names=names, at_once=1, **options
        )
    seconds = {kind: [] for kind in kinds}
    for i in range(fits + 1):
        for kind, there in federations.items():
            began = time.perf_counter()
            nf.fit(jax.random.key(0), cities.model, there(), progress_bar=False)
            if i:  # the first one compiles
                seconds[kind].append(time.perf_counter() - began)
    return {kind: statistics.median(values) for kind, values in seconds.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--silos", type=int, default=10)
    parser.add_argument("--numbers", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--fits", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="few and small messages")
    parser.add_argument("--json", type=Path, help="a file for the report")
    args = parser.parse_args()
    if args.quick:
        args.silos, args.numbers, args.rounds = 3, 10, 8

    model = model_of(args.numbers)
    guide = nf.guides.MeanField()
    method = nf.SFVI(model, guide=guide, start=None, num_particles=1, optim=optax.sgd(1e-9))
    names = {"model": model, "method": method}
    policy = nf.Policy(min_rows=1, parameters_per_row=1e9, max_places=10**9)
    r = np.random.default_rng(0)
    data = [dict(y=r.normal(size=30)) for _ in range(args.silos)]
    found = {}
    for secure in (False, True):
        silos = [nf.Silo(d, names=names, policy=policy) for d in data]
        engine = Counted(silos, "sfvi")
        there = nf.Federation(engine, names=names, at_once=1, secure_sum=secure)
        method.run(jax.random.key(0), args.rounds, there, progress_bar=False)
        times = np.diff(engine.times)[5:]
        found["secure" if secure else "plain"] = {
            "exchange_ms": 1e3 * statistics.median(times),
            "reply_bytes": engine.size,
        }
    found["ratio"] = found["secure"]["exchange_ms"] / found["plain"]["exchange_ms"]
    found["fit"] = fits = {} if args.quick else fit_seconds(args.fits)
    print(json.dumps(found, indent=2))
    if args.json:
        masked, plain = found["secure"], found["plain"]
        what = f"{args.silos} silos of {args.numbers:,} numbers"
        rows = [
            table_row(
                f"an exchange, {what}",
                f"{masked['exchange_ms']:.0f} ms under masks, ratio {found['ratio']:.2f}",
                f"{plain['exchange_ms']:.0f} ms without",
                "ratio at most 1.5",
            ),
            table_row(
                f"a reply, {what}", masked["reply_bytes"], plain["reply_bytes"], unit="bytes"
            ),
        ]
        rows += [
            table_row(
                f"nf.fit over three silos, {kind}",
                f"{fits[kind]:.2f} s, ratio {fits[kind] / fits['plain']:.2f}",
                f"{fits['plain']:.2f} s without",
                target,
            )
            for kind, target in (("signed", "ratio at most 1.3"), ("signed, masked", ""))
            if fits
        ]
        write(args.json, rows, details=found)


if __name__ == "__main__":
    main()
