"""Mask tensors as mask types: recognized masks attend like the tensor, and masks with one difference are kept."""

from __future__ import annotations

import gc
import random

import pytest
import torch
from torch.nn import functional as F

import transformer_engine.pytorch as te
from tests.support.tolerances import ATTENDED
from transformer_engine.pytorch.integrations.huggingface import masks
from transformer_engine.pytorch.integrations.huggingface.core import CoreSettings, attend

HEADS, SIZE = 2, 8
CORES = {
    causal: CoreSettings(HEADS, HEADS, SIZE, SIZE, SIZE**-0.5, causal=causal).made()
    for causal in (False, True)
}


def band(
    queries: int, keys: int, ahead: int, window: int | None, padding: list[tuple[int, int]]
) -> torch.Tensor:
    """visible [b, 1, queries, keys]: keys up to i + ahead, as many as a window has, of each sequence's own."""
    i, j = torch.arange(queries)[:, None], torch.arange(keys)[None, :]
    visible = j <= i + ahead
    if window is not None:
        visible = visible & (j > i + ahead - window)
    begins, ends = (torch.tensor(side)[:, None, None, None] for side in zip(*padding, strict=True))
    return visible & (j >= begins) & (j < ends)


def additive(visible: torch.Tensor, hidden: float = torch.finfo(torch.float32).min) -> torch.Tensor:
    return torch.zeros(visible.shape).masked_fill(~visible, hidden)


def assert_attends_as(
    visible: torch.Tensor, masking: masks.Masking, skipped: torch.Tensor | None = None
) -> None:
    """Attention under the masking is torch's under the mask; skipped [b, q] are padded queries, whose output is 0."""
    batch, _, queries, keys = visible.shape
    q, k, v = (torch.randn(batch, HEADS, s, SIZE) for s in (queries, keys, keys))
    out = attend(CORES[masking.causal], q, k, v, masking)
    expected = F.scaled_dot_product_attention(q, k, v, visible).nan_to_num().transpose(1, 2)
    if skipped is not None:
        expected = expected.masked_fill(skipped[:, :, None, None], 0.0)
    torch.testing.assert_close(out, expected, **ATTENDED)


def padded_queries(visible: torch.Tensor, shift: int) -> torch.Tensor:
    """[b, q]: queries whose own key, i + shift, is hidden."""
    local = torch.arange(visible.shape[2]) + shift
    visible = F.pad(visible, (0, int(local[-1])))
    return ~visible[:, 0].gather(2, local[None, :, None].expand(visible.shape[0], -1, 1))[..., 0]


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
@pytest.mark.parametrize("window", [None, 1, 3, 7, 100])
@pytest.mark.parametrize("queries, keys", [(8, 8), (3, 8), (8, 1000)])
def test_a_canonical_mask_becomes_a_mask_type_and_a_window(kind, window, queries, keys):
    visible = band(queries, keys, keys - queries, window, [(0, keys)]).expand(2, -1, -1, -1)
    masking = masks.mask_masking(visible if kind == torch.bool else additive(visible), 2)
    assert masking is not None
    assert not masking.arguments and not masking.packed
    assert masking.name.startswith("causal")
    assert masking.window == (None if window is None or window >= keys else (window - 1, 0))
    assert_attends_as(visible, masking)


def test_a_window_longer_than_all_queries_is_dropped():
    masking = masks.mask_masking(band(6, 6, 0, 6, [(0, 6)]), 1)
    assert masking == masks.CAUSAL


@pytest.mark.parametrize("hidden", [-torch.inf, -1e9, -65504.0])
def test_any_large_negative_number_hides(hidden):
    assert (
        masks.mask_masking(additive(band(5, 5, ahead=0, window=None, padding=[(0, 5)]), hidden), 1)
        == masks.CAUSAL
    )


def test_a_mask_with_all_keys_visible_is_dropped():
    assert masks.mask_masking(torch.ones(2, 1, 4, 6, dtype=torch.bool), 2) == masks.NO_MASK


PADDING = {
    "right": [(0, 8), (0, 5), (0, 1)],
    "left": [(0, 8), (3, 8), (7, 8)],
    "both": [(2, 7), (1, 8), (3, 4)],
}


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("side", list(PADDING))
@pytest.mark.parametrize("queries", [8, 3])
def test_padding_in_a_causal_mask_becomes_lengths(side, window, queries):
    shift = 8 - queries
    visible = band(queries, 8, shift, window, PADDING[side])
    masking = masks.mask_masking(visible, 3)
    assert masking is not None
    assert masking.name == ("padding_causal" if queries == 8 else "padding_causal_bottom_right")
    assert masking.packed == (side != "right" or (window is not None and queries < 8))
    assert_attends_as(visible, masking, padded_queries(visible, shift))


@pytest.mark.parametrize("side", list(PADDING))
def test_encoder_padding_hides_only_keys(side):
    visible = band(8, 8, 8, None, PADDING[side])
    masking = masks.mask_masking(visible, 3)
    assert masking is not None
    assert masking.name == "padding"
    assert_attends_as(visible, masking)


