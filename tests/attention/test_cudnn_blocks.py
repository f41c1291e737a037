"""MXFP8 attention by cuDNN: rules, graph descriptors, scale order, both passes with a simulated library."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_engine.pytorch as te
from tests.attention.test_cudnn import request
from transformer_engine.common import warning
from transformer_engine.common.hardware import nvidia
from transformer_engine.common.recipe import MXFP8BlockScaling
from transformer_engine.pytorch.functions.attention import blocks_cudnn, fp8
from transformer_engine.pytorch.functions.attention.fp8_attention import (
    AttentionQuantizers,
    FP8Attention,
)
from transformer_engine.pytorch.primitives.attention.backends import cudnn_blocks, cudnn_graph
from transformer_engine.pytorch.primitives.attention.backends.cudnn_blocks import BlockCodes
from transformer_engine.pytorch.primitives.attention.backends.cudnn_plan import Strided
from transformer_engine.pytorch.primitives.attention.call import AttentionInputs, Gradients
from transformer_engine.pytorch.runtime import self_tested
from transformer_engine.pytorch.tensor import MXFP8Quantizer

E4M3, SIZES = te.DType.kFloat8E4M3, {"head_dim_qk": 128, "head_dim_v": 128}
B200 = {"hardware": nvidia(10, 0), "fp8": "mxfp8", **SIZES}


@pytest.fixture
def installed(monkeypatch):
    """Simulate a machine with the libraries, on which the self-test has passed."""
    monkeypatch.setattr(cudnn_blocks, "_unsupported_library", lambda: None)
    monkeypatch.setattr(cudnn_blocks, "untested_reason", lambda path: None)
    monkeypatch.setattr(cudnn_blocks, "get_cudnn_version", lambda: (9, 28, 1))


REJECTED = {
    "hopper": ({"hardware": nvidia(9, 0)}, (9, 28, 1), "compute capability 9.0 has no cudnn mxfp8 attention"),
    "thor": ({"hardware": nvidia(11, 0)}, (9, 28, 1), "11.0 has no cudnn mxfp8 attention"),
    "workstation": ({"hardware": nvidia(12, 0)}, (9, 28, 1), "12.0 has no cudnn mxfp8 attention"),
    "one scale": ({"fp8": "current"}, (9, 28, 1), "supported: the recipe MXFP8BlockScaling"),
    "old": ({}, (9, 20, 0), "cuDNN 9.20.0 has no MXFP8 attention, 9.21.0 has"),
    "wrong": ({}, (9, 23, 1), "cuDNN 9.23.1 computes wrong MXFP8 attention, 9.24 corrects it"),
    "zeros": (
        {"seqlen_q": 4096, "seqlen_kv": 4096, "mask": "no_mask"},
        (9, 24, 0),
        "cuDNN 9.24.0 writes zeros for 4096 keys without a band, from 4096 on, 9.25.0 corrects it",
    ),
    "wide": ({"head_dim_qk": 256, "head_dim_v": 256}, (9, 28, 1), "supported: up to 128, and 192/128"),
    "odd": ({"seqlen_kv": 250}, (9, 28, 1), "250, a head size or a number of tokens, is not a multiple of 32"),
    "packed": (
        {"q_format": "thd", "kv_format": "thd", "mask": "padding_causal"}, (9, 28, 1), "it does not support",
    ),
    "dropout": ({"dropout": 0.1}, (9, 28, 1), "dropout"),
}  # fmt: skip


@pytest.mark.parametrize("name", REJECTED)
def test_unsupported_calls_have_a_reason_with_version_and_remedy(name, installed, monkeypatch):
    options, version, sentence = REJECTED[name]
    monkeypatch.setattr(cudnn_blocks, "get_cudnn_version", lambda: version)
    row = fp8.FORWARD.named("cudnn_mxfp8")
    assert row.rejection_reason(request(**B200)) is None or version != (9, 28, 1)
    reason = row.rejection_reason(request(**{**B200, **options})) or ""
    assert sentence in reason
    if "9.2" in sentence.partition("cuDNN")[2]:
        assert "pip install" in reason


def test_releases_with_zeros_compute_causal_attention(installed, monkeypatch):
    monkeypatch.setattr(cudnn_blocks, "get_cudnn_version", lambda: (9, 24, 0))
    call = request(**B200, seqlen_q=4096, seqlen_kv=4096)
    assert fp8.FORWARD.named("cudnn_mxfp8").rejection_reason(call) is None


def test_the_path_is_off_until_the_self_test_has_passed(monkeypatch):
    monkeypatch.setattr(cudnn_blocks, "_unsupported_library", lambda: None)
    monkeypatch.setattr(cudnn_blocks, "get_cudnn_version", lambda: (9, 28, 1))
    monkeypatch.setattr(self_tested, "has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    passed: dict[str, bool] = {}
    monkeypatch.setattr(self_tested, "_read_stored", lambda index: passed)
    row, call = fp8.FORWARD.named("cudnn_mxfp8"), request(**B200)
    reason = row.rejection_reason(call)
    assert "the self-test of mxfp8 attention has not run on this GPU" in (reason or "")
    with self_tested.testing("mxfp8 attention"):
        assert row.rejection_reason(call) is None
    passed["mxfp8 attention"] = False
    assert "has failed" in (row.rejection_reason(call) or "")
    passed["mxfp8 attention"] = True
    assert row.rejection_reason(call) is None


def test_the_backward_pass_is_in_16_bits_unless_fp8_is_asked_for(installed):
    call = request(**B200)
    for requested, name in (
        (None, "high_precision"),
        (False, "high_precision"),
        (True, "cudnn_mxfp8"),
    ):
        query = fp8.BackwardRequest(call, "cudnn_mxfp8", requested)
        result = next(
            row.name
            for row in fp8.BACKWARD.candidates(query)
            if row.rejection_reason(query) is None
        )
        assert result == name
    wide = fp8.BackwardRequest(request(**{**B200, "head_dim_qk": 192}), "cudnn_mxfp8", True)
    assert "head size 192" in (fp8.BACKWARD.named("cudnn_mxfp8").rejection_reason(wide) or "")
    assert fp8.BACKWARD.named("high_precision").rejection_reason(wide) is None


class Recorded:
    """A tensor in a recorded graph."""

    def __init__(self, **facts: Any):
        self.__dict__.update(facts)

    def __getattr__(self, name: str) -> Any:
        def set_fact(value: Any) -> Recorded:
            setattr(self, name.removeprefix("set_"), value)
            return self

        return set_fact


class Graph:
    """A graph that records its tensors and operations."""

    def __init__(self, **settings: Any):
        self.settings, self.calls = settings, {}

    def tensor(self, **facts: Any) -> Recorded:
        return Recorded(**facts)

    def sdpa_mxfp8(self, **kwargs: Any) -> list[Recorded]:
        self.calls["forward"] = kwargs
        return [Recorded() for _ in range(3)]

    def sdpa_mxfp8_backward(self, **kwargs: Any) -> list[Recorded]:
        self.calls["backward"] = kwargs
        return [Recorded() for _ in range(6)]


@pytest.fixture
def recording(monkeypatch):
    names = ("BFLOAT16", "HALF", "FLOAT", "INT32", "INT64", "FP8_E4M3", "FP8_E5M2", "FP8_E8M0")
    module = ModuleType("cudnn")
    module.data_type = SimpleNamespace(**{name: name for name in names})
    module.tensor_reordering = SimpleNamespace(F8_128x4="F8_128x4")
    module.diagonal_alignment = SimpleNamespace(TOP_LEFT="TOP_LEFT", BOTTOM_RIGHT="BOTTOM_RIGHT")
    module.pygraph, module.create_handle, module.set_stream = Graph, None, None
    for cached in (cudnn_graph.data_type, cudnn_graph.library, cudnn_graph.load_bindings):
        cached.cache_clear()
    for name in (cudnn_graph.__name__, cudnn_blocks.__name__.replace("cudnn_blocks", "cudnn_plan")):
        monkeypatch.setattr(f"{name}.library", lambda: module)
    yield
    cudnn_graph.data_type.cache_clear()
    cudnn_graph.load_bindings.cache_clear()


def tensor_facts(tensor: Recorded) -> tuple[Any, ...]:
    return (
        tuple(tensor.dim),
        tuple(tensor.stride),
        tensor.data_type,
        tensor.__dict__.get("reordering_type", ""),
    )


def bshd_strides(call, grad_output: bool = False) -> Strided:
    """Strides of contiguous bshd tensors."""

    def select(heads: int, depth: int, tokens: int) -> tuple[int, ...]:
        return tokens * heads * depth, heads * depth, depth, 1

    q = select(call.heads, call.head_dim_qk, call.seqlen_q)
    k, v = (select(call.groups, d, call.seqlen_kv) for d in (call.head_dim_qk, call.head_dim_v))
    result = Strided(q, k, v)
    return (
        result._replace(grad_output=select(call.heads, call.head_dim_v, call.seqlen_q))
        if grad_output
        else result
    )


def test_descriptors_of_both_passes_have_the_documented_layouts(recording):
    """E8M0 in F8_128x4: [b, h, s to 128, d / 32 to 4] along d, [b, h, s / 32 to 4, d to 128] along the tokens."""
    call = request(**B200, seqlen_q=160, seqlen_kv=192, needs_gradient=True, window=(64, 0))
    description = cudnn_blocks.describe_forward(call, bshd_strides(call))
    (argument,) = description.graph.calls.values()
    assert description.graph.settings["io_data_type"] == "FP8_E4M3"
    along_d, tokens = ("FP8_E8M0", "F8_128x4"), ("FP8_E8M0", "F8_128x4")
    assert tensor_facts(argument["descale_q"]) == ((2, 4, 256, 4), (4096, 1024, 4, 1), *along_d)
    assert tensor_facts(argument["descale_k"]) == ((2, 2, 256, 4), (2048, 1024, 4, 1), *along_d)
    assert tensor_facts(argument["descale_v"]) == ((2, 2, 8, 128), (2048, 1024, 1, 8), *tokens)
    assert tensor_facts(argument["q"]) == (
        (2, 4, 160, 128),
        (160 * 512, 128, 512, 1),
        "FP8_E4M3",
        "",
    )
    assert tensor_facts(argument["v"]) == (
        (2, 2, 192, 128),
        (192 * 256, 128, 256, 1),
        "FP8_E4M3",
        "",
    )
    assert argument["generate_stats"] and argument["attn_scale"] == call.scale
    assert argument["diagonal_band_left_bound"] == 65 and argument["diagonal_band_right_bound"] == 0

    description = cudnn_blocks.describe_backward(call, bshd_strides(call, grad_output=True))
    (argument,) = description.graph.calls.values()
    for role, expected in {
        "descale_q": ((2, 4, 256, 4), (4096, 1024, 4, 1)),
        "descale_q_T": ((2, 4, 8, 128), (4096, 1024, 1, 8)),
        "descale_k": ((2, 2, 256, 4), (2048, 1024, 4, 1)),
        "descale_k_T": ((2, 2, 8, 128), (2048, 1024, 1, 8)),
        "descale_v": ((2, 2, 256, 4), (2048, 1024, 4, 1)),
        "descale_dO": ((2, 4, 256, 4), (4096, 1024, 4, 1)),
        "descale_dO_T": ((2, 4, 8, 128), (4096, 1024, 1, 8)),
    }.items():
        assert tensor_facts(argument[role]) == (*expected, "FP8_E8M0", "F8_128x4"), role
    for role in ("q", "q_T", "k", "k_T", "v", "dO", "dO_T"):
        assert argument[role].data_type == "FP8_E4M3", role
    for role in ("o_f16", "dO_f16"):
        assert argument[role].data_type == "BFLOAT16", role
    assert (argument["left_bound"], argument["right_bound"]) == (65, 0)
    uids = [argument[role].uid for role in argument if isinstance(argument[role], Recorded)]
    assert len(set(uids)) == len(uids)


def read_exponent(scales: Tensor, row: int, column: int, width: int) -> int:
    """A scale in swizzled order from a matrix whose rows have `width` scales."""
    tile = row // 128 * (width // 4) + column // 4
    return int(scales.view(-1)[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4])


def decode_blocks(tensor: BlockCodes, tensor_format: str, along_tokens: bool) -> Tensor:
    """Codes times scales in float64, read as the library does: one matrix per batch and head."""
    codes = tensor.codes.double()
    x = codes.transpose(0, 1) if tensor_format == "sbhd" else codes  # [b, s, h, d]
    batch, tokens, heads, depth = x.shape
    rows, columns = (depth, tokens // 32) if along_tokens else (tokens, depth // 32)
    padded_rows, width = -(-rows // 128) * 128, -(-columns // 4) * 4
    values = torch.empty_like(x)
    for b in range(batch):
        for h in range(heads):
            scales = tensor.scales.reshape(batch, heads, padded_rows * width)[b, h]
            exponents = torch.tensor(
                [[read_exponent(scales, r, c, width) for c in range(columns)] for r in range(rows)]
            )
            # [rows, contracted]
            factors = torch.exp2(exponents.double() - 127).repeat_interleave(32, 1)
            values[b, :, h] = x[b, :, h] * (factors.t() if along_tokens else factors)
    return values.transpose(0, 1) if tensor_format == "sbhd" else values


@pytest.mark.parametrize("tensor_format", ["bshd", "sbhd"])
@pytest.mark.parametrize(("tokens", "depth"), [(160, 64), (96, 128)])
def test_codes_and_scales_equal_those_of_separate_heads(tensor_format, tokens, depth):
    shape = (2, tokens, 3, depth) if tensor_format == "bshd" else (tokens, 2, 3, depth)
    x = (
        torch.randn(shape, dtype=torch.bfloat16)
        * torch.exp2(torch.randint(-5, 5, (*shape[:3], 1)).float()).bfloat16()
    )
    quantizer = MXFP8Quantizer(E4M3)
    for along_tokens, result in zip(
        (False, True),
        blocks_cudnn._quantize_directions(
            x, tensor_format, quantizer, along_depth=True, along_tokens=True
        ),
        strict=True,
    ):
        assert result is not None and result.codes.shape == x.shape and result.codes.is_contiguous()
        actual = decode_blocks(result, tensor_format, along_tokens)
        of_batch = x.transpose(0, 1) if tensor_format == "sbhd" else x
        actual = actual.transpose(0, 1) if tensor_format == "sbhd" else actual
        for b in range(2):
            for h in range(3):
                head = of_batch[b, :, h].contiguous()  # [s, d]
                alone = quantizer(head.t().contiguous() if along_tokens else head).dequantize()
                assert torch.equal(actual[b, :, h], (alone.t() if along_tokens else alone).double())


def exact(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Causal attention in float64 on bshd tensors, and the logarithms of the denominators [b, h, s]."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * scale
    scores = scores.masked_fill(torch.ones(scores.shape[2:]).triu(1).bool(), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1)


@pytest.mark.parametrize("requested", [None, True], ids=["16 bits", "fp8"])
def test_both_passes_pass_their_products_codes_to_the_library(installed, monkeypatch, requested):
    """The simulated library computes in float64 what the codes, read in the documented layouts, contain."""
    records: dict[str, BlockCodes] = {}

    def forward(call, q: BlockCodes, k: BlockCodes, v: BlockCodes):
        values = [
            decode_blocks(x, "bshd", along) for x, along in ((q, False), (k, False), (v, True))
        ]
        output, lse = exact(*values, call.scale)
        return output.to(call.dtype), lse.float()

    def backward(
        call, codes: dict[str, BlockCodes], output: Tensor, grad_output: Tensor, lse: Tensor
    ):
        records.update(codes)
        inputs = [decode_blocks(codes[role], "bshd", False).requires_grad_() for role in "qkv"]
        grad = decode_blocks(codes["grad_output_codes"], "bshd", False)
        with torch.enable_grad():
            actual = torch.autograd.grad(exact(*inputs, call.scale)[0], inputs, grad)
        return Gradients(*[x.to(call.dtype) for x in actual])

    monkeypatch.setattr(cudnn_blocks, "forward", forward)
    monkeypatch.setattr(cudnn_blocks, "backward", backward)
    call = request(**B200, seqlen_q=96, seqlen_kv=96, needs_gradient=True)
    call = replace(call, fp8=None)
    passes = fp8.choose_fp8(call, "mxfp8", requested)
    assert passes.forward is blocks_cudnn.forward and passes.high_precision
    assert (passes.backward is blocks_cudnn.backward) == (requested is True)
    if not requested:
        return  # the backward pass in 16 bits is cuDNN's own
    quantizers = AttentionQuantizers(*[MXFP8Quantizer(E4M3)] * 6)
    attention = FP8Attention(
        call, "mxfp8", quantizers, None, passes, fp8_output=False, scale_update=None
    )
    shapes = [(2, 96, heads, 128) for heads in (4, 2, 2)]
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16).requires_grad_() for shape in shapes)
    bias = [None] * (len(AttentionInputs._fields) - 3)
    out, _ = attention(call, AttentionInputs(q, k, v, *bias))
    reference, _ = exact(q, k, v, call.scale)
    dy = torch.randn(out.shape, dtype=torch.bfloat16)
    grads = torch.autograd.grad(out, (q, k, v), dy)
    expected_value = torch.autograd.grad(reference, (q, k, v), dy.double().view_as(reference))
    # E4M3 rounds by 2.6 % in the mean: a result's three or four rounded factors differ by up to 5.2 %.
    assert relative_error(out.view_as(reference), reference) < 0.06
    for actual, expected in zip(grads, expected_value, strict=True):
        assert relative_error(actual, expected) < 0.08
    assert records.keys() == {"q", "q_t", "k", "k_t", "v", "grad_output_codes", "grad_output_t"}
    for role, values in (("q_t", q), ("k_t", k), ("grad_output_t", dy.view(2, 96, 4, 128))):
        assert relative_error(decode_blocks(records[role], "bshd", True), values) < 0.04, role


def relative_error(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm())


def test_requested_fp8_gradients_without_a_kernel_warn_once_with_the_reason(installed, recwarn):
    warning.forget_issued()
    for batch in (2, 3):
        call = request(
            **{**B200, "head_dim_qk": 192},
            batch=batch,
            seqlen_q=96,
            seqlen_kv=96,
            needs_gradient=True,
        )
        passes = fp8.choose_fp8(replace(call, fp8=None), "mxfp8", True)
        assert passes.forward is blocks_cudnn.forward and passes.backward is fp8.high_precision
    (issued,) = [str(w.message) for w in recwarn if "NVTE_FP8_DPA_BWD" in str(w.message)]
    assert issued == (
        "NVTE_FP8_DPA_BWD=1 has no effect: the backward pass 'cudnn_mxfp8' does not support this attention (head "
        "size 192; scales along the tokens of more than 128 columns are unsupported); its gradients are computed in "
        "high precision"
    )


@pytest.mark.parametrize("mode", ["fp8_dpa", "fp8_mha"])
@pytest.mark.parametrize("bits", [None, "1"], ids=["16-bit gradients", "emulated gradients"])
def test_the_emulation_on_a_cpu_has_the_error_of_the_format(mode, bits, monkeypatch):
    monkeypatch.setenv("TE_EMULATE", "1")
    monkeypatch.delenv("NVTE_DPA_FP8_RECIPE", raising=False)
    if bits is None:
        monkeypatch.delenv("NVTE_FP8_DPA_BWD", raising=False)
    else:
        monkeypatch.setenv("NVTE_FP8_DPA_BWD", bits)
    torch.manual_seed(0)
    shapes = [(2, 128, heads, 64) for heads in (4, 2, 2)]
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16).requires_grad_() for shape in shapes)
    layer = te.DotProductAttention(4, 64, num_gqa_groups=2, qkv_format="bshd")
    with te.autocast(recipe=MXFP8BlockScaling(**{mode: True})):
        out = layer(q, k, v, attn_mask_type="causal")
    reference, _ = exact(q, k, v, 64**-0.5)
    dy = torch.randn(out.shape, dtype=torch.bfloat16)
    results = [out, *torch.autograd.grad(out, (q, k, v), dy)]
    expected_value = [
        reference,
        *torch.autograd.grad(reference, (q, k, v), dy.double().view_as(reference)),
    ]
    # Three E4M3 mantissa bits, rounded to nearest: 2^-4 / sqrt(3) at most for a code; q, k, v, p and o are rounded.
    for name, one, expected in zip(("o", "dq", "dk", "dv"), results, expected_value, strict=True):
        error = relative_error(one.reshape(expected.shape), expected)
        assert 1e-3 < error < 0.08, (name, error)
