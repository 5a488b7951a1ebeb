"""What a model's text, the user's function of NumPyro, says: sites, traces, log densities."""
