"""The objectives that users choose: the ELBO, locally enhanced bounds, and quadrature."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from numpyro_fed.basics.errors import ModelWarning, positive_int
from numpyro_fed.guides.guide import Guide
from numpyro_fed.guides.quadrature import NODES, default_nodes, quadrature_misfit
from numpyro_fed.guides.structured import Spec, Structured, as_structured
from numpyro_fed.text.log_density import FederatedModel


@dataclass(frozen=True)
class ELBO:
    r"""The evidence lower bound.

    .. math::
        \mathcal{L} = \mathbb{E}_q\Big[\log p(z_G) - \log q(z_G)
        + \sum_j \big(\log p(z_{L_j}, y_j \mid z_G) - \log q(z_{L_j} \mid z_G)\big)\Big]

    Its gradient sticks the landing: the parameters inside ``log q`` are stopped. The gradient stays
    unbiased, and has no variance where the guide is exact (Roeder, Wu and Duvenaud 2017). NumPyro's
    autoguides, as guides of the globals, are differentiated in full.

    Examples
    --------
    >>> import numpyro_fed as nf
    >>> nf.ELBO()
    ELBO()
    """


@dataclass(frozen=True)
class LocallyEnhanced:
    r"""A locally enhanced bound: importance-weighted for each row's own latents.

    .. math::
        \mathcal{L} = \mathbb{E}\Big[\log\frac{p(z_G)}{q(z_G)} + \sum_j \sum_{i \in j}
        \log \frac1K \sum_{k=1}^{K}
        \frac{p(z_i^k, y_i \mid z_G)}{q(z_i^k \mid z_G)}\Big]

    It sums over silos as the ELBO does, and tends to the bound with the rows' latents integrated
    out as K grows (Geffner and Domke 2022, arXiv 2203.04432, section 3).

    Parameters
    ----------
    draws : int or dict of str to int
        ``K``. An int is for the plates of rows; an outer plate, on which rows of another plate
        depend, then has one draw. A dict gives ``K`` by silo plate, and 1 for plates that it does
        not name. With ``K > 1`` at an outer plate the weight is that of all the silo's data, since
        its rows depend on each other through these latents, and all outer plates use the largest
        ``K`` among them.

    Notes
    -----
    Gradients are doubly reparametrised (Tucker et al. 2019): only to stop ``log q`` inside the
    log-mean-exp would bias them. The identity is applied to the parameters of the local guide. The
    path through ``z_G`` is differentiated as it is, so that a row whose guide is exact adds no
    noise to the globals. With ``K > 1`` at an outer plate the identity is applied at that plate,
    and rows below are differentiated in full; so are rows under ``locals="joint"``.

    Examples
    --------
    >>> import numpyro_fed as nf
    >>> nf.LocallyEnhanced(draws=20)
    LocallyEnhanced(draws=20)
    >>> nf.LocallyEnhanced(draws={"hospital": 20}).draws["hospital"]
    20
    """

    draws: int | Mapping[str, int] = 20

    def __post_init__(self) -> None:
        # In one order, since parties compare the words.
        if isinstance(self.draws, Mapping):
            object.__setattr__(self, "draws", dict(sorted(self.draws.items())))


@dataclass(frozen=True)
class Quadrature:
    r"""The log likelihood of silos with rows' latents integrated by Gauss-Hermite quadrature.

    .. math::
        \mathcal{L} = \mathbb{E}_{q(z_G)}\Big[\log\frac{p(z_G)}{q(z_G)} + \sum_j \sum_{i \in j}
        \log \int p(z_i, y_i \mid z_G)\, dz_i\Big]

    The integral of a row has its nodes at the conditional mode of the row's latents, in units of
    their curvature (Pinheiro and Bates 1995). It is for rows with one or two latents, and for an
    outer plate with one or two. It has no noise, and no guide of the locals has a part in it.

    Parameters
    ----------
    nodes : int
        Nodes in each dimension. Of a binary outcome with four visits and an effect of sd 2.2,
        eleven have an error of 2e-4 nats for each row.

    Examples
    --------
    >>> import numpyro_fed as nf
    >>> nf.Quadrature()
    Quadrature(nodes=11)
    """

    nodes: int = 11

    def __post_init__(self) -> None:
        positive_int("nodes", self.nodes)


# Nodes by which a correction integrates rows with one latent. The errors of rows add up in a
# weight: over the 300 children of a silo of the six cities they change by 0.023 nats from draw to
# draw with eleven nodes, by 0.004 with fifteen, and by 0.0003 with twenty-three.
NODES_OF_WEIGHTS = 17


def default_quadrature(fm: FederatedModel) -> Quadrature | None:
    """Return the quadrature by which a correction integrates rows' latents; None for draws."""
    nodes = default_nodes(fm)
    if not nodes:
        return None
    return Quadrature(NODES_OF_WEIGHTS if nodes == NODES and fm.row_plates else nodes)


