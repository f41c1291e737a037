"""FP8 attention: accuracy against float32, its state slots, checkpoints, and the modules around it."""

from __future__ import annotations

import io

import pytest
import torch
from torch import Tensor

import transformer_engine.pytorch as te
from tests.attention.attention_oracle import cumulative
from transformer_engine.common.dispatch import use_backend
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from transformer_engine.pytorch import DotProductAttention, MultiheadAttention, TransformerLayer
from transformer_engine.pytorch.tensor import Float8Tensor

HEADS, GROUPS, SIZE, BATCH, TOKENS = 4, 2, 32, 2, 64
# Half the original's tolerance between its FP8 attention and its 16-bit attention.
RMSE = 0.055
RECIPES = {"delayed": DelayedScaling, "current": Float8CurrentScaling, "mxfp8": MXFP8BlockScaling}
FORWARD_SLOTS, BACKWARD_SLOTS = [2, 3, 8], [0, 3, 5]


@pytest.fixture(autouse=True)
def _emulating(monkeypatch):
    monkeypatch.setenv("TE_EMULATE", "1")
    for name in ("NVTE_FP8_DPA_BWD", "NVTE_DPA_FP8_RECIPE"):
        monkeypatch.delenv(name, raising=False)


def attention(**options) -> DotProductAttention:
    options = {"qkv_format": "bshd", "num_gqa_groups": GROUPS, **options}
    return DotProductAttention(HEADS, SIZE, **options)


def tensors(device: torch.device, size: int = SIZE, tokens: int = TOKENS) -> list[Tensor]:
    """q, k, v in bshd"""
    shapes = [(BATCH, tokens, heads, size) for heads in (HEADS, GROUPS, GROUPS)]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes]


def steps(
    module, recipe: Recipe, qkv: list[Tensor], grad: Tensor | None = None, count: int = 3, **options
):
    """Output and gradients from the last of several steps, after delayed scales have settled."""
    for _ in range(count):
        with te.autocast(recipe=recipe):
            out = module(*qkv, **options)
        grads = torch.autograd.grad(out, qkv, torch.ones_like(out) if grad is None else grad)
    return out, grads


def rmse(a: Tensor, b: Tensor) -> float:
    return float((a.detach().float() - b.detach().float()).square().mean().sqrt())


def relative(a: Tensor, b: Tensor) -> float:
    return rmse(a, b) / float(b.detach().float().square().mean().sqrt())


@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.parametrize("mask", ["no_mask", "causal"])
def test_output_is_within_half_of_the_originals_tolerance(kind, mask, device):
    module, qkv = attention(attn_mask_type=mask), tensors(device)
    out, _ = steps(module, RECIPES[kind](fp8_dpa=True), qkv)
    with use_backend(attention="reference"):
        exact = module(*(x.float() for x in qkv))
    assert 0.0 < rmse(out, exact) < RMSE


@pytest.mark.parametrize("kind", RECIPES)
def test_high_precision_gradients_are_nearer_than_fp8_ones_and_both_are_near(
    kind, device, monkeypatch
):
    module, qkv = attention(), tensors(device)
    grad = torch.randn(BATCH, TOKENS, HEADS * SIZE, device=device).to(qkv[0].dtype)
    exact = torch.autograd.grad(module(*qkv), qkv, grad)
    results = {}
    for choice in ("0", "1"):
        monkeypatch.setenv("NVTE_FP8_DPA_BWD", choice)
        results[choice] = steps(module, RECIPES[kind](fp8_dpa=True), qkv, grad)[1]
    for high, low, reference in zip(results["0"], results["1"], exact, strict=True):
        assert relative(high, reference) < relative(low, reference) < 0.15


@pytest.mark.parametrize("kind", RECIPES)
def test_high_precision_gradients_of_large_logits_are_those_of_the_quantized_tensors(kind, device):
    """A probability exp(s - lse) with s from other values than lse would be wrong by a factor of e^4 here."""
    torch.manual_seed(0)
    qkv = [(4.0 * x).detach().requires_grad_() for x in tensors(device)]
    module = attention(attn_mask_type="causal")
    grad = torch.randn(BATCH, TOKENS, HEADS * SIZE, device=device).to(qkv[0].dtype)
    _, grads = steps(module, RECIPES[kind](fp8_dpa=True), qkv, grad, count=1)
    rounded = [rounded_as(kind, x.detach()).double().requires_grad_() for x in qkv]
    with use_backend(attention="reference"):
        exact = torch.autograd.grad(module(*rounded), rounded, grad.double())
    assert all(
        relative(found, expected) < 0.1 for found, expected in zip(grads, exact, strict=True)
    )


