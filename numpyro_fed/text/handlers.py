"""Effect handlers that turn one model text into the models of a silo and of the federation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from jax.tree_util import keystr
from numpyro import handlers
from numpyro.distributions import Distribution, constraints
from numpyro.distributions.distribution import Unit
from numpyro.primitives import Messenger

from numpyro_fed.basics.errors import ModelError
from numpyro_fed.basics.programs import TRACING
from numpyro_fed.data.silo_data import SilosInput, is_leaf, listed, with_model_data
from numpyro_fed.data.tables import as_dict
from numpyro_fed.text.clients import augment as augment
from numpyro_fed.text.clients import power_likelihood as power_likelihood
from numpyro_fed.text.jaxprs import provenance
from numpyro_fed.text.silo_plate import feasible, in_silo_plate, inside_control_flow, silo_plate_of
from numpyro_fed.text.substitution import substitute_prior as substitute_prior

__all__ = ["at_silo", "augment", "generalised", "joint", "power_likelihood", "substitute_prior"]


def __dir__() -> list[str]:
    return __all__


class at_silo(Messenger):
    """Rename local sites, plates and parameters to ``silo_{j}/name``; globals keep their names.

    Parameters
    ----------
    fn : callable, optional
        A model with ``silo_plate``; leave it out to use the handler as a context manager.
    silo : int
        The silo's number ``j``.

    Examples
    --------
    >>> import numpy as np, numpyro, numpyro.distributions as dist
    >>> import numpyro_fed as nf
    >>> def model(y):
    ...     mu = numpyro.sample("mu", dist.Normal(0, 1))
    ...     with nf.silo_plate("row", y.shape[0]):
    ...         b = numpyro.sample("b", dist.Normal(mu, 1))
    ...         numpyro.sample("y", dist.Normal(b, 1), obs=y)
    >>> seeded = numpyro.handlers.seed(nf.handlers.at_silo(model, silo=3), 0)
    >>> list(numpyro.handlers.trace(seeded).get_trace(np.zeros(5)))
    ['mu', 'silo_3/row', 'silo_3/b', 'silo_3/y']
    """

    def __init__(self, fn: Callable[..., Any] | None = None, silo: int = 0):
        self.silo = silo
        self._local_plates: set[str] = set()
        super().__init__(fn)

    def _wrap(self, body: Callable[..., Any]) -> Callable[..., Any]:
        wrapped = at_silo(body, self.silo)
        wrapped._local_plates = self._local_plates
        return wrapped

    def process_message(self, msg: dict[str, Any]) -> None:
        if (
            inside_control_flow(msg, self._wrap)
            or silo_plate_of(msg) is None
            or not msg.get("name")
        ):
            return
        if msg["type"] == "plate":
            self._local_plates.add(msg["name"])
        # An ordinary plate inside of a silo plate is local, one around it is not: only plates whose
        # own message was local are renamed in the frames.
        msg["cond_indep_stack"] = [
            f._replace(name=local_name(self.silo, f.name)) if f.name in self._local_plates else f
            for f in msg["cond_indep_stack"]
        ]
        msg["name"] = local_name(self.silo, msg["name"])


def local_name(silo: int, name: str) -> str:
    """Return the name of silo ``j``'s site in the joint model."""
    return f"silo_{silo}/{name}"


