"""How many rows a dishonest server finds by choosing the places of a search, under a silo's policy.

Twenty patients with age and body mass index, an outcome of yes or no, and a logistic regression. At
a place far from zero a row's probability is 0 or 1, so that the gradient jumps by the whole row
where the place crosses it. The server splits an interval of intercepts until each part has one row:
that part's jump is the row. Outcomes follow from the sum of the rows whose outcome is yes.

It attacks under several limits on places (``max_places``), and after a weighing of draws under
``in_order``. ``honest`` is what :func:`numpyro_fed.fit` on three such silos has asked for.

    python benchmarks/attack.py --json attack.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from sfvi_vs_pooled import machine

import numpyro_fed as nf
from numpyro_fed.errors import ModelError
from numpyro_fed.network import InMemory
from numpyro_fed.runtime.messages import Question, raise_refusal, read, write

KEY = jax.random.key(0)
ROWS, SCALE = 20, 1e6
DIRECTION = np.array([0.37, 1.0])  # of the covariates, whose weighted sum tells rows apart
ORDER = ("own modes", "mode", "from the mode", "importance")


def model(x: Any, y: Any = None) -> None:
    """Declare a logistic regression; the first column of ``x`` is one."""
    beta = numpyro.sample("beta", dist.Normal(0, 10).expand([x.shape[-1]]).to_event(1))
    with nf.silo_plate("patient", len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


def patients(seed: int) -> dict[str, np.ndarray]:
    """Return twenty made-up patients, with numbers as a hospital has them."""
    r = np.random.default_rng(seed)
    age, bmi = r.normal(62, 14, ROWS).round(1), r.normal(27, 4, ROWS).round(1)
    logits = -8 + 0.05 * age + 0.15 * bmi
    y = (r.random(ROWS) < 1 / (1 + np.exp(-logits))).astype(np.int32)
    x = np.stack([np.ones(ROWS), age, bmi], 1).astype(np.float32)
    return dict(x=x, y=y)


class Server(InMemory):
    """An engine that remembers the last message of a kind to the first silo."""

    def __init__(self, silos: list[nf.Silo]):
        super().__init__([silo.answer for silo in silos])
        self.heard: dict[str, bytes] = {}

    def send(self, silo: int, message: bytes, timeout: float) -> bytes:
        """Return a silo's reply to a message."""
        if silo == 0:
            self.heard[read(message).head["exchange"]] = message
        return super().send(silo, message, timeout)

    def gradient(self, place: np.ndarray) -> np.ndarray:
        """Return the first silo's gradient at a place, which looks like one of a search."""
        head, arrays = read(self.heard["mode"])
        question = Question.of(head)
        question = question._replace(used=question.number, number=question.number + 1)
        downs = np.broadcast_to(place, arrays["down"].shape).astype(arrays["down"].dtype)
        message = write({**arrays, "down": downs}, question.head())
        reply = super().send(0, message, 1.0)
        raise_refusal(reply, 0, "mode")
        self.heard["mode"] = message
        return np.asarray(read(reply).arrays["reply.up.gradient"][0], float)


def attack(server: Server) -> tuple[list[np.ndarray], int, np.ndarray | None]:
    """Return the rows that were found, the places that it took, and the sum of rows with a yes."""
    found: list[np.ndarray] = []
    asked, with_yes = 0, None

    def at(cut: float) -> np.ndarray:
        nonlocal asked
        gradient = server.gradient(SCALE * np.array([-cut, *DIRECTION]))
        asked += 1
        return gradient

    try:
        low, high = at(-1e4), at(1e4)
        with_yes = high
        parts = [(low, high)]
        while parts:
            low, high = parts.pop()
            inside = high - low
            count = round(inside[0])
            if count == 1:
                found.append(inside)
            elif count > 1:
                middle = at(inside[1:] @ DIRECTION / count)
                parts += [(low, middle), (middle, high)]
    except ModelError:
        pass
    return found, asked, with_yes


def outcomes(found: list[np.ndarray], with_yes: np.ndarray | None) -> np.ndarray | None:
    """Return the outcomes of all rows, whose rows with a yes add up to a known sum."""
    if len(found) < ROWS or with_yes is None:
        return None
    halves = [np.array(list(product([0, 1], repeat=ROWS // 2)), float)] * 2
    rows = np.array(found)
    sums = [h @ part for h, part in zip(halves, np.split(rows, 2), strict=True)]
    best, guess = np.inf, np.zeros(ROWS)
    for half, partial in zip(halves[0], sums[0], strict=True):
        errors = np.abs(partial + sums[1] - with_yes).max(1)
        i = int(errors.argmin())
        if errors[i] < best:
            best, guess = errors[i], np.concatenate([half, halves[1][i]])
    return guess


def attacked(policy: nf.Policy, weigh: bool) -> dict[str, Any]:
    """Return what the attack has found under a policy, after an honest search."""
    data = [patients(seed) for seed in range(3)]
    server = Server([nf.Silo(d, names={"model": model}, policy=policy) for d in data])
    there = nf.Federation(server, names={"model": model}, at_once=1)
    run = nf.SFVI(model).run(KEY, 0, there, progress_bar=False)
    if weigh:
        nf.importance_correct(KEY, run, 1_000)
    found, asked, with_yes = attack(server)
    true = data[0]["x"].astype(float)
    errors = [np.abs(true - row).max(1).min() for row in found]
    guess = outcomes(found, with_yes)
    order = [int(np.abs(true - row).max(1).argmin()) for row in found]
    return {
        "rows_found": int(np.sum(np.array(errors) < 0.05)),
        "worst_error": max(errors, default=None),
        "places_asked": asked,
        "outcomes_found": 0 if guess is None else int((guess == data[0]["y"][order]).sum()),
    }


def honest() -> dict[str, int]:
    """Return how many places and draws a fit on three such silos asks each silo for."""
    with tempfile.TemporaryDirectory() as folder:
        audit = Path(folder) / "audit.jsonl"
        policy = nf.Policy(audit=str(audit))
        silos = [
            nf.Silo(patients(j), names={"model": model}, policy=policy if j == 0 else None)
            for j in range(3)
        ]
        there = nf.Federation(Server(silos), names={"model": model}, at_once=1)
        fitted = nf.fit(KEY, model, there, progress_bar=False)
        left = json.loads(audit.read_text().splitlines()[-1])["left"]
    limits = {"places": policy.max_places, "draws": policy.max_draws}
    spent = {name: limits[name] - left[name] for name in limits}
    return {**spent, "trusted": bool(fitted.trusted)}


def main() -> None:
    """Attack under each policy, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--quick", action="store_true", help="only see that it runs")
    args = parser.parse_args()
    limits = [60] if args.quick else [5_000, 100, 60, 40, 30, 20]
    cases = [(f"max_places={n}", nf.Policy(max_places=n), False) for n in limits]
    ordered = nf.Policy(exchanges=ORDER, in_order=True)
    cases.append(("in_order, after a weighing", ordered, True))
    table = {name: attacked(policy, weigh) for name, policy, weigh in cases}
    report = {"machine": machine(), "attack": table, "honest": {} if args.quick else honest()}
    for name, row in report["attack"].items():
        print(f"{name:28}", row)
    print("a fit asks for", report["honest"])
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
