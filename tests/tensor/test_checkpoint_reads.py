"""A quantized tensor is read from a distributed checkpoint whose shards have other rows: the bits stay."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

from tests.tensor.quantizer_cases import (
    DETERMINISTIC,
    QUANTIZED,
    create_quantizer,
    same_payload,
    values,
)
from tests.tensor.test_row_sharding import granularity
from transformer_engine.pytorch.tensor import QuantizedTensor


def other(name, device, shape):
    """A tensor in the same format with other values, hence other scales."""
    return create_quantizer(name, device)(values(device, *shape) * 100)


def read(target, shards):
    """Copy {offsets: shard} into a tensor as torch's reader does."""
    for offsets, shard in shards.items():
        part = target.__get_tensor_shard__(None)
        for dim, (start, size) in enumerate(zip(offsets, shard.shape, strict=True)):
            if size < part.size(dim):
                part = part.narrow(dim, start, size)
        part = part.detach()
        assert part.size() == shard.size()
        part.copy_(shard)


@pytest.mark.parametrize("name", QUANTIZED)
def test_shards_in_any_order_restore_codes_and_scales(name, device):
    step = granularity(name)
    saved = create_quantizer(name, device)(values(device, 4 * step, 64))
    target = other(name, device, saved.shape)
    assert not same_payload(target, saved)
    shards = {(i * step, 0): piece for i, piece in enumerate(torch.chunk(saved, 4))}
    read(
        target,
        {index: shards[index] for index in ((2 * step, 0), (0, 0), (3 * step, 0), (step, 0))},
    )
    assert same_payload(target, saved)
    assert not hasattr(target, "_collected_shards")


@pytest.mark.parametrize("name", [name for name in QUANTIZED if name in DETERMINISTIC])
def test_shards_without_codes_are_quantized_together(name, device):
    step = granularity(name)
    x = values(device, 2 * step, 64)
    target = other(name, device, x.shape)
    read(target, {(0, 0): x[: step + 4], (step + 4, 0): x[step + 4 :]})
    assert same_payload(target, create_quantizer(name, device)(x))


def test_shards_with_different_scales_are_quantized_together(device):
    parts = [
        create_quantizer("current", device)(values(device, 16, 64) * factor) for factor in (1, 50)
    ]
    target = other("current", device, (32, 64))
    read(target, {(16, 0): parts[1], (0, 0): parts[0]})
    joint = torch.cat([part.dequantize(dtype=torch.float32) for part in parts])
    assert same_payload(target, create_quantizer("current", device)(joint))


def test_shards_along_columns_are_read(device):
    saved = create_quantizer("current", device)(values(device, 32, 64))
    target = other("current", device, saved.shape)
    left, right = torch.chunk(saved.dequantize(dtype=torch.float32), 2, dim=1)
    read(target, {(0, 0): left, (0, 32): right})
    assert same_payload(
        target, create_quantizer("current", device)(saved.dequantize(dtype=torch.float32))
    )


def test_an_incomplete_read_changes_nothing_and_a_second_one_completes(device):
    saved = create_quantizer("mxfp8", device)(values(device, 64, 64))
    target = other("mxfp8", device, saved.shape)
    before = target.clone()
    shards = {(0, 0): saved[:32], (32, 0): saved[32:]}
    read(target, {(0, 0): other("mxfp8", device, (32, 64))})
    assert same_payload(target, before)
    read(target, shards)
    assert same_payload(target, saved)


def test_the_target_is_saved_as_the_tensor_and_the_tensor_itself_is_narrowed_as_before(device):
    saved = create_quantizer("mxfp8", device)(values(device, 64, 64))
    file = io.BytesIO()
    torch.save(saved.__get_tensor_shard__(None), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert type(loaded) is type(saved) and same_payload(loaded, saved)
    assert type(saved.narrow(0, 0, 32)) is type(saved)
    assert isinstance(saved.__get_tensor_shard__(None).detach(), QuantizedTensor)
    parameter = nn.Parameter(saved)
    with torch.no_grad():
        read(parameter, {(0, 0): saved[32:], (32, 0): saved[:32]})
    assert torch.equal(parameter.dequantize()[:32], loaded.dequantize()[32:])


def test_other_operations_on_a_part_raise(device):
    target = other("mxfp8", device, (64, 64))
    part = target.__get_tensor_shard__(None).narrow(0, 0, 32)
    assert "ShardTarget(offsets=(0, 0)" in repr(part)
    with pytest.raises(NotImplementedError, match="accepts narrow, detach and copy_"):
        part.add_(1)
    with pytest.raises(NotImplementedError, match="contiguous runs"):
        part[::2]
