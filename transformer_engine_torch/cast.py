"""Quantization, dequantization and code transposes, under the extension's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine.common.checks import described
from transformer_engine.common.numbers import to_ints, with_article
from transformer_engine.pytorch.constants import DType, TE_DType_To_Torch
from transformer_engine.pytorch.primitives.quantize import absolute_maximum
from transformer_engine.pytorch.runtime.checks import floating

from .checks import member, output_or_none, quantizer_or_none, sequence, values, with_axes

__all__ = [
    "bgrad_quantize",
    "compute_amax",
    "create_empty_quantized_tensor",
    "dequantize",
    "fp8_transpose",
    "multi_tensor_quantize",
    "quantize",
    "split_quantize",
    "swap_first_dims",
]


def torch_dtype(dtype: DType | int | torch.dtype) -> torch.dtype:
    """Convert an enumeration member, or its number, to torch's dtype."""
    if isinstance(dtype, torch.dtype):
        return dtype
    torch_type = TE_DType_To_Torch.get(member("dtype", DType, dtype))
    if torch_type is None:
        raise ValueError(f"dtype={dtype!r} has no dtype of torch; give another DType")
    return torch_type


def quantize_or_copy(tensor: Tensor, quantizer: Any, output: Any = None) -> Any:
    """Return the tensor as quantized by the quantizer; for None the tensor itself, copied to output if given."""
    if quantizer is not None:
        return quantizer.quantize(tensor, out=output)
    return tensor if output is None else output.copy_(tensor)


def quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    """Quantize a tensor, into output if given; with noop float32 [1] != 0, output is unchanged."""
    if quantizer is None:
        raise TypeError("quantizer=None quantizes nothing; give an instance of a Quantizer")
    quantizer_or_none(quantizer)
    if output is None:
        return quantizer.quantize(tensor)
    return quantizer.update_quantized(tensor, output, noop_flag=noop)


def dequantize(input: Any, otype: DType | int | torch.dtype) -> Tensor:
    """Dequantize a tensor."""
    if not hasattr(input, "get_usages"):
        raise TypeError(
            f"input={described(input)} is {with_article(type(input))}; give a quantized tensor"
        )
    return input.dequantize(dtype=torch_dtype(otype))


def bgrad_quantize(input: Tensor, quantizer: Any) -> list[Any]:
    """Sum input [.., K] over its rows in float32, and quantize it: [sum, quantized input]."""
    quantizer_or_none(quantizer)
    values(input=input)
    with_axes("input", input, 1)
    bias_gradient = (
        input.reshape(-1, input.shape[-1]).sum(dim=0, dtype=torch.float32).to(input.dtype)
    )
    return [bias_gradient, quantize_or_copy(input, quantizer)]


def multi_tensor_quantize(
    tensor_list: Sequence[Tensor], quantizer_list: Sequence[Any]
) -> list[Any]:
    """Quantize every tensor by the quantizer at its index."""
    for name, argument in (("tensor_list", tensor_list), ("quantizer_list", quantizer_list)):
        sequence(name, argument)
    if len(tensor_list) != len(quantizer_list):
        raise ValueError(
            f"{len(tensor_list)} tensors and {len(quantizer_list)} quantizers; give as many of each"
        )
    for quantizer in quantizer_list:
        quantizer_or_none(quantizer, "quantizer_list holds a quantizer that")
    for tensor in tensor_list:
        floating("tensor_list holds a value that", tensor)
    return [
        quantize_or_copy(tensor, quantizer)
        for tensor, quantizer in zip(tensor_list, quantizer_list, strict=True)
    ]


def split_quantize(
    tensor: Tensor,
    split_sections: Sequence[int],
    quantizer_list: Sequence[Any],
    disable_bulk_allocation: bool = False,
) -> list[Any]:
    """Split a tensor [M, K] along its rows and quantize each part.

    Args:
        split_sections: Rows per part. Rows beyond their sum are left out.
        disable_bulk_allocation: Accepted and ignored.

    Raises:
        ValueError: A size is negative, or the sizes add up to more than M rows.
    """
    with_axes("tensor", tensor, 1)
    sizes = to_ints("split_sections", split_sections)
    if sum(sizes) > tensor.shape[0] or min(sizes, default=0) < 0:
        raise ValueError(
            f"split_sections={sizes} must be sizes of at least 0 that add up to at most {tensor.shape[0]} rows"
        )
    return multi_tensor_quantize(tensor[: sum(sizes)].split(sizes, dim=0), quantizer_list)


def create_empty_quantized_tensor(
    quantizer: Any,
    shape: Sequence[int],
    dtype: DType | int | torch.dtype,
    device: torch.device | str | None = None,
    pin_memory: bool = False,
) -> Any:
    """Return a quantized tensor whose codes and scales are uninitialized."""
    if quantizer is None:
        raise TypeError("quantizer=None makes no tensor; give an instance of a Quantizer")
    quantizer_or_none(quantizer)
    return quantizer.make_empty(
        shape, dtype=torch_dtype(dtype), device=device, pin_memory=pin_memory
    )


def compute_amax(input: Tensor, amax: Tensor) -> None:
    """Write max |input| to amax."""
    values(input=input, amax=amax)
    if amax.numel() != 1:
        raise ValueError(f"amax is {list(amax.shape)}; give one element")
    amax.copy_(absolute_maximum(input).reshape(amax.shape))


def fp8_transpose(input: Tensor, dtype: DType | int, out: Tensor | None = None) -> Tensor:
    """Transpose FP8 codes [.., K] to uint8 [K, M]; M is the product of the leading axes."""
    with_axes("input", input, 1)
    if input.element_size() != 1:
        raise TypeError(f"input is {input.dtype}; give codes of one byte, uint8")
    turned = input.reshape(-1, input.shape[-1]).t()
    output_or_none("out", out, turned)
    return turned.contiguous() if out is None else out.copy_(turned)


def swap_first_dims(tensor: Tensor, out: Tensor | None = None) -> Tensor:
    """Swap the first two axes: [a, b, ..] to contiguous [b, a, ..]."""
    with_axes("tensor", tensor, 2)
    turned = tensor.transpose(0, 1)
    output_or_none("out", out, turned)
    return turned.contiguous() if out is None else out.copy_(turned)
