"""PyTorch's own attention operators: rejected calls, arguments and results, as far as a CPU can check them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from tests.attention.attention_oracle import cumulative, padding_mask
from transformer_engine.common.hardware import nvidia
from transformer_engine.pytorch.primitives.attention import reference
from transformer_engine.pytorch.primitives.attention.backends import flex, torch_cudnn, torch_flash
from transformer_engine.pytorch.primitives.attention.call import (
    AttentionCall,
    AttentionInputs,
    Switches,
)
from transformer_engine.pytorch.primitives.attention.mask import resolve


def attention_request(mask="causal", window=None, **changes):
    """2 sequences with 16 queries and keys, 4 heads of size 16 in 2 groups."""
    fields = {
        "dtype": torch.float32,
        "device_type": "cpu",
        "batch": 2,
        "heads": 4,
        "groups": 2,
        "seqlen_q": 16,
        "seqlen_kv": 16,
        "head_dim_qk": 16,
        "head_dim_v": 16,
        "q_format": "bshd",
        "kv_format": "bshd",
        "mask": resolve(mask, window, None),
        "scale": 0.25,
        "switches": Switches(),
    }
    return AttentionCall(**{**fields, **changes})


def hopper_request(**changes):
    return attention_request(
        **{"device_type": "cuda", "hardware": nvidia(9, 0), "dtype": torch.bfloat16, **changes}
    )


def sample_inputs(request, device="cpu", **changes):
    lead = {"bshd": (2, 16), "sbhd": (16, 2), "thd": (32,)}[request.q_format]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(*lead, heads, 16, generator=generator).to(device, request.dtype)
        for heads in (request.heads, request.groups, request.groups)
    )
    return AttentionInputs(q, k, v, **changes)


LENGTHS = torch.tensor([16, 9], dtype=torch.int32)
FLEX = {
    "causal": (attention_request(), {}),
    "window, sbhd": (attention_request("no_mask", (3, 2), q_format="sbhd", kv_format="sbhd"), {}),
    "left window": (attention_request("causal_bottom_right", (3, 0)), {}),
    "arbitrary": (attention_request("arbitrary"), {"masked": torch.rand(2, 1, 16, 16) > 0.8}),
    "padding tensors": (
        attention_request("padding", padding_tensors=True),
        {
            "masked_q": padding_mask([16, 9], 16, "cpu"),
            "masked_kv": padding_mask([16, 9], 16, "cpu").flip(-1),
            "lengths_q": LENGTHS,
            "lengths_kv": LENGTHS,
        },
    ),
    "packed": (
        attention_request("padding_causal", q_format="thd", kv_format="thd"),
        {
            "lengths_q": LENGTHS,
            "lengths_kv": LENGTHS,
            "starts_q": cumulative([16, 9], "cpu"),
            "starts_kv": cumulative([16, 9], "cpu"),
        },
    ),
    "bias": (attention_request(bias="pre_scale_bias"), {"bias": torch.randn(1, 4, 16, 16)}),
    "alibi": (attention_request(bias="alibi"), {"slopes": torch.rand(2, 4)}),
    "alibi with lengths": (
        attention_request("padding_causal_bottom_right", bias="alibi"),
        {"slopes": torch.rand(4), "lengths_q": LENGTHS, "lengths_kv": LENGTHS},
    ),
    "score_mod": (
        attention_request(score_mod=lambda score, b, h, i, j: score * (i + 1) / (j + 1)),
        {},
    ),
}


@pytest.mark.parametrize("name", FLEX)
def test_flex_describes_a_request_as_the_reference_does(name, monkeypatch):
    monkeypatch.setattr(flex, "_compiled", lambda: flex_attention)
    request, extra = FLEX[name]
    inputs = sample_inputs(request, **extra)
    got, expected = (backend.run(request, inputs).output for backend in (flex, reference))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("q_format", ["bshd", "sbhd", "thd"])
@pytest.mark.parametrize("window", [None, (4, 0)])
def test_torchs_flash_operator_accepts_our_arguments(q_format, window):
    """On the meta device: names, order and shapes of arguments and results."""
    mask = "padding_causal" if q_format == "thd" else "causal"
    request = hopper_request(
        mask=mask, window=window, q_format=q_format, kv_format=q_format, same_lengths=True
    )
    assert torch_flash.BACKEND.rejection_reason(request) is None
    starts = cumulative([16, 16], "meta") if q_format == "thd" else None
    inputs = sample_inputs(request, "meta", starts_q=starts, starts_kv=starts)
    result = torch_flash.forward(request, inputs)
    assert result.output.shape == inputs.q.shape and result.output.is_contiguous()
    gradients = torch_flash.backward(request, inputs, result, torch.empty_like(inputs.q))
    assert [x.shape for x in gradients[:3]] == [x.shape for x in inputs[:3]]


@pytest.mark.parametrize("q_format", ["bshd", "sbhd"])
def test_torchs_cudnn_operator_accepts_our_arguments(q_format):
    request = hopper_request(q_format=q_format, kv_format=q_format)
    assert torch_cudnn.BACKEND.rejection_reason(request) is None
    inputs = sample_inputs(request, "meta")
    result = torch_cudnn.forward(request, inputs)
    assert result.output.shape == inputs.q.shape and result.output.is_contiguous()
    assert result.lse is not None and result.lse.shape == (2, 4, 16)
    gradients = torch_cudnn.backward(request, inputs, result, torch.empty_like(inputs.q))
    assert [x.shape for x in gradients[:3]] == [x.shape for x in inputs[:3]]


@pytest.mark.parametrize(
    "backend, changes, reason",
    [
        (flex, {}, None),
        (
            flex,
            {"switches": Switches(flash=False, fused=False)},
            "NVTE_FLASH_ATTN=0 and NVTE_FUSED_ATTN=0",
        ),
        (flex, {"device_type": "cpu"}, "the tensors are on cpu"),
        (flex, {"hardware": nvidia(7, 5)}, "compute capability 7.5 has no t"),
        (flex, {"fp8": "current"}, "FP8 attention"),
        (flex, {"dtype": torch.float64}, "float64"),
        (flex, {"batch": 0}, "an empty tensor"),
        (flex, {"dropout": 0.5}, "attention_dropout"),
        (flex, {"softmax": "learnable"}, "softmax_type='learnable'"),
        (flex, {"max_logit": True}, "return_max_logit"),
        (flex, {"head_dim_v": 40}, "heads of size 40"),
        (flex, {"page_size": 16}, "a paged cache"),
        (flex, {"deterministic": True}, "deterministic gradients"),
        (torch_flash, {"switches": Switches(flash=False)}, "NVTE_FLASH_ATTN=0"),
        (torch_flash, {"switches": Switches(flash2=False)}, "NVTE_FLASH_ATTN_V2=0"),
        (torch_flash, {"hardware": nvidia(7, 5)}, "compute capability 7.5 has no t"),
        (torch_flash, {"head_dim_v": 32}, "heads of two sizes"),
        (torch_flash, {"page_size": 16}, "a paged cache"),
        (
            torch_flash,
            {"mask": resolve("padding", window_size=None, bottom_right_diagonal=None)},
            "lengths of padded sequences",
        ),
        (
            torch_flash,
            {"q_format": "thd", "kv_format": "thd", "padded_between": True},
            "tokens between packed sequences",
        ),
        (torch_flash, {"deterministic": True}, "torch.use_deterministic_algorithms(True)"),
        (torch_cudnn, {"switches": Switches(fused=False)}, "NVTE_FUSED_ATTN=0"),
        (
            torch_cudnn,
            {"switches": Switches(fused_kind="2")},
            "NVTE_FUSED_ATTN_BACKEND=2 asks for FP8",
        ),
        (
            torch_cudnn,
            {"hardware": nvidia(8, 0)},
            "compute capability 8.0 has no torch cudnn attention",
        ),
        (
            torch_cudnn,
            {"mask": resolve("padding", window_size=None, bottom_right_diagonal=None)},
            "lengths of padded sequences",
        ),
        (torch_cudnn, {"mask": resolve("causal", (3, 0), None)}, "window_size"),
        (
            torch_cudnn,
            {
                "mask": resolve(
                    "causal_bottom_right", window_size=None, bottom_right_diagonal=None
                ),
                "seqlen_q": 8,
            },
            "ends bottom right",
        ),
        (torch_cudnn, {"head_dim_v": 32}, "heads of two sizes"),
        (torch_cudnn, {"deterministic": True}, "deterministic gradients"),
        (torch_cudnn, {"head_dim_qk": 256, "head_dim_v": 256}, "multiples of 8 up to 128"),
    ],
)
def test_rejections_name_the_value_and_the_limit(backend, changes, reason):
    result = backend.BACKEND.rejection_reason(replace(hopper_request(), **changes))
    assert (result is None) if reason is None else reason in (result or "")
