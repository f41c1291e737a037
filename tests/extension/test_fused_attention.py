"""The extension's fused_attn_fwd and fused_attn_bwd equal a literal attention and its gradients."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

import transformer_engine_torch as tex
from tests.attention.attention_oracle import attend, cumulative, visibility
from transformer_engine.common.dispatch import use_backend
from transformer_engine.pytorch import Float8CurrentScalingQuantizer, Float8Quantizer, Float8Tensor
from transformer_engine.pytorch.attention.dot_product_attention.utils import (
    AttentionParams,
    get_attention_backend,
)
from transformer_engine.pytorch.constants import TE_DType

BATCH, LENGTH, HEADS, GROUPS, SIZE = 2, 6, 4, 2, 8
LENGTHS_Q, LENGTHS_KV = [3, 6], [5, 2]
LAYOUTS = {layout.name.removeprefix("NVTE_"): layout for layout in tex.NVTE_QKV_Layout}
MASKS = {
    "no_mask": tex.NVTE_Mask_Type.NVTE_NO_MASK,
    "padding": tex.NVTE_Mask_Type.NVTE_PADDING_MASK,
    "causal": tex.NVTE_Mask_Type.NVTE_CAUSAL_MASK,
    "padding_causal": tex.NVTE_Mask_Type.NVTE_PADDING_CAUSAL_MASK,
    "causal_bottom_right": tex.NVTE_Mask_Type.NVTE_CAUSAL_BOTTOM_RIGHT_MASK,
    "padding_causal_bottom_right": tex.NVTE_Mask_Type.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK,
}
BIASES = {
    "no_bias": tex.NVTE_Bias_Type.NVTE_NO_BIAS,
    "pre_scale_bias": tex.NVTE_Bias_Type.NVTE_PRE_SCALE_BIAS,
    "post_scale_bias": tex.NVTE_Bias_Type.NVTE_POST_SCALE_BIAS,
    "alibi": tex.NVTE_Bias_Type.NVTE_ALIBI,
}
SOFTMAXES = {
    "vanilla": tex.NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX,
    "off-by-one": tex.NVTE_Softmax_Type.NVTE_OFF_BY_ONE_SOFTMAX,
    "learnable": tex.NVTE_Softmax_Type.NVTE_LEARNABLE_SOFTMAX,
}
CLOSE = {"atol": 2e-5, "rtol": 2e-5}


def sample(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def convert_layout(x, axes, lengths):
    """Convert x [b, s, h, d] to sbhd, bshd, bhsd or thd."""
    if axes == "thd":
        return torch.cat([row[:n] for row, n in zip(x, lengths, strict=True)])
    return {"sbhd": x.transpose(0, 1), "bshd": x, "bhsd": x.transpose(1, 2)}[axes].contiguous()


def run(
    device, layout="BSHD_BSHD_BSHD", mask="no_mask", bias="no_bias", softmax="vanilla", **options
):
    """([O, aux..], gradients) from the extension in the oracle's shape, then from the float64 oracle."""
    window, dtype = options.pop("window", (-1, -1)), options.pop("dtype", torch.float32)
    parts = layout.lower().split("_")
    formats = ["".join(c for c in part if c.isalpha()) for part in (parts[0], parts[-1])]
    packed = next((digit for digit in "32" if digit in parts[-1]), "")
    groups = HEADS if packed == "3" else GROUPS
    lengths_q, lengths_kv = LENGTHS_Q, LENGTHS_Q if packed == "3" else LENGTHS_KV
    if "thd" not in formats and "padding" not in mask:
        lengths_q = lengths_kv = [LENGTH] * BATCH
    q, k, v = sample(BATCH, LENGTH, HEADS, SIZE), *sample(2, BATCH, LENGTH, groups, SIZE, seed=1)
    offset = sample(HEADS, seed=3) if softmax == "learnable" else None
    table = sample(1, HEADS, LENGTH, LENGTH, seed=4) if "scale_bias" in bias else None
    grad = sample(BATCH, LENGTH, HEADS, SIZE, seed=2)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    extra = [x.double().requires_grad_() for x in (table, offset) if x is not None]
    sink = {
        "vanilla": None,
        "off-by-one": torch.zeros(HEADS).double(),
        "learnable": extra[-1:] and extra[-1],
    }
    slopes = [2.0 ** (-8.0 * (h + 1) / HEADS) for h in range(HEADS)]

    def add_buffers(b, h, i, j):
        if bias == "alibi":
            shift = LENGTH - LENGTH if "padding" not in mask else lengths_kv[b] - lengths_q[b]
            return -slopes[h] * abs(
                j - i - (shift if "bottom" in mask or "causal" not in mask else 0)
            )
        return extra[0][0, h, i, j] if table is not None else 0.0

    sees = visibility(mask, LENGTH, LENGTH, lengths_q, lengths_kv, window)
    expected, _ = attend(*leaves, sees, None, add_buffers, bias == "pre_scale_bias", sink[softmax])
    want_gradients = torch.autograd.grad(expected, [*leaves, *extra], grad.double().flatten(-2))

    q, grad = (convert_layout(x, formats[0], lengths_q).to(device, dtype) for x in (q, grad))
    k, v = (convert_layout(x, formats[1], lengths_kv).to(device, dtype) for x in (k, v))
    bounds = [cumulative(n, device) for n in (lengths_q, lengths_kv)]
    kinds = [LAYOUTS[layout], BIASES[bias], MASKS[mask], SOFTMAXES[softmax], window]
    before, after = (LENGTH, LENGTH), (1.0 / math.sqrt(SIZE), options.pop("dropout", 0.0), True)
    argument = None if offset is None else offset.view(1, HEADS, 1, 1).to(device)
    out = tex.fused_attn_fwd(
        *before,
        True,
        *after,
        *kinds,
        *bounds,
        q,
        k,
        v,
        dtype,
        Bias=None if table is None else table.to(device),
        SoftmaxOffset=argument,
        **options,
    )
    aux = [
        x for i, x in enumerate(out) if i > 0 and not (options.get("return_max_logit") and i == 2)
    ]
    gradients = tex.fused_attn_bwd(
        *before,
        *after,
        *kinds,
        True,
        *bounds,
        q,
        k,
        v,
        out[0],
        grad,
        dtype,
        TE_DType[dtype],
        aux,
    )
    reference = [
        convert_layout(expected.unflatten(-1, (HEADS, SIZE)).detach(), formats[0], lengths_q)
    ]
    for x, axes, lengths in zip(
        want_gradients,
        (formats[0], formats[1], formats[1]),
        (lengths_q, lengths_kv, lengths_kv),
        strict=False,
    ):
        reference.append(convert_layout(x, axes, lengths))
    return out, gradients, reference, list(want_gradients[3:])


