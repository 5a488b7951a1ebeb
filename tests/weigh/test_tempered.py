"""Particles: exact posteriors, the gradient that silos send, verdicts, files and refusals."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from cases import slow_but

import numpyro_fed as nf
from numpyro_fed.basics.programs import precision
from numpyro_fed.posterior.particles import memory_of, modes_apart
from numpyro_fed.weigh.element_errors import disagreement
from numpyro_fed.weigh.smc import correlation

KEY = jax.random.key(0)
QUIET = dict(progress_bar=False)


def squared(y):
    """A mean known up to its sign."""
    mu = numpyro.sample("mu", dist.Normal(0, 3))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu**2, 1), obs=y)


def counts(y):
    """Poisson counts with an effect of each row."""
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    with nf.silo_plate("row", y.shape[0]):
        b = numpyro.sample("b", dist.Normal(mu, 0.7))
        numpyro.sample("y", dist.Poisson(jnp.exp(b)), obs=y)


SQUARES = [dict(y=np.array([3.8, 4.1])), dict(y=np.array([4.4, 3.9, 4.0]))]
COUNTS = [dict(y=np.array([3.0, 0.0, 5.0])), dict(y=np.array([2.0, 8.0]))]


def at_mode(model, silos):
    """The normal approximation at the mode."""
    with precision(double=True):
        return nf.PVI(model).run(KEY, 0, silos, **QUIET)


def unfitted(method, silos):
    """A result before its first round: particles from the prior need no more of a fit."""
    with precision(double=True):
        return method.run(KEY, 0, silos, **QUIET)


@pytest.fixture(scope="module")
def squares():
    return at_mode(squared, SQUARES)


@pytest.fixture(scope="module")
def particles(squares):
    # Many more than by default: how the modes share the mass is left to chance at each step.
    return nf.Tempered(num_particles=16_000, start="prior").run(KEY, 300, squares, **QUIET)


def on_a_grid(log_joint, z):
    """Log evidence, mean and sd of a density of one number, by a sum over a fine grid."""
    log_p = np.array([log_joint(x) for x in z])
    log_evidence = np.logaddexp.reduce(log_p) + np.log(z[1] - z[0])
    p = np.exp(log_p - np.logaddexp.reduce(log_p))
    mean = p @ z
    return log_evidence, mean, np.sqrt(p @ (z - mean) ** 2)


def log_normal(x, mean, sd):
    return -0.5 * ((x - mean) / sd) ** 2 - np.log(sd) - 0.5 * np.log(2 * np.pi)


def exact_squares():
    y = np.concatenate([s["y"] for s in SQUARES])
    z = np.linspace(-6, 6, 20_001)
    return on_a_grid(lambda m: log_normal(m, 0, 3) + log_normal(y, m**2, 1).sum(), z)


def exact_counts():
    y, nodes = np.concatenate([s["y"] for s in COUNTS]), np.linspace(-6, 6, 2_001)
    log_factorial = np.array([np.log(np.arange(1, k + 1)).sum() for k in y])

    def log_joint(mu):
        b = mu + 0.7 * nodes
        log_p = y[:, None] * b - np.exp(b) - log_factorial[:, None] + log_normal(nodes, 0, 1)
        return log_normal(mu, 0, 2) + np.logaddexp.reduce(log_p, 1).sum() + len(y) * np.log(0.006)

    return on_a_grid(log_joint, np.linspace(-4, 5, 2_001))


@pytest.mark.slow
def test_two_modes_have_their_shares_and_the_evidence_is_exact(particles):
    evidence, _, sd = exact_squares()
    assert particles.trusted, particles.report()
    assert particles.reached == 1
    z = np.asarray(particles.z_G)[:, 0]
    # The sd of a share of four thousand is 0.008, and some more by each time they are drawn again.
    assert (z > 0).mean() == pytest.approx(0.5, abs=0.05)
    assert z.std() == pytest.approx(sd, rel=0.03)
    assert np.abs(z).std() == pytest.approx(exact_of_one_mode(), rel=0.05)
    assert particles.log_evidence == pytest.approx(evidence, abs=0.15)


def exact_of_one_mode():
    y, z = np.concatenate([s["y"] for s in SQUARES]), np.linspace(0, 6, 20_001)
    return on_a_grid(lambda m: log_normal(m, 0, 3) + log_normal(y, m**2, 1).sum(), z)[2]


@pytest.mark.slow
@pytest.mark.parametrize("start", [pytest.param("fit", marks=pytest.mark.slow), "prior"])
def test_rows_latents_are_integrated_out(start):
    evidence, mean, sd = exact_counts()
    if start == "fit":
        begin = nf.importance_correct(KEY, at_mode(counts, COUNTS))
    else:
        begin = unfitted(nf.SFVI(counts, start=None), COUNTS)
    found = nf.Tempered(start=start).run(KEY, 300, begin, **QUIET)
    assert found.trusted, found.report()
    z = np.asarray(found.z_G)[:, 0]
    assert z.mean() == pytest.approx(mean, abs=0.06 * sd)
    assert z.std() == pytest.approx(sd, rel=0.05)
    assert found.log_evidence == pytest.approx(evidence, abs=0.1)
    b = found.sample_posterior(KEY, 50, silo=0)["b"]
    assert b.shape == (50, 3)


@pytest.mark.slow
def test_particles_from_a_fit_that_nobody_has_weighed_are_not_trusted(squares):
    """At the mode of one sign they find that sign alone, and islands agree."""
    found = nf.Tempered(num_particles=400).run(KEY, 400, squares, **QUIET)
    assert found.num_kept >= 3
    assert not found.trusted
    assert "missed" in found.doubt
    weighed = nf.importance_correct(KEY, squares, 4_000)
    assert weighed.ess > 40
    # From the prior they begin anew, and do not go on with those that have missed a sign.
    other = nf.Tempered(num_particles=400, start="prior").run(KEY, 5, found, **QUIET)
    assert other.near
    assert other.num_exchanges == 5
    again = nf.Tempered(num_particles=200).run(KEY, 5, other, **QUIET)
    assert not again.near
    assert nf.Tempered(num_particles=400).run(KEY, 400, weighed, **QUIET).near


@pytest.mark.slow
def test_a_run_from_particles_goes_on_and_adds_what_it_keeps(squares):
    tempered = nf.Tempered(num_particles=400, start="prior")
    short = tempered.run(KEY, 5, squares, **QUIET)
    assert (short.num_kept, short.num_exchanges) == (0, 5)
    first = tempered.run(jax.random.key(1), 900, short, **QUIET)
    second = tempered.run(jax.random.key(2), 900, first, **QUIET)
    assert (first.num_kept, second.num_kept) == (8, 16)
    assert 5 < first.num_exchanges < second.num_exchanges
    assert len(second.z_G) == 2 * len(first.z_G) == 8 * 400  # the second half of what was kept
    assert second.log_evidence == first.log_evidence
    assert second.z_G.std() == pytest.approx(exact_squares()[2], rel=0.05)
    anew = nf.Tempered(num_particles=200, start="prior").run(KEY, 5, first, **QUIET)
    assert anew.num_exchanges == 5


def test_particles_do_not_depend_on_the_partition():
    rows = np.concatenate([s["y"] for s in SQUARES])
    sfvi = nf.SFVI(squared, start=None)
    one = unfitted(sfvi, [dict(y=rows)])
    three = unfitted(sfvi, [dict(y=part) for part in np.split(rows, [1, 3])])
    found = [
        nf.Tempered(num_particles=40, start="prior").run(KEY, 6, fit, **QUIET).z_G
        for fit in (one, three)
    ]
    np.testing.assert_allclose(*found, rtol=1e-6)


def test_silos_send_the_gradient_of_their_log_likelihood(squares):
    with precision(double=True):
        tempered = nf.Tempered(num_particles=8, start="prior")
        parts = tempered._parts(squares._fit, 0, False)
        z = np.linspace(-3.0, 3.0, 8)[:, None]
        state, data = squares.state.silos[0], squares._silos.batches[0].data
        reply, after = parts.exchange.silo((), parts.message({}, z), state, data)
        y = SQUARES[0]["y"]
        expected = np.array([log_normal(y, m**2, 1).sum() for m in z[:, 0]])
        slope = np.array([(2 * m * (y - m**2)).sum() for m in z[:, 0]])
    np.testing.assert_allclose(reply.up.log_likelihood[0], expected, rtol=1e-12)
    np.testing.assert_allclose(reply.up.gradient[0, :, 0], slope, rtol=1e-12)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), state, after))


def test_what_was_not_finished_says_how_far_it_came(squares):
    found = nf.Tempered(num_particles=40, start="prior").run(KEY, 3, squares, **QUIET)
    assert found.num_exchanges == 3
    assert not found.trusted
    assert found.reached < 1
    assert "of the way" in found.doubt
    assert found.log_evidence is None


def test_particles_that_stand_still_are_not_trusted(squares, particles):
    still = replace(particles, memory=0.9)
    assert not still.trusted
    assert "not moved" in still.doubt


def test_islands_of_other_evidence_or_coarse_integrals_are_not_trusted(particles):
    assert "log evidence" in replace(particles, evidence_error=2.0).doubt
    assert "coarse" in replace(particles, coarse=0.2).doubt
    assert not replace(particles, coarse=0.2).reliable


def test_the_fit_is_judged_by_the_particles(particles):
    # The normal approximation at one of two modes has a twentieth of the sd.
    assert not particles.fit_trusted
    assert float(particles.fit_error["mu"]["sd_ratio"]) < 0.1


def outside(y):
    """A factor and an observation outside of rows, and a prior that counts four times."""
    with numpyro.handlers.scale(scale=4.0):
        mu = numpyro.sample("mu", dist.Normal(0, 3))
    numpyro.factor("tilt", jnp.where(mu > 1.2, 0.0, -2.0))
    numpyro.sample("g", dist.Normal(mu, 1), obs=3.0)
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def kinked(y):
    """A density with a root at a kink, whose gradient is no number there."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(jnp.where(mu > 0, jnp.sqrt(mu), 0.0), 2), obs=y)


