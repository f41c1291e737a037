"""Which attention blocks a rank computes in which step, as pure data from the call, the ring size and the rank.

Attention from a rank's queries to all keys is a set of blocks, each a part of the queries against a
part of the keys in one transfer, under its own mask; `merge` combines their results. The blocks on
every rank together are the whole attention, which tests check for any size without processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from .....common.dispatch import Backend, Table
from ....primitives.attention.call import AttentionCall, Feature
from ....primitives.attention.mask import UNLIMITED, Mask


class Part(NamedTuple):
    """A row range in a tensor: tokens, or for packed sequences chunks in every sequence."""

    first: int
    stop: int


@dataclass(frozen=True)
class Block:
    """One attention within a step.

    Attributes:
        queries: Part of the rank's queries.
        keys: Part of the keys of the step.
        mask: Block mask, relative to its own queries and keys.
        query_spans, key_spans: Token ranges in the whole sequence, for dense sequences.
        query_chunks, key_chunks: Chunks per sequence, for packed sequences.
        limited: Visible keys in packed sequences end at the last query's diagonal, by lengths.
    """

    queries: Part
    keys: Part
    mask: Mask
    query_spans: tuple[Part, ...] = ()
    key_spans: tuple[Part, ...] = ()
    query_chunks: tuple[int, ...] = ()
    key_chunks: tuple[int, ...] = ()
    limited: bool = False


class ContextRequest(NamedTuple):
    """Request for a scheme: attention over the whole sequence, the requested communication, and group sizes."""

    call: AttentionCall
    communication: str
    heads_size: int
    ring_size: int

    @property
    def features(self) -> tuple[Feature, ...]:
        """Call features."""
        return self.call.features


def chunk_pair(size: int, rank: int) -> tuple[int, int]:
    """Return a rank's two chunk numbers."""
    return rank, 2 * size - 1 - rank


def ring_blocks(call: AttentionCall, size: int, rank: int, owner: int) -> tuple[Block, ...]:
    """Return the blocks for the queries on a rank and the keys on another rank, or its own."""
    if call.packed:
        # One block of packed sequences: under a causal mask, half of the queries or keys.
        chunks_q, chunks_k = chunk_pair(size, rank), chunk_pair(size, owner)
        queries = keys = Part(0, 2)
        mask = Mask("padding", UNLIMITED, True)
        if call.mask.banded:
            if owner == rank:
                mask = Mask("padding_causal", (-1, 0), False)
            elif owner < rank:
                keys, chunks_k = Part(0, 1), chunks_k[:1]
            else:
                queries, chunks_q = Part(1, 2), chunks_q[1:]
        return (Block(queries, keys, mask, query_chunks=chunks_q, key_chunks=chunks_k),)
    length_q, length_k = call.seqlen_q // (2 * size), call.seqlen_kv // (2 * size)
    rows, columns = chunk_pair(size, rank), chunk_pair(size, owner)
    spans_q = [Part(i * length_q, (i + 1) * length_q) for i in rows]
    spans_k = [Part(i * length_k, (i + 1) * length_k) for i in columns]
    if owner == rank and _has_square_triangle(call):
        # The later chunk sees the full earlier one: in the rank's order the mask is causal as well.
        mask = Mask("padding_causal" if call.mask.padding else "causal", (-1, 0), False)
        whole_q, whole_k = Part(0, 2 * length_q), Part(0, 2 * length_k)
        return (Block(whole_q, whole_k, mask, tuple(spans_q), tuple(spans_k)),)
    blocks: dict[tuple[int, int], Block] = {}
    for (i, span_q), (j, span_k) in product(enumerate(spans_q), enumerate(spans_k)):
        block = band_block(call, span_q, span_k)
        if block is not None:
            queries = _move_part(block.queries, i * length_q - span_q.first)
            keys = _move_part(block.keys, j * length_k - span_k.first)
            blocks[i, j] = Block(queries, keys, block.mask, block.query_spans, block.key_spans)
    return _join_blocks(blocks, length_q, length_k)


def _has_square_triangle(call: AttentionCall) -> bool:
    """Return whether the queries and keys of a rank form a causal square."""
    return call.mask.causal and not call.mask.arbitrary and call.seqlen_q == call.seqlen_kv


