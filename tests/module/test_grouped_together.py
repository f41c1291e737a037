"""GroupedLinear with grouped products equals a loop over Linear layers for every recipe and all sizes."""

from __future__ import annotations

import copy
import importlib.util
from contextlib import nullcontext

import pytest
import torch

from tests.support.layers import RECIPES
from transformer_engine.common.recipe import NVFP4BlockScaling
from transformer_engine.pytorch import explain
from transformer_engine.pytorch.module.grouped_linear import GroupedLinear
from transformer_engine.pytorch.module.linear import Linear
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, autocast

IN, OUT = 256, 128
TOGETHER = ("none", "delayed", "current", "block")
# Few groups, many small groups, groups without rows, groups smaller than a tile; also with block scales.
SPLITS = {
    "few": [128, 256, 0, 128],
    "many": [48, 0, 16, 208, 128, 32, 64, 0, 80, 128, 16, 48],
    "ragged": [3, 131, 0, 0, 70, 1, 258, 17, 9, 40, 128, 5],
}


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Products summed in another order differ in the last bit of a bfloat16 result, 2^-9 of it."""
    ours, theirs = ours.float(), theirs.float()
    assert (ours - theirs).norm() <= 4e-3 * theirs.norm()
    assert (
        torch.equal(ours == 0, theirs == 0)
        or (ours - theirs).abs().max() < 1e-2 * theirs.abs().max()
    )


@pytest.fixture(autouse=True)
def _everywhere(monkeypatch):
    monkeypatch.setenv("NVTE_USE_CUTLASS_GROUPED_GEMM", "1")


def make_layer(splits, device, **options) -> GroupedLinear:
    options = {"bias": True, "params_dtype": torch.bfloat16, "device": device, **options}
    layer = GroupedLinear(len(splits), IN, OUT, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) / 8)
    return layer


def sample(splits, device) -> torch.Tensor:
    x = torch.randn(sum(splits), IN, device=device, dtype=torch.bfloat16)
    return x.requires_grad_()


def outcome(layer, x, splits, recipe, **options) -> list[torch.Tensor]:
    with autocast(enabled=recipe is not None, recipe=recipe):
        y = layer(x, splits, **options)
    y.backward(sample_gradient(y))
    results = [y.detach(), x.grad, *(p.grad for p in layer.parameters())]
    x.grad = None
    for parameter in layer.parameters():
        parameter.grad = None
    return results


def sample_gradient(y: torch.Tensor) -> torch.Tensor:
    """The same values for every output with a given shape."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(y.shape, generator=generator).to(y)


def one_by_one(monkeypatch, layer, *arguments, **options) -> list[torch.Tensor]:
    with monkeypatch.context() as patch:
        patch.setenv("NVTE_USE_CUTLASS_GROUPED_GEMM", "0")
        return outcome(layer, *arguments, **options)


def operations(layer, x, splits, recipe) -> set[str]:
    with autocast(enabled=recipe is not None, recipe=recipe):
        return {decision.operation for decision in explain(layer, x, splits).decisions}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("name", TOGETHER)
@pytest.mark.sampled
def test_grouped_results_equal_those_one_by_one(name, splits, bias, device, monkeypatch):
    joint = make_layer(splits, device, bias=bias)
    alone = copy.deepcopy(joint)
    for _ in range(3):
        x = sample(splits, device)
        ours = outcome(joint, x, splits, RECIPES[name])
        reference = one_by_one(monkeypatch, alone, x, splits, RECIPES[name])
        for actual, other in zip(ours, reference, strict=True):
            assert_close(actual, other)


@pytest.mark.parametrize("name", TOGETHER)
def test_the_environment_variable_disables_grouped_products(name, device, monkeypatch):
    splits = SPLITS["many"]
    layer, x = make_layer(splits, device), sample(splits, device)
    assert "grouped_gemm" in operations(layer, x, splits, RECIPES[name])
    monkeypatch.setenv("NVTE_USE_CUTLASS_GROUPED_GEMM", "0")
    assert "grouped_gemm" not in operations(layer, x, splits, RECIPES[name])


REASONS = {
    "NVTE_USE_CUTLASS_GROUPED_GEMM=0": ({}, torch.bfloat16, "0"),
    "the input is torch.float32": ({"params_dtype": torch.float32}, torch.float32, "1"),
    "it does not support delayed weight gradients": (
        {"delay_wgrad_compute": True},
        torch.bfloat16,
        "1",
    ),
    "it does not support save_original_input": ({"save_original_input": True}, torch.bfloat16, "1"),
}


