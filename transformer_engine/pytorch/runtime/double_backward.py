"""Second-order gradients: correct, or an error that names the operation.

A backward pass with create_graph=True is itself recorded by autograd. Autograd records torch
operations, but no kernels, codes or saved copies, and would silently treat those as constants.
Therefore every autograd function in this package uses one of three functions:

* `@once_differentiable("Linear")`: differentiating the gradients raises an error with that name.
* `replay(program, tensors, grads)`: the gradients of the same function, written in torch operations.
* `transposed(there, back, *grads)`: for a backward pass that is linear in its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .autograd import Function, is_inside_transform


def is_recorded() -> bool:
    """Return whether this backward pass is part of an eager graph (create_graph=True); compiled graphs never are."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def once_differentiable(operation: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate `backward` for an autograd function whose gradients cannot be differentiated.

    The gradients do not depend on create_graph. A later backward pass that reaches them, through the gradients from
    which they were computed or through any leaf below the operation, raises RuntimeError with the operation's name. A
    backward pass that does not reach them is unaffected.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(ctx: Any, *grads: Any) -> Any:
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                return _run_recorded(operation, backward, ctx, grads)
            return backward(ctx, *grads)

        guarded.__doc__ = backward.__doc__
        guarded.once_differentiable = operation  # pyright: ignore[reportFunctionMemberAccess]
        return guarded

    return decorate


def _run_recorded(
    operation: str, backward: Callable[..., Any], ctx: Any, grads: Sequence[Any]
) -> tuple[Any, ...] | Any:
    """Run a backward pass that autograd records, whose gradients cannot be differentiated."""
    with torch.no_grad():
        gradients = backward(ctx, *grads)
    return _reject_derivative(operation, gradients, ctx, grads)


def _reject_derivative(operation: str, gradients: Any, ctx: Any, grads: Sequence[Any]) -> Any:
    """Return the gradients of a node behind an autograd node that raises an error.

    Args:
        operation: Operation name, for the error.
        gradients: Gradient, or tuple of gradients.
        ctx: The node that computed them.
        grads: The gradients from which it computed them.
    """
    results = list(gradients) if isinstance(gradients, tuple) else [gradients]
    links = [grad for grad in grads if isinstance(grad, Tensor) and grad.requires_grad]
    links += _leaves_below(ctx)
    places = [i for i, result in enumerate(results) if isinstance(result, Tensor)]
    if links and places:
        guarded_results = _FirstDerivativeOnly.apply(
            operation, [results[i] for i in places], *links
        )
        for i, result in zip(places, guarded_results, strict=True):
            results[i] = result
    return tuple(results) if isinstance(gradients, tuple) else results[0]


def _leaves_below(node: Any) -> list[Tensor]:
    """Return the leaf tensors from which the node's inputs were computed.

    The inputs themselves may not exist any more: the saved tensors can be codes, and keeping the inputs costs memory.
    """
    leaves: list[Tensor] = []
    visited: set[Any] = set()
    waiting = [next_node for next_node, _ in node.next_functions]
    while waiting:
        below = waiting.pop()
        if below is None or below in visited:
            continue
        visited.add(below)
        variable = getattr(below, "variable", None)  # present in nodes that accumulate into a leaf
        if variable is None:
            waiting += [next_node for next_node, _ in below.next_functions]
        else:
            leaves.append(variable)
    return leaves


class _FirstDerivativeOnly(Function):
    """The given gradients, as functions of the links in the graph; their derivative raises an error."""

    @staticmethod
    def forward(
        ctx: Any, operation: str, gradients: list[Tensor], *links: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.operation = operation
        return tuple(gradient.detach() for gradient in gradients)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            f"the gradients of {ctx.operation} have no derivative of their own, and this backward pass "
            "reaches them; compute them with create_graph=False, or this part of the model by plain torch modules"
        )


def reject_second_derivative(operation: str, node: Any, *inputs: Tensor) -> None:
    """Apply `once_differentiable` to a node of torch itself, which computed a function of these inputs."""

    def reject(gradients: tuple[Any, ...], grads: tuple[Any, ...]) -> tuple[Any, ...] | None:
        # torch.func.grad records every backward pass; torch itself raises an error where another one reaches this.
        if not is_recorded() or is_inside_transform():
            return None
        links = [t for t in (*inputs, *grads) if isinstance(t, Tensor) and t.requires_grad]
        places = [i for i, gradient in enumerate(gradients) if gradient is not None]
        results = list(gradients)
        guarded_results = _FirstDerivativeOnly.apply(
            operation, [results[i] for i in places], *links
        )
        for i, result in zip(places, guarded_results, strict=True):
            results[i] = result
        return tuple(results)

    node.register_hook(reject)


def replay(
    program: Callable[..., Tensor | tuple[Tensor, ...]],
    tensors: Sequence[Tensor | None],
    grads: Tensor | Sequence[Tensor],
) -> list[Tensor | None]:
    """Return program(*tensors)'s gradient for each tensor, as a graph; None for tensors without a gradient.

    Args:
        program: The operation in differentiable torch operations.
        tensors: The operation's arguments as saved by the forward pass, which autograd connects with their origin.
        grads: Result gradients.
    """
    with torch.enable_grad():
        # Aliases: if one argument was computed from another one, the gradients remain partial derivatives.
        views = [None if tensor is None else tensor.view_as(tensor) for tensor in tensors]
        outputs = program(*views)
        differentiable = [tensor for tensor in views if tensor is not None and tensor.requires_grad]
        gradients: Iterable[Tensor | None] = torch.autograd.grad(
            outputs, differentiable, grads, create_graph=True, allow_unused=True
        )
    remaining = iter(gradients)
    return [
        next(remaining) if tensor is not None and tensor.requires_grad else None for tensor in views
    ]


def transposed(linear_map: Callable[..., Any], back: Callable[..., Any], *grads: Tensor) -> Any:
    """Return linear_map(*grads), differentiable any number of times: `back` is the transposed map.

    Both functions accept and return one tensor or several.
    """
    return _LinearMap.apply(linear_map, back, *grads)


class _LinearMap(Function):
    @staticmethod
    def forward(
        ctx: Any, linear_map: Callable[..., Any], back: Callable[..., Any], *grads: Tensor
    ) -> Any:
        ctx.there, ctx.back = linear_map, back
        return linear_map(*grads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gradients = _LinearMap.apply(ctx.back, ctx.there, *grads)
        return None, None, *(gradients if isinstance(gradients, tuple) else (gradients,))
