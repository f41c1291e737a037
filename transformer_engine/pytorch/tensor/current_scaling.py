"""Mixins for quantizers that scale a tensor by its own maximum: recording the last scale, reduction over a group."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..fast.symbols import Symbol
from ..primitives.quantize import Quantized
from ..runtime.device import canonical_device
from .elements import check_scalar


class RecordsScale:
    """Two buffers that record what `quantize` and `update_quantized` computed last.

    Both are allocated when either is first read, and record from then on, so that a quantizer does no extra
    work before its buffers are read. Products inside layers do not write them.
    """

    device: torch.device | str | None
    _recorded: tuple[Tensor, Tensor] | None = None

    @property
    def amax(self) -> Tensor:
        """max|x| over the last tensor, float32 [1]; 0 before."""
        return self._buffers()[0]

    @amax.setter
    def amax(self, amax: Tensor) -> None:
        """Record maxima in another tensor from now on."""
        self._record_scale(amax, self._buffers()[1])

    @property
    def scale(self) -> Tensor:
        """The factor that the values of the last tensor were multiplied by, float32 [1]; 1 before."""
        return self._buffers()[1]

    @scale.setter
    def scale(self, scale: Tensor) -> None:
        """Record scales in another tensor from now on."""
        self._record_scale(self._buffers()[0], scale)

    def _record_scale(self, amax: Tensor, scale: Tensor) -> None:
        check_scalar("amax", amax)
        check_scalar("scale", scale)
        self._recorded = (amax, scale)

    def copy(self) -> Any:
        """Return a quantizer whose usages can change alone, with copied buffers."""
        twin: Any = super().copy()  # pyright: ignore[reportAttributeAccessIssue]
        if self._recorded is not None:
            amax, scale = self._recorded
            twin._recorded = (amax.clone(), scale.clone())
        return twin

    def _buffers(self) -> tuple[Tensor, Tensor]:
        if self._recorded is None:
            device = canonical_device(self.device)
            self._recorded = (
                torch.zeros(1, dtype=torch.float32, device=device),
                torch.ones(1, dtype=torch.float32, device=device),
            )
        return self._recorded

    def record(self, quantized: Quantized) -> None:
        """Write the maximum and the scale of a quantized matrix, if the buffers have been read."""
        if self._recorded is None:
            return
        amax, scale = self._recorded
        inverse = quantized.scale_t if quantized.scale is None else quantized.scale
        largest = quantized.amax_t if quantized.amax is None else quantized.amax
        if inverse is not None and largest is not None:
            scale.copy_(inverse.reshape(1).reciprocal())
            amax.copy_(largest.reshape(1))


Q = TypeVar("Q", bound="ReducesMaximum")


class ReducesMaximum:
    """with_amax_reduction: maxima are those over amax_reduction_group, so that all shards get the same scale."""

    with_amax_reduction: bool
    amax_reduction_group: torch.distributed.ProcessGroup | None

    def with_reduction_group(self: Q, group: torch.distributed.ProcessGroup) -> Q:
        """Return this quantizer, or a copy of it that reduces over the group."""
        if self.with_amax_reduction and self.amax_reduction_group is group:
            return self
        copied = copy.copy(self)
        copied.with_amax_reduction, copied.amax_reduction_group = True, group
        return copied

    def reduce_amax(self, maxima: torch.Tensor) -> torch.Tensor:
        """Replace this rank's shard maxima by the group's maxima."""
        return reduce_maxima(maxima, self.amax_reduction_group)

    def __getstate__(self) -> dict[str, Any]:
        # A process group lives as long as its process.
        return self.__dict__ | {"amax_reduction_group": None, "with_amax_reduction": False}


def reduce_maxima(maxima: Any, group: Any, matrix: Any = None) -> Any:
    """Replace maxima by the maxima over the ranks of a group, in place, and return them.

    Args:
        maxima: Tensor, or a symbol for one.
        group: Process group.
        matrix: The matrix whose maxima these are; a symbol while the pass of a layer is traced.
    """

    def reduce(tensor: Tensor) -> tuple[()]:
        torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX, group=group)
        return ()

    listed = next((value for value in (maxima, matrix) if type(value) is Symbol), None)
    if listed is None:
        reduce(maxima)
    else:
        listed.instructions.apply(reduce, [maxima], [])
    return maxima


def all_reduce_maxima(maxima: Sequence[Any], group: Any, elements: int) -> tuple[Any, ...]:
    """Return maxima over the ranks of a group, by one collective for all.

    Args:
        maxima: Tensors float32 [1], or symbols for such tensors.
        group: Process group.
        elements: Number of elements in the collective, the same on every rank. A rank with fewer
            maxima adds zeros, which leave the maxima of other ranks unchanged.

    Returns:
        float32 [1] for each element.
    """
    first = maxima[0]
    reduce = functools.partial(_all_reduce_joined, group, elements)
    if type(first) is Symbol:
        return tuple(first.instructions.apply(reduce, maxima, [first.layout] * elements))
    return reduce(*maxima)


def _all_reduce_joined(group: Any, elements: int, *maxima: Tensor) -> tuple[Tensor, ...]:
    zeros = [torch.zeros_like(maxima[0])] * (elements - len(maxima))
    joined = torch.cat([*maxima, *zeros])
    torch.distributed.all_reduce(joined, op=torch.distributed.ReduceOp.MAX, group=group)
    # Clone: elements of `joined` after the first are not aligned to 16 bytes, which kernels rely on.
    return tuple([maximum.clone() for maximum in joined.split(1)])
