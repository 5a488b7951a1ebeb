"""Hashes of models, by which two model texts are recognised as the same.

A fingerprint is a hash of the traced programs of a model's log densities. It covers what the text
reads from outside of itself (global variables, closures), which the source alone does not show.

Parties in processes of their own compare their texts when they agree on a plan (:mod:`.plan`), by
*terms*, one for each site: its program at the shapes of their plan, and the numbers in it. All
trace at the same shapes, so that nothing in a term depends on a silo's data. The programs of two
versions of JAX differ. Then terms are the values of the program at made-up data, which tell less: a
constant that matters for some data only may not show there.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array
from jax.extend.core import Literal
from jax.typing import ArrayLike

from numpyro_fed.basics.errors import ModelError
from numpyro_fed.basics.programs import jit_once
from numpyro_fed.data.silo_data import SiloData, array_bytes, signature
from numpyro_fed.text.jaxprs import (
    Program,
    as_program,
    branches,
    called_program,
    inner_programs,
    scan,
    type_of,
)
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.trace import DENSITY, INITIAL, THE_KEY, VALUE
from numpyro_fed.text.traces import Traces

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn, Var

    Atom = Var | Literal

# What writes the programs of a text: parties with the same can compare them.
SOFTWARE = f"jax {jax.__version__}, numpyro {numpyro.__version__}"
# Relative differences of constants that are none: parties may compute theirs on other machines, and
# in single precision. Values at made-up data are sums over rows, whose differences are larger.
CONSTANTS_ALIKE, VALUES_ALIKE = 1e-5, 1e-3
# A jaxpr that is printed shows functions by their address, which differs between processes.
ADDRESS = re.compile(r"0x[0-9a-f]+")
POINTS = 3  # at which values are compared; at a single one two texts could agree by chance


class Term(NamedTuple):
    """A site's part of a model's density, in a form in which parties can compare it."""

    site: str
    words: str  # a hash of its operations, and of what it reads that is no fraction
    # the constants that it reads: a number as it is; of an array its root mean square and
    # three projections. Where values are compared, these
    numbers: tuple[tuple[float, ...], ...]


def fingerprint(fm: FederatedModel, silos: Sequence[SiloData]) -> str:
    """Return a hash of a model's log densities and sites, as programs for silos of these shapes.

    The hashes of one function differ when a variable that it reads has changed in between. The
    hash is the same in every process, but not under other versions of JAX or NumPyro, which trace
    the same densities to other programs.
    """
    words = repr((fm.sites, fm.plates, sorted(fm.structure.supports)))
    digest = hashlib.sha256(words.encode())
    for silo in {signature(silo): silo for silo in silos}.values():
        trace = fm.traces.at(silo)
        # A density may stay as it is where a transform or a deterministic site has changed.
        wanted = [o for o in trace.outputs if o[0] in (DENSITY, VALUE, INITIAL)]
        program = Written(trace.part(wanted)[0])
        digest.update(program.words.encode())
        for number in program.numbers:
            digest.update(array_bytes(number))
    return digest.hexdigest()


def source_hash(model: Callable[..., Any]) -> str:
    """Return a hash of the source of a model's function, comments included; empty if unavailable.

    It covers less than a :func:`fingerprint`: nothing of what the text reads from outside. But it
    is the same under all versions of JAX and NumPyro.
    """
    # Handlers keep the model that they wrap in .fn, functools.partial in .func.
    while (inner := getattr(model, "fn", None) or getattr(model, "func", None)) is not None:
        model = inner
    try:
        text = inspect.getsource(model if inspect.isroutine(model) else type(model))
    except (OSError, TypeError):
        return ""
    return hashlib.sha256(inspect.cleandoc(text).encode()).hexdigest()


def terms_of(traces: Traces, template: SiloData, *, by_value: bool) -> tuple[Term, ...]:
    """Return the terms of a text's sites at made-up data of a plan's shapes.

    ``by_value`` says whether they are values, or programs and their constants.
    """
    trace = traces.at(template)
    shown = [s.name for s in trace.structure.sites if s.kind == "deterministic"]
    # Beside densities what is told of the posterior, and enters no density.
    outputs = [(DENSITY, name) for name in trace.terms] + [(VALUE, name) for name in shown]
    names = [trace.owners.get(name, name) for _, name in outputs]
    if not by_value:
        terms = []
        for site in dict.fromkeys(names):
            own = [output for name, output in zip(names, outputs, strict=True) if name == site]
            written = Written(trace.part(own)[0])
            terms.append(_term(site, written.words, written.numbers))
        return tuple(terms)

    @jit_once
    def sums(given: list[ArrayLike]) -> list[Array]:
        by_input = dict(zip(trace.inputs, given, strict=True))
        found = trace.run(outputs, lambda one: by_input[one])
        return [jnp.sum(found[output]) for output in outputs]

    values = []
    for point in range(POINTS):
        # The same numbers on every machine: fractions between 0 and 1 and whole numbers 0 or 1,
        # where nearly all distributions have a density, and most arrays an element of that index.
        random, given = np.random.default_rng(point), list[ArrayLike]()
        for one in trace.inputs:
            if one.kind == THE_KEY:
                given.append(jax.random.key(0))
                continue
            drawn = random.uniform(0.1, 0.9, one.shape.shape)
            is_real = np.dtype(one.shape.dtype).kind == "f"
            given.append((drawn if is_real else drawn < 0.5).astype(one.shape.dtype))
        values.append(sums(given))
    return tuple(
        _term(name, "", [np.float64(v) for v in at_points])
        for name, *at_points in zip(names, *values, strict=True)
    )


def _term(site: str, words: str, found: Sequence[ArrayLike]) -> Term:
    """Return the term of a site with these operations, which read these numbers."""
    digest, numbers = hashlib.sha256(words.encode()), list[tuple[float, ...]]()
    for number in found:
        if not jnp.issubdtype(jnp.asarray(number).dtype, jnp.floating):
            digest.update(array_bytes(number))  # whole numbers, which are the same everywhere
            continue
        array = np.asarray(number, np.float64)
        finite = np.isfinite(array)
        if not finite.all():
            digest.update(array_bytes(np.nan_to_num(np.where(finite, 0.0, array), nan=2.0)))
            array = np.where(finite, array, 0.0)
        if array.ndim == 0:
            numbers.append((float(array),))
            continue
        # Its root mean square, and its projections in three directions.
        directions = np.random.default_rng(0).normal(size=(3, array.size))
        projections = directions @ array.ravel() / np.sqrt(max(array.size, 1))
        root_mean_square = float(np.sqrt(np.mean(array**2))) if array.size else 0.0
        numbers.append((root_mean_square, *projections.tolist()))
    rounded = (tuple(float(f"{v:.9g}") for v in one) for one in numbers)
    return Term(site, digest.hexdigest()[:16], tuple(rounded))


def check_terms(expected: Sequence[Term], own: Sequence[Term], who: str, *, by_value: bool) -> None:
    """Raise an error if a party (``"silo 2"``) has another text than the server, by their terms."""
    wrong = []
    for there, here in zip(expected, own, strict=False):
        site = there.site
        if site != here.site:
            wrong.append(f"has '{here.site}' in the place of '{site}'")
            continue
        if there.words != here.words or len(there.numbers) != len(here.numbers):
            kinds = "another distribution, branch, shape or whole number"
            wrong.append(f"computes '{site}' in another way ({kinds})")
            continue
        for one, other in zip(there.numbers, here.numbers, strict=True):
            if by_value:
                if not np.allclose(one, other, rtol=VALUES_ALIKE, atol=VALUES_ALIKE):
                    wrong.append(f"has other values of '{site}' at made-up data")
                continue
            # Projections are as large as the root mean square, or closer to zero by chance. No
            # least size: a constant may be small in its unit, and two zeros are the same.
            size = max(map(abs, (*one, *other)))
            if not np.allclose(one, other, rtol=0, atol=CONSTANTS_ALIKE * size):
                wrong.append(
                    f"reads another array of constants in '{site}'"
                    if len(one) > 1
                    else f"has another constant in '{site}' than the server's"
                )
    if len(expected) != len(own):
        wrong.append("has other sites")
    if wrong:
        raise ModelError(
            f"{who} does not fit together with the server: its text {wrong[0]}. All parties must "
            "run the same text, with the same constants where it reads some from outside (a "
            "module, a closure). What is to differ between silos is data: pass it as an argument."
        )


# What stands for a value in the text: a digest of all that led to it, or a constant and its type.
Said = str | tuple[ArrayLike, str]


class Written:
    """A program's operations as text, and the numbers that they read, in their order.

    The text has no name, no address and no number with a fraction, so that it is the same in all
    processes with this version of JAX. Numbers are given apart, since a constant that was computed
    (an inverse, an exponential) differs between machines in its last digits. Calls are entered:
    what they are named, and in which order they take what they close over, does not matter.
    """

    def __init__(self, program: Program):
        self.numbers = list[ArrayLike]()
        inputs = [f"{i}:{_shape(v)}" for i, v in enumerate(program.jaxpr.invars)]
        self.words = " ".join(map(self._said, self._outputs(program, inputs)))

    def _outputs(self, program: Program, inputs: Sequence[Said]) -> list[Said]:
        """Return what a program's outputs are, as digests of all that led to them."""
        known: dict[int, Said] = dict(zip(map(id, program.jaxpr.invars), inputs, strict=True))
        for variable, value in zip(program.jaxpr.constvars, program.consts, strict=True):
            known[id(variable)] = (value, _shape(variable))

        def found(atom: Atom) -> Said:
            return (atom.val, _shape(atom)) if isinstance(atom, Literal) else known[id(atom)]

        for eqn in program.jaxpr.eqns:
            results = self._results(eqn, [found(v) for v in eqn.invars])
            known |= zip(map(id, eqn.outvars), results, strict=True)
        return [found(v) for v in program.jaxpr.outvars]

    def _results(self, eqn: JaxprEqn, operands: Sequence[Said]) -> Sequence[Said]:
        """Return what an operation's results are."""
        if (program := called_program(eqn)) is not None:
            return self._outputs(program, operands)
        # NumPyro's scan and cond return the parts of a distribution in the order of a set, which
        # is another in each process: an output is known by what leads to it, not by its place.
        if (choices := branches(eqn)) is not None:
            which = self._said(operands[0])
            by_branch = [self._outputs(p, operands[1:]) for p in choices]
            outputs = zip(*by_branch, strict=True)
            return [_digest("cond", which, *map(self._said, one)) for one in outputs]
        if (loop := scan(eqn)) is not None:
            consts, items = operands[: loop.num_consts], operands[loop.carry.stop :]
            carried = self._carried(operands[loop.carry])
            inside = [*consts, *carried, *(_digest("item", self._said(one)) for one in items)]
            results = self._outputs(loop.body, inside)
            steps, stacked = f"{loop.length} {loop.reverse}", results[loop.num_carry :]
            carry_of = _digest(*map(self._said, results[: loop.num_carry]))
            last = [_digest("last", steps, carry_of, f"{i}") for i in range(loop.num_carry)]
            return last + [
                _digest("stacked", steps, carry_of, one) if isinstance(one, str) else one
                for one in stacked
            ]
        if eqn.primitive.name == "while":
            ends, body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
            carry = self._carried(operands[ends + body :])
            goes_on = [*operands[:ends], *carry]
            step = [*operands[ends : ends + body], *carry]
            programs = as_program(eqn.params["cond_jaxpr"]), as_program(eqn.params["body_jaxpr"])
            pairs = zip(programs, (goes_on, step), strict=True)
            parts = [_digest(*map(self._said, self._outputs(*pair))) for pair in pairs]
        else:
            # Parameters as text, without programs, functions and other objects.
            settings = []
            for name, value in sorted(eqn.params.items()):
                items = value if isinstance(value, tuple | list) else (value,)
                objects = (callable(i) or hasattr(getattr(i, "jaxpr", i), "eqns") for i in items)
                if not any(objects) and not ADDRESS.search(repr(value)):
                    settings.append(f"{name}={value!r}")
            parts = [" ".join(settings), *map(self._said, operands)]
            for program in inner_programs(eqn):
                inputs = [f"in {i}:{_shape(v)}" for i, v in enumerate(program.jaxpr.invars)]
                parts.append(_digest(*map(self._said, self._outputs(program, inputs))))
        whole = _digest(eqn.primitive.name, *parts)
        return [_digest(whole, f"{i}:{_shape(v)}") for i, v in enumerate(eqn.outvars)]

    def _carried(self, operands: Sequence[Said]) -> list[str]:
        return [_digest("carry", f"{i}", self._said(one)) for i, one in enumerate(operands)]

    def _said(self, one: Said) -> str:
        """Return what stands for a value in the text; a number is noted wherever it is read."""
        if isinstance(one, str):
            return one
        value, shape = one
        self.numbers.append(value)
        return f"number {shape}"


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _shape(variable: Atom) -> str:
    aval = type_of(variable)
    return f"{getattr(aval, 'dtype', aval)}{getattr(aval, 'shape', '')}"
