"""What attackers find out under differential privacy: who took part, and what a row is.

``members``: an attacker knows all rows but one, the canary, sees every message of private fits, and
says whether the canary took part, by the likelihood ratio of all messages: nobody can do better. A
thousand fits with it and a thousand without give a lower bound for epsilon, with confidence 95 %
(Jagielski et al. 2020: the threshold is from one half of the fits, the bound from the other). It
must lie below the epsilon that is claimed; without noise it must not.

``rows``: a dishonest server chooses the places at which a silo of 200 rows and six columns is
asked. Far from zero a gradient jumps by a whole row where a place crosses it; the server halves
intervals of places until one holds a single row. Found is a row of which all columns are within
5 % of their ranges. Once with a budget of epsilon 1, and once with the noise taken out.

    python benchmarks/privacy_attacks.py --fits 1000 --sets 100
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from private import one_silo, searched, wide_logistic
from record import table_row, write
from scipy.stats import beta

import numpyro_fed as nf
from numpyro_fed.basics.programs import precision
from numpyro_fed.data.silo_data import read
from numpyro_fed.dp_newton.algorithm import Answered, NewtonQuestion, PrivateNewton
from numpyro_fed.dp_newton.units import PrivateUnits, Releases
from numpyro_fed.privacy.budget import noisy
from numpyro_fed.rounds.names import PRIVATE_SIZES, PRIVATE_SUMS, PRIVATE_UNITS
from numpyro_fed.text.split import split

ROWS, FAR = 200, 1e6


def parts_for(x: np.ndarray, epsilon: float, noise: Any = noisy) -> PrivateNewton:
    """Return a private search for a logistic regression on one silo."""
    (data,) = read([dict(x=x, y=np.zeros(len(x), int))], wide_logistic)
    fm = split(wide_logistic, [data])
    schedule = Releases.of(nf.Privacy(epsilon=epsilon, delta=1e-5), fm.dim, len(x), 1)
    return PrivateNewton(PrivateUnits(fm, 1, False, noise), schedule, len(x))


def without_noise(parts: PrivateNewton) -> PrivateNewton:
    """Return the same parts with the noise taken out."""
    return replace(parts, units=replace(parts.units, noise=lambda total, sd: total))


class Eavesdropper:
    """Asks a silo, and adds up the log likelihood ratio of its replies, with and without a row."""

    def __init__(self, parts: PrivateNewton, silo: Any, rivals: tuple[Any, Any]):
        self.parts, self.rivals, self.ratio = parts, rivals, 0.0
        self.ask = one_silo(silo)
        self.quiet = {e.name: e for e in without_noise(parts).exchanges}

    def __call__(self, exchange: Any, down: NewtonQuestion) -> Any:
        """Return the silo's reply."""
        (asked,), name = self.ask.silos, exchange.name
        up = self.ask(exchange, down)
        with_row, without = (
            self.quiet[name].silo((), down, asked, rival)[0].up for rival in self.rivals
        )
        for reply, one, other, sd in zip(
            *map(jax.tree.leaves, (up, with_row, without)),
            self.deviations(name, down),
            strict=True,
        ):
            jump = (one - other)[0]
            self.ratio += float(((reply - other[0] - jump / 2) * jump).sum() / sd**2)
        return up

    def deviations(self, name: str, down: NewtonQuestion) -> list[float]:
        """Return the sd of the noise in each part of a reply."""
        parts = self.parts
        if name == PRIVATE_UNITS:
            return [parts.units.model.dim**0.5 * parts.schedule.units]
        phase = parts.schedule.phases[int(down.step) // parts.schedule.steps]
        if name == PRIVATE_SIZES:
            return [2**0.5 * phase.sizes]
        assert name.startswith(PRIVATE_SUMS)
        return [float(down.clip) * phase.gradient, float(down.clip_curvature) * phase.curvature]


def epsilon_of(ins: np.ndarray, outs: np.ndarray, delta: float, confidence: float = 0.95) -> float:
    """Return a lower bound of epsilon from statistics of fits with and without the canary."""
    half_in, half_out = len(ins) // 2, len(outs) // 2
    level = (1 - confidence) / 2  # of each of two rates

    def bound(threshold: float, above: bool, a: np.ndarray, b: np.ndarray) -> float:
        """Return the bound by how often fits of both kinds are above a threshold, or not."""
        hits, misses = (a > threshold, b > threshold) if above else (b <= threshold, a <= threshold)
        least = beta.ppf(level, hits.sum(), (~hits).sum() + 1) if hits.any() else 0.0
        most = beta.ppf(1 - level, misses.sum() + 1, (~misses).sum()) if not misses.all() else 1.0
        return float(np.log((least - delta) / most)) if least > delta else 0.0

    first, second = (ins[:half_in], outs[:half_out]), (ins[half_in:], outs[half_out:])
    thresholds = np.quantile(np.concatenate(first), np.linspace(0.01, 0.99, 99))
    choices = [(t, above) for t in thresholds for above in (True, False)]
    chosen = max(choices, key=lambda choice: bound(*choice, *first))
    return max(bound(*chosen, *second), 0.0)


def members(fits: int, epsilon: float, noise: Any = noisy) -> float:
    """Return the lower bound of epsilon that an attacker finds who sees all messages."""
    silos = canary()
    with precision(double=True):
        parts = parts_for(silos[1]["x"], epsilon, noise)
        data = [read([silo], wide_logistic)[0] for silo in silos]
        stacks = tuple(jax.tree.map(lambda a: np.asarray(a)[None], one) for one in data)

        def ratio(silo: Any) -> float:
            ask = Eavesdropper(parts, silo, stacks)
            searched(parts, ask)
            return ask.ratio

        found = [np.array([ratio(silo) for _ in range(fits)]) for silo in data]
    return epsilon_of(*found, delta=1e-5)


def canary() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return a silo's rows with a canary among them, and without."""
    r = np.random.default_rng(0)
    x = np.stack([np.ones(ROWS), r.normal(size=ROWS)], 1)
    y = (r.random(ROWS) < 1 / (1 + np.exp(-x @ [0.3, 1.0]))).astype(int)
    # As loud as can be: far out, with the other outcome.
    return dict(x=np.vstack([x, [1.0, 30.0]]), y=np.append(y, 0)), dict(x=x, y=y)


def patients(seed: int) -> dict[str, np.ndarray]:
    """Return made-up patients with five columns in units as hospitals have them."""
    r = np.random.default_rng(seed)
    columns = r.normal([62, 27, 135, 5.4, 90], [14, 4, 18, 1.1, 25], (ROWS, 5)).round(1)
    x = np.concatenate([np.ones((ROWS, 1)), columns], 1)
    return dict(x=x, y=(r.random(ROWS) < 0.3).astype(int))


@cache
def answers(epsilon: float, quiet: bool) -> Any:
    """Return the exchange in which a silo answers the server's places, compiled once."""
    parts = parts_for(patients(0)["x"], epsilon)
    return (without_noise(parts) if quiet else parts).exchanges[2].silo


def rows(seed: int, epsilon: float, *, quiet: bool) -> int:
    """Return how many rows a server finds that chooses places, as long as the silo answers."""
    silo = patients(seed)
    with precision(double=True):
        data = jax.tree.map(lambda a: np.asarray(a)[None], read([silo], wide_logistic)[0])
        d, state = 6, Answered(*np.zeros((3, 1), np.int32))
        direction = np.array([0.37, 1.0, 0.21, 5.3, 0.11])
        clip = np.linalg.norm(silo["x"], axis=1).max()
        # A large budget has more steps: without noise each of them tells something.
        answer = answers(50.0 if quiet else epsilon, quiet)

        def gradient(cut: float) -> np.ndarray:
            nonlocal state
            z = FAR * np.array([-cut, *direction])
            place = NewtonQuestion(state.sums[0], z, np.eye(d), clip, np.ones(()))
            reply, state = answer((), place, state, data)
            if not reply.ok[0]:
                raise StopIteration
            return np.asarray(reply.up.gradient[0])

        guesses = []
        try:
            parts_left = [(gradient(-1e5), gradient(1e5))]
            while parts_left:
                low, high = parts_left.pop()
                jump = high - low
                number = round(jump[0])
                if number <= 1:
                    guesses += [jump / jump[0]] if jump[0] != 0 else []
                    continue
                middle = gradient(jump[1:] @ direction / jump[0])
                parts_left += [(middle, high), (low, middle)]
        except StopIteration:
            pass
    near = 0.05 * np.ptp(silo["x"][:, 1:], axis=0)
    close = [(np.abs(silo["x"][:, 1:] - g[1:]) < near).all(1) for g in guesses]
    return int(np.any(close, axis=0).sum()) if close else 0


def main() -> None:
    """Attack, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fits", type=int, default=1_000, help="with the canary, and without")
    parser.add_argument("--sets", type=int, default=100)
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    args = parser.parse_args()
    canaries, found = {}, {}
    for words, epsilon in {"epsilon 1": 1.0, "epsilon 4": 4.0, "without noise": None}.items():
        noise = noisy if epsilon else (lambda total, sd: total)
        canaries[words] = members(args.fits, epsilon or 1.0, noise)
        print(f"canary, {words}: at least {canaries[words]:.2f}", flush=True)
    for words, epsilon in {"epsilon 1": 1.0, "without noise": None, "epsilon 50": 50.0}.items():
        sets = range(args.sets)
        found[words] = [rows(seed, epsilon or 1.0, quiet=epsilon is None) for seed in sets]
        number, most = sum(found[words]), max(found[words])
        print(f"rows of {ROWS}, {words}: {number} in {args.sets} sets, at most {most}", flush=True)
    if args.json:
        lines = [
            table_row(
                f"a canary, {words}: epsilon is at least", f"{least:.2f}", f"{args.fits} fits"
            )
            for words, least in canaries.items()
        ]
        for words, numbers in found.items():
            ours = f"{sum(numbers)}, at most {max(numbers)} in a set"
            of = f"{args.sets} sets of {ROWS} rows"
            lines.append(table_row(f"rows found by chosen places, {words}", ours, of))
        write(args.json, lines, details={"canary": canaries, "rows": found})


if __name__ == "__main__":
    main()
