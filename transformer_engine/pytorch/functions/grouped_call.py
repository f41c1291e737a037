"""Settings for a grouped linear call: its kind, its row counts, and parameters that are one stack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..primitives.grouped_gemm import Groups
from ..primitives.grouped_quantize import GroupedQuantized
from ..tensor.quantized_tensor import QuantizedTensorStorage, get_storage
from ..tensor.quantizer import Quantizer
from .caller_buffers import NO_BUFFERS, CallerBuffers
from .grouped_quantizer import GroupedQuantizer, grouped
from .linear_spec import LinearSpec, unsupported_product_reason
from .main_grad import find_main_grad
from .scale_update import ScaleUpdate
from .weight_gradient import WeightGradient


class GroupedQuantizers(NamedTuple):
    """Quantizers for all groups as one per tensor; None, all three, to multiply unquantized."""

    input: GroupedQuantizer | None = None
    weight: GroupedQuantizer | None = None
    grad_output: GroupedQuantizer | None = None

    @classmethod
    def merged(
        cls,
        inputs: Sequence[Quantizer],
        weights: Sequence[Quantizer],
        grad_outputs: Sequence[Quantizer],
    ) -> GroupedQuantizers:
        """Return the quantizers per tensor for all groups as one; none if some tensor's quantizers cannot be merged."""
        groups = cls(grouped(inputs, False), grouped(weights, True), grouped(grad_outputs, False))
        return cls() if None in groups else groups

    @property
    def multiple(self) -> int:
        """Divisor of group row counts and weight extents."""
        return 1 if self.input is None else self.input.multiple

    def fit(self, splits: Sequence[int] | Tensor) -> bool:
        """Return whether the format supports the group row counts; counts in a tensor are unknown."""
        return self.multiple == 1 or (
            not isinstance(splits, Tensor) and not any(rows % self.multiple for rows in splits)
        )


@dataclass(frozen=True)
class GroupedSpec:
    """Settings for a grouped linear call kind; they do not depend on the group row counts.

    Attributes:
        groups: Product spec per group.
        unquantized: The same in high precision, for groups whose row counts the format does not
            support; empty if nothing is quantized.
        layer: Settings that all groups have in common; a gradient is needed if some group needs it.
        extents: Weight extents (N, K).
        stacked_weight: The weights of all groups are one parameter [n, N, K].
        stacked_bias: The biases of all groups are one parameter [n, N].
        together: The call may be computed in one launch per step.
        request: The request to `grouped_request.TABLE` without the row count; None while a compiler traces.
        quantizers: Quantizers for all groups as one; no quantizers if they cannot be merged.
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
    """One grouped linear call, with the attributes of a `LayerSpec`.

    Every call creates one. It is not frozen, because setting frozen fields takes longer.

    Attributes:
        spec: Its settings.
        groups: Product spec per group in this call.
        rows: Rows per group; not read if `layout` is given.
        layout: The groups on the device, for one launch per step; None to loop over the groups.
        buffers: Caller-owned buffers for the results.
        cached: All weights as quantized in the module's cache, for one launch per step; None if not cached.
        unassigned: Rows after the groups' rows; results are zero there. Not read if `layout` is given.
        clears: With `layout`, results are zero in rows after the groups' rows; otherwise they are undefined there.
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
        """Result dtype, which steps shared with other layers read."""
        return self.groups[0].dtype

    # Row counts change from call to call, so a compiled pass would serve one call only.
    compiled = None
    cached_tensors = ()

    def rows_of(self, x: Any) -> Sequence[Any]:
        """Return each group's matrix rows; values that are given per group are returned unchanged."""
        if isinstance(x, list):
            return x
        return (x[: x.shape[0] - self.unassigned] if self.unassigned else x).split(self.rows)

    def joined(self, parts: list[Tensor], out: Tensor | None = None) -> Tensor:
        """Return the groups' matrices one after another, and zeros in rows outside the groups."""
        if self.unassigned:
            parts = [*parts, parts[0].new_zeros(self.unassigned, parts[0].shape[1])]
        return torch.cat(parts) if out is None else torch.cat(parts, out=out)


def groups_of_rows(
    spec: GroupedSpec, rows: Sequence[int], warn: Callable[[str], object]
) -> tuple[LinearSpec, ...]:
    """Return the product spec per group, in high precision where the format does not support the group's rows.

    Args:
        spec: The settings.
        rows: Rows per group.
        warn: Called with the reason for each group in high precision.
    """
    if not spec.unquantized:
        return spec.groups
    n, k = spec.extents
    groups: list[LinearSpec] = []
    for group, unquantized, m in zip(spec.groups, spec.unquantized, rows, strict=True):
        quantizers = group.input_quantizer, group.weight_quantizer, group.grad_output_quantizer
        reason = unsupported_product_reason(quantizers, m, k, n)
        if reason is not None:
            warn(reason)
        groups.append(group if reason is None else unquantized)
    return tuple(groups)


def stack_members(stack: Any) -> list[Any]:
    """View the n matrices, or vectors, in a stack; storages where it is quantized. A list is unchanged."""
    if isinstance(stack, list):
        return stack
    if isinstance(stack, QuantizedTensorStorage):
        return get_storage(stack).members()  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
    return list(stack.unbind(0))


def stack_gradient(members: Sequence[Tensor | None], gradient: WeightGradient) -> Tensor | None:
    """Return the gradient of a stack: of its members, or the placeholder for one that went to `main_grad`."""
    present = [member for member in members if member is not None]
    if present:
        return torch.stack(present)
    if not gradient.fused:
        return None
    parameters = tuple([member.whole for member in gradient.parameters])
    return WeightGradient(parameters, True)._placeholder(parameters[0].dtype)


class StackMember:
    """stack[i] as a separate parameter, for accumulating its gradient."""

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
        return find_main_grad(self.whole)[self._index]

    @property
    def grad(self) -> Tensor | None:
        return None if self.whole.grad is None else self.whole.grad[self._index]

    @grad.setter
    def grad(self, gradient: Tensor) -> None:
        if self.whole.grad is None:
            self.whole.grad = torch.zeros(
                self.whole.shape, dtype=gradient.dtype, device=gradient.device
            )
        self.whole.grad[self._index] = gradient
