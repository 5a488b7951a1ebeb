"""The exchange in which each silo tells the shape of its own log likelihood at one place."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.algorithms.base import (
    AskSilos,
    Combine,
    Exchange,
    FederatedAlgorithm,
    Reply,
    Shared,
)
from numpyro_fed.algorithms.expand import Expand, Prior, SiloExpansion, SiloState, flat_size, shape
from numpyro_fed.algorithms.own_start import Climbs
from numpyro_fed.integrals.laplace import START, Laplace
from numpyro_fed.model.binding import Theta
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.log_density import FederatedModel

INFLUENCE = "influence"  # the name of the exchange
MOST_GLOBALS = 300  # as in the search for the mode: silos send Hessians


class PlaceToTell(NamedTuple):
    """The server's message: shared parameters, and a place of the globals (n,)."""

    theta: Theta
    z_G: np.ndarray

    def flat(self) -> np.ndarray:
        """Return all numbers as one vector."""
        return np.concatenate([*(np.ravel(a) for a in jax.tree.leaves(self.theta)), self.z_G])


class SiloPull(NamedTuple):
    """A silo's message about its log likelihood.

    ``gradient`` (n,).
    ``curvature`` (n, n): Minus the Hessian.
    ``gain`` (): How much higher the log likelihood is at the silo's own mode; -1 where it came to
        none.
    """

    gradient: np.ndarray
    curvature: np.ndarray
    gain: np.ndarray


class Factors(NamedTuple):
    """The messages of all silos, with a leading axis, and the prior's gradient and curvature."""

    silos: SiloPull
    prior_gradient: np.ndarray
    prior_curvature: np.ndarray


@dataclass(frozen=True, eq=False)
class Influence:
    """The question to silos how far they pull the globals from a place.

    Silos integrate their own latents as in the search for the mode, whose programs they use.
    """

    model: FederatedModel
    fitted: FederatedAlgorithm[Any, Any]
    num_silos: int
    expand: Expand
    prior: Prior

    @classmethod
    def of(
        cls, fm: FederatedModel, fitted: FederatedAlgorithm[Any, Any], num_silos: int
    ) -> Influence:
        """Return the question to the silos of a run."""
        return cls(fm, fitted, num_silos, Expand(fm), Prior(fm, np.zeros(0, int)))

    @property
    def exchange(self) -> Exchange[Any, Any, Any]:
        """Return the exchange in which silos answer the question."""
        fm, n = self.model, self.model.dim
        return Exchange(
            INFLUENCE,
            self.reply,
            combine=Combine.GATHER,
            settings=json.dumps({"num_silos": self.num_silos}),
            like=lambda: (
                PlaceToTell(jax.eval_shape(lambda: fm.init_theta(jax.random.key(0))), shape(n)),
                SiloPull(shape(n), shape(n, n), shape()),
            ),
        )

    @np.errstate(all="ignore")
    def reply(
        self, noise: object, down: PlaceToTell, state: Any, data: SiloData
    ) -> tuple[Reply[SiloPull], Any]:
        """Return the replies of a stack of silos, and their states as they are."""
        x, f = down.flat(), flat_size(self.model) - self.model.dim
        private = jax.vmap(lambda one: self.fitted.private(one).theta)(state)
        of_one = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), data)
        size = len(jax.tree.leaves(data)[0])
        sizes = jax.eval_shape(Laplace(self.model).start, of_one)
        z_L = {p: np.full((size, 1, *a.shape), START, a.dtype) for p, a in sizes.items()}
        at = SiloState(z_L, SiloExpansion(x, x, x), private, np.zeros((size, 1)))
        places = np.broadcast_to(x, (size, 1, len(x)))
        never = np.full((size, 1), -np.inf, x.dtype)
        here, modes = self.expand(places, never, at, data)
        # With its share of the prior, as in the first exchange of a search, so that there is a mode
        # in directions of which the silo knows nothing.
        climbs = Climbs(self.expand, self.prior, 1 / self.num_silos, fixed=f)
        top = climbs.climb(places, at._replace(z_L=modes), data)
        gain = top.likelihood - here.value
        known = top.is_mode & np.isfinite(gain)
        told = SiloPull(
            here.gradient[:, 0, f:],
            here.curvature[:, 0, f:, f:],
            np.where(known, np.maximum(gain, 0.0), -1.0)[:, 0],
        )
        return Reply(told, np.ones(size, bool)), state

    def ask(self, ask: AskSilos, shared: Shared, z_G: np.ndarray) -> Factors:
        """Return the factors at a place (n,) of the globals, in one exchange."""
        theta, f = jax.tree.map(np.asarray, shared.theta), flat_size(self.model) - self.model.dim
        place = PlaceToTell(theta, np.asarray(z_G, jnp.result_type(float)))
        told = ask(self.exchange, place)
        x = place.flat()
        prior = self.prior(np.zeros((1, 0, 0), x.dtype), x[None])
        return Factors(told, prior.gradient[0, f:], prior.curvature[0, f:, f:])
