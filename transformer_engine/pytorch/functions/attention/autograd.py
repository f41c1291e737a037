"""Differentiable attention for one `AttentionCall`: plain passes, their autograd nodes, and `attend` around both.

`Passes.forward` and `attention_backward` compute one call on plain tensors; a schedule over
several key blocks calls them per block. The nodes are shells around them. Under an attention layer,
`_ProjectedAttention` joins the q, k and v gradients into the gradient of their projection, so that
neither the projection views nor their gradients are graph nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ...distributed.recompute import checkpoint as recompute_checkpoint
from ...primitives.attention import reference
from ...primitives.attention.call import (
    Attended,
    AttentionCall,
    AttentionInputs,
    AttentionResult,
    Gradients,
)
from ...primitives.attention.operators import BIAS, SINK, as_traced
from ...primitives.attention.packed import zero_padding
from ...primitives.attention.passes import Bound, Differentiable, Passes
from ...runtime.autograd import Function, check_transforms, disable_autocast, is_forward_mode
from ...runtime.double_backward import is_recorded, once_differentiable, replay
from ..saving import take_saved
from ..split_heads import join_gradients, split_heads, split_views, splits_into_views
from .fp8 import RecomputedFP8Attention
from .fp8_attention import FP8Attention

# AttentionInputs begins with q, k and v.
_QKV = 3


def attention_backward(
    passes: Passes,
    call: AttentionCall,
    inputs: AttentionInputs,
    attended: Attended,
    grad_output: Tensor,
    into: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Gradients:
    """Compute the gradients of q, k, v, bias and sink.

    Args:
        passes: The passes of the backend that computed the forward pass.
        call: The forward-pass call.
        inputs: Its tensors.
        attended: Its results. A merged output and log-sum-exp may replace the results of one block: the gradients
            then belong to the block's share of the merged attention.
        grad_output: Output gradient, [.., h, d_v] or [.., h * d_v].
        into: Buffers to which the gradients of q, k and v are written; only for passes with `backward_into`.
    """
    shape = (*inputs.q.shape[:-1], call.head_dim_v)
    attended = Attended(attended.output.view(shape), attended.lse, attended.rng_state)
    # Contiguous like the output: some kernels assume so, and return wrong gradients otherwise.
    grad_output = grad_output.contiguous().view(shape)
    if into is None:
        return passes.backward(call, inputs, attended, grad_output)
    assert passes.backward_into is not None
    return passes.backward_into(call, inputs, attended, grad_output, into)


class Projection(NamedTuple):
    """A projection x [.., (h + 2 g) d] whose heads are q, k and v, and whether heads are interleaved by group."""

    x: Tensor
    interleaved: bool


class AttentionExecution(NamedTuple):
    """Random state and recomputation for an attention.

    Attributes:
        tracker: Returns the random state tracker in whose fork() the attention runs; None without a fork.
        recompute: The backward pass computes the attention again.
        tp_group: Tensor-parallel group for the tracker.
    """

    tracker: Callable[[], Any] | None
    recompute: bool
    tp_group: Any


# What `attend` can run. The plain callable is an attention that is differentiable by itself, such as
# context-parallel attention.
Attending = (
    Bound
    | FP8Attention
    | RecomputedFP8Attention
    | Callable[[AttentionCall, AttentionInputs], AttentionResult]
)


@disable_autocast
def attend(
    backend: Attending,
    call: AttentionCall,
    inputs: AttentionInputs,
    projection: Projection | None = None,
    execution: AttentionExecution | None = None,
) -> AttentionResult:
    """Compute an attention, differentiable in q, k, v, bias and sink if the call needs gradients.

    Args:
        backend: Backend that is bound to the call, or its FP8 attention.
        call: Attention description.
        inputs: Call tensors. With a projection, q, k and v are views of it without autograd history.
        projection: The projection, which requires a gradient.
        execution: Random state and recomputation; None for neither.
    """
    if projection is not None:
        passes = backend if execution is None and type(backend) is Passes else None
        if (
            execution is None
            and isinstance(backend, Differentiable)
            and backend.as_passes is not None
        ):
            passes = backend.as_passes(call, inputs)
        if passes is not None:
            x, interleaved = projection
            rest = inputs[_QKV:]
            for tensor in rest:  # any() over a generator takes 1.3 us longer in every call
                if tensor is not None:
                    break
            else:
                rest = ()
            return AttentionResult(
                *_ProjectedAttention.apply(passes, call, interleaved, inputs, x, *rest)
            )
        heads = split_heads(
            projection.x, call.heads, call.groups, call.head_dim_qk, projection.interleaved
        )
        inputs = AttentionInputs(*heads, *inputs[_QKV:])
    if execution is not None:
        tracker, recompute, tp_group = execution

        def run(*tensors: Tensor | None) -> AttentionResult:
            with nullcontext() if tracker is None else tracker().fork():
                return attend(backend, call, AttentionInputs(*tensors))  # pyright: ignore[reportArgumentType]

        if not recompute:
            return run(*inputs)
        if tracker is None:
            return torch_checkpoint(run, *inputs, use_reentrant=False)
        return recompute_checkpoint(
            run, *inputs, get_rng_state_tracker=tracker, tp_group=tp_group, use_reentrant=False
        )
    if type(backend) is Passes and call.needs_gradient:
        return AttentionResult(*_CoreAttention.apply(backend, call, *inputs))
    if isinstance(backend, Differentiable):
        # torch's own attention has no forward mode; reverse-mode transforms work
        if is_forward_mode():
            check_transforms(_CoreAttention.OPERATION, inputs)
        return backend.run(call, inputs)
    check_transforms(_CoreAttention.OPERATION, inputs)
    return backend(call, inputs)


class _CoreAttention(Function):
    """Autograd node around a backend's two passes."""

    OPERATION = "attention"

    @staticmethod
    def forward(ctx: Any, passes: Passes, call: AttentionCall, *tensors: Any) -> Any:
        attended = passes.forward(call, AttentionInputs(*tensors))
        # reshape of a fresh tensor: for an output that is a view, torch.compile in torch 2.11 gives zero gradients
        shape = attended.output.shape
        output = attended.output.reshape(*shape[:-2], shape[-2] * shape[-1])
        ctx.passes, ctx.call = passes, call
        ctx.save_for_backward(*tensors, output, attended.lse, attended.rng_state)
        if attended.max_logit is not None:
            ctx.mark_non_differentiable(attended.max_logit)
        return output, attended.max_logit

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, *_: Any) -> Any:
        if not is_recorded() or ctx.call.dropout > 0.0:
            return _gradients(ctx, grad_output)
        call = ctx.call
        *tensors, _, _, _ = ctx.saved_tensors

        def attention(*tensors: Any) -> Tensor:
            return reference.forward(call, AttentionInputs(*tensors)).output.flatten(-2)

        # Recompute the attention with dense matrices in torch operations, which autograd can differentiate
        # again. A dropout mask is drawn inside a kernel, which these operations cannot repeat.
        return None, None, *replay(attention, tensors, grad_output)


