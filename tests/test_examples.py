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


@pytest.fixture(scope="module")
def uci_report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uci")
    rng = np.random.default_rng(0)
    x, codes = rng.normal(size=(120, 2)), rng.integers(0, 3, (120, 1))
    np.savez(
        folder / "credit_approval.npz",
        x_num=x,
        x_cat=codes,
        cat_names=np.array(["colour"]),
        levels_colour=np.array(["red", "green", "blue"]),
        y=(x[:, 0] + rng.normal(size=120) > 0).astype(int),
    )
    command = [sys.executable, EXAMPLE.parent / "uci_federated.py"]
    options = ["--quick", "--json", "out.json", "--plot", "out.png"]
    there = os.environ | {"NUMPYRO_FED_DATA": str(folder)}
    subprocess.run([*command, *options], cwd=folder, check=True, capture_output=True, env=there)
    image = matplotlib.image.imread(folder / "out.png")
    return json.loads((folder / "out.json").read_text()), image


def test_the_uci_example_measures_methods_against_pooled_inference(uci_report):
    report, image = uci_report
    found = report["credit"]["A"]
    assert sum(found["rows"]) + found["test_rows"] <= 120
    assert -1 < found["pooled"]["log_likelihood"] < 0
    assert set(found["methods"]) == {"sequential", "global_vi", "bcm_same"}
    for method in found["methods"].values():
        curves = [method[m] for m in ("communications", "error", "log_likelihood")]
        assert len(set(map(len, curves))) == 1
        assert set(method["difference"]) == {"error", "log_likelihood"}
        assert method["target_met"] in (True, False)
    assert found["methods"]["sequential"]["communications"] == [10, 20]
    assert found["methods"]["bcm_same"]["communications"] == [10]
    assert abs(found["methods"]["sequential"]["difference"]["log_likelihood"]) < 0.2
    assert np.ptp(image[..., :3]) > 0.5


def test_the_uci_example_says_where_data_should_be(tmp_path):
    command = [sys.executable, EXAMPLE.parent / "uci_federated.py", "--quick"]
    there = os.environ | {"NUMPYRO_FED_DATA": str(tmp_path)}
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=there)
    assert run.returncode != 0
    assert "credit_approval.npz" in run.stderr.splitlines()[-1]


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