def check(actual, gradients, expected, extra, close=CLOSE):
    for ours, reference in zip([actual[0], *gradients[:3]], expected, strict=True):
        assert ours.shape == reference.shape
        torch.testing.assert_close(ours.cpu().double(), reference, **close)
    for ours, reference in zip([x for x in gradients[3:] if x is not None], extra, strict=True):
        torch.testing.assert_close(ours.cpu().double().reshape(reference.shape), reference, **close)


PLAIN = [name for name in LAYOUTS if "Paged" not in name]


@pytest.mark.parametrize("layout", PLAIN)
def test_every_layout_gives_the_same_attention(layout, device):
    check(*run(device, layout, "padding_causal" if "T" in layout.split("_")[0][0] else "causal"))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", PLAIN)
def test_every_layout_runs_in_16_bits_on_a_gpu(layout, device):
    mask = "padding_causal" if "T" in layout.split("_")[0][0] else "causal"
    check(*run(device, layout, mask, dtype=torch.bfloat16), close={"atol": 6e-2, "rtol": 6e-2})


@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_hides_the_keys_of_its_name(mask, device):
    check(*run(device, mask=mask))


@pytest.mark.parametrize("window", [(2, 0), (0, 0)])
def test_windows_end_behind_their_left_side(window, device):
    check(*run(device, mask="causal", window=window))


@pytest.mark.parametrize("bias", BIASES)
def test_biases_have_their_gradient(bias, device):
    out, gradients, *expected = run(device, bias=bias)
    check(out, gradients, *expected)
    assert (gradients[3] is None) == ("scale" not in bias)


