"""Shards quantized with the maxima of their rows: gathering joins their codes under one scale."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import run_on_ranks
from tests.support.layers import RECIPES
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    GroupedLinear,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    NVFP4Quantizer,
    autocast,
    ops,
)
from transformer_engine.pytorch.distributed import gather_along_first_dim
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, emulate

SIZE, ROWS, HIDDEN, INNER = 2, 32, 64, 64
E4M3 = torch.float8_e4m3fn
# Allowed relative error for a product between two quantized matrices, of which one is rounded twice. Recipes
# round gradients to E5M2, whose error is twice as large as in E4M3.
ALLOWED = {"delayed": 0.07, "current": 0.07, "nvfp4": 0.16}
ALLOWED_GRADIENT = {"delayed": 0.09, "current": 0.09, "nvfp4": 0.16}
CASES = [(kind, name) for kind in ("linear", "operations", "gradient") for name in ALLOWED]
CASES += [("norm_linear", name) for name in ("delayed", "current")]


def _quantized(name: str, x: torch.Tensor) -> Any:
    """Quantize x with the scale from its maximum."""
    if name == "delayed":
        scale = (448 / x.abs().amax().float()).reshape(1)
        return Float8Quantizer(scale, torch.zeros_like(scale), E4M3)(x)
    if name == "current":
        return Float8CurrentScalingQuantizer(E4M3, device=x.device)(x)
    return NVFP4Quantizer()(x)


def _own(device: torch.device, *shape: int) -> torch.Tensor:
    """Values whose magnitudes on two ranks differ by factor 9."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return (torch.randn(*shape, generator=generator) * 9 ** dist.get_rank()).to(device)


