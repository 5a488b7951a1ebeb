"""Silos' latents side by side, and pictures: what they show, and what they refuse."""

import jax
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.stats import norm

import numpyro_fed as nf
from numpyro_fed.basics.display import caterpillar, checks, conflicts, curve, marginals
from numpyro_fed.basics.errors import ModelError
from numpyro_fed.text.supports import bounds_of

matplotlib.use("Agg")
KEY = jax.random.key(0)
QUIET = {"progress_bar": False}


def model(hospital, n_hospitals, y):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with nf.silo_plate("hospital", n_hospitals):
        u = numpyro.sample("u", dist.Normal(0, 2))
    with nf.silo_plate("patient", len(y)):
        b = numpyro.sample("b", dist.Normal(0, 0.5))
        numpyro.sample("y", dist.Normal(mu + u[hospital] + b, 1), obs=y)


EFFECTS, SIZES = (-3.0, 0.0, 4.0), (4, 7, 4)


@pytest.fixture(scope="module")
def fitted():
    r = np.random.default_rng(0)
    silos = [
        dict(hospital=np.zeros(n, int), n_hospitals=1, y=r.normal(5 + u, 1.1, n))
        for n, u in zip(SIZES, EFFECTS, strict=True)
    ]
    return nf.fit(KEY, model, silos, **QUIET)


@pytest.fixture(autouse=True)
def closed():
    yield
    from matplotlib import pyplot

    pyplot.close("all")


@pytest.mark.slow
def test_latents_of_all_silos_stand_side_by_side(fitted):
    together = fitted.sample_posterior(KEY, 200, silo="all")
    assert together["u"].shape == (200, 3)
    assert together["b"].shape == (200, sum(SIZES))
    for j, first in enumerate((0, 4, 11)):
        alone = fitted.sample_posterior(KEY, 200, silo=j)
        np.testing.assert_allclose(together["u"][:, j], alone["u"][:, 0], atol=1e-8)
        rows = slice(first, first + alone["b"].shape[1])
        np.testing.assert_allclose(together["b"][:, rows], alone["b"], atol=1e-8)
        np.testing.assert_array_equal(together["mu"], alone["mu"])
    some = fitted.sample_posterior(KEY, 200, silo=[2, 0])
    np.testing.assert_allclose(some["u"], np.asarray(together["u"])[:, [2, 0]], atol=1e-12)
    assert fitted.run_behind.sample_posterior(KEY, 5, silo="all")["u"].shape == (5, 3)


@pytest.mark.slow
def test_silos_that_are_not_there_are_refused(fitted):
    with pytest.raises(IndexError, match="no silo 3"):
        fitted.sample_posterior(KEY, 5, silo=[0, 3])
    with pytest.raises(ValueError, match="'every'"):
        fitted.sample_posterior(KEY, 5, silo="every")
    with pytest.raises(ValueError, match="at least one"):
        fitted.sample_posterior(KEY, 5, silo=[])


@pytest.mark.slow
def test_globals_are_drawn_over_their_prior(fitted):
    (ax,) = (a for a in fitted.plot().axes if a.axison)
    assert ax.get_xlabel() == "mu"
    x, density = ax.lines[0].get_data()
    draws = np.asarray(fitted.sample_posterior(jax.random.key(0), 4_000)["mu"])
    assert x[np.argmax(density)] == pytest.approx(np.median(draws), abs=0.5 * draws.std())
    height = np.interp(0.0, *ax.lines[1].get_data())
    assert height == pytest.approx(1 / np.sqrt(2 * np.pi) / 10, rel=0.3)  # of the prior at zero
    with pytest.raises(ModelError, match="'tau' is no global"):
        fitted.plot(["tau"])


@pytest.mark.slow
def test_effects_are_drawn_in_their_order_with_what_a_silo_says_alone(fitted):
    ax = fitted.plot_silos("u").axes[0]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["silo 0", "silo 1", "silo 2"]
    lines = {line.get_label(): np.asarray(line.get_xdata(), float) for line in ax.lines}
    draws = np.asarray(fitted.sample_posterior(jax.random.key(0), 2_000, silo="all")["u"])
    np.testing.assert_allclose(lines["mean, by all silos"], draws.mean(0))
    # Shrunk to the prior's mean, by the precision that the prior has.
    alone, v = lines["by this silo alone"], draws.var(0)
    np.testing.assert_allclose(alone, draws.mean(0) / (1 - v / 4), atol=0.15)
    assert fitted.plot_silos().axes[0].get_xlabel() == "u"
    labels = [t.get_text() for t in fitted.plot_silos("b").axes[0].get_yticklabels()]
    assert len(labels) == sum(SIZES)
    assert "silo 1, 6" in labels
    with pytest.raises(ModelError, match="'v' is no latent of silos"):
        fitted.plot_silos("v")