@pytest.mark.parametrize("softmax", SOFTMAXES)
def test_softmax_offsets_have_their_gradient(softmax, device):
    out, gradients, *expected = run(device, softmax=softmax)
    check(out, gradients, *expected)
    assert (gradients[4] is None) == (softmax != "learnable")


def test_auxiliary_tensors_come_in_the_order_of_the_original(device):
    out, *_ = run(device, bias="post_scale_bias", softmax="learnable", return_max_logit=True)
    output, lse, max_logit, state, bias, offset = out
    assert output.shape == (BATCH, LENGTH, HEADS, SIZE)
    assert lse.shape == (BATCH, HEADS, LENGTH, 1) and lse.dtype == torch.float32
    assert max_logit.shape == (HEADS,) and state.shape == (2,) and state.dtype == torch.int64
    assert bias.shape == (1, HEADS, LENGTH, LENGTH) and offset.shape == (1, HEADS, 1, 1)


def test_lse_is_the_log_of_the_softmax_denominator(device):
    (_, lse, *_), *_ = run(device, "BSHD_BSHD_BSHD")
    q, (k, _) = sample(BATCH, LENGTH, HEADS, SIZE), sample(2, BATCH, LENGTH, GROUPS, SIZE, seed=1)
    logits = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, dim=2)) / math.sqrt(SIZE)
    torch.testing.assert_close(lse.cpu()[..., 0], torch.logsumexp(logits, -1), **CLOSE)
    (_, lse, *_), *_ = run(device, "THD_THD_THD", "padding")
    assert lse.shape == (sum(LENGTHS_Q), HEADS, 1)


@pytest.mark.parametrize(
    "layout", ["SB3HD", "BSH3D", "T3HD", "SBHD_SB2HD", "BSHD_BSH2D", "THD_TH2D"]
)
def test_gradients_of_a_packed_layout_share_one_buffer(layout, device):
    _, gradients, *_ = run(device, layout, "padding" if layout.startswith("T") else "no_mask")
    packed = gradients[:3] if "3" in layout else gradients[1:3]
    assert len({x.untyped_storage().data_ptr() for x in packed}) == 1


def test_dropout_is_replayed_by_the_backward(device):
    """With values 1, each output is the kept share of its row; its gradient keeps the same keys."""
    q, k = sample(1, 8, 2, 16).to(device), sample(1, 8, 2, 16, seed=1).to(device)
    v = torch.ones_like(k)
    bounds = cumulative([8], device)
    kinds = [
        LAYOUTS["BSHD_BSHD_BSHD"],
        BIASES["no_bias"],
        MASKS["no_mask"],
        SOFTMAXES["vanilla"],
        (-1, -1),
    ]
    first = tex.fused_attn_fwd(
        8, 8, True, 0.25, 0.5, True, *kinds, bounds, bounds, q, k, v, torch.float32
    )
    out, _, state = first
    assert not torch.allclose(out, torch.ones_like(out))
    grad = torch.ones_like(out)
    *_, grad_v, _, _ = tex.fused_attn_bwd(
        8,
        8,
        0.25,
        0.5,
        True,
        *kinds,
        False,
        bounds,
        bounds,
        q,
        k,
        v,
        out,
        grad,
        torch.float32,
        tex.DType.kFloat32,
        first[1:],
    )
    # Summed over keys, dv equals the kept probabilities summed over queries, which are the output.
    torch.testing.assert_close(grad_v.sum(dim=1), out.sum(dim=1), atol=1e-4, rtol=1e-4)
    repeated = tex.fused_attn_fwd(
        8, 8, True, 0.25, 0.5, True, *kinds, bounds, bounds, q, k, v, torch.float32
    )
    assert not torch.equal(repeated[2], state)


