"""te.ops.GroupedLinear in one launch per step: equal to a loop over groups and to te.GroupedLinear.

On a CPU, NVTE_USE_CUTLASS_GROUPED_GEMM=1 selects the implementation that is the default on a GPU.
"""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.support.layers import QUANTIZED, RECIPES
from tests.support.programs import output_without_gpu
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch import autocast, checkpoint, explain, ops, quantized_model_init
from transformer_engine.pytorch.functions.grouped_call import GroupedCall
from transformer_engine.pytorch.module.grouped_linear import GroupedLinear
from transformer_engine.pytorch.ops.passes.grouped import GroupedPasses
from transformer_engine.pytorch.primitives.grouped_gemm import make_groups
from transformer_engine.pytorch.tensor import GroupedTensor, QuantizedTensor

IN, OUT = 128, 64
AT_ONCE = ("none", "delayed", "current", "block")
SPLITS = ([128, 0, 64], [32, 32, 128], [3, 131, 58])
OPTIONS = {
    "separate": {},
    "without bias": {"bias": False},
    "stacked": {"single_grouped_weight": True, "single_grouped_bias": True},
    "accumulated": {"accumulate_into_main_grad": True},
}


@pytest.fixture(autouse=True)
def _asked_for(monkeypatch):
    monkeypatch.setenv("NVTE_USE_CUTLASS_GROUPED_GEMM", "1")


def make_layer(**options: Any) -> Any:
    layer = ops.GroupedLinear(3, IN, OUT, **{"dtype": torch.bfloat16, "device": "cpu", **options})
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
            parameter.main_grad = torch.ones(parameter.shape)  # pyright: ignore[reportAttributeAccessIssue]
    return layer


def sample(rows: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (
        torch.randn(rows, IN, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()
    )


def outcome(layer: Any, x: torch.Tensor, splits: list[int], recipe: Any) -> list[Any]:
    """Result, gradients, accumulated gradients and scaling states after a step."""
    x.grad = None
    for parameter in layer.parameters():
        parameter.grad = None
    with autocast(enabled=recipe is not None, recipe=recipe):
        y = layer(x, torch.tensor(splits))
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y.dtype))
    parameters = list(layer.parameters())
    fused = layer._accumulate_into_main_grad
    grads = [p.main_grad.clone() if fused and p.dim() > 1 else p.grad for p in parameters]
    states = [s for mode in ("forward", "backward") for s in layer.delayed_states(mode)]
    return [
        y.detach(),
        x.grad,
        *grads,
        *[part.clone() for s in states for part in (s.scale, s.amax_history)],
    ]


@pytest.mark.parametrize("name", OPTIONS)
def test_mxfp8_groups_with_full_blocks_equal_a_loop(name, monkeypatch):
    layer = make_layer(**OPTIONS[name])
    alone = copy.deepcopy(layer)
    for parameter, twin in zip(layer.parameters(), alone.parameters(), strict=True):
        twin.main_grad = parameter.main_grad.clone()  # pyright: ignore[reportAttributeAccessIssue]
    ours = outcome(layer, sample(192), [128, 0, 64], RECIPES["mxfp8"])
    monkeypatch.setenv("NVTE_USE_CUTLASS_GROUPED_GEMM", "0")
    reference = outcome(alone, sample(192), [128, 0, 64], RECIPES["mxfp8"])
    assert_close(ours, reference)


def assert_close(ours: list[Any], theirs: list[Any]) -> None:
    """Sums in another order differ in the last bit of a bfloat16 result, 2^-9 of it."""
    assert len(ours) == len(theirs)
    for actual, other in zip(ours, theirs, strict=True):
        assert actual.dtype == other.dtype and actual.shape == other.shape
        assert (actual.double() - other.double()).norm() <= 4e-3 * other.double().norm()


