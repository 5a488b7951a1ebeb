"""Latents of rows as a function of the rows' own data, the same at all silos."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.lax import stop_gradient
from numpyro import handlers

from numpyro_fed.errors import GuideError, MissingExtraError, positive_int
from numpyro_fed.guides import gaussian
from numpyro_fed.guides.gaussian import GuideParams, LocalGuide
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.split import FederatedModel
from numpyro_fed.tracing import TRACING

HIDDEN = 64  # units, of a network for rows
READS_UP_TO = 32  # globals, that the default network reads
SMALLER = 0.1  # of the usual weights of the last layer, so that rows begin alike
LARGEST, LEAST = 5.0, -10.0  # log scale: draws far out must not overflow

Row = Mapping[str, tuple[tuple[int, ...], Any]]  # shape of one row, and dtype, of each array


@dataclass(frozen=True, kw_only=True)
class Amortised:
    r"""A guide of rows' latents as one network, the same for all rows and silos.

    For the latents of rows, as ``locals=`` of :class:`Structured` or as a guide of its own,

    .. math::
        q(z_{L,i} \mid z_G) = N\big(m,\; \mathrm{diag}(e^{2 s})\big), \qquad
        (m, s) = f_\varphi(y_i, z_G),

    in unconstrained space, with :math:`\varphi` a parameter that silos share: what a silo keeps
    does not grow with its rows. For the auxiliary variables of :class:`numpyro_fed.VFL`, of one
    client,

    .. math::
        q(z_{ij} \mid \theta_j)
        = N\big(g_{ij} + \rho\, m(h_{ij}),\; \rho^2 e^{2 s(h_{ij})}\big)

    with :math:`h_{ij}` the predictor and, where clients know the response, that: both on a scale on
    which large numbers stay small (asinh). At the start ``m = s = 0``, the conditional prior.

    Parameters
    ----------
    hidden : int, optional
        Units of the hidden layers of the network that is taken where there is no ``encoder``: 64 in
        two layers for rows, 16 in one for auxiliary variables. It reads all arrays that are as long
        as the plate, a row's numbers standardised and by asinh, and the globals, unconstrained,
        where there are at most 32. For that, silos add up what it reads, and its squares, in two
        more exchanges before the first round.
    encoder : equinox.Module, optional
        ``encoder(row, z_G) -> (loc, log_scale)``, each as long as a row's latents (as
        ``dim`` of the plate, in the order of their sites). ``row`` holds the arrays of one row by
        name, ``z_G`` the globals by site, on their supports. Its arrays of floats are learnt.

    References
    ----------
    Hassan, Salomone, Mengersen (2023), arXiv 2302.03314, section 3.1, for rows. Hassan, Sutton,
    Mira, Mengersen (2024), arXiv 2405.04043, section 4.1, equation 9, for auxiliary variables; the
    paper's network gives mean and scale themselves, here they are measured from the conditional
    prior.

    Examples
    --------
    >>> import numpyro_fed as nf
    >>> nf.guides.Structured(locals=nf.guides.Amortised(hidden=32)).locals.hidden
    32
    """

    hidden: int | None = None
    encoder: Any = None

    def __post_init__(self) -> None:
        if self.hidden is not None:
            positive_int("hidden", self.hidden)
        if self.encoder is not None and self.hidden is not None:
            raise GuideError("hidden= is for the network that is taken without encoder=: drop one.")
        if self.encoder is not None and not callable(self.encoder):
            raise GuideError(
                f"encoder must be an equinox.Module that is called with a row and the globals, got "
                f"{type(self.encoder).__name__}."
            )


class Encoder(NamedTuple):
    """The network of one silo plate, as pure functions.

    Attributes
    ----------
    name : str
        Of its parameters, among those that silos share.
    init : key -> phi
    eta : (phi, theta, z_G, data) -> {"loc", "log_scale"}
        Of all rows, (rows, dim) each.
    features : data -> (rows, numbers), or None
        What is standardised of a row, where something is.
    """

    name: str
    init: Callable[[Array], dict[str, Array]]
    eta: Callable[[dict[str, Array], dict[str, Any], Array, SiloData], GuideParams]
    features: Callable[[SiloData], Array] | None


def encoder(
    spec: Amortised, fm: FederatedModel, plate: str, dim: int, row: Row, init_scale: float
) -> Encoder:
    """Build the network of a plate's rows.

    Raises
    ------
    GuideError
        For a plate without arrays of its length, and for outputs that do not fit.
    MissingExtraError
        Without equinox.
    """
    try:
        import equinox as eqx
        from numpyro.contrib.module import eqx_module
    except ImportError as error:
        raise MissingExtraError("equinox", "nn") from error
    if not row:
        raise GuideError(
            f"guides.Amortised for silo_plate '{plate}': no array has as many rows as the plate, "
            "so that there is nothing to read. Take the plate's size from an array's shape, or use "
            "locals='full'."
        )
    name = f"encoder of '{plate}'"
    width = sum(int(np.prod(shape)) for shape, _ in row.values())
    read = fm.dim if fm.dim <= READS_UP_TO else 0
    module, own = spec.encoder, spec.encoder is None
    if own:
        module = _network(eqx, width + read, dim, spec.hidden or HIDDEN)

    def parameters(module: Any) -> Any:
        return eqx.filter(module, eqx.is_inexact_array)

    paths, tree = jax.tree.flatten_with_path(parameters(module))
    names = [jax.tree_util.keystr(path).lstrip(".") for path, _ in paths]

    def init(key: Array) -> dict[str, Array]:
        if not own:
            return {n: jnp.asarray(a) for n, (_, a) in zip(names, paths, strict=True)}
        fresh = parameters(_network(eqx, width + read, dim, spec.hidden or HIDDEN, key))
        phi = dict(zip(names, jax.tree.leaves(fresh), strict=True))
        return phi | {"shift": jnp.zeros(width), "scale": jnp.ones(width)}

    def called(phi: dict[str, Array], *args: Any) -> Any:
        given = jax.tree.unflatten(tree, [phi[n] for n in names])
        with TRACING, handlers.block(), handlers.substitute(data={f"{name}$params": given}):
            return eqx_module(name, module)(*args)

    def numbers(data: SiloData) -> Array:
        rows = [jnp.asarray(data.arrays[key], float) for key in row]
        return jnp.concatenate([a.reshape(len(a), -1) for a in rows], 1)

    def of_numbers(phi: dict[str, Array], z_G: Array, data: SiloData) -> tuple[Array, Array]:
        shift, scale = stop_gradient((phi["shift"], phi["scale"]))
        x = jnp.arcsinh((numbers(data) - shift) / scale)
        out = jax.vmap(lambda x: called(phi, jnp.concatenate([x, z_G[:read]])))(x)
        return out[:, :dim], jnp.log(init_scale) + out[:, dim:]

    def of_rows(
        phi: dict[str, Array], theta: dict[str, Any], z_G: Array, data: SiloData
    ) -> tuple[Array, Array]:
        values = fm.constrain_global(theta, z_G)
        rows = {key: jnp.asarray(data.arrays[key]) for key in row}
        return jax.vmap(lambda one: called(phi, one, values))(rows)

    def eta(
        phi: dict[str, Array], theta: dict[str, Any], z_G: Array, data: SiloData
    ) -> GuideParams:
        loc, log_scale = of_numbers(phi, z_G, data) if own else of_rows(phi, theta, z_G, data)
        return {"loc": loc, "log_scale": jnp.clip(log_scale, LEAST, LARGEST)}

    if not own:
        _check(called, init(jax.random.key(0)), fm, plate, dim, row)
    return Encoder(name, init, eta, numbers if own else None)


def local(dim: int, init_scale: float) -> LocalGuide:
    """Independent normals, of whose parameters a silo keeps the number of rows alone."""
    given = gaussian.local(dim, "diagonal", False, False, init_scale)

    def init(loc: Array, width: int) -> GuideParams:
        return {"loc": jnp.zeros((len(loc), 0))}

    def same(eta: GuideParams, other: Any) -> GuideParams:
        return eta

    return given._replace(init=init, recentre=same, moved=same)


def with_encoders(fm: FederatedModel, encoders: Mapping[str, Encoder]) -> FederatedModel:
    """The model with the networks' parameters among those that silos share."""
    if not encoders:
        return fm

    def init_theta(key: Array) -> dict[str, Any]:
        keys = jax.random.split(jax.random.fold_in(key, 1), len(encoders))
        own = {e.name: e.init(k) for e, k in zip(encoders.values(), keys, strict=True)}
        return fm.init_theta(key) | own

    def constrain_theta(theta: dict[str, Any]) -> dict[str, Any]:
        names = {e.name for e in encoders.values()}
        own = {name: theta[name] for name in names & set(theta)}
        return fm.constrain_theta({k: v for k, v in theta.items() if k not in names}) | own

    return fm._replace(init_theta=init_theta, constrain_theta=constrain_theta)


