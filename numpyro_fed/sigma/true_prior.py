"""The true prior, which a SIGMA prior learns: draws of a site and its hyperparameters.

``TruePrior`` runs the model's text with some latents substituted. ``Scales`` standardise what the
networks see: entries by their mean, sd and size, and hyperparameters by their ranks among draws.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.distributions import Distribution, biject_to

from numpyro_fed.basics.errors import DataError, ModelError, ModelWarning
from numpyro_fed.sigma.fields import Spectrum, field_of
from numpyro_fed.text.jaxprs import provenance
from numpyro_fed.text.silo_plate import is_flat
from numpyro_fed.text.substitution import site_of, trace_text

# Draws of the hyperparameters from which scales are estimated, and draws of the site at each: they
# give an entry's sd to about sqrt(1 / 8,000) = 1 %.
SCALE_HYPER, SCALE_DRAWS = 1_000, 4
# Quantiles of the hyperparameters, one for each 2 % of the draws: twenty draws lie between two.
LEVELS = 51
# Share of a hyperparameter's prior that may lie outside of its range without a warning.
OUTSIDE = 0.01
# Steps of Fisher scoring, each of which is one product with a small matrix, and the largest
# relative residual in them: a draw far out in a heavy tail would otherwise throw a step off.
SCORING_STEPS, MAX_RESIDUAL = 50, 10.0
# Share of the training's range by which given hyperparameters may lie beyond it without a warning:
# rounding moves an end.
SLACK = 0.01
# Spread of the logarithm of the entries' size below which it is taken as constant. A change of size
# by a tenth is small enough for the networks, and smaller ones are Monte Carlo error of the fit.
SLIGHT = 0.1
# Share of the model's draws that may have some hyperparameter beyond all of the training's without
# a warning. With several hyperparameters a few of a thousand new draws are beyond the old ones.
RARE = 0.05
# Relative difference of two signatures of one distribution: other machines and precisions differ by
# less, other kernels or maps by more.
ALIKE = 1e-3


Draws = tuple[Array, Array, Array | None]  # hyperparameters, draws of the site, normals behind


class Scales(NamedTuple):
    """The scales by which draws and hyperparameters are standardised for the networks."""

    quantiles: Array  # (levels, hyper) of the training's hyperparameters, unconstrained
    mean: Array  # (entries,)
    sd: Array  # (entries,) in units of their size
    centre: Array  # (hyper,) the mean and the sd of the hyperparameters, unconstrained
    width: Array
    # (1 + 2 hyper,) coefficients of a regression of the log size of the entries on a constant, the
    # standardised hyperparameters and the squares of their ranks. For a hyperparameter that is a
    # scale the regression is exact. All are zero if the size hardly changes.
    growth: Array

    def ranks(self, phi: Array) -> Array:
        """Return hyperparameters (hyper,) as networks take them: by rank among the training's."""
        # Values beyond its range are set to the ends, since networks do not extrapolate.
        # A uniform distribution on (-sqrt(3), sqrt(3)) has variance 1.
        levels = jnp.linspace(-jnp.sqrt(3.0), jnp.sqrt(3.0), len(self.quantiles))
        return jax.vmap(partial(jnp.interp, fp=levels), (0, 1))(phi, self.quantiles)

    def size(self, phi: Array) -> Array:
        """Return the size of the entries, (), at hyperparameters (hyper,)."""
        return jnp.exp(self.features(phi) @ self.growth)

    def features(self, phi: Array) -> Array:
        """Return the regressors of the log size, (1 + 2 hyper,)."""
        inside = jnp.clip(phi, self.quantiles[0], self.quantiles[-1])
        linear = (inside - self.centre) / self.width
        return jnp.concatenate([jnp.ones(1), linear, self.ranks(phi) ** 2])

    def standardised(self, theta: Array, phi: Array) -> Array:
        """Return draws (..., entries) at hyperparameters (hyper,) as the networks take them."""
        return (theta - self.mean) / (self.size(phi) * self.sd)


