"""LayerNormMLP's backward recomputes columns of its activation's output, also from a quantized input."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import transformer_engine.pytorch as te
from tests.support.training import same, train
from transformer_engine.common import recipe as recipes
from transformer_engine.common.dispatch import use_backend
from transformer_engine.pytorch.functions.fusions import (
    MLP_COLUMNS,
    MLP_INPUT,
    CachedInput,
    Columns,
)

TOKENS, HIDDEN, INNER = 48, 64, 128
SHAPE = (TOKENS, HIDDEN)
RECIPES: dict[str, Callable[[], recipes.Recipe]] = {
    "delayed": recipes.DelayedScaling,
    "current": recipes.Float8CurrentScaling,
    "power of two": lambda: recipes.Float8CurrentScaling(use_power_2_scales=True),
}


def mlp(activation: str, device: torch.device, **options) -> te.LayerNormMLP:
    torch.manual_seed(0)
    options = {"bias": False, "params_dtype": torch.bfloat16, "device": device} | options
    return te.LayerNormMLP(HIDDEN, INNER, activation=activation, **options)


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("activation", ["swiglu", "gelu", "clamped_swiglu"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_recomputed_columns_are_bitwise_equal_to_saved_columns(recipe, activation, bias, device):
    """Delayed scales change between each step's forward and backward pass."""
    with te.emulate():
        ours, less = train(mlp(activation, device, bias=bias), RECIPES[recipe](), SHAPE)
        with use_backend(mlp_columns="saved"):
            reference, more = train(mlp(activation, device, bias=bias), RECIPES[recipe](), SHAPE)
    assert same(ours, reference)
    summed = bias and (recipe == "delayed" or activation == "gelu")
    if torch.cuda.is_available():
        return  # some GPUs' products read the row-wise codes in both directions
    # One byte per element of the activation's output, without fc1's bias-gradient sums.
    assert more - less == (0 if summed else TOKENS * INNER)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize(
    "way", ["checkpoint", "reentrant", "option", "frozen fc2", "frozen fc1", "delay_wgrad"]
)
def test_recomputed_columns_work_with_other_options(recipe, way, device):
    """Checkpointed, partly frozen and delayed backward passes are bitwise equal to saved columns."""

    def measure() -> list[Tensor]:
        options = {"checkpoint": way == "option", "delay_wgrad_compute": way == "delay_wgrad"}
        layer = mlp("swiglu", device, **options)
        if way.startswith("frozen"):
            getattr(layer, f"{way[-3:]}_weight").requires_grad_(False)

        def run(layer: te.LayerNormMLP, x: Tensor) -> Tensor:
            if way in ("checkpoint", "reentrant"):
                return te.checkpoint(layer, x, use_reentrant=way == "reentrant")
            return layer(x)

        result = train(layer, RECIPES[recipe](), SHAPE, run=run)[0]
        if way == "delay_wgrad":
            layer.backward_dw()
            result += [p.grad for p in layer.parameters() if p.grad is not None]
        return result

    with te.emulate():
        ours = measure()
        with use_backend(mlp_columns="saved"):
            reference = measure()
    assert same(ours, reference)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_microbatches_and_retained_graphs_equal_saved_columns_bitwise(recipe, device):
    """Two forward passes precede their backward passes, and one graph is used twice."""

    def measure() -> list[Tensor]:
        layer = mlp("swiglu", device)
        torch.manual_seed(1)
        inputs = [
            torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, device=device) for _ in range(2)
        ]
        outputs = []
        for number, x in enumerate(inputs):
            x.requires_grad_()
            with te.autocast(recipe=RECIPES[recipe]()):
                outputs.append(layer(x, is_first_microbatch=number == 0))
        for y in outputs:
            y.float().sin().sum().backward(retain_graph=True)
        outputs[0].float().sum().backward()
        tensors = (*inputs, *layer.parameters())
        return [tensor.grad for tensor in tensors if tensor.grad is not None]

    with te.emulate():
        ours = measure()
        with use_backend(mlp_columns="saved"):
            reference = measure()
    assert same(ours, reference)


