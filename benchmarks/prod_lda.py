"""Topics of messages at three silos: latents of rows by one network.

Section 4.2 of Hassan, Salomone and Mengersen (2023, arXiv 2302.03314), Figure 2: ProdLDA
(Srivastava and Sutton 2017) on 20 Newsgroups, 21 topics, the 2,000 most common words, the messages
dealt out to three silos. The weights of a message's topics are latents of its row; a network that
all silos learn gives their posterior from the message's words, and a silo draws 128 messages for
each step.

    python benchmarks/prod_lda.py --json topics.json --plot topics.png

Topics are unconstrained columns, as Srivastava and Sutton have them; ``--dirichlet`` takes columns
from a Dirichlet distribution, as the paper prints it, under which messages hardly differ. Topics
are judged by their UMass coherence (Mimno et al. 2011): how often their ten foremost words are in a
message together. Compared are the federation, by SFVI and SFVI-Avg, and each silo alone.

The data are those of ``federated_data.py``. ``--quick`` shows that everything runs, on 60 words.
"""

import argparse
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from federated_data import load_newsgroups
from record import table_row, write

import numpyro_fed as nf

FOREMOST = 10  # words of a topic
SILOS = 3
METHODS = "SFVI", "SFVI-Avg", "alone"


def prod_lda(topics, words, dirichlet):
    """The model of counts (message, word)."""

    def model(counts):
        if dirichlet:
            beta = numpyro.param("beta", 1.0, constraint=dist.constraints.positive)
            rows = dist.Dirichlet(jnp.full(words, beta)).expand([topics]).to_event(1)
        else:
            rows = dist.Normal(0, 1).expand([topics, words]).to_event(2)
        topic = numpyro.sample("topic", rows)
        alpha = numpyro.param("alpha", 0.0)
        with nf.silo_plate("message", counts.shape[0]):
            weights = numpyro.sample("weights", dist.Normal(alpha, 1).expand([topics]).to_event(1))
            logits = weights @ topic
            length = counts.sum(-1).astype(int)
            numpyro.sample("counts", dist.Multinomial(length, logits=logits), obs=counts)

    return model


def coherence(topics, present):
    """UMass coherence of each row of ``topics`` (topic, word); ``present`` (message, word)."""
    found = []
    for row in topics:
        first = np.argsort(-row)[:FOREMOST]
        here = present[:, first].astype(np.float32)
        together, often = here.T @ here, here.sum(0)
        pairs = [(i, j) for i in range(1, FOREMOST) for j in range(i)]
        found.append(sum(np.log((together[i, j] + 1) / often[j]) for i, j in pairs))
    return np.array(found)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topics", type=int, default=21)
    parser.add_argument("--words", type=int, default=2_000)
    parser.add_argument("--steps", type=int, default=6_000, help="of each silo, in all")
    parser.add_argument("--rounds", type=int, default=100, help="of SFVI-Avg")
    parser.add_argument("--rate", type=float, default=2e-3, help="Adam's first step")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--dirichlet", action="store_true", help="topics are distributions")
    parser.add_argument("--json", metavar="FILE", help="write the numbers")
    parser.add_argument("--plot", metavar="FILE", help="draw the coherence of topics")
    parser.add_argument("--quick", action="store_true", help="few words, topics and steps")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*see result.report|.*still rising")
    if args.quick:
        args.topics, args.words, args.steps, args.rounds = 3, 60, 20, 2
    counts, words = load_newsgroups(args.words)
    present = counts > 0
    order = np.random.default_rng(0).permutation(len(counts))
    silos = [dict(counts=counts[order[j::SILOS]]) for j in range(SILOS)]
    model = prod_lda(args.topics, len(words), args.dirichlet)
    guide = nf.guides.Structured(
        globals="diagonal", locals=nf.guides.Amortised(hidden=100), init_scale=0.05,
        init_loc_fn=numpyro.infer.init_to_uniform(radius=0.1),
    )  # fmt: skip
    down = optax.cosine_decay_schedule(args.rate, args.steps, 0.05)
    common = dict(guide=guide, batch_size=128, start=None, optim=optax.adam(down))
    local = max(1, args.steps // args.rounds)
    runs = {}
    if "SFVI" in args.methods:
        runs["SFVI"] = nf.SFVI(model, **common), args.steps, silos
    if "SFVI-Avg" in args.methods:
        runs["SFVI-Avg"] = nf.SFVIAvg(model, local_steps=local, **common), args.rounds, silos
    if "alone" in args.methods:
        alone = nf.SFVI(model, **common)
        runs |= {f"silo {j} alone": (alone, args.steps, [s]) for j, s in enumerate(silos)}
    report = {}
    for name, (method, rounds, held) in runs.items():
        began = time.perf_counter()
        result = method.run(jax.random.key(0), rounds, held, progress_bar=False)
        seconds = time.perf_counter() - began
        topics = np.asarray(result.sample_posterior(jax.random.key(1), 50)["topic"]).mean(0)
        found = coherence(topics, present)
        shown = [[str(words[i]) for i in np.argsort(-row)[:FOREMOST]] for row in topics]
        report[name] = {
            "coherence": found.tolist(),
            "mean": float(found.mean()),
            "bound": -float(np.mean(result.losses[-max(1, rounds // 10) :])),
            "topics": shown,
            "seconds": seconds,
            "rounds": rounds,
        }
        print(
            f"{name:14} coherence {found.mean():7.1f} on average, {np.median(found):7.1f} in the "
            f"middle; {rounds} rounds, {seconds:.0f} s"
        )
        for k in np.argsort(-found)[:3]:
            print("    ", " ".join(shown[k]), flush=True)
    if args.json:
        rows = [
            table_row(
                f"coherence, {name}: mean, median of topics",
                f"{np.mean(r['coherence']):.1f}, {np.median(r['coherence']):.1f}",
                "",
                "" if "alone" in name else "better than each silo alone",
            )
            for name, r in report.items()
        ]
        write(args.json, rows, details=report)
    if args.plot:
        plot(report).savefig(args.plot, dpi=130)


def plot(report):
    """Topics in the order of their coherence, a line a method."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for name, row in report.items():
        found = np.sort(row["coherence"])[::-1]
        style = dict(color="0.6", lw=1) if "alone" in name else dict(lw=2)
        axis.plot(np.arange(1, len(found) + 1), found, label=name, marker=".", **style)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set(xlabel="topic, the most coherent first", ylabel="UMass coherence")
    axis.legend(frameon=False, fontsize=8)
    return figure


if __name__ == "__main__":
    main()
