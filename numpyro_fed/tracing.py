"""A lock that lets one thread at a time trace a model."""

from __future__ import annotations

import threading

# NumPyro keeps one stack of handlers for all threads, so that two models
# that are traced side by side would see each other's handlers. The lock is
# held while a model is traced, and never while a program runs, a callback is
# called or a message is awaited: so no two threads can wait for each other.
TRACING = threading.RLock()
