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
import jax.numpy as jnp
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
        return {platform: table.first(request, _NUMERIC_BACKENDS) for platform, request in requests.items()}
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


@dataclass(frozen=True)
class WithOptions:
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
    if _must_trace_both(leaves):
        return lax.platform_dependent(*arrays, cuda=cuda, default=default)
    branches = _Branches.of(_OnLeaves(cuda, in_tree), _OnLeaves(default, in_tree))
    jaxpr, results = _traced(branches.expected)(*leaves)
    if jaxpr.effects:
        return lax.platform_dependent(*arrays, cuda=cuda, default=default)
    made = _by_platform.bind(*leaves, branches=branches, jaxpr=jaxpr)
    return jax.tree.unflatten(jax.tree.structure(results), made)


def _must_trace_both(leaves: list[Any]) -> bool:
    return bool(
        jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]
        or core.nonempty_axis_env_DO_NOT_USE()
        or any(is_symbolic(extent) for leaf in leaves for extent in leaf.shape)
    )


def differentiable_by_platform(*arrays: Any, cuda: Callable[..., Any], default: Callable[..., Any]) -> Any:
    """`by_platform` with a derivative in reverse mode that also traces a single branch.

    The forward pass saves the residuals of the expected branch. A program that is lowered for another platform runs
    that platform's branch again in its backward pass, because its residuals are other arrays.

    Args:
        *arrays: Pytrees of arrays; those of floating point are differentiated.
        cuda: See `by_platform`.
        default: See `by_platform`.

    Returns:
        The result of the function, a pytree of floating-point arrays.
    """
    if cuda == default:
        return default(*arrays)
    if _must_trace_both(jax.tree.leaves(arrays)):
        return lax.platform_dependent(*arrays, cuda=cuda, default=default)
    return _choice(_Branches.of(cuda, default), arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _choice(branches: _Branches, arrays: tuple[Any, ...]) -> Any:
    return by_platform(*arrays, cuda=branches.cuda, default=branches.default)


def _choice_forward(branches: _Branches, arrays: tuple[Any, ...]) -> tuple[Any, Any]:
    leaves, tree = jax.tree.flatten(arrays)
    expected = _Vjp(branches.expected, tree)
    _, (_, residuals) = _traced(expected)(*leaves)
    shapes = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(residuals))
    forward = branches.made(lambda _: expected, lambda other: _WithoutResiduals(other, tree, shapes))
    out, pullback = by_platform(*leaves, cuda=forward.cuda, default=forward.default)
    return out, (arrays, pullback)


def _choice_backward(branches: _Branches, saved: Any, cotangent: Any) -> tuple[Any]:
    arrays, pullback = saved
    leaves, tree = jax.tree.flatten(arrays)
    backward = branches.made(lambda _: _pulled_back, lambda other: _Recomputed(other, tree))
    moved = iter(by_platform(pullback, cotangent, leaves, cuda=backward.cuda, default=backward.default))
    return (jax.tree.unflatten(tree, [next(moved) if _is_float(leaf) else None for leaf in leaves]),)


_choice.defvjp(_choice_forward, _choice_backward)


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


@dataclass(frozen=True)
class _Vjp:
    """(leaves) -> the result of a function of pytrees, and its pullback to the leaves of floating point."""

    function: Callable[..., Any]
    tree: Any

    def __call__(self, *leaves: Any) -> tuple[Any, Any]:
        def run(*floats: Any) -> Any:
            moving = iter(floats)
            given = [next(moving) if _is_float(leaf) else leaf for leaf in leaves]
            return self.function(*jax.tree.unflatten(self.tree, given))

        return jax.vjp(run, *filter(_is_float, leaves))


@dataclass(frozen=True)
class _WithoutResiduals:
    """(leaves) -> the result of a function of pytrees, and zeros as the residuals of another platform's branch."""

    function: Callable[..., Any]
    tree: Any
    shapes: tuple[tuple[tuple[int, ...], Any], ...]

    def __call__(self, *leaves: Any) -> tuple[Any, Any]:
        out = self.function(*jax.tree.unflatten(self.tree, leaves))
        return out, [jnp.zeros(shape, dtype) for shape, dtype in self.shapes]


def _pulled_back(pullback: Any, cotangent: Any, leaves: list[Any]) -> list[Any]:
    return list(pullback(cotangent))


@dataclass(frozen=True)
class _Recomputed:
    """The same without residuals: the function of pytrees is run again."""

    function: Callable[..., Any]
    tree: Any

    def __call__(self, pullback: Any, cotangent: Any, leaves: list[Any]) -> list[Any]:
        return list(_Vjp(self.function, self.tree)(*leaves)[1](cotangent))


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
    """Functions for CUDA and for every other platform, and which of them a program is expected to be lowered for."""

    cuda: Callable[..., Any]
    default: Callable[..., Any]
    on_gpu: bool

    @classmethod
    def of(cls, cuda: Callable[..., Any], default: Callable[..., Any]) -> _Branches:
        return cls(cuda, default, has_gpu() or env.flag("TE_JAX_KERNELS"))

    @property
    def expected(self) -> Callable[..., Any]:
        return self.cuda if self.on_gpu else self.default

    def made(self, of_expected: Callable[[Any], Any], of_other: Callable[[Any], Any]) -> _Branches:
        """Branches made of these, of the expected one and of the other one."""
        cuda, default = (of_expected, of_other) if self.on_gpu else (of_other, of_expected)
        return _Branches(cuda(self.cuda), default(self.default), self.on_gpu)


@functools.lru_cache(maxsize=_CACHED)
def _traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """(arrays) -> the jaxpr of the function and its results' shapes. Equal functions share JAX's cache of traces."""
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
    mapped = branches.made(*[lambda branch: _Mapped(branch, tuple(axes))] * 2)
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
        return lax.platform_dependent(
            *leaves,
            cuda=lambda *given: jax.tree.leaves(branches.cuda(*given)),
            default=lambda *given: jax.tree.leaves(branches.default(*given)),
        )

    made, derivatives = jax.jvp(
        run, [primals[place] for place in moving], [tangents[place] for place in moving]
    )
    return made, [
        ad.Zero(jax.typeof(one).to_tangent_aval()) if derivative.dtype == jax.dtypes.float0 else derivative
        for one, derivative in zip(made, derivatives, strict=True)
    ]


ad.primitive_jvps[_by_platform] = _differentiated


def _lowered_as(on_gpu: bool) -> Callable[..., Any]:
    """The lowering rule of one branch, which is traced here unless it is the one that was traced already."""

    def lowered(context: Any, *values: Any, branches: _Branches, jaxpr: Any) -> Any:
        if on_gpu is not branches.on_gpu:
            branch, expected = branches.cuda if on_gpu else branches.default, jaxpr
            given = [
                jax.ShapeDtypeStruct(one.shape, one.dtype, weak_type=one.weak_type)
                for one in context.avals_in
            ]
            with jax.disable_jit(False):
                jaxpr, _ = _traced(branch)(*given)
            kinds = [[(one.shape, one.dtype) for one in side.out_avals] for side in (jaxpr, expected)]
            assert kinds[0] == kinds[1], (
                f"{branch} returns {kinds[0]}, the other platform's branch {kinds[1]}"
            )
        return mlir.lower_fun(core.jaxpr_as_fun(jaxpr), multiple_results=True)(context, *values)

    return lowered


mlir.register_lowering(_by_platform, _lowered_as(False))
mlir.register_lowering(_by_platform, _lowered_as(True), platform="cuda")
