"""mask_masking(mask [b | 1, 1, q, kv]): the mask type, window and lengths that are equivalent to a mask tensor.

Libraries pass attention a mask for every query and key. If each row's visible keys are an interval, two
numbers per row describe it: its first and its last visible key. These [b, q] determine the mask type. If the
last key is the query's own, up to a fixed diagonal, the mask is causal. If the first key is the same for all
queries, there is no window; otherwise, a fixed key count before the query is a window, and the start of the
query's sequence means packed sequences. The first and last key of a sequence determine its padding, on either
side. Recognition is exact: a mask with a single different element is not recognized. The mask is read once
instead of in every layer, with one synchronization with the device.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....common.formats import round_up
from ...primitives.attention.packed import cumulative

# An additive mask hides a key by a number below this: finfo.min, -inf, -1e9 or float16's -65504.
HIDDEN = -1e4


@dataclass(frozen=True, slots=True)
class Masking:
    """The arguments of an equivalent DotProductAttention call.

    Attributes:
        name: The mask type.
        window: Visible keys (left, right) from the query's own; None: no limit.
        keys: (begin, end) for the keys that any query sees; None: all.
        packed: Sequences are packed in [b * s, h, d], with tokens between them that belong to no sequence.
        arguments: Lengths and masks, under the argument names of its forward.
    """

    name: str
    window: tuple[int, int] | None = None
    keys: tuple[int, int] | None = None
    packed: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def causal(self) -> bool:
        """Whether queries see no later keys."""
        return "causal" in self.name


NO_MASK, CAUSAL = Masking("no_mask"), Masking("causal")


def maskless_masking(causal: bool, queries: int, keys: int, window: int | None) -> Masking:
    """Return the masking for a call without a mask; a causal one begins at the first query and key."""
    if not causal:
        return NO_MASK
    cut = (0, queries) if keys > queries else None
    if window is None or window >= keys:
        return CAUSAL if cut is None else Masking("causal", keys=cut)
    return Masking("causal", (window - 1, 0), cut)


def one_query_masking(mask: Tensor) -> Masking:
    """Return the masking of a boolean mask [b, 1, 1, kv], True = visible: a padding mask, whose values are not read."""
    query = mask.new_zeros(()).expand(mask.shape[0], 1, 1, 1)
    return Masking("padding", arguments={"attention_mask": (query, ~mask)})


def as_it_is(mask: Tensor) -> Masking:
    """Return the masking for any mask [b, h, q, kv]: boolean, or numbers that are added to the logits."""
    if mask.dtype == torch.bool:
        return Masking("arbitrary", arguments={"attention_mask": ~mask})
    bias = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": mask}
    return Masking("no_mask", arguments=bias)


def mask_masking(mask: Tensor, batch: int) -> Masking | None:
    """Return the masking for a mask [batch | 1, 1, q, kv], boolean (True = visible) or additive.

    None if no mask type is equivalent, if the mask cannot be read (a compiler traces, a CUDA graph is captured, or
    memory is planned), and if the mask is trained.
    """
    if mask.ndim != 4 or mask.shape[0] not in (1, batch) or not mask.shape[-1] * mask.shape[2]:
        return None
    if mask.shape[1] != 1:
        if mask.stride(1):
            return None
        mask = mask[:, :1]
    if mask.shape[2] == 1 and mask.dtype == torch.bool:
        return one_query_masking(mask.expand(batch, -1, -1, -1))
    if torch.compiler.is_compiling() or mask.is_meta or mask.requires_grad:
        return None
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    # An inference tensor has no version counter: a result for it may be outdated in the next layer.
    return _recognize_mask(mask, batch) if mask.is_inference() else _recall_mask(mask, batch)


_last: dict[int, tuple[weakref.ref[Tensor], int, int, Masking | None]] = {}
# Masks in a model that exist at the same time: one for each layer kind, for a few models.
_MANY = 64


def _recall_mask(mask: Tensor, batch: int) -> Masking | None:
    """Return the cached result for this tensor object, which all layers in a forward pass receive."""
    cached = _last.get(id(mask))
    if cached is not None and cached[0]() is mask and cached[1:3] == (mask._version, batch):
        return cached[3]
    masking = _recognize_mask(mask, batch)
    if len(_last) >= _MANY:
        _last.clear()
    _last[id(mask)] = (weakref.ref(mask), mask._version, batch, masking)
    return masking


def _recognize_mask(mask: Tensor, batch: int) -> Masking | None:
    if mask.stride(0) == 0:
        mask = mask[:1]
    rows = mask[:, 0]
    agrees = None
    if rows.dtype != torch.bool:
        visible = rows == 0
        agrees = (visible | (rows < HIDDEN)).all()
        rows = visible
    intervals = _read_intervals(rows)
    facts = _judge_mask(intervals, agrees)
    if facts.everything:
        return _full_masking(facts, intervals.begin, intervals.end, batch)
    if facts.banded:
        return _band_masking(facts, intervals.begin, intervals.end, batch)
    return _packed(intervals.first, facts.longest, batch) if facts.longest else None


class _Intervals(NamedTuple):
    """First and last key per query [b, q], whether it sees none, and the key range per sequence [b].

    Attributes:
        intervals: bool, for the whole mask: every query sees all keys between its first and its last one.
    """

    first: Tensor
    last: Tensor
    blind: Tensor
    intervals: Tensor
    begin: Tensor
    end: Tensor
    keys: int


@dataclass(frozen=True, slots=True)
class _Facts:
    """Properties over all rows.

    Attributes:
        everything: Every query sees all keys in its sequence.
        banded: Query i sees keys up to i + diagonal, at most `window` keys (0: all).
        begins: Smallest and largest sequence start.
        ends: Smallest and largest sequence end.
        longest: Tokens in the longest packed sequence; 0: not packed.
    """

    everything: bool
    banded: bool
    begins: tuple[int, int]
    diagonal: int
    window: int
    ends: tuple[int, int]
    longest: int
    queries: int
    keys: int

    @property
    def alike(self) -> bool:
        """Whether all sequences see the same keys."""
        return self.begins[0] == self.begins[1] and self.ends[0] == self.ends[1]


def _read_intervals(visible: Tensor) -> _Intervals:
    """Return the intervals in visible [b, q, keys]."""
    keys = visible.shape[-1]
    bits = visible.view(torch.uint8)
    count = visible.sum(-1)
    first = bits.argmax(-1)
    last = keys - 1 - bits.flip(-1).argmax(-1)
    blind = count == 0
    intervals = ((last - first + 1 == count) | blind).all()
    end = (last + 1).masked_fill(blind, 0).amax(1)
    begin = torch.minimum(first.masked_fill(blind, keys).amin(1), end)
    return _Intervals(first, last, blind, intervals, begin, end, keys)


def _judge_mask(intervals: _Intervals, agrees: Tensor | None) -> _Facts:
    """Return the properties, computed on the mask's device and read at once."""
    first, last, blind = intervals.first, intervals.last, intervals.blind
    queries = first.shape[1]
    low, high = intervals.begin[:, None], intervals.end[:, None] - 1
    empty = high < 0
    everything = (((first == low) & (last == high) & ~blind) | empty).all()

    row = torch.arange(queries, device=first.device)
    sees = (~blind).view(torch.uint8).argmax(1, keepdim=True)
    diagonal = (last.gather(1, sees) - sees).masked_fill(empty, -queries).amax()
    position = row + diagonal
    hidden = (first > low) & ~blind
    window = (position + 1 - first).masked_fill(~hidden, 0).amax()
    low = torch.where(window > 0, torch.maximum(low, position - window + 1), low)
    high = torch.minimum(position, high)
    banded = torch.where(blind, high < low, (first == low) & (last == high)).all()

    goes_on = first == torch.cat((torch.zeros_like(first[:, :1]), first[:, :-1]), dim=1)
    packed = ((last == row) & (goes_on | (first == row)) & ~blind).all()
    longest = (row - first + 1).amax() * packed if queries == intervals.keys else packed * 0

    contiguous = intervals.intervals if agrees is None else intervals.intervals & agrees
    bounds = (*intervals.begin.aminmax(), *intervals.end.aminmax())
    numbers = (
        contiguous & everything,
        contiguous & banded,
        diagonal,
        window,
        longest * contiguous,
        *bounds,
    )
    fits, fits_band, ahead, wide, most, *n = torch.stack(
        [number.long() for number in numbers]
    ).tolist()
    return _Facts(
        bool(fits),
        bool(fits_band),
        (n[0], n[1]),
        ahead,
        wide,
        (n[2], n[3]),
        most,
        queries,
        intervals.keys,
    )


