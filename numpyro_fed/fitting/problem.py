"""The problem of a fit: a model on silos' data, how large both are, and the methods for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from numpyro_fed.data.silo_data import ReadSilos, read_all
from numpyro_fed.data.tables import SiloInput
from numpyro_fed.guides.objectives import ELBO, LocallyEnhanced
from numpyro_fed.methods.method import method_model
from numpyro_fed.pvi.method import PVI
from numpyro_fed.rounds.federation import Federation
from numpyro_fed.search.mode_search import SEARCHED_UP_TO
from numpyro_fed.sfvi.method import SFVI
from numpyro_fed.text.facts import Facts, agree, size_class
from numpyro_fed.text.fingerprint import fingerprint as fingerprint_of
from numpyro_fed.text.layout import layout_of
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.split import split

# Draws of each row's latents in the bound, and of latents of outer plates. Twenty bring the six
# cities to 0.053 sd of NUTS. Draws at an outer plate multiply those of the rows below, and did not
# pay on three levels (docs/results/importance.md).
ROW_DRAWS, OUTER_DRAWS = 20, 5
# Numbers in all data up to which programs are compiled with few optimisations: steps over them take
# less time than optimising would. A regression with 270 rows took 38 s instead of 73, the six
# cities, which are above, would take 92 instead of 75 (docs/results/compilation.md).
SMALL_DATA = 20_000
# Searches for the mode, side by side: the first from zero, the others from the prior. More find
# more modes and take longer, in proportion.
NUM_STARTS = 4


@dataclass(frozen=True, eq=False)
class FitProblem:
    """A model on the data of silos, and how large they are.

    ``num_values``: The numbers in all arrays.
    ``num_rows``: The rows of the longest plate with latents of its own.
    ``fingerprint``: That of the text, in which a variable may have changed since a last call.
    """

    model: Callable[..., Any]
    silos: ReadSilos | Federation
    fm: FederatedModel
    num_values: int
    num_rows: int
    fingerprint: str

    @classmethod
    def of(cls, model: Callable[..., Any], silos: Sequence[SiloInput] | Federation) -> FitProblem:
        """Return the problem, once silos have been read, or have told their facts."""
        if isinstance(silos, Federation):
            return cls._of_federation(model, silos)
        return cls._of_data(model, silos)

    @classmethod
    def _of_federation(cls, model: Callable[..., Any], silos: Federation) -> FitProblem:
        """Return the problem of silos in other processes, from the facts that they tell."""
        _, facts_json = silos.describe(method_model(model, silos.names))
        plan = agree([Facts.from_json(text) for text in facts_json])
        template = [plan.template()]
        fm, sizes = split(model, template), dict(plan.total)
        longest = max(sizes.values(), default=1)
        num_values = longest * sum(math.prod(a.shape) for a in plan.facts.arguments)
        num_rows = rows_of_longest_plate(fm, [sizes])
        return cls(model, silos, fm, num_values, num_rows, fingerprint_of(fm, template))

    @classmethod
    def _of_data(cls, model: Callable[..., Any], silos: Sequence[SiloInput]) -> FitProblem:
        """Return the problem of silos whose rows are here."""
        read = read_all(silos, model)
        fm = layout_of(model, read).model
        # Each silo's number of rows is rounded up to a power of two: a silo elsewhere tells no
        # more of it, and a fit must be the same in both cases.
        sizes = [{p: size_class(n) for p, n in fm.sizes(silo).items()} for silo in read]
        num_values = sum(a.size for silo in read for a in silo.arrays.values())
        num_rows = rows_of_longest_plate(fm, sizes)
        return cls(model, read, fm, num_values, num_rows, fingerprint_of(fm, read))

    @property
    def suits_pvi(self) -> bool:
        """Return whether there are globals, few enough for a full covariance, and no parameters."""
        return 0 < self.fm.dim <= SEARCHED_UP_TO and not self.fm.named("param")

    @cached_property
    def runtime_name(self) -> str:
        """Return the runtime whose programs take the least time, compiled and run."""
        draws = ROW_DRAWS if any(p.dim for p in self.fm.plates) else 1
        return "quick" if self.num_values * draws <= SMALL_DATA else "simulation"

    def method_for(self, kind: type[PVI] | type[SFVI], *, coupled: bool) -> PVI | SFVI:
        """Return a method, with the locally enhanced bound if silos have latents.

        It has the plain bound where rows are ``coupled``. It is that of an earlier call with all
        that was compiled for it, if there is one.
        """
        plates = [p for p in self.fm.plates if p.dim and not coupled]
        below = any(not p.outer for p in plates)
        outer = OUTER_DRAWS if below else ROW_DRAWS
        draws = tuple((p.name, outer if p.outer else ROW_DRAWS) for p in plates)
        key = (kind, key_of_model(self.model), self.fingerprint, draws)

        def make() -> PVI | SFVI:
            objective = LocallyEnhanced(draws=dict(draws)) if draws else ELBO()
            return kind(self.model, objective=objective, starts=NUM_STARTS)

        method = cached_method(key, make)
        silos = self.silos
        if isinstance(method, PVI) and isinstance(silos, Federation) and silos.secure_sum:
            # One silo after the other there would be no sum.
            return replace(method, schedule="synchronous")
        return method


def rows_of_longest_plate(fm: FederatedModel, sizes: Sequence[Mapping[str, int]]) -> int:
    """Return the rows, over all silos, of the longest plate with latents of its own."""
    plates = [p.name for p in fm.plates if p.dim and not p.outer]
    return max((sum(size[p] for size in sizes) for p in plates), default=0)


# Methods whose compiled programs are kept for the next call, each for a model and its draws. More
# keep more programs in memory.
MAX_CACHED_METHODS = 8

_methods: dict[Hashable, PVI | SFVI] = {}


def cached_method(key: Hashable, make: Callable[[], PVI | SFVI]) -> PVI | SFVI:
    """Return the method of an earlier call with this key, or else a new one, which is kept."""
    method = _methods.pop(key, None)
    if method is None:
        while len(_methods) >= MAX_CACHED_METHODS:
            _methods.pop(next(iter(_methods)))
        method = make()
    _methods[key] = method  # put back at the end: the least recently used is dropped first
    return method


def key_of_model(model: Callable[..., Any]) -> Hashable:
    """Return what stands for a model in a key: itself, or its id if it has no hash."""
    try:
        hash(model)
    except TypeError:
        # An id is safe: the method that is kept keeps the model alive.
        return id(model)
    return model
