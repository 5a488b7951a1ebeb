"""Substitutes for priors that tie all silos together: closed forms, and learnt SIGMA priors."""
