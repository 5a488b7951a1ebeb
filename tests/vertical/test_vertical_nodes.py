"""Vertical models over nodes, with bytes between the parties."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from apart import Apart
from laid_open import key_at, laid_open_columns, secret_of
from silo_process import NAMES
from vertical_problems import KEY, data, gaussian, linear, one_silo, over_nodes

import numpyro_fed as nf
from numpyro_fed.network.silo_runs import SiloRuns
from numpyro_fed.rounds.exchange import ExchangeId
from numpyro_fed.text.clients import digest, read_ids


@pytest.mark.slow
@pytest.mark.parametrize("settings", [dict(rank=3), dict(rho=0.5)])
def test_parties_draw_together_and_each_keeps_its_own(settings):
    """The covariance of all parties' draws is that of a fit in one process."""
    xs, y = data()
    vfl = nf.VFL(gaussian, start=None, optim=optax.adam(0.1), **settings)
    nodes, run = over_nodes(vfl, secret=None)
    apart, n = run(30), 4_000
    with pytest.raises(nf.DataError, match="no draws"):
        nodes[0].draws()
    if settings.get("rank"):
        nf.importance_correct(KEY, apart, 20)  # leaves clients as they are
    together = vfl.run(KEY, 30, xs, y, progress_bar=False)
    at_server = apart.sample_together(jax.random.key(5), n)
    assert set(at_server) == {"b", "sigma"}
    sites = {**at_server}
    for j, node in enumerate(nodes):
        sites |= {f"client_{j}/{name}": value for name, value in node.draws().items()}
    expected = together.sample_posterior(jax.random.key(6), n)
    assert set(sites) == set(expected)
    for draws in (sites, expected):
        draws["sigma"] = np.log(draws["sigma"])  # whose tails are light
    a, b = (
        np.concatenate([np.asarray(d[s]).reshape(n, -1) for s in sorted(expected)], 1)
        for d in (sites, expected)
    )
    sd = b.std(0)
    assert (abs(a.mean(0) - b.mean(0)) < 4.5 * sd * (2 / n) ** 0.5).all()
    assert (abs(np.corrcoef(a.T) - np.corrcoef(b.T)) < 4.5 * (2 / n) ** 0.5).all()
    assert "rho" in settings or abs(np.corrcoef(b.T) - np.eye(len(sd))).max() > 0.1
    np.testing.assert_allclose(a.std(0), sd, rtol=0.12)


@pytest.mark.slow
def test_noise_that_hides_is_of_a_key_that_nobody_else_knows():
    vfl = nf.VFL(gaussian, rho=0.5, start=None)
    xs, y = data()
    run = over_nodes(vfl)[1]
    hidden = run(3)
    assert not np.allclose(hidden.losses, run(3).losses, rtol=1e-6)  # the same key, other noise
    together = vfl.run(KEY, 3, xs, y, progress_bar=False)
    assert not np.allclose(hidden.losses, together.losses, rtol=1e-6)
    keys = [jax.random.key_data(secret_of(SiloRuns(vfl, xs[0]))) for _ in range(2)]
    assert not np.array_equal(*keys)
    for method in (nf.VFL(gaussian), nf.SFVI(one_silo)):
        assert secret_of(SiloRuns(method, dict(y=y))) is None
    with pytest.raises(ValueError, match=r"expected a jax\.random\.key"):
        nf.Silo(data()[0][0], names={}, secret="none")
    with pytest.raises(TypeError, match="one JAX key"):
        nf.Silo(data()[0][0], names={}, secret=5)


@pytest.mark.slow
def test_predictors_without_noise_are_given_to_those_who_may_have_them():
    vfl = nf.VFL(gaussian, rho=0.5, start=None)
    result = over_nodes(vfl)[1](2)
    with pytest.raises(nf.ModelError, match=r"silo 0 .*without the noise"):
        nf.importance_correct(KEY, result, 20)
    result.sample_together(KEY, 3)  # sends nothing up
    allowed = over_nodes(vfl, allow_unhidden=True)[1](2)
    assert np.isfinite(nf.importance_correct(KEY, allowed, 20).log_evidence)


@pytest.mark.parametrize("asked", [("dra", ""), ("sample", "no json"), ("importance", "7")])
def test_an_exchange_that_nobody_knows_is_said(asked):
    vfl = nf.VFL(gaussian, start=None)
    built = laid_open_columns(vfl, *data()).built
    with pytest.raises(nf.ModelError, match=f"no exchange '{asked[0]}'"):
        vfl.round_of(built, ExchangeId(*asked))


