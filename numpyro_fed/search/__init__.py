"""Modes: a silo's own, that of all silos, and rows' latents integrated out."""
