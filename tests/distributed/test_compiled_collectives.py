"""Compiled passes through sharded layers are bitwise equal to their separate steps, on two GPUs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

import transformer_engine.pytorch as te
from tests.distributed.ranks import run_on_ranks
from tests.support.fast_path import needs_fast_path
from tests.support.layers import RECIPES
from transformer_engine.pytorch.distributed import overlap
from transformer_engine.pytorch.distributed.overlap_measurement import Thresholds
from transformer_engine.pytorch.functions import layer
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

TOKENS, HIDDEN, INNER, STEPS = 256, 512, 1024, 6
FLAGS = {"ub_overlap_ag": True, "ub_overlap_rs": True, "ub_bulk_wgrad": True, "ub_bulk_dgrad": True}
LAYERS = {
    "column": lambda **options: te.LayerNormLinear(
        HIDDEN, INNER, parallel_mode="column", **options
    ),
    "row": lambda **options: te.Linear(INNER, HIDDEN, parallel_mode="row", **options),
    "mlp": lambda **options: te.LayerNormMLP(
        HIDDEN, INNER, activation="swiglu", set_parallel_mode=True, **options
    ),
}


def _steps(
    module: torch.nn.Module, recipe: Any, rows: int, device: torch.device
) -> list[torch.Tensor]:
    """Results and gradients from some steps."""
    FP8GlobalStateManager.reset()
    width = module.weight.shape[1] if isinstance(module, te.Linear) else HIDDEN
    outputs = []
    for number in range(STEPS):
        generator = torch.Generator(device).manual_seed(10 * number + dist.get_rank())
        x = torch.randn(rows, width, device=device, dtype=torch.bfloat16, generator=generator)
        x.requires_grad_()
        module.zero_grad()
        group = dist.group.WORLD
        # Emulated MXFP8 and NVFP4 products run on every GPU.
        with (
            te.emulate(),
            te.autocast(recipe is not None, recipe=recipe, amax_reduction_group=group),
        ):
            y = module(x)
        y.backward(torch.randn(y.shape, device=device, dtype=y.dtype, generator=generator))
        outputs += [
            y.detach(),
            x.grad,
            *[p.grad for p in module.parameters() if p.grad is not None],
        ]
    return outputs


def _compare_compiled_cases(device: torch.device) -> dict[str, Any]:
    """{case: (whether the bits are equal, number of compiled signatures, reasons)}."""
    ranks = dist.get_world_size()
    overlap.load_thresholds = lambda *_: Thresholds(gather=0, scatter=0)
    te.initialize_ub([ranks * TOKENS, INNER], ranks)
    compiles_on, actual = layer.compiles_on, {}
    for kind, build in LAYERS.items():
        for name in ("none", "delayed", "current", "block", "mxfp8", "nvfp4"):
            for sequence, flags in ((False, {}), (True, {}), (True, FLAGS)):
                options: dict[str, Any] = {
                    "tp_group": dist.group.WORLD,
                    "tp_size": ranks,
                    "sequence_parallel": sequence,
                    "params_dtype": torch.bfloat16,
                    "device": device,
                    "bias": False,
                }
                first = build(**options, **flags)
                second = build(**options, **flags)
                second.load_state_dict(copy.deepcopy(first.state_dict()))
                rows = ranks * TOKENS if kind == "row" else TOKENS
                results = _steps(first, RECIPES[name], rows, device)
                layer.compiles_on = lambda device: False
                expected = _steps(second, RECIPES[name], rows, device)
                layer.compiles_on = compiles_on
                kinds = [
                    kind
                    for spec in first._specs.values()
                    if spec.compiled is not None
                    for pass_ in spec.compiled.passes
                    for kind in pass_.kinds.values()
                ]
                actual[f"{kind}/{name}/{sequence}/{bool(flags)}"] = (
                    all(torch.equal(a, b) for a, b in zip(results, expected, strict=True)),
                    sum(kind.generated is not None for kind in kinds),
                    sorted({kind.reason for kind in kinds if kind.reason is not None}),
                )
    te.destroy_ub()
    return actual


@needs_fast_path
@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_compiled_passes_of_sharded_layers_have_the_bits_of_their_steps(tmp_path):
    for result in run_on_ranks(_compare_compiled_cases, 2, tmp_path):
        assert {case: what for case, what in result.items() if not what[0]} == {}
        assert {case: what for case, what in result.items() if not what[1]} == {}
