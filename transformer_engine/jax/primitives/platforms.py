"""Backend choice for a request on each platform that a traced program may be lowered for.

The platform of a program is determined when the program is lowered, not when it is traced. `lax.platform_dependent`
therefore traces both branches, for example a kernel call with one operation and a float32 reference with hundreds.
`call_by_platform` traces the branch that this process will lower. It traces the other branch only if a program is
lowered for that branch's platform. Equal calls are traced once.

The branches are compared by value, so functions with settings are frozen dataclasses instead of closures.
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
from ...common.dispatch import Table, Unsupported, forced_backend
from ..runtime.checks import is_symbolic
from ..runtime.platform import has_gpu

Request = TypeVar("Request")
PLATFORMS = ("cpu", "cuda")
# Backends whose grids, plans and rules need numbers, not symbolic extents.
_NUMERIC_BACKENDS = frozenset(
    ("cudnn", "decoded", "dot_scaled", "gluon", "scaled_matmul", "triton", "widen")
)
_CACHE_SIZE = 4096  # functions with cached traces


def bind_by_platform(
    table: Table[Request], request_on: Callable[[str], Request]
) -> dict[str, Callable[..., Any]]:
    """Choose the backend of a request for each platform, while a program is traced.

    A forced backend and observers apply to the platform of this machine. For the other platform, and for symbolic
    `jax.export` extents, the table order decides. Symbolic extents exclude the backends that launch kernels.

    Args:
        table: Backends of the operation.
        request_on: Returns the request for a platform, "cpu" or "cuda".

    Returns:
        The callable of the chosen backend for each platform. Equal requests return the same callable.

    Raises:
        Unsupported: A backend that launches kernels is forced on symbolic extents.
    """
    here = "cuda" if has_gpu() else "cpu"
    requests = {platform: request_on(platform) for platform in PLATFORMS}
    if _has_symbols(requests[here]):
        if (name := forced_backend(table.operation)) in _NUMERIC_BACKENDS:
            raise Unsupported(
                f"{table.operation}: backend {name!r} was asked for, but extents are symbols of jax.export, and this "
                f"backend requires numbers; remove use_backend({table.operation}={name!r}), or export once per shape"
            )
        return {
            platform: table.first(request, _NUMERIC_BACKENDS)
            for platform, request in requests.items()
        }
    calls = {here: table.bind(requests[here])}
    for platform in PLATFORMS:
        if platform != here:
            calls[platform] = table.first(requests[platform])
    return calls


def _has_symbols(value: Any) -> bool:
    """Whether a request, or a value in it, contains a symbolic `jax.export` extent."""
    if isinstance(value, type):
        return False
    if is_dataclass(value):
        return any(_has_symbols(getattr(value, field.name)) for field in fields(value))
    if isinstance(value, tuple):
        return any(map(_has_symbols, value))
    return is_symbolic(value)


def compute(
    table: Table[Request], request_on: Callable[[str], Request], *arrays: Any, **options: Any
) -> Any:
    """Compute a request with the backend for the platform that the program is lowered for.

    Args:
        table: Backends of the operation.
        request_on: Returns the request for a platform; see `bind_by_platform`.
        *arrays: Array pytrees, passed to the backend.
        **options: Hashable keyword arguments for the backend.

    Returns:
        The backend's result, an array pytree.
    """
    calls = bind_by_platform(table, request_on)
    cuda, cpu = (
        WithOptions(calls[platform], tuple(options.items())) for platform in ("cuda", "cpu")
    )
    return call_by_platform(*arrays, cuda=cuda, default=cpu)


@dataclass(frozen=True)
class WithOptions:
    """A function with keyword arguments, which compares by value; `functools.partial` compares by identity."""

    function: Callable[..., Any]
    options: tuple[tuple[str, Any], ...]

    def __call__(self, *arrays: Any) -> Any:
        return self.function(*arrays, **dict(self.options))


def call_by_platform(*arrays: Any, cuda: Callable[..., Any], default: Callable[..., Any]) -> Any:
    """Call `cuda(*arrays)` in programs for CUDA and `default(*arrays)` in programs for any other platform.

    Derivatives use `lax.platform_dependent`, which traces both branches at the call. So do calls inside `shard_map` or
    a `vmap` with a named axis, with symbolic extents, with effects, and with jit disabled.

    Args:
        *arrays: Array pytrees.
        cuda: Hashable function on the arrays, which does not close over tracers. Equal functions are traced once.
        default: Function for the other platforms; returns the same tree, shapes and dtypes as `cuda`.

    Returns:
        The function's result, an array pytree.
    """
    if cuda == default:
        return default(*arrays)
    leaves, in_tree = jax.tree.flatten(arrays)
    if _must_trace_both(leaves):
        return lax.platform_dependent(*arrays, cuda=cuda, default=default)
    branches = _Branches.of(_OnLeaves(cuda, in_tree), _OnLeaves(default, in_tree))
    jaxpr, shapes = _make_tracer(branches.expected)(*leaves)
    if jaxpr.effects:
        return lax.platform_dependent(*arrays, cuda=cuda, default=default)
    results = _by_platform.bind(*leaves, branches=branches, jaxpr=jaxpr)
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _must_trace_both(leaves: list[Any]) -> bool:
    """Whether both branches must be traced at the call; see `call_by_platform`."""
    return bool(
        jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]
        or core.nonempty_axis_env_DO_NOT_USE()
        or any(is_symbolic(extent) for leaf in leaves for extent in leaf.shape)
    )


def differentiable_by_platform(
    *arrays: Any, cuda: Callable[..., Any], default: Callable[..., Any]
) -> Any:
    """Call `call_by_platform`, with a reverse-mode derivative that traces one branch only.

    The forward pass saves the residuals of the expected branch. A program that is lowered for the other platform
    recomputes that platform's branch in its backward pass, because the residuals of the two branches differ.
    Forward-mode derivatives are unsupported if the branches differ.

    Args:
        *arrays: Array pytrees; the floating-point arrays are differentiable.
        cuda: See `call_by_platform`.
        default: See `call_by_platform`.

    Returns:
        The function's result, a pytree of floating-point arrays.
    """
    if cuda == default:
        return default(*arrays)
    if _must_trace_both(jax.tree.leaves(arrays)):
        return lax.platform_dependent(*arrays, cuda=cuda, default=default)
    return _call_by_platform(_Branches.of(cuda, default), arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _call_by_platform(branches: _Branches, arrays: tuple[Any, ...]) -> Any:
    return call_by_platform(*arrays, cuda=branches.cuda, default=branches.default)


def _forward_by_platform(branches: _Branches, arrays: tuple[Any, ...]) -> tuple[Any, Any]:
    """Compute the result, and keep the arrays and the pullback of the expected branch as residuals."""
    leaves, tree = jax.tree.flatten(arrays)
    expected = _Vjp(branches.expected, tree)
    _, (_, residuals) = _make_tracer(expected)(*leaves)
    shapes = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(residuals))
    forward = branches.map(
        lambda _: expected, lambda other: _WithZeroResiduals(other, tree, shapes)
    )
    out, pullback = call_by_platform(*leaves, cuda=forward.cuda, default=forward.default)
    return out, (arrays, pullback)


def _backward_by_platform(branches: _Branches, saved: Any, cotangent: Any) -> tuple[Any]:
    """Compute the cotangents of the arrays; None for arrays that are not floating point."""
    arrays, pullback = saved
    leaves, tree = jax.tree.flatten(arrays)
    backward = branches.map(
        lambda _: _pull_back, lambda other: _PullBackByRecomputation(other, tree)
    )
    cotangents = iter(
        call_by_platform(pullback, cotangent, leaves, cuda=backward.cuda, default=backward.default)
    )
    return (
        jax.tree.unflatten(
            tree, [next(cotangents) if _is_float(leaf) else None for leaf in leaves]
        ),
    )


_call_by_platform.defvjp(_forward_by_platform, _backward_by_platform)


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


@dataclass(frozen=True)
class _Vjp:
    """(leaves) -> a pytree function's result, and its pullback to the floating-point leaves."""

    function: Callable[..., Any]
    tree: Any

    def __call__(self, *leaves: Any) -> tuple[Any, Any]:
        def run(*floats: Any) -> Any:
            remaining = iter(floats)
            merged = [next(remaining) if _is_float(leaf) else leaf for leaf in leaves]
            return self.function(*jax.tree.unflatten(self.tree, merged))

        return jax.vjp(run, *filter(_is_float, leaves))


