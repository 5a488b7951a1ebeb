"""The posterior at silos in processes of their own: what a silo draws, and what it tells.

The server has draws of the globals, and a silo its own latents given each. They meet at the silo:
the server's draws go there as a message (:meth:`.Posterior.draws_for_silo`), and the silo draws,
and predicts, by :class:`AtSilo`. Or silos whose owners allow it tell the latents that their rows
share.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.after.predict import (
    Predict,
    check_means,
    global_latents,
    new_rows,
    outer_sites,
    predictor,
    with_blocks,
)
from numpyro_fed.basics.errors import DataError, ModelError, ReplyError
from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.guides.guide import GlobalDraws
from numpyro_fed.posterior.built import Built
from numpyro_fed.posterior.run import FederatedRun
from numpyro_fed.posterior.sampler import Sampler
from numpyro_fed.rounds.exchange import Ask, Combine, Exchange, Info, Reply, Round
from numpyro_fed.rounds.messages import unpack
from numpyro_fed.rounds.names import OUTER_LATENTS
from numpyro_fed.rounds.runtime import failed_silos
from numpyro_fed.text.plan import Facts
from numpyro_fed.weigh.log_likelihoods import shape_of_draws


class Held(NamedTuple):
    """A silo's number, its state at the end of a run, and its data; they never leave it."""

    number: int
    state: object
    data: SiloData


@dataclass(frozen=True, eq=False)
class AtSilo:
    """The posterior at a silo, by draws of the globals that the server has sent.

    Its numbers are those of a result in one process, by the same keys.
    """

    built: Built
    facts: Facts
    sampler: Sampler
    num_draws: int

    @cached_property
    def _programs(self) -> dict[bool, Predict]:
        """Return the programs to means of outcomes, and to outcomes themselves."""
        fm = self.built.model
        return {mean: predictor(fm, mean=mean).many for mean in (True, False)}

    @cached_property
    def _like(self) -> GlobalDraws:
        """Return the shapes of the server's message."""
        built = self.built
        return shape_of_draws(built.guide, built.algorithm, (self.num_draws, built.model.dim))

    def sample_posterior(
        self, key: Array, arrays: Mapping[str, np.ndarray], silo: Held
    ) -> dict[str, Array]:
        """Return all sites at the server's draws (n, ...)."""
        down = unpack("down", self._like, arrays)
        sites = self.sampler.constrain_globals(down.theta, down.z_G)
        key_silo = jax.random.fold_in(jax.random.fold_in(key, 1), silo.number)
        private, frame = self.built.algorithm.private(silo.state), down.in_frame
        draw = self.sampler.draw_silo
        return sites | draw(key_silo, down.theta, private, down.z_G, frame, silo.data)

    def predict(
        self,
        key: Array,
        arrays: Mapping[str, np.ndarray],
        silo: Held,
        new: Mapping[str, Any] | None,
        *,
        mean: bool,
    ) -> dict[str, Array]:
        """Return predictive draws (n, ...), or means, for new data or for the silo's own rows."""
        fm, data = self.built.model, silo.data
        names = [s.name for s in fm.sites if s.kind in ("latent", "discrete")]
        if new is not None:
            sizes = fm.sizes(silo.data)
            new = with_blocks(fm, new, silo.number, silo.data)
            data = new_rows(fm, new, self.facts, [silo.data], silo.number, sizes)
            names = [*global_latents(fm), *(s.name for s in outer_sites(fm))]
        sites = self.sample_posterior(key, arrays, silo)
        latents = {name: sites[name] for name in names if name in sites}
        shared = unpack("down", self._like, arrays).theta
        private = self.built.algorithm.private(silo.state).theta
        parameters = fm.constrain_theta({**shared, **private})
        key_new = jax.random.fold_in(jax.random.fold_in(key, 2), 1 + silo.number)
        found = self._programs[mean](key_new, parameters, latents, data)
        if mean:
            check_means(fm, found)
        return found


# The arrays of the server's data: draws of the globals (n, dim), and the words of a key a silo.
DRAWS, KEYS = "draws", "keys"


class LatentsQuestion(NamedTuple):
    """A message of the server: draws of the globals, and the words of the silo's key.

    It is the key with which a run in one process draws the silo's latents.
    """

    draws: GlobalDraws
    keys: Array


class SharedLatents(NamedTuple):
    """The reply of a silo to the question for its shared latents.

    ``values`` dict of str to array: The draws of each latent of an outer plate, (n, ...), on its
        support. Zeros follow those of the silo, up to a number of rows that is the same for all
        silos.
    ``rows`` dict of str to int array (): The number of rows of each outer plate at the silo.
    """

    values: dict[str, Array]
    rows: dict[str, Array]


