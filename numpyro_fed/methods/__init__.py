"""What all methods share: the run over silos, its start, and what is asked of data before."""
