"""fused_attn: attention over query, key and value in any layout, with masks, biases, windows and sinks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from ...common.checks import member, switch, text_or_none
from ..context_parallel.parts import attention_in_parts
from ..context_parallel.plan import ContextParallel, make_plan
from ..context_parallel.reorder import CPStrategy
from ..context_parallel.ring import ring_attention
from ..primitives.attention import AttentionOperands, AttentionRequest, attention
from ..primitives.attention.descriptor import SequenceDescriptor, segments_at_most
from ..primitives.attention.enums import (
    AttnBiasType,
    AttnMaskType,
    AttnSoftmaxType,
    QKVLayout,
    check_kinds,
)
from ..primitives.attention.masks import Window, check_tokens, check_window, hidden_keys, reads_mask
from ..primitives.attention.reference import largest_logits
from ..primitives.attention.score_mod import check_score_mod, modifier
from ..runtime.checks import is_symbolic
from ..runtime.manual_axes import varying_axes
from ..sharding import automatic_axes, is_mesh_available, with_sharding_constraint
from .arguments import check_attention, dropout_function, separated, sink_logit

__all__ = ["fused_attn", "fused_attn_thd"]


def fused_attn(
    qkv: tuple[Array, ...],
    bias: Array | None,
    sequence_descriptor: SequenceDescriptor | Array | None,
    seed: Array | None,
    attn_bias_type: AttnBiasType,
    attn_mask_type: AttnMaskType,
    qkv_layout: QKVLayout,
    softmax_type: AttnSoftmaxType,
    scaling_factor: float,
    dropout_probability: float,
    is_training: bool,
    max_segments_per_seq: int = 1,
    window_size: Window | None = None,
    context_parallel_strategy: CPStrategy = CPStrategy.DEFAULT,
    context_parallel_causal_load_balanced: bool = False,
    context_parallel_axis: str = "",
    context_checkpoint_name: str = "context",
    softmax_offset: Array | None = None,
    stripe_size: int | None = None,
    score_mod: Callable[..., Array] | None = None,
    score_mod_bprop: Callable[..., Array] | None = None,
    score_mod_tensors: Any = None,
    score_mod_bprop_tensors: Any = None,
    return_max_logit: bool = False,
) -> Any:
    """Attention: out [b, q, h, dv] in the dtype of the query. Rows without a visible key are zero.

    Args:
        qkv: One array [b, s, 3, h, d], two [b, q, h, d] and [b, k, 2, g, d], or three; g divides h.
        bias: Bias [1 or b, 1 or h, q, k], differentiable, or None.
        sequence_descriptor: Packed sequences; None for one sequence per row; or a mask, where True hides a key, which
            mask types with padding read, and causal ones with a window.
        seed: jax.random key for dropout.
        attn_bias_type: Whether and where the bias is added.
        attn_mask_type: Mask type.
        qkv_layout: Layout in which qkv is passed.
        softmax_type: Softmax type.
        scaling_factor: Factor for the scores.
        dropout_probability: Dropout rate for the probabilities.
        is_training: Apply the dropout.
        max_segments_per_seq: Most sequences in a packed row. Larger segment numbers raise an error, or count as padding
            if they are traced.
        window_size: (left, right) tokens that a query sees; -1 is unlimited.
        context_parallel_strategy: ALL_GATHER (the default) gathers keys and values, RING passes them on.
        context_parallel_causal_load_balanced: Tokens are in `reorder_causal_load_balancing` order.
        context_parallel_axis: Mesh axis over which tokens are sharded, by default the MeshResource's cp_resource.
        context_checkpoint_name: Output name for recomputation policies.
        softmax_offset: LEARNABLE_SOFTMAX offset [1, h, 1, 1], differentiable.
        stripe_size: Tokens per stripe in load-balanced packed rows.
        score_mod: (scores, tensors), (graph, score, tensors) or (score, b, h, q, kv, **tensors) -> scores [b, h, q, k],
            before the softmax; the number of required parameters distinguishes them.
        score_mod_bprop: Derivative (gradient, scores, tensors), (graph, gradient, tensors) or (gradient, score, b, h,
            q, kv, **tensors) -> gradient; by default automatic.
        score_mod_tensors: Arrays for score_mod. A graph's tensors have one element, or broadcast to [b, h, q, k].
        score_mod_bprop_tensors: Arrays for score_mod_bprop.
        return_max_logit: Return a pair of out and the largest scaled and visible logits [h] over all rows, in the
            query's dtype and without a gradient. Over context-parallel devices the logits are computed once more, with
            memory for all logits.

    Raises:
        ValueError: Arguments do not fit together, such as return_max_logit with a score_mod.
    """
    switch("return_max_logit", return_max_logit)
    if return_max_logit and score_mod is not None:
        raise ValueError(
            "return_max_logit=True with a score_mod, which changes the logits; leave one of them out"
        )
    check_kinds(attn_bias_type, attn_mask_type, qkv_layout, softmax_type)
    switch("is_training", is_training)
    text_or_none("context_checkpoint_name", context_checkpoint_name)
    query, key, value = separated(qkv, qkv_layout)
    check_attention(query, key, value, bias, attn_bias_type, dropout_probability, scaling_factor)
    window, extents = check_window(window_size), (query.shape[0], query.shape[1], key.shape[1])
    sequence_descriptor = check_tokens(
        sequence_descriptor,
        attn_mask_type,
        window,
        qkv_layout.is_thd(),
        max_segments_per_seq,
        (query.shape[0], query.shape[2], *extents[1:]),
    )
    plan = make_plan(
        context_parallel_axis,
        context_parallel_strategy,
        context_parallel_causal_load_balanced,
        qkv_layout,
        stripe_size,
        extents[1:],
    )
    if (
        score_mod is not None
        and not context_parallel_axis
        and not context_parallel_causal_load_balanced
    ):
        plan = None  # the MeshResource's axis is only a default, and a score_mod needs whole arrays
    other_arguments = {
        "sequence_descriptor": sequence_descriptor is not None,
        "window_size": window,
        "dropout_probability": dropout_probability,
        "context_parallel_axis": "" if plan is None else plan.axis,
    }
    check_score_mod(
        score_mod,
        score_mod_bprop,
        (score_mod_tensors, score_mod_bprop_tensors),
        qkv_layout,
        attn_bias_type,
        attn_mask_type,
        softmax_type,
        other_arguments,
    )
    call = AttentionOperands(
        query,
        key,
        value,
        bias,
        attn_bias_type,
        attn_mask_type,
        window,
        functools.partial(
            _hidden, sequence_descriptor, attn_mask_type, qkv_layout, window, plan, extents
        ),
        _lengths(sequence_descriptor, attn_mask_type, extents),
        scaling_factor,
        sink_logit(softmax_type, softmax_offset, query.shape[2]),
        _dropout(seed, dropout_probability) if is_training else None,
        None
        if score_mod is None
        else modifier(score_mod, score_mod_bprop, score_mod_tensors, score_mod_bprop_tensors),
        functools.partial(_bounds, sequence_descriptor, qkv_layout, extents, max_segments_per_seq),
        None
        if seed is None or not is_training or not dropout_probability
        else functools.partial(jax.random.bits, seed, (3,), jnp.uint32),
    )
    request = AttentionRequest(
        query.dtype,
        qkv_layout,
        attn_bias_type,
        attn_mask_type,
        softmax_type,
        dropout_probability,
        query.shape[2],
        key.shape[2],
        query.shape[1],
        key.shape[1],
        query.shape[3],
        value.shape[3],
        window,
        is_training,
        "cpu",
        _rows(sequence_descriptor, attn_mask_type, qkv_layout, window),
        score_mod is not None,
        segments_at_most(sequence_descriptor, max_segments_per_seq),
        batch=_least_rows(query.shape[0]),
        max_logit=return_max_logit and plan is None,
    )
    if plan is not None:
        out = checkpoint_name(
            _attend_over_devices(plan, request, call, sequence_descriptor, extents),
            context_checkpoint_name,
        )
        return (out, largest_logits(call)) if return_max_logit else out
    result = attention(request, call)
    if not return_max_logit:
        return checkpoint_name(result, context_checkpoint_name)
    return checkpoint_name(result[0], context_checkpoint_name), result[1]


def fused_attn_thd(
    qkv: tuple[Array, ...],
    bias: Array | None,
    q_seq_lens: Array,
    kv_seq_lens: Array,
    q_seq_offsets: Array,
    kv_seq_offsets: Array,
    seed: Array | None,
    attn_bias_type: AttnBiasType,
    attn_mask_type: AttnMaskType,
    qkv_layout: QKVLayout,
    *arguments: Any,
    **options: Any,
) -> Any:
    """`fused_attn` for packed rows under its former arguments.

    Args:
        q_seq_lens: Query sequence lengths, int32 [b, n].
        kv_seq_lens: Key sequence lengths, int32 [b, n].
        q_seq_offsets: Query sequence starts, int32 [b, n + 1].
        kv_seq_offsets: Key sequence starts, int32 [b, n + 1].
        arguments: Further `fused_attn` arguments. Without a softmax type the softmax is vanilla.
        options: `fused_attn` keyword arguments.

    The other arguments are as in `fused_attn`.
    """
    if not arguments or not isinstance(arguments[0], AttnSoftmaxType):
        arguments = (options.pop("softmax_type", AttnSoftmaxType.VANILLA_SOFTMAX), *arguments)
    member("qkv_layout", qkv_layout, QKVLayout)
    if not qkv_layout.is_thd():
        raise ValueError(f"qkv_layout={qkv_layout.name} has one sequence per row; call fused_attn")
    descriptor = SequenceDescriptor.from_seqlens_and_offsets(
        (q_seq_lens, kv_seq_lens), (q_seq_offsets, kv_seq_offsets)
    )
    return fused_attn(
        qkv,
        bias,
        descriptor,
        seed,
        attn_bias_type,
        attn_mask_type,
        qkv_layout,
        *arguments,
        **options,
    )


def _attend_over_devices(
    plan: ContextParallel,
    request: AttentionRequest,
    call: AttentionOperands,
    descriptor: SequenceDescriptor | Array | None,
    extents: tuple[int, int, int],
) -> Array:
    """Compute attention with tokens sharded over plan.axis, by parts if they support the call."""
    # Parts compute whole rows where every query attends to all keys, to those up to its own position, or to a window.
    causal = request.mask.is_causal()
    left, right = (-1 if side >= request.keys - 1 else side for side in request.window or (-1, -1))
    window = None if left < 0 and (causal or right < 0) else (left, 0 if causal else right)
    plain = request.queries == request.keys or not (causal or window)
    plain = plain and request.rows == "whole" and not request.layout.is_thd()
    # A derivative rule inside our shard_map cannot make gradients vary over an outer shard_map's axes.
    inside = varying_axes((call.query, call.key, call.value))
    if plain and call.bias is None and call.dropped is None and not inside:
        full_request = request._replace(
            mask=AttnMaskType.CAUSAL_MASK if causal else AttnMaskType.NO_MASK,
            softmax=AttnSoftmaxType.VANILLA_SOFTMAX,
            dropout=0.0,
            window=window,
        )
        return attention_in_parts(
            plan, full_request, call.query, call.key, call.value, call.scale, call.sink
        )
    if plan.ring:
        for name, value in (("bias", call.bias), ("dropout", call.dropped)):
            if value is not None:
                raise NotImplementedError(
                    f"context_parallel_strategy=RING with {name}; use CPStrategy.ALL_GATHER"
                )
        if descriptor is not None and not isinstance(descriptor, SequenceDescriptor):
            raise NotImplementedError(
                "context_parallel_strategy=RING with a mask; give a SequenceDescriptor, or use CPStrategy.ALL_GATHER"
            )
        segments = plan.segments(descriptor, call.mask_type, request.layout, extents)
        return ring_attention(
            plan,
            call.query,
            call.key,
            call.value,
            segments,
            call.mask_type,
            call.window,
            call.scale,
            call.sink,
        )
    query, key, value = (_shard_tokens(x, plan.axis) for x in (call.query, call.key, call.value))
    # Keys and values are replicated: XLA gathers them, and scatters their gradients.
    replicated = replace(
        call, query=query, key=_shard_tokens(key, None), value=_shard_tokens(value, None)
    )
    return _shard_tokens(attention(request._replace(tokens="spread"), replicated), plan.axis)


def _shard_tokens(x: Array, axis: str | None) -> Array:
    """Shard the tokens of x [b, s, h, d] over a mesh axis, or replicate them; XLA shards the other axes."""
    free = PartitionSpec.UNCONSTRAINED
    return with_sharding_constraint(x, PartitionSpec(free, axis, free, free))


def _hidden(
    descriptor: SequenceDescriptor | Array | None,
    mask_type: AttnMaskType,
    layout: QKVLayout,
    window: Window | None,
    plan: ContextParallel | None,
    extents: tuple[int, int, int],
) -> Array | None:
    if plan is None or (descriptor is not None and not isinstance(descriptor, SequenceDescriptor)):
        return hidden_keys_mask(descriptor, mask_type, layout, window, extents)
    segments = plan.segments(descriptor, mask_type, layout, extents)
    # Bottom-right masks already count positions from the end.
    kind = AttnMaskType.PADDING_CAUSAL_MASK if mask_type.is_causal() else AttnMaskType.PADDING_MASK
    return hidden_keys(kind, window, segments, *extents[1:])


def _lengths(
    descriptor: SequenceDescriptor | Array | None,
    mask_type: AttnMaskType,
    extents: tuple[int, int, int],
) -> tuple[Array, Array] | None:
    if isinstance(descriptor, SequenceDescriptor) and mask_type.is_padding():
        return descriptor.limited_lengths(*extents[1:])
    return None


def _bounds(
    descriptor: SequenceDescriptor | Array | None,
    layout: QKVLayout,
    extents: tuple[int, int, int],
    most: int,
) -> tuple[Array, Array, Array, Array]:
    if not isinstance(descriptor, SequenceDescriptor):
        raise _no_descriptor(layout)
    return descriptor.bounds(*extents, most)


def _no_descriptor(layout: QKVLayout) -> ValueError:
    return ValueError(
        f"qkv_layout={layout.name} without a SequenceDescriptor; make one with its from_ methods"
    )


def _rows(
    descriptor: SequenceDescriptor | Array | None,
    mask_type: AttnMaskType,
    layout: QKVLayout,
    window: Window | None,
) -> str:
    if not isinstance(descriptor, SequenceDescriptor):
        return "whole" if descriptor is None or not reads_mask(mask_type, window) else "mask"
    if not mask_type.is_padding() and not layout.is_thd():
        return "whole"
    only_lengths = descriptor.seqlens[0].size and not descriptor.seq_offsets[0].size
    return "lengths" if only_lengths else "segments"


def _dropout(seed: Array | None, rate: float) -> Callable[[Array], Array] | None:
    if rate == 0:
        return None
    if seed is None:
        raise ValueError(f"dropout_probability={rate} without a seed; give a key of jax.random")
    return dropout_function(seed, rate)


def _least_rows(batch: int) -> int:
    """Per-device batch rows if all automatic mesh axes shard the batch; 1 if it is symbolic."""
    if is_symbolic(batch):
        return 1
    return -(-batch // math.prod(automatic_axes().values())) if is_mesh_available() else batch


def hidden_keys_mask(
    descriptor: SequenceDescriptor | Array | None,
    mask_type: AttnMaskType,
    layout: QKVLayout,
    window: Window | None,
    extents: tuple[int, int, int],
) -> Array | None:
    """Hidden-key mask for a descriptor or a mask; extents are (batch, queries, keys)."""
    batch, queries, keys = extents
    if isinstance(descriptor, SequenceDescriptor):
        segments = None
        if mask_type.is_padding() or layout.is_thd():
            segments = descriptor.segments(batch, queries, keys)
        return hidden_keys(mask_type, window, segments, queries, keys)
    if layout.is_thd():
        raise _no_descriptor(layout)
    hidden = hidden_keys(mask_type, window, None, queries, keys)
    if descriptor is None or not reads_mask(mask_type, window):
        return hidden
    padding = descriptor.astype(bool)
    return padding if hidden is None else padding | hidden
