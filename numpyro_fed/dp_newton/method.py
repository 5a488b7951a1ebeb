"""Newton's method with noise: the method ``DPNewton``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax import Array

from numpyro_fed.basics.errors import CoupledRowsError, GuideError, ModelError, SavedStateError
from numpyro_fed.data.silo_data import SiloData, SilosInput
from numpyro_fed.dp_newton.algorithm import NEAR, PrivateNewton
from numpyro_fed.dp_newton.units import PrivateUnits, Releases
from numpyro_fed.guides.objectives import ELBO, default_quadrature
from numpyro_fed.guides.quadrature import default_nodes, quadrature_misfit
from numpyro_fed.guides.structured import GuideConfig, Structured, build_guide, resolve_guide
from numpyro_fed.methods.method import PlanSize, RunOptions
from numpyro_fed.methods.party_side import check_rows_alone
from numpyro_fed.methods.row_method import RowMethod
from numpyro_fed.methods.start import Begun
from numpyro_fed.posterior.built import Built, CompiledMethod
from numpyro_fed.posterior.result import Result
from numpyro_fed.privacy.budget import Privacy, Spent, noisy
from numpyro_fed.rounds.exchange import AnyAlgorithm, Exchange, ExchangeId, Round, Up
from numpyro_fed.rounds.federation import Federation
from numpyro_fed.rounds.names import PRIVATE_SUMS
from numpyro_fed.rounds.runtime import Log, RunOutcome, RunStatus, State
from numpyro_fed.rounds.silos import Batches, ServerData, Silos
from numpyro_fed.rounds.step import Conversation
from numpyro_fed.search.influence import Factors
from numpyro_fed.text.layout import Layout
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.plan import Plan

# Numbers of a row's latents that quadrature takes, and globals of which a matrix is sent.
GLOBALS_UP_TO = 300
ALL_ROUNDS = 2**31 - 1  # rounds, of a run of all that are left

GUIDE = Structured(globals="full")

NOT_PROTECTED = (
    "this would ask silos for numbers without noise, which the privacy of the fit does not cover. "
    "Fit without privacy= to ask for it."
)


@dataclass(frozen=True, eq=False)
class PrivateResult(Result):
    """A posterior that counts the noise which protects the rows, and what was spent for it.

    Its silos answer nothing but the exchanges of the run.

    Attributes
    ----------
    privacy : Spent
        The epsilon that was spent; prints the assumptions.
    undetermined : int
        Directions of the globals whose curvature could not be told from noise. There the posterior
        rests on the prior, and on columns taken as uncorrelated.
    """

    privacy: Spent = field(kw_only=True)

    @property
    def trusted(self) -> bool:
        """Whether nothing speaks against the posterior, which no exchange has checked."""
        return self.settled

    @property
    def undetermined(self) -> int:
        """Return the number of directions whose curvature could not be told from noise."""
        return int(self.state.server.undetermined)

    @property
    def coarse(self) -> bool:
        """Return whether noise hides how long units' gradients are, so that clips are a guess."""
        return bool(self.state.server.coarse)

    @property
    def num_exchanges(self) -> int:
        """Return the number of exchanges: that of the first units, and those of all rounds."""
        rounds = int(np.sum(self.state.server.made))
        return 1 + rounds * len(self._fit.built.algorithm.round.exchanges)

    @property
    def moved(self) -> float:
        """Return how long the last step wanted to be, in sds with its noise; -1 for no number."""
        return float(self.state.server.moved)

    @property
    def doubt(self) -> str:
        """Return in words why not to rely on the posterior; empty for one that is sound."""
        if self.undetermined:
            return (
                f"in {self.undetermined} of {self.num_globals} directions the data could not be "
                "told from noise, and it rests on the prior there"
            )
        if self.coarse:
            return (
                "noise hides how long the units' gradients are, so that clipping may have moved it"
            )
        # The posterior counts the last noise, and not that a search is still on its way.
        if self.moved < 0:
            return "its last step led to where nothing is finite, and was not taken"
        if not self.moved <= NEAR:
            return f"its last step was {self.moved:.2g} sd long, so that the search had not ended"
        return ""

    @property
    def settled(self) -> bool:
        """Return whether nothing speaks against the posterior."""
        return not self.doubt

    @property
    def verdict_in_words(self) -> str:
        """Return in words whether to trust the posterior."""
        budget = self.privacy.budget
        spent = f"epsilon {budget.epsilon:.3g} at delta {budget.delta:g}"
        if self.settled:
            return (
                f"Nothing speaks against this posterior, which counts the noise of its privacy "
                f"({spent}); its last step was {self.moved:.2g} sd long. It is a normal "
                "approximation, which no exchange has checked."
            )
        return (
            f"Do not rely on this posterior: {self.doubt} ({spent}). More rows, a larger epsilon, "
            "or fewer globals would help."
        )

    @property
    def correction(self) -> str:
        """Return the reason why there is no importance correction."""
        return NOT_PROTECTED

    def factors_at(self, z_G: np.ndarray) -> Factors:
        """Raise an error: silos' parabolas would be told without noise."""
        raise ModelError(NOT_PROTECTED)

    def _account(self) -> str:
        return super()._account() if self.stages else str(self.privacy)


