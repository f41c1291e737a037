"""Linear, LayerNormLinear and LayerNormMLP: results, gradients, recipes, state."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch

from tests.support.cases import cross_cases
from tests.support.layers import (
    HIDDEN,
    LAYERS,
    QUANTIZED,
    RECIPES,
    same,
    same_as_eager,
    sample,
    step,
)
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
)
from transformer_engine.pytorch.module.layernorm_linear import LayerNormLinear
from transformer_engine.pytorch.module.layernorm_mlp import LayerNormMLP
from transformer_engine.pytorch.module.linear import Linear
from transformer_engine.pytorch.primitives.activation import ACTIVATIONS
from transformer_engine.pytorch.quantization import (
    FP8GlobalStateManager,
    autocast,
    quantized_model_init,
)
from transformer_engine.pytorch.tensor import Float8Tensor, QuantizedTensor

F = torch.nn.functional


def plain_norm(layer, x):
    gamma = layer.layer_norm_weight + (1.0 if layer.zero_centered_gamma else 0.0)
    if layer.normalization == "RMSNorm":
        return F.rms_norm(x, (x.shape[-1],), gamma, layer.eps)
    return F.layer_norm(x, (x.shape[-1],), gamma, layer.layer_norm_bias, layer.eps)


def plain(layer, x):
    """Compute the same layer with torch.nn.functional."""
    if isinstance(layer, Linear):
        return F.linear(x, layer.weight, layer.bias)
    if isinstance(layer, LayerNormLinear):
        return F.linear(plain_norm(layer, x), layer.weight, layer.bias)
    hidden = F.linear(plain_norm(layer, x), layer.fc1_weight, layer.fc1_bias)
    return F.linear(F.gelu(hidden, approximate="tanh"), layer.fc2_weight, layer.fc2_bias)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_a_layer_in_high_precision_equals_the_plain_layer(
    kind, normalization, zero_centered, device
):
    if kind == "linear" and (normalization == "RMSNorm" or zero_centered):
        pytest.skip("a Linear has no norm")
    options = (
        {}
        if kind == "linear"
        else {"normalization": normalization, "zero_centered_gamma": zero_centered}
    )
    layer = LAYERS[kind](device=device, **options)
    x = sample(device)
    got = step(layer, x)
    expected = step(lambda_module(layer), x)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def lambda_module(layer):
    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return plain(self.layer, x)

    return Plain()


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("name", QUANTIZED)
def test_a_recipe_quantizes_and_stays_close_to_high_precision(kind, name, device):
    layer = LAYERS[kind](device=device)
    x = sample(device)
    exact = step(layer, x)
    step(layer, x, RECIPES[name])  # delayed scaling learns its scales
    step(layer, x, RECIPES[name])
    quantized = step(layer, x, RECIPES[name])
    for a, b in zip(quantized, exact, strict=True):
        error = float((a - b).norm() / b.norm().clamp(min=1e-6))
        assert error < (0.5 if name == "nvfp4" else 0.15)
    assert not torch.equal(quantized[0], exact[0])


# tests/module/test_compiled_layers.py always compiles all three without a recipe, within a whole layer,
# test_autocast_works_inside_the_compiled_function three steps of a Linear under a recipe, and
# test_quantized_parameters_compile_in_one_graph a LayerNormMLP under a recipe.
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(
            name,
            kind,
            marks=() if (name, kind) == ("delayed", "layernorm_linear") else pytest.mark.slow,
        )
        for name in RECIPES
        for kind in LAYERS
    ],
)
def test_compiling_in_one_graph_keeps_the_bits(kind, name, device):
    def train(wrap):
        torch.manual_seed(7)
        FP8GlobalStateManager.reset()
        layer = LAYERS[kind](device=device)
        model = wrap(layer)
        results = []
        for _ in range(3):
            x = sample(device)
            with autocast(enabled=RECIPES[name] is not None, recipe=RECIPES[name]):
                y = model(x)
            (y.sin().sum() * 3).backward()
            results += [y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]
            layer.zero_grad()
        return results

    torch._dynamo.reset()
    eager = train(lambda layer: layer)
    compiled = train(lambda layer: torch.compile(layer, fullgraph=True, backend="aot_eager"))
    assert same_as_eager(eager, compiled)


# tests/module/test_combinations.py always compiles functions with current scaling in them.
@pytest.mark.parametrize("name", ["delayed", pytest.param("current", marks=pytest.mark.slow)])
def test_autocast_works_inside_the_compiled_function(name, device):
    layer = LAYERS["linear"](device=device)
    twin = copy.deepcopy(layer)

    def forward(module, x):
        with autocast(recipe=RECIPES[name]):
            return module(x)

    torch._dynamo.reset()
    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        x = sample(device)
        y, z = forward(layer, x), compiled(twin, x)
        assert torch.equal(y, z)
        grads = torch.autograd.grad(y.sin().sum(), [x, layer.weight])
        twin_grads = torch.autograd.grad(z.sin().sum(), [x, twin.weight])
        assert same(list(grads), list(twin_grads))


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("name", QUANTIZED)
def test_a_cached_weight_serves_later_microbatches(kind, name, device):
    layer = LAYERS[kind](device=device)
    x = sample(device)
    step(layer, x, RECIPES[name])
    first = step(layer, x, RECIPES[name], is_first_microbatch=True)
    cached = dict(layer._fp8_workspaces)
    weight = next(p for n, p in layer.named_parameters() if n.endswith("weight") and p.dim() == 2)
    with torch.no_grad():
        weight.add_(1.0)
    step(layer, x, RECIPES[name], is_first_microbatch=False)
    assert layer._fp8_workspaces.keys() == cached.keys()
    assert all(layer._fp8_workspaces[key] is cached[key] for key in cached)
    renewed = step(layer, x, RECIPES[name], is_first_microbatch=True)
    assert not torch.equal(first[0], renewed[0])


def test_an_uncached_weight_leaves_no_workspace(device):
    layer = LAYERS["linear"](device=device)
    step(layer, sample(device), RECIPES["current"])
    assert layer._fp8_workspaces == {}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("name", ["none", "current"])
def test_weight_gradients_accumulate_into_main_grad(kind, name, device):
    layer = LAYERS[kind](device=device, fuse_wgrad_accumulation=True)
    twin = LAYERS[kind](device=device)
    twin.load_state_dict(layer.state_dict())
    weights = {n: p for n, p in layer.named_parameters() if p.dim() == 2}
    for p in weights.values():
        p.main_grad = torch.ones_like(p, dtype=torch.float32)
        p.grad_added_to_main_grad = False
    x = sample(device)
    with autocast(enabled=name != "none", recipe=RECIPES[name]):
        layer(x).sum().backward()
        twin(x).sum().backward()
    for n, p in weights.items():
        torch.testing.assert_close(
            p.main_grad, 1.0 + dict(twin.named_parameters())[n].grad, rtol=1e-4, atol=1e-4
        )
        assert p.grad_added_to_main_grad
        assert p.grad.shape == p.shape


@pytest.mark.parametrize("overwrite", ["first microbatch", "attribute"])
def test_main_grad_is_overwritten_on_request(overwrite, device):
    layer = Linear(HIDDEN, 32, bias=False, device=device, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.full_like(layer.weight, 9.0)
    if overwrite == "attribute":
        layer.weight.overwrite_main_grad = True
    x = sample(device)
    layer(x, is_first_microbatch=True if overwrite == "first microbatch" else None).sum().backward()
    expected = x.detach().reshape(-1, HIDDEN).sum(0).expand(32, HIDDEN)
    torch.testing.assert_close(layer.weight.main_grad, expected, rtol=1e-4, atol=1e-4)
    assert layer.weight.grad is None


def test_a_missing_main_grad_names_the_remedy(device):
    layer = Linear(HIDDEN, 32, bias=False, device=device, fuse_wgrad_accumulation=True)
    with pytest.raises(AttributeError, match=r"set weight\.main_grad"):
        layer(sample(device)).sum().backward()


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("fused", [False, True])
def test_delayed_weight_gradients_equal_immediate_ones(kind, fused, device):
    late = LAYERS[kind](device=device, delay_wgrad_compute=True, fuse_wgrad_accumulation=fused)
    now = LAYERS[kind](device=device, fuse_wgrad_accumulation=fused)
    now.load_state_dict(late.state_dict())
    if fused:
        for layer in (late, now):
            for p in layer.parameters():
                p.main_grad = torch.zeros_like(p)
    x = sample(device)
    calls = []
    late.register_wgrad_accumulation_and_reduce_hooks(lambda: calls.append(1))
    for layer in (late, now):
        with autocast(recipe=RECIPES["current"]):
            layer(x).sin().sum().backward()
    names = [n for n, p in late.named_parameters() if p.dim() == 2]
    if not fused:
        assert all(getattr(late, n).grad is None for n in names)
    assert late.need_backward_dw() and not now.need_backward_dw()
    late.backward_dw()
    for n in names:
        attribute = "main_grad" if fused else "grad"
        assert torch.equal(
            getattr(getattr(late, n), attribute), getattr(getattr(now, n), attribute)
        )
    assert calls == [1]
    with pytest.raises(RuntimeError, match="no weight gradient waits"):
        late.backward_dw()


@pytest.mark.parametrize("kind", LAYERS)
def test_return_bias_returns_the_bias_unadded(kind, device):
    layer = LAYERS[kind](device=device, return_bias=True)
    twin = LAYERS[kind](device=device)
    twin.load_state_dict(layer.state_dict())
    for p, q in zip(layer.parameters(), twin.parameters(), strict=True):
        if p.dim() == 1:
            torch.nn.init.normal_(p)
            q.data.copy_(p.data)
    x = sample(device)
    y, bias = layer(x)
    torch.testing.assert_close(y + bias, twin(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["layernorm_linear", "layernorm_mlp"])
@pytest.mark.parametrize("return_bias", [False, True])
def test_the_norm_output_is_returned_last_and_has_gradients(kind, return_bias, device):
    layer = LAYERS[kind](device=device, return_layernorm_output=True, return_bias=return_bias)
    x = sample(device)
    outputs = layer(x)
    assert len(outputs) == 2 + return_bias
    expected = plain_norm(layer, x)
    torch.testing.assert_close(outputs[-1], expected, rtol=1e-5, atol=1e-5)
    (outputs[0].sum() + outputs[-1].sin().sum()).backward()
    got = x.grad.clone()
    x.grad = None
    y = plain(layer, x) if not return_bias else plain(layer, x) - outputs[1]
    (y.sum() + expected.sin().sum()).backward()
    torch.testing.assert_close(got, x.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.sampled
def test_every_activation_with_and_without_recomputation(activation, recompute, device):
    options = {"activation": activation, "device": device}
    if activation == "clamped_swiglu":
        options["activation_params"] = {"limit": 0.5, "alpha": 1.5}
    layer = LayerNormMLP(HIDDEN, 96, checkpoint=recompute, **options)
    saved = LayerNormMLP(HIDDEN, 96, **options)
    saved.load_state_dict(layer.state_dict())
    assert layer.fc1_weight.shape[0] == 96 * (2 if ACTIVATIONS[activation].gated else 1)
    for _ in range(2):
        x = sample(device)
        assert same(step(layer, x, RECIPES["delayed"]), step(saved, x, RECIPES["delayed"]))


def test_recomputation_saves_memory():
    def saved(recompute):
        sizes = []
        layer = LayerNormMLP(HIDDEN, 512, checkpoint=recompute, device="cpu")
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: sizes.append(t.numel()) or t, lambda t: t
        ):
            layer(sample("cpu"))
        return sum(sizes) - sum(p.numel() for p in layer.parameters())

    assert saved(True) < saved(False) / 4


@pytest.mark.parametrize("split", [("query_", "key", "value"), {"a": 64, "b": 32}])
def test_a_split_weight_equals_the_full_weight(split, device):
    layer = Linear(HIDDEN, 96, parameters_split=split, device=device)
    names = [name.rstrip("_") for name in split]
    assert [n for n, _ in layer.named_parameters()] == [f"{n}_weight" for n in names] + [
        f"{n}_bias" for n in names
    ]
    full = Linear(HIDDEN, 96, device=device)
    with torch.no_grad():
        full.weight.copy_(torch.cat([getattr(layer, f"{n}_weight") for n in names]))
        full.bias.copy_(torch.cat([getattr(layer, f"{n}_bias") for n in names]))
    x = sample(device)
    actual, reference = step(layer, x, RECIPES["current"]), step(full, x, RECIPES["current"])
    assert same(actual[:2], reference[:2])
    assert torch.equal(torch.cat(actual[2 : 2 + len(names)]), reference[2])


@pytest.mark.parametrize(
    "split, message",
    [
        (("a", "b", "c", "d", "e"), "does not divide 96"),
        ({"a": 90}, "add up to 90"),
        ((), "0 names"),
    ],
)
def test_a_mismatched_split_is_rejected(split, message):
    with pytest.raises(ValueError, match=message):
        Linear(HIDDEN, 96, parameters_split=split, device="cpu")


@pytest.mark.parametrize("kind", LAYERS)
def test_parameters_have_the_given_dtype(kind, device):
    layer = LAYERS[kind](params_dtype=torch.bfloat16, device=device)
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}
    assert layer(sample(device, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("name", ["none", "current"])
def test_torch_autocast_decides_the_compute_dtype(kind, name, device):
    layer = LAYERS[kind](device=device)
    x = sample(device)
    with (
        torch.autocast(device.type, dtype=torch.bfloat16),
        autocast(enabled=name != "none", recipe=RECIPES[name]),
    ):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad.dtype == torch.float32
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters())


@pytest.mark.parametrize("kind", LAYERS)
def test_meta_construction_defers_allocation_to_reset_parameters(kind, device):
    layer = LAYERS[kind](device="meta")
    assert all(p.is_meta for p in layer.parameters())
    with pytest.raises(RuntimeError, match="reset_parameters"):
        layer(sample(device))
    layer.reset_parameters()
    assert not any(p.is_meta for p in layer.parameters())
    layer(sample(device)).sum().backward()


def test_default_initialisation_is_normal_with_a_small_deviation(device):
    layer = Linear(512, 512, device=device)
    assert abs(float(layer.weight.detach().std()) - 0.023) < 1e-3
    assert not layer.bias.any()


def test_without_bias_the_bias_is_an_empty_tensor(device):
    layer = Linear(HIDDEN, 32, bias=False, device=device)
    assert layer.bias.numel() == 0
    assert list(layer.state_dict()) == ["weight", "_extra_state"]


@pytest.mark.parametrize("kind", LAYERS)
def test_delayed_state_survives_a_checkpoint(kind, device):
    layer, x = LAYERS[kind](device=device), sample(device)
    for _ in range(3):
        step(layer, x, RECIPES["delayed"])
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    restored = LAYERS[kind](device=device)
    restored.load_state_dict(torch.load(file, weights_only=True))
    for direction in ("scaling_fwd", "scaling_bwd"):
        ours, reference = restored.fp8_meta[direction], layer.fp8_meta[direction]
        assert torch.equal(ours.scale, reference.scale)
        assert torch.equal(ours.amax_history, reference.amax_history)
    assert same(step(layer, x, RECIPES["delayed"]), step(restored, x, RECIPES["delayed"]))


def test_a_layer_that_never_quantized_has_an_empty_extra_state(device):
    layer = Linear(HIDDEN, 32, device=device)
    step(layer, sample(device))
    assert layer.state_dict()["_extra_state"].numel() == 0


def test_another_history_length_keeps_the_scale(device):
    layer, x = Linear(HIDDEN, 32, device=device), sample(device)
    for _ in range(3):
        step(layer, x, DelayedScaling(amax_history_len=8))
    scale = layer.fp8_meta["scaling_fwd"].scale.clone()
    with autocast(recipe=DelayedScaling(amax_history_len=2)):
        layer.init_fp8_metadata()
    assert layer.fp8_meta["scaling_fwd"].amax_history.shape[0] == 2
    assert torch.equal(layer.fp8_meta["scaling_fwd"].scale, scale)


def test_an_equal_recipe_in_a_new_object_changes_nothing(device):
    layer, x = Linear(HIDDEN, 32, device=device), sample(device)
    step(layer, x, DelayedScaling(amax_history_len=4))
    quantizers = layer.quantizers["scaling_fwd"]
    step(layer, x, DelayedScaling(amax_history_len=4))
    assert layer.quantizers["scaling_fwd"] is quantizers


def test_calibration_learns_scales_in_high_precision(device):
    layer, x = Linear(HIDDEN, 32, device=device), sample(device)
    exact = layer(x)
    with autocast(enabled=False, calibrating=True, recipe=RECIPES["delayed"]):
        y = layer(x)
    assert torch.equal(y, exact)
    amax = layer.fp8_meta["scaling_fwd"].amax_history[0]
    torch.testing.assert_close(amax[:2], torch.stack([x.abs().max(), layer.weight.abs().max()]))


def test_hybrid_gradients_are_e5m2_and_e4m3_ones_are_not(device):
    for fp8_format, dtype in ((Format.HYBRID, "kFloat8E5M2"), (Format.E4M3, "kFloat8E4M3")):
        layer = Linear(HIDDEN, 32, device=device)
        step(layer, sample(device), Float8CurrentScaling(fp8_format=fp8_format))
        assert layer.quantizers["scaling_bwd"][0].dtype.name == dtype
        assert layer.quantizers["scaling_fwd"][0].dtype.name == "kFloat8E4M3"


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.sampled
def test_quantized_parameters_train(kind, name, device):
    with quantized_model_init(recipe=RECIPES[name], preserve_high_precision_init_val=True):
        layer = LAYERS[kind](device=device)
    weights = [p for p in layer.parameters() if isinstance(p, QuantizedTensor)]
    assert len(weights) == layer.num_products
    initial = weights[0].get_high_precision_init_val()
    assert initial.device.type == "cpu" and initial.shape == weights[0].shape
    error = (weights[0].dequantize().cpu() - initial).norm() / initial.norm()
    assert 0 < float(error.detach()) < 0.2
    assert weights[0]._high_precision_init_val is initial
    twin, moved = copy.deepcopy(weights[0]), weights[0].detach()
    weights[0].clear_high_precision_init_val()
    assert weights[0].get_high_precision_init_val() is None
    assert not hasattr(weights[0], "_high_precision_init_val")
    for other in (twin, moved):
        assert torch.equal(other.get_high_precision_init_val(), initial)
        other.clear_high_precision_init_val()
        assert other.get_high_precision_init_val() is None
    x = sample(device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.02)
    losses = []
    for _ in range(8):
        with autocast(recipe=RECIPES[name]):
            loss = (layer(x) - 1.0).square().sum(-1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    assert losses[-1] < 0.7 * losses[0]
    assert not torch.equal(weights[0].dequantize().cpu(), initial)


@pytest.mark.parametrize(
    ("name", "kind"),
    cross_cases(
        ["current", "block", "mxfp8"],
        LAYERS,
        {
            ("mxfp8", "linear"),
            ("block", "layernorm_linear"),
            ("current", "layernorm_mlp"),
        },
    ),
)
@pytest.mark.sampled(1)
def test_quantized_parameters_compile_in_one_graph(kind, name, device):
    with quantized_model_init(recipe=RECIPES[name]):
        layer = LAYERS[kind](device=device)
    torch._dynamo.reset()
    x = sample(device)
    eager = step(layer, x, RECIPES[name])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with autocast(recipe=RECIPES[name]):
        y = compiled(x)
    (y.sin().sum() * 3).backward()
    assert same_as_eager(eager, [y.detach(), x.grad, *(p.grad for p in layer.parameters())])


def test_quantized_parameters_need_their_own_recipe(device):
    with quantized_model_init(recipe=Float8CurrentScaling()):
        layer = Linear(HIDDEN, 32, device=device)
    with autocast(recipe=MXFP8BlockScaling()), pytest.raises(RuntimeError, match="Recipe mismatch"):
        layer(sample(device))


def test_quantized_parameters_run_in_high_precision_too(device):
    with quantized_model_init(recipe=Float8CurrentScaling()):
        layer = Linear(HIDDEN, 32, device=device)
    x = sample(device)
    y = layer(x)
    torch.testing.assert_close(y, F.linear(x, layer.weight.dequantize(), layer.bias))


def test_quantized_parameters_survive_a_checkpoint(device):
    with quantized_model_init(recipe=DelayedScaling()):
        layer, restored = Linear(HIDDEN, 32, device=device), Linear(HIDDEN, 32, device=device)
    step_recipe = DelayedScaling()
    x = sample(device)
    with autocast(recipe=step_recipe):
        layer(x).sum().backward()
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    restored.load_state_dict(torch.load(file, weights_only=True))
    assert isinstance(restored.weight, Float8Tensor)
    assert torch.equal(restored.weight.dequantize(), layer.weight.dequantize())


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_quantized_outputs_feed_the_next_layer(name, device):
    first = Linear(HIDDEN, HIDDEN, device=device, bias=False)
    second = Linear(HIDDEN, 32, device=device, bias=False)
    x = sample(device)
    for _ in range(3):
        with autocast(recipe=RECIPES[name]):
            hidden = first(x, fp8_output=True)
            y = second(hidden, fp8_grad=True)
        y.sum().backward()
    assert isinstance(hidden, Float8Tensor)
    exact = F.linear(F.linear(x, first.weight), second.weight)
    assert float((y - exact).norm() / exact.norm()) < 0.15
    assert torch.isfinite(x.grad).all() and x.grad.any()


def test_save_original_input_saves_the_input_and_rejects_delayed_scaling(device):
    layer = Linear(HIDDEN, 32, device=device, save_original_input=True)
    twin = Linear(HIDDEN, 32, device=device)
    twin.load_state_dict(layer.state_dict())
    x = sample(device)
    assert same(step(layer, x, RECIPES["current"]), step(twin, x, RECIPES["current"]))
    with pytest.raises(ValueError, match="does not work with DelayedScaling"):
        step(layer, x, RECIPES["delayed"])


@pytest.mark.parametrize("rows", [(0,), (1,), (7,), (17,), (3, 5)])
@pytest.mark.parametrize("name", RECIPES)
def test_any_number_of_rows_works(rows, name, device):
    layer = Linear(HIDDEN, 32, device=device)
    x = sample(device, rows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = step(layer, x, RECIPES[name])
    assert results[0].shape == (*rows, 32)
    assert all(torch.isfinite(r).all() for r in results)


@pytest.mark.parametrize("name", QUANTIZED)
def test_odd_features_run_with_one_warning_at_most(name, device):
    layer = Linear(37, 21, device=device)
    x = torch.randn(5, 37, device=device, requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first = step(layer, x, RECIPES[name])
        step(layer, x, RECIPES[name])
    # Package warnings only: the garbage collector may close a file from an earlier test and warn about it.
    assert len([w for w in caught if w.category is not ResourceWarning]) <= 1
    exact = F.linear(x, layer.weight, layer.bias)
    assert float((first[0] - exact).detach().norm() / exact.norm()) < 0.3


def test_a_wrong_last_dimension_names_both_sizes(device):
    with pytest.raises(ValueError, match=r"takes \[\.\., 64\], the input is \[2, 63\]"):
        Linear(HIDDEN, 32, device=device)(torch.randn(2, 63, device=device))


def test_a_wrong_dtype_names_the_remedy(device):
    with pytest.raises(TypeError, match=r"torch\.autocast"):
        Linear(HIDDEN, 32, device=device)(
            torch.randn(2, HIDDEN, device=device, dtype=torch.bfloat16)
        )


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: Linear(8, 8, parallel_mode="diagonal", device="cpu"), ValueError, "diagonal"),
        (
            lambda: Linear(8, 9, parallel_mode="column", tp_size=2, device="cpu"),
            ValueError,
            "pad it to 10",
        ),
        (
            lambda: LayerNormLinear(8, 8, parallel_mode="row", device="cpu"),
            NotImplementedError,
            "LayerNorm followed",
        ),
        (
            lambda: LayerNormLinear(8, 8, normalization="BatchNorm", device="cpu"),
            ValueError,
            "BatchNorm",
        ),
        (lambda: LayerNormMLP(8, 8, activation="tanh", device="cpu"), ValueError, "tanh"),
        (
            lambda: LayerNormMLP(8, 9, set_parallel_mode=True, tp_size=2, device="cpu"),
            ValueError,
            "tp_size=2",
        ),
    ],
)
def test_invalid_options_raise_at_construction(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_the_default_device_is_the_gpu_if_present():
    layer = Linear(8, 8)
    assert layer.weight.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
