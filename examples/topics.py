"""Topics of documents at six silos: one network gives the latents of all rows.

Words stand on a grid of five by five, and each of ten topics uses the five words of one row or one
column of it. A document is a mixture of topics, with weights that are latents of its own. Six silos
hold 40 documents each. Weights of all documents come from one network that silos learn together
(``nf.guides.Amortised``), so that a new document costs one evaluation of it.

    python examples/topics.py --plot topics.png --json topics.json

Data are simulated. ``--quick`` takes few rounds, too few to judge by.
"""

import argparse
import json
import time
from pathlib import Path

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import init_to_uniform
from scipy.optimize import linear_sum_assignment

import numpyro_fed as nf

SIDE = 5
TOPICS, WORDS = 2 * SIDE, SIDE**2


def model(counts):
    """Words of documents ``counts`` (document, word), a logistic-normal form of LDA."""
    prior = dist.Dirichlet(np.full(WORDS, 0.2, np.float32)).expand([TOPICS]).to_event(1)
    topics = numpyro.sample("topics", prior)  # global (topic, word)
    with nf.silo_plate("document", counts.shape[0]):
        weights = numpyro.sample("weights", dist.Normal(0, 1.5).expand([TOPICS]).to_event(1))
        probs = jax.nn.softmax(weights) @ topics
        length = counts.sum(-1).astype(int)
        numpyro.sample("counts", dist.Multinomial(length, probs), obs=counts)


def simulate(documents=40, silos=6, length=60, seed=0):
    """True topics (topic, word), and what each silo holds."""
    rng = np.random.default_rng(seed)
    grid = np.arange(WORDS).reshape(SIDE, SIDE)
    topics = np.zeros((TOPICS, WORDS))
    for topic, words in zip(topics, [*grid, *grid.T], strict=True):
        topic[words] = 1 / SIDE
    held = []
    for _ in range(silos):
        shares = rng.dirichlet(np.full(TOPICS, 0.2), documents)
        held.append(dict(counts=rng.multinomial(length, shares @ topics).astype(np.float32)))
    return topics, held


def matched(found, true):
    """Topics in the order of the true ones that they are nearest to, and their distances."""
    distance = 0.5 * np.abs(true[:, None] - found).sum(-1)  # total variation
    rows, columns = linear_sum_assignment(distance)
    return found[columns], distance[rows, columns]


def plot(table):
    """Topics as pictures, a row for each fit."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        len(table), TOPICS, figsize=(9, 1.05 * len(table) + 0.5), layout="constrained"
    )
    for row, (name, topics) in zip(axes, table.items(), strict=True):
        for axis, topic in zip(row, topics, strict=True):
            axis.imshow(topic.reshape(SIDE, SIDE), cmap="Greys", vmin=0, vmax=0.25)
            axis.set(xticks=[], yticks=[])
        row[0].set_ylabel(name, rotation=0, ha="right", va="center")
    figure.suptitle(
        "Six silos together find the ten topics: five rows, five columns. One silo alone does not"
    )
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the numbers")
    parser.add_argument("--plot", metavar="FILE", help="draw the topics")
    parser.add_argument("--quick", action="store_true", help="few rounds")
    args = parser.parse_args()
    rounds = 30 if args.quick else 4_000
    true, silos = simulate()
    guide = nf.guides.Structured(
        globals="diagonal",
        locals=nf.guides.Amortised(hidden=64),
        init_loc_fn=init_to_uniform(radius=1),  # alike at the start, topics would stay alike
        init_scale=0.05,
    )
    rate = optax.cosine_decay_schedule(5e-3, rounds, 0.05)
    sfvi = nf.SFVI(model, guide=guide, optim=optax.adam(rate), start=None)

    table, report = {"true": true}, {}
    for name, held in {"six silos": silos, "silo 0 alone": silos[:1]}.items():
        began = time.perf_counter()
        result = sfvi.run(jax.random.key(0), rounds, held, progress_bar=False)
        found = np.asarray(result.sample_posterior(jax.random.key(1), 200)["topics"]).mean(0)
        table[name], distance = matched(found, true)
        report[name] = {"distance": distance.tolist(), "seconds": time.perf_counter() - began}
        print(
            f"{name}: {(distance < 0.1).sum()} of {TOPICS} topics within a distance of 0.1, "
            f"{distance.mean():.3f} on average, {report[name]['seconds']:.0f} s",
            flush=True,
        )
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1))
    if args.plot:
        plot(table).savefig(args.plot, dpi=110)


if __name__ == "__main__":
    main()
