"""Examples and the README do what they say."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import matplotlib
import matplotlib.image
import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "six_cities.py"


@pytest.fixture(scope="module")
def six_cities_report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("six_cities")
    command = [sys.executable, EXAMPLE, "--quick", "--json", "out.json", "--plot", "out.png"]
    fast = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    subprocess.run(command, cwd=folder, check=True, capture_output=True, env=fast)
    return json.loads((folder / "out.json").read_text()), matplotlib.image.imread(
        folder / "out.png"
    )


def test_six_cities_reports_every_method_and_global(six_cities_report):
    report, _ = six_cities_report
    labels = {"intercept", "smoking", "age", "smoking x age", "omega"}
    assert set(report) == {
        "sfvi_elbo", "sfvi", "sfvi_corrected", "nuts", "nuts_silo_0", "nuts_silo_1",
        "pvi", "pvi_corrected", "pvi_synchronous", "pvi_10_silos",
    }  # fmt: skip
    for name, method in report.items():
        assert method["seconds"] > 0
        if name != "nuts":
            assert set(method["mean_error_sd"]) == set(method["sd_ratio"]) == labels


def test_six_cities_draws_its_figure(six_cities_report):
    _, image = six_cities_report
    assert image.shape[1] > 1_000
    assert np.ptp(image[..., :3]) > 0.5


def test_the_six_cities_data_are_those_of_the_study():
    sys.path.insert(0, str(EXAMPLE.parent))
    try:
        import six_cities
    finally:
        sys.path.pop(0)
    x, y = six_cities.six_cities()
    smoking = x[:, 0, 1] == 1
    assert x.shape == (537, 4, 4)
    assert (~smoking).sum() == 350
    assert y.sum() == sum(
        bin(pattern).count("1") * count
        for counts in six_cities.COUNTS.values()
        for pattern, count in enumerate(counts)
    )
    assert (y[smoking].sum(1) == 0).sum() == 118
    np.testing.assert_array_equal(x[0, :, 2], [-2, -1, 0, 1])
    assert [len(s["y"]) for s in six_cities.silos()] == [300, 237]


def test_the_readme_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    scope = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), scope)
    out = capsys.readouterr().out
    assert "can be trusted" in out
    assert "Wasserstein" in out


def test_the_readme_lists_every_module():
    text = (ROOT / "README.md").read_text()
    modules = {p.name for p in (ROOT / "numpyro_fed").glob("*.py")} - {"__init__.py", "errors.py"}
    assert {name for name in modules if f"`{name}`" not in text} == set()
