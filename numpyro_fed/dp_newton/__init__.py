"""Newton's method with noise, under differential privacy."""
