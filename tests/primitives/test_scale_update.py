"""Delayed-scaling updates: every backend against the reference, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch

from transformer_engine.common import dispatch
from transformer_engine.pytorch.primitives import scale_update
from transformer_engine.pytorch.primitives.scale_update import ScaleUpdateRequest, advance_scales

AMAXES = torch.tensor([0.0, 3.0, math.inf, math.nan, 1e-38, 448.0, 7.3e4, 1e-45, 2.0**-130, 5.0])


def states(
    lengths: list[int], device: str, seed: int = 0, widest: int = 7
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Histories with several widths, including zeros, infinities, NaNs and subnormal numbers."""
    generator = torch.Generator().manual_seed(seed)
    histories, scales = [], []
    for i, length in enumerate(lengths):
        width = 1 + (3 * i + 2) % widest if widest < 100 else widest - i
        drawn = torch.randint(0, len(AMAXES), (length, width), generator=generator)
        histories.append(AMAXES[drawn].to(device))
        scales.append((torch.rand(width, generator=generator) + 0.5).to(device))
    return histories, scales


def bits(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.view(torch.int32) for tensor in tensors]


@pytest.mark.parametrize("backend", scale_update.TABLE.names())
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("keep_idle", [False, True])
@pytest.mark.parametrize("margin", [0, 3, -2])
@pytest.mark.parametrize("length", [1, 2, 3, 16, 1024])
def test_backend_updates_equal_the_reference(device, backend, algorithm, keep_idle, margin, length):
    request = ScaleUpdateRequest(device, length, 8)
    if reason := scale_update.TABLE.named(backend).unsupported_reason(request):
        pytest.skip(reason)
    results = []
    for name in ("reference", backend):
        histories, scales = states([length] * 5, device)
        with dispatch.use_backend(scale_update=name):
            for fp8_max in (448.0, 57344.0, 448.0):
                advance_scales(histories, scales, algorithm, fp8_max, margin, keep_idle)
                for history in histories:
                    history[0, 0] = 2.5
        results.append((bits(histories), bits(scales)))
    for expected, actual in zip(results[0], results[1], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))


@pytest.mark.parametrize("backend", scale_update.TABLE.names())
def test_wide_states_are_updated_in_column_blocks(device, backend):
    if reason := scale_update.TABLE.named(backend).unsupported_reason(
        ScaleUpdateRequest(device, 1024, 192)
    ):
        pytest.skip(reason)
    results = []
    for name in ("reference", backend):
        histories, scales = states([1024] * 3, device, widest=192)
        with dispatch.use_backend(scale_update=name):
            advance_scales(histories, scales, "max", 448.0, margin=0, keep_idle=True)
        results.append((bits(histories), bits(scales)))
    for expected, actual in zip(results[0], results[1], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))


def test_states_with_different_lengths_are_updated_together(device):
    joint = states([2, 5, 2], device)
    advance_scales(*joint, "max", 448.0, 0, True)
    alone = states([2, 5, 2], device)
    for history, scale in zip(*alone, strict=True):
        advance_scales([history], [scale], "max", 448.0, margin=0, keep_idle=True)
    for expected, actual in zip(alone, joint, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(bits(expected), bits(actual), strict=True))


def test_the_kernel_rejects_unsupported_states_with_the_reason():
    reason = scale_update.triton.unsupported_reason
    assert "on cpu" in str(reason(ScaleUpdateRequest("cpu", 16, 4)))
    if scale_update.triton.launch.MISSING is None:
        assert "differ in length" in str(reason(ScaleUpdateRequest("cuda", None, 4)))
        assert "exceeds" in str(reason(ScaleUpdateRequest("cuda", 1 << 16, 1)))
        assert reason(ScaleUpdateRequest("cuda", 1024, 400)) is None


@pytest.mark.gpu
def test_a_captured_update_runs_at_every_replay():
    histories, scales = states([4], "cuda")
    graph = torch.cuda.CUDAGraph()
    warm = [h.clone() for h in histories], [s.clone() for s in scales]
    # another pair: the captured pair's table is unknown
    advance_scales(*warm, "max", 448.0, 0, False)
    with torch.cuda.graph(graph):
        advance_scales(histories, scales, "max", 448.0, margin=0, keep_idle=False)
    for amax in (1.0, 7.0):
        histories[0].fill_(amax)
        graph.replay()
        assert scales[0].tolist() == [448.0 / amax] * scales[0].shape[0]
