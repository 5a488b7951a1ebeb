"""What the numbers that a client of a vertical model sends tell of its columns.

The logistic model of 500 rows, 20 covariates and two clients is fitted by the exact split and with
auxiliary variables, clients in nodes of their own. A server looks at what the first client sends by
itself, as where clients do not aggregate: in the ``run``, from its first round, and in T rounds at
the ``fitted`` posterior. The predictor is guessed by the mean of what was sent, the space that the
client's columns span by its first principal directions.

``predictor`` is the root mean square error of that guess in standard deviations of the predictor
over rows, beside ``rho / sqrt(T)`` in the same units, which is what noise of a standard deviation
of rho would leave. ``columns`` is the share of the columns' variance that lies in that space: one
if the server knows the columns up to a linear map, 0.02 by chance. Mean-field auxiliary variables
of a fit do not depend on a round's predictor, amortised ones move with it.

    python benchmarks/vertical_reveals.py --json vertical_reveals.json
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import numpy as np
from record import machine, table_row, write
from vertical_step import model, simulate

import numpyro_fed as nf
from numpyro_fed.rounds.messages import read

KEY = jax.random.key(0)


def overheard(vfl: Any, xs: list[np.ndarray], y: np.ndarray, rounds: int) -> np.ndarray:
    """What the first client sends in a run, read off its messages, (rounds, rows)."""
    policy = nf.Policy(max_places=2 * rounds + 5_000, parameters_per_row=10.0)
    silos = [nf.Silo(x, names={"model": model}, policy=policy) for x in xs]
    heard = []

    def first(message: bytes) -> bytes:
        reply = silos[0].answer(message)
        if read(message).head["exchange"] == "draw":
            heard.append(read(reply).arrays["reply.up.part"][0])
        return reply

    engine = nf.network.InMemory([first, *(silo.answer for silo in silos[1:])])
    vfl.run(KEY, rounds, nf.Federation(engine, at_once=1), y, progress_bar=False)
    return np.array(heard)


def sent(result: Any, client: int, rounds: int) -> np.ndarray:
    """What a client would send in so many rounds, (rounds, rows)."""
    v, held = result._fit.built.parties, result._silos
    b, i = held.place(client)
    state, data = jax.tree.map(lambda a: a[i], result.state.silos[b]), held.data[client]

    def one(key):
        noise = v.new_draw_noise(key, state)
        return v.client_draw(state.params, state.xi, state._replace(noise=noise), data).part[0]

    return np.asarray(jax.jit(lambda keys: jax.lax.map(one, keys))(jax.random.split(KEY, rounds)))


def guessed(z: np.ndarray, x: np.ndarray, predictor: np.ndarray) -> dict[str, float]:
    """How far a server comes with what it was sent."""
    error = np.sqrt(np.mean((z.mean(0) - predictor) ** 2)) / predictor.std()
    # Of draws around a centre that is in that space, too.
    space = np.linalg.svd(z, full_matrices=False)[2][: x.shape[1]]
    share = np.sum((x @ np.linalg.pinv(x) @ space.T) ** 2) / x.shape[1]
    return {"predictor": float(error), "columns": float(share)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--quick", action="store_true", help="only see that it runs")
    args = parser.parse_args()
    rows, fit_rounds = (40, 20) if args.quick else (500, 2_000)
    many = (1, 30) if args.quick else (1, 10, 30, 100, 1_000, 10_000)
    xs, y = simulate(rows, 20, 2)
    found = []
    print(f"{'':>16} {'':>7} {'rounds':>7} {'predictor':>10} {'by rho':>8} {'columns':>8}")
    cases: list[tuple[float | None, str]] = [(None, "")]
    for rho in (1.0,) if args.quick else (0.5, 1.0, 2.0):
        cases += [(rho, "mean_field"), (rho, "amortised")]
    for rho, auxiliary in cases:
        settings = {} if rho is None else dict(rho=rho, auxiliary=auxiliary)
        vfl = nf.VFL(model, rank=0, start=None if args.quick else "mode", **settings)
        result = vfl.run(KEY, fit_rounds, xs, y, progress_bar=False)
        mean = result.sample_posterior(jax.random.key(1), 2_000)["client_0/beta"].mean(0)
        predictor = xs[0] @ np.asarray(mean)
        seen = {"fitted": sent(result, 0, max(many)), "run": overheard(vfl, xs, y, fit_rounds)}
        name = "exact" if rho is None else f"{rho} {auxiliary}"
        for when, z in seen.items():
            for rounds in [n for n in (*many, fit_rounds) if n <= len(z)]:
                numbers = guessed(z[:rounds], xs[0], predictor)
                by_rho = (rho or 0.0) / np.sqrt(rounds) / float(predictor.std())
                row = {"rho": rho, "auxiliary": auxiliary, "when": when, "rounds": rounds}
                found.append({**row, "by_rho": by_rho, **numbers})
                print(
                    f"{name:>16} {when:>7} {rounds:>7} {numbers['predictor']:>10.3f} "
                    f"{by_rho:>8.3f} {numbers['columns']:>8.3f}",
                    flush=True,
                )
    if args.json:
        report = {"machine": machine(), "reveals": found}
        lines = [
            table_row(
                "exact split" if r["rho"] is None else f"rho {r['rho']}, {r['auxiliary']}",
                f"predictor {r['predictor']:.3f} sd, share of columns {r['columns']:.2f}",
                f"{r['rounds']:,} rounds" + ", once fitted" * (r["when"] == "fitted"),
            )
            for r in found
        ]
        write(args.json, lines, details=report)


if __name__ == "__main__":
    main()
