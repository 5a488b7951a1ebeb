"""Describe and agree: the facts of a silo's data, and the plan that all parties build from.

A silo describes its own data (:func:`describe`). All descriptions are compared (:func:`agree`), and
every party builds the same algorithm from the text and the plan, with nobody's data. In one process
the three steps run one after the other; over a network facts and plan are the first messages.

Facts of a client that holds columns have exact numbers of rows: every party holds the same rows,
and messages of one number a row show how many there are.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.basics.errors import ModelError
from numpyro_fed.basics.files import canonical, read_record
from numpyro_fed.basics.programs import jit_once
from numpyro_fed.data.silo_data import SiloData, Sizes, read, read_one, skeleton, unflatten_skeleton
from numpyro_fed.data.tables import check_columns
from numpyro_fed.text.fingerprint import SOFTWARE, Term, check_terms, terms_of
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.site_table import Plate, Site
from numpyro_fed.text.split import split
from numpyro_fed.text.vertical import with_server_data

VERSION = 4
# Points at which the global sites of all silos are compared. At a single one two texts could agree
# by chance; each more is a longer message.
POINTS = 3
# Relative. Silos may compute on other machines and in other precisions, and numbers are sent with
# six digits. Texts that differ are further apart.
TOLERANCE = 1e-3


class Argument(NamedTuple):
    """The description of one of a silo's arrays."""

    name: str
    dtype: str
    plates: tuple[str, ...]  # the silo plates that are as long as the array
    # the shape of one row if there are such plates, and of the whole array otherwise
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Facts:
    """The facts that a silo sends about its data and its model text, as JSON.

    They reveal the names, dtypes and trailing shapes of the arrays, the names of columns of
    DataFrames, in which outcomes some are missing, static values as they are, the sites of the
    model, for each silo plate the number of rows rounded up to a power of two, and checks of
    values, such as whether the likelihood is conjugate. They do not contain exact numbers of rows,
    nor any number that depends on the values of data, except for these checks. Those of a client
    that holds columns have the whole shapes of its arrays, and neither sites nor sizes.

    Attributes
    ----------
    arguments : tuple of Argument
    static : tuple of (name, value)
        Ints, bools, strings and None.
    tree : str
        The structure of arguments that are trees, as JSON; empty if there are none.
    sites, plates : tuple
        The site table, and the silo plates with the dimension and the level of their latents.
    sizes : tuple of (plate, int)
        The next power of two above the number of rows.
    globals : tuple of (name, numbers)
        Log densities and values of the global sites at fixed points: two silos with different
        texts differ here.
    value_checks : tuple of (question, bool)
    missing : tuple of str
        The arrays in which some outcomes are missing.
    columns : tuple of (str, tuple of str)
        The names of the columns of arrays that come from DataFrames.
    software : str
        The versions of JAX and NumPyro, on which the form depends in which texts are compared.
    version : int
    ids : str
        Of a client that holds columns, the SHA-256 of its rows' ids in their order, by which
        parties compare their rows; empty without ids.
    """

    arguments: tuple[Argument, ...]
    static: tuple[tuple[str, Any], ...]
    tree: str
    sites: tuple[Site, ...]
    plates: tuple[Plate, ...]
    sizes: tuple[tuple[str, int], ...]
    globals: tuple[tuple[str, tuple[float, ...]], ...] = ()
    value_checks: tuple[tuple[str, bool], ...] = ()
    missing: tuple[str, ...] = ()
    columns: tuple[tuple[str, tuple[str, ...]], ...] = ()
    software: str = SOFTWARE
    version: int = VERSION
    ids: str = ""

    def value_check(self, question: str) -> bool:
        """Return the answer to a question about values, by its name."""
        return dict(self.value_checks)[question]

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays as zeros, in the shapes of the silo's size class."""
        sizes = dict(self.sizes)
        return {
            a.name: np.zeros((*(sizes[p] for p in a.plates[:1]), *a.shape), a.dtype)
            for a in self.arguments
        }

    def zeros(self) -> Any:
        """Return the arguments that are trees, with these zeros."""
        return unflatten_skeleton(json.loads(self.tree), {**self.arrays, **dict(self.static)})

    def to_json(self) -> str:
        """Return the facts as JSON text, which :meth:`from_json` reads."""
        return canonical(self)

    @classmethod
    def from_json(cls, text: str) -> Facts:
        """Read facts from the text that :meth:`to_json` returned."""
        return read_record(cls, text)


