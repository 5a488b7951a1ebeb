"""Vertical federated learning: the method ``VFL``, its settings and its start."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import dataclass, field, replace
from typing import Any, cast

import jax.numpy as jnp
import optax
from numpyro.infer.autoguide import AutoGuide

from numpyro_fed.basics.errors import GuideError, StartWarning, positive_int
from numpyro_fed.data.silo_data import SiloData, signature
from numpyro_fed.guides.local_guides import Amortised
from numpyro_fed.guides.structured import Spec, Structured, resolve_guide
from numpyro_fed.posterior.built import Built
from numpyro_fed.rounds.exchange import ExchangeId, FederatedAlgorithm, Round
from numpyro_fed.rounds.names import IMPORTANCE
from numpyro_fed.search.mode_search import SEARCHED_UP_TO
from numpyro_fed.sfvi.method import default_optimiser
from numpyro_fed.text.clients import positive_rho
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.vertical import (
    VerticalModel,
    VerticalSplit,
    check_batches,
    hyperparameter_mask,
)
from numpyro_fed.vertical.algorithm import PowerVFL, VFLAlgorithm
from numpyro_fed.vertical.correction import WeighParties
from numpyro_fed.vertical.guides import AuxiliaryGuide
from numpyro_fed.vertical.method import VerticalMethod
from numpyro_fed.vertical.parties import PartyType
from numpyro_fed.vertical.result import VerticalResult

# Rows up to which each auxiliary variable has a normal of its own by default. Above, an amortised
# guide has fewer parameters, but its messages tell more of the columns (docs/results/vertical.md).
MEAN_FIELD_UP_TO = 10_000
# Numbers in the Jacobian of a client's predictor, at most: 256 MB in single precision.
MAX_JACOBIAN = 2**26
# Rank of the noise that parties share by default, at most. Each direction is one more column in all
# parties' messages and guides; with fewer the parties' dependence is cut off.
MAX_RANK = 32
HIDDEN = 16  # units of an amortised guide: its network reads one or two numbers of a row
SPARE = 5  # columns of a basis beyond all directions: square random ones may be nearly singular


@dataclass(frozen=True)
class VFL(VerticalMethod[VerticalResult]):
    r"""Structured federated variational inference for vertical models.

    Each client holds some columns of every row and the parameters that belong to them; the server
    holds the response and all that is outside of the :func:`~numpyro_fed.client_sum`. One model
    text has three versions:

    - ``rho=None``, the exact split: clients send their predictors :math:`g_j`, summed up, and the
      server returns the gradient of the log likelihood with respect to the sum. The posterior is
      that of the model as it is written.
    - ``rho``, the augmented model: clients send :math:`z_j \sim N(g_j, \rho^2)` in the place of
      :math:`g_j`; the posterior is that of :func:`~numpyro_fed.handlers.augment`.
    - ``rho`` and ``likelihood="power"``: the posterior is that of
      :func:`~numpyro_fed.handlers.power_likelihood`; clients must know the response.

    Parameters
    ----------
    model : callable
        A NumPyro model with one :func:`~numpyro_fed.client_sum`.
    rho : float, optional
        Standard deviation of the auxiliary variables, in the units of the predictor.
    likelihood : {"augmented", "power"}
    optim : optax.GradientTransformation, optional
        The optimiser of every party, each with its own state. By default Adam whose step decays
        from 0.03. A run
        that starts at the mode takes steps in coordinates in which each party's posterior is about
        standard: choose them for that, whatever the units of the columns.
    guide, server_guide : Structured or AutoGuide, optional
        The guides of each client's latents and of the server's; only their part for globals is
        used.
    auxiliary : {"auto", "mean_field", "amortised"} or Amortised
        The guide of the auxiliary variables: one normal for each, or a function of the predictor
        whose size does not grow with rows. ``"auto"`` is amortised with minibatches and above
        10,000 rows.
    share_response : bool
        Whether clients know the response and the rest of the server's data.
    num_particles : int
        Draws in each round.
    batch_size : int, optional
        Rows in a round, drawn anew each time, the same at every party; all rows by default.
    local_steps : int
        Steps of each client in a round. All but the first keep the auxiliary variables fixed
        (section 5.3), which leaves the optimum as it is for the augmented model with a mean-field
        guide of these variables; elsewhere one step is allowed.
    start : {"auto", "mode", "own", None}
        ``"mode"``: some 10 to 60 exchanges, more where it is hard, find the mode of all parties'
        latents, in which clients send predictors and the server slopes and curvatures of the
        likelihood; each party's guide begins there with its own curvature. Latents on which the
        priors of others depend, such as a scale, are held at the median of their prior, and begin
        there, in unconstrained space with the prior's sd, one at most. It is not possible with a
        ``numpyro.param``, above 300 latents of a party, or if a predictor's Jacobian would have
        more than 67 million numbers. ``"own"``, with ``rho``: the server begins at the mode of its
        latents for a sum of zero. Clients begin at zero in unconstrained space, each with the
        curvature that follows from ``rho`` and its own columns; nothing is sent for it. ``None``:
        at zero. ``"auto"`` is ``"mode"`` for the exact split, and ``"own"`` with ``rho``, since the
        search sends predictors without noise.
    rank : int or "auto"
        The rank of the noise that all parties share, which makes their posteriors dependent:
        ``numpyro_fed.vertical.guides``. With 0 parties are independent under the guide. A run
        from the mode begins with the ``rank`` directions of all latents in which parties compensate
        for each other most. ``"auto"`` is up to 32 for the exact split from the mode, and 0
        elsewhere: under a mean-field guide of auxiliary variables parties are independent given
        these.

    References
    ----------
    Hassan, Sutton, Mira, Mengersen (2024), arXiv 2405.04043, Algorithms 1 and 2. The exact split is
    this package's own.

    Examples
    --------
    >>> import jax, numpy as np, numpyro, numpyro.distributions as dist, optax
    >>> import numpyro_fed as nf
    >>> def predictor(x):
    ...     beta = numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[-1]]).to_event(1))
    ...     return x @ beta
    >>> def model(xs, y=None):
    ...     eta = nf.client_sum("client", predictor, xs)
    ...     with numpyro.plate("row", eta.shape[0]):
    ...         numpyro.sample("y", dist.Normal(eta, 1), obs=y)
    >>> rng = np.random.default_rng(0)
    >>> xs = [rng.normal(size=(200, 1)), rng.normal(size=(200, 2))]
    >>> y = 2 * xs[0][:, 0] + rng.normal(size=200)
    >>> vfl = nf.VFL(model, optim=optax.adam(0.05))
    >>> result = vfl.run(jax.random.key(0), 500, xs, y, progress_bar=False)
    >>> draws = result.sample_posterior(jax.random.key(1), 1_000)
    >>> bool(abs(draws["client_0/beta"].mean() - 2) < 0.2), draws["client_1/beta"].shape
    (True, (1000, 2))
    """

    optim: optax.GradientTransformation | None = field(default=None, kw_only=True)
    guide: Structured | AutoGuide | None = field(default=None, kw_only=True)
    server_guide: Structured | AutoGuide | None = field(default=None, kw_only=True)
    auxiliary: str | Amortised = field(default="auto", kw_only=True)
    num_particles: int = field(default=1, kw_only=True)
    batch_size: int | None = field(default=None, kw_only=True)
    local_steps: int = field(default=1, kw_only=True)
    start: str | None = field(default="auto", kw_only=True)
    rank: int | str = field(default="auto", kw_only=True)

    def __post_init__(self) -> None:
        positive_int("num_particles", self.num_particles)
        positive_int("local_steps", self.local_steps)
        if self.batch_size is not None:
            positive_int("batch_size", self.batch_size)
        if self.rho is not None:
            positive_rho(self.rho)
        if self.start not in ("auto", "mode", "own", None):
            raise ValueError(f"start={self.start!r}: expected 'auto', 'mode', 'own' or None.")
        if self.start == "own" and self.rho is None:
            raise ValueError(
                "start='own' is of clients with auxiliary variables, whose curvature rho gives: "
                "say start='mode', or give rho."
            )
        if self.rank not in ("auto", 0):
            positive_int("rank", self.rank)
        if self.rank not in ("auto", 0) and (self.likelihood == "power" or self.local_steps > 1):
            raise ValueError(
                "noise that all parties share (rank) goes with the exact split and the augmented "
                "model, and one step of a client in a round: say rank=0."
            )
        if self.rho is None and (self.likelihood == "power" or self.local_steps > 1):
            raise ValueError(
                "the power likelihood and further local steps need auxiliary variables: give rho, "
                "their standard deviation in the units of the predictor."
            )
        if self.local_steps > 1 and (
            self.likelihood == "power" or self.auxiliary not in ("auto", "mean_field")
        ):
            raise ValueError(
                "further local steps hold auxiliary variables where they are, which leads to the "
                "same optimum under the augmented model and auxiliary='mean_field' alone: use "
                "these, or local_steps=1."
            )
        super().__post_init__()

    def assemble(self, parts: VerticalSplit) -> Built:
        model = parts.model
        if self.batch_size is not None:
            check_batches(parts, self.batch_size)

        def party_type(spec: Spec | None, party: FederatedModel, data: SiloData) -> PartyType:
            config = resolve_guide(spec, party, {}, {})
            return PartyType(party, spec, config, hyperparameter_mask(party, data))

        pairs = zip(model.clients, parts.clients, strict=True)
        start, at_zero = self._start(parts), jnp.zeros(model.shape, model.dtype)
        # Numbers of the response for each row, which clients that know it give to their guides.
        of_response = [int(parts.server.arrays[n].size / model.rows) for n in model.response]
        auxiliary, asked_for = self._auxiliary(
            model, sum(of_response) if self.share_response else 0
        )
        algorithm_class = PowerVFL if self.likelihood == "power" else VFLAlgorithm
        v = algorithm_class(
            model=model,
            server=party_type(
                self.server_guide, model.server, model.with_total(parts.server, at_zero)
            ),
            # Clients of equal shapes share one program, and one guide up to its parameters.
            client_types={
                signature(data): party_type(self.guide, party, data) for party, data in pairs
            },
            rho=self.rho,
            auxiliary=auxiliary,
            optim=self.optim or default_optimiser(),
            num_particles=self.num_particles,
            batch_size=self.batch_size,
            from_start=start is not None,
            local_steps=self.local_steps,
        )
        v = replace(v, rank=self._rank(v, start))
        if start == "mode":
            # A basis for all directions or of twice the rank.
            max_width = max(MAX_JACOBIAN // math.prod(model.shape), 1)
            width = min(v.dim + SPARE, 2 * max(v.rank, MAX_RANK), max_width)
            v = replace(v, rank=min(v.rank, width), basis_width=width)
        names = "rho", "likelihood", "num_particles", "batch_size", "local_steps"
        settings = {
            **{name: getattr(self, name) for name in names},
            "auxiliary": asked_for,
            "from_start": v.from_start,
            "rank": v.rank,
            "guides": json.loads(json.dumps([party.guide_config for party in v.all_types])),
        }
        return self.built(parts, v, v.server.guide_at(None), settings)

    def round_of(
        self, built: Built, asked: ExchangeId
    ) -> tuple[Round, FederatedAlgorithm[Any, Any]]:
        if asked.name != IMPORTANCE:
            return super().round_of(built, asked)
        weighing = WeighParties(cast(VFLAlgorithm, built.parties), **asked.read_settings())
        return Round((weighing.exchange,)), built.algorithm

    def sends_unhidden(self, name: str) -> bool:
        """Return whether an exchange is the correction, which sends predictors without noise."""
        return self.hides_by_noise and name == IMPORTANCE

    def _rank(self, v: VFLAlgorithm, start: str | None) -> int:
        """Return the resolved rank of the noise that all parties share."""
        # With latents at one party alone there is nothing to share.
        has_several = sum(party.dim > 0 for party in v.model.parties) > 1
        can_share = all(party.guide.has_standard_noise for party in v.all_types)
        if self.rank == "auto":
            shares = can_share and has_several and start == "mode" and v.rho is None
            return min(v.dim - 1, MAX_RANK) if shares else 0
        if self.rank and not can_share:
            raise GuideError(
                f"rank={self.rank}: noise can be shared by guides that draw each latent from one "
                "standard normal, the structured guide's diagonal, full and skewed covariances. "
                "Use one of these for all parties, or rank=0."
            )
        return min(int(self.rank), v.dim - 1) if has_several else 0

    def _start(self, parts: VerticalSplit) -> str | None:
        """Return the resolved ``start``: the first one that is possible for the model."""
        model, without_mode = parts.model, None if self.rho is None else "own"
        start = self.start
        if start == "auto":
            start = without_mode or "mode"
        # A search for the mode is not possible with parameters without a prior.
        if start == "mode" and any(party.named("param") for party in model.parties):
            start = without_mode
        # Each party's curvature can be computed of some latents, and not of too many.
        largest = max(party.dim for party in model.parties)
        if not 0 < largest <= SEARCHED_UP_TO or largest * math.prod(model.shape) > MAX_JACOBIAN:
            start = None
        if self.start in ("mode", "own") and start != self.start:
            warnings.warn(
                f"start={self.start!r} is not possible for this model (see numpyro_fed.VFL): the "
                f"run begins as with start={start!r}.",
                category=StartWarning,
                stacklevel=6,
            )
        return start

    def _auxiliary(
        self, model: VerticalModel, num_responses: int
    ) -> tuple[AuxiliaryGuide | None, str | None]:
        """Return the guide of auxiliary variables, and how settings name it; None without them."""
        if self.rho is None:
            return None, None
        spec = self.auxiliary
        if spec == "auto":
            many_rows = self.batch_size is not None or model.rows > MEAN_FIELD_UP_TO
            spec = "amortised" if many_rows and self.local_steps == 1 else "mean_field"
        name = repr(spec)
        if spec == "mean_field":
            return AuxiliaryGuide(model.shape, self.rho), name
        if spec == "amortised":
            spec = Amortised()
        if not isinstance(spec, Amortised):
            raise GuideError(
                f"auxiliary={spec!r}: expected 'auto', 'mean_field', 'amortised' or "
                "numpyro_fed.guides.Amortised(...)."
            )
        if spec.encoder is not None:
            raise GuideError(
                "guides.Amortised(encoder=...) is for latents of rows: auxiliary variables have a "
                "network of their own, of which hidden= says the size."
            )
        return AuxiliaryGuide(model.shape, self.rho, spec.hidden or HIDDEN, num_responses), name
