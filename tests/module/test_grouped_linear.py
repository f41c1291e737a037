"""GroupedLinear is bitwise equal to a loop over Linear layers under every recipe."""

from __future__ import annotations

import io

import pytest
import torch

from tests.support.layers import QUANTIZED, RECIPES, same, same_as_eager
from transformer_engine.pytorch.module.grouped_linear import GroupedLinear
from transformer_engine.pytorch.module.linear import Linear
from transformer_engine.pytorch.quantization import (
    FP8GlobalStateManager,
    autocast,
    quantized_model_init,
)
from transformer_engine.pytorch.tensor import QuantizedTensor

GROUPS, IN, OUT = 4, 64, 32
SPLITS = [32, 64, 0, 32]


def make_linear_loop(layer: GroupedLinear) -> torch.nn.ModuleList:
    """One Linear per group, with the group's parameters."""
    linears = torch.nn.ModuleList(
        Linear(IN, OUT, bias=layer.use_bias, device=layer.weight0.device) for _ in SPLITS
    )
    with torch.no_grad():
        for i, linear in enumerate(linears):
            linear.weight.copy_(getattr(layer, f"weight{i}"))
            if layer.use_bias:
                linear.bias.copy_(getattr(layer, f"bias{i}"))
    return linears


def sample(device) -> torch.Tensor:
    return torch.randn(sum(SPLITS), IN, device=device, requires_grad=True)


def results(forward, parameters, x, recipe) -> list[torch.Tensor]:
    with autocast(enabled=recipe is not None, recipe=recipe):
        y = forward(x)
    (y.sin().sum() * 3).backward()
    grads = [x.grad, *(p.grad for p in parameters)]
    out = [y.detach(), *(g.clone() for g in grads)]
    x.grad = None
    for p in parameters:
        p.grad = None
    return out


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("bias", [False, True])
def test_results_equal_a_loop_of_linears_bit_for_bit(name, bias, device):
    layer = GroupedLinear(GROUPS, IN, OUT, bias=bias, device=device)
    linears = make_linear_loop(layer)
    weights = [f"weight{i}" for i in range(GROUPS)]
    ours = [getattr(layer, n) for n in [*weights, *(f"bias{i}" for i in range(GROUPS) if bias)]]
    reference = [linear.weight for linear in linears] + [linear.bias for linear in linears if bias]

    def loop(x):
        return torch.cat(
            [linear(part) for linear, part in zip(linears, x.split(SPLITS), strict=True)]
        )

    for _ in range(3):
        x = sample(device)
        assert same(
            results(lambda x: layer(x, SPLITS), ours, x, RECIPES[name]),
            results(loop, reference, x, RECIPES[name]),
        )


@pytest.mark.parametrize("name", ["none", "delayed", "current"])
@pytest.mark.sampled(1)
def test_compiling_in_one_graph_keeps_the_bits(name, device):
    def train(wrap):
        torch.manual_seed(5)
        FP8GlobalStateManager.reset()
        layer = GroupedLinear(GROUPS, IN, OUT, device=device)
        model, records = wrap(layer), []
        for _ in range(3):
            x = sample(device)
            records += results(
                lambda x: model(x, SPLITS), list(layer.parameters()), x, RECIPES[name]
            )
        return records

    torch._dynamo.reset()
    eager = train(lambda layer: layer)
    assert same_as_eager(
        eager, train(lambda layer: torch.compile(layer, fullgraph=True, backend="aot_eager"))
    )


def test_splits_may_be_a_tensor_and_leading_dimensions_are_kept(device):
    layer = GroupedLinear(GROUPS, IN, OUT, device=device)
    x = sample(device)
    y = layer(x.view(4, 32, IN), torch.tensor(SPLITS))
    assert y.shape == (4, 32, OUT)
    assert torch.equal(y.view(-1, OUT), layer(x, SPLITS))


def test_return_bias_returns_one_bias_per_group(device):
    layer = GroupedLinear(GROUPS, IN, OUT, return_bias=True, device=device)
    for i in range(GROUPS):
        torch.nn.init.normal_(getattr(layer, f"bias{i}"))
    y, biases = layer(sample(device), SPLITS)
    assert [torch.equal(b, getattr(layer, f"bias{i}")) for i, b in enumerate(biases)] == [
        True
    ] * GROUPS
    assert y.shape == (sum(SPLITS), OUT)