def gradient_difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max(((a - b).float().norm() / b.float().norm()).item() for a, b in pairs)


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_a_cached_quantized_input_leaves_the_output_and_halves_its_bytes(
    recipe, activation, device
):
    """E4M3 rounds to 2^-4 of a value: gradients differ by less from those with unrounded inputs."""
    with te.emulate():
        options = {"cache_quantized_activation_input": True}
        (y, *ours), less = train(mlp(activation, device, **options), RECIPES[recipe](), SHAPE, 1)
        (expected, *reference), more = train(mlp(activation, device), RECIPES[recipe](), SHAPE, 1)
    assert torch.equal(y, expected)
    assert 0 < gradient_difference(ours, reference) < 2**-3
    if not torch.cuda.is_available():
        width = 2 * INNER if activation == "swiglu" else INNER
        scales = TOKENS * (width // 128) * 4
        assert more - less == TOKENS * width - scales


@pytest.mark.parametrize("recipe", [None, recipes.Float8BlockScaling()], ids=["bfloat16", "block"])
def test_a_cached_quantized_input_changes_nothing_if_no_kernel_reads_it(recipe, device):
    with te.emulate(), te.autocast(enabled=False):
        results = []
        for cached in (True, False):
            layer = mlp("swiglu", device, cache_quantized_activation_input=cached)
            x = torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16, device=device, requires_grad=True)
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                layer(x).float().sin().sum().backward()
            results.append([x.grad, *[p.grad for p in layer.parameters()]])
    assert same(*results)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (CachedInput(False, "recomputed", 128), "cache_quantized_activation_input is False"),
        (CachedInput(True, "saved", 128), "only the kernel of mlp_columns=recomputed"),
        (CachedInput(True, "recomputed", 192), "192 columns, which is no multiple of 128"),
    ],
)
def test_saving_the_input_unquantized_has_a_reason(request_, reason):
    assert MLP_INPUT.choose(request_) == "values"
    refused = MLP_INPUT.named("quantized").rejection_reason(request_)
    assert refused is not None and reason in refused
    assert MLP_INPUT.choose(CachedInput(True, "recomputed", 128)) == "quantized"


def test_a_cached_quantized_input_is_an_attribute_that_takes_effect_in_the_next_call(device):
    with te.emulate():
        layer = mlp("swiglu", device)
        _, more = train(layer, recipes.Float8CurrentScaling(), SHAPE, 1)
        layer.cache_quantized_activation_input = True
        _, less = train(layer, recipes.Float8CurrentScaling(), SHAPE, 1)
    assert less < more


def test_four_layers_need_less_memory_at_the_peak():
    """Each layer saves one byte less per activation output; the last layer computes it at the peak."""
    layers = [mlp("swiglu", torch.device("meta")) for _ in range(4)]
    plans = []
    contexts = (
        contextlib.nullcontext(),
        use_backend(mlp_columns="saved"),
        contextlib.nullcontext(),
    )
    for number, context in enumerate(contexts):
        for layer in layers:
            layer.cache_quantized_activation_input = number == 2
        with context:
            x = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16, device="meta")
            plans.append(
                te.memory_plan(
                    torch.nn.Sequential(*layers),
                    recipes.Float8CurrentScaling(),
                    TOKENS,
                    inputs=(x,),
                )
            )
    assert plans[1].saved - plans[0].saved == pytest.approx(4 * TOKENS * INNER, abs=256)
    # A quantized activation input: one byte instead of two per element, and a scale per 128 elements, in the
    # allocator's units.
    assert plans[0].saved - plans[2].saved == pytest.approx(
        4 * TOKENS * 2 * INNER * (1 - 4 / 128), abs=4 * 512
    )
    assert plans[2].peak < plans[0].peak < plans[1].peak


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"needs_gradients": False}, "not both computed"),
        ({"repeats_forward": True}, "repeats the forward pass"),
        ({"activation": "separate"}, "does not quantize its output"),
        ({"one_scale": False}, "only codes with one scale"),
        ({"is_copy": False}, "read the codes by rows in both directions"),
        ({"gradient": "in_product"}, "a product computes"),
        ({"sums_bias_gradient": True}, "sums the columns for fc1's bias"),
        ({"communicates": True}, "exchanges values with other ranks"),
    ],
)
def test_saving_columns_instead_of_recomputing_has_a_reason(change, reason):
    recomputed = Columns(
        "fused_cast",
        "separate",
        one_scale=True,
        is_copy=True,
        needs_gradients=True,
        sums_bias_gradient=False,
        communicates=False,
        repeats_forward=False,
    )
    assert MLP_COLUMNS.choose(recomputed) == "recomputed"
    request = recomputed._replace(**change)
    assert MLP_COLUMNS.choose(request) == "saved"
    refused = MLP_COLUMNS.named("recomputed").rejection_reason(request)
    assert refused is not None and reason in refused