def rounded_as(kind: str, x: Tensor) -> Tensor:
    """x in the codes of the recipe's first step."""
    if kind == "delayed":  # the scale is 1
        return x.to(torch.float8_e4m3fn).to(x.dtype)
    if kind == "mxfp8":
        matrix = x.flatten(0, 1).flatten(1)
        quantizer = te.MXFP8Quantizer(te.DType.kFloat8E4M3, columnwise=False)
        return quantizer(matrix).dequantize().view(x.shape)
    quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, x.device, columnwise=False)
    return quantizer(x).dequantize()


def test_statistics_are_recorded_in_the_originals_slots(device, monkeypatch):
    module, qkv = attention(), tensors(device)
    monkeypatch.setenv("NVTE_FP8_DPA_BWD", "1")
    literal = {
        "attention": "reference",
        "fp8_attention": "emulated",
        "fp8_attention_backward": "emulated",
    }
    with use_backend(**literal):
        steps(module, DelayedScaling(fp8_dpa=True, amax_history_len=4), qkv)
    for key, slots in (("scaling_fwd", FORWARD_SLOTS), ("scaling_bwd", BACKWARD_SLOTS)):
        used = module.fp8_meta[key].amax_history.amax(0).nonzero().flatten().tolist()
        assert used == slots
    largest = max(float(x.detach().abs().max()) for x in qkv)
    assert float(module.fp8_meta["scaling_fwd"].scale[2]) == pytest.approx(448 / largest)


def test_a_high_precision_backward_does_not_write_gradient_slots(device):
    module = attention()
    steps(module, DelayedScaling(fp8_dpa=True), tensors(device))
    assert module.fp8_meta["scaling_bwd"].amax_history.count_nonzero() == 0
    assert torch.equal(module.fp8_meta["scaling_bwd"].scale, torch.ones(6, device=device))


def test_a_checkpoint_carries_the_delayed_state(device):
    module, qkv, recipe = (
        attention(),
        tensors(device),
        DelayedScaling(fp8_dpa=True, amax_history_len=4),
    )
    steps(module, recipe, qkv)
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    other = attention()
    other.load_state_dict(torch.load(buffer))
    for key in ("scaling_fwd", "scaling_bwd"):
        assert torch.equal(other.fp8_meta[key].scale, module.fp8_meta[key].scale)
        assert torch.equal(other.fp8_meta[key].amax_history, module.fp8_meta[key].amax_history)
    (first, _), (second, _) = (steps(m, recipe, qkv, count=1) for m in (module, other))
    assert torch.equal(first, second)


@pytest.mark.parametrize("kind", ["delayed", "current"])
def test_fp8_output_contains_the_high_precision_outputs_codes(kind, device):
    recipe, qkv = RECIPES[kind](fp8_dpa=True), tensors(device)
    plain, plain_grads = steps(attention(), recipe, qkv, count=1)
    codes, grads = steps(attention(), recipe, qkv, count=1, fp8_output=True)
    assert isinstance(codes, Float8Tensor) and codes.shape == plain.shape
    torch.testing.assert_close(codes.dequantize(), plain, rtol=0, atol=0)
    assert all(torch.equal(a, b) for a, b in zip(grads, plain_grads, strict=True))


def test_fp8_output_needs_fp8_attention(device):
    with pytest.raises(ValueError, match="fp8_output=True needs an FP8 attention"):
        attention()(*tensors(device), fp8_output=True)


def test_quantized_queries_keys_and_values_are_used_directly(device):
    module, qkv = attention(), tensors(device)
    quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device, columnwise=False)
    codes = [quantizer(x.detach()) for x in qkv]
    with te.autocast(recipe=Float8CurrentScaling(fp8_dpa=True)), torch.no_grad():
        from_codes = module(*codes)
        from_values = module(*(x.dequantize() for x in codes))
    assert relative(from_codes, from_values) < 0.01


