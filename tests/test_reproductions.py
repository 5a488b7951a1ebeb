"""Benchmarks that repeat experiments of papers run, and report what they promise."""

import os
import subprocess
import sys
from pathlib import Path

import matplotlib
import matplotlib.image
import numpy as np
import pytest
from scripts import details, run_script

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def reported(script, folder, *options, data=None):
    """The report and the figure of a benchmark."""
    options = ("--quick", *options, "--json", "out.json", "--plot", "out.png")
    run_script(BENCHMARKS / script, folder, *options, data=data)
    report = details(folder / "out.json")
    return report, matplotlib.image.imread(folder / "out.png")


@pytest.fixture(scope="module")
def six_cities_report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("six_cities")
    return reported("six_cities.py", folder, "--averages")


@pytest.mark.slow
def test_six_cities_reports_every_method_and_global(six_cities_report):
    report, _ = six_cities_report
    labels = {"intercept", "smoking", "age", "smoking x age", "omega"}
    assert set(report) == {
        "sfvi", "sfvi_corrected", "nuts", "nuts_silo_0", "nuts_silo_1",
        "pvi", "pvi_corrected", "sfvi_avg_wasserstein",
    }  # fmt: skip
    for name, method in report.items():
        assert method["seconds"] > 0
        if name != "nuts":
            assert set(method["mean_error_sd"]) == set(method["sd_ratio"]) == labels


@pytest.mark.slow
def test_six_cities_draws_its_figure(six_cities_report):
    _, image = six_cities_report
    assert image.shape[1] > 1_000
    assert np.ptp(image[..., :3]) > 0.5


def run_on_tiny_credit(folder, script, *options):
    """The report and the figure of a benchmark on 120 made-up applications."""
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
    return reported(script, folder, *options, data=folder)


@pytest.fixture(scope="module")
def uci_report(tmp_path_factory):
    return run_on_tiny_credit(tmp_path_factory.mktemp("uci"), "uci_federated.py")


@pytest.mark.slow
def test_the_uci_benchmark_measures_methods_against_pooled_inference(uci_report):
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


@pytest.mark.slow
def test_the_uci_benchmark_says_where_data_should_be(tmp_path):
    command = [sys.executable, BENCHMARKS / "uci_federated.py", "--quick"]
    there = os.environ | {"NUMPYRO_FED_DATA": str(tmp_path)}
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=there)
    assert run.returncode != 0
    assert "credit_approval.npz" in run.stderr.splitlines()[-1]


@pytest.mark.slow
def test_pvi_mnist_reports_and_draws(tmp_path):
    r = np.random.default_rng(0)
    images, digits = r.integers(0, 256, (60, 28, 28), np.uint8), np.arange(60) % 10
    parts = dict(x_train=images, y_train=digits, x_test=images[:20], y_test=digits[:20])
    np.savez(tmp_path / "mnist.npz", **parts)
    options = ("--quick", "--splits", "two_digits", "--json", "out.json", "--plot", "out.png")
    printed = run_script(BENCHMARKS / "pvi_mnist.py", tmp_path, *options, data=tmp_path)
    assert "rejected_updates" in printed
    report = details(tmp_path / "out.json")
    assert set(report) == {"pooled", "two_digits"}
    assert set(report["two_digits"]) == {"sequential", "synchronous"}
    for run in report["two_digits"].values():
        assert run["communications"] == [5, 10]
        assert len(run["error"]) == len(run["log_likelihood"]) == len(run["pruned"]) == 2
        assert run["seconds"] > 0
    assert matplotlib.image.imread(tmp_path / "out.png").shape[1] > 1_000


