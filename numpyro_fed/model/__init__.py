"""A model's text and its data: silo plates, sites, log densities by silo, facts and the plan.

No other folder handles NumPyro's messages. It imports ``errors``, ``trees`` and a few other small
modules only; every other folder may import it.
"""
