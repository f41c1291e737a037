"""Appending to a key-value cache on GPUs: one launch for keys and values, whatever the layout of the new tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from ....common.dispatch import Backend
from ....common.formats import round_up
from ...runtime.launching import run, unsupported_elementwise
from .reference import CacheRequest

if TYPE_CHECKING:
    from ....common.kernels.launch import Launch


def unsupported_reason(request: CacheRequest) -> str | None:
    """Return why the backend does not support the request, or None."""
    return unsupported_elementwise(request.device, request.new, request.cache)


def bind(request: CacheRequest) -> Callable[..., None]:
    """Return (new_k, new_v, k_cache, v_cache, page_table, cu_new, cu_cached) -> None, which writes the caches."""
    if request.longest == 0 or request.empty or request.batch < 1:
        return lambda *_: None
    launch = _launch(request._replace(longest=_round_length(request.longest)))

    def append(*tensors: Tensor | None) -> None:
        run(launch, tensors)

    return append


def _round_length(longest: int) -> int:
    """Round a length up to one of a few, so that prompts of all lengths share launches.

    Short lengths are rounded to powers of two. Long lengths are rounded to eight lengths per power
    of two: at most one program in eight finds no token.
    """
    power = 1 << (longest - 1).bit_length()
    return power if longest <= 1024 else round_up(longest, power // 16)


@functools.lru_cache(maxsize=1024)
def _launch(request: CacheRequest) -> Launch:
    from ....common.kernels import kv_cache

    (pages, length, heads, size_k), v_cache = request.caches
    columns, table_stride = (1, 0) if request.table is None else request.table
    layout, (k_strides, v_strides) = request.tensor_format, request.strides
    return kv_cache.append(
        request.batch,
        request.longest,
        heads,
        (size_k, v_cache[3]),
        (*_strides(k_strides, layout), *_strides(v_strides, layout)),
        packed=layout == "thd",
        capacity=length * columns,
        page_size=length,
        pages=pages,
        table_stride=table_stride,
    )


def _strides(strides: tuple[int, ...], tensor_format: str) -> tuple[int, int, int]:
    """Return sequence, token and head strides."""
    if tensor_format == "thd":
        return 0, strides[0], strides[1]
    batch, token = (strides[1], strides[0]) if tensor_format == "sbhd" else (strides[0], strides[1])
    return batch, token, strides[2]


BACKEND: Backend[CacheRequest] = Backend(
    "triton", unsupported_reason=unsupported_reason, bind=bind, opaque=True
)
