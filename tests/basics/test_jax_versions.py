"""What is asked of the JAX and XLA that are installed, besides what is inside of programs."""

import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xla_flags
from xla_flags import FAST, known_flags, remembered_flags

from numpyro_fed.basics.programs import (
    QUICK,
    copies_by_precision,
    jit_once,
    known_options,
    quick_options,
    warn_of_slow_additions,
)


@pytest.mark.slow
def test_flags_that_xla_does_not_know_are_left_out():
    known = "--xla_backend_optimization_level=0"
    assert known_flags(["--xla_no_such_flag=1", known]) == [known]


def test_flags_are_tried_once_for_each_list(tmp_path, monkeypatch):
    tried = []
    monkeypatch.setattr(xla_flags, "known_flags", lambda flags: tried.append(flags) or ["--one"])
    assert remembered_flags(tmp_path / "new") == ["--one"]
    assert remembered_flags(tmp_path / "new") == ["--one"]
    assert tried == [FAST]
    (file,) = (tmp_path / "new").iterdir()
    file.write_text(json.dumps([["--another"], []]))
    assert remembered_flags(tmp_path / "new") == ["--one"]
    assert tried == [FAST, FAST]


def test_options_that_xla_does_not_know_are_left_out():
    """It compiles nothing with one that it does not know; what it knows is still of use."""
    fast = {"xla_backend_optimization_level": 0}
    assert known_options({"xla_no_such_option": True, **fast}) == fast
    assert known_options({"xla_no_such_option": True}) == {}
    assert set(quick_options()) <= set(QUICK)
    assert quick_options()["xla_backend_optimization_level"] == 0


def test_what_runs_once_is_compiled_with_this_xla():
    np.testing.assert_array_equal(jit_once(lambda x: x + 1)(jnp.arange(3)), [1, 2, 3])


def test_this_jax_lets_copies_of_arrays_be_told_apart_by_precision():
    """The one use of what JAX keeps private."""
    assert copies_by_precision(), (
        "jax._src.dtypes.canonicalize_dtype and register_canonicalize_value_handler, or "
        "jax._src.literals.TypedNdArray, have moved: look in jax/_src for where NumPy arrays are "
        "canonicalised in a trace, and mend numpyro_fed/basics/programs.py. If "
        "tests/text/test_precision.py passes with copies_by_precision doing nothing, JAX does it "
        "itself by now: remove it."
    )


@pytest.mark.parametrize(
    ("version", "device", "warns"),
    [((0, 10, 2), "gpu", True), ((0, 11, 1), "gpu", False), ((0, 10, 2), "cpu", False)],
)
def test_a_version_that_is_slow_on_gpus_is_told(version, device, warns, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", version)
    monkeypatch.setattr(jax, "default_backend", lambda: device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_slow_additions.__wrapped__()
    assert [w.category for w in caught] == [RuntimeWarning] * warns
