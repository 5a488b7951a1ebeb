"""The base class of all methods, whose silos hold rows or columns, and methods as JSON.

The class runs rounds, and loads. As JSON a method stands in files of fits, and in messages to silos
elsewhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import jax
from jax import Array

from numpyro_fed import guides, local
from numpyro_fed.basics.errors import (
    CallbackError,
    DataError,
    Interrupted,
    ModelError,
    NonFiniteError,
    SavedStateError,
    one_of,
    positive_int,
)
from numpyro_fed.guides import objectives
from numpyro_fed.methods.start import Begun
from numpyro_fed.numerics import divergences, losses
from numpyro_fed.posterior.at_silo import AtSilo
from numpyro_fed.posterior.built import Built, CompiledMethod
from numpyro_fed.posterior.run import FederatedRun
from numpyro_fed.posterior.saving import MethodSpec, load_state
from numpyro_fed.privacy import budget
from numpyro_fed.rounds import schedules
from numpyro_fed.rounds.compiled_loop import compiled_runtime
from numpyro_fed.rounds.exchange import FederatedAlgorithm
from numpyro_fed.rounds.federation import Federation
from numpyro_fed.rounds.messages import BEGIN, SEARCH
from numpyro_fed.rounds.plain_loop import plain_runtime
from numpyro_fed.rounds.progress import Progress
from numpyro_fed.rounds.remote import Channel, Weights, remote_runtime
from numpyro_fed.rounds.runtime import RunOutcome, Runtime, run_rounds
from numpyro_fed.rounds.schedules import Schedule
from numpyro_fed.rounds.silos import Silos
from numpyro_fed.text.fingerprint import source_hash
from numpyro_fed.text.plan import Plan

RUNTIMES: dict[str, Callable[..., Runtime]] = {
    "simulation": compiled_runtime,
    "quick": partial(compiled_runtime, quick=True),
    "host": plain_runtime,
}


class PlanSize(NamedTuple):
    """The size of a plan, as a silo's owner sees it."""

    num_silos: int
    num_rows: int  # the rows of this silo
    num_parameters: int  # globals and shared parameters, or a client's own latents
    delta: float = 0.0  # the probability with which the bound of a budget of privacy may fail
    # The noise multiplier of a Gaussian release that tells as much as all exchanges of a run; 0 for
    # a method without a budget.
    multiplier: float = 0.0
    # The unit that the budget is for, and which data are neighbours: ``"row add"``.
    protects: str = ""
    # Whether a silo's reply has a share of the noise alone, so that it must be seen in a sum over
    # all silos.
    shares_noise: bool = False


Outcome = TypeVar("Outcome", bound=FederatedRun)
AnyMethod = TypeVar("AnyMethod", bound="FederatedMethod[Any]")


@dataclass(frozen=True)
class RunOptions(Generic[Outcome]):
    """The options of a run from its first state on.

    :meth:`SFVI.run` documents the fields under these names.
    """

    num_rounds: int
    progress_bar: bool | Progress
    stop: str | None
    callback: Callable[[Outcome], object] | None = None
    every: int = 100

    def __post_init__(self) -> None:
        if isinstance(self.num_rounds, bool) or self.num_rounds != 0:
            positive_int("num_rounds", self.num_rounds)
        positive_int("every", self.every)
        one_of("stop", self.stop, "converged", None)


