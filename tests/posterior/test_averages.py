"""Averages over all silos' rows, and calibration: what they are by hand on pooled rows."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_fed as nf
from numpyro_fed.basics.errors import DataError, ModelError, RefusedError
from numpyro_fed.network import InMemory
from numpyro_fed.posterior.calibration import NUM_BINS, binned

KEY = jax.random.key(0)
QUIET = {"progress_bar": False}
pytestmark = pytest.mark.usefixtures("double")


def logistic(x, t, ward, y):
    b = numpyro.sample("b", dist.Normal(0, 2).expand([4]).to_event(1))
    with nf.silo_plate("row", x.shape[0]):
        p = numpyro.deterministic("p", jax.nn.sigmoid(b[0] + x @ b[1:3] + b[3] * t))
        numpyro.deterministic("both", jnp.stack([p, 1 - p], -1))
        numpyro.sample("y", dist.Bernoulli(p), obs=y)


def expit(a):
    return 1 / (1 + np.exp(-a))


def silos_of(*sizes, least_ward=0):
    r, found = np.random.default_rng(3), {}
    for name, n in zip("ABC", sizes, strict=False):
        x, t, ward = r.normal(size=(n, 2)), r.integers(0, 2, n), np.arange(n) % 3 + least_ward
        y = r.binomial(1, expit(x @ [1.0, -1.0] + t - 0.5))
        found[name] = dict(x=x, t=t, ward=ward, y=y)
    return found


@pytest.fixture(scope="module")
def fitted():
    with nf.basics.programs.precision(double=True):
        return nf.fit(KEY, logistic, silos_of(30, 20, 12), **QUIET)


def by_hand(fitted, n, t=None, first=None):
    """Return the probabilities (n, rows) of pooled rows at the draws of the key."""
    b = np.asarray(fitted.sample_posterior(KEY, n)["b"])
    silos = silos_of(30, 20, 12).values()
    x, own = (np.concatenate([s[k] for s in silos]) for k in ("x", "t"))
    if first is not None:
        x = np.column_stack([np.full(len(x), first), x[:, 1]])
    t = own if t is None else np.full(len(x), t)
    ward = np.concatenate([s["ward"] for s in silos])
    return expit(b[:, :1] + b[:, 1:3] @ x.T + b[:, 3:] * t), ward


@pytest.mark.parametrize(
    ("changes", "hand"),
    [({}, {}), ({"t": 1}, {"t": 1}), ({"x": {0: -0.5}, "t": 0.25}, {"t": 0.25, "first": -0.5})],
)
def test_an_average_is_that_of_pooled_rows_at_the_same_draws(fitted, changes, hand):
    found = fitted.average(KEY, "p", changes, num_draws=50)
    expected, _ = by_hand(fitted, 50, **hand)
    np.testing.assert_allclose(np.asarray(found), expected.mean(1), rtol=1e-9)
    assert found.rows == 62
    assert "over 62 rows" in str(found)


def test_a_list_is_one_exchange_and_each_of_its_numbers_alone(fitted):
    changes = {"t": [0, 0.25, 1], "x": {0: [1.0, -0.5, 0.0]}}
    found = np.asarray(fitted.average(KEY, "p", changes, num_draws=50))
    assert found.shape == (50, 3)
    for i, (t, first) in enumerate(zip(changes["t"], changes["x"][0], strict=True)):
        expected, _ = by_hand(fitted, 50, t=t, first=first)
        np.testing.assert_allclose(found[:, i], expected.mean(1), rtol=1e-9)
    by_ward = fitted.average(KEY, "both", {"t": [0, 1]}, by="ward", num_groups=3, num_draws=20)
    assert by_ward.draws.shape == (20, 3, 2, 2)
    np.testing.assert_allclose(by_ward.draws.sum(-1), 1, rtol=1e-9)


def test_averages_of_each_silo_have_its_name(fitted):
    found = fitted.average(KEY, "p", {"t": [False, True]}, by="silo", num_draws=50)
    assert found.draws.shape == (50, 3, 2)
    assert found.rows.tolist() == [30, 20, 12]
    for t in (0, 1):
        p, _ = by_hand(fitted, 50, t=t)
        for j, own in enumerate(np.split(p, [30, 50], axis=1)):
            np.testing.assert_allclose(found.draws[:, j, t], own.mean(1), rtol=1e-9)
    lines = str(found).splitlines()
    assert [line[:2] for line in lines] == ["A:", "B:", "C:"]
    assert lines[2].endswith("over 12 rows")
    by_ward = fitted.average(KEY, "p", by="ward", num_groups=3, num_draws=5)
    assert by_ward.names == ("ward=0", "ward=1", "ward=2")


def test_groups_outcomes_and_sites_of_several_numbers(fitted):
    expected, ward = by_hand(fitted, 40, t=0)
    found = fitted.average(KEY, "y", {"t": 0}, by="ward", num_groups=3, num_draws=40)
    for g in range(3):
        np.testing.assert_allclose(found.draws[:, g], expected[:, ward == g].mean(1), rtol=1e-9)
    assert found.rows.tolist() == np.bincount(ward).tolist()
    both = fitted.average(KEY, "both", {"t": 0}, num_draws=40)
    np.testing.assert_allclose(both.draws.sum(1), 1, rtol=1e-9)
    np.testing.assert_allclose(both.draws[:, 0], expected.mean(1), rtol=1e-9)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (dict(site="q"), "'q' is no site.*'p', 'both', 'y'"),
        (dict(site="p", changes={"u": 1}), "'u' is no array"),
        (dict(site="p", changes={"t": "a"}), "'t' becomes 'a'"),
        (dict(site="p", changes={"t": [0, "a"]}), "'t' becomes .0, 'a'.*names.'t'"),
        (dict(site="p", by="silo", num_groups=2), "by='silo' is no argument"),
        (dict(site="p", changes={"t": [0, 1], "x": {0: [1]}}), r"lengths \[1, 2\]"),
        (dict(site="p", changes={"x": {2: 1.0}}), "'x' has no column 2"),
        (dict(site="p", by="x", num_groups=2), "by='x' is no argument of whole numbers"),
        (dict(site="p", by="ward"), "num_groups=0: pass both"),
        (dict(site="p", by="ward", num_groups=4), r"the groups \[3\] have no rows"),
        (dict(site="p", by="ward", num_groups=2), "20 rows have codes beyond 0 to 1"),
    ],
)
def test_what_cannot_be_averaged_is_refused(fitted, how, says):
    with pytest.raises((DataError, ModelError, ValueError), match=f"(?s){says}"):
        fitted.average(KEY, num_draws=10, **how)


def test_calibration_counts_every_row_once_and_its_auc_is_that_of_the_rows(fitted):
    table = fitted.calibration(KEY, by_silo=True, min_count=1, num_draws=50)
    p, _ = by_hand(fitted, 50)
    y = np.concatenate([s["y"] for s in silos_of(30, 20, 12).values()])
    assert table.rows.sum((0, 2)).tolist() == np.bincount(y).tolist()
    assert table.rows.sum((1, 2)).tolist() == [30, 20, 12]
    mean = p.mean(0)
    np.testing.assert_allclose(table.probabilities.sum(), mean.sum())
    silo = np.repeat(range(3), [30, 20, 12])
    pairs = mean[y == 1][:, None] > mean[y == 0]
    assert abs(table.auc - pairs[silo[y == 1][:, None] == silo[y == 0]].mean()) < 1e-9
    assert "AUC" in str(table)
    frame = table.to_frame()
    assert frame["rows"].sum() == 62
    np.testing.assert_allclose((frame["rows"] * frame["observed"]).sum(), y.sum())
    assert frame["rows"].dtype.kind == "i"
    of_silos = table.to_frame("all")
    assert of_silos.index.tolist() == ["A", "B", "C"]
    for j, name in enumerate("ABC"):
        own, gap = silo == j, pairs[silo[y == 1] == j][:, silo[y == 0] == j]
        expected = [own.sum(), mean[own].mean(), y[own].mean(), gap.mean(), gap.size]
        np.testing.assert_allclose(of_silos.loc[name], expected)
    number = of_silos["pairs"].sum()
    assert str(table).endswith(f"AUC {table.auc:.3f}, of {number} pairs of rows of one silo")
    together = str(fitted.calibration(KEY, num_draws=50))
    assert "silo" not in together.splitlines()[-2]


def test_bins_of_few_rows_are_told_together():
    r = np.random.default_rng(0)
    p, y = jnp.asarray(r.uniform(size=43)), jnp.asarray(r.integers(0, 2, 43) * 1.0)
    counts = jnp.arange(43) < 38
    for least in (1, 5, 38, 50):
        found = jax.jit(binned)(p, y, counts, least)
        assert found.rows.shape == (2, NUM_BINS)
        of_bin = np.asarray(found.rows.sum(0))
        assert of_bin[of_bin > 0].min() >= min(least, 38)
        np.testing.assert_allclose(found.rows.sum(1), [(y[:38] == k).sum() for k in (0, 1)])
        np.testing.assert_allclose(found.probabilities.sum(), p[:38].sum())


def hospital(t, y):
    """An effect of the hospital, and a class of each patient."""
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    with nf.silo_plate("hospital", 1):
        u = numpyro.sample("u", dist.Normal(0, 0.7))
    with nf.silo_plate("row", t.shape[0]):
        k = numpyro.sample("k", dist.Bernoulli(0.3))
        at = numpyro.deterministic("at", b[0] + b[1] * t + u[0] + k)
        numpyro.sample("y", dist.Normal(at, 1), obs=y)


@pytest.mark.slow
def test_latents_of_silos_and_rows_are_those_given_their_data_over_nodes_too():
    r = np.random.default_rng(0)
    silos = []
    for n in (20, 11, 9):
        t = r.normal(size=n)
        silos.append(dict(t=t, y=t + r.normal() + 1.2 * r.normal(size=n)))
    here = nf.fit(KEY, hospital, silos, **QUIET)
    found = here.average(KEY, "at", {"t": 2.0}, num_draws=2_000)
    parts = []
    for j, silo in enumerate(silos):
        own = here.sample_posterior(KEY, 2_000, silo=j)
        parts.append(own["at"] + own["b"][:, 1:] * (2.0 - silo["t"]))
    parts = np.concatenate(parts, 1)
    assert abs(found.draws.mean() - parts.mean()) < 0.1 * parts.mean(1).std()
    assert 0.9 < found.draws.std() / parts.mean(1).std() < 1.1

    names, policy = {"hospital": hospital}, nf.Policy(min_rows=1, parameters_per_row=9)
    nodes = [nf.Silo(silo, names=names, policy=policy) for silo in silos]
    apart = nf.Federation(InMemory([n.answer for n in nodes]), names=names, secure_sum=True)
    there = nf.fit(KEY, hospital, apart, **QUIET)
    told = there.average(KEY, "at", {"t": 2.0}, num_draws=2_000)
    np.testing.assert_allclose(told.draws, found.draws, rtol=1e-4, atol=1e-5)
    assert told.rows == 40


def risk_of_patients(t, ward, y):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    with nf.silo_plate("hospital", 1):
        u = numpyro.sample("u", dist.Normal(0, 0.7))
    with nf.silo_plate("row", t.shape[0]):
        e = numpyro.sample("e", dist.Normal(0, 0.5))
        numpyro.sample("y", dist.Bernoulli(logits=b[0] + b[1] * t + u[0] + e), obs=y)


@pytest.mark.slow
def test_draws_of_nuts_are_averaged_with_their_own_latents_of_silos_and_rows():
    r = np.random.default_rng(0)
    silos = {
        name: dict(t=r.integers(0, 2, n), ward=np.arange(n) % 2, y=r.integers(0, 2, n))
        for name, n in (("A", 8), ("B", 5))
    }
    nuts = nf.run_nuts(KEY, risk_of_patients, silos, num_warmup=50, num_samples=60, **QUIET)
    n = 40
    parts = {name: nuts.sample_posterior(KEY, n, silo=name) for name in silos}

    def risk(name, t):
        x = {k: np.asarray(v, float) for k, v in parts[name].items()}
        return expit(x["b"][:, :1] + x["b"][:, 1:] * t + x["u"] + x["e"])

    found = nuts.average(KEY, "y", {"t": [0, 1]}, num_draws=n)
    for i in (0, 1):
        expected = np.concatenate([risk(name, i) for name in silos], 1).mean(1)
        np.testing.assert_allclose(found.draws[:, i], expected, rtol=1e-9)
    own = np.concatenate([risk(name, s["t"]) for name, s in silos.items()], 1)
    ward = np.concatenate([s["ward"] for s in silos.values()])
    by_ward = nuts.average(KEY, "y", by="ward", num_groups=2, num_draws=n)
    for g in (0, 1):
        np.testing.assert_allclose(by_ward.draws[:, g], own[:, ward == g].mean(1), rtol=1e-9)
    by_silo = nuts.average(KEY, "y", by="silo", num_draws=n)
    for j, part in enumerate(np.split(own, [8], axis=1)):
        np.testing.assert_allclose(by_silo.draws[:, j], part.mean(1), rtol=1e-9)
    table = nuts.calibration(KEY, by_silo=True, min_count=1, num_draws=n)
    of_silos = [part.sum() for part in np.split(own.mean(0), [8])]
    np.testing.assert_allclose(table.probabilities.sum(1), of_silos)
    y = np.concatenate([s["y"] for s in silos.values()])
    assert table.rows.sum((0, 2)).tolist() == np.bincount(y).tolist()


@pytest.mark.slow
def test_a_silo_tells_no_groups_or_bins_of_few_rows():
    silos = list(silos_of(30, 20, 12).values())
    silos[2]["ward"][0] = 3
    names = {"logistic": logistic}
    nodes = [
        nf.Silo(s, names=names, policy=nf.Policy(min_rows=1, parameters_per_row=1.0)) for s in silos
    ]
    apart = nf.Federation(InMemory([n.answer for n in nodes]), names=names)
    there = nf.fit(KEY, logistic, apart, **QUIET)
    with pytest.raises(RefusedError, match=r"a group of rows .*min_count"):
        there.average(KEY, "p", by="ward", num_groups=4, num_draws=20)
    with pytest.raises(RefusedError, match="bins of 3 rows are asked for"):
        there.calibration(KEY, min_count=3, num_draws=20)
    assert there.calibration(KEY, num_draws=20).rows.sum() == 62
    assert there.average(KEY, "p", by="silo", num_draws=20).rows.tolist() == [30, 20, 12]


def test_a_fit_with_noise_tells_no_averages():
    private = nf.Privacy(5.0, 1e-3)
    silos = [{k: s[k] for k in ("x", "t", "ward", "y")} for s in silos_of(200, 200, 200).values()]
    fitted = nf.fit(KEY, logistic, silos, privacy=private, **QUIET)
    for asked in (lambda: fitted.average(KEY, "p"), lambda: fitted.calibration(KEY)):
        with pytest.raises(ModelError, match="noise"):
            asked()


def masked_visits(x, seen, y):
    b = numpyro.sample("b", dist.Normal(0, 1))
    with nf.silo_plate("row", x.shape[0]):
        p = numpyro.deterministic("p", jax.nn.sigmoid(b * x))
        law = dist.Bernoulli(p[:, None] * jnp.ones(3))
        numpyro.sample("y", law.mask(seen).to_event(1), obs=y)


def test_masked_elements_are_no_outcomes():
    r = np.random.default_rng(0)
    silos = []
    for n in (12, 9):
        seen = r.uniform(size=(n, 3)) < 0.6
        y = np.where(seen, 1, 0)  # what is masked is padded by zeros
        silos.append(dict(x=r.normal(size=n), seen=seen, y=y))
    fitted = nf.fit(KEY, masked_visits, silos, **QUIET)
    table = fitted.calibration(KEY, min_count=1, num_draws=20)
    assert table.rows.sum((0, 2)).tolist() == [0, sum(s["seen"].sum() for s in silos)]


def of_covariates(x, z, z_seen, y):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    with nf.silo_plate("row", y.shape[0]):
        x = numpyro.sample("x", dist.Normal(0, 1), obs=x)
        z = numpyro.sample("z", dist.Normal(0, 1), obs=z, obs_mask=z_seen)
        at = numpyro.deterministic("at", b[0] * x + b[1] * z)
        numpyro.sample("y", dist.Normal(at, 1), obs=y)


@pytest.mark.slow
def test_a_covariate_with_a_distribution_takes_what_it_is_changed_to():
    r = np.random.default_rng(0)
    silos = []
    for n in (12, 9):
        x, z, seen = r.normal(size=n), r.normal(size=n), r.uniform(size=n) < 0.7
        silos.append(dict(x=x, z=np.where(seen, z, 0.0), z_seen=seen, y=x - z + r.normal(size=n)))
    fitted = nf.fit(KEY, of_covariates, silos, **QUIET)
    b = np.asarray(fitted.sample_posterior(KEY, 30)["b"])
    found = fitted.average(KEY, "at", {"x": 2.0, "z": -1.0}, num_draws=30)
    np.testing.assert_allclose(found.draws, 2 * b[:, 0] - b[:, 1], rtol=1e-6)
    one, other = (np.asarray(fitted.average(KEY, "at", {"x": v}, num_draws=30)) for v in (1, 0))
    np.testing.assert_allclose(one - other, b[:, 0], rtol=1e-6)


def effect_of_silo(y):
    mu = numpyro.sample("mu", dist.Normal(0, 3))
    with nf.silo_plate("hospital", 1):
        u = numpyro.sample("u", dist.Normal(0, 1))
        numpyro.deterministic("effect", 2 * u)
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu + 2 * u[0], 1), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("tells", [False, True])
def test_an_effect_that_a_silo_does_not_tell_is_no_average_either(tells):
    names = {"effect_of_silo": effect_of_silo}
    policy = nf.Policy(min_rows=1, parameters_per_row=1.0, tell_latents=tells)
    silos = [dict(y=m + np.arange(9.0) / 9) for m in (0, 1, 3)]
    nodes = [nf.Silo(s, names=names, policy=policy) for s in silos]
    apart = nf.Federation(InMemory([n.answer for n in nodes]), names=names)
    there = nf.fit(KEY, effect_of_silo, apart, **QUIET)
    if tells:
        assert there.average(KEY, "effect", num_draws=20).rows == 3
        return
    with pytest.raises(RefusedError, match=r"an average over fewer rows .*tell_latents"):
        there.average(KEY, "effect", num_draws=20)
