"""Ways to compile programs that run once or a few times for a set of data."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property, partial, wraps
from typing import Any, ParamSpec, TypeVar, cast

import jax

from numpyro_fed.precision import double_precision

Args = ParamSpec("Args")
Result = TypeVar("Result")
Method = TypeVar("Method", bound=Callable[..., Any])
StaticArgs = int | tuple[int, ...] | None  # positions of the arguments that are no arrays
# XLA's options for programs that run once: compiled in a third of the time, and slower to run. The
# CPU's fusion emitters have a compile time of their own. For the rounds of a run they do not pay:
# without emitters rounds take 1.1 to 1.4 times as long (docs/results/compilation.md).
QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}


def jit_once(
    f: Callable[Args, Result], static_argnums: StaticArgs = None
) -> Callable[Args, Result]:
    """Return ``jax.jit(f)``, compiled in a third of the time and slower to run.

    It is for functions that run once for a set of data.
    """

    @cache
    def compiled() -> Callable[Args, Result]:
        return jax.jit(f, static_argnums=static_argnums, compiler_options=quick_options())

    @wraps(f)
    def call(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        leaves = jax.tree.leaves((args, kwargs))
        traced = any(isinstance(a, jax.core.Tracer) for a in leaves)
        # Compiler options hold for whole programs: within another trace the function is inlined.
        return f(*args, **kwargs) if traced else compiled()(*args, **kwargs)

    return call


def compiled_method(
    jit: Callable[..., Callable[..., Any]] = jax.jit, static_argnums: StaticArgs = None
) -> Callable[[Method], Method]:
    """Return a decorator that compiles a method once for each object.

    ``static_argnums`` counts the arguments after ``self``.
    """

    def decorate(method: Method) -> Method:
        # The program lives on its object. A jit of the function, with ``self`` as a static
        # argument, would keep every object alive in its cache.
        def compile_for(instance: object) -> Callable[..., Any]:
            return jit(wraps(method)(partial(method, instance)), static_argnums=static_argnums)

        cached = cached_property(compile_for)
        cached.__doc__ = method.__doc__
        return cast(Method, cached)

    return decorate


def jit_double(f: Callable[..., Result]) -> Callable[..., Result]:
    """Return ``f`` compiled in double precision; programs are kept by shapes, traces are not."""
    programs: dict[tuple[object, ...], Callable[..., Result]] = {}

    def call(*args: object) -> Result:
        with double_precision():
            leaves, tree = jax.tree.flatten(args)
            shapes = tree, *(jax.typeof(a) for a in leaves)
            if shapes not in programs:
                # A new lambda each time, so that JAX keeps no trace: a trace that lives keeps
                # copies of the arrays that a model closes over, in its own precision.
                lowered = jax.jit(lambda *a: f(*a)).lower(*args)
                programs[shapes] = lowered.compile(quick_options())
            return programs[shapes](*args)

    return call


@cache
def quick_options() -> dict[str, Any]:
    """Return those options of :data:`QUICK` that the installed XLA knows."""
    return known_options(QUICK)


def known_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the compiler options that the installed XLA knows; with others it does not compile.

    From version to version options disappear when their choice has become the only way.
    """
    # An empty program is compiled to find out: XLA has no list of its options.
    try:
        jax.jit(lambda: 0, compiler_options=options).lower().compile()
    except jax.errors.JaxRuntimeError:
        if len(options) == 1:
            return {}
        single = (known_options({name: value}) for name, value in options.items())
        return {name: value for cached in single for name, value in cached.items()}
    return options