@dataclass(frozen=True)
class FederatedMethod(ABC, Generic[Outcome]):
    """A federated method, with its settings in a frozen dataclass."""

    model: Callable[..., Any]

    @property
    def hides_by_noise(self) -> bool:
        """Whether silos hide what they send by noise, drawn with a key that only they know."""
        return False

    @abstractmethod
    def result_of(
        self, run: RunOutcome, compiled: CompiledMethod, hosted: Silos, *, quiet: bool = False
    ) -> Outcome:
        """Return the result of a run; ``run.log`` is None for a loaded one.

        With ``quiet`` there are no warnings, as for a callback in the middle of a run.
        """

    def posterior_at(self, plan: Plan, built: Built, settings: Mapping[str, Any]) -> AtSilo:
        """Return the posterior at a silo; raise an error for parties that hold columns."""
        raise ModelError(
            "a client that holds columns draws its latents with all others: "
            "sample_together(key, n) of the server's result, and then draws() of its Silo."
        )

    def sends_unhidden(self, name: str) -> bool:
        """Return whether an exchange sends, without noise, numbers that noise hides in a run."""
        return False

    def _load_run(
        self, path: str | Path, compiled: CompiledMethod, hosted: Silos, part: str = ""
    ) -> tuple[Outcome, dict[str, Any]]:
        """Return the run ``part`` of a file as a result, and its description in the file."""
        like = compiled.runtime.init(jax.random.key(0), hosted.batches)
        made = compiled.provenance(hosted)
        losses, state, description = load_state(path, compiled.description(), like, made, part)
        return self.result_of(RunOutcome(state, losses, None, None), compiled, hosted), description

    def _run_rounds(
        self, begun: Begun, hosted: Silos, key: Array, options: RunOptions[Outcome]
    ) -> Outcome:
        """Run rounds and return their result, or raise an error that carries it."""
        compiled, start, callback = begun.compiled, begun.start, options.callback

        def call(run: RunOutcome) -> bool:
            shown = self.result_of(run, compiled, hosted, quiet=True)
            shown = replace(shown, start=start, ended=run.ended)
            # Not BaseException: Ctrl-C in a callback ends the run like Ctrl-C elsewhere.
            try:
                return bool(callback and callback(shown))
            except Exception as error:
                raise CallbackError(
                    f"the callback raised {type(error).__name__} after round "
                    f"{int(run.state.round)}: {error}. What it was shown is in the error's "
                    ".result; run(..., init_state=error.result.state) goes on.",
                    result=shown,
                ) from error

        run = run_rounds(
            compiled.runtime,
            key,
            begun.state,
            hosted.batches,
            options.num_rounds,
            options.progress_bar,
            compiled.server_data,
            stop=options.stop is not None,
            callback=None if callback is None else call,
            every=options.every,
        )
        found = self.result_of(run, compiled, hosted, quiet=run.ended == "interrupted")
        result = replace(found, start=start, ended=run.ended)
        if run.ended == "interrupted":
            raise Interrupted(
                f"interrupted; the last finished round is {int(run.state.round)}. What was "
                "computed is in the error's .result: error.result.save(path) keeps it, and "
                "run(..., init_state=error.result.state) goes on.",
                result=result,
            )
        if run.failure is None:
            return result
        # The error of a silo was raised where its reply arrived; it gets the result here.
        if run.refused is not None:
            run.refused.result = result
            raise run.refused
        round_, at = run.failure
        silos = ", ".join(map(str, at))
        raise NonFiniteError(
            f"the bound turned NaN or infinite in round {round_}, at "
            f"{f'silo {silos}' if silos else 'the server'}. The last good state is in the error's "
            ".result. A smaller step, gradient clipping (optax.chain("
            "optax.clip_by_global_norm(10.0), ...)), more particles or float64 usually help; "
            "otherwise look at the data and the supports of the sites there.",
            result=result,
            round=round_,
            silos=at,
        )


def in_process(
    name: str,
    algorithm: FederatedAlgorithm[Any, Any],
    schedule: Schedule | None = None,
    *,
    begin: str = BEGIN,
) -> Runtime:
    """Return the runtime of this process by its name; ``begin`` says for which part of a run."""
    # A search for the mode has some 15 rounds, which take less time than optimising their program.
    if begin == SEARCH and name == "simulation":
        name = "quick"
    return RUNTIMES[name](algorithm, schedule)


def over_federation(
    federation: Federation,
    name: str,
    plan: Plan,
    make: Callable[[Callable[..., Runtime]], CompiledMethod],
    weights: Sequence[Weights] | None = None,
) -> tuple[CompiledMethod, Silos]:
    """Return the fit of a plan at silos elsewhere, who know it by a name; made at its first use.

    ``make`` is given the function that makes runtimes, ``weights`` how many rows silos have.
    """

    def made() -> tuple[CompiledMethod, Silos]:
        channel = Channel(federation, plan.num_silos, weights, name)
        compiled = make(partial(remote_runtime, template=plan.template, channel=channel))
        # Once all is built: where that is refused, silos have built nothing.
        federation.accept(name, plan.to_json())
        return compiled, Silos((), (), channel.batches, federation.silo_names)

    return federation.cached(("fit", name, plan.to_json()), made)


