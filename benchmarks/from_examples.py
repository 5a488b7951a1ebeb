"""Models and data of the examples, for benchmarks that measure on them."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def load_example(name: str) -> ModuleType:
    """Return the module ``examples/{name}.py``. A benchmark may have the same name."""
    spec = spec_from_file_location(f"examples.{name}", EXAMPLES / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
