"""The front door: federated methods that users call."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from numpyro.infer.autoguide import AutoGuide

from numpyro_fed import data as silo_data
from numpyro_fed.algorithms.base import FederatedAlgorithm
from numpyro_fed.algorithms.sfvi import sfvi
from numpyro_fed.data import Bucket, bucket, one_by_one, signature
from numpyro_fed.errors import GuideError, NonFiniteError, positive_int
from numpyro_fed.guides.structured import Structured, build
from numpyro_fed.layout import Layout, lay_out
from numpyro_fed.objectives import ELBO, LocallyEnhanced, draws_by_plate, silo_bound
from numpyro_fed.posterior import posterior
from numpyro_fed.result import Fit, Result, Silos
from numpyro_fed.runtime.base import State, on_device
from numpyro_fed.runtime.host import host
from numpyro_fed.runtime.loop import Failure, drive
from numpyro_fed.runtime.simulation import simulation
from numpyro_fed.saving import load_state

RUNTIMES = {"simulation": simulation, "host": host}


@dataclass(frozen=True)
class SFVI:
    r"""Structured federated variational inference.

    Each round, all silos and the server take one stochastic gradient step on

    .. math::
        \mathcal{L} = \mathbb{E}_q\Big[\log p(z_G) - \log q(z_G)
        + \sum_j \mathcal{L}_j(z_G)\Big],

    where only the gradient of the silo's own term :math:`\mathcal{L}_j` leaves it. On any partition
    of the same rows, and with the same noise, the iterates are those of pooled inference.

    Parameters
    ----------
    model : callable
        A NumPyro model with :class:`~numpyro_fed.silo_plate`.
    optim : optax.GradientTransformation
        Used by the server for the globals and by each silo for its own parameters, every one
        with its own state.
    guide : Structured or AutoGuide, optional
        :class:`numpyro_fed.guides.Structured` chooses by the model's sizes when left out. A NumPyro
        autoguide is used for the globals.
    objective : ELBO or LocallyEnhanced
        The bound. ``LocallyEnhanced(draws=20)`` is worth its price where rows have latents.
    num_particles : int
        Draws of the globals in each round.

    References
    ----------
    Hassan, Salomone, Mengersen (2023), arXiv 2302.03314, Algorithm 1. The messages here are the
    draws of the globals and gradients with respect to them, not with respect to the guide's
    parameters; the iterates are the same.

    Examples
    --------
    >>> import jax, numpy as np, numpyro, numpyro.distributions as dist, optax
    >>> import numpyro_fed as nf
    >>> def model(y):
    ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
    ...     with nf.silo_plate("row", y.shape[0]):
    ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y)
    >>> silos = [dict(y=np.array([1.0, 2.0])), dict(y=np.array([3.0, 4.0, 5.0]))]
    >>> sfvi = nf.SFVI(model, optim=optax.adam(0.05))
    >>> result = sfvi.run(jax.random.key(0), 1_000, silos, progress_bar=False)
    >>> result.losses.shape
    (1000,)
    >>> mu = result.sample_posterior(jax.random.key(1), 4_000)["mu"]
    >>> bool(abs(mu.mean() - 3.0) < 0.05), bool(abs(mu.std() - 5**-0.5) < 0.05)
    (True, True)
    """

    model: Callable
    optim: optax.GradientTransformation = field(kw_only=True)
    guide: Structured | AutoGuide | None = field(default=None, kw_only=True)
    objective: ELBO | LocallyEnhanced = field(default=ELBO(), kw_only=True)
    num_particles: int = field(default=1, kw_only=True)
    _fits: dict[Any, Fit] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.optim, optax.GradientTransformation):
            raise TypeError(
                f"optim must be an Optax optimiser such as optax.adam(1e-2), got "
                f"{type(self.optim).__module__}.{type(self.optim).__name__}. Of optax.MultiSteps "
                "pass its .gradient_transformation()."
            )
        try:
            jax.eval_shape(lambda x: self.optim.update(x, self.optim.init(x), x), jnp.zeros(2))
        except Exception as error:
            raise TypeError(
                "optim must take a step from a gradient alone; optimisers that need the value of "
                f"the loss or search along a line, as optax.lbfgs does, cannot be used ({error})."
            ) from error
        positive_int("num_particles", self.num_particles)

    def run(
        self,
        key: Array,
        num_rounds: int,
        silos: Sequence[Mapping[str, Any]],
        *,
        init_state: State | None = None,
        progress_bar: bool = True,
        runtime: str = "simulation",
    ) -> Result:
        """Fit the model.

        Parameters
        ----------
        key : jax.Array
            From ``jax.random.key`` (or the older ``PRNGKey``). Round ``r`` uses
            ``fold_in(key, r)``.
        num_rounds : int
            Rounds to run, each one step of the optimiser.
        silos : list of dict
            What each silo holds: keyword arguments of the model. Arrays may differ in their first
            axis. Python ints, bools, strings and None are static: silos that differ in them are
            compiled apart.
        init_state : State, optional
            Go on from ``result.state``: ``run(key, a)`` and then ``run(key, b, init_state=...)``
            is ``run(key, a + b)``, bit for bit.
        progress_bar : bool
            Show rounds and the bound.
        runtime : {"simulation", "host"}
            One compiled program, or a plain loop over silos for debugging. The numbers are the
            same up to rounding.

        Returns
        -------
        Result

        Raises
        ------
        ModelError, DataError, GuideError
            Before anything is compiled, for input that cannot work.
        NonFiniteError
            If the bound turns NaN or infinite; the error's ``result`` is the last good state.
        """
        key = _one_key(key)
        positive_int("num_rounds", num_rounds)
        fit, held = self._prepare(silos, runtime)
        if init_state is None:
            state = fit.runtime.init(key, held.batches)
        else:
            state = fit.check_state(init_state, held)
        run = drive(fit.runtime, key, state, held.batches, num_rounds, progress_bar)
        result = Result(run.losses, run.state, fit, held)
        if run.failure is not None:
            raise _non_finite(result, run.failure)
        return result

    def load(
        self,
        path: str | Path,
        silos: Sequence[Mapping[str, Any]],
        *,
        runtime: str = "simulation",
    ) -> Result:
        """Rebuild a fit from what :meth:`Result.save` wrote.

        Parameters
        ----------
        path : str or Path
            The same path as was given to ``save``.
        silos : list of dict
            The silos' data, which is never saved.
        runtime : {"simulation", "host"}
            The runtime of the run that was saved.

        Raises
        ------
        SavedStateError
            If the files belong to another model, guide, layout of silos or version.
        """
        fit, held = self._prepare(silos, runtime)
        losses, state = load_state(path, fit.description(), fit.initial_state(held))
        return Result(losses, state, fit, held)

    def _prepare(self, silos: Sequence[Mapping[str, Any]], runtime: str) -> tuple[Fit, Silos]:
        """The compiled fit for these shapes, from an earlier run where there was one."""
        if runtime not in RUNTIMES:
            raise ValueError(f"runtime={runtime!r}: expected one of {sorted(RUNTIMES)}.")
        read = silo_data.read(silos)
        known = (runtime, str(jnp.result_type(float)), tuple(signature(s) for s in read))
        if known not in self._fits:
            layout, buckets = lay_out(self.model, read)
            self._fits[known] = self._build(layout, buckets, runtime)
        fit = self._fits[known]
        if runtime == "host":
            buckets = one_by_one(read, fit.sizes)
        else:
            buckets = bucket(read, fit.sizes, may_pad=fit.padded)
        return fit, Silos(tuple(read), tuple(buckets), on_device(buckets))

    def _build(self, layout: Layout, buckets: Sequence[Bucket], runtime: str) -> Fit:
        guide = build(self.guide, layout.model, layout.sizes)
        draws = draws_by_plate(self.objective, guide)
        bound = silo_bound(layout.model, guide, draws)
        algorithm = sfvi(layout.model, guide, bound, self.optim, self.num_particles)
        _check_memory(algorithm, buckets)
        settings = {"method": "SFVI", "num_particles": self.num_particles, "draws": draws}
        return Fit(
            layout.model,
            layout.sizes,
            layout.padded,
            guide,
            bound,
            RUNTIMES[runtime](algorithm),
            posterior(layout.model, guide, bound),
            settings,
            {},
        )


def _check_memory(algorithm: FederatedAlgorithm, buckets: Sequence[Bucket]) -> None:
    """Refuse what cannot fit: the state, a copy of it, and a gradient."""

    def size(init: Callable, *args: Any) -> int:
        state = jax.eval_shape(init, jax.random.key(0), *args)
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state))

    needed = 3 * size(algorithm.init_server)
    for b in buckets:
        one = jax.tree.map(lambda a: a[0], b.data)
        needed += 3 * size(algorithm.init_silo, one) * len(b.silos)
    available = _memory()
    if needed > available:
        raise GuideError(
            f"the guide and the optimiser's state need about {needed / 2**30:.1f} GiB, but "
            f"this machine has {available / 2**30:.1f} GiB. Use a smaller guide: "
            "guides.Structured(globals='diagonal', locals='diagonal'), with couple_mean=False and "
            "couple_scale=False, or guides.MeanField()."
        )


def _memory() -> float:
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def _non_finite(result: Result, failure: Failure) -> NonFiniteError:
    where = f"at silo {', '.join(map(str, failure.silos))}" if failure.silos else "at the server"
    return NonFiniteError(
        f"the bound turned NaN or infinite in round {failure.round}, {where}. The last good state "
        "is in the error's .result. A smaller step, gradient clipping (optax.chain("
        "optax.clip_by_global_norm(10.0), ...)), more particles or float64 usually help; otherwise "
        "look at the data and the supports of the sites there.",
        result=result,
        round=failure.round,
        silos=failure.silos,
    )


def _one_key(key: Any) -> Array:
    """A typed key; what ``jax.random.PRNGKey`` makes is turned into one."""
    if isinstance(key, Array):
        if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.ndim == 0:
            return key
        if key.dtype == jnp.uint32 and key.ndim == 1:
            return jax.random.wrap_key_data(key)
    found = f"{key.dtype}{key.shape}" if isinstance(key, Array) else repr(key)
    raise TypeError(f"key must be one JAX key such as jax.random.key(0), got {found}.")
