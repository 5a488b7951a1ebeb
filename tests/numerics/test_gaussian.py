"""Gaussian numerics against NumPyro and dense linear algebra, in double precision."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numpyro_fed.numerics.gaussian import Curvature, Gaussian, as_matrix, identity

from_params = jax.jit(Gaussian.from_params)


def some(dim, full, seed=0, stack=()):
    r = np.random.default_rng(seed)
    params = {"loc": r.normal(size=(*stack, dim)), "log_scale": r.normal(size=(*stack, dim))}
    if full:
        params["below"] = r.normal(size=(*stack, dim * (dim - 1) // 2))
    return from_params(params)


def exact(q):
    if q.unit is None:
        return dist.Normal(q.loc, jnp.exp(q.log_scale)).to_event(1)
    scale = jnp.exp(q.log_scale)
    return dist.MultivariateNormal(q.loc, scale_tril=q.unit * scale[..., None, :])


def close(a, b, **tolerance):
    tolerance = {"rtol": 1e-9, "atol": 1e-11} | tolerance
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.sampled_from([1, 2, 5]), st.booleans(), st.sampled_from([(), (3,)]), st.integers(0, 99))
def test_a_gaussian_is_numpyros_distribution(dim, full, stack, seed):
    with jax.enable_x64(True):
        q, p = (some(dim, full, seed + i, stack) for i in (0, 1))
        z = jnp.asarray(np.random.default_rng(seed).normal(size=(*stack, dim)))
        close(q.log_density(z), exact(q).log_prob(z))
        close(q.entropy(), exact(q).entropy())
        close(q.kl(p), dist.kl_divergence(exact(q), exact(p)))
        close(q.kl(q), jnp.zeros(stack), atol=1e-12)
        close(q.draw(q.standardise(z)), z)
        variances = exact(q).variance
        close(q.sd, jnp.sqrt(variances))
        close(jnp.linalg.norm(q.root, axis=-1) if full else q.root, jnp.sqrt(variances))
        close(Gaussian.from_params(q.params()), q)
        close(Gaussian.of_root(q.loc, q.root), q)


@pytest.mark.parametrize("stack", [(), (3,), (4,)])
@pytest.mark.parametrize("full", [False, True])
def test_natural_parameters_and_precisions_lead_back(full, stack, double):
    q = some(4, full, stack=stack)

    @jax.jit
    def found(q):
        precision = jnp.linalg.inv(q.covariance) if full else 1 / q.covariance
        first, second = natural = q.natural()
        product = jnp.einsum("...ij,...j", precision, q.loc) if full else precision * q.loc
        back = Gaussian.of_natural(*natural), Gaussian.of_precision(q.loc, precision)
        return (first, product), (second, -0.5 * precision), back

    *pairs, back = found(q)
    for pair in pairs:
        close(*pair)
    for again in back:
        close(again, q)


@pytest.mark.parametrize("kinds", [(False, False), (True, True), (False, True), (True, False)])
def test_a_step_in_the_own_coordinates_is_a_change_of_variables(kinds, double):
    """The density of ``then`` at ``q.draw(u)`` is that of the step at ``u``, over det L."""
    q, step = some(3, kinds[0], 1), some(3, kinds[1], 2)

    @jax.jit
    def found(q, step, u):
        eye, times = jnp.eye(3), q.times(jnp.eye(3))
        densities = q.compose(step).log_density(q.draw(u)), step.log_density(u) - q.log_det
        drawn = times, jax.vmap(q._replace(loc=0 * q.loc).draw, 1, 1)(eye)
        standard = jax.tree.map(jnp.zeros_like, step.params())
        still = q.compose(Gaussian.from_params(standard))
        kept = (still.loc, still.log_scale), (q.loc, q.log_scale)
        roots = as_matrix(still.root), as_matrix(q.root)
        return densities, drawn, kept, roots, q.solve(times)

    *pairs, solved = found(q, step, np.array([0.3, -1.2, 2.0]))
    for pair in pairs:
        close(*pair)
    close(solved, np.eye(3), atol=1e-12)


def test_scales_far_from_one_are_carried_along():
    """In single precision: the unit triangle of a step stays what it is, and has a gradient."""
    step = some(3, True)

    @jax.jit
    def found(far):
        def unit(s):
            return identity((3,)).compose(far._replace(log_scale=s)).unit.sum()

        return identity((3,)).compose(far), jax.grad(unit)(far.log_scale)

    for size in (-90.0, -60.0, 60.0, 90.0):
        far = step._replace(log_scale=np.full(3, size, np.float32))
        composed, slope = found(far)
        close(composed, far, rtol=1e-6)
        close(slope, np.zeros(3))


def test_a_curvature_is_mended_in_the_scales_of_its_own_diagonal(double):
    r = np.random.default_rng(0)
    A = r.normal(size=(4, 4))
    A = A + A.T + np.diag([0.0, -3.0, 5.0, 1.0])
    unit = np.array([1e-6, 1.0, 1e4, 30.0])
    found, scaled = (Curvature.of(jnp.asarray(B)) for B in (A, A * unit * unit[:, None]))
    close(found.matrix(), A)
    close(scaled.values, found.values)
    close(scaled.unit, found.unit * unit)
    mended = found.positive(1e-6)
    assert (mended.values > 0).all()
    assert (found.values < 0).any()
    close(mended.solve(jnp.ones(4)), np.linalg.solve(mended.matrix(), np.ones(4)))
    L = mended.root_of_inverse()
    close(L @ L.T, np.linalg.inv(mended.matrix()), atol=1e-9)
    assert (np.triu(L, 1) == 0).all()


def test_a_flat_direction_is_no_flatter_than_a_share_of_the_largest(double):
    flat = jnp.array([[1.0, 1.0], [1.0, 1.0]])
    close(Curvature.of(flat).positive(1e-6).values, [2e-6, 2.0])
    close(Curvature.of(jnp.zeros((2, 2))).positive(1e-6).values, [1e-6, 1e-6])


def test_gaussians_of_two_kinds_and_spreads_of_other_shapes_are_refused():
    one, other = some(3, False), some(3, True)
    with pytest.raises(TypeError, match="full covariance"):
        one.kl(other)
    with pytest.raises(ValueError, match=r"\(3, 3\) .* \(2, 3\)"):
        Gaussian.of_root(jnp.zeros((2, 3)), jnp.eye(3))