@pytest.mark.slow
def test_the_robust_benchmark_compares_with_pvi_under_wrong_labels(tmp_path):
    report, image = run_on_tiny_credit(tmp_path, "robust_federated.py", "--data", "credit")
    rates = report["settings"]["rates"]
    assert rates == [0, 0.2]
    assert set(report["methods"]) == {"PVI", "FedGVI, cross entropy"}
    for name, method in report["methods"].items():
        assert method["failures"] == 0
        assert ("minus_pvi" in method) == (name != "PVI")
        for measures in (method, method.get("minus_pvi", method)):
            for measure in ("log_likelihood", "error", "logit_size"):
                assert len(measures[measure]["mean"]) == len(measures[measure]["se"]) == len(rates)
        assert all(-1.5 < mean < 0 for mean in method["log_likelihood"]["mean"])
        assert all(0 <= mean < 0.5 for mean in method["error"]["mean"])
    assert np.ptp(image[..., :3]) > 0.5


def test_labels_are_flipped_where_the_benchmark_says():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import robust_federated
    finally:
        sys.path.pop(0)
    silos = [dict(x=np.zeros((40, 1)), y=np.repeat([0.0, 1.0], [30, 10])) for _ in range(4)]

    def flipped(rate, kind):
        after = robust_federated.contaminate(silos, rate, kind, seed=3)
        return np.array([a["y"] != b["y"] for a, b in zip(after, silos, strict=True)])

    for kind, counts in (("random", [0, 0, 8, 8]), ("one_sided", [0, 0, 6, 6])):
        assert sorted(flipped(0.2, kind).sum(1)) == counts
        assert (flipped(0.4, kind) >= flipped(0.2, kind)).all()
    assert not flipped(0.2, "one_sided")[:, 30:].any()
    assert all(silo["y"].sum() == 10 for silo in silos)


@pytest.mark.slow
def test_the_vertical_benchmark_measures_models_against_nuts(tmp_path):
    report, image = reported("vertical_logistic.py", tmp_path)
    found = report["2"]
    names = {"NUTS", "exact split", "exact split, corrected", "augmented, rho 1.0, amortised"}
    assert set(found) == names
    assert 0 < found["exact split, corrected"]["error"] < 0.5  # of 400 draws, against 200
    assert found["exact split"]["bound"] > found["augmented, rho 1.0, amortised"]["bound"]
    assert image.ndim == 3


@pytest.mark.slow
def test_the_process_benchmark_compares_priors_with_the_exact_posterior(tmp_path):
    options = ("--quick", "--json", "out.json", "--plot", "out")
    run_script(BENCHMARKS / "sigma_gp.py", tmp_path, *options)
    found = details(tmp_path / "out.json")
    assert [row["phi"] for row in found["check"]] == pytest.approx([0.2, 0.5, 0.8])
    ways = {"SIGMA, auxiliary, NUTS", "low rank and blocks, NUTS", "low rank and blocks, SFVI"}
    assert set(found["posterior"]) == ways
    assert found["posterior"]["low rank and blocks, NUTS"]["error"] < 1
    for name in ("covariance", "draws", "posterior"):
        assert matplotlib.image.imread(tmp_path / f"out_{name}.png").ndim == 3


@pytest.mark.slow
def test_the_map_benchmark_compares_priors_with_nuts(tmp_path):
    options = ("--quick", "--methods", "SFVI", "--json", "out.json", "--plot", "out")
    run_script(BENCHMARKS / "sigma_map.py", tmp_path, *options)
    found = details(tmp_path / "out.json")
    assert len(found) == 4
    assert found["low rank and blocks, SFVI"]["rmse"] < 3
    for name in ("effects", "means"):
        assert matplotlib.image.imread(tmp_path / f"out_{name}.png").ndim == 3


@pytest.mark.slow
def test_the_poisson_benchmark_compares_with_pooled_inference(tmp_path):
    found, image = reported("vertical_poisson.py", tmp_path)
    assert set(found) == {"NUTS", "mean field", "exact split", "augmented, rho 1"}
    assert set(found["exact split"]) == {"b", "beta", "mu", "sigma", "seconds"}
    for site in ("mu", "sigma"):
        assert found["exact split"][site]["error"] < 3
    assert image.ndim == 3


