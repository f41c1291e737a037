"""Sequence parallelism saves shards and sends codes, with the bits of layers that quantize whole matrices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import run_on_ranks
from tests.support.layers import QUANTIZED, RECIPES
from transformer_engine.pytorch import (
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    MXFP8Quantizer,
    autocast,
    ops,
)
from transformer_engine.pytorch.distributed import faults
from transformer_engine.pytorch.functions import linear_spec
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, emulate

SIZE, TOKENS, HIDDEN, INNER = 2, 256, 128, 256
RAGGED = 64  # 32 rows on a rank, which end inside the column blocks of Float8BlockScaling
DTYPE = torch.bfloat16


def _column(**options: Any) -> torch.nn.Module:
    return Linear(
        HIDDEN, INNER, parallel_mode="column" if "tp_group" in options else None, **options
    )


def _row(**options: Any) -> torch.nn.Module:
    return Linear(INNER, HIDDEN, parallel_mode="row" if "tp_group" in options else None, **options)


def _norm_linear(**options: Any) -> torch.nn.Module:
    return LayerNormLinear(
        HIDDEN, INNER, parallel_mode="column" if "tp_group" in options else None, **options
    )


def _mlp(**options: Any) -> torch.nn.Module:
    return LayerNormMLP(HIDDEN, INNER, set_parallel_mode="tp_group" in options, **options)


def _recomputing_mlp(**options: Any) -> torch.nn.Module:
    return _mlp(checkpoint=True, **options)


def _operations(
    tp_group: Any = None, tp_size: int = 1, sequence_parallel: bool = False, **options: Any
) -> Any:
    options["dtype"] = options.pop("params_dtype")
    shared = options | {"tensor_parallel_group": tp_group, "sequence_parallel": sequence_parallel}
    modes = ("column", "row") if tp_group is not None else (None, None)
    return ops.Sequential(
        ops.BasicLinear(HIDDEN, INNER, tensor_parallel_mode=modes[0], **shared),
        ops.GELU(),
        ops.BasicLinear(INNER, HIDDEN, tensor_parallel_mode=modes[1], **shared),
    )


LAYERS = {
    "column": _column,
    "row": _row,
    "norm_linear": _norm_linear,
    "mlp": _mlp,
    "recomputed_mlp": _recomputing_mlp,
    "operations": _operations,
}


class Sent:
    """Bytes that this rank sends in each collective while `record_collectives` is open, by collective name."""

    def __init__(self) -> None:
        self.bytes: dict[str, list[int]] = {}

    def of(self, name: str) -> int:
        return sum(self.bytes.get(name, []))


@contextmanager
def record_collectives() -> Iterator[Sent]:
    sent = Sent()

    def recording(name: str, position: int) -> Any:
        function = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            sent.bytes.setdefault(name, []).append(
                args[position].numel() * args[position].element_size()
            )
            return function(*args, **kwargs)

        return mock.patch.object(dist, name, call)

    # Comparing settings sends a hash in the first step.
    unchecked = mock.patch.object(faults, "_continues", lambda finished: False)
    with unchecked, recording("all_gather_into_tensor", 1), recording("all_reduce", 0):
        yield sent


def _create_layer(kind: str, sharded: bool, device: torch.device) -> torch.nn.Module:
    parallel = (
        {"tp_group": dist.group.WORLD, "tp_size": SIZE, "sequence_parallel": True}
        if sharded
        else {}
    )
    layer = LAYERS[kind](params_dtype=DTYPE, device=device, **parallel)
    generator = torch.Generator().manual_seed(3 + dist.get_rank())
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return layer


def _step(
    layer: torch.nn.Module, recipe: Any, shape: tuple[int, int]
) -> tuple[dict[str, Any], Sent, Sent, int]:
    """Return results, the bytes sent forward and backward, and the bytes saved in addition to parameters."""
    generator = torch.Generator().manual_seed(11 + dist.get_rank())
    device = next(layer.parameters()).device
    x = torch.randn(*shape, generator=generator).to(device, DTYPE).requires_grad_()
    remaining: dict[int, int] = {}
    parameters = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            # On a GPU, per-tensor scales are elements of one process-wide array.
            position, size = (
                (tensor.data_ptr(), 4)
                if tensor.numel() == 1
                else (storage.data_ptr(), storage.nbytes())
            )
            remaining[position] = max(size, remaining.get(position, 0))
        return tensor

    layer.zero_grad()
    with (
        record_collectives() as forward,
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        autocast(enabled=recipe is not None, recipe=recipe, amax_reduction_group=dist.group.WORLD),
    ):
        y = layer(x)
    saved = sum(remaining.values())
    dy = torch.randn(y.shape, generator=generator).to(device, DTYPE)
    with record_collectives() as backward:
        y.backward(dy)
    results = {"y": y.detach(), "dx": x.grad}
    results |= {name: parameter.grad for name, parameter in layer.named_parameters()}
    return results, forward, backward, saved


def _rows(kind: str, tokens: int) -> tuple[int, int]:
    """Shape of one rank's input."""
    return (tokens, INNER // SIZE) if kind == "row" else (tokens // SIZE, HIDDEN)


def _case(device: torch.device, kind: str, name: str, tokens: int) -> dict[str, Any]:
    """Results from two steps, as sent and with gathered values, and the bytes sent and saved."""
    FP8GlobalStateManager.reset()  # without scaling states from earlier cases
    recipe = RECIPES[name]
    layer, other = (_create_layer(kind, True, device) for _ in range(2))
    equal = True
    for _ in range(2):
        result, forward, backward, saved = _step(layer, recipe, _rows(kind, tokens))
        with mock.patch.object(linear_spec, "plan_gather", lambda quantizer, *_: linear_spec.ONCE):
            full, whole_forward, whole_backward, whole_saved = _step(
                other, recipe, _rows(kind, tokens)
            )
        equal = equal and all(torch.equal(result[key], full[key]) for key in result)
    alone = 0
    if kind != "row":
        alone = _step(_create_layer(kind, False, device), recipe, (tokens, HIDDEN))[3]
    return {
        "equal": equal,
        "sent": [forward.of("all_gather_into_tensor"), backward.of("all_gather_into_tensor")],
        "whole_sent": [
            whole_forward.of("all_gather_into_tensor"),
            whole_backward.of("all_gather_into_tensor"),
        ],
        "maxima": forward.bytes.get("all_reduce", []),
        "saved": saved,
        "whole_saved": whole_saved,
        "alone": alone,
    }


DIRECTIONS = [(True, True), (True, False), (False, True)]
CASES = [(kind, name, TOKENS) for kind in LAYERS for name in RECIPES]
CASES += [("column", name, RAGGED) for name in QUANTIZED] + [
    ("mlp", name, RAGGED) for name in QUANTIZED
]


def _compare_quantized_layers(
    device: torch.device, rowwise: bool, columnwise: bool
) -> dict[str, Any]:
    """Compare column-parallel layers on MXFP8 shards and the quantized full matrix; return the sent bytes."""
    generator = torch.Generator().manual_seed(5)
    full = torch.randn(TOKENS, HIDDEN, generator=generator).to(device, DTYPE)
    layer = _create_layer("column", True, device)
    alone = Linear(HIDDEN, INNER // SIZE, params_dtype=DTYPE, device=device)
    alone.load_state_dict(layer.state_dict())
    collected: dict[str, Any] = {"sent": []}
    results = []
    cases = (
        (layer, full.chunk(SIZE)[dist.get_rank()], rowwise, columnwise),
        (alone, full, True, True),
    )
    for module, x, *directions in cases:
        codes = MXFP8Quantizer(
            torch.float8_e4m3fn, rowwise=directions[0], columnwise=directions[1]
        )(x)
        with record_collectives() as forward, autocast(recipe=RECIPES["mxfp8"]):
            y = module(codes)
        with record_collectives() as backward:
            y.backward(y.detach())
        collected["sent"].append(
            [forward.of("all_gather_into_tensor"), backward.of("all_gather_into_tensor")]
        )
        results.append([y.detach(), module.weight.grad, module.bias.grad])
    collected["equal"] = all(
        torch.equal(ours, reference) for ours, reference in zip(*results, strict=True)
    )
    return collected


def _measure_traffic(device: torch.device) -> dict[str, Any]:
    with emulate():  # MXFP8 and NVFP4 on Hopper
        results = {"/".join(map(str, case)): _case(device, *case) for case in CASES}
        for rowwise, columnwise in DIRECTIONS:
            results[f"codes/{rowwise}/{columnwise}"] = _compare_quantized_layers(
                device, rowwise, columnwise
            )
    return results


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> list[dict[str, Any]]:
    return run_on_ranks(_measure_traffic, SIZE, tmp_path_factory.mktemp("shards"))


@pytest.mark.parametrize(("kind", "name", "tokens"), CASES)
def test_results_and_gradients_have_the_bits_of_whole_matrices(measured, kind, name, tokens):
    for rank in measured:
        assert rank[f"{kind}/{name}/{tokens}"]["equal"]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", ["column", "norm_linear", "mlp", "operations"])
def test_a_rank_saves_only_its_share_for_the_backward_pass(measured, kind, name):
    for rank in measured:
        result = rank[f"{kind}/{name}/{TOKENS}"]
        assert result["saved"] <= result["alone"] / SIZE + 64, result  # 64 bytes: per-tensor scales
        assert result["saved"] < result["whole_saved"]


# Bytes per element: codes and scales, in both directions, and bfloat16 values.
BYTES = {
    "none": 2.0,
    "delayed": 1.0,
    "current": 1.0,
    "block": 1.0 + 4 / 128,
    "mxfp8": 1.0 + 1 / 32,
    "nvfp4": 0.5 + 1 / 16,
}


@pytest.mark.parametrize("name", RECIPES)
def test_ranks_exchange_codes_and_scales(measured, name):
    shard = TOKENS // SIZE * HIDDEN
    one_direction = name in ("none", "delayed", "current")
    for rank in measured:
        assert rank[f"column/{name}/{TOKENS}"]["sent"] == [shard * BYTES[name]] * 2
        # The gradient of a row-parallel layer is read in both directions, which blocks quantize apart.
        expected = shard * BYTES[name] * (1 if one_direction else 2)
        assert rank[f"row/{name}/{TOKENS}"]["sent"] == [0, expected]


@pytest.mark.parametrize(("rowwise", "columnwise"), DIRECTIONS)
def test_each_pass_sends_one_direction_of_an_input_of_mxfp8_codes(measured, rowwise, columnwise):
    """A direction that the shard lacks is quantized from the other one."""
    expected = TOKENS // SIZE * HIDDEN * BYTES["mxfp8"]
    for rank in measured:
        actual = rank[f"codes/{rowwise}/{columnwise}"]
        assert actual["equal"] and actual["sent"] == [[expected] * 2, [0, 0]]


@pytest.mark.parametrize("name", QUANTIZED)
def test_ranks_exchange_values_if_their_rows_end_inside_a_block(measured, name):
    expected = RAGGED // SIZE * HIDDEN * (2.0 if name == "block" else BYTES[name])
    for rank in measured:
        assert rank[f"column/{name}/{RAGGED}"]["sent"] == [expected] * 2


def test_maxima_are_reduced_over_the_group_for_each_matrix_that_has_one_scale(measured):
    for rank in measured:
        sent = {name: rank[f"column/{name}/{TOKENS}"]["maxima"] for name in RECIPES}
        # Delayed scaling reduces all maxima of a step at once when its scales are updated; NVFP4 has one for each
        # direction.
        assert len(sent.pop("delayed")) == 1
        assert sent == {"none": [], "current": [4], "block": [], "mxfp8": [], "nvfp4": [8]}
