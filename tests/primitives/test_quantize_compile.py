"""Quantization under torch.compile: one graph, bitwise equal to eager execution."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.support import quantized
from tests.support.quantized import assert_same, sample, uniform
from transformer_engine.pytorch.primitives.operand import Operand
from transformer_engine.pytorch.primitives.quantize import (
    Quantized,
    QuantizeSpec,
    dequantize,
    quantize,
)

SPECS = {
    name: spec
    for name, spec in quantized.SPECS.items()
    if name not in ("block2d", "nvfp4-hadamard")
}


def operands(q: Quantized, spec: QuantizeSpec, dtype=torch.float32) -> tuple[Operand, Operand]:
    assert q.codes is not None and q.codes_t is not None
    return (
        Operand(q.codes, q.scale, spec.format, q.amax, dtype),
        Operand(q.codes_t, q.scale_t, spec.format, q.amax_t, dtype),
    )


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def check_one_graph(spec: QuantizeSpec, dynamic: bool, device) -> None:
    x = sample(48, 130, device)

    def there_and_back(x, random):
        q = quantize(x, spec, random=random)
        rows, columns = operands(q, spec)
        return q, dequantize(rows), dequantize(columns)

    compiled = torch.compile(there_and_back, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    expected, actual = there_and_back(x, uniform(x)), compiled(x, uniform(x))
    assert_same(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1]) and torch.equal(actual[2], expected[2])


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.sampled(3)
def test_quantization_compiles_in_one_graph_with_the_same_bits(name, device):
    check_one_graph(SPECS[name], False, device)


# Symbolic shapes of NVFP4 take the tracer 10 to 20 s on one core.
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "name", ["float8", "mxfp8", pytest.param("nvfp4-stochastic", marks=pytest.mark.slow)]
)
def test_quantization_traces_with_symbolic_shapes(name, device):
    check_one_graph(SPECS[name], True, device)


def test_delayed_scaling_traces_with_a_slice_from_its_state(device):
    x, scales = sample(16, 32, device), torch.tensor([2.0, 3.0], device=device)
    spec = SPECS["float8"]

    def delayed(x, scales):
        return quantize(x, spec, multiplier=scales[1:2])

    compiled = torch.compile(delayed, backend="aot_eager", fullgraph=True)
    assert_same(compiled(x, scales), delayed(x, scales))


def test_a_spec_made_inside_the_graph_traces(device):
    x = sample(16, 32, device)

    def narrow(x):
        return quantize(x, dataclasses.replace(SPECS["float8"], columnwise=False))

    assert_same(torch.compile(narrow, backend="aot_eager", fullgraph=True)(x), narrow(x))


# Its loops take a C++ compiler 7 s per format.
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="Inductor's C++ loops, not its Triton kernels"
)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("float8", "mxfp8") else pytest.mark.slow)
        for name, spec in SPECS.items()
        if not spec.hadamard
    ],
)
def test_inductor_gives_the_same_bits_for_ragged_rows(name, device):
    """The Hadamard transform is excluded: Inductor omits its rounding to bfloat16."""
    spec, x = SPECS[name], sample(50, 130, device)

    def there_and_back(x):
        q = quantize(x, spec)
        rows, columns = operands(q, spec, torch.bfloat16)
        return q, dequantize(rows), dequantize(columns)

    expected, actual = there_and_back(x), torch.compile(there_and_back, fullgraph=True)(x)
    assert_same(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1]) and torch.equal(actual[2], expected[2])
