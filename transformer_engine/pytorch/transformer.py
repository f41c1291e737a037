"""TransformerLayer: h = x + attention(norm(x)); y = h + mlp(norm(h)), and its variants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .attention.dot_product_attention.prepare import CallArguments
from .attention.inference import InferenceParams
from .attention.multi_head_attention import MultiheadAttention
from .constants import LayerTypes
from .functions.dropout import bias_dropout_add, dropout
from .module.drop_path import DropPath, batch_dimension
from .module.layernorm import LayerNorm
from .module.layernorm_mlp import LayerNormMLP
from .module.rmsnorm import RMSNorm
from .module.settings import hand_down, refuse_if_fixed

FORMATS = ("sbhd", "bshd", "thd")
NORMS = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}


# Attributes that children work by, and those that decided which children there are.
_WORKED_BY = {
    "attn_input_format": ("self_attention.qkv_format", "inter_attention.qkv_format"),
    "enc_dec_attn_mask_type": ("inter_attention.attn_mask_type",),
    "layer_number": ("self_attention.layer_number", "inter_attention.layer_number"),
    "self_attn_mask_type": ("self_attention.attn_mask_type",),
    "sequence_parallel": (
        "self_attention.sequence_parallel",
        "inter_attention.sequence_parallel",
        "layernorm_mlp.sequence_parallel",
        "layernorm.sequence_parallel",
    ),
}
_FIXED = frozenset(
    {"apply_residual_connection_post_layernorm", "layer_type", "output_layernorm", "parallel_attention_mlp"}
)


class TransformerLayer(nn.Module):
    """One layer of "Attention Is All You Need" on x [s, b, hidden], [b, s, hidden] or [t, hidden].

        h = x + drop(self_attention(norm(x)));  h = h + drop(inter_attention(norm(h), encoder));  y = h +
                                                drop(mlp(norm(h)))

    layer_type           "encoder", or "decoder" which has inter_attention
    apply_residual_connection_post_layernorm   the residual is norm(x) instead of x
    output_layernorm     normalize after the layer instead of before the self attention
    parallel_attention_mlp   y = x + drop(self_attention(norm(x)) + mlp(norm(x)))
    hidden_dropout, drop_path_rate   dropout of features, and of whole samples, in front of each residual sum
    attn_input_format    "sbhd", "bshd" or "thd"
    Children: self_attention, inter_attention, layernorm_mlp, layernorm. The other arguments are
    MultiheadAttention's and LayerNormMLP's.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: Callable | None = None,
        output_layer_init_method: Callable | None = None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_window_size: tuple[int, int] | None = None,
        enc_dec_bottom_right_diagonal: bool | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        params_dtype: torch.dtype | None = None,
        get_rng_state_tracker: Callable | None = None,
        fuse_wgrad_accumulation: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        sequence_parallel: bool = False,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: str = "encoder",
        drop_path_rate: float = 0.0,
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        rotary_pos_interleaved: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        ub_tp_comm_overlap: bool = False,
        ub_overlap_ag: bool = True,
        ub_overlap_rs: bool = True,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = True,
        ub_bulk_wgrad: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        activation_params: dict[str, float] | None = None,
        normalization: str = "LayerNorm",
        device: torch.device | str | int = "cuda",
        attn_input_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        softmax_type: str = "vanilla",
    ) -> None:
        super().__init__()
        _check_variant(
            layer_type,
            parallel_attention_mlp,
            apply_residual_connection_post_layernorm,
            output_layernorm,
            attn_input_format,
            drop_path_rate,
            normalization,
        )
        self.layer_type = layer_type
        self.layer_number = layer_number
        self.hidden_dropout = hidden_dropout
        self.self_attn_mask_type = self_attn_mask_type
        self.enc_dec_attn_mask_type = enc_dec_attn_mask_type
        self.output_layernorm = output_layernorm
        self.parallel_attention_mlp = parallel_attention_mlp
        self.apply_residual_connection_post_layernorm = apply_residual_connection_post_layernorm
        self.attn_input_format = attn_input_format
        self.tp_group = tp_group
        if tp_group is not None:
            tp_size = torch.distributed.get_world_size(tp_group)
        self.tp_size = tp_size
        self.sequence_parallel = sequence_parallel and tp_size > 1
        shared: dict[str, Any] = {
            "bias": bias,
            "device": device,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "get_rng_state_tracker": get_rng_state_tracker,
            "init_method": init_method,
            "micro_batch_size": micro_batch_size,
            "normalization": normalization,
            "output_layer_init_method": output_layer_init_method,
            "params_dtype": params_dtype,
            "return_bias": not parallel_attention_mlp,
            "seq_length": seq_length,
            "sequence_parallel": self.sequence_parallel,
            "set_parallel_mode": set_parallel_mode,
            "tp_group": tp_group,
            "tp_size": tp_size,
            "zero_centered_gamma": zero_centered_gamma,
        }
        attention: dict[str, Any] = {
            **shared,
            "attention_dropout": attention_dropout,
            "fuse_qkv_params": fuse_qkv_params,
            "kv_channels": kv_channels,
            "layer_number": layer_number,
            "layernorm_epsilon": layernorm_epsilon,
            "num_gqa_groups": num_gqa_groups,
            "qk_norm_before_rope": qk_norm_before_rope,
            "qk_norm_eps": qk_norm_eps,
            "qk_norm_type": qk_norm_type,
            "qkv_format": attn_input_format,
            "qkv_weight_interleaved": qkv_weight_interleaved,
            "rotary_pos_interleaved": rotary_pos_interleaved,
            "softmax_type": softmax_type,
        }
        post_norm_residual = apply_residual_connection_post_layernorm
        self.self_attention = MultiheadAttention(
            hidden_size,
            num_attention_heads,
            attn_mask_type=self_attn_mask_type,
            window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal,
            input_layernorm=not output_layernorm,
            return_layernorm_output=post_norm_residual and not output_layernorm,
            attention_type="self",
            name=_name(name, "self_attention"),
            **attention,
        )
        self.inter_attention = None
        if layer_type == "decoder":
            self.inter_attention = MultiheadAttention(
                hidden_size,
                num_attention_heads,
                attn_mask_type=enc_dec_attn_mask_type,
                window_size=enc_dec_window_size,
                bottom_right_diagonal=enc_dec_bottom_right_diagonal,
                input_layernorm=True,
                return_layernorm_output=post_norm_residual,
                attention_type="cross",
                name=_name(name, "inter_attention"),
                **attention,
            )
        self.layernorm_mlp = LayerNormMLP(
            hidden_size,
            ffn_hidden_size,
            eps=layernorm_epsilon,
            activation=activation,
            activation_params=activation_params,
            return_layernorm_output=post_norm_residual,
            name=_name(name, "layernorm_mlp"),
            **shared,
        )
        self.layernorm = None
        if output_layernorm:
            self.layernorm = NORMS[normalization](
                hidden_size,
                eps=layernorm_epsilon,
                sequence_parallel=self.sequence_parallel,
                params_dtype=params_dtype,
                zero_centered_gamma=zero_centered_gamma,
                device=device,
            )
        self.drop_path = DropPath(drop_path_rate, batch_dim=batch_dimension(attn_input_format))

    def __setattr__(self, name: str, value: Any) -> None:
        refuse_if_fixed(self, name, value, _FIXED)
        super().__setattr__(name, value)
        hand_down(self, name, value, _WORKED_BY)
        if name == "attn_input_format" and "drop_path" in self.__dict__.get("_modules", ()):
            self.drop_path.batch_dim = batch_dimension(value)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Set the tensor-parallel process group of every child."""
        self.tp_group = tp_group
        for child in (self.self_attention, self.inter_attention, self.layernorm_mlp):
            if child is not None:
                child.set_tensor_parallel_group(tp_group)

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: list[int] | None, cp_stream: Any, cp_comm_type: str = "p2p"
    ) -> None:
        """Set the ranks that share the sequence, see DotProductAttention."""
        for child in (self.self_attention, self.inter_attention):
            if child is not None:
                child.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        self_attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        encoder_output: Tensor | None = None,
        enc_dec_attn_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        enc_dec_bottom_right_diagonal: bool | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: InferenceParams | None = None,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        fast_zero_fill: bool = True,
        pad_between_seqs: bool | None = None,
    ) -> Tensor:
        """y, shaped like hidden_states, in their dtype or torch.autocast's.

        attention_mask, self_attn_mask_type, window_size, rotary_pos_emb and inference_params speak of the
        self attention, enc_dec_* and encoder_output of the decoder's cross attention; cu_seqlens_q,
        max_seqlen_q of both, cu_seqlens_kv, max_seqlen_kv of the cross attention. A core attention bias goes
        to the self attention.
        """
        if self.layer_type == "decoder" and encoder_output is None:
            raise ValueError("layer_type='decoder' needs encoder_output")
        if self.inter_attention is not None:
            # Ahead of the self attention, which records; that one's own arguments it checks itself.
            self.inter_attention.check_call(
                hidden_states,
                encoder_output,
                None,
                CallArguments(
                    enc_dec_attn_mask,
                    None,
                    (cu_seqlens_q, cu_seqlens_kv),
                    (cu_seqlens_q_padded, cu_seqlens_kv_padded),
                    (max_seqlen_q, max_seqlen_kv),
                    enc_dec_attn_mask_type,
                    enc_dec_window_size,
                    enc_dec_bottom_right_diagonal,
                    "no_bias",
                    None,
                    None,
                    None,
                    pad_between_seqs,
                ),
            )
        hidden_states = _in_autocast(hidden_states).contiguous()
        queries = {
            "is_first_microbatch": is_first_microbatch,
            "checkpoint_core_attention": checkpoint_core_attention,
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_q_padded": cu_seqlens_q_padded,
            "max_seqlen_q": max_seqlen_q,
            "fast_zero_fill": fast_zero_fill,
            "pad_between_seqs": pad_between_seqs,
        }
        attended = self.self_attention(
            hidden_states,
            attention_mask=attention_mask,
            attn_mask_type=self_attn_mask_type,
            window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal,
            inference_params=inference_params,
            rotary_pos_emb=rotary_pos_emb,
            core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias,
            alibi_slopes=alibi_slopes,
            cu_seqlens_kv=cu_seqlens_q,
            cu_seqlens_kv_padded=cu_seqlens_q_padded,
            max_seqlen_kv=max_seqlen_q,
            **queries,
        )
        if self.parallel_attention_mlp:
            transformed = self.layernorm_mlp(hidden_states, is_first_microbatch=is_first_microbatch)
            return self._output(self._add((attended + transformed, None), hidden_states))
        hidden_states = self._add(attended, hidden_states)
        del attended  # with no backward to come, nothing else holds it
        if self.inter_attention is not None:
            attended = self.inter_attention(
                hidden_states,
                attention_mask=enc_dec_attn_mask,
                encoder_output=encoder_output,
                attn_mask_type=enc_dec_attn_mask_type,
                window_size=enc_dec_window_size,
                bottom_right_diagonal=enc_dec_bottom_right_diagonal,
                cu_seqlens_kv=cu_seqlens_kv,
                cu_seqlens_kv_padded=cu_seqlens_kv_padded,
                max_seqlen_kv=max_seqlen_kv,
                **queries,
            )
            hidden_states = self._add(attended, hidden_states)
            del attended
        transformed = self.layernorm_mlp(hidden_states, is_first_microbatch=is_first_microbatch)
        return self._output(self._add(transformed, hidden_states))

    def _add(self, branch: tuple[Tensor | None, ...], residual: Tensor) -> Tensor:
        """residual + drop_path(dropout(x + bias)) of branch (x, bias[, another residual])."""
        x, bias, *normed = branch
        assert x is not None
        if normed:
            assert normed[0] is not None
            residual = normed[0]
        p = self.hidden_dropout if self.training else 0.0
        drops_path = self.training and self.drop_path.drop_prob > 0.0
        if not drops_path and x.dtype == residual.dtype:
            return bias_dropout_add(x, bias, residual, p)
        if bias is not None:
            x = x + bias
        if p > 0.0:
            x = dropout(x, p)
        return residual + (self.drop_path(x) if drops_path else x)

    def _output(self, hidden_states: Tensor) -> Tensor:
        return hidden_states if self.layernorm is None else self.layernorm(hidden_states)


def _in_autocast(hidden_states: Tensor) -> Tensor:
    """In torch.autocast's dtype while that is on: the residual sums then are in it, from the first to the last."""
    device = hidden_states.device.type
    if not torch.is_autocast_enabled(device):
        return hidden_states
    return hidden_states.to(torch.get_autocast_dtype(device))


