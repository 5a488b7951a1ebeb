"""Latents of rows by a network that reads them."""

import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

import numpyro_fed as nf
from numpyro_fed.data.minibatches import MinibatchNoise, rows_at
from numpyro_fed.data.silo_data import read
from numpyro_fed.guides.local_guides import with_encoders
from numpyro_fed.guides.objectives import draws_by_plate
from numpyro_fed.guides.silo_bounds import AtDraw, SiloBound
from numpyro_fed.guides.structured import build_guide, resolve_guide
from numpyro_fed.numerics.gaussian import Coordinates
from numpyro_fed.rounds.step import replayed_part
from numpyro_fed.sfvi.algorithm import SFVIAlgorithm
from numpyro_fed.text.layout import layout_and_buckets, minibatches_of_plates
from numpyro_fed.text.plan import agree, facts_of

KEY, QUIET = jax.random.key(0), dict(progress_bar=False)
WIDTH, NOISE = 0.8, 0.5
GAIN = WIDTH**2 / (WIDTH**2 + NOISE**2)


def model(x, y):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    with nf.silo_plate("row", y.shape[0]):
        u = numpyro.sample("u", dist.Normal(x @ b, WIDTH))
        numpyro.sample("y", dist.Normal(u, NOISE), obs=y)


def silos_of(*sizes, unit=1.0):
    r, found = np.random.default_rng(0), []
    for n in sizes:
        x = r.normal(size=(n, 2))
        u = x @ np.array([1.0, -0.5]) + WIDTH * r.normal(size=n)
        found.append(dict(x=x * unit, y=u + NOISE * r.normal(size=n)))
    return found


class Shrink(eqx.Module):
    """The posterior of a row given the globals, if its two numbers are right."""

    gain: jax.Array
    log_scale: jax.Array

    def __init__(self, gain=GAIN, scale=NOISE * GAIN**0.5):
        self.gain, self.log_scale = jnp.array(gain), jnp.log(jnp.array([scale]))

    def __call__(self, row, z_G):
        loc = (1 - self.gain) * (row["x"] @ z_G["b"]) + self.gain * row["y"]
        return loc[None], self.log_scale


class Split:
    """The parts of a fit."""

    def __init__(self, spec, *sizes, objective=nf.ELBO(), text=model):  # noqa: B008
        held = read(silos_of(*sizes))
        self.layout, (bucket,) = layout_and_buckets(text, held)
        fm = self.layout.model
        pairs = zip(held, self.layout.sizes, strict=True)
        self.plan = agree([facts_of(fm, data, size) for data, size in pairs])
        resolved = resolve_guide(spec, fm, dict(self.plan.largest), dict(self.plan.total))
        self.guide = build_guide(spec, resolved, fm, self.plan.row_of)
        self.fm = with_encoders(fm, self.guide.encoders)
        self.bound = SiloBound(self.fm, self.guide, draws_by_plate(objective, self.guide))
        self.held, self.data = held, jax.tree.map(jnp.asarray, bucket.data)


def test_an_exact_network_gives_the_marginal_likelihood_and_no_noise(double):
    split = Split(nf.guides.Amortised(encoder=Shrink()), 7)
    theta, z_G = split.fm.init_theta(KEY), jnp.array([0.3, -0.2])
    data = split.held[0]
    eta = split.guide.init_local(KEY, data)
    assert eta["row"]["loc"].shape == (7, 0)

    @jax.jit
    def bound(theta, z_G, eps):
        seen = Coordinates(z_G, jnp.zeros(2))
        return split.bound.value(AtDraw(theta, eta, z_G, seen, data), eps)

    def marginal(z_G):
        x, y = data.arrays["x"], data.arrays["y"]
        return dist.Normal(x @ z_G, np.hypot(WIDTH, NOISE)).log_prob(y).sum()

    for seed in range(3):
        eps = split.bound.noise(jax.random.key(seed), {"row": 7}, 1)
        eps = {"row": eps["row"][:, 0]}
        np.testing.assert_allclose(bound(theta, z_G, eps), marginal(z_G), rtol=1e-12)
        of_theta, of_z = jax.grad(bound, (0, 1))(theta, z_G, eps)
        np.testing.assert_allclose(of_z, jax.grad(marginal)(z_G), rtol=1e-10)
        for slope in jax.tree.leaves(of_theta):
            np.testing.assert_allclose(slope, 0.0, atol=1e-10)


