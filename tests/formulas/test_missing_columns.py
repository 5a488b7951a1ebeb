"""Columns that rows of a formula may miss: their text is what one writes by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest

import numpyro_fed as nf
from numpyro_fed.basics.errors import DataError, DataWarning, ModelError
from numpyro_fed.data.silo_data import read
from numpyro_fed.network import InMemory
from numpyro_fed.text.split import split

formulae = pytest.importorskip("formulae")
pytestmark = pytest.mark.usefixtures("double")
KEY = jax.random.key(0)
ALL = {"age": "gaussian", "crp": "lognormal", "smokes": "bernoulli"}


def hospital(n, seed, missing=0.2):
    """Patients; their ages depend on the treatment."""
    r = np.random.default_rng(seed)
    treated, ward = r.integers(0, 2, n), np.resize(["heart", "skin"], n)
    age, smokes = r.normal(55 + 10 * treated, 11), r.integers(0, 2, n).astype(float)
    crp = np.exp(r.normal(1 + 0.02 * (age - 60), 0.6))
    y = 0.1 * age - 2 * treated + 0.5 * np.log(crp) + smokes + r.normal(size=n)
    found = pd.DataFrame(dict(age=age, crp=crp, smokes=smokes, treated=treated, ward=ward, y=y))
    for column in ALL:
        found.loc[r.uniform(size=n) < missing, column] = np.nan
    return found


def hospitals():
    return {name: hospital(n, n) for name, n in (("Basel", 40), ("Bern", 30), ("Chur", 5))}


def by_hand(age, crp, smokes, treated, ward, y=None):
    mu, sd, log_crp = NUMBERS["age"], NUMBERS["sd"], NUMBERS["log_crp"]
    x = NUMBERS["centres"]
    a = numpyro.sample("Intercept_centred", dist.Normal(NUMBERS["y"], 2.5 * NUMBERS["sd_y"]))
    b = numpyro.sample("b", dist.Normal(0, NUMBERS["widths"]).to_event(1))
    a_age = numpyro.sample("Intercept_age", dist.Normal(mu, 2.5 * sd))
    b_age = numpyro.sample("b_age", dist.Normal(0, NUMBERS["widths_age"]).to_event(1))
    s_age = numpyro.sample("sigma_age", dist.HalfNormal(2.5 * sd))
    a_crp = numpyro.sample("Intercept_crp", dist.Normal(log_crp[0], 2.5 * log_crp[1]))
    b_crp = numpyro.sample("b_crp", dist.Normal(0, NUMBERS["widths_crp"]).to_event(1))
    s_crp = numpyro.sample("sigma_crp", dist.HalfNormal(2.5 * log_crp[1]))
    share = NUMBERS["smokes"]
    a_smokes = numpyro.sample("Intercept_smokes", dist.Normal(np.log(share / (1 - share)), 2.5))
    b_smokes = numpyro.sample("b_smokes", dist.Normal(0, NUMBERS["widths_smokes"]).to_event(1))
    with nf.silo_plate("row", age.shape[0]):
        t, skin = treated - x["treated"], 1.0 * (ward == 1)
        line = a_age + b_age[0] * t + b_age[1] * skin
        age = numpyro.sample("age", dist.Normal(line, s_age), obs=age, obs_mask=~jnp.isnan(age))
        line = a_crp + b_crp[0] * (age - mu) + b_crp[1] * t + b_crp[2] * skin
        crp = numpyro.sample("crp", dist.LogNormal(line, s_crp), obs=crp, obs_mask=~jnp.isnan(crp))
        c = jnp.log(crp) - x["log(crp)"]
        line = a_smokes + b_smokes @ jnp.stack([age - mu, t, c, skin])
        law = dist.Bernoulli(logits=line)
        smokes = numpyro.sample("smokes", law, obs=smokes, obs_mask=~jnp.isnan(smokes))
        s = smokes - share
        eta = a + b @ jnp.stack([age - mu, t, c, s, skin])
        numpyro.sample("y", dist.Normal(eta, SIGMA), obs=y)


NUMBERS, SIGMA = {}, 1.0


def test_the_text_is_what_one_writes_by_hand():
    """A line of complete columns, and of the columns before it; all rows stay."""
    f = nf.formula("y ~ age + treated + log(crp) + smokes + ward", missing=ALL)
    tables = hospitals()
    silos = f.silos(tables)
    for name, table in tables.items():
        for column in (*ALL, "y"):
            np.testing.assert_array_equal(silos[name][column], table[column])
    agreed, common = f.agreed, f.written.design.common
    blocks = {label: c for c in common.columns for label in c.labels}
    sd_y = agreed.sd["y"]
    spread = np.sqrt(np.log1p((agreed.sd["crp"] / agreed.mean["crp"]) ** 2))

    def widths(scale, *labels):
        return jnp.array([2.5 * scale / blocks[label].width[0] for label in labels])

    of_age = "treated", "ward[skin]"
    NUMBERS.update(
        y=agreed.mean["y"],
        sd_y=sd_y,
        age=agreed.mean["age"],
        sd=agreed.sd["age"],
        smokes=agreed.mean["smokes"],
        log_crp=(np.log(agreed.mean["crp"]) - spread**2 / 2, spread),
        centres={label: c.centre[0] for label, c in blocks.items()},
        widths=widths(sd_y, "age", "treated", "log(crp)", "smokes", "ward[skin]"),
        widths_age=widths(agreed.sd["age"], *of_age),
        widths_crp=widths(spread, "age", *of_age),
        widths_smokes=widths(1.0, "age", "treated", "log(crp)", "ward[skin]"),
    )
    text = f.text.replace("dist.Normal(eta, sigma)", "dist.Normal(eta, 1.0)")
    text = "\n".join(line for line in text.splitlines() if "HalfNormal" not in line or "_" in line)
    names = {"__name__": "ours"}
    exec(text, names)
    data = read(list(silos.values()))
    ours, hand = (split(model, data) for model in (names["model"], by_hand))
    assert [s.name for s in ours.named("latent")] == [s.name for s in hand.named("latent")]
    z = jnp.asarray(np.random.default_rng(0).normal(size=ours.dim) * 0.3)
    np.testing.assert_allclose(
        *(fm.global_prior.log_density({}, z, fm.named("latent")) for fm in (ours, hand)), rtol=2e-3
    )
    for silo in data:
        z_L = {k: 0.3 + v for k, v in ours.zero_latents(silo).items()}
        found, expected = (fm.log_silo({}, z, z_L, silo) for fm in (ours, hand))
        for plate in expected:
            np.testing.assert_allclose(found[plate], expected[plate], rtol=2e-3)


def test_without_missing_values_the_text_is_the_old_one_and_a_line():
    f = nf.formula("y ~ age + (1 | silo)", missing={"age": "gaussian"})
    plain = nf.formula("y ~ age + (1 | silo)")
    tables = {k: v.dropna() for k, v in hospitals().items()}
    assert f.silos(tables).keys() == plain.silos(tables).keys()
    assert [line for line in plain.text.splitlines() if line not in f.text.splitlines()] == []
    added = [line.strip() for line in f.text.splitlines() if line not in plain.text.splitlines()]
    assert [line.split(" = ")[0] for line in added] == [
        "# Where age is missing it lies about a line of the columns beside it.",
        "intercept_age",
        "sigma_age",
        "age",
        "obs_mask=~jnp.isnan(age))",
    ]
    with pytest.warns(DataWarning, match=r"left out. To keep them .* formula\(missing="):
        plain.silos(hospitals())


@pytest.mark.parametrize(
    ("formula", "missing", "says"),
    [
        ("y ~ age", {"Age": "gaussian"}, "'Age' is no column .*Did you mean 'age'"),
        ("y ~ age + C(ward)", {"ward": "gaussian"}, "'ward' is no column .*Of categories make"),
        ("y | weights(crp) ~ age", {"crp": "lognormal"}, "'crp' is no column of numbers"),
        ("y ~ age", {"age": "gamma"}, r"'age' is 'gamma'; known are \['gaussian', 'lognormal'"),
    ],
)
def test_what_no_column_may_be_is_refused(formula, missing, says):
    with pytest.raises(ModelError, match=says):
        nf.formula(formula, missing=missing)


@pytest.mark.parametrize(
    ("formula", "missing", "says"),
    [
        ("y ~ ward", {"ward": "gaussian"}, "silo Basel, 'ward': missing= is for numbers"),
        ("y ~ crp", {"crp": "bernoulli"}, "'bernoulli' has the values 0 and 1 alone"),
        ("y ~ treated", {"treated": "lognormal"}, "values above zero, and the least one is 0"),
    ],
)
def test_values_that_its_distribution_cannot_have_are_refused(formula, missing, says):
    with pytest.raises(DataError, match=says):
        nf.formula(formula, missing=missing).silos(hospitals())


@pytest.mark.parametrize(
    ("term", "says"),
    [
        ("bs(age, df=4)", r"'bs\(age, df=4\)' is computed before .*s\(age\)"),
        ("log(age)", "'age' is 'gaussian', and may be below zero .* 'lognormal' is not"),
    ],
)
def test_terms_that_missing_values_cannot_have_are_refused(term, says):
    f = nf.formula(f"y ~ {term}", missing={"age": "gaussian"})
    f.silos(hospitals())
    with pytest.raises(ModelError, match=says):
        _ = f.text


def test_hospitals_that_lack_a_column_and_those_elsewhere():
    """A whole column of Chur, and the same text where tables stay at home; new rows miss it too."""
    tables = hospitals()
    tables["Chur"]["age"] = np.nan
    f, apart = (nf.formula("y ~ age * treated", missing={"age": "gaussian"}) for _ in range(2))
    silos = f.silos(tables)
    assert np.isnan(silos["Chur"]["age"]).all()
    nodes = [nf.Silo(table, names={}) for table in tables.values()]
    apart.agree(nf.Federation(InMemory([n.answer for n in nodes]), names={}), categorical=[])
    assert apart.text == f.text
    new = pd.DataFrame(dict(age=[60, None], treated=[0, 1]))
    np.testing.assert_array_equal(f.silo(new, new=True)["age"], [60, np.nan])
    with pytest.raises(DataError, match=r"miss \['treated'\]"):
        f.silo(new.assign(treated=[0, None]), new=True)


@pytest.mark.slow
def test_a_fit_with_missing_ages_is_that_of_nuts():
    """And the treatment's effect is not that of the complete rows alone, of which Chur has none."""
    tables = {"Basel": hospital(120, 0, 0.3), "Bern": hospital(80, 1, 0.3)}
    tables["Chur"] = hospital(40, 2, 0.0).assign(age=np.nan)
    tables = {name: table.assign(crp=3.0, smokes=0.0) for name, table in tables.items()}
    priors = {"sd_silo": "dist.LogNormal(-1.0, 0.3)"}  # of no funnel, for NUTS
    f = nf.formula("y ~ age + treated + (1 | silo)", missing={"age": "gaussian"}, priors=priors)
    silos = f.silos(tables)
    fitted = nf.fit(KEY, f.model, silos, progress_bar=False)
    assert fitted.trusted, fitted.verdict
    nuts = nf.run_nuts(KEY, f.model, silos, num_samples=3_000, progress_bar=False)
    rows = fitted.summary(silo="Chur").index
    assert "age[0]" in rows
    assert not [row for row in rows if "unobserved" in row]
    draws = fitted.sample_posterior(KEY, 4_000), nuts.sample_posterior(KEY, 3_000)
    for name in ("b", "b_age", "sigma_age", "sigma", "sd_silo"):
        a, b = (np.asarray(d[name]).reshape(len(d[name]), -1) for d in draws)
        assert (np.abs(a.mean(0) - b.mean(0)) < 0.12 * b.std(0)).all(), name
        assert (np.abs(a.std(0) / b.std(0) - 1) < 0.15).all(), name
