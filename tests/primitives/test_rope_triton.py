"""The Triton rotary embedding against the float32 reference: on a GPU, and on small shapes in the interpreter."""

from __future__ import annotations

import os

import pytest
import torch

from transformer_engine.common.dispatch import use_backend
from transformer_engine.pytorch.primitives import rope
from transformer_engine.pytorch.primitives.rope import Positions, RopeRequest, RopeSpec, reference, triton

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
runs_kernels = pytest.mark.filterwarnings("ignore::RuntimeWarning") if INTERPRETED else pytest.mark.gpu

# One unit in the last place of the output's format, relative to the larger member of a pair.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["fp32", "fp16", "bf16"])
FORMATS = pytest.mark.parametrize("tensor_format", ["sbhd", "bshd", "thd"])
INTERLEAVED = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
# heads, features, rotated features
SMALL = [(1, 2, 2), (3, 20, 12)]
LARGE = [(3, 16, 16), (32, 128, 128), (5, 192, 64), (40, 256, 256), (8, 96, 96)]
HEADS = pytest.mark.parametrize("heads", SMALL if INTERPRETED else SMALL + LARGE, ids=str)
LENGTH = 12


def _angles(positions, rotated):
    """As different in the two members of a pair as an unusual caller may have them, and large."""
    return torch.rand(positions, rotated, device=DEVICE) * 6000.0 - 3000.0


def _x(tensor_format, heads, features, dtype):
    shape = {"sbhd": (LENGTH, 2), "bshd": (2, LENGTH), "thd": (2 * LENGTH,)}[tensor_format]
    return torch.randn(*shape, heads, features, device=DEVICE).to(dtype)


def _positions(tensor_format, cp_size=1, started=False):
    start = torch.tensor([3, 7], device=DEVICE) if started else None
    if tensor_format != "thd":
        return Positions(start)
    bounds = [0, 4, 4, 20] if not started else [0, 8, 20]  # the rest is padding behind the last sequence
    return Positions(start, torch.tensor(bounds, dtype=torch.int32, device=DEVICE) * cp_size)


def _equal(x, angles, positions, spec):
    for name in ("forward", "backward"):
        actual = triton.OPERATIONS[name](x, angles, positions, spec)
        expected = getattr(reference, name)(x.float(), angles, positions, spec)
        tolerance = TOLERANCE[x.dtype]
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
    _equal(x, _angles(LENGTH * 2, rotated), _positions(tensor_format), RopeSpec(tensor_format, interleaved))


@runs_kernels
@FORMATS
def test_start_positions_shift_each_sequence_and_stop_at_the_last_angle(tensor_format):
    x = _x(tensor_format, 2, 8, torch.float32)
    _equal(x, _angles(LENGTH + 4, 8), _positions(tensor_format, started=True), RopeSpec(tensor_format))


@runs_kernels
@FORMATS
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_context_parallel_rank_has_the_positions_of_its_two_chunks(tensor_format, rank):
    x = _x(tensor_format, 2, 8, torch.float32)
    spec = RopeSpec(tensor_format, False, 3, rank)
    _equal(x, _angles(3 * 2 * LENGTH, 8), _positions(tensor_format, cp_size=3), spec)


@runs_kernels
@INTERLEAVED
def test_a_slice_of_a_joint_tensor_gives_the_bits_of_its_copy(interleaved):
    joint = torch.randn(6, 2, 3, 3 * 8, device=DEVICE).bfloat16()
    angles, spec = _angles(6, 8), RopeSpec("sbhd", interleaved)
    for x in (joint[..., 8:16], joint[..., ::3], joint[:, :1].expand(6, 2, 3, 24)[..., :8]):
        assert not x.is_contiguous()
        expected = triton.forward(x.contiguous(), angles, Positions(), spec)
        assert torch.equal(triton.forward(x, angles, Positions(), spec), expected)


@runs_kernels
def test_no_tokens_give_no_tokens():
    x = torch.empty(0, 2, 3, 8, device=DEVICE)
    assert triton.forward(x, _angles(4, 8), Positions(), RopeSpec("sbhd")).shape == x.shape


@runs_kernels
def test_angles_without_a_position_for_every_token_are_clamped_not_read_past():
    x = torch.randn(5, 1, 4, device=DEVICE)
    positions = Positions(None, torch.tensor([0, 2], dtype=torch.int64, device=DEVICE))
    _equal(x, _angles(3, 4), positions, RopeSpec("thd"))


@pytest.mark.gpu
def test_compiled_code_reaches_the_same_kernel_without_a_graph_break():
    x, angles, spec = _x("bshd", 4, 64, torch.bfloat16), _angles(LENGTH, 64), RopeSpec("bshd")

    def both(x, angles):
        y = rope.rope_forward(x, angles, Positions(), spec)
        return y, rope.rope_backward(y, angles, Positions(), spec)

    with use_backend(rope="triton"):
        eager, compiled = both(x, angles), torch.compile(both, fullgraph=True)(x, angles)
    assert all(torch.equal(a, b) for a, b in zip(compiled, eager, strict=True))


def test_a_tensor_on_the_cpu_is_refused_with_the_reason():
    request = RopeRequest(RopeSpec("sbhd"), (2, 1, 1, 8), torch.float32, torch.device("cpu"))
    assert "on cpu" in (triton.refuses(request) or "")
