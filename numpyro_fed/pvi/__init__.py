"""Partitioned variational inference, its family, and local optimisers."""
