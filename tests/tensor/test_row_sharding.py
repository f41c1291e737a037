"""Rows of quantized tensors as shards: cut between blocks, written in place, gathered as bytes."""

from __future__ import annotations

import pytest
import torch

from tests.tensor.quantizer_cases import (
    NAMES,
    QUANTIZED,
    create_quantizer,
    payload,
    same_payload,
    values,
)
from transformer_engine.pytorch.tensor import COLUMNWISE, ROWWISE, QuantizedTensor

# Rows that no block crosses in any direction.
GRANULARITY = {
    "mxfp8": 32,
    "mxfp8_2d": 32,
    "hybrid": 32,
    "block_1d": 128,
    "block_2d": 128,
    "nvfp4": 16,
    "nvfp4_2d": 16,
}


def granularity(name):
    return GRANULARITY.get(name, 16)


@pytest.mark.parametrize("name", NAMES)
def test_pieces_between_blocks_stay_quantized(name, device):
    step = granularity(name)
    q = create_quantizer(name, device)(values(device, 4 * step, 64))
    x = q.dequantize()
    for pieces in (torch.chunk(q, 4), torch.split(q, step), torch.split(q, [step, step, 2 * step])):
        assert all(type(piece) is type(q) for piece in pieces)
        assert all(piece.get_usages() == q.get_usages() for piece in pieces)
        assert torch.equal(torch.cat([piece.dequantize() for piece in pieces]), x)
    piece = q[step : 3 * step]
    assert type(piece) is type(q)
    for axis in (ROWWISE, COLUMNWISE):
        full = q.contract(axis).codes
        part = piece.contract(axis).codes
        per_byte = q.storage_class().__name__.startswith("NVFP4") + 1
        cut = (
            full[step : 3 * step]
            if axis == ROWWISE
            else full[:, step // per_byte : 3 * step // per_byte]
        )
        assert torch.equal(part.float(), cut.float())
    assert type(q.as_strided((step, 64), (64, 1), step * 64)) is type(q)
    assert torch.equal(
        q.as_strided((step, 64), (64, 1), step * 64).dequantize(), q[step : 2 * step].dequantize()
    )


@pytest.mark.parametrize("name", ["mxfp8", "block_2d", "nvfp4_2d", "block_1d"])
def test_pieces_that_cut_a_block_are_values(name, device):
    q = create_quantizer(name, device)(values(device, 128, 64))
    x = q.dequantize()
    pieces = torch.split(q, 40)
    assert not any(isinstance(piece, QuantizedTensor) for piece in pieces)
    assert torch.equal(torch.cat(pieces), x)
    assert torch.equal(q[3:7], x[3:7]) and torch.equal(q[::2], x[::2])
    assert torch.equal(torch.chunk(q, 2, dim=1)[1], x[:, 32:])
    assert torch.equal(q.as_strided((64, 2), (64, 2)), x.as_strided((64, 2), (64, 2)))


def test_rows_of_leading_dimensions_are_sliced_together(device):
    q = create_quantizer("mxfp8", device)(values(device, 4, 16, 64))
    assert type(q[:2]) is type(q) and torch.equal(q[:2].dequantize(), q.dequantize()[:2])
    assert not isinstance(q[:1], QuantizedTensor)
    rows = create_quantizer("mxfp8", device, rowwise=True, columnwise=False)(
        values(device, 4, 16, 64)
    )
    assert torch.equal(rows[:1].dequantize(), rows.dequantize()[:1]) and isinstance(
        rows[:1], QuantizedTensor
    )


def test_a_shard_is_written_in_its_padded_buffer(device):
    q = create_quantizer("current", device)(values(device, 48, 64))
    padded = q.new_zeros(32, 64)
    padded[:16].copy_(q[32:])
    assert torch.equal(padded.dequantize()[:16], q.dequantize()[32:])
    assert not padded.dequantize()[16:].any()


@pytest.mark.parametrize("name", ["mxfp8", "block_2d", "nvfp4_2d"])
def test_a_shard_that_ends_inside_a_block_is_plain(name, device):
    """Its codes would have a partial block's scale."""
    step = granularity(name)
    q = create_quantizer(name, device)(values(device, 2 * step, 64))
    assert isinstance(q.new_zeros(step, 64), QuantizedTensor)
    with pytest.warns(UserWarning, match=f"ends inside a block of {step} rows"):
        plain = q.new_zeros(step // 2, 64)
    assert not isinstance(plain, QuantizedTensor) and plain.dtype == q.dtype
    plain.copy_(torch.chunk(q, 4)[1])
    assert torch.equal(plain, q.dequantize()[step // 2 : step])


@pytest.mark.parametrize("name", QUANTIZED)
def test_gathered_bytes_are_the_whole_tensor(name, device):
    q = create_quantizer(name, device)(values(device, 2, 2 * granularity(name), 64))
    shards = torch.chunk(q, 2)
    sent = [shard.fsdp_pre_all_gather(None, None, None, None, None) for shard in shards]
    assert all(
        part.dtype in (torch.uint8, torch.float32) for tensors, _ in sent for part in tensors
    )
    gathered = tuple(
        torch.cat(parts) for parts in zip(*(tensors for tensors, _ in sent), strict=True)
    )
    full, inner = shards[0].fsdp_post_all_gather(gathered, sent[0][1], torch.float32)
    assert same_payload(full, q) and full.shape == q.shape and full.dtype == torch.float32
    assert inner and all(type(part) is torch.Tensor for part in inner)
    repeated = tuple(part.clone() for part in gathered)
    with torch.no_grad():
        full.zero_()
    assert shards[0].fsdp_post_all_gather(repeated, sent[0][1], torch.float32, out=full) is None
    assert same_payload(full, q)


def test_a_gather_carries_no_direction_that_follows_from_the_other(device):
    q = create_quantizer("current", device)(values(device, 32, 64))
    tensors, _ = q.fsdp_pre_all_gather(None, None, None, None, None)
    assert [tuple(part.shape) for part in tensors] == [(32, 64)]


@pytest.mark.parametrize(
    ("name", "share"),
    [("delayed", 0.5), ("current", 0.5), ("block_2d", 0.5), ("nvfp4_2d", 0.28), ("mxfp8", 1.03)],
)
def test_a_gather_sends_this_share_of_the_bytes_of_bfloat16(name, share, device):
    """MXFP8 codes of one direction cannot be computed from the other direction, so both are sent."""
    q = create_quantizer(name, device)(values(device, 256, 256))
    sent, _ = q.fsdp_pre_all_gather(None, None, None, None, None)
    assert sum(part.numel() * part.element_size() for part in sent) / (
        2 * q.numel()
    ) == pytest.approx(share, abs=2e-3)


def test_a_column_wise_shard_is_gathered_too(device):
    x = values(device, 64, 64)
    for name in ("nvfp4", "mxfp8", "current"):
        q = create_quantizer(name, device, rowwise=False, columnwise=True)(x)
        tensors, metadata = q.fsdp_pre_all_gather(None, None, None, None, None)
        full, _ = q.fsdp_post_all_gather(tensors, metadata, x.dtype)
        assert torch.equal(full.dequantize(), q.dequantize())


def test_an_unsharded_tensor_that_changed_its_directions_is_taken_over(device):
    q = create_quantizer("current", device)(values(device, 32, 64))
    tensors, metadata = q.fsdp_pre_all_gather(None, None, None, None, None)
    full, _ = q.fsdp_post_all_gather(tensors, metadata, q.dtype)
    full.update_usage(columnwise_usage=False)
    q.fsdp_post_all_gather(tensors, metadata, q.dtype, out=full)
    assert same_payload(full, q)


def _free(tensors):
    """Free tensors as fully_shard frees a gathered parameter."""
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)


@pytest.mark.parametrize("name", QUANTIZED)
def test_saved_parts_of_a_gathered_tensor_are_valid_after_the_next_gather(name, device):
    q = create_quantizer(name, device)(values(device, 2 * granularity(name), 64))
    sent, metadata = q.fsdp_pre_all_gather(None, None, None, None, None)
    gathered = tuple(part.clone() for part in sent)
    full, derived = q.fsdp_post_all_gather(gathered, metadata, q.dtype)
    saved = {
        field: (part[None], part.clone(), part._version) for field, part in payload(full).items()
    }
    _free((*gathered, *derived))
    assert not any(part.untyped_storage().size() for part in payload(full).values())
    for tensor in (*gathered, *derived):
        tensor.untyped_storage().resize_(tensor.numel() * tensor.itemsize)
    for actual, reference in zip(gathered, sent, strict=True):
        with torch.autograd._unsafe_preserve_version_counter(actual):
            actual.copy_(reference)
    q.fsdp_post_all_gather(gathered, metadata, q.dtype, out=full)
    assert same_payload(full, q)
    for view, bytes_then, version in saved.values():
        assert torch.equal(view[0], bytes_then) and view._version == version


def test_a_direction_made_on_a_gathered_tensor_is_freed_with_it(device):
    q = create_quantizer("block_2d", device, rowwise=True, columnwise=False)(
        values(device, 128, 128)
    )
    sent, metadata = q.fsdp_pre_all_gather(None, None, None, None, None)
    full, derived = q.fsdp_post_all_gather(sent, metadata, q.dtype)
    parameter = torch.nn.Parameter(full)
    elsewhere = parameter.detach().to(torch.float32)
    elsewhere.update_usage(columnwise_usage=True)
    assert not any(part is elsewhere._columnwise_data for part in derived)
    parameter.update_usage(columnwise_usage=True)
    result = (parameter._columnwise_data, parameter._columnwise_scale_inv)
    assert all(any(part is tensor for part in derived) for tensor in result)
    q.fsdp_post_all_gather(sent, metadata, q.dtype, out=parameter)
    assert parameter._columnwise_data is result[0]  # a forward pass has saved views on it
    parameter.update_usage(columnwise_usage=False)
    assert not any(part is result[0] for part in derived)


def test_one_rank_gathers_one_tensor_and_holds_the_others(device):
    mesh = type("Mesh", (), {"size": staticmethod(lambda: 1), "ndim": 1})()
    for name in QUANTIZED:
        q = create_quantizer(name, device)(values(device, 2 * granularity(name), 64))
        sent, metadata = q.fsdp_pre_all_gather(mesh, None, None, None, None)
        assert len(sent) == 1
        full, derived = q.fsdp_post_all_gather(
            tuple(part.clone() for part in sent), metadata, q.dtype
        )
        assert same_payload(full, q)
        shard = {part.untyped_storage().data_ptr() for part in payload(q).values()}
        assert not any(part.untyped_storage().data_ptr() in shard for part in derived)
