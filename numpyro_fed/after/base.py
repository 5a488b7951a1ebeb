"""The base class of all results that have a posterior: what can be asked after the fit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

import jax
from jax import Array

from numpyro_fed.after.predict import (
    all_latents,
    check_plates,
    global_latents,
    outer_latents,
    predictor,
    read_new,
    refuse_private_parameters,
)
from numpyro_fed.errors import ModelError, positive_int
from numpyro_fed.model.data import SiloData, Sizes
from numpyro_fed.model.indices import new_data_check
from numpyro_fed.precision import in_precision_of_object

NEW, OWN_ROWS = "new", "own rows"


class Run(Protocol):
    """The run that a posterior rests on: its model, its silos and their states."""

    @property
    def _fit(self) -> Any: ...

    @property
    def num_silos(self) -> int: ...

    @property
    def shared(self) -> Any: ...

    def data_of(self, silo: int) -> SiloData:
        """Return a silo's data; raise an error if they are elsewhere."""

    def sizes_of(self, silo: int) -> Sizes:
        """Return the rows of each plate at a silo; raise an error if they are elsewhere."""

    def silo_params(self, silo: int) -> dict[str, Any]:
        """Return a silo's private parameters on their supports, and its guide as ``"guide"``."""


class Correction(Protocol):
    """Weighted draws of a posterior."""

    @property
    def left_out(self) -> Any:
        """Return the table of :meth:`AfterFit.leave_out`."""


class AfterFit(ABC):
    """A posterior of a model whose silos hold rows, and the questions that can be asked of it."""

    @property
    @abstractmethod
    def run_behind(self) -> Run:
        """Return the run that the posterior rests on."""

    @property
    @abstractmethod
    def correction_behind(self) -> Correction | str:
        """Return the weighted draws of the posterior, or the reason why there are none."""

    @property
    def double(self) -> bool:
        """Return whether the fit was computed in double precision."""
        return self.run_behind._fit.double

    @abstractmethod
    def sample_posterior(self, key: Array, n: int, *, silo: int | None = None) -> dict[str, Array]:
        """Draw from the posterior."""

    @in_precision_of_object
    def predict(
        self,
        key: Array,
        new: Mapping[str, Any] | None = None,
        *,
        silo: int | str = NEW,
        n: int = 1_000,
    ) -> Any:
        """Return posterior predictive draws of outcomes.

        Parameters
        ----------
        key : jax.Array
        new : dict, optional
            The data to predict for, as of one silo, without outcomes; outcomes in it are not used.
            None for the rows of the fit, with ``silo=j`` or ``silo="own rows"``.
        silo : int or {"new", "own rows"}
            Whose rows they are: of silo ``j``, whose latents of an outer plate (a hospital's
            effect) are drawn from its posterior; of a new silo, all of whose latents are drawn from
            their prior given the globals; or the rows of the fit, of each silo.
            Latents of new rows come from their prior given the globals in any case.
        n : int
            The number of draws.

        Returns
        -------
        dict of str to array, or a list of them
            Outcomes and deterministic sites, each ``(n, *shape)``; for ``silo="own rows"`` a list
            with an entry for each silo.

        Raises
        ------
        DataError
            For new data that lack an argument of the model, have another one, or index what does
            not exist; and for silos in other processes, whose latents are theirs.

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
        positive_int("n", n)
        if new is None:
            return self._predict_own_rows(key, silo, n)
        if silo == OWN_ROWS:
            raise ValueError('silo="own rows" predicts for the rows of the fit: pass no new data.')
        model = self.run_behind._fit.model
        data = read_new(model, new)
        refuse_private_parameters(model)
        if isinstance(silo, str):
            check_name(silo)
            new_data_check(model.text, None)(**new)
            return self._predicted(key, n, data, None, global_latents(model))
        check_plates(model, data, silo, self.run_behind.sizes_of(silo))
        new_data_check(model.text, silo)(**new)
        return self._predicted(key, n, data, silo, [*global_latents(model), *outer_latents(model)])

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
        correction = self.correction_behind
        if isinstance(correction, str):
            raise ModelError(f"silos cannot be left out: {correction}.")
        return correction.left_out

    def _predict_own_rows(self, key: Array, silo: int | str, n: int) -> Any:
        """Return predictive draws for the rows of the fit, of one silo or of each."""
        run = self.run_behind
        names = all_latents(run._fit.model)
        if not isinstance(silo, str):
            return self._predicted(key, n, run.data_of(silo), silo, names)
        if silo == NEW:
            raise ValueError("pass new data to predict for, or silo='own rows'.")
        check_name(silo, OWN_ROWS)
        silos = range(run.num_silos)
        return [self._predicted(key, n, run.data_of(j), j, names) for j in silos]

    def _predicted(
        self, key: Array, n: int, data: Any, silo: int | None, names: list[str]
    ) -> dict[str, Array]:
        """Return predictive draws for data, with latents ``names`` from the posterior."""
        fit, run = self.run_behind._fit, self.run_behind
        key_draw, key_new = jax.random.split(key)
        draws = self.sample_posterior(key_draw, n, silo=silo)
        latents = {name: draws[name] for name in names if name in draws}
        theta = fit.model.constrain_theta(run.shared.theta)
        if silo is not None:
            private = run.silo_params(silo)
            theta |= {name: private[name] for name in private if name != "guide"}
        key_new = jax.random.fold_in(key_new, 0 if silo is None else 1 + silo)
        return fit.cached("predict", lambda: predictor(fit.model))(key_new, theta, latents, data)


def check_name(silo: str, *others: str) -> None:
    """Raise an error for a name that stands for no silo."""
    known = others or (NEW,)
    if silo not in known:
        raise ValueError(
            f"silo={silo!r}: expected the number of a silo, 'new' for new data, or 'own rows' "
            "without any."
        )
