"""A TransformerLayer's norms add the residual gradients, bitwise equal to autograd's own sums."""

from __future__ import annotations

import sys

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.module import _common, layernorm_linear, layernorm_mlp

pytestmark = pytest.mark.any_device
TOKENS, BATCH, HIDDEN, FFN, HEADS = 16, 2, 64, 96, 4
RECIPES = {
    "none": None,
    "delayed": recipes.DelayedScaling(amax_history_len=4),
    "current": recipes.Float8CurrentScaling(),
}
VARIANTS = {
    "rms": {"normalization": "RMSNorm", "bias": False},
    "layernorm": {"zero_centered_gamma": True},
    "dropout": {"hidden_dropout": 0.3},
    "decoder": {"layer_type": "decoder", "normalization": "RMSNorm"},
    "norm residual": {"apply_residual_connection_post_layernorm": True},
    "parallel": {"parallel_attention_mlp": True},
    "drop path": {"drop_path_rate": 0.5},
    "separate weights": {"fuse_qkv_params": False, "num_gqa_groups": 2},
}


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch):
    """On a GPU, torch's attention otherwise sums gradients in the order in which programs arrive."""
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")


def make(device, dtype, **options):
    torch.manual_seed(0)
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "fuse_qkv_params": True} | options
    return te.TransformerLayer(HIDDEN, FFN, HEADS, params_dtype=dtype, device=device, **options)


def run(layer, x, recipe, checkpoint=False):
    """Output and all gradients from two steps, the second with the first one's state."""
    results = []
    encoder = {"encoder_output": x.detach() * 0.5} if layer.inter_attention is not None else {}
    for step in range(2):
        torch.manual_seed(step)
        layer.zero_grad()
        inp = x.detach().clone().requires_grad_()
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            if checkpoint:
                y = te.checkpoint(layer, inp, use_reentrant=False, **encoder)
            else:
                y = layer(inp, **encoder)
        y.backward(torch.sin(torch.arange(y.numel(), device=y.device)).view_as(y).to(y.dtype))
        results += [y.detach(), inp.grad, *[parameter.grad for parameter in layer.parameters()]]
    return results


def with_separate_sums(layer):
    """A hook on a child makes the layer call it as a module, so that autograd adds the gradients."""
    for module in layer.modules():
        module.register_forward_hook(lambda *_: None)
    return layer


def inputs(device, dtype):
    return torch.randn(TOKENS, BATCH, HIDDEN, generator=torch.Generator().manual_seed(1)).to(
        device, dtype
    )


def assert_equal(results, expected):
    assert all(
        (a is None and b is None) or torch.equal(a, b)
        for a, b in zip(results, expected, strict=True)
    )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layer_gradients_equal_gradients_with_separate_sums(variant, dtype, device):
    x = inputs(device, dtype)
    layer = make(device, dtype, **VARIANTS[variant])
    results = run(layer, x, None)
    expected = run(with_separate_sums(make(device, dtype, **VARIANTS[variant])), x, None)
    if device.type == "cuda" and dtype == torch.float32:
        # Other kernels sum the rows of the projections' bias gradients, in another order.
        names = ["output", "input", *(name for name, _ in layer.named_parameters())] * 2
        sums = {i for i, name in enumerate(names) if name.endswith(("proj.bias", "fc2_bias"))}
        for i in sums:
            torch.testing.assert_close(results[i], expected[i], rtol=1e-5, atol=1e-6)
        results, expected = (
            [r for i, r in enumerate(each) if i not in sums] for each in (results, expected)
        )
    assert_equal(results, expected)


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_quantized_and_recomputed_layers_equal_layers_with_separate_sums(
    recipe, checkpoint, device
):
    x, options = inputs(device, torch.bfloat16), VARIANTS["rms"]
    results = run(make(device, torch.bfloat16, **options), x, RECIPES[recipe], checkpoint)
    separate = with_separate_sums(make(device, torch.bfloat16, **options))
    assert_equal(results, run(separate, x, RECIPES[recipe], checkpoint))


