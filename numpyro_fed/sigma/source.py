"""Draws of a site's prior from the model's own text, and of what it depends on."""

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

from numpyro_fed.errors import DataError, ModelError
from numpyro_fed.model.feasible import is_flat
from numpyro_fed.model.jaxprs import provenance
from numpyro_fed.model.substitution import site_of, trace_text
from numpyro_fed.sigma.gaussian import Spectrum, field_of

LOOKS, EACH = 1_000, 4  # hyperparameters, and draws at each, of which scales are read off
LEVELS = 51  # of their quantiles
OUTSIDE = 0.01  # of the prior's draws, beyond the training range, without a word
SCORED, FARTHEST = 50, 10.0  # steps, and how far off a square counts in them
SLACK = 0.01  # of the range, beyond its ends
SLIGHT = 0.1  # spread of the logarithm of entries' size, that networks see to by themselves
RARE = 0.05  # the same of those of all hyperparameters together, beyond all that was drawn
ALIKE = 1e-3  # relative: two signatures of one distribution


class Scales(NamedTuple):
    """The units in which networks see a draw.

    Attributes
    ----------
    quantiles : (levels, hyper)
        Of the training's hyperparameters, unconstrained.
    mean, sd : (entries,)
        Of the entries, the latter in units of their size.
    centre, width : (hyper,)
        Mean and standard deviation of the hyperparameters.
    growth : (1 + 2 hyper,)
        How the logarithm of the entries' size goes with these, and with the squares of their
        ranks: exact for a hyperparameter that is a scale. Zero where it hardly goes with them.
    """

    quantiles: Array
    mean: Array
    sd: Array
    centre: Array
    width: Array
    growth: Array

    @property
    def hyper(self) -> int:
        """Return how many hyperparameters there are."""
        return self.quantiles.shape[1]

    def uniform(self, phi: Array) -> Array:
        """Return hyperparameters (hyper,) as networks take them.

        Those of the training are uniform, with mean 0 and variance 1, others at the ends.
        """
        levels = jnp.linspace(-jnp.sqrt(3.0), jnp.sqrt(3.0), len(self.quantiles))
        return jax.vmap(partial(jnp.interp, fp=levels), (0, 1))(phi, self.quantiles)

    def size(self, phi: Array) -> Array:
        """Return the size of the entries at hyperparameters (hyper,)."""
        return jnp.exp(self.features(phi) @ self.growth)

    def features(self, phi: Array) -> Array:
        """Return what the logarithm of the size is linear in."""
        inside = jnp.clip(phi, self.quantiles[0], self.quantiles[-1])
        own = (inside - self.centre) / self.width
        return jnp.concatenate([jnp.ones(1), own, self.uniform(phi) ** 2])

    def standardised(self, theta: Array, phi: Array) -> Array:
        """Return draws (..., entries) at hyperparameters, as networks see them."""
        return (theta - self.mean) / (self.size(phi) * self.sd)


class Draws(NamedTuple):
    """Hyperparameters, unconstrained (n, hyper), and draws at each of them (n, each, size); the
    standard normals (n, each, size) of which these are made, of a Gaussian prior.
    """

    phi: Array
    theta: Array
    noise: Array | None


