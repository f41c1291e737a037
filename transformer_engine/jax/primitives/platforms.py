"""Choice of the backend that computes a request on each platform that a traced program may be lowered for.

Which platform a program runs on is known when it is lowered, not when it is traced. `lax.platform_dependent` therefore
traces every alternative: a float32 reference of hundreds of operations beside a kernel of one. `by_platform` traces a
single alternative, the one that this process is expected to lower, and another one only if a program is lowered for
its platform. Equal calls are traced once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple, TypeVar

import jax
from jax import Array, lax
from jax.extend import core
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ...common import env
from ...common.dispatch import Table, Unsupported, forced
from ..checks import is_symbolic
from ..platform import has_gpu

Request = TypeVar("Request")
PLATFORMS = ("cpu", "cuda")
# Backends whose grids, plans and rules need numbers, not symbolic extents.
_NUMERIC_BACKENDS = frozenset(("cudnn", "decoded", "gluon", "triton"))
_CACHED = 4096  # functions whose traces are kept


def chosen(table: Table[Request], request_on: Callable[[str], Request]) -> dict[str, Callable[..., Any]]:
    """Choose, while tracing, what computes a request on each platform.

    A forced backend and observers apply to the platform of this machine. On another platform, and for symbolic extents
    of `jax.export`, the order of the table decides. Symbolic extents exclude the backends that launch kernels.

    Args:
        table: Backends of the operation.
        request_on: Returns the request for a platform, "cpu" or "cuda".

    Returns:
        The callable of the chosen backend for each platform. Equal requests give the same callable.

    Raises:
        Unsupported: A backend that launches kernels is forced on symbolic extents.
    """
    here = "cuda" if has_gpu() else "cpu"
    requests = {platform: request_on(platform) for platform in PLATFORMS}
    if _has_symbols(requests[here]):
        if (name := forced(table.operation)) in _NUMERIC_BACKENDS:
            raise Unsupported(
                f"{table.operation}: backend {name!r} was asked for, but extents are symbols of jax.export, and it is "
                f"started on numbers; drop use_backend({table.operation}={name!r}), or export once for each shape"
            )
        return {
            platform: table.first(request, _NUMERIC_BACKENDS) for platform, request in requests.items()
        }
    calls = {here: table.bind(requests[here])}
    for platform in PLATFORMS:
        if platform != here:
            calls[platform] = table.first(requests[platform])
    return calls


def _has_symbols(fact: Any) -> bool:
    """Whether a request holds an extent that `jax.export` gave as a symbol."""
    if isinstance(fact, type):
        return False
    if is_dataclass(fact):
        return any(_has_symbols(getattr(fact, field.name)) for field in fields(fact))
    if isinstance(fact, tuple):
        return any(map(_has_symbols, fact))  # pyright: ignore[reportUnknownArgumentType]
    return is_symbolic(fact)


def computed(
    table: Table[Request], request_on: Callable[[str], Request], *arrays: Any, **options: Any
) -> Any:
    """Compute a request by the backend of the platform that the program is lowered for.

    Args:
        table: Backends of the operation.
        request_on: Returns the request for a platform; see `chosen`.
        *arrays: Pytrees of arrays, passed to the backend.
        **options: Hashable keyword arguments of the backend.

    Returns:
        The result of the backend, a pytree of arrays.
    """
    calls = chosen(table, request_on)
    given = tuple(options.items())
    cuda, cpu = (WithOptions(calls[platform], given) for platform in ("cuda", "cpu"))
    return by_platform(*arrays, cuda=cuda, default=cpu)


class WithOptions(NamedTuple):
    """A function with keyword arguments. Unlike those of `functools.partial`, two of them compare by value."""

    function: Callable[..., Any]
    options: tuple[tuple[str, Any], ...]

    def __call__(self, *arrays: Any) -> Any:
        return self.function(*arrays, **dict(self.options))


def by_platform(*arrays: Any, cuda: Callable[..., Any], default: Callable[..., Any]) -> Any:
    """Call `cuda(*arrays)` in programs for CUDA and `default(*arrays)` in programs for any other platform.

    As `lax.platform_dependent`, which it leaves derivatives to, and programs whose alternatives must be traced where
    they are called: inside `shard_map` and named `vmap` axes, with symbolic extents, with effects, or without jit.

    Args:
        *arrays: Pytrees of arrays.
        cuda: Hashable function of the arrays, which closes over no tracer. Equal functions are traced once.
        default: The same for other platforms; returns the same tree, shapes and dtypes.

    Returns:
        The result of the function, a pytree of arrays.
    """
    if cuda == default:
        return default(*arrays)
    leaves, in_tree = jax.tree.flatten(arrays)
    if (
        jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]
        or core.nonempty_axis_env_DO_NOT_USE()
        or any(is_symbolic(extent) for leaf in leaves for extent in leaf.shape)
    ):
        return lax.platform_dependent(*arrays, cuda=cuda, default=default)
    branches = _Branches(_OnLeaves(cuda, in_tree), _OnLeaves(default, in_tree))
    jaxpr, results = _traced(branches.expected)(*leaves)
    if jaxpr.effects:
        return lax.platform_dependent(*arrays, cuda=cuda, default=default)
    made = _by_platform.bind(*leaves, branches=branches, jaxpr=jaxpr)
    return jax.tree.unflatten(jax.tree.structure(results), made)


@dataclass(frozen=True)
class _OnLeaves:
    """A function of pytrees, called with the leaves of its arguments."""

    function: Callable[..., Any]
    in_tree: Any

    def __call__(self, *leaves: Any) -> Any:
        return self.function(*jax.tree.unflatten(self.in_tree, leaves))


@dataclass(frozen=True)
class _Mapped:
    """`jax.vmap` of a function of leaves over `axes`, with mapped results."""

    function: Callable[..., Any]
    axes: tuple[int | None, ...]

    def __call__(self, *leaves: Any) -> Any:
        return jax.vmap(self.function, in_axes=self.axes)(*leaves)


class _Branches(NamedTuple):
    """Functions of leaves for CUDA and for every other platform."""

    cuda: Callable[..., Any]
    default: Callable[..., Any]

    @property
    def expected(self) -> Callable[..., Any]:
        """The branch that programs of this process are expected to be lowered for."""
        return self.cuda if has_gpu() or env.flag("TE_JAX_KERNELS") else self.default


@functools.lru_cache(maxsize=_CACHED)
def _jitted(function: Callable[..., Any]) -> Any:
    """The function under jit. Equal functions give one object, whose traces JAX caches."""
    return jax.jit(function)


@functools.lru_cache(maxsize=_CACHED)
def _traced(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.make_jaxpr(function, return_shape=True)


_by_platform = Primitive("transformer_engine_by_platform")
_by_platform.multiple_results = True


@functools.lru_cache(maxsize=_CACHED)
def _program(branches: _Branches, jaxpr: Any) -> Any:
    return jax.jit(functools.partial(_by_platform.bind, branches=branches, jaxpr=jaxpr))


@_by_platform.def_impl
def _outside_of_jit(*leaves: Array, branches: _Branches, jaxpr: Any) -> list[Any]:
    """Run the choice as a program of its own, as JAX runs any primitive outside of jit."""
    with jax.disable_jit(False):
        return _program(branches, jaxpr)(*leaves)


@_by_platform.def_abstract_eval
def _shapes(*leaves: Any, branches: _Branches, jaxpr: Any) -> list[Any]:
    return jaxpr.out_avals


def _batched(leaves: Any, axes: Any, *, branches: _Branches, jaxpr: Any) -> tuple[Any, tuple[int, ...]]:
    mapped = _Branches(*(_Mapped(branch, tuple(axes)) for branch in branches))
    of_all, _ = _traced(mapped.expected)(*leaves)
    made = _by_platform.bind(*leaves, branches=mapped, jaxpr=of_all)
    return made, (0,) * len(made)


batching.primitive_batchers[_by_platform] = _batched


def _differentiated(
    primals: Any, tangents: Any, *, branches: _Branches, jaxpr: Any
) -> tuple[list[Any], list[Any]]:
    """Differentiate both branches, as `lax.platform_dependent` does."""
    moving = [place for place, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

    def run(*some: Any) -> list[Any]:
        leaves = list(primals)
        for place, leaf in zip(moving, some, strict=True):
            leaves[place] = leaf
        cuda, default = ((lambda *given, f=branch: jax.tree.leaves(f(*given))) for branch in branches)
        return lax.platform_dependent(*leaves, cuda=cuda, default=default)

    made, derivatives = jax.jvp(
        run, [primals[place] for place in moving], [tangents[place] for place in moving]
    )
    return made, [
        ad.Zero(jax.typeof(one).to_tangent_aval()) if derivative.dtype == jax.dtypes.float0 else derivative
        for one, derivative in zip(made, derivatives, strict=True)
    ]


ad.primitive_jvps[_by_platform] = _differentiated


def _lowered_as(platform: str) -> Callable[..., Any]:
    """The lowering rule of one branch: a call of its jaxpr, which equal calls share."""

    def lowered(context: Any, *values: Any, branches: _Branches, jaxpr: Any) -> Any:
        branch = getattr(branches, platform)

        def run(*leaves: Any) -> list[Any]:
            with jax.disable_jit(False):
                made = jax.tree.leaves(_jitted(branch)(*leaves))
            found, expected = ([(one.shape, one.dtype) for one in side] for side in (made, jaxpr.out_avals))
            assert found == expected, f"{branch} returns {found}, the other platform's branch {expected}"
            return made

        return mlir.lower_fun(run, multiple_results=True)(context, *values)

    return lowered


mlir.register_lowering(_by_platform, _lowered_as("default"))
mlir.register_lowering(_by_platform, _lowered_as("cuda"), platform="cuda")
