"""Attention in blocks: the passes of one rank over the keys of all ranks, which a ring or a gather provides.

Each block is an ordinary attention call of its own backend. The backward pass of a block reads the merged output and
log-sum-exp, so that its gradients are the block's share. Saved are the rank's own tensors only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ....primitives.attention.call import Attended, AttentionCall, AttentionInputs, AttentionResult, Gradients
from ....primitives.attention.choose import passes_of
from ....primitives.attention.operators import BIAS, SINK
from ....primitives.attention.packed import cumulative, lengths_of
from ....primitives.attention.passes import Passes
from ....runtime.double_backward import once_differentiable
from ..autograd import SavedAttention, attention_backward, attention_forward
from .groups import ContextGroups, Ring, all_gather, reduce_scatter
from .layout import TokenOrder, tokens_in
from .merge import MergedAttention, Rows, per_token
from .schedule import Block, Part, gathered_blocks, ring_blocks


class BoundBlock(NamedTuple):
    """A block with its attention call and the passes of the call's backend."""

    block: Block
    call: AttentionCall
    passes: Passes


@dataclass(frozen=True, eq=False)
class BlockAttention:
    """The attention of a rank's queries to the keys of all ranks of a ring.

    Attributes:
        call: The attention of the whole sequence.
        groups: Groups; ranks of the ring group hold parts of the keys.
        gathers: Keys are gathered at once; otherwise they circulate.
        steps: Blocks of each step; one step if keys are gathered.
    """

    call: AttentionCall
    groups: ContextGroups
    gathers: bool
    steps: tuple[tuple[BoundBlock, ...], ...]

    @property
    def name(self) -> str:
        """Name of the backend of the first block."""
        return next((bound.passes.name for step in self.steps for bound in step), "reference")

    def __call__(self, call: AttentionCall, inputs: AttentionInputs) -> AttentionResult:
        """Return o [.., h * d_v] of the rank's queries, differentiable in q, k, v, bias and sink."""
        if call.needs_gradient:
            return AttentionResult(*_BlockAttention.apply(self, *inputs))
        merged, _, max_logit = forward(self, inputs)
        return AttentionResult(merged.output.to(call.dtype).flatten(-2), max_logit)


def block_attention(call: AttentionCall, groups: ContextGroups, gathers: bool) -> BlockAttention:
    """Plan the blocks of a rank and bind their backends."""
    size, rank = groups.ring_size, groups.ring_rank
    if gathers:
        steps = (gathered_blocks(call, size, rank),)
    else:
        steps = tuple(ring_blocks(call, size, rank, (rank - step) % size) for step in range(size))
    bound = []
    for step in steps:
        calls = [block_call(call, block, size, gathers) for block in step]
        bound.append(
            tuple(BoundBlock(block, of, passes_of(of)) for block, of in zip(step, calls, strict=True))
        )
    return BlockAttention(call, groups, gathers, tuple(bound))