@dataclass(frozen=True)
class TruePrior:
    """The prior of a site and its hyperparameters, by the model from which both are drawn."""

    model: Callable[..., object]
    kwargs: Mapping[str, Any] = field(repr=False)  # with which the model is run
    site: str
    phi: tuple[str, ...]  # the latents that the site's distribution depends on
    # (low, high) of the hyperparameters that are drawn uniformly, not from their prior
    ranges: Mapping[str, tuple[float, float]]
    size: int  # the number of entries of the site
    spectrum: Spectrum | None = field(repr=False)  # of a map of areas

    @classmethod
    def of(
        cls,
        model: Callable[..., object],
        site: str,
        kwargs: Mapping[str, Any],
        ranges: Mapping[str, tuple[float, float]],
    ) -> TruePrior:
        """Return the prior of a site after checks of the site, its hyperparameters and ranges."""
        fn = site_of(model, site, kwargs)
        phi = hyperparameters(model, site, kwargs)
        latents = trace_text(model, 0, kwargs)
        for name, (low, high) in ranges.items():
            if name not in phi:
                raise ModelError(
                    f"ranges has '{name}', but '{site}' depends on {', '.join(phi) or 'nothing'}."
                )
            if not low < high:
                raise DataError(f"the range of '{name}' is {low} to {high}: the least comes first.")
            support = latents[name]["fn"].support
            if not np.all([support(jnp.asarray(end)) for end in (low, high)]):
                raise DataError(
                    f"the range of '{name}', {low} to {high}, leaves its support, {support}."
                )
        for name in phi:
            if is_flat(latents[name]["fn"]) and name not in ranges:
                raise ModelError(
                    f"'{site}' depends on '{name}', whose prior is flat (ImproperUniform): nothing "
                    f"says for what to train. Say so, by ranges={{'{name}': (low, high)}}."
                )
        spectrum = Spectrum.of(fn, site)
        return cls(model, kwargs, site, phi, dict(ranges), fn.event_shape[0], spectrum)

    def trace(self, key: Array, phi: Mapping[str, Any]) -> dict[str, Any]:
        """Return the trace of the text at given hyperparameters, the site at zero."""
        # Without a value the site would be drawn, by a Cholesky factor of all of its entries.
        known = {**phi, self.site: jnp.zeros(self.size)}
        return trace_text(self.model, key, self.kwargs, known)

    def draw_phi(self, key: Array, ranges: bool = True) -> dict[str, Array]:
        """Return a draw of the hyperparameters, {name: value}, from ranges and their prior."""
        given: dict[str, Array] = {}
        for i, (name, (low, high)) in enumerate(self.ranges.items() if ranges else ()):
            like = self.trace(key, {})[name]["value"]
            name_key = jax.random.fold_in(key, i + 1)
            given[name] = jax.random.uniform(name_key, jnp.shape(like), minval=low, maxval=high)
        # The others are drawn given these: a prior may depend on a hyperparameter with a range.
        trace = self.trace(jax.random.fold_in(key, 0), given)
        return {name: trace[name]["value"] for name in self.phi}

    def flat(self, phi: Mapping[str, Array]) -> Array:
        """Return hyperparameters, unconstrained (hyper,)."""
        trace = self.trace(jax.random.key(0), phi)
        parts = [biject_to(trace[n]["fn"].support).inv(jnp.asarray(phi[n])) for n in self.phi]
        return jnp.concatenate([jnp.zeros(0), *map(jnp.ravel, parts)])

    def constrained(self, flat: Array) -> dict[str, Array]:
        """Return hyperparameters {name: value} from unconstrained ones (hyper,)."""
        trace, phi, start = self.trace(jax.random.key(0), {}), {}, 0
        for name in self.phi:
            bijection = biject_to(trace[name]["fn"].support)
            like = jax.eval_shape(bijection.inv, trace[name]["value"])
            phi[name] = bijection(flat[start : start + like.size].reshape(like.shape))
            start += like.size
        return phi

    def signature(self, scales: Scales) -> np.ndarray:
        """Return numbers that differ between distributions of the site that differ."""
        # Two sums for each parameter of the distribution, at three quantiles of hyperparameters.
        numbers = []
        for flat in np.asarray(scales.quantiles)[[LEVELS // 4, LEVELS // 2, 3 * LEVELS // 4]]:
            for leaf in jax.tree.leaves(self.distribution(self.constrained(flat))):
                a = np.asarray(leaf, float).ravel()
                # Random weights: permuted or transposed parameters have other sums. Absolute values
                # give the unit in which a difference is judged.
                weights = np.random.default_rng(len(a)).uniform(0.5, 1.5, len(a))
                numbers += [a @ weights, np.abs(a) @ weights]
        return np.array(numbers)

    def warn_if_model_goes_beyond(self, key: Array, scales: Scales) -> None:
        """Warn if the model's prior of the hyperparameters goes beyond the training's range."""

        draw = jax.vmap(lambda key: self.flat(self.draw_phi(key, ranges=False)))
        flat = np.asarray(jax.jit(draw)(jax.random.split(key, SCALE_HYPER)))
        low, high = np.asarray(scales.quantiles)[[0, -1]]
        share = float(((flat < low) | (flat > high)).any(1).mean())
        if share <= RARE:
            return
        ends = [self.constrained(jnp.asarray(end)) for end in (low, high)]
        trained = ", ".join(f"{n} from {ends[0][n]:.3g} to {ends[1][n]:.3g}" for n in self.phi)
        warnings.warn(
            f"the prior of '{self.site}' was trained for {trained}, and {100 * share:.0f} % of the "
            "draws of the model's hyperparameters are outside of that: a posterior that goes there "
            "cannot be trusted. Train it for a wider range, or narrow their priors in the model.",
            category=ModelWarning,
            stacklevel=6,
        )

    def distribution(self, phi: Mapping[str, Array]) -> Distribution:
        """Return the site's distribution at given hyperparameters."""
        return self.trace(jax.random.key(0), phi)[self.site]["fn"]

    def draws_with_noise(
        self, key: Array, phi: Mapping[str, Array], n: int
    ) -> tuple[Array | None, Array]:
        """Return draws (n, size) behind the normals that they are made of; None where of none."""
        fn = self.distribution(phi)
        try:
            gaussian = field_of(fn, self.site, self.spectrum)
        except ModelError:
            return None, fn.sample(key, (n,))
        noise = jax.random.normal(key, (n, self.size))
        return noise, gaussian.from_normals(noise)

    def draw(self, key: Array, n: int, each: int) -> Draws:
        """Return ``each`` draws of the site at each of ``n`` draws of the hyperparameters.

        They are ``phi`` (n, hyper), ``theta`` (n, each, size), and the normals that draws of a
        Gaussian prior are made of, of the same shape.
        """

        def draw(key: Array) -> Draws:
            for_phi, for_theta = jax.random.split(key)
            phi = self.draw_phi(for_phi)
            noise, theta = self.draws_with_noise(for_theta, phi, each)
            return self.flat(phi), theta, noise

        return jax.vmap(draw)(jax.random.split(key, n))

    def scales(self, key: Array) -> Scales:
        """Return the scales, estimated from draws. Warn if the prior goes beyond the ranges."""
        for_draws, for_prior = jax.random.split(key)
        draw = jax.jit(partial(self.draw, n=SCALE_HYPER, each=SCALE_DRAWS))
        phi, theta, _ = draw(for_draws)
        if not bool(jnp.isfinite(theta).all()):
            raise DataError(
                f"draws of '{self.site}' from its prior are NaN or infinite. Add to the diagonal "
                "of its covariance what the precision needs (1e-4 of a variance in single), give "
                "narrower ranges, or use double precision."
            )
        scales = _scales(phi, theta)
        if not self.ranges:
            return scales
        keys = jax.random.split(for_prior, SCALE_HYPER)
        by_prior = jax.jit(jax.vmap(partial(self.draw_phi, ranges=False)))(keys)
        sites = self.trace(for_prior, {})
        for name, (low, high) in self.ranges.items():
            if is_flat(sites[name]["fn"]):
                continue
            value = np.asarray(by_prior[name])
            share = float(((value < low) | (value > high)).mean())
            if share > OUTSIDE:
                warnings.warn(
                    f"the prior of '{name}' is outside of the range {low} to {high} in "
                    f"{100 * share:.0f} % of its draws, where the prior of '{self.site}' is not "
                    "trained: a posterior that goes there cannot be trusted. Widen the range, or "
                    "narrow the prior in the model.",
                    category=ModelWarning,
                    stacklevel=3,
                )
        return scales

    def warn_if_outside(self, phi: Mapping[str, Any], scales: Scales) -> None:
        """Warn of given hyperparameters that are outside of the training's range."""
        # Inside of a trace values are not known.
        if any(isinstance(v, jax.core.Tracer) for v in phi.values()):
            return
        given: dict[str, Any] = {name: np.asarray(phi[name]) for name in self.phi}
        ends = [self.constrained(scales.quantiles[i]) for i in (0, -1)]
        outside = False
        for name, value in given.items():
            low, high = (np.asarray(end[name]) for end in ends)
            slack = SLACK * (high - low)
            outside |= bool(((value < low - slack) | (value > high + slack)).any())
        if outside:
            words = ", ".join(f"{name}={value}" for name, value in given.items())
            ranges = ", ".join(f"{n}: {ends[0][n]:.3g} to {ends[1][n]:.3g}" for n in self.phi)
            warnings.warn(
                f"{words} is outside of what the prior of '{self.site}' was trained for "
                f"({ranges}): it is taken at the end of that. Train it for a wider range.",
                category=ModelWarning,
                stacklevel=3,
            )


def signatures_differ(signature: np.ndarray, expected: np.ndarray) -> bool:
    """Return whether two signatures belong to different distributions, whatever their units."""
    if signature.shape != expected.shape:
        return True
    # Every second number is a sum of absolute values, and sets the unit of its pair.
    size = np.repeat(expected[1::2], 2)
    return bool((np.abs(signature - expected) > ALIKE * size).any())


@jax.jit
def _scales(phi: Array, theta: Array) -> Scales:
    """Return the scales, from hyperparameters (n, hyper) and draws there (n, each, entries)."""
    width = phi.std(0)
    quantiles = jnp.quantile(phi, jnp.linspace(0, 1, LEVELS), axis=0)
    ones = jnp.ones(theta.shape[-1])
    zeros = jnp.zeros(1 + 2 * phi.shape[1])
    scales = Scales(quantiles, ones, ones, phi.mean(0), jnp.where(width > 0, width, 1.0), zeros)
    features = jax.vmap(scales.features)(phi)
    # Medians, which a heavy tail does not move.
    middle = jnp.median(theta, (0, 1))
    spread = jnp.median(jnp.abs(theta - middle), (0, 1))
    deviations = (theta - middle) / jnp.where(spread > 0, spread, 1.0)
    squares = (deviations**2).mean((1, 2)) + jnp.finfo(theta.dtype).tiny
    # The size is fitted by maximum likelihood as if entries were normal with variance
    # exp(2 features @ growth). A regression of log squares would be biased by an amount that
    # depends on how entries correlate.
    inverse = jnp.linalg.pinv(features)

    def scoring_step(i: Array, growth: Array) -> Array:
        expected = jnp.exp(2 * features @ growth)
        return growth + 0.5 * inverse @ jnp.minimum(squares / expected - 1, MAX_RESIDUAL)

    start = inverse @ (0.5 * jnp.log(squares))
    growth = jax.lax.fori_loop(0, SCORING_STEPS, scoring_step, start)
    growth = jnp.where((features @ growth).std() > SLIGHT, growth, 0.0)
    size = jnp.exp(features @ growth)[:, None, None]
    # Weighted by precision: draws of a large size say little about the mean.
    mean = (theta / size**2).mean((0, 1)) / (1 / size**2).mean()
    sd = ((theta - mean) / size).std((0, 1))
    return scales._replace(mean=mean, sd=jnp.where(sd > 0, sd, 1.0), growth=growth)


def hyperparameters(
    model: Callable[..., object], site: str, kwargs: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return the names of the latents that a site's distribution depends on."""

    first = trace_text(model, 0, kwargs, {})
    latents = {
        n: s["value"]
        for n, s in first.items()
        if s["type"] == "sample" and not s["is_observed"] and n != site
    }

    params = {n: s["value"] for n, s in first.items() if s["type"] == "param"}
    by_leaf = provenance(
        lambda **known: jax.tree.leaves(trace_text(model, 0, kwargs, known)[site]["fn"]),
        **latents,
        **params,
    )
    labels = frozenset[str]().union(*jax.tree.leaves(by_leaf))
    for name in labels:
        if name in params:
            raise ModelError(
                f"'{site}' depends on the parameter '{name}', which is learnt in a run, after the "
                "training: sample it from a prior, or take a closed form (nf.LowRankPrior)."
            )
        if first[name]["fn"].support.is_discrete:
            raise ModelError(
                f"'{site}' depends on the discrete latent '{name}': nothing can be learnt of that."
            )
    return tuple(n for n in latents if n in labels)
