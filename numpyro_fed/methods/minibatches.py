"""Minibatches of a silo's rows: the rule by which they are drawn, and what cannot be cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from numpyro_fed.basics.errors import GuideError
from numpyro_fed.data.minibatches import Minibatches
from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.guides.guide import Guide
from numpyro_fed.text.layout import WHOLE, Layout, minibatches_of_plates
from numpyro_fed.text.log_density import FederatedModel


def minibatches_of(
    fm: FederatedModel,
    plates_of: Mapping[str, tuple[str, ...]],
    size: int | None,
    guide: Guide,
    draws: Mapping[str, int],
) -> Minibatches | None:
    """Return the rule by which rows are drawn, or None without minibatches.

    Guides and bounds that cannot be cut are refused.
    """
    if size is None:
        return None
    minibatches = minibatches_of_plates(fm, plates_of, size)
    words = f"batch_size={size} cannot go with"
    if joint := [p for p in minibatches.plates if p in guide.locals and guide.locals[p].joint]:
        raise GuideError(
            f"{words} locals='joint' for silo_plate '{joint[0]}': one covariance over all rows has "
            f"no part for a minibatch. Use locals='full' or 'diagonal'. {WHOLE}"
        )
    if weighted := [p for p in guide.outer_plates if draws[p] > 1]:
        raise GuideError(
            f"{words} {draws[weighted[0]]} draws at silo_plate '{weighted[0]}', above the rows of "
            "others: a silo is weighed as a whole there, of which some rows say nothing without "
            f"bias. Use one draw there. {WHOLE}"
        )
    return minibatches


def check_rows_alone(layout: Layout, size: int | None, stacks: Sequence[SiloData]) -> None:
    """Raise an error if a row's log density changes when other rows are left out."""
    if size is None:
        return
    for rows in minibatches_of_plates(layout.model, layout.possible_plates, size).cut:
        try:
            alone = all(bool(layout.checks.minibatch(*rows, stack)) for stack in stacks)
        # A model may fail on fewer rows than it has lengths for, which is an answer, too.
        except (TypeError, ValueError, IndexError):
            alone = False
        if not alone:
            raise GuideError(
                f"batch_size={size}: the log density of a row of '{rows.plates[0]}' changes when "
                f"other rows are left out of {list(rows.arrays)}, so that a minibatch is another "
                "model. Compute what sums up rows (x.mean(0), say) before the run and pass it as "
                f"data, or put plates that share rows into one. {WHOLE}"
            )
