"""Laplace distributions without their kink: what becomes of them, and what stays."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from scipy import integrate

from numpyro_fed.text.handlers import without_kink

LAPLACE = dist.Laplace(2.0, 3.0)
STEEP = dist.AsymmetricLaplace(2.0, 3.0, 2.0)
QUANTILE = dist.AsymmetricLaplaceQuantile(2.0, 3.0, 0.9)


@pytest.mark.parametrize("fn", [LAPLACE, STEEP, QUANTILE], ids=lambda fn: type(fn).__name__)
def test_it_curves_at_the_centre_and_is_as_steep_far_out(fn):
    smooth = without_kink(fn).log_prob
    for x in (-500.0, 500.0):
        slope = jax.grad(lambda x: fn.log_prob(x).sum())(x)
        np.testing.assert_allclose(jax.grad(smooth)(x), slope, rtol=1e-4)
    assert jax.hessian(fn.log_prob)(2.1) == 0
    assert jax.hessian(smooth)(2.1) < -0.01
    x = np.linspace(-200, 200, 400_001)
    total = integrate.trapezoid(np.exp(np.asarray(smooth(x), float)), x)
    assert abs(total - 1) < (1e-3 if fn is LAPLACE else 0.2)


@pytest.mark.parametrize(
    "around",
    [
        lambda fn: fn.expand((4, 3)),
        lambda fn: fn.expand((4, 3)).to_event(1),
        lambda fn: fn.expand((4, 3)).to_event(1).mask(jnp.arange(4) < 2),
    ],
    ids=["expand", "to_event", "mask"],
)
def test_what_is_around_it_stays(around):
    smooth, plain = without_kink(around(LAPLACE)), around(LAPLACE)
    assert (smooth.batch_shape, smooth.event_shape) == (plain.batch_shape, plain.event_shape)
    x = np.random.default_rng(0).normal(size=(4, 3))
    expected = around(without_kink(LAPLACE)).log_prob(x)
    np.testing.assert_allclose(smooth.log_prob(x), expected, rtol=1e-6)
    assert without_kink(plain) is not plain


@pytest.mark.parametrize("fn", [dist.Normal(0, 1).expand((3,)).to_event(1), dist.StudentT(3.0)])
def test_others_are_left_as_they_are(fn):
    assert without_kink(fn) is fn
    assert without_kink(fn) is fn