def block_call(call: AttentionCall, block: Block, size: int, gathers: bool) -> AttentionCall:
    """Return the attention call of a block of a ring of `size` ranks."""
    if call.packed:
        rows, columns = (
            -(-length // (2 * size)) * (part.stop - part.first)
            for length, part in ((call.seqlen_q, block.queries), (call.seqlen_kv, block.keys))
        )
    else:
        rows, columns = (part.stop - part.first for part in (block.queries, block.keys))
    shapes = [
        None if shape is None else (*shape[:-2], *(1 if old == 1 else new for old, new in zip(shape[-2:], (rows, columns))))
        for shape in (call.bias_shape, call.masked_shape)
    ]
    diagonal = block.mask.name == "padding_causal" and block.queries == block.keys
    return replace(
        call,
        seqlen_q=rows,
        seqlen_kv=columns,
        mask=block.mask,
        bias_shape=shapes[0],
        masked_shape=shapes[1],
        softmax="vanilla",
        same_lengths=call.packed and diagonal,
        padded_between=call.packed and (call.padded_between or block.limited),
        needs_gradient=True,
        fp8=None,
    )


class Tokens(NamedTuple):
    """The rows of a rank's queries, and those of the keys of each step; chunk lengths of packed sequences."""

    queries: Rows
    keys: Rows
    chunk_q: Tensor | None
    chunk_k: Tensor | None


def _tokens(attention: BlockAttention, inputs: AttentionInputs) -> Tokens:
    call, size = attention.call, attention.groups.ring_size
    axis = 1 if call.q_format == "bshd" else 0
    length_q, length_k = inputs.q.shape[axis], inputs.k.shape[axis]
    if attention.gathers:
        length_k *= size
    if not call.packed:
        return Tokens(Rows(axis, length_q), Rows(axis, length_k), None, None)
    assert inputs.starts_q is not None and inputs.starts_kv is not None
    keys = Rows(axis, length_k, inputs.starts_kv if attention.gathers else inputs.starts_kv // size)
    chunks = (lengths_of(starts) // (2 * size) for starts in (inputs.starts_q, inputs.starts_kv))
    return Tokens(Rows(axis, length_q, inputs.starts_q // size), keys, *chunks)


def _block_inputs(
    attention: BlockAttention, bound: BoundBlock, tokens: Tokens, inputs: AttentionInputs, k: Tensor, v: Tensor
) -> AttentionInputs:
    """Return the tensors of a block, of the rank's inputs and the keys and values of the step."""
    block, call = bound.block, bound.call
    keys = block.keys if not (attention.gathers and call.packed) else Part(0, 2)
    found: dict[str, Tensor | None] = dict.fromkeys(AttentionInputs._fields)
    found["q"] = tokens.queries.take(inputs.q, block.queries)
    found["k"], found["v"] = (tokens.keys.take(x, keys) for x in (k, v))
    if inputs.bias is not None:
        found["bias"] = _columns(_rows(inputs.bias, block.queries), block.key_spans)
    if inputs.masked is not None:
        found["masked"] = _columns(_rows(inputs.masked, block.queries), block.key_spans)
    if inputs.masked_q is not None:
        found["masked_q"] = _columns(inputs.masked_q, block.query_spans)
    if inputs.masked_kv is not None:
        found["masked_kv"] = _columns(inputs.masked_kv, block.key_spans)
    if call.mask.padding:
        assert inputs.lengths_q is not None and inputs.lengths_kv is not None
        if call.packed:
            found.update(_packed_lengths(attention, block, tokens, inputs))
        else:
            found["lengths_q"] = _lengths_within(inputs.lengths_q, block.query_spans)
            found["lengths_kv"] = _lengths_within(inputs.lengths_kv, block.key_spans)
    return AttentionInputs(**found)  # pyright: ignore[reportArgumentType]


def _packed_lengths(
    attention: BlockAttention, block: Block, tokens: Tokens, inputs: AttentionInputs
) -> dict[str, Tensor]:
    lengths_q, lengths_kv, starts_kv = inputs.lengths_q, inputs.lengths_kv, inputs.starts_kv
    chunk_q, chunk_k = tokens.chunk_q, tokens.chunk_k
    assert lengths_q is not None and lengths_kv is not None and starts_kv is not None
    assert chunk_q is not None and chunk_k is not None
    real_q = tokens_in(lengths_q, chunk_q, list(block.query_chunks))
    starts_q = cumulative(chunk_q * len(block.query_chunks))
    if not attention.gathers:
        real_k = tokens_in(lengths_kv, chunk_k, list(block.key_chunks))
        starts_kv = cumulative(chunk_k * len(block.key_chunks))
    elif block.limited:
        # Keys up to the diagonal of the chunk's last real query: the diagonal of the block ends bottom right.
        last = block.query_chunks[0] * chunk_q + real_q
        if attention.call.mask.bottom_right:
            last = last + lengths_kv - lengths_q
        real_k = torch.minimum(last.clamp(min=0), lengths_kv)
    else:
        real_k = lengths_kv
    return {
        "lengths_q": real_q.int(),
        "lengths_kv": real_k.int(),
        "starts_q": starts_q,
        "starts_kv": starts_kv,
    }


def _lengths_within(lengths: Tensor, spans: Sequence[Part]) -> Tensor:
    """Return the real tokens of each sequence within ranges of it, [b] int32."""
    held = torch.zeros_like(lengths)
    for span in spans:
        held = held + (lengths - span.first).clamp(min=0, max=span.stop - span.first)
    return held.int()


def _rows(x: Tensor, part: Part) -> Tensor:
    return x if x.shape[-2] == 1 else x[..., part.first : part.stop, :]


def _columns(x: Tensor, spans: Sequence[Part]) -> Tensor:
    if x.shape[-1] == 1:
        return x
    parts = [x[..., span.first : span.stop] for span in spans]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)).contiguous()


def _keys_of_steps(attention: BlockAttention, inputs: AttentionInputs) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the keys and values of each step; the transfer of the next ones is under way meanwhile."""
    k, v, groups, call = inputs.k, inputs.v, attention.groups, attention.call
    if attention.gathers:
        order = TokenOrder(call.kv_format, groups.ring_size, inputs.starts_kv)
        pending = [all_gather(x, groups.ring_group, groups.ring_size) for x in (k, v)]
        whole = [order.whole(wait()) for wait in pending]
        yield whole[0], whole[1]
        return
    flat = torch.cat((k.reshape(-1), v.reshape(-1)))
    for arrived in Ring(groups).circulate(flat):
        yield arrived[: k.numel()].view(k.shape), arrived[k.numel() :].view(v.shape)


def forward(
    attention: BlockAttention, inputs: AttentionInputs
) -> tuple[MergedAttention, list[Tensor | None], Tensor | None]:
    """Compute the attention of a rank's queries.

    Returns:
        Output and log-sum-exp, the random state of each block, and the largest logit of each head over all ranks.
    """
    call, q = attention.call, inputs.q
    tokens = _tokens(attention, inputs)
    wide = torch.promote_types(q.dtype, torch.float32)
    gathers = attention.gathers and inputs.sink is None
    output = q.new_zeros((*q.shape[:-1], call.head_dim_v), dtype=q.dtype if gathers else wide)
    batch = () if call.packed else (call.batch,)
    lse = torch.full(
        (*batch, call.heads, tokens.queries.size), -torch.inf, dtype=wide, device=q.device
    )
    merged, states = MergedAttention(tokens.queries, output, lse), []
    max_logit = q.new_full((call.heads,), -torch.inf, dtype=torch.float32) if call.max_logit else None
    for step, (k, v) in zip(attention.steps, _keys_of_steps(attention, inputs), strict=True):
        for bound in step:
            block_inputs = _block_inputs(attention, bound, tokens, inputs, k, v)
            attended, _ = attention_forward(bound.call, block_inputs, bound.passes)
            assert attended.lse is not None
            merged.add(bound.block.queries, attended.output, attended.lse)
            states.append(attended.rng_state)
            if max_logit is not None:
                assert attended.max_logit is not None
                max_logit = torch.maximum(max_logit, attended.max_logit.float())
    if max_logit is not None:
        dist.all_reduce(max_logit, dist.ReduceOp.MAX, group=attention.groups.ring_group)
    if inputs.sink is not None:
        merged.add_sink(inputs.sink)
    return merged, states, max_logit


def backward(
    attention: BlockAttention,
    inputs: AttentionInputs,
    output: Tensor,
    lse: Tensor,
    states: Sequence[Tensor | None],
    grad_output: Tensor,
) -> Gradients:
    """Compute the gradients of the rank's tensors; sums over blocks and ranks are in float32."""
    call, groups, wide = attention.call, attention.groups, torch.promote_types(output.dtype, torch.float32)
    tokens = _tokens(attention, inputs)
    grad_q = torch.zeros_like(inputs.q, dtype=wide, memory_format=torch.contiguous_format)
    grad_bias = None if inputs.bias is None else torch.zeros_like(inputs.bias, dtype=wide)
    remaining = iter(states)
    ring, travelling, sums = Ring(groups), None, grad_q
    for step, (k, v) in zip(attention.steps, _keys_of_steps(attention, inputs), strict=True):
        sums = grad_q.new_zeros(k.numel() + v.numel())
        grad_k, grad_v = sums[: k.numel()].view(k.shape), sums[k.numel() :].view(v.shape)
        for bound in step:
            queries, last = bound.block.queries, lse.dim() - 1
            attended = Attended(
                tokens.queries.take(output, queries), tokens.queries.take(lse, queries, last), next(remaining)
            )
            block_inputs = _block_inputs(attention, bound, tokens, inputs, k, v)
            saved = SavedAttention(bound.passes, block_inputs, attended)
            found = attention_backward(bound.call, saved, tokens.queries.take(grad_output, queries))
            keys = bound.block.keys if not (attention.gathers and call.packed) else Part(0, 2)
            tokens.queries.add(grad_q, queries, found.q)
            tokens.keys.add(grad_k, keys, found.k)
            tokens.keys.add(grad_v, keys, found.v)
            if grad_bias is not None:
                assert found.bias is not None
                _add_columns(_rows(grad_bias, queries), bound.block.key_spans, found.bias)
        if not attention.gathers:
            # The sums of a rank's keys follow the keys around the ring, and arrive at their rank after the last step.
            if travelling is not None:
                sums += travelling()
            travelling = ring.send(sums)
    if travelling is not None:
        sums = travelling()
        grad_k, grad_v = sums[: inputs.k.numel()].view(inputs.k.shape), sums[inputs.k.numel() :].view(inputs.v.shape)
    else:
        order = TokenOrder(call.kv_format, groups.ring_size, inputs.starts_kv)
        grad_k, grad_v = (
            reduce_scatter(order.parts(x), groups.ring_group)
            for x in (grad_k, grad_v)  # pyright: ignore[reportPossiblyUnboundVariable]
        )
    return Gradients(
        grad_q.to(inputs.q.dtype),
        grad_k.to(inputs.k.dtype),
        grad_v.to(inputs.v.dtype),
        None if grad_bias is None or inputs.bias is None else grad_bias.to(inputs.bias.dtype),
        None if inputs.sink is None else _sink_gradient(attention, inputs.sink, output, lse, grad_output),
    )


def _add_columns(x: Tensor, spans: Sequence[Part], columns: Tensor) -> None:
    """Add columns to ranges of columns of a tensor in place."""
    if x.shape[-1] == 1:
        x += columns
        return
    first = 0
    for span in spans:
        size = span.stop - span.first
        x[..., span.first : span.stop] += columns[..., first : first + size]
        first += size


def _sink_gradient(
    attention: BlockAttention, sink: Tensor, output: Tensor, lse: Tensor, grad_output: Tensor
) -> Tensor:
    """Return -sum p_sink sum(do o) over the tokens of all ranks, as the exchange of heads does."""
    inner = (grad_output.float() * output.float()).sum(dim=-1, keepdim=True)
    axis = 1 if attention.call.q_format == "bshd" else 0
    share = torch.exp(sink.float()[:, None] - lse).masked_fill(lse == -torch.inf, 0.0)
    grad = -(per_token(share, axis) * inner).sum(dim=tuple(range(inner.dim() - 2)))[..., 0]
    dist.all_reduce(grad, group=attention.groups.ring_group)
    return grad.to(sink.dtype)


class _BlockAttention(torch.autograd.Function):
    """Autograd node of both passes."""

    @staticmethod
    def forward(ctx: Any, attention: BlockAttention, *tensors: Any) -> Any:
        merged, states, max_logit = forward(attention, AttentionInputs(*tensors))
        output = merged.output.to(attention.call.dtype).flatten(-2)
        ctx.attention = attention
        ctx.save_for_backward(*tensors, output, merged.lse, *states)
        if max_logit is not None:
            ctx.mark_non_differentiable(max_logit)
        return output, max_logit

    @staticmethod
    @once_differentiable("context-parallel attention")
    def backward(ctx: Any, grad_output: Tensor, *_: Any) -> Any:
        attention: BlockAttention = ctx.attention
        count = len(AttentionInputs._fields)
        saved = ctx.saved_tensors
        inputs, (output, lse, *states) = AttentionInputs(*saved[:count]), saved[count:]
        shape = (attention.call.heads, attention.call.head_dim_v)
        output, grad_output = output.unflatten(-1, shape), grad_output.unflatten(-1, shape)
        found = backward(attention, inputs, output, lse, states, grad_output)
        of_tensors: list[Tensor | None] = [None] * count
        of_tensors[:3] = found[:3]
        of_tensors[BIAS], of_tensors[SINK] = found.bias, found.sink
        return None, *of_tensors
