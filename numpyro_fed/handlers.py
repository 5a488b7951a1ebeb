"""Effect handlers that turn one model text into the models of a silo and of the federation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numpyro.primitives import Messenger

from numpyro_fed.primitives import silo_plate_of


class at_silo(Messenger):
    """Rename what is local to ``silo_{j}/name``; globals keep their names.

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

    def __init__(self, fn: Callable | None = None, silo: int = 0):
        self.silo = silo
        self._local_plates: set[str] = set()
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        if silo_plate_of(msg) is None or not msg.get("name"):
            return
        if msg["type"] == "plate":
            self._local_plates.add(msg["name"])
        msg["cond_indep_stack"] = [
            f._replace(name=local_name(self.silo, f.name)) if f.name in self._local_plates else f
            for f in msg["cond_indep_stack"]
        ]
        msg["name"] = local_name(self.silo, msg["name"])


def local_name(silo: int, name: str) -> str:
    """The name of silo ``j``'s site in the joint model."""
    return f"silo_{silo}/{name}"


class _shared(Messenger):
    """Emit each global site once; later silos read its value and stay silent about it."""

    def __init__(self, values: dict[str, Any]):
        self.values = values
        super().__init__(None)

    def process_message(self, msg: dict[str, Any]) -> None:
        if silo_plate_of(msg) is None and msg.get("name") in self.values:
            msg["value"] = self.values[msg["name"]]
            msg["stop"] = True

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        if silo_plate_of(msg) is None and msg.get("name"):
            self.values.setdefault(msg["name"], msg["value"])


def joint(model: Callable, silos: Sequence[Mapping[str, Any]]) -> Callable[[], None]:
    r"""The exact joint model of all silos, as an ordinary NumPyro model of no arguments.

    .. math::
        p(z_G) \prod_{j=0}^{J-1} p(z_{L_j}, y_j \mid z_G)

    Parameters
    ----------
    model : callable
        A model with ``silo_plate``.
    silos : sequence of dict
        What each silo holds, as keyword arguments of the model; sizes may differ.

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
        for j, data in enumerate(silos):
            with at_silo(silo=j), _shared(values):
                model(**data)

    return joint_model
