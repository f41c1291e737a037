"""Slices of a quantized tensor that are no views on its codes: readable, and never written silently."""

from __future__ import annotations

import copy
import io

import pytest
import torch

import transformer_engine.pytorch as te
from tests.tensor.quantizer_cases import DETERMINISTIC, QUANTIZED, create_quantizer, values

ROWS, COLUMNS = 256, 256
# Views that cut through blocks. Formats with one scale per tensor have no blocks: their rows are views.
CUTS = {
    "an element's row": lambda q: q.view(-1)[1:],
    "columns": lambda q: q[:, 3:5],
    "transpose": lambda q: q.t(),
    "row": lambda q: q.unbind(0)[5],
    "diagonal": lambda q: q.diagonal(),
    "view of a view": lambda q: q[:, 3:5].t()[0],
    "data": lambda q: q.t().data.detach(),
}
WRITES = {
    "copy_": lambda v: v.copy_(torch.ones_like(v)),
    "zero_": lambda v: v.zero_(),
    "+=": lambda v: v.__iadd__(1.0),
    "an index": lambda v: v.__setitem__(0, 3.0),
    "out": lambda v: torch.add(v, 1.0, out=v),
    "inplace": lambda v: torch.nn.functional.relu(v, inplace=True),
    "init": lambda v: torch.nn.init.constant_(v, 2.0),
    "foreach": lambda v: torch._foreach_mul_([v], 2.0),
}
MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
CUTTING = [name for name in QUANTIZED if "block" in name or "fp8" in name or "nvfp4" in name]


def quantized(name, device):
    return create_quantizer(name, device)(values(device, ROWS, COLUMNS))


@pytest.mark.sampled(pairs=True)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", CUTTING)
def test_a_write_reaches_the_tensor_or_raises(name, cut, mode, device):
    q = quantized(name, device)
    before = q.dequantize().clone()
    for write in WRITES.values():
        with MODES[mode]():
            part = CUTS[cut](q)
            if isinstance(part, te.QuantizedTensor):
                write(part)
                assert not torch.equal(q.dequantize(), before)
                q = quantized(name, device)
                before = q.dequantize().clone()
                continue
            with pytest.raises(
                NotImplementedError, match=r"writes to \[.*\] of .*Tensor \[256, 256\]"
            ):
                write(part)
        assert torch.equal(q.dequantize(), before)


@pytest.mark.parametrize("rows", [slice(3, 7), slice(0, 5), 4, slice(1, None)])
@pytest.mark.parametrize("name", CUTTING)
def test_rows_that_are_assigned_by_index_are_written(name, rows, device):
    q = quantized(name, device)
    exact = q.dequantize(dtype=torch.float32)
    exact[rows] = 0.0
    q[rows] = 0.0
    assert torch.equal(q.dequantize(dtype=torch.float32)[rows], exact[rows])
    if name in DETERMINISTIC:  # the others round by a draw
        expected = create_quantizer(name, device)(exact, dtype=torch.bfloat16)
        assert torch.equal(q.dequantize(), expected.dequantize())


def test_a_trained_parameter_is_rejected_by_autograd(device):
    weight = torch.nn.Parameter(quantized("mxfp8", device))
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        weight[3:7].copy_(torch.zeros(4, COLUMNS, device=device))


@pytest.mark.parametrize("mode", MODES)
def test_a_view_without_codes_is_read_like_any_tensor(mode, device):
    q = quantized("mxfp8", device)
    plain = q.dequantize()
    with MODES[mode]():
        part, x = q[3:7], plain[3:7]
        for ours, expected in (
            (part + 1, x + 1),
            (part.clone(), x),
            (torch.cat([part, part]), torch.cat([x, x])),
            (torch.zeros_like(x).copy_(part), x),
            (torch.nn.functional.linear(plain, part), torch.nn.functional.linear(plain, x)),
            (copy.deepcopy(part), x),
        ):
            assert type(ours) is torch.Tensor and torch.equal(ours, expected)
        assert part.tolist() == x.tolist() and float(part[0, 0]) == float(x[0, 0])
    file = io.BytesIO()
    torch.save({"part": part}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["part"]
    assert type(loaded) is torch.Tensor and torch.equal(loaded, x)
    loaded.zero_()
