"""The settings of a grouped linear layer's call: its kind, its numbers of rows, and parameters that are one stack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..primitives.grouped_gemm import Groups
from ..primitives.grouped_quantize import GroupedQuantized
from ..tensor.quantized_tensor import QuantizedTensorStorage, storage_of
from ..tensor.quantizer import Quantizer
from .caller_buffers import NO_BUFFERS, CallerBuffers
from .grouped_quantizer import GroupedQuantizer, grouped
from .linear_spec import LinearSpec
from .main_grad import main_grad_of
from .scale_update import ScaleUpdate
from .weight_gradient import WeightGradient


class GroupedQuantizers(NamedTuple):
    """The quantizers of all groups as one for each tensor; None, all three, to multiply unquantized."""

    input: GroupedQuantizer | None = None
    weight: GroupedQuantizer | None = None
    grad_output: GroupedQuantizer | None = None

    @classmethod
    def merged(
        cls, inputs: Sequence[Quantizer], weights: Sequence[Quantizer], grad_outputs: Sequence[Quantizer]
    ) -> GroupedQuantizers:
        """Return the quantizers of each tensor of all groups as one; none if those of some tensor cannot be merged."""
        made = cls(grouped(inputs, False), grouped(weights, True), grouped(grad_outputs, False))
        return cls() if None in made else made

    @property
    def multiple(self) -> int:
        """Divisor of the groups' numbers of rows, and of the extents of weights."""
        return 1 if self.input is None else self.input.multiple

    def fit(self, splits: Sequence[int] | Tensor) -> bool:
        """Return whether the format supports the groups' numbers of rows, of which those of a tensor are unknown."""
        return self.multiple == 1 or (
            not isinstance(splits, Tensor) and not any(rows % self.multiple for rows in splits)
        )


@dataclass(frozen=True)
class GroupedSpec:
    """The settings of a kind of call of a grouped linear layer; they do not depend on the groups' numbers of rows.

    Attributes:
        groups: Spec of each group's product.
        unquantized: The same in high precision, for groups whose numbers of rows the format does not support; empty
            if nothing is quantized.
        layer: Settings that all groups have in common; a gradient is needed if some group needs it.
        extents: Extents (N, K) of a weight.
        stacked_weight: The weights of all groups are one parameter [n, N, K].
        stacked_bias: The biases of all groups are one parameter [n, N].
        together: The call may be computed in one launch per step.
        request: The request of `grouped_request.TABLE` without the number of rows; None while a compiler traces.
        quantizers: The quantizers of all groups as one; no quantizers if they cannot be merged.
        needs_grad: Some tensor needs a gradient.
        scale_update: What delayed scaling updates after the backward pass.
        inspected: Results that the inspector of some group reads or replaces.
    """

    groups: tuple[LinearSpec, ...]
    unquantized: tuple[LinearSpec, ...]
    layer: LinearSpec
    extents: tuple[int, int]
    stacked_weight: bool
    stacked_bias: bool
    together: bool
    request: Any
    quantizers: GroupedQuantizers
    needs_grad: bool
    scale_update: ScaleUpdate | None
    inspected: tuple[str, ...] = ()


@dataclass(eq=False)
class GroupedCall:
    """One call of a grouped linear layer, with the attributes of a `LayerSpec`.

    It is made in every call and not frozen, because frozen fields take longer.

    Attributes:
        spec: Its settings.
        groups: Spec of each group's product in this call.
        rows: Number of rows of each group; not read if `layout` is given.
        layout: The groups on the device, for one launch per step; None to loop over the groups.
        buffers: Buffers of the caller for the results.
        cached: All weights as quantized in the module's cache, for one launch per step; None if not cached.
        unassigned: Rows behind those of the groups; results are zero there. Not read if `layout` is given.
        clears: With `layout`, results are zero in rows behind those of the groups; otherwise they are undefined there.
    """

    spec: GroupedSpec
    groups: tuple[LinearSpec, ...]
    rows: tuple[int, ...] = ()
    layout: Groups | None = None
    buffers: CallerBuffers = NO_BUFFERS
    cached: GroupedQuantized | None = None
    unassigned: int = 0
    clears: bool = False

    @property
    def scale_update(self) -> ScaleUpdate | None:
        return self.spec.scale_update

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the results, which steps shared with other layers read."""
        return self.groups[0].dtype

    # Numbers of rows change from call to call, so a compiled pass would serve one call only.
    compiled = None
    referenced_tensors = ()

    def rows_of(self, x: Any) -> Sequence[Any]:
        """Return each group's rows of a matrix; values that are given per group are returned unchanged."""
        if isinstance(x, list):
            return x
        return (x[: x.shape[0] - self.unassigned] if self.unassigned else x).split(self.rows)

    def joined(self, parts: list[Tensor], out: Tensor | None = None) -> Tensor:
        """Return the groups' matrices one after another, and zeros in rows of no group."""
        if self.unassigned:
            parts = [*parts, parts[0].new_zeros(self.unassigned, parts[0].shape[1])]
        return torch.cat(parts) if out is None else torch.cat(parts, out=out)


def members_of(stack: Any) -> list[Any]:
    """Return the n matrices, or vectors, of a stack, as views; storages where it is quantized. A list is unchanged."""
    if isinstance(stack, list):
        return stack
    if isinstance(stack, QuantizedTensorStorage):
        return storage_of(stack).members()  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
    return list(stack.unbind(0))


def stacked_gradient(members: Sequence[Tensor | None], gradient: WeightGradient) -> Tensor | None:
    """Return the gradient of a stack: that of its members, or the placeholder of one that went to `main_grad`."""
    given = [member for member in members if member is not None]
    if given:
        return torch.stack(given)
    if not gradient.fused:
        return None
    whole = tuple([member.whole for member in gradient.parameters])
    return WeightGradient(whole, True)._placeholder(whole[0].dtype)


class StackMember:
    """stack[i] as a separate parameter, for the accumulation of its gradient."""

    __slots__ = ("_index", "whole")

    def __init__(self, whole: Any, index: int):
        self.whole = whole
        self._index = index

    @property
    def position(self) -> tuple[Any, int]:
        """The stack and the index in it, which identify the member."""
        return self.whole, self._index

    @property
    def shape(self) -> torch.Size:
        return self.whole.shape[1:]

    @property
    def device(self) -> torch.device:
        return self.whole.device

    @property
    def requires_grad(self) -> bool:
        return self.whole.requires_grad

    @property
    def overwrite_main_grad(self) -> bool:
        return getattr(self.whole, "overwrite_main_grad", False)

    @property
    def main_grad(self) -> Tensor:
        return main_grad_of(self.whole)[self._index]

    @property
    def grad(self) -> Tensor | None:
        return None if self.whole.grad is None else self.whole.grad[self._index]

    @grad.setter
    def grad(self, gradient: Tensor) -> None:
        if self.whole.grad is None:
            self.whole.grad = torch.zeros(self.whole.shape, dtype=gradient.dtype, device=gradient.device)
        self.whole.grad[self._index] = gradient