@dataclass(frozen=True)
class NewtonSettings:
    """The settings of a private run, as its plan has them."""

    guide: GuideConfig
    privacy: str
    multipliers: tuple[float, ...]  # of the noise of all releases
    units: int


@dataclass(frozen=True)
class DPNewton(RowMethod[PrivateResult, None]):
    r"""Newton's method under differential privacy: a posterior from some noisy sums.

    Silos send sums of clipped gradients and curvatures of their rows, with Gaussian noise
    (``dp_newton/algorithm.py`` has the equations). The posterior is a normal
    approximation whose covariance counts that noise. :func:`numpyro_fed.fit` with ``privacy=``
    runs it. Nothing has to be scaled: the units of the frame and clipping lengths are found within
    the budget.

    Parameters
    ----------
    model : callable
        A NumPyro model with :class:`~numpyro_fed.silo_plate`, whose rows stand alone.
    privacy : Privacy

    References
    ----------
    Ganesh et al. (2023) have Newton steps under differential privacy for logistic regression;
    Bernstein and Sheldon (2019) posteriors that count the noise, for linear regression.

    Examples
    --------
    >>> import jax, numpy as np, numpyro, numpyro.distributions as dist, numpyro_fed as nf
    >>> def model(y):
    ...     mu = numpyro.sample("mu", dist.Normal(0, 100))
    ...     with nf.silo_plate("row", y.shape[0]):
    ...         numpyro.sample("y", dist.Normal(mu, 5), obs=y)
    >>> rng = np.random.default_rng(0)
    >>> silos = [dict(y=rng.normal(30, 5, n)) for n in (2_000, 3_000)]
    >>> method = nf.DPNewton(model, privacy=nf.Privacy(epsilon=1.0, delta=1e-5))
    >>> result = method.run(jax.random.key(0), silos=silos, progress_bar=False)
    >>> mu = result.sample_posterior(jax.random.key(1), 4_000)["mu"]
    >>> bool(abs(mu.mean() - 30) < 1), bool(mu.std() > 5 / 5_000**0.5)
    (True, True)
    >>> result.privacy.epsilon <= 1
    True
    """

    privacy: Privacy = field(kw_only=True)

    def run(
        self,
        key: Array,
        num_rounds: int | None = None,
        silos: SilosInput | Federation = (),
        **options: Any,
    ) -> PrivateResult:
        """Fit the model; see :meth:`SFVI.run`.

        A round is a phase of two steps (three for more than 20 globals), and ``num_rounds`` by
        default as many as there are to come. A run of fewer spends less, and its posterior is
        wider; ``init_state`` goes on with the rest. A search that ends early leaves its phases
        out. Two runs with the same key differ: noise comes from the operating system.
        """
        check_trusted(self.privacy, silos)
        if options.get("stop") is not None:
            raise ModelError(f"stop={options['stop']!r}: a private search ends by itself.")
        return super().run(key, ALL_ROUNDS if num_rounds is None else num_rounds, silos, **options)

    def _check_rounds(self, compiled: CompiledMethod, state: State, num_rounds: int) -> None:
        schedule = self._schedule(compiled.model, compiled.plan)
        found = float(state.server.multiplier)
        if not math.isclose(found, schedule.units, rel_tol=1e-5):
            raise SavedStateError(
                "init_state comes from a run with another budget, whose noise is other than this "
                "one's. Go on with the same privacy=."
            )
        planned = len(schedule.phases)
        left = planned - max(int(state.server.phase), 0)
        if ALL_ROUNDS > num_rounds > left:
            raise ModelError(
                f"the budget is planned for {planned} rounds, of which {left} are left: "
                f"{num_rounds} more would spend more than epsilon={self.privacy.epsilon:g}."
            )

    def _run_rounds(
        self, begun: Begun, hosted: Silos, key: Array, options: RunOptions[PrivateResult]
    ) -> PrivateResult:
        """Make phases; what drives the rounds of a compiled program drives these, one at a time."""
        fit = begun.compiled
        newton = fit.cached("newton", lambda: self._newton(fit.model, fit.plan))
        transport, number = fit.runtime.transport(hosted.batches), fit.plan.num_silos

        def advance(
            key: Array,
            state: State,
            batches: Batches,
            n: int,
            server_data: ServerData = None,
            stop: bool = False,
        ) -> tuple[State, Log, RunStatus]:
            good, server = np.ones(number, bool), state.server
            if not n or server.phase == len(newton.schedule.phases):
                return state, Log(np.zeros(0)), RunStatus(True, good)
            silos = Conversation(
                transport, jax.random.fold_in(key, state.round), number, state.silos
            )

            def ask(exchange: Exchange[Any, Any, Up], down: object) -> Up:
                up = silos(exchange, down)
                good[list(silos.unusable)] = False
                return up

            after = newton.phase(ask, server)
            loss = np.array([0.5 * len(after.z) * after.moved**2])
            state = State(state.round + 1, after, silos.silos, state.schedule)
            return state, Log(loss), RunStatus(good.all(), good)

        fit = replace(fit, runtime=fit.runtime._replace(advance=advance, chunk=1))
        result = super()._run_rounds(replace(begun, compiled=fit), hosted, key, options)
        # A search that has ended has no other end than that of its rounds.
        return replace(result, ended="rounds") if result.ended == "converged" else result

    def _newton(self, fm: FederatedModel, plan: Plan) -> PrivateNewton:
        """Return the parts of the method, which every party builds from the plan."""
        privacy, per_silo = self.privacy, self.privacy.unit == "silo"
        rows, num_units = self._sizes(fm, plan)
        units = PrivateUnits(
            model=fm,
            num_silos=plan.num_silos,
            per_silo=per_silo,
            noise=noisy,
            noise_share=privacy.noise_share(plan.num_silos),
            changes=privacy.changes,
            nodes=default_nodes(fm),
        )
        return PrivateNewton(
            units=units,
            schedule=self._schedule(fm, plan),
            num_units=num_units,
            clip=privacy.clip,
            rows_in_unit=rows / plan.num_silos if per_silo else 1.0,
        )

    def _sizes(self, fm: FederatedModel, plan: Plan) -> tuple[int, int]:
        """Return the number of rows of all silos, as the plan knows it, and that of units."""
        total = dict(plan.total)
        rows = sum(total[p.name] for p in fm.plates if not p.outer)
        return rows, plan.num_silos if self.privacy.unit == "silo" else rows

    def _schedule(self, fm: FederatedModel, plan: Plan) -> Releases:
        """Return the phases that are planned."""
        return Releases.of(self.privacy, fm.dim, self._sizes(fm, plan)[1], plan.num_silos)

    def prepare(self, fm: FederatedModel) -> None:
        """Raise an error for a model whose units' terms cannot be clipped one by one."""
        if params := [s for s in fm.sites if s.kind == "param"]:
            raise ModelError(
                f"numpyro.param '{params[0].name}' has no posterior, and steps towards it are not "
                "covered by the privacy. Give it a prior (numpyro.sample)."
            )
        if not 0 < fm.dim <= GLOBALS_UP_TO:
            raise ModelError(
                f"the model has {fm.dim} globals: {PRIVATE_SUMS} are of 1 to {GLOBALS_UP_TO} of "
                "them, since a matrix of them is sent."
            )
        if fm.improper:
            raise ModelError(
                f"the prior of '{fm.improper[0]}' is flat or masked. Where noise hides what the "
                "data say there would be no posterior: give it a proper prior, however wide."
            )
        outer = [p.name for p in fm.plates if p.outer]
        if self.privacy.unit == "row" and outer:
            raise ModelError(
                f"the latents of silo_plate '{outer[0]}' are shared by rows, so that no bound "
                "holds for a single row. Protect silos as a whole (Privacy(unit='silo')), which "
                "needs many of them, or make the effects global sites, one for each silo."
            )
        if any(p.dim for p in fm.plates) and (misfit := quadrature_misfit(fm)) is not None:
            raise ModelError(
                f"rows' latents cannot be integrated within a row's own term: {misfit}"
            )

    def round_of(self, built: Built, asked: ExchangeId) -> tuple[Round, AnyAlgorithm]:
        """Return the round that declares an exchange; there are none but those with noise."""
        return built.round_of(asked.name)

    def size_of(self, plan: Plan, built: Built, data: SiloData) -> PlanSize:
        """Return how large a plan is, and what a run of it may spend."""
        privacy = self.privacy
        return (
            super()
            .size_of(plan, built, data)
            ._replace(
                delta=privacy.delta,
                multiplier=privacy.multipliers([1.0])[0],
                protects=f"{privacy.unit} {privacy.neighbours}",
                shares_noise=privacy.trusted == "sum",
            )
        )

    def value_checks(
        self, layout: Layout, prepared: None, stacks: Sequence[SiloData]
    ) -> tuple[tuple[str, bool], ...]:
        """Return no checks; refuse rows that depend on other rows."""
        if self.privacy.unit == "row":
            try:
                check_rows_alone(layout, 1, stacks)
            except GuideError as error:
                raise CoupledRowsError(
                    "rows read each other's data, so that no bound holds for a single row: what a "
                    "row changes is not its own term alone. Compute what sums up rows before the "
                    "run, from data that may be known, or protect silos as a whole "
                    "(Privacy(unit='silo'))."
                ) from error
        return ()

    def settings_for(self, fm: FederatedModel, plan: Plan) -> NewtonSettings:
        (_, units), delta, unit = self._sizes(fm, plan), self.privacy.delta, self.privacy.unit
        if delta >= 1 / units:
            raise ValueError(
                f"delta={delta}: expected less than 1/{units}, one over the number of {unit}s, "
                f"since publishing a {unit} whole has a delta of that size."
            )
        return NewtonSettings(
            guide=resolve_guide(GUIDE, fm, dict(plan.largest), dict(plan.total), at_mode=True),
            privacy=repr(self.privacy),
            multipliers=tuple(s for _, s in self._schedule(fm, plan).releases()),
            units=units,
        )

    def assemble(self, fm: FederatedModel, plan: Plan, prepared: None) -> Built:
        return Built(
            model=fm,
            guide=build_guide(GUIDE, self.settings_for(fm, plan).guide, fm),
            objective=default_quadrature(fm) or ELBO(),
            algorithm=self._newton(fm, plan).algorithm,
            protected=NOT_PROTECTED,
        )

    def result_of(
        self, run: RunOutcome, compiled: CompiledMethod, hosted: Silos, *, quiet: bool = False
    ) -> PrivateResult:
        server, ended = run.state.server, run.ended
        made = np.array(server.made)
        if ended in ("failure", "interrupted"):
            # Some silos may have answered in the phase that is lost: it is not asked for again.
            lost = max(int(server.phase), 0)
            made[lost:][:1] = True
            server = server._replace(phase=np.int32(min(lost + 1, len(made))), made=made)
            run = run._replace(state=run.state._replace(server=server))
        schedule = self._schedule(compiled.model, compiled.plan)
        spent = Spent.of(self.privacy, schedule.releases(made.tolist()))
        return PrivateResult(run.losses, run.state, compiled, hosted, privacy=spent)


def check_trusted(privacy: Privacy, silos: object) -> None:
    """Raise an error for shares of the noise that a server would see one by one."""
    if isinstance(silos, Federation) and privacy.trusted == "sum" and not silos.secure_sum:
        raise ModelError(
            "trusted='sum' between processes is for secure sums: without them the server sees "
            "each silo's reply with a share of the noise. Use Federation(..., "
            "secure_sum=True), or Privacy(trusted='silo')."
        )
