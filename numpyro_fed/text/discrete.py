r"""Discrete latents of rows, summed out of a traced text.

A discrete latent :math:`k_i` of a row takes finitely many values. The row's density is the sum over
them of its density with the latent at each,

.. math::
    p(y_i \mid z) = \sum_k p(k \mid z)\, p(y_i \mid k, z),

with one term for each joint value if a row has several. The text is evaluated at all of them side
by side. Its sites keep their names: where several of them read the latent, each has what it adds
to the sum of those before it, :math:`\log p(y_{i2} \mid y_{i1}, z)`. A draw of :math:`k_i` is one
from its posterior given the row's outcomes and all other latents.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from jax.typing import ArrayLike

from numpyro_fed.basics.errors import ModelError
from numpyro_fed.numerics.accurate_densities import no_more_than_finite
from numpyro_fed.text.jaxprs import as_program, type_of
from numpyro_fed.text.row_axes import MIXED, row_axes
from numpyro_fed.text.silo_plate import unwrapped
from numpyro_fed.text.trace import (
    DENSITY,
    DISCRETE,
    DRAW,
    EDGE,
    INSIDE,
    OBSERVED,
    SCALE,
    UNGUARDED,
    UNSCALED,
    VALUE,
    Input,
    Output,
    Trace,
)

MAX_JOINT = 64  # joint values of the discrete latents of a row
# Nats below the most likely joint value, from which on another one counts for nothing: its part of
# the sum and of its derivatives is below the rounding of double precision.
NEGLIGIBLE = 40.0


class FiniteSupport(NamedTuple):
    """The values that a discrete latent takes.

    ``values`` (K, ...) are those of one element, and ``event_dim`` is the number of their axes. The
    latent itself has this ``shape``, of which the first ``batch_dim`` axes are those of its batch.
    """

    values: np.ndarray
    event_dim: int
    shape: tuple[int, ...]
    batch_dim: int


def finite_support(site: Mapping[str, Any]) -> FiniteSupport | None:
    """Return the values of a discrete latent; None if they are too many, or not known."""
    fn = site["fn"]
    if fn.support is None or not fn.support.is_discrete:
        return None
    base = unwrapped(fn)
    while isinstance(base, dist.MaskedDistribution):
        base = unwrapped(base.base_dist)
    try:
        with jax.ensure_compile_time_eval():
            listed = np.asarray(base.enumerate_support(expand=False))
    except (NotImplementedError, TypeError, jax.errors.JAXTypeError):
        return None
    values = listed.reshape(len(listed), *listed.shape[1 + len(base.batch_shape) :])
    shape = tuple(fn.shape(site["kwargs"]["sample_shape"]))
    return FiniteSupport(values, base.event_dim, shape, len(shape) - fn.event_dim)


def summed_out(
    trace: Trace, supports: Mapping[str, FiniteSupport], scales: Mapping[str, Any]
) -> Trace:
    """Return a trace without the discrete latents, which are summed out of its densities.

    ``scales`` has those of the sites that are scaled. The values of the latents, and of whatever
    else reads them, are drawn by the key of the input ``DRAW``.
    """
    reads = {output: trace.reads(output, DISCRETE) for output in trace.trees}
    groups = _groups(trace, supports, scales, reads)
    hidden = UNSCALED, SCALE
    kept = [o for o, read in reads.items() if not read and o[1] not in supports]
    kept = [o for o in kept if o[0] not in hidden]
    # What is observed, or may be, is not checked where the latents decide over it.
    drawn = [o for o, read in reads.items() if read and o[0] == VALUE]
    for kind, name in drawn:
        if any(s.name == name and s.kind == "latent" for s in trace.structure.sites):
            raise ModelError(
                f"the support of the latent '{name}' depends on the discrete latent "
                f"'{min(reads[kind, name])}', which is summed out. Write it with one support."
            )
    others = [one for one in trace.inputs if one.kind != DISCRETE]
    key = jax.eval_shape(lambda: jax.random.key(0))
    inputs = *others, Input(DRAW, "", 0, jax.ShapeDtypeStruct(key.shape, key.dtype))

    def outputs(*given: Array) -> dict[Output, Any]:
        by_place = dict(zip([one[:3] for one in inputs], given, strict=True))
        at = At(trace, by_place)
        found, values = at(kept, {}), dict[str, Array]()
        for number, group in enumerate(groups):
            logs, are_numbers = group.log_densities(at)
            found |= group.conditionals(at, logs, are_numbers)
            if drawn:
                of_key = jax.random.fold_in(by_place[DRAW, "", 0], number)
                values |= group.drawn(of_key, sum(logs, jnp.zeros(())))
        return found | at(drawn, values)

    closed, out = jax.make_jaxpr(outputs, return_shape=True)(*(one.shape for one in inputs))
    terms = {name: term for name, term in trace.terms.items() if name not in supports}
    for group in groups:
        terms |= {n: trace.terms[n]._replace(batch_shape=group.shape) for n in group.readers}
    readers = {z: frozenset(g.readers) for g in groups for z in g.latents}
    unchecked = {
        name for kind, name in reads if kind in (OBSERVED, INSIDE, EDGE) and reads[kind, name]
    }
    return Trace(
        trace.structure,
        terms,
        {name: s for name, s in trace.supports.items() if name not in unchecked},
        as_program(closed),
        inputs,
        tuple(path[0].key for path, _ in jax.tree.leaves_with_path(out)),
        {output: jax.tree.structure(value) for output, value in out.items()},
        readers,
    )


class At(NamedTuple):
    """A trace at values of its inputs, discrete latents aside."""

    trace: Trace
    by_place: Mapping[tuple[str, str, int], Array]

    def __call__(
        self, wanted: Sequence[Output], discrete: Mapping[str, Array]
    ) -> dict[Output, Any]:
        """Return some outputs at these values of discrete latents."""

        def operand(one: Input) -> ArrayLike:
            return discrete[one.name] if one.kind == DISCRETE else self.by_place[one[:3]]

        return self.trace.run(wanted, operand)

    @property
    def fixed(self) -> At:
        """Return the same, of which no derivative is taken."""
        return At(self.trace, jax.lax.stop_gradient(dict(self.by_place)))


@dataclass(frozen=True, eq=False)
class Group:
    """Discrete latents of rows that are summed out together, and the sites that read them.

    ``dims`` are the dims of the batch along which the sum is taken element by element, that of the
    rows among them, and ``shape`` is the shape of the sums. ``shares_scale`` says whether all sites
    have one scale, which is that of the sum.
    """

    trace: Trace
    supports: Mapping[str, FiniteSupport]
    latents: tuple[str, ...]
    readers: tuple[str, ...]
    dims: frozenset[int]
    shape: tuple[int, ...]
    shares_scale: bool

    @cached_property
    def joint(self) -> dict[str, np.ndarray]:
        """Return the joint values (C, ...) of each latent, with axes of one at the ``dims``."""
        own, each = dict[str, tuple[int, ...]](), list[int]()
        for name in self.latents:
            at = self.supports[name]
            axes = enumerate(at.shape[: len(at.shape) - at.event_dim])
            own[name] = tuple(1 if i - at.batch_dim in self.dims else n for i, n in axes)
            each += [len(at.values)] * math.prod(own[name])
        if (number := math.prod(each)) > MAX_JOINT:
            named = " and ".join(f"'{name}'" for name in self.latents)
            raise ModelError(
                f"the discrete latents of a row, {named}, have {number} joint values, which are "
                f"summed one by one: at most {MAX_JOINT} are supported. Sum them out in the text, "
                "put what is independent given the rest into a numpyro.plate of its own, or bound "
                "the values more closely."
            )
        index, found = np.indices(each).reshape(len(each), number).T, dict[str, np.ndarray]()
        for name, shape in own.items():
            part, index = np.split(index, [math.prod(shape)], 1)
            values = self.supports[name].values[part]
            found[name] = values.reshape(number, *shape, *values.shape[2:])
        return found

    def drawn(self, key: Array, logs: Array) -> dict[str, Array]:
        """Return draws of the latents, given the log densities (C, ...) of joint values."""
        # A key for each row: its draws are the same among more rows, as those of padding.
        dim = self.trace.terms[self.latents[0]].dim
        rows = jnp.moveaxis(logs, dim, 0)
        keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(len(rows)))
        index = jax.vmap(partial(jax.random.categorical, axis=0))(keys, rows)
        # Without the axis of joint values the rows' axis is where it was, from the right.
        return self.values_at(jnp.moveaxis(index, 0, dim))

    def values_at(self, index: Array) -> dict[str, Array]:
        """Return the latents where each element has the joint value of this number."""
        found = {}
        for name, values in self.joint.items():
            at = self.supports[name]
            # The sums may have axes in front that this latent lacks, and none of its own events.
            own = index.shape[len(index.shape) - at.batch_dim :]
            number = index.reshape(own + (1,) * (len(at.shape) - at.batch_dim))
            table = jnp.broadcast_to(values, (len(values), *at.shape))
            found[name] = jnp.take_along_axis(table, jnp.broadcast_to(number, (1, *at.shape)), 0)[0]
        return found

    def log_densities(self, at: At) -> tuple[list[Array], list[Array]]:
        """Return the log densities (C, ...) of latents and readers, and whether they are numbers.

        They are minus infinity where they are NaN or infinite above.
        """
        kind = UNSCALED if self.shares_scale else UNGUARDED
        wanted = [(kind, name) for name in (*self.latents, *self.readers)]

        def evaluated(at: At, values: Mapping[str, Array]) -> list[Array]:
            whole = {n: jnp.broadcast_to(v, self.supports[n].shape) for n, v in values.items()}
            found = at(wanted, whole)
            return [self._by_element(name, found[kind, name]) for kind, name in wanted]

        # A density of zero may have no derivative, as that of a count with a mean of zero, and a
        # weight of zero times infinity would be NaN. So there the derivative is taken at a joint
        # value that is possible. The same where next to none of the mass is: NumPyro's density of
        # a one at a probability of zero is tiny, and its second derivative no number.
        joint = {name: jnp.asarray(values) for name, values in self.joint.items()}
        first = jax.vmap(partial(evaluated, at.fixed))(joint)
        total = no_more_than_finite(sum(first, jnp.zeros(())))
        possible = (total > -jnp.inf) & (total >= total.max(0) - NEGLIGIBLE)
        likely = self.values_at(jnp.argmax(total, 0))
        safe = {}
        for name, values in joint.items():
            own = possible.reshape(len(possible), *self._own_axes(name))
            safe[name] = jnp.where(own, values, likely[name])
        second = jax.vmap(partial(evaluated, at))(safe)
        pairs = zip(first, second, strict=True)
        logs = [no_more_than_finite(jnp.where(possible, b, a)) for a, b in pairs]
        # A joint value that the latents can have must have a density, if of zero.
        prior = no_more_than_finite(sum(first[: len(self.latents)], jnp.zeros(())))
        return logs, [((a < jnp.inf) | (prior == -jnp.inf)).all(0) for a in first]

    def conditionals(
        self, at: At, logs: Sequence[Array], are_numbers: Sequence[Array]
    ) -> dict[Output, Array]:
        """Return the log density of each reader given those before it, the latents summed out."""
        scale = self._scale(at) if self.shares_scale else 1.0
        joint, before = sum(logs[: len(self.latents)]), None
        found = dict[Output, Array]()
        first = len(self.latents)
        for name, log_p, is_number in zip(
            self.readers, logs[first:], are_numbers[first:], strict=True
        ):
            joint = joint + log_p
            now = _log_sum(joint)
            # Where the ones before are impossible already, this one says nothing more.
            own = now if before is None else jnp.where(before > -jnp.inf, now - before, 0.0)
            found[DENSITY, name] = scale * own
            found[UNGUARDED, name] = jnp.where(is_number, found[DENSITY, name], jnp.nan)
            before = now
        return found

    def _by_element(self, name: str, density: Array) -> Array:
        """Return a site's log density in the shape of the sums."""
        # It may lack axes of the batch along which it is constant.
        batch = jnp.broadcast_shapes(jnp.shape(density), self.trace.terms[name].batch_shape)
        rank = len(self.shape)
        density = jnp.broadcast_to(density, (1,) * (rank - len(batch)) + batch)
        axes = tuple(i for i in range(rank) if i - rank not in self.dims)
        return density.sum(axes, keepdims=True)

    def _own_axes(self, name: str) -> tuple[int, ...]:
        """Return the shape of the sums with the axes of a latent's value."""
        at = self.supports[name]
        own = self.shape[len(self.shape) - at.batch_dim :]
        return own + (1,) * (len(at.shape) - at.batch_dim)

    def _scale(self, at: At) -> Array:
        scale = at([(SCALE, self.latents[0])], {})[SCALE, self.latents[0]]
        try:
            return jnp.broadcast_to(scale, self.shape)
        except ValueError as error:
            raise ModelError(
                f"the scale of the discrete latent '{self.latents[0]}' has the shape "
                f"{scale.shape}, where its sums have {self.shape}: pass one number for each row."
            ) from error


