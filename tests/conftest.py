"""Tests spend their time compiling small programs: compile fast, and forget them file by file."""

import os

os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """Compiled programs of one file are of no use to the next, and take memory."""
    yield
    jax.clear_caches()
