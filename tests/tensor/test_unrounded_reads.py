"""Values of a quantized tensor reach wider tensors unrounded: the nominal dtype, bfloat16, is not an intermediate."""

from __future__ import annotations

import pytest
import torch

from tests.tensor.quantizer_cases import CASES, E4M3, QUANTIZED, values
from transformer_engine.pytorch.tensor import Float8CurrentScalingQuantizer, HybridQuantizer

SHAPE = (128, 64)
WIDE = (torch.float32, torch.float64, torch.float16)


def into(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(SHAPE, dtype=dtype, device=device)


def by_slice(target, source):
    target[:] = source


def by_rows(target, source):
    target[32:96] = source[32:96]
    target[:32].copy_(source[:32])
    target[96:].copy_(source[96:])


def by_module(target, source):
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(target, requires_grad=False)
    module.load_state_dict({"weight": source})


WAYS = {
    "copy_": lambda target, source: target.copy_(source),
    "slice": by_slice,
    "rows": by_rows,
    "data": lambda target, source: target.data.copy_(source),
    "foreach_copy": lambda target, source: torch._foreach_copy_([target], [source]),
    "foreach_add": lambda target, source: torch._foreach_add_([target], [source]),
    "add_": lambda target, source: target.add_(source),
    "sub_": lambda target, source: target.sub_(source).neg_(),
    "out": lambda target, source: torch.add(target, source, out=target),
    "state dict": by_module,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("name", ["current", "delayed", "nvfp4", "hybrid"])
def test_wider_targets_receive_every_bit(name, dtype, way, device):
    source = CASES[name](device)(values(device, *SHAPE) * 0.37)
    exact = source.dequantize(dtype=torch.float32)
    target = into(dtype, device)
    WAYS[way](target, source)
    assert torch.equal(target, exact.to(dtype))


@pytest.mark.parametrize("name", QUANTIZED)
def test_functions_promote_before_they_round(name, device):
    source = CASES[name](device)(values(device, *SHAPE) * 0.37)
    exact, zeros = source.dequantize(dtype=torch.float32), into(torch.float32, device)
    assert torch.equal(torch.add(zeros, source), exact)
    assert torch.equal(zeros + source, exact)
    assert torch.equal(torch.cat([source, zeros])[: SHAPE[0]], exact)
    assert torch.equal(torch.where(zeros == 0, source, zeros), exact)


def test_a_number_does_not_promote(device):
    """As for plain tensors: a tensor without dimensions does not widen the result."""
    source = CASES["current"](device)(values(device, *SHAPE))
    assert (source + torch.ones((), device=device)).dtype == torch.bfloat16
    assert torch.equal(source * 1.0, source.dequantize())


@pytest.mark.parametrize("name", QUANTIZED)
def test_results_of_float64_tensors_are_float64(name, device):
    source = CASES[name](device)(values(device, *SHAPE) * 0.37)
    exact, wide = source.dequantize(dtype=torch.float32).double(), source.to(torch.float64)
    zeros = into(torch.float64, device)
    for result in (wide * 1.0, wide + 0, zeros.lerp(wide, 1.0), torch.maximum(wide, wide), torch.cat([wide])):
        assert result.dtype == torch.float64
        assert torch.equal(result, exact)


def test_narrow_targets_keep_their_dtype(device):
    source = CASES["current"](device)(values(device, *SHAPE))
    target = into(torch.bfloat16, device)
    assert torch.equal(target.copy_(source), source.dequantize())


@pytest.mark.parametrize("name", ["mxfp8", "block_2d", "nvfp4"])
def test_codes_of_another_format_quantize_unrounded_values(name, device):
    source = CASES["current"](device)(values(device, *SHAPE) * 0.37)
    copied = CASES[name](device)(values(device, *SHAPE))
    expected = CASES[name](device)(values(device, *SHAPE))
    copied.copy_(source)
    expected.copy_(source.dequantize(dtype=torch.float32))
    assert copied.dtype == torch.bfloat16
    assert torch.equal(copied.dequantize(), expected.dequantize())


def test_an_item_assignment_leaves_other_values(device):
    """A single element cuts a block, so that the whole tensor is quantized again, from unrounded values."""
    tensor = CASES["current"](device)(values(device, *SHAPE) * 0.37)
    before = tensor.dequantize(dtype=torch.float32)
    tensor[3, 5] = 0.0
    after = tensor.dequantize(dtype=torch.float32)
    after[3, 5] = before[3, 5]
    assert torch.equal(after, before)


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize(
    ("start", "stop", "offset", "rows"), [(0, 63, 1, 63), (8, 40, 0, 32), (8, 40, 4, 40)]
)
def test_as_strided_of_a_narrowed_tensor_reaches_the_rows_behind_it(
    hybrid, start, stop, offset, rows, device
):
    def one():
        return Float8CurrentScalingQuantizer(E4M3, device)

    whole = (HybridQuantizer(one(), one()) if hybrid else one())(values(device, 64, 32))
    narrowed = torch.ops.aten.slice.Tensor(whole, 0, start, stop)
    view = torch.ops.aten.as_strided.default(narrowed, (rows, 32), narrowed.stride(), offset * 32)
    first = start + offset
    assert view.shape == (rows, 32)
    assert torch.equal(view.dequantize(), whole.dequantize()[first : first + rows])


def test_as_strided_beyond_the_whole_tensor_raises(device):
    whole = Float8CurrentScalingQuantizer(E4M3, device)(values(device, 64, 32))
    narrowed = torch.ops.aten.slice.Tensor(whole, 0, 0, 63)
    with pytest.raises(RuntimeError, match="out of bounds"):
        torch.ops.aten.as_strided.default(narrowed, (64, 32), narrowed.stride(), 32)
