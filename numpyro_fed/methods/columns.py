"""Descriptions, levels and moments, asked before there is a model: both ends of the questions.

They come before facts and plan. A silo's reply is a function of its data and of the names of
columns alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from numpyro_fed.basics.errors import DataError, ReplyError, positive_int
from numpyro_fed.data.descriptions import (
    ColumnAtSilo,
    SiloDescriptions,
    argument_of,
    describe_columns,
)
from numpyro_fed.data.scaling import Numbers, Scaling, moments_of, united
from numpyro_fed.data.silo_data import label, listed, names_of
from numpyro_fed.data.tables import MIN_COUNT, OTHER, Levels, SiloInput, level_names, listed_names
from numpyro_fed.rounds.federation import Federation
from numpyro_fed.rounds.messages import DESCRIBE_COLUMNS, LEVELS, MOMENTS, read, write

HELD = "the data of each silo, or a Federation"
NAMES, COLUMNS, REST = "names", "columns", "other"  # texts in the head of a reply


def describe_silos(
    silos: Sequence[Any] | Mapping[str, Any] | Federation,
    columns: Sequence[str] | None = None,
    *,
    min_count: int = 10,
) -> SiloDescriptions:
    """Return what each silo's columns look like, roughly, and what does not go together.

    Parameters
    ----------
    silos : list of dict or DataFrame, dict of these, or Federation
        What each silo holds, or silos in other processes.
    columns : sequence of str, optional
        Arguments, columns of DataFrames, or ``"x.city"`` for a column of the argument ``x``. By
        default all that any silo has.
    min_count : int
        The least number of rows of whatever is told: of a level, and on either side of a quantile.
        It is rounded up to 1, 2, 5, 10, 20, 50 and so on, and so are a silo's own limits.

    Returns
    -------
    SiloDescriptions
        It prints as a table. ``alarms`` are sentences on what should be mended before a fit.

    Raises
    ------
    DataError
        For a column that no silo has.
    RefusedError
        If the policy of a silo does not allow the question.

    Notes
    -----
    It is one exchange, ``"describe columns"``, which needs no model. Where the policy of a silo
    has a larger ``min_count`` or ``min_rows``, it holds there. No count crosses: numbers of rows,
    shares and quantiles are rounded.

    Examples
    --------
    >>> import numpy as np, numpyro_fed as nf
    >>> kg = np.linspace(50, 90, 41)
    >>> print(nf.describe_silos(dict(Bern=dict(weight=kg), Basel=dict(weight=2.2 * kg))))
    column  Bern (about 40 rows)  Basel (about 40 rows)
    weight  70 (60 to 80)         150 (130 to 180)
    <BLANKLINE>
    'weight': the median is 150 at Basel and 70 at others: pounds and kilograms (ratio 2.14)?
    """
    positive_int("min_count", min_count)
    asked = None if columns is None else list(listed_names("columns", columns))
    if isinstance(silos, Federation):
        settings = json.dumps({COLUMNS: asked, "min_count": min_count})
        replies = enumerate(silos.ask_of_data(DESCRIBE_COLUMNS, settings))
        found = [_read_description(j, reply) for j, reply in replies]
        names = silos.silo_names
    else:
        found = [describe_columns(silo, asked, min_count) for silo in listed(silos, HELD)]
        names = names_of(silos)
    described = list(dict.fromkeys(name for one in found for name in one))
    known = {*described, *map(argument_of, described)}
    if lacking := [c for c in asked or () if c not in known]:
        raise DataError(f"no silo has the column {lacking}.")
    who = names if names else tuple(f"silo {j}" for j in range(len(found)))
    return SiloDescriptions(who, {c: tuple(one.get(c) for one in found) for c in described})


def levels(
    silos: Sequence[Any] | Mapping[str, Any] | Federation,
    columns: Sequence[str],
    *,
    min_count: int = MIN_COUNT,
    other: str | None = None,
) -> Levels:
    """Return the levels of categorical columns, in one order for all silos.

    Parameters
    ----------
    silos : list of dict or DataFrame, dict of these, or Federation
        What each silo holds, or silos in other processes.
    columns : sequence of str
        Arguments, columns of the DataFrames, or ``"x.city"`` for a column of the argument ``x``.
    min_count : int
        The least number of rows of a level at some silo. Levels that all silos have less often are
        not named, since a level that few patients have says who is here; they are ``other``.
    other : str, optional
        The name of that level, if each column is to have it (for new patients, say). By default it
        is ``"other"``, in the columns of which some silo has a level that it does not name: where
        it were in all, its coefficient would be one of no patient.

    Returns
    -------
    Levels

    Raises
    ------
    DataError
        For a column that a silo lacks, that holds anything but strings, categories, booleans or
        whole numbers, or that misses values.
    RefusedError
        If the policy of a silo does not allow the question, or wants a higher ``min_count``.

    Notes
    -----
    In one process nothing crosses. A silo in another process sends the names of its levels, that
    it has a rarer one, and never how many rows have one. It is one exchange, ``"levels"``, which
    needs no model.

    Examples
    --------
    >>> import numpyro_fed as nf
    >>> silos = [{"city": ["Rome"] * 5 + ["Bern"] * 6}, {"city": ["Oslo"] * 8 + ["Nice"]}]
    >>> levels = nf.levels(silos, ["city"])
    >>> levels["city"]
    ('Bern', 'Oslo', 'Rome', 'other')
    >>> levels.encode(silos[1])["city"].tolist()
    [1, 1, 1, 1, 1, 1, 1, 1, 3]

    The same of silos in processes of their own:

    >>> answers = [nf.Silo(silo, names={}).answer for silo in silos]
    >>> nf.levels(nf.Federation(nf.network.InMemory(answers)), ["city"]) == levels
    True
    """
    positive_int("min_count", min_count)
    columns, parts = list(listed_names("columns", columns)), []
    last = OTHER if other is None else other
    if isinstance(silos, Federation):
        settings = json.dumps({COLUMNS: columns, "min_count": min_count, REST: last})
        replies = silos.ask_of_data(LEVELS, settings)
        parts = [_read_names(j, reply, columns, last) for j, reply in enumerate(replies)]
    else:
        for j, silo in enumerate(listed(silos, HELD)):
            try:
                parts.append(level_names(silo, columns, min_count, last))
            except DataError as error:
                raise DataError(f"{label(j, names_of(silos))}: {error}") from error
    return Levels.union(*parts, min_count=min_count, other=other)


def moments(
    silos: Sequence[Any] | Mapping[str, Any] | Federation, arguments: Sequence[str] | None = None
) -> Scaling:
    """Return the mean and the sd of each column over all silos, as of the pooled rows.

    Parameters
    ----------
    silos : list of dict or DataFrame, dict of these, or Federation
        What each silo holds, or silos in other processes.
    arguments : sequence of str, optional
        The arguments, or columns of DataFrames, to take moments of. By default all arrays of
        floats, outcomes among them: name the covariates where outcomes keep their units. Whole
        numbers (an index of hospitals, a count) are left out unless they are named.

    Returns
    -------
    Scaling

    Raises
    ------
    DataError
        For silos that lack an argument or have other columns, and for columns without any number.
    RefusedError
        If the policy of a silo does not allow the question, or too few of its rows have a number.

    Warns
    -----
    DataWarning
        For a column whose mean at a silo is far from those at the others, as of pounds among
        kilograms: it names the silo.

    Notes
    -----
    Nothing has to be standardised for ``nf.fit``. It is for priors that are written in standard
    units.

    In one process nothing crosses. A silo in another process sends a mean, an sd and the number of
    rows that have a number, of each column, which are not added up on the way. It is one exchange,
    ``"moments"``, which needs no model. The result is the same, bit for bit.

    Examples
    --------
    >>> import numpy as np, numpyro_fed as nf
    >>> x = 1e8 + np.array([[0.0, 0.1], [2.0, 0.3], [4.0, 0.2]])
    >>> scaling = nf.moments([dict(x=x[:1]), dict(x=x[1:])], ["x"])
    >>> (scaling.mean["x"] - 1e8).round(6).tolist()
    [2.0, 0.2]
    >>> scaling.sd["x"].round(6).tolist()
    [1.632993, 0.08165]
    """
    names = None if arguments is None else list(listed_names("arguments", arguments))
    if isinstance(silos, Federation):
        settings = json.dumps({"arguments": names})
        replies = silos.ask_of_data(MOMENTS, settings)
        parts = [_read_moments(j, reply, arguments) for j, reply in enumerate(replies)]
        owners = [label(j, silos.silo_names) for j in range(len(parts))]
    else:
        held = listed(silos, HELD)
        owners = [label(j, names_of(silos)) for j in range(len(held))]
        parts = [moments_of(*pair, arguments) for pair in zip(owners, held, strict=True)]
    whole = united(owners, parts)
    for name, count in whole.count.items():
        if not np.all(count):
            raise DataError(f"'{name}': a column of which no silo has a number. Leave it out.")
    return whole


def names_reply(silo: SiloInput, columns: Sequence[str], min_count: int, other: str) -> bytes:
    """Return a silo's reply to the question for the names of its levels."""
    names = level_names(silo, columns, min_count, other)
    return write({}, {NAMES: json.dumps(names, sort_keys=True), REST: other})


