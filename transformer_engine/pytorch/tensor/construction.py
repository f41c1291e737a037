"""Quantized tensor construction: argument checks, strides, straight-through gradients, saving for autograd."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...common.numbers import with_article
from ..runtime.autograd import Function
from ..runtime.checks import extents
from .storage.quantized_tensor_storage import QuantizedTensorStorage


def prepare_for_saving(
    *tensors: Tensor | QuantizedTensorStorage | None,
) -> tuple[list[Tensor | None], list[QuantizedTensorStorage | None]]:
    """Split tensors into plain tensors, which `save_for_backward` accepts, and objects that hold the rest.

    A storage is emptied. A QuantizedTensor keeps its payload; its object is a storage that shares the payload.

    Args:
        tensors: Tensors, storages or None.

    Returns:
        The plain tensors, and one object for each argument (None for a plain tensor), for `restore_from_saved`.
    """
    flat: list[Tensor | None] = []
    objects: list[QuantizedTensorStorage | None] = []
    for tensor in tensors:
        if isinstance(tensor, QuantizedTensorStorage):
            parts, storage = tensor.as_storage().prepare_for_saving()
            flat.extend(parts)
            objects.append(storage)
        else:
            flat.append(tensor)
            objects.append(None)
    return flat, objects


def restore_from_saved(
    tensors: Sequence[QuantizedTensorStorage | None],
    saved_tensors: Sequence[Tensor | None],
    return_saved_tensors: bool = False,
) -> list[Any] | tuple[list[Any], list[Tensor | None]]:
    """Restore plain tensors from `prepare_for_saving` to its objects, in order.

    Args:
        tensors: The objects.
        saved_tensors: The plain tensors, possibly followed by others.
        return_saved_tensors: Also return the tensors that no object took.
    """
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            raise TypeError(
                f"tensors holds {with_article(type(tensor))}; give the objects that prepare_for_saving "
                "returned second, then the saved tensors"
            )
    saved = list(saved_tensors)
    restored: list[Any] = []
    for storage in tensors:
        if storage is None:
            restored.append(saved.pop(0))
        else:
            saved = storage.restore_from_saved(saved)
            restored.append(storage)
    return (restored, saved) if return_saved_tensors else restored


def restore_from_func_ctx(
    ctx: Any, return_saved_tensors: bool = False
) -> list[Any] | tuple[list[Any], list[Tensor | None]]:
    """Restore the tensors that `prepare_for_saving` took apart in the forward of an autograd function.

    Args:
        ctx: The function's context, with `saved_tensors` and `tensor_objects`. `tensor_objects` is set to None.
        return_saved_tensors: Also return the saved tensors that no object took.

    Raises:
        AttributeError: The forward did not assign `ctx.tensor_objects`.
    """
    if getattr(ctx, "tensor_objects", None) is None:
        raise AttributeError(
            "ctx.tensor_objects is not set; assign the objects of prepare_for_saving in forward"
        )
    restored = restore_from_saved(ctx.tensor_objects, ctx.saved_tensors, return_saved_tensors)
    # The objects hold the tensors from here on, and would outlive the backward.
    ctx.tensor_objects = None
    return restored


def check_keywords(cls: type[Any], by_place: tuple[Any, ...]) -> None:
    """Raise TypeError for a class without a payload, and for payload parts that are not keywords."""
    if not hasattr(cls, "STORAGE"):
        raise TypeError(
            f"{cls.__name__} names no STORAGE, the class of its payload; let a custom quantizer return a "
            "QuantizedTensorStorage"
        )
    if len(by_place) > 2 or any(isinstance(value, Tensor) for value in by_place):
        parameters = inspect.signature(cls.STORAGE).parameters.values()
        named = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name != "dtype"]
        keywords = ", ".join(f"{name}=.." for name in named)
        raise TypeError(
            f"{cls.__name__} takes shape and dtype by place and nothing else; give its payload by keyword: {keywords}"
        )


def check_shape(shape: Sequence[int] | None, of_payload: Sequence[int]) -> None:
    """Raise ValueError unless a given shape has as many values as the payload."""
    if shape is None:
        return
    shape = extents("shape", shape)
    if prod(shape) != prod(of_payload):
        raise ValueError(
            f"shape={shape} is of {prod(shape)} values, the payload of {tuple(of_payload)}; give the shape of "
            "the payload's values, or None"
        )


def nominal_strides(stride: Sequence[int] | None, shape: Sequence[int]) -> tuple[int, ...]:
    """Return strides for a shape as a tuple, by default contiguous strides.

    Raises:
        ValueError: There is not one stride for each dimension.
    """
    if stride is not None and len(stride) != len(shape):
        raise ValueError(
            f"stride={tuple(stride)} has {len(stride)} numbers for shape {tuple(shape)}; give one for each dimension"
        )
    if stride is not None:
        return tuple(stride)
    if len(shape) == 2:
        return (max(shape[1], 1), 1)
    if not len(shape):
        return ()
    inner = (max(extent, 1) for extent in reversed(shape[1:]))
    return tuple(itertools.accumulate(inner, int.__mul__, initial=1))[::-1]


class StraightThroughQuantize(Function):
    """quantizer(x), whose gradient is the output's gradient."""

    OPERATION = "a quantizer"

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, quantizer: Any, dtype: torch.dtype | None) -> Any:
        return quantizer._quantize(tensor, dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        return grad_output, None, None


class StraightThroughDequantize(Function):
    """Quantized tensor values in a dtype; the gradient has the tensor's nominal dtype."""

    OPERATION = "dequantize"

    @staticmethod
    def forward(ctx: Any, tensor: Any, dtype: torch.dtype) -> Tensor:
        ctx.dtype = tensor.dtype
        return tensor.decode(dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return grad_output.to(ctx.dtype), None
