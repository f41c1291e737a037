"""The public surface: every class, function and keyword of the documented API exists, under its name."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import pickle
import re

import pytest
import torch

import transformer_engine
import transformer_engine.pytorch as te
from transformer_engine.common import recipe
from transformer_engine.pytorch import constants

CONSTRUCTORS = {
    "GroupedLinear": """
        num_gemms in_features out_features bias init_method get_rng_state_tracker rng_tracker_name device
        fuse_wgrad_accumulation return_bias params_dtype delay_wgrad_compute save_original_input parallel_mode
        tp_group tp_size sequence_parallel single_grouped_weight single_grouped_bias
    """,
    "Linear": """
        bias delay_wgrad_compute device fuse_wgrad_accumulation get_rng_state_tracker in_features
        init_method name out_features parallel_mode parameters_split params_dtype return_bias
        rng_tracker_name save_original_input sequence_parallel symmetric_ar_type tp_group tp_size
    """,
    "LayerNorm": """
        device dtype eps normalized_shape sequence_parallel sm_margin zero_centered_gamma
    """,
    "RMSNorm": """
        device dtype eps normalized_shape sequence_parallel sm_margin zero_centered_gamma
    """,
    "LayerNormLinear": """
        bias delay_wgrad_compute device eps fuse_wgrad_accumulation in_features init_method name
        normalization out_features parallel_mode parameters_split params_dtype return_bias
        return_layernorm_output return_layernorm_output_gathered sequence_parallel symmetric_ar_type
        tp_group tp_size zero_centered_gamma
    """,
    "LayerNormMLP": """
        activation activation_params bias checkpoint delay_wgrad_compute device eps ffn_hidden_size
        fuse_wgrad_accumulation hidden_size init_method micro_batch_size name normalization
        output_layer_init_method params_dtype return_bias return_layernorm_output
        return_layernorm_output_gathered seq_length sequence_parallel set_parallel_mode
        symmetric_ar_type tp_group tp_size zero_centered_gamma
    """,
    "DotProductAttention": """
        attention_dropout attention_type attn_mask_type cp_comm_type cp_global_ranks cp_group cp_stream
        kv_channels layer_number num_attention_heads num_gqa_groups qkv_format return_max_logit
        sequence_parallel softmax_scale softmax_type tp_group tp_size window_size
    """,
    "MultiheadAttention": """
        attention_dropout attention_type attn_mask_type bias device fuse_qkv_params
        fuse_wgrad_accumulation hidden_size init_method input_layernorm kv_channels layer_number
        layernorm_epsilon micro_batch_size name normalization num_attention_heads num_gqa_groups
        output_layer_init_method params_dtype qk_norm_before_rope qk_norm_eps qk_norm_type qkv_format
        qkv_weight_interleaved return_bias return_layernorm_output rotary_pos_interleaved seq_length
        sequence_parallel set_parallel_mode softmax_type tp_group tp_size window_size
        zero_centered_gamma
    """,
    "TransformerLayer": """
        activation activation_params apply_residual_connection_post_layernorm attention_dropout
        attn_input_format bias device drop_path_rate enc_dec_attn_mask_type enc_dec_window_size
        ffn_hidden_size fuse_qkv_params fuse_wgrad_accumulation hidden_dropout hidden_size init_method
        kv_channels layer_number layer_type layernorm_epsilon micro_batch_size name normalization
        num_attention_heads num_gqa_groups output_layer_init_method output_layernorm
        parallel_attention_mlp params_dtype qk_norm_before_rope qk_norm_eps qk_norm_type
        qkv_weight_interleaved rotary_pos_interleaved self_attn_mask_type seq_length sequence_parallel
        set_parallel_mode softmax_type tp_group tp_size window_size zero_centered_gamma
    """,
}
FORWARDS = {
    "GroupedLinear": """
        inp m_splits is_first_microbatch
    """,
    "Linear": """
        inp is_first_microbatch fp8_output fp8_grad
    """,
    "LayerNormLinear": """
        inp is_first_microbatch fp8_output fp8_grad
    """,
    "LayerNormMLP": """
        inp is_first_microbatch
    """,
    "DotProductAttention": """
        query_layer key_layer value_layer attention_mask qkv_format cu_seqlens_q cu_seqlens_kv
        cu_seqlens_q_padded cu_seqlens_kv_padded max_seqlen_q max_seqlen_kv attn_mask_type window_size
        checkpoint_core_attention core_attention_bias_type core_attention_bias alibi_slopes
        fast_zero_fill inference_params pad_between_seqs fp8_output num_splits
    """,
    "MultiheadAttention": """
        hidden_states attention_mask encoder_output attn_mask_type window_size is_first_microbatch
        checkpoint_core_attention inference_params rotary_pos_emb core_attention_bias_type
        core_attention_bias alibi_slopes cu_seqlens_q cu_seqlens_kv cu_seqlens_q_padded
        cu_seqlens_kv_padded max_seqlen_q max_seqlen_kv fast_zero_fill pad_between_seqs
    """,
    "TransformerLayer": """
        hidden_states attention_mask self_attn_mask_type window_size encoder_output enc_dec_attn_mask
        enc_dec_attn_mask_type enc_dec_window_size is_first_microbatch checkpoint_core_attention
        inference_params rotary_pos_emb core_attention_bias_type core_attention_bias alibi_slopes
        cu_seqlens_q cu_seqlens_kv cu_seqlens_q_padded cu_seqlens_kv_padded max_seqlen_q max_seqlen_kv
        fast_zero_fill pad_between_seqs
    """,
}
FUNCTIONS = {
    "autocast": "enabled calibrating recipe amax_reduction_group _graph",
    "fp8_autocast": "enabled calibrating fp8_recipe fp8_group _graph",
    "quantized_model_init": "enabled recipe preserve_high_precision_init_val",
    "fp8_model_init": "enabled recipe preserve_high_precision_init_val",
    "is_fp8_available": "return_reason",
    "is_mxfp8_available": "return_reason",
    "is_fp8_block_scaling_available": "return_reason",
    "is_nvfp4_available": "return_reason",
    "is_bf16_available": "return_reason",
    "get_default_recipe": "",
    "get_cudnn_version": "",
    "get_device_compute_capability": "",
    "make_graphed_callables": """
        modules sample_args num_warmup_iters allow_unused_input sample_kwargs fp8_enabled fp8_calibrating
        fp8_recipe fp8_group fp8_weight_caching enabled calibrating recipe amax_reduction_group
        cache_quantized_params _order _num_layers_per_chunk pool retain_graph_in_backward
        _reuse_graph_input_output_buffers
    """,
    "get_cpu_offload_context": """
        enabled num_layers model_layers offload_activations offload_weights double_buffering
        manual_synchronization retain_pinned_cpu_buffers offload_stream
    """,
    "prepare_for_saving": "tensors",
    "restore_from_saved": "tensors saved_tensors return_saved_tensors",
    "Float8Quantizer": "scale amax fp8_dtype rowwise columnwise",
    "Float8CurrentScalingQuantizer": "fp8_dtype device rowwise columnwise",
    "MXFP8Quantizer": "fp8_dtype rowwise columnwise",
    "Float8BlockQuantizer": "fp8_dtype rowwise columnwise",
    "NVFP4Quantizer": "fp4_dtype rowwise columnwise",
}
TENSORS = """
    QuantizedTensor QuantizedTensorStorage Float8Tensor Float8TensorStorage MXFP8Tensor MXFP8TensorStorage
    Float8BlockwiseQTensor Float8BlockwiseQTensorStorage NVFP4Tensor NVFP4TensorStorage Quantizer
