"""ContextParallelAttention: an attention whose sequence is shared by ranks, in place of a backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, cast

from .....common.dispatch import Unsupported
from ....distributed.faults import check_step, checks_step, form
from ....primitives.attention.call import AttentionCall, AttentionInputs, AttentionResult
from ....primitives.attention.choose import NoBackend, choose
from ....primitives.attention.passes import Bound
from ....runtime.device_checks import demand
from ....runtime.tracing import run_eagerly
from ..autograd import attend
from .all_to_all import HeadExchange, OwnHeads
from .blocks import plan_blocks
from .contiguous import ContiguousAttention, choose_contiguous
from .groups import ContextGroups
from .passes import BlockAttention
from .schedule import TABLE


@dataclass(frozen=True, eq=False)
class ContextParallelAttention:
    """Attention over the whole sequence, where a rank has the tokens in two chunks.

    Attributes:
        groups: Groups in the scheme that computes the attention.
        scheme: "p2p", "all_gather", "a2a", "a2a+p2p" or "a2a+all_gather".
        inner_call: Attention over this rank's heads.
        inner: Backend, or blocks, for that attention.
    """

    groups: ContextGroups
    scheme: str
    inner_call: AttentionCall
    inner: Bound | BlockAttention

    @property
    def name(self) -> str:
        """Backend name."""
        return self.inner.name

    @run_eagerly("attention of context-parallel ranks communicates")
    def __call__(self, call: AttentionCall, inputs: AttentionInputs) -> AttentionResult:
        """Return o [.., h * d_v] for the rank's queries, differentiable in q, k, v, bias and sink."""
        groups = self.groups
        self.check_lengths(call, inputs)
        self.check_settings(call, inputs)
        if groups.heads_size == 1:
            assert isinstance(self.inner, BlockAttention)
            return self.inner(self.inner_call, inputs)
        exchange = self.exchange(call, inputs)
        local = exchange.enter(inputs)
        if isinstance(self.inner, BlockAttention):
            result = self.inner(self.inner_call, local)
        else:
            result = attend(self.inner, self.inner_call, local)
        max_logit = None if result.max_logit is None else exchange.all_heads(result.max_logit)
        return AttentionResult(exchange.leave(result.output), max_logit)

    def check_settings(
        self,
        call: AttentionCall,
        inputs: AttentionInputs,
        in_fp8: Mapping[str, object] | None = None,
    ) -> None:
        """Compare call settings over the ranks; see `check_step`.

        Args:
            call: Attention over the whole sequence.
            inputs: This rank's tensors.
            in_fp8: FP8 attention settings.
        """
        for group in (self.groups.heads_group, self.groups.ring_group):
            if group is not None and checks_step(group, inputs.q):
                settings = shared_settings(self.scheme, call, inputs) | dict(
                    in_fp8 or {"recipe": None}
                )
                check_step(group, settings, inputs.q.device)

    def exchange(self, call: AttentionCall, inputs: AttentionInputs) -> HeadExchange:
        """Return the head exchange for a call."""
        starts_q, starts_kv = (
            None if starts is None else starts // self.groups.ring_size
            for starts in (inputs.starts_q, inputs.starts_kv)
        )
        return HeadExchange(call, self.groups, (starts_q, starts_kv))

    def check_lengths(self, call: AttentionCall, inputs: AttentionInputs) -> None:
        """Check packed sequence lengths, as far as their values are read (see `device_checks`)."""
        if not call.packed:
            return
        for name, starts in (("q", inputs.starts_q), ("kv", inputs.starts_kv)):
            demand(divides, (starts,), name, 2 * self.groups.size)
            if inputs.starts_kv is inputs.starts_q:
                break
        top_left = call.mask.banded and not call.mask.bottom_right
        if self.scheme != "a2a" and top_left and not call.same_lengths:
            demand(are_equal, (inputs.lengths_q, inputs.lengths_kv))


def shared_settings(scheme: str, call: AttentionCall, inputs: AttentionInputs) -> dict[str, object]:
    """Return the attention settings that the ranks sharing a sequence have in common."""
    unshared = ("device_type", "hardware", "switches", "needs_gradient", "bias_gradient")
    settings: dict[str, object] = {
        field.name: getattr(call, field.name)
        for field in fields(call)
        if field.name not in unshared
    }
    settings |= {"scheme": scheme, "q": form(inputs.q), "k": form(inputs.k), "v": form(inputs.v)}
    return settings


def choose_shared(
    call: AttentionCall, groups: ContextGroups
) -> ContextParallelAttention | ContiguousAttention:
    """Choose how ranks compute an attention that they share, by their token division."""
    return (
        choose_context_parallel(call, groups)
        if groups.balanced
        else choose_contiguous(call, groups)
    )


