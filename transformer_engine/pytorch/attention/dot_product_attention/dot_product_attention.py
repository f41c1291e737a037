"""DotProductAttention: out [.., h * d_v] = softmax(scale * q k^T + bias, masked) v."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ....common.bounded import Bounded
from ....common.dispatch import Backend, undisturbed
from ...backward_thread import keep_backward_here
from ...device import canonical_device
from ...distributed.recompute import checkpoint as recompute_checkpoint
from ...distributed.tensor_parallel import set_tensor_model_parallel_attributes
from ...module.base import TransformerEngineBaseModule
from ...module.parameters import ParameterInit
from ...quantization import QuantizerRole
from ...quantization.autocast import current
from ...tracing import text_of_number
from . import fp8
from . import mask as masks
from .arguments import accept_older_state, check_heads, one_of, unpacked
from .call import Described, Options, Plan, call_key, request_of
from .choose import check, choose, choose_when_traced
from .context_parallel_group import check_context_parallel_group
from .last_choice import last_choice as _attention_backends
from .prepare import CallArguments, prepared
from .request import QKV_FORMATS, SOFTMAX_TYPES, AttentionInputs, AttentionRequest, AttentionResult
from .roles import attention_roles
from .score_mod import resolved
from .sequences import Sequences
from .utils import AttentionLogging

if TYPE_CHECKING:
    from ..inference import InferenceParams

# Calls that a layer remembers the backend of, before it forgets them all.
MAX_PLANS = 64


class DotProductAttention(TransformerEngineBaseModule):
    """out [.., h * d_v] = softmax(softmax_scale * q k^T + bias) v where the mask shows; a row it hides is 0.

    kv_channels         head size, or (of queries and keys, of values)
    num_gqa_groups      key and value heads; query head i reads number i // (heads / groups). Default: all
                        heads
    qkv_format          "sbhd", "bshd" or "thd" (packed sequences, with a padding mask and cu_seqlens)
    attn_mask_type      no_mask, padding, causal, padding_causal, causal_bottom_right,
                        padding_causal_bottom_right or arbitrary; forward() can override it, and window_size
                        and qkv_format
    window_size         (left, right) keys that a query sees besides its own; -1: no limit
    bottom_right_diagonal   windows of masks that are not causal end in the last query and key; default True
    softmax_scale       default 1 / sqrt(head size of queries and keys)
    softmax_type        "off-by-one" adds 1 to the softmax's denominator, "learnable" exp(softmax_offset [h])
    return_max_logit    return (out, the largest logit of each head [h])
    get_rng_state_tracker   dropout runs inside its fork(), unless sequence_parallel: then the caller forked
    layer_number        names the layer's part of a cache; attention_type  "self": keys have the queries' lengths
    cp_group            context-parallel group; more than one rank is not supported
    score_mod           score_mod(score, b, h, i, j) -> score, element by element, after scale and bias; forward()
                        can override it. Autograd differentiates it, and the tensors that it holds
    """

    num_products = 3
    _softmax_scale_text: str
    _attention_dropout_text: str

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool | None = False,
        name: str | None = None,
        score_mod: Callable[..., Tensor] | None = None,
    ) -> None:
        super().__init__(name)
        # It has no weights: made under quantized_model_init, too, each call's recipe gives it states of its own.
        self.primary_weights_in_fp8 = self.fp8_parameters = False
        if not AttentionLogging._is_logging_setup:
            AttentionLogging.setup_logging()
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        check_heads(num_attention_heads, groups, tp_size)
        one_of("attention_type", attention_type, ("self", "cross"))
        one_of("softmax_type", softmax_type, SOFTMAX_TYPES)
        one_of("qkv_format", qkv_format, QKV_FORMATS)
        self.num_attention_heads = num_attention_heads
        self.num_gqa_groups = groups
        self.head_dim_qk, self.head_dim_v = (
            (kv_channels,) * 2 if isinstance(kv_channels, int) else kv_channels
        )
        self.hidden_size_per_attention_head_k = self.head_dim_qk
        self.hidden_size_per_attention_head_v = self.head_dim_v
        self.attention_dropout = attention_dropout
        self.qkv_format = qkv_format
        self.attn_mask_type = masks.canonical_name(attn_mask_type)
        self.window_size = masks.check_set_window_size(attn_mask_type, window_size)
        self._given_window = window_size
        self.bottom_right_diagonal = bottom_right_diagonal
        self.sequence_parallel = sequence_parallel
        self.tp_size = tp_size if tp_group is None else torch.distributed.get_world_size(tp_group)
        self.set_tensor_parallel_group(tp_group)
        self.num_gqa_groups_per_partition = groups // self.tp_size
        self.get_rng_state_tracker = get_rng_state_tracker
        self.layer_number = layer_number
        self.attention_type = attention_type
        self.softmax_scale = 1.0 / math.sqrt(self.head_dim_qk) if softmax_scale is None else softmax_scale
        self.softmax_type = softmax_type
        self.return_max_logit = bool(return_max_logit)
        self.score_mod = score_mod
        self._masks: Bounded[tuple[Any, ...], masks.Mask] = Bounded(MAX_PLANS)
        self._plans: Bounded[tuple[Any, ...], Plan] = Bounded(MAX_PLANS)
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)
        self.softmax_offset: torch.nn.Parameter | None
        if softmax_type != "learnable":
            self.register_parameter("softmax_offset", None)
        else:
            offset = torch.nn.Parameter(
                torch.empty(self.heads, dtype=torch.float32, device=canonical_device("cuda"))
            )
            set_tensor_model_parallel_attributes(offset, self.tp_size > 1, 0, 1)
            # 0: a learnable sink begins as "off-by-one"
            self.register_parameter("softmax_offset", offset, ParameterInit(torch.nn.init.zeros_))
            self.reset_parameters()
        self._register_load_state_dict_pre_hook(accept_older_state)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "attn_mask_type":
            value = masks.canonical_name(value)
        elif name == "window_size":
            self.__dict__["_given_window"] = value  # what a name of a mask makes of it is found in each call
        elif name in ("softmax_scale", "attention_dropout"):
            self.__dict__[f"_{name}_text"] = text_of_number(value)
        super().__setattr__(name, value)

    @property
    def heads(self) -> int:
        """Query heads of this tensor-parallel rank."""
        return self.num_attention_heads // self.tp_size

    def get_quantizer_roles(self, *, fwd: bool, num_quantizers: int) -> list[QuantizerRole | None]:
        return attention_roles(self.name or "", fwd, num_quantizers)

    def set_context_parallel_group(
        self,
        cp_group: Any,
        cp_global_ranks: list[int] | None,
        cp_stream: Any,
        cp_comm_type: str = "p2p",
    ) -> None:
        """Set the ranks that share the sequence; None or one rank means that this one has all of it."""
        check_context_parallel_group(cp_group, cp_comm_type)
        self.cp_group = cp_group
        self.cp_global_ranks = cp_global_ranks
        self.cp_stream = cp_stream
        self.cp_comm_type = cp_comm_type

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
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: InferenceParams | None = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool | None = False,
        num_splits: int | None = 1,
        bf16_backward: bool | None = None,
        score_mod: Callable | None = None,
        score_mod_bprop: Callable | None = None,
        score_mod_tensors: Mapping[str, Tensor] | None = None,
        score_mod_bprop_tensors: Mapping[str, Tensor] | None = None,
        qkv_layer: Tensor | None = None,
        kv_layer: Tensor | None = None,
        qkv_interleave_dim: int = -3,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """out [.., h * d_v], or (out, max_logit [h]) with return_max_logit.

        attention_mask    True = masked out: padding masks [b, 1, 1, s] (a pair of them for cross attention),
                          or anything broadcastable to [b, h, s_q, s_kv] for "arbitrary"
        cu_seqlens_*      int32 [b + 1] cumulative lengths, instead of padding masks; *_padded: where the
                          sequences of a thd tensor begin, when tokens that belong to none lie between them
        max_seqlen_*      thd: the longest sequence; read from the device when missing
        core_attention_bias   broadcastable to [b, h, s_q, s_kv], added after softmax_scale ("post_scale_bias" as
                          core_attention_bias_type) or before ("pre_scale_bias")
        alibi_slopes      float32 [h] or [b, h] for "alibi": -slope * |distance from the diagonal| is added
        inference_params  keys and values are appended to its cache, and attention is to all cached ones; lengths
                          are the cache's, cu_seqlens_* and attention_mask are not read
        checkpoint_core_attention   compute the attention again in the backward pass, and keep its inputs alone
        qkv_layer, kv_layer   packed [.., 3, h, d] (qkv_interleave_dim=-3) or [.., h, 3, d] (-2) instead of q,
                              k, v
        num_splits        parts in which a long row of keys is computed, None: as many as the backend likes
        fp8_output        return the output as a Float8Tensor; bf16_backward   compute gradients in high precision;
                          both for attention in FP8, which autocast's recipe asks for (fp8_dpa or fp8_mha)
        score_mod_tensors   tensors by name, which score_mod gets as keywords behind its indices
        fast_zero_fill is accepted and changes nothing.

        Raises ValueError before anything is written or drawn. Lengths and offsets on a GPU are trusted; TE_CHECK=1 has
        them checked too, see `device_checks`. What they point to outside of the tensors would be read.
        """
        score_mod = self.score_mod if score_mod is None else score_mod
        if not (score_mod_tensors is score_mod_bprop is score_mod_bprop_tensors is None):
            score_mod = resolved(score_mod, score_mod_tensors, score_mod_bprop, score_mod_bprop_tensors)
        q, k, v = unpacked(query_layer, key_layer, value_layer, qkv_layer, kv_layer, qkv_interleave_dim)
        arguments = CallArguments(
            attention_mask,
            qkv_format,
            (cu_seqlens_q, cu_seqlens_kv),
            (cu_seqlens_q_padded, cu_seqlens_kv_padded),
            (max_seqlen_q, max_seqlen_kv),
            attn_mask_type,
            window_size,
            bottom_right_diagonal,
            core_attention_bias_type,
            core_attention_bias,
            alibi_slopes,
            inference_params,
            pad_between_seqs,
            num_splits,
            score_mod,
        )
        call, written = prepared(self, q, k, v, arguments)
        request, backend = self._plan(*call)
        state = current()
        if not torch.compiler.is_compiling():
            self.check_repetition(state)
        if state.enabled and inference_params is None and fp8.attention_recipe(state.recipe) is not None:
            backend = fp8.chosen(
                self, state, request, bool(fp8_output), bf16_backward, checkpoint_core_attention
            )
            if not torch.compiler.is_compiling():
                _attention_backends.seen = (request, backend)
        elif fp8_output:
            raise ValueError(
                "fp8_output=True needs an FP8 attention; run under autocast with fp8_dpa or fp8_mha in the recipe"
            )
        if inference_params is not None and not written:
            assert self.layer_number is not None
            inference_params.write(self.layer_number, k, v, call.options.q_format)
        result = self._run(backend, request, call.inputs, checkpoint_core_attention)
        return result.output if result.max_logit is None else (result.output, result.max_logit)

    def check_call(self, q: Described, k: Described, v: Described, arguments: CallArguments) -> None:
        """Raise what forward would for tensors of these shapes, and change nothing."""
        call, _ = prepared(self, q, k, v, arguments, only_shapes=True)
        check(request_of(*call))

    def _resolved_mask(
        self, mask_type: str, window: tuple[int, int] | None, bottom_right_diagonal: bool | None
    ) -> masks.Mask:
        """What a name, a window and an alignment mean together, looked up where they were met before."""
        if torch.compiler.is_compiling():
            return masks.resolve(mask_type, window, bottom_right_diagonal)
        pair = window if window is None or type(window) is tuple else masks.window_pair(window)
        key = (mask_type, pair, bottom_right_diagonal)
        mask = self._masks.get(key)
        return self._masks.keep(key, masks.resolve(*key)) if mask is None else mask

    def _plan(
        self, options: Options, sequences: Sequences, inputs: AttentionInputs, slopes_given: bool
    ) -> Plan:
        """The request of a call and the backend that takes it, looked up where the call was met before."""
        if torch.compiler.is_compiling():
            request = request_of(options, sequences, inputs, slopes_given)
            return Plan(request, choose_when_traced(request))
        if not undisturbed():
            request = request_of(options, sequences, inputs, slopes_given)
            _attention_backends.seen = plan = Plan(request, choose(request))
            return plan
        if _attention_backends.requires_update:
            self._plans.clear()
            _attention_backends.requires_update = False
        key = call_key(options, sequences, inputs, slopes_given)
        plan = self._plans.get(key)
        if plan is None:
            request = request_of(options, sequences, inputs, slopes_given)
            plan = self._plans.keep(key, Plan(request, choose(request)))
            if request.device_type == "cuda":
                keep_backward_here()
        _attention_backends.seen = plan
        return plan

    def _run(
        self,
        backend: Backend[AttentionRequest] | fp8.Attention | fp8.Recomputed,
        request: AttentionRequest,
        inputs: AttentionInputs,
        recompute: bool,
    ) -> AttentionResult:
        """Run the chosen backend, in the fork of the random state, recomputed in the backward if asked."""
        tracker = self.get_rng_state_tracker
        forks = tracker is not None and request.dropout > 0.0 and not self.sequence_parallel
        if not (forks or recompute):
            return backend.run(request, inputs)

        def attend(*tensors: Tensor | None) -> AttentionResult:
            with tracker().fork() if forks else nullcontext():  # pyright: ignore[reportOptionalCall]
                return backend.run(request, AttentionInputs(*tensors))  # pyright: ignore[reportArgumentType]

        if not recompute:
            return attend(*inputs)
        if forks:
            return recompute_checkpoint(
                attend, *inputs, get_rng_state_tracker=tracker, tp_group=self.tp_group, use_reentrant=False
            )
        return torch_checkpoint(attend, *inputs, use_reentrant=False)  # pyright: ignore[reportReturnType]