# The classes of settings that are objects. A file may name one of these; nothing else in a file is
# ever called, so that a file from a stranger runs no code.
PARTS = {
    f"{module.__name__.rpartition('.')[2]}.{kind.__name__}": kind
    for module in (divergences, guides, local, losses, objectives, schedules, budget)
    for kind in vars(module).values()
    if isinstance(kind, type)
    and is_dataclass(kind)
    and kind.__module__.startswith(module.__name__)
    and not kind.__name__.startswith("_")
}
NAMES = {kind: name for name, kind in PARTS.items()}
PLAIN = bool, int, float, str, type(None)


class LostError(TypeError):
    """The error for a setting that JSON cannot hold."""


def recipe(method: FederatedMethod[Any], runtime: str) -> MethodSpec:
    """Return the record from which a method can be rebuilt, given its model."""
    settings, lost = {}, []
    for f in fields(method):
        value = getattr(method, f.name)
        is_default = type(value) is type(f.default) and bool(value == f.default)
        if not f.init or f.name == "model" or is_default:
            continue
        try:
            settings[f.name] = encoded(value)
        except LostError:
            lost.append(f.name)
    source = source_hash(method.model)
    return MethodSpec(type(method).__name__, settings, tuple(lost), runtime, source)


def rebuilt(
    kind: Callable[..., AnyMethod], model: Callable[..., Any], settings: Mapping[str, Any]
) -> AnyMethod:
    """Return the method of a recipe's settings."""
    return kind(model, **{name: decoded(value) for name, value in settings.items()})


def name_of(thing: object, names: Mapping[str, Any]) -> str:
    """Return the name by which silos know an object; empty if they know none."""
    return next((name for name, known in names.items() if known is thing), "")


def for_silos(method: FederatedMethod[Any], names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of a method from which silos build the same."""
    model = method_model(method.model, names)
    if name := name_of(method, names):
        return {**model, "named": name}
    spec = recipe(method, "")
    if spec.lost:
        raise DataError(
            f"{spec.method}'s {spec.lost[0]}= cannot be sent to silos in other processes. Give the "
            "method a name that silos know: a variable of the study's file beside the model, or "
            "Federation(names={...}) and Silo(names={...})."
        )
    return {**model, "method": spec.method, "settings": spec.settings}


def method_model(model: Callable[..., Any], names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of a model: the name that silos know, and a hash of its source."""
    name = name_of(model, names) or getattr(model, "__name__", "")
    return {"model": name, "source": source_hash(model)}


def encoded(value: object) -> Any:
    """Return a setting as JSON."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return {"of": "dict", "items": {name: encoded(v) for name, v in value.items()}}
    # Exact types: a subclass, such as a NamedTuple, would come back as another type.
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return {"of": type(value).__name__, "items": [encoded(v) for v in value]}
    if is_dataclass(value) and not isinstance(value, type) and type(value) in NAMES:
        parts = {f.name: encoded(getattr(value, f.name)) for f in fields(value) if f.init}
        return {"of": NAMES[type(value)], "items": parts}
    raise LostError(f"{type(value).__name__} cannot be written down.")


def decoded(stored: object) -> Any:
    """Return a setting from the JSON of :func:`encoded`."""
    if not isinstance(stored, dict):
        return stored
    kind, items = stored["of"], stored["items"]
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(map(decoded, items))
    parts = {name: decoded(value) for name, value in items.items()}
    if kind == "dict":
        return parts
    try:
        return PARTS[kind](**parts)
    except TypeError as error:
        raise SavedStateError(
            f"a setting is {kind}({', '.join(parts)}), which this version of numpyro_fed has not: "
            "use the version that wrote it."
        ) from error
