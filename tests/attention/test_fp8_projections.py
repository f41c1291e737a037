"""fp8_mha: the projection before an FP8 attention quantizes q, k and v if no operation lies between them."""

from __future__ import annotations

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch import MultiheadAttention
from transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding
from transformer_engine.pytorch.functions.linear_spec import UNQUANTIZED
from transformer_engine.pytorch.functions.split_heads import split_heads
from transformer_engine.pytorch.tensor import Float8Tensor

HIDDEN, HEADS, GROUPS, TOKENS, BATCH = 128, 4, 2, 32, 2
SIZE = HIDDEN // HEADS
QKV = 2  # quantizer slots for q, k and v in an attention


@pytest.fixture(autouse=True)
def _emulating(monkeypatch):
    monkeypatch.setenv("TE_EMULATE", "1")
    for name in ("NVTE_DPA_FP8_RECIPE", "NVTE_FP8_AUTO"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NVTE_FP8_DPA_BWD", "1")


def make_attention(device, **options) -> MultiheadAttention:
    kwargs = {
        "num_gqa_groups": GROUPS,
        "fuse_qkv_params": True,
        "attention_dropout": 0.0,
        **options,
    }
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(3)
    return MultiheadAttention(HIDDEN, HEADS, params_dtype=dtype, device=device, **kwargs)


def inputs(device) -> torch.Tensor:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.randn(TOKENS, BATCH, HIDDEN, generator=torch.Generator().manual_seed(4))
    return x.to(device, dtype).requires_grad_()


def record_attention_inputs(module: MultiheadAttention) -> list[tuple[torch.Tensor, ...]]:
    records: list[tuple[torch.Tensor, ...]] = []
    module.core_attention.register_forward_pre_hook(
        lambda _, arguments: records.append(arguments[:3])
    )
    return records


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("input_layernorm", [True, False])
def test_attention_receives_the_projections_codes(input_layernorm, interleaved, device):
    module, x = (
        make_attention(device, qkv_weight_interleaved=interleaved, input_layernorm=input_layernorm),
        inputs(device),
    )
    projection = module.layernorm_qkv if input_layernorm else module.qkv
    records = record_attention_inputs(module)
    with te.autocast(recipe=Float8CurrentScaling(fp8_mha=True)), torch.no_grad():
        module(x)
        mixed = projection(x)
    scale = 448.0 / mixed.float().abs().max()
    codes = (mixed.float() * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
    expected = split_heads(codes, HEADS, GROUPS, SIZE, interleaved)
    for actual, part in zip(records[0], expected, strict=True):
        assert isinstance(actual, Float8Tensor) and actual._transpose is None
        torch.testing.assert_close(actual._scale_inv, 1.0 / scale.reshape(1))
        if device.type == "cpu":
            assert torch.equal(actual._data, part)
        else:  # a product that writes codes rounds once, one that writes bfloat16 before them twice
            near = (
                actual._data.view(torch.float8_e4m3fn).float()
                - part.view(torch.float8_e4m3fn).float()
            ).abs()
            assert (
                float((near > 0.126 * part.view(torch.float8_e4m3fn).float().abs()).float().mean())
                < 1e-3
            )


@pytest.mark.parametrize("backward", ["0", "1"])
def test_evaluation_under_delayed_scaling_uses_the_training_scales(backward, device, monkeypatch):
    monkeypatch.setenv("NVTE_FP8_DPA_BWD", backward)
    module, x = make_attention(device), inputs(device)
    with torch.no_grad():
        module.qkv.weight.mul_(1e-3)
    recipe = DelayedScaling(fp8_mha=True, amax_history_len=4)
    for _ in range(5):  # each scale settles one step after the previous one
        with te.autocast(recipe=recipe):
            out = module(x)
        out.float().sum().backward()
    assert module.core_attention.fp8_meta["scaling_fwd"].amax_history[:, QKV].count_nonzero() > 0
    with torch.no_grad():
        exact = module.eval()(x).float()
        with te.autocast(recipe=recipe):
            error = module(x).float() - exact
    assert float(error.square().mean() / exact.square().mean()) < 0.1**2


def test_gradients_equal_an_attention_that_quantizes_its_inputs(device):
    results = {}
    for field in ("fp8_dpa", "fp8_mha"):
        module, x = make_attention(device), inputs(device)
        for _ in range(3):
            module.zero_grad()
            with te.autocast(recipe=Float8CurrentScaling(**{field: True})):
                out = module(x)
            grad = torch.autograd.grad(
                out.float().square().sum(), [x, module.qkv.weight, module.proj.weight]
            )
        results[field] = (out, *grad)
    for ours, reference in zip(results["fp8_mha"], results["fp8_dpa"], strict=True):
        difference = (
            ours.detach().float() - reference.detach().float()
        ).square().mean() / reference.detach().float().square().mean()
        assert 0.0 < float(difference) < 0.1**2


@pytest.mark.parametrize("between", ["rope", "norm", "cross", "fp8_dpa", "delayed"])
def test_options_that_need_high_precision_values_receive_them(between, device):
    options, call = {}, {}
    if between == "rope":
        call["rotary_pos_emb"] = RotaryPositionEmbedding(SIZE)(max_seq_len=TOKENS).to(device)
    elif between == "norm":
        options["qk_norm_type"] = "RMSNorm"
    elif between == "cross":
        options["attention_type"] = "cross"
        call["encoder_output"] = inputs(device).detach()
        options["attn_mask_type"] = "no_mask"
    module, recipe = make_attention(device, **options), Float8CurrentScaling(fp8_mha=True)
    if between == "fp8_dpa":
        recipe = Float8CurrentScaling(fp8_dpa=True)
    elif between == "delayed":
        recipe = DelayedScaling(fp8_mha=True)
    records = record_attention_inputs(module)
    with te.autocast(recipe=recipe):
        module(inputs(device), **call)
    assert not any(isinstance(x, Float8Tensor) for x in records[0])


def test_a_backward_in_16_bits_gets_values_and_an_evaluation_codes(device, monkeypatch):
    monkeypatch.delenv("NVTE_FP8_DPA_BWD")
    module = make_attention(device)
    records = record_attention_inputs(module)
    for training in (True, False):
        with te.autocast(recipe=Float8CurrentScaling(fp8_mha=True)):
            module.train(training)(inputs(device))
    assert [isinstance(q, Float8Tensor) for q, _, _ in records] == [False, True]


def test_a_projection_in_high_precision_passes_values(device, monkeypatch):
    module = make_attention(device)
    records = record_attention_inputs(module)
    monkeypatch.setattr(
        type(module.qkv),
        "quantizable_products",
        lambda self, *_: (UNQUANTIZED,) * self.num_products,
    )
    with te.autocast(recipe=Float8CurrentScaling(fp8_mha=True)):
        module(inputs(device))
    assert not any(isinstance(x, Float8Tensor) for x in records[0])


def test_recomputation_repeats_the_codes(device):
    recipe, x = Float8CurrentScaling(fp8_mha=True), inputs(device)
    plain, repeated = make_attention(device), make_attention(device)
    for _ in range(2):
        with te.autocast(recipe=recipe):
            out = plain(x)
            recomputed = te.checkpoint(repeated, x, use_reentrant=False)
        assert torch.equal(out, recomputed)
        (grad,), (same,) = (torch.autograd.grad(y.float().sum(), x) for y in (out, recomputed))
        assert torch.equal(grad, same)


@pytest.mark.slow
def test_a_compiled_module_passes_values(device):
    """Compiled code emulates FP8; on a GPU, eager code computes in FP8."""
    module, x = make_attention(device), inputs(device)
    torch._dynamo.reset()
    function = torch.compile(module, fullgraph=True, backend="aot_eager")
    with te.autocast(recipe=Float8CurrentScaling(fp8_mha=True)):
        out = function(x).detach().float()
    with te.autocast(recipe=Float8CurrentScaling(fp8_dpa=True)):
        plain = make_attention(device)(x).detach().float()
    difference = float((out - plain).square().mean() / plain.square().mean())
    assert difference < (1e-6 if device.type == "cpu" else 0.1**2)
