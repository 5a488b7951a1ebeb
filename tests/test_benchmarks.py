"""Each benchmark runs, and reports what it promises; times are not looked at."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from scripts import details, run_script

pytestmark = pytest.mark.slow
BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def run_quickly(script: str, tmp_path: Path, *options: str) -> dict:
    run_script(BENCHMARKS / script, tmp_path, *(options or ("--quick",)), "--json", "report.json")
    return details(tmp_path / "report.json")


def test_sfvi_vs_pooled(tmp_path):
    report = run_quickly("sfvi_vs_pooled.py", tmp_path)
    assert set(report) == {"machine", "iterations", "runs", "compilation"}
    assert report["iterations"]
    for row in [*report["iterations"], *report["runs"], report["compilation"]]:
        assert {"what", "unit", "ours", "pooled", "ratio", "target"} <= set(row)


def test_few_messages(tmp_path):
    (row,) = run_quickly("few_messages.py", tmp_path, "--models", "six2", "--quick")
    assert row["first_trusted"]
    assert row["second_trusted"]
    assert row["first_exchanges"] <= 6
    assert row["share"] > 0.7


def test_after_fit(tmp_path):
    report = run_quickly("after_fit.py", tmp_path, "--quick", "--parts", "changed,left_out")
    assert all(row["trusted"] for row in report["changed"][0])
    assert max(row["exchanges"] for row in report["changed"][0]) <= 5
    (row,) = report["left_out"]
    assert row["error"] < 0.1
    assert row["row_error"] < 0.1


def test_admm_rounds(tmp_path):
    rows = run_quickly("admm_rounds.py", tmp_path)["rows"]
    assert [row["what"].split(",")[0] for row in rows] == ["PVI", "BayesADMM", "FedLap"]
    assert rows[0]["mean"] < 0.1


def test_scale(tmp_path):
    report = run_quickly("scale.py", tmp_path)
    assert {"seconds_per_iteration", "loss_first", "loss_last", "peak_gib"} <= set(report)


def test_attack(tmp_path):
    report = run_quickly("attack.py", tmp_path)
    table = report["attack"]
    assert table["max_places=60"]["rows_found"] == 20
    assert table["max_places=60"]["outcomes_found"] == 20
    assert table["in_order, after a weighing"]["places_asked"] == 0
    assert table["the same, by draws"]["rows_found"] > 10
    sums = report["sums"]
    assert sums["sums over three hospitals"]["rows_found"] == 60
    assert sums["sums with two silos of the server"]["places_asked"] == 21
    assert sums["the same, with peers in the policy"]["rows_found"] == 0


def test_influence(tmp_path):
    (row,) = run_quickly("influence.py", tmp_path)["rows"]
    assert row["flagged"] == 1.0


def test_three_level(tmp_path):
    report = run_quickly("three_level.py", tmp_path)
    assert set(report["fits"]) == {"ELBO", "LocallyEnhanced", "LocallyEnhanced, corrected"}
    assert set(report["nuts"]["ess"]) == {"mu", "beta", "tau", "sigma"}
    assert {"pareto_k", "ess", "reliable"} <= set(report["correction"])


def test_never_hangs(tmp_path):
    report = run_quickly("never_hangs.py", tmp_path)
    assert report["still"] == 0
    assert [(run["model"], run["done"]) for run in report["runs"]] == [("intercepts", 1)]


def test_pvi_step(tmp_path):
    report = run_quickly("pvi_step.py", tmp_path)
    assert len(report["steps"]) == 2
    for row in report["steps"]:
        assert {"what", "ours_ms", "by_hand_ms", "ratio", "target"} <= set(row)


def test_accelerator(tmp_path):
    report = run_quickly("accelerator.py", tmp_path)
    assert {"device", "jax", "machine"} <= set(report)
    assert not report["failed"]
    *steps, first, second = report["rows"]
    assert len(steps) == 4  # without SIGMA
    for row in steps:
        assert {"what", "unit", "ours", "by_hand", "ratio", "target"} <= set(row)
    for row in (first, second):
        assert {"what", "unit", "ours", "trusted"} <= set(row)


def test_vertical_step(tmp_path):
    report = run_quickly("vertical_step.py", tmp_path)
    assert (len(report["rounds"]), len(report["rows"])) == (3, 2)
    for row in [*report["rounds"], *report["rows"]]:
        assert {"what", "ours", "pooled", "ratio", "target"} <= set(row)


def test_minibatches(tmp_path):
    report = run_quickly("minibatches.py", tmp_path)
    assert len(report["steps"]) == 7
    for row in report["steps"]:
        assert {"what", "ours", "pooled", "ratio", "target"} <= set(row)


def test_vertical_reveals(tmp_path):
    report = run_quickly("vertical_reveals.py", tmp_path)
    found = {(r["rho"], r["auxiliary"], r["when"], r["rounds"]): r for r in report["reveals"]}
    kinds = {(rho, auxiliary) for rho, auxiliary, *_ in found}
    assert kinds == {(None, ""), (1.0, "mean_field"), (1.0, "amortised")}
    assert {when for _, _, when, _ in found} == {"fitted", "run"}
    for when in ("fitted", "run"):  # twenty draws of ten columns
        assert found[None, "", when, 20]["columns"] > 0.999
    assert found[1.0, "mean_field", "fitted", 30]["columns"] < 0.5


def test_sigma_relatives(tmp_path):
    report = run_quickly("sigma_relatives.py", tmp_path)
    assert report["border"] == 20
    for row in report["relatives"]:
        assert row["rmse"] < 0.3
        assert 0.95 < row["sd_ratio"] < 1.05


def test_pvi_rounds(tmp_path):
    report = run_quickly("pvi_rounds.py", tmp_path)
    assert len(report["rounds_ms"]) == 3
    assert {"ratios", "target"} <= set(report)


def test_many_globals(tmp_path):
    report = run_quickly("many_globals.py", tmp_path)
    assert [fit["globals"] for fit in report["fits"]] == [4, 4, 4]
    for fit in report["fits"]:
        assert {"fit", "seconds", "mean_error_sd", "sd_ratio", "nuts_ess"} <= set(fit)


def test_posteriordb(tmp_path):
    """On data of the same names, whose reference is the exact posterior of many rows."""
    r, n = np.random.default_rng(0), 400
    iq = r.normal(100, 15, n)
    score = 25 + 0.6 * iq + r.normal(0, 18, n)
    x = np.stack([np.ones(n), iq], 1)
    beta, (squares,) = np.linalg.lstsq(x, score)[:2]
    sigma = np.sqrt(squares / n)
    sd = [*(sigma * np.sqrt(np.diag(np.linalg.inv(x.T @ x)))), sigma / np.sqrt(2 * n)]
    held = {"kidiq__kid_score": score, "kidiq__mom_iq": iq, "kidiq__mom_hs": np.ones(n)}
    name = "kidscore_momiq"
    held |= {f"reference__{name}__mean": [*beta, sigma], f"reference__{name}__sd": sd}
    np.savez(tmp_path / "data.npz", **held)
    options = ("--data", str(tmp_path / "data.npz"), "--posteriors", name)
    report = run_quickly("posteriordb.py", tmp_path, *options)[name]
    assert report["trusted"]
    assert report["exchanges"] < 40
    assert report["mean_error_sd"] < 0.3


def test_user_models(tmp_path):
    report = run_quickly("user_models.py", tmp_path, "--quick", "--models", "poisson")["poisson"]
    assert report["trusted"]
    assert report["verdict"].startswith("The posterior of the globals can be trusted")
    assert report["mean_error_sd"] < 0.6


@pytest.mark.skipif(find_spec("nvflare") is None, reason="NVFLARE is not installed")
def test_flare(tmp_path):
    report = run_quickly("flare.py", tmp_path)
    assert report["job_starts"] > 0
    assert [row["bytes"] for row in report["exchange"]] == [100, 10_000, 100_000]


def test_federation(tmp_path):
    report = run_quickly("federation.py", tmp_path)
    (exchange,) = report["times"]
    assert exchange["seconds"] > 0
    assert all(storm["right"] == storm["runs"] for storm in report["storms"])
    assert all(not told["not named"] for told in report["lies"])
    assert report["strangers"][-2]["what"] == "changed plans"


def test_secure_sums(tmp_path):
    report = run_quickly("secure_sums.py", tmp_path)
    # Seven words for each number, of which there are ten and more.
    assert report["secure"]["reply_bytes"] > report["plain"]["reply_bytes"] + 10 * 52 - 100
    assert report["ratio"] > 0
