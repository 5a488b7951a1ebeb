"""``nf.find_mode``: the mode of a posterior over silos."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array

from numpyro_fed.basics.errors import (
    ConvergenceWarning,
    ModelError,
    ModelWarning,
    positive_int,
)
from numpyro_fed.data.silo_data import SiloInput
from numpyro_fed.dp_newton.method import DPNewton
from numpyro_fed.privacy.budget import Privacy
from numpyro_fed.rounds.compiled_loop import simulation
from numpyro_fed.rounds.federation import Federation
from numpyro_fed.rounds.messages import SEARCH
from numpyro_fed.rounds.stack import Batches, Runtime, on_device
from numpyro_fed.search.curvature_check import CurvatureCheck
from numpyro_fed.search.expand import effects_of, flat_size
from numpyro_fed.search.lbfgs import LBFGSSearch
from numpyro_fed.search.mode import Mode, coordinate_names, mode_of_search
from numpyro_fed.search.mode_search import ModeSearch
from numpyro_fed.search.newton import MANY_EFFECTS, SEARCHED_UP_TO, NewtonSearch
from numpyro_fed.search.run_search import coupling_reason, not_found_error, run_search
from numpyro_fed.sfvi.method import SFVI
from numpyro_fed.text.layout import lay_out, read_all
from numpyro_fed.text.log_density import FederatedModel


def find_mode(
    key: Array,
    model: Callable[..., Any],
    silos: Sequence[SiloInput] | Federation,
    *,
    starts: int = 1,
    max_exchanges: int = 200,
    progress_bar: bool = True,
    privacy: Privacy | None = None,
) -> Mode:
    r"""Find the mode of the globals' posterior density, each silo's own latents integrated out.

    The method is a damped Newton method: each silo sends its log likelihood with gradient and
    Hessian, its latents integrated by Laplace's method, and the server adds them up. Nothing has to
    be scaled. Above 300 shared parameters and globals silos send gradients, and the server takes
    steps of L-BFGS in coordinates that the Hessian's diagonal scales, which takes hundreds of
    exchanges.

    Parameters
    ----------
    key : jax.Array
        The key of the places where further starts begin.
    model, silos
        As for :class:`numpyro_fed.SFVI`.
    starts : int
        Searches side by side, in one program: the first from zero in unconstrained space, the
        others from draws of the prior, or standard normals where it cannot be drawn from.
    max_exchanges : int
        Exchanges, at most.
    progress_bar : bool
    privacy : Privacy, optional
        A budget of differential privacy: the mode is then that of a run of
        :class:`numpyro_fed.DPNewton`, from sums with noise. The mode's ``covariance`` counts the
        noise, ``.privacy`` says what was spent, and there is no evidence.

    Returns
    -------
    Mode

    Raises
    ------
    ModelError
        For a model with parameters inside silo plates, or without anything that silos share.
    NonFiniteError
        If no place was found at which density, gradient and Hessian are finite.

    Examples
    --------
    >>> import jax, numpy as np, numpyro, numpyro.distributions as dist, numpyro_fed as nf
    >>> def model(y):
    ...     mu = numpyro.sample("mu", dist.Normal(0, 1000))
    ...     with nf.silo_plate("row", y.shape[0]):
    ...         numpyro.sample("y", dist.Normal(mu, 5), obs=y)
    >>> silos = [dict(y=np.array([990.0, 1000.0])), dict(y=np.array([1010.0, 1020.0]))]
    >>> found = nf.find_mode(jax.random.key(0), model, silos, progress_bar=False)
    >>> round(float(found.sites["mu"])), found.converged
    (1005, True)
    """
    positive_int("starts", starts)
    positive_int("max_exchanges", max_exchanges)
    if privacy is not None:
        if starts != 1 or max_exchanges != 200:
            raise ValueError(
                "starts= and max_exchanges= under privacy=: the budget decides how many exchanges "
                "there are, of one search. Leave them out."
            )
        return _private_mode(key, model, silos, privacy, progress_bar)
    search = partial(_search, max_exchanges=max_exchanges, progress_bar=progress_bar)
    if isinstance(silos, Federation):
        # Silos know the search as the beginning of a method's run.
        fit, hosted = SFVI(model, starts=starts)._compiled_for(silos, "simulation")
        _check(fit.model)
        if fit.built.start is None:
            raise ModelError("the model has too many globals to search over.")
        start = fit.built.start
        runtime = fit.reach(start.algorithm, begin=SEARCH)
        return search(key, fit.model, start.search, runtime, hosted.batches)
    found = read_all(silos, model)
    layout, buckets = lay_out(model, found)
    fm, batches = layout.model, on_device(buckets)
    _check(fm)
    if (coupled := coupling_reason(layout.checks, buckets)) is not None:
        raise ModelError(f"{coupled}. Put what rows share outside of the silo_plate.")
    kind = LBFGSSearch if flat_size(fm) > SEARCHED_UP_TO else NewtonSearch
    steps: ModeSearch[Any, Any] = kind(fm, len(found), starts, None, None)
    return search(key, fm, steps, simulation(steps.algorithm), batches)


def _search(
    key: Array,
    fm: FederatedModel,
    search: ModeSearch[Any, Any],
    runtime: Runtime,
    batches: Batches,
    *,
    max_exchanges: int,
    progress_bar: bool,
) -> Mode:
    """Return the mode that a search finds, once its curvature has been checked."""
    found, ask = run_search(key, search, runtime, batches, max_exchanges, progress_bar)
    if not found.known.any():
        raise not_found_error(fm, batches, ask.number, len(found.known), ask.unusable)
    shape, effects = None, effects_of(fm)
    if isinstance(search, NewtonSearch):
        shape = CurvatureCheck(fm, effects, search.num_starts).ask(ask, found)
    mode = mode_of_search(fm, found, shape, ask.number, effects)
    if mode.flat:
        warnings.warn(
            f"the log density does not fall along {' and '.join(mode.flat)} (unconstrained, each "
            "in units of its own curvature): data and prior leave it open there, as where two "
            "classes can be told apart without error, or single precision does. Give it a proper "
            "prior, leave out a column that others add up to, or "
            "run in double precision (jax.config.update('jax_enable_x64', True)).",
            category=ModelWarning,
            stacklevel=3,
        )
    elif not mode.converged:
        warnings.warn(
            f"the search had not come to a mode in {mode.num_exchanges} exchanges: run in double "
            "precision (jax.config.update('jax_enable_x64', True)), in which smaller gains can be "
            "told from rounding; try several starts; or allow more by max_exchanges.",
            category=ConvergenceWarning,
            stacklevel=3,
        )
    return mode


def _check(fm: FederatedModel) -> None:
    """Raise an error for a model without a mode that a search could find."""
    if private := [s.name for s in fm.sites if s.kind == "param" and s.plate is not None]:
        raise ModelError(
            f"the parameter '{private[0]}' is inside a silo_plate: it has no mode that silos "
            "share. Put it outside, or give it a prior by numpyro.sample."
        )
    if not fm.dim and not fm.named("param"):
        raise ModelError(
            "the model has neither global latents nor shared parameters, so that there is nothing "
            "to search over. Move what silos share out of the silo_plate."
        )
    if flat_size(fm) > SEARCHED_UP_TO and len(effects_of(fm)):
        raise ModelError(
            f"{MANY_EFFECTS}. Put the effects into a silo_plate, where they are local."
        )


def _private_mode(
    key: Array,
    model: Callable[..., Any],
    silos: Sequence[SiloInput] | Federation,
    privacy: Privacy,
    progress_bar: bool,
) -> Mode:
    """Return the mode of a private run, from sums with noise."""
    private = DPNewton(model, privacy=privacy).run(key, silos=silos, progress_bar=progress_bar)
    fm, server = private._fit.model, private.state.server
    inverse = np.linalg.inv(np.asarray(server.root, float))
    if not private.settled:
        warnings.warn(private.judgement, category=ConvergenceWarning, stacklevel=3)
    return Mode(
        sites=jax.tree.map(np.asarray, fm.constrain_global({}, jax.device_put(server.loc))),
        theta={},
        z_G=np.asarray(server.loc),
        curvature=inverse.T @ inverse,
        log_evidence=None,
        num_exchanges=private.num_exchanges,
        converged=private.settled,
        values=np.zeros(0),
        names=coordinate_names(fm),
        flat=(),
        privacy=private.privacy,
    )
