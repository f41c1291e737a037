"""Backends for every operation in layers' training steps, on one simulated GPU; print JSON.

    PYTHONPATH=. python -m tests.primitives.hardware_layers 10.0 [--without] [--tested] [--triton 3.6]

{layer: {recipe: {"forward" or "backward": {operation: backends}}}}, the backends joined by commas. With --without,
nvmath-python, cudnn-frontend and flash-attn-4 count as absent: torch and Triton remain. With --tested, the self-test
has passed on the simulated GPU. Triton has the first release with native MXFP8 and NVFP4 products, or the
given one. Tables without callables, which only choose between ways to fuse, are left out.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

import transformer_engine.pytorch as te
from tests.support import forked
from tests.support.programs import ROOT, search_path
from tests.support.simulated_gpu import Simulation, simulate
from transformer_engine.common import optional
from transformer_engine.common import recipe as recipes
from transformer_engine.common.dispatch import observing, tables
from transformer_engine.common.hardware import Hardware, hardware_named
from transformer_engine.pytorch import ops
from transformer_engine.pytorch.quantization import FP8GlobalStateManager
from transformer_engine.pytorch.quantization.support import check_recipe_support
from transformer_engine.pytorch.runtime import self_tested

TOKENS, BATCH, WIDTH, HEADS, GROUPS = 1024, 2, 512, 4, 4
ROWS = [512, 256, 1024, 256]  # in each group
BF16 = torch.bfloat16
RECIPES: dict[str, Callable[..., recipes.Recipe] | None] = {
    "none": None,
    "delayed": recipes.DelayedScaling,
    "current": recipes.Float8CurrentScaling,
    "block": recipes.Float8BlockScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
    "nvfp4": recipes.NVFP4BlockScaling,
}
Choices = dict[str, dict[str, dict[str, dict[str, str]]]]


def _input(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=BF16, device="cuda", requires_grad=True)


def _transformer_layer(**options: Any) -> tuple[Any, tuple[Any, ...]]:
    layer = te.TransformerLayer(
        WIDTH,
        2 * WIDTH,
        HEADS,
        attention_dropout=0.0,
        hidden_dropout=0.1,
        params_dtype=BF16,
        **options,
    )
    return layer, (_input(TOKENS, BATCH, WIDTH),)


def _llama_layer() -> tuple[Any, tuple[Any, ...]]:
    return _transformer_layer(
        activation="swiglu", normalization="RMSNorm", bias=False, num_gqa_groups=2
    )


def _grouped_linear() -> tuple[Any, tuple[Any, ...]]:
    return te.GroupedLinear(GROUPS, WIDTH, WIDTH, params_dtype=BF16), (
        _input(sum(ROWS), WIDTH),
        ROWS,
    )


def _operations() -> tuple[Any, tuple[Any, ...]]:
    options = {"dtype": BF16}
    layer = ops.Sequential(
        ops.RMSNorm(WIDTH, **options),
        ops.Linear(WIDTH, 2 * WIDTH, bias=False, **options),
        ops.SwiGLU(),
        ops.Linear(WIDTH, WIDTH, **options),
    )
    return layer, (_input(TOKENS, WIDTH),)


def _attention() -> tuple[Any, tuple[Any, ...]]:
    layer = te.DotProductAttention(HEADS, 128, qkv_format="bshd", attn_mask_type="causal")
    return layer, tuple(_input(BATCH, TOKENS, HEADS, 128) for _ in range(3))


LAYERS: dict[str, Callable[[], tuple[Any, tuple[Any, ...]]]] = {
    "TransformerLayer": _transformer_layer,
    "TransformerLayer, RMSNorm, SwiGLU": _llama_layer,
    "GroupedLinear": _grouped_linear,
    "te.ops MLP": _operations,
    "DotProductAttention, fp8_dpa": _attention,
}


def _accumulating(layer: torch.nn.Module) -> torch.nn.Module:
    for parameter in layer.parameters():
        parameter.main_grad = torch.empty_like(parameter, dtype=torch.float32)  # pyright: ignore
    return layer


def _accumulating_linear() -> tuple[Any, tuple[Any, ...]]:
    layer = te.Linear(WIDTH, WIDTH, bias=False, params_dtype=BF16, fuse_wgrad_accumulation=True)
    return _accumulating(layer), (_input(TOKENS, WIDTH),)


def _accumulating_grouped_linear() -> tuple[Any, tuple[Any, ...]]:
    options = {"bias": False, "params_dtype": BF16, "fuse_wgrad_accumulation": True}
    return _accumulating(te.GroupedLinear(GROUPS, WIDTH, WIDTH, **options)), (
        _input(sum(ROWS), WIDTH),
        ROWS,
    )


# Their products are those of the layers above, added to float32 gradients: kernels of their own, equal backends.
ACCUMULATING: dict[str, Callable[[], tuple[Any, tuple[Any, ...]]]] = {
    "Linear": _accumulating_linear,
    "GroupedLinear": _accumulating_grouped_linear,
}


def cases() -> Iterator[tuple[str, str, recipes.Recipe | None]]:
    """(layer, recipe, its object)."""
    for layer in LAYERS:
        for name, make in RECIPES.items():
            if layer.endswith("fp8_dpa"):
                if name in ("delayed", "current", "mxfp8"):
                    yield layer, name, make(fp8_dpa=True) if make is not None else None
            else:
                yield layer, name, None if make is None else make()


def train(layer: str, recipe: recipes.Recipe | None, accumulates: bool = False) -> Iterator[None]:
    """Run a training step's forward pass, yield, and run its backward pass."""
    FP8GlobalStateManager.reset()
    module, inputs = (ACCUMULATING if accumulates else LAYERS)[layer]()
    with _emulation(recipe):
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = module(*inputs)
        yield
        torch.autograd.backward([y], [torch.empty_like(y)])


