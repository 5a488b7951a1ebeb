"""A formula over silos: what they agree on, the model's text, and the data of a silo for it."""

from __future__ import annotations

import keyword
import linecache
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import permutations
from typing import Any

import numpy as np

from numpyro_fed.basics.errors import DataError, ModelError, guessed
from numpyro_fed.formulas import reading
from numpyro_fed.formulas.design import Agreed, Design, columns_read, terms_read
from numpyro_fed.formulas.grammar import SILO, Grammar, parse
from numpyro_fed.formulas.outcomes import COVARIATES, OutcomeFamily, family_of
from numpyro_fed.formulas.text import WrittenText
from numpyro_fed.methods.columns import levels, moments
from numpyro_fed.rounds.federation import Federation


@dataclass(eq=False)
class Formula:
    """A model that is written as a formula; :func:`numpyro_fed.formula` makes one.

    Attributes
    ----------
    formula, family : str
    priors : dict of str to str
        The priors that the user has given, as text.
    shared : tuple of str
        Groups to whose members rows of several silos belong.
    min_count : int
        The least number of rows of a level, at some silo, that is told by its name.
    missing : dict of str to str
        Columns that rows may miss, and their distributions.
    agreed : Agreed or None
        What silos have agreed on, from which the text is written.
    """

    formula: str
    family: str
    priors: Mapping[str, str] = field(default_factory=dict)
    shared: tuple[str, ...] = ()
    min_count: int = 5
    missing: Mapping[str, str] = field(default_factory=dict)
    agreed: Agreed | None = None
    # The members of groups within a silo by its name, which stay here.
    _members: dict[str, dict[str, np.ndarray]] = field(default_factory=dict, repr=False)

    @cached_property
    def grammar(self) -> Grammar:
        """Return the parts of the formula."""
        grammar = parse(self.formula)
        for name in self.shared:
            if (name,) not in [group.factors for group in grammar.groups]:
                raise ModelError(f"shared: '{name}' is no group of {self.formula!r}.")
        usable = {*columns_read(grammar)} - {*grammar.additions.values()}
        usable -= {f"C_{column}" for column in grammar.factors}
        for name, family in self.missing.items():
            if name not in usable:
                raise ModelError(
                    f"missing: '{name}' is no column of numbers in the terms of {self.formula!r}."
                    f"{guessed(name, usable)} Of categories make one more, such as 'unknown'."
                )
            if family not in COVARIATES:
                raise ModelError(f"missing: '{name}' is {family!r}; known are {[*COVARIATES]}.")
        return grammar

    @cached_property
    def distribution(self) -> OutcomeFamily:
        """Return the distribution of outcomes."""
        return family_of(self.family, self.grammar.additions)

    def agree(self, tables: Any, categorical: Sequence[str] | None = None) -> Agreed:
        """Agree on levels, means and sds with all silos, and return what was agreed.

        Parameters
        ----------
        tables : list or dict of DataFrame or dict, or Federation
            What each silo holds. Over a federation these are two exchanges, ``"levels"`` and
            ``"moments"``, which need no model; silos make their data by :meth:`silo` at home.
        categorical : sequence of str, optional
            The columns that are categories. By default those of strings, categories and booleans;
            over a federation they must be named.

        Returns
        -------
        Agreed
            Also kept as ``agreed``.

        Raises
        ------
        DataError
            For columns that a table lacks, or that are no numbers; for those that are numbers at
            some silos and text at others, for numbers in text, and for dates.

        Warns
        -----
        DataWarning
            For columns that are the same at all rows of all silos.
        """
        grammar, ordinal, asked = self.grammar, self.distribution.ordinal, tables
        read = [*columns_read(grammar), *self.shared]
        categories, first, nested = 0, 0, frozenset[tuple[tuple[str, ...], tuple[str, ...]]]()
        if isinstance(tables, Federation):
            if categorical is None or grammar.factors or ordinal:
                raise ModelError(
                    "over a federation name the categorical columns, agree(federation, "
                    "categorical=[...]); C(...) and ordinal outcomes are agreed on tables alone."
                )
        else:
            frames = {
                f"silo {n}": self._frame(f"silo {n}", table) for n, table in reading.named(tables)
            }
            for name, frame in frames.items():
                self._check(name, frame, [*read, grammar.response])
            for name, frame in frames.items():
                reading.check_missing(name, frame, self.missing)
            own = {f"C_{c}" for c in grammar.factors}
            reading.check_kinds(frames, [c for c in read if c not in {*self.shared} | own])
            whole = [c for c in read if c not in self.missing]
            asked = [
                frame[reading.complete_rows(name, frame, whole)] for name, frame in frames.items()
            ]
            if categorical is None:
                categorical = [c for c in read if self._is_categorical(c, asked)]
            nested = self._nested(asked)
            own_groups = {g.factors[0] for g in grammar.groups if len(g.factors) == 1}
            reading.warn_of_silos(asked, sorted(own_groups - {SILO, *self.shared}))
            if ordinal:
                first, categories = reading.ordinal_range(
                    [frame[grammar.response] for frame in asked]
                )
        categorical = [*dict.fromkeys([*categorical, *self.shared])]
        categorical = [c for c in categorical if c not in self.missing]
        numeric = [c for c in read if c not in categorical]
        numeric += [] if ordinal else [grammar.response]
        of_levels, of_numbers = asked, asked
        if not isinstance(asked, Federation):
            of_levels = [reading.strings(frame[categorical]) for frame in asked]
            of_numbers = [{c: reading.floats(frame[c]) for c in numeric} for frame in asked]
            if isinstance(tables, Mapping):  # warnings have names
                of_numbers = dict(zip(map(str, tables), of_numbers, strict=True))
        known = levels(of_levels, categorical, min_count=self.min_count) if categorical else None
        if known is not None and not isinstance(asked, Federation):
            known = reading.in_order(
                reading.without_empty(known, of_levels), asked, grammar.references
            )
        mean, sd = dict[str, float](), dict[str, float]()
        if numeric:
            found = moments(of_numbers, numeric)
            mean = {c: float(found.mean[c]) for c in numeric}
            sd = {c: float(found.sd[c]) for c in numeric}
        agreed = Agreed(known, mean, sd, categories, first, nested)
        reading.check_terms(agreed, terms_read(grammar), self.formula)
        self.agreed = agreed
        for name in ("written", "model"):
            self.__dict__.pop(name, None)
        return self.agreed

    def silos(self, tables: Any) -> Any:
        """Return the data of all silos for the model, after they have agreed.

        Parameters
        ----------
        tables : list or dict of DataFrame or dict
            A table for each silo, by name if silos have names.

        Returns
        -------
        list or dict of dict
            As the tables came, for ``nf.fit``.

        Raises
        ------
        DataError
            For columns that a table lacks, or that are no numbers; for a silo of which no row has
            all covariates.

        Warns
        -----
        DataWarning
            For rows that miss a covariate, which are left out. Those that miss the outcome stay.
            For columns of which most rows have rare levels.
        """
        if self.agreed is None:
            self.agree(tables)
        made = {name: self._data(table, f"silo {name}") for name, table in reading.named(tables)}
        reading.warn_of_missing([lost for _, lost in made.values()])
        found = {name: data for name, (data, _) in made.items()}
        return found if isinstance(tables, Mapping) else list(found.values())

    def silo(
        self, table: Any, name: str = "the silo", *, new: bool = False, of: object = None
    ) -> dict[str, Any]:
        """Return the data of one silo for the model, or of new rows to predict for.

        Parameters
        ----------
        table : DataFrame or dict
        name : str
            What errors call it.
        new : bool
            Whether they are new rows, without an outcome.
        of : str or int, optional
            The silo, by name or number, whose groups (its wards, say) new rows belong to, for
            ``predict(silo=)``. Without it groups are numbered anew, for ``predict(silo="new")``.

        Raises
        ------
        DataError
            For columns that the table lacks, for members of groups that the silo ``of`` has not,
            and for new rows that miss a covariate, which have no prediction.
        """
        data, lost = self._data(table, name, new=new, of=of)
        reading.warn_of_missing([lost])
        return data

    def _data(
        self, table: Any, name: str, *, new: bool = False, of: object = None
    ) -> tuple[dict[str, Any], str]:
        """Return the data of one silo, or of new rows, and in words which rows it has lost."""
        written, response = self.written, self.grammar.response
        frame = self._frame(name, table)
        of_groups = [f for group in written.own_groups for f in group.factors if f != SILO]
        read = [*columns_read(self.grammar), *self.shared, *of_groups]
        self._check(name, frame, read if new else [*read, response])
        reading.check_missing(name, frame, self.missing)
        read, lost = [c for c in read if c not in self.missing], ""
        if new:
            reading.check_new_rows(name, frame, read)
        else:
            whole = reading.complete_rows(name, frame, read)
            lost = reading.rows_lost(name, frame, whole, read, response)
            frame = frame[whole]
        known = written.design.agreed.levels
        coded = frame
        if known is not None:
            texts = reading.strings(frame[[*known]])
            coded = known.encode(texts, new=new)
            if not new:
                reading.warn_of_rare(name, texts, known)
        found: dict[str, Any] = {}
        for column in written.columns:
            is_coded = known is not None and column in known
            found[column] = np.asarray(coded[column]) if is_coded else reading.floats(frame[column])
        for columns in written.computed:
            found[columns.expression] = written.design.evaluated(frame, coded, columns)
        for group in written.own_groups:
            words, code = reading.member_words(frame, group), written.codes_of(group)
            members = np.unique(words)
            if new and of is not None:
                members = self._members_of(of)[code]
            elif not new:
                self._members.setdefault(name.removeprefix("silo "), {})[code] = members
            if len(strange := np.setdiff1d(words, members)):
                raise DataError(f"{name}: '{strange[0]}' is no member of '{group.group}' at {of}.")
            codes = np.searchsorted(members, words).astype(np.int32)
            found |= {code: codes, f"n_{code}": len(members)}
        for argument, (group, around) in written.nestings.items():
            codes, above = found[written.codes_of(group)], found[written.codes_of(around)]
            known_above = np.zeros(found[f"n_{written.codes_of(group)}"], np.int32)
            if new and of is not None:
                known_above = self._members_of(of)[argument]
            else:
                known_above[codes] = above
            if len(crossing := np.flatnonzero(known_above[codes] != above)):
                raise DataError(
                    f"{name}: row {crossing[0]} of '{group.group}' is in another '{around.group}' "
                    f"than others of its group, and in the text each '{group.group}' is in one."
                )
            found[argument] = known_above
            if not new:
                self._members[name.removeprefix("silo ")][argument] = known_above
        found = {argument: found[argument] for argument in written.arguments}
        if not new:
            y = reading.floats(frame[response]) - written.design.agreed.first
            is_code = self.distribution.ordinal and not np.isnan(y).any()
            found[response] = y.astype(np.int32) if is_code else y
        return found, lost

    @cached_property
    def written(self) -> WrittenText:
        """Return the text line by line."""
        if self.agreed is None:
            raise ModelError(
                "the text depends on the levels and scales that silos agree on: call "
                "formula.silos(tables) first, or formula.agree(tables)."
            )
        known = {*self.agreed.mean, *self.agreed.names}
        if words := [c for c in columns_read(self.grammar) if keyword.iskeyword(c)]:
            raise ModelError(f"a column is called '{words[0]}', a word of Python: rename it.")
        if lacking := [c for c in columns_read(self.grammar) if c not in known]:
            raise ModelError(f"silos have agreed on nothing about the column '{lacking[0]}'.")
        design = Design(self.grammar, self.agreed)
        return WrittenText(
            self.formula,
            self.family,
            self.distribution,
            design,
            self.priors,
            self.shared,
            self.missing,
        )

    @property
    def text(self) -> str:
        """Return the model's text, which can be printed, copied and changed."""
        return str(self.written)

    @cached_property
    def model(self) -> Callable[..., Any]:
        """Return the model that the text defines."""
        # Its source is found by whoever asks, as that of a function in a file.
        text, place = self.text, f"<formula {self.formula}, {self.family}>"
        linecache.cache[place] = (len(text), None, text.splitlines(keepends=True), place)
        names: dict[str, Any] = {"__name__": "formula"}
        exec(compile(text, place, "exec"), names)
        model: Callable[..., Any] = names["model"]
        return model

    def _members_of(self, silo: object) -> dict[str, np.ndarray]:
        """Return the members of a silo's groups, as they were numbered for the fit."""
        if str(silo) not in self._members:
            raise DataError(f"of={silo!r}: known are the silos {[*self._members]}.")
        return self._members[str(silo)]

    def _nested(self, frames: Sequence[Any]) -> frozenset[tuple[tuple[str, ...], tuple[str, ...]]]:
        """Return the pairs of groups of which one is within the other at all silos."""
        others = [(SILO,), *((name,) for name in self.shared)]
        groups = {g.factors: g for g in self.grammar.groups if g.factors not in others}
        possible, coarser = set(permutations(groups, 2)), set[tuple[tuple[str, ...], ...]]()
        columns = [f for factors in groups for f in factors if f != SILO]
        for frame in frames if possible else ():
            if {*columns} - {*frame}:  # of which the silo's own data will tell
                return frozenset()
            whole = frame[frame[columns].notna().all(axis=1)]
            words = {factors: reading.member_words(whole, g) for factors, g in groups.items()}
            number = {factors: len(np.unique(w)) for factors, w in words.items()}
            for inner, outer in sorted(possible):
                pairs = np.unique(np.stack([words[inner], words[outer]]), axis=1)
                if pairs.shape[1] != number[inner]:
                    possible.discard((inner, outer))
                elif number[inner] > number[outer]:
                    coarser.add((inner, outer))
        return frozenset(possible & coarser)

    def _is_categorical(self, column: str, frames: Sequence[Any]) -> bool:
        """Return whether a column is one of categories at all silos."""
        if column in self.shared:
            return True
        if column in self.grammar.additions.values():
            return False
        kinds = [reading.is_numeric(frame[column], also_bool=True) for frame in frames]
        bools = [not reading.is_numeric(frame[column]) for frame in frames]
        return not all(kinds) or all(bools)

    def _frame(self, name: str, table: Any) -> Any:
        """Return a table as a DataFrame, with what the formula makes of its columns."""
        columns = [*columns_read(self.grammar), self.grammar.response]
        return reading.as_frame(name, table, columns, self.grammar.factors)

    def _check(self, name: str, frame: Any, columns: Sequence[str]) -> None:
        for column in columns:
            if column not in frame:
                hint = guessed(column, map(str, frame))
                if any(column in effect.factors for effect in self.grammar.groups):
                    hint += " The group of all rows of a silo is named silo: (1 | silo)."
                raise DataError(f"{name}: the table lacks '{column}'. It has {[*frame]}.{hint}")
            if column == self.grammar.response and not reading.is_numeric(
                frame[column], also_bool=True
            ):
                words = [*map(str, frame[column].dropna().unique())]
                codes = dict(zip(sorted(words), range(2), strict=False))
                codes = codes if len(words) == 2 else {"no": 0, "yes": 1}
                raise DataError(
                    f"{name}, '{column}': an outcome is a number, 0 or 1 for no or yes; got "
                    f"{frame[column].dtype}. Make it one: table['{column}'].map({codes})."
                )
            if column == self.grammar.response and self.family == "bernoulli":
                reading.check_zero_or_one(name, frame[column], "'bernoulli'")
            agreed = self.agreed is not None and column in self.agreed.mean
            if agreed and not reading.is_numeric(frame[column], also_bool=True):
                raise DataError(
                    f"{name}, '{column}': silos have agreed on numbers, got "
                    f"{frame[column].dtype}: pandas.to_numeric(df['{column}'], errors=\"coerce\")."
                )
        for word, column in self.grammar.additions.items():
            if column not in frame or not reading.is_numeric(frame[column], also_bool=True):
                raise DataError(f"{name}: {word}({column}) is a column of numbers.")
            if word == "cens" and not frame[column].dropna().isin([0, 1]).all():
                raise DataError(f"{name}, '{column}': 1 where a time is a lower bound, else 0.")


