"""The passes of a rank over the blocks of its queries, with keys that circulate in a ring or are gathered.

Each block is an ordinary attention, computed by the backend of its call. The backward pass of a block reads the
merged output and log-sum-exp, so that its gradients are the block's share. Saved are the rank's own tensors only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ....distributed.faults import check_backward
from ....primitives.attention.call import (
    Attended,
    AttentionCall,
    AttentionInputs,
    AttentionResult,
    Gradients,
)
from ....primitives.attention.operators import BIAS, SINK
from ....runtime.autograd import Function
from ....runtime.double_backward import once_differentiable
from ..autograd import attention_backward
from .blocks import BlockPlan, BoundBlock, block_inputs, choose_rows, tokens_of
from .groups import Ring, all_gather, reduce_scatter
from .layout import TokenOrder
from .merge import MergedAttention, per_token
from .schedule import Part


class BlockPasses:
    """Passes for one block on tensors in the call's dtype."""

    def forward(self, bound: BoundBlock, inputs: AttentionInputs) -> Attended:
        """Compute a block; the log-sum-exp is part of the result."""
        return bound.passes.forward(bound.call, inputs)

    def backward(
        self, bound: BoundBlock, inputs: AttentionInputs, attended: Attended, grad_output: Tensor
    ) -> Gradients:
        """Compute a block's share of the gradients; `attended` is the merged attention for its queries."""
        return attention_backward(bound.passes, bound.call, inputs, attended, grad_output)


PLAIN = BlockPasses()


@dataclass(frozen=True, eq=False)
class BlockAttention:
    """Attention from a rank's queries to the keys on all ranks in a ring, in place of a backend."""

    plan: BlockPlan

    @property
    def name(self) -> str:
        """Backend name for the first block."""
        return next((bound.passes.name for step in self.plan.steps for bound in step), "reference")

    def __call__(self, call: AttentionCall, inputs: AttentionInputs) -> AttentionResult:
        """Return o [.., h * d_v] for the rank's queries, differentiable in q, k, v, bias and sink."""
        if call.needs_gradient:
            return AttentionResult(*_BlockAttention.apply(self.plan, *inputs))
        merged, _, max_logit = forward(self.plan, inputs)
        return AttentionResult(merged.output.to(call.dtype).flatten(-2), max_logit)


def _keys_of_steps(plan: BlockPlan, inputs: AttentionInputs) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the keys and values per step; the next ones are transferred at the same time."""
    k, v, groups, call = inputs.k, inputs.v, plan.groups, plan.call
    if plan.gathers:
        order = TokenOrder(call.kv_format, groups.ring_size, inputs.starts_kv)
        pending = [all_gather(x, groups.ring_group, groups.ring_size) for x in (k, v)]
        if len(plan.steps) > 1:
            yield k, v
        full = [order.whole(wait()) for wait in pending]
        yield full[0], full[1]
        return
    for arrived in Ring(groups).circulate(torch.cat((k.reshape(-1), v.reshape(-1)))):
        yield _split_pair(arrived, k, v)


def _split_pair(flat: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Split a flat tensor into two, shaped like k and v."""
    return flat[: k.numel()].view(k.shape), flat[k.numel() :].view(v.shape)


def forward(
    plan: BlockPlan, inputs: AttentionInputs, passes: BlockPasses = PLAIN
) -> tuple[MergedAttention, list[Tensor | None], Tensor | None]:
    """Compute attention for a rank's queries.

    Returns:
        Output and log-sum-exp, the random state per block, and the largest logit per head over all ranks.
    """
    call, q = plan.call, inputs.q
    tokens = tokens_of(plan, inputs)
    wide = torch.promote_types(call.dtype, torch.float32)
    is_merged = plan.shares_queries or inputs.sink is not None
    output = q.new_zeros((*q.shape[:-1], call.head_dim_v), dtype=wide if is_merged else call.dtype)
    batch = () if call.packed else (call.batch,)
    lse = torch.full(
        (*batch, call.heads, tokens.queries.size), -torch.inf, dtype=wide, device=q.device
    )
    merged, states = MergedAttention(tokens.queries, output, lse), []
    max_logit = (
        q.new_full((call.heads,), -torch.inf, dtype=torch.float32) if call.max_logit else None
    )
    for step, (k, v) in zip(plan.steps, _keys_of_steps(plan, inputs), strict=True):
        for bound in step:
            attended = passes.forward(bound, block_inputs(plan, bound, tokens, inputs, k, v))
            assert attended.lse is not None
            merged.add(bound.block.queries, attended.output, attended.lse)
            states.append(attended.rng_state)
            if max_logit is not None:
                assert attended.max_logit is not None
                max_logit = torch.maximum(max_logit, attended.max_logit.float())
    if max_logit is not None:
        dist.all_reduce(max_logit, dist.ReduceOp.MAX, group=plan.groups.ring_group)
    if inputs.sink is not None:
        merged.add_sink(inputs.sink)
    return merged, states, max_logit


