"""A prior that is learnt: its networks, its training, and what it says of itself."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers

import numpyro_fed as nf
from numpyro_fed import sigma
from numpyro_fed.sigma.networks import Networks, Sizes
from numpyro_fed.sigma.training import DrawAndNoise, energy_test, minus_bound
from numpyro_fed.sigma.true_prior import TruePrior, hyperparameters
from numpyro_fed.text.substitution import Blocks

KEY = jax.random.key(0)
PLACES = np.linspace(0, 1, 6)
BLOCKS = [[0, 1, 2], [3, 4, 5]]
UNEVEN = [[0, 1, 2, 3], [5, 4]]
QUICK = dict(num_steps=30, batch_size=8, width=8, width_local=4, z_local=2, progress_bar=False)


def gp(area=None, y=None):
    scale = numpyro.sample("scale", dist.LogNormal(-1, 0.3))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))  # of the rows, not of the site
    cov = jnp.exp(-((PLACES[:, None] - PLACES) ** 2) / (2 * scale**2)) + 1e-3 * jnp.eye(6)
    theta = numpyro.sample("theta", dist.MultivariateNormal(2.0, 4 * cov))
    if area is not None:
        with nf.silo_plate("row", area.shape[0]):
            numpyro.sample("y", dist.Normal(theta[area], sigma), obs=y)


@pytest.fixture(scope="module")
def trained():
    return nf.SigmaPrior.fit(
        KEY, gp, "theta", UNEVEN, num_steps=4_000, width=32, progress_bar=False, noise=0.2
    )


@pytest.mark.slow
def test_the_bound_is_that_of_the_written_model(double):
    """Equation 8 by NumPyro's own densities, at the same noise."""
    blocks, gamma = Blocks.read(UNEVEN, 6, "theta"), 0.3
    nets = Networks(Sizes(6, 1, 2, 4, 3, 2, 8, 4, True, True), KEY)
    draws = jnp.asarray(np.random.default_rng(1).normal(size=(9, 6)))
    nets = nets.initialised(draws, None, jnp.asarray(blocks.table), gamma)
    r = np.random.default_rng(0)
    at = DrawAndNoise(*(jnp.asarray(r.normal(size=n)) for n in (6, 1, 3, (2, 2))))
    mean, log_variance = nets.encode(at.theta, at.phi)
    q_G = dist.Normal(mean, jnp.exp(log_variance / 2))
    z_G = mean + jnp.exp(log_variance / 2) * at.eps_G
    expected = -dist.kl_divergence(q_G, dist.Normal(jnp.zeros(3), 1)).sum()
    for b, own in enumerate(UNEVEN):
        mean, log_variance = nets.encode_local(b, z_G, at.phi)
        q_L = dist.Normal(mean, jnp.exp(log_variance / 2))
        z_L = q_L.loc + q_L.scale * at.eps_L[b]
        decoded = nets.decode(b, z_G, z_L, at.phi)[: len(own)]
        expected += dist.Normal(decoded, gamma).log_prob(at.theta[np.array(own)]).sum()
        expected -= dist.kl_divergence(q_L, dist.Normal(jnp.zeros(2), 1)).sum()
    table = jnp.asarray(blocks.table)
    found = minus_bound(nets, at, table, table < 6, gamma)
    np.testing.assert_allclose(found, -expected, rtol=1e-12)


@pytest.mark.slow
def test_what_a_site_depends_on_is_read_off_the_text():
    assert hyperparameters(gp, "theta", {}) == ("scale",)
    true_prior = TruePrior.of(gp, "theta", {}, {"scale": (0.2, 0.5)})
    phi, theta, _ = true_prior.draw(KEY, 400, 2)
    assert theta.shape == (400, 2, 6)
    scale = np.exp(phi[:, 0])
    assert 0.2 <= scale.min() < 0.22
    assert 0.48 < scale.max() <= 0.5
    drawn = jax.vmap(lambda k: true_prior.draw_phi(k, ranges=False))(jax.random.split(KEY, 2_000))
    logs = np.log(drawn["scale"])
    assert abs(logs.mean() + 1) < 4.5 * 0.3 / 2_000**0.5


