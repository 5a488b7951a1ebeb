"""What a user sees of the package: what completion offers, and what a notebook shows."""

import inspect
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace

import models
import numpy as np
import pytest
from made_up import corrected_of, nuts_of

import numpyro_fed as nf
from numpyro_fed.basics.display import html_table, html_words
from numpyro_fed.posterior.posterior import Stage
from numpyro_fed.sigma.training import CheckRow, PriorCheck
from numpyro_fed.text.site_table import Site
from numpyro_fed.weigh.element_errors import Moments, Rounding

SUBMODULES = sorted(n for n in nf.__all__ if inspect.ismodule(getattr(nf, n)))


# --- completion ------------------------------------------------------------------------------


def test_the_submodules_are_there():
    assert {"handlers", "guides", "local", "losses", "schedules", "testing"} <= set(SUBMODULES)


@pytest.mark.parametrize("name", ["", *SUBMODULES])
def test_completion_offers_public_names_alone(name):
    module = getattr(nf, name) if name else nf
    assert dir(module) == sorted(module.__all__)
    for offered in dir(module):
        assert not offered.startswith("_")
        assert offered not in ("Any", "Array", "jax", "jnp", "dist")


@pytest.mark.parametrize("name", ["", *SUBMODULES])
def test_what_completion_offers_is_documented(name):
    module = getattr(nf, name) if name else nf
    for offered in dir(module):
        value = getattr(module, offered)
        owner = value if hasattr(value, "__name__") else type(value)
        inherited = {c.__doc__ for c in owner.__mro__[1:]} if inspect.isclass(owner) else {None}
        assert owner.__doc__ not in inherited, offered
        assert (getattr(owner, "__module__", None) or owner.__name__).startswith("numpyro_fed")


# --- notebooks -------------------------------------------------------------------------------


class Cells(HTMLParser):
    """The rows of a page's tables, and its other text; each tag has to be closed."""

    def __init__(self, page):
        super().__init__()
        self.rows, self.text, self.open = [], [], []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data
        else:
            self.text.append(data)


def test_text_stays_text():
    assert Cells(html_words("a < b & <i>c</i>")).text == ["a < b & <i>c</i>"]
    assert Cells(html_table(["<b>"], [["&"], [""]])).rows == [["<b>"], ["&"], [""]]


normal = models.level()


def results():
    r = np.random.default_rng(0)
    nuts = nuts_of(**{"<mu>": r.normal(size=(2, 500, 2))})
    cost = nf.SFVI(normal, start=None).cost([{"y": np.zeros(5)}, {"y": np.zeros(7)}])
    row = CheckRow({"phi": 0.5}, 0.1, 0.2, 1.0, 0.9, 0.01, 0.4)
    none, both = np.zeros(1), np.zeros((2, 1))
    corrected = corrected_of(np.full(200, 1 / 200))
    sites = (Site("mu", "latent", None, start=0, stop=1),)
    fit = SimpleNamespace(model=SimpleNamespace(named=lambda kind: sites, sites=sites))
    moments = Moments(none, none + 1, both, both)
    rounding = Rounding("float32", np.zeros(1), np.ones(1), 0.0)
    corrected = replace(
        corrected, result=SimpleNamespace(_fit=fit), _moments=moments, _rounding=rounding
    )
    return {
        "comparison": nf.compare(nuts, nuts),
        "cost": cost,
        "communication": cost.communication,
        "crossings": cost.communication.messages,
        "check": PriorCheck((row, row), (), (), ()),
        "nuts": nuts,
        "corrected": corrected,
        "fitted": replace(corrected, stages=(Stage("mode", "found", None),), _sent=3),
    }


TABLES = ("check", "communication", "comparison", "cost", "crossings")


@pytest.fixture(scope="module")
def shown():
    return results()


@pytest.mark.parametrize("name", TABLES)
def test_a_notebook_shows_the_table_that_is_printed(name, shown):
    """Every cell of it, in order; a row of cells for each line."""
    page, printed = Cells(shown[name]._repr_html_()), str(shown[name])
    cells = [cell for row in page.rows for cell in row]
    assert len(page.rows) > 1
    assert len({len(row) for row in page.rows}) == 1
    at = 0
    for word in (word for cell in cells for word in cell.split()):
        at = printed.index(word, at)


def test_a_notebook_shows_reports_in_words(shown):
    for name, text in {
        "nuts": shown["nuts"].report(),
        "corrected": str(shown["corrected"]),
        "fitted": str(shown["fitted"]),
    }.items():
        assert Cells(shown[name]._repr_html_()).text == [text]


def test_a_table_says_in_words_what_its_rows_do_not(shown):
    page = Cells(shown["cost"]._repr_html_())
    assert "".join(page.text).startswith("2 silos with 5 to 7 rows of 'row'")
    rows = Cells(shown["comparison"]._repr_html_()).rows
    assert any(row[0].startswith("<mu>") for row in rows)


def test_whatever_prints_a_report_has_a_page(shown):
    """Every public class whose text is not that of its fields."""
    for name in nf.__all__:
        value = getattr(nf, name)
        if inspect.isclass(value) and not issubclass(value, BaseException):
            texts = value.__module__.startswith("numpyro_fed") and "__str__" in dir_of(value)
            assert not texts or hasattr(value, "_repr_html_"), name


def dir_of(cls):
    """What a class and its bases of this package define."""
    own = (c for c in cls.__mro__ if c.__module__.startswith("numpyro_fed"))
    return {name for c in own for name in vars(c)}
