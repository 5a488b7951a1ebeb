"""The rules of a silo's owner, and the count of what a silo has told in all its life."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from numpyro_fed.basics.errors import DataError, ModelError, is_number
from numpyro_fed.basics.files import Store, log_privately
from numpyro_fed.data.tables import MIN_COUNT
from numpyro_fed.methods.method import PlanSize
from numpyro_fed.privacy.budget import epsilon_of
from numpyro_fed.rounds.messages import Question
from numpyro_fed.rounds.names import (
    AROUND_MODE,
    IMPORTANCE,
    LEAVE_OUT,
    LOO,
    MODE,
    OUTER_LATENTS,
    OWN_MODES,
    TEMPERED,
)

MAX_EPSILON = 10.0  # of runs with noise, where the owner has set none
LEDGER = "ledger"  # the name under which a silo keeps what has been asked
# A run that may spend the whole budget does so up to the accountant's rounding.
ROUNDED = 1 + 1e-5


@dataclass(frozen=True, kw_only=True)
class Policy:
    r"""The rules by which a silo answers or refuses.

    A silo's replies are functions of its rows at places that the server chooses: log likelihoods,
    gradients and curvatures. None of these rules makes them private; they bound how many there are,
    and of how few rows. A server that chooses its places badly on purpose finds twenty rows by 21
    of them, and an honest ``nf.fit`` asks for 18; or by the log likelihoods at some hundred draws
    (``benchmarks/attack.py``). So a silo's owner must trust the study, and reads in the audit log
    what was asked. The defaults are enough for one study by ``nf.fit`` with 3,000 rounds of SFVI,
    and too few for particles, which get a gradient at each of a thousand places in each exchange.

    Parameters
    ----------
    methods : tuple of str
        The names of methods that may be run, ``"PVI"``, or names of the study. Empty: all.
    exchanges : tuple of str
        The names of exchanges that are answered, ``"levels"`` and ``"moments"`` among them. Empty:
        these two, and all of the methods.
    in_order : bool
        Whether exchanges must come in the order of ``exchanges``: once one is answered, those
        before it are not answered any more, in all the silo's life. With ``exchanges=("own modes",
        "mode", "from the mode", "importance")`` there is one search, and none after the first
        weighing of draws.
    min_silos : int
        The least number of silos in a plan. Of two silos each can take its own part from the sum.
    min_rows : int
        The least number of rows that this silo has; and of a column whose mean and sd are told, the
        least number of rows that have a number, or another number than nearly all rows; for
        ``loo``, of rows with an outcome.
    min_count : int
        The least number of rows of a level whose name is told (:func:`numpyro_fed.levels`). A
        question for rarer ones is refused.
    parameters_per_row : float
        Globals and shared parameters for each row of this silo, at most. The default is that of
        DataSHIELD for generalised linear models (``nfilter.glm``).
    tell_latents : bool
        Whether this silo tells draws of the latents that its rows share, such as a hospital's
        effect (``sample_posterior(silo="all")``). Latents of rows are never told.
    max_places : int
        Places at which this silo sends a gradient or a curvature of its likelihood, in all its
        life: the places of a search, and the steps of rounds.
    max_draws : int
        Draws of the globals at which it sends its log likelihood, or latents, in all its life.
    secure_sum : bool
        Whether replies leave this silo under masks alone, so that the server learns sums over
        silos (``Federation(secure_sum=True)``). Such a sum, too, is over ``min_silos`` at least.
    sums_again : int
        How often a reply is sent under other masks, for a sum over fewer silos, where silos have
        dropped out.
    peers : tuple of str
        The fingerprints of the other silos' keys (:attr:`numpyro_fed.Silo.fingerprint`). Without
        them a server that lies could put keys of its own in the place of theirs, and read replies.
    max_epsilon : float, optional
        The budget of differential privacy that all runs may spend together, in all its life. Where
        it is set, what is told without noise is refused: fits without ``privacy=``, ``levels`` and
        ``moments``. By default they are answered, and runs with noise may spend 10. What runs with
        noise tell is :math:`(\epsilon, \delta)` private with ``max_epsilon`` and ``max_delta``.
        Their noise is Gaussian, and composes exactly, by the library dp-accounting. Of runs that
        protect different units or neighbours each counts as one with half of its noise.
    max_delta : float
        The delta of all runs together, below 1 over the number of rows, and the largest that a plan
        may have.
    audit : str, optional
        A file to which each message is added as a line of JSON: time, exchange, run, names and
        shapes of arrays, the SHA-256 of message and reply, and what is left of the budget.

    Examples
    --------
    >>> import numpyro_fed as nf
    >>> nf.Policy(methods=("PVI",), min_rows=100).min_rows
    100
    """

    methods: tuple[str, ...] = ()
    exchanges: tuple[str, ...] = ()
    in_order: bool = False
    min_silos: int = 2
    min_rows: int = 5
    min_count: int = MIN_COUNT
    parameters_per_row: float = 0.33
    tell_latents: bool = False
    max_places: int = 5_000
    max_draws: int = 200_000
    secure_sum: bool = False
    sums_again: int = 3
    peers: tuple[str, ...] = ()
    max_epsilon: float | None = None
    max_delta: float = 1e-3
    audit: str | None = None

    def __post_init__(self) -> None:
        for f in fields(self):
            name, value = f.name, getattr(self, f.name)
            if isinstance(f.default, bool):
                if not isinstance(value, bool):
                    raise ValueError(f"{name} must be true or false, got {value!r}.")
            elif isinstance(f.default, tuple):
                if isinstance(value, str) or not all(isinstance(v, str) for v in value):
                    raise ValueError(f"{name} must be a sequence of names, got {value!r}.")
            elif (value is None and f.default is None) or name == "audit":
                continue
            elif not is_number(value) or value < 0:
                raise ValueError(f"{name} must be a number of at least 0, got {value!r}.")
        if not self.max_delta < 1:
            raise ValueError(f"max_delta must be below 1, got {self.max_delta!r}.")
        if self.in_order and not self.exchanges:
            raise ValueError("in_order needs exchanges=, a list of names in their order.")

    @classmethod
    def from_toml(cls, path: str | Path) -> Policy:
        """Return the policy in a file of TOML, whose keys are the parameters.

        Raises
        ------
        ValueError
            For a key that is no parameter.
        """
        found = tomllib.loads(Path(path).read_text())
        known = [f.name for f in fields(cls)]
        if unknown := sorted(set(found) - set(known)):
            raise ValueError(f"{path}: unknown key '{unknown[0]}'. Known are {known}.")
        lists = {k: tuple(v) for k, v in found.items() if isinstance(v, list)}
        return cls(**{**found, **lists})

    @property
    def limits(self) -> list[str]:
        """Return the names of limits of a silo's whole life that the owner has set."""
        of_life = "max_places", "max_draws", "max_epsilon", "in_order"
        ours = [f for f in fields(self) if f.name in of_life]
        return [f.name for f in ours if getattr(self, f.name) != f.default]

    @property
    def epsilon(self) -> float:
        """Return the budget of differential privacy of all runs with noise."""
        return MAX_EPSILON if self.max_epsilon is None else self.max_epsilon

    def check_noise(self, multiplier: float, what: str) -> None:
        """Raise an error for what is told without noise, where there is a budget of privacy."""
        if self.max_epsilon is not None and not multiplier:
            raise ModelError(
                f"this silo's policy allows an epsilon of {self.max_epsilon:g} (max_epsilon), and "
                f"{what} without noise, which spends an infinite one. Ask by nf.fit(..., "
                "privacy=nf.Privacy(epsilon, delta)); or its owner leaves max_epsilon out of the "
                "policy."
            )

    def check_sums(self, secure: bool) -> None:
        """Raise an error for a server that asks for plain replies, where masks are wanted."""
        if self.secure_sum and not secure:
            raise ModelError(
                "this silo's policy lets replies leave it under masks alone (secure_sum): the "
                "server must ask by Federation(..., secure_sum=True)."
            )

    def check_plan(self, size: PlanSize) -> None:
        """Raise an error for a plan with too few silos or rows, or too many parameters."""
        if size.num_silos < self.min_silos:
            raise ModelError(
                f"the plan has {size.num_silos} silos, where this silo's policy asks for at least "
                f"{self.min_silos} (min_silos)."
            )
        self._check_rows(size.num_rows)
        if size.num_parameters > self.parameters_per_row * size.num_rows:
            raise ModelError(
                f"the model has {size.num_parameters} globals and shared parameters, more than "
                f"this silo's policy allows for its rows ({self.parameters_per_row:g} for each, "
                "parameters_per_row)."
            )

    def check_levels(self, num_rows: int, min_count: int) -> None:
        """Raise an error for a question that would name levels of too few rows."""
        self._check_rows(num_rows)
        if min_count < self.min_count:
            raise ModelError(
                f"names of levels that {min_count} rows have are asked for, where this silo's "
                f"policy tells those of {self.min_count} rows (min_count). Ask by "
                f"nf.levels(..., min_count={self.min_count})."
            )

    def check_numbers(self, name: str, rows: np.ndarray) -> None:
        """Raise an error for moments of (rows,) or (rows, columns) that would tell a few rows."""
        for column in rows.reshape(len(rows), -1).T:
            seen = column[~np.isnan(column)]
            if 0 < len(seen) < self.min_rows:
                raise ModelError(
                    f"a column of '{name}' has numbers in fewer rows than this silo's policy asks "
                    f"for ({self.min_rows}, min_rows). Leave it out."
                )
            most = np.unique(seen, return_counts=True)[1].max(initial=0)
            # Where all others are the same, a mean and an sd are those of the few that are not.
            if 0 < len(seen) - most < self.min_rows <= most:
                raise ModelError(
                    f"nearly all rows have the same number in a column of '{name}', so that its "
                    f"mean tells of the few that have not, fewer than {self.min_rows} (min_rows "
                    "of this silo's policy). Leave it out."
                )

    def _check_rows(self, num_rows: int) -> None:
        """Raise an error for too few rows."""
        if num_rows < self.min_rows:
            raise ModelError(
                f"this silo has fewer rows than its policy asks for ({self.min_rows}, min_rows)."
            )

    def check_rows_with_outcome(self, num_rows: int) -> None:
        """Raise an error where rows would be left out of too few that have an outcome."""
        if num_rows < self.min_rows:
            raise ModelError(
                "this silo has fewer rows with an outcome, neither missing nor masked, than its "
                f"policy asks for ({self.min_rows}, min_rows), so that none of them is left out "
                "(loo). Ask for leave_out(), which tells of the silo as a whole."
            )

    def check_exchange(self, name: str, stage: str) -> None:
        """Raise an error for an exchange that the owner does not allow.

        ``stage`` is the one farthest down the list that was answered before.
        """
        if self.exchanges and name not in self.exchanges:
            raise ModelError(f"'{name}' is not among the exchanges of this silo's policy.")
        if self.in_order and self.later(name, stage) != name:
            raise ModelError(
                f"'{name}' comes before '{stage}' in this silo's policy (in_order), and that was "
                "answered already."
            )

    def later(self, name: str, stage: str) -> str:
        """Return which of two exchanges stands farther down the list; one that does not, first."""
        places = {exchange: i for i, exchange in enumerate(self.exchanges)}
        return name if places.get(name, -1) >= places.get(stage, -1) else stage


