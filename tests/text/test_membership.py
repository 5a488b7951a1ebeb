"""Rows that belong to rows of another plate, as visits to patients: found when it is so, exact."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from cases import slow_but
from scipy import stats

import numpyro_fed as nf
from numpyro_fed.data.silo_data import read
from numpyro_fed.guides.laplace import Laplace
from numpyro_fed.guides.quadrature import RowIntegrals, default_nodes, silo_integral
from numpyro_fed.guides.silo_bounds import AtDraw
from numpyro_fed.guides.structured import build_guide, resolve_guide
from numpyro_fed.network import InMemory
from numpyro_fed.numerics.gaussian import Coordinates
from numpyro_fed.text.membership import member_index
from numpyro_fed.text.plan import agree
from numpyro_fed.text.split import split
from numpyro_fed.weigh.integration import SiloLikelihood

QUIET = dict(progress_bar=False)
SIZES = {"A": (5, 13), "B": (3, 8)}  # children and visits


def silo_of(children, visits, seed=0):
    r = np.random.default_rng(seed)
    child = r.permutation(np.resize(np.arange(children), visits)).astype(np.int32)
    ward = r.integers(0, 2, visits).astype(np.int32)
    x, y = r.normal(size=(2, visits))
    of_child = (np.arange(children) % 2).astype(np.int32)
    size = dict(n_child=children, n_ward=2)
    return dict(x=x, child=child, ward=ward, ward_of_child=of_child, **size, y=y)


def text(eta, effect=None, visit=None, first=None):
    """A text whose visits have a predictor ``eta(r, q, b, **data)``: of children, wards, globals.

    ``effect`` is the distribution of a child's effect, given the wards' effects and data, ``first``
    runs among the children, and ``visit`` gives a latent of each visit.
    """

    def model(x, child, ward, ward_of_child, n_child, n_ward, y=None):
        b = numpyro.sample("b", dist.Normal(0, 2).expand([2]).to_event(1))
        with nf.silo_plate("silo", 1):
            s = numpyro.sample("s", dist.Normal(0, 1))
        with nf.silo_plate("ward", n_ward):
            q = numpyro.sample("q", dist.Normal(0, 0.7))
        with nf.silo_plate("child", n_child):
            r = numpyro.sample("r", (effect or (lambda *_: dist.Normal(0, 1.5)))(q, ward_of_child))
            if first:
                first(r)
        with nf.silo_plate("visit", x.shape[0]):
            more = visit() if visit else 0.0
            data = dict(x=x, child=child, ward=ward, s=s)
            numpyro.sample("y", dist.Normal(eta(r, q, b, **data) + more, 0.5), obs=y)

    return model


def slopes(q, of):
    return dist.MultivariateNormal(jnp.zeros(2), jnp.array([[1.0, 0.3], [0.3, 0.5]]))


def nested(q, of):
    return dist.Normal(q[of], 1.5)


BELOW = {
    "an effect": text(lambda r, q, b, x, child, **_: b[0] + b[1] * x + r[child]),
    "in two places": text(lambda r, q, b, x, child, **_: jnp.exp(r[child]) * x + r[child]),
    "correlated slopes": text(
        lambda r, q, b, x, child, **_: r[child, 0] + (x[:, None] * r[child])[:, 1], slopes
    ),
    "beside one of the silo": text(lambda r, q, b, s, x, child, **_: b[0] + s[0] + r[child]),
    "under a mean of theirs": text(lambda r, q, b, child, **_: b[0] + r[child], nested),
    "computed of data": text(lambda r, q, b, child, **_: r[child[::-1] % 3]),
    "beyond the range": text(lambda r, q, b, child, **_: r.at[child + 2].get(mode="clip")),
    "of none": text(
        lambda r, q, b, child, **_: r.at[child - 2].get(
            mode="fill", fill_value=0.3, wrap_negative_indices=False
        )
    ),
    "beside globals": text(lambda r, q, b, child, ward, **_: r[child] + b[ward]),
    "transformed": text(lambda r, q, b, child, **_: jnp.log1p(r**2)[child]),
}
OTHERS = {
    "two that cross": text(lambda r, q, b, child, ward, **_: r[child] + q[ward]),
    "another by weights": text(
        lambda r, q, b, child, ward, **_: r[child] + jax.nn.one_hot(ward, 2) @ q
    ),
    "another by a condition": text(
        lambda r, q, b, child, ward, **_: r[child] + jnp.where(ward == 0, q[0], q[1])
    ),
    "two indices": text(lambda r, q, b, child, **_: r[child] + r[child * 0]),
    "a mean of all": text(lambda r, q, b, child, **_: r[child] - r.mean()),
    "others' visits": text(lambda r, q, b, child, **_: r[child] - r[child].mean()),
    "a latent of the visit": text(
        lambda r, q, b, child, **_: r[child],
        visit=lambda: numpyro.sample("v", dist.Normal(0, 1)),
    ),
    "children that read each other": text(
        lambda r, q, b, child, **_: r[child],
        first=lambda r: numpyro.factor("apart", -((r - r.mean()) ** 2)),
    ),
}


@pytest.mark.parametrize("name", [*BELOW, *OTHERS])
def test_visits_belong_to_children_where_the_text_shows_it(name):
    silos = read([silo_of(*size) for size in SIZES.values()])
    fm = split({**BELOW, **OTHERS}[name], silos)
    assert fm.below == ({"visit": "child"} if name in BELOW else {})


def test_a_silo_with_one_ward_knows_that_others_may_have_more():
    one = silo_of(5, 13) | dict(ward=np.zeros(13, np.int32), n_ward=1)
    assert split(OTHERS["two that cross"], read([one])).below == {}


@pytest.mark.parametrize("sizes", [(1, 4), (4, 1), (4, 4), (1, 1)])
def test_they_do_at_a_silo_of_any_size(sizes):
    silos = read([silo_of(5, 13), silo_of(*sizes)])
    model = BELOW["correlated slopes"]
    assert split(model, silos).below == split(model, silos[1:]).below == {"visit": "child"}


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", BELOW)
def test_a_childs_term_holds_its_visits_alone(name):
    (data,) = read([silo_of(5, 13)])
    fm = split(BELOW[name], [data])
    r = np.random.default_rng(1)
    z_G = jnp.asarray(r.normal(size=fm.dim))
    z_L = {p.name: jnp.asarray(r.normal(size=(fm.sizes(data)[p.name], p.dim))) for p in fm.plates}
    each, joined = fm.log_silo({}, z_G, z_L, data), fm.log_grouped({}, z_G, z_L, data)
    child = np.asarray(data.arrays["child"])
    others = {
        "computed of data": child[::-1] % 3,
        "beyond the range": np.minimum(child + 2, 4),
        "of none": np.maximum(child - 2, 0),
    }
    index = others.get(name, child)
    np.testing.assert_array_equal(
        member_index(fm.traces.at(data), "visit", "child", data.arrays), index
    )
    expected = np.asarray(each["child"]) + np.bincount(index, np.asarray(each["visit"]), 5)
    np.testing.assert_allclose(joined["child"], expected, rtol=1e-12)
    assert joined.keys() == each.keys() - {"visit"}
    moved = {**z_L, "child": z_L["child"].at[2].add(0.3)}
    changed = np.asarray(fm.log_grouped({}, z_G, moved, data)["child"]) != joined["child"]
    assert changed.tolist() == [False, False, True, False, False]
    twice = replace(data, weights={"visit": 2.0})
    expected += np.bincount(index, np.asarray(each["visit"]), 5)
    np.testing.assert_allclose(fm.log_grouped({}, z_G, z_L, twice)["child"], expected, rtol=1e-12)


def test_outcomes_may_look_globals_up_and_be_ordinal():
    def model(y, child, n_child):
        cut = numpyro.sample("cut", dist.Normal(jnp.array([-1.0, 1.0]), 0.1).to_event(1))
        with nf.silo_plate("child", n_child):
            r = numpyro.sample("r", dist.Normal(0, 1.5))
        with nf.silo_plate("visit", y.shape[0]):
            numpyro.sample("y", dist.OrderedLogistic(r[child], cut), obs=y)

    silo = visits(4, 3)
    (data,) = read([silo | dict(y=np.resize([0, 1, 2], 12))])
    assert split(model, [data]).below == {"visit": "child"}


def test_a_plate_belongs_to_one_other():
    """Where visits of a belong to b, and more rows look a up, nothing of a is apart."""

    def model(y, more):
        with nf.silo_plate("a", 6):
            a = numpyro.sample("of_a", dist.Normal(0, 1))
        with nf.silo_plate("b", 4):
            b = numpyro.sample("of_b", dist.Normal(0, 1))
        with nf.silo_plate("visit", 12):
            mean = a[np.arange(12) // 2] + b[np.arange(12) // 3]
            numpyro.sample("y", dist.Normal(mean, 1), obs=y)
        with nf.silo_plate("lab", 18):
            numpyro.sample("z", dist.Normal(a[np.arange(18) // 3], 1), obs=more)

    (data,) = read([dict(y=np.zeros(12), more=np.zeros(18))])
    fm = split(model, [data])
    assert (fm.below, fm.outer_plates) == ({}, ("a", "b"))


def test_a_text_of_another_form_at_other_sizes_is_refused():
    def model(y, child, n_child):
        with nf.silo_plate("child", n_child):
            r = numpyro.sample("r", dist.Normal(0, 1))
        with nf.silo_plate("visit", y.shape[0]):
            effect = r[child] if n_child < 5 else r[child] - r.mean()
            numpyro.sample("y", dist.Normal(effect, 1), obs=y)

    few, many = read([visits(4, 3), visits(6, 3)])
    assert split(model, [few, many]).below == {}
    fm = split(model, [few])
    z_L = {"child": jnp.zeros((6, 1)), "visit": jnp.zeros((18, 0))}
    with pytest.raises(ValueError, match="form depends on sizes: is the 'child' of 'visit'"):
        fm.log_grouped({}, jnp.zeros(0), z_L, many)


@pytest.mark.parametrize("with_wards", slow_but([False, True], 0))
def test_all_parties_know_from_the_plan_alone(with_wards):
    silos = [visits(6, 3), visits(3, 7)]
    if with_wards:
        for silo, ward in zip(silos, ([0, 1, 1, 0, 1, 1], [0, 0, 0]), strict=True):
            silo |= dict(ward=np.array(ward, np.int32), n_ward=max(ward) + 1)
    model = by_wards if with_wards else by_visits
    plan = agree([nf.describe(model, silo) for silo in silos])
    fm = split(model, [plan.template()])
    assert fm.below == {"visit": "child"}
    assert fm.outer_plates == (("ward",) if with_wards else ())


def by_visits(y, child, n_child):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    with nf.silo_plate("child", n_child):
        r = numpyro.sample("r", dist.Normal(mu, 1.5))
    with nf.silo_plate("visit", y.shape[0]):
        numpyro.sample("y", dist.Normal(r[child], 0.5), obs=y)


def by_wards(y, child, ward, n_ward, n_child=0):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    with nf.silo_plate("ward", n_ward):
        q = numpyro.sample("q", dist.Normal(mu, 0.8))
    with nf.silo_plate("child", ward.shape[0]):
        r = numpyro.sample("r", dist.Normal(q[ward], 1.5))
    with nf.silo_plate("visit", y.shape[0]):
        numpyro.sample("y", dist.Normal(r[child], 0.5), obs=y)


def visits(children, each, seed=0):
    r, number = np.random.default_rng(seed), children * each
    child = r.permutation(np.repeat(np.arange(children), each)).astype(np.int32)
    return dict(y=r.normal(1, 2, number), child=child, n_child=children)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("with_wards", slow_but([False, True], 0))
def test_the_integral_over_children_and_wards_is_that_of_the_normal_distribution(with_wards):
    silo, model = visits(6, 3), by_visits
    child = silo["child"]
    cov = 0.25 * np.eye(18) + 2.25 * (child[:, None] == child)
    if with_wards:
        silo |= dict(ward=np.array([0, 1, 1, 0, 1, 1], np.int32), n_ward=2)
        ward, model = silo["ward"][child], by_wards
        cov += 0.64 * (ward[:, None] == ward)
    (data,) = read([silo])
    fm = split(model, [data])
    assert (fm.outer_plates, fm.row_plates) == (("ward",) * with_wards, ("child",))
    assert default_nodes(fm)
    value, modes = silo_integral(fm)({}, jnp.array([0.7]), data, Laplace(fm).start(data))
    exact = stats.multivariate_normal(np.full(18, 0.7), cov).logpdf(silo["y"])
    np.testing.assert_allclose(value, exact, rtol=1e-10)
    assert modes["child"].shape == (6, 1)


@pytest.mark.usefixtures("double")
def test_drawn_children_and_terms_of_visits_are_those_of_the_normal_distribution():
    """Given a draw of its child's effect, a visit has the density of the text."""
    silo = visits(4, 3)
    (data,) = read([silo])
    fm = split(by_visits, [data])
    z_G, rows = jnp.array([0.7]), RowIntegrals(fm)
    near = rows.near({}, z_G, data, Laplace(fm).start(data))
    keys = jax.random.split(jax.random.key(1), 4_000)
    z = np.asarray(jax.vmap(lambda k: rows.sample(k, {}, z_G, near, data)["child"][:, 0])(keys))
    precision = 1 / 2.25 + 3 / 0.25
    mean = (0.7 / 2.25 + np.bincount(silo["child"], silo["y"]) / 0.25) / precision
    assert (abs(z.mean(0) - mean) < 4 * (precision / 4_000) ** -0.5 / precision).all()
    assert (abs(z.std(0) * precision**0.5 - 1) < 0.05).all()
    found = rows.log_rows(keys[0], {}, z_G, near, data)
    assert found.keys() == {"visit"}
    drawn = rows.sample(keys[0], {}, z_G, near, data)["child"][:, 0]  # at the same key
    expected = stats.norm(drawn[silo["child"]], 0.5).logpdf(silo["y"])
    np.testing.assert_allclose(found["visit"], expected, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.usefixtures("double")
def test_by_weighted_draws_a_visit_has_the_density_of_the_posterior():
    silo = visits(4, 3)
    (data,) = read([silo])
    fm = split(by_visits, [data])
    guide = build_guide(None, resolve_guide(None, fm, {"child": 4}, {"child": 4}), fm)
    likelihood = SiloLikelihood(fm, guide, {"child": 64})
    z_G = jnp.array([0.7])
    at = Coordinates(z_G, z_G)
    given = AtDraw({}, guide.init_local(jax.random.key(0), data), z_G, at, data)
    keys = jax.random.split(jax.random.key(1), 2_000)
    found = np.asarray(jax.vmap(lambda k: likelihood.log_rows(k, given)["visit"])(keys))
    precision = 1 / 2.25 + 3 / 0.25
    mean = (0.7 / 2.25 + np.bincount(silo["child"], silo["y"]) / 0.25) / precision
    sd = (1 / precision + 0.25) ** 0.5
    exact = stats.norm(mean[silo["child"]], sd).pdf(silo["y"])
    density = np.exp(found)
    error = density.std(0) / 2_000**0.5
    assert (abs(density.mean(0) - exact) < 4.5 * error + 0.01 * exact).all()


@pytest.mark.slow
def test_padding_and_partition_change_nothing():
    """Two silos of unlike sizes, padded to one shape, have the terms that each has by itself."""
    silos = [visits(6, 3), visits(3, 2, 1)]
    fitted = nf.fit(jax.random.key(0), by_visits, silos, **QUIET)
    assert fitted.trusted
    y = np.concatenate([s["y"] for s in silos])
    child = np.concatenate([silos[0]["child"], 6 + silos[1]["child"]])
    cov = 0.25 * np.eye(len(y)) + 2.25 * (child[:, None] == child)
    solved = np.linalg.solve(cov, np.stack([np.ones(len(y)), y], -1)).sum(0)
    precision = 1 / 4 + solved[0]
    mu = np.asarray(fitted.sample_posterior(jax.random.key(1), 4_000)["mu"])
    assert abs(mu.mean() - solved[1] / precision) < 0.06 * precision**-0.5
    assert 0.95 < mu.std() * precision**0.5 < 1.05
    own = fitted.sample_posterior(jax.random.key(2), 300, silo=1)
    assert own["r"].shape == (300, 3)
    assert fitted.loo().num_rows == len(y)


@pytest.mark.slow
def test_wards_and_children_over_nodes_are_those_of_one_process():
    silos = [visits(6, 3), visits(4, 5, 1), visits(3, 7, 2)]
    for silo, ward in zip(silos, ([0, 1, 1, 0, 1, 1], [0, 0, 1, 1], [0, 0, 0]), strict=True):
        silo |= dict(ward=np.array(ward, np.int32), n_ward=max(ward) + 1)
    here = nf.fit(jax.random.key(0), by_wards, silos, **QUIET)
    names, policy = {"wards": by_wards}, nf.Policy(min_rows=1, parameters_per_row=9)
    nodes = [nf.Silo(silo, names=names, policy=policy) for silo in silos]
    apart = nf.Federation(InMemory([n.answer for n in nodes]), names=names)
    there = nf.fit(jax.random.key(0), by_wards, apart, **QUIET)
    assert here.trusted
    assert here.num_exchanges == there.num_exchanges
    for name, draws in here.sample_posterior(jax.random.key(1), 200).items():
        other = there.sample_posterior(jax.random.key(1), 200)[name]
        np.testing.assert_allclose(other, draws, rtol=1e-4, atol=1e-5)
    y, ward, child = (np.concatenate(part) for part in _pooled(silos))
    cov = 0.25 * np.eye(len(y)) + 2.25 * (child[:, None] == child)
    cov += 0.64 * (ward[child][:, None] == ward[child])
    solved = np.linalg.solve(cov, np.stack([np.ones(len(y)), y], -1)).sum(0)
    precision = 1 / 4 + solved[0]
    mu = np.asarray(here.sample_posterior(jax.random.key(1), 4_000)["mu"])
    assert abs(mu.mean() - solved[1] / precision) < 0.06 * precision**-0.5
    assert 0.95 < mu.std() * precision**0.5 < 1.05


def _pooled(silos):
    """Outcomes, the ward of each child and the child of each visit, numbered over all silos."""
    wards, children = np.cumsum([0, *(s["n_ward"] for s in silos)]), np.cumsum([0, 6, 4, 3])
    return (
        [s["y"] for s in silos],
        [s["ward"] + n for s, n in zip(silos, wards, strict=False)],
        [s["child"] + n for s, n in zip(silos, children, strict=False)],
    )


def test_visits_of_a_minibatch_are_not_weighed_together():
    optim, objective = optax.adam(0.05), nf.LocallyEnhanced(9)
    sfvi = nf.SFVI(by_visits, optim=optim, batch_size=4, start=None, objective=objective)
    with pytest.raises(nf.GuideError, match="9 draws at silo_plate 'child', above the rows"):
        sfvi.run(jax.random.key(0), 1, [visits(6, 3), visits(4, 3, 1)], **QUIET)
