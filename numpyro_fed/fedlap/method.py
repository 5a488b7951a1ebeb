"""The method ``FedLap``, with FedLap-Cov: its settings, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from numpyro_fed.basics.errors import ModelError, is_number, one_of
from numpyro_fed.fedlap.algorithm import FedLapRounds, LaplaceAtSilo
from numpyro_fed.guides.objectives import Objective
from numpyro_fed.numerics.gaussian import FULL_COVARIANCE_UP_TO
from numpyro_fed.posterior.built import Built
from numpyro_fed.posterior.result import Result
from numpyro_fed.pvi.families import GAUSSIAN
from numpyro_fed.pvi.method import PVI, Conjugate, PVISettings
from numpyro_fed.pvi.recipes import Relative
from numpyro_fed.rounds.schedules import Adaptive, Spec
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.plan import Plan


@dataclass(frozen=True)
class FedLap(Relative):
    r"""FedLap and FedLap-Cov: Laplace's method at each silo, joined by dual variables.

    The server has a normal posterior with mean :math:`w_g` and precision :math:`S_g`. Silo ``k``
    finds the mode :math:`w_k` of its log likelihood :math:`\ell_k` times what the others know, and
    changes its dual variables for the mean and for the precision,

    .. math::
        w_k &= \arg\max_w \; \ell_k(w) - v_k' w + \tfrac12 w' V_k w
        - \tfrac12 (w - w_g)' S_g (w - w_g), \\
        v_k &\leftarrow v_k + \rho\, (S_k w_k - S_g w_g), \qquad
        V_k \leftarrow V_k + \rho\, (S_k - S_g), \\
        S_g &= S_0 + \textstyle\sum_k V_k, \qquad S_g w_g = S_0 w_0 + \sum_k v_k,

    with :math:`S_k = S_g - V_k - \nabla^2 \ell_k(w_k)` and the prior's :math:`w_0, S_0`. It rests
    at Laplace's approximation of the pooled posterior, exact for linear Gaussian models.

    Parameters
    ----------
    model : callable
        A NumPyro model with :class:`~numpyro_fed.silo_plate`, and up to 300 globals. They are
        Gaussian in unconstrained space, or have a factor of the server's own for their prior, as in
        :class:`PVI`.
    covariance : {"full", "diagonal", "fixed"}
        ``"full"`` or ``"diagonal"``: FedLap-Cov. ``"fixed"``: FedLap, whose precision stays that of
        the start, and :math:`V_k` as it was; it needs a Gaussian prior and a model without
        parameters. **From the prior** (``start=None``) **that is no posterior**: the mean alone is
        the pooled mode, and spreads are those of the prior.
    rho : "auto" or float
        The damping of the dual variables, from 1e-6 to 1; ``"auto"`` is one over the number of
        silos at work at once. A change that would make the posterior improper is taken in part.
    schedule : str or one of numpyro_fed.schedules
        As for :class:`PVI`, but for ``"asynchronous"``.
    objective : Quadrature, optional
        For rows with one or two latents of their own, which need ``start="mode"``.
    start : {None, "mode"} or Result
        None: at the prior, with dual variables of zero, as in the paper. ``"mode"``: where a search
        of some 15 exchanges leads. As that finds the mode itself, rounds have little left to do.
    evidence_draws : int
        Draws for the estimate of the log evidence.

    Returns
    -------
    PVIResult
        By ``run``. Its ``factor(j)`` are silo ``j``'s dual variables.

    Raises
    ------
    ModelError
        For a site whose family is not Gaussian, and for rows with latents that only a guide
        reaches, by name; for more than 300 globals.

    Notes
    -----
    Departures from the paper: the prior is the model's, where the paper has an isotropic one; a
    full covariance has the exact Hessian; the mode is found by Newton's method, where the paper
    takes steps of Adam. The server finds the factor of a prior that is not Gaussian by Laplace's
    method too, but for the first one of ``start=None``, which is that of :class:`PVI`: without data
    a prior may have no mode, or no curvature beside a kink. A pooled mode that lies at a kink is
    not found, and the result says that the server's factor has not converged.

    References
    ----------
    Swaroop, Khan and Doshi-Velez (2025), "Connecting Federated ADMM to Bayes", arXiv 2501.17325.

    Examples
    --------
    >>> import jax, numpy as np, numpyro, numpyro.distributions as dist
    >>> import numpyro_fed as nf
    >>> def model(y):
    ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
    ...     with nf.silo_plate("row", y.shape[0]):
    ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y)
    >>> silos = [dict(y=np.array([1.0, 2.0])), dict(y=np.array([3.0, 4.0, 5.0]))]
    >>> fedlap = nf.FedLap(model, rho=1.0)
    >>> mu = fedlap.run(jax.random.key(0), 2, silos, progress_bar=False).posterior()["mu"]
    >>> round(float(mu.mean), 3), round(float(mu.variance), 4)
    (2.994, 0.1996)
    """

    covariance: str = field(default="full", kw_only=True)
    rho: str | float = field(default="auto", kw_only=True)
    schedule: str | Spec = field(default="synchronous", kw_only=True)
    objective: Objective | None = field(default=None, kw_only=True)
    start: str | Result | None = field(default=None, kw_only=True)
    evidence_draws: int = field(default=32, kw_only=True)

    def __post_init__(self) -> None:
        one_of("covariance", self.covariance, "full", "diagonal", "fixed")
        if self.rho != "auto" and not (is_number(self.rho) and 1e-6 <= self.rho <= 1):
            raise ValueError(f"rho must be 'auto' or a number from 1e-6 to 1, got {self.rho!r}.")
        super().__post_init__()

    def pvi(self, fm: FederatedModel | None = None, plan: Plan | None = None) -> PVI:
        return PVI(
            self.model,
            schedule=self.schedule,
            damping="auto" if isinstance(self.rho, str) else Adaptive(self.rho),
            family="full" if self.covariance == "fixed" else self.covariance,
            local=LaplaceAtSilo(curvature=self.covariance != "fixed"),
            objective=self.objective,
            start=self.start,
            start_scale=None,
            evidence_draws=self.evidence_draws,
        )

    def prepare(self, fm: FederatedModel) -> Conjugate:
        if fm.dim > FULL_COVARIANCE_UP_TO:
            raise ModelError(
                f"FedLap takes up to {FULL_COVARIANCE_UP_TO} globals, as each step of a silo's "
                f"search has their whole Hessian, and this model has {fm.dim}. Use nf.PVI or "
                "nf.BayesADMM with start=None."
            )
        if self.covariance == "fixed" and (params := fm.named("param")):
            raise ModelError(
                f"the parameter '{params[0].name}' is learnt from the spread of the posterior, "
                "which covariance='fixed' does not find. Use covariance='full' or 'diagonal', or "
                "give the parameter a prior."
            )
        prepared = super().prepare(fm)
        if self.covariance == "fixed" and prepared[0].prior_outside is not None:
            raise ModelError(
                "the prior is not Gaussian in unconstrained space, so that its own curvature is "
                "renewed in each round and no precision is fixed. Use covariance='full' or "
                "'diagonal'."
            )
        if other := [name for name in prepared[0].family.members if name != GAUSSIAN]:
            raise ModelError(
                f"the prior of the global site '{other[0]}' is not Gaussian in unconstrained "
                "space, as FedLap needs it. Use a Normal or LogNormal, or nf.PVI."
            )
        return prepared

    def settings_for(self, fm: FederatedModel, plan: Plan) -> PVISettings:
        settings = super().settings_for(fm, plan)
        by_guide = not settings.objective.startswith("Quadrature")
        own = [p.name for p in fm.plates if fm.named("param", p.name) or (p.dim and by_guide)]
        if own:
            raise ModelError(
                f"silo_plate '{own[0]}' has parameters or latents of its own that a guide would "
                "have to reach, and FedLap has none. With one or two latents a row use "
                "start='mode', which integrates them by quadrature; or use nf.PVI."
            )
        return settings

    def assemble(self, fm: FederatedModel, plan: Plan, prepared: Conjugate) -> Built:
        def rounds(**parts: Any) -> FedLapRounds:
            # The prior's part outside of the family, too, by Laplace's method.
            return FedLapRounds(**{**parts, "prior_local": LaplaceAtSilo()})

        self.settings_for(fm, plan)
        return self.pvi(fm, plan).assemble(fm, plan, prepared, rounds)