@pytest.mark.parametrize("objective", [nf.ELBO(), nf.LocallyEnhanced(draws=3)])
def test_gradients_are_those_of_the_bound(double, objective):
    """Against the derivative of its value, as means over the same draws of noise."""
    spec = nf.guides.Amortised(encoder=Shrink(0.5, 0.7))
    split = Split(spec, 3, objective=objective)
    plain = SiloBound(split.fm, split.guide, draws_by_plate(objective, split.guide), plain=True)
    theta, z_G = split.fm.init_theta(KEY), jnp.array([0.3, -0.2])
    data = split.held[0]
    eta = split.guide.init_local(KEY, data)
    noise = split.bound.noise(KEY, {"row": 3}, 40_000)["row"]

    def slopes(bound):
        def one(eps):
            def value(theta, z_G):
                seen = Coordinates(z_G, jnp.zeros(2))
                return bound.value(AtDraw(theta, eta, z_G, seen, data), {"row": eps})

            return jax.grad(value, (0, 1))(theta, z_G)

        return jax.jit(jax.vmap(one, 1))(noise)

    def check(a, b):
        error = jnp.hypot(a.std(0), b.std(0)) / len(a) ** 0.5
        assert (abs(a.mean(0) - b.mean(0)) < 4 * error + 1e-9).all()

    jax.tree.map(check, slopes(split.bound), slopes(plain))


@pytest.mark.slow
def test_gradients_of_minibatches_are_unbiased(double):
    split = Split(nf.guides.Amortised(hidden=3), 9, 4)
    cut = minibatches_of_plates(split.fm, split.layout.possible_plates, 4)
    settings = split.guide, split.bound, optax.sgd(1.0), 1, 2
    whole, some = (
        SFVIAlgorithm(split.fm, *settings, minibatches=batches) for batches in (None, cut)
    )
    server = whole.init_server(KEY)
    round_ = whole.algorithm().round
    down = replayed_part(round_, server, round_.noise(KEY), jnp.arange(1))
    states = jax.vmap(whole.init_silo, (None, 0))(KEY, split.data)
    noise = jax.vmap(whole.step_noise)(jax.random.split(KEY, 2), states.params)

    def ask(parts, noise):
        reply, _ = jax.vmap(parts.answer, (0, None, 0, 0))(noise, down, states, split.data)
        return reply.up

    def minibatch(key):
        which = jax.vmap(cut.noise)(jax.random.split(key, 2))

        def of_silo(which, data, noise):
            return MinibatchNoise(rows_at(noise.rows, cut.draw(which, data)[1]), which)

        return ask(some, jax.vmap(of_silo)(which, split.data, noise))

    keys = jax.random.split(jax.random.key(1), 3_000)
    found = jax.jit(lambda keys: jax.lax.map(minibatch, keys, batch_size=100))(keys)

    def check(a, b):
        error = a.std(0) / len(a) ** 0.5
        assert (abs(a.mean(0) - b) < 4.5 * error + 1e-9 * (1 + abs(b))).all()

    jax.tree.map(check, found, ask(whole, noise))


@pytest.mark.slow
@pytest.mark.parametrize(("unit", "batch_size"), [(1.0, None), (1e-4, None), (1e5, 16)])
def test_a_run_in_any_unit_reaches_the_posterior(unit, batch_size):
    def scaled(x, y):
        model(x / unit, y)

    silos = silos_of(40, 25, 60, unit=unit)
    sfvi = nf.SFVI(scaled, guide=nf.guides.Amortised(), batch_size=batch_size)
    result = sfvi.run(KEY, 3_000, silos, **QUIET)
    x, y = (np.concatenate([s[k] for s in silos_of(40, 25, 60)]) for k in ("x", "y"))
    variance = WIDTH**2 + NOISE**2
    covariance = np.linalg.inv(x.T @ x / variance + np.eye(2))
    mean, sd = covariance @ x.T @ y / variance, np.sqrt(np.diag(covariance))
    b = result.sample_posterior(jax.random.key(1), 4_000)["b"]
    assert (abs(b.mean(0) - mean) < 0.4 * sd).all()
    u = np.asarray(result.sample_posterior(jax.random.key(1), 4_000, silo=1)["u"])
    own = silos_of(40, 25, 60)[1]
    at = own["x"] @ mean
    expected = at + GAIN * (own["y"] - at)
    spread = np.sqrt(GAIN * NOISE**2 + (1 - GAIN) ** 2 * np.einsum(
        "ni,ij,nj->n", own["x"], covariance, own["x"]
    ))  # fmt: skip
    assert np.sqrt(np.mean(((u.mean(0) - expected) / spread) ** 2)) < 0.4
    assert abs(np.mean(u.std(0) / spread) - 1) < 0.15