def test_cars_are_drawn_by_their_eigenvectors():
    W = np.eye(6, k=1) + np.eye(6, k=-1)

    def car():
        alpha = numpyro.sample("alpha", dist.Uniform(0, 1))
        numpyro.sample("theta", dist.CAR(1.0, alpha, 2.0, W))

    true_prior, n = TruePrior.of(car, "theta", {}, {}), 5_000
    draws = np.asarray(true_prior.draws_with_noise(KEY, {"alpha": 0.9}, n)[1])
    cov = np.linalg.inv(2 * (np.diag(W.sum(0)) - 0.9 * W))
    se = np.sqrt((cov**2 + np.outer(np.diag(cov), np.diag(cov))) / n)
    assert (abs(np.cov(draws.T) - cov) < 4.5 * se).all()
    assert (abs(draws.mean(0) - 1) < 4.5 * np.sqrt(np.diag(cov) / n)).all()


@pytest.mark.slow
def test_draws_are_like_those_of_the_prior(trained):
    """Units and means of the site are its own: 2 and a standard deviation of 2 here."""
    report = trained.check(KEY, [dict(scale=0.3), dict(scale=0.5)])
    for row in report.rows:
        assert row.within < 0.15
        assert row.across < 0.15
        assert 0.8 < row.variance < 1.2
    assert str(report).count("\n") == 2
    draws = np.asarray(trained.sample(KEY, 2_000))
    np.testing.assert_allclose(draws.mean(0), 2, atol=0.3)
    less = np.asarray(trained.deterministic.sample(KEY, 2_000))
    assert (less.var(0) <= draws.var(0) + 0.5).all()
    assert len(trained.losses) == 4_000
    assert trained.times["drawing"] > 0


@pytest.mark.slow
def test_training_comes_near_the_evidence(trained):
    """The bound cannot exceed the true prior's own density of noisy entries, and comes near it."""
    found = []
    for i, key in enumerate(jax.random.split(KEY, 300)):
        scale = trained.true_prior.draw_phi(key)
        fn = trained.true_prior.distribution(scale)
        sd = trained.scales.sd * trained.scales.size(trained.true_prior.flat(scale))
        theta = (fn.sample(jax.random.fold_in(key, i), (20,)) - trained.scales.mean) / sd
        cov = fn.covariance_matrix / jnp.outer(sd, sd) + 0.2**2 * jnp.eye(6)
        found.append(
            dist.MultivariateNormal((fn.mean - trained.scales.mean) / sd, cov)
            .log_prob(theta)
            .mean()
        )
    found, losses = np.asarray(found), trained.losses[-1_000:]
    se = np.hypot(found.std() / np.sqrt(300), losses.std() / np.sqrt(1_000))
    gap = losses.mean() + found.mean()
    assert -3 * se < gap < 0.5


@pytest.mark.slow
def test_silos_see_nothing_of_each_other(trained):
    federated = nf.handlers.substitute_prior(gp, {"theta": trained})
    area = np.arange(6)

    def means(noise):
        at = handlers.substitute(handlers.seed(federated, 0), {"theta/z_L": noise})
        return handlers.trace(at).get_trace(area=area)["theta/values"]["fn"].base_dist.loc

    slopes = jax.jacobian(means)(jnp.ones((2, trained.networks.local_encoders.mean.bias.shape[1])))
    for i in range(2):
        assert (slopes[i, :, 1 - i] == 0).all()
        assert abs(slopes[i, :, i]).max() > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["deterministic", "auxiliary"])
