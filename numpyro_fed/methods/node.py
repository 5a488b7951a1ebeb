"""The server's counterpart to silos in processes of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import Array

from numpyro_fed.methods.base import Method
from numpyro_fed.model.facts import Facts
from numpyro_fed.results.base import Fit, Result
from numpyro_fed.runtime.drive import drive
from numpyro_fed.runtime.node import Send, remote


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
        self._method = method
        self._plan = method.agree([Facts.from_json(f) for f in facts])
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
    ) -> Result:
        """Run rounds; ``send(silo, message) -> reply`` carries bytes.

        The result is what the server knows: the posterior of the globals, losses, the evidence,
        :func:`numpyro_fed.importance_correct` (which asks the silos once more). A silo's latents
        stay there.
        """
        runtime = remote(self._built.algorithm, self._built.schedule, self._plan, send)
        fit = Fit.of(self._plan, self._built, runtime)
        state = runtime.init(key, ())
        run = drive(runtime, key, state, (), num_rounds, progress_bar, server_data)
        return self._method._finish(run, fit, None)