def backward(
    plan: BlockPlan,
    inputs: AttentionInputs,
    output: Tensor,
    lse: Tensor,
    states: Sequence[Tensor | None],
    grad_output: Tensor,
    passes: BlockPasses = PLAIN,
) -> Gradients:
    """Compute the rank's tensor gradients; sums over blocks and ranks are in float32."""
    call, groups, wide = plan.call, plan.groups, torch.promote_types(plan.call.dtype, torch.float32)
    check_backward(groups.ring_group, grad_output)
    tokens = tokens_of(plan, inputs)
    grad_q = torch.zeros_like(inputs.q, dtype=wide, memory_format=torch.contiguous_format)
    grad_bias = None if inputs.bias is None else torch.zeros_like(inputs.bias, dtype=wide)
    remaining = iter(states)
    ring, travelling, of_steps = Ring(groups), None, []
    for step, (k, v) in zip(plan.steps, _keys_of_steps(plan, inputs), strict=True):
        sums = grad_q.new_zeros(k.numel() + v.numel())
        grad_k, grad_v = _split_pair(sums, k, v)
        if plan.gathers:
            of_steps.append((grad_k, grad_v))
        for bound in step:
            queries, last = bound.block.queries, lse.dim() - 1
            attended = Attended(
                tokens.queries.take(output, queries),
                tokens.queries.take(lse, queries, last),
                next(remaining),
            )
            of_block = block_inputs(plan, bound, tokens, inputs, k, v)
            found = passes.backward(
                bound, of_block, attended, tokens.queries.take(grad_output, queries)
            )
            keys = plan.key_rows(bound.block)
            tokens.queries.add(grad_q, queries, found.q)
            tokens.keys.add(grad_k, keys, found.k)
            tokens.keys.add(grad_v, keys, found.v)
            if grad_bias is not None:
                assert found.bias is not None
                _add_columns(choose_rows(grad_bias, queries), bound.block.key_spans, found.bias)
        if not plan.gathers:
            # The sums for a rank's keys follow the keys around the ring, and arrive at their rank after the last step.
            if travelling is not None:
                sums += travelling()
            travelling = ring.send(sums)
    if travelling is not None:
        grad_k, grad_v = _split_pair(travelling(), inputs.k, inputs.v)
    else:
        order = TokenOrder(call.kv_format, groups.ring_size, inputs.starts_kv)
        *own, of_all = of_steps
        grad_k, grad_v = (reduce_scatter(order.parts(x), groups.ring_group) for x in of_all)
        for own_k, own_v in own:
            grad_k, grad_v = grad_k.add_(own_k), grad_v.add_(own_v)
    grad_sink = None
    if inputs.sink is not None:
        # -sum p_sink sum(do o) over the tokens on all ranks, as the head exchange computes it.
        inner = (grad_output.float() * output.float()).sum(dim=-1, keepdim=True)
        share = torch.exp(inputs.sink.float()[:, None] - lse).masked_fill(lse == -torch.inf, 0.0)
        terms = per_token(share, tokens.queries.axis) * inner
        grad_sink = -terms.sum(dim=tuple(range(inner.dim() - 2)))[..., 0]
        dist.all_reduce(grad_sink, group=plan.groups.ring_group)
        grad_sink = grad_sink.to(inputs.sink.dtype)
    return Gradients(
        grad_q.to(call.dtype),
        grad_k.to(call.dtype),
        grad_v.to(call.dtype),
        None if grad_bias is None or inputs.bias is None else grad_bias.to(inputs.bias.dtype),
        grad_sink,
    )


def _add_columns(x: Tensor, spans: Sequence[Part], columns: Tensor) -> None:
    """Add columns to column ranges in a tensor in place."""
    if x.shape[-1] == 1:
        x += columns
        return
    first = 0
    for span in spans:
        size = span.stop - span.first
        x[..., span.first : span.stop] += columns[..., first : first + size]
        first += size


class _BlockAttention(Function):
    """Autograd node for both passes."""

    @staticmethod
    def forward(ctx: Any, plan: BlockPlan, *tensors: Any) -> Any:
        merged, states, max_logit = forward(plan, AttentionInputs(*tensors))
        output = merged.output.to(plan.call.dtype).flatten(-2)
        ctx.plan = plan
        ctx.save_for_backward(*tensors, output, merged.lse, *states)
        if max_logit is not None:
            ctx.mark_non_differentiable(max_logit)
        return output, max_logit

    @staticmethod
    @once_differentiable("context-parallel attention")
    def backward(ctx: Any, grad_output: Tensor, *_: Any) -> Any:
        plan: BlockPlan = ctx.plan
        count, saved = len(AttentionInputs._fields), ctx.saved_tensors
        inputs, (output, lse, *states) = AttentionInputs(*saved[:count]), saved[count:]
        shape = (plan.call.heads, plan.call.head_dim_v)
        output, grad_output = output.unflatten(-1, shape), grad_output.unflatten(-1, shape)
        return None, *of_inputs(backward(plan, inputs, output, lse, states, grad_output))


def of_inputs(found: Gradients) -> list[Tensor | None]:
    """Return the gradients for all tensors in `AttentionInputs`."""
    of_tensors: list[Tensor | None] = [None] * len(AttentionInputs._fields)
    of_tensors[:3] = found[:3]
    of_tensors[BIAS], of_tensors[SINK] = found.bias, found.sink
    return of_tensors