@pytest.mark.parametrize("keys", ["BSHD", "SBHD"])
@pytest.mark.parametrize("queries", ["BSHD", "SBHD", "THD"])
def test_pages_are_read_through_their_table(queries, keys, device):
    page, pages = 4, torch.tensor([[3, 0], [1, 2]], dtype=torch.int32, device=device)
    q, k, v = sample(2, 3, HEADS, SIZE), *sample(2, 4, page, GROUPS, SIZE, seed=1)
    lengths_q, lengths_kv = [3, 1], [7, 5]
    dense = [x[pages.cpu().long()].flatten(1, 2) for x in (k, v)]
    mask = "padding_causal_bottom_right"
    sees = visibility(mask, 3, 8, lengths_q, lengths_kv)
    expected, _ = attend(q.double(), *(x.double() for x in dense), sees)
    expected = expected.unflatten(-1, (HEADS, SIZE))
    out, *_ = tex.fused_attn_fwd(
        3,
        8,
        False,
        1.0 / math.sqrt(SIZE),
        0.0,
        True,
        LAYOUTS[f"Paged_KV_{queries}_{keys}_{keys}"],
        BIASES["no_bias"],
        MASKS[mask],
        SOFTMAXES["vanilla"],
        (-1, -1),
        cumulative(lengths_q, device),
        cumulative(lengths_kv, device),
        convert_layout(q, queries.lower(), lengths_q).to(device),
        *(convert_layout(x, keys.lower(), None).to(device) for x in (k, v)),
        torch.float32,
        page_table_k=pages,
        page_table_v=pages,
    )
    torch.testing.assert_close(
        out.cpu().double(), convert_layout(expected, queries.lower(), lengths_q), **CLOSE
    )


def test_a_page_table_and_its_layout_belong_together(device):
    x, bounds = sample(1, 4, 1, 8).to(device), cumulative([4], device)
    kinds = [
        BIASES["no_bias"],
        MASKS["padding"],
        SOFTMAXES["vanilla"],
        (-1, -1),
        bounds,
        bounds,
        x,
        x,
        x,
    ]
    with pytest.raises(
        ValueError, match=r"qkv_layout='paged_kv_bshd_bshd_bshd' needs page_table_k"
    ):
        layout = LAYOUTS["Paged_KV_BSHD_BSHD_BSHD"]
        tex.fused_attn_fwd(4, 4, False, 1.0, 0.0, True, layout, *kinds, torch.float32)


def create_quantizer(kind, device):
    if kind == "current":
        return Float8CurrentScalingQuantizer(tex.DType.kFloat8E4M3, device=device)
    one = torch.ones(1, device=device)
    return Float8Quantizer(scale=32 * one, amax=0 * one, fp8_dtype=tex.DType.kFloat8E4M3)


@pytest.mark.parametrize("kind", ["current", "delayed"])
@pytest.mark.parametrize("layout", ["BSHD_BSHD_BSHD", "SBHD_SBHD_SBHD", "BHSD_BHSD_BHSD"])
def test_codes_are_attended_to_and_results_quantized(layout, kind, device):
    """Errors are within a quarter of the RMSE that FP8 attention's callers allow (0.11 to 0.15)."""
    quantizer, softmax = create_quantizer("current", device), create_quantizer(kind, device)
    q, k, v = sample(3, 32, 32, 2, 16).to(device)
    bounds = cumulative([32] * 32, device)
    kinds = [
        LAYOUTS[layout],
        BIASES["no_bias"],
        MASKS["causal"],
        SOFTMAXES["vanilla"],
        (-1, 0),
        bounds,
        bounds,
    ]
    if layout.startswith("BHSD"):
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    plain, *aux = tex.fused_attn_fwd(32, 32, True, 0.25, 0.0, True, *kinds, q, k, v, torch.float32)
    narrow = [quantizer(x) for x in (q, k, v)]
    call = (32, 32, True, 0.25, 0.0, True, *kinds, *narrow, torch.float32)
    output = create_quantizer(kind, device)
    out, *aux = tex.fused_attn_fwd(*call, s_quantizer=softmax, o_quantizer=output)
    assert isinstance(out, Float8Tensor) and out.shape == plain.shape
    assert 0 < (out.dequantize() - plain).square().mean().sqrt() < 0.03
    if kind == "delayed":
        torch.testing.assert_close(
            output.amax, out.dequantize().abs().amax().view(1), atol=0.1, rtol=0.1
        )
    wide, *_ = tex.fused_attn_fwd(*call)
    assert type(wide) is torch.Tensor and wide.dtype == torch.float32
    assert 0 < (wide - plain).square().mean().sqrt() < 0.03
    gradients = tex.fused_attn_bwd(
        32,
        32,
        0.25,
        0.0,
        True,
        *kinds[:5],
        True,
        *kinds[5:],
        *narrow,
        out,
        quantizer(q),
        torch.float32,
        tex.DType.kFloat8E5M2,
        aux,
        dqkv_quantizer=quantizer,
    )
    assert all(isinstance(x, Float8Tensor) and x.shape == q.shape for x in gradients[:3])