def moments_reply(silo: SiloInput, arguments: Sequence[str] | None) -> bytes:
    """Return a silo's reply to the question for means, sds and numbers of rows."""
    part = moments_of("the silo", silo, arguments)
    kinds = {"mean": part.mean, "sd": part.sd, "count": part.count}
    arrays = {f"{kind}/{name}": a for kind, found in kinds.items() for name, a in found.items()}
    return write(arrays, {COLUMNS: json.dumps(part.columns, sort_keys=True)})


def description_reply(
    silo: SiloInput, columns: Sequence[str] | None, min_count: float, allowed: Sequence[str] = ()
) -> bytes:
    """Return a silo's reply to the question what its columns look like, of those allowed if any."""
    cells = describe_columns(silo, columns, min_count)
    told = {
        name: asdict(cell)
        for name, cell in cells.items()
        # By its whole name, that of its argument, or its own in a DataFrame.
        if not allowed or {name, argument_of(name), name.rpartition(".")[2]} & set(allowed)
    }
    return write({}, {COLUMNS: json.dumps(told)})


def _read_description(silo: int, reply: bytes) -> dict[str, ColumnAtSilo]:
    """Return the columns in a silo's reply, once they are described as columns are."""
    try:
        found = json.loads(read(reply).head[COLUMNS])
        return {name: ColumnAtSilo.read(cell) for name, cell in found.items()}
    except (AttributeError, DataError, LookupError, TypeError, ValueError) as error:
        words = "has no descriptions of columns. Is it of another version?"
        raise ReplyError(words, silo=silo, exchange=DESCRIBE_COLUMNS) from error