@pytest.mark.slow
def test_rows_of_all_parties_must_be_the_same_in_the_same_order():
    xs, y = data()
    vfl = nf.VFL(gaussian, start=None)
    ids = np.array([f"area {i}" for i in range(12)])
    swapped = ids[[1, 0, *range(2, 12)]]
    quiet = dict(progress_bar=False)
    result = vfl.run(KEY, 1, xs, y, row_ids=[ids] * 4, **quiet)
    assert np.isfinite(result.losses).all()
    for row_ids, words in (
        ([ids, swapped, ids], "row 0 .*'area 1' at client 1 .*'area 0' at client 0, .* 2 of 12"),
        ([ids, ids, ids, swapped], "at the server and 'area 0' at client 0"),
        ([ids, ids], "2 entries, expected 3"),
        ([ids, ids[:5], ids], r"client 1 .*\(5,\), .*\(12,\)"),
        ([ids, ids[[0, 0, *range(2, 12)]], ids], "'area 0' .* 2 .*client 1"),
    ):
        with pytest.raises(nf.DataError, match=words):
            vfl.run(KEY, 1, xs, y, row_ids=row_ids, **quiet)

    def serving(*orders, row_ids=None):
        silos = [
            nf.Silo(x, names={"gaussian": gaussian}, row_ids=order)
            for x, order in zip(xs, orders, strict=True)
        ]
        sent, told = [], []

        def heard(answer):
            def answering(message):
                sent.append(message)
                told.append(answer(message))
                return told[-1]

            return answering

        there = nf.Federation(nf.network.InMemory([heard(silo.answer) for silo in silos]))
        own = None if row_ids is None else [row_ids]
        vfl.run(KEY, 0, there, y, row_ids=own, **quiet)
        assert not any(b"area" in reply for reply in told)
        return b"".join(sent)

    with pytest.warns(UserWarning, match=r"client 1 .* client 0, client 2"):
        sent = serving(ids, None, ids, row_ids=ids)
    assert digest(read_ids(ids, 12, "")).encode() not in sent
    with pytest.raises(nf.DataError, match=r"client 2 .*ids"):
        serving(ids, ids, swapped)
    with pytest.raises(nf.DataError, match=r"the server .*\(7,\), .*\(12,\)"):
        serving(ids, ids, ids, row_ids=ids[:7])
    numbers, words = np.arange(12), np.arange(12).astype(str)
    vfl.run(KEY, 1, xs, y, row_ids=[numbers, words, numbers], **quiet)
    serving(numbers, words, numbers, row_ids=words)
    with pytest.raises(nf.DataError, match="fractions"):
        serving(ids, numbers + 0.5, ids)
    with pytest.raises(nf.DataError, match=r"the server .*ids"):
        serving(ids, ids, ids, row_ids=swapped)
    with pytest.raises(nf.DataError, match=r"silos .*own"):
        Apart(nf.SFVI(one_silo), [dict(y=y * 1.0)], row_ids=ids).run(KEY, 1)


def test_nodes_hand_over_the_columns_that_they_hold():
    def model(xs, y):
        eta = nf.client_sum("client", linear, [jnp.exp(x) for x in xs])
        with numpyro.plate("obs", eta.shape[0]):
            numpyro.sample("y", dist.Normal(eta, 1), obs=y)

    xs, y = data()
    with pytest.raises(nf.ModelError, match="columns"):
        Apart(nf.VFL(model), xs).run(KEY, 1, y)


@pytest.mark.parametrize(("name", "is_fresh"), [("augmented", True), ("exact", False)])
def test_noise_that_hides_is_new_each_time_whatever_the_server_sends(name, is_fresh):
    """A server that repeats a key would see two replies whose noise is the same."""
    columns, words = np.ones((10, 2)), np.array([1, 2], np.uint32)
    runs = SiloRuns(NAMES[name], columns)
    keys = [key_at(runs, words) for _ in range(2)]
    assert (keys[0] == keys[1]).all() != is_fresh
    told = jax.random.key_data(jax.random.wrap_key_data(words))
    assert (keys[0] == told).all() != is_fresh
    # A secret of the owner's own hides the server's key, and the same key has the same noise.
    own = SiloRuns(NAMES[name], columns, secret=jax.random.key(3))
    assert (key_at(own, words) == key_at(own, words)).all()
    assert (key_at(own, words) != told).any()
