"""Questions after a fit that a model whose clients hold columns cannot answer, in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from numpyro_fed.errors import ModelError

TOGETHER = (
    "A row's predictor is the sum of what all clients compute on their columns: bring the draws of "
    "all parties together (sample_together(), where each client keeps its own), and "
)


def _refusal(what: str, instead: str) -> Callable[..., NoReturn]:
    """Return a method that refuses a question, whatever its arguments are."""

    def refuse(self: object, *args: Any, **kwargs: Any) -> NoReturn:
        raise ModelError(f"clients hold columns: {what}. {instead}")

    refuse.__doc__ = f"Refuse, since {what}."
    return refuse


class ColumnsAfterFit:
    """The questions of fits of rows, which fits of columns refuse with what to do instead.

    Raises
    ------
    ModelError
        By each method, whatever its arguments are.
    """

    predict = _refusal(
        "outcomes are not predicted",
        f"{TOGETHER}run the model at them on the new columns of all clients "
        "(numpyro.infer.Predictive).",
    )
    prior_predict = _refusal(
        "outcomes are not predicted from the prior",
        "Run the model without its response on the columns of all clients, where they may be in "
        "one place (numpyro.infer.Predictive).",
    )
    loo = _refusal(
        "rows are not left out, since each client holds a part of every row",
        f"{TOGETHER}give the log likelihoods of the rows there to arviz.loo. importance_correct "
        "has the log evidence, by which models are compared as well.",
    )
    leave_out = _refusal(
        "a client has no rows of its own that could be left out",
        "Fit the model without its columns, and compare log_evidence of importance_correct.",
    )
    add = _refusal(
        "no client can be added to a fit", "Run the method anew, with its columns in xs."
    )
    remove = _refusal(
        "no client can be removed from a fit", "Run the method anew, without its columns in xs."
    )
    disagreement = _refusal(
        "clients cannot disagree, since none of them has a likelihood of its own",
        "Look at the posterior of each client's latents (sample_posterior, to_arviz).",
    )
    prior_sensitivity = _refusal(
        "prior and likelihood are not weighed against each other",
        "Run the method anew with a wider prior, and compare the draws.",
    )
    plot = _refusal(
        "there is no plot of all parties' latents", "Take to_arviz() and ArviZ's plots."
    )
    plot_silos = _refusal(
        "clients have latents of different columns, which do not stand side by side",
        "Take to_arviz() and ArviZ's plots.",
    )
    plot_check = _refusal(
        "outcomes are not predicted",
        f"{TOGETHER}run the model at them on the columns of all clients "
        "(numpyro.infer.Predictive), and compare with the response.",
    )