def _packed(first: Tensor, longest: int, batch: int) -> Masking:
    """Return the masking for consecutive causal sequences: a query whose first key is its own starts a sequence."""
    tokens = batch * first.shape[1]
    begins = first == torch.arange(first.shape[1], device=first.device)
    places = begins.expand(batch, -1).flatten().nonzero()[:, 0]
    bounds = torch.cat((places, places.new_tensor([tokens]))).int()
    # one of few sizes, because backends plan for each size
    size = min(round_up(longest, 64), first.shape[1])
    arguments = {
        "cu_seqlens_q": bounds,
        "cu_seqlens_kv": bounds,
        "max_seqlen_q": size,
        "max_seqlen_kv": size,
    }
    return Masking("padding_causal", packed=True, arguments=arguments)


def _full_masking(facts: _Facts, begin: Tensor, end: Tensor, batch: int) -> Masking:
    """Return the masking for queries that see all keys in their sequence."""
    if facts.alike:
        unmasked = (facts.begins[0], facts.ends[0]) == (0, facts.keys)
        return NO_MASK if unmasked else Masking("no_mask", keys=(facts.begins[0], facts.ends[0]))
    queries = (torch.zeros_like(begin), torch.full_like(end, facts.queries))
    return _ranges("padding", None, facts, queries, (begin, end), batch)