def test_a_run_on_the_substituted_model(trained, kind):
    prior = getattr(trained, kind)
    federated = nf.handlers.substitute_prior(gp, {"theta": prior})
    r = np.random.default_rng(0)
    silos = [dict(area=np.array(b), y=r.normal(2, 1, len(b))) for b in UNEVEN]
    result = nf.SFVI(federated, start=None).run(KEY, 30, silos, progress_bar=False)
    draws = result.sample_posterior(KEY, 6, silo=1)
    assert (draws["theta"][:, np.array(UNEVEN[0])] == 0).all()
    assert (draws["theta"][:, np.array(UNEVEN[1])] != 0).all()
    assert ("theta/values" in draws) == (kind == "auxiliary")


@pytest.mark.slow
def test_a_silo_elsewhere_predicts_with_its_block(trained):
    federated = nf.handlers.substitute_prior(gp, {"theta": trained.auxiliary})
    r, names = np.random.default_rng(0), {"gp": federated}
    data = [dict(area=np.array(b), y=r.normal(2, 1, len(b))) for b in UNEVEN]
    policy = nf.Policy(min_rows=1, parameters_per_row=1_000)
    silos = [nf.Silo(d, names=names, policy=policy) for d in data]
    over = nf.Federation(nf.network.InMemory([silo.answer for silo in silos]), names=names)
    method = nf.SFVI(federated, start=None)
    here, there = (method.run(KEY, 5, s, progress_bar=False) for s in (data, over))
    new = dict(area=np.array(UNEVEN[1][:2]))
    expected = here.predict(KEY, new, silo=1, n=7)
    found = silos[1].predict(KEY, there.draws_for_silo(KEY, 7, silo=1), new)
    for site, values in found.items():
        np.testing.assert_allclose(values, expected[site], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_rounds_on_the_substituted_model_reach_what_nuts_makes_of_it(trained):
    """Up to what a Gaussian for six globals and Monte Carlo (0.03 sd) leave."""
    federated = nf.handlers.substitute_prior(gp, {"theta": trained.auxiliary})
    r, silos = np.random.default_rng(0), []
    for own in UNEVEN:
        area = np.repeat(np.array(own), 5)
        silos.append(dict(area=area, y=2 + 0.4 * area + 0.5 * r.normal(size=len(area))))
    result = nf.PVI(federated).run(KEY, 3, silos, progress_bar=False)
    nuts = nf.run_nuts(KEY, federated, silos, num_warmup=300, num_samples=1_500, progress_bar=False)
    for name, site in nf.compare(result, nuts).to_dict()["sites"].items():
        assert np.max(site["mean_error_sd"]) < 0.15, name
        assert 0.75 < np.min(site["sd_ratio"]) <= np.max(site["sd_ratio"]) < 1.15, name


@pytest.mark.slow
def test_hyperparameters_beyond_the_training_do_not_reach_the_networks(trained):
    low, high = (float(np.exp(trained.scales.quantiles[i, 0])) for i in (0, -1))
    places = [
        trained.true_prior.flat({"scale": jnp.array(s)}) for s in (low / 10, low, high, 10 * high)
    ]
    ends = [trained.scales.ranks(at) for at in places]
    sizes = [trained.scales.size(at) for at in places]
    np.testing.assert_allclose((sizes[0], sizes[2]), (sizes[1], sizes[3]), rtol=1e-5)
    np.testing.assert_allclose(ends[0], ends[1], rtol=1e-5)
    np.testing.assert_allclose(ends[2], ends[3], rtol=1e-5)
    np.testing.assert_allclose(ends[3] - ends[0], 2 * 3**0.5, rtol=1e-5)
    with pytest.warns(UserWarning, match=r"'scale' .* 0.35 to 0.4 in \d+ %"):
        nf.SigmaPrior.fit(KEY, gp, "theta", BLOCKS, ranges={"scale": (0.35, 0.4)}, **QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("unit", [1e-3, 1e4])
def test_a_hyperparameter_that_is_a_scale_in_any_unit(unit):
    """The field's size is learnt apart from its shape; tau follows it."""

    def model():
        scale = numpyro.sample("scale", dist.LogNormal(-1, 1))
        cov = jnp.exp(-((PLACES[:, None] - PLACES) ** 2)) + 1e-2 * jnp.eye(6)
        numpyro.sample("theta", dist.MultivariateNormal(0.0, (unit * scale) ** 2 * cov))

    prior = nf.SigmaPrior.fit(KEY, model, "theta", UNEVEN, num_steps=500, progress_bar=False)
    for kind in (prior, prior.deterministic):
        for row in kind.check(KEY, [dict(scale=s) for s in (0.1, 0.4, 1.3)]).rows:
            assert max(row.within, row.across) < 0.15, row
            assert 0.8 < row.variance < 1.25, row


@pytest.mark.slow
def test_a_prior_that_is_not_that_of_the_text_is_refused(trained, tmp_path):
    def other(spread=None, **kwargs):
        def model(area=None, y=None, width=1.0):
            scale = numpyro.sample("scale", dist.LogNormal(-1, 0.3))
            sigma = numpyro.sample("sigma", dist.HalfNormal(1))
            gaps = (PLACES[:, None] - PLACES) ** 2
            cov = jnp.exp(-gaps / (2 * scale**2)) + 1e-3 * jnp.eye(6)
            size = width if spread is None else spread
            theta = numpyro.sample("theta", dist.MultivariateNormal(2.0, 4 * size**2 * cov))
            if area is not None:
                with nf.silo_plate("row", area.shape[0]):
                    numpyro.sample("y", dist.Normal(theta[area], sigma), obs=y)

        return model

    def run(model, **more):
        silos = [
            dict(area=np.array(b), y=np.ones(len(b)), **{k: v[j] for k, v in more.items()})
            for j, b in enumerate(UNEVEN)
        ]
        federated = nf.handlers.substitute_prior(model, {"theta": trained})
        return nf.SFVI(federated, start=None).run(KEY, 1, silos, progress_bar=False)

    run(other(1.0))
    with pytest.raises(nf.ModelError, match="silo 0: 'theta' "):
        run(other(50.0))
    with pytest.raises(nf.ModelError, match="silo 1: 'theta' "):
        run(other(), width=(np.array(1.0), np.array(3.0)))
    trained.save(tmp_path / "prior_sd1.0")
    assert (tmp_path / "prior_sd1.0.npz").exists()
    loaded = nf.SigmaPrior.load(tmp_path / "prior_sd1.0", gp, "theta", UNEVEN)
    np.testing.assert_array_equal(loaded.tau, trained.tau)
    with pytest.raises(nf.SavedStateError, match="another prior of 'theta'"):
        nf.SigmaPrior.load(tmp_path / "prior_sd1.0", other(50.0), "theta", UNEVEN)


def test_what_cannot_be_learnt_is_refused_before_the_training():
    def positive():
        numpyro.sample("theta", dist.LogNormal(0, 1).expand([6]).to_event(1))

    with pytest.raises(nf.ModelError, match=r"support .* expected real numbers"):
        nf.SigmaPrior.fit(KEY, positive, "theta", UNEVEN, **QUICK)

    def parametrised():
        width = numpyro.param("width", 0.3)
        numpyro.sample("theta", dist.MultivariateNormal(0.0, width * jnp.eye(6)))

    with pytest.raises(nf.ModelError, match="parameter 'width'"):
        nf.SigmaPrior.fit(KEY, parametrised, "theta", UNEVEN, **QUICK)
    with pytest.raises(nf.DataError, match=r"'scale', -1 to 1, .*support"):
        nf.SigmaPrior.fit(KEY, gp, "theta", UNEVEN, ranges={"scale": (-1, 1)}, **QUICK)
    with pytest.raises(ValueError, match="clip"):
        nf.SigmaPrior.fit(KEY, gp, "theta", UNEVEN, clip=(0.0, 1.0), **QUICK)


@pytest.mark.slow
def test_a_decoder_alone_learns_what_a_prior_makes_of_normals():
    """The linear map that it begins at is exact where there is nothing that it depends on."""
    cov = np.exp(-((PLACES[:, None] - PLACES) ** 2)) + 0.1 * np.eye(6)

    def fixed():
        numpyro.sample("theta", dist.MultivariateNormal(1.0, cov))

    settings = dict(num_steps=500, progress_bar=False, decoder_only=True)
    prior = nf.SigmaPrior.fit(KEY, fixed, "theta", UNEVEN, **settings)
    n = 20_000
    draws = np.asarray(prior.deterministic.sample(KEY, n), float)
    se = np.sqrt((cov**2 + np.outer(np.diag(cov), np.diag(cov))) / n)
    assert (abs(np.cov(draws.T) - cov) < 4.5 * se + 0.05 * np.diag(cov).mean()).all()
    learnt = nf.SigmaPrior.fit(KEY, gp, "theta", UNEVEN, **settings)
    for row in learnt.check(KEY, [dict(scale=0.4)]).rows:
        assert max(row.within, row.across) < 0.2

    def skewed():
        numpyro.sample("theta", dist.Gumbel(0, 1).expand([6]).to_event(1))

    with pytest.raises(nf.ModelError, match="no Gaussian"):
        nf.SigmaPrior.fit(KEY, skewed, "theta", UNEVEN, **settings)
    with pytest.raises(ValueError, match="z_global=3 with decoder_only"):
        nf.SigmaPrior.fit(KEY, gp, "theta", UNEVEN, z_global=3, **settings)


@pytest.mark.slow
def test_hyperparameters_beyond_the_training_are_warned_of(trained, tmp_path):
    with pytest.warns(UserWarning, match=r"scale=5.0 .*'theta'"):
        trained.sample(KEY, 2, dict(scale=5.0))
    ranged = nf.SigmaPrior.fit(KEY, gp, "theta", UNEVEN, ranges={"scale": (0.01, 20.0)}, **QUICK)
    ranged.save(tmp_path / "prior")

    def wide():
        scale = numpyro.sample("scale", dist.LogNormal(3, 1))
        cov = jnp.exp(-((PLACES[:, None] - PLACES) ** 2) / (2 * scale**2)) + 1e-3 * jnp.eye(6)
        numpyro.sample("theta", dist.MultivariateNormal(2.0, 4 * cov))

    with pytest.warns(UserWarning, match=r"scale from 0.\d+ to 20, .*\d\d %"):
        nf.SigmaPrior.load(tmp_path / "prior", wide, "theta", UNEVEN)


@pytest.mark.slow
def test_the_networks_of_the_paper_can_be_had(tmp_path):
    plain = nf.SigmaPrior.fit(KEY, gp, "theta", UNEVEN, principal_components=False, **QUICK)
    assert plain.networks.components is None
    plain.save(tmp_path / "prior")
    again = nf.SigmaPrior.load(tmp_path / "prior", gp, "theta", UNEVEN)
    np.testing.assert_array_equal(again.sample(KEY, 5), plain.sample(KEY, 5))


@pytest.mark.slow
def test_saved_and_loaded_without_pickle(tmp_path):
    trained = nf.SigmaPrior.fit(KEY, gp, "theta", UNEVEN, **QUICK)
    trained.save(tmp_path / "prior")
    again = nf.SigmaPrior.load(tmp_path / "prior", gp, "theta", UNEVEN)
    np.testing.assert_array_equal(again.sample(KEY, 5), trained.sample(KEY, 5))
    np.testing.assert_array_equal(again.losses, trained.losses)
    assert again.settings == trained.settings
    with pytest.raises(nf.SavedStateError, match="other blocks of 'theta'"):
        nf.SigmaPrior.load(tmp_path / "prior", gp, "theta", BLOCKS)
    with pytest.raises(nf.SavedStateError, match="there is no file"):
        nf.SigmaPrior.load(tmp_path / "another", gp, "theta", UNEVEN)

    def fixed():
        numpyro.sample("theta", dist.MultivariateNormal(0.0, jnp.eye(6)))

    with pytest.raises(nf.SavedStateError, match=r"\['scale'\], not \[\]"):
        nf.SigmaPrior.load(tmp_path / "prior", fixed, "theta", UNEVEN)


def test_bad_input_is_found_before_the_training():
    def fit(model=gp, site="theta", blocks=BLOCKS, **settings):
        return nf.SigmaPrior.fit(KEY, model, site, blocks, **{**QUICK, **settings})

    with pytest.raises(nf.ModelError, match=r"'sigma', .*'theta' .*scale"):
        fit(ranges={"sigma": (0, 1)})
    with pytest.raises(nf.DataError, match=r".scale. .* 1 to 0\.5"):
        fit(ranges={"scale": (1, 0.5)})
    with pytest.raises(nf.DataError, match="in no block"):
        fit(blocks=[[0]])
    with pytest.raises(ValueError, match="num_steps"):
        fit(num_steps=0)
    with pytest.raises(ValueError, match="noise"):
        fit(noise=0.0)

    def below():
        k = numpyro.sample("k", dist.Bernoulli(0.5))
        numpyro.sample("theta", dist.MultivariateNormal(k * 1.0, jnp.eye(6)))

    with pytest.raises(nf.ModelError, match="discrete latent 'k'"):
        fit(model=below)

    def singular():
        size = numpyro.sample("size", dist.LogNormal(0, 1))
        numpyro.sample(
            "theta", dist.MultivariateNormal(0.0, size * (jnp.ones((6, 6)) - jnp.eye(6)))
        )

    with pytest.raises(nf.DataError, match=r".theta. .*NaN"):
        fit(model=singular)


@pytest.mark.slow
def test_a_training_that_diverges_says_so():
    with pytest.raises(nf.NonFiniteError, match=r"diverged: .* step"):
        nf.SigmaPrior.fit(KEY, gp, "theta", BLOCKS, **{**QUICK, "optim": optax.sgd(1e12)})


def test_without_equinox_the_extra_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "numpyro_fed.sigma.networks")
    monkeypatch.delattr(sigma, "networks")
    monkeypatch.setitem(sys.modules, "equinox", None)
    with pytest.raises(nf.MissingExtraError, match=r"equinox.*numpyro-fed\[nn\]"):
        nf.SigmaPrior.fit(KEY, gp, "theta", BLOCKS, **QUICK)


def test_the_energy_distance_tells_samples_apart():
    r = np.random.default_rng(0)
    a, b, off = (r.normal(size=(200, 3)) for _ in range(3))
    assert energy_test(KEY, a, b)[1] > 0.05
    distance, p = energy_test(KEY, a, off + 0.5)
    assert p < 0.01
    assert distance > 0
    gaps = [np.linalg.norm(x[:, None] - y, axis=-1).mean() for x, y in ((a, b), (a, a), (b, b))]
    np.testing.assert_allclose(energy_test(KEY, a, b)[0], 2 * gaps[0] - gaps[1] - gaps[2])


@pytest.mark.slow
def test_a_flat_prior_is_no_range_to_train_for():
    def model():
        scale = numpyro.sample("scale", dist.ImproperUniform(dist.constraints.positive, (), ()))
        numpyro.sample("b", dist.ImproperUniform(dist.constraints.real, (), ()))
        cov = jnp.exp(-((PLACES[:, None] - PLACES) ** 2) / (2 * scale**2)) + 1e-3 * jnp.eye(6)
        numpyro.sample("theta", dist.MultivariateNormal(0.0, cov))

    with pytest.raises(nf.ModelError, match=r"'scale', whose prior is flat .* ranges=\{'scale'"):
        nf.SigmaPrior.fit(KEY, model, "theta", BLOCKS, **QUICK)
    prior = nf.SigmaPrior.fit(KEY, model, "theta", BLOCKS, ranges={"scale": (0.2, 0.6)}, **QUICK)
    assert prior.true_prior.phi == ("scale",)
