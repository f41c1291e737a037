"""Dtypes in which operations read quantized values: the computation dtype instead of the nominal dtype."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map

aten = torch.ops.aten

# Operations without the tag `pointwise` that promote argument dtypes.
_PROMOTING = frozenset({aten.cat.default, aten.stack.default})
_DECODED_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def read_arguments(
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    read: Callable[[Any, torch.dtype | None], Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace the arguments of an operation by their values in the dtype that it computes in.

    An operation that promotes dtypes reads values in the promoted dtype, and a copy in the dtype of
    its target. The nominal dtype would round them first: master weights in float32 would lose bits.
    Tensors that the operation writes to have their nominal dtype.

    Args:
        func: The operation.
        args: Its positional arguments.
        kwargs: Its keywords.
        read: Function of an argument leaf and a dtype, None for the nominal one.
    """
    arguments = func._schema.arguments
    written = {argument.name for argument in arguments if writes(argument)}
    foreach = func.name().startswith("aten::_foreach_")
    dtype = None if foreach else _computation_dtype(func, args, kwargs)

    def values(name: str, argument: Any) -> Any:
        if name in written or not (foreach and isinstance(argument, (list, tuple))):
            return tree_map(lambda leaf: read(leaf, None if name in written else dtype), argument)
        # Each list entry is a separate computation.
        return [
            read(leaf, _computation_dtype(func, *_entry_arguments(args, kwargs, index)))
            for index, leaf in enumerate(argument)
        ]

    positional = tuple(
        values(declared.name, value) for declared, value in zip(arguments, args, strict=False)
    )
    return positional, {name: values(name, argument) for name, argument in kwargs.items()}


def _entry_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any], index: int
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of a foreach operation for one entry: this entry from every list, and the arguments without entries."""

    def entry(argument: Any) -> Any:
        if not isinstance(argument, (list, tuple)):
            return argument
        return argument[index] if index < len(argument) else None

    return [entry(argument) for argument in args], {
        name: entry(argument) for name, argument in kwargs.items()
    }


def decoding_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which values are decoded for an operation: its own floating-point dtype, or float32."""
    return dtype if dtype in _DECODED_DTYPES else torch.float32


def writes(argument: Any) -> bool:
    """Whether an operation writes to an argument in its schema."""
    return argument.alias_info is not None and argument.alias_info.is_write


def _computation_dtype(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> torch.dtype | None:
    """The dtype that an operation reads values in; None for the nominal dtype."""
    if func is aten.copy_.default:
        return args[0].dtype
    dtype_argument = kwargs.get("dtype")
    if isinstance(dtype_argument, torch.dtype) and dtype_argument.is_floating_point:
        return dtype_argument
    foreach = func.name().startswith("aten::_foreach_")
    if not (foreach or torch.Tag.pointwise in func.tags or func in _PROMOTING):
        return None
    tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
    if func is not aten._foreach_copy_.default:
        tensors = [leaf for leaf in tensors if leaf.dim() > 0] or tensors
    return (
        functools.reduce(torch.promote_types, [leaf.dtype for leaf in tensors]) if tensors else None
    )