def test_what_the_prior_does_not_draw_belongs_to_the_posterior():
    """Without the factor the evidence is off by half a nat, without the others by more."""

    def log_joint(m):
        prior = 4 * log_normal(m, 0, 3) - 2 * (m <= 1.2) + log_normal(3, m, 1)
        return prior + log_normal(np.array([0.3, 1.1]), m, 1).sum()

    evidence, mean, sd = on_a_grid(log_joint, np.linspace(-9, 9, 20_001))
    fit = unfitted(nf.SFVI(outside, start=None), [dict(y=np.array([0.3, 1.1]))])
    found = nf.Tempered(start="prior").run(KEY, 300, fit, **QUIET)
    assert np.mean(found.z_G) == pytest.approx(mean, abs=0.1 * sd)
    assert np.std(found.z_G) == pytest.approx(sd, rel=0.1)
    assert found.log_evidence == pytest.approx(evidence, abs=0.2)


@pytest.mark.parametrize("start", slow_but(["fit", "prior"], 1))
def test_a_gradient_that_is_no_number_costs_no_mass(start):
    silos = [dict(y=np.array([0.5, 2.0])), dict(y=np.array([-1.0]))]
    y = np.concatenate([s["y"] for s in silos])
    _, mean, sd = on_a_grid(
        lambda m: log_normal(m, 0, 1) + log_normal(y, np.sqrt(max(m, 0)), 2).sum(),
        np.linspace(-6, 6, 20_001),
    )
    fit = unfitted(nf.SFVI(kinked, start=None), silos)
    found = nf.Tempered(start=start).run(KEY, 300, fit, **QUIET)
    assert np.mean(found.z_G) == pytest.approx(mean, abs=0.1 * sd)
    assert np.std(found.z_G) == pytest.approx(sd, rel=0.1)


