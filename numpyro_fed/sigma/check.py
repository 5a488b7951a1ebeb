"""Whether draws of a learnt prior are like those of the prior that it stands for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax import Array

from numpyro_fed import html
from numpyro_fed.errors import ModelError
from numpyro_fed.model.substitution import Blocks
from numpyro_fed.sigma.gaussian import Dense, field_of
from numpyro_fed.sigma.source import Source

QUANTILES = 0.1, 0.5, 0.9  # of the training's hyperparameters
COMPARED = 300  # draws of each prior, in the two-sample statistic
PERMUTATIONS = 200


class Learnt(Protocol):
    """A prior that can be drawn from."""

    @property
    def source(self) -> Source:
        """Return the source of draws of the true prior."""

    @property
    def blocks(self) -> Blocks:
        """Return how entries are split."""

    def sample(self, key: Array, n: int, phi: Mapping[str, Any] | None = None) -> Array:
        """Return draws (n, entries)."""


class Row(NamedTuple):
    """The comparison at one setting of the hyperparameters.

    Attributes
    ----------
    phi : dict
    within, across : float
        Mean absolute difference of covariances, over pairs of one block and of two, in units of the
        site's mean variance there.
    variance : float
        Marginal variances, relative to the true ones, on average.
    jump : float
        The same of differences between entries next to each other in two blocks.
    energy, p_value : float
        Energy distance of draws (Szekely and Rizzo 2013), and how often that is exceeded if draws
        of both priors change places.
    """

    phi: dict[str, Any]
    within: float
    across: float
    variance: float
    jump: float
    energy: float
    p_value: float


class Check(NamedTuple):
    """Rows for several hyperparameters; draws and covariances of both priors, for figures."""

    rows: tuple[Row, ...]
    draws: tuple[np.ndarray, ...]
    true: tuple[np.ndarray, ...]
    found: tuple[np.ndarray, ...]

    def _cells(self) -> list[tuple[str, ...]]:
        """Return the table: names of columns, and a row for each setting of the hyperparameters."""
        head = ("hyperparameters", "within", "across", "variance", "jump", "energy", "p")
        at = [
            ", ".join(f"{name}={float(np.mean(v)):.3g}" for name, v in row.phi.items())
            for row in self.rows
        ]
        numbers = [[f"{x:.3f}" for x in row[1:]] for row in self.rows]
        return [head, *((phi, *row) for phi, row in zip(at, numbers, strict=True))]

    def __str__(self) -> str:
        line = "{:28} {:>8} {:>8} {:>9} {:>7} {:>8} {:>6}"
        return "\n".join(line.format(phi[:28], *row) for phi, *row in self._cells())

    def _repr_html_(self) -> str:
        head, *lines = self._cells()
        return html.table(head, lines)


def checked(
    key: Array, prior: Learnt, at: Sequence[Mapping[str, Any]] | None, num_draws: int
) -> Check:
    """Compare draws of two priors; see :meth:`numpyro_fed.SigmaPrior.check`."""
    source, of = prior.source, prior.blocks.block_of
    if at is None:
        drawn = jax.vmap(source.hyper)(jax.random.split(key, 1_000))
        at = [
            {name: np.quantile(np.asarray(v), q, axis=0) for name, v in drawn.items()}
            for q in (QUANTILES if drawn else QUANTILES[:1])
        ]
    found = []
    apart = of[:, None] != of
    for i, phi in enumerate(at):
        for_own, for_true, for_test = jax.random.split(jax.random.fold_in(key, i), 3)
        own = np.asarray(prior.sample(for_own, num_draws, phi))
        theirs = np.asarray(source.at(for_true, phi, num_draws))
        true, cov = _covariance(source, phi, theirs), np.cov(own.T)
        unit = np.diagonal(true).mean()
        off = abs(cov - true) / unit
        between = np.flatnonzero(of[1:] != of[:-1])
        # Var(a - b) over the borders of blocks: whether draws go on smoothly there.
        pairs = [
            c[between, between] + c[between + 1, between + 1] - 2 * c[between, between + 1]
            for c in (cov, true)
        ]
        energy, p_value = energy_test(for_test, own[:COMPARED], theirs[:COMPARED])
        found.append(
            (
                Row(
                    dict(phi),
                    float(off[~apart].mean()),
                    float(off[apart].mean()) if apart.any() else 0.0,
                    float((np.diagonal(cov) / np.diagonal(true)).mean()),
                    float(pairs[0].mean() / pairs[1].mean()) if len(between) else 1.0,
                    energy,
                    p_value,
                ),
                own,
                true,
                cov,
            )
        )
    rows, draws, true_covs, covs = zip(*found, strict=True)
    return Check(rows, draws, true_covs, covs)


def _covariance(source: Source, phi: Mapping[str, Any], draws: np.ndarray) -> np.ndarray:
    """Return the true prior's covariance, or that of its draws where that is not known."""
    try:
        field = field_of(source.distribution(phi), source.site, source.spectrum)
    except ModelError:
        return np.cov(draws.T)
    if isinstance(field, Dense):
        return np.asarray(field.cov, float)
    return (field.vectors * np.asarray(field.variances)) @ field.vectors.T


def energy_test(key: Array, a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """Return the energy distance of two samples, and its permutation p-value."""
    both = np.concatenate([a, b]).astype(float)
    squares = (both**2).sum(1)
    gaps = np.sqrt(np.maximum(squares[:, None] + squares - 2 * both @ both.T, 0))
    sign = np.repeat([1.0 / len(a), -1.0 / len(b)], [len(a), len(b)])

    def distance(order: np.ndarray) -> float:
        s = sign[order]
        return float(-s @ gaps @ s)

    found = distance(np.arange(len(both)))
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    others = [distance(rng.permutation(len(both))) for _ in range(PERMUTATIONS)]
    return found, float((1 + np.sum(np.array(others) >= found)) / (1 + PERMUTATIONS))
