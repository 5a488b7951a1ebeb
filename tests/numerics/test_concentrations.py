"""Gamma, beta and Dirichlet densities are exact at any concentration, against decimal numbers."""

from decimal import Decimal, localcontext

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from cases import slow_but
from scipy.special import polygamma

from numpyro_fed.numerics.accurate_densities import accurate, log_rising

PI = Decimal("3.14159265358979323846264338327950288419716939937510")


def log_density(fn, value):
    return accurate(fn).log_prob(value)


def exact_log_gamma(a):
    """The log of gamma(a) by Stirling's formula at a + 50, in decimal numbers."""
    x, series = a + 50, (12, -360, 1260, -1680, 1188)
    total = (x - Decimal("0.5")) * x.ln() - x + (2 * PI).ln() / 2
    total += sum(1 / (c * x ** (2 * n + 1)) for n, c in enumerate(series))
    return total - sum((a + i).ln() for i in range(50))


def exact_gamma(a, rate, y):
    return a * rate.ln() + (a - 1) * y.ln() - rate * y - exact_log_gamma(a)


def exact_inverse_gamma(a, rate, y):
    return exact_gamma(a, rate, 1 / y) - 2 * y.ln()


def exact_beta(a, b, y):
    logs = (a - 1) * y.ln() + (b - 1) * (1 - y).ln()
    return logs + exact_log_gamma(a + b) - exact_log_gamma(a) - exact_log_gamma(b)


def exact_dirichlet(a, b, y):
    """The log density of Dirichlet(a, b, a + b) at y / 2, (1 - y) / 2 and 1 / 2."""
    c, half = a + b, Decimal("0.5")
    logs = (a - 1) * (y / 2).ln() + (b - 1) * ((1 - y) / 2).ln() + (c - 1) * half.ln()
    gammas = exact_log_gamma(a) + exact_log_gamma(b) + exact_log_gamma(c)
    return logs + exact_log_gamma(a + b + c) - gammas


EXACT = {
    "gamma": (exact_gamma, lambda a, b, y: log_density(dist.Gamma(a, b), y)),
    "inverse gamma": (exact_inverse_gamma, lambda a, b, y: log_density(dist.InverseGamma(a, b), y)),
    "beta": (exact_beta, lambda a, b, y: log_density(dist.Beta(a, b), y)),
    "beta by mean": (
        exact_beta,
        lambda a, b, y: log_density(dist.BetaProportion(a / (a + b), a + b), y),
    ),
    "Dirichlet": (
        exact_dirichlet,
        lambda a, b, y: log_density(
            dist.Dirichlet(jnp.stack([a, b, a + b])), jnp.stack([y / 2, (1 - y) / 2, 0.5])
        ),
    ),
}


@pytest.mark.parametrize("is_double", [True, False])
@pytest.mark.parametrize("name", slow_but(EXACT, 0))
def test_a_concentration_of_any_size_has_its_density_and_gradient(name, is_double):
    """At huge ones the density was too high by hundreds of nats: a mode where there is none."""
    exact, mine = EXACT[name]
    centre = 0.5 if name in ("beta", "beta by mean", "Dirichlet") else 1.0
    digits = 1e-10 if is_double else 1e-4
    with jax.enable_x64(is_double), localcontext(prec=90):
        derivatives = jax.jit(jax.value_and_grad(mine, (0, 1, 2)))
        # Powers of two, and places that no rounding moves.
        for power in (-10, 0, 3, 4, 12, 40) + ((60, 86) if is_double else ()):
            size, sd = 2.0**power, min(2.0 ** (-power / 2), 0.125)
            for place in (centre, centre * (1 + sd), centre * (1 - 5 * sd)):
                z = [jnp.asarray(v) for v in (size, size, place)]
                found, slopes = derivatives(*z)
                x = [Decimal(v) for v in (size, size, place)]
                # The inverse of a value is rounded, by so many sds.
                rounded = 10 * jnp.finfo(found.dtype).eps * size**0.5
                error = rounded if name == "inverse gamma" else 0.0
                np.testing.assert_allclose(
                    found, float(exact(*x)), rtol=digits, atol=error + digits
                )
                for i, slope in enumerate(slopes):
                    step = x[i] * Decimal("1e-25")
                    up, down = (exact(*x[:i], x[i] + s, *x[i + 1 :]) for s in (step, -step))
                    expected = float((up - down) / (2 * step))
                    # Slopes are differences of two numbers of this size.
                    noise = 10 * jnp.finfo(found.dtype).eps * (size / float(x[i]))
                    np.testing.assert_allclose(
                        slope, expected, rtol=digits, atol=noise + digits / 100
                    )


@pytest.mark.parametrize("order", [1, 2, 3])
def test_a_ratio_of_gamma_functions_has_the_derivatives_of_polygamma_functions(order):
    a, k = np.meshgrid([1e-3, 0.4, 1.0, 9.9, 10.0, 35.0, 800.0], [0.0, 1.0, 7.0, 300.0])
    derivative = log_rising
    for _ in range(order):
        derivative = jax.grad(derivative)
    with jax.enable_x64(True):
        found = jax.vmap(derivative)(*map(jnp.asarray, (a.ravel(), k.ravel())))
    expected = polygamma(order - 1, a + k) - polygamma(order - 1, a)
    size = np.abs(polygamma(order - 1, a)) + 1
    assert np.all(np.abs(np.asarray(found) - expected.ravel()) < 1e-13 * size.ravel())
