"""GroupedLinear with one weight [n, N, K] and one bias [n, N] is bitwise equal to one parameter per group."""

from __future__ import annotations

import copy
import io

import pytest
import torch

from tests.support.layers import QUANTIZED, RECIPES, same
from transformer_engine.common.recipe import CustomRecipe
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.module.grouped_linear import GroupedLinear
from transformer_engine.pytorch.optimizers import FusedAdam, FusedSGD
from transformer_engine.pytorch.quantization import autocast, quantized_model_init
from transformer_engine.pytorch.tensor import (
    GroupedTensor,
    HybridQuantizer,
    MXFP8Quantizer,
    QuantizedTensor,
)
from transformer_engine.pytorch.tensor.module_parameters import (
    load_plain_state_dict,
    plain_state_dict,
)

GROUPS, IN, OUT = 4, 128, 64
SPLITS = [32, 64, 0, 32]
SINGLE = {"single_grouped_weight": True, "single_grouped_bias": True}


@pytest.fixture(autouse=True)
def _honoured(monkeypatch):
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")


def make_layer_pair(device, recipe=None, **options) -> tuple[GroupedLinear, GroupedLinear]:
    """Layers with stacked and with per-group parameters, equal in value; a recipe quantizes them."""
    layers = []
    for single in (SINGLE, {}):
        torch.manual_seed(3)
        with quantized_model_init(enabled=recipe is not None, recipe=recipe):
            layers.append(GroupedLinear(GROUPS, IN, OUT, device=device, **single, **options))
    return layers[0], layers[1]


def sample(device, dtype=torch.float32) -> torch.Tensor:
    values = torch.randn(sum(SPLITS), IN, generator=torch.Generator().manual_seed(1))
    return values.to(device, dtype).requires_grad_()


def stack_parameters(layer: GroupedLinear, of) -> list[torch.Tensor]:
    """`of` applied to every weight, as one stack, then to every bias."""
    kinds = ["weight", "bias"] if layer.use_bias else ["weight"]
    return [
        torch.stack([of(getattr(layer, f"{kind}{i}")) for i in range(GROUPS)]) for kind in kinds
    ]


def outcome(layer, x, recipe, **options) -> list[torch.Tensor]:
    """y, dx, dweight [n, N, K] and dbias [n, N]."""
    with autocast(enabled=recipe is not None, recipe=recipe):
        y = layer(x, SPLITS, **options)
    y = y[0] if isinstance(y, tuple) else y
    (y.float().sin().sum() * 3).backward()
    if layer.single_grouped_weight:
        grads = [p.grad for p in layer.parameters()]
    else:
        grads = stack_parameters(layer, lambda p: torch.zeros_like(p) if p.grad is None else p.grad)
    dx, x.grad = x.grad, None
    layer.zero_grad()
    return [y.detach(), dx, *grads]


def test_stacked_parameters_equal_separate_parameters(device):
    single, separate = make_layer_pair(device)
    assert [name for name, _ in single.named_parameters()] == ["weight", "bias"]
    assert single.weight.shape == (GROUPS, OUT, IN) and single.bias.shape == (GROUPS, OUT)
    assert same([single.weight, single.bias], stack_parameters(separate, torch.Tensor.detach))
    assert isinstance(single.weight, torch.nn.Parameter) and not hasattr(single, "weight0")
    for group in (single.weight, single.bias):
        assert (
            isinstance(group, GroupedTensor)
            and group.quantizer is None
            and group.rowwise_data.dim() == 1
        )
        members = group.split_into_quantized_tensors()
        assert [type(member) for member in members] == [torch.Tensor] * GROUPS


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.sampled
def test_stacked_results_and_gradients_equal_separate_parameters(name, bias, device):
    single, separate = make_layer_pair(device, bias=bias)
    for first in (None, True, False):
        ours, reference = (
            outcome(layer, sample(device), RECIPES[name], is_first_microbatch=first)
            for layer in (single, separate)
        )
        assert len(ours) == 3 + bias and same(ours, reference)


@pytest.mark.parametrize("name", ["none", "delayed", "current", "block"])
def test_grouped_products_with_stacks_equal_separate_parameters(name, device, monkeypatch):
    monkeypatch.setenv("NVTE_USE_CUTLASS_GROUPED_GEMM", "1")
    single, separate = make_layer_pair(device, params_dtype=torch.bfloat16)
    for first in (None, True, False):
        ours, reference = (
            outcome(layer, sample(device, torch.bfloat16), RECIPES[name], is_first_microbatch=first)
            for layer in (single, separate)
        )
        assert same(ours, reference)


