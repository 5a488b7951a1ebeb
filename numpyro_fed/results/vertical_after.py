"""Questions after a fit that a model whose clients hold columns cannot answer, in words."""

from __future__ import annotations

from typing import Any, NoReturn

from numpyro_fed.errors import ModelError

TOGETHER = (
    "A row's predictor is the sum of what all clients compute on their columns: bring the draws of "
    "all parties together (sample_together(), where each client keeps its own), and "
)


class ColumnsAfterFit:
    """The questions of fits of rows, which fits of columns refuse with what to do instead.

    Raises
    ------
    ModelError
        By each method, whatever its arguments are.
    """

    def predict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to predict, which takes the columns of all clients."""
        _refuse(
            "outcomes are not predicted",
            f"{TOGETHER}run the model at them on the new columns of all clients "
            "(numpyro.infer.Predictive).",
        )

    def prior_predict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to predict from the prior, which takes the columns of all clients."""
        _refuse(
            "outcomes are not predicted from the prior",
            "Run the model without its response on the columns of all clients, where they may be "
            "in one place (numpyro.infer.Predictive).",
        )

    def loo(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to leave rows out, of which each client holds a part."""
        _refuse(
            "rows are not left out, since each client holds a part of every row",
            f"{TOGETHER}give the log likelihoods of the rows there to arviz.loo. "
            "importance_correct has the log evidence, by which models are compared as well.",
        )

    def leave_out(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to leave a client out, without whose columns the model is another one."""
        _refuse(
            "a client has no rows of its own that could be left out",
            "Fit the model without its columns, and compare log_evidence of importance_correct.",
        )

    def add(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to add a client, with whose columns the model is another one."""
        _refuse("no client can be added to a fit", "Run the method anew, with its columns in xs.")

    def remove(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to remove a client, without whose columns the model is another one."""
        _refuse(
            "no client can be removed from a fit", "Run the method anew, without its columns in xs."
        )

    def disagreement(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to say which clients disagree, none of which has a likelihood of its own."""
        _refuse(
            "clients cannot disagree, since none of them has a likelihood of its own",
            "Look at the posterior of each client's latents (sample_posterior, to_arviz).",
        )

    def prior_sensitivity(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to weigh the prior, of which each client holds a part."""
        _refuse(
            "prior and likelihood are not weighed against each other",
            "Run the method anew with a wider prior, and compare the draws.",
        )

    def plot(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to plot; ArviZ does."""
        _refuse("there is no plot of all parties' latents", "Take to_arviz() and ArviZ's plots.")

    def plot_silos(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to plot silos' effects: clients are not silos of one kind."""
        _refuse(
            "clients have latents of different columns, which do not stand side by side",
            "Take to_arviz() and ArviZ's plots.",
        )

    def plot_check(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse a predictive check, which takes the columns of all clients."""
        _refuse(
            "outcomes are not predicted",
            f"{TOGETHER}run the model at them on the columns of all clients "
            "(numpyro.infer.Predictive), and compare with the response.",
        )


def _refuse(what: str, instead: str) -> NoReturn:
    raise ModelError(f"clients hold columns: {what}. {instead}")
