"""How programs are compiled."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache
from scripts import details

import numpyro_fed as nf
from numpyro_fed.basics.programs import compiled_method, jit_once

TRACED = []


@dataclass(frozen=True, eq=False)
class Scale:
    factor: float

    @compiled_method(static_argnums=1)
    def times(self, x, power=1):
        """Return ``x`` times a power of the factor."""
        TRACED.append(self.factor)
        return x * self.factor**power

    @compiled_method(jit_once)
    def once(self, x):
        TRACED.append(self.factor)
        return x + self.factor


def test_a_method_is_compiled_once_for_each_object():
    TRACED.clear()
    two, three = Scale(2.0), Scale(3.0)
    for _ in range(3):
        assert float(two.times(jnp.ones(()))) == 2.0
        assert float(three.times(jnp.ones(()))) == 3.0
        assert float(two.times(jnp.ones(()), 2)) == 4.0
        assert float(three.once(jnp.ones(()))) == 4.0
    assert sorted(TRACED) == [2.0, 2.0, 3.0, 3.0]
    assert two.times.__doc__ == "Return ``x`` times a power of the factor."


SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture
def settings_again():
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_compiled_programs_are_kept_in_the_folder(tmp_path, settings_again):
    nf.cache_programs(tmp_path / "programs")
    jax.jit(lambda x: jnp.cos(x) * 12.5 + 3)(jnp.arange(3.0))
    kept = sorted(p.name for p in (tmp_path / "programs").iterdir())
    assert any("lambda" in name for name in kept)
    jax.clear_caches()
    jax.jit(lambda x: jnp.cos(x) * 12.5 + 3)(jnp.arange(3.0))
    again = sorted(p.name for p in (tmp_path / "programs").iterdir())
    assert {name for name in again if name.endswith("-cache")} == {
        name for name in kept if name.endswith("-cache")
    }


@pytest.mark.slow
def test_a_first_fit_compiles_few_programs_and_runs_the_text_a_few_times(tmp_path):
    """In a process of its own: programs of other tests would be found again."""
    script = Path(__file__).resolve().parents[2] / "benchmarks" / "first_answer.py"
    options = ["--works", "readme", "--no-nuts", "--json", str(tmp_path / "report.json")]
    subprocess.run([sys.executable, str(script), *options], check=True, capture_output=True)
    (found,) = details(tmp_path / "report.json")
    assert found["trusted"]
    assert found["programs"] <= 15
    assert found["runs_of_the_text"] <= 5
