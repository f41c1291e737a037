"""Checks on calls of the fused attention's flat names, before any backend is queried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine.common.checks import described, number
from transformer_engine.common.numbers import to_int
from transformer_engine.pytorch.module.arguments import drop_rate
from transformer_engine.pytorch.runtime.checks import floating, integers, tensor, values_dtype

from .layout import Layout


def check_call(
    layout: Layout,
    qkv: tuple[Any, Any, Any],
    cu_seqlens: tuple[Tensor, Tensor],
    scale: float,
    dropout: float,
    dtype: torch.dtype,
    bias: Tensor | None,
    offset: Tensor | None,
) -> None:
    """Raise TypeError or ValueError unless q, k, v fit the layout and each other, and the settings are valid."""
    for name, x, layout_format in zip(
        "QKV", qkv, (layout.q_format, layout.kv_format, layout.kv_format), strict=True
    ):
        quantized = hasattr(x, "get_usages")
        if not quantized:
            floating(name, x)
        if (
            len(x.shape) != (4 if layout.paged and name != "Q" else len(layout_format))
            and not layout.turned
        ):
            raise ValueError(
                f"{name} is {list(x.shape)}; qkv_layout={layout.name!r} needs {layout_format}, give that"
            )
    head, *others = (x.shape[-1] for x in qkv[:2])
    if others != [head]:
        raise ValueError(
            f"Q is {list(qkv[0].shape)}, K {list(qkv[1].shape)}; give both the same head size"
        )
    if qkv[1].shape[:-1] != qkv[2].shape[:-1]:
        raise ValueError(
            f"K is {list(qkv[1].shape)}, V {list(qkv[2].shape)}; give both the same tokens and heads"
        )
    for name, bounds in zip(("cu_seqlens_q", "cu_seqlens_kv"), cu_seqlens, strict=True):
        integers(name, bounds)
    number("attn_scale", scale)
    number("p_dropout", dropout)
    values_dtype("fake_dtype", dtype)
    if bias is not None:
        floating("Bias", bias)
    if offset is not None:
        tensor("SoftmaxOffset", offset)


def whole_window(window: Any) -> tuple[int, int]:
    """Convert a window (left, right) to ints.

    Raises:
        TypeError: The value is not a pair with whole numbers.
    """
    if isinstance(window, str) or not isinstance(window, Sequence) or len(window) != 2:
        raise TypeError(
            f"window_size={described(window)} must be two numbers; give (left, right), -1 for no limit"
        )
    left, right = (to_int(f"a side of window_size={tuple(window)}, which", side) for side in window)
    return left, right


def check_question(
    sizes: Mapping[str, Any], lengths: Mapping[str, Any], dropout: float, window: tuple[Any, Any]
) -> None:
    """Raise TypeError or ValueError unless a query about backends has valid sizes, lengths, rate and window."""
    for name, size in sizes.items():
        to_int(name, size, 1)
    for name, length in lengths.items():
        to_int(name, length, 0)
    heads, groups = sizes["num_attn_heads"], sizes["num_gqa_groups"]
    if heads % groups:
        raise ValueError(
            f"num_gqa_groups={groups} does not divide num_attn_heads={heads}; give a divisor"
        )
    drop_rate("p_dropout", dropout)
    for name, side in zip(("window_size_left", "window_size_right"), window, strict=True):
        to_int(name, side)
