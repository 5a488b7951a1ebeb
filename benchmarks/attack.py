"""How many rows a dishonest server finds by choosing the places of a search, under a silo's policy.

Twenty patients with age and body mass index, an outcome of yes or no, and a logistic regression. At
a place far from zero a row's probability is 0 or 1, so that the gradient jumps by the whole row
where the place crosses it. The server splits an interval of intercepts until each part has one row:
that part's jump is the row. Outcomes follow from the sum of the rows whose outcome is yes.

It attacks under several limits on places (``max_places``). Then, after a weighing of draws under
``in_order``, once more by places, and by draws: log likelihoods at four neighbours tell the
gradient, and one exchange weighs a thousand. ``honest`` is what :func:`numpyro_fed.fit` on three
such silos has asked for.

Then it attacks the default between three hospitals, sums that nobody sees the parts of: by the sums
of three hospitals; with two silos of its own in the place of the others, whose parts it takes off,
as two silos could that work with the server; and against a policy that names its ``peers``.

    python benchmarks/attack.py --json attack.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from record import machine, table_row
from record import write as write_record

import numpyro_fed as nf
from numpyro_fed.basics.errors import ModelError
from numpyro_fed.basics.files import canonical
from numpyro_fed.network import InMemory
from numpyro_fed.privacy.masks import decode
from numpyro_fed.rounds.messages import Question, raise_refusal, read, write
from numpyro_fed.rounds.secure_sums import MASKED, SUM

KEY = jax.random.key(0)
ROWS, SCALE = 20, 1e6
# By draws, in single precision: far enough for sharp jumps, near enough for differences.
SCALE_OF_DRAWS, STEP = 1e4, 8.0
MOST = 200  # places of a question by draws
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
        self.number = 0

    def send(self, silo: int, message: bytes, timeout: float) -> bytes:
        """Return a silo's reply to a message."""
        if silo == 0:
            question = Question.of(read(message).head)
            self.heard[question.exchange], self.number = message, question.number
        return super().send(silo, message, timeout)

    def reply(self, kind: str, downs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the first silo's reply to a message that looks like the last of its kind."""
        head, arrays = read(self.heard[kind])
        question = Question.of(head)
        question = question._replace(used=question.number, number=self.number + 1)
        downs = {name: a.astype(arrays[name].dtype) for name, a in downs.items()}
        message = write({**arrays, **downs}, question.head())
        reply = super().send(0, message, 1.0)
        raise_refusal(reply, 0, kind)
        self.heard[kind], self.number = message, question.number
        return dict(read(reply).arrays)

    def by_places(self, places: np.ndarray) -> np.ndarray:
        """Return the first silo's gradients at places (n, 3), one question for each."""
        shape = read(self.heard["mode"]).arrays["down"].shape
        replies = [self.reply("mode", {"down": np.broadcast_to(p, shape)}) for p in places]
        return np.array([reply["reply.up.gradient"][0] for reply in replies], float)

    def by_draws(self, places: np.ndarray) -> np.ndarray:
        """Return the same from log likelihoods at four draws each, one question for all."""
        steps = np.vstack([np.zeros(3), STEP * np.eye(3)])
        draws = (places[:, None] + steps).reshape(-1, 3)
        draws = np.resize(draws, read(self.heard["importance"]).arrays["down.z_G"].shape)
        values = self.reply("importance", {"down.z_G": draws})["reply.up.log_likelihood"]
        found = np.asarray(values, float)[: 4 * len(places)].reshape(-1, 4)
        return (found[:, 1:] - found[:, :1]) / STEP


class SumServer(InMemory):
    """An engine between hospitals, whose server sees sums and remembers its last questions."""

    in_process = False

    def __init__(self, silos: list[nf.Silo]):
        super().__init__([silo.answer for silo in silos])
        self.there = nf.Federation(self, names={"model": model}, at_once=1)
        self.heard: dict[int, bytes] = {}
        self.number = 0

    def send(self, silo: int, message: bytes, timeout: float) -> bytes:
        """Return a silo's reply to a message."""
        question = Question.of(read(message).head)
        self.number = max(self.number, question.number)
        if question.exchange == "mode":
            self.heard[silo] = message
        return super().send(silo, message, timeout)

    def by_places(self, places: np.ndarray) -> np.ndarray:
        """Return the sums over silos of gradients at places (n, 3), one question for each."""
        return np.array([self._sum_at(place) for place in places])

    def _sum_at(self, place: np.ndarray) -> np.ndarray:
        terms, number = self.there.sum_terms(range(self.num_silos)), self.number + 1
        words = np.zeros((), np.uint64)
        for silo in range(self.num_silos):
            head, arrays = read(self.heard[silo])
            down = np.broadcast_to(place, arrays["down"].shape).astype(arrays["down"].dtype)
            question = Question.of(head)
            question = question._replace(used=question.number, number=number)
            asked = write({**arrays, "down": down}, question.head() | {SUM: canonical(terms[silo])})
            reply = self.send(silo, asked, 1.0)
            raise_refusal(reply, silo, "mode")
            words = words + read(reply).arrays[MASKED]
        # The curvatures come first, as their name does.
        starts, dim = down.shape
        return decode(words, self.num_silos)[starts * dim**2 :][:dim]


def attacked_sums(own: int, peers: bool = False) -> dict[str, Any]:
    """Return what the attack finds by sums, where so many silos are the server's own.

    ``peers``: Whether the first silo's owner has named the keys of the true others.
    """
    true = [patients(seed) for seed in range(3 - own)]
    made_up = [patients(seed) for seed in range(10, 10 + own)]
    others = [nf.Silo(d, names={"model": model}) for d in true[1:] + made_up]
    known = ("none of these",) if peers else ()
    first = nf.Silo(true[0], names={"model": model}, policy=nf.Policy(peers=known))
    server = SumServer([first, *others])

    def gradients(places: np.ndarray) -> np.ndarray:
        found = server.by_places(places)
        for silo in made_up:
            probability = 1 / (1 + np.exp(-np.clip(places @ silo["x"].T, -700, 700)))
            found = found - (silo["y"] - probability) @ silo["x"]
        return found

    try:
        nf.SFVI(model).run(KEY, 0, server.there, progress_bar=False)
        found, asked, _ = attack(gradients, SCALE)
    except ModelError as error:
        if "not among the peers" not in str(error):
            raise
        found, asked = [], 0
    rows = np.concatenate([silo["x"] for silo in true]).astype(float)
    errors = [np.abs(rows - row).max(1).min() for row in found]
    return {
        "rows": len(rows),
        "rows_found": int(np.sum(np.array(errors) < 0.5)),
        "worst_error": float(max(errors)) if errors else None,
        "places_asked": asked,
    }


def attack(
    gradients: Callable[[np.ndarray], np.ndarray], scale: float
) -> tuple[list[np.ndarray], int, np.ndarray | None]:
    """Return the rows that were found, the places that it took, and the sum of rows with a yes."""
    found: list[np.ndarray] = []
    asked, with_yes = 0, None

    def at(cuts: list[float]) -> list[np.ndarray]:
        nonlocal asked
        places = scale * np.array([[-cut, *DIRECTION] for cut in cuts])
        answers = list(gradients(places))
        asked += len(cuts)
        return answers

    try:
        # Beyond all patients, and no farther: log likelihoods come in single precision.
        low, high = at([-100.0, 100.0])
        with_yes = high
        parts = [(low, high)]
        while parts:
            counts = [round((high - low)[0]) for low, high in parts]
            found += [high - low for (low, high), n in zip(parts, counts, strict=True) if n == 1]
            split = [(part, n) for part, n in zip(parts, counts, strict=True) if n > 1][:MOST]
            means = [(high - low)[1:] @ DIRECTION / n for (low, high), n in split]
            middles = at(means) if split else []
            parts = [
                half
                for ((low, high), _), middle in zip(split, middles, strict=True)
                for half in ((low, middle), (middle, high))
            ]
            if asked > 1_000:  # numbers of the silo's own precision tell no more
                break
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


def attacked(policy: nf.Policy, by: str = "places") -> dict[str, Any]:
    """Return what the attack has found under a policy, after an honest search and weighing."""
    data = [patients(seed) for seed in range(3)]
    server = Server([nf.Silo(d, names={"model": model}, policy=policy) for d in data])
    there = nf.Federation(server, names={"model": model}, at_once=1)
    run = nf.SFVI(model).run(KEY, 0, there, progress_bar=False)
    if by == "draws" or policy.in_order:
        nf.importance_correct(KEY, run, 1_000)
    if by == "draws":
        found, asked, with_yes = attack(server.by_draws, SCALE_OF_DRAWS)
    else:
        found, asked, with_yes = attack(server.by_places, SCALE)
    true = data[0]["x"].astype(float)
    errors = [np.abs(true - row).max(1).min() for row in found]
    guess = outcomes(found, with_yes)
    order = [int(np.abs(true - row).max(1).argmin()) for row in found]
    return {
        "rows_found": int(np.sum(np.array(errors) < 0.5)),
        "worst_error": float(max(errors)) if errors else None,
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
    ordered = nf.Policy(exchanges=ORDER, in_order=True)
    table = {f"max_places={n}": attacked(nf.Policy(max_places=n)) for n in limits}
    table["in_order, after a weighing"] = attacked(ordered)
    table["the same, by draws"] = attacked(ordered, "draws")
    by_sums = {
        "sums over three hospitals": attacked_sums(0),
        "sums with two silos of the server": attacked_sums(2),
        "the same, with peers in the policy": attacked_sums(2, peers=True),
    }
    report = {
        "machine": machine(),
        "attack": table,
        "sums": by_sums,
        "honest": {} if args.quick else honest(),
    }
    for name, row in {**table, **by_sums}.items():
        print(f"{name:28}", row)
    print("a fit asks for", report["honest"])
    if args.json:
        rows = [
            table_row(
                f"rows found of {ROWS}, {name}",
                f"{r['rows_found']}, outcomes {r['outcomes_found']}, places {r['places_asked']}",
            )
            for name, r in table.items()
        ]
        rows += [
            table_row(f"rows found, {name}", f"{r['rows_found']} of {r['rows']}")
            for name, r in by_sums.items()
        ]
        write_record(args.json, rows, details=report)


if __name__ == "__main__":
    main()
