"""Public names have the parameters and fields of Transformer Engine, in its order."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

import transformer_engine.jax as te
import transformer_engine.jax.flax as te_flax
from transformer_engine.jax import attention, quantize, sharding
from transformer_engine.jax.flax import module, transformer

FUNCTIONS = {
    te.autocast: "enabled recipe mesh_resource",
    te.fp8_autocast: "enabled fp8_recipe mesh_resource",
    te.update_collections: "new original",
    te.dense.dense: "x kernel bias contracting_dims transpose_batch_sequence input_axes kernel_axes output_axes "
    "collective_op_set quantizer_set",
    te.layernorm.layernorm: "x gamma beta norm_type zero_centered_gamma epsilon quantizer",
    te.layernorm_dense.layernorm_dense: "x kernel gamma beta bias norm_type zero_centered_gamma epsilon "
    "transpose_batch_sequence layernorm_input_axes dot_input_axes kernel_axes quantizer_set",
    te.layernorm_mlp.layernorm_mlp: "x gamma beta kernels biases norm_type zero_centered_gamma epsilon "
    "transpose_batch_sequence norm_input_axes dot_1_input_axes dot_2_input_axes kernel_1_axes kernel_2_axes "
    "ffn1_ckpt_name ffn2_ckpt_name activation_type activation_params collective_op_sets quantizer_sets",
    te.activation.activation: "x activation_type quantizer act_params",
    te.softmax.softmax: "logits mask scale_factor softmax_fusion_type",
    te_flax.wrap_function_in_te_state_module: "f recipe name quantization_checkpoint_name",
    te_flax.make_dot_general_cls: "recipe",
    te_flax.extend_logical_axis_rules: "rules",
    transformer.rotary_pos_emb: "x windows transpose_batch_sequence group_method",
    module.TransformerEngineBase.generate_quantizer_set: "self postfix variable_collection "
    "quantization_checkpoint_name fp8_recipe n_groups",
    quantize.QuantizerFactory.create: "n_quantizers scaling_mode q_dtype q_layout n_groups checkpoint_name kwargs",
    quantize.QuantizerFactory.create_set: "n_quantizer_sets scaling_mode fwd_dtype bwd_dtype is_2x2x n_groups "
    "checkpoint_name fp8_recipe kwargs",
    quantize.Quantizer.quantize: "self x is_rowwise is_colwise dq_dtype flatten_axis",
    quantize.compute_scale_from_amax: "amax q_dtype margin scale",
    quantize.apply_rht: "x inverse",
    quantize.is_scaling_mode_supported: "scaling_mode gpu_id",
    quantize.get_device_compute_capability: "gpu_id",
    attention.fused_attn: "qkv bias sequence_descriptor seed attn_bias_type attn_mask_type qkv_layout softmax_type "
    "scaling_factor dropout_probability is_training max_segments_per_seq window_size context_parallel_strategy "
    "context_parallel_causal_load_balanced context_parallel_axis context_checkpoint_name softmax_offset stripe_size "
    "score_mod score_mod_bprop score_mod_tensors score_mod_bprop_tensors",
    attention.is_fused_attn_kernel_available: "is_training q_dtype kv_dtype qkv_layout attn_bias_type attn_mask_type "
    "softmax_type dropout_probability q_num_heads kv_num_heads q_max_seqlen kv_max_seqlen head_dim_qk head_dim_v "
    "window_size",
    attention.make_swa_mask: "segment_pos_q segment_pos_kv window_size dtype segment_ids_q segment_ids_kv",
    attention.run_length_fill: "segment_ids",
    attention.reorder_causal_load_balancing: "tensor strategy cp_size seq_dim stripe_size",
    attention.SequenceDescriptor.from_seqlens: "seqlens",
    attention.SequenceDescriptor.from_seqlens_and_offsets: "seqlens seq_offsets",
    attention.SequenceDescriptor.from_segment_ids_and_pos: "segment_ids segment_pos",
    te.dense.grouped_dense: "x kernel group_sizes contracting_dims bias precision preferred_element_type group_offset "
    "quantizer_set kernel_fsdp_info",
    te_flax.make_grouped_dense_cls: "recipe quantization_checkpoint_name",
    te.router.fused_topk_with_score_function: "logits topk use_pre_softmax num_groups group_topk scaling_factor "
    "score_function expert_bias compute_aux_scores routing_map_format",
    te.router.fused_moe_aux_loss: "probs tokens_per_expert topk coeff",
    te.permutation.token_dispatch: "inp routing_map num_out_tokens probs align_size",
    te.permutation.token_combine: "inp row_id_map merging_probs pad_offsets",
    te.permutation.sort_chunks_by_index: "inp split_sizes sorted_indices",
    te.ep.ep_bootstrap: "world_size rank num_experts max_tokens_per_rank recv_capacity_per_rank hidden_dim "
    "max_token_dtype max_num_sms drop_on_overflow",
    te.ep.ep_dispatch: "cfg topk_idx tokens topk_weights recv_capacity_per_rank",
    te.ep.ep_combine: "cfg handle_mem token_counts expert_out num_local_tokens out_sharding",
    sharding.get_active_resource_axis: "mesh_resource_name",
}  # fmt: skip

LORA = "enable_low_rank_adaptation low_rank_adaptation_dim low_rank_adaptation_alpha"
FIELDS = {
    te_flax.DenseGeneral: f"features kernel_init kernel_axes use_bias bias_init bias_axes {LORA} axis dtype input_axes "
    "transpose_batch_sequence quantization_checkpoint_name",
    te_flax.LayerNorm: "epsilon layernorm_type zero_centered_gamma scale_init scale_axes bias_init bias_axes dtype",
    te_flax.LayerNormDenseGeneral: "features enable_layernorm layernorm_type epsilon zero_centered_gamma scale_init "
    "scale_axes ln_bias_init ln_bias_axes kernel_init kernel_axes use_bias bias_init bias_axes "
    f"return_layernorm_output {LORA} axis dtype layernorm_input_axes dot_input_axes depth_scaling "
    "transpose_batch_sequence quantization_checkpoint_name",
    te_flax.LayerNormMLP: "intermediate_dim enable_layernorm layernorm_type epsilon zero_centered_gamma scale_init "
    "scale_axes ln_bias_init ln_bias_axes kernel_init kernel_axes_1 kernel_axes_2 use_bias bias_init bias_axes_1 "
    "bias_axes_2 return_layernorm_output activations activation_params intermediate_dropout_rng_name "
    f"intermediate_dropout_rate intermediate_hidden_dropout_dims {LORA} axis dtype layernorm_input_axes "
    "dot_1_input_axes dot_2_input_axes ffn1_ckpt_name ffn2_ckpt_name transpose_batch_sequence "
    "quantization_checkpoint_name",
    module.Softmax: "scale_factor softmax_fusion_type softmax_type",
    te_flax.DotProductAttention: "head_dim num_attention_heads num_gqa_groups attention_dropout attn_mask_type "
    "attn_bias_type dtype dropout_rng_name float32_logits qkv_layout scale_factor transpose_batch_sequence "
    "window_size max_segments_per_seq context_parallel_causal_load_balanced context_parallel_axis "
    "context_parallel_strategy context_checkpoint_name softmax_type score_mod score_mod_bprop",
    te_flax.MultiHeadAttention: "head_dim num_attention_heads num_gqa_groups attention_dropout dropout_rng_name "
    "input_layernorm layernorm_type layernorm_epsilon return_layernorm_output zero_centered_gamma kernel_init use_bias "
    "bias_init attn_mask_type attn_bias_type enable_rotary_pos_emb rotary_pos_emb_windows rotary_pos_emb_group_method "
    "low_rank_adaptation_scope low_rank_adaptation_dim low_rank_adaptation_alpha dtype fuse_qkv_params "
    "transpose_batch_sequence enable_sequence_parallel scale_attn_logits scaled_query_init float32_logits window_size "
    "softmax_type score_mod score_mod_bprop",
    te_flax.RelativePositionBiases: "num_buckets max_distance num_attention_heads embedding_init embedding_axes dtype",
    te_flax.TransformerLayer: "hidden_size mlp_hidden_size num_attention_heads num_gqa_groups layernorm_type "
    "layernorm_epsilon zero_centered_gamma hidden_dropout hidden_dropout_dims attention_dropout intermediate_dropout "
    "intermediate_dropout_dims dropout_rng_name mha_kernel_init mlp_kernel_init mlp_activations mlp_activation_params "
    "use_bias bias_init apply_residual_connection_post_layernorm output_layernorm float32_attention_logits layer_type "
    "self_attn_mask_type self_attn_bias_type enable_relative_embedding relative_embedding enable_rotary_pos_emb "
    "rotary_pos_emb_windows rotary_pos_emb_group_method low_rank_adaptation_scope low_rank_adaptation_dim "
    "low_rank_adaptation_alpha dtype drop_path fuse_qkv_params transpose_batch_sequence enable_sequence_parallel "
    "scale_attn_logits scaled_query_init window_size softmax_type score_mod score_mod_bprop",
}  # fmt: skip

DEFAULTS = {
    te_flax.DenseGeneral: {"use_bias": True, "axis": -1, "low_rank_adaptation_dim": 32, "kernel_axes": ()},
    te_flax.LayerNormDenseGeneral: {"use_bias": False, "enable_layernorm": True, "scale_axes": ("embed",)},
    te_flax.LayerNormMLP: {
        "intermediate_dim": 2048, "activations": ("gelu",), "kernel_axes_1": ("embed", "act", "mlp"),
        "intermediate_dropout_rate": 0.0, "use_bias": False,
    },
    te_flax.DotProductAttention: {"attn_mask_type": "causal", "float32_logits": False, "softmax_type": "vanilla"},
    te_flax.MultiHeadAttention: {"scale_attn_logits": False, "scaled_query_init": True, "fuse_qkv_params": True},
    te_flax.TransformerLayer: {
        "hidden_size": 512, "mlp_hidden_size": 2048, "num_attention_heads": 8, "hidden_dropout": 0.1,
        "attention_dropout": 0.1, "enable_relative_embedding": True, "self_attn_mask_type": "causal",
        "layernorm_epsilon": 1e-6, "drop_path": 0.0,
    },
}  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__qualname__)
def test_a_function_has_the_parameters_in_their_order(function):
    # **others takes what is refused by name: keywords of other frameworks and releases
    found = [name for name in inspect.signature(function).parameters if name != "others"]
    assert found == FUNCTIONS[function].split()


@pytest.mark.parametrize("cls", FIELDS, ids=lambda cls: cls.__name__)
def test_a_module_has_the_fields(cls):
    fields = [field.name for field in dataclasses.fields(cls) if field.name not in ("parent", "name")]
    assert fields == FIELDS[cls].split()


@pytest.mark.parametrize("cls", DEFAULTS, ids=lambda cls: cls.__name__)
def test_a_module_has_the_defaults(cls):
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    assert {name: defaults[name] for name in DEFAULTS[cls]} == DEFAULTS[cls]
