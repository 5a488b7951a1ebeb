"""BayesADMM: the alternating direction method of multipliers for posteriors."""
