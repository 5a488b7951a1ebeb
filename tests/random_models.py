"""Hypothesis strategies: random models, and random partitions of rows over silos.

A random model is drawn as a specification (``ModelSpec``), which Hypothesis can shrink and print.
``_Text`` is the ordinary NumPyro model that it specifies.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from jax import Array
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.distributions import constraints
from numpyro.infer.reparam import LocScaleReparam

from numpyro_fed.text.silo_plate import silo_plate


class Latent(NamedTuple):
    """One latent site of a random model.

    Attributes
    ----------
    name : str
    family : str
        A key of ``FAMILIES`` in this module.
    parents : tuple of str
        Earlier sites that its distribution, bounds included, depends on.
    inner : bool
        Whether it is in an ordinary plate.
    wrap : str
        What the site is wrapped in: ``"scale"``, ``"mask"``, ``"reparam"``, ``"learned reparam"``,
        ``"sample_shape"``, ``"scan"`` or the empty string.
    """

    name: str
    family: str
    parents: tuple[str, ...] = ()
    inner: bool = False
    wrap: str = ""

    def __repr__(self) -> str:
        plate = " in inner plate" if self.inner else ""
        wrap = f" [{self.wrap}]" if self.wrap else ""
        return f"{self.name} ~ {self.family}({', '.join(self.parents)}){plate}{wrap}"


class ModelSpec(NamedTuple):
    """The specification of a random model.

    Attributes
    ----------
    shared, private : tuple of str
        Constraints (``CONSTRAINTS``) of the ``numpyro.param`` sites ``theta{i}`` outside of
        the silo plates and ``phi{i}`` inside the one over rows.
    server, groups, rows : tuple of Latent
        The global latents, the latents in an outer ``silo_plate("group", ...)``, and the latents in
        ``silo_plate("row", ...)``. The outer plate exists if it has latents; rows index it.
    dim : int
        Dimension of the row plate.
    inner : int
        Size of an ordinary plate nested in the row plate; 0 for none.
    likelihood : str
        A key of ``LIKELIHOODS``.
    masked, scaled : bool
        Whether the observed site is masked where rows are missing, and scaled.
    extras : bool
        Whether there are ``numpyro.deterministic`` and ``numpyro.factor`` sites at both levels.
    """

    shared: tuple[str, ...]
    private: tuple[str, ...]
    server: tuple[Latent, ...]
    groups: tuple[Latent, ...]
    rows: tuple[Latent, ...]
    dim: int
    inner: int
    likelihood: str
    masked: bool
    scaled: bool
    extras: bool


class Problem(NamedTuple):
    """A random model with its specification and the data of its silos."""

    model: Callable[..., None]
    silos: list[dict[str, Any]]
    spec: ModelSpec

    def __repr__(self) -> str:
        fields = [f"    {name}={value!r}," for name, value in self.spec._asdict().items()]
        shapes = [{k: np.shape(v) for k, v in silo.items()} for silo in self.silos]
        return "\n".join(["Problem(", *fields, f"    silos={shapes},", ")"])


def _vector(loc: Array) -> dist.Distribution:
    return dist.Normal(loc[..., None], jnp.ones(3)).to_event(1)


# One family for each kind of support, bounds that depend on parents among them: a bijection or a
# log-determinant that is wrong for one of them would show in the joint density.
FAMILIES: dict[str, Callable[[Array], dist.Distribution]] = {
    "real": lambda m: dist.Normal(m, 1.0),
    "positive": lambda m: dist.Gamma(2.0, jnp.exp(m)),
    "unit": lambda m: dist.Beta(1.0 + jnp.exp(m), 2.0),
    "interval": lambda m: dist.Uniform(m, m + 2.0),
    "lower bound": lambda m: dist.LeftTruncatedDistribution(dist.Normal(m, 1.0), low=m),
    "vector": _vector,
    "simplex": lambda m: dist.Dirichlet(jnp.exp(m)[..., None] + jnp.ones(3)),
    "ordered": lambda m: dist.TransformedDistribution(
        _vector(m), dist.transforms.OrderedTransform()
    ),
    "correlation": lambda m: dist.LKJCholesky(3, concentration=jnp.exp(m)),
}
LIKELIHOODS: dict[str, Callable[[Array], dist.Distribution]] = {
    "normal": lambda m: dist.Normal(m, 0.7),
    "bernoulli": lambda m: dist.Bernoulli(logits=m),
    "poisson": lambda m: dist.Poisson(jnp.exp(m)),
}
CONSTRAINTS = {
    "real": constraints.real,
    "positive": constraints.positive,
    "unit": constraints.unit_interval,
}


@dataclass(frozen=True)
class _Text:
    """The ordinary NumPyro model of a specification.

    Later sites depend on earlier ones by a bounded function of each (``known``): unbounded sums of
    sums would overflow in a random model.
    """

    spec: ModelSpec

    def model(self) -> Callable[..., None]:
        """Return the model as a plain function of a silo's data."""
        spec = self.spec
        config = {
            s.name: LocScaleReparam(0.0 if s.wrap == "reparam" else None)
            for s in (*spec.server, *spec.groups, *spec.rows)
            if "reparam" in s.wrap
        }

        def model(
            x: Array,
            seen: Array,
            group: Array | None = None,
            w: Array | None = None,
            y: Array | None = None,
        ) -> None:
            with handlers.reparam(config=config):
                self.run(x, seen, group, w, y)

        return model

    def run(
        self, x: Array, seen: Array, group: Array | None, w: Array | None, y: Array | None
    ) -> None:
        """Run the text of the model."""
        spec = self.spec
        known = {f"theta{i}": _param(f"theta{i}", c) for i, c in enumerate(spec.shared)}
        for site in spec.server:
            with numpyro.plate(f"{site.name}_plate", 2) if site.inner else nullcontext():
                value = _sample(site, known)
            known[site.name] = value.sum()
        self.extras("global", known)
        if group is not None and w is not None:
            with silo_plate("group", w.shape[0]):
                above = dict(known)
                for site in spec.groups:
                    above[site.name] = _sample(site, above)
            known |= {site.name: self.column(above[site.name][group]) for site in spec.groups}
        with silo_plate("row", x.shape[0], dim=spec.dim):
            self.rows(known, x, self.column(seen), y)

    def rows(self, known: dict[str, Any], x: Array, seen: Array, y: Array | None) -> None:
        """Run the part of the text inside of the plate of rows."""
        spec = self.spec
        for i, constraint in enumerate(spec.private):
            known[f"phi{i}"] = _param(f"phi{i}", constraint)
        for site in spec.rows:
            if not site.inner:
                known[site.name] = _sample(site, known, seen)
        self.extras("row", known)
        with numpyro.plate("inner", spec.inner) if spec.inner else nullcontext():
            for site in spec.rows:
                if site.inner:
                    known[site.name] = _sample(site, known, seen)
            eta = self.column(x) + sum(known.values(), jnp.zeros(()))
            with (
                _wrapped("mask" if spec.masked else "", seen),
                _wrapped("scale" if spec.scaled else "", seen),
            ):
                obs = None if y is None else self.cells(y)
                numpyro.sample("y", LIKELIHOODS[spec.likelihood](eta), obs=obs)

    def extras(self, name: str, known: dict[str, Any]) -> None:
        """Add a deterministic site and a factor, if the specification has them."""
        if self.spec.extras:
            total = numpyro.deterministic(f"{name}_total", sum(known.values(), jnp.zeros(())))
            numpyro.factor(f"{name}_factor", -0.1 * total**2)

    def column(self, rows: Array) -> Array:
        """Return one number for each row, reshaped to the axis of the row plate."""
        return jnp.reshape(rows, (-1,) + (1,) * (-self.spec.dim - 1))

    def cells(self, y: Array) -> Array:
        """Return the outcomes (rows, inner), reshaped to the axes of both plates."""
        spec = self.spec
        if not spec.inner:
            return self.column(y)
        if spec.dim == -1:
            return jnp.swapaxes(y, 0, 1)
        return jnp.reshape(y, (len(y), *(1,) * (-spec.dim - 2), spec.inner))


