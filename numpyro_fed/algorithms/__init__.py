"""Federated algorithms: one file each, all of the form in ``base``."""
