"""GELU fused into an MLP's products: same results and gradients as separate steps, in less memory."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common.dispatch import observing
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
)

RECIPES = {
    "delayed": DelayedScaling(),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
}
HIDDEN, INNER, TOKENS = 64, 128, 32


@pytest.fixture
def apart():
    """A function that makes later calls compute GELU in separate steps."""
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(
            te.use_backend(mlp_activation="separate", mlp_gradient="separate")
        )


def mlp(device, dtype=torch.bfloat16, **options) -> te.LayerNormMLP:
    torch.manual_seed(3)
    layer = te.LayerNormMLP(HIDDEN, INNER, params_dtype=dtype, device=device, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return layer


def sample(device, dtype=torch.bfloat16) -> torch.Tensor:
    torch.manual_seed(4)
    return torch.randn(TOKENS, HIDDEN, dtype=dtype, device=device, requires_grad=True)


def step(layer, device, dtype=torch.bfloat16, recipe=None, steps: int = 1) -> list[torch.Tensor]:
    """Output and gradients from the last of `steps` steps."""
    items: list[torch.Tensor] = []
    for _ in range(steps):
        layer.zero_grad()
        x = sample(device, dtype)
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            outputs = layer(x)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        sum(y.float().sin().sum() for y in outputs).backward()
        parameters = [p.grad for p in layer.parameters() if p.requires_grad]
        items = [*(y.detach() for y in outputs), x.grad, *parameters]
    return items


def agree(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    """Compare bit for bit on a CPU, where both run the same steps; on a GPU within bfloat16 rounding."""
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        if not a.is_cuda:
            assert torch.equal(a, b)
        assert a.dtype == b.dtype and a.shape == b.shape
        assert float((a.double() - b.double()).norm()) <= 1.5e-2 * float(b.double().norm())


OPTIONS = {
    "plain": {},
    "no bias": {"bias": False},
    "checkpoint": {"checkpoint": True},
    "norm output": {"return_layernorm_output": True},
    "rms": {"normalization": "RMSNorm"},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_gelu_in_the_products_equals_separate_steps(options, dtype, device, apart):
    layer = mlp(device, dtype, **OPTIONS[options])
    joint = step(layer, device, dtype)
    apart()
    agree(joint, step(layer, device, dtype))


@pytest.mark.parametrize("frozen", ["fc1_bias", "fc1_weight", "fc2_weight", "fc2_bias"])
def test_parameters_without_gradients_change_no_other_gradient(frozen, device, apart):
    layer = mlp(device)
    getattr(layer, frozen).requires_grad_(False)
    joint = step(layer, device)
    assert getattr(layer, frozen).grad is None
    apart()
    agree(joint, step(layer, device))


def test_parameters_in_float32_under_autocast_get_the_same_gradients(device, apart):
    layer = mlp(device, torch.float32)

    def gradients() -> list[torch.Tensor]:
        layer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            y = layer(sample(device, torch.float32))
        assert y.dtype == torch.bfloat16
        y.float().sin().sum().backward()
        return [p.grad for p in layer.parameters()]

    joint = gradients()
    assert all(grad.dtype == torch.float32 for grad in joint)
    apart()
    agree(joint, gradients())


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("checkpoint", [False, True], ids=["", "checkpoint"])
def test_quantized_products_keep_separate_steps(name, checkpoint, device, apart):
    layer = mlp(device, checkpoint=checkpoint)
    twin = copy.deepcopy(layer)
    joint = step(layer, device, recipe=RECIPES[name], steps=3)
    apart()
    separate = step(twin, device, recipe=RECIPES[name], steps=3)
    assert all(torch.equal(a, b) for a, b in zip(joint, separate, strict=True))


def test_calibration_records_the_same_amaxes_with_gelu_in_the_products(device, apart):
    layer = mlp(device)
    twin = copy.deepcopy(layer)
    records = []
    for model in (layer, twin):
        with te.autocast(enabled=False, calibrating=True, recipe=RECIPES["delayed"]):
            model(sample(device))
        records.append(model.fp8_meta["scaling_fwd"].amax_history[0].clone())
        apart()
    assert records[0].any()
    torch.testing.assert_close(records[0], records[1], rtol=2.0**-6, atol=0.0)


def test_a_retained_graph_repeats_its_gradients(device):
    layer, x = mlp(device), sample(device)
    loss = layer(x).float().sin().sum()
    leaves = [x, *layer.parameters()]
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(loss, leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# tests/module/test_compiled_layers.py always compiles a LayerNormMLP, within a TransformerLayer.
@pytest.mark.slow
@pytest.mark.parametrize("options", ["plain", "checkpoint"])
def test_a_compiled_graph_contains_the_fused_products(options, device):
    results = []
    torch._dynamo.reset()
    for compiles in (False, True):
        layer = mlp(device, **OPTIONS[options])
        model = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiles else layer
        x = sample(device)
        y = model(x)
        y.float().sin().sum().backward()
        results.append([y.detach(), x.grad, *(p.grad for p in layer.parameters())])
    agree(*results)


def record_requests(model, x, grad: bool) -> list:
    records = []
    with (
        observing(lambda operation, request: records.append((operation, request))),
        torch.set_grad_enabled(grad),
    ):
        y = model(x)
        if grad:
            y.float().sum().backward()
    return [request for operation, request in records if operation == "gemm_epilogue"]


def test_gelus_input_is_stored_only_if_a_backward_may_follow(device):
    x = sample(device)
    training = record_requests(mlp(device), x, True)
    assert [(r.kind, r.second) for r in training] == [("gelu", True), ("gelu_gradient", False)]
    assert [(r.kind, r.second) for r in record_requests(mlp(device), x, False)] == [("gelu", True)]
    assert [(r.kind, r.second) for r in record_requests(mlp(device).eval(), x, False)] == [
        ("gelu", False)
    ]
    again = record_requests(mlp(device, checkpoint=True), x, True)
    assert [(r.kind, r.second) for r in again] == [
        ("gelu", True),
        ("gelu", True),
        ("gelu_gradient", False),
    ]


def test_other_activations_use_no_gelu_product(device):
    assert record_requests(mlp(device, activation="silu"), sample(device), True) == []


REDUCTIONS = {
    "sum": torch.sum,
    "rows": lambda y: y.sum(0)[0],
    "columns": lambda y: y.sum(-1)[0],
}


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_gradient_that_repeats_values_is_dense_before_any_product_reads_it(reduction, device):
    layer, x, records = mlp(device), sample(device), []
    y = layer(x)
    with observing(lambda operation, request: records.append((operation, request))):
        (got,) = torch.autograd.grad(REDUCTIONS[reduction](y), x, retain_graph=True)
    layouts = [r.product.a_layout for operation, r in records if operation == "gemm_epilogue"]
    layouts += [
        layout
        for operation, r in records
        if operation == "gemm"
        for layout in (r.a_layout, r.b_layout)
    ]
    assert layouts and all(layout.stride > 0 for layout in layouts)
    dense = torch.autograd.grad(REDUCTIONS[reduction](y), y, retain_graph=True)[0].contiguous()
    assert torch.equal(got, torch.autograd.grad(y, x, dense)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("gradient", ["contiguous", "of a sum"])
def test_the_gradient_of_the_activation_is_never_in_memory(gradient):
    tokens, hidden, inner = 4096, 256, 4096
    layer = te.LayerNormMLP(hidden, inner, params_dtype=torch.bfloat16, device="cuda")
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    if "cublaslt" not in str(te.explain(layer, x)).split("gemm_epilogue: ")[-1].split(" ")[0]:
        pytest.skip("cuBLASLt does not take the products")

    def backward(y: torch.Tensor) -> None:
        y.sum().backward() if gradient == "of a sum" else y.backward(torch.ones_like(y))

    for _ in range(2):
        backward(layer(x))
    layer.zero_grad(set_to_none=True)
    x.grad = None
    y = layer(x)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    backward(y)
    wide = tokens * inner * 2
    assert torch.cuda.max_memory_allocated() - before < 1.7 * wide


def ways(explanation) -> dict[str, tuple[str | None, str]]:
    """Each backend for matrices between two steps, and the reason against the first backend."""
    return {
        decision.operation: (decision.chosen, str(decision.verdicts[0].reason))
        for decision in explanation.decisions
        if decision.operation in ("norm_output", "mlp_activation", "mlp_gradient")
    }


def test_the_explanation_reports_how_matrices_between_the_steps_are_computed(device):
    x = sample(device)
    result = ways(te.explain(mlp(device, activation="gelu"), x))
    assert (
        result["norm_output"][0] == "separate"
        and "cannot run inside another kernel" in result["norm_output"][1]
    )
    assert result["mlp_activation"][0] == result["mlp_gradient"][0] == "in_product"
    with te.autocast(recipe=RECIPES["delayed"]):
        result = ways(te.explain(mlp(device, activation="swiglu", return_layernorm_output=True), x))
        gelu = te.explain(mlp(device, activation="gelu"), x)
    assert result["norm_output"] == (
        "separate",
        "it does not support a matrix that is returned too",
    )
    assert result["mlp_activation"][0] == result["mlp_gradient"][0] == "fused_cast"
    assert (
        "not in_product: the kernel of the activation quantizes its output to float8 codes"
        in str(gelu)
    )
    with te.autocast(recipe=RECIPES["current"]):
        result = ways(te.explain(mlp(device, activation="swiglu"), x))
    assert (
        result["mlp_gradient"][0] == "separate" and "needs all of dy" in result["mlp_gradient"][1]
    )


def test_a_backend_can_be_forced_and_an_unsupported_one_raises_its_reason(device):
    layer, x = mlp(device, activation="gelu"), sample(device)
    with te.use_backend(mlp_activation="separate"):
        assert ways(te.explain(layer, x))["mlp_activation"][0] == "separate"
    with (
        te.use_backend(mlp_activation="fused_cast"),
        pytest.raises(RuntimeError, match="cannot run inside another kernel"),
    ):
        layer(x)