@pytest.mark.parametrize("joint", ["0", "1"])
@pytest.mark.parametrize("delayed", [False, True])
def test_gradients_are_accumulated_into_one_main_grad(joint, delayed, device, monkeypatch):
    monkeypatch.setenv("NVTE_USE_CUTLASS_GROUPED_GEMM", joint)
    options = {
        "fuse_wgrad_accumulation": True,
        "delay_wgrad_compute": delayed,
        "params_dtype": torch.bfloat16,
    }
    single, separate = make_layer_pair(device, **options)
    for layer in (single, separate):
        for p in layer.parameters():
            p.main_grad = torch.ones(p.shape, device=device)
    single.weight.grad_added_to_main_grad = False
    for layer in (single, separate):
        outcome(layer, sample(device, torch.bfloat16), None)
        layer.backward_dw()
    (main_grad, _) = stack_parameters(separate, lambda p: p.main_grad)
    assert torch.equal(single.weight.main_grad, main_grad) and single.weight.grad_added_to_main_grad


def test_backward_dw_computes_delayed_gradients(device):
    late, now = (make_layer_pair(device, delay_wgrad_compute=late)[0] for late in (True, False))
    for layer in (late, now):
        layer(sample(device), SPLITS).sin().sum().backward()
    assert late.weight.grad is None and late.bias.grad is not None
    late.backward_dw()
    torch.testing.assert_close(late.weight.grad, now.weight.grad, rtol=1e-6, atol=1e-6)


def test_return_bias_returns_one_bias_per_group(device):
    single, _ = make_layer_pair(device, return_bias=True)
    _, biases = single(sample(device), SPLITS)
    assert [bias.shape for bias in biases] == [(OUT,)] * GROUPS
    torch.stack(biases).sum().backward()
    assert torch.equal(single.bias.grad, torch.ones(GROUPS, OUT, device=device))


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_stacks_have_the_same_codes_as_separate_parameters(name, device):
    single, separate = make_layer_pair(device, RECIPES[name])
    assert isinstance(single.weight, GroupedTensor) and isinstance(single.weight, QuantizedTensor)
    assert single.weight.shape == (GROUPS, OUT, IN) and single.weight.data._base is None
    for i, member in enumerate(single.weight.split_into_quantized_tensors()):
        assert type(member) is type(getattr(separate, f"weight{i}").data)
        assert torch.equal(member.dequantize(), getattr(separate, f"weight{i}").dequantize())
    ours, reference = (
        outcome(layer, sample(device), RECIPES[name]) for layer in (single, separate)
    )
    assert same(ours, reference)


@pytest.mark.parametrize("name", QUANTIZED)
def test_members_are_views_of_the_buffers(name, device):
    single, _ = make_layer_pair(device, RECIPES[name])
    single.weight.split_into_quantized_tensors()[2].quantize_(
        torch.full((OUT, IN), 2.0, device=device)
    )
    values = single.weight.dequantize()
    assert torch.equal(values[2], torch.full_like(values[2], 2.0)) and not torch.equal(
        values[1], values[2]
    )


@pytest.mark.parametrize("name", [None, *QUANTIZED])
@pytest.mark.parametrize("direction", ["to separate", "to single", "to itself"])
@pytest.mark.sampled
def test_checkpoints_convert_between_stacked_and_separate_parameters_bitwise(
    name, direction, device
):
    recipe = RECIPES[name or "none"]
    saved, other = make_layer_pair(device, recipe)
    if direction == "to single":
        saved, other = other, saved
    loaded = copy.deepcopy(saved if direction == "to itself" else other)
    with torch.no_grad():
        for p in loaded.parameters():
            p.zero_()
        for p in saved.parameters():
            p.add_(0.25)
    file = io.BytesIO()
    torch.save(saved.state_dict(), file)
    file.seek(0)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    assert same(outcome(loaded, sample(device), recipe), outcome(saved, sample(device), recipe))


@pytest.mark.parametrize("name", QUANTIZED)
def test_plain_tensors_store_a_quantized_stack(name, device):
    single, _ = make_layer_pair(device, RECIPES[name])
    repeated = copy.deepcopy(single)
    with torch.no_grad():
        repeated.weight.zero_()
    load_plain_state_dict(repeated, plain_state_dict(single))
    assert torch.equal(repeated.weight.dequantize(), single.weight.dequantize())


@pytest.mark.parametrize("name", QUANTIZED)
def test_an_optimizer_trains_a_quantized_stack_as_separate_parameters(name, device):
    single, separate = make_layer_pair(device, RECIPES[name], bias=False)
    optimizers = [
        FusedAdam(layer.parameters(), lr=0.1, master_weights=True) for layer in (single, separate)
    ]
    for _ in range(2):
        for layer, optimizer in zip((single, separate), optimizers, strict=True):
            with autocast(recipe=RECIPES[name]):
                layer(sample(device), SPLITS).sin().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(
        single.weight.dequantize(), stack_parameters(separate, lambda p: p.dequantize())[0]
    )


