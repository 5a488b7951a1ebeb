"""Versions of this package, which all parties must have alike, and of what it computes with."""

from __future__ import annotations

import jax
import numpy as np
import numpyro

VERSION = "0.1.0"


def libraries() -> dict[str, str]:
    """Return the versions of libraries by which the last digits of a result may differ."""
    return {module.__name__: module.__version__ for module in (jax, numpyro, np)}
