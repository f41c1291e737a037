"""The original's names other than layers: the last choice, codes with one scale, versions."""

from __future__ import annotations

import inspect

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common.dispatch import use_backend
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch import DotProductAttention
from transformer_engine.pytorch.attention.dot_product_attention import (
    _attention_backends,
    get_qkv_layout,
)
from transformer_engine.pytorch.attention.dot_product_attention.utils import (
    AttentionParams,
    FlashAttentionUtils,
    NVTE_Fused_Attn_Backend,
    _get_supported_versions,
    combine_and_quantize,
    get_attention_backend,
)
from transformer_engine.pytorch.primitives.attention import choose as choosing

E4M3 = te.DType.kFloat8E4M3


def qkv(device, heads=2, groups=2, length=8, size=16):
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shapes = [(2, length, count, size) for count in (heads, groups, groups)]
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes]


def uses():
    return tuple(
        _attention_backends[f"use_{kind}_attention"] for kind in ("flash", "fused", "unfused")
    )


def test_the_last_choice_is_readable(device):
    module, tensors = (
        DotProductAttention(2, 16, num_gqa_groups=1, qkv_format="bshd"),
        qkv(device, groups=1),
    )
    with use_backend(attention="reference"):
        module(*tensors)
    assert uses() == (False, False, True)
    with use_backend(attention="torch_sdpa"):
        module(*tensors)
    assert uses() == (False, True, False)
    assert (
        _attention_backends["fused_attention_backend"]
        == NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen
    )
    params = _attention_backends["attention_params"]
    assert isinstance(params, AttentionParams)
    assert (params.batch_size, params.num_heads, params.num_gqa_groups) == (2, 2, 1)
    assert (params.max_seqlen_q, params.head_dim_v, params.attn_mask_type) == (8, 16, "causal")
    assert (params.qkv_layout, params.window_size) == ("bshd_bshd_bshd", (-1, 0))


def test_cached_choices_are_recorded_too(device):
    modules = [
        DotProductAttention(2, 16, qkv_format="bshd", attn_mask_type=m)
        for m in ("causal", "no_mask")
    ]
    for _ in range(2):
        for module in modules:
            module(*qkv(device))
            assert _attention_backends["attention_params"].attn_mask_type == module.attn_mask_type


def test_the_last_choices_parameters_reproduce_it(device):
    module = DotProductAttention(2, 16, qkv_format="bshd")
    module(*[x.requires_grad_() for x in qkv(device)])
    flash, version, fused, kind, unfused, _ = get_attention_backend(
        _attention_backends["attention_params"]
    )
    assert (flash, fused, unfused) == uses()
    assert version == _attention_backends["flash_attention_backend"]
    assert kind == _attention_backends["fused_attention_backend"]


def test_an_fp8_attention_is_recorded_as_fp8(device, monkeypatch):
    monkeypatch.setenv("TE_EMULATE", "1")
    module = DotProductAttention(2, 16, qkv_format="bshd")
    for recompute in (False, True):
        with (
            te.autocast(recipe=Float8CurrentScaling(fp8_dpa=True)),
            use_backend(fp8_attention="emulated"),
        ):
            module(*qkv(device), checkpoint_core_attention=recompute)
        assert uses() == (False, False, True)
        assert _attention_backends["attention_params"].fp8


def test_requiring_an_update_makes_layers_choose_again(device, monkeypatch):
    module, tensors = DotProductAttention(2, 16, qkv_format="bshd"), qkv(device)
    module(*tensors)
    chosen = []
    original = choosing.TABLE.bind
    monkeypatch.setattr(
        choosing.TABLE, "bind", lambda request: chosen.append(request) or original(request)
    )
    module(*tensors)
    assert not chosen
    _attention_backends["backend_selection_requires_update"] = True
    module(*tensors)
    assert len(chosen) == 1 and not _attention_backends["backend_selection_requires_update"]


