"""Structured federated variational inference: the method ``SFVI``, and its base class."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax
from numpyro.infer.autoguide import AutoGuide

from numpyro_fed.algorithms.sfvi import ByGradients, StructuredVI
from numpyro_fed.errors import ConvergenceWarning, GuideError, positive_int
from numpyro_fed.guides.amortised import Amortised, with_encoders
from numpyro_fed.guides.structured import (
    GuideConfig,
    Structured,
    amortises,
    build_resolved,
    resolve,
    structured,
)
from numpyro_fed.methods.minibatch_checks import (
    check_rows_alone,
    minibatches_of,
)
from numpyro_fed.methods.mode import SEARCHED_UP_TO, start_rounds
from numpyro_fed.methods.rows import SEARCHED, Method, check_start, start_of
from numpyro_fed.methods.schedules import Spec, in_step
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.facts import Plan
from numpyro_fed.model.layout import Layout
from numpyro_fed.model.log_density import FederatedModel
from numpyro_fed.model.minibatch import Minibatches
from numpyro_fed.objectives import Bound, Objective, bound_of, draws_of, objective_for
from numpyro_fed.results.base import Silos
from numpyro_fed.results.built import Built
from numpyro_fed.results.rows import Fit, Result
from numpyro_fed.runtime.supervise import RunOutcome

# Adam's step is STEP * (1 + round / SETTLES) ** -DECAY, in coordinates in which the posterior is
# about standard: the first steps are three hundredths of a standard deviation. With a power between
# 1/2 and 1 steps add up to any distance and their noise averages out (Robbins and Monro 1951).
STEP, SETTLES, DECAY = 0.03, 100, 0.7
# Rounds from which on a run warns of a bound that has
# not settled: of fewer the quarters are too noisy.
MIN_ROUNDS = 200


def default_optimiser() -> optax.GradientTransformation:
    """Return Adam with decaying steps, for coordinates in which the posterior is about standard."""
    return optax.adam(lambda count: STEP * (1 + count / SETTLES) ** -DECAY)


@dataclass(frozen=True)
class GradientMethod(Method[Result, None]):
    """A method by stochastic gradients; a run warns if its bound has not settled."""

    optim: optax.GradientTransformation | None = field(default=None, kw_only=True)
    guide: Structured | Amortised | AutoGuide | None = field(default=None, kw_only=True)
    objective: Objective | None = field(default=None, kw_only=True)
    num_particles: int = field(default=1, kw_only=True)
    starts: int = field(default=1, kw_only=True)
    schedule: str | Spec = field(default="synchronous", kw_only=True)
    batch_size: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        positive_int("num_particles", self.num_particles)
        positive_int("starts", self.starts)
        optim: Any = self.optim
        if not (optim is None or isinstance(optim, optax.GradientTransformation)):
            raise TypeError(
                f"optim must be an Optax optimiser such as optax.adam(1e-2), got "
                f"{type(optim).__module__}.{type(optim).__name__}. Of optax.MultiSteps "
                "pass its .gradient_transformation()."
            )
        # A trial on shapes: optimisers that need the loss
        # or a line search fail here, not in a long trace.
        try:
            if optim is not None:
                jax.eval_shape(lambda x: optim.update(x, optim.init(x), x), jnp.zeros(2))
        except Exception as error:
            raise TypeError(
                "optim must take a step from a gradient alone; optimisers that need the value of "
                f"the loss or search along a line, as optax.lbfgs does, cannot be used ({error})."
            ) from error
        if self.batch_size is not None:
            positive_int("batch_size", self.batch_size)
        in_step(self.schedule)

    @abstractmethod
    def _parts(
        self, fm: FederatedModel, plan: Plan, bound: Bound, minibatches: Minibatches | None
    ) -> ByGradients:
        """Return the parts of the method's algorithm, for a bound with a guide that is built."""

    def _spec(self, fm: FederatedModel) -> Structured | Amortised | AutoGuide | None:
        """Return the guide of the settings, to be resolved by the model's sizes."""
        return self.guide

    def _objective(self, fm: FederatedModel, start: str | None) -> Objective:
        """Return the objective of a run with this kind of start."""
        whole = start if self.batch_size is None else None
        return objective_for(self.objective, fm, self._spec(fm), whole)

    def assemble(self, fm: FederatedModel, plan: Plan, prepared: None) -> Built:
        chosen, spec = plan.chosen, self._spec(fm)
        guide = build_resolved(spec, GuideConfig.of(chosen["guide"]), fm, plan.row_of)
        fm = with_encoders(fm, guide.encoders)
        objective = self._objective(fm, chosen["start"])
        draws = draws_of(self.objective, objective, guide)
        bound = bound_of(fm, guide, objective)
        minibatches = minibatches_of(fm, plan.lengths, self.batch_size, guide, draws)
        parts, start = self._parts(fm, plan, bound, minibatches), None
        if (kind := chosen["start"]) in SEARCHED:
            start = start_rounds(
                kind, fm, plan.num_silos, self.starts, structured(spec).init_loc_fn, parts.begin()
            )
        return Built(
            model=fm,
            guide=guide,
            objective=objective,
            algorithm=parts.algorithm(),
            schedule=in_step(self.schedule).build(plan.num_silos),
            draws=draws,
            start=start,
        )

    def prepare(self, fm: FederatedModel) -> None:
        return None

    def value_checks(
        self, layout: Layout, prepared: None, stacks: Sequence[SiloData]
    ) -> tuple[tuple[str, bool], ...]:
        """Return no verdicts; refuse minibatches of rows that depend on other rows."""
        check_rows_alone(layout, self.batch_size, stacks)
        return ()

    def result_of(self, run: RunOutcome, fit: Fit, hosted: Silos, *, quiet: bool = False) -> Result:
        result = Result(run.losses, run.state, fit, hosted)
        if quiet or run.ended == "converged":
            return result
        if len(run.losses) >= MIN_ROUNDS and run.log is not None and not result.settled:
            warnings.warn(
                f"the bound was still rising at the end of these {len(run.losses)} rounds: run for "
                "more of them (init_state=result.state goes on), or take larger steps. "
                "result.report() says how far the fit can be trusted.",
                category=ConvergenceWarning,
                stacklevel=4,  # the line of the user that called run
            )
        return result


