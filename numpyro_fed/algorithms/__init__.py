"""Federated algorithms as pure functions: one file or folder each, :mod:`base` for their type.

May import ``model``, ``expfam``, ``guides``, ``local``, ``objectives``, ``losses`` and
``divergences``; never a runtime, a method or a result.
"""