@dataclass(frozen=True)
class Plan:
    """The plan from which all parties build the same algorithm, as JSON. It can be hashed.

    Attributes
    ----------
    facts : Facts
        The facts of the smallest silo, on behalf of all. The answer to a check of values is yes if
        it is yes at every silo.
    num_silos : int
    largest, total : tuple of (plate, int)
        The largest size class of a silo, and the sum over silos.
    settings : str
        The settings that the method has resolved, as JSON: the guide plate by plate, draws,
        damping, schedule.
    terms : tuple of tuple of Term
        What the server's text adds to the density, site by site, by which each silo finds out
        whether its own text has the same constants; one for all silos, or one for each of
        ``clients``. Empty in one process, where there is one text.
    software : str
        The versions of JAX and NumPyro of all parties, by which terms are programs; empty where
        versions differ, and terms are values.
    clients : tuple of Facts
        The facts of each client that holds columns; those of ``facts`` are then the arguments of
        the model, the clients' columns among them.
    shared : str
        The server's arrays if such clients receive them (``share_response``); empty otherwise.
    """

    facts: Facts
    num_silos: int
    largest: tuple[tuple[str, int], ...]
    total: tuple[tuple[str, int], ...]
    settings: str = "{}"
    terms: tuple[tuple[Term, ...], ...] = ()
    software: str = ""
    clients: tuple[Facts, ...] = ()
    shared: str = ""

    @property
    def fingerprint(self) -> str:
        """Return a hash of the plan, which differs between plans that differ."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    @property
    def plates_of_arrays(self) -> dict[str, tuple[str, ...]]:
        """Return for each array of rows the silo plates that are as long at every silo."""
        return {a.name: a.plates for a in self.facts.arguments if a.plates}

    def row_of(self, plate: str) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return the shape of one row and the dtype of each array that is as long as a plate."""
        arguments = (a for a in self.facts.arguments if plate in a.plates)
        return {a.name: (a.shape, a.dtype) for a in arguments}

    @property
    def chosen(self) -> dict[str, Any]:
        """Return the settings that the method has resolved."""
        return json.loads(self.settings)

    def template(self) -> SiloData:
        """Return zeros in the shapes of the smallest silo's size class, or of the first client."""
        if self.clients:
            return self.client_data({"columns": self.clients[0].zeros()["columns"], "predictor": 0})
        facts = self.facts
        if not facts.tree:
            return SiloData(facts.arrays, {}, facts.static, missing=facts.missing)
        return replace(read([facts.zeros()])[0], missing=facts.missing)

    def client_data(self, silo: Mapping[str, Any], owner: str = "a client") -> SiloData:
        """Return a client's columns as data, with the server's arrays if these are shared."""
        data = read_one(owner, silo)
        if not self.shared:
            return data
        shared = {
            name: np.frombuffer(base64.b64decode(numbers), dtype).reshape(shape)
            for name, (dtype, shape, numbers) in json.loads(self.shared).items()
        }
        return with_server_data(data, shared)

    def to_json(self) -> str:
        """Return the plan as JSON text, which :meth:`from_json` reads."""
        return canonical(self)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan from the text that :meth:`to_json` returned."""
        return read_record(cls, text)


def describe(model: Callable[..., Any], silo: Mapping[str, Any]) -> Facts:
    """Return the facts of a silo, from its own data alone.

    Parameters
    ----------
    model : callable
        A NumPyro model with ``silo_plate``.
    silo : dict
        The silo's data: keyword arguments of the model.

    Returns
    -------
    Facts
        Its docstring says what they reveal.

    Examples
    --------
    >>> import numpy as np, numpyro, numpyro.distributions as dist
    >>> import numpyro_fed as nf
    >>> def model(y):
    ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
    ...     with nf.silo_plate("row", y.shape[0]):
    ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y)
    >>> facts = nf.describe(model, dict(y=np.zeros(5)))
    >>> facts.sizes, facts.arguments[0].shape
    ((('row', 8),), ())
    """
    (data,) = read([silo], model)
    fm = split(model, [data])
    return facts_of(fm, data, fm.sizes(data), with_globals=True)


def facts_of(
    fm: FederatedModel, data: SiloData, sizes: Sizes, *, with_globals: bool = False
) -> Facts:
    """Return the facts of a silo whose text has been split, without checks of values."""
    arguments = []
    for name, array in sorted(data.arrays.items()):
        plates = tuple(p for p, n in sizes.items() if array.ndim and len(array) == n)
        shape = array.shape[1:] if plates else array.shape
        arguments.append(Argument(name, str(array.dtype), plates, shape))
    numbers: dict[str, list[float]] = {}
    if with_globals:
        theta, trace = fm.init_theta(jax.random.key(0)), fm.traces.at(data)

        @jit_once
        def at(key: Array) -> dict[str, Array]:
            terms, values = trace.globals_at(theta, jax.random.normal(key, (fm.dim,)))
            density = {f"log density of '{n}'": v for n, v in terms.items()}
            return density | {f"value of '{n}'": jnp.ravel(v)[:4] for n, v in values.items()}

        for i in range(POINTS):
            for name, value in at(jax.random.key(i)).items():
                # Six digits: more would differ between machines, and only lengthen the message.
                digits = (float(f"{v:.6g}") for v in np.ravel(value).tolist())
                numbers.setdefault(name, []).extend(digits)
    return Facts(
        arguments=tuple(arguments),
        static=data.static,
        tree="" if data.treedef is None else json.dumps(skeleton(data.named_tree())),
        sites=fm.sites,
        plates=fm.plates,
        sizes=tuple((p, size_class(n)) for p, n in sizes.items()),
        globals=tuple((k, tuple(v)) for k, v in sorted(numbers.items())),
        missing=data.missing,
        columns=data.columns,
    )


def facts_of_columns(data: SiloData) -> Facts:
    """Return the facts of a party that holds columns, with the whole shapes of its arrays."""
    arguments = (Argument(n, str(a.dtype), (), tuple(a.shape)) for n, a in data.arrays.items())
    tree = json.dumps(skeleton(data.named_tree()))
    return Facts(tuple(arguments), data.static, tree, (), (), ())


def size_class(n: int) -> int:
    """Return the smallest power of two that is at least ``n``."""
    # Coarse enough to hide a silo's number of rows, fine enough that a template of this size costs
    # at most twice as much as the silo itself.
    return 1 << max(0, n - 1).bit_length()


def agree(facts: Sequence[Facts]) -> Plan:
    """Compare the facts of all silos, and return the plan that they agree on."""
    first = facts[0]
    for j, other in enumerate(facts):
        _check_alike(first, other, j)
    smallest = min(facts, key=lambda f: sum(dict(f.sizes).values()))
    arguments = []
    for name in (a.name for a in smallest.arguments):
        # An array holds rows of a plate only if it is as long as the plate at every silo.
        found = [a for f in facts for a in f.arguments if a.name == name]
        shared = tuple(p for p in found[0].plates if all(p in a.plates for a in found))
        whole = [a for a in found if not a.plates]
        if not shared and not whole:
            raise ModelError(
                f"the array '{name}' is as long as one silo plate here and another there, so that "
                "nobody can tell whose rows it holds. Give the silo plates different sizes."
            )
        arguments.append(found[0]._replace(plates=shared) if shared else whole[0])
    questions = [question for question, _ in first.value_checks]
    value_checks = tuple((q, all(f.value_check(q) for f in facts)) for q in questions)
    names = [plate for plate, _ in first.sizes]
    sizes = [dict(f.sizes) for f in facts]
    missing = tuple(sorted({name for f in facts for name in f.missing}))
    columns = tuple(sorted({name: c for f in facts for name, c in f.columns}.items()))
    common = replace(smallest, arguments=tuple(arguments), value_checks=value_checks)
    return Plan(
        replace(common, missing=missing, columns=columns),
        len(facts),
        tuple((p, max(s[p] for s in sizes)) for p in names),
        tuple((p, sum(s[p] for s in sizes)) for p in names),
    )


def _check_alike(first: Facts, other: Facts, j: int) -> None:
    def kinds(facts: Facts, other: Facts) -> tuple[tuple[str, str, int], ...]:
        """Return name, dtype and number of axes of the arrays that neither silo lacks (None)."""
        lacking = {name for name, value in other.static if value is None}
        return tuple(
            (a.name, a.dtype, bool(a.plates) + len(a.shape))
            for a in facts.arguments
            if a.name not in lacking
        )

    names = dict(first.columns)
    for name, found in other.columns:
        check_columns(f"silo {j}", name, found, names.get(name, found), "silo 0")
    for what, mine, theirs in (
        ("the version of its facts", other.version, first.version),
        ("its sites", other.sites, first.sites),
        ("its silo plates", other.plates, first.plates),
        ("its arrays (name, dtype, axes)", kinds(other, first), kinds(first, other)),
        ("what of its arguments is a tree", other.tree, first.tree),
        (
            "the questions that it answers",
            list(dict(other.value_checks)),
            list(dict(first.value_checks)),
        ),
        ("its global sites", list(dict(other.globals)), list(dict(first.globals))),
    ):
        if mine != theirs:
            raise ModelError(
                f"silo {j} does not fit together with silo 0: {what} differ: {_shortened(mine)} "
                f"against {_shortened(theirs)}. All parties must run the same text and version on "
                "arrays of the same kind."
            )
    expected = dict(first.globals)
    for name, values in other.globals:
        if not np.allclose(values, expected[name], rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
            raise ModelError(
                f"silo {j} does not fit together with silo 0: the {name} at fixed points is "
                f"{_shortened(values)} against {_shortened(expected[name])}. All parties must run "
                "the same text, and no global site may depend on numbers of rows or on what is "
                "passed to one silo only."
            )


def with_terms(plan: Plan, fm: FederatedModel, facts: Sequence[Facts]) -> Plan:
    """Return the plan with the terms of the server's text, for silos with these facts."""
    same = all(f.software == SOFTWARE for f in facts)
    terms = terms_of(fm.traces, plan.template(), by_value=not same)
    return replace(plan, terms=(terms,), software=SOFTWARE if same else "")


