"""FedLap and FedLap-Cov: partitioned inference by Laplace's method at each silo."""
