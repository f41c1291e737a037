"""DotProductAttention: out [.., h * d_v] = softmax(scale * q k^T + bias, masked) v."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ....common import env
from ...device import canonical_device
from ...distributed.recompute import checkpoint as recompute_checkpoint
from ...distributed.tensor_parallel import set_tensor_model_parallel_attributes
from ...module.base import TransformerEngineBaseModule
from ...module.parameters import ParameterInit
from ...quantization.autocast import current
from . import mask as masks
from .alibi import default_slopes
from .arguments import check_heads, check_tensors, checked_bias, one_of, unpacked
from .choose import choose
from .context_parallel_group import check_context_parallel_group
from .request import (
    BIAS_TYPES,
    QKV_FORMATS,
    SOFTMAX_TYPES,
    AttentionInputs,
    AttentionRequest,
    AttentionResult,
    Switches,
)
from .sequences import Sequences, given_sequences
from .utils import AttentionLogging

if TYPE_CHECKING:
    from ..inference import InferenceParams

# The original keeps its last choice here, and its callers set backend_selection_requires_update after
# changing NVTE_* variables. The choice is made afresh for every call, so nothing reads this.
_attention_backends: dict[str, Any] = {
    "attention_params": None,
    "use_flash_attention": None,
    "flash_attention_backend": None,
    "use_fused_attention": None,
    "fused_attention_backend": None,
    "use_unfused_attention": None,
    "backend_selection_requires_update": False,
}


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
    softmax_type        "off-by-one" adds 1 to the softmax's denominator, "learnable" exp(softmax_offset [h])
    return_max_logit    return (out, the largest logit of each head [h])
    get_rng_state_tracker   dropout runs inside its fork(), unless sequence_parallel: then the caller forked
    cp_group            context-parallel group; more than one rank is not supported
    """

    num_products = 3

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
    ) -> None:
        super().__init__(name)
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
        self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v = (
            self.head_dim_qk,
            self.head_dim_v,
        )
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
        self._register_load_state_dict_pre_hook(_accept_older_extra_state)

    @property
    def heads(self) -> int:
        """Query heads of this tensor-parallel rank."""
        return self.num_attention_heads // self.tp_size

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
        core_attention_bias   broadcastable to [b, h, s_q, s_kv]; alibi_slopes float32 [h] or [b, h]
        inference_params  keys and values are appended to its cache, and attention is to all cached ones
        qkv_layer, kv_layer   packed [.., 3, h, d] (qkv_interleave_dim=-3) or [.., h, 3, d] (-2) instead of q,
                              k, v
        fast_zero_fill, num_splits, bf16_backward are accepted and change nothing.
        """
        self._refuse_unavailable(bool(fp8_output), score_mod or score_mod_bprop)
        q, k, v = unpacked(query_layer, key_layer, value_layer, qkv_layer, kv_layer, qkv_interleave_dim)
        q_format = kv_format = self.qkv_format if qkv_format is None else qkv_format
        one_of("qkv_format", q_format, QKV_FORMATS)
        groups = self.num_gqa_groups_per_partition
        check_tensors(q, k, v, q_format, self.heads, groups, self.head_dim_qk, self.head_dim_v)
        mask_type = self.attn_mask_type if attn_mask_type is None else masks.canonical_name(attn_mask_type)
        window = self._given_window if window_size is None else window_size
        if bottom_right_diagonal is None:
            bottom_right_diagonal = self.bottom_right_diagonal
        if inference_params is not None:
            if self.layer_number is None:
                raise ValueError(
                    "inference_params needs layer_number, which names the cache; set it at construction"
                )
            cached = inference_params.step(self.layer_number, k, v, q_format)
            k, v, cu_seqlens_q, cu_seqlens_kv, max_seqlen_kv, kv_format = cached
            cu_seqlens_q_padded = cu_seqlens_kv_padded = attention_mask = None
            mask_type = "padding_causal_bottom_right" if "causal" in mask_type else "padding"
        mask = masks.resolve(mask_type, window, bottom_right_diagonal)
        sequences = given_sequences(
            q,
            k,
            q_format,
            kv_format,
            mask,
            self.attention_type,
            attention_mask,
            (cu_seqlens_q, cu_seqlens_kv),
            (cu_seqlens_q_padded, cu_seqlens_kv_padded),
            (max_seqlen_q, max_seqlen_kv),
            pad_between_seqs,
        )
        request = self._request(q, k, v, q_format, kv_format, mask, sequences, core_attention_bias_type)
        slopes = self._slopes(request, alibi_slopes, q.device)
        bias = checked_bias(request, core_attention_bias)
        inputs = AttentionInputs(
            q,
            k,
            v,
            lengths_q=sequences.lengths_q,
            lengths_kv=sequences.lengths_kv,
            starts_q=sequences.starts_q,
            starts_kv=sequences.starts_kv,
            masked_q=sequences.masked_q,
            masked_kv=sequences.masked_kv,
            masked=sequences.masked,
            bias=bias,
            slopes=slopes,
            sink=self._sink(q),
        )
        result = self._run(request, inputs, checkpoint_core_attention)
        return result.output if result.max_logit is None else (result.output, result.max_logit)

    def _refuse_unavailable(self, fp8_output: bool, score_mod: Callable | None) -> None:
        state = current()
        # A recipe from outside need not have the two fields.
        asked = (getattr(state.recipe, field, False) for field in ("fp8_dpa", "fp8_mha"))
        if state.enabled and any(asked):
            raise NotImplementedError(
                "FP8 attention is not available; set fp8_dpa=False and fp8_mha=False in the recipe"
            )
        if fp8_output:
            raise NotImplementedError("fp8_output=True is not available; leave it False")
        if score_mod is not None:
            raise NotImplementedError("score_mod is not available; use core_attention_bias")

    def _request(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_format: str,
        kv_format: str,
        mask: masks.Mask,
        sequences: Sequences,
        bias_type: str,
    ) -> AttentionRequest:
        one_of("core_attention_bias_type", bias_type, BIAS_TYPES)
        return AttentionRequest(
            dtype=q.dtype,
            device_type=q.device.type,
            batch=sequences.batch,
            heads=q.shape[-2],
            groups=k.shape[-2],
            seqlen_q=sequences.max_q,
            seqlen_kv=sequences.max_kv,
            head_dim_qk=q.shape[-1],
            head_dim_v=v.shape[-1],
            q_format=q_format,
            kv_format=kv_format,
            mask=mask,
            scale=self.softmax_scale,
            bias=bias_type,
            softmax=self.softmax_type,
            dropout=self.attention_dropout if self.training else 0.0,
            padded_between=sequences.padded_between,
            max_logit=self.return_max_logit,
            needs_gradient=torch.is_grad_enabled()
            and (q.requires_grad or k.requires_grad or v.requires_grad),
            deterministic=is_deterministic(),
            switches=Switches.from_environment(),
        )

    def _slopes(self, request: AttentionRequest, given: Tensor | None, device: torch.device) -> Tensor | None:
        """ALiBi's slopes of this rank's heads, as given or the usual ones."""
        if request.bias != "alibi":
            if given is not None:
                raise ValueError(
                    f'alibi_slopes with core_attention_bias_type={request.bias!r}; it must be "alibi"'
                )
            return None
        if given is not None:
            if given.shape[-1] != request.heads:
                raise ValueError(f"alibi_slopes {list(given.shape)} does not end in {request.heads} heads")
            return given
        rank = torch.distributed.get_rank(self.tp_group) if self.tp_group is not None else 0
        return default_slopes(self.num_attention_heads, device)[
            rank * request.heads : (rank + 1) * request.heads
        ]

    def _sink(self, q: Tensor) -> Tensor | None:
        if self.softmax_type == "off-by-one":
            return torch.zeros(self.heads, dtype=torch.float32, device=q.device)
        return self.softmax_offset

    def _run(self, request: AttentionRequest, inputs: AttentionInputs, recompute: bool) -> AttentionResult:
        """Run the chosen backend, in the fork of the random state, recomputed in the backward if asked."""
        backend = choose(request)
        tracker = self.get_rng_state_tracker
        forks = tracker is not None and request.dropout > 0.0 and not self.sequence_parallel

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


def is_deterministic() -> bool:
    """Must gradients be bitwise repeatable?"""
    return not env.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") or torch.are_deterministic_algorithms_enabled()


def _accept_older_extra_state(state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """Checkpoints have this module's extra state one level deeper, or (very old) not at all."""
    older = state_dict.pop(prefix + "fused_attention._extra_state", None)
    if prefix + "_extra_state" not in state_dict:
        state_dict[prefix + "_extra_state"] = torch.empty(0, dtype=torch.uint8) if older is None else older