def test_packed_and_padded_sequences_agree(device):
    q, k, v = tensors(device)
    lengths = [TOKENS, 40]
    real = torch.arange(TOKENS, device=device) < torch.tensor(lengths, device=device)[:, None]
    cu_seqlens = cumulative(lengths, device)
    recipe = Float8CurrentScaling(fp8_dpa=True)
    masked = [torch.where(real[..., None, None], x, 0.0) for x in (q, k, v)]
    with te.autocast(recipe=recipe):
        padded = attention(attn_mask_type="padding_causal")(*masked, cu_seqlens_q=cu_seqlens)
        packed = attention(attn_mask_type="padding_causal", qkv_format="thd")(
            *(x[real] for x in masked),
            cu_seqlens_q=cu_seqlens,
            max_seqlen_q=TOKENS,
            max_seqlen_kv=TOKENS,
        )
    assert relative(packed, padded[real]) < 0.05


def test_bias_sink_and_dropout_work_in_fp8(device):
    module = attention(softmax_type="learnable", attention_dropout=0.25, attn_mask_type="no_mask")
    qkv = tensors(device)
    bias = torch.randn(
        1, HEADS, TOKENS, TOKENS, device=device, dtype=qkv[0].dtype, requires_grad=True
    )
    options = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias}
    leaves = [*qkv, bias, module.softmax_offset]
    torch.manual_seed(1)
    exact = module(*qkv, **options)
    expected = torch.autograd.grad(exact.float().square().sum(), leaves)
    torch.manual_seed(1)
    with te.autocast(recipe=Float8CurrentScaling(fp8_dpa=True)):
        out = module(*qkv, **options)
    assert relative(out, exact) < 0.1
    for actual, reference in zip(
        torch.autograd.grad(out.float().square().sum(), leaves), expected, strict=True
    ):
        assert relative(actual, reference) < 0.2


@pytest.mark.parametrize("kind", ["delayed", "current"])
def test_recomputing_the_attention_repeats_its_gradients(kind, device):
    recipe, qkv = RECIPES[kind](fp8_dpa=True), tensors(device)
    plain, repeated = attention(), attention()
    for _ in range(3):
        out, grads = steps(plain, recipe, qkv, count=1)
        recomputed, result = steps(repeated, recipe, qkv, count=1, checkpoint_core_attention=True)
        assert torch.equal(out, recomputed)
        assert all(torch.equal(a, b) for a, b in zip(grads, result, strict=True))


def test_te_checkpoint_repeats_the_gradients(device):
    recipe, qkv = DelayedScaling(fp8_dpa=True), tensors(device)
    plain, repeated = attention(), attention()
    for _ in range(3):
        out, grads = steps(plain, recipe, qkv, count=1)
        with te.autocast(recipe=recipe):
            recomputed = te.checkpoint(repeated, *qkv, use_reentrant=False)
        assert torch.equal(out, recomputed)
        result = torch.autograd.grad(recomputed, qkv, torch.ones_like(recomputed))
        assert all(torch.equal(a, b) for a, b in zip(grads, result, strict=True))