def check_plan(plan: Plan, own: Facts, fm: FederatedModel, number: int) -> None:
    """Raise an error for a plan that silo ``number`` has no part in, by its own facts and text."""
    _check_alike(plan.facts, own, number)
    largest, total, answers = dict(plan.largest), dict(plan.total), dict(own.value_checks)
    words = f"the plan does not come from the facts of silo {number}"
    if not 0 <= number < plan.num_silos:
        raise ModelError(f"{words}: it has {plan.num_silos} silos.")
    for plate, size in own.sizes:
        if not size <= largest.get(plate, 0) <= total.get(plate, 0):
            raise ModelError(f"{words}: it has other numbers of rows of '{plate}'.")
    if left := set(own.missing) - set(plan.facts.missing):
        raise ModelError(f"{words}: it says that nothing is missing in {sorted(left)}.")
    for question, answer in plan.facts.value_checks:
        if answer and not answers[question]:
            raise ModelError(f"{words}: it says yes to '{question}', and this silo says no.")
    if plan.software not in ("", SOFTWARE):
        raise ModelError(f"{words}: it is of {plan.software}, and this silo has {SOFTWARE}.")
    by_value = not plan.software
    terms = terms_of(fm.traces, plan.template(), by_value=by_value)
    check_terms(plan.terms[0] if plan.terms else (), terms, f"silo {number}", by_value=by_value)


def _shortened(value: object) -> str:
    # A site table in full would bury the sentence around it.
    words = str(value)
    return words if len(words) <= 300 else f"{words[:300]}..."


def shared_text(arrays: Mapping[str, np.ndarray]) -> str:
    """Return arrays as JSON text, which :meth:`Plan.client_data` reads."""
    # Base64 keeps every bit of a float, and is shorter than decimal digits that would.
    return canonical(
        {
            name: [str(a.dtype), list(a.shape), base64.b64encode(a.tobytes()).decode()]
            for name, a in arrays.items()
        }
    )
