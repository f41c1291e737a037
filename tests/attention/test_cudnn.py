"""The cuDNN backend: unsupported calls with reasons on any machine; on a GPU, all options against the reference."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.attention.attention_oracle import cumulative
from transformer_engine.common import optional
from transformer_engine.common.hardware import nvidia
from transformer_engine.pytorch.functions.attention.fp8 import FORWARD
from transformer_engine.pytorch.primitives.attention import mask as masks
from transformer_engine.pytorch.primitives.attention import reference
from transformer_engine.pytorch.primitives.attention.backends import (
    cudnn,
    cudnn_fp8,
    cudnn_graph,
    cudnn_plan,
)
from transformer_engine.pytorch.primitives.attention.call import (
    AttentionCall,
    AttentionInputs,
    Switches,
)


def request(mask: str = "causal", window=None, bottom_right=None, **options: Any) -> AttentionCall:
    arguments: dict[str, Any] = {
        "dtype": torch.bfloat16,
        "device_type": "cuda",
        "batch": 2,
        "heads": 4,
        "groups": 2,
        "seqlen_q": 256,
        "seqlen_kv": 256,
        "head_dim_qk": 64,
        "head_dim_v": 64,
        "q_format": "bshd",
        "kv_format": "bshd",
        "mask": masks.resolve(mask, window, bottom_right),
        "scale": 0.125,
        "switches": Switches(),
        "hardware": nvidia(9, 0),
    }
    return AttentionCall(**{**arguments, **options})


PACKED = {"q_format": "thd", "kv_format": "thd"}


@pytest.fixture
def installed(monkeypatch):
    """Simulate a machine with the library, without querying its GPU."""
    for module in (cudnn, cudnn_fp8):
        monkeypatch.setattr(module, "unavailable_reason", lambda: None)
    monkeypatch.setattr(cudnn, "has_cuda", lambda: False)
    monkeypatch.setattr(cudnn, "get_cudnn_version", lambda: (9, 19, 0))


def test_a_missing_library_is_a_rejection(monkeypatch):
    cudnn_graph.unavailable_reason.cache_clear()
    monkeypatch.setattr(optional, "installed", lambda name: False)
    assert "not installed; pip install" in (cudnn.BACKEND.rejection_reason(request()) or "")
    cudnn_graph.unavailable_reason.cache_clear()


def compiled(version: tuple[int, int], without: str = "") -> ModuleType:
    """Module `cudnn` in one version, with the names that its compiled part has in the published wheels."""
    module, part = ModuleType("cudnn"), ModuleType("cudnn._compiled_module")
    names = {
        "_execute_with_raw_ptrs",
        "_get_variant_pack_uids_sorted",
        "_prepare_variant_pack_template",
    }
    graph = type("graph", (), dict.fromkeys(names - {without}))
    setattr(part, "pygraph" if version < (1, 27) else "backend_graph", graph)
    for name in ("create_handle", "set_stream" if version < (1, 28) else "_raw_set_stream"):
        if name != without:
            setattr(part, name, f"{name} of {version}")
    module._pybind_module = part
    # Python classes, from 1.27 and 1.28 on.
    module.pygraph = module.create_handle = module.set_stream = object
    return module


@pytest.fixture
def reason(monkeypatch):
    """Reason why a frontend version is unsupported, given a cuDNN version."""

    def ask(frontend: str, cudnn_version: tuple[int, ...], without: str = "") -> str | None:
        cudnn_graph.unavailable_reason.cache_clear()
        module = compiled(tuple(int(part) for part in frontend.split(".")[:2]), without)
        monkeypatch.setattr(optional, "installed", lambda name: True)
        monkeypatch.setattr(optional, "failure", lambda name: None)
        monkeypatch.setattr(cudnn_graph, "library", lambda: module)
        monkeypatch.setattr(cudnn_graph.importlib.metadata, "version", lambda name: frontend)
        monkeypatch.setattr(cudnn_graph, "get_cudnn_version", lambda: cudnn_version)
        return cudnn_graph.unavailable_reason()

    yield ask
    cudnn_graph.unavailable_reason.cache_clear()


@pytest.mark.parametrize(
    ("frontend", "cudnn_version", "sentence"),
    [
        ("1.22.1", (9, 20, 0), "nvidia-cudnn-frontend 1.22.1 < 1.23; pip install"),
        ("1.24.0", (9, 19, 0), "nvidia-cudnn-frontend 1.24.0 needs cuDNN 9.20, found 9.19.0"),
        ("1.26.1", (9, 13, 1), "nvidia-cudnn-frontend 1.26.1 needs cuDNN 9.20, found 9.13.1"),
        ("1.32.0", (9, 10, 2), "cuDNN 9.10.2 < 9.13.1"),
    ],
)
def test_unsupported_frontend_versions_are_named(frontend, cudnn_version, sentence, reason):
    assert sentence in (reason(frontend, cudnn_version) or "")


@pytest.mark.parametrize(
    "frontend", ["1.23.0", "1.24.1", "1.26.0", "1.27.0", "1.28.0", "1.29.0", "1.32.0", "1.40.0"]
)
def test_frontend_versions_from_123_on_are_supported(frontend, reason):
    assert reason(frontend, (9, 20, 0)) is None
    version = tuple(int(part) for part in frontend.split(".")[:2])
    result = cudnn_graph.load_bindings(cudnn_graph.library())
    assert hasattr(result.graph, "_execute_with_raw_ptrs")
    assert result.create_handle == f"create_handle of {version}"
    assert (
        result.set_stream
        == f"{'set_stream' if version < (1, 28) else '_raw_set_stream'} of {version}"
    )


@pytest.mark.parametrize(
    "name", ["_execute_with_raw_ptrs", "create_handle", "_prepare_variant_pack_template"]
)
def test_a_name_missing_from_a_later_frontend_is_the_reason(name, reason):
    assert f"nvidia-cudnn-frontend 1.41.0 has no {name}; pip install" in (
        reason("1.41.0", (9, 20, 0), name) or ""
    )


def test_an_old_cudnn_is_a_rejection(monkeypatch):
    cudnn_graph.unavailable_reason.cache_clear()
    monkeypatch.setattr(optional, "installed", lambda name: True)
    monkeypatch.setattr(cudnn_graph.importlib.metadata, "version", lambda name: "1.23.0")
    monkeypatch.setattr(cudnn_graph, "get_cudnn_version", lambda: (9, 10, 2))
    assert cudnn_graph.unavailable_reason() == "cuDNN 9.10.2 < 9.13.1"
    cudnn_graph.unavailable_reason.cache_clear()


BIASED = {"bias": "post_scale_bias", "bias_shape": (1, 4, 256, 256)}
REJECTED: dict[str, tuple[dict[str, Any], str]] = {
    "cpu": ({"device_type": "cpu"}, "needs a CUDA device"),
    "switched off": ({"switches": Switches(fused=False)}, "NVTE_FUSED_ATTN=0"),
    "fp8 asked for": ({"switches": Switches(fused_kind="2")}, "asks for FP8"),
    "old GPU": (
        {"hardware": nvidia(7, 5)},
        "compute capability 7.5 has no cudnn attention; NVIDIA GPUs of compute capability 8.0 and higher have",
    ),
    "float32": ({"dtype": torch.float32}, "torch.float32; supported:"),
    "fp8": ({"fp8": "delayed"}, "FP8 attention"),
    "score_mod": ({"score_mod": lambda *_: None}, "score_mod"),
    "empty": ({"seqlen_q": 0}, "an empty tensor"),
    "head size": ({"head_dim_qk": 60}, "head_dim_qk=60 is not a multiple of 8"),
    "large backward": (
        {"head_dim_qk": 264, "head_dim_v": 264},
        "head size 264 > 256 in the backward",
    ),
    "large on sm80": (
        {"head_dim_qk": 192, "head_dim_v": 192, "hardware": nvidia(8, 0)},
        "head size 192 > 128",
    ),
    "unequal": (
        {"head_dim_qk": 256, "head_dim_v": 128},
        "supported above 128: equal sizes and 192/128",
    ),
    "arbitrary": ({"mask": "arbitrary"}, "arbitrary"),
    "mask tensors": (
        {"mask": "padding", "padding_tensors": True},
        "give cu_seqlens_q and cu_seqlens_kv",
    ),
    "longer queries": (
        {"mask": "causal_bottom_right", "seqlen_q": 512},
        "seqlen_q=512 > seqlen_kv=256",
    ),
    "bottom right bias": (
        {
            "mask": "causal_bottom_right",
            "seqlen_q": 128,
            "bias": "post_scale_bias",
            "bias_shape": (1, 4, 128, 256),
        },
        "a bottom-right diagonal with bias",
    ),
    "blind queries": ({"window": (8, 0), "seqlen_q": 512}, "leaves queries without a key"),
    "dropped window": ({"window": (8, 0), "dropout": 0.1}, "with ALiBi or dropout"),
    "broadcast bias": (
        {"bias": "post_scale_bias", "bias_shape": (2, 1, 1, 256)},
        "broadcast over queries or keys",
    ),
    "packed bias": ({"mask": "padding", **PACKED, **BIASED}, "a bias with packed sequences"),
    "own slopes": ({"bias": "alibi", "slopes_given": True}, "ALiBi slopes other than the usual"),
    "three heads": ({"bias": "alibi", "heads": 6}, "a power of two heads"),
    "unmasked alibi": ({"bias": "alibi", "mask": "no_mask"}, "ALiBi with attn_mask_type='no_mask'"),
    "max_logit": ({"max_logit": True, "softmax": "learnable"}, "return_max_logit with a sink"),
    "cross sink": ({"mask": "padding", "softmax": "learnable"}, "may have no keys"),
    "page": ({"page_size": 24, "needs_gradient": False}, "page_size=24; supported: powers of two"),
    "packed sink": (
        {"mask": "padding_causal", "softmax": "learnable", "same_lengths": True, **PACKED},
        "before cuDNN 9.26 its backward reads out of bounds",
    ),
    "deterministic": (
        {"deterministic": True, "seqlen_q": 32768, "seqlen_kv": 32768, "heads": 32},
        "MiB of workspace",
    ),
}


@pytest.mark.parametrize("name", REJECTED)
def test_rejections_name_the_value_and_the_limit(name, installed):
    options, sentence = REJECTED[name]
    assert sentence in (cudnn.BACKEND.rejection_reason(request(**options)) or "")


@pytest.mark.parametrize(
    ("version", "options", "sentence"),
    [
        ((9, 14, 0), {"mask": "no_mask", "window": (8, 8)}, "computes two-sided windows wrongly"),
        (
            (9, 27, 0),
            {
                "mask": "padding_causal",
                "softmax": "learnable",
                "same_lengths": True,
                "deterministic": True,
                **PACKED,
            },
            "deterministic gradients of a sink",
        ),
    ],
)
def test_unsupported_versions_are_rejected(version, options, sentence, installed, monkeypatch):
    monkeypatch.setattr(cudnn, "get_cudnn_version", lambda: version)
    assert sentence in (cudnn.BACKEND.rejection_reason(request(**options)) or "")


TAKEN: dict[str, dict[str, Any]] = {
    "plain": {},
    "window with bias": {"window": (8, 0), **BIASED},
    "inference of large heads": {"head_dim_qk": 576, "head_dim_v": 512, "needs_gradient": False},
    "mla": {"head_dim_qk": 192, "head_dim_v": 128},
    "packed sink in inference": {
        "mask": "padding_causal",
        "softmax": "learnable",
        "same_lengths": True,
        "needs_gradient": False,
        **PACKED,
    },
}


@pytest.mark.parametrize("name", TAKEN)
def test_supported_requests_have_no_rejection_reason(name, installed):
    assert cudnn.BACKEND.rejection_reason(request(**TAKEN[name])) is None


FP8_REJECTED: dict[str, tuple[dict[str, Any], str]] = {
    "switched off": ({"switches": Switches(fused=False)}, "NVTE_FUSED_ATTN=0"),
    "16 bit asked for": ({"switches": Switches(fused_kind="1")}, "asks for 16 bit"),
    "cpu": ({"device_type": "cpu"}, "needs a CUDA device"),
    "ampere": ({"hardware": nvidia(8, 0)}, "compute capability 8.0 has no cudnn fp8 attention"),
    "blackwell workstation": (
        {"hardware": nvidia(12, 0)},
        "compute capability 12.0 has no cudnn fp8 attention; NVIDIA GPUs of compute capability 9.0 to 11.0 have",
    ),
    "empty": ({"batch": 0}, "an empty tensor"),
    "bias": (BIASED, "core_attention_bias_type='post_scale_bias'"),
    "bottom right": (
        {"mask": "causal_bottom_right", "seqlen_q": 128},
        "a diagonal that ends bottom right",
    ),
    "dropout": ({"dropout": 0.1}, "attention_dropout"),
    "sink": ({"softmax": "learnable"}, "softmax_type='learnable'"),
    "head size": ({"head_dim_qk": 72}, "head size 72"),
    "packed": ({"mask": "padding", **PACKED}, "qkv_format='thd'"),
}


@pytest.mark.parametrize("name", FP8_REJECTED)
def test_unsupported_fp8_calls_are_rejected(name, installed):
    options, sentence = FP8_REJECTED[name]
    assert sentence in (
        FORWARD.named("cudnn").rejection_reason(request(**options, fp8="delayed")) or ""
    )


def test_the_fp8_backward_takes_one_head_size(installed):
    assert FORWARD.named("cudnn").rejection_reason(request(fp8="delayed")) is None
    assert "supported: 128" in (cudnn_fp8.unsupported_backward(request()) or "")
    assert cudnn_fp8.unsupported_backward(request(head_dim_qk=128, head_dim_v=128)) is None


def test_strides_in_every_format_become_bhsd_strides():
    x = torch.empty(2, 5, 3, 8)  # b s h d
    assert cudnn_plan.as_bhsd("bshd", x.stride(), 5) == x.transpose(1, 2).stride()
    assert cudnn_plan.as_bhsd("sbhd", x.transpose(0, 1).stride(), 5) == x.transpose(1, 2).stride()
    assert cudnn_plan.as_bhsd("thd", x.flatten(0, 1).stride(), 5) == x.transpose(1, 2).stride()


def test_packed_lengths_share_plans_with_at_most_an_eighth_more_tokens():
    for tokens in (1, 63, 64, 65, 1000, 1025, 16384, 100_001):
        bucket = cudnn_plan.bucket_tokens(tokens)
        assert tokens <= bucket <= max(64, tokens * 9 // 8 + 64)
    assert len({cudnn_plan.bucket_tokens(tokens) for tokens in range(8192, 16384)}) <= 9


def test_only_unaligned_tensors_are_copied():
    buffer = torch.zeros(4, 3, 24, dtype=torch.bfloat16)
    view = buffer[..., 8:16]
    assert cudnn.aligned(view) is view
    shifted = buffer.flatten()[1:65].view(8, 8)
    assert cudnn.aligned(shifted).data_ptr() != shifted.data_ptr()
    expanded = buffer[:1].expand(4, 3, 24)
    assert cudnn.aligned(expanded).is_contiguous()


def sample_inputs(
    r: AttentionCall, lengths_q=None, lengths_kv=None, packed_qkv: bool = False
) -> AttentionInputs:
    device = torch.device("cuda")

    def tensor(tensor_format: str, size: int, heads: int, depth: int) -> Tensor:
        shape = cudnn_plan.format_shape(tensor_format, r.batch, size, heads, depth, r.batch * size)
        return torch.randn(shape, device=device).to(r.dtype)

    q = tensor(r.q_format, r.seqlen_q, r.heads, r.head_dim_qk)
    k = tensor(r.kv_format, r.seqlen_kv, r.groups, r.head_dim_qk)
    v = tensor(r.kv_format, r.seqlen_kv, r.groups, r.head_dim_v)
    if packed_qkv:
        q, k, v = torch.cat((q, k, v), dim=-2).split((r.heads, r.groups, r.groups), dim=-2)
    lengths_q = (
        torch.tensor(lengths_q, dtype=torch.int32, device=device) if r.mask.padding else None
    )
    lengths_kv = (
        lengths_q
        if lengths_kv is None
        else torch.tensor(lengths_kv, dtype=torch.int32, device=device)
    )
    starts = [cumulative([size] * r.batch, device) for size in (r.seqlen_q, r.seqlen_kv)]
    return AttentionInputs(
        q,
        k,
        v,
        lengths_q,
        lengths_kv,
        starts[0] if r.q_format == "thd" else None,
        starts[1] if r.kv_format == "thd" else None,
        bias=None if r.bias_shape is None else torch.randn(r.bias_shape, device=device).to(r.dtype),
        sink=None if r.softmax == "vanilla" else torch.randn(r.heads, device=device),
    )


def to_float32(inputs: AttentionInputs) -> AttentionInputs:
    q, k, v = (x.float() for x in inputs[:3])
    return inputs._replace(q=q, k=k, v=v, bias=None if inputs.bias is None else inputs.bias.float())


def relative(a: Tensor, b: Tensor) -> float:
    error = (a.float() - b.float()).square().mean().sqrt()
    return float(error / b.float().square().mean().sqrt().clamp(min=1e-6))


def real_rows(r: AttentionCall, inputs: AttentionInputs) -> Tensor:
    """Mask [b, h, s_q], or [h, t] for thd with sequences of equal extent, that marks the real tokens."""
    if inputs.lengths_q is None:
        return torch.ones(1, 1, 1, dtype=torch.bool, device="cuda")
    real = torch.arange(r.seqlen_q, device="cuda") < inputs.lengths_q[:, None]
    return real.flatten()[None] if r.q_format == "thd" else real[:, None]


def assert_exact(r: AttentionCall, inputs: AttentionInputs) -> None:
    """Compare output, statistics and gradients within one or two roundings to 16 bits, 2^-9 each."""
    assert cudnn.BACKEND.rejection_reason(r) is None
    grad = torch.randn(*inputs.q.shape[:-1], r.head_dim_v, device="cuda").to(r.dtype)
    wide, exact_request = to_float32(inputs), replace(r, dtype=torch.float32)
    exact = reference.forward(exact_request, wide)
    actual = cudnn.forward(r, inputs)
    assert relative(actual.output, exact.output) < 0.004
    if r.max_logit:
        torch.testing.assert_close(actual.max_logit, exact.max_logit, rtol=1e-5, atol=1e-5)
    if not r.needs_gradient:
        return
    visible = exact.lse.isfinite() & real_rows(r, inputs)
    torch.testing.assert_close(actual.lse[visible], exact.lse[visible], rtol=1e-3, atol=1e-3)
    gradients = cudnn.backward(r, inputs, actual, grad)
    expected = reference.backward(exact_request, wide, exact, grad.float())
    for name, a, b in zip(gradients._fields, gradients, expected, strict=True):
        if a is not None:
            assert relative(a, b) < 0.006, name
    if r.deterministic:
        repeated = cudnn.backward(r, inputs, actual, grad)
        assert all(a is None or torch.equal(a, b) for a, b in zip(gradients, repeated, strict=True))


EXACT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sbhd": ({"q_format": "sbhd", "kv_format": "sbhd"}, {}),
    "interleaved views": ({}, {"packed_qkv": True}),
    "packed views": (
        {"mask": "padding_causal", "same_lengths": True, "padded_between": True, **PACKED},
        {"lengths_q": [200, 57], "packed_qkv": True},
    ),
    "gaps between packed sequences": (
        {"mask": "padding", "padded_between": True, "seqlen_q": 128, **PACKED},
        {"lengths_q": [100, 57], "lengths_kv": [200, 31]},
    ),
    "bottom right": (
        {"mask": "padding_causal_bottom_right", "seqlen_q": 128},
        {"lengths_q": [100, 20], "lengths_kv": [200, 131]},
    ),
    "more queries than keys": (
        {"mask": "padding_causal_bottom_right", "seqlen_q": 128},
        {"lengths_q": [100, 60], "lengths_kv": [200, 31]},
    ),
    "no keys": (
        {"mask": "padding", "seqlen_q": 128},
        {"lengths_q": [100, 57], "lengths_kv": [200, 0]},
    ),
    "no keys, packed": (
        {"mask": "padding", "padded_between": True, "seqlen_q": 128, **PACKED},
        {"lengths_q": [100, 57], "lengths_kv": [200, 0]},
    ),
    "no queries": (
        {"mask": "padding", "seqlen_q": 128},
        {"lengths_q": [100, 0], "lengths_kv": [200, 31]},
    ),
    "both sides": ({"mask": "no_mask", "window": (40, 20)}, {}),
    "window with bias": ({"window": (40, 0), **BIASED, "bias_gradient": True}, {}),
    "bias of batches": (
        {
            "mask": "no_mask",
            "bias": "pre_scale_bias",
            "bias_shape": (2, 1, 256, 256),
            "bias_gradient": True,
        },
        {},
    ),
    "alibi with padding": (
        {"mask": "padding_causal", "bias": "alibi", "same_lengths": True},
        {"lengths_q": [200, 57]},
    ),
    "sink": ({"softmax": "learnable", "window": (40, 0)}, {}),
    "bias without gradient": ({"mask": "no_mask", "softmax": "off-by-one", **BIASED}, {}),
    "deterministic sink": ({"softmax": "learnable", "deterministic": True}, {}),
    "max_logit with padding": (
        {"mask": "padding_causal", "max_logit": True},
        {"lengths_q": [200, 57]},
    ),
    "deterministic": ({"deterministic": True, **BIASED, "bias_gradient": True}, {}),
    "large heads": ({"head_dim_qk": 256, "head_dim_v": 256}, {}),
    "192/128": ({"head_dim_qk": 192, "head_dim_v": 128}, {}),
    "odd sizes": ({"seqlen_q": 77, "seqlen_kv": 77, "head_dim_qk": 40, "head_dim_v": 40}, {}),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", EXACT)
def test_every_option_is_exact(name):
    pytest.importorskip("cudnn")
    options, tensors = EXACT[name]
    r = request(**options)
    inputs = sample_inputs(r, **tensors)
    if r.bias == "alibi":
        inputs = inputs._replace(slopes=2.0 ** (-2.0 * torch.arange(1, 5, device="cuda")))
    assert_exact(r, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("q_format", ["bshd", "thd"])
def test_pages_are_read_in_place(page_size, q_format):
    pytest.importorskip("cudnn")
    r = request(
        "padding_causal_bottom_right",
        seqlen_q=16,
        q_format=q_format,
        page_size=page_size,
        cached=True,
        needs_gradient=False,
    )
    columns = r.seqlen_kv // page_size
    pages = torch.randperm(r.batch * columns, device="cuda").int().view(r.batch, columns)
    cache = [
        torch.randn(r.batch * columns, page_size, r.groups, r.head_dim_v, device="cuda").to(r.dtype)
        for _ in "kv"
    ]
    inputs = sample_inputs(r, lengths_q=[16, 3], lengths_kv=[200, 131])
    k, v = (x[pages.long()].flatten(1, 2) for x in cache)
    dense = to_float32(inputs._replace(k=k, v=v))
    exact = reference.forward(replace(r, dtype=torch.float32, page_size=0), dense)
    actual = cudnn.forward(r, inputs._replace(k=cache[0], v=cache[1], page_table=pages))
    rows = slice(0, 19) if q_format == "thd" else slice(None)
    assert relative(actual.output[rows], exact.output[rows]) < 0.004


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["causal", "no_mask"])
def test_both_passes_drop_the_same_weights(mask):
    """After dropout o is linear in v, so <do, o> = <v, dv>; also <q, dq> = <k, dk>."""
    pytest.importorskip("cudnn")
    r = request(mask, dropout=0.3)
    inputs = sample_inputs(r)
    grad = torch.randn_like(inputs.q)
    torch.manual_seed(3)
    result = cudnn.forward(r, inputs)
    gradients = cudnn.backward(r, inputs, result, grad)
    torch.manual_seed(3)
    assert torch.equal(cudnn.forward(r, inputs).output, result.output)
    assert not torch.equal(cudnn.forward(r, inputs).output, result.output)

    def inner(a: Tensor, b: Tensor) -> float:
        return float((a.double() * b.double()).sum())

    assert inner(grad, result.output) == pytest.approx(inner(inputs.v, gradients.v), abs=2.0)
    assert inner(inputs.q, gradients.q) == pytest.approx(inner(inputs.k, gradients.k), abs=2.0)


@pytest.mark.gpu
def test_a_captured_graph_replays_on_new_values():
    pytest.importorskip("cudnn")
    r = request("padding_causal", same_lengths=True, **PACKED)
    inputs = sample_inputs(r, lengths_q=[256, 256])
    grad = torch.randn_like(inputs.q)
    cudnn.backward(r, inputs, cudnn.forward(r, inputs), grad)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = cudnn.forward(r, inputs)
        gradients = cudnn.backward(r, inputs, actual, grad)
    inputs.q.normal_()
    graph.replay()
    torch.cuda.synchronize()
    expected = cudnn.forward(r, inputs)
    assert torch.equal(actual.output, expected.output)
    assert relative(gradients.v, cudnn.backward(r, inputs, expected, grad).v) < 1e-3
