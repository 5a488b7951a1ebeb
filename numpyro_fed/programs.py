"""How programs are compiled that run once for a set of data."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property, partial, wraps
from typing import Any, TypeVar, cast

import jax

from numpyro_fed.precision import double_precision

Method = TypeVar("Method", bound=Callable[..., Any])
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


def compiled_method(
    jit: Callable[..., Callable[..., Any]] = jax.jit, **options: Any
) -> Callable[[Method], Method]:
    """Return a decorator of methods that are compiled once for each object.

    ``options`` are those of ``jit``, for the arguments after ``self``.
    """

    def decorate(method: Method) -> Method:
        def of(instance: Any) -> Callable[..., Any]:
            return jit(wraps(method)(partial(method, instance)), **options)

        found = cached_property(of)
        found.__doc__ = method.__doc__
        return cast(Method, found)

    return decorate


def jit_double(f: Callable[..., Any]) -> Callable[..., Any]:
    """``jax.jit`` in double precision, of which programs are kept and traces are not."""
    programs: dict[Any, Callable[..., Any]] = {}

    def call(*args: Any) -> Any:
        with double_precision():
            leaves, tree = jax.tree.flatten(args)
            shapes = tree, *(jax.typeof(a) for a in leaves)
            if shapes not in programs:
                lowered = jax.jit(lambda *a: f(*a)).lower(*args)
                programs[shapes] = lowered.compile(quick_options())
            return programs[shapes](*args)

    return call


@cache
def quick_options() -> dict[str, Any]:
    """Those of XLA's options for programs that are soon compiled that this version has."""
    return known_options(QUICK)


def known_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options of the compiler that the installed XLA knows: it refuses to compile with others.

    From version to version options come and go, where what they chose is the only way.
    """
    try:
        jax.jit(lambda: 0, compiler_options=options).lower().compile()
    except jax.errors.JaxRuntimeError:
        if len(options) == 1:
            return {}
        each = (known_options({name: value}) for name, value in options.items())
        return {name: value for found in each for name, value in found.items()}
    return options