@pytest.mark.parametrize("reason", REASONS)
def test_the_explanation_reports_why_groups_run_one_by_one(reason, device, monkeypatch):
    options, dtype, requested = REASONS[reason]
    splits = SPLITS["many"]
    layer = GroupedLinear(
        len(splits), IN, OUT, device=device, **{"params_dtype": torch.bfloat16, **options}
    )
    x = torch.randn(sum(splits), IN, device=device, dtype=dtype)
    monkeypatch.setenv("NVTE_USE_CUTLASS_GROUPED_GEMM", requested)
    explained = explain(layer, x, splits, backward=False)
    (way,) = (
        decision for decision in explained.decisions if decision.operation == "grouped_linear"
    )
    assert way.chosen == "loop"
    assert reason in way.verdicts[0].reason
    monkeypatch.setenv("NVTE_USE_CUTLASS_GROUPED_GEMM", "1")
    plain = GroupedLinear(len(splits), IN, OUT, device=device, params_dtype=torch.bfloat16)
    explained = explain(plain, x.bfloat16(), splits, backward=False)
    assert "grouped_linear: together (1x)" in str(explained)


def test_grouped_and_one_by_one_runs_keep_equal_delayed_scaling_states(device, monkeypatch):
    splits = SPLITS["many"]
    joint = make_layer(splits, device)
    alone = copy.deepcopy(joint)
    for _ in range(3):
        x = sample(splits, device)
        outcome(joint, x, splits, RECIPES["delayed"])
        one_by_one(monkeypatch, alone, x, splits, RECIPES["delayed"])
    for key in ("scaling_fwd", "scaling_bwd"):
        ours, reference = joint.fp8_meta[key], alone.fp8_meta[key]
        assert torch.equal(ours.scale, reference.scale)
        assert torch.equal(ours.amax_history, reference.amax_history)
        assert ours.amax_history.any()


def test_a_state_from_a_checkpoint_applies_to_all_groups(device):
    splits = SPLITS["few"]
    layer, fresh = make_layer(splits, device), make_layer(splits, device)
    x = sample(splits, device)
    for _ in range(2):
        outcome(layer, x, splits, RECIPES["delayed"])
        outcome(fresh, x, splits, RECIPES["delayed"])
    fresh.load_state_dict(copy.deepcopy(layer.state_dict()))
    FP8GlobalStateManager.reset()
    for actual, other in zip(
        outcome(fresh, x, splits, RECIPES["delayed"]),
        outcome(layer, x, splits, RECIPES["delayed"]),
        strict=True,
    ):
        assert torch.equal(actual, other)


@pytest.mark.parametrize("name", TOGETHER)
def test_device_splits_are_bitwise_equal_to_host_splits(name, device):
    splits = SPLITS["ragged"]
    layer, x = make_layer(splits, device), sample(splits, device)
    listed = outcome(copy.deepcopy(layer), x, splits, RECIPES[name])
    tensor = outcome(layer, x, torch.tensor(splits, device=device), RECIPES[name])
    for actual, other in zip(tensor, listed, strict=True):
        assert torch.equal(actual, other)


@pytest.mark.parametrize("name", TOGETHER)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.sampled
def test_fused_weight_gradients_accumulate_into_main_grad(name, dtype, device):
    splits = SPLITS["many"]
    fused = make_layer(splits, device, bias=False, fuse_wgrad_accumulation=True)
    plain = make_layer(splits, device, bias=False)
    plain.load_state_dict(fused.state_dict())
    for parameter in fused.parameters():
        parameter.main_grad = torch.ones_like(parameter, dtype=dtype)
    x = sample(splits, device)

    def gradients(layer, **options):
        with autocast(enabled=name != "none", recipe=RECIPES[name]):
            y = layer(x, splits, **options)
        y.backward(sample_gradient(y))
        return list(layer.parameters())

    for ours, reference in zip(gradients(fused), gradients(plain), strict=True):
        assert ours.grad is None
        assert_close(ours.main_grad, reference.grad + 1)
        reference.grad = None
    # A step's first microbatch overwrites the previous step's gradients.
    for ours, reference in zip(
        gradients(fused, is_first_microbatch=True), gradients(plain), strict=True
    ):
        assert_close(ours.main_grad, reference.grad)


