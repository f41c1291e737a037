"""Saved buffers in autograd nodes: operands go through `save_for_backward` as tensors and non-tensor metadata.

The forward functions return the values to save (`linear.py`, `norm_linear.py`, `grouped_linear.py`).

A backward pass that takes the saved tensors from its node holds their last references, and frees them one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from ..fast.symbols import Symbol
from ..offload.marks import active as offloading
from ..offload.marks import await_values, countable, defer_waits, list_tensors, save_deferred
from ..primitives.grouped_gemm import GroupedOperand
from ..primitives.operand import Operand
from ..tensor.custom_operand import CustomOperand
from ..tensor.quantizer import TransposedValues


class DeferredColumns(NamedTuple):
    """Values [M, K] whose column-wise codes [K, M] the backward pass computes; see `deferred_columns`.

    Attributes:
        values: The values, in high precision.
        multiplier_or_amax: float32 [1]: the delayed-scaling multiplier, which changes before the backward pass, or
            max|values|.
    """

    values: Tensor
    multiplier_or_amax: Tensor

    def split_tensors(self) -> tuple[list[Tensor | None], Callable[[list[Any]], tuple[Any, int]]]:
        """Return the tensors, and the function that joins them and returns their number."""
        return [*self], _join_deferred


def _join_deferred(tensors: list[Any]) -> tuple[DeferredColumns, int]:
    return DeferredColumns(*tensors[:2]), 2


# A list holds one value per group in a grouped layer.
Saved = Operand | TransposedValues | DeferredColumns | Tensor | GroupedOperand | list[Any] | None
# Metadata of saved values that are one tensor: for a tensor itself, and for `TransposedValues`.
_VALUES, _TRANSPOSED = True, False
_AS_VALUES = (Tensor, Symbol)
# Operand types with their own `split_tensors`. torch.compile cannot trace a union type inside a tuple.
_OWNED = (CustomOperand, DeferredColumns, *get_args(GroupedOperand))
_PLAIN = frozenset({Tensor, torch.nn.Parameter})
_hooks_on_saved: Any = torch._C._autograd._top_saved_tensors_default_hooks  # pyright: ignore[reportAttributeAccessIssue]


def save_tensors(ctx: Any, tensors: Sequence[Tensor | None]) -> None:
    """Call save_for_backward, for a backward pass that may unpack the tensors early."""
    if offloading.synchronizer is not None or offloading.caches:
        tensors = _with_offloading(tensors)
    ctx.save_for_backward(*tensors)


def _with_offloading(tensors: Sequence[Tensor | None]) -> Sequence[Any]:
    """Return the tensors as an offloading context saves and counts them."""
    if torch.compiler.is_compiling():
        return tensors
    if offloading.synchronizer is not None:
        return [save_deferred(tensor) for tensor in tensors]
    return tensors if _hooks_on_saved(False) is None else [countable(tensor) for tensor in tensors]


def wait_for_saved(*saved: Saved) -> None:
    """Make the computation wait for buffer values from `take_saved(ctx, waits=False)`."""
    if offloading.used and not torch.compiler.is_compiling():
        for operand in saved:
            if isinstance(operand, list):
                wait_for_saved(*operand)
                continue
            for tensor in (
                operand.tensors() if isinstance(operand, CustomOperand) else list_tensors(operand)
            ):
                await_values(tensor)


def pack(*operands: Saved) -> tuple[list[Tensor | None], list[Any]]:
    """Return all tensors in the operands in order, and the non-tensor metadata per operand."""
    tensors: list[Tensor | None] = []
    forms: list[Any] = []
    for operand in operands:
        if type(operand) is Operand:
            codes, scale, tensor_format, amax, dtype = operand
            tensors += (codes, scale, amax)
            forms.append((tensor_format, dtype))
        else:
            parts, form = (
                operand.split_tensors() if isinstance(operand, _OWNED) else _pack_other(operand)  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
            )
            tensors += parts
            forms.append(form)
    return tensors, forms


def _pack_other(operand: Saved) -> tuple[Sequence[Any], Any]:
    """Return the tensors and metadata of a saved value that has no `split_tensors`."""
    if operand is None:
        return (), None
    if isinstance(operand, _AS_VALUES):
        return (operand,), _VALUES
    if isinstance(operand, TransposedValues):
        return (operand.values,), _TRANSPOSED
    assert isinstance(operand, list)
    parts, of_groups = operand, None
    if not _PLAIN.issuperset(map(type, operand)):
        parts, of_groups = pack(*operand)
    return parts, [len(parts), of_groups]


def take_saved(ctx: Any, waits: bool = True) -> tuple[Any, ...]:
    """Return ctx.saved_tensors and clear them in the node, unless the graph is retained for another backward pass.

    torch clears them only after the node's backward function has returned, while everything that it allocated is still
    alive. A backward function that calls this one frees each saved tensor after its last use. With retain_graph=True,
    and in a backward function that is called directly, the node keeps its tensors.

    Args:
        ctx: The node.
        waits: Wait for tensors that were moved to the host. Otherwise call `wait_for_saved` before reading a tensor.
    """
    if torch.compiler.is_compiling():  # a compiler plans memory itself, and traces no such call
        return ctx.saved_tensors
    tensors = ctx.saved_tensors if waits or not offloading.used else _before_transfer(ctx)
    ctx.maybe_clear_saved_tensors()
    return tensors


def _before_transfer(ctx: Any) -> tuple[Any, ...]:
    with defer_waits():
        return ctx.saved_tensors


def unpack(tensors: Sequence[Tensor | None], forms: list[Any]) -> list[Any]:
    """Return the operands that `pack` took apart."""
    operands: list[Any] = []
    start = 0
    for form in forms:
        if isinstance(form, tuple):
            codes, scale, amax = tensors[start : start + 3]
            operands.append(Operand(codes, scale, form[0], amax, form[1]))  # pyright: ignore[reportArgumentType]
            start += 3
        else:
            rest = tensors[start:]
            operand, count = form(list(rest)) if callable(form) else _unpack_other(form, rest)  # pyright: ignore
            operands.append(operand)
            start += count
    return operands


def _unpack_other(form: Any, tensors: Sequence[Any]) -> tuple[Any, int]:
    """Return the value that `_pack_other` took apart into the first tensors, and its tensor count."""
    if form is None:
        return None, 0
    if form is _VALUES:
        return tensors[0], 1
    if form is _TRANSPOSED:
        return TransposedValues(tensors[0]), 1
    count, of_groups = form  # for a list
    members = tensors[:count]
    return [*members] if of_groups is None else unpack(members, of_groups), count