def _band_masking(facts: _Facts, begin: Tensor, end: Tensor, batch: int) -> Masking | None:
    """Return the masking for queries that see keys up to a diagonal, limited by a window."""
    square = facts.queries == facts.keys
    diagonal, left = facts.diagonal, facts.window - 1
    if diagonal < 0 or (diagonal + facts.queries > facts.keys and not square):
        return None
    two_sided = square and diagonal > 0
    if two_sided:  # limited by the diagonal; the window must include at least the query's own key
        left = left - diagonal if facts.window else facts.keys
        if left < 0:
            return None
    window = (left, diagonal if two_sided else 0) if facts.window or two_sided else None
    shift = 0 if two_sided else diagonal
    complete = facts.begins[1] <= shift and facts.ends[0] >= shift + facts.queries
    if facts.alike and complete:
        keys = (facts.begins[0], facts.ends[0])
        name = "causal" if keys[1] - keys[0] == facts.queries else "causal_bottom_right"
        return Masking(
            "no_mask" if two_sided else name, window, None if keys == (0, facts.keys) else keys
        )
    queries = tuple((x - shift).clamp(0, facts.queries) for x in (begin, end))
    name = "padding" if two_sided else "padding_causal" if square else "padding_causal_bottom_right"
    return _ranges(name, window, facts, (queries[0], queries[1]), (begin, end), batch)


def _ranges(
    name: str,
    window: tuple[int, int] | None,
    facts: _Facts,
    queries: tuple[Tensor, Tensor],
    keys: tuple[Tensor, Tensor],
    batch: int,
) -> Masking:
    """Return the masking for sequences (begin, end) [b]: their lengths, and their starts unless all are 0.

    Tokens before the first packed sequence count as an empty sequence, because the first start must be 0.
    """
    arguments: dict[str, Any] = {}
    packed = facts.begins[1] > 0
    for side, (begin, end), size in (("q", queries, facts.queries), ("kv", keys, facts.keys)):
        begin, end = begin.expand(batch), end.expand(batch)
        lengths = end - begin
        if packed:
            lengths = torch.cat((lengths.new_zeros(1), lengths))
            places = torch.arange(batch, device=begin.device) * size + begin
            full_range = places.new_tensor([0, batch * size])
            arguments[f"cu_seqlens_{side}_padded"] = torch.cat(
                (full_range[:1], places, full_range[1:])
            ).int()
            arguments[f"max_seqlen_{side}"] = size
        arguments[f"cu_seqlens_{side}"] = cumulative(lengths)
    if facts.queries == facts.keys and name != "padding":  # equal numbers are passed as one tensor
        for end_of_name in ("", "_padded"):
            if f"cu_seqlens_q{end_of_name}" in arguments:
                arguments[f"cu_seqlens_kv{end_of_name}"] = arguments[f"cu_seqlens_q{end_of_name}"]
    return Masking(name, window, None, packed, arguments)
