"""Layer options combined: codes between layers, microbatches, frozen parameters, repeated use."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from tests.support.layers import HIDDEN, LAYERS, RECIPES, same, same_as_eager, sample, step
from transformer_engine.pytorch.distributed import checkpoint
from transformer_engine.pytorch.module.grouped_linear import GroupedLinear
from transformer_engine.pytorch.module.layernorm_linear import LayerNormLinear
from transformer_engine.pytorch.module.layernorm_mlp import LayerNormMLP
from transformer_engine.pytorch.module.linear import Linear
from transformer_engine.pytorch.quantization import autocast
from transformer_engine.pytorch.tensor import Float8CurrentScalingQuantizer, Float8Tensor

STATELESS = ["current", "block", "mxfp8"]
SQUARE = {
    "linear": lambda **options: Linear(HIDDEN, HIDDEN, **options),
    "layernorm_linear": lambda **options: LayerNormLinear(HIDDEN, HIDDEN, **options),
    "layernorm_mlp": lambda **options: LayerNormMLP(HIDDEN, HIDDEN, **options),
}


def weights(layer):
    return {name: p for name, p in layer.named_parameters() if p.dim() == 2}


def gradients(layer):
    return {name: p.grad for name, p in layer.named_parameters()}


def distance(got, expected):
    return float((got.detach().double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_codes_pass_between_three_layers_in_both_directions(name, device):
    first, second, third = (Linear(HIDDEN, HIDDEN, device=device) for _ in range(3))
    x, records = sample(device), []
    for _ in range(3):
        records.clear()
        with autocast(recipe=RECIPES[name]):
            a = first(x, fp8_output=True)
            b = second(a, fp8_output=True, fp8_grad=True)
            y = third(b, fp8_grad=True)
        for hidden in (a, b):
            hidden.register_hook(lambda grad: records.append(type(grad)))
        x.grad = None
        for layer in (first, second, third):
            layer.zero_grad()
        y.sin().sum().backward()
    assert type(a) is type(b) is Float8Tensor and records == [Float8Tensor, Float8Tensor]
    quantized = [x.grad] + [p.grad for layer in (first, second, third) for p in layer.parameters()]
    x.grad = None
    for layer in (first, second, third):
        layer.zero_grad()
    third(second(first(x))).sin().sum().backward()
    exact = [x.grad] + [p.grad for layer in (first, second, third) for p in layer.parameters()]
    for got, expected in zip(quantized, exact, strict=True):
        assert distance(got, expected) < 0.2


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("name", ["delayed", "block"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grad_is_the_sum_over_microbatches(kind, name, dtype, device):
    layer = LAYERS[kind](device=device)
    twin = copy.deepcopy(layer)
    layer.fuse_wgrad_accumulation = True
    for p in weights(layer).values():
        # the first microbatch overwrites it
        p.main_grad = torch.full_like(p, float("nan"), dtype=dtype)
    sums = {n: torch.zeros_like(p, dtype=dtype) for n, p in weights(twin).items()}
    for first in (True, False, False):
        x = sample(device)
        for module in (layer, twin):
            with autocast(recipe=RECIPES[name]):
                y = module(x, is_first_microbatch=first)
            y.sin().sum().backward()
        for n, p in weights(twin).items():
            sums[n] += p.grad
            p.grad = None
    tolerance = 1e-5 if dtype is torch.float32 else 2**-7
    for n, p in weights(layer).items():
        assert p.grad is None
        assert distance(p.main_grad, sums[n]) < tolerance


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("name", STATELESS)
def test_later_microbatches_use_the_first_ones_weights_until_the_next_step(kind, name, device):
    layer, x, recipe = LAYERS[kind](device=device), sample(device), RECIPES[name]
    for _ in range(2):
        before = step(layer, x, recipe)
        assert same(step(layer, x, recipe, is_first_microbatch=True), before)
        with torch.no_grad():
            for p in weights(layer).values():
                p.mul_(-0.5).add_(0.01)
        fresh = LAYERS[kind](device=device)
        fresh.load_state_dict(layer.state_dict())
        after = step(fresh, x, recipe)
        assert not torch.equal(before[0], after[0])
        assert same(step(layer, x, recipe, is_first_microbatch=False), before)
        assert same(step(layer, x, recipe), after), "without microbatches nothing is cached"


@pytest.mark.parametrize("name", ["current", "block", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("mode", ["high_precision", "dequantized"])
def test_a_recipe_that_overrides_the_backward_quantizes_the_forward_alone(name, mode, device):
    layer, twin = (Linear(HIDDEN, 96, device=device) for _ in range(2))
    twin.load_state_dict(layer.state_dict())
    x, recipe = sample(device), replace(RECIPES[name], backward_override=mode)
    dy = torch.randn(2, 32, 96, device=device)
    with autocast(recipe=recipe):
        y = layer(x)
    with autocast(recipe=RECIPES[name]):
        assert torch.equal(y, twin(x))
    y.backward(dy)
    x_values, w_values = x.detach(), layer.weight.detach()
    if mode == "dequantized":
        for_x, for_w = layer.quantizers["scaling_fwd"][:2]
        x_values, w_values = (
            quantizer.encode(values, True, False).dequantize()
            for quantizer, values in ((for_x, x_values), (for_w, w_values))
        )
    flat = dy.reshape(-1, 96)
    torch.testing.assert_close(x.grad, dy @ w_values)
    torch.testing.assert_close(layer.weight.grad, flat.t() @ x_values.reshape(-1, HIDDEN))
    torch.testing.assert_close(layer.bias.grad, flat.sum(0))


@pytest.mark.parametrize("name", ["current", "block", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("override", [None, "high_precision", "dequantized"])
@pytest.mark.parametrize("keeps", [False, True])
def test_quantized_inputs_with_leading_dimensions_have_close_gradients(
    name, override, keeps, device
):
    layer = Linear(HIDDEN, 96, device=device, save_original_input=keeps)
    values = sample(device).detach()
    codes = Float8CurrentScalingQuantizer(torch.float8_e4m3fn, device)(values).requires_grad_()
    with autocast(recipe=replace(RECIPES[name], backward_override=override)):
        y = layer(codes)
    dy = torch.randn_like(y)
    y.backward(dy)
    near = 0.35 if name == "nvfp4" else 0.1
    assert distance(y, torch.nn.functional.linear(values, layer.weight, layer.bias).detach()) < near
    assert codes.grad.shape == values.shape
    assert distance(codes.grad, dy @ layer.weight.detach()) < near
    assert distance(layer.weight.grad, dy.reshape(-1, 96).t() @ values.reshape(-1, HIDDEN)) < near


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("name", ["delayed", "current", "block"])
@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_frozen_parameters_get_no_gradient_and_the_others_do(kind, name, frozen, device):
    layer, x = LAYERS[kind](device=device), sample(device)
    twin = copy.deepcopy(layer)
    for n, p in layer.named_parameters():
        p.requires_grad_(not n.endswith(frozen) or "layer_norm" in n)
    results = []
    for module in (layer, twin):
        x.grad = None
        with autocast(recipe=RECIPES[name]):
            y = module(x)
        y.sin().sum().backward()
        results.append((y.detach(), x.grad))
    assert same(*results)
    for (n, grad), expected in zip(gradients(layer).items(), gradients(twin).values(), strict=True):
        if n.endswith(frozen) and "layer_norm" not in n:
            assert grad is None
        else:
            assert_same_gradient(n, grad, expected)


@pytest.mark.parametrize("kind", ["layernorm_linear", "layernorm_mlp"])
@pytest.mark.parametrize("name", ["none", "delayed", "current", "block"])
@pytest.mark.parametrize("trained", ["layer_norm_weight", "layer_norm_bias", "weight", "bias"])
def test_one_parameter_alone_can_be_trained(kind, name, trained, device):
    layer = LAYERS[kind](device=device)
    twin = copy.deepcopy(layer)
    for n, p in layer.named_parameters():
        p.requires_grad_(n in (trained, f"fc1_{trained}"))
    x = sample(device).detach()
    for module in (layer, twin):
        with autocast(enabled=name != "none", recipe=RECIPES[name]):
            y = module(x)
        y.sin().sum().backward()
    got = {n: grad for n, grad in gradients(layer).items() if grad is not None}
    assert len(got) == 1
    for n, grad in got.items():
        assert_same_gradient(n, grad, gradients(twin)[n])


def assert_same_gradient(name, grad, expected):
    """Compare bit for bit; on a GPU, the choice of kernel for bias gradients depends on the other products."""
    if grad.is_cuda and name.endswith("bias") and "layer_norm" not in name:
        torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(grad, expected)


def test_a_returned_norm_output_has_gradients_if_only_the_linear_part_is_trained(device):
    layer = LayerNormLinear(HIDDEN, 96, device=device, return_layernorm_output=True)
    layer.layer_norm_weight.requires_grad_(False)
    layer.layer_norm_bias.requires_grad_(False)
    y, normalized = layer(sample(device).detach())
    (y.sum() + normalized.sum()).backward()
    assert layer.layer_norm_weight.grad is None
    torch.testing.assert_close(
        layer.weight.grad, normalized.detach().reshape(-1, HIDDEN).sum(0).expand(96, -1)
    )


@pytest.mark.parametrize("name", ["current", pytest.param("block", marks=pytest.mark.slow)])
def test_a_linear_part_that_is_trained_alone_compiles_in_one_graph(name, device):
    layer, x = LAYERS["layernorm_linear"](device=device), sample(device).detach()
    layer.layer_norm_weight.requires_grad_(False)
    layer.layer_norm_bias.requires_grad_(False)

    def run(x):
        with autocast(recipe=RECIPES[name]):
            return layer(x)

    results = []
    for call in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        layer.zero_grad()
        call(x).sin().sum().backward()
        results.append([layer.weight.grad, layer.bias.grad])
    assert same_as_eager(*results)


@pytest.mark.parametrize("name", ["current", pytest.param("block", marks=pytest.mark.slow)])
def test_a_weight_is_cached_in_a_compiled_graph_too(name, device):
    layer, x = Linear(HIDDEN, 96, device=device), sample(device).detach()

    def run(x, first):
        with autocast(recipe=RECIPES[name]):
            return layer(x, is_first_microbatch=first)

    expected = run(x, True)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert same_as_eager([expected, expected], [compiled(x, True), compiled(x, False)])


@pytest.mark.parametrize("frozen", ["fc1_weight", "fc2_weight"])
def test_delayed_gradients_count_the_trained_weights(frozen, device):
    late, now = (
        LAYERS["layernorm_mlp"](device=device, delay_wgrad_compute=late) for late in (True, False)
    )
    now.load_state_dict(late.state_dict())
    x = sample(device)
    for layer in (late, now):
        getattr(layer, frozen).requires_grad_(False)
        for _ in range(2):
            layer(x).sin().sum().backward()
    trained = ({"fc1_weight", "fc2_weight"} - {frozen}).pop()
    late.backward_dw()
    assert len(late.wgrad_store) == 1, "one of two backward passes is done"
    late.backward_dw()
    assert torch.equal(getattr(late, trained).grad, getattr(now, trained).grad)
    assert getattr(late, frozen).grad is None


def test_no_gradient_is_delayed_if_no_weight_is_trained(device):
    layer = Linear(HIDDEN, 96, device=device, delay_wgrad_compute=True)
    layer.weight.requires_grad_(False)
    layer(sample(device)).sum().backward()
    layer.backward_dw()
    assert layer.weight.grad is None


def test_a_frozen_piece_of_a_split_weight_gets_no_delayed_gradient(device):
    layer = Linear(
        HIDDEN, 96, parameters_split=("a_", "b_"), device=device, delay_wgrad_compute=True
    )
    layer.a_weight.requires_grad_(False)
    layer(sample(device)).sum().backward()
    layer.backward_dw()
    assert layer.a_weight.grad is None and layer.b_weight.grad.any()


@pytest.mark.parametrize("kind", [*LAYERS, "grouped"])
@pytest.mark.parametrize("name", ["delayed", "block"])
def test_a_layer_that_ran_in_inference_mode_first_can_be_trained(kind, name, device):
    layer, more = LAYERS[kind](device=device) if kind in LAYERS else None, ()
    if layer is None:
        layer, more = GroupedLinear(2, HIDDEN, 96, device=device), ([32, 32],)
    twin = copy.deepcopy(layer)
    x = sample(device)
    results = []
    for module, mode in ((layer, torch.inference_mode), (twin, torch.no_grad)):
        x.grad = None
        with mode():
            for first in (True, False):
                with autocast(recipe=RECIPES[name]):
                    module(x.detach().clone(), *more, is_first_microbatch=first)
        for first in (False, True):
            with autocast(recipe=RECIPES[name]):
                y = module(x, *more, is_first_microbatch=first)
            y.sin().sum().backward()
        results.append([y.detach(), x.grad] + [p.grad for p in module.parameters()])
    assert same(*results)


@pytest.mark.parametrize("name", STATELESS)
@pytest.mark.parametrize("kind", [*LAYERS, "recomputing_mlp", "grouped"])
def test_a_retained_graph_repeats_its_gradients(kind, name, device):
    more = ()
    if kind == "grouped":
        layer, more = GroupedLinear(2, HIDDEN, 96, device=device), ([32, 32],)
    elif kind == "recomputing_mlp":
        layer = LAYERS["layernorm_mlp"](device=device, checkpoint=True)
    else:
        layer = LAYERS[kind](device=device)
    x = sample(device)
    with autocast(recipe=RECIPES[name]):
        y = layer(x, *more)
    loss = y.sin().sum()
    loss.backward(retain_graph=True)
    once = [x.grad.clone()] + [p.grad.clone() for p in layer.parameters()]
    loss.backward()
    assert same([x.grad] + [p.grad for p in layer.parameters()], [2 * grad for grad in once])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", STATELESS)
def test_a_retained_checkpoint_repeats_its_gradients(reentrant, name, device):
    layer, x = Linear(HIDDEN, 96, device=device), sample(device)
    with autocast(recipe=RECIPES[name]):
        y = checkpoint(layer, x, use_reentrant=reentrant)
    loss = y.sin().sum()
    loss.backward(retain_graph=True)
    once = [x.grad.clone()] + [p.grad.clone() for p in layer.parameters()]
    loss.backward()
    assert same([x.grad] + [p.grad for p in layer.parameters()], [2 * grad for grad in once])


@pytest.mark.parametrize("kind", SQUARE)
@pytest.mark.parametrize("name", STATELESS)
def test_one_layer_used_twice_equals_two_layers_with_shared_parameters(kind, name, device):
    layer = SQUARE[kind](device=device)
    twins = [copy.deepcopy(layer) for _ in range(2)]
    x = sample(device)
    with autocast(recipe=RECIPES[name]):
        y = layer(layer(x))
    y.sin().sum().backward()
    got, x.grad = x.grad, None
    with autocast(recipe=RECIPES[name]):
        expected = twins[1](twins[0](x))
    expected.sin().sum().backward()
    assert torch.equal(y, expected) and torch.equal(got, x.grad)
    for n, grad in gradients(layer).items():
        assert torch.equal(grad, gradients(twins[1])[n] + gradients(twins[0])[n])


def test_one_layer_used_twice_records_the_larger_maximum(device):
    layer, x = Linear(HIDDEN, HIDDEN, bias=False, device=device), sample(device)
    with autocast(recipe=RECIPES["delayed"]):
        hidden = layer(x)
        layer(hidden)
        recorded = layer.fp8_meta["scaling_fwd"].amax_history[0, 0].clone()
        layer(8 * x)
        larger = layer.fp8_meta["scaling_fwd"].amax_history[0, 0]
        assert torch.equal(recorded, torch.maximum(x.abs().amax(), hidden.abs().amax()))
        assert torch.equal(larger, 8 * x.abs().amax())


@pytest.mark.parametrize("kind", SQUARE)
def test_autocast_regions_with_different_recipes_nest(kind, device):
    outer, inner = (SQUARE[kind](device=device) for _ in range(2))
    x = sample(device)
    expected = []
    for layer, name in ((outer, "current"), (inner, "block"), (inner, "none"), (outer, "current")):
        with autocast(enabled=name != "none", recipe=RECIPES[name]):
            expected.append(layer(x).detach())
    for _ in range(2):
        with autocast(recipe=RECIPES["current"]):
            got = [outer(x)]
            with autocast(recipe=RECIPES["block"]):
                got.append(inner(x))
                with autocast(enabled=False):
                    got.append(inner(x))
            got.append(outer(x))
        assert same([y.detach() for y in got], expected)
        sum(y.sin().sum() for y in got).backward()
        assert all(
            torch.isfinite(p.grad).all() for layer in (outer, inner) for p in layer.parameters()
        )


def test_a_layer_alternates_between_two_recipes(device):
    layer, x = Linear(HIDDEN, 96, device=device), sample(device)
    alone = {name: step(copy.deepcopy(layer), x, RECIPES[name]) for name in STATELESS}
    for _ in range(2):
        for name in STATELESS:
            assert same(step(layer, x, RECIPES[name]), alone[name])


def test_the_backward_keeps_the_recipe_of_its_forward(device):
    layer, x = Linear(HIDDEN, 96, device=device), sample(device)
    expected = step(layer, x, RECIPES["block"])
    with autocast(recipe=RECIPES["block"]):
        y = layer(x)
    with autocast(recipe=RECIPES["current"]):
        layer(x)
        (y.float().sin().sum() * 3).backward()
    assert same([y.detach(), x.grad] + [p.grad for p in layer.parameters()], expected)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_reports_how_its_last_call_ran(kind, device):
    layer, x = LAYERS[kind](device=device), sample(device)
    for _ in range(2):
        for enabled in (True, False):
            with autocast(enabled=enabled, recipe=RECIPES["current"]):
                layer(x)
            assert layer.fp8 is enabled


def test_recomputation_can_be_switched_on_later(device):
    layer, x = LAYERS["layernorm_mlp"](device=device), sample(device)

    def saved():
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: sizes.append(t.numel()) or t, lambda t: t
        ):
            layer(x)
        return sum(sizes)

    remaining = saved()
    layer.checkpoint = True
    assert saved() < remaining
