"""The family of PVI: other methods as settings of :class:`PVI`, under their own names.

Ashman et al. 2022, arXiv 2202.12275, section 4, shows how they are related.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import optax

from numpyro_fed import local
from numpyro_fed.basics.errors import one_of
from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.local.problem import Local
from numpyro_fed.methods.row_method import RowMethod
from numpyro_fed.numerics.divergences import KL
from numpyro_fed.posterior.built import CompiledMethod
from numpyro_fed.pvi.method import PVI, Conjugate, Divergence, PVISettings
from numpyro_fed.pvi.result import PVIResult
from numpyro_fed.rounds.runtime import RunOutcome
from numpyro_fed.rounds.schedules import Adaptive, Asynchronous, Sequential, Spec, named
from numpyro_fed.rounds.silos import Silos
from numpyro_fed.text.layout import Layout
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.plan import Plan


@dataclass(frozen=True)
class Relative(RowMethod[PVIResult, Conjugate]):
    """A method that PVI runs, with settings and a name of its own on plans and in files.

    A subclass says by :meth:`pvi` which settings of PVI its own are. They are checked when it is
    made.
    """

    def __post_init__(self) -> None:
        if isinstance(named(self.pvi().schedule), Asynchronous):
            raise ValueError(
                "schedule='asynchronous': what a silo keeps belongs to the posterior that it was "
                "sent last. Use 'synchronous' or schedules.Random(size), or nf.PVI."
            )

    @abstractmethod
    def pvi(self, fm: FederatedModel | None = None, plan: Plan | None = None) -> PVI:
        """Return PVI with the settings of this method, of a run where model and plan are known."""

    def prepare(self, fm: FederatedModel) -> Conjugate:
        return self.pvi().prepare(fm)

    def value_checks(
        self, layout: Layout, prepared: Conjugate, stacks: Sequence[SiloData]
    ) -> tuple[tuple[str, bool], ...]:
        return self.pvi().value_checks(layout, prepared, stacks)

    def settings_for(self, fm: FederatedModel, plan: Plan) -> PVISettings:
        return self.pvi(fm, plan).settings_for(fm, plan)

    def result_of(
        self, run: RunOutcome, compiled: CompiledMethod, hosted: Silos, *, quiet: bool = False
    ) -> PVIResult:
        return self.pvi().result_of(run, compiled, hosted, quiet=quiet)


def GlobalVI(
    model: Callable[..., Any],
    *,
    rate: float = 0.1,
    gradient: str = "natural",
    num_particles: int = 16,
    batch_size: int | None = None,
    **settings: Any,
) -> PVI:
    r"""Return global variational inference: PVI whose silos take one gradient step, all at once.

    A natural-gradient step at every silo is one on the global free energy (Property 3.2),

    .. math::
        \eta \leftarrow (1 - \rho)\,\eta + \rho\,\Big(\eta_0
        + \sum_m \nabla_\mu \mathbb{E}_q[\log p(y_m \mid z_G)]\Big),

    and a plain gradient step in natural parameters is one of gradient ascent (Property 3.1).
    Both need many rounds, which PVI's local work saves.

    Parameters
    ----------
    rate : float
        The step.
    gradient : {"natural", "plain"}
        Plain steps are those of Property 3.1. They are badly scaled, and useful for the study of
        it.
    num_particles, batch_size
        Draws of the globals, and rows of each silo, in each step.
    model, **settings
        As for :class:`PVI`: ``family``, ``guide``, ``objective``, ... Here ``evidence_draws``
        is 1, since a round is short, and ``damping`` is ``schedules.Adaptive(1.0)``: noisy
        gradients at many silos may add up to an improper step, which is then halved.

    Examples
    --------
    >>> import numpyro_fed as nf
    >>> nf.GlobalVI(lambda y: None, rate=0.5).local.steps
    1
    """
    one_of("gradient", gradient, "natural", "plain")
    draws: dict[str, Any] = {"num_particles": num_particles, "batch_size": batch_size}
    if gradient == "natural":
        step: Local = local.NaturalGradient(rate=rate, steps=1, **draws)
    else:
        step = local.Optax(optim=optax.sgd(rate), steps=1, space="natural", **draws)
    chosen = {"damping": Adaptive(1.0), "evidence_draws": 1, "start_scale": None, **settings}
    return PVI(model, schedule="synchronous", local=step, **chosen)


def BCM(model: Callable[..., Any], *, split: bool = False, **settings: Any) -> PVI:
    r"""Return the Bayesian committee machine: silos infer alone, and results are multiplied.

    .. math::
        q \propto p(z_G)^{1 - M} \prod_m q_m \quad\text{(same)}, \qquad
        q \propto \prod_m q_m \quad\text{(split)}

    With the same prior at all silos, this is the first undamped synchronous round of PVI; with the
    prior split, each silo holds the power ``1 / M`` of it. One round is all there is.

    Parameters
    ----------
    split : bool
        Whether the prior is split over the silos.
    model, **settings
        As for :class:`PVI`: ``local``, ``family``, ...

    References
    ----------
    Tresp (2000), Neural Computation 12.

    Examples
    --------
    >>> import numpyro_fed as nf
    >>> nf.BCM(lambda y: None, split=True).prior_share
    'split'
    """
    once: dict[str, Any] = {
        "schedule": "synchronous",
        "damping": 1.0,
        "deletion": "prior",
        "max_rounds": 1,
    }
    return PVI(model, prior_share="split" if split else "whole", **once, **settings)


def VCL(model: Callable[..., Any], *, schedule: str | Spec = "sequential", **settings: Any) -> PVI:
    """Return variational continual learning: one pass, each silo's prior the posterior before it.

    No silo keeps a factor, so that no silo can be visited again.

    Parameters
    ----------
    schedule : "sequential" or schedules.Sequential
        A schedule that visits each silo once.
    model, **settings
        As for :class:`PVI`: ``local``, ``family``, ...

    References
    ----------
    Nguyen, Li, Bui and Turner (2018), arXiv 1710.10628.

    Examples
    --------
    >>> import numpyro_fed as nf
    >>> nf.VCL(lambda y: None).max_rounds
    1
    """
    spec = named(schedule)
    order = spec.order if isinstance(spec, Sequential) else None
    if order is None or (not isinstance(order, str) and len(set(order)) < len(order)):
        raise ValueError(
            f"schedule={schedule!r}: VCL comes to one silo after the other, and to each once. Use "
            "'sequential', or schedules.Sequential with an order that names each silo once."
        )
    return PVI(model, schedule=schedule, damping=1.0, deletion="none", max_rounds=1, **settings)


def StreamingVB(
    model: Callable[..., Any], *, schedule: str | Spec = "sequential", **settings: Any
) -> PVI:
    """Return streaming variational Bayes: nothing is taken out of the posterior before a visit.

    The first pass is :func:`VCL`'s; every further pass counts the data once more, so that the
    posterior ends too narrow. It is here to compare with.

    Parameters
    ----------
    schedule : str or one of numpyro_fed.schedules
    model, **settings
        As for :class:`PVI`: ``local``, ``family``, ``damping``, ...

    References
    ----------
    Broderick, Boyd, Wibisono, Wilson and Jordan (2013), arXiv 1307.6769.

    Examples
    --------
    >>> import numpyro_fed as nf
    >>> nf.StreamingVB(lambda y: None).deletion
    'none'
    """
    return PVI(model, schedule=schedule, deletion="none", **settings)


def PowerEP(model: Callable[..., Any], *, alpha: float | None = None, **settings: Any) -> PVI:
    """Return power expectation propagation (Algorithm 2): moments of the tilted distribution match.

    Its limit for ``alpha`` to 0 is PVI; ``alpha`` 1 is expectation propagation.

    Parameters
    ----------
    alpha : float, optional
        In (0, 1]; 0.5 by default.
    model, **settings
        As for :class:`PVI`; ``local=local.PowerEP(...)`` sets more than ``alpha``.

    References
    ----------
    Minka (2004), Microsoft Research technical report 149.

    Examples
    --------
    >>> import numpyro_fed as nf
    >>> nf.PowerEP(lambda y: None, alpha=0.2).local.alpha
    0.2
    """
    chosen = _with_alpha(alpha, local.PowerEP, settings)
    return PVI(model, **{"start_scale": None, **chosen})


def AlphaEP(model: Callable[..., Any], *, alpha: float | None = None, **settings: Any) -> PVI:
    """Return EP by alpha-divergences (Algorithm 3): ``q`` closest to the tilted distribution.

    Unlike :func:`PowerEP` it minimises the divergence itself, by stochastic gradients.

    Parameters
    ----------
    alpha : float, optional
        In [0, 1), 0.5 by default; 0 is PVI.
    model, **settings
        As for :class:`PVI`; ``local=local.Optax(alpha=..., ...)`` sets more than ``alpha``.

    References
    ----------
    Minka (2005), Microsoft Research technical report 173.

    Examples
    --------
    >>> import numpyro_fed as nf
    >>> nf.AlphaEP(lambda y: None, alpha=0.2).local.alpha
    0.2
    """
    # Thirty-two draws: the alpha-divergence is a log of
    # an average over draws, biased with few of them.
    return PVI(model, **_with_alpha(alpha, partial(local.Optax, num_particles=32), settings))


def StochasticPowerEP(
    model: Callable[..., Any], *, alpha: float | None = None, **settings: Any
) -> PVI:
    """Return stochastic power EP (Algorithm 4): all silos share one average factor.

    With one natural-gradient step and ``alpha`` to 0 it is global variational inference on
    minibatches, one silo at a time (Proposition 4.1).

    Parameters
    ----------
    alpha : float, optional
        In (0, 1]; 0.5 by default.
    model, **settings
        As for :class:`PVI`: ``schedule``, ``local``, ...

    References
    ----------
    Li, Hernandez-Lobato and Turner (2015), arXiv 1506.04132.

    Examples
    --------
    >>> import numpyro_fed as nf
    >>> nf.StochasticPowerEP(lambda y: None).deletion
    'average'
    """
    chosen = _with_alpha(alpha, local.PowerEP, settings)
    return PVI(model, deletion="average", **{"start_scale": None, **chosen})


def _with_alpha(
    alpha: float | None, optimiser: Callable[..., Local], settings: dict[str, Any]
) -> dict[str, Any]:
    """Return the settings with a local optimiser of this alpha, unless they have one."""
    if "local" not in settings:
        return {"local": optimiser(alpha=0.5 if alpha is None else alpha), **settings}
    if alpha is not None:
        raise ValueError(f"alpha={alpha} and local={settings['local']}: pass one of them.")
    return settings


def FedGVI(
    model: Callable[..., Any],
    *,
    loss: Callable[..., Any] | None = None,
    divergence: Divergence | None = None,
    prior_divergence: Divergence | None = None,
    **settings: Any,
) -> PVI:
    r"""Return federated generalised variational inference: any loss, any divergences.

    Each silo minimises, and the server aggregates under a divergence to the prior,

    .. math::
        q_m = \arg\min_q \mathbb{E}_q\Big[\sum_i \ell(y_i, z_G)\Big]
        + D(q \,\|\, q_{\setminus m}), \qquad
        q = \arg\min_q -\mathbb{E}_q\Big[\Big\langle \sum_m \lambda_m, T(z_G)\Big\rangle\Big]
        + D_0(q \,\|\, p).

    The cavity is found from the sum of the other silos' coefficients in the same way as the
    server's posterior. With KL and the log loss this is :class:`PVI`.

    Parameters
    ----------
    loss : callable, optional
        ``loss(distribution, value)`` at each observed site, one of those in
        :mod:`numpyro_fed.numerics.losses` or your own; by default minus the log density. Robust
        losses bound what one row can do.
    divergence, prior_divergence : callable, optional
        The divergences to the cavity and to the prior: KL by default, one of
        :mod:`numpyro_fed.numerics.divergences`, or your
        own ``(family, eta_q, eta_p) -> ()``. A silo's new coefficients are the gradient of its
        divergence with respect to the mean parameters, which for KL is ``eta_q - eta_cavity``.
    model, **settings
        As for :class:`PVI`: ``schedule``, ``damping``, ``local``, ...

    References
    ----------
    Mildner, Hamelijnck, Giampouras and Damoulas (2025), arXiv 2502.00846. Patel and Damoulas
    (2024), "Variational Cavity Learning for Fed-GVI", sections 2.1 and 2.2.

    Examples
    --------
    >>> import numpyro_fed as nf
    >>> robust = nf.FedGVI(lambda y: None, loss=nf.losses.generalised_cross_entropy(0.5))
    >>> robust.schedule
    'sequential'
    """
    return PVI(
        model,
        loss=loss,
        divergence=divergence or KL(),
        prior_divergence=prior_divergence or KL(),
        **settings,
    )
