"""The fewest numbers through which silos' likelihoods depend on the globals.

The likelihood of a horseshoe reads 50 coefficients, each the product of three globals, and no other
function of these 101. In those numbers it is often nearly a parabola where it is none in the
globals. They are found in the traced program: a set of values that are computed from the globals
alone, through which all else that the terms of rows read of the globals is computed, with as few
numbers as can be. That is a minimum cut of a graph in which a value can carry as much as it has
numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Literal
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.text.jaxprs import (
    OF_MATRICES,
    Program,
    inner_programs,
    pruned,
    run_inlined,
    run_program,
    trace_program,
    type_of,
)
from numpyro_fed.text.log_density import FederatedModel

if TYPE_CHECKING:
    from jax.extend.core import Var

WITHOUT_BOUND = 2**30  # what an edge of the graph can carry, where nothing bounds it


@dataclass(frozen=True, eq=False)
class Predictors:
    """Functions of the globals alone, through which all likelihoods read them."""

    program: Program | None  # of the globals (dim,); None where they are the globals themselves
    number: int

    @classmethod
    def of(cls, fm: FederatedModel) -> Predictors:
        """Return the predictors of a text; the globals where there are no fewer numbers."""
        itself = cls(None, fm.dim)
        # The predictors of a text with parameters, or of a party's part, would depend on these too.
        if fm.named("param") or fm.networks or not fm.traces.split:
            return itself
        silo = fm.silo

        def terms(z_G: Array, others: tuple[Any, ...]) -> list[Array]:
            theta, z_L, arrays = others
            return list(fm.log_silo(theta, z_G, z_L, replace(silo, arrays=arrays)).values())

        others = fm.initial_parameters(silo), fm.zero_latents(silo), dict(_zeros(silo))
        at = jnp.zeros(fm.dim), others
        calls = trace_program(terms, *at)
        # From JAX 0.12 on the terms are one call, whose operations are to be seen.
        program = trace_program(lambda *args: run_inlined(calls, jax.tree.leaves(args)), *at)
        cut = _least_cut(program)
        number = sum(map(_size, cut))
        if number >= fm.dim:
            return itself
        of_cut = Program(program.jaxpr.replace(outvars=cut), program.consts)
        computed, used = pruned(of_cut, [True] * len(cut))
        return itself if any(used[1:]) or not used[0] else cls(computed, number)

    @cached_property
    def factors_matrices(self) -> bool:
        """Return whether a matrix is factored, as the covariance of a Gaussian process."""
        return self.program is not None and _factors_matrices(self.program)

    def __call__(self, z_G: Array) -> Array:
        """Return the predictors (number,) at globals (dim,)."""
        if self.program is None:
            return z_G
        return jnp.concatenate([jnp.ravel(a) for a in run_program(self.program, [z_G])])


def _factors_matrices(program: Program) -> bool:
    return any(
        eqn.primitive.name in OF_MATRICES or any(map(_factors_matrices, inner_programs(eqn)))
        for eqn in program.jaxpr.eqns
    )


def _zeros(silo: SiloData) -> dict[str, np.ndarray]:
    return {name: np.zeros(a.shape, a.dtype) for name, a in silo.arrays.items()}


def _size(variable: Var) -> int:
    return math.prod(type_of(variable).shape)


def _least_cut(program: Program) -> list[Var]:
    """Return the values of the globals, the first input, with the fewest numbers.

    All that is computed from the globals and anything else reads them through these values. Of
    several such sets it is the one that is closest to the globals.
    """
    jaxpr = program.jaxpr
    mixed = set(jaxpr.invars[1:])  # values that depend on something else as well
    number = {jaxpr.invars[0]: 0}  # of values that depend on the globals alone
    edges, read = set[tuple[int, int]](), set[int]()
    for eqn in jaxpr.eqns:
        inputs = [v for v in eqn.invars if not isinstance(v, Literal)]
        own = [number[v] for v in inputs if v in number]
        if any(v in mixed for v in inputs):
            mixed.update(eqn.outvars)
            read.update(own)
        elif own:
            number |= {v: len(number) + i for i, v in enumerate(eqn.outvars)}
            edges |= {(i, number[v]) for i in own for v in eqn.outvars}
    read |= {number[v] for v in jaxpr.outvars if not isinstance(v, Literal) and v in number}
    # A value is an edge from an even vertex to the next one; the last two are source and sink.
    n = len(number)
    source, sink = 2 * n, 2 * n + 1
    carried = [
        _size(v) if jnp.issubdtype(type_of(v).dtype, jnp.floating) else WITHOUT_BOUND
        for v in number
    ]
    others = [(2 * i + 1, 2 * j) for i, j in edges]
    others += [(2 * i + 1, sink) for i in read] + [(source, 0)]
    starts, ends = zip(*((2 * i, 2 * i + 1) for i in range(n)), strict=True)
    rows, columns = (
        [*a, *b] for a, b in zip((starts, ends), zip(*others, strict=True), strict=True)
    )
    most = np.array([*carried, *[WITHOUT_BOUND] * len(others)], np.int32)
    graph = csr_array((most, (rows, columns)), shape=(2 * n + 2, 2 * n + 2))
    left = csr_array(graph - maximum_flow(graph, source, sink).flow)
    left.eliminate_zeros()
    reached = set(breadth_first_order(left, source, return_predecessors=False).tolist())
    return [v for v, i in number.items() if 2 * i in reached and 2 * i + 1 not in reached]
