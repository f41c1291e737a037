"""Small functions that other libraries import from here: splits, sizes, layouts, profiler ranges, initial values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..common.checks import whole
from .functions.split_heads import SplitAlongDim
from .graph import make_weak_ref
from .module.parameters import default_init_method
from .runtime.checks import tensor as tensor_of
from .runtime.device import canonical_device, get_cudnn_version, get_device_compute_capability

__all__ = [
    "SplitAlongDim",
    "assert_dim_for_fp8_exec",
    "attention_mask_func",
    "cast_if_needed",
    "check_dim_for_fp8_exec",
    "deinterleave_glu_tensor",
    "divide",
    "get_cudnn_version",
    "get_default_init_method",
    "get_device_compute_capability",
    "gpu_autocast_ctx",
    "init_method_normal",
    "interleave_glu_tensor",
    "is_non_tn_fp8_gemm_supported",
    "make_weak_ref",
    "nvtx_range_pop",
    "nvtx_range_push",
    "round_up_to_nearest_multiple",
    "scaled_init_method_normal",
    "split_tensor_along_dim",
    "torch_get_autocast_gpu_dtype",
]

_ROWS, _DEPTH = 8, 16  # multiples of these are the sizes of FP8 products of tensors with one scale


def round_up_to_nearest_multiple(value: int, multiple: int) -> int:
    """Return the smallest multiple that is not below value; raise ValueError for a multiple of 0."""
    if multiple == 0:
        raise ValueError("multiple=0; give the number whose multiple is wanted")
    return -(-value // multiple) * multiple


def divide(numerator: int, denominator: int) -> int:
    """Return numerator / denominator; raise ValueError if there is a remainder."""
    if numerator % denominator:
        raise ValueError(f"{denominator} does not divide {numerator}; pad it to a multiple")
    return numerator // denominator


def check_dim_for_fp8_exec(tensor: Tensor) -> bool:
    """Return whether a matrix [M, K] fits FP8 products: M is a multiple of 8, and K of 16."""
    return tensor.shape[0] % _ROWS == 0 and tensor.shape[-1] % _DEPTH == 0


def assert_dim_for_fp8_exec(*tensors: Tensor) -> None:
    """Raise ValueError unless all matrices fit FP8 products."""
    for tensor in tensors:
        if not check_dim_for_fp8_exec(tensor):
            raise ValueError(
                f"FP8 products take [multiple of {_ROWS}, multiple of {_DEPTH}], this is {list(tensor.shape)}; pad it"
            )


def cast_if_needed(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return the tensor in dtype; the tensor itself, or None, if nothing has to be converted."""
    return tensor if tensor is None or tensor.dtype == dtype else tensor.to(dtype)


def interleave_glu_tensor(tensor: Tensor, interleave_size: int) -> Tensor:
    """Reorder [2f, ..], the f rows of a gate and then the f rows that it multiplies, into blocks of both in turn.

    Args:
        tensor: Weight or bias [2f, ..].
        interleave_size: Rows of a block.

    Returns:
        A new tensor.

    Raises:
        ValueError: 2f is not a multiple of 2 * interleave_size.
    """
    return _glu_blocks(tensor, interleave_size, (2, -1, interleave_size))


def deinterleave_glu_tensor(tensor: Tensor, interleave_size: int) -> Tensor:
    """Invert `interleave_glu_tensor`: all rows of the gate before all rows that it multiplies.

    Args:
        tensor: Weight or bias [2f, ..] in blocks.
        interleave_size: Rows of a block.
    """
    return _glu_blocks(tensor, interleave_size, (-1, 2, interleave_size))


def _glu_blocks(tensor: Tensor, interleave_size: int, blocks: tuple[int, int, int]) -> Tensor:
    tensor_of("tensor", tensor)
    whole("interleave_size", interleave_size)
    rows = tensor.shape[0] if tensor.dim() else 0
    if rows % (2 * interleave_size) or not tensor.dim():
        raise ValueError(
            f"the first dimension of {list(tensor.shape)} is no multiple of 2 interleave_size = {2 * interleave_size}; "
            "give the rows of a gate and of what it multiplies, in whole blocks"
        )
    turned = tensor.unflatten(0, blocks).transpose(0, 1)
    return turned.clone(memory_format=torch.contiguous_format).view(tensor.shape)


def is_non_tn_fp8_gemm_supported() -> bool:
    """Return whether FP8 matrices whose depth is not the last dimension can be multiplied without transposed copies."""
    capability = get_device_compute_capability()
    return (10, 0) <= capability < (12, 0) or capability >= (13, 0)


def split_tensor_along_dim(
    tensor: Tensor, dim: int, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Return equal parts along a dimension; raise ValueError if they cannot be equal."""
    whole("num_partitions", num_partitions)
    parts = torch.split(tensor, divide(tensor.shape[dim], num_partitions), dim=dim)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else tuple(parts)


def get_default_init_method() -> Callable[[Tensor], Tensor]:
    """Return the default initialization of weights: N(0, 0.023)."""
    return default_init_method


def init_method_normal(sigma: float) -> Callable[[Tensor], Tensor]:
    """Return a function that fills a tensor by N(0, sigma)."""
    return lambda tensor: torch.nn.init.normal_(tensor, mean=0.0, std=sigma)


def scaled_init_method_normal(sigma: float, num_layers: int) -> Callable[[Tensor], Tensor]:
    """Return a function that fills a tensor by N(0, sigma / sqrt(2 num_layers)), for layers on a residual stream."""
    return init_method_normal(sigma / math.sqrt(2.0 * num_layers))


def attention_mask_func(attention_scores: Tensor, attention_mask: Tensor) -> Tensor:
    """Set the scores of hidden keys (mask True) to -10000 in place, and return the scores."""
    return attention_scores.masked_fill_(attention_mask, -10000.0)


def gpu_autocast_ctx(**settings: Any) -> torch.amp.autocast:
    """Return `torch.amp.autocast` for the default device: CUDA, or the CPU on a machine without a GPU.

    Args:
        settings: Keywords of `torch.amp.autocast`, such as `dtype` and `enabled`.
    """
    settings.setdefault("device_type", canonical_device("cuda").type)
    return torch.amp.autocast(**settings)


def torch_get_autocast_gpu_dtype() -> torch.dtype:
    """Return the dtype that `gpu_autocast_ctx` computes in unless it is given another."""
    return torch.get_autocast_dtype(canonical_device("cuda").type)


def nvtx_range_push(msg: str) -> None:
    """Begin a profiler range; does nothing without CUDA."""
    if torch.cuda.is_available():
        torch.cuda.nvtx.range_push(msg)


def nvtx_range_pop(msg: str | None = None) -> None:
    """End the innermost profiler range; `msg` only documents the call site."""
    if torch.cuda.is_available():
        torch.cuda.nvtx.range_pop()
