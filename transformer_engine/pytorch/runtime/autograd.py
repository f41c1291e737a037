"""Autograd functions: their base class, torch's autocast and transforms.

torch.autocast chooses the activation dtype, which the layers read before they compute. Inside a computation
it would change more: float32 products from dequantized codes would become bfloat16 products, and
half-precision sums float32 tensors. `disable_autocast` therefore turns it off, in backward passes too.

Kernels read memory. The transforms in torch.func and forward-mode differentiation pass wrapped
tensors, whose tangents or samples a kernel does not see. `check_transforms` raises instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.utils._pytree import tree_iter

F = TypeVar("F", bound=Callable[..., Any])

# Both queries take less than 0.1 us; entering a context that turns autocast off takes 1 us.
_autocast_is_active = torch._C._is_any_autocast_enabled
_transforms_are_active = torch._C._are_functorch_transforms_active
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # pyright: ignore[reportAttributeAccessIssue]


def disable_autocast(function: F) -> F:
    """Decorate a function that computes with torch.autocast off, whether or not its caller has turned it on.

    No effect while a compiler traces: it may trace a backward pass twice, and the state of the
    first, abandoned trace would then remain active. Traced code calls `matrix_product` instead.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not _autocast_is_active() or torch.compiler.is_compiling():
            return function(*args, **kwargs)
        with torch._C._DisableAutocast():
            return function(*args, **kwargs)

    return cast(F, run)


def matrix_product(a: Tensor, b: Tensor) -> Tensor:
    """Compute a [M, K] @ b [K, N] in their dtype, also in code that a compiler traces under torch.autocast."""
    if torch.compiler.is_compiling() and _autocast_is_active():
        with torch.autocast(a.device.type, enabled=False):
            return torch.mm(a, b)
    return torch.mm(a, b)


def check_transforms(operation: str, *values: Any) -> None:
    """Raise RuntimeError if torch.func transforms a value, or forward mode differentiates it.

    Args:
        operation: Operation name, for the message.
        values: Tensors, tensor containers, and other values, which are ignored.
    """
    level = forward_ad._current_level
    if torch.compiler.is_compiling() or (level < 0 and not _transforms_are_active()):
        return
    for value in tree_iter(values):
        if not isinstance(value, Tensor):
            continue
        if _is_wrapped(value):
            raise RuntimeError(
                f"{operation} does not support the transforms of torch.func (grad, vjp, jvp, vmap, jacrev, ..); "
                "compute gradients by torch.autograd.grad or backward(), and pass a batch as leading dimensions"
            )
        if level >= 0 and forward_ad.unpack_dual(value).tangent is not None:
            raise RuntimeError(
                f"{operation} does not support forward-mode differentiation; compute gradients in reverse mode, by "
                "torch.autograd.grad or backward()"
            )


if TYPE_CHECKING:

    class TorchFunction(torch.autograd.Function):
        """torch.autograd.Function, typed so that subclasses name their arguments and gradients."""

        @staticmethod
        def forward(*args: Any, **kwargs: Any) -> Any: ...

        @staticmethod
        def backward(*args: Any, **kwargs: Any) -> Any: ...

        @staticmethod
        def jvp(*args: Any, **kwargs: Any) -> Any: ...

        @classmethod
        def apply(cls, *args: Any, **kwargs: Any) -> Any: ...

else:
    TorchFunction = torch.autograd.Function


class Function(TorchFunction):
    """Base class for this package's autograd functions, whose passes run with torch.autocast off.

    Attributes:
        OPERATION: Name in messages, by default the argument of `once_differentiable` or the class name.
        KEEPS_AUTOCAST: The passes call user code, which runs under the user's torch.autocast.
    """

    OPERATION: str = ""
    KEEPS_AUTOCAST = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in ("forward", "backward"):
            if name in vars(cls) and not cls.KEEPS_AUTOCAST:
                # A metaclass may watch assignments by users; this one is not by a user.
                type.__setattr__(cls, name, staticmethod(disable_autocast(getattr(cls, name))))
        if "OPERATION" not in vars(cls):
            operation_name = getattr(cls.backward, "once_differentiable", cls.__name__.lstrip("_"))
            type.__setattr__(cls, "OPERATION", operation_name)

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Compute the function, as a node in autograd's graph; see `check_transforms`."""
        if _transforms_are_active() or forward_ad._current_level >= 0:
            return cls._apply_inside_transform(args)
        return super().apply(*args)

    @classmethod
    def _apply_inside_transform(cls, args: tuple[Any, ...]) -> Any:
        """Compute `apply` while a transform is active that transforms none of the arguments."""
        check_transforms(cls.OPERATION, args)
        if not _transforms_are_active():
            return super().apply(*args)
        with enable_single_level_autograd_function():  # torch's apply would raise an error
            return super(torch.autograd.Function, cls).apply(*args)  # pyright: ignore[reportAttributeAccessIssue]


def is_forward_mode() -> bool:
    """Return whether a forward-mode differentiation level is active."""
    return forward_ad._current_level >= 0


def is_inside_transform() -> bool:
    """Return whether a torch.func transform (grad, vmap, ...) is active."""
    return _transforms_are_active()


class _Product(Function):
    """a @ b; the smaller leading shape is broadcast."""

    OPERATION = "a product"

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_a = multiply_without_autocast(grad_output, b.transpose(-1, -2)).sum_to_size(
                a.shape
            )
        if ctx.needs_input_grad[1]:
            grad_b = multiply_without_autocast(a.transpose(-1, -2), grad_output).sum_to_size(
                b.shape
            )
        return grad_a, grad_b


def multiply_without_autocast(a: Tensor, b: Tensor) -> Tensor:
    """Compute a @ b; the backward pass that autograd records runs with torch.autocast off.

    torch's own node would multiply in the autocast dtype that is active during the backward pass.
    """
    records = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
    if not records or torch.compiler.is_compiling() or _transforms_are_active():
        return a @ b
    return _Product.apply(a, b)


def is_first_run() -> bool:
    """Return whether an autograd function computes its forward pass, such as the first run of a reentrant checkpoint.

    torch disables gradients and forward-mode gradients there, for checkpoints in every library;
    `torch.no_grad()` leaves the second mode enabled, and inference mode admits no backward pass.
    """
    return not torch.is_grad_enabled() and gradients_expected(training=False)


def gradients_expected(training: bool) -> bool:
    """Return whether a call without recorded gradients may have a second run with them, whose results must be equal.

    True for modules in training mode and for the first run of a reentrant checkpoint, outside inference mode.
    """
    if torch.compiler.is_compiling():
        return training  # the compiler traces neither mode
    return (
        training or not torch._C._is_fwd_grad_enabled()
    ) and not torch.is_inference_mode_enabled()