def step(layer: str, recipe: recipes.Recipe | None) -> dict[str, dict[str, str]]:
    """Backends for a training step's operations, by pass and operation."""
    results: dict[str, dict[str, list[str]]] = {"forward": {}, "backward": {}}
    current = results["forward"]

    def see(operation: str, request: Any) -> None:
        table = tables[operation]
        if table.backends[-1].bind is None:
            return
        name = next(verdict.backend for verdict in table.explain(request) if verdict.chosen)
        names = current.setdefault(operation, [])
        if name not in names:
            names.append(name)

    with observing(see):
        for _ in train(layer, recipe):
            current = results["backward"]
    return {
        name: {op: ", ".join(names) for op, names in sorted(used.items())}
        for name, used in results.items()
    }


def _emulation(recipe: recipes.Recipe | None) -> AbstractContextManager[Any]:
    """Emulate a recipe's formats only if the simulated GPU lacks them."""
    available = recipe is None or check_recipe_support(recipe)[0]
    return nullcontext() if available else te.emulate()


def choices() -> Choices:
    """{layer: {recipe: {pass: {operation: backends}}}} on the GPU that this process simulates."""
    results: Choices = {}
    for layer, name, recipe in cases():
        results.setdefault(layer, {})[name] = step(layer, recipe)
    return results


def run_choices(architecture: str, *options: str) -> Choices:
    """Choices on a simulated GPU, from a separate process."""
    arguments = ["-W", "ignore", "-m", __name__, architecture, *options]
    return json.loads(
        forked.output(arguments, ROOT, {**os.environ, "PYTHONPATH": search_path()}, 300)
    )


def simulation(arguments: list[str]) -> Simulation:
    """Simulation for the GPU in a program's arguments."""
    torch.set_num_threads(1)
    return simulate(hardware_named("nvidia", arguments[0]), libraries="--without" not in arguments)


class Passed(dict[str, bool]):
    """Stored self-test results in which every path has passed."""

    def get(self, path: str, default: Any = None) -> bool:
        return True


def simulate_versions(hardware: Hardware, arguments: list[str]) -> None:
    """Simulate the Triton release, and the self-test results, that the arguments name."""
    result = optional.release
    release = hardware.scaled_dot
    if "--triton" in arguments:
        major, minor = arguments[arguments.index("--triton") + 1].split(".")
        release = int(major), int(minor)
    optional.release = lambda name: release if name == "triton" else result(name)
    if "--tested" in arguments:
        self_tested._read_stored = lambda index: Passed()  # pyright: ignore[reportAttributeAccessIssue]


if __name__ == "__main__":
    simulate_versions(simulation(sys.argv[1:]).hardware, sys.argv[1:])
    print(json.dumps(choices()))
