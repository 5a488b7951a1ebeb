"""Partitioned variational inference: the method ``PVI``, its settings and its start."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import optax
from jax import Array

from numpyro_fed.basics.errors import (
    ConvergenceWarning,
    GuideError,
    ModelError,
    NonFiniteError,
    is_number,
    one_of,
    positive_int,
)
from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.guides.global_guides import FamilyGuide
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
from numpyro_fed.local import ClosedForm, Optax
from numpyro_fed.local.natural import FixedPoint
from numpyro_fed.local.problem import Local
from numpyro_fed.methods.party_side import check_rows_alone, minibatches_of
from numpyro_fed.methods.row_method import RowMethod
from numpyro_fed.methods.start import check_start, start_kind, start_rounds
from numpyro_fed.numerics.divergences import KL
from numpyro_fed.numerics.losses import log_loss
from numpyro_fed.posterior.built import Built, CompiledMethod
from numpyro_fed.posterior.result import Result
from numpyro_fed.pvi.families import Globals, conjugacy, globals_of
from numpyro_fed.pvi.result import PVIResult
from numpyro_fed.pvi.server import PartitionedVI, aggregation
from numpyro_fed.pvi.silo import Status
from numpyro_fed.pvi.start import at_mode, at_result
from numpyro_fed.rounds.runtime import RunOutcome, State
from numpyro_fed.rounds.schedules import Adaptive, Asynchronous, ByArrival, Spec, named
from numpyro_fed.rounds.silos import Silos
from numpyro_fed.search.mode_search import SEARCHED_UP_TO
from numpyro_fed.text.handlers import generalised
from numpyro_fed.text.layout import Layout
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.plan import Plan

# The family of the globals, and whether the likelihood of stacks of silos is conjugate to it.
Conjugate = tuple[Globals, Callable[[Sequence[SiloData]], bool]]
REMEDY = (
    "Double precision (jax.config.update('jax_enable_x64', True)), and covariates and outcomes "
    "scaled to about one usually help; so may"
)


Divergence = Callable[[Any, Any, Any], Array]


@dataclass(frozen=True)
class PVISettings:
    """The settings of a run, as its plan has them: silos and saved states must agree on them."""

    schedule: str
    damping: float
    adaptive: bool
    family: str
    prior: str
    start: str | None
    starts: int
    start_scale: str
    evidence_draws: str
    local: str
    guide: GuideConfig
    objective: str
    loss: str
    divergence: str
    prior_divergence: str
    deletion: str
    prior_share: str
    conjugate: bool


@dataclass(frozen=True)
class PVI(RowMethod[PVIResult, Conjugate]):
    r"""Partitioned variational inference, with or without local latents.

    The posterior of the globals is the prior times one factor for each silo, all in one
    exponential family. A visited silo takes its factor out, maximises its local free energy

    .. math::
        \mathcal{F}_m(q) = \mathbb{E}_q[\log p(y_m \mid z_G)]
        - \mathrm{KL}\big(q \,\|\, q_{\setminus m}\big), \qquad
        q_{\setminus m} \propto q / t_m,

    on its own data, with its local latents inside, and replies with the change of its factor's
    natural parameters. A few rounds are enough, where :class:`SFVI` takes thousands.

    Hyperparameters with a prior are globals like any other and have factors of their own (equations
    7 and 8 of the paper).

    Parameters
    ----------
    model : callable
        A NumPyro model with :class:`~numpyro_fed.silo_plate`. In the family are priors that are
        Gaussian in unconstrained space (also correlated, or flat), Gamma, Beta and Dirichlet.
    schedule : str or one of numpyro_fed.schedules
        ``"sequential"``, ``"synchronous"``, ``"asynchronous"``, or ``schedules.Random(size)`` and
        the others with settings. A round visits every participant once.
    damping : "auto", float or schedules.Adaptive
        The share of each proposed change that the server takes, in (0, 1]. An update that would
        make the posterior improper is rejected, and counted; ``Adaptive(d)`` halves the share for
        it. ``"auto"`` is that from 1, or one over the number of silos at work at once.
    family : {"auto", "full", "diagonal"} or dict
        Covariance of the Gaussian over the global sites that take one; full up to 300 dimensions.
        Other sites get the family of their prior. A dict names families by site.
    prior : {"auto", "exact", "factor"}
        How to treat a prior outside of the family, such as a HalfNormal, or a site whose scale
        is another site: ``"factor"`` approximates it by a factor of the server's own, renewed at
        each of its updates; ``"exact"`` refuses it by name. ``"auto"`` is ``"factor"``, unless
        ``deletion`` takes all factors out at once.
    local : one of numpyro_fed.local, optional
        The local optimiser. By default the closed form where the model is conjugate, and
        ``local.Optax()`` elsewhere.
    guide : Structured, optional
        For the local latents; its ``globals`` are not used.
    objective : ELBO, LocallyEnhanced or Quadrature, optional
        The bound on a silo's likelihood where it has local latents. By default ``Quadrature()``
        where rows have one or two, the run starts at the mode, divergences are KL, and neither a
        guide of the locals nor a ``batch_size`` nor a ``loss`` is chosen; else ``ELBO()``.
    theta_optim : optax.GradientTransformation, optional
        For parameters without a prior (``numpyro.param``), which take one step on the free energy
        at each update of the server (Appendices A and C); by default Adam at 0.02.
    start : {"mode", None} or Result
        ``"mode"``: some 15 exchanges find the mode of the globals' posterior. A silo's factor
        begins as the parabola of its own likelihood there, so that the posterior begins as
        Laplace's approximation, and flat priors are allowed. It needs at most 300 globals and
        ``deletion="own"``, and is not used where one pass in closed form is exact. None: at the
        prior. A result on the same silos: at its posterior, of which all factors are equal shares.
    starts : int
        Searches for the mode, side by side in one program; the highest is where the run starts.
    start_scale : float or None
        Without a start at the mode, a silo's first visit starts no wider than this; None starts at
        the prior.
    evidence_draws : int
        Draws for the estimate of the log evidence.
    loss : callable, optional
        ``loss(distribution, value)`` in place of minus the log density at each observed site, as in
        :mod:`numpyro_fed.numerics.losses` (:class:`FedGVI`).
    divergence, prior_divergence : callable
        The divergences to the cavity and to the prior, as in
        :mod:`numpyro_fed.numerics.divergences`.
    deletion : {"own", "none", "average", "prior"}
        What a silo takes out of the posterior for its cavity: its own factor; nothing (streaming);
        an average factor (stochastic power EP); all factors (committee machine).
    prior_share : {"whole", "split"}
        Whether a silo's cavity holds all of the prior, or its share of it.
    max_rounds : int, optional
        Rounds that a run refuses to exceed: a method of one pass would count the data again.

    References
    ----------
    Ashman et al. (2022), arXiv 2202.12275, Algorithm 1; the messages here carry the sum of all
    factors instead of the posterior, and name the damping of the silo's last proposal.

    Examples
    --------
    >>> import jax, numpy as np, numpyro, numpyro.distributions as dist
    >>> import numpyro_fed as nf
    >>> def model(y):
    ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
    ...     with nf.silo_plate("row", y.shape[0]):
    ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y)
    >>> silos = [dict(y=np.array([1.0, 2.0])), dict(y=np.array([3.0, 4.0, 5.0]))]
    >>> result = nf.PVI(model).run(jax.random.key(0), 1, silos, progress_bar=False)
    >>> mu = result.posterior()["mu"]  # conjugate: one pass is exact
    >>> round(float(mu.mean), 3), round(float(mu.variance), 4)
    (2.994, 0.1996)
    """

    schedule: str | Spec = field(default="sequential", kw_only=True)
    damping: str | float | Adaptive = field(default="auto", kw_only=True)
    family: str | Mapping[str, str] = field(default="auto", kw_only=True)
    prior: str = field(default="auto", kw_only=True)
    local: Local | None = field(default=None, kw_only=True)
    guide: Structured | None = field(default=None, kw_only=True)
    objective: Objective | None = field(default=None, kw_only=True)
    theta_optim: optax.GradientTransformation | None = field(default=None, kw_only=True)
    start: str | Result | None = field(default="mode", kw_only=True)
    starts: int = field(default=1, kw_only=True)
    start_scale: float | None = field(default=0.1, kw_only=True)
    evidence_draws: int = field(default=32, kw_only=True)
    loss: Callable[..., Any] | None = field(default=None, kw_only=True)
    divergence: Divergence = field(default=KL(), kw_only=True)
    prior_divergence: Divergence = field(default=KL(), kw_only=True)
    deletion: str = field(default="own", kw_only=True)
    prior_share: str = field(default="whole", kw_only=True)
    max_rounds: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        named(self.schedule)
        damping = self._damping
        if damping != "auto" and not (is_number(damping) and 0 < damping <= 1):
            raise ValueError(f"damping must be 'auto' or a number in (0, 1], got {damping!r}.")
        if self.start_scale is not None and not self.start_scale > 0:
            raise ValueError(f"start_scale must be positive or None, got {self.start_scale}.")
        one_of("deletion", self.deletion, "own", "none", "average", "prior")
        one_of("prior_share", self.prior_share, "whole", "split")
        one_of("prior", self.prior, "auto", "exact", "factor")
        check_start(self.start)
        if self.prior == "factor" and self.deletion not in ("own", "none"):
            raise ValueError(
                f"prior='factor' cannot go with deletion={self.deletion!r}, which takes the "
                "server's own factor out as well. Use a prior in the family."
            )
        positive_int("evidence_draws", self.evidence_draws)
        positive_int("starts", self.starts)
        if self.local is not None and not hasattr(self.local, "solve"):
            raise TypeError(
                f"local must be one of numpyro_fed.local, such as local.Optax(steps=500), got "
                f"{self.local!r}."
            )

    @property
    def as_remote(self) -> PVI:
        if not isinstance(named(self.schedule), Asynchronous):
            return self
        return replace(self, schedule=ByArrival())

    @property
    def _damping(self) -> str | float:
        return self.damping.damping if isinstance(self.damping, Adaptive) else self.damping

    @property
    def _plain_divergences(self) -> bool:
        return isinstance(self.divergence, KL) and isinstance(self.prior_divergence, KL)

    def _check_rounds(self, compiled: CompiledMethod, state: State, num_rounds: int) -> None:
        if self.max_rounds is not None and int(state.round) + num_rounds > self.max_rounds:
            raise ValueError(
                f"this method makes {self.max_rounds} round, but would come to "
                f"{int(state.round) + num_rounds}: it keeps no factors to take out, so that more "
                "rounds would count the data again. Use run(key, 1, silos), or PVI."
            )

    def _text(self) -> Callable[..., Any]:
        return self.model if self.loss is None else generalised(self.model, self.loss)

    def prepare(self, fm: FederatedModel) -> Conjugate:
        """Return the family of the globals, and a check whether the likelihood is conjugate."""
        prior = self.prior
        if prior == "auto":  # a factor, unless ``deletion`` takes all factors out at once
            prior = "factor" if self.deletion in ("own", "none") else "exact"
        chosen = globals_of(fm, self.family, prior)
        return chosen, conjugacy(fm, chosen)

    def _start(self, fm: FederatedModel, plan: Plan) -> str | None:
        """Return the kind of start: the mode, if silos keep a factor and one visit is not exact."""
        if isinstance(self.start, Result):
            if self.deletion != "own" or not isinstance(self.prior_divergence, KL):
                raise ValueError("start=result needs deletion='own' and prior_divergence=KL().")
            if fm.dim > SEARCHED_UP_TO:
                raise GuideError(
                    f"start=result with {fm.dim} globals: PVI begins at results with up to "
                    f"{SEARCHED_UP_TO}, whose covariance it works with. Use start=None, or SFVI."
                )
            return "result"
        # One visit in closed form is exact from anywhere,
        # unless there is no proper prior to begin at.
        needed = self.deletion == "own" and (
            fm.improper or not isinstance(self._local(plan), ClosedForm)
        )
        return start_kind(self.start, fm) if needed else None

    def value_checks(
        self, layout: Layout, prepared: Conjugate, stacks: Sequence[SiloData]
    ) -> tuple[tuple[str, bool], ...]:
        """Return whether the likelihood is conjugate; refuse unsuitable minibatches."""
        _, is_conjugate = prepared
        if self.local is not None:
            check_rows_alone(layout, self.local.batch_size, stacks)
        return (("conjugate", is_conjugate(stacks)),)

    def _local(self, plan: Plan) -> Local:
        """Return the local optimiser; refuse one that does not suit the model or the divergence."""
        closed, is_kl = plan.facts.value_check("conjugate"), isinstance(self.divergence, KL)
        local = self.local or (ClosedForm() if closed and is_kl else Optax())
        if isinstance(local, ClosedForm) and not closed:
            raise GuideError(
                "local.ClosedForm needs a conjugate model, but the likelihood is not affine in the "
                "statistics of the globals' family (or rows have latents). Use local.Optax()."
            )
        if not is_kl and not local.any_divergence:
            raise GuideError(
                f"local.{local} has a divergence of its own, but divergence={self.divergence!r}. "
                "Use local.Optax() or local.LBFGS()."
            )
        return local

    def settings_for(self, fm: FederatedModel, plan: Plan) -> PVISettings:
        if uses_amortised(self.guide):
            raise GuideError(
                "guides.Amortised: a silo of PVI settles its own guides on its own, and a network "
                "is learnt by all silos together. Use SFVI or SFVIAvg."
            )
        spec = named(self.schedule)
        auto, damping = self._damping == "auto", self._damping
        start = self._start(fm, plan)
        return PVISettings(
            schedule=in_words(self.schedule),
            damping=spec.damping(plan.num_silos) if auto else float(damping),
            adaptive=auto or isinstance(self.damping, Adaptive),
            family=in_words(self.family),
            prior=in_words(self.prior),
            start=start,
            starts=self.starts,
            start_scale=in_words(self.start_scale),
            evidence_draws=in_words(self.evidence_draws),
            local=in_words(self._local(plan)),
            guide=resolve_guide(self.guide, fm, dict(plan.largest), dict(plan.total)),
            objective=in_words(self._objective(fm, start)),
            loss=in_words(self.loss),
            divergence=in_words(self.divergence),
            prior_divergence=in_words(self.prior_divergence),
            deletion=in_words(self.deletion),
            prior_share=in_words(self.prior_share),
            conjugate=plan.facts.value_check("conjugate"),
        )

    def _objective(self, fm: FederatedModel, start: str | None) -> Objective:
        """Return the objective of a run with this kind of start."""
        plain = self.loss is None and self._plain_divergences
        whole = plain and (self.local is None or self.local.batch_size is None)
        return objective_for(self.objective, fm, self.guide, start if whole else None)

    def assemble(
        self,
        fm: FederatedModel,
        plan: Plan,
        prepared: Conjugate,
        rounds: Callable[..., PartitionedVI] = PartitionedVI,
    ) -> Built:
        """Return the algorithm and the guide; ``rounds`` makes the algorithm of its parts."""
        (chosen, _), settings = prepared, self.settings_for(fm, plan)
        guide = build_guide(self.guide, settings.guide, fm)
        # The factors' family takes the place of the guide's own part for the globals.
        guide = replace(guide, globals=FamilyGuide(fm.dim, chosen.family))
        objective = self._objective(fm, settings.start)
        draws = draws_of(self.objective, objective, guide)
        local, closed = self._local(plan), plan.facts.value_check("conjugate")
        if fm.improper and settings.start is None:
            raise ModelError(
                f"the prior of the global site '{fm.improper[0]}' is flat (ImproperUniform, or "
                "masked), and so improper: without a start at the mode there is no posterior "
                "before the first visit. Use start='mode', which takes up to 300 globals and "
                "deletion='own'; or give it a proper prior, however wide, such as "
                "dist.Normal(0, 100)."
            )
        # None for KL, which has closed forms of its own.
        to_cavity = None
        if not isinstance(self.divergence, KL):
            if hasattr(self.divergence, "check"):
                self.divergence.check(chosen.family)
            to_cavity = partial(self.divergence, chosen.family)
        spec, num_silos = named(self.schedule), plan.num_silos
        schedule = spec.build(num_silos)
        pvi = rounds(
            model=fm,
            globals=chosen,
            guide=guide,
            bound=bound_of(fm, guide, objective),
            local=local,
            prior_local=FixedPoint(),
            conjugate=closed,
            # Parameters take one step at each update of the server, in units that nobody
            # knows: larger steps overshoot where free energies are noisy, smaller ones need
            # more rounds.
            optim=self.theta_optim or optax.adam(0.02),
            minibatches=minibatches_of(fm, plan.plates_of_arrays, local.batch_size, guide, draws),
            divergence=to_cavity,
            aggregate=aggregation(chosen.family, self.prior_divergence),
            num_silos=num_silos,
            steps=1 if schedule is None else schedule.steps,
            visits=num_silos if schedule is None else schedule.steps * schedule.size,
            damping=settings.damping,
            adaptive=settings.adaptive,
            deletion=self.deletion,
            prior_share=1.0 if self.prior_share == "whole" else 1 / num_silos,
            asynchronous=isinstance(spec, Asynchronous | ByArrival),
            delayed=isinstance(spec, Asynchronous),
            start_scale=self.start_scale,
            evidence_draws=self.evidence_draws,
            # A silo's factor depends on its own data alone: one visit is exact.
            exact=chosen.prior_outside is None
            and not fm.named("param")
            and self.deletion == "own"
            and isinstance(local, ClosedForm)
            and isinstance(self.prior_divergence, KL),
            from_mode=settings.start is not None,
            has_loss=self.loss not in (None, log_loss),
            has_divergence=not self._plain_divergences,
        )
        algorithm, start = pvi.algorithm(), None
        if settings.start == "result":
            algorithm = algorithm._replace(warm_start=at_result(pvi))
        if settings.start == "mode":
            init_loc_fn = as_structured(self.guide).init_loc_fn
            start = start_rounds("mode", fm, num_silos, self.starts, init_loc_fn, at_mode(pvi))
        return Built(
            model=fm,
            guide=guide,
            objective=objective,
            algorithm=algorithm,
            schedule=schedule,
            draws=draws,
            factors=pvi,
            start=start,
        )

    def result_of(
        self, run: RunOutcome, compiled: CompiledMethod, hosted: Silos, *, quiet: bool = False
    ) -> PVIResult:
        if run.log is None:
            return PVIResult(run.losses, run.state, compiled, hosted)
        rounds, visits = len(run.losses), np.asarray(run.log.visits)
        # Without a schedule nobody is drawn, and the log has no visits: all silos, in order.
        if not visits.size:
            num_silos = compiled.plan.num_silos
            visits = np.broadcast_to(np.arange(num_silos), (rounds, 1, num_silos))
        status = np.asarray(run.log.watched).reshape(visits.shape)
        result = PVIResult(
            run.losses,
            run.state,
            compiled,
            hosted,
            visits=visits,
            damping=np.asarray(run.log.reports["damping"]),
            status=status,
            own=np.asarray(run.log.reports["own"]),
        )
        if quiet:
            return result
        # Such a run would return the prior as if it were a posterior.
        if run.failure is None and result.nothing_accepted:
            remedy = cast(PartitionedVI, compiled.built.factors).remedy
            raise NonFiniteError(
                f"no update of the {rounds} rounds could be taken, and what the silos know counts "
                f"for nothing:\n{result.report()}\nWhat it began with is in the error's "
                f".result. {REMEDY} {remedy}.",
                result=result,
                round=int(run.state.round) - 1,
                silos=tuple(np.unique(visits[status >= Status.NON_FINITE]).tolist()),
            )
        if warning := result.warning():
            warnings.warn(warning, category=ConvergenceWarning, stacklevel=4)
        return result


def in_words(value: object) -> str:
    """Return a setting as text that is the same in every process, without addresses."""
    if is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: getattr(value, f.name) for f in fields(value)}
        words = [f"{name}={in_words(part)}" for name, part in parts.items() if name != "optim"]
        return f"{type(value).__name__}({', '.join(words)})"
    return getattr(value, "__qualname__", None) or repr(value)
