"""Caller-owned buffers that receive the output and the input gradient of a grouped layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ...common.numbers import with_article


class CallerBuffers(NamedTuple):
    """Buffers for the output [total, N] and the input gradient [total, K], contiguous; None allocates a new tensor."""

    output: Tensor | None = None
    grad_input: Tensor | None = None

    def with_own_versions(self, inp: Tensor) -> CallerBuffers:
        """Return the buffers, with separate version counters where they are other parts of the input's storage.

        Views of one tensor share a version counter: autograd would take a write to such a buffer for one to the input.
        """
        storage = None if inp.is_meta else inp.untyped_storage().data_ptr()

        def counted(buffer: Tensor | None) -> Tensor | None:
            if buffer is None or storage != buffer.untyped_storage().data_ptr():
                return buffer
            return buffer.data

        return CallerBuffers(counted(self.output), counted(self.grad_input))


NO_BUFFERS = CallerBuffers()


def check_buffers(
    name: str, buffer: Tensor | None, shape: torch.Size, like: Tensor
) -> Tensor | None:
    """Return the buffer as a matrix [total, last dimension].

    Args:
        name: The buffer's name in error messages.
        buffer: The caller's tensor, or None.
        shape: Shape of the result that the buffer receives.
        like: A tensor with the result's dtype and device.

    Raises:
        TypeError: The buffer is not a plain tensor.
        ValueError: The buffer cannot receive a result with this shape, dtype and device.
    """
    if buffer is None:
        return None
    if not isinstance(buffer, Tensor) or type(buffer) is torch.nn.Parameter:
        raise TypeError(f"{name} is {with_article(type(buffer))}; give a plain tensor")
    matrix = (shape[:-1].numel(), shape[-1])
    if tuple(buffer.shape) not in (tuple(shape), matrix):
        raise ValueError(
            f"{name} is {list(buffer.shape)}, the result {list(shape)}; give a buffer of its shape"
        )
    if buffer.dtype != like.dtype or buffer.device != like.device:
        raise ValueError(
            f"{name} is {buffer.dtype} on {buffer.device}, the result {like.dtype} on {like.device}; convert the buffer"
        )
    if not buffer.is_contiguous() or buffer.requires_grad:
        what = "requires a gradient" if buffer.requires_grad else "is not contiguous"
        raise ValueError(f"{name} {what}; give a contiguous buffer, detached")
    return buffer.view(matrix)


def check_separate(
    name: str, buffer: Tensor | None, tensors: Iterable[tuple[str, Tensor | None]]
) -> None:
    """Raise ValueError if the buffer shares memory with any named tensor, which the layer reads."""
    if buffer is None:
        return
    for other_name, other in tensors:
        if other is not None and share_memory(buffer, other):
            raise ValueError(
                f"{name} shares memory with {other_name}, which the forward or backward pass still reads when it "
                f"writes {name}; give a buffer with separate memory, for example torch.empty_like({name})"
            )


def share_memory(buffer: Tensor, other: Tensor) -> bool:
    """Return whether elements of a contiguous buffer and of another tensor use the same byte.

    Views, storage offsets and different storages over one allocation are compared by address. Tensors without an
    address (meta, fake) share nothing.
    """
    if type(other) not in (Tensor, torch.nn.Parameter) or other.is_meta:
        return False
    begin = buffer.data_ptr() - other.data_ptr()
    end = begin + buffer.nbytes
    if end <= 0 or begin == end or not other.numel():
        return False
    if other.is_contiguous():
        return begin < other.nbytes
    element = other.element_size()
    sizes = zip(other.stride(), other.shape, strict=True)
    strides = sorted(
        ((stride * element, size) for stride, size in sizes if size > 1 and stride), reverse=True
    )
    return _meets(begin, end, strides, element)


def _meets(begin: int, end: int, strides: list[tuple[int, int]], element: int) -> bool:
    """Return whether the bytes begin..end meet an element of a tensor at byte 0; strides in bytes, largest first."""
    extent = element + sum(stride * (size - 1) for stride, size in strides)
    if end <= 0 or begin >= extent:
        return False
    if not strides:
        return True
    (stride, size), *inner = strides
    inner_extent = extent - stride * (size - 1)
    # Slice i spans the bytes i * stride .. i * stride + inner_extent; only these slices can meet begin..end.
    first = max(0, (begin - inner_extent) // stride + 1)
    last = min(size - 1, (end - 1) // stride)
    for start in range(first * stride, last * stride + 1, stride):
        if begin <= start < end or _meets(begin - start, end - start, inner, element):
            return True
    return False


def copy_if_overlapping(gradient: Tensor, buffer: Tensor) -> Tensor:
    """Return the output gradient, or a copy where writing the buffer would overwrite it.

    They share memory where one buffer serves two consecutive layers, or where the gradient was computed in place of an
    output that shares memory with the buffer.
    """
    return gradient.clone() if share_memory(buffer, gradient) else gradient


def alias_buffer(buffer: Tensor) -> Tensor:
    """Return an alias for a buffer that has just been written, for autograd to attach its history to.

    The caller's buffer stays without history and can be used again. The alias shares the buffer's version counter, so
    that autograd raises an error if a saved result has been overwritten by a later pass before its backward pass.
    """
    if not buffer.is_inference():
        increment_version(buffer)
    return buffer.detach()
