"""The distributions of outcomes, and of missing covariates, that a formula can have, as text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from numpyro_fed.basics.errors import ModelError, guessed


@dataclass(frozen=True)
class OutcomeFamily:
    """A distribution of outcomes given the linear predictor ``eta``, in its usual link.

    ``link``: How the mean, or the median, is computed of ``eta``: the identity, log or logit.
    ``likelihood``: The distribution, as text.
    ``mean``: The mean of an outcome, as text; empty if it has none to average.
    ``parameters``: Further parameters and their priors, as text, in which ``{s}`` stands for the
        scale of the outcomes.
    ``needs``: What must stand beside the response.
    """

    link: Literal["identity", "log", "logit"]
    likelihood: str
    mean: str
    parameters: tuple[tuple[str, str], ...] = ()
    needs: tuple[str, ...] = ()
    allows: tuple[str, ...] = ()
    ordinal: bool = False


WEIBULL = "dist.Weibull(jnp.exp(eta - jax.scipy.special.gammaln(1 + 1 / shape)), shape)"
FAMILIES = {
    "gaussian": OutcomeFamily(
        "identity", "dist.Normal(eta, sigma)", "eta", (("sigma", "dist.HalfNormal({s})"),)
    ),
    "student": OutcomeFamily(
        "identity",
        "dist.StudentT(nu, eta, sigma)",
        "eta",
        (("sigma", "dist.HalfNormal({s})"), ("nu", "dist.Gamma(2.0, 0.1)")),
    ),
    "bernoulli": OutcomeFamily("logit", "dist.Bernoulli(logits=eta)", "jax.nn.sigmoid(eta)"),
    "binomial": OutcomeFamily(
        "logit", "dist.Binomial(trials, logits=eta)", "jax.nn.sigmoid(eta)", needs=("trials",)
    ),
    "poisson": OutcomeFamily("log", "dist.Poisson(jnp.exp(eta))", "jnp.exp(eta)"),
    "negbinomial": OutcomeFamily(
        "log",
        "dist.NegativeBinomial2(jnp.exp(eta), shape)",
        "jnp.exp(eta)",
        (("shape", "dist.InverseGamma(0.4, 0.3)"),),
    ),
    "zero_inflated_poisson": OutcomeFamily(
        "log",
        "dist.ZeroInflatedPoisson(zi, jnp.exp(eta))",
        "(1 - zi) * jnp.exp(eta)",
        (("zi", "dist.Beta(1.0, 1.0)"),),
    ),
    "zero_inflated_negbinomial": OutcomeFamily(
        "log",
        "dist.ZeroInflatedNegativeBinomial2(jnp.exp(eta), shape, gate=zi)",
        "(1 - zi) * jnp.exp(eta)",
        (("shape", "dist.InverseGamma(0.4, 0.3)"), ("zi", "dist.Beta(1.0, 1.0)")),
    ),
    "gamma": OutcomeFamily(
        "log",
        "dist.Gamma(shape, shape * jnp.exp(-eta))",
        "jnp.exp(eta)",
        (("shape", "dist.HalfNormal(20.0)"),),
    ),
    "lognormal": OutcomeFamily(
        "log",
        "dist.LogNormal(eta, sigma)",
        "jnp.exp(eta + sigma**2 / 2)",
        (("sigma", "dist.HalfNormal({s})"),),
        allows=("cens",),
    ),
    "beta": OutcomeFamily(
        "logit",
        "dist.BetaProportion(jax.nn.sigmoid(eta), phi)",
        "jax.nn.sigmoid(eta)",
        (("phi", "dist.Gamma(1.0, 0.02)"),),
    ),
    "exponential": OutcomeFamily(
        "log", "dist.Exponential(jnp.exp(-eta))", "jnp.exp(eta)", allows=("cens",)
    ),
    "weibull": OutcomeFamily(
        "log", WEIBULL, "jnp.exp(eta)", (("shape", "dist.LogNormal(0.0, 1.0)"),), allows=("cens",)
    ),
    "cumulative": OutcomeFamily("logit", "dist.OrderedLogistic(eta, cutpoints)", "", ordinal=True),
}

# Distributions of columns of which rows may lack the value, about a line ``{eta}``: a distribution
# with its scale ``{sigma}``, if it has one.
COVARIATES = {
    "gaussian": "dist.Normal({eta}, {sigma})",
    "lognormal": "dist.LogNormal({eta}, {sigma})",
    "bernoulli": "dist.Bernoulli(logits={eta})",
}


def family_of(name: str, additions: dict[str, str]) -> OutcomeFamily:
    """Return a family by its name; raise an error for another, or for what it lacks."""
    if name not in FAMILIES:
        raise ModelError(
            f"family={name!r}: known are {sorted(FAMILIES)}.{guessed(str(name), FAMILIES)}"
        )
    family = FAMILIES[name]
    for word in family.needs:
        if word not in additions:
            raise ModelError(f"family '{name}' needs '{word}' beside the response: y | {word}(n).")
    for word in ("trials", "cens"):
        if word in additions and word not in (*family.needs, *family.allows):
            raise ModelError(f"family '{name}' has no '{word}'.")
    return family
