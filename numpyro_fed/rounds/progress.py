"""What shows that something goes on: rounds of a run, stages of ``nf.fit``, calls that take long.

Programs end at Ctrl-C where they are waited for by ``jax.block_until_ready``. By ``np.asarray``
nothing is heard before a program's end, nor while one is compiled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, Self, TypeVar

import jax.monitoring
from tqdm.auto import tqdm

# Seconds between updates of the clock. Compilation reports nothing, so that without them a bar
# stands still for half a minute and looks hung. More often would take time from the compiler.
TICK = 0.5
SOON = 2.0  # seconds after which a call shows that it goes on
# The names of JAX's events that begin and end while a program is traced and compiled.
COMPILES = "/jax/core/compile/"
COMPILING = "compiling (first time)"
READING = "reading the model"
_SHOWN: ContextVar[bool] = ContextVar("shown", default=False)

Args = ParamSpec("Args")
T = TypeVar("T")
Object = TypeVar("Object", bound="ShowsProgress")


class Progress:
    """A bar for the search, which disappears at its end, and then a bar for the rounds of a run.

    Nothing is shown where it is not to be (``shown``).
    """

    def __init__(self, shown: bool):
        self.shows, self._bar = shown, tqdm(disable=True)

    @contextmanager
    def under_way(self, search: bool, max_number: int) -> Iterator[None]:
        """Enter a block of at most ``max_number`` rounds, or exchanges of a search for the mode."""
        # How many exchanges a search takes is not known, so that its bar has no total.
        words = dict(desc="search for the mode", unit=" exchanges", leave=False)
        self._bar = tqdm(disable=not self.shows, **(words if search else {"total": max_number}))
        with self._bar:
            yield

    def step(self, number: int, bound: float) -> None:
        """Show that ``number`` more rounds are done, and the bound."""
        self._bar.update(number)
        self._bar.set_postfix_str(f"bound: {bound:.4f}", refresh=False)


def progress_of(shown: bool | Progress) -> Progress:
    """Return a listener: ``shown`` itself, or one that shows something or nothing."""
    return shown if isinstance(shown, Progress) else Progress(shown)


class StageBar(Progress):
    """One line for a call of several stages, whose number is not known beforehand.

    ``PVI: search for the mode, exchange 12 [00:07, 12 exchanges]``: stage, round or exchange, time,
    and how many messages each silo has sent. There is no percentage, since the total is not known.
    The clock goes on while a program is compiled, and the line says so.
    """

    def __init__(self, shown: bool):
        super().__init__(shown)
        line = "{desc} [{elapsed}, {n_fmt} exchanges]"
        self._stage, self._activity, self._num_done = READING, "", 0
        self._bar = tqdm(desc=READING, bar_format=line, disable=not shown)
        self._num_compiling = 0
        self._stop = threading.Event()
        # A daemon: a process that ends in the middle of a fit must not wait for the clock.
        self._clock = threading.Thread(target=self._refresh_clock, daemon=True)

    def __enter__(self) -> Self:
        if self.shows:
            jax.monitoring.register_scalar_listener(self._compiles)
            jax.monitoring.register_event_duration_secs_listener(self._has_compiled)
            self._clock.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._stop.set()
        if self.shows:
            jax.monitoring.unregister_scalar_listener(self._compiles)
            jax.monitoring.unregister_event_duration_listener(self._has_compiled)
            self._clock.join()
            self._bar.set_description_str("stopped" if kind else "done")
        self._bar.close()

    def stage(self, name: str) -> None:
        """Show that a stage begins."""
        self._stage, self._activity = name, ""
        self._bar.set_description_str(name)

    def account(self, exchanges: int) -> None:
        """Show how many messages each silo has sent in all stages that are over."""
        self._bar.n = exchanges
        self._bar.refresh()

    @contextmanager
    def under_way(self, search: bool, max_number: int) -> Iterator[None]:
        rounds = f": round {{}} of {max_number:,}" if max_number else ""
        self._activity = ": search for the mode, exchange {}" if search else rounds
        self._show_activity()
        try:
            yield
        finally:
            self._num_done = 0

    def step(self, number: int, bound: float) -> None:
        self._num_done += number
        self._show_activity()
        self._bar.n += number
        self._bar.refresh()

    def _show_activity(self) -> None:
        """Show the stage and the round or exchange in which it is."""
        doing = self._activity.format(f"{self._num_done + 1:,}")
        if self._num_compiling > 0:
            doing += f"{',' if doing else ':'} {COMPILING}"
        self._bar.set_description_str(f"{self._stage}{doing}", refresh=False)

    def _refresh_clock(self) -> None:
        while not self._stop.wait(TICK):
            self._show_activity()
            self._bar.refresh()

    def _compiles(self, event: str, value: float, **words: str | int) -> None:
        """Count a program that begins to be traced or compiled; these stand in one another."""
        self._num_compiling += event.startswith(COMPILES)

    def _has_compiled(self, event: str, duration_secs: float, **words: str | int) -> None:
        """Count a program that is traced or compiled."""
        self._num_compiling -= event.startswith(COMPILES)


@contextmanager
def in_sight(doing: str, *, shown: bool = True) -> Iterator[None]:
    """Enter a block that shows what it is doing, and for how long, if it takes more than a moment.

    Blocks within it show nothing of their own, also where it is not shown itself.
    """
    outer, stop = _SHOWN.get(), threading.Event()
    before = _SHOWN.set(True)
    clock = threading.Thread(target=_show, args=(doing, stop), daemon=True)
    try:
        if shown and not outer:
            clock.start()
        yield
    finally:
        stop.set()
        if clock.ident is not None:
            clock.join()
        _SHOWN.reset(before)


def _show(doing: str, stop: threading.Event) -> None:
    if stop.wait(SOON):
        return
    with tqdm(desc=doing, bar_format="{desc} [{elapsed}]", leave=False) as bar:
        if not bar.disable:  # it then keeps no time
            bar.start_t -= SOON
        while not stop.wait(TICK):
            bar.refresh()


class ShowsProgress(Protocol):
    """An object whose calls show that they go on, or do not."""

    @property
    def shows_progress(self) -> bool:
        """Return whether calls that take long are shown."""


def shows(
    doing: str,
) -> Callable[[Callable[Concatenate[Object, Args], T]], Callable[..., T]]:
    """Return a decorator of methods that show what they are doing, if that takes long."""

    def decorate(method: Callable[Concatenate[Object, Args], T]) -> Callable[..., T]:
        @wraps(method)
        def call(self: Object, *args: Args.args, **kwargs: Args.kwargs) -> T:
            with in_sight(doing, shown=self.shows_progress):
                return method(self, *args, **kwargs)

        return call

    return decorate
