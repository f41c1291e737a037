"""Context parallelism without load balancing: each rank holds a contiguous piece of a packed sequence buffer.

Pieces ignore sequence bounds. Attention is one step: a rank's queries against the gathered keys from all ranks. For
each sequence, the last query in the piece sees the keys up to itself, so that the diagonal ends bottom right.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ....primitives.attention.call import AttentionCall, AttentionInputs, AttentionResult
from ....primitives.attention.choose import choose
from ....primitives.attention.mask import Mask
from ....primitives.attention.passes import Bound
from ....runtime.autograd import Function
from ....runtime.double_backward import once_differentiable
from ....runtime.tracing import run_eagerly
from ..autograd import attend
from .groups import ContextGroups, all_gather, reduce_scatter


class UnsupportedStrategy(AssertionError, ValueError):
    """NO_LOAD_BALANCE does not apply; an AssertionError as in the original, and a ValueError as elsewhere here."""


class Piece(NamedTuple):
    """The sequences in the piece of one rank.

    Attributes:
        lengths_q: Real tokens per sequence in the piece, int32 [b].
        starts_q: Sequence bounds in the piece, padding included, int32 [b + 1].
        lengths_kv: Keys per sequence up to the end of the piece, int32 [b].
    """

    lengths_q: Tensor
    starts_q: Tensor
    lengths_kv: Tensor


def piece_of_rank(lengths: Tensor, starts: Tensor, tokens: int, rank: int) -> Piece:
    """Return the sequences in the packed buffer piece [rank * tokens, (rank + 1) * tokens).

    Args:
        lengths: Real tokens per sequence [b].
        starts: Sequence bounds in the whole buffer [b + 1].
        tokens: Tokens per piece.
        rank: Piece number.
    """
    begin, end = rank * tokens, (rank + 1) * tokens
    first = starts[:-1]
    lengths_q = ((first + lengths).clamp(max=end) - first.clamp(min=begin)).clamp(min=0)
    lengths_kv = torch.minimum((end - first).clamp(min=0), lengths)
    return Piece(lengths_q.int(), (starts.clamp(begin, end) - begin).int(), lengths_kv.int())


@dataclass(frozen=True, eq=False)
class ContiguousAttention:
    """Attention for a rank's packed buffer piece, in place of a backend.

    Attributes:
        groups: The rank's groups; all ranks are in the ring group.
        inner_call: Attention from the piece to the gathered keys.
        inner: Backend for that attention.
        name: Backend name.
    """

    groups: ContextGroups
    inner_call: AttentionCall
    inner: Bound
    name: str

    @run_eagerly("attention of context-parallel ranks communicates")
    def __call__(self, call: AttentionCall, inputs: AttentionInputs) -> AttentionResult:
        """Return o [t, h * d_v] for the rank's piece, differentiable in q, k, v and sink."""
        tokens, groups = inputs.q.shape[0], self.groups
        if not tokens == inputs.k.shape[0] == inputs.v.shape[0]:
            raise UnsupportedStrategy(
                f"NO_LOAD_BALANCE with {tokens} queries, {inputs.k.shape[0]} keys and {inputs.v.shape[0]} values on a "
                "rank; it takes equal numbers of tokens"
            )
        if inputs.q.is_cuda and torch.cuda.is_current_stream_capturing():
            raise UnsupportedStrategy(
                "NO_LOAD_BALANCE while a CUDA graph is captured; use DUAL_CHUNK_SWAP"
            )
        lengths, starts = inputs.lengths_q, inputs.starts_q
        assert lengths is not None and starts is not None
        piece = piece_of_rank(lengths, starts, tokens, groups.ring_rank)
        k, v = (
            _Gathered.apply(x, groups.ring_group, groups.ring_size) for x in (inputs.k, inputs.v)
        )
        sink = inputs.sink
        if sink is not None and sink.requires_grad and torch.is_grad_enabled():
            sink = sink.view_as(sink)
            sink.register_hook(functools.partial(_sum_over_ranks, groups.ring_group))
        local = inputs._replace(
            k=k,
            v=v,
            lengths_q=piece.lengths_q,
            lengths_kv=piece.lengths_kv,
            starts_q=piece.starts_q,
            starts_kv=starts,
            sink=sink,
        )
        result = attend(self.inner, self.inner_call, local)
        if result.max_logit is None:
            return result
        max_logit = result.max_logit.clone()
        dist.all_reduce(max_logit, dist.ReduceOp.MAX, group=groups.ring_group)
        return AttentionResult(result.output, max_logit)


def choose_contiguous(call: AttentionCall, groups: ContextGroups) -> ContiguousAttention:
    """Choose the attention backend for a rank's piece.

    Raises:
        UnsupportedStrategy: The attention needs ranks with balanced loads. Every rank raises it before communication.
    """
    for wrong, argument, alternative in (
        (not call.packed, f"qkv_format={call.q_format!r}", "'thd'"),
        (
            groups.communication != "all_gather",
            f"cp_comm_type={groups.communication!r}",
            "'all_gather'",
        ),
        (
            not call.mask.causal,
            f"attn_mask_type={call.mask.name!r}, window_size={call.mask.window}",
            "causal masks with window_size=(-1, 0)",
        ),
        (
            not call.same_lengths,
            "cu_seqlens of queries and of keys in different tensors",
            "one tensor for both",
        ),
        (call.cached, "inference_params", "None"),
        (call.score_mod is not None, "score_mod, which reads positions", "None"),
        (
            call.bias in ("pre_scale_bias", "post_scale_bias"),
            f"core_attention_bias_type={call.bias!r}",
            "'no_bias' and 'alibi'",
        ),
    ):
        if wrong:
            raise UnsupportedStrategy(
                f"NO_LOAD_BALANCE with {argument}; it takes {alternative}, or use "
                f"CPLoadBalancingStrategy.DUAL_CHUNK_SWAP"
            )
    inner = replace(
        call,
        mask=Mask("padding_causal_bottom_right", (-1, 0), True),
        same_lengths=False,
        padded_between=True,
    )
    bound = cast(Bound, choose(inner))
    return ContiguousAttention(groups, inner, bound, bound.name)


class _Gathered(Function):
    """Rows from all ranks [size * t, ..]; gradients are summed over the ranks in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, size: int) -> Tensor:
        ctx.group, ctx.size = group, size
        return all_gather(x, group, size)().flatten(0, 1)

    @staticmethod
    @once_differentiable("context-parallel attention")
    def backward(ctx: Any, grad: Tensor) -> Any:
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        return (
            reduce_scatter(wide.unflatten(0, (ctx.size, -1)), ctx.group).to(grad.dtype),
            None,
            None,
        )


def _sum_over_ranks(group: Any, gradient: Tensor) -> Tensor:
    """Sum a parameter's gradients over the tokens on all ranks."""
    total = gradient.clone()
    dist.all_reduce(total, group=group)
    return total
