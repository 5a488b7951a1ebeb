"""Structured federated variational inference: the methods ``SFVI`` and ``SFVIAvg``."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpyro.infer.autoguide import AutoGuide

from numpyro_fed.basics.errors import (
    ConvergenceWarning,
    GuideError,
    ModelError,
    one_of,
    positive_int,
)
from numpyro_fed.data.silo_data import SiloData, label
from numpyro_fed.guides.local_guides import Amortised, with_encoders
from numpyro_fed.guides.objectives import Objective, draws_of, objective_for
from numpyro_fed.guides.silo_bounds import bound_of
from numpyro_fed.guides.structured import (
    GuideConfig,
    Structured,
    as_structured,
    build_guide,
    resolve_guide,
    uses_amortised,
)
from numpyro_fed.methods.party_side import check_rows_alone, minibatches_of
from numpyro_fed.methods.row_method import RowMethod
from numpyro_fed.methods.start import SEARCH_KINDS, check_start, start_kind, start_rounds
from numpyro_fed.numerics.gaussian import FULL_COVARIANCE_UP_TO
from numpyro_fed.posterior.built import Built, CompiledMethod
from numpyro_fed.posterior.result import Result
from numpyro_fed.rounds.runtime import RunOutcome
from numpyro_fed.rounds.schedules import Given, Random, Sequential, Spec, in_step
from numpyro_fed.rounds.silos import Silos
from numpyro_fed.search.mode_search import SEARCHED_UP_TO
from numpyro_fed.sfvi.algorithm import SFVIAlgorithm
from numpyro_fed.sfvi.averaging import Aggregation, Averaging
from numpyro_fed.sfvi.base import GradientAlgorithm
from numpyro_fed.text.layout import Layout
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.plan import Facts, Plan, size_class

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


def words_of_absence(run: RunOutcome, names: Sequence[str]) -> str:
    """Return in words which silos did not answer in some rounds; empty if all have answered."""
    if run.log is None or not np.size(run.log.watched):
        return ""
    watched = np.asarray(run.log.watched)
    visits = np.broadcast_to(np.arange(watched.shape[-1]), watched.shape)
    if np.size(run.log.visits):
        visits = np.asarray(run.log.visits)
    counts = Counter(visits[~watched].tolist())
    if not counts:
        return ""
    who = ", ".join(f"{label(j, names)} ({n} times)" for j, n in sorted(counts.items()))
    return (
        f"Without a reply in {len(watched)} rounds: {who}. The sum over the others was scaled up "
        "in their place, which is right where they are alike."
    )


@dataclass(frozen=True)
class GradientSettings:
    """The settings of a run by gradients, as its plan has them."""

    num_particles: int
    start: str | None
    starts: int
    objective: str
    schedule: str
    batch_size: int | None
    guide: GuideConfig


@dataclass(frozen=True)
class AveragingSettings(GradientSettings):
    """The settings of a run that averages, as its plan has them."""

    local_steps: int
    aggregate: str
    by_rows: bool
    locals_only: bool


Settings = TypeVar("Settings", bound=GradientSettings)


@dataclass(frozen=True)
class GradientMethod(RowMethod[Result, None], Generic[Settings]):
    """A method by stochastic gradients; a run warns if its bound has not settled."""

    optim: optax.GradientTransformation | None = field(default=None, kw_only=True)
    guide: Structured | Amortised | AutoGuide | None = field(default=None, kw_only=True)
    objective: Objective | None = field(default=None, kw_only=True)
    num_particles: int = field(default=1, kw_only=True)
    starts: int = field(default=1, kw_only=True)
    schedule: str | Spec = field(default="synchronous", kw_only=True)
    batch_size: int | None = field(default=None, kw_only=True)

    PLAIN_FACTS = True

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
    def settings_for(self, fm: FederatedModel, plan: Plan) -> Settings:
        """Return the settings with all defaults resolved."""

    @abstractmethod
    def _parts(self, settings: Settings, plan: Plan, common: dict[str, Any]) -> GradientAlgorithm:
        """Return the parts of the method's algorithm; ``common`` has those of every method."""

    def _spec(self, fm: FederatedModel) -> Structured | Amortised | AutoGuide | None:
        """Return the guide of the settings, to be resolved by the model's sizes."""
        return self.guide

    def _objective(self, fm: FederatedModel, start: str | None) -> Objective:
        """Return the objective of a run with this kind of start."""
        whole = start if self.batch_size is None else None
        return objective_for(self.objective, fm, self._spec(fm), whole)

    def _settings(
        self, fm: FederatedModel, start: str | None, guide: GuideConfig
    ) -> GradientSettings:
        return GradientSettings(
            num_particles=self.num_particles,
            start=start,
            starts=self.starts,
            objective=repr(self._objective(fm, start)),
            schedule=repr(in_step(self.schedule)),
            batch_size=self.batch_size,
            guide=guide,
        )

    def assemble(self, fm: FederatedModel, plan: Plan, prepared: None) -> Built:
        settings, spec = self.settings_for(fm, plan), self._spec(fm)
        guide = build_guide(spec, settings.guide, fm, plan.row_of)
        fm = with_encoders(fm, guide.encoders)
        objective = self._objective(fm, settings.start)
        draws = draws_of(self.objective, objective, guide)
        kind, start = settings.start, None
        common = {
            "model": fm,
            "guide": guide,
            "bound": bound_of(fm, guide, objective),
            "num_particles": self.num_particles,
            "num_silos": plan.num_silos,
            "minibatches": minibatches_of(fm, plan.plates_of_arrays, self.batch_size, guide, draws),
            "starts_from_point": kind is not None,
            "many_globals": kind == "wide" or (kind == "result" and fm.dim > SEARCHED_UP_TO),
        }
        parts = self._parts(settings, plan, common)
        if kind in SEARCH_KINDS:
            init_loc_fn, begin = as_structured(spec).init_loc_fn, parts.round_from_mode()
            start = start_rounds(kind, fm, plan.num_silos, self.starts, init_loc_fn, begin)
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
        """Return no checks; refuse minibatches of rows that depend on other rows."""
        check_rows_alone(layout, self.batch_size, stacks)
        return ()

    def result_of(
        self, run: RunOutcome, compiled: CompiledMethod, hosted: Silos, *, quiet: bool = False
    ) -> Result:
        remarks = words_of_absence(run, hosted.names)
        result = Result(run.losses, run.state, compiled, hosted, remarks=remarks)
        if remarks and not quiet:
            warnings.warn(remarks, category=ConvergenceWarning, stacklevel=4)
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
class SFVI(GradientMethod[GradientSettings]):
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
        The optimiser of the server for the globals, and of each silo for its own parameters. By
        default Adam, whose step decays from 0.03 after the first hundred rounds or so. A run that
        starts at the mode takes steps in coordinates in which the posterior is about standard.
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
        (:func:`numpyro_fed.find_mode`), and all guides begin at modes, with curvatures. Above 300
        globals and shared parameters it takes some hundred exchanges and uses the curvature's
        diagonal; above 10,000 it is as None. None: at zero in unconstrained space. A result on the
        same silos: at its posterior; ``result.start.report()`` lists what was taken over.
    starts : int
        Searches for the mode, side by side in one program; the highest is where the run starts.
    schedule : {"synchronous", "sequential"} or one of numpyro_fed.schedules
        Who takes part in a step: by default all silos. Under ``schedules.Random(k)`` and
        ``schedules.Given(who)`` replies count J / k times, so that steps are unbiased, and a silo's
        own parameters stay while it is left out. A sequential round has a step for each silo.
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

    def settings_for(self, fm: FederatedModel, plan: Plan) -> GradientSettings:
        largest, total = dict(plan.largest), dict(plan.total)
        start = start_kind(self.start, fm, wide=True)
        if uses_amortised(self.guide):
            if start == "result":
                raise GuideError(
                    "start=result with guides.Amortised: nothing says which network gives the rows "
                    "the guides that they have there. Go on by init_state=, or use start=None."
                )
            start = None
        guide = resolve_guide(self._spec(fm), fm, largest, total, at_mode=start == "mode")
        return self._settings(fm, start, guide)

    def _parts(
        self, settings: GradientSettings, plan: Plan, common: dict[str, Any]
    ) -> SFVIAlgorithm:
        schedule = in_step(self.schedule).build(plan.num_silos)
        return SFVIAlgorithm(
            **common,
            optim=self.optim or default_optimiser(),
            in_part=schedule is not None,
            steps=1 if schedule is None else schedule.steps,
        )