def _log_sum(logs: Array) -> Array:
    """Return the log of the sum of exponentials over the first axis, finite or minus infinity."""
    some = (logs > -jnp.inf).any(0)
    return jnp.where(some, jax.nn.logsumexp(jnp.where(some, logs, 0.0), 0), -jnp.inf)


def _groups(
    trace: Trace,
    supports: Mapping[str, FiniteSupport],
    scales: Mapping[str, Any],
    reads: Mapping[Output, frozenset[str]],
) -> list[Group]:
    """Return the latents in groups that share readers, in the order of the text."""
    by_site = {name: read for (kind, name), read in reads.items() if kind == DENSITY and read}
    together = [{name} for name in supports]
    for read in by_site.values():
        linked = [g for g in together if g & read]
        together = [g for g in together if g not in linked] + [set[str]().union(*linked)]
    found = []
    for members in together:
        latents = tuple(name for name in supports if name in members)
        readers = tuple(n for n, read in by_site.items() if read & members and n not in supports)
        names, plate = (*latents, *readers), trace.terms[latents[0]].plate
        for name in names:
            if trace.terms[name].plate != plate:
                raise ModelError(
                    f"the site '{name}' is outside of the silo_plate '{plate}' of the discrete "
                    f"latent '{latents[0]}', which it reads, so that it cannot be summed out row "
                    f"by row. Put '{name}' into that silo_plate; where several rows share the "
                    "latent, make them one row, with an axis more."
                )
        dims, shape = _dims(trace, supports, latents, readers)
        found.append(
            Group(trace, supports, latents, readers, dims, shape, _shares(names, latents, scales))
        )
    return found


