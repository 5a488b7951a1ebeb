"""``nf.load``: saved draws and verdicts without the model, or the whole fit with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array

from numpyro_fed.after.arviz import Coords, Dims, Labels, to_arviz
from numpyro_fed.basics import display
from numpyro_fed.basics.errors import SavedStateError, positive_int
from numpyro_fed.basics.files import npz
from numpyro_fed.basics.programs import in_precision_of_object, precision
from numpyro_fed.bayes_admm.method import BayesADMM
from numpyro_fed.data.silo_data import read_all
from numpyro_fed.dp_newton.method import DPNewton
from numpyro_fed.fedlap.method import FedLap
from numpyro_fed.fitting.fit import MAX_EXCHANGES, FitCall
from numpyro_fed.methods.method import rebuilt
from numpyro_fed.methods.row_method import RowMethod
from numpyro_fed.posterior.corrected import Corrected
from numpyro_fed.posterior.particles import Particles
from numpyro_fed.posterior.posterior import Posterior, Stage
from numpyro_fed.posterior.result import Result
from numpyro_fed.posterior.saving import DRAWS, WEIGHTS, read
from numpyro_fed.posterior.verdict import TOLERANCE
from numpyro_fed.pvi.method import PVI
from numpyro_fed.search.mode import LocalMode
from numpyro_fed.sfvi.method import SFVI, SFVIAvg
from numpyro_fed.weigh.weights import systematic_resample

METHODS: dict[str, type[RowMethod[Any, Any]]] = {
    kind.__name__: kind for kind in (PVI, SFVI, SFVIAvg, DPNewton, BayesADMM, FedLap)
}
NO_VERDICT = "Saved by an earlier release, which kept no verdict."


@dataclass(frozen=True, eq=False)
class Saved:
    """The part of a saved fit that can be read without the model and the data.

    Attributes
    ----------
    kind : str
        The class that was saved: ``"Corrected"``, ``"PVIResult"``, ...
    verdict : str
        The verdict of the fit.
    trusted : bool or None
        Whether means and sds of the globals are right to a tenth of an sd; None if nothing has
        checked it, as for a run without its correction.
    draws : dict of str to array
        Draws of the globals, ``(n, *shape)``, on their supports, with the dtypes of the file,
        to be weighted by ``weights``. For a run they are those of ``result.save(path, draws=n)``.
    weights : (n,) array
    log_evidence, ess, pareto_k : float or None
        Those of :class:`Corrected`; None without a correction.
    stages : tuple of Stage
        Names and words of the steps of :func:`numpyro_fed.fit`.
    losses : (rounds,) array
        The losses of the run.
    settings : dict
        The settings of the run, in words.
    report : str
        The verdict of the correction alone, where there is one.
    double : bool
        Whether the fit was made in double precision.
    """

    kind: str
    verdict: str
    trusted: bool | None
    draws: dict[str, np.ndarray] = field(repr=False)
    weights: np.ndarray = field(repr=False)
    log_evidence: float | None
    ess: float | None
    pareto_k: float | None
    stages: tuple[Stage, ...] = field(repr=False)
    losses: np.ndarray = field(repr=False)
    settings: dict[str, Any] = field(repr=False)
    report: str = field(repr=False)
    double: bool

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray], saved: Mapping[str, Any]) -> Saved:
        """Return the saved fit from the arrays and the description of a file."""
        words = saved.get("words", {})
        sites = (name for name in arrays if name.startswith(DRAWS))
        return cls(
            kind=saved.get("kind", "Result"),
            verdict=words.get("verdict", NO_VERDICT),
            trusted=words.get("trusted"),
            draws={name.removeprefix(DRAWS): arrays[name] for name in sites},
            weights=arrays.get(WEIGHTS, np.zeros(0)),
            log_evidence=words.get("log_evidence"),
            ess=words.get("ess"),
            pareto_k=words.get("pareto_k"),
            stages=stages_of(words),
            losses=arrays["losses"],
            settings=dict(saved["settings"]),
            report=words.get("report", words.get("verdict", NO_VERDICT)),
            double=is_double(arrays),
        )

    def __getattr__(self, name: str) -> Any:
        more = ""
        if hasattr(Posterior, name):
            more = " Load it with its model and data: nf.load(path, model, silos)."
        raise AttributeError(f"'Saved' object has no attribute '{name}'.{more}")

    @in_precision_of_object
    def sample_posterior(self, key: Array, n: int) -> dict[str, np.ndarray]:
        """Return draws of the globals, resampled from the draws of the file by their weights.

        With a reliable correction these are the draws that the fit itself makes with the same key.
        Otherwise there are only as many different draws as the file has.

        Parameters
        ----------
        key : jax.Array
        n : int
            Number of draws, the leading axis of every site.
        """
        positive_int("n", n)
        if not len(self.weights):
            raise SavedStateError(
                f"no draws were saved with this {self.kind}: save it by save(path, draws=4_000), "
                "or load it with its model and silos."
            )
        # The same fold as in Corrected.sample_posterior, so that the same key gives the same draws.
        key = jax.random.fold_in(key, 0)
        chosen = systematic_resample(key, self.weights, n)
        return {site: values[chosen] for site, values in self.draws.items()}

    def to_arviz(
        self,
        key: Array | None = None,
        num_samples: int = 1_000,
        *,
        coords: Coords | None = None,
        dims: Dims | None = None,
    ) -> Any:
        """Return posterior draws as an ArviZ object, like :meth:`Posterior.to_arviz` of the fit."""
        attributes: dict[str, float | str] = {"verdict": self.verdict}
        if self.ess is not None and self.pareto_k is not None:
            attributes |= {"ess": self.ess, "pareto_k": self.pareto_k}
        worth = 1 / (self.weights**2).sum() if len(self.weights) else 0.0
        return to_arviz(
            self.sample_posterior,
            key,
            num_samples,
            worth=worth,
            attributes=attributes,
            labels=Labels.of(coords, dims),
        )

    def __str__(self) -> str:
        return self.verdict

    def _repr_html_(self) -> str:
        return display.html_words(self.verdict)


def load(
    path: str | Path,
    model: Callable[..., Any] | None = None,
    silos: Sequence[Mapping[str, Any]] | None = None,
) -> Any:
    """Return a fit that ``save`` of a :class:`Posterior` wrote.

    Parameters
    ----------
    path : str or Path
        The same path as was given to ``save``.
    model : callable, optional
    silos : list of dict, optional
        With both, ``load`` returns the saved object itself, for locals of a silo, corrections and
        ``run(..., init_state=)``. They must be the model and the data of the fit.

    Returns
    -------
    Saved, or Posterior
        Without model and silos: draws of the globals, weights and verdict. What ``nf.fit`` led to
        has the names and words of its ``stages``.

    Raises
    ------
    SavedStateError
        If the file is missing or damaged, belongs to another model or other silos, or to a method
        whose settings no file can hold (an optimiser): then its ``load`` reads it.

    Examples
    --------
    >>> import jax, numpy as np, numpyro, numpyro.distributions as dist, tempfile
    >>> import numpyro_fed as nf
    >>> def model(y):
    ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
    ...     with nf.silo_plate("row", y.shape[0]):
    ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y)
    >>> silos = [dict(y=np.array([1.0, 2.0])), dict(y=np.array([3.0, 4.0, 5.0]))]
    >>> result = nf.PVI(model).run(jax.random.key(0), 1, silos, progress_bar=False)
    >>> path = f"{tempfile.mkdtemp()}/fit"
    >>> nf.importance_correct(jax.random.key(1), result).save(path)
    >>> saved = nf.load(path)
    >>> saved.trusted, saved.sample_posterior(jax.random.key(2), 5)["mu"].shape
    (True, (5,))
    >>> again = nf.load(path, model, silos)
    >>> bool((again.weights == saved.weights).all()), bool(again.result.losses == result.losses)
    (True, True)
    """
    arrays, saved = read(path)
    if model is None and silos is None:
        return Saved.of(arrays, saved)
    if model is None or silos is None:
        missing = "model" if model is None else "silos"
        raise TypeError(f"give model and silos, or neither of them: {missing}= is missing.")
    # In the precision of the fit: its state would not fit a program of another one.
    with precision(double=is_double(arrays)):
        read_silos, methods = read_all(silos, model), dict[str, RowMethod[Any, Any]]()

        def run_of(part: str) -> Result:
            """Return a run of the file; those with equal settings share a method."""
            described = saved["others"][part] if part else saved
            key = json.dumps(described.get("recipe"), sort_keys=True)
            if key not in methods:
                methods[key] = _method_of(path, described, model)
            return methods[key].load_part(path, read_silos, described["recipe"]["runtime"], part)

        words = saved.get("words", {})
        run = replace(run_of(""), remarks=words.get("remarks", ""))
        corrected: Corrected | None = None
        if "inner_draws" in words:
            kind = Particles if "reached" in words else Corrected
            corrected = kind.from_file(run, arrays, words)
        if "stages" not in words:
            return run if corrected is None else corrected
        others = {part: run_of(part) for part in saved["others"]}
        accuracy = words.get("accuracy", TOLERANCE)
        # Names are "missed/<number>/<field>", as Posterior.save writes them.
        numbers = sorted({int(name.split("/")[1]) for name in arrays if name.startswith("missed/")})
        peaks: list[Any] = [[arrays[f"missed/{i}/{k}"] for k in LocalMode._fields] for i in numbers]
        fields = dict(words["fields"])
        steps = {
            "_sent": fields.pop("num_exchanges"),
            "stages": stages_of(words),
            "missed": tuple(
                LocalMode(z_G, shape, float(evidence)) for z_G, shape, evidence in peaks
            ),
            "call": FitCall(model, silos, accuracy, MAX_EXCHANGES, is_double(arrays), False),
            **fields,
        }
        checked = None if corrected is None else replace(corrected, **steps)
        if checked is not None and words["is_best"]:
            return checked
        why_not = "the fit could not be checked"
        return replace(others.get("best", run), _checked=checked or why_not, **steps)


def _method_of(
    path: str | Path, described: Mapping[str, Any], model: Callable[..., Any]
) -> RowMethod[Any, Any]:
    """Return the method of a run in a file, if the file holds all of its settings."""
    recipe, name = described.get("recipe") or {}, described["settings"]["method"]
    why = ""
    if recipe.get("method") not in METHODS:
        why = "that nf.load reads without model and silos only"
    elif recipe["lost"]:
        settings = " and ".join(f"{setting}=" for setting in recipe["lost"])
        why = f"with {settings} of its own, which no file can hold"
    if why:
        raise SavedStateError(
            f"{npz(path)} holds a fit by {name} {why}: build the method as it was and use "
            f"{name}(model, ...).load(path, ...)."
        )
    return rebuilt(METHODS[recipe["method"]], model, recipe["settings"])


def stages_of(words: Mapping[str, Any]) -> tuple[Stage, ...]:
    """Return the stages of a file, without their results."""
    return tuple(Stage(name, described, None) for name, described in words.get("stages", ()))


def is_double(arrays: Mapping[str, np.ndarray]) -> bool:
    """Return whether a saved state is in double precision."""
    return any(a.dtype == np.float64 and name.startswith("state") for name, a in arrays.items())
