"""Context-parallel helpers on packed sequences, against loops over the sequences."""

from __future__ import annotations

import pytest
import torch

import transformer_engine_torch as tex

LENGTHS = [4, 10, 2, 6]
HEADS, SIZE = 3, 5
TOKENS = sum(LENGTHS)


@pytest.fixture
def bounds(device):
    return torch.tensor([0, *LENGTHS]).cumsum(0).to(device, torch.int32)


def sample(device, *shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def halves(x, index, axis=0):
    """Half `index` of every sequence in x along `axis`."""
    parts = x.split(LENGTHS, dim=axis)
    return torch.cat([part.chunk(2, dim=axis)[index] for part in parts], dim=axis)


def whole(first, second, axis=0):
    """Join sequences from their halves."""
    sizes = [n // 2 for n in LENGTHS]
    pairs = zip(first.split(sizes, dim=axis), second.split(sizes, dim=axis), strict=True)
    return torch.cat([part for pair in pairs for part in pair], dim=axis)


@pytest.mark.parametrize("half", [0, 1])
def test_reading_a_half_takes_it_of_every_sequence(half, bounds, device):
    x = sample(device, TOKENS, HEADS, SIZE)
    assert torch.equal(tex.thd_read_half_tensor(x, bounds, half), halves(x, half))
    pair = sample(device, 2, TOKENS, HEADS, SIZE)
    assert torch.equal(tex.thd_read_half_tensor(pair, bounds, half), halves(pair, half, axis=1))


def test_a_half_that_does_not_exist_is_rejected(bounds, device):
    with pytest.raises(ValueError, match="half_idx=2 is neither 0"):
        tex.thd_read_half_tensor(sample(device, TOKENS, 1, 1), bounds, 2)


def test_the_second_half_of_packed_lse_takes_the_steps_keys_in(bounds, device):
    lse, step = sample(device, HEADS, TOKENS), sample(device, HEADS, TOKENS // 2, seed=1)
    second = torch.log(torch.exp(halves(lse, 1, 1)) + torch.exp(step))
    expected = whole(halves(lse, 0, 1), second, axis=1)
    tex.thd_second_half_lse_correction(lse, step, bounds, True)
    torch.testing.assert_close(lse, expected)


def test_the_second_half_of_padded_lse_takes_the_steps_keys_in(bounds, device):
    longest = max(LENGTHS)
    lse = sample(device, len(LENGTHS), HEADS, longest)
    step = sample(device, len(LENGTHS), HEADS, longest // 2, seed=1)
    expected = lse.clone()
    for b, n in enumerate(LENGTHS):
        old = lse[b, :, n // 2 : n]
        expected[b, :, n // 2 : n] = torch.log(torch.exp(old) + torch.exp(step[b, :, : n // 2]))
    tex.thd_second_half_lse_correction(lse, step, bounds, False)
    torch.testing.assert_close(lse, expected)


def test_reading_lse_of_second_halves(bounds, device):
    packed = sample(device, HEADS, TOKENS)
    got = tex.thd_read_second_half_lse(packed, bounds, True, TOKENS // 2 + 3)
    assert got.shape == (HEADS, TOKENS // 2 + 3)
    assert (
        torch.equal(got[:, : TOKENS // 2], halves(packed, 1, 1)) and not got[:, TOKENS // 2 :].any()
    )
    longest = max(LENGTHS)
    padded = sample(device, len(LENGTHS), HEADS, longest)
    got = tex.thd_read_second_half_lse(padded, bounds, False, longest // 2)
    for b, n in enumerate(LENGTHS):
        assert torch.equal(got[b, :, : n // 2], padded[b, :, n // 2 : n])
        assert not got[b, :, n // 2 :].any()


def padded_lse(packed, sizes):
    """Convert lse [h, t] to [b, h, longest]."""
    out = packed.new_zeros(len(sizes), packed.shape[0], max(sizes))
    for b, part in enumerate(packed.split(sizes, dim=1)):
        out[b, :, : part.shape[1]] = part
    return out


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("second_half", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_are_added_with_their_share_of_the_softmax(
    dtype, second_half, packed, bounds, device
):
    sizes = [n // 2 for n in LENGTHS] if second_half else LENGTHS
    out = sample(device, TOKENS, HEADS, SIZE).to(dtype)
    step = sample(device, sum(sizes), HEADS, SIZE, seed=1).to(dtype)
    lse, lse_step = sample(device, HEADS, TOKENS, seed=2), sample(device, HEADS, sum(sizes), seed=3)
    old = halves(out, 1) if second_half else out
    total = halves(lse, 1, 1) if second_half else lse
    new = (old.float() + step.float() * torch.exp(lse_step - total).t()[:, :, None]).to(dtype)
    expected = whole(halves(out, 0), new) if second_half else new
    if not packed:
        lse, lse_step = padded_lse(lse, LENGTHS), padded_lse(lse_step, sizes)
    tex.thd_out_correction(out, step, lse, lse_step, bounds, second_half, packed)
    torch.testing.assert_close(out, expected)


def test_merging_two_key_parts_gives_full_attention(bounds, device):
    """The corrections combine partial softmaxes, as in ring attention."""
    logits = sample(device, HEADS, TOKENS, 8)
    values = sample(device, HEADS, 8, SIZE, seed=1)
    parts = [(logits[..., :3], values[:, :3]), (logits[..., 3:], values[:, 3:])]
    outputs = [(torch.softmax(s, -1) @ v).transpose(0, 1) for s, v in parts]
    lses = [torch.logsumexp(s, -1) for s, _ in parts]
    lse = torch.logaddexp(*lses)
    out = torch.zeros_like(outputs[0])
    for o, step in zip(outputs, lses, strict=True):
        tex.thd_out_correction(out, o.contiguous(), lse, step, bounds, False, True)
    torch.testing.assert_close(out, (torch.softmax(logits, -1) @ values).transpose(0, 1))


@pytest.mark.parametrize("first", ["add", "copy", "none"])
@pytest.mark.parametrize("second", ["add", "copy", "none"])
@pytest.mark.parametrize(
    "shape", [(TOKENS, HEADS, SIZE), (2, TOKENS, HEADS, SIZE)], ids=["q", "kv"]
)
def test_each_half_of_the_gradients_is_set_copied_or_added(shape, first, second, bounds, device):
    axis = len(shape) - 3
    grad, step = sample(device, *shape), sample(device, *shape, seed=1)
    parts = []
    for index, how in enumerate((first, second)):
        old, new = halves(grad, index, axis), halves(step, index, axis)
        parts.append({"add": old + new, "copy": new, "none": old}[how])
    expected = whole(*parts, axis=axis)
    repeated = grad.clone()
    tex.thd_grad_correction(grad, step, bounds, first, second)
    torch.testing.assert_close(grad, expected)
    if (first == "none") != (second == "none"):
        alone = halves(step, 0 if second == "none" else 1, axis)
        tex.thd_grad_correction(repeated, alone, bounds, first, second)
        torch.testing.assert_close(repeated, expected)


def test_an_unknown_way_to_correct_is_rejected(bounds, device):
    x = sample(device, TOKENS, 1, 1)
    with pytest.raises(ValueError, match="second_half='twice' does not exist"):
        tex.thd_grad_correction(x, x, bounds, "add", "twice")


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_hold_mirrored_chunks_of_every_sequence(world, device):
    lengths = [2 * world * n for n in (1, 3, 2)]
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    contents = []
    for rank in range(world):
        expected = []
        for start, length in zip(bounds[:-1].tolist(), lengths, strict=True):
            chunks = torch.arange(start, start + length).chunk(2 * world)
            expected += [*chunks[rank].tolist(), *chunks[2 * world - 1 - rank].tolist()]
        got = tex.thd_get_partitioned_indices(bounds, sum(lengths), world, rank)
        assert got.dtype == torch.int32 and got.tolist() == expected
        contents += expected
    assert sorted(contents) == list(range(sum(lengths)))


def test_a_partition_that_does_not_come_out_even_is_rejected(device):
    bounds = torch.tensor([0, 6], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"6 tokens are not a multiple of 2 \* 2"):
        tex.thd_get_partitioned_indices(bounds, 6, 2, 0)
    with pytest.raises(ValueError, match=r"rank=2 is outside 0\.\.1"):
        tex.thd_get_partitioned_indices(bounds, 8, 2, 2)