def _param(name: str, constraint: str) -> Array:
    return jnp.tanh(numpyro.param(name, 0.5, constraint=CONSTRAINTS[constraint]))


def _sample(site: Latent, known: dict[str, Any], seen: Array | None = None) -> Array:
    """Sample a site given its parents, and return a bounded function of its value."""
    loc = sum((known[p] for p in site.parents), jnp.zeros(() if seen is None else seen.shape))

    def draw(before: Array | float, _: None = None) -> tuple[Array, Array]:
        fn = FAMILIES[site.family](loc + before)
        shape = (2,) if site.wrap == "sample_shape" else ()
        with _wrapped(site.wrap, seen):
            value = numpyro.sample(site.name, fn, sample_shape=shape)
        number = jnp.tanh(value).sum(tuple(range(-fn.event_dim, 0)))
        return number, number

    if site.wrap == "scan":
        return scan(draw, jnp.zeros_like(loc), None, length=2)[1].sum(0)
    return draw(0.0)[1]


def _wrapped(wrap: str, seen: Array | None) -> AbstractContextManager[object]:
    if wrap == "scale":
        return handlers.scale(scale=0.5)
    if wrap == "mask":
        return handlers.mask(mask=seen)
    return nullcontext()


def _random_silos(spec: ModelSpec, sizes: Sequence[int], seed: int) -> list[dict[str, Any]]:
    """Return the random data of silos with these numbers of rows."""
    rng = np.random.default_rng(seed)
    silos: list[dict[str, Any]] = []
    for n in sizes:
        shape = (n, spec.inner) if spec.inner else (n,)
        silo: dict[str, Any] = {
            "x": rng.normal(size=n),
            "seen": rng.random(n) < 0.7,
            # 0 and 1 are in the support of every likelihood here.
            "y": rng.integers(0, 2, shape).astype(np.float64),
        }
        if spec.groups:
            silo["w"] = np.zeros(rng.integers(1, 3))
            silo["group"] = rng.integers(0, len(silo["w"]), n)
        silos.append(silo)
    return silos


