"""What computes one request on each platform that a traced program may be lowered for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from jax import lax

from ...common.dispatch import Refusal, Table
from ..platform import has_gpu

Request = TypeVar("Request")
PLATFORMS = ("cpu", "cuda")


def chosen(table: Table[Request], request_on: Callable[[str], Request]) -> dict[str, Callable[..., Any]]:
    """{platform: what computes the request there}, chosen while tracing; lowering takes one of them.

    A forced backend and observers concern the platform of this machine; for another one the order of the table decides.
    """
    here = "cuda" if has_gpu() else "cpu"
    calls = {here: table.bind(request_on(here))}
    for platform in PLATFORMS:
        if platform != here:
            calls[platform] = _first(table, request_on(platform))
    return calls


def _first(table: Table[Request], request: Request) -> Callable[..., Any]:
    for backend in table.candidates(request):
        if backend.refusal(request) is None:
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