@dataclass(frozen=True)
class Source:
    """The text from which draws of a site come.

    Attributes
    ----------
    model, kwargs
        The text, and with what it is run.
    site : str
    phi : tuple of str
        The latents that the site's distribution depends on.
    ranges : dict
        Of some of these, ``(low, high)``: uniform draws in the place of the prior's.
    """

    model: Callable[..., object]
    kwargs: Mapping[str, Any] = field(repr=False)
    site: str
    phi: tuple[str, ...]
    ranges: Mapping[str, tuple[float, float]]
    size: int
    spectrum: Spectrum | None = field(repr=False)

    @classmethod
    def of(
        cls,
        model: Callable[..., object],
        site: str,
        kwargs: Mapping[str, Any],
        ranges: Mapping[str, tuple[float, float]],
    ) -> Source:
        """Find out what a site depends on."""
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
        """Return the text at given hyperparameters."""
        known = {**phi, self.site: jnp.zeros(self.size)}  # a draw of it may take long
        return trace_text(self.model, key, self.kwargs, known)

    def hyper(self, key: Array, ranges: bool = True) -> dict[str, Array]:
        """Hyperparameters: of their range, or of the prior."""
        given: dict[str, Array] = {}
        for i, (name, (low, high)) in enumerate(self.ranges.items() if ranges else ()):
            like = self.trace(key, {})[name]["value"]
            mine = jax.random.fold_in(key, i + 1)
            given[name] = jax.random.uniform(mine, jnp.shape(like), minval=low, maxval=high)
        trace = self.trace(jax.random.fold_in(key, 0), given)
        return {name: trace[name]["value"] for name in self.phi}

    def flat(self, phi: Mapping[str, Array]) -> Array:
        """Return hyperparameters, unconstrained (hyper,)."""
        trace = self.trace(jax.random.key(0), phi)
        parts = [biject_to(trace[n]["fn"].support).inv(jnp.asarray(phi[n])) for n in self.phi]
        return jnp.concatenate([jnp.zeros(0), *map(jnp.ravel, parts)])

    def constrained(self, flat: Array) -> dict[str, Array]:
        """Hyperparameters from unconstrained ones (hyper,)."""
        trace, found, start = self.trace(jax.random.key(0), {}), {}, 0
        for name in self.phi:
            to = biject_to(trace[name]["fn"].support)
            like = jax.eval_shape(to.inv, trace[name]["value"])
            found[name] = to(flat[start : start + like.size].reshape(like.shape))
            start += like.size
        return found

    def signature(self, scales: Scales) -> np.ndarray:
        """Numbers that differ between distributions of the site that differ, at some of the
        training's hyperparameters.
        """
        numbers = []
        for flat in np.asarray(scales.quantiles)[[LEVELS // 4, LEVELS // 2, 3 * LEVELS // 4]]:
            for leaf in jax.tree.leaves(self.distribution(self.constrained(flat))):
                a = np.asarray(leaf, float).ravel()
                weights = np.random.default_rng(len(a)).uniform(0.5, 1.5, len(a))
                numbers += [a @ weights, np.abs(a) @ weights]
        return np.array(numbers)

    def warn_beyond(self, key: Array, scales: Scales) -> None:
        """Say so where the text's hyperparameters go beyond all that the training has seen."""

        def drawn(key: Array) -> Array:
            return self.flat(self.hyper(key, ranges=False))

        flat = np.asarray(jax.jit(jax.vmap(drawn))(jax.random.split(key, LOOKS)))
        low, high = np.asarray(scales.quantiles)[[0, -1]]
        share = float(((flat < low) | (flat > high)).any(1).mean())
        if share <= RARE:
            return
        ends = [self.constrained(jnp.asarray(end)) for end in (low, high)]
        said = ", ".join(f"{n} from {ends[0][n]:.3g} to {ends[1][n]:.3g}" for n in self.phi)
        warnings.warn(
            f"the prior of '{self.site}' was trained for {said}, and {100 * share:.0f} % of the "
            "draws of the model's hyperparameters are outside of that: a posterior that goes there "
            "cannot be trusted. Train it for a wider range, or narrow their priors in the model.",
            stacklevel=6,
        )

    def distribution(self, phi: Mapping[str, Array]) -> Distribution:
        """Return the site's distribution at given hyperparameters."""
        return self.trace(jax.random.key(0), phi)[self.site]["fn"]

    def at(self, key: Array, phi: Mapping[str, Array], n: int) -> Array:
        """Return draws of the site (n, size) at given hyperparameters."""
        return self.pairs(key, phi, n)[1]

    def pairs(self, key: Array, phi: Mapping[str, Array], n: int) -> tuple[Array | None, Array]:
        """Return draws of the site (n, size), and the standard normals that they are made of.

        The normals (n, size) come first; they are None for a prior that is not Gaussian.
        """
        fn = self.distribution(phi)
        try:
            gaussian = field_of(fn, self.site, self.spectrum)
        except ModelError:
            return None, fn.sample(key, (n,))
        noise = jax.random.normal(key, (n, self.size))
        return noise, gaussian.of_normals(noise)

    def draw(self, key: Array, n: int, each: int) -> Draws:
        """``each`` draws at each of ``n`` hyperparameters."""

        def one(key: Array) -> Draws:
            for_phi, for_theta = jax.random.split(key)
            phi = self.hyper(for_phi)
            noise, theta = self.pairs(for_theta, phi, each)
            return Draws(self.flat(phi), theta, noise)

        return jax.vmap(one)(jax.random.split(key, n))

    def scales(self, key: Array) -> Scales:
        """Read off draws; warns where the prior goes beyond the ranges."""
        for_draws, for_prior = jax.random.split(key)
        phi, theta, _ = jax.jit(partial(self.draw, n=LOOKS, each=EACH))(for_draws)
        if not bool(jnp.isfinite(theta).all()):
            raise DataError(
                f"draws of '{self.site}' from its prior are NaN or infinite. Add to the diagonal "
                "of its covariance what the precision needs (1e-4 of a variance in single), give "
                "narrower ranges, or use double precision."
            )
        self.compare_with_prior(for_prior)
        return _scales(phi, theta)

    def compare_with_prior(self, key: Array) -> None:
        """Warn where the prior goes beyond the ranges."""
        if not self.ranges:
            return
        keys = jax.random.split(key, LOOKS)
        drawn = jax.jit(jax.vmap(partial(self.hyper, ranges=False)))(keys)
        sites = self.trace(key, {})
        for name, (low, high) in self.ranges.items():
            if is_flat(sites[name]["fn"]):
                continue
            value = np.asarray(drawn[name])
            share = float(((value < low) | (value > high)).mean())
            if share > OUTSIDE:
                warnings.warn(
                    f"the prior of '{name}' is outside of the range {low} to {high} in "
                    f"{100 * share:.0f} % of its draws, where the prior of '{self.site}' is not "
                    "trained: a posterior that goes there cannot be trusted. Widen the range, or "
                    "narrow the prior in the model.",
                    stacklevel=4,
                )

    def compare(self, phi: Mapping[str, Any], scales: Scales) -> None:
        """Warn of hyperparameters that are known, and are outside of the training's."""
        if any(isinstance(v, jax.core.Tracer) for v in phi.values()):
            return
        given: dict[str, Any] = {name: np.asarray(phi[name]) for name in self.phi}
        ends = [self.constrained(scales.quantiles[i]) for i in (0, -1)]

        def outside(name: str) -> bool:
            low, high = (np.asarray(end[name]) for end in ends)
            slack = SLACK * (high - low)
            return bool(((given[name] < low - slack) | (given[name] > high + slack)).any())

        if any(map(outside, self.phi)):
            said = ", ".join(f"{name}={value}" for name, value in given.items())
            ranges = ", ".join(f"{n}: {ends[0][n]:.3g} to {ends[1][n]:.3g}" for n in self.phi)
            warnings.warn(
                f"{said} is outside of what the prior of '{self.site}' was trained for "
                f"({ranges}): it is taken at the end of that. Train it for a wider range.",
                stacklevel=3,
            )


def different(here: np.ndarray, there: np.ndarray) -> bool:
    """Return whether two signatures are of two distributions, in whatever units they are."""
    if here.shape != there.shape:
        return True
    size = np.repeat(there[1::2], 2)  # every second number is a sum of absolute values
    return bool((np.abs(here - there) > ALIKE * size).any())


@jax.jit
def _scales(phi: Array, theta: Array) -> Scales:
    """Return the scales of hyperparameters (n, hyper) and draws there (n, each, entries)."""
    width = phi.std(0)
    quantiles = jnp.quantile(phi, jnp.linspace(0, 1, LEVELS), axis=0)
    one = jnp.ones(theta.shape[-1])
    none = jnp.zeros(1 + 2 * phi.shape[1])
    scales = Scales(quantiles, one, one, phi.mean(0), jnp.where(width > 0, width, 1.0), none)
    features = jax.vmap(scales.features)(phi)
    middle = jnp.median(theta, (0, 1))
    spread = jnp.median(jnp.abs(theta - middle), (0, 1))
    off = (theta - middle) / jnp.where(spread > 0, spread, 1.0)
    squares = (off**2).mean((1, 2)) + jnp.finfo(theta.dtype).tiny
    inverse = jnp.linalg.pinv(features)

    def scored(i: Array, growth: Array) -> Array:
        """Return the coefficients after one step of Fisher scoring."""
        expected = jnp.exp(2 * features @ growth)
        return growth + 0.5 * inverse @ jnp.minimum(squares / expected - 1, FARTHEST)

    growth = jax.lax.fori_loop(0, SCORED, scored, inverse @ (0.5 * jnp.log(squares)))
    growth = jnp.where((features @ growth).std() > SLIGHT, growth, 0.0)
    size = jnp.exp(features @ growth)[:, None, None]
    mean = (theta / size**2).mean((0, 1)) / (1 / size**2).mean()
    sd = ((theta - mean) / size).std((0, 1))
    return scales._replace(mean=mean, sd=jnp.where(sd > 0, sd, 1.0), growth=growth)


def hyperparameters(
    model: Callable[..., object], site: str, kwargs: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return the latents on which a site's distribution depends."""

    def run(latents: dict[str, Array]) -> dict[str, Any]:
        return trace_text(model, 0, kwargs, latents)

    first = run({})
    latents = {
        n: s["value"]
        for n, s in first.items()
        if s["type"] == "sample" and not s["is_observed"] and n != site
    }

    def parameters(**latents: Array) -> list[Any]:
        return jax.tree.leaves(run(latents)[site]["fn"])

    params = {n: s["value"] for n, s in first.items() if s["type"] == "param"}
    reached = provenance(parameters, **latents, **params)
    labels = frozenset[str]().union(*jax.tree.leaves(reached))
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