@pytest.mark.slow
def test_a_check_has_the_outcomes_and_what_is_predicted(fitted):
    axes = [a for a in fitted.plot_check(n=20).axes if a.axison]
    assert [a.get_title() for a in axes] == ["silo 0", "silo 1", "silo 2"]
    drawn = [line for line in axes[1].lines if len(line.get_xdata())]
    assert len(drawn) == 21
    seen = np.sort(fitted.run_behind._silos.data_of(1).kwargs["y"])
    np.testing.assert_allclose(drawn[-1].get_xdata()[1:], seen)
    assert len([a for a in fitted.plot_check(2).axes if a.axison]) == 1


@pytest.mark.slow
def test_disagreement_is_drawn(fitted):
    table = fitted.disagreement()
    left, right = table.plot().axes
    np.testing.assert_allclose([bar.get_width() for bar in left.patches], table.shift)
    np.testing.assert_allclose([b.get_width() for b in right.patches], -np.log10(table.conflict))


def words(figure):
    """Return the entries of a figure's legend."""
    return [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.slow
def test_figures_can_be_read_by_themselves(fitted):
    figure = fitted.plot()
    assert words(figure) == ["posterior", "prior"]
    assert figure.axes[0].get_ylabel() == "density"
    intervals = ["50 % interval", "90 % interval"]
    more = ["by this silo alone", "mean of the prior"]
    assert words(fitted.plot_silos()) == ["mean, by all silos", *intervals, *more]
    figure = fitted.plot_check(n=3)
    assert words(figure) == ["observed", "predicted, a line for each data set"]
    assert [ax.get_xlabel() for ax in figure.axes] == ["y"] * 3
    assert figure.axes[0].get_ylabel() == "share at or below"
    figure = fitted.disagreement().plot()
    assert all(ax.get_xlabel() for ax in figure.axes)
    assert words(figure)[-1] == "limit for the longest bar"


@pytest.mark.slow
def test_silos_may_have_names(fitted):
    names = ["St. Mary", "North", "Bern"]
    labels = fitted.plot_silos("u", names=names).axes[0].get_yticklabels()
    assert [t.get_text() for t in labels] == names  # in the order of their effects, too
    labels = fitted.plot_silos("b", names=names).axes[0].get_yticklabels()
    assert "Bern, 3" in [t.get_text() for t in labels]
    assert [a.get_title() for a in fitted.plot_check(n=2, names=names).axes] == names
    assert fitted.plot_check(2, n=2, names=names).axes[0].get_title() == "Bern"
    labels = fitted.disagreement().plot(names=names).axes[0].get_yticklabels()
    assert [t.get_text() for t in labels] == names
    for figure in fitted.plot_silos, fitted.plot_check, fitted.disagreement().plot:
        with pytest.raises(ValueError, match="names has 2 entries, and there are 3 silos"):
            figure(names=names[:2])


def test_effects_of_two_elements_have_a_panel_each_with_silos_in_one_order():
    r = np.random.default_rng(0)
    draws = r.normal(size=(500, 12, 2)) * [0.1, 5.0] + np.arange(12)[:, None] * [-1.0, 1.0]
    figure = caterpillar(
        "u", draws, 9 * r.normal(size=draws.shape), [f"silo {j}" for j in range(12)]
    )
    first, second = figure.axes
    assert [first.get_xlabel(), second.get_xlabel()] == ["u[0]", "u[1]"]
    assert [t.get_text() for t in first.get_yticklabels()] == [f"silo {j}" for j in range(12)][::-1]
    np.testing.assert_allclose(second.lines[0].get_xdata(), draws[:, ::-1, 1].mean(0))


@pytest.mark.slow
def test_effects_whose_silos_are_the_last_axis_are_drawn_by_silo():
    def two_of_each(n_hospitals, hospital, y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with nf.silo_plate("hospital", n_hospitals, dim=-1), numpyro.plate("kind", 2, dim=-2):
            u = numpyro.sample("u", dist.Normal(0, 2))
        with nf.silo_plate("row", len(y)):
            numpyro.sample("y", dist.Normal(mu + u[:, hospital].T, 1).to_event(1), obs=y)

    r = np.random.default_rng(0)
    silos = [
        dict(n_hospitals=1, hospital=np.zeros(5, int), y=r.normal(size=(5, 2)) + means)
        for means in ((-2, 2), (0, 0), (2, -2))
    ]
    fit = nf.fit(KEY, two_of_each, silos, **QUIET)
    draws = np.asarray(fit.sample_posterior(jax.random.key(0), 2_000, silo="all")["u"])
    assert draws.shape == (2_000, 2, 3)
    for i, ax in enumerate(fit.plot_silos("u").axes):
        assert ax.get_xlabel() == f"u[{i}]"
        np.testing.assert_allclose(ax.lines[0].get_xdata(), draws[:, i].mean(0))


@pytest.mark.parametrize("number", [12, 40])
def test_labels_of_many_silos_do_not_overlap(number):
    r = np.random.default_rng(0)
    labels = [f"silo {j}" for j in range(number)]
    draws = r.normal(size=(200, number))
    for figure in (
        caterpillar("u", draws, 2 * r.normal(size=draws.shape), labels),
        conflicts(r.random(number), r.random(number), (3,), 0.01, labels),
    ):
        figure.canvas.draw()
        boxes = [t.get_window_extent() for t in figure.axes[0].get_yticklabels()]
        assert len(boxes) == number
        lows, highs = (np.sort([getattr(b, name) for b in boxes]) for name in ("y0", "y1"))
        assert (lows[1:] > highs[:-1]).all()


def test_rows_without_number_have_no_labels_and_the_height_ends():
    draws = np.random.default_rng(0).normal(size=(50, 3_000))
    figure = caterpillar("b", draws, 2 * draws, [f"silo 0, {i}" for i in range(3_000)])
    assert figure.get_figheight() < 25
    assert figure.axes[0].get_yticklabels() == []
    assert figure.axes[0].get_ylabel().startswith("3000 rows")


def test_contradictions_are_named_in_the_legend():
    figure = conflicts(np.ones(3), np.array([0.5, 1e-9, 0.2]), (1,), 0.01, ["a", "b", "c"])
    assert words(figure)[:2] == ["does not contradict the others", "contradicts the others"]
    colours = [bar.get_facecolor() for bar in figure.axes[0].patches]
    assert colours[0] == colours[2] != colours[1]
    ticks = figure.axes[1].xaxis.get_major_formatter()
    assert [ticks(x) for x in (0, 1, 2, 9)] == ["1", "0.1", "0.01", "$10^{-9}$"]


def test_a_prior_out_of_sight_is_pointed_at():
    r = np.random.default_rng(0)
    draws = np.stack([r.normal(90, 1, 500), r.normal(-90, 1, 500)], 1)
    left, right = marginals(["a", "b"], draws, r.normal(size=(500, 2))).axes
    assert [t.get_text() for t in left.texts] == ["\u2190 prior"]
    assert [t.get_text() for t in right.texts] == ["prior \u2192"]


def test_a_check_of_more_panels_than_are_drawn_says_so():
    seen = [{"n": np.arange(5)}] * 24
    drawn = [{"n": np.tile(np.arange(5), (3, 1))}] * 24
    figure = checks(seen, drawn, [f"silo {j}" for j in range(40)])
    assert figure.legends[0].get_title().get_text() == "the first 24 of 40"
    figure.canvas.draw()
    ticks = figure.axes[0].get_xticks()
    np.testing.assert_array_equal(ticks, np.round(ticks))  # counts are whole numbers


def test_curves_of_equal_draws_and_of_heavy_tails():
    x, density = curve(np.full(10, 3.0))
    assert x[np.argmax(density)] == 3
    heavy = np.random.default_rng(0).standard_cauchy(4_000)
    x, density = curve(heavy)
    assert np.isfinite(density).all()
    assert abs(x[np.argmax(density)]) < 1


def test_a_density_at_a_bound_is_that_up_to_it_and_nothing_beyond():
    r = np.random.default_rng(0)
    for draws, bounds, edge in (
        (abs(r.normal(size=20_000)), (0.0, np.inf), 2 * norm.pdf(0)),
        (r.uniform(size=20_000), (0.0, 1.0), 1.0),
        (1 + abs(r.normal(size=20_000)), (1.0, np.inf), 2 * norm.pdf(0)),
    ):
        x, density = curve(draws, bounds)
        assert x[0] == bounds[0]
        assert x[-1] <= bounds[1]
        np.testing.assert_allclose(density[0], edge, rtol=0.06)
        np.testing.assert_allclose(np.trapezoid(density, x), 1, atol=0.02)
    assert curve(draws)[1][0] < 0.8 * edge  # without the bound it falls there
    supports = dist.HalfNormal(1).support, dist.Beta(2, 2).expand([2]).to_event(1).support
    assert [bounds_of(s) for s in supports] == [(0, np.inf), (0, 1)]
    assert bounds_of(dist.Normal().support) == (-np.inf, np.inf)
    assert bounds_of(dist.Dirichlet(np.ones(3)).support) == (-np.inf, np.inf)


# --- outcomes of yes or no -------------------------------------------------------------------


@pytest.fixture(scope="module")
def yes_or_no():
    """Two silos of which the model misses a treatment that halves the share of yes."""

    def model(y):
        logit = numpyro.sample("logit", dist.Normal(0, 3))
        with nf.silo_plate("row", len(y)):
            numpyro.sample("y", dist.Bernoulli(logits=logit), obs=y)

    r = np.random.default_rng(0)
    treated = [np.arange(200) % 2] * 2
    y = [r.binomial(1, 0.6 - 0.4 * t).astype(float) for t in treated]
    y[0][:3] = np.nan
    return nf.fit(KEY, model, [dict(y=v) for v in y], **QUIET), y, treated


def test_outcomes_of_yes_or_no_are_shares_by_silo(yes_or_no):
    fitted, y, _ = yes_or_no
    figure = fitted.plot_check(n=400, names=["North", "Bern"])
    (ax,) = figure.axes
    assert [t.get_text() for t in ax.get_yticklabels()] == ["North", "Bern"]
    assert words(figure) == ["observed", "predicted, 50 %", "predicted, 90 %"]
    np.testing.assert_allclose(ax.lines[0].get_xdata(), [np.nanmean(v) for v in y])
    # A share of m rows, around one known from all 397.
    wide = np.array([segment[:, 0] for segment in ax.collections[0].get_segments()])
    p = np.nanmean(np.concatenate(y))
    sd = np.sqrt(p * (1 - p) * (1 / np.array([197, 200]) + 1 / 397))
    np.testing.assert_allclose(wide.mean(1), p, atol=0.02)
    np.testing.assert_allclose(wide[:, 1] - wide[:, 0], 2 * 1.645 * sd, rtol=0.25)


def test_groups_that_a_model_misses_are_outside_of_what_it_predicts(yes_or_no):
    fitted, y, treated = yes_or_no
    (ax,) = fitted.plot_check(n=200, by=treated).axes
    assert [t.get_text() for t in ax.get_yticklabels()] == ["0", "1"]
    outcome, group = np.concatenate(y), np.concatenate(treated)
    shares = [np.nanmean(outcome[group == g]) for g in (0, 1)]
    np.testing.assert_allclose(ax.lines[0].get_xdata(), shares)
    low, high = np.array([s[:, 0] for s in ax.collections[0].get_segments()]).T
    assert shares[0] > high[0]
    assert shares[1] < low[1]
    with pytest.raises(ValueError, match="by has 1 entries, and 2 silos"):
        fitted.plot_check(by=treated[:1])
    with pytest.raises(ValueError, match=r"entry 1 of by has the shape \(3,\)"):
        fitted.plot_check(by=[treated[0], treated[1][:3]])


def test_draws_that_repeat_make_no_bumps():
    """As many times each as their weights ask for: a few distinct draws have wide kernels."""
    r = np.random.default_rng(0)
    few = np.repeat(r.normal(size=100), r.multinomial(20_000, np.full(100, 0.01)))
    _, density = curve(few)
    assert (np.diff(np.sign(np.diff(density))) < 0).sum() <= 2


def test_outcomes_of_two_kinds_all_have_their_panels():
    seen = [{"died": np.array([0.0, 1, 1]), "cost": np.array([2.5, 3.0, 9.0])}]
    drawn = [{name: np.tile(values, (4, 1)) for name, values in seen[0].items()}]
    assert [ax.get_xlabel() for ax in checks(seen, drawn, ["North"]).axes] == ["died", "cost"]