@pytest.mark.slow
def test_a_quadrature_that_is_too_coarse_is_not_trusted():
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 3))
        with nf.silo_plate("row", y.shape[0]):
            b = numpyro.sample("b", dist.Normal(mu, 3))
            numpyro.sample("y", dist.StudentT(1.5, b, 0.05), obs=y)

    fit = at_mode(model, [dict(y=np.array([-4.0, 5.0, 0.5])), dict(y=np.array([2.0, 9.0]))])
    corrected = nf.importance_correct(KEY, fit)
    assert corrected.integration.gave_way
    with pytest.raises(nf.ModelError, match="coarse"):
        nf.Tempered().run(KEY, 10, corrected, **QUIET)
    found = nf.Tempered(start="prior").run(KEY, 200, fit, **QUIET)
    assert found.num_kept >= 3
    assert not found.trusted
    assert "coarse" in found.doubt


@pytest.mark.slow
def test_other_divergences_are_refused_and_losses_have_no_evidence():
    weighted = nf.divergences.WeightedKL(0.3)
    other = nf.FedGVI(squared, prior_divergence=weighted, start=None)
    with pytest.raises(ValueError, match="divergence"):
        nf.Tempered().run(KEY, 10, unfitted(other, SQUARES), **QUIET)
    robust = unfitted(nf.FedGVI(squared, loss=nf.losses.beta_loss(1.5), start=None), SQUARES)
    found = nf.Tempered(num_particles=40, start="prior").run(KEY, 100, robust, **QUIET)
    assert found.reached == 1
    assert found.log_evidence is None


