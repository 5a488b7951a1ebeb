"""Priors in the place of those that tie all silos together: closed forms, and learnt ones."""