def choose_implementation(
    layer: Any, x: torch.Tensor, splits: list[int], recipe: Any = None
) -> tuple[str, str]:
    """The chosen implementation and the reason against one launch per step."""
    with autocast(enabled=recipe is not None, recipe=recipe):
        decisions = explain(layer, x, torch.tensor(splits)).decisions
    (way,) = (decision for decision in decisions if decision.operation == "grouped_linear")
    return way.chosen or "", way.verdicts[0].reason or ""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_launches_equal_the_modules_for_any_number_of_groups():
    result = json.loads(output_without_gpu("tests/ops/grouped_launches.py").splitlines()[-1])
    assert result.pop("loop").count("cublaslt") == 24
    assert set(result) == set(AT_ONCE)
    for started in result.values():
        assert started["ops 8"] == started["ops 2"] == started["module 8"]
        assert started["ops 8"].count("rows_kernel") == 2
        assert "cublaslt" not in started["ops 8"]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", AT_ONCE)
def test_grouped_results_equal_the_loop(name, options, monkeypatch):
    joint, alone = make_layer(**options), make_layer(**options)
    for splits in SPLITS:
        x = sample(sum(splits))
        ours = outcome(joint, x, splits, RECIPES[name])
        with monkeypatch.context() as patch:
            patch.setenv("NVTE_USE_CUTLASS_GROUPED_GEMM", "0")
            reference = outcome(alone, x, splits, RECIPES[name])
        assert_close(ours, reference)
    assert choose_implementation(joint, x, splits, RECIPES[name]) == ("together", "")


def test_grouped_results_equal_plain_pytorch_in_float64():
    layer, x, splits = make_layer(), sample(192), [128, 0, 64]
    y, dx, *grads = outcome(layer, x, splits, None)
    values = x.detach().double().requires_grad_()
    parameters = {
        name: p.detach().double().requires_grad_() for name, p in layer.named_parameters()
    }
    parts = [
        part @ parameters[f"weight{i}"].t() + parameters[f"bias{i}"]
        for i, part in enumerate(values.split(splits))
    ]
    expected = torch.cat(parts)
    expected.backward(
        torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).bfloat16().double()
    )
    assert_close(
        [y.double(), dx.double(), *[grad.double() for grad in grads]],
        [expected.detach(), values.grad, *[p.grad for p in parameters.values()]],  # pyright: ignore
    )


def test_other_group_sizes_reuse_the_prepared_passes(monkeypatch):
    for requested in ("1", "0"):
        monkeypatch.setenv("NVTE_USE_CUTLASS_GROUPED_GEMM", requested)
        chain = ops.Sequential(make_layer())
        for splits in SPLITS:
            chain(sample(192), torch.tensor(splits))
        assert len(chain._module_groups[0]._prepared) == 1  # pyright: ignore


def test_two_overlapping_passes_keep_their_own_sizes():
    layer = make_layer()
    expected = [outcome(layer, sample(192), splits, None) for splits in SPLITS]
    inputs = [sample(192) for _ in SPLITS]
    results = [layer(x, torch.tensor(splits)) for x, splits in zip(inputs, SPLITS, strict=True)]
    dy = torch.randn(192, OUT, generator=torch.Generator().manual_seed(3)).bfloat16()
    for y, x, (_, dx, *_) in reversed(list(zip(results, inputs, expected, strict=True))):
        y.backward(dy)
        assert torch.equal(x.grad, dx)  # pyright: ignore[reportArgumentType]


REASONS = {
    "delayed weight gradients": ({"delay_wgrad_compute": True}, torch.bfloat16, [64, 64, 64]),
    "scale per row": ({"scale_bias": True}, torch.bfloat16, [64, 64, 64]),
    "rows that belong to no group": ({}, torch.bfloat16, [64, 64, 32]),
    "the input is torch.float32": ({"dtype": torch.float32}, torch.float32, [64, 64, 64]),
}


@pytest.mark.parametrize("reason", REASONS)
def test_the_explanation_reports_why_a_call_loops(reason):
    options, dtype, splits = REASONS[reason]
    layer, x = make_layer(**options), sample(192, dtype).detach()
    extra = [torch.ones(192)] if options.get("scale_bias") else []
    decisions = explain(layer, x, torch.tensor(splits), *extra, backward=False).decisions
    (way,) = (decision for decision in decisions if decision.operation == "grouped_linear")
    assert way.chosen == "loop" and reason in (way.verdicts[0].reason or "")


