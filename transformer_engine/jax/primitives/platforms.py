"""What computes one request on each platform that a traced program may be lowered for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from jax import lax

from ...common.dispatch import Refusal, Table, Unsupported, forced
from ..checks import is_symbolic
from ..platform import has_gpu

Request = TypeVar("Request")
PLATFORMS = ("cpu", "cuda")
# Rows whose grids, plans and rules are of numbers.
_LAUNCHED = frozenset(("cudnn", "decoded", "gluon", "triton"))


def chosen(table: Table[Request], request_on: Callable[[str], Request]) -> dict[str, Callable[..., Any]]:
    """{platform: what computes the request there}, chosen while tracing; lowering takes one of them.

    A forced backend and observers concern the platform of this machine; for another one, and for extents that are
    symbols of `jax.export`, the order of the table decides. Such extents are left to what XLA computes; Unsupported
    where a backend that launches kernels is forced on them.
    """
    here = "cuda" if has_gpu() else "cpu"
    asked = {platform: request_on(platform) for platform in PLATFORMS}
    if _has_symbols(asked[here]):
        if (name := forced(table.operation)) in _LAUNCHED:
            raise Unsupported(
                f"{table.operation}: backend {name!r} was asked for, but extents are symbols of jax.export, and it is "
                f"started on numbers; drop use_backend({table.operation}={name!r}), or export once for each shape"
            )
        return {platform: _first(table, request, _LAUNCHED) for platform, request in asked.items()}
    calls = {here: table.bind(asked[here])}
    for platform in PLATFORMS:
        if platform != here:
            calls[platform] = _first(table, asked[platform])
    return calls


def _has_symbols(fact: Any) -> bool:
    """Is an extent among the facts of a request one that `jax.export` gave as a symbol?"""
    if isinstance(fact, type):
        return False
    if is_dataclass(fact):
        return any(_has_symbols(getattr(fact, field.name)) for field in fields(fact))
    if isinstance(fact, tuple):
        return any(map(_has_symbols, fact))  # pyright: ignore[reportUnknownArgumentType]
    return is_symbolic(fact)


def _first(
    table: Table[Request], request: Request, without: frozenset[str] = frozenset()
) -> Callable[..., Any]:
    for backend in table.candidates(request):
        if backend.name not in without and backend.refusal(request) is None:
            assert backend.bind is not None
            call = backend.bind(request)
            if not isinstance(call, Refusal):
                return call
    raise AssertionError(f"the reference of {table.operation} takes every request")


def computed(
    table: Table[Request], request_on: Callable[[str], Request], *arrays: Any, **options: Any
) -> Any:
    """What the backend of the platform that the program is lowered for makes of the arrays."""
    calls = chosen(table, request_on)
    on_gpu, elsewhere = (functools.partial(calls[platform], **options) for platform in ("cuda", "cpu"))
    if on_gpu.func is elsewhere.func:
        return elsewhere(*arrays)
    return lax.platform_dependent(*arrays, cuda=on_gpu, default=elsewhere)
