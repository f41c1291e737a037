"""The Triton rotary embedding against the float32 reference: on a GPU, and on small shapes in the interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.primitives.by_kernels import Kernels
from tests.support.kernels import DEVICE, parametrize_sizes, runs_kernels
from tests.support.tolerances import DTYPES, MULTIPLIED
from transformer_engine.common.dispatch import use_backend
from transformer_engine.pytorch.attention.rope import ApplyPackedRope
from transformer_engine.pytorch.primitives import rope
from transformer_engine.pytorch.primitives.rope import (
    Positions,
    RopeRequest,
    RopeSpec,
    reference,
    triton,
)

kernels = Kernels(rope, "rope")

# One unit in the last place of the output format, relative to the larger member of a pair.
FORMATS = pytest.mark.parametrize("tensor_format", ["sbhd", "bshd", "thd"])
INTERLEAVED = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
# heads, features, rotated features
SMALL = [(1, 2, 2), (3, 20, 12)]
LARGE = [(3, 16, 16), (32, 128, 128), (5, 192, 64), (40, 256, 256), (8, 96, 96)]
HEADS = parametrize_sizes("heads", SMALL, LARGE, ids=str)
LENGTH = 12


def _angles(positions, rotated):
    """As different between a pair's two members as an unusual caller may have them, and large."""
    return torch.rand(positions, rotated, device=DEVICE) * 6000.0 - 3000.0


def _x(tensor_format, heads, features, dtype):
    shape = {"sbhd": (LENGTH, 2), "bshd": (2, LENGTH), "thd": (2 * LENGTH,)}[tensor_format]
    return torch.randn(*shape, heads, features, device=DEVICE).to(dtype)


def _positions(tensor_format, cp_size=1, started=False):
    start = torch.tensor([3, 7], device=DEVICE) if started else None
    if tensor_format != "thd":
        return Positions(start)
    # the rest is padding behind the last sequence
    bounds = [0, 4, 4, 20] if not started else [0, 8, 20]
    return Positions(start, torch.tensor(bounds, dtype=torch.int32, device=DEVICE) * cp_size)


def _equal(x, angles, positions, spec):
    for name in ("forward", "backward"):
        actual = getattr(kernels, f"rope_{name}")(x, angles, positions, spec)
        expected = getattr(reference, name)(x.float(), angles, positions, spec)
        tolerance = MULTIPLIED[x.dtype]
        assert actual.dtype == x.dtype and actual.shape == x.shape
        scale = x.abs().amax().item()
        torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance * scale)


@runs_kernels
@FORMATS
@INTERLEAVED
@HEADS
@DTYPES
def test_both_directions_equal_the_reference(tensor_format, interleaved, heads, dtype):
    count, features, rotated = heads
    x = _x(tensor_format, count, features, dtype)
    _equal(
        x,
        _angles(LENGTH * 2, rotated),
        _positions(tensor_format),
        RopeSpec(tensor_format, interleaved),
    )


@runs_kernels
@FORMATS
def test_start_positions_shift_each_sequence_and_stop_at_the_last_angle(tensor_format):
    x = _x(tensor_format, 2, 8, torch.float32)
    positions = _positions(tensor_format, started=True)
    _equal(x, _angles(LENGTH + 7, 8), positions, RopeSpec(tensor_format))
    _equal(x, _angles(LENGTH + 4, 8), positions, RopeSpec(tensor_format, clamps=True))


@runs_kernels
@FORMATS
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_context_parallel_rank_uses_its_two_chunks_positions(tensor_format, rank):
    x = _x(tensor_format, 2, 8, torch.float32)
    spec = RopeSpec(tensor_format, False, 3, rank)
    _equal(x, _angles(3 * 2 * LENGTH, 8), _positions(tensor_format, cp_size=3), spec)


@runs_kernels
@INTERLEAVED
def test_a_slice_from_a_joint_tensor_is_bitwise_equal_to_its_copy(interleaved):
    joint = torch.randn(6, 2, 3, 3 * 8, device=DEVICE).bfloat16()
    angles, spec = _angles(6, 8), RopeSpec("sbhd", interleaved)
    for x in (joint[..., 8:16], joint[..., ::3], joint[:, :1].expand(6, 2, 3, 24)[..., :8]):
        assert not x.is_contiguous()
        expected = kernels.rope_forward(x.contiguous(), angles, Positions(), spec)
        assert torch.equal(kernels.rope_forward(x, angles, Positions(), spec), expected)


# groups, query heads per group, features per head, per value head, rotated features in q and in k
PACKED_SMALL = [(1, 1, 4, 4, 4, 4), (3, 2, 12, 8, 8, 12), (2, 3, 6, 10, 6, 4)]
PACKED_LARGE = [(8, 4, 128, 128, 128, 128), (2, 5, 192, 128, 64, 64), (40, 1, 64, 64, 64, 64)]


