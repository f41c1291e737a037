"""The extension's delayed scaling, against a loop over its columns."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import transformer_engine_torch as tex

LENGTH, COLUMNS = 5, (3, 2)


def reference_step(history, scale, reduced, algorithm, maximum, margin):
    """One column's history [length] and scale after a step."""
    history = history.clone()
    history[0] = reduced if reduced != 0 else history[0]
    if history[0] == 0:
        return history, scale
    amax = history.max() if algorithm == "max" else history[0]
    return torch.cat((torch.zeros(1), history[2:], history[:1])), maximum / amax / 2**margin


@pytest.mark.parametrize("margin", [1, 0.5, np.float32(2.0), torch.tensor(1)])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize(("dtype", "maximum"), [(tex.DType.kFloat8E4M3, 448.0), (8, 57344.0)])
def test_a_step_takes_the_reduced_amaxes(algorithm, dtype, maximum, margin, device):
    generator = torch.Generator().manual_seed(0)
    histories = [torch.rand(LENGTH, n, generator=generator) for n in COLUMNS]
    histories[0][0, 1] = histories[1][0, 0] = 0.0
    scales = [torch.rand(n, generator=generator) for n in COLUMNS]
    buffer = torch.tensor([2.0, 0.0, 0.5, 3.0, 0.0])
    on_device = [[x.clone().to(device) for x in group] for group in (histories, scales)]
    tex.fused_amax_and_scale_update_after_reduction(
        buffer.to(device), *on_device, algorithm, dtype, margin
    )
    column = 0
    for i, n in enumerate(COLUMNS):
        for j in range(n):
            history, scale = reference_step(
                histories[i][:, j], scales[i][j], buffer[column], algorithm, maximum, float(margin)
            )
            torch.testing.assert_close(on_device[0][i][:, j].cpu(), history, rtol=0, atol=0)
            torch.testing.assert_close(on_device[1][i][j].cpu(), scale, rtol=1e-6, atol=0)
            column += 1


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"amax_compute_algo": "mean"}, "amax_compute_algo='mean' does not exist"),
        ({"fp8_dtype": tex.DType.kBFloat16}, "is not FP8"),
        ({"margin": float("inf")}, "margin=inf is not finite"),
        ({"amax_reduction_buffer": torch.zeros(3)}, "has 3 amaxes, the histories 2 columns"),
        ({"scales": []}, r"scales have \[\] elements"),
        ({"scales": [torch.ones(5)]}, r"scales have \[5\] elements"),
    ],
)
def test_invalid_arguments_are_rejected(changes, match):
    arguments = {
        "amax_reduction_buffer": torch.tensor([3.0, 4.0]),
        "amax_histories": [torch.zeros(4, 2)],
        "scales": [torch.ones(2)],
        "amax_compute_algo": "max",
        "fp8_dtype": tex.DType.kFloat8E4M3,
        "margin": 0,
    }
    with pytest.raises(ValueError, match=match):
        tex.fused_amax_and_scale_update_after_reduction(**{**arguments, **changes})
    assert arguments["amax_histories"][0].count_nonzero() == 0


def test_a_state_has_three_tensors_to_be_filled():
    meta = tex.FP8TensorMeta()
    meta.scale = torch.ones(3)
    assert meta.scale_inv.numel() == meta.amax_history.numel() == 0 and meta.scale.numel() == 3


def test_the_machine_has_no_userbuffers():
    assert not tex.device_supports_multicast() and not tex.ubuf_built_with_mpi()
    assert tex.get_cudnn_version() == (torch.backends.cudnn.version() or 0)
