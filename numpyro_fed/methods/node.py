"""The server for silos in processes of their own, whose bytes the user carries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import Array

from numpyro_fed.errors import DataError
from numpyro_fed.methods.elsewhere import agreed_already
from numpyro_fed.methods.rows import Method
from numpyro_fed.model.facts import Facts
from numpyro_fed.results.rows import Result
from numpyro_fed.runtime.channel import Send
from numpyro_fed.runtime.stack import ServerData


class ServerNode:
    """A server whose silos are in processes of their own (:class:`numpyro_fed.SiloNode`).

    It knows the silos' facts and their messages, and nothing else.

    Parameters
    ----------
    method : SFVI, PVI, ...
    facts : sequence of str
        The facts of each silo, JSON.

    Attributes
    ----------
    plan : str
        JSON, for every silo to accept.

    Raises
    ------
    ModelError
        Naming a silo that does not fit together with the others.
    """

    def __init__(self, method: Method[Any, Any], facts: Sequence[str]):
        if isinstance(getattr(method, "start", None), Result):
            raise DataError(
                "start= is a result of silos in this process, whose guides it takes over. Over "
                "nodes begin at the mode (start='mode'), or at none."
            )
        self._method, self._facts = method, list(facts)
        self.plan = method.agree([Facts.from_json(text) for text in facts]).to_json()

    def run(
        self,
        key: Array,
        num_rounds: int,
        send: Send,
        *,
        server_data: ServerData = None,
        progress_bar: bool = False,
        stop: str | None = None,
    ) -> Result:
        """Run rounds; ``send(silo, message) -> reply`` carries bytes.

        The result is what the server knows: the posterior of the globals, losses, the evidence,
        :func:`numpyro_fed.importance_correct` (which asks the silos once more). A silo's latents
        stay there.
        """
        return self._method.run(
            key,
            num_rounds,
            agreed_already(self._method, self._facts, send),
            server_data=server_data,
            progress_bar=progress_bar,
            stop=stop,
        )
