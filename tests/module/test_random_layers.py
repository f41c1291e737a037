"""Random linear layer settings: compiled, graphed and generated calls are bitwise equal to eager calls.

The tests compare results, gradients, accumulated gradients and scaling states over several steps. On a CPU, a
recorder that runs functions again replaces CUDA graphs, and `generated_random_launches.py` compares generated
passes' kernels on a simulated GPU.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

import transformer_engine.pytorch as te
from tests.support.layers import RECIPES, same
from tests.support.recorder import RerunRecorder
from transformer_engine.pytorch.functions import layer as layer_functions
from transformer_engine.pytorch.graphs import build
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, emulate

SIZES = (128, 256, 64)  # for the input, the output and the rows; every format supports them
STEPS = 3
GENERATED = 6  # steps; the last ones run generated passes
EACH = settings(
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


class Bound(torch.nn.Module):
    """A GroupedLinear whose groups have 32, 0 and 32 rows."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, **keywords: Any) -> Any:
        return self.layer(x, [32, 0, 32], **keywords)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings for a layer and its calls.

    Attributes:
        kind: The layer's class name.
        recipe: Key in `RECIPES`.
        override: The recipe's `backward_override`.
        dtype: Parameter and input dtype.
        bias: The layer has biases.
        return_bias: They are returned instead of added.
        frozen: Numbers that choose frozen parameters, by their remainders.
        grad_input: The input gradient is needed.
        quantized: Parameters are quantized.
        fused: Weight gradients accumulate into `main_grad`.
        microbatches: `is_first_microbatch` is passed.
        activation: Activation in a `LayerNormMLP`.
        normalization: Normalization, for layers that have one.
    """

    kind: str
    recipe: str
    override: str | None
    dtype: torch.dtype
    bias: bool
    return_bias: bool
    frozen: frozenset[int]
    grad_input: bool
    quantized: bool
    fused: bool
    microbatches: bool
    activation: str
    normalization: str

    def made_recipe(self) -> Any:
        recipe: Any = RECIPES[self.recipe]
        overrides = self.override is not None and self.recipe not in ("none", "delayed")
        # A LayerNormMLP supports no override.
        if overrides and self.kind != "LayerNormMLP":
            recipe = dataclasses.replace(recipe, backward_override=self.override)
        return recipe

    def layer(self, device: torch.device) -> Any:
        """The layer, with the same parameters in every call."""
        torch.manual_seed(3)
        recipe = self.made_recipe()
        options: dict[str, Any] = {"params_dtype": self.dtype, "device": device, "bias": self.bias}
        options |= {"return_bias": self.return_bias, "fuse_wgrad_accumulation": self.fused}
        if self.kind.startswith("LayerNorm"):
            options["normalization"] = self.normalization
        if self.kind == "LayerNormMLP":
            options["activation"] = self.activation
        count = (3,) if self.kind == "GroupedLinear" else ()
        with te.quantized_model_init(enabled=self.quantized and recipe is not None, recipe=recipe):
            layer = getattr(te, self.kind)(*count, *SIZES[:2], **options)
        for number, parameter in enumerate(layer.parameters()):
            parameter.requires_grad_(number % 4 not in self.frozen)
            parameter.main_grad = torch.ones(parameter.shape, device=device)
        return layer

    def bound(self, layer: Any) -> Any:
        """The layer as a module that takes no row counts."""
        return Bound(layer) if self.kind == "GroupedLinear" else layer

    def sample(self, step: int, device: torch.device) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(SIZES[2], SIZES[0], generator=generator).to(device, self.dtype)
        return x.requires_grad_(self.grad_input)

    def keywords(self, step: int) -> dict[str, Any]:
        return {"is_first_microbatch": step != 1} if self.microbatches else {}

    def trained(self, layer: Any, call: Any, device: torch.device, steps: int = STEPS) -> list[Any]:
        """Results, gradients and states over several steps."""
        records: list[Any] = []
        recipe = self.made_recipe()
        for step in range(steps):
            x = self.sample(step, device)
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                result = call(x, **self.keywords(step))
            results = [y for y in tree_leaves(result) if y is not None]
            generator = torch.Generator().manual_seed(100 + step)
            reached = [y for y in results if y.requires_grad]
            if reached:
                torch.autograd.backward(
                    reached, [torch.randn(y.shape, generator=generator).to(y) for y in reached]
                )
            records += [
                *[y.detach().clone() for y in results],
                None if x.grad is None else x.grad.clone(),
            ]
            for parameter in layer.parameters():
                records += [
                    None if parameter.grad is None else parameter.grad.clone(),
                    parameter.main_grad.clone(),
                ]
                parameter.grad = None
        states = [layer.fp8_meta.get(key) for key in ("scaling_fwd", "scaling_bwd")]
        if self.recipe == "delayed":
            records += [part for state in states for part in (state.scale, state.amax_history)]
        return records


def random_settings(**choices: list[Any]) -> st.SearchStrategy[Settings]:
    """Random settings; `choices` restrict some fields' values."""
    switches = [False, True]
    values: dict[str, list[Any]] = {
        "kind": ["Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear"],
        "recipe": sorted(RECIPES),
        "override": [None, None, "high_precision", "dequantized"],
        "dtype": [torch.float32, torch.bfloat16],
        "activation": ["gelu", "swiglu", "srelu"],
        "normalization": ["LayerNorm", "RMSNorm"],
        **dict.fromkeys(
            ("bias", "return_bias", "grad_input", "quantized", "fused", "microbatches"), switches
        ),
        **choices,
    }
    fields = {name: st.sampled_from(allowed) for name, allowed in values.items()}
    return st.builds(Settings, frozen=st.frozensets(st.integers(0, 3), max_size=3), **fields)  # pyright: ignore


