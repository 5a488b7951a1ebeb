"""SOUL, which finds the mode of the auxiliary variables and draws given it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from laid_open import inside
from numpyro.infer.util import log_density
from vertical_problems import (
    KEY,
    centred,
    data,
    gaussian,
    gaussian_data,
    logistic,
    one_by_one,
    over_nodes,
)

import numpyro_fed as nf


@pytest.mark.slow
@pytest.mark.parametrize("likelihood", ["augmented", "power"])
def test_soul_finds_the_mode_of_z_and_draws_given_it(likelihood, double):
    """Of a Gaussian, where both are known: from the joint density's derivatives."""
    (xs, y), rho = gaussian_data(), 0.8
    handlers = dict(augmented=nf.handlers.augment, power=nf.handlers.power_likelihood)
    text = handlers[likelihood](centred, rho)
    widths = [x.shape[1] for x in xs]
    ends = np.cumsum([*widths, *([len(y)] * 3)])

    def log_joint(flat):
        parts = jnp.split(flat, ends[:-1])
        values = {f"client_{j}/beta": parts[j] for j in range(3)}
        values |= {f"client_{j}/z": parts[3 + j] for j in range(3)}
        return log_density(text, (xs, y), {}, values)[0]

    zero, k = jnp.zeros(ends[-1]), sum(widths)
    slope, curvature = jax.grad(log_joint)(zero), -jax.hessian(log_joint)(zero)
    mode = jnp.linalg.solve(curvature, slope)[k:]  # of both, and so of z with theta integrated out
    own, across = curvature[:k, :k], curvature[:k, k:]
    sd_z = np.sqrt(np.diag(np.linalg.inv(curvature)[k:, k:]))
    soul = nf.SOUL(
        centred,
        rho=rho,
        likelihood=likelihood,
        share_response=True,
        optim=optax.adam(optax.cosine_decay_schedule(0.03, 6_000)),
        num_steps=40,
        num_kept=2_000,
    )
    result = soul.run(KEY, 8_500, xs, y, progress_bar=False)  # z is fixed for the last 2,500
    found = [inside(result).vertical.auxiliary(s) for s in one_by_one(result, result.state.silos)]
    found = jnp.concatenate(found)
    assert (abs(found - mode) < 0.07 * sd_z).all()  # 0.10 if a client counts its own slope
    draws = result.sample_posterior(KEY, 20_000)
    flat = np.concatenate([draws[f"client_{j}/beta"] for j in range(3)], 1)
    mean, sd = jnp.linalg.solve(own, slope[:k] - across @ found), jnp.linalg.inv(own)
    sd = np.sqrt(np.diag(sd))
    effective = 2_000 * np.tanh(
        0.5 * 0.05 * 40
    )  # draws of rounds are correlated by exp(-0.05 * 40)
    assert (abs(flat.mean(0) - mean) < 4.5 * sd / effective**0.5).all()
    wide = (1 - 0.05 / 2) ** -0.5  # what unadjusted steps of 0.05 make of a unit variance
    assert (abs(flat.std(0) / sd - wide) < 4.5 / (2 * effective) ** 0.5).all()


@pytest.mark.slow
@pytest.mark.parametrize("likelihood", ["augmented", "power"])
def test_soul_runs_alike_on_both_runtimes_and_goes_on(likelihood, tmp_path, double):
    xs, y = data()
    soul = nf.SOUL(logistic, rho=1.0, likelihood=likelihood, share_response=True, num_kept=4)
    whole = soul.run(KEY, 6, xs, y, progress_bar=False)
    plain = soul.run(KEY, 6, xs, y, progress_bar=False, runtime="host")
    np.testing.assert_allclose(whole.losses, plain.losses, rtol=1e-8)
    first = soul.run(KEY, 2, xs, y, progress_bar=False)
    rest = soul.run(KEY, 4, xs, y, progress_bar=False, init_state=first.state)
    jax.tree.map(np.testing.assert_array_equal, rest.state, whole.state)
    whole.save(tmp_path / "fit")
    again = soul.load(tmp_path / "fit", xs, y)
    jax.tree.map(np.testing.assert_array_equal, again.state, whole.state)
    names = {"b", "client_0/scale", "client_0/beta", "client_1/beta", "client_2/beta"}
    assert set(whole.sample_posterior(KEY, 5)) == names
    with pytest.raises(TypeError, match="no density"):
        nf.importance_correct(KEY, whole)


@pytest.mark.slow
def test_soul_over_nodes_gives_the_numbers_of_one_process():
    xs, y = data()
    soul = nf.SOUL(gaussian, rho=1.0, num_steps=3, num_kept=4)
    nodes, run = over_nodes(soul, secret=None)
    apart = run(3)
    together = soul.run(KEY, 3, xs, y, progress_bar=False)
    np.testing.assert_allclose(apart.losses, together.losses, rtol=1e-5)
    assert set(apart.sample_posterior(KEY, 2)) == {"b", "sigma"}
    apart.sample_together(KEY, 50)
    in_one = together.sample_together(KEY, 5)
    assert in_one.keys() == together.sample_posterior(KEY, 5).keys()
    assert in_one["client_1/beta"].shape[0] == 5
    kept = together.private(1).guide["draws"][1:3]  # of rounds 2 and 3, the last half
    drawn = np.unique(nodes[1].draws()["beta"], axis=0)
    np.testing.assert_allclose(drawn, np.unique(kept, axis=0), rtol=1e-5)


@pytest.mark.slow
def test_soul_is_not_at_its_end_before_all_clients_are():
    xs, y = data()
    tiny = [xs[0], 1e-3 * xs[1], xs[2]]
    soul = nf.SOUL(logistic, rho=0.5, optim=optax.adam(1e-2))
    result = soul.run(KEY, 4_000, tiny, y, progress_bar=False, stop="converged")
    assert result.ended == "converged"
    assert int(result.state.server.resting) == 3
