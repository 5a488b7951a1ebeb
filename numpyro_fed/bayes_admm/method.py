"""The method ``BayesADMM``: its settings, and what it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from numpyro_fed.basics.errors import ModelError, is_number
from numpyro_fed.bayes_admm.algorithm import ADMM
from numpyro_fed.guides.objectives import Objective
from numpyro_fed.guides.structured import Structured
from numpyro_fed.local.natural import FixedPoint
from numpyro_fed.local.problem import Local
from numpyro_fed.posterior.built import Built
from numpyro_fed.posterior.result import Result
from numpyro_fed.pvi.method import PVI, Conjugate, PVISettings
from numpyro_fed.pvi.recipes import Relative
from numpyro_fed.rounds.schedules import Adaptive, Spec
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.plan import Plan


@dataclass(frozen=True)
class ADMMSettings(PVISettings):
    """The settings of a run, as its plan has them."""

    rho: float


@dataclass(frozen=True)
class BayesADMM(Relative):
    r"""The alternating direction method of multipliers, for posteriors in an exponential family.

    Silo ``j`` has a multiplier :math:`\lambda_j` for all means of the family: of a Gaussian one for
    the mean and one for the precision. In a round each silo, and then the server, computes

    .. math::
        q_j &= \arg\max_q \; \mathbb{E}_q[\ell_j] - \langle \lambda_j, \mathbb{E}_q[T] \rangle
        - \rho\, \mathrm{KL}(q \,\|\, q_s), \qquad
        \lambda_j \leftarrow \lambda_j + \rho\, (\eta_j - \eta_s), \\
        \eta_s &\leftarrow \frac{\eta_0 + \sum_j (\lambda_j + \rho\, \eta_j)}{1 + J \rho}

    with the log likelihoods :math:`\ell_j`, and natural parameters :math:`\eta_0` of the prior. It
    rests where the pooled evidence lower bound is stationary, as :class:`PVI` does. With
    :math:`\rho = 1/J` a conjugate model is exact after one round of all silos from the prior.

    Parameters
    ----------
    model : callable
        A NumPyro model with :class:`~numpyro_fed.silo_plate`. Priors of the globals must be in the
        family: Gaussian in unconstrained space, Gamma, Beta or Dirichlet.
    rho : float, optional
        The weight of the divergence from the server's posterior, from 1e-6 to 1e6; by default one
        over the number of silos. A larger one is slower, and damps rounds that go to and fro. With
        a small one a silo that knows more than the average may have a problem without a maximum,
        and its visits do not converge. The share of the rows that the largest silo has is then
        enough.
    family : {"auto", "full", "diagonal"} or dict
        Covariance of the Gaussian, as for :class:`PVI`.
    schedule : str or one of numpyro_fed.schedules
        ``"synchronous"``, ``schedules.Random(size)`` and others but ``"asynchronous"``. A silo that
        is left out of a round keeps its multiplier and its share of the server's average.
    local : one of numpyro_fed.local, optional
        The optimiser of :math:`q_j`. By default natural-gradient steps on fixed draws; the closed
        form where the model is conjugate, and ``local.Optax()`` where silos have latents or
        parameters of their own. With ``family="diagonal"`` ``local.NaturalGradient()`` is a
        variational online Newton method.
    guide, objective, evidence_draws
        As for :class:`PVI`; with ``guide`` and ``objective`` for rows' own latents.
    start : {None, "mode"} or Result
        None: at the prior, with multipliers of zero, as in the paper. ``"mode"``: at the mode,
        where a multiplier begins as the parabola of the silo's own log likelihood.

    Returns
    -------
    PVIResult
        By ``run``. Its ``factor(j)`` is the silo's share of the server's posterior.

    Raises
    ------
    ModelError
        For a prior outside of the family, by its name.
    ValueError
        For a ``rho`` out of its range, and for an asynchronous schedule.

    Notes
    -----
    Departures from the paper: silos send changes, so that some of them may be left out of a round;
    a change that would make the posterior improper is taken in part, and counted. The step of IVON
    keeps precisions positive by a term of second order; here a step that leaves the family is
    halved.

    References
    ----------
    Möllenhoff, Swaroop, Doshi-Velez and Khan (2025), "Federated ADMM from Bayesian Duality", arXiv
    2506.13150.

    Examples
    --------
    >>> import jax, numpy as np, numpyro, numpyro.distributions as dist
    >>> import numpyro_fed as nf
    >>> def model(y):
    ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
    ...     with nf.silo_plate("row", y.shape[0]):
    ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y)
    >>> silos = [dict(y=np.array([1.0, 2.0])), dict(y=np.array([3.0, 4.0, 5.0]))]
    >>> result = nf.BayesADMM(model).run(jax.random.key(0), 1, silos, progress_bar=False)
    >>> mu = result.posterior()["mu"]  # conjugate: one round is exact
    >>> round(float(mu.mean), 3), round(float(mu.variance), 4)
    (2.994, 0.1996)
    """

    rho: float | None = field(default=None, kw_only=True)
    family: str | Mapping[str, str] = field(default="auto", kw_only=True)
    schedule: str | Spec = field(default="synchronous", kw_only=True)
    local: Local | None = field(default=None, kw_only=True)
    guide: Structured | None = field(default=None, kw_only=True)
    objective: Objective | None = field(default=None, kw_only=True)
    start: str | Result | None = field(default=None, kw_only=True)
    evidence_draws: int = field(default=32, kw_only=True)

    def __post_init__(self) -> None:
        if self.rho is not None and not (is_number(self.rho) and 1e-6 <= self.rho <= 1e6):
            raise ValueError(f"rho must be None or a number from 1e-6 to 1e6, got {self.rho!r}.")
        if getattr(self.local, "alpha", 0) > 0:
            raise ValueError(
                f"local={self.local} has a divergence of its own, and BayesADMM a multiple of KL. "
                "Use local.Optax(), LBFGS() or NaturalGradient(), or nf.PVI."
            )
        super().__post_init__()

    def pvi(self, fm: FederatedModel | None = None, plan: Plan | None = None) -> PVI:
        local = self.local
        if local is None and fm is not None and plan is not None:
            own = any(p.dim or fm.named("param", p.name) for p in fm.plates)
            if not own and not plan.facts.value_check("conjugate"):
                # It goes uphill from the server's posterior: the problem may have no maximum.
                local = FixedPoint()
        return PVI(
            self.model,
            schedule=self.schedule,
            damping=Adaptive(1.0),
            family=self.family,
            prior="exact",
            local=local,
            guide=self.guide,
            objective=self.objective,
            start=self.start,
            start_scale=None,
            evidence_draws=self.evidence_draws,
        )

    def prepare(self, fm: FederatedModel) -> Conjugate:
        try:
            return super().prepare(fm)
        except ModelError as error:
            if "prior='factor'" not in str(error):
                raise
            raise ModelError(f"{error} (prior='factor' is a setting of nf.PVI alone.)") from None

    def settings_for(self, fm: FederatedModel, plan: Plan) -> ADMMSettings:
        return ADMMSettings(**vars(super().settings_for(fm, plan)), rho=self._weight(plan))

    def assemble(self, fm: FederatedModel, plan: Plan, prepared: Conjugate) -> Built:
        rounds = partial(ADMM, rho=self._weight(plan))
        return self.pvi(fm, plan).assemble(fm, plan, prepared, rounds)

    def _weight(self, plan: Plan) -> float:
        return 1 / plan.num_silos if self.rho is None else float(self.rho)
