"""Results of made-up draws, for what is computed of draws alone."""

from types import SimpleNamespace

import jax
import numpy as np

from numpyro_fed.posterior.corrected import Corrected
from numpyro_fed.reference.nuts_result import NutsResult
from numpyro_fed.weigh.element_errors import ElementErrors
from numpyro_fed.weigh.integration import Integration

KEY = jax.random.key(0)


def nuts_of(**sites):
    """A NUTS result of made-up draws (chains, n, ...)."""
    return NutsResult(sites, 0, dict)


def corrected_of(weights, pareto_k=0.1, **sites):
    """A correction of made-up weighted draws."""
    result = SimpleNamespace(shared=SimpleNamespace(theta={}))
    posterior = SimpleNamespace(constrain_globals=lambda theta, z_G: sites)
    result._fit = SimpleNamespace(double=False)
    return Corrected(
        log_evidence=0.0,
        ess=len(weights),
        pareto_k=pareto_k,
        weights=np.asarray(weights),
        result=result,
        _key=KEY,
        z_G=np.zeros((len(weights), 1)),
        _moments=None,
        _rounding=None,
        errors=ElementErrors.of(sites, sites, np.asarray(weights)),
        _sampler=posterior,
        integration=Integration({}),
        log_weights=None,
    )