@pytest.mark.parametrize("fused", [False, True])
def test_delayed_and_fused_weight_gradients(fused, device):
    late = GroupedLinear(
        GROUPS, IN, OUT, device=device, delay_wgrad_compute=True, fuse_wgrad_accumulation=fused
    )
    now = GroupedLinear(GROUPS, IN, OUT, device=device)
    now.load_state_dict(late.state_dict())
    weights = [f"weight{i}" for i in range(GROUPS)]
    for n in weights:
        getattr(late, n).main_grad = torch.zeros_like(getattr(late, n))
    x = sample(device)
    for layer in (late, now):
        layer(x, SPLITS).sin().sum().backward()
    assert all(getattr(late, n).grad is None for n in weights)
    late.backward_dw()
    for n in weights:
        ours = getattr(late, n).main_grad if fused else getattr(late, n).grad
        torch.testing.assert_close(ours, getattr(now, n).grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_cached_weight_serves_later_microbatches(name, device):
    layer, x = GroupedLinear(GROUPS, IN, OUT, device=device), sample(device)
    with autocast(recipe=RECIPES[name]):
        layer(x, SPLITS, is_first_microbatch=True)
    cached = dict(layer._fp8_workspaces)
    assert set(cached) == {f"weight{i}" for i in range(GROUPS)}
    with autocast(recipe=RECIPES[name]):
        layer(x, SPLITS, is_first_microbatch=False)
    assert all(layer._fp8_workspaces[key] is cached[key] for key in cached)


def test_quantized_parameters_and_checkpoints(device):
    with quantized_model_init(recipe=RECIPES["current"]):
        layer, restored = (GroupedLinear(GROUPS, IN, OUT, device=device) for _ in range(2))
    assert isinstance(layer.weight3, QuantizedTensor)
    x = sample(device)
    with autocast(recipe=RECIPES["current"]):
        y = layer(x, SPLITS)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    restored.load_state_dict(torch.load(file, weights_only=True))
    with autocast(recipe=RECIPES["current"]):
        assert torch.equal(restored(x, SPLITS), y)


def test_an_unaligned_group_runs_in_high_precision_with_one_warning(device):
    layer = GroupedLinear(2, IN, OUT, device=device)
    x = torch.randn(37, IN, device=device)
    with (
        pytest.warns(UserWarning, match="pad their rows") as caught,
        autocast(recipe=RECIPES["nvfp4"]),
    ):
        y = layer(x, [32, 5])
        layer(x, [32, 5])
    assert len([w for w in caught if w.category is UserWarning]) == 1
    torch.testing.assert_close(
        y[32:], torch.nn.functional.linear(x[32:], layer.weight1, layer.bias1)
    )
    assert not torch.equal(y[:32], torch.nn.functional.linear(x[:32], layer.weight0, layer.bias0))


@pytest.mark.parametrize("splits", [[64, 64], [32, 32, 32, 31], [64, 96, -32, 0]])
def test_splits_that_do_not_cover_the_rows_are_rejected(splits, device):
    with pytest.raises(ValueError, match="must be 4 numbers >= 0 that add up to the 128 rows"):
        GroupedLinear(GROUPS, IN, OUT, device=device)(sample(device), splits)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"num_gemms": 0}, ValueError, "num_gemms=0"),
        ({"ub_overlap_ag": True}, ValueError, "ub_overlap"),
        ({"parallel_mode": "row", "tp_size": 2}, ValueError, "return_bias=True or bias=False"),
        ({"use_grouped_tensor": len}, TypeError, "use_grouped_tensor=.* is neither True nor False"),
    ],
)
def test_invalid_options_raise_at_construction(options, error, message):
    with pytest.raises(error, match=message):
        GroupedLinear(
            **{"num_gemms": 2, "in_features": 8, "out_features": 8, "device": "cpu", **options}
        )


def test_parameter_names_and_shard_shapes():
    layer = GroupedLinear(2, IN, OUT, parallel_mode="column", tp_size=2, device="cpu")
    assert [n for n, _ in layer.named_parameters()] == ["weight0", "bias0", "weight1", "bias1"]
    assert layer.weight0.shape == (OUT // 2, IN) and layer.weight0.partition_dim == 0


@pytest.mark.parametrize("quantized", [False, True])
def test_each_group_registers_its_weight_and_then_its_bias(quantized, device):
    with quantized_model_init(enabled=quantized, recipe=RECIPES["current"]):
        layer = GroupedLinear(GROUPS, IN, OUT, device="meta")
    names = [name for i in range(GROUPS) for name in (f"weight{i}", f"bias{i}")]
    assert [name for name, _ in layer.named_parameters()] == names
    layer.reset_parameters()
    assert [name for name, _ in layer.named_parameters()] == names
    assert [name for name in layer.state_dict() if not name.endswith("_extra_state")] == names
    without = GroupedLinear(GROUPS, IN, OUT, bias=False, device=device)
    assert [name for name, _ in without.named_parameters()] == names[::2]


def test_loading_a_state_dict_does_not_depend_on_key_order(device):
    layer, twin = (GroupedLinear(GROUPS, IN, OUT, device=device) for _ in range(2))
    state = layer.state_dict()
    weights_first = {
        name: state[name] for name in sorted(state, key=lambda name: name.startswith("bias"))
    }
    assert list(weights_first) != list(state)
    twin.load_state_dict(weights_first)
    assert all(
        torch.equal(a, b) for a, b in zip(layer.parameters(), twin.parameters(), strict=True)
    )
