"""Order of collectives and products in a sharded linear layer, and gather counts.

One process imitates two ranks: a gather joins two equal shards, a sum returns the first rank's rows.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from typing import Any

import pytest
import torch

from tests.functions.test_linear import K, M, N, make_spec, quantizers
from transformer_engine.common.dispatch import observing
from transformer_engine.common.recipe import Float8CurrentScaling, MXFP8BlockScaling
from transformer_engine.pytorch.distributed.tensor_parallel import TensorParallel
from transformer_engine.pytorch.functions import (
    communication,
    linear_operands,
    linear_results,
    weight_gradient,
)
from transformer_engine.pytorch.functions import linear as linear_functions
from transformer_engine.pytorch.functions.linear import linear
from transformer_engine.pytorch.primitives.operand import Operand

RANKS = 2
# Row codes can be transposed if the tensor has a single scale.
RECIPES = {
    "values": Float8CurrentScaling(),
    "once": Float8CurrentScaling(),
    "row_codes": Float8CurrentScaling(),
    "codes": MXFP8BlockScaling(),
}


@pytest.fixture
def events(monkeypatch, emulated) -> list[str]:
    """The collectives that begin and end, in order."""
    records: list[str] = []

    class Handle:
        def __init__(self, collective: str) -> None:
            self.collective = collective

        def wait(self) -> None:
            records.append(f"{self.collective} ends")

    def gather(x: Any, axis: int) -> Any:
        if not isinstance(x, Operand):
            return torch.cat([x] * RANKS, axis)
        scale = torch.cat([x.scale] * RANKS, axis) if x.has_block_scales else x.scale  # pyright: ignore
        return x._replace(codes=torch.cat([x.codes] * RANKS, axis), scale=scale)

    def begin(collective: str, x: Any, parallel: TensorParallel, axis: int, overlaps: bool) -> Any:
        records.append(f"{collective} begins")
        result = gather(x, axis) if collective == "all_gather" else x[: x.shape[0] // RANKS]
        return result, Handle(collective)

    monkeypatch.setattr(communication, "_begin_collective", begin)
    monkeypatch.setattr(linear_operands, "check_collective", lambda *arguments: None)
    return records


def passes(
    events: list[str], mode: str, way: str, device: torch.device, plain: bool, **options: Any
) -> tuple[list[str], list[str], Any]:
    """Collectives and products in the forward and backward pass, and the result node."""
    result = (
        {}
        if plain
        else dict(zip(("qx", "qw", "qg"), quantizers(RECIPES[way], device), strict=True))
    )
    spec: Any = dataclasses.replace(
        make_spec(torch.bfloat16, **result, is_unquantized=plain, **options),
        parallel=TensorParallel(mode, None, RANKS, True),
    )
    rows = M // RANKS if mode == "column" else M
    x = torch.randn(rows, K, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(N, K, device=device, dtype=torch.bfloat16, requires_grad=True)

    def record(operation: str, request: Any) -> None:
        if operation == "gemm":
            events.append("product")

    with observing(record):
        y = linear(x, weight, None, spec)
        forward = list(events)
        node = y.grad_fn
        events.clear()
        saved = [tensor for tensor in node.saved_tensors if tensor is not None]  # pyright: ignore
        y.backward(torch.randn_like(y))
    return forward, list(events), saved


QUANTIZED = itertools.product(
    [False],
    [False, True],
    ["quantized", "high_precision", "dequantized"],
    ["values", "codes", "row_codes"],
)


@pytest.mark.parametrize(
    ("plain", "keep_input", "backward", "way"), [*QUANTIZED, (True, False, "quantized", "values")]
)
def test_a_shard_is_saved_and_gathered_while_the_input_gradient_is_computed(
    plain, keep_input, backward, way, device, events
):
    options = {"gather_input": way, "backward_operands": backward, "keep_input": keep_input}
    forward, back, saved = passes(events, "column", way, device, plain, **options)
    assert forward == ["all_gather begins", "all_gather ends", "product"]
    assert back == [
        "all_gather begins",
        "product",  # dx
        "reduce_scatter begins",
        "all_gather ends",
        "product",  # dw
        "reduce_scatter ends",
    ]
    assert M * K not in {tensor.numel() for tensor in saved}  # no gathered x
    assert M * K // RANKS in {tensor.numel() for tensor in saved}


@pytest.mark.parametrize("grad_weight", [False, True])
@pytest.mark.parametrize("way", ["codes", "row_codes"])
def test_operands_are_freed_before_the_input_gradients_reduction_ends(
    way, grad_weight, device, events, monkeypatch
):
    multiplied: list[weakref.ref[torch.Tensor]] = []  # codes that the backward pass has multiplied
    alive: list[list[bool]] = []  # at both ends of a sum

    def record(multiply: Any, count: int) -> Any:
        def multiply_and_record(a: Operand, b: Operand, epilogue: Any) -> Any:
            multiplied.extend([weakref.ref(operand.codes) for operand in (a, b)[:count]])
            return multiply(a, b, epilogue)

        return multiply_and_record

    def end(dx: Any, spec: Any) -> Any:
        alive.append([codes() is not None for codes in multiplied])
        return end_input_gradient(dx, spec)

    end_input_gradient = linear_functions.end_input_gradient
    monkeypatch.setattr(linear_functions, "end_input_gradient", end)
    # The weight is saved by the node, whose tensors this test reads.
    monkeypatch.setattr(linear_results, "multiply", record(linear_results.multiply, 1))
    monkeypatch.setattr(weight_gradient, "multiply", record(weight_gradient.multiply, 2))
    options = {"gather_input": way, "needs_grad_weight": grad_weight}
    passes(events, "column", way, device, False, **options)
    assert alive == [[False] * (3 if grad_weight else 1)]


NEEDS = [(True, False), (False, True), (True, True)]


@pytest.mark.parametrize(("grad_input", "grad_weight"), NEEDS)
@pytest.mark.parametrize("way", ["values", "codes", "row_codes", "once"])
def test_an_input_is_gathered_once_per_pass_that_reads_it(
    way, grad_input, grad_weight, device, events
):
    needs = {"needs_grad_input": grad_input, "needs_grad_weight": grad_weight}
    forward, back, _ = passes(events, "column", way, device, False, gather_input=way, **needs)
    assert forward.count("all_gather begins") == 1
    assert back.count("all_gather begins") == (grad_weight and way != "once")
    assert back.count("product") == grad_input + grad_weight


@pytest.mark.parametrize(("grad_input", "grad_weight"), NEEDS)
@pytest.mark.parametrize("backward", ["quantized", "high_precision", "dequantized"])
@pytest.mark.parametrize("way", ["values", "codes", "row_codes"])
def test_an_output_gradient_is_gathered_once_per_code_direction(
    way, backward, grad_input, grad_weight, device, events
):
    needs = {"needs_grad_input": grad_input, "needs_grad_weight": grad_weight}
    _, back, _ = passes(
        events, "row", way, device, False, gather_gradient=way, backward_operands=backward, **needs
    )
    directions = way == "codes" and backward == "quantized"
    assert back.count("all_gather begins") == (grad_input + grad_weight if directions else 1)
    assert back.count("all_gather ends") == back.count("all_gather begins")
    assert back.count("product") == grad_input + grad_weight