@pytest.mark.parametrize("padding", [[(0, 8)], [(0, 8), (0, 5)], [(0, 8), (3, 8)]])
def test_a_two_sided_window_is_an_encoder_window(padding):
    visible = band(8, 8, 2, 5, padding)
    masking = masks.mask_masking(visible, len(padding))
    assert masking is not None
    assert (masking.window, "causal" in masking.name) == ((2, 2), False)
    assert_attends_as(visible, masking, padded_queries(visible, 0))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("position", [0, 4])
def test_a_static_cache_is_limited_to_its_written_keys(position, window):
    visible = band(4, 16, position, window, [(0, 16)])
    masking = masks.mask_masking(visible, 1)
    assert masking is not None
    assert masking.keys is not None and masking.keys[1] == position + 4
    assert_attends_as(visible, masking)


def test_a_mask_of_one_query_is_not_read(monkeypatch):
    monkeypatch.setattr(masks, "_read_intervals", None)
    visible = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 1, 0]], dtype=torch.bool)[
        :, None, None
    ]
    masking = masks.mask_masking(visible, 3)
    assert masking is not None
    assert_attends_as(visible, masking)


def test_without_a_mask_a_causal_call_begins_in_the_first_key():
    """A static cache before its first step: torch's is_causal leaves the keys behind the queries out."""
    visible = band(4, 16, ahead=0, window=None, padding=[(0, 16)])
    assert_attends_as(visible, masks.maskless_masking(True, 4, 16, None))
    assert_attends_as(band(6, 6, 0, 3, [(0, 6)]), masks.maskless_masking(True, 6, 6, 3))
    assert masks.maskless_masking(False, 4, 16, 3) == masks.NO_MASK


@pytest.mark.parametrize("lengths", [[(3, 5), (8,), (1, 1, 6)], [(4, 4), (4, 4), (4, 4)]])
@pytest.mark.parametrize("shared", [False, True])
def test_packed_sequence_masks_become_lengths(lengths, shared):
    """Sequences behind one another in a row, each causal, as position ids that begin again make them."""
    segments = torch.stack(
        [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths]
    )
    if shared:
        segments = segments[:1].expand(3, -1)
    same = segments[:, None, :, None] == segments[:, None, None, :]
    visible = same & band(8, 8, ahead=0, window=None, padding=[(0, 8)])
    masking = masks.mask_masking(visible[:1].expand(3, -1, -1, -1) if shared else visible, 3)
    assert masking is not None
    assert (masking.name, masking.packed) == ("padding_causal", True)
    assert masking.arguments["cu_seqlens_q"] is masking.arguments["cu_seqlens_kv"]
    assert_attends_as(visible, masking)


def others() -> dict[str, torch.Tensor]:
    """Masks that no mask type describes, some of which agree with one in corners, first and last rows."""
    causal = band(8, 8, ahead=0, window=None, padding=[(0, 8)])
    segment = torch.arange(8) // 4
    hole, block, second = (causal.clone() for _ in range(3))
    hole[..., 6, 5] = False
    block[..., 2:5, 2:5] = True
    second[..., 3] = False
    return {
        "one key hidden": hole,
        "one key more": causal
        | F.one_hot(torch.tensor(7), 8).bool() & (torch.arange(8)[:, None] == 1),
        "an image in a text": block,
        "a hole in the keys": second,
        "packed sequences with a hole": hole & (segment[:, None] == segment),
        "packed windows": band(8, 8, 0, 2, [(0, 8)]) & (segment[:, None] == segment),
        "packed sequences that see all of theirs": (segment[:, None] == segment)[None, None],
        "two diagonals": torch.cat((causal, band(8, 8, 1, None, [(0, 8)]))),
        "two windows": torch.cat((band(8, 8, 0, 3, [(0, 8)]), band(8, 8, 0, 4, [(0, 8)]))),
        "more queries than keys": band(8, 4, -4, None, [(0, 4)]),
        "a bias": additive(causal) + torch.linspace(-1, 1, 8),
        "heads of their own": torch.cat((causal, ~causal), dim=1),
        "a batch of another size": causal.expand(3, -1, -1, -1),
        "three dimensions": causal[0],
    }


@pytest.mark.parametrize("name", list(others()))
def test_a_mask_that_no_type_describes_is_not_recognised(name):
    assert masks.mask_masking(others()[name], 2) is None


def test_one_flipped_mask_element_is_detected_at_any_position():
    """A mask that differs from a padded window in one pair is not recognized, or recognized as another mask."""
    visible = band(6, 6, 0, 3, [(0, 6), (0, 5)])
    for index in range(visible.numel()):
        flipped = visible.clone()
        flipped.view(-1)[index] ^= True
        masking = masks.mask_masking(flipped, 2)
        if masking is not None:
            assert_attends_as(flipped, masking, padded_queries(flipped, 0))