def test_a_compiled_attention_equals_the_eager_one(device, monkeypatch):
    if device.type == "cuda":
        pytest.skip("compiled, it emulates; eager, cuDNN computes in FP8")
    monkeypatch.setenv("NVTE_FP8_DPA_BWD", "1")
    qkv, recipe = tensors(device), DelayedScaling(fp8_dpa=True)
    eager, traced = attention(), attention()
    torch._dynamo.reset()
    compiled = torch.compile(traced, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        out, grads = steps(eager, recipe, qkv, count=1)
        same, result = steps(compiled, recipe, qkv, count=1)
        assert torch.equal(out, same)
        assert all(torch.equal(a, b) for a, b in zip(grads, result, strict=True))


@pytest.mark.parametrize("field", ["fp8_dpa", "fp8_mha"])
@pytest.mark.parametrize("kind", ["delayed", "current"])
@pytest.mark.parametrize("make", ["mha", "layer"])
def test_layers_with_fp8_attention_stay_close_to_high_precision(make, kind, field, device):
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    options = {"params_dtype": dtype, "device": device, "attention_dropout": 0.0}
    if make == "mha":
        module = MultiheadAttention(128, HEADS, fuse_qkv_params=True, **options)
    else:
        module = TransformerLayer(
            128, 256, HEADS, hidden_dropout=0.0, fuse_qkv_params=True, **options
        )
    x = torch.randn(32, 2, 128, device=device, dtype=dtype, requires_grad=True)
    outs, grads = {}, {}
    for fp8 in (False, True):
        recipe = RECIPES[kind](**({field: True} if fp8 else {}))
        for _ in range(3):
            with te.autocast(recipe=recipe):
                outs[fp8] = module(x)
            grads[fp8] = torch.autograd.grad(outs[fp8].float().square().sum(), x)[0]
    assert 0.0 < relative(outs[True], outs[False]) < 0.1
    assert relative(grads[True], grads[False]) < 0.15
    if kind == "delayed":
        states = [
            v for k, v in module.state_dict().items() if k.endswith("core_attention._extra_state")
        ]
        assert len(states) == 1 and states[0].numel() > 0


def test_fp8_mha_passes_codes_to_the_projection(device, monkeypatch):
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    module = MultiheadAttention(
        128, HEADS, params_dtype=dtype, device=device, attention_dropout=0.0
    )
    records = []
    module.proj.register_forward_pre_hook(lambda _, arguments: records.append(arguments[0]))
    x = torch.randn(32, 2, 128, device=device, dtype=dtype)
    for recipe in (
        DelayedScaling(fp8_mha=True),
        DelayedScaling(fp8_dpa=True),
        MXFP8BlockScaling(fp8_mha=True),
    ):
        with te.autocast(recipe=recipe):
            module(x)
    assert [isinstance(context, Float8Tensor) for context in records] == [True, False, False]


def test_recipes_without_fp8_attention_raise(device):
    with (
        te.autocast(recipe=NVFP4BlockScaling(fp8_dpa=True)),
        pytest.raises(
            ValueError, match="NVFP4BlockScaling has no FP8 attention; set NVTE_DPA_FP8_RECIPE"
        ),
    ):
        attention()(*tensors(device))


def test_the_environment_gives_attention_a_separate_recipe(device, monkeypatch):
    module, qkv = attention(), tensors(device)
    monkeypatch.setenv("NVTE_DPA_FP8_RECIPE", "DelayedScaling")
    monkeypatch.setenv("NVTE_DPA_FP8_RECIPE_DPA", "1")
    with te.autocast(recipe=Float8BlockScaling()):
        module(*qkv)
    assert isinstance(module.fp8_meta["recipe"], DelayedScaling)
    assert module.fp8_meta["recipe"].amax_history_len == 1
    monkeypatch.setenv("NVTE_DPA_FP8_RECIPE", "F16")
    with te.autocast(recipe=DelayedScaling(fp8_dpa=True)):
        out = module(*qkv)
    assert torch.equal(out, module(*qkv))


def test_explain_names_both_passes_and_the_reason(device):
    with te.autocast(recipe=DelayedScaling(fp8_dpa=True)):
        report = te.explain(attention(), *tensors(device))
    by_operation = {decision.operation: decision for decision in report.decisions}
    assert by_operation["fp8_attention_backward"].chosen == "high_precision"
    reasons = {v.backend: v.reason for v in by_operation["fp8_attention_backward"].verdicts}
    if device.type == "cpu":
        assert by_operation["fp8_attention"].chosen == "emulated"
        assert reasons["cudnn"] == "the forward pass is 'emulated'"


def test_bf16_backward_overrules_the_environment(device, monkeypatch):
    monkeypatch.setenv("NVTE_FP8_DPA_BWD", "1")
    module = attention()
    steps(module, DelayedScaling(fp8_dpa=True), tensors(device), bf16_backward=True)
    assert module.fp8_meta["scaling_bwd"].amax_history.count_nonzero() == 0


def test_inference_without_gradients_records_and_saves_nothing_else(device):
    module, qkv = attention(), tensors(device)
    with te.autocast(recipe=DelayedScaling(fp8_dpa=True)), torch.no_grad():
        out = module(*qkv)
    assert not out.requires_grad
    used = module.fp8_meta["scaling_fwd"].amax_history.amax(0).nonzero().flatten().tolist()
    assert set(used) <= set(FORWARD_SLOTS) and {2, 3} <= set(used)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["no_mask", "causal"])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("kind", ["delayed", "current"])