def eager(case: Settings, device: torch.device, steps: int = STEPS) -> list[Any]:
    FP8GlobalStateManager.reset()
    layer = case.layer(device)
    return case.trained(layer, case.bound(layer), device, steps)


def compare(expected: list[Any], actual: list[Any]) -> None:
    assert len(expected) == len(actual)
    for number, (own, other) in enumerate(zip(actual, expected, strict=True)):
        assert (own is None) == (other is None), number
        if own is not None:
            assert same([own], [other]), number


def check_compiled(case: Settings, device: torch.device) -> None:
    expected = eager(case, device)
    FP8GlobalStateManager.reset()
    torch._dynamo.reset()
    layer = case.layer(device)
    model = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=False)
    compare(expected, case.trained(layer, case.bound(model), device))


def check_graphed(case: Settings, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if case.microbatches and case.fused:
        return  # a graph that is recorded once either accumulates into main_grad or overwrites it
    expected = eager(case, device)
    FP8GlobalStateManager.reset()
    layer, recipe = case.layer(device), case.made_recipe()
    if device.type != "cuda":
        recorder = RerunRecorder()
        monkeypatch.setattr(build, "graph_recorder", lambda pool=None: recorder)
    graphed = te.make_graphed_callables(
        case.bound(layer),
        (case.sample(0, device),),
        enabled=recipe is not None,
        recipe=recipe,
        cache_quantized_params=case.microbatches and recipe is not None,
    )
    compare(expected, case.trained(layer, graphed, device))


def check_generated(case: Settings, device: torch.device) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_functions, "compiles_on", lambda device: False)
        expected = eager(case, device, GENERATED)
    compare(expected, eager(case, device, GENERATED))


@settings(EACH, max_examples=2)
@given(case=random_settings())
def test_random_compiled_layers_are_bitwise_equal_to_eager_layers(case, device):
    with emulate():
        check_compiled(case, device)


@settings(EACH, max_examples=12)
@given(case=random_settings())
def test_random_graphed_layers_are_bitwise_equal_to_eager_layers(case, device):
    with pytest.MonkeyPatch.context() as patch, emulate():
        check_graphed(case, device, patch)


@pytest.mark.gpu
@settings(EACH, max_examples=40)
@given(case=random_settings())
def test_random_generated_passes_are_bitwise_equal_to_plain_passes(case, device):
    check_generated(case, device)


@pytest.mark.slow
@settings(EACH, max_examples=500)
@given(case=random_settings())
def test_many_random_layers_are_bitwise_equal_to_eager_layers(case, device):
    with pytest.MonkeyPatch.context() as patch, emulate():
        check_compiled(case, device)
        check_graphed(case, device, patch)
        if device.type == "cuda":
            check_generated(case, device)
