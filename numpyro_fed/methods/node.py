"""The server's counterpart to silos in processes of their own."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from jax import Array

from numpyro_fed.algorithms.base import FederatedAlgorithm
from numpyro_fed.errors import DataError
from numpyro_fed.methods.base import Method
from numpyro_fed.methods.mode import NoStartError, begin, opened
from numpyro_fed.model.facts import Facts
from numpyro_fed.results.base import Fit, Result
from numpyro_fed.runtime.drive import drive
from numpyro_fed.runtime.node import SEARCH, Line, Send, Weights, remote
from numpyro_fed.runtime.stack import Runtime


class ServerNode:
    """A server whose silos live in processes of their own (:class:`numpyro_fed.SiloNode`).

    It knows the silos' facts and what they send, and nothing else.

    Parameters
    ----------
    method : SFVI, PVI, ...
    facts : sequence of str
        What each silo says of itself, JSON.

    Attributes
    ----------
    plan : str
        JSON, for every silo to accept.

    Raises
    ------
    ModelError
        Naming a silo that does not fit together with the others.
    """

    def __init__(self, method: Method, facts: Sequence[str]):
        if isinstance(getattr(method, "start", None), Result):
            raise DataError(
                "start= is a result of silos in this process, whose guides it takes over. Over "
                "nodes begin at the mode (start='mode'), or at none."
            )
        self._method = method
        told = [Facts.from_json(f) for f in facts]
        self._plan = method.agree(told)
        self._rows = [rows_of(f) for f in told]
        self._built = method.build(self._plan)
        self.plan = self._plan.to_json()

    def run(
        self,
        key: Array,
        num_rounds: int,
        send: Send,
        *,
        server_data: Any = None,
        progress_bar: bool = False,
        stop: str | None = None,
    ) -> Result:
        """Run rounds; ``send(silo, message) -> reply`` carries bytes.

        The result is what the server knows: the posterior of the globals, losses, the evidence,
        :func:`numpyro_fed.importance_correct` (which asks the silos once more). A silo's latents
        stay there.
        """
        built, plan, line = self._built, self._plan, Line(send, self._plan.num_silos, self._rows)
        runtime = remote(built.algorithm, built.schedule, plan, line)
        fit = Fit.of(plan, built, runtime)

        def runtime_of(search: FederatedAlgorithm) -> Runtime:
            return remote(search, None, plan, line, begin=SEARCH)

        try:
            state, start = begin(fit, key, (), runtime_of, progress_bar=progress_bar)
        except NoStartError as error:
            warnings.warn(error.warning, stacklevel=2)
            state, start = opened(fit, key, runtime.init(key, ()), ()), None
        stops = stop is not None
        course = (num_rounds, progress_bar, server_data)
        run = drive(runtime, key, state, (), *course, stop=stops, keep=True)
        return self._method._finish(run, fit, None, start)


def rows_of(facts: Facts) -> Weights:
    """What a silo's number of rows may be, by its facts: each plate's up to a power of two, and
    above the half of it.
    """
    sizes = dict(facts.sizes)
    most = [sizes[plate.name] for plate in facts.plates if not plate.outer]
    return Weights(sum(n // 2 + 1 for n in most), sum(most))