def choose_context_parallel(call: AttentionCall, groups: ContextGroups) -> ContextParallelAttention:
    """Choose the scheme and backends for an attention whose sequence the ranks of `groups` share.

    Args:
        call: Attention over the whole sequence, with all heads of a rank's tensors.
        groups: The rank's groups.

    Raises:
        ValueError: The ranks cannot share this attention. Every rank raises it before communication.
    """
    check_divisible(call, groups)
    if groups.communication == "a2a+p2p":
        # Heads first; the table chooses how the ranks in the ring share the rest.
        reason = TABLE.named("a2a").rejection_reason(
            TABLE.described((call, "a2a", groups.heads_size, 1))
        )
        if reason is not None:
            raise NoBackend(f"cp_comm_type='a2a+p2p': {reason}")
    try:
        scheme = TABLE.choose((call, groups.communication, groups.heads_size, groups.ring_size))
    except Unsupported as reasons:
        raise NoBackend(
            f"No context-parallel scheme is available for cp_comm_type={groups.communication!r}: {reasons}"
        ) from None
    if scheme == "a2a" and groups.ring_size > 1:
        groups = replace(
            groups,
            heads_group=groups.ring_group,
            heads_size=groups.ring_size,
            heads_rank=groups.ring_rank,
            ring_group=None,
            ring_size=1,
            ring_rank=0,
        )
    inner = call
    if groups.heads_size > 1:
        # The attention of the heads of this rank.
        shapes: dict[str, Any] = {}
        for name, axis in (("bias_shape", 1), ("masked_shape", -3), ("slopes_shape", -1)):
            shape = getattr(call, name)
            if shape is not None and len(shape) >= -axis and shape[axis] != 1:
                divided = list(shape)
                divided[axis] //= groups.heads_size
                shape = tuple(divided)
            shapes[name] = shape
        heads = call.heads // groups.heads_size
        score_mod = (
            None if call.score_mod is None else OwnHeads(call.score_mod, groups.heads_rank * heads)
        )
        inner = replace(
            call,
            heads=heads,
            groups=call.groups // groups.heads_size,
            score_mod=score_mod,
            **shapes,
        )
    if groups.ring_size == 1:
        return ContextParallelAttention(groups, scheme, inner, cast(Bound, choose(inner)))
    blocks = BlockAttention(plan_blocks(inner, groups, scheme == "all_gather"))
    return ContextParallelAttention(
        groups, scheme if groups.heads_size == 1 else f"a2a+{scheme}", inner, blocks
    )


def check_divisible(call: AttentionCall, groups: ContextGroups) -> None:
    """Raise ValueError unless every rank can hold its part of every sequence."""
    if not groups.balanced:
        choose_contiguous(call, groups)
        return
    chunks = 2 * groups.size
    if call.cached:
        raise ValueError(
            f"inference_params with a context-parallel group of {groups.size} ranks: a cache holds whole sequences; "
            "set the group to None for inference"
        )
    if call.packed:
        if call.bias in ("pre_scale_bias", "post_scale_bias"):
            raise ValueError(
                f"core_attention_bias_type={call.bias!r} with qkv_format='thd' and {groups.size} context-parallel "
                "ranks: rows of the bias are positions that ranks do not share; use qkv_format='bshd' or 'sbhd'"
            )
        return
    for name, length in (("queries", call.seqlen_q), ("keys", call.seqlen_kv)):
        if length % chunks:
            padded = -(-length // chunks) * chunks
            raise ValueError(
                f"{length} tokens of {name} cannot be divided into 2 * {groups.size} = {chunks} chunks, two per "
                f"context-parallel rank; pad the sequence to {padded} tokens, {padded // groups.size} per rank"
            )


def divides(bounds: list[int], name: str, chunks: int) -> None:
    """Raise ValueError unless packed sequence lengths are multiples of the chunk count."""
    for index, (begin, end) in enumerate(pairwise(bounds)):
        if (end - begin) % chunks:
            padded = -(-(end - begin) // chunks) * chunks
            raise ValueError(
                f"sequence {index} has {end - begin} tokens, which cannot be divided into {chunks} chunks, two per "
                f"context-parallel rank; pad it to {padded} tokens and pass cu_seqlens_{name}_padded "
                "(pad_thd_sequences_for_cp does both)"
            )


def are_equal(lengths_q: list[int], lengths_kv: list[int]) -> None:
    """Raise ValueError unless queries and keys have the same lengths."""
    if lengths_q != lengths_kv:
        raise ValueError(
            f"sequences have {lengths_q} queries and {lengths_kv} keys; a causal mask of context-parallel ranks needs "
            "the same lengths, or attn_mask_type='padding_causal_bottom_right'"
        )
