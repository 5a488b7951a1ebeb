"""What a search asks of a text: log densities with gradient and Hessian, of silos and of the prior.

:class:`Expand` is a silo's program, and :class:`Prior` the server's. They are compiled once for
each shape, and entered by every step of every search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.basics.programs import jit_once, map_in_batches, readable
from numpyro_fed.basics.trees import AnyArray, Numbers, all_finite, where
from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.guides.quadrature import silo_integral
from numpyro_fed.numerics import linalg
from numpyro_fed.numerics.gaussian import LOG_2PI
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.site_table import Rows, Theta

# Distance of the start from zero, where some densities have a kink: derivatives of abs and max are
# those of neither side there, and half of a logistic regression's gradient is lost. Beside a
# covariate that counts people or seconds 0.01 is far: all rows of such a regression are then
# certain of their outcome, and nothing has curvature.
ASIDE = 1e-9
NUDGE = 1e-2  # distance from zero of a general point, and of a search without Hessians
ROUNDING_UNITS = 8  # eps of a sum, relative: within it two log densities count as equal
# Columns of a Hessian, or points, that silos compute side by side. More use more memory; one by one
# repeats the loop over rows for each of them.
BATCH = 16
# The largest dimension of rows' latents for which that is quicker: beyond it the batched products
# of small matrices run as plain loops on a CPU (as of :data:`SIDE_BY_SIDE`).
BATCH_UP_TO_DIM = 4
# Numbers in the data up to which a silo's program is compiled with few optimisations, since its
# steps take less time than they would. Those of rows with latents count as so many more.
LITTLE, TIMES_FOR_LATENTS = 20_000, 20
# Coordinates up to which the prior's program is, and how many of its places are computed together.
# Starts are taken one after the other: side by side, stacks of matrices become stacks of stacks,
# which XLA:CPU multiplies by plain loops. Four searches with a hundred effects took more than four
# minutes an exchange (docs/results/raw_data.md).
FEW_COORDINATES, SIDE_BY_SIDE = 50, 64
PRIOR_DRAWS = 512  # for starts, and for quantiles of the prior, which need not be exact

Aux = TypeVar("Aux")


class Expansion(NamedTuple, Generic[AnyArray]):
    """A function at a point ``x`` (n,): value, gradient (n,) and negative Hessian (n, n).

    The search for many globals has the diagonal (n,) of the Hessian alone.
    """

    x: AnyArray
    value: AnyArray
    gradient: AnyArray
    curvature: AnyArray


class SiloExpansion(NamedTuple, Generic[AnyArray]):
    """A silo's message: log likelihood, gradient and negative Hessian, for each start."""

    value: AnyArray
    gradient: AnyArray
    curvature: AnyArray


class SearchState(NamedTuple):
    """A silo's state: modes of its locals, its last reply, for each start, and private parameters.

    The modes are the start of the next search for them. The private parameters stay as they are.
    ``top`` (num_starts,) is the log likelihood at the silo's own mode. Where its climb has ended
    at no mode, it is the lowest number of the dtype (``jnp.finfo(dtype).min``).
    """

    z_L: Mapping[str, Numbers]
    place: SiloExpansion[Any]
    private: dict[str, Any]
    top: Numbers