@pytest.mark.parametrize("splits", [[64, 64, 65], [-1, 64, 64]])
def test_sizes_that_do_not_fit_are_rejected_before_any_state_changes(splits):
    layer, x = make_layer(), sample(192)
    before = outcome(layer, x, [64, 64, 64], RECIPES["delayed"])
    with autocast(recipe=RECIPES["delayed"]), pytest.raises(ValueError, match="do not fit"):
        layer(x, torch.tensor(splits))
    other = make_layer()
    assert_close(before, outcome(other, x, [64, 64, 64], RECIPES["delayed"]))
    after = outcome(layer, x, [64, 64, 64], RECIPES["delayed"])
    assert_close(after, outcome(other, x, [64, 64, 64], RECIPES["delayed"]))


def test_moved_and_misaligned_weights_are_read_in_place():
    layer, x, splits = make_layer(bias=False), sample(192), [64, 64, 64]
    expected = outcome(layer, x, splits, None)
    for parameter in layer.parameters():
        parameter.data = parameter.data.clone()
    assert_close(outcome(layer, x, splits, None), expected)
    buffer = torch.empty(OUT * IN + 1, dtype=torch.bfloat16)
    layer.weight1.data = buffer[1:].view(OUT, IN).copy_(layer.weight1.data)
    assert_close(outcome(layer, x, splits, None), expected)
    assert choose_implementation(layer, x, splits)[0] == "loop"


def test_recomputed_calls_repeat_the_loops_results():
    layer, x, splits = make_layer(), sample(192), torch.tensor([64, 64, 64])
    alone = copy.deepcopy(layer)
    results = []
    for result in (layer, alone):
        x.grad = None
        with autocast(recipe=RECIPES["delayed"]):
            y = checkpoint(result, x, splits) if result is layer else result(x, splits)
        y.float().sum().backward()
        results.append([y.detach(), x.grad, *[p.grad for p in result.parameters()]])
    assert_close(*results)


