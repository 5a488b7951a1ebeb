"""Linear algebra, Gaussians, exponential families, divergences, losses, barycenters."""