def test_the_softmax_quantizer_learns_the_largest_probability(device):
    quantizer, softmax = create_quantizer("current", device), create_quantizer("delayed", device)
    q, k, v = (quantizer(x) for x in sample(3, 4, 32, 2, 16).to(device))
    bounds = cumulative([32] * 4, device)
    kinds = [
        LAYOUTS["BSHD_BSHD_BSHD"],
        BIASES["no_bias"],
        MASKS["causal"],
        SOFTMAXES["vanilla"],
        (-1, 0),
    ]
    call = (32, 32, False, 0.25, 0.0, True, *kinds, bounds, bounds, q, k, v, torch.float32)
    with use_backend(attention="reference", fp8_attention="emulated"):
        tex.fused_attn_fwd(
            *call, s_quantizer=softmax, o_quantizer=create_quantizer("delayed", device)
        )
    # the first query sees one key
    torch.testing.assert_close(softmax.amax, torch.ones(1, device=device))


def test_interleaved_buffers_are_split_and_merged(device):
    buffer = sample(5, 2, 3, 12).to(device)
    separate = tex.fa_prepare_fwd(buffer)
    assert separate.shape == (3, 2, 5, 3, 4) and separate.is_contiguous()
    for got, expected in zip(separate, buffer.chunk(3, dim=-1), strict=True):
        assert torch.equal(got, expected.transpose(0, 1))
    assert torch.equal(tex.fa_prepare_fwd(buffer[..., :4]), separate)
    assert torch.equal(tex.fa_prepare_bwd(*separate), buffer)
    with pytest.raises(ValueError, match=r"neither ends in 3 \* d features"):
        tex.fa_prepare_fwd(buffer[..., :4].contiguous())


def query_backend(**changes):
    call = {
        "is_training": True,
        "q_dtype": tex.DType.kBFloat16,
        "kv_dtype": tex.DType.kBFloat16,
        "qkv_layout": LAYOUTS["BSHD_BSHD_BSHD"],
        "bias_type": BIASES["no_bias"],
        "attn_mask_type": MASKS["causal"],
        "softmax_type": SOFTMAXES["vanilla"],
        "p_dropout": 0.0,
        "num_attn_heads": 4,
        "num_gqa_groups": 2,
        "max_seqlen_q": 64,
        "max_seqlen_kv": 64,
        "head_dim_qk": 64,
        "head_dim_v": 64,
        "window_size_left": -1,
        "window_size_right": 0,
    } | changes
    return tex.get_fused_attn_backend(*call.values())


def test_the_backend_is_reported_by_kind(monkeypatch):
    assert query_backend() == tex.NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen
    mixed = query_backend(kv_dtype=tex.DType.kFloat16)
    assert mixed == tex.NVTE_Fused_Attn_Backend.NVTE_No_Backend
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    assert query_backend() == tex.NVTE_Fused_Attn_Backend.NVTE_No_Backend


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"attn_mask_type": "arbitrary"}, None),
        ({"inference_params": None, "softcap": 2.0, "softmax_type": "learnable"}, None),
        ({"fp8": True}, "cudnn: "),
    ],
)
def test_one_argument_gives_the_kind_and_the_reason(changes, words):
    params = AttentionParams(max_seqlen_q=64, max_seqlen_kv=64, **changes)
    kind, reason = tex.get_fused_attn_backend(params)
    supported = get_attention_backend(params)[-1][1]
    assert (kind == tex.NVTE_Fused_Attn_Backend.NVTE_No_Backend) == (not supported) == bool(reason)
    assert words is None or reason.startswith(words)