def objective_for(
    given: Objective | None, fm: FederatedModel, guide: Spec | None, start: str | None
) -> Objective:
    """Return a run's objective: the given one; else quadrature where it can be, and the ELBO.

    By quadrature no parameter of the locals' guide changes the bound, so that it takes the place of
    the ELBO only where the user chose no such guide. It searches for rows' modes from the guide's
    means, which are near where the run begins at the mode (``start``), or at the posterior of
    another run, whose guide of the locals is not fitted if that was by quadrature.
    """
    if given is not None:
        return given
    chosen, default = as_structured(guide), Structured()
    names = "locals", "couple_mean", "couple_scale"
    is_open = all(getattr(chosen, name) == getattr(default, name) for name in names)
    nodes = default_nodes(fm) if start in ("mode", "result") and is_open else 0
    return Quadrature(nodes) if nodes else ELBO()


def draws_of(given: Objective | None, objective: Objective, guide: Guide) -> dict[str, int]:
    """Return :func:`draws_by_plate` of a run's objective; 1 each where quadrature is the default.

    Rows that read each other's latents are then not refused: their search for the mode is, after
    which the run goes on by the ELBO.
    """
    draws = draws_by_plate(objective, guide)
    chosen = given is not None or not isinstance(objective, Quadrature)
    return draws if chosen else dict.fromkeys(draws, 1)


def check_quadrature(fm: FederatedModel) -> None:
    """Raise an error if quadrature is not for the model."""
    if (misfit := quadrature_misfit(fm)) is not None:
        raise ValueError(f"Quadrature is not for this model: {misfit}.")


Objective = ELBO | LocallyEnhanced | Quadrature


def draws_by_plate(objective: Objective, guide: Guide) -> dict[str, int]:
    """Return ``K`` for each silo plate that has latents, or its nodes in each dimension."""
    if isinstance(objective, ELBO):
        return dict.fromkeys(guide.locals, 1)
    if isinstance(objective, Quadrature):
        check_quadrature(guide.model)
        return dict.fromkeys(guide.locals, objective.nodes)
    if not isinstance(objective, LocallyEnhanced):
        raise TypeError(
            "objective must be numpyro_fed.ELBO(), LocallyEnhanced(draws=...) or "
            f"Quadrature(nodes=...), got {objective!r}"
        )
    if isinstance(objective.draws, Mapping):
        draws = {**dict.fromkeys(guide.locals, 1), **objective.draws}
    else:
        draws = {p: 1 if p in guide.outer_plates else objective.draws for p in guide.locals}
        if objective.draws != 1 and guide.outer_plates and not guide.row_plates:
            warnings.warn(
                f"{objective} changes nothing: rows of another plate depend on every silo plate "
                f"with latents ({', '.join(guide.outer_plates)}). If each row has its own data, "
                "put these inside, in a nested plate with one row of a matrix for each; otherwise "
                f"say draws={{'{guide.outer_plates[0]}': {objective.draws}}}, which weighs a silo "
                "as a whole.",
                category=ModelWarning,
                stacklevel=2,
            )
    for plate, k in draws.items():
        if plate not in guide.locals:
            raise ValueError(
                f"draws names '{plate}', but the silo plates with latents are "
                f"{sorted(guide.locals)}. Name one of those."
            )
        if not isinstance(k, int) or k < 1:
            raise ValueError(f"draws for silo_plate '{plate}' must be a positive int, got {k!r}.")
    return draws
