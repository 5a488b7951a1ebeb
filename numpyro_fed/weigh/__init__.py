"""Draws and their weights: proposals, log likelihoods at draws, matching, particles."""
