"""The comparison with NUTS: measures by hand, the table, the figure, and what it warns about."""

import sys
from dataclasses import replace
from functools import cache

import jax
import matplotlib as mpl
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from laid_open import put_in_place
from made_up import corrected_of, nuts_of
from problems import cut
from scipy.stats import norm

import numpyro_fed as nf
from numpyro_fed.reference.compare import _sinkhorn, compare, joint_divergence
from numpyro_fed.reference.nuts_result import NutsResult

mpl.use("Agg")
KEY = jax.random.key(0)


def coin(*values, n=2_000, seed=0):
    """As many draws of each value, shuffled: (1, n) with an ESS of about n."""
    draws = np.repeat(np.asarray(values, float), n // len(values))
    return np.random.default_rng(seed).permutation(draws)[None]


# --- the measures ----------------------------------------------------------------------------


def test_the_measures_are_those_computed_by_hand():
    """NUTS: -2 or 2, sd 2. The fit: -1 or 5, mean 2, sd 3; it is 1 and 3 away at either half."""
    found = compare(corrected_of([0.5, 0.5], z=np.array([-1.0, 5.0])), nuts_of(z=coin(-2, 2)))
    z = found.to_dict()["sites"]["z"]
    np.testing.assert_allclose(z["mean_error_sd"], 2 / 2)
    np.testing.assert_allclose(z["sd_ratio"], 3 / 2)
    np.testing.assert_allclose(z["wasserstein_sd"], (0.5 * 1 + 0.5 * 3) / 2)


def test_the_measures_of_weighted_draws_are_those_computed_by_hand():
    """Mean 3.5. From the left, a quarter is 1 away (-1, -2), a quarter 7 (5, -2), a half 3."""
    found = compare(corrected_of([0.25, 0.75], z=np.array([-1.0, 5.0])), nuts_of(z=coin(-2, 2)))
    z = found.to_dict()["sites"]["z"]
    np.testing.assert_allclose(z["mean_error_sd"], 3.5 / 2)
    np.testing.assert_allclose(z["sd_ratio"], 6 * np.sqrt(0.25 * 0.75) / 2)
    np.testing.assert_allclose(z["wasserstein_sd"], (0.25 * 1 + 0.25 * 7 + 0.5 * 3) / 2)


def test_a_mean_error_has_no_sign():
    found = compare(corrected_of([0.5, 0.5], z=np.array([-5.0, 1.0])), nuts_of(z=coin(-2, 2)))
    np.testing.assert_allclose(found.sites["z"]["mean_error_sd"], 1)


def test_the_same_draws_are_no_distance_apart():
    draws = np.random.default_rng(0).normal(size=(2, 1_000, 3))
    found = compare(
        corrected_of(np.full(2_000, 1 / 2_000), z=draws.reshape(-1, 3)), nuts_of(z=draws)
    )
    for name, expected in {"mean_error_sd": 0, "sd_ratio": 1, "wasserstein_sd": 0}.items():
        np.testing.assert_allclose(found.sites["z"][name], np.full(3, expected), atol=1e-12)


def several():
    """A scalar and a matrix whose element (i, k) is off by i + 2 k of NUTS's sds."""
    r = np.random.default_rng(0)
    nuts = {"mu": r.normal(size=(2, 500)), "w": r.normal(size=(2, 500, 2, 3))}
    off = np.arange(2)[:, None] + 2.0 * np.arange(3)
    w = nuts["w"].reshape(-1, 2, 3)
    fit = {"mu": nuts["mu"].ravel(), "w": w + off * w.std(0)}
    return compare(corrected_of(np.full(1_000, 1e-3), **fit), nuts_of(**nuts)), off


def test_measures_have_the_shapes_of_their_sites_and_stand_at_their_elements():
    found, off = several()
    assert found.to_dict().keys() == {"sites", "pareto_k", "joint"}
    assert found.to_dict()["pareto_k"] == 0.1
    assert found.sites.keys() == {"mu", "w"}
    assert {m: v.shape for m, v in found.sites["mu"].items()} == dict.fromkeys(
        ("mean_error_sd", "sd_ratio", "wasserstein_sd"), ()
    )
    np.testing.assert_allclose(found.sites["w"]["mean_error_sd"], off, atol=1e-10)
    np.testing.assert_allclose(found.sites["w"]["wasserstein_sd"], off, atol=1e-10)
    np.testing.assert_allclose(found.sites["w"]["sd_ratio"], np.ones((2, 3)))


# --- all elements together ---------------------------------------------------------------------


def between_normals(variance, epsilon):
    """The closed form of Janati et al. (2020) of an axis on which the reference is standard."""
    s = epsilon / 2

    def transport(a, b):
        d = np.sqrt(4 * a * b + s**2)
        return a + b - d + s * (1 - np.log(2 * s) + np.log(d + s))

    return transport(variance, 1) - (transport(variance, variance) + transport(1, 1)) / 2


@pytest.mark.parametrize(("shift", "sd"), [(0.0, 1.0), (0.7, 1.0), (0.0, 0.5), (-0.3, 1.6)])
def test_the_joint_distance_of_two_normals_is_the_closed_form(shift, sd):
    """Quantiles in the place of draws, so that there is no noise."""
    z = norm.ppf((np.arange(4_000) + 0.5) / 4_000)[:, None]
    found = joint_divergence(3 + 20 * (shift + sd * z), None, 3 + 20 * z)
    np.testing.assert_allclose(found, shift**2 + between_normals(sd**2, 2), atol=2e-3)


@pytest.mark.slow
def test_the_joint_distance_of_normal_draws_is_the_closed_form_within_its_noise():
    """Correlated elements in their own units, one that others determine, and one that is fixed."""
    r = np.random.default_rng(0)

    def draws(mean, sds):
        u = mean + sds * r.normal(size=(8_000, 2))
        z = np.stack([1e3 * u[:, 0], 1e-4 * (2 * u[:, 0] + u[:, 1])], 1)
        return np.column_stack([z, z[:, 0] + 1e7 * z[:, 1], np.ones(8_000)])

    def mean_and_error(mean, sds):
        found = [joint_divergence(draws(mean, sds), None, draws(0, 1)) for _ in range(6)]
        return np.mean(found), np.std(found, ddof=1) / np.sqrt(6)

    noise, _ = mean_and_error(0, 1)
    assert noise < 0.015
    found, error = mean_and_error(np.array([0.3, 0]), np.array([1, 0.5]))
    expected = 0.3**2 + between_normals(0.25, 4)
    assert abs(found - expected) < noise + 4 * error


def test_weights_count_in_the_joint_distance():
    """Draws of the reference, weighed to those of a normal that is shifted by an sd."""
    z = norm.ppf((np.arange(20_000) + 0.5) / 20_000)[:, None]
    weights = norm.pdf(z[:, 0] - 0.8) / norm.pdf(z[:, 0])
    np.testing.assert_allclose(joint_divergence(z, weights, z), 0.8**2, atol=0.01)


def test_the_same_draws_have_no_joint_distance_and_others_that_of_correlations():
    r = np.random.default_rng(0)
    nuts = r.normal(size=(2, 2_000, 2))
    same = compare(corrected_of(np.full(4_000, 1 / 4_000), z=nuts.reshape(-1, 2)), nuts_of(z=nuts))
    assert 0 <= same.joint["sinkhorn_divergence"] < 1e-6
    assert 0.001 < same.joint["noise_floor"] < 0.02
    assert same.to_dict()["joint"] == same.joint
    # Marginals are right, and the correlation of 0.8 is not there.
    z = nuts @ np.linalg.cholesky([[1, 0.8], [0.8, 1]]).T
    other = compare(corrected_of(np.full(4_000, 1 / 4_000), z=nuts.reshape(-1, 2)), nuts_of(z=z))
    assert (other.sites["z"]["wasserstein_sd"] < 0.1).all()
    assert other.joint["sinkhorn_divergence"] > 20 * other.joint["noise_floor"]


def test_spreads_are_compared_by_their_logs():
    """As they are, one draw of a thousand far out in the tail would decide."""
    r = np.random.default_rng(0)
    z = 2 * r.normal(size=(2, 1, 4_000)) + np.array([1, 0])[:, None, None]
    one, other = (nuts_of(z=draws) for draws in z)
    spreads = compare(*(nuts_of(z=np.exp(draws)) for draws in z)).joint
    assert compare(one, other).joint == pytest.approx(spreads, rel=1e-9)
    assert spreads["sinkhorn_divergence"] == pytest.approx(0.25, abs=0.06)
    assert spreads["noise_floor"] < 0.02


def test_one_program_does_for_all_models():
    for k, n in ((1, 500), (3, 500), (2, 700)):
        draws = np.random.default_rng(k).normal(size=(2, n, k))
        assert 0 < joint_divergence(draws[0], None, draws[1]) < 0.2
    assert _sinkhorn()._cache_size() == 1


# --- the table and the figure ----------------------------------------------------------------


def test_the_table_has_a_line_for_every_element():
    found, off = several()
    header, *lines, joint, last = str(found).splitlines()
    numbers = (f"{found.joint[name]:.3f}" for name in ("sinkhorn_divergence", "noise_floor"))
    assert joint == "joint Sinkhorn divergence (sd²): {}; {} between halves of NUTS".format(
        *numbers
    )
    assert header.split("  ")[0] == "site"
    assert all(word in header for word in ("mean error (sd)", "sd ratio", "Wasserstein (sd)"))
    elements = {"mu": 0.0} | {f"w[{i}, {k}]": off[i, k] for i in range(2) for k in range(3)}
    assert len(lines) == len(elements)
    for line, (element, expected) in zip(lines, elements.items(), strict=True):
        assert line.startswith(f"{element} ")
        assert line.removeprefix(element).split() == [f"{expected:.3f}", "1.000", f"{expected:.3f}"]
        assert len(line) == len(header)
    assert last == "Pareto k-hat of the fit's importance weights: 0.10"


def test_the_figure_has_one_panel_for_each_element():
    import matplotlib.pyplot as plt

    found, _ = several()
    figure = found.plot(label="ours")
    panels = [a for a in figure.axes if a.get_visible()]
    elements = ["mu", *(f"w[{i}, {k}]" for i in range(2) for k in range(3))]
    assert [a.get_xlabel() for a in panels] == elements
    assert [t.get_text() for t in panels[0].figure.legends[0].get_texts()] == ["NUTS", "ours"]
    for panel in panels:
        grid, density = panel.lines[0].get_data()
        assert 0.2 < np.trapezoid(density, grid) < 1.01 or panel.get_xlabel() != "mu"
    plt.close("all")


def test_the_figure_draws_the_weighted_density():
    """All weight on the upper half: the curve's mass lies there."""
    import matplotlib.pyplot as plt

    nuts = np.random.default_rng(0).normal(size=(1, 2_000))
    weights = np.where(nuts[0] > 0, 1.0, 0.0)
    figure = compare(corrected_of(weights / weights.sum(), z=nuts[0]), nuts_of(z=nuts)).plot()
    grid, density = figure.axes[0].lines[0].get_data()
    below = grid < -0.5
    assert np.trapezoid(density[below], grid[below]) < 0.05
    plt.close("all")


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    found, _ = several()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(nf.MissingExtraError, match=r"'matplotlib'.*numpyro-fed\[examples\]"):
        found.plot()


# --- few effective draws ---------------------------------------------------------------------


def test_few_effective_draws_are_warned_of_with_the_site():
    """An element whose draws stay put for 100 at a time has an ESS of about 2,000 / 100."""
    r = np.random.default_rng(0)
    good, bad = r.normal(size=(1, 2_000)), r.normal(size=(1, 2_000, 2))
    bad[0, :, 1] = np.repeat(r.normal(size=20), 100)
    fit = corrected_of([0.5, 0.5], good=np.zeros(2), bad=np.zeros((2, 2)))
    with pytest.warns(UserWarning, match=r"effective draws for 'bad'.*num_samples") as caught:
        compare(fit, nuts_of(good=good, bad=bad))
    assert len(caught) == 1
    assert caught[0].filename == __file__
    ess = float(str(caught[0].message).split("only ")[1].split()[0])
    assert ess < 60


@pytest.mark.filterwarnings("error")
def test_enough_effective_draws_pass_in_silence():
    compare(corrected_of([0.5, 0.5], z=np.array([-1.0, 5.0])), nuts_of(z=coin(-2, 2)))


# --- a fit -----------------------------------------------------------------------------------

Y = np.array([0.3, -1.2, 0.8, 2.0, -0.4, 1.1])


def means(y):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    numpyro.deterministic("both", mu * np.array([1.0, -2.0]))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


@cache
def fitted():
    optim = optax.adam(optax.exponential_decay(0.1, 300, 0.05))
    sfvi = nf.SFVI(means, optim=optim, start=None)
    return sfvi.run(KEY, 600, cut({"y": Y}, (4, 2)), progress_bar=False)


def exact(n, shift=0.0):
    """Independent draws of the posterior, in the place of NUTS's."""
    precision = 1 / 100 + len(Y)
    noise = np.random.default_rng(0).normal(size=(1, n))
    mu = Y.sum() / precision + (noise + shift) / np.sqrt(precision)
    return nuts_of(mu=mu, both=mu[..., None] * np.array([1.0, -2.0]))


@pytest.mark.slow
@pytest.mark.parametrize("shift", [0.0, 0.5])
def test_a_fit_is_compared_at_latent_and_deterministic_sites(shift):
    """4,000 and 20,000 draws: their means differ by 0.017 of an sd, a ratio of sds by 0.013."""
    found = compare(fitted(), exact(4_000, shift), key=jax.random.key(1))
    assert found.sites.keys() == {"mu", "both"}
    for name, shape in {"mu": (), "both": (2,)}.items():
        measures = found.sites[name]
        np.testing.assert_allclose(measures["mean_error_sd"], np.full(shape, shift), atol=0.07)
        np.testing.assert_allclose(measures["sd_ratio"], np.ones(shape), atol=0.05)
        np.testing.assert_allclose(measures["wasserstein_sd"], np.full(shape, shift), atol=0.09)
    assert found.pareto_k < 0.5


def test_a_fit_is_drawn_from_as_often_as_asked_and_by_the_key(monkeypatch):
    put_in_place(monkeypatch, "pareto_k", lambda *args: 0.0)
    a, b, c = (
        compare(fitted(), exact(500), key=jax.random.key(k), num_draws=50).sites["mu"]["sd_ratio"]
        for k in (0, 0, 1)
    )
    assert a == b != c
    assert abs(c - 1) > 1e-3  # 50 draws have an sd that is off by 0.1


def test_a_correction_is_compared_by_its_weighted_draws():
    fixed = nf.importance_correct(KEY, fitted(), num_draws=300)
    found = nf.compare(fixed, exact(1_000))
    draws, nuts = np.asarray(fixed.draws["mu"], float), exact(1_000).globals["mu"]
    by_hand = abs((fixed.weights * draws).sum() - nuts.mean()) / nuts.std()
    np.testing.assert_allclose(found.sites["mu"]["mean_error_sd"], by_hand, rtol=1e-5)
    assert found.pareto_k == fixed.pareto_k


def test_elements_that_never_vary_do_not_disturb_the_others():
    r = np.random.default_rng(0)
    factor = np.stack([np.ones((1, 500)), r.normal(size=(1, 500))], -1)
    nuts = NutsResult({"factor": factor}, 0, dict)
    few = NutsResult({"factor": factor[:, :50]}, 0, dict)
    with pytest.warns(UserWarning, match="factor") as caught:
        compare(nuts, few)
    assert len(caught) == 1
    comparison = compare(nuts, nuts)
    measures = comparison.to_dict()["sites"]["factor"]
    np.testing.assert_array_equal(measures["mean_error_sd"], [0, 0])
    np.testing.assert_array_equal(measures["sd_ratio"], [1, 1])
    assert "nan" not in str(comparison)
    assert sum(axis.get_visible() for axis in comparison.plot().axes) == 1


def test_an_element_without_an_sd_has_no_measures_in_sds():
    r = np.random.default_rng(0)
    u = np.stack([r.standard_cauchy(4_000), r.normal(size=4_000)], 1)
    fixed = corrected_of(np.full(4_000, 1 / 4_000), u=u)
    heavy = fixed.errors._replace(is_power=np.array([True, False]))  # as draws far out would tell
    table = compare(replace(fixed, errors=heavy), nuts_of(u=u[None]))
    measures = table.to_dict()["sites"]["u"]
    assert np.isnan(measures["sd_ratio"][0])
    np.testing.assert_allclose([m[1] for m in measures.values()], [0, 1, 0], atol=1e-6)
    lines = str(table).splitlines()
    assert lines[1].split() == ["u[0]", "-", "-", "-"]
    assert lines[4] == "-: no mean or no sd; compare quantiles"


def test_runs_of_different_models_are_refused():
    one, other = (NutsResult({name: np.zeros((1, 500))}, 0, dict) for name in ("mu", "nu"))
    with pytest.raises(ValueError, match=r"\['mu'\].*\['nu'\]"):
        compare(one, other)


def test_a_model_without_globals_has_an_empty_table():
    nothing = NutsResult({}, 0, dict)
    assert compare(nothing, nothing).to_dict()["sites"] == {}
    assert "Wasserstein" in str(compare(nothing, nothing))
