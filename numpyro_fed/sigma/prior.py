"""The SIGMA prior: a substitute for a site's prior, learnt from draws of it.

``SigmaPrior.fit`` goes as follows. Scales of the site and its hyperparameters are read off draws of
the model. Networks are trained on fresh draws in each step, by the evidence bound (equation 8 of
arXiv 2405.16055). Then tau, the sd that draws of the decoder lack, is measured against the true
prior (section 4.2.3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import Array
from numpyro.distributions import Distribution

from numpyro_fed.basics.errors import ModelError, SavedStateError, optional, positive_int
from numpyro_fed.basics.files import npz, read_npz, write_npz
from numpyro_fed.basics.programs import TRACING
from numpyro_fed.basics.trees import fresh
from numpyro_fed.sigma.training import (
    PriorCheck,
    Training,
    compare_draws,
    train,
    training_draws,
    weights_of,
    with_weights,
)
from numpyro_fed.sigma.true_prior import Scales, TruePrior, hyperparameters, signatures_differ
from numpyro_fed.text.substitution import Blocks, block_name

if TYPE_CHECKING:
    from numpyro_fed.sigma.networks import Networks

SharedPart = tuple[Array, Array, Array]  # z_G, hyperparameters by rank, the size of the entries
VERSION = 2
# Hyperparameters from which tau is measured, and draws of both priors at each: 32,768 draws in all
# tell a variance to sqrt(2 / 32,768) = 0.8 % of itself. tau**2 is the difference of two of them,
# and 0.01 at the least by default.
TAU_HYPER, TAU_DRAWS = 4_096, 8
# Draws from which networks are initialised: about ten for each of a hundred entries, so that the
# principal components are not those of noise.
INITIAL = Training(0, 1_024, 1, 0.0)


def _networks() -> ModuleType:
    """Return the module of the networks, which needs an extra."""
    optional("equinox", "nn")
    from numpyro_fed.sigma import networks

    return networks


@dataclass(frozen=True)
class SigmaPrior:
    r"""A learnt prior in which silos are independent given what they share (SIGMA).

    Structured independence by generative model approximation: a hierarchical variational
    autoencoder, trained on draws of the true prior.

    .. math::
        z_G \sim N(0, I), \qquad z_{L_j} \sim N\big(\mu_j(z_G, \phi), \sigma_j(z_G, \phi)^2\big),
        \qquad \theta_j \sim N\big(f_j(z_{L_j}, g(z_G, \phi), \phi), \tau_j^2\big),

    Build it by :meth:`fit`. There are two forms. The deterministic prior has :math:`\tau = 0`
    (:attr:`deterministic`; section 4.2.2). In the auxiliary prior, which is the default,
    :math:`\tau^2` is the variance that the deterministic one lacks (:attr:`auxiliary`; section
    4.2.3).

    Attributes
    ----------
    site : str
    blocks : Blocks
    tau : array (entries,)
        Standard deviations :math:`\tau`, in units of those of the true prior.
    losses : array (steps,)
        Minus the evidence bound in each step of the training.
    times : dict
        ``seconds`` of the training and of a ``step``, and the share of a step that ``drawing`` the
        prior takes; NaN for trainings too short to tell.

    References
    ----------
    Hassan, Bon, Semenova, Mira, Mengersen (2024), arXiv 2405.16055, sections 3 and 4.2, Appendix A.
    Where this departs from the paper: draws are fresh in each step, not of a fixed set of 10,000;
    hyperparameters enter by their ranks among the training's, and entries standardised; linear
    paths run beside the networks (not with ``principal_components=False``). As in the paper, the
    local encoders do not see the draw. Under the bound the local latents :math:`z_{L_j}` therefore
    carry no information about it, the decoder learns to ignore them, and :math:`\tau` alone holds
    what blocks do not share.
    """

    true_prior: TruePrior = field(repr=False)
    blocks: Blocks = field(repr=False)
    networks: Networks = field(repr=False)
    scales: Scales = field(repr=False)
    tau: np.ndarray = field(repr=False)
    settings: Training
    losses: np.ndarray = field(repr=False)
    times: dict[str, float] = field(default_factory=dict)
    is_auxiliary: bool = True

    @classmethod
    def fit(
        cls,
        key: Array,
        model: Callable[..., object],
        site: str,
        blocks: Sequence[Any],
        *,
        model_kwargs: Mapping[str, Any] | None = None,
        ranges: Mapping[str, tuple[float, float]] | None = None,
        num_steps: int = 20_000,
        batch_size: int = 128,
        draws_per_phi: int = 8,
        z_global: int | None = None,
        z_local: int = 5,
        width: int = 64,
        width_local: int = 16,
        noise: float = 0.2,
        principal_components: bool = True,
        decoder_only: bool = False,
        clip: tuple[float, float] = (0.01, 100.0),
        optim: optax.GradientTransformation | None = None,
        progress_bar: bool = True,
    ) -> SigmaPrior:
        r"""Train a prior on draws of the model's own prior, and return it.

        .. math::
            \mathbb{E}_{p(\theta, \phi)} \mathbb{E}_{q} \Big[\log N(\theta; f, \gamma^2)
            - \log \tfrac{q(z_G \mid \theta, \phi)}{N(z_G; 0, I)}
            - \sum_j \log \tfrac{q(z_{L_j} \mid z_G, \phi)}{N(z_{L_j}; 0, I)}\Big]

        Parameters
        ----------
        key : jax.Array
        model : callable
            A NumPyro model.
        site : str
            A latent vector of the model, of any distribution that can be sampled.
        blocks : sequence of arrays of int
            The entries of each silo; each entry in one of them.
        model_kwargs : dict, optional
            Arguments with which the model can be run: the data of some silo.
        ranges : dict, optional
            ``{hyperparameter: (low, high)}``: the training takes uniform draws from this range in
            the place of draws from the hyperparameter's prior.
        num_steps, batch_size, draws_per_phi : int
            Each step takes ``batch_size`` fresh draws, ``draws_per_phi`` of them at the same
            hyperparameters.
        z_global, z_local : int
            Numbers of latents that all silos share (by default a third of the entries, 5 to 100),
            and of each block's own.
        width, width_local : int
            Widths of hidden layers of the global encoder and decoder, and of the local encoders.
        noise : float
            The decoder's standard deviation :math:`\gamma`, in prior standard deviations.
        principal_components : bool
            Whether linear paths run beside the networks, mixed by a small network of the
            hyperparameters, that begin at the principal components of draws. The paper's own
            networks, with False, learn the middle of a range of hyperparameters and not its ends.
        decoder_only : bool
            Whether to train without an encoder: the decoder learns the function by which a
            Gaussian prior is made from standard normals, one for each entry. All silos then share
            these (DeepRV, arXiv 2503.21473).
        clip : (float, float)
            The least and the greatest :math:`\tau^2`, in units of the true variance; the default is
            the paper's range. If the data determine an entry to less than a tenth of its prior
            standard deviation, take less than 0.01.
        optim : optax.GradientTransformation, optional
            By default Adam with a cosine decay from 2e-3, of gradients cut to the length 1.
        progress_bar : bool

        Raises
        ------
        ModelError, DataError
            For a site or blocks that cannot be split so, before anything is trained.
        NonFiniteError
            If the training diverges.

        Examples
        --------
        >>> import numpy as np, numpyro, numpyro.distributions as dist
        >>> import numpyro_fed as nf
        >>> def model():
        ...     gap = np.subtract.outer(np.arange(4), np.arange(4))
        ...     cov = np.exp(-gap**2 / 8) + 0.01 * np.eye(4)
        ...     numpyro.sample("theta", dist.MultivariateNormal(0.0, cov))
        >>> prior = nf.SigmaPrior.fit(
        ...     jax.random.key(0), model, "theta", [[0, 1], [2, 3]], num_steps=200,
        ...     progress_bar=False)
        >>> prior.sample(jax.random.key(1), 10).shape
        (10, 4)
        """
        counts = {"num_steps": num_steps, "batch_size": batch_size, "draws_per_phi": draws_per_phi}
        widths = {"z_local": z_local, "width": width, "width_local": width_local}
        for name, value in (counts | widths).items():
            positive_int(name, value)
        if not noise > 0:
            raise ValueError(f"noise={noise!r}: the decoder's standard deviation must be positive.")
        nets = _networks()
        if not 0 < clip[0] < clip[1]:
            raise ValueError(f"clip={clip!r}: expected two positive numbers, the least first.")
        true_prior = TruePrior.of(model, site, dict(model_kwargs or {}), dict(ranges or {}))
        divided = Blocks.read(blocks, true_prior.size, site)
        if decoder_only and z_global not in (None, true_prior.size):
            raise ValueError(
                f"z_global={z_global!r} with decoder_only=True: silos share a normal for each of "
                f"the {true_prior.size} entries there. Leave z_global out."
            )
        # More shared latents follow rougher fields. But each is a global latent of every fit, and
        # a row and a column of the matrices by which hyperparameters mix them.
        default = true_prior.size if decoder_only else min(max(true_prior.size // 3, 5), 100)
        shared = default if z_global is None else z_global
        positive_int("z_global", shared)
        for_scales, for_initial, for_networks, for_steps, for_tau = jax.random.split(key, 5)
        scales = true_prior.scales(for_scales)
        sizes = nets.Sizes(
            entries=true_prior.size,
            hyper=scales.quantiles.shape[1],
            blocks=divided.number,
            largest=divided.largest,
            z_global=shared,
            z_local=z_local,
            width=width,
            width_local=width_local,
            components=principal_components,
            encodes=not decoder_only,
        )
        settings = Training(num_steps, batch_size, min(draws_per_phi, batch_size), noise)
        _, theta, normals = training_draws(true_prior, scales, INITIAL, for_initial)
        if decoder_only and normals is None:
            raise ModelError(
                f"'{site}' is no Gaussian whose draws are known as functions of standard normals: "
                "MultivariateNormal, CAR or nf.fields.Leroux. Train with an encoder."
            )
        if optim is None:
            # A prior with heavy tails has draws far out, whose gradients would throw the weights
            # off; the step from such a draw is as long as any other after the clip.
            adam = optax.adam(optax.cosine_decay_schedule(2e-3, num_steps))
            optim = optax.chain(optax.clip_by_global_norm(1.0), adam)
        trained, losses, times = train(
            for_steps,
            nets.Networks(sizes, for_networks).initialised(
                theta, normals, jnp.asarray(divided.table), noise
            ),
            true_prior,
            divided,
            scales,
            settings,
            optim,
            progress_bar,
        )
        no_tau = np.zeros(true_prior.size)
        deterministic = cls(
            true_prior, divided, trained, scales, no_tau, settings, losses, times, False
        )
        tau = deterministic._sd_that_draws_lack(for_tau, clip)
        return replace(deterministic, tau=tau, is_auxiliary=True)

    @property
    def site(self) -> str:
        """Return the site whose prior it is."""
        return self.true_prior.site

    @property
    def deterministic(self) -> SigmaPrior:
        """Return the prior whose entries are exactly the decoder's output (section 4.2.2)."""
        return replace(self, is_auxiliary=False)

    @property
    def auxiliary(self) -> SigmaPrior:
        """Return the prior with noise that restores the entries' variance (section 4.2.3)."""
        return replace(self, is_auxiliary=True)

    def _sd_that_draws_lack(self, key: Array, clip: tuple[float, float]) -> np.ndarray:
        """Return the standard deviation that draws of the decoder lack (entries,), standardised."""
        for_phi, for_true, for_learnt = jax.random.split(key, 3)

        def pair(keys: tuple[Array, Array, Array]) -> tuple[Array, Array]:
            phi = self.true_prior.draw_phi(keys[0])
            draw_keys = jax.random.split(keys[2], TAU_DRAWS)
            learnt = jax.vmap(lambda key: self._draw(key, phi))(draw_keys)
            draws = self.true_prior.draws_with_noise(keys[1], phi, TAU_DRAWS)[1], learnt
            flat = self.true_prior.flat(phi)
            return jax.tree.map(lambda theta: self.scales.standardised(theta, flat), draws)

        keys = tuple(jax.random.split(k, TAU_HYPER) for k in (for_phi, for_true, for_learnt))
        # In batches: all draws of a large map at once would not fit in memory.
        true, learnt = jax.jit(lambda keys: jax.lax.map(pair, keys, batch_size=64))(keys)
        missing = true.var((0, 1)) - learnt.var((0, 1))
        return np.sqrt(np.clip(np.asarray(missing), *clip))

    def shared(self, fn: Distribution, phi: Mapping[str, Array]) -> SharedPart:
        """Sample the shared latents, given the hyperparameters."""
        if missing := [name for name in self.true_prior.phi if name not in phi]:
            raise ModelError(
                f"'{self.site}' depends on '{missing[0]}', which is not sampled before it here. "
                "Put handlers that replace it (reparam, say) inside substitute_prior, not around."
            )
        size = self.networks.sizes.z_global
        z_G = numpyro.sample(f"{self.site}/z_G", dist.Normal(0, 1).expand([size]).to_event(1))
        flat = self.true_prior.flat({name: phi[name] for name in self.true_prior.phi})
        return z_G, self.scales.ranks(flat), self.scales.size(flat)

    def local(
        self, shared: SharedPart, fn: Distribution, phi: Mapping[str, Array], which: Array
    ) -> Array:
        """Sample some blocks (blocks, largest), given what all silos share."""
        z_G, ranks, size = shared
        mean, log_variance = jax.vmap(lambda b: self.networks.encode_local(b, z_G, ranks))(which)
        normal = dist.Normal(mean, jnp.exp(0.5 * log_variance)).to_event(1)
        z_L = numpyro.sample(f"{self.site}/z_L", normal)

        def decode(block: Array, z_L: Array) -> tuple[Array, Array]:
            rows, present = self.blocks.rows(block)
            unit = size * self.scales.sd[rows]
            decoded = self.networks.decode(block, z_G, z_L, ranks)
            tau = unit * fresh(self.tau)[rows]
            # Padding becomes a standard normal, which is proper and which nothing reads.
            entries = self.scales.mean[rows] + unit * decoded
            return jnp.where(present, entries, 0.0), jnp.where(present, tau, 1.0)

        decoded, tau = jax.vmap(decode)(which, z_L)
        if not self.is_auxiliary:
            return decoded
        return numpyro.sample(f"{self.site}/values", dist.Normal(decoded, tau).to_event(1))

    def whole(self, shared: SharedPart, parts: Array, which: Array) -> Array:
        """Return the site from its blocks."""
        return self.blocks.assemble(parts, which)

    def suits(self, model: Callable[..., object], silos: Sequence[Mapping[str, Any]]) -> None:
        """Refuse a text in which, on the silos' data, the site has another prior than in training.

        Hyperparameters that go beyond the training's cause a warning.
        """
        trained = self.true_prior.signature(self.scales)
        for j, silo in enumerate(silos):
            kwargs = {k: v for k, v in silo.items() if k != block_name(self.site)}
            here = replace(self.true_prior, model=model, kwargs=kwargs)
            if j == 0 and set(phi := hyperparameters(model, self.site, kwargs)) != set(here.phi):
                raise ModelError(
                    f"'{self.site}' depends on {', '.join(phi) or 'nothing'} here, and on "
                    f"{', '.join(here.phi) or 'nothing'} where its prior was trained."
                )
            if signatures_differ(here.signature(self.scales), trained):
                raise ModelError(
                    f"silo {j}: '{self.site}' has another distribution than where its prior was "
                    "trained, at the same hyperparameters. Train one anew, for a prior that is the "
                    "same at all silos."
                )
            if j == 0:
                here.warn_if_model_goes_beyond(jax.random.key(0), self.scales)

    def sample(self, key: Array, n: int, phi: Mapping[str, Any] | None = None) -> Array:
        """Return draws of the site (n, entries), at ``phi`` or at draws of the hyperparameters."""
        if phi is not None:
            self.true_prior.warn_if_outside(phi, self.scales)

        def draw(key: Array) -> Array:
            for_phi, for_rest = jax.random.split(key)
            return self._draw(for_rest, self.true_prior.draw_phi(for_phi) if phi is None else phi)

        return jax.jit(lambda key: jax.lax.map(draw, jax.random.split(key, n), batch_size=256))(key)

    def _draw(self, key: Array, phi: Mapping[str, Any]) -> Array:
        """Return one draw of the site (entries,)."""
        which = jnp.arange(self.blocks.number)
        # The true distribution is not needed: shared and local sample the networks' own latents.
        with TRACING, numpyro.handlers.block(), numpyro.handlers.seed(rng_seed=key):
            shared = self.shared(dist.Delta(0.0), phi)
            with numpyro.plate("blocks", self.blocks.number):
                parts = self.local(shared, dist.Delta(0.0), phi, which)
        return self.whole(shared, parts, which)

    def check(
        self, key: Array, at: Sequence[Mapping[str, Any]] | None = None, num_draws: int = 2_000
    ) -> PriorCheck:
        """Compare draws with those of the true prior.

        Parameters
        ----------
        key : jax.Array
        at : sequence of dict, optional
            Hyperparameters; by default the 0.1, 0.5 and 0.9 quantiles of their training's draws.
        num_draws : int

        Returns
        -------
        PriorCheck
            Prints as a table.
        """
        positive_int("num_draws", num_draws)
        block_of = self.blocks.block_of
        return compare_draws(key, self.true_prior, self.sample, block_of, at, num_draws)

    def save(self, path: str | Path) -> None:
        """Write weights, scales and sizes to ``path.npz``, without pickle.

        A save that is interrupted leaves an earlier file as it was.
        """
        arrays = {f"weight{i}": np.asarray(a) for i, a in enumerate(weights_of(self.networks))}
        arrays |= {f"scale.{k}": np.asarray(v) for k, v in self.scales._asdict().items()}
        arrays |= {
            "table": self.blocks.table,
            "tau": self.tau,
            "losses": self.losses,
            "signature": self.true_prior.signature(self.scales),
        }
        meta = {
            "version": VERSION,
            "site": self.site,
            "phi": list(self.true_prior.phi),
            "ranges": {k: list(v) for k, v in self.true_prior.ranges.items()},
            "sizes": self.networks.sizes._asdict(),
            "settings": self.settings._asdict(),
            "times": self.times,
            "is_auxiliary": self.is_auxiliary,
        }
        write_npz(path, {name: np.asarray(a) for name, a in arrays.items()}, meta)

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: Callable[..., object],
        site: str,
        blocks: Sequence[Any],
        *,
        model_kwargs: Mapping[str, Any] | None = None,
    ) -> SigmaPrior:
        """Read a prior from the file that :meth:`save` wrote, for the model it was trained for.

        Raises
        ------
        SavedStateError
            If it was trained for another site, other hyperparameters or other blocks. A model whose
            prior of the hyperparameters goes beyond the training's range is warned of.
        """
        nets, file = _networks(), npz(path)
        arrays, meta = read_npz(path)
        if "ranges" not in meta:
            raise SavedStateError(f"{file} holds no SigmaPrior, but a fit: use numpyro_fed.load.")
        ranges = {k: (float(v[0]), float(v[1])) for k, v in meta["ranges"].items()}
        true_prior = TruePrior.of(model, site, dict(model_kwargs or {}), {})
        divided = Blocks.read(blocks, true_prior.size, site)
        for what, saved, expected in (
            ("version", meta["version"], VERSION),
            ("site", meta["site"], site),
            ("hyperparameters", meta["phi"], list(true_prior.phi)),
        ):
            if saved != expected:
                raise SavedStateError(f"{file} was trained for the {what} {saved}, not {expected}.")
        for name, array in arrays.items():
            if name.startswith(("weight", "tau")) and not np.isfinite(array).all():
                raise SavedStateError(
                    f"{file}: {name} has numbers that are NaN or infinite. The file was changed, "
                    "or is damaged: copy it again, or train the prior again."
                )
        if not np.array_equal(arrays["table"], divided.table):
            raise SavedStateError(
                f"{file} was trained for other blocks of '{site}' than these: "
                f"{len(arrays['table'])} there, {divided.number} here, or other entries in them."
            )
        # Networks of these sizes give the structure; functions such as activations are leaves of
        # it, too, and are not in the file.
        template = nets.Networks(nets.Sizes(**meta["sizes"]), jax.random.key(0))
        weights = (jnp.asarray(arrays[f"weight{i}"]) for i in count())
        scales = Scales(**{k: jnp.asarray(arrays[f"scale.{k}"]) for k in Scales._fields})
        if signatures_differ(true_prior.signature(scales), arrays["signature"]):
            raise SavedStateError(
                f"{file} was trained for another prior of '{site}': its distribution at the same "
                "hyperparameters is another one here."
            )
        true_prior.warn_if_model_goes_beyond(jax.random.key(0), scales)
        return cls(
            replace(true_prior, ranges=ranges),
            divided,
            with_weights(template, weights),
            scales,
            arrays["tau"],
            Training(**meta["settings"]),
            arrays["losses"],
            meta["times"],
            meta["is_auxiliary"],
        )
