"""Checks of a study's file, of a silo's data, and of whether they belong together.

Lines about data have types and counts, never values, and are for the site alone.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from numpyro_fed.basics.errors import DataError, GuideError, ModelError
from numpyro_fed.basics.programs import precision
from numpyro_fed.data.tables import as_series, columns_of, is_frame, model_arguments
from numpyro_fed.methods.method import FederatedMethod, PlanSize
from numpyro_fed.network.check import OK, WARNING, WRONG, Check, place_of
from numpyro_fed.network.guarded_data import GuardedData
from numpyro_fed.network.policy import Policy
from numpyro_fed.network.study_files import data_of, load_study, names_of
from numpyro_fed.text.plan import describe

# Errors whose words hold no values of rows: a silo says them to its server, too.
TOLD = ModelError, DataError, GuideError


def check_study(file: Path) -> Generator[Check, None, ModuleType | None]:
    """Yield whether a study can be loaded, with its hash; return its module."""
    try:
        study, hashed = load_study(file)
    # Whatever a user's file raises. A study has no data, so that its words may be said.
    except Exception as error:
        yield Check("study", WRONG, f"{file} cannot be loaded: {error} ({place_of(error)}).")
        return None
    names = [name for name, value in names_of(study).items() if callable(value)]
    words = f"hash {hashed}, which all parties must have; functions {', '.join(names) or 'none'}"
    yield Check("study", OK, words)
    if not names:
        yield Check("study", WRONG, f"{file} has no model, so that no silo can be asked for one.")
    if not callable(getattr(study, "main", None)):
        yield Check("study", WARNING, f"{file} has no main(silos), which the analyst runs.")
    return study


def check_data(where: str, policy: Policy) -> Generator[Check, None, Any]:
    """Yield a line for each column of the data, and what the policy says of them; return them."""
    name = "data"
    try:
        data = data_of(where)
    except OSError as error:
        yield Check(name, WRONG, f"{where} raised {error.strerror}: {error.filename}.")
        return None
    # What a user's function raises may have values of rows in its words.
    except Exception as error:
        told = type(error) is ModelError
        words = str(error) if told else f"{where} raised {place_of(error)}. Call it by hand."
        yield Check(name, WRONG, words)
        return None
    if not (isinstance(data, Mapping) or is_frame(data)):
        words = f"{where} returned a {type(data).__name__}"
        yield Check(name, WRONG, f"{words}, where a dict or a DataFrame was expected.")
        return None
    for column, value in leaves_of("", data):
        yield described(column, value)
    try:
        table = GuardedData(data, policy)
    except DataError as error:
        yield Check(name, WRONG, f"the policy's column of persons: {error}")
        return data
    yield compared(table.num_rows, policy.min_rows, "rows", "min_rows")
    if policy.person is not None or policy.min_persons:
        yield compared(table.num_persons, policy.min_persons, "persons", "min_persons")
    return data


def arguments_of(data: Any) -> Mapping[str, Any]:
    """Return the arguments of a silo's data, which may be a DataFrame of them."""
    return data if isinstance(data, Mapping) else columns_of("the data", data)


def leaves_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the columns of data, those of DataFrames and of dicts in them as well."""
    if isinstance(value, Mapping) or is_frame(value):
        for part, inner in arguments_of(value).items():
            yield from leaves_of(f"{name}.{part}" if name else str(part), inner)
    else:
        yield name, value


def described(name: str, value: Any) -> Check:
    """Return the type of a column, and how many levels and missing values it has."""
    series = as_series(value)
    array = np.asarray(value if series is None else series.drop_nulls().to_numpy())
    missing = 0 if series is None else series.null_count()
    total = array.size + missing
    if array.dtype.kind == "O":  # the NA of pandas is neither equal nor unequal to itself
        gone = np.array([v is None or (v != v) is not False for v in array.ravel()], bool)
    else:
        gone = np.isnan(array).ravel() if array.dtype.kind in "fc" else np.zeros(array.size, bool)
    missing += int(gone.sum())
    shape = " x ".join(map(str, np.shape(array))) if series is None else str(total)
    words = f"{array.dtype if series is None else series.dtype}, {shape or 'one'}"
    if array.dtype.kind not in "fc":
        words += f", {len(set(array.ravel()[~gone].tolist()))} levels"
    state = WARNING if total and missing == total else OK
    return Check("data", state, f"'{name}': {words}, {missing} missing")


def compared(number: int, least: int, what: str, rule: str) -> Check:
    """Return whether there are as many rows or persons as a policy asks for."""
    if number >= least:
        return Check("data", OK, f"{number} {what}; {rule} of the policy is {least}")
    words = f"{number} {what} are fewer than {rule} of the policy ({least})"
    return Check("data", WRONG, f"{words}: the silo would refuse every plan.")


def check_models(study: ModuleType, data: Any, policy: Policy) -> Generator[Check, None, None]:
    """Yield for each model whose arguments the data are what it says of them."""
    given, name, unfit, failed = set(arguments_of(data)), "model", [], []
    any_fits = False
    for text, value in names_of(study).items():
        if not callable(value) or isinstance(value, FederatedMethod):
            continue
        known = model_arguments(value)
        lacking = [n for n, needed in (known or {}).items() if needed and n not in given]
        strange = sorted(given - set(known)) if known is not None else []
        if lacking or strange:
            why = [f"the data lack {lacking}"] * bool(lacking)
            why += [f"they have {strange}, which are no arguments of it"] * bool(strange)
            unfit.append(f"{text}: {', and '.join(why)}")
            continue
        try:
            yield Check(name, OK, f"{text} {traced(value, data, policy)}")
            any_fits = True
        except TOLD as error:
            failed.append(f"{text}: {error}".replace("silo 0", "this silo"))
        # NumPyro and JAX have errors of many kinds, with values in some.
        except Exception as error:
            failed.append(f"{text} cannot be traced on the data: {place_of(error)}.")
    # What is no model, such as a function that models call, may fail where a model is right.
    for words in failed:
        yield Check(name, WARNING if any_fits else WRONG, words)
    if not any_fits and not failed:
        of_columns = "client_sum" in inspect.getsource(study)
        words = f"no model takes these data as they are. {'; '.join(unfit) or 'There is none'}."
        hint = " In a study of columns a client has those of its part alone." if of_columns else ""
        yield Check(name, WARNING if of_columns else WRONG, words + hint)


def traced(model: Any, data: Any, policy: Policy) -> str:
    """Return what a model says of the data, once; raise an error where a silo would refuse it."""
    with precision(double=True):  # as nf.fit asks
        facts = describe(model, data)
    columns = [column for _, names in facts.columns for column in names]
    policy.check_columns([argument.name for argument in facts.arguments] + columns)
    shared = [s for s in facts.sites if s.kind in ("latent", "param") and s.plate is None]
    number = sum(math.prod(s.shape) for s in shared)
    rows = GuardedData(data, policy).num_rows
    policy.check_plan(PlanSize(policy.min_silos, rows, number))
    missing = f"; outcomes are missing in {list(facts.missing)}" if facts.missing else ""
    return f"fits the data: {number} globals and shared parameters{missing}"
