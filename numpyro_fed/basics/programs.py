"""The precision in which a part of a process computes, and ways to compile its programs.

A part of a process of single precision may compute in double. Programs that run once or a few times
for a set of data are compiled in less time.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, cached_property, partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from numpyro_fed.basics.files import private_folder
from numpyro_fed.basics.trees import Tree, where

Args = ParamSpec("Args")
Result = TypeVar("Result")
Method = TypeVar("Method", bound=Callable[..., Any])
Carry = TypeVar("Carry")
T = TypeVar("T")
Object = TypeVar("Object", bound="HasPrecision")
StaticArgs = int | tuple[int, ...] | None  # positions of the arguments that are no arrays
# The versions of JAX, from the first on and before the second, of which GPUs add slowly by index.
SLOW_ADDITIONS = (0, 10, 2), (0, 11, 1)
# XLA's options for programs that run once: compiled in a third of the time, and slower to run. The
# CPU's fusion emitters have a compile time of their own. For the rounds of a run they do not pay:
# without emitters rounds take 1.1 to 1.4 times as long.

QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}


@contextmanager
def double_precision() -> Iterator[None]:
    """Enter double precision, in which models may be traced that were traced in single before."""
    # Models read NumPy arrays from outside (an index of groups, a basis). JAX keeps its first copy
    # of such an array and uses it in every later trace, whatever the precision is by then: without
    # the separate copies a model could be traced in one precision only.
    copies_by_precision()
    with jax.enable_x64(True):
        yield


@cache
def copies_by_precision() -> bool:
    """Make JAX keep its copies of NumPy arrays by precision; return whether this version can."""
    try:
        from jax._src.dtypes import canonicalize_dtype, register_canonicalize_value_handler
        from jax._src.literals import TypedNdArray
    except ImportError:
        return False
    copies: dict[tuple[int, np.dtype], tuple[Any, Any]] = {}

    def copy(a: np.ndarray) -> TypedNdArray:
        """Return the copy of this precision if it is still alive, or a new one."""
        # Traces know a copy by its identity, so that it must be the same object.
        dtype = canonicalize_dtype(a.dtype)
        key = id(a), dtype
        array_of, copy_of = copies.get(key, (lambda: None, lambda: None))
        if array_of() is a and (alive := copy_of()) is not None:
            return alive
        new_copy = TypedNdArray(np.asarray(a, dtype))
        # Weak references: an entry disappears with its copy. The array is compared, too, since the
        # id of one that died may belong to another by now.
        copies[key] = weakref.ref(a), weakref.ref(new_copy, lambda dead: forget(key, dead))
        return new_copy

    def forget(key: tuple[int, np.dtype], dead: object) -> None:
        if copies.get(key, (None, None))[1] is dead:
            del copies[key]

    register_canonicalize_value_handler(np.ndarray, copy)
    return True


def is_double() -> bool:
    """Return whether JAX computes in double precision at this point."""
    return bool(jnp.result_type(float) == np.float64)


def precision(*, double: bool) -> AbstractContextManager[None]:
    """Return a context of double precision, or one that changes nothing."""
    return double_precision() if double and not is_double() else nullcontext()


def to_current_precision(tree: T) -> T:
    """Return the tree with its floating-point arrays in the current precision."""
    real = jnp.result_type(float)
    return jax.tree.map(
        lambda a: jnp.asarray(a, real) if jnp.issubdtype(jnp.result_type(a), jnp.floating) else a,
        tree,
    )


class HasPrecision(Protocol):
    """An object whose numbers were computed in single or in double precision."""

    @property
    def double(self) -> bool:
        """Return whether that was double precision."""


def in_precision_of_object(method: Callable[Concatenate[Object, Args], T]) -> Callable[..., T]:
    """Return the method, computing in the precision of its object, whatever the process's is.

    In a process of single precision an object of double precision returns NumPy arrays: JAX would
    round its own arrays to single precision in the next operation, without a word.
    """

    @wraps(method)
    def call(self: Object, *args: Args.args, **kwargs: Args.kwargs) -> T:
        if not self.double or is_double():
            return method(self, *args, **kwargs)
        with double_precision():
            found = jax.block_until_ready(method(self, *args, **kwargs))  # which Ctrl-C can end
            return jax.tree.map(
                lambda a: (
                    np.asarray(a)
                    if isinstance(a, Array) and jnp.issubdtype(a.dtype, jnp.number)
                    else a
                ),
                found,
            )

    return call


def cache_programs(folder: str | Path) -> None:
    """Keep compiled programs in a folder, where later processes find them.

    Call it before the first fit. It sets JAX's own cache for this process, whatever compiles: its
    folder, and that small and quick programs are kept, too. A program is found again by the same
    version of JAX on the same kind of machine, for the same model and the same shapes. Programs
    hold the model's constants, so that the folder is as private as the data that a model closes
    over.

    Parameters
    ----------
    folder : str or Path
        It is made if it does not exist, and only its owner can open it then.

    Examples
    --------
    >>> import tempfile, numpyro_fed as nf
    >>> nf.cache_programs(tempfile.mkdtemp())  # doctest: +SKIP
    """
    if not Path(folder).exists():
        private_folder(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()  # it may have begun without a folder


# Steps that an accelerator takes between two looks at the condition of a loop. Each look is a copy
# to the host, of some 10 microseconds on an H200; a loop that ends takes up to so many steps for
# nothing. A visit of PVI took 6.7 ms instead of 8.6. Rounds of a run gained nothing by it.
GROUP = 8


def on_accelerator() -> bool:
    """Return whether programs are compiled for something else than a CPU."""
    return jax.default_backend() != "cpu"


@cache
def warn_of_slow_additions() -> None:
    """Warn of a version of JAX that is slow on this device at sums over rows of a group."""
    slow = SLOW_ADDITIONS[0] <= jax.__version_info__ < SLOW_ADDITIONS[1]
    if slow and jax.default_backend() == "gpu":
        warnings.warn(
            f"JAX {jax.__version__} is reported to be slow on GPUs at additions by index in single "
            "precision, such as the gradient of a hospital's effect: use JAX 0.11.1 or later, with "
            "Python 3.12 or later.",
            RuntimeWarning,
            stacklevel=2,
        )


def while_loop(
    goes_on: Callable[[Carry], Array], step: Callable[[Carry], Carry], start: Carry
) -> Carry:
    """Return ``jax.lax.while_loop``, whose condition an accelerator looks at only now and then.

    The numbers are the same: steps after the end leave everything as it is.
    """
    if not on_accelerator():
        return jax.lax.while_loop(goes_on, step, start)

    group = partial(jax.lax.fori_loop, 0, GROUP, lambda _, c: where(goes_on(c), step(c), c))
    return jax.lax.while_loop(goes_on, group, start)


def on_all_devices(spec: P) -> NamedSharding:
    """Return the sharding over all devices of the program, of all its processes."""
    return NamedSharding(jax.sharding.Mesh(np.asarray(jax.devices()), ("silo",)), spec)


def readable(tree: Tree) -> Tree:
    """Return the output of a program so that each process has all of it, if there are several.

    Else what is computed of silos lies where they do, and only one process can read it.
    """
    if jax.process_count() == 1:
        return tree
    return jax.lax.with_sharding_constraint(tree, on_all_devices(P()))


def jit_once(
    f: Callable[Args, Result], static_argnums: StaticArgs = None
) -> Callable[Args, Result]:
    """Return ``jax.jit(f)`` for what runs once: compiled in a third of the time, slower to run."""

    compiled = cache(
        lambda: jax.jit(f, static_argnums=static_argnums, compiler_options=quick_options())
    )

    @wraps(f)
    def call(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        # Compiler options hold for whole programs: within another trace the function is inlined.
        traced = is_traced((args, kwargs))
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
        cached = cached_property(
            lambda self: jit(wraps(method)(partial(method, self)), static_argnums=static_argnums)
        )
        cached.__doc__ = method.__doc__
        return cast(Method, cached)

    return decorate


def map_in_batches(f: Callable[[Any], Result], xs: Any, size: int) -> Result:
    """Return ``f`` at each entry of ``xs``, at most ``size`` of them side by side."""
    # jax.lax.map compiles ``f`` twice where ``size`` does not divide the number of entries. Here
    # all batches have one length, and entries of the first one fill up the last.
    n = len(jax.tree.leaves(xs)[0])
    batches = max(-(-n // size), 1)
    each = -(-n // batches)
    if missing := batches * each - n:
        xs = jax.tree.map(lambda a: jnp.concatenate([a, a[:missing]]), xs)
    values = jax.lax.map(f, xs, batch_size=each)
    return jax.tree.map(lambda a: a[:n], values) if missing else values


def shared_number(n: int) -> int:
    """Return the number of draws up to which ``n`` are filled, so that few programs serve all."""
    return max(64, 1 << (n - 1).bit_length())


def filled(draws: Tree) -> Tree:
    """Return arrays (n, ...) of draws that are repeated up to :func:`shared_number`."""
    if is_traced(draws):
        return draws
    # In NumPy, which compiles nothing.
    return jax.tree.map(
        lambda a: np.resize(np.asarray(a), (shared_number(len(a)), *a.shape[1:])), draws
    )


def first_draws(values: Tree, n: int) -> Tree:
    """Return the first ``n`` draws of arrays that were computed of :func:`filled` ones."""
    if is_traced(values):
        return values
    return jax.device_put(jax.tree.map(lambda a: np.asarray(a)[:n], values))


def is_traced(tree: object) -> bool:
    """Return whether a program is being traced, which such numbers are a part of."""
    return any(isinstance(a, jax.core.Tracer) for a in jax.tree.leaves(tree))


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
    except jax.errors.JaxRuntimeError as error:
        # XLA names the first one that it does not know.
        others = {name: value for name, value in options.items() if name not in str(error)}
        return known_options(others) if 0 < len(others) < len(options) else {}
    return options


# NumPyro keeps one stack of handlers for all threads, so that two models
# that are traced side by side would see each other's handlers. The lock is
# held while a model is traced, and never while a program runs, a callback is
# called or a message is awaited: so no two threads can wait for each other.
TRACING = threading.RLock()
