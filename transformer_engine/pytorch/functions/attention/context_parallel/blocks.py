"""Attention for a rank's queries as blocks: their attention calls, bound to backends, and their tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ....primitives.attention.call import AttentionCall, AttentionInputs
from ....primitives.attention.choose import choose_passes
from ....primitives.attention.packed import cumulative, sequence_lengths
from ....primitives.attention.passes import Passes
from .groups import ContextGroups
from .layout import count_tokens
from .merge import Rows
from .schedule import Block, Part, plan_gathered_steps, ring_blocks


class BoundBlock(NamedTuple):
    """A block with its attention call and the passes in the call's backend."""

    block: Block
    call: AttentionCall
    passes: Passes


@dataclass(frozen=True, eq=False)
class BlockPlan:
    """Blocks of a rank's queries and the keys on all ranks in a ring.

    Attributes:
        call: The attention over the whole sequence.
        groups: Groups; ranks in the ring group hold parts of the keys.
        gathers: Keys are gathered at once; otherwise they circulate.
        steps: Blocks per step. If keys are gathered, the last step has all keys, and one before it the rank's own.
    """

    call: AttentionCall
    groups: ContextGroups
    gathers: bool
    steps: tuple[tuple[BoundBlock, ...], ...]

    @property
    def shares_queries(self) -> bool:
        """Whether several blocks have the same queries, so that their outputs are merged."""
        return not self.gathers or len(self.steps) > 1

    def key_rows(self, block: Block) -> Part:
        """Return the rows of a block's keys among the keys of a step; lengths limit gathered packed sequences."""
        return Part(0, 2) if self.gathers and self.call.packed else block.keys


def plan_blocks(call: AttentionCall, groups: ContextGroups, gathers: bool) -> BlockPlan:
    """Plan the blocks of a rank and bind their backends."""
    size, rank = groups.ring_size, groups.ring_rank
    if gathers:
        steps = plan_gathered_steps(call, size, rank)
    else:
        steps = tuple(ring_blocks(call, size, rank, (rank - step) % size) for step in range(size))
    bound = []
    for step in steps:
        calls = [block_call(call, block, size) for block in step]
        bound.append(
            tuple(
                BoundBlock(block, of, choose_passes(of))
                for block, of in zip(step, calls, strict=True)
            )
        )
    return BlockPlan(call, groups, gathers, tuple(bound))


def block_call(call: AttentionCall, block: Block, size: int) -> AttentionCall:
    """Return the attention call for a block in a ring with `size` ranks."""
    if call.packed:
        rows, columns = (
            -(-length // (2 * size)) * (part.stop - part.first)
            for length, part in ((call.seqlen_q, block.queries), (call.seqlen_kv, block.keys))
        )
    else:
        rows, columns = (part.stop - part.first for part in (block.queries, block.keys))
    shapes = [
        None
        if shape is None
        else (
            *shape[:-2],
            *(min(old, new) for old, new in zip(shape[-2:], (rows, columns), strict=True)),
        )
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
    """Rows of the queries on a rank and of the keys per step; chunk lengths for packed sequences."""

    queries: Rows
    keys: Rows
    chunk_q: Tensor | None
    chunk_k: Tensor | None


def tokens_of(plan: BlockPlan, inputs: AttentionInputs) -> Tokens:
    call, size = plan.call, plan.groups.ring_size
    axis = 1 if call.q_format == "bshd" else 0
    length_q, length_k = inputs.q.shape[axis], inputs.k.shape[axis]
    if plan.gathers:
        length_k *= size
    if not call.packed:
        return Tokens(Rows(axis, length_q), Rows(axis, length_k), None, None)
    assert inputs.starts_q is not None and inputs.starts_kv is not None
    keys = Rows(axis, length_k, inputs.starts_kv if plan.gathers else inputs.starts_kv // size)
    chunks = (
        sequence_lengths(starts) // (2 * size) for starts in (inputs.starts_q, inputs.starts_kv)
    )
    return Tokens(Rows(axis, length_q, inputs.starts_q // size), keys, *chunks)


def block_inputs(
    plan: BlockPlan,
    bound: BoundBlock,
    tokens: Tokens,
    inputs: AttentionInputs,
    k: Tensor,
    v: Tensor,
) -> AttentionInputs:
    """Return the tensors for a block, from the rank's inputs and the keys and values of the step."""
    block, call = bound.block, bound.call
    keys = plan.key_rows(block)
    found: dict[str, Tensor | None] = dict.fromkeys(AttentionInputs._fields)
    found["q"] = tokens.queries.take(inputs.q, block.queries)
    found["k"], found["v"] = (tokens.keys.take(x, keys) for x in (k, v))
    if inputs.bias is not None:
        found["bias"] = choose_columns(choose_rows(inputs.bias, block.queries), block.key_spans)
    if inputs.masked is not None:
        found["masked"] = choose_columns(choose_rows(inputs.masked, block.queries), block.key_spans)
    if inputs.masked_q is not None:
        found["masked_q"] = choose_columns(inputs.masked_q, block.query_spans)
    if inputs.masked_kv is not None:
        found["masked_kv"] = choose_columns(inputs.masked_kv, block.key_spans)
    if call.mask.padding:
        assert inputs.lengths_q is not None and inputs.lengths_kv is not None
        if call.packed:
            found.update(_packed_lengths(plan, block, tokens, inputs))
        else:
            found["lengths_q"] = _count_lengths(inputs.lengths_q, block.query_spans)
            found["lengths_kv"] = _count_lengths(inputs.lengths_kv, block.key_spans)
    return AttentionInputs(**found)  # pyright: ignore[reportArgumentType]


def _packed_lengths(
    plan: BlockPlan, block: Block, tokens: Tokens, inputs: AttentionInputs
) -> dict[str, Tensor]:
    lengths_q, lengths_kv, starts_kv = inputs.lengths_q, inputs.lengths_kv, inputs.starts_kv
    chunk_q, chunk_k = tokens.chunk_q, tokens.chunk_k
    assert lengths_q is not None and lengths_kv is not None and starts_kv is not None
    assert chunk_q is not None and chunk_k is not None
    real_q = count_tokens(lengths_q, chunk_q, list(block.query_chunks))
    starts_q = cumulative(chunk_q * len(block.query_chunks))
    if not plan.gathers:
        real_k = count_tokens(lengths_kv, chunk_k, list(block.key_chunks))
        starts_kv = cumulative(chunk_k * len(block.key_chunks))
    elif block.limited:
        # Keys up to the diagonal of the chunk's last real query: the block diagonal ends bottom right.
        last = block.query_chunks[0] * chunk_q + real_q
        if plan.call.mask.bottom_right:
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


def _count_lengths(lengths: Tensor, spans: Sequence[Part]) -> Tensor:
    """Return the real tokens per sequence within ranges of it, [b] int32."""
    counts = torch.zeros_like(lengths)
    for span in spans:
        counts = counts + (lengths - span.first).clamp(min=0, max=span.stop - span.first)
    return counts.int()


def choose_rows(x: Tensor, part: Part) -> Tensor:
    return x if x.shape[-2] == 1 else x[..., part.first : part.stop, :]


def choose_columns(x: Tensor, spans: Sequence[Part]) -> Tensor:
    if x.shape[-1] == 1:
        return x
    parts = [x[..., span.first : span.stop] for span in spans]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)).contiguous()
