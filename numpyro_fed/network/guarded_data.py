"""A silo's data as its owner's rules see them: rows, persons, columns, and what is told of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from numpyro_fed.basics.errors import DataError
from numpyro_fed.data.scaling import numbers_of
from numpyro_fed.data.tables import OTHER, column_names, is_frame, level_counts, model_arguments
from numpyro_fed.methods.columns import COLUMNS, description_reply, moments_reply, names_reply
from numpyro_fed.network.policy import Policy
from numpyro_fed.rounds.messages import DESCRIBE_COLUMNS, LEVELS

LOG = logging.getLogger("numpyro_fed.silo")


@dataclass
class GuardedData:
    """A silo's data, as they were given, with the policy on what may be told of them.

    ``num_rows`` is the length of the longest array; ``num_persons`` that of the policy's column of
    persons, each counted once, and without one the same.
    """

    data: Any
    policy: Policy
    num_rows: int = field(init=False)
    num_persons: int = field(init=False)

    def __post_init__(self) -> None:
        values: Any = self.data.values() if isinstance(self.data, Mapping) else [self.data]
        lengths = [len(v) for v in values if hasattr(v, "__len__") and not isinstance(v, str)]
        self.num_rows = self.num_persons = max(lengths, default=0)
        if (person := self.policy.person) is not None:
            self.num_persons = len(level_counts(self.data, [person])[person])

    def check_persons(self) -> None:
        """Raise an error where persons are too few."""
        self.policy.check_persons(self.num_persons)

    def check_reading(self, names: Sequence[str]) -> None:
        """Raise an error for arguments that a text may not read, or where persons are too few."""
        self.policy.check_columns(self._columns_of(names))
        self.check_persons()

    def _columns_of(self, names: Sequence[str]) -> list[str]:
        """Return the columns that arguments of a text read; ``"x.age"`` of an argument ``x``."""
        if is_frame(self.data):
            own = list(map(str, self.data.columns))
            return list(names) if set(names) <= set(own) else own
        columns = column_names(self.data)
        each = ([f"{n}.{c}" for c in columns[n]] if n in columns else [n] for n in names)
        return [name for names in each for name in names]

    def for_model(self, model: Callable[..., Any]) -> Any:
        """Return the data for a model, without the person's column where it takes none."""
        takes, person = model_arguments(model), self.policy.person
        if takes is None or person in takes or not isinstance(self.data, Mapping):
            return self.data
        return {name: value for name, value in self.data.items() if name != person}

    def reply(self, exchange: str, asked: Mapping[str, Any]) -> bytes:
        """Return the names of the data's levels, or moments or descriptions of its columns."""
        columns, arguments = asked.get(COLUMNS), asked.get("arguments")
        min_count, other = asked.get("min_count", 1), str(asked.get("other", OTHER))
        named = all(
            names is None or (isinstance(names, list) and all(isinstance(n, str) for n in names))
            for names in (columns, arguments)
        )
        if not named or type(min_count) is not int or (exchange == LEVELS and columns is None):
            raise DataError("a question about data names columns. Is it of another version?")
        # Of a whole DataFrame what is not allowed is left out.
        frames = column_names(self.data) if exchange == DESCRIBE_COLUMNS else ()
        self.policy.check_columns([name for name in columns or () if name not in frames])
        try:
            if exchange == DESCRIBE_COLUMNS:
                fewest = max(min_count, self.policy.min_count, self.policy.min_rows)
                return description_reply(self.data, columns, fewest, self.policy.columns)
            if columns is not None and exchange == LEVELS:
                counts = level_counts(self.data, columns)
                num_rows = min((found.total() for found in counts.values()), default=0)
                self.policy.check_levels(num_rows, min_count)
                return names_reply(self.data, columns, min_count, other)
            numbers = numbers_of("the silo", self.data, arguments)
            self.policy.check_columns(self._columns_of([*numbers]))
            for name, rows in numbers.items():
                self.policy.check_numbers(name, rows)
            return moments_reply(self.data, arguments)
        except DataError as error:
            # Its words may hold a value of the column that the server has named.
            LOG.warning("'%s' could not be answered: %s", exchange, error)
            known = "strings, categories, booleans or whole numbers, and none that is missing"
            what = known if exchange == LEVELS else "numbers"
            raise DataError(
                f"a column of {columns or arguments or 'the data'} is not there, or holds "
                f"something else than {what}. The silo's log has the rest."
            ) from error