@runs_kernels
@FORMATS
@INTERLEAVED
@parametrize_sizes("sizes", PACKED_SMALL, PACKED_LARGE, ids=str)
@pytest.mark.parametrize("started", [False, True])
def test_packed_qkv_is_bitwise_equal_to_separate_tensors(
    tensor_format, interleaved, sizes, started
):
    groups, heads, width, v_width, q_rotated, k_rotated = sizes
    split = (heads * width, width, v_width)
    spec, positions = (
        RopeSpec(tensor_format, interleaved),
        _positions(tensor_format, started=started),
    )
    qkv = _x(tensor_format, groups, sum(split), torch.bfloat16)
    q_angles, k_angles = _angles(LENGTH * 2, q_rotated), _angles(LENGTH * 2, k_rotated)
    q, k, v = kernels.rope_qkv_forward(qkv, q_angles, k_angles, positions, split, spec)
    parts = torch.split(qkv, list(split), dim=-1)
    separate = parts[0].reshape(*qkv.shape[:-2], -1, width)
    assert torch.equal(q, kernels.rope_forward(separate, q_angles, positions, spec))
    assert torch.equal(k, kernels.rope_forward(parts[1], k_angles, positions, spec))
    assert torch.equal(v, parts[2])
    back = kernels.rope_qkv_backward(q, k, v, q_angles, k_angles, positions, split, spec)
    dq = kernels.rope_backward(q, q_angles, positions, spec).reshape(*qkv.shape[:-1], split[0])
    dk = kernels.rope_backward(k, k_angles, positions, spec)
    assert torch.equal(back, torch.cat((dq, dk, v), -1))


@runs_kernels
@FORMATS
@parametrize_sizes("heads", [(1, 1), (3, 2)], [(8, 4), (40, 1)], ids=str)
@parametrize_sizes("widths", [(4, 4, 4), (12, 8, 12)], [(128, 128, 64), (64, 64, 64)], ids=str)
def test_separate_heads_are_bitwise_equal_to_their_parts(tensor_format, heads, widths):
    (groups, each), (width, q_rotated, k_rotated) = heads, widths
    sizes, count = (each * width, width, width), groups * (each + 2)
    spec, positions = RopeSpec(tensor_format), _positions(tensor_format, started=True)
    qkv = _x(tensor_format, count, width, torch.bfloat16)
    q_angles, k_angles = _angles(LENGTH * 2, q_rotated), _angles(LENGTH * 2, k_rotated)
    parts = kernels.rope_qkv_forward(qkv, q_angles, k_angles, positions, sizes, spec, True)
    q, k, v = torch.split(qkv, [groups * each, groups, groups], dim=-2)
    rotated = [
        kernels.rope_forward(x, a, positions, spec) for x, a in ((q, q_angles), (k, k_angles))
    ]
    assert all(torch.equal(a, b) for a, b in zip(parts, (*rotated, v), strict=True))
    back = kernels.rope_qkv_backward(*parts, q_angles, k_angles, positions, sizes, spec, True)
    dq, dk = (
        kernels.rope_backward(x, a, positions, spec)
        for x, a in zip(parts[:2], (q_angles, k_angles), strict=True)
    )
    assert back.is_contiguous() and torch.equal(back, torch.cat((dq, dk, v), -2))


@runs_kernels
def test_strided_packed_qkv_is_bitwise_equal_to_its_copy():
    joint = torch.randn(6, 2, 3, 2, 20, device=DEVICE).bfloat16()[:, :, :, 1]
    angles, spec = _angles(6, 4), RopeSpec("sbhd")
    actual = kernels.rope_qkv_forward(joint, angles, angles, Positions(), (8, 4, 8), spec)
    expected = kernels.rope_qkv_forward(
        joint.contiguous(), angles, angles, Positions(), (8, 4, 8), spec
    )
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@FORMATS
def test_a_packed_qkv_splits_and_joins_by_heads(tensor_format, device):
    shape = (6,) if tensor_format == "thd" else (6, 2) if tensor_format == "sbhd" else (2, 6)
    spec = RopeSpec(tensor_format)
    bounds = (
        torch.tensor([0, 6], dtype=torch.int32, device=device) if tensor_format == "thd" else None
    )
    qkv = torch.randn(*shape, 3, 20, device=device)
    angles = torch.randn(6, 2, device=device).repeat(1, 2)
    how = (angles, angles, Positions(None, bounds), (8, 4, 8), spec)
    q, k, v = rope.rope_qkv_forward(qkv, *how)
    assert q.shape == (*shape, 6, 4) and k.shape == (*shape, 3, 4) and torch.equal(v, qkv[..., 12:])
    torch.testing.assert_close(rope.rope_qkv_backward(q, k, v, *how), qkv)


def test_packed_qkv_gradients_equal_separate_gradients(device):
    qkv = torch.randn(4, 2, 3, 20, device=device, requires_grad=True)
    angles, sizes, spec = torch.randn(4, 4, device=device), (8, 4, 8), RopeSpec("sbhd")
    parts = ApplyPackedRope.apply(qkv, angles, angles, None, None, sizes, spec)
    gradients = [torch.randn_like(part) for part in parts]
    (dqkv,) = torch.autograd.grad(parts, qkv, gradients)
    q, k, _ = torch.split(qkv.detach(), list(sizes), dim=-1)
    q = q.reshape(4, 2, 6, 4)
    for part, x in ((parts[0], q), (parts[1], k)):
        torch.testing.assert_close(part, rope.rope_forward(x, angles, Positions(), spec))
    dq, dk = (rope.rope_backward(g, angles, Positions(), spec) for g in gradients[:2])
    torch.testing.assert_close(dqkv, torch.cat((dq.reshape(4, 2, 3, 8), dk, gradients[2]), -1))


