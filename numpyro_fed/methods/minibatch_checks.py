"""Minibatches as a setting of methods: what can be cut, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from numpyro_fed.errors import GuideError, positive_int
from numpyro_fed.guides.structured import Guide
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.federated import FederatedModel
from numpyro_fed.model.layout import Layout
from numpyro_fed.model.minibatch import WHOLE, Minibatches


def check_batch_size(size: int | None) -> None:
    """Refuse what is no number of rows."""
    if size is not None:
        positive_int("batch_size", size)


def minibatches_of(
    fm: FederatedModel, plates_of: Mapping[str, tuple[str, ...]], size: int | None
) -> Minibatches | None:
    """Return which rows are drawn, where any are."""
    return None if size is None else Minibatches.of(fm, plates_of, size)


def check_guide(guide: Guide, draws: Mapping[str, int], minibatches: Minibatches | None) -> None:
    """Refuse guides and bounds that have no part for some of the rows.

    Raises
    ------
    GuideError
    """
    if minibatches is None:
        return
    words = f"batch_size={minibatches.size} cannot go with"
    if joint := [p for p in minibatches.plates if p in guide.locals and guide.locals[p].joint]:
        raise GuideError(
            f"{words} locals='joint' for silo_plate '{joint[0]}': one covariance over all rows has "
            f"no part for a minibatch. Use locals='full' or 'diagonal'. {WHOLE}"
        )
    if weighed := [p for p in guide.outer if draws[p] > 1]:
        raise GuideError(
            f"{words} {draws[weighed[0]]} draws at silo_plate '{weighed[0]}', above the rows of "
            "others: a silo is weighed as a whole there, of which some rows say nothing without "
            f"bias. Use one draw there. {WHOLE}"
        )


def check_alone(layout: Layout, size: int | None, stacks: Sequence[SiloData]) -> None:
    """Refuse minibatches of rows that do not stand alone.

    Raises
    ------
    GuideError
    """
    found = minibatches_of(layout.model, layout.lengths, size)
    for rows in found.cut if found else ():
        try:
            alone = all(bool(layout.checks.minibatch(*rows, stack)) for stack in stacks)
        except (TypeError, ValueError, IndexError):
            alone = False
        if not alone:
            raise GuideError(
                f"batch_size={size}: the log density of a row of '{rows.plates[0]}' changes when "
                f"other rows are left out of {list(rows.arrays)}, so that a minibatch is another "
                "model. Compute what sums up rows (x.mean(0), say) before the run and pass it as "
                f"data, or put plates that share rows into one. {WHOLE}"
            )
