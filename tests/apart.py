"""Silos of this process, with bytes between them and the server."""

from collections.abc import Callable, Sequence
from typing import Any

import numpyro_fed as nf
from numpyro_fed.network import InMemory

FREE = nf.Policy(min_rows=1, parameters_per_row=10.0)


class Apart(InMemory):
    """An engine to one silo for each part of the data, which all know one method.

    ``on_the_way(silo, message, answer) -> reply`` is called for each message; it passes the message
    on by ``answer(message)``.
    """

    def __init__(
        self,
        method: Any,
        data: Sequence[Any],
        on_the_way: Callable[[int, bytes, Callable[[bytes], bytes]], bytes] | None = None,
        policies: Sequence[nf.Policy] = (),
        **options: Any,
    ) -> None:
        self.method, self.on_the_way = method, on_the_way
        names = {"model": method.model, "method": method}
        rules = policies or [FREE] * len(data)
        self.silos = [
            nf.Silo(d, names=names, policy=policy, **options)
            for d, policy in zip(data, rules, strict=True)
        ]
        super().__init__([silo.answer for silo in self.silos])
        self.federation = nf.Federation(self, names=names, at_once=1, patience=1e-3)

    def send(self, silo: int, message: bytes, timeout: float) -> bytes:
        """Return a silo's reply to a message."""
        answer = self.silos[silo].answer
        return self.on_the_way(silo, message, answer) if self.on_the_way else answer(message)

    def run(self, key: Any, num_rounds: int, *arguments: Any, **options: Any) -> Any:
        """Run the method; a vertical one is given the arguments that follow the columns."""
        options = {"progress_bar": False} | options
        return self.method.run(key, num_rounds, self.federation, *arguments, **options)


def told_by_bytes(data: Sequence[Any], heard: Any = None, *, policy: Any = None, **options: Any):
    """Return a federation of silos in this process that know no model; ``heard`` gets replies."""

    def listening(answer: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
        def wrapped(message: bytes) -> bytes:
            reply = answer(message)
            if heard is not None:
                heard.append(reply)
            return reply

        return wrapped

    silos = [nf.Silo(d, names={}, policy=policy) for d in data]
    return nf.Federation(InMemory([listening(silo.answer) for silo in silos]), **options)
