"""The comparison of a learnt prior with the true one, by covariances and an energy distance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from numpyro_fed import html
from numpyro_fed.errors import ModelError
from numpyro_fed.sigma.gaussian import Dense, field_of
from numpyro_fed.sigma.source import Source

# The hyperparameters at which priors are compared, as quantiles of the training's: a learnt prior
# is best in the middle of their range and worst near its ends (docs/results/sigma.md).
QUANTILES = 0.1, 0.5, 0.9
# Draws of each prior in the energy distance. Its time grows with their square.
COMPARED = 300
# Permutations for its p-value, which is at least 1 / 201 with so many.
PERMUTATIONS = 200


class Row(NamedTuple):
    """The comparison at one setting of the hyperparameters.

    Attributes
    ----------
    phi : dict
        The hyperparameters.
    within, across : float
        Mean absolute difference of covariances, over pairs of entries in one block and in two, in
        units of the site's mean variance.
    variance : float
        Mean ratio of marginal variances to the true ones.
    jump : float
        Ratio of mean variances of the differences between neighbouring entries in two blocks.
    energy, p_value : float
        Energy distance of draws (Szekely and Rizzo 2013) and its permutation p-value.
    """

    phi: dict[str, Any]
    within: float
    across: float
    variance: float
    jump: float
    energy: float
    p_value: float


class Check(NamedTuple):
    """The comparison of a learnt prior with the true one, at several hyperparameters.

    Attributes
    ----------
    rows : tuple of Row
    draws : tuple of arrays (draws, entries)
        Draws of the learnt prior, for each row.
    true, found : tuple of arrays (entries, entries)
        Covariances of the true and of the learnt prior, for each row.
    """

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


def compare_draws(
    key: Array,
    source: Source,
    sample: Callable[[Array, int, Mapping[str, Any]], Array],
    block_of: np.ndarray,
    at: Sequence[Mapping[str, Any]] | None,
    num_draws: int,
) -> Check:
    """Return the comparison of a learnt prior with the true one, see ``SigmaPrior.check``.

    ``sample(key, n, phi)`` draws from the learnt one, ``source`` from the true one.
    """
    if at is None:
        drawn = jax.vmap(source.hyper)(jax.random.split(key, 1_000))
        at = [
            {name: np.quantile(np.asarray(v), q, axis=0) for name, v in drawn.items()}
            for q in (QUANTILES if drawn else QUANTILES[:1])
        ]
    compared = []
    apart = block_of[:, None] != block_of
    for i, phi in enumerate(at):
        for_learnt, for_true, for_test = jax.random.split(jax.random.fold_in(key, i), 3)
        learnt = np.asarray(sample(for_learnt, num_draws, phi))
        true_draws = np.asarray(source.draws_with_noise(for_true, phi, num_draws)[1])
        cov = np.cov(learnt.T)
        try:
            known = field_of(source.distribution(phi), source.site, source.spectrum)
        except ModelError:  # no Gaussian: by its draws
            true = np.cov(true_draws.T)
        else:
            true = (
                np.asarray(known.cov, float)
                if isinstance(known, Dense)
                else (known.vectors * np.asarray(known.variances)) @ known.vectors.T
            )
        unit = np.diagonal(true).mean()
        error = abs(cov - true) / unit
        borders = np.flatnonzero(block_of[1:] != block_of[:-1])
        # Var(a - b) of neighbours in two blocks: the variance of the jump of draws at borders.
        jumps = [
            c[borders, borders] + c[borders + 1, borders + 1] - 2 * c[borders, borders + 1]
            for c in (cov, true)
        ]
        energy, p_value = energy_test(for_test, learnt[:COMPARED], true_draws[:COMPARED])
        compared.append(
            (
                Row(
                    dict(phi),
                    float(error[~apart].mean()),
                    float(error[apart].mean()) if apart.any() else 0.0,
                    float((np.diagonal(cov) / np.diagonal(true)).mean()),
                    float(jumps[0].mean() / jumps[1].mean()) if len(borders) else 1.0,
                    energy,
                    p_value,
                ),
                learnt,
                true,
                cov,
            )
        )
    rows, draws, true_covs, covs = zip(*compared, strict=True)
    return Check(rows, draws, true_covs, covs)


def energy_test(key: Array, a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """Return the energy distance of two samples (draws, entries), and its permutation p-value."""
    both = np.concatenate([a, b]).astype(float)
    squares = (both**2).sum(1)
    # Differences of squares may be negative by rounding.
    distances = np.sqrt(np.maximum(squares[:, None] + squares - 2 * both @ both.T, 0))
    sign = np.repeat([1.0 / len(a), -1.0 / len(b)], [len(a), len(b)])

    # 2 E|X - Y| - E|X - X'| - E|Y - Y'| as one quadratic form: a permutation only changes signs.
    def energy(order: np.ndarray) -> float:
        s = sign[order]
        return float(-s @ distances @ s)

    observed = energy(np.arange(len(both)))
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    permuted = [energy(rng.permutation(len(both))) for _ in range(PERMUTATIONS)]
    return observed, float((1 + np.sum(np.array(permuted) >= observed)) / (1 + PERMUTATIONS))
