"""Describe, agree: what a silo says of itself, and the plan that all parties build from.

A silo describes its data by itself (:func:`describe`), all descriptions are held against each
other (:func:`agree`), and every party builds the same algorithm from the text and the plan, with
nobody's data. In one process the three steps run one after the other; over a network facts and
plan are the first messages.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.errors import ModelError
from numpyro_fed.model.binding import globals_at
from numpyro_fed.model.data import SiloData, Sizes, read
from numpyro_fed.model.federated import FederatedModel
from numpyro_fed.model.sites import Plate, Site, structure
from numpyro_fed.model.split import split
from numpyro_fed.programs import jit_once

VERSION = 1
Skeleton = str | list[Any]  # of JSON: a name, or a kind of node and what is in it
POINTS = 3  # at which the global sites of all silos are compared
TOLERANCE = 1e-3  # relative: silos may compute on other machines


class Argument(NamedTuple):
    """An array of a silo's: its name and dtype, the silo plates of its length, and its shape, of
    one row where there are such plates.
    """

    name: str
    dtype: str
    plates: tuple[str, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Facts:
    """The facts that a silo tells of its data and its model text: JSON, and nothing of any row.

    It reveals the names, dtypes and trailing shapes of the arrays, static values as they are, the
    sites of the model, for each silo plate the number of rows up to the next power of two, and
    verdicts: whether the likelihood is conjugate, say. Exact numbers of rows are not in it, nor
    any number that depends on the values of data, but for the verdicts.

    Attributes
    ----------
    arguments : tuple of Argument
    static : tuple of (name, value)
        Ints, bools, strings and None.
    tree : str
        How arguments that are trees are put together; empty where there are none.
    sites, plates : tuple
        The site table, and the silo plates with the dimension and the level of their latents.
    sizes : tuple of (plate, int)
        The next power of two above the number of rows.
    globals : tuple of (name, numbers)
        Log densities and values of the global sites at fixed points: two silos with different
        texts differ here.
    verdicts : tuple of (question, bool)
    version : int
    """

    arguments: tuple[Argument, ...]
    static: tuple[tuple[str, Any], ...]
    tree: str
    sites: tuple[Site, ...]
    plates: tuple[Plate, ...]
    sizes: tuple[tuple[str, int], ...]
    globals: tuple[tuple[str, tuple[float, ...]], ...] = ()
    verdicts: tuple[tuple[str, bool], ...] = ()
    version: int = VERSION

    def verdict(self, question: str) -> bool:
        """A verdict by name."""
        return dict(self.verdicts)[question]

    def to_json(self) -> str:
        """Return it as text, which :meth:`from_json` reads."""
        return canonical(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Facts:
        """Read what :meth:`to_json` wrote."""
        return cls._of(_tuples(json.loads(text)))

    @classmethod
    def _of(cls, found: dict[str, Any]) -> Facts:
        rows: dict[str, Callable[..., Any]] = {
            "arguments": Argument,
            "sites": Site,
            "plates": Plate,
        }
        typed = {k: tuple(row(*fields) for fields in found[k]) for k, row in rows.items()}
        return cls(**found | typed)


@dataclass(frozen=True)
class Plan:
    """The plan from which all parties build the same algorithm: frozen, hashable, JSON.

    Attributes
    ----------
    facts : Facts
        Those of the smallest silo, which stands for all: the verdicts are those of all together.
    num_silos : int
    largest, total : tuple of (plate, int)
        The largest size class of a silo, and the sum over silos.
    settings : str
        JSON of what the method has resolved: the guide plate by plate, draws, damping, schedule.
    """

    facts: Facts
    num_silos: int
    largest: tuple[tuple[str, int], ...]
    total: tuple[tuple[str, int], ...]
    settings: str = "{}"

    @property
    def fingerprint(self) -> str:
        """Differs between plans that differ."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    @property
    def rows(self) -> dict[str, str]:
        """The silo plate of each array that holds rows."""
        return {name: plates[0] for name, plates in self.lengths.items()}

    @property
    def lengths(self) -> dict[str, tuple[str, ...]]:
        """The silo plates of the length of each array that holds rows, the same at every silo."""
        return {a.name: a.plates for a in self.facts.arguments if a.plates}

    def row_of(self, plate: str) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape of one row and dtype of each array that is as long as a plate."""
        of = (a for a in self.facts.arguments if plate in a.plates)
        return {a.name: (a.shape, a.dtype) for a in of}

    @property
    def chosen(self) -> dict[str, Any]:
        """The settings that the method has resolved."""
        return json.loads(self.settings)

    def template(self) -> SiloData:
        """Zeros of the shapes of the smallest silo, at its size class: for tracing the text."""
        sizes = dict(self.facts.sizes)
        arrays = {
            a.name: np.zeros((*(sizes[p] for p in a.plates[:1]), *a.shape), a.dtype)
            for a in self.facts.arguments
        }
        static = dict(self.facts.static)
        if not self.facts.tree:
            return SiloData(arrays, {}, tuple(static.items()))
        silo = grown(json.loads(self.facts.tree), {**arrays, **static})
        return read([silo])[0]

    def to_json(self) -> str:
        """Return it as text, which :meth:`from_json` reads."""
        return canonical(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what :meth:`to_json` wrote."""
        found = _tuples(json.loads(text))
        return cls(**found | {"facts": Facts._of(found["facts"])})