@dataclass(frozen=True)
class _WithZeroResiduals:
    """(leaves) -> the result of a pytree function, and zeros with the shapes of the expected branch's residuals."""

    function: Callable[..., Any]
    tree: Any
    shapes: tuple[tuple[tuple[int, ...], Any], ...]

    def __call__(self, *leaves: Any) -> tuple[Any, Any]:
        out = self.function(*jax.tree.unflatten(self.tree, leaves))
        return out, [jnp.zeros(shape, dtype) for shape, dtype in self.shapes]


def _pull_back(pullback: Any, cotangent: Any, leaves: list[Any]) -> list[Any]:
    """Compute the cotangents of the floating-point leaves from saved residuals."""
    return list(pullback(cotangent))


@dataclass(frozen=True)
class _PullBackByRecomputation:
    """(pullback, cotangent, leaves) -> the results from `_pull_back` without residuals: the function is run again."""

    function: Callable[..., Any]
    tree: Any

    def __call__(self, pullback: Any, cotangent: Any, leaves: list[Any]) -> list[Any]:
        return list(_Vjp(self.function, self.tree)(*leaves)[1](cotangent))


@dataclass(frozen=True)
class _OnLeaves:
    """A pytree function, called with its arguments' leaves."""

    function: Callable[..., Any]
    in_tree: Any

    def __call__(self, *leaves: Any) -> Any:
        return self.function(*jax.tree.unflatten(self.in_tree, leaves))


