"""``result.silos``: how far each silo moves the posterior, and who contradicts the others."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.stats import chi2

import numpyro_fed as nf
from numpyro_fed.basics.errors import CoupledRowsError, ModelError
from numpyro_fed.search.influence import Factors, SiloPull, SiloTable, table_of

KEY = jax.random.key(0)
QUIET = {"progress_bar": False}


def line(x, y=None):
    beta = numpyro.sample("beta", dist.Normal(0, 100).expand([x.shape[-1]]).to_event(1))
    with nf.silo_plate("row", len(x)):
        numpyro.sample("y", dist.Normal(x @ beta, 2), obs=y)


def lines(sizes=(20, 30, 8), lie=0.0, seed=0):
    r = np.random.default_rng(seed)
    silos = []
    for j, n in enumerate(sizes):
        x = np.stack([np.ones(n), r.normal(50, 10, n)], 1)
        y = x @ [3.0, 0.5] + r.normal(0, 2, n) + (lie if j == 1 else 0.0)
        silos.append({"x": x, "y": y})
    return silos


METHOD = nf.SFVI(line)  # one for all tests, so that its programs are found again


def exact(silos):
    """Mean and precision of the conjugate posterior."""
    x, y = (np.concatenate([s[name] for s in silos]) for name in ("x", "y"))
    precision = x.T @ x / 4 + np.eye(2) / 100**2
    return np.linalg.solve(precision, x.T @ y / 4), precision


def test_the_shift_is_that_of_the_exact_posterior_without_the_silo(double):
    silos = lines()
    found = METHOD.run(KEY, 0, silos, **QUIET).silos
    mean, precision = exact(silos)
    sds = np.sqrt(np.diag(np.linalg.inv(precision)))
    for j, silo in enumerate(silos):
        others = [s for s in silos if s is not silo]
        mean_without, precision_without = exact(others)
        shift = np.max(np.abs(mean_without - mean) / sds)
        np.testing.assert_allclose(found.shift[j], shift, rtol=1e-8)
        # The silo's own estimate against that of the others, each with its variance.
        own = silo["x"].T @ silo["x"] / 4
        gap = np.linalg.solve(own, silo["x"].T @ silo["y"] / 4) - mean_without
        variance = np.linalg.inv(own) + np.linalg.inv(precision_without)
        tail = chi2.sf(gap @ np.linalg.solve(variance, gap), 2)
        # At the silo's mode with its share of the vague prior, which is nearly its own.
        np.testing.assert_allclose(found.conflict[j], tail, rtol=1e-5)
    assert found.flagged == ()
    assert "silo" in str(found)


def test_the_silo_that_contradicts_the_others_is_flagged_alone(double):
    found = METHOD.run(KEY, 0, lines(lie=10.0), **QUIET).silos
    assert found.flagged == (1,)
    assert found.conflict.argmin() == 1
    frame = found.to_frame()
    assert frame["flagged"].tolist() == [False, True, False]
    np.testing.assert_array_equal(frame["shift"], found.shift)


def test_units_change_nothing(double):
    silos = lines(lie=1.0)
    scaled = [{**s, "x": s["x"] * [1, 1e4]} for s in silos]
    tables = [METHOD.run(KEY, 0, s, **QUIET).silos for s in (silos, scaled)]
    np.testing.assert_allclose(tables[0].conflict, tables[1].conflict, rtol=1e-3)


def test_two_that_contradict_each_other_are_both_flagged():
    silos = SiloPull(np.array([[20.0], [-20.0]]), np.full((2, 1, 1), 9.0), -np.ones(2))
    assert table_of(Factors(silos, np.zeros(1), np.eye(1))).flagged == (0, 1)


def test_a_silo_that_knows_nothing_moves_nothing():
    curvature = np.stack([np.diag([4.0, 0.0]), np.diag([5.0, 3.0]), np.zeros((2, 2))])
    gradient = np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]])
    factors = Factors(SiloPull(gradient, curvature, np.zeros(3)), np.zeros(2), 0.01 * np.eye(2))
    table = table_of(factors)
    assert table.shift[2] == 0
    assert table.conflict[2] == 1
    # Only silo 1 knows of the second global.
    assert np.isfinite(table.shift).all()


def test_a_shift_to_where_the_others_have_no_peak_is_not_known():
    # Silo 0 alone makes a peak along the second global, where the others curve upwards.
    curvature = np.stack([np.diag([4.0, 3.0]), np.diag([5.0, -1.5]), np.diag([6.0, 0.0])])
    gradient = np.array([[1.0, 0.5], [-1.0, -0.5], [0.0, 0.0]])
    silos = SiloPull(gradient, curvature, np.zeros(3))
    table = table_of(Factors(silos, np.zeros(2), 0.01 * np.eye(2)))
    assert np.isnan(table.shift).tolist() == [True, False, False]
    # Without silo 1: the mean moves by -g / (precision of the others), in sds of all.
    gap, sds = np.array([1 / 10.01, 0.5 / 3.01]), np.array([15.01, 1.51]) ** -0.5
    np.testing.assert_allclose(table.shift[1], (gap / sds).max(), rtol=1e-6)
    first, *lines = str(table).splitlines()
    assert lines[0].split()[1:3] == ["not", "known"]
    assert len({len(line) for line in (first, *lines)}) == 1
    assert {len(line) for line in str(SiloTable([0.2, 2e9], [0.5, 1e-300])).splitlines()} == {26}
    assert [t.get_text().strip() for t in table.plot().axes[0].texts] == ["not known"]


@pytest.mark.slow
def test_influence_of_hospital_effects_over_a_federation():
    def model(x, y=None):
        beta = numpyro.sample("beta", dist.Normal(0, 5))
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        with nf.silo_plate("hospital", 1):
            u = numpyro.sample("u", dist.Normal(0, tau))
        with nf.silo_plate("row", len(x)):
            numpyro.sample("y", dist.Poisson(jnp.exp(x * beta + u[0])), obs=y)

    r = np.random.default_rng(0)
    silos = []
    for n in (16, 16, 12):
        x = r.normal(size=n)
        silos.append({"x": x, "y": r.poisson(np.exp(0.5 * x + r.normal(0, 0.5)))})
    names, policy = {"model": model}, nf.Policy(min_rows=1, parameters_per_row=1.0)
    answers = [nf.Silo(s, names=names, policy=policy).answer for s in silos]
    there = nf.Federation(nf.network.InMemory(answers), names=names, at_once=1)
    found, expected = (nf.fit(KEY, model, s, **QUIET).silos for s in (there, silos))
    np.testing.assert_allclose(found.conflict, expected.conflict, rtol=1e-2)
    assert found.flagged == ()


def test_rows_that_read_each_other_are_refused():
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 10))
        with nf.silo_plate("row", len(y)):
            b = numpyro.sample("b", dist.Normal(0, 1))
        with nf.silo_plate("row", len(y)):
            numpyro.sample("y", dist.Normal(mu + b - b.mean(), 1), obs=y)

    result = nf.SFVI(model, start=None).run(KEY, 0, [{"y": np.ones(3)}] * 2, **QUIET)
    with pytest.raises(CoupledRowsError, match="influence of silos needs"):
        _ = result.silos


def test_a_model_without_globals_has_no_influence():
    def model(y):
        with nf.silo_plate("row", len(y)):
            b = numpyro.sample("b", dist.Normal(0, 1))
            numpyro.sample("y", dist.Normal(b, 1), obs=y)

    result = nf.SFVI(model, start=None).run(KEY, 0, [{"y": np.ones(3)}] * 2, **QUIET)
    with pytest.raises(ModelError, match="0 globals"):
        _ = result.silos


# --- the verdict of a fit ---------------------------------------------------------------------


def regressions(r, rows, silos=3, columns=3):
    """What silos of one regression with an unknown sd say at its mode, under a flat prior."""
    x = r.normal(size=(silos, rows, columns))
    y = x @ np.ones(columns) + r.normal(size=(silos, rows))

    def fitted(x, y):
        beta = np.linalg.lstsq(x, y, rcond=None)[0]
        return beta, np.log(((y - x @ beta) ** 2).mean()) / 2

    def log_likelihood(x, y, beta, s):
        return -0.5 * ((y - x @ beta) ** 2).sum() * np.exp(-2 * s) - len(y) * s

    beta, s = fitted(x.reshape(-1, columns), y.ravel())
    told = []
    for x_j, y_j in zip(x, y, strict=True):
        e, v = y_j - x_j @ beta, np.exp(-2 * s)
        own = log_likelihood(x_j, y_j, *fitted(x_j, y_j)) - log_likelihood(x_j, y_j, beta, s)
        cross = 2 * v * x_j.T @ e
        told.append(
            (
                np.append(v * x_j.T @ e, v * e @ e - rows),
                np.block([[v * x_j.T @ x_j, cross[:, None]], [cross, 2 * v * e @ e]]),
                own,
            )
        )
    g, A, gains = (np.stack(a) for a in zip(*told, strict=True))
    return Factors(SiloPull(g, A, gains), -g.sum(0), np.zeros((columns + 1, columns + 1)))


@pytest.mark.parametrize("rows", [5, 12, 40])
def test_few_honest_rows_accuse_nobody(rows):
    """As promised, one fit in a hundred; where rows did not count it was half of those of five."""
    r = np.random.default_rng(0)
    found = [table_of(regressions(r, rows), rows=[rows] * 3) for _ in range(150)]
    assert sum(bool(table.flagged) for table in found) <= 4


def test_where_the_others_are_no_peak_nobody_is_accused():
    """Effects of three hospitals at the mode: without one of them the scale's density rises."""
    A = [
        [[4.71, -1.11], [-1.11, 0.21]],
        [[4.71, 4.75], [4.75, 2.37]],
        [[4.71, -3.64], [-3.64, 1.42]],
    ]
    g = np.array([[-0.58, -0.88], [2.49, 0.3], [-1.91, -0.22]])
    silos = SiloPull(g, np.array(A), np.array([1.36, 1.99, 1.71]))
    found = table_of(Factors(silos, -g.sum(0), np.diag([0.01, 0.4])), True)
    assert found.flagged == ()
    assert (found.conflict > 0.01).all()


