"""TransformerLayer: h = x + attention(norm(x)); y = h + mlp(norm(h)), and its variants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from .attention.dot_product_attention.arguments import RULES
from .attention.dot_product_attention.settings import AttentionArguments, pack_arguments
from .attention.inference import InferenceParams
from .attention.layer_settings import child_name
from .attention.multi_head_attention import MultiheadAttention
from .compat.argument_orders import accepts_older_orders, declare_call
from .compat.replaceable import is_unintercepted
from .constants import (
    ActivationName,
    CPLoadBalancingStrategy,
    NormalizationName,
    SoftmaxType,
    TensorFormat,
)
from .distributed.tensor_parallel import OverlapFlags, warn_of_unused_overlap
from .functions.dropout import bias_dropout_add, dropout
from .module.arguments import accepts, size_or_none, window
from .module.config import configure_class
from .module.drop_path import DropPath, batch_dimension
from .module.layernorm import LayerNorm
from .module.layernorm_mlp import LayerNormMLP
from .module.rmsnorm import RMSNorm
from .module.shared_settings import hand_down_settings
from .quantization.resizable_state import CheckedLoading
from .runtime.checks import tensor
from .runtime.device import autocast_dtype, autocast_is_active
from .runtime.warn_once import warn_once
from .transformer_settings import (
    CHILD_ATTRIBUTES,
    FIXED,
    LAYER_RULES,
    TransformerLayerConfig,
    check_layer_options,
)

NORMS = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}

# Constructor arguments that children have under the same name.
_NORM_ARGUMENTS = ("device", "params_dtype", "sequence_parallel", "zero_centered_gamma")
_SHARED_ARGUMENTS = (
    *_NORM_ARGUMENTS,
    "bias",
    "fuse_wgrad_accumulation",
    "get_rng_state_tracker",
    "hidden_size",
    "init_method",
    "micro_batch_size",
    "normalization",
    "output_layer_init_method",
    "return_bias",
    "seq_length",
    "set_parallel_mode",
    "tp_group",
    "tp_size",
    *OverlapFlags._fields,
)
_ATTENTION_ARGUMENTS = (
    "attention_dropout",
    "fuse_qkv_params",
    "kv_channels",
    "layer_number",
    "layernorm_epsilon",
    "num_attention_heads",
    "num_gqa_groups",
    "qk_norm_before_rope",
    "qk_norm_eps",
    "qk_norm_type",
    "qkv_weight_interleaved",
    "rotary_pos_interleaved",
    "softcap",
    "softmax_type",
)
_MLP_ARGUMENTS = ("activation", "activation_params", "ffn_hidden_size")


def _write_setting(layer: TransformerLayer, name: str, value: Any) -> None:
    if name == "attn_input_format" and "drop_path" in (layer.__dict__.get("_modules") or ()):
        layer.drop_path.batch_dim = batch_dimension(value)


@configure_class(
    TransformerLayerConfig,
    fixed=FIXED,
    handed_down=CHILD_ATTRIBUTES,
    written=_write_setting,
    rules=RULES,
)
class TransformerLayer(CheckedLoading):
    """One layer of "Attention Is All You Need" on x [s, b, hidden], [b, s, hidden] or [t, hidden].

        h = x + drop(self_attention(norm(x)))
        h = h + drop(inter_attention(norm(h), encoder))
        y = h + drop(mlp(norm(h)))

    Args:
        layer_type: "encoder", or "decoder", which has inter_attention.
        apply_residual_connection_post_layernorm: The residual is norm(x) instead of x.
        output_layernorm: Normalize after the layer instead of before the self attention.
        parallel_attention_mlp: y = x + drop(self_attention(norm(x)) + mlp(norm(x))).
        output_layer_init_method: Fills proj.weight and fc2_weight; by default with N(0, 0.023).
        bias: Add learned biases to the projections and the MLP.
        hidden_dropout: Probability of dropping a feature before each residual sum.
        drop_path_rate: Probability of dropping a whole sample before each residual sum.
        self_attn_mask_type: `attn_mask_type` for the self attention.
        enc_dec_attn_mask_type: `attn_mask_type` for inter_attention.
        enc_dec_window_size: `window_size` for inter_attention.
        enc_dec_bottom_right_diagonal: `bottom_right_diagonal` for inter_attention.
        attn_input_format: "sbhd", "bshd" or "thd".
        ub_tp_comm_overlap: Apply the other arguments that begin with ub_, see `Linear`.

    Children: self_attention, inter_attention, layernorm_mlp, layernorm. The other arguments are as
    in `MultiheadAttention` and `LayerNormMLP`.
    """

    _config: TransformerLayerConfig
    layer_type: str
    layer_number: int | None
    attn_input_format: str
    hidden_dropout: float
    self_attn_mask_type: str
    enc_dec_attn_mask_type: str
    softcap: float
    apply_residual_connection_post_layernorm: bool
    output_layernorm: bool
    parallel_attention_mlp: bool
    sequence_parallel: bool
    tp_group: Any
    tp_size: int

    @accepts_older_orders(
        v2_19=("softcap",),
        v2_11=("bottom_right_diagonal", "softcap", "enc_dec_bottom_right_diagonal"),
    )
    @accepts(**RULES, **LAYER_RULES)
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
        softcap: float = 0.0,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_bottom_right_diagonal: bool | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
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
        layer_type: Literal["encoder", "decoder"] = "encoder",
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
        activation: ActivationName = "gelu",
        activation_params: dict[str, float] | None = None,
        normalization: NormalizationName = "LayerNorm",
        device: torch.device | str | int = "cuda",
        attn_input_format: TensorFormat = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        softmax_type: SoftmaxType = "vanilla",
    ) -> None:
        arguments = dict(locals())
        super().__init__()
        check_layer_options(
            layer_type,
            parallel_attention_mlp,
            apply_residual_connection_post_layernorm,
            output_layernorm,
            attn_input_format,
            drop_path_rate,
        )
        if tp_group is not None:
            arguments["tp_size"] = torch.distributed.get_world_size(tp_group)
        arguments["sequence_parallel"] = sequence_parallel and arguments["tp_size"] > 1
        arguments["return_bias"] = not parallel_attention_mlp
        arguments |= self._overlap_flags(arguments)
        self._config = TransformerLayerConfig(
            **{field.name: arguments[field.name] for field in fields(TransformerLayerConfig)}
        )
        self._create_attentions(arguments)
        self.layernorm_mlp = LayerNormMLP(
            eps=arguments["layernorm_epsilon"],
            return_layernorm_output=self.apply_residual_connection_post_layernorm,
            name=child_name(arguments["name"], "layernorm_mlp"),
            **{name: arguments[name] for name in (*_SHARED_ARGUMENTS, *_MLP_ARGUMENTS)},
        )
        self.layernorm = None
        if self.output_layernorm:
            self.layernorm = NORMS[arguments["normalization"]](
                arguments["hidden_size"],
                eps=arguments["layernorm_epsilon"],
                **{name: arguments[name] for name in _NORM_ARGUMENTS},
            )
        self.drop_path = DropPath(drop_path_rate, batch_dim=batch_dimension(attn_input_format))
        hand_down_settings(self, arguments["tp_size"])

    @staticmethod
    def _overlap_flags(arguments: dict[str, Any]) -> dict[str, bool]:
        """Return the `ub_*` flags of the children; warn once that they have no effect without sequence parallelism."""
        requested = arguments["ub_tp_comm_overlap"]
        shards = arguments["set_parallel_mode"] and arguments["sequence_parallel"]
        if requested and not shards:
            warn_of_unused_overlap("ub_tp_comm_overlap=True")
        return {flag: arguments[flag] and requested and shards for flag in OverlapFlags._fields}

    def _create_attentions(self, arguments: dict[str, Any]) -> None:
        """Create self_attention, and inter_attention or None, from the constructor's arguments."""
        shared = {
            **{name: arguments[name] for name in (*_SHARED_ARGUMENTS, *_ATTENTION_ARGUMENTS)},
            "qkv_format": self.attn_input_format,
        }
        name, post_norm_residual = arguments["name"], self.apply_residual_connection_post_layernorm
        self.self_attention = MultiheadAttention(
            attn_mask_type=self.self_attn_mask_type,
            window_size=arguments["window_size"],
            bottom_right_diagonal=arguments["bottom_right_diagonal"],
            input_layernorm=not self.output_layernorm,
            return_layernorm_output=post_norm_residual and not self.output_layernorm,
            attention_type="self",
            name=child_name(name, "self_attention"),
            **shared,
        )
        self.inter_attention = None
        if self.layer_type == "decoder":
            self.inter_attention = MultiheadAttention(
                attn_mask_type=self.enc_dec_attn_mask_type,
                window_size=arguments["enc_dec_window_size"],
                bottom_right_diagonal=arguments["enc_dec_bottom_right_diagonal"],
                input_layernorm=True,
                return_layernorm_output=post_norm_residual,
                attention_type="cross",
                name=child_name(name, "inter_attention"),
                **shared,
            )

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Set the tensor-parallel process group of every child."""
        self.tp_group = tp_group
        for child in (self.self_attention, self.inter_attention, self.layernorm_mlp):
            if child is not None:
                child.set_tensor_parallel_group(tp_group)

    def set_context_parallel_group(
        self,
        cp_group: Any,
        cp_global_ranks: list[int] | None,
        cp_stream: Any,
        cp_comm_type: str = "p2p",
        load_balancing_strategy: CPLoadBalancingStrategy = CPLoadBalancingStrategy.DUAL_CHUNK_SWAP,
    ) -> None:
        """Set the ranks that share the sequence, see `DotProductAttention`."""
        for child in (self.self_attention, self.inter_attention):
            if child is not None:
                child.set_context_parallel_group(
                    cp_group, cp_global_ranks, cp_stream, cp_comm_type, load_balancing_strategy
                )

    @accepts_older_orders(v2_11=("bottom_right_diagonal", "enc_dec_bottom_right_diagonal"))
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
        thd_attention_policies: list[dict[str, Any]] | None = None,
        thd_attention_policy_dispatch: str = "auto",
        softcap: float | None = None,
    ) -> Tensor:
        """Return y, shaped like hidden_states, in their dtype or torch.autocast's.

        The masks, windows, policies, positions and biases without the prefix enc_dec apply to the self-attention.
        cu_seqlens_q, max_seqlen_q and softcap apply to both attentions, cu_seqlens_kv and max_seqlen_kv to the cross
        attention.

        Args:
            hidden_states: Input x.
            self_attn_mask_type: Self-attention mask type, by default the constructor's.
            encoder_output: Input for keys and values in the cross attention, in a decoder.
            enc_dec_attn_mask: Cross attention mask, in the form of attention_mask.
            enc_dec_attn_mask_type: Cross attention mask type, by default the constructor's.
            enc_dec_window_size: Cross attention window, by default the constructor's.
            enc_dec_bottom_right_diagonal: Alignment of the cross attention's causal mask and window.
            rotary_pos_emb: Angles [s, 1, 1, d] for queries and keys, or one tensor each.

        The other arguments are as in `MultiheadAttention.forward`.
        """
        self_inputs = pack_arguments(
            attention_mask,
            cu_seqlens_q,
            cu_seqlens_q,
            cu_seqlens_q_padded,
            cu_seqlens_q_padded,
            core_attention_bias,
            alibi_slopes,
            inference_params,
            max_seqlen_q,
            max_seqlen_q,
            self_attn_mask_type,
            window_size,
            bottom_right_diagonal,
            core_attention_bias_type,
            pad_between_seqs,
            softcap,
            thd_attention_policies,
            thd_attention_policy_dispatch,
        )
        cross_inputs = pack_arguments(
            enc_dec_attn_mask,
            cu_seqlens_q,
            cu_seqlens_kv,
            cu_seqlens_q_padded,
            cu_seqlens_kv_padded,
            None,
            None,
            None,
            max_seqlen_q,
            max_seqlen_kv,
            enc_dec_attn_mask_type,
            enc_dec_window_size,
            enc_dec_bottom_right_diagonal,
            "no_bias",
            pad_between_seqs,
            softcap,
        )
        modes = (is_first_microbatch, checkpoint_core_attention, fast_zero_fill)
        self._check_cross(hidden_states, cross_inputs, encoder_output)
        dtype = autocast_dtype(hidden_states.device.type) if autocast_is_active() else None
        if dtype is not None:  # torch.autocast's dtype, for all residual sums
            hidden_states = hidden_states.to(dtype)
        hidden_states = hidden_states.contiguous()
        # Attention and MLP of a parallel layer read the same input, which is also the residual of both.
        is_parallel = self._config.parallel_attention_mlp
        uses_residual = not (is_parallel or torch.compiler.is_compiling())
        attended, residual = _attend(
            self.self_attention,
            hidden_states,
            self_inputs,
            None,
            rotary_pos_emb,
            *modes,
            uses_residual,
        )
        mlp = self.layernorm_mlp
        if is_parallel:
            transformed = attended + mlp(hidden_states, is_first_microbatch=is_first_microbatch)
        else:
            hidden_states = self._add(attended, residual)
            del attended, residual  # without a backward pass, this frees their memory
            if self.inter_attention is not None:
                attended, residual = _attend(
                    self.inter_attention,
                    hidden_states,
                    cross_inputs,
                    encoder_output,
                    None,
                    *modes,
                    uses_residual,
                )
                hidden_states = self._add(attended, residual)
                del attended, residual
            residual = hidden_states
            if uses_residual and is_unintercepted(mlp, LayerNormMLP):
                transformed, residual = mlp.forward_with_residual(
                    hidden_states, is_first_microbatch
                )
            else:
                transformed = mlp(hidden_states, is_first_microbatch=is_first_microbatch)
        hidden_states = self._add(transformed, residual)
        return hidden_states if self.layernorm is None else self.layernorm(hidden_states)

    if TYPE_CHECKING:

        @declare_call(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

        def fast_setattr(self, name: str, value: Any) -> None: ...

    def _check_cross(
        self, hidden_states: Tensor, arguments: AttentionArguments, encoder_output: Tensor | None
    ) -> None:
        """Reject a call that the cross attention cannot compute, before the self attention has effects.

        The self attention checks its own arguments.
        """
        if (self._config.layer_type == "decoder") != (encoder_output is not None):
            if encoder_output is None:
                raise ValueError(
                    "layer_type='decoder' needs encoder_output, which is None; match the two"
                )
            warn_once(
                "encoder_output",
                "encoder_output has no effect on a TransformerLayer with layer_type='encoder', which has no cross "
                "attention; make the layer with layer_type='decoder', or leave it None",
            )
        if not isinstance(hidden_states, Tensor):
            tensor("hidden_states", hidden_states)
        if self.inter_attention is not None:
            self.inter_attention.check_call(hidden_states, arguments, encoder_output)
        elif not (
            arguments.attn_mask_type is arguments.window_size is arguments.max_seqlen_kv is None
        ):
            # These are cross attention arguments, which the layer does not have.
            if arguments.attn_mask_type is not None:
                RULES["enc_dec_attn_mask_type"]("enc_dec_attn_mask_type", arguments.attn_mask_type)
            window("enc_dec_window_size", arguments.window_size)
            size_or_none("max_seqlen_kv", arguments.max_seqlen_kv, 0)

    def _add(self, branch: Tensor | tuple[Tensor | None, ...], residual: Tensor) -> Tensor:
        """Compute residual + drop_path(dropout(x + bias)).

        Args:
            branch: x, (x, bias), or (x, bias, norm(input)), in which the last one is the residual instead.
            residual: Input of the branch.
        """
        x, bias, *normed = branch if isinstance(branch, tuple) else (branch, None)
        assert x is not None
        if normed:
            assert normed[0] is not None
            residual = normed[0]
        p = self._config.hidden_dropout if self.training else 0.0
        # With a rate of 0 the module is the identity. It is called only if a user has replaced it or added a
        # hook.
        drop_path: Any = self.drop_path
        bare = is_unintercepted(drop_path, DropPath)
        drops_path = not bare or (self.training and drop_path.drop_prob > 0.0)
        if not drops_path and x.dtype == residual.dtype:
            return bias_dropout_add(x, bias, residual, p)
        if bias is not None:
            x = x + bias
        if p > 0.0:
            x = dropout(x, p)
        return residual + (drop_path(x) if drops_path else x)


def _attend(
    attention: MultiheadAttention,
    hidden_states: Tensor,
    arguments: AttentionArguments,
    encoder_output: Tensor | None,
    rotary_pos_emb: Any,
    is_first_microbatch: bool | None,
    checkpoint_core_attention: bool,
    fast_zero_fill: bool,
    uses_residual: bool,
) -> tuple[Any, Tensor]:
    """Call an attention layer; return its outputs, and hidden_states as the residual."""
    if uses_residual and is_unintercepted(attention, MultiheadAttention):
        return attention.attend(
            hidden_states,
            arguments,
            encoder_output,
            rotary_pos_emb,
            is_first_microbatch,
            checkpoint_core_attention,
            fast_zero_fill,
            uses_residual,
        )
    outputs = attention(
        hidden_states,
        encoder_output=encoder_output,
        rotary_pos_emb=rotary_pos_emb,
        is_first_microbatch=is_first_microbatch,
        checkpoint_core_attention=checkpoint_core_attention,
        fast_zero_fill=fast_zero_fill,
        **arguments.as_keywords(),
    )
    return outputs, hidden_states
