"""Partitioned variational inference: factors in one exponential family, a visit, the server."""
