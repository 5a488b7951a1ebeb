"""What a model's text says: plates, sites, one trace, log densities, what rows read."""