def _check_variant(
    layer_type: str,
    parallel: bool,
    post_norm_residual: bool,
    output_layernorm: bool,
    attn_input_format: str,
    drop_path_rate: float,
    normalization: str,
) -> None:
    if layer_type not in LayerTypes:
        raise ValueError(f"layer_type={layer_type!r} does not exist; choose one of {', '.join(LayerTypes)}")
    if normalization not in NORMS:
        raise ValueError(f"normalization={normalization!r} does not exist; choose one of {', '.join(NORMS)}")
    if attn_input_format not in FORMATS:
        raise ValueError(f"attn_input_format={attn_input_format!r}; choose one of {', '.join(FORMATS)}")
    if parallel and (layer_type != "encoder" or post_norm_residual or output_layernorm):
        raise ValueError(
            "parallel_attention_mlp=True is for layer_type='encoder' without "
            "apply_residual_connection_post_layernorm and output_layernorm; leave those out"
        )
    if drop_path_rate > 0.0 and attn_input_format == "thd":
        raise ValueError(
            f"drop_path_rate={drop_path_rate} with attn_input_format='thd', which has no axis of samples; "
            "use sbhd or bshd"
        )


def _name(parent: str | None, child: str) -> str | None:
    return None if parent is None else f"{parent}.{child}"
