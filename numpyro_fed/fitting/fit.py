"""``nf.fit``, from a model and silos to a posterior with its verdict; and ``nf.find_mode``."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax import Array

from numpyro_fed.basics.errors import (
    ConvergenceWarning,
    DataError,
    Interrupted,
    ModelError,
    ModelWarning,
    SiloAwayError,
    SilosError,
    one_of,
    positive_int,
)
from numpyro_fed.basics.programs import precision as precision_as
from numpyro_fed.data.silo_data import SilosInput, by_their_names, label, names_of, read_all
from numpyro_fed.dp_newton.method import DPNewton
from numpyro_fed.fitting.order_of_steps import reached_so_far, run_steps
from numpyro_fed.fitting.steps import FitProblem, FitSteps
from numpyro_fed.posterior.posterior import Posterior, Stage
from numpyro_fed.posterior.verdict import TOLERANCE
from numpyro_fed.posterior.weighted_draws import check_accuracy
from numpyro_fed.privacy.budget import Privacy
from numpyro_fed.rounds.compiled_loop import compiled_runtime
from numpyro_fed.rounds.federation import Federation
from numpyro_fed.rounds.keys import typed_key
from numpyro_fed.rounds.messages import SEARCH
from numpyro_fed.rounds.progress import StageBar, in_sight
from numpyro_fed.rounds.secure_sums import HOW_SINGLE
from numpyro_fed.rounds.silos import on_device
from numpyro_fed.search.expand import effects_of, flat_size
from numpyro_fed.search.lbfgs import LBFGSSearch
from numpyro_fed.search.mode import CurvatureCheck, Mode, mode_of_search
from numpyro_fed.search.mode_search import MANY_EFFECTS, SEARCHED_UP_TO, ModeSearch
from numpyro_fed.search.newton import NewtonSearch
from numpyro_fed.search.run_search import coupling_reason, not_found_error, run_search
from numpyro_fed.sfvi.method import SFVI
from numpyro_fed.text.layout import layout_and_buckets
from numpyro_fed.text.log_density import FederatedModel

MAX_EXCHANGES = 10_000  # messages of each silo, at most
PRECISIONS = ("double", "single")
TELLS_ONE = (
    "The fit does not begin again without it, since replies are added up: the sum over all silos "
    "less that over the others would be its reply, and a sum over two is no secret of theirs."
)

# One thread at a time: warnings.catch_warnings, by which a fit collects what its stages warn of,
# acts on all threads of a process.
_LOCK = threading.RLock()


def fit(
    key: Array,
    model: Callable[..., Any],
    silos: SilosInput | Federation,
    *,
    accuracy: float = TOLERANCE,
    max_exchanges: int = MAX_EXCHANGES,
    precision: str = "double",
    privacy: Privacy | None = None,
    progress_bar: bool = True,
) -> Posterior:
    r"""Fit a model over silos, check the posterior, and say whether it can be trusted.

    Nothing has to be scaled or tuned. The call searches for the mode from several places, draws
    from the normal approximation there, and weighs the draws in one more exchange (the importance
    correction). If the verdict is not good, it tries a proposal matched to the weighted draws, more
    draws, particles that move to the posterior (:class:`Tempered`), rounds of :class:`PVI` from the
    mode, and :class:`SFVI`. SFVI is the first step if there
    are too many globals, or globals without a family. The best of several corrections is judged by
    new draws. A second call with the same model and silos of the same shapes compiles nothing.

    The draws are weighed by the joint density of all silos, so that under the conditions that the
    verdict states they are from :math:`p(z_G \mid y)` itself:

    .. math::
        \log w_s = \log p(z_G^s) - \log q(z_G^s) + \sum_j \log \hat p(y_j \mid z_G^s).

    Parameters
    ----------
    key : jax.Array
    model : callable
        A NumPyro model with :class:`~numpyro_fed.silo_plate`.
    silos : list of dict or DataFrame, dict of these, or Federation
        The data of each silo, a dict of these by the names of silos, or silos in other processes,
        as for :meth:`SFVI.run`.
    accuracy : float
        The number of posterior sds to which means of the globals are to be right, and the share to
        which sds are. 0.2 is plenty for a first look; half of it takes four times as many draws.
    max_exchanges : int
        The number of messages that each silo sends, at most. What was reached by then comes back,
        with a verdict on it. A search for the mode and one correction are made in any case.
    precision : {"double", "single"}
        The precision of the whole computation, whatever the process's default is. Raw data need
        double: an outcome of 10^8 with an sd of 1 is all rounding in single precision. Single takes
        half of the memory, and much less time on accelerators that are slow in double precision;
        the verdict says so if it cannot hold the posterior. Draws of a fit in double precision are
        NumPy arrays where JAX's own would be rounded.
    privacy : Privacy, optional
        A budget of differential privacy. Then the fit is one run of :class:`DPNewton`, some ten to
        sixty sums with noise, and ``.privacy`` says what was spent. Nothing checks it by weights,
        which would be told without noise.
    progress_bar : bool

    Returns
    -------
    Posterior
        With ``.sample_posterior(key, n)`` (each site ``(n, *shape)``), ``.verdict``, ``.trusted``
        and the results of all ``.stages``.

    Raises
    ------
    ModelError, DataError
        For input that cannot work, and an improper posterior.
    NonFiniteError
        If neither method comes to a finite posterior.
    SilosError
        If a silo refuses, or is away; the error's ``result`` has the stages so far.
    Interrupted
        By Ctrl-C once something was computed: a ``KeyboardInterrupt`` whose ``result`` has the
        stages so far, and says that it was interrupted.

    References
    ----------
    Ashman et al. (2022), arXiv 2202.12275 (PVI); Vehtari et al. (2024), Pareto smoothed importance
    sampling. Starts, steps and verdict are this package's own.

    Examples
    --------
    >>> import jax, numpy as np, numpyro, numpyro.distributions as dist, numpyro_fed as nf
    >>> def model(y):
    ...     mu = numpyro.sample("mu", dist.Normal(0, 1000))
    ...     sigma = numpyro.sample("sigma", dist.HalfCauchy(2.5))
    ...     with nf.silo_plate("row", y.shape[0]):
    ...         numpyro.sample("y", dist.Normal(mu, sigma), obs=y)
    >>> rng = np.random.default_rng(0)
    >>> silos = [dict(y=rng.normal(1000, 30, n)) for n in (40, 60)]
    >>> fitted = nf.fit(jax.random.key(0), model, silos, progress_bar=False)
    >>> fitted.trusted
    True
    >>> print(fitted.verdict.split(" (")[0])
    The posterior of the globals can be trusted
    """
    check_accuracy(accuracy)
    positive_int("max_exchanges", max_exchanges)
    one_of("precision", precision, *PRECISIONS)
    double = precision == "double"
    if privacy is not None:
        with precision_as(double=double), _LOCK, StageBar(progress_bar) as bar:
            bar.stage("DP Newton")
            method = DPNewton(model, privacy=privacy)
            result = method.run(typed_key(key), silos=silos, progress_bar=bar)
            words = f"{len(result.losses)} rounds. {result.privacy}".rstrip(".")
            return replace(result, stages=(Stage("DP Newton", words, result),))
    return FitCall(model, silos, accuracy, max_exchanges, double, progress_bar).run(key)


@dataclass(frozen=True, eq=False)
class FitCall:
    """A call of :func:`numpyro_fed.fit`, which other silos can be given to."""

    model: Callable[..., Any]
    silos: SilosInput | Federation
    accuracy: float
    max_exchanges: int
    double: bool
    progress_bar: bool

    def with_silo(self, silo: Mapping[str, Any] | Federation) -> FitCall:
        """Return the call with one silo more; of a federation, with another one that has it."""
        if isinstance(self.silos, Federation):
            if not isinstance(silo, Federation) or len(silo) != 1 + len(self.silos):
                raise DataError(
                    f"the fit is one of {len(self.silos)} silos in other processes: pass a "
                    "Federation of these, in the same order, and of the new one after them."
                )
            if silo.secure_sum:
                raise DataError(_tells(label(len(self.silos), silo.silo_names), "with"))
            return replace(self, silos=silo)
        if isinstance(silo, Federation):
            raise DataError("the fit is one of silos in this process: pass the new silo's dict.")
        if not isinstance(self.silos, Mapping):
            return replace(self, silos=[*self.silos, silo])
        new = names_of(silo)
        if len(new) != 1 or new[0] in self.silos:
            raise DataError(
                "the silos of the fit have names: pass the data of the new one by a name of its "
                f"own, {{name: data}}, other than {list(self.silos)}."
            )
        return replace(self, silos={**self.silos, **silo})

    def without_silo(self, j: int) -> FitCall:
        """Return the call without a silo."""
        others = [i for i in range(len(self.silos)) if i != j]
        if isinstance(self.silos, Federation):
            if self.silos.secure_sum:
                raise DataError(_tells(label(j, self.silos.silo_names), "without"))
            return replace(self, silos=self.silos.of(others))
        if isinstance(self.silos, Mapping):
            left = {name: data for i, (name, data) in enumerate(self.silos.items()) if i != j}
            return replace(self, silos=left)
        return replace(self, silos=[self.silos[i] for i in others])

    def run(self, key: Array, places: np.ndarray | None = None) -> Posterior:
        """Return the fit; its searches begin near some places (k, dim), if they are given.

        Silos of a federation that are away are left out, where it says so (``missing``).
        """
        federation = self.silos
        if not isinstance(federation, Federation) or federation.missing != "leave_out":
            return self._run(key, places)
        call: Any = self
        left, absence = list(range(len(federation))), ""
        while True:
            try:
                return call._run(key, places, absence)
            except SiloAwayError as error:
                left = [j for i, j in enumerate(left) if i not in error.silos]
                if 2 * len(left) <= len(federation):
                    raise
                if federation.secure_sum and not federation.hides_with(left):
                    error.add_note(TELLS_ONE)
                    raise
                away = [j for j in range(len(federation)) if j not in left]
                who = " and ".join(label(j, federation.silo_names) for j in away)
                absence = f"Without an answer from {who}: the posterior is that of the others."
                warnings.warn(
                    f"no answer from {who} within {federation.patience:g} s: the fit begins again "
                    "without, and its verdict says so.",
                    category=ConvergenceWarning,
                    stacklevel=3,
                )
                call = replace(self, silos=federation.of(left))

    def _run(self, key: Array, places: np.ndarray | None, absence: str = "") -> Posterior:
        """Return the fit of these silos, with words on those that are away."""
        silent = in_sight("fit", shown=False)  # the bar of the stages is the only one
        names = by_their_names(self.silos)
        with (
            precision_as(double=self.double),
            _LOCK,
            StageBar(self.progress_bar) as bar,
            silent,
            names,
        ):
            problem = FitProblem.of(self.model, self.silos)
            steps = FitSteps(
                typed_key(key), problem, self.accuracy, self.max_exchanges, bar, places
            )
            try:
                fitted = run_steps(steps)
                versions = getattr(self.silos, "unlike_versions", "")
                remarks = " ".join(filter(None, (absence, fitted.remarks, versions)))
                return replace(fitted, call=self, remarks=remarks)
            except SilosError as error:
                reached = reached_so_far(steps, error.result)
                error.result = reached and replace(reached, remarks=absence)
                raise
            except KeyboardInterrupt as error:
                reached = reached_so_far(steps, getattr(error, "result", None))
                if reached is None:
                    raise
                raise Interrupted(
                    "interrupted; what the stages so far have reached is in the error's .result: "
                    "error.result.save(path) keeps it. The .result of a stage is a fit, whose "
                    ".state is an init_state to go on from.",
                    result=reached,
                ) from error


def _tells(who: str, how: str) -> str:
    """Return why a fit of sums is not made again with one silo more, or without one."""
    return (
        f"the fit is not made again {how} {who}: where replies are added up, the sum over all "
        f"silos less that over the others is its own reply, which nobody is to see. {HOW_SINGLE}"
    )


def find_mode(
    key: Array,
    model: Callable[..., Any],
    silos: SilosInput | Federation,
    *,
    starts: int = 1,
    max_exchanges: int = 200,
    progress_bar: bool = True,
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
    search: ModeSearch[Any, Any]
    if isinstance(silos, Federation):
        # Silos know the search as the beginning of a method's run.
        compiled, hosted = SFVI(model, starts=starts)._compiled_for(silos, "simulation")
        fm, batches, start = compiled.model, hosted.batches, compiled.built.start
        _check(fm)
        if start is None:
            raise ModelError("the model has too many globals to search over.")
        search, runtime = start.search, compiled.reach(start.algorithm, begin=SEARCH)
    else:
        read = read_all(silos, model)
        layout, buckets = layout_and_buckets(model, read)
        fm, batches = layout.model, on_device(buckets)
        _check(fm)
        if (coupled := coupling_reason(layout.checks, buckets)) is not None:
            raise ModelError(f"{coupled}. Put what rows share outside of the silo_plate.")
        kind = LBFGSSearch if flat_size(fm) > SEARCHED_UP_TO else NewtonSearch
        search = kind(fm, len(read), starts, None, None)
        runtime = compiled_runtime(search.algorithm)
    found, ask = run_search(key, search, runtime, batches, max_exchanges, progress_bar)
    if not found.known.any():
        raise not_found_error(fm, batches, ask.number, len(found.known), ask.unusable)
    profile = None
    if isinstance(search, NewtonSearch):
        profile = CurvatureCheck(fm, search.num_starts).ask(ask, found)
    mode = mode_of_search(fm, found, profile, ask.number)
    if mode.flat:
        warnings.warn(
            f"the log density does not fall along {' and '.join(mode.flat)} (unconstrained, each "
            "in units of its own curvature): data and prior leave it open there, as where two "
            "classes can be told apart without error, or single precision does. Give it a proper "
            "prior, leave out a column that others add up to, or "
            "run in double precision (jax.config.update('jax_enable_x64', True)).",
            category=ModelWarning,
            stacklevel=2,
        )
    elif not mode.converged:
        warnings.warn(
            f"the search had not come to a mode in {mode.num_exchanges} exchanges: run in double "
            "precision (jax.config.update('jax_enable_x64', True)), in which smaller gains can be "
            "told from rounding; try several starts; or allow more by max_exchanges.",
            category=ConvergenceWarning,
            stacklevel=2,
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