@pytest.mark.slow
def test_what_is_read_is_standardised_over_all_rows(double):
    silos = silos_of(9, 4, 6)
    sfvi = nf.SFVI(model, guide=nf.guides.Amortised())
    result = sfvi.run(KEY, 1, silos, **QUIET)
    phi = result.state.server.params.theta["encoder of 'row'"]
    every = [np.c_[s["x"], s["y"]] for s in silos]
    read = np.concatenate(every)
    np.testing.assert_allclose(phi["shift"], read.mean(0), rtol=1e-12)
    np.testing.assert_allclose(phi["scale"], read.std(0), rtol=1e-12)
    sent = [row.exchange for row in sfvi.cost(silos).communication.messages.rows]
    assert list(dict.fromkeys(sent)) == ["means", "deviations", "sfvi"]


@pytest.mark.slow
def test_averages_take_networks_too(tmp_path):
    silos = silos_of(30, 30)
    avg = nf.SFVIAvg(model, guide=nf.guides.Amortised(hidden=8), local_steps=100)
    result = avg.run(KEY, 5, silos, **QUIET)
    assert result.losses[-1] < result.losses[0]
    result.save(tmp_path / "fit")
    again = avg.load(tmp_path / "fit", silos)
    for j in range(2):
        np.testing.assert_array_equal(
            again.sample_posterior(KEY, 3, silo=j)["u"],
            result.sample_posterior(KEY, 3, silo=j)["u"],
        )
    assert set(result.params["encoder of 'row'"]) >= {"shift", "scale"}


@pytest.mark.slow
def test_a_corrected_posterior_begins_at_the_networks(double):
    """Rows' proposals are refined from where the network puts them."""
    silos = silos_of(8, 5)
    guide = nf.guides.Amortised(encoder=Shrink())
    result = nf.SFVI(model, guide=guide).run(KEY, 1_500, silos, **QUIET)
    found = nf.importance_correct(KEY, result)
    assert found.pareto_k < 0.7


def above(x, y):
    with nf.silo_plate("ward", 2):
        v = numpyro.sample("v", dist.Normal(0, 1))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(v.sum() + x[:, 0], 1), obs=y)


class Wide(eqx.Module):
    def __call__(self, row, z_G):
        return jnp.zeros(3), jnp.zeros(1)


class Wrong(eqx.Module):
    def __call__(self, row, z_G):
        return row["z"]


@pytest.mark.parametrize(
    ("method", "text", "guide", "words"),
    [
        (nf.SFVI, model, dict(encoder=Wide()), r"\[\(3,\), \(1,\)\]: expected a pair"),
        (nf.SFVI, model, dict(encoder=Wrong()), "raised KeyError for a row of"),
        (nf.SFVI, above, {}, "silo_plate 'ward': rows"),
        (nf.PVI, model, {}, "Use SFVI or SFVIAvg"),
    ],
)
def test_networks_that_do_not_fit_are_refused(method, text, guide, words):
    with pytest.raises(nf.GuideError, match=words):
        method(text, guide=nf.guides.Amortised(**guide)).run(KEY, 1, silos_of(5, 4), **QUIET)


@pytest.mark.slow
def test_settings_that_contradict_each_other_are_refused(monkeypatch):
    with pytest.raises(nf.GuideError, match="drop one"):
        nf.guides.Amortised(hidden=8, encoder=Shrink())
    with pytest.raises(nf.GuideError, match=r"must be an equinox\.Module"):
        nf.guides.Amortised(encoder=3)
    first = nf.SFVI(model).run(KEY, 1, silos_of(5, 4), **QUIET)
    with pytest.raises(nf.GuideError, match="which network"):
        nf.SFVI(model, guide=nf.guides.Amortised(), start=first).run(
            KEY, 1, silos_of(5, 4), **QUIET
        )
    monkeypatch.setitem(sys.modules, "equinox", None)
    with pytest.raises(nf.MissingExtraError, match="equinox"):
        nf.SFVI(model, guide=nf.guides.Amortised()).run(KEY, 1, silos_of(5, 4), **QUIET)