# Adam's first steps in a round, for the centre of the globals, the rest of the guides, and other
# parameters. A step of 0.02 for all left unlike silos 4 to 8 sds off, and one of 0.05 made sds half
# as wide as they are, by noise (docs/results/six_cities.md).
CENTRE_STEP, REST_STEP, OTHER_STEP = 0.2, 0.01, 0.02
# The last step in a round, so small that its noise is none; and Adam's
# decay of second moments, a memory of ten steps: Optax's 0.999 would
# remember the large gradients of the way there through the whole round.
LAST_STEP, SECOND_MOMENT = 1e-4, 0.9
AGGREGATES = ("wasserstein", "reverse_kl", "forward_kl", "product", "average")


def averaging_optimiser(local_steps: int, whitened: bool) -> optax.GradientTransformation:
    """Return Adam whose steps become smaller within each round and begin anew in the next.

    In a round a silo goes from the average of all to its own posterior, which may be many standard
    deviations away. In ``whitened`` coordinates, in which the posterior is about standard, the
    centre of the globals therefore takes the largest steps. The rest of the guides takes the
    smallest: noise makes standard deviations too narrow.
    """

    def adam_within_round(first: float) -> optax.GradientTransformation:
        schedule_of_steps = optax.cosine_decay_schedule(first, local_steps, LAST_STEP / first)
        return optax.adam(lambda count: schedule_of_steps(count % local_steps), b2=SECOND_MOMENT)

    # In the units of the data nobody knows which leaves are far from their end: one step for all.
    if not whitened:
        return adam_within_round(OTHER_STEP)
    kinds = {
        "centre": adam_within_round(CENTRE_STEP),
        "rest": adam_within_round(REST_STEP),
        "other": adam_within_round(OTHER_STEP),
    }
    return optax.multi_transform(kinds, partial(jax.tree_util.tree_map_with_path, _step_size_of))


