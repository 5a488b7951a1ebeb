"""Runtimes drive any algorithm and know none of them."""
