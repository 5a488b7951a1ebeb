"""Small things that all rooms use: errors, files, pytrees, precision, programs."""
