"""The stages of a fit so far, and the exchanges that they took."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from numpyro_fed.basics.errors import FederatedWarning
from numpyro_fed.posterior.corrected import Corrected
from numpyro_fed.posterior.posterior import Stage
from numpyro_fed.posterior.result import Result
from numpyro_fed.rounds.progress import StageBar
from numpyro_fed.search.mode import Mode


class Account:
    """The stages of a fit so far, which its bar shows, and how many exchanges each silo sent."""

    def __init__(self, max_exchanges: int, bar: StageBar):
        self.left, self.spent, self.bar = max_exchanges, 0, bar
        self.stages, self.current = list[Stage](), ""
        self._warned, self._known_warnings = list[str](), set[str]()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Enter a stage: show its name, and collect its warnings for the verdict, each once."""
        self.current = name
        self.bar.stage(name)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
        for w in caught:
            text = str(w.message).removesuffix(".")
            # Deprecations and the like are not about the fit: they are passed on.
            if not issubclass(w.category, FederatedWarning):
                warnings.warn_explicit(w.message, w.category, w.filename, w.lineno)
            elif text not in self._known_warnings:
                self._known_warnings.add(text)
                self._warned.append(text)

    def record(self, name: str, words: str, result: Result | Corrected | None) -> None:
        """Add a stage with its outcome in words and its warnings."""
        told = " ".join([words, *map("({})".format, self._warned)])
        self.stages.append(Stage(name, told, result))
        self._warned = []

    def spend(self, exchanges: int) -> None:
        """Subtract exchanges from those that are left, and show how many there were."""
        self.left -= exchanges
        self.spent += exchanges
        self.bar.account(self.spent)

    @property
    def results(self) -> list[Result]:
        """Return the fits of all stages so far."""
        return [stage.result for stage in self.stages if isinstance(stage.result, Result)]

    @property
    def corrections(self) -> list[Corrected]:
        """Return the corrections of all stages so far."""
        return [stage.result for stage in self.stages if isinstance(stage.result, Corrected)]

    @property
    def mode(self) -> Mode | None:
        """Return the mode that the first search has found, if it found one."""
        return next((r.start for r in self.results if r.start is not None), None)
