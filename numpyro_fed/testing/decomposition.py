"""The check that a model decomposes into a prior and independent rows, at random points.

The reference is NumPyro's own log density of the joint model of all silos. It is compared with the
split model silo by silo and with silos padded and stacked. Perturbations then test whether a row's
term reads other rows (:mod:`numpyro_fed.text.row_checks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from numpyro import handlers
from numpyro.infer.util import potential_energy, unconstrain_fn

from numpyro_fed.basics.errors import ModelError
from numpyro_fed.basics.programs import TRACING
from numpyro_fed.data.padding import Bucket, stacked
from numpyro_fed.data.silo_data import SiloData, read
from numpyro_fed.text.handlers import joint, local_name, with_missing
from numpyro_fed.text.layout import layout_and_buckets, plate_follows_arrays
from numpyro_fed.text.row_checks import (
    ROWS_AT_ONCE,
    ChangedRow,
    CheckResult,
    Perturbation,
    default_rtol,
    first_changed_rows,
    row_groups,
    summary_message,
)
from numpyro_fed.text.site_table import Rows, Theta, unpack


def check_decomposition(
    model: Callable[..., object],
    silos: Sequence[Mapping[str, Any]],
    *,
    key: Array | None = None,
    rtol: float | None = None,
    num_points: int = 3,
) -> None:
    r"""Check that a model's log density is a prior plus one independent term for each row.

    .. math::
        \log p(z_G, z_L, y; \theta) = \log p(z_G; \theta) + \sum_{j=0}^{J-1} \sum_i
        \log p(z_{L,ji}, y_{ji} \mid z_G; \theta)

    The left side is NumPyro's own log density of :func:`numpyro_fed.handlers.joint`, and the right
    side is what the algorithms use. Both are evaluated at random points in unconstrained space,
    silo by silo and again with the silos padded, masked and stacked. Then the latents of some rows
    are changed, and their data are replaced by those of other rows. The terms of all other rows
    must stay as they are. The latents of an outer silo plate (a hospital above its patients) may
    change the rows of other plates.

    Parameters
    ----------
    model : callable
        A model with ``silo_plate``.
    silos : sequence of dict
        The data of each silo, as keyword arguments of the model.
    key : jax.Array, optional
        Key of the random points; ``jax.random.key(0)`` when left out.
    rtol : float, optional
        Largest difference, as a fraction of the prior's and all rows' absolute terms. By default
        1e-5 in single and 1e-10 in double precision.
    num_points : int
        Number of random points.

    Raises
    ------
    ModelError
        If the two sides differ, if a row's term depends on another row's latents or data, or if
        the model cannot be split at all.
    DataError
        If the silos do not fit together.

    Examples
    --------
    >>> import numpy as np, numpyro, numpyro.distributions as dist
    >>> import numpyro_fed as nf
    >>> def model(y):
    ...     mu = numpyro.sample("mu", dist.Normal(0, 1))
    ...     with nf.silo_plate("row", y.shape[0]):
    ...         b = numpyro.sample("b", dist.Normal(mu, 1))
    ...         numpyro.sample("y", dist.Normal(b, 1), obs=y)
    >>> silos = [dict(y=np.zeros(2)), dict(y=np.ones(3))]
    >>> nf.check_decomposition(model, silos)

    A model in which a row reads the latents of other rows is refused:

    >>> def centred(y):
    ...     with nf.silo_plate("row", y.shape[0]):
    ...         b = numpyro.sample("b", dist.Normal(0, 1))
    ...         numpyro.sample("y", dist.Normal(b - b.mean(), 1), obs=y)
    >>> nf.check_decomposition(centred, silos[1:])
    Traceback (most recent call last):
        ...
    numpyro_fed.basics.errors.ModelError: silo 0, silo_plate 'row': the term of row ...
    """
    rtol = default_rtol() if rtol is None else rtol
    key = jax.random.key(0) if key is None else key
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    check = _Check(model, read(silos, model), key, rtol)
    for _ in range(num_points):
        point = check.draw(rng)
        terms = [check.rows(rng, point, j) for j in range(len(silos))]
        check.total(point, terms)
        for b in check.buckets:
            check.bucket(b, point, terms)


class _Point(NamedTuple):
    """A point in unconstrained space, ``private`` and ``z_L`` silo by silo."""

    theta: Theta
    z_G: Array
    private: list[Theta]
    z_L: list[Rows]


class _Check:
    """The check of one model: the split model and NumPyro's joint one, compiled for all points."""

    def __init__(
        self, model: Callable[..., object], data: Sequence[SiloData], key: Array, rtol: float
    ):
        # Summaries are checked here, at this check's own points.
        self.layout, self.buckets = layout_and_buckets(model, data, summaries=False)
        fm = self.fm = self.layout.model
        if fm.discrete:
            raise ModelError(
                f"the discrete latent '{fm.discrete[0]}' is summed out, and NumPyro's joint "
                "density, with which this check compares, is one at its values. Check the text "
                "with the sum written out, as a numpyro.distributions.MixtureSameFamily."
            )
        self.sizes = self.layout.sizes
        self.data, self.key, self.rtol = data, key, rtol
        self.theta = fm.init_theta(key)
        self.init_private = jax.jit(fm.init_private)
        self.private = [self.init_private(key, d) for d in data]
        self.model = with_missing(model, data[0].missing)
        self.dtype = jnp.zeros(()).dtype
        # The unconstrained shape of each latent, by its name in the joint model: in what the
        # algorithms use, and in NumPyro's own.
        latents = [s for s in fm.sites if s.kind == "latent"]
        shapes = {s.name: s.shape for s in latents if s.plate is None}
        for j, size in enumerate(self.sizes):
            shapes |= {local_name(j, s.name): s.whole(size) for s in latents if s.plate is not None}

        def in_joint_model(data: Sequence[SiloData]) -> dict[str, Array]:
            text = handlers.seed(joint(self.model, [d.kwargs for d in data]), 0)
            with TRACING:
                values = {
                    name: site["value"]
                    for name, site in handlers.trace(text).get_trace().items()
                    if site["type"] == "sample" and not site["is_observed"]
                }
                return unconstrain_fn(text, (), {}, values)

        found = {name: a.shape for name, a in jax.eval_shape(in_joint_model, data).items()}
        for name, shape in shapes.items():
            if shape != found.get(name):
                raise ModelError(
                    f"the unconstrained value of the site '{name}' has the shape "
                    f"{found.get(name)} in NumPyro's joint model, but {shape} in what the "
                    "algorithms use. Write the site in another way (expand instead of "
                    "sample_shape, say), and please report this."
                )
        self.log_joint = jax.jit(self._log_joint)
        self.log_perturbed = jax.jit(self._log_perturbed)
        self.log_bucket = jax.jit(
            jax.vmap(
                lambda theta, private, *given: fm.log_silo({**theta, **private}, *given),
                (None, 0, None, 0, 0),
            )
        )

    def _log_joint(self, data: Sequence[SiloData], point: _Point) -> tuple[Array, Array]:
        """Return the log prior () of the split model, and NumPyro's joint log density ()."""
        fm = self.fm
        values = fm.constrain_theta(point.theta)
        values |= unpack(fm.named("latent"), point.z_G, {})
        local = [s for s in fm.sites if s.plate is not None]
        for j, (private, z_L) in enumerate(zip(point.private, point.z_L, strict=True)):
            own = {**fm.constrain_theta(private), **unpack(local, jnp.zeros(0), z_L)}
            values |= {local_name(j, name): value for name, value in own.items()}
        seeded = handlers.seed(joint(self.model, [d.kwargs for d in data]), 0)
        with TRACING:
            joint_density = -potential_energy(seeded, (), {}, values)
        return fm.log_prior(point.theta, point.z_G), joint_density

    def _log_perturbed(
        self,
        theta: Theta,
        private: Theta,
        z_G: Array,
        z_L: Rows,
        data: SiloData,
        noise: Rows,
        others: Rows,
    ) -> tuple[Rows, dict[tuple[str, str], ChangedRow], dict[str, ChangedRow]]:
        """Return a silo's terms, and the rows that changed with other rows' latents and data."""
        # The former are {(plate of the row, plate of the latents): row}, the latter {plate: row}.
        fm = self.fm
        keys = {p.name: self.keys(p.name) for p in fm.plates}
        some = {p: row_groups(len(z)) for p, z in z_L.items()}
        by_latents = [p for p in fm.plates if p.dim]
        by_data = [p.name for p in fm.plates if keys[p.name]]
        changes = [Perturbation(p.name, some[p.name], steps=noise[p.name]) for p in by_latents]
        changes += [Perturbation(p, some[p], source=others[p]) for p in by_data]
        terms = partial(fm.log_silo, {**theta, **private}, z_G)
        plate_of = {key: p for p, names in keys.items() for key in names}
        at_once = max(1, ROWS_AT_ONCE // sum(map(len, z_L.values())))
        original, changed = first_changed_rows(
            terms, (z_L, data), plate_of, changes, self.rtol, at_once
        )
        # Rows of other plates may read the latents of an outer plate; that is what it is for.
        latents = {
            (plate, p.name): row
            for p, by_plate in zip(by_latents, changed, strict=False)
            for plate, row in by_plate.items()
            if plate == p.name or not p.outer
        }
        rest = zip(by_data, changed[len(by_latents) :], strict=True)
        return original, latents, {p: by_plate[p] for p, by_plate in rest if p in by_plate}

    def draw(self, rng: np.random.Generator) -> _Point:
        """Return a random point: latents standard normal, parameters near their initial values."""

        def normal(*shape: int) -> Array:
            return jnp.asarray(rng.normal(size=shape), self.dtype)

        def near(theta: Theta) -> Theta:
            return jax.tree.map(lambda a: a + 0.3 * normal(*np.shape(a)), theta)

        z_L = [{p.name: normal(size[p.name], p.dim) for p in self.fm.plates} for size in self.sizes]
        return _Point(near(self.theta), normal(self.fm.dim), list(map(near, self.private)), z_L)

    def rows(self, rng: np.random.Generator, point: _Point, j: int) -> dict[str, np.ndarray]:
        """Return the terms of silo ``j``, {plate: (rows,)}; refuse rows that read other rows."""
        z_L, sizes = point.z_L[j], self.sizes[j]
        # About 1: a step near zero would show nothing.
        noise = {p: np.asarray(1 + rng.normal(size=z.shape), self.dtype) for p, z in z_L.items()}
        source = {p: rng.integers(0, n, n) for p, n in sizes.items()}
        arguments = (point.theta, point.private[j], point.z_G, z_L, self.data[j], noise, source)
        arguments = jax.tree.map(jnp.asarray, arguments)
        terms, by_latents, by_data = self.log_perturbed(*arguments)
        for (plate, mover), found in by_latents.items():
            if found.changed:
                changed = CheckResult(plate, j, found).words()
                raise ModelError(
                    f"{changed} when only latents of other rows, of "
                    f"silo_plate '{mover}', moved. Rows must be independent given the globals: put "
                    "what rows share outside of the silo_plate, or in a silo_plate of its own that "
                    "the rows index."
                )
        for plate, found in by_data.items():
            if found.changed:
                raise ModelError(summary_message(CheckResult(plate, j, found), self.keys(plate)))
        return {plate: np.asarray(rows) for plate, rows in terms.items()}

    def keys(self, plate: str) -> list[str]:
        """Return the arrays that hold the rows of a plate."""
        keys = [key for key, p in self.layout.plate_of_array.items() if p == plate]
        # With one size at all silos an array may be as long as the plate by chance: it holds rows
        # only if the plate is shorter when it is.
        if len({size[plate] for size in self.sizes}) > 1 or self.sizes[0][plate] == 1:
            return keys
        return keys if plate_follows_arrays(self.fm, self.data[0], keys, plate) else []

    def total(self, point: _Point, terms: Sequence[dict[str, np.ndarray]]) -> None:
        """Compare NumPyro's joint log density with the prior plus all rows."""

        def compare(silos: Sequence[int]) -> tuple[float, float, bool]:
            private, z_L = [point.private[j] for j in silos], [point.z_L[j] for j in silos]
            part = point._replace(private=private, z_L=z_L)
            prior, expected = map(float, self.log_joint([self.data[j] for j in silos], part))
            rows, scale = _sums(r for j in silos for r in terms[j].values())
            found = prior + rows
            return expected, found, abs(found - expected) <= self.rtol * (abs(prior) + scale)

        expected, found, agree = compare(range(len(self.data)))
        if agree:
            return
        if not np.isfinite(expected):
            raise ModelError(
                f"the joint log density is {expected} at a random point in unconstrained space, "
                "so nothing can be compared there. Check that observed values lie in the supports "
                "of their distributions and that no scale or probability over- or underflows."
            )
        # The sum does not tell which silo differs: each is compared alone.
        wrong = [j for j in range(len(self.data)) if not compare([j])[2]]
        raise ModelError(
            f"expected the joint log density {expected:.9g}, but log_prior plus the rows of all "
            f"silos is {found:.9g}; they differ "
            + (f"at silos {wrong}. " if wrong else "only where silos are joined. ")
            + "Make the model a function of its arguments alone: no randomness outside of sample "
            "sites and no state kept from one call to the next."
        )

    def bucket(self, b: Bucket, point: _Point, terms: Sequence[dict[str, np.ndarray]]) -> None:
        """Compare the rows' sums of padded, masked and stacked silos with those of each silo."""
        target = {p: max(size[p] for size in b.sizes) for p in b.sizes[0]}
        members = []
        for i, j in enumerate(b.silos):
            private = self.init_private(self.key, jax.tree.map(lambda a, i=i: a[i], b.data))
            # Latents of padded rows are ones: with zeros a term that wrongly counts might be zero.
            ones = {p.name: np.ones((target[p.name], p.dim), self.dtype) for p in self.fm.plates}
            real = (point.private[j], point.z_L[j])
            members.append(jax.tree.map(_embed, real, (private, ones)))
        private, z_L = stacked(members)
        arguments = (point.theta, private, point.z_G, z_L, b.data)
        together = self.log_bucket(*jax.tree.map(jnp.asarray, arguments))
        for i, j in enumerate(b.silos):
            for plate, rows in terms[j].items():
                expected, scale = _sums([rows])
                found, _ = _sums([together[plate][i]])
                if not abs(found - expected) <= self.rtol * scale:
                    raise ModelError(
                        f"silo {j}, silo_plate '{plate}': expected the rows to sum to "
                        f"{expected:.9g}, but padded to {target[plate]} rows and stacked with "
                        f"silos {list(b.silos)} they sum to {found:.9g}. Let a row depend on its "
                        "own data alone: compute summaries of rows before the run and pass them "
                        "as data."
                    )


def _sums(rows: Iterable[ArrayLike]) -> tuple[float, float]:
    """Return the sum, and the sum of absolute values, in double precision."""
    # Rounding is judged against the second: terms of both signs cancel in the first.
    flat = np.concatenate([np.zeros(0), *(np.asarray(r, np.float64) for r in rows)])
    return float(flat.sum()), float(np.abs(flat).sum())


def _embed(real: ArrayLike, padded: ArrayLike) -> np.ndarray:
    """Return ``padded`` with its leading block replaced by ``real``."""
    whole = np.array(padded)
    whole[tuple(slice(n) for n in np.shape(real))] = real
    return whole
