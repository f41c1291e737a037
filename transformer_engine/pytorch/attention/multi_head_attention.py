"""MultiheadAttention: out = proj(attention(q, k, v)), where q, k, v are heads in qkv(norm(x))."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...common.memory import Memory
from ...common.numbers import to_bool
from ..compat.argument_orders import accepts_older_orders, declare_call
from ..compat.replaceable import is_unintercepted
from ..constants import (
    AttentionType,
    CPLoadBalancingStrategy,
    NormalizationName,
    SoftmaxType,
    TensorFormat,
)
from ..functions.attention.autograd import Projection
from ..functions.split_heads import split_views
from ..module.arguments import accepts
from ..module.config import configure_class, write_private
from ..module.layernorm_linear import LayerNormLinear
from ..module.linear import Linear
from ..module.shared_settings import hand_down_settings
from ..primitives.attention.mask import check_set_window_size
from ..quantization.autocast import AutocastState, current, eager_thread_state
from ..quantization.resizable_state import CheckedLoading
from ..runtime.tracing import export_mode
from .dot_product_attention import DotProductAttention
from .dot_product_attention.arguments import RULES, check_heads
from .dot_product_attention.fp8_recipe import outputs_codes, projects_codes
from .dot_product_attention.plan import AttentionPlan
from .dot_product_attention.settings import NO_ARGUMENTS, AttentionArguments, pack_arguments
from .heads import Heads, head_size
from .inference import InferenceParams
from .layer_plan import (
    MAX_LAYER_PLANS,
    check_encoder,
    check_layer_call,
    check_weight_fusion,
    plan_layer,
)
from .layer_settings import (
    CHILD_ATTRIBUTES,
    CORE_ARGUMENTS,
    FIXED,
    NORM_ARGUMENTS,
    PROJECTION_ARGUMENTS,
    STORED_ARGUMENTS,
    MultiheadAttentionConfig,
    child_name,
)
from .qk_norm import query_key_norm
from .rotation import Rotation


@configure_class(MultiheadAttentionConfig, fixed=FIXED, handed_down=CHILD_ATTRIBUTES, rules=RULES)
class MultiheadAttention(CheckedLoading):
    """out [.., hidden] = proj(softmax(q k^T / sqrt(d)) v) for self or cross attention, any mask and bias.

    The other arguments are as in `DotProductAttention`, `LayerNormLinear` and `LayerNormMLP`.

    Args:
        num_attention_heads: Query heads.
        layernorm_epsilon: Added to the variance (or mean square) in the norms.
        attention_type: "self" (children layernorm_qkv or qkv, core_attention, proj) or "cross" (layernorm_query or
            query_layer, and key_value, instead of qkv).
        input_layernorm: Normalize the input first.
        return_layernorm_output: Also return the normalized input.
        fuse_qkv_params: One parameter qkv.weight instead of qkv.query_weight, qkv.key_weight, qkv.value_weight.
        qkv_weight_interleaved: A fused weight has the rows of each group together; else all q, all k, all v.
        output_layer_init_method: Fills proj.weight; by default with N(0, 0.023).
        bias: Add learned biases to the projections.
        rotary_pos_interleaved: Rotate neighboring features instead of the two halves of a head.
        qk_norm_type: "L2Normalization", "RMSNorm" or "LayerNorm" over heads, after the rotary embedding by default.
        qk_norm_eps: Added to the variance (or mean square) in that norm.
        qk_norm_before_rope: Normalize heads before the rotary embedding.
        set_parallel_mode: Shard heads over the tensor-parallel group: qkv by columns, proj by rows.
    """

    _config: MultiheadAttentionConfig
    attention_type: str
    attn_mask_type: str
    window_size: tuple[int, int] | None
    softcap: float
    layer_number: int | None
    qkv_format: str
    input_layernorm: bool
    return_layernorm_output: bool
    returns_norm: bool
    return_bias: bool
    rotary_pos_interleaved: bool
    qk_norm_type: str | None
    qk_norm_before_rope: bool
    num_attention_heads: int
    num_gqa_groups: int
    hidden_size: int
    hidden_size_per_attention_head: int
    fuse_qkv_params: bool
    qkv_weight_interleaved: bool
    tp_size: int
    tp_group: Any
    sequence_parallel: bool
    heads: Heads

    @accepts_older_orders(v2_19=("softcap",), v2_11=("bottom_right_diagonal", "softcap"))
    @accepts(**RULES)
    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: Callable | None = None,
        output_layer_init_method: Callable | None = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        tp_group: Any = None,
        tp_size: int = 1,
        num_gqa_groups: int | None = None,
        fuse_wgrad_accumulation: bool = False,
        get_rng_state_tracker: Callable | None = None,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        attention_type: AttentionType = "self",
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        rotary_pos_interleaved: bool = False,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        bias: bool = True,
        normalization: NormalizationName = "LayerNorm",
        device: torch.device | str | int = "cuda",
        qkv_format: TensorFormat = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        softmax_type: SoftmaxType = "vanilla",
    ) -> None:
        arguments = dict(locals())
        super().__init__()
        check_weight_fusion(
            fuse_wgrad_accumulation, fuse_qkv_params, return_layernorm_output, input_layernorm
        )
        if tp_group is not None:
            tp_size = torch.distributed.get_world_size(tp_group)
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        size = head_size(hidden_size, num_attention_heads, kv_channels)
        ranks = tp_size if set_parallel_mode else 1
        check_heads(num_attention_heads, groups, ranks)
        interleaved = qkv_weight_interleaved and fuse_qkv_params
        self._config = MultiheadAttentionConfig(
            **{name: arguments[name] for name in STORED_ARGUMENTS},
            window_size=check_set_window_size(attn_mask_type, window_size),
            num_gqa_groups=groups,
            hidden_size_per_attention_head=size,
            qkv_weight_interleaved=interleaved,
            tp_size=tp_size,
            sequence_parallel=sequence_parallel and tp_size > 1,
            heads=Heads(num_attention_heads // ranks, groups // ranks, size, interleaved),
        )
        self._plans: Memory[tuple[Any, ...], AttentionPlan | None] = Memory(
            plan_layer, MAX_LAYER_PLANS
        )
        projection = {name: arguments[name] for name in PROJECTION_ARGUMENTS}
        projection |= {"sequence_parallel": self.sequence_parallel, "tp_size": tp_size}
        norm = {"eps": layernorm_epsilon, **{name: arguments[name] for name in NORM_ARGUMENTS}}
        columns = {
            **projection,
            "init_method": init_method,
            "parallel_mode": "column" if set_parallel_mode else None,
        }
        q_size, kv_size = num_attention_heads * size, groups * size
        pieces = {"query": q_size, "key": kv_size, "value": kv_size}
        self.q_norm = query_key_norm(qk_norm_type, size, qk_norm_eps, params_dtype, device)
        self.k_norm = query_key_norm(qk_norm_type, size, qk_norm_eps, params_dtype, device)
        self._create_projections(hidden_size, pieces, columns, norm, name)
        self.core_attention = DotProductAttention(
            num_attention_heads,
            size,
            num_gqa_groups=groups,
            sequence_parallel=self.sequence_parallel,
            tp_size=ranks,
            tp_group=tp_group if set_parallel_mode else None,
            name=child_name(name, "core_attention"),
            **{name: arguments[name] for name in CORE_ARGUMENTS},
        )
        # the core's one tensor; its constructor has no argument `device`
        if softmax_type == "learnable":
            self.core_attention.make_softmax_offset(device)
        self.proj = Linear(
            q_size,
            hidden_size,
            init_method=output_layer_init_method,
            parallel_mode="row" if set_parallel_mode else None,
            return_bias=return_bias,
            name=child_name(name, "proj"),
            **projection,
        )
        write_private(self.proj, _shares_input=True)  # the attention saves its output
        hand_down_settings(self, tp_size)

    def _create_projections(
        self,
        hidden: int,
        pieces: dict[str, int],
        columns: dict[str, Any],
        norm: dict[str, Any],
        name: str | None,
    ) -> None:
        """Create the children that compute q, k and v, under their names in checkpoints."""
        self.layernorm_qkv = self.qkv = self.layernorm_query = self.query_layer = self.key_value = (
            None
        )
        of_input = pieces if self.attention_type == "self" else {"query": pieces["query"]}
        plain, normed = (
            ("qkv", "layernorm_qkv")
            if self.attention_type == "self"
            else ("query_layer", "layernorm_query")
        )
        split = None if self.fuse_qkv_params else of_input
        width = sum(of_input.values())
        if self.input_layernorm:
            child: nn.Module = LayerNormLinear(
                hidden,
                width,
                parameters_split=split,
                name=child_name(name, normed),
                **columns,
                **norm,
            )
        else:
            child = Linear(
                hidden, width, parameters_split=split, name=child_name(name, plain), **columns
            )
        setattr(self, normed if self.input_layernorm else plain, child)
        if self.attention_type == "cross":
            of_encoder = {"key": pieces["key"], "value": pieces["value"]}
            split = None if self.fuse_qkv_params else of_encoder
            width = sum(of_encoder.values())
            self.key_value = Linear(
                hidden, width, parameters_split=split, name=child_name(name, "key_value"), **columns
            )

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Set the tensor-parallel process group for every projection and the attention."""
        self.tp_group = tp_group
        inputs = (
            self.layernorm_qkv,
            self.qkv,
            self.layernorm_query,
            self.query_layer,
            self.key_value,
        )
        for child in (*inputs, self.core_attention, self.proj):
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
        self.core_attention.set_context_parallel_group(
            cp_group, cp_global_ranks, cp_stream, cp_comm_type, load_balancing_strategy
        )

    @accepts_older_orders(v2_11=("bottom_right_diagonal",))
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        encoder_output: Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
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
    ) -> Tensor | tuple[Tensor | None, ...]:
        """Return out [.., hidden], or `(out[, bias][, norm(hidden_states)])` by the constructor's arguments.

        Args:
            hidden_states: Input for queries, and in self-attention for keys and values.
            is_first_microbatch: See `Linear.forward`.
            rotary_pos_emb: Angles [s, 1, 1, d] for queries and keys, or one tensor each, for all
                positions that occur. On a GPU, unless TE_CHECK=1, packed sequences longer than that
                become NaN; with offsets (cu_seqlens_*_padded) the last angles are used.
            encoder_output: Input for keys and values in cross attention.

        The other arguments are as in `DotProductAttention.forward`.
        """
        arguments = pack_arguments(
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
        )
        return self.attend(
            hidden_states,
            arguments,
            encoder_output,
            rotary_pos_emb,
            is_first_microbatch,
            checkpoint_core_attention,
            fast_zero_fill,
        )[0]

    if TYPE_CHECKING:

        @declare_call(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

        def fast_setattr(self, name: str, value: Any) -> None: ...

    _layer_forward = forward

    def attend(
        self,
        hidden_states: Tensor,
        arguments: AttentionArguments,
        encoder_output: Tensor | None = None,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        fast_zero_fill: bool = True,
        uses_residual: bool = False,
    ) -> tuple[Any, Tensor]:
        """Compute `forward`, with the core attention's arguments as one record, for `TransformerLayer`.

        The whole call is checked and planned before it has effects (`check_layer_call`). The steps are:

        1. `_project`: qkv = projection(norm(hidden_states)); in a cross attention k and v come from encoder_output.
        2. `_split_heads`: q, k and v with the norms of their heads and the rotation.
        3. The core attention: context = softmax(q k^T / sqrt(d)) v.
        4. The output projection: proj(context).

        Returns:
            (outputs of `forward`, hidden_states). With `uses_residual`, the caller uses hidden_states as the
            residual; see `LayerNormLinear.forward_with_residual`.
        """
        config = self._config
        if checkpoint_core_attention is not False:
            checkpoint_core_attention = to_bool(
                "checkpoint_core_attention", checkpoint_core_attention
            )
        if encoder_output is not None and config.attention_type == "self":
            encoder_output = check_encoder(config, encoder_output)
        tracing = torch.compiler.is_compiling() or export_mode.onnx
        state = current() if tracing else eager_thread_state().state
        modules: dict[str, Any] = self._modules
        core = modules["core_attention"]
        rotation, checked_arguments = check_layer_call(
            self._plans,
            config,
            core,
            hidden_states,
            arguments,
            encoder_output,
            rotary_pos_emb,
            state,
            tracing,
        )
        if checked_arguments is not None and (
            not is_unintercepted(core, DotProductAttention) or core.score_mod
        ):
            checked_arguments = None  # hooks and other classes see a module call
        uses_cache = arguments.inference_params is not None
        # The core attention reads and returns FP8 codes.
        uses_codes = state.enabled and not (uses_cache or export_mode.onnx) and outputs_codes(state)
        qkv, norm_output, residual = self._project(
            config,
            hidden_states,
            is_first_microbatch,
            rotation,
            state if uses_codes else None,
            uses_residual,
        )
        # An attention over a cache reads keys that the projection has not produced.
        joins_gradients = checked_arguments is not None and not uses_cache
        q, k, v, joint_projection = self._split_heads(
            config, qkv, encoder_output, is_first_microbatch, rotation, joins_gradients
        )
        if checked_arguments is not None:
            context = core.attend_checked(
                (q, k, v),
                checked_arguments,
                checkpoint_core_attention,
                uses_codes,
                joint_projection,
            )
        elif arguments is NO_ARGUMENTS and not (checkpoint_core_attention or uses_codes):
            context = core(q, k, v)
        else:
            options = {
                "checkpoint_core_attention": checkpoint_core_attention,
                "fp8_output": uses_codes,
            }
            context = core(
                q, k, v, fast_zero_fill=fast_zero_fill, **options, **arguments.as_keywords()
            )
        output = modules["proj"](context, is_first_microbatch=is_first_microbatch)
        if not (config.return_bias or config.returns_norm):
            return output, residual
        outputs: tuple[Any, ...] = (output,)
        if config.return_bias:  # a module that replaces proj may have added its bias itself
            outputs = output if isinstance(output, tuple) else (output, None)
        return ((*outputs, norm_output) if config.returns_norm else outputs), residual

    def check_call(
        self, hidden_states: Tensor, arguments: AttentionArguments, encoder_output: Tensor | None
    ) -> None:
        """Raise the errors of `attend` without effects."""
        inputs = (
            hidden_states,
            arguments,
            encoder_output,
            None,
            current(),
            torch.compiler.is_compiling(),
        )
        check_layer_call(self._plans, self._config, self._modules["core_attention"], *inputs)

    def _project(
        self,
        config: MultiheadAttentionConfig,
        hidden_states: Tensor,
        is_first_microbatch: bool | None,
        rotation: Rotation | None,
        fp8_state: AutocastState | None,
        uses_residual: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Compute the first projection: of q, k and v in a self attention, of q in a cross attention.

        Args:
            config, hidden_states, is_first_microbatch, rotation: As in `attend`.
            fp8_state: The autocast state for a core attention that reads FP8 codes, otherwise None. The
                projection of a self attention then returns codes, unless a norm of the heads or a rotation
                follows, which read values.
            uses_residual: The caller uses hidden_states as the residual.

        Returns:
            (projection, normalized input or None, hidden_states as the residual).
        """
        switches: dict[str, Any] = {"is_first_microbatch": is_first_microbatch}
        get: Any = self._modules.get
        projection = (
            get("layernorm_qkv") or get("qkv") or get("layernorm_query") or get("query_layer")
        )
        assert projection is not None
        if (
            fp8_state is not None
            and rotation is None
            and get("key_value") is None
            and get("q_norm") is None
        ):
            switches["fp8_output"] = projects_codes(projection, fp8_state, hidden_states)
        if uses_residual and is_unintercepted(projection, LayerNormLinear):
            qkv, hidden_states = projection.forward_with_residual(hidden_states, **switches)
        else:
            qkv = projection(hidden_states, **switches)
        qkv, norm_output = qkv if config.returns_norm else (qkv, None)
        return qkv, norm_output, hidden_states

    def _split_heads(
        self,
        config: MultiheadAttentionConfig,
        qkv: Tensor,
        encoder_output: Tensor | None,
        is_first_microbatch: bool | None,
        rotation: Rotation | None,
        joins_gradients: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Projection | None]:
        """Split the first projection into heads, and normalize and rotate them.

        Args:
            config, encoder_output, is_first_microbatch, rotation: As in `attend`.
            qkv: The first projection.
            joins_gradients: The core's autograd node can also compute the gradient of the split.

        Returns:
            (q, k, v, joint projection or None). If it is not None, q, k and v are views of it without autograd
            history, and the core's node writes their gradients to one buffer (`_ProjectedAttention`).
        """
        get: Any = self._modules.get
        key_value, q_norm, k_norm = get("key_value"), get("q_norm"), get("k_norm")
        heads = config.heads
        norms_first = q_norm is not None and config.qk_norm_before_rope
        if key_value is not None:
            keys_values = key_value(encoder_output, is_first_microbatch=is_first_microbatch)
            q = qkv.unflatten(-1, (heads.queries, heads.size))
            k, v = heads.split_kv(keys_values)
        elif rotation is not None and not norms_first:
            q, k, v = rotation.rotate_projection(qkv, heads)
            if q_norm is not None:
                q, k = q_norm(q), k_norm(k)
            return q, k, v, None
        elif joins_gradients and rotation is None and q_norm is None and type(qkv) is Tensor:
            projection = None
            if qkv.requires_grad and torch.is_grad_enabled():
                projection = Projection(qkv, heads.interleaved)
                qkv = qkv.detach()
            views = split_views(qkv, heads.queries, heads.groups, heads.size, heads.interleaved)
            return *views, projection
        else:
            q, k, v = heads.split_qkv(qkv)
        if q_norm is not None and norms_first:
            q, k = q_norm(q), k_norm(k)
        if rotation is not None:
            q, k = rotation(q, k)
        if q_norm is not None and not norms_first:
            q, k = q_norm(q), k_norm(k)
        return q, k, v, None
