"""Guides of a silo's latents: conditional Gaussians of the rows of a silo plate.

Their parameters are each row's own (:class:`LocalGuide`), or the output of a network that reads the
row's data and whose parameters all silos share (:class:`Amortised`, :class:`Encoder`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.lax import stop_gradient
from jax.tree_util import PyTreeDef
from numpyro import handlers

from numpyro_fed.basics.errors import GuideError, optional, positive_int
from numpyro_fed.basics.programs import TRACING
from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.guides.global_guides import GuideParams
from numpyro_fed.numerics.gaussian import Gaussian, standard_normal, unit_lower
from numpyro_fed.text.log_density import FederatedModel

AMORTISED = "amortised"  # the covariance of latents whose guide is a network
HIDDEN = 64  # units in each hidden layer of a network for rows
# Globals, up to which the default network reads them. With more, inputs that say little about a row
# would outnumber the row's own.
READS_UP_TO = 32
# Factor of the last layer's usual weights, so that all rows start with nearly the same guide. At
# zero the gradient of the layers below would be zero.
LAST_LAYER_SCALE = 0.1
# Bounds of a log sd. A network may return anything for an unusual row, and one draw that overflows
# makes the gradient of all rows NaN.
MAX_LOG_SCALE, MIN_LOG_SCALE = 5.0, -10.0

RowShapes = Mapping[str, tuple[tuple[int, ...], Any]]  # shape of one row, and dtype, of each array


@dataclass(frozen=True)
class LocalGuide:
    r"""A conditional Gaussian guide for the rows of one silo plate.

    For row ``i``, with ``a`` the globals and the latents of outer plates above the row, measured
    from the centres of their guides,

    .. math::
        q(z_i \mid a) = N\big(m_i + C_i a,\; T_i\, \mathrm{diag}(e^{2(s_i + D_i a)})\, T_i'\big).

    ``dim`` are latents of one row. The ``kind`` of covariance is ``"diagonal"``, ``"full"`` within
    each row, or ``"joint"``: one full covariance over all rows of the plate at a silo, for plates
    of few rows. Latents of ``"amortised"`` ones are independent, with parameters that a network
    returns; the silo itself keeps none, and ``loc`` is (rows, 0). ``couple_mean`` and
    ``couple_scale`` say whether there are ``C_i`` and ``D_i``.
    """

    dim: int
    kind: str
    couple_mean: bool
    couple_scale: bool
    init_scale: float

    @property
    def joint(self) -> bool:
        """Return whether rows share one covariance; a row's density is then given those before."""
        return self.kind == "joint"

    @property
    def independent(self) -> bool:
        """Return whether all latents are independent given the latents above them."""
        if self.kind == "full":
            return self.dim < 2
        return not self.joint

    def init(self, loc: Array, width: int) -> GuideParams:
        """Return parameters for a start at ``loc`` (rows, dim), with ``width`` numbers above."""
        rows, dim = len(loc), self.dim
        if self.kind == AMORTISED:
            return {"loc": jnp.zeros((rows, 0))}
        eta: GuideParams = {
            "loc": loc,
            "log_scale": jnp.full((rows, dim), jnp.log(self.init_scale)),
        }
        if self.joint:
            # A square array, whose upper half is not used: rows stay the first axis, as in all
            # parameters of rows.
            eta["below"] = jnp.zeros((rows, dim, rows, dim))
        elif not self.independent:
            eta["below"] = jnp.zeros((rows, dim * (dim - 1) // 2))
        if self.couple_mean:
            eta["mean_coupling"] = jnp.zeros((rows, dim, width))
        if self.couple_scale:
            eta["scale_coupling"] = jnp.zeros((rows, dim, width))
        return eta

    def draw(self, eta: GuideParams, above: Array, noise: Array) -> Array:
        """Return one draw for every row; noise and draws are (rows, dim)."""
        q = self._gaussian(self.recentre(eta, above))
        return q.draw(noise.reshape(q.loc.shape)).reshape(noise.shape)

    def log_q(self, eta: GuideParams, above: Array, z: Array) -> Array:
        """Return the log density (rows,) at ``z`` (rows, dim)."""
        q = self._gaussian(self.recentre(eta, above))
        residual = q.standardise(z.reshape(q.loc.shape)).reshape(z.shape)
        log_scale = q.log_scale.reshape(z.shape)
        return (standard_normal(residual) - log_scale).sum(-1)

    def recentre(self, eta: GuideParams, above: Array) -> GuideParams:
        """Return the same guide, measured from other values ``above`` (width,)."""
        moved = dict(eta)
        if self.couple_mean:
            moved["loc"] = eta["loc"] + eta["mean_coupling"] @ above
        if self.couple_scale:
            moved["log_scale"] = eta["log_scale"] + eta["scale_coupling"] @ above
        return moved

    def from_mode(self, mode: Array, precision: Array) -> GuideParams:
        """Return the normal with a mode (rows, dim), and the precision of each row, or of all."""
        if self.kind in ("diagonal", AMORTISED):
            return {"loc": mode, "log_scale": -0.5 * jnp.log(jnp.diagonal(precision, 0, -2, -1))}
        shape = (mode.size,) if self.joint else mode.shape
        return self._params(Gaussian.of_precision(mode.reshape(shape), precision), mode.shape)

    def to_frame(self, eta: GuideParams) -> tuple[Gaussian, GuideParams]:
        """Return the guide without couplings as a frame of the rows, and the guide in it."""
        # In the frame the guide is standard: zeros. Only its couplings remain, in the frame's
        # units.
        frame, inside = self._gaussian(eta), jax.tree.map(jnp.zeros_like, eta)
        if self.couple_mean:
            C = eta["mean_coupling"]
            inside["mean_coupling"] = frame.solve(C.reshape(*frame.loc.shape, -1)).reshape(C.shape)
        if self.couple_scale:
            inside["scale_coupling"] = eta["scale_coupling"]
        return frame, inside

    def from_frame(self, frame: Gaussian, eta: GuideParams) -> GuideParams:
        """Return the parameters in ``z``, from parameters ``eta`` in a frame of the rows."""
        shape, q = eta["loc"].shape, self._gaussian(eta)
        after = self._params(frame.compose(q), shape)
        if self.couple_mean:
            C = eta["mean_coupling"]
            after["mean_coupling"] = frame.times(C.reshape(*q.loc.shape, -1)).reshape(C.shape)
        if self.couple_scale:
            after["scale_coupling"] = eta["scale_coupling"]
        return after

    def _gaussian(self, eta: GuideParams) -> Gaussian:
        """Return a stack of Gaussians (rows, dim), or one of (rows * dim,) for a joint guide."""
        loc, log_scale = eta["loc"], eta["log_scale"]
        if self.independent:
            return Gaussian(loc, log_scale)
        if not self.joint:
            return Gaussian(loc, log_scale, unit_lower(eta["below"], self.dim))
        size = loc.size
        T = jnp.tril(eta["below"].reshape(size, size), -1) + jnp.eye(size)
        return Gaussian(loc.ravel(), log_scale.ravel(), T)

    def _params(self, q: Gaussian, shape: tuple[int, ...]) -> GuideParams:
        """Return the parameters of a Gaussian of :meth:`_gaussian`, for ``shape`` (rows, dim)."""
        eta: GuideParams = {"loc": q.loc.reshape(shape), "log_scale": q.log_scale.reshape(shape)}
        if self.joint and q.unit is not None:
            eta["below"] = jnp.tril(q.unit, -1).reshape(*shape, *shape)
        elif not self.independent:
            eta["below"] = q.params()["below"]
        return eta


@dataclass(frozen=True, kw_only=True)
class Amortised:
    r"""A guide of rows' latents as one network, the same for all rows and silos.

    For the latents of rows, as ``locals=`` of :class:`Structured` or as a guide of its own,

    .. math::
        q(z_{L,i} \mid z_G) = N\big(m,\; \mathrm{diag}(e^{2 s})\big), \qquad
        (m, s) = f_\varphi(y_i, z_G),

    in unconstrained space, with :math:`\varphi` a parameter that silos share. A silo's own
    parameters do not grow with its rows. For the auxiliary variables of one client of
    :class:`numpyro_fed.VFL`,

    .. math::
        q(z_{ij} \mid \theta_j)
        = N\big(g_{ij} + \rho\, m(h_{ij}),\; \rho^2 e^{2 s(h_{ij})}\big)

    where :math:`h_{ij}` has the predictor and, if clients know it, the response, both transformed
    by asinh, which keeps large numbers small. At the start ``m = s = 0``, the conditional prior.

    Parameters
    ----------
    hidden : int, optional
        Units of the hidden layers of the default network: 64 in two layers for rows, 16 in one for
        auxiliary variables. It reads all arrays that are as long as the plate, standardised and
        transformed by asinh, and the globals, unconstrained, if there are at most 32. To
        standardise, silos send sums of the inputs, and of their squared deviations, in two
        exchanges before the first round.
    encoder : equinox.Module, optional
        A network of your own, ``encoder(row, z_G) -> (loc, log_scale)``, each as long as a row's
        latents (``dim`` of the plate, in the order of their sites). ``row`` has the arrays of one
        row by name, ``z_G`` the globals by site, on their supports. Its arrays of floats are
        learnt.

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


@dataclass(frozen=True, eq=False)
class Encoder:
    """The network of one silo plate, as functions of its parameters ``phi`` that silos share.

    ``dim`` are latents of a row, and ``row`` has shape and dtype of each array of a row that the
    network reads. Arrays of floats of ``module``, an equinox.Module, are learnt. The default
    network has ``hidden`` units, and reads a row's numbers, standardised and transformed by asinh,
    and ``reads`` globals. The user's own has 0, and reads one row and the globals on their
    supports.
    """

    plate: str
    fm: FederatedModel
    dim: int
    row: RowShapes
    module: Any
    hidden: int = 0
    reads: int = 0
    init_scale: float = 1.0

    @property
    def name(self) -> str:
        """Return the name of the network's parameters among the shared parameters."""
        return f"encoder of '{self.plate}'"

    def init(self, key: Array) -> dict[str, Array]:
        """Return the first parameters."""
        if not self.hidden:
            return {name: jnp.asarray(a) for name, a in _learnt(self.module)[0].items()}
        width = sum(math.prod(shape) for shape, _ in self.row.values())
        fresh = _network(width + self.reads, self.dim, self.hidden, key)
        units = {"shift": jnp.zeros(width), "scale": jnp.ones(width)}
        return _learnt(fresh)[0] | units

    def features(self, data: SiloData) -> Array:
        """Return the inputs (rows, width) that are to be standardised."""
        rows = [jnp.asarray(data.arrays[key], float) for key in self.row]
        return jnp.concatenate([a.reshape(len(a), -1) for a in rows], 1)

    def eta(
        self, phi: dict[str, Array], theta: dict[str, Any], z_G: Array, data: SiloData
    ) -> GuideParams:
        """Return the parameters of the plate's guide, (rows, dim) each."""
        if self.hidden:
            # Means and sds of the inputs are among the shared parameters, but are not learnt.
            shift, scale = stop_gradient((phi["shift"], phi["scale"]))
            x, read = jnp.arcsinh((self.features(data) - shift) / scale), z_G[: self.reads]
            out = jax.vmap(lambda x: self.apply(phi, jnp.concatenate([x, read])))(x)
            loc, log_scale = out[:, : self.dim], jnp.log(self.init_scale) + out[:, self.dim :]
        else:
            values = self.fm.constrain_global(theta, z_G)
            rows = {key: jnp.asarray(data.arrays[key]) for key in self.row}
            loc, log_scale = jax.vmap(lambda row: self.apply(phi, row, values))(rows)
        return {"loc": loc, "log_scale": jnp.clip(log_scale, MIN_LOG_SCALE, MAX_LOG_SCALE)}

    def apply(self, phi: dict[str, Array], *args: object) -> Any:
        """Return the network's output with parameters ``phi``."""
        from numpyro.contrib.module import eqx_module

        learnt, tree = _learnt(self.module)
        params = jax.tree.unflatten(tree, [phi[name] for name in learnt])
        with TRACING, handlers.block(), handlers.substitute(data={f"{self.name}$params": params}):
            return eqx_module(self.name, self.module)(*args)


def encoder_of(
    spec: Amortised, fm: FederatedModel, plate: str, dim: int, row: RowShapes, init_scale: float
) -> Encoder:
    """Return the network of a plate's rows, by its settings."""
    optional("equinox", "nn")
    if not row:
        raise GuideError(
            f"guides.Amortised for silo_plate '{plate}': no array has as many rows as the plate, "
            "so that there is nothing to read. Take the plate's size from an array's shape, or use "
            "locals='full'."
        )
    if spec.encoder is not None:
        given = Encoder(plate, fm, dim, row, spec.encoder)
        one = {key: jax.ShapeDtypeStruct(shape, dtype) for key, (shape, dtype) in row.items()}
        key = jax.random.key(0)
        phi = given.init(key)
        try:
            out = jax.eval_shape(
                lambda row: given.apply(
                    phi, row, fm.constrain_global(fm.init_theta(key), jnp.zeros(fm.dim))
                ),
                one,
            )
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
                f"(loc, log_scale) of ({dim},) each, for one row's latents ({sites}), "
                "unconstrained."
            )
        return given
    hidden, reads = spec.hidden or HIDDEN, fm.dim if fm.dim <= READS_UP_TO else 0
    width = sum(math.prod(shape) for shape, _ in row.values())
    module = _network(width + reads, dim, hidden, jax.random.key(0))
    return Encoder(plate, fm, dim, row, module, hidden, reads, init_scale)


def with_encoders(fm: FederatedModel, encoders: Mapping[str, Encoder]) -> FederatedModel:
    """Return the model with the networks' parameters among its shared parameters."""
    if not encoders:
        return fm
    return replace(fm, networks={e.name: e.init for e in encoders.values()})


def _learnt(module: object) -> tuple[dict[str, Array], PyTreeDef]:
    """Return a module's arrays of floats by their paths, and the structure of the module."""
    import equinox as eqx

    leaves, tree = jax.tree.flatten_with_path(eqx.filter(module, eqx.is_inexact_array))
    return {jax.tree_util.keystr(path).lstrip("."): a for path, a in leaves}, tree


def _network(inputs: int, dim: int, hidden: int, key: Array) -> Any:
    """Return a network of two hidden layers whose means and log scales start near zero."""
    import equinox as eqx

    net = eqx.nn.MLP(inputs, 2 * dim, hidden, 2, jax.nn.softplus, key=key)
    return eqx.tree_at(
        lambda n: (n.layers[-1].weight, n.layers[-1].bias),
        net,
        replace_fn=lambda a: LAST_LAYER_SCALE * a,
    )
