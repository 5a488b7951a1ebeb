"""Vertical models: each client holds some columns of every row."""
