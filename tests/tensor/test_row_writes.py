"""Writes into a part of a quantized tensor: the part holds the new values, every other element keeps its own."""

from __future__ import annotations

import pytest
import torch

from tests.tensor.quantizer_cases import QUANTIZED, create_quantizer, values

# Largest error relative to the largest element: half a step in the coarsest format used here.
OFF = {name: 0.3 if name.startswith("nvfp4") else 0.1 for name in QUANTIZED}
ROWS_WRITTEN = slice(128, 256)


def others(device, rows):
    """Return bfloat16 values [rows, 64] without an outlier, different from `values`."""
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(11)).to(
        device, torch.bfloat16
    )


def through_copy(part, new):
    part.copy_(new)


def through_view(part, new):
    part.view(2, 64, 64).copy_(new.view(2, 64, 64))


def through_alias(part, new):
    part.detach().copy_(new)


def through_arithmetic(part, new):
    part.mul_(0).add_(new)


WAYS = (through_copy, through_view, through_alias, through_arithmetic)


def assert_holds(q, expected, off):
    """Check that both directions of q equal `expected`, up to rounding."""
    limit = off * float(expected.abs().max())
    assert float((q.dequantize() - expected).abs().max()) <= limit
    if q.get_usages()["columnwise"] and not getattr(q, "_transform_signs", None):
        only = q.clone()
        only.update_usage(rowwise_usage=False, columnwise_usage=True)
        assert float((only.dequantize().reshape(expected.shape) - expected).abs().max()) <= limit


@pytest.mark.sampled(pairs=True)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("name", "factor"),
    [
        (name, factor)
        for name in QUANTIZED
        for factor in (0.01, 1.0, 50.0)
        # Delayed scaling clips values beyond its scale.
        if name != "nvfp4_rht" and not (name in ("delayed", "state") and factor > 1)
    ],
)
def test_rows_written_through_a_slice_leave_the_others(name, way, factor, device):
    q = create_quantizer(name, device)(values(device, 384, 64))
    expected = q.dequantize()
    new = factor * others(device, 128)
    with torch.no_grad():
        way(q[ROWS_WRITTEN], new)
    expected[ROWS_WRITTEN] = new
    assert_holds(q, expected, OFF[name])
    assert float(q[ROWS_WRITTEN].dequantize().abs().max()) > 0


def test_rows_written_after_a_delayed_scale_has_moved_leave_the_others(device):
    quantizer = create_quantizer("delayed", device)
    q = quantizer(values(device, 64, 64))
    expected = q.dequantize()
    quantizer.scale.mul_(2)
    q[16:32].zero_()
    expected[16:32] = 0
    assert_holds(q, expected, OFF["delayed"])


@pytest.mark.parametrize("name", ["mxfp8", "block_1d", "block_2d", "mxfp8_2d"])
def test_codes_of_other_blocks_stay_unchanged(name, device):
    q = create_quantizer(name, device)(values(device, 384, 64))
    before = q.dequantize()
    q[ROWS_WRITTEN].copy_(others(device, 128))
    after = q.dequantize()
    assert torch.equal(after[:128], before[:128]) and torch.equal(after[256:], before[256:])


@pytest.mark.parametrize("name", ["current", "mxfp8", "nvfp4"])
def test_a_slice_of_a_slice_and_a_quantized_source_are_written_too(name, device):
    q = create_quantizer(name, device)(values(device, 384, 64))
    expected = q.dequantize()
    source = create_quantizer(name, device)(3 * others(device, 64))
    q[ROWS_WRITTEN][64:].copy_(source)
    expected[192:256] = source.dequantize()
    assert_holds(q, expected, OFF[name])


@pytest.mark.parametrize("name", [name for name in QUANTIZED if name != "nvfp4_rht"])
@pytest.mark.parametrize(
    "index",
    [slice(128, 256), slice(3, 50), 5, (5, 7), (slice(None), slice(0, 32)), [1, 4], (..., 3)],
    ids=str,
)
def test_item_assignment_writes_every_kind_of_index(name, index, device):
    q = create_quantizer(name, device)(values(device, 384, 64))
    expected = q.dequantize()
    q[index] = 0.25
    expected[index] = 0.25
    assert_holds(q, expected, OFF[name])
    q[index] = torch.full_like(expected[index], -0.5)
    expected[index] = -0.5
    assert_holds(q, expected, OFF[name])
