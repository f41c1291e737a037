"""DotProductAttention: out [.., h * d_v] = softmax(softcap(scale * q k^T) + bias, masked) v."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ....common.memory import Memory
from ....common.numbers import to_bool
from ...compat.argument_orders import accepts_older_orders, declare_call
from ...constants import AttentionType, CPLoadBalancingStrategy, SoftmaxType, TensorFormat
from ...distributed.tensor_parallel import set_tensor_model_parallel_attributes
from ...functions.attention.autograd import Attending, AttentionExecution, Projection, attend
from ...functions.attention.context_parallel.groups import context_groups
from ...functions.attention.fp8 import RecomputedFP8Attention
from ...module.arguments import accepts, head_sizes
from ...module.base import TransformerEngineBaseModule
from ...module.config import configure_class
from ...module.parameters import ParameterInit
from ...primitives.attention import mask as masks
from ...primitives.attention.call import AttentionInputs
from ...quantization import QuantizerRole
from ...quantization.autocast import current, eager_thread_state
from ...runtime.device import canonical_device, cast_to_autocast_dtype, is_meta
from ...runtime.tracing import distinct_tensors, export_mode
from ...runtime.warn_once import warn_once
from ..inference import InferenceParams
from .arguments import RULES, accept_older_state, check_heads, unpack_qkv
from .fp8_recipe import attention_recipe, attention_roles, find_requested_backward, fp8_attention
from .last_choice import last_choice as _attention_backends
from .plan import (
    MAX_PLANS,
    PLAIN,
    AttentionPlan,
    CheckedArguments,
    check_arguments,
    make_plan,
    prepare,
)
from .policies import attend_by_policies, check_policies
from .score_mod import bound_score_mod
from .settings import AttentionArguments, AttentionConfig
from .utils import AttentionLogging

__all__ = ["DotProductAttention", "_attention_backends"]

ONE = 1  # num_splits default; True equals it but is another object
NAMES = (type(None), str)  # name types that can be part of a key


def _same_as(name: str) -> property:
    """Return a property that is an alias for a setting."""
    return property(
        lambda self: getattr(self, name), lambda self, value: setattr(self, name, value)
    )


def _divide_groups(layer: Any, name: str, value: Any) -> None:
    """Divide the groups among the ranks."""
    if name == "num_gqa_groups":
        layer.num_gqa_groups_per_partition = value // layer.tp_size


@configure_class(AttentionConfig, written=_divide_groups, rules=RULES)
class DotProductAttention(TransformerEngineBaseModule):
    """out [.., h * d_v] = softmax(softmax_scale * q k^T + bias) v over the visible keys.

    The output is 0 for a query without visible keys. The other arguments are as in `Linear`.

    Args:
        num_attention_heads: Query heads on all ranks of tp_group.
        kv_channels: Head size, or a pair (query and key size, value size).
        num_gqa_groups: Key and value heads, by default all heads; query head i reads i // (heads / groups).
        attention_dropout: Softmax dropout rate; get_rng_state_tracker is forked unless sequence_parallel.
        qkv_format: "sbhd", "bshd" or "thd" (packed sequences, with a padding mask and cu_seqlens).
        attn_mask_type: no_mask, arbitrary, padding, or (padding_)causal(_bottom_right); forward() can override it.
        window_size: (left, right) keys that a query sees besides its own; -1 is unlimited.
        bottom_right_diagonal: Windows in masks that are not causal end at the last query and key; default True.
        softcap: c * tanh(s / c) limits the scaled scores s, a pre_scale_bias included; 0.0: no limit.
        layer_number: Layer number, which identifies its cache.
        attention_type: "self" or "cross"; with "self" keys have the queries' lengths by default.
        cp_group: Ranks that share a sequence, as in `set_context_parallel_group`.
        cp_global_ranks: Has no effect, because groups contain their ranks.
        cp_stream: CUDA stream for ring transfers.
        cp_comm_type: "p2p", "all_gather", "a2a" or "a2a+p2p".
        softmax_scale: Default 1 / sqrt(query and key head size).
        softmax_type: "off-by-one" adds 1 to the softmax's denominator, "learnable" exp(softmax_offset [h]).
        return_max_logit: Return (out, the largest logit per head [h]).
        score_mod: score_mod(score, b, h, i, j) or score_mod(graph, score, tensors), pointwise, after scale and bias.
    """

    num_products = 3
    earlier_extra_states = ("fused_attention._extra_state",)
    _config: AttentionConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    num_attention_heads: int
    num_gqa_groups: int
    num_gqa_groups_per_partition: int
    head_dim_qk: int
    head_dim_v: int
    attention_dropout: float
    qkv_format: str
    attn_mask_type: str
    window_size: tuple[int, int] | None
    bottom_right_diagonal: bool | None
    softcap: float
    layer_number: int | None
    attention_type: str
    softmax_scale: float
    softmax_type: str
    return_max_logit: bool
    cp_group: Any
    cp_global_ranks: Any
    cp_stream: Any
    cp_comm_type: str
    load_balancing_strategy: CPLoadBalancingStrategy
    hidden_size_per_attention_head_k = _same_as("head_dim_qk")
    hidden_size_per_attention_head_v = _same_as("head_dim_v")

    @accepts_older_orders(v2_19=("softcap",), v2_11=("bottom_right_diagonal", "softcap"))
    @accepts(kv_channels=head_sizes, **RULES)
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: TensorFormat = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: AttentionType = "self",
        cp_group: Any = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: SoftmaxType = "vanilla",
        return_max_logit: bool | None = False,
        name: str | None = None,
        score_mod: Callable[..., Tensor] | None = None,
    ) -> None:
        super().__init__(name)
        if not AttentionLogging._is_logging_setup:
            AttentionLogging.setup_logging()
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        check_heads(num_attention_heads, groups, tp_size)
        size_qk, size_v = (
            kv_channels if isinstance(kv_channels, tuple) else (kv_channels, kv_channels)
        )
        if tp_group is not None:
            tp_size = torch.distributed.get_world_size(tp_group)
        self._configure(
            # No weights: the recipe of each call determines the states, under quantized_model_init too.
            primary_weights_in_fp8=False,
            fp8_parameters=False,
            num_attention_heads=num_attention_heads,
            num_gqa_groups=groups,
            num_gqa_groups_per_partition=groups // tp_size,
            head_dim_qk=size_qk,
            head_dim_v=size_v,
            attention_dropout=attention_dropout,
            qkv_format=qkv_format,
            attn_mask_type=attn_mask_type,
            window_size=masks.check_set_window_size(attn_mask_type, window_size),
            bottom_right_diagonal=bottom_right_diagonal,
            softcap=softcap,
            sequence_parallel=sequence_parallel,
            tp_size=tp_size,
            layer_number=layer_number,
            attention_type=attention_type,
            softmax_scale=1.0 / math.sqrt(size_qk) if softmax_scale is None else softmax_scale,
            softmax_type=softmax_type,
            return_max_logit=bool(return_max_logit),
        )
        self._plans: Memory[tuple[Any, ...], AttentionPlan] = Memory(make_plan, MAX_PLANS)
        self.set_tensor_parallel_group(tp_group)
        self.get_rng_state_tracker = get_rng_state_tracker
        self.score_mod = score_mod
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)
        self.softmax_offset: torch.nn.Parameter | None
        if softmax_type != "learnable":
            self.register_parameter("softmax_offset", None)
        else:
            self.make_softmax_offset("cuda")
        self._register_load_state_dict_pre_hook(accept_older_state)

    def make_softmax_offset(self, device: torch.device | str | int) -> None:
        """Create the parameter softmax_offset [h]."""
        offset = torch.nn.Parameter(
            torch.empty(self.heads, dtype=torch.float32, device=canonical_device(device))
        )
        set_tensor_model_parallel_attributes(offset, self.tp_size > 1, 0, 1)
        # 0: a learnable sink starts as "off-by-one"
        self.register_parameter("softmax_offset", offset, ParameterInit(torch.nn.init.zeros_))
        self.reset_parameters(defer_init=is_meta(device))

    @property
    def heads(self) -> int:
        """Query heads on this tensor-parallel rank."""
        return self._config.heads

    def get_quantizer_roles(self, *, fwd: bool, num_quantizers: int) -> list[QuantizerRole | None]:
        return attention_roles(self.name or "", fwd, num_quantizers)

    def set_context_parallel_group(
        self,
        cp_group: Any,
        cp_global_ranks: list[int] | None,
        cp_stream: Any,
        cp_comm_type: str = "p2p",
        load_balancing_strategy: CPLoadBalancingStrategy = CPLoadBalancingStrategy.DUAL_CHUNK_SWAP,
    ) -> None:
        """Set the ranks that share each sequence: rank r of n holds the chunks r and 2 n - 1 - r of its 2 n chunks.

        Args:
            cp_group: Group of ranks, "a2a+p2p": [group that exchanges heads, ring]; None for whole sequences.
            cp_stream: CUDA stream for ring transfers. cp_global_ranks has no effect.
            cp_comm_type: "p2p", "all_gather", "a2a" or "a2a+p2p".
            load_balancing_strategy: NO_LOAD_BALANCE for contiguous packed sequence pieces, with
                "all_gather" and a causal mask.
        """
        groups = context_groups(cp_group, cp_stream, cp_comm_type, load_balancing_strategy)
        if groups is None and cp_stream is not None:
            warn_once(
                "cp_stream",
                "cp_stream has no effect without a cp_group of several ranks; leave it None",
            )
        options = {
            "cp_group": cp_group,
            "cp_global_ranks": cp_global_ranks,
            "cp_stream": cp_stream,
            "cp_comm_type": cp_comm_type,
            "load_balancing_strategy": load_balancing_strategy,
        }
        # Clients set an unchanged group before every call; plans are cached by the identity of the record.
        if any(getattr(self._config, name) != value for name, value in options.items()):
            self._configure(**options)

    @accepts_older_orders(
        v2_19=("softcap",), v2_11=("bottom_right_diagonal", "softcap", "bf16_backward")
    )
    def forward(
        self,
        query_layer: Tensor | None = None,
        key_layer: Tensor | None = None,
        value_layer: Tensor | None = None,
        attention_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: InferenceParams | None = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool | None = False,
        bf16_backward: bool | None = False,
        num_splits: int | None = 1,
        score_mod: Callable | None = None,
        score_mod_bprop: Callable | None = None,
        score_mod_tensors: Mapping[str, Tensor] | None = None,
        score_mod_bprop_tensors: Mapping[str, Tensor] | None = None,
        qkv_layer: Tensor | None = None,
        kv_layer: Tensor | None = None,
        qkv_interleave_dim: int = -3,
        thd_attention_policies: list[dict[str, Any]] | None = None,
        thd_attention_policy_dispatch: str = "auto",
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return out [.., h * d_v], or (out, max_logit [h]) with return_max_logit.

        Args:
            query_layer: Queries [s, b, h, d], [b, s, h, d] or [t, h, d], by qkv_format.
            key_layer: Keys in the same layout, with num_gqa_groups heads.
            value_layer: Values in the same layout, with num_gqa_groups heads of the value size.
            attention_mask: True = masked out: padding masks [b, 1, 1, s] (a pair for cross attention), or a mask
                broadcastable to [b, h, s_q, s_kv] for "arbitrary".
            cu_seqlens_q: Cumulative query sequence lengths, int32 [b + 1], instead of padding masks.
            cu_seqlens_kv: The same for keys and values, in self attention the queries' by default.
            cu_seqlens_q_padded: Sequence starts in a thd query tensor, int32 [b + 1], if there are
                tokens between them that belong to no sequence.
            cu_seqlens_kv_padded: The same for keys and values; the queries' if cu_seqlens_kv is None too.
                Context-parallel ranks pass whole sequence bounds.
            max_seqlen_q: Longest query sequence length (thd); by default read from the device.
            max_seqlen_kv: The same for keys and values.
            core_attention_bias_type: "no_bias", "pre_scale_bias", "post_scale_bias" or "alibi".
            core_attention_bias: Broadcastable to [b, h, s_q, s_kv]; added before or after the scores are scaled.
            alibi_slopes: float32 [h] or [b, h] for "alibi", which adds -slope * |distance from the diagonal|.
            inference_params: Cache that keys and values are appended to; all cached ones are attended to, with the
                cache's lengths, and cumulative lengths and attention_mask have no effect.
            checkpoint_core_attention: Save only the inputs, and recompute the attention in the backward pass.
            qkv_layer: Packed [.., 3, h, d] (qkv_interleave_dim=-3) or [.., h, 3, d] (-2) instead of q, k and v.
            kv_layer: Packed [.., 2, h, d] or [.., h, 2, d] instead of k and v.
            num_splits: Parts in which a long key row is processed; None lets the backend choose.
            pad_between_seqs: Whether a thd tensor has tokens that belong to no sequence; by default determined from
                the bounds.
            qkv_interleave_dim: Axis with the 3 or 2 in qkv_layer or kv_layer.
            fp8_output: Return a Float8Tensor. Like bf16_backward, for FP8 attention, which the
                recipe of autocast requests by fp8_dpa or fp8_mha.
            bf16_backward: Compute FP8 attention gradients in high precision; by default
                NVTE_FP8_DPA_BWD decides.
            score_mod_tensors: Named tensors for score_mod, passed as keywords or as the third argument with a graph.
            score_mod_bprop: score_mod's gradient, in either form; by default by autograd.
            score_mod_bprop_tensors: Named tensors, passed to score_mod_bprop.
            fast_zero_fill: Has no effect.
            thd_attention_policies: Masks and windows for packed sequence groups, see `policies`.
            thd_attention_policy_dispatch: "auto", or "grouped" to gather the tokens of each policy.

        The other arguments are as in `DotProductAttention`.

        Raises:
            ValueError: An argument cannot be used; nothing has been written or drawn. Lengths and offsets on a GPU
                are only checked with TE_CHECK=1 (see `device_checks`); wrong ones read outside the tensors.
        """
        if not (checkpoint_core_attention is fp8_output is bf16_backward is False):
            checkpoint_core_attention = to_bool(
                "checkpoint_core_attention", checkpoint_core_attention
            )
            fp8_output = to_bool("fp8_output", fp8_output)
            bf16_backward = bf16_backward is not None and to_bool("bf16_backward", bf16_backward)
        if torch._C._is_any_autocast_enabled():
            inputs = (query_layer, key_layer, value_layer, qkv_layer, kv_layer)
            query_layer, key_layer, value_layer, qkv_layer, kv_layer = cast_to_autocast_dtype(
                inputs
            )
        score_mod = self.score_mod if score_mod is None else score_mod
        if not (
            score_mod is score_mod_tensors is score_mod_bprop is score_mod_bprop_tensors is None
        ):
            inputs = (score_mod, score_mod_tensors, score_mod_bprop, score_mod_bprop_tensors)
            score_mod = bound_score_mod(*inputs)
        tracing = torch.compiler.is_compiling() or export_mode.onnx
        plan_inputs = (self._config, self.training, self._parameters["softmax_offset"])
        if not tracing and (
            attention_mask
            is cu_seqlens_q
            is cu_seqlens_kv
            is cu_seqlens_q_padded
            is cu_seqlens_kv_padded
            is max_seqlen_q
            is max_seqlen_kv
            is window_size
            is bottom_right_diagonal
            is softcap
            is core_attention_bias
            is alibi_slopes
            is inference_params
            is pad_between_seqs
            is score_mod
            is qkv_layer
            is kv_layer
            is thd_attention_policies
            is None
            and type(query_layer) is Tensor
            and type(key_layer) is Tensor
            and type(value_layer) is Tensor
            and type(qkv_format) in NAMES
            and type(attn_mask_type) in NAMES
            and num_splits is ONE
            and core_attention_bias_type == "no_bias"
        ):
            names = (qkv_format, attn_mask_type)
            prepared = prepare(
                self._plans,
                *plan_inputs,
                (query_layer, key_layer, value_layer),
                PLAIN,
                False,
                names,
            )
            return self._attend(
                prepared, tracing, checkpoint_core_attention, fp8_output, bf16_backward
            )
        qkv = unpack_qkv(
            query_layer, key_layer, value_layer, qkv_layer, kv_layer, qkv_interleave_dim
        )
        arguments = AttentionArguments(
            attention_mask,
            cu_seqlens_q,
            cu_seqlens_kv,
            cu_seqlens_q_padded,
            cu_seqlens_kv_padded,
            core_attention_bias,
            alibi_slopes,
            inference_params,
            max_seqlen_q,
            max_seqlen_kv,
            attn_mask_type,
            window_size,
            bottom_right_diagonal,
            core_attention_bias_type,
            pad_between_seqs,
            softcap,
            thd_attention_policies,
            thd_attention_policy_dispatch,
            qkv_format,
            num_splits,
            score_mod,
        )
        if thd_attention_policies is not None:
            state = current() if tracing else eager_thread_state().state
            policies = check_policies(
                self._config, arguments, qkv[0].device, state, bool(fp8_output)
            )
            modes = {
                "checkpoint_core_attention": checkpoint_core_attention,
                "bf16_backward": bf16_backward,
            }
            return attend_by_policies(partial(self.forward, **modes), policies, qkv, arguments)
        checked = check_arguments(self._config, arguments, lambda: qkv, tracing)
        prepared = prepare(None if tracing else self._plans, *plan_inputs, qkv, checked)
        return self._attend(prepared, tracing, checkpoint_core_attention, fp8_output, bf16_backward)

    if TYPE_CHECKING:

        @declare_call(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    _layer_forward = forward

    def attend_checked(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        checked: CheckedArguments,
        checkpoint_core_attention: bool,
        fp8_output: bool,
        projection: Projection | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute forward() for an attention layer in eager mode, which has checked and planned the call.

        Args:
            qkv: Queries, keys and values.
            checked: Arguments and plan of the call.
            checkpoint_core_attention: As in `forward`.
            fp8_output: As in `forward`.
            projection: Projection that needs a gradient; q, k and v are views of it, unknown to autograd.
        """
        plan_inputs = (self._config, self.training, self._parameters["softmax_offset"])
        prepared = prepare(self._plans, *plan_inputs, qkv, checked, projection is not None)
        return self._attend(
            prepared, False, checkpoint_core_attention, fp8_output, False, projection
        )

    def _attend(
        self,
        prepared: tuple[AttentionPlan, AttentionInputs, Callable[[], object] | None],
        tracing: bool,
        recompute: bool,
        fp8_output: bool | None,
        bf16_backward: bool | None,
        projection: Projection | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        (call, backend, *_), inputs, append = prepared
        attending: Attending = backend
        if tracing:
            state = current()
            if call.needs_gradient:
                inputs = AttentionInputs(*distinct_tensors(inputs))  # pyright: ignore[reportArgumentType]
        else:
            state = eager_thread_state().state
            before = self.numerics.state_without_gradients
            if before is not state and (before is not None or not torch.is_grad_enabled()):
                self.check_repetition(state)
        in_fp8 = state.enabled and not (call.cached or export_mode.onnx)
        recipe = attention_recipe(state.recipe) if in_fp8 else None
        if recipe is not None:
            if not tracing:
                self.follow_device(inputs.q.device)
            state = state if recipe is state.recipe else state._replace(recipe=recipe)
            requested = find_requested_backward(bf16_backward)
            attending, fp8 = fp8_attention(self, state, call, backend, bool(fp8_output), requested)
            if recompute:
                attending = RecomputedFP8Attention(attending)
            if not tracing:
                _attention_backends.seen = (call, fp8)
        elif fp8_output:
            raise ValueError(
                "fp8_output=True needs an FP8 attention; run under autocast with fp8_dpa or fp8_mha in the recipe"
            )
        if append is not None:
            append()  # nothing raises from here on
        has_own_dropout = call.dropout > 0.0 and not self._config.sequence_parallel
        tracker = self.get_rng_state_tracker if has_own_dropout else None
        execution = None
        if recompute or tracker is not None:
            execution = AttentionExecution(tracker, recompute, self.tp_group)
        output, max_logit = attend(attending, call, inputs, projection, execution)
        return output if max_logit is None else (output, max_logit)