def test_an_overwritten_entry_lasts_until_the_next_choice(device):
    module = DotProductAttention(2, 16, qkv_format="bshd")
    module(*qkv(device))
    _attention_backends["use_flash_attention"] = "written"
    assert _attention_backends["use_flash_attention"] == "written" and len(_attention_backends) == 7
    module(*qkv(device, length=4))
    assert _attention_backends["use_flash_attention"] is not True and uses() != (
        "written",
        *uses()[1:],
    )
    with pytest.raises(KeyError):
        _attention_backends["use_no_attention"]
    assert set(dict(_attention_backends)) >= {
        "attention_params",
        "backend_selection_requires_update",
    }


LAYOUTS = (
    "bshd_bshd_bshd",
    "sbhd_sbhd_sbhd",
    "thd_thd_thd",
    "bs3hd",
    "sbh3d",
    "t3hd",
    "bshd_bs2hd",
    "thd_th2d",
)


def sample_qkv(layout, device):
    """q, k and v in the named layout."""
    leading = (12,) if layout.startswith("t") else (2, 6)
    axis = -2 if "h3d" in layout or "h2d" in layout else -3
    heads, size = 2, 16
    buffers = {"3": 3, "2": 2}.get(next((c for c in layout if c in "23"), ""), 1)
    shape = [*leading, heads, size]
    if buffers == 1:
        return [torch.randn(shape, device=device) for _ in range(3)]
    shape.insert(len(shape) + axis + 1, buffers)
    parts = list(torch.randn(shape, device=device).unbind(axis))
    return parts if buffers == 3 else [torch.randn(*leading, 4, size, device=device), *parts]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_three_tensors_are_quantized_with_one_scale_and_keep_their_layout(layout, device):
    q, k, v = sample_qkv(layout, device)
    k.mul_(3.0)
    quantizer = te.Float8CurrentScalingQuantizer(E4M3, device)
    *codes, same_layout, scale_format = combine_and_quantize(layout, q, k, v, quantizer)
    assert (same_layout, scale_format) == (layout, None)
    scale = 448.0 / max(float(x.abs().max()) for x in (q, k, v))
    for x, coded in zip((q, k, v), codes, strict=True):
        assert (
            isinstance(coded, te.Float8Tensor) and coded.shape == x.shape and coded.dtype == x.dtype
        )
        assert float(coded._scale_inv) == pytest.approx(1 / scale)
        expected = (x * (1 / coded._scale_inv)).clamp(-448, 448).to(torch.float8_e4m3fn).float()
        near = (
            coded._data.view(torch.float8_e4m3fn).float() - expected
        ).abs() <= 0.126 * expected.abs()
        assert near.all()
    names = {
        get_qkv_layout(*parts, layout.split("_")[0].translate(str.maketrans("", "", "23")))[0]
        for parts in ((q, k, v), tuple(coded._data for coded in codes))
    }
    assert names == {layout}


def test_delayed_scaling_uses_its_scale_and_records_the_largest(device):
    q, k, v = sample_qkv("bs3hd", device)
    amax = torch.zeros(1, device=device)
    quantizer = te.Float8Quantizer(torch.tensor([8.0], device=device), amax, E4M3)
    *codes, _, _ = combine_and_quantize("bs3hd", q, k, v, quantizer)
    assert float(amax) == max(float(x.abs().max()) for x in (q, k, v))
    for x, coded in zip((q, k, v), codes, strict=True):
        expected = (x * 8.0).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(coded._data, expected.view(torch.uint8))


def test_block_formats_and_unknown_layouts_are_rejected(device):
    q, k, v = sample_qkv("bshd_bshd_bshd", device)
    with pytest.raises(TypeError, match="MXFP8Quantizer has no one scale"):
        combine_and_quantize("bshd_bshd_bshd", q, k, v, te.MXFP8Quantizer(E4M3))
    with pytest.raises(ValueError, match="qkv_layout='bhsd_3' is no layout"):
        combine_and_quantize("bhsd_3", q, k, v, te.Float8CurrentScalingQuantizer(E4M3, device))


