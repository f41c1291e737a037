"""Quantization of queries, keys and values to FP8 with one scale, in any layout in which they share memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..tensor.float8_tensor import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
    Float8TensorStorage,
)

_FORMATS = ("sbhd", "bshd", "thd")


def combine_and_quantize(
    qkv_layout: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qkv_quantizer: Any,
    used_in_forward: bool = True,
    used_in_backward: bool = False,
    keep_same_data_and_scale_inv_format: bool = False,
) -> tuple[Float8Tensor, Float8Tensor, Float8Tensor, str, str | None]:
    """Quantize queries, keys and values with one scale.

    Args:
        qkv_layout: Layout of the three, such as "sbhd_sbhd_sbhd", "bs3hd" or "thd_t2hd". Tensors
            that share a buffer share a code buffer too.
        qkv_quantizer: With delayed scaling, its scale is used and it records the largest of their
            values; with current scaling, the three have one maximum.
        used_in_forward, used_in_backward: Have no effect; the row-wise codes serve both passes.
        keep_same_data_and_scale_inv_format: Has no effect; one scale has no layout.

    Returns:
        q, k and v as Float8Tensors, the code layout (always qkv_layout), and the block scale format
        (always None, as there is one scale).

    Raises:
        TypeError: The quantizer scales blocks; quantize the three tensors one by one.
    """
    if not isinstance(qkv_quantizer, Float8Quantizer | Float8CurrentScalingQuantizer):
        raise TypeError(
            f"{type(qkv_quantizer).__name__} has no one scale for three tensors; call it on q, k and v one by one"
        )
    shared, axis = _sharing(qkv_layout)
    tensors = (q, k, v)
    alone = tensors[: 3 - shared]
    buffers = [*alone, torch.stack(tensors[3 - shared :], dim=axis)] if shared else list(alone)
    flat = torch.cat([x.reshape(-1) for x in buffers])[None]
    storage = qkv_quantizer.encode(flat, True, False)
    assert isinstance(storage, Float8TensorStorage) and storage._data is not None
    codes = [
        part.view(x.shape)
        for part, x in zip(
            storage._data[0].split([x.numel() for x in buffers]), buffers, strict=True
        )
    ]
    if shared:
        codes[-1:] = codes[-1].unbind(axis)
    results = [_tensor(part, storage, x.dtype) for part, x in zip(codes, tensors, strict=True)]
    return results[0], results[1], results[2], qkv_layout, None


def _tensor(codes: Tensor, storage: Float8TensorStorage, dtype: torch.dtype) -> Float8Tensor:
    constants = {**storage.constants(), "dtype": dtype}
    return Float8Tensor.from_storage(Float8TensorStorage(codes, storage._scale_inv, **constants))


def _sharing(qkv_layout: str) -> tuple[int, int]:
    """Return (how many of the three share a buffer: 3, 2 or 0; the axis with that number, counted from the end)."""
    for tensor_format in _FORMATS:
        for packed, axis in (
            (tensor_format[:-2] + "{n}hd", -3),
            (tensor_format[:-2] + "h{n}d", -2),
        ):
            if qkv_layout == packed.format(n=3):
                return 3, axis
            if qkv_layout == f"{tensor_format}_{packed.format(n=2)}":
                return 2, axis
    parts = qkv_layout.split("_")
    if len(parts) == 3 and all(part in _FORMATS for part in parts):
        return 0, -3
    raise ValueError(
        f"qkv_layout={qkv_layout!r} is no layout of three tensors; give for example 'bshd_bshd_bshd'"
    )