def _read_names(
    silo: int, reply: bytes, columns: Sequence[str], other: str
) -> dict[str, tuple[str, ...]]:
    """Return the names of levels in a silo's reply, once they are those of the columns."""
    try:
        head = read(reply).head
        found = json.loads(head[NAMES])
        names = {c: tuple(found[c]) for c in columns}
        texts = [name for column in found.values() for name in column]
        lists = all(isinstance(column, list) for column in found.values())
        if not lists or not all(isinstance(name, str) for name in texts):
            raise ValueError
        # A silo of an earlier version does not say that it leaves rarer levels unnamed.
        if set(found) != set(columns) or head[REST] != other:
            raise ValueError
    # Whatever another party may have written there.
    except (AttributeError, DataError, LookupError, TypeError, ValueError) as error:
        words = f"has no names of levels of {list(columns)}. Is it of another version?"
        raise ReplyError(words, silo=silo, exchange=LEVELS) from error
    return names


def _read_moments(silo: int, reply: bytes, arguments: Sequence[str] | None) -> Scaling:
    """Return the moments in a silo's reply, once they are such as columns can have."""
    try:
        head, arrays = read(reply)
        kinds: dict[str, Numbers] = {"mean": {}, "sd": {}, "count": {}}
        for label, array in arrays.items():
            kind, _, name = label.partition("/")
            kinds[kind][name] = array
        mean, sd, count = kinds.values()
        columns = {str(k): tuple(map(str, v)) for k, v in json.loads(head[COLUMNS]).items()}
        # In the order of the question: that of a message is another one.
        names = sorted(mean) if arguments is None else list(arguments)
        if not all(set(found) == set(names) for found in kinds.values()):
            raise ValueError
        for m, s, n in ((mean[name], sd[name], count[name]) for name in names):
            shapes = m.ndim <= 1 and m.shape == s.shape == n.shape
            dtypes = m.dtype == s.dtype == np.float64 and n.dtype.kind == "i"
            finite = shapes and dtypes and np.isfinite(m).all() and np.isfinite(s).all()
            if not (finite and (s >= 0).all() and (n >= 0).all()):
                raise ValueError
    except (AttributeError, DataError, LookupError, TypeError, ValueError) as error:
        words = "has no means, sds and counts of the columns. Is it of another version?"
        raise ReplyError(words, silo=silo, exchange=MOMENTS) from error
    mean, sd, count = ({n: found[n] for n in names} for found in (mean, sd, count))
    return Scaling(mean, sd, count, columns)
