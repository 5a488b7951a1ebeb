"""The posterior: draws of a model's latents, whether to trust them, and all that can be asked.

Whatever found it, it is one class, with a subclass for each way in which the globals are drawn:
:class:`numpyro_fed.Result` from a fitted guide, ``Corrected`` by weights, ``Particles`` evenly,
``NutsResult`` from chains. :func:`numpyro_fed.fit` returns the best one that it reached,
with the steps that led there.
"""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.after.arviz import Coords, Dims, Labels, groups_to_arviz
from numpyro_fed.after.own_rows import WhichSilo, silo_number
from numpyro_fed.after.summary import Columns, FunctionsOfDraws
from numpyro_fed.basics import display
from numpyro_fed.basics.errors import DataError, ModelError, positive_int
from numpyro_fed.basics.programs import in_precision_of_object, jit_once, precision
from numpyro_fed.data.silo_data import names_or_numbers
from numpyro_fed.guides.guide import GlobalDraws
from numpyro_fed.posterior.averages import AveragesOverRows
from numpyro_fed.posterior.sampler import Sampler
from numpyro_fed.posterior.saving import SavedRun, SavedWords, save
from numpyro_fed.posterior.verdict import Doubt, Verdict
from numpyro_fed.privacy.budget import Spent
from numpyro_fed.rounds.federation import Federation
from numpyro_fed.rounds.messages import DRAWS, Question, at_silo, pack, write
from numpyro_fed.rounds.progress import shows
from numpyro_fed.search.mode import LocalMode, Mode
from numpyro_fed.text.row_checks import refuse_coupled_rows
from numpyro_fed.weigh.log_likelihoods import log_likelihoods_of_rows, plates_of_rows


class Stage(NamedTuple):
    """A step of a call: its name, its outcome in words, and its result."""

    name: str
    words: str
    result: Any

    def __repr__(self) -> str:
        return f"Stage(name={self.name!r}, words={self.words!r})"


