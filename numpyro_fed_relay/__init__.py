"""What the NVFLARE of a hospital or of the server runs for numpyro_fed: it carries bytes, no more.

It imports nothing but the standard library and NVFLARE, so that its processes start without JAX,
and whoever allows it can read all of it.
"""
