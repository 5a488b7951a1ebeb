"""Compiled programs of one file are of no use to the next, and take memory."""

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    yield
    jax.clear_caches()
