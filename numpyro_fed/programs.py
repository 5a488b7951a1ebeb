"""How programs are compiled that run once for a set of data."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property, partial, wraps
from typing import Any, ParamSpec, TypeVar, cast

import jax

from numpyro_fed.precision import double_precision

Args = ParamSpec("Args")
Result = TypeVar("Result")
Method = TypeVar("Method", bound=Callable[..., Any])
Numbers = int | tuple[int, ...] | None  # of the arguments that are no arrays
QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}


def jit_once(f: Callable[Args, Result], static_argnums: Numbers = None) -> Callable[Args, Result]:
    """Compile what runs once, as ``jax.jit`` does, in a third of the time; it is slower after."""

    @cache
    def compiled() -> Callable[Args, Result]:
        return jax.jit(f, static_argnums=static_argnums, compiler_options=quick_options())

    @wraps(f)
    def call(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        leaves = jax.tree.leaves((args, kwargs))
        within = any(isinstance(a, jax.core.Tracer) for a in leaves)
        return f(*args, **kwargs) if within else compiled()(*args, **kwargs)  # whole programs only

    return call


def compiled_method(
    jit: Callable[..., Callable[..., Any]] = jax.jit, static_argnums: Numbers = None
) -> Callable[[Method], Method]:
    """Return a decorator of methods that are compiled once for each object.

    ``static_argnums`` counts the arguments after ``self``.
    """

    def decorate(method: Method) -> Method:
        def of(instance: object) -> Callable[..., Any]:
            return jit(wraps(method)(partial(method, instance)), static_argnums=static_argnums)

        found = cached_property(of)
        found.__doc__ = method.__doc__
        return cast(Method, found)

    return decorate


def jit_double(f: Callable[..., Result]) -> Callable[..., Result]:
    """Compile in double precision, as ``jax.jit`` does; programs are kept and traces are not."""
    programs: dict[tuple[object, ...], Callable[..., Result]] = {}

    def call(*args: object) -> Result:
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
    """Return the options that make XLA compile soon, as far as the installed version has them."""
    return known_options(QUICK)


def known_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the compiler's options that the installed XLA knows: with others it does not compile.

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
