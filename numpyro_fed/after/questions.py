"""What can be asked of a posterior after the fit."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from numpy.typing import ArrayLike

from numpyro_fed.after.own_rows import (
    SiloAtDraws,
    WhichSilo,
    drawn_from_prior,
    groups_of_rows,
    names_of_rows,
    outcomes_of_silos,
    parameters_of,
    programs_of,
    silo_number,
    silos_at_draws,
    values_at,
)
from numpyro_fed.after.predict import (
    check_means,
    global_latents,
    new_rows,
    outer_sites,
    predictor,
    with_blocks,
)
from numpyro_fed.after.sensitivity import PriorSensitivity
from numpyro_fed.basics import display
from numpyro_fed.basics.errors import ConvergenceWarning, ModelError, positive_int
from numpyro_fed.basics.programs import in_precision_of_object
from numpyro_fed.basics.trees import EntryNames, elements
from numpyro_fed.data.silo_data import ALL, NEW, OWN_ROWS
from numpyro_fed.rounds.progress import shows


class Questions(ABC):
    """The questions that can be asked of a posterior of a model whose silos hold rows."""

    @property
    @abstractmethod
    def run_behind(self) -> Any:
        """Return the run that the posterior rests on."""

    @property
    @abstractmethod
    def correction(self) -> Any:
        """Return the weighted draws by which it is judged, or in words why there are none."""

    @property
    @abstractmethod
    def silos(self) -> Any:
        """Return how far each silo moves the posterior."""

    @abstractmethod
    def sample_posterior(
        self, key: Array, n: int, *, silo: WhichSilo | None = None
    ) -> dict[str, Array]:
        """Draw from the posterior."""

    @abstractmethod
    def unconstrained(self, key: Array, n: int) -> Array:
        """Return the unconstrained globals (n, dim) behind ``sample_posterior(key, n)``."""

    @abstractmethod
    def log_likelihoods(self, key: Array, n: int) -> list[dict[str, np.ndarray]]:
        """Return log likelihoods {plate: (n, rows)} of silos at the draws of that key and ``n``."""

    @property
    @abstractmethod
    def known_doubt(self) -> str:
        """Return why no answer is to be trusted; empty if nothing is known without an exchange."""

    @property
    @abstractmethod
    def shows_progress(self) -> bool:
        """Return whether a call of more than two seconds shows that it goes on."""

    @property
    def entry_names(self) -> EntryNames:
        """Return the names that the text gives to the entries of latents, by site."""
        names: EntryNames = self.run_behind._fit.model.labels
        return names

    def _warn_of_doubt(self) -> None:
        """Warn, once, that answers rest on a posterior that is known not to be trusted."""
        if "has_warned" not in self.__dict__ and (doubt := self.known_doubt):
            self.__dict__["has_warned"] = True  # as cached_property does in a frozen dataclass
            words = f"answers from this fit are no better than the fit (said once). {doubt}"
            # Above are the decorator of the call and the call itself.
            warnings.warn(words, category=ConvergenceWarning, stacklevel=5)

    @property
    def double(self) -> bool:
        """Whether it was computed in double precision."""
        return bool(self.run_behind._fit.double)

    @shows("predict")
    @in_precision_of_object
    def predict(
        self,
        key: Array,
        new: Mapping[str, Any] | None = None,
        *,
        silo: int | str = NEW,
        n: int = 1_000,
        mean: bool = False,
    ) -> Any:
        """Return posterior predictive draws of outcomes, or of their means.

        Parameters
        ----------
        key : jax.Array
        new : dict, optional
            The data to predict for, as of one silo, without outcomes; outcomes in it are not used.
            DataFrames stand where the fit had them, with the same columns.
            None for the rows of the fit, with ``silo=j`` or ``silo="own rows"``.
        silo : int, str or {"new", "own rows"}
            Whose rows they are: of a silo, by number or name, whose latents of an outer plate (a
            hospital's effect) are drawn from its posterior; of a new silo, all of whose latents are
            drawn from their prior given the globals; or the rows of the fit, of each silo.
            Latents of new rows come from their prior given the globals in any case.
        n : int
            The number of draws.
        mean : bool
            Whether to return the mean of an outcome's distribution at each draw of the latents (a
            probability for yes or no), for risks without its noise.

        Returns
        -------
        dict of str to array, or a list of them
            Outcomes and deterministic sites, each ``(n, *shape)``; for ``silo="own rows"`` a list
            with an entry for each silo.

        Raises
        ------
        DataError
            For new data that lack an argument or a column, have another one, are of a dtype that
            cannot be made that of the fit without a loss, miss values, or index what does not
            exist; and for silos in other processes, whose latents are theirs (they predict by
            :meth:`Silo.predict`).
        ModelError
            For a new silo under a prior of :func:`numpyro_fed.handlers.substitute_prior`, which has
            a block for each silo of the fit; for parameters of silos or rows; and for ``mean`` of
            a distribution that has none.

        Notes
        -----
        Nothing crosses: draws of the globals are the server's, and latents of a silo are drawn
        where its data are.

        Examples
        --------
        >>> import jax, numpy as np, numpyro, numpyro.distributions as dist
        >>> import numpyro_fed as nf
        >>> def model(x, y=None):
        ...     slope = numpyro.sample("slope", dist.Normal(0, 10))
        ...     with nf.silo_plate("row", len(x)):
        ...         numpyro.sample("y", dist.Normal(slope * x, 1), obs=y)
        >>> rng = np.random.default_rng(0)
        >>> silos = [dict(x=x, y=3 * x + rng.normal(size=20)) for x in rng.normal(size=(2, 20))]
        >>> fitted = nf.fit(jax.random.key(0), model, silos, progress_bar=False)
        >>> y = fitted.predict(jax.random.key(1), dict(x=np.array([1.0, 2.0])))["y"]
        >>> y.shape, y.mean(0).round().tolist()
        ((1000, 2), [3.0, 6.0])
        """
        self._warn_of_doubt()
        positive_int("n", n)
        run, model = self.run_behind, self.run_behind._fit.model
        word = isinstance(silo, str) and silo in (NEW, OWN_ROWS)
        number = None if word else silo_number(silo, run, NEW, OWN_ROWS)
        found: Any
        if new is None:
            if word and silo == NEW:
                raise ValueError("pass new data to predict for, or silo='own rows'.")
            if number is None:
                found = self._at_own_rows(key, range(run.num_silos), n, mean=mean)
            else:
                (found,) = self._at_own_rows(key, [number], n, mean=mean)
        else:
            if word and silo == OWN_ROWS:
                raise ValueError(
                    f'silo="{silo}" predicts for the rows of the fit: pass no new data.'
                )
            own, sizes, names = None, None, global_latents(model)
            if number is not None:
                hosted, names = run._hosted(number), [*names, *(s.name for s in outer_sites(model))]
                own, sizes = hosted.data_of(number), hosted.sizes_of(number)
            new = with_blocks(model, new, number, own)
            data = new_rows(model, new, run._fit.facts, run._silos.data, number, sizes)
            # The latents are those that sample_posterior draws with the same key.
            draws = self.sample_posterior(key, n, silo=number)
            latents = {name: draws[name] for name in names if name in draws}
            key_new = jax.random.fold_in(key, 2)
            key_new = jax.random.fold_in(key_new, 0 if number is None else 1 + number)
            many = programs_of(run, mean=mean).many
            found = jax.block_until_ready(many(key_new, parameters_of(run, number), latents, data))
        if mean:
            check_means(model, found)
        return found

    def _at_own_rows(
        self, key: Array, silos: Sequence[int], n: int, *, mean: bool = False
    ) -> list[dict[str, Array]]:
        """Return predictions for the rows of silos of the fit, at draws of all of its latents."""
        run = self.run_behind
        draws = self.sample_posterior(key, n, silo=list(silos))
        at_draws = silos_at_draws(run, jax.random.fold_in(key, 2), draws, silos)
        return values_at(run, programs_of(run, mean=mean), at_draws)

    @shows("predict from the prior")
    @in_precision_of_object
    def prior_predict(
        self, key: Array, new: Mapping[str, Any] | None = None, *, n: int = 1_000
    ) -> Any:
        """Return predictive draws of outcomes from the prior, for the rows of the fit or new ones.

        Parameters
        ----------
        key : jax.Array
        new : dict, optional
            Data to predict for, as in :meth:`predict`; None for the rows of all silos.
        n : int

        Returns
        -------
        dict of str to array, or a list of them
            As :meth:`predict` returns them: a list with an entry for each silo without ``new``.

        Raises
        ------
        ModelError
            If the prior cannot be drawn from (it is flat, say).
        """
        positive_int("n", n)
        run, model = self.run_behind, self.run_behind._fit.model
        prior = drawn_from_prior(run, jax.random.fold_in(key, 0), n)
        if prior is None:
            raise ModelError("the prior of the globals cannot be drawn from.")
        latents = {name: prior[name] for name in global_latents(model)}
        programs = programs_of(run)
        if new is not None:
            new = with_blocks(model, new, None, None)
            data = new_rows(model, new, run._fit.facts, run._silos.data)
            key_new, parameters = jax.random.fold_in(key, 1), parameters_of(run, None)
            return jax.block_until_ready(programs.many(key_new, parameters, latents, data))
        at_draws = [
            SiloAtDraws(j, jax.random.fold_in(key, 1 + j), parameters_of(run, j), latents)
            for j in range(run.num_silos)
        ]
        return values_at(run, programs, at_draws)

    @shows("leave silos out")
    def leave_out(self) -> Any:
        r"""Return how well all other silos predict the rows of each silo, without a refit.

        With draws :math:`z_G^s` of the posterior and their weights :math:`w_s`,

        .. math::
            p(y_j \mid y_{-j}) = \sum_s v_s\, p(y_j \mid z_G^s), \qquad
            v_s \propto \frac{w_s}{p(y_j \mid z_G^s)},

        where the tail of the ratios is smoothed. It takes one exchange: the server sends draws and
        weights, and a silo replies with three numbers, which are not added up. Where a tail is too
        heavy, draws around the posterior without that silo are added: one exchange in which silos
        send gradient and Hessian, as for ``silos``, and two more for each four such silos.

        Returns
        -------
        LeaveOut
            With ``.log_density``, ``.pareto_k`` and ``.shift``, an entry for each silo; prints as a
            table. Computed once.

        Raises
        ------
        ModelError
            If there is no correction of the fit.

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
        >>> fitted = nf.fit(jax.random.key(0), model, silos, progress_bar=False)
        >>> int(fitted.leave_out().shift.argmax())
        2

        References
        ----------
        Vehtari, Gelman and Gabry (2017), of rows; here of silos.
        """
        return self._weighted_draws("silos cannot be left out").left_out

    @shows("leave rows out")
    def loo(self) -> Any:
        r"""Return how well all other rows predict each row, without a refit (PSIS-LOO).

        With draws :math:`z_G^s` of the posterior, and latents :math:`u^s` of outer plates (a
        hospital's effect) drawn given each,

        .. math::
            p(y_i \mid y_{-i}) = \sum_s v_s\, p(y_i \mid z_G^s, u^s), \qquad
            v_s \propto \frac{w_s}{p(y_i \mid z_G^s, u^s)},

        where a row's own latents are integrated out and the tail of the ratios is smoothed. A row
        is one of the silo plate that has outcomes: a patient with all visits, say. Outcomes of a
        plate whose latents other rows share (of a hospital) are no rows, and are not left out.

        Returns
        -------
        Loo
            With ``.elpd``, ``.se``, ``.num_bad``; ``.to_arviz()`` is an ``ELPDData``. Computed
            once.

        Raises
        ------
        ModelError
            If there is no correction of the fit, rows read each other's latents, or silos have
            parameters of their own.

        Notes
        -----
        In one process nothing crosses. A silo in another process sends five sums over its rows:
        of log densities and their squares, of log likelihoods, of bad k-hats, and the number of
        rows; what is known of each row stays there.

        Examples
        --------
        >>> import jax, numpy as np, numpyro, numpyro.distributions as dist
        >>> import numpyro_fed as nf
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with nf.silo_plate("row", len(y)):
        ...         numpyro.sample("y", dist.Normal(mu, 2), obs=y)
        >>> rng = np.random.default_rng(0)
        >>> silos = [dict(y=rng.normal(3, 2, 20)) for _ in range(3)]
        >>> fitted = nf.fit(jax.random.key(0), model, silos, progress_bar=False)
        >>> table = fitted.loo()
        >>> table.num_rows, table.num_bad, round(table.p_loo)
        (60, 0, 1)

        References
        ----------
        Vehtari, Gelman and Gabry (2017).
        """
        return self._weighted_draws("rows cannot be left out").rows_left_out

    @shows("scale prior and likelihood")
    def prior_sensitivity(self) -> PriorSensitivity:
        r"""Return how the posterior answers to a stronger or weaker prior, and likelihood.

        Draws :math:`z^s` of the posterior get the weights :math:`p(z^s)^{\alpha - 1}`, where
        :math:`p` is the prior of the globals, or the likelihood of all silos, and
        :math:`\alpha` is 0.99 or 1.01. The table has the slope of the cumulative Jensen-Shannon
        distance of each marginal: above 0.05 it answers. A marginal that answers to both is one
        where prior and data are in conflict; one that answers to the prior alone has a strong prior
        or weak data.

        Returns
        -------
        PriorSensitivity
            With ``.names``, ``.prior``, ``.likelihood`` and ``.diagnosis``. Computed once.

        Raises
        ------
        ModelError
            If there is no correction of the fit.

        Notes
        -----
        Nothing crosses: the densities are those of the correction. Priors of globals that depend on
        other globals (effects under a scale), and those of silos' own latents, are not scaled.
        On the same draws the numbers are those of ArviZ's ``psense``.

        Examples
        --------
        A prior far from the data:

        >>> import jax, numpy as np, numpyro, numpyro.distributions as dist
        >>> import numpyro_fed as nf
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 1))
        ...     with nf.silo_plate("row", len(y)):
        ...         numpyro.sample("y", dist.Normal(mu, 2), obs=y)
        >>> rng = np.random.default_rng(0)
        >>> silos = [dict(y=rng.normal(9, 2, 10)) for _ in range(2)]
        >>> fitted = nf.fit(jax.random.key(0), model, silos, progress_bar=False)
        >>> fitted.prior_sensitivity().diagnosis
        ('prior and data in conflict',)

        References
        ----------
        Kallioinen et al. (2024), Statistics and Computing 34.
        """
        return self._weighted_draws("there are no weighted draws").prior_answers

    @shows("compare silos")
    def disagreement(self) -> Any:
        """Return which silos contradict the others, with a probability for each.

        It is the table of :attr:`Result.silos` at this posterior: how far each silo moves the
        posterior, and with what probability a silo of the same model would disagree with all others
        as much (node-splitting). ``.plot()`` shows it.

        Raises
        ------
        ModelError
            For a model without globals, or with more than 300.

        Notes
        -----
        One exchange, in which each silo sends gradient and Hessian of its log likelihood.

        References
        ----------
        Marshall and Spiegelhalter (2007).
        """
        self._warn_of_doubt()
        return self.silos

    @shows("draw")
    @in_precision_of_object
    def plot(self, sites: Sequence[str] | None = None, *, n: int = 4_000) -> Any:
        """Return a figure of the densities of globals, each over that of its prior.

        Parameters
        ----------
        sites : list of str, optional
            Names of global latents and deterministic sites; by default the latents, up to 24
            elements.
        n : int
            The number of draws.

        Returns
        -------
        matplotlib.figure.Figure
        """
        self._warn_of_doubt()
        run = self.run_behind
        chosen = global_latents(run._fit.model) if sites is None else list(sites)
        draws = self.sample_posterior(jax.random.key(0), n)
        if unknown := [name for name in chosen if name not in draws]:
            raise ModelError(f"'{unknown[0]}' is no global of the model, which has {list(draws)}.")
        names, values = elements({name: draws[name] for name in chosen}, self.entry_names)
        if not names:
            raise ModelError("the model has no globals to plot.")
        prior = drawn_from_prior(run, jax.random.key(1), n)
        of_prior = None if prior is None else elements({name: prior[name] for name in chosen})[1]
        of_text = run._fit.model.bounds
        bounds = [
            of_text.get(c, display.UNBOUNDED) for c in chosen for _ in range(draws[c][0].size)
        ]
        return display.marginals(names, values, of_prior, bounds)

    @shows("draw")
    @in_precision_of_object
    def plot_silos(
        self, site: str | None = None, *, n: int = 2_000, names: Sequence[str] | None = None
    ) -> Any:
        r"""Return a figure of silos' own latents: means with 50 and 90 % intervals, in order.

        An effect of several elements has a panel for each, with silos in the order of the first.
        Circles are the estimates of each silo alone. With the mean and variance :math:`m_j, v_j` of
        the posterior of an effect and :math:`m_0, v_0` of its prior given the globals, they are
        :math:`(m_j / v_j - m_0 / v_0) / (1 / v_j - 1 / v_0)`: what is left of a normal posterior
        when its prior is taken out. The dashed line is at the prior's mean.

        Parameters
        ----------
        site : str, optional
            A latent in a silo plate; by default the first one that rows share (of a hospital).
        n : int
            The number of draws.
        names : list of str, optional
            A name for each silo, in their order; by default their own, or their numbers.

        Returns
        -------
        matplotlib.figure.Figure

        Raises
        ------
        DataError
            For silos in other processes, whose latents are theirs.
        """
        self._warn_of_doubt()
        run, fm = self.run_behind, self.run_behind._fit.model
        of_silos = [s.name for s in fm.sites if s.kind == "latent" and s.plate is not None]
        if site is None:
            site = next(iter([*(s.name for s in outer_sites(fm)), *of_silos]), None)
        if site is None or site not in of_silos:
            raise ModelError(f"{site!r} is no latent of silos: the model has {of_silos}.")
        labels = display.labels_of(run.num_silos, names, run._silos.names)
        hosted = run._hosted(0)  # before silos elsewhere are asked for what cannot be shown
        draws = self.sample_posterior(jax.random.key(0), n, silo=ALL)
        # Its prior given the same globals, one silo after the other.
        given = {name: draws[name] for name in global_latents(fm)}
        programs = run._fit.cached("latents", lambda: predictor(fm, ("latent",)))
        key = jax.random.key(1)
        at_draws = [
            SiloAtDraws(j, jax.random.fold_in(key, j), parameters_of(run, j), given)
            for j in range(run.num_silos)
        ]
        parts = [np.asarray(found[site]) for found in values_at(run, programs, at_draws)]
        plate, axis = next((s.plate, 1 + (s.axis or 0)) for s in fm.sites if s.name == site)
        values, prior = (
            np.moveaxis(np.asarray(a, np.float64), axis, 1)
            for a in (draws[site], np.concatenate(parts, axis))
        )
        rows = [hosted.sizes_of(j)[plate] for j in range(run.num_silos)]
        return display.caterpillar(site, values, prior, names_of_rows(labels, rows))

    @shows("predict")
    @in_precision_of_object
    def plot_check(
        self,
        silo: int | str = OWN_ROWS,
        *,
        n: int = 50,
        names: Sequence[str] | None = None,
        by: Sequence[ArrayLike] | None = None,
    ) -> Any:
        """Return a figure of a posterior predictive check, by silo or by group.

        The distribution function of the outcomes is drawn over those of ``n`` data sets that the
        fit predicts for the same rows, in a panel for each silo. Outcomes of yes or no have one
        panel: the observed share of yes over intervals of the predicted ones. A model that fits has
        the outcomes among what it predicts.

        Parameters
        ----------
        silo : int, str or "own rows"
            One silo, by number or name, or each of them, up to 24, or 80 for outcomes of yes or no.
        n : int
            The number of predictive data sets.
        names : list of str, optional
            A name for each silo of the fit, in their order; by default their numbers.
        by : list of array, optional
            For each silo that is drawn, the group of each of its rows, or of each outcome: such as
            treated or not. Then groups over all these silos take the place of silos.

        Returns
        -------
        matplotlib.figure.Figure

        Raises
        ------
        DataError
            For silos in other processes, whose rows are theirs, and for groups that are not one for
            each row.
        """
        self._warn_of_doubt()
        run = self.run_behind
        labels = display.labels_of(run.num_silos, names, run._silos.names)
        chosen = list(range(len(labels)))
        every = isinstance(silo, str) and silo == OWN_ROWS
        if not every:
            chosen = [silo_number(silo, run, OWN_ROWS)]
        seen = outcomes_of_silos(run, chosen)
        shares = display.yes_or_no(y for outcomes in seen for y in outcomes.values())
        if by is None:
            del chosen[display.MOST_LINES if shares else display.MOST_PANELS :]
        groups = None if by is None else groups_of_rows(by, seen)
        predicted = self._at_own_rows(jax.random.key(0), chosen, n)
        if groups is None:
            shown = range(len(labels)) if every else chosen
            return display.checks(seen, predicted, [labels[j] for j in shown])
        return display.checks(*display.by_group(seen, predicted, groups))

    def _weighted_draws(self, what: str) -> Any:
        """Return the correction of the fit; raise an error that says ``what`` needs one."""
        correction = self.correction
        if isinstance(correction, str):
            raise ModelError(f"{what}: {correction}.")
        self._warn_of_doubt()
        return correction