"""


def missing(callable_, words: str) -> set[str]:
    return set(words.split()) - set(inspect.signature(callable_).parameters)


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_a_constructor_takes_every_documented_keyword(name):
    assert not missing(getattr(te, name).__init__, CONSTRUCTORS[name])


@pytest.mark.parametrize("name", FORWARDS)
def test_a_forward_takes_every_documented_keyword(name):
    assert not missing(getattr(te, name).forward, FORWARDS[name])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_takes_every_documented_keyword(name):
    assert not missing(getattr(te, name), FUNCTIONS[name])


@pytest.mark.parametrize("name", TENSORS.split())
def test_the_tensor_classes_are_exported(name):
    assert inspect.isclass(getattr(te, name))


def test_the_block_sizes_of_formats_with_narrow_scales_are_constants():
    assert (constants.MXFP8_BLOCK_SCALING_SIZE, constants.NVFP4_BLOCK_SCALING_SIZE) == (32, 16)


@pytest.mark.parametrize("method", ["set_tensor_parallel_group", "reset_parameters"])
@pytest.mark.parametrize("name", ["Linear", "LayerNormLinear", "LayerNormMLP"])
def test_layers_have_the_documented_methods(name, method):
    assert callable(getattr(getattr(te, name), method))


def test_the_random_state_tracker_has_the_documented_methods():
    for method in ("add", "fork", "get_states", "reset", "set_states"):
        assert callable(getattr(te.CudaRNGStatesTracker, method))


def test_version_and_metadata_agree():
    version = importlib.metadata.version("transformer-engine")
    assert transformer_engine.__version__ == version
    assert re.fullmatch(r"2\.20\.2\+py\d+\.\d+\.\d+(\.dev0)?", version)


def test_the_extras_of_the_original_are_declared():
    extras = set(importlib.metadata.metadata("transformer-engine").get_all("Provides-Extra"))
    assert {
        "core",
        "core-cu12",
        "core-cu13",
        "pytorch",
        "jax",
        "cli",
        "cuda",
        "flash",
        "test",
        "docs",
    } <= extras


def test_a_bare_import_brings_the_framework_and_the_recipes():
    assert transformer_engine.pytorch is te
    assert transformer_engine.common.recipe is recipe


@pytest.mark.parametrize("name", ["Linear", "LayerNormLinear", "LayerNormMLP", "TransformerLayer"])
def test_layers_are_recognised_by_their_module_path(name):
    assert "transformer_engine.pytorch" in getattr(te, name).__module__
    assert getattr(te, name).__name__ == name


def test_element_types_pickle_under_the_extension_module():
    import transformer_engine_torch as tex

    assert tex.DType is te.DType
    assert tex.DType.__module__ == "transformer_engine_torch"
    assert pickle.loads(pickle.dumps(tex.DType.kFloat8E4M3)) is tex.DType.kFloat8E4M3
    assert int(tex.DType.kFloat8E5M2) == 8


@pytest.mark.parametrize(
    "path",
    [
        "fp8",
        "float8_tensor",
        "quantized_tensor",
        "module.base",
        "tensor.utils",
        "graph",
        "cpu_offload",
        "cpu_offload_v1",
        "utils",
        "ops.op",
        "ops.linear",
        "ops.fuser",
        "ops.sequential",
        "ops.fused",
        "ops.fused.grouped_mlp",
        "ops.basic.basic_linear",
        "ops.basic.grouped_linear",
        "ops.basic.l2normalization",
    ],
)
def test_paths_that_clients_import_exist(path):
    importlib.import_module(f"transformer_engine.pytorch.{path}")


def test_an_absent_name_is_an_attribute_error():
    assert not hasattr(te, "no_such_name")
    with pytest.raises(AttributeError, match="an annotation for the original's offload"):
        te.utils.mark_grouped_tensor  # noqa: B018


def test_the_quickstart_of_the_original_runs(device):
    model = te.Linear(768, 3072, bias=True)
    inp = torch.randn(2048, 768, device=device)
    fp8_recipe = recipe.DelayedScaling(margin=0, fp8_format=recipe.Format.E4M3)
    with pytest.warns(DeprecationWarning), te.fp8_autocast(enabled=True, fp8_recipe=fp8_recipe):
        out = model(inp)
    out.sum().backward()
    assert out.shape == (2048, 3072)
    assert torch.isfinite(model.weight.grad).all()
