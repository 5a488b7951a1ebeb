"""Integrals over silos' own latents: by Laplace's method, and by Gauss-Hermite quadrature."""