def test_a_packed_qkv_that_does_not_split_by_heads_raises(device):
    qkv, angles = torch.randn(4, 1, 2, 20, device=device), torch.randn(4, 4, device=device)
    spec = RopeSpec("sbhd")
    with pytest.raises(ValueError, match="does not add up"):
        rope.rope_qkv_forward(qkv, angles, angles, Positions(), (8, 4, 4), spec)
    with pytest.raises(ValueError, match="not queries, keys and values"):
        rope.rope_qkv_forward(qkv, angles, angles, Positions(), (8, 4, 8), spec, True)
    with pytest.raises(ValueError, match="not a multiple"):
        rope.rope_qkv_forward(qkv, angles, angles, Positions(), (6, 4, 10), spec)
    _, k, v = rope.rope_qkv_forward(qkv, angles, angles, Positions(), (8, 4, 8), spec)
    with pytest.raises(ValueError, match="do not fit"):
        rope.rope_qkv_backward(k, k, v, angles, angles, Positions(), (8, 4, 8), spec)


@runs_kernels
def test_zero_tokens_give_an_empty_result():
    x = torch.empty(0, 2, 3, 8, device=DEVICE)
    assert kernels.rope_forward(x, _angles(4, 8), Positions(), RopeSpec("sbhd")).shape == x.shape


@runs_kernels
def test_tokens_behind_the_last_sequence_rotate_by_the_last_angles():
    x = torch.randn(5, 1, 4, device=DEVICE)
    positions = Positions(None, torch.tensor([0, 2], dtype=torch.int64, device=DEVICE))
    _equal(x, _angles(3, 4), positions, RopeSpec("thd"))
    assert kernels.rope_forward(x, _angles(3, 4), positions, RopeSpec("thd")).isfinite().all()


@runs_kernels
@FORMATS
@pytest.mark.parametrize("start", [-4, 9])
@pytest.mark.parametrize("clamps", [False, True])
def test_a_token_without_an_angle_becomes_nan_unless_it_may_be_padding(
    tensor_format, start, clamps
):
    x = _x(tensor_format, 2, 4, torch.float32)
    bounds = (
        torch.tensor([0, 12, 24], dtype=torch.int32, device=DEVICE)
        if tensor_format == "thd"
        else None
    )
    positions = Positions(torch.tensor([0, start], device=DEVICE), bounds)
    spec = RopeSpec(tensor_format, clamps=clamps)
    y = kernels.rope_forward(x, _angles(12, 4), positions, spec)
    y = y.unflatten(0, (2, 12)) if tensor_format == "thd" else y
    second = y[:, 1] if tensor_format == "sbhd" else y[1]
    first = y[:, 0] if tensor_format == "sbhd" else y[0]
    outer = torch.tensor([not 0 <= start + index < 12 for index in range(12)], device=DEVICE)
    assert first.isfinite().all()
    assert torch.equal(second.isnan().all((1, 2)), outer & torch.tensor(not clamps, device=DEVICE))


@runs_kernels
@FORMATS
@pytest.mark.parametrize("rank", [0, 1])
def test_starts_combined_with_ranks_equal_the_reference(tensor_format, rank):
    x = _x(tensor_format, 2, 4, torch.float32)
    bounds = (
        torch.tensor([0, 16, 48], dtype=torch.int32, device=DEVICE)
        if tensor_format == "thd"
        else None
    )
    positions = Positions(torch.tensor([3, 7], device=DEVICE), bounds)
    _equal(x, _angles(40, 4), positions, RopeSpec(tensor_format, cp_size=2, cp_rank=rank))


@pytest.mark.gpu
def test_compiled_code_launches_the_same_kernel_without_a_graph_break():
    x, angles, spec = _x("bshd", 4, 64, torch.bfloat16), _angles(LENGTH, 64), RopeSpec("bshd")

    def both(x, angles):
        y = rope.rope_forward(x, angles, Positions(), spec)
        return y, rope.rope_backward(y, angles, Positions(), spec)

    with use_backend(rope="triton"):
        eager, compiled = both(x, angles), torch.compile(both, fullgraph=True)(x, angles)
    assert all(torch.equal(a, b) for a, b in zip(compiled, eager, strict=True))


def test_a_tensor_on_the_cpu_is_rejected_with_the_reason():
    request = RopeRequest(
        "forward",
        (torch.Size((2, 1, 1, 8)), (8, 8, 8, 1)),
        torch.float32,
        torch.device("cpu"),
        RopeSpec("sbhd"),
    )
    assert "on cpu" in (triton.unsupported_reason(request) or "")