@pytest.mark.parametrize("first", [False, True])
def test_experts_that_share_one_main_grad_add_their_gradients(first, device):
    splits = SPLITS["many"]
    fused = make_layer(splits, device, bias=False, fuse_wgrad_accumulation=True)
    plain = make_layer(splits, device, bias=False)
    plain.load_state_dict(fused.state_dict())
    shared = torch.ones(OUT, IN, device=device)
    for number, parameter in enumerate(fused.parameters()):
        parameter.main_grad = shared if number in (1, 3, 7) else torch.ones(OUT, IN, device=device)
    x = sample(splits, device)
    for layer in (fused, plain):
        y = layer(x, splits, **({"is_first_microbatch": True} if first and layer is fused else {}))
        y.backward(sample_gradient(y))
    before = 0.0 if first else 1.0
    reference = [parameter.grad.float() for parameter in plain.parameters()]
    assert_close(shared, reference[1] + reference[3] + reference[7] + before)
    assert_close(fused.weight0.main_grad, reference[0] + before)


@pytest.mark.parametrize("name", ["delayed", "current", "block"])
def test_later_microbatches_use_the_first_microbatchs_weights(name, device, monkeypatch):
    splits = SPLITS["many"]
    layer, x = make_layer(splits, device), sample(splits, device)
    with autocast(recipe=RECIPES[name]):
        first = layer(x, splits, is_first_microbatch=True)
        with torch.no_grad():
            layer.weight3.zero_()
        later = layer(x, splits, is_first_microbatch=False)
        uncached = layer(x, splits)
    assert torch.equal(first, later)
    assert not torch.equal(first, uncached)
    if name == "delayed":  # whose scales have changed
        return
    # A first microbatch that runs one by one leaves no stale weights in the cache.
    monkeypatch.setenv("NVTE_USE_CUTLASS_GROUPED_GEMM", "0")
    with autocast(recipe=RECIPES[name]):
        layer(x, splits, is_first_microbatch=True)
    monkeypatch.setenv("NVTE_USE_CUTLASS_GROUPED_GEMM", "1")
    with autocast(recipe=RECIPES[name]):
        assert_close(layer(x, splits, is_first_microbatch=False), uncached)


def test_frozen_weights_and_inputs_get_no_gradient(device):
    splits = SPLITS["few"]
    layer, x = make_layer(splits, device, bias=False), sample(splits, device)
    layer.requires_grad_(False)
    with autocast(recipe=RECIPES["current"]):
        layer(x, splits).float().sum().backward()
    assert x.grad is not None and layer.weight0.grad is None
    layer.requires_grad_(True)
    with autocast(recipe=RECIPES["current"]):
        layer(x.detach(), splits).float().sum().backward()
    assert all(weight.grad is not None for weight in layer.parameters())
    assert not layer.weight2.grad.any()  # a group without rows


def test_partly_frozen_weights_run_one_by_one(device):
    splits = SPLITS["few"]
    layer, x = make_layer(splits, device), sample(splits, device)
    layer.weight1.requires_grad_(False)
    assert "grouped_gemm" not in operations(layer, x, splits, None)
    layer(x, splits).sum().backward()
    assert layer.weight1.grad is None and layer.weight0.grad is not None


def test_weights_moved_between_forward_and_backward_are_found(device):
    splits = SPLITS["few"]
    layer, x = make_layer(splits, device, bias=False), sample(splits, device)
    expected = outcome(layer, x, splits, None)
    y = layer(x, splits)
    for parameter in layer.parameters():
        parameter.data = parameter.data.clone()
    y.backward(sample_gradient(y))
    assert torch.equal(x.grad, expected[1])


def test_return_bias_leaves_the_biases_to_the_caller(device):
    splits = SPLITS["many"]
    layer, x = make_layer(splits, device, return_bias=True), sample(splits, device)
    y, biases = layer(x, splits)
    assert [torch.equal(b, getattr(layer, f"bias{i}")) for i, b in enumerate(biases)] == [
        True
    ] * len(splits)
    added = torch.cat([part + b for part, b in zip(y.split(splits), biases, strict=True)])
    layer.return_bias = False
    assert_close(layer(x, splits), added)


@pytest.mark.parametrize("splits", [[64, 64], [32, 32, 32, 31], [64, 96, -32, 0]])
def test_splits_that_do_not_cover_the_rows_are_rejected(splits, device):
    layer = make_layer([32] * 4, device)
    with pytest.raises(ValueError, match="splits"):
        layer(sample([128], device), splits)


