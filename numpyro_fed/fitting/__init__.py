"""From the mode to the posterior: ``nf.fit``, and what is read from files."""