@dataclass(frozen=True, eq=False)
class Posterior(AveragesOverRows, FunctionsOfDraws):
    """A posterior of a model whose silos hold rows, with a verdict, and what can be asked of it.

    Attributes
    ----------
    stages : tuple of Stage
        The steps of :func:`numpyro_fed.fit` that led here, with their results; empty for a
        posterior of another method.
    missed : tuple of LocalMode
        Other modes that the search has found, with a share of the mass, which the draws do not
        reach.
    contradiction : str
        Which silo contradicts the others, in words, if that was seen at the mode: of silos in this
        process, with more than twice as many rows as globals.
    remarks : str
        Which silos had no say, or not always, and which have other versions of libraries, in words.
    interrupted : bool
        Whether Ctrl-C has ended the call; then this holds what was reached by then.
    privacy : Spent or None
        What was spent of a budget of differential privacy; None without one.
    call : optional
        The call of :func:`numpyro_fed.fit` that made it; None for one that was loaded without its
        data.
    """

    stages: tuple[Stage, ...] = field(default=(), repr=False, kw_only=True)
    missed: tuple[LocalMode, ...] = field(default=(), repr=False, kw_only=True)
    contradiction: str = field(default="", repr=False, kw_only=True)
    remarks: str = field(default="", repr=False, kw_only=True)
    interrupted: bool = field(default=False, repr=False, kw_only=True)
    privacy: Spent | None = field(default=None, repr=False, kw_only=True)
    call: Any = field(default=None, repr=False, kw_only=True)
    _sent: int = field(default=0, repr=False, kw_only=True)

    @property
    def silo_names(self) -> tuple[str, ...]:
        """Return the names of silos, or their numbers as text if they have no names."""
        return names_or_numbers(self.run_behind._silos.names, self.run_behind.num_silos)

    @property
    def num_exchanges(self) -> int:
        """Return the number of messages that each silo sent for it, about."""
        return self._sent

    @property
    @abstractmethod
    def sampler(self) -> Sampler:
        """Return the functions by which locals are drawn."""

    @property
    def trusted(self) -> bool:
        """Whether the globals, as their user sees them, are right to the accuracy asked for.

        That holds for quantiles, and for means and sds that exist; :attr:`verdict` names those that
        do not.
        """
        return self.full_verdict.trusted

    @property
    def corrected(self) -> Any:
        """Return the weighted draws by which it is judged, or None."""
        return None if isinstance(self.correction, str) else self.correction

    @property
    def mode(self) -> Mode | None:
        """Return the mode at which the first fit began, if it began at one."""
        runs = [stage.result for stage in self.stages] or [self.run_behind]
        starts = [getattr(run, "start", None) for run in runs]
        return next((start for start in starts if isinstance(start, Mode)), None)

    @property
    def shows_progress(self) -> bool:
        """Return whether a call of more than two seconds shows that it goes on."""
        return self.call is None or self.call.progress_bar

    @property
    def verdict(self) -> str:
        """Return in words whether to trust the posterior, what error is left, and what was done."""
        words = self.verdict_in_words
        remarks = "" if self.remarks in words else self.remarks  # of a run, whose report has them
        return " ".join(filter(None, (words, remarks, self.contradiction, self._account())))

    @property
    def known_doubt(self) -> str:
        """Return why no answer is to be trusted; empty if nothing is known without an exchange."""
        return self.verdict_in_words if self.stages and not self.trusted else ""

    @property
    def verdict_in_words(self) -> str:
        """Return in words whether to trust the posterior."""
        return str(self.full_verdict)

    @property
    def full_verdict(self) -> Verdict:
        """Return the verdict on the weighted draws, and on what the search has found or left."""
        correction = self.correction
        if isinstance(correction, str):
            why = "the fit was interrupted" if self.interrupted else "it could not be checked"
            more = "NUTS on pooled data (run_nuts), where that is allowed, would show it."
            return Verdict((Doubt(why, f"What follows says more; {more}"),))
        verdict: Verdict = correction.draws_verdict
        if self.interrupted:
            gravest = Doubt("the fit was interrupted before its check was done")
        elif self.missed:
            gravest = Doubt(
                f"it is that around one of {1 + len(self.missed)} modes that the search has found, "
                "and others hold about as much of the mass",
                "A prior or a constraint that tells them apart (a sign, an order) leaves one; "
                ".missed has the others.",
            )
        else:
            return verdict
        return replace(verdict, doubts=(gravest, *verdict.doubts), enough_draws=True)

    def _account(self) -> str:
        """Return in words what was done, and which sites are in no draws."""
        taken = "; ".join(f"{stage.name}: {stage.words}" for stage in self.stages)
        done = f"{self.num_exchanges} exchanges. {taken}." if taken else ""
        found = [s for s in self.run_behind._fit.model.sites if s.kind == "param"]
        if not found:
            return done
        names = ", ".join(f"'{s.name}'" for s in found)
        where = dict.fromkeys(".params" if s.plate is None else ".silo_params(j)" for s in found)
        one, several = ("is a parameter", "a point estimate"), ("are parameters", "point estimates")
        kind, estimate = one if len(found) == 1 else several
        return (
            f"{done} {names} {kind} without a prior (numpyro.param): {estimate} without "
            f"uncertainty, in {' and '.join(where)}, and in no draws."
        ).lstrip()

    @property
    def params(self) -> dict[str, Any]:
        """Return parameters without a prior (``numpyro.param``), on their supports.

        They are point estimates that all silos share, and are in no draws; the posterior is that
        at these values.
        """
        return {name: value for name, value in self.run_behind.params.items() if name != "guide"}

    def silo_params(self, silo: int | str) -> dict[str, Any]:
        """Return a silo's private parameters without a prior, on their supports.

        Raises
        ------
        DataError
            For a silo in another process, whose parameters are its own.
        """
        found = self.run_behind.silo_params(silo)
        return {name: value for name, value in found.items() if name != "guide"}

    @shows("draw")
    def to_arviz(
        self,
        key: Array | None = None,
        num_samples: int = 1_000,
        *,
        silo: WhichSilo | None = None,
        groups: Sequence[str] | str = (),
        coords: Coords | None = None,
        dims: Dims | None = None,
    ) -> Any:
        """Return posterior draws as an ArviZ object.

        It is a ``DataTree``, or an ``InferenceData`` before ArviZ 1. There are at most as many
        draws as weighted draws are worth, so that ``arviz.ess`` is about true; draws of a guide are
        independent. The group ``posterior`` has the attribute ``verdict``, and of weighted draws
        ``ess`` and ``pareto_k``. Needs the extra ``examples``.

        Parameters
        ----------
        key : jax.Array, optional
        num_samples : int
        silo : int, list of int, or "all", optional
            As in :meth:`sample_posterior`. A latent of a silo plate has an axis with the plate's
            name, and its rows are numbered over all silos: effects of hospitals have the numbers of
            these.
        groups : list of str, or "all", optional
            Further groups: ``"prior"``, ``"posterior_predictive"``, ``"prior_predictive"`` and
            ``"log_likelihood"`` of the rows of all silos side by side, ``"log_prior"``,
            ``"observed_data"``, and ``"constant_data"`` with the number of each row's silo. Only
            ``"prior"`` and ``"log_prior"`` are known without the silos' rows in this process.
            ``"all"`` has every group that can be had, and so the rows themselves if they are here;
            one that would be refused (log likelihoods of rows that read each other's latents, draws
            from a flat prior, rows in other processes) is left out without a word.
        coords : dict of str to list, optional
            The names of the elements along an axis, as for ``arviz.from_numpyro``:
            ``coords={"city": levels["city"]}``.
        dims : dict of str to list of str, optional
            The names of the axes of a variable, without those of chains and draws, in all groups
            that have it: ``dims={"of_city": ["city"]}``. Names of no variable are ignored. The axis
            of a silo plate comes first, and is named, too: ``dims={"u": ["hospital", "effect"]}``.

        Raises
        ------
        ValueError
            For groups that are not known, and names that do not fit the shape of a variable.

        Notes
        -----
        Rows run along the axis ``"row"``, the first one of an outcome; where outcomes are of
        several silo plates, along axes with the names of these, and the numbers of silos are
        ``"silo of PLATE"``. Other plates around an outcome name their axes, too. ArviZ takes no
        axis with the name of a variable: such an axis, and its ``coords``, get ``"_dim"``, and so
        do axes of rows that have the name of an argument.

        Examples
        --------
        >>> import jax, numpy as np, numpyro, numpyro.distributions as dist
        >>> import numpyro_fed as nf
        >>> def model(city, y=None):
        ...     of_city = numpyro.sample("of_city", dist.Normal(0, 10).expand([2]).to_event(1))
        ...     with nf.silo_plate("row", len(y)):
        ...         numpyro.sample("y", dist.Normal(of_city[city], 1), obs=y)
        >>> silos = [dict(city=np.array([0, 1, 1]), y=np.array([1.0, 4.0, y])) for y in (3.0, 5.0)]
        >>> fitted = nf.fit(jax.random.key(0), model, silos, progress_bar=False)
        >>> data = fitted.to_arviz(groups="all", dims={"of_city": ["city"]},
        ...                        coords={"city": ["Basel", "Bern"]})
        >>> data["posterior"]["of_city"].sel(city="Bern").mean().round().item()
        4.0
        >>> data["log_likelihood"]["y"].dims
        ('chain', 'draw', 'row')
        """
        worth, attributes = self._for_arviz
        return groups_to_arviz(
            self,
            key,
            num_samples,
            silo=silo,
            groups=groups,
            labels=Labels.of(coords, dims),
            worth=worth,
            attributes=attributes,
        )

    @property
    def _for_arviz(self) -> tuple[float, dict[str, float | str]]:
        """Return how many independent draws it is worth, at most, and attributes for ArviZ."""
        if not self.stages:
            return math.inf, {}
        known = {} if isinstance(self.correction, str) else self.correction.attributes
        return math.inf, {**known, "verdict": self.verdict}

    def log_likelihoods(self, key: Array, n: int) -> list[dict[str, np.ndarray]]:
        """Return log likelihoods {plate: (n, rows)} of silos at the draws of that key and ``n``.

        Latents of rows are integrated out; those of outer plates (a hospital's effect) are drawn at
        each draw of the globals.
        """
        correction = self.correction
        if isinstance(correction, str):
            raise ModelError(f"log likelihoods of rows are not known: {correction}.")
        run, fit, integration = self.run_behind, self.run_behind._fit, correction.integration
        z_G = self.unconstrained(key, n)
        refuse_coupled_rows(fit.checks, run._silos.buckets, "log likelihoods of rows need")
        likelihood = integration.likelihood(fit.model, fit.guide)
        size = fit.batch_size(integration, n)
        values = fit.cached(
            ("rows", n, str(integration)),
            lambda: jit_once(
                partial(log_likelihoods_of_rows, fit.model, likelihood, fit.algorithm, size)
            ),
        )
        down = GlobalDraws.of(fit.guide, run.shared, jnp.asarray(z_G))
        parts = []
        for j in range(run.num_silos):
            data = run._silos.at(j, [batch.data for batch in run._silos.batches])
            key_silo, state = jax.random.fold_in(key, j), run._silo_state(j)
            found, counts = jax.block_until_ready(values(key_silo, down, state, data))
            by_plate, first = {}, 0
            for plate in plates_of_rows(fit.model):
                rows = slice(first, first := first + fit.model.sizes(data)[plate])
                by_plate[plate] = np.asarray(found)[:, rows][:, np.asarray(counts)[rows]]
            parts.append(by_plate)
        return parts

    @shows("draw")
    @in_precision_of_object
    def to_frame(
        self,
        key: Array | None = None,
        num_samples: int = 4_000,
        *,
        silo: WhichSilo | None = None,
        coords: Coords | None = None,
        dims: Dims | None = None,
    ) -> Any:
        """Return posterior draws as a pandas DataFrame, a column for each element.

        Arguments and names are those of :meth:`summary`, which is that of these draws.
        """
        self._warn_of_doubt()
        return self._columns(key, num_samples, silo, Labels.of(coords, dims)).frame()

    @shows("draw")
    @in_precision_of_object
    def summary(
        self,
        key: Array | None = None,
        num_samples: int = 4_000,
        *,
        silo: WhichSilo | None = None,
        prob: float = 0.9,
        coords: Coords | None = None,
        dims: Dims | None = None,
    ) -> Any:
        """Return a pandas DataFrame with a row for each element of the globals.

        Columns are mean, sd, the ends and the middle of the interval of probability ``prob``, and
        the probability to be positive; of weighted draws also the index of the tails, where they
        were looked at. A mean or an sd that does not exist, as under a Cauchy's tails, is NaN
        beside it. That is not known of latents of silos.

        Parameters
        ----------
        key : jax.Array, optional
        num_samples : int
            The number of draws.
        silo : int, str, list of these, or "all", optional
            Latents of these silos, too: an effect of a silo is called by the silo's name.
        prob : float
            The probability of the interval, with as much on either side of it.
        coords : dict of str to list, optional
            The names of the elements along an axis, as for :meth:`to_arviz`.
        dims : dict of str to list of str, optional
            The names of the axes of a site.

        Examples
        --------
        >>> import jax, numpy as np, numpyro, numpyro.distributions as dist
        >>> import numpyro_fed as nf
        >>> def model(ward, y=None):
        ...     of_ward = numpyro.sample("of_ward", dist.Normal(0, 10).expand([2]).to_event(1))
        ...     with nf.silo_plate("row", len(y)):
        ...         numpyro.sample("y", dist.Normal(of_ward[ward], 1), obs=y)
        >>> silos = {
        ...     "Bern": dict(ward=np.array([0, 1, 1]), y=np.array([1.0, 4.0, 5.0])),
        ...     "Chur": dict(ward=np.array([1, 0, 0]), y=np.array([6.0, 2.0, 3.0])),
        ... }
        >>> fitted = nf.fit(jax.random.key(0), model, silos, progress_bar=False)
        >>> names = dict(coords={"ward": ["surgery", "medicine"]}, dims={"of_ward": ["ward"]})
        >>> print(fitted.summary(**names).round(1)[["mean", "sd", "P(> 0)"]])
                           mean   sd  P(> 0)
        of_ward[surgery]    2.0  0.6     1.0
        of_ward[medicine]   5.0  0.6     1.0
        """
        if not 0 < prob < 1:
            raise ValueError(f"prob={prob!r}: expected a number between 0 and 1.")
        self._warn_of_doubt()
        columns = self._columns(key, num_samples, silo, Labels.of(coords, dims))
        # Not the correction of a run, which asks all silos.
        checked = self.corrected if self.stages else None
        return columns.summary(prob, None if checked is None else checked.errors)

    def _columns(
        self, key: Array | None, n: int, silo: WhichSilo | None, labels: Labels
    ) -> Columns:
        """Return draws of all elements, with their names."""
        positive_int("num_samples", n)
        draws = self.sample_posterior(jax.random.key(0) if key is None else key, n, silo=silo)
        return Columns.of(self.run_behind, draws, silo, labels)

    def draws_for_silo(self, key: Array, n: int, *, silo: int | str) -> bytes:
        """Return draws of the globals for a silo in another process, as a message.

        The silo draws its own latents at them, and predicts, by :meth:`numpyro_fed.Silo.predict`.
        With the same key there the numbers are those that
        ``predict(key, new, silo=silo, n=n)`` has in one process. The message is bytes, for a file,
        and holds what the server knows and nothing of any silo.

        Parameters
        ----------
        key : jax.Array
        n : int
            The number of draws.
        silo : int or str
            The silo's number, or its name.

        Returns
        -------
        bytes

        Raises
        ------
        DataError
            For silos in this process, and for a silo that does not exist.
        """
        run, mark = self.run_behind, self.run_behind.mark
        positive_int("n", n)
        if mark is None:
            raise DataError(
                "the silos are in this process: predict(key, new, silo=...) has their latents."
            )
        silo = silo_number(silo, run)
        if not 0 <= silo < run.num_silos:
            raise DataError(f"there is no silo {silo}: they are 0 to {run.num_silos - 1}.")
        with precision(double=run.double):
            down = GlobalDraws.of(run._fit.guide, run.shared, self.unconstrained(key, n))
            settings = json.dumps({"num_draws": n, **self.sampler.settings})
            used, method = int(mark.used[silo]), at_silo(run._fit.asked_as, silo)
            question = Question(DRAWS, settings, mark.run_of(silo), 0, used, method)
            return write(pack("down", down), question.head())

    def add(self, key: Array, silo: Mapping[str, Any] | Federation) -> Posterior:
        """Return a fit of these silos and one more, with a verdict of its own.

        Half of the searches for the mode begin at the modes of this fit, and everything else is
        done anew: it is the posterior of all rows, and no approximate update of this one.

        Parameters
        ----------
        key : jax.Array
        silo : dict, or Federation
            The data of the new silo; under its name, ``{"Chur": data}``, if silos have names. For
            silos in other processes a :class:`Federation` of these,
            in the same order, and of the new one after them.

        Raises
        ------
        DataError
            If the silo's data do not suit the model, or the fit has no data (loaded without them);
            and over secure sums, of which two would tell the new silo's reply.

        Notes
        -----
        Each silo answers as in :func:`numpyro_fed.fit`, in fewer exchanges, and what leaves it is
        the same.

        Examples
        --------
        >>> import jax, numpy as np, numpyro, numpyro.distributions as dist
        >>> import numpyro_fed as nf
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with nf.silo_plate("row", len(y)):
        ...         numpyro.sample("y", dist.Normal(mu, 2), obs=y)
        >>> rng = np.random.default_rng(0)
        >>> silos = [dict(y=rng.normal(m, 2, 20)) for m in (3.0, 3.0, 9.0)]
        >>> fitted = nf.fit(jax.random.key(0), model, silos[:2], progress_bar=False)
        >>> more = fitted.add(jax.random.key(1), silos[2])
        >>> fewer = more.remove(jax.random.key(2), 2)
        >>> [round(float(f.sample_posterior(jax.random.key(3), 4_000)["mu"].mean()))
        ...  for f in (fitted, more, fewer)]
        [3, 5, 3]
        """
        return self._made_again(key, lambda call: call.with_silo(silo))

    def remove(self, key: Array, silo: int | str) -> Posterior:
        """Return a fit without a silo, as if it had never taken part.

        Nothing of the silo is in the new fit: neither its factor nor its likelihood in weights and
        evidence, and the draws are new ones, weighed by the joint density of the others. Only
        half of the searches for the mode begin at the modes of this fit. The silo itself is not
        asked.

        Parameters
        ----------
        key : jax.Array
        silo : int or str
            The silo's number, or its name. The numbers of those after it move up by one.

        Raises
        ------
        DataError
            If there is no such silo, or no other one; if the fit was loaded without data; and over
            secure sums: the sum over all less that over the others would be the silo's reply.
        """
        silo, number = silo_number(silo, self.run_behind), self.run_behind.num_silos
        if not 0 <= silo < number:
            raise DataError(f"there is no silo {silo}: the fit has {number}, from 0 on.")
        if number == 1:
            raise DataError("the only silo cannot be removed: nothing but the prior would be left.")
        return self._made_again(key, lambda call: call.without_silo(silo))

    def _made_again(self, key: Array, other: Callable[[Any], Any]) -> Posterior:
        """Return the fit of another call, from the modes of this one."""
        if self.privacy is not None:
            raise DataError(
                "a fit under differential privacy is not made again: that would spend another "
                "budget on the same silos. Call fit(..., privacy=) with the silos that you want, "
                "and add up what both have spent."
            )
        if self.call is None:
            raise DataError(
                "no call of nf.fit led here in this process: fit by it, or use nf.load(path, "
                "model, silos) for one that was saved, to add or remove silos."
            )
        near = None if self.mode is None else self.mode.places
        return other(self.call).run(key, near)

    def save(self, path: str | Path, *, draws: int | None = None) -> None:
        """Write draws, weights, the verdict and the run behind it to ``path.npz``.

        The file has no data and no pickle, and is whole or not there: a save that is cut short
        leaves the one before as it is. :func:`numpyro_fed.load` reads it: without model and data to
        draw from the posterior, with them to go on; it refuses another model and other data, for
        which the file has a digest of each silo's arrays, keyed by random bytes of its own. It
        keeps names and words of the ``stages``, and also what silos keep to themselves, of a run in
        one process: give it to nobody who may not see that.

        Parameters
        ----------
        path : str or Path
            The name of the file without ``.npz``.
        draws : int, optional
            The number of draws of a guide that go into the file, for readers who have neither the
            model nor the data: by default none, and 4,000 for a fit of :func:`numpyro_fed.fit`.
            Weighted draws are all in it.
        """
        (run, others), saved = self.saved_runs(), self.saved_words(draws)
        if self.stages:
            words = {
                **saved.words,
                "verdict": self.verdict,
                "report": saved.words.get("verdict", self.verdict),
                "trusted": self.trusted,
                "stages": [[stage.name, stage.words] for stage in self.stages],
                "is_best": self.corrected is self,
                "fields": {
                    "num_exchanges": self.num_exchanges,
                    "contradiction": self.contradiction,
                    "remarks": self.remarks,
                    "interrupted": self.interrupted,
                },
            }
            missed = {
                f"missed/{i}/{name}": np.asarray(value)
                for i, peak in enumerate(self.missed)
                for name, value in peak._asdict().items()
            }
            saved = replace(saved, words=words, arrays={**saved.arrays, **missed})
        save(path, saved, run.saved_run(), run.provenance(), others)

    @abstractmethod
    def saved_words(self, draws: int | None) -> SavedWords:
        """Return the form in which a file keeps the posterior, beside the run behind it."""

    def saved_runs(self) -> tuple[Any, dict[str, SavedRun]]:
        """Return the run that a file rests on, and others by name."""
        return self.run_behind, {}

    def __str__(self) -> str:
        return self.verdict

    def _repr_html_(self) -> str:
        return display.html_words(str(self))