@pytest.mark.parametrize("name", ["none", "current"])
def test_compiling_in_one_graph_keeps_the_bits(name, device):
    recipe = RECIPES[name]
    torch._dynamo.reset()
    with quantized_model_init(enabled=recipe is not None, recipe=recipe):
        layer = GroupedLinear(1, IN, OUT, device=device, **SINGLE)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    results = []
    for call in (layer, compiled):
        with autocast(enabled=recipe is not None, recipe=recipe):
            y = call(sample(device), [sum(SPLITS)])
        y.sin().sum().backward()
        results.append([y.detach(), layer.weight.grad, layer.bias.grad])
        layer.zero_grad()
    assert same(*results)


def test_initial_values_of_a_quantized_stack_are_kept(device):
    with quantized_model_init(recipe=RECIPES["mxfp8"], preserve_high_precision_init_val=True):
        layer = GroupedLinear(GROUPS, IN, OUT, device=device, **SINGLE)
    values = layer.weight.get_high_precision_init_val()
    assert values.shape == (GROUPS, OUT, IN)
    torch.testing.assert_close(layer.weight.dequantize().cpu(), values, rtol=0.07, atol=1e-3)


def test_formats_without_plain_codes_and_scales_are_rejected(device):
    def hybrid(_):
        return HybridQuantizer(*(MXFP8Quantizer(DType.kFloat8E4M3) for _ in range(2)))

    with (
        quantized_model_init(recipe=CustomRecipe(qfactory=hybrid)),
        pytest.raises(
            NotImplementedError,
            match="matrices of HybridQuantizedTensorStorage do not go into one buffer",
        ),
    ):
        GroupedLinear(GROUPS, IN, OUT, device=device, **SINGLE)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=False),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: FusedAdam(parameters, lr=0.1),
        lambda parameters: FusedAdam(parameters, lr=0.1, master_weights=True),
        lambda parameters: FusedSGD(parameters, lr=0.1, momentum=0.9),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_trains_plain_groups_as_separate_parameters(optimizer, dtype, device):
    layers = make_layer_pair(device, params_dtype=dtype)
    optimizers = [optimizer(list(layer.parameters())) for layer in layers]
    addresses = [p.rowwise_data.data_ptr() for p in layers[0].parameters()]
    for _ in range(3):
        for layer, step in zip(layers, optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_(layer.parameters(), 1e6)
            layer(sample(device, dtype), SPLITS).sin().sum().backward()
            step.step()
            step.zero_grad()
    single, separate = layers
    assert same(
        [single.weight.dequantize(), single.bias.dequantize()],
        stack_parameters(separate, torch.Tensor.detach),
    )
    assert [p.rowwise_data.data_ptr() for p in single.parameters()] == addresses


def test_a_plain_stack_from_an_older_checkpoint_loads(device):
    single, _ = make_layer_pair(device)
    weight, bias = torch.randn(GROUPS, OUT, IN), torch.randn(GROUPS, OUT)
    single.load_state_dict(
        {"weight": weight, "bias": bias, "_extra_state": torch.empty(0)}, strict=False
    )
    assert torch.equal(single.weight.dequantize().cpu(), weight) and isinstance(
        single.weight, GroupedTensor
    )
    assert torch.equal(single.bias.dequantize().cpu(), bias)


def test_dtype_and_device_conversions_keep_plain_groups(device):
    single, separate = make_layer_pair(device)
    for layer in (single, separate):
        layer.to(torch.bfloat16)
    assert (
        isinstance(single.weight, GroupedTensor)
        and single.weight.rowwise_data.dtype == torch.bfloat16
    )
    ours, reference = (
        outcome(layer, sample(device, torch.bfloat16), None) for layer in (single, separate)
    )
    assert same(ours, reference)
    with torch.device("meta"):
        layer = GroupedLinear(GROUPS, IN, OUT, device="meta", **SINGLE)
    layer.reset_parameters()
    assert isinstance(layer.weight, GroupedTensor) and not layer.weight.is_meta


def test_views_of_plain_groups_share_their_memory(device):
    single, _ = make_layer_pair(device)
    weight = single.weight.detach()
    flat, member, part = weight.view(-1), weight[1], weight.split(2)[1]
    assert flat.data_ptr() == weight.rowwise_data.data_ptr() and type(member) is torch.Tensor
    flat.zero_()
    part.add_(1.0)
    assert not member.any() and bool((weight.dequantize()[2:] == 1.0).all())


def test_a_callers_buffer_can_replace_a_plain_groups_memory(device):
    single, separate = make_layer_pair(device)
    buffer = torch.empty(single.weight.numel(), device=device)
    buffer.copy_(single.weight.detach().view(-1))
    # as where all parameters become views of one buffer
    single.weight.data = buffer.view(single.weight.shape)
    assert single.weight.rowwise_data.data_ptr() == buffer.data_ptr() and isinstance(
        single.weight, GroupedTensor
    )
    assert same(outcome(single, sample(device), None), outcome(separate, sample(device), None))
    buffer.zero_()
    assert not single.weight.dequantize().any()
