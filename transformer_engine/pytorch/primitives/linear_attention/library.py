"""Shared code for the library backends: limits, errors for second gradients, tokens after the last packed sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from ...runtime.autograd import Function, check_transforms
from ...runtime.double_backward import once_differentiable
from ..attention.packed import zero_padding
from .request import DeltaInputs, DeltaRequest, DeltaResult

OPERATION = "linear attention by a library"
_TOKENS = 6  # q, k, v, g, beta and w have a token axis


class _Once(Function):
    """Identity for several tensors, whose gradients cannot be differentiated."""

    @staticmethod
    def forward(ctx, cu_seqlens, have_tokens, *tensors):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(cu_seqlens)
        ctx.have_tokens = have_tokens
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable(OPERATION)
    def backward(ctx, *grads):
        (cu_seqlens,) = ctx.saved_tensors
        if cu_seqlens is not None:
            grads = tuple(
                grad if grad is None or not tokens else zero_padded_tokens(grad, cu_seqlens)
                for grad, tokens in zip(grads, ctx.have_tokens, strict=True)
            )
        return None, None, *grads


def differentiable_once(inputs: DeltaInputs) -> DeltaInputs:
    """Return the inputs for a library, whose gradients a second differentiation would wrongly treat as constants.

    A second differentiation raises RuntimeError with the name of the operation, as do the transforms of
    torch.func. Gradients of tokens after the last packed sequence, which libraries do not write, are zero.
    """
    check_transforms(OPERATION, *inputs)
    if not torch.is_grad_enabled():
        return inputs
    places = [i for i, x in enumerate(inputs) if x is not None and x.requires_grad]
    if not places:
        return inputs
    tensors: list[Tensor | None] = list(inputs)
    have_tokens = tuple(i < _TOKENS for i in places)
    recorded: tuple[Tensor, ...] = _Once.apply(
        inputs.cu_seqlens, have_tokens, *(tensors[i] for i in places)
    )
    for i, tensor in zip(places, recorded, strict=True):
        tensors[i] = tensor
    return DeltaInputs(*tensors)  # pyright: ignore[reportArgumentType]


def finish_results(output: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> DeltaResult:
    """Return the results of a library, with zeros for tokens after the last packed sequence."""
    if cu_seqlens is not None:
        # In place, because autograd recorded the output; a copy would leave its padding as it is.
        assert output.is_contiguous(), (
            f"the library returned an output with strides {output.stride()}"
        )
        zero_padded_tokens(output.detach(), cu_seqlens)
    return output, state


def zero_padded_tokens(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Write zeros into x [1, T, ..] from token cu_seqlens[-1] on; x if it is contiguous, otherwise a copy."""
    x = x.contiguous()
    zero_padding(x[0], cu_seqlens)
    return x


def unsupported_by_kernels(request: DeltaRequest) -> str | None:
    """Return the reason why 16-bit kernels on CUDA do not support the tensors of a call; None if they do."""
    if request.device_type != "cuda":
        return f"it needs a CUDA device, the tensors are on {request.device_type}"
    if request.dtype not in (torch.float16, torch.bfloat16):
        return f"the tensors are {request.dtype}; supported: float16 and bfloat16"
    if 0 in request.q or request.v_size == 0 or request.sequences == 0:
        return "there are no tokens, heads or sequences"
    return None