@contextmanager
def sizes_stay_on_the_device(rows: list[int], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Simulate sizes on a GPU: the host does not know the rows, some of which have no group."""

    def bind_rows(passes: GroupedPasses, sizes: torch.Tensor) -> GroupedCall:
        layout = make_groups(rows, sum(rows), passes.device)._replace(total=passes.total, rows=None)
        return GroupedCall(passes.spec, passes.spec.groups, (), layout, clears=True)

    with monkeypatch.context() as patch:
        patch.setattr(GroupedPasses, "bind_rows", bind_rows)
        yield


@pytest.mark.parametrize("name", AT_ONCE)
def test_rows_behind_groups_on_the_device_give_zeros(name, monkeypatch):
    layer, alone, splits = make_layer(), make_layer(), [64, 32, 32]
    x = sample(192)
    # a loop, because the host knows the other rows
    reference = outcome(alone, x, splits, RECIPES[name])
    with sizes_stay_on_the_device(splits, monkeypatch):
        ours = outcome(layer, x, splits, RECIPES[name])
    assert not ours[0][128:].any() and not ours[1][128:].any()
    assert_close(ours, reference)


@pytest.mark.parametrize("to_single", [False, True])
def test_single_and_separate_parameters_load_each_other(to_single, device):
    single = {"single_grouped_weight": True, "single_grouped_bias": True}
    saved, loaded = (
        ops.GroupedLinear(3, 16, 32, device=device, **options)
        for options in (({}, single) if to_single else (single, {}))
    )
    torch.nn.init.normal_(saved.bias if not to_single else saved.bias1)
    loaded.load_state_dict(saved.state_dict())
    x, splits = torch.randn(8, 16, device=device), torch.tensor([2, 0, 6])
    assert torch.equal(saved(x, splits), loaded(x, splits))
    one = loaded if to_single else saved
    for group in (one.weight, one.bias):
        assert isinstance(group, GroupedTensor) and isinstance(group, torch.nn.Parameter)


@pytest.mark.parametrize("to_single", [False, True])
@pytest.mark.parametrize("name", [name for name in QUANTIZED if name != "delayed"])
def test_quantized_weights_in_one_parameter_equal_separate_ones_bitwise(name, to_single, device):
    recipe, layers = RECIPES[name], []
    for single in (False, True):
        torch.manual_seed(4)
        with quantized_model_init(enabled=True, recipe=recipe):
            layers.append(
                ops.GroupedLinear(
                    3, 64, 128, device=device, single_grouped_weight=single, dtype=torch.bfloat16
                )
            )
    stack = layers[1].weight
    assert isinstance(stack, GroupedTensor) and stack.shape == (3, 128, 64)
    splits = torch.tensor([32, 0, 96])

    def compute(layer: ops.GroupedLinear, x: torch.Tensor) -> list[torch.Tensor]:
        layer.zero_grad()
        with autocast(recipe=recipe):
            y = layer(x, splits)
        y.float().sin().sum().backward()
        if layer.single_grouped_weight:
            return [y, x.grad, layer.weight.grad]
        grads = [getattr(layer, f"weight{i}").grad for i in range(3)]
        return [
            y,
            x.grad,
            torch.stack([torch.zeros_like(grads[0]) if g is None else g for g in grads]),
        ]

    values = torch.randn(128, 64, generator=torch.Generator().manual_seed(1)).to(
        device, torch.bfloat16
    )
    for _ in range(2):  # after initialization, and after one layer has loaded the other's state
        results = [compute(layer, values.clone().requires_grad_()) for layer in layers]
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)
        source, target = layers if to_single else layers[::-1]
        with torch.no_grad():
            for parameter in source.parameters():
                parameter.mul_(-0.5)
        target.load_state_dict(source.state_dict())


def test_delayed_scaling_rejects_weights_in_one_parameter(device):
    with (
        quantized_model_init(enabled=True, recipe=DelayedScaling()),
        pytest.raises(RuntimeError, match="leave it False inside of quantized_model_init"),
    ):
        ops.GroupedLinear(3, 16, 32, device=device, single_grouped_weight=True)


def stack_values(layer: Any, kind: str) -> torch.Tensor:
    """Values of all weights or all biases as one plain tensor [n, ..]."""
    parameters = dict(layer.named_parameters())
    contents = (
        [parameters[kind]] if kind in parameters else [parameters[f"{kind}{i}"] for i in range(3)]
    )
    plain = [p.dequantize() if isinstance(p, QuantizedTensor) else p.detach() for p in contents]
    return plain[0] if kind in parameters else torch.stack(plain)


FORMS = [
    {"single_grouped_weight": w, "single_grouped_bias": b}
    for w in (False, True)
    for b in (False, True)
]


@pytest.mark.parametrize(
    "names", [("none", "none"), ("mxfp8", "mxfp8"), ("block", "none"), ("nvfp4", "nvfp4")]
)
@pytest.mark.parametrize("source", ["module", "operation"])
@pytest.mark.parametrize("target", ["module", "operation"])
def test_states_load_across_classes_layouts_and_formats(source, target, names, monkeypatch, device):
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")

    def build(kind: str, name: str, form: dict[str, bool]) -> Any:
        make, dtype = (
            (GroupedLinear, "params_dtype") if kind == "module" else (ops.GroupedLinear, "dtype")
        )
        with quantized_model_init(enabled=name != "none", recipe=RECIPES[name]):
            return make(3, 64, 32, device=device, **{dtype: torch.bfloat16}, **form)

    for saved_form in FORMS:
        saved = build(source, names[0], saved_form)
        with torch.no_grad():
            for parameter in saved.parameters():
                parameter.copy_(torch.randn(parameter.shape, device=device))
        for loaded_form in FORMS:
            loaded = build(target, names[1], loaded_form)
            loaded.load_state_dict(saved.state_dict())
            for kind in ("weight", "bias"):
                assert torch.equal(stack_values(loaded, kind), stack_values(saved, kind)), (
                    saved_form,
                    loaded_form,
                )