@dataclass(frozen=True, eq=False)
class Expand:
    """A silo's log likelihood with derivatives, at a point for each start: the search's program."""

    model: FederatedModel

    def at_silos(
        self, places: Array, least: Array, z_L: Rows, private: Theta, data: SiloData
    ) -> tuple[SiloExpansion[Array], Rows]:
        """Return the replies and the modes of rows of a stack of silos.

        ``places`` is (silos, starts, n). Replies are NaN at a point too far for a silo. The modes
        of its latents are those at the point if the log likelihood is at least ``least`` (silos,
        starts) there, else they stay ``z_L``: those of a failed point are no start for a search.
        """
        fm = self.model
        derive = partial(derivatives, columns_at_once=columns_at_once(fm))

        def at_start(
            private: Theta, data: SiloData, at: tuple[Array, Array, Rows]
        ) -> tuple[SiloExpansion[Array], Rows]:
            x, least, before = at
            up, modes, finite = silo_expansion(derive, fm, private, data, before, x)
            return up, where(finite & (up.value >= least), modes, before)

        # Starts are not taken side by side: SIDE_BY_SIDE.
        found = jax.vmap(
            lambda private, data, *starts: jax.lax.map(partial(at_start, private, data), starts)
        )(private, data, places, least, z_L)
        return readable(found)

    @cached_property
    def _programs(self) -> tuple[Callable[..., tuple[SiloExpansion[Array], Rows]], ...]:
        """Return the program compiled quickly, and well."""
        return jit_once(self.at_silos), jax.jit(self.at_silos)

    def __call__(
        self, places: np.ndarray, least: np.ndarray, state: SearchState, data: SiloData
    ) -> tuple[SiloExpansion[np.ndarray], Rows]:
        """Return the replies as NumPy arrays, and the modes, as :meth:`at_silos` does."""
        values = sum(a.size for a in jax.tree.leaves(data))
        times = TIMES_FOR_LATENTS if any(p.dim for p in self.model.plates) else 1
        program = self._programs[values * times > LITTLE]
        found = program(places, least, state.z_L, state.private, data)
        up, modes = jax.block_until_ready(found)  # which Ctrl-C can end
        return jax.tree.map(np.asarray, up), modes