def _dims(
    trace: Trace,
    supports: Mapping[str, FiniteSupport],
    latents: Sequence[str],
    readers: Sequence[str],
) -> tuple[frozenset[int], tuple[int, ...]]:
    """Return the dims along which each element reads its own latents, and the shape of sums."""
    wanted = [(UNGUARDED, name) for name in (*latents, *readers)]
    program, inputs = trace.part(wanted)
    kept = [name for kind, name in trace.outputs if (kind, name) in wanted]
    shapes = {n: tuple(type_of(v).shape) for n, v in zip(kept, program.jaxpr.outvars, strict=True)}
    rows = trace.terms[latents[0]].dim
    batches = [*shapes.values(), *(trace.terms[n].batch_shape for n in shapes)]
    rank, whole, dims = max(map(len, batches)), dict[int, int](), set[int]()
    for dim in range(-rank, 0):
        sizes = {shape[dim] for shape in batches if len(shape) >= -dim} - {1}
        if len(sizes) > 1:  # two plates of readers, each of which is summed by itself
            continue
        whole[dim] = max(sizes, default=1)
        at = {n: supports[n].batch_dim + dim for n in latents}
        if any(axis < 0 or supports[n].shape[axis] != whole[dim] for n, axis in at.items()):
            continue
        axes = row_axes(
            program, [at[i.name] if i.kind == DISCRETE and i.name in at else None for i in inputs]
        )
        if all(
            axis is None or (axis != MIXED and axis - len(shapes[n]) == dim)
            for n, axis in zip(kept, axes, strict=True)
        ):
            dims.add(dim)
    if rows not in dims:
        raise ModelError(
            f"the discrete latent '{latents[0]}' cannot be summed out row by row: the program of "
            f"{[*readers]} does not show that each row reads its own alone. Read it by "
            "elementwise operations, jnp.where or an index (mu[k]); or write the sum in the text, "
            "as a numpyro.distributions.MixtureSameFamily."
        )
    return frozenset(dims), tuple(whole[d] if d in dims else 1 for d in range(-rank, 0))


def _shares(names: Sequence[str], latents: Sequence[str], scales: Mapping[str, Any]) -> bool:
    """Return whether sites share one scale; scales of outcomes alone are as the text has them."""
    if not any(name in scales for name in latents):
        return False
    first: Any = scales.get(names[0])
    known: list[Any] = [scales.get(name) for name in names]
    numbers = not any(s is None or isinstance(s, jax.core.Tracer) for s in known)
    if all(s is first for s in known) or (numbers and all(np.array_equal(s, first) for s in known)):
        return True
    raise ModelError(
        f"the discrete latent '{latents[0]}' and the sites that read it, {list(names)}, are scaled "
        "by several factors, so that there is no one sum to scale. Put one numpyro.handlers.scale "
        "around all of them, or around the outcomes alone."
    )
