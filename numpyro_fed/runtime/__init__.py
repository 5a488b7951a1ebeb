"""Runtimes: they drive any algorithm and know none.

May import ``model.data`` and ``algorithms.base``; imported by methods and results alone.
"""
