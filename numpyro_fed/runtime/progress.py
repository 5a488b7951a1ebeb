"""What a run shows while it goes on: how many rounds are done, or what is going on at all."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from tqdm.auto import tqdm

TICK = 0.5  # seconds between looks at the clock, while a program is compiled or runs


class Progress:
    """A listener that is told how far a run has come; this one shows nothing."""

    shows = False

    def begin(self, search: bool, most: int) -> None:
        """Note that rounds begin, at most ``most``, or the exchanges of a search for the mode."""

    def step(self, number: int, bound: float) -> None:
        """Note that so many more are done, and how high the bound is."""

    def end(self) -> None:
        """Note that there are no more of them."""

    @contextmanager
    def under_way(self, search: bool, most: int) -> Iterator[None]:
        """Show rounds from the first to the last, however that ends."""
        self.begin(search, most)
        try:
            yield
        finally:
            self.end()


class Bar(Progress):
    """A bar for the search, which ends by itself, and then one for the rounds of a run."""

    shows = True

    def __init__(self) -> None:
        self._bar = tqdm(disable=True)

    def begin(self, search: bool, most: int) -> None:
        if search:
            self._bar = tqdm(desc="search for the mode", unit=" exchanges", leave=False)
        else:
            self._bar = tqdm(total=most)

    def step(self, number: int, bound: float) -> None:
        self._bar.update(number)
        self._bar.set_postfix_str(f"bound: {bound:.4f}", refresh=False)

    def end(self) -> None:
        self._bar.close()


def progress_of(shown: bool | Progress) -> Progress:
    """Return a bar if one is asked for; what is one already stays as it is."""
    if isinstance(shown, Progress):
        return shown
    return Bar() if shown else Progress()


class StageBar(Progress):
    """One line for a call of several stages, of which nobody knows beforehand how many there are.

    It says the stage, what goes on there, the time and how many messages each silo has sent so far:
    ``PVI: search for the mode, exchange 12 [00:07, 12 exchanges]``. There is no share of a whole,
    since the whole is not known. The clock goes on while a program is compiled.

    Parameters
    ----------
    shown : bool
        Whether to show anything.
    """

    def __init__(self, shown: bool):
        self.shows = shown
        line = "{desc} [{elapsed}, {n_fmt} exchanges]"
        self._bar = tqdm(desc="reading the model", bar_format=line, disable=not shown)
        self._over = threading.Event()
        self._clock = threading.Thread(target=self._tick, daemon=True)
        self._stage, self._doing, self._done, self._before = "", "", 0, 0

    def __enter__(self) -> Self:
        if self.shows:
            self._clock.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        if self.shows:
            self._clock.join()
            self._bar.set_description_str("stopped" if kind else "done")
        self._bar.close()

    def stage(self, name: str) -> None:
        """Show that a stage begins."""
        self._stage = name
        self._bar.set_description_str(name)

    def account(self, exchanges: int) -> None:
        """Note how many messages each silo has sent, by the account of all stages that are over."""
        self._before = exchanges
        self._show(exchanges)

    def begin(self, search: bool, most: int) -> None:
        self._before += self._done
        self._done = 0
        self._doing = "search for the mode, exchange {}" if search else f"round {{}} of {most:,}"
        self._say()

    def step(self, number: int, bound: float) -> None:
        self._done += number
        self._say()
        self._show(self._before + self._done)

    def end(self) -> None:
        self._before += self._done
        self._done = 0

    def _say(self) -> None:
        """Show which round or exchange is under way."""
        doing = self._doing.format(f"{self._done + 1:,}")
        self._bar.set_description_str(f"{self._stage}: {doing}", refresh=False)

    def _show(self, exchanges: int) -> None:
        self._bar.n = exchanges
        self._bar.refresh()

    def _tick(self) -> None:
        while not self._over.wait(TICK):
            self._bar.refresh()