@pytest.mark.slow
def test_the_heart_benchmark_reads_its_table_and_cross_validates(tmp_path):
    r = np.random.default_rng(0)
    x = r.normal(size=(60, 11))
    names = "Age Sex ChestPainType RestingBP Cholesterol FastingBS RestingECG MaxHR ExerciseAngina "
    names = [*(names + "Oldpeak ST_Slope").split(), "HeartDisease"]
    letters = np.where(x > 0, "a", "b")
    numeric = [0, 3, 4, 7, 9]
    table = [
        [f"{x[i, j]:.3f}" if j in numeric else letters[i, j] for j in range(11)] for i in range(60)
    ]
    ill = (x[:, 0] + x[:, 7] > 0).astype(int)
    lines = [
        ",".join(names),
        *(",".join([*row, str(y)]) for row, y in zip(table, ill, strict=True)),
    ]
    (tmp_path / "heart.csv").write_text("\n".join(lines))
    found, image = reported("split_nn_heart.py", tmp_path, "--csv", "heart.csv")
    names = {"logistic regression", "split network", "Bayesian, rho 1", "in all layers, rho 1"}
    assert set(found) == names
    for folds in found.values():
        assert len(folds) == 1
        assert 0 <= folds[0]["accuracy"] <= 100
        assert -5 < folds[0]["log_lik"] < 0
    assert found["logistic regression"][0]["accuracy"] > 60
    assert image.ndim == 3


def on_digits(script, folder, *options):
    """The report of a benchmark on 300 images that mean nothing, once it has drawn its figure."""
    r = np.random.default_rng(0)
    images, digits = r.integers(0, 256, (300, 28, 28), np.uint8), np.arange(300) % 10
    parts = dict(x_train=images, y_train=digits, x_test=images, y_test=digits)
    np.savez(folder / "mnist.npz", **parts)
    report, image = reported(script, folder, *options, data=folder)
    assert image.ndim == 3
    return report


@pytest.mark.slow
def test_networks_that_differ_between_silos(tmp_path):
    options = ("federated_mnist.py", tmp_path, "--silos", "3", "--models")
    report = on_digits(*options, "hierarchical")
    assert [row["rounds"] for row in report.values()] == [20, 2, 6, 2]  # 6: with locals alone
    report |= on_digits(*options, "FedPop", "--methods", "SFVI")
    assert [row["rounds"] for row in report.values()] == [20, 2, 6, 2, 20]
    assert all(len(row["accuracies"]) == 3 for row in report.values())


@pytest.mark.slow
def test_prior_scales_are_learned_by_silos(tmp_path):
    report = on_digits("mnist_regression.py", tmp_path)
    rounds = {"alone": 0, "SFVI-Avg(20)": 1, "SFVI-Avg(10)": 2, "SFVI": 20, "PVI": 1}
    assert {name: row["rounds"] for name, row in report.items()} == rounds


@pytest.mark.slow
def test_topics_of_silos_messages(tmp_path):
    r = np.random.default_rng(0)
    words = np.array([f"word{i}" for i in range(59)] + ["subject"])
    counts = r.poisson(1, (600, 60)).astype(np.uint16)
    arrays = {"vocab": words}
    for part, of in {"train": counts[:400], "test": counts[400:]}.items():
        found = of > 0
        arrays[f"{part}_indptr"] = np.append(0, found.sum(1).cumsum())
        arrays[f"{part}_indices"], arrays[f"{part}_counts"] = np.nonzero(found)[1], of[found]
    np.savez(tmp_path / "newsgroups20.npz", **arrays)
    options = ("--methods", "SFVI", "SFVI-Avg")
    report, image = reported("prod_lda.py", tmp_path, *options, data=tmp_path)
    assert {name: row["rounds"] for name, row in report.items()} == {"SFVI": 20, "SFVI-Avg": 2}
    assert all(len(row["coherence"]) == 3 for row in report.values())
    assert all("subject" not in topic for row in report.values() for topic in row["topics"])
    assert image.ndim == 3
