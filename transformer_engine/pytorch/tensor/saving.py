"""Quantized tensors through autograd: taken apart for `save_for_backward`, and restored in the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .construction import check_objects
from .storage.quantized_tensor_storage import QuantizedTensorStorage


def prepare_for_saving(
    *tensors: Tensor | QuantizedTensorStorage | None,
) -> tuple[list[Tensor | None], list[QuantizedTensorStorage | None]]:
    """Take tensors apart into plain tensors, which `save_for_backward` accepts, and the objects that hold the rest.

    A storage is emptied. A QuantizedTensor keeps its payload; its object is a storage that shares the payload.

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
    """Put the plain tensors of `prepare_for_saving` back into its objects, in order.

    Args:
        tensors: The objects.
        saved_tensors: The plain tensors, possibly followed by others.
        return_saved_tensors: Also return the tensors that no object took.
    """
    check_objects(tensors)
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
    ctx.tensor_objects = None  # the objects hold the tensors from here on, and would outlive the backward
    return restored
