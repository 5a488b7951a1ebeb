"""Small things that all other folders use: errors, files, pytrees, precision, programs."""
