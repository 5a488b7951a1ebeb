"""A lock that lets one thread at a time run a model's text."""

from __future__ import annotations

import threading

# NumPyro keeps one stack of handlers for all threads, so that two texts that run side by side
# would see each other's handlers. The lock is held while a text is traced and never while a
# program runs, a callback is called or a message is waited for: nobody can wait for each other.
TRACING = threading.RLock()
