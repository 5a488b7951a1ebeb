"""Examples are short, begin with the model, run without a data folder, and draw their figures."""

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import matplotlib
import matplotlib.image
import numpy as np
import pytest
from scripts import run_script

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
BY_NAME = dict(argvalues=SCRIPTS, ids=[script.stem for script in SCRIPTS])


@pytest.mark.parametrize("script", **BY_NAME)
def test_an_example_is_short(script):
    text = script.read_text()
    assert len(text.splitlines()) <= 150
    assert len(ast.get_docstring(ast.parse(text)).splitlines()) <= 15
    assert f"python examples/{script.name} --plot {script.stem}.png" in text


@pytest.mark.parametrize("script", **BY_NAME)
def test_an_example_begins_with_its_model(script):
    """No function stands before the text that marks rows or columns, but what that text calls."""
    functions = [node for node in ast.parse(script.read_text()).body if hasattr(node, "args")]
    parts = [ast.unparse(function) for function in functions]
    first = next(i for i, part in enumerate(parts) if "silo_plate" in part or "client_sum" in part)
    assert first <= 1
    assert all(f"{function.name}" in parts[first] for function in functions[:first])


@pytest.mark.parametrize("script", **BY_NAME)
def test_an_example_has_a_figure_in_the_gallery(script):
    figure = EXAMPLES / f"{script.stem}.png"
    assert 5_000 < figure.stat().st_size <= 200_000
    gallery = (EXAMPLES.parent / "docs" / "examples.md").read_text()
    assert f"../examples/{figure.name}" in gallery


def run_quickly(name, folder):
    """The report of an example, once it has drawn its figure, where there is no data folder."""
    options = ("--quick", "--json", "out.json", "--plot", "out.png")
    run_script(EXAMPLES / f"{name}.py", folder, *options)
    image = matplotlib.image.imread(folder / "out.png")
    assert image.shape[1] > 700
    assert np.ptp(image[..., :3]) > 0.5
    return json.loads((folder / "out.json").read_text())


@pytest.mark.slow
def test_six_cities_compares_with_nuts(tmp_path):
    report = run_quickly("six_cities", tmp_path)
    assert "posterior" in report["verdict"]
    sites = report["comparison"]["sites"]
    assert set(sites) == {"beta", "omega"}
    assert np.max(sites["beta"]["mean_error_sd"]) < 0.5
    names = {"nf.fit", "NUTS, all data", "NUTS, silo 0 alone", "NUTS, silo 1 alone"}
    assert set(report["seconds"]) == names


def test_the_six_cities_data_are_those_of_the_study():
    spec = importlib.util.spec_from_file_location("six_cities", EXAMPLES / "six_cities.py")
    six_cities = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(six_cities)
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


@pytest.mark.slow
def test_six_cities_refuses_options_of_the_benchmark_without_all():
    command = [sys.executable, EXAMPLES / "six_cities.py", "--averages"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "need --all" in done.stderr


@pytest.mark.slow
def test_small_hospitals_borrow_from_the_others(tmp_path):
    report = run_quickly("hospitals", tmp_path)
    (_, alone), (_, together) = report["alone"], report["federated"]
    assert together[0] < alone[0]  # the smallest hospital knows more in the federation
    assert report["trusted"] in (True, False)


@pytest.mark.slow
def test_columns_of_two_clients_give_the_posterior_of_all(tmp_path):
    report = run_quickly("columns", tmp_path)
    assert set(report) == {"nf.VFL", "nf.VFL, corrected", "trusted", "effective_draws"}
    assert report["nf.VFL, corrected"]["error"] < 0.5  # of 400 draws against 400


@pytest.mark.slow
def test_a_map_over_silos_is_that_of_nuts(tmp_path):
    report = run_quickly("map", tmp_path)
    assert report["rmse"] < 1.5
    assert 0.3 < report["sd_ratio"] < 3


@pytest.mark.slow
def test_a_robust_loss_withstands_wrong_outcomes(tmp_path):
    report = run_quickly("robust", tmp_path)
    off = {name: abs(fit["slope"][0] - 1) for name, fit in report.items()}
    assert off["FedGVI"] < 0.1 < off["PVI"]


@pytest.mark.slow
def test_a_network_is_measured_on_every_digit(tmp_path):
    report = run_quickly("neural_network", tmp_path)
    assert [len(row) for row in report.values()] == [10] * 6
    assert max(report["silo 0 alone"][2:]) == 0  # it has seen zeros and ones only


@pytest.mark.slow
def test_topics_are_matched_with_the_true_ones(tmp_path):
    report = run_quickly("topics", tmp_path)
    for fit in report.values():
        assert len(fit["distance"]) == 10
        assert all(0 <= distance <= 1 for distance in fit["distance"])