@dataclass(frozen=True)
class SFVI(GradientMethod):
    r"""Structured federated variational inference.

    Each round, all silos and the server take one stochastic gradient step on

    .. math::
        \mathcal{L} = \mathbb{E}_q\Big[\log p(z_G) - \log q(z_G)
        + \sum_j \mathcal{L}_j(z_G)\Big],

    and only the gradient of a silo's own term :math:`\mathcal{L}_j` leaves it. On any partition
    of the same rows, and with the same noise, the iterates are those of pooled inference.

    Parameters
    ----------
    model : callable
        A NumPyro model with :class:`~numpyro_fed.silo_plate`.
    optim : optax.GradientTransformation, optional
        The optimiser of the server for the globals, and of each silo for its own parameters, each
        with its own state. By default Adam, whose step decays from 0.03 after the first hundred
        rounds or so. A run that starts at the mode takes steps in coordinates in which the
        posterior is about standard: choose them for that, whatever the units of the data.
    guide : Structured, Amortised or AutoGuide, optional
        :class:`numpyro_fed.guides.Structured` chooses by the model's sizes when left out. A NumPyro
        autoguide is used for the globals. With networks for rows
        (:class:`numpyro_fed.guides.Amortised`) a run starts as by ``start=None``.
    objective : ELBO, LocallyEnhanced or Quadrature, optional
        The bound. By default ``Quadrature()`` where rows have one or two latents, the run starts at
        the mode (of up to 300 globals) or at a result, and neither a guide of the locals nor a
        ``batch_size`` is chosen; else ``ELBO()``, the papers'. Where rows have more latents
        ``LocallyEnhanced(draws=20)`` is worth its price.
    num_particles : int
        Draws of the globals in each round.
    start : {"mode", None} or Result
        ``"mode"``: some 15 exchanges find the mode of the globals' posterior and its curvature
        (:func:`numpyro_fed.find_mode`), and the guides begin there, the silos' own at the modes of
        their latents given the globals, with curvature and derivatives. Above 300 globals and
        shared parameters it takes some hundred exchanges and uses the curvature's diagonal; above
        10,000 it is as None. None: at zero in unconstrained space. A result of another method on
        the same silos, such as :class:`SFVIAvg`: at its posterior; ``result.start.report()`` lists
        what was taken over.
    starts : int
        Searches for the mode, side by side in one program; the highest is where the run starts.
    schedule : {"synchronous", "sequential"} or one of numpyro_fed.schedules
        Who takes part in a step: by default all silos. Under ``schedules.Random(k)`` and
        ``schedules.Given(who)`` the participants' replies count J / k times, for all silos, so that
        steps are unbiased; a silo's own parameters and the count of its optimiser stay as they are
        while it does not take part. A sequential round has a step for each silo.
    batch_size : int, optional
        The number of rows that a silo draws for each step, with replacement, from each silo plate
        with nothing below it; they count n / B times. A silo with no more rows takes all of them.
        The search for the mode reads all rows in any case.

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

    start: str | Result | None = field(default="mode", kw_only=True)

    def __post_init__(self) -> None:
        check_start(self.start)
        super().__post_init__()

    def settings_for(self, fm: FederatedModel, plan: Plan) -> dict[str, Any]:
        largest, total = dict(plan.largest), dict(plan.total)
        start = start_of(self.start, fm, wide=True)
        if amortises(self.guide):
            if start == "result":
                raise GuideError(
                    "start=result with guides.Amortised: nothing says which network gives the rows "
                    "the guides that they have there. Go on by init_state=, or use start=None."
                )
            start = None
        return {
            "method": "SFVI",
            "num_particles": self.num_particles,
            "start": start,
            "starts": self.starts,
            "guide": resolve(self._spec(fm), fm, largest, total, at_mode=start == "mode"),
            "objective": repr(self._objective(fm, start)),
            "schedule": repr(in_step(self.schedule)),
            "batch_size": self.batch_size,
        }

    def _parts(
        self, fm: FederatedModel, plan: Plan, bound: Bound, minibatches: Minibatches | None
    ) -> StructuredVI:
        kind, schedule = plan.chosen["start"], in_step(self.schedule).build(plan.num_silos)
        return StructuredVI(
            fm,
            bound.guide,
            bound,
            self.optim or default_optimiser(),
            self.num_particles,
            plan.num_silos,
            in_part=schedule is not None,
            steps=1 if schedule is None else schedule.steps,
            minibatches=minibatches,
            from_mode=kind is not None,
            wide=kind == "wide" or (kind == "result" and fm.dim > SEARCHED_UP_TO),
        )