def plan_gathered_steps(call: AttentionCall, size: int, rank: int) -> tuple[tuple[Block, ...], ...]:
    """Return the blocks for a rank's two query chunks: against its own keys, if that is a step, and all keys.

    The keys of the last step are in sequence order. Under a causal mask the rank's own keys are a step of their own:
    it needs no transfer, and the other blocks have no mask, as in a ring.
    """
    if call.packed or not _has_square_triangle(call):
        return (_blocks_of_chunks(call, size, rank),)
    length, (low, high) = call.seqlen_q // (2 * size), chunk_pair(size, rank)
    mask = Mask("padding" if call.mask.padding else "no_mask", UNLIMITED, True)
    spans = [Part(number * length, (number + 1) * length) for number in (low, high)]
    before, between = Part(0, low * length), Part((low + 1) * length, high * length)
    blocks: list[Block] = []
    if before.stop > before.first:
        blocks.append(Block(Part(0, 2 * length), before, mask, tuple(spans), (before,)))
    if between.stop > between.first:
        blocks.append(Block(Part(length, 2 * length), between, mask, (spans[1],), (between,)))
    return ring_blocks(call, size, rank, rank), tuple(blocks)


def _blocks_of_chunks(call: AttentionCall, size: int, rank: int) -> tuple[Block, ...]:
    """Return a block for each of a rank's query chunks and all keys."""
    chunks = chunk_pair(size, rank)
    if call.packed:
        mask = Mask("padding", UNLIMITED, True)
        if call.mask.banded:
            mask = Mask("padding_causal_bottom_right", call.mask.window, True)
        return tuple(
            Block(
                Part(i, i + 1),
                Part(0, 2 * size),
                mask,
                query_chunks=(number,),
                key_chunks=tuple(range(2 * size)),
                limited=mask.banded,
            )
            for i, number in enumerate(chunks)
        )
    length, blocks = call.seqlen_q // (2 * size), []
    for i, number in enumerate(chunks):
        span = Part(number * length, (number + 1) * length)
        block = band_block(call, span, Part(0, call.seqlen_kv))
        if block is not None:
            queries = _move_part(block.queries, i * length - span.first)
            blocks.append(
                Block(queries, block.keys, block.mask, block.query_spans, block.key_spans)
            )
    return tuple(blocks)


def band_block(call: AttentionCall, queries: Part, keys: Part) -> Block | None:
    """Return the block for query and key ranges in the whole sequence, without rows that see nothing.

    Its parts are positions in the whole sequence. None if no query sees a key.
    """
    left, right = call.mask.window
    shift = (
        call.seqlen_kv - call.seqlen_q if call.mask.bottom_right and not call.mask.padding else 0
    )
    # Query i sees key j if -left <= j - i - shift <= right, for positions in the whole sequence.
    (first_q, stop_q), (first_k, stop_k) = queries, keys
    if right >= 0:
        first_q = max(first_q, first_k - right - shift)
        stop_k = min(stop_k, stop_q + right + shift)
    if left >= 0:
        first_k = max(first_k, first_q - left + shift)
        stop_q = min(stop_q, stop_k + left - shift)
    if first_q >= stop_q or first_k >= stop_k:
        return None
    rows, columns = stop_q - first_q, stop_k - first_k
    offset = first_q + shift - first_k  # key on the first query's diagonal, relative to the block
    below = rows - 1 if left < 0 else min(left - offset, rows - 1)
    above = columns - 1 if right < 0 else min(right + offset, columns - 1)
    mask = _block_mask(call.mask, rows, columns, below, above)
    spans = (Part(first_q, stop_q),), (Part(first_k, stop_k),)
    return Block(spans[0][0], spans[1][0], mask, *spans)


def _block_mask(mask: Mask, rows: int, columns: int, below: int, above: int) -> Mask:
    """Return the mask under which query i in a block sees the keys i - below .. i + above.

    Diagonals end bottom right, as fused kernels have them, unless sequences have individual lengths.
    """
    prefix = "padding" if mask.padding else ""
    if below >= rows - 1 and above >= columns - 1:
        return Mask(mask.name if mask.arbitrary else prefix or "no_mask", UNLIMITED, True)
    bottom_right = not mask.padding and rows != columns
    if bottom_right:
        below, above = below + columns - rows, above - columns + rows
    everything_below = below >= (columns - 1 if bottom_right else rows - 1)
    if mask.arbitrary or above != 0:
        return Mask(
            mask.name if mask.arbitrary else prefix or "no_mask", (below, above), bottom_right
        )
    name = f"{prefix}_causal" if prefix else "causal"
    name += "_bottom_right" if bottom_right else ""
    return Mask(name, (-1 if everything_below else below, 0), bottom_right)


