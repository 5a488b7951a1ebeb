"""Draws and their summary as data frames, whose elements have names.

An element along an axis that the user has named (``coords``, as for ArviZ) has the name of its
entry, as ``ward[geriatrics]``, and an effect of a silo the silo's name, as ``u[Bern]``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from numpyro_fed.after.arviz import Labels
from numpyro_fed.after.own_rows import Run, WhichSilo, chosen_silos, names_of_rows
from numpyro_fed.after.questions import Questions
from numpyro_fed.basics.errors import ModelError, optional, positive_int
from numpyro_fed.basics.programs import in_precision_of_object
from numpyro_fed.basics.trees import elements
from numpyro_fed.data.silo_data import ALL, names_or_numbers
from numpyro_fed.rounds.progress import shows
from numpyro_fed.text.handlers import UNOBSERVED
from numpyro_fed.weigh.element_errors import ElementErrors

Names = Sequence[object] | None  # of the entries along an axis; None where they have none


class Columns(NamedTuple):
    """The elements of draws: their names, those by number, such as ``"beta[1]"``, and draws (n, k).

    The table of errors of a correction has names by number.
    """

    names: tuple[str, ...]
    numbered: tuple[str, ...]
    values: np.ndarray

    @classmethod
    def of(
        cls, run: Run, draws: Mapping[str, Any], silo: WhichSilo | None, labels: Labels
    ) -> Columns:
        """Return the elements of draws {site: (n, ...)} of the globals, and of some silos.

        What NumPyro draws beside the observed values of a site is in that site already.
        """
        twice = [k for k in draws if k.endswith(UNOBSERVED) and k.removesuffix(UNOBSERVED) in draws]
        draws = {site: value for site, value in draws.items() if site not in twice}
        of_silos = {} if silo is None else _silo_axes(run, silo)
        of_text = run._fit.model.labels
        names = list[str]()
        for site, value in draws.items():
            shape = np.shape(value)[1:]
            axes = _axes(site, shape, labels)
            own = of_text.get(site, ())
            if shape and axes[-1] is None and len(own) == shape[-1]:
                axes[-1] = list(own)
            if site in of_silos:
                axis, entries = of_silos[site]
                if axes[axis] is None and len(entries) == shape[axis]:
                    axes[axis] = entries
            for index in np.ndindex(shape):
                along = zip(index, axes, strict=True)
                entries = [str(i) if a is None else str(a[i]) for i, a in along]
                names.append(f"{site}[{', '.join(entries)}]" if entries else site)
        return cls(tuple(names), *elements(draws, of_text))

    def frame(self) -> Any:
        """Return the draws as a DataFrame."""
        return optional("pandas").DataFrame(self.values, columns=list(self.names))

    def summary(self, prob: float, errors: ElementErrors | None) -> Any:
        """Return mean, sd, quantiles and the probability to be positive, as a DataFrame.

        A mean or an sd that does not exist, as far as the tails tell, is NaN beside their index.
        The index itself is NaN where no tails were looked at.
        """
        levels = [(1 - prob) / 2, 0.5, (1 + prob) / 2]
        table = {"mean": self.values.mean(0), "sd": self.values.std(0)}
        for level, row in zip(levels, np.quantile(self.values, levels, axis=0), strict=True):
            table[f"{100 * level:g}%"] = row
        table["P(> 0)"] = (self.values > 0).mean(0)
        if errors is not None:
            index = dict(zip(errors.names, errors.tail_index, strict=True))
            infinite = dict(zip(errors.names, errors.infinite.T, strict=True))
            table["tail index"] = np.array([index.get(name, np.nan) for name in self.numbered])
            for i, name in enumerate(self.numbered):
                no_mean, no_sd = infinite.get(name, (False, False))
                table["mean"][i] = np.nan if no_mean else table["mean"][i]
                table["sd"][i] = np.nan if no_mean or no_sd else table["sd"][i]
        return optional("pandas").DataFrame(table, index=list(self.names))


def _axes(site: str, shape: Sequence[int], labels: Labels) -> list[Names]:
    """Return the names along each axis of a site, as far as the user has given them."""
    dims = list(labels.dims.get(site, ()))
    given = [labels.coords.get(dim) for dim in dims[: len(shape)]]
    axes: list[Names] = [None if names is None else list(names) for names in given]
    for dim, size, names in zip(dims, shape, axes, strict=False):
        if names is not None and len(names) != size:
            raise ValueError(
                f"coords={{'{dim}': ...}} has {len(names)} names, and '{site}' has {size} "
                "entries along that axis."
            )
    return axes + [None] * (len(shape) - len(axes))


def _silo_axes(run: Run, silo: WhichSilo) -> dict[str, tuple[int, list[str]]]:
    """Return the axis of each latent along which silos stand, and the names of its entries."""
    chosen, hosted = chosen_silos(silo, run), run._silos
    names = names_or_numbers(hosted.names, run.num_silos)
    found = {}
    for s in run._fit.model.sites:
        if s.kind != "latent" or s.plate is None:
            continue
        # Of silos elsewhere, whose rows are not told here, each is taken to have one.
        rows = [1 if hosted.elsewhere else hosted.sizes_of(j)[s.plate] for j in chosen]
        found[s.name] = (s.axis or 0, names_of_rows([names[j] for j in chosen], rows))
    return found


class FunctionsOfDraws(Questions):
    """The questions to a posterior whose answers are tables of functions of its draws."""

    @shows("draw")
    @in_precision_of_object
    def quantity(
        self,
        name: str,
        fn: Callable[..., Array],
        key: Array | None = None,
        num_samples: int = 4_000,
        *,
        prob: float = 0.9,
    ) -> Any:
        """Return the summary of a function of the globals, as a pandas DataFrame.

        Parameters
        ----------
        name : str
            What the rows of the table are called.
        fn : callable
            A function of one draw; its arguments are global sites by their names.
        key : jax.Array, optional
        num_samples : int
            The number of draws.
        prob : float
            The probability of the interval, with as much on either side of it.

        Raises
        ------
        ModelError
            For an argument that is no global site.

        Examples
        --------
        >>> import jax, jax.numpy as jnp, numpy as np, numpyro, numpyro.distributions as dist
        >>> import numpyro_fed as nf
        >>> def model(x, y):
        ...     b = numpyro.sample("b", dist.Normal(0, 2).expand([2]).to_event(1))
        ...     with nf.silo_plate("row", len(x)):
        ...         numpyro.sample("y", dist.Bernoulli(logits=b[0] + b[1] * x), obs=y)
        >>> x = np.tile([0.0, 1.0], 50)
        >>> silos = [dict(x=x, y=np.tile([0, 1, 1, 1], 25)), dict(x=x, y=np.tile([0, 0, 1, 1], 25))]
        >>> fitted = nf.fit(jax.random.key(0), model, silos, progress_bar=False)
        >>> table = fitted.quantity("odds ratio", lambda b: jnp.exp(b[1]))
        >>> bool(1.5 < table.loc["odds ratio", "50%"] < 12)
        True
        """
        if not 0 < prob < 1:
            raise ValueError(f"prob={prob!r}: expected a number between 0 and 1.")
        self._warn_of_doubt()
        positive_int("num_samples", num_samples)
        draws = self.sample_posterior(jax.random.key(0) if key is None else key, num_samples)
        asked = list(inspect.signature(fn).parameters)
        if unknown := [argument for argument in asked if argument not in draws]:
            raise ModelError(f"'{unknown[0]}' is no global of the model, which has {list(draws)}.")
        values = {name: jax.vmap(fn)(*(draws[argument] for argument in asked))}
        return Columns.of(self.run_behind, values, None, Labels.of(None, None)).summary(prob, None)

    def ranks(
        self,
        site: str,
        key: Array | None = None,
        num_samples: int = 4_000,
        *,
        element: int | str | None = None,
    ) -> Any:
        """Return how sure the order of silos' effects is, as a pandas DataFrame.

        Parameters
        ----------
        site : str
            A latent with one row at each silo. The largest one has rank 1.
        key : jax.Array, optional
        num_samples : int
            The number of draws.
        element : int or str, optional
            Which of a silo's numbers is ranked, where it has several (an intercept and a slope): by
            number, or by the name that the text gives to it.

        Returns
        -------
        DataFrame
            A row for each silo, in the order of mean ranks: ``mean``, the interval of probability
            0.9, and the probabilities to be the largest, ``P(first)``, and the smallest.

        Raises
        ------
        ModelError
            For a site that is no latent of silos or has several rows at one, and for an element
            that it has not. Nothing is drawn before.

        Notes
        -----
        Effects of silos with few rows lie near their mean, and have any rank: an order of means
        hides it (Goldstein and Spiegelhalter 1996).

        Examples
        --------
        >>> import jax, numpy as np, numpyro, numpyro.distributions as dist
        >>> import numpyro_fed as nf
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with nf.silo_plate("hospital", 1):
        ...         u = numpyro.sample("u", dist.Normal(0, 2))
        ...     with nf.silo_plate("row", len(y)):
        ...         numpyro.sample("y", dist.Normal(mu + u[0], 1), obs=y)
        >>> rng = np.random.default_rng(0)
        >>> silos = {n: dict(y=rng.normal(m, 1, 20)) for n, m in (("Bern", 1), ("Chur", 4))}
        >>> fitted = nf.fit(jax.random.key(0), model, silos, progress_bar=False)
        >>> fitted.ranks("u").index.tolist()
        ['Chur', 'Bern']
        """
        run, key = self.run_behind, jax.random.key(0) if key is None else key
        local = {s.name: s for s in run._fit.model.sites if s.is_local_latent}
        if site not in local:
            raise ModelError(f"{site!r} is no latent of silos: the model has {[*local]}.")
        found, elsewhere = local[site], run._silos.elsewhere
        rows = [] if elsewhere else [run._hosted(j).sizes_of(j) for j in range(run.num_silos)]
        if any(size[found.plate or ""] != 1 for size in rows):
            raise ModelError(f"'{site}' has several rows at a silo, and no single effect of it.")
        number = math.prod(found.shape)
        known = list(found.labels if len(found.labels) == number else range(number))
        place = known.index(element) if element in known else element
        if place is None and number > 1:
            raise ModelError(
                f"'{site}' has {number} numbers for each silo: say which is ranked, by "
                f"ranks('{site}', element={known[0]!r}). They are {known}."
            )
        if place is not None and place not in range(number):
            raise ModelError(f"'{site}' has no element {element!r}: it has {known}.")
        draws = np.asarray(self.sample_posterior(key, num_samples, silo=ALL)[site])
        values = np.moveaxis(draws, 1 + (found.axis or 0), 1)
        values = values.reshape(*values.shape[:2], -1)[..., int(place or 0)]
        if values.shape[1] != run.num_silos:
            raise ModelError(f"'{site}' has several rows at a silo, and no single effect of it.")
        names = list(names_or_numbers(run._silos.names, run.num_silos))
        rank = (-values).argsort(1).argsort(1) + 1
        low, high = np.quantile(rank, [0.05, 0.95], axis=0, method="nearest")
        table = {
            **{"mean": rank.mean(0), "5%": low, "95%": high},
            **{"P(first)": (rank == 1).mean(0), "P(last)": (rank == rank.shape[1]).mean(0)},
        }
        return optional("pandas").DataFrame(table, index=names).sort_values("mean")