def models(*, max_latents: int = 3, max_silos: int = 3, max_rows: int = 4) -> st.SearchStrategy:
    """Return a strategy of ``Problem``: random hierarchical models with their silos' data.

    Latents have random supports and depend on random earlier ones, bounds included; there are
    outer silo plates, nested ordinary plates, parameters inside and outside of the silo plates,
    factors, scales, masks, reparametrisations, scans and missing rows.
    """

    def latents(
        draw: DrawFn, prefix: str, earlier: list[str], *, inner: bool
    ) -> tuple[Latent, ...]:
        insides = draw(st.lists(st.booleans(), max_size=max_latents))
        sites: list[Latent] = []
        # Latents in the inner plate come last: others cannot depend on them, since they are wider.
        for i, inside in enumerate(sorted(inner and inside for inside in insides)):
            family = draw(st.sampled_from(list(FAMILIES)))
            # Hypothesis shrinks to the first. A mask is an array of rows, so that only their
            # latents have it; a reparametrisation needs a location and a scale.
            wraps = ["", "", "scale"]
            wraps += ["mask"] if prefix == "b" else []
            wraps += ["sample_shape"] if prefix == "g" and not inside else []
            wraps += ["scan"] if prefix in "gb" and not inside else []
            wraps += ["reparam", "learned reparam"] if family in ("real", "vector") else []
            before = earlier + [site.name for site in sites]
            parents = draw(st.sets(st.sampled_from(before), max_size=3)) if before else ()
            wrap = draw(st.sampled_from(wraps))
            sites.append(Latent(f"{prefix}{i}", family, tuple(sorted(parents)), inside, wrap))
        return tuple(sites)

    @st.composite
    def problems(draw: DrawFn) -> Problem:
        names = st.lists(st.sampled_from(list(CONSTRAINTS)), max_size=2).map(tuple)
        shared, private = draw(names), draw(names)
        known = [f"theta{i}" for i in range(len(shared))]
        server = latents(draw, "g", known, inner=True)
        known += [site.name for site in server]
        groups = latents(draw, "u", known, inner=False)
        known += [site.name for site in groups] + [f"phi{i}" for i in range(len(private))]
        inner = draw(st.sampled_from([0, 2]))
        rows = latents(draw, "b", known, inner=inner > 0)
        spec = ModelSpec(
            shared,
            private,
            server,
            groups,
            rows,
            dim=draw(st.sampled_from([-1, -2, -3])),
            inner=inner,
            likelihood=draw(st.sampled_from(list(LIKELIHOODS))),
            masked=draw(st.booleans()),
            scaled=draw(st.booleans()),
            extras=draw(st.booleans()),
        )
        sizes = draw(st.lists(st.integers(1, max_rows), min_size=1, max_size=max_silos))
        data = _random_silos(spec, sizes, draw(st.integers(0, 999)))
        return Problem(_Text(spec).model(), data, spec)

    return problems()


def partitions(n_rows: int, *, max_silos: int = 5) -> st.SearchStrategy[tuple[int, ...]]:
    """Return a strategy: how many of ``n_rows`` rows each silo holds, one at least."""
    cuts = st.sets(st.integers(1, n_rows - 1), max_size=max_silos - 1)
    return cuts.map(lambda at: tuple(b - a for a, b in pairwise([0, *sorted(at), n_rows])))