SCALED = {
    "mxfp8": RECIPES["mxfp8"],
    "nvfp4": RECIPES["nvfp4"],
    "nvfp4 per row": NVFP4BlockScaling(
        row_scaled_activation=True, disable_rht=True, disable_stochastic_rounding=True
    ),
    "nvfp4 stochastic": NVFP4BlockScaling(),
}
WHOLE_BLOCKS = {"few": [128, 256, 0, 128], "many": [32, 0, 64, 224, 128, 32, 96, 0, 160]}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("splits", WHOLE_BLOCKS.values(), ids=WHOLE_BLOCKS)
@pytest.mark.parametrize("options", [{}, {"single_grouped_weight": True}], ids=["", "stacked"])
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "nvfp4 per row", "nvfp4 stochastic"])
@pytest.mark.sampled(pairs=True)
def test_groups_with_full_blocks_equal_one_by_one_runs(
    name, splits, bias, options, device, monkeypatch
):
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    joint = make_layer(splits, device, bias=bias, **options)
    alone = copy.deepcopy(joint)
    x, recipe = sample(splits, device), SCALED[name]
    assert "grouped_gemm" in operations(joint, x, splits, recipe)
    assert "grouped_gemm" in operations(joint, x, torch.tensor(splits, device=device), recipe)
    for first_microbatch in (None, True, False):
        passed = {} if first_microbatch is None else {"is_first_microbatch": first_microbatch}
        torch.manual_seed(3)
        ours = outcome(joint, x, splits, recipe, **passed)
        torch.manual_seed(3)
        reference = one_by_one(monkeypatch, alone, x, splits, recipe, **passed)
        for actual, other in zip(ours, reference, strict=True):
            assert_close(actual, other)


@pytest.mark.parametrize("splits", [[128, 16, 112], [40, 0, 88]])
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_groups_that_divide_a_block_run_one_by_one(name, splits, device):
    layer, x = make_layer(splits, device), sample(splits, device)
    fits = name == "nvfp4" and splits[1] == 16  # whole blocks of 16, but not of 32
    expected = nullcontext() if fits else pytest.warns(UserWarning, match="high precision")
    with autocast(recipe=RECIPES[name]), expected:
        explained = explain(layer, x, splits)
    assert "grouped_gemm" not in {decision.operation for decision in explained.decisions}
    (way,) = (
        decision for decision in explained.decisions if decision.operation == "grouped_linear"
    )
    assert "rows are not multiples of the format's blocks" in str(way.verdicts[0].reason)


def test_float32_groups_run_one_by_one_and_are_bitwise_equal_to_linear(device):
    splits = SPLITS["few"]
    layer = make_layer(splits, device, params_dtype=torch.float32)
    x = torch.randn(sum(splits), IN, device=device)
    linears = [Linear(IN, OUT, device=device) for _ in splits]
    with torch.no_grad():
        for i, linear in enumerate(linears):
            linear.weight.copy_(getattr(layer, f"weight{i}"))
            linear.bias.copy_(getattr(layer, f"bias{i}"))
    parts = [linear(part) for linear, part in zip(linears, x.split(splits), strict=True)]
    assert torch.equal(layer(x, splits), torch.cat(parts))


@pytest.mark.gpu
@pytest.mark.skipif(
    importlib.util.find_spec("nvmath") is not None,
    reason="nvmath's products have bits of their own",
)
@pytest.mark.parametrize("name", TOGETHER)
def test_few_grouped_products_are_bitwise_equal_to_one_by_one_runs(name, monkeypatch):
    splits = SPLITS["few"]
    joint = make_layer(splits, "cuda", bias=False)
    alone = copy.deepcopy(joint)
    for _ in range(3):
        x = sample(splits, "cuda")
        ours = outcome(joint, x, splits, RECIPES[name])
        reference = one_by_one(monkeypatch, alone, x, splits, RECIPES[name])
        for actual, other in zip(ours, reference, strict=True):
            assert torch.equal(actual, other)


@pytest.mark.gpu
def test_a_step_with_many_groups_is_captured_in_a_graph():
    splits = SPLITS["many"]
    layer, x = make_layer(splits, "cuda", bias=False), sample(splits, "cuda")
    expected = outcome(layer, x, splits, RECIPES["current"])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        outcome(layer, x, splits, RECIPES["current"])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    gradient = sample_gradient(expected[0])
    with torch.cuda.graph(graph), autocast(recipe=RECIPES["current"]):
        y = layer(x, splits)
        grads = torch.autograd.grad(y, [x, *layer.parameters()], gradient)
    graph.replay()
    torch.cuda.synchronize()
    for actual, other in zip((y, *grads), expected, strict=True):
        assert torch.equal(actual, other)