def test_words_name_the_silo_that_contradicts_the_others_most():
    shift, conflict = np.ones(3), np.array([0.3, 2.4e-7, 1e-4])
    assert SiloTable(shift, conflict).words == ""
    words = SiloTable(shift, conflict, (1, 2)).words
    assert words == "Silo 1 contradicts the others (p = 2e-07): look at units and columns there."
    assert SiloTable(shift[:2], conflict[1:], (0, 1)).words.startswith("The two silos contradict")


def swapped(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 10).expand([3]).to_event(1))
    sd = numpyro.sample("sd", dist.HalfNormal(5))
    with nf.silo_plate("row", len(y)):
        numpyro.sample("y", dist.Normal(x @ beta, sd), obs=y)


@pytest.mark.slow
def test_the_verdict_says_who_has_swapped_two_columns(tmp_path):
    """By what is known at the mode: no exchange more."""
    r = np.random.default_rng(0)
    silos = []
    for n in (30, 60, 16, 40):
        x = np.c_[np.ones(n), r.normal(size=(n, 2))]
        silos.append({"x": x, "y": x @ [1.0, 2.0, -1.0] + r.normal(size=n)})
    honest = nf.fit(KEY, swapped, silos, **QUIET)
    assert honest.contradiction == ""
    assert "contradict" not in honest.verdict
    silos[2]["x"] = silos[2]["x"][:, [0, 2, 1]]
    fitted = nf.fit(KEY, swapped, silos, **QUIET)
    assert fitted.trusted
    assert "Silo 2 contradicts the others (p = " in fitted.verdict
    assert fitted.num_exchanges == fitted.mode.num_exchanges + 1
    told, asked = fitted.mode.factors, fitted.run_behind.factors_at(fitted.mode.z_G)
    for name in ("gradient", "curvature"):
        a, b = getattr(told.silos, name), getattr(asked.silos, name)
        np.testing.assert_allclose(a, b, rtol=0.02, atol=0.02 * np.abs(b).max())
    np.testing.assert_allclose(told.silos.gain, asked.silos.gain, atol=0.05)
    fitted.save(tmp_path / "fit")
    assert nf.load(tmp_path / "fit", swapped, silos).verdict == fitted.verdict