@dataclass(frozen=True, eq=False)
class Prior:
    """The log prior with derivatives, effects integrated out (:func:`log_prior_of`).

    ``effects`` (c,) int array.
    ``at_once``: The number of places, of which a multiple is computed: one program serves server
        and silos.
    """

    model: FederatedModel
    effects: np.ndarray
    at_once: int = 1

    @cached_property
    def program(self) -> Callable[[Numbers, Numbers], Expansion[Array]]:
        """Return ``(A_b, places)`` to the expansions at places (m, n), with ``A_b`` (m, c, c)."""
        log_prior = partial(log_prior_of, self.model, self.effects)
        few = flat_size(self.model) <= FEW_COORDINATES

        def program(of_effects: Numbers, places: Numbers) -> Expansion[Array]:
            # Those of many silos side by side.
            side_by_side = few and not len(self.effects)
            return jax.lax.map(
                lambda at: derivatives(partial(log_prior, at[0]), at[1])[0],
                (jnp.asarray(of_effects), jnp.asarray(places)),
                batch_size=min(len(places), SIDE_BY_SIDE) if side_by_side else None,
            )

        return jit_once(program) if few else jax.jit(program)

    def __call__(self, of_effects: np.ndarray, places: np.ndarray) -> Expansion[np.ndarray]:
        """Return expansions at places (m, n), as NumPy arrays."""
        m = len(places)
        index = np.arange(-(-m // self.at_once) * self.at_once) % m
        found = jax.block_until_ready(self.program(of_effects[index], places[index]))
        return Expansion(*(np.asarray(a)[:m] for a in found))


def effects_of(fm: FederatedModel) -> np.ndarray:
    """Return the coordinates (c,) of global latents whose prior depends on other globals or theta.

    The joint density of such an effect and its scale rises without bound as the scale goes to
    zero.
    """
    setters, num_theta = fm.global_prior.setters, flat_size(fm) - fm.dim
    found = [np.arange(s.start, s.stop) for s in fm.named("latent") if setters[s.name]]
    return num_theta + np.concatenate([np.zeros(0, int), *found])


def log_prior_of(
    fm: FederatedModel, effects: np.ndarray, silo_precision: Numbers, x: Array
) -> tuple[Array, tuple[()]]:
    r"""Return ``(value, ())`` of the log prior at ``x``, effects integrated by Laplace's method.

    ``silo_precision`` :math:`A_b` (c, c) is the silos' negative Hessian among the ``c`` effects
    ``b``, held fixed:

    .. math::
        \log p(z_G) + \tfrac c2 \log 2\pi - \tfrac12 \log\det(-\nabla_b^2 \log p(z_G) + A_b).
    """

    def joint(x: Array) -> Array:
        return fm.smoothed.log_prior(*unravelled(fm, x))

    if not len(effects):
        return joint(x), ()
    precision = silo_precision - jax.hessian(lambda b: joint(x.at[effects].set(b)))(x[effects])
    log_det = 2 * jnp.log(jnp.diagonal(linalg.cholesky(precision))).sum()
    return joint(x) + 0.5 * (len(effects) * LOG_2PI - log_det), ()


def prior_draws(fm: FederatedModel) -> np.ndarray | None:
    """Return unconstrained draws (n, dim) of the globals from their prior; None if it has none."""
    drawn = fm.draw_prior(0, PRIOR_DRAWS) if fm.dim else None
    return None if drawn is None else np.asarray(drawn)


def silo_log_likelihood(
    fm: FederatedModel, private: Theta, data: SiloData, z_L: Rows, x: Array
) -> tuple[Array, Rows]:
    """Return a silo's log likelihood at a point, and the modes of its rows near ``z_L``."""
    theta, z_G = unravelled(fm, x)
    return silo_integral(fm)({**theta, **private}, z_G, data, z_L)


def silo_expansion(
    derive: Callable[..., tuple[Expansion[Array], Rows]],
    fm: FederatedModel,
    private: Theta,
    data: SiloData,
    z_L: Rows,
    x: Array,
) -> tuple[SiloExpansion[Array], Rows, Array]:
    """Return a silo's message at ``x`` (n,), NaN unless finite, its modes, and whether it is."""
    place, modes = derive(partial(silo_log_likelihood, fm, private, data, z_L), x)
    found = SiloExpansion(*place[1:])
    finite = all_finite((found, modes))
    return jax.tree.map(lambda a: jnp.where(finite, a, jnp.nan), found), modes, finite


def columns_at_once(fm: FederatedModel) -> int:
    """Return how many points, or columns of a Hessian, silos compute side by side."""
    return BATCH if all(p.dim <= BATCH_UP_TO_DIM for p in fm.plates) else 1


def unravelled(fm: FederatedModel, x: AnyArray) -> tuple[dict[str, AnyArray], AnyArray]:
    """Return shared parameters and globals of one vector."""
    theta = jax.eval_shape(lambda: fm.init_theta(jax.random.key(0)))
    shapes: list[tuple[int, ...]] = [a.shape for a in jax.tree.leaves(theta)]
    ends = np.cumsum([0, *map(math.prod, shapes)])
    parts = [x[i:j].reshape(size) for i, j, size in zip(ends, ends[1:], shapes, strict=False)]
    return jax.tree.unflatten(jax.tree.structure(theta), parts), x[ends[-1] :]


def flat_size(fm: FederatedModel) -> int:
    """Return the length of the vector of shared parameters and globals."""
    theta = jax.eval_shape(lambda: fm.init_theta(jax.random.key(0)))
    return sum(math.prod(a.shape) for a in jax.tree.leaves(theta)) + fm.dim


def derivatives(
    f: Callable[[Array], tuple[Array, Aux]], x: Array, *, columns_at_once: int = BATCH
) -> tuple[Expansion[Array], Aux]:
    """Return the expansion of ``f`` at ``x`` (n,), and ``aux``, for ``f(x) = (value, aux)``."""

    def gradient(x: Array) -> tuple[Array, tuple[Array, Aux]]:
        (value, aux), g = jax.value_and_grad(f, has_aux=True)(x)
        return g, (value, aux)

    # linearize: ``f``, and a silo's search for its modes in it, is evaluated once for all columns.
    g, column, (value, aux) = jax.linearize(gradient, x, has_aux=True)
    H = map_in_batches(column, jnp.eye(len(x)), columns_at_once)
    return Expansion(x, value, g, -0.5 * (H + H.T)), aux


def shape(*dims: int) -> Any:
    """Return the shape of an array of real numbers, in the precision of this moment."""
    return jax.ShapeDtypeStruct(dims, jnp.result_type(float))