def test_version_ranges_are_described_in_words():
    lowest, highest = FlashAttentionUtils.version_required, FlashAttentionUtils.max_version
    assert _get_supported_versions(lowest, highest) == f">= {lowest}, <= {highest}"


def test_recording_a_choice_keeps_the_delayed_state(device, monkeypatch):
    monkeypatch.setenv("TE_EMULATE", "1")
    module = DotProductAttention(2, 16, qkv_format="bshd")
    with te.autocast(recipe=DelayedScaling(fp8_dpa=True)):
        out = module(*[x.requires_grad_() for x in qkv(device)])
    out.float().sum().backward()
    assert _attention_backends["attention_params"].is_training


def test_the_unfused_attention_is_the_reference_backend(device):
    from transformer_engine.pytorch.attention.dot_product_attention.backends import (
        UnfusedDotProductAttention,
    )

    tensors = [x.requires_grad_() for x in qkv(device, groups=1)]
    options = {"qkv_format": "bshd", "attn_mask_type": "causal", "window_size": (3, 0)}
    unfused = UnfusedDotProductAttention(0.3, return_max_logit=True)
    layer = DotProductAttention(2, 16, num_gqa_groups=1, softmax_scale=0.3, return_max_logit=True)
    for _ in range(2):
        actual = unfused(*tensors, **options)
        assert uses() == (False, False, True)
        with use_backend(attention="reference"):
            expected = layer(*tensors, **options)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    grads = [torch.autograd.grad(out[0].float().sum(), tensors) for out in (actual, expected)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert not list(unfused.parameters())
    with pytest.raises(ValueError, match="softmax_type='learnable' needs a parameter"):
        UnfusedDotProductAttention(0.3, softmax_type="learnable")


def test_the_flex_attention_import_path_leads_to_its_backend():
    from transformer_engine.pytorch.attention.dot_product_attention import flex_attention
    from transformer_engine.pytorch.primitives.attention.backends import flex

    assert flex_attention.run is flex.run and flex_attention.BACKEND is flex.BACKEND


def test_fused_attention_functions_are_backend_names():
    from transformer_engine.pytorch import cpp_extensions
    from transformer_engine.pytorch.attention.dot_product_attention import backends
    from transformer_engine.pytorch.attention.dot_product_attention.backends import fused_attn_bwd

    assert fused_attn_bwd is backends.fused_attn_bwd is cpp_extensions.fused_attn_bwd
    assert backends.fused_attn_fwd is cpp_extensions.fused_attn_fwd
    # The names that cudnn-frontend reads from a bound call.
    read = {
        "q",
        "k",
        "v",
        "o",
        "d_o",
        "qkv_layout",
        "dqkv_layout",
        "o_format",
        "do_format",
        "aux_ctx_tensors",
    }
    read |= {
        "cu_seqlens_q",
        "cu_seqlens_kv",
        "cu_seqlens_q_padded",
        "cu_seqlens_kv_padded",
        "dropout",
    }
    read |= {
        "attn_bias_type",
        "softmax_type",
        "attn_mask_type",
        "attn_scale",
        "window_size",
        "cuda_graph",
    }
    read |= {
        "max_seqlen_q",
        "max_seqlen_kv",
        "deterministic",
        "s_quantizer",
        "dp_quantizer",
        "dqkv_quantizer",
    }
    assert read <= set(inspect.signature(fused_attn_bwd).parameters)
    with pytest.warns(UserWarning, match="fused_attn_bwd has no effect on attention layers"):
        backends.fused_attn_bwd = len
    assert backends.fused_attn_bwd is len
    del backends.fused_attn_bwd
    assert backends.fused_attn_bwd is cpp_extensions.fused_attn_bwd
