"""A Bayesian neural network over five silos that have two digits each.

Images of handwritten digits (8 by 8 pixels, scikit-learn's) are dealt out so that silo 0 has zeros
and ones only, silo 1 twos and threes, and so on. One small network with a prior on its weights is
fitted over all silos by ``nf.SFVI`` with a mean-field guide, and at each silo alone. Predictions
are averaged over draws of the weights.

    python examples/neural_network.py --plot neural_network.png --json neural_network.json

``--quick`` takes few rounds, too few to judge by.
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
from sklearn.datasets import load_digits

import numpyro_fed as nf

PIXELS, HIDDEN, DIGITS = 64, 32, 10


def network(weights, x):
    """Logits (image, digit) for one draw of the weights."""
    hidden = jax.nn.relu(x @ weights["w1"] + weights["b1"])
    return hidden @ weights["w2"] + weights["b2"]


def model(x, y=None):
    """Digits ``y`` (image,), given pixels ``x`` (image, 64) from 0 to 1."""
    shapes = dict(w1=(PIXELS, HIDDEN), b1=(HIDDEN,), w2=(HIDDEN, DIGITS), b2=(DIGITS,))
    weights = {
        name: numpyro.sample(name, dist.Normal(0, 1).expand(shape).to_event(len(shape)))
        for name, shape in shapes.items()
    }
    with nf.silo_plate("image", x.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=network(weights, x)), obs=y)


def digits_of_silos(each=140, seed=0):
    """What five silos hold, with ``each`` images of two digits, and all others to test with."""
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32)
    order = np.random.default_rng(seed).permutation(len(y))
    of_digit = [order[y[order] == digit] for digit in range(DIGITS)]
    parts = [np.concatenate([rows[:each] for rows in of_digit[j : j + 2]]) for j in range(0, 10, 2)]
    test = np.concatenate([rows[each:] for rows in of_digit])
    return [dict(x=x[part], y=y[part]) for part in parts], (x[test], y[test])


def accuracies(result, x, y):
    """For each digit, the share of test images that are recognised, in per cent."""
    draws = result.sample_posterior(jax.random.key(1), 100)
    averaged = jax.vmap(lambda weights: jax.nn.softmax(network(weights, x)))(draws).mean(0)
    right = np.asarray(averaged.argmax(-1)) == y
    return np.array([100 * right[y == digit].mean() for digit in range(DIGITS)])


def plot(table):
    """Accuracies (fit, digit) as a map."""
    import matplotlib.pyplot as plt

    values = np.array(list(table.values()))
    figure, axis = plt.subplots(figsize=(8, 3.6), layout="constrained")
    image = axis.imshow(values, cmap="Blues", vmin=0, vmax=100, aspect="auto")
    for (i, j), value in np.ndenumerate(values):
        color = "white" if value > 60 else "black"
        axis.text(j, i, f"{value:.0f}", ha="center", va="center", color=color, fontsize=9)
    axis.set(yticks=range(len(table)), yticklabels=table, xticks=range(DIGITS), xlabel="digit")
    axis.set_title("A silo alone knows its two digits; five silos together know all ten")
    figure.colorbar(image, ax=axis, label="recognised (%)")
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the numbers")
    parser.add_argument("--plot", metavar="FILE", help="draw the accuracies")
    parser.add_argument("--quick", action="store_true", help="few rounds")
    args = parser.parse_args()
    rounds = 50 if args.quick else 3_000
    silos, test = digits_of_silos()
    guide = nf.guides.Structured(
        globals="diagonal",
        init_loc_fn=init_to_uniform(radius=0.1),  # from zero, all hidden units would stay alike
        init_scale=0.02,
    )
    rate = optax.cosine_decay_schedule(1e-2, rounds, 0.05)
    # a network's posterior has many modes alike, so that the search for one is left out
    sfvi = nf.SFVI(model, guide=guide, optim=optax.adam(rate), start=None)

    table = {}
    held = {f"silo {j} alone": [silo] for j, silo in enumerate(silos)} | {"all silos": silos}
    for name, parties in held.items():
        began = time.perf_counter()
        result = sfvi.run(jax.random.key(0), rounds, parties, progress_bar=False)
        table[name] = accuracies(result, *test)
        seconds = time.perf_counter() - began
        print(f"{name}: {table[name].mean():.1f} % of test images, {seconds:.0f} s", flush=True)
    if args.json:
        report = {name: values.tolist() for name, values in table.items()}
        Path(args.json).write_text(json.dumps(report, indent=1))
    if args.plot:
        plot(table).savefig(args.plot, dpi=110)


if __name__ == "__main__":
    main()
