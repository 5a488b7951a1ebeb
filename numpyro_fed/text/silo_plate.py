"""The primitive ``silo_plate``, which users write in their models, and how messages show it.

Every message inside of a silo plate carries the plate's name under the key ``"silo_plate"``, and a
frame of a class of its own in its ``cond_indep_stack``. Handlers read both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.contrib.control_flow.cond import cond_wrapper
from numpyro.contrib.control_flow.scan import scan_wrapper
from numpyro.distributions import Distribution, biject_to
from numpyro.primitives import CondIndepStackFrame, Messenger

from numpyro_fed.basics.errors import DataError, ModelError


class _SiloFrame(CondIndepStackFrame):
    """A frame of a silo plate in a message's ``cond_indep_stack``.

    ``numpyro.handlers.reparam`` rebuilds messages and drops keys that it does not know. The frames
    survive it.
    """


def silo_frames(msg: dict[str, Any]) -> list[CondIndepStackFrame]:
    """Return the frames of the silo plates that a message is in, the innermost first."""
    return [f for f in msg.get("cond_indep_stack", ()) if isinstance(f, _SiloFrame)]


def silo_plate_of(msg: dict[str, Any]) -> str | None:
    """Return the name of the innermost silo plate that a message is in; None for a global one."""
    return msg.get("silo_plate") or next((f.name for f in silo_frames(msg)), None)


# The positions of the body of a scan, and of both branches of a cond, among the arguments of
# NumPyro's wrappers.
_BODIES = {scan_wrapper: (0,), cond_wrapper: (1, 2)}


def inside_control_flow(
    msg: dict[str, Any], wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> bool:
    """Wrap the bodies of a ``scan`` or ``cond`` in a handler, and return whether that is all."""
    # NumPyro traces the body in a block of its own and replays its sites, stacked over steps,
    # through the outer handlers afterwards. A handler that acted on the replay would act twice.
    if msg["type"] == "control_flow":
        bodies = _BODIES.get(msg["fn"], ())
        msg["args"] = tuple(wrap(a) if i in bodies else a for i, a in enumerate(msg["args"]))
        return bool(bodies)
    return bool(msg.get("_control_flow_done"))


class in_silo_plate(Messenger):
    """Say of messages that name no silo plate which one ``plate_of(message)`` names, if any."""

    def __init__(self, plate_of: Callable[[Any], str | None], fn: Callable[..., Any] | None = None):
        self.plate_of = plate_of
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        if (plate := self.plate_of(msg)) is not None:
            msg.setdefault("silo_plate", plate)


class silo_plate(numpyro.plate):
    r"""A plate whose rows are split over silos.

    Everything inside is local: it belongs to the silo that holds the row and never leaves it.
    Everything outside is global. The rows are independent given the globals (and given the
    latents of any *other* silo plate that they refer to, such as the hospital of a patient):

    .. math::
        p(z_G, z_L, y) = p(z_G) \prod_{j=1}^{J} \prod_{i \in \text{silo } j}
        p(z_{L,i} \mid z_G)\, p(y_i \mid z_G, z_{L,i}).

    Outside of this package it is an ordinary :class:`numpyro.plate`, so that the same text runs
    under ``Predictive``, ``NUTS`` and ``render_model``. One thing differs there: a
    ``numpyro.param`` inside a silo plate is one parameter for all rows under plain NumPyro, but
    one private parameter *per silo* here. A silo plate may stand around a
    ``numpyro.contrib.control_flow.scan`` (over time, say) as well as inside of its body.

    Parameters
    ----------
    name : str
        Name of the plate.
    size : int
        Number of rows that this silo holds; take it from an array's shape, which lets silos of
        different sizes share one compiled program.
    dim : int, optional
        Negative batch dimension, as for ``numpyro.plate``.

    Raises
    ------
    DataError
        If ``size`` is not positive.
    ModelError
        If a ``subsample_size`` is given: minibatches are drawn outside of the model.

    Examples
    --------
    >>> import numpy as np, numpyro, numpyro.distributions as dist
    >>> import numpyro_fed as nf
    >>> def model(y=None, n=3):
    ...     mu = numpyro.sample("mu", dist.Normal(0, 1))          # global
    ...     with nf.silo_plate("row", n if y is None else y.shape[0]):
    ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y)    # local
    >>> with numpyro.handlers.seed(rng_seed=0):
    ...     trace = numpyro.handlers.trace(model).get_trace(np.zeros(5))
    >>> trace["y"]["silo_plate"]
    'row'
    """

    def __init__(
        self,
        name: str,
        size: int,
        subsample_size: int | None = None,
        dim: int | None = None,
    ):
        if subsample_size is not None:
            raise ModelError(
                f"silo_plate '{name}' was given subsample_size={subsample_size}. Rows are not "
                "subsampled inside the model; leave subsample_size out."
            )
        if size < 1:
            raise DataError(
                f"silo_plate '{name}' has size {size}: a silo must hold at least one row. "
                "Leave a silo with no rows out of the list."
            )
        # NumPyro emits the plate's own message in __init__, before the plate is on the stack.
        with in_silo_plate(lambda msg: name):
            super().__init__(name, size, dim=dim)

    def process_message(self, msg: dict[str, Any]) -> None:
        if inside_control_flow(msg, lambda body: partial(self._run, body)):
            return
        super().process_message(msg)
        # Messages pass from the innermost handler to the outermost: the first name is to stay.
        msg.setdefault("silo_plate", self.name)
        if "cond_indep_stack" in msg:
            msg["cond_indep_stack"] = [
                _SiloFrame(*f) if f.name == self.name else f for f in msg["cond_indep_stack"]
            ]

    def _run(self, body: Callable[..., Any], *args: object) -> Any:
        with self:
            return body(*args)


class feasible(Messenger):
    """Let a model run whose flat priors (``ImproperUniform``) cannot be sampled.

    Such latents get the value at zero of unconstrained space. Parameters and flat priors in the
    body of a scan are refused, since nobody can set their values.
    """

    inside = False  # whether the body of a scan or a branch runs, which NumPyro traces by itself

    def __init__(self, fn: Callable[..., Any] | None = None, *, scanned: bool = False):
        self.scanned = scanned
        super().__init__(fn)

    def _run(self, body: Callable[..., Any], *args: object) -> Any:
        outside, self.inside = self.inside, True
        try:
            return body(*args)
        finally:
            self.inside = outside

    def process_message(self, msg: dict[str, Any]) -> None:
        scanned = self.scanned or (msg["type"] == "control_flow" and msg["fn"] is scan_wrapper)
        if inside_control_flow(msg, lambda f: partial(self._run, feasible(f, scanned=scanned))):
            return
        if msg["type"] == "param" and scanned:
            # NumPyro's substitute handlers reach the latents of a scan's body, but not parameters.
            raise ModelError(
                f"the numpyro.param '{msg['name']}' stands in the body of a scan, where NumPyro "
                "cannot set it, so that it would keep its first value. Put it before the scan."
            )
        if msg["type"] != "sample" or msg["is_observed"]:
            return
        if is_flat(msg["fn"]) and msg["value"] is None:
            if scanned:
                raise ModelError(
                    f"the prior of the latent site '{msg['name']}' is flat (ImproperUniform) and "
                    "stands in the body of a scan, where it has no value to begin with. Give it a "
                    "proper prior, however wide, such as dist.Normal(0, 100)."
                )
            fn = msg["fn"]
            bijection = biject_to(fn.support)
            shape = bijection.inverse_shape(fn.shape(msg["kwargs"]["sample_shape"]))
            msg["value"] = bijection(jnp.zeros(shape))


def is_flat(fn: Distribution) -> bool:
    """Return whether a prior is ``ImproperUniform``, which cannot be sampled."""
    return isinstance(unwrapped(fn), dist.ImproperUniform)


def is_foreign(fn: Distribution) -> bool:
    """Return whether a part of it is the user's own, which may draw from another density."""
    parts = jax.tree.leaves(list(vars(fn).values()), is_leaf=lambda x: isinstance(x, Distribution))
    ours = type(fn).__module__.partition(".")[0] in ("numpyro", "numpyro_fed")
    return not ours or any(is_foreign(x) for x in parts if isinstance(x, Distribution))


def unwrapped(fn: Distribution) -> Distribution:
    """Return a distribution without the wrappers of ``expand`` and ``to_event``."""
    while isinstance(fn, dist.Independent | dist.ExpandedDistribution):
        fn = fn.base_dist
    return fn
