"""A grammar of small models for the oracle: random specs, their NumPyro text, their data.

A spec says a model in a few words. From it come the text that numpyro_fed is given (here) and, by
hand and in float64, the density that it is judged by (:mod:`oracle_exact`), which share nothing but
the spec.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.contrib.control_flow import scan
from numpyro.distributions import transforms
from numpyro.infer.reparam import LocScaleReparam, TransformReparam

import numpyro_fed as nf

DATA_SETS = ("prior", "prior", "prior", "prior", "far", "far", "wide", "wide", "flat", "flat")
HERE_OR_NOT = 0.75  # of the rows are there, where some are missing
SHIFT = 4.0  # between the components of a mixture likelihood


class Prior(NamedTuple):
    """A distribution by name; an argument that is a str is another global."""

    kind: str
    args: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(map(_short, self.args))})"


class Global(NamedTuple):
    """A global site: ``size`` 0 is a scalar; ``how`` says how its text is written."""

    name: str
    prior: Prior
    size: int
    how: str
    role: str  # "coef", "noise", "spread" of the locals, "chance", "correlation", "weight"


class Spec(NamedTuple):
    """A model. ``noise`` and ``spread`` are numbers, or "global"; ``noise`` may be "data"."""

    globals: tuple[Global, ...]
    likelihood: str
    noise: Any
    plate: str  # "row", "hospital", "visit"
    local: str | None  # distribution of the locals
    spread: Any
    sizes: tuple[int, ...]
    hospitals: tuple[int, ...]
    visits: int
    missing: bool
    power: float  # of the likelihood
    factor: tuple[str, float, float] | None
    noted: bool  # whether the linear predictor is a deterministic site

    def of(self, role: str) -> tuple[Global, ...]:
        return tuple(g for g in self.globals if g.role == role)

    @property
    def dim(self) -> int:
        return sum(unconstrained_size(g) for g in self.globals)

    def __str__(self) -> str:
        what = [f"{g.name} ~ {g.prior}{f' x {g.size}' if g.size else ''} ({g.how})" for g in
                self.globals]  # fmt: skip
        if self.local:
            spread = self.of("spread")[0].name if self.spread == "global" else self.spread
            of = "hospital" if self.plate == "hospital" else "row"
            what.append(f"b ~ {self.local}({_short(spread)}) for each {of}")
        noise = self.of("noise")[0].name if self.noise == "global" else self.noise
        what.append(f"y ~ {self.likelihood}(noise {_short(noise)})")
        if self.missing:
            what.append("some missing, masked")
        if self.power != 1:
            what.append(f"likelihood scaled by {self.power}")
        if self.factor:
            name, centre, width = self.factor
            what.append(f"factor of Normal({centre:g}, {width:g}) on {name}")
        if self.noted:
            what.append("deterministic predictor")
        where = f"silos of {', '.join(map(str, self.sizes))} rows"
        if self.plate == "hospital":
            where += f" in {', '.join(map(str, self.hospitals))} hospitals"
        if self.plate == "visit":
            where += f", {self.visits} visits each"
        return "; ".join([*what, where])


def _short(x: Any) -> str:
    return f"{x:g}" if isinstance(x, int | float) else str(x)


VECTORS = ("dirichlet", "ordered", "lkj_cholesky", "lkj")
SUPPORTS = {
    **dict.fromkeys(("normal", "student", "laplace", "logistic", "mixture"), "real"),
    **dict.fromkeys(
        ("half_normal", "log_normal", "gamma", "exponential", "half_cauchy", "inverse_gamma"),
        "positive",
    ),
    **dict.fromkeys(("truncated", "pareto"), "lower"),
    **dict.fromkeys(("beta", "uniform"), "interval"),
    "dirichlet": "simplex",
    "ordered": "ordered",
    **dict.fromkeys(("lkj_cholesky", "lkj"), "correlation"),
}


def unconstrained_size(g: Global) -> int:
    return max(g.size, 1) * (2 if SUPPORTS[g.prior.kind] in ("simplex", "ordered") else 1)


def width(g: Global) -> int:
    """How many numbers a global gives to the likelihood."""
    return max(g.size, 1) * {"simplex": 3, "ordered": 2}.get(SUPPORTS[g.prior.kind], 1)


# ------------------------------------------------------------------ random specs

FAR_AND_WIDE = (Prior("normal", (1000.0, 1e3)), Prior("normal", (0.0, 1e4)))
LOCATIONS = (
    Prior("normal", (0.0, 1.0)),
    Prior("normal", (0.0, 3.0)),
    Prior("normal", (2.0, 10.0)),
    Prior("student", (5.0, 0.0, 1.0)),
    Prior("student", (7.0, 1.0, 3.0)),
    Prior("laplace", (0.0, 1.0)),
    Prior("laplace", (1.0, 5.0)),
    Prior("logistic", (0.0, 2.0)),
    Prior("mixture", (4.0,)),
)
POSITIVE = (
    Prior("half_normal", (1.0,)),
    Prior("half_normal", (5.0,)),
    Prior("log_normal", (0.0, 1.0)),
    Prior("log_normal", (1.0, 0.3)),
    Prior("gamma", (2.0, 1.0)),
    Prior("gamma", (5.0, 3.0)),
    Prior("exponential", (1.0,)),
    Prior("half_cauchy", (1.0,)),
    Prior("inverse_gamma", (3.0, 2.0)),
)
LOWER = (Prior("truncated", (0.2, 2.0)), Prior("pareto", (0.3, 3.0)))
UNIT = (Prior("beta", (1.0, 1.0)), Prior("beta", (2.0, 5.0)), Prior("uniform", (0.0, 1.0)))
INTERVAL = (Prior("uniform", (-2.0, 3.0)), Prior("uniform", (0.0, 10.0)))
SIMPLEX = (Prior("dirichlet", (1.0, 1.0, 1.0)), Prior("dirichlet", (2.0, 1.0, 4.0)))
ORDERED = (Prior("ordered", (1.0,)), Prior("ordered", (3.0,)))
CORRELATIONS = (
    Prior("lkj_cholesky", (1.0,)),
    Prior("lkj_cholesky", (3.0,)),
    Prior("lkj", (2.0,)),
    Prior("uniform", (-1.0, 1.0)),
    Prior("normal", (0.0, 0.7)),
)
LOG_LINKS = ("poisson", "negative_binomial", "gamma", "weibull")
LINKS = ("bernoulli", *LOG_LINKS)
NEEDS_NOISE = ("gaussian", "laplace", "student", "censored", "mixture", "pair", "two_means")
NEEDS_SHAPE = ("negative_binomial", "gamma", "weibull")
LIKELIHOODS = (
    *("gaussian",) * 5,
    *("laplace", "student", "bernoulli", "poisson", "censored") * 2,
    *("negative_binomial", "gamma", "weibull", "mixture", "pair", "two_means"),
    *("proportion", "rate", "categorical"),
)
WITH_LOCALS = ("gaussian", "bernoulli", "poisson", "negative_binomial", "gamma", "weibull")


def random_spec(seed: int, number: int) -> Spec:
    """Model ``number`` of the grammar under ``seed``."""
    r = np.random.default_rng([seed, number])

    def pick(options: Any) -> Any:
        return options[int(r.integers(len(options)))]

    likelihood = pick(LIKELIHOODS)
    plate = pick(("row", "row", "row", "hospital", "visit"))
    if likelihood not in WITH_LOCALS:
        plate = "row"
    local = None
    if plate == "hospital" or (likelihood in WITH_LOCALS and r.random() < 0.5):
        local = pick(("normal",) * 6 + ("student", "laplace"))
    closed = likelihood == "gaussian" and local == "normal"
    room = 3 if local is None or closed else 2
    found: list[Global] = []

    def add(name: str, prior: Prior, size: int, role: str) -> None:
        how = pick(_ways(prior, size, role))
        found.append(Global(name, prior, size, how, role))

    def left() -> int:
        return room - sum(map(unconstrained_size, found))

    spread: Any = pick((0.5, 1.0, 3.0)) if local else 0.0
    if likelihood in ("proportion", "rate", "categorical"):
        priors = {"proportion": UNIT, "rate": POSITIVE + LOWER, "categorical": SIMPLEX}
        add("chance", pick(priors[likelihood]), 0, "chance")
    elif likelihood == "two_means":
        add("means", pick(ORDERED), 0, "coef")
        if r.random() < 0.5:
            add("weight", pick(UNIT), 0, "weight")
    else:
        if likelihood == "pair":
            add("rho", pick(CORRELATIONS), 0, "correlation")
        if local and r.random() < 0.6:
            add("tau", pick(POSITIVE + LOWER), 0, "spread")
            spread = "global"
    noise: Any = 1.0
    if likelihood in NEEDS_NOISE:
        noise = pick((0.5, 1.0, 5.0, "data", "global", "global"))
    elif likelihood in NEEDS_SHAPE:
        noise = pick((1.0, 3.0, "global"))
    if noise == "global" and left() < 2 - bool(found):
        noise = 1.0
    if noise == "global":
        add("sigma", pick(POSITIVE + LOWER + (Prior("normal", (0.0, 1.0)),)), 0, "noise")
    if likelihood not in ("proportion", "rate", "categorical", "two_means"):
        while left() > 0 and (not found or not any(g.role == "coef" for g in found)
                              or r.random() < 0.4):  # fmt: skip
            _add_coefficient(r, add, left(), likelihood, found)
    sizes = _sizes(r, plate)
    hospitals = tuple(int(r.integers(1, 3)) if n > 1 else 1 for n in sizes)
    latent = [g for g in found if g.prior.kind not in VECTORS and not g.size]
    factor = None
    if latent and r.random() < 0.1:
        factor = (pick(latent).name, 0.5, 2.0)
    return Spec(
        globals=tuple(found),
        likelihood=likelihood,
        noise=noise,
        plate=plate,
        local=local,
        spread=spread,
        sizes=sizes,
        hospitals=hospitals if plate == "hospital" else (),
        visits=int(r.integers(2, 5)) if plate == "visit" else 1,
        missing=bool(r.random() < 0.2) and likelihood != "censored",
        power=float(pick((0.5, 2.0))) if r.random() < 0.1 else 1.0,
        factor=factor,
        noted=bool(r.random() < 0.2),
    )


def _add_coefficient(r: Any, add: Callable, room: int, likelihood: str, found: list) -> None:
    name = f"beta{sum(g.role == 'coef' for g in found)}"

    def pick(options: Any) -> Any:
        return options[int(r.integers(len(options)))]

    kind = r.random()
    if kind < 0.12 and room >= 2:
        return add(name, pick(SIMPLEX + ORDERED), 0, "coef")
    if kind < 0.3:
        size = int(r.integers(0, room + 1))
        prior = pick(INTERVAL + UNIT + LOWER + POSITIVE)
        return add(name, prior, 0 if size == 1 else size, "coef")
    scales = ("positive", "lower")
    positive = [g.name for g in found if SUPPORTS[g.prior.kind] in scales and not g.size]
    if positive and r.random() < 0.2:
        prior = Prior("normal", (0.0, pick(positive)))
    elif likelihood not in LINKS and r.random() < 0.3:
        prior = pick(FAR_AND_WIDE)
    elif likelihood in LOG_LINKS:
        prior = pick(LOCATIONS[:2] + LOCATIONS[3:6])
    else:
        prior = pick(LOCATIONS)
    size = int(r.integers(0, room + 1))
    add(name, prior, 0 if size == 1 else size, "coef")
    return None


def _ways(prior: Prior, size: int, role: str) -> tuple[str, ...]:
    """The ways to write a site."""
    hierarchical = any(isinstance(a, str) for a in prior.args)
    if size:
        ways: tuple[str, ...] = ("expand", "to_event", "sample_shape", "plate", "scan")
        return (*ways, "loc_scale") if prior.kind in ("normal", "student") else ways
    if prior.kind == "normal" and role == "noise":
        return ("exp",)
    if prior.kind == "normal" and role == "correlation":
        return ("tanh",)
    if prior.kind in ("normal", "student", "laplace", "logistic"):
        extra = ("transform",) if not hierarchical and prior.kind == "normal" else ()
        return ("plain", "plain", "loc_scale", *extra)
    if prior.kind == "log_normal":
        return ("plain", "plain", "transform")
    return ("plain",)


def _sizes(r: Any, plate: str) -> tuple[int, ...]:
    most = 10 if plate == "visit" else 30
    n = np.unique(np.exp(r.uniform(0, np.log(most), size=8)).round().astype(int))
    chosen = r.permutation(n)[: int(r.integers(2, 5))]
    return tuple(map(int, chosen)) if len(chosen) > 1 else (int(n[0]), int(n[0]) + 5)


# ------------------------------------------------------------------ the text


def text(spec: Spec) -> Callable[..., None]:
    """The NumPyro model."""

    def model(y: Any, x: Any = None, s: Any = None, here: Any = None, cut: Any = None,
              h: Any = None, n_hospitals: int = 0) -> None:  # fmt: skip
        named: dict[str, Any] = {}
        for g in spec.globals:
            named[g.name] = _site(g, named)
        if spec.factor:
            name, centre, scale = spec.factor
            value = named[f"{name}_latent"] if f"{name}_latent" in named else named[name]
            numpyro.factor("belief", dist.Normal(centre, scale).log_prob(value))
        coefs = [jnp.atleast_1d(named[g.name]) for g in spec.of("coef")]
        tau = named[spec.of("spread")[0].name] if spec.spread == "global" else spec.spread
        if spec.plate == "hospital":
            with nf.silo_plate("hospital", n_hospitals):
                b = numpyro.sample("b", _local(spec.local, tau))
        visits = spec.plate == "visit"
        with nf.silo_plate("row", y.shape[0], dim=-2 if visits else -1):
            if spec.local and spec.plate != "hospital":
                b = numpyro.sample("b", _local(spec.local, tau))

            def rows() -> None:
                eta = x @ jnp.concatenate(coefs) if coefs and x is not None else 0.0
                if spec.local:
                    eta = eta + (b[h] if spec.plate == "hospital" else b)
                if spec.noted:
                    eta = numpyro.deterministic("predictor", eta)
                with (
                    numpyro.handlers.scale(scale=spec.power),
                    numpyro.handlers.mask(mask=True if here is None else here),
                ):
                    _observe(spec, named, eta, y, s, cut, x)

            if visits:
                with numpyro.plate("visit", y.shape[1], dim=-1):
                    rows()
            else:
                rows()

    return model


def _distribution(prior: Prior, named: dict[str, Any]) -> dist.Distribution:
    a = [named[x] if isinstance(x, str) else x for x in prior.args]
    if prior.kind == "mixture":
        centres = jnp.array([0.0, a[0]])
        return dist.MixtureSameFamily(
            dist.Categorical(probs=jnp.full(2, 0.5)), dist.Normal(centres, 1.0)
        )
    if prior.kind == "dirichlet":
        return dist.Dirichlet(jnp.array(a))
    if prior.kind == "ordered":
        base = dist.Normal(0.0, a[0]).expand([2]).to_event(1)
        return dist.TransformedDistribution(base, transforms.OrderedTransform())
    if prior.kind == "truncated":
        return dist.TruncatedNormal(0.0, a[1], low=a[0])
    return {
        "normal": dist.Normal,
        "student": dist.StudentT,
        "laplace": dist.Laplace,
        "logistic": dist.Logistic,
        "half_normal": dist.HalfNormal,
        "log_normal": dist.LogNormal,
        "gamma": dist.Gamma,
        "exponential": dist.Exponential,
        "half_cauchy": dist.HalfCauchy,
        "inverse_gamma": dist.InverseGamma,
        "pareto": dist.Pareto,
        "beta": dist.Beta,
        "uniform": dist.Uniform,
        "lkj_cholesky": lambda c: dist.LKJCholesky(2, c),
        "lkj": lambda c: dist.LKJ(2, c),
    }[prior.kind](*a)


def _site(g: Global, named: dict[str, Any]) -> Any:
    """Emit a global site as its ``how`` says; its value."""
    d = _distribution(g.prior, named)
    if g.how in ("exp", "tanh"):
        latent = numpyro.sample(f"{g.name}_latent", d)
        named[f"{g.name}_latent"] = latent
        return numpyro.deterministic(g.name, {"exp": jnp.exp, "tanh": jnp.tanh}[g.how](latent))
    if g.how == "loc_scale":
        d = d.expand([g.size]) if g.size else d
        shape = ("df",) if g.prior.kind == "student" else ()
        with numpyro.handlers.reparam(config={g.name: LocScaleReparam(0.0, shape)}):
            return numpyro.sample(g.name, d)
    if g.how == "transform":
        if g.prior.kind == "normal":
            shift = transforms.AffineTransform(*g.prior.args)
            d = dist.TransformedDistribution(dist.Normal(0.0, 1.0), shift)
        with numpyro.handlers.reparam(config={g.name: TransformReparam()}):
            return numpyro.sample(g.name, d)
    if g.how == "expand":
        return numpyro.sample(g.name, d.expand([g.size]))
    if g.how == "to_event":
        return numpyro.sample(g.name, d.expand([g.size]).to_event(1))
    if g.how == "sample_shape":
        return numpyro.sample(g.name, d, sample_shape=(g.size,))
    if g.how == "plate":
        with numpyro.plate(f"{g.name}_plate", g.size):
            return numpyro.sample(g.name, d)
    if g.how == "scan":
        return scan(lambda c, _: (c, numpyro.sample(g.name, d)), None, None, length=g.size)[1]
    value = numpyro.sample(g.name, d)
    if g.prior.kind == "lkj_cholesky":
        return value[1, 0]
    return value[0, 1] if g.prior.kind == "lkj" else value


def _local(kind: str | None, tau: Any) -> dist.Distribution:
    if kind == "student":
        return dist.StudentT(5.0, 0.0, tau)
    return dist.Laplace(0.0, tau) if kind == "laplace" else dist.Normal(0.0, tau)


def _observe(spec: Spec, named: dict, eta: Any, y: Any, s: Any, cut: Any, x: Any) -> None:
    noise: Any = spec.noise
    if noise == "global":
        noise = named[spec.of("noise")[0].name]
    elif noise == "data":
        noise = s
    if spec.likelihood == "censored":
        with numpyro.handlers.mask(mask=~cut):
            numpyro.sample("y", dist.Normal(eta, noise), obs=y)
        numpyro.factor("above", jnp.where(cut, jax.scipy.stats.norm.logsf(y, eta, noise), 0.0))
        return
    if spec.likelihood == "weibull":
        scale = jnp.exp(eta)
        with numpyro.handlers.mask(mask=~cut):
            numpyro.sample("y", dist.Weibull(scale, noise), obs=y)
        numpyro.factor("beyond", jnp.where(cut, -((y / scale) ** noise), 0.0))
        return
    if spec.likelihood in ("mixture", "two_means"):
        if spec.likelihood == "mixture":
            weight, places = 0.7, jnp.stack([eta, eta + SHIFT], -1)
        else:
            weight = named["weight"] if spec.of("weight") else 0.5
            places = named["means"]
        parts = dist.Categorical(probs=jnp.stack([jnp.asarray(weight), 1 - jnp.asarray(weight)]))
        spread = jnp.asarray(noise)
        spread = spread[..., None] if spread.ndim else spread
        numpyro.sample("y", dist.MixtureSameFamily(parts, dist.Normal(places, spread)), obs=y)
        return
    if spec.likelihood == "pair":
        rho = named["rho"]
        numpyro.sample("y", dist.Normal(eta, noise), obs=y[:, 0])
        rest = dist.Normal(eta + rho * (y[:, 0] - eta), noise * jnp.sqrt(1 - rho**2))
        numpyro.sample("y_second", rest, obs=y[:, 1])
        return
    of = {
        "gaussian": lambda: dist.Normal(eta, noise),
        "laplace": lambda: dist.Laplace(eta, noise),
        "student": lambda: dist.StudentT(4.0, eta, noise),
        "bernoulli": lambda: dist.Bernoulli(logits=eta),
        "poisson": lambda: dist.Poisson(jnp.exp(eta)),
        "negative_binomial": lambda: dist.NegativeBinomial2(jnp.exp(eta), noise),
        "gamma": lambda: dist.Gamma(noise, noise * jnp.exp(-eta)),
        "proportion": lambda: dist.Bernoulli(probs=named["chance"]),
        "rate": lambda: dist.Poisson(named["chance"] * x[:, 0]),
        "categorical": lambda: dist.Categorical(probs=named["chance"]),
    }
    numpyro.sample("y", of[spec.likelihood](), obs=y)


# ------------------------------------------------------------------ the data


def columns(spec: Spec) -> int:
    return sum(map(width, spec.of("coef")))


def random_silos(spec: Spec, r: np.random.Generator, kind: str) -> tuple[list[dict], np.ndarray]:
    """What the silos hold, of one kind of :data:`DATA_SETS`, and the globals that made it."""
    truth = _truth(spec, r, kind)
    held = []
    for j, n in enumerate(spec.sizes):
        rows = n if spec.plate != "visit" else (n, spec.visits)
        held.append(_silo(spec, r, kind, truth, j, rows))
    return held, np.concatenate([np.atleast_1d(truth[g.name]) for g in spec.globals])


def _truth(spec: Spec, r: np.random.Generator, kind: str) -> dict[str, np.ndarray]:
    named: dict[str, Any] = {}
    for g in spec.globals:
        named[g.name] = _true_value(g, named, r, kind)
        if spec.likelihood in LINKS and g.role == "coef":
            named[g.name] = np.clip(named[g.name], -4, 4)
    return named


def _true_value(g: Global, named: dict[str, Any], r: np.random.Generator, kind: str) -> Any:
    a = [named[x] if isinstance(x, str) else x for x in g.prior.args]
    n = g.size or None
    far = kind == "far"
    if SUPPORTS[g.prior.kind] == "real":
        place, scale = {
            "mixture": (r.choice([0.0, a[0]]), 1.0),
            "student": (a[1], a[2]) if len(a) == 3 else (0, 1),
        }.get(g.prior.kind, (a[0], a[-1]))
        away = r.uniform(2, 6) if scale < 100 else r.uniform(1, 2)
        z = r.choice([-1, 1], size=n) * away if far else r.normal(size=n)
        value = place + scale * z
        if g.how == "exp":
            return np.exp(np.clip(value, -3, 3))
        return np.tanh(np.clip(value, -2.5, 2.5)) if g.how == "tanh" else value
    if SUPPORTS[g.prior.kind] in ("positive", "lower"):
        low = a[0] if SUPPORTS[g.prior.kind] == "lower" else 0.0
        return low + np.exp(r.normal(size=n) + (r.choice([-2.0, 2.0]) if far else 0.0))
    if SUPPORTS[g.prior.kind] == "interval":
        u = r.beta(0.3, 0.3, size=n) if far else r.uniform(size=n)
        return a[0] + (a[1] - a[0]) * np.clip(u, 0.02, 0.98) if g.prior.kind == "uniform" else u
    if g.prior.kind == "dirichlet":
        return r.dirichlet([0.3] * 3 if far else a)
    if g.prior.kind == "ordered":
        z = a[0] * r.normal(size=2) * (4 if far else 1)
        return np.array([z[0], z[0] + np.exp(min(z[1], 4.0))])
    return r.uniform(0.8, 0.99) * r.choice([-1, 1]) if far else r.uniform(-0.9, 0.9)


def _silo(spec: Spec, r: np.random.Generator, kind: str, truth: dict, j: int, rows: Any) -> dict:
    data: dict[str, Any] = {}
    flat, wide = kind == "flat", kind == "wide"
    shape = rows if isinstance(rows, tuple) else (rows,)
    eta: Any = np.zeros(shape)
    if columns(spec) and spec.likelihood != "two_means":
        x = np.concatenate([np.ones((*shape, 1)), r.normal(size=(*shape, columns(spec) - 1))], -1)
        x *= 0.01 if flat else 3.0 if wide and spec.likelihood not in LINKS else 1.0
        data["x"] = x
        eta = x @ np.concatenate([np.atleast_1d(truth[g.name]) for g in spec.of("coef")])
    if spec.likelihood == "rate":
        data["x"] = r.uniform(0.5, 2, size=(*shape, 1)) * (0.02 if flat else 1.0)
        eta = data["x"][:, 0] * float(truth["chance"])
    spread = truth[spec.of("spread")[0].name] if spec.spread == "global" else spec.spread
    if spec.plate == "hospital":
        n = spec.hospitals[j]
        h = np.sort(np.arange(shape[0]) % n)
        data |= dict(h=h.astype(np.int32), n_hospitals=n)
        eta = eta + (spread * r.normal(size=n))[h]
    elif spec.local:
        eta = eta + spread * r.normal(size=(shape[0], *[1] * (len(shape) - 1)))
    if spec.likelihood in LINKS:
        eta = np.clip(eta, -6, 6)
    noise: Any = spec.noise
    if noise == "data":
        noise = data["s"] = np.exp(r.normal(size=shape) * 0.5) * (30.0 if flat else 1.0)
    elif noise == "global":
        noise = float(truth[spec.of("noise")[0].name])
    data |= _outcomes(spec, r, eta, noise, truth, wide, shape)
    if spec.missing:
        here = r.random(shape) < (0.3 if flat else HERE_OR_NOT)
        data["here"] = here
        lone = data["y"][..., 0] if spec.likelihood == "pair" else data["y"]
        empty = ~here if lone is data["y"] else ~here[..., None]
        data["y"] = np.where(empty, np.asarray(1, data["y"].dtype), data["y"])
    return {k: v.astype(np.float32) if _float(v) else v for k, v in data.items()}


def _float(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind == "f"


def _outcomes(
    spec: Spec, r: np.random.Generator, eta: Any, noise: Any, truth: dict, wide: bool, shape: tuple
) -> dict[str, np.ndarray]:
    """``y``, and what goes with it; ``wide`` has more noise than the model says."""
    excess = 5.0 if wide else 1.0
    kind = spec.likelihood
    if kind in ("gaussian", "laplace", "student", "censored", "mixture"):
        draws = {"laplace": r.laplace, "student": lambda size: r.standard_t(4, size=size)}
        y = eta + excess * noise * draws.get(kind, r.normal)(size=shape)
        if kind == "mixture":
            y = y + SHIFT * (r.random(shape) < 0.3)
        if kind == "censored":
            limit = eta + noise * (r.random(shape) - 0.3)
            return dict(y=np.minimum(y, limit), cut=y > limit)
        return dict(y=y)
    if kind == "two_means":
        second = r.random(shape) < (1 - truth.get("weight", 0.5))
        centre = np.where(second, truth["means"][1], truth["means"][0])
        return dict(y=centre + excess * noise * r.normal(size=shape))
    if kind == "pair":
        rho, e = truth["rho"], r.normal(size=(*shape, 2))
        e[..., 1] = rho * e[..., 0] + np.sqrt(1 - rho**2) * e[..., 1]
        return dict(y=np.asarray(eta)[..., None] + excess * np.asarray(noise)[..., None] * e)
    if kind == "bernoulli":
        chance = 1 / (1 + np.exp(-eta))
        return dict(y=r.binomial(1, 0.5 + (chance - 0.5) / excess).astype(np.float32))
    if kind in ("poisson", "negative_binomial"):
        shape_ = 3 / excess if kind == "poisson" else np.asarray(noise) / excess
        rate = np.exp(eta)
        if kind == "negative_binomial" or wide:
            rate = rate * r.gamma(shape_, size=shape) / shape_
        return dict(y=r.poisson(rate.clip(0, 1e5)).astype(np.float32))
    if kind == "gamma":
        a = np.asarray(noise) / excess
        return dict(y=np.maximum(np.exp(eta) * r.gamma(a, size=shape) / a, 1e-4))
    if kind == "weibull":
        y = np.maximum(np.exp(eta) * r.weibull(noise, size=shape), 1e-3)
        limit = np.exp(eta) * r.uniform(0.3, 3, size=shape)
        return dict(y=np.minimum(y, limit), cut=y > limit)
    if kind == "categorical":
        return dict(y=r.choice(3, size=shape, p=truth["chance"]).astype(np.int32))
    if kind == "rate":
        return dict(y=r.poisson((excess * eta).clip(0, 1e4)).astype(np.float32))
    return dict(y=r.binomial(1, float(truth["chance"]), size=shape).astype(np.float32))