def padding_queries(masking: masks.Masking, batch: int, queries: int) -> torch.Tensor:
    """Queries that belong to no sequence, [b, q]."""
    bounds = masking.arguments.get("cu_seqlens_q")
    if bounds is None:
        return torch.zeros(batch, queries, dtype=torch.bool)
    lengths = bounds.diff()[-batch:]
    starts = masking.arguments.get("cu_seqlens_q_padded")
    begins = torch.zeros(batch) if starts is None else starts[1:-1] - torch.arange(batch) * queries
    position = torch.arange(queries)
    return (position < begins[:, None]) | (position >= (begins + lengths)[:, None])


def test_random_masks_are_rejected_or_right():
    drawn, recognised = random.Random(0), 0
    for _ in range(300):
        queries, keys, batch = drawn.randint(2, 6), drawn.randint(2, 9), drawn.randint(1, 3)
        ahead, window = drawn.randint(0, 9), drawn.choice([None, 1, 2, 3, 5])
        padding = [
            tuple(sorted((drawn.randint(0, keys), drawn.randint(0, keys)))) for _ in range(batch)
        ]
        visible = band(queries, keys, ahead, window, padding)
        masking = masks.mask_masking(visible, batch)
        if masking is None:
            continue
        recognised += 1
        skipped = padding_queries(masking, batch, queries)
        assert_attends_as(visible, masking, skipped)
        # Left out are queries that see nothing, or nothing behind their sequence's last key, or not their own.
        rows, position = visible[:, 0], torch.arange(keys)
        ends = (rows.any(1) * (position + 1)).amax(1)
        lasts = (rows * (position + 1)).amax(2)
        own_hidden = padded_queries(visible, 0) & (not masking.causal)
        assert (~skipped | (lasts == 0) | (lasts == ends[:, None]) | own_hidden).all()
    assert recognised > 100


def test_layers_that_share_a_mask_read_it_once(monkeypatch):
    reads = []
    read = masks._read_intervals
    monkeypatch.setattr(masks, "_read_intervals", lambda *args: reads.append(1) or read(*args))
    mask = band(8, 8, 0, 3, [(0, 8), (0, 5)])
    first = masks.mask_masking(mask, 2)
    assert masks.mask_masking(mask, 2) is first and len(reads) == 1
    mask[..., 0, 1] = True
    assert masks.mask_masking(mask, 2) is None and len(reads) == 2
    del mask
    gc.collect()
    masks.mask_masking(band(8, 8, 0, 3, [(0, 8), (0, 5)]), 2)
    assert len(reads) == 3


def test_a_mask_that_is_expanded_over_the_batch_is_read_once_for_all():
    mask = band(8, 8, ahead=0, window=None, padding=[(0, 8)]).expand(64, -1, -1, -1)
    assert mask.stride(0) == 0
    assert masks.mask_masking(mask, 64) == masks.CAUSAL


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("side", list(PADDING))
def test_padding_masks_become_lengths_on_a_gpu(side, dtype):
    """Whichever backend takes the lengths: real tokens attend as under torch's mask."""
    long = [(begin * 64, end * 64) for begin, end in PADDING[side]]
    visible = band(512, 512, ahead=0, window=None, padding=long).cuda()
    masking = masks.mask_masking(visible, 3)
    assert masking is not None and masking.name == "padding_causal"
    q, k, v = (
        torch.randn(3, 4, 512, 64, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)
    )
    core = te.DotProductAttention(4, 64, qkv_format="bshd")
    out = attend(core, q, k, v, masking)
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), visible).transpose(
        1, 2
    )
    exact = exact.masked_fill(padded_queries(visible.cpu(), 0).cuda()[:, :, None, None], 0.0)
    bound = ATTENDED if dtype == torch.float32 else {"rtol": 2**-6, "atol": 2**-6}
    torch.testing.assert_close(out.double(), exact, **bound)
    gradient = torch.randn_like(out)
    ours = torch.autograd.grad(out, (q, k, v), gradient)
    reference = torch.autograd.grad(exact, (q, k, v), gradient.double())
    for actual, right in zip(ours, reference, strict=True):
        assert torch.isfinite(actual).all()
        torch.testing.assert_close(actual, right, rtol=2**-5, atol=2**-5)


@pytest.mark.gpu
def test_a_single_query_mask_does_not_synchronize_the_gpu():
    visible = torch.ones(2, 1, 1, 64, dtype=torch.bool, device="cuda")
    visible[1, ..., :20] = False
    q, k, v = (
        torch.randn(2, HEADS, s, 64, device="cuda", dtype=torch.bfloat16) for s in (1, 64, 64)
    )
    core = te.DotProductAttention(HEADS, 64, qkv_format="bshd", attn_mask_type="no_mask")
    attend(core, q, k, v, masks.mask_masking(visible, 2))
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = attend(core, q, k, v, masks.mask_masking(visible, 2))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = F.scaled_dot_product_attention(q, k, v, visible).transpose(1, 2)
    torch.testing.assert_close(out, expected, rtol=2**-6, atol=2**-6)
