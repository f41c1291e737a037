"""Bad calls to transformer_engine_torch's flat names and their wrappers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from tests.fuzz.bad_values import EPS, FLAG, NAME, NUMBER, RATE, WORD, Call, Made
from tests.fuzz.forward_calls import WRONG_KIND, tensor
from transformer_engine.pytorch import cpp_extensions

PLAIN = ("gelu", "qgelu", "relu", "srelu", "silu")
GATED = ("geglu", "glu", "qgeglu", "reglu", "sreglu", "swiglu")
QUANTIZER = (3, "mxfp8", te.MXFP8Quantizer)
INTEGERS = (tensor(8, 32, dtype=torch.int64), tensor(8, 32).bool())
FLOAT32 = te.DType.kFloat32
NUMBERED = (99, "float32x", None, 2.5)


def _make_call(
    name: str, function: Callable[..., Any], arguments: dict[str, Any], bad: dict[str, Any]
) -> Call:
    return Call(f"tex.{name}", lambda: Made(function, arguments), bad)


def extension_calls() -> list[Call]:
    """One call per function."""
    return [
        *_activations(),
        *_norms(),
        *_softmaxes(),
        *_casts(),
        *_products(),
        *_attention(),
        *_others(),
    ]


def _activations() -> list[Call]:
    calls = []
    for name in (*PLAIN, *GATED, "clamped_swiglu"):
        gated = name in GATED or name == "clamped_swiglu"
        x, dy = tensor(8, 32), tensor(8, 16 if gated else 32)
        back = "clamped_dswiglu" if name == "clamped_swiglu" else f"d{name}"
        odd = (tensor(8, 31), tensor()) if gated else ()
        extra = {"limit": NUMBER, "alpha": NUMBER} if name == "clamped_swiglu" else {}
        inputs = (*WRONG_KIND, *INTEGERS, *odd)
        calls.append(
            _make_call(
                name,
                getattr(tex, name),
                {"input": x, "quantizer": None},
                {"input": inputs, "quantizer": QUANTIZER, **extra},
            )
        )
        bad = {
            "grad": (*WRONG_KIND, *INTEGERS, tensor(8, 5)),
            "fwd_input": (*inputs, tensor(7, 32)),
            "quantizer": QUANTIZER,
            **extra,
        }
        for function in (back, f"dbias_{back}"):
            if hasattr(tex, function):
                calls.append(
                    _make_call(
                        function,
                        getattr(tex, function),
                        {"grad": dy, "fwd_input": x, "quantizer": None},
                        bad,
                    )
                )
    return calls


def _norms() -> list[Call]:
    x, gamma, statistic = tensor(8, 32), tensor(32), tensor(8)
    matrix = (*WRONG_KIND, *INTEGERS, tensor(8, 31), tensor())
    vector = (*WRONG_KIND, tensor(31), tensor(32, dtype=torch.int64), tensor(8, 32))
    rows = (*WRONG_KIND, tensor(7), tensor(8, dtype=torch.int64))
    shared = {"sm_margin": 0, "zero_centered_gamma": False}
    forward = {
        "input": x,
        "weight": gamma,
        "eps": 1e-5,
        "ln_out": None,
        "quantizer": None,
        "otype": FLOAT32,
        **shared,
    }
    backward = {"dz": x, "x": x.clone(), "rsigma": statistic, "gamma": gamma, **shared}
    bad = {
        "input": matrix,
        "weight": vector,
        "eps": EPS,
        "quantizer": QUANTIZER,
        "otype": NUMBERED,
        "ln_out": (3, "out", tensor(3)),
        "zero_centered_gamma": FLAG,
    }
    bad_backward = {
        "dz": matrix,
        "x": matrix,
        "rsigma": rows,
        "gamma": vector,
        "zero_centered_gamma": FLAG,
    }
    return [
        _make_call(
            "layernorm_fwd",
            tex.layernorm_fwd,
            {**forward, "bias": gamma.clone()},
            {**bad, "bias": tuple(value for value in vector if value is not None)},
        ),
        _make_call("rmsnorm_fwd", tex.rmsnorm_fwd, forward, bad),
        _make_call(
            "layernorm_bwd",
            tex.layernorm_bwd,
            {**backward, "mu": statistic.clone()},
            {**bad_backward, "mu": rows},
        ),
        _make_call("rmsnorm_bwd", tex.rmsnorm_bwd, backward, bad_backward),
        _make_call(
            "rmsnorm_bwd_add",
            tex.rmsnorm_bwd_add,
            {**backward, "add": x.clone()},
            {**bad_backward, "add": matrix},
        ),
    ]


def _softmaxes() -> list[Call]:
    scores, triangle = tensor(2, 4, 8, 8), tensor(8, 8, 8)
    wrong = (*WRONG_KIND, tensor(2, 4, 8, 8, dtype=torch.int64), tensor(8), tensor())
    calls = []
    for name, x in (
        ("scaled_softmax", scores),
        ("scaled_upper_triang_masked_softmax", triangle),
        ("scaled_aligned_causal_masked_softmax", scores),
        ("scaled_masked_softmax", scores),
    ):
        masked = name == "scaled_masked_softmax"
        masks = (*WRONG_KIND, tensor(3, 3).bool(), tensor(2, 1, 8, 8)) if masked else ()
        arguments = {
            "input": x,
            "scale_factor": 1.0,
            **({"mask": tensor(2, 1, 8, 8).bool()} if masked else {}),
        }
        calls.append(
            _make_call(
                f"{name}_forward",
                getattr(tex, f"{name}_forward"),
                arguments,
                {
                    "input": wrong,
                    "scale_factor": (*NUMBER, None),
                    **({"mask": masks} if masked else {}),
                },
            )
        )
        grad = "output_grads" if "upper" in name else "output_grad"
        calls.append(
            _make_call(
                f"{name}_backward",
                getattr(tex, f"{name}_backward"),
                {grad: x, "softmax_results": x.clone(), "scale_factor": 1.0},
                {
                    grad: (*wrong, tensor(2, 4, 8, 4)),
                    "softmax_results": (*wrong, tensor(2, 4, 8, 4)),
                    "scale_factor": (*NUMBER, None),
                },
            )
        )
    return calls


def _casts() -> list[Call]:
    quantizer = te.MXFP8Quantizer(te.DType.kFloat8E4M3)
    quantized = quantizer.quantize(tensor(32, 32))
    x = tensor(32, 32)
    return [
        _make_call(
            "quantize",
            tex.quantize,
            {"tensor": x, "quantizer": quantizer},
            {
                "tensor": (*WRONG_KIND, tensor(32, 32, dtype=torch.int64)),
                "quantizer": (*QUANTIZER, None),
                "output": (3, x.clone()),
            },
        ),
        _make_call(
            "dequantize",
            tex.dequantize,
            {"input": quantized, "otype": FLOAT32},
            {"input": (3, "codes", None), "otype": NUMBERED},
        ),
        _make_call(
            "bgrad_quantize",
            tex.bgrad_quantize,
            {"input": x, "quantizer": quantizer},
            {
                "input": (*WRONG_KIND, tensor(32, 32, dtype=torch.int64), tensor()),
                "quantizer": QUANTIZER,
            },
        ),
        _make_call(
            "multi_tensor_quantize",
            tex.multi_tensor_quantize,
            {"tensor_list": [x], "quantizer_list": [quantizer]},
            {
                "tensor_list": (3, None, [3], [x, x]),
                "quantizer_list": (3, None, [3], [quantizer] * 2),
            },
        ),
        _make_call(
            "split_quantize",
            tex.split_quantize,
            {"tensor": x, "split_sections": [16, 16], "quantizer_list": [None, None]},
            {
                "tensor": (*WRONG_KIND, tensor()),
                "split_sections": (3, None, [16, 17], [-1, 33], [16.5, 15.5], ["16", "16"]),
                "quantizer_list": (3, None, [None], [3, 3]),
            },
        ),
        _make_call(
            "create_empty_quantized_tensor",
            tex.create_empty_quantized_tensor,
            {"quantizer": quantizer, "shape": (32, 32), "dtype": FLOAT32},
            {
                "quantizer": (*QUANTIZER, None),
                "shape": (3, "ab", None, (-32, 32)),
                "dtype": NUMBERED,
            },
        ),
        _make_call(
            "compute_amax",
            tex.compute_amax,
            {"input": x, "amax": tensor(1)},
            {
                "input": (*WRONG_KIND, tensor(4, dtype=torch.int64)),
                "amax": (*WRONG_KIND, tensor(2)),
            },
        ),
        _make_call(
            "fp8_transpose",
            tex.fp8_transpose,
            {"input": tensor(8, 32, dtype=torch.uint8), "dtype": 7},
            {
                "input": (*WRONG_KIND, tensor(8, 32), tensor(dtype=torch.uint8)),
                "out": (3, tensor(8, 32, dtype=torch.uint8)),
            },
        ),
        _make_call(
            "swap_first_dims",
            tex.swap_first_dims,
            {"tensor": tensor(4, 8, 2)},
            {"tensor": (*WRONG_KIND, tensor(4), tensor()), "out": (3, tensor(4, 8, 2))},
        ),
    ]


def _products() -> list[Call]:
    a, b = tensor(16, 32), tensor(8, 32)
    matrix = (*WRONG_KIND, tensor(8, 31), tensor(16, 32, dtype=torch.int64), tensor())
    bad = {
        "A": matrix,
        "B": matrix,
        "out": (3, "out", tensor(3, 3)),
        "bias": (3, "bias", tensor(15), tensor(8, 16)),
        "out_dtype": ("float32x", 2.5, 99),
        "layout": (WORD, "", 3, "TT" + "x", None),
        "gelu": FLAG,
        "grad": FLAG,
        "accumulate": (*FLAG, True),
        "alpha": (*NUMBER, None),
        "beta": ("1", 0.5),
        "ub": (3,),
        "ub_type": ("rs",),
        "quantization_params": QUANTIZER,
    }
    grouped = {"A": [a, a.clone()], "B": [b, b.clone()], "out": [tensor(8, 16), tensor(8, 16)]}
    lists = (3, None, [a], [3, 4], a)
    return [
        _make_call("general_gemm", cpp_extensions.general_gemm, {"A": a, "B": b}, bad),
        _make_call(
            "general_grouped_gemm",
            cpp_extensions.general_grouped_gemm,
            grouped,
            {
                "A": lists,
                "B": lists,
                "out": (3, None, [tensor(8, 16)], [3, 4], [tensor(3), tensor(3)]),
                "layout": (WORD, 3, None),
                "m_splits": (3, "8"),
                "use_bias": (True, *FLAG),
                "gelu": FLAG,
                "grad": FLAG,
                "bias": (3, [3, 4]),
            },
        ),
    ]


def _attention() -> list[Call]:
    q = tensor(2, 4, 2, 16)
    bounds = torch.tensor([0, 4, 8], dtype=torch.int32)
    kinds = tex.NVTE_Fused_Attn_Backend
    arguments = {
        "is_training": False,
        "max_seqlen_q": 4,
        "max_seqlen_kv": 4,
        "cu_seqlens_q": bounds,
        "cu_seqlens_kv": bounds.clone(),
        "q": q,
        "k": q.clone(),
        "v": q.clone(),
        "fake_dtype": torch.float32,
        "fused_attention_backend": kinds.NVTE_F16_arbitrary_seqlen,
        "qkv_layout": "bshd_bshd_bshd",
        "attn_mask_type": "no_mask",
    }
    query = {"is_training": True, "q_dtype": te.DType.kBFloat16, "kv_dtype": te.DType.kBFloat16, "qkv_layout": 0,
             "bias_type": 0, "attn_mask_type": 0, "softmax_type": 0, "p_dropout": 0.0, "num_attn_heads": 4,
             "num_gqa_groups": 4, "max_seqlen_q": 8, "max_seqlen_kv": 8, "head_dim_qk": 16, "head_dim_v": 16,
             "window_size_left": -1, "window_size_right": -1}  # fmt: skip
    heads = (*WRONG_KIND, tensor(2, 4, 2, 15), tensor(4, 16), tensor())
    numbers = (99, "x", None, 2.5)
    return [
        _make_call("fused_attn_fwd with keywords", cpp_extensions.fused_attn_fwd, arguments,
            {"q": heads, "k": heads, "v": (*WRONG_KIND, tensor(2, 3, 2, 16), tensor(4, 16), tensor()),
             "fake_dtype": ("float32", None, torch.int32, 3),
             "fused_attention_backend": (kinds.NVTE_No_Backend, "F16", None), "qkv_layout": (WORD, 3, None),
             "attn_bias_type": NAME, "attn_mask_type": (*NAME, None), "softmax_type": (*NAME, None),
             "attn_scale": NUMBER, "dropout": RATE, "attn_bias": (3, "bias"),
             "cu_seqlens_q": (3, None, [0, 4, 8], tensor(3)), "cu_seqlens_kv": (3, None, [0, 4, 8], tensor(3)),
             "window_size": (5, (1,), (1.5, 2), "ab", None), "o_quantizer": QUANTIZER, "is_training": FLAG}),
        _make_call("get_fused_attn_backend", tex.get_fused_attn_backend, query,
            {"q_dtype": numbers, "kv_dtype": numbers, "qkv_layout": numbers, "bias_type": numbers,
             "attn_mask_type": numbers, "softmax_type": numbers, "p_dropout": RATE, "num_attn_heads": (0, -1, 2.5, "4"),
             "num_gqa_groups": (0, -1, 3, 2.5), "max_seqlen_q": (-1, 2.5, "8"), "max_seqlen_kv": (-1, 2.5, "8"),
             "head_dim_qk": (0, -1, 2.5), "head_dim_v": (0, -1, 2.5), "window_size_left": (1.5, "1", None)}),
        _make_call("fa_prepare_fwd", tex.fa_prepare_fwd, {"qkvi": tensor(4, 2, 2, 48)},
            {"qkvi": (*WRONG_KIND, tensor(4, 2, 2, 47), tensor(4, 48), tensor())}),
        _make_call("fa_prepare_bwd", tex.fa_prepare_bwd, {"q": q, "k": q.clone(), "v": q.clone()},
            {"q": (*WRONG_KIND, tensor(2, 4, 2, 15)), "k": (*WRONG_KIND, tensor(2, 4, 2, 15)), "v": WRONG_KIND}),
    ]  # fmt: skip


def _others() -> list[Call]:
    x = tensor(8, 32)
    state = {
        "amax_reduction_buffer": tensor(2),
        "amax_histories": [tensor(4, 2)],
        "scales": [tensor(2)],
        "amax_compute_algo": "max",
        "fp8_dtype": te.DType.kFloat8E4M3,
        "margin": 0,
    }
    rates = (-0.1, 1.5, float("nan"), "0.1", None)
    return [
        _make_call(
            "dropout_fwd",
            tex.dropout_fwd,
            {"input": x, "dropout_probability": 0.5},
            {
                "input": (*WRONG_KIND, *INTEGERS),
                "dropout_probability": rates,
                "out": (3, tensor(3)),
            },
        ),
        _make_call(
            "dropout_bwd",
            tex.dropout_bwd,
            {"grad_output": x, "mask": tensor(32, dtype=torch.uint8), "dropout_probability": 0.5},
            {
                "grad_output": (*WRONG_KIND, *INTEGERS),
                "mask": (*WRONG_KIND, tensor(31, dtype=torch.uint8), tensor(32)),
                "dropout_probability": rates,
                "grad_input": (3, tensor(3)),
            },
        ),
        _make_call(
            "fused_amax_and_scale_update_after_reduction",
            tex.fused_amax_and_scale_update_after_reduction,
            state,
            {
                "amax_reduction_buffer": (*WRONG_KIND, tensor(3)),
                "amax_histories": (3, None, [3], [tensor(4, 3)], [tensor(2)]),
                "scales": (3, None, [3], [tensor(3)], [tensor(2, dtype=torch.int64)]),
                "amax_compute_algo": (*NAME, None),
                "fp8_dtype": (99, "e4m3", None, te.DType.kFloat32),
                "margin": ("1", None, float("nan")),
            },
        ),
    ]
