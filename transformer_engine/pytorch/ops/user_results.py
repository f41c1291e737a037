"""Checks for the results of operations that a user wrote."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...common.numbers import with_article
from ..tensor.quantized_tensor import QuantizedTensorStorage
from .operation import BasicOperation, FusibleOperation


def _error(op: Any, method: str, value: Any, expected: str) -> TypeError:
    returned = "None" if value is None else with_article(type(value))
    return TypeError(f"{type(op).__name__}.{method} returned {returned}; return {expected}")


def _is_tensor(value: Any) -> bool:
    return isinstance(value, (Tensor, QuantizedTensorStorage))


def method_name(op: FusibleOperation, direction: str) -> str:
    """Name of the method that computes a pass of an operation, such as op_forward or fuser_forward."""
    basic_method = f"op_{direction}"
    if not isinstance(op, BasicOperation) or op.num_extra_inputs or op.num_extra_outputs:
        return f"fuser_{direction}"
    overridden = getattr(type(op), f"fuser_{direction}") is not getattr(
        BasicOperation, f"fuser_{direction}"
    )
    return f"fuser_{direction}" if overridden else basic_method


def forward_results(
    op: FusibleOperation, members: Sequence[BasicOperation], returned: Any
) -> tuple[Any, list[tuple[Any, ...]]]:
    """Output and extra outputs, by basic operation, that a user's forward pass returned.

    Raises:
        TypeError: The return value has another structure, or an output is not a tensor.
    """
    method = method_name(op, "forward")
    expected = (
        "a tuple (output, extra outputs), with one sequence of extra outputs for each of the "
        f"{len(members)} basic operations"
    )
    output, extra = _parts(op, method, returned, 2, expected)
    if not _is_tensor(output):
        raise _error(op, method, output, "a tensor as the output")
    return output, _groups(op, method, extra, len(members), expected)


def backward_results(
    op: FusibleOperation, members: Sequence[BasicOperation], returned: Any, needs_input: bool
) -> tuple[Any, list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """Input, parameter and extra input gradients that a user's backward pass returned.

    Args:
        op: The operation.
        members: Its basic operations.
        returned: The return value.
        needs_input: An earlier operation needs the input gradient.

    Raises:
        TypeError: The return value has another structure, or a gradient is neither a tensor nor None.
    """
    method = method_name(op, "backward")
    expected = (
        "a tuple (grad_input, gradients of parameters, gradients of extra inputs); the last two contain one sequence "
        f"for each of the {len(members)} basic operations"
    )
    grad_input, parameters, extra = _parts(op, method, returned, 3, expected)
    if not _is_tensor(grad_input) and (needs_input or grad_input is not None):
        raise _error(op, method, grad_input, "a tensor as the gradient of the input")
    groups = [_groups(op, method, part, len(members), expected) for part in (parameters, extra)]
    for gradient in [gradient for part in groups for group in part for gradient in group]:
        if gradient is not None and not _is_tensor(gradient):
            raise _error(op, method, gradient, "a tensor or None as each gradient")
    for member, group in zip(members, groups[1], strict=True):
        if len(group) != member.num_extra_inputs:
            raise TypeError(
                f"{type(op).__name__}.{method} returned {len(group)} gradients for the {member.num_extra_inputs} "
                f"extra inputs of {type(member).__name__}; return one for each, None where there is none"
            )
    return grad_input, groups[0], groups[1]


def check_gradients(
    op: FusibleOperation,
    gradients: tuple[Any, Sequence[Sequence[Any]], Sequence[Sequence[Any]]],
    input_shapes: Sequence[Sequence[tuple[int, ...] | None]],
    parameter_shapes: Sequence[Sequence[torch.Size]],
    is_first: bool,
) -> None:
    """Check gradient shapes and dtypes that a user's backward pass returned.

    Args:
        op: The operation.
        gradients: `backward_results`.
        input_shapes: Shapes by basic operation, for the main input and each extra input; None where unknown.
        parameter_shapes: Parameter shapes by basic operation.
        is_first: The operation is the chain's first one, so that autograd receives its input gradient.

    Raises:
        TypeError: A gradient is not a floating-point tensor.
        ValueError: A gradient has another shape than its tensor.
    """
    grad_input, parameter_gradients, extra_gradients = gradients
    if input_shapes[0]:  # empty while a compiler traces
        _check_gradient(op, grad_input, input_shapes[0][0], "the input", sums=is_first)
    for i, member in enumerate(op.basic_operations()):
        name = type(member).__name__
        for j, (gradient, shape) in enumerate(
            zip(parameter_gradients[i], parameter_shapes[i], strict=False)
        ):
            _check_gradient(op, gradient, shape, f"parameter {j} of {name}", sums=True)
        for j, (gradient, shape) in enumerate(
            zip(extra_gradients[i], input_shapes[i][1:], strict=False)
        ):
            _check_gradient(op, gradient, shape, f"extra input {j} of {name}", sums=True)


def _check_gradient(
    op: FusibleOperation, gradient: Any, shape: Sequence[int] | None, target: str, sums: bool
) -> None:
    """Check one gradient; autograd sums a gradient over broadcast dimensions where it receives it (`sums`)."""
    if not isinstance(gradient, Tensor):
        return
    source = f"{type(op).__name__}.{method_name(op, 'backward')}"
    if not (gradient.is_floating_point() or gradient.is_complex()):
        raise TypeError(
            f"{source} returned a tensor of {gradient.dtype} as the gradient of {target}; return a floating-point "
            "tensor"
        )
    if shape is None or gradient.shape == tuple(shape):
        return
    if sums and gradient.dim() >= len(shape):
        trailing = gradient.shape[gradient.dim() - len(shape) :]
        if all(size in (1, length) for size, length in zip(shape, trailing, strict=True)):
            return
    raise ValueError(
        f"{source} returned a tensor {list(gradient.shape)} as the gradient of {target}; return a tensor "
        f"{list(shape)}, the shape of {target}"
    )


def _parts(
    op: FusibleOperation, method: str, returned: Any, count: int, expected: str
) -> Sequence[Any]:
    if not isinstance(returned, (tuple, list)):
        raise _error(op, method, returned, expected)
    if len(returned) != count:
        found = f"{with_article(type(returned))} of {len(returned)} values"
        raise TypeError(f"{type(op).__name__}.{method} returned {found}; return {expected}")
    return returned


def _groups(op: Any, method: str, value: Any, count: int, expected: str) -> list[tuple[Any, ...]]:
    if not isinstance(value, Iterable) or isinstance(value, Tensor):
        raise _error(op, method, value, expected)
    groups = list(value)
    if len(groups) != count:
        raise TypeError(
            f"{type(op).__name__}.{method} returned {len(groups)} groups of extra tensors or gradients for {count} "
            f"basic operations; return {expected}"
        )
    for group in groups:
        if not isinstance(group, Iterable) or isinstance(group, Tensor):
            found = "None" if group is None else with_article(type(group))
            raise TypeError(
                f"{type(op).__name__}.{method} returned {found} in place of a sequence; return {expected}"
            )
    return [tuple(group) for group in groups]