def test_islands_that_differ_are_not_trusted():
    rng = np.random.default_rng(0)
    alike = rng.normal(size=(4, 500, 2))
    error = disagreement(alike, np.ones(2))
    # The sd of an island's mean is 500^-1/2, of the mean of four half of that; of an sd 1/2^1/2 as
    # much. From four islands they are known up to a factor of two or so.
    assert (error > 0.005).all()
    assert (error < 0.06).all()
    apart = alike + np.array([0, 0, 0, 1.0])[:, None, None]
    assert (disagreement(apart, np.ones(2))[0] > 0.2).all()
    assert np.isinf(disagreement(np.zeros((4, 5, 1)), np.zeros(1))).all()


def test_memory_is_the_largest_correlation():
    rng = np.random.default_rng(0)
    z, other = rng.normal(size=(2, 4_000, 2))
    assert correlation(z, z) == pytest.approx(1.0)
    assert correlation(z, other) < 0.06
    assert correlation(z, np.stack([z[:, 0], other[:, 0]], 1)) == pytest.approx(1.0)
    assert correlation(z, np.zeros_like(z)) == 1.0
    signs = np.where(rng.random(z.shape) < 0.5, -1, 1)
    assert correlation(z, signs * z) > 0.8  # squared distances are as they were


def test_memory_is_that_within_modes():
    rng = np.random.default_rng(0)
    far = np.where(rng.uniform(size=1_000) < 0.3, -10.0, 10.0)[:, None]
    first, second = rng.normal(size=(2, 1_000, 2))
    assert memory_of(first, first) == pytest.approx(1.0)
    assert memory_of(first, second) < 0.15
    assert memory_of(first + far, second + far) < 0.15
    assert memory_of(first + far, first + far) == pytest.approx(1.0)
    assert len(np.unique(modes_apart(first))) == 1
    assert len(np.unique(modes_apart(rng.standard_t(3, size=(1_000, 20))))) == 1
    np.testing.assert_array_equal(modes_apart(first + far) == 1, far[:, 0] > 0)


def test_saved_and_read_again(particles, tmp_path):
    particles.save(tmp_path / "particles")
    plain = nf.load(tmp_path / "particles")
    assert plain.trusted
    assert plain.verdict == particles.report()
    with precision(double=True):
        again = nf.load(tmp_path / "particles", squared, SQUARES)
    assert isinstance(again, nf.Particles)
    assert again.report() == particles.report()
    np.testing.assert_array_equal(again.z_G, particles.z_G)


@pytest.mark.parametrize("number", [0, 10, 1.5])
def test_a_number_of_particles_is_a_multiple_of_four(number):
    with pytest.raises((ValueError, TypeError), match="num_particles"):
        nf.Tempered(num_particles=number)
    with pytest.raises(ValueError, match="start"):
        nf.Tempered(start="zero")


def test_a_prior_that_cannot_be_drawn_from_is_refused():
    def model(y):
        mu = numpyro.sample("mu", dist.ImproperUniform(dist.constraints.real, (), ()))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu, 1), obs=y)

    fit = unfitted(nf.SFVI(model, start=None), SQUARES)
    with pytest.raises(nf.ModelError, match="start='fit'"):
        nf.Tempered(start="prior").run(KEY, 10, fit, **QUIET)


def test_a_conjugate_model_needs_no_particles():
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 3))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu, 1), obs=y)

    fitted = nf.fit(KEY, model, SQUARES, **QUIET)
    assert fitted.trusted
    assert "particles" not in [stage.name for stage in fitted.stages]


def test_rows_with_three_latents_are_refused():
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 3))
        with nf.silo_plate("row", y.shape[0]):
            b = numpyro.sample("b", dist.Normal(mu, 1).expand([3]).to_event(1))
            numpyro.sample("y", dist.Normal(b.sum(-1), 1), obs=y)

    with pytest.raises(nf.ModelError, match="'row' has 3 latents"):
        nf.Tempered().run(KEY, 10, unfitted(nf.SFVI(model, start=None), SQUARES), **QUIET)


@pytest.mark.slow
def test_islands_without_any_density_are_an_error():
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 3))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu, 1), obs=y)
            numpyro.factor("hole", jnp.where(mu < 1e3, jnp.nan, 0.0) * jnp.ones_like(y))

    fit = nf.SFVI(model, start=None).run(KEY, 0, SQUARES, **QUIET)
    with pytest.raises(nf.NonFiniteError, match="any particle of an island"):
        nf.Tempered(num_particles=40, start="prior").run(KEY, 10, fit, **QUIET)
