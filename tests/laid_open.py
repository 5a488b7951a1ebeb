"""The package laid open: the one place of the tests that knows its private names.

``laid_open`` and ``laid_open_columns`` show what a method makes of data, ``inside`` what a result
was made by. The rest gives single things a name without an underscore.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import pytest

import numpyro_fed as nf
from numpyro_fed.numerics.divergences import _squared_arsinh_of_root as squared_arsinh_of_root
from numpyro_fed.posterior.importance import _inner_draws as inner_draws
from numpyro_fed.reference.nuts import _joint_density as joint_density
from numpyro_fed.reference.nuts import _parameters as parameters
from numpyro_fed.rounds import runtime
from numpyro_fed.rounds.silos import Silos
from numpyro_fed.vertical.method import begin
from numpyro_fed.vertical.result import VerticalResult
from numpyro_fed.weigh.mixture import root_of_draws as root

__all__ = [
    "LaidOpen",
    "asking",
    "at_checks",
    "globals_drawn",
    "inner_draws",
    "inside",
    "joint_density",
    "kept_fits",
    "key_at",
    "laid_open",
    "laid_open_columns",
    "parameters",
    "private",
    "put_in_place",
    "questions",
    "root",
    "secret_of",
    "squared_arsinh_of_root",
    "times_compiled",
    "with_errors",
]


@dataclass(frozen=True)
class LaidOpen:
    """A method that was built, and the data that it was built for.

    Attributes
    ----------
    fit : CompiledMethod
        The compiled functions; the same object for runs of the same shapes.
    held : Silos
        What silos or clients hold: ``data`` as read, ``buckets``, and ``batches`` on the device.
    """

    fit: Any
    held: Silos

    @property
    def built(self) -> Any:
        """All that the method makes of a text: pure functions."""
        return self.fit.built

    @property
    def algorithm(self) -> Any:
        """The algorithm of a run."""
        return self.fit.built.algorithm

    @property
    def round(self) -> Any:
        """One round of it."""
        return self.algorithm.round

    @property
    def model(self) -> Any:
        """The text, split."""
        return self.fit.built.model

    @property
    def guide(self) -> Any:
        """The guide of globals and locals."""
        return self.fit.built.guide

    @property
    def factors(self) -> Any:
        """What a fit by factors knows besides; None of others."""
        return self.fit.built.factors

    @property
    def vertical(self) -> Any:
        """A vertical model, and how it is approximated."""
        return self.fit.built.parties

    @property
    def runtime(self) -> Any:
        """The algorithm, compiled."""
        return self.fit.runtime

    @property
    def server_data(self) -> Any:
        """What the server of a vertical model holds."""
        return self.fit.server_data

    @property
    def data(self) -> Sequence[Any]:
        """What each silo holds, as read."""
        return self.held.data

    @property
    def buckets(self) -> Sequence[Any]:
        """Silos of one shape, and their masks."""
        return self.held.buckets

    @property
    def batches(self) -> Any:
        """Buckets on the device."""
        return self.held.batches

    def first_state(self, key: jax.Array) -> Any:
        """The state in which a run without a search begins."""
        return self.runtime.init(key, self.batches)

    def one_by_one(self, stacks: Sequence[Any]) -> list[Any]:
        """Of each silo what is stacked in buckets."""
        return [self.held.at(j, stacks) for j in range(len(self.data))]

    def result(self, state: Any = None) -> Any:
        """The result of no rounds in a state; in the first one unless told."""
        if state is None:
            state = self.first_state(jax.random.key(0))
        return nf.Result(np.zeros(0), state, self.fit, self.held)

    def begun(self, key: jax.Array) -> VerticalResult:
        """The result of no rounds of a vertical method where its search ends."""
        state, start = begin(self.fit, key, self.batches)
        return VerticalResult(np.zeros(0), state, self.fit, self.held, start=start)


def laid_open(method: Any, silos: Any, runtime: str = "simulation") -> LaidOpen:
    """What a method makes of silos that hold rows."""
    return LaidOpen(*method._compiled_for(silos, runtime))


def laid_open_columns(
    method: Any, *args: Any, runtime: str = "simulation", **kwargs: Any
) -> LaidOpen:
    """What a method makes of a vertical model's arguments."""
    return LaidOpen(*method._compiled_for(args, kwargs, runtime))


def inside(result: Any) -> LaidOpen:
    """What a result was made by."""
    return LaidOpen(result._fit, result._silos)


def asking(result: Any, key: jax.Array) -> Any:
    """How a result asks its silos."""
    return result._asking(key)


def times_compiled(program: Any) -> int:
    """For how many shapes a jitted function was compiled."""
    return program._cache_size()


def kept_fits(method: Any) -> dict[Any, Any]:
    """The fits that a method keeps for later runs."""
    return method._fits


def secret_of(node: Any) -> Any:
    """The key that a node tells nobody."""
    return node._secret


def key_at(runs: Any, words: np.ndarray) -> np.ndarray:
    """What a silo makes of the key in a message."""
    return np.asarray(jax.random.key_data(runs._key({"key": words})))


def questions(checks: Any) -> dict[Any, Any]:
    """Whose answers the checks of values keep."""
    return checks._answers


def globals_drawn(corrected: Any) -> np.ndarray:
    """All draws of the globals that a correction has weighed, unconstrained."""
    return np.asarray(corrected.z_G, np.float64)


def with_errors(corrected: Any, **known: Any) -> Any:
    """A correction with other errors of its elements."""
    return replace(corrected, errors=corrected.errors._replace(**known))


def private(module: Any, name: str) -> Any:
    """A function that a module, of the benchmarks for instance, keeps to itself."""
    return getattr(module, f"_{name}")


PLACES = {
    "memory": "numpyro_fed.methods.row_method._memory",
    "pareto_k": "numpyro_fed.reference.compare._pareto_k",
    "batch_size": "numpyro_fed.posterior.built.CompiledMethod.batch_size",
    "question_of_a_correction": "numpyro_fed.posterior.built.CompiledMethod.question",
    "factor_for_the_prior": "numpyro_fed.pvi.method.FixedPoint",
    "rounds_of_a_log": "numpyro_fed.rounds.runtime._first",
    "all_finite": "numpyro_fed.rounds.runtime._all_finite",
}


def put_in_place(monkeypatch: pytest.MonkeyPatch, name: str, function: Any) -> None:
    """Let the package call another function for one of ``PLACES``, until the test ends."""
    monkeypatch.setattr(PLACES[name], function)


def at_checks(monkeypatch: pytest.MonkeyPatch, look: Any) -> None:
    """Call ``look(state)`` wherever rounds are over and their state is checked."""
    finite = runtime._all_finite

    def looked(state: Any, batches: Any) -> bool:
        look(state)
        return finite(state, batches)

    put_in_place(monkeypatch, "all_finite", looked)