def _network(eqx: Any, inputs: int, dim: int, hidden: int, key: Array | None = None) -> Any:
    """Two hidden layers, and means and log scales that begin near zero."""
    key = jax.random.key(0) if key is None else key
    net = eqx.nn.MLP(inputs, 2 * dim, hidden, 2, jax.nn.softplus, key=key)
    return eqx.tree_at(
        lambda n: (n.layers[-1].weight, n.layers[-1].bias), net, replace_fn=lambda a: SMALLER * a
    )


def _check(called: Callable, phi: Any, fm: FederatedModel, plate: str, dim: int, row: Row) -> None:
    """Refuse an encoder whose outputs are not means and log scales of a row's latents."""
    one = {key: jax.ShapeDtypeStruct(shape, dtype) for key, (shape, dtype) in row.items()}
    z_G = jnp.zeros(fm.dim)

    def run(one: dict[str, Array]) -> Any:
        return called(phi, one, fm.constrain_global(fm.init_theta(jax.random.key(0)), z_G))

    try:
        out = jax.eval_shape(run, one)
        shapes = [tuple(a.shape) for a in out] if isinstance(out, tuple | list) else out.shape
    except Exception as error:
        raise GuideError(
            f"the encoder of silo_plate '{plate}' raised {type(error).__name__} for a row of "
            f"{ {k: shape for k, (shape, _) in row.items()} } and the globals: {error}"
        ) from error
    if shapes != [(dim,), (dim,)]:
        sites = ", ".join(f"'{s.name}'" for s in fm.named("latent", plate))
        raise GuideError(
            f"the encoder of silo_plate '{plate}' returns shapes {shapes}: expected a pair "
            f"(loc, log_scale) of ({dim},) each, for one row's latents ({sites}), unconstrained."
        )