def test_the_reason_names_a_switch_and_another_argument_is_rejected(monkeypatch):
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    kind, reason = tex.get_fused_attn_backend(AttentionParams())
    assert kind == tex.NVTE_Fused_Attn_Backend.NVTE_No_Backend and "NVTE_FUSED_ATTN=0" in reason
    for wrong in ((), (True,), ({"num_heads": 4},)):
        with pytest.raises(TypeError, match="pass an AttentionParams"):
            tex.get_fused_attn_backend(*wrong)


def test_a_causal_mask_closes_an_open_window_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = query_backend(window_size_left=33, window_size_right=-1)
    assert result == query_backend(window_size_left=33, window_size_right=0)


@pytest.mark.parametrize(
    "kind, names",
    [
        (tex.NVTE_Bias_Type, {"NVTE_NO_BIAS": 0, "NVTE_ALIBI": 3}),
        (tex.NVTE_Mask_Type, {"NVTE_NO_MASK": 0, "NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK": 5}),
        (tex.NVTE_Softmax_Type, {"NVTE_LEARNABLE_SOFTMAX": 2}),
        (tex.NVTE_QKV_Format, {"NVTE_SBHD": 0, "NVTE_THD": 2, "NVTE_BHSD": 7}),
        (tex.NVTE_QKV_Layout, {"NVTE_SB3HD": 0, "NVTE_THD_THD_THD": 14, "NVTE_BHSD_BHSD_BHSD": 25}),
        (tex.NVTE_Fused_Attn_Backend, {"NVTE_No_Backend": -1, "NVTE_FP8": 2}),
        (tex.DType, {"kBFloat16": 6, "kFloat8E4M3": 7}),
    ],
)
def test_enumerations_have_the_headers_numbers(kind, names):
    assert {name: int(kind[name]) for name in names} == names


def test_the_wrappers_take_names(device):
    from transformer_engine.pytorch.cpp_extensions import fused_attn as wrappers

    backend = wrappers.FusedAttnBackend["F16_arbitrary_seqlen"]
    q, k, v = (sample(2, 6, 4, 8, seed=seed).to(device) for seed in range(3))
    bounds, names = (
        cumulative([6, 6], device),
        {"qkv_layout": "bshd_bshd_bshd", "attn_mask_type": "causal"},
    )
    direct = tex.fused_attn_fwd(
        6,
        6,
        True,
        8**-0.5,
        0.0,
        True,
        LAYOUTS["BSHD_BSHD_BSHD"],
        BIASES["no_bias"],
        MASKS["causal"],
        SOFTMAXES["vanilla"],
        (-1, -1),
        bounds,
        bounds,
        q,
        k,
        v,
        torch.float32,
    )
    call = (6, 6, bounds, bounds, q, k, v)
    out, aux, max_logit = wrappers.fused_attn_fwd(
        True, *call, torch.float32, backend, return_max_logit=True, **names
    )
    torch.testing.assert_close(out, direct[0])
    assert len(aux) == 2 and max_logit.shape == (4,)
    assert len(wrappers.fused_attn_fwd(True, *call, torch.float32, backend, **names)) == 2
    *gradients, bias, offset = wrappers.fused_attn_bwd(
        *call, out, torch.ones_like(out), torch.float32, aux, backend, **names
    )
    assert (
        [x.shape for x in gradients] == [q.shape, k.shape, v.shape]
        and bias is None
        and offset is None
    )
    with pytest.raises(ValueError, match="fused_attention_backend is No_Backend"):
        wrappers.fused_attn_fwd(True, *call, torch.float32, wrappers.FusedAttnBackend["No_Backend"])
    with pytest.raises(
        ValueError, match="attn_mask_type='diagonal' does not exist; choose one of no_mask"
    ):
        wrappers.fused_attn_fwd(True, *call, torch.float32, backend, attn_mask_type="diagonal")


def test_the_alias_module_has_the_extensions_names():
    from transformer_engine.pytorch import cpp_extensions

    assert set(tex.__all__) <= set(dir(cpp_extensions))
