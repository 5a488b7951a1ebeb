"""What a model's text says: plates, sites, the split into silos, and what silos hold.

The only place that knows NumPyro's messages. Imports ``errors`` and ``trees`` alone; everything
else may import it.
"""