def _move_part(part: Part, offset: int) -> Part:
    return Part(part.first + offset, part.stop + offset)


def _join_blocks(
    blocks: dict[tuple[int, int], Block], length_q: int, length_k: int
) -> tuple[Block, ...]:
    """Join unmasked blocks of neighbouring chunks: both key chunks, or both query chunks, in one attention."""
    full = {
        position
        for position, block in blocks.items()
        if block.mask.window == UNLIMITED
        and block.queries.stop - block.queries.first == length_q
        and block.keys.stop - block.keys.first == length_k
    }
    for places in (
        ((0, 0), (0, 1), (1, 0), (1, 1)),
        ((0, 0), (0, 1)),
        ((1, 0), (1, 1)),
        ((0, 0), (1, 0)),
        ((0, 1), (1, 1)),
    ):
        if full.issuperset(places):
            full.difference_update(places)
            parts = [blocks.pop(position) for position in places]
            # In row order, without repetition.
            query_spans = tuple(dict.fromkeys(part.query_spans[0] for part in parts))
            key_spans = tuple(dict.fromkeys(part.key_spans[0] for part in parts))
            queries = Part(parts[0].queries.first, parts[-1].queries.stop)
            keys = Part(parts[0].keys.first, parts[-1].keys.stop)
            blocks[places[0]] = Block(queries, keys, parts[0].mask, query_spans, key_spans)
    return tuple(blocks.values())


def _unsupported_blocks(request: ContextRequest) -> str | None:
    """Return why an attention cannot be divided into token blocks."""
    call = request.call
    if call.score_mod is not None:
        return "score_mod reads positions, which a block does not have"
    if call.bias == "alibi":
        return "the slopes of ALiBi apply to positions, which a block does not have"
    return None


_UNEQUAL = (
    "the diagonal ends at each sequence's last tokens, and lengths of queries and keys may differ"
)


def _unsupported_ring(request: ContextRequest) -> str | None:
    call, mask = request.call, request.call.mask
    if mask.padding and mask.bottom_right and mask.banded and not call.square:
        return _UNEQUAL
    if call.packed and mask.banded and mask.window != (-1, 0):
        return f"chunks of packed sequences have lengths of their own, window_size={mask.window} has one"
    if call.packed and mask.banded and call.seqlen_q != call.seqlen_kv:
        return "a causal mask needs packed queries and keys of the same lengths"
    return _unsupported_blocks(request)


def _unsupported_gather(request: ContextRequest) -> str | None:
    call, mask = request.call, request.call.mask
    if mask.padding and mask.bottom_right and mask.banded and not call.packed and not call.square:
        return _UNEQUAL
    if call.packed and mask.banded and mask.window[1] != 0:
        return f"window_size={mask.window} with packed sequences is not causal"
    if call.packed and mask.banded and not mask.bottom_right and call.seqlen_q != call.seqlen_kv:
        return (
            "a causal mask that begins top left needs packed queries and keys of the same lengths"
        )
    return _unsupported_blocks(request)


def _unsupported_exchange(request: ContextRequest) -> str | None:
    call = request.call
    ranks = request.heads_size * request.ring_size
    for name, heads in (("query", call.heads), ("key and value", call.groups)):
        if heads % ranks:
            return f"{heads} {name} heads cannot be divided among {ranks} ranks; use a divisor of {heads} ranks"
    return None


EVERYTHING = frozenset(Feature)

# Ways to share the attention over a ring's tokens. Another way than the requested one computes what that one cannot.
TABLE: Table[ContextRequest] = Table(
    "context_parallel",
    (
        Backend("p2p", takes=EVERYTHING, unsupported_reason=_unsupported_ring),
        Backend("all_gather", takes=EVERYTHING, unsupported_reason=_unsupported_gather),
        Backend("a2a", takes=EVERYTHING, unsupported_reason=_unsupported_exchange),
    ),
    describe=ContextRequest,
    order=lambda request: _ORDERS[request.communication],
)

# "a2a+p2p" exchanges heads first: the table chooses how the ring's ranks share the rest.
_ORDERS = {
    "p2p": ("p2p", "all_gather", "a2a"),
    "all_gather": ("all_gather", "a2a"),
    "a2a": ("a2a",),
    "a2a+p2p": ("p2p", "all_gather"),
}
