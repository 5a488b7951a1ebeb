"""Questions that a fit of columns refuses, in words."""

import numpy as np
import pytest
from cases import slow_but
from vertical_problems import KEY, data, logistic

import numpyro_fed as nf
from numpyro_fed.basics.errors import ModelError
from numpyro_fed.vertical.result import ColumnsAfterFit

QUIET = {"progress_bar": False}
WORDS = {
    "predict": "sample_together.*Predictive",
    "prior_predict": "Predictive",
    "loo": "each client holds a part of every row.*sample_together.*arviz.loo",
    "leave_out": "no rows of its own.*log_evidence",
    "average": "changed columns of all clients",
    "calibration": "compare with the response",
    "quantity": "draws of to_arviz",
    "ranks": "none is before another",
    "add": "Run the method anew",
    "remove": "Run the method anew",
    "disagreement": "none of them has a likelihood",
    "prior_sensitivity": "wider prior",
    "summary": "ArviZ's summary",
    "to_frame": "to_arviz",
    "plot": "ArviZ",
    "plot_silos": "different columns.*ArviZ",
    "plot_check": "compare with the response",
}


@pytest.fixture(scope="module")
def run():
    return nf.VFL(logistic, start=None).run(KEY, 3, *data(), **QUIET)


@pytest.mark.parametrize("question", slow_but(sorted(WORDS), 3))
def test_questions_of_rows_are_refused_with_what_to_do_instead(run, question):
    words = rf"clients hold columns: .*{WORDS[question]}"
    for arguments in ((), (KEY, {"xs": np.zeros(3)})):
        with pytest.raises(ModelError, match=words):
            getattr(run, question)(*arguments)


def test_all_questions_of_a_fit_are_answered_in_words():
    """Of rows there may be more of them one day."""
    public = {name for name in dir(nf.Posterior) if not name.startswith("_")}
    methods = {name for name in public if callable(getattr(nf.Posterior, name))}
    others = {"sample_posterior", "silo_params", "to_arviz", "save", "report", "draws_for_silo"}
    others |= {"unconstrained", "log_likelihoods", "saved_words", "saved_runs", "run_behind"}
    known = {name for name in dir(ColumnsAfterFit) if not name.startswith("_")} - others
    assert methods - others - known == set()
    assert known == set(WORDS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::numpyro_fed.ConvergenceWarning")
def test_corrections_of_columns_refuse_them_too(run):
    with pytest.raises(ModelError, match="sample_together"):
        nf.importance_correct(KEY, run, 50).loo()
