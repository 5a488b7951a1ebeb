"""The rules of a silo's owner."""

from __future__ import annotations

import math
import re
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from numpyro_fed.basics.errors import ModelError, is_number, one_of
from numpyro_fed.data.tables import MIN_COUNT
from numpyro_fed.methods.method import PlanSize
from numpyro_fed.privacy.masks import MAX_PARTIES
from numpyro_fed.rounds.secure_sums import LEAST_HIDING

MAX_EPSILON = 10.0  # of runs with noise, where the owner has set none
MAX_DELTA = 1e-3  # the same, for any number of rows


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
    requesters : tuple of str
        The fingerprints of those who may ask, as ``numpyro-fed key`` prints them
        (``"SHA256:..."``). Others get no answer, and spend nothing. Empty: a question is answered
        whoever asks, which is right in one process alone; ``numpyro-fed silo`` does not start so.
    approve : {"all", "ask"}
        Whether a study waits until the owner has approved it: ``numpyro-fed requests`` lists
        studies, ``approve`` and ``refuse`` decide. A study is its files and who asks for it.
    methods : tuple of str
        The names of methods that may be run, ``"PVI"``, or names of the study. Empty: all.
    exchanges : tuple of str
        The names of exchanges that are answered, ``"levels"``, ``"moments"`` and ``"describe
        columns"`` among them. Empty: these three, and all of the methods.
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
        ``loo``, of rows with an outcome; for ``describe_silos``, of rows that anything tells of.
    min_count : int
        The least number of rows of a level whose name is told (:func:`numpyro_fed.levels`), of a
        group in an average, and of a bin in a calibration. A question for rarer ones is refused.
    columns : tuple of str
        The names of columns and arguments that a text may read. Empty: all.
    person : str, optional
        The column, of DataFrames or of the data, with the number or name of a person. Rows of one
        person then count once in ``min_persons``.
    min_persons : int
        The least number of persons that this silo has. Without ``person`` each row is one.
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
    secure_sum : bool, optional
        Whether the replies of runs leave this silo under masks alone, so that the server learns
        sums over silos. Such a sum is over ``min_silos`` at least, and over three where there are
        three or more. By default that is so in plans of three silos or more, and in all if there
        are two ``peers``, where questions are signed. A sum holds 255 silos: larger plans need
        False. A server that lies may make a plan of two: against it name ``peers``, ``min_silos``
        or True. With False single replies are allowed. With True no question about data is
        answered, either, that is told silo by silo.
    sums_again : int
        How often a reply is sent under other masks, for a sum over fewer silos, where silos have
        dropped out.
    peers : tuple of str
        The fingerprints of the other silos' keys (:attr:`numpyro_fed.Silo.fingerprint`). Without
        them a server that lies could put keys of its own in the place of theirs, and read replies.
        Beside them set ``min_silos`` to the number of all silos: else a server that lies could ask
        the same question over several groups, and tell replies apart.
    max_epsilon : float, optional
        The budget of differential privacy that all runs may spend together, in all its life. Where
        it is set, what is told without noise is refused: fits without ``privacy=``, ``levels`` and
        ``moments``. By default they are answered, and runs with noise may spend 10. What runs with
        noise tell is :math:`(\epsilon, \delta)` private with ``max_epsilon`` and ``max_delta``.
        Their noise is Gaussian, and composes exactly, by the library dp-accounting. Of runs that
        protect different units or neighbours each counts as one with half of its noise.
    also_without_noise : bool
        Whether runs without noise are answered beside the budget of ``max_epsilon``. What all runs
        tell together is then not private in that sense.
    max_delta : float, optional
        The delta of all runs together, and the largest that a plan may have. By default the power
        of ten below a tenth of 1 over the number of the silo's rows, and 0.001 at most.
    audit : str, optional
        A file to which each message is added as a line of JSON: time, requester, study, exchange,
        run, names and shapes of arrays, why it was refused, the SHA-256 of message and reply, and
        what is left of the budget. Each line has the hash of the one before
        (``numpyro-fed audit --check``). ``"syslog"`` for the system's log.

    Examples
    --------
    >>> import numpyro_fed as nf
    >>> nf.Policy(methods=("PVI",), min_rows=100).min_rows
    100
    """

    requesters: tuple[str, ...] = ()
    approve: str = "all"
    methods: tuple[str, ...] = ()
    exchanges: tuple[str, ...] = ()
    in_order: bool = False
    min_silos: int = 2
    min_rows: int = 5
    min_count: int = MIN_COUNT
    columns: tuple[str, ...] = ()
    person: str | None = None
    min_persons: int = 0
    parameters_per_row: float = 0.33
    tell_latents: bool = False
    max_places: int = 5_000
    max_draws: int = 200_000
    secure_sum: bool | None = None
    sums_again: int = 3
    peers: tuple[str, ...] = ()
    max_epsilon: float | None = None
    also_without_noise: bool = False
    max_delta: float | None = None
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
            elif value is None and f.default is None:
                continue
            elif name == "secure_sum":
                if not isinstance(value, bool):
                    raise ValueError(f"{name} must be true or false, got {value!r}.")
            elif name in ("audit", "person", "approve"):
                if not isinstance(value, str):
                    raise ValueError(f"{name} must be a text, got {value!r}.")
            elif not is_number(value) or value < 0:
                raise ValueError(f"{name} must be a number of at least 0, got {value!r}.")
        one_of("approve", self.approve, "all", "ask")
        for name in self.requesters:
            if not re.fullmatch(r"SHA256:[A-Za-z0-9+/]{43}", name):
                raise ValueError(
                    f"requesters has {name!r}, and a fingerprint is 'SHA256:' with 43 letters and "
                    "digits, as numpyro-fed key prints it."
                )
        if self.max_delta is not None and not self.max_delta < 1:
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
        found = tomllib.loads(Path(path).read_text(encoding="utf-8"))
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

    def delta(self, num_rows: int) -> float:
        """Return the delta of all runs together, for a silo of so many rows."""
        if self.max_delta is not None:
            return self.max_delta
        # A power of ten: a refusal says it, and it should not say the number of rows.
        return min(MAX_DELTA, 10.0 ** math.floor(math.log10(0.1 / max(num_rows, 1))))

    @property
    def epsilon(self) -> float:
        """Return the budget of differential privacy of all runs with noise."""
        return MAX_EPSILON if self.max_epsilon is None else self.max_epsilon

    def check_noise(self, multiplier: float, what: str) -> None:
        """Raise an error for what is told without noise, where there is a budget of privacy."""
        if self.max_epsilon is not None and not multiplier and not self.also_without_noise:
            raise ModelError(
                f"this silo's policy allows an epsilon of {self.max_epsilon:g} (max_epsilon), and "
                f"{what} without noise, which spends an infinite one. Ask by nf.fit(..., "
                "privacy=nf.Privacy(epsilon, delta)); or its owner allows it beside the budget "
                "(also_without_noise = true)."
            )

    def check_sums(self, secure: bool) -> None:
        """Raise an error for a server that asks for plain replies, where masks are wanted."""
        if self.secure_sum and not secure:
            raise ModelError(
                "this silo's policy lets replies leave it under masks alone (secure_sum): the "
                "server must ask by Federation(..., secure_sum=True)."
            )

    def check_single_replies(self, size: PlanSize) -> None:
        """Raise an error for plain replies to a network, which the owner has not allowed."""
        # Beyond as many as a sum can hold, too: a plan is what a server says.
        hides = size.num_silos >= LEAST_HIDING or len(self.peers) > 1
        if self.secure_sum is None and hides:
            raise ModelError(
                f"single replies are asked for in a plan of {size.num_silos} silos, where sums "
                "could hide them: this silo gives them under masks alone, "
                f"Federation(..., secure_sum=True), of up to {MAX_PARTIES} silos. Its owner may "
                "allow it otherwise: secure_sum = false in the policy."
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

    def check_columns(self, names: Sequence[str]) -> None:
        """Raise an error for a text or a question that reads a column it may not."""
        allowed = set(self.columns)
        # By its whole name, that of its argument, or its own in a DataFrame.
        strange = [
            name
            for name in names
            if not allowed & {name, re.split(r"[.\[]", name)[0], name.rpartition(".")[2]}
        ]
        if self.columns and strange:
            raise ModelError(
                f"'{strange[0]:.100}' is not among the columns that this silo's policy lets a text "
                "read (columns). Its owner may add it."
            )

    def check_persons(self, number: int) -> None:
        """Raise an error for too few persons."""
        if number < self.min_persons:
            raise ModelError(
                f"this silo has fewer persons than its policy asks for ({self.min_persons}, "
                "min_persons)."
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

    def check_groups(self, codes: np.ndarray | None, min_count: int | None) -> None:
        """Raise an error for sums by groups, or by bins, that would be those of a few rows."""
        if (
            codes is not None
            and 0 < min(Counter(codes.tolist()).values(), default=0) < self.min_count
        ):
            raise ModelError(
                "a group of rows by which averages are asked for has fewer rows here than this "
                f"silo's policy tells of ({self.min_count}, min_count). Join it with another."
            )
        if min_count is not None and min_count != self.min_count:
            raise ModelError(
                f"bins of {min_count} rows are asked for, where this silo's policy tells of "
                f"{self.min_count} alone (min_count): answers for two numbers differ by single "
                f"rows. Ask by calibration(..., min_count={self.min_count})."
            )

    def check_average(self, num_rows: int, *, is_told: bool) -> None:
        """Raise an error for an average over few rows; of latents that rows share it is one too."""
        if is_told and num_rows >= self.min_count:
            return
        if not is_told and self.tell_latents:
            return
        raise ModelError(
            f"an average over fewer rows is asked for than this silo's policy tells of "
            f"({self.min_count}, min_count)"
            + ("." if is_told else ", and of what rows share under tell_latents or secure sums.")
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