def test_cudnn_computes_in_fp8_as_exactly_as_emulation(kind, size, mask, monkeypatch):
    pytest.importorskip("cudnn")
    device = torch.device("cuda")
    qkv = tensors(device, size, 256)
    grad = torch.randn(BATCH, 256, HEADS * size, device=device, dtype=torch.bfloat16)
    results = {}
    for backend in ("cudnn", "emulated"):
        module = DotProductAttention(
            HEADS, size, num_gqa_groups=GROUPS, qkv_format="bshd", attn_mask_type=mask
        )
        with use_backend(fp8_attention=backend):
            results[backend] = steps(module, RECIPES[kind](fp8_dpa=True), qkv, grad)
    with use_backend(attention="reference"):
        wide = [x.detach().float().requires_grad_() for x in qkv]
        exact = module(*wide)
        expected = torch.autograd.grad(exact, wide, grad.float())
    for out, grads in results.values():
        assert rmse(out, exact) < RMSE
        assert all(relative(a, b) < 0.12 for a, b in zip(grads, expected, strict=True))
    assert relative(results["cudnn"][0], exact) < 2 * relative(results["emulated"][0], exact)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["no_mask", "causal"])
def test_cudnn_differentiates_in_fp8_on_request(mask, monkeypatch):
    pytest.importorskip("cudnn")
    monkeypatch.setenv("NVTE_FP8_DPA_BWD", "1")
    device = torch.device("cuda")
    qkv = tensors(device, 128, 256)
    grad = torch.randn(BATCH, 256, HEADS * 128, device=device, dtype=torch.bfloat16)
    module = DotProductAttention(
        HEADS, 128, num_gqa_groups=GROUPS, qkv_format="bshd", attn_mask_type=mask
    )
    exact = torch.autograd.grad(module(*qkv), qkv, grad)
    with use_backend(fp8_attention_backward="cudnn"):
        _, grads = steps(module, DelayedScaling(fp8_dpa=True), qkv, grad, count=4)
    assert all(relative(a, b) < 0.15 for a, b in zip(grads, exact, strict=True))
    used = module.fp8_meta["scaling_bwd"].amax_history.amax(0).nonzero().flatten().tolist()
    assert used == BACKWARD_SLOTS


@pytest.mark.parametrize("quantized_weights", [False, True])
@pytest.mark.parametrize(
    "kinds",
    [
        ("DelayedScaling", "Float8CurrentScaling"),
        ("DelayedScaling", ""),
        ("Float8CurrentScaling", "F16"),
    ],
    ids=str,
)
def test_one_attention_can_alternate_between_recipe_families(
    kinds, quantized_weights, device, monkeypatch
):
    """Each call equals a layer used with its recipe alone."""
    linear = Float8CurrentScaling(fp8_dpa=True)

    def layer():
        torch.manual_seed(3)
        with te.quantized_model_init(enabled=quantized_weights, recipe=linear):
            return MultiheadAttention(
                HEADS * SIZE, HEADS, attention_dropout=0.0, fuse_qkv_params=True, device=device
            )

    monkeypatch.setenv("NVTE_DPA_FP8_RECIPE_DPA", "1")
    x = torch.randn(TOKENS, BATCH, HEADS * SIZE, device=device, requires_grad=True)

    def step(module, kind):
        monkeypatch.setenv("NVTE_DPA_FP8_RECIPE", kind)
        with te.autocast(recipe=linear):
            out = module(x)
        (grad,) = torch.autograd.grad(out.square().sum(), x)
        return out.detach(), grad

    alternating, alone = layer(), {kind: layer() for kind in kinds}
    # A delayed-scaling state begins anew after another family: its first step uses scales equal to 1.
    for kind in (*kinds, *kinds):
        fresh = layer() if kind == "DelayedScaling" else alone[kind]
        for got, expected in zip(step(alternating, kind), step(fresh, kind), strict=True):
            torch.testing.assert_close(got, expected)