def _step_size_of(path: tuple[Any, ...], _: object) -> str:
    """Return the kind of steps that a leaf of the parameters takes."""
    first, last = path[0].name, getattr(path[-1], "key", None)
    if first != "guide":
        return "other"
    return "centre" if len(path) == 2 and last == "loc" else "rest"


@dataclass(frozen=True)
class SFVIAvg(GradientMethod[AveragingSettings]):
    r"""Structured federated variational inference with averages: fewer rounds, more work in each.

    In each round every silo takes ``local_steps`` stochastic gradient steps on

    .. math::
        \mathbb{E}_q\Big[\log p(z_G) - \log q(z_G) + \frac{N}{N_j} \mathcal{L}_j(z_G)\Big],

    the bound as it would be if all N rows were like its own. Then the server averages: shared
    parameters by their mean, the Gaussians of the globals by their Wasserstein barycenter. Rows
    must be exchangeable over silos. With silos that are unlike, or so few ``local_steps`` that
    silos do not reach their own posteriors, the limit is not the posterior, however long the run
    is; ``result.report()`` says so. Take more steps, or SFVI or PVI, which may start at its result.

    Parameters
    ----------
    model : callable
        A NumPyro model with :class:`~numpyro_fed.silo_plate`.
    local_steps : int
        Steps at each silo in a round.
    aggregate : {"wasserstein", "reverse_kl", "forward_kl", "product", "average"}
        The average of the silos' Gaussians: see :mod:`numpyro_fed.numerics.barycenters`.
        ``"reverse_kl"`` multiplies them, each to the power of its weight, and is the posterior
        itself for a conjugate model if silos reach theirs; ``"forward_kl"`` covers them;
        ``"average"`` is of parameters as they stand, which depends on how the family is written
        down. ``"product"`` leaves out N / N_j, gives each silo its share 1 / J of the prior, and
        multiplies (consensus Monte Carlo's rule).
    weights : {"rows", "even"}
        The weights of silos in averages, with N / N_j or J as the factors of their bounds.
        ``"rows"`` takes one more exchange before the first round, in which numbers of rows are
        added up. A full Wasserstein barycenter also needs each silo's own number in the rounds; if
        that must not leave a silo, use ``"even"`` or another average.
    locals_only : bool
        Whether silos step on their own latents' guides alone, given the globals as they are. These
        guides follow a silo's own globals in a round, and lag behind the average, the farther the
        less alike silos are: a few such rounds from ``init_state=result.state`` end a run.
    optim : optax.GradientTransformation, optional
        By default Adam, whose step falls to 1e-4 within each round: from 0.2 for the centre of the
        globals, 0.01 for the rest of all guides, 0.02 for other parameters, in coordinates in which
        the posterior is about standard. Without a start at the mode from 0.02 for all. Its state
        stays at each silo from round to round.
    guide : Structured, optional
        By default the globals have a full covariance up to 300 of them and a diagonal one above. A
        low rank becomes a full covariance; for other families no barycenter is known.
    objective, num_particles, start, starts, schedule, batch_size
        As for :class:`SFVI`, except schedules with one silo at a time. Replies are averaged over
        the participants, so that the result is that of the last ones. A run that starts at the mode
        averages in coordinates in which the posterior is about standard.

    Raises
    ------
    ModelError
        For silos whose rows are not alike: private parameters, static arguments that differ and
        are no numbers of rows.
    GuideError
        For a guide whose barycenter is not known.

    Notes
    -----
    A barycenter of full covariances takes what each silo sends; all other averages are sums over
    silos, whose parts the server need not see.

    References
    ----------
    Hassan, Salomone, Mengersen (2023), arXiv 2302.03314, section 3.2 and Algorithm 2, where weights
    are even and the optimiser begins anew in each round. Scott et al. (2016), International Journal
    of Management Science and Engineering Management 11, for ``"product"``.

    Examples
    --------
    >>> import jax, numpy as np, numpyro, numpyro.distributions as dist
    >>> import numpyro_fed as nf
    >>> def model(y):
    ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
    ...     with nf.silo_plate("row", y.shape[0]):
    ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y)
    >>> silos = [dict(y=np.array([1.0, 2.0])), dict(y=np.array([3.0, 4.0, 5.0]))]
    >>> avg = nf.SFVIAvg(model, aggregate="reverse_kl")
    >>> result = avg.run(jax.random.key(0), 5, silos, progress_bar=False)
    >>> mu = result.sample_posterior(jax.random.key(1), 4_000)["mu"]
    >>> bool(abs(mu.mean() - 3.0) < 0.05), bool(abs(mu.std() - 5**-0.5) < 0.05)
    (True, True)
    """

    local_steps: int = field(default=500, kw_only=True)
    aggregate: str = field(default="wasserstein", kw_only=True)
    weights: str = field(default="rows", kw_only=True)
    locals_only: bool = field(default=False, kw_only=True)
    start: str | None = field(default="mode", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        positive_int("local_steps", self.local_steps)
        one_of("aggregate", self.aggregate, *AGGREGATES)
        one_of("weights", self.weights, "rows", "even")
        if self.start not in ("mode", None):
            given = repr(self.start) if isinstance(self.start, str) else type(self.start).__name__
            raise ValueError(
                f"start={given}: expected 'mode' or None. SFVI and PVI begin at results of others."
            )
        schedule = in_step(self.schedule)
        one_at_a_time = (
            isinstance(schedule, Sequential)
            or (isinstance(schedule, Given) and np.shape(schedule.who)[-1:] == (1,))
            or (isinstance(schedule, Random) and schedule.size == 1)
        )
        if one_at_a_time:
            raise ValueError(
                f"schedule={self.schedule!r:.80}: an average of one silo is what that silo has "
                "come to, as if all rows were like its own. Let two or more take part in a round, "
                "or use PVI, whose silos may answer one after the other."
            )

    def _check_facts(self, facts: Sequence[Facts]) -> None:
        first = dict(facts[0].static)
        # A static argument that differs is allowed only as a number of rows: anything else may
        # change the likelihood, and each silo's rows are weighed as if all N rows were like them.
        for j, other in enumerate(facts):
            for name, value in other.static:
                if name not in first or value == first[name]:
                    continue
                count_rows = (
                    type(n) is int and n > 0 and size_class(n) in dict(told.sizes).values()
                    for n, told in ((value, other), (first[name], facts[0]))
                )
                if not all(count_rows):
                    raise ModelError(
                        f"'{name}' is {value!r} at silo {j} and {first[name]!r} at silo 0, so that "
                        "their rows may have other likelihoods: SFVIAvg weighs each silo's rows as "
                        "if all were like them. Use SFVI or PVI."
                    )

    def settings_for(self, fm: FederatedModel, plan: Plan) -> AveragingSettings:
        if private := [s.name for p in fm.plates for s in fm.named("param", p.name)]:
            raise ModelError(
                f"the parameter '{private[0]}' is each silo's own, so that rows are not alike at "
                "all of them: SFVIAvg weighs each silo's rows as if all were like them. Use SFVI "
                "or PVI, or take the parameter out of the silo_plate."
            )
        if self.locals_only and not any(p.dim for p in fm.plates):
            raise ModelError(
                "locals_only=True: the model has no latents in a silo_plate, so that silos would "
                "have nothing to step on."
            )
        guide = resolve_guide(self._spec(fm), fm, dict(plan.largest), dict(plan.total))
        start = start_kind(self.start, fm, wide=guide.globals == "diagonal")
        start = None if uses_amortised(self.guide) else start
        return AveragingSettings(
            **vars(self._settings(fm, start, guide)),
            local_steps=self.local_steps,
            aggregate=self.aggregate,
            by_rows=self.weights == "rows" and self.aggregate != "product",
            locals_only=self.locals_only,
        )

    def _spec(self, fm: FederatedModel) -> Structured:
        """Return the guide, with a family of the globals whose barycenter is known."""
        spec = Structured() if self.guide is None else self.guide
        if isinstance(spec, Amortised):
            spec = Structured(locals=spec)
        kind = spec.globals if isinstance(spec, Structured) else spec
        if kind == "auto":
            kind = "full" if fm.dim <= FULL_COVARIANCE_UP_TO else "diagonal"
        if kind == "low_rank" and fm.dim <= FULL_COVARIANCE_UP_TO:
            kind = "full"
        if kind not in ("full", "diagonal"):
            name = kind if isinstance(kind, str) else type(kind).__name__
            raise GuideError(
                f"globals={name!r} with {fm.dim} globals: no barycenter of it is known. Use "
                "guides.Structured(globals='full') or globals='diagonal', or another method: SFVI "
                "and PVI average nothing."
            )
        return replace(spec, globals=kind) if isinstance(spec, Structured) else Structured()

    def _parts(self, settings: AveragingSettings, plan: Plan, common: dict[str, Any]) -> Averaging:
        diagonal, whitened = settings.guide.globals == "diagonal", settings.start is not None
        return Averaging(
            **common,
            optim=self.optim or averaging_optimiser(self.local_steps, whitened),
            aggregation=Aggregation(self.aggregate, diagonal, plan.num_silos),
            local_steps=self.local_steps,
            by_rows=settings.by_rows,
            locals_only=settings.locals_only,
        )