def formula(
    formula: str,
    *,
    family: str = "gaussian",
    priors: Mapping[str, str] | None = None,
    shared: Sequence[str] = (),
    min_count: int = 5,
    missing: Mapping[str, str] | None = None,
    agreed: Agreed | None = None,
) -> Formula:
    r"""Return a model that is written as a formula, in the grammar of lme4 and brms.

    Its text is an ordinary NumPyro model, which can be printed, copied and changed.

    Parameters
    ----------
    formula : str
        ``y ~ age * smoke + (1 + age | silo)``. Group effects ``(terms | group)`` have a normal
        distribution and are correlated, unless they stand before ``||``; ``a/b`` are groups b
        within a, whose effects have that of a for a mean. The group ``silo`` is the silo
        itself; the members of others belong to one silo each, unless the group is ``shared``.
        Terms may have ``log``, ``exp``, ``sqrt``, ``I()``, ``C()``, ``C(x, Treatment("a"))`` with
        the reference level, ``bs``, ``poly``, ``center`` and ``offset()``; ``s(x)`` is a smooth
        function, a Gaussian process by basis functions. Beside the response stand
        ``y | trials(n)``, ``y | cens(c)`` (1 where the time is only a lower bound) and
        ``y | weights(w)``.
    family : str
        ``"gaussian"``, ``"student"``, ``"bernoulli"``, ``"binomial"``, ``"poisson"``,
        ``"negbinomial"``, ``"zero_inflated_poisson"``, ``"zero_inflated_negbinomial"``,
        ``"gamma"``, ``"lognormal"``, ``"beta"``, ``"exponential"``, ``"weibull"`` or
        ``"cumulative"`` (ordinal), in brms' links.
    priors : dict of str to str, optional
        Priors as text, by the name of the site: ``{"b": "dist.Normal(0, 1).expand([2])
        .to_event(1)", "sd_silo": "dist.HalfNormal(0.5)"}``, and ``"sd"`` for all sds of groups.
    shared : sequence of str
        Groups to whose members rows of several silos belong (items of a test, say). Their effects
        are global latents, and their names are told, as those of levels.
    min_count : int
        The least number of rows of a level that is told by its name; rarer ones are ``other``.
    missing : dict of str to str, optional
        Columns of numbers that rows may miss, and how they are distributed: ``{"age": "gaussian",
        "crp": "lognormal", "smokes": "bernoulli"}``. Rows that miss them stay: the column is a
        latent there, about a line of those of the formula's columns that each row has, and of the
        ones before it in the dict. Rows that miss another covariate are left out.
    agreed : Agreed, optional
        What silos have agreed on before.

    Returns
    -------
    Formula
        ``f.silos(tables)`` are the data of silos for ``nf.fit(key, f.model, ...)``; ``f.text`` is
        the text.

    Raises
    ------
    ModelError
        For a formula that is not understood, and a family that does not exist.
    MissingExtraError
        Without the extra ``formula``.

    Notes
    -----
    The default priors are weak on the scale of the data, which silos agree on:
    coefficients are normal with 2.5 sds of the outcomes (1 beside a link) over the sd of their
    column, or 2.5 for a level; the intercept is that of a row at the ``centre``; sds of groups
    are half normal, of 2.5, or of 1 where the group is the silo, since few silos say little.
    These are rstanarm's, but for the last. The deterministic site ``"mean"`` is the mean of
    each row's outcome (of a binomial one its share), for ``average``. Levels stand in the order
    of numbers, of categories (pandas') if all silos have the same, or of the alphabet; the first
    one is the reference. Groups that are nested in all tables are written as ``a/b``; over a
    federation, where nobody sees that, say so.

    Silos share means and sds of columns, and the names of levels, as :func:`numpyro_fed.moments`
    and :func:`numpyro_fed.levels` tell them.

    Examples
    --------
    >>> import jax, numpy as np, pandas as pd
    >>> import numpyro_fed as nf
    >>> rng = np.random.default_rng(0)
    >>> tables = {}
    >>> for name, wards in (("Basel", "AB"), ("Bern", "BC"), ("Chur", "AC")):
    ...     ward, age = rng.choice(list(wards), 40), rng.uniform(20, 80, 40)
    ...     y = 0.1 * age + 2.0 * (ward == "C") + rng.normal(size=40)
    ...     tables[name] = pd.DataFrame(dict(ward=ward, age=age, y=y))
    >>> f = nf.formula("y ~ age + ward")
    >>> silos = f.silos(tables)
    >>> fitted = nf.fit(jax.random.key(0), f.model, silos, progress_bar=False)
    >>> fitted.summary().index.tolist()
    ['Intercept', 'Intercept_centred', 'b[age]', 'b[ward[B]]', 'b[ward[C]]', 'sigma']
    """
    found = Formula(formula, family, priors or {}, tuple(shared), min_count, missing or {}, agreed)
    _ = found.grammar, found.distribution  # whose errors come here
    return found
