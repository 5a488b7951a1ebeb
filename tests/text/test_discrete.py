"""Discrete latents of rows: summed out exactly, and drawn given what was observed."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.scipy.special import logsumexp
from numpyro import handlers
from numpyro.contrib.control_flow import scan

import numpyro_fed as nf
from numpyro_fed.basics.errors import ModelError
from numpyro_fed.data.silo_data import read
from numpyro_fed.network import InMemory
from numpyro_fed.text.split import split

pytestmark = pytest.mark.usefixtures("double")

RNG = np.random.default_rng(0)
ROWS = 6


def plate():
    return nf.silo_plate("row", ROWS)


def log_mean(logs, weights):
    """Return the log of the sum of weights times exponentials."""
    return logsumexp(jnp.stack([log + jnp.log(w) for log, w in zip(logs, weights, strict=True)]), 0)


def normal(y, loc):
    return dist.Normal(loc, 1).log_prob(y)


def mixture(y, summed):
    p = numpyro.sample("p", dist.Beta(2, 2))
    mu = numpyro.sample("mu", dist.Normal(0, 1).expand([2]).to_event(1))
    with plate():
        if summed:
            logs = [normal(y, mu[0]), normal(y, mu[1])]
            return numpyro.factor("y", log_mean(logs, [1 - p, p]))
        k = numpyro.sample("k", dist.Bernoulli(p), infer={"enumerate": "parallel"})
        numpyro.sample("y", dist.Normal(mu[k], 1), obs=y)


def test_accuracy(y, t, summed):
    """Two tests of a disease (Hui and Walter), whose prevalence depends on a covariate."""
    b = numpyro.sample("b", dist.Normal(0, 1))
    sens, spec = (numpyro.sample(n, dist.Beta(8, 2).expand([2]).to_event(1)) for n in ("se", "sp"))
    prevalence = jax.nn.sigmoid(b * t)
    with plate():
        if summed:
            if_ill = jnp.where(y == 1, sens, 1 - sens).prod(1)
            if_well = jnp.where(y == 1, 1 - spec, spec).prod(1)
            terms = if_ill * prevalence + if_well * (1 - prevalence)
            return numpyro.factor("y", jnp.log(terms))
        ill = numpyro.sample("ill", dist.Bernoulli(prevalence))
        for i in range(2):
            p = jnp.where(ill == 1, sens[i], 1 - spec[i])
            numpyro.sample(f"y{i}", dist.Bernoulli(p), obs=y[:, i])


test_accuracy.__test__ = False


def zeros(y, summed):
    """More zeros than a Poisson distribution has; a mean of zero has no derivative at counts."""
    rate = numpyro.sample("rate", dist.LogNormal(0, 1))
    p = numpyro.sample("p", dist.Beta(2, 2))
    with plate():
        if summed:
            many = p * jnp.exp(dist.Poisson(rate).log_prob(y))
            return numpyro.factor("y", jnp.log(many + (1 - p) * (y == 0)))
        k = numpyro.sample("k", dist.Bernoulli(p))
        numpyro.sample("y", dist.Poisson(rate * k), obs=y)


def abundance(y, summed):
    """Counts of repeated visits to places with a number of animals: an N-mixture."""
    rate = numpyro.sample("rate", dist.LogNormal(0, 1))
    p = numpyro.sample("p", dist.Beta(2, 2))
    values = jnp.arange(9)
    share = jax.nn.softmax(values * jnp.log(rate))
    with plate():
        if summed:
            seen = dist.Binomial(values[:, None, None], p)
            logs = jnp.where(y <= values[:, None, None], seen.log_prob(y), -jnp.inf).sum(-1)
            return numpyro.factor("y", logsumexp(logs + jnp.log(share)[:, None], axis=0))
        n = numpyro.sample("n", dist.Categorical(share))
        numpyro.sample("y", dist.Binomial(n[:, None], p).to_event(1), obs=y)


def visits(y, summed):
    """Each visit of a row has a class of its own: sums element by element."""
    mu = numpyro.sample("mu", dist.Normal(0, 1).expand([3]).to_event(1))
    w = numpyro.sample("w", dist.Dirichlet(jnp.ones(3)))
    with numpyro.plate("visit", y.shape[1], dim=-1), nf.silo_plate("row", ROWS, dim=-2):
        if summed:
            logs = [normal(y, mu[i]) for i in range(3)]
            return numpyro.factor("y", log_mean(logs, list(w)))
        k = numpyro.sample("k", dist.Categorical(w))
        numpyro.sample("y", dist.Normal(mu[k], 1), obs=y)


def of_three(y, summed):
    """Three binary latents of a row, of which its outcome reads the number: eight joint values."""
    p = numpyro.sample("p", dist.Beta(2, 2))
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with plate():
        if summed:
            logs = [normal(y, mu * n) for n in range(4)]
            shares = [jnp.exp(dist.Binomial(3, p).log_prob(n)) for n in range(4)]
            return numpyro.factor("y", log_mean(logs, shares))
        k = numpyro.sample("k", dist.Bernoulli(p).expand([3]).to_event(1))
        numpyro.sample("y", dist.Normal(mu * k.sum(-1), 1), obs=y)


def nested(y, t, summed):
    """One latent that depends on another one, and a continuous one that depends on both."""
    p = numpyro.sample("p", dist.Beta(2, 2))
    with plate():
        if summed:
            b = numpyro.sample("b", dist.ImproperUniform(dist.constraints.real, (), ()))
            each = [(i, j) for i in range(2) for j in range(3)]
            at_one = dist.Binomial(2, p)
            shares = [
                (p if i else 1 - p) * jnp.exp((at_one if i else dist.Binomial(2, 0.5)).log_prob(j))
                for i, j in each
            ]
            logs = [normal(b, i + j) + normal(y, b * t + i) for i, j in each]
            return numpyro.factor("y", log_mean(logs, shares))
        i = numpyro.sample("i", dist.Bernoulli(p))
        j = numpyro.sample("j", dist.Binomial(2, jnp.where(i == 1, p, 0.5)))
        b = numpyro.sample("b", dist.Normal(i + j, 1))
        numpyro.sample("y", dist.Normal(b * t + i, 1), obs=y)


def weighted(y, t, summed):
    """Weights of rows are those of their sums."""
    p = numpyro.sample("p", dist.Beta(2, 2))
    with plate(), handlers.scale(scale=t):
        if summed:
            logs = [normal(y, -1), normal(y, 1)]
            return numpyro.factor("y", log_mean(logs, [1 - p, p]))
        k = numpyro.sample("k", dist.Bernoulli(p))
        numpyro.sample("y", dist.Normal(2 * k - 1, 1), obs=y)


def covariate(y, x, summed):
    """A binary covariate that is missing at some rows."""
    p = numpyro.sample("p", dist.Beta(2, 2))
    b = numpyro.sample("b", dist.Normal(0, 1))
    seen, x = ~jnp.isnan(x), jnp.nan_to_num(x)
    with plate():
        if summed:
            known = normal(y, b * x) + dist.Bernoulli(p).log_prob(x)
            missing = log_mean([normal(y, 0), normal(y, b)], [1 - p, p])
            return numpyro.factor("y", jnp.where(seen, known, missing))
        x = numpyro.sample("x", dist.Bernoulli(p), obs=x, obs_mask=seen)
        numpyro.sample("y", dist.Normal(b * x, 1), obs=y)


def two_plates(y, w, summed):
    """A class of the row that two plates of other sizes read at one dim, and two scales."""
    p = numpyro.sample("p", dist.Beta(2, 2))
    mu = numpyro.sample("mu", dist.Normal(0, 1).expand([2]).to_event(1))
    with plate(), handlers.scale(scale=2.0), handlers.scale(scale=1.5):
        if summed:
            logs = [normal(y, m).sum(0) + normal(w, -m).sum(0) for m in mu]
            return numpyro.factor("y", log_mean(logs, [1 - p, p]))
        k = numpyro.sample("k", dist.Bernoulli(p))
        with numpyro.plate("item", 3, dim=-2):
            numpyro.sample("y", dist.Normal(mu[k], 1), obs=y)
        with numpyro.plate("visit", 4, dim=-2):
            numpyro.sample("w", dist.Normal(-mu[k], 1), obs=w)


Y = RNG.normal(size=ROWS)
T = RNG.uniform(0.2, 2, ROWS)
CASES = {
    mixture: dict(y=Y),
    test_accuracy: dict(y=RNG.integers(0, 2, (ROWS, 2)), t=T),
    zeros: dict(y=np.array([0, 3, 0, 1, 0, 2])),
    abundance: dict(y=np.array([[0, 2, 1], [3, 8, 1], [0, 0, 0], [2, 2, 1], [1, 0, 0], [4, 1, 2]])),
    visits: dict(y=RNG.normal(size=(ROWS, 4))),
    of_three: dict(y=Y),
    nested: dict(y=Y, t=T),
    weighted: dict(y=Y, t=T),
    two_plates: dict(y=RNG.normal(size=(3, ROWS)), w=RNG.normal(size=(4, ROWS))),
    covariate: dict(y=Y, x=np.array([0, 1, np.nan, np.nan, 1, 0])),
}


def terms(text, data, summed):
    """Return the function to the log densities of rows of a text, and its model and data."""
    (silo,) = read([dict(data)])
    fm = split(lambda **kwargs: text(**kwargs, summed=summed), [silo])
    z_L = {p.name: 0.1 * jnp.arange(ROWS * p.dim).reshape(ROWS, p.dim) for p in fm.plates}
    return fm, silo, lambda z: fm.log_silo({}, z, z_L, silo)["row"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("text", CASES, ids=lambda text: text.__name__)
def test_the_sum_is_exact_and_so_are_its_derivatives(text):
    _, _, ours = terms(text, CASES[text], False)
    fm, _, by_hand = terms(text, CASES[text], True)
    z = jnp.asarray(np.random.default_rng(1).normal(size=fm.dim))

    def all_of(f):
        return jax.jit(lambda z: (f(z), jax.jacrev(f)(z), jax.hessian(f)(z)))(z)

    for found, expected in zip(all_of(ours), all_of(by_hand), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-11)


def test_an_outcome_that_a_state_makes_impossible_is_told_as_one_writes_it():
    """A bird that is not there is not heard: present times detection, without a branch."""

    def occupancy(y, product):
        a = numpyro.sample("a", dist.Normal(0, 1))
        heard = numpyro.sample("heard", dist.Beta(2, 2))
        with nf.silo_plate("row", ROWS, dim=-2):
            z = numpyro.sample("z", dist.Bernoulli(jax.nn.sigmoid(a)))
            with numpyro.plate("visit", 3, dim=-1):
                p = z * heard if product else jnp.where(z == 1, heard, 0.0)
                numpyro.sample("y", dist.Bernoulli(p), obs=y)

    y = np.array([[0, 0, 0], [1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0], [0, 0, 0]])
    at = jnp.array([0.4, -0.3])

    def value(product):
        (data,) = read([dict(y=y, product=product)])
        fm = split(occupancy, [data])
        return lambda z: fm.log_silo({}, z, fm.zero_latents(data), data)["row"].sum()

    for order in (lambda f: f, jax.grad, jax.hessian):
        found, expected = (order(value(product))(at) for product in (True, False))
        assert np.isfinite(found).all()
        np.testing.assert_allclose(found, expected, rtol=1e-9)
    a, p = 0.4, 1 / (1 + np.exp(0.3))
    there = 1 / (1 + np.exp(-a))
    told = p ** y.sum(1) * (1 - p) ** (3 - y.sum(1)) * there + (y.sum(1) == 0) * (1 - there)
    np.testing.assert_allclose(value(True)(at), np.log(told).sum(), rtol=1e-9)


def test_draws_are_from_the_posterior_given_all_others():
    fm, silo, _ = terms(nested, CASES[nested], False)
    z_G, b = jnp.array([0.3]), 0.1 * np.arange(ROWS)
    keys = jax.random.split(jax.random.key(0), 20_000)
    at = jax.vmap(
        lambda key: fm.constrain_local({}, z_G, {"row": jnp.asarray(b)[:, None]}, silo, key)
    )
    found, p = jax.jit(at)(keys), float(jax.nn.sigmoid(0.3))
    assert found["i"].shape == (20_000, ROWS)
    assert np.ptp(found["b"], 0).max() == 0
    logs = np.stack(
        [
            [
                np.log(p if i else 1 - p)
                + dist.Binomial(2, p if i else 0.5).log_prob(j)
                + normal(b, i + j)
                + normal(Y, b * T + i)
                for j in range(3)
            ]
            for i in range(2)
        ]
    )  # fmt: skip
    share = np.exp(logs - logsumexp(logs, axis=(0, 1)))
    se = np.sqrt(share * (1 - share) / len(keys))
    for i in range(2):
        for j in range(3):
            seen = np.mean((found["i"] == i) & (found["j"] == j), 0)
            assert (np.abs(seen - share[i, j]) < 5 * se[i, j] + 1e-4).all()


def shared(y):
    with nf.silo_plate("row", ROWS):
        k = numpyro.sample("k", dist.Bernoulli(0.5))
        numpyro.sample("y", dist.Normal(k - k.mean(), 1), obs=y)


def of_other_plate(y):
    with nf.silo_plate("ward", 1):
        k = numpyro.sample("k", dist.Bernoulli(0.5))
    with nf.silo_plate("row", ROWS):
        numpyro.sample("y", dist.Normal(k[0], 1), obs=y)


def without_end(y):
    with nf.silo_plate("row", ROWS):
        k = numpyro.sample("k", dist.Poisson(2.0))
        numpyro.sample("y", dist.Normal(k, 1), obs=y)


def too_many(y):
    with nf.silo_plate("row", ROWS):
        k = numpyro.sample("k", dist.Bernoulli(0.5).expand([7]).to_event(1))
        numpyro.sample("y", dist.Normal(k.sum(-1), 1), obs=y)


def of_all(y):
    k = numpyro.sample("k", dist.Bernoulli(0.5))
    with nf.silo_plate("row", ROWS):
        numpyro.sample("y", dist.Normal(k, 1), obs=y)


def chain(y):
    def step(k, y):
        k = numpyro.sample("k", dist.Bernoulli(jnp.where(k == 1, 0.9, 0.2)))
        numpyro.sample("y", dist.Normal(k, 1), obs=y)
        return k, None

    with nf.silo_plate("row", ROWS):
        scan(step, jnp.zeros(ROWS, int), y.T)


def scaled_apart(y):
    with nf.silo_plate("row", ROWS):
        with handlers.scale(scale=2.0):
            k = numpyro.sample("k", dist.Bernoulli(0.5))
        numpyro.sample("y", dist.Normal(k, 1), obs=y)


@pytest.mark.parametrize(
    ("text", "y", "says"),
    [
        (shared, Y, "'k' cannot be summed out row by row.*MixtureSameFamily"),
        (of_other_plate, Y, "site 'y' is outside of the silo_plate 'ward'"),
        (without_end, Y, "'k' is a discrete latent .Poisson.*not finitely many"),
        (too_many, Y, "'k', have 128 joint values.*at most 64"),
        (of_all, Y, "'k' is a discrete latent .Bernoulli.*which all rows share"),
        (chain, RNG.normal(size=(ROWS, 3)), "'k' is a discrete.*in the body of a scan.*log_tran"),
        (scaled_apart, Y, "'k' and the sites that read it.*scaled by several factors"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)  # fmt: skip
def test_what_cannot_be_summed_out_is_refused(text, y, says):
    with pytest.raises(ModelError, match=f"(?s){says}"):
        split(text, read([dict(y=y)]))


def classes(t, y=None):
    """Two classes of rows, whose shares depend on a covariate, and effects of rows beside them."""
    b = numpyro.sample("b", dist.Normal(0, 1))
    mu = numpyro.sample("mu", dist.Normal(jnp.array([-2.0, 2.0]), 0.4).to_event(1))
    with nf.silo_plate("row", t.shape[0]):
        k = numpyro.sample("k", dist.Bernoulli(jax.nn.sigmoid(b * t)))
        u = numpyro.sample("u", dist.Normal(0, 1))
        at = numpyro.deterministic("at", mu[k] + u)
        numpyro.sample("y", dist.Normal(at, 1), obs=y)


def rows_of_classes(*sizes):
    found = []
    for n in sizes:
        t = RNG.normal(size=n)
        k = RNG.uniform(size=n) < 1 / (1 + np.exp(-t))
        found.append(dict(t=t, y=4 * k - 2 + 2**0.5 * RNG.normal(size=n)))
    return found


@pytest.mark.slow
def test_a_fit_draws_them_at_its_silos_and_predicts_them_for_new_rows():
    silos, key = rows_of_classes(30, 20), jax.random.key(0)
    fitted = nf.fit(key, classes, silos, progress_bar=False)
    assert fitted.trusted
    draws = fitted.sample_posterior(key, 400, silo=1)
    assert draws["k"].shape == (400, 20)
    assert set(np.unique(draws["k"])) == {0, 1}
    np.testing.assert_allclose(
        draws["at"], np.take_along_axis(draws["mu"], draws["k"], 1) + draws["u"], rtol=1e-6
    )
    # Given the globals the classes are known in closed form, the rows' effects integrated out.
    at, spread = draws["mu"][:, :, None], 2.0**0.5
    logs = dist.Normal(at, spread).log_prob(silos[1]["y"])
    odds = jax.nn.sigmoid(logs[:, 1] - logs[:, 0] + draws["b"][:, None] * silos[1]["t"])
    se = np.sqrt(odds.mean(0) * (1 - odds.mean(0)) / 400)
    assert (abs(draws["k"].mean(0) - odds.mean(0)) < 5 * se + 1e-3).all()

    new = fitted.predict(key, dict(t=np.array([-3.0, 0.0, 3.0])), n=4_000)
    share = jax.nn.sigmoid(fitted.sample_posterior(key, 4_000)["b"][:, None] * np.array([-3, 0, 3]))
    assert set(new) == {"k", "at", "y"}
    assert (abs(new["k"].mean(0) - share.mean(0)) < 0.04).all()
    own = fitted.predict(key, silo="own rows", n=20)
    assert [o["k"].shape for o in own] == [(20, 30), (20, 20)]


@pytest.mark.slow
def test_a_fit_draws_them_given_what_a_row_has_told():
    silos = [dict(y=s["y"]) for s in rows_of_classes(20, 15)]

    def text(y):
        mu = numpyro.sample("mu", dist.Normal(jnp.array([-2.0, 2.0]), 0.4).to_event(1))
        with nf.silo_plate("row", y.shape[0]):
            k = numpyro.sample("k", dist.Bernoulli(0.5))
            numpyro.deterministic("at", mu[k])
            numpyro.sample("y", dist.Normal(mu[k], 1.5), obs=y)

    key = jax.random.key(0)
    fitted = nf.fit(key, text, silos, progress_bar=False)
    draws = {k: np.asarray(v) for k, v in fitted.sample_posterior(key, 300, silo=1).items()}
    np.testing.assert_array_equal(draws["at"], np.take_along_axis(draws["mu"], draws["k"], 1))
    logs = dist.Normal(draws["mu"][:, :, None], 1.5).log_prob(silos[1]["y"])
    share = np.asarray(jax.nn.sigmoid(logs[:, 1] - logs[:, 0])).mean(0)
    se = np.sqrt(share * (1 - share) / 300)
    assert (abs(draws["k"].mean(0) - share) < 5 * se + 1e-3).all()


@pytest.mark.slow
def test_nuts_and_loo_are_of_the_sum_and_silos_elsewhere_draw_the_same():
    silos, key = rows_of_classes(30, 20), jax.random.key(0)
    fitted = nf.fit(key, classes, silos, progress_bar=False)
    nuts = nf.run_nuts(
        key, classes, silos, num_warmup=500, num_samples=1_500, num_chains=2, progress_bar=False
    )
    draws, ours = (
        nuts.sample_posterior(key, 2_000, silo=1),
        fitted.sample_posterior(key, 2_000, silo=1),
    )
    assert abs(draws["b"].mean() - ours["b"].mean()) < 0.15 * ours["b"].std()
    assert (abs(draws["k"].mean(0) - ours["k"].mean(0)) < 0.06).all()
    assert "k" in fitted.to_arviz(silo="all").posterior

    names, policy = {"classes": classes}, nf.Policy(min_rows=1, tell_latents=True)
    nodes = [nf.Silo(silo, names=names, policy=policy) for silo in silos]
    apart = nf.Federation(InMemory([node.answer for node in nodes]), names=names)
    there = nf.fit(key, classes, apart, progress_bar=False)
    here = fitted.predict(key, silo=1, n=50)
    for name, value in nodes[1].predict(key, there.draws_for_silo(key, 50, silo=1)).items():
        np.testing.assert_allclose(value, here[name], rtol=1e-6)


@pytest.mark.slow
def test_loo_of_nuts_sums_them_out():
    silos, key = [dict(y=s["y"]) for s in rows_of_classes(40, 20)], jax.random.key(0)

    def text(y):
        p = numpyro.sample("p", dist.Beta(2, 2))
        mu = numpyro.sample("mu", dist.Normal(jnp.array([-2.0, 2.0]), 0.5).to_event(1))
        with nf.silo_plate("row", y.shape[0]):
            k = numpyro.sample("k", dist.Bernoulli(p))
            numpyro.sample("y", dist.Normal(mu[k], 1.5), obs=y)

    fitted = nf.fit(key, text, silos, progress_bar=False).loo()
    nuts = nf.run_nuts(
        key, text, silos, num_warmup=500, num_samples=1_000, progress_bar=False
    ).loo()
    assert abs(fitted.elpd - nuts.elpd) < 0.5


@pytest.mark.slow
def test_states_that_can_be_switched_are_told():
    def text(y):
        p = numpyro.sample("p", dist.Beta(2, 2))
        mu = numpyro.sample("mu", dist.Normal(0, 3).expand([2]).to_event(1))
        with nf.silo_plate("row", y.shape[0]):
            k = numpyro.sample("k", dist.Bernoulli(p))
            numpyro.sample("y", dist.Normal(mu[k], 1), obs=y)

    silos = [dict(y=RNG.normal(4 * (RNG.uniform(size=n) < 0.3) - 2, 1)) for n in (60, 30)]
    fitted = nf.fit(jax.random.key(0), text, silos, progress_bar=False)
    assert "2 modes of the same mass" in str(fitted)
    mu = fitted.sample_posterior(jax.random.key(1), 4_000)["mu"]
    assert abs((mu[:, 0] < mu[:, 1]).mean() - 0.5) < 0.05


def recursion(y, summed):
    """The remedy that the refusal of a chain names: the states of a chain, summed out in a scan."""
    p = numpyro.sample("p", dist.Beta(2, 2).expand([2]).to_event(1))
    log_transition = jnp.log(jnp.stack([jnp.stack([1 - p[0], p[0]]), jnp.stack([1 - p[1], p[1]])]))
    likelihood = dist.Normal(jnp.array([-1.0, 1.0])[:, None], 1).log_prob

    def step(log_p, y):
        log_p = logsumexp(log_p[:, None] + log_transition[..., None], 0) + likelihood(y)
        return log_p, None

    with plate():
        if summed:
            paths = np.stack(np.meshgrid(*[[0, 1]] * y.shape[1], indexing="ij")).reshape(
                y.shape[1], -1
            )
            logs = []
            for path in paths.T:
                log, state = jnp.zeros(ROWS), 0
                for t, new in enumerate(path):
                    log += log_transition[state, new] + normal(y[:, t], 2.0 * new - 1)
                    state = new
                logs.append(log)
            return numpyro.factor("chain", logsumexp(jnp.stack(logs), 0))
        start = jnp.log(jnp.array([1.0, 0.0]))[:, None] * jnp.ones(ROWS)
        log_p, _ = scan(step, start, y.T)
        numpyro.factor("chain", logsumexp(log_p, 0))


def test_the_recursion_that_a_refusal_names_is_the_sum_over_all_chains():
    data = dict(y=RNG.normal(size=(ROWS, 4)))
    _, _, ours = terms(recursion, data, False)
    fm, _, by_hand = terms(recursion, data, True)
    z = jnp.asarray(np.random.default_rng(1).normal(size=fm.dim))
    for f in (lambda g: g, jax.jacrev):
        np.testing.assert_allclose(jax.jit(f(ours))(z), jax.jit(f(by_hand))(z), rtol=1e-9)