@pytest.mark.parametrize("kind", [te.LayerNormLinear, te.LayerNormMLP])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_the_returned_inputs_gradient_reaches_the_norm(kind, normalization, device):
    module = kind(
        HIDDEN, FFN, normalization=normalization, params_dtype=torch.bfloat16, device=device
    )
    values = inputs(device, torch.bfloat16)
    x, other = values.clone().requires_grad_(), values.clone().requires_grad_()
    y, repeated = module.forward_with_residual(x)
    assert repeated.data_ptr() == x.data_ptr()
    assert repeated.grad_fn is y.grad_fn
    grads = torch.ones_like(y), torch.cos(values.float()).bfloat16()
    torch.autograd.backward((y, repeated), grads)
    torch.autograd.backward((module(other), other * 1), grads)
    assert torch.equal(x.grad, other.grad)


@pytest.mark.parametrize("kind", [te.LayerNormLinear, te.LayerNormMLP])
def test_returned_input_without_gradient_is_the_input(kind, device):
    module = kind(HIDDEN, FFN, params_dtype=torch.bfloat16, device=device)
    x = inputs(device, torch.bfloat16)
    assert module.forward_with_residual(x)[-1] is x
    with torch.no_grad():
        assert module.forward_with_residual(x.requires_grad_())[-1] is x
    wide = x.detach().float().requires_grad_()
    with torch.autocast(
        device.type if isinstance(device, torch.device) else device, torch.bfloat16
    ):
        assert module.forward_with_residual(wide)[-1] is wide  # the module converts its own copy


@pytest.mark.parametrize("kind", [te.LayerNormLinear, te.LayerNormMLP])
def test_calls_whose_norm_cannot_add_the_residual_gradient_return_the_input(kind, monkeypatch):
    """One call per reason of `residual_unsupported_reason`; autograd sums the gradients of the returned input."""
    reasons = []
    for file in (layernorm_linear, layernorm_mlp):
        function = file.residual_unsupported_reason
        monkeypatch.setattr(
            file,
            "residual_unsupported_reason",
            lambda *args, function=function: reasons.append(function(*args)) or reasons[-1],
        )
    settings = {"params_dtype": torch.float32, "device": "cpu"}
    module = kind(HIDDEN, FFN, **settings)
    x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    (y, norm_output), repeated = kind(
        HIDDEN, FFN, return_layernorm_output=True, **settings
    ).forward_with_residual(x)
    assert repeated is x and norm_output.grad_fn is y.grad_fn
    assert module.forward_with_residual(x.detach())[1].grad_fn is None
    with torch.autocast("cpu", torch.bfloat16):
        assert module.forward_with_residual(x)[1] is x
    parameter = torch.nn.Parameter(x.detach())
    assert module.forward_with_residual(parameter)[1] is parameter
    file = sys.modules[kind.__module__]
    monkeypatch.setattr(file, "apply_normalization", lambda *args: original(*args))
    original = _common.apply_normalization
    assert module.forward_with_residual(x)[1] is x
    for reason, word in zip(
        reasons, ("norm(x)", "no gradient", "dtype", "Parameter", "replaced"), strict=True
    ):
        assert word in reason


@pytest.mark.parametrize("drop_path_rate", [0.0, 0.5])
@pytest.mark.parametrize("child", ["layernorm_mlp", "self_attention"])
def test_children_without_a_returned_bias_equal_children_with_hooks(
    child: str, drop_path_rate: float
):
    layer = make("cpu", torch.float32, drop_path_rate=drop_path_rate)
    if child == "layernorm_mlp":
        layer.layernorm_mlp = te.LayerNormMLP(HIDDEN, FFN, device="cpu")
    else:
        layer.self_attention = te.MultiheadAttention(
            HIDDEN, HEADS, input_layernorm=True, device="cpu"
        )
    x = torch.randn(TOKENS, BATCH, HIDDEN)
    actual = run(layer, x, None)
    expected = run(with_separate_sums(layer), x, None)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


def test_an_invalid_microbatch_flag_is_named_before_any_child_runs():
    layer = make("cpu", torch.float32)
    with pytest.raises(TypeError, match="is_first_microbatch"):
        layer(torch.randn(TOKENS, BATCH, HIDDEN), is_first_microbatch=len)