@dataclass(frozen=True)
class _Mapped:
    """`jax.vmap` for a leaf function over `axes`, with mapped results."""

    function: Callable[..., Any]
    axes: tuple[int | None, ...]

    def __call__(self, *leaves: Any) -> Any:
        return jax.vmap(self.function, in_axes=self.axes)(*leaves)


class _Branches(NamedTuple):
    """Functions for CUDA and for all other platforms.

    Attributes:
        cuda: Function in programs for CUDA.
        default: Function in programs for other platforms.
        on_gpu: Whether programs are expected to be lowered for CUDA.
    """

    cuda: Callable[..., Any]
    default: Callable[..., Any]
    on_gpu: bool

    @classmethod
    def of(cls, cuda: Callable[..., Any], default: Callable[..., Any]) -> _Branches:
        """Build branches whose expected platform follows the hardware and TE_JAX_KERNELS."""
        return cls(cuda, default, has_gpu() or env.flag("TE_JAX_KERNELS"))

    @property
    def expected(self) -> Callable[..., Any]:
        """Function for the expected platform."""
        return self.cuda if self.on_gpu else self.default

    def map(self, of_expected: Callable[[Any], Any], of_other: Callable[[Any], Any]) -> _Branches:
        """Build new branches: of_expected(the expected branch), and of_other(the other branch)."""
        cuda, default = (of_expected, of_other) if self.on_gpu else (of_other, of_expected)
        return _Branches(cuda(self.cuda), default(self.default), self.on_gpu)


