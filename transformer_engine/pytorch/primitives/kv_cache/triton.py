"""Appending to a key-value cache on GPUs: one launch for keys and values, whatever the layout of the new tokens."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ....common.dispatch import Backend
from ..launching import refuses_elementwise, rows_dense, run, traceable
from .request import CacheRequest

if TYPE_CHECKING:
    from ....common.kernels.launch import Launch


def _append(
    new_k: Tensor,
    new_v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor | None,
    cu_new: Tensor,
    cu_cached: Tensor,
    tensor_format: str,
    longest: int,
) -> None:
    if longest == 0 or new_k.numel() + new_v.numel() == 0 or cu_new.shape[0] < 2:
        return
    new_k, new_v = rows_dense(new_k), rows_dense(new_v)
    launch = _launch(
        cu_new.shape[0] - 1,
        # A power of two: prompts of any length share a few launch records.
        1 << (longest - 1).bit_length(),
        k_cache.shape,
        v_cache.shape[3],
        new_k.stride(),
        new_v.stride(),
        None if page_table is None else (page_table.shape[1], page_table.stride(0)),
        tensor_format,
    )
    run(launch, (new_k, new_v, k_cache, v_cache, page_table, cu_new, cu_cached))


@functools.lru_cache(maxsize=1024)
def _launch(
    batch: int,
    longest: int,
    cache: torch.Size,
    size_v: int,
    k_strides: tuple[int, ...],
    v_strides: tuple[int, ...],
    table: tuple[int, int] | None,
    tensor_format: str,
) -> Launch:
    from ....common.kernels import kv_cache  # it imports triton

    pages, length, heads, size_k = cache
    columns, table_stride = (1, 0) if table is None else table
    return kv_cache.append(
        batch,
        longest,
        heads,
        (size_k, size_v),
        (*_strides(k_strides, tensor_format), *_strides(v_strides, tensor_format)),
        packed=tensor_format == "thd",
        capacity=length * columns,
        page_size=length,
        pages=pages,
        table_stride=table_stride,
    )


def _strides(strides: tuple[int, ...], tensor_format: str) -> tuple[int, int, int]:
    """Elements between two sequences, two tokens and two heads."""
    if tensor_format == "thd":
        return 0, strides[0], strides[1]
    batch, token = (strides[1], strides[0]) if tensor_format == "sbhd" else (strides[0], strides[1])
    return batch, token, strides[2]


def _nothing(
    new_k: Tensor,
    new_v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor | None,
    cu_new: Tensor,
    cu_cached: Tensor,
    tensor_format: str,
    longest: int,
) -> None:
    return None


append = traceable(
    "append_to_kv_cache(Tensor new_k, Tensor new_v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? page_table,"
    " Tensor cu_new, Tensor cu_cached, str tensor_format, int longest) -> ()",
    _append,
    _nothing,
)


def refuses(request: CacheRequest) -> str | None:
    return refuses_elementwise(request.device, request.new, request.cache)


BACKEND: Backend[CacheRequest] = Backend("triton", append, refuses)