def describe(model: Callable[..., Any], silo: Mapping[str, Any]) -> Facts:
    """Describe a silo, from its own data alone.

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
    (data,) = read([silo])
    fm = split(model, [data])
    sizes = structure(fm.text, data, "silo 0").sizes
    return with_globals(facts_of(fm, data, sizes), fm, data, sizes)


def facts_of(fm: FederatedModel, data: SiloData, sizes: Sizes) -> Facts:
    """The facts of a silo whose text has been split, but for verdicts and :func:`with_globals`."""
    return Facts(
        arguments=tuple(_argument(k, a, sizes) for k, a in sorted(data.arrays.items())),
        static=data.static,
        tree="" if data.treedef is None else json.dumps(skeleton(data.named_tree())),
        sites=fm.sites,
        plates=fm.plates,
        sizes=tuple((p, size_class(n)) for p, n in sizes.items()),
    )


def _argument(name: str, array: np.ndarray, sizes: Sizes) -> Argument:
    plates = tuple(p for p, n in sizes.items() if array.ndim and len(array) == n)
    return Argument(name, str(array.dtype), plates, array.shape[1:] if plates else array.shape)


def size_class(n: int) -> int:
    """The next power of two."""
    return 1 << max(0, n - 1).bit_length()


def with_globals(facts: Facts, fm: FederatedModel, data: SiloData, sizes: Sizes) -> Facts:
    """The same facts with log densities and values of the global sites at a few points."""
    z_L = {p.name: jnp.zeros((sizes[p.name], p.dim)) for p in fm.plates}
    theta = fm.init_theta(jax.random.key(0))

    @jit_once
    def at(key: Array, data: SiloData) -> dict[str, Any]:
        z_G = jax.random.normal(key, (fm.dim,))
        terms, values = globals_at(fm.text, fm.sites, theta, z_G, z_L, data)
        density = {f"log density of '{n}'": v for n, v in terms.items()}
        return density | {f"value of '{n}'": jnp.ravel(v)[:4] for n, v in values.items()}

    found: dict[str, list[float]] = {}
    for i in range(POINTS):
        for name, value in at(jax.random.key(i), data).items():
            found.setdefault(name, []).extend(float(f"{v:.6g}") for v in np.ravel(value).tolist())
    return replace(facts, globals=tuple((k, tuple(v)) for k, v in sorted(found.items())))


def agree(facts: Sequence[Facts]) -> Plan:
    """Hold the silos' facts against each other.

    Raises
    ------
    ModelError
        Naming the silo that does not fit together with silo 0, and what differs.
    """
    first = facts[0]
    for j, other in enumerate(facts):
        _check_alike(first, other, j)
    smallest = min(facts, key=lambda f: sum(dict(f.sizes).values()))
    held: dict[str, list[Argument]] = {}
    for argument in (a for f in facts for a in f.arguments):
        held.setdefault(argument.name, []).append(argument)
    arguments = [_agreed(held[a.name]) for a in smallest.arguments]
    questions = [question for question, _ in first.verdicts]
    verdicts = tuple((q, all(f.verdict(q) for f in facts)) for q in questions)
    names = [plate for plate, _ in first.sizes]
    sizes = [dict(f.sizes) for f in facts]
    return Plan(
        replace(smallest, arguments=tuple(arguments), verdicts=verdicts),
        len(facts),
        tuple((p, max(s[p] for s in sizes)) for p in names),
        tuple((p, sum(s[p] for s in sizes)) for p in names),
    )


def _agreed(of_silos: Sequence[Argument]) -> Argument:
    """One argument for all: it holds rows of a plate only if it does at every silo."""
    plates = [p for p in of_silos[0].plates if all(p in a.plates for a in of_silos)]
    if plates:
        return of_silos[0]._replace(plates=tuple(plates))
    whole = [a for a in of_silos if not a.plates]
    if not whole:
        raise ModelError(
            f"the array '{of_silos[0].name}' is as long as one silo plate here and another there, "
            "so that nobody can tell whose rows it holds. Give the silo plates different sizes."
        )
    return whole[0]


def _check_alike(first: Facts, other: Facts, j: int) -> None:
    def kinds(facts: Facts, other: Facts) -> tuple[tuple[str, str, int], ...]:
        """Return the arrays that both hold: None says that a silo lacks one."""
        lacking = {name for name, value in other.static if value is None}
        return tuple(
            (a.name, a.dtype, bool(a.plates) + len(a.shape))
            for a in facts.arguments
            if a.name not in lacking
        )

    for what, mine, theirs in (
        ("the version of its facts", other.version, first.version),
        ("its sites", other.sites, first.sites),
        ("its silo plates", other.plates, first.plates),
        ("its arrays (name, dtype, axes)", kinds(other, first), kinds(first, other)),
        ("what of its arguments is a tree", other.tree, first.tree),
        ("the questions that it answers", _names(other.verdicts), _names(first.verdicts)),
        ("its global sites", _names(other.globals), _names(first.globals)),
    ):
        if mine != theirs:
            raise ModelError(
                f"silo {j} does not fit together with silo 0: {what} differ: {_shown(mine)} "
                f"against {_shown(theirs)}. All parties must run the same text and version on "
                "arrays of the same kind."
            )
    expected = dict(first.globals)
    for name, values in other.globals:
        if not np.allclose(values, expected[name], rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
            raise ModelError(
                f"silo {j} does not fit together with silo 0: the {name} at fixed points is "
                f"{_shown(values)} against {_shown(expected[name])}. All parties must run the same "
                "text, and no global site may depend on numbers of rows or on what is passed to "
                "one silo only."
            )


def _names(pairs: tuple[tuple[str, object], ...]) -> tuple[str, ...]:
    return tuple(name for name, _ in pairs)


def _shown(value: object) -> str:
    words = str(value)
    return words if len(words) <= 300 else f"{words[:300]}..."


def canonical(value: object) -> str:
    """JSON, one text for each value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _tuples(value: object) -> Any:
    """JSON's lists as tuples."""
    if isinstance(value, list):
        return tuple(map(_tuples, value))
    if isinstance(value, dict):
        return {k: _tuples(v) for k, v in value.items()}
    return value


def skeleton(tree: object) -> Any:
    """A tree of names as JSON: what kind of node, and what is in it."""
    if isinstance(tree, dict):
        return ["dict", {k: skeleton(v) for k, v in tree.items()}]
    if isinstance(tree, list | tuple):
        return [type(tree).__name__, [skeleton(v) for v in tree]]
    return tree


def grown(skeleton: Skeleton, leaves: Mapping[str, Any]) -> Any:
    """The tree that a skeleton tells of, with leaves for names."""
    if isinstance(skeleton, str):
        return leaves[skeleton]
    kind, parts = skeleton
    grow = partial(grown, leaves=leaves)
    if kind == "dict":
        return {k: grow(v) for k, v in parts.items()}
    return (tuple if kind == "tuple" else list)(map(grow, parts))