@functools.lru_cache(maxsize=_CACHE_SIZE)
def _make_tracer(function: Callable[..., Any]) -> Callable[..., Any]:
    """Build (arrays) -> jaxpr and result shapes for a function; equal functions share JAX's trace cache."""
    return jax.make_jaxpr(function, return_shape=True)


_by_platform = Primitive("transformer_engine_by_platform")
_by_platform.multiple_results = True


@functools.lru_cache(maxsize=_CACHE_SIZE)
def _jit_call(branches: _Branches, jaxpr: Any) -> Any:
    """The primitive's jitted call, which runs for calls outside jit."""
    return jax.jit(functools.partial(_by_platform.bind, branches=branches, jaxpr=jaxpr))


@_by_platform.def_impl
def _impl(*leaves: Array, branches: _Branches, jaxpr: Any) -> list[Any]:
    """Compile and run a program with only this call, as JAX does for any primitive outside jit."""
    with jax.disable_jit(False):
        return _jit_call(branches, jaxpr)(*leaves)


@_by_platform.def_abstract_eval
def _abstract_eval(*leaves: Any, branches: _Branches, jaxpr: Any) -> list[Any]:
    return jaxpr.out_avals


def _batch(
    leaves: Any, axes: Any, *, branches: _Branches, jaxpr: Any
) -> tuple[Any, tuple[int, ...]]:
    """Map both branches over the batched axes; the batch is the first axis of every result."""
    mapped = _Branches(
        _Mapped(branches.cuda, tuple(axes)), _Mapped(branches.default, tuple(axes)), branches.on_gpu
    )
    batched_jaxpr, _ = _make_tracer(mapped.expected)(*leaves)
    results = _by_platform.bind(*leaves, branches=mapped, jaxpr=batched_jaxpr)
    return results, (0,) * len(results)


batching.primitive_batchers[_by_platform] = _batch


def _jvp(
    primals: Any, tangents: Any, *, branches: _Branches, jaxpr: Any
) -> tuple[list[Any], list[Any]]:
    """Differentiate both branches, as `lax.platform_dependent` does."""
    active = [index for index, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

    def run(*active_leaves: Any) -> list[Any]:
        leaves = list(primals)
        for index, leaf in zip(active, active_leaves, strict=True):
            leaves[index] = leaf
        return lax.platform_dependent(
            *leaves,
            cuda=lambda *leaves: jax.tree.leaves(branches.cuda(*leaves)),
            default=lambda *leaves: jax.tree.leaves(branches.default(*leaves)),
        )

    results, derivatives = jax.jvp(
        run, [primals[index] for index in active], [tangents[index] for index in active]
    )
    return results, [
        ad.Zero(jax.typeof(result).to_tangent_aval())
        if derivative.dtype == jax.dtypes.float0
        else derivative
        for result, derivative in zip(results, derivatives, strict=True)
    ]


ad.primitive_jvps[_by_platform] = _jvp


def _lowering_rule(on_gpu: bool) -> Callable[..., Any]:
    """Build the lowering rule of one branch; it traces the branch unless the call traced it."""

    def lower(context: Any, *values: Any, branches: _Branches, jaxpr: Any) -> Any:
        if on_gpu is not branches.on_gpu:
            branch, expected = branches.cuda if on_gpu else branches.default, jaxpr
            shapes = [
                jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
                for aval in context.avals_in
            ]
            with jax.disable_jit(False):
                jaxpr, _ = _make_tracer(branch)(*shapes)
            layouts, wanted = (
                [(aval.shape, aval.dtype) for aval in side.out_avals] for side in (jaxpr, expected)
            )
            assert layouts == wanted, (
                f"{branch} returns {layouts}, the other platform's branch {wanted}"
            )
        return mlir.lower_fun(core.jaxpr_as_fun(jaxpr), multiple_results=True)(context, *values)

    return lower


mlir.register_lowering(_by_platform, _lowering_rule(False))
mlir.register_lowering(_by_platform, _lowering_rule(True), platform="cuda")