@once_differentiable("attention with dropout")
def _gradients(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
    *tensors, output, lse, rng_state = ctx.saved_tensors
    passes = as_traced(ctx.passes) if torch.compiler.is_compiling() else ctx.passes
    inputs, attended = AttentionInputs(*tensors), Attended(output, lse, rng_state)
    gradients = attention_backward(passes, ctx.call, inputs, attended, grad_output)
    of_tensors: list[Tensor | None] = [None] * len(tensors)
    of_tensors[:_QKV] = gradients[:_QKV]
    of_tensors[BIAS], of_tensors[SINK] = gradients.bias, gradients.sink
    return None, None, *of_tensors


class _ProjectedAttention(Function):
    """Autograd node around a projection split and a backend's two passes.

    The last arguments are the `AttentionInputs` after q, k and v, or none if they are all None.
    """

    OPERATION = "attention"

    @staticmethod
    def forward(
        ctx: Any,
        passes: Passes,
        call: AttentionCall,
        interleaved: bool,
        inputs: AttentionInputs,
        x: Tensor,
        *others: Any,
    ) -> Any:
        attended = passes.forward(call, inputs)
        output = attended.output.flatten(-2)
        if attended.max_logit is not None:
            ctx.mark_non_differentiable(attended.max_logit)
        ctx.passes, ctx.call, ctx.interleaved = passes, call, interleaved
        ctx.save_for_backward(x, output, attended.lse, attended.rng_state, *others)
        return output, attended.max_logit

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, *_: Any) -> Any:
        if not is_recorded() or ctx.call.dropout > 0.0:
            return _project_gradients(ctx, grad_output)
        call, interleaved = ctx.call, ctx.interleaved
        x, _, _, _, *rest = ctx.saved_tensors

        def attention(x: Tensor, *others: Any) -> Tensor:
            heads = split_views(x, call.heads, call.groups, call.head_dim_qk, interleaved)
            return reference.forward(call, AttentionInputs(*heads, *others)).output.flatten(-2)

        return None, None, None, None, *replay(attention, [x, *rest], grad_output)


@once_differentiable("attention with dropout")
def _project_gradients(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
    call = ctx.call
    x, output, lse, rng_state, *rest = take_saved(ctx)
    of_others: list[Tensor | None] = [None] * len(rest)
    heads = split_views(x, call.heads, call.groups, call.head_dim_qk, ctx.interleaved)
    inputs, attended = AttentionInputs(*heads, *rest), Attended(output, lse, rng_state)
    joint, into = _joint_gradient(ctx, x, inputs)
    # The joined gradient is as large as x: free x and the output first.
    del x, output, heads, rest
    gradients = attention_backward(ctx.passes, call, inputs, attended, grad_output, into)
    del inputs, attended, into
    if of_others:
        of_others[BIAS - _QKV], of_others[SINK - _QKV] = gradients.bias, gradients.sink
    if joint is None:
        joint = join_gradients(gradients.q, gradients.k, gradients.v, ctx.interleaved)
    return None, None, None, None, joint, *of_others


def _joint_gradient(
    ctx: Any, x: Tensor, inputs: AttentionInputs
) -> tuple[Tensor | None, tuple[Tensor, Tensor, Tensor] | None]:
    """Allocate one buffer for the gradient of a projection x, with views to which dq, dk and dv are written.

    The views avoid the concatenation in `join_gradients`. In packed sequences a backend does not write tokens
    that belong to no sequence, so that these are zeroed here: the trailing ones if all sequences are adjacent
    and share one table of starts, otherwise the whole buffer.

    Returns:
        (buffer, its views for q, k and v). (None, None) if the backend allocates its gradients (all but
        cuDNN), if `split_views` would copy, or if x is not contiguous.
    """
    call, interleaved = ctx.call, ctx.interleaved
    if (
        ctx.passes.backward_into is None
        or not splits_into_views(call.heads, call.groups, interleaved)
        or not x.is_contiguous()
    ):
        return None, None
    one_table = inputs.starts_q is not None and inputs.starts_q is inputs.starts_kv
    if call.packed and (call.padded_between or not one_table):
        joint = torch.zeros_like(x)
    else:
        joint = torch.empty_like(x)
        if call.packed:
            assert inputs.starts_q is not None
            zero_padding(joint, inputs.starts_q)
    return joint, split_views(joint, call.heads, call.groups, call.head_dim_qk, interleaved)