def _everywhere(x: torch.Tensor) -> torch.Tensor:
    """Gather values from all ranks with torch alone."""
    values = [torch.empty_like(x) for _ in range(SIZE)]
    dist.all_gather(values, x.contiguous())
    return torch.cat(values)


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest relative error in the rows that one rank owned."""
    shares = zip(actual.chunk(SIZE), expected.chunk(SIZE), strict=True)
    return max(((a - b).norm() / b.norm()).item() for a, b in shares)


def _consumer(kind: str, device: torch.device) -> Any:
    parallel = {"tp_group": dist.group.WORLD, "tp_size": SIZE, "sequence_parallel": True}
    if kind == "operations":
        options = {
            "tensor_parallel_group": dist.group.WORLD,
            "sequence_parallel": True,
            "device": device,
        }
        return ops.Sequential(
            ops.BasicLinear(HIDDEN, INNER, tensor_parallel_mode="column", **options)
        )
    mode = "row" if kind == "gradient" else "column"
    return Linear(HIDDEN, INNER, parallel_mode=mode, device=device, bias=mode == "row", **parallel)


def _case(kind: str, name: str, device: torch.device) -> dict[str, Any]:
    FP8GlobalStateManager.reset()
    layer, recipe = _consumer(kind, device), RECIPES[name]
    if kind == "norm_linear" and name == "delayed":
        recipe = DelayedScaling(reduce_amax=False)
    weight: Any = next(layer.parameters())
    x: Any = None
    if kind == "gradient":
        x = _own(device, SIZE * ROWS, HIDDEN // SIZE).requires_grad_()
        with autocast(recipe=recipe, amax_reduction_group=dist.group.WORLD):
            y = layer(x)
        gradient = _quantized(name, _own(device, *y.shape))
        y.backward(gradient)
        dy = _everywhere(gradient.dequantize())
        return {
            "rows": _error(x.grad, dy @ weight.detach()),
            "weight": ((weight.grad - dy.t() @ x.detach()).norm() / weight.grad.norm()).item(),
        }
    before: Any = LayerNormLinear(HIDDEN, HIDDEN, device=device)
    with torch.no_grad():
        before.weight.mul_(9 ** dist.get_rank())
    y: Any = None
    for _ in range(2):  # delayed scaling has scales from the second call on
        layer.zero_grad()
        with autocast(recipe=recipe):
            if kind == "norm_linear":
                x = before(_own(device, ROWS, HIDDEN), fp8_output=True)
            else:
                x = _quantized(name, _own(device, ROWS, HIDDEN)).requires_grad_()
            y = layer(x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(device)
    y.backward(dy)
    full = _everywhere(x.detach().dequantize())
    expected = dy.t() @ full
    return {
        "scale": x._scale_inv.item() if name != "nvfp4" else x._amax_rowwise.item(),
        "rows": _error(y.detach(), full @ weight.detach().t()),
        "weight": ((weight.grad - expected).norm() / expected.norm()).item(),
    }


def _local(name: str, device: torch.device) -> dict[str, bool]:
    """Whether layers that gather no input read a rank's codes with the rank's scale."""
    x = _quantized(name, _own(device, ROWS, HIDDEN))
    parallel = {
        "tp_group": dist.group.WORLD,
        "tp_size": SIZE,
        "sequence_parallel": True,
        "device": device,
    }
    mlp: Any = LayerNormMLP(HIDDEN, INNER, set_parallel_mode=True, **parallel)
    grouped: Any = GroupedLinear(2, HIDDEN, INNER, parallel_mode="column", bias=False, **parallel)
    results = []
    values: Any = x.dequantize()
    for argument in (x, values):
        FP8GlobalStateManager.reset()
        with autocast(recipe=RECIPES[name], amax_reduction_group=dist.group.WORLD):
            results.append(mlp(argument).detach())
    with autocast(recipe=RECIPES[name], amax_reduction_group=dist.group.WORLD):
        y = grouped(x, [ROWS // 2] * 2)
    parts = zip(values.chunk(2), (grouped.weight0, grouped.weight1), strict=True)
    expected = torch.cat([part @ weight.detach().t() for part, weight in parts])
    return {
        "mlp": torch.equal(*results) or name == "delayed",  # whose second call has other scales
        "grouped": ((y - expected).norm() / expected.norm()).item() < ALLOWED[name],
    }


def _gathers(device: torch.device) -> dict[str, Any]:
    """Gather codes with unequal scales, with equal scales, with a zero shard, with NaN, and later."""
    values = _own(device, ROWS, HIDDEN)
    values[0, 0] = torch.nan
    codes = _quantized("delayed", values.nan_to_num(0.0))
    codes._data.view(E4M3)[0, 0] = torch.nan
    joint = Float8CurrentScalingQuantizer(
        E4M3, device=device, with_amax_reduction=True, amax_reduction_group=dist.group.WORLD
    )(values.nan_to_num(0.0))
    zeros = _quantized("current", values.nan_to_num(0.0) * dist.get_rank())
    results = {}
    for kind, shard in (("own", codes), ("together", joint), ("zeros", zeros)):
        full, _ = gather_along_first_dim(shard, dist.group.WORLD)
        later, handle = gather_along_first_dim(shard, dist.group.WORLD, async_op=True)
        assert handle is not None
        handle.wait()
        assert torch.equal(full._data, later._data) and torch.equal(
            full._scale_inv, later._scale_inv
        )
        results[kind] = {
            "shard": shard._data,
            "scale": shard._scale_inv,
            "whole": full._data,
            "scale_of_whole": full._scale_inv,
        }
    return results


def _compiled(device: torch.device) -> bool:
    layer = _consumer("linear", device)
    x = _quantized("current", _own(device, ROWS, HIDDEN))
    results = []
    for function in (layer, torch.compile(layer, backend="eager")):
        layer.zero_grad()
        with autocast(recipe=RECIPES["current"]):
            y = function(x)
        y.sum().backward()
        results.append((y.detach(), layer.weight.grad))
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def _measure_errors(device: torch.device) -> dict[str, Any]:
    with emulate():  # NVFP4 on Hopper
        results: dict[str, Any] = {
            f"{kind}/{name}": _case(kind, name, device) for kind, name in CASES
        }
        results |= {f"local/{name}": _local(name, device) for name in ALLOWED}
    return results | {"gathers": _gathers(device)}


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> list[dict[str, Any]]:
    return run_on_ranks(_measure_errors, SIZE, tmp_path_factory.mktemp("scales"))


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_products_of_gathered_codes_use_the_scale_of_every_shard(measured, kind, name):
    """One rank's scale for all rows would be wrong by factor 9 for the other rank's rows."""
    results = [rank[f"{kind}/{name}"] for rank in measured]
    allowed = (ALLOWED_GRADIENT if kind == "gradient" else ALLOWED)[name]
    if kind != "gradient":
        assert results[1]["scale"] > 4 * results[0]["scale"]
    for rank in results:
        assert rank["rows"] < allowed and rank["weight"] < allowed, results


@pytest.mark.parametrize("name", ALLOWED)
def test_layers_that_gather_no_input_read_their_rows_with_their_scale(measured, name):
    for rank in measured:
        assert rank[f"local/{name}"] == {"mlp": True, "grouped": True}


def test_gathered_codes_are_rounded_to_the_largest_scale(measured):
    shards = [rank["gathers"]["own"] for rank in measured]
    largest = torch.stack([shard["scale"] for shard in shards]).amax()
    expected = [
        (s["shard"].view(E4M3).float() * (s["scale"] / largest)).to(E4M3).float() for s in shards
    ]
    for shard in shards:
        assert torch.equal(shard["scale_of_whole"].reshape(()), largest)
        full = shard["whole"].view(E4M3).float()
        assert torch.equal(full.nan_to_num(1000.0), torch.cat(expected).nan_to_num(1000.0))
        assert full.isnan().sum() == SIZE


def test_codes_of_equal_scales_are_unchanged(measured):
    shards = [rank["gathers"]["together"] for rank in measured]
    for shard in shards:
        assert torch.equal(shard["whole"], torch.cat([other["shard"] for other in shards]))
        assert torch.equal(shard["scale_of_whole"], shards[0]["scale"])


def test_a_shard_of_zeros_takes_the_scale_of_the_others(measured):
    """A zero shard has scale 1, which may be much larger or smaller than a scale for values."""
    shards = [rank["gathers"]["zeros"] for rank in measured]
    for shard in shards:
        assert torch.equal(shard["scale_of_whole"], shards[1]["scale"])
        assert torch.equal(shard["whole"], torch.cat([other["shard"] for other in shards]))


@pytest.mark.slow
def test_a_compiled_layer_gathers_the_same_values(tmp_path):
    assert all(run_on_ranks(_compiled, SIZE, tmp_path))