MESSAGE = "the draws of the latents that rows share are not finite at {}."


def outer_round(built: Built, settings: Mapping[str, Any]) -> Round:
    """Return the round in which silos tell outer latents, which they build from these settings.

    It leads from a run's state to what all silos have :class:`SharedLatents`. The server's data
    have the arrays :data:`DRAWS` and :data:`KEYS`.
    """
    fm, fitted, rows = built.model, built.algorithm, settings["rows"]
    sampler, sites = built.sampler(settings), outer_sites(fm)

    def silo(
        noise: object, down: LatentsQuestion, state: object, data: SiloData
    ) -> tuple[Reply[SharedLatents], object]:
        key, draws, sizes = jax.random.wrap_key_data(down.keys), down.draws, fm.sizes(data)
        private, frame = fitted.private(state), draws.in_frame
        found = sampler.draw_silo(key, draws.theta, private, draws.z_G, frame, data)
        values: dict[str, Array] = {}
        for s in sites:
            own, axis = found[s.name], 1 + (s.axis or 0)
            more = rows[str(s.plate)] - own.shape[axis]
            if more < 0:
                raise ModelError(
                    f"'{s.name}' has {own.shape[axis]} rows here, and the server expects at most "
                    f"{rows[str(s.plate)]}. Server and silos must have agreed on the same plan."
                )
            pads = [(0, more if i == axis else 0) for i in range(own.ndim)]
            values[s.name] = jnp.pad(own, pads)
        plates = {str(s.plate): jnp.asarray(sizes[str(s.plate)]) for s in sites}
        return Reply(SharedLatents(values, plates), jnp.array(True)), state

    def run(state: object, noise: object, ask: Ask) -> tuple[SharedLatents, Info]:
        words = jax.random.key_data(jax.random.key(0)).shape
        z_G = jnp.zeros((settings["num_draws"], fm.dim))
        keys = jnp.zeros((settings["num_silos"], *words), jnp.uint32)
        if ask.server_data is not None:
            z_G, keys = (ask.server_data.arrays[name] for name in (DRAWS, KEYS))
        down = LatentsQuestion(GlobalDraws.of(built.guide, fitted.shared(state), z_G), keys)
        told: SharedLatents = ask(OUTER_LATENTS, down).up
        return told, Info(jnp.zeros(()), jnp.array(True))

    prefix: Any = (False, True)  # each silo gets its own key
    exchange = Exchange(
        OUTER_LATENTS,
        silo,
        combine=Combine.GATHER,
        scatter=LatentsQuestion(*prefix),
        settings=json.dumps(dict(settings)),
    )
    return Round((exchange,), run)


def told_by_silos(
    result: FederatedRun, key: Array, z_G: Array, sampler: Sampler
) -> dict[str, Array]:
    """Return the latents of outer plates of all silos, side by side, at draws of the globals."""
    fit, number = result._fit, result.num_silos
    sites, largest = outer_sites(fit.model), dict(fit.plan.largest)
    if not sites:
        raise DataError(
            "silo='all' of silos in other processes has the latents that rows of a silo share (a "
            "hospital's effect), and this model has none. Latents of rows stay at their silo."
        )
    settings = {
        "num_draws": len(z_G),
        "num_silos": number,
        "rows": {str(s.plate): largest[str(s.plate)] for s in sites},
        **sampler.settings,
    }
    name = OUTER_LATENTS, json.dumps(settings)
    exchange = fit.cached(name, lambda: fit.runtime.single(outer_round(fit.built, settings)))
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(number))
    given = SiloData({DRAWS: jnp.asarray(z_G), KEYS: jax.random.key_data(keys)})
    state, batches = result.state, result._silos.batches
    told: SharedLatents
    told, silos, info, good, _ = jax.block_until_ready(
        exchange(key, state.server, state.silos, batches, given)
    )
    if not bool(info.ok):
        raise result.unusable(MESSAGE, failed_silos(good, silos, batches))
    joined = {}
    for s in sites:
        axis, rows = 1 + (s.axis or 0), np.asarray(told.rows[str(s.plate)])
        for j, size in enumerate(rows):
            if not 0 < size <= settings["rows"][str(s.plate)]:
                words = f"has {size} rows of '{s.plate}', which is not what its facts say."
                raise ReplyError(words, silo=j, exchange=name[0])
        parts = [
            jax.lax.slice_in_dim(told.values[s.name][j], 0, int(size), axis=axis)
            for j, size in enumerate(rows)
        ]
        joined[s.name] = jnp.concatenate(parts, axis)
    return joined