@dataclass
class Ledger:
    """The count of places and draws at which a silo has evaluated its likelihood for others."""

    policy: Policy
    store: Store
    # What the store keeps: ``places`` and ``draws`` so far; ``stage``, the exchange farthest down
    # the policy's list that was answered; and ``noise``, the sum of inverse squared noise
    # multipliers, by which Gaussian releases compose, of the runs that protect the same:
    # ``{"row add": 0.02}``.
    kept: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        none: dict[str, Any] = {"places": 0, "draws": 0, "noise": {}, "stage": ""}
        self.kept = none | json.loads(self.store.get(LEDGER) or b"{}")
        if set(self.kept) != set(none):
            raise DataError(
                f"the silo's ledger has {sorted(self.kept)}, where {sorted(none)} were expected: "
                "another version has written it. Keep that file, and begin with an empty folder "
                "of states and a policy that allows what is left."
            )

    @property
    def left(self) -> dict[str, float]:
        """Return what is left of the budget."""
        policy = self.policy
        return {
            "places": policy.max_places - self.kept["places"],
            "draws": policy.max_draws - self.kept["draws"],
            "epsilon": policy.epsilon - self._epsilon_of(self.kept["noise"]),
        }

    def _epsilon_of(self, inverse_squares: Mapping[str, float]) -> float:
        """Return the epsilon of releases by their sums of inverse squared multipliers."""
        # One row less and another one more are two changes of one row, as far as a silo's clip may
        # be: so releases that protect different things count four times.
        total = sum(inverse_squares.values()) * (1 if len(inverse_squares) < 2 else 4)
        return epsilon_of((total**-0.5,), self.policy.max_delta) if total else 0.0

    @contextmanager
    def spending_evaluations(self, exchange: str, numbers: Mapping[str, float]) -> Iterator[None]:
        """Enter the answer to an exchange that costs so many places or draws.

        They are counted before anything is computed, and given back if the question is refused.
        """
        self.policy.check_exchange(exchange, self.kept["stage"])
        for what, number in numbers.items():
            if not 0 < number <= self.left[what]:
                raise ModelError(
                    f"this silo's policy allows {self.left[what]} more {what} (max_{what}), and "
                    f"{number} are asked for. Its owner may raise the limit."
                )
        after = {what: self.kept[what] + number for what, number in numbers.items()}
        with self._counted({**after, "stage": self.policy.later(exchange, self.kept["stage"])}):
            yield

    @contextmanager
    def spending_privacy(self, multiplier: float, delta: float, protects: str) -> Iterator[None]:
        """Enter the beginning of a run with a noise multiplier; 0 for one without a budget."""
        policy, after = self.policy, dict(self.kept["noise"])
        if multiplier:
            if delta > policy.max_delta:
                raise ModelError(
                    f"this silo's policy allows a delta of {policy.max_delta:g} (max_delta), and "
                    f"the plan has {delta:g}. Its owner may raise the limit."
                )
            after[protects] = after.get(protects, 0.0) + multiplier**-2
            together = self._epsilon_of(after)
            if together > policy.epsilon * ROUNDED:
                raise ModelError(
                    f"this silo's policy allows an epsilon of {policy.epsilon:g} at delta "
                    f"{policy.max_delta:g} for all runs together (max_epsilon), and with this one "
                    f"it would be {together:.3g}. Its owner may raise the limit."
                )
        with self._counted({"noise": after}):
            yield

    @contextmanager
    def _counted(self, after: Mapping[str, Any]) -> Iterator[None]:
        """Keep what is counted before anything is computed; undo it after an error."""
        before = self.kept
        self._keep({**before, **after})
        try:
            yield
        except BaseException:
            self._keep(before)
            raise

    def _keep(self, counted: dict[str, Any]) -> None:
        self.kept = counted
        self.store.put({LEDGER: json.dumps(counted).encode()})

    def log(self, entry: dict[str, Any]) -> None:
        """Add a line to the audit log."""
        if self.policy.audit is None:
            return
        try:
            log_privately(self.policy.audit, {**entry, "left": self.left})
        except OSError as error:
            raise DataError(
                "the silo's audit log cannot be written, so that it says no."
            ) from error


def evaluations(question: Question, arrays: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Return at how many places and draws a silo evaluates its likelihood for a reply.

    A search gets gradient and curvature at each of its places, or from each at the silo's own mode,
    and particles a gradient at each. A correction gets the log likelihood at each draw, and the
    check of a mode at each point around it; latents are told at each draw. A round counts as one
    place.
    """
    # Counted on the arrays, whose shapes must be those of the exchange.
    downs = [len(a) for name, a in arrays.items() if name.startswith("down") and a.ndim]
    most = max([1, *downs])
    if question.exchange in (IMPORTANCE, LEAVE_OUT, LOO, OUTER_LATENTS, AROUND_MODE):
        return {"draws": most}
    return {"places": most if question.exchange in (MODE, OWN_MODES, TEMPERED) else 1}