def localised(model: Callable[..., Any], data: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the model with ``numpyro.deterministic`` sites that read rows made local.

    Users often write such sites outside of the silo plate. A site becomes local to the last silo
    plate whose latents it reads; if it reads data alone, to the last of all silo plates.
    """
    leaves, tree = jax.tree.flatten(dict(data))
    arrays = {i: leaf for i, leaf in enumerate(leaves) if hasattr(leaf, "dtype")}
    traces: list[dict[str, Any]] = []

    def run(data: dict[int, Any], **rows: dict[str, Any]) -> dict[str, Any]:
        values = {name: value for of_plate in rows.values() for name, value in of_plate.items()}
        kwargs = jax.tree.unflatten(tree, [data.get(i, x) for i, x in enumerate(leaves)])
        text = handlers.seed(handlers.substitute(model, data=values), 0)
        # Blocked, since handlers around the joint model must not get these messages.
        with TRACING, handlers.block(), feasible():
            traces.append(handlers.trace(text).get_trace(**kwargs))
        return {
            name: site["value"]
            for name, site in traces[-1].items()
            if site["type"] == "deterministic" and silo_plate_of(site) is None
        }

    global_sites = jax.eval_shape(run, arrays)
    sites = list(traces[-1].values())
    plates = list(dict.fromkeys(filter(None, map(silo_plate_of, sites))))
    if not global_sites or not plates:
        return model
    # Words beside the name of a plate, which could be "data" as well.
    latents: dict[str, dict[str, Any]] = {f"rows of {plate}": {} for plate in plates}
    for site in sites:
        if site["type"] == "sample" and not site["is_observed"] and (p := silo_plate_of(site)):
            zeros = jnp.zeros(site["value"].shape, site["value"].dtype)
            latents[f"rows of {p}"][site["name"]] = zeros
    plate_of: dict[str, str] = {}
    for name, value in provenance(run, data=arrays, **latents).items():
        reads = frozenset[str]().union(*jax.tree.leaves(value))
        read = [p for p in plates if f"rows of {p}" in reads] or (plates if "data" in reads else [])
        plate_of |= {name: read[-1]} if read else {}
    if not plate_of:
        return model
    return in_silo_plate(
        lambda msg: plate_of.get(msg["name"]) if msg["type"] == "deterministic" else None, model
    )


def joint(model: Callable[..., Any], silos: SilosInput) -> Callable[[], None]:
    r"""Return the exact joint model of all silos, as an ordinary NumPyro model of no arguments.

    .. math::
        p(z_G) \prod_{j=0}^{J-1} p(z_{L_j}, y_j \mid z_G)

    Parameters
    ----------
    model : callable
        A model with ``silo_plate``.
    silos : sequence of dict
        The data of each silo, as keyword arguments of the model; sizes may differ.

    Returns
    -------
    callable
        A model in which silo ``j``'s sites, plates and private parameters are named
        ``silo_{j}/...`` and the globals keep their names. It runs the model's text once for each
        silo, so its trace grows with their number: for a large federation use
        :func:`numpyro_fed.run_nuts`, which evaluates the same density in one vectorised program.

    Examples
    --------
    >>> import numpy as np, numpyro, numpyro.distributions as dist
    >>> import numpyro_fed as nf
    >>> def model(y):
    ...     mu = numpyro.sample("mu", dist.Normal(0, 1))
    ...     with nf.silo_plate("row", y.shape[0]):
    ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y)
    >>> both = nf.handlers.joint(model, [dict(y=np.zeros(2)), dict(y=np.zeros(5))])
    >>> trace = numpyro.handlers.trace(numpyro.handlers.seed(both, 0)).get_trace()
    >>> [name for name, site in trace.items() if site["type"] == "sample"]
    ['mu', 'silo_0/y', 'silo_1/y']
    """

    def joint_model() -> None:
        values: dict[str, Any] = {}
        plain = [as_dict(f"silo {j}", silo) for j, silo in enumerate(listed(silos))]
        all_data = with_model_data(model, plain)
        text = localised(model, all_data[0]) if all_data else model
        # Values that are traced are not looked at.
        missing = {
            keystr(path, simple=True, separator=".")
            for data in all_data
            for path, leaf in jax.tree.leaves_with_path(dict(data), is_leaf=is_leaf)
            if isinstance(leaf, np.ndarray | Array) and jnp.issubdtype(leaf.dtype, jnp.floating)
            if not isinstance(leaf, jax.core.Tracer) and np.isnan(leaf).any()
        }
        text = with_missing(text, sorted(missing))
        # Each global site is emitted once: at later silos it has the same value and no message.
        known = handlers.block(
            hide_fn=lambda msg: silo_plate_of(msg) is None and msg.get("name") in values
        )
        for j, data in enumerate(all_data):
            with at_silo(silo=j), known, handlers.trace() as trace:
                handlers.substitute(text, data=values)(**data)
            values |= {name: s["value"] for name, s in trace.items() if silo_plate_of(s) is None}

    return joint_model


class generalised(Messenger):
    r"""Replace minus the log density of every observed site by a loss.

    .. math::
        \log p(z) - \sum_i \ell\big(p(\cdot \mid z), y_i\big)

    Latent sites and ``numpyro.factor`` keep their log densities. A mask and a plate's or handler's
    scale act on the loss as they would on the log density, and predictions are drawn from the
    distribution in the text.

    Parameters
    ----------
    fn : callable, optional
        A model; leave it out to use the handler as a context manager.
    loss : callable
        ``loss(distribution, value)``, with one number for each element of the distribution's batch
        as it broadcasts with ``value``: one of :mod:`numpyro_fed.numerics.losses` or your own. It
        is given the distribution as written in the text, before ``mask`` and ``expand``; what is
        masked inside of a ``to_event`` stays so.

    Raises
    ------
    TypeError
        If ``loss`` cannot be called.
    ModelError
        When the log density is evaluated: if the loss does not know a site's distribution, or
        does not give one number for each element of its batch.

    Notes
    -----
    What ``numpyro.handlers.condition`` observes is generalised when that handler is inside:
    ``generalised(condition(model, data), loss)``.

    References
    ----------
    Knoblauch, Jewson, Damoulas (2022), JMLR 23(132), "An Optimization-centric View on Bayes' Rule".

    Examples
    --------
    >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
    >>> from numpyro.infer.util import log_density
    >>> import numpyro_fed as nf
    >>> def model(y):
    ...     mu = numpyro.sample("mu", dist.Normal(0, 1))
    ...     with nf.silo_plate("row", y.shape[0]):
    ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y)
    >>> def absolute(distribution, value):
    ...     return abs(value - distribution.mean)
    >>> robust = nf.handlers.generalised(model, absolute)
    >>> y = jnp.array([1.0, 2.0, 100.0])
    >>> round(float(log_density(robust, (y,), {}, {"mu": 0.0})[0]), 3)  # -0.919 - 103
    -103.919
    """

    def __init__(
        self,
        fn: Callable[..., Any] | None = None,
        loss: Callable[[Distribution, Any], Array] | None = None,
    ):
        if not callable(loss):
            raise TypeError(f"loss must be a function loss(distribution, value), got {loss!r}.")
        self.loss = loss
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample" and msg["is_observed"]:
            msg["fn"] = _generalise(msg["fn"], self.loss, msg["name"])


def _generalise(
    fn: Distribution, loss: Callable[[Distribution, Any], Array], site: str
) -> Distribution:
    # A loss is written for the distribution in the text. What NumPyro's expand and mask have put
    # around it is taken off, and put around the result again.
    if isinstance(fn, dist.ExpandedDistribution):
        return _generalise(fn.base_dist, loss, site).expand(fn.batch_shape)
    if isinstance(fn, dist.MaskedDistribution):
        return _generalise(fn.base_dist, loss, site).mask(fn._mask)
    # A numpyro.factor is an observed site of a Unit distribution: a log density, no observation.
    return fn if isinstance(fn, Unit) else _Generalised(fn, loss, site)


class _Generalised(Distribution):
    """A distribution whose log density is replaced by minus a loss."""

    pytree_data_fields = ("base_dist",)
    pytree_aux_fields = ("loss", "site")

    def __init__(
        self, base_dist: Distribution, loss: Callable[[Distribution, Any], Array], site: str
    ):
        self.base_dist, self.loss, self.site = base_dist, loss, site
        super().__init__(base_dist.batch_shape, base_dist.event_shape)

    @property
    def support(self) -> constraints.Constraint | None:
        return self.base_dist.support

    @property
    def has_rsample(self) -> bool:
        return self.base_dist.has_rsample

    @property
    def mean(self) -> Array:
        return self.base_dist.mean

    @property
    def variance(self) -> Array:
        return self.base_dist.variance

    def sample(self, key: Array | None, sample_shape: tuple[int, ...] = ()) -> Any:
        return self.base_dist.sample(key, sample_shape)

    def log_prob(self, value: Array, intermediates: list[Any] | None = None) -> Array:
        try:
            loss = self.loss(self.base_dist, value)
        except ModelError as error:
            raise ModelError(f"site '{self.site}': {error}") from error
        # Checked here: a loss that sums over rows would be broadcast to every row, in silence.
        rows = jnp.shape(value)[: max(jnp.ndim(value) - self.event_dim, 0)]
        expected = jnp.broadcast_shapes(self.batch_shape, rows)
        if jnp.shape(loss) != expected:
            raise ModelError(
                f"site '{self.site}': the loss {self.loss!r} gave an array of shape "
                f"{jnp.shape(loss)}, but one number for each element of the batch has the shape "
                f"{expected}."
            )
        return -loss


def with_missing(text: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """Return a text in which what is missing adds nothing: NaN in the arguments ``names``."""
    text = imputed(text)
    return leave_out_missing(text, names) if names else text


OBSERVED, UNOBSERVED = "_observed", "_unobserved"  # NumPyro's two sites of one with obs_mask
LOG_DET = "_log_det"  # the end of the name of a latent's factor, after its name and a bar before it


class without_outcomes(handlers.uncondition):
    """Let a text draw its outcomes; the observed sites ``kept`` are none, and keep their values."""

    def __init__(self, fn: Callable[..., Any], kept: Collection[str]):
        self.kept = kept
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg.get("name") not in self.kept:
            super().process_message(msg)


class imputed(Messenger):
    """Give a prior to what NumPyro's ``obs_mask`` adds at rows that are observed.

    ``numpyro.sample("x", fn, obs=x, obs_mask=seen)`` is a latent ``x_unobserved`` at all rows,
    whose density counts where ``seen`` is False alone. Elsewhere nothing reads it, and without a
    prior it would be improper. With its own one it integrates to one: the posterior is the same.
    """

    def __init__(self, fn: Callable[..., Any]):
        self._observed = set[str]()
        super().__init__(fn)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        self._observed = set()
        return super().__call__(*args, **kwargs)

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] != "sample":
            return
        # NumPyro's mask reaches the factor with the log determinant of the latent's bijection, too.
        name = msg["name"].removesuffix(LOG_DET)
        latent = name if name == msg["name"] else name.removeprefix("_")
        added = latent.removesuffix(UNOBSERVED) + OBSERVED in self._observed
        if latent.endswith(UNOBSERVED) and added:
            msg["fn"] = unmasked(msg["fn"])
        elif msg["is_observed"]:
            self._observed.add(name)


def unmasked(fn: Distribution) -> Distribution:
    """Return a distribution without the masks around it."""
    if isinstance(fn, dist.ExpandedDistribution):
        return unmasked(fn.base_dist).expand(fn.batch_shape)
    if isinstance(fn, dist.Independent):
        return unmasked(fn.base_dist).to_event(fn.reinterpreted_batch_ndims)
    if isinstance(fn, dist.MaskedDistribution):
        return unmasked(fn.base_dist).expand(fn.batch_shape)
    return fn


class leave_out_missing(Messenger):
    """Leave out of the density what is missing in the arguments ``names`` of a model.

    An outcome is missing where an argument, or a leaf of one, has NaN and the text passes it as it
    is to ``obs=``. Such a site becomes what a user would write by hand,

        with numpyro.handlers.mask(mask=~jnp.isnan(y)):
            numpyro.sample("y", ..., obs=jnp.where(jnp.isnan(y), 0, y))

    Only NaN of the data counts: one that the text computes (the log of a negative) is an error.
    """

    def __init__(self, fn: Callable[..., Any], names: Sequence[str]):
        self.names = tuple(names)
        self._outcomes: list[Any] = []
        super().__init__(fn)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        leaves = jax.tree.leaves_with_path(dict(kwargs), is_leaf=is_leaf)
        named = {keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
        self._outcomes = [named[name] for name in self.names if name in named]
        try:
            return super().__call__(*args, **kwargs)
        finally:
            self._outcomes = []  # traced values must not outlive their trace

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] != "sample" or not msg["is_observed"]:
            return
        # By identity: a value that is computed of the argument may have NaN of its own.
        if not any(msg["value"] is outcome for outcome in self._outcomes):
            return
        value = jnp.asarray(msg["value"])
        if value.dtype.kind != "f":
            return
        seen = ~jnp.isnan(value)
        value = jnp.where(seen, value, 0.0)
        # Whole numbers were floats beside NaN only; categories are indices.
        is_whole = getattr(msg["fn"].support, "is_discrete", False)
        msg["value"] = value.astype(jnp.result_type(int)) if is_whole else value
        msg["fn"] = _masked(msg["fn"], seen, msg["name"])
        msg["missing"] = ~seen  # for whoever reads the values off the trace


def _masked(fn: Distribution, seen: Array, site: str) -> Distribution:
    """Return a distribution whose density counts what is seen alone, element by element."""
    if fn.event_dim == 0:
        return fn.mask(seen)
    if isinstance(fn, dist.Independent):
        return _masked(fn.base_dist, seen, site).to_event(fn.reinterpreted_batch_ndims)
    if isinstance(fn, dist.ExpandedDistribution):
        inside = _masked(fn.base_dist, seen, site)
        return inside.expand(jnp.broadcast_shapes(inside.batch_shape, fn.batch_shape))
    if isinstance(fn, dist.MaskedDistribution):
        return _masked(fn.base_dist, seen, site).mask(fn._mask)
    raise ModelError(
        f"site '{site}': outcomes are missing (NaN), but {type(fn).__name__} counts the "
        f"{fn.event_shape} numbers of a row as one, so that no part of it can be left out. Leave "
        "these rows out of the data, or pass them with any finite number and a boolean array, and "
        "write `with numpyro.handlers.mask(mask=seen):` around the site."
    )


# c, in scales. Half of it would have 0.82 of the information instead of 0.70, but curvature in
# fewer rows, so that Newton's steps depend on few of them. Twice as much would have 0.54.
WIDTH = 0.5
# The normalising constant for c = 1/2 and equal slopes, -log of the integral of exp(-sqrt(c^2 +
# z^2)) over 2: scales are estimated by it as well.
NORM = 0.18848


class _Rounded(dist.AsymmetricLaplace):
    """A symmetric or asymmetric Laplace distribution with its kink rounded off."""

    def log_prob(self, value: Array, intermediates: list[Any] | None = None) -> Array:
        z, left, right = value - self.loc, 1 / self.left_scale, 1 / self.right_scale
        size = jnp.sqrt(WIDTH**2 * 4 / (left + right) ** 2 + z**2)
        straight = -0.5 * (size * (left + right) + z * (right - left))
        return straight - jnp.log(self.left_scale + self.right_scale) + NORM


class rounded(Messenger):
    """Round off the kinks of all Laplace distributions in a model."""

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample":
            msg["fn"] = without_kink(msg["fn"])


def without_kink(fn: Distribution) -> Distribution:
    """Return a distribution with its kink rounded off; the same object if it has none."""
    if isinstance(fn, dist.Laplace):
        return _Rounded(fn.loc, fn.scale)
    if isinstance(fn, dist.AsymmetricLaplaceQuantile):
        fn = fn._ald
    if isinstance(fn, dist.AsymmetricLaplace):
        return _Rounded(fn.loc, fn.scale, fn.asymmetry)
    if not isinstance(fn, dist.Independent | dist.ExpandedDistribution | dist.MaskedDistribution):
        return fn
    base = without_kink(fn.base_dist)
    if base is fn.base_dist:
        return fn
    if isinstance(fn, dist.Independent):
        return base.to_event(fn.reinterpreted_batch_ndims)
    if isinstance(fn, dist.ExpandedDistribution):
        return base.expand(fn.batch_shape)
    return base.mask(fn._mask)
