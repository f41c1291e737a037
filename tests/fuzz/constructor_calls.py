"""Bad constructor calls: layers, recipes, quantizers, contexts, caches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import transformer_engine.pytorch as te
from tests.fuzz.bad_values import (
    COUNT,
    DEVICE,
    DTYPE,
    EPS,
    FLAG,
    FUNCTION,
    GROUP,
    NAME,
    NAN,
    NUMBER,
    RATE,
    RECIPE,
    REQUIRED_SIZE,
    SIZE,
    TEXT,
    WINDOW,
    WORD,
    Call,
    Made,
)
from transformer_engine.common import recipe
from transformer_engine.pytorch.attention.qk_norm import L2Normalization
from transformer_engine.pytorch.distributed import (
    CudaRNGStatesTracker,
    activation_recompute_forward,
)
from transformer_engine.pytorch.module.softmax import FusedScaleMaskSoftmax
from transformer_engine.pytorch.transformer import DropPath

LAYER = {
    "sequence_parallel": FLAG,
    "fuse_wgrad_accumulation": FLAG,
    "tp_group": GROUP,
    "tp_size": REQUIRED_SIZE,
    "get_rng_state_tracker": FUNCTION,
    "init_method": FUNCTION,
    "bias": FLAG,
    "return_bias": FLAG,
    "params_dtype": DTYPE,
    "device": DEVICE,
}
PRODUCT = {
    **LAYER,
    "in_features": REQUIRED_SIZE,
    "out_features": REQUIRED_SIZE,
    "parallel_mode": NAME,
    "delay_wgrad_compute": FLAG,
}
NORMED = {
    "eps": EPS,
    "normalization": (*NAME, None),
    "zero_centered_gamma": FLAG,
    "return_layernorm_output": FLAG,
    "return_layernorm_output_gathered": FLAG,
}
SPLIT = {
    "parameters_split": (
        3,
        ["a", "b", "c"],
        [],
        {"a": 1},
        {"a": 16.5, "b": 15.5},
        [1, 2],
        {"a": -16, "b": 48},
    )
}
ATTENTION = {
    "num_gqa_groups": (*SIZE, 3),
    "attention_dropout": RATE,
    "attn_mask_type": (*NAME, None),
    "window_size": WINDOW,
    "bottom_right_diagonal": FLAG,
    "softcap": (-1.0, NAN, float("inf"), "big", [1.0], True),
    "layer_number": (2.5, "16", [16], NAN),
    "softmax_type": (*NAME, None),
}
HEADS = {"num_attention_heads": REQUIRED_SIZE}
ACTIVATION = {
    "activation": (*NAME, None),
    "activation_params": (3, {"slope": 1.0}, {"limit": "7"}, {"alpha": NAN}, [7.0]),
}
FORMATS = {"fp8_format": ("E4M3", 3, recipe.Format.E2M1, None)}
SWITCH = (*FLAG, "maybe", 2, 0.5)  # for a recipe, which takes the spellings of true and false only
FP8_ATTENTION = {"fp8_dpa": SWITCH, "fp8_mha": SWITCH}
OVERRIDE = {"backward_override": (WORD, 3, True)}
PRODUCTS = dict.fromkeys(
    ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"), (True, None, "split")
)


def _make_call(
    name: str,
    kind: Callable[..., Any],
    arguments: dict[str, Any],
    *bad: Mapping[str, Sequence[Any]],
) -> Call:
    joint = {argument: values for part in bad for argument, values in part.items()}
    return Call(name, lambda: Made(kind, arguments), joint)


def constructor_calls() -> list[Call]:
    """One call per class."""
    return [*_layers(), *_attention(), *_recipes(), *_quantizers(), *_others()]


def _layers() -> list[Call]:
    features = {"in_features": 32, "out_features": 32}
    mlp = {"hidden_size": REQUIRED_SIZE, "ffn_hidden_size": REQUIRED_SIZE}
    optional = {"seq_length": COUNT, "micro_batch_size": COUNT, "set_parallel_mode": FLAG}
    norm = {
        "normalized_shape": (0, -1, 2.5, "16", NAN, None, [], [16, 0], [16, 2.5], "ab"),
        "eps": EPS,
        "sequence_parallel": FLAG,
        "dtype": DTYPE,
        "device": DEVICE,
        "zero_centered_gamma": FLAG,
        "sm_margin": (
            -1,
            1.5,
            "1",
            {"forward": 1},
            {"forward": -1, "backward": 0, "inference": 0},
            None,
        ),
    }
    return [
        _make_call(
            "Linear",
            te.Linear,
            features,
            PRODUCT,
            SPLIT,
            {
                "rng_tracker_name": TEXT,
                "save_original_input": FLAG,
                "symmetric_ar_type": NAME,
            },
        ),
        _make_call("LayerNormLinear", te.LayerNormLinear, features, PRODUCT, SPLIT, NORMED),
        _make_call(
            "LayerNormMLP",
            te.LayerNormMLP,
            {"hidden_size": 32, "ffn_hidden_size": 32},
            LAYER,
            NORMED,
            ACTIVATION,
            mlp,
            optional,
            {"output_layer_init_method": FUNCTION, "checkpoint": FLAG},
        ),
        _make_call(
            "GroupedLinear",
            te.GroupedLinear,
            {"num_gemms": 2, **features},
            PRODUCT,
            {
                "num_gemms": (*REQUIRED_SIZE, 10**30),
                "save_original_input": FLAG,
                "rng_tracker_name": TEXT,
            },
        ),
        _make_call("LayerNorm", te.LayerNorm, {"normalized_shape": 32}, norm),
        _make_call("RMSNorm", te.RMSNorm, {"normalized_shape": 32}, norm),
    ]


def _attention() -> list[Call]:
    hidden = {"hidden_size": (*REQUIRED_SIZE, 3), "kv_channels": SIZE}
    variants = {
        "qk_norm_type": NAME,
        "qk_norm_eps": EPS,
        "qk_norm_before_rope": FLAG,
        "fuse_qkv_params": FLAG,
        "rotary_pos_interleaved": FLAG,
        "qkv_weight_interleaved": FLAG,
        "set_parallel_mode": FLAG,
    }
    norms = {
        name: values
        for name, values in NORMED.items()
        if name in ("normalization", "zero_centered_gamma")
    }
    layer = {"hidden_size": 32, "num_attention_heads": 4}
    return [
        _make_call(
            "DotProductAttention",
            te.DotProductAttention,
            {"num_attention_heads": 4, "kv_channels": 16},
            ATTENTION,
            HEADS,
            {
                "kv_channels": (*REQUIRED_SIZE, (16,), (16, 0), (16, 16, 16), (16, 2.5)),
                "qkv_format": (*NAME, None),
                "tp_size": (*REQUIRED_SIZE, 3),
                "tp_group": GROUP,
                "sequence_parallel": FLAG,
                "get_rng_state_tracker": FUNCTION,
                "attention_type": (*NAME, None),
                "cp_group": GROUP,
                "cp_comm_type": (*NAME, None),
                "softmax_scale": (*NUMBER, "big"),
                "return_max_logit": FLAG,
                "score_mod": (3, "alibi"),
            },
        ),
        _make_call(
            "MultiheadAttention",
            te.MultiheadAttention,
            layer,
            LAYER,
            ATTENTION,
            HEADS,
            hidden,
            variants,
            norms,
            {
                "layernorm_epsilon": EPS,
                "input_layernorm": FLAG,
                "attention_type": (*NAME, None),
                "qkv_format": (*NAME, None),
                "output_layer_init_method": FUNCTION,
                "return_layernorm_output": FLAG,
            },
        ),
        _make_call(
            "TransformerLayer",
            te.TransformerLayer,
            {**layer, "ffn_hidden_size": 32},
            {name: values for name, values in LAYER.items() if name != "return_bias"},
            {name: values for name, values in ATTENTION.items() if name not in ("attn_mask_type",)},
            HEADS,
            hidden,
            variants,
            norms,
            ACTIVATION,
            {
                "ffn_hidden_size": REQUIRED_SIZE,
                "layernorm_epsilon": EPS,
                "hidden_dropout": RATE,
                "drop_path_rate": RATE,
                "self_attn_mask_type": (*NAME, None),
                "enc_dec_attn_mask_type": (*NAME, None),
                "enc_dec_window_size": WINDOW[:-1],
                "enc_dec_bottom_right_diagonal": FLAG,
                "layer_type": (*NAME, None),
                "attn_input_format": (*NAME, None),
                "apply_residual_connection_post_layernorm": FLAG,
                "output_layernorm": FLAG,
                "parallel_attention_mlp": FLAG,
                "output_layer_init_method": FUNCTION,
                "seq_length": COUNT,
                "micro_batch_size": COUNT,
            },
        ),
        _make_call(
            "RotaryPositionEmbedding",
            te.RotaryPositionEmbedding,
            {"dim": 16},
            {
                "dim": (*REQUIRED_SIZE, 15),
                "rotary_percent": (0, -0.5, "1", NAN, None),
                "seq_len_interpolation_factor": (0, -1, "2", NAN),
                "rotary_base": (0, -1.0, NAN, "1", None),
                "pretrained_max_position_embeddings": SIZE,
                "interleaved": FLAG,
            },
        ),
        _make_call(
            "InferenceParams",
            te.InferenceParams,
            {"max_batch_size": 2, "max_sequence_length": 8},
            {
                "max_batch_size": REQUIRED_SIZE,
                "max_sequence_length": REQUIRED_SIZE,
                "num_heads_kv": SIZE,
                "head_dim_k": SIZE,
                "head_dim_v": SIZE,
                "dtype": DTYPE,
                "is_paged": FLAG,
                "max_ctx_len": SIZE,
                "qkv_format": (*NAME, None),
                "device": DEVICE,
                "page_size": SIZE,
                "total_num_pages": SIZE,
                "custom_cache_manager": (3, "paged", dict),
            },
        ),
        _make_call(
            "InferenceParams, paged",
            te.InferenceParams,
            {
                "max_batch_size": 2,
                "max_sequence_length": 8,
                "is_paged": True,
                "page_size": 4,
                "total_num_pages": 4,
            },
            {"page_size": SIZE, "total_num_pages": SIZE},
        ),
    ]


def _recipes() -> list[Call]:
    quantizes = {
        "qfactory": (None, 3, "factory"),
        "quantization_alignment": (0, -1, 2.5, "wide", None),
    }
    scopes = ("nvfp4_4over6", "nvfp4_4over6_e4m3_use_256", "nvfp4_4over6_err_mode")
    switches = (
        "disable_rht",
        "disable_stochastic_rounding",
        "disable_2d_quantization",
        "row_scaled_activation",
    )
    dimensions = ("x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim")
    return [
        _make_call(
            "DelayedScaling",
            recipe.DelayedScaling,
            {},
            FORMATS,
            FP8_ATTENTION,
            {
                "margin": (2.5, "one", None, NAN, [0]),
                "amax_history_len": (-1, 2.5, "long", None, NAN, [16]),
                "amax_compute_algo": (*NAME, None),
                "scaling_factor_compute_algo": (3, "max", [1]),
                "reduce_amax": SWITCH,
                "backward_override": (WORD, "dequantized", 3),
            },
        ),
        _make_call(
            "Float8CurrentScaling",
            recipe.Float8CurrentScaling,
            {},
            FORMATS,
            FP8_ATTENTION,
            OVERRIDE,
            PRODUCTS,
            {"use_power_2_scales": SWITCH},
        ),
        _make_call(
            "Float8BlockScaling",
            recipe.Float8BlockScaling,
            {},
            FORMATS,
            OVERRIDE,
            PRODUCTS,
            {"fp8_dpa": (*SWITCH, True), "fp8_mha": (*SWITCH, True), "use_f32_scales": SWITCH},
            dict.fromkeys(dimensions, (0, 3, 1.5, "two", None)),
        ),
        _make_call(
            "MXFP8BlockScaling",
            recipe.MXFP8BlockScaling,
            {},
            FORMATS,
            FP8_ATTENTION,
            OVERRIDE,
            {"margin": (2.5, "one", None, NAN), "enable_2d_quantization": SWITCH},
        ),
        _make_call(
            "NVFP4BlockScaling",
            recipe.NVFP4BlockScaling,
            {},
            FP8_ATTENTION,
            OVERRIDE,
            {
                "fp4_format": ("E2M1", recipe.Format.E4M3, None),
                "fp8_format": ("E4M3", recipe.Format.HYBRID, None),
                **dict.fromkeys(scopes, (WORD, 3, True)),
                **dict.fromkeys(switches, SWITCH),
            },
        ),
        _make_call(
            "CustomRecipe",
            recipe.CustomRecipe,
            {"qfactory": print},
            FP8_ATTENTION,
            OVERRIDE,
            quantizes,
            {"fp8_format": ("E4M3", 3, None)},
        ),
        _make_call("MMParams", recipe.MMParams, {}, {"use_split_accumulator": SWITCH}),
        _make_call(
            "QParams",
            recipe.QParams,
            {},
            {
                "amax_epsilon": (NAN, "small", None),
                "power_2_scale": SWITCH,
                "random_hadamard_transform": SWITCH,
                "stochastic_rounding": SWITCH,
                "fp4_2d_quantization": SWITCH,
            },
        ),
    ]


def _quantizers() -> list[Call]:
    element = {
        "fp8_dtype": (torch.float16, "e4m3", 99, None, 2.5, te.DType.kFloat4E2M1, te.DType.kFloat32)
    }
    usage = {"rowwise": FLAG, "columnwise": FLAG}
    epsilon = {"amax_epsilon": (NAN, "0", None)}
    one = torch.ones(1)
    scalar = (3.0, "1", torch.ones(2), torch.ones(1, dtype=torch.int32), [1.0])
    e4m3 = {"fp8_dtype": te.DType.kFloat8E4M3}
    return [
        _make_call(
            "Float8Quantizer",
            te.Float8Quantizer,
            {"scale": one, "amax": one.clone(), **e4m3},
            element,
            usage,
            {"scale": scalar, "amax": scalar},
        ),
        _make_call(
            "Float8CurrentScalingQuantizer",
            te.Float8CurrentScalingQuantizer,
            e4m3,
            element,
            usage,
            epsilon,
            {
                "force_pow_2_scales": FLAG,
                "with_amax_reduction": FLAG,
                "amax_reduction_group": GROUP,
            },
        ),
        _make_call(
            "Float8BlockQuantizer",
            te.Float8BlockQuantizer,
            e4m3,
            element,
            usage,
            epsilon,
            {"block_scaling_dim": (0, 3, "1", None, 1.5), "force_pow_2_scales": FLAG},
        ),
        _make_call(
            "MXFP8Quantizer",
            te.MXFP8Quantizer,
            e4m3,
            element,
            usage,
            {"with_2d_quantization": FLAG},
        ),
        _make_call(
            "NVFP4Quantizer",
            te.NVFP4Quantizer,
            {},
            usage,
            {
                "fp4_dtype": (torch.float16, "e2m1", 99, te.DType.kFloat8E4M3),
                "with_rht": FLAG,
                "stochastic_rounding": FLAG,
                "with_2d_quantization": FLAG,
                "row_scaled_nvfp4": FLAG,
                "nvfp4_use_4over6": FLAG,
                "nvfp4_e4m3_max": (*SIZE, 384),
                "nvfp4_4over6_err_mode": (WORD, "mae", 3, None),
            },
        ),
    ]


def _others() -> list[Call]:
    return [
        _make_call(
            "autocast",
            te.autocast,
            {},
            {"enabled": FLAG, "calibrating": FLAG, "recipe": RECIPE, "amax_reduction_group": GROUP},
        ),
        _make_call(
            "quantized_model_init",
            te.quantized_model_init,
            {},
            {"enabled": FLAG, "recipe": RECIPE, "preserve_high_precision_init_val": FLAG},
        ),
        _make_call(
            "FusedScaleMaskSoftmax",
            FusedScaleMaskSoftmax,
            {"mask_func": torch.add},
            {"mask_func": (*FUNCTION, None), "softmax_in_fp32": FLAG},
        ),
        _make_call(
            "DropPath", DropPath, {}, {"drop_prob": RATE, "batch_dim": (1.5, "0", None, -1)}
        ),
        _make_call("L2Normalization", L2Normalization, {}, {"eps": EPS}),
        _make_call(
            "CudaRNGStatesTracker.add",
            lambda name, seed: CudaRNGStatesTracker().add(name, seed),
            {"name": "dropout", "seed": 1},
            {"name": ([3], {}), "seed": (1.5, "1", None)},
        ),
        _make_call(
            "activation_recompute_forward",
            activation_recompute_forward,
            {},
            {"activation_recompute": FLAG, "recompute_phase": FLAG},
        ),
        _make_call("emulate", _enter_emulation, {"enabled": True}, {"enabled": (*FLAG,)}),
    ]


def _enter_emulation(enabled: bool) -> None:
    with te.emulate(enabled):
        pass
