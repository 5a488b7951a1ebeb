"""Calls that show that they go on.

Their programs end at Ctrl-C where they are waited for by ``jax.block_until_ready``. By
``np.asarray`` nothing is heard before a program's end, nor while one is compiled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from tqdm.auto import tqdm

# Seconds after which a call shows that it goes on, and between updates of its clock.
SOON, TICK = 2.0, 0.5
_SHOWN: ContextVar[bool] = ContextVar("shown", default=False)

Args = ParamSpec("Args")
T = TypeVar("T")
Object = TypeVar("Object", bound="ShowsProgress")


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
