"""Fit one of the models here to the hospitals that it simulates, print its posterior, and draw it.

python examples/models/run.py ordinal --plot ordinal.png
"""

import argparse
from importlib import import_module
from pathlib import Path

import jax

import numpyro_fed as nf

NAMES = sorted({script.stem for script in Path(__file__).parent.glob("*.py")} - {"run"})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--plot", metavar="FILE", help="draw what the model says")
    args = parser.parse_args()
    module = import_module(args.name)
    silos = module.simulate()
    fitted = nf.fit(jax.random.key(0), module.model, silos, progress_bar=False)
    print(fitted.verdict)
    print(fitted.summary().round(2))
    if args.plot:
        module.plot(fitted, silos, args.plot)


if __name__ == "__main__":
    main()
