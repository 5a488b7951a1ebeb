"""How programs are compiled that run once for a set of data."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import jax

QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}


def jit_once(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """``jax.jit`` for what runs once: compiled in a third of the time, and slower after it."""

    @cache
    def compiled() -> Callable[..., Any]:
        return jax.jit(f, compiler_options=quick_options(), **options)

    @wraps(f)
    def call(*args: Any) -> Any:
        within = any(isinstance(a, jax.core.Tracer) for a in jax.tree.leaves(args))
        return f(*args) if within else compiled()(*args)  # options are for whole programs

    return call


def jit_double(f: Callable[..., Any]) -> Callable[..., Any]:
    """``jax.jit`` in double precision, of which programs are kept and traces are not.

    As long as a trace lives, JAX takes the NumPy arrays that it closed over for what they are in
    its precision, and a trace in the other one may fail of that. Where one does, in a model that
    reads arrays from outside and was traced before, traces are dropped and it is tried again; and
    where somebody still holds one, in single precision, with a warning.
    """
    programs: dict[Any, tuple[Callable[..., Any], bool]] = {}

    def compiled(args: tuple[Any, ...], double: bool = True) -> Any:
        """None where it cannot be traced; an error would keep its traces alive."""
        try:
            with jax.enable_x64(double):
                return jax.jit(lambda *a: f(*a)).lower(*args).compile(quick_options()), double
        except TypeError:
            return None

    def forget() -> None:
        jax.clear_caches()
        gc.collect()  # traces may hold themselves in cycles

    def anyhow(args: tuple[Any, ...]) -> tuple[Callable[..., Any], bool]:
        if (found := compiled(args)) is not None:
            return found
        forget()
        if (found := compiled(args)) is not None:
            return found
        forget()
        if (found := compiled(args, double=False)) is None:
            with jax.enable_x64(True):
                return jax.jit(f).lower(*args).compile(), True  # whatever is wrong with it
        warnings.warn(
            "the model reads NumPy arrays from outside, of which JAX still holds single precision "
            "copies, so that priors are looked at in single precision. In a new process they are "
            "looked at in double precision.",
            stacklevel=4,
        )
        return found

    def call(*args: Any) -> Any:
        with jax.enable_x64(True):
            leaves, tree = jax.tree.flatten(args)
            shapes = tree, *(jax.typeof(a) for a in leaves)
        if shapes not in programs:
            programs[shapes] = anyhow(args)
        program, double = programs[shapes]
        with jax.enable_x64(double):
            return program(*args)

    return call


@cache
def quick_options() -> dict[str, Any]:
    """XLA's options for programs that are soon compiled, if this version has them all."""
    try:
        jax.jit(lambda: 0, compiler_options=QUICK).lower().compile()
    except jax.errors.JaxRuntimeError:
        return {}
    return QUICK
